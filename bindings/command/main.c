/* The command line, and the Lua state that runs scripts and subcommands. */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <lauxlib.h>
#include <locale.h>
#include <lualib.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../runtime/nibble.h"
#include "../nibble_lua.h"
#include "../visible.h"
#include "command.h"

static const char usage[] =
  "usage: nibble                    a prompt, or the program on standard input\n"
  "       nibble FILE [ARGUMENTS]   run a script (- is standard input)\n"
  "       nibble -e CODE [ARGUMENTS]\n"
  "       nibble --check FILE ...   run FILE, or -e CODE, in checked mode: it reports races, reads of unwritten "
  "memory\n"
  "                                 and misused pages, and exits with status 1 if there are any\n"
  "       nibble devices            list devices; says why a device cannot be used\n"
  "       nibble scenario list      list scenarios to run and check (nibble scenario --help)\n"
  "       nibble trace FILE         print, convert for Perfetto or replay a recorded trace (nibble trace --help)\n"
  "       nibble --version\n"
  "       nibble --help\n"
  "\n"
  "Scripts are Lua 5.4; the module is the global `nibble`, and require \"nibble\" works too.\n"
  "  NIBBLE_DEVICE    default device (\"cpu\", \"cuda:0\"); if not set, a GPU if one can be used, else the CPU\n"
  "  NIBBLE_HISTORY   history file of the prompt; if not set, ~/.local/state/nibble/history\n";

static const char devices_code[] =
  "local rows, width = {{'device', 'description', 'status'}}, {0, 0}\n"
  "local default = nibble.device()\n"
  "for _, d in ipairs(nibble.devices()) do\n"
  "  local status = d.available and 'available' or 'not available: ' .. (d.reason or 'no reason given')\n"
  "  rows[#rows + 1] = {d.name, d.description or '', d.name == default and status .. ' (default)' or status}\n"
  "end\n"
  "for _, row in ipairs(rows) do\n"
  "  for i = 1, 2 do width[i] = math.max(width[i], utf8.len(row[i]) or #row[i]) end\n"
  "end\n"
  "for _, row in ipairs(rows) do\n"
  "  for i = 1, 2 do row[i] = row[i] .. (' '):rep(width[i] - (utf8.len(row[i]) or #row[i])) end\n"
  "  print(table.concat(row, '  '))\n"
  "end\n";

/* These subcommands are Lua modules nibble.NAME. Their main() gets a list of the arguments after the name and returns
 * the exit status. */
static const char module_code[] = "os.exit(require('nibble.' .. arg[0]).main({...}), true)";
static const char *const modules[] = { "scenario", "trace", NULL };

enum action { PROMPT, SCRIPT, CODE, DEVICES, MODULE };

/* What the command line asks for. */
struct session {
  enum action action;
  bool check;
  char **words; /* the script, the code or the subcommand, and its arguments */
  int count;    /* of these words */
  int before;   /* words before them */
  int status;   /* exit status */
};

/* ---- The state ------------------------------------------------------------------------------------------------- */

/* Prepends FOLDER/?.lua to package.path if the folder holds nibble's modules. */
static void add_path(lua_State *L, const char *folder) {
  const char *inner = lua_pushfstring(L, "%s/nibble", folder);
  if (access(inner, X_OK) == 0) {
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    lua_pushfstring(L, "%s/?.lua;%s", folder, lua_tostring(L, -1));
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
  }
  lua_pop(L, 1);
}

/* Finds the Lua modules from the executable's path. In a checkout, they are in bindings/lua/ and it is
 * build/CONFIGURATION/nibble; installed, they are in share/lua/5.4/ and it is bin/nibble. */
