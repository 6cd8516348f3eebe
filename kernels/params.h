/* One plain struct per kernel, filled by the runtime and read by the CPU and the CUDA kernels alike.
 *
 * Conventions: every stride and size is in elements and 64 bits wide; pointers are in the device's own address space
 * and already include the view's offset; a size of 0 anywhere means nothing to do. The runtime has checked shapes,
 * dtypes and strides before a kernel sees them; a kernel checks the *contents* it reads (slots, page indices, lengths,
 * positions, device scalars) and reports what it refuses in `fault`. */
#ifndef NIB_PARAMS_H
#define NIB_PARAMS_H

#include <stdint.h>

/* X(symbol, file name): one kernel each, in kernels/cpu/NAME.c as nib_cpu_NAME and in kernels/cuda/NAME.cu as one or
 * more functions, which kernels/cuda/NAME_launch.c lists. */
#define NIB_KERNEL_LIST(X)          \
  X(APPEND, append)                 \
  X(MATERIALIZE, materialize)       \
  X(DEQUANTIZE, dequantize)         \
  X(ROPE_INSERT, rope_insert)       \
  X(SWIZZLE, swizzle)               \
  X(AMAX, amax)                     \
  X(QUANTIZE_CACHE, quantize_cache) \
  X(MLA_DEQUANTIZE, mla_dequantize) \
  X(ROPE_TABLE, rope_table)         \
  X(COPY, copy)                     \
  X(FILL, fill)                     \
  X(ARANGE, arange)                 \
  X(RANDOM, random)

#define X(symbol, name) NIB_KERNEL_##symbol,
enum nib_kernel { NIB_KERNEL_LIST(X) NIB_KERNEL_COUNT };
#undef X

/* X(symbol, name, C type that holds an element, FLOAT UNSIGNED or SIGNED, what else the list was given): the element
 * types, in the order of nibble.h's nib_dtype (the runtime asserts that they agree). */
#define NIB_TYPE_LIST(X, ...)                                  \
  X(FLOAT32, float32, float, FLOAT, __VA_ARGS__)               \
  X(FLOAT16, float16, uint16_t, FLOAT, __VA_ARGS__)            \
  X(BFLOAT16, bfloat16, uint16_t, FLOAT, __VA_ARGS__)          \
  X(FLOAT8_E4M3FN, float8_e4m3fn, uint8_t, FLOAT, __VA_ARGS__) \
  X(UINT8, uint8, uint8_t, UNSIGNED, __VA_ARGS__)              \
  X(INT8, int8, int8_t, SIGNED, __VA_ARGS__)                   \
  X(UINT16, uint16, uint16_t, UNSIGNED, __VA_ARGS__)           \
  X(INT32, int32, int32_t, SIGNED, __VA_ARGS__)                \
  X(INT64, int64, int64_t, SIGNED, __VA_ARGS__)

#define X(symbol, ...) NIB_TYPE_##symbol,
enum nib_type { NIB_TYPE_LIST(X, ) NIB_TYPE_COUNT };
#undef X

/* ---- Content faults -------------------------------------------------------------------------------------------- */

/* X(symbol, name): the operations that can refuse contents, by the name that an error message shows. */
#define NIB_OPERATION_LIST(X)                                              \
  X(APPEND, "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping") \
  X(MATERIALIZE, "quantization.nvfp4_kv_materialize_fp8")                  \
  X(DEQUANTIZE, "quantization.nvfp4_kv_dequantize_paged")                  \
  X(ROPE_INSERT, "mla.cake_dsv4_nvfp4_rope_quantize_insert")               \
  X(KV_ROPE_INSERT, "mla.cake_dsv4_nvfp4_kv_rope_quantize_insert")         \
  X(SWIZZLE, "quantization.swizzle_v_scales")                              \
  X(QUANTIZE_CACHE, "quantization.nvfp4_quantize_paged_kv_cache")          \
  X(MLA_DEQUANTIZE, "mla.dequantize_cache")                                \
  X(ROPE_TABLE, "rope_table")

#define X(symbol, name) NIB_OPERATION_##symbol,
enum nib_operation { NIB_OPERATION_LIST(X) NIB_OPERATION_COUNT };
#undef X

/* X(symbol, parameter, expectation): what a kernel can find wrong with the contents of a parameter. */
#define NIB_CONTENT_LIST(X)                                                                         \
  X(K_SCALE, "k_scale", "a positive finite value")                                                  \
  X(V_SCALE, "v_scale", "a positive finite value")                                                  \
  X(SEQ_LENS, "seq_lens", "at most max_kv_len")                                                     \
  X(BLOCK_TABLES, "block_tables", "a page index of the cache")                                      \
  X(KV_PAGE_INDPTR, "kv_page_indptr", "a range inside 0..num_pages that holds the request's pages") \
  X(POSITIONS, "positions", "a row of cos_sin_cache")                                               \
  X(SLOTS, "slots", "a slot of the cache")                                                          \
  X(K_CACHE, "k_cache", "finite elements")                                                          \
  X(V_CACHE, "v_cache", "finite elements")                                                          \
  X(K_GLOBAL_SF, "k_global_sf", "a positive finite value with a finite reciprocal")                 \
  X(V_GLOBAL_SF, "v_global_sf", "a positive finite value with a finite reciprocal")

