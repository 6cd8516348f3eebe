/* What scripts in a sandbox can reach: the environment, Lua's basic functions, coroutines, mathematics, the module.
 * Everything is listed by name, so that another version of Lua adds nothing unnoticed. */
#include <lualib.h>
#include <string.h>

#include "sandbox.h"

#define MOST_TEXT      65536 /* bytes of all string arguments of a bounded function */
#define MOST_ARGUMENTS 250
#define MOST_PRINTED   4096 /* bytes of a printed line */

/* ---- Libraries ------------------------------------------------------------------------------------------------- */

static void check_text(lua_State *L) {
  size_t total = 0, length;
  for (int i = 1, count = lua_gettop(L); i <= count; i++) {
    if (lua_type(L, i) != LUA_TSTRING) continue;
    lua_tolstring(L, i, &length);
    total += length;
  }
  if (total > MOST_TEXT)
    luaL_error(L, "expected at most %d bytes of string arguments in a sandbox, got more", MOST_TEXT);
}

void nib_sandbox_check_arguments(lua_State *L) {
  check_text(L);
  if (lua_gettop(L) > MOST_ARGUMENTS)
    luaL_error(L, "expected at most %d arguments in a sandbox, got more", MOST_ARGUMENTS);
}

static int bounded(lua_State *L) {
  nib_sandbox_check_arguments(L);
  return nib_sandbox_original(L);
}

static int bounded_text(lua_State *L) {
  check_text(L);
  return nib_sandbox_original(L);
}

void nib_sandbox_take(lua_State *L, int from, const char *const *names, enum nib_sandbox_bound bound) {
  for (; *names; names++) {
    bool is_bound = lua_getfield(L, from, *names) == LUA_TFUNCTION && bound != NIB_SANDBOX_FREE;
    if (is_bound) lua_pushcclosure(L, bound == NIB_SANDBOX_TEXT ? bounded_text : bounded, 1);
    lua_setfield(L, -2, *names);
  }
}

void nib_sandbox_library(lua_State *L, const char *name, const luaL_Reg *functions) {
  lua_newtable(L);
  lua_pushvalue(L, -1);
  lua_setfield(L, -3, name);
  luaL_setfuncs(L, functions, 0);
}

/* ---- Metatables -------------------------------------------------------------------------------------------------
 *
 * setmetatable sets a copy of the script's table, which a later change of that table does not reach. So it never has
 * __gc or __close, which run outside of calls, nor __mode, which makes the collector's work quadratic. getmetatable
 * returns the script's table, which the copy holds. The last few copies are kept and used again. */

static const char original_key;

static const char *const metamethods[] = {
  "__index",  "__newindex", "__call", "__tostring", "__name", "__len", "__eq",    "__lt",        "__le",
  "__concat", "__unm",      "__add",  "__sub",      "__mul",  "__div", "__mod",   "__pow",       "__idiv",
  "__band",   "__bor",      "__bxor", "__bnot",     "__shl",  "__shr", "__pairs", "__metatable", NULL,
};

static void refuse_field(lua_State *L, int metatable, const char *name) {
  lua_pushstring(L, name);
  if (lua_rawget(L, metatable) != LUA_TNIL)
    luaL_error(L, "setmetatable: metatable: expected no field '%s' in a sandbox, got a %s", name, luaL_typename(L, -1));
  lua_pop(L, 1);
}

/* Whether the copy at index 4 still equals the table at index 2. */
static bool is_current(lua_State *L) {
  bool same = true;
  for (const char *const *name = metamethods; *name && same; name++) {
    lua_pushstring(L, *name);
    lua_pushvalue(L, -1);
    lua_rawget(L, 2);
    lua_insert(L, -2);
    lua_rawget(L, 4);
    same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
  }
  return same;
}

static void push_copy(lua_State *L) {
  lua_newtable(L);
  for (const char *const *name = metamethods; *name; name++) {
    lua_pushstring(L, *name);
    lua_pushvalue(L, -1);
    if (lua_rawget(L, 2) != LUA_TNIL) lua_rawset(L, -3);
    else lua_pop(L, 2);
  }
  lua_pushvalue(L, 2);
  lua_rawsetp(L, -2, &original_key);
}

