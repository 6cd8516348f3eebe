/* Element types and shapes: names, sizes, checks, and their text in messages. */
#include <stdio.h>
#include <string.h>

#include "core.h"

#define FLOAT                            true
#define UNSIGNED                         false
#define SIGNED                           false
#define X(symbol, name, bits, kind, ...) { #name, sizeof(bits), kind },
static const struct {
  const char *name;
  uint8_t bytes;
  bool is_float;
} dtypes[NIB_DTYPE_COUNT] = { NIB_TYPE_LIST(X, ) };
#undef X

#define X(symbol, ...) (int)NIB_##symbol == NIB_TYPE_##symbol &&
_Static_assert(NIB_TYPE_LIST(X, ) NIB_MAX_NDIM == NIB_MAX_DIMS, "nibble.h and params.h disagree");
#undef X

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

void nib_write_sizes(int32_t ndim, const int64_t *sizes, char *text, size_t size) {
  size_t used = (size_t)snprintf(text, size, "{");
  for (int32_t i = 0; i < ndim && used < size; i++)
    used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)sizes[i]);
  if (used < size) snprintf(text + used, size - used, "}");
}

const char *nib_describe(const nib_tensor *tensor, char *text, size_t size) {
  size_t used = (size_t)snprintf(text, size, "%s ", nib_dtype_name(tensor->dtype));
  if (used < size) nib_write_sizes(tensor->ndim, tensor->shape, text + used, size - used);
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
  nib_write_sizes(ndim, shape, text, sizeof text);
  return nib_fail(rt, NIB_INVALID, "%s: %s: expected less than 2^62 bytes, got %s of %s", operation, name, text,
                  nib_dtype_name(dtype));
}
