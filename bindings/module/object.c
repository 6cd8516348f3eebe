/* What all classes of userdata share: metatables, checks, closing, equality. */
#include <stdio.h>
#include <string.h>

#include "args.h"

const char *const nib_lua_class_names[NIB_LUA_CLASS_COUNT] = {
  "tensor", "stream", "event", "graph", "module", "kernel"
};

nib_lua_object *nib_lua_test(lua_State *L, int index, nib_lua_class class) {
  if (lua_type(L, index) != LUA_TUSERDATA || !lua_getmetatable(L, index)) return NULL;
  const void *metatable = lua_topointer(L, -1); /* comparing pointers is cheaper than luaL_testudata's look-up */
  lua_pop(L, 1);
  return metatable == nib_lua_get_state(L)->metatables[class] ? lua_touserdata(L, index) : NULL;
}

static int not_open(lua_State *L, const char *operation, const char *parameter, int index, nib_lua_class class) {
  const char *name = nib_lua_class_names[class];
  if (nib_lua_test(L, index, class)) return nib_lua_expected(L, operation, parameter, index, "an open %s", name);
  return nib_lua_expected(L, operation, parameter, index, "%s %s", *name == 'e' ? "an" : "a", name);
}

nib_lua_object *nib_lua_check(lua_State *L, const char *operation, const char *parameter, int index,
                              nib_lua_class class) {
  nib_lua_object *object = nib_lua_test(L, index, class);
  if (!object || !nib_lua_is_open(object)) not_open(L, operation, parameter, index, class);
  return object;
}

/* Refuses more objects than a sandbox allows. Collects first, so that unreachable ones do not count. */
static void count(lua_State *L, nib_lua_state *state, nib_lua_class class) {
  int32_t most = state->limits.most[class];
  if (state->count[class] >= most) nib_lua_collect(L);
  if (state->count[class] >= most)
    luaL_error(L, "%s: the script may have at most %d of them at a time", nib_lua_class_names[class], (int)most);
  state->count[class]++;
}

nib_lua_object *nib_lua_push_uncounted(lua_State *L, nib_lua_class class) {
  /* A graph's user value is the stream that it was captured on. */
  nib_lua_object *object = lua_newuserdatauv(L, sizeof *object, class == NIB_LUA_GRAPH ? 1 : 0);
  *object = (nib_lua_object){ .class = class };
  lua_getiuservalue(L, lua_upvalueindex(1), 1 + (int)class);
  lua_setmetatable(L, -2);
  return object;
}

nib_lua_object *nib_lua_push(lua_State *L, nib_lua_class class) {
  nib_lua_state *state = nib_lua_get_state(L);
  nib_lua_object *object = nib_lua_push_uncounted(L, class);
  if (state->limits.most[class]) {
    count(L, state, class);
    object->counted = true;
  }
  return object;
}

/* ---- Closing --------------------------------------------------------------------------------------------------- */

static bool is_default_stream(const nib_lua_object *object) {
  return object->stream == nib_device_default_stream(nib_stream_device(object->stream));
}

static void release(nib_lua_state *state, nib_lua_object *object) {
  void *handle = object->handle;
  if (object->counted) state->count[object->class]--;
  object->counted = false;
  object->handle = NULL;
  if (!handle) return;
  switch (object->class) {
  case NIB_LUA_TENSOR: nib_tensor_release(handle); break;
  case NIB_LUA_STREAM: nib_stream_release(handle); break; /* does nothing for a default stream */
  case NIB_LUA_EVENT: nib_event_release(handle); break;
  case NIB_LUA_GRAPH: nib_graph_release(handle); break;
  case NIB_LUA_CODE: nib_module_release(handle); break;
  default: nib_user_kernel_release(handle); break;
  }
}

/* A finalizer or a hook may close an object that the C function which it interrupted still uses. Such an object is only
 * marked; the collector releases it. (LUA_GCCOUNT is -1 while a finalizer runs.) */
