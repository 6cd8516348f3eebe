/* The prompt: lines from the terminal, their history, and what they do. */
#define _POSIX_C_SOURCE 200809L

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <lauxlib.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "../../runtime/nibble.h"
#include "command.h"

#define HISTORY_LINES 1000

struct prompt {
  EditLine *editor;
  History *history;
  lua_State *L;
  bool continued;          /* the next line continues an incomplete chunk */
  char history_path[4096]; /* empty: the history is not saved */
};

/* Set by the signal handlers and read by read_character. */
static volatile sig_atomic_t interrupted, resized;

static void on_signal(int number) {
  if (number == SIGINT) interrupted = 1;
  else resized = 1;
}

/* ---- The terminal ---------------------------------------------------------------------------------------------- */

static const char *prompt_text(EditLine *editor) {
  struct prompt *prompt;
  el_get(editor, EL_CLIENTDATA, &prompt);
  return prompt->continued ? ">> " : "> ";
}

/* Reads a character for libedit, whose own function restarts the read after a signal. */
static int read_character(EditLine *editor, wchar_t *character) {
  mbstate_t state;
  memset(&state, 0, sizeof state);
  for (;;) {
    char byte;
    ssize_t got = interrupted ? -1 : read(STDIN_FILENO, &byte, 1);
    if (interrupted) return -1;
    if (got < 0 && errno == EINTR) {
      if (resized) el_resize(editor);
      resized = 0;
      continue;
    }
    if (got <= 0) return (int)got;
    size_t length = mbrtowc(character, &byte, 1, &state);
    if (length == (size_t)-1) { /* invalid in this encoding: take the byte as it is */
      *character = (unsigned char)byte;
      return 1;
    }
    if (length != (size_t)-2) return 1;
  }
}

/* Inserts the common prefix of all completions, or lists them if it adds nothing. After a space it does nothing, since
 * Tabs in pasted code are indentation. */
static unsigned char on_tab(EditLine *editor, int key) {
  (void)key;
  const LineInfo *line = el_line(editor);
  if (line->cursor == line->buffer || isspace((unsigned char)line->cursor[-1])) return CC_NORM;
  struct prompt *prompt;
  el_get(editor, EL_CLIENTDATA, &prompt);
  lua_State *L = prompt->L;
  int top = lua_gettop(L);
  unsigned char result = CC_ERROR;
  lua_pushcfunction(L, nib_command_complete);
  lua_pushlstring(L, line->buffer, (size_t)(line->cursor - line->buffer));
  if (lua_pcall(L, 1, 2, 0) == LUA_OK) {
    size_t typed = (size_t)lua_tointeger(L, -1);
    lua_Integer count = (lua_Integer)lua_rawlen(L, -2);
    int names = lua_gettop(L) - 1;
    char common[256];
    size_t widest = 0;
    for (lua_Integer i = 1; i <= count; i++) {
      lua_rawgeti(L, names, i);
      const char *name = lua_tostring(L, -1);
      size_t length = strlen(name);
      widest = length > widest ? length : widest;
      if (i == 1) {
        snprintf(common, sizeof common, "%s", name);
      } else {
        size_t same = 0;
        while (common[same] && common[same] == name[same]) same++;
        common[same] = '\0';
      }
      lua_pop(L, 1);
    }
    if (count > 0 && strlen(common) > typed) {
      result = el_insertstr(editor, common + typed) == 0 ? CC_REFRESH : CC_ERROR;
    } else if (count > 1) {
      int columns = 80;
      el_get(editor, EL_GETTC, "co", &columns, NULL);
      size_t per_line = (size_t)columns / (widest + 2) > 0 ? (size_t)columns / (widest + 2) : 1;
      for (lua_Integer i = 1; i <= count; i++) {
        lua_rawgeti(L, names, i);
        printf("%s%-*s", (size_t)(i - 1) % per_line == 0 ? "\n" : "  ", (int)widest, lua_tostring(L, -1));
        lua_pop(L, 1);
      }
      putchar('\n');
      fflush(stdout);
      result = CC_REDISPLAY;
    }
  }
  lua_settop(L, top);
  return result;
}

/* ---- History --------------------------------------------------------------------------------------------------- */

