/* Sandboxes: memory, time, and the calls of the host. What scripts can reach is in base.c.
 *
 * How a call ends. `run` sets the deadline, for the script here and for the runtime by nib_set_deadline, and installs a
 * count hook. From then on, three things check the clock:
 * - The hook, after `count` instructions. It aims at one check every 50 us: it measures how long the last instructions
 *   took and derives the next count from that, down to 1. Each coroutine has its own hook, so nib_sandbox_watch
 *   corrects one that was set before instructions became slow.
 * - Our functions that may run for long (matching, sorting, joining, compiling in pieces, tables to tensors), which
 * call nib_sandbox_check between steps.
 * - The runtime: each wait, read and comparison of tensors returns TIMEOUT at the deadline.
 *
 * A single instruction can be slow too, and no hook interrupts it. So Lua's allocator watches for what makes
 * instructions slow. After 64 KiB of new memory, and after a refused allocation (Lua then runs a full collection), the
 * hook runs at the next instruction. While strings of 512 bytes or more are alive, the count is so small that the
 * instructions between two checks can compare at most 128 KiB of them. Such strings have an address of their own kind
 * (8 bytes after a multiple of 16), by which the allocator recognizes them when they are freed. The delay that remains
 * is the bound in nibble_lua.h.
 *
 * When the time is up, `expire` raises an error: a light userdata, which needs no memory. A script must not survive it.
 * The sandbox's pcall, xpcall, coroutine functions and `load` raise it again (nib_sandbox_rethrow), and the hook then
 * runs at every instruction, so that a handler or a __close method ends at once, too. A call whose time is up is
 * EXPIRED, whatever error ended it.
 *
 * Then `tell_end` drops the work that the call has queued since the mark that `run` set (nib_drop_work), and says how
 * many tensors that work was to write. nib_sandbox_cancel sets a flag and moves the runtime's deadline to now. Both
 * happen under a lock, so that they cannot fall into the beginning of another call. */
#define _POSIX_C_SOURCE 200809L
#include <limits.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <time.h>

#include "sandbox.h"
#include "../../runtime/sized.h"

NIB_SIZED(nib_sandbox_config, queued_bytes);
NIB_SIZED(nib_sandbox_values, user);

#define RUNTIME_BYTES ((size_t)8 << 20)  /* for all that a runtime has beside its tensors: streams, graphs, handles */
#define FRESH_BYTES   ((size_t)64 << 10) /* the clock is checked after so many new bytes in Lua */
#define MOST_MEMORY   (SIZE_MAX / 4)     /* sums of sizes do not overflow */
#define LONG_US       ((int64_t)1 << 50) /* in effect no deadline, but nib_sandbox_cancel can move it */
#define LOOK_US       50                 /* wanted time between two runs of the hook */

/* Keys of the registry: the table of globals, the script's `state`, its environment. */
static const char globals_key, state_key, environment_key;

static int64_t now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- Time ------------------------------------------------------------------------------------------------------ */

static bool is_over(const nib_sandbox *sandbox, int64_t now) {
  return __atomic_load_n(&sandbox->cancelled, __ATOMIC_RELAXED) ||
         (sandbox->deadline_us && now >= sandbox->deadline_us) ||
         (sandbox->config.instructions && sandbox->instructions_left <= 0);
}

static void hook(lua_State *L, lua_Debug *event);

/* Raises the error that ends the call: a light userdata, which needs no memory and means nothing to scripts. */
static void expire(lua_State *L) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  lua_Debug level;
  if (!sandbox->expired) {
    sandbox->expired = true;
    sandbox->where[0] = 0;
    for (int i = 0; i < 8 && !sandbox->where[0] && lua_getstack(L, i, &level); i++) {
      lua_getinfo(L, "Sl", &level);
      if (level.currentline > 0)
        snprintf(sandbox->where, sizeof sandbox->where, "%s:%d", level.short_src, level.currentline);
    }
  }
  lua_sethook(L, hook, LUA_MASKCOUNT, 1); /* so that handlers and __close methods end at once */
  lua_pushlightuserdata(L, sandbox);
  lua_error(L);
}

