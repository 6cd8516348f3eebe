/* Every function of nibble_lua.h, for every_entry.c like those of entries.h. The world's sandbox is made before memory
 * fails; the states of Lua that a call makes go into its results. */
#ifndef LUA_ENTRIES_H
#define LUA_ENTRIES_H

#include <lauxlib.h>
#include <lualib.h>

#include "entries.h"

/* What a script does all day, without pcall, which would hide that memory was missing. */
static const char script[] =
  "local Point = {} Point.__index = Point\n"
  "function Point.new(x) return setmetatable({ x = x }, Point) end\n"
  "function on_load(again) state.loaded = (state.loaded or 0) + 1 end\n"
  "state.t = nibble.arange(6)\n"
  "function run(t, n)\n"
  "  local s = nibble.stream()\n"
  "  local g = s:capture(function() t:fill(n) end)\n"
  "  g:replay() nibble.synchronize()\n"
  "  local list, text = {}, ('a1b22c333'):gsub('%d+', function(d) return '<' .. d .. '>' end)\n"
  "  for w in text:gmatch('%a') do list[#list + 1] = w:rep(3, '-') end\n"
  "  table.sort(list, function(a, b) return a > b end)\n"
  "  assert(table.concat(list, ',') == 'c-c-c,b-b-b,a-a-a')\n"
  "  table.move(list, 1, 3, 4) table.insert(list, 1, 'x') table.remove(list)\n"
  "  local co = coroutine.wrap(function(a) local b = coroutine.yield(a + 1) return b * 2 end)\n"
  "  assert(co(1) == 2 and co(4) == 8)\n"
  "  assert(load('return ...', 'c', 't', {})(Point.new(n).x) == n)\n"
  "  print(tostring(t), string.format('%s %5.1f', list, 2.5), #list)\n"
  "  return t:totable()[2], t, nibble.tensor({ 1, 2 })\n"
  "end\n";

static void *allocate_lua(void *user, void *pointer, size_t old_size, size_t new_size) {
  const struct world *w = user;
  return w->config.allocate(w->config.user, pointer, pointer ? old_size : 0, new_size);
}

static nib_sandbox_config sandbox_config(const struct world *w) {
  return (nib_sandbox_config){ .runtime = &w->config };
}

static void open_sandbox(struct world *w) {
  const nib_sandbox_config config = sandbox_config(w);
  OK(NULL, nib_sandbox_create(&config, &w->sandbox));
  CHECK_STATUS(NIB_OK, nib_sandbox_runtime(w->sandbox),
               nib_sandbox_load(w->sandbox, "script", script, sizeof script - 1, NIB_UNLIMITED));
  nib_device *device = NULL;
  OK(nib_sandbox_runtime(w->sandbox), nib_device_find(nib_sandbox_runtime(w->sandbox), device_name(), &device));
  OK(nib_sandbox_runtime(w->sandbox), nib_tensor_create(device, NIB_FLOAT32, SHAPE(4), &w->shown));
}

/* Whatever failed before, it works when nothing does. */
static void close_sandbox(struct world *w) {
  CHECK_STATUS(NIB_OK, nib_sandbox_runtime(w->sandbox),
               nib_sandbox_load(w->sandbox, "after", "assert(#tostring(1) == 1)", 25, NIB_UNLIMITED));
  nib_tensor_release(w->shown);
  nib_sandbox_close(w->sandbox);
  w->sandbox = NULL, w->shown = NULL;
}

/* An error of the script's is one that it got from memory. */
static nib_status told(const struct world *w, nib_status status) {
  const char *message = nib_sandbox_error(w->sandbox);
  CHECK((status == NIB_OK) == (*message == 0));
  return status == NIB_SCRIPT && strstr(message, "memory") ? NIB_MEMORY : status;
}

ENTRY(sandbox_create) {
  const nib_sandbox_config config = sandbox_config(w);
  nib_status status = nib_sandbox_create(&config, &w->made.sandbox);
  CHECK((status == NIB_OK) == (w->made.sandbox != NULL));
  return status;
}

ENTRY(sandbox_answers) {
  CHECK(nib_sandbox_runtime(w->sandbox) && nib_sandbox_lua_memory(w->sandbox) > 10000);
  CHECK(*nib_sandbox_error(w->sandbox) == 0);
  nib_sandbox_cancel(w->sandbox); /* ends nothing, as nothing runs */
  nib_sandbox_close(NULL);
  return NIB_OK;
}

ENTRY(sandbox_load) { return told(w, nib_sandbox_load(w->sandbox, "again", script, sizeof script - 1, NIB_UNLIMITED)); }

