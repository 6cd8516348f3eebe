/* Completes names at the prompt. */
#include <ctype.h>
#include <lauxlib.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"

#define MOST_INDEXES 16 /* __index tables followed from one value; a cycle ends here */

static const char *const keywords[] = { "and",      "break",  "do",   "else", "elseif", "end",  "false", "for",
                                        "function", "goto",   "if",   "in",   "local",  "nil",  "not",   "or",
                                        "repeat",   "return", "then", "true", "until",  "while" };

/* A search for names that begin with a prefix. */
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
    lua_pushboolean(L, true);
    lua_rawset(L, search->found);
  }
}

/* Replaces the value on top of the stack by its __index. False: it has none. */
static bool follow_index(lua_State *L) {
  if (luaL_getmetafield(L, -1, "__index") == LUA_TNIL) return false;
  lua_replace(L, -2);
  return true;
}

/* Adds the names in the table `methods` of the value on top of the stack, which holds the methods of a userdata. */
static void add_methods(lua_State *L, const struct search *search) {
  int type = luaL_getmetafield(L, -1, "methods");
  if (type == LUA_TTABLE) add_keys(L, search);
  if (type != LUA_TNIL) lua_pop(L, 1);
}

/* Adds the names that can be indexed in the value on top of the stack, and pops the value. */
static void add_members(lua_State *L, const struct search *search) {
  int seen = 0;
  do {
    if (lua_istable(L, -1)) add_keys(L, search);
    add_methods(L, search);
  } while (++seen < MOST_INDEXES && follow_index(L) && lua_istable(L, -1));
  lua_pop(L, 1);
}

static void add_keywords(lua_State *L, const struct search *search) {
  for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++)
    if (strncmp(keywords[i], search->prefix, search->length) == 0) {
      lua_pushboolean(L, true);
      lua_setfield(L, search->found, keywords[i]);
    }
}

/* Replaces the value on top of the stack by its member `name`, or by nil. Calls no metamethod. */
static void get_member(lua_State *L, const char *name, size_t length) {
  for (int i = 0; i < MOST_INDEXES; i++) {
    if (lua_istable(L, -1)) {
      lua_pushlstring(L, name, length);
      if (lua_rawget(L, -2) != LUA_TNIL) {
        lua_replace(L, -2);
        return;
      }
      lua_pop(L, 1);
    }
    if (!follow_index(L)) break;
  }
  lua_pop(L, 1);
  lua_pushnil(L);
}

/* Pushes the value that a path of names leads to, beginning at the globals. Each name is followed by `.` or `:`. Pushes
 * nil after `..`, a number, a call or an index. */
static void push_owner(lua_State *L, const char *path, size_t length) {
  lua_pushglobaltable(L);
  for (size_t at = 0, end; at < length; at = end + 1) {
    for (end = at; is_name_part(path[end]);) end++;
    if (is_name(path + at, end - at)) {
      get_member(L, path + at, end - at);
      continue;
    }
    lua_pop(L, 1);
    lua_pushnil(L);
    return;
  }
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
  size_t last = length; /* the begin of the last name, which may be empty, and of the path before it */
  while (last > 0 && is_name_part(line[last - 1])) last--;
  size_t first = last;
  while (first > 0 && (is_name_part(line[first - 1]) || line[first - 1] == '.' || line[first - 1] == ':')) first--;
  lua_newtable(L);
  struct search search = { line + last, length - last, last > first && line[last - 1] == ':', lua_gettop(L) };
  if (last == first && search.length > 0) add_keywords(L, &search);
  push_owner(L, line + first, last - first);
  add_members(L, &search);
  sort_found(L);
  lua_pushinteger(L, (lua_Integer)search.length);
  return 2;
}
