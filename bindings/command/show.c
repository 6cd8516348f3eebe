/* Values as the prompt prints them. */
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

/* Prints a value as tostring does, and the entries of a table without __tostring. *left is the number of entries that
 * may still be printed. */
static void show(lua_State *L, int index, int level, int *left) {
  luaL_checkstack(L, 8, NULL);
  int top = lua_gettop(L);
  bool plain = lua_istable(L, index) && luaL_getmetafield(L, index, "__tostring") == LUA_TNIL;
  if (!plain || level >= SHOWN_LEVELS) {
    size_t length;
    if (plain) {
      lua_pushnil(L);
      fputs(lua_next(L, index) ? "{...}" : "{}", stdout);
    } else if (level > 0 && lua_type(L, index) == LUA_TSTRING) {
      const char *text = lua_tolstring(L, index, &length);
      show_string(text, length);
    } else {
      const char *text = luaL_tolstring(L, index, &length);
      nib_put_visible(stdout, text, length, true, true); /* keep the colours of nibble.show */
    }
    lua_settop(L, top);
    return;
  }
  const char *separator = "";
  lua_Integer count = 0;
  putchar('{');
  for (; lua_rawgeti(L, index, count + 1) != LUA_TNIL && *left > 0; count++) {
    fputs(separator, stdout);
    separator = ", ";
    --*left;
    show(L, lua_gettop(L), level + 1, left);
    lua_pop(L, 1);
  }
  lua_pop(L, 1);
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (lua_isinteger(L, -2) && lua_tointeger(L, -2) >= 1 && lua_tointeger(L, -2) <= count) continue;
    fputs(separator, stdout);
    separator = ", ";
    if (--*left < 0) {
      fputs("...", stdout);
      lua_pop(L, 2);
      break;
    }
    int value = lua_gettop(L);
    if (is_name(L, value - 1)) {
      printf("%s = ", lua_tostring(L, value - 1));
    } else {
      putchar('[');
      show(L, value - 1, SHOWN_LEVELS, left);
      fputs("] = ", stdout);
    }
    show(L, value, level + 1, left);
  }
  putchar('}');
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
