/* E2M1 in hardware beside the same in software, for spec/kernels/e2m1_spec.lua: kernels that count the inputs on which
 * they differ, and keep the least such input. Built by premake's --hardware-e2m1. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace software {
#include "../../kernels/nvfp4.h"
}

#undef NIB_NVFP4_H
#undef NIB_NVFP4_WORDS_H
#undef NIB_PARAMS_H
#define NIB_HARDWARE_E2M1
namespace hardware {
#include "../../kernels/nvfp4.h"
}

#if defined(__CUDA_ARCH__) && !defined(NIB_HARDWARE_E2M1)
#error "compiled for an architecture without E2M1"
#endif

/* found[0]: how many inputs differ; found[1]: the least of them; found[2]: how many were compared. */
static __device__ void compare(unsigned long long *found, uint64_t input, bool equal) {
  atomicAdd(found + 2, 1ull);
  if (!equal) {
    atomicAdd(found, 1ull);
    atomicMin(found + 1, (unsigned long long)input);
  }
}

/* All float32 from `first` on that are numbers, one a thread, in both halves of a pair beside a number of another
 * kind. */
extern "C" __global__ void pairs(unsigned long long *found, unsigned long long first) {
  uint64_t input = first + (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t other = (uint32_t)input * 2654435761u;
  float value = software::nib_f32_from_bits((uint32_t)input), beside = software::nib_f32_from_bits(other);
  if (value != value) return;
  if (beside != beside) beside = -1.25f;
  uint32_t low = software::nib_e2m1_encode(value, 0), high = software::nib_e2m1_encode(beside, 0);
  compare(found, input,
          hardware::nib_e2m1_pair(value, beside) == (low | high << 4) &&
            hardware::nib_e2m1_pair(beside, value) == (high | low << 4));
}

/* All pairs of two classes of numbers that encode alike: every number halfway to the next code, its neighbours on both
 * sides, the codes' own values, the ends of float32. One pair a thread of 64 x 64. */
extern "C" __global__ void classes(unsigned long long *found) {
  const float points[16] = { 0.0f, 0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f,
                             2.0f, 2.5f,  3.0f, 3.5f,  4.0f, 5.0f,  6.0f, FLT_MAX };
  float value[2];
  for (int i = 0; i < 2; i++) {
    uint32_t n = i ? blockIdx.x : threadIdx.x, bits = software::nib_bits_from_f32(points[n % 16]);
    uint32_t side = n / 16 % 4; /* below, at, above; negative at */
    bits = side == 0 && bits > 0 ? bits - 1 : side == 2 ? bits + 1 : side == 3 ? bits | NIB_F32_SIGN : bits;
    value[i] = software::nib_f32_from_bits(bits);
  }
  uint32_t low = software::nib_e2m1_encode(value[0], 0), high = software::nib_e2m1_encode(value[1], 0);
  compare(found, blockIdx.x * blockDim.x + threadIdx.x,
          hardware::nib_e2m1_pair(value[0], value[1]) == (low | high << 4));
}

/* Eight elements as the operations encode them: every 16-bit pattern whose product with the reciprocal of a scale stays
 * below 7, in every place, beside random ones. A scale byte a thread block. */
extern "C" __global__ void words(unsigned long long *found, int type) {
  float inverse = 1.0f / hardware::nib_e4m3_decode((uint8_t)(blockIdx.x % 126 + 1));
  for (uint32_t pattern = threadIdx.x; pattern < 0x10000; pattern += blockDim.x) {
    uint32_t word[4], state = pattern;
    for (int i = 0; i < 8; i++) {
      uint16_t half =
        (uint16_t)(i == (int)(pattern + blockIdx.x) % 8 ? pattern : (state = state * 1664525u + 1013904223u) >> 16);
      float y = software::nib_f32_from_16(half, type) * inverse;
      if (!(fabsf(y) < 7.0f)) half &= 0x8000;
      word[i / 2] = i % 2 ? word[i / 2] | (uint32_t)half << 16 : half;
    }
    compare(found, (uint64_t)blockIdx.x << 16 | pattern,
            hardware::nib_words_encode_small(word, type, inverse) ==
              software::nib_words_encode_small(word, type, inverse));
  }
}
