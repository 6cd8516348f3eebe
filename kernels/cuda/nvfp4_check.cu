/* Every function of the headers that C and CUDA share, used once in device code, so that a build with nvcc shows when one of
 * them stops being CUDA. Never launched. */
#include "../convert.h"
#include "../paged.h"
#include "../random.h"

extern "C" __global__ void nib_cuda_nvfp4_check(const struct nib_append_params *append,
                                                const struct nib_materialize_params *materialize, const uint16_t *half,
                                                uint8_t *bytes, float *f32, double *f64, int64_t *i64)
{
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  uint16_t even = half[0], odd = half[1];

  f32[0] = nib_f32_canonical(nib_f32_from_bf16(half[i]) + nib_f32_from_f16(half[i]));
  ((uint16_t *)bytes)[i] = nib_bf16_from_f64(f64[i]) + nib_f16_from_f64(f64[i]);
  bytes[0] = nib_e4m3_from_f64(f64[i]) + nib_e4m3_from_e2m1(bytes[1], bytes[2]);
  f64[0] = nib_f64_odd_from_i64(i64[0]);

  struct nib_block_scale scale = nib_block_scale(nib_amax(half + i, NIB_BLOCK, append->type), nib_scale_read(&append->k_scale));
  nib_block_encode(half + i, append->type, scale.inverse, NIB_APPEND_NAN_CODE, bytes + 8);
  nib_block_encode(half + i, append->type, scale.inverse, NIB_MLA_NAN_CODE, bytes + 16);
  nib_block_decode(bytes, nib_e4m3_decode(scale.byte), f32[0], append->type, (uint16_t *)bytes + 64);
  nib_rope_pair(&even, &odd, f32[0], f32[1]);
  bytes[3] = (uint8_t)(even ^ odd);
  if (!nib_scale_is_valid(f32[0]))
    nib_fault_raise(append->fault, NIB_OPERATION_APPEND, NIB_CONTENT_K_SCALE, i, 1, 0, f32[0]);

  struct nib_slot slot = nib_slot_split(nib_index_at(&append->slots, 0, i), append->page_size, append->num_pages);
  if (slot.valid)
    *nib_paged_row(&append->v_sf, slot.page, nib_interleaved_row(slot.entry, i, 8), 0) = scale.byte;
  bytes[nib_interleaved_column(slot.entry, i, 8)] = 0;
  struct nib_materialize_request request = nib_materialize_request(materialize, i);
  i64[1] = nib_materialize_page(&request, i);

  nib_convert_element(half, i, append->type, bytes, i, append->type + 1);
  nib_store_f64(bytes, i, append->type, f64[i]);
  nib_store_i64(bytes, i, append->type, nib_load_i64(i64, i, append->type));

  nib_sincos(f64[0], &f64[1], &f64[2]);
  nib_random_normal_pair(7, (uint64_t)i, f64 + 4);
  nib_random_integer_pair(7, (uint64_t)i, -5, 11, i64 + 2);
  struct nib_permutation permutation = nib_permutation_make(7, 100);
  i64[4] = nib_permutation_at(&permutation, i);
}
