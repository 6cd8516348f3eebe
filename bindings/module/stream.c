/* Streams, the current stream, and events. */
#include "args.h"

/* ---- The current stream ---------------------------------------------------------------------------------------- */

static const nib_lua_scope *find_scope(const nib_lua_state *state, const nib_device *device) {
  const nib_lua_scope *scope = state->scope;
  while (scope && scope->device != device) scope = scope->outer;
  return scope;
}

nib_stream *nib_lua_current_stream(lua_State *L, const char *operation, nib_device *device) {
  const nib_lua_scope *scope = find_scope(nib_lua_get_state(L), device);
  if (!scope) return nib_device_default_stream(device);
  if (!nib_lua_is_open(scope->stream)) /* a script called its __gc */
    luaL_error(L, "%s: the current stream is closed", operation);
  return scope->stream->stream;
}

void nib_lua_push_current_stream(lua_State *L, nib_device *device) {
  const nib_lua_scope *scope = find_scope(nib_lua_get_state(L), device);
  lua_getiuservalue(L, lua_upvalueindex(1), scope ? NIB_LUA_SCOPES : NIB_LUA_DEFAULT_STREAMS);
  if (scope) {
    lua_rawgeti(L, -1, scope->depth);
  } else if (lua_rawgetp(L, -1, device) == LUA_TNIL) {
    lua_pop(L, 1);
    nib_lua_push_uncounted(L, NIB_LUA_STREAM)->stream = nib_device_default_stream(device);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, -3, device);
  }
  lua_remove(L, -2);
}

void nib_lua_prepare_scope(lua_State *L, int stream_index, nib_lua_scope *scope) {
  const nib_lua_state *state = nib_lua_get_state(L);
  nib_lua_object *stream = lua_touserdata(L, stream_index);
  int depth = state->scope ? state->scope->depth + 1 : 1;
  *scope = (nib_lua_scope){ state->scope, nib_stream_device(stream->stream), stream, depth };
  luaL_checkstack(L, 4, NULL);
  lua_getiuservalue(L, lua_upvalueindex(1), NIB_LUA_SCOPES);
  lua_pushvalue(L, stream_index);
  lua_rawseti(L, -2, scope->depth);
  lua_pop(L, 1);
}

int nib_lua_call_in_scope(lua_State *L, nib_lua_scope *scope, int arguments, int results) {
  nib_lua_state *state = nib_lua_get_state(L);
  state->scope = scope;
  int status = lua_pcall(L, arguments, results, 0); /* which makes a yield inside an error */
  state->scope = scope->outer;
  if (lua_checkstack(L, 2)) { /* otherwise the stream stays referenced until the next scope */
    lua_getiuservalue(L, lua_upvalueindex(1), NIB_LUA_SCOPES);
    lua_pushnil(L);
    lua_rawseti(L, -2, scope->depth);
    lua_pop(L, 1);
  }
  return status;
}

int nib_lua_get_current_stream(lua_State *L) {
  nib_lua_push_current_stream(L, nib_lua_device(L, "current_stream", 1));
  return 1;
}

/* ---- Streams --------------------------------------------------------------------------------------------------- */

static nib_lua_object *check_stream(lua_State *L, const char *operation) {
  return nib_lua_check(L, operation, "self", 1, NIB_LUA_STREAM);
}

int nib_lua_new_stream(lua_State *L) {
  static const char *const allowed[] = { "device", "priority", "handle", NULL };
  nib_lua_options(L, "stream", 1, allowed);
  nib_device *device = nib_lua_device_option(L, "stream", 1);
  int64_t priority = nib_lua_integer_option(L, "stream", 1, "priority", 0);
  bool wraps = nib_lua_push_option(L, 1, "handle") != LUA_TNIL,
       has_priority = nib_lua_push_option(L, 1, "priority") != LUA_TNIL;
  int64_t handle = nib_lua_integer_option(L, "stream", 1, "handle", 0);
  if (wraps && nib_lua_get_state(L)->limits.no_addresses)
    return nib_lua_argument_error(L, "stream", "handle", "none in a sandbox (it is an address), got one");
  if (wraps && has_priority) return nib_lua_expected(L, "stream", "priority", -1, "no priority with a handle");
  nib_lua_object *object = nib_lua_push(L, NIB_LUA_STREAM);
  if (wraps) NIB_LUA_DO(L, "stream", nib_stream_wrap(device, (void *)(uintptr_t)handle, &object->stream));
  else NIB_LUA_DO(L, "stream", nib_stream_create(device, priority < 0 ? -1 : 0, &object->stream));
  nib_lua_account_stream(L);
  return 1;
}

