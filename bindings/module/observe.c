/* nibble.observe, nibble.peek, nibble.check.
 *
 * The runtime calls its observer in the middle of its functions, where no Lua code may run. So observations are copied
 * into a list. The Lua observers are called later, where a C function of the module may raise an error
 * (NIB_LUA_OBSERVED). */
#include <stdlib.h>
#include <string.h>

#include "args.h"

struct access {
  uint64_t storage;
  int64_t offset_bytes;
  nib_dtype dtype;
  int32_t ndim;
  int64_t shape[NIB_MAX_NDIM], stride[NIB_MAX_NDIM];
  bool write;
  const char *parameter, *kv_layout;
};

struct nib_lua_observation {
  struct nib_lua_observation *next;
  uint64_t number;
  bool collected;
  nib_observation seen; /* its arrays and strings are copied behind this struct */
  const struct access *accesses;
};

/* ---- From the runtime ------------------------------------------------------------------------------------------ */

/* The next `bytes` of a block, aligned for any type. */
static void *cut(char **block, size_t bytes) {
  void *result = *block;
  *block += (bytes + 15) & ~(size_t)15;
  return result;
}

static void keep(void *user, const nib_observation *seen) {
  nib_lua_state *state = user;
  if (state->telling && !state->collecting)
    return; /* an observer's own work is not observed, but objects that the collector releases may be the script's */
  size_t accesses = (size_t)seen->access_count * sizeof(struct access),
         deps = (size_t)seen->dep_count * sizeof *seen->deps;
  size_t attributes = (size_t)seen->attribute_count * sizeof *seen->attributes;
  size_t kernel = seen->kernel ? strlen(seen->kernel) + 1 : 0, name = seen->name ? strlen(seen->name) + 1 : 0;
  char *block =
    malloc(sizeof(struct nib_lua_observation) + accesses + deps + attributes + kernel + name + (size_t)6 * 16);
  if (!block) {
    state->observations_lost = true;
    return;
  }
  struct nib_lua_observation *kept = cut(&block, sizeof *kept);
  struct access *access = cut(&block, accesses);
  *kept = (struct nib_lua_observation){
    .number = ++state->observed_count, .collected = state->collecting, .seen = *seen, .accesses = access
  };
  kept->seen.access_count = 0;
  for (int32_t i = 0; i < seen->access_count; i++) {
    const nib_tensor *tensor = seen->accesses[i].tensor;
    if (!tensor) continue;
    memset(access, 0, sizeof *access); /* push_access compares with memcmp */
    access->storage = nib_tensor_storage(tensor);
    access->offset_bytes = nib_tensor_offset_bytes(tensor);
    access->dtype = nib_tensor_dtype(tensor);
    access->ndim = nib_tensor_ndim(tensor);
    access->write = seen->accesses[i].write;
    access->parameter = seen->accesses[i].parameter;
    access->kv_layout = seen->accesses[i].kv_layout;
    memcpy(access->shape, nib_tensor_shape(tensor), sizeof *access->shape * (size_t)access->ndim);
    memcpy(access->stride, nib_tensor_stride(tensor), sizeof *access->stride * (size_t)access->ndim);
    access++;
    kept->seen.access_count++;
  }
  if (deps > 0) kept->seen.deps = memcpy(cut(&block, deps), seen->deps, deps);
  if (attributes > 0) kept->seen.attributes = memcpy(cut(&block, attributes), seen->attributes, attributes);
  if (kernel > 0) kept->seen.kernel = memcpy(cut(&block, kernel), seen->kernel, kernel);
  if (name > 0) kept->seen.name = memcpy(cut(&block, name), seen->name, name);
  if (seen->kind == NIB_OBSERVED_SYNCHRONIZED && state->wait_began_ns && state->wait_began_ns < seen->begin_ns)
    kept->seen.begin_ns = state->wait_began_ns;
  *(state->observed_last ? &state->observed_last->next : &state->observed) = kept;
  state->observed_last = kept;
}

void nib_lua_forget_observed(nib_lua_state *state) {
  while (state->observed) {
    struct nib_lua_observation *first = state->observed;
    state->observed = first->next;
    free(first);
  }
  state->observed_last = NULL;
  state->observations_lost = false;
}

/* ---- To Lua ---------------------------------------------------------------------------------------------------- */

