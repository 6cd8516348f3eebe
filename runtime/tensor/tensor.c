/* Tensors: creation, release, and their properties. */
#include <string.h>

#include "tensor.h"

nib_status nib_tensor_create_at(nib_device *device, struct nib_origin origin, nib_dtype dtype, int32_t ndim,
                                const int64_t *shape, nib_tensor **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  status = nib_check_dtype(rt, "tensor", dtype);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status == NIB_OK) status = nib_check_shape(rt, "tensor", "shape", dtype, ndim, shape);
  if (status != NIB_OK) return status;
  origin.bytes = (size_t)nib_shape_numel(ndim, shape) * nib_dtype_bytes(dtype);
  return nib_tensor_on(device, &origin, dtype, ndim, shape, NULL, out);
}

nib_status nib_tensor_on(nib_device *device, const struct nib_origin *origin, nib_dtype dtype, int32_t ndim,
                         const int64_t *shape, const int64_t *stride, nib_tensor **out) {
  nib_runtime *rt = device->runtime;
  nib_tensor *tensor = nib_allocate_zero(rt, sizeof *tensor);
  if (!tensor) return nib_fail_memory(rt, "tensor", sizeof *tensor);
  tensor->dtype = dtype;
  tensor->ndim = ndim;
  if (ndim > 0) memcpy(tensor->shape, shape, sizeof *shape * (size_t)ndim);
  nib_set_compact_stride(tensor);
  if (stride && ndim > 0) memcpy(tensor->stride, stride, sizeof *stride * (size_t)ndim);
  nib_status status = nib_storage_create(device, origin, &tensor->storage);
  if (status != NIB_OK) {
    nib_free(rt, tensor, sizeof *tensor);
    return status;
  }
  nib_handle_added(rt);
  *out = tensor;
  return NIB_OK;
}

nib_status nib_tensor_create(nib_device *device, nib_dtype dtype, int32_t ndim, const int64_t *shape,
                             nib_tensor **out) {
  return nib_tensor_create_at(device, (struct nib_origin){ 0 }, dtype, ndim, shape, out);
}

nib_device *nib_find_pinning(nib_runtime *rt) {
  for (int32_t i = 0; i < rt->device_count; i++)
    if (rt->devices[i].default_stream && rt->devices[i].backend->pinned) return &rt->devices[i];
  nib_device *best = nib_device_best(rt);
  return best->backend->pinned ? best : NULL;
}

nib_status nib_tensor_create_pinned(nib_runtime *rt, nib_dtype dtype, int32_t ndim, const int64_t *shape,
                                    nib_tensor **out) {
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  return nib_tensor_create_at(&rt->devices[0], (struct nib_origin){ .pinned_by = nib_find_pinning(rt) }, dtype, ndim,
                              shape, out);
}

void nib_tensor_release(nib_tensor *tensor) {
  if (!tensor) return;
  nib_runtime *rt = nib_tensor_runtime(tensor);
  NIB_TELL(rt, NIB_OBSERVED_TENSOR_RELEASED, .operation = "tensor:close", .device = nib_tensor_device(tensor),
           .storage = tensor->storage->id, .handles = tensor->storage->references - tensor->storage->pins - 1);
  nib_storage_release(tensor->storage);
  nib_free(rt, tensor, sizeof *tensor);
  nib_handle_removed(rt);
}

nib_device *nib_tensor_device(const nib_tensor *tensor) { return tensor->storage->deferred.device; }
nib_dtype nib_tensor_dtype(const nib_tensor *tensor) { return tensor->dtype; }
int32_t nib_tensor_ndim(const nib_tensor *tensor) { return tensor->ndim; }
const int64_t *nib_tensor_shape(const nib_tensor *tensor) { return tensor->shape; }
const int64_t *nib_tensor_stride(const nib_tensor *tensor) { return tensor->stride; }
int64_t nib_tensor_numel(const nib_tensor *tensor) { return nib_shape_numel(tensor->ndim, tensor->shape); }

void *nib_tensor_data(const nib_tensor *tensor) {
  return tensor->storage->data ? (char *)tensor->storage->data + tensor->offset_bytes : NULL;
}

bool nib_tensor_is_pinned(const nib_tensor *tensor) { return tensor->storage->pinned_by != NULL; }
bool nib_tensor_is_read_only(const nib_tensor *tensor) { return tensor->storage->read_only; }
uint64_t nib_tensor_storage(const nib_tensor *tensor) { return tensor->storage->id; }
int64_t nib_tensor_offset_bytes(const nib_tensor *tensor) { return tensor->offset_bytes; }

bool nib_tensor_is_contiguous(const nib_tensor *tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
    if (tensor->shape[i] == 0) return true;
    if (tensor->shape[i] != 1 && tensor->stride[i] != stride) return false;
    stride *= tensor->shape[i];
  }
  return true;
}

bool nib_tensor_same_view(const nib_tensor *a, const nib_tensor *b) {
  return a->storage == b->storage && a->offset_bytes == b->offset_bytes && a->dtype == b->dtype && a->ndim == b->ndim &&
         memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0 &&
         memcmp(a->stride, b->stride, sizeof *a->stride * (size_t)a->ndim) == 0;
}

/* ---- Checks ---------------------------------------------------------------------------------------------------- */

nib_status nib_check_destination(const char *operation, const char *name, const nib_tensor *tensor) {
  char text[NIB_DESCRIPTION];
  nib_status status = nib_check_writable(operation, name, tensor);
  if (status != NIB_OK || !nib_tensor_overlaps_itself(tensor)) return status;
  return nib_fail(
    nib_tensor_runtime(tensor), NIB_INVALID,
    "%s: %s: expected a tensor whose elements do not overlap in memory, got %s with a stride that repeats them",
    operation, name, nib_describe(tensor, text, sizeof text));
}

nib_status nib_check_device(const char *operation, const char *name, const nib_tensor *tensor,
                            const nib_stream *stream) {
  if (nib_tensor_device(tensor) == stream->device) return NIB_OK;
  return nib_fail(stream->device->runtime, NIB_INVALID,
                  "%s: %s: expected a tensor on the stream's device %s, got one on %s", operation, name,
                  stream->device->info.name, nib_tensor_device(tensor)->info.name);
}
