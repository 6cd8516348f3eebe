#define _POSIX_C_SOURCE 200809L

#include <lauxlib.h>
#include <locale.h>
#include <lualib.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../runtime/nibble.h"
#include "command.h"
#include "nibble_lua.h"

static const char usage[] =
  "usage: nibble                    a prompt, or the program on standard input\n"
  "       nibble FILE [ARGUMENTS]   run a script (- is standard input)\n"
  "       nibble -e CODE [ARGUMENTS]\n"
  "       nibble devices            what can be computed on, and what cannot and why\n"
  "       nibble --version\n"
  "       nibble --help\n"
  "\n"
  "Scripts are Lua 5.4; the module is there as the global `nibble` and through require \"nibble\".\n"
  "  NIBBLE_DEVICE    default device (\"cpu\", \"cuda:0\"); otherwise the best there is\n"
  "  NIBBLE_HISTORY   history file of the prompt; otherwise ~/.local/state/nibble/history\n";

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

/* ---- Calls, errors, Ctrl-C ----------------------------------------------------------------------------------------- */

/* The state that a call runs in, for the signal handler alone. */
static lua_State *volatile interruptible;

static void stop(lua_State *L, lua_Debug *event) {
  (void)event;
  lua_sethook(L, NULL, 0, 0);
  luaL_error(L, "interrupted!");
}

/* SA_RESETHAND: where Lua does not get to run again, a second Ctrl-C ends the process. */
static void on_interrupt(int number) {
  (void)number;
  lua_State *L = interruptible;
  if (L)
    lua_sethook(L, stop, LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT, 1);
}

static int add_traceback(lua_State *L) {
  const char *message = lua_tostring(L, 1);
  if (!message && luaL_callmeta(L, 1, "__tostring") && lua_type(L, -1) == LUA_TSTRING)
    message = lua_tostring(L, -1);
  if (!message)
    message = lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1));
  luaL_traceback(L, L, message, 1);
  return 1;
}

int nib_command_call(lua_State *L, int arguments, int results) {
  int base = lua_gettop(L) - arguments;
  lua_pushcfunction(L, add_traceback);
  lua_insert(L, base);
  struct sigaction before, during = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
  sigemptyset(&during.sa_mask);
  /* Who starts us with SIGINT ignored, as shells do for background jobs, means it. */
  bool listen = sigaction(SIGINT, NULL, &before) == 0 && before.sa_handler != SIG_IGN;
  if (listen) {
    interruptible = L;
    sigaction(SIGINT, &during, NULL);
  }
  int status = lua_pcall(L, arguments, results, base);
  if (listen) {
    sigaction(SIGINT, &before, NULL);
    interruptible = NULL;
    if (lua_gethook(L) == stop) /* it came too late */
      lua_sethook(L, NULL, 0, 0);
  }
  lua_remove(L, base);
  return status;
}

void nib_command_report(lua_State *L, const char *prefix) {
  fflush(stdout);
  bool red = isatty(STDERR_FILENO);
  const char *message = lua_tostring(L, -1);
  fprintf(stderr, "%s%s%s%s\n", red ? "\033[31m" : "", prefix, message ? message : "error without a message",
          red ? "\033[0m" : "");
  lua_pop(L, 1);
}

/* ---- The state ------------------------------------------------------------------------------------------------------ */

/* Puts FOLDER/?.lua before the rest of package.path, if the folder has nibble's modules. */
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

/* The modules beside the executable: in a checkout it is build/CONFIGURATION/nibble and they are in scripts/; installed, it
 * is bin/nibble and they are in share/nibble/. */
static void add_paths(lua_State *L) {
  char path[4096];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof "/share/nibble");
  if (length <= 0 || (size_t)length >= sizeof path - sizeof "/share/nibble")
    return;
  path[length] = '\0';
  static const char *const places[] = {NULL, "/share/nibble", "/scripts"}; /* by the number of folders above */
  for (int up = 0; up < 3; up++) {
    char *slash = strrchr(path, '/');
    if (!slash)
      return;
    if (places[up]) {
      strcpy(slash, places[up]);
      add_path(L, path);
    }
    *slash = '\0';
  }
}