static void add_paths(lua_State *L) {
  char path[4096];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof "/share/lua/5.4");
  if (length <= 0 || (size_t)length >= sizeof path - sizeof "/share/lua/5.4") return;
  path[length] = '\0';
  static const char *const places[] = { NULL, "/share/lua/5.4", "/bindings/lua" }; /* by the number of folders up */
  for (int up = 0; up < 3; up++) {
    char *slash = strrchr(path, '/');
    if (!slash) return;
    if (places[up]) {
      strcpy(slash, places[up]);
      add_path(L, path);
    }
    *slash = '\0';
  }
}

static int open_state(lua_State *L) {
  luaL_openlibs(L);
  nib_command_open_coroutines(L);
  add_paths(L);
  /* In package.preload too, so that a script that clears package.loaded can require it again. */
  luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
  lua_pushcfunction(L, luaopen_nibble);
  lua_setfield(L, -2, "nibble");
  luaL_requiref(L, "nibble", luaopen_nibble, 1);
  return 0;
}

/* ---- Running --------------------------------------------------------------------------------------------------- */

/* Calls a function and reports its error. Returns whether it succeeded. */
static bool call(lua_State *L, int arguments, int results) {
  if (nib_command_call(L, arguments, results) == LUA_OK) return true;
  nib_command_report(L, "nibble: ");
  return false;
}

/* Turns checked mode on and pushes the function that gives the exit status at the end. */
static int start_check(lua_State *L) {
  lua_getglobal(L, "require");
  lua_pushliteral(L, "nibble.checker");
  lua_call(L, 1, 1);
  lua_getfield(L, -1, "command");
  lua_call(L, 0, 1);
  return 1;
}

/* The exit status after the checks, by the function that start_check pushed. */
static int checked_status(lua_State *L, int finish, int status) {
  lua_pushvalue(L, finish);
  lua_pushinteger(L, status);
  if (!call(L, 1, 1)) return EXIT_FAILURE;
  status = (int)lua_tointeger(L, -1);
  lua_pop(L, 1);
  return status;
}

/* Sets `arg` as lua(1) does: the script is at index 0, the words before it are at negative indices. */
static void set_arguments(lua_State *L, const struct session *session) {
  lua_createtable(L, session->count, session->before);
  for (int i = -session->before; i < session->count; i++) {
    lua_pushstring(L, session->words[i]);
    lua_rawseti(L, -2, i);
  }
  lua_setglobal(L, "arg");
}

/* Loads the code of the session. Returns Lua's status. */
static int load(lua_State *L, const struct session *session) {
  const char *word = session->count > 0 ? session->words[0] : "-";
  switch (session->action) {
  case CODE: return luaL_loadbuffer(L, word, strlen(word), "=(code)");
  case DEVICES: return luaL_loadbuffer(L, devices_code, sizeof devices_code - 1, "=devices");
  case MODULE: return luaL_loadbuffer(L, module_code, sizeof module_code - 1, "=nibble");
  default: return luaL_loadfile(L, strcmp(word, "-") == 0 ? NULL : word);
  }
}

