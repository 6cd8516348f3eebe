/* Operation 2: the pages that requests reach, as an E4M3 cache; the new table and the zero page in the same launch. */
#include "kernel.cuh"

/* One page: blockIdx.z and threads are [heads, tokens, blocks]; HEADS heads of K and V are loaded before the first
 * is stored. A bad page index stands for zeros. */
template <bool NARROW, int HEADS>
__device__ __forceinline__ void materialize_page(const struct nib_materialize_params &p, int64_t target, int64_t k_page,
                                                 int64_t v_page)
{
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
      const uint8_t *v_sf = nib_paged_row(&p.v_sf, v_page, token / 4 * 4 + row, 0) + 4 * (block - row * quarter) + token % 4;
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
          if (head >= p.heads)
            break;
          nib_words_materialize(k[i], k_byte[i], word);
          nib_store_words<NARROW ? 1 : 16>(out + (k_plane + head) * p.page_size * p.head_dim, word);
          nib_words_materialize(v[i], v_byte[i], word);
          nib_store_words<NARROW ? 1 : 16>(out + (v_plane + head) * p.page_size * p.head_dim, word);
        }
      }
    }
}

/* What the contents of request b's entries have wrong with them. Reads them again, so that the kernel need not keep
 * them. */
static __device__ __forceinline__ void materialize_check(const struct nib_materialize_params &p, int64_t b)
{
  struct nib_materialize_request r = nib_materialize_request(&p, b);
  if (r.length > p.max_kv_len)
    nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_SEQ_LENS, b, 0, r.length, 0);
  if (r.begin < 0 || r.begin > p.num_out_pages)
    nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_KV_PAGE_INDPTR, b, 0, r.begin, 0);
  else if (r.end > p.num_out_pages || r.end - r.begin < r.pages)
    nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_KV_PAGE_INDPTR, b + 1, 0, r.end, 0);
}

/* The new table's entry of a column (which may not exist), and faults. For one thread of each column. */
static __device__ __forceinline__ void materialize_table(const struct nib_materialize_params &p, int64_t b,
                                                         int64_t column, int64_t target)
{
  if (column == 0)
    materialize_check(p, b);
  if (column >= p.max_pages)
    return;
  p.out_table[b * p.max_pages + column] = (int32_t)target;
  int64_t row = p.table_kv_stride ? 2 * b : b;
  for (int side = 0; side < 2 && target != 0 && p.heads > 0; side++, row += p.table_kv_stride != 0) {
    int64_t page = p.block_tables[b * p.table_row_stride + side * p.table_kv_stride + column * p.table_stride];
    if (page < 0 || page >= p.num_pages)
      nib_fault_raise(p.fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_BLOCK_TABLES, row * p.table_columns + column, 0,
                      page, 0);
  }
}

/* What the tables hold for a request and one of its columns. */
struct materialize_entry {
  int32_t length, begin, end, k_page, v_page; /* without kv_page_indptr, the output's pages have 32 bits too */
};

static __device__ __forceinline__ struct materialize_entry
materialize_entry_of(const struct nib_materialize_params &p, int64_t b, int64_t column)
{
  const int32_t *table = p.block_tables + b * p.table_row_stride + column * p.table_stride;
  struct materialize_entry entry;
  entry.k_page = table[0];
  entry.v_page = table[p.table_kv_stride];
  entry.length = p.seq_lens[b * p.seq_stride];
  entry.begin = p.indptr ? p.indptr[b * p.indptr_stride] : (int32_t)(b * p.max_pages);
  entry.end = p.indptr ? p.indptr[(b + 1) * p.indptr_stride] : (int32_t)((b + 1) * p.max_pages);
  return entry;
}

/* blockIdx is [heads, 1 + batch, columns] from z to x; y = 0 is the zero page. There is at least one block along x,
 * also when there is no column. */
template <bool NARROW, int HEADS>
__device__ __forceinline__ void materialize(const struct nib_materialize_params &p)
{
  if (blockIdx.y == 0) {
    if (blockIdx.x == 0)
      materialize_page<NARROW, HEADS>(p, 0, -1, -1);
    return;
  }
  for (int64_t b = blockIdx.y - 1; b < p.batch; b += gridDim.y - 1) {
    int64_t column = blockIdx.x, target = 0;
    if (column < p.max_pages) {
      struct materialize_entry entry = materialize_entry_of(p, b, column);
      struct nib_materialize_request request = nib_materialize_request_of(&p, entry.length, entry.begin, entry.end);
      target = nib_materialize_page(&request, column);
      if (target != 0)
        materialize_page<NARROW, HEADS>(p, target, entry.k_page, entry.v_page);
    }
    if ((blockIdx.z | threadIdx.x | threadIdx.y | threadIdx.z) == 0)
      materialize_table(p, b, column, target);
  }
}

