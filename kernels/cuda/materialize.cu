/* Operation 2: the pages that requests reach, as an E4M3 cache; the new table and the zero page in the same launch. */
#include "kernel.cuh"

/* One page: blockIdx.z and threads are [heads, tokens, blocks]; HEADS heads of K and V are loaded before the first
 * is stored. A bad page index stands for zeros. */
template <bool NARROW, int HEADS>
__device__ __forceinline__ void materialize_page(const struct nib_materialize_params &p, int64_t target, int64_t k_page,
                                                 int64_t v_page) {
  uint32_t blocks = (uint32_t)(p.head_dim / NIB_BLOCK), quarter = blocks / 4, step = gridDim.z * blockDim.z;
  int k_valid = k_page >= 0 && k_page < p.num_pages, v_valid = v_page >= 0 && v_page < p.num_pages;
  int64_t k_plane = target * 2 * p.heads, v_plane = k_plane + p.heads;
  for (uint32_t token = threadIdx.y; token < p.page_size; token += blockDim.y)
    for (uint32_t block = threadIdx.x; block < blocks; block += blockDim.x) {
      /* nib_interleaved_row and _column, without their divisions */
      uint32_t row = (block >= quarter) + (block >= 2 * quarter) + (block >= 3 * quarter);
      const uint8_t *k_data = nib_paged_row(&p.k_cache, k_page, token, 0) + block * NIB_BLOCK_BYTES;
      const uint8_t *v_data = nib_paged_row(&p.v_cache, v_page, token, 0) + block * NIB_BLOCK_BYTES;
      const uint8_t *k_sf = nib_paged_row(&p.k_sf, k_page, token, 0) + block;
      const uint8_t *v_sf =
        nib_paged_row(&p.v_sf, v_page, token / 4 * 4 + row, 0) + 4 * (block - row * quarter) + token % 4;
      uint8_t *out = p.out + token * p.head_dim + block * NIB_BLOCK;
      for (uint32_t first = blockIdx.z * blockDim.z + threadIdx.z; first < p.heads; first += HEADS * step) {
        uint32_t k[HEADS][2], v[HEADS][2], word[4];
        uint8_t k_byte[HEADS], v_byte[HEADS];
#pragma unroll
        for (int i = 0; i < HEADS; i++) {
          uint32_t head = first + i * step;
          k[i][0] = k[i][1] = v[i][0] = v[i][1] = 0;
          k_byte[i] = v_byte[i] = 0;
          head = head < p.heads ? head : first;
          if (k_valid) {
            nib_load_block_codes<NARROW>(k_data + head * p.k_cache.head_stride, k[i]);
            k_byte[i] = k_sf[head * p.k_sf.head_stride];
          }
          if (v_valid) {
            nib_load_block_codes<NARROW>(v_data + head * p.v_cache.head_stride, v[i]);
            v_byte[i] = v_sf[head * p.v_sf.head_stride];
          }
        }
#pragma unroll
        for (int i = 0; i < HEADS; i++) {
          uint32_t head = first + i * step;
          if (head >= p.heads) break;
          nib_words_materialize(k[i], k_byte[i], word);
          nib_store_words<NARROW ? 1 : 16>(out + (k_plane + head) * p.page_size * p.head_dim, word);
          nib_words_materialize(v[i], v_byte[i], word);
          nib_store_words<NARROW ? 1 : 16>(out + (v_plane + head) * p.page_size * p.head_dim, word);
        }
      }
    }
}

/* What the tables hold for a request and one of its columns. */
struct materialize_entry {
  int32_t length, begin, end, k_page, v_page; /* without kv_page_indptr, the output's pages have 32 bits too */
};

/* All of it requested at once; `there`: whether there is such a column. */
static __device__ __forceinline__ struct materialize_entry materialize_entry_of(const struct nib_materialize_params &p,
                                                                                int64_t b, int64_t column, int there) {
  const int32_t *table = p.block_tables + b * p.table_row_stride + column * p.table_stride;
  const int32_t *indptr = p.indptr + b * p.indptr_stride;
  uint32_t k_page = 0, v_page = 0, begin = (uint32_t)(b * p.max_pages), end = begin + (uint32_t)p.max_pages;
  struct materialize_entry entry;
  nib_load_4_if(there, table, &k_page);
  nib_load_4_if(there, table + p.table_kv_stride, &v_page);
  entry.length = (int32_t)nib_load_4(p.seq_lens + b * p.seq_stride);
  nib_load_4_if(p.indptr != NULL, indptr, &begin);
  nib_load_4_if(p.indptr != NULL, indptr + p.indptr_stride, &end);
  entry.k_page = (int32_t)k_page;
  entry.v_page = (int32_t)v_page;
  entry.begin = (int32_t)begin;
  entry.end = (int32_t)end;
  return entry;
}

