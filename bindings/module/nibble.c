/* The Lua module `nibble`: opening and closing, errors, memory, waits, and the functions about devices. */
#define _POSIX_C_SOURCE 200809L

#include <string.h>
#include <time.h>

#include "args.h"

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

/* The message without the `operation: ` at its beginning, if it has one. */
static const char *after_operation(const char *message) {
  const char *colon = strstr(message, ": "), *space = strchr(message, ' ');
  return colon && space == colon + 1 ? colon + 2 : message;
}

const char *nib_lua_push_message(lua_State *L, const char *operation, nib_status status) {
  const nib_lua_state *state = nib_lua_get_state(L);
  const char *message = state->runtime ? nib_error(state->runtime) : "";
  if (!*message) message = nib_status_text(status);
  /* These messages name the operation at fault, or none; it is not the one that was called now. */
  if (status == NIB_FAULT || status == NIB_STREAM || status == NIB_LOST || status == NIB_FORKED)
    return lua_pushstring(L, message);
  /* The runtime does not know an operation's Lua name, nor that a method's tensor is `self`. */
  const char *text = after_operation(message), *self = "";
  if (strchr(operation, ':'))
    for (const char *const *name = (const char *const[]){ "tensor: ", "destination: ", "stream: ", NULL }; *name;
         name++)
      if (strncmp(text, *name, strlen(*name)) == 0) self = "self: ", text += strlen(*name);
  return lua_pushfstring(L, "%s: %s%s", operation, self, text);
}

int nib_lua_raise(lua_State *L, const char *operation, nib_status status) {
  const nib_lua_state *state = nib_lua_get_state(L);
  if (status == NIB_TIMEOUT && state->limits.check) state->limits.check(L); /* the sandbox's deadline passed */
  luaL_checkstack(L, 4, NULL);
  return luaL_error(L, "%s", nib_lua_push_message(L, operation, status));
}

nib_runtime *nib_lua_runtime(lua_State *L, const char *operation) {
  nib_runtime *runtime = nib_lua_get_state(L)->runtime;
  if (!runtime) luaL_error(L, "%s: the Lua state is being closed", operation);
  return runtime;
}

void nib_lua_refuse_capture(lua_State *L, const char *operation, const nib_device *device) {
  if (nib_device_is_capturing(device))
    luaL_error(L, "%s: not allowed while a stream of %s captures; read values and wait after the capture", operation,
               nib_device_get_info(device)->name);
}

/* ---- Memory and waits ------------------------------------------------------------------------------------------ */

/* New streams, and bytes of new tensors, that are worth a full collection. */
#define MOST_STREAMS     64
#define LEAST_COLLECTION ((uint64_t)64 << 20)

void nib_lua_collect(lua_State *L) {
  nib_lua_state *state = nib_lua_get_state(L);
  state->busy++; /* finalizers run, but raise no errors here */
  lua_gc(L, LUA_GCCOLLECT);
  state->busy--;
  state->fresh_bytes = state->kept_bytes = 0;
  state->fresh_streams = 0;
  for (int32_t i = 0; state->runtime && i < nib_device_count(state->runtime); i++) {
    nib_device *device = nib_device_at(state->runtime, i);
    if (nib_device_get_info(device)->available) state->kept_bytes += nib_device_memory(device).used_bytes;
  }
}

/* Lua's collector sees only the few bytes of a userdata. So a full collection runs when new tensors have doubled the
 * memory in use after the last one, which is the collector's own default. */
void nib_lua_account(lua_State *L, const nib_tensor *tensor) {
  nib_lua_state *state = nib_lua_get_state(L);
  state->fresh_bytes += (uint64_t)nib_tensor_numel(tensor) * nib_dtype_bytes(nib_tensor_dtype(tensor));
  if (state->fresh_bytes <= LEAST_COLLECTION || state->fresh_bytes <= state->kept_bytes) return;
  /* Not running: a finalizer runs, or the script has stopped the collector. */
  if (lua_gc(L, LUA_GCISRUNNING) == 1) nib_lua_collect(L);
}

void nib_lua_account_stream(lua_State *L) {
  nib_lua_state *state = nib_lua_get_state(L);
  if (++state->fresh_streams > MOST_STREAMS && lua_gc(L, LUA_GCISRUNNING) == 1) nib_lua_collect(L);
}

void nib_lua_check_elements(lua_State *L, const char *operation, const nib_tensor *view) {
  int64_t most = nib_lua_get_state(L)->limits.most_elements;
  if (most && nib_tensor_numel(view) > most)
    nib_lua_argument_error(L, operation, "size", "a view of at most %I elements (the script's limit), got %I",
                           (LUAI_UACINT)most, (LUAI_UACINT)nib_tensor_numel(view));
}

void nib_lua_tick(lua_State *L) {
  nib_lua_state *state = nib_lua_get_state(L);
  if (state->observes && !state->wait_began_ns) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* the clock of observations */
    state->wait_began_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
  }
  if (state->limits.check) state->limits.check(L);
  luaL_checkstack(L, 4, NULL);
  lua_getiuservalue(L, lua_upvalueindex(1), NIB_LUA_TICK);
  state->busy++;
  int status = lua_pcall(L, 0, 0, 0);
  state->busy--;
  if (status != LUA_OK) lua_error(L);
}

