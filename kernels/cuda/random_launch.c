/* The launch of random.cu. */
#include "launch.h"
#include "random.inc"

#define ENTRIES(X) X(random)

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *out) {
  (void)multiprocessors;
  out->entry = 0;
  set_linear(out, ((const struct nib_random_params *)params)->count / 2 + 1);
}

NIB_CUDA_KERNEL(random)
