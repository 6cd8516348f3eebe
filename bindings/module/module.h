/* What the files of the Lua module share. The documentation of the Lua functions is bindings/lua/nibble/meta.lua.
 *
 * The first upvalue of every C function of the module is the module's state. Any call into Lua may raise an error, so
 * the call that creates a handle of the runtime stores it directly in its userdata. */
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
  bool counted; /* in its state's `count` */
  bool closed;  /* closed while a C function may still use the handle; the collector releases it */
} nib_lua_object;

/* A running `scope`, `capture` or `update`. It is on the C stack. */
typedef struct nib_lua_scope {
  struct nib_lua_scope *outer;
  nib_device *device;
  nib_lua_object *stream;
  int depth; /* the stream's userdata is at this index of the state's table of scopes */
} nib_lua_scope;

/* The limits that a sandbox sets for untrusted scripts. All zero: no limits. */
typedef struct nib_lua_limits {
  void (*check)(lua_State *L);       /* raises an error when the script's time is up */
  int64_t slice_us;                  /* how often a wait calls it; 0: NIB_LUA_SLICE_US */
  bool no_addresses;                 /* the script neither gets nor gives addresses */
  int64_t most_elements;             /* of a view; an expanded view of few bytes could occupy a kernel for ever */
  int32_t most[NIB_LUA_CLASS_COUNT]; /* objects alive at a time */
} nib_lua_limits;

typedef struct nib_lua_state {
  nib_runtime *runtime; /* NULL once the Lua state is being closed */
  nib_tensor *anchor; /* keeps a host's runtime open while this state exists; NULL if the runtime is the state's own */
  nib_lua_blocks blocks; /* the memory of the state's own runtime */
  nib_lua_limits limits;
  int32_t count[NIB_LUA_CLASS_COUNT]; /* objects alive, of classes with a limit */
  const void *metatables[NIB_LUA_CLASS_COUNT];
  nib_lua_scope *scope; /* the innermost */
  uint64_t fresh_bytes; /* of tensors created since the last full collection */
  uint64_t kept_bytes;  /* of tensors alive after it */
  int fresh_streams;    /* created since then; a stream costs a thread, or memory of the driver */
  uint64_t next_seed;
  int busy; /* Lua code runs (a finalizer or a hook) while a C function of the module holds handles */
  struct nib_lua_observation *observed, *observed_last; /* those that Lua's observers have not been told yet */
  uint64_t observed_count;                              /* of all so far */
  int64_t wait_began_ns;                                /* of the running wait, if observed; 0: none */
  bool observations_lost;
  bool observes;   /* the runtime's observer is this state's */
  bool telling;    /* Lua's observers run; their own work is not observed */
  bool collecting; /* the collector releases a handle */
} nib_lua_state;

/* User values of the state: the classes' metatables are at 1 + class. */
enum {
  NIB_LUA_MODULE = NIB_LUA_CLASS_COUNT + 1, /* the module's table */
  NIB_LUA_SCOPES,                           /* array of the streams of the running scopes */
  NIB_LUA_DEFAULT_STREAMS,                  /* userdata of the default streams, by device */
  NIB_LUA_TICK,                             /* the function that nib_lua_tick calls */
  NIB_LUA_OBSERVERS,                        /* array: name, function and first number of each observer */
  NIB_LUA_KNOWN,                            /* observe.c's cache; nil without observers */
  NIB_LUA_USER_VALUES = NIB_LUA_KNOWN
};

#define NIB_LUA_SLICE_US 50000 /* how long a wait keeps Lua's hooks from running */

static inline nib_lua_state *nib_lua_get_state(lua_State *L) { return lua_touserdata(L, lua_upvalueindex(1)); }

/* ---- nibble.c ---- */

/* Opens the module and pushes it. Uses the host's runtime `shared`, or creates one if it is NULL. If the runtime cannot
 * be used, raises an error and sets *why (if not NULL) to the status. */
int nib_lua_open_module(lua_State *L, nib_runtime *shared, nib_status *why);
/* Raises the error of a status that is not NIB_OK: the runtime's message, under the name of `operation`. */
int nib_lua_raise(lua_State *L, const char *operation, nib_status status);
/* Pushes that error's message, without the position in the script. */
const char *nib_lua_push_message(lua_State *L, const char *operation, nib_status status);
/* The state's runtime. Raises an error if the Lua state is being closed. */
nib_runtime *nib_lua_runtime(lua_State *L, const char *operation);
/* Runs a full collection, which releases unreachable tensors. */
void nib_lua_collect(lua_State *L);
/* Count a new stream, and the bytes of a new tensor; may run a full collection. */
void nib_lua_account_stream(lua_State *L);
void nib_lua_account(lua_State *L, const nib_tensor *tensor);
/* Called between the slices of a wait. Calls a small Lua function, so that the hook of Ctrl-C can run and raise its
 * error; checks a sandbox's time. */
