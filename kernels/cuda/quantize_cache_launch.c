/* The launch of quantize_cache.cu. */
#include "launch.h"
#include "quantize_cache.inc"

#define ENTRIES(X)              \
  X(quantize_cache_bf16)        \
  X(quantize_cache_f16)         \
  X(quantize_cache_narrow)      \
  X(quantize_cache_4over6_bf16) \
  X(quantize_cache_4over6_f16)  \
  X(quantize_cache_4over6_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_quantize_cache_params *p = params;
  (void)multiprocessors;
  bool wide = aligned(p->source, 16) && multiple(p->source_page_stride, 8) && multiple(p->source_token_stride, 8) &&
              multiple(p->source_head_stride, 8) && paged_aligned(&p->data, 8);
  bool f16 = p->type == NIB_TYPE_FLOAT16;
  if (p->four_over_six)
    g->entry = !wide ? quantize_cache_4over6_narrow : f16 ? quantize_cache_4over6_f16 : quantize_cache_4over6_bf16;
  else g->entry = !wide ? quantize_cache_narrow : f16 ? quantize_cache_f16 : quantize_cache_bf16;
  bool tokens_inside = nib_quantize_tokens_inside(p);
  int64_t blocks = p->head_dim / NIB_BLOCK, x = part(blocks, 256);
  int64_t y = part(tokens_inside ? p->page_size : p->heads, 256 / x);
  int64_t z = part(tokens_inside ? p->heads : p->page_size, least(64, 256 / (x * y)));
  int64_t tokens = tokens_inside ? y : z, heads = tokens_inside ? z : y;
  set(g->block, x, y, z);
  set(g->grid, least(at_least_1(p->num_pages), INT32_MAX), least(pieces(p->page_size, tokens), NIB_CUDA_MAX_Y),
      least(pieces(p->heads, heads), NIB_CUDA_MAX_Y));
}

NIB_CUDA_KERNEL(quantize_cache)