static int set_metatable(lua_State *L) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  if (!lua_isnil(L, 2)) luaL_checktype(L, 2, LUA_TTABLE);
  lua_settop(L, 2);
  if (luaL_getmetafield(L, 1, "__metatable") != LUA_TNIL) return luaL_error(L, "cannot change a protected metatable");
  if (!lua_isnil(L, 2)) {
    const int size = (int)(sizeof sandbox->metatables / sizeof *sandbox->metatables);
    const void *metatable = lua_topointer(L, 2);
    refuse_field(L, 2, "__gc");
    refuse_field(L, 2, "__close");
    refuse_field(L, 2, "__mode");
    lua_rawgetp(L, LUA_REGISTRYINDEX,
                sandbox->metatables); /* the copies, at index 3; they keep their originals alive */
    int at = 0;
    while (at < size && sandbox->metatables[at] != metatable) at++;
    if (at == size) {
      at = sandbox->next_metatable;
      sandbox->next_metatable = (at + 1) % size;
      sandbox->metatables[at] = NULL;
      lua_pushnil(L);
    } else {
      lua_rawgeti(L, 3, at + 1);
    }
    if (lua_isnil(L, 4) || !is_current(L)) {
      push_copy(L);
      lua_replace(L, 4);
      lua_pushvalue(L, 4);
      lua_rawseti(L, 3, at + 1);
      sandbox->metatables[at] = metatable;
    }
    lua_replace(L, 2);
    lua_settop(L, 2);
  }
  lua_setmetatable(L, 1);
  return 1;
}

void nib_sandbox_forget_metatables(lua_State *L) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  lua_rawgetp(L, LUA_REGISTRYINDEX, sandbox->metatables);
  for (int at = 0; at < (int)(sizeof sandbox->metatables / sizeof *sandbox->metatables); at++) {
    sandbox->metatables[at] = NULL;
    bool is_there = lua_rawgeti(L, -1, at + 1) != LUA_TNIL;
    lua_pop(L, 1);
    if (!is_there) continue;
    lua_pushnil(L);
    lua_rawseti(L, -2, at + 1);
  }
  lua_pop(L, 1);
}

static int get_metatable(lua_State *L) {
  luaL_checkany(L, 1);
  if (!lua_getmetatable(L, 1)) {
    lua_pushnil(L);
    return 1;
  }
  lua_pushliteral(L, "__metatable");
  if (lua_rawget(L, -2) == LUA_TNIL) lua_rawgetp(L, -2, &original_key);
  return 1;
}

/* ---- Text ------------------------------------------------------------------------------------------------------ */

const char *nib_sandbox_tostring(lua_State *L, int index) {
  index = lua_absindex(L, index);
  luaL_checkstack(L, 4, NULL);
  bool has_own = luaL_getmetafield(L, index, "__tostring") != LUA_TNIL;
  if (has_own) lua_pop(L, 1);
  int type = lua_type(L, index);
  if (has_own || type == LUA_TNIL || type == LUA_TBOOLEAN || type == LUA_TNUMBER || type == LUA_TSTRING)
    return luaL_tolstring(L, index, NULL);
  int name = luaL_getmetafield(L, index, "__name");
  if (name == LUA_TSTRING) return lua_tostring(L, -1);
  if (name != LUA_TNIL) lua_pop(L, 1);
  return lua_pushstring(L, lua_typename(L, type));
}

static int to_string(lua_State *L) {
  luaL_checkany(L, 1);
  nib_sandbox_tostring(L, 1);
  return 1;
}

static int print(lua_State *L) {
  const nib_sandbox *sandbox = nib_sandbox_of(L);
  char line[MOST_PRINTED];
  size_t used = 0;
  for (int i = 1, count = lua_gettop(L); i <= count && used < sizeof line; i++) {
    nib_sandbox_step(L);
    nib_sandbox_tostring(L, i);
    size_t length;
    const char *text = lua_tolstring(L, -1, &length);
    if (i > 1) line[used++] = '\t';
    if (length > sizeof line - used) length = sizeof line - used;
    memcpy(line + used, text, length);
    used += length;
    lua_pop(L, 1);
  }
  nib_sandbox_check(L);
  if (sandbox->config.print) sandbox->config.print(sandbox->config.user, line, used);
  return 0;
}

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

/* Ends pcall and xpcall. On the stack are `kept` values, `true`, and the results or the error. */
static int finish_call(lua_State *L, int status, lua_KContext kept) {
  if (status == LUA_OK || status == LUA_YIELD) return lua_gettop(L) - (int)kept;
  nib_sandbox_rethrow(L);
  lua_pushboolean(L, false);
  lua_insert(L, -2);
  return 2;
}

