/* Operation 4 and its sibling: rotate q; rotate, quantize and insert kv. */
#include "kernel.cuh"
#include "mapping.h"

#define CHUNK            8 /* elements that a thread has of a row: 16 bytes, half a block or 4 pairs */
#define FIRST_ROPE_CHUNK (NIB_MLA_NOPE / CHUNK)

template <bool NARROW> __device__ __forceinline__ void load_chunk(const uint16_t *x, uint32_t word[4]) {
  if (NARROW) {
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = x[2 * i] | (uint32_t)x[2 * i + 1] << 16;
  } else {
    uint4 all = nib_load_16(x);
    word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
  }
}

/* The same, or zeros. */
template <bool NARROW>
__device__ __forceinline__ void load_chunk_if(int condition, const uint16_t *x, uint32_t word[4]) {
  word[0] = word[1] = word[2] = word[3] = 0;
  if (!NARROW) nib_load_16_if(condition, x, word);
  else if (condition) load_chunk<true>(x, word);
}

/* Cosines and sines of a chunk's four pairs. */
struct rotation {
  float cosine[4], sine[4];
};

/* Zeros without a row. */
template <bool NARROW> __device__ __forceinline__ struct rotation load_rotation(const float *row, uint32_t chunk) {
  const float *cosine = row + (chunk - FIRST_ROPE_CHUNK) * (CHUNK / 2), *sine = cosine + NIB_MLA_ROPE / 2;
  struct rotation rotation = {};
  if (NARROW) {
#pragma unroll
    for (int i = 0; row && i < 4; i++) rotation.cosine[i] = cosine[i], rotation.sine[i] = sine[i];
  } else {
    uint32_t c[4] = {}, s[4] = {};
    nib_load_16_if(row != NULL, cosine, c);
    nib_load_16_if(row != NULL, sine, s);
#pragma unroll
    for (int i = 0; i < 4; i++)
      rotation.cosine[i] = nib_f32_from_bits(c[i]), rotation.sine[i] = nib_f32_from_bits(s[i]);
  }
  return rotation;
}

static __device__ __forceinline__ void rotate(uint32_t word[4], const struct rotation &rotation) {
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = nib_rope_word(word[i], rotation.cosine[i], rotation.sine[i]);
}

/* The table row of a position, NULL when it has none. The ratio is 1 or 2. */
static __device__ __forceinline__ const float *table_row(const struct nib_rope_insert_params &p, int64_t position) {
  if (position < 0 || position >= p.max_position) return NULL;
  return p.cos_sin + (position & -(int64_t)p.compress_ratio) * NIB_MLA_ROPE;
}

static __device__ __forceinline__ void refuse_position(const struct nib_rope_insert_params &p, int64_t row,
                                                       int64_t position) {
  nib_fault_raise(p.fault, (uint32_t)p.operation, NIB_CONTENT_POSITIONS, row, 0, position, 0);
}

