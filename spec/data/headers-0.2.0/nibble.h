/* nibble: a small runtime for GPU-style tensors, streams, graph capture and NVFP4 KV-cache
 * operations.
 *
 * Sections: status, runtime, devices, tensors, streams and events, graphs, operations. Then what
 * not every host needs: files, and sharing memory and streams with other APIs. nibble_tools.h has
 * the rest: user kernels, profiling, observers and a file writer.
 *
 * Ownership. The caller owns every object that a function makes for it, and releases it with the
 * matching *_release (or _close) function, which takes NULL too. Devices and default streams are
 * the runtime's own. Objects keep what they need alive: a tensor its storage, a graph the storages
 * of all its nodes, the runtime itself as long as objects of it exist. Releasing never blocks:
 * memory that queued work still uses is freed when that work is done (nib_tick, the next
 * allocation, the next wait). Configs, descriptors, names and shapes are read during the call
 * alone. A pointer must not be NULL where its comment does not allow that.
 *
 * Threads. A runtime and all objects of it are used by one thread at a time; the caller sees to
 * that. Different runtimes are independent; nib_set_deadline alone may be called from any thread.
 * The host's functions are called on the thread that called nibble. There are two exceptions:
 * `parallel_for` and functions given to nib_stream_call run on threads of the runtime; and
 * `allocate` and `log` run on whichever thread releases a tensor that another framework still had
 * when the runtime was closed (nib_tensor_to_dlpack).
 *
 * Errors. Functions that can fail return a nib_status; nib_error() then has the message,
 * `operation: parameter: expected X, got Y` where an argument is to blame. A function that fails
 * has changed nothing, unless its comment says what it leaves; host memory that it would have
 * filled may be written in part. Operations are named as in Lua. What goes wrong in queued work is
 * reported once, by the next wait: FAULT for contents that an operation refused, by any wait on the
 * device; STREAM for a function of nib_stream_call, by a wait on its stream, on one of its events,
 * on a tensor or on the device.
 *
 * Floats. Results and messages are the same whatever the caller's rounding mode is, whether its
 * thread flushes subnormals, and what its locale is.
 *
 * Time. All work on tensors is asynchronous and ordered inside its stream. Functions with a
 * `timeout_us` parameter wait. NIB_TIMEOUT means that the work is not done yet: with a message if
 * the deadline passed, without one if only `timeout_us` did. Other functions wait only where their
 * comment says so (what reads or compares elements; with two devices nib_tensor_copy,
 * nib_stream_wait and nib_graph_replay) and in three cases. A stream of the CPU whose queue is full
 * (256 pieces of work) waits for room. When memory is exhausted, an allocation waits for queued
 * work whose memory can then be freed. And with queued_bytes of nib_config, work above that limit
 * waits until enough is done. So a function given to nib_stream_call must not depend on what the
 * thread that uses the runtime does next. nib_set_deadline bounds all waits but that of
 * nib_runtime_close. While a device captures, nib_*_synchronize, nib_tensor_wait, all that reads
 * elements, and what says so are refused (CAPTURING). Timeouts and budgets are the microseconds
 * that are left. NIB_UNLIMITED is no limit. 0 and negative numbers are no time: such a timeout does
 * not wait, and such a deadline has passed. So the rest of a frame can be passed as it is.
 *
 * The binary interface. A program runs, without being rebuilt, with every later library of the same
 * NIB_ABI_VERSION (the number in libnibble.so.N), and with an earlier one if it uses nothing new.
 * While that number stays:
 * - Functions and their parameters stay, and so do the names and values of enums. New functions
 *   and new values come: be ready for a status, a dtype or a kind of observation that you do not
 *   know.
 * - Configs, descriptors and results (each struct whose function has a *_sized form) grow at their
 *   end. The inline function in this header passes the size that the struct had when you compiled.
 *   Zero-initialise the struct: a field that your header does not have is 0, which means "as
 *   before". An older library accepts a field that it does not know if it is 0; any other value is
 *   INVALID. The library exports the *_sized forms; other languages call these.
 * - Structs behind const pointers (nib_device_info, nib_safetensors_entry, nib_observation) grow
 *   at their end: do not make arrays of them, and do not rely on their size.
 * - Structs inside others or in arrays (nib_number, nib_cache, nib_scale_source, nib_argument,
 *   nib_access, nib_attribute) and NIB_MAX_NDIM never change.
 *
 * Dimensions and indices count from 0. Shapes, strides and view offsets of tensors are in elements;
 * sizes and offsets of memory and of files are in bytes. */
#ifndef NIBBLE_H
#define NIBBLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) && !defined(NIB_HIDDEN) /* NIB_HIDDEN: in the static libraries, so that what \
                                                 links them exports no nib_ name */
#define NIB_API __attribute__((visibility("default")))
#else
#define NIB_API
#endif

#define NIB_VERSION     "0.2.0"
#define NIB_ABI_VERSION 2u
#define NIB_MAX_NDIM    8
#define NIB_UNLIMITED   INT64_MAX /* a time without a limit */

typedef struct nib_runtime nib_runtime;
typedef struct nib_device nib_device; /* belongs to its runtime; never released */
typedef struct nib_tensor nib_tensor;
typedef struct nib_stream nib_stream;
typedef struct nib_event nib_event;
typedef struct nib_graph nib_graph;
typedef struct nib_semaphore nib_semaphore;
/* Of DLPack's dlpack.h, version 1; nibble_dlpack.h declares it too. */
struct DLManagedTensorVersioned;

/* ---- Status -------------------------------------------------------------------------------- */

#define NIB_STATUS_LIST(X)                                \
  X(OK, "ok")                                             \
  X(TIMEOUT, "not done yet")                              \
  X(INVALID, "invalid argument")                          \
  X(MEMORY, "out of memory")                              \
  X(UNAVAILABLE, "device not available")                  \
  X(CAPTURING, "not allowed while a stream is capturing") \
  X(STATE, "object is not in a state that allows this")   \
  X(FAULT, "an operation met contents that it refuses")   \
  X(STREAM, "a host function in the stream failed")       \
  X(DEVICE, "the device's driver refused a call")         \
  X(LOST, "context lost")                                 \
  X(FORKED, "runtime used in a child process after fork") \
  X(CLOSED, "runtime is closed")                          \
  X(FILE, "file cannot be opened, read or written")       \
  X(FORMAT, "file is damaged or of an unsupported kind")  \
  X(SCRIPT, "script raised an error")                     \
  X(EXPIRED, "script was stopped: its time had run out")

