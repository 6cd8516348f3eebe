/* The number formats of an NVFP4 cache and the arithmetic of one block. C11 and CUDA include this same file, so that
 * both devices write the same bytes. To change how something rounds, change it here.
 *
 * The bytes rest on plain IEEE float32: no operation here may be contracted, reordered or flushed to zero (C:
 * -ffp-contract=off; CUDA: -fmad=false). Fused multiply-adds are spelled out: in nib_e2m1_encode_small, where the
 * products are exact, and in nib_rope_pair, where they are the definition.
 *
 * Conversions to float32 are exact (a NaN stays some NaN). Conversions from float32 round to nearest, ties to even, and
 * write any NaN as the one that the format's section names (E2M1 has none: the caller chooses its code). E2M1 and
 * float8 saturate, float16 and bfloat16 overflow to infinity. */
#ifndef NIB_NVFP4_H
#define NIB_NVFP4_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "params.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed codes are written as little-endian words"
#endif

/* Always inlined in C: the loops around these functions are compiled once per instruction set (cpu/clones.h), and a
 * function that is not inlined would be compiled for the baseline alone. */
#ifdef __CUDACC__
#define NIB_HD     __host__ __device__ static __forceinline__
#define NIB_DEVICE __device__ static __forceinline__
#else
#define NIB_HD __attribute__((always_inline)) static inline
#endif

/* Where a GPU converts in hardware with the bits that the code below gives, it does: float16 and bfloat16 from SM80 on,
 * E4M3 from SM89 on. NIB_SOFTWARE_CONVERSIONS turns that off, to compare the two. E2M1, from SM100 on, only when the
 * build defines NIB_HARDWARE_E2M1 (premake's --hardware-e2m1) and only to encode (nvfp4_words.h): it has not run on
 * such a GPU yet. spec/kernels/e2m1_spec.lua compares it with the software when it does. */
#if defined(__CUDA_ARCH__) && !defined(NIB_SOFTWARE_CONVERSIONS)
#define NIB_HARDWARE_HALVES
#if __CUDA_ARCH__ >= 890
#define NIB_HARDWARE_E4M3
#endif
#endif
#if defined(NIB_HARDWARE_E2M1) && (!defined(NIB_HARDWARE_HALVES) || __CUDA_ARCH__ < 1000)
#undef NIB_HARDWARE_E2M1
#endif

/* ---- float32 and its bits -------------------------------------------------------------------------------------- */

#define NIB_F32_SIGN     0x80000000u
#define NIB_F32_INFINITY 0x7F800000u
#define NIB_F32_NAN      0x7FFFFFFFu /* the NaN that conversions write */

NIB_HD uint32_t nib_bits_from_f32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

NIB_HD float nib_f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* a or b, without a branch, so that loops over it become vector code (a conditional around a float operation does
 * not). */
NIB_HD uint32_t nib_select(int condition, uint32_t a, uint32_t b) {
  uint32_t mask = 0u - (uint32_t)condition;
  return (a & mask) | (b & ~mask);
}

/* Whether bits without their sign are a NaN's. (They compare like the numbers, and signed compares are the cheap
 * ones.) */
NIB_HD int nib_magnitude_is_nan(uint32_t magnitude) { return (int32_t)magnitude > (int32_t)NIB_F32_INFINITY; }

/* The value itself, a NaN as NIB_F32_NAN. */
NIB_HD float nib_f32_canonical(float value) {
  uint32_t bits = nib_bits_from_f32(value);
  return nib_f32_from_bits(nib_select(nib_magnitude_is_nan(bits & ~NIB_F32_SIGN), NIB_F32_NAN, bits));
}

/* float64 to float32, rounded to odd: toward zero, then the last bit is set if anything was lost. Rounding the result
 * again to a format with at most 22 significant bits gives what rounding the float64 once would have given. */
NIB_HD float nib_f32_odd_from_f64(double value) {
  float nearest = (float)value;
  double exact = (double)nearest;
  if (exact == value || value != value) return nearest;
  uint32_t bits = nib_bits_from_f32(nearest);
  if ((exact < 0 ? -exact : exact) > (value < 0 ? -value : value)) bits -= 1;
  return nib_f32_from_bits(bits | 1);
}

