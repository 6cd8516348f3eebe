/* The launch of materialize.cu. */
#include "launch.h"
#include "materialize.inc"

#define ENTRIES(X)   \
  X(materialize)     \
  X(materialize_two) \
  X(materialize_few) \
  X(materialize_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_materialize_params *p = params;
  bool wide = aligned(p->out, 16) && paged_aligned(&p->k_cache, 8) && paged_aligned(&p->v_cache, 8);
  int64_t blocks = p->head_dim / NIB_BLOCK, pages = p->batch * p->max_pages;
  int64_t work = (pages + 1) * p->heads * p->page_size * blocks; /* threads with one block of K and V each */
  if (wide && pages > 0 && work > 0 && p->num_pages > 0 && work < (int64_t)multiprocessors * 512 &&
      p->page_size * blocks <= 256) {
    g->entry = materialize_few;
    set(g->block, blocks, p->page_size, 1);
    set(g->grid, p->max_pages, p->batch + 1, 2 * p->heads);
    if (g->grid[1] <= NIB_CUDA_MAX_Y && g->grid[2] <= NIB_CUDA_MAX_Y) return;
  }
  /* Eight heads per thread spare it the way to its page; few pages are rather spread over the multiprocessors. */
  bool many = pages >= 2 * multiprocessors, four = many && p->heads > 2;
  g->entry = !wide ? materialize_narrow : four ? materialize : materialize_two;
  int64_t x = part(blocks, 256), y = part(p->page_size, 256 / x), z = 1;
  if (x * y < 128) z = part(wide && four ? pieces(p->heads, 4) : p->heads, least(64, 128 / (x * y)));
  set(g->block, x, y, z);
  set(g->grid, at_least_1(p->max_pages), least(p->batch + 1, NIB_CUDA_MAX_Y),
      least(pieces(p->heads, many ? 8 * z : z), NIB_CUDA_MAX_Y));
}

NIB_CUDA_KERNEL(materialize)
