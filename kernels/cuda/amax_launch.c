/* The launch of amax.cu. */
#include "launch.h"
#include "amax.inc"

#define ENTRIES(X) \
  X(amax_bf16)     \
  X(amax_f16)      \
  X(amax_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_amax_params *p = params;
  bool wide = aligned(p->source, 16) && multiple(p->page_stride, 8) && multiple(p->token_stride, 8) &&
              multiple(p->head_stride, 8) && multiple(p->head_dim, 8);
  g->entry = !wide ? amax_narrow : p->type == NIB_TYPE_FLOAT16 ? amax_f16 : amax_bf16;
  int64_t count = p->num_pages * p->page_size * p->heads * p->head_dim / (wide ? 8 : 1);
  set(g->block, 256, 1, 1);
  set(g->grid, least(pieces(count, 256), (int64_t)at_least_1(multiprocessors) * 8), 1, 1);
}

NIB_CUDA_KERNEL(amax)
