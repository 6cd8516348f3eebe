/* Dequantize: gather requests from the pages and dequantize them. */
#include "../paged.h"
#include "clones.h"

NIB_BODY dequantize_row(const uint8_t *data, const uint8_t *sf, float global, int32_t type, int64_t blocks,
                        uint16_t *out) {
  for (int64_t block = 0; block < blocks; block++)
    nib_block_decode(data + block * NIB_BLOCK_BYTES, nib_e4m3_decode(sf[block]), global, type, out + block * NIB_BLOCK);
}

/* Items are the tokens of the output, [batch, max_seq_len]. */
NIB_BODY dequantize_tokens(const struct nib_dequantize_params *p, int32_t type, int64_t begin, int64_t end) {
  float k_scale = *p->k_scale, v_scale = *p->v_scale;
  for (int64_t item = begin; item < end; item++) {
    int64_t request = item / p->max_seq_len, token = item % p->max_seq_len;
    if (token >= p->seq_lens[request * p->seq_stride]) {
      item += p->max_seq_len - token - 1; /* to the request's last token */
      continue;
    }
    int64_t page = nib_index_at(&p->block_tables, request, token / p->page_size);
    if (page < 0 || page >= p->num_pages) continue;
    int64_t entry = token % p->page_size;
    uint16_t *out_k = (uint16_t *)p->out_k + item * p->heads * p->k_head_dim;
    uint16_t *out_v = (uint16_t *)p->out_v + item * p->heads * p->v_head_dim;
    for (int64_t head = 0; head < p->heads; head++) {
      dequantize_row(nib_paged_row(&p->k_cache, page, entry, head), nib_paged_row(&p->k_sf, page, entry, head), k_scale,
                     type, p->k_head_dim / NIB_BLOCK, out_k + head * p->k_head_dim);
      dequantize_row(nib_paged_row(&p->v_cache, page, entry, head), nib_paged_row(&p->v_sf, page, entry, head), v_scale,
                     type, p->v_head_dim / NIB_BLOCK, out_v + head * p->v_head_dim);
    }
  }
}

NIB_BODY dequantize_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_dequantize_params *p = argument;
  if (p->type == NIB_TYPE_FLOAT16) dequantize_tokens(p, NIB_TYPE_FLOAT16, begin, end);
  else dequantize_tokens(p, NIB_TYPE_BFLOAT16, begin, end);
}
NIB_CLONES(dequantize)

void nib_cpu_dequantize(const void *params, const struct nib_cpu_team *team) {
  struct nib_dequantize_params p = *(const struct nib_dequantize_params *)params;
  if (p.batch <= 0 || p.max_seq_len <= 0 || p.heads <= 0 || p.page_size <= 0) return;
  team->run(team->context, p.batch * p.max_seq_len, nib_cpu_grain(p.heads * (p.k_head_dim + p.v_head_dim) * 5 / 2),
            NIB_PICK(dequantize), &p);
}
