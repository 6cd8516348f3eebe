/* A part of entries.h: memory and semaphores of others. */
#include <sys/mman.h>
#include <unistd.h>

#include "../../runtime/nibble_dlpack.h"

static void count_release(void *user) { ++*(int *)user; }

ENTRY(wrap) {
  static int released;
  int before = released;
  nib_wrap_desc desc = { .dtype = NIB_FLOAT32,
                         .ndim = 1,
                         .shape = (int64_t[]){ 24 },
                         .data = nib_tensor_data(w->floats),
                         .release = count_release,
                         .user = &released };
  nib_status status = nib_tensor_wrap(w->device, &desc, &w->made.tensors[0]);
  CHECK(released == before);
  return status;
}

ENTRY(dlpack) {
  struct DLManagedTensorVersioned *managed = NULL;
  intptr_t consumer = w->inside ? -1 : (intptr_t)nib_stream_handle(w->other);
  nib_status status = nib_tensor_to_dlpack(w->columns, consumer, &managed);
  CHECK((status == NIB_OK) == (managed != NULL));
  if (w->ended) CHECK(nib_tensor_from_dlpack(w->runtime, NULL, &w->made.tensors[0]) == w->ended);
  if (status != NIB_OK) return status;
  status = nib_tensor_from_dlpack(w->runtime, managed, &w->made.tensors[0]);
  if (status != NIB_OK) managed->deleter(managed);
  return status;
}

ENTRY(written) {
  if (w->inside && !w->ended) {
    CHECK(nib_tensor_written(w->floats, w->stream) == NIB_CAPTURING);
    return NIB_OK;
  }
  return nib_tensor_written(w->floats, w->other);
}

static void *find_standin(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  return library && dlsym(library, "nib_standin_fail") ? library : NULL;
}

/* Of an import: the CPU shares nothing by file descriptor, and a real driver takes no file of ours. */
static nib_status of_import(const struct world *w, nib_status status) {
  return w->ended || (w->module && find_standin()) ? status : NIB_UNAVAILABLE;
}

/* A descriptor of memory as the stand-in driver takes it. */
static int memory_file(void) {
  int fd = memfd_create("entries", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
  return fd;
}

/* What a function that failed must have left alone. */
static void check_left(nib_status status, int fd) {
  bool is_open = close(fd) == 0;
  CHECK(is_open == (status != NIB_OK));
}

ENTRY(import) {
  nib_import_desc desc = { .kind = NIB_FD_OPAQUE, .fd = memory_file(), .bytes = 4096 };
  nib_status status = nib_tensor_import(w->device, &desc, &w->made.tensors[0]);
  check_left(status, desc.fd);
  return of_import(w, status);
}

ENTRY(export) {
  nib_import_desc desc = { .kind = NIB_FD_EXPORTED, .fd = -1 };
  nib_status status = nib_tensor_create_exportable(w->device, NIB_FLOAT32, SHAPE(3, 5), &w->made.tensors[0]);
  if (status == NIB_OK) status = nib_tensor_export(w->made.tensors[0], &desc.fd, &desc.bytes);
  CHECK((status == NIB_OK) == (desc.fd >= 0));
  if (w->ended) CHECK(nib_tensor_export(w->floats, &desc.fd, &desc.bytes) == w->ended && desc.fd == -1);
  if (status == NIB_OK) {
    status = nib_tensor_import(w->device, &desc, &w->made.tensors[1]);
    check_left(status, desc.fd);
  }
  return w->module || status != NIB_INVALID ? status : NIB_UNAVAILABLE;
}

ENTRY(semaphore) {
  int fd = memory_file();
  nib_status status = nib_semaphore_import(w->device, fd, &w->made.semaphore);
  check_left(status, fd);
  if (w->ended && w->semaphore) {
    CHECK(nib_semaphore_device(w->semaphore) == w->device &&
          nib_semaphore_wait(w->stream, w->semaphore, 1) == w->ended);
    return nib_semaphore_signal(w->stream, w->semaphore, 1);
  }
  if (status != NIB_OK) return of_import(w, status);
  CHECK(nib_semaphore_device(w->made.semaphore) == w->device);
  if (w->inside) {
    CHECK(nib_semaphore_signal(w->stream, w->made.semaphore, 1) == NIB_CAPTURING);
    return NIB_OK;
  }
  status = nib_semaphore_signal(w->stream, w->made.semaphore, 1);
  if (status == NIB_OK) status = nib_semaphore_wait(w->other, w->made.semaphore, 1);
  return status;
}