void nib_sandbox_check(lua_State *L) {
  const nib_sandbox *sandbox = nib_sandbox_of(L);
  if (sandbox->running && (sandbox->expired || is_over(sandbox, now_us()))) expire(L);
}

void nib_sandbox_rethrow(lua_State *L) {
  if (nib_sandbox_of(L)->expired) expire(L);
}

/* Checks the clock and sets the next count, so that it runs about every LOOK_US. */
static void hook(lua_State *L, lua_Debug *event) {
  (void)event;
  nib_sandbox *sandbox = nib_sandbox_of(L);
  int64_t now = now_us(), elapsed = now - sandbox->looked_us;
  int64_t passed = lua_gethookcount(L); /* each coroutine has its own */
  sandbox->instructions_left -= passed;
  sandbox->fresh = 0;
  if (sandbox->expired || is_over(sandbox, now)) expire(L);
  int64_t count = elapsed > LOOK_US ? passed * LOOK_US / elapsed : 2 * passed;
  sandbox->count = count < 1 ? 1 : count > sandbox->most_count ? sandbox->most_count : (int)count;
  sandbox->looked_us = now;
  if (sandbox->count == passed) return;
  lua_sethook(L, hook, LUA_MASKCOUNT, sandbox->count);
  sandbox->looked_us = now_us(); /* lua_sethook walks over all open calls; do not count that time as the script's */
}

