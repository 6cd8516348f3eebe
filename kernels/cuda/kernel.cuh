/* What the CUDA kernels of this folder share. One entry is one launch; NAME_launch.c chooses the entry and
 * its grid from the params. An entry without "narrow" in its name may use 16-byte accesses where its comment says
 * so: the launch has looked at every pointer and stride that this rests on. Entries take the params by value and
 * share nothing between launches. */
#ifndef NIB_CUDA_KERNEL_CUH
#define NIB_CUDA_KERNEL_CUH

#include "../paged.h"

/* threads: the most per block; blocks: how many should fit on a multiprocessor, which bounds the registers. */
#define NIB_ENTRY(name, threads, blocks, type) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) nib_cuda_##name(const __grid_constant__ struct type p)

/* Loads that keep their order, and their place before branches as far as the front end decides it: what is requested
 * before the first wait arrives during it. */
__device__ __forceinline__ uint8_t nib_load_1(const void *data) {
  uint32_t byte;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(data));
  return (uint8_t)byte;
}

__device__ __forceinline__ uint32_t nib_load_4(const void *data) {
  uint32_t word;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(data));
  return word;
}

__device__ __forceinline__ uint2 nib_load_8(const void *data) {
  uint2 word;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(data));
  return word;
}

__device__ __forceinline__ uint4 nib_load_16(const void *data) {
  uint4 word;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(data));
  return word;
}

__device__ __forceinline__ int64_t nib_load_position(const int64_t *data) {
  int64_t value;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(data));
  return value;
}

/* Loads without a branch; `word` stays as it is when the condition does not hold. */
__device__ __forceinline__ void nib_load_4_if(int condition, const void *data, uint32_t *word) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; @p ld.global.b32 %0, [%2]; }"
               : "+r"(*word)
               : "r"(condition), "l"(data));
}

__device__ __forceinline__ void nib_load_16_if(int condition, const void *data, uint32_t word[4]) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %4, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%5]; }"
               : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
               : "r"(condition), "l"(data));
}

/* Stores without a branch, before which everything that only the store needs would wait. */
__device__ __forceinline__ void nib_store_1_if(int condition, void *data, uint8_t byte) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.b8 [%1], %2; }"
               :
               : "r"(condition), "l"(data), "r"((uint32_t)byte)
               : "memory");
}

__device__ __forceinline__ void nib_store_4_if(int condition, void *data, uint32_t word) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.b32 [%1], %2; }"
               :
               : "r"(condition), "l"(data), "r"(word)
               : "memory");
}

__device__ __forceinline__ void nib_store_16_if(int condition, void *data, const uint32_t word[4]) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }"
               :
               : "r"(condition), "l"(data), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

/* The address, computed before what is added to it is there; the compiler would rather add all parts in the end. */
__device__ __forceinline__ uint8_t *nib_ahead(uint8_t *address) {
  asm volatile("" : "+l"(address));
  return address;
}

/* 0, once `value` has arrived. In a condition that also waits for other loads it keeps the compiler from requesting
 * `value` only behind the branch. `size` is any size of the params: below 2^62, which the compiler does not know. */
__device__ __forceinline__ int nib_wait_for(float value, int64_t size) {
  return (int)(nib_bits_from_f32(value) & (uint32_t)(size >> 62));
}

/* Indices are uint32_t where a cache has fewer than 2^31 slots, otherwise int64_t. */

/* The page of a request that has its token `at`, and the entry in it. */
template <class INDEX> __device__ __forceinline__ INDEX nib_column_of(uint32_t at, int64_t page_size, INDEX *entry) {
  INDEX column;
  if (sizeof(INDEX) == 8) {
    column = (INDEX)nib_divide(at, page_size);
  } else {
    uint32_t size = (uint32_t)page_size;
    column = (size & (size - 1)) == 0 ? at >> (31 - __clz(size)) : at / size;
  }
  *entry = at - column * (INDEX)page_size;
  return column;
}

/* nib_slot_split. */
template <class INDEX> struct nib_place {
  INDEX page, entry;
  int valid;
};

