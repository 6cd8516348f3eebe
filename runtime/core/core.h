/* The core: a runtime and its devices, storages and the end of their memory, streams, events, captures and graphs. All
 * other folders use it; it uses none of them, and calls the devices only through backend.h. This header is for the
 * other folders. It is one header, since nearly each of their files uses a tensor with its storage, device and runtime,
 * and functions of several sections. The devices also use graph.h; own.h is for the core alone. */
#ifndef NIB_CORE_H
#define NIB_CORE_H

#include <pthread.h>

#include "../../kernels/params.h"
#include "../backend.h"
#include "../nibble_tools.h"
#include "../sized.h"

#define NIB_DTYPE_COUNT NIB_TYPE_COUNT /* not in nibble.h: it grows */

/* ---- Objects that queued work uses ------------------------------------------------------------------------------- */

/* The last tickets of a stream that read and that write an object; 0: none (storage.c explains uses). */
struct nib_use {
  nib_stream *stream;
  uint64_t read, write;
};

/* The last ticket that uses the object or, with writes_only, that writes it; 0: none. */
static inline uint64_t nib_use_ticket(const struct nib_use *use, bool writes_only) {
  return writes_only || use->write > use->read ? use->write : use->read;
}

struct nib_uses {
  struct nib_use *items;
  int32_t count, capacity;
};

/* The result of `destroy`. Large objects are destroyed in pieces that take less than a millisecond. */
enum nib_end {
  NIB_GONE,
  NIB_MORE, /* a piece is gone; call `destroy` again */
  NIB_LATER /* nothing is gone, since its uses are not done */
};

/* The head of all objects that queued work can use after their last reference is gone: storages, events, plans of
 * graphs, modules, semaphores (storage.c explains this). */
struct nib_deferred {
  nib_device *device;
  struct nib_deferred *next; /* in the device's limbo */
  struct nib_uses uses;
  enum nib_end (*destroy)(struct nib_deferred *self);
};

/* ---- Storages and tensors ---------------------------------------------------------------------------------------- */

struct nib_storage {
  struct nib_deferred deferred;
  struct nib_storage *next, *previous; /* all storages of the device that hold memory */
  void *data;
  size_t bytes, counted; /* counted: bytes in the device's memory info; 0 if the memory was not allocated here */
  uint64_t id;
  int32_t references, pins; /* pins: references of graphs */
  int32_t exports;          /* references of other frameworks */
  bool read_only;
  bool leaving;                /* one of the runtime's threads is freeing its memory */
  nib_device *pinned_by;       /* the GPU whose driver allocated this host memory; NULL for ordinary memory */
  void *shared;                /* the device's object for memory shared by file descriptor; NULL for ordinary memory */
  bool foreign;                /* the memory belongs to the host or another library */
  void (*release)(void *user); /* called when a foreign storage is gone; may be NULL */
  void *user;
};

