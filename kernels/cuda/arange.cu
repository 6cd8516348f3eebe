/* start, start + step, ... */
#include "../convert.h"
#include "kernel.cuh"

NIB_ENTRY(arange, 256, 4, nib_arange_params) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (int64_t)gridDim.x * blockDim.x) {
    if (p.is_float) nib_store_f64(p.out, i, p.type, p.start_real + (double)i * p.step_real);
    else nib_store_i64(p.out, i, p.type, (int64_t)((uint64_t)p.start + (uint64_t)i * (uint64_t)p.step));
  }
}
