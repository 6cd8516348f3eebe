/* What the files of the Lua module share. Lua programmers' documentation is bindings/lua/nibble/meta.lua.
 *
 * Every C function of the module has the module's state as its first upvalue. Errors may leave a function at any call
 * into Lua, so a handle of the runtime is put into its userdata by the same call that creates it. */
#ifndef NIB_MODULE_H
#define NIB_MODULE_H

#include <lauxlib.h>
#include <lua.h>

#include "../../runtime/nibble_tools.h"
#include "blocks.h"
#include "../nibble_lua.h"

typedef enum nib_lua_class {
  NIB_LUA_TENSOR,
  NIB_LUA_STREAM,
  NIB_LUA_EVENT,
  NIB_LUA_GRAPH,
  NIB_LUA_CODE, /* "module" */
  NIB_LUA_KERNEL,
  NIB_LUA_CLASS_COUNT
} nib_lua_class;

/* The userdata of all classes. */
typedef struct nib_lua_object {
  union {
    void *handle; /* NULL: closed */
    nib_tensor *tensor;
    nib_stream *stream;
    nib_event *event;
    nib_graph *graph;
    nib_module *module;
    nib_user_kernel *kernel;
  };
  nib_lua_class class;
  bool counted; /* among its state's objects of its class */
  bool closed;  /* closed while a C function may still use the handle; the collector releases it */
} nib_lua_object;

/* A `scope`, `capture` or `update` that is running; on the C stack. */
typedef struct nib_lua_scope {
  struct nib_lua_scope *outer;
  nib_device *device;
  nib_lua_object *stream;
  int depth; /* its userdata is at this index of the state's table of scopes */
} nib_lua_scope;

/* What a sandbox sets for scripts that are not trusted; all zero: no limits. */
typedef struct nib_lua_limits {
  void (*check)(lua_State *L);       /* raises an error when the script has no more time */
  int64_t slice_us;                  /* how often a wait asks it; 0: NIB_LUA_SLICE_US */
  bool no_addresses;                 /* none go to the script or come from it */
  int64_t most_elements;             /* of a view: none may make a kernel run for ever over a few bytes */
  int32_t most[NIB_LUA_CLASS_COUNT]; /* objects alive at a time */
} nib_lua_limits;

typedef struct nib_lua_state {
  nib_runtime *runtime; /* NULL once the Lua state is being closed */
  nib_tensor *anchor; /* keeps a host's runtime as long as this state is there; NULL: the runtime is the state's own */
  nib_lua_blocks blocks; /* all memory of a runtime of its own */
  nib_lua_limits limits;
  int32_t count[NIB_LUA_CLASS_COUNT]; /* of objects, where there is a limit */
  const void *metatables[NIB_LUA_CLASS_COUNT];
  nib_lua_scope *scope; /* the innermost */
  uint64_t fresh_bytes; /* of tensors made since the last full collection */
  uint64_t kept_bytes;  /* of tensors alive after it */
  int fresh_streams;    /* made since then: each has a thread or more of the driver */
  uint64_t next_seed;
  int busy; /* Lua code runs (a finalizer or a hook) while a C function of the module holds handles */
  struct nib_lua_observation *observed, *observed_last; /* not told to Lua's observers yet */
  uint64_t observed_count;                              /* of all */
  int64_t wait_began_ns;                                /* of a wait in slices that goes on, where observed; 0: none */
  bool observations_lost;
  bool observes;   /* the runtime's observer is this state's */
  bool telling;    /* observers run: what they do themselves is not observed */
  bool collecting; /* the collector releases a handle */
} nib_lua_state;

/* User values of the state: the classes' metatables are at 1 + class. */
enum {
  NIB_LUA_MODULE = NIB_LUA_CLASS_COUNT + 1, /* the module's table */
  NIB_LUA_SCOPES,                           /* array of the streams of the running scopes */
  NIB_LUA_DEFAULT_STREAMS,                  /* by device */
  NIB_LUA_TICK,                             /* see nib_lua_tick */
  NIB_LUA_OBSERVERS,                        /* array of a name, a function and a number, in turn */
  NIB_LUA_KNOWN,                            /* what observers were told last; nil: there were none */
  NIB_LUA_USER_VALUES = NIB_LUA_KNOWN
};

#define NIB_LUA_SLICE_US 50000 /* how long a wait keeps Lua's hooks from running */

