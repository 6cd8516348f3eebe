/* A stand-in for the CUDA driver: a shared library libcuda.so.1 that plays a small GPU behind the driver's interface,
 * on a machine that has none. Device memory is host memory, a stream is a thread, a launch runs the CPU kernel of the
 * function's name. Captures, pools, contexts and handles keep the driver's rules, and what no program may do is refused
 * and counted as a misuse.
 *
 * Environment:
 *   NIB_STANDIN_DEVICES=1       number of GPUs (CUDA_VISIBLE_DEVICES chooses among them as usual)
 *   NIB_STANDIN_VERSION=13000   version of the driver
 *   NIB_STANDIN_COMPUTE=9.0     compute capability
 *   NIB_STANDIN_POOLS=1         0: GPUs without memory pools
 *   NIB_STANDIN_PEERS=1         0: no GPU reaches another's memory
 *   NIB_STANDIN_IMAGES=1        0: no module has code for these GPUs
 *   NIB_STANDIN_SHARED=0        bytes of static shared memory that every kernel declares
 *   NIB_STANDIN_MISSING=cuX     an entry that this driver lacks
 *   NIB_STANDIN_MEMORY=BYTES    memory of each GPU (8 GiB)
 *   NIB_STANDIN_JITTER=MICROSECONDS  streams rest for up to as long before each task, so that a missing wait shows
 *   NIB_STANDIN_FAIL=RULES      NAME:COUNT:RESULT, separated by commas: the COUNT-th call of NAME returns RESULT (a
 * number or CUDA_ERROR_...). NAME *: of any call, but for queries, whose number depends on time; NAME kernel: the
 *                               COUNT-th kernel that runs breaks its context with RESULT. COUNT+: all calls from there
 * on. NIB_STANDIN_LOG=FILE        a file that gets a line "PID misuse: ..." when one happens, and at the end of the
 * process "PID leak: ..." for each kind of object that is still alive and "PID end: N calls, N made to fail, N misuses"
 *
 * The program may use the functions at the end of this file, which it finds by dlsym. */
#ifndef NIB_STANDIN_H
#define NIB_STANDIN_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../kernels/cpu/kernel.h"
#include "../../runtime/cuda/driver.h"

#define STANDIN_EXPORT __attribute__((visibility("default")))

/* What a host of nibble calls, and nibble does not. */
#define STANDIN_HOST_LIST(X) X(CtxCreate, 3020) X(CtxDestroy, 4000)

/* standin_Init and so on, with exactly the types that cuda.h gives them. */
#define X(name, signature) extern __typeof__(*(PFN_cu##name##_v##signature)0) standin_##name;
NIB_DRIVER_LIST(X)
NIB_DRIVER_OPTIONAL_LIST(X)
STANDIN_HOST_LIST(X)
#undef X

/* ---- One lock for all; `standin_progress` is told whenever something has been done ----------------------------- */

extern pthread_mutex_t standin_lock;
extern pthread_cond_t standin_progress;

struct capture;
struct stream;

struct thread {
  struct context *stack[16];
  int depth;
  CUstreamCaptureMode mode;
  CUresult forced;  /* what the call that is under way returns although it does its work */
  const char *call; /* its name */
  bool in_host_function;
};
extern _Thread_local struct thread standin_thread;

enum {
  CALL_FREE_STANDING = 1, /* needs neither cuInit nor a context */
  CALL_NO_CONTEXT = 2,    /* needs no current context */
  CALL_RELEASES = 4,      /* does its work even when it is made to fail: drivers report earlier errors in such calls */
  CALL_UNSAFE = 8         /* refused while a capture is open that this thread's mode does not allow it beside */
};

/* Around every call: takes the lock, counts, plays faults. When enter fails the lock is not held. */
CUresult standin_enter(const char *name, unsigned flags);
CUresult standin_leave(CUresult result);
static inline struct context *standin_current(void) {
  return standin_thread.depth > 0 ? standin_thread.stack[standin_thread.depth - 1] : NULL;
}

/* ---- Faults and the record of misuse (faults.c) ---------------------------------------------------------------- */

enum live {
  LIVE_CONTEXTS,
  LIVE_MODULES,
  LIVE_FUNCTIONS,
  LIVE_STREAMS,
  LIVE_EVENTS,
  LIVE_POOLS,
  LIVE_GRAPHS,
  LIVE_EXECS,
  LIVE_EXTERNALS,
  LIVE_CHUNKS,
  LIVE_SEMAPHORES,
  LIVE_CAPTURES,
  LIVE_ALLOCATIONS,
  LIVE_HOST,
  LIVE_RANGES,
  LIVE_MAPPED,
  LIVE_PUSHED,
  LIVE_MODES,
  LIVE_COUNT
};
extern int64_t standin_live[LIVE_COUNT]; /* under the lock */
extern const char *const standin_live_names[LIVE_COUNT];

