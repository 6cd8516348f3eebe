/* What the files of the runtime share. Nothing here is visible to hosts. */
#ifndef NIB_INTERNAL_H
#define NIB_INTERNAL_H

#include <pthread.h>

#include "nibble_tools.h"
#include "sized.h"
#include "../kernels/params.h"

#define NIB_DTYPE_COUNT (NIB_INT64 + 1) /* not in nibble.h: it grows */

struct nib_backend;

/* Until which ticket of a stream something is read or written; 0: never. Streams are recycled but never freed before
 * their runtime, and tickets only grow, so that an old entry always stays true. */
struct nib_use {
  nib_stream *stream;
  uint64_t read, write;
};

/* The ticket behind which the stream does no more with it (or writes it no more); 0: it never did. */
static inline uint64_t nib_use_ticket(const struct nib_use *use, bool writes_only) {
  return writes_only || use->write > use->read ? use->write : use->read;
}

struct nib_uses {
  struct nib_use *items;
  int32_t count, capacity;
};

/* What became of an object that was to be destroyed: in pieces of less than a millisecond. */
enum nib_end {
  NIB_GONE,
  NIB_MORE, /* a piece is gone: destroy it again */
  NIB_LATER /* when its uses are done */
};

/* The head of what queued work can still need after its last reference is gone: storages, events, graph plans. */
struct nib_deferred {
  nib_device *device;
  struct nib_deferred *next; /* in the device's limbo */
  struct nib_uses uses;
  enum nib_end (*destroy)(struct nib_deferred *self);
};

struct nib_storage {
  struct nib_deferred deferred;
  struct nib_storage *next, *previous; /* all storages of the device that hold memory */
  void *data;
  size_t bytes, counted; /* counted: as memory of the device's; 0 for what was not allocated here */
  uint64_t id;
  int32_t references, pins; /* pins: references that are graphs' */
  int32_t exports;          /* references that are other frameworks' */
  bool read_only;
  bool leaving;                /* a thread of the runtime's gives its memory back */
  nib_device *pinned_by;       /* of the CPU's: the GPU whose driver gave the memory; NULL: ordinary */
  void *shared;                /* the device's, of memory that others reach by a file descriptor; NULL: ordinary */
  bool owner;                  /* somebody else's memory, who is told by */
  void (*release)(void *user); /* (NULL: is not told) */
  void *user;
};

/* Where a storage's memory comes from: all zero, the device's allocator. */
struct nib_origin {
  size_t bytes;
  nib_device *pinned_by;
  bool exportable;
  bool adopted; /* it is there already: of a file descriptor (shared), or the host's */
  void *data, *shared;
  bool read_only;
  void (*release)(void *user);
  void *user;
};

struct nib_tensor {
  struct nib_storage *storage;
  nib_dtype dtype;
  int32_t ndim;
  int64_t offset_bytes;
  int64_t shape[NIB_MAX_NDIM], stride[NIB_MAX_NDIM];
};

/* Bytes of operands that a stream's work up to a ticket has, beyond the load before it. */
#define NIB_LOADS 32
struct nib_load {
  uint64_t ticket, bytes;
};

struct nib_stream {
  nib_device *device;
  nib_stream *next; /* all streams of the device */
  uint64_t id;
  uint64_t submitted;               /* ticket of the last work */
  uint64_t marked;                  /* what it was at nib_mark_work */
  uint64_t dropped;                 /* ticket of the first work that nib_drop_work has dropped; 0: none */
  struct nib_load loads[NIB_LOADS]; /* that were not done when last looked at, where the config has a limit */
  int32_t load_count;
  int32_t priority;
  bool released; /* free to be handed out again once its work is done */
  bool wrapped;  /* around a handle of the host's, which is the host's alone again after the release */
  void *impl;    /* the device's */
  /* While capturing: the nodes that the next one depends on. */
  struct nib_capture *capture;
  int32_t *frontier;
  int32_t frontier_count, frontier_capacity;
};

struct nib_semaphore {
  struct nib_deferred deferred;
  void *impl; /* the device's */
};

