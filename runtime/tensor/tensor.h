/* Tensors: views on storages, copies, and elements. Copies on one device (copy.c) stand below what brings elements to
 * and from the host (data.c), and on both stand the copies between devices (transfer.c). */
#ifndef NIB_TENSOR_H
#define NIB_TENSOR_H

#include "../core/core.h"

/* ---- tensor.c ---- */
/* A compact tensor on a storage of its own. */
nib_status nib_tensor_create_at(nib_device *device, struct nib_origin origin, nib_dtype dtype, int32_t ndim,
                                const int64_t *shape, nib_tensor **out);
/* The same with a shape and strides (NULL: compact) that were checked, and an origin that knows its bytes. */
nib_status nib_tensor_on(nib_device *device, const struct nib_origin *origin, nib_dtype dtype, int32_t ndim,
                         const int64_t *shape, const int64_t *stride, nib_tensor **out);
/* A GPU that is open already, otherwise the first that can be opened; NULL: there is none. */
nib_device *nib_find_pinning(nib_runtime *rt);

/* Refuses a tensor that is not on the stream's device. */
nib_status nib_check_device(const char *operation, const char *name, const nib_tensor *tensor,
                            const nib_stream *stream);
/* Refuses to write memory that is lent for reading, and elements that overlap. */
nib_status nib_check_destination(const char *operation, const char *name, const nib_tensor *tensor);

static inline void nib_set_compact_stride(nib_tensor *tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
    tensor->stride[i] = stride;
    stride *= tensor->shape[i] > 1 ? tensor->shape[i] : 1;
  }
}

/* ---- overlap.c ---- */
bool nib_tensor_overlaps_itself(const nib_tensor *tensor);
bool nib_tensor_overlaps(const nib_tensor *a, const nib_tensor *b);

/* ---- copy.c ---- */
/* Both sides of a copy in the fewest dimensions. `source` has the destination's shape. */
struct nib_copy_params nib_copy_params_of(const nib_tensor *destination, const nib_tensor *source);
/* `view` becomes the source in the destination's shape; it is no handle. */
nib_status nib_check_copy(nib_tensor *destination, nib_tensor *source, nib_tensor *view);
/* Both are on the stream's device. */
nib_status nib_copy_here(nib_stream *stream, nib_tensor *destination, nib_tensor *source);

/* ---- data.c ---- */
nib_status nib_fetch(nib_tensor *tensor, void *data,
                     size_t bytes); /* the elements, row-major, once their writers are done */

/* A tensor's elements, row-major, in pieces that are views: between two there is time to look at the clock. */
struct nib_pieces {
  const nib_tensor *whole;
  nib_tensor view; /* of `count` elements from element `at` on; no handle */
  int64_t at, count;
  int64_t numel, inner, step; /* a piece is `step` of dimension `dim`, each of `inner` elements */
  int32_t dim;                /* -1: the whole is one piece */
};
struct nib_pieces nib_pieces_of(const nib_tensor *tensor, int64_t most); /* elements in a piece */
bool nib_next_piece(struct nib_pieces *pieces);
#define NIB_PIECE 16384 /* elements that the host copies or compares in much less than a millisecond */

#endif
