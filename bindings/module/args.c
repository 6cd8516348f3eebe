/* Arguments of Lua functions. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../runtime/core/floats.h"
#include "args.h"

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

static void describe_tensor(lua_State *L, const nib_tensor *tensor) {
  luaL_Buffer text;
  char number[32];
  luaL_buffinit(L, &text);
  luaL_addstring(&text, "a tensor ");
  luaL_addstring(&text, nib_dtype_name(nib_tensor_dtype(tensor)));
  luaL_addstring(&text, " {");
  for (int32_t i = 0; i < nib_tensor_ndim(tensor); i++) {
    snprintf(number, sizeof number, "%s%lld", i ? ", " : "", (long long)nib_tensor_shape(tensor)[i]);
    luaL_addstring(&text, number);
  }
  luaL_addstring(&text, "}");
  luaL_pushresult(&text);
}

static void describe_string(lua_State *L, const char *string, size_t length) {
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  luaL_addstring(&text, "a string \"");
  for (size_t i = 0; i < length && i < 60; i++) luaL_addchar(&text, (unsigned char)string[i] < ' ' ? '?' : string[i]);
  luaL_addstring(&text, length > 60 ? "...\"" : "\"");
  luaL_pushresult(&text);
}

static void describe_object(lua_State *L, int index) {
  for (int kind = 0; kind < NIB_LUA_CLASS_COUNT; kind++) {
    const nib_lua_object *object = nib_lua_test(L, index, (nib_lua_class)kind);
    const char *name = nib_lua_class_names[kind];
    if (!object) continue;
    if (!nib_lua_is_open(object)) lua_pushfstring(L, "a closed %s", name);
    else if (kind == NIB_LUA_TENSOR) describe_tensor(L, object->tensor);
    else lua_pushfstring(L, "%s %s", *name == 'e' ? "an" : "a", name);
    return;
  }
  lua_pushliteral(L, "a userdata");
}

const char *nib_lua_describe(lua_State *L, int index) {
  char number[32];
  luaL_checkstack(L, 8, NULL);
  switch (lua_type(L, index)) {
  case LUA_TNONE: lua_pushliteral(L, "no value"); break;
  case LUA_TNIL: lua_pushliteral(L, "nil"); break;
  case LUA_TBOOLEAN: lua_pushstring(L, lua_toboolean(L, index) ? "true" : "false"); break;
  case LUA_TNUMBER:
    if (lua_isinteger(L, index)) {
      lua_pushfstring(L, "%I", (LUAI_UACINT)lua_tointeger(L, index));
    } else {
      nib_format_real(number, sizeof number, "%.14g", lua_tonumber(L, index));
      lua_pushstring(L, number);
    }
    break;
  case LUA_TSTRING: {
    size_t length;
    const char *string = lua_tolstring(L, index, &length);
    describe_string(L, string, length);
    break;
  }
  case LUA_TUSERDATA: describe_object(L, index); break;
  default: lua_pushfstring(L, "a %s", luaL_typename(L, index));
  }
  return lua_tostring(L, -1);
}

int nib_lua_expected(lua_State *L, const char *operation, const char *parameter, int index, const char *expected, ...) {
  index = lua_absindex(L, index); /* describing pushes a value; an index past the top stays as it is */
  const char *got = nib_lua_describe(L, index);
  va_list arguments;
  va_start(arguments, expected);
  const char *text = lua_pushvfstring(L, expected, arguments);
  va_end(arguments);
  return luaL_error(L, "%s: %s: expected %s, got %s", operation, parameter, text, got);
}

int nib_lua_argument_error(lua_State *L, const char *operation, const char *parameter, const char *format, ...) {
  luaL_checkstack(L, 4, NULL);
  va_list arguments;
  va_start(arguments, format);
  const char *text = lua_pushvfstring(L, format, arguments);
  va_end(arguments);
  return luaL_error(L, "%s: %s: expected %s", operation, parameter, text);
}

void nib_lua_plain_table(lua_State *L, const char *operation, const char *parameter, int index) {
  static const char *const refused[] = { "__index", "__len" };
  if (!lua_getmetatable(L, index)) return;
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    lua_pushstring(L, refused[i]);
    if (lua_rawget(L, -2) != LUA_TNIL)
      nib_lua_argument_error(L, operation, parameter, "a table without %s (fields are read raw), got one with it",
                             refused[i]);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
}

/* ---- Numbers and strings --------------------------------------------------------------------------------------- */

bool nib_lua_to_integer(lua_State *L, int index, int64_t *out) {
  int fits = 0;
  if (lua_type(L, index) == LUA_TNUMBER) *out = lua_tointegerx(L, index, &fits); /* it would convert strings, too */
  return fits;
}