/* Creates the history file if it is missing, readable by its owner alone, and loads it. */
static void open_history(struct prompt *prompt) {
  char *path = prompt->history_path;
  size_t size = sizeof prompt->history_path;
  const char *named = getenv("NIBBLE_HISTORY"), *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
  int length = -1;
  if (named) length = snprintf(path, size, "%s", named);
  else if (state && state[0] == '/') length = snprintf(path, size, "%s/nibble/history", state);
  else if (home && home[0] == '/') length = snprintf(path, size, "%s/.local/state/nibble/history", home);
  if (length <= 0 || (size_t)length >= size) {
    path[0] = '\0';
    return;
  }
  if (!named)
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
      *slash = '\0';
      mkdir(path, 0700);
      *slash = '/';
    }
  int file = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
  struct stat about;
  HistEvent event;
  int loaded = 0;
  if (file < 0 || fstat(file, &about) != 0 || !S_ISREG(about.st_mode) ||
      (about.st_size > 0 && (loaded = history(prompt->history, &event, H_LOAD, path)) < 0))
    path[0] = '\0'; /* it cannot be opened or is no history: do not write to it */
  else if (loaded > 2 * HISTORY_LINES)
    history(prompt->history, &event, H_SAVE, path); /* drop the oldest lines from the file */
  if (file >= 0) close(file);
}

/* Adds a chunk to the history and at once to its file, so that a crash loses nothing. */
static void add_history(struct prompt *prompt, const char *chunk) {
  HistEvent event;
  if (chunk[strspn(chunk, " \t\r\n")] == '\0' || history(prompt->history, &event, H_ENTER, chunk) <= 0) return;
  FILE *file = prompt->history_path[0] ? fopen(prompt->history_path, "a") : NULL;
  if (!file) return;
  /* libedit's file format. libedit itself can only rewrite the whole file. */
  if (fseek(file, 0, SEEK_END) == 0 && ftell(file) == 0) fputs("_HiStOrY_V2_\n", file);
  for (; *chunk; chunk++) {
    unsigned char c = (unsigned char)*chunk;
    fprintf(file, c <= ' ' || c == '\\' || c == 0x7F ? "\\%03o" : "%c", c);
  }
  putc('\n', file);
  fclose(file);
}

/* ---- The prompt ------------------------------------------------------------------------------------------------ */

/* Whether the syntax error on top of the stack is at the end of the text, so that more lines could complete it. */
static bool ends_early(lua_State *L, int status) {
  size_t length;
  const char *message = lua_tolstring(L, -1, &length);
  return status == LUA_ERRSYNTAX && length >= 5 && strcmp(message + length - 5, "<eof>") == 0;
}

/* Compiles the text on top of the stack as an expression or, if that fails, as statements. Replaces it by the function
 * or the error message. *incomplete: more lines could complete the text. */
static bool load(lua_State *L, bool *incomplete) {
  size_t length;
  const char *text = lua_tolstring(L, -1, &length);
  const char *expression = lua_pushfstring(L, "return %s", text);
  int status = luaL_loadbuffer(L, expression, strlen("return ") + length, "=prompt");
  *incomplete = false;
  if (status != LUA_OK) {
    bool early = ends_early(L, status);
    lua_pop(L, 1);
    status = luaL_loadbuffer(L, text, length, "=prompt");
    *incomplete = status != LUA_OK && (early || ends_early(L, status));
  }
  lua_remove(L, -2);
  return status == LUA_OK;
}

/* Answers exit, quit and help, unless there is a global of that name. */
static bool answer(lua_State *L, const char *line) {
  char word[8] = "";
  int length = 0;
  sscanf(line, " %7[a-z]%n", word, &length);
  const char *rest = line + length;
  if (strncmp(rest, "()", 2) == 0) rest += 2;
  bool leave = strcmp(word, "exit") == 0 || strcmp(word, "quit") == 0;
  if ((!leave && strcmp(word, "help") != 0) || rest[strspn(rest, " \t\r\n")] != '\0') return false;
  lua_pushglobaltable(L);
  lua_pushstring(L, word);
  bool known = lua_rawget(L, -2) != LUA_TNIL;
  lua_pop(L, 2);
  if (known) return false;
  if (leave) {
    puts("Press Ctrl-D to exit.");
    return true;
  }
  int top = lua_gettop(L);
  bool found =
    luaL_dostring(L, "return (package.searchpath('nibble.meta', package.path))") == LUA_OK && lua_isstring(L, -1);
  puts(
    "Keys: Tab completes, Up and Down recall lines, Ctrl-C interrupts, Ctrl-D exits. Expressions print their values.");
  printf("Every function of nibble is documented in %s\n",
         found ? lua_tostring(L, -1) : "bindings/lua/nibble/meta.lua");
  puts("Beside it are modules in Lua: require \"nibble.pages\", \"nibble.show\", \"nibble.reference\".");
  lua_settop(L, top);
  return true;
}

