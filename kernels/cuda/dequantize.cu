/* Operation 3: gather requests from the pages and dequantize them. */
#include "kernel.cuh"

/* K or V. */
struct dequantize_side {
  struct nib_paged cache, sf;
  uint16_t *out;
  uint32_t halves; /* half blocks of a head */
  float global;
};

static __device__ __forceinline__ struct dequantize_side dequantize_side_of(const struct nib_dequantize_params &p,
                                                                            int is_value) {
  struct dequantize_side side;
  side.cache = is_value ? p.v_cache : p.k_cache;
  side.sf = is_value ? p.v_sf : p.k_sf;
  side.out = (uint16_t *)(is_value ? p.out_v : p.out_k);
  side.halves = (uint32_t)((is_value ? p.v_head_dim : p.k_head_dim) / (NIB_BLOCK / 2));
  side.global = *(is_value ? p.v_scale : p.k_scale);
  return side;
}

/* A thread has a half block, eight codes, of one token of K or V and of every blockDim.y-th head; HEADS heads are
 * loaded before the first is stored. blockIdx is [request / 65535, K or V, request % 65535, tokens] from z to x,
 * threads are [tokens, heads, half blocks]. INDEX is as in nib_place. */
template <bool NARROW, int HEADS, class INDEX, int IS_VALUE>
__device__ __forceinline__ void dequantize_of(const struct nib_dequantize_params &p, int32_t type) {
  int64_t request = (int64_t)(blockIdx.z / 2) * gridDim.y + blockIdx.y;
  uint32_t at = blockIdx.x * blockDim.z + threadIdx.z; /* seq_lens are int32: a token that counts has a 32-bit index */
  if (request >= p.batch || at >= p.max_seq_len)       /* the table has a column for each token up to max_seq_len */
    return;
  struct dequantize_side side = dequantize_side_of(p, IS_VALUE);
  INDEX entry, column = nib_column_of<INDEX>(at, p.page_size, &entry);
  int64_t index = nib_index_at(&p.block_tables, request, column);
  int32_t length = p.seq_lens[request * p.seq_stride];
  if ((int32_t)at >= length || index < 0 || index >= p.num_pages || nib_wait_for(side.global, p.batch)) return;
  INDEX page = (INDEX)index;
  for (uint32_t half = threadIdx.x; half < side.halves; half += blockDim.x) {
    const uint8_t *data = nib_paged_row(&side.cache, page, entry, 0) + half * (NIB_BLOCK_BYTES / 2);
    const uint8_t *sf = nib_paged_row(&side.sf, page, entry, 0) + half / 2;
    uint16_t *out = side.out + ((request * p.max_seq_len + at) * p.heads * side.halves + half) * (NIB_BLOCK / 2);
    for (uint32_t first = threadIdx.y; first < p.heads; first += HEADS * blockDim.y) {
      uint32_t codes[HEADS], word[4];
      uint8_t byte[HEADS];
#pragma unroll
      for (int i = 0; i < HEADS; i++) {
        uint32_t head = first + i * blockDim.y;
        head = head < p.heads ? head : first; /* what will not be stored is loaded from inside */
        codes[i] = nib_load_codes<NARROW>(data + head * side.cache.head_stride);
        byte[i] = sf[head * side.sf.head_stride];
      }
#pragma unroll
      for (int i = 0; i < HEADS; i++) {
        uint32_t head = first + i * blockDim.y;
        if (head >= p.heads) break;
        nib_words_decode(codes[i], nib_e4m3_decode(byte[i]), side.global, type, word);
        nib_store_words<NARROW ? 2 : 16>(out + head * side.halves * (NIB_BLOCK / 2), word);
      }
    }
  }
}

