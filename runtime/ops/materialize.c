/* quantization.nvfp4_kv_materialize_fp8 */
#include "check.h"

nib_status nib_materialize_sized(nib_stream *stream, const nib_materialize_desc *given, size_t desc_bytes,
                                 nib_tensor **kv_cache_fp8, nib_tensor **fp8_block_tables) {
  *kv_cache_fp8 = *fp8_block_tables = NULL;
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_MATERIALIZE);
  nib_materialize_desc own;
  const nib_materialize_desc *desc = NIB_CHECK_DESC(&c, nib_materialize_desc, &own, given, desc_bytes);
  if (!desc) return c.status;
  struct nib_pool pool = { -1, -1, -1 };
  int64_t width = -1;
  struct nib_materialize_params params = {
    .k_cache = nib_check_paged(&c, NIB_IN, "k_cache", desc->k_cache, NIB_BIT(NIB_UINT8), NIB_HND, &pool, &width),
    .v_cache = nib_check_paged(&c, NIB_IN, "v_cache", desc->v_cache, NIB_BIT(NIB_UINT8), NIB_HND, &pool, &width),
  };
  nib_check_multiple(&c, "k_cache", "head_dim", width * 2, 64);
  nib_check_multiple(&c, "k_cache", "page_size", pool.tokens, 4);
  int64_t blocks = width / 8;
  params.k_sf =
    nib_check_paged(&c, NIB_IN, "k_block_scales", desc->k_block_scales, NIB_SCALES, NIB_HND, &pool, &blocks);
  params.v_sf =
    nib_check_paged(&c, NIB_IN, "v_block_scales", desc->v_block_scales, NIB_SCALES, NIB_HND, &pool, &blocks);

  const nib_tensor *tables = desc->block_tables, *lengths = desc->seq_lens, *indptr = desc->kv_page_indptr;
  nib_check_tensor(&c, NIB_IN, "block_tables", tables, NIB_BIT(NIB_INT32), desc->split_kv_indices ? 3 : 2,
                   (int64_t[]){ -1, desc->split_kv_indices ? 2 : -1, -1 },
                   desc->split_kv_indices ? "[batch, 2, max_num_pages] (K and V have indices of their own)"
                                          : "[batch, max_num_pages]");
  if (c.status != NIB_OK) return c.status;
  int64_t batch = tables->shape[0], columns = tables->shape[tables->ndim - 1];
  nib_check_tensor(&c, NIB_IN, "seq_lens", lengths, NIB_BIT(NIB_INT32), 1, &batch, "[batch]");
  if (c.status == NIB_OK && (desc->max_kv_len < 0 || desc->max_kv_len > INT32_MAX))
    nib_check_fail(&c, "max_kv_len", "expected 0..2147483647, got %lld", (long long)desc->max_kv_len);
  if (c.status != NIB_OK) return c.status;
  int64_t max_pages = desc->max_kv_len / pool.tokens + (desc->max_kv_len % pool.tokens != 0);
  if (columns < max_pages)
    nib_check_fail(&c, "block_tables",
                   "expected at least %lld columns for max_kv_len %lld and page_size %lld, got %lld",
                   (long long)max_pages, (long long)desc->max_kv_len, (long long)pool.tokens, (long long)columns);
  if (c.status != NIB_OK) return c.status; /* the checks above bound the numbers below */
  int64_t num_pages = batch * max_pages;
  if (indptr) {
    nib_check_tensor(&c, NIB_IN, "kv_page_indptr", indptr, NIB_BIT(NIB_INT32), 1, (int64_t[]){ batch + 1 },
                     "[batch + 1]");
    if (!desc->has_num_pages)
      nib_check_fail(&c, "num_pages", "expected the number of pages (kv_page_indptr's last element), got none");
    num_pages = desc->num_pages;
    if (num_pages < 0 || num_pages >= INT32_MAX)
      nib_check_fail(&c, "num_pages", "expected 0..2147483646, got %lld", (long long)num_pages);
  } else if (desc->has_num_pages) {
    nib_check_fail(&c, "num_pages", "expected none without kv_page_indptr, got %lld", (long long)desc->num_pages);
  } else if (num_pages >= INT32_MAX) {
    nib_check_fail(&c, "max_kv_len", "expected fewer than 2147483647 pages in the result, got %lld",
                   (long long)num_pages);
  }
  if (c.status != NIB_OK) return c.status;
  int64_t shape[] = { num_pages + 1, 2, pool.heads, pool.tokens, width * 2 };
  if (desc->out) {
    nib_check_tensor(&c, NIB_OUT, "out", desc->out, NIB_BIT(NIB_FLOAT8_E4M3FN), 5, shape,
                     "[num_pages + 1, 2, num_kv_heads, page_size, head_dim]");
    if (c.status == NIB_OK) nib_check_contiguous(&c, "out", desc->out);
    nib_check_overlaps(&c);
  }
  if (c.status != NIB_OK) return c.status;

  nib_tensor *out = NULL, *table = NULL;
  nib_status status = desc->out ? nib_tensor_alias(desc->out, &out)
                                : nib_tensor_create(stream->device, NIB_FLOAT8_E4M3FN, 5, shape, &out);
  if (status == NIB_OK)
    status = nib_tensor_create(stream->device, NIB_INT32, 2, (int64_t[]){ batch, max_pages }, &table);
  if (status == NIB_OK) {
    params.block_tables = nib_tensor_data(tables);
    params.table_row_stride = tables->stride[0];
    params.table_kv_stride = desc->split_kv_indices ? tables->stride[1] : 0;
    params.table_stride = tables->stride[tables->ndim - 1];
    params.table_columns = columns;
    params.seq_lens = nib_tensor_data(lengths);
    params.seq_stride = lengths->stride[0];
    params.indptr = indptr ? nib_tensor_data(indptr) : NULL;
    params.indptr_stride = indptr ? indptr->stride[0] : 0;
    params.out = nib_tensor_data(out);
    params.out_table = nib_tensor_data(table);
    /* Without columns, requests are only checked and write nothing. They may then be one request that is expanded to
     * any number, of which one is enough to check. */
    bool same = max_pages == 0 && params.seq_stride == 0 && params.indptr_stride == 0;
    params.batch = same && batch > 1 ? 1 : batch;
    params.max_kv_len = desc->max_kv_len;
    params.max_pages = max_pages;
    params.heads = pool.heads;
    params.head_dim = width * 2;
    params.page_size = pool.tokens;
    params.num_pages = pool.pages;
    params.num_out_pages = num_pages;
    params.fault = stream->device->fault;
    if (!desc->out) nib_check_operand(&c, NIB_OUT, "kv_cache_fp8", out, NULL);
    nib_check_operand(&c, NIB_OUT, "fp8_block_tables", table, NULL);
    nib_check_number(&c, nib_attribute_integer("max_kv_len", desc->max_kv_len));
    status = NIB_CHECK_LAUNCH(&c, MATERIALIZE, params);
  }
  if (status != NIB_OK) {
    nib_tensor_release(out);
    nib_tensor_release(table);
    return status;
  }
  *kv_cache_fp8 = out;
  *fp8_block_tables = table;
  return NIB_OK;
}
