/* Sandboxes as their host sees them: calls with values, statuses, extensions, reloading, cancelling, failing memory. */
#include <lauxlib.h>
#include <pthread.h>
#include <time.h>

#include "gate.h"
#include "nibble_lua.h"

#define LOAD(sandbox, code) nib_sandbox_load(sandbox, "test", code, strlen(code), 60000000)
#define CHECK_SCRIPT(expected, sandbox, call)                                                                       \
  do {                                                                                                              \
    nib_status status_ = (call);                                                                                    \
    if (status_ != (expected)) {                                                                                    \
      fprintf(stderr, "%s:%d: %s: expected %s, got %s: %s\n", __FILE__, __LINE__, #call, nib_status_name(expected), \
              nib_status_name(status_), nib_sandbox_error(sandbox));                                                \
      exit(1);                                                                                                      \
    }                                                                                                               \
  } while (0)

struct heap {
  long live, bytes, calls, fail_at;
  bool once; /* only that one fails */
};

static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  struct heap *heap = user;
  size_t *block = pointer ? (size_t *)pointer - 2 : NULL;
  CHECK(block ? block[0] == old_size : old_size == 0);
  if (new_size == 0) {
    if (block) heap->live--, heap->bytes -= (long)old_size;
    free(block);
    return NULL;
  }
  if (heap->fail_at && ++heap->calls >= heap->fail_at && (!heap->once || heap->calls == heap->fail_at)) return NULL;
  block = realloc(block, new_size + 16);
  CHECK(block);
  if (!pointer) heap->live++;
  heap->bytes += (long)new_size - (long)old_size;
  block[0] = new_size;
  return block + 2;
}

static nib_sandbox *create(const nib_sandbox_config *config) {
  nib_sandbox *sandbox = NULL;
  CHECK(nib_sandbox_create(config, &sandbox) == NIB_OK && sandbox);
  return sandbox;
}

/* ---- Calls ---- */

static int two_numbers(lua_State *L, void *user) {
  const int *numbers = user;
  lua_pushinteger(L, numbers[0]);
  lua_pushinteger(L, numbers[1]);
  return 2;
}

static void take_sum(lua_State *L, int count, void *user) {
  int *numbers = user;
  numbers[2] = count;
  numbers[3] = (int)lua_tointeger(L, 1);
}

static int bad_arguments(lua_State *L, void *user) {
  (void)user;
  return luaL_error(L, "no arguments today");
}

static int nothing(lua_State *L, void *user) {
  (void)L, (void)user;
  return 0;
}

static void nothing_added(lua_State *L, void *user) {
  (void)user;
  luaL_error(L, "ran");
}