/* K and V have code of their own, since choosing fields of the params by an index is slow. */
template <bool NARROW, int HEADS, class INDEX>
__device__ __forceinline__ void dequantize(const struct nib_dequantize_params &p, int32_t type) {
  if (blockIdx.z % 2) dequantize_of<NARROW, HEADS, INDEX, 1>(p, type);
  else dequantize_of<NARROW, HEADS, INDEX, 0>(p, type);
}

/* Few tokens, spread over as many threads as there are half blocks of K and V. No branch stands before the stores,
 * so that only the table's and the codes' waits follow each other: what does not count is read from somewhere inside
 * and not stored. blockIdx.z is [heads, half blocks, K or V]. */
template <int IS_VALUE>
__device__ __forceinline__ void dequantize_few_of(const struct nib_dequantize_params &p, int32_t type) {
  uint32_t request = blockIdx.y, at = blockIdx.x * blockDim.z + threadIdx.z, page_entry;
  int stored = at < p.max_seq_len;
  at = stored ? at : 0;
  uint32_t column = nib_column_of<uint32_t>(at, p.page_size, &page_entry);
  int64_t index = nib_index_at(&p.block_tables, request, column);
  int32_t length = p.seq_lens[request * p.seq_stride];
  struct dequantize_side side = dequantize_side_of(p, IS_VALUE);
  uint32_t columns = (side.halves + blockDim.x - 1) / blockDim.x, heads_part = blockIdx.z / 2 / columns;
  uint32_t half = (blockIdx.z / 2 - heads_part * columns) * blockDim.x + threadIdx.x;
  uint32_t head = heads_part * blockDim.y + threadIdx.y;
  stored &= half < side.halves && head < p.heads;
  half = half < side.halves ? half : 0;
  head = head < p.heads ? head : 0;
  const uint8_t *data = nib_paged_row(&side.cache, 0, page_entry, head) + half * (NIB_BLOCK_BYTES / 2);
  const uint8_t *sf = nib_paged_row(&side.sf, 0, page_entry, head) + half / 2;
  uint16_t *out = side.out + (((request * p.max_seq_len + at) * p.heads + head) * side.halves + half) * (NIB_BLOCK / 2);
  int inside = index >= 0 && index < p.num_pages;
  uint32_t page = inside ? (uint32_t)index : 0, word[4];
  uint32_t codes = nib_load_4(data + page * side.cache.page_stride);
  nib_words_decode(codes, nib_e4m3_decode(sf[page * side.sf.page_stride]), side.global, type, word);
  nib_store_16_if(stored && inside && (int32_t)at < length, out, word);
}

static __device__ __forceinline__ void dequantize_few(const struct nib_dequantize_params &p, int32_t type) {
  if (blockIdx.z % 2) dequantize_few_of<1>(p, type);
  else dequantize_few_of<0>(p, type);
}

/* 4-byte loads of codes, 16-byte stores; fewer than 2^31 slots. */
NIB_ENTRY(dequantize_bf16, 128, 10, nib_dequantize_params) { dequantize<false, 4, uint32_t>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(dequantize_f16, 128, 10, nib_dequantize_params) { dequantize<false, 4, uint32_t>(p, NIB_TYPE_FLOAT16); }

/* The same for one or two heads. */
NIB_ENTRY(dequantize_one_bf16, 128, 12, nib_dequantize_params) { dequantize<false, 1, uint32_t>(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(dequantize_one_f16, 128, 12, nib_dequantize_params) { dequantize<false, 1, uint32_t>(p, NIB_TYPE_FLOAT16); }

/* The same for few tokens. */
NIB_ENTRY(dequantize_few_bf16, 64, 8, nib_dequantize_params) { dequantize_few(p, NIB_TYPE_BFLOAT16); }

NIB_ENTRY(dequantize_few_f16, 64, 8, nib_dequantize_params) { dequantize_few(p, NIB_TYPE_FLOAT16); }

/* Any alignment, any size. */
NIB_ENTRY(dequantize_narrow, 128, 4, nib_dequantize_params) { dequantize<true, 1, int64_t>(p, p.type); }