#define X(name, text) NIB_##name,
typedef enum nib_status { NIB_STATUS_LIST(X) } nib_status;
#undef X

/* "OK", "TIMEOUT", ... and the text beside it; "?" for a number that is no status. */
NIB_API const char *nib_status_name(nib_status status);
NIB_API const char *nib_status_text(nib_status status);

/* ---- Runtime ------------------------------------------------------------------------------- */

typedef enum nib_log_level {
  NIB_LOG_DEBUG,   /* a call failed: its message */
  NIB_LOG_INFO,    /* a device was opened */
  NIB_LOG_WARNING, /* an allocation had to wait for queued work */
  NIB_LOG_ERROR    /* a GPU's context is lost */
} nib_log_level;

/* All zero is a good configuration. */
typedef struct nib_config {
  uint32_t abi_version; /* NIB_ABI_VERSION; 0 means the same */
  /* Allocates (pointer NULL), resizes, and frees (new_size 0, returns NULL) all host memory, CPU
   * tensors included, except pinned memory, which is the driver's, and one page of the operating
   * system, by which the runtime detects that it is in a child process after fork. Returns NULL
   * when it cannot allocate. Results are aligned as malloc's. NULL: the C library's. */
  void *(*allocate)(void *user, void *pointer, size_t old_size, size_t new_size);
  /* Receives messages for people (no newline at the end). NULL: none are made. */
  void (*log)(void *user, nib_log_level level, const char *message);
  /* Calls body(context, i) once for each i in 0..count-1, on threads of the host's choice, and
   * returns when all have returned. Called from several of the runtime's threads at once. NULL: the
   * runtime's own small pool. */
  void (*parallel_for)(void *user, size_t count, void (*body)(void *context, size_t index),
                       void *context);
  void *user;          /* given to the functions above */
  uint64_t memory_cap; /* largest number of bytes of tensors on one device; 0: no limit */
  int32_t threads;     /* threads that a CPU kernel is spread over; 0: one per processor */
  int32_t index_base;  /* of dimensions and indices in error messages: 0 (C) or 1 (Lua) */
  /* How many bytes of operands the unfinished work of a device may have. A view counts as its
   * elements, a replay as all nodes of its graph. Work above the limit waits, until the deadline.
   * One operation that is larger than the limit runs alone on the CPU and is INVALID on a GPU. 0:
   * no limit. */
  uint64_t queued_bytes;
  /* How many streams a device may have, without its default stream and those of nib_stream_wrap. A
   * released stream counts until its work is done. At the limit a new stream reuses a released one,
   * and runs after its work. MEMORY when none is released. 0: no limit. */
  int64_t streams;
} nib_config;

/* NIB_ABI_VERSION of the library that is loaded, to compare with the header's. */
NIB_API uint32_t nib_abi_version(void);
NIB_API const char *nib_version(void);

/* Creates a runtime. `config` may be NULL. Fails with INVALID (another ABI version, or a bad field,
 * which the config's `log` is told) or MEMORY; there is no nib_error then. */
NIB_API nib_status nib_runtime_create_sized(const nib_config *config, size_t config_bytes,
                                            nib_runtime **out);
static inline nib_status nib_runtime_create(const nib_config *config, nib_runtime **out) {
  return nib_runtime_create_sized(config, sizeof *config, out);
}

/* Ends an open capture, waits for running work, joins the runtime's threads, and frees the memory
 * of all tensors, except of those that other frameworks still hold (nib_tensor_to_dlpack). On the
 * CPU it drops kernels that have not begun, and running ones stop after their next piece. All
 * functions given to nib_stream_call run. It waits for semaphores, even for one that nobody
 * signals. Objects that remain can only be released: every other call on them returns CLOSED. In a
 * child process after fork it does nothing. */
NIB_API void nib_runtime_close(nib_runtime *runtime);

/* The message of the last call on this runtime that failed; "" if none did. Valid until the next
 * call. */
NIB_API const char *nib_error(const nib_runtime *runtime);
NIB_API void *nib_runtime_user(const nib_runtime *runtime);

/* Frees what finished work no longer needs, in pieces that take less than a millisecond each: at
 * least one piece, and more until `budget_us` has passed. The next call continues where this one
 * stopped. Never waits. The system takes longer to free a block of more than 8 MiB, so a thread of
 * the runtime does that, and the block counts as reserved until then. With a host's `allocate` the
 * call frees such a block itself, however long `allocate` takes, and then returns. */
NIB_API nib_status nib_tick(nib_runtime *runtime, int64_t budget_us);

/* Sets a deadline, `budget_us` from now; NIB_UNLIMITED, the default: none. When it has passed, each
 * function that waits for, reads or compares tensors returns TIMEOUT within a millisecond, whatever
 * its own timeout, and has changed nothing. May be called from any thread: an earlier deadline also
 * shortens another thread's wait, but only if a deadline was set when that wait began. */
NIB_API void nib_set_deadline(nib_runtime *runtime, int64_t budget_us);

/* Changes three limits of the config. What exists already stays, even above a limit. */
NIB_API nib_status nib_set_limits(nib_runtime *runtime, uint64_t memory_cap, uint64_t queued_bytes,
                                  int64_t streams);

/* nib_drop_work drops all work that was queued since the last nib_mark_work, or since the runtime
 * was created. On the CPU, kernels and replays that have not begun do nothing, and a running kernel
 * stops after its next piece; a GPU finishes what it has. Functions of nib_stream_call still run,
 * events still fire, and what the work used is freed as if it were done. `cut` (may be NULL) is how
 * many storages with live references the dropped work was to write: their contents are unspecified,
 * as if never written. Neither waits. */
NIB_API void nib_mark_work(nib_runtime *runtime);
NIB_API nib_status nib_drop_work(nib_runtime *runtime, int32_t *cut);

/* ---- Devices ------------------------------------------------------------------------------- */

typedef struct nib_device_info {
  const char *name;        /* "cpu", "cuda:0" */
  const char *description; /* processor or GPU */
  const char *reason;      /* why it is not available; NULL if it is */
  bool available;
  uint64_t memory_bytes; /* 0 if unknown */
  int32_t processors;    /* threads or multiprocessors */
  uint8_t uuid[16];      /* of a GPU: Vulkan's deviceUUID; zeros if unknown */
} nib_device_info;

