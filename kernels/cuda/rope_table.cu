/* The cos | sin table of rotary position embedding. */
#include "../elementary.h"
#include "../convert.h"
#include "kernel.cuh"

/* A thread has one pair of one position. */
NIB_ENTRY(rope_table, 256, 2, nib_rope_table_params) {
  uint32_t pair = threadIdx.x % (NIB_MLA_ROPE / 2);
  int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / (NIB_MLA_ROPE / 2);
  int64_t step = (int64_t)gridDim.x * (blockDim.x / (NIB_MLA_ROPE / 2));
  for (int64_t position = first; position < p.max_position; position += step) {
    double sine, cosine;
    nib_sincos((double)position * p.inv_freq[pair], &sine, &cosine);
    nib_store_f64(p.out, position * NIB_MLA_ROPE + pair, p.type, cosine);
    nib_store_f64(p.out, position * NIB_MLA_ROPE + NIB_MLA_ROPE / 2 + pair, p.type, sine);
  }
}
