/* The module in a host's own Lua states, with runtimes of the host's: shared by states, several in a process and in
 * threads, closed in any order; tensors between C and Lua; errors as statuses. */
#include <lauxlib.h>
#include <lualib.h>
#include <pthread.h>

#include "host.h"
#include "nibble_lua.h"

static int panics;

static int panic(lua_State *L) {
  (void)L;
  panics++;
  return 0; /* Lua aborts */
}

struct heap {
  long live, calls, fail_at;
};

static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  struct heap *heap = user;
  (void)old_size;
  if (new_size == 0) {
    if (pointer) heap->live--;
    free(pointer);
    return NULL;
  }
  if (heap->fail_at && ++heap->calls >= heap->fail_at) return NULL;
  if (!pointer) heap->live++;
  return realloc(pointer, new_size);
}

static void *allocate_lua(void *user, void *pointer, size_t old_size, size_t new_size) {
  return allocate(user, pointer, old_size, new_size);
}

static lua_State *open_state(nib_runtime *runtime, nib_status expected) {
  lua_State *L = luaL_newstate();
  CHECK(L);
  lua_atpanic(L, panic);
  luaL_openlibs(L);
  CHECK_STATUS(expected, runtime, nib_lua_open(L, runtime));
  CHECK(lua_gettop(L) == 1 && lua_type(L, 1) == (expected == NIB_OK ? LUA_TTABLE : LUA_TSTRING));
  if (expected == NIB_OK) lua_setglobal(L, "nibble");
  return L;
}

static void run(lua_State *L, const char *code) {
  if (luaL_dostring(L, code) == LUA_OK) return;
  fprintf(stderr, "%s: %s\n", code, lua_tostring(L, -1));
  exit(1);
}

static int double_it(lua_State *L) {
  nib_tensor *tensor = nib_lua_to_tensor(L, 1);
  if (!tensor) return luaL_error(L, "double_it: expected a tensor");
  nib_device *device = nib_tensor_device(tensor);
  float values[4];
  if (nib_tensor_read(tensor, values, sizeof values, NIB_UNLIMITED) != NIB_OK) return luaL_error(L, "read");
  for (int i = 0; i < 4; i++) values[i] *= 2;
  nib_tensor *result = NULL;
  const int64_t shape = 4;
  nib_stream *stream = nib_device_default_stream(device);
  if (nib_tensor_create(device, NIB_FLOAT32, 1, &shape, &result) != NIB_OK) return luaL_error(L, "create");
  if (nib_tensor_write(stream, result, values, sizeof values) != NIB_OK) return luaL_error(L, "write");
  nib_lua_push_tensor(L, result);
  nib_tensor_release(result); /* Lua has a handle of its own */
  return 1;
}

static int push_foreign(lua_State *L) {
  nib_lua_push_tensor(L, lua_touserdata(L, lua_upvalueindex(1)));
  return 1;
}

