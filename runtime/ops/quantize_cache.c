/* quantization.nvfp4_quantize_paged_kv_cache */
#include <string.h>

#include "check.h"

struct half_cache { /* K or V */
  nib_tensor *source;
  nib_scale_source given_source;
  struct nib_scale given;
  nib_tensor **data, **sf, **scale;
  bool interleaved;
  nib_4over6 four_over_six;
  enum nib_content amax_content, scale_content;
};

static nib_status create_results(nib_stream *stream, struct half_cache *half) {
  nib_device *device = stream->device;
  int64_t shape[4];
  memcpy(shape, half->source->shape, sizeof shape);
  shape[3] = half->source->shape[3] / 2;
  nib_status status = nib_tensor_create(device, NIB_UINT8, 4, shape, half->data);
  shape[3] = half->source->shape[3] / 16;
  if (status == NIB_OK) status = nib_tensor_create(device, NIB_FLOAT8_E4M3FN, 4, shape, half->sf);
  if (status == NIB_OK) status = nib_tensor_create(device, NIB_FLOAT32, 1, (int64_t[]){ 1 }, half->scale);
  return status;
}

static nib_status launch_half(const struct nib_check *both, nib_layout layout, struct half_cache *half) {
  struct nib_check own = *both, *c = &own; /* K and V have separate lists */
  c->access_count = c->attribute_count = 0;
  nib_stream *stream = c->stream;
  nib_tensor *source = half->source;
  struct nib_axes axes = nib_layout_axes(layout);
  const char *name = half->interleaved ? "v_cache" : "k_cache";
  nib_check_operand(c, NIB_IN, name, source, nib_layout_name(layout));
  struct nib_pool pool = { -1, -1, -1 };
  int64_t width = -1, blocks = -1;
  struct nib_quantize_cache_params params = {
    .source = nib_tensor_data(source),
    .source_page_stride = source->stride[0],
    .source_token_stride = source->stride[axes.token],
    .source_head_stride = source->stride[axes.head],
    .data = nib_check_paged(c, NIB_OUT, half->interleaved ? "kv_cache (V)" : "kv_cache (K)", *half->data,
                            NIB_BIT(NIB_UINT8), layout, &pool, &width),
    .sf = nib_check_paged(c, NIB_OUT, half->interleaved ? "kv_sf (V)" : "kv_sf (K)", *half->sf, NIB_SCALES, layout,
                          &pool, &blocks),
    .global_sf = half->given,
    .out_scale = nib_tensor_data(*half->scale),
    .num_pages = pool.pages,
    .page_size = pool.tokens,
    .heads = pool.heads,
    .head_dim = source->shape[3],
    .type = (int32_t)source->dtype,
    .interleaved = half->interleaved,
    .four_over_six = half->four_over_six,
    .amax_content = half->amax_content,
    .scale_content = half->scale_content,
    .fault = stream->device->fault,
  };
  nib_status status = c->status;
  nib_tensor *amax = NULL;
  if (status == NIB_OK && !half->given.pointer && !(half->given.value > 0)) {
    status = nib_tensor_create(stream->device, NIB_FLOAT32, 1, (int64_t[]){ 1 }, &amax);
    if (status == NIB_OK) status = nib_tensor_fill(stream, amax, NIB_REAL(0));
    if (status == NIB_OK) {
      params.amax = nib_tensor_data(amax);
      struct nib_amax_params scan = { params.source,
                                      params.source_page_stride,
                                      params.source_token_stride,
                                      params.source_head_stride,
                                      params.num_pages,
                                      params.page_size,
                                      params.heads,
                                      params.head_dim,
                                      params.type,
                                      nib_tensor_data(amax) };
      struct nib_check first = *both;
      first.access_count = first.attribute_count = 0;
      nib_check_operand(&first, NIB_IN, name, source, nib_layout_name(layout));
      nib_check_operand(&first, NIB_OUT, "amax", amax, NULL);
      status = NIB_CHECK_LAUNCH(&first, AMAX, scan);
    }
  }
  if (amax) nib_check_operand(c, NIB_IN, "amax", amax, NULL);
  else if (!half->given.pointer) nib_check_number(c, nib_attribute_single("global_sf", half->given.value));
  nib_check_4over6(c, half->four_over_six);
  if (half->given_source.tensor)
    nib_check_operand(c, NIB_IN, half->interleaved ? "v_global_sf" : "k_global_sf", half->given_source.tensor, NULL);
  nib_check_operand(c, NIB_OUT, half->interleaved ? "v_scale" : "k_scale", *half->scale, NULL);
  if (status == NIB_OK) status = NIB_CHECK_LAUNCH(c, QUANTIZE_CACHE, params);
  nib_tensor_release(amax);
  return status;
}

