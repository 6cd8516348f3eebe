/* Runs every_function.lua, whose memory fails as it says: Lua's own and the runtime's, which the module takes from
 * realloc. every_function FILE.lua SCRATCH [COUNT]      a third word prints how much was made to fail */
#include <lauxlib.h>
#include <lualib.h>

#include "host.h"
#include "nibble_lua.h"

static struct {
  bool armed, alone;
  long left, failed;
  long live; /* the runtime's blocks */
  long skipped;
} heap;

static bool must_fail(void) {
  if (!heap.armed || --heap.left > 0 || (heap.alone && heap.left < 0)) return false;
  heap.failed++;
  return true;
}

/* The linker sends the module's calls here (--wrap). */
void *__real_realloc(void *pointer, size_t size);
void *__wrap_realloc(void *pointer, size_t size) {
  if (must_fail()) return NULL;
  void *fresh = __real_realloc(pointer, size);
  heap.live += fresh && !pointer;
  return fresh;
}

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size) {
  if (must_fail()) return NULL;
  void *fresh = __real_malloc(size);
  heap.live += fresh != NULL;
  return fresh;
}

void __real_free(void *pointer);
void __wrap_free(void *pointer) {
  heap.live -= pointer != NULL;
  __real_free(pointer);
}

/* Lua relies on it that a block can be made smaller. */
static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user;
  if (new_size == 0) {
    __real_free(pointer);
    return NULL;
  }
  if ((!pointer || new_size > old_size) && must_fail()) return NULL;
  return __real_realloc(pointer, new_size);
}

static int arm(lua_State *L) {
  heap.left = luaL_checkinteger(L, 1), heap.alone = lua_toboolean(L, 2), heap.failed = 0;
  heap.armed = true;
  return 0;
}

static int disarm(lua_State *L) {
  heap.armed = false;
  lua_pushinteger(L, heap.failed);
  return 1;
}

static int live(lua_State *L) {
  lua_pushinteger(L, heap.live);
  return 1;
}

/* Without memory for the call, Lua skips a finalizer, warns, and frees the object all the same. */
static void warn(void *user, const char *message, int to_be_continued) {
  (void)user, (void)to_be_continued;
  heap.skipped += strstr(message, "error in ") != NULL;
}

static int skipped(lua_State *L) {
  lua_pushinteger(L, heap.skipped);
  return 1;
}

int main(int argc, char **argv) {
  CHECK(argc > 2);
  lua_State *L = lua_newstate(allocate, NULL);
  CHECK(L);
  lua_setwarnf(L, warn, NULL);
  luaL_openlibs(L);
  luaL_requiref(L, "nibble", luaopen_nibble, 0);
  luaL_newlib(L, ((luaL_Reg[]){
                   { "arm", arm }, { "disarm", disarm }, { "live", live }, { "skipped", skipped }, { NULL, NULL } }));
  lua_setglobal(L, "faults");
  bool well = luaL_loadfile(L, argv[1]) == LUA_OK;
  lua_pushstring(L, argv[2]);
  well = well && lua_pcall(L, 1, 1, 0) == LUA_OK;
  if (!well || argc > 3) fprintf(well ? stdout : stderr, "%s\n", lua_tostring(L, -1));
  lua_close(L);
  CHECK(!well || heap.live == 0);
  return !well;
}
