/* Setting the observer, and reading storages without being observed (peek). */
#include "tools.h"

const char *nib_observation_name(nib_observation_kind kind) {
  static const char *const names[] = {
#define X(symbol, name) name,
    NIB_OBSERVATION_LIST(X)
#undef X
  };
  return (size_t)kind < sizeof names / sizeof *names ? names[kind] : "?";
}

void nib_runtime_observe(nib_runtime *rt, void (*function)(void *user, const nib_observation *observation),
                         void *user) {
  if (nib_enter(rt) != NIB_OK) return; /* after the close, other threads may read it */
  rt->observe = function;
  rt->observe_user = user;
}

/* ---- Peeking --------------------------------------------------------------------------------------------------- */

/* Moves a found storage to the front of the device's list. Callers mostly look for the same few, or the newest, which
 * are then found fast however many there are. */
static struct nib_storage *find_storage(nib_runtime *rt, uint64_t id) {
  for (int32_t i = 0; i < rt->device_count; i++) {
    nib_device *device = &rt->devices[i];
    for (struct nib_storage *storage = device->storages; storage; storage = storage->next) {
      if (storage->id != id || storage->leaving) continue;
      if (!storage->previous) return storage;
      storage->previous->next = storage->next;
      if (storage->next) storage->next->previous = storage->previous;
      storage->previous = NULL;
      storage->next = device->storages;
      storage->next->previous = storage;
      device->storages = storage;
      return storage;
    }
  }
  return NULL;
}

/* Whether it is a valid view: strides >= 0, and all of it inside the storage. */
static bool is_view(const nib_tensor *tensor) {
  int64_t room = (int64_t)tensor->storage->bytes, size = (int64_t)nib_dtype_bytes(tensor->dtype);
  if (size == 0 || tensor->offset_bytes < 0 || tensor->offset_bytes > room) return false;
  room -= tensor->offset_bytes;
  int64_t last = 0; /* offset of the last element, in elements */
  for (int32_t i = 0; i < tensor->ndim; i++) {
    if (tensor->shape[i] < 0 || tensor->stride[i] < 0) return false;
    if (tensor->shape[i] > 1 && tensor->stride[i] > (room / size - last) / (tensor->shape[i] - 1)) return false;
    if (tensor->shape[i] > 1) last += (tensor->shape[i] - 1) * tensor->stride[i];
  }
  return (last + 1) * size <= room;
}

nib_status nib_peek(nib_runtime *rt, uint64_t storage, nib_dtype dtype, int64_t offset_bytes, int32_t ndim,
                    const int64_t *shape, const int64_t *stride, void *data, size_t bytes) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  nib_tensor view = {
    .storage = find_storage(rt, storage), .dtype = dtype, .ndim = ndim, .offset_bytes = offset_bytes
  };
  if (!view.storage)
    return nib_fail(rt, NIB_STATE, "peek: storage: expected the number of a live storage, got %llu",
                    (unsigned long long)storage);
  status = nib_check_dtype(rt, "peek", dtype);
  if (status != NIB_OK) return status;
  if (ndim < 0 || ndim > NIB_MAX_NDIM)
    return nib_fail(rt, NIB_INVALID, "peek: shape: expected at most %d dimensions, got %d", NIB_MAX_NDIM, (int)ndim);
  bool empty = false;
  for (int32_t i = 0; i < ndim; i++) {
    view.shape[i] = shape[i];
    view.stride[i] = stride[i];
    empty |= shape[i] == 0;
  }
  if (!empty && !is_view(&view))
    return nib_fail(rt, NIB_INVALID,
                    "peek: shape: expected a view inside the storage of %zu bytes, got one that is not inside",
                    view.storage->bytes);
  size_t expected = empty ? 0 : (size_t)nib_tensor_numel(&view) * nib_dtype_bytes(dtype);
  if (bytes != expected) return nib_fail(rt, NIB_INVALID, "peek: bytes: expected %zu, got %zu", expected, bytes);
  nib_device *device = view.storage->deferred.device;
  status = nib_check_not_capturing(device, "peek");
  if (status != NIB_OK || empty) return status;
  status = nib_uses_wait(device, &view.storage->deferred.uses, true, NIB_UNLIMITED);
  return status == NIB_OK ? nib_fetch(&view, data, bytes) : status;
}
