/* Prints values at the prompt. */
#include <ctype.h>
#include <lauxlib.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "../visible.h"
#include "command.h"

#define SHOWN_ENTRIES 40 /* of a table and the tables in it, together */
#define SHOWN_LEVELS  2

static void show_string(const char *text, size_t length) {
  putchar('"');
  for (size_t i = 0; i < length;) {
    size_t plain = 0; /* bytes up to the next one to escape */
    while (i + plain < length && !strchr("\n\"\\", text[i + plain])) plain++;
    nib_put_visible(stdout, text + i, plain, false, false);
    i += plain;
    if (i < length && text[i]) printf("\\%c", text[i] == '\n' ? 'n' : text[i]);
    else if (i < length) fputs("\\x00", stdout);
    i++;
  }
  putchar('"');
}

static bool is_name(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TSTRING) return false;
  const char *name = lua_tostring(L, index);
  if (!isalpha((unsigned char)*name) && *name != '_') return false;
  for (; *name; name++)
    if (!isalnum((unsigned char)*name) && *name != '_') return false;
  return true;
}

static void show(lua_State *L, int index, int level, int *left);

/* Prints a value as tostring does; a string inside a table is quoted. */
static void show_text(lua_State *L, int index, bool quoted) {
  size_t length;
  if (quoted && lua_type(L, index) == LUA_TSTRING) {
    const char *text = lua_tolstring(L, index, &length);
    show_string(text, length);
    return;
  }
  const char *text = luaL_tolstring(L, index, &length);
  nib_put_visible(stdout, text, length, true, true); /* keep the colours of nibble.show */
  lua_pop(L, 1);
}

/* Prints the elements 1, 2, ... of a table while *left allows it. Returns their number. */
static lua_Integer show_elements(lua_State *L, int table, int level, int *left) {
  lua_Integer count = 0;
  for (; lua_rawgeti(L, table, count + 1) != LUA_TNIL && *left > 0; count++) {
    if (count > 0) fputs(", ", stdout);
    --*left;
    show(L, lua_gettop(L), level + 1, left);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  return count;
}

static void show_key(lua_State *L, int index, int *left) {
  if (is_name(L, index)) {
    printf("%s = ", lua_tostring(L, index));
    return;
  }
  putchar('[');
  show(L, index, SHOWN_LEVELS, left);
  fputs("] = ", stdout);
}

/* Prints the entries of a table except its first `count` elements. */
static void show_fields(lua_State *L, int table, int level, lua_Integer count, int *left) {
  const char *separator = count > 0 ? ", " : "";
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) {
    int value = lua_gettop(L), key = value - 1;
    if (lua_isinteger(L, key) && lua_tointeger(L, key) >= 1 && lua_tointeger(L, key) <= count) continue;
    fputs(separator, stdout);
    separator = ", ";
    if (--*left < 0) {
      fputs("...", stdout);
      lua_pop(L, 2);
      return;
    }
    show_key(L, key, left);
    show(L, value, level + 1, left);
  }
}

/* Prints a value as tostring does, or the entries of a table without __tostring. *left is the number of entries that
 * may still be printed. */
static void show(lua_State *L, int index, int level, int *left) {
  luaL_checkstack(L, 8, NULL);
  int top = lua_gettop(L);
  if (!lua_istable(L, index) || luaL_getmetafield(L, index, "__tostring") != LUA_TNIL) {
    show_text(L, index, level > 0);
  } else if (level >= SHOWN_LEVELS) {
    lua_pushnil(L);
    fputs(lua_next(L, index) ? "{...}" : "{}", stdout);
  } else {
    putchar('{');
    lua_Integer count = show_elements(L, index, level, left);
    show_fields(L, index, level, count, left);
    putchar('}');
  }
  lua_settop(L, top);
}

int nib_command_show(lua_State *L) {
  int count = lua_gettop(L);
  for (int i = 1; i <= count; i++) {
    int left = SHOWN_ENTRIES;
    if (i > 1) putchar('\t');
    show(L, i, 0, &left);
  }
  putchar('\n');
  return 0;
}
