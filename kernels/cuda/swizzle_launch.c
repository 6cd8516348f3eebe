/* The launch of swizzle.cu. */
#include "launch.h"
#include "swizzle.inc"

#define ENTRIES(X) \
  X(swizzle_32)    \
  X(swizzle_16)    \
  X(swizzle_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_swizzle_params *p = params;
  (void)multiprocessors;
  const struct nib_paged *linear = p->inverse ? &p->destination : &p->source;
  const struct nib_paged *interleaved = p->inverse ? &p->source : &p->destination;
  int64_t width = 1; /* bytes of a linear row at a time */
  g->entry = swizzle_narrow;
  if (multiple(p->blocks, 16) && paged_aligned(linear, 4) && paged_aligned(interleaved, 16)) {
    g->entry = swizzle_32;
    width = 4;
  } else if (multiple(p->blocks, 8) && paged_aligned(linear, 2) && paged_aligned(interleaved, 8)) {
    g->entry = swizzle_16;
    width = 2;
  }
  int64_t per_page = p->page_size / 4 * p->heads * p->blocks / width;
  int64_t threads = per_page <= 32 ? 32 : per_page <= 64 ? 64 : per_page <= 128 ? 128 : 256;
  set(g->block, threads, 1, 1);
  set(g->grid, least(at_least_1(p->num_pages), INT32_MAX), least(pieces(per_page, threads), NIB_CUDA_MAX_Y), 1);
}

NIB_CUDA_KERNEL(swizzle)