typedef struct nib_memory_info {
  uint64_t used_bytes; /* live storages */
  /* These, and storages that are released but still used by queued work or not freed yet. */
  uint64_t reserved_bytes;
  uint64_t peak_bytes; /* largest reserved_bytes so far */
} nib_memory_info;

/* Device 0 is the CPU; unavailable devices are listed too. */
NIB_API int32_t nib_device_count(const nib_runtime *runtime);
NIB_API nib_device *nib_device_at(nib_runtime *runtime, int32_t index);
NIB_API const nib_device_info *nib_device_get_info(const nib_device *device);

/* The device of that name. UNAVAILABLE, with the reason as the message, if it is not. */
NIB_API nib_status nib_device_find(nib_runtime *runtime, const char *name, nib_device **out);
/* The first GPU that can be opened, else the CPU. On a runtime that is closed, or that the parent
 * process created, it returns the CPU. */
NIB_API nib_device *nib_device_best(nib_runtime *runtime);

NIB_API nib_runtime *nib_device_runtime(const nib_device *device);
/* Never released. NULL only when a GPU cannot be opened (nib_error tells why). */
NIB_API nib_stream *nib_device_default_stream(nib_device *device);
NIB_API void nib_device_memory_sized(nib_device *device, nib_memory_info *out, size_t out_bytes);
static inline nib_memory_info nib_device_memory(nib_device *device) {
  nib_memory_info info;
  nib_device_memory_sized(device, &info, sizeof info);
  return info;
}
NIB_API bool nib_device_is_capturing(const nib_device *device);
/* Waits for all streams of the device. */
NIB_API nib_status nib_device_synchronize(nib_device *device, int64_t timeout_us);

/* ---- Tensors ------------------------------------------------------------------------------- */

typedef enum nib_dtype {
  NIB_DTYPE_NONE = -1,
  NIB_FLOAT32,
  NIB_FLOAT16,
  NIB_BFLOAT16,
  NIB_FLOAT8_E4M3FN,
  NIB_UINT8,
  NIB_INT8,
  NIB_UINT16,
  NIB_INT32,
  NIB_INT64
} nib_dtype;

/* "float32", ...; "?" for a number that is no dtype. */
NIB_API const char *nib_dtype_name(nib_dtype dtype);
/* The dtype of that name; false if there is none. */
NIB_API bool nib_dtype_find(const char *name, nib_dtype *out);
/* Bytes of an element; 0 for a number that is no dtype. */
NIB_API size_t nib_dtype_bytes(nib_dtype dtype);
NIB_API bool nib_dtype_is_float(nib_dtype dtype);

/* A number with its kind: integers survive in 64 bits. */
typedef struct nib_number {
  bool is_float;
  int64_t integer;
  double real;
} nib_number;
static inline nib_number NIB_INTEGER(int64_t integer) {
  nib_number number = { false, integer, 0 };
  return number;
}
static inline nib_number NIB_REAL(double real) {
  nib_number number = { true, 0, real };
  return number;
}

/* A compact tensor [shape[0], ..., shape[ndim-1]] of unspecified contents; ndim 0 is one element.
 * Fails with INVALID (ndim > 8, a negative size, a byte count past 2^62) before anything is
 * allocated, or MEMORY. */
NIB_API nib_status nib_tensor_create(nib_device *device, nib_dtype dtype, int32_t ndim,
                                     const int64_t *shape, nib_tensor **out);
/* The same on the CPU in pinned memory, which GPUs copy to and from directly (nib_tensor_copy);
 * ordinary memory where no GPU can be used. Memory that is given back is kept for later tensors
 * until it is needed or the runtime closes. */
NIB_API nib_status nib_tensor_create_pinned(nib_runtime *runtime, nib_dtype dtype, int32_t ndim,
                                            const int64_t *shape, nib_tensor **out);
NIB_API void nib_tensor_release(nib_tensor *tensor);

NIB_API nib_device *nib_tensor_device(const nib_tensor *tensor);
NIB_API nib_dtype nib_tensor_dtype(const nib_tensor *tensor);
NIB_API int32_t nib_tensor_ndim(const nib_tensor *tensor);
NIB_API const int64_t *nib_tensor_shape(const nib_tensor *tensor);  /* ndim sizes */
NIB_API const int64_t *nib_tensor_stride(const nib_tensor *tensor); /* ndim strides, >= 0 */
NIB_API int64_t nib_tensor_numel(const nib_tensor *tensor);
NIB_API bool nib_tensor_is_contiguous(const nib_tensor *tensor);
NIB_API bool nib_tensor_is_pinned(const nib_tensor *tensor); /* false in ordinary memory */
/* Memory that was lent for reading: work that would write it is INVALID. */
NIB_API bool nib_tensor_is_read_only(const nib_tensor *tensor);
/* The first element, in the device's address space. The runtime does not order what the caller
 * reads or writes through it. */
NIB_API void *nib_tensor_data(const nib_tensor *tensor);
/* The storage's number, which its views share and no other storage of the runtime ever has; and
 * where in the storage the tensor's first element lies. */
NIB_API uint64_t nib_tensor_storage(const nib_tensor *tensor);
NIB_API int64_t nib_tensor_offset_bytes(const nib_tensor *tensor);
/* The same device memory, first element, dtype, shape and strides. */
NIB_API bool nib_tensor_same_view(const nib_tensor *a, const nib_tensor *b);

/* Views: new tensors on the same storage. They fail with INVALID, with MEMORY for the handle, or as
 * every function does (CLOSED, FORKED). */
NIB_API nib_status nib_tensor_narrow(nib_tensor *tensor, int64_t dim, int64_t start, int64_t length,
                                     nib_tensor **out);
NIB_API nib_status nib_tensor_select(nib_tensor *tensor, int64_t dim, int64_t index,
                                     nib_tensor **out);
NIB_API nib_status nib_tensor_view(nib_tensor *tensor, int32_t ndim, const int64_t *shape,
                                   nib_tensor **out); /* one -1 */
NIB_API nib_status nib_tensor_permute(nib_tensor *tensor, int32_t ndim, const int64_t *dims,
                                      nib_tensor **out);
NIB_API nib_status nib_tensor_expand(nib_tensor *tensor, int32_t ndim, const int64_t *shape,
                                     nib_tensor **out); /* -1 keeps */
/* `offset` counts from the tensor's first element; the view must lie inside the storage; strides
 * are >= 0. */
NIB_API nib_status nib_tensor_as_strided(nib_tensor *tensor, int32_t ndim, const int64_t *shape,
                                         const int64_t *stride, int64_t offset, nib_tensor **out);