static inline nib_lua_state *nib_lua_get_state(lua_State *L) { return lua_touserdata(L, lua_upvalueindex(1)); }

/* ---- module.c ---- */

/* Opens the module, with a runtime of a host's or (NULL) one of its own, and pushes it; what luaopen_nibble does.
 * `why` (may be NULL) gets the status of a runtime that cannot be used, beside the error. */
int nib_lua_open_module(lua_State *L, nib_runtime *shared, nib_status *why);
/* Raises an error for a status that is not NIB_OK, with the runtime's message in the name of `operation`. */
int nib_lua_raise(lua_State *L, const char *operation, nib_status status);
/* Pushes that error's message, without the position in the script. */
const char *nib_lua_push_message(lua_State *L, const char *operation, nib_status status);
/* Raises an error unless the runtime is open. */
nib_runtime *nib_lua_runtime(lua_State *L, const char *operation);
/* Runs a full collection, which releases the tensors that nobody holds. */
void nib_lua_collect(lua_State *L);
/* Tells the collector about a new stream, and about a new tensor's storage. */
void nib_lua_account_stream(lua_State *L);
void nib_lua_account(lua_State *L, const nib_tensor *tensor);
/* Calls a small Lua function, so that a hook that a signal handler has set (Ctrl-C) can raise its error during a wait.
 * Asks a sandbox whether there is time left. */
void nib_lua_tick(lua_State *L);
/* For step i of a long loop: asks a sandbox now and then. Raises an error. */
static inline void nib_lua_step(lua_State *L, int64_t i) {
  const nib_lua_state *state = nib_lua_get_state(L);
  if (state->limits.check && (i & 255) == 0) state->limits.check(L);
}
/* Refuses a view of more elements than a sandbox allows. */
void nib_lua_check_elements(lua_State *L, const char *operation, const nib_tensor *view);
/* Refuses what needs values, or waits, while a stream of the device captures. */
void nib_lua_refuse_capture(lua_State *L, const char *operation, const nib_device *device);

/* ---- observe.c ---- */
void nib_lua_tell(lua_State *L);
void nib_lua_forget_observed(nib_lua_state *state);
int nib_lua_observe(lua_State *L);
int nib_lua_peek(lua_State *L);
/* Calls the function `name` of the Lua module `module` with what is on the stack. */
int nib_lua_call_module(lua_State *L, const char *module, const char *name);
int nib_lua_check_mode(lua_State *L);
int nib_lua_check_reports(lua_State *L);
/* Where a C function could raise an error: tells what was observed to the observers. Their errors are raised. */
#define NIB_LUA_OBSERVED(L)                                                   \
  do {                                                                        \
    const nib_lua_state *observing = nib_lua_get_state(L);                    \
    if (observing->observed || observing->observations_lost) nib_lua_tell(L); \
  } while (0)

/* Evaluates `call`; once more after a collection if memory has run out; raises an error if it fails. */
#define NIB_LUA_DO(L, operation, call)                           \
  do {                                                           \
    nib_status status_ = (call);                                 \
    if (status_ == NIB_MEMORY) {                                 \
      nib_lua_collect(L);                                        \
      status_ = (call);                                          \
    }                                                            \
    if (status_ != NIB_OK) nib_lua_raise(L, operation, status_); \
    NIB_LUA_OBSERVED(L);                                         \
  } while (0)

/* Evaluates `call`, which uses the variable `timeout_us`, until it is not NIB_TIMEOUT; raises an error if it fails. */
#define NIB_LUA_WAIT(L, operation, call)                         \
  do {                                                           \
    nib_status status_;                                          \
    int64_t timeout_us = 0;                                      \
    nib_lua_get_state(L)->wait_began_ns = 0;                     \
    while ((status_ = (call)) == NIB_TIMEOUT) {                  \
      nib_lua_tick(L);                                           \
      int64_t slice_us_ = nib_lua_get_state(L)->limits.slice_us; \
      timeout_us = slice_us_ ? slice_us_ : NIB_LUA_SLICE_US;     \
    }                                                            \
    nib_lua_get_state(L)->wait_began_ns = 0;                     \
    if (status_ != NIB_OK) nib_lua_raise(L, operation, status_); \
    NIB_LUA_OBSERVED(L);                                         \
  } while (0)

/* ---- object.c ---- */

extern const char *const nib_lua_class_names[NIB_LUA_CLASS_COUNT]; /* "tensor", ... */

