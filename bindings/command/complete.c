/* Completes names at the prompt. */
#include <ctype.h>
#include <lauxlib.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"

#define MAX_INDEX_CHAIN 16 /* __index tables followed from one value; a cycle ends here */

static const char *const keywords[] = { "and",      "break",  "do",   "else", "elseif", "end",  "false", "for",
                                        "function", "goto",   "if",   "in",   "local",  "nil",  "not",   "or",
                                        "repeat",   "return", "then", "true", "until",  "while" };

struct search {
  const char *prefix;
  size_t length;
  bool callable_only;
  int found; /* stack index of the set of names found */
};

static bool is_name_part(char c) { return isalnum((unsigned char)c) || c == '_'; }

static bool is_name(const char *text, size_t length) {
  if (length == 0 || isdigit((unsigned char)text[0])) return false;
  for (size_t i = 0; i < length; i++)
    if (!is_name_part(text[i])) return false;
  return true;
}

/* Adds the string keys of the table on top of the stack. */
static void add_keys(lua_State *L, const struct search *search) {
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) continue;
    size_t length;
    const char *name = lua_tolstring(L, -2, &length);
    if (length < search->length || memcmp(name, search->prefix, search->length) != 0 || !is_name(name, length))
      continue;
    /* Names that begin with an underscore are private: offer them only after one is typed. */
    if (search->length == 0 && name[0] == '_') continue;
    if (search->callable_only && !lua_isfunction(L, -1)) continue;
    lua_pushvalue(L, -2);
    lua_pushboolean(L, 1);
    lua_rawset(L, search->found);
  }
}

/* Adds the names that can be indexed in the value on top of the stack, and pops the value. */
static void add_members(lua_State *L, const struct search *search) {
  for (int step = 0; step < MAX_INDEX_CHAIN; step++) {
    if (lua_istable(L, -1)) add_keys(L, search);
    if (!lua_getmetatable(L, -1)) break;
    lua_pushliteral(L, "methods");
    if (lua_rawget(L, -2) == LUA_TTABLE) add_keys(L, search);
    lua_pop(L, 1);
    lua_pushliteral(L, "__index");
    lua_rawget(L, -2);
    lua_replace(L, -3); /* go on with __index in place of the value */
    lua_pop(L, 1);
    if (!lua_istable(L, -1)) break;
  }
  lua_pop(L, 1);
}

/* Replaces the value on top of the stack by its member NAME, or by nil. Calls no metamethod. */
static void get_member(lua_State *L, const char *name, size_t length) {
  for (int step = 0; step < MAX_INDEX_CHAIN; step++) {
    if (lua_istable(L, -1)) {
      lua_pushlstring(L, name, length);
      if (lua_rawget(L, -2) != LUA_TNIL) {
        lua_replace(L, -2);
        return;
      }
      lua_pop(L, 1);
    }
    if (!lua_getmetatable(L, -1)) break;
    lua_pushliteral(L, "__index");
    lua_rawget(L, -2);
    lua_replace(L, -3);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  lua_pushnil(L);
}

static int compare_names(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Replaces the set on top of the stack by the sorted array of its keys. */
static void sort_found(lua_State *L) {
  size_t count = 0;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) count++;
  const char **names = lua_newuserdatauv(L, sizeof *names * (count + 1), 0); /* the set keeps them alive */
  size_t at = 0;
  for (lua_pushnil(L); lua_next(L, -3); lua_pop(L, 1)) names[at++] = lua_tostring(L, -2);
  qsort(names, count, sizeof *names, compare_names);
  lua_createtable(L, count < INT_MAX ? (int)count : INT_MAX, 0);
  for (at = 0; at < count; at++) {
    lua_pushstring(L, names[at]);
    lua_rawseti(L, -2, (lua_Integer)at + 1);
  }
  lua_replace(L, -3);
  lua_pop(L, 1);
}

int nib_command_complete(lua_State *L) {
  size_t length;
  const char *line = luaL_checklstring(L, 1, &length);
  /* The longest NAME.NAME:NAME that ends the line; the last name may be empty. */
  size_t start = length;
  while (start > 0 && (is_name_part(line[start - 1]) || line[start - 1] == '.' || line[start - 1] == ':')) start--;
  size_t last = length;
  while (last > start && is_name_part(line[last - 1])) last--;

  lua_newtable(L);
  struct search search = { line + last, length - last, last > start && line[last - 1] == ':', lua_gettop(L) };
  lua_pushglobaltable(L);
  if (last == start) {
    if (search.length > 0)
      for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++)
        if (strncmp(keywords[i], search.prefix, search.length) == 0) {
          lua_pushboolean(L, 1);
          lua_setfield(L, search.found, keywords[i]);
        }
    add_members(L, &search);
  } else {
    for (size_t at = start; at < last;) {
      size_t end = at;
      while (is_name_part(line[end])) end++;
      /* Do not complete after `..`, a number, a call or an index. */
      if (!is_name(line + at, end - at)) {
        lua_pop(L, 1);
        lua_pushnil(L);
        break;
      }
      get_member(L, line + at, end - at);
      at = end + 1;
    }
    add_members(L, &search);
  }
  sort_found(L);
  lua_pushinteger(L, (lua_Integer)search.length);
  return 2;
}