/* The same bytes as another dtype; the last dimension's size changes with the element size. */
NIB_API nib_status nib_tensor_reinterpret(nib_tensor *tensor, nib_dtype dtype, nib_tensor **out);
/* Another handle on the same view. */
NIB_API nib_status nib_tensor_alias(nib_tensor *tensor, nib_tensor **out);

/* Work on tensors, in `stream` (of the tensors' device). Outputs whose elements overlap in memory
 * are INVALID, here and in all operations. That is decided exactly, but for strides of
 * nib_tensor_as_strided that would take more than 4,096 steps to tell apart: those count as
 * overlapping. */

/* destination = source, converted. To a float dtype numbers are rounded to nearest even
 * (float8_e4m3fn saturates), and a NaN becomes 0x7FFFFFFF, 0x7FFF or 0x7F. From a float to an
 * integer dtype they are truncated and saturated, and a NaN becomes 0. Integers saturate. The same
 * dtype keeps every bit. `source` may be expandable to the destination's shape and may share memory
 * with it (all is read before any is written). On one device the copy is queued in `stream`, and
 * may be captured. Devices may differ; `stream` is then of either one.
 * - Between a GPU and a contiguous tensor in pinned memory, with a stream of the GPU: queued for
 *   the copy engine, with conversions and strides on the GPU's side; may be captured. The call
 *   waits only for CPU work that is queued on the pinned tensor already. Reading the tensor waits
 *   for the copy. Later CPU work on it does not: order it by nib_event_record and
 *   nib_stream_wait.
 * - Between two GPUs: queued in `stream`, after all writers of the source. On the other GPU it
 *   comes after earlier and before later work of the default stream. Refused during a capture.
 * - Between a CPU and a GPU without pinned memory: the call waits for the source's writers. Refused
 *   during a capture. */
NIB_API nib_status nib_tensor_copy(nib_stream *stream, nib_tensor *destination, nib_tensor *source);
/* The same with a stream of each tensor's device: `to` of the destination's and `from` of the
 * source's, maybe the same one. */
NIB_API nib_status nib_tensor_copy_between(nib_stream *to, nib_stream *from,
                                           nib_tensor *destination, nib_tensor *source);
/* Waits for what such a copy would wait for, so that the copy itself does not. */
NIB_API nib_status nib_tensor_copy_wait(nib_tensor *destination, nib_tensor *source,
                                        int64_t timeout_us);
NIB_API nib_status nib_tensor_fill(nib_stream *stream, nib_tensor *tensor, nib_number value);
/* Element i = start + i*step, row-major; in float64 (two roundings, then one to the dtype) if
 * either is real. Contiguous. */
NIB_API nib_status nib_tensor_arange(nib_stream *stream, nib_tensor *tensor, nib_number start,
                                     nib_number step);
/* Counter-based random elements, a function of seed and element number alone, the same on every
 * device. Contiguous. Standard normal (float dtypes); integers low <= x < high; a permutation of
 * 0..numel-1 (1-D int32 or int64). */
NIB_API nib_status nib_tensor_random_normal(nib_stream *stream, nib_tensor *tensor, uint64_t seed);
NIB_API nib_status nib_tensor_random_integer(nib_stream *stream, nib_tensor *tensor, uint64_t seed,
                                             int64_t low, int64_t high);
NIB_API nib_status nib_tensor_random_permutation(nib_stream *stream, nib_tensor *tensor,
                                                 uint64_t seed);
/* The elements, row-major, from `bytes` bytes of host memory (exactly the tensor's size). Refused
 * during a capture. */
NIB_API nib_status nib_tensor_write(nib_stream *stream, nib_tensor *tensor, const void *data,
                                    size_t bytes);

/* Waits until all that was queued to write this tensor's storage is done. */
NIB_API nib_status nib_tensor_wait(nib_tensor *tensor, int64_t timeout_us);
/* Waits as nib_tensor_wait does, then copies the elements, row-major, into `bytes` bytes of host
 * memory (exactly the tensor's size). */
NIB_API nib_status nib_tensor_read(nib_tensor *tensor, void *data, size_t bytes,
                                   int64_t timeout_us);

/* Comparisons wait as nib_tensor_read does. The two tensors may be on different devices; shapes
 * must agree, except for nib_tensor_equal. */
/* The same shape, dtype and bits. */
NIB_API nib_status nib_tensor_equal(nib_tensor *a, nib_tensor *b, bool *out);
/* |a-b| <= atol + rtol*|b| in float64. */
NIB_API nib_status nib_tensor_allclose(nib_tensor *a, nib_tensor *b, double rtol, double atol,
                                       bool equal_nan, bool *out);
/* Largest |a-b| in float64, NaN if any is, and its first flat row-major index (-1 when empty). */
NIB_API nib_status nib_tensor_max_error(nib_tensor *a, nib_tensor *b, double *error,
                                        int64_t *index);
/* Largest |x| over the elements that are not NaN, 0 for none. */
NIB_API nib_status nib_tensor_amax(nib_tensor *tensor, double *out);

/* One element's bits (as nib_tensor_read gives them) as a number; 0 for a number that is no
 * dtype. */
NIB_API nib_number nib_element_to_number(nib_dtype dtype, const void *element);
/* A number as one element's bits. false: an integer dtype cannot hold it (fraction, range, NaN).
 * Floats round to nearest even; float8_e4m3fn saturates. false for an unknown dtype, too. */
NIB_API bool nib_element_from_number(nib_dtype dtype, nib_number number, void *element);

/* ---- Streams and events -------------------------------------------------------------------- */

/* priority: negative is high, 0 normal; a hint (without effect on the CPU). */
NIB_API nib_status nib_stream_create(nib_device *device, int32_t priority, nib_stream **out);
/* The stream's queued work still runs; on the CPU its thread ends soon afterwards. If many streams
 * are released with work still queued, the work of a new stream may run behind theirs. Has no
 * effect on a default stream. */
NIB_API void nib_stream_release(nib_stream *stream);
NIB_API nib_device *nib_stream_device(const nib_stream *stream);
NIB_API uint64_t nib_stream_id(const nib_stream *stream); /* for messages; unique in its runtime */
NIB_API bool nib_stream_is_capturing(const nib_stream *stream);
/* Waits for the stream's work. */
NIB_API nib_status nib_stream_synchronize(nib_stream *stream, int64_t timeout_us);
/* Queues a host function. It runs on a thread of the runtime and must not call nib_ functions. A
 * result other than NIB_OK becomes the stream's error; later work runs all the same. Refused during
 * a capture. */