/* int64 to float64, rounded to odd in the same sense, for a format with at most 40 significant bits. */
NIB_HD double nib_f64_odd_from_i64(int64_t value) {
  uint64_t magnitude = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
  double real = (double)magnitude;
  if (magnitude >> 53) real = (double)(magnitude >> 11 | ((magnitude & 0x7FF) != 0)) * 2048.0;
  return value < 0 ? -real : real;
}

/* ---- bfloat16: 1 sign, 8 exponent, 7 mantissa bits ------------------------------------------------------------- */

#define NIB_BF16_NAN 0x7FFFu

NIB_HD float nib_f32_from_bf16(uint16_t half) { return nib_f32_from_bits((uint32_t)half << 16); }

NIB_HD uint16_t nib_bf16_from_f32(float value) {
#ifdef NIB_HARDWARE_HALVES
  uint32_t word; /* into 32 bits: ptxas 13.0 mistakes the low byte of a 16-bit result for a conversion to an integer */
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(0.0f), "f"(value));
  return (uint16_t)word;
#else
  uint32_t bits = nib_bits_from_f32(value);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)nib_select(nib_magnitude_is_nan(bits & ~NIB_F32_SIGN), NIB_BF16_NAN, rounded);
#endif
}

NIB_HD uint16_t nib_bf16_from_f64(double value) { return nib_bf16_from_f32(nib_f32_odd_from_f64(value)); }

/* ---- float16 (IEEE binary16): 1 sign, 5 exponent (bias 15), 10 mantissa bits ----------------------------------- */

#define NIB_F16_NAN 0x7FFFu

NIB_HD float nib_f32_from_f16(uint16_t half) {
#ifdef NIB_HARDWARE_HALVES
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  uint32_t magnitude = half & 0x7FFF;
  uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  uint32_t subnormal = nib_bits_from_f32((float)(int32_t)magnitude * 0x1p-24f);
  uint32_t finite = nib_select(magnitude < 0x0400, subnormal, normal);
  uint32_t special =
    normal + ((127u - 15u) << 23); /* infinity and NaN: the largest exponent here is the largest there */
  return nib_f32_from_bits(nib_select(magnitude < 0x7C00, finite, special) | sign);
#endif
}

NIB_HD uint16_t nib_f16_from_f32(float value) {
#ifdef NIB_HARDWARE_HALVES
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(0.0f), "f"(value));
  return (uint16_t)word;
#else
  uint32_t bits = nib_bits_from_f32(value);
  uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & ~NIB_F32_SIGN;
  /* A carry out of the mantissa moves to the next exponent, and from the largest one to infinity, as it should. */
  uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  /* Below 2^-14 the step is 2^-24, which is also the step of float32 from 0.5 to 1: the addition rounds. */
  uint32_t subnormal = nib_bits_from_f32(nib_f32_from_bits(magnitude) + 0.5f) - nib_bits_from_f32(0.5f);
  uint32_t finite = nib_select((int32_t)magnitude < (127 - 14) << 23, subnormal, normal);
  uint32_t result = nib_select((int32_t)magnitude < (127 + 16) << 23, finite, 0x7C00) | sign;
  return (uint16_t)nib_select(nib_magnitude_is_nan(magnitude), NIB_F16_NAN, result);
#endif
}

NIB_HD uint16_t nib_f16_from_f64(double value) { return nib_f16_from_f32(nib_f32_odd_from_f64(value)); }

/* ---- The two 16-bit formats by their enum nib_type (float16 or bfloat16) --------------------------------------- */

NIB_HD float nib_f32_from_16(uint16_t half, int32_t type) {
  return type == NIB_TYPE_FLOAT16 ? nib_f32_from_f16(half) : nib_f32_from_bf16(half);
}

NIB_HD uint16_t nib_16_from_f32(float value, int32_t type) {
  return type == NIB_TYPE_FLOAT16 ? nib_f16_from_f32(value) : nib_bf16_from_f32(value);
}

/* ---- E4M3 (float8_e4m3fn; OCP 8-bit floating point, E4M3): 1 sign, 4 exponent (bias 7), 3 mantissa bits -------- */

#define NIB_E4M3_NAN 0x7Fu /* no infinity: all ones is NaN (0xFF too), so that the largest number is 0x7E, 448 */
#define NIB_E4M3_MAX 0x7Eu