#define X(symbol, parameter, expectation) NIB_CONTENT_##symbol,
enum nib_content { NIB_CONTENT_LIST(X) NIB_CONTENT_COUNT };
#undef X

/* The record of a device's first content fault. `state` goes 0 (free) -> 1 (claimed by one compare-and-swap) -> 2 (all
 * fields written); only the runtime sets it back to 0, after a wait. A kernel calls nib_fault_raise (nvfp4.h). */
struct nib_fault {
  uint32_t state;
  uint32_t operation; /* enum nib_operation */
  uint32_t content;   /* enum nib_content */
  uint32_t is_float;  /* which of the two values below is meant */
  int64_t index;      /* flat row-major index into the parameter, from 0 */
  int64_t integer;
  double real;
};

/* ---- Operations ------------------------------------------------------------------------------------------------ */

/* A paged cache, whatever its layout: element (page, token, head, x) is at page*page_stride + token*token_stride +
 * head*head_stride + x. Packed data and scales are one byte an element, so that strides are bytes too. */
struct nib_paged {
  uint8_t *data;
  int64_t page_stride, token_stride, head_stride;
};

/* A global scale: read from the device when `pointer` is set, otherwise `value`. */
struct nib_scale {
  const float *pointer;
  float value;
};

/* A 1-D or 2-D table of int32 or int64 indices. */
struct nib_indices {
  const void *data;
  int64_t row_stride; /* 2-D only */
  int64_t stride;
  int32_t is_int64;
};

/* Quantize and append. Row i of `key` and `value` ([rows, heads, head_dim], float16 or bfloat16, last dimension
 * contiguous). */
struct nib_append_params {
  const void *key, *value;
  int64_t key_row_stride, key_head_stride, value_row_stride, value_head_stride;
  struct nib_indices slots; /* [rows] */
  struct nib_paged k_cache, v_cache, k_sf, v_sf;
  struct nib_scale k_scale, v_scale;
  int64_t rows, heads, head_dim, page_size, num_pages;
  int32_t type;          /* enum nib_type of key and value */
  int32_t four_over_six; /* also tries the scale that maps a block's amax to 4 */
  struct nib_fault *fault;
};

/* Materialize as E4M3. */
struct nib_materialize_params {
  struct nib_paged k_cache, v_cache, k_sf, v_sf; /* HND or any strides; K scales linear, V scales interleaved */
  const int32_t *block_tables;                   /* [batch, columns] or [batch, 2, columns] */
  int64_t table_row_stride, table_kv_stride, table_stride; /* table_kv_stride is 0 when K and V share indices */
  const int32_t *seq_lens;
  int64_t seq_stride;
  const int32_t *indptr; /* [batch + 1] or NULL: b * max_pages */
  int64_t indptr_stride;
  uint8_t *out;       /* [num_out_pages + 1, 2, heads, page_size, head_dim] compact */
  int32_t *out_table; /* [batch, max_pages] compact */
  int64_t batch, max_kv_len, max_pages, heads, head_dim, page_size, num_pages, num_out_pages;
  /* For the index that a fault on block_tables names: the table's logical row and K/V-plane sizes. */
  int64_t table_columns;
  struct nib_fault *fault;
};

/* Dequantize from pages. K and V may have different head_dim. */
struct nib_dequantize_params {
  struct nib_paged k_cache, v_cache, k_sf, v_sf;
  struct nib_indices block_tables; /* [batch, >= ceil(max_seq_len / page_size)] */
  const int32_t *seq_lens;
  int64_t seq_stride;
  const float *k_scale, *v_scale;
  void *out_k, *out_v; /* [batch, max_seq_len, heads, head_dim], compact, float16 or bfloat16 */
  int64_t batch, max_seq_len, heads, k_head_dim, v_head_dim, page_size, num_pages;
  int32_t type; /* enum nib_type of the outputs */
};

#define NIB_MLA_DIM          512 /* 448 NoPE dimensions, then 64 RoPE dimensions */
#define NIB_MLA_NOPE         448
#define NIB_MLA_ROPE         64
#define NIB_MLA_DATA_BYTES   352 /* 224 bytes E2M1, 64 bfloat16 */
#define NIB_MLA_SCALE_BYTES  32  /* 28 E4M3, 4 zero */
#define NIB_MLA_RECORD_BYTES 384

