/* Views: other shapes, strides and element types on the same storage. */
#include <string.h>

#include "tensor.h"

/* A new handle for the same view, which the caller then changes. Call it after the checks. */
static nib_status new_view(const nib_tensor *tensor, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = nib_allocate(rt, sizeof **out);
  if (!*out) return nib_fail_memory(rt, "tensor", sizeof **out);
  **out = *tensor;
  nib_storage_retain(tensor->storage);
  nib_handle_added(rt);
  return NIB_OK;
}

/* A dimension as the host counts it, for messages. The sum wraps as the caller's conversion did. */
static long long shown(const nib_runtime *rt, int64_t index) {
  return (long long)((uint64_t)index + (uint64_t)rt->config.index_base);
}

static nib_status check_dim(const nib_tensor *tensor, const char *operation, const char *name, int64_t dim) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  if (dim >= 0 && dim < tensor->ndim) return NIB_OK;
  return nib_fail(rt, NIB_INVALID, "%s: %s: expected a dimension in %d..%lld, got %lld", operation, name,
                  (int)rt->config.index_base, shown(rt, tensor->ndim - 1), shown(rt, dim));
}

nib_status nib_tensor_alias(nib_tensor *tensor, nib_tensor **out) {
  *out = NULL;
  nib_status status = nib_enter(nib_tensor_runtime(tensor));
  return status != NIB_OK ? status : new_view(tensor, out);
}

nib_status nib_tensor_narrow(nib_tensor *tensor, int64_t dim, int64_t start, int64_t length, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = check_dim(tensor, "tensor:narrow", "dim", dim);
  if (status != NIB_OK) return status;
  int64_t size = tensor->shape[dim];
  if (start < 0 || start > size)
    return nib_fail(rt, NIB_INVALID, "tensor:narrow: start: expected an index in %d..%lld, got %lld",
                    (int)rt->config.index_base, shown(rt, size), shown(rt, start));
  if (length < 0 || length > size - start)
    return nib_fail(rt, NIB_INVALID,
                    "tensor:narrow: length: expected 0..%lld from start %lld in a dimension of size %lld, got %lld",
                    (long long)(size - start), shown(rt, start), (long long)size, (long long)length);
  status = new_view(tensor, out);
  if (status != NIB_OK) return status;
  (*out)->shape[dim] = length;
  /* Do not move an empty view, which could go past the end of the storage. */
  if (nib_tensor_numel(*out) > 0)
    (*out)->offset_bytes += start * tensor->stride[dim] * (int64_t)nib_dtype_bytes(tensor->dtype);
  return NIB_OK;
}

nib_status nib_tensor_select(nib_tensor *tensor, int64_t dim, int64_t index, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = check_dim(tensor, "tensor:select", "dim", dim);
  if (status != NIB_OK) return status;
  if (index < 0 || index >= tensor->shape[dim])
    return nib_fail(rt, NIB_INVALID, "tensor:select: index: expected an index in %d..%lld, got %lld",
                    (int)rt->config.index_base, shown(rt, tensor->shape[dim] - 1), shown(rt, index));
  status = new_view(tensor, out);
  if (status != NIB_OK) return status;
  nib_tensor *view = *out;
  view->ndim--;
  for (int32_t i = (int32_t)dim; i < view->ndim; i++) {
    view->shape[i] = tensor->shape[i + 1];
    view->stride[i] = tensor->stride[i + 1];
  }
  if (nib_tensor_numel(view) > 0)
    view->offset_bytes += index * tensor->stride[dim] * (int64_t)nib_dtype_bytes(tensor->dtype);
  return NIB_OK;
}

/* Finds strides for another shape of the same elements: merges old dimensions where memory allows it and splits them
 * again. */
static bool view_stride(const nib_tensor *tensor, int32_t ndim, const int64_t *shape, int64_t *stride) {
  int32_t from = tensor->ndim - 1, to = ndim - 1;
  while (from >= 0 || to >= 0) {
    while (from >= 0 && tensor->shape[from] == 1) from--;
    if (from < 0) { /* only sizes of 1 are left */
      for (; to >= 0; to--) stride[to] = to + 1 < ndim ? stride[to + 1] * shape[to + 1] : 1;
      return true;
    }
    int64_t step = tensor->stride[from], chunk = tensor->shape[from];
    while (--from >= 0 && (tensor->shape[from] == 1 || tensor->stride[from] == step * chunk))
      chunk *= tensor->shape[from];
    while (to >= 0 && (chunk > 1 || shape[to] == 1)) {
      if (chunk % shape[to] != 0) return false;
      stride[to] = step;
      step *= shape[to];
      chunk /= shape[to--];
    }
    if (chunk > 1) return false;
  }
  return true;
}