/* Many rows, the query heads of one: a thread has one chunk of NIB_ROPE_HEADS heads, blockDim.y apart. */
static __device__ __forceinline__ void write_queries(const struct nib_rope_insert_params &p, int64_t row) {
  int in_place = p.q_out == p.q;
  uint32_t chunk = threadIdx.x + (in_place ? FIRST_ROPE_CHUNK : 0); /* in place, only those chunks are touched */
  int64_t out_heads = in_place ? p.heads : p.padded_heads;
  int64_t first = (int64_t)blockIdx.y * (NIB_ROPE_HEADS * blockDim.y) + threadIdx.y;
  int rotated = p.rotate_q && chunk >= FIRST_ROPE_CHUNK && first < p.heads;
  uint32_t word[NIB_ROPE_HEADS][4];
  int64_t position = rotated ? p.positions[row] : 0;
#pragma unroll
  for (int i = 0; i < NIB_ROPE_HEADS; i++) {
    int64_t head = first + i * blockDim.y;
#pragma unroll
    for (int j = 0; j < 4; j++) word[i][j] = 0;
    if (head < p.heads) load_chunk<false>(p.q + (row * p.heads + head) * NIB_MLA_DIM + chunk * CHUNK, word[i]);
  }
  if (rotated) {
    const float *table = table_row(p, position);
    struct rotation rotation = load_rotation<false>(table, chunk);
    if (!table && first == 0 && chunk == FIRST_ROPE_CHUNK) refuse_position(p, row, position);
#pragma unroll
    for (int i = 0; i < NIB_ROPE_HEADS; i++) {
      if (first + i * blockDim.y >= p.heads) /* the padding stays +0 */
        break;
      rotate(word[i], rotation);
#pragma unroll
      for (int j = 0; j < 4; j++) word[i][j] = table ? word[i][j] : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < NIB_ROPE_HEADS; i++) {
    int64_t head = first + i * blockDim.y;
    if (head < out_heads)
      nib_store_words<16>(p.q_out + (row * out_heads + head) * NIB_MLA_DIM + chunk * CHUNK, word[i]);
  }
}

/* Few rows: a thread has one chunk of one head, or, in place, one RoPE chunk of one of eight heads. */
template <bool NARROW, class INDEX>
__device__ __forceinline__ void write_queries_few(const struct nib_rope_insert_params &p, uint32_t row, uint32_t group,
                                                  uint32_t thread) {
  int in_place = p.q_out == p.q;
  uint32_t chunk = in_place ? FIRST_ROPE_CHUNK + thread % NIB_ROPE_CHUNKS : thread;
  INDEX head = in_place ? group * NIB_ROPE_CHUNKS + thread / NIB_ROPE_CHUNKS : group;
  INDEX heads = (INDEX)p.heads, out_heads = in_place ? heads : (INDEX)p.padded_heads;
  int64_t position = nib_load_position(p.positions + row);
  uint32_t word[4];
  load_chunk_if<NARROW>(head < heads, p.q + (int64_t)((INDEX)row * heads + head) * NIB_MLA_DIM + chunk * CHUNK, word);
  int rotated = p.rotate_q && chunk >= FIRST_ROPE_CHUNK && head < heads; /* the padding stays +0 */
  const float *table = table_row(p, position);
  struct rotation rotation = load_rotation<NARROW>(rotated ? table : NULL, chunk);
  uint32_t turned[4] = { word[0], word[1], word[2], word[3] };
  rotate(turned, rotation);
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = !rotated ? word[i] : table ? turned[i] : 0;
  uint16_t *out = p.q_out + (int64_t)((INDEX)row * out_heads + head) * NIB_MLA_DIM + chunk * CHUNK;
  if (!NARROW) nib_store_16_if(head < out_heads, out, word);
  else if (head < out_heads) nib_store_words<2>(out, word);
  if (rotated && !table && head == 0 && chunk == FIRST_ROPE_CHUNK) refuse_position(p, row, position);
}

/* Where a kv row goes. */
struct insertion {
  int64_t position;
  uint8_t *data, *sf;
  int used; /* the position is: the row is inserted or, without a table row, refused */
};

template <bool NARROW, class INDEX>
__device__ __forceinline__ struct insertion insertion_of(const struct nib_rope_insert_params &p, INDEX row) {
  struct insertion insertion;
  int wanted = row < (INDEX)p.slot_count;
  row = wanted ? row : 0; /* row 0, of which there is a slot, in place of one without */
  int64_t index = nib_index_at(&p.slots, 0, row);
  insertion.position = p.positions[row];
  struct nib_place<INDEX> slot = NARROW ? nib_place_of<INDEX>(index, p.page_size, p.num_pages)
                                        : nib_place_at_once<INDEX>(index, p.page_size, p.num_pages);
  uint8_t *page = p.cache + slot.page * p.page_stride;
  insertion.data = page + slot.entry * (int64_t)NIB_MLA_DATA_BYTES;
  insertion.sf = page + p.page_size * NIB_MLA_DATA_BYTES + slot.entry * (int64_t)NIB_MLA_SCALE_BYTES;
  /* Unsigned, so that no position overflows; the ratio is 1 or 2. */
  insertion.used = wanted & slot.valid & ((((uint64_t)insertion.position + 1) & (uint64_t)(p.compress_ratio - 1)) == 0);
  return insertion;
}

/* Few rows: half a block of a kv row. The two threads of a block are neighbours in a warp, and all threads of the warp
 * come here. */
template <bool NARROW, class INDEX>
__device__ __forceinline__ void insert_codes(const struct nib_rope_insert_params &p, uint32_t row, uint32_t chunk) {
  int there = chunk < FIRST_ROPE_CHUNK;
  chunk = there ? chunk : 0;
  uint32_t word[4];
  load_chunk<NARROW>(p.kv + (int64_t)row * NIB_MLA_DIM + chunk * CHUNK, word);
  struct insertion insertion = insertion_of<NARROW, INDEX>(p, row);
  int has_nan;
  float amax = nib_pair_amax(nib_amax_words<4>(word, NIB_TYPE_BFLOAT16, &has_nan), &has_nan);
  struct nib_block_scale scale = nib_block_scale(amax, 1.0f);
  uint32_t codes = nib_block_is_small(amax, has_nan, scale.inverse)
                     ? nib_words_encode_small(word, NIB_TYPE_BFLOAT16, scale.inverse)
                     : nib_words_encode(word, NIB_TYPE_BFLOAT16, scale.inverse, NIB_MLA_NAN_CODE);
  int stored = there && insertion.used && insertion.position >= 0 && insertion.position < p.max_position;
  nib_store_1_if(stored && chunk % 2 == 0, insertion.sf + chunk / 2, scale.byte);
  if (!NARROW) nib_store_4_if(stored, insertion.data + chunk * (CHUNK / 2), codes);
  else if (stored) nib_store_codes<true>(insertion.data + chunk * (CHUNK / 2), codes);
}

/* Few rows: one of the eight RoPE chunks of a kv row, and a half of the zeros behind its scales. */
template <bool NARROW, class INDEX>
__device__ __forceinline__ void insert_rope(const struct nib_rope_insert_params &p, INDEX row, uint32_t part) {
  uint32_t chunk = FIRST_ROPE_CHUNK + part, word[4];
  struct insertion insertion = insertion_of<NARROW, INDEX>(p, row);
  load_chunk<NARROW>(p.kv + (row < (INDEX)p.slot_count ? (int64_t)row : 0) * NIB_MLA_DIM + chunk * CHUNK, word);
  const float *table = table_row(p, insertion.position);
  rotate(word, load_rotation<NARROW>(table, chunk));
  int stored = insertion.used && table;
  nib_store_1_if(stored && part % 2 == 0, insertion.sf + chunk / 2, 0);
  if (!NARROW) nib_store_16_if(stored, insertion.data + NIB_MLA_NOPE / 2 + part * 16, word);
  else if (stored) nib_store_words<1>(insertion.data + NIB_MLA_NOPE / 2 + part * 16, word);
  if (insertion.used && !table && part == 0) refuse_position(p, row, insertion.position);
}

/* Many rows: NIB_ROPE_ROWS kv rows of a thread block, ROWS of a thread, eight apart; everything is loaded before the
 * first is stored. Seven warps have the blocks of the codes, one has the RoPE parts, a quarter of a row in a thread:
 * only that one waits for the table. */
#define EACH 8
#define ROWS (NIB_ROPE_ROWS / EACH)

static __device__ __forceinline__ void insert_codes_of_many(const struct nib_rope_insert_params &p, uint32_t first,
                                                            uint32_t block) {
  uint32_t word[ROWS][8];
  struct insertion insertion[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    uint32_t row = first + i * EACH;
    nib_load_block<false>(p.kv + (row < p.slot_count ? (int64_t)row : 0) * NIB_MLA_DIM + block * NIB_BLOCK, word[i]);
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) insertion[i] = insertion_of<false, uint32_t>(p, first + i * EACH);
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (!insertion[i].used || !table_row(p, insertion[i].position)) continue;
    uint32_t codes[2];
    insertion[i].sf[block] = nib_words_quantize(word[i], NIB_TYPE_BFLOAT16, 1.0f, NIB_MLA_NAN_CODE, codes);
    nib_store_block_codes<false>(insertion[i].data + block * NIB_BLOCK_BYTES, codes);
  }
}

