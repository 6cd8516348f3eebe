/* What the files of the sandbox share. A host's documentation is nibble_lua.h. */
#ifndef NIB_SANDBOX_H
#define NIB_SANDBOX_H

#include <pthread.h>

#include "../module/args.h"

#define NIB_SANDBOX_COUNT 200 /* instructions between two looks at the clock, fewer where they are slow ones */

#define NIB_SANDBOX_CLASSES 64

struct nib_sandbox {
  nib_sandbox_config config;
  nib_config host; /* the host's allocator */
  nib_runtime *runtime;
  lua_State *L;
  lua_State *running; /* L or one of its coroutines; NULL between calls */
  size_t lua_used, lua_most, lua_block;
  size_t fresh;    /* bytes of Lua's since the last look at the clock */
  size_t lua_base; /* of lua_used, what every script has */
  size_t host_used, host_most,
    host_limit; /* all memory of the runtime; host_most is more while a new version is loaded */
  nib_lua_state *module;
  nib_lua_blocks blocks;
  int64_t deadline_us; /* of nib_sandbox_now; 0: none */
  int64_t instructions_left;
  int64_t looked_us; /* when the hook last ran */
  int count;         /* how many instructions it let pass from there */
  size_t steps;
  int32_t strings[NIB_SANDBOX_CLASSES]; /* long ones alive, by the logarithm of their size */
  int most_count;                       /* what `count` may be beside the longest of them */
  bool cancelled;                       /* atomic; it changes together with the runtime's deadline: */
  pthread_mutex_t cancel_lock;
  bool expired;               /* this call has got its last error; nothing in Lua catches it */
  bool absent;                /* the function to call is not there */
  const void *metatables[16]; /* see base.c */
  int next_metatable;
  char where[80];
  char error[512];
};

/* ---- sandbox.c ---- */

/* The sandbox of a Lua state: Lua hands its allocator's argument to whoever asks. */
static inline nib_sandbox *nib_sandbox_of(lua_State *L) {
  void *sandbox;
  lua_getallocf(L, &sandbox);
  return sandbox;
}
/* Raises the last error if the call's time is over. */
void nib_sandbox_check(lua_State *L);
/* For small steps of a loop in C: that, now and then. A step takes as long as some tens of bytes that are looked at one
 * by one. */
static inline void nib_sandbox_steps(lua_State *L, size_t steps) {
  nib_sandbox *sandbox = nib_sandbox_of(L);
  sandbox->steps += steps;
  if (sandbox->steps < 64) return;
  sandbox->steps = 0;
  nib_sandbox_check(L);
}
static inline void nib_sandbox_step(lua_State *L) { nib_sandbox_steps(L, 1); }
/* Before a coroutine goes on, or goes on again: it may have been left when there were no long strings. */
void nib_sandbox_watch(lua_State *L);
/* To be called by whatever catches an error: raises the last one again. */
void nib_sandbox_rethrow(lua_State *L);
/* Loads text like lua_load, looking at the clock as it reads. `next` (may be NULL) gives more text, or NULL. */
typedef struct nib_sandbox_text {
  const char *text;
  size_t length;
  const char *(*next)(lua_State *L, size_t *length);
} nib_sandbox_text;
int nib_sandbox_compile(lua_State *L, nib_sandbox_text *text, const char *name);

/* ---- base.c, string.c, table.c ---- */

/* Pushes the table of what an environment starts from. */
int nib_sandbox_open(lua_State *L);
/* Forgets copies of metatables, whose functions have their script's environment. Takes no memory. */
void nib_sandbox_forget_metatables(lua_State *L);
/* Pushes a fresh environment from that table, with `state` as its table `state`; all at stack indices. */
void nib_sandbox_push_environment(lua_State *L, int globals, int state);
/* Sets the field `name` of the table on the top of the stack to a new library of these functions, and pushes it. */
void nib_sandbox_library(lua_State *L, const char *name, const luaL_Reg *functions);
/* Copies fields of the library `from` (a table at a stack index) to the one on the top; their functions get at most 64
 * KiB of strings (which may be taken for numbers, each) and 250 arguments, as they are bound. */
enum nib_sandbox_bound { NIB_SANDBOX_FREE, NIB_SANDBOX_TEXT, NIB_SANDBOX_TEXT_AND_COUNT };
void nib_sandbox_take(lua_State *L, int from, const char *const *names, enum nib_sandbox_bound bound);
/* Pushes a value as a string, without addresses. */
const char *nib_sandbox_tostring(lua_State *L, int index);
/* Calls a C function of Lua's in its own place: the first upvalue. */
static inline int nib_sandbox_original(lua_State *L) { return lua_tocfunction(L, lua_upvalueindex(1))(L); }
void nib_sandbox_check_arguments(lua_State *L);
void nib_sandbox_open_string(lua_State *L);
void nib_sandbox_open_table(lua_State *L);
extern const luaL_Reg nib_sandbox_patterns[];

#endif
