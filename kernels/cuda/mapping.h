/* How some kernels map threads, where a launch and its kernel must agree. Shared by C and CUDA. */
#ifndef NIB_CUDA_MAPPING_H
#define NIB_CUDA_MAPPING_H

#include "../nvfp4.h"

/* Threads of a block are [z, y, x] with blocks of a head along x. In a cache whose tokens lie closer than its heads
 * (HND), rows go along y and heads along z, so that neighbouring threads write neighbouring bytes; otherwise the
 * other way round. */
NIB_HD int nib_append_rows_inside(const struct nib_append_params *p) {
  return p->k_cache.token_stride < p->k_cache.head_stride;
}

NIB_HD int nib_quantize_tokens_inside(const struct nib_quantize_cache_params *p) {
  return p->source_token_stride < p->source_head_stride;
}

/* rope_insert of many rows: query heads per thread, and kv rows per thread block. */
#define NIB_ROPE_HEADS 4
#define NIB_ROPE_ROWS  16

/* Thread blocks that insert kv rows. */
NIB_HD uint32_t nib_rope_inserting(const struct nib_rope_insert_params *p) {
  return (uint32_t)((p->slot_count + NIB_ROPE_ROWS - 1) / NIB_ROPE_ROWS);
}

/* rope_insert of few rows: what the thread blocks of a y do. */
#define NIB_ROPE_CODES   0 /* the codes of kv row x */
#define NIB_ROPE_PART    1 /* the RoPE parts of kv rows 8 x to 8 x + 7 */
#define NIB_ROPE_QUERIES 2 /* and later: queries of row x, a head or, in place, eight heads */
#define NIB_ROPE_CHUNKS  8 /* of a row's RoPE part */

/* Query heads that each row of q_out has to get. */
NIB_HD int64_t nib_rope_heads(const struct nib_rope_insert_params *p) {
  if (!p->q || !p->q_out) return 0;
  if (p->q_out == p->q) return p->rotate_q ? p->heads : 0;
  return p->padded_heads;
}

#endif
