/* The bfloat16 rows that rope_insert's records stand for. */
#include "../paged.h"
#include "clones.h"

NIB_BODY mla_dequantize_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_mla_dequantize_params *p = argument;
  for (int64_t row = begin; row < end; row++) {
    uint16_t *out = p->out + row * NIB_MLA_DIM;
    int64_t index = nib_index_at(&p->slots, 0, row);
    struct nib_slot slot = nib_slot_split(index, p->page_size, p->num_pages);
    if (!slot.valid) {
      memset(out, 0, NIB_MLA_DIM * sizeof *out);
      nib_fault_raise(p->fault, NIB_OPERATION_MLA_DEQUANTIZE, NIB_CONTENT_SLOTS, row, 0, index, 0);
      continue;
    }
    const uint8_t *page = p->cache + slot.page * p->page_stride;
    const uint8_t *data = page + slot.entry * NIB_MLA_DATA_BYTES;
    const uint8_t *sf = page + p->page_size * NIB_MLA_DATA_BYTES + slot.entry * NIB_MLA_SCALE_BYTES;
    for (int block = 0; block < NIB_MLA_NOPE / NIB_BLOCK; block++)
      nib_block_decode(data + block * NIB_BLOCK_BYTES, nib_e4m3_decode(sf[block]), 1.0f, NIB_TYPE_BFLOAT16,
                       out + block * NIB_BLOCK);
    memcpy(out + NIB_MLA_NOPE, data + NIB_MLA_NOPE / 2, NIB_MLA_ROPE * sizeof *out);
  }
}
NIB_CLONES(mla_dequantize)

void nib_cpu_mla_dequantize(const void *params, const struct nib_cpu_team *team) {
  struct nib_mla_dequantize_params p = *(const struct nib_mla_dequantize_params *)params;
  if (p.count <= 0 || p.page_size <= 0) return;
  team->run(team->context, p.count, nib_cpu_grain(NIB_MLA_DIM * (int64_t)sizeof(uint16_t)), NIB_PICK(mla_dequantize),
            &p);
}