/* Whether a chunk's name is that of a loaded module "nibble.A.B": a file .../nibble/A/B.lua. */
static bool is_own_module(lua_State *L, const char *source) {
  const char *name = NULL;
  for (const char *at = source; (at = strstr(at, "nibble/")); at++)
    if (at > source && (at[-1] == '/' || at[-1] == '@')) name = at;
  size_t length = name ? strlen(name) : 0;
  if (length < 5 || strcmp(name + length - 4, ".lua") != 0) return false;
  lua_pushlstring(L, name, length - 4);
  luaL_gsub(L, lua_tostring(L, -1), "/", ".");
  lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
  lua_pushvalue(L, -2);
  bool loaded = lua_rawget(L, -2) != LUA_TNIL;
  lua_pop(L, 4);
  return loaded;
}

enum { MOST_CALLERS = 4, KNOWN_ACCESSES = 512, KNOWN_PLACES = 128 };

/* A cache of the Lua values of accesses and places, since a script's lines use the same views again and again. Entries
 * are found by hash; their Lua values are in a table, the user value. */
struct known {
  struct access accesses[KNOWN_ACCESSES]; /* the table of [k] is at index k + 1 */
  struct {
    int count;
    struct {
      const char *source;
      int line;
    } frames[MOST_CALLERS + 1];
  } places[KNOWN_PLACES]; /* the strings of [k] are at index -1 - 3 * k and the two below: all sources, where, callers
                           */
};

/* Pushes the cache's table and returns the cache. */
static struct known *push_known(lua_State *L) {
  if (lua_getiuservalue(L, lua_upvalueindex(1), NIB_LUA_KNOWN) != LUA_TUSERDATA) {
    lua_pop(L, 1);
    memset(lua_newuserdatauv(L, sizeof(struct known), 1), 0, sizeof(struct known));
    lua_createtable(L, KNOWN_ACCESSES, 0);
    lua_pushvalue(L, -2);
    lua_rawseti(L, -2, 0); /* the table keeps the cache alive if a finalizer removes the last observer meanwhile */
    lua_setiuservalue(L, -2, 1);
    lua_pushvalue(L, -1);
    lua_setiuservalue(L, lua_upvalueindex(1), NIB_LUA_KNOWN);
  }
  struct known *known = lua_touserdata(L, -1);
  lua_getiuservalue(L, -1, 1);
  lua_remove(L, -2);
  return known;
}

static uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

/* Pushes "FILE:LINE" of the innermost running Lua function outside nibble's own modules, and the places that it was
 * called from, innermost first, separated by " < "; nil if there is none. The cache's table is at index `table`. */
static void push_places(lua_State *L, struct known *known, int table) {
  lua_Debug frames[MOST_CALLERS + 1];
  int count = 0;
  uint64_t hash = 0;
  for (int level = 1; count <= MOST_CALLERS && lua_getstack(L, level, &frames[count]); level++) {
    lua_getinfo(L, "Sl", &frames[count]);
    if (frames[count].currentline <= 0 || is_own_module(L, frames[count].source)) continue;
    hash = mixed(mixed(hash, (uint64_t)(uintptr_t)frames[count].source), (uint64_t)frames[count].currentline);
    count++;
  }
  if (count == 0) {
    lua_pushnil(L);
    lua_pushnil(L);
    return;
  }
  int slot = (int)(hash % KNOWN_PLACES), first = -1 - 3 * slot;
  bool same = known->places[slot].count == count;
  size_t left = 0;
  lua_rawgeti(L, table, first);
  const char *sources = lua_tolstring(L, -1, &left);
  for (int i = 0; same && i < count; i++) { /* a new source may have the address of one that was freed */
    size_t length = frames[i].srclen;
    same = known->places[slot].frames[i].source == frames[i].source &&
           known->places[slot].frames[i].line == frames[i].currentline && length <= left &&
           memcmp(sources, frames[i].source, length) == 0;
    sources += same ? length : 0;
    left -= same ? length : 0;
  }
  lua_pop(L, 1);
  if (!same || left > 0) {
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    for (int i = 0; i < count; i++) luaL_addlstring(&buffer, frames[i].source, frames[i].srclen);
    luaL_pushresult(&buffer);
    for (int i = 0; i < count; i++) {
      const char *source = *frames[i].source == '@' ? frames[i].source + 1 : frames[i].short_src;
      lua_pushfstring(L, "%s%s:%d", i > 1 ? " < " : "", source, frames[i].currentline);
    }
    if (count > 1) lua_concat(L, count - 1);
    if (count == 1) lua_pushnil(L);
    known->places[slot].count = 0; /* empty until all is stored: lua_rawseti can raise an error */
    for (int i = 2; i >= 0; i--) lua_rawseti(L, table, first - i);
    for (int i = 0; i < count; i++) {
      known->places[slot].frames[i].source = frames[i].source;
      known->places[slot].frames[i].line = frames[i].currentline;
    }
    known->places[slot].count = count;
  }
  lua_rawgeti(L, table, first - 1);
  lua_rawgeti(L, table, first - 2);
}

