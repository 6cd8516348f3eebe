/* Storages: the memory of tensors, from its allocation to its release.
 *
 * A storage is counted. Each tensor holds a reference, so does each graph that uses it (a pin) and each DLPack export.
 *
 * Queued work holds no reference. A stream numbers its work: the ticket of the last work is stream->submitted, and the
 * device says whether it has reached a ticket. When work is queued, nib_submit notes its ticket in the `uses` of each
 * storage that the work reads or writes: one entry a stream, with the last ticket that reads and the last that writes.
 * That is enough, as a stream works in order. Room for the entry is reserved before the launch, so that nothing can
 * fail after it. An old entry never has to be removed: tickets only grow, and a stream, though it is handed out again
 * after its release, is freed with its runtime.
 *
 * With the last reference the storage is deferred (deferred.c). It is destroyed at once if its uses are done and the
 * device is not in a native capture, during which drivers refuse to free. Otherwise it goes to the device's limbo,
 * which nib_reap looks through when a storage is created, at a tick and after a wait. So releasing never waits, and
 * memory is free soon after the last work that uses it. An allocation that finds no memory waits for the limbo's uses
 * and tries again. A large block of host memory can take the kernel a millisecond to free: one of the runtime's threads
 * does that. Until it is done the storage is `leaving` and its memory counts as reserved.
 *
 * Memory may belong to the host or another library (`foreign`): then `release` is called instead of a free. Memory that
 * is shared by file descriptor and pinned memory go back to the GPU's driver that gave them.
 *
 * nib_runtime_close finishes or drops all work and frees the memory of every storage but those with exports. Tensors
 * that the host still holds have no data from then on. Exports may outlive the runtime:
 * - One that comes back on another thread before the close waits in rt->returned; the runtime's thread takes it.
 * - After the close it is released where it comes back, under the lock of exports. What it released of foreign memory
 *   is told only after the lock is free (rt->gone), because `release` may wait for a thread that wants the lock.
 * - A GPU stays open while an export needs its driver; rt->lingering counts them, and the last closes the GPUs.
 * - The runtime's own struct is freed with the last handle or export (rt->handles). */
#include "own.h"

/* ---- Giving back ----------------------------------------------------------------------------------------------- */

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
  if (storage->data || storage->foreign || storage->leaving) { /* not when the runtime was closed before */
    /* `release` is not called with the lock, see above. */
    bool later = rt->closed && storage->foreign;
    if (!later && !storage->leaving) {
      if (!nib_storage_free(storage)) return NIB_LATER;
      if (!rt->closed && !nib_uses_idle(&self->uses)) { /* it counts until the runtime's thread has given it back */
        storage->leaving = true;
        storage->data = NULL;
        return NIB_LATER;
      }
    }
    device->memory.reserved_bytes -= storage->counted;
    if (storage->next) storage->next->previous = storage->previous;
    if (storage->previous) storage->previous->next = storage->next;
    else device->storages = storage->next;
    if (rt->closed) nib_runtime_lets_go(storage); /* it was exported beyond that */
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
  if (nib_is_forked(rt)) return; /* the lock may be another thread's of the parent */
  nib_handle_added(rt);          /* so that the lock outlives its use */
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

/* ---- Making ---------------------------------------------------------------------------------------------------- */

static bool over_cap(const nib_device *device, size_t bytes) {
  uint64_t cap = device->runtime->config.memory_cap;
  return cap != 0 && (bytes > cap || device->memory.reserved_bytes > cap - bytes);
}

/* Waits for what holds memory back. */
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
