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
  params.source = nib_check_paged(&c, "v_sf", v_sf, NIB_SCALES, kv_layout, &pool, &blocks, false);
  if (c.status != NIB_OK) return c.status;
  nib_check_multiple(&c, "v_sf", "page_size", pool.tokens, 4);
  nib_check_multiple(&c, "v_sf", "the last dimension (head_dim / 16)", blocks, 4);
  if (out) {
    params.destination = nib_check_paged(&c, "out", out, NIB_BIT(v_sf->dtype), kv_layout, &pool, &blocks, true);
    nib_check_disjoint(&c, "out", out, "v_sf", v_sf);
  }
  if (c.status != NIB_OK) return c.status;
  nib_tensor *target;
  nib_status status =
    out ? nib_tensor_alias(out, &target) : nib_tensor_create(stream->device, v_sf->dtype, 4, v_sf->shape, &target);
  if (status != NIB_OK) return status;
  if (!out) params.destination = nib_check_paged(&c, "out", target, NIB_SCALES, kv_layout, &pool, &blocks, true);
  params.num_pages = pool.pages;
  params.heads = pool.heads;
  params.page_size = pool.tokens;
  params.blocks = blocks;
  const char *layout = nib_layout_name(kv_layout);
  const nib_access accesses[] = { { v_sf, false, "v_sf", layout }, { target, true, "out", layout } };
  if (pool.pages > 0 && pool.heads > 0)
    status = nib_launch(stream, c.operation, NIB_KERNEL_SWIZZLE, &params, sizeof params, accesses, 2);
  if (status != NIB_OK) nib_tensor_release(target);
  else *result = target;
  return status;
}
