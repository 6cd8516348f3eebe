/* Whether a runtime may be used, and when its parts are freed: with the last handle and the last export. */
#define _GNU_SOURCE /* madvise */
#include <sys/mman.h>
#include <unistd.h>

#include "own.h"

/* ---- Forks ----------------------------------------------------------------------------------------------------- */

/* Detects forks. Every call checks for one, and getpid would be a system call each time. So the runtime has a page that
 * the kernel zeroes in a child (MADV_WIPEONFORK); without such a page, it compares getpid. A fork handler would do,
 * too, but the library installs no handlers in the host's process. */
void nib_watch_forks(nib_runtime *rt) {
  rt->process = (int32_t)getpid();
#ifdef MADV_WIPEONFORK
  size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  char *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, bytes, MADV_WIPEONFORK) != 0) {
    munmap(page, bytes);
    return;
  }
  *page = 1;
  rt->own_process = page;
#endif
}

bool nib_is_forked(const nib_runtime *rt) {
  return rt->own_process ? *rt->own_process == 0 : rt->process != (int32_t)getpid();
}

nib_status nib_enter(nib_runtime *rt) {
  if (rt->closed) return nib_fail(rt, NIB_CLOSED, "runtime: the runtime is closed");
  if (nib_is_forked(rt))
    return nib_fail(rt, NIB_FORKED,
                    "runtime: it was created in process %d and cannot be used in its child %d after fork",
                    (int)rt->process, (int)getpid());
  if (rt->observe) rt->entered_ns = nib_now_ns();
  return NIB_OK;
}

/* ---- The end --------------------------------------------------------------------------------------------------- */

static void free_runtime(nib_runtime *rt) {
  for (int32_t i = 0; i < rt->device_count; i++) {
    nib_stream *next;
    for (nib_stream *stream = rt->devices[i].streams; stream; stream = next) {
      next = stream->next;
      nib_free(rt, stream->frontier, sizeof *stream->frontier * (size_t)stream->frontier_capacity);
      nib_free(rt, stream, sizeof *stream);
    }
  }
  pthread_mutex_destroy(&rt->exports_lock);
  if (rt->own_process) munmap((void *)rt->own_process, (size_t)sysconf(_SC_PAGESIZE));
  nib_free(rt, rt, sizeof *rt);
}

void nib_handle_added(nib_runtime *rt) { __atomic_add_fetch(&rt->handles, 1, __ATOMIC_RELAXED); }

void nib_handle_removed(nib_runtime *rt) {
  if (__atomic_sub_fetch(&rt->handles, 1, __ATOMIC_ACQ_REL) == 0 && rt->closed && !nib_is_forked(rt)) free_runtime(rt);
}

/* Whether the memory is freed by a GPU's driver. */
bool nib_needs_device(const struct nib_storage *storage) {
  return storage->pinned_by || !storage->deferred.device->backend->host_memory;
}

static void close_device(nib_device *device) {
  for (nib_stream *stream = device->streams; stream; stream = stream->next)
    if (stream->impl) device->backend->streams.close(stream);
  device->backend->close(device);
}

void nib_close_devices(nib_runtime *rt, bool host_memory) {
  for (int32_t i = 0; i < rt->device_count; i++)
    if (rt->devices[i].backend && rt->devices[i].backend->host_memory == host_memory) close_device(&rt->devices[i]);
}

void nib_runtime_lets_go(struct nib_storage *storage) {
  nib_runtime *rt = storage->deferred.device->runtime;
  if (nib_needs_device(storage) && --rt->lingering == 0) nib_close_devices(rt, false);
}
