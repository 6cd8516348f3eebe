/* The interface of a device: groups of functions that it implements. All else is the same on every device.
 *
 * The thread that uses the runtime calls them with checked arguments. The runtime counts a stream's work with tickets:
 * it increments stream->submitted after each successful launch, call, events.record, events.wait and graphs.launch, and
 * passes tickets to `reached` and `wait`. A function that fails sets the message with nib_fail. */
#ifndef NIB_BACKEND_H
#define NIB_BACKEND_H

#include "../kernels/params.h"
#include "nibble_tools.h"

struct nib_uses;
struct nib_plan;

/* A copy for a GPU's copy engine, between the GPU and pinned memory, or from another GPU. */
struct nib_transfer {
  void *destination;
  const void *source;
  size_t bytes;
  nib_device *from; /* the other GPU, or NULL */
};

/* Work: one of our kernels, whose launch the device derives from the params, a user kernel, or a transfer. */
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
  const nib_attribute *attributes; /* for observers; valid during the call */
  int32_t attribute_count;
};

/* The offsets of a user kernel's parameters in its argument buffer; count -1: not known to the driver. */
struct nib_params_layout {
  int32_t count;
  size_t bytes[NIB_MAX_ARGUMENTS], offset[NIB_MAX_ARGUMENTS];
};

/* Memory of the device. */
struct nib_backend_memory {
  /* Returns memory that every stream can use at once, or NIB_MEMORY. */
  nib_status (*allocate)(nib_device *device, size_t bytes, void **out);
  /* Frees it after `uses`. False: it cannot do so yet; call it again when they are done. If the memory is freed later,
   * it replaces `uses` by those that are done then. */
  bool (*free)(nib_device *device, void *data, size_t bytes, struct nib_uses *uses);
};

/* Streams and the work in them. */
struct nib_backend_streams {
  /* Fills in stream->impl, for a stream of stream->priority. */
  nib_status (*open)(nib_stream *stream);
  /* Reduces the cost of a released stream, which may be reused. */
  void (*retire)(nib_stream *stream);
  /* Frees stream->impl. The stream's work is done. */
  void (*close)(nib_stream *stream);
  /* Queues work. User kernels need `modules`, transfers need `pinned`. */
  nib_status (*launch)(nib_stream *stream, const struct nib_work *work);
  /* Queues a function of the host. take_error returns its error. */
  nib_status (*call)(nib_stream *stream, nib_status (*function)(void *user), void *user);
  /* Whether the work up to the ticket is done. Never waits. */
  bool (*reached)(nib_stream *stream, uint64_t ticket);
  /* Waits for the ticket: NIB_OK, NIB_TIMEOUT or NIB_LOST. timeout_us >= 0. */
  nib_status (*wait)(nib_stream *stream, uint64_t ticket, int64_t timeout_us);
  /* Returns the first error of the stream's functions since the last call. */
  nib_status (*take_error)(nib_stream *stream);
};

/* Events. */
struct nib_backend_events {
  /* Records an event after the stream's work so far. Sets event->time_ns when it is reached. */
  nib_status (*record)(nib_stream *stream, nib_event *event);
  /* Makes later work of the stream wait for an event of the same kind of device. */
  nib_status (*wait)(nib_stream *stream, nib_event *event);
  /* The time between two events that are reached. */
  nib_status (*elapsed)(nib_event *start, nib_event *end, double *milliseconds);
  /* Frees event->impl. */
  void (*destroy)(nib_event *event);
};

/* Captures and graphs. */
struct nib_backend_graphs {
  /* Begins a capture of the stream's work; with captures_natively the device records it, too. */
  nib_status (*begin)(nib_stream *stream, nib_capture_mode mode);
  /* Ends the capture and stores what the device recorded in plan->impl; plan NULL: drops it. */
  nib_status (*end)(nib_stream *stream, struct nib_plan *plan);
  /* Prepares the plan for launches. It may take over parts of the plan that it replaces, which may be NULL. */
  nib_status (*prepare)(nib_device *device, struct nib_plan *plan, struct nib_plan *replaced);
  /* Queues a replay. */
  nib_status (*launch)(nib_stream *stream, struct nib_plan *plan);
  /* Frees plan->impl; may be called more than once. */
  void (*destroy)(struct nib_plan *plan);
  /* Writes the driver's description of the graph, with the arguments of nib_graph_dot. May be NULL. */
  nib_status (*dot)(struct nib_plan *plan, char *text, size_t size, size_t *needed);
};

/* Copies to and from memory that the host cannot access. */
struct nib_backend_copies {
  /* Copies from host memory to memory that no work has used. The copy is done on return. */
  nib_status (*upload)(nib_device *device, void *destination, const void *source, size_t bytes);
  /* Copies to host memory. The work that writes the source is done; the copy is done on return. */
  nib_status (*download)(nib_device *device, void *destination, const void *source, size_t bytes);
  /* Makes later work of the stream wait for another stream's work up to the ticket; both are of the same kind of
   * device. Uses no ticket. */
  nib_status (*follow)(nib_stream *stream, nib_stream *other, uint64_t ticket);
};

