#include "geometry.h"

#include <stdbool.h>

#include "../../kernels/cuda/mapping.h"

#define MAX_Y 65535 /* blocks along y and z of a grid */

static int64_t at_least_1(int64_t value) { return value > 1 ? value : 1; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t pieces(int64_t count, int64_t size) { return at_least_1((count + size - 1) / size); }

/* `count` in equal parts of at most `most`. */
static int64_t part(int64_t count, int64_t most) { return pieces(at_least_1(count), pieces(count, at_least_1(most))); }

static void set(uint32_t *size, int64_t x, int64_t y, int64_t z) {
  size[0] = x > UINT32_MAX ? UINT32_MAX : (uint32_t)x;
  size[1] = y > UINT32_MAX ? UINT32_MAX : (uint32_t)y;
  size[2] = z > UINT32_MAX ? UINT32_MAX : (uint32_t)z;
}

static bool aligned(const void *pointer, uintptr_t bytes) { return (uintptr_t)pointer % bytes == 0; }

static bool multiple(int64_t stride, int64_t of) { return stride % of == 0; }

static bool paged_aligned(const struct nib_paged *cache, int64_t bytes) {
  return aligned(cache->data, (uintptr_t)bytes) && multiple(cache->page_stride, bytes) &&
         multiple(cache->token_stride, bytes) && multiple(cache->head_stride, bytes);
}

/* Whether slots, pages and entries have 31 bits. */
static bool few_slots(int64_t num_pages, int64_t page_size) {
  return num_pages <= INT32_MAX && page_size <= INT32_MAX && num_pages * page_size <= INT32_MAX;
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

static void append(const struct nib_append_params *p, int32_t multiprocessors, struct nib_cuda_geometry *g) {
  int64_t blocks = p->head_dim / NIB_BLOCK;
  bool wide = aligned(p->key, 16) && aligned(p->value, 16) && multiple(p->key_row_stride, 8) &&
              multiple(p->key_head_stride, 8) && multiple(p->value_row_stride, 8) &&
              multiple(p->value_head_stride, 8) && paged_aligned(&p->k_cache, 8) && paged_aligned(&p->v_cache, 8) &&
              few_slots(p->num_pages, p->page_size);
  bool f16 = p->type == NIB_TYPE_FLOAT16;
  int64_t work = p->rows * p->heads * blocks;
  if (wide && work > 0 && p->num_pages > 0 && work < (int64_t)multiprocessors * 256) {
    g->entry = f16 ? NIB_CUDA_ENTRY_APPEND_FEW_F16 : NIB_CUDA_ENTRY_APPEND_FEW_BF16;
    int64_t x = 2 * part(blocks, 32), heads = part(p->heads, 64 / x),
            rows = at_least_1(least(p->rows, 64 / (x * heads)));
    set(g->block, x, heads, rows);
    set(g->grid, pieces(p->rows, rows), pieces(p->heads, heads), 2 * pieces(2 * blocks, x));
    return;
  }
  int64_t heads_per_thread = wide && p->heads > 1 ? 2 : 1, most = pieces(p->heads, heads_per_thread);
  int64_t x = part(blocks, 128), rows, heads;
  if (!wide) g->entry = NIB_CUDA_ENTRY_APPEND_NARROW;
  else if (p->heads == 1) g->entry = f16 ? NIB_CUDA_ENTRY_APPEND_ONE_F16 : NIB_CUDA_ENTRY_APPEND_ONE_BF16;
  else g->entry = f16 ? NIB_CUDA_ENTRY_APPEND_F16 : NIB_CUDA_ENTRY_APPEND_BF16;
  if (nib_append_rows_inside(p)) {
    rows = least(pieces(32, x), 128 / x); /* a warp's scales fill a 32-byte sector */
    heads = part(most, least(64, 128 / (x * rows)));
    rows = at_least_1(least(p->rows, 128 / (x * heads)));
    set(g->block, x, rows, heads);
  } else {
    heads = part(most, 128 / x);
    rows = at_least_1(least(least(p->rows, 64), 128 / (x * heads)));
    set(g->block, x, heads, rows);
  }
  set(g->grid, pieces(p->rows, rows), pieces(p->heads, heads * heads_per_thread), pieces(blocks, x));
}

static void materialize(const struct nib_materialize_params *p, int32_t multiprocessors, struct nib_cuda_geometry *g) {
  bool wide = aligned(p->out, 16) && paged_aligned(&p->k_cache, 8) && paged_aligned(&p->v_cache, 8);
  int64_t blocks = p->head_dim / NIB_BLOCK, pages = p->batch * p->max_pages;
  int64_t work = (pages + 1) * p->heads * p->page_size * blocks; /* threads with one block of K and V each */
  if (wide && pages > 0 && work > 0 && p->num_pages > 0 && work < (int64_t)multiprocessors * 512 &&
      p->page_size * blocks <= 256) {
    g->entry = NIB_CUDA_ENTRY_MATERIALIZE_FEW;
    set(g->block, blocks, p->page_size, 1);
    set(g->grid, p->max_pages, p->batch + 1, 2 * p->heads);
    if (g->grid[1] <= MAX_Y && g->grid[2] <= MAX_Y) return;
  }
  /* Eight heads per thread spare it the way to its page; few pages are rather spread over the multiprocessors. */
  bool many = pages >= 2 * multiprocessors, four = many && p->heads > 2;
  g->entry = !wide  ? NIB_CUDA_ENTRY_MATERIALIZE_NARROW
             : four ? NIB_CUDA_ENTRY_MATERIALIZE
                    : NIB_CUDA_ENTRY_MATERIALIZE_TWO;
  int64_t x = part(blocks, 256), y = part(p->page_size, 256 / x), z = 1;
  if (x * y < 128) z = part(wide && four ? pieces(p->heads, 4) : p->heads, least(64, 128 / (x * y)));
  set(g->block, x, y, z);
  set(g->grid, at_least_1(p->max_pages), least(p->batch + 1, MAX_Y), least(pieces(p->heads, many ? 8 * z : z), MAX_Y));
}

static void dequantize(const struct nib_dequantize_params *p, int32_t multiprocessors, struct nib_cuda_geometry *g) {
  bool wide = paged_aligned(&p->k_cache, 4) && paged_aligned(&p->v_cache, 4) && aligned(p->out_k, 16) &&
              aligned(p->out_v, 16) && few_slots(p->num_pages, p->page_size);
  int64_t halves = (p->k_head_dim > p->v_head_dim ? p->k_head_dim : p->v_head_dim) / (NIB_BLOCK / 2);
  int64_t tokens = least(p->max_seq_len, INT32_MAX), threads = 128;
  bool f16 = p->type == NIB_TYPE_FLOAT16;
  int64_t work = p->batch * tokens * p->heads * halves;
  if (wide && work > 0 && p->num_pages > 0 && work < (int64_t)multiprocessors * 512) {
    g->entry = f16 ? NIB_CUDA_ENTRY_DEQUANTIZE_FEW_F16 : NIB_CUDA_ENTRY_DEQUANTIZE_FEW_BF16;
    int64_t x = part(halves, 64), y = part(p->heads, 64 / x), z = at_least_1(least(least(tokens, 64), 64 / (x * y)));
    set(g->block, x, y, z);
    set(g->grid, pieces(tokens, z), at_least_1(p->batch), 2 * pieces(halves, x) * pieces(p->heads, y));
    if (g->grid[1] <= MAX_Y && g->grid[2] <= MAX_Y) return;
  }
  bool one = wide && p->heads <= 2;
  if (!wide) g->entry = NIB_CUDA_ENTRY_DEQUANTIZE_NARROW;
  else if (one) g->entry = f16 ? NIB_CUDA_ENTRY_DEQUANTIZE_ONE_F16 : NIB_CUDA_ENTRY_DEQUANTIZE_ONE_BF16;
  else g->entry = f16 ? NIB_CUDA_ENTRY_DEQUANTIZE_F16 : NIB_CUDA_ENTRY_DEQUANTIZE_BF16;
  /* Eight heads per thread, in two steps, spare it the way to its token. */
  int64_t x = part(halves, threads), y = part(wide && !one ? pieces(p->heads, 8) : p->heads, threads / x);
  int64_t z = at_least_1(least(least(tokens, 64), threads / (x * y)));
  set(g->block, x, y, z);
  set(g->grid, pieces(tokens, z), least(at_least_1(p->batch), MAX_Y), 2 * pieces(p->batch, MAX_Y));
}

static void rope_insert(const struct nib_rope_insert_params *p, int32_t multiprocessors, struct nib_cuda_geometry *g) {
  bool wide = aligned(p->q, 16) && aligned(p->q_out, 16) && aligned(p->kv, 16) && aligned(p->cos_sin, 16) &&
              aligned(p->cache, 16) && (p->num_pages <= 1 || multiple(p->page_stride, 16)) &&
              few_slots(p->num_pages, p->page_size);
  bool in_place = p->q_out == p->q;
  int64_t heads = nib_rope_heads(p), x = heads > 0 && in_place ? NIB_ROPE_CHUNKS : NIB_MLA_DIM / 8, y = 1;
  bool few = p->rows * at_least_1(heads) * x < (int64_t)multiprocessors * 1024;
  if (!wide || few) {
    g->entry = wide ? NIB_CUDA_ENTRY_ROPE_INSERT_FEW : NIB_CUDA_ENTRY_ROPE_INSERT_NARROW;
    set(g->block, 64, 1, 1);
    set(g->grid, at_least_1(p->rows), NIB_ROPE_QUERIES + (heads > 0 ? pieces(heads, 64 / x) : 0), 1);
    return;
  }
  g->entry = NIB_CUDA_ENTRY_ROPE_INSERT;
  while (y < 256 / x && y * NIB_ROPE_HEADS < heads) y *= 2;
  int64_t z = 256 / (x * y);
  set(g->block, x, y, z);
  set(g->grid, at_least_1(nib_rope_inserting(p) + (heads > 0 ? pieces(p->rows, z) : 0)),
      pieces(heads, NIB_ROPE_HEADS * y), 1);
}

static void swizzle(const struct nib_swizzle_params *p, struct nib_cuda_geometry *g) {
  const struct nib_paged *linear = p->inverse ? &p->destination : &p->source;
  const struct nib_paged *interleaved = p->inverse ? &p->source : &p->destination;
  int64_t width = 1; /* bytes of a linear row at a time */
  g->entry = NIB_CUDA_ENTRY_SWIZZLE_NARROW;
  if (multiple(p->blocks, 16) && paged_aligned(linear, 4) && paged_aligned(interleaved, 16)) {
    g->entry = NIB_CUDA_ENTRY_SWIZZLE_32;
    width = 4;
  } else if (multiple(p->blocks, 8) && paged_aligned(linear, 2) && paged_aligned(interleaved, 8)) {
    g->entry = NIB_CUDA_ENTRY_SWIZZLE_16;
    width = 2;
  }
  int64_t per_page = p->page_size / 4 * p->heads * p->blocks / width;
  int64_t threads = per_page <= 32 ? 32 : per_page <= 64 ? 64 : per_page <= 128 ? 128 : 256;
  set(g->block, threads, 1, 1);
  set(g->grid, least(at_least_1(p->num_pages), INT32_MAX), least(pieces(per_page, threads), MAX_Y), 1);
}

static void amax(const struct nib_amax_params *p, int32_t multiprocessors, struct nib_cuda_geometry *g) {
  bool wide = aligned(p->source, 16) && multiple(p->page_stride, 8) && multiple(p->token_stride, 8) &&
              multiple(p->head_stride, 8) && multiple(p->head_dim, 8);
  g->entry = !wide                         ? NIB_CUDA_ENTRY_AMAX_NARROW
             : p->type == NIB_TYPE_FLOAT16 ? NIB_CUDA_ENTRY_AMAX_F16
                                           : NIB_CUDA_ENTRY_AMAX_BF16;
  int64_t count = p->num_pages * p->page_size * p->heads * p->head_dim / (wide ? 8 : 1);
  set(g->block, 256, 1, 1);
  set(g->grid, least(pieces(count, 256), (int64_t)at_least_1(multiprocessors) * 8), 1, 1);
}

static void quantize_cache(const struct nib_quantize_cache_params *p, struct nib_cuda_geometry *g) {
  bool wide = aligned(p->source, 16) && multiple(p->source_page_stride, 8) && multiple(p->source_token_stride, 8) &&
              multiple(p->source_head_stride, 8) && paged_aligned(&p->data, 8);
  g->entry = !wide                         ? NIB_CUDA_ENTRY_QUANTIZE_CACHE_NARROW
             : p->type == NIB_TYPE_FLOAT16 ? NIB_CUDA_ENTRY_QUANTIZE_CACHE_F16
                                           : NIB_CUDA_ENTRY_QUANTIZE_CACHE_BF16;
  bool tokens_inside = nib_quantize_tokens_inside(p);
  int64_t blocks = p->head_dim / NIB_BLOCK, x = part(blocks, 256);
  int64_t y = part(tokens_inside ? p->page_size : p->heads, 256 / x);
  int64_t z = part(tokens_inside ? p->heads : p->page_size, least(64, 256 / (x * y)));
  int64_t tokens = tokens_inside ? y : z, heads = tokens_inside ? z : y;
  set(g->block, x, y, z);
  set(g->grid, least(at_least_1(p->num_pages), INT32_MAX), least(pieces(p->page_size, tokens), MAX_Y),
      least(pieces(p->heads, heads), MAX_Y));
}

static void mla_dequantize(const struct nib_mla_dequantize_params *p, struct nib_cuda_geometry *g) {
  bool wide = aligned(p->out, 16) && aligned(p->cache, 4) && (p->num_pages <= 1 || multiple(p->page_stride, 4));
  g->entry = wide ? NIB_CUDA_ENTRY_MLA_DEQUANTIZE : NIB_CUDA_ENTRY_MLA_DEQUANTIZE_NARROW;
  set(g->block, NIB_MLA_DIM / 8, 4, 1);
  set(g->grid, least(pieces(p->count, 4), INT32_MAX), 1, 1);
}

/* ---- Tensor plumbing ------------------------------------------------------------------------------------------- */

/* Bytes of an element of enum nib_type. */
static int64_t type_size(int32_t type) {
  static const uint8_t sizes[] = { 4, 2, 2, 1, 1, 1, 2, 4, 8 };
  return sizes[type];
}

/* The largest word, up to 16 bytes, that divides each row of a tensor without gaps; one element if there is none. */
static int64_t word_size(const void *data, int64_t size, int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  if (ndim == 0 || strides[ndim - 1] != 1) return size;
  uintptr_t bits = (uintptr_t)data | (uintptr_t)(sizes[ndim - 1] * size);
  for (int32_t d = 0; d < ndim - 1; d++) bits |= (uintptr_t)(strides[d] * size);
  return bits % 16 == 0 ? 16 : size;
}

/* Threads over rows of `count` items each: x along a row, y over the rows. */
static void strided(int32_t ndim, const int64_t *sizes, int64_t count, int64_t items, struct nib_cuda_geometry *g) {
  int64_t rows = 1, x = 1;
  for (int32_t d = 0; d < ndim - 1; d++) rows *= sizes[d];
  while (x < 256 && x < count) x *= 2;
  int64_t y = at_least_1(least(256 / x, rows));
  set(g->block, x, y, 1);
  set(g->grid, least(pieces(count, x * items), INT32_MAX), least(pieces(rows, y), MAX_Y), 1);
}

static void copy(const struct nib_copy_params *p, struct nib_cuda_geometry *g) {
  int32_t from = p->source_type, to = p->destination_type;
  int64_t inner = p->ndim > 0 ? p->size[p->ndim - 1] : 1, size = type_size(from);
  if (from == to) {
    int64_t word = word_size(p->source, size, p->ndim, p->size, p->source_stride);
    word = least(word, word_size(p->destination, size, p->ndim, p->size, p->destination_stride));
    g->entry = word == 16  ? NIB_CUDA_ENTRY_COPY_128
               : word == 8 ? NIB_CUDA_ENTRY_COPY_64
               : word == 4 ? NIB_CUDA_ENTRY_COPY_32
               : word == 2 ? NIB_CUDA_ENTRY_COPY_16
                           : NIB_CUDA_ENTRY_COPY_8;
    strided(p->ndim, p->size, inner * size / word, 4, g);
    return;
  }
  bool from_f32 = from == NIB_TYPE_FLOAT32 && (to == NIB_TYPE_FLOAT16 || to == NIB_TYPE_BFLOAT16);
  bool to_f32 = to == NIB_TYPE_FLOAT32 && (from == NIB_TYPE_FLOAT16 || from == NIB_TYPE_BFLOAT16);
  bool wide = (from_f32 || to_f32) && p->ndim > 0 && multiple(inner, 4) && p->source_stride[p->ndim - 1] == 1 &&
              p->destination_stride[p->ndim - 1] == 1 && aligned(p->source, 4 * (uintptr_t)size) &&
              aligned(p->destination, 4 * (uintptr_t)type_size(to));
  for (int32_t d = 0; wide && d < p->ndim - 1; d++)
    wide = multiple(p->source_stride[d], 4) && multiple(p->destination_stride[d], 4);
  if (!wide) g->entry = NIB_CUDA_ENTRY_COPY_CONVERT;
  else if (from_f32) g->entry = to == NIB_TYPE_FLOAT16 ? NIB_CUDA_ENTRY_COPY_F32_F16 : NIB_CUDA_ENTRY_COPY_F32_BF16;
  else g->entry = from == NIB_TYPE_FLOAT16 ? NIB_CUDA_ENTRY_COPY_F16_F32 : NIB_CUDA_ENTRY_COPY_BF16_F32;
  strided(p->ndim, p->size, wide ? inner / 4 : inner, wide ? 4 : 1, g);
}

static void fill(const struct nib_fill_params *p, struct nib_cuda_geometry *g) {
  int64_t size = type_size(p->type), word = word_size(p->destination, size, p->ndim, p->size, p->stride);
  g->entry = word == 16  ? NIB_CUDA_ENTRY_FILL_128
             : word == 8 ? NIB_CUDA_ENTRY_FILL_64
             : word == 4 ? NIB_CUDA_ENTRY_FILL_32
             : word == 2 ? NIB_CUDA_ENTRY_FILL_16
                         : NIB_CUDA_ENTRY_FILL_8;
  strided(p->ndim, p->size, (p->ndim > 0 ? p->size[p->ndim - 1] : 1) * size / word, 1, g);
}

static void linear(enum nib_cuda_entry entry, int64_t count, struct nib_cuda_geometry *g) {
  g->entry = entry;
  set(g->block, 256, 1, 1);
  set(g->grid, least(pieces(count, 256), INT32_MAX), 1, 1);
}

void nib_cuda_geometry(enum nib_kernel kernel, const void *params, int32_t multiprocessors,
                       struct nib_cuda_geometry *out) {
  out->shared_bytes = 0;
  switch (kernel) {
  case NIB_KERNEL_APPEND: append(params, multiprocessors, out); break;
  case NIB_KERNEL_MATERIALIZE: materialize(params, multiprocessors, out); break;
  case NIB_KERNEL_DEQUANTIZE: dequantize(params, multiprocessors, out); break;
  case NIB_KERNEL_ROPE_INSERT: rope_insert(params, multiprocessors, out); break;
  case NIB_KERNEL_SWIZZLE: swizzle(params, out); break;
  case NIB_KERNEL_AMAX: amax(params, multiprocessors, out); break;
  case NIB_KERNEL_QUANTIZE_CACHE: quantize_cache(params, out); break;
  case NIB_KERNEL_MLA_DEQUANTIZE: mla_dequantize(params, out); break;
  case NIB_KERNEL_ROPE_TABLE:
    linear(NIB_CUDA_ENTRY_ROPE_TABLE, ((const struct nib_rope_table_params *)params)->max_position * (NIB_MLA_ROPE / 2),
           out);
    break;
  case NIB_KERNEL_COPY: copy(params, out); break;
  case NIB_KERNEL_FILL: fill(params, out); break;
  case NIB_KERNEL_ARANGE: linear(NIB_CUDA_ENTRY_ARANGE, ((const struct nib_arange_params *)params)->count, out); break;
  case NIB_KERNEL_RANDOM:
    linear(NIB_CUDA_ENTRY_RANDOM, ((const struct nib_random_params *)params)->count / 2 + 1, out);
    break;
  case NIB_KERNEL_COUNT: break;
  }
}