/* Rotate, quantize and insert: with queries, and its sibling without. */
struct nib_rope_insert_params {
  const uint16_t *q;  /* [rows, heads, 512] bfloat16, compact; NULL: no queries at all */
  uint16_t *q_out;    /* [rows, padded_heads, 512] compact; NULL: not written; == q: in place, RoPE dimensions only */
  const uint16_t *kv; /* [rows, 512] bfloat16, compact */
  uint8_t *cache;     /* record pages */
  int64_t page_stride;
  struct nib_indices slots; /* [slot_count], slot_count <= rows */
  const int64_t *positions; /* [rows] compact */
  const float *cos_sin;     /* [max_position, 64] compact */
  int64_t rows, slot_count, heads, padded_heads, page_size, num_pages, max_position;
  int32_t rotate_q;       /* apply_q_rope */
  int32_t compress_ratio; /* 1 or 2 */
  int32_t operation;      /* enum nib_operation, for faults */
  struct nib_fault *fault;
};

/* V scales between linear and 4-token-interleaved: logical (token t, block s) <-> row 4*(t/4) + s/(S/4), column
 * 4*(s%(S/4)) + t%4. `blocks` is S, a multiple of 4; page_size is a multiple of 4. Source and destination never
 * overlap. */
struct nib_swizzle_params {
  struct nib_paged source, destination;
  int64_t num_pages, heads, page_size, blocks;
  int32_t inverse; /* 0: linear -> interleaved, 1: interleaved -> linear */
};

/* max |x| over the non-NaN elements of a [pages, tokens, heads, head_dim] view, combined into *out by an atomic maximum
 * (the runtime stores 0 there first; non-negative floats order like their bits). */
struct nib_amax_params {
  const void *source;
  int64_t page_stride, token_stride, head_stride;
  int64_t num_pages, page_size, heads, head_dim;
  int32_t type; /* float16 or bfloat16 */
  float *out;
};

/* A whole cache of float16 or bfloat16 quantized in one go. global_sf = the given scalar (`global_sf.pointer` or a
 * value > 0), or, when `amax` is set, 448 / max(*amax, 1e-12); g = 1 / global_sf, written to *out_scale. When global_sf
 * or g is not positive and finite (an infinite amax too), data and scales are written as zeros and a fault is
 * raised. */
struct nib_quantize_cache_params {
  const void *source;
  int64_t source_page_stride, source_token_stride, source_head_stride;
  struct nib_paged data, sf;
  const float *amax;
  struct nib_scale global_sf;
  float *out_scale; /* one float32 */
  int64_t num_pages, page_size, heads, head_dim;
  int32_t type;
  int32_t interleaved;   /* 1 for V: scales 4-token-interleaved */
  int32_t four_over_six; /* as for append */
  int32_t amax_content;  /* enum nib_content for an infinite amax */
  int32_t scale_content; /* enum nib_content for a bad global_sf */
  struct nib_fault *fault;
};

/* bfloat16 [count, 512] rows of rope_insert's records; a bad slot gives a zero row and a fault. */
struct nib_mla_dequantize_params {
  const uint8_t *cache;
  int64_t page_stride;
  struct nib_indices slots;
  uint16_t *out;
  int64_t count, page_size, num_pages;
  struct nib_fault *fault;
};

/* cos | sin table, [max_position, 64] compact: angle = position * inv_freq[p] in float64, rounded once to `type`. */
struct nib_rope_table_params {
  double inv_freq[NIB_MLA_ROPE / 2];
  void *out;
  int64_t max_position;
  int32_t type; /* float32, float16 or bfloat16 */
};

/* ---- Tensor plumbing ------------------------------------------------------------------------------------------- */

#define NIB_MAX_DIMS 8

/* Strided copy with conversion. Sizes are the runtime's simplified view of both tensors: dimensions of size 1 dropped,
 * neighbours merged where both sides allow it; dimension ndim-1 is innermost; ndim 0 is one element. */
struct nib_copy_params {
  const void *source;
  void *destination;
  int32_t source_type, destination_type;
  int32_t ndim;
  int64_t size[NIB_MAX_DIMS], source_stride[NIB_MAX_DIMS], destination_stride[NIB_MAX_DIMS];
};

/* Every element becomes the same bits (already converted to `type` by the runtime). Same simplification as for copy. */
struct nib_fill_params {
  void *destination;
  int32_t type, ndim;
  int64_t size[NIB_MAX_DIMS], stride[NIB_MAX_DIMS];
  uint64_t bits; /* the element, in the low bytes */
};

/* Element i (row-major) = start + i*step, converted to the type as copy does. `is_float` 0: the integers, in wrapping
 * 64-bit arithmetic; 1: the reals, in float64 (two roundings). */
struct nib_arange_params {
  void *out; /* compact */
  int32_t type, is_float;
  int64_t count, start, step;
  double start_real, step_real;
};

/* Counter-based random elements (random.h): element i depends on seed and i alone. Written to a compact tensor. */
enum nib_random_kind { NIB_RANDOM_NORMAL, NIB_RANDOM_INTEGER, NIB_RANDOM_PERMUTATION };
struct nib_random_params {
  void *out;
  int32_t type, kind;
  int64_t count;
  uint64_t seed;
  int64_t low;    /* integers: low + a value below `range` */
  uint64_t range; /* integers: number of values, >= 1; permutation: unused (it is of 0..count-1) */
};

#endif
