/* The launch of dequantize.cu. */
#include "launch.h"
#include "dequantize.inc"

#define ENTRIES(X)       \
  X(dequantize_bf16)     \
  X(dequantize_f16)      \
  X(dequantize_one_bf16) \
  X(dequantize_one_f16)  \
  X(dequantize_few_bf16) \
  X(dequantize_few_f16)  \
  X(dequantize_narrow)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_dequantize_params *p = params;
  bool wide = paged_aligned(&p->k_cache, 4) && paged_aligned(&p->v_cache, 4) && aligned(p->out_k, 16) &&
              aligned(p->out_v, 16) && few_slots(p->num_pages, p->page_size);
  int64_t halves = (p->k_head_dim > p->v_head_dim ? p->k_head_dim : p->v_head_dim) / (NIB_BLOCK / 2);
  int64_t tokens = least(p->max_seq_len, INT32_MAX), threads = 128;
  bool f16 = p->type == NIB_TYPE_FLOAT16;
  int64_t work = p->batch * tokens * p->heads * halves;
  if (wide && work > 0 && p->num_pages > 0 && work < (int64_t)multiprocessors * 512) {
    g->entry = f16 ? dequantize_few_f16 : dequantize_few_bf16;
    int64_t x = part(halves, 64), y = part(p->heads, 64 / x), z = at_least_1(least(least(tokens, 64), 64 / (x * y)));
    set(g->block, x, y, z);
    set(g->grid, pieces(tokens, z), at_least_1(p->batch), 2 * pieces(halves, x) * pieces(p->heads, y));
    if (g->grid[1] <= NIB_CUDA_MAX_Y && g->grid[2] <= NIB_CUDA_MAX_Y) return;
  }
  bool one = wide && p->heads <= 2;
  if (!wide) g->entry = dequantize_narrow;
  else if (one) g->entry = f16 ? dequantize_one_f16 : dequantize_one_bf16;
  else g->entry = f16 ? dequantize_f16 : dequantize_bf16;
  /* Eight heads per thread, in two steps, spare it the way to its token. */
  int64_t x = part(halves, threads), y = part(wide && !one ? pieces(p->heads, 8) : p->heads, threads / x);
  int64_t z = at_least_1(least(least(tokens, 64), threads / (x * y)));
  set(g->block, x, y, z);
  set(g->grid, pieces(tokens, z), least(at_least_1(p->batch), NIB_CUDA_MAX_Y), 2 * pieces(p->batch, NIB_CUDA_MAX_Y));
}

NIB_CUDA_KERNEL(dequantize)
