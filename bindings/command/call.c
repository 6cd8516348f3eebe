/* Calls that Ctrl-C can end, and the report of their errors. */
#define _POSIX_C_SOURCE 200809L

#include <lauxlib.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../visible.h"
#include "command.h"

/* ---- Calls and Ctrl-C ------------------------------------------------------------------------------------------ */

/* The Lua thread that runs now: the main one or a coroutine. The signal handler needs it because each Lua thread has
 * its own hook. */
static lua_State *volatile running;
static volatile sig_atomic_t pending; /* Ctrl-C was pressed and has not stopped anything yet */

static const char interrupted[] = "interrupted!"; /* its address is the registry key of the last such error */

static void stop(lua_State *L, lua_Debug *event) {
  (void)event;
  lua_sethook(L, NULL, 0, 0);
  if (!pending) /* another thread was stopped before this one's hook ran */
    return;
  pending = 0;
  luaL_where(L, 1);
  lua_pushstring(L, interrupted);
  lua_concat(L, 2);
  lua_pushvalue(L, -1);
  lua_rawsetp(L, LUA_REGISTRYINDEX, interrupted);
  lua_error(L);
}

static void stop_soon(lua_State *L) {
  lua_sethook(L, stop, LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT, 1);
}

/* Installed with SA_RESETHAND, so that a second Ctrl-C ends a process that is stuck outside Lua. */
static void on_interrupt(int number) {
  (void)number;
  lua_State *L = running;
  pending = 1;
  if (L) stop_soon(L);
}

static void enter(lua_State *L) {
  running = L;
  if (pending) /* Ctrl-C set the hook of the thread that ran before */
    stop_soon(L);
}

/* Whether the value on top of the stack is the error that Ctrl-C raised. */
static bool is_interruption(lua_State *L) {
  lua_rawgetp(L, LUA_REGISTRYINDEX, interrupted);
  bool is = !lua_isnil(L, -1) && lua_rawequal(L, -1, -2);
  lua_pop(L, 1);
  return is;
}

static int add_traceback(lua_State *L) {
  const char *message = lua_tostring(L, 1);
  if (!message && luaL_callmeta(L, 1, "__tostring") && lua_type(L, -1) == LUA_TSTRING) message = lua_tostring(L, -1);
  if (!message) message = lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1));
  luaL_traceback(L, L, message, 1);
  return 1;
}

/* Makes Ctrl-C stop the code that L runs. False: SIGINT is ignored, as in background jobs of a shell, and stays so. */
static bool start_listening(lua_State *L, struct sigaction *before) {
  struct sigaction during = { .sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND };
  sigemptyset(&during.sa_mask);
  if (sigaction(SIGINT, NULL, before) != 0 || before->sa_handler == SIG_IGN) return false;
  pending = 0;
  running = L;
  sigaction(SIGINT, &during, NULL);
  return true;
}

static void stop_listening(lua_State *L, const struct sigaction *before) {
  sigaction(SIGINT, before, NULL);
  running = NULL;
  pending = 0;
  if (lua_gethook(L) == stop) /* Ctrl-C came after the call had ended */
    lua_sethook(L, NULL, 0, 0);
}

int nib_command_call(lua_State *L, int arguments, int results) {
  int base = lua_gettop(L) - arguments;
  lua_pushcfunction(L, add_traceback);
  lua_insert(L, base);
  struct sigaction before;
  bool listens = start_listening(L, &before);
  int status = lua_pcall(L, arguments, results, base);
  if (listens) stop_listening(L, &before);
  lua_remove(L, base);
  return status;
}

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

static bool is_set(const char *variable) {
  const char *value = getenv(variable);
  return value && *value;
}

void nib_command_report(lua_State *L, const char *prefix) {
  fflush(stdout);
  bool red = isatty(STDERR_FILENO) && !is_set("NO_COLOR") && is_set("TERM") && strcmp(getenv("TERM"), "dumb") != 0;
  bool is_text = lua_type(L, -1) == LUA_TSTRING; /* lua_tolstring would allocate to convert a number */
  size_t length = 0;
  const char *message = is_text ? lua_tolstring(L, -1, &length) : "error without a message";
  fprintf(stderr, "%s%s", red ? "\033[31m" : "", prefix);
  nib_put_visible(stderr, message, is_text ? length : strlen(message), true, false);
  fprintf(stderr, "%s\n", red ? "\033[0m" : "");
  lua_pop(L, 1);
}