static void close_object(lua_State *L, nib_lua_object *object) {
  nib_lua_state *state = nib_lua_get_state(L);
  if (!nib_lua_is_open(object)) return;
  if (object->class == NIB_LUA_STREAM) {
    if (is_default_stream(object))
      luaL_error(L, "stream:close: the default stream of %s cannot be closed",
                 nib_device_get_info(nib_stream_device(object->stream))->name);
    for (const nib_lua_scope *scope = state->scope; scope; scope = scope->outer)
      if (scope->stream == object)
        luaL_error(L, "stream:close: the stream is current in a running scope or capture; close it afterwards");
  }
  if (state->busy || lua_gc(L, LUA_GCCOUNT) < 0) {
    object->closed = true;
    return;
  }
  release(state, object);
  NIB_LUA_OBSERVED(L);
}

/* ---- Methods and metamethods of all classes: upvalues are the state, the methods and the class ----------------- */

static nib_lua_class own_class(lua_State *L) { return (nib_lua_class)lua_tointeger(L, lua_upvalueindex(3)); }

/* The object that a metamethod was called for, open or closed. */
static nib_lua_object *own_object(lua_State *L, const char *metamethod) {
  nib_lua_class class = own_class(L);
  nib_lua_object *object = nib_lua_test(L, 1, class);
  char operation[32]; /* not on the Lua stack, where it would become argument 1 if that is missing */
  snprintf(operation, sizeof operation, "%s:%s", nib_lua_class_names[class], metamethod);
  if (!object) not_open(L, operation, "self", 1, class);
  return object;
}

static int object_close(lua_State *L) {
  close_object(L, own_object(L, "close"));
  return 0;
}

static int object_gc(lua_State *L) {
  nib_lua_object *object = own_object(L, "gc");
  nib_lua_state *state = nib_lua_get_state(L);
  if (object->class == NIB_LUA_STREAM && object->handle && state->runtime && is_default_stream(object)) return 0;
  state->collecting = true;
  if (state->runtime) release(state, object);
  else object->handle = NULL; /* closing the state released everything */
  state->collecting = false;
  return 0;
}

static int object_eq(lua_State *L) {
  nib_lua_class class = own_class(L);
  const nib_lua_object *a = nib_lua_test(L, 1, class), *b = nib_lua_test(L, 2, class);
  bool same = a == b && a;
  if (a && b && nib_lua_is_open(a) && nib_lua_is_open(b))
    same = class == NIB_LUA_TENSOR ? nib_tensor_same_view(a->tensor, b->tensor) : a->handle == b->handle;
  lua_pushboolean(L, same);
  return 1;
}

static nib_device *device_of(const nib_lua_object *object) {
  switch (object->class) {
  case NIB_LUA_TENSOR: return nib_tensor_device(object->tensor);
  case NIB_LUA_STREAM: return nib_stream_device(object->stream);
  case NIB_LUA_EVENT: return nib_event_device(object->event);
  case NIB_LUA_GRAPH: return nib_graph_device(object->graph);
  case NIB_LUA_CODE: return nib_module_device(object->module);
  default: return nib_user_kernel_device(object->kernel);
  }
}

static int object_tostring(lua_State *L) {
  nib_lua_class class = own_class(L);
  const nib_lua_object *object = own_object(L, "tostring");
  const char *name = nib_lua_class_names[class];
  if (!nib_lua_is_open(object)) {
    lua_pushfstring(L, "nibble.%s (closed)", name);
    return 1;
  }
  const char *device = nib_device_get_info(device_of(object))->name;
  if (class == NIB_LUA_STREAM)
    lua_pushfstring(L, "nibble.%s %I (%s)", name, (LUAI_UACINT)nib_stream_id(object->stream), device);
  else if (class == NIB_LUA_GRAPH)
    lua_pushfstring(L, "nibble.%s of %d nodes (%s)", name, (int)nib_graph_node_count(object->graph), device);
  else if (class == NIB_LUA_KERNEL)
    lua_pushfstring(L, "nibble.%s %s (%s)", name, nib_user_kernel_name(object->kernel), device);
  else lua_pushfstring(L, "nibble.%s (%s)", name, device);
  return 1;
}

