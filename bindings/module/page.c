/* nibble.page: operations on paged caches. */
#include "args.h"

#define APPEND "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"

static int append(lua_State *L) {
  static const char *const names[] = { "kv_layout", "nvfp4_4over6", NULL };
  lua_settop(L, 9);
  nib_lua_spread_options(L, APPEND, 8, names);
  nib_append_desc desc = {
    .append_key = nib_lua_tensor(L, APPEND, "append_key", 1),
    .append_value = nib_lua_tensor(L, APPEND, "append_value", 2),
    .slot_mapping = nib_lua_tensor(L, APPEND, "slot_mapping", 3),
    .paged_kv_cache = nib_lua_cache(L, APPEND, "paged_kv_cache", 4),
    .kv_cache_sf = nib_lua_cache(L, APPEND, "kv_cache_sf", 5),
    .k_scale = nib_lua_scale(L, APPEND, "k_scale", 6),
    .v_scale = nib_lua_scale(L, APPEND, "v_scale", 7),
    .kv_layout = nib_lua_layout(L, APPEND, 8, NIB_NHD),
    .nvfp4_4over6 = nib_lua_4over6(L, APPEND, 9),
  };
  nib_stream *stream = nib_lua_current_stream(L, APPEND, nib_tensor_device(desc.append_key));
  NIB_LUA_DO(L, APPEND, nib_append(stream, &desc));
  return 0;
}

const luaL_Reg nib_lua_page[] = {
  { "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", append },
  { NULL, NULL },
};
