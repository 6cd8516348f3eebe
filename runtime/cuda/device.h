/* What the files of the CUDA device share. */
#ifndef NIB_CUDA_DEVICE_H
#define NIB_CUDA_DEVICE_H

#include "../core/core.h"
#include "../../kernels/cuda/launch.h"
#include "driver.h"

/* A point in a stream: an event of the driver, which a nib_event and the stream's list of points share. */
struct nib_cuda_point {
  struct nib_cuda_point *next;  /* in the free list */
  struct nib_cuda_point *older; /* all points of the device */
  CUevent event;
  uint64_t ticket;
  int32_t references;
};

#define NIB_CUDA_POINTS 32

struct nib_cuda_stream {
  CUstream handle;                                /* NULL: given back to the host; points still tell of its work */
  uint64_t completed;                             /* tickets up to this one are known to be done */
  struct nib_cuda_point *points[NIB_CUDA_POINTS]; /* a ring of the newest points, in ascending order of tickets */
  uint32_t first, count;
  struct nib_cuda_call *calls; /* newest first */
  nib_status error;            /* atomic; of the first host function that failed since the last wait */
};

/* The device's data of a plan. */
struct nib_cuda_graph {
  struct nib_cuda_graph *next, *previous; /* all graphs of the device */
  CUgraph graph;
  CUgraphExec exec;
};

struct nib_cuda {
  struct nib_driver *driver;
  CUdevice ordinal;
  int32_t compute_capability;      /* 90 is 9.0 */
  CUcontext context, host_context; /* in use; given by the host, or NULL */
  CUmemoryPool pool;
  CUstream allocations, frees, copies;
  CUmodule modules[NIB_KERNEL_COUNT]; /* one for each file of kernels/cuda */
  CUfunction functions[NIB_KERNEL_COUNT][NIB_CUDA_MOST_ENTRIES];
  struct nib_cuda_point *free_points, *points;
  struct nib_cuda_graph *graphs;
  struct nib_cuda_semaphore *semaphores;
  struct nib_cuda_call *dropped;  /* host functions that were not called because the context was lost */
  struct nib_cuda_pinned *pinned; /* all blocks of host memory */
  uint32_t peers;                 /* a bit for each GPU that share_pool was called for */
  int32_t entered;                /* nested nib_cuda_enter */
  CUstreamCaptureMode mode;       /* of the caller's thread, to restore it */
  bool lost;                      /* the context had a fatal error; only a new process gets a new one */
  char description[96], reason[192];
  char name[16];
};

extern const struct nib_cuda_kernel *const nib_cuda_kernels[NIB_KERNEL_COUNT]; /* images.c */

static inline struct nib_cuda *nib_cuda_of(const nib_device *device) { return device->impl; }

/* ---- context.c ---- */
/* Make the device's context current, and the caller's again. In between, the thread is in relaxed capture mode, so that
 * a capture of another device, runtime or the host on this thread does not make the driver refuse calls. For a capture
 * of this device the runtime itself avoids such calls. */
bool nib_cuda_enter(nib_device *device);
void nib_cuda_leave(nib_device *device);
/* Converts the driver's result to a status and sets the message. Notes a lost context. `what` is the name of the call.
 */
nib_status nib_cuda_check(nib_device *device, CUresult result, const char *what);
nib_status nib_cuda_lost(nib_device *device);

/* ---- memory.c ---- */
nib_status nib_cuda_memory_allocate(nib_device *device, size_t bytes, void **out);
bool nib_cuda_memory_free(nib_device *device, void *data, size_t bytes, struct nib_uses *uses);
nib_status nib_cuda_upload(nib_device *device, void *destination, const void *source, size_t bytes);
nib_status nib_cuda_download(nib_device *device, void *destination, const void *source, size_t bytes);