static __device__ __forceinline__ void insert_rope_of_many(const struct nib_rope_insert_params &p, uint32_t first,
                                                           uint32_t quarter) {
  uint32_t chunk = FIRST_ROPE_CHUNK + 2 * quarter;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    uint32_t row = first + i * EACH, word[8];
    nib_load_block<false>(p.kv + (row < p.slot_count ? (int64_t)row : 0) * NIB_MLA_DIM + chunk * CHUNK, word);
    struct insertion insertion = insertion_of<false, uint32_t>(p, row);
    const float *table = table_row(p, insertion.position);
    if (insertion.used && !table && quarter == 0) refuse_position(p, row, insertion.position);
    if (!insertion.used || !table) continue;
    insertion.sf[NIB_MLA_NOPE / NIB_BLOCK + quarter] = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      rotate(word + 4 * j, load_rotation<false>(table, chunk + j));
      nib_store_words<16>(insertion.data + NIB_MLA_NOPE / 2 + quarter * 32 + j * 16, word + 4 * j);
    }
  }
}

/* Few rows: blocks of 64 threads; x is a row (or eight), y says which part of it. */
template <bool NARROW, class INDEX>
__device__ __forceinline__ void rope_insert_few(const struct nib_rope_insert_params &p) {
  uint32_t row = blockIdx.x, part = blockIdx.y, thread = threadIdx.x;
  if (part >= NIB_ROPE_QUERIES) write_queries_few<NARROW, INDEX>(p, row, part - NIB_ROPE_QUERIES, thread);
  else if (part == NIB_ROPE_CODES && row < p.slot_count) insert_codes<NARROW, INDEX>(p, row, thread);
  else if (part == NIB_ROPE_PART && (INDEX)row * EACH < (INDEX)p.slot_count)
    insert_rope<NARROW, INDEX>(p, (INDEX)row * EACH + thread / NIB_ROPE_CHUNKS, thread % NIB_ROPE_CHUNKS);
}

