/* V scales between linear and 4-token-interleaved order. */
#include "../paged.h"
#include "clones.h"

/* Four tokens of one head: quarter q of the four linear rows, read column by column, is row q of the interleaved
 * ones. */
NIB_BODY interleave(const uint8_t *linear, int64_t linear_stride, uint8_t *interleaved, int64_t interleaved_stride,
                    int64_t quarter) {
  for (int64_t q = 0; q < 4; q++) {
    const uint8_t *restrict from = linear + q * quarter;
    uint8_t *restrict to = interleaved + q * interleaved_stride;
    for (int64_t i = 0; i < quarter; i++) {
      to[4 * i] = from[i];
      to[4 * i + 1] = from[linear_stride + i];
      to[4 * i + 2] = from[2 * linear_stride + i];
      to[4 * i + 3] = from[3 * linear_stride + i];
    }
  }
}

NIB_BODY linearize(const uint8_t *interleaved, int64_t interleaved_stride, uint8_t *linear, int64_t linear_stride,
                   int64_t quarter) {
  for (int64_t q = 0; q < 4; q++) {
    const uint8_t *restrict from = interleaved + q * interleaved_stride;
    uint8_t *restrict to = linear + q * quarter;
    for (int64_t i = 0; i < quarter; i++) {
      to[i] = from[4 * i];
      to[linear_stride + i] = from[4 * i + 1];
      to[2 * linear_stride + i] = from[4 * i + 2];
      to[3 * linear_stride + i] = from[4 * i + 3];
    }
  }
}

/* Items are groups of four tokens, [num_pages, page_size / 4]. */
NIB_BODY swizzle_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_swizzle_params *p = argument;
  int64_t groups = p->page_size / 4;
  for (int64_t item = begin; item < end; item++) {
    for (int64_t head = 0; head < p->heads; head++) {
      const uint8_t *source = nib_paged_row(&p->source, item / groups, item % groups * 4, head);
      uint8_t *destination = nib_paged_row(&p->destination, item / groups, item % groups * 4, head);
      if (p->inverse)
        linearize(source, p->source.token_stride, destination, p->destination.token_stride, p->blocks / 4);
      else interleave(source, p->source.token_stride, destination, p->destination.token_stride, p->blocks / 4);
    }
  }
}
NIB_CLONES(swizzle)

void nib_cpu_swizzle(const void *params, const struct nib_cpu_team *team) {
  struct nib_swizzle_params p = *(const struct nib_swizzle_params *)params;
  if (p.num_pages <= 0 || p.heads <= 0 || p.page_size < 4 || p.blocks < 4) return;
  team->run(team->context, p.num_pages * (p.page_size / 4), nib_cpu_grain(p.heads * p.blocks * 8), NIB_PICK(swizzle),
            &p);
}
