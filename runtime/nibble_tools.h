/* nibble for tools: user kernels, profiling, observers, and a writer of files. What nibble.h says at its top holds here
 * too. */
#ifndef NIBBLE_TOOLS_H
#define NIBBLE_TOOLS_H

#include "nibble.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Kernels of your own (CUDA devices) ------------------------------------------------------------------------ */

typedef struct nib_module nib_module;           /* device code: PTX, a cubin or a fatbin */
typedef struct nib_user_kernel nib_user_kernel; /* a function in it; keeps it alive */

#define NIB_MAX_ARGUMENTS  64
#define NIB_ARGUMENT_BYTES 4096

/* Compiles CUDA C++ with NVRTC for the device. `options` go to the compiler; nibble's headers ("nvfp4.h" and what it
 * needs) can be included. UNAVAILABLE when the device runs no user kernels or libnvrtc is not there; INVALID with the
 * compiler's log as the message when the source does not compile. */
NIB_API nib_status nib_compile(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                               nib_module **out);
/* Loads PTX, a cubin or a fatbin. */
NIB_API nib_status nib_module_create(nib_device *device, const void *image, size_t bytes, nib_module **out);
NIB_API void nib_module_release(nib_module *module); /* kernels, graphs and queued launches keep the code */
NIB_API nib_device *nib_module_device(const nib_module *module);
/* The kernel of that (extern "C" or mangled) name. */
NIB_API nib_status nib_module_kernel(nib_module *module, const char *name, nib_user_kernel **out);
NIB_API void nib_user_kernel_release(nib_user_kernel *kernel);
NIB_API nib_device *nib_user_kernel_device(const nib_user_kernel *kernel);
NIB_API const char *nib_user_kernel_name(const nib_user_kernel *kernel);

typedef struct nib_kernel_attributes {
  int32_t max_threads; /* in a block */
  int32_t registers;   /* of a thread */
  int32_t shared_bytes, constant_bytes, local_bytes;
  int32_t max_dynamic_shared_bytes;
  int32_t ptx_version, binary_version; /* 90: 9.0 */
} nib_kernel_attributes;
NIB_API void nib_user_kernel_attributes_sized(const nib_user_kernel *kernel, nib_kernel_attributes *out,
                                              size_t out_bytes);
static inline nib_kernel_attributes nib_user_kernel_attributes(const nib_user_kernel *kernel) {
  nib_kernel_attributes attributes;
  nib_user_kernel_attributes_sized(kernel, &attributes, sizeof attributes);
  return attributes;
}
/* -1 when the driver cannot tell (before CUDA 12.4): arguments are then not checked. */
NIB_API int32_t nib_user_kernel_param_count(const nib_user_kernel *kernel);
NIB_API size_t nib_user_kernel_param_bytes(const nib_user_kernel *kernel, int32_t index);

typedef struct nib_argument {
  nib_tensor *tensor; /* its first element's address is passed; otherwise: */
  const void *value;
  size_t bytes;
} nib_argument;

typedef struct nib_launch_desc {
  uint32_t grid[3], block[3]; /* >= 1 each */
  uint32_t shared_bytes;
  int32_t argument_count;
  const nib_argument *arguments;
} nib_launch_desc;
/* Work of the stream like any operation: asynchronous, capturable; tensors count as read and written. */
NIB_API nib_status nib_user_kernel_launch_sized(nib_stream *stream, nib_user_kernel *kernel,
                                                const nib_launch_desc *desc, size_t desc_bytes);
static inline nib_status nib_user_kernel_launch(nib_stream *stream, nib_user_kernel *kernel,
                                                const nib_launch_desc *desc) {
  return nib_user_kernel_launch_sized(stream, kernel, desc, sizeof *desc);
}

/* ---- Profiling and observing ----------------------------------------------------------------------------------- */

/* A named range on the calling thread's line in a profiler (NVTX, where libnvtx3interop or libnvToolsExt is on the
 * machine), and for an observer. */
NIB_API void nib_range_push(nib_runtime *runtime, const char *name);
NIB_API void nib_range_pop(nib_runtime *runtime);

/* Observing is for checkers and tracers. A runtime calls its observer after each thing that was done, in that order,
 * from inside the nib_ function that did it and on its thread; a function that fails is not observed. The observer may
 * only call nib_ functions that take const pointers. What it is given is valid until it returns. Names are literals,
 * except for the `kernel` of a user's. Accesses through nib_tensor_data are not seen. */