struct nib_event {
  struct nib_deferred deferred;
  nib_stream *stream;
  uint64_t stream_id; /* another stream may have its place by now */
  uint64_t id;
  uint64_t ticket;
  int64_t time_ns;     /* written by the device when the work before the event is done */
  void *impl;          /* the device's */
  uint64_t capture_id; /* of the capture that it belongs to; 0: none */
  int32_t *frontier;
  int32_t frontier_count;
};

struct nib_node {
  enum nib_kernel kernel; /* or as in nib_work */
  nib_module *module;     /* of a user's kernel, kept alive */
  const char *name;       /* a literal, or the plan's copy of the user's */
  uint32_t bytes;
  void *params; /* these and `deps` are in the plan's chunks */
  int32_t *deps;
  int32_t dep_count;
};

struct nib_pin {
  struct nib_storage *storage;
  bool write;
};

/* A piece of memory that nodes take theirs from, so that many are given back at once. */
struct nib_chunk {
  _Alignas(16) struct nib_chunk *next;
  size_t bytes, used; /* of what follows */
};

/* What a capture recorded. Immutable once instantiated, so that queued replays are untouched by an update. */
struct nib_plan {
  struct nib_deferred deferred;
  struct nib_node *nodes;
  int32_t node_count, node_capacity;
  struct nib_chunk *chunks; /* newest first */
  struct nib_pin *pins;
  int32_t pin_count, pin_capacity;
  unsigned char *marks; /* scratch of a walk over the nodes */
  int32_t mark_capacity;
  uint64_t operand_bytes;
  int32_t *order; /* the CPU device's order of execution */
  void *impl;     /* the device's */
};

struct nib_capture {
  uint64_t id;
  nib_stream *origin;
  struct nib_plan *plan;
};

struct nib_graph {
  nib_device *device;
  struct nib_plan *plan;
  uint64_t id;
};

struct nib_device {
  nib_runtime *runtime;
  const struct nib_backend *backend;
  void *impl;
  nib_device_info info;
  nib_stream *default_stream, *streams;
  nib_stream *fetches;         /* where tensors that are not compact are packed to be read; NULL: none yet */
  struct nib_capture *capture; /* the open one */
  struct nib_storage *storages;
  nib_module *modules;
  struct nib_deferred *limbo; /* gone, but still used by queued work */
  struct nib_deferred *seen;  /* the same, looked at since limbo was last empty */
  struct nib_fault *fault;    /* in memory that kernels reach */
  uint64_t queued_bytes;      /* of all streams' loads */
  nib_memory_info memory;
};

#define NIB_MAX_DEVICES 17 /* the CPU and 16 GPUs */

struct nib_ranges {
  bool searched;
  int (*push)(const char *name);
  int (*pop)(void);
};

struct nib_runtime {
  nib_config config;
  nib_device devices[NIB_MAX_DEVICES];
  int32_t device_count;
  int32_t process;                  /* the one that created it */
  const volatile char *own_process; /* 1 in that process, 0 in a child; NULL: ask for the id */
  bool ending, closed;              /* ending: nothing new goes to the runtime's threads */
  bool host_allocates;              /* the config's allocate is the host's */
  bool freed_large;                 /* by it, which may have taken long; since somebody asked */
  nib_stream *frees;                /* where large blocks are given back; NULL: none yet */
  int64_t handles;                  /* atomic; objects that hosts hold, and exports */
  pthread_mutex_t exports_lock;     /* recursive; of what exports touch on foreign threads: */
  int32_t exports_depth;
  struct nib_export *returned;                       /* those that came back; atomic */
  struct nib_storage *gone;                          /* whose owners are told when the lock is free */
  int64_t lingering;                                 /* storages that keep devices open beyond the runtime's end */
  int64_t deadline_us;                               /* atomic; of nib_now_us; NIB_UNLIMITED: none */
  uint64_t last_stream_id, last_capture_id, last_id; /* last_id: of storages, events and graphs */
  void (*observe)(void *user, const nib_observation *observation);
  void *observe_user;
  int64_t entered_ns; /* when the last function was entered, for the observer */
  struct nib_ranges ranges;
  char error[1024];
};

/* Bytes for the copy engine of a GPU to move, between it and pinned memory, or from another GPU. */
struct nib_transfer {
  void *destination;
  const void *source;
  size_t bytes;
  nib_device *from; /* the other GPU, or NULL */
};

