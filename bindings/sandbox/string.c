/* Lua's library `string`, with bounds on its arguments. The functions with patterns are in match.c. */
#include <lualib.h>
#include <string.h>

#include "sandbox.h"

#define MOST_FORMATTED 50 /* formatting a value can take microseconds */

/* Converts tables, functions and the like to text without addresses, and then calls Lua's own function. */
static int string_format(lua_State *L) {
  nib_sandbox_check_arguments(L);
  if (lua_gettop(L) > MOST_FORMATTED + 1)
    return luaL_error(L, "expected at most %d values to 'format', got more", MOST_FORMATTED);
  size_t length;
  const char *at = luaL_checklstring(L, 1, &length), *end = at + length; /* it may contain zero bytes */
  for (; (at = memchr(at, '%', (size_t)(end - at))) != NULL; at++) {
    at += 1 + strspn(at + 1, "-+ #0123456789.");
    if (at == end) break;
    if (*at == 'p') return luaL_error(L, "invalid conversion '%%p' to 'format' (a sandbox shows no addresses)");
  }
  for (int i = 2, count = lua_gettop(L); i <= count; i++) {
    int type = lua_type(L, i);
    if (type != LUA_TTABLE && type != LUA_TFUNCTION && type != LUA_TUSERDATA && type != LUA_TTHREAD) continue;
    nib_sandbox_tostring(L, i);
    lua_replace(L, i);
  }
  return nib_sandbox_original(L);
}

static int string_rep(lua_State *L) {
  size_t length, gap;
  const char *text = luaL_checklstring(L, 1, &length);
  lua_Integer count = luaL_checkinteger(L, 2);
  const char *separator = luaL_optlstring(L, 3, "", &gap);
  if (count <= 0 || length + gap == 0) {
    lua_pushliteral(L, "");
    return 1;
  }
  size_t most = nib_sandbox_of(L)->lua_block;
  if (length + gap > most || (lua_Unsigned)count > most / (length + gap) + 1)
    return luaL_error(L, "resulting string too large");
  size_t total = (size_t)count * (length + gap) - gap, done = length + gap;
  luaL_Buffer result;
  char *out = luaL_buffinitsize(L, &result, total + gap); /* room for a separator at the end, which is dropped */
  memcpy(out, text, length);
  memcpy(out + length, separator, gap);
  while (done < total + gap) {
    size_t piece = total + gap - done < done ? total + gap - done : done;
    memcpy(out + done, out, piece);
    done += piece;
  }
  luaL_pushresultsize(&result, total);
  return 1;
}

void nib_sandbox_open_string(lua_State *L) {
  static const luaL_Reg functions[] = { { "rep", string_rep }, { NULL, NULL } };
  static const char *const names[] = { "byte", "len", "lower", "reverse", "sub", "upper", NULL };
  static const char *const text_names[] = { "char", NULL };
  static const char *const bounded_names[] = { "pack", "packsize", "unpack", NULL };
  luaL_requiref(L, LUA_STRLIBNAME, luaopen_string, 0);
  int from = lua_gettop(L);
  lua_pushvalue(L, from - 1);
  nib_sandbox_library(L, "string", functions);
  luaL_setfuncs(L, nib_sandbox_patterns, 0);
  nib_sandbox_take(L, from, names, NIB_SANDBOX_FREE);
  nib_sandbox_take(L, from, text_names, NIB_SANDBOX_TEXT);
  nib_sandbox_take(L, from, bounded_names, NIB_SANDBOX_TEXT_AND_COUNT);
  lua_getfield(L, from, "format");
  lua_pushcclosure(L, string_format, 1);
  lua_setfield(L, -2, "format");

  /* The metatable of strings. Scripts get copies of its __index table, never the table itself. It has no arithmetic,
   * which in Lua's own converts text of any length to a number in one instruction. */
  lua_pushliteral(L, "");
  lua_newtable(L);
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "__index");
  lua_pushboolean(L, false);
  lua_setfield(L, -2, "__metatable");
  lua_setmetatable(L, -2);
  lua_settop(L, from - 1);
}
