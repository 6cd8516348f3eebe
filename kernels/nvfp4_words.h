/* The block arithmetic of nvfp4.h on registers, for CUDA. A GPU thread holds a block as words: eight of two 16-bit
 * elements each, or two of eight codes each. What is computed is what nvfp4.h defines, byte for byte; only the way
 * there is made of instructions that a GPU has many of. Included by nvfp4.h; where something there changes, this
 * follows. */
#ifndef NIB_NVFP4_WORDS_H
#define NIB_NVFP4_WORDS_H

#include "nvfp4.h"

NIB_DEVICE float nib_low_half(uint32_t word, int32_t type) {
  return type == NIB_TYPE_FLOAT16 ? nib_f32_from_f16((uint16_t)word) : nib_f32_from_bits(word << 16);
}

NIB_DEVICE float nib_high_half(uint32_t word, int32_t type) {
  return type == NIB_TYPE_FLOAT16 ? nib_f32_from_f16((uint16_t)(word >> 16)) : nib_f32_from_bits(word & 0xFFFF0000u);
}

/* Two elements in one word. */
NIB_DEVICE uint32_t nib_halves_from_f32(float low, float high, int32_t type) {
#ifdef NIB_HARDWARE_HALVES
  uint32_t word;
  if (type == NIB_TYPE_FLOAT16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return nib_16_from_f32(low, type) | (uint32_t)nib_16_from_f32(high, type) << 16;
#endif
}

/* The larger of two elements without sign, in both halves of a word at once. The first hands on a NaN, the second
 * drops it. */
NIB_DEVICE uint32_t nib_halves_max_nan(uint32_t a, uint32_t b, int32_t type) {
  uint32_t word;
  if (type == NIB_TYPE_FLOAT16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

NIB_DEVICE uint32_t nib_halves_max(uint32_t a, uint32_t b, int32_t type) {
  uint32_t word;
  if (type == NIB_TYPE_FLOAT16) asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  else asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

/* nib_amax of 2 * COUNT elements; `has_nan` says whether there is one among them. */
template <int COUNT> NIB_DEVICE float nib_amax_words(const uint32_t *word, int32_t type, int *has_nan) {
  const uint32_t infinity = type == NIB_TYPE_FLOAT16 ? 0x7C00u : 0x7F80u;
  uint32_t largest = word[0] & 0x7FFF7FFFu;
#pragma unroll
  for (int i = 1; i < COUNT; i++) largest = nib_halves_max_nan(largest, word[i] & 0x7FFF7FFFu, type);
  largest = nib_halves_max_nan(largest, largest >> 16, type) & 0xFFFFu;
  *has_nan = largest > infinity;
  if (*has_nan) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) largest = nib_halves_max(largest, word[i] & 0x7FFF7FFFu, type);
    largest = nib_halves_max(largest, largest >> 16, type) & 0xFFFFu;
  }
  return nib_low_half(largest, type);
}

#ifdef NIB_HARDWARE_E2M1
/* The codes of two numbers, that of `low` in the low nibble. A NaN's is not the operations'. */
NIB_DEVICE uint32_t nib_e2m1_pair(float low, float high) {
  uint32_t bytes; /* four times the same */
  asm("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1; mov.b32 %0, {pair, pair, pair, pair}; }"
      : "=r"(bytes)
      : "f"(low), "f"(high));
  return bytes & 0xFF;
}
#endif

/* Eight elements (four words) to eight codes when all |x| * inverse are below 7. */
NIB_DEVICE uint32_t nib_words_encode_small(const uint32_t word[4], int32_t type, float inverse) {
#ifdef NIB_HARDWARE_E2M1
  uint32_t packed = 0;
#pragma unroll
  for (int i = 3; i >= 0; i--)
    packed = packed << 8 | nib_e2m1_pair(nib_low_half(word[i], type) * inverse, nib_high_half(word[i], type) * inverse);
  return packed;
#else
  uint32_t byte[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t magnitude = word[i] & 0x7FFF7FFFu;
    byte[i] = nib_e2m1_encode_small(nib_high_half(magnitude, type) * inverse) * 16 +
              nib_e2m1_encode_small(nib_low_half(magnitude, type) * inverse);
  }
  uint32_t packed = (byte[3] * 256 + byte[2]) * 65536 + (byte[1] * 256 + byte[0]) - NIB_E2M1_BASE * 0x11111111u;
  /* Signs, from bits 15 and 31 of word i to bits 8i + 3 and 8i + 7. */
  uint32_t a = __byte_perm(word[0], word[1], 0x7351), b = __byte_perm(word[2], word[3], 0x7351);
  uint32_t low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
  return packed + ((low >> 4 & 0x08080808u) | (high & 0x80808080u));
#endif
}

/* Eight elements of any kind; nib_block_encode, one at a time. */
NIB_DEVICE uint32_t nib_words_encode(const uint32_t word[4], int32_t type, float inverse, uint32_t nan_code) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 3; i >= 0; i--) {
    packed = packed << 4 | nib_e2m1_encode(nib_high_half(word[i], type) * inverse, nan_code);
    packed = packed << 4 | nib_e2m1_encode(nib_low_half(word[i], type) * inverse, nan_code);
  }
  return packed;
}