/* ---- stream.c ---- */
nib_status nib_cuda_stream_open(nib_stream *stream);
nib_status nib_cuda_stream_wrap(nib_stream *stream, void *handle);
void nib_cuda_stream_unwrap(nib_stream *stream);
void *nib_cuda_stream_handle(const nib_stream *stream);
void nib_cuda_stream_close(nib_stream *stream);
void nib_cuda_free_dropped(nib_device *device); /* call it after the context is destroyed */
nib_status nib_cuda_launch(nib_stream *stream, const struct nib_work *work);
nib_status nib_cuda_call(nib_stream *stream, nib_status (*function)(void *user), void *user);
nib_status nib_cuda_event_record(nib_stream *stream, nib_event *event);
nib_status nib_cuda_event_wait(nib_stream *stream, nib_event *event);
nib_status nib_cuda_event_elapsed(nib_event *start, nib_event *end, double *milliseconds);
void nib_cuda_event_destroy(nib_event *event);
bool nib_cuda_reached(nib_stream *stream, uint64_t ticket);
nib_status nib_cuda_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us);
nib_status nib_cuda_take_error(nib_stream *stream);
/* Makes later work of `follower`, a stream of `device`, wait for the work of `stream` up to the ticket. */
nib_status nib_cuda_follow(nib_device *device, CUstream follower, nib_stream *stream, uint64_t ticket);
nib_status nib_cuda_follow_stream(nib_stream *stream, nib_stream *other, uint64_t ticket);

/* ---- graph.c ---- */
nib_status nib_cuda_capture_begin(nib_stream *stream, nib_capture_mode mode);
nib_status nib_cuda_capture_end(nib_stream *stream, struct nib_plan *plan);
nib_status nib_cuda_plan_prepare(nib_device *device, struct nib_plan *plan, struct nib_plan *replaced);
nib_status nib_cuda_plan_launch(nib_stream *stream, struct nib_plan *plan);
void nib_cuda_plan_destroy(struct nib_plan *plan);
nib_status nib_cuda_plan_dot(struct nib_plan *plan, char *text, size_t size, size_t *needed);
void nib_cuda_graph_destroy(nib_device *device, struct nib_cuda_graph *graph); /* the context is current, or lost */

/* ---- copy.c ---- */
nib_status nib_cuda_pinned_allocate(nib_device *device, size_t bytes, void **out);
void nib_cuda_pinned_free(nib_device *device, void *data);
void nib_cuda_pinned_close(nib_device *device); /* the context is current */
nib_status nib_cuda_transfer(nib_stream *stream, const struct nib_transfer *move);

/* ---- external.c ---- */
nib_status nib_cuda_memory_check(nib_device *device, const char *operation, const void *data);
nib_status nib_cuda_lead_consumer(nib_device *device, intptr_t consumer, const struct nib_uses *uses);
nib_status nib_cuda_shared_create(nib_device *device, size_t bytes, void **data, void **shared);
nib_status nib_cuda_shared_import(nib_device *device, const nib_import_desc *desc, void **data, void **shared);
nib_status nib_cuda_shared_export(nib_device *device, void *shared, int *fd, uint64_t *bytes);
void nib_cuda_shared_free(nib_device *device, void *shared);
nib_status nib_cuda_semaphore_import(nib_device *device, int fd, void **out);
void nib_cuda_semaphore_destroy(nib_device *device, void *semaphore);
void nib_cuda_semaphores_close(nib_device *device); /* the context is current */
nib_status nib_cuda_semaphore_wait(nib_stream *stream, void *semaphore, uint64_t value);
nib_status nib_cuda_semaphore_signal(nib_stream *stream, void *semaphore, uint64_t value);

/* ---- user_kernels.c ---- */
nib_status nib_cuda_compile(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                            char **image, size_t *bytes);
nib_status nib_cuda_module_load(nib_device *device, const void *image, size_t bytes, void **out);
void nib_cuda_module_unload(nib_device *device, void *module);
nib_status nib_cuda_function_find(nib_device *device, void *module, const char *name, void **function,
                                  nib_kernel_attributes *attributes, struct nib_params_layout *layout);

/* ---- images.c ---- */
/* The headers that user kernels can include, for NVRTC. */
extern const int nib_cuda_header_count;
extern const char *const nib_cuda_header_names[], *const nib_cuda_header_texts[];

#endif