NIB_API nib_status nib_stream_call(nib_stream *stream, nib_status (*function)(void *user),
                                   void *user);

/* An event after the work queued so far. Inside a capture it is a point of the graph, good for
 * nib_stream_wait alone. */
NIB_API nib_status nib_event_record(nib_stream *stream, nib_event **out);
NIB_API void nib_event_release(nib_event *event);
NIB_API nib_device *nib_event_device(const nib_event *event);
/* Later work of the stream waits for the event. A stream that waits for an event of an open capture
 * on its device joins that capture. If stream and event belong to a CPU and a GPU, the call itself
 * waits; call nib_event_synchronize before it to have a timeout. */
NIB_API nib_status nib_stream_wait(nib_stream *stream, nib_event *event);
NIB_API nib_status nib_event_synchronize(nib_event *event, int64_t timeout_us);
/* Milliseconds between two events whose work is done (TIMEOUT if it is not). */
NIB_API nib_status nib_event_elapsed(nib_event *start, nib_event *end, double *milliseconds);

/* ---- Graphs -------------------------------------------------------------------------------- */

typedef enum nib_capture_mode {
  NIB_CAPTURE_THREAD_LOCAL,
  NIB_CAPTURE_GLOBAL,
  NIB_CAPTURE_RELAXED
} nib_capture_mode;

/* Begins a capture: until nib_capture_end, work on the stream, and on streams that join it by
 * events, is recorded instead of done. The modes are CUDA's: they say which calls of the driver are
 * refused meanwhile, and from which threads. They mean the same on the CPU. A device has one
 * capture at a time. */
NIB_API nib_status nib_capture_begin(nib_stream *stream, nib_capture_mode mode);
/* Ends the capture that began on this stream. *graph is read: NULL makes a new graph (so set it to
 * NULL before); a graph of the same device is updated, and *in_place (may be NULL) says whether
 * nodes and dependencies were the same. Fails with STATE if a stream joined and was not joined
 * back. Whatever the failure (MEMORY, too), the capture has then ended, what was recorded is
 * forgotten, and *graph is as before. Two failures change nothing: INVALID, for a graph of another
 * device, and STATE, if this stream began no capture. */
NIB_API nib_status nib_capture_end(nib_stream *stream, nib_graph **graph, bool *in_place);
/* Ends the capture and forgets what was recorded. Does nothing when the stream did not begin
 * one. */
NIB_API void nib_capture_abort(nib_stream *stream);

NIB_API void nib_graph_release(nib_graph *graph); /* queued replays still run */
NIB_API nib_device *nib_graph_device(const nib_graph *graph);
/* Runs the graph once as work of the stream. Waits for the CPU's queued work on pinned tensors that
 * the graph copies. */
NIB_API nib_status nib_graph_replay(nib_graph *graph, nib_stream *stream);
/* That wait alone. */
NIB_API nib_status nib_graph_wait(nib_graph *graph, int64_t timeout_us);
NIB_API int32_t nib_graph_node_count(const nib_graph *graph);
NIB_API const char *nib_graph_node_name(const nib_graph *graph, int32_t node);
/* Nodes that this one waits for, ascending; returns how many. */
NIB_API int32_t nib_graph_node_deps(const nib_graph *graph, int32_t node, const int32_t **deps);
/* The graph in Graphviz's language, into text[size] with a final 0; *needed is the length without
 * it. text may be NULL. */
NIB_API nib_status nib_graph_dot(nib_graph *graph, char *text, size_t size, size_t *needed);
/* The same as the driver sees it, with everything that it tells about each node; nib_graph_dot's
 * where there is no driver. */
NIB_API nib_status nib_graph_driver_dot(nib_graph *graph, char *text, size_t size, size_t *needed);

/* ---- Operations ---------------------------------------------------------------------------- */

/* Formats, arithmetic and the meaning of each parameter: kernels/README.md. All are checked,
 * asynchronous and capturable. Zero-initialise descriptors before you fill them. An operation
 * touches no memory outside its tensors, whatever values they hold. Each comment says what happens
 * with bad slots, page indices, lengths, positions and scales. "Fault": the next wait reports it.
 * Negative lengths count as 0. */

typedef enum nib_layout { NIB_NHD, NIB_HND } nib_layout;

/* A paged cache: two tensors, or one with K and V in its second dimension. */
typedef struct nib_cache {
  nib_tensor *k, *v;
  nib_tensor *stacked; /* instead of k and v */
} nib_cache;

/* A global scale: a float32 tensor of one element, or (not during a capture) a positive finite
 * number. */
typedef struct nib_scale_source {
  nib_tensor *tensor;
  double value;
} nib_scale_source;

/* 4over6 tries two scales for each block: one maps the largest element to 6, the other to 4. It
 * chooses 4 if the sum of squared errors is smaller than with 6. */
typedef enum nib_4over6 { NIB_4OVER6_OFF, NIB_4OVER6_MSE } nib_4over6;

/* page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping. Slots outside the cache are skipped,
 * without a fault. A scale (in a tensor) that is not positive and finite: nothing is written,
 * neither K nor V, and a fault. */
typedef struct nib_append_desc {
  nib_tensor *append_key, *append_value; /* [rows, heads, head_dim] float16 or bfloat16 */
  nib_tensor *slot_mapping;              /* [nnz] int32 or int64, nnz <= the rows of each */
  /* uint8 NHD [pages, page_size, heads, head_dim/2] or HND [pages, heads, page_size, head_dim/2] */
  nib_cache paged_kv_cache;
  nib_cache kv_cache_sf; /* float8_e4m3fn or uint8, with head_dim/16 last */
  nib_layout kv_layout;
  nib_4over6 nvfp4_4over6;
  nib_scale_source k_scale, v_scale;
} nib_append_desc;
NIB_API nib_status nib_append_sized(nib_stream *stream, const nib_append_desc *desc,
                                    size_t desc_bytes);
static inline nib_status nib_append(nib_stream *stream, const nib_append_desc *desc) {
  return nib_append_sized(stream, desc, sizeof *desc);
}

/* quantization.nvfp4_kv_materialize_fp8. A page index outside the cache: its plane (K or V) of the
 * result's page is zeros, and a fault. A length beyond max_kv_len is cut there, and a fault. A
 * range in kv_page_indptr that decreases, is too short or goes beyond 0..num_pages: only the pages
 * that fit into it are written, and a fault. */
