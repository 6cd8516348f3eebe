/* Storages: the memory of tensors, from allocation to release.
 *
 * Storages are reference-counted. Each tensor holds a reference, and so do each graph that uses it (a pin) and each
 * DLPack export.
 *
 * Queued work holds no reference. A stream numbers its work with tickets: stream->submitted is the last one, and the
 * device knows whether it has reached a ticket. When work is queued, nib_submit stores its ticket in the `uses` of each
 * storage that it reads or writes. There is one entry for each stream, with the last ticket that reads and the last
 * that writes; this is enough, since a stream works in order. Room for the entry is reserved before the launch, so that
 * nothing can fail after it. Old entries need not be removed: tickets only grow, and streams are reused after their
 * release and freed only with their runtime.
 *
 * When the last reference is gone, the storage is deferred (deferred.c). It is destroyed at once if its uses are done
 * and the device is in no native capture, during which drivers refuse frees. Otherwise it goes to the device's limbo,
 * which nib_reap checks when a storage is created, at a tick and after a wait. So a release never waits, and memory is
 * freed soon after the last work that uses it. An allocation that finds no memory waits for the uses of the limbo and
 * tries again. The kernel may take a millisecond to free a large block of host memory, so one of the runtime's threads
 * does that. Until then the storage is `leaving`, and its memory counts as reserved.
 *
 * Memory may belong to the host or another library (`foreign`); then `release` is called instead of a free. Memory that
 * is shared by file descriptor, and pinned memory, is freed by the driver of the GPU that allocated it.
 *
 * nib_runtime_close finishes or drops all work and frees the memory of every storage without exports. Tensors that the
 * host still holds then have no data. Exports may outlive the runtime:
 * - An export that is released on another thread before the close waits in rt->returned until the runtime's thread
 * takes it.
 * - After the close, an export is released on the thread that releases it, under the lock of exports. For foreign
 * memory `release` is called after the lock is free (rt->gone), since it may wait for a thread that wants the lock.
 * - A GPU stays open while an export needs its driver; rt->lingering counts these, and the last one closes the GPUs.
 * - The runtime's struct is freed with the last handle or export (rt->handles). */
#include "own.h"

/* ---- Release --------------------------------------------------------------------------------------------------- */

bool nib_storage_free(struct nib_storage *storage) {
  nib_device *device = storage->deferred.device, *pinned_by = storage->pinned_by;
  if (storage->foreign) {
    if (storage->release) storage->release(storage->user);
    return true;
  }
  if (storage->shared) {
    device->backend->sharing->free(device, storage->shared);
    return true;
  }
  if (!pinned_by) return device->backend->memory.free(device, storage->data, storage->bytes, &storage->deferred.uses);
  pinned_by->backend->pinned->free(pinned_by, storage->data);
  return true;
}

static void bury(struct nib_storage *storage) {
  nib_runtime *rt = storage->deferred.device->runtime;
  nib_uses_free(rt, &storage->deferred.uses);
  nib_free(rt, storage, sizeof *storage);
  nib_handle_removed(rt);
}

static void release_all(struct nib_storage *gone) {
  while (gone) {
    struct nib_storage *storage = gone;
    gone = storage->next;
    nib_storage_free(storage);
    bury(storage);
  }
}

static enum nib_end storage_destroy(struct nib_deferred *self) {
  struct nib_storage *storage = (struct nib_storage *)self;
  nib_device *device = self->device;
  nib_runtime *rt = device->runtime;
  if (storage->data || storage->foreign || storage->leaving) { /* false if closing the runtime freed it */
    /* `release` must not be called with the lock, see above. */
    bool later = rt->closed && storage->foreign;
    if (!later && !storage->leaving) {
      if (!nib_storage_free(storage)) return NIB_LATER;
      if (!rt->closed &&
          !nib_uses_idle(&self->uses)) { /* it counts as reserved until the runtime's thread has freed it */
        storage->leaving = true;
        storage->data = NULL;
        return NIB_LATER;
      }
    }
    device->memory.reserved_bytes -= storage->counted;
    if (storage->next) storage->next->previous = storage->previous;
    if (storage->previous) storage->previous->next = storage->next;
    else device->storages = storage->next;
    if (rt->closed) nib_runtime_lets_go(storage); /* its export outlived the runtime */
    if (later) {
      storage->next = rt->gone;
      rt->gone = storage;
      return NIB_GONE;
    }
  }
  bury(storage);
  return NIB_GONE;
}

void nib_storage_retain(struct nib_storage *storage) { storage->references++; }

static void release(struct nib_storage *storage) {
  if (--storage->references > 0) return;
  nib_device *device = storage->deferred.device;
  NIB_TELL(device->runtime, NIB_OBSERVED_STORAGE_FREED, .operation = "storage", .device = device,
           .storage = storage->id, .bytes = storage->bytes);
  device->memory.used_bytes -= storage->counted;
  nib_defer(&storage->deferred);
}