template <class INDEX>
__device__ __forceinline__ struct nib_place<INDEX> nib_place_of(int64_t slot, int64_t page_size, int64_t num_pages) {
  struct nib_place<INDEX> place;
  if (sizeof(INDEX) == 8) {
    struct nib_slot split = nib_slot_split(slot, page_size, num_pages);
    place.page = (INDEX)split.page, place.entry = (INDEX)split.entry, place.valid = split.valid;
  } else {
    uint32_t slots = (uint32_t)page_size * (uint32_t)num_pages;
    place.valid = (uint64_t)slot < slots;
    place.page = nib_column_of<INDEX>((uint32_t)slot, page_size, &place.entry);
  }
  return place;
}

/* The same without branches: more instructions, but they fit in between others. */
template <class INDEX>
__device__ __forceinline__ struct nib_place<INDEX> nib_place_at_once(int64_t slot, int64_t page_size,
                                                                     int64_t num_pages) {
  struct nib_place<INDEX> place;
  INDEX size = (INDEX)page_size;
  place.valid = (uint64_t)slot < (uint64_t)(size * (INDEX)num_pages);
  place.page = (INDEX)slot / size;
  place.entry = (INDEX)slot - place.page * size;
  return place;
}

/* The 16 elements of a block as eight words. */
template <bool NARROW>
__device__ __forceinline__ void nib_load_block(const uint16_t *x, uint32_t word[8]) {
  if (NARROW) {
#pragma unroll
    for (int i = 0; i < 8; i++) word[i] = x[2 * i] | (uint32_t)x[2 * i + 1] << 16;
  } else {
    uint4 low = nib_load_16(x), high = nib_load_16(x + 8);
    word[0] = low.x, word[1] = low.y, word[2] = low.z, word[3] = low.w;
    word[4] = high.x, word[5] = high.y, word[6] = high.z, word[7] = high.w;
  }
}

/* amax of a block whose halves two neighbouring threads of a warp have (all threads of the warp take part), from
 * that of each half; likewise `has_nan`. */
__device__ __forceinline__ float nib_pair_amax(float amax, int *has_nan) {
  uint32_t bits = nib_bits_from_f32(amax) | (*has_nan ? NIB_F32_SIGN : 0);
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, bits, 1);
  *has_nan |= other >> 31;
  return nib_f32_from_bits((bits << 1 > other << 1 ? bits : other) & ~NIB_F32_SIGN);
}

/* Four bytes: eight codes. */
template <bool NARROW> __device__ __forceinline__ uint32_t nib_load_codes(const uint8_t *data) {
  if (NARROW) return data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
  return nib_load_4(data);
}

/* The codes of a block. */
template <bool NARROW> __device__ __forceinline__ void nib_load_block_codes(const uint8_t *data, uint32_t codes[2]) {
  if (NARROW) {
    codes[0] = nib_load_codes<true>(data);
    codes[1] = nib_load_codes<true>(data + 4);
  } else {
    uint2 both = nib_load_8(data);
    codes[0] = both.x, codes[1] = both.y;
  }
}

template <bool NARROW> __device__ __forceinline__ void nib_store_codes(uint8_t *data, uint32_t codes) {
  if (NARROW) {
#pragma unroll
    for (int i = 0; i < 4; i++) data[i] = (uint8_t)(codes >> (8 * i));
  } else {
    *(uint32_t *)data = codes;
  }
}

template <bool NARROW> __device__ __forceinline__ void nib_store_block_codes(uint8_t *data, const uint32_t packed[2]) {
  if (NARROW) {
#pragma unroll
    for (int i = 0; i < NIB_BLOCK_BYTES; i++) data[i] = (uint8_t)(packed[i / 4] >> (8 * (i % 4)));
  } else {
    *(uint2 *)data = make_uint2(packed[0], packed[1]);
  }
}

/* Four words to 16 bytes; UNIT is the alignment of `data` that is sure. */
template <int UNIT> __device__ __forceinline__ void nib_store_words(void *data, const uint32_t word[4]) {
  if (UNIT == 16) {
    *(uint4 *)data = make_uint4(word[0], word[1], word[2], word[3]);
  } else if (UNIT == 2) {
#pragma unroll
    for (int i = 0; i < 8; i++) ((uint16_t *)data)[i] = (uint16_t)(word[i / 2] >> (16 * (i % 2)));
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) ((uint8_t *)data)[i] = (uint8_t)(word[i / 4] >> (8 * (i % 4)));
  }
}

#endif