/* Host memory that all devices of this kind can copy directly. */
struct nib_backend_pinned {
  nib_status (*allocate)(nib_device *device, size_t bytes, void **out);
  void (*free)(nib_device *device, void *data); /* no work uses it any more */
};

/* Dropping queued work. Devices without this finish it. */
struct nib_backend_dropping {
  /* The results of queued work are not needed any more: kernels may be skipped, or stopped in the middle. */
  void (*abandon)(nib_device *device);
  /* Drops the stream's kernels and replays after the ticket `after` that are not done. Their tickets are still reached.
   * Returns the first dropped ticket, or 0. */
  uint64_t (*drop)(nib_stream *stream, uint64_t after);
};

/* User kernels. */
struct nib_backend_modules {
  /* Compiles source to an image that the caller frees with nib_free. */
  nib_status (*compile)(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                        char **image, size_t *bytes);
  /* Loads an image. A zero byte follows its bytes. */
  nib_status (*load)(nib_device *device, const void *image, size_t bytes, void **out);
  void (*unload)(nib_device *device, void *module); /* no work uses it any more */
  /* Finds a kernel by name, and its attributes. */
  nib_status (*find)(nib_device *device, void *module, const char *name, void **function,
                     nib_kernel_attributes *attributes, struct nib_params_layout *layout);
};

/* Memory and timeline semaphores that are shared with other APIs and processes by file descriptors. */
struct nib_backend_sharing {
  /* Allocates memory that can be exported. */
  nib_status (*create)(nib_device *device, size_t bytes, void **data, void **shared);
  /* Maps the memory of a descriptor; the caller keeps the descriptor. */
  nib_status (*import)(nib_device *device, const nib_import_desc *desc, void **data, void **shared);
  /* Returns a new descriptor; the caller owns it. */
  nib_status (*export)(nib_device *device, void *shared, int *fd, uint64_t *bytes);
  void (*free)(nib_device *device, void *shared); /* no work uses it any more */
  /* Imports the semaphore of a descriptor; the caller keeps the descriptor. */
  nib_status (*import_semaphore)(nib_device *device, int fd, void **out);
  void (*destroy_semaphore)(nib_device *device, void *semaphore); /* no work uses it any more */
  /* Makes later work of the stream wait until the semaphore has the value; or sets it after the work so far. */
  nib_status (*wait_semaphore)(nib_stream *stream, void *semaphore, uint64_t value);
  nib_status (*signal_semaphore)(nib_stream *stream, void *semaphore, uint64_t value);
};

/* Objects that the host and other frameworks in its process created with the driver. */
struct nib_backend_foreign {
  /* Checks that an address is memory of this device. */
  nib_status (*check_memory)(nib_device *device, const char *operation, const void *data);
  /* Makes later work of another framework's stream, in DLPack's numbering, wait for all uses. */
  nib_status (*lead_consumer)(nib_device *device, intptr_t consumer, const struct nib_uses *uses);
  /* Sets the host's context that `open` uses. */
  nib_status (*use_context)(nib_device *device, void *context);
  /* Gives the stream a handle of the host. The work on its old handle is done. */
  nib_status (*wrap_stream)(nib_stream *stream, void *handle);
  /* Drops the handle, which the host may then destroy. Waits for the stream's tickets still work. */
  void (*unwrap_stream)(nib_stream *stream);
  /* The driver's handle of a stream. */
  void *(*stream_handle)(const nib_stream *stream);
};

struct nib_backend {
  const char *name;
  bool host_memory;       /* the host can access the device's memory */
  bool captures_natively; /* launches and events go to the device during a capture, too; it builds the graph itself */
  /* Opens the device, before its first use, so that unused GPUs cost nothing. May be called again. */
  nib_status (*open)(nib_device *device);
  /* Frees everything. All work is done, streams and memory are gone. */
  void (*close)(nib_device *device);
  struct nib_backend_memory memory;
  struct nib_backend_streams streams;
  struct nib_backend_events events;
  struct nib_backend_graphs graphs;
  /* Optional groups; NULL if the device does not have them. */
  const struct nib_backend_copies *copies; /* NULL with host_memory */
  const struct nib_backend_pinned *pinned;
  const struct nib_backend_dropping *dropping;
  const struct nib_backend_modules *modules;
  const struct nib_backend_sharing *sharing;
  const struct nib_backend_foreign *foreign;
};

/* The devices. Only nib_runtime_create calls these functions. Fills in devices[0]. */
nib_status nib_cpu_open(nib_runtime *rt, nib_device *device);
/* Adds an entry for each GPU, or one entry with the reason why there is none. In builds with CUDA. */
nib_status nib_cuda_probe(nib_runtime *rt);

#endif