void nib_storage_release(struct nib_storage *storage) {
  nib_runtime *rt = storage->deferred.device->runtime;
  if (!rt->closed) {
    release(storage);
    return;
  }
  if (nib_is_forked(rt)) return; /* a thread of the parent may hold the lock */
  nib_handle_added(rt);          /* so that the lock exists until the unlock */
  nib_exports_lock(rt);
  release(storage);
  nib_exports_unlock(rt);
  nib_handle_removed(rt);
}

/* ---- The lock of exports --------------------------------------------------------------------------------------- */

void nib_exports_lock(nib_runtime *rt) {
  pthread_mutex_lock(&rt->exports_lock);
  rt->exports_depth++;
}

void nib_exports_unlock(nib_runtime *rt) {
  struct nib_storage *gone = NULL;
  if (--rt->exports_depth == 0) {
    gone = rt->gone;
    rt->gone = NULL;
  }
  pthread_mutex_unlock(&rt->exports_lock);
  release_all(gone);
}

/* ---- Creation -------------------------------------------------------------------------------------------------- */

static bool over_cap(const nib_device *device, size_t bytes) {
  uint64_t cap = device->runtime->config.memory_cap;
  return cap != 0 && (bytes > cap || device->memory.reserved_bytes > cap - bytes);
}

/* Waits for queued work that uses released storages, and frees these. */
static void make_room(nib_device *device, size_t bytes) {
  nib_log(device->runtime, NIB_LOG_WARNING, "%s: no room for %zu bytes; waiting for queued work to free memory",
          device->info.name, bytes);
  nib_drain(device);
}

static nib_status allocate(nib_device *device, const struct nib_origin *origin, struct nib_storage *storage) {
  nib_device *pinned_by = origin->pinned_by;
  if (origin->exportable)
    return device->backend->sharing->create(device, origin->bytes, &storage->data, &storage->shared);
  if (pinned_by) return pinned_by->backend->pinned->allocate(pinned_by, origin->bytes, &storage->data);
  return device->backend->memory.allocate(device, origin->bytes, &storage->data);
}

static nib_status allocate_in_cap(nib_device *device, const struct nib_origin *origin, struct nib_storage *storage) {
  nib_runtime *rt = device->runtime;
  size_t bytes = origin->bytes;
  if (over_cap(device, bytes)) make_room(device, bytes);
  if (over_cap(device, bytes))
    return nib_fail(rt, NIB_MEMORY,
                    "tensor: out of memory: cannot allocate %zu bytes on %s: %llu of its cap of %llu are in use", bytes,
                    device->info.name, (unsigned long long)device->memory.reserved_bytes,
                    (unsigned long long)rt->config.memory_cap);
  nib_status status = allocate(device, origin, storage);
  if (status == NIB_MEMORY) {
    make_room(device, bytes);
    status = allocate(device, origin, storage);
  }
  storage->counted = bytes;
  return status;
}

static void adopt(const struct nib_origin *origin, struct nib_storage *storage) {
  storage->data = origin->data;
  storage->shared = origin->shared;
  storage->foreign = !origin->shared;
  storage->release = origin->release;
  storage->user = origin->user;
  storage->read_only = origin->read_only;
}

nib_status nib_storage_create(nib_device *device, const struct nib_origin *origin, struct nib_storage **out) {
  nib_runtime *rt = device->runtime;
  nib_reap_in_time(device);
  struct nib_storage *storage = nib_allocate_zero(rt, sizeof *storage);
  if (!storage) return nib_fail_memory(rt, "tensor", sizeof *storage);
  nib_status status = NIB_OK;
  if (origin->adopted) adopt(origin, storage);
  else status = allocate_in_cap(device, origin, storage);
  if (status != NIB_OK) {
    nib_free(rt, storage, sizeof *storage);
    return status;
  }
  size_t bytes = origin->bytes;
  storage->deferred.device = device;
  storage->deferred.destroy = storage_destroy;
  storage->pinned_by = origin->pinned_by;
  storage->bytes = bytes;
  storage->id = ++rt->last_id;
  storage->references = 1;
  storage->next = device->storages;
  if (storage->next) storage->next->previous = storage;
  device->storages = storage;
  device->memory.used_bytes += storage->counted;
  device->memory.reserved_bytes += storage->counted;
  if (device->memory.reserved_bytes > device->memory.peak_bytes)
    device->memory.peak_bytes = device->memory.reserved_bytes;
  nib_handle_added(rt);
  *out = storage;
  NIB_TELL(rt, NIB_OBSERVED_STORAGE_CREATED, .operation = "storage", .device = device, .storage = storage->id,
           .bytes = bytes);
  return NIB_OK;
}