/* A kernel to run: one of ours, whose launch the device works out from the params, or a user's; or a transfer. */
#define NIB_WORK_USER_KERNEL NIB_KERNEL_COUNT
#define NIB_WORK_TRANSFER    ((enum nib_kernel)(NIB_KERNEL_COUNT + 1)) /* params: struct nib_transfer */
struct nib_work {
  const char *name;
  enum nib_kernel kernel;
  const void *params;
  size_t bytes;
  nib_module *module;
  void *function;
  uint32_t grid[3], block[3], shared_bytes;
};

/* Where a user kernel's parameters lie in its argument buffer; count -1: the driver cannot tell. */
struct nib_params_layout {
  int32_t count;
  size_t bytes[NIB_MAX_ARGUMENTS], offset[NIB_MAX_ARGUMENTS];
};

/* ---- runtime.c ---- */
extern const char *const nib_operation_names[NIB_OPERATION_COUNT];
void *nib_allocate(nib_runtime *rt, size_t bytes);
void *nib_allocate_zero(nib_runtime *rt, size_t bytes);
void *nib_reallocate(nib_runtime *rt, void *pointer, size_t old_bytes, size_t new_bytes);
void nib_free(nib_runtime *rt, void *pointer, size_t bytes);
/* Sets the message and returns the status. */
nib_status nib_fail(nib_runtime *rt, nib_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* A message for people, where the host wants any. */
void nib_log(nib_runtime *rt, nib_log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));
nib_status nib_fail_memory(nib_runtime *rt, const char *what, size_t bytes);
/* At the top of every public function that does something: closed and forked runtimes are refused. */
nib_status nib_enter(nib_runtime *rt);
bool nib_is_forked(const nib_runtime *rt);
void nib_handle_added(nib_runtime *rt);
void nib_handle_removed(nib_runtime *rt); /* may free the runtime */
/* After the runtime's end exports and handles may come back on several threads at once. */
void nib_exports_lock(nib_runtime *rt);
void nib_exports_unlock(nib_runtime *rt);
void nib_runtime_lets_go(struct nib_storage *storage); /* of one that was exported beyond its end, with the lock */
nib_status nib_device_open(nib_device *device);        /* before the first use; OK at once afterwards */
/* Refuses a wait or a host access while a stream of the device captures. */
nib_status nib_check_not_capturing(nib_device *device, const char *operation);
int64_t nib_now_us(void);
int64_t nib_now_ns(void); /* the same clock */
/* What is left until `timeout_us` after `start_us`, 0 or more; NIB_UNLIMITED stays. */
int64_t nib_time_left(int64_t start_us, int64_t timeout_us);
/* What is left until the host's deadline, 0 or more (NIB_UNLIMITED: there is none), whether it has passed, and the
 * error for whoever gives up. */
int64_t nib_time_to_deadline(const nib_runtime *rt);
bool nib_is_late(const nib_runtime *rt);
nib_status nib_fail_late(nib_runtime *rt, const char *operation);
/* An error of a stream (`only` that one, by its number, or 0: any), or a content fault, that nobody has been told of:
 * as an error, once. */