/* ---- Coroutines -----------------------------------------------------------------------------------------------------
 *
 * Replacements for Lua's coroutine.resume, wrap and close that also update `running`. One thing differs: resume does
 * not catch the error of Ctrl-C, since Ctrl-C stops the whole program and not one coroutine. */

static lua_State *check_coroutine(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTHREAD);
  return lua_tothread(L, 1);
}

/* Resumes a coroutine with the arguments on top of L. Pushes its results to L and returns their number; on an error,
 * pushes the error value and returns -1. */
static int advance(lua_State *L, lua_State *coroutine, int arguments) {
  if (!lua_checkstack(coroutine, arguments)) {
    lua_pushliteral(L, "too many arguments to resume");
    return -1;
  }
  lua_xmove(L, coroutine, arguments);
  int results = 0;
  enter(coroutine);
  int status = lua_resume(coroutine, L, arguments, &results);
  enter(L);
  if (status != LUA_OK && status != LUA_YIELD) {
    lua_xmove(coroutine, L, 1);
    return -1;
  }
  if (!lua_checkstack(L, results + 1)) {
    lua_pop(coroutine, results);
    lua_pushliteral(L, "too many results to resume");
    return -1;
  }
  lua_xmove(coroutine, L, results);
  return results;
}

/* Closes a coroutine's to-be-closed variables. If the status is not LUA_OK, the error value is on the coroutine's
 * stack. */
static int close_thread(lua_State *L, lua_State *coroutine) {
  enter(coroutine);
#if LUA_VERSION_RELEASE_NUM >= 50406
  int status = lua_closethread(coroutine, L);
#else
  int status = lua_resetthread(coroutine);
#endif
  enter(L);
  return status;
}

static int coroutine_resume(lua_State *L) {
  lua_State *coroutine = check_coroutine(L);
  int results = advance(L, coroutine, lua_gettop(L) - 1);
  if (results < 0 && is_interruption(L)) return lua_error(L);
  int values = results < 0 ? 1 : results;
  lua_pushboolean(L, results >= 0);
  lua_insert(L, -(values + 1));
  return values + 1;
}

static int call_wrapped(lua_State *L) {
  lua_State *coroutine = lua_tothread(L, lua_upvalueindex(1));
  int results = advance(L, coroutine, lua_gettop(L));
  if (results >= 0) return results;
  int status = lua_status(coroutine);
  if (status != LUA_OK && status != LUA_YIELD && (status = close_thread(L, coroutine)) != LUA_OK) {
    lua_xmove(coroutine, L, 1); /* an error in a __close method replaces the first error */
    lua_replace(L, -2);
  }
  if (status != LUA_ERRMEM && lua_type(L, -1) == LUA_TSTRING && !is_interruption(L)) {
    luaL_where(L, 1);
    lua_insert(L, -2);
    lua_concat(L, 2);
  }
  return lua_error(L);
}

static int coroutine_wrap(lua_State *L) {
  luaL_checktype(L, 1, LUA_TFUNCTION);
  lua_State *coroutine = lua_newthread(L);
  lua_pushvalue(L, 1);
  lua_xmove(L, coroutine, 1);
  lua_pushcclosure(L, call_wrapped, 1);
  return 1;
}

static int coroutine_close(lua_State *L) {
  lua_State *coroutine = check_coroutine(L);
  lua_Debug frame;
  if (lua_status(coroutine) == LUA_OK && lua_getstack(coroutine, 0, &frame))
    return luaL_error(L, "cannot close a %s coroutine", coroutine == L ? "running" : "normal");
  bool well = close_thread(L, coroutine) == LUA_OK;
  lua_pushboolean(L, well);
  if (!well) lua_xmove(coroutine, L, 1);
  return well ? 1 : 2;
}

static const luaL_Reg coroutine_functions[] = {
  { "resume", coroutine_resume }, { "wrap", coroutine_wrap }, { "close", coroutine_close }, { NULL, NULL }
};

void nib_command_open_coroutines(lua_State *L) {
  lua_getglobal(L, "coroutine");
  luaL_setfuncs(L, coroutine_functions, 0);
  lua_pop(L, 1);
}
