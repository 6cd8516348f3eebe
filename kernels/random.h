/* Counter-based random elements: element i of a tensor depends on the seed and on i alone, so that any thread of any
 * device computes any element, and all get the same bits. Shared by C and CUDA. */
#ifndef NIB_RANDOM_H
#define NIB_RANDOM_H

#include "elementary.h"

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): 128 random bits from
 * a 64-bit key and a counter, as two 64-bit words. */
struct nib_random_words {
  uint64_t word[2];
};

NIB_HD struct nib_random_words nib_philox(uint64_t key, uint64_t counter) {
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)c0 * 0xD2511F53u;
    uint64_t b = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  struct nib_random_words words = { { (uint64_t)c1 << 32 | c0, (uint64_t)c3 << 32 | c2 } };
  return words;
}

/* Elements 2*pair and 2*pair + 1 of a standard normal tensor (Box and Muller): a radius and an angle. */
NIB_HD void nib_random_normal_pair(uint64_t seed, uint64_t pair, double normal[2]) {
  struct nib_random_words words = nib_philox(seed, pair);
  double uniform = (double)((words.word[0] >> 11) + 1) * 0x1p-53; /* above 0, up to 1 */
  double turn = (double)(words.word[1] >> 11) * 0x1p-53;          /* from 0, below 1 */
  double radius = sqrt(-2.0 * nib_log(uniform));
  double sine, cosine;
  nib_sincos_turn(turn, &sine, &cosine);
  normal[0] = radius * cosine;
  normal[1] = radius * sine;
}

/* The upper 64 bits of a product. */
NIB_HD uint64_t nib_mulhi64(uint64_t a, uint64_t b) {
  uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
  uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
  uint64_t middle2 = a0 * b1 + (uint32_t)middle;
  return a1 * b1 + (middle >> 32) + (middle2 >> 32);
}

/* Elements 2*pair and 2*pair + 1 of a tensor of integers low .. low + range - 1 (`range` values). */
NIB_HD void nib_random_integer_pair(uint64_t seed, uint64_t pair, int64_t low, uint64_t range, int64_t integer[2]) {
  struct nib_random_words words = nib_philox(seed, pair);
  integer[0] = (int64_t)((uint64_t)low + nib_mulhi64(words.word[0], range));
  integer[1] = (int64_t)((uint64_t)low + nib_mulhi64(words.word[1], range));
}

#define NIB_PERMUTATION_ROUNDS 8

/* A permutation of 0..count-1 as a function of its index, so that it needs no memory and no order: a Feistel network
 * permutes the next power of 4; a result that is too large is permuted again until it fits. */
struct nib_permutation {
  uint64_t count;
  uint32_t half_bits, mask;
  uint32_t key[NIB_PERMUTATION_ROUNDS];
};

NIB_HD struct nib_permutation nib_permutation_make(uint64_t seed, uint64_t count) {
  struct nib_permutation permutation;
  permutation.count = count;
  permutation.half_bits = 4; /* a network on fewer bits knows too few permutations */
  while (permutation.half_bits < 32 && (count - 1) >> (2 * permutation.half_bits)) permutation.half_bits++;
  permutation.mask = permutation.half_bits < 32 ? (1u << permutation.half_bits) - 1 : 0xFFFFFFFFu;
  for (int i = 0; i < NIB_PERMUTATION_ROUNDS; i += 4) {
    struct nib_random_words words = nib_philox(seed, (uint64_t)i);
    permutation.key[i] = (uint32_t)words.word[0];
    permutation.key[i + 1] = (uint32_t)(words.word[0] >> 32);
    permutation.key[i + 2] = (uint32_t)words.word[1];
    permutation.key[i + 3] = (uint32_t)(words.word[1] >> 32);
  }
  return permutation;
}

NIB_HD int64_t nib_permutation_at(const struct nib_permutation *permutation, int64_t index) {
  uint64_t value = (uint64_t)index;
  do {
    uint32_t left = (uint32_t)(value >> permutation->half_bits), right = (uint32_t)value & permutation->mask;
    for (int i = 0; i < NIB_PERMUTATION_ROUNDS; i++) {
      uint64_t mixed = (uint64_t)(right ^ permutation->key[i]) * 0xD2511F53u;
      mixed = (uint64_t)((uint32_t)(mixed >> 32) ^ (uint32_t)mixed) * 0xCD9E8D57u;
      uint32_t next = left ^ (((uint32_t)(mixed >> 32) ^ (uint32_t)mixed) & permutation->mask);
      left = right;
      right = next;
    }
    value = (uint64_t)left << permutation->half_bits | right;
  } while (value >= permutation->count);
  return (int64_t)value;
}

#endif