static void calls(void) {
  nib_sandbox *sandbox = create(NULL);
  int numbers[4] = { 3, 4, 0, 0 };
  nib_sandbox_values values = { two_numbers, take_sum, numbers };
  CHECK_SCRIPT(NIB_UNAVAILABLE, sandbox, nib_sandbox_call(sandbox, "add", &values, NIB_UNLIMITED));
  CHECK_SCRIPT(
    NIB_OK, sandbox,
    LOAD(sandbox, "function add(a, b) return a + b, a * b end text = 'x' function fail() error('so', 0) end"));
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "add", &values, 60000000));
  CHECK(numbers[2] == 2 && numbers[3] == 7);
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "add", &values, INT64_MAX - 1));
  const nib_sandbox_values unasked = { two_numbers, NULL, numbers };
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "add", &unasked, NIB_UNLIMITED));
  CHECK(strcmp(nib_sandbox_error(sandbox), "") == 0);
  CHECK_SCRIPT(NIB_UNAVAILABLE, sandbox, nib_sandbox_call(sandbox, "text", NULL, NIB_UNLIMITED));
  CHECK_SCRIPT(NIB_UNAVAILABLE, sandbox, nib_sandbox_call(sandbox, "none", NULL, NIB_UNLIMITED));
  CHECK(strstr(nib_sandbox_error(sandbox), "none: the script has no function of this name"));
  CHECK_SCRIPT(NIB_SCRIPT, sandbox, nib_sandbox_call(sandbox, "fail", NULL, NIB_UNLIMITED));
  CHECK(strcmp(nib_sandbox_error(sandbox), "fail: so") == 0);
  const nib_sandbox_values bad = { bad_arguments, NULL, NULL }, missing = { nothing, NULL, NULL };
  CHECK_SCRIPT(NIB_SCRIPT, sandbox, nib_sandbox_call(sandbox, "add", &bad, NIB_UNLIMITED));
  CHECK_SCRIPT(NIB_SCRIPT, sandbox, nib_sandbox_call(sandbox, "add", &missing, NIB_UNLIMITED));
  static const int64_t none_left[] = { 0, -1, INT64_MIN };
  static const char broken[] = "this is no script";
  for (int i = 0; i < 3; i++) {
    int64_t budget_us = none_left[i];
    CHECK_SCRIPT(NIB_EXPIRED, sandbox, nib_sandbox_call(sandbox, "fail", NULL, budget_us));
    CHECK(strstr(nib_sandbox_error(sandbox), "fail: budget: expected more than 0 us, got "));
    CHECK_SCRIPT(NIB_EXPIRED, sandbox, nib_sandbox_load(sandbox, "test", broken, sizeof broken - 1, budget_us));
    CHECK_SCRIPT(NIB_EXPIRED, sandbox, nib_sandbox_extend(sandbox, nothing_added, NULL, budget_us));
  }
  struct {
    nib_sandbox_values it;
    uint64_t newer;
  } asked = { { two_numbers, NULL, numbers }, 0 };
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call_sized(sandbox, "add", &asked.it, sizeof asked, 60000000));
  asked.newer = 1;
  CHECK_SCRIPT(NIB_INVALID, sandbox, nib_sandbox_call_sized(sandbox, "add", &asked.it, sizeof asked, 60000000));
  CHECK(strstr(nib_sandbox_error(sandbox), "add: values: expected 0 in fields that this version"));
  CHECK_SCRIPT(NIB_INVALID, sandbox, nib_sandbox_call_sized(sandbox, "add", &asked.it, sizeof asked.it - 1, 60000000));
  CHECK_SCRIPT(NIB_EXPIRED, sandbox,
               (LOAD(sandbox, "function loop() while true do end end"), nib_sandbox_call(sandbox, "loop", NULL, 2000)));
  CHECK(strstr(nib_sandbox_error(sandbox), "loop: exceeded its budget of 2000 us") &&
        strstr(nib_sandbox_error(sandbox), "test:1"));
  nib_sandbox_close(sandbox);
  nib_sandbox_close(NULL);

  nib_sandbox *none = NULL;
  CHECK(nib_sandbox_create(&(nib_sandbox_config){ .tensors = -1 }, &none) == NIB_INVALID && !none);
  CHECK(nib_sandbox_create(&(nib_sandbox_config){ .runtime = &(nib_config){ .abi_version = 99 } }, &none) ==
          NIB_INVALID &&
        !none);
  CHECK(nib_sandbox_create(&(nib_sandbox_config){ .abi_version = NIB_ABI_VERSION + 1 }, &none) == NIB_INVALID && !none);
  struct {
    nib_sandbox_config it;
    uint64_t newer;
  } larger = { { .abi_version = NIB_ABI_VERSION, .runtime = &(nib_config){ .threads = 1 } }, 1 };
  size_t runtime_bytes = sizeof(nib_config);
  CHECK(nib_sandbox_create_sized(&larger.it, sizeof larger, runtime_bytes, &none) == NIB_INVALID && !none);
  CHECK(nib_sandbox_create_sized(&larger.it, sizeof larger.it, runtime_bytes - 8, &none) == NIB_INVALID && !none);
  CHECK(nib_sandbox_create_sized(&larger.it, 8, runtime_bytes, &none) == NIB_INVALID && !none);
  larger.newer = 0;
  CHECK(nib_sandbox_create_sized(&larger.it, sizeof larger, runtime_bytes, &none) == NIB_OK && none);
  nib_sandbox_close(none);
  none = NULL;
  CHECK(nib_sandbox_create(&(nib_sandbox_config){ .lua_memory = 1000 }, &none) == NIB_MEMORY && !none);
}