static int stream_scope(lua_State *L) {
  check_stream(L, "stream:scope");
  if (!nib_lua_is_function(L, 2)) nib_lua_expected(L, "stream:scope", "fn", 2, "a function");
  nib_lua_scope scope;
  nib_lua_prepare_scope(L, 1, &scope);
  if (nib_lua_call_in_scope(L, &scope, lua_gettop(L) - 2, LUA_MULTRET) != LUA_OK) return lua_error(L);
  return lua_gettop(L) - 1;
}

static int stream_synchronize(lua_State *L) {
  nib_stream *stream = check_stream(L, "stream:synchronize")->stream;
  nib_lua_refuse_capture(L, "stream:synchronize", nib_stream_device(stream));
  NIB_LUA_WAIT(L, "stream:synchronize", nib_stream_synchronize(stream, timeout_us));
  return 0;
}

static int stream_record(lua_State *L) {
  nib_stream *stream = check_stream(L, "stream:record")->stream;
  nib_lua_object *event = nib_lua_push(L, NIB_LUA_EVENT);
  NIB_LUA_DO(L, "stream:record", nib_event_record(stream, &event->event));
  return 1;
}

static int stream_wait(lua_State *L) {
  nib_stream *stream = check_stream(L, "stream:wait")->stream;
  nib_event *event = nib_lua_check(L, "stream:wait", "event", 2, NIB_LUA_EVENT)->event;
  nib_device *own = nib_stream_device(stream), *other = nib_event_device(event),
             *cpu = nib_device_at(nib_device_runtime(own), 0);
  if (own != other && (own == cpu || other == cpu)) { /* nib_stream_wait would block here, deaf to Ctrl-C */
    nib_lua_refuse_capture(L, "stream:wait", own);
    NIB_LUA_WAIT(L, "stream:wait", nib_event_synchronize(event, timeout_us));
  }
  NIB_LUA_DO(L, "stream:wait", nib_stream_wait(stream, event));
  return 0;
}

static const luaL_Reg stream_methods[] = {
  { "scope", stream_scope }, { "synchronize", stream_synchronize }, { "record", stream_record },
  { "wait", stream_wait },   { "capture", nib_lua_stream_capture }, { NULL, NULL },
};

/* ---- Events ---------------------------------------------------------------------------------------------------- */

static nib_event *check_waitable(lua_State *L, const char *operation, const char *parameter, int index) {
  nib_event *event = nib_lua_check(L, operation, parameter, index, NIB_LUA_EVENT)->event;
  nib_lua_refuse_capture(L, operation, nib_event_device(event));
  return event;
}

static int event_query(lua_State *L) {
  nib_status status = nib_event_synchronize(check_waitable(L, "event:query", "self", 1), 0);
  if (status != NIB_OK && status != NIB_TIMEOUT) nib_lua_raise(L, "event:query", status);
  NIB_LUA_OBSERVED(L);
  lua_pushboolean(L, status == NIB_OK);
  return 1;
}

static int event_synchronize(lua_State *L) {
  nib_event *event = check_waitable(L, "event:synchronize", "self", 1);
  NIB_LUA_WAIT(L, "event:synchronize", nib_event_synchronize(event, timeout_us));
  return 0;
}

static int event_elapsed(lua_State *L) {
  nib_event *start = check_waitable(L, "event:elapsed", "self", 1),
            *end = check_waitable(L, "event:elapsed", "later", 2);
  double milliseconds;
  NIB_LUA_WAIT(L, "event:elapsed", nib_event_synchronize(start, timeout_us));
  NIB_LUA_WAIT(L, "event:elapsed", nib_event_synchronize(end, timeout_us));
  NIB_LUA_DO(L, "event:elapsed", nib_event_elapsed(start, end, &milliseconds));
  lua_pushnumber(L, milliseconds);
  return 1;
}

static const luaL_Reg event_methods[] = {
  { "query", event_query },
  { "synchronize", event_synchronize },
  { "elapsed", event_elapsed },
  { NULL, NULL },
};

void nib_lua_open_stream(lua_State *L, nib_lua_state *state, int state_index) {
  nib_lua_new_class(L, state, state_index, NIB_LUA_STREAM, stream_methods, NULL);
  nib_lua_new_class(L, state, state_index, NIB_LUA_EVENT, event_methods, NULL);
}