nib_status nib_take_trouble(nib_device *device, uint64_t only);
/* A host's descriptor (sized.h) as `own`. */
#define NIB_READ_DESC(rt, operation, type, own, given, bytes) \
  nib_read_desc(rt, operation, own, sizeof(type), type##_least, given, bytes)
nib_status nib_read_desc(nib_runtime *rt, const char *operation, void *own, size_t own_bytes, size_t least,
                         const void *given, size_t bytes);

/* ---- deferred.c ---- */
bool nib_uses_idle(struct nib_uses *uses); /* drops finished entries */
nib_status nib_uses_reserve(nib_runtime *rt, struct nib_uses *uses);
void nib_uses_add(struct nib_uses *uses, nib_stream *stream, uint64_t ticket, bool write); /* after a reserve */
void nib_uses_free(nib_runtime *rt, struct nib_uses *uses);
void nib_defer(struct nib_deferred *object);            /* destroys it now or when its uses are done */
void nib_reap(nib_device *device, int64_t deadline_us); /* destroys a piece that is done, and others until then */
void nib_reap_in_time(nib_device *device);              /* until the host's deadline */
/* Gives a block back, when it is large on a thread of the runtime's own if that can be: `uses` (may be NULL) has its
 * ticket then. */
void nib_free_large(nib_runtime *rt, void *block, size_t bytes, struct nib_uses *uses);
void nib_drain(nib_device *device); /* waits (until the deadline) for what uses the limbo's objects, then reaps */

/* ---- storage.c ---- */
nib_status nib_storage_create(nib_device *device, const struct nib_origin *origin, struct nib_storage **out);
void nib_storage_retain(struct nib_storage *storage);
void nib_storage_release(struct nib_storage *storage);
bool nib_storage_free(struct nib_storage *storage); /* its memory alone; false: not yet */
void nib_storages_tell(struct nib_storage *gone);   /* their owners, and frees them */
/* A tensor on memory of somebody else's. pinned_by: as in a storage. */
nib_status nib_wrap(nib_device *device, nib_device *pinned_by, const char *operation, const nib_wrap_desc *desc,
                    nib_tensor **out);
/* Refuses devices that share nothing by file descriptor, and empties *out. */
nib_status nib_check_fds(nib_device *device, const char *operation, void *out);

/* ---- dlpack.c ---- */
void nib_exports_take_back(nib_runtime *rt); /* those that came back on other threads */

/* ---- tensor.c ---- */
/* A tensor of checked shape and strides (NULL: compact) on a storage of its own. */
nib_status nib_tensor_on(nib_device *device, const struct nib_origin *origin, nib_dtype dtype, int32_t ndim,
                         const int64_t *shape, const int64_t *stride, nib_tensor **out);
/* Whether the sizes' product in bytes stays below 2^62 (a size of 0 counts as 1). */
bool nib_shape_fits(size_t item, int32_t ndim, const int64_t *shape);
/* Sizes that are not negative and whose product in bytes stays below 2^62, whatever order they are multiplied in. */
nib_status nib_check_dtype(nib_runtime *rt, const char *operation, nib_dtype dtype);
nib_status nib_check_shape(nib_runtime *rt, const char *operation, const char *name, nib_dtype dtype, int32_t ndim,
                           const int64_t *shape);
/* A GPU that is in use already, otherwise the first that can be; NULL: there is none. */
nib_device *nib_find_pinning(nib_runtime *rt);
/* Writes "float32 {2, 3}" for messages; returns text. */
const char *nib_describe(const nib_tensor *tensor, char *text, size_t size);
#define NIB_DESCRIPTION 160
int64_t nib_shape_numel(int32_t ndim, const int64_t *shape);
bool nib_tensor_overlaps_itself(const nib_tensor *tensor);
bool nib_tensor_overlaps(const nib_tensor *a, const nib_tensor *b);

static inline nib_runtime *nib_tensor_runtime(const nib_tensor *t) { return t->storage->deferred.device->runtime; }
static inline nib_device *nib_tensor_dev(const nib_tensor *t) { return t->storage->deferred.device; }

/* ---- stream.c ---- */
/* Queues a kernel on the stream, or records it when the stream captures. `operation` is for messages. */
nib_status nib_launch(nib_stream *stream, const char *operation, enum nib_kernel kernel, const void *params,
                      size_t bytes, const nib_access *accesses, int32_t access_count);
nib_status nib_submit(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count);
/* Refuses streams that cannot take work now: another capture is open on their device and they have not joined it. */
nib_status nib_check_stream(nib_stream *stream, const char *operation);
/* Refuses to write somebody else's memory that is only to be read. */
nib_status nib_check_writable(const char *operation, const char *parameter, const nib_tensor *tensor);
nib_status nib_stream_open_default(nib_device *device);
nib_status nib_stream_open_own(nib_device *device,
                               nib_stream **out); /* the runtime's: without a number, nobody waits for it */
/* Waits until the stream has come to the ticket. */
nib_status nib_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us);
/* Waits for what writes (or for all), on any device. Refused while one of those that still do captures. */
nib_status nib_uses_wait(nib_device *device, struct nib_uses *uses, bool writes_only, int64_t timeout_us);
/* Waits for the CPU's work on pinned memory, and for no GPU's. */
nib_status nib_wait_for_cpu(struct nib_storage *storage, bool writes_only, int64_t timeout_us);