/* ---- What the host gives ---- */

static void take_number(lua_State *L, int count, void *user) {
  CHECK(count == 1);
  *(long *)user = (long)lua_tointeger(L, 1);
}

static long number_of(nib_sandbox *sandbox, const char *function) {
  long number = -1;
  CHECK_SCRIPT(NIB_OK, sandbox,
               nib_sandbox_call(sandbox, function, &(nib_sandbox_values){ NULL, take_number, &number }, 60000000));
  return number;
}

struct host {
  nib_sandbox *sandbox;
  nib_tensor *tensor;
  nib_status inner;
};

static int call_again(lua_State *L) {
  struct host *host = lua_touserdata(L, lua_upvalueindex(1));
  host->inner = nib_sandbox_call(host->sandbox, "on_load", NULL, NIB_UNLIMITED);
  return 0;
}

static void extend(lua_State *L, void *user) {
  struct host *host = user;
  lua_newtable(L);
  lua_pushinteger(L, 42);
  lua_setfield(L, -2, "answer");
  lua_pushlightuserdata(L, host);
  lua_pushcclosure(L, call_again, 1);
  lua_setfield(L, -2, "call_again");
  nib_lua_push_tensor(L, host->tensor);
  lua_setfield(L, -2, "tensor");
  lua_setfield(L, 1, "host");
  lua_pushinteger(L, 1);
  lua_setfield(L, 2, "started");
}

static void bad_extension(lua_State *L, void *user) {
  (void)user;
  luaL_error(L, "cannot");
}

/* What a script puts around `state` may take for ever: raw access never calls it, the rest ends with the budget. */
static void set_raw(lua_State *L, void *user) {
  lua_pushliteral(L, "mode");
  lua_pushinteger(L, *(int *)user);
  lua_rawset(L, 2);
}

static void set_field(lua_State *L, void *user) {
  lua_pushinteger(L, *(int *)user);
  lua_setfield(L, 2, "other");
}

static void get_field(lua_State *L, void *user) {
  (void)user;
  lua_getfield(L, 2, "nothing");
}

static void guarded_state(void) {
  nib_sandbox *sandbox = create(NULL);
  int mode = 3;
  CHECK_SCRIPT(NIB_OK, sandbox,
               LOAD(sandbox, "local function forever() while true do end end\n"
                             "setmetatable(state, { __newindex = forever, __index = forever })\n"
                             "function get() return rawget(state, 'mode') end"));
  CHECK_SCRIPT(NIB_EXPIRED, sandbox, nib_sandbox_extend(sandbox, set_field, &mode, 5000));
  CHECK(strstr(nib_sandbox_error(sandbox), "extend: exceeded its budget of 5000 us") &&
        strstr(nib_sandbox_error(sandbox), "test:1"));
  CHECK_SCRIPT(NIB_EXPIRED, sandbox, nib_sandbox_extend(sandbox, get_field, NULL, 5000));
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_extend(sandbox, set_raw, &mode, 60000000));
  CHECK(number_of(sandbox, "get") == 3);
  CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, "function get() return rawget(state, 'mode') + 1 end"));
  CHECK(number_of(sandbox, "get") == 4);
  nib_sandbox_close(sandbox);
}

static void extensions(void) {
  struct host host = { .sandbox = create(NULL) };
  nib_runtime *runtime = nib_sandbox_runtime(host.sandbox);
  host.tensor = make(cpu_of(runtime), NIB_FLOAT32, 10);
  OK(runtime, nib_tensor_fill(nib_device_default_stream(cpu_of(runtime)), host.tensor, NIB_REAL(7)));
  CHECK_SCRIPT(NIB_SCRIPT, host.sandbox, nib_sandbox_extend(host.sandbox, bad_extension, NULL, 60000000));
  CHECK_SCRIPT(NIB_OK, host.sandbox, nib_sandbox_extend(host.sandbox, extend, &host, 60000000));
  CHECK_SCRIPT(NIB_OK, host.sandbox,
               LOAD(host.sandbox,
                    "assert(host.answer == 42 and host.tensor[10] == 7 and state.started == 1)"
                    "host.call_again() host.tensor:fill(8)"
                    "host.answer = 0 nibble.page.x = 1 nibble.tensor = nil table.concat = nil math = nil"));
  CHECK(host.inner == NIB_STATE && !*nib_sandbox_error(host.sandbox));
  /* What a script does to its tables ends with it. */
  CHECK_SCRIPT(NIB_OK, host.sandbox,
               LOAD(host.sandbox, "assert(host.answer == 42 and not nibble.page.x and nibble.tensor(1):item() == 1)"
                                  "assert(table.concat and math.pi and host.tensor[1] == 8)"));
  nib_tensor_release(host.tensor);
  nib_sandbox_close(host.sandbox);
}