nib_status nib_tensor_view(nib_tensor *tensor, int32_t ndim, const int64_t *shape, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  char want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  if (ndim < 0 || ndim > NIB_MAX_NDIM) return nib_check_shape(rt, "tensor:view", "shape", tensor->dtype, ndim, shape);
  int64_t sizes[NIB_MAX_NDIM] = { 0 }, numel = nib_tensor_numel(tensor);
  int32_t open = -1;
  for (int32_t i = 0; i < ndim; i++) {
    sizes[i] = shape[i];
    if (shape[i] != -1) continue;
    if (open >= 0) return nib_fail(rt, NIB_INVALID, "tensor:view: shape: expected at most one -1, got two");
    open = i;
    sizes[i] = 1;
  }
  status = nib_check_shape(rt, "tensor:view", "shape", tensor->dtype, ndim, sizes);
  if (status != NIB_OK) return status;
  int64_t rest = nib_shape_numel(ndim, sizes);
  if (open >= 0 && rest > 0) sizes[open] = numel / rest;
  nib_write_sizes(ndim, shape, want, sizeof want);
  if ((open >= 0 && rest == 0) || nib_shape_numel(ndim, sizes) != numel)
    return nib_fail(rt, NIB_INVALID, "tensor:view: shape: expected a shape of %lld elements, got %s", (long long)numel,
                    want);
  int64_t stride[NIB_MAX_NDIM];
  if (numel > 0 && !view_stride(tensor, ndim, sizes, stride))
    return nib_fail(rt, NIB_INVALID,
                    "tensor:view: shape: expected a shape that the strides allow (use contiguous first), got %s for %s",
                    want, nib_describe(tensor, have, sizeof have));
  status = new_view(tensor, out);
  if (status != NIB_OK) return status;
  (*out)->ndim = ndim;
  memcpy((*out)->shape, sizes, sizeof *sizes * (size_t)ndim);
  if (numel > 0) memcpy((*out)->stride, stride, sizeof *stride * (size_t)ndim);
  else nib_set_compact_stride(*out);
  return NIB_OK;
}

nib_status nib_tensor_permute(nib_tensor *tensor, int32_t ndim, const int64_t *dims, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (ndim != tensor->ndim)
    return nib_fail(rt, NIB_INVALID, "tensor:permute: dims: expected %d dimensions, got %d", (int)tensor->ndim,
                    (int)ndim);
  unsigned seen = 0;
  for (int32_t i = 0; i < ndim; i++) {
    status = check_dim(tensor, "tensor:permute", "dims", dims[i]);
    if (status != NIB_OK) return status;
    if (seen & 1u << dims[i])
      return nib_fail(rt, NIB_INVALID, "tensor:permute: dims: expected each dimension once, got %lld twice",
                      shown(rt, dims[i]));
    seen |= 1u << dims[i];
  }
  status = new_view(tensor, out);
  if (status != NIB_OK) return status;
  for (int32_t i = 0; i < ndim; i++) {
    (*out)->shape[i] = tensor->shape[dims[i]];
    (*out)->stride[i] = tensor->stride[dims[i]];
  }
  return NIB_OK;
}

nib_status nib_tensor_expand(nib_tensor *tensor, int32_t ndim, const int64_t *shape, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  char have[NIB_DESCRIPTION];
  if (ndim < tensor->ndim || ndim > NIB_MAX_NDIM)
    return nib_fail(rt, NIB_INVALID, "tensor:expand: shape: expected %d..%d dimensions, got %d", (int)tensor->ndim,
                    NIB_MAX_NDIM, (int)ndim);
  int64_t sizes[NIB_MAX_NDIM], stride[NIB_MAX_NDIM];
  for (int32_t i = 0; i < ndim; i++) {
    int32_t from = i - (ndim - tensor->ndim);
    int64_t size = from >= 0 ? tensor->shape[from] : 1;
    sizes[i] = shape[i] == -1 && from >= 0 ? size : shape[i];
    stride[i] = from >= 0 && size == sizes[i] ? tensor->stride[from] : 0;
    if (size != sizes[i] && (size != 1 || sizes[i] < 0))
      return nib_fail(rt, NIB_INVALID, "tensor:expand: shape: expected size %lld%s in dimension %lld of %s, got %lld",
                      (long long)size, size == 1 ? " or more" : "", shown(rt, i),
                      nib_describe(tensor, have, sizeof have), (long long)shape[i]);
  }
  status = nib_check_shape(rt, "tensor:expand", "shape", tensor->dtype, ndim, sizes);
  if (status == NIB_OK) status = new_view(tensor, out);
  if (status != NIB_OK) return status;
  (*out)->ndim = ndim;
  memcpy((*out)->shape, sizes, sizeof *sizes * (size_t)ndim);
  memcpy((*out)->stride, stride, sizeof *stride * (size_t)ndim);
  return NIB_OK;
}

