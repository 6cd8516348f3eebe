/* Tensors and their views. */
#include <stdio.h>
#include <string.h>

#include "../backend.h"

/* ---- Element types --------------------------------------------------------------------------------------------- */

static const struct {
  const char *name;
  uint8_t bytes;
  bool is_float;
} dtypes[NIB_DTYPE_COUNT] = {
  [NIB_FLOAT32] = { "float32", 4, true },   [NIB_FLOAT16] = { "float16", 2, true },
  [NIB_BFLOAT16] = { "bfloat16", 2, true }, [NIB_FLOAT8_E4M3FN] = { "float8_e4m3fn", 1, true },
  [NIB_UINT8] = { "uint8", 1, false },      [NIB_INT8] = { "int8", 1, false },
  [NIB_UINT16] = { "uint16", 2, false },    [NIB_INT32] = { "int32", 4, false },
  [NIB_INT64] = { "int64", 8, false },
};

_Static_assert((int)NIB_FLOAT32 == NIB_TYPE_FLOAT32 && (int)NIB_FLOAT16 == NIB_TYPE_FLOAT16 &&
                 (int)NIB_BFLOAT16 == NIB_TYPE_BFLOAT16 && (int)NIB_FLOAT8_E4M3FN == NIB_TYPE_FLOAT8_E4M3FN &&
                 (int)NIB_UINT8 == NIB_TYPE_UINT8 && (int)NIB_INT8 == NIB_TYPE_INT8 &&
                 (int)NIB_UINT16 == NIB_TYPE_UINT16 && (int)NIB_INT32 == NIB_TYPE_INT32 &&
                 (int)NIB_INT64 == NIB_TYPE_INT64 && NIB_MAX_NDIM == NIB_MAX_DIMS,
               "nibble.h and params.h disagree");

const char *nib_dtype_name(nib_dtype dtype) { return (unsigned)dtype < NIB_DTYPE_COUNT ? dtypes[dtype].name : "?"; }
size_t nib_dtype_bytes(nib_dtype dtype) { return (unsigned)dtype < NIB_DTYPE_COUNT ? dtypes[dtype].bytes : 0; }
bool nib_dtype_is_float(nib_dtype dtype) { return (unsigned)dtype < NIB_DTYPE_COUNT && dtypes[dtype].is_float; }

bool nib_dtype_find(const char *name, nib_dtype *out) {
  for (int i = 0; i < NIB_DTYPE_COUNT; i++)
    if (strcmp(dtypes[i].name, name) == 0) {
      *out = (nib_dtype)i;
      return true;
    }
  return false;
}

nib_status nib_check_dtype(nib_runtime *rt, const char *operation, nib_dtype dtype) {
  if ((unsigned)dtype < NIB_DTYPE_COUNT) return NIB_OK;
  return nib_fail(rt, NIB_INVALID, "%s: dtype: expected a dtype, got %d", operation, (int)dtype);
}

/* ---- Shapes ---------------------------------------------------------------------------------------------------- */

int64_t nib_shape_numel(int32_t ndim, const int64_t *shape) {
  int64_t numel = 1;
  for (int32_t i = 0; i < ndim; i++) numel *= shape[i];
  return numel;
}

static void write_sizes(int32_t ndim, const int64_t *sizes, char *text, size_t size) {
  size_t used = (size_t)snprintf(text, size, "{");
  for (int32_t i = 0; i < ndim && used < size; i++)
    used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)sizes[i]);
  if (used < size) snprintf(text + used, size - used, "}");
}

const char *nib_describe(const nib_tensor *tensor, char *text, size_t size) {
  size_t used = (size_t)snprintf(text, size, "%s ", nib_dtype_name(tensor->dtype));
  if (used < size) write_sizes(tensor->ndim, tensor->shape, text + used, size - used);
  return text;
}

bool nib_shape_fits(size_t item, int32_t ndim, const int64_t *shape) {
  int64_t bytes = (int64_t)item;
  for (int32_t i = 0; i < ndim; i++) {
    if (shape[i] > 1 && bytes > ((int64_t)1 << 62) / shape[i]) return false;
    if (shape[i] > 1) bytes *= shape[i];
  }
  return true;
}

