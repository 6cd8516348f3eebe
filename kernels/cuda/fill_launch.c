/* The launch of fill.cu. */
#include "strided_launch.h"
#include "fill.inc"

#define ENTRIES(X) \
  X(fill_8)        \
  X(fill_16)       \
  X(fill_32)       \
  X(fill_64)       \
  X(fill_128)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_fill_params *p = params;
  (void)multiprocessors;
  int64_t size = type_size(p->type), word = word_size(p->destination, size, p->ndim, p->size, p->stride);
  g->entry = word == 16 ? fill_128 : word == 8 ? fill_64 : word == 4 ? fill_32 : word == 2 ? fill_16 : fill_8;
  strided(p->ndim, p->size, (p->ndim > 0 ? p->size[p->ndim - 1] : 1) * size / word, 1, g);
}

NIB_CUDA_KERNEL(fill)
