/* Scripts and subcommands: the command line, and the Lua state that runs what it asks for. */
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

static bool is_module(const char *word) {
  for (int i = 0; modules[i]; i++) {
    if (strcmp(word, modules[i]) == 0) return true;
  }
  return false;
}

/* ---- The state ------------------------------------------------------------------------------------------------- */

/* Prepends FOLDER/?.lua to package.path if the folder holds nibble's modules. */
static void add_path(lua_State *L, const char *folder) {
  const char *modules = lua_pushfstring(L, "%s/nibble", folder);
  if (access(modules, X_OK) == 0) {
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
  if (nib_command_call(L, 1, 1) != LUA_OK) {
    nib_command_report(L, "nibble: ");
    return EXIT_FAILURE;
  }
  status = (int)lua_tointeger(L, -1);
  lua_pop(L, 1);
  return status;
}

/* Sets `arg` as lua(1) does: the script is at index 0, the words before it are at negative indices. */
static void set_arguments(lua_State *L, char **words, int count, int before) {
  lua_createtable(L, count, before);
  for (int i = -before; i < count; i++) {
    lua_pushstring(L, words[i]);
    lua_rawseti(L, -2, i);
  }
  lua_setglobal(L, "arg");
}

/* Runs the chunk on top of the stack, or reports why it did not load. Returns the exit status. */
static int run(lua_State *L, int loaded, char **words, int count) {
  if (loaded == LUA_OK) {
    luaL_checkstack(L, count, "too many arguments");
    for (int i = 1; i < count; i++) lua_pushstring(L, words[i]);
    loaded = nib_command_call(L, count > 0 ? count - 1 : 0, 0);
  }
  if (loaded != LUA_OK) nib_command_report(L, "nibble: ");
  return loaded == LUA_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- Arguments ------------------------------------------------------------------------------------------------- */

static int misuse(const char *what, const char *word) {
  fprintf(stderr, "nibble: %s", what);
  nib_put_visible(stderr, word, strlen(word), false, false);
  fputs(" (see nibble --help)\n", stderr);
  return 2;
}

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

enum action { PROMPT, SCRIPT, CODE, DEVICES, MODULE };

/* What the command line asks for. */
struct session {
  enum action action;
  bool check;
  char **words;     /* argv */
  int count, first; /* first: index of the script, the code or the subcommand */
  int status;       /* exit status */
};

/* Lua: (session). Runs in a protected call, since setting `arg` and loading a script can run out of memory. */
static int run_session(lua_State *L) {
  struct session *session = lua_touserdata(L, 1);
  char **words = session->words + session->first;
  int count = session->count > session->first ? session->count - session->first : 0, finish = 0;
  session->status = EXIT_FAILURE;
  lua_pushcfunction(L, open_state);
  if (run(L, LUA_OK, NULL, 0) != EXIT_SUCCESS) return 0;
  if (session->check) {
    lua_pushcfunction(L, start_check);
    if (nib_command_call(L, 0, 1) != LUA_OK) {
      nib_command_report(L, "nibble: ");
      return 0;
    }
    finish = lua_gettop(L);
  }
  set_arguments(L, words, count, session->first);
  switch (session->action) {
  case PROMPT: session->status = nib_command_repl(L); break;
  case SCRIPT: {
    const char *name = count > 0 ? words[0] : "-";
    session->status = run(L, luaL_loadfile(L, strcmp(name, "-") == 0 ? NULL : name), words, count);
    break;
  }
  case CODE: session->status = run(L, luaL_loadbuffer(L, words[0], strlen(words[0]), "=(code)"), words, count); break;
  case DEVICES:
    session->status = run(L, luaL_loadbuffer(L, devices_code, sizeof devices_code - 1, "=devices"), NULL, 0);
    break;
  case MODULE:
    session->status = run(L, luaL_loadbuffer(L, module_code, sizeof module_code - 1, "=nibble"), words, count);
    break;
  }
  if (finish > 0) session->status = checked_status(L, finish, session->status);
  return 0;
}

int main(int argc, char **argv) {
  atexit(check_output);
  enum action action = PROMPT;
  int first = 1; /* index of the script, the code or the subcommand */
  bool check = argc > 1 && strcmp(argv[1], "--check") == 0;
  if (check) {
    if (argc < 3 ||
        (argv[2][0] == '-' && argv[2][1] != '\0' && strcmp(argv[2], "-e") != 0 && strcmp(argv[2], "--") != 0))
      return misuse("--check needs a file or -e CODE after it", "");
    argv++; /* skip --check */
    argc--;
  }
  if (argc > 1) {
    const char *word = argv[1];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
      fputs(usage, stdout);
      return EXIT_SUCCESS;
    } else if (strcmp(word, "--version") == 0) {
      printf("nibble %s (%s)\n", NIB_VERSION, LUA_RELEASE);
      return EXIT_SUCCESS;
    } else if (strcmp(word, "-e") == 0) {
      if (argc < 3) return misuse("-e needs code after it", "");
      action = CODE;
      first = 2;
    } else if (!check && strcmp(word, "devices") == 0) {
      if (argc > 2) return misuse("devices takes no arguments, got ", argv[2]);
      action = DEVICES;
    } else if (is_module(word)) {
      action = MODULE;
    } else if (strcmp(word, "--") == 0) {
      if (argc < 3) return misuse("-- needs a file after it", "");
      action = SCRIPT;
      first = 2;
    } else if (word[0] == '-' && word[1] != '\0') {
      return misuse("unknown option ", word);
    } else {
      action = SCRIPT;
    }
  }
  if (action == PROMPT && !isatty(STDIN_FILENO)) action = SCRIPT;

  /* LC_CTYPE alone: text is in the user's encoding, and numbers keep the decimal point. */
  setlocale(LC_CTYPE, "");
  lua_State *L = luaL_newstate();
  if (!L) {
    fputs("nibble: out of memory\n", stderr);
    return EXIT_FAILURE;
  }
  struct session session = { .action = action, .check = check, .words = argv, .count = argc, .first = first };
  lua_pushcfunction(L, run_session);
  lua_pushlightuserdata(L, &session);
  if (lua_pcall(L, 1, 0, 0) != LUA_OK) {
    nib_command_report(L, "nibble: ");
    session.status = EXIT_FAILURE;
  }
  lua_close(L);
  return session.status;
}