/* Lua: (prompt). Reads and runs lines until the end of input. */
static int run_prompt(lua_State *L) {
  struct prompt *prompt = lua_touserdata(L, 1);
  for (;;) {
    /* The stack holds the prompt and, if `continued`, the lines so far. */
    int count = 0;
    const char *line = el_gets(prompt->editor, &count);
    if (interrupted) {
      interrupted = 0;
      puts("^C");
    } else if (!line || count <= 0) {
      break;
    } else if (prompt->continued || !answer(L, line)) {
      if (prompt->continued) lua_pushliteral(L, "\n");
      lua_pushlstring(L, line, strcspn(line, "\r\n"));
      if (prompt->continued) lua_concat(L, 3);
      bool incomplete, loaded = load(L, &incomplete);
      prompt->continued = incomplete;
      if (incomplete) {
        lua_pop(L, 1);
        continue;
      }
      add_history(prompt, lua_tostring(L, 2));
      if (loaded && nib_command_call(L, 0, LUA_MULTRET) == LUA_OK) {
        int results = lua_gettop(L) - 2;
        luaL_checkstack(L, 1, "too many results");
        lua_pushcfunction(L, nib_command_show);
        lua_insert(L, 3);
        loaded = results == 0 || nib_command_call(L, results, 0) == LUA_OK;
      } else {
        loaded = false;
      }
      if (!loaded) nib_command_report(L, "");
      fflush(stdout);
    }
    prompt->continued = false;
    lua_settop(L, 1);
  }
  return 0;
}

static void greet(lua_State *L) {
  printf("nibble %s, %s", NIB_VERSION, LUA_RELEASE);
  if (luaL_dostring(L, "return (nibble.device())") == LUA_OK && lua_isstring(L, -1))
    printf(", device %s", lua_tostring(L, -1));
  lua_settop(L, 0);
  puts(". Tab completes, Ctrl-D exits, help prints help.");
}

int nib_command_repl(lua_State *L) {
  struct prompt prompt = { .L = L };
  HistEvent event;
  prompt.history = history_init();
  prompt.editor = prompt.history ? el_init("nibble", stdin, stdout, stderr) : NULL;
  if (!prompt.editor) {
    if (prompt.history) history_end(prompt.history);
    fputs("nibble: cannot use this terminal\n", stderr);
    return EXIT_FAILURE;
  }
  history(prompt.history, &event, H_SETSIZE, HISTORY_LINES);
  history(prompt.history, &event, H_SETUNIQUE, 1);
  el_set(prompt.editor, EL_CLIENTDATA, &prompt);
  el_set(prompt.editor, EL_PROMPT, prompt_text);
  el_set(prompt.editor, EL_EDITOR, "emacs");
  el_set(prompt.editor, EL_HIST, history, prompt.history);
  el_set(prompt.editor, EL_GETCFN, read_character);
  el_set(prompt.editor, EL_ADDFN, "nibble-complete", "Completes the name before the cursor", on_tab);
  el_set(prompt.editor, EL_BIND, "^I", "nibble-complete", NULL);
  el_source(prompt.editor, NULL);
  open_history(&prompt);

  struct sigaction action = { .sa_handler = on_signal };
  sigemptyset(&action.sa_mask);
  struct sigaction interrupt_before, resize_before;
  sigaction(SIGINT, &action, &interrupt_before);
  sigaction(SIGWINCH, &action, &resize_before);

  greet(L);
  lua_pushcfunction(L, run_prompt);
  lua_pushlightuserdata(L, &prompt);
  int status = lua_pcall(L, 1, 0, 0);
  sigaction(SIGINT, &interrupt_before, NULL); /* closing the state can wait for queued work; Ctrl-C ends that */
  sigaction(SIGWINCH, &resize_before, NULL);
  putchar('\n');
  if (status != LUA_OK) nib_command_report(L, "nibble: ");
  el_end(prompt.editor);
  history_end(prompt.history);
  return status == LUA_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