static int push_arguments(lua_State *L, void *user) {
  const struct world *w = user;
  nib_lua_push_tensor(L, w->shown);
  lua_pushinteger(L, 3);
  return 2;
}

static void take_results(lua_State *L, int count, void *user) {
  (void)user;
  CHECK(count == 3 && lua_tonumber(L, 1) == 3);
  nib_tensor *tensor = nib_lua_to_tensor(L, 2);
  CHECK(tensor && nib_tensor_numel(tensor) == 4 && !nib_lua_to_tensor(L, 1));
}

ENTRY(sandbox_call) {
  const nib_sandbox_values values = { push_arguments, take_results, w };
  return told(w, nib_sandbox_call(w->sandbox, "run", &values, NIB_UNLIMITED));
}

static int answer(lua_State *L) {
  lua_pushinteger(L, 42);
  return 1;
}

static void add_functions(lua_State *L, void *user) {
  (void)user;
  lua_newtable(L);
  lua_pushcfunction(L, answer);
  lua_setfield(L, -2, "answer");
  lua_setfield(L, 1, "host");
}

ENTRY(sandbox_extend) { return told(w, nib_sandbox_extend(w->sandbox, add_functions, NULL, 60000000)); }

/* A host's own state, with the world's runtime. */
ENTRY(lua_open) {
  w->made.L = lua_newstate(allocate_lua, w);
  if (!w->made.L) return NIB_MEMORY;
  nib_status status = nib_lua_open(w->made.L, w->runtime);
  CHECK(lua_gettop(w->made.L) == 1 && (status == NIB_OK ? lua_istable(w->made.L, 1) : lua_isstring(w->made.L, 1)));
  return status;
}

/* In a state that was opened before the world ended. */
static const char lua_script[] =
  "local nibble = ... local ok, message\n"
  "for _, call in ipairs({ function() return nibble.zeros(4) end, function() return nibble.zeros(4, { pinned = true }) "
  "end,\n"
  "    function() return nibble.current_stream():record() end, nibble.synchronize, nibble.stream }) do\n"
  "  ok, message = pcall(call)\n"
  "  if ok or type(message) ~= 'string' then error(tostring(message)) end\n"
  "end\n"
  "nibble.devices() nibble.device() nibble.memory()\n"
  "return message";

ENTRY(lua_ended) {
  if (!w->ended) return NIB_OK;
  const char *name = device_name();
  char restored[32];
  snprintf(restored, sizeof restored, "%s", name);
  unsetenv("NIBBLE_DEVICE"); /* the best one, which nobody has used yet */
  lua_settop(w->state, 1);
  CHECK(luaL_loadstring(w->state, lua_script) == LUA_OK);
  lua_pushvalue(w->state, 1);
  bool well = lua_pcall(w->state, 1, 1, 0) == LUA_OK;
  setenv("NIBBLE_DEVICE", restored, 1);
  const char *message = lua_tostring(w->state, -1);
  if (well && strstr(message, w->ended == NIB_CLOSED ? "the runtime is closed" : "after fork")) return w->ended;
  fprintf(stderr, "%s\n", message);
  return NIB_SCRIPT;
}

ENTRY(open) {
  w->made.L = lua_newstate(allocate_lua, w);
  if (!w->made.L) return NIB_MEMORY;
  lua_pushcfunction(w->made.L, luaopen_nibble);
  return lua_pcall(w->made.L, 0, 1, 0) == LUA_OK ? NIB_OK : NIB_MEMORY;
}

static const struct entry lua_entries[] = {
  { sandbox_create, "nib_sandbox_create nib_sandbox_close", ALONE | TELLS | OWN },
  { sandbox_answers,
    "nib_sandbox_runtime nib_sandbox_lua_memory nib_sandbox_error nib_sandbox_cancel nib_sandbox_close",
    SANDBOX | TELLS | ANSWERS },
  { sandbox_load, "nib_sandbox_load", SANDBOX | TELLS },
  { sandbox_call, "nib_sandbox_call nib_lua_push_tensor nib_lua_to_tensor", SANDBOX | TELLS },
  { sandbox_extend, "nib_sandbox_extend", SANDBOX | TELLS },
  { lua_open, "nib_lua_open", ALONE | TELLS },
  { lua_ended, "nib_lua_open", ALONE | MAKES_DO | TELLS },
  { open, "luaopen_nibble", ALONE | TELLS | OWN },
};

#define LUA_ENTRY_COUNT (sizeof lua_entries / sizeof *lua_entries)

#endif
