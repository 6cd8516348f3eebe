/* Operation 4 and its sibling: rotate q; rotate, quantize and insert kv. */
#include "kernel.cuh"
#include "mapping.h"

#define CHUNK 8 /* elements that a thread has of a row: 16 bytes, half a block or 4 pairs */
#define FIRST_ROPE_CHUNK (NIB_MLA_NOPE / CHUNK)

template <bool NARROW>
__device__ __forceinline__ void load_chunk(const uint16_t *x, uint32_t word[4])
{
  if (NARROW) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      word[i] = x[2 * i] | (uint32_t)x[2 * i + 1] << 16;
  } else {
    uint4 all = nib_load_16(x);
    word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
  }
}

/* Cosines and sines of a chunk's four pairs. */
struct rotation {
  float cosine[4], sine[4];
};

template <bool NARROW>
__device__ __forceinline__ struct rotation load_rotation(const float *row, uint32_t chunk)
{
  const float *cosine = row + (chunk - FIRST_ROPE_CHUNK) * (CHUNK / 2), *sine = cosine + NIB_MLA_ROPE / 2;
  struct rotation rotation;
  if (NARROW) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      rotation.cosine[i] = cosine[i], rotation.sine[i] = sine[i];
  } else {
    float4 c = *(const float4 *)cosine, s = *(const float4 *)sine;
    rotation.cosine[0] = c.x, rotation.cosine[1] = c.y, rotation.cosine[2] = c.z, rotation.cosine[3] = c.w;
    rotation.sine[0] = s.x, rotation.sine[1] = s.y, rotation.sine[2] = s.z, rotation.sine[3] = s.w;
  }
  return rotation;
}

static __device__ __forceinline__ void rotate(uint32_t word[4], const struct rotation &rotation)
{
#pragma unroll
  for (int i = 0; i < 4; i++)
    word[i] = nib_rope_word(word[i], rotation.cosine[i], rotation.sine[i]);
}

/* The table row of a position, NULL when it has none. The ratio is 1 or 2. */
static __device__ __forceinline__ const float *table_row(const struct nib_rope_insert_params &p, int64_t position)
{
  if (position < 0 || position >= p.max_position)
    return NULL;
  return p.cos_sin + (position & -(int64_t)p.compress_ratio) * NIB_MLA_ROPE;
}

static __device__ __forceinline__ void refuse_position(const struct nib_rope_insert_params &p, int64_t row, int64_t position)
{
  nib_fault_raise(p.fault, (uint32_t)p.operation, NIB_CONTENT_POSITIONS, row, 0, position, 0);
}

/* Query heads of one row: a thread has one chunk of HEADS heads, blockDim.y apart. */
template <bool NARROW, int HEADS>
__device__ __forceinline__ void write_queries(const struct nib_rope_insert_params &p, int64_t row)
{
  int in_place = p.q_out == p.q;
  uint32_t chunk = threadIdx.x + (in_place ? FIRST_ROPE_CHUNK : 0); /* in place, only those chunks are touched */
  int64_t out_heads = in_place ? p.heads : p.padded_heads;
  int64_t first = (int64_t)blockIdx.y * (HEADS * blockDim.y) + threadIdx.y;
  int rotated = p.rotate_q && chunk >= FIRST_ROPE_CHUNK && first < p.heads;
  uint32_t word[HEADS][4];
  int64_t position = rotated ? p.positions[row] : 0;
#pragma unroll
  for (int i = 0; i < HEADS; i++) {
    int64_t head = first + i * blockDim.y;
#pragma unroll
    for (int j = 0; j < 4; j++)
      word[i][j] = 0;
    if (head < p.heads)
      load_chunk<NARROW>(p.q + (row * p.heads + head) * NIB_MLA_DIM + chunk * CHUNK, word[i]);
  }
  if (rotated) {
    const float *table = table_row(p, position);
    struct rotation rotation = {};
    if (table)
      rotation = load_rotation<NARROW>(table, chunk);
    else if (first == 0 && chunk == FIRST_ROPE_CHUNK)
      refuse_position(p, row, position);
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      if (first + i * blockDim.y >= p.heads) /* the padding stays +0 */
        break;
      rotate(word[i], rotation);
#pragma unroll
      for (int j = 0; j < 4; j++)
        word[i][j] = table ? word[i][j] : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < HEADS; i++) {
    int64_t head = first + i * blockDim.y;
    if (head < out_heads)
      nib_store_words<NARROW ? 2 : 16>(p.q_out + (row * out_heads + head) * NIB_MLA_DIM + chunk * CHUNK, word[i]);
  }
}

