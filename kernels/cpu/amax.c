/* The largest |x| of a strided cache. */
#include "../paged.h"
#include "clones.h"

/* Non-negative floats order like their bits, so that the maximum of the bits is the maximum. */
static void atomic_maximum(float *out, float value) {
  typedef uint32_t __attribute__((may_alias)) word;
  word *bits = (word *)out;
  uint32_t mine = nib_bits_from_f32(value), seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (seen < mine && !__atomic_compare_exchange_n(bits, &seen, mine, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    continue;
}

/* Items are [num_pages, page_size] tokens. */
NIB_BODY amax_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_amax_params *p = argument;
  float largest = 0;
  for (int64_t item = begin; item < end; item++) {
    const uint16_t *token =
      (const uint16_t *)p->source + item / p->page_size * p->page_stride + item % p->page_size * p->token_stride;
    for (int64_t head = 0; head < p->heads; head++) {
      const uint16_t *x = token + head * p->head_stride;
      float amax = p->type == NIB_TYPE_FLOAT16 ? nib_amax(x, p->head_dim, NIB_TYPE_FLOAT16)
                                               : nib_amax(x, p->head_dim, NIB_TYPE_BFLOAT16);
      largest = amax > largest ? amax : largest;
    }
  }
  atomic_maximum(p->out, largest);
}
NIB_CLONES(amax)

void nib_cpu_amax(const void *params, const struct nib_cpu_team *team) {
  struct nib_amax_params p = *(const struct nib_amax_params *)params;
  if (p.num_pages <= 0 || p.page_size <= 0 || p.heads <= 0 || p.head_dim <= 0) return;
  if (p.token_stride == p.heads * p.head_stride && p.head_stride == p.head_dim) { /* compact tokens: longer runs */
    p.head_dim *= p.heads;
    p.heads = 1;
  }
  if (p.token_stride < p.head_stride) { /* walk the memory in its own order; the maximum has none */
    int64_t tokens = p.page_size, token_stride = p.token_stride;
    p.page_size = p.heads;
    p.token_stride = p.head_stride;
    p.heads = tokens;
    p.head_stride = token_stride;
  }
  team->run(team->context, p.num_pages * p.page_size, nib_cpu_grain(p.heads * p.head_dim * 2), NIB_PICK(amax), &p);
}
