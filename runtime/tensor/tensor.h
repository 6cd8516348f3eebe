/* Tensors: views on storages, copies, and elements. Copies between devices (transfer.c) use data.c, which moves
 * elements to and from the host; both use copies on one device (copy.c). */
#ifndef NIB_TENSOR_H
#define NIB_TENSOR_H

#include "../core/core.h"

/* ---- tensor.c ---- */
/* Creates a contiguous tensor with its own storage. */
nib_status nib_tensor_create_at(nib_device *device, struct nib_origin origin, nib_dtype dtype, int32_t ndim,
                                const int64_t *shape, nib_tensor **out);
/* The same with checked shape and strides (NULL: contiguous) and an origin with its bytes. */
nib_status nib_tensor_on(nib_device *device, const struct nib_origin *origin, nib_dtype dtype, int32_t ndim,
                         const int64_t *shape, const int64_t *stride, nib_tensor **out);
/* A GPU that is open, else the first that can be opened, else NULL. */
nib_device *nib_find_pinning(nib_runtime *rt);

/* Refuses a tensor that is not on the stream's device. */
nib_status nib_check_device(const char *operation, const char *name, const nib_tensor *tensor,
                            const nib_stream *stream);
/* Refuses read-only memory and elements that overlap. */
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
/* The params of a copy, in as few dimensions as possible. `source` has the destination's shape. */
struct nib_copy_params nib_copy_params_of(const nib_tensor *destination, const nib_tensor *source);
/* Checks a copy and sets `view` to the source in the destination's shape; `view` holds no reference. */
nib_status nib_check_copy(nib_tensor *destination, nib_tensor *source, nib_tensor *view);
/* Copies between tensors of the stream's device. */
nib_status nib_copy_here(nib_stream *stream, nib_tensor *destination, nib_tensor *source);

/* ---- data.c ---- */
nib_status nib_fetch(nib_tensor *tensor, void *data,
                     size_t bytes); /* reads the elements in row-major order, when the work that writes them is done */

/* A tensor's elements in row-major order, as views of pieces, so that the deadline can be checked between two. */
struct nib_pieces {
  const nib_tensor *whole;
  nib_tensor view; /* `count` elements from element `at` on; holds no reference */
  int64_t at, count;
  int64_t numel, inner, step; /* a piece is `step` indices of dimension `dim`, of `inner` elements each */
  int32_t dim;                /* -1: the tensor is one piece */
};
struct nib_pieces nib_pieces_of(const nib_tensor *tensor, int64_t most); /* most: elements in a piece */
bool nib_next_piece(struct nib_pieces *pieces);
#define NIB_PIECE 16384 /* elements; the host copies or compares them in much less than a millisecond */

#endif
