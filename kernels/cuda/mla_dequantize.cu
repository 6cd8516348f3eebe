/* The bfloat16 rows that operation 4's records stand for. */
#include "kernel.cuh"

/* A thread has 8 elements of a row: half a block of codes, or 16 bytes of RoPE values. */
template <bool NARROW> __device__ __forceinline__ void mla_dequantize(const struct nib_mla_dequantize_params &p) {
  uint32_t chunk = threadIdx.x;
  for (int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; row < p.count;
       row += (int64_t)gridDim.x * blockDim.y) {
    int64_t index = nib_index_at(&p.slots, 0, row);
    struct nib_slot slot = nib_slot_split(index, p.page_size, p.num_pages);
    uint32_t word[4] = { 0, 0, 0, 0 };
    if (!slot.valid) {
      if (chunk == 0) nib_fault_raise(p.fault, NIB_OPERATION_MLA_DEQUANTIZE, NIB_CONTENT_SLOTS, row, 0, index, 0);
    } else {
      const uint8_t *page = p.cache + slot.page * p.page_stride;
      const uint8_t *data = page + slot.entry * NIB_MLA_DATA_BYTES;
      if (chunk < NIB_MLA_NOPE / 8) {
        uint8_t byte = page[p.page_size * NIB_MLA_DATA_BYTES + slot.entry * NIB_MLA_SCALE_BYTES + chunk / 2];
        nib_words_decode(nib_load_codes<NARROW>(data + chunk * 4), nib_e4m3_decode(byte), 1.0f, NIB_TYPE_BFLOAT16,
                         word);
      } else {
        const uint8_t *rope = data + NIB_MLA_NOPE / 2 + (chunk - NIB_MLA_NOPE / 8) * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) word[i] = nib_load_codes<NARROW>(rope + 4 * i);
      }
    }
    nib_store_words<NARROW ? 2 : 16>(p.out + row * NIB_MLA_DIM + chunk * 8, word);
  }
}

/* 4-byte loads, 16-byte stores. */
NIB_ENTRY(mla_dequantize, 256, 4, nib_mla_dequantize_params) { mla_dequantize<false>(p); }

NIB_ENTRY(mla_dequantize_narrow, 256, 2, nib_mla_dequantize_params) { mla_dequantize<true>(p); }
