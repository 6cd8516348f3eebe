/* Rope insert and its sibling without queries: rotate q; rotate, quantize and insert kv. */
#include "../paged.h"
#include "blocks.h"

NIB_BODY rotate(uint16_t *x, const float *cos_sin) {
  for (int pair = 0; pair < NIB_MLA_ROPE / 2; pair++)
    nib_rope_pair(&x[2 * pair], &x[2 * pair + 1], cos_sin[pair], cos_sin[NIB_MLA_ROPE / 2 + pair]);
}

/* The table row by which token `row` rotates: that of its position, or of the first of the `ratio` positions it shares
 * a record with. NULL, and a fault, when the position is outside the table. */
static const float *table_row(const struct nib_rope_insert_params *p, int64_t row, int64_t ratio) {
  int64_t position = p->positions[row];
  if (position < 0 || position >= p->max_position) {
    nib_fault_raise(p->fault, (uint32_t)p->operation, NIB_CONTENT_POSITIONS, row, 0, position, 0);
    return NULL;
  }
  return p->cos_sin + position / ratio * ratio * NIB_MLA_ROPE;
}

NIB_BODY write_query(const struct nib_rope_insert_params *p, int64_t row, int64_t head) {
  int in_place = p->q_out == p->q;
  uint16_t *out = p->q_out + (row * (in_place ? p->heads : p->padded_heads) + head) * NIB_MLA_DIM;
  if (head >= p->heads) {
    memset(out, 0, NIB_MLA_DIM * sizeof *out);
    return;
  }
  if (!in_place) memcpy(out, p->q + (row * p->heads + head) * NIB_MLA_DIM, NIB_MLA_DIM * sizeof *out);
  if (!p->rotate_q) return;
  const float *cos_sin = table_row(p, row, 1);
  if (cos_sin) rotate(out + NIB_MLA_NOPE, cos_sin);
  else memset(out + NIB_MLA_NOPE, 0, NIB_MLA_ROPE * sizeof *out);
}

NIB_BODY insert_row(const struct nib_rope_insert_params *p, int64_t row) {
  if (row >= p->slot_count) return;
  struct nib_slot slot = nib_slot_split(nib_index_at(&p->slots, 0, row), p->page_size, p->num_pages);
  /* Unsigned, so that no position overflows; the ratio is 1 or 2. */
  if (!slot.valid || ((uint64_t)p->positions[row] + 1) % (uint64_t)p->compress_ratio != 0) return;
  const float *cos_sin = table_row(p, row, p->compress_ratio);
  if (!cos_sin) return;
  const uint16_t *x = p->kv + row * NIB_MLA_DIM;
  uint8_t *page = p->cache + slot.page * p->page_stride;
  uint8_t *data = page + slot.entry * NIB_MLA_DATA_BYTES;
  uint8_t *sf = page + p->page_size * NIB_MLA_DATA_BYTES + slot.entry * NIB_MLA_SCALE_BYTES;
  nib_blocks_quantize(x, NIB_TYPE_BFLOAT16, NIB_MLA_NOPE / NIB_BLOCK, 1.0f, NIB_MLA_NAN_CODE, data, sf);
  memset(sf + NIB_MLA_NOPE / NIB_BLOCK, 0, NIB_MLA_SCALE_BYTES - NIB_MLA_NOPE / NIB_BLOCK);
  uint16_t rotated[NIB_MLA_ROPE];
  memcpy(rotated, x + NIB_MLA_NOPE, sizeof rotated);
  rotate(rotated, cos_sin);
  memcpy(data + NIB_MLA_NOPE / 2, rotated, sizeof rotated);
}

/* How many heads of q_out each row has to get. */
static int64_t written_heads(const struct nib_rope_insert_params *p) {
  if (!p->q || !p->q_out) return 0;
  if (p->q_out == p->q) return p->rotate_q ? p->heads : 0;
  return p->padded_heads;
}

/* Items are the rows' query heads, each row's kv after them. */
NIB_BODY rope_insert_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_rope_insert_params *p = argument;
  int64_t heads = written_heads(p);
  int64_t row = begin / (heads + 1), head = begin % (heads + 1);
  for (int64_t item = begin; item < end; item++) {
    if (head < heads) {
      write_query(p, row, head);
      head++;
    } else {
      insert_row(p, row);
      row++;
      head = 0;
    }
  }
}
NIB_CLONES(rope_insert)

void nib_cpu_rope_insert(const void *params, const struct nib_cpu_team *team) {
  struct nib_rope_insert_params p = *(const struct nib_rope_insert_params *)params;
  if (p.rows <= 0) return;
  team->run(team->context, p.rows * (written_heads(&p) + 1), nib_cpu_grain(2 * NIB_MLA_DIM * (int64_t)sizeof(uint16_t)),
            NIB_PICK(rope_insert), &p);
}