typedef struct nib_materialize_desc {
  nib_tensor *k_cache, *v_cache; /* uint8 HND [pages, heads, page_size, head_dim/2] */
  /* float8_e4m3fn or uint8 [..., head_dim/16]; V's interleaved */
  nib_tensor *k_block_scales, *v_block_scales;
  nib_tensor *block_tables; /* int32 [batch, columns], [batch, 2, columns] if split_kv_indices */
  nib_tensor *seq_lens;     /* int32 [batch] */
  int64_t max_kv_len;
  bool split_kv_indices; /* uses_shared_paged_kv_idx = false */
  nib_tensor *out;       /* contiguous float8_e4m3fn of the result's shape, or NULL: allocated */
  nib_tensor *kv_page_indptr; /* int32 [batch + 1], or NULL */
  bool has_num_pages;
  int64_t num_pages; /* with kv_page_indptr only */
} nib_materialize_desc;
/* Results: [num_pages+1, 2, heads, page_size, head_dim] float8_e4m3fn (another handle on `out` if
 * that was given) and int32 [batch, ceil(max_kv_len/page_size)]. Page 0 is zeros. Page j of request
 * b becomes page base + j + 1 of the result, where base is kv_page_indptr[b] if that was given,
 * else b * ceil(max_kv_len/page_size). Every page that the length reaches is written whole. The
 * table has these numbers, and 0 where there is no page. All other pages are not written: as they
 * were in `out`, unspecified in a result that is allocated. */
NIB_API nib_status nib_materialize_sized(nib_stream *stream, const nib_materialize_desc *desc,
                                         size_t desc_bytes, nib_tensor **kv_cache_fp8,
                                         nib_tensor **fp8_block_tables);
static inline nib_status nib_materialize(nib_stream *stream, const nib_materialize_desc *desc,
                                         nib_tensor **kv_cache_fp8, nib_tensor **fp8_block_tables) {
  return nib_materialize_sized(stream, desc, sizeof *desc, kv_cache_fp8, fp8_block_tables);
}

/* quantization.nvfp4_kv_dequantize_paged. No fault: tokens at or past seq_lens (cut at
 * max_seq_len), and those whose page index is outside the cache, are left unchanged in the outputs;
 * scales are used as they are. */
typedef struct nib_dequantize_desc {
  nib_cache paged_kv_cache, kv_cache_sf;
  nib_layout kv_layout;
  nib_tensor *block_tables;      /* int32 or int64 [batch, columns] */
  nib_tensor *seq_lens;          /* int32 [batch] */
  nib_tensor *k_scale, *v_scale; /* float32, one element */
  /* contiguous float16 or bfloat16 [batch, max_seq_len, heads, head_dim] */
  nib_tensor *output_k, *output_v;
} nib_dequantize_desc;
NIB_API nib_status nib_dequantize_sized(nib_stream *stream, const nib_dequantize_desc *desc,
                                        size_t desc_bytes);
static inline nib_status nib_dequantize(nib_stream *stream, const nib_dequantize_desc *desc) {
  return nib_dequantize_sized(stream, desc, sizeof *desc);
}

/* mla.cake_dsv4_nvfp4_rope_quantize_insert; with q NULL
 * mla.cake_dsv4_nvfp4_kv_rope_quantize_insert. Rows whose slot is outside the cache, or that have
 * none, are not inserted, without a fault. A position outside the table: its row is not inserted,
 * the 64 RoPE dimensions of its q heads are zeros, and a fault; positions that are not used
 * (nothing is rotated or inserted) may be anything. */
typedef struct nib_rope_insert_desc {
  nib_tensor *q;  /* contiguous bfloat16 [tokens, heads, 512], or NULL */
  nib_tensor *kv; /* contiguous bfloat16 [tokens, 512] */
  /* uint8 [pages, page_size, 384], [pages, 1, page_size, 384] or [pages, page_size, 1, 384] */
  nib_tensor *cache;
  nib_tensor *slot_mapping;  /* contiguous int32 or int64 [<= tokens] */
  nib_tensor *positions;     /* contiguous int64 [tokens] */
  nib_tensor *cos_sin_cache; /* contiguous float32 [max_position, 64] */
  int64_t q_head_padded;     /* 0, 8, 16, 32, 64, 128 */
  bool keep_q_unrotated;     /* apply_q_rope = false */
  bool q_inplace;
  int64_t compress_ratio; /* with q NULL: 1 or 2; 0 means 1 */
} nib_rope_insert_desc;
/* q_out (may be NULL when q is): bfloat16 [tokens, q_head_padded, 512], empty for 0; another handle
 * on q when in place. */
NIB_API nib_status nib_rope_insert_sized(nib_stream *stream, const nib_rope_insert_desc *desc,
                                         size_t desc_bytes, nib_tensor **q_out);
static inline nib_status nib_rope_insert(nib_stream *stream, const nib_rope_insert_desc *desc,
                                         nib_tensor **q_out) {
  return nib_rope_insert_sized(stream, desc, sizeof *desc, q_out);
}

/* quantization.swizzle_v_scales; out NULL: allocated. */
NIB_API nib_status nib_swizzle_v_scales(nib_stream *stream, nib_tensor *v_sf, nib_layout kv_layout,
                                        bool inverse, nib_tensor *out, nib_tensor **result);

/* quantization.nvfp4_quantize_paged_kv_cache. A given global_sf that is not positive and finite or
 * whose reciprocal is not, or an infinite element where none is given: that tensor's data and
 * scales are zeros, and a fault. */
typedef struct nib_quantize_cache_desc {
  /* float16 or bfloat16 HND [pages, heads, page_size, head_dim] or NHD */
  nib_tensor *k_cache, *v_cache;
  nib_layout kv_layout; /* note: the Lua function's default is HND */
  nib_4over6 nvfp4_4over6;
  bool has_k_global_sf, has_v_global_sf;
  nib_scale_source k_global_sf, v_global_sf;
} nib_quantize_cache_desc;
typedef struct nib_quantized_cache {
  nib_tensor *k, *v;             /* uint8 */
  nib_tensor *k_sf, *v_sf;       /* float8_e4m3fn, V's interleaved */
  nib_tensor *k_scale, *v_scale; /* float32 [1] */
} nib_quantized_cache;
NIB_API nib_status nib_quantize_cache_sized(nib_stream *stream, const nib_quantize_cache_desc *desc,
                                            size_t desc_bytes, nib_quantized_cache *out,
                                            size_t out_bytes);
