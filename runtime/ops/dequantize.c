/* quantization.nvfp4_kv_dequantize_paged */
#include "check.h"

static void check_output(struct nib_check *c, const char *parameter, const nib_tensor *output, unsigned dtypes,
                         const int64_t *shape) {
  nib_check_tensor(c, NIB_OUT, parameter, output, dtypes, 4, shape, "[batch, max_seq_len, num_kv_heads, head_dim]");
  if (c->status == NIB_OK) nib_check_contiguous(c, parameter, output);
}

nib_status nib_dequantize_sized(nib_stream *stream, const nib_dequantize_desc *given, size_t desc_bytes) {
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_DEQUANTIZE);
  nib_dequantize_desc own;
  const nib_dequantize_desc *desc = NIB_CHECK_DESC(&c, nib_dequantize_desc, &own, given, desc_bytes);
  if (!desc) return c.status;
  nib_check_layout(&c, "kv_layout", desc->kv_layout);
  nib_tensor k, v, k_sf, v_sf;
  nib_check_pair(&c, "paged_kv_cache", &desc->paged_kv_cache, &k, &v);
  nib_check_pair(&c, "kv_cache_sf", &desc->kv_cache_sf, &k_sf, &v_sf);
  if (c.status != NIB_OK) return c.status;
  struct nib_pool pool = { -1, -1, -1 };
  int64_t k_width = -1, v_width = -1;
  struct nib_dequantize_params params = {
    .k_cache =
      nib_check_paged(&c, NIB_IN, "paged_kv_cache (K)", &k, NIB_BIT(NIB_UINT8), desc->kv_layout, &pool, &k_width),
    .v_cache =
      nib_check_paged(&c, NIB_IN, "paged_kv_cache (V)", &v, NIB_BIT(NIB_UINT8), desc->kv_layout, &pool, &v_width),
  };
  nib_check_multiple(&c, "paged_kv_cache (K)", "head_dim", k_width * 2, 16);
  nib_check_multiple(&c, "paged_kv_cache (V)", "head_dim", v_width * 2, 16);
  int64_t k_blocks = k_width / 8, v_blocks = v_width / 8;
  params.k_sf = nib_check_paged(&c, NIB_IN, "kv_cache_sf (K)", &k_sf, NIB_SCALES, desc->kv_layout, &pool, &k_blocks);
  params.v_sf = nib_check_paged(&c, NIB_IN, "kv_cache_sf (V)", &v_sf, NIB_SCALES, desc->kv_layout, &pool, &v_blocks);

  const nib_tensor *tables = desc->block_tables, *lengths = desc->seq_lens, *out_k = desc->output_k,
                   *out_v = desc->output_v;
  nib_check_tensor(&c, NIB_IN, "block_tables", tables, NIB_INDICES, 2, NULL, "[batch, max_pages_per_request]");
  if (c.status != NIB_OK) return c.status;
  int64_t batch = tables->shape[0];
  nib_check_tensor(&c, NIB_IN, "seq_lens", lengths, NIB_BIT(NIB_INT32), 1, &batch, "[batch]");
  nib_check_scalar_tensor(&c, "k_scale", desc->k_scale);
  nib_check_scalar_tensor(&c, "v_scale", desc->v_scale);
  check_output(&c, "output_k", out_k, NIB_HALVES, (int64_t[]){ batch, -1, pool.heads, k_width * 2 });
  if (c.status != NIB_OK) return c.status;
  int64_t max_seq_len = out_k->shape[1];
  check_output(&c, "output_v", out_v, NIB_BIT(out_k->dtype),
               (int64_t[]){ batch, max_seq_len, pool.heads, v_width * 2 });
  if (c.status != NIB_OK) return c.status;
  nib_check_overlaps(&c);
  int64_t columns = max_seq_len / pool.tokens + (max_seq_len % pool.tokens != 0);
  if (tables->shape[1] < columns)
    nib_check_fail(&c, "block_tables",
                   "expected at least %lld columns for max_seq_len %lld and page_size %lld, got %lld",
                   (long long)columns, (long long)max_seq_len, (long long)pool.tokens, (long long)tables->shape[1]);
  if (c.status != NIB_OK) return c.status;

  params.block_tables = nib_indices_of(tables);
  params.seq_lens = nib_tensor_data(lengths);
  params.seq_stride = lengths->stride[0];
  params.k_scale = nib_tensor_data(desc->k_scale);
  params.v_scale = nib_tensor_data(desc->v_scale);
  params.out_k = nib_tensor_data(out_k);
  params.out_v = nib_tensor_data(out_v);
  params.batch = batch;
  params.max_seq_len = max_seq_len;
  params.heads = pool.heads;
  params.k_head_dim = k_width * 2;
  params.v_head_dim = v_width * 2;
  params.page_size = pool.tokens;
  params.num_pages = pool.pages;
  params.type = (int32_t)out_k->dtype;
  if (batch == 0 || max_seq_len == 0 || pool.heads == 0 || pool.pages == 0) return NIB_OK;
  return NIB_CHECK_LAUNCH(&c, DEQUANTIZE, params);
}