int64_t nib_lua_integer(lua_State *L, const char *operation, const char *parameter, int index) {
  int64_t value = 0;
  if (!nib_lua_to_integer(L, index, &value)) nib_lua_expected(L, operation, parameter, index, "an integer");
  return value;
}

int64_t nib_lua_position(lua_State *L, const char *operation, const char *parameter, int index) {
  int64_t value = nib_lua_integer(L, operation, parameter, index);
  return value == INT64_MIN ? value : value - 1;
}

nib_number nib_lua_number(lua_State *L, const char *operation, const char *parameter, int index) {
  if (lua_type(L, index) != LUA_TNUMBER) nib_lua_expected(L, operation, parameter, index, "a number");
  if (lua_isinteger(L, index)) return NIB_INTEGER(lua_tointeger(L, index));
  return NIB_REAL(lua_tonumber(L, index));
}

nib_number nib_lua_element(lua_State *L, const char *operation, const char *parameter, int index, nib_dtype dtype) {
  nib_number value = nib_lua_number(L, operation, parameter, index);
  uint64_t bits;
  if (!nib_element_from_number(dtype, value, &bits))
    nib_lua_expected(L, operation, parameter, index, "a number that %s can hold", nib_dtype_name(dtype));
  return value;
}

const char *nib_lua_word(lua_State *L, int index) {
  size_t length;
  const char *text = lua_type(L, index) == LUA_TSTRING ? lua_tolstring(L, index, &length) : "";
  return *text && strlen(text) == length ? text : "";
}

const char *nib_lua_text(lua_State *L, const char *operation, const char *parameter, int index) {
  if (lua_type(L, index) != LUA_TSTRING) nib_lua_expected(L, operation, parameter, index, "a string");
  size_t length;
  const char *text = lua_tolstring(L, index, &length);
  if (strlen(text) != length) nib_lua_expected(L, operation, parameter, index, "a string without zero bytes");
  return text;
}

bool nib_lua_is_function(lua_State *L, int index) {
  if (lua_type(L, index) == LUA_TFUNCTION) return true;
  if (luaL_getmetafield(L, index, "__call") == LUA_TNIL) return false;
  lua_pop(L, 1);
  return true;
}

/* ---- Lists of integers ----------------------------------------------------------------------------------------- */

static void check_count(lua_State *L, const char *operation, const char *parameter, lua_Unsigned count) {
  if (count > NIB_MAX_NDIM)
    nib_lua_argument_error(L, operation, parameter, "at most %d dimensions, got %I", NIB_MAX_NDIM, (LUAI_UACINT)count);
}

int32_t nib_lua_integer_list(lua_State *L, const char *operation, const char *parameter, int index, int64_t *out) {
  if (lua_type(L, index) != LUA_TTABLE) nib_lua_expected(L, operation, parameter, index, "a table of integers");
  nib_lua_plain_table(L, operation, parameter, index);
  lua_Unsigned count = lua_rawlen(L, index);
  check_count(L, operation, parameter, count);
  for (lua_Unsigned i = 0; i < count; i++) {
    lua_rawgeti(L, index, (lua_Integer)i + 1);
    out[i] = nib_lua_integer(L, operation, parameter, -1);
    lua_pop(L, 1);
  }
  /* Other keys would be ignored silently, such as options that were put into the shape by mistake. */
  lua_Unsigned keys = 0;
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (++keys > count)
      nib_lua_expected(L, operation, parameter, -2, "a list of %I integers and no other keys", (LUAI_UACINT)count);
  }
  return (int32_t)count;
}

int32_t nib_lua_integers(lua_State *L, const char *operation, const char *parameter, int first, int last,
                         int64_t *out) {
  if (first == last && lua_type(L, first) == LUA_TTABLE)
    return nib_lua_integer_list(L, operation, parameter, first, out);
  int count = last - first + 1;
  check_count(L, operation, parameter, (lua_Unsigned)count);
  for (int i = 0; i < count; i++) out[i] = nib_lua_integer(L, operation, parameter, first + i);
  return count;
}

/* ---- Options --------------------------------------------------------------------------------------------------- */

void nib_lua_spread_options(lua_State *L, const char *operation, int first, const char *const *names) {
  int index = first;
  while (names[index - first] && lua_type(L, index) != LUA_TTABLE) index++;
  if (!names[index - first]) return;
  nib_lua_options(L, operation, index, names + (index - first));
  lua_pushvalue(L, index);
  int options = lua_gettop(L);
  for (int i = index; names[i - first]; i++) {
    nib_lua_push_option(L, options, names[i - first]);
    lua_replace(L, i);
  }
  lua_settop(L, options - 1);
}

