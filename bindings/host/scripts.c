#define _GNU_SOURCE /* ppoll */
#include "scripts.h"
#include "../visible.h"

#include <dirent.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  LOAD_US = 1000000,
  UNLOAD_US = 10000,
  LEAST_US = 50,
  STRIKE_US = 10000,
  MOST_STRIKES = 3,
  ERROR_US = 1000000,
  LOOK_FRAMES = 20,
  MOST_SOURCE = 1 << 20,
  MOST_PRINTED = 1024
};

static long long read_clock(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

long long host_now_us(void) { return read_clock(CLOCK_MONOTONIC); }

/* ---- What scripts get from the host: the table `host` ---------------------------------------------------------- */

static struct scripts *own_scripts(lua_State *L) { return lua_touserdata(L, lua_upvalueindex(1)); }

/* host.requests(): {{id =, length =, target =, pages = {...}}, ...} */
static int get_requests(lua_State *L) {
  const struct serving_view *view = &own_scripts(L)->view;
  lua_newtable(L);
  for (int i = 0, n = 0; i < MOST_REQUESTS; i++) {
    const struct request *request = &view->requests[i];
    if (!request->id) continue;
    lua_newtable(L);
    lua_pushinteger(L, request->id);
    lua_setfield(L, -2, "id");
    lua_pushinteger(L, request->length);
    lua_setfield(L, -2, "length");
    lua_pushinteger(L, request->target);
    lua_setfield(L, -2, "target");
    lua_newtable(L);
    for (int k = 0; k < request->page_count; k++) {
      lua_pushinteger(L, request->pages[k]);
      lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "pages");
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

/* host.pool(): {frame =, pages =, page_size =, free =, running =, finished =, tokens =} */
static int get_pool(lua_State *L) {
  const struct serving_view *view = &own_scripts(L)->view;
  const struct {
    const char *name;
    long value;
  } fields[] = { { "frame", view->frame },     { "pages", PAGES },           { "page_size", PAGE_SIZE },
                 { "free", view->free_pages }, { "running", view->running }, { "finished", view->finished },
                 { "tokens", view->tokens } };
  lua_newtable(L);
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    lua_pushinteger(L, fields[i].value);
    lua_setfield(L, -2, fields[i].name);
  }
  return 1;
}

/* host.set_most_running(n): how many requests may run at a time. */
static int set_most_running(lua_State *L) {
  lua_Integer wanted = luaL_checkinteger(L, 1);
  luaL_argcheck(L, wanted >= 1 && wanted <= MOST_REQUESTS, 1, "expected 1..16");
  own_scripts(L)->wanted_running = (int)wanted;
  return 0;
}

static void add_host(lua_State *L, void *user) {
  static const luaL_Reg functions[] = {
    { "requests", get_requests }, { "pool", get_pool }, { "set_most_running", set_most_running }, { NULL, NULL }
  };
  luaL_newlibtable(L, functions);
  lua_pushlightuserdata(L, user);
  luaL_setfuncs(L, functions, 1);
  lua_setfield(L, 1, "host");
}

static void print_name(const struct script *script) {
  nib_put_visible(stdout, script->name, strlen(script->name), false, false);
}

/* Prints a line of a script. Control characters are made visible, so that the line cannot forge others. */
static void print_line(void *user, const char *text, size_t length) {
  const struct script *script = user;
  if (script->scripts->is_quiet) return;
  print_name(script);
  fputs(": ", stdout);
  nib_put_visible(stdout, text, length < MOST_PRINTED ? length : MOST_PRINTED, false, false);
  putchar('\n');
}

/* ---- One script ------------------------------------------------------------------------------------------------ */

/* Sets the sandbox that cancel_running cancels. With NULL, also waits until no cancel is under way, so that the sandbox
 * may then be closed. */
static void set_running(struct scripts *scripts, nib_sandbox *sandbox) {
  __atomic_store_n(&scripts->running, sandbox, __ATOMIC_SEQ_CST);
  while (!sandbox && __atomic_load_n(&scripts->is_cancelling, __ATOMIC_SEQ_CST)) sched_yield();
}

static void cancel_running(struct scripts *scripts) {
  __atomic_store_n(&scripts->is_cancelling, true, __ATOMIC_SEQ_CST);
  nib_sandbox *sandbox = __atomic_load_n(&scripts->running, __ATOMIC_SEQ_CST);
  if (sandbox) nib_sandbox_cancel(sandbox);
  __atomic_store_n(&scripts->is_cancelling, false, __ATOMIC_SEQ_CST);
}

/* Counts how a call ended and prints its error, at most one a second. */
static void note(struct script *script, nib_status status, long long start_us) {
  long long now = host_now_us();
  if (now - start_us > script->worst_us) script->worst_us = now - start_us;
  script->calls++;
  if (status == NIB_OK) return;
  script->raised += status == NIB_SCRIPT;
  script->expired += status == NIB_EXPIRED;
  script->exhausted += status == NIB_MEMORY;
  if (script->scripts->is_quiet || now - script->printed_us < ERROR_US) return;
  script->printed_us = now;
  char message[600];
  int length = snprintf(message, sizeof message, "%s: %s", nib_status_text(status), nib_sandbox_error(script->sandbox));
  print_line(script, message, (size_t)length < sizeof message ? (size_t)length : sizeof message - 1);
}

static int push_dt(lua_State *L, void *user) {
  lua_pushnumber(L, *(const double *)user);
  return 1;
}

static void call(struct script *script, const char *function, double *dt, long long budget_us) {
  const nib_sandbox_values values = { push_dt, NULL, dt };
  long long start = host_now_us(), used = read_clock(CLOCK_THREAD_CPUTIME_ID);
  set_running(script->scripts, script->sandbox);
  nib_status status = nib_sandbox_call(script->sandbox, function, dt ? &values : NULL, budget_us);
  set_running(script->scripts, NULL);
  used = read_clock(CLOCK_THREAD_CPUTIME_ID) - used;
  if (status != NIB_UNAVAILABLE) note(script, status, start);
  if (used > budget_us + STRIKE_US && ++script->strikes == MOST_STRIKES && !script->scripts->is_quiet) {
    print_name(script);
    puts(": disabled until its file changes: its calls overran their time");
  }
  nib_tick(nib_sandbox_runtime(script->sandbox), LEAST_US);
}

static void path_of(const struct script *script, char *path, size_t size) {
  snprintf(path, size, "%s/%s", script->scripts->folder, script->name);
}

/* A number that changes with the file's modification time and size; 0 if there is no file. */
static long long stamp_of(const struct script *script) {
  char path[512];
  struct stat file;
  path_of(script, path, sizeof path);
  if (stat(path, &file) != 0 || !S_ISREG(file.st_mode)) return 0;
  return (long long)file.st_mtim.tv_sec * 1000000000 + file.st_mtim.tv_nsec + file.st_size;
}

static void load(struct script *script) {
  char path[512], *source = malloc(MOST_SOURCE);
  path_of(script, path, sizeof path);
  FILE *file = source ? fopen(path, "rb") : NULL;
  if (file) {
    size_t length = fread(source, 1, MOST_SOURCE, file);
    bool again = script->is_loaded;
    long long start = host_now_us();
    script->printed_us = 0; /* always print the errors of a new version */
    nib_status status = nib_sandbox_load(script->sandbox, script->name, source, length, LOAD_US);
    note(script, status, start);
    if (status == NIB_OK) {
      script->is_loaded = true;
      script->strikes = 0;
    }
    if (!script->scripts->is_quiet) {
      const char *what = status == NIB_OK ? again ? "reloaded" : "loaded"
                         : again          ? "not reloaded, the old version still runs"
                                          : "not loaded";
      print_name(script);
      printf(": %s\n", what);
    }
    fclose(file);
  }
  free(source);
}

static void unload(struct script *script) {
  if (script->is_loaded) call(script, "on_unload", NULL, UNLOAD_US);
  if (script->sandbox) {
    fputs("  ", stdout);
    print_name(script);
    int blanks = strlen(script->name) < 16 ? 16 - (int)strlen(script->name) : 0;
    printf("%*s %6ld calls, %6ld raised, %6ld out of time, %6ld out of memory, longest %7.2f ms, %5zu KiB of Lua's\n",
           blanks, "", script->calls, script->raised, script->expired, script->exhausted,
           (double)script->worst_us / 1000, nib_sandbox_lua_memory(script->sandbox) / 1024);
    nib_sandbox_close(script->sandbox);
  }
  free(script);
}

/* ---- The folder ------------------------------------------------------------------------------------------------ */

static bool is_script(const char *name) {
  size_t length = strlen(name);
  return length > 4 && length < sizeof((struct script *)0)->name && name[0] != '.' &&
         strcmp(name + length - 4, ".lua") == 0;
}

static void add(struct scripts *scripts, const char *name) {
  for (int i = 0; i < scripts->count; i++)
    if (strcmp(scripts->list[i]->name, name) == 0) return;
  if (scripts->count == MOST_SCRIPTS) return;
  struct script *script = calloc(1, sizeof *script); /* its address is the sandbox's user pointer */
  if (!script) return;
  memcpy(script->name, name, strlen(name) + 1); /* is_script checked the length */
  script->scripts = scripts;
  nib_config runtime = { .threads = 1 };
  nib_sandbox_config config = { .runtime = &runtime,
                                .lua_memory = 2 << 20,
                                .device_memory = 32 << 20,
                                .tensors = 1000,
                                .streams = 2,
                                .print = print_line,
                                .user = script };
  if (nib_sandbox_create(&config, &script->sandbox) != NIB_OK) {
    free(script);
    return;
  }
  nib_sandbox_extend(script->sandbox, add_host, scripts, LOAD_US);
  scripts->list[scripts->count++] = script;
}

/* Loads new and changed files, and unloads removed ones. */
static void look(struct scripts *scripts) {
  DIR *folder = opendir(scripts->folder);
  for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;)
    if (is_script(entry->d_name)) add(scripts, entry->d_name);
  if (folder) closedir(folder);
  for (int i = 0; i < scripts->count; i++) {
    struct script *script = scripts->list[i];
    long long stamp = stamp_of(script);
    if (stamp != 0 && stamp != script->stamp) {
      script->stamp = stamp;
      load(script);
    } else if (stamp == 0) {
      unload(script);
      scripts->list[i--] = scripts->list[--scripts->count];
    }
  }
}

/* ---- The thread ------------------------------------------------------------------------------------------------ */

/* Runs the scripts. Each gets an equal share of the time left, and each frame begins with another one. */
static void run_frame(struct scripts *scripts) {
  for (int i = 0; i < scripts->count; i++) {
    struct script *script = scripts->list[(scripts->first + i) % scripts->count];
    long long share = (scripts->deadline_us - host_now_us()) / (scripts->count - i);
    if (share < LEAST_US) scripts->skipped++;
    else if (script->is_loaded && script->strikes < MOST_STRIKES) call(script, "on_frame", &scripts->dt, share);
  }
  scripts->first++;
}

static void *script_thread(void *argument) {
  struct scripts *scripts = argument;
#ifdef SCHED_IDLE
  /* This thread, and the threads that the scripts' runtimes start, run only when the frame's thread sleeps. With any
   * other policy they may delay a frame that wakes up by milliseconds when all processors are busy. */
  pthread_setschedparam(pthread_self(), SCHED_IDLE, &(struct sched_param){ 0 });
#endif
  look(scripts);
  for (int frame = 1;; frame++) {
    __atomic_store_n(&scripts->is_busy, false, __ATOMIC_RELEASE);
    if (write(scripts->done[1], "", 1) < 0) continue; /* the pipe is full; the frame looks at is_busy */
    while (sem_wait(&scripts->work) != 0) {}
    if (__atomic_load_n(&scripts->must_quit, __ATOMIC_ACQUIRE)) return NULL;
    run_frame(scripts);
    if (frame % LOOK_FRAMES == 0) look(scripts);
  }
}

bool scripts_open(struct scripts *scripts, const char *folder, bool is_quiet) {
  memset(scripts, 0, sizeof *scripts);
  scripts->folder = folder;
  scripts->is_quiet = is_quiet;
  scripts->is_busy = true;
  if (sem_init(&scripts->work, 0, 0) != 0 || pipe(scripts->done) != 0) return false;
  for (int i = 0; i < 2; i++) fcntl(scripts->done[i], F_SETFL, O_NONBLOCK);
  return pthread_create(&scripts->thread, NULL, script_thread, scripts) == 0;
}

bool scripts_run(struct scripts *scripts, double dt, long long deadline_us, const struct serving_view *view) {
  if (__atomic_load_n(&scripts->is_busy, __ATOMIC_ACQUIRE)) return false;
  scripts->dt = dt;
  scripts->deadline_us = deadline_us;
  scripts->view = *view;
  __atomic_store_n(&scripts->is_busy, true, __ATOMIC_RELEASE);
  sem_post(&scripts->work);
  return true;
}

bool scripts_wait(struct scripts *scripts, long long deadline_us) {
  for (;;) {
    if (!__atomic_load_n(&scripts->is_busy, __ATOMIC_ACQUIRE)) return true;
    long long left = deadline_us - host_now_us();
    if (left <= 0) break;
    char bytes[16];
    struct pollfd event = { .fd = scripts->done[0], .events = POLLIN };
    struct timespec timeout = { .tv_sec = (time_t)(left / 1000000), .tv_nsec = (long)(left % 1000000 * 1000) };
    if (ppoll(&event, 1, &timeout, NULL) > 0 && read(scripts->done[0], bytes, sizeof bytes) < 0) break;
  }
  cancel_running(scripts);
  return false;
}

void scripts_close(struct scripts *scripts) {
  __atomic_store_n(&scripts->must_quit, true, __ATOMIC_RELEASE);
  cancel_running(scripts);
  sem_post(&scripts->work);
  pthread_join(scripts->thread, NULL);
  for (int i = 0; i < scripts->count; i++) unload(scripts->list[i]);
  sem_destroy(&scripts->work);
  for (int i = 0; i < 2; i++) close(scripts->done[i]);
}