void nib_sandbox_watch(lua_State *L) {
  int most = nib_sandbox_of(L)->most_count;
  if (lua_gethookcount(L) > most) lua_sethook(L, hook, LUA_MASKCOUNT, most);
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

static void *host_allocate(const nib_sandbox *sandbox, void *pointer, size_t old_size, size_t new_size) {
  if (sandbox->host.allocate) return sandbox->host.allocate(sandbox->host.user, pointer, old_size, new_size);
  if (new_size > 0) return realloc(pointer, new_size);
  free(pointer);
  return NULL;
}

/* Comparing two long strings is one slow instruction, so the hook runs more often while there are long strings. They
 * begin 8 bytes into their block, as no other memory does; so they are recognized when they are freed. */
#define LONG_STRING 512
#define SLOW_BYTES  ((size_t)128 << 10) /* that may be compared between two runs of the hook */
#define OFFSET      8
_Static_assert(_Alignof(max_align_t) >= 2 * OFFSET || sizeof(void *) < 8, "blocks lie at multiples of 16");

static bool is_long_string(const void *pointer) {
  return _Alignof(max_align_t) >= 2 * OFFSET && (uintptr_t)pointer % (2 * OFFSET) == OFFSET;
}

static void count_string(nib_sandbox *sandbox, size_t size, int32_t change) {
  int kind = 0;
  while (size >> kind > 1) kind++;
  sandbox->strings[kind] += change;
  int longest = NIB_SANDBOX_CLASSES - 1;
  while (longest >= 0 && sandbox->strings[longest] == 0) longest--;
  size_t most = longest < 0 ? NIB_SANDBOX_COUNT : SLOW_BYTES >> (longest + 1);
  sandbox->most_count = most < 1 ? 1 : most > NIB_SANDBOX_COUNT ? NIB_SANDBOX_COUNT : (int)most;
}

static void *allocate_string(nib_sandbox *sandbox, size_t size) {
  char *block = host_allocate(sandbox, NULL, 0, size + OFFSET);
  if (!block) return NULL;
  count_string(sandbox, size, 1);
  if (sandbox->running && sandbox->most_count < sandbox->count) {
    sandbox->instructions_left -= sandbox->count - sandbox->most_count;
    sandbox->count = sandbox->most_count;
    lua_sethook(sandbox->running, hook, LUA_MASKCOUNT, sandbox->count);
  }
  return block + OFFSET;
}

/* Allocates for Lua. Large blocks take time, and after a failure Lua runs a full collection; in both cases the hook
 * runs at the next instruction. */
static void *allocate_lua(void *user, void *pointer, size_t old_size, size_t new_size) {
  nib_sandbox *sandbox = user;
  bool is_string =
    !pointer && old_size == LUA_TSTRING && new_size >= LONG_STRING && _Alignof(max_align_t) >= 2 * OFFSET;
  if (!pointer) old_size = 0; /* it was the kind of object that Lua allocates */
  bool grows = new_size > old_size;
  bool refused =
    grows && (new_size > sandbox->lua_block || sandbox->lua_used + (new_size - old_size) > sandbox->lua_most);
  if (grows) sandbox->fresh += new_size;
  if (sandbox->running && (refused || sandbox->fresh > FRESH_BYTES) && sandbox->fresh > 0) {
    sandbox->fresh = 0;
    sandbox->instructions_left -= sandbox->count - 1;
    sandbox->count = 1;
    lua_sethook(sandbox->running, hook, LUA_MASKCOUNT, 1);
  }
  if (refused) return NULL;
  void *block = NULL;
  if (is_string) {
    block = allocate_string(sandbox, new_size);
  } else if (is_long_string(pointer)) { /* Lua frees it: strings never change their size */
    host_allocate(sandbox, (char *)pointer - OFFSET, old_size + OFFSET, 0);
    count_string(sandbox, old_size, -1);
  } else {
    block = host_allocate(sandbox, pointer, old_size, new_size);
  }
  if (block || new_size == 0) sandbox->lua_used = sandbox->lua_used - old_size + new_size;
  return block;
}

/* The runtime's allocator is allocate_runtime, which keeps a list of blocks and takes them from allocate_block. */
static void *allocate_block(void *user, void *pointer, size_t old_size, size_t new_size) {
  nib_sandbox *sandbox = user;
  if (new_size > old_size && sandbox->host_used + (new_size - old_size) > sandbox->host_most) return NULL;
  /* Clear new memory, so that scripts cannot read the host's old data in nibble.empty. */
  bool is_own = !sandbox->host.allocate && !pointer;
  void *block = is_own ? calloc(1, new_size) : host_allocate(sandbox, pointer, old_size, new_size);
  if (block && !pointer && !is_own) memset(block, 0, new_size);
  if (block || new_size == 0) sandbox->host_used = sandbox->host_used - old_size + new_size;
  return block;
}

static void *allocate_runtime(void *user, void *pointer, size_t old_size, size_t new_size) {
  nib_sandbox *sandbox = user;
  return nib_lua_blocks_allocate(&sandbox->blocks, pointer, old_size, new_size);
}

static void log_runtime(void *user, nib_log_level level, const char *message) {
  const nib_sandbox *sandbox = user;
  sandbox->host.log(sandbox->host.user, level, message);
}

static void parallel_for(void *user, size_t count, void (*body)(void *context, size_t index), void *context) {
  const nib_sandbox *sandbox = user;
  sandbox->host.parallel_for(sandbox->host.user, count, body, context);
}

/* ---- Compiling ------------------------------------------------------------------------------------------------- */

/* Gives the compiler small pieces and checks the clock between them. A single name can take microseconds to compile,
 * when it is looked up through many nested functions. */
static const char *read_piece(lua_State *L, void *user, size_t *length) {
  nib_sandbox_text *text = user;
  nib_sandbox_check(L);
  if (text->length == 0 && text->next) {
    text->text = text->next(L, &text->length);
    if (!text->text) text->length = 0;
  }
  const char *piece = text->text;
  *length = text->length < 16 ? text->length : 16;
  text->text += *length;
  text->length -= *length;
  return *length > 0 ? piece : NULL;
}

int nib_sandbox_compile(lua_State *L, nib_sandbox_text *text, const char *name) {
  int status = lua_load(L, read_piece, text, name, "t");
  if (status != LUA_OK) nib_sandbox_rethrow(L);
  return status;
}

/* ---- Calls ----------------------------------------------------------------------------------------------------- */

static nib_status refuse(nib_sandbox *sandbox, nib_status status, const char *operation, const char *message) {
  snprintf(sandbox->error, sizeof sandbox->error, "%s: %s", operation, message);
  return status;
}

static nib_status tell_end(nib_sandbox *sandbox, const char *operation, int64_t budget_us) {
  char reason[80];
  if (__atomic_load_n(&sandbox->cancelled, __ATOMIC_RELAXED)) snprintf(reason, sizeof reason, "was cancelled");
  else if (sandbox->config.instructions && sandbox->instructions_left <= 0)
    snprintf(reason, sizeof reason, "exceeded its limit of %lld instructions", (long long)sandbox->config.instructions);
  else snprintf(reason, sizeof reason, "exceeded its budget of %lld us", (long long)budget_us);
  /* Queued work would go on to occupy threads, and later calls would wait for it. */
  char dropped[80] = "";
  int32_t cut = 0;
  if (nib_drop_work(sandbox->runtime, &cut) == NIB_OK && cut > 0)
    snprintf(dropped, sizeof dropped, "; dropped queued work that writes %d tensor%s", (int)cut, cut == 1 ? "" : "s");
  snprintf(sandbox->error, sizeof sandbox->error, "%s: %s%s%s%s", operation, reason, sandbox->where[0] ? ", at " : "",
           sandbox->where, dropped);
  return NIB_EXPIRED;
}

/* Runs a C function with one argument, with a deadline and in protected mode. */
static nib_status run(nib_sandbox *sandbox, const char *operation, lua_CFunction function, void *argument,
                      int64_t budget_us) {
  lua_State *L = sandbox->L;
  nib_device *cpu = NULL;
  nib_status usable = nib_device_find(sandbox->runtime, "cpu", &cpu); /* fails on a closed runtime and after a fork */
  if (usable != NIB_OK) return refuse(sandbox, usable, operation, nib_error(sandbox->runtime));
  if (sandbox->running) return refuse(sandbox, NIB_STATE, operation, "another call of this sandbox is running");
  if (budget_us <= 0) {
    snprintf(sandbox->error, sizeof sandbox->error, "%s: budget: expected more than 0 us, got %lld us", operation,
             (long long)budget_us);
    return NIB_EXPIRED;
  }
  bool is_limited = budget_us != NIB_UNLIMITED;
  if (budget_us > LONG_US) budget_us = LONG_US;
  nib_mark_work(sandbox->runtime);
  pthread_mutex_lock(&sandbox->cancel_lock);
  __atomic_store_n(&sandbox->cancelled, false, __ATOMIC_RELAXED);
  nib_set_deadline(sandbox->runtime, budget_us);
  pthread_mutex_unlock(&sandbox->cancel_lock);
  sandbox->looked_us = now_us();
  sandbox->deadline_us = is_limited ? sandbox->looked_us + budget_us : 0;
  sandbox->instructions_left = sandbox->config.instructions;
  sandbox->count = sandbox->most_count;
  sandbox->expired = sandbox->absent = false;
  sandbox->error[0] = sandbox->where[0] = 0;
  sandbox->running = L;
  lua_sethook(L, hook, LUA_MASKCOUNT, sandbox->count);
  lua_settop(L, 0);
  lua_pushcfunction(L, function); /* these two allocate nothing, so they need no protection */
  lua_pushlightuserdata(L, argument);
  /* Lua compares strings by the locale, which can be slow. In the C locale scripts also give the same results in any
   * host. */
  locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), before = plain ? uselocale(plain) : (locale_t)0;
  int status = lua_pcall(L, 1, 0, 0);
  if (before) uselocale(before);
  if (plain) freelocale(plain);
  sandbox->running = NULL;
  sandbox->error[0] = 0; /* a nested call that was refused has set it */
  nib_set_deadline(sandbox->runtime, NIB_UNLIMITED);
  nib_status result = NIB_OK;
  if (status != LUA_OK && is_over(sandbox, now_us())) sandbox->expired = true;
  if (sandbox->expired) {
    result = tell_end(sandbox, operation, budget_us);
  } else if (sandbox->absent) {
    result = refuse(sandbox, NIB_UNAVAILABLE, operation, "the script has no function of this name");
  } else if (status == LUA_ERRMEM) {
    result = refuse(sandbox, NIB_MEMORY, operation, "out of memory: the script reached its limit");
  } else if (status != LUA_OK) {
    char other[64];
    snprintf(other, sizeof other, "raised an error that is a %s", luaL_typename(L, -1));
    result = refuse(sandbox, NIB_SCRIPT, operation, lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : other);
  }
  lua_settop(L, 0);
  return result;
}

