/* Capture and graphs. */
#include <string.h>

#include "args.h"

static nib_graph *check_graph(lua_State *L, const char *operation) {
  return nib_lua_check(L, operation, "self", 1, NIB_LUA_GRAPH)->graph;
}

/* ---- Capture --------------------------------------------------------------------------------------------------- */

/* Calls the function at index 1. Tells the observers of the capture first. */
static int call_captured(lua_State *L) {
  NIB_LUA_OBSERVED(L);
  lua_call(L, 0, 0);
  return 0;
}

/* Captures the work that the function on top of the stack queues on the stream at an index, and pops the function. The
 * capture ends also when the function, an observer or Lua raises an error. Puts the graph into `object`, or updates the
 * graph that it has; returns whether it was updated in place. */
static bool capture(lua_State *L, const char *operation, int stream_index, nib_capture_mode mode,
                    nib_lua_object *object) {
  nib_stream *stream = ((nib_lua_object *)lua_touserdata(L, stream_index))->stream;
  bool is_update = object->graph != NULL, in_place = false;
  nib_lua_scope scope;
  nib_lua_prepare_scope(L, stream_index, &scope);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_pushcclosure(L, call_captured, 1);
  lua_insert(L, -2);
  nib_status status = nib_capture_begin(stream, mode);
  if (status == NIB_MEMORY) {
    nib_lua_collect(L);
    status = nib_capture_begin(stream, mode);
  }
  if (status != NIB_OK) nib_lua_raise(L, operation, status);
  if (nib_lua_call_in_scope(L, &scope, 1, 0) != LUA_OK) {
    nib_capture_abort(stream);
    lua_error(L); /* observers are told later, so that none of their errors hides the script's */
  }
  if (is_update && !nib_lua_is_open(object)) {
    nib_capture_abort(stream);
    nib_lua_expected(L, operation, "self", 1, "a graph that is not closed during its update");
  }
  status = nib_capture_end(stream, &object->graph, &in_place);
  if (status != NIB_OK) nib_lua_push_message(L, operation, status); /* before an observer's calls replace it */
  NIB_LUA_OBSERVED(L);
  if (status != NIB_OK) luaL_error(L, "%s", lua_tostring(L, -1));
  return in_place;
}

static nib_capture_mode mode_option(lua_State *L, const char *operation, int index) {
  static const char *const allowed[] = { "mode", NULL };
  static const char *const names[] = { "thread_local", "global", "relaxed" }; /* in the order of nib_capture_mode */
  nib_lua_options(L, operation, index, allowed);
  int mode = 0;
  if (nib_lua_push_option(L, index, "mode") != LUA_TNIL) {
    const char *name = nib_lua_word(L, -1);
    while (mode < 3 && strcmp(names[mode], name) != 0) mode++;
    if (mode == 3) nib_lua_expected(L, operation, "mode", -1, "\"thread_local\", \"global\" or \"relaxed\"");
  }
  lua_pop(L, 1);
  return (nib_capture_mode)mode;
}

int nib_lua_stream_capture(lua_State *L) {
  nib_lua_check(L, "stream:capture", "self", 1, NIB_LUA_STREAM);
  if (!nib_lua_is_function(L, 2)) nib_lua_expected(L, "stream:capture", "fn", 2, "a function");
  nib_capture_mode mode = mode_option(L, "stream:capture", 3);
  nib_lua_object *object = nib_lua_push(L, NIB_LUA_GRAPH);
  lua_pushvalue(L, 1);
  lua_setiuservalue(L, -2, 1);
  lua_pushvalue(L, 2);
  capture(L, "stream:capture", 1, mode, object);
  return 1;
}

/* ---- Graphs ---------------------------------------------------------------------------------------------------- */

static int graph_replay(lua_State *L) {
  nib_graph *graph = check_graph(L, "graph:replay");
  nib_stream *stream = nib_lua_current_stream(L, "graph:replay", nib_graph_device(graph));
  NIB_LUA_WAIT(L, "graph:replay", nib_graph_wait(graph, timeout_us));
  NIB_LUA_DO(L, "graph:replay", nib_graph_replay(graph, stream));
  return 0;
}

static int graph_update(lua_State *L) {
  nib_graph *graph = check_graph(L, "graph:update");
  if (!nib_lua_is_function(L, 2)) nib_lua_expected(L, "graph:update", "fn", 2, "a function");
  lua_settop(L, 2);
  lua_getiuservalue(L, 1, 1);
  const nib_lua_object *stream = nib_lua_test(L, 3, NIB_LUA_STREAM);
  if (!stream || !nib_lua_is_open(stream)) { /* the graph's stream is closed: use the current one */
    lua_settop(L, 2);
    nib_lua_current_stream(L, "graph:update", nib_graph_device(graph));
    nib_lua_push_current_stream(L, nib_graph_device(graph));
  }
  lua_pushvalue(L, 2);
  lua_pushboolean(L, capture(L, "graph:update", 3, NIB_CAPTURE_THREAD_LOCAL, lua_touserdata(L, 1)));
  return 1;
}

static int graph_nodes(lua_State *L) {
  const nib_graph *graph = check_graph(L, "graph:nodes");
  int32_t count = nib_graph_node_count(graph);
  lua_createtable(L, count, 0);
  for (int32_t i = 0; i < count; i++) {
    const int32_t *deps;
    nib_lua_step(L, i);
    int32_t dep_count = nib_graph_node_deps(graph, i, &deps);
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, i + 1);
    lua_setfield(L, -2, "id");
    lua_pushstring(L, nib_graph_node_name(graph, i));
    lua_setfield(L, -2, "name");
    lua_createtable(L, dep_count, 0);
    for (int32_t k = 0; k < dep_count; k++) {
      lua_pushinteger(L, deps[k] + 1);
      lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "deps");
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int graph_dot(lua_State *L) {
  static const char *const allowed[] = { "driver", NULL };
  nib_graph *graph = check_graph(L, "graph:dot");
  nib_lua_options(L, "graph:dot", 2, allowed);
  bool driver = nib_lua_boolean_option(L, "graph:dot", 2, "driver", false);
  if (driver && nib_lua_get_state(L)->limits.no_addresses)
    return nib_lua_argument_error(L, "graph:dot", "driver",
                                  "false in a sandbox (the driver's text contains addresses), got true");
  nib_status (*dot)(nib_graph *, char *, size_t, size_t *) = driver ? nib_graph_driver_dot : nib_graph_dot;
  size_t needed = 0;
  NIB_LUA_DO(L, "graph:dot", dot(graph, NULL, 0, &needed));
  size_t room = needed;
  char *text = lua_newuserdatauv(L, room + 1, 0);
  NIB_LUA_DO(L, "graph:dot", dot(graph, text, room + 1, &needed));
  lua_pushlstring(L, text, needed < room ? needed : room);
  return 1;
}

static const luaL_Reg methods[] = {
  { "replay", graph_replay },
  { "update", graph_update },
  { "nodes", graph_nodes },
  { "dot", graph_dot },
  { NULL, NULL },
};

void nib_lua_open_graph(lua_State *L, nib_lua_state *state, int state_index) {
  nib_lua_new_class(L, state, state_index, NIB_LUA_GRAPH, methods, NULL);
}
