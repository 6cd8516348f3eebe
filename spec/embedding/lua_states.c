/* Lua states that come and go in one process, several at once and in two threads, each with its own module. Arguments:
 * package.cpath. */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <pthread.h>

#include "host.h"

static const char script[] =
  "local nibble = require('nibble')\n"
  "local s = nibble.stream()\n"
  "local t = nibble.randn(1000, { seed = 1 })\n"
  "local graph = s:capture(function() t:copy(nibble.arange(1000)) end)\n"
  "graph:replay()\n"
  "assert(t[1000] == 999)\n"
  "assert(nibble.randn(8):equal(nibble.randn(8, { seed = 0 })))\n" /* a counter of its own in each state */
  "KEPT = { graph, s, t, nibble.randn(100000) }\n";

static const char *cpath;

static lua_State *start(void) {
  lua_State *L = luaL_newstate();
  CHECK(L);
  luaL_openlibs(L);
  lua_getglobal(L, "package");
  lua_pushstring(L, cpath);
  lua_setfield(L, -2, "cpath");
  lua_pop(L, 1);
  if (luaL_dostring(L, script) != LUA_OK) {
    fprintf(stderr, "%s\n", lua_tostring(L, -1));
    exit(1);
  }
  return L;
}

static void *many(void *unused) {
  (void)unused;
  for (int i = 0; i < 50; i++) lua_close(start());
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  cpath = argv[1];
  lua_State *a = start(), *b = start(), *c = start();
  lua_close(b);
  CHECK(luaL_dostring(a, "assert(KEPT[3][1000] == 999)") == LUA_OK);
  lua_close(a);
  CHECK(luaL_dostring(c, "KEPT[1]:replay() assert(KEPT[3][1] == 0)") == LUA_OK);
  lua_close(c);
  many(NULL);
  long before = resident();
  for (int i = 0; i < 6; i++) many(NULL);
  CHECK(resident() - before < 1 << 20 || getenv("ASAN_OPTIONS")); /* a sanitizer keeps what was freed for a while */
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, many, NULL) == 0);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  return 0;
}
