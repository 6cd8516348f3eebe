/* Comparisons of tensors on the host: equal, allclose, max_error, amax. */
#include <math.h>
#include <string.h>

#include "../core/floats.h"
#include "tensor.h"

static bool same_shape(const nib_tensor *a, const nib_tensor *b) {
  return a->ndim == b->ndim && memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0;
}

/* Reads the elements of one tensor, or of two with the same shape, in row-major order and in pieces. Reads them in
 * place if possible, otherwise copies them. Checks the deadline before each piece. */
struct reading {
  nib_runtime *rt;
  const char *operation;
  int32_t count; /* tensors */
  struct {
    nib_tensor *tensor;
    struct nib_pieces pieces;
    void *buffer; /* NULL: in place */
    const unsigned char *data;
  } of[2];
  int64_t most, at, size; /* elements: most in a piece, before this piece, in this piece */
  nib_status status;
};

#define PIECE_OF_A_GPU 65536 /* elements; larger than NIB_PIECE, since each copy from a GPU has a latency */

static bool is_in_place(const nib_tensor *tensor) {
  return nib_tensor_device(tensor)->backend->host_memory && nib_tensor_is_contiguous(tensor);
}

static size_t buffer_bytes(const struct reading *r, const nib_tensor *tensor) {
  return (size_t)r->most * nib_dtype_bytes(tensor->dtype);
}

/* Waits for the work that writes both tensors. Call `end` when leaving before the last piece; after the last piece or a
 * failure it does nothing. */
static struct reading begin(const char *operation, nib_tensor *a, nib_tensor *b) {
  struct reading r = { .rt = nib_tensor_runtime(a), .operation = operation, .count = b ? 2 : 1, .most = NIB_PIECE };
  char want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  r.status = nib_enter(r.rt);
  if (r.status == NIB_OK && b && !same_shape(a, b))
    r.status = nib_fail(r.rt, NIB_INVALID, "%s: other: expected the shape of %s, got %s", operation,
                        nib_describe(a, want, sizeof want), nib_describe(b, have, sizeof have));
  nib_tensor *const tensors[] = { a, b };
  for (int32_t i = 0; i < r.count; i++) {
    r.of[i].tensor = tensors[i];
    if (r.status == NIB_OK) r.status = nib_tensor_wait(tensors[i], NIB_UNLIMITED);
    if (!nib_tensor_device(tensors[i])->backend->host_memory) r.most = PIECE_OF_A_GPU;
  }
  if (r.status != NIB_OK || nib_tensor_numel(a) == 0) return r;
  for (int32_t i = 0; i < r.count; i++) {
    r.of[i].pieces = nib_pieces_of(tensors[i], r.most);
    if (r.status != NIB_OK || is_in_place(tensors[i])) continue;
    r.of[i].buffer = nib_allocate(r.rt, buffer_bytes(&r, tensors[i]));
    if (!r.of[i].buffer) r.status = nib_fail_memory(r.rt, "tensor:read", buffer_bytes(&r, tensors[i]));
  }
  for (int32_t i = 0; r.status == NIB_OK && i < r.count; i++) nib_tell_host("tensor:read", tensors[i], false);
  return r;
}

static void end(struct reading *r) {
  for (int32_t i = 0; i < r->count; i++) {
    nib_free(r->rt, r->of[i].buffer, r->of[i].buffer ? buffer_bytes(r, r->of[i].tensor) : 0);
    r->of[i].buffer = NULL;
  }
}

static bool next(struct reading *r) {
  bool more = r->status == NIB_OK;
  for (int32_t i = 0; more && i < r->count; i++) more = r->of[i].pieces.whole && nib_next_piece(&r->of[i].pieces);
  if (!more) {
    end(r);
    return false;
  }
  if (nib_is_late(r->rt)) r->status = nib_fail_late(r->rt, r->operation);
  for (int32_t i = 0; r->status == NIB_OK && i < r->count; i++) {
    const struct nib_pieces *pieces = &r->of[i].pieces;
    r->at = pieces->at;
    r->size = pieces->count;
    r->of[i].data = r->of[i].buffer ? r->of[i].buffer : nib_tensor_data(&pieces->view);
    if (r->of[i].buffer)
      r->status =
        nib_fetch(&r->of[i].pieces.view, r->of[i].buffer, (size_t)pieces->count * nib_dtype_bytes(pieces->view.dtype));
  }
  if (r->status != NIB_OK) end(r);
  return r->status == NIB_OK;
}

static double element(const struct reading *r, int32_t which, int64_t i) {
  nib_dtype dtype = r->of[which].tensor->dtype;
  nib_number number = nib_element_to_number(dtype, r->of[which].data + (size_t)i * nib_dtype_bytes(dtype));
  return number.is_float ? number.real : (double)number.integer;
}

nib_status nib_tensor_equal(nib_tensor *a, nib_tensor *b, bool *out) {
  *out = false;
  if (!same_shape(a, b) || a->dtype != b->dtype) return nib_enter(nib_tensor_runtime(a));
  struct reading r = begin("tensor:equal", a, b);
  bool equal = true;
  while (equal && next(&r)) equal = memcmp(r.of[0].data, r.of[1].data, (size_t)r.size * nib_dtype_bytes(a->dtype)) == 0;
  end(&r);
  *out = equal && r.status == NIB_OK;
  return r.status;
}

nib_status nib_tensor_allclose(nib_tensor *a, nib_tensor *b, double rtol, double atol, bool equal_nan, bool *out) {
  *out = false;
  struct reading r = begin("tensor:allclose", a, b);
  bool close = true;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  while (close && next(&r))
    for (int64_t i = 0; i < r.size && close; i++) {
      double x = element(&r, 0, i), y = element(&r, 1, i);
      if (isnan(x) && isnan(y)) close = equal_nan;
      else if (isinf(x) || isinf(y)) close = x == y;
      else close = fabs(x - y) <= atol + rtol * fabs(y);
    }
  nib_floats_leave(&floats);
  end(&r);
  *out = close && r.status == NIB_OK;
  return r.status;
}

nib_status nib_tensor_max_error(nib_tensor *a, nib_tensor *b, double *error, int64_t *index) {
  *error = 0;
  *index = -1;
  struct reading r = begin("tensor:max_error", a, b);
  double most = 0;
  int64_t where = -1;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  while (!isnan(most) && next(&r))
    for (int64_t i = 0; i < r.size && !isnan(most); i++) {
      double x = element(&r, 0, i), y = element(&r, 1, i);
      double difference = x == y ? 0 : fabs(x - y);
      if (where >= 0 && difference <= most) continue;
      most = difference;
      where = r.at + i;
    }
  nib_floats_leave(&floats);
  end(&r);
  if (r.status != NIB_OK) return r.status;
  *error = most;
  *index = where;
  return NIB_OK;
}

nib_status nib_tensor_amax(nib_tensor *tensor, double *out) {
  *out = 0;
  struct reading r = begin("tensor:amax", tensor, NULL);
  double most = 0;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  while (next(&r))
    for (int64_t i = 0; i < r.size; i++) {
      double x = fabs(element(&r, 0, i));
      if (x > most) most = x;
    }
  nib_floats_leave(&floats);
  if (r.status == NIB_OK) *out = most;
  return r.status;
}