struct script {
  const char *name;
  nib_sandbox_text text;
  bool dropped_state;
};

/* ---- Memory of a new version --------------------------------------------------------------------------------------
 *
 * While a new version is loaded, the old one is still there. So the limits are then raised by what it uses. */

static void set_allowance(nib_sandbox *sandbox, bool beside) {
  uint64_t device = 0;
  for (int32_t i = 0; beside && i < nib_device_count(sandbox->runtime); i++) {
    uint64_t bytes = nib_device_memory(nib_device_at(sandbox->runtime, i)).reserved_bytes;
    if (bytes > device) device = bytes;
  }
  const nib_sandbox_config *config = &sandbox->config;
  sandbox->lua_most = config->lua_memory;
  if (beside && sandbox->lua_used > sandbox->lua_base) sandbox->lua_most += sandbox->lua_used - sandbox->lua_base;
  sandbox->host_most = sandbox->host_limit + (beside ? sandbox->host_used : 0);
  for (int kind = 0; kind < NIB_LUA_CLASS_COUNT; kind++)
    sandbox->module->limits.most[kind] =
      (kind == NIB_LUA_STREAM ? config->streams : config->tensors) + (beside ? sandbox->module->count[kind] : 0);
  nib_set_limits(sandbox->runtime, config->device_memory + device, config->queued_bytes,
                 config->streams + (beside ? sandbox->module->count[NIB_LUA_STREAM] : 0));
}

