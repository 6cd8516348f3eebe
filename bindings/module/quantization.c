/* nibble.quantization: operations that quantize and dequantize caches. */
#include "args.h"

#define MATERIALIZE "quantization.nvfp4_kv_materialize_fp8"
#define DEQUANTIZE  "quantization.nvfp4_kv_dequantize_paged"
#define SWIZZLE     "quantization.swizzle_v_scales"
#define QUANTIZE    "quantization.nvfp4_quantize_paged_kv_cache"

static int materialize(lua_State *L) {
  static const char *const allowed[] = { "uses_shared_paged_kv_idx", "out", "kv_page_indptr", "num_pages", NULL };
  lua_settop(L, 8);
  nib_materialize_desc desc = {
    .k_cache = nib_lua_tensor(L, MATERIALIZE, "k_cache", 1),
    .v_cache = nib_lua_tensor(L, MATERIALIZE, "v_cache", 2),
    .k_block_scales = nib_lua_tensor(L, MATERIALIZE, "k_block_scales", 3),
    .v_block_scales = nib_lua_tensor(L, MATERIALIZE, "v_block_scales", 4),
    .block_tables = nib_lua_tensor(L, MATERIALIZE, "block_tables", 5),
    .seq_lens = nib_lua_tensor(L, MATERIALIZE, "seq_lens", 6),
    .max_kv_len = nib_lua_integer(L, MATERIALIZE, "max_kv_len", 7),
  };
  nib_lua_options(L, MATERIALIZE, 8, allowed);
  desc.split_kv_indices = !nib_lua_boolean_option(L, MATERIALIZE, 8, "uses_shared_paged_kv_idx", true);
  desc.has_num_pages = nib_lua_push_option(L, 8, "num_pages") != LUA_TNIL;
  lua_pop(L, 1);
  desc.num_pages = nib_lua_integer_option(L, MATERIALIZE, 8, "num_pages", 0);
  desc.kv_page_indptr = nib_lua_tensor_option(L, MATERIALIZE, 8, "kv_page_indptr");
  desc.out = nib_lua_tensor_option(L, MATERIALIZE, 8, "out");
  int out_index = lua_gettop(L);
  nib_stream *stream = nib_lua_current_stream(L, MATERIALIZE, nib_tensor_device(desc.k_cache));
  nib_lua_object *cache = nib_lua_push(L, NIB_LUA_TENSOR), *tables = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, MATERIALIZE, nib_materialize(stream, &desc, &cache->tensor, &tables->tensor));
  nib_lua_account(L, tables->tensor);
  if (desc.out) { /* return the caller's own object, not another one for the same view */
    nib_tensor_release(cache->tensor);
    cache->tensor = NULL;
    lua_pushvalue(L, out_index);
    lua_replace(L, -3);
  } else {
    nib_lua_account(L, cache->tensor);
  }
  return 2;
}

static int dequantize(lua_State *L) {
  static const char *const names[] = { "kv_layout", NULL };
  lua_settop(L, 9);
  nib_lua_spread_options(L, DEQUANTIZE, 9, names);
  nib_dequantize_desc desc = {
    .paged_kv_cache = nib_lua_cache(L, DEQUANTIZE, "paged_kv_cache", 1),
    .kv_cache_sf = nib_lua_cache(L, DEQUANTIZE, "kv_cache_sf", 2),
    .block_tables = nib_lua_tensor(L, DEQUANTIZE, "block_tables", 3),
    .seq_lens = nib_lua_tensor(L, DEQUANTIZE, "seq_lens", 4),
    .k_scale = nib_lua_tensor(L, DEQUANTIZE, "k_scale", 5),
    .v_scale = nib_lua_tensor(L, DEQUANTIZE, "v_scale", 6),
    .output_k = nib_lua_tensor(L, DEQUANTIZE, "output_k", 7),
    .output_v = nib_lua_tensor(L, DEQUANTIZE, "output_v", 8),
    .kv_layout = nib_lua_layout(L, DEQUANTIZE, 9, NIB_NHD),
  };
  const nib_cache *cache = &desc.paged_kv_cache;
  nib_device *device = nib_tensor_device(cache->stacked ? cache->stacked : cache->k);
  NIB_LUA_DO(L, DEQUANTIZE, nib_dequantize(nib_lua_current_stream(L, DEQUANTIZE, device), &desc));
  return 0;
}

