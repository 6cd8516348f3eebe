/* Which function of kernels/cuda carries out a launch, and over how many threads. Needs neither CUDA nor its
 * headers. */
#ifndef NIB_CUDA_GEOMETRY_H
#define NIB_CUDA_GEOMETRY_H

#include "../../kernels/params.h"

/* X(symbol, kernel's symbol in NIB_KERNEL_LIST, file in kernels/cuda, function without its prefix nib_cuda_). */
#define NIB_CUDA_ENTRY_LIST(X)                                                    \
  X(APPEND_BF16, APPEND, append, append_bf16)                                     \
  X(APPEND_F16, APPEND, append, append_f16)                                       \
  X(APPEND_ONE_BF16, APPEND, append, append_one_bf16)                             \
  X(APPEND_ONE_F16, APPEND, append, append_one_f16)                               \
  X(APPEND_FEW_BF16, APPEND, append, append_few_bf16)                             \
  X(APPEND_FEW_F16, APPEND, append, append_few_f16)                               \
  X(APPEND_NARROW, APPEND, append, append_narrow)                                 \
  X(MATERIALIZE, MATERIALIZE, materialize, materialize)                           \
  X(MATERIALIZE_TWO, MATERIALIZE, materialize, materialize_two)                   \
  X(MATERIALIZE_FEW, MATERIALIZE, materialize, materialize_few)                   \
  X(MATERIALIZE_NARROW, MATERIALIZE, materialize, materialize_narrow)             \
  X(DEQUANTIZE_BF16, DEQUANTIZE, dequantize, dequantize_bf16)                     \
  X(DEQUANTIZE_F16, DEQUANTIZE, dequantize, dequantize_f16)                       \
  X(DEQUANTIZE_ONE_BF16, DEQUANTIZE, dequantize, dequantize_one_bf16)             \
  X(DEQUANTIZE_ONE_F16, DEQUANTIZE, dequantize, dequantize_one_f16)               \
  X(DEQUANTIZE_FEW_BF16, DEQUANTIZE, dequantize, dequantize_few_bf16)             \
  X(DEQUANTIZE_FEW_F16, DEQUANTIZE, dequantize, dequantize_few_f16)               \
  X(DEQUANTIZE_NARROW, DEQUANTIZE, dequantize, dequantize_narrow)                 \
  X(ROPE_INSERT, ROPE_INSERT, rope_insert, rope_insert)                           \
  X(ROPE_INSERT_FEW, ROPE_INSERT, rope_insert, rope_insert_few)                   \
  X(ROPE_INSERT_NARROW, ROPE_INSERT, rope_insert, rope_insert_narrow)             \
  X(SWIZZLE_32, SWIZZLE, swizzle, swizzle_32)                                     \
  X(SWIZZLE_16, SWIZZLE, swizzle, swizzle_16)                                     \
  X(SWIZZLE_NARROW, SWIZZLE, swizzle, swizzle_narrow)                             \
  X(AMAX_BF16, AMAX, amax, amax_bf16)                                             \
  X(AMAX_F16, AMAX, amax, amax_f16)                                               \
  X(AMAX_NARROW, AMAX, amax, amax_narrow)                                         \
  X(QUANTIZE_CACHE_BF16, QUANTIZE_CACHE, quantize_cache, quantize_cache_bf16)     \
  X(QUANTIZE_CACHE_F16, QUANTIZE_CACHE, quantize_cache, quantize_cache_f16)       \
  X(QUANTIZE_CACHE_NARROW, QUANTIZE_CACHE, quantize_cache, quantize_cache_narrow) \
  X(MLA_DEQUANTIZE, MLA_DEQUANTIZE, mla_dequantize, mla_dequantize)               \
  X(MLA_DEQUANTIZE_NARROW, MLA_DEQUANTIZE, mla_dequantize, mla_dequantize_narrow) \
  X(ROPE_TABLE, ROPE_TABLE, rope_table, rope_table)                               \
  X(COPY_8, COPY, copy, copy_8)                                                   \
  X(COPY_16, COPY, copy, copy_16)                                                 \
  X(COPY_32, COPY, copy, copy_32)                                                 \
  X(COPY_64, COPY, copy, copy_64)                                                 \
  X(COPY_128, COPY, copy, copy_128)                                               \
  X(COPY_F32_F16, COPY, copy, copy_f32_f16)                                       \
  X(COPY_F32_BF16, COPY, copy, copy_f32_bf16)                                     \
  X(COPY_F16_F32, COPY, copy, copy_f16_f32)                                       \
  X(COPY_BF16_F32, COPY, copy, copy_bf16_f32)                                     \
  X(COPY_CONVERT, COPY, copy, copy_convert)                                       \
  X(FILL_8, FILL, fill, fill_8)                                                   \
  X(FILL_16, FILL, fill, fill_16)                                                 \
  X(FILL_32, FILL, fill, fill_32)                                                 \
  X(FILL_64, FILL, fill, fill_64)                                                 \
  X(FILL_128, FILL, fill, fill_128)                                               \
  X(ARANGE, ARANGE, arange, arange)                                               \
  X(RANDOM, RANDOM, random, random)

#define X(symbol, kernel, file, function) NIB_CUDA_ENTRY_##symbol,
enum nib_cuda_entry { NIB_CUDA_ENTRY_LIST(X) NIB_CUDA_ENTRY_COUNT };
#undef X

struct nib_cuda_geometry {
  enum nib_cuda_entry entry;
  uint32_t grid[3], block[3]; /* x, y, z; at least 1 each */
  uint32_t shared_bytes;
};

/* `params` is the kernel's struct of params.h, with pointers of the device; they are looked at for their alignment
 * alone. Work that is too large for any grid gives sizes that the driver refuses. */
void nib_cuda_geometry(enum nib_kernel kernel, const void *params, int32_t multiprocessors,
                       struct nib_cuda_geometry *out);

#endif