/* Whether column j, which there is, has a token of the request: it lies below max_kv_len, an int32. */
static __device__ __forceinline__ int materialize_counts(const struct nib_materialize_params &p,
                                                         const struct materialize_entry &entry, uint32_t j) {
  return (int32_t)(j * (uint32_t)p.page_size) < entry.length;
}

/* nib_materialize_page of such a column. The output has fewer than 2^31 pages: what is below 0 here is past them. */
static __device__ __forceinline__ uint32_t materialize_target(const struct nib_materialize_params &p,
                                                              const struct materialize_entry &entry, uint32_t j) {
  uint32_t page = (uint32_t)entry.begin + j;
  int32_t end = entry.end < (int32_t)p.num_out_pages ? entry.end : (int32_t)p.num_out_pages;
  return materialize_counts(p, entry, j) && page < (uint32_t)(end < 0 ? 0 : end) ? page + 1 : 0;
}

/* What a request's length and its range have wrong with them. */
static __device__ __forceinline__ void materialize_check(const struct nib_materialize_params &p, int64_t b,
                                                         const struct materialize_entry &entry) {
  struct nib_materialize_request r = nib_materialize_request_of(&p, entry.length, entry.begin, entry.end);
  if (r.length > p.max_kv_len)
    nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_SEQ_LENS, b, 0, r.length, 0);
  if (r.begin < 0 || r.begin > p.num_out_pages)
    nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_KV_PAGE_INDPTR, b, 0, r.begin, 0);
  else if (r.end > p.num_out_pages || r.end - r.begin < r.pages)
    nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_KV_PAGE_INDPTR, b + 1, 0, r.end, 0);
}

/* A bad page index of K (side 0) or V. */
static __device__ __forceinline__ void materialize_refuse(const struct nib_materialize_params &p, int64_t b,
                                                          int64_t column, int side, int32_t page) {
  int64_t row = p.table_kv_stride ? 2 * b + side : b;
  nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_BLOCK_TABLES, row * p.table_columns + column, 0, page,
                  0);
}

static __device__ __forceinline__ int materialize_inside(const struct nib_materialize_params &p, int32_t page) {
  return page >= 0 && page < p.num_pages;
}

/* The new table's entry of a column (which may not exist), and faults. For one thread of each column. */
static __device__ __forceinline__ void materialize_table(const struct nib_materialize_params &p, int64_t b,
                                                         int64_t column) {
  /* Read again, so that the kernel need not keep it. */
  struct materialize_entry entry = materialize_entry_of(p, b, column, column < p.max_pages);
  if (column == 0) materialize_check(p, b, entry);
  if (column >= p.max_pages) return;
  uint32_t target = materialize_target(p, entry, (uint32_t)column);
  p.out_table[b * p.max_pages + column] = (int32_t)target;
  if (target == 0 || p.heads == 0) return;
  if (!materialize_inside(p, entry.k_page)) materialize_refuse(p, b, column, 0, entry.k_page);
  if (!materialize_inside(p, entry.v_page)) materialize_refuse(p, b, column, 1, entry.v_page);
}

/* blockIdx is [heads, 1 + batch, columns] from z to x; y = 0 is the zero page. There is at least one block along x,
 * also when there is no column. */
template <bool NARROW, int HEADS> __device__ __forceinline__ void materialize(const struct nib_materialize_params &p) {
  if (blockIdx.y == 0) {
    if (blockIdx.x == 0) materialize_page<NARROW, HEADS>(p, 0, -1, -1);
    return;
  }
  for (int64_t b = blockIdx.y - 1; b < p.batch; b += gridDim.y - 1) {
    if (blockIdx.x < p.max_pages) {
      struct materialize_entry entry = materialize_entry_of(p, b, blockIdx.x, 1);
      uint32_t target = materialize_target(p, entry, blockIdx.x);
      if (target != 0) materialize_page<NARROW, HEADS>(p, target, entry.k_page, entry.v_page);
    }
    if ((blockIdx.z | threadIdx.x | threadIdx.y | threadIdx.z) == 0) materialize_table(p, b, blockIdx.x);
  }
}