/* ---- Reloading ---- */

static void reloading(void) {
  struct heap heap = { 0 };
  nib_config runtime = { .allocate = allocate, .user = &heap };
  nib_sandbox *sandbox = create(&(nib_sandbox_config){ .runtime = &runtime });
  char code[1000];
  CHECK_SCRIPT(NIB_OK, sandbox,
               LOAD(sandbox, "function on_load(reloaded) state.reloaded = reloaded end\n"
                             "state.t = nibble.zeros(1000) state.one = nibble.full(1000, 1) state.s = nibble.stream()\n"
                             "state.graph = state.s:capture(function() state.t:copy(state.one) end)\n"
                             "function version() return state.reloaded == false and 0 or -1 end"));
  CHECK(number_of(sandbox, "version") == 0);
  size_t lua_before = 0;
  long bytes_before = 0;
  for (int i = 1; i <= 1000; i++) {
    snprintf(code, sizeof code,
             "local big = {} for i = 1, 300 do big[i] = {i} end\n"
             "function on_load(reloaded) assert(reloaded) state.t:fill(0) state.graph:replay() end\n"
             "function version() return %d + (state.t[1000] - 1) + #big - 300 end",
             i);
    CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, code));
    if (i % 10 == 0) CHECK(number_of(sandbox, "version") == i);
    OK(nib_sandbox_runtime(sandbox), nib_tick(nib_sandbox_runtime(sandbox), 100));
    if (i < 100) { /* it has seen a few rounds of the collector */
      if (nib_sandbox_lua_memory(sandbox) > lua_before) lua_before = nib_sandbox_lua_memory(sandbox);
      if (heap.bytes > bytes_before) bytes_before = heap.bytes;
    } else {
      CHECK(nib_sandbox_lua_memory(sandbox) <= lua_before + 65536);
      CHECK(heap.bytes <= bytes_before + 65536);
    }
  }
  /* Code that fails to compile, to run or to start leaves the one before in place. */
  const char *const bad[] = {
    "version = = 1", "version = nil error('run')", "function version() return -1 end while true do end",
    "function version() return -1 end function on_load() error('start') end",
    "function version() return -1 end local t = {} while true do t[#t + 1] = ('x'):rep(9999) .. #t end"
  };
  const nib_status expected[] = { NIB_SCRIPT, NIB_SCRIPT, NIB_EXPIRED, NIB_SCRIPT, NIB_MEMORY };
  for (int i = 0; i < 5; i++) {
    CHECK_SCRIPT(expected[i], sandbox,
                 nib_sandbox_load(sandbox, "bad", bad[i], strlen(bad[i]), i == 2 ? 20000 : 60000000));
    CHECK(number_of(sandbox, "version") == 1000);
  }
  nib_sandbox_close(sandbox);
  CHECK(heap.live == 0 && heap.bytes == 0);
}

