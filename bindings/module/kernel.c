/* User kernels: nibble.compile, nibble.module, modules and kernels. */
#include <string.h>

#include "args.h"

/* ---- Modules --------------------------------------------------------------------------------------------------- */

static void push_kernel(lua_State *L, const char *operation, nib_module *module, const char *name) {
  nib_lua_object *object = nib_lua_push(L, NIB_LUA_KERNEL);
  NIB_LUA_DO(L, operation, nib_module_kernel(module, name, &object->kernel));
}

/* Pushes nil and the message if the device has no user kernels or there is no compiler. */
static bool absent(lua_State *L, const char *operation, nib_status status) {
  if (status != NIB_UNAVAILABLE) return false;
  lua_pushnil(L);
  nib_lua_push_message(L, operation, status);
  return true;
}

int nib_lua_compile(lua_State *L) {
  static const char *const allowed[] = { "name", "options", "device", NULL };
  lua_settop(L, 2);
  const char *source = nib_lua_text(L, "compile", "source", 1);
  nib_lua_options(L, "compile", 2, allowed);
  nib_device *device = nib_lua_device_option(L, "compile", 2);
  const char *options[NIB_MAX_ARGUMENTS] = { NULL };
  int32_t count = 0;
  int list = lua_gettop(L) + 1;
  if (nib_lua_push_option(L, 2, "options") == LUA_TTABLE) {
    nib_lua_plain_table(L, "compile", "options", list);
    lua_Unsigned length = lua_rawlen(L, list);
    if (length > NIB_MAX_ARGUMENTS)
      nib_lua_argument_error(L, "compile", "options", "at most %d options, got %I", NIB_MAX_ARGUMENTS,
                             (LUAI_UACINT)length);
    luaL_checkstack(L, (int)length + 8, "options");
    for (; count < (int32_t)length; count++) {
      lua_rawgeti(L, list, count + 1);
      options[count] = nib_lua_text(L, "compile", "options", lua_gettop(L));
    }
  } else if (!lua_isnil(L, list)) {
    nib_lua_expected(L, "compile", "options", list, "a list of strings");
  }
  const char *name = NULL;
  if (nib_lua_push_option(L, 2, "name") != LUA_TNIL) name = nib_lua_text(L, "compile", "name", lua_gettop(L));
  nib_lua_object *module = nib_lua_push(L, NIB_LUA_CODE);
  nib_status status = nib_compile(device, source, options, count, &module->module);
  if (absent(L, "compile", status)) return 2;
  if (status != NIB_OK) nib_lua_raise(L, "compile", status);
  if (name) push_kernel(L, "compile", module->module, name);
  return 1;
}

int nib_lua_load_module(lua_State *L) {
  static const char *const allowed[] = { "device", NULL };
  lua_settop(L, 2);
  size_t bytes;
  if (lua_type(L, 1) != LUA_TSTRING) nib_lua_expected(L, "module", "bytes", 1, "a string (PTX, a cubin or a fatbin)");
  const char *image = lua_tolstring(L, 1, &bytes);
  nib_lua_options(L, "module", 2, allowed);
  nib_device *device = nib_lua_device_option(L, "module", 2);
  nib_lua_object *module = nib_lua_push(L, NIB_LUA_CODE);
  nib_status status = nib_module_create(device, image, bytes, &module->module);
  if (absent(L, "module", status)) return 2;
  if (status != NIB_OK) nib_lua_raise(L, "module", status);
  return 1;
}

static int module_kernel(lua_State *L) {
  nib_module *module = nib_lua_check(L, "module:kernel", "self", 1, NIB_LUA_CODE)->module;
  push_kernel(L, "module:kernel", module, nib_lua_text(L, "module:kernel", "name", 2));
  return 1;
}

/* ---- Kernels --------------------------------------------------------------------------------------------------- */