static int swizzle_v_scales(lua_State *L) {
  static const char *const allowed[] = { "kv_layout", "inverse", "out", NULL };
  lua_settop(L, 3);
  nib_tensor *v_sf = nib_lua_tensor(L, SWIZZLE, "v_sf", 1);
  if (lua_type(L, 2) == LUA_TTABLE) { /* the layout is among the options */
    nib_lua_options(L, SWIZZLE, 2, allowed);
    lua_pushvalue(L, 2);
    lua_replace(L, 3);
    nib_lua_push_option(L, 3, "kv_layout");
    lua_replace(L, 2);
  } else {
    nib_lua_options(L, SWIZZLE, 3, allowed + 1);
  }
  if (lua_type(L, 2) != LUA_TSTRING) return nib_lua_expected(L, SWIZZLE, "kv_layout", 2, "\"NHD\" or \"HND\"");
  nib_layout layout = nib_lua_layout(L, SWIZZLE, 2, NIB_NHD);
  bool inverse = nib_lua_boolean_option(L, SWIZZLE, 3, "inverse", false);
  nib_tensor *out = nib_lua_tensor_option(L, SWIZZLE, 3, "out");
  nib_stream *stream = nib_lua_current_stream(L, SWIZZLE, nib_tensor_device(v_sf));
  nib_lua_object *result = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, SWIZZLE, nib_swizzle_v_scales(stream, v_sf, layout, inverse, out, &result->tensor));
  if (!out) {
    nib_lua_account(L, result->tensor);
    return 1;
  }
  nib_tensor_release(result->tensor);
  result->tensor = NULL;
  lua_pop(L, 1); /* `out` is below it */
  return 1;
}

static int quantize_cache(lua_State *L) {
  enum { COUNT = 6 };
  static const char *const names[] = { "kv_layout", "k_global_sf", "v_global_sf", "nvfp4_4over6", NULL };
  lua_settop(L, 6);
  nib_lua_spread_options(L, QUANTIZE, 3, names);
  nib_quantize_cache_desc desc = {
    .k_cache = nib_lua_tensor(L, QUANTIZE, "k_cache", 1),
    .v_cache = nib_lua_tensor(L, QUANTIZE, "v_cache", 2),
    .kv_layout = nib_lua_layout(L, QUANTIZE, 3, NIB_HND),
    .nvfp4_4over6 = nib_lua_4over6(L, QUANTIZE, 6),
    .has_k_global_sf = !lua_isnil(L, 4),
    .has_v_global_sf = !lua_isnil(L, 5),
  };
  if (desc.has_k_global_sf) desc.k_global_sf = nib_lua_scale(L, QUANTIZE, "k_global_sf", 4);
  if (desc.has_v_global_sf) desc.v_global_sf = nib_lua_scale(L, QUANTIZE, "v_global_sf", 5);
  nib_stream *stream = nib_lua_current_stream(L, QUANTIZE, nib_tensor_device(desc.k_cache));
  nib_quantized_cache made;
  nib_lua_object *objects[COUNT];
  lua_createtable(L, 2, 0); /* 7: data, 8: scales */
  lua_createtable(L, 2, 0);
  for (int i = 0; i < COUNT; i++) {
    objects[i] = nib_lua_push(L, NIB_LUA_TENSOR);
    if (i >= 4) continue; /* the two global scales stay on the stack */
    lua_rawseti(L, i < 2 ? 7 : 8, i % 2 + 1);
  }
  NIB_LUA_DO(L, QUANTIZE, nib_quantize_cache(stream, &desc, &made));
  nib_tensor *tensors[COUNT] = { made.k, made.v, made.k_sf, made.v_sf, made.k_scale, made.v_scale };
  for (int i = 0; i < COUNT; i++) objects[i]->tensor = tensors[i];
  for (int i = 0; i < COUNT; i++) nib_lua_account(L, tensors[i]);
  return 4;
}

const luaL_Reg nib_lua_quantization[] = {
  { "nvfp4_kv_materialize_fp8", materialize },
  { "nvfp4_kv_dequantize_paged", dequantize },
  { "swizzle_v_scales", swizzle_v_scales },
  { "nvfp4_quantize_paged_kv_cache", quantize_cache },
  { NULL, NULL },
};