/* The same for few pages, spread over as many threads as there are blocks of K and V. No branch stands before the
 * stores, so that only the tables' and the codes' waits follow each other: what does not count is read from
 * somewhere inside and not stored. There is at least one column, and a thread for each token of a page. blockIdx.z is
 * [heads, K or V]. */
template <int IS_VALUE> __device__ __forceinline__ void materialize_few_of(const struct nib_materialize_params &p) {
  /* The zero page reads, but does not use, what belongs to the first request. */
  int is_page = blockIdx.y != 0;
  uint32_t b = is_page ? blockIdx.y - 1 : 0, column = blockIdx.x, head = blockIdx.z / 2;
  uint32_t block = threadIdx.x, token = threadIdx.y;
  struct materialize_entry entry = materialize_entry_of(p, b, column, 1);
  struct nib_paged cache = IS_VALUE ? p.v_cache : p.k_cache, sf = IS_VALUE ? p.v_sf : p.k_sf;
  uint32_t quarter = (uint32_t)p.head_dim / NIB_BLOCK / 4;
  uint32_t part = (block >= quarter) + (block >= 2 * quarter) + (block >= 3 * quarter);
  uint32_t sf_row = IS_VALUE ? token / 4 * 4 + part : token;
  uint32_t sf_column = IS_VALUE ? 4 * (block - part * quarter) + token % 4 : block;
  uint8_t *data = nib_ahead(nib_paged_row(&cache, 0, token, head) + block * NIB_BLOCK_BYTES);
  uint8_t *scale = nib_ahead(nib_paged_row(&sf, 0, sf_row, head) + sf_column);
  int64_t plane = p.heads * p.page_size * p.head_dim;
  uint8_t *out = nib_ahead(p.out + IS_VALUE * plane + (head * p.page_size + token) * p.head_dim + block * NIB_BLOCK);
  /* The length is looked at so early in order to be requested with the page. */
  int32_t page = IS_VALUE ? entry.v_page : entry.k_page;
  int inside = materialize_inside(p, page), used = inside & materialize_counts(p, entry, column) & is_page;
  uint32_t from = used ? (uint32_t)page : 0;
  uint2 codes = nib_load_8(data + from * cache.page_stride);
  uint8_t byte = nib_load_1(scale + from * sf.page_stride);
  uint32_t target = is_page ? materialize_target(p, entry, column) : 0;
  int first = (head | block | token) == 0;
  nib_store_4_if(first && !IS_VALUE && is_page, p.out_table + b * p.max_pages + column, target);
  uint32_t both[2] = { codes.x, codes.y }, word[4];
  nib_words_materialize(both, byte, word);
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = used ? word[i] : 0;
  nib_store_16_if(is_page ? target != 0 : column == 0, out + target * (2 * plane), word);
  if (first && is_page && column == 0 && !IS_VALUE) materialize_check(p, b, entry);
  if (first && target != 0 && !inside) materialize_refuse(p, b, column, IS_VALUE, page);
}

/* K and V have code of their own, since choosing fields of the params by an index is slow. */
static __device__ __forceinline__ void materialize_few(const struct nib_materialize_params &p) {
  if (blockIdx.z % 2) materialize_few_of<1>(p);
  else materialize_few_of<0>(p);
}

/* 8-byte loads of codes, 16-byte stores: four heads at a time for many pages, */
NIB_ENTRY(materialize, 256, 3, nib_materialize_params) { materialize<false, 4>(p); }

/* two for few pages or heads. */
NIB_ENTRY(materialize_two, 256, 4, nib_materialize_params) { materialize<false, 2>(p); }

NIB_ENTRY(materialize_few, 256, 4, nib_materialize_params) { materialize_few(p); }

/* Any alignment. */
NIB_ENTRY(materialize_narrow, 256, 2, nib_materialize_params) { materialize<true, 1>(p); }