static void set_number(lua_State *L, const char *name, uint64_t number) {
  if (number == 0) return;
  lua_pushinteger(L, (lua_Integer)number);
  lua_setfield(L, -2, name);
}

static void set_text(lua_State *L, const char *name, const char *text) {
  if (!text) return;
  lua_pushstring(L, text);
  lua_setfield(L, -2, name);
}

static void set_true(lua_State *L, const char *name, bool value) {
  if (!value) return;
  lua_pushboolean(L, true);
  lua_setfield(L, -2, name);
}

static void set_sizes(lua_State *L, const char *name, int32_t ndim, const int64_t *sizes) {
  lua_createtable(L, ndim, 0);
  for (int32_t i = 0; i < ndim; i++) {
    lua_pushinteger(L, sizes[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, name);
}

static void push_access(lua_State *L, const struct access *access, struct known *known, int table) {
  uint64_t hash = mixed(mixed(access->storage, (uint64_t)access->offset_bytes), (uint64_t)(uintptr_t)access->parameter);
  for (int32_t i = 0; i < access->ndim; i++)
    hash = mixed(mixed(hash, (uint64_t)access->shape[i]), (uint64_t)access->stride[i]);
  int slot = (int)(hash % KNOWN_ACCESSES);
  if (memcmp(&known->accesses[slot], access, sizeof *access) == 0) { /* never an empty entry: storages count from 1 */
    lua_rawgeti(L, table, slot + 1);
    return;
  }
  lua_createtable(L, 0, 8);
  set_number(L, "storage", access->storage);
  lua_pushinteger(L, access->offset_bytes);
  lua_setfield(L, -2, "offset");
  set_text(L, "dtype", nib_dtype_name(access->dtype));
  set_sizes(L, "shape", access->ndim, access->shape);
  set_sizes(L, "stride", access->ndim, access->stride);
  lua_pushboolean(L, access->write);
  lua_setfield(L, -2, "write");
  set_text(L, "parameter", access->parameter);
  set_text(L, "kv_layout", access->kv_layout);
  memset(&known->accesses[slot], 0, sizeof *access);
  lua_pushvalue(L, -1);
  lua_rawseti(L, table, slot + 1);
  known->accesses[slot] = *access;
}

/* The cache's table is at index `table`. */
static void push_observation(lua_State *L, const struct nib_lua_observation *kept, struct known *known, int table) {
  const nib_observation *seen = &kept->seen;
  lua_createtable(L, 0, 16);
  set_text(L, "kind", nib_observation_name(seen->kind));
  lua_pushnumber(L, (double)seen->time_ns / 1e9);
  lua_setfield(L, -2, "time");
  lua_pushnumber(L, (double)seen->begin_ns / 1e9);
  lua_setfield(L, -2, "begin");
  set_text(L, "operation", seen->operation);
  set_text(L, "kernel", seen->kernel);
  set_text(L, "name", seen->name);
  set_text(L, "device", nib_device_get_info(seen->device)->name);
  set_number(L, "stream", seen->stream);
  set_number(L, "event", seen->event);
  set_number(L, "graph", seen->graph);
  set_number(L, "capture", seen->capture);
  set_number(L, "storage", seen->storage);
  set_number(L, "unjoined", seen->unjoined);
  set_true(L, "user_kernel", seen->user_kernel);
  set_true(L, "collected", kept->collected);
  push_places(L, known, table);
  lua_setfield(L, -3, "callers");
  lua_setfield(L, -2, "where");
  if (seen->kind == NIB_OBSERVED_STORAGE_CREATED || seen->kind == NIB_OBSERVED_STORAGE_FREED) {
    lua_pushinteger(L, (lua_Integer)seen->bytes);
    lua_setfield(L, -2, "bytes");
  }
  if (seen->kind == NIB_OBSERVED_TENSOR_RELEASED) {
    lua_pushinteger(L, seen->handles);
    lua_setfield(L, -2, "handles");
  }
  if (seen->node >= 0) {
    set_number(L, "node", (uint64_t)seen->node + 1);
    lua_createtable(L, seen->dep_count, 0);
    for (int32_t i = 0; i < seen->dep_count; i++) {
      lua_pushinteger(L, seen->deps[i] + 1);
      lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "deps");
  }
  if (seen->kind != NIB_OBSERVED_WORK && seen->kind != NIB_OBSERVED_HOST_READ && seen->kind != NIB_OBSERVED_HOST_WRITE)
    return;
  lua_createtable(L, seen->access_count, 0);
  for (int32_t i = 0; i < seen->access_count; i++) {
    push_access(L, &kept->accesses[i], known, table);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "accesses");
  lua_createtable(L, 0, seen->attribute_count);
  for (int32_t i = 0; i < seen->attribute_count; i++) {
    const nib_attribute *attribute = &seen->attributes[i];
    if (attribute->kind == NIB_ATTRIBUTE_BOOLEAN) lua_pushboolean(L, attribute->value != 0);
    else if (attribute->kind == NIB_ATTRIBUTE_REAL) lua_pushnumber(L, attribute->real);
    else lua_pushinteger(L, attribute->value);
    lua_setfield(L, -2, attribute->name);
  }
  lua_setfield(L, -2, "attributes");
}

/* Calls all observers with one observation (a light userdata). */
static int tell(lua_State *L) {
  const struct nib_lua_observation *kept = lua_touserdata(L, 1);
  lua_getiuservalue(L, lua_upvalueindex(1), NIB_LUA_OBSERVERS);
  struct known *known = push_known(L);
  push_observation(L, kept, known, 3);
  for (lua_Integer i = 1; lua_rawgeti(L, 2, i) != LUA_TNIL; i += 3) {
    lua_rawgeti(L, 2, i + 2);
    bool concerned = (uint64_t)lua_tointeger(L, -1) < kept->number; /* the observer was there when it happened */
    lua_pop(L, 2);
    if (!concerned) continue;
    lua_rawgeti(L, 2, i + 1);
    lua_pushvalue(L, 4);
    lua_call(L, 1, 0);
  }
  return 0;
}

void nib_lua_tell(lua_State *L) {
  nib_lua_state *state = nib_lua_get_state(L);
  if (state->telling) return;
  luaL_checkstack(L, 8, NULL);
  int status = LUA_OK;
  while (state->observed && status == LUA_OK) {
    struct nib_lua_observation *first = state->observed;
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushcclosure(L, tell, 1);
    lua_pushlightuserdata(L, first);
    state->telling = true;
    state->busy++; /* observers must not release objects that the running function uses */
    status = lua_pcall(L, 1, 0, 0);
    state->busy--;
    state->telling = false;
    if (state->observed != first) continue; /* the last observer was removed, and the list freed */
    state->observed = first->next;
    if (!state->observed) state->observed_last = NULL;
    free(first);
  }
  if (status != LUA_OK) lua_error(L);
  if (!state->observations_lost) return;
  state->observations_lost = false;
  luaL_error(L, "observe: out of memory; some observations are lost");
}

/* ---- The functions --------------------------------------------------------------------------------------------- */

int nib_lua_observe(lua_State *L) {
  nib_lua_state *state = nib_lua_get_state(L);
  nib_runtime *runtime = nib_lua_runtime(L, "observe");
  lua_settop(L, 2);
  if (!lua_isnil(L, 1) && !nib_lua_is_function(L, 1)) nib_lua_expected(L, "observe", "fn", 1, "a function or nil");
  const char *name = lua_isnil(L, 2) ? "" : nib_lua_text(L, "observe", "name", 2);
  lua_newtable(L);
  lua_Integer count = 0;
  lua_getiuservalue(L, lua_upvalueindex(1), NIB_LUA_OBSERVERS);
  for (lua_Integer i = 1; lua_rawgeti(L, 4, i) != LUA_TNIL; i += 3) {
    bool other = strcmp(lua_tostring(L, -1), name) != 0;
    lua_pop(L, 1);
    for (int k = 0; other && k < 3; k++) {
      lua_rawgeti(L, 4, i + k);
      lua_rawseti(L, 3, ++count);
    }
  }
  if (!lua_isnil(L, 1)) {
    lua_pushstring(L, name);
    lua_rawseti(L, 3, ++count);
    lua_pushvalue(L, 1);
    lua_rawseti(L, 3, ++count);
    lua_pushinteger(L, (lua_Integer)state->observed_count);
    lua_rawseti(L, 3, ++count);
  }
  lua_pushvalue(L, 3);
  lua_setiuservalue(L, lua_upvalueindex(1), NIB_LUA_OBSERVERS);
  if (count > 0 || state->observes) nib_runtime_observe(runtime, count > 0 ? keep : NULL, state);
  state->observes = count > 0;
  if (count > 0) return 0;
  nib_lua_forget_observed(state);
  lua_pushnil(L);
  lua_setiuservalue(L, lua_upvalueindex(1), NIB_LUA_KNOWN);
  return 0;
}

static int64_t field(lua_State *L, const char *name) {
  lua_getfield(L, 1, name);
  int64_t value = nib_lua_integer(L, "peek", name, lua_gettop(L));
  lua_pop(L, 1);
  return value;
}

int nib_lua_peek(lua_State *L) {
  nib_runtime *runtime = nib_lua_runtime(L, "peek");
  int64_t shape[NIB_MAX_NDIM], stride[NIB_MAX_NDIM];
  lua_settop(L, 1);
  if (lua_type(L, 1) != LUA_TTABLE)
    nib_lua_expected(L, "peek", "access", 1, "a table with storage, offset, dtype, shape and stride");
  nib_lua_plain_table(L, "peek", "access", 1);
  int64_t storage = field(L, "storage"), offset = field(L, "offset");
  lua_getfield(L, 1, "dtype");
  nib_dtype dtype = nib_lua_dtype(L, "peek", "dtype", 2);
  lua_getfield(L, 1, "shape");
  lua_getfield(L, 1, "stride");
  int32_t ndim = nib_lua_integer_list(L, "peek", "shape", 3, shape);
  if (nib_lua_integer_list(L, "peek", "stride", 4, stride) != ndim)
    nib_lua_expected(L, "peek", "stride", 4, "a stride for each size");
  uint64_t bytes = nib_dtype_bytes(dtype);
  for (int32_t i = 0; i < ndim; i++) { /* the runtime refuses sizes that are negative or too large */
    if (shape[i] < 0 || (shape[i] > 0 && bytes > ((uint64_t)1 << 40) / (uint64_t)shape[i])) bytes = SIZE_MAX;
    if (bytes != SIZE_MAX) bytes *= (uint64_t)shape[i];
  }
  luaL_Buffer buffer;
  char *data = luaL_buffinitsize(L, &buffer, bytes == SIZE_MAX ? 0 : (size_t)bytes);
  nib_status status = nib_peek(runtime, (uint64_t)storage, dtype, offset, ndim, shape, stride, data, (size_t)bytes);
  if (status == NIB_OK) {
    luaL_pushresultsize(&buffer, (size_t)bytes);
    return 1;
  }
  if (status != NIB_STATE && status != NIB_CAPTURING) return nib_lua_raise(L, "peek", status);
  lua_pushnil(L);
  nib_lua_push_message(L, "peek", status);
  return 2;
}

int nib_lua_call_module(lua_State *L, const char *module, const char *name) {
  lua_getglobal(L, "require");
  lua_pushstring(L, module);
  lua_call(L, 1, 1);
  lua_getfield(L, -1, name);
  lua_insert(L, 1);
  lua_pop(L, 1);
  lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
  return lua_gettop(L);
}

/* Lua: () -> where, callers. The script's place, as in observations; for the checker. */
static int place(lua_State *L) {
  struct known *known = push_known(L);
  push_places(L, known, lua_gettop(L));
  return 2;
}

int nib_lua_check_mode(lua_State *L) {
  NIB_LUA_OBSERVED(L);
  lua_settop(L, 1);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_pushcclosure(L, place, 1);
  return nib_lua_call_module(L, "nibble.checker", "check");
}

int nib_lua_check_reports(lua_State *L) {
  NIB_LUA_OBSERVED(L); /* observations that an error has kept back */
  return nib_lua_call_module(L, "nibble.checker", "reports");
}
