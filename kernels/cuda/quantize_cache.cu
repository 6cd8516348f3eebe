/* A whole cache quantized in one go. */
#include "kernel.cuh"
#include "mapping.h"

/* blockIdx is [heads, tokens, pages] from z to x; for threads see mapping.h. */
template <bool NARROW, bool FOUR_OVER_SIX = false>
__device__ __forceinline__ void quantize_cache(const struct nib_quantize_cache_params &p, int32_t type) {
  int tokens_inside = nib_quantize_tokens_inside(&p);
  uint32_t tokens_here = tokens_inside ? blockDim.y : blockDim.z,
           token_here = tokens_inside ? threadIdx.y : threadIdx.z;
  uint32_t heads_here = tokens_inside ? blockDim.z : blockDim.y, head_here = tokens_inside ? threadIdx.z : threadIdx.y;
  uint32_t blocks = (uint32_t)(p.head_dim / NIB_BLOCK), quarter = blocks / 4;
  int first_thread =
    blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
  float global_sf = p.amax ? 448.0f / (*p.amax > 1e-12f ? *p.amax : 1e-12f) : nib_scale_read(&p.global_sf);
  float global = 1.0f / global_sf;
  int refused = !nib_scale_is_valid(global_sf) || !nib_scale_is_valid(global);
  if (first_thread) {
    *p.out_scale = nib_f32_canonical(global);
    if (refused && !p.amax)
      nib_fault_raise(p.fault, NIB_OPERATION_QUANTIZE_CACHE, (uint32_t)p.scale_content, 0, 1, 0, global_sf);
  }
  for (int64_t page = blockIdx.x; page < p.num_pages; page += gridDim.x)
    for (int64_t token = (int64_t)blockIdx.y * tokens_here + token_here; token < p.page_size;
         token += (int64_t)gridDim.y * tokens_here)
      for (int64_t head = (int64_t)blockIdx.z * heads_here + head_here; head < p.heads;
           head += (int64_t)gridDim.z * heads_here) {
        const uint16_t *x = (const uint16_t *)p.source + page * p.source_page_stride + token * p.source_token_stride +
                            head * p.source_head_stride;
        for (uint32_t block = threadIdx.x; block < blocks; block += blockDim.x) {
          uint32_t word[8], packed[2] = { 0, 0 };
          uint8_t byte = 0;
          nib_load_block<NARROW>(x + block * NIB_BLOCK, word);
          if (!refused) {
            byte = nib_words_quantize<FOUR_OVER_SIX>(word, type, global, NIB_APPEND_NAN_CODE, packed);
          } else if (p.amax) { /* an infinite one: say where it is, in the order of memory */
            const uint32_t infinity = type == NIB_TYPE_FLOAT16 ? 0x7C00 : 0x7F80;
            int64_t row = tokens_inside ? head * p.page_size + token : token * p.heads + head;
            int64_t index = (page * p.page_size * p.heads + row) * p.head_dim + block * NIB_BLOCK;
            for (int i = 0; i < NIB_BLOCK; i++) {
              uint32_t half = x[block * NIB_BLOCK + i];
              if ((half & 0x7FFF) == infinity)
                nib_fault_raise(p.fault, NIB_OPERATION_QUANTIZE_CACHE, (uint32_t)p.amax_content, index + i, 1, 0,
                                half & 0x8000 ? -INFINITY : INFINITY);
            }
          }
          nib_store_block_codes<NARROW>(nib_paged_row(&p.data, page, token, head) + block * NIB_BLOCK_BYTES, packed);
          int64_t sf_row = token, column = block;
          if (p.interleaved) { /* nib_interleaved_row and _column, without their divisions */
            uint32_t row = (block >= quarter) + (block >= 2 * quarter) + (block >= 3 * quarter);
            sf_row = token / 4 * 4 + row;
            column = 4 * (block - row * quarter) + token % 4;
          }
          nib_paged_row(&p.sf, page, sf_row, head)[column] = byte;
        }
      }
}

/* 16-byte loads, 8-byte stores of codes. */
NIB_ENTRY(quantize_cache_bf16, 256, 4, nib_quantize_cache_params) { quantize_cache<false>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(quantize_cache_f16, 256, 4, nib_quantize_cache_params) { quantize_cache<false>(p, NIB_TYPE_FLOAT16); }

NIB_ENTRY(quantize_cache_narrow, 256, 2, nib_quantize_cache_params) {
  if (p.type == NIB_TYPE_FLOAT16) quantize_cache<true>(p, NIB_TYPE_FLOAT16);
  else quantize_cache<true>(p, NIB_TYPE_BFLOAT16);
}

NIB_ENTRY(quantize_cache_4over6_bf16, 256, 3, nib_quantize_cache_params) {
  quantize_cache<false, true>(p, NIB_TYPE_BFLOAT16);
}

NIB_ENTRY(quantize_cache_4over6_f16, 256, 3, nib_quantize_cache_params) {
  quantize_cache<false, true>(p, NIB_TYPE_FLOAT16);
}

NIB_ENTRY(quantize_cache_4over6_narrow, 256, 2, nib_quantize_cache_params) {
  if (p.type == NIB_TYPE_FLOAT16) quantize_cache<true, true>(p, NIB_TYPE_FLOAT16);
  else quantize_cache<true, true>(p, NIB_TYPE_BFLOAT16);
}
