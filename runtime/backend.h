/* What a device does for the runtime: groups of functions that it fills in. The rest is the same on every device.
 *
 * The thread that uses the runtime calls them, with arguments that are checked. The runtime counts a stream's work by
 * tickets: it increments stream->submitted after each launch, call, events.record, events.wait and graphs.launch that
 * succeeded, and asks `reached` and `wait` about tickets. A function that fails sets the message with nib_fail. */
#ifndef NIB_BACKEND_H
#define NIB_BACKEND_H

#include "../kernels/params.h"
#include "nibble_tools.h"

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
  const nib_attribute *attributes; /* what observers are told beside the tensors; good during the call */
  int32_t attribute_count;
};

/* Where a user kernel's parameters lie in its argument buffer; count -1: the driver cannot tell. */
struct nib_params_layout {
  int32_t count;
  size_t bytes[NIB_MAX_ARGUMENTS], offset[NIB_MAX_ARGUMENTS];
};

/* Memory of the device. */
struct nib_backend_memory {
  /* Returns memory that every stream can use at once, or NIB_MEMORY. */
  nib_status (*allocate)(nib_device *device, size_t bytes, void **out);
  /* Frees it behind `uses`. False: it cannot yet, call it again when they are done. Where the memory goes only later,
   * it replaces `uses` by those that will be done then. */
  bool (*free)(nib_device *device, void *data, size_t bytes, struct nib_uses *uses);
};

/* Streams and the work in them. */
struct nib_backend_streams {
  /* Fills in stream->impl, for a stream of stream->priority. */
  nib_status (*open)(nib_stream *stream);
  /* Keeps a released stream, which may be handed out again, as cheap as it can be. */
  void (*retire)(nib_stream *stream);
  /* Gives it back; its work is done. */
  void (*close)(nib_stream *stream);
  /* Queues work. A user's kernel comes only with `modules`, a transfer only with `pinned`. */
  nib_status (*launch)(nib_stream *stream, const struct nib_work *work);
  /* Queues a function of the host, whose error take_error returns. */
  nib_status (*call)(nib_stream *stream, nib_status (*function)(void *user), void *user);
  /* Whether the work up to the ticket is done. Never waits. */
  bool (*reached)(nib_stream *stream, uint64_t ticket);
  /* Waits for that, timeout_us >= 0: NIB_OK, NIB_TIMEOUT or NIB_LOST. */
  nib_status (*wait)(nib_stream *stream, uint64_t ticket, int64_t timeout_us);
  /* Returns the first error of the stream's functions since the last call. */
  nib_status (*take_error)(nib_stream *stream);
};

/* Events. */
struct nib_backend_events {
  /* Marks the place behind the stream's work so far, and sets event->time_ns when it is reached. */
  nib_status (*record)(nib_stream *stream, nib_event *event);
  /* Lets later work of the stream wait for an event of the same kind of device. */
  nib_status (*wait)(nib_stream *stream, nib_event *event);
  /* The time between two events that are reached. */
  nib_status (*elapsed)(nib_event *start, nib_event *end, double *milliseconds);
  /* Gives event->impl back. */
  void (*destroy)(nib_event *event);
};

/* Captures and graphs. */
struct nib_backend_graphs {
  /* The stream's work is recorded from now on; with captures_natively by the device too. */
  nib_status (*begin)(nib_stream *stream, nib_capture_mode mode);
  /* Ends that, and keeps in plan->impl what the device recorded; plan NULL: drops it. */
  nib_status (*end)(nib_stream *stream, struct nib_plan *plan);
  /* Makes the plan ready to be launched; it may take over parts of the plan that it replaces (may be NULL). */
  nib_status (*prepare)(nib_device *device, struct nib_plan *plan, struct nib_plan *replaced);
  /* Queues one replay of it. */
  nib_status (*launch)(nib_stream *stream, struct nib_plan *plan);
  /* Gives plan->impl back; may be called more than once. */
  void (*destroy)(struct nib_plan *plan);
  /* Writes the driver's own picture, as nib_graph_dot writes its text. May be NULL. */
  nib_status (*dot)(struct nib_plan *plan, char *text, size_t size, size_t *needed);
};

/* Copies to and from memory that the host does not reach. */
struct nib_backend_copies {
  /* Copies from host memory into memory that no work has used; done on return. */
  nib_status (*upload)(nib_device *device, void *destination, const void *source, size_t bytes);
  /* Copies to host memory; the writers are done already, and so is the copy on return. */
  nib_status (*download)(nib_device *device, void *destination, const void *source, size_t bytes);
  /* Lets later work of the stream wait for another's (of the same kind of device) up to the ticket. Takes no ticket. */
  nib_status (*follow)(nib_stream *stream, nib_stream *other, uint64_t ticket);
};

