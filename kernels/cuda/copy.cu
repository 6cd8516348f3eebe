/* Strided copy with conversion between any two dtypes. */
#include "../convert.h"
#include "strided.cuh"

#define ITEMS 4 /* per thread, loaded before the first is stored */

/* The same dtype keeps every bit. Words as large as an element may have any stride; larger ones stand for several
 * elements without a gap. */
template <class WORD> __device__ __forceinline__ void copy_words(const struct nib_copy_params &p) {
  int64_t size = nib_type_size(p.source_type), rows = nib_strided_rows(p.ndim, p.size);
  int64_t count = p.ndim > 0 ? p.size[p.ndim - 1] : 1, from_step = size, to_step = size;
  if (sizeof(WORD) > (size_t)size) {
    count = count * size / (int64_t)sizeof(WORD);
    from_step = to_step = sizeof(WORD);
  } else if (p.ndim > 0) {
    from_step = p.source_stride[p.ndim - 1] * size;
    to_step = p.destination_stride[p.ndim - 1] * size;
  }
  int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < rows;
       row += (int64_t)gridDim.y * blockDim.y) {
    int64_t from_at, to_at;
    nib_strided_offsets(p.ndim, p.size, row, p.source_stride, p.destination_stride, &from_at, &to_at);
    const char *from = (const char *)p.source + from_at * size;
    char *to = (char *)p.destination + to_at * size;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += ITEMS * stride) {
      WORD word[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (at + i * stride < count) word[i] = *(const WORD *)(from + (at + i * stride) * from_step);
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (at + i * stride < count) *(WORD *)(to + (at + i * stride) * to_step) = word[i];
    }
  }
}

/* Four elements at a time between float32 and a 16-bit float, both without gaps in the innermost dimension: 16 and 8
 * bytes. */
template <int FROM, int TO> __device__ __forceinline__ void copy_floats(const struct nib_copy_params &p) {
  const int type = FROM == NIB_TYPE_FLOAT32 ? TO : FROM;
  int64_t rows = nib_strided_rows(p.ndim, p.size), count = p.ndim > 0 ? p.size[p.ndim - 1] / 4 : 0;
  int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < rows;
       row += (int64_t)gridDim.y * blockDim.y) {
    int64_t from_at, to_at;
    nib_strided_offsets(p.ndim, p.size, row, p.source_stride, p.destination_stride, &from_at, &to_at);
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += ITEMS * stride) {
      float4 wide[ITEMS];
      uint2 narrow[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        if (at + i * stride >= count) continue;
        if (FROM == NIB_TYPE_FLOAT32) wide[i] = ((const float4 *)((const float *)p.source + from_at))[at + i * stride];
        else narrow[i] = ((const uint2 *)((const uint16_t *)p.source + from_at))[at + i * stride];
      }
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        if (at + i * stride >= count) continue;
        float4 x = wide[i];
        uint2 y = narrow[i];
        if (FROM == NIB_TYPE_FLOAT32)
          ((uint2 *)((uint16_t *)p.destination + to_at))[at + i * stride] =
            make_uint2(nib_halves_from_f32(x.x, x.y, type), nib_halves_from_f32(x.z, x.w, type));
        else
          ((float4 *)((float *)p.destination + to_at))[at + i * stride] =
            make_float4(nib_f32_canonical(nib_low_half(y.x, type)), nib_f32_canonical(nib_high_half(y.x, type)),
                        nib_f32_canonical(nib_low_half(y.y, type)), nib_f32_canonical(nib_high_half(y.y, type)));
      }
    }
  }
}

NIB_ENTRY(copy_8, 256, 4, nib_copy_params) { copy_words<uint8_t>(p); }

NIB_ENTRY(copy_16, 256, 4, nib_copy_params) { copy_words<uint16_t>(p); }

NIB_ENTRY(copy_32, 256, 4, nib_copy_params) { copy_words<uint32_t>(p); }

NIB_ENTRY(copy_64, 256, 4, nib_copy_params) { copy_words<uint64_t>(p); }

NIB_ENTRY(copy_128, 256, 4, nib_copy_params) { copy_words<uint4>(p); }

NIB_ENTRY(copy_f32_f16, 256, 3, nib_copy_params) { copy_floats<NIB_TYPE_FLOAT32, NIB_TYPE_FLOAT16>(p); }

NIB_ENTRY(copy_f32_bf16, 256, 3, nib_copy_params) { copy_floats<NIB_TYPE_FLOAT32, NIB_TYPE_BFLOAT16>(p); }

NIB_ENTRY(copy_f16_f32, 256, 3, nib_copy_params) { copy_floats<NIB_TYPE_FLOAT16, NIB_TYPE_FLOAT32>(p); }

NIB_ENTRY(copy_bf16_f32, 256, 3, nib_copy_params) { copy_floats<NIB_TYPE_BFLOAT16, NIB_TYPE_FLOAT32>(p); }

/* Any two dtypes, any strides. */
NIB_ENTRY(copy_convert, 256, 4, nib_copy_params) {
  int64_t rows = nib_strided_rows(p.ndim, p.size), count = p.ndim > 0 ? p.size[p.ndim - 1] : 1;
  int64_t from_step = p.ndim > 0 ? p.source_stride[p.ndim - 1] : 0;
  int64_t to_step = p.ndim > 0 ? p.destination_stride[p.ndim - 1] : 0;
  int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < rows;
       row += (int64_t)gridDim.y * blockDim.y) {
    int64_t from_at, to_at;
    nib_strided_offsets(p.ndim, p.size, row, p.source_stride, p.destination_stride, &from_at, &to_at);
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride)
      nib_convert_element(p.source, from_at + at * from_step, p.source_type, p.destination, to_at + at * to_step,
                          p.destination_type);
  }
}
