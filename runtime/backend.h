/* The table of functions that a device fills in. Everything above it is the same on every device.
 *
 * Calls come from the thread that uses the runtime, with arguments already checked. Work of a stream is counted by
 * tickets: the runtime increments stream->submitted after each successful launch, call, event_record, event_wait and
 * plan_launch, and asks `reached` and `wait` about tickets. A function that fails sets the message with nib_fail. */
#ifndef NIB_BACKEND_H
#define NIB_BACKEND_H

#include "nibble_tools.h"
#include "../kernels/params.h"

struct nib_uses;
struct nib_plan;

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

struct nib_backend {
  const char *name;
  bool host_memory;       /* the host can read and write the device's memory directly */
  bool captures_natively; /* launches and events reach the device during a capture too; plans are built by it */

  /* Called before the first use, so that a machine's other GPUs cost nothing; may be NULL. */
  nib_status (*device_open)(nib_device *device);
  /* Nobody will see the results of queued work any more: kernels may be dropped, also in the middle. May be NULL. */
  void (*abandon)(nib_device *device);
  /* Drops the stream's kernels and replays behind the ticket `after`, as far as they are not done; tickets are reached
   * all the same. Returns the first one's ticket, 0 if there is none. NULL where the device finishes what it has. */
  uint64_t (*drop)(nib_stream *stream, uint64_t after);
  void (*device_close)(nib_device *device); /* all work is done; streams and memory are already given back */

  nib_status (*memory_allocate)(nib_device *device, size_t bytes, void **out);
  /* false: not yet (`uses` are not done and the device cannot order the free behind them). `uses` that were done and
   * are no longer say when the memory will be free. */
  bool (*memory_free)(nib_device *device, void *data, size_t bytes, struct nib_uses *uses);
  /* Host memory that this and all other devices of its kind copy to and from directly. NULL: there is none such. */
  nib_status (*pinned_allocate)(nib_device *device, size_t bytes, void **out);
  void (*pinned_free)(nib_device *device, void *data);

  /* Whether memory of the host's is what this device reaches; NULL: there is no telling. */
  nib_status (*memory_check)(nib_device *device, const char *operation, const void *data);
  /* Memory and timeline semaphores that others reach by file descriptors; NULL where there are none. An import leaves
   * the caller's descriptor alone; shared_free and semaphore_destroy come when nothing uses them any more. */
  nib_status (*shared_create)(nib_device *device, size_t bytes, void **data, void **shared);
  nib_status (*shared_import)(nib_device *device, const nib_import_desc *desc, void **data, void **shared);
  nib_status (*shared_export)(nib_device *device, void *shared, int *fd, uint64_t *bytes);
  void (*shared_free)(nib_device *device, void *shared);
  nib_status (*semaphore_import)(nib_device *device, int fd, void **out);
  void (*semaphore_destroy)(nib_device *device, void *semaphore);
  nib_status (*semaphore_wait)(nib_stream *stream, void *semaphore, uint64_t value);
  nib_status (*semaphore_signal)(nib_stream *stream, void *semaphore, uint64_t value);
  /* A stream of another framework's, as DLPack numbers them, comes after all uses; NULL with host_memory. */
  nib_status (*lead_consumer)(nib_device *device, intptr_t consumer, const struct nib_uses *uses);

  /* A context of the host's for device_open to use, and streams of the host's; NULL where there are none.
   * stream_unwrap: the host may destroy the handle from now on, so that the rest of the stream's work is told apart
   * without it. */
  nib_status (*use_context)(nib_device *device, void *context);
  nib_status (*stream_wrap)(nib_stream *stream,
                            void *handle); /* takes the place of an old handle, whose work is done */
  void (*stream_unwrap)(nib_stream *stream);
  void *(*stream_handle)(const nib_stream *stream);

  nib_status (*stream_open)(nib_stream *stream);
  void (*stream_retire)(
    nib_stream *stream); /* released: it may come back, but when it is idle it should cost little; may be NULL */
  void (*stream_close)(nib_stream *stream);

  /* A user's kernel only if module_load is there, a transfer only if pinned_allocate is. */
  nib_status (*launch)(nib_stream *stream, const struct nib_work *work);
  nib_status (*call)(nib_stream *stream, nib_status (*function)(void *user), void *user);
  nib_status (*upload)(nib_device *device, void *destination, const void *source,
                       size_t bytes); /* done on return, in no order */
  nib_status (*download)(nib_device *device, void *destination, const void *source,
                         size_t bytes); /* writers are done */

  /* Kernels of the user's own; NULL where there are none. `image` ends with a 0 behind its bytes. compile's image
   * belongs to the caller, who frees it with nib_free. */
  nib_status (*compile)(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                        char **image, size_t *bytes);
  nib_status (*module_load)(nib_device *device, const void *image, size_t bytes, void **out);
  void (*module_unload)(nib_device *device, void *module);
  nib_status (*function_find)(nib_device *device, void *module, const char *name, void **function,
                              nib_kernel_attributes *attributes, struct nib_params_layout *layout);

  nib_status (*event_record)(nib_stream *stream, nib_event *event);
  nib_status (*event_wait)(nib_stream *stream, nib_event *event); /* of the same kind of device */
  /* Later work of the stream comes after another's (of the same kind of device) up to the ticket; counted by no
   * ticket. */
  nib_status (*follow)(nib_stream *stream, nib_stream *other, uint64_t ticket);
  nib_status (*event_elapsed)(nib_event *start, nib_event *end, double *milliseconds);
  void (*event_destroy)(nib_event *event);

  bool (*reached)(nib_stream *stream, uint64_t ticket);
  nib_status (*wait)(nib_stream *stream, uint64_t ticket, int64_t timeout_us); /* 0 or more; OK or TIMEOUT, LOST */
  nib_status (*take_error)(nib_stream *stream);                                /* the stream's error, once */

  nib_status (*capture_begin)(nib_stream *stream, nib_capture_mode mode);
  nib_status (*capture_end)(nib_stream *stream, struct nib_plan *plan); /* plan NULL: forget it */
  nib_status (*plan_prepare)(nib_device *device, struct nib_plan *plan,
                             struct nib_plan *replaced); /* replaced may be NULL */
  nib_status (*plan_launch)(nib_stream *stream, struct nib_plan *plan);
  void (*plan_destroy)(struct nib_plan *plan);
  /* The driver's own picture of it, as nib_graph_dot gives its text; NULL where the driver has none. */
  nib_status (*plan_dot)(struct nib_plan *plan, char *text, size_t size, size_t *needed);
};

/* Fills devices[0]. */
nib_status nib_cpu_open(nib_runtime *rt, nib_device *device);
/* Adds an entry for each GPU, or one that says why there is none. In builds with CUDA. */
nib_status nib_cuda_probe(nib_runtime *rt);

#endif