/* Host memory that all devices of this kind copy to and from directly. */
struct nib_backend_pinned {
  nib_status (*allocate)(nib_device *device, size_t bytes, void **out);
  void (*free)(nib_device *device, void *data); /* no work uses it any more */
};

/* Ending early: devices without this finish what is queued. */
struct nib_backend_dropping {
  /* Nobody will see the results of queued work any more: kernels may be left out, or stopped in the middle. */
  void (*abandon)(nib_device *device);
  /* Leaves out the stream's kernels and replays behind the ticket `after`, as far as they are not done; tickets are
   * reached all the same. Returns the ticket of the first, 0 if there is none. */
  uint64_t (*drop)(nib_stream *stream, uint64_t after);
};

/* Kernels of users. */
struct nib_backend_modules {
  /* Compiles source into an image that the caller frees with nib_free. */
  nib_status (*compile)(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                        char **image, size_t *bytes);
  /* Loads an image, behind whose bytes there is a 0. */
  nib_status (*load)(nib_device *device, const void *image, size_t bytes, void **out);
  void (*unload)(nib_device *device, void *module); /* no work uses it any more */
  /* Finds a kernel by its name, and what is known of it. */
  nib_status (*find)(nib_device *device, void *module, const char *name, void **function,
                     nib_kernel_attributes *attributes, struct nib_params_layout *layout);
};

/* Memory and timeline semaphores that other APIs and processes reach by file descriptors. */
struct nib_backend_sharing {
  /* Allocates memory that can be exported. */
  nib_status (*create)(nib_device *device, size_t bytes, void **data, void **shared);
  /* Maps the memory of a descriptor, which stays the caller's. */
  nib_status (*import)(nib_device *device, const nib_import_desc *desc, void **data, void **shared);
  /* Returns a new descriptor, which is the caller's. */
  nib_status (*export)(nib_device *device, void *shared, int *fd, uint64_t *bytes);
  void (*free)(nib_device *device, void *shared); /* no work uses it any more */
  /* Takes the semaphore of a descriptor, which stays the caller's. */
  nib_status (*import_semaphore)(nib_device *device, int fd, void **out);
  void (*destroy_semaphore)(nib_device *device, void *semaphore); /* no work uses it any more */
  /* Lets later work of the stream wait until the semaphore has the value, or sets it behind the work so far. */
  nib_status (*wait_semaphore)(nib_stream *stream, void *semaphore, uint64_t value);
  nib_status (*signal_semaphore)(nib_stream *stream, void *semaphore, uint64_t value);
};

/* What the host's program and other frameworks in it have made with the driver. */
struct nib_backend_foreign {
  /* Whether an address is memory of this device. */
  nib_status (*check_memory)(nib_device *device, const char *operation, const void *data);
  /* Lets later work of another framework's stream, as DLPack numbers them, wait for all uses. */
  nib_status (*lead_consumer)(nib_device *device, intptr_t consumer, const struct nib_uses *uses);
  /* Takes a context of the host for `open` to use. */
  nib_status (*use_context)(nib_device *device, void *context);
  /* Puts the stream on a handle of the host, in place of an old one whose work is done. */
  nib_status (*wrap_stream)(nib_stream *stream, void *handle);
  /* Forgets the handle, which the host may destroy from now on; the stream's tickets can still be waited for. */
  void (*unwrap_stream)(nib_stream *stream);
  /* The driver's handle of a stream. */
  void *(*stream_handle)(const nib_stream *stream);
};

struct nib_backend {
  const char *name;
  bool host_memory;       /* the host reads and writes the device's memory directly */
  bool captures_natively; /* the device sees launches and events during a capture too, and builds the graph itself */
  /* Called before the first use, so that a machine's other GPUs cost nothing. May be called again. */
  nib_status (*open)(nib_device *device);
  /* Gives everything back. All work is done, streams and memory are gone. */
  void (*close)(nib_device *device);
  struct nib_backend_memory memory;
  struct nib_backend_streams streams;
  struct nib_backend_events events;
  struct nib_backend_graphs graphs;
  /* What not every device has: NULL without it. */
  const struct nib_backend_copies *copies; /* NULL with host_memory */
  const struct nib_backend_pinned *pinned;
  const struct nib_backend_dropping *dropping;
  const struct nib_backend_modules *modules;
  const struct nib_backend_sharing *sharing;
  const struct nib_backend_foreign *foreign;
};

/* The devices, called by name from nib_runtime_create alone. Fills in devices[0]. */
nib_status nib_cpu_open(nib_runtime *rt, nib_device *device);
/* Adds an entry for each GPU, or one that says why there is none. In builds with CUDA. */
nib_status nib_cuda_probe(nib_runtime *rt);

#endif