/* Versions that keep all the memory there is: the next one is loaded all the same. */
static void hot_fixes(void) {
  static const char hoard[] =
    "local function hoard(t) while true do t[#t + 1] = {('x'):rep(100) .. #t} end end\n"
    "local function more(t) while true do t[#t + 1] = nibble.zeros(1 << 18) end end\n"
    "state.n = (state.n or 0) + 1\n"
    "setmetatable({}, {__index = function() return hoarded, state end})\n"
    "function lua() hoarded = {} hoard(hoarded) end\n"
    "function lua_state() state.hoarded = {} hoard(state.hoarded) end\n"
    "function device() hoarded = {} more(hoarded) end\n"
    "function device_state() state.hoarded = {} more(state.hoarded) end\n"
    "function streams() hoarded = {} while true do hoarded[#hoarded + 1] = nibble.stream() end end\n"
    "function version() return state.n end";
  static const char fix[] =
    "local big = {} for i = 1, 8000 do big[i] = {('y'):rep(100) .. i} end\n"
    "local function use() state.t = state.t or nibble.zeros(1 << 18):fill(3) state.s = nibble.stream() end\n"
    "function on_load(reloaded) state.reloaded = reloaded use() end\n"
    "function version() return #big + (state.n or 0) + (state.reloaded and 10 or 0) + state.t[1] end";
  static const struct {
    const char *function;
    nib_status status;
    bool drops_state;
  } hoards[] = { { "lua", NIB_MEMORY, false },
                 { "lua_state", NIB_MEMORY, true },
                 { "device", NIB_SCRIPT, false },
                 { "device_state", NIB_SCRIPT, true },
                 { "streams", NIB_SCRIPT, false } };
  static const char fails[] = "setmetatable({}, {__index = function() return big end})\n"
                              "big = {} for i = 1, 2000 do big[i] = {('z'):rep(100) .. i} end error('not this one')";
  static const char needs_state[] = "local big = {} for i = 1, 8000 do big[i] = {('y'):rep(100) .. i} end\n"
                                    "function version() return #big end\n"
                                    "if not state.hoarded then error('without it I am nothing') end";
  for (int keep = 0; keep < 2; keep++)
    for (size_t i = 0; i < sizeof hoards / sizeof *hoards; i++) {
      nib_sandbox *sandbox =
        create(&(nib_sandbox_config){ .keep_state = keep == 1, .lua_memory = 2 << 20, .device_memory = 8 << 20 });
      CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, hoard));
      CHECK_SCRIPT(hoards[i].status, sandbox, nib_sandbox_call(sandbox, hoards[i].function, NULL, 60000000));
      nib_status refused = keep && hoards[i].status == NIB_MEMORY ? NIB_MEMORY : NIB_SCRIPT;
      CHECK_SCRIPT(refused, sandbox, LOAD(sandbox, "error('not this one')"));
      CHECK_SCRIPT(refused, sandbox,
                   LOAD(sandbox, "local t = nibble.zeros(1) function on_load() error('nor this one') end"));
      CHECK_SCRIPT(refused, sandbox, LOAD(sandbox, fails));
      CHECK(number_of(sandbox, "version") == 1);
      if (!keep && hoards[i].status == NIB_MEMORY &&
          hoards[i].drops_state) { /* what fails with an empty state stays as it was before */
        CHECK_SCRIPT(NIB_SCRIPT, sandbox, LOAD(sandbox, needs_state));
        CHECK(strstr(nib_sandbox_error(sandbox), "without it I am nothing"));
        CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, "function version() return state.hoarded and state.n or 0 end"));
        CHECK(number_of(sandbox, "version") == 1);
      }
      nib_status status = LOAD(sandbox, fix);
      if (keep) {
        CHECK_SCRIPT(refused, sandbox, status);
        CHECK(number_of(sandbox, "version") == 1);
      } else {
        CHECK_SCRIPT(NIB_OK, sandbox, status);
        CHECK(!*nib_sandbox_error(sandbox) == !hoards[i].drops_state);
        CHECK(!hoards[i].drops_state || strcmp(nib_sandbox_error(sandbox),
                                               "test: dropped `state`, which did not fit beside the new version") == 0);
        CHECK(number_of(sandbox, "version") == 8000 + 3 + (hoards[i].drops_state ? 0 : 11));
      }
      /* The limits are what they were. */
      CHECK(nib_sandbox_lua_memory(sandbox) <= 2 << 20);
      if (!keep) CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, hoard));
      CHECK_SCRIPT(NIB_MEMORY, sandbox, nib_sandbox_call(sandbox, "lua", NULL, 60000000));
      CHECK(nib_sandbox_lua_memory(sandbox) <= 2 << 20);
      nib_sandbox_close(sandbox);
    }
}