/* Whether nib_words_encode_small may encode a block; if not, there is a NaN, an infinity, or a scale at an end of
 * E4M3's range. */
NIB_DEVICE int nib_block_is_small(float amax, int has_nan, float inverse) { return !has_nan && amax * inverse < 7.0f; }

/* The error of a block under a scale (nib_block_scale_4over6). SMALL: nib_block_is_small. */
template <bool SMALL>
NIB_DEVICE float nib_words_error(const uint32_t word[8], int32_t type, struct nib_block_scale scale, float global) {
  float stored = nib_e4m3_decode(scale.byte), sum = 0;
#pragma unroll
  for (int i = 0; i < NIB_BLOCK; i++) {
    uint32_t magnitudes = word[i / 2] & 0x7FFF7FFFu;
    float x = i % 2 ? nib_high_half(magnitudes, type) : nib_low_half(magnitudes, type);
    if (SMALL) {
      uint32_t code = nib_e2m1_encode_small(x * scale.inverse) - NIB_E2M1_BASE;
      float difference = nib_e2m1_decode(code) * stored * global - x;
      sum += difference * difference;
    } else {
      sum += nib_square_error(x, scale.inverse, stored, global);
    }
  }
  return sum;
}

/* nib_block_scale_4over6 of a block. One after the other: the code is large. */
NIB_DEVICE struct nib_block_scale nib_words_scale_4over6(const uint32_t word[8], int32_t type, float amax, int has_nan,
                                                         float global) {
  struct nib_block_scale six = nib_block_scale(amax, global), four = nib_block_scale_4(amax, global), best = six;
  int small = nib_block_is_small(amax, 0, six.inverse) && nib_block_is_small(amax, 0, four.inverse);
  float least = INFINITY;
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    struct nib_block_scale scale = i ? four : six;
    float sum =
      small ? nib_words_error<true>(word, type, scale, global) : nib_words_error<false>(word, type, scale, global);
    if (sum < least) best = scale;
    least = sum < least ? sum : least;
  }
  return has_nan ? six : best;
}

/* nib_amax, nib_block_scale (or its 4over6) and nib_block_encode of a block; returns its scale byte. */
template <bool FOUR_OVER_SIX = false>
NIB_DEVICE uint8_t nib_words_quantize(const uint32_t word[8], int32_t type, float global, uint32_t nan_code,
                                      uint32_t packed[2]) {
  int has_nan;
  float amax = nib_amax_words<8>(word, type, &has_nan);
  struct nib_block_scale scale =
    FOUR_OVER_SIX ? nib_words_scale_4over6(word, type, amax, has_nan, global) : nib_block_scale(amax, global);
  if (nib_block_is_small(amax, has_nan, scale.inverse)) {
    packed[0] = nib_words_encode_small(word, type, scale.inverse);
    packed[1] = nib_words_encode_small(word + 4, type, scale.inverse);
  } else {
    packed[0] = nib_words_encode(word, type, scale.inverse, nan_code);
    packed[1] = nib_words_encode(word + 4, type, scale.inverse, nan_code);
  }
  return scale.byte;
}

/* nib_block_decode of eight codes: four words. The eight magnitudes are computed once and picked by code, signs
 * added last. */