static inline nib_status nib_quantize_cache(nib_stream *stream, const nib_quantize_cache_desc *desc,
                                            nib_quantized_cache *out) {
  return nib_quantize_cache_sized(stream, desc, sizeof *desc, out, sizeof *out);
}

/* mla.dequantize_cache: bfloat16 [n, 512] of the records in `slots` (int32 or int64 [n]). A slot
 * outside the cache gives a row of zeros, and a fault. */
NIB_API nib_status nib_mla_dequantize(nib_stream *stream, nib_tensor *cache, nib_tensor *slots,
                                      nib_tensor **rows);

/* rope_table: [max_position, 64], cos | sin of position * theta^(-2p/64), float32, float16 or
 * bfloat16. */
NIB_API nib_status nib_rope_table(nib_stream *stream, int64_t max_position, double theta,
                                  nib_dtype dtype, nib_tensor **out);

/* ---- Files --------------------------------------------------------------------------------- */

/* All fail with FILE when a file cannot be opened, read or written, with FORMAT when it is damaged
 * or of another kind. `as` is another dtype of the same size for the same bits, or NIB_DTYPE_NONE
 * for the file's own. Loading waits for the file, saving for the tensors; the deadline is seen
 * while bytes are read and written, too. A file is saved beside its place (as NAME.RANDOM.part) and
 * put there when it is whole: a save that fails leaves what was there. A file that is replaced
 * keeps its mode, and a symbolic link leads to the new one. A pipe or a device is written directly
 * (opening a pipe waits for a reader), and so is an existing file in a folder where no file can be
 * created. What is loaded must be a regular file. */

/* NumPy .npy. Loads f4 f2 f8 u1 i1 u2 i4 i8, and b1 (bool) as uint8, little endian, C or Fortran
 * order, versions 1 to 3 (f8 is rounded to float32); with `as` also i2 u4 u8 c8 and V1 V2 V4 V8
 * (ml_dtypes' bfloat16 is V2, its float8_e4m3fn V1), FORMAT without. Saves version 1.0, bfloat16 as
 * u2, float8_e4m3fn as u1. */
NIB_API nib_status nib_npy_load(nib_stream *stream, const char *path, nib_dtype as,
                                nib_tensor **out);
NIB_API nib_status nib_npy_parse(nib_stream *stream, const void *data, size_t bytes, nib_dtype as,
                                 nib_tensor **out);
NIB_API nib_status nib_npy_save(nib_tensor *tensor, const char *path);

/* Safetensors files: named tensors, of which each can be read alone. A file stays open until it is
 * closed. */
typedef struct nib_safetensors nib_safetensors;
typedef struct nib_safetensors_entry {
  const char *name;   /* UTF-8; it and `stored` live as long as the file is open */
  const char *stored; /* the file's name for the elements: "F32", "BF16", "F8_E4M3", "I16", ... */
  nib_dtype dtype;    /* what they are read as; NIB_DTYPE_NONE: no dtype holds them */
  int32_t ndim;
  int64_t shape[NIB_MAX_NDIM];
  uint64_t offset, bytes; /* in the file */
} nib_safetensors_entry;
/* Reads and checks the header (at most 100 MiB; at most 8 dimensions; the tensors fill the
 * file). */
NIB_API nib_status nib_safetensors_open(nib_runtime *runtime, const char *path,
                                        nib_safetensors **out);
NIB_API void nib_safetensors_close(nib_safetensors *file);
/* Entries are in the order of their bytes. NULL for an index that is none. */
NIB_API int32_t nib_safetensors_count(const nib_safetensors *file);
NIB_API const nib_safetensors_entry *nib_safetensors_at(const nib_safetensors *file, int32_t index);
/* The index of a name; with NULL, of the only tensor. INVALID, with the names in the message, if
 * there is none. */
NIB_API nib_status nib_safetensors_find(const nib_safetensors *file, const char *name,
                                        int32_t *index);
/* Loads F32 F16 BF16 F8_E4M3 U8 I8 U16 I32 I64, BOOL as uint8 and F64 rounded to float32; with `as`
 * also I16, U32, F8_E5M2, ... (F4 as uint8: two codes to a byte, the last dimension halved). FORMAT
 * for elements that no tensor holds. */
NIB_API nib_status nib_safetensors_read(nib_stream *stream, const nib_safetensors *file,
                                        int32_t index, nib_dtype as, nib_tensor **out);
/* Names are UTF-8, each once. Every tensor's bytes lie at a multiple of its element's size; equal
 * tensors give equal files. */
NIB_API nib_status nib_safetensors_save(nib_runtime *runtime, const char *path, int32_t count,
                                        const char *const *names, nib_tensor *const *tensors);

/* ---- Sharing with others ------------------------------------------------------------------- */

/* Contexts and streams of the host's; tensors on memory that the host, another library or another
 * API of the same GPU has allocated; and tensors of nibble's for them. Nothing is copied. Such
 * memory counts neither in nib_device_memory nor against memory_cap. The runtime orders its own
 * work on it. The host orders what the others do: by waiting, by events in a stream of theirs
 * (nib_stream_wrap), or by semaphores. */

/* The available GPU with that UUID. UNAVAILABLE if there is none. */
NIB_API nib_status nib_device_find_uuid(nib_runtime *runtime, const uint8_t uuid[16],
                                        nib_device **out);
/* Makes the device use a CUcontext of the host's instead of its GPU's primary one. The host must
 * not destroy the context before nib_runtime_close. INVALID if it is no context of this GPU, STATE
 * if the device is in use already. */
NIB_API nib_status nib_device_use_context(nib_device *device, void *context);

/* A stream around a CUstream of the host's: work of both sides runs in the order in which it is
 * queued. The CUstream is one of the device's context, and none of the driver's default streams.
 * The host must keep it until the stream is released, and until the end of a capture of it; nibble
 * never destroys it. INVALID on the CPU, for a handle that the driver does not know, and for one of
 * another context. */
NIB_API nib_status nib_stream_wrap(nib_device *device, void *handle, nib_stream **out);
/* The CUstream of a stream that is not released, for work of the host's own; NULL on the CPU. */
NIB_API void *nib_stream_handle(const nib_stream *stream);

