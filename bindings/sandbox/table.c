/* Lua's library `table` with a check of the clock in every loop. With metamethods of the host's objects, a loop could
 * run for ever without an instruction of Lua, and so without the hook. */
#include <limits.h>
#include <lualib.h>

#include "sandbox.h"

static void check_table(lua_State *L, int index) {
  if (lua_type(L, index) == LUA_TTABLE || lua_type(L, index) == LUA_TUSERDATA) return;
  luaL_checktype(L, index, LUA_TTABLE);
}

/* destination[to] = source[from]. */
static void move_one(lua_State *L, int source, lua_Integer from, int destination, lua_Integer to) {
  nib_sandbox_step(L);
  lua_geti(L, source, from);
  lua_seti(L, destination, to);
}

static int table_insert(lua_State *L) {
  check_table(L, 1);
  lua_Integer end = (lua_Integer)((lua_Unsigned)luaL_len(L, 1) + 1), position = end;
  int count = lua_gettop(L);
  if (count != 2 && count != 3) return luaL_error(L, "wrong number of arguments to 'insert'");
  if (count == 3) {
    position = luaL_checkinteger(L, 2);
    luaL_argcheck(L, (lua_Unsigned)position - 1u < (lua_Unsigned)end, 2, "position out of bounds");
    for (lua_Integer i = end; i > position; i--) move_one(L, 1, i - 1, 1, i);
  }
  lua_seti(L, 1, position);
  return 0;
}

static int table_remove(lua_State *L) {
  check_table(L, 1);
  lua_Integer size = luaL_len(L, 1), position = luaL_optinteger(L, 2, size);
  if (position != size)
    luaL_argcheck(L, (lua_Unsigned)position - 1u <= (lua_Unsigned)size, 2, "position out of bounds");
  lua_geti(L, 1, position);
  for (; position < size; position++) move_one(L, 1, position + 1, 1, position);
  lua_pushnil(L);
  lua_seti(L, 1, position);
  return 1;
}

static int table_move(lua_State *L) {
  lua_Integer first = luaL_checkinteger(L, 2), last = luaL_checkinteger(L, 3), to = luaL_checkinteger(L, 4);
  int destination = lua_isnoneornil(L, 5) ? 1 : 5;
  check_table(L, 1);
  check_table(L, destination);
  if (last >= first) {
    luaL_argcheck(L, first > 0 || last < LUA_MAXINTEGER + first, 3, "too many elements to move");
    luaL_argcheck(L, to <= LUA_MAXINTEGER - (last - first), 4, "destination wrap around");
    bool upwards = to > last || to <= first || (destination != 1 && !lua_compare(L, 1, destination, LUA_OPEQ));
    for (lua_Integer i = 0, count = last - first; i <= count; i++) {
      lua_Integer at = upwards ? i : count - i;
      move_one(L, 1, first + at, destination, to + at);
    }
  }
  lua_pushvalue(L, destination);
  return 1;
}

static int table_concat(lua_State *L) {
  check_table(L, 1);
  lua_Integer size = luaL_len(L, 1);
  size_t length;
  const char *separator = luaL_optlstring(L, 2, "", &length);
  lua_Integer first = luaL_optinteger(L, 3, 1), last = luaL_optinteger(L, 4, size);
  lua_settop(L, 4);
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  for (lua_Integer i = first; i <= last; i++) {
    nib_sandbox_step(L);
    lua_geti(L, 1, i);
    if (!lua_isstring(L, -1)) return luaL_error(L, "invalid value (at index %I) in table for 'concat'", (LUAI_UACINT)i);
    luaL_addvalue(&text);
    if (i == last) break; /* i + 1 could overflow */
    luaL_addlstring(&text, separator, length);
  }
  luaL_pushresult(&text);
  return 1;
}

static int table_unpack(lua_State *L) {
  lua_Integer first = luaL_optinteger(L, 2, 1), last = lua_isnoneornil(L, 3) ? luaL_len(L, 1) : luaL_checkinteger(L, 3);
  if (first > last) return 0;
  lua_Unsigned count = (lua_Unsigned)last - (lua_Unsigned)first;
  if (count >= INT_MAX - 1 || !lua_checkstack(L, (int)count + 1)) return luaL_error(L, "too many results to unpack");
  for (lua_Unsigned i = 0; i <= count; i++) {
    nib_sandbox_step(L);
    lua_geti(L, 1, (lua_Integer)((lua_Unsigned)first + i));
  }
  return (int)count + 1;
}

/* The order that table_sort gives to Lua's sort: the script's function, the first upvalue, or `<`. */
static int compare(lua_State *L) {
  bool less;
  nib_sandbox_step(L);
  if (lua_isnil(L, lua_upvalueindex(1))) {
    for (int i = 1; i <= 2; i++) /* the time to compare strings depends on their length */
      if (lua_type(L, i) == LUA_TSTRING) nib_sandbox_steps(L, lua_rawlen(L, i) / 64);
    less = lua_compare(L, 1, 2, LUA_OPLT);
  } else {
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, 2, 1);
    less = lua_toboolean(L, -1);
  }
  lua_pushboolean(L, less);
  return 1;
}

static int table_sort(lua_State *L) {
  lua_settop(L, 2);
  if (!lua_isnil(L, 2)) luaL_checktype(L, 2, LUA_TFUNCTION);
  lua_pushcclosure(L, compare, 1);
  return nib_sandbox_original(L);
}

void nib_sandbox_open_table(lua_State *L) {
  static const luaL_Reg functions[] = { { "concat", table_concat }, { "insert", table_insert }, { "move", table_move },
                                        { "remove", table_remove }, { "unpack", table_unpack }, { NULL, NULL } };
  static const char *const names[] = { "pack", NULL };
  luaL_requiref(L, LUA_TABLIBNAME, luaopen_table, 0);
  int from = lua_gettop(L);
  lua_pushvalue(L, from - 1);
  nib_sandbox_library(L, "table", functions);
  nib_sandbox_take(L, from, names, NIB_SANDBOX_FREE);
  lua_getfield(L, from, "sort");
  lua_pushcclosure(L, table_sort, 1);
  lua_setfield(L, -2, "sort");
  lua_settop(L, from - 1);
}
