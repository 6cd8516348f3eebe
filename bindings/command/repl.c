/* The prompt: reads lines from the terminal, keeps a history, and runs the lines. */
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
#define BLANKS        " \t\r\n"

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

static struct prompt *prompt_of(EditLine *editor) {
  struct prompt *prompt;
  el_get(editor, EL_CLIENTDATA, &prompt);
  return prompt;
}

static const char *prompt_text(EditLine *editor) { return prompt_of(editor)->continued ? ">> " : "> "; }

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

/* Writes the common prefix of all names in an array, as far as there is room. */
static void common_prefix(lua_State *L, int names, char *common, size_t size) {
  lua_Integer count = (lua_Integer)lua_rawlen(L, names);
  for (lua_Integer i = 1; i <= count; i++) {
    lua_rawgeti(L, names, i);
    const char *name = lua_tostring(L, -1);
    if (i == 1) snprintf(common, size, "%s", name);
    size_t same = 0;
    while (common[same] && common[same] == name[same]) same++;
    common[same] = '\0';
    lua_pop(L, 1);
  }
}

/* The length of the longest name in an array. */
static size_t widest_name(lua_State *L, int names) {
  size_t widest = 0;
  lua_Integer count = (lua_Integer)lua_rawlen(L, names);
  for (lua_Integer i = 1; i <= count; i++) {
    lua_rawgeti(L, names, i);
    size_t width = lua_rawlen(L, -1);
    if (width > widest) widest = width;
    lua_pop(L, 1);
  }
  return widest;
}

/* Prints the names in an array in columns. */
static void list_names(EditLine *editor, lua_State *L, int names) {
  int columns = 80;
  el_get(editor, EL_GETTC, "co", &columns, NULL);
  size_t widest = widest_name(L, names), per_line = (size_t)columns / (widest + 2);
  if (per_line == 0) per_line = 1;
  lua_Integer count = (lua_Integer)lua_rawlen(L, names);
  for (lua_Integer i = 1; i <= count; i++) {
    lua_rawgeti(L, names, i);
    printf("%s%-*s", (size_t)(i - 1) % per_line == 0 ? "\n" : "  ", (int)widest, lua_tostring(L, -1));
    lua_pop(L, 1);
  }
  putchar('\n');
  fflush(stdout);
}

/* Completes the name before the cursor. The names in the array begin with its `typed` characters. */
static unsigned char complete(EditLine *editor, lua_State *L, int names, size_t typed) {
  char common[256];
  lua_Unsigned count = lua_rawlen(L, names);
  if (count == 0) return CC_ERROR;
  common_prefix(L, names, common, sizeof common);
  if (strlen(common) > typed) return el_insertstr(editor, common + typed) == 0 ? CC_REFRESH : CC_ERROR;
  if (count == 1) return CC_ERROR;
  list_names(editor, L, names);
  return CC_REDISPLAY;
}

/* Inserts the common prefix of all completions, or lists them if it adds nothing. After a space it does nothing, since
 * Tabs in pasted code are indentation. */
static unsigned char on_tab(EditLine *editor, int key) {
  (void)key;
  const LineInfo *line = el_line(editor);
  if (line->cursor == line->buffer || isspace((unsigned char)line->cursor[-1])) return CC_NORM;
  lua_State *L = prompt_of(editor)->L;
  int top = lua_gettop(L);
  lua_pushcfunction(L, nib_command_complete);
  lua_pushlstring(L, line->buffer, (size_t)(line->cursor - line->buffer));
  unsigned char result = CC_ERROR;
  if (lua_pcall(L, 1, 2, 0) == LUA_OK) result = complete(editor, L, top + 1, (size_t)lua_tointeger(L, top + 2));
  lua_settop(L, top);
  return result;
}

/* ---- History --------------------------------------------------------------------------------------------------- */