/* Thread blocks per multiprocessor; SM120's code takes a few registers more. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define BLOCKS 4
#else
#define BLOCKS 5
#endif

/* Many rows, 16-byte accesses; fewer than 2^31 slots. Blocks of 256 threads: the first along x insert kv rows, the
 * others have blockDim.z rows of queries; their threads are [rows, heads, chunks]. */
NIB_ENTRY(rope_insert, 256, BLOCKS, nib_rope_insert_params) {
  uint32_t inserting = nib_rope_inserting(&p);
  if (blockIdx.x >= inserting) {
    int64_t row = (int64_t)(blockIdx.x - inserting) * blockDim.z + threadIdx.z;
    if (row < p.rows) write_queries(p, row);
    return;
  }
  if (blockIdx.y != 0) return;
  const uint32_t blocks = NIB_MLA_NOPE / NIB_BLOCK;
  uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x,
           first = blockIdx.x * NIB_ROPE_ROWS;
  if (thread < EACH * blocks) insert_codes_of_many(p, first + thread / blocks, thread % blocks);
  else insert_rope_of_many(p, first + (thread - EACH * blocks) / 4, thread % 4);
}

/* Few rows and slots, 16-byte accesses. */
NIB_ENTRY(rope_insert_few, 64, 8, nib_rope_insert_params) { rope_insert_few<false, uint32_t>(p); }

/* Any alignment, any size. */
NIB_ENTRY(rope_insert_narrow, 64, 8, nib_rope_insert_params) { rope_insert_few<true, int64_t>(p); }
