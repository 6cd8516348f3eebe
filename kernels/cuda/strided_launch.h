/* Launches over the rows of strided tensors: copy and fill. */
#ifndef NIB_CUDA_STRIDED_LAUNCH_H
#define NIB_CUDA_STRIDED_LAUNCH_H

#include "launch.h"

/* Bytes of an element of enum nib_type. */
static inline int64_t type_size(int32_t type) {
#define X(symbol, name, bits, ...) sizeof(bits),
  static const uint8_t sizes[] = { NIB_TYPE_LIST(X, ) };
#undef X
  return sizes[type];
}

/* The largest word, up to 16 bytes, that divides each row of a tensor without gaps; one element if there is none. */
static inline int64_t word_size(const void *data, int64_t size, int32_t ndim, const int64_t *sizes,
                                const int64_t *strides) {
  if (ndim == 0 || strides[ndim - 1] != 1) return size;
  uintptr_t bits = (uintptr_t)data | (uintptr_t)(sizes[ndim - 1] * size);
  for (int32_t d = 0; d < ndim - 1; d++) bits |= (uintptr_t)(strides[d] * size);
  return bits % 16 == 0 ? 16 : size;
}

/* Threads over rows of `count` items each: x along a row, y over the rows. */
static inline void strided(int32_t ndim, const int64_t *sizes, int64_t count, int64_t items,
                           struct nib_cuda_launch *g) {
  int64_t rows = 1, x = 1;
  for (int32_t d = 0; d < ndim - 1; d++) rows *= sizes[d];
  while (x < 256 && x < count) x *= 2;
  int64_t y = at_least_1(least(256 / x, rows));
  set(g->block, x, y, 1);
  set(g->grid, least(pieces(count, x * items), INT32_MAX), least(pieces(rows, y), NIB_CUDA_MAX_Y), 1);
}

#endif
