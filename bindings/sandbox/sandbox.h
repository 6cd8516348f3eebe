/* What the files of the sandbox share. The documentation for hosts is nibble_lua.h. */
#ifndef NIB_SANDBOX_H
#define NIB_SANDBOX_H

#include <pthread.h>

#include "../module/args.h"

#define NIB_SANDBOX_COUNT 200 /* most instructions between two checks of the clock */

#define NIB_SANDBOX_CLASSES 64

struct nib_sandbox {
  nib_sandbox_config config;
  nib_config host; /* the host's allocator */
  nib_runtime *runtime;
  lua_State *L;
  lua_State *running; /* L or one of its coroutines; NULL between calls */
  size_t lua_used, lua_most, lua_block;
  size_t fresh;                            /* bytes that Lua allocated since the last check of the clock */
  size_t lua_base;                         /* lua_used of an empty sandbox */
  size_t host_used, host_most, host_limit; /* memory of the runtime; host_most > host_limit while a version is loaded */
  nib_lua_state *module;
  nib_lua_blocks blocks;
  int64_t deadline_us; /* on the monotonic clock; 0: none */
  int64_t instructions_left;
  int64_t looked_us; /* when the hook last ran */
  int count;         /* instructions from then until it runs again */
  size_t steps;
  int32_t strings[NIB_SANDBOX_CLASSES]; /* long strings alive, by the logarithm of their size */
  int most_count;                       /* bound of `count` that follows from the longest of them */
  bool cancelled;                       /* atomic */
  pthread_mutex_t cancel_lock;          /* `cancelled` and the runtime's deadline change together */
  bool expired;               /* the call's time is up: its error was raised, and Lua code must not catch it */
  bool absent;                /* the script has no function of that name */
  const void *metatables[16]; /* see base.c */
  int next_metatable;
  char where[80];
  char error[512];
};

/* ---- sandbox.c ---- */

/* The sandbox of a Lua state. It is the argument of the state's allocator. */
static inline nib_sandbox *nib_sandbox_of(lua_State *L) {
  void *sandbox;
  lua_getallocf(L, &sandbox);
  return sandbox;
}
/* Raises the error that ends the call if its time is up. */
void nib_sandbox_check(lua_State *L);
/* Counts steps of a loop in C and calls nib_sandbox_check now and then. A step is the work of comparing some tens of
 * bytes one by one. */
static inline void nib_sandbox_steps(lua_State *L, size_t steps) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  sandbox->steps += steps;
  if (sandbox->steps < 64) return;
  sandbox->steps = 0;
  nib_sandbox_check(L);
}
static inline void nib_sandbox_step(lua_State *L) { nib_sandbox_steps(L, 1); }
/* Call before a coroutine is resumed or continues: its hook may be older than the long strings. */
void nib_sandbox_watch(lua_State *L);
/* Call after an error was caught: raises it again if it is the one that ends the call. */
void nib_sandbox_rethrow(lua_State *L);
/* As lua_load, but checks the clock while it reads. `next` (may be NULL) returns more text, or NULL. */
typedef struct nib_sandbox_text {
  const char *text;
  size_t length;
  const char *(*next)(lua_State *L, size_t *length);
} nib_sandbox_text;
int nib_sandbox_compile(lua_State *L, nib_sandbox_text *text, const char *name);

/* ---- base.c, string.c, table.c ---- */

/* Pushes the table of globals that every environment is a copy of. */
int nib_sandbox_open(lua_State *L);
/* Drops the kept copies of metatables, which would keep an old version's environment alive. Allocates no memory. */
void nib_sandbox_forget_metatables(lua_State *L);
/* Pushes a new environment: a copy of `globals` with `state` as its table `state` (both are stack indices). */
void nib_sandbox_push_environment(lua_State *L, int globals, int state);
/* Sets the field `name` of the table on top of the stack to a new library of these functions, and pushes the library.
 */
void nib_sandbox_library(lua_State *L, const char *name, const luaL_Reg *functions);
/* Copies fields of the library `from` (a stack index) to the library on top of the stack. TEXT bounds a function's
 * string arguments to 64 KiB in all, since converting a long one to a number is slow; COUNT bounds it to 250 arguments.
 */
enum nib_sandbox_bound { NIB_SANDBOX_FREE, NIB_SANDBOX_TEXT, NIB_SANDBOX_TEXT_AND_COUNT };
void nib_sandbox_take(lua_State *L, int from, const char *const *names, enum nib_sandbox_bound bound);
/* Pushes a value as a string, without addresses. */
const char *nib_sandbox_tostring(lua_State *L, int index);
/* Calls Lua's own function, the first upvalue, with all arguments. */
static inline int nib_sandbox_original(lua_State *L) { return lua_tocfunction(L, lua_upvalueindex(1))(L); }
void nib_sandbox_check_arguments(lua_State *L);
void nib_sandbox_open_string(lua_State *L);
void nib_sandbox_open_table(lua_State *L);
extern const luaL_Reg nib_sandbox_patterns[];

#endif