/* Whether the script uses more than `times` its limits. */
static bool is_too_much(const nib_sandbox *sandbox, int32_t times) {
  const nib_sandbox_config *config = &sandbox->config;
  bool too_much = sandbox->lua_used / (size_t)times > config->lua_memory;
  for (int kind = 0; kind < NIB_LUA_CLASS_COUNT; kind++)
    too_much =
      too_much || sandbox->module->count[kind] / times > (kind == NIB_LUA_STREAM ? config->streams : config->tensors);
  for (int32_t i = 0; i < nib_device_count(sandbox->runtime); i++)
    too_much = too_much || nib_device_memory(nib_device_at(sandbox->runtime, i)).used_bytes / (uint64_t)times >
                             config->device_memory;
  return too_much;
}

/* Collects twice: the first collection calls finalizers, the second one frees their objects. */
static void collect(lua_State *L) {
  nib_sandbox_forget_metatables(L);
  for (int i = 0; i < 2; i++) {
    lua_gc(L, LUA_GCCOLLECT);
    nib_sandbox_check(L);
  }
}

/* Runs the script and makes it the sandbox's. The table at index 1 is its `state`. */
static void load_version(lua_State *L, const struct script *script, bool reloaded) {
  nib_sandbox_text text = script->text;
  lua_settop(L, 1);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &globals_key);
  nib_sandbox_push_environment(L, 2, 1);
  lua_pushfstring(L, "@%s", script->name);
  if (nib_sandbox_compile(L, &text, lua_tostring(L, -1)) != LUA_OK) lua_error(L);
  lua_pushvalue(L, 3);
  lua_setupvalue(L, -2, 1);
  lua_call(L, 0, 0);
  lua_pushliteral(L, "on_load");
  if (lua_rawget(L, 3) == LUA_TFUNCTION) {
    lua_pushboolean(L, reloaded);
    lua_call(L, 1, 0);
  }
  nib_sandbox_check(L); /* a call that ended too late has failed */
  lua_pushvalue(L, 3);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &environment_key);
}

