/* nibble in Lua 5.4, for a host: the module in the host's own states, and scripts that are not trusted. luaopen_nibble
 * is in nibble.so too, where Lua's `require` finds it; everything is in libnibble_lua.a (link it before libnibble.a and
 * Lua). */
#ifndef NIBBLE_LUA_H
#define NIBBLE_LUA_H

#include "nibble.h"

#ifdef __cplusplus
extern "C" {
#endif

#include <lua.h> /* which does not say itself that it is C */

/* ---- The module in a state of your own ------------------------------------------------------------------------- */

/* Opens the module with a runtime of its own, which is closed with the state, and pushes it; for luaL_requiref and
 * `require`. Once opened, a state keeps its module. Puts nothing into the global table. */
NIB_API int luaopen_nibble(lua_State *L);

/* Opens the module with a runtime of the host's. Several states may share it, in one thread at a time. Give the runtime
 * index_base 1, for messages. The state keeps the runtime's handle valid; once the host has closed it, calls from Lua
 * raise CLOSED. Raises no error: pushes the module, or a message (CLOSED; MEMORY; INVALID if the state has the module
 * with another runtime). Scripts find the module by `require "nibble"`; for its Lua half (nibble.pages ...) set
 * package.path. */
NIB_API nib_status nib_lua_open(lua_State *L, nib_runtime *runtime);

/* For C functions that Lua calls. push: pushes a new handle on a tensor of the state's runtime; may raise an error. to:
 * the tensor at a stack index, or NULL; it belongs to the value, and is good as long as that is on the stack. */
NIB_API void nib_lua_push_tensor(lua_State *L, nib_tensor *tensor);
NIB_API nib_tensor *nib_lua_to_tensor(lua_State *L, int index);

/* ---- Scripts that are not trusted ------------------------------------------------------------------------------ */

/* A sandbox holds one script. It has a Lua state and a runtime of its own, so that nothing leads from one script to
 * another or to the host. The script sees Lua's functions without io, os, debug, package and require, and the module
 * without what reads and writes files (load, list, save), brings code (compile, module) or looks at the work of others
 * (observe, peek, check, explain).
 *
 * A call ends at its deadline, whatever the script does: also inside pcall, coroutines and Lua's own functions. It may
 * end late, for these reasons alone:
 * - An instruction of Lua is never interrupted: a call may end 2 ms late, plus 1 ms for each 64 KiB that the
 *   instruction touches (two strings that are compared or joined, part of a table, a tensor that is made or freed, all
 *   of Lua's memory when a collection comes because it has run out).
 * - If n integer keys of a table all collide, a rehash takes up to 3 n * n nanoseconds, with n up to lua_memory / 256
 *   (0.8 s at 4 MiB).
 * - A GPU's driver makes and frees a graph in one call, up to 5 us a node.
 * - The first use of a GPU opens it, which takes the driver 0.1 s and more. nib_sandbox_create opens the default
 *   device. A script that names another GPU opens that one in its call.
 *
 * Where that is too late, make the calls on a thread of your own and go on without them (nib_sandbox_cancel). Strings
 * of more than 512 bytes make a script slower, because the clock is read more often while they live.
 *
 * Some things differ from Lua. No metatable has __gc, __close or __mode, and metamethods are read when setmetatable is
 * called. xpcall calls its handler after the stack is unwound. tostring shows no addresses. Lua's `load` takes source
 * text, no bytecode. collectgarbage only counts. Functions that are put into `string` do not become methods of strings.
 * Arithmetic does not convert strings to numbers.
 *
 * One thread at a time uses a sandbox. During a call that thread is in the "C" locale, also in functions of the host
 * that the script calls. All functions here are protected: an error in a script becomes a status. */

typedef struct nib_sandbox nib_sandbox;

/* All zero is a good configuration. */
typedef struct nib_sandbox_config {
  uint32_t abi_version; /* NIB_ABI_VERSION; 0 means the same */
  bool keep_state;      /* see nib_sandbox_load */
  /* The host's functions and `threads` of the script's runtime; NULL: all defaults. Its other fields are not used: the
   * ones below set them, and index_base is 1. */
  const nib_config *runtime;
  size_t lua_memory;      /* bytes; 0: 4 MiB. No string and no part of a table may take more than a quarter. */
  uint64_t device_memory; /* bytes of tensors on a device, and elements of a view; 0: 64 MiB */
  int32_t tensors;        /* alive at a time, views too; also of graphs and events; 0: 10,000 */
  int32_t streams;        /* at a time, each a thread or more; a closed one counts until its work is done; 0: 8 */
  int64_t instructions;   /* of Lua's machine, about, in a call; 0: no limit */
  void (*print)(void *user, const char *text, size_t length); /* a line of print's, without its end; NULL: none */
  void *user;
  /* How many bytes of operands the unfinished work of a device may have, as in nib_config: work above that waits, until
   * the call's deadline. 0: 256 MiB */
  uint64_t queued_bytes;
} nib_sandbox_config;

/* Makes a sandbox and opens the default device (the best there is, or what NIBBLE_DEVICE names). `config` may be NULL.
 * INVALID (another ABI version, a negative limit, the runtime's config) or MEMORY (a small
 * lua_memory, too); no message then. */
NIB_API nib_status nib_sandbox_create_sized(const nib_sandbox_config *config, size_t config_bytes,
                                            size_t runtime_config_bytes, nib_sandbox **out);
static inline nib_status nib_sandbox_create(const nib_sandbox_config *config, nib_sandbox **out) {
  return nib_sandbox_create_sized(config, sizeof *config, sizeof(nib_config), out);
}
/* Closes it, and drops its queued work. Waits for the piece that a running kernel of the CPU is at (about 256 KiB of
 * operands, or one page, row or token if that is more), for what a GPU has queued (queued_bytes at most), and for
 * functions of nib_stream_call. Release your tensors of the script's runtime, and exports of them, before. May be
 * NULL. */
NIB_API void nib_sandbox_close(nib_sandbox *sandbox);

/* The message of the last call that failed, valid until the next call.
 *
 * The calls below take at most `budget_us` microseconds (NIB_UNLIMITED: no limit; 0 or less: EXPIRED, and nothing has
 * run). They return SCRIPT if the script raised an error; EXPIRED if its time or its instructions ran out, even if it
 * came to its end after that, or if it was cancelled; MEMORY if Lua's memory ran out; FORKED in a child process after
 * fork. Work that a call has queued continues after it, queued_bytes at most. EXPIRED drops that work (nib_drop_work):
 * the tensors that it was to write count as never written, and the message says how many they are. The table `state` is
 * kept. */
NIB_API const char *nib_sandbox_error(const nib_sandbox *sandbox);

/* Compiles and runs a script (text) in a fresh environment, calls its function `on_load(reloaded)` if it has one, and
 * makes it the sandbox's script. If anything fails, the script before it stays, with all that it had. Later versions
 * find the table `state` as earlier ones left it: tensors, streams and graphs in it outlive their code. `name` is for
 * messages.
 *
 * A new version has the full limits for itself while the old one is still there, so for a while there may be twice as
 * much. Then the old version is freed. If `state` and the new version together exceed the limits, the new version is
 * loaded again, as a first one, with an empty `state`, and nib_sandbox_error says so (otherwise OK has no message). If
 * that load fails, the new version stays loaded with its `state`, but calls that allocate are MEMORY until the next
 * load. Above twice the limits a load begins with an empty `state` at once. With keep_state the limits hold for both
 * versions together: `state` is never dropped, and a version that does not fit is MEMORY or SCRIPT. */
NIB_API nib_status nib_sandbox_load(nib_sandbox *sandbox, const char *name, const char *source, size_t length,
                                    int64_t budget_us);

/* Arguments and results of a call. Both functions may raise Lua errors, which end the call as the script's own do. */
typedef struct nib_sandbox_values {
  int (*arguments)(lua_State *L, void *user);           /* pushes them; returns how many (at most 16); NULL: none */
  void (*results)(lua_State *L, int count, void *user); /* at indices 1 to count; NULL: dropped */
  void *user;
} nib_sandbox_values;

/* Calls a global function of the script; `values` may be NULL. UNAVAILABLE when it has none of that name. */
NIB_API nib_status nib_sandbox_call_sized(nib_sandbox *sandbox, const char *function, const nib_sandbox_values *values,
                                          size_t values_bytes, int64_t budget_us);
static inline nib_status nib_sandbox_call(nib_sandbox *sandbox, const char *function, const nib_sandbox_values *values,
                                          int64_t budget_us) {
  return nib_sandbox_call_sized(sandbox, function, values, sizeof *values, budget_us);
}

/* Runs a function of the host's in the sandbox's state: index 1 is the table of what every script's environment starts
 * from, to which it may add fields (for scripts loaded later), index 2 the table `state`. What it adds is in the
 * script's hands. The script may have given `state` a metatable: lua_rawset and lua_rawget call nothing of it, other
 * accesses do, within the budget. */
NIB_API nib_status nib_sandbox_extend(nib_sandbox *sandbox, void (*function)(lua_State *L, void *user), void *user,
                                      int64_t budget_us);

/* Ends the running call; may be called from any thread. If no call runs, the host's own waits on the script's runtime
 * return TIMEOUT until the next call begins; that call runs normally. */
NIB_API void nib_sandbox_cancel(nib_sandbox *sandbox);

/* The script's runtime, for nib_tick between calls, and to make tensors for it (nib_runtime_user gives the sandbox);
 * the bytes that Lua has now. */
NIB_API nib_runtime *nib_sandbox_runtime(const nib_sandbox *sandbox);
NIB_API size_t nib_sandbox_lua_memory(const nib_sandbox *sandbox);

#ifdef __cplusplus
}
#endif
#endif
