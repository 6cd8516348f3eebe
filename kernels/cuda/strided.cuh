/* Walking one or two strided tensors of equal sizes: the innermost dimension along x, all others together along y. */
#ifndef NIB_CUDA_STRIDED_CUH
#define NIB_CUDA_STRIDED_CUH

#include "kernel.cuh"

/* The number of rows along the innermost dimension. */
static __device__ __forceinline__ int64_t nib_strided_rows(int32_t ndim, const int64_t *size) {
  int64_t rows = 1;
  for (int32_t d = 0; d < ndim - 1; d++) rows *= size[d];
  return rows;
}

/* Where a row begins in a tensor with these strides, in elements. */
static __device__ __forceinline__ void nib_strided_offsets(int32_t ndim, const int64_t *size, int64_t row,
                                                           const int64_t *first_stride, const int64_t *second_stride,
                                                           int64_t *first, int64_t *second) {
  *first = *second = 0;
  for (int32_t d = ndim - 2; d >= 0; d--) {
    int64_t rest = nib_divide(row, size[d]), index = row - rest * size[d];
    *first += index * first_stride[d];
    *second += index * second_stride[d];
    row = rest;
  }
}

#endif