/* The extent of the grid or the block: an integer or a list of one to three. */
static void read_extent(lua_State *L, const char *parameter, int index, uint32_t out[3]) {
  int64_t sizes[NIB_MAX_NDIM];
  int32_t count = 1;
  if (lua_type(L, index) == LUA_TTABLE) count = nib_lua_integer_list(L, "kernel:launch", parameter, index, sizes);
  else sizes[0] = nib_lua_integer(L, "kernel:launch", parameter, index);
  if (count < 1 || count > 3)
    nib_lua_argument_error(L, "kernel:launch", parameter, "one to three sizes, got %d", (int)count);
  for (int i = 0; i < 3; i++) {
    int64_t size = i < count ? sizes[i] : 1;
    if (size < 1 || size > UINT32_MAX)
      nib_lua_argument_error(L, "kernel:launch", parameter, "sizes from 1 to 4294967295, got %I", (LUAI_UACINT)size);
    out[i] = (uint32_t)size;
  }
}

typedef union value {
  float f;
  double d;
  int32_t i;
  int64_t l;
  unsigned char bytes[8];
} value;

/* Reads an argument: a tensor, {dtype, number}, or a number whose type follows from the parameter's size. */
static nib_argument read_argument(lua_State *L, const nib_user_kernel *kernel, int32_t position, int index,
                                  value *storage) {
  nib_argument argument = { .value = storage };
  nib_lua_object *tensor = nib_lua_test(L, index, NIB_LUA_TENSOR);
  if (tensor) {
    argument.tensor = nib_lua_tensor(L, "kernel:launch", "args", index);
    return argument;
  }
  size_t wanted = nib_user_kernel_param_bytes(kernel, position);
  nib_dtype dtype = NIB_DTYPE_NONE;
  if (lua_type(L, index) == LUA_TTABLE) {
    nib_lua_plain_table(L, "kernel:launch", "args", index);
    lua_rawgeti(L, index, 1);
    dtype = nib_lua_dtype(L, "kernel:launch", "args", lua_gettop(L));
    lua_rawgeti(L, index, 2);
    index = lua_gettop(L);
  } else if (lua_type(L, index) == LUA_TBOOLEAN && wanted == 1) {
    storage->bytes[0] = (unsigned char)lua_toboolean(L, index);
    argument.bytes = 1;
    return argument;
  } else if (lua_type(L, index) != LUA_TNUMBER) {
    nib_lua_expected(L, "kernel:launch", "args", index, "a tensor, a number or {dtype, number}");
  } else if (lua_isinteger(L, index)) {
    dtype = wanted == 1 ? NIB_INT8 : wanted == 4 ? NIB_INT32 : wanted == 8 ? NIB_INT64 : NIB_DTYPE_NONE;
  } else if (wanted == 8) {
    storage->d = lua_tonumber(L, index);
    argument.bytes = 8;
    return argument;
  } else {
    dtype = wanted == 4 ? NIB_FLOAT32 : NIB_DTYPE_NONE;
  }
  if (dtype == NIB_DTYPE_NONE)
    nib_lua_argument_error(L, "kernel:launch", "args",
                           "{dtype, number} for parameter %d (no type follows from its size), got %s",
                           (int)position + 1, nib_lua_describe(L, index));
  if (!nib_element_from_number(dtype, nib_lua_element(L, "kernel:launch", "args", index, dtype), storage))
    nib_lua_expected(L, "kernel:launch", "args", index, "a value of %s", nib_dtype_name(dtype));
  argument.bytes = nib_dtype_bytes(dtype);
  return argument;
}

