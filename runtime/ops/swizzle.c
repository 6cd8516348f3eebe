/* quantization.swizzle_v_scales */
#include "check.h"

nib_status nib_swizzle_v_scales(nib_stream *stream, nib_tensor *v_sf, nib_layout kv_layout, bool inverse,
                                nib_tensor *out, nib_tensor **result) {
  *result = NULL;
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_SWIZZLE);
  nib_check_layout(&c, "kv_layout", kv_layout);
  struct nib_pool pool = { -1, -1, -1 };
  int64_t blocks = -1;
  struct nib_swizzle_params params = { .inverse = inverse };
  params.source = nib_check_paged(&c, NIB_IN, "v_sf", v_sf, NIB_SCALES, kv_layout, &pool, &blocks);
  if (c.status != NIB_OK) return c.status;
  nib_check_multiple(&c, "v_sf", "page_size", pool.tokens, 4);
  nib_check_multiple(&c, "v_sf", "the last dimension (head_dim / 16)", blocks, 4);
  if (out) {
    params.destination = nib_check_paged(&c, NIB_OUT, "out", out, NIB_BIT(v_sf->dtype), kv_layout, &pool, &blocks);
    nib_check_overlaps(&c);
  }
  if (c.status != NIB_OK) return c.status;
  nib_tensor *target;
  nib_status status =
    out ? nib_tensor_alias(out, &target) : nib_tensor_create(stream->device, v_sf->dtype, 4, v_sf->shape, &target);
  if (status != NIB_OK) return status;
  if (!out) params.destination = nib_check_paged(&c, NIB_OUT, "out", target, NIB_SCALES, kv_layout, &pool, &blocks);
  params.num_pages = pool.pages;
  params.heads = pool.heads;
  params.page_size = pool.tokens;
  params.blocks = blocks;
  nib_check_number(&c, nib_attribute_boolean("inverse", inverse));
  if (pool.pages > 0 && pool.heads > 0) status = NIB_CHECK_LAUNCH(&c, SWIZZLE, params);
  if (status != NIB_OK) nib_tensor_release(target);
  else *result = target;
  return status;
}
