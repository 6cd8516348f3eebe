/* Operation 1: quantize K and V rows and write each to its slot. */
#include "kernel.cuh"
#include "mapping.h"

/* A scale is bad: one thread says so. */
static __device__ __forceinline__ void append_refuse(const struct nib_append_params &p, float k_scale, float v_scale,
                                                     int says) {
  int k_valid = nib_scale_is_valid(k_scale);
  if (says)
    nib_fault_raise(p.fault, NIB_OPERATION_APPEND, k_valid ? NIB_CONTENT_V_SCALE : NIB_CONTENT_K_SCALE, 0, 1, 0,
                    k_valid ? v_scale : k_scale);
}

/* A thread has one block of one row, of K and of V, and of HEADS heads. It requests everything before it waits for
 * anything, and quantizes before it looks at what could forbid the writing: a branch on a slot or a scale would put
 * the wait for it before the loads. */
template <bool NARROW, int HEADS, class INDEX, bool FOUR_OVER_SIX = false>
__device__ __forceinline__ void append(const struct nib_append_params &p, int32_t type) {
  int rows_inside = nib_append_rows_inside(&p);
  uint32_t heads_here = rows_inside ? blockDim.z : blockDim.y;
  uint32_t row = blockIdx.x * (rows_inside ? blockDim.y : blockDim.z) + (rows_inside ? threadIdx.y : threadIdx.z);
  uint32_t first = blockIdx.y * HEADS * heads_here + (rows_inside ? threadIdx.z : threadIdx.y);
  uint32_t block = blockIdx.z * blockDim.x + threadIdx.x;
  if (row >= p.rows || first >= p.heads || block >= p.head_dim / NIB_BLOCK) return;
  const uint16_t *key = (const uint16_t *)p.key + row * p.key_row_stride + block * NIB_BLOCK;
  const uint16_t *value = (const uint16_t *)p.value + row * p.value_row_stride + block * NIB_BLOCK;
  uint32_t k[HEADS][8], v[HEADS][8], k_codes[HEADS][2], v_codes[HEADS][2];
  uint8_t k_byte[HEADS], v_byte[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; i++) {
    uint32_t head = first + i * heads_here;
    head = head < p.heads ? head : first; /* never past the tensor */
    nib_load_block<NARROW>(key + head * p.key_head_stride, k[i]);
    nib_load_block<NARROW>(value + head * p.value_head_stride, v[i]);
  }
  int64_t index = nib_index_at(&p.slots, 0, row);
  float k_scale = nib_scale_read(&p.k_scale), v_scale = nib_scale_read(&p.v_scale);
#pragma unroll
  for (int i = 0; i < HEADS; i++) {
    k_byte[i] = nib_words_quantize<FOUR_OVER_SIX>(k[i], type, k_scale, NIB_APPEND_NAN_CODE, k_codes[i]);
    v_byte[i] = nib_words_quantize<FOUR_OVER_SIX>(v[i], type, v_scale, NIB_APPEND_NAN_CODE, v_codes[i]);
  }
  if (!nib_scale_is_valid(k_scale) || !nib_scale_is_valid(v_scale)) {
    append_refuse(p, k_scale, v_scale, row == 0 && first == 0 && block == 0);
    return;
  }
  struct nib_place<INDEX> slot = nib_place_of<INDEX>(index, p.page_size, p.num_pages);
  if (!slot.valid) return;
  uint8_t *k_out = nib_paged_row(&p.k_cache, slot.page, slot.entry, 0) + block * NIB_BLOCK_BYTES;
  uint8_t *v_out = nib_paged_row(&p.v_cache, slot.page, slot.entry, 0) + block * NIB_BLOCK_BYTES;
  uint8_t *k_sf = nib_paged_row(&p.k_sf, slot.page, slot.entry, 0) + block;
  uint8_t *v_sf = nib_paged_row(&p.v_sf, slot.page, slot.entry, 0) + block;
#pragma unroll
  for (int i = 0; i < HEADS; i++) {
    uint32_t head = first + i * heads_here;
    if (head < p.heads) {
      nib_store_block_codes<NARROW>(k_out + head * p.k_cache.head_stride, k_codes[i]);
      nib_store_block_codes<NARROW>(v_out + head * p.v_cache.head_stride, v_codes[i]);
      k_sf[head * p.k_sf.head_stride] = k_byte[i];
      v_sf[head * p.v_sf.head_stride] = v_byte[i];
    }
  }
}

/* Few rows, spread over as many threads as there are half blocks of K and of V. The two threads of a block are
 * neighbours. blockIdx.z and x of a thread are in half blocks; the lowest bit of blockIdx.z is 0 for K and 1 for V,
 * which have code of their own, since choosing fields of the params by an index is slow. */
