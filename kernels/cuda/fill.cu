/* The same bits in every element. */
#include "../convert.h"
#include "strided.cuh"

/* As in copy.cu: words as large as an element, or larger ones that stand for several without a gap. */
template <class WORD> __device__ __forceinline__ void fill_words(const struct nib_fill_params &p, WORD word) {
  int64_t size = nib_type_size(p.type), rows = nib_strided_rows(p.ndim, p.size);
  int64_t count = p.ndim > 0 ? p.size[p.ndim - 1] : 1, step = p.ndim > 0 ? p.stride[p.ndim - 1] * size : size;
  if (sizeof(WORD) > (size_t)size) {
    count = count * size / (int64_t)sizeof(WORD);
    step = sizeof(WORD);
  }
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < rows;
       row += (int64_t)gridDim.y * blockDim.y) {
    int64_t at, same;
    nib_strided_offsets(p.ndim, p.size, row, p.stride, p.stride, &at, &same);
    char *to = (char *)p.destination + at * size;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
      *(WORD *)(to + i * step) = word;
  }
}

NIB_ENTRY(fill_8, 256, 4, nib_fill_params) { fill_words<uint8_t>(p, (uint8_t)p.bits); }

NIB_ENTRY(fill_16, 256, 4, nib_fill_params) { fill_words<uint16_t>(p, (uint16_t)p.bits); }

NIB_ENTRY(fill_32, 256, 4, nib_fill_params) { fill_words<uint32_t>(p, (uint32_t)p.bits); }

NIB_ENTRY(fill_64, 256, 4, nib_fill_params) { fill_words<uint64_t>(p, p.bits); }

NIB_ENTRY(fill_128, 256, 4, nib_fill_params) {
  int64_t size = nib_type_size(p.type);
  uint64_t bits = p.bits;
  if (size == 1) bits = (bits & 0xFF) * 0x0101010101010101u;
  else if (size == 2) bits = (bits & 0xFFFF) * 0x0001000100010001u;
  else if (size == 4) bits = (bits & 0xFFFFFFFF) * 0x0000000100000001u;
  fill_words<uint4>(p, make_uint4((uint32_t)bits, (uint32_t)(bits >> 32), (uint32_t)bits, (uint32_t)(bits >> 32)));
}