static int protected_call(lua_State *L) {
  luaL_checkany(L, 1);
  lua_pushboolean(L, true);
  lua_insert(L, 1);
  return finish_call(L, lua_pcallk(L, lua_gettop(L) - 2, LUA_MULTRET, 0, 0, finish_call), 0);
}

/* Lua disables hooks in a handler if the error came from a hook. So the handler is called here, after the call has
 * ended, with the hook enabled. */
static int finish_handled(lua_State *L, int status, lua_KContext kept) {
  if (status != LUA_OK && status != LUA_YIELD) {
    nib_sandbox_rethrow(L);
    lua_pushvalue(L, 2);
    lua_insert(L, -2);
    if (lua_pcall(L, 1, 1, 0) != LUA_OK) nib_sandbox_rethrow(L);
  }
  return finish_call(L, status, kept);
}

static int handled_call(lua_State *L) {
  luaL_checktype(L, 2, LUA_TFUNCTION);
  int count = lua_gettop(L) - 2;
  lua_pushboolean(L, true);
  lua_pushvalue(L, 1);
  lua_rotate(L, 3, 2);
  return finish_handled(L, lua_pcallk(L, count, LUA_MULTRET, 0, 2, finish_handled), 2);
}

/* ---- load, collectgarbage -------------------------------------------------------------------------------------- */

static const char *next_piece(lua_State *L, size_t *length) {
  luaL_checkstack(L, 4, NULL);
  lua_pushvalue(L, 1);
  lua_call(L, 0, 1);
  if (lua_type(L, -1) != LUA_TNIL && lua_type(L, -1) != LUA_TSTRING)
    luaL_error(L, "reader function must return a string");
  lua_replace(L, 5); /* so that it is not collected */
  return lua_tolstring(L, 5, length);
}

static int load(lua_State *L) {
  nib_sandbox_text text = { NULL, 0, next_piece };
  bool has_environment = lua_gettop(L) >= 4;
  lua_settop(L, 5);
  if (lua_type(L, 1) == LUA_TSTRING) {
    text.text = lua_tolstring(L, 1, &text.length);
    text.next = NULL;
  } else {
    luaL_checktype(L, 1, LUA_TFUNCTION);
  }
  const char *name = luaL_optstring(L, 2, text.text ? text.text : "=(load)");
  if (!strchr(luaL_optstring(L, 3, "bt"), 't')) return luaL_argerror(L, 3, "a sandbox loads no binary chunks");
  if (nib_sandbox_compile(L, &text, name) != LUA_OK) {
    lua_pushnil(L);
    lua_insert(L, -2);
    return 2;
  }
  lua_pushvalue(L, has_environment ? 4 : lua_upvalueindex(1));
  lua_setupvalue(L, -2, 1);
  return 1;
}

static int collect_garbage(lua_State *L) {
  if (strcmp(luaL_optstring(L, 1, "collect"), "count") != 0)
    return luaL_argerror(L, 1, "expected \"count\" in a sandbox");
  lua_pushnumber(L, (lua_Number)nib_sandbox_of(L)->lua_used / 1024);
  return 1;
}

/* ---- Coroutines ------------------------------------------------------------------------------------------------ */

/* Resumes a coroutine with the arguments on top of L. Pushes its results to L and returns their number; on an error,
 * pushes the error value and returns -1. */
static int resume(lua_State *L, lua_State *co, int arguments) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  int results;
  sandbox->instructions_left -= 20; /* the hook never runs in a coroutine that is short */
  nib_sandbox_step(L);
  if (!lua_checkstack(co, arguments)) {
    lua_pushliteral(L, "too many arguments to resume");
    return -1;
  }
  lua_xmove(L, co, arguments);
  lua_State *before = sandbox->running;
  sandbox->running = co;
  nib_sandbox_watch(co);
  int status = lua_resume(co, L, arguments, &results);
  sandbox->running = before;
  nib_sandbox_watch(L);
  nib_sandbox_rethrow(L);
  bool failed = status != LUA_OK && status != LUA_YIELD;
  if (failed) results = 1;
  if (!lua_checkstack(L, results + 1)) {
    lua_pop(co, results);
    lua_pushliteral(L, "too many results to resume");
    return -1;
  }
  lua_xmove(co, L, results);
  return failed ? -1 : results;
}

static int co_resume(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTHREAD);
  int results = resume(L, lua_tothread(L, 1), lua_gettop(L) - 1);
  lua_pushboolean(L, results >= 0);
  if (results < 0) results = 1;
  lua_insert(L, -(results + 1));
  return results + 1;
}