/* Where the memory of a new storage comes from. All zero: from the device's allocator. */
struct nib_origin {
  size_t bytes;
  nib_device *pinned_by;
  bool exportable;
  bool adopted; /* the memory exists already: it was imported by file descriptor (`shared`), or is the host's */
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

/* ---- Streams, modules, events ------------------------------------------------------------------------------------ */

/* The bytes of the operands of a stream's work, from the previous load up to a ticket. */
#define NIB_LOADS 32
struct nib_load {
  uint64_t ticket, bytes;
};

struct nib_stream {
  nib_device *device;
  nib_stream *next; /* all streams of the device */
  uint64_t id;
  uint64_t submitted;               /* ticket of the last work */
  uint64_t marked;                  /* `submitted` at the last nib_mark_work */
  uint64_t dropped;                 /* ticket of the first work that nib_drop_work dropped; 0: none */
  struct nib_load loads[NIB_LOADS]; /* those not known to be done; kept only if the config limits queued bytes */
  int32_t load_count;
  int32_t priority;
  bool released; /* can be reused when its work is done */
  bool wrapped;  /* wraps a handle of the host, which is not used any more after the release */
  void *impl;    /* the device's data */
  /* While capturing: the nodes that the next one depends on. */
  struct nib_capture *capture;
  int32_t *frontier;
  int32_t frontier_count, frontier_capacity;
};

/* A loaded module of device code. Launches of its kernels are its uses. */
struct nib_module {
  struct nib_deferred deferred;
  nib_module *next, *previous; /* all modules of the device */
  int32_t references;          /* handles, kernels and graph nodes */
  void *impl;                  /* the device's data; NULL after its runtime is closed */
};

struct nib_event {
  struct nib_deferred deferred;
  nib_stream *stream;
  uint64_t stream_id; /* `stream` may have been reused since, with another id */
  uint64_t id;
  uint64_t ticket;
  int64_t time_ns;     /* the device writes it when the work before the event is done */
  void *impl;          /* the device's */
  uint64_t capture_id; /* of the capture that it belongs to; 0: none */
  int32_t *frontier;
  int32_t frontier_count;
};

/* ---- Devices and runtimes ---------------------------------------------------------------------------------------- */

struct nib_device {
  nib_runtime *runtime;
  const struct nib_backend *backend;
  void *impl;
  nib_device_info info;
  nib_stream *default_stream, *streams;
  nib_stream *fetches;         /* packs tensors that are not contiguous, for reads; NULL: not used yet */
  struct nib_capture *capture; /* the open one */
  struct nib_storage *storages;
  nib_module *modules;
  struct nib_deferred *limbo; /* objects without references that queued work still uses */
  struct nib_deferred *seen;  /* those of limbo that were checked since it was last empty */
  struct nib_fault *fault;    /* in memory that kernels can write */
  uint64_t queued_bytes;      /* of all streams' loads */
  nib_memory_info memory;
};

#define NIB_MAX_DEVICES 17 /* the CPU and 16 GPUs */

struct nib_ranges {
  bool searched;
  int (*push)(const char *name);
  int (*pop)(void);
};

/* An export that was released on another thread. The thread that uses the runtime calls `take`. */
struct nib_return {
  struct nib_return *next;
  void (*take)(nib_runtime *rt, struct nib_return *self);
};

struct nib_runtime {
  nib_config config;
  nib_device devices[NIB_MAX_DEVICES];
  int32_t device_count;
  int32_t process;                  /* the one that created it */
  const volatile char *own_process; /* 1 in that process, 0 in a child (life.c); NULL: use getpid */
  bool ending, closed;              /* ending: nothing more is queued for the runtime's threads */
  bool host_allocates;              /* the host gave an allocator */
  bool freed_large;                 /* the host's thread freed a large block, which may have taken long */
  nib_stream *frees;                /* frees large blocks; NULL: not used yet */
  int64_t handles;                  /* atomic; objects that hosts hold, and exports */
  pthread_mutex_t exports_lock;     /* recursive; for what releasing an export on another thread uses */
  int32_t exports_depth;
  struct nib_return *returned;                       /* exports that were released on other threads; atomic */
  struct nib_storage *gone;                          /* storages to release once the lock is free */
  int64_t lingering;                                 /* storages that keep devices open after the runtime is closed */
  int64_t deadline_us;                               /* atomic; on the clock of nib_now_us; NIB_UNLIMITED: none */
  uint64_t last_stream_id, last_capture_id, last_id; /* last_id: of storages, events and graphs */
  void (*observe)(void *user, const nib_observation *observation);
  void *observe_user;
  int64_t entered_ns; /* when the last function was entered, for the observer */
  struct nib_ranges ranges;
  char error[1024];
};

static inline nib_runtime *nib_tensor_runtime(const nib_tensor *t) { return t->storage->deferred.device->runtime; }

/* ---- Functions --------------------------------------------------------------------------------------------------- */

/* ---- memory.c ---- */
void *nib_allocate(nib_runtime *rt, size_t bytes);
void *nib_allocate_zero(nib_runtime *rt, size_t bytes);
void *nib_reallocate(nib_runtime *rt, void *pointer, size_t old_bytes, size_t new_bytes);
void nib_free(nib_runtime *rt, void *pointer, size_t bytes);

/* ---- error.c ---- */
extern const char *const nib_operation_names[NIB_OPERATION_COUNT];
extern const char *const nib_kernel_names[NIB_KERNEL_COUNT];
/* Sets the message and returns the status. */
nib_status nib_fail(nib_runtime *rt, nib_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
nib_status nib_fail_memory(nib_runtime *rt, const char *what, size_t bytes);
/* Calls the host's log function, if there is one. */
void nib_log(nib_runtime *rt, nib_log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Copies a struct of the host to `own`, as sized.h explains. */
#define NIB_READ_DESC(rt, operation, type, own, given, bytes) \
  nib_read_desc(rt, operation, own, sizeof(type), type##_least, given, bytes)
nib_status nib_read_desc(nib_runtime *rt, const char *operation, void *own, size_t own_bytes, size_t least,
                         const void *given, size_t bytes);

/* ---- time.c ---- */
int64_t nib_now_us(void);
/* The time until the host's deadline, 0 or more; NIB_UNLIMITED without a deadline. */
int64_t nib_time_to_deadline(const nib_runtime *rt);
bool nib_is_late(const nib_runtime *rt); /* whether the deadline has passed */
nib_status nib_fail_late(nib_runtime *rt, const char *operation);

/* ---- dtype.c ---- */
nib_status nib_check_dtype(nib_runtime *rt, const char *operation, nib_dtype dtype);
int64_t nib_shape_numel(int32_t ndim, const int64_t *shape);
/* Whether the product of the sizes, in bytes, stays below 2^62 (a size of 0 counts as 1). */
bool nib_shape_fits(size_t item, int32_t ndim, const int64_t *shape);
/* Refuses negative sizes, and shapes for which nib_shape_fits is false. */
nib_status nib_check_shape(nib_runtime *rt, const char *operation, const char *name, nib_dtype dtype, int32_t ndim,
                           const int64_t *shape);
#define NIB_DESCRIPTION 160
void nib_write_sizes(int32_t ndim, const int64_t *sizes, char *text, size_t size); /* "{2, 3}" */
/* Writes "float32 {2, 3}" for messages; returns text. */
const char *nib_describe(const nib_tensor *tensor, char *text, size_t size);

/* ---- element.c ---- */
/* The range of an integer dtype; returns false for floats. */
bool nib_integer_range(nib_dtype dtype, int64_t *low, int64_t *high);

/* ---- tell.c ---- */
/* Tells the observer, if there is one. */
void nib_tell(nib_runtime *rt, const nib_observation *observation) __attribute__((cold));
/* Tells the observer that `stream` waits for the work that `other` has queued so far, as if by an event. */
void nib_tell_follow(nib_stream *stream, nib_stream *other);
void nib_tell_host(const char *operation, const nib_tensor *tensor, bool write);
#define NIB_TELL(rt, ...)                                                           \
  do {                                                                              \
    if ((rt)->observe) nib_tell(rt, &(nib_observation){ __VA_ARGS__, .node = -1 }); \
  } while (0)

/* ---- life.c ---- */
bool nib_is_forked(const nib_runtime *rt);
/* Refuses closed and forked runtimes. Every public function that does something calls it first. */
nib_status nib_enter(nib_runtime *rt);
void nib_handle_added(nib_runtime *rt);
void nib_handle_removed(nib_runtime *rt); /* may free the runtime */

/* ---- uses.c ---- */
bool nib_uses_idle(struct nib_uses *uses); /* whether all are done; drops finished entries */
nib_status nib_uses_reserve(nib_runtime *rt, struct nib_uses *uses);
void nib_uses_add(struct nib_uses *uses, nib_stream *stream, uint64_t ticket,
                  bool write); /* call nib_uses_reserve first */
void nib_uses_free(nib_runtime *rt, struct nib_uses *uses);

/* ---- wait.c ---- */
/* Refuses a wait or a host access while a stream of the device captures. */
nib_status nib_check_not_capturing(nib_device *device, const char *operation);
/* Waits for the uses on all devices, or for those that write. Refused while one of these devices captures. */
nib_status nib_uses_wait(nib_device *device, struct nib_uses *uses, bool writes_only, int64_t timeout_us);
/* Waits for the work of the CPU device on pinned memory, not for that of GPUs. */
nib_status nib_wait_for_cpu(struct nib_storage *storage, bool writes_only, int64_t timeout_us);
/* Returns the error of a stream or a content fault, each once. `only` is a stream's id, or 0 for any stream. */
nib_status nib_take_trouble(nib_device *device, uint64_t only);

/* ---- stream.c ---- */
nib_status nib_device_open(nib_device *device); /* does nothing if it is open */
/* Opens a stream for the runtime's own work. Its id is 0, and no synchronize waits for it. */
nib_status nib_stream_open_own(nib_device *device, nib_stream **out);
/* Refuses released streams, and streams that have not joined an open capture on their device. */
nib_status nib_check_stream(nib_stream *stream, const char *operation);

/* ---- deferred.c ---- */
void nib_defer(struct nib_deferred *object); /* destroys it now, or when its uses are done */
/* Frees a block. A large one is freed on one of the runtime's threads, if possible; `uses` (may be NULL) then gets the
 * ticket of that work. */
void nib_free_large(nib_runtime *rt, void *block, size_t bytes, struct nib_uses *uses);

/* ---- storage.c ---- */
nib_status nib_storage_create(nib_device *device, const struct nib_origin *origin, struct nib_storage **out);
void nib_storage_retain(struct nib_storage *storage);
void nib_storage_release(struct nib_storage *storage);
/* After the runtime is closed, several threads may release exports and handles at once. */
void nib_exports_lock(nib_runtime *rt);
void nib_exports_unlock(nib_runtime *rt);

/* ---- module.c ---- */
/* Refuses devices that load no modules, and opens the others. */
nib_status nib_check_loads(nib_device *device, const char *operation);
void nib_module_retain(nib_module *module);

/* ---- work.c ---- */
/* A number for observers, with the name of its parameter. */
static inline nib_attribute nib_attribute_integer(const char *name, int64_t value) {
  return (nib_attribute){ name, NIB_ATTRIBUTE_INTEGER, value, 0 };
}
static inline nib_attribute nib_attribute_boolean(const char *name, bool value) {
  return (nib_attribute){ name, NIB_ATTRIBUTE_BOOLEAN, value, 0 };
}
static inline nib_attribute nib_attribute_real(const char *name, double value) {
  return (nib_attribute){ name, NIB_ATTRIBUTE_REAL, 0, value };
}
static inline nib_attribute nib_attribute_single(const char *name,
                                                 float value) { /* by its bits: the thread may flush subnormals */
  return nib_attribute_real(name, nib_element_to_number(NIB_FLOAT32, &value).real);
}
/* The work of one of our kernels with its params. */
#define NIB_WORK(symbol, given)                                                                     \
  .name = nib_kernel_names[NIB_KERNEL_##symbol], .kernel = NIB_KERNEL_##symbol, .params = &(given), \
  .bytes = sizeof(given)
/* Queues work on the stream, or records it if the stream captures. `operation` is for messages and observers. */
nib_status nib_submit(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count);
/* Refuses to write read-only memory. */
nib_status nib_check_writable(const char *operation, const char *parameter, const nib_tensor *tensor);

#endif