/* A version that takes what `state` had, and fails where it is loaded once more: it stays above the limits, but the
 * next ones get no more by the same trick. */
static void greedy_fixes(void) {
  static const char greedy[] =
    "state.n = (state.n or 0) + 1 n = state.n\n"
    "local kept = state.kept state.kept = nil kept = nil\n"
    "local t = {} pcall(function() while true do t[#t + 1] = {('x'):rep(100) .. #t} end end)\n"
    "t[#t] = nil state.kept = t\n"
    "if n == 1 and loads > 1 then error('not with an empty state') end\n"
    "function version() return n end";
  nib_sandbox *sandbox = create(&(nib_sandbox_config){ .lua_memory = 1 << 20 });
  char code[1024];
  for (int i = 1; i <= 10; i++) {
    snprintf(code, sizeof code, "local loads = %d %s", i, greedy);
    CHECK_SCRIPT(i == 1 ? NIB_OK : NIB_SCRIPT, sandbox, LOAD(sandbox, code));
    CHECK(number_of(sandbox, "version") == (i < 3 ? i : 3));
    CHECK(nib_sandbox_lua_memory(sandbox) <= 5 << 20);
  }
  CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, "function version() return next(state) and 1 or 7 end"));
  CHECK(number_of(sandbox, "version") == 7);
  CHECK(nib_sandbox_lua_memory(sandbox) <= 1 << 20);
  nib_sandbox_close(sandbox);
}

/* ---- Cancelling ---- */

struct canceller {
  nib_sandbox *sandbox;
  int stop;
};

/* Again and again, since a call that has not begun is not cancelled. */
static void *cancel(void *argument) {
  struct canceller *canceller = argument;
  while (!__atomic_load_n(&canceller->stop, __ATOMIC_RELAXED)) {
    nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    nib_sandbox_cancel(canceller->sandbox);
  }
  return NULL;
}

static void cancelling(void) {
  static const char *const codes[] = {
    "while true do end",
    "while true do pcall(function() while true do end end) end",
    "('a'):rep(16384):find('.-.-.-b')",
    "local t = nibble.zeros(15000000) for i = 1, 250 do t:fill(i) end while true do nibble.synchronize() end",
    "local t = nibble.zeros(15000000) while true do t:fill(1) end",
    "coroutine.wrap(function() while true do end end)()",
  };
  for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
    struct canceller canceller = { create(NULL), 0 };
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, cancel, &canceller) == 0);
    size_t length = strlen(codes[i]);
    CHECK_SCRIPT(NIB_EXPIRED, canceller.sandbox,
                 nib_sandbox_load(canceller.sandbox, "test", codes[i], length, NIB_UNLIMITED));
    CHECK(strstr(nib_sandbox_error(canceller.sandbox), "cancelled"));
    __atomic_store_n(&canceller.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    CHECK_SCRIPT(NIB_OK, canceller.sandbox, LOAD(canceller.sandbox, "assert(nibble.tensor(1):item() == 1)"));
    nib_sandbox_close(canceller.sandbox);
  }
}

/* ---- What outlives a call ---- */

