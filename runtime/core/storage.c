/* Storages: the memory of tensors, where it comes from and whom it goes back to. */
#include "../backend.h"

/* ---- Giving back ----------------------------------------------------------------------------------------------- */

bool nib_storage_free(struct nib_storage *storage) {
  nib_device *device = storage->deferred.device, *pinned_by = storage->pinned_by;
  if (storage->owner) {
    if (storage->release) storage->release(storage->user);
    return true;
  }
  if (storage->shared) {
    device->backend->shared_free(device, storage->shared);
    return true;
  }
  if (!pinned_by) return device->backend->memory_free(device, storage->data, storage->bytes, &storage->deferred.uses);
  pinned_by->backend->pinned_free(pinned_by, storage->data);
  return true;
}

static void bury(struct nib_storage *storage) {
  nib_runtime *rt = storage->deferred.device->runtime;
  nib_uses_free(rt, &storage->deferred.uses);
  nib_free(rt, storage, sizeof *storage);
  nib_handle_removed(rt);
}

void nib_storages_tell(struct nib_storage *gone) {
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
  if (storage->data || storage->owner || storage->leaving) { /* not when the runtime was closed before */
    /* With the lock no owner is told: he may wait for somebody who waits for it. */
    bool later = rt->closed && storage->owner;
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

/* ---- Making ---------------------------------------------------------------------------------------------------- */

static bool over_cap(const nib_device *device, size_t bytes) {
  uint64_t cap = device->runtime->config.memory_cap;
  return cap != 0 && (bytes > cap || device->memory.reserved_bytes > cap - bytes);
}

/* Waits for what holds memory back. */
static void make_room(nib_device *device, size_t bytes) {
  nib_log(device->runtime, NIB_LOG_WARNING, "%s: waits for queued work: no room for %zu bytes more", device->info.name,
          bytes);
  nib_drain(device);
}

static nib_status allocate(nib_device *device, const struct nib_origin *origin, struct nib_storage *storage) {
  nib_device *pinned_by = origin->pinned_by;
  if (origin->exportable)
    return device->backend->shared_create(device, origin->bytes, &storage->data, &storage->shared);
  if (pinned_by) return pinned_by->backend->pinned_allocate(pinned_by, origin->bytes, &storage->data);
  return device->backend->memory_allocate(device, origin->bytes, &storage->data);
}

static nib_status allocate_in_cap(nib_device *device, const struct nib_origin *origin, struct nib_storage *storage) {
  nib_runtime *rt = device->runtime;
  size_t bytes = origin->bytes;
  if (over_cap(device, bytes)) make_room(device, bytes);
  if (over_cap(device, bytes))
    return nib_fail(rt, NIB_MEMORY,
                    "tensor: memory: expected at most %llu bytes of tensors on %s (the cap), got %llu and %zu more",
                    (unsigned long long)rt->config.memory_cap, device->info.name,
                    (unsigned long long)device->memory.reserved_bytes, bytes);
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
  storage->owner = !origin->shared;
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

/* ---- Memory of the host's -------------------------------------------------------------------------------------- */

/* How many bytes the view reaches over. Everything that is asked of a view of somebody else's memory. */
static nib_status check_view(nib_runtime *rt, const char *operation, const nib_wrap_desc *desc, size_t *bytes) {
  nib_status status = nib_check_dtype(rt, operation, desc->dtype);
  if (status != NIB_OK) return status;
  if (desc->ndim > 0 && !desc->shape)
    return nib_fail(rt, NIB_INVALID, "%s: shape: expected %d sizes, got NULL", operation, (int)desc->ndim);
  status = nib_check_shape(rt, operation, "shape", desc->dtype, desc->ndim, desc->shape);
  if (status != NIB_OK) return status;
  int64_t item = (int64_t)nib_dtype_bytes(desc->dtype), numel = nib_shape_numel(desc->ndim, desc->shape);
  int64_t most = ((int64_t)1 << 62) / item, count = numel;
  for (int32_t i = 0; desc->stride && i < desc->ndim; i++)
    if (desc->stride[i] < 0)
      return nib_fail(rt, NIB_INVALID, "%s: stride: expected strides >= 0, got %lld in dimension %lld", operation,
                      (long long)desc->stride[i], (long long)i + rt->config.index_base);
  if (desc->stride && numel > 0) {
    count = 1;
    for (int32_t i = 0; i < desc->ndim; i++) {
      if (desc->shape[i] > 1 && desc->stride[i] > (most - count) / (desc->shape[i] - 1))
        return nib_fail(
          rt, NIB_INVALID,
          "%s: stride: expected less than 2^62 bytes, got stride %lld over %lld elements in dimension %lld", operation,
          (long long)desc->stride[i], (long long)desc->shape[i], (long long)i + rt->config.index_base);
      count += (desc->shape[i] - 1) * desc->stride[i];
    }
  }
  if (numel > 0 && (!desc->data || (uintptr_t)desc->data % (uintptr_t)item != 0))
    return nib_fail(rt, NIB_INVALID, "%s: data: expected an address that is a multiple of %d, got %p", operation,
                    (int)item, desc->data);
  *bytes = (size_t)(count * item);
  return NIB_OK;
}

nib_status nib_wrap(nib_device *device, nib_device *pinned_by, const char *operation, const nib_wrap_desc *desc,
                    nib_tensor **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  struct nib_origin origin = { .adopted = true,
                               .data = desc->data,
                               .release = desc->release,
                               .user = desc->user,
                               .read_only = desc->read_only,
                               .pinned_by = pinned_by };
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status == NIB_OK) status = check_view(rt, operation, desc, &origin.bytes);
  if (status == NIB_OK && origin.bytes > 0 && device->backend->memory_check)
    status = device->backend->memory_check(device, operation, desc->data);
  if (status == NIB_OK)
    status = nib_tensor_on(device, &origin, desc->dtype, desc->ndim, desc->shape, desc->stride, out);
  if (status == NIB_OK && origin.bytes > 0)
    nib_tell_host(operation, *out, true); /* whatever it holds is what the owner put there */
  return status;
}

nib_status nib_tensor_wrap_sized(nib_device *device, const nib_wrap_desc *given, size_t desc_bytes, nib_tensor **out) {
  *out = NULL;
  nib_wrap_desc desc;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = NIB_READ_DESC(device->runtime, "wrap", nib_wrap_desc, &desc, given, desc_bytes);
  return status == NIB_OK ? nib_wrap(device, NULL, "wrap", &desc, out) : status;
}

/* ---- Memory by file descriptor --------------------------------------------------------------------------------- */

nib_status nib_check_fds(nib_device *device, const char *operation, void *out) {
  *(void **)out = NULL;
  nib_status status = nib_enter(device->runtime);
  if (status != NIB_OK || device->backend->shared_import) return status;
  return nib_fail(device->runtime, NIB_INVALID,
                  "%s: device: expected a CUDA device (others share nothing by file descriptor), got %s", operation,
                  device->info.name);
}

nib_status nib_tensor_import_sized(nib_device *device, const nib_import_desc *given, size_t desc_bytes,
                                   nib_tensor **out) {
  nib_runtime *rt = device->runtime;
  nib_import_desc own;
  const nib_import_desc *desc = &own;
  nib_status status = nib_check_fds(device, "import", out);
  if (status == NIB_OK) status = NIB_READ_DESC(rt, "import", nib_import_desc, &own, given, desc_bytes);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status != NIB_OK) return status;
  if ((unsigned)desc->kind > NIB_FD_EXPORTED)
    return nib_fail(rt, NIB_INVALID, "import: kind: expected NIB_FD_OPAQUE or NIB_FD_EXPORTED, got %d",
                    (int)desc->kind);
  if (desc->bytes == 0 || desc->bytes > (uint64_t)1 << 62)
    return nib_fail(rt, NIB_INVALID, "import: bytes: expected 1..2^62, got %llu", (unsigned long long)desc->bytes);
  struct nib_origin origin = { .adopted = true, .bytes = (size_t)desc->bytes };
  int64_t size = (int64_t)desc->bytes;
  status = device->backend->shared_import(device, desc, &origin.data, &origin.shared);
  if (status != NIB_OK) return status;
  status = nib_tensor_on(device, &origin, NIB_UINT8, 1, &size, NULL, out);
  if (status != NIB_OK) {
    device->backend->shared_free(device, origin.shared);
    return status;
  }
  nib_file_close(desc->fd); /* the driver has its own */
  nib_tell_host("import", *out, true);
  return NIB_OK;
}

nib_status nib_tensor_export(nib_tensor *tensor, int *fd, uint64_t *bytes) {
  nib_device *device = nib_tensor_dev(tensor);
  *fd = -1;
  *bytes = 0;
  nib_status status = nib_enter(device->runtime);
  if (status != NIB_OK) return status;
  if (!tensor->storage->shared || tensor->storage->counted == 0)
    return nib_fail(device->runtime, NIB_INVALID,
                    "export: tensor: expected one of nib_tensor_create_exportable's, got another");
  return device->backend->shared_export(device, tensor->storage->shared, fd, bytes);
}
