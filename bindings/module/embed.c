/* nibble_lua.h for hosts: opens the module with a host's runtime, and passes tensors between C and Lua. */
#include "args.h"

struct opening {
  nib_runtime *runtime;
  nib_status why;
};

static int open_shared(lua_State *L) {
  struct opening *opening = lua_touserdata(L, 1);
  nib_lua_open_module(L, opening->runtime, &opening->why);
  luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE); /* for require "nibble", which nibble.pages calls, too */
  lua_pushvalue(L, -2);
  lua_setfield(L, -2, "nibble");
  lua_pop(L, 1);
  return 1;
}

nib_status nib_lua_open(lua_State *L, nib_runtime *runtime) {
  if (!lua_checkstack(L, 4)) return NIB_MEMORY; /* no room to push a message */
  struct opening opening = { runtime, NIB_OK };
  lua_pushcfunction(L, open_shared);
  lua_pushlightuserdata(L, &opening);
  int status = lua_pcall(L, 1, 1, 0);
  if (status == LUA_OK) return NIB_OK;
  return status == LUA_ERRMEM ? NIB_MEMORY : opening.why != NIB_OK ? opening.why : NIB_INVALID;
}

/* The module's functions find their state in their first upvalue. */
static int push_tensor(lua_State *L) {
  nib_tensor *tensor = lua_touserdata(L, 1);
  nib_runtime *runtime = nib_lua_runtime(L, "tensor");
  if (nib_device_runtime(nib_tensor_device(tensor)) != runtime)
    nib_lua_argument_error(L, "tensor", "tensor", "a tensor of this Lua state's runtime, got one of another runtime");
  nib_lua_object *object = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor", nib_tensor_alias(tensor, &object->tensor));
  return 1;
}

static int to_tensor(lua_State *L) {
  const nib_lua_object *object = nib_lua_test(L, 1, NIB_LUA_TENSOR);
  lua_pushlightuserdata(L, object && nib_lua_is_open(object) ? object->tensor : NULL);
  return 1;
}

static void push_function(lua_State *L, lua_CFunction function) {
  luaL_checkstack(L, 4, NULL);
  if (lua_getfield(L, LUA_REGISTRYINDEX, "nibble.state") != LUA_TUSERDATA)
    luaL_error(L, "nibble: the module is not open in this Lua state; call nib_lua_open first");
  lua_pushcclosure(L, function, 1);
}

void nib_lua_push_tensor(lua_State *L, nib_tensor *tensor) {
  push_function(L, push_tensor);
  lua_pushlightuserdata(L, tensor);
  lua_call(L, 1, 1);
}

nib_tensor *nib_lua_to_tensor(lua_State *L, int index) {
  index = lua_absindex(L, index);
  push_function(L, to_tensor);
  lua_pushvalue(L, index);
  lua_call(L, 1, 1);
  nib_tensor *tensor = lua_touserdata(L, -1);
  lua_pop(L, 1);
  return tensor;
}