void nib_lua_options(lua_State *L, const char *operation, int index, const char *const *allowed) {
  if (lua_isnoneornil(L, index)) return;
  if (lua_type(L, index) != LUA_TTABLE) nib_lua_expected(L, operation, "opts", index, "a table of options");
  nib_lua_plain_table(L, operation, "opts", index);
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    const char *const *name = allowed, *word = nib_lua_word(L, -2);
    while (*name && strcmp(*name, word) != 0) name++;
    if (*name) continue;
    int key = lua_gettop(L) - 1;
    lua_pushstring(L, allowed[0]);
    for (name = allowed + 1; *name; name++) {
      lua_pushfstring(L, name[1] ? "%s, %s" : "%s or %s", lua_tostring(L, -1), *name);
      lua_remove(L, -2);
    }
    nib_lua_expected(L, operation, "opts", key, "the option %s", lua_tostring(L, -1));
  }
}

int nib_lua_push_option(lua_State *L, int index, const char *name) {
  if (lua_type(L, index) != LUA_TTABLE) {
    lua_pushnil(L);
    return LUA_TNIL;
  }
  index = lua_absindex(L, index);
  lua_pushstring(L, name);
  return lua_rawget(L, index);
}

bool nib_lua_boolean_option(lua_State *L, const char *operation, int index, const char *name, bool otherwise) {
  int type = nib_lua_push_option(L, index, name);
  if (type != LUA_TNIL && type != LUA_TBOOLEAN) nib_lua_expected(L, operation, name, -1, "a boolean");
  bool value = type == LUA_TNIL ? otherwise : lua_toboolean(L, -1);
  lua_pop(L, 1);
  return value;
}

double nib_lua_number_option(lua_State *L, const char *operation, int index, const char *name, double otherwise) {
  if (nib_lua_push_option(L, index, name) != LUA_TNIL) {
    if (lua_type(L, -1) != LUA_TNUMBER) nib_lua_expected(L, operation, name, -1, "a number");
    otherwise = lua_tonumber(L, -1);
  }
  lua_pop(L, 1);
  return otherwise;
}

int64_t nib_lua_integer_option(lua_State *L, const char *operation, int index, const char *name, int64_t otherwise) {
  if (nib_lua_push_option(L, index, name) != LUA_TNIL) otherwise = nib_lua_integer(L, operation, name, -1);
  lua_pop(L, 1);
  return otherwise;
}

nib_dtype nib_lua_dtype(lua_State *L, const char *operation, const char *parameter, int index) {
  nib_dtype dtype = NIB_DTYPE_NONE;
  if (!nib_dtype_find(nib_lua_word(L, index), &dtype))
    nib_lua_expected(
      L, operation, parameter, index,
      "a dtype (\"float32\", \"float16\", \"bfloat16\", \"float8_e4m3fn\", \"uint8\", \"int8\", \"uint16\", "
      "\"int32\" or \"int64\")");
  return dtype;
}

nib_dtype nib_lua_dtype_option(lua_State *L, const char *operation, int index) {
  nib_dtype dtype = NIB_DTYPE_NONE;
  if (nib_lua_push_option(L, index, "dtype") != LUA_TNIL) dtype = nib_lua_dtype(L, operation, "dtype", -1);
  lua_pop(L, 1);
  return dtype;
}

const char *nib_lua_default_device(void) {
  const char *name = getenv("NIBBLE_DEVICE");
  return name && *name ? name : NULL;
}

nib_device *nib_lua_device(lua_State *L, const char *operation, int index) {
  nib_runtime *runtime = nib_lua_runtime(L, operation);
  nib_device *device = NULL;
  const char *name;
  if (lua_isnoneornil(L, index)) {
    name = nib_lua_default_device();
    if (!name) return nib_device_best(runtime);
  } else {
    name = nib_lua_text(L, operation, "device", index);
  }
  nib_status status = nib_device_find(runtime, name, &device);
  if (status == NIB_UNAVAILABLE)
    nib_lua_argument_error(L, operation, "device", "an available device, got \"%s\" (%s)", name, nib_error(runtime));
  if (status != NIB_OK) nib_lua_raise(L, operation, status);
  return device;
}

nib_device *nib_lua_device_option(lua_State *L, const char *operation, int index) {
  nib_lua_push_option(L, index, "device");
  nib_device *device = nib_lua_device(L, operation, -1);
  lua_pop(L, 1);
  return device;
}