/* Runs the code of the session. Returns the exit status. */
static int run(lua_State *L, const struct session *session) {
  if (load(L, session) != LUA_OK) {
    nib_command_report(L, "nibble: ");
    return EXIT_FAILURE;
  }
  luaL_checkstack(L, session->count, "too many arguments");
  for (int i = 1; i < session->count; i++) lua_pushstring(L, session->words[i]);
  return call(L, session->count > 0 ? session->count - 1 : 0, 0) ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Lua: (session). Runs in a protected call, since setting `arg` and loading a script can run out of memory. */
static int run_session(lua_State *L) {
  struct session *session = lua_touserdata(L, 1);
  session->status = EXIT_FAILURE;
  lua_pushcfunction(L, open_state);
  if (!call(L, 0, 0)) return 0;
  if (session->check) {
    lua_pushcfunction(L, start_check);
    if (!call(L, 0, 1)) return 0;
  }
  int finish = lua_gettop(L); /* index of the function that start_check pushed */
  set_arguments(L, session);
  session->status = session->action == PROMPT ? nib_command_repl(L) : run(L, session);
  if (session->check) session->status = checked_status(L, finish, session->status);
  return 0;
}

/* ---- The command line ------------------------------------------------------------------------------------------ */

static bool is(const char *word, const char *name) { return strcmp(word, name) == 0; }

static bool is_option(const char *word) { return word[0] == '-' && word[1] != '\0'; }

static bool is_module(const char *word) {
  for (int i = 0; modules[i]; i++)
    if (is(word, modules[i])) return true;
  return false;
}

/* Reports a wrong command line and sets the exit status. Returns false. */
static bool misuse(struct session *session, const char *what, const char *word) {
  fprintf(stderr, "nibble: %s", what);
  nib_put_visible(stderr, word, strlen(word), false, false);
  fputs(" (see nibble --help)\n", stderr);
  session->status = 2;
  return false;
}

/* Handles the options that only print something. Returns whether `word` is one. */
static bool tell(const char *word) {
  if (is(word, "--help") || is(word, "-h")) fputs(usage, stdout);
  else if (is(word, "--version")) printf("nibble %s (%s)\n", NIB_VERSION, LUA_RELEASE);
  else return false;
  return true;
}

/* Reads the command line. False: there is nothing to run, and the exit status is set. */
static bool read_arguments(struct session *session, int argc, char **argv) {
  session->check = argc > 1 && is(argv[1], "--check");
  if (session->check) argv++, argc--;
  const char *word = argc > 1 ? argv[1] : NULL;
  bool has_code = word && is(word, "-e"), has_dashes = word && is(word, "--");
  if (session->check && (!word || (is_option(word) && !has_code && !has_dashes)))
    return misuse(session, "--check needs a file or -e CODE after it", "");
  if (!word) session->action = isatty(STDIN_FILENO) ? PROMPT : SCRIPT;
  else if (tell(word)) return false;
  else if (has_code || has_dashes) session->action = has_code ? CODE : SCRIPT;
  else if (is_option(word)) return misuse(session, "unknown option ", word);
  else if (is(word, "devices") && !session->check) session->action = DEVICES;
  else session->action = is_module(word) ? MODULE : SCRIPT;
  if (session->action == DEVICES && argc > 2) return misuse(session, "devices takes no arguments, got ", argv[2]);
  if (has_code && argc < 3) return misuse(session, "-e needs code after it", "");
  if (has_dashes && argc < 3) return misuse(session, "-- needs a file after it", "");
  session->before = has_code || has_dashes ? 2 : 1;
  session->words = argv + session->before;
  session->count = argc > session->before ? argc - session->before : 0;
  return true;
}

/* ---- The process ----------------------------------------------------------------------------------------------- */

/* A failed write to stdout is an error. An atexit handler, so that it is reported after os.exit too. */
static void check_output(void) {
  errno = 0;
  bool lost = fflush(stdout) != 0;
  int reason = errno;
  if (!lost && !ferror(stdout)) return;
  fprintf(stderr, "nibble: cannot write to standard output%s%s\n", reason ? ": " : "", reason ? strerror(reason) : "");
  fflush(NULL);
  _exit(EXIT_FAILURE);
}

int main(int argc, char **argv) {
  struct session session = { .status = EXIT_SUCCESS };
  atexit(check_output);
  if (!read_arguments(&session, argc, argv)) return session.status;
  setlocale(LC_CTYPE, ""); /* no other category, so that numbers keep the decimal point */
  lua_State *L = luaL_newstate();
  if (!L) {
    fputs("nibble: out of memory\n", stderr);
    return EXIT_FAILURE;
  }
  lua_pushcfunction(L, run_session);
  lua_pushlightuserdata(L, &session);
  if (lua_pcall(L, 1, 0, 0) != LUA_OK) {
    nib_command_report(L, "nibble: ");
    session.status = EXIT_FAILURE;
  }
  lua_close(L);
  return session.status;
}