static double processor_time(void) {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static nib_device *busy_device(nib_sandbox *sandbox) {
  nib_device *device = NULL;
  OK(nib_sandbox_runtime(sandbox), nib_device_find(nib_sandbox_runtime(sandbox), device_name(), &device));
  return device;
}

static void queued_work(void) {
  nib_sandbox *sandbox = create(NULL);
  bool drops = strcmp(device_name(), "cpu") == 0;
  CHECK_SCRIPT(NIB_OK, sandbox,
               LOAD(sandbox,
                    "local t, u = nibble.zeros(1 << 20), nibble.zeros(1 << 20) state.t = t\n"
                    "local g = nibble.stream():capture(function() for i = 1, 30 do t:fill(i) u:fill(i) end end)\n"
                    "local small = nibble.stream():capture(function() t:fill(7) end) g:replay()\n"
                    "function once() g:replay() nibble.synchronize() end\n"
                    "function short() for i = 1, 50 do small:replay() end end\n"
                    "function forever() while true do pcall(g.replay, g) end end"));
  nib_device *device = busy_device(sandbox);
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "once", NULL, 60000000));
  double start = processor_time();
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "once", NULL, 60000000));
  double whole = processor_time() - start;
  CHECK_SCRIPT(NIB_EXPIRED, sandbox, nib_sandbox_call(sandbox, "forever", NULL, 2000));
  const char *dropped = strstr(nib_sandbox_error(sandbox), "; dropped queued work that writes 2 tensors");
  CHECK(drops ? dropped && dropped[43] == 0 : !dropped);
  start = processor_time();
  OK(nib_sandbox_runtime(sandbox), nib_device_synchronize(device, NIB_UNLIMITED));
  CHECK(processor_time() - start < whole / 2 || !drops); /* what was left of a replay, not many of them */
  /* What a call that ends well has queued is done. */
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "short", NULL, 60000000));
  CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, "assert(state.t[1] == 7 and state.t[1 << 20] == 7)"));
  nib_sandbox_close(sandbox);

  /* The limit is the host's. */
  sandbox = create(&(nib_sandbox_config){ .queued_bytes = 1 << 20 });
  CHECK_SCRIPT(drops ? NIB_OK : NIB_SCRIPT, sandbox, LOAD(sandbox, "state.t = nibble.zeros(1 << 20) state.t:fill(1)"));
  CHECK(drops || strstr(nib_sandbox_error(sandbox), "more than the limit of 1048576 for queued work"));
  nib_sandbox_close(sandbox);
}

/* A closed sandbox leaves the kernel that is running where it is. */
static void closing(void) {
  nib_sandbox *sandbox = create(&(nib_sandbox_config){ .runtime = &(nib_config){ .threads = 1 } });
  CHECK_SCRIPT(NIB_OK, sandbox,
               LOAD(sandbox, "function wait() nibble.randn(4 << 20, {device = 'cpu'}) nibble.synchronize('cpu') end\n"
                             "function go() for i = 1, 9 do nibble.randn(4 << 20, {device = 'cpu'}) end end"));
  double start = processor_time();
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "wait", NULL, 60000000));
  double whole = processor_time() - start;
  start = processor_time();
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "go", NULL, 60000000));
  while (processor_time() - start < whole / 100) nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
  start = processor_time();
  nib_sandbox_close(sandbox);
  double busy = processor_time() - start;
  sandbox = create(NULL); /* a GPU's driver takes its time for any */
  start = processor_time();
  nib_sandbox_close(sandbox);
  CHECK(busy < processor_time() - start + whole / 2);
}

static void many_streams(void) {
  nib_sandbox *sandbox = create(&(nib_sandbox_config){ .streams = 3, .runtime = &(nib_config){ .threads = 1 } });
  CHECK_SCRIPT(NIB_OK, sandbox,
               LOAD(sandbox,
                    "function go() for i = 1, 2000 do\n"
                    "  local t <close> = nibble.empty(1 << 14)\n"
                    "  local s <close> = nibble.stream({priority = -(i % 2)}) s:scope(function() t:fill(i) end)\n"
                    "end end\n"
                    "function keep() local k = {} for i = 1, 4 do k[i] = nibble.stream() end end"));
  int before = threads();
  CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "go", NULL, 60000000));
  CHECK(threads() <= before + 3 || strcmp(device_name(), "cpu") != 0);
  CHECK_SCRIPT(NIB_SCRIPT, sandbox, nib_sandbox_call(sandbox, "keep", NULL, 60000000));
  CHECK(strstr(nib_sandbox_error(sandbox), "at most 3"));
  nib_sandbox_close(sandbox);
}

/* ---- Failing memory ---- */

