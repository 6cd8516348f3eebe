/* The launch of rope_table.cu. */
#include "launch.h"
#include "rope_table.inc"

#define ENTRIES(X) X(rope_table)

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *out) {
  (void)multiprocessors;
  out->entry = 0;
  set_linear(out, ((const struct nib_rope_table_params *)params)->max_position * (NIB_MLA_ROPE / 2));
}

NIB_CUDA_KERNEL(rope_table)