/* Where a kv row goes, with one wait for all that says so. */
template <class INDEX>
struct insertion {
  int64_t row; /* row 0 in place of one that is not there */
  int64_t position;
  uint8_t *data, *sf;
  int used; /* the position is: the row is inserted or, without a table row, refused */
};

template <bool NARROW, class INDEX>
__device__ __forceinline__ struct insertion<INDEX> insertion_of(const struct nib_rope_insert_params &p, uint32_t row)
{
  struct insertion<INDEX> insertion;
  int wanted = row < p.slot_count && row < p.rows;
  insertion.row = wanted ? row : 0;
  int64_t index = nib_index_at(&p.slots, 0, insertion.row);
  insertion.position = p.positions[insertion.row];
  struct nib_place<INDEX> slot = NARROW ? nib_place_of<INDEX>(index, p.page_size, p.num_pages)
                                        : nib_place_at_once<INDEX>(index, p.page_size, p.num_pages);
  uint8_t *page = p.cache + slot.page * p.page_stride;
  insertion.data = page + slot.entry * (int64_t)NIB_MLA_DATA_BYTES;
  insertion.sf = page + p.page_size * NIB_MLA_DATA_BYTES + slot.entry * (int64_t)NIB_MLA_SCALE_BYTES;
  /* Unsigned, so that no position overflows; the ratio is 1 or 2. */
  insertion.used = wanted & slot.valid & ((((uint64_t)insertion.position + 1) & (uint64_t)(p.compress_ratio - 1)) == 0);
  return insertion;
}

/* Half a block of a kv row. The two threads of a block are neighbours in a warp, and all threads of the warp come
 * here. */
template <bool NARROW, class INDEX>
__device__ __forceinline__ void insert_codes(const struct nib_rope_insert_params &p, uint32_t row, uint32_t chunk)
{
  int there = chunk < FIRST_ROPE_CHUNK;
  chunk = there ? chunk : 0;
  uint32_t word[4];
  load_chunk<NARROW>(p.kv + (row < p.rows ? (int64_t)row : 0) * NIB_MLA_DIM + chunk * CHUNK, word);
  struct insertion<INDEX> insertion = insertion_of<NARROW, INDEX>(p, row);
  int has_nan;
  float amax = nib_pair_amax(nib_amax_words<4>(word, NIB_TYPE_BFLOAT16, &has_nan), &has_nan);
  struct nib_block_scale scale = nib_block_scale(amax, 1.0f);
  uint32_t codes = nib_block_is_small(amax, has_nan, scale.inverse)
                       ? nib_words_encode_small(word, NIB_TYPE_BFLOAT16, scale.inverse)
                       : nib_words_encode(word, NIB_TYPE_BFLOAT16, scale.inverse, NIB_MLA_NAN_CODE);
  int stored = there && insertion.used && insertion.position >= 0 && insertion.position < p.max_position;
  nib_store_1_if(stored && chunk % 2 == 0, insertion.sf + chunk / 2, scale.byte);
  if (!NARROW)
    nib_store_4_if(stored, insertion.data + chunk * (CHUNK / 2), codes);
  else if (stored)
    nib_store_codes<true>(insertion.data + chunk * (CHUNK / 2), codes);
}

/* One of the eight RoPE chunks of a kv row, and a half of the zeros behind its scales. */
template <bool NARROW, class INDEX>
__device__ __forceinline__ void insert_rope(const struct nib_rope_insert_params &p, uint32_t row, uint32_t part)
{
  uint32_t chunk = FIRST_ROPE_CHUNK + part, word[4];
  load_chunk<NARROW>(p.kv + (row < p.rows ? (int64_t)row : 0) * NIB_MLA_DIM + chunk * CHUNK, word);
  struct insertion<INDEX> insertion = insertion_of<NARROW, INDEX>(p, row);
  const float *table = table_row(p, insertion.position);
  struct rotation rotation = {};
  if (table)
    rotation = load_rotation<NARROW>(table, chunk);
  rotate(word, rotation);
  int stored = insertion.used && table;
  nib_store_1_if(stored && part % 2 == 0, insertion.sf + chunk / 2, 0);
  if (!NARROW)
    nib_store_16_if(stored, insertion.data + NIB_MLA_NOPE / 2 + part * 16, word);
  else if (stored)
    nib_store_words<1>(insertion.data + NIB_MLA_NOPE / 2 + part * 16, word);
  if (insertion.used && !table && part == 0)
    refuse_position(p, row, insertion.position);
}