/* What Lua, its library and the module make when it is first needed, and all that a sandbox has its own ways for. */
static const char everything[] =
  "state.t = nibble.tensor({1, 2, 3}) local s = ('x'):rep(3000):gsub('x', {x = 'yy'})\n"
  "state.g = nibble.stream():capture(function() state.t:fill(1) end)\n"
  "function go(a, b) local c = coroutine.wrap(function() return load('return ' .. a)() end)\n"
  "  local parts = {} for i = 1, 100 do parts[i] = ('%099d'):format(i) end\n"
  "  assert(#table.concat(parts, ', ') == 10098 and #('x'):rep(5000) == 5000 and #('y'):rep(5000):upper() == 5000)\n"
  "  table.sort(parts, function(x, y) return x > y end) assert(parts[1]:find('100', 1, true))\n"
  "  assert(select('#', table.unpack(parts)) == 100 and not pcall(error, {}) and not xpcall(error, print))\n"
  "  assert(#string.pack('s4', ('z'):rep(3000)) == 3004 and utf8.len(('z'):rep(3000)) == 3000)\n"
  "  state.g:replay() return c() + b, string.format('%s %d', state.t, 1), setmetatable({}, {}) end";

/* The n-th allocation fails, alone or with all after it; returns whether there were so many. */
static bool fail_at(long n, bool once, int *failures) {
  struct heap heap = { .fail_at = n, .once = once };
  int numbers[4] = { 3, 4, 0, 0 };
  nib_config runtime = { .allocate = allocate, .user = &heap, .threads = 1 };
  nib_sandbox_values values = { two_numbers, take_sum, numbers };
  nib_sandbox *sandbox = NULL;
  nib_status status = nib_sandbox_create(&(nib_sandbox_config){ .runtime = &runtime }, &sandbox);
  CHECK(status == NIB_OK || (status == NIB_MEMORY && !sandbox));
  if (status == NIB_OK) {
    status = LOAD(sandbox, everything);
    if (status == NIB_OK) status = nib_sandbox_call(sandbox, "go", &values, 60000000);
    /* The module's own errors about memory are the script's. */
    CHECK(status == NIB_OK || status == NIB_MEMORY || status == NIB_SCRIPT);
    if (status == NIB_OK) CHECK(numbers[3] == 7);
  }
  bool reached = heap.calls >= n;
  *failures += status != NIB_OK;
  heap.fail_at = 0;
  if (sandbox) { /* nothing is broken for good */
    CHECK_SCRIPT(NIB_OK, sandbox, LOAD(sandbox, everything));
    CHECK_SCRIPT(NIB_OK, sandbox, nib_sandbox_call(sandbox, "go", &values, 60000000));
    CHECK(numbers[3] == 7);
  }
  nib_sandbox_close(sandbox);
  CHECK(heap.live == 0 && heap.bytes == 0);
  return reached;
}

static void failing_memory(void) {
  for (int once = 0; once < 2; once++) {
    int failures = 0;
    long n = 1;
    while (fail_at(n, once, &failures)) n++;
    CHECK(n > 300 && failures > (once ? 0 : n / 2)); /* alone, most are tried again after a collection */
  }
}

/* ---- Several at once ---- */

static void *many(void *unused) {
  (void)unused;
  for (int i = 0; i < 20; i++) {
    nib_sandbox *sandboxes[3];
    for (int k = 0; k < 3; k++) sandboxes[k] = create(&(nib_sandbox_config){ .lua_memory = 1 << 20 });
    for (int k = 0; k < 3; k++) {
      char code[200];
      snprintf(code, sizeof code,
               "state.x = nibble.full(1000, %d) string = nil x = (x or 0) + 1 function get() return state.x[1] + x end",
               k);
      CHECK_SCRIPT(NIB_OK, sandboxes[k], LOAD(sandboxes[k], code));
    }
    for (int k = 0; k < 3; k++) CHECK(number_of(sandboxes[k], "get") == k + 1);
    for (int k = 0; k < 3; k++) nib_sandbox_close(sandboxes[k]);
  }
  return NULL;
}

int main(void) {
  calls();
  extensions();
  guarded_state();
  reloading();
  hot_fixes();
  greedy_fixes();
  cancelling();
  queued_work();
  closing();
  many_streams();
  failing_memory();
  many(NULL);
  long before = resident();
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, many, NULL) == 0);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < 3; i++) many(NULL);
  CHECK(resident() - before < 4 << 20 || getenv("ASAN_OPTIONS"));
  return 0;
}