static void shared_runtime(void) {
  struct heap heap = { 0 };
  nib_config config = { .allocate = allocate, .user = &heap, .index_base = 1 };
  nib_runtime *runtime = NULL, *other = NULL;
  OK(NULL, nib_runtime_create(&config, &runtime));
  OK(NULL, nib_runtime_create(NULL, &other));
  lua_State *a = open_state(runtime, NIB_OK), *b = open_state(runtime, NIB_OK), *c = open_state(other, NIB_OK);

  /* Opening again gives the same module; with another runtime it is an error. */
  OK(runtime, nib_lua_open(a, runtime));
  lua_getglobal(a, "nibble");
  CHECK(lua_rawequal(a, -1, -2));
  luaL_requiref(a, "nibble", luaopen_nibble, 0);
  CHECK(lua_rawequal(a, -1, -2));
  lua_settop(a, 0);
  run(a, "assert(require('nibble') == nibble)");
  CHECK_STATUS(NIB_INVALID, runtime, nib_lua_open(a, other));
  CHECK(lua_gettop(a) == 1 && strstr(lua_tostring(a, 1), "another"));
  lua_settop(a, 0);

  /* Tensors go from C to Lua and back, and between the states of a runtime; not between runtimes. */
  lua_register(a, "double_it", double_it);
  run(a,
      "t = double_it(nibble.tensor({1, 2, 3, 4}, {dtype = 'float32', device = 'cpu'})) assert(t[4] == 8 and #t == 4)");
  run(a, "local ok, m = pcall(double_it, {}) assert(not ok and m:find('double_it'), m)");
  run(a, "local t = nibble.tensor(1) t:close() assert(not pcall(double_it, t))");
  lua_getglobal(a, "t");
  nib_tensor *tensor = nib_lua_to_tensor(a, -1);
  CHECK(tensor && nib_device_runtime(nib_tensor_device(tensor)) == runtime);
  lua_State *states[] = { b, c };
  for (int i = 0; i < 2; i++) {
    lua_pushlightuserdata(states[i], tensor);
    lua_pushcclosure(states[i], push_foreign, 1);
    lua_setglobal(states[i], "get");
  }
  run(b, "local t = get() assert(t[4] == 8) t[4] = 5");
  run(a, "nibble.synchronize() assert(t[4] == 5)");
  run(c, "local ok, m = pcall(get) assert(not ok and m:find('runtime'), m)");

  /* States go in any order; the host may close its runtime before them. */
  run(b, "kept = nibble.randn(1000) s = nibble.stream() e = s:record() g = s:capture(function() kept:fill(1) end) "
         "g:replay()");
  lua_close(a);
  run(b, "assert(kept[1] == 1)");
  nib_runtime_close(runtime);
  run(b, "local ok, m = pcall(nibble.zeros, 3) assert(not ok and m:find('closed'), m)");
  CHECK(heap.live > 0);
  lua_close(b);
  CHECK(heap.live == 0);
  lua_State *late = NULL;
  nib_runtime *closed = NULL;
  OK(NULL, nib_runtime_create(NULL, &closed));
  nib_tensor *holder = make(cpu_of(closed), NIB_FLOAT32, 1);
  nib_runtime_close(closed);
  late = open_state(closed, NIB_CLOSED);
  lua_close(late);
  nib_tensor_release(holder);
  lua_close(c);
  nib_runtime_close(other);
}

/* Whatever allocation of Lua's or the runtime's fails, opening is a status, and nothing is lost. */
static void failing_memory(void) {
  int failures = 0;
  for (long n = 1;; n++) {
    struct heap heap = { 0 };
    nib_config config = { .allocate = allocate, .user = &heap };
    nib_runtime *runtime = NULL;
    OK(NULL, nib_runtime_create(&config, &runtime));
    lua_State *L = lua_newstate(allocate_lua, &heap);
    CHECK(L);
    lua_atpanic(L, panic);
    heap.calls = 0;
    heap.fail_at = n;
    nib_status status = nib_lua_open(L, runtime);
    heap.fail_at = 0;
    CHECK(status == NIB_OK || status == NIB_MEMORY);
    failures += status != NIB_OK;
    lua_settop(L, 0);
    OK(runtime, nib_lua_open(L, runtime)); /* the next one works */
    lua_close(L);
    nib_runtime_close(runtime);
    CHECK(heap.live == 0);
    if (status == NIB_OK) break;
  }
  CHECK(failures > 50);
}

static void *in_a_thread(void *unused) {
  (void)unused;
  for (int i = 0; i < 5; i++) {
    nib_runtime *runtime = NULL;
    OK(NULL, nib_runtime_create(&(nib_config){ .threads = 2, .index_base = 1 }, &runtime));
    lua_State *a = open_state(runtime, NIB_OK), *b = open_state(runtime, NIB_OK);
    run(a, "x = nibble.arange(100000, {dtype = 'float32'}) assert(x[100000] == 99999)");
    run(b, "x = nibble.randn(100000, {seed = 1}) assert(x:equal(nibble.randn(100000, {seed = 1})))");
    lua_close(a);
    lua_close(b);
    nib_runtime_close(runtime);
  }
  return NULL;
}

int main(void) {
  shared_runtime();
  failing_memory();
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, in_a_thread, NULL) == 0);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  CHECK(panics == 0);
  return 0;
}