/* The same for many rows: a warp has a row, its lanes 16 elements each, 28 a block and the last four 8 pairs. */
static __device__ __forceinline__ void insert_row(const struct nib_rope_insert_params &p, int64_t row, uint32_t lane)
{
  if (row >= p.slot_count || row >= p.rows)
    return;
  const uint32_t blocks = NIB_MLA_NOPE / NIB_BLOCK;
  int64_t index = nib_index_at(&p.slots, 0, row), position = p.positions[row];
  uint32_t word[8], codes[2];
  nib_load_block<false>(p.kv + row * NIB_MLA_DIM + lane * NIB_BLOCK, word);
  struct nib_place<uint32_t> slot = nib_place_of<uint32_t>(index, p.page_size, p.num_pages);
  if (!slot.valid || (((uint64_t)position + 1) & (uint64_t)(p.compress_ratio - 1)) != 0)
    return;
  const float *table = table_row(p, position);
  if (!table) {
    if (lane == 0)
      refuse_position(p, row, position);
    return;
  }
  struct rotation rotation[2] = {};
  uint32_t chunk = 2 * lane;
  if (lane >= blocks) {
    rotation[0] = load_rotation<false>(table, chunk);
    rotation[1] = load_rotation<false>(table, chunk + 1);
  }
  uint8_t *page = p.cache + slot.page * p.page_stride;
  uint8_t *data = page + slot.entry * (int64_t)NIB_MLA_DATA_BYTES;
  uint8_t byte = nib_words_quantize(word, NIB_TYPE_BFLOAT16, 1.0f, NIB_MLA_NAN_CODE, codes);
  page[p.page_size * NIB_MLA_DATA_BYTES + slot.entry * (int64_t)NIB_MLA_SCALE_BYTES + lane] = lane < blocks ? byte : 0;
  if (lane < blocks) {
    nib_store_block_codes<false>(data + lane * NIB_BLOCK_BYTES, codes);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      rotate(word + 4 * i, rotation[i]);
      nib_store_words<16>(data + NIB_MLA_NOPE / 2 + (lane - blocks) * 32 + i * 16, word + 4 * i);
    }
  }
}

/* The first blocks along x insert kv rows; the others have blockDim.z rows of queries. Their threads are [rows,
 * heads, chunks]. */
template <bool NARROW, int HEADS, bool MANY, class INDEX>
__device__ __forceinline__ void rope_insert(const struct nib_rope_insert_params &p)
{
  uint32_t coding = nib_rope_coding(&p, MANY), inserting = nib_rope_inserting(&p, MANY);
  if (blockIdx.x >= inserting) {
    int64_t row = (int64_t)(blockIdx.x - inserting) * blockDim.z + threadIdx.z;
    if (row < p.rows && nib_rope_heads(&p) > 0)
      write_queries<NARROW, HEADS>(p, row);
    return;
  }
  uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  if (blockIdx.y != 0)
    return;
  if (MANY)
    insert_row(p, blockIdx.x * NIB_ROPE_ROWS + thread / 32, thread % 32);
  else if (blockIdx.x < coding)
    insert_codes<NARROW, INDEX>(p, blockIdx.x, thread);
  else
    insert_rope<NARROW, INDEX>(p, (blockIdx.x - coding) * NIB_ROPE_ROWS + thread / 8, thread % 8);
}

/* 16-byte accesses; fewer than 2^31 slots. Blocks of 256 threads. */
NIB_ENTRY(rope_insert, 256, 4, nib_rope_insert_params)
{
  rope_insert<false, NIB_ROPE_HEADS, true, uint32_t>(p);
}

/* The same for few rows, spread over more threads: blocks of 64. */
NIB_ENTRY(rope_insert_few, 64, 8, nib_rope_insert_params)
{
  rope_insert<false, 1, false, uint32_t>(p);
}

/* Any alignment, any size. Blocks of 64 threads. */
NIB_ENTRY(rope_insert_narrow, 64, 8, nib_rope_insert_params)
{
  rope_insert<true, 1, false, int64_t>(p);
}
