/* The launch of rope_insert.cu. */
#include "launch.h"
#include "rope_insert.inc"

#define ENTRIES(X)   \
  X(rope_insert)     \
  X(rope_insert_few) \
  X(rope_insert_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_rope_insert_params *p = params;
  bool wide = aligned(p->q, 16) && aligned(p->q_out, 16) && aligned(p->kv, 16) && aligned(p->cos_sin, 16) &&
              aligned(p->cache, 16) && (p->num_pages <= 1 || multiple(p->page_stride, 16)) &&
              few_slots(p->num_pages, p->page_size);
  bool in_place = p->q_out == p->q;
  int64_t heads = nib_rope_heads(p), x = heads > 0 && in_place ? NIB_ROPE_CHUNKS : NIB_MLA_DIM / 8, y = 1;
  bool few = p->rows * at_least_1(heads) * x < (int64_t)multiprocessors * 1024;
  if (!wide || few) {
    g->entry = wide ? rope_insert_few : rope_insert_narrow;
    set(g->block, 64, 1, 1);
    set(g->grid, at_least_1(p->rows), NIB_ROPE_QUERIES + (heads > 0 ? pieces(heads, 64 / x) : 0), 1);
    return;
  }
  g->entry = rope_insert;
  while (y < 256 / x && y * NIB_ROPE_HEADS < heads) y *= 2;
  int64_t z = 256 / (x * y);
  set(g->block, x, y, z);
  set(g->grid, at_least_1(nib_rope_inserting(p) + (heads > 0 ? pieces(p->rows, z) : 0)),
      pieces(heads, NIB_ROPE_HEADS * y), 1);
}

NIB_CUDA_KERNEL(rope_insert)