nib_status nib_tensor_as_strided(nib_tensor *tensor, int32_t ndim, const int64_t *shape, const int64_t *stride,
                                 int64_t offset, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_shape(rt, "tensor:as_strided", "size", tensor->dtype, ndim, shape);
  if (status != NIB_OK) return status;
  /* In elements of the storage. Nothing below overflows, since the storage is smaller than 2^62 bytes. */
  int64_t item = (int64_t)nib_dtype_bytes(tensor->dtype);
  int64_t before = tensor->offset_bytes / item, size = (int64_t)tensor->storage->bytes / item;
  if (tensor->offset_bytes % item != 0) size = before + ((int64_t)tensor->storage->bytes - tensor->offset_bytes) / item;
  if (offset < -before || offset > size - before)
    return nib_fail(rt, NIB_INVALID, "tensor:as_strided: offset: expected %lld..%lld elements, got %lld",
                    (long long)-before, (long long)(size - before), (long long)offset);
  int64_t last = before + offset, numel = nib_shape_numel(ndim, shape);
  for (int32_t i = 0; i < ndim; i++) {
    if (stride[i] < 0)
      return nib_fail(rt, NIB_INVALID, "tensor:as_strided: stride: expected strides >= 0, got %lld in dimension %lld",
                      (long long)stride[i], shown(rt, i));
    if (numel == 0 || shape[i] == 1 || stride[i] == 0) continue;
    if (stride[i] > (size - 1 - last) / (shape[i] - 1)) {
      return nib_fail(
        rt, NIB_INVALID,
        "tensor:as_strided: stride: expected a view inside the storage of %lld elements, got stride %lld over %lld "
        "elements in dimension %lld",
        (long long)size, (long long)stride[i], (long long)shape[i], shown(rt, i));
    }
    last += (shape[i] - 1) * stride[i];
  }
  if (numel > 0 && last >= size)
    return nib_fail(rt, NIB_INVALID,
                    "tensor:as_strided: offset: expected an element of the storage, got the end (%lld)",
                    (long long)offset);
  status = new_view(tensor, out);
  if (status != NIB_OK) return status;
  (*out)->ndim = ndim;
  (*out)->offset_bytes += numel > 0 ? offset * item : 0;
  if (ndim > 0) {
    memcpy((*out)->shape, shape, sizeof *shape * (size_t)ndim);
    memcpy((*out)->stride, stride, sizeof *stride * (size_t)ndim);
  }
  return NIB_OK;
}

nib_status nib_tensor_reinterpret(nib_tensor *tensor, nib_dtype dtype, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_dtype(rt, "tensor:reinterpret", dtype);
  if (status != NIB_OK) return status;
  char have[NIB_DESCRIPTION];
  int64_t old_item = (int64_t)nib_dtype_bytes(tensor->dtype), item = (int64_t)nib_dtype_bytes(dtype);
  nib_tensor view = *tensor;
  view.dtype = dtype;
  if (item != old_item) {
    int32_t last = tensor->ndim - 1;
    bool fits = last >= 0 && (tensor->stride[last] == 1 || tensor->shape[last] <= 1) &&
                tensor->shape[last] * old_item % item == 0 && tensor->offset_bytes % item == 0;
    for (int32_t i = 0; fits && i < last; i++) {
      int64_t bytes; /* the stride of a dimension of size 1 may be too large to multiply */
      bool known = !__builtin_mul_overflow(tensor->stride[i], old_item, &bytes);
      fits = tensor->shape[i] <= 1 || (known && bytes % item == 0);
      if (known) view.stride[i] = bytes / item;
    }
    if (!fits)
      return nib_fail(
        rt, NIB_INVALID,
        "tensor:reinterpret: dtype: expected a last dimension, strides and an offset that %s elements divide, got %s",
        nib_dtype_name(dtype), nib_describe(tensor, have, sizeof have));
    view.shape[last] = tensor->shape[last] * old_item / item;
    view.stride[last] = 1;
  }
  status = new_view(tensor, out);
  if (status == NIB_OK) **out = view;
  return status;
}
