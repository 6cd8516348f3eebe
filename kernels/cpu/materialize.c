/* Materialize: the pages that requests reach, as an E4M3 cache. */
#include "../paged.h"
#include "clones.h"

struct materialize {
  const struct nib_materialize_params *params;
  uint8_t product[256][16]; /* E4M3(value of code * scale byte): there are only 4096 of them */
};

NIB_BODY materialize_block(const uint8_t *packed, const uint8_t *product, uint8_t *out) {
  for (int i = 0; i < NIB_BLOCK_BYTES; i++) {
    out[2 * i] = product[packed[i] & 15];
    out[2 * i + 1] = product[packed[i] >> 4];
  }
}

/* One head of one page, K or V, compact in the output. */
static void materialize_plane(const struct materialize *task, int64_t page, int64_t head, int is_value, uint8_t *out) {
  const struct nib_materialize_params *p = task->params;
  const struct nib_paged *cache = is_value ? &p->v_cache : &p->k_cache;
  int64_t blocks = p->head_dim / NIB_BLOCK;
  for (int64_t token = 0; token < p->page_size; token++) {
    const uint8_t *data = nib_paged_row(cache, page, token, head);
    uint8_t *row = out + token * p->head_dim;
    if (!is_value) {
      const uint8_t *sf = nib_paged_row(&p->k_sf, page, token, head);
      for (int64_t block = 0; block < blocks; block++)
        materialize_block(data + block * NIB_BLOCK_BYTES, task->product[sf[block]], row + block * NIB_BLOCK);
    } else {
      int64_t block = 0;
      for (int64_t quarter = 0; quarter < 4; quarter++) { /* nib_interleaved_row and _column, without their divisions */
        const uint8_t *sf = nib_paged_row(&p->v_sf, page, token / 4 * 4 + quarter, head) + token % 4;
        for (int64_t i = 0; i < blocks / 4; i++, block++)
          materialize_block(data + block * NIB_BLOCK_BYTES, task->product[sf[4 * i]], row + block * NIB_BLOCK);
      }
    }
  }
}

/* Items are planes: [batch, max_pages, 2, heads]. */
static void materialize_planes(void *argument, int64_t begin, int64_t end) {
  const struct materialize *task = argument;
  const struct nib_materialize_params *p = task->params;
  size_t plane = (size_t)(p->page_size * p->head_dim);
  for (int64_t item = begin; item < end; item++) {
    int64_t head = item % p->heads;
    int is_value = item / p->heads % 2 != 0;
    int64_t column = item / (2 * p->heads) % p->max_pages;
    int64_t b = item / (2 * p->heads) / p->max_pages;
    struct nib_materialize_request request = nib_materialize_request(p, b);
    int64_t target = nib_materialize_page(&request, column);
    if (target == 0) continue;
    uint8_t *out = p->out + ((target * 2 + is_value) * p->heads + head) * (int64_t)plane;
    int64_t page = p->block_tables[b * p->table_row_stride + is_value * p->table_kv_stride + column * p->table_stride];
    if (page >= 0 && page < p->num_pages) {
      materialize_plane(task, page, head, is_value, out);
      continue;
    }
    memset(out, 0, plane);
    int64_t table_row = p->table_kv_stride ? 2 * b + is_value : b;
    if (head == 0)
      nib_fault_raise(p->fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_BLOCK_TABLES,
                      table_row * p->table_columns + column, 0, page, 0);
  }
}

/* Request b's row of the new table, and what is wrong with its length and range. */
static void materialize_table_row(const struct nib_materialize_params *p, int64_t b) {
  struct nib_materialize_request request = nib_materialize_request(p, b);
  for (int64_t column = 0; column < p->max_pages; column++)
    p->out_table[b * p->max_pages + column] = (int32_t)nib_materialize_page(&request, column);
  if (request.length > p->max_kv_len)
    nib_fault_raise(p->fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_SEQ_LENS, b, 0, request.length, 0);
  if (request.begin < 0 || request.begin > p->num_out_pages)
    nib_fault_raise(p->fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_KV_PAGE_INDPTR, b, 0, request.begin, 0);
  else if (request.end > p->num_out_pages || request.end - request.begin < request.pages)
    nib_fault_raise(p->fault, NIB_OPERATION_MATERIALIZE, NIB_CONTENT_KV_PAGE_INDPTR, b + 1, 0, request.end, 0);
}

/* A quarter of them is computed; the others differ in their signs. */
static void fill_products(uint8_t product[256][16]) {
  for (uint32_t scale = 0; scale < 128; scale++)
    for (uint32_t code = 0; code < 8; code++) {
      uint8_t value = nib_e4m3_from_e2m1(code, (uint8_t)scale);
      uint8_t negative = value == NIB_E4M3_NAN ? value : value | 0x80;
      product[scale][code] = product[scale + 128][code + 8] = value;
      product[scale][code + 8] = product[scale + 128][code] = negative;
    }
}

void nib_cpu_materialize(const void *params, const struct nib_cpu_team *team) {
  const struct nib_materialize_params *p = params;
  struct materialize task;
  int64_t plane = p->page_size * p->head_dim;
  if (p->heads > 0 && plane > 0) memset(p->out, 0, (size_t)(2 * p->heads * plane)); /* the zero page */
  for (int64_t b = 0; b < p->batch; b++) materialize_table_row(p, b);
  if (p->batch <= 0 || p->max_pages <= 0 || p->heads <= 0 || plane <= 0) return;
  task.params = p;
  fill_products(task.product);
  team->run(team->context, p->batch * p->max_pages * 2 * p->heads, nib_cpu_grain(plane * 3 / 2), materialize_planes,
            &task);
}