static int load_script(lua_State *L) {
  struct script *script = lua_touserdata(L, 1);
  nib_sandbox *sandbox = nib_sandbox_of(L);
  lua_settop(L, 0);
  bool reloaded = lua_rawgetp(L, LUA_REGISTRYINDEX, &environment_key) != LUA_TNIL;
  lua_settop(L, 0);
  if (reloaded && !sandbox->config.keep_state) collect(L); /* so that garbage does not raise the limits */
  /* With twice the limits in use, drop `state` at once. Otherwise the use could grow with every version that keeps what
   * is in `state` and fails when `state` is empty. */
  if (!is_too_much(sandbox, 2)) {
    if (!sandbox->config.keep_state) set_allowance(sandbox, true);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &state_key);
    load_version(L, script, reloaded);
    lua_settop(L, 0);
    if (is_too_much(sandbox, 1)) collect(L); /* frees the old version */
    if (!is_too_much(sandbox, 1)) return 0;
  }
  set_allowance(sandbox, true);
  lua_newtable(L);
  load_version(L, script, false);
  lua_settop(L, 1);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &state_key);
  script->dropped_state = true;
  collect(L);
  return 0;
}

nib_status nib_sandbox_load(nib_sandbox *sandbox, const char *name, const char *source, size_t length,
                            int64_t budget_us) {
  struct script script = { name, { source, length, NULL }, false };
  nib_status status = run(sandbox, name, load_script, &script, budget_us);
  if (!sandbox->running && status != NIB_FORKED && status != NIB_CLOSED) {
    set_allowance(sandbox, false);
    nib_sandbox_forget_metatables(sandbox->L); /* of the version that was replaced or failed to load */
  }
  if (status != NIB_OK || !script.dropped_state) return status;
  refuse(sandbox, NIB_OK, name, "dropped `state`, which did not fit beside the new version");
  return NIB_OK;
}

struct call {
  const char *function;
  nib_sandbox_values values;
};

static int call_function(lua_State *L) {
  const struct call *call = lua_touserdata(L, 1);
  const nib_sandbox_values *values = &call->values;
  lua_settop(L, 0);
  bool is_loaded = lua_rawgetp(L, LUA_REGISTRYINDEX, &environment_key) == LUA_TTABLE;
  lua_pushstring(L, call->function);
  if (!is_loaded || lua_rawget(L, 1) != LUA_TFUNCTION) {
    nib_sandbox_of(L)->absent = true;
    return 0;
  }
  lua_remove(L, 1);
  luaL_checkstack(L, 32, NULL);
  int count = values->arguments ? values->arguments(L, values->user) : 0;
  lua_call(L, count, values->results ? LUA_MULTRET : 0);
  nib_sandbox_check(L); /* a call that ended too late has failed */
  if (values->results) values->results(L, lua_gettop(L), values->user);
  return 0;
}

nib_status nib_sandbox_call_sized(nib_sandbox *sandbox, const char *function, const nib_sandbox_values *values,
                                  size_t values_bytes, int64_t budget_us) {
  struct call call = { function, { NULL, NULL, NULL } };
  char text[180] = "values: ";
  size_t used = strlen(text);
  if (values && !nib_sized_read(&call.values, sizeof call.values, nib_sandbox_values_least, values, values_bytes,
                                text + used, sizeof text - used))
    return refuse(sandbox, NIB_INVALID, function, text);
  return run(sandbox, function, call_function, &call, budget_us);
}

