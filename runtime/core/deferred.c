/* Objects that queued work still uses after their last reference is gone. */
#include <stdlib.h>

#include "own.h"

/* During a native capture the driver refuses to destroy objects. */
static bool can_destroy(struct nib_deferred *object) {
  nib_device *device = object->device;
  if (device->runtime->closed) return true;
  if (device->capture && device->backend->captures_natively) return false;
  return nib_uses_idle(&object->uses);
}

void nib_defer(struct nib_deferred *object) {
  if (nib_is_forked(object->device->runtime)) return; /* leak it, since locks and threads belong to the parent */
  enum nib_end end = NIB_LATER;
  if (can_destroy(object)) do
      end = object->destroy(object);
    while (end == NIB_MORE && object->device->runtime->closed);
  if (end == NIB_GONE) return;
  object->next = object->device->limbo;
  object->device->limbo = object;
}

static void gather(nib_device *device) {
  struct nib_deferred **end = &device->limbo;
  while (*end) end = &(*end)->next;
  *end = device->seen;
  device->seen = NULL;
}

/* Checks each object once. Objects that are left at the deadline come first at the next call, so that all get their
 * turn. Returns whether a piece was destroyed. */
static bool reap_limbo(nib_device *device, int64_t deadline_us) {
  nib_runtime *rt = device->runtime;
  struct nib_deferred *todo = device->limbo;
  device->limbo = NULL; /* destroying an object may defer others */
  bool freed = false;
  while (todo && (!freed || deadline_us == NIB_UNLIMITED || nib_now_us() < deadline_us)) {
    struct nib_deferred *object = todo;
    todo = object->next;
    rt->freed_large = false;
    enum nib_end end = can_destroy(object) ? object->destroy(object) : NIB_LATER;
    if (end == NIB_MORE) {
      object->next = todo;
      todo = object;
    } else if (end == NIB_LATER) {
      object->next = device->seen;
      device->seen = object;
    }
    freed = freed || end != NIB_LATER;
    if (rt->freed_large && deadline_us != NIB_UNLIMITED) break;
  }
  struct nib_deferred **end = &device->limbo;
  while (*end) end = &(*end)->next; /* after the few that were deferred meanwhile */
  *end = todo;
  return freed;
}

/* Takes the exports that were released on other threads. */
static void take_returned(nib_runtime *rt) {
  if (!__atomic_load_n(&rt->returned, __ATOMIC_ACQUIRE)) return;
  pthread_mutex_lock(&rt->exports_lock);
  struct nib_return *returned = rt->returned;
  rt->returned = NULL;
  pthread_mutex_unlock(&rt->exports_lock);
  while (returned) {
    struct nib_return *next = returned->next;
    returned->take(rt, returned);
    returned = next;
  }
}

void nib_reap(nib_device *device, int64_t deadline_us) {
  take_returned(device->runtime);
  bool all = !device->limbo || deadline_us == NIB_UNLIMITED;
  if (all) gather(device);
  if (reap_limbo(device, deadline_us) || all) return;
  gather(device);
  reap_limbo(device, deadline_us);
}

void nib_reap_in_time(nib_device *device) {
  nib_reap(device, __atomic_load_n(&device->runtime->deadline_us, __ATOMIC_RELAXED));
}

static void wait_for_limbo(nib_device *device) {
  gather(device);
  for (struct nib_deferred *object = device->limbo; object; object = object->next)
    for (int32_t i = 0; i < object->uses.count; i++) {
      struct nib_use *use = &object->uses.items[i];
      nib_device *user = use->stream->device;
      if (!user->capture || !user->backend->captures_natively)
        nib_wait(use->stream, nib_use_ticket(use, false), NIB_UNLIMITED);
    }
  nib_reap_in_time(device);
}

void nib_drain(nib_device *device) {
  if (device->capture && device->backend->captures_natively) return;
  wait_for_limbo(device);
  if (device->limbo || device->seen) wait_for_limbo(device); /* large blocks that the runtime's thread is freeing now */
}

/* ---- Large blocks ---------------------------------------------------------------------------------------------- */

#define LARGE        ((size_t)8 << 20) /* bytes; the kernel may take a millisecond to free such a block */
#define MOST_LEAVING 200               /* blocks in the queue; fewer than it has room for, so that nobody waits */

static nib_status free_block(void *block) {
  free(block);
  return NIB_OK;
}

/* Queues the free as a host function of a stream, whose thread ends after a while without work. */
static bool free_aside(nib_runtime *rt, void *block, struct nib_uses *uses) {
  nib_device *cpu = &rt->devices[0];
  const struct nib_backend *backend = cpu->backend;
  if (rt->ending || (!rt->frees && nib_stream_open_own(cpu, &rt->frees) != NIB_OK)) return false;
  nib_stream *frees = rt->frees;
  if (frees->submitted > MOST_LEAVING && !backend->streams.reached(frees, frees->submitted - MOST_LEAVING))
    return false;
  if (uses && nib_uses_reserve(rt, uses) != NIB_OK) return false;
  if (backend->streams.call(frees, free_block, block) != NIB_OK) return false;
  backend->streams.retire(frees);
  frees->submitted++;
  if (uses) nib_uses_add(uses, frees, frees->submitted, true);
  return true;
}

void nib_free_large(nib_runtime *rt, void *block, size_t bytes, struct nib_uses *uses) {
  bool large = block && bytes > LARGE;
  if (large && !rt->host_allocates && free_aside(rt, block, uses)) return;
  nib_free(rt, block, bytes);
  if (large && !rt->ending) rt->freed_large = true; /* not after the end, when this can be any thread */
}