/* Tells nibble that work of others which is already in `stream` writes the tensor: the host's own
 * in a wrapped stream, or what a wait for a semaphore stands for. Reads by the host and copies on
 * other streams then wait for it. Later work of the same stream comes after it anyway. INVALID for
 * a stream of another device; refused during a capture. */
NIB_API nib_status nib_tensor_written(nib_tensor *tensor, nib_stream *stream);

typedef struct nib_wrap_desc {
  nib_dtype dtype;
  int32_t ndim;
  const int64_t *shape;
  const int64_t *stride; /* in elements, >= 0; NULL: compact */
  void *data;            /* the first element, in the device's address space, aligned to its size */
  bool read_only;        /* nothing may write it */
  /* Called once, from inside a nib_ function, when no tensor, graph or queued work uses the memory
   * any more; at the latest by nib_runtime_close. It must not call nib_ functions. May be NULL. */
  void (*release)(void *user);
  void *user;
} nib_wrap_desc;
/* A tensor on the host's memory, which the host must keep allocated until `release` is called.
 * INVALID for an address that is not of the GPU. If it fails, `release` is never called. */
NIB_API nib_status nib_tensor_wrap_sized(nib_device *device, const nib_wrap_desc *desc,
                                         size_t desc_bytes, nib_tensor **out);
static inline nib_status nib_tensor_wrap(nib_device *device, const nib_wrap_desc *desc,
                                         nib_tensor **out) {
  return nib_tensor_wrap_sized(device, desc, sizeof *desc, out);
}

/* DLPack 1, for frameworks in the same process; nibble_dlpack.h has the structure. float8_e4m3fn is
 * DLPack's type of that name; packed E2M1 goes out as uint8 and comes in as uint8 or as
 * float4_e2m1fn of two lanes; bool comes in as uint8. Devices are the CPU, CUDA's (device_id N is
 * "cuda:N") and memory that CUDA has pinned.
 *
 * From a framework: the tensor owns `managed` from now on and calls its deleter as `release` above
 * is called. If it fails (another major version, a device or an element type that there is not,
 * negative strides), `managed` is still the caller's. Strides of dimensions of one element, and of
 * tensors of none, may be any numbers. On a GPU, pass nib_stream_handle(s) as `stream` to the
 * framework's __dlpack__: the contents are then valid for work that is queued on s.
 * nib_tensor_written(tensor, s) makes other streams wait, too. */
NIB_API nib_status nib_tensor_from_dlpack(nib_runtime *runtime,
                                          struct DLManagedTensorVersioned *managed,
                                          nib_tensor **out);
/* To a framework, which calls the deleter when its own work on the memory is done. The deleter may
 * be called on any thread, also after the runtime was closed: the memory (and a GPU's context)
 * stays until then. Before nib_runtime_close the memory is freed at the next nib_tick or
 * allocation. After it the deleter frees it at once, and may call the config's `allocate` and `log`
 * on its thread, perhaps on several at once: they must still be there (the Lua module's own runtime
 * has an `allocate` that ends with its state). Work that is queued already on the tensor's contents
 * comes first: on the CPU the call waits for it, on a GPU the consumer's stream does; not during a
 * capture. `consumer_stream` is as in __dlpack__: a CUstream, 1 for the default stream or 2 for the
 * thread's own; -1, on all devices: no order. */
NIB_API nib_status nib_tensor_to_dlpack(nib_tensor *tensor, intptr_t consumer_stream,
                                        struct DLManagedTensorVersioned **out);

/* File descriptors, between APIs and processes on one GPU (CUDA devices; INVALID on the CPU). A
 * descriptor that is given to nib_ is the runtime's when the function succeeds, and still the
 * caller's when it fails. */
typedef enum nib_fd_kind {
  NIB_FD_OPAQUE,  /* of a graphics API: Vulkan's VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT */
  NIB_FD_EXPORTED /* of nib_tensor_export, here or in another process */
} nib_fd_kind;
typedef struct nib_import_desc {
  nib_fd_kind kind;
  int fd;
  bool dedicated; /* made for one buffer or image alone: VkMemoryDedicatedAllocateInfo */
  uint64_t bytes; /* of the whole allocation: VkMemoryAllocateInfo's allocationSize,
                     nib_tensor_export's bytes */
} nib_import_desc;
/* All of the memory as a tensor uint8 [bytes], for narrow, reinterpret and view to cut up.
 * Releasing the last of its tensors, once their work is done, may make the driver wait for the
 * GPU's other work. */
NIB_API nib_status nib_tensor_import_sized(nib_device *device, const nib_import_desc *desc,
                                           size_t desc_bytes, nib_tensor **out);
static inline nib_status nib_tensor_import(nib_device *device, const nib_import_desc *desc,
                                           nib_tensor **out) {
  return nib_tensor_import_sized(device, desc, sizeof *desc, out);
}
/* As nib_tensor_create, in memory that nib_tensor_export can export. The driver rounds its size up
 * (to 2 MiB or so); nib_device_memory counts what was asked for. */
NIB_API nib_status nib_tensor_create_exportable(nib_device *device, nib_dtype dtype, int32_t ndim,
                                                const int64_t *shape, nib_tensor **out);
/* A new descriptor of the tensor's storage, the caller's to close or to give to another API, and
 * the allocation's size. The tensor begins at nib_tensor_offset_bytes. Others may keep the memory
 * after its tensors are gone. */
NIB_API nib_status nib_tensor_export(nib_tensor *tensor, int *fd, uint64_t *bytes);

/* A timeline semaphore of a graphics API on the same GPU: Vulkan's
 * VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT of a VK_SEMAPHORE_TYPE_TIMELINE. CUDA cannot
 * create such semaphores: the other API creates and exports all of them, also those that nibble
 * signals. */
NIB_API nib_status nib_semaphore_import(nib_device *device, int fd, nib_semaphore **out);
/* Queued waits and signals still happen. */
NIB_API void nib_semaphore_release(nib_semaphore *semaphore);
NIB_API nib_device *nib_semaphore_device(const nib_semaphore *semaphore);
/* wait: later work of the stream waits until the semaphore's value is at least `value`. signal: the
 * value becomes `value`, which must be larger than before, when all earlier work of the stream is
 * done. Refused during a capture: a graph's replays would repeat the value. An observer sees work
 * without accesses. */
NIB_API nib_status nib_semaphore_wait(nib_stream *stream, nib_semaphore *semaphore, uint64_t value);
NIB_API nib_status nib_semaphore_signal(nib_stream *stream, nib_semaphore *semaphore,
                                        uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