static int kernel_launch(lua_State *L) {
  static const char *const allowed[] = { "shared", "stream", NULL };
  lua_settop(L, 5);
  const nib_user_kernel *kernel = nib_lua_check(L, "kernel:launch", "self", 1, NIB_LUA_KERNEL)->kernel;
  nib_launch_desc desc = { .argument_count = 0 };
  read_extent(L, "grid", 2, desc.grid);
  read_extent(L, "block", 3, desc.block);
  if (lua_type(L, 4) != LUA_TTABLE) nib_lua_expected(L, "kernel:launch", "args", 4, "a list of arguments");
  nib_lua_plain_table(L, "kernel:launch", "args", 4);
  nib_lua_options(L, "kernel:launch", 5, allowed);
  int64_t shared = nib_lua_integer_option(L, "kernel:launch", 5, "shared", 0);
  if (shared < 0 || shared > UINT32_MAX)
    nib_lua_argument_error(L, "kernel:launch", "shared", "0 or more bytes, got %I", (LUAI_UACINT)shared);
  desc.shared_bytes = (uint32_t)shared;
  lua_Unsigned count = lua_rawlen(L, 4);
  if (count > NIB_MAX_ARGUMENTS)
    nib_lua_argument_error(L, "kernel:launch", "args", "at most %d arguments, got %I", NIB_MAX_ARGUMENTS,
                           (LUAI_UACINT)count);
  luaL_checkstack(L, 4 * (int)count + 8, "arguments");
  nib_argument arguments[NIB_MAX_ARGUMENTS];
  value values[NIB_MAX_ARGUMENTS];
  memset(values, 0, sizeof values);
  for (int32_t i = 0; i < (int32_t)count; i++) {
    lua_rawgeti(L, 4, i + 1); /* stays on the stack, so that it is not collected */
    arguments[i] = read_argument(L, kernel, i, lua_gettop(L), &values[i]);
  }
  desc.arguments = arguments;
  desc.argument_count = (int32_t)count;
  nib_stream *stream;
  if (nib_lua_push_option(L, 5, "stream") != LUA_TNIL)
    stream = nib_lua_check(L, "kernel:launch", "stream", lua_gettop(L), NIB_LUA_STREAM)->stream;
  else stream = nib_lua_current_stream(L, "kernel:launch", nib_user_kernel_device(kernel));
  NIB_LUA_DO(L, "kernel:launch", nib_user_kernel_launch(stream, (nib_user_kernel *)kernel, &desc));
  return 0;
}

static int kernel_attributes(lua_State *L) {
  const nib_user_kernel *kernel = nib_lua_check(L, "kernel:attributes", "self", 1, NIB_LUA_KERNEL)->kernel;
  nib_kernel_attributes a = nib_user_kernel_attributes(kernel);
  const struct {
    const char *name;
    int32_t value;
  } list[] = { { "max_threads", a.max_threads },   { "registers", a.registers },
               { "shared_bytes", a.shared_bytes }, { "constant_bytes", a.constant_bytes },
               { "local_bytes", a.local_bytes },   { "max_dynamic_shared_bytes", a.max_dynamic_shared_bytes },
               { "ptx_version", a.ptx_version },   { "binary_version", a.binary_version } };
  lua_createtable(L, 0, 10);
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
    lua_pushinteger(L, list[i].value);
    lua_setfield(L, -2, list[i].name);
  }
  lua_pushstring(L, nib_user_kernel_name(kernel));
  lua_setfield(L, -2, "name");
  int32_t count = nib_user_kernel_param_count(kernel);
  if (count < 0) return 1;
  lua_createtable(L, count, 0);
  for (int32_t i = 0; i < count; i++) {
    lua_pushinteger(L, (lua_Integer)nib_user_kernel_param_bytes(kernel, i));
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "param_bytes");
  return 1;
}

static const luaL_Reg module_methods[] = { { "kernel", module_kernel }, { NULL, NULL } };
static const luaL_Reg kernel_methods[] = { { "launch", kernel_launch },
                                           { "attributes", kernel_attributes },
                                           { NULL, NULL } };

void nib_lua_open_kernel(lua_State *L, nib_lua_state *state, int state_index) {
  nib_lua_new_class(L, state, state_index, NIB_LUA_CODE, module_methods, NULL);
  nib_lua_new_class(L, state, state_index, NIB_LUA_KERNEL, kernel_methods, NULL);
}