nib_device *nib_lua_place_option(lua_State *L, const char *operation, int index, bool *pinned) {
  *pinned = nib_lua_boolean_option(L, operation, index, "pinned", false);
  bool anywhere = nib_lua_push_option(L, index, "device") == LUA_TNIL;
  nib_device *cpu = nib_device_at(nib_lua_runtime(L, operation), 0);
  nib_device *device = *pinned && anywhere ? cpu : nib_lua_device(L, operation, -1);
  if (*pinned && device != cpu) nib_lua_expected(L, operation, "device", -1, "\"cpu\" (pinned memory is the CPU's)");
  lua_pop(L, 1);
  return device;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

nib_tensor *nib_lua_tensor(lua_State *L, const char *operation, const char *parameter, int index) {
  return nib_lua_check(L, operation, parameter, index, NIB_LUA_TENSOR)->tensor;
}

nib_tensor *nib_lua_tensor_option(lua_State *L, const char *operation, int index, const char *name) {
  if (nib_lua_push_option(L, index, name) == LUA_TNIL) return NULL;
  return nib_lua_tensor(L, operation, name, -1);
}

/* One tensor of the pair at an index: its field `position` or `name`. */
static nib_tensor *half_of_cache(lua_State *L, const char *operation, const char *parameter, int index, int position,
                                 const char *name) {
  if (lua_rawgeti(L, index, position) == LUA_TNIL) {
    lua_pop(L, 1);
    nib_lua_push_option(L, index, name);
  }
  const nib_lua_object *object = nib_lua_test(L, -1, NIB_LUA_TENSOR);
  if (!object || !nib_lua_is_open(object))
    nib_lua_expected(L, operation, parameter, -1, "an open tensor as `%s` of the pair {k, v}", name);
  return object->tensor;
}

nib_cache nib_lua_cache(lua_State *L, const char *operation, const char *parameter, int index) {
  if (lua_type(L, index) != LUA_TTABLE) {
    const nib_lua_object *object = nib_lua_test(L, index, NIB_LUA_TENSOR);
    if (!object) nib_lua_expected(L, operation, parameter, index, "a pair {k, v} of tensors, or one stacked tensor");
    if (!nib_lua_is_open(object)) nib_lua_tensor(L, operation, parameter, index); /* raises: it is closed */
    return (nib_cache){ .stacked = object->tensor };
  }
  nib_lua_plain_table(L, operation, parameter, index);
  if (lua_rawlen(L, index) > 2)
    nib_lua_argument_error(L, operation, parameter, "a pair {k, v} of tensors, got a table of %I values",
                           (LUAI_UACINT)lua_rawlen(L, index));
  nib_cache cache = { 0 };
  cache.k = half_of_cache(L, operation, parameter, index, 1, "k");
  cache.v = half_of_cache(L, operation, parameter, index, 2, "v");
  return cache;
}

nib_scale_source nib_lua_scale(lua_State *L, const char *operation, const char *parameter, int index) {
  if (lua_type(L, index) == LUA_TNUMBER) return (nib_scale_source){ .value = lua_tonumber(L, index) };
  const nib_lua_object *object = nib_lua_test(L, index, NIB_LUA_TENSOR);
  if (!object)
    nib_lua_expected(L, operation, parameter, index, "a positive finite number, or a float32 tensor of one element");
  if (!nib_lua_is_open(object)) nib_lua_tensor(L, operation, parameter, index); /* raises: it is closed */
  return (nib_scale_source){ .tensor = object->tensor };
}

nib_4over6 nib_lua_4over6(lua_State *L, const char *operation, int index) {
  static const char *const allowed[] = { "err_mode", NULL };
  const char *expected = "true, false or {err_mode = \"MSE\"}";
  if (lua_isnoneornil(L, index)) return NIB_4OVER6_OFF;
  if (lua_isboolean(L, index)) return lua_toboolean(L, index) ? NIB_4OVER6_MSE : NIB_4OVER6_OFF;
  if (!lua_istable(L, index)) nib_lua_expected(L, operation, "nvfp4_4over6", index, "%s", expected);
  nib_lua_options(L, operation, index, allowed);
  nib_lua_push_option(L, index, "err_mode");
  if (strcmp(nib_lua_word(L, -1), "MSE") != 0) nib_lua_expected(L, operation, "nvfp4_4over6.err_mode", -1, "\"MSE\"");
  lua_pop(L, 1);
  return NIB_4OVER6_MSE;
}

nib_layout nib_lua_layout(lua_State *L, const char *operation, int index, nib_layout otherwise) {
  nib_layout layout = otherwise;
  if (!lua_isnoneornil(L, index)) {
    const char *name = nib_lua_word(L, index);
    if (strcmp(name, "NHD") != 0 && strcmp(name, "HND") != 0)
      nib_lua_expected(L, operation, "kv_layout", index, "\"NHD\" or \"HND\"");
    layout = *name == 'N' ? NIB_NHD : NIB_HND;
  }
  return layout;
}