/* Makes the class's metatable: its methods and metamethods, over the ones that all classes have. They get three
 * upvalues: the state, the table of methods, and the class. */
void nib_lua_new_class(lua_State *L, nib_lua_state *state, int state_index, nib_lua_class class,
                       const luaL_Reg *methods, const luaL_Reg *metamethods);
/* Pushes an object without a handle, for the caller to fill. */
nib_lua_object *nib_lua_push(lua_State *L, nib_lua_class class);
/* The same for what is the device's and not the script's: it takes nothing of a sandbox's allowance. */
nib_lua_object *nib_lua_push_uncounted(lua_State *L, nib_lua_class class);
/* The object at a stack index, open or not; NULL if it is something else. */
nib_lua_object *nib_lua_test(lua_State *L, int index, nib_lua_class class);
/* The open object at a stack index; an error if it is something else. */
nib_lua_object *nib_lua_check(lua_State *L, const char *operation, const char *parameter, int index,
                              nib_lua_class class);
static inline bool nib_lua_is_open(const nib_lua_object *object) { return object->handle && !object->closed; }
/* For __index: pushes the method of the name at index 2 from the second upvalue; false if there is none. */
bool nib_lua_push_method(lua_State *L);
/* Raises the error for a name that no field or method has. */
int nib_lua_unknown_field(lua_State *L, nib_lua_class class);

/* ---- stream.c ---- */

/* The current stream of a device; an error if it is closed. */
nib_stream *nib_lua_current_stream(lua_State *L, const char *operation, nib_device *device);
/* Its userdata, open or not. */
void nib_lua_push_current_stream(lua_State *L, nib_device *device);
/* Makes a scope of the stream at an index, whose userdata stays on the stack, ready for: */
void nib_lua_prepare_scope(lua_State *L, int stream_index, nib_lua_scope *scope);
/* lua_pcall with the scope's stream current. Raises no error itself. */
int nib_lua_call_in_scope(lua_State *L, nib_lua_scope *scope, int arguments, int results);
void nib_lua_open_stream(lua_State *L, nib_lua_state *state, int state_index);
int nib_lua_new_stream(lua_State *L);
int nib_lua_get_current_stream(lua_State *L);

/* ---- graph.c ---- */
int nib_lua_stream_capture(lua_State *L);
void nib_lua_open_graph(lua_State *L, nib_lua_state *state, int state_index);

/* ---- kernel.c ---- */
int nib_lua_compile(lua_State *L);
int nib_lua_load_module(lua_State *L);
void nib_lua_open_kernel(lua_State *L, nib_lua_state *state, int state_index);

/* ---- tensor.c, tensor_create.c, tensor_data.c, tensor_print.c ---- */

void nib_lua_open_tensor(lua_State *L, nib_lua_state *state, int state_index);
extern const luaL_Reg nib_lua_creators[];
/* A compact tensor of `dtype`, pushed. */
nib_lua_object *nib_lua_create(lua_State *L, const char *operation, nib_device *device, bool pinned, nib_dtype dtype,
                               int32_t ndim, const int64_t *shape);
/* destination = source, in both devices' current streams. */
void nib_lua_copy(lua_State *L, const char *operation, nib_tensor *destination, nib_tensor *source);
/* Waits until the tensor's values can be read. */
void nib_lua_wait_tensor(lua_State *L, const char *operation, nib_tensor *tensor);
/* The view under `count` (0 or more) indices from 0, which are in range, of the first dimensions. */
nib_status nib_lua_select(nib_tensor *tensor, int32_t count, const int64_t *indices, nib_tensor **out);
int nib_lua_new_tensor(lua_State *L);
int nib_lua_tensor_totable(lua_State *L);
int nib_lua_tensor_item(lua_State *L);
int nib_lua_tensor_bytes(lua_State *L);
int nib_lua_tensor_index(lua_State *L);
int nib_lua_tensor_newindex(lua_State *L);
int nib_lua_tensor_tostring(lua_State *L);

/* ---- files.c ---- */
extern const luaL_Reg nib_lua_files[];

/* ---- page.c, quantization.c, mla.c ---- */
extern const luaL_Reg nib_lua_page[];
extern const luaL_Reg nib_lua_quantization[];
extern const luaL_Reg nib_lua_mla[];
int nib_lua_rope_table(lua_State *L);

#endif