NIB_DEVICE void nib_words_decode(uint32_t codes, float scale, float global, int32_t type, uint32_t word[4]) {
  uint32_t pair[4], signs = codes;
  float one = nib_e2m1_decode(2) * scale * global; /* of code 2, the value 1 */
  uint32_t exponent = nib_bits_from_f32(one) >> 23 & 0xFF;
  if (exponent - (type == NIB_TYPE_FLOAT16 ? 127 - 13 : 2) < (type == NIB_TYPE_FLOAT16 ? 26 : 250)) {
    /* All magnitudes but 0 are normal in `type`: codes 4 to 7 are codes 2 and 3 with a larger exponent, code 1 is
     * code 2 with a smaller one. */
    const uint32_t step = type == NIB_TYPE_FLOAT16 ? 0x0400 : 0x0080;
    pair[1] = nib_halves_from_f32(one, nib_e2m1_decode(3) * scale * global, type);
    pair[2] = pair[1] + step * 0x10001u;
    pair[3] = pair[1] + step * 0x20002u;
    pair[0] = (pair[1] * 0x10000u - (step << 16)) | (pair[1] & 0x8000u);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      pair[i] =
        nib_halves_from_f32(nib_e2m1_decode(2 * i) * scale * global, nib_e2m1_decode(2 * i + 1) * scale * global, type);
    /* A NaN has no sign. Either all codes give one, or only 0 does (times an infinite `global`), or none. */
    if ((pair[3] & 0xFFFFu) == NIB_F16_NAN) signs = 0;
    else if ((pair[0] & 0xFFFFu) == NIB_F16_NAN) signs &= (codes | codes >> 1 | codes >> 2) << 3;
  }
  uint32_t low01 = __byte_perm(pair[0], pair[1], 0x6420), high01 = __byte_perm(pair[0], pair[1], 0x7531);
  uint32_t low23 = __byte_perm(pair[2], pair[3], 0x6420), high23 = __byte_perm(pair[2], pair[3], 0x7531);
  uint32_t shifted = signs << 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t pick = codes >> (16 * i) & 0x7777u;
    uint32_t low = __byte_perm(low01, low23, pick), high = __byte_perm(high01, high23, pick);
    word[2 * i] = __byte_perm(low, high, 0x5140) ^ (__byte_perm(shifted, signs, i ? 0x6020 : 0x4000) & 0x80008000u);
    word[2 * i + 1] = __byte_perm(low, high, 0x7362) ^ (__byte_perm(shifted, signs, i ? 0x7030 : 0x5010) & 0x80008000u);
  }
}

/* Two E4M3 bytes in the low half of a word. */
NIB_DEVICE uint32_t nib_e4m3_pair(float low, float high) {
#ifdef NIB_HARDWARE_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return nib_e4m3_encode(low) | (uint32_t)nib_e4m3_encode(high) << 8;
#endif
}

/* nib_e4m3_from_e2m1 of the 16 codes of a block: four words of four bytes, in the way of nib_words_decode. */
NIB_DEVICE void nib_words_materialize(const uint32_t codes[2], uint8_t scale_byte, uint32_t word[4]) {
  float scale = nib_e4m3_decode(scale_byte);
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    pair[i] = nib_e4m3_pair(nib_e2m1_decode(2 * i) * scale, nib_e2m1_decode(2 * i + 1) * scale);
  uint32_t low = __byte_perm(pair[0], pair[1], 0x5410), high = __byte_perm(pair[2], pair[3], 0x5410);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t signs = scale == scale ? codes[i] : codes[i] & 0x77777777u;
    uint32_t shifted = signs << 4;
    word[2 * i] = __byte_perm(low, high, codes[i] & 0x7777u) ^ (__byte_perm(shifted, signs, 0x5140) & 0x80808080u);
    word[2 * i + 1] =
      __byte_perm(low, high, codes[i] >> 16 & 0x7777u) ^ (__byte_perm(shifted, signs, 0x7362) & 0x80808080u);
  }
}

/* nib_rope_pair of the two elements of a word. */
NIB_DEVICE uint32_t nib_rope_word(uint32_t word, float cosine, float sine) {
  float e = nib_low_half(word, NIB_TYPE_BFLOAT16), o = nib_high_half(word, NIB_TYPE_BFLOAT16);
  return nib_halves_from_f32(fmaf(e, cosine, -(o * sine)), fmaf(e, sine, o * cosine), NIB_TYPE_BFLOAT16);
}

#endif