nib_status nib_check_shape(nib_runtime *rt, const char *operation, const char *name, nib_dtype dtype, int32_t ndim,
                           const int64_t *shape) {
  if (ndim < 0 || ndim > NIB_MAX_NDIM)
    return nib_fail(rt, NIB_INVALID, "%s: %s: expected at most %d dimensions, got %d", operation, name, NIB_MAX_NDIM,
                    (int)ndim);
  for (int32_t i = 0; i < ndim; i++)
    if (shape[i] < 0)
      return nib_fail(rt, NIB_INVALID, "%s: %s: expected sizes >= 0, got %lld in dimension %lld", operation, name,
                      (long long)shape[i], (long long)i + rt->config.index_base);
  if (nib_shape_fits(nib_dtype_bytes(dtype), ndim, shape)) return NIB_OK;
  char text[NIB_DESCRIPTION];
  write_sizes(ndim, shape, text, sizeof text);
  return nib_fail(rt, NIB_INVALID, "%s: %s: expected less than 2^62 bytes, got %s of %s", operation, name, text,
                  nib_dtype_name(dtype));
}

static void set_compact_stride(nib_tensor *tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
    tensor->stride[i] = stride;
    stride *= tensor->shape[i] > 1 ? tensor->shape[i] : 1;
  }
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

static nib_status create(nib_device *device, struct nib_origin origin, nib_dtype dtype, int32_t ndim,
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
  set_compact_stride(tensor);
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
  return create(device, (struct nib_origin){ 0 }, dtype, ndim, shape, out);
}

nib_device *nib_find_pinning(nib_runtime *rt) {
  for (int32_t i = 0; i < rt->device_count; i++)
    if (rt->devices[i].default_stream && rt->devices[i].backend->pinned_allocate) return &rt->devices[i];
  nib_device *best = nib_device_best(rt);
  return best->backend->pinned_allocate ? best : NULL;
}

nib_status nib_tensor_create_pinned(nib_runtime *rt, nib_dtype dtype, int32_t ndim, const int64_t *shape,
                                    nib_tensor **out) {
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  return create(&rt->devices[0], (struct nib_origin){ .pinned_by = nib_find_pinning(rt) }, dtype, ndim, shape, out);
}

nib_status nib_tensor_create_exportable(nib_device *device, nib_dtype dtype, int32_t ndim, const int64_t *shape,
                                        nib_tensor **out) {
  nib_status status = nib_check_fds(device, "tensor", out);
  return status == NIB_OK ? create(device, (struct nib_origin){ .exportable = true }, dtype, ndim, shape, out) : status;
}

void nib_tensor_release(nib_tensor *tensor) {
  if (!tensor) return;
  nib_runtime *rt = nib_tensor_runtime(tensor);
  NIB_TELL(rt, NIB_OBSERVED_TENSOR_RELEASED, .operation = "tensor:close", .device = nib_tensor_dev(tensor),
           .storage = tensor->storage->id, .handles = tensor->storage->references - tensor->storage->pins - 1);
  nib_storage_release(tensor->storage);
  nib_free(rt, tensor, sizeof *tensor);
  nib_handle_removed(rt);
}

nib_device *nib_tensor_device(const nib_tensor *tensor) { return nib_tensor_dev(tensor); }
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

/* What a dimension, or several of one step, adds to an address: 0, step, ... up to (count - 1) * step. */
struct span {
  int64_t step, count;
  int64_t reach;   /* the largest sum of this and the smaller ones, */
  int64_t divisor; /* which divides all of their sums, */
  bool complete;   /* and whether these are all of its multiples */
};

struct spans {
  struct span of[2 * NIB_MAX_NDIM]; /* ascending steps */
  int32_t count;
};

static void add_span(struct spans *spans, int64_t step, int64_t count) {
  int32_t at = spans->count;
  if (step == 0 || count == 1) return;
  while (at > 0 && spans->of[at - 1].step > step) at--;
  if (at > 0 && spans->of[at - 1].step == step) {
    spans->of[at - 1].count += count - 1;
    return;
  }
  for (int32_t i = spans->count++; i > at; i--) spans->of[i] = spans->of[i - 1];
  spans->of[at].step = step;
  spans->of[at].count = count;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b > 0) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

#define OVERLAP_STEPS 4096

/* Whether a sum of the first `count` spans lies in low..high. Strides that interleave without a pattern may take too
 * many steps: true. */
static bool sums_meet(const struct span *spans, int32_t count, int64_t low, int64_t high, int32_t *steps) {
  int64_t reach = count > 0 ? spans[count - 1].reach : 0;
  if (high < 0 || low > reach) return false;
  if (low <= 0 || high >= reach) return true;
  const struct span *last = &spans[count - 1];
  if (last->divisor > 1 && high / last->divisor * last->divisor < low) return false;
  if (last->complete || --*steps < 0) return true;
  int64_t below = count > 1 ? spans[count - 2].reach : 0;
  int64_t first = low > below ? (low - below + last->step - 1) / last->step : 0;
  for (int64_t i = first; i < last->count && i * last->step <= high; i++)
    if (sums_meet(spans, count - 1, low - i * last->step, high - i * last->step, steps) || --*steps < 0) return true;
  return false;
}