static int call_wrapped(lua_State *L) {
  lua_State *co = lua_tothread(L, lua_upvalueindex(1));
  int results = resume(L, co, lua_gettop(L));
  if (results >= 0) return results;
  int status = lua_status(co);
  if (status != LUA_OK && status != LUA_YIELD) lua_resetthread(co);
  if (lua_type(L, -1) == LUA_TSTRING) {
    luaL_where(L, 1);
    lua_insert(L, -2);
    lua_concat(L, 2);
  }
  return lua_error(L);
}

static int co_wrap(lua_State *L) {
  luaL_checktype(L, 1, LUA_TFUNCTION);
  lua_State *co = lua_newthread(L);
  lua_pushvalue(L, 1);
  lua_xmove(L, co, 1);
  lua_pushcclosure(L, call_wrapped, 1);
  return 1;
}

/* ---- Mathematics ----------------------------------------------------------------------------------------------- */

/* Needs an argument: without one, Lua's randomseed uses an address as seed and returns it. */
static int random_seed(lua_State *L) {
  luaL_checknumber(L, 1);
  lua_settop(L, 2);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  if (lua_isnil(L, -1)) lua_pop(L, 1);
  lua_call(L, lua_gettop(L) - 1, 0);
  return 0;
}

static void open_math(lua_State *L, int from) {
  static const char *const names[] = { "abs", "acos",       "asin", "atan", "ceil", "cos", "deg",
                                       "exp", "floor",      "fmod", "huge", "log",  "max", "maxinteger",
                                       "min", "mininteger", "modf", "pi",   "rad",  "sin", "sqrt",
                                       "tan", "tointeger",  "type", "ult",  NULL };
  static const luaL_Reg none[] = { { NULL, NULL } };
  nib_sandbox_library(L, "math", none);
  static const char *const own_names[] = { "random", NULL }; /* a wrapper would lose its upvalue, the generator */
  nib_sandbox_take(L, from, names, NIB_SANDBOX_TEXT);
  nib_sandbox_take(L, from, own_names, NIB_SANDBOX_FREE);
  lua_getfield(L, from, "randomseed");
  lua_pushvalue(L, -1);
  lua_pushinteger(L, 0);
  lua_call(L, 1, 0);
  lua_pushcclosure(L, random_seed, 1);
  lua_setfield(L, -2, "randomseed");
  lua_pop(L, 1);
}

/* ---- The module ------------------------------------------------------------------------------------------------ */

/* Removes all fields of a table but those of these names. */
static void keep_fields(lua_State *L, int table, const char *const *names) {
  for (lua_pushnil(L); lua_next(L, table);) {
    const char *const *name = names;
    lua_pop(L, 1);
    while (*name && (lua_type(L, -1) != LUA_TSTRING || strcmp(*name, lua_tostring(L, -1)) != 0)) name++;
    if (*name) continue;
    lua_pushvalue(L, -1);
    lua_pushnil(L);
    lua_rawset(L, table);
  }
}

/* Left out: files; user kernels, which can write anywhere in the process's GPU memory; observers, whose memory has no
 * limit. */
static void open_module(lua_State *L, int globals) {
  static const char *const functions[] = {
    "arange", "available",  "check_faults", "current_stream", "device",       "devices", "empty", "from_bytes",
    "full",   "memory",     "mla",          "page",           "quantization", "randint", "randn", "randperm",
    "range",  "rope_table", "stream",       "synchronize",    "tensor",       "version", "zeros", NULL
  };
  static const char *const methods[] = {
    "allclose",    "amax",      "as_strided", "bytes",   "capture", "clone",       "close", "contiguous",
    "copy",        "dim",       "dot",        "elapsed", "equal",   "expand",      "fill",  "is_contiguous",
    "item",        "max_error", "narrow",     "nodes",   "numel",   "permute",     "query", "record",
    "reinterpret", "replay",    "scope",      "select",  "stride",  "synchronize", "to",    "totable",
    "transpose",   "update",    "view",       "wait",    NULL
  };
  nib_lua_open_module(L, nib_sandbox_of(L)->runtime, NULL);
  keep_fields(L, lua_gettop(L), functions);
  lua_setfield(L, globals, "nibble");
  for (int kind = 0; kind < NIB_LUA_CLASS_COUNT; kind++) {
    luaL_getmetatable(L, lua_pushfstring(L, "nibble.%s", nib_lua_class_names[kind]));
    lua_pushvalue(L, -2);
    lua_setfield(L, -2, "__metatable");
    lua_getfield(L, -1, "methods");
    keep_fields(L, lua_gettop(L), methods);
    lua_pop(L, 3);
  }
}