/* ---- queued.c ---- */
uint64_t nib_operand_bytes(uint64_t before, const nib_access *accesses,
                           int32_t access_count); /* added to those before */
/* Where the config limits what is queued: waits (until the deadline) for room for work of so many bytes, and counts
 * it. */
nib_status nib_queued_wait(nib_device *device, const char *operation, uint64_t bytes);
void nib_queued_add(nib_stream *stream, uint64_t bytes);

/* ---- observe.c ---- */
/* Tells the observer, if there is one. */
void nib_tell(nib_runtime *rt, const nib_observation *observation) __attribute__((cold));
void nib_tell_work(nib_stream *stream, const char *operation, const struct nib_work *work, const nib_access *accesses,
                   int32_t access_count, int32_t node) __attribute__((cold));
/* `stream` comes after what `other` has queued so far, without an event that anybody sees. */
void nib_tell_follow(nib_stream *stream, nib_stream *other);
void nib_tell_host(const char *operation, const nib_tensor *tensor, bool write);
#define NIB_TELL(rt, ...)                                                           \
  do {                                                                              \
    if ((rt)->observe) nib_tell(rt, &(nib_observation){ __VA_ARGS__, .node = -1 }); \
  } while (0)

/* ---- data.c ---- */
nib_status nib_check_device(const char *operation, const char *name, const nib_tensor *tensor,
                            const nib_stream *stream);
nib_status nib_fetch(nib_tensor *tensor, void *data,
                     size_t bytes); /* the elements, row-major, once their writers are done */

/* A tensor's elements, row-major, in pieces that are views: between two there is time to look at the clock. */
struct nib_pieces {
  const nib_tensor *whole;
  nib_tensor view; /* of `count` elements from element `at` on; no handle */
  int64_t at, count;
  int64_t numel, inner, step; /* a piece is `step` of dimension `dim`, each of `inner` elements */
  int32_t dim;                /* -1: the whole is one piece */
};
struct nib_pieces nib_pieces_of(const nib_tensor *tensor, int64_t most); /* elements in a piece */
bool nib_next_piece(struct nib_pieces *pieces);
#define NIB_PIECE 16384 /* elements that the host copies or compares in much less than a millisecond */

/* ---- module.c ---- */
void nib_module_retain(nib_module *module);
void nib_modules_close(nib_device *device); /* unloads what hosts still hold: they can do no more than release it */
struct nib_uses *nib_module_uses(nib_module *module);

/* ---- file.c ---- */
/* A regular file to read, and its size. */
nib_status nib_file_open(nib_runtime *rt, const char *operation, const char *path, int *file, uint64_t *bytes);
/* All of the bytes, in pieces between which the deadline is seen. */
nib_status nib_file_read(nib_runtime *rt, const char *operation, const char *path, int file, void *data, size_t bytes,
                         uint64_t offset);
void nib_file_close(int file); /* -1 is allowed */
/* nib_writer_create, _write and _close for other operations. `end` frees the writer. */
nib_status nib_writer_open(nib_runtime *rt, const char *operation, const char *path, nib_writer **out);
nib_status nib_writer_put(nib_writer *writer, const void *data, size_t bytes);
nib_status nib_writer_end(nib_writer *writer, bool keep);

/* ---- npy.c ---- */
void nib_round_f64(unsigned char *data, size_t count); /* float64 to float32, in place: the result is half as long */

/* ---- graph.c ---- */
nib_status nib_record(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count);
/* The stream's next node waits for `nodes` too, for which room was reserved. Nodes that others wait for already are
 * left out, so that the graph shows each dependency once. */
nib_status nib_frontier_reserve(nib_stream *stream, int32_t count);
void nib_frontier_join(nib_stream *stream, const int32_t *nodes, int32_t count);
void nib_capture_close(nib_device *device); /* ends an open capture without a result */
extern const char *const nib_kernel_names[NIB_KERNEL_COUNT];

#endif
