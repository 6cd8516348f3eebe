/* How some kernels map threads, where geometry.c and the kernel must agree. Shared by C and CUDA. */
#ifndef NIB_CUDA_MAPPING_H
#define NIB_CUDA_MAPPING_H

#include "../nvfp4.h"

/* Threads of a block are [z, y, x] with blocks of a head along x. In a cache whose tokens lie closer than its heads
 * (HND), rows go along y and heads along z, so that neighbouring threads write neighbouring bytes; otherwise the
 * other way round. */
NIB_HD int nib_append_rows_inside(const struct nib_append_params *p)
{
  return p->k_cache.token_stride < p->k_cache.head_stride;
}

NIB_HD int nib_quantize_tokens_inside(const struct nib_quantize_cache_params *p)
{
  return p->source_token_stride < p->source_head_stride;
}

/* rope_insert: query heads per thread, for many rows (for few: 1), and kv rows per thread block: for many rows, one
 * per warp of 256 threads; for few, eight threads of 64 each have a row's RoPE part, and a block of 64 each row's
 * other part. */
#define NIB_ROPE_HEADS 4
#define NIB_ROPE_ROWS 8

/* Thread blocks that quantize kv rows. */
NIB_HD uint32_t nib_rope_coding(const struct nib_rope_insert_params *p, int many)
{
  return (uint32_t)(many ? (p->slot_count + NIB_ROPE_ROWS - 1) / NIB_ROPE_ROWS : p->slot_count);
}

/* The same and, for few rows, those that rotate them. */
NIB_HD uint32_t nib_rope_inserting(const struct nib_rope_insert_params *p, int many)
{
  return nib_rope_coding(p, many) + (uint32_t)(many ? 0 : (p->slot_count + NIB_ROPE_ROWS - 1) / NIB_ROPE_ROWS);
}

/* Query heads that each row of q_out has to get. */
NIB_HD int64_t nib_rope_heads(const struct nib_rope_insert_params *p)
{
  if (!p->q || !p->q_out)
    return 0;
  if (p->q_out == p->q)
    return p->rotate_q ? p->heads : 0;
  return p->padded_heads;
}

#endif