void nib_lua_tick(lua_State *L);
/* Called at step i of a long loop: checks a sandbox's time now and then, which may raise an error. */
static inline void nib_lua_step(lua_State *L, int64_t i) {
  const nib_lua_state *state = nib_lua_get_state(L);
  if (state->limits.check && (i & 255) == 0) state->limits.check(L);
}
/* Refuses a view of more elements than a sandbox allows. */
void nib_lua_check_elements(lua_State *L, const char *operation, const nib_tensor *view);
/* Raises an error if a stream of the device captures: values cannot be read then, and nothing can be waited for. */
void nib_lua_refuse_capture(lua_State *L, const char *operation, const nib_device *device);

/* ---- observe.c ---- */
void nib_lua_tell(lua_State *L);
void nib_lua_forget_observed(nib_lua_state *state);
int nib_lua_observe(lua_State *L);
int nib_lua_peek(lua_State *L);
/* Calls the function `name` of the Lua module `module` with all values on the stack. */
int nib_lua_call_module(lua_State *L, const char *module, const char *name);
int nib_lua_check_mode(lua_State *L);
int nib_lua_check_reports(lua_State *L);
/* Calls Lua's observers with what was observed, and raises their errors. So it is used where a function may raise one.
 */
#define NIB_LUA_OBSERVED(L)                                                   \
  do {                                                                        \
    const nib_lua_state *observing = nib_lua_get_state(L);                    \
    if (observing->observed || observing->observations_lost) nib_lua_tell(L); \
  } while (0)

/* Evaluates `call`, and again after a full collection if memory ran out. Raises an error if it fails. */
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

/* Evaluates `call`, which uses the variable `timeout_us`, until it gives no NIB_TIMEOUT. Raises an error if it fails.
 */
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

/* Creates the class's metatable with its methods and metamethods, and those that all classes have. Their upvalues are
 * the state, the table of methods and the class. */
void nib_lua_new_class(lua_State *L, nib_lua_state *state, int state_index, nib_lua_class class,
                       const luaL_Reg *methods, const luaL_Reg *metamethods);
/* Pushes an object without a handle; the caller sets it. */
nib_lua_object *nib_lua_push(lua_State *L, nib_lua_class class);
/* The same for an object of the device's, not the script's: it does not count against a sandbox's limit. */
nib_lua_object *nib_lua_push_uncounted(lua_State *L, nib_lua_class class);
/* The object at a stack index, open or closed; NULL for another value. */
nib_lua_object *nib_lua_test(lua_State *L, int index, nib_lua_class class);
/* The open object at a stack index. Raises an error for another value. */
nib_lua_object *nib_lua_check(lua_State *L, const char *operation, const char *parameter, int index,
                              nib_lua_class class);
static inline bool nib_lua_is_open(const nib_lua_object *object) { return object->handle && !object->closed; }
/* For __index: pushes the method whose name is at index 2, and returns true, if there is one. */
bool nib_lua_push_method(lua_State *L);
/* Raises the error for a field or method that does not exist. */
int nib_lua_unknown_field(lua_State *L, nib_lua_class class);

/* ---- stream.c ---- */

/* The current stream of a device. Raises an error if it is closed. */
nib_stream *nib_lua_current_stream(lua_State *L, const char *operation, nib_device *device);
/* Pushes its userdata, open or closed. */
void nib_lua_push_current_stream(lua_State *L, nib_device *device);
/* Fills `scope` for nib_lua_call_in_scope. The stream's userdata stays at its index. */
void nib_lua_prepare_scope(lua_State *L, int stream_index, nib_lua_scope *scope);
/* lua_pcall with the scope's stream as the current one. Raises no error. */
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
/* Creates and pushes a contiguous tensor. */
nib_lua_object *nib_lua_create(lua_State *L, const char *operation, nib_device *device, bool pinned, nib_dtype dtype,
                               int32_t ndim, const int64_t *shape);
/* Copies source to destination, in order with the current streams of both devices. */
void nib_lua_copy(lua_State *L, const char *operation, nib_tensor *destination, nib_tensor *source);
/* Waits until the tensor's values can be read. */
void nib_lua_wait_tensor(lua_State *L, const char *operation, nib_tensor *tensor);
/* The view at `count` indices of the first dimensions. They count from 0 and are in range. */
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
