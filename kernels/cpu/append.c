/* Append: quantize K and V rows and write each to its slot. */
#include "../paged.h"
#include "blocks.h"

struct append {
  const struct nib_append_params *params;
  float k_scale, v_scale;
};

NIB_BODY append_blocks(const struct append *task, int32_t type, const uint16_t *x, float global, uint8_t *packed,
                       uint8_t *sf) {
  int64_t blocks = task->params->head_dim / NIB_BLOCK;
  if (task->params->four_over_six) nib_blocks_quantize_4over6(x, type, blocks, global, NIB_APPEND_NAN_CODE, packed, sf);
  else nib_blocks_quantize(x, type, blocks, global, NIB_APPEND_NAN_CODE, packed, sf);
}

NIB_BODY append_rows(const struct append *task, int32_t type, int64_t begin, int64_t end) {
  const struct nib_append_params *p = task->params;
  for (int64_t row = begin; row < end; row++) {
    struct nib_slot slot = nib_slot_split(nib_index_at(&p->slots, 0, row), p->page_size, p->num_pages);
    if (!slot.valid) continue;
    const uint16_t *key = (const uint16_t *)p->key + row * p->key_row_stride;
    const uint16_t *value = (const uint16_t *)p->value + row * p->value_row_stride;
    for (int64_t head = 0; head < p->heads; head++) {
      append_blocks(task, type, key + head * p->key_head_stride, task->k_scale,
                    nib_paged_row(&p->k_cache, slot.page, slot.entry, head),
                    nib_paged_row(&p->k_sf, slot.page, slot.entry, head));
      append_blocks(task, type, value + head * p->value_head_stride, task->v_scale,
                    nib_paged_row(&p->v_cache, slot.page, slot.entry, head),
                    nib_paged_row(&p->v_sf, slot.page, slot.entry, head));
    }
  }
}

NIB_BODY append_body(void *argument, int64_t begin, int64_t end) {
  const struct append *task = argument;
  if (task->params->type == NIB_TYPE_FLOAT16) append_rows(task, NIB_TYPE_FLOAT16, begin, end);
  else append_rows(task, NIB_TYPE_BFLOAT16, begin, end);
}
NIB_CLONES(append)

void nib_cpu_append(const void *params, const struct nib_cpu_team *team) {
  const struct nib_append_params *p = params;
  if (p->rows <= 0 || p->heads <= 0 || p->head_dim <= 0 || p->page_size <= 0) return;
  struct append task = { p, nib_scale_read(&p->k_scale), nib_scale_read(&p->v_scale) };
  if (!nib_scale_is_valid(task.k_scale)) {
    nib_fault_raise(p->fault, NIB_OPERATION_APPEND, NIB_CONTENT_K_SCALE, 0, 1, 0, task.k_scale);
    return;
  }
  if (!nib_scale_is_valid(task.v_scale)) {
    nib_fault_raise(p->fault, NIB_OPERATION_APPEND, NIB_CONTENT_V_SCALE, 0, 1, 0, task.v_scale);
    return;
  }
  team->run(team->context, p->rows, nib_cpu_grain(p->heads * p->head_dim * 5), NIB_PICK(append), &task);
}