/* ---- Devices --------------------------------------------------------------------------------------------------- */

static int devices(lua_State *L) {
  nib_runtime *runtime = nib_lua_runtime(L, "devices");
  int32_t count = nib_device_count(runtime);
  lua_createtable(L, count, 0);
  for (int32_t i = 0; i < count; i++) {
    const nib_device_info *info = nib_device_get_info(nib_device_at(runtime, i));
    lua_createtable(L, 0, 6);
    lua_pushstring(L, info->name);
    lua_setfield(L, -2, "name");
    lua_pushstring(L, info->description);
    lua_setfield(L, -2, "description");
    lua_pushboolean(L, info->available);
    lua_setfield(L, -2, "available");
    if (info->reason) {
      lua_pushstring(L, info->reason);
      lua_setfield(L, -2, "reason");
    }
    if (info->memory_bytes > 0) {
      lua_pushinteger(L, (lua_Integer)info->memory_bytes);
      lua_setfield(L, -2, "memory");
    }
    if (info->processors > 0) {
      lua_pushinteger(L, info->processors);
      lua_setfield(L, -2, "processors");
    }
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* The device; or pushes the reason and returns NULL. */
static nib_device *find_device(lua_State *L, const char *operation, const char *name) {
  nib_runtime *runtime = nib_lua_runtime(L, operation);
  nib_device *device = NULL;
  nib_status status = nib_device_find(runtime, name, &device);
  if (status == NIB_OK) return device;
  if (status != NIB_UNAVAILABLE) nib_lua_raise(L, operation, status);
  for (int32_t i = 0; i < nib_device_count(runtime); i++) { /* the reason that `devices` gives */
    const nib_device_info *info = nib_device_get_info(nib_device_at(runtime, i));
    if (strcmp(info->name, name) == 0 && info->reason) {
      lua_pushstring(L, info->reason);
      return NULL;
    }
  }
  lua_pushstring(L, nib_error(runtime));
  return NULL;
}

static int device(lua_State *L) {
  const char *name = lua_isnoneornil(L, 1) ? nib_lua_default_device() : nib_lua_text(L, "device", "name", 1);
  const nib_device *found = name ? find_device(L, "device", name) : nib_device_best(nib_lua_runtime(L, "device"));
  if (!found) {
    lua_pushnil(L);
    lua_insert(L, -2);
    return 2;
  }
  lua_pushstring(L, nib_device_get_info(found)->name);
  return 1;
}

static int available(lua_State *L) {
  if (find_device(L, "available", nib_lua_text(L, "available", "name", 1))) {
    lua_pushboolean(L, true);
    return 1;
  }
  lua_pushboolean(L, false);
  lua_insert(L, -2);
  return 2;
}

static int memory(lua_State *L) {
  nib_memory_info info = nib_device_memory(nib_lua_device(L, "memory", 1));
  lua_createtable(L, 0, 3);
  lua_pushinteger(L, (lua_Integer)info.used_bytes);
  lua_setfield(L, -2, "used");
  lua_pushinteger(L, (lua_Integer)info.reserved_bytes);
  lua_setfield(L, -2, "reserved");
  lua_pushinteger(L, (lua_Integer)info.peak_bytes);
  lua_setfield(L, -2, "peak");
  return 1;
}

static int synchronize_device(lua_State *L, const char *operation) {
  nib_device *which = nib_lua_device(L, operation, 1);
  nib_lua_refuse_capture(L, operation, which);
  NIB_LUA_WAIT(L, operation, nib_device_synchronize(which, timeout_us));
  return 0;
}

static int synchronize(lua_State *L) { return synchronize_device(L, "synchronize"); }
static int check_faults(lua_State *L) { return synchronize_device(L, "check_faults"); }

/* Calls the function at index 1 with the arguments after it. */
static int call_in_range(lua_State *L) {
  NIB_LUA_OBSERVED(L);
  lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
  return lua_gettop(L);
}

static int range(lua_State *L) {
  nib_runtime *runtime = nib_lua_runtime(L, "range");
  const char *name = nib_lua_text(L, "range", "name", 1);
  if (!nib_lua_is_function(L, 2)) nib_lua_expected(L, "range", "fn", 2, "a function");
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_pushcclosure(L, call_in_range, 1);
  lua_insert(L, 2);
  nib_range_push(runtime, name);
  int status = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
  nib_range_pop(runtime);
  if (status != LUA_OK) return lua_error(L);
  NIB_LUA_OBSERVED(L);
  return lua_gettop(L) - 1;
}

static int explain(lua_State *L) { return nib_lua_call_module(L, "nibble.explain", "print"); }

static const luaL_Reg functions[] = {
  { "devices", devices },
  { "device", device },
  { "available", available },
  { "memory", memory },
  { "synchronize", synchronize },
  { "check_faults", check_faults },
  { "range", range },
  { "explain", explain },
  { "observe", nib_lua_observe },
  { "peek", nib_lua_peek },
  { "check", nib_lua_check_mode },
  { "check_reports", nib_lua_check_reports },
  { "compile", nib_lua_compile },
  { "module", nib_lua_load_module },
  { "stream", nib_lua_new_stream },
  { "current_stream", nib_lua_get_current_stream },
  { "tensor", nib_lua_new_tensor },
  { "rope_table", nib_lua_rope_table },
  { NULL, NULL },
};

/* ---- Opening and closing --------------------------------------------------------------------------------------- */

static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  nib_lua_state *state = user;
  return nib_lua_blocks_allocate(&state->blocks, pointer, old_size, new_size);
}

/* Runs after the finalizers of all other objects, since the state is the oldest object. */
static int close_state(lua_State *L) {
  nib_lua_state *state = nib_lua_get_state(L);
  nib_runtime *runtime = state->runtime;
  state->runtime = NULL;
  if (state->observes) nib_runtime_observe(runtime, NULL, NULL);
  nib_lua_forget_observed(state);
  if (state->anchor) {
    nib_tensor_release(state->anchor);
    return 0;
  }
  nib_runtime_close(runtime);
  nib_lua_blocks_free(&state->blocks);
  return 0;
}

static void open_submodule(lua_State *L, int state_index, const char *name, const luaL_Reg *operations) {
  lua_newtable(L);
  lua_pushvalue(L, state_index);
  luaL_setfuncs(L, operations, 1);
  lua_setfield(L, -2, name);
}

static void open_runtime(lua_State *L, nib_lua_state *state, nib_runtime *shared, nib_status *why) {
  nib_config config = { .abi_version = NIB_ABI_VERSION, .index_base = 1, .allocate = allocate, .user = state };
  const int64_t nothing = 0;
  nib_status status;
  if (shared) status = nib_tensor_create(nib_device_at(shared, 0), NIB_UINT8, 1, &nothing, &state->anchor);
  else status = nib_runtime_create(&config, &state->runtime);
  if (why) *why = status;
  if (status != NIB_OK)
    luaL_error(L, "nibble: cannot %s: %s", shared ? "use the host's runtime" : "create a runtime",
               nib_status_text(status));
  if (shared) state->runtime = shared;
}

int luaopen_nibble(lua_State *L) { return nib_lua_open_module(L, NULL, NULL); }

int nib_lua_open_module(lua_State *L, nib_runtime *shared, nib_status *why) {
  luaL_checkversion(L);
  if (lua_getfield(L, LUA_REGISTRYINDEX, "nibble.state") == LUA_TUSERDATA) {
    const nib_lua_state *opened = lua_touserdata(L, -1);
    if (shared && opened->runtime != shared)
      return luaL_error(L, "nibble: the module is already open in this Lua state with another runtime");
    lua_getiuservalue(L, -1, NIB_LUA_MODULE);
    return 1;
  }
  lua_pop(L, 1);
  nib_lua_state *state = lua_newuserdatauv(L, sizeof *state, NIB_LUA_USER_VALUES);
  int state_index = lua_gettop(L);
  memset(state, 0, sizeof *state);
  lua_newtable(L);
  lua_pushvalue(L, state_index);
  lua_pushcclosure(L, close_state, 1);
  lua_setfield(L, -2, "__gc");
  lua_pushliteral(L, "nibble.state");
  lua_setfield(L, -2, "__name");
  lua_setmetatable(L, state_index);

  open_runtime(L, state, shared, why);

  lua_newtable(L);
  lua_setiuservalue(L, state_index, NIB_LUA_SCOPES);
  lua_newtable(L);
  lua_setiuservalue(L, state_index, NIB_LUA_DEFAULT_STREAMS);
  lua_newtable(L);
  lua_setiuservalue(L, state_index, NIB_LUA_OBSERVERS);
  static const char tick[] = "local x = 0 for i = 1, 3 do x = x + i end return x";
  if (luaL_loadbufferx(L, tick, sizeof tick - 1, "=nibble", "t") != LUA_OK) return lua_error(L);
  lua_setiuservalue(L, state_index, NIB_LUA_TICK);
  nib_lua_open_tensor(L, state, state_index);
  nib_lua_open_stream(L, state, state_index);
  nib_lua_open_graph(L, state, state_index);
  nib_lua_open_kernel(L, state, state_index);

  lua_newtable(L);
  lua_pushvalue(L, state_index);
  luaL_setfuncs(L, functions, 1);
  lua_pushvalue(L, state_index);
  luaL_setfuncs(L, nib_lua_creators, 1);
  lua_pushvalue(L, state_index);
  luaL_setfuncs(L, nib_lua_files, 1);
  open_submodule(L, state_index, "page", nib_lua_page);
  open_submodule(L, state_index, "quantization", nib_lua_quantization);
  open_submodule(L, state_index, "mla", nib_lua_mla);
  lua_pushstring(L, nib_version());
  lua_setfield(L, -2, "version");
  lua_pushvalue(L, -1);
  lua_setiuservalue(L, state_index, NIB_LUA_MODULE);
  lua_pushvalue(L, state_index);
  lua_setfield(L, LUA_REGISTRYINDEX, "nibble.state");
  return 1;
}