/* Counts and logs; the name of the call is put before it. Returns `result`. */
CUresult standin_misuse(CUresult result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* What the call with this name is to return, if a rule says so. */
CUresult standin_injected(const char *name, bool is_call);
CUresult standin_result_of(const char *text);
bool standin_is_fatal(CUresult result);
int64_t standin_number(const char *variable, int64_t otherwise);
bool standin_is_forked(void);

/* ---- Handles (libcuda.c): numbers, never addresses, so that one of a destroyed object stays unknown for ever --- */

struct object {
  struct object *next;
  uint64_t id;
  enum live kind;
  struct context *context;
};

void standin_add(struct object *object, enum live kind, struct context *context);
void standin_remove(struct object *object);
void *standin_lookup(enum live kind, const void *handle); /* NULL: there is none of this kind */
/* That is a misuse, too. */
void *standin_find(enum live kind, const void *handle);
static inline void *standin_handle(const struct object *object) {
  return (void *)(uintptr_t)(0x5100000000000000u | (uint64_t)object->kind << 48 | object->id << 4);
}
int64_t standin_count_of(const struct context *context, enum live kind);

struct context {
  struct object object;
  int device, references;
  CUresult lost; /* stays until the process ends */
  struct stream *legacy;
};

void standin_lose(struct context *context, CUresult result);

/* ---- Kernels (libcuda.c) --------------------------------------------------------------------------------------- */

struct kernel {
  const char *name;
  nib_cpu_kernel *run;
  size_t bytes;
};

struct function {
  struct object object;
  struct module *module;
  struct function *next;
  const struct kernel *kernel;
  int shared_bytes;
};

/* ---- Memory (memory.c) ----------------------------------------------------------------------------------------- */

struct block {
  char *data;
  size_t bytes;
  void *base;
  enum { BLOCK_LIVE, BLOCK_FREEING, BLOCK_FREED } state;
  bool host, portable;
  bool shared; /* mapped from a file descriptor (external.c): no guards, and gone when it is freed */
  struct pool *pool;
  struct context *context;
  struct block *next; /* in quarantine */
};

/* A misuse when one of the words is an address in memory that is free. */
void standin_check_words(const char *who, const void *words, size_t bytes);
struct block *standin_block_at(const void *address);         /* NULL: there is none */
struct block *standin_block_share(void *data, size_t bytes); /* NULL: no memory */
bool standin_block_unshare(struct block *block); /* false, and a misuse: work uses it, so that it must stay mapped */
void standin_block_fill(struct block *block);
void standin_block_free(struct block *block);
void standin_check_guards(void);

/* ---- Work (stream.c) ------------------------------------------------------------------------------------------- */

/* What a stream or a node of a graph does. */
struct op {
  enum { OP_KERNEL, OP_COPY, OP_HOST } kind;
  const struct kernel *kernel;
  void *data; /* own: a kernel's parameters, a copy's staged source */
  size_t bytes;
  void *to;
  const void *from;
  CUhostFn host;
  void *user;
};

struct node {
  struct op op;
  int *deps;
  int dep_count;
};

/* The nodes of a graph. Not changed after the capture, shared by graphs, executables and queued launches. */
struct plan {
  int references;
  struct node *nodes;
  int count, capacity;
};

struct event {
  struct object object;
  unsigned flags;
  int references;
  bool destroyed;
  uint64_t recorded, completed; /* generations */
  int64_t time_ns;
  uint64_t capture_id; /* of the capture that it was recorded in last; 0: none */
  int *deps;
  int dep_count;
};

struct exec {
  struct object object;
  struct plan *plan;
  int references;
  bool destroyed;
  uint64_t launched, finished;
};

struct task {
  struct task *next;
  enum { TASK_OP, TASK_RECORD, TASK_WAIT, TASK_FILL, TASK_FREE, TASK_GRAPH, TASK_AWAIT, TASK_SIGNAL } kind;
  struct op op;
  struct event *event;
  struct semaphore *semaphore;
  uint64_t number; /* of the event's generation or the executable's launch; the semaphore's value */
  struct block *block;
  struct plan *plan;
  struct exec *exec;
  int *scratch; /* of a walk over the plan: two for each node */
};

struct stream {
  struct object object;
  struct stream *next; /* all of them, until their thread ends */
  unsigned flags;
  int priority;
  bool quit, ended, awaited;
  pthread_t thread;
  pthread_cond_t work;
  struct task *head, *tail;
  uint64_t submitted, completed;
  const struct op *running;
  struct capture *capture;
  int *deps; /* of its next node */
  int dep_count;
};
extern struct stream *standin_streams;

/* NULL and a misuse: no such stream. The legacy stream is a misuse that works. */
struct stream *standin_stream(CUstream handle);
struct stream *standin_stream_new(struct context *context, unsigned flags, int priority);
/* Takes the op (its data too, also on failure) to the stream or, when it captures, to the graph. */
CUresult standin_submit(struct stream *stream, struct op *op);
CUresult standin_enqueue(struct stream *stream, const struct task *task);
CUresult standin_wait_idle(struct stream *stream);
void standin_run_op(struct stream *stream, const struct op *op);
/* Whether kernels' parameters are searched for addresses: not under valgrind (NIBBLE_VALGRIND), as their padding has no
 * value. */
bool standin_reads_params(void);
bool standin_uses(const struct op *op, const void *data, size_t bytes);
/* Whether work that is queued or runs uses this memory. */
bool standin_is_in_use(const void *data, size_t bytes);
void standin_op_free(struct op *op);
/* Frees what streams are done with. */
void standin_sweep(void);
void standin_event_release(struct event *event);

/* ---- Semaphores of other APIs (external.c): a counter in a memory file's first bytes --------------------------- */

struct semaphore {
  struct object object;
  int references;  /* the handle's and tasks' */
  uint64_t *value; /* mapped, atomic */
};

void standin_semaphore_release(struct semaphore *semaphore);
bool standin_semaphore_reached(const struct semaphore *semaphore, uint64_t value);
void standin_semaphore_signal(struct semaphore *semaphore, uint64_t value);

/* ---- Captures and graphs (capture.c) --------------------------------------------------------------------------- */

struct capture {
  struct capture *next;
  uint64_t id;
  CUstreamCaptureMode mode;
  const struct thread *thread;
  struct stream *origin;
  struct plan *plan;
  bool invalid;
};

/* CUDA_SUCCESS, or the refusal, after which the captures in question are invalid. */
CUresult standin_check_unsafe(void);
CUresult standin_capture_op(struct stream *stream, struct op *op);
CUresult standin_capture_record(struct stream *stream, struct event *event);
/* *handled: the wait was a matter of captures. */
CUresult standin_capture_wait(struct stream *stream, struct event *event, bool *handled);
/* For what a stream cannot do while it captures. */
CUresult standin_refuse_event(struct event *event); /* of a capture: the capture is invalid then */
CUresult standin_refuse_captured(struct stream *stream);
void standin_plan_release(struct plan *plan);
void standin_exec_release(struct exec *exec);
void standin_run_plan(struct stream *stream, const struct plan *plan, uint64_t launch, int *scratch);

/* ---- For the program ------------------------------------------------------------------------------------------- */

/* Adds a rule as NIB_STANDIN_FAIL has them; `count` begins now; negative: from the -count-th call on. name NULL: no
 * rules any more. */
STANDIN_EXPORT void nib_standin_fail(const char *name, int64_t count, int result);
STANDIN_EXPORT int64_t nib_standin_fired(void);      /* results of rules so far */
STANDIN_EXPORT const char *nib_standin_failed(void); /* the call that a rule made to fail last, "" if there was none */
STANDIN_EXPORT int64_t nib_standin_calls(void);      /* calls so far */
STANDIN_EXPORT int64_t nib_standin_misuses(void);    /* misuses so far */
STANDIN_EXPORT const char *nib_standin_misuse(void); /* the last one, "" if there was none */
/* How many there are: "contexts" (retained), "modules", "functions", "streams", "events", "pools", "graphs", "execs",
 * "captures", "externals" and "semaphores" (imported), "chunks" (memory that can be exported, or was), "ranges"
 * (reserved addresses), "mapped" (blocks of imported and exportable memory), "allocations", "host" (blocks of pinned
 * memory), "pushed" (contexts on threads' stacks), "modes" (threads whose capture mode is not the default). Frees that
 * are queued are waited for. -1: no such kind. */
STANDIN_EXPORT int64_t nib_standin_live(const char *kind);

#endif
