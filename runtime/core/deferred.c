/* What queued work still uses: tickets of streams on storages, events and plans, and freeing behind them. */
#include <stdlib.h>

#include "../backend.h"

/* The streams may be of several devices: pinned memory is the CPU's and used by GPUs. */
static bool use_is_done(const struct nib_use *use) {
  return use->stream->device->backend->reached(use->stream, nib_use_ticket(use, false));
}

bool nib_uses_idle(struct nib_uses *uses) {
  int32_t kept = 0;
  for (int32_t i = 0; i < uses->count; i++)
    if (!use_is_done(&uses->items[i])) uses->items[kept++] = uses->items[i];
  uses->count = kept;
  return kept == 0;
}

nib_status nib_uses_reserve(nib_runtime *rt, struct nib_uses *uses) {
  if (uses->count < uses->capacity) return NIB_OK;
  nib_uses_idle(uses);
  if (uses->count < uses->capacity) return NIB_OK;
  int32_t capacity = uses->capacity ? uses->capacity * 2 : 2;
  struct nib_use *items =
    nib_reallocate(rt, uses->items, sizeof *items * (size_t)uses->capacity, sizeof *items * (size_t)capacity);
  if (!items) return nib_fail_memory(rt, "stream", sizeof *items * (size_t)capacity);
  uses->items = items;
  uses->capacity = capacity;
  return NIB_OK;
}

void nib_uses_add(struct nib_uses *uses, nib_stream *stream, uint64_t ticket, bool write) {
  struct nib_use *use = uses->items;
  for (int32_t i = 0; i < uses->count; i++, use++)
    if (use->stream == stream) {
      *(write ? &use->write : &use->read) = ticket;
      return;
    }
  uses->items[uses->count++] = (struct nib_use){ stream, write ? 0 : ticket, write ? ticket : 0 };
}

void nib_uses_free(nib_runtime *rt, struct nib_uses *uses) {
  nib_free(rt, uses->items, sizeof *uses->items * (size_t)uses->capacity);
  *uses = (struct nib_uses){ 0 };
}

/* A device that captures natively refuses to destroy anything meanwhile. */
static bool can_destroy(struct nib_deferred *object) {
  nib_device *device = object->device;
  if (device->runtime->closed) return true;
  if (device->capture && device->backend->captures_natively) return false;
  return nib_uses_idle(&object->uses);
}

void nib_defer(struct nib_deferred *object) {
  if (nib_is_forked(object->device->runtime)) return; /* its locks and threads are the parent's: leak it silently */
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

/* Each object is looked at once, and those that a deadline leaves over are first at the next call, however many there
 * are. Says whether a piece was destroyed. */
static bool reap_limbo(nib_device *device, int64_t deadline_us) {
  nib_runtime *rt = device->runtime;
  struct nib_deferred *todo = device->limbo;
  device->limbo = NULL; /* a destroyed object may put others there */
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
  while (*end) end = &(*end)->next; /* past the few that destroyed ones have left behind */
  *end = todo;
  return freed;
}

void nib_reap(nib_device *device, int64_t deadline_us) {
  nib_exports_take_back(device->runtime);
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
  if (device->limbo || device->seen) wait_for_limbo(device); /* large blocks that the runtime's thread has got now */
}

/* ---- Large blocks ---------------------------------------------------------------------------------------------- */

#define LARGE        ((size_t)8 << 20) /* bytes, from which on the kernel may take a millisecond to have them back */
#define MOST_LEAVING 200               /* blocks in the queue, which never makes anybody wait */

static nib_status free_block(void *block) {
  free(block);
  return NIB_OK;
}

/* As a host function of a stream, whose thread ends when nothing has come for a while. */
static bool free_aside(nib_runtime *rt, void *block, struct nib_uses *uses) {
  nib_device *cpu = &rt->devices[0];
  const struct nib_backend *backend = cpu->backend;
  if (rt->ending || (!rt->frees && nib_stream_open_own(cpu, &rt->frees) != NIB_OK)) return false;
  nib_stream *frees = rt->frees;
  if (frees->submitted > MOST_LEAVING && !backend->reached(frees, frees->submitted - MOST_LEAVING)) return false;
  if (uses && nib_uses_reserve(rt, uses) != NIB_OK) return false;
  if (backend->call(frees, free_block, block) != NIB_OK) return false;
  backend->stream_retire(frees);
  frees->submitted++;
  if (uses) nib_uses_add(uses, frees, frees->submitted, true);
  return true;
}

void nib_free_large(nib_runtime *rt, void *block, size_t bytes, struct nib_uses *uses) {
  bool large = block && bytes > LARGE;
  if (large && !rt->host_allocates && free_aside(rt, block, uses)) return;
  nib_free(rt, block, bytes);
  if (large && !rt->ending) rt->freed_large = true; /* after the end this may be any thread */
}
