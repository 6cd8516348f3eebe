/* Comparing tensors on the host: equal, allclose, max_error, amax. */
#include <math.h>
#include <string.h>

#include "backend.h"
#include "floats.h"

/* A tensor's elements, row-major, in host memory: in place where they can be, otherwise a copy. */
struct elements {
  const unsigned char *data;
  void *owned;
  size_t bytes;
};

static nib_status open_elements(nib_tensor *tensor, struct elements *out) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  *out = (struct elements){ .bytes = (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype) };
  nib_status status = nib_tensor_wait(tensor, NIB_UNLIMITED);
  if (status != NIB_OK || out->bytes == 0) return status;
  if (nib_tensor_dev(tensor)->backend->host_memory && nib_tensor_is_contiguous(tensor)) {
    out->data = nib_tensor_data(tensor);
    nib_tell_host("tensor:read", tensor, false);
    return NIB_OK;
  }
  out->owned = nib_allocate(rt, out->bytes);
  if (!out->owned) return nib_fail_memory(rt, "tensor:read", out->bytes);
  out->data = out->owned;
  status = nib_tensor_read(tensor, out->owned, out->bytes, NIB_UNLIMITED);
  if (status != NIB_OK) nib_free(rt, out->owned, out->bytes);
  return status;
}

static void close_elements(nib_tensor *tensor, struct elements *elements) {
  nib_free(nib_tensor_runtime(tensor), elements->owned, elements->bytes);
}

#define PIECE 16384 /* elements between two looks at the clock */

/* Before element i of a comparison: whether its time is over. */
static nib_status go_on(nib_runtime *rt, const char *operation, int64_t i) {
  return i % PIECE == 0 && nib_is_late(rt) ? nib_fail_late(rt, operation) : NIB_OK;
}

static double element(nib_dtype dtype, const struct elements *elements, int64_t i) {
  nib_number number = nib_element_to_number(dtype, elements->data + (size_t)i * nib_dtype_bytes(dtype));
  return number.is_float ? number.real : (double)number.integer;
}

static bool same_shape(const nib_tensor *a, const nib_tensor *b) {
  return a->ndim == b->ndim && memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0;
}

static nib_status open_both(const char *operation, nib_tensor *a, nib_tensor *b, struct elements *ea, struct elements *eb) {
  char want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  nib_status status = nib_enter(nib_tensor_runtime(a));
  if (status == NIB_OK && !same_shape(a, b))
    status = nib_fail(nib_tensor_runtime(a), NIB_INVALID, "%s: other: expected the shape of %s, got %s", operation,
                      nib_describe(a, want, sizeof want), nib_describe(b, have, sizeof have));
  if (status == NIB_OK) status = open_elements(a, ea);
  if (status != NIB_OK) return status;
  status = open_elements(b, eb);
  if (status != NIB_OK) close_elements(a, ea);
  return status;
}

nib_status nib_tensor_equal(nib_tensor *a, nib_tensor *b, bool *out) {
  struct elements ea, eb;
  *out = false;
  if (!same_shape(a, b) || a->dtype != b->dtype) return nib_enter(nib_tensor_runtime(a));
  nib_status status = open_both("tensor:equal", a, b, &ea, &eb);
  if (status != NIB_OK) return status;
  *out = true;
  for (size_t at = 0, piece = 0; status == NIB_OK && *out && at < ea.bytes; at += piece) {
    piece = ea.bytes - at < 16 * PIECE ? ea.bytes - at : 16 * PIECE;
    status = go_on(nib_tensor_runtime(a), "tensor:equal", 0);
    *out = status == NIB_OK && memcmp(ea.data + at, eb.data + at, piece) == 0;
  }
  close_elements(a, &ea);
  close_elements(b, &eb);
  return status;
}

nib_status nib_tensor_allclose(nib_tensor *a, nib_tensor *b, double rtol, double atol, bool equal_nan, bool *out) {
  struct elements ea, eb;
  *out = false;
  nib_status status = open_both("tensor:allclose", a, b, &ea, &eb);
  if (status != NIB_OK) return status;
  *out = true;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  for (int64_t i = 0, n = nib_tensor_numel(a); i < n && *out; i++) {
    status = go_on(nib_tensor_runtime(a), "tensor:allclose", i);
    if (status != NIB_OK) break;
    double x = element(a->dtype, &ea, i), y = element(b->dtype, &eb, i);
    if (isnan(x) && isnan(y))
      *out = equal_nan;
    else if (isinf(x) || isinf(y))
      *out = x == y;
    else
      *out = fabs(x - y) <= atol + rtol * fabs(y);
  }
  *out = *out && status == NIB_OK;
  nib_floats_leave(&floats);
  close_elements(a, &ea);
  close_elements(b, &eb);
  return status;
}

nib_status nib_tensor_max_error(nib_tensor *a, nib_tensor *b, double *error, int64_t *index) {
  struct elements ea, eb;
  *error = 0;
  *index = -1;
  nib_status status = open_both("tensor:max_error", a, b, &ea, &eb);
  if (status != NIB_OK) return status;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  for (int64_t i = 0, n = nib_tensor_numel(a); i < n && !isnan(*error); i++) {
    status = go_on(nib_tensor_runtime(a), "tensor:max_error", i);
    if (status != NIB_OK) break;
    double x = element(a->dtype, &ea, i), y = element(b->dtype, &eb, i);
    double difference = x == y ? 0 : fabs(x - y);
    if (*index >= 0 && difference <= *error) continue;
    *error = difference;
    *index = i;
  }
  nib_floats_leave(&floats);
  close_elements(a, &ea);
  close_elements(b, &eb);
  return status;
}

nib_status nib_tensor_amax(nib_tensor *tensor, double *out) {
  struct elements elements;
  *out = 0;
  nib_status status = nib_enter(nib_tensor_runtime(tensor));
  if (status == NIB_OK) status = open_elements(tensor, &elements);
  if (status != NIB_OK) return status;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  for (int64_t i = 0, n = nib_tensor_numel(tensor); i < n; i++) {
    status = go_on(nib_tensor_runtime(tensor), "tensor:amax", i);
    if (status != NIB_OK) break;
    double x = fabs(element(tensor->dtype, &elements, i));
    if (x > *out) *out = x;
  }
  nib_floats_leave(&floats);
  close_elements(tensor, &elements);
  return status;
}
