/* nibble.mla: the caches of DeepSeek-V4, and nibble.rope_table. */
#include "args.h"

#define ROPE_INSERT    "mla.cake_dsv4_nvfp4_rope_quantize_insert"
#define KV_ROPE_INSERT "mla.cake_dsv4_nvfp4_kv_rope_quantize_insert"
#define DEQUANTIZE     "mla.dequantize_cache"

static int rope_insert(lua_State *L) {
  static const char *const allowed[] = { "q_head_padded", "apply_q_rope", "q_inplace", NULL };
  lua_settop(L, 7);
  nib_rope_insert_desc desc = {
    .q = nib_lua_tensor(L, ROPE_INSERT, "q", 1),
    .kv = nib_lua_tensor(L, ROPE_INSERT, "kv", 2),
    .cache = nib_lua_tensor(L, ROPE_INSERT, "cache", 3),
    .slot_mapping = nib_lua_tensor(L, ROPE_INSERT, "slot_mapping", 4),
    .positions = nib_lua_tensor(L, ROPE_INSERT, "positions", 5),
    .cos_sin_cache = nib_lua_tensor(L, ROPE_INSERT, "cos_sin_cache", 6),
  };
  nib_lua_options(L, ROPE_INSERT, 7, allowed);
  desc.q_head_padded = nib_lua_integer_option(L, ROPE_INSERT, 7, "q_head_padded", 0);
  desc.keep_q_unrotated = !nib_lua_boolean_option(L, ROPE_INSERT, 7, "apply_q_rope", true);
  desc.q_inplace = nib_lua_boolean_option(L, ROPE_INSERT, 7, "q_inplace", false);
  nib_stream *stream = nib_lua_current_stream(L, ROPE_INSERT, nib_tensor_device(desc.q));
  nib_lua_object *q_out = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, ROPE_INSERT, nib_rope_insert(stream, &desc, &q_out->tensor));
  if (!desc.q_inplace) {
    nib_lua_account(L, q_out->tensor);
    return 1;
  }
  nib_tensor_release(q_out->tensor);
  q_out->tensor = NULL;
  lua_settop(L, 1); /* q itself */
  return 1;
}

static int kv_rope_insert(lua_State *L) {
  static const char *const allowed[] = { "compress_ratio", NULL };
  lua_settop(L, 6);
  nib_rope_insert_desc desc = {
    .kv = nib_lua_tensor(L, KV_ROPE_INSERT, "kv", 1),
    .cache = nib_lua_tensor(L, KV_ROPE_INSERT, "cache", 2),
    .slot_mapping = nib_lua_tensor(L, KV_ROPE_INSERT, "slot_mapping", 3),
    .positions = nib_lua_tensor(L, KV_ROPE_INSERT, "positions", 4),
    .cos_sin_cache = nib_lua_tensor(L, KV_ROPE_INSERT, "cos_sin_cache", 5),
  };
  nib_lua_options(L, KV_ROPE_INSERT, 6, allowed);
  desc.compress_ratio = nib_lua_integer_option(L, KV_ROPE_INSERT, 6, "compress_ratio", 1);
  if (desc.compress_ratio == 0) /* the runtime would take 0 as its default */
    return nib_lua_argument_error(L, KV_ROPE_INSERT, "compress_ratio", "1 or 2, got 0");
  nib_stream *stream = nib_lua_current_stream(L, KV_ROPE_INSERT, nib_tensor_device(desc.kv));
  NIB_LUA_DO(L, KV_ROPE_INSERT, nib_rope_insert(stream, &desc, NULL));
  return 0;
}

static int dequantize_cache(lua_State *L) {
  nib_tensor *cache = nib_lua_tensor(L, DEQUANTIZE, "cache", 1), *slots = nib_lua_tensor(L, DEQUANTIZE, "slots", 2);
  nib_stream *stream = nib_lua_current_stream(L, DEQUANTIZE, nib_tensor_device(cache));
  nib_lua_object *rows = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, DEQUANTIZE, nib_mla_dequantize(stream, cache, slots, &rows->tensor));
  nib_lua_account(L, rows->tensor);
  return 1;
}

int nib_lua_rope_table(lua_State *L) {
  static const char *const allowed[] = { "theta", "dtype", "device", NULL };
  lua_settop(L, 2);
  int64_t max_position = nib_lua_integer(L, "rope_table", "max_position", 1);
  nib_lua_options(L, "rope_table", 2, allowed);
  double theta = nib_lua_number_option(L, "rope_table", 2, "theta", 1e4);
  nib_dtype dtype = nib_lua_dtype_option(L, "rope_table", 2);
  nib_device *device = nib_lua_device_option(L, "rope_table", 2);
  if (dtype == NIB_DTYPE_NONE) dtype = NIB_FLOAT32;
  nib_stream *stream = nib_lua_current_stream(L, "rope_table", device);
  nib_lua_object *table = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "rope_table", nib_rope_table(stream, max_position, theta, dtype, &table->tensor));
  nib_lua_account(L, table->tensor);
  return 1;
}

const luaL_Reg nib_lua_mla[] = {
  { "cake_dsv4_nvfp4_rope_quantize_insert", rope_insert },
  { "cake_dsv4_nvfp4_kv_rope_quantize_insert", kv_rope_insert },
  { "dequantize_cache", dequantize_cache },
  { NULL, NULL },
};