template <int IS_VALUE> __device__ __forceinline__ void append_few_of(const struct nib_append_params &p, int32_t type) {
  uint32_t halves = (uint32_t)(p.head_dim / (NIB_BLOCK / 2));
  uint32_t row = blockIdx.x * blockDim.z + threadIdx.z, head = blockIdx.y * blockDim.y + threadIdx.y;
  uint32_t half = (blockIdx.z >> 1) * blockDim.x + threadIdx.x;
  int stored = row < p.rows && head < p.heads && half < halves;
  int says = row == 0 && head == 0 && half == 0;
  if (!stored) /* the pair's exchange needs all threads */
    row = head = 0, half &= 1;
  const uint16_t *x = (const uint16_t *)(IS_VALUE ? p.value : p.key) +
                      row * (IS_VALUE ? p.value_row_stride : p.key_row_stride) +
                      head * (IS_VALUE ? p.value_head_stride : p.key_head_stride) + half * (NIB_BLOCK / 2);
  uint4 all = nib_load_16(x);
  int64_t index = nib_index_at(&p.slots, 0, row);
  float k_scale = nib_scale_read(&p.k_scale), v_scale = nib_scale_read(&p.v_scale);
  struct nib_place<uint32_t> slot = nib_place_at_once<uint32_t>(index, p.page_size, p.num_pages);
  uint32_t word[4] = { all.x, all.y, all.z, all.w };
  int has_nan;
  float amax = nib_pair_amax(nib_amax_words<4>(word, type, &has_nan), &has_nan);
  struct nib_block_scale scale = nib_block_scale(amax, IS_VALUE ? v_scale : k_scale);
  uint32_t codes = nib_block_is_small(amax, has_nan, scale.inverse)
                     ? nib_words_encode_small(word, type, scale.inverse)
                     : nib_words_encode(word, type, scale.inverse, NIB_APPEND_NAN_CODE);
  int scales_valid = nib_scale_is_valid(k_scale) && nib_scale_is_valid(v_scale);
  stored &= slot.valid & scales_valid;
  struct nib_paged cache = IS_VALUE ? p.v_cache : p.k_cache, sf = IS_VALUE ? p.v_sf : p.k_sf;
  nib_store_4_if(stored, nib_paged_row(&cache, slot.page, slot.entry, head) + half * (NIB_BLOCK_BYTES / 2), codes);
  nib_store_1_if(stored && half % 2 == 0, nib_paged_row(&sf, slot.page, slot.entry, head) + half / 2, scale.byte);
  if (!scales_valid) append_refuse(p, k_scale, v_scale, says && !IS_VALUE);
}

static __device__ __forceinline__ void append_few(const struct nib_append_params &p, int32_t type) {
  if (blockIdx.z % 2) append_few_of<1>(p, type);
  else append_few_of<0>(p, type);
}

/* Thread blocks per multiprocessor; SM120's code takes a few registers more. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define BLOCKS 5
#else
#define BLOCKS 6
#endif

/* 16-byte loads of K and V, 8-byte stores of codes; fewer than 2^31 slots. For many rows: the second head's loads
 * hide the first one's arithmetic. */
NIB_ENTRY(append_bf16, 128, BLOCKS, nib_append_params) { append<false, 2, uint32_t>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(append_f16, 128, BLOCKS, nib_append_params) { append<false, 2, uint32_t>(p, NIB_TYPE_FLOAT16); }

/* The same for one head. */
NIB_ENTRY(append_one_bf16, 128, 8, nib_append_params) { append<false, 1, uint32_t>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(append_one_f16, 128, 8, nib_append_params) { append<false, 1, uint32_t>(p, NIB_TYPE_FLOAT16); }

/* The same for few rows. */
NIB_ENTRY(append_few_bf16, 64, 8, nib_append_params) { append_few(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(append_few_f16, 64, 8, nib_append_params) { append_few(p, NIB_TYPE_FLOAT16); }

/* Any alignment, any size. */
NIB_ENTRY(append_narrow, 128, 4, nib_append_params) { append<true, 1, int64_t>(p, p.type); }

/* 4over6: as the ones for one head, and any. */
NIB_ENTRY(append_4over6_bf16, 128, 6, nib_append_params) { append<false, 1, uint32_t, true>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(append_4over6_f16, 128, 6, nib_append_params) { append<false, 1, uint32_t, true>(p, NIB_TYPE_FLOAT16); }

NIB_ENTRY(append_4over6_narrow, 128, 4, nib_append_params) { append<true, 1, int64_t, true>(p, p.type); }