nib_status nib_quantize_cache_sized(nib_stream *stream, const nib_quantize_cache_desc *given, size_t desc_bytes,
                                    nib_quantized_cache *out, size_t out_bytes) {
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_QUANTIZE_CACHE);
  nib_quantize_cache_desc own;
  nib_quantized_cache results = { 0 };
  const nib_quantize_cache_desc *desc = NIB_CHECK_DESC(&c, nib_quantize_cache_desc, &own, given, desc_bytes);
  if (out_bytes < nib_quantized_cache_least) /* do not write to `out` then */
    nib_check_fail(&c, "out", "expected at least %d bytes, got %zu", nib_quantized_cache_least, out_bytes);
  else nib_sized_write(out, out_bytes, &results, sizeof results);
  if (c.status != NIB_OK) return c.status;
  const char *meaning = desc->kv_layout == NIB_HND ? "[num_pages, num_kv_heads, page_size, head_dim] (HND)"
                                                   : "[num_pages, page_size, num_kv_heads, head_dim] (NHD)";
  struct half_cache halves[2] = {
    { .source = desc->k_cache,
      .data = &results.k,
      .sf = &results.k_sf,
      .scale = &results.k_scale,
      .amax_content = NIB_CONTENT_K_CACHE,
      .scale_content = NIB_CONTENT_K_GLOBAL_SF },
    { .source = desc->v_cache,
      .data = &results.v,
      .sf = &results.v_sf,
      .scale = &results.v_scale,
      .interleaved = true,
      .amax_content = NIB_CONTENT_V_CACHE,
      .scale_content = NIB_CONTENT_V_GLOBAL_SF },
  };
  nib_check_layout(&c, "kv_layout", desc->kv_layout);
  nib_check_4over6(&c, desc->nvfp4_4over6);
  nib_check_tensor(&c, NIB_IN, "k_cache", desc->k_cache, NIB_HALVES, 4, NULL, meaning);
  if (c.status != NIB_OK) return c.status;
  nib_check_last_contiguous(&c, "k_cache", desc->k_cache);
  nib_check_multiple(&c, "k_cache", "head_dim", desc->k_cache->shape[3], 64);
  nib_check_multiple(&c, "k_cache", "page_size", desc->k_cache->shape[nib_layout_axes(desc->kv_layout).token], 4);
  nib_check_tensor(&c, NIB_IN, "v_cache", desc->v_cache, NIB_HALVES, 4, desc->k_cache->shape, meaning);
  if (c.status == NIB_OK) nib_check_last_contiguous(&c, "v_cache", desc->v_cache);
  if (desc->has_k_global_sf) {
    halves[0].given_source = desc->k_global_sf;
    halves[0].given = nib_check_scale(&c, "k_global_sf", &desc->k_global_sf);
  }
  if (desc->has_v_global_sf) {
    halves[1].given_source = desc->v_global_sf;
    halves[1].given = nib_check_scale(&c, "v_global_sf", &desc->v_global_sf);
  }
  halves[0].four_over_six = halves[1].four_over_six = desc->nvfp4_4over6;
  nib_status status = c.status;
  for (int i = 0; status == NIB_OK && i < 2; i++) status = create_results(stream, &halves[i]);
  for (int i = 0; status == NIB_OK && i < 2; i++) status = launch_half(&c, desc->kv_layout, &halves[i]);
  if (status == NIB_OK) {
    nib_sized_write(out, out_bytes, &results, sizeof results);
    return NIB_OK;
  }
  for (int i = 0; i < 2; i++) {
    nib_tensor_release(*halves[i].data);
    nib_tensor_release(*halves[i].sf);
    nib_tensor_release(*halves[i].scale);
  }
  return status;
}
