/* The largest |x| of a strided cache. */
#include "kernel.cuh"

/* A piece is 8 elements of a row of heads * head_dim (or fewer) elements without a gap. */
template <bool NARROW> __device__ __forceinline__ void amax(const struct nib_amax_params &p, int32_t type) {
  int swapped = p.token_stride < p.head_stride; /* the dimension whose elements lie closer goes inside */
  int64_t outer = swapped ? p.heads : p.page_size, outer_stride = swapped ? p.head_stride : p.token_stride;
  int64_t inner = swapped ? p.page_size : p.heads, inner_stride = swapped ? p.token_stride : p.head_stride;
  int64_t run = p.head_dim, pages = p.num_pages;
  if (inner_stride == run || inner == 1) run *= inner, inner = 1;
  if (inner == 1 && (outer_stride == run || outer == 1)) run *= outer, outer = 1;
  if (inner == 1 && outer == 1 && (p.page_stride == run || pages == 1)) run *= pages, pages = 1;
  const int STEP = NARROW ? 1 : 8;
  int64_t steps = run / STEP, count = pages * outer * inner * steps;
  uint32_t largest = 0; /* bits of a non-negative float32, which order like it */
  for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (int64_t)gridDim.x * blockDim.x) {
    int64_t row = at < steps ? 0 : nib_divide(at, steps), step = at - row * steps;
    int64_t rest = nib_divide(row, inner), i = row - rest * inner;
    int64_t page = nib_divide(rest, outer), o = rest - page * outer;
    const uint16_t *x =
      (const uint16_t *)p.source + page * p.page_stride + o * outer_stride + i * inner_stride + step * STEP;
    uint32_t bits;
    int has_nan;
    if (NARROW) {
      bits = nib_bits_from_f32(nib_amax(x, 1, type));
    } else {
      uint4 all = *(const uint4 *)x;
      uint32_t word[4] = { all.x, all.y, all.z, all.w };
      bits = nib_bits_from_f32(nib_amax_words<4>(word, type, &has_nan));
      if (bits > NIB_F32_INFINITY) /* nothing but NaNs */
        bits = 0;
    }
    largest = bits > largest ? bits : largest;
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, largest, lane);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0 && largest > 0) atomicMax((uint32_t *)p.out, largest);
}

/* 16-byte loads. */
NIB_ENTRY(amax_bf16, 256, 6, nib_amax_params) { amax<false>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(amax_f16, 256, 6, nib_amax_params) { amax<false>(p, NIB_TYPE_FLOAT16); }

NIB_ENTRY(amax_narrow, 256, 4, nib_amax_params) { amax<true>(p, p.type); }
