/* page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping */
#include "check.h"

nib_status nib_append_sized(nib_stream *stream, const nib_append_desc *given, size_t desc_bytes) {
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_APPEND);
  nib_append_desc own;
  const nib_append_desc *desc = NIB_CHECK_DESC(&c, nib_append_desc, &own, given, desc_bytes);
  if (!desc) return c.status;
  nib_check_layout(&c, "kv_layout", desc->kv_layout);
  int32_t four_over_six = nib_check_4over6(&c, desc->nvfp4_4over6);
  const nib_tensor *key = desc->append_key, *value = desc->append_value, *slots = desc->slot_mapping;
  nib_check_tensor(&c, NIB_IN, "append_key", key, NIB_HALVES, 3, NULL, "[rows, num_kv_heads, head_dim]");
  if (c.status != NIB_OK) return c.status;
  nib_check_multiple(&c, "append_key", "head_dim", key->shape[2], 16);
  nib_check_last_contiguous(&c, "append_key", key);
  nib_check_tensor(&c, NIB_IN, "append_value", value, NIB_BIT(key->dtype), 3,
                   (int64_t[]){ -1, key->shape[1], key->shape[2] },
                   "[rows, num_kv_heads, head_dim], the last two as append_key");
  if (c.status == NIB_OK) nib_check_last_contiguous(&c, "append_value", value);
  nib_check_tensor(&c, NIB_IN, "slot_mapping", slots, NIB_INDICES, 1, NULL, "[nnz]");
  if (c.status == NIB_OK && slots->shape[0] > key->shape[0])
    nib_check_fail(&c, "slot_mapping", "expected at most as many slots as rows of append_key (%lld), got %lld",
                   (long long)key->shape[0], (long long)slots->shape[0]);
  if (c.status == NIB_OK && slots->shape[0] > value->shape[0])
    nib_check_fail(&c, "slot_mapping", "expected at most as many slots as rows of append_value (%lld), got %lld",
                   (long long)value->shape[0], (long long)slots->shape[0]);

  nib_tensor k, v, k_sf, v_sf;
  int64_t width = key->shape[2] / 2, blocks = key->shape[2] / 16;
  struct nib_pool pool = { -1, -1, key->shape[1] };
  nib_check_pair(&c, "paged_kv_cache", &desc->paged_kv_cache, &k, &v);
  nib_check_pair(&c, "kv_cache_sf", &desc->kv_cache_sf, &k_sf, &v_sf);
  if (desc->paged_kv_cache.stacked) nib_check_output(&c, "paged_kv_cache", desc->paged_kv_cache.stacked);
  if (desc->kv_cache_sf.stacked) nib_check_output(&c, "kv_cache_sf", desc->kv_cache_sf.stacked);
  if (c.status != NIB_OK) return c.status;
  struct nib_append_params params = {
    .k_cache =
      nib_check_paged(&c, NIB_OUT, "paged_kv_cache (K)", &k, NIB_BIT(NIB_UINT8), desc->kv_layout, &pool, &width),
    .v_cache =
      nib_check_paged(&c, NIB_OUT, "paged_kv_cache (V)", &v, NIB_BIT(NIB_UINT8), desc->kv_layout, &pool, &width),
    .k_sf = nib_check_paged(&c, NIB_OUT, "kv_cache_sf (K)", &k_sf, NIB_SCALES, desc->kv_layout, &pool, &blocks),
    .v_sf = nib_check_paged(&c, NIB_OUT, "kv_cache_sf (V)", &v_sf, NIB_SCALES, desc->kv_layout, &pool, &blocks),
  };
  params.k_scale = nib_check_scale(&c, "k_scale", &desc->k_scale);
  params.v_scale = nib_check_scale(&c, "v_scale", &desc->v_scale);
  nib_check_overlaps(&c);
  if (c.status != NIB_OK) return c.status;

  params.key = nib_tensor_data(key);
  params.value = nib_tensor_data(value);
  params.key_row_stride = key->stride[0];
  params.key_head_stride = key->stride[1];
  params.value_row_stride = value->stride[0];
  params.value_head_stride = value->stride[1];
  params.slots = nib_indices_of(slots);
  params.rows = slots->shape[0];
  params.heads = key->shape[1];
  params.head_dim = key->shape[2];
  params.page_size = pool.tokens;
  params.num_pages = pool.pages;
  params.type = (int32_t)key->dtype;
  params.four_over_six = four_over_six;
  params.fault = stream->device->fault;
  if (params.rows == 0 || params.heads == 0 || params.num_pages == 0) return NIB_OK;
  return NIB_CHECK_LAUNCH(&c, APPEND, params);
}
