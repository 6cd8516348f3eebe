/* Random elements; what they are is in random.h. */
#include "../convert.h"
#include "../random.h"
#include "kernel.cuh"

/* A thread has two elements, which share one draw. */
NIB_ENTRY(random, 256, 2, nib_random_params) {
  struct nib_permutation permutation = nib_permutation_make(p.seed, (uint64_t)p.count);
  int64_t pairs = p.count / 2 + p.count % 2;
  for (int64_t pair = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; pair < pairs;
       pair += (int64_t)gridDim.x * blockDim.x) {
    int64_t first = 2 * pair;
    int both = first + 1 < p.count;
    if (p.kind == NIB_RANDOM_NORMAL) {
      double normal[2];
      nib_random_normal_pair(p.seed, (uint64_t)pair, normal);
      nib_store_f64(p.out, first, p.type, normal[0]);
      if (both) nib_store_f64(p.out, first + 1, p.type, normal[1]);
    } else {
      int64_t integer[2];
      if (p.kind == NIB_RANDOM_INTEGER) {
        nib_random_integer_pair(p.seed, (uint64_t)pair, p.low, p.range, integer);
      } else {
        integer[0] = nib_permutation_at(&permutation, first);
        integer[1] = both ? nib_permutation_at(&permutation, first + 1) : 0;
      }
      nib_store_i64(p.out, first, p.type, integer[0]);
      if (both) nib_store_i64(p.out, first + 1, p.type, integer[1]);
    }
  }
}