static int open_state(lua_State *L) {
  luaL_openlibs(L);
  add_paths(L);
  /* In package.preload, so that a program which empties package.loaded can load it again. */
  luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
  lua_pushcfunction(L, luaopen_nibble);
  lua_setfield(L, -2, "nibble");
  luaL_requiref(L, "nibble", luaopen_nibble, 1);
  return 0;
}

/* Sets `arg`: words[0] is the script, at index 0; what comes before has negative indices. */
static void set_arguments(lua_State *L, char **words, int count, int before) {
  lua_createtable(L, count, before);
  for (int i = -before; i < count; i++) {
    lua_pushstring(L, words[i]);
    lua_rawseti(L, -2, i);
  }
  lua_setglobal(L, "arg");
}

/* Runs the chunk on top of the stack, or reports why there is none. Returns the exit status. */
static int run(lua_State *L, int loaded, char **words, int count) {
  if (loaded == LUA_OK) {
    luaL_checkstack(L, count, "too many arguments");
    for (int i = 1; i < count; i++)
      lua_pushstring(L, words[i]);
    loaded = nib_command_call(L, count > 0 ? count - 1 : 0, 0);
  }
  if (loaded != LUA_OK)
    nib_command_report(L, "nibble: ");
  return loaded == LUA_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- Arguments ------------------------------------------------------------------------------------------------------ */

static int misuse(const char *what, const char *word) {
  fprintf(stderr, "nibble: %s%s (nibble --help says more)\n", what, word);
  return 2;
}

enum action { PROMPT, SCRIPT, CODE, DEVICES };

int main(int argc, char **argv) {
  enum action action = PROMPT;
  int first = 1; /* the word that is the script, the code or the subcommand */
  if (argc > 1) {
    const char *word = argv[1];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
      fputs(usage, stdout);
      return EXIT_SUCCESS;
    } else if (strcmp(word, "--version") == 0) {
      printf("nibble %s (%s)\n", NIB_VERSION, LUA_RELEASE);
      return EXIT_SUCCESS;
    } else if (strcmp(word, "-e") == 0) {
      if (argc < 3)
        return misuse("-e wants code", "");
      action = CODE;
      first = 2;
    } else if (strcmp(word, "devices") == 0) {
      if (argc > 2)
        return misuse("devices takes no arguments, got ", argv[2]);
      action = DEVICES;
    } else if (strcmp(word, "--") == 0) {
      if (argc < 3)
        return misuse("-- wants a file after it", "");
      action = SCRIPT;
      first = 2;
    } else if (word[0] == '-' && word[1] != '\0') {
      return misuse("unknown option ", word);
    } else {
      action = SCRIPT;
    }
  }
  if (action == PROMPT && !isatty(STDIN_FILENO))
    action = SCRIPT;

  /* Names and messages in the user's characters; numbers keep their point. */
  setlocale(LC_CTYPE, "");
  lua_State *L = luaL_newstate();
  if (!L) {
    fputs("nibble: out of memory\n", stderr);
    return EXIT_FAILURE;
  }
  lua_pushcfunction(L, open_state);
  int status = run(L, LUA_OK, NULL, 0);
  if (status == EXIT_SUCCESS) {
    int count = argc > first ? argc - first : 0;
    set_arguments(L, argv + first, count, first);
    switch (action) {
      case PROMPT:
        status = nib_command_repl(L);
        break;
      case SCRIPT: {
        const char *name = count > 0 ? argv[first] : "-";
        status = run(L, luaL_loadfile(L, strcmp(name, "-") == 0 ? NULL : name), argv + first, count);
        break;
      }
      case CODE:
        status = run(L, luaL_loadbuffer(L, argv[first], strlen(argv[first]), "=(code)"), argv + first, count);
        break;
      case DEVICES:
        status = run(L, luaL_loadbuffer(L, devices_code, sizeof devices_code - 1, "=devices"), NULL, 0);
        break;
    }
  }
  lua_close(L);
  return status;
}