struct extension {
  void (*function)(lua_State *L, void *user);
  void *user;
};

static int extend(lua_State *L) {
  const struct extension *extension = lua_touserdata(L, 1);
  lua_settop(L, 0);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &globals_key);
  lua_rawgetp(L, LUA_REGISTRYINDEX, &state_key);
  extension->function(L, extension->user);
  return 0;
}

nib_status nib_sandbox_extend(nib_sandbox *sandbox, void (*function)(lua_State *L, void *user), void *user,
                              int64_t budget_us) {
  struct extension extension = { function, user };
  return run(sandbox, "extend", extend, &extension, budget_us);
}

void nib_sandbox_cancel(nib_sandbox *sandbox) {
  pthread_mutex_lock(&sandbox->cancel_lock);
  __atomic_store_n(&sandbox->cancelled, true, __ATOMIC_RELAXED);
  nib_set_deadline(sandbox->runtime, 0);
  pthread_mutex_unlock(&sandbox->cancel_lock);
}

const char *nib_sandbox_error(const nib_sandbox *sandbox) { return sandbox->error; }
nib_runtime *nib_sandbox_runtime(const nib_sandbox *sandbox) { return sandbox->runtime; }
size_t nib_sandbox_lua_memory(const nib_sandbox *sandbox) { return sandbox->lua_used; }

/* ---- Creating and closing -------------------------------------------------------------------------------------- */

/* Sets the limits that the module itself checks. */
static void set_limits(lua_State *L) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  lua_getfield(L, LUA_REGISTRYINDEX, "nibble.state");
  nib_lua_state *state = lua_touserdata(L, -1);
  state->limits = (nib_lua_limits){ .check = nib_sandbox_check, .slice_us = 500, .no_addresses = true };
  state->limits.most_elements =
    sandbox->config.device_memory < INT64_MAX ? (int64_t)sandbox->config.device_memory : INT64_MAX;
  sandbox->module = state;
  set_allowance(sandbox, false);
  lua_pop(L, 1);
}

/* Creates the metatable of Lua's long buffers. Lua creates it at the first use, in two steps; if a script's memory ran
 * out between them, no long buffer would work in this state any more. */
static void make_buffers(lua_State *L) {
  luaL_Buffer buffer;
  luaL_buffinitsize(L, &buffer, 2 * LUAL_BUFFERSIZE);
  luaL_pushresultsize(&buffer, 0);
}

/* Opens the default device. Opening a GPU takes 0.1 s or more, which no deadline can interrupt; so it must not happen
 * in a script's call. If the device cannot be opened, the script gets the error when it uses it. */
static void open_device(nib_runtime *runtime) {
  nib_device *device = NULL;
  const char *name = nib_lua_default_device();
  if (!name) device = nib_device_best(runtime);
  else if (nib_device_find(runtime, name, &device) != NIB_OK) return;
  nib_device_default_stream(device);
}

static int open_sandbox(lua_State *L) {
  const nib_sandbox *sandbox = nib_sandbox_of(L);
  lua_settop(L, 0);
  make_buffers(L);
  if (nib_lua_open(L, sandbox->runtime) != NIB_OK) return lua_error(L);
  open_device(sandbox->runtime);
  set_limits(L);
  nib_sandbox_open(L);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &globals_key);
  lua_newtable(L);
  lua_rawsetp(L, LUA_REGISTRYINDEX, &state_key);
  collect(L);
  nib_sandbox_of(L)->lua_base = nib_sandbox_of(L)->lua_used;
  return 0;
}