/* Finds the path of the history file; "" if there is none. */
static void find_history(char *path, size_t size) {
  const char *named = getenv("NIBBLE_HISTORY"), *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
  int length = -1;
  if (named) length = snprintf(path, size, "%s", named);
  else if (state && state[0] == '/') length = snprintf(path, size, "%s/nibble/history", state);
  else if (home && home[0] == '/') length = snprintf(path, size, "%s/.local/state/nibble/history", home);
  if (length < 0 || (size_t)length >= size) path[0] = '\0';
}

static void make_folders(char *path) {
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(path, 0700);
    *slash = '/';
  }
}

/* Opens the history file. Creates it if it is missing, readable only by its owner. Returns -1 if it cannot be opened or
 * is no regular file. */
static int open_file(const char *path, off_t *bytes) {
  struct stat info;
  int file = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
  if (file < 0) return -1;
  if (fstat(file, &info) == 0 && S_ISREG(info.st_mode)) {
    *bytes = info.st_size;
    return file;
  }
  close(file);
  return -1;
}

/* Loads the history file. Returns false if it cannot be opened or is no history. */
static bool load_history(const struct prompt *prompt) {
  off_t bytes = 0;
  HistEvent event;
  int loaded = 0, file = open_file(prompt->history_path, &bytes);
  if (file < 0) return false;
  if (bytes > 0) loaded = history(prompt->history, &event, H_LOAD, prompt->history_path);
  if (loaded > 2 * HISTORY_LINES) /* drop the oldest lines from the file */
    history(prompt->history, &event, H_SAVE, prompt->history_path);
  close(file);
  return loaded >= 0;
}

static void open_history(struct prompt *prompt) {
  char *path = prompt->history_path;
  find_history(path, sizeof prompt->history_path);
  if (path[0] == '\0') return;
  if (!getenv("NIBBLE_HISTORY")) make_folders(path);
  if (!load_history(prompt)) path[0] = '\0'; /* do not write to it */
}

/* Adds a chunk to the history and at once to its file, so that a crash loses nothing. */
static void add_history(struct prompt *prompt, const char *chunk) {
  HistEvent event;
  if (chunk[strspn(chunk, BLANKS)] == '\0' || history(prompt->history, &event, H_ENTER, chunk) <= 0) return;
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

/* Compiles the text on top of the stack as an expression or, if that fails, as statements. Pushes the function or the
 * error message. *incomplete: more lines could complete the text. */
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

/* Whether a line is this word, with or without "()". */
static bool is_word(const char *line, const char *word) {
  size_t length = strlen(word);
  line += strspn(line, BLANKS);
  if (strncmp(line, word, length) != 0) return false;
  line += length;
  if (strncmp(line, "()", 2) == 0) line += 2;
  return line[strspn(line, BLANKS)] == '\0';
}

static bool is_global(lua_State *L, const char *name) {
  lua_pushglobaltable(L);
  lua_pushstring(L, name);
  bool is = lua_rawget(L, -2) != LUA_TNIL;
  lua_pop(L, 2);
  return is;
}

static void print_help(lua_State *L) {
  int top = lua_gettop(L);
  bool found =
    luaL_dostring(L, "return (package.searchpath('nibble.meta', package.path))") == LUA_OK && lua_isstring(L, -1);
  puts(
    "Keys: Tab completes, Up and Down recall lines, Ctrl-C interrupts, Ctrl-D exits. Expressions print their values.");
  printf("Every function of nibble is documented in %s\n",
         found ? lua_tostring(L, -1) : "bindings/lua/nibble/meta.lua");
  puts("Beside it are modules in Lua: require \"nibble.pages\", \"nibble.show\", \"nibble.reference\".");
  lua_settop(L, top);
}

/* Answers exit, quit and help, unless there is a global of that name. */
static bool answer(lua_State *L, const char *line) {
  static const char *const words[] = { "help", "exit", "quit" };
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if (!is_word(line, words[i]) || is_global(L, words[i])) continue;
    if (i == 0) print_help(L);
    else puts("Press Ctrl-D to exit.");
    return true;
  }
  return false;
}