bool nib_lua_push_method(lua_State *L) {
  lua_pushvalue(L, 2);
  if (lua_rawget(L, lua_upvalueindex(2)) != LUA_TNIL) return true;
  lua_pop(L, 1);
  return false;
}

int nib_lua_unknown_field(lua_State *L, nib_lua_class class) {
  const char *name = nib_lua_class_names[class], *article = *name == 'e' ? "an" : "a";
  const nib_lua_object *object = nib_lua_test(L, 1, class);
  if (object && !nib_lua_is_open(object)) return not_open(L, lua_pushfstring(L, "%s:index", name), "self", 1, class);
  if (lua_type(L, 2) == LUA_TSTRING)
    return nib_lua_argument_error(L, name, "field", "a method or field of %s %s, got '%s'", article, name,
                                  lua_tostring(L, 2));
  return nib_lua_expected(L, name, "field", 2, "the name of a method or field of %s %s", article, name);
}

static int object_index(lua_State *L) {
  nib_lua_class class = own_class(L);
  const nib_lua_object *object = own_object(L, "index");
  if (nib_lua_push_method(L)) return 1;
  const char *name = nib_lua_word(L, 2);
  bool is_handle = class == NIB_LUA_STREAM && strcmp(name, "handle") == 0 && !nib_lua_get_state(L)->limits.no_addresses;
  if (!is_handle && strcmp(name, "device") != 0) return nib_lua_unknown_field(L, class);
  if (!nib_lua_is_open(object))
    return not_open(L, lua_pushfstring(L, "%s:%s", nib_lua_class_names[class], name), "self", 1, class);
  void *handle = is_handle ? nib_stream_handle(object->stream) : NULL;
  if (!is_handle) lua_pushstring(L, nib_device_get_info(device_of(object))->name);
  else if (handle) lua_pushinteger(L, (lua_Integer)(uintptr_t)handle);
  else lua_pushnil(L);
  return 1;
}

static int object_newindex(lua_State *L) {
  const char *name = nib_lua_class_names[own_class(L)];
  const nib_lua_object *object = own_object(L, "newindex");
  if (!nib_lua_is_open(object)) return not_open(L, lua_pushfstring(L, "%s:newindex", name), "self", 1, own_class(L));
  return nib_lua_expected(L, name, "field", 2, "no assignment (the fields of a %s are read-only)", name);
}

static const luaL_Reg metamethods_of_all[] = {
  { "__gc", object_gc },
  { "__close", object_close },
  { "__eq", object_eq },
  { "__tostring", object_tostring },
  { "__index", object_index },
  { "__newindex", object_newindex },
  { NULL, NULL },
};

static void set_functions(lua_State *L, int state_index, int methods_index, nib_lua_class class,
                          const luaL_Reg *functions) {
  lua_pushvalue(L, state_index);
  lua_pushvalue(L, methods_index);
  lua_pushinteger(L, (lua_Integer) class);
  luaL_setfuncs(L, functions, 3);
}

void nib_lua_new_class(lua_State *L, nib_lua_state *state, int state_index, nib_lua_class class,
                       const luaL_Reg *methods, const luaL_Reg *metamethods) {
  static const luaL_Reg methods_of_all[] = { { "close", object_close }, { NULL, NULL } };
  luaL_newmetatable(L, lua_pushfstring(L, "nibble.%s", nib_lua_class_names[class]));
  lua_remove(L, -2);
  int metatable = lua_gettop(L);
  lua_newtable(L);
  set_functions(L, state_index, metatable + 1, class, methods);
  set_functions(L, state_index, metatable + 1, class, methods_of_all);
  lua_pushvalue(L, metatable);
  set_functions(L, state_index, metatable + 1, class, metamethods_of_all);
  if (metamethods) set_functions(L, state_index, metatable + 1, class, metamethods);
  lua_pop(L, 1);
  lua_setfield(L, metatable, "methods");
  state->metatables[class] = lua_topointer(L, metatable);
  lua_setiuservalue(L, state_index, 1 + (int)class);
}