nib_status nib_sandbox_create_sized(const nib_sandbox_config *config, size_t config_bytes, size_t runtime_config_bytes,
                                    nib_sandbox **out) {
  *out = NULL;
  nib_sandbox blank = { 0 };
  char text[160]; /* not reported: there is no sandbox yet to read it from */
  if (config) {
    if (config_bytes >= sizeof config->abi_version && config->abi_version != 0 &&
        config->abi_version != NIB_ABI_VERSION)
      return NIB_INVALID;
    if (!nib_sized_read(&blank.config, sizeof blank.config, nib_sandbox_config_least, config, config_bytes, text,
                        sizeof text))
      return NIB_INVALID;
  }
  if (blank.config.runtime && !nib_sized_read(&blank.host, sizeof blank.host, nib_config_least, blank.config.runtime,
                                              runtime_config_bytes, text, sizeof text))
    return NIB_INVALID;
  if (blank.config.tensors < 0 || blank.config.streams < 0 || blank.config.instructions < 0) return NIB_INVALID;
  blank.config.runtime = NULL; /* it was copied; the host may free it */
  if (!blank.config.lua_memory) blank.config.lua_memory = (size_t)4 << 20;
  if (!blank.config.device_memory) blank.config.device_memory = (uint64_t)64 << 20;
  if (!blank.config.tensors) blank.config.tensors = 10000;
  if (!blank.config.streams) blank.config.streams = 8;
  if (!blank.config.queued_bytes) blank.config.queued_bytes = (uint64_t)256 << 20;
  if (blank.config.lua_memory > MOST_MEMORY) blank.config.lua_memory = MOST_MEMORY;
  blank.lua_most = blank.config.lua_memory;
  blank.lua_block = blank.lua_most / 4;
  if (blank.config.device_memory > MOST_MEMORY) blank.config.device_memory = MOST_MEMORY;
  if (blank.config.tensors > INT32_MAX / 2) blank.config.tensors = INT32_MAX / 2;
  if (blank.config.streams > INT32_MAX / 2) blank.config.streams = INT32_MAX / 2;
  blank.host_limit = blank.host_most = (size_t)blank.config.device_memory + RUNTIME_BYTES;
  nib_sandbox *sandbox = host_allocate(&blank, NULL, 0, sizeof *sandbox);
  if (!sandbox) return NIB_MEMORY;
  *sandbox = blank;
  pthread_mutex_init(&sandbox->cancel_lock, NULL);
  sandbox->most_count = NIB_SANDBOX_COUNT;
  sandbox->blocks = (nib_lua_blocks){ NULL, allocate_block, sandbox };
  nib_config runtime = sandbox->host;
  runtime.allocate = allocate_runtime;
  if (runtime.log) runtime.log = log_runtime;
  if (runtime.parallel_for) runtime.parallel_for = parallel_for;
  runtime.user = sandbox;
  runtime.memory_cap = sandbox->config.device_memory;
  runtime.queued_bytes = sandbox->config.queued_bytes;
  runtime.streams = sandbox->config.streams;
  runtime.index_base = 1;
  nib_status status = nib_runtime_create(&runtime, &sandbox->runtime);
  if (status == NIB_OK) {
    sandbox->L = lua_newstate(allocate_lua, sandbox);
    status = sandbox->L ? run(sandbox, "sandbox", open_sandbox, NULL, NIB_UNLIMITED) : NIB_MEMORY;
  }
  if (status != NIB_OK) {
    nib_sandbox_close(sandbox);
    return status == NIB_INVALID ? status : NIB_MEMORY; /* open_sandbox can fail for lack of memory alone */
  }
  *out = sandbox;
  return NIB_OK;
}

void nib_sandbox_close(nib_sandbox *sandbox) {
  if (!sandbox) return;
  nib_runtime_close(sandbox->runtime); /* first: it drops queued work, which lua_close would wait for */
  if (sandbox->L) lua_close(sandbox->L);
  nib_lua_blocks_free(&sandbox->blocks);
  pthread_mutex_destroy(&sandbox->cancel_lock);
  host_allocate(sandbox, sandbox, sizeof *sandbox, 0);
}