/* Calls the function at index 3, the top of the stack, and prints its values. If it fails, pushes the error message and
 * returns false. */
static bool run_chunk(lua_State *L) {
  if (nib_command_call(L, 0, LUA_MULTRET) != LUA_OK) return false;
  int results = lua_gettop(L) - 2;
  if (results == 0) return true;
  luaL_checkstack(L, 1, "too many results");
  lua_pushcfunction(L, nib_command_show);
  lua_insert(L, 3);
  return nib_command_call(L, results, 0) == LUA_OK;
}

/* Adds a line to the chunk, and runs the chunk if it is complete. The stack holds the prompt and, if `continued`, the
 * lines so far. */
static void take_line(struct prompt *prompt, const char *line) {
  lua_State *L = prompt->L;
  if (prompt->continued) lua_pushliteral(L, "\n");
  lua_pushlstring(L, line, strcspn(line, "\r\n"));
  if (prompt->continued) lua_concat(L, 3);
  bool loaded = load(L, &prompt->continued);
  if (prompt->continued) {
    lua_pop(L, 1);
    return;
  }
  add_history(prompt, lua_tostring(L, 2));
  if (!loaded || !run_chunk(L)) nib_command_report(L, "");
  fflush(stdout);
}

/* Lua: (prompt). Reads and runs lines until the end of input. */
static int run_prompt(lua_State *L) {
  struct prompt *prompt = lua_touserdata(L, 1);
  for (;;) {
    int count = 0;
    const char *line = el_gets(prompt->editor, &count);
    if (interrupted) {
      interrupted = 0;
      prompt->continued = false;
      puts("^C");
    } else if (!line || count <= 0) {
      return 0;
    } else if (prompt->continued || !answer(L, line)) {
      take_line(prompt, line);
    }
    if (!prompt->continued) lua_settop(L, 1);
  }
}

static void greet(lua_State *L) {
  printf("nibble %s, %s", NIB_VERSION, LUA_RELEASE);
  if (luaL_dostring(L, "return (nibble.device())") == LUA_OK && lua_isstring(L, -1))
    printf(", device %s", lua_tostring(L, -1));
  lua_settop(L, 0);
  puts(". Tab completes, Ctrl-D exits, help prints help.");
}

static bool open_editor(struct prompt *prompt) {
  HistEvent event;
  prompt->history = history_init();
  if (!prompt->history) return false;
  prompt->editor = el_init("nibble", stdin, stdout, stderr);
  if (!prompt->editor) {
    history_end(prompt->history);
    return false;
  }
  history(prompt->history, &event, H_SETSIZE, HISTORY_LINES);
  history(prompt->history, &event, H_SETUNIQUE, 1);
  el_set(prompt->editor, EL_CLIENTDATA, prompt);
  el_set(prompt->editor, EL_PROMPT, prompt_text);
  el_set(prompt->editor, EL_EDITOR, "emacs");
  el_set(prompt->editor, EL_HIST, history, prompt->history);
  el_set(prompt->editor, EL_GETCFN, read_character);
  el_set(prompt->editor, EL_ADDFN, "nibble-complete", "Completes the name before the cursor", on_tab);
  el_set(prompt->editor, EL_BIND, "^I", "nibble-complete", NULL);
  el_source(prompt->editor, NULL);
  return true;
}

int nib_command_repl(lua_State *L) {
  struct prompt prompt = { .L = L };
  if (!open_editor(&prompt)) {
    fputs("nibble: cannot use this terminal\n", stderr);
    return EXIT_FAILURE;
  }
  open_history(&prompt);
  struct sigaction action = { .sa_handler = on_signal }, interrupt_before, resize_before;
  sigemptyset(&action.sa_mask);
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