/* X(symbol, name): the fields that are set besides `operation` and `device` */
#define NIB_OBSERVATION_LIST(X)                                                                                      \
  X(WORK, "work") /* queued on `stream`, or recorded as `node` of `capture`: `kernel`, `accesses`, ... */            \
  X(EVENT_RECORD, "event_record") /* `event` on `stream`, inside `capture` */                                        \
  X(STREAM_WAIT, "stream_wait")   /* `stream` waits for `event`; it joins `capture` */                               \
  X(SYNCHRONIZED,                                                                                                    \
    "synchronized")         /* the host waited for `stream`, `event` or the writers of `storage`; else the device */ \
  X(HOST_READ, "host_read") /* `accesses`; by the host itself, now */                                                \
  X(HOST_WRITE, "host_write")                                                                                        \
  X(CAPTURE_BEGIN, "capture_begin")     /* `capture` on `stream` */                                                  \
  X(CAPTURE_END, "capture_end")         /* `capture` on `stream` is what `graph` does from now on */                 \
  X(CAPTURE_ABORT, "capture_abort")     /* `unjoined`: the stream that made it fail, or 0 */                         \
  X(REPLAY, "replay")                   /* `graph` queued on `stream` */                                             \
  X(STORAGE_CREATED, "storage_created") /* `storage` of `bytes` */                                                   \
  X(STORAGE_FREED, "storage_freed")     /* nothing but queued work can use `storage` any more */                     \
  X(TENSOR_RELEASED, "tensor_released") /* `storage` has `handles` tensors left (graphs keep it too) */              \
  X(EVENT_RELEASED, "event_released")                                                                                \
  X(GRAPH_RELEASED, "graph_released")                                                                                \
  X(STREAM_CREATED, "stream_created")                                                                                \
  X(STREAM_RELEASED, "stream_released")                                                                              \
  X(RANGE_PUSH, "range_push") /* `name`; ranges are the host's: the device is the CPU */                             \
  X(RANGE_POP, "range_pop")                                                                                          \
  X(STORAGE_CUT, "storage_cut") /* `storage` counts as never written: nib_drop_work dropped what was to write it */

#define X(symbol, name) NIB_OBSERVED_##symbol,
typedef enum nib_observation_kind { NIB_OBSERVATION_LIST(X) } nib_observation_kind;
#undef X

/* A tensor that work reads or writes: all of it, or the elements that the operation's index tensors and lengths say. */
typedef struct nib_access {
  const nib_tensor *tensor; /* NULL: an argument that was not given */
  bool write;
  const char *parameter; /* as in error messages: "paged_kv_cache (K)"; NULL: an argument of a kernel of your own */
  const char *kv_layout; /* "NHD" or "HND" of a paged cache, else NULL */
} nib_access;

/* An argument that is no tensor and does not follow from the tensors' shapes: "max_kv_len", "inverse", "apply_q_rope",
 * "compress_ratio"; scales that are numbers; of fill "value", of arange "start" and "step", of random values "seed" and
 * "low" and "range". */
typedef enum nib_attribute_kind { NIB_ATTRIBUTE_INTEGER, NIB_ATTRIBUTE_BOOLEAN, NIB_ATTRIBUTE_REAL } nib_attribute_kind;
#define NIB_MAX_ATTRIBUTES 4
typedef struct nib_attribute {
  const char *name;
  nib_attribute_kind kind;
  int64_t value; /* of an integer or a boolean */
  double real;
} nib_attribute;

typedef struct nib_observation {
  nib_observation_kind kind;
  const char *operation; /* as in error messages */
  const char *kernel;    /* as nib_graph_node_name gives it; a function of nib_stream_call has none */
  bool user_kernel;      /* `write` means that the accesses are not known: read, written or neither */
  const nib_device *device;
  uint64_t stream, event, graph, capture, storage; /* numbers, unique in the runtime among their kind; 0: none */
  uint64_t unjoined;                               /* a stream's number */
  uint64_t bytes;
  int64_t handles;
  int64_t time_ns;  /* of a clock that only goes forward: now that it is queued or done */
  int64_t begin_ns; /* of work, records, waits, reads, writes and replays: when the function that did it began to */
  int32_t node;     /* from 0; -1: none */
  int32_t dep_count;
  const int32_t *deps; /* the nodes that it waits for, ascending */
  const nib_access *accesses;
  int32_t access_count, attribute_count;
  const nib_attribute *attributes;
  const char *name; /* of a range: as it was given */
} nib_observation;

NIB_API const char *nib_observation_name(nib_observation_kind kind); /* "work", ... */
/* Sets the runtime's only observer; NULL removes it. */
NIB_API void nib_runtime_observe(nib_runtime *runtime, void (*function)(void *user, const nib_observation *observation),
                                 void *user);

/* Copies the elements of a view of a storage, given by its number, row-major, into `bytes` bytes (exactly the view's
 * size). Waits for queued work that writes the storage. It leaves no trace: observers are not told, no stream is
 * ordered, and a fault that a wait would report is not reported yet. STATE if the storage is gone, CAPTURING during a
 * capture on its device. */
NIB_API nib_status nib_peek(nib_runtime *runtime, uint64_t storage, nib_dtype dtype, int64_t offset_bytes, int32_t ndim,
                            const int64_t *shape, const int64_t *stride, void *data, size_t bytes);

/* ---- Files of your own ----------------------------------------------------------------------------------------- */

typedef struct nib_writer nib_writer;

/* A file that takes its place when it is whole, as nibble.h says of saving. FILE when it cannot be made. */
NIB_API nib_status nib_writer_create(nib_runtime *runtime, const char *path, nib_writer **out);
/* After a write that failed, all others fail, and the file is not kept. */
NIB_API nib_status nib_writer_write(nib_writer *writer, const void *data, size_t bytes);
/* Frees the writer. With `keep` it puts the file in its place, and fails if that or an earlier write failed. Without,
 * the old file stays. Works on a closed runtime too. In a child process after fork it returns FORKED and frees
 * nothing. */
NIB_API nib_status nib_writer_close(nib_writer *writer, bool keep);

#ifdef __cplusplus
}
#endif
#endif
