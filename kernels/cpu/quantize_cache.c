/* A whole cache quantized in one go. */
#include "../paged.h"
#include "blocks.h"

struct quantize_cache {
  const struct nib_quantize_cache_params *params;
  float global;
  int32_t refused; /* zeros everywhere */
};

#define NIB_RUN_BLOCKS 64 /* whose scales are kept while they wait for their interleaved places */

NIB_BODY quantize_blocks(const struct quantize_cache *task, int32_t type, const uint16_t *x, int64_t blocks,
                         uint8_t *packed, uint8_t *sf) {
  if (task->params->four_over_six)
    nib_blocks_quantize_4over6(x, type, blocks, task->global, NIB_APPEND_NAN_CODE, packed, sf);
  else nib_blocks_quantize(x, type, blocks, task->global, NIB_APPEND_NAN_CODE, packed, sf);
}

NIB_BODY quantize_row(const struct quantize_cache *task, int32_t type, int64_t page, int64_t token, int64_t head) {
  const struct nib_quantize_cache_params *p = task->params;
  const uint16_t *x = (const uint16_t *)p->source + page * p->source_page_stride + token * p->source_token_stride +
                      head * p->source_head_stride;
  uint8_t *data = nib_paged_row(&p->data, page, token, head);
  int64_t blocks = p->head_dim / NIB_BLOCK;
  if (task->refused) {
    memset(data, 0, (size_t)(blocks * NIB_BLOCK_BYTES));
    memset(nib_paged_row(&p->sf, page, token, head), 0, (size_t)blocks);
    return;
  }
  if (!p->interleaved) {
    quantize_blocks(task, type, x, blocks, data, nib_paged_row(&p->sf, page, token, head));
    return;
  }
  for (int64_t done = 0; done < blocks; done += NIB_RUN_BLOCKS) {
    int64_t count = blocks - done < NIB_RUN_BLOCKS ? blocks - done : NIB_RUN_BLOCKS;
    uint8_t sf[NIB_RUN_BLOCKS];
    quantize_blocks(task, type, x + done * NIB_BLOCK, count, data + done * NIB_BLOCK_BYTES, sf);
    for (int64_t i = 0; i < count; i++)
      nib_paged_row(&p->sf, page, nib_interleaved_row(token, done + i, blocks),
                    head)[nib_interleaved_column(token, done + i, blocks)] = sf[i];
  }
}

/* Items are [num_pages, page_size] tokens. */
NIB_BODY quantize_tokens(const struct quantize_cache *task, int32_t type, int64_t begin, int64_t end) {
  const struct nib_quantize_cache_params *p = task->params;
  for (int64_t item = begin; item < end; item++)
    for (int64_t head = 0; head < p->heads; head++)
      quantize_row(task, type, item / p->page_size, item % p->page_size, head);
}

NIB_BODY quantize_cache_body(void *argument, int64_t begin, int64_t end) {
  const struct quantize_cache *task = argument;
  if (task->params->type == NIB_TYPE_FLOAT16) quantize_tokens(task, NIB_TYPE_FLOAT16, begin, end);
  else quantize_tokens(task, NIB_TYPE_BFLOAT16, begin, end);
}
NIB_CLONES(quantize_cache)

/* The first infinite element, by its index in the order of memory ([page, token, head] or [page, head, token]). */
static void raise_infinity(const struct nib_quantize_cache_params *p) {
  const uint16_t infinity = p->type == NIB_TYPE_FLOAT16 ? 0x7C00 : 0x7F80;
  int heads_inside = p->source_token_stride >= p->source_head_stride;
  int64_t outer = heads_inside ? p->page_size : p->heads, inner = heads_inside ? p->heads : p->page_size;
  int64_t outer_stride = heads_inside ? p->source_token_stride : p->source_head_stride;
  int64_t inner_stride = heads_inside ? p->source_head_stride : p->source_token_stride;
  int64_t index = 0;
  for (int64_t page = 0; page < p->num_pages; page++)
    for (int64_t i = 0; i < outer; i++)
      for (int64_t j = 0; j < inner; j++) {
        const uint16_t *x =
          (const uint16_t *)p->source + page * p->source_page_stride + i * outer_stride + j * inner_stride;
        for (int64_t k = 0; k < p->head_dim; k++, index++)
          if ((x[k] & 0x7FFF) == infinity) {
            nib_fault_raise(p->fault, NIB_OPERATION_QUANTIZE_CACHE, (uint32_t)p->amax_content, index, 1, 0,
                            x[k] & 0x8000 ? -INFINITY : INFINITY);
            return;
          }
      }
}

void nib_cpu_quantize_cache(const void *params, const struct nib_cpu_team *team) {
  const struct nib_quantize_cache_params *p = params;
  float global_sf = p->amax ? 448.0f / (*p->amax > 1e-12f ? *p->amax : 1e-12f) : nib_scale_read(&p->global_sf);
  struct quantize_cache task = { p, 1.0f / global_sf, 0 };
  *p->out_scale = nib_f32_canonical(task.global);
  task.refused = !nib_scale_is_valid(global_sf) || !nib_scale_is_valid(task.global);
  if (task.refused && p->amax) raise_infinity(p);
  else if (task.refused)
    nib_fault_raise(p->fault, NIB_OPERATION_QUANTIZE_CACHE, (uint32_t)p->scale_content, 0, 1, 0, global_sf);
  if (p->num_pages > 0 && p->page_size > 0 && p->heads > 0 && p->head_dim > 0)
    team->run(team->context, p->num_pages * p->page_size, nib_cpu_grain(p->heads * p->head_dim * 5 / 2),
              NIB_PICK(quantize_cache), &task);
}
