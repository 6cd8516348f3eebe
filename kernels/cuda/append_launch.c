/* The launch of append.cu. */
#include "launch.h"
#include "append.inc"

#define ENTRIES(X)      \
  X(append_bf16)        \
  X(append_f16)         \
  X(append_one_bf16)    \
  X(append_one_f16)     \
  X(append_few_bf16)    \
  X(append_few_f16)     \
  X(append_narrow)      \
  X(append_4over6_bf16) \
  X(append_4over6_f16)  \
  X(append_4over6_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_append_params *p = params;
  int64_t blocks = p->head_dim / NIB_BLOCK;
  bool wide = aligned(p->key, 16) && aligned(p->value, 16) && multiple(p->key_row_stride, 8) &&
              multiple(p->key_head_stride, 8) && multiple(p->value_row_stride, 8) &&
              multiple(p->value_head_stride, 8) && paged_aligned(&p->k_cache, 8) && paged_aligned(&p->v_cache, 8) &&
              few_slots(p->num_pages, p->page_size);
  bool f16 = p->type == NIB_TYPE_FLOAT16;
  int64_t work = p->rows * p->heads * blocks;
  if (wide && !p->four_over_six && work > 0 && p->num_pages > 0 && work < (int64_t)multiprocessors * 256) {
    g->entry = f16 ? append_few_f16 : append_few_bf16;
    int64_t x = 2 * part(blocks, 32), heads = part(p->heads, 64 / x),
            rows = at_least_1(least(p->rows, 64 / (x * heads)));
    set(g->block, x, heads, rows);
    set(g->grid, pieces(p->rows, rows), pieces(p->heads, heads), 2 * pieces(2 * blocks, x));
    return;
  }
  int64_t heads_per_thread = wide && !p->four_over_six && p->heads > 1 ? 2 : 1;
  int64_t most = pieces(p->heads, heads_per_thread);
  int64_t x = part(blocks, 128), rows, heads;
  if (p->four_over_six) g->entry = !wide ? append_4over6_narrow : f16 ? append_4over6_f16 : append_4over6_bf16;
  else if (!wide) g->entry = append_narrow;
  else if (p->heads == 1) g->entry = f16 ? append_one_f16 : append_one_bf16;
  else g->entry = f16 ? append_f16 : append_bf16;
  if (nib_append_rows_inside(p)) {
    rows = least(pieces(32, x), 128 / x); /* a warp's scales fill a 32-byte sector */
    heads = part(most, least(64, 128 / (x * rows)));
    rows = at_least_1(least(p->rows, 128 / (x * heads)));
    set(g->block, x, rows, heads);
  } else {
    heads = part(most, 128 / x);
    rows = at_least_1(least(least(p->rows, 64), 128 / (x * heads)));
    set(g->block, x, heads, rows);
  }
  set(g->grid, pieces(p->rows, rows), pieces(p->heads, heads * heads_per_thread), pieces(blocks, x));
}

NIB_CUDA_KERNEL(append)