/* ---- Environments ---------------------------------------------------------------------------------------------- */

static void open_base(lua_State *L, int globals) {
  static const char *const names[] = { "assert", "error",  "ipairs", "next", "pairs",    "rawequal", "rawget",
                                       "rawlen", "rawset", "select", "type", "_VERSION", NULL };
  static const char *const bounded_names[] = { "tonumber", NULL };
  static const luaL_Reg functions[] = { { "collectgarbage", collect_garbage },
                                        { "getmetatable", get_metatable },
                                        { "pcall", protected_call },
                                        { "print", print },
                                        { "setmetatable", set_metatable },
                                        { "tostring", to_string },
                                        { "xpcall", handled_call },
                                        { NULL, NULL } };
  static const char *const coroutine_names[] = { "close", "create", "isyieldable", "running", "status", "yield", NULL };
  static const luaL_Reg coroutine_functions[] = { { "resume", co_resume }, { "wrap", co_wrap }, { NULL, NULL } };
  static const char *const utf8_names[] = { "char", "codepoint", "codes", "len", "offset", NULL };
  static const char *const utf8_values[] = { "charpattern", NULL };
  static const luaL_Reg none[] = { { NULL, NULL } };
  luaL_requiref(L, "_G", luaopen_base, 0);
  int base = lua_gettop(L);
  lua_pushvalue(L, globals);
  luaL_setfuncs(L, functions, 0);
  nib_sandbox_take(L, base, names, NIB_SANDBOX_FREE);
  nib_sandbox_take(L, base, bounded_names, NIB_SANDBOX_TEXT_AND_COUNT);
  luaL_requiref(L, LUA_MATHLIBNAME, luaopen_math, 0);
  lua_pushvalue(L, globals);
  open_math(L, lua_gettop(L) - 1);
  luaL_requiref(L, LUA_COLIBNAME, luaopen_coroutine, 0);
  lua_pushvalue(L, globals);
  nib_sandbox_library(L, "coroutine", coroutine_functions);
  nib_sandbox_take(L, lua_gettop(L) - 2, coroutine_names, NIB_SANDBOX_FREE);
  lua_settop(L, globals);
  luaL_requiref(L, LUA_UTF8LIBNAME, luaopen_utf8, 0);
  lua_pushvalue(L, globals);
  nib_sandbox_library(L, "utf8", none);
  nib_sandbox_take(L, globals + 1, utf8_names, NIB_SANDBOX_TEXT_AND_COUNT);
  nib_sandbox_take(L, globals + 1, utf8_values, NIB_SANDBOX_FREE);
  lua_settop(L, globals);
}

int nib_sandbox_open(lua_State *L) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  lua_newtable(L);
  lua_rawsetp(L, LUA_REGISTRYINDEX, sandbox->metatables);
  lua_newtable(L);
  int globals = lua_gettop(L);
  open_base(L, globals);
  nib_sandbox_open_string(L);
  nib_sandbox_open_table(L);
  open_module(L, globals);
  lua_settop(L, globals);
  return 1;
}

/* Pushes a copy of the table on top of the stack, and of tables in it, so that a script cannot change the libraries of
 * other versions. */
static void push_tables(lua_State *L, int depth) {
  luaL_checkstack(L, 6, NULL);
  lua_newtable(L);
  for (lua_pushnil(L); lua_next(L, -3);) {
    bool is_plain = depth > 0 && lua_type(L, -1) == LUA_TTABLE;
    if (is_plain && lua_getmetatable(L, -1)) {
      lua_pop(L, 1);
      is_plain = false;
    }
    if (is_plain) {
      push_tables(L, depth - 1);
      lua_remove(L, -2);
    }
    lua_pushvalue(L, -2);
    lua_insert(L, -2);
    lua_rawset(L, -4);
  }
}

void nib_sandbox_push_environment(lua_State *L, int globals, int state) {
  lua_pushvalue(L, globals);
  push_tables(L, 3);
  lua_remove(L, -2);
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "_G");
  lua_pushvalue(L, state);
  lua_setfield(L, -2, "state");
  lua_pushvalue(L, -1);
  lua_pushcclosure(L, load, 1);
  lua_setfield(L, -2, "load");
}