/* The same for few pages, spread over as many threads as there are blocks of K and V. No branch stands before the
 * stores, so that only the tables' and the codes' waits follow each other: what does not count is read from
 * somewhere inside and not stored. There is at least one column. blockIdx.z is [heads, K or V] and one more for the
 * table. */
template <int IS_VALUE>
__device__ __forceinline__ void materialize_few_of(const struct nib_materialize_params &p)
{
  /* The zero page reads, but does not use, what belongs to the first request. */
  uint32_t b = blockIdx.y == 0 ? 0 : blockIdx.y - 1, column = blockIdx.x, head = blockIdx.z / 2, block = threadIdx.x;
  struct materialize_entry entry = materialize_entry_of(p, b, column);
  int32_t wanted = IS_VALUE ? entry.v_page : entry.k_page;
  struct nib_paged cache = IS_VALUE ? p.v_cache : p.k_cache, sf = IS_VALUE ? p.v_sf : p.k_sf;
  uint32_t quarter = (uint32_t)p.head_dim / NIB_BLOCK / 4;
  uint32_t part = (block >= quarter) + (block >= 2 * quarter) + (block >= 3 * quarter);
  for (uint32_t token = threadIdx.y; token < (uint32_t)p.page_size; token += blockDim.y) {
    uint32_t sf_row = IS_VALUE ? token / 4 * 4 + part : token;
    uint32_t sf_column = IS_VALUE ? 4 * (block - part * quarter) + token % 4 : block;
    const uint8_t *data = nib_paged_row(&cache, 0, token, head) + block * NIB_BLOCK_BYTES;
    const uint8_t *scale = nib_paged_row(&sf, 0, sf_row, head) + sf_column;
    uint8_t *out = p.out + ((IS_VALUE * p.heads + head) * p.page_size + token) * p.head_dim + block * NIB_BLOCK;
    int inside = wanted >= 0 && wanted < p.num_pages;
    uint32_t page = inside ? (uint32_t)wanted : 0;
    uint2 codes = nib_load_8(data + page * cache.page_stride);
    uint8_t byte = scale[page * sf.page_stride];
    struct nib_materialize_request request = nib_materialize_request_of(&p, entry.length, entry.begin, entry.end);
    int64_t target = blockIdx.y == 0 ? 0 : nib_materialize_page(&request, column);
    out += target * 2 * p.heads * p.page_size * p.head_dim;
    int stored = blockIdx.y == 0 ? column == 0 : target != 0;
    uint32_t both[2] = {codes.x, codes.y}, word[4];
    nib_words_materialize(both, byte, word);
#pragma unroll
    for (int i = 0; i < 4; i++)
      word[i] = blockIdx.y == 0 || !inside ? 0 : word[i];
    nib_store_16_if(stored, out, word);
  }
}

/* The last block along z: the table, beside the pages instead of after them. */
static __device__ __forceinline__ void materialize_few_table(const struct nib_materialize_params &p)
{
  int64_t b = (int64_t)blockIdx.y - 1, column = blockIdx.x;
  if (b < 0 || threadIdx.x != 0 || threadIdx.y != 0)
    return;
  struct nib_materialize_request request = nib_materialize_request(&p, b);
  materialize_table(p, b, column, nib_materialize_page(&request, column));
}

/* K and V have code of their own, since choosing fields of the params by an index is slow. */
static __device__ __forceinline__ void materialize_few(const struct nib_materialize_params &p)
{
  if (blockIdx.z == gridDim.z - 1)
    materialize_few_table(p);
  else if (blockIdx.z % 2)
    materialize_few_of<1>(p);
  else
    materialize_few_of<0>(p);
}

/* 8-byte loads of codes, 16-byte stores. */
NIB_ENTRY(materialize, 256, 4, nib_materialize_params)
{
  materialize<false, 2>(p);
}

NIB_ENTRY(materialize_few, 256, 4, nib_materialize_params)
{
  materialize_few(p);
}

/* Any alignment. */
NIB_ENTRY(materialize_narrow, 256, 2, nib_materialize_params)
{
  materialize<true, 1>(p);
}
