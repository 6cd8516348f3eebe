/* The launch of mla_dequantize.cu. */
#include "launch.h"
#include "mla_dequantize.inc"

#define ENTRIES(X)  \
  X(mla_dequantize) \
  X(mla_dequantize_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_mla_dequantize_params *p = params;
  (void)multiprocessors;
  bool wide = aligned(p->out, 16) && aligned(p->cache, 4) && (p->num_pages <= 1 || multiple(p->page_stride, 4));
  g->entry = wide ? mla_dequantize : mla_dequantize_narrow;
  set(g->block, NIB_MLA_DIM / 8, 4, 1);
  set(g->grid, least(pieces(p->count, 4), INT32_MAX), 1, 1);
}

NIB_CUDA_KERNEL(mla_dequantize)