static bool spans_meet(struct spans *spans, int64_t low, int64_t high) {
  int64_t reach = 0, divisor = 0;
  bool complete = true;
  for (int32_t i = 0; i < spans->count; i++) {
    struct span *span = &spans->of[i];
    if (divisor != 1) divisor = greatest_common_divisor(span->step, divisor);
    complete = complete && divisor == spans->of[0].step && span->step <= reach + divisor;
    reach += (span->count - 1) * span->step;
    span->reach = reach;
    span->divisor = divisor;
    span->complete = complete;
  }
  int32_t steps = OVERLAP_STEPS;
  return sums_meet(spans->of, spans->count, low, high, &steps);
}

/* Two elements share an address when strides times index differences add up to 0: those of the dimension with the
 * largest stride that differs are positive. Sorted by stride, most dimensions step over all that the smaller ones
 * reach, which tells it at once. */
bool nib_tensor_overlaps_itself(const nib_tensor *tensor) {
  int32_t order[NIB_MAX_NDIM], n = 0;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) { /* from the last, as most are sorted that way already */
    if (tensor->shape[i] == 0) return false;
    if (tensor->shape[i] == 1) continue;
    int32_t at = n++;
    for (; at > 0 && tensor->stride[order[at - 1]] > tensor->stride[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t reach = 0;
  for (int32_t i = 0; i < n; i++) {
    int64_t stride = tensor->stride[order[i]], size = tensor->shape[order[i]];
    if (stride == 0) return true;
    if (stride <= reach) {
      struct spans spans;
      spans.count = 0;
      for (int32_t k = 0; k < i; k++) add_span(&spans, tensor->stride[order[k]], 2 * tensor->shape[order[k]] - 1);
      add_span(&spans, stride, size - 1);
      if (spans_meet(&spans, reach - stride, reach - stride)) return true;
    }
    reach += (size - 1) * stride;
  }
  return false;
}

static int64_t add_spans(struct spans *spans, const nib_tensor *tensor) {
  int64_t item = (int64_t)nib_dtype_bytes(tensor->dtype), reach = 0;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
    if (tensor->shape[i] == 1) continue; /* its stride may be any number */
    add_span(spans, tensor->stride[i] * item, tensor->shape[i]);
    reach += (tensor->shape[i] - 1) * tensor->stride[i] * item;
  }
  return reach;
}

/* For tensors that are not empty. An element of b lies `distance` and b's steps behind a's first one, and a's steps
 * before its last: a's element is there when all steps together come to within the elements' sizes of a's reach. */
bool nib_tensor_overlaps(const nib_tensor *a, const nib_tensor *b) {
  if (a->storage != b->storage) return false;
  struct spans spans;
  spans.count = 0;
  int64_t distance = b->offset_bytes - a->offset_bytes, reach = add_spans(&spans, a);
  add_spans(&spans, b);
  return spans_meet(&spans, reach - distance - ((int64_t)nib_dtype_bytes(b->dtype) - 1),
                    reach - distance + (int64_t)nib_dtype_bytes(a->dtype) - 1);
}

/* ---- Views ----------------------------------------------------------------------------------------------------- */

/* A copy of the handle for a view to change, after the checks. */
static nib_status new_view(const nib_tensor *tensor, nib_tensor **out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = nib_allocate(rt, sizeof **out);
  if (!*out) return nib_fail_memory(rt, "tensor", sizeof **out);
  **out = *tensor;
  nib_storage_retain(tensor->storage);
  nib_handle_added(rt);
  return NIB_OK;
}

/* A dimension number as messages show it; wraps like the caller's own conversion did. */
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
  /* An empty view stays where it is: never past the end of the storage. */
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

/* Strides for another shape over the same elements: the old dimensions, merged where memory allows it, are cut anew. */
static bool view_stride(const nib_tensor *tensor, int32_t ndim, const int64_t *shape, int64_t *stride) {
  int32_t from = tensor->ndim - 1, to = ndim - 1;
  while (from >= 0 || to >= 0) {
    while (from >= 0 && tensor->shape[from] == 1) from--;
    if (from < 0) { /* only ones are left */
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
  write_sizes(ndim, shape, want, sizeof want);
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
  else set_compact_stride(*out);
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
  /* All in elements of the storage; nothing below can overflow, as the storage is smaller than 2^62 bytes. */
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
      int64_t bytes; /* a stride that no element uses may be too large to be multiplied */
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
