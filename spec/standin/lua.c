/* The Lua module `standin`: the stand-in's own functions, for specs. require fails when no stand-in is loaded in the
 * process. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include <lauxlib.h>
#include <lua.h>

#define NAMES(X) X(fail) X(fired) X(calls) X(misuses) X(misuse) X(failed) X(live)

/* The library of this name that is in the process already; it is found each time, so that nothing is kept here. */
static void *find(lua_State *L, const char *name) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void *function = library ? dlsym(library, name) : NULL;
  if (library) dlclose(library);
  if (!function) luaL_error(L, "standin: no stand-in driver is loaded (%s not found)", name);
  return function;
}

/* fail(name, count, result): the count-th call of name returns result; a negative count: all from there on. fail(): no
 * more. */
static int l_fail(lua_State *L) {
  void (*fail)(const char *, int64_t, int);
  *(void **)&fail = find(L, "nib_standin_fail");
  fail(luaL_optstring(L, 1, NULL), luaL_optinteger(L, 2, 1), (int)luaL_optinteger(L, 3, 999));
  return 0;
}

static int number(lua_State *L, const char *name) {
  int64_t (*function)(void);
  *(void **)&function = find(L, name);
  lua_pushinteger(L, function());
  return 1;
}

static int l_fired(lua_State *L) { return number(L, "nib_standin_fired"); }
static int l_calls(lua_State *L) { return number(L, "nib_standin_calls"); }
static int l_misuses(lua_State *L) { return number(L, "nib_standin_misuses"); }

static int text(lua_State *L, const char *name) {
  const char *(*function)(void);
  *(void **)&function = find(L, name);
  lua_pushstring(L, function());
  return 1;
}

static int l_misuse(lua_State *L) { return text(L, "nib_standin_misuse"); }
static int l_failed(lua_State *L) { return text(L, "nib_standin_failed"); }

static int l_live(lua_State *L) {
  int64_t (*live)(const char *);
  *(void **)&live = find(L, "nib_standin_live");
  lua_pushinteger(L, live(luaL_checkstring(L, 1)));
  return 1;
}

__attribute__((visibility("default"))) int luaopen_standin(lua_State *L) {
  static const luaL_Reg functions[] = {
#define X(name) { #name, l_##name },
    NAMES(X)
#undef X
      { NULL, NULL },
  };
  luaL_newlib(L, functions);
  return 1;
}