NIB_HD float nib_e4m3_decode(uint8_t byte) {
#ifdef NIB_HARDWARE_E4M3
  uint32_t halves; /* float16 holds every E4M3 value */
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)byte));
  return nib_f32_from_f16((uint16_t)halves);
#else
  uint32_t sign = (uint32_t)(byte & 0x80) << 24;
  uint32_t magnitude = byte & 0x7F;
  uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  uint32_t subnormal = nib_bits_from_f32((float)(int32_t)magnitude * 0x1p-9f);
  uint32_t finite = nib_select(magnitude < 0x08, subnormal, normal) | sign;
  return nib_f32_from_bits(nib_select(magnitude == NIB_E4M3_NAN, NIB_F32_NAN, finite));
#endif
}

/* Saturates to 448, from infinity too. */
NIB_HD uint8_t nib_e4m3_encode(float value) {
#ifdef NIB_HARDWARE_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return (uint8_t)pair;
#else
  uint32_t bits = nib_bits_from_f32(value);
  uint32_t sign = (bits >> 24) & 0x80;
  uint32_t magnitude = bits & ~NIB_F32_SIGN;
  uint32_t normal = (magnitude - ((127u - 7u) << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20;
  /* Below 2^-6 the step is 2^-9, which is also the step of float32 from 2^14 to 2^15: the addition rounds. */
  uint32_t subnormal = nib_bits_from_f32(nib_f32_from_bits(magnitude) + 16384.0f) - nib_bits_from_f32(16384.0f);
  uint32_t finite = nib_select((int32_t)magnitude < (127 - 6) << 23, subnormal, normal);
  uint32_t result = nib_select((int32_t)magnitude < (int32_t)nib_bits_from_f32(448.0f), finite, NIB_E4M3_MAX) | sign;
  return (uint8_t)nib_select(nib_magnitude_is_nan(magnitude), NIB_E4M3_NAN, result);
#endif
}

NIB_HD uint8_t nib_e4m3_from_f64(double value) { return nib_e4m3_encode(nib_f32_odd_from_f64(value)); }

/* ---- E2M1 (OCP Microscaling formats, FP4): 1 sign, 2 exponent (bias 1), 1 mantissa bit ------------------------- */

/* NIB_E2M1_BASE + the code of 0 <= y < 7. On each of 0..2, 2..4 and 4..7 codes are y rounded in steps of 0.5, 1 and 2,
 * ties to even; the additions do that rounding. The code is the least of the three results. */
#define NIB_E2M1_BASE 0x4B000000u /* 2^23, where the step of float32 is 1 */
NIB_HD uint32_t nib_e2m1_encode_small(float y) {
  int32_t half = (int32_t)nib_bits_from_f32(fmaf(y, 2.0f, 8388608.0f));
  int32_t one = (int32_t)nib_bits_from_f32(fmaf(y, 1.0f, 8388608.0f + 2.0f));
  int32_t two = (int32_t)nib_bits_from_f32(fmaf(y, 0.5f, 8388608.0f + 4.0f));
  int32_t least = half < one ? half : one;
  return (uint32_t)(least < two ? least : two);
}

/* The code 0..15 (sign in bit 3) of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6: to nearest, ties to the even code,
 * saturating at 6. The sign is kept, also of zero. `nan_code` is the code of a NaN, which the operations choose
 * differently. */
NIB_HD uint32_t nib_e2m1_encode(float value, uint32_t nan_code) {
  uint32_t bits = nib_bits_from_f32(value);
  uint32_t magnitude = bits & ~NIB_F32_SIGN;
#ifdef NIB_HARDWARE_HALVES /* the same, with instructions that a GPU has many of */
  int32_t code = (int32_t)(nib_e2m1_encode_small(fminf(fabsf(value), 6.0f)) - NIB_E2M1_BASE);
#else
  int32_t y = (int32_t)magnitude;    /* non-negative floats order like their bits */
  int32_t code = (y > 0x3E800000)    /* 0.25 */
                 + (y >= 0x3F400000) /* 0.75 */
                 + (y > 0x3FA00000)  /* 1.25 */
                 + (y >= 0x3FE00000) /* 1.75 */
                 + (y > 0x40200000)  /* 2.5 */
                 + (y >= 0x40600000) /* 3.5 */
                 + (y > 0x40A00000); /* 5 */
#endif
  return nib_select(nib_magnitude_is_nan(magnitude), nan_code, (uint32_t)code | bits >> 31 << 3);
}

NIB_HD float nib_e2m1_decode(uint32_t code) {
  uint32_t sign = (code & 8) << 28;
  uint32_t magnitude = code & 7;
  uint32_t normal = (magnitude << 22) + (126u << 23);
  uint32_t subnormal = (0u - magnitude) & 126u << 23; /* 0 or 0.5 */
  return nib_f32_from_bits(nib_select(magnitude < 2, subnormal, normal) | sign);
}

/* ---- Blocks: 16 consecutive elements that share one E4M3 scale ------------------------------------------------- */

#define NIB_BLOCK       16
#define NIB_BLOCK_BYTES 8 /* packed, the earlier element of two in the low nibble */

#define NIB_APPEND_NAN_CODE 0u /* what a NaN becomes in append and quantize_cache, */
#define NIB_MLA_NAN_CODE    7u /* and in rope_insert */

/* amax: the largest |x| over the elements that are not NaN, 0 for none. Non-negative floats order like their bits;
 * adding what lies above infinity wraps a NaN's, in 16 bits, below all others. */
NIB_HD float nib_amax(const uint16_t *x, int64_t count, int32_t type) {
  const uint16_t above = type == NIB_TYPE_FLOAT16 ? 0x7FFF - 0x7C00 : 0x7FFF - 0x7F80;
  int16_t largest = (int16_t)above;
  for (int64_t i = 0; i < count; i++) {
    int16_t magnitude = (int16_t)(uint16_t)((x[i] & 0x7FFF) + above);
    largest = magnitude > largest ? magnitude : largest;
  }
  return nib_f32_from_16((uint16_t)((uint16_t)largest - above), type);
}

struct nib_block_scale {
  float inverse; /* what the block's elements are multiplied by before encoding */
  uint8_t byte;  /* the stored E4M3 scale */
};

/* `wanted` in E4M3, 0x7E for an infinite amax. */
NIB_HD struct nib_block_scale nib_block_scale_of(float wanted, float amax, float global) {
  struct nib_block_scale scale;
  uint32_t byte = nib_e4m3_encode(wanted);
  scale.byte = (uint8_t)nib_select(amax > FLT_MAX, NIB_E4M3_MAX, byte);
  float stored = nib_e4m3_decode(scale.byte);
  /* The rounded reciprocal is part of the definition: dividing by stored * global gives other codes near ties. */
  float inverse = 1.0f / (stored * global);
  scale.inverse = nib_f32_from_bits(nib_select(stored > 0, nib_bits_from_f32(inverse), 0));
  return scale;
}

/* amax / 6g, which maps amax to 6; `global` is the global decode scale g, positive and finite. rope_insert has none:
 * g = 1 changes nothing. */
NIB_HD struct nib_block_scale nib_block_scale(float amax, float global) {
  return nib_block_scale_of(amax / (6.0f * global), amax, global);
}

/* With 4over6: the scale that maps amax to 4, where codes lie closer together than up to 6. */
NIB_HD struct nib_block_scale nib_block_scale_4(float amax, float global) {
  return nib_block_scale_of(amax / (6.0f * global) * 1.5f, amax, global);
}

/* What one element adds to the error of a block under a scale: ((|value of the code| * scale) * g - |x|)^2, each step
 * rounded. The first product is exact. */
NIB_HD float nib_square_error(float x, float inverse, float stored, float global) {
  float difference = nib_e2m1_decode(nib_e2m1_encode(x * inverse, 0) & 7) * stored * global - fabsf(x);
  return difference * difference;
}

/* 4over6: of the two scales the one with the smaller error, which is summed from the first element on; that of 6 when
 * they are equal, or an element is a NaN. */
NIB_HD struct nib_block_scale nib_block_scale_4over6(const uint16_t *x, int32_t type, float amax, float global) {
  struct nib_block_scale six = nib_block_scale(amax, global), four = nib_block_scale_4(amax, global);
  float stored_six = nib_e4m3_decode(six.byte), stored_four = nib_e4m3_decode(four.byte);
  float error_six[NIB_BLOCK], error_four[NIB_BLOCK], sum_six = 0, sum_four = 0;
  for (int i = 0; i < NIB_BLOCK; i++) { /* becomes vector code; the sums do not */
    float value = nib_f32_from_16(x[i], type);
    error_six[i] = nib_square_error(value, six.inverse, stored_six, global);
    error_four[i] = nib_square_error(value, four.inverse, stored_four, global);
  }
  for (int i = 0; i < NIB_BLOCK; i++) {
    sum_six += error_six[i];
    sum_four += error_four[i];
  }
  return sum_four < sum_six ? four : six;
}

/* 16 elements (float16 or bfloat16) to 8 bytes of codes. */
NIB_HD void nib_block_encode(const uint16_t *x, int32_t type, float inverse, uint32_t nan_code, uint8_t *packed) {
  uint32_t code[NIB_BLOCK]; /* a loop of its own: this one becomes vector code, the packing does not */
  for (int i = 0; i < NIB_BLOCK; i++) code[i] = nib_e2m1_encode(nib_f32_from_16(x[i], type) * inverse, nan_code);
  uint64_t word = 0;
  for (int i = 0; i < NIB_BLOCK; i++) word |= (uint64_t)code[i] << (4 * i);
  memcpy(packed, &word, sizeof word);
}

/* One element of dequantize: each product rounded to float32, then to `type`. */
NIB_HD uint16_t nib_16_from_e2m1(uint32_t code, float scale, float global, int32_t type) {
  return nib_16_from_f32(nib_e2m1_decode(code) * scale * global, type);
}

/* 8 bytes of codes to 16 elements. There are only 16 different ones. */
NIB_HD void nib_block_decode(const uint8_t *packed, float scale, float global, int32_t type, uint16_t *x) {
  uint16_t value[16];
  for (uint32_t code = 0; code < 16; code++) value[code] = nib_16_from_e2m1(code, scale, global, type);
  for (int i = 0; i < NIB_BLOCK_BYTES; i++) {
    x[2 * i] = value[packed[i] & 15];
    x[2 * i + 1] = value[packed[i] >> 4];
  }
}

/* One element of materialize: the product is exact in float32, so that there is one rounding. */
NIB_HD uint8_t nib_e4m3_from_e2m1(uint32_t code, uint8_t scale) {
  return nib_e4m3_encode(nib_e2m1_decode(code) * nib_e4m3_decode(scale));
}

/* A global scale that an operation may use. */
NIB_HD int nib_scale_is_valid(float scale) { return scale > 0 && scale <= FLT_MAX; }

/* ---- Rotary position embedding --------------------------------------------------------------------------------- */

/* Rotates one GPT-J pair (dimensions 2p and 2p+1) by the angle of cosine and sine, rounded to bfloat16: one fused
 * multiply-add over one rounded product each. */
NIB_HD void nib_rope_pair(uint16_t *even, uint16_t *odd, float cosine, float sine) {
  float e = nib_f32_from_bf16(*even);
  float o = nib_f32_from_bf16(*odd);
  *even = nib_bf16_from_f32(fmaf(e, cosine, -(o * sine)));
  *odd = nib_bf16_from_f32(fmaf(e, sine, o * cosine));
}

/* ---- Content faults -------------------------------------------------------------------------------------------- */

/* Records contents that an operation refuses: the first one to claim the record fills it, later ones are dropped.
 * `index` is the flat row-major index into the parameter; `is_float` says which of the two values is meant. Any thread,
 * any device. */
NIB_HD void nib_fault_raise(struct nib_fault *fault, uint32_t operation, uint32_t content, int64_t index,
                            uint32_t is_float, int64_t integer, double real) {
#ifdef __CUDA_ARCH__
  /* The record lies in mapped host memory. Only kernels of one GPU claim it, so that an atomic of the device is enough
   * (PCIe has none that hold for the host too). */
  if (atomicCAS(&fault->state, 0u, 1u) != 0u) return;
#else
  uint32_t expected = 0;
  if (!__atomic_compare_exchange_n(&fault->state, &expected, 1u, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
#endif
  fault->operation = operation;
  fault->content = content;
  fault->is_float = is_float;
  fault->index = index;
  fault->integer = integer;
  fault->real = real;
#ifdef __CUDA_ARCH__
  __threadfence_system();
  *(volatile uint32_t *)&fault->state = 2u;
#else
  __atomic_store_n(&fault->state, 2u, __ATOMIC_RELEASE);
#endif
}

#ifdef __CUDACC__
#include "nvfp4_words.h"
#endif

#endif
