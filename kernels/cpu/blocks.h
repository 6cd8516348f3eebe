/* Runs of blocks, in steps that the processor can overlap: one block's scale takes two divisions and a long chain of
 * dependent operations, which would stall its codes. */
#ifndef NIB_CPU_BLOCKS_H
#define NIB_CPU_BLOCKS_H

#include "../nvfp4.h"
#include "clones.h"

#define NIB_STEP 8 /* blocks */

/* Elements (float16 or bfloat16) to packed codes by append's rule, their scale bytes to sf[0], sf[1], ... */
NIB_BODY nib_blocks_quantize(const uint16_t *x, int32_t type, int64_t blocks, float global, uint32_t nan_code,
                             uint8_t *packed, uint8_t *sf) {
  for (int64_t done = 0; done < blocks; done += NIB_STEP) {
    int count = (int)(blocks - done < NIB_STEP ? blocks - done : NIB_STEP);
    float amax[NIB_STEP] = { 0 }, inverse[NIB_STEP];
    uint8_t byte[NIB_STEP];
    for (int i = 0; i < count; i++) amax[i] = nib_amax(x + (done + i) * NIB_BLOCK, NIB_BLOCK, type);
    for (int i = 0; i < NIB_STEP; i++) {
      struct nib_block_scale scale = nib_block_scale(amax[i], global);
      inverse[i] = scale.inverse;
      byte[i] = scale.byte;
    }
    for (int i = 0; i < count; i++) {
      sf[done + i] = byte[i];
      nib_block_encode(x + (done + i) * NIB_BLOCK, type, inverse[i], nan_code, packed + (done + i) * NIB_BLOCK_BYTES);
    }
  }
}

/* The same with 4over6: most of the time goes into the errors, and nothing has to overlap. */
NIB_BODY nib_blocks_quantize_4over6(const uint16_t *x, int32_t type, int64_t blocks, float global, uint32_t nan_code,
                                    uint8_t *packed, uint8_t *sf) {
  for (int64_t i = 0; i < blocks; i++, x += NIB_BLOCK, packed += NIB_BLOCK_BYTES) {
    struct nib_block_scale scale = nib_block_scale_4over6(x, type, nib_amax(x, NIB_BLOCK, type), global);
    sf[i] = scale.byte;
    nib_block_encode(x, type, scale.inverse, nan_code, packed);
  }
}

#endif
