/* Streams and events of the CUDA device. */
#define _POSIX_C_SOURCE 200809L
#include <string.h>
#include <time.h>

#include "device.h"

static struct nib_cuda_stream *stream_of(const nib_stream *stream) { return stream->impl; }

enum nib_cuda_call_state { CALL_QUEUED, CALL_RUNNING, CALL_DONE, CALL_DROPPED };

struct nib_cuda_call {
  struct nib_cuda_call *next;
  struct nib_cuda_stream *stream;
  nib_status (*function)(void *user);
  void *user;
  enum nib_cuda_call_state state; /* atomic */
};

/* ---- Points ---------------------------------------------------------------------------------------------------- */

static void point_release(nib_device *device, struct nib_cuda_point *point) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (--point->references > 0) return;
  point->next = cuda->free_points;
  cuda->free_points = point;
}

static struct nib_cuda_point *point_create(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_point *point = cuda->free_points;
  if (point) {
    cuda->free_points = point->next;
  } else {
    point = nib_allocate_zero(device->runtime, sizeof *point);
    if (!point) {
      nib_fail_memory(device->runtime, "event", sizeof *point);
      return NULL;
    }
    CUresult result = cuda->driver->EventCreate(&point->event, CU_EVENT_DEFAULT);
    if (result != CUDA_SUCCESS) {
      nib_cuda_check(device, result, "cuEventCreate");
      nib_free(device->runtime, point, sizeof *point);
      return NULL;
    }
    point->older = cuda->points;
    cuda->points = point;
  }
  point->references = 1;
  return point;
}

/* Removes points that are done from the ring; they complete in order. An error of the driver says nothing about them.
 */
static CUresult poll_points(nib_stream *stream) {
  struct nib_cuda_stream *own = stream_of(stream);
  struct nib_cuda *cuda = nib_cuda_of(stream->device);
  while (own->count > 0) {
    struct nib_cuda_point *point = own->points[own->first];
    CUresult result = cuda->driver->EventQuery(point->event);
    if (result != CUDA_SUCCESS) return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
    if (point->ticket > own->completed) own->completed = point->ticket;
    own->first = (own->first + 1) % NIB_CUDA_POINTS;
    own->count--;
    point_release(stream->device, point);
  }
  return CUDA_SUCCESS;
}

/* Records a point after the stream's work so far. The ring keeps it; the caller may retain it. Returns NULL and sets
 * the message if there is no event. The context is current. */
static struct nib_cuda_point *point_record(nib_stream *stream, uint64_t ticket) {
  struct nib_cuda_stream *own = stream_of(stream);
  struct nib_cuda *cuda = nib_cuda_of(stream->device);
  if (own->count == NIB_CUDA_POINTS) poll_points(stream);
  if (own->count == NIB_CUDA_POINTS) { /* drop the oldest point; a later one covers its ticket, too */
    point_release(stream->device, own->points[own->first]);
    own->first = (own->first + 1) % NIB_CUDA_POINTS;
    own->count--;
  }
  struct nib_cuda_point *point = point_create(stream->device);
  if (!point) return NULL;
  CUresult result = cuda->driver->EventRecord(point->event, own->handle);
  if (result != CUDA_SUCCESS) {
    nib_cuda_check(stream->device, result, "cuEventRecord");
    point_release(stream->device, point);
    return NULL;
  }
  point->ticket = ticket;
  own->points[(own->first + own->count++) % NIB_CUDA_POINTS] = point;
  return point;
}

/* ---- Streams --------------------------------------------------------------------------------------------------- */

nib_status nib_cuda_stream_open(nib_stream *stream) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  struct nib_cuda_stream *own = nib_allocate_zero(device->runtime, sizeof *own);
  if (!own) return nib_fail_memory(device->runtime, "stream", sizeof *own);
  if (!nib_cuda_enter(device)) {
    nib_free(device->runtime, own, sizeof *own);
    return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  }
  /* A non-blocking stream, which does not synchronize with the legacy stream. */
  CUresult result = cuda->driver->StreamCreateWithPriority(&own->handle, CU_STREAM_NON_BLOCKING, stream->priority);
  nib_cuda_leave(device);
  if (result != CUDA_SUCCESS) {
    nib_free(device->runtime, own, sizeof *own);
    return nib_cuda_check(device, result, "cuStreamCreateWithPriority");
  }
  stream->impl = own;
  return NIB_OK;
}

void *nib_cuda_stream_handle(const nib_stream *stream) { return stream->impl ? stream_of(stream)->handle : NULL; }

/* Checks a handle of the host with the driver. */
static nib_status check_handle(nib_device *device, CUstream handle) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUcontext context = NULL;
  if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
    return nib_fail(device->runtime, NIB_INVALID,
                    "stream: handle: expected a CUstream that the host made, got a default stream (%p)",
                    (void *)handle);
  CUresult result = cuda->driver->StreamGetCtx(handle, &context);
  switch (result) {
  case CUDA_SUCCESS: break;
  case CUDA_ERROR_INVALID_HANDLE:
  case CUDA_ERROR_INVALID_VALUE:
  case CUDA_ERROR_INVALID_CONTEXT:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED: /* the stream's, not ours */
    return nib_fail(device->runtime, NIB_INVALID,
                    "stream: handle: expected a CUstream, got %p, which the driver does not know", (void *)handle);
  default: return nib_cuda_check(device, result, "cuStreamGetCtx");
  }
  if (context == cuda->context) return NIB_OK;
  return nib_fail(device->runtime, NIB_INVALID,
                  "stream: handle: expected a stream of the context that is used for %s, got one of another",
                  device->info.name);
}

nib_status nib_cuda_stream_wrap(nib_stream *stream, void *handle) {
  nib_device *device = stream->device;
  if (nib_cuda_of(device)->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  nib_status status = check_handle(device, handle);
  nib_cuda_leave(device);
  if (status != NIB_OK) return status;
  struct nib_cuda_stream *own = nib_allocate_zero(device->runtime, sizeof *own);
  if (!own) return nib_fail_memory(device->runtime, "stream", sizeof *own);
  if (stream->impl) nib_cuda_stream_close(stream);
  own->handle = handle;
  own->completed = stream->submitted;
  stream->impl = own;
  return NIB_OK;
}

void nib_cuda_stream_unwrap(nib_stream *stream) {
  struct nib_cuda *cuda = nib_cuda_of(stream->device);
  struct nib_cuda_stream *own = stream_of(stream);
  bool behind = false; /* whether there is a point after all work */
  if (own->completed < stream->submitted && !cuda->lost && nib_cuda_enter(stream->device)) {
    behind = point_record(stream, stream->submitted) != NULL;
    if (!behind) cuda->driver->StreamSynchronize(own->handle);
    nib_cuda_leave(stream->device);
  }
  if (!behind) own->completed = stream->submitted;
  own->handle = NULL;
}

/* Whether a call has ended, when its stream is closed. After the context was lost, a function may still run, and the
 * caller waits for it. One that did not begin must not be called any more, but its memory is kept as long as the driver
 * has the pointer. */
static bool call_ended(struct nib_cuda_call *call) {
  enum nib_cuda_call_state queued = CALL_QUEUED;
  if (__atomic_compare_exchange_n(&call->state, &queued, CALL_DROPPED, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return false;
  while (__atomic_load_n(&call->state, __ATOMIC_ACQUIRE) != CALL_DONE)
    nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
  return true;
}

void nib_cuda_stream_close(nib_stream *stream) {
  nib_device *device = stream->device;
  struct nib_cuda_stream *own = stream_of(stream);
  while (own->count > 0) {
    point_release(device, own->points[own->first]);
    own->first = (own->first + 1) % NIB_CUDA_POINTS;
    own->count--;
  }
  if (!stream->wrapped && nib_cuda_enter(device)) {
    nib_cuda_of(device)->driver->StreamDestroy(own->handle);
    nib_cuda_leave(device);
  }
  while (own->calls) {
    struct nib_cuda_call *call = own->calls;
    own->calls = call->next;
    if (call_ended(call)) {
      nib_free(device->runtime, call, sizeof *call);
    } else {
      call->next = nib_cuda_of(device)->dropped;
      nib_cuda_of(device)->dropped = call;
    }
  }
  nib_free(device->runtime, own, sizeof *own);
  stream->impl = NULL;
}

void nib_cuda_free_dropped(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  while (cuda->dropped) {
    struct nib_cuda_call *call = cuda->dropped;
    cuda->dropped = call->next;
    nib_free(device->runtime, call, sizeof *call);
  }
}

/* Raises the function's limit of dynamic shared memory, if needed; by default it is 48 KiB minus the static shared
 * memory. Never lowers it, since graphs with other handles of the function may need the higher limit. */
static nib_status allow_shared(nib_device *device, const struct nib_work *work) {
  struct nib_driver *driver = nib_cuda_of(device)->driver;
  const CUfunction_attribute attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  int allowed = 0;
  CUresult result = driver->FuncGetAttribute(&allowed, attribute, work->function);
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuFuncGetAttribute");
  if (work->shared_bytes <= (uint32_t)allowed) return NIB_OK;
  result = work->shared_bytes > INT32_MAX
             ? CUDA_ERROR_INVALID_VALUE
             : driver->FuncSetAttribute(work->function, attribute, (int)work->shared_bytes);
  if (result == CUDA_ERROR_INVALID_VALUE)
    return nib_fail(device->runtime, NIB_INVALID,
                    "kernel:launch: shared: expected at most the shared memory of a block of %s, got %u bytes",
                    device->info.name, (unsigned)work->shared_bytes);
  return nib_cuda_check(device, result, "cuFuncSetAttribute");
}

nib_status nib_cuda_launch(nib_stream *stream, const struct nib_work *work) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (work->kernel == NIB_WORK_TRANSFER) return nib_cuda_transfer(stream, work->params);
  struct nib_cuda_launch g = { .grid = { work->grid[0], work->grid[1], work->grid[2] },
                               .block = { work->block[0], work->block[1], work->block[2] },
                               .shared_bytes = work->shared_bytes };
  CUfunction function = work->function;
  if (!function) {
    nib_cuda_kernels[work->kernel]->launch(work->params, device->info.processors, &g);
    function = cuda->functions[work->kernel][g.entry];
  }
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  nib_status status = work->shared_bytes ? allow_shared(device, work) : NIB_OK;
  if (status != NIB_OK) {
    nib_cuda_leave(device);
    return status;
  }
  size_t bytes = work->bytes;
  void *config[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, (void *)work->params, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                     CU_LAUNCH_PARAM_END };
  CUresult result =
    cuda->driver->LaunchKernel(function, g.grid[0], g.grid[1], g.grid[2], g.block[0], g.block[1], g.block[2],
                               g.shared_bytes, stream_of(stream)->handle, NULL, bytes ? config : NULL);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, work->name);
}

/* ---- Host functions -------------------------------------------------------------------------------------------- */

/* Called on a thread of the driver. */
static void run_call(void *argument) {
  struct nib_cuda_call *call = argument;
  enum nib_cuda_call_state queued = CALL_QUEUED;
  if (!__atomic_compare_exchange_n(&call->state, &queued, CALL_RUNNING, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return;
  nib_status status = call->function(call->user), none = NIB_OK;
  if (status != NIB_OK)
    __atomic_compare_exchange_n(&call->stream->error, &none, status, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  __atomic_store_n(&call->state, CALL_DONE, __ATOMIC_RELEASE);
}

/* Frees the calls that are done. They end in order, so in the list all calls after the first one that is done are done,
 * too. */
static void free_calls(nib_device *device, struct nib_cuda_call **calls) {
  while (*calls && __atomic_load_n(&(*calls)->state, __ATOMIC_ACQUIRE) != CALL_DONE) calls = &(*calls)->next;
  while (*calls) {
    struct nib_cuda_call *call = *calls;
    *calls = call->next;
    nib_free(device->runtime, call, sizeof *call);
  }
}

nib_status nib_cuda_call(nib_stream *stream, nib_status (*function)(void *user), void *user) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_stream *own = stream_of(stream);
  if (cuda->lost) return nib_cuda_lost(device);
  free_calls(device, &own->calls);
  struct nib_cuda_call *call = nib_allocate(device->runtime, sizeof *call);
  if (!call) return nib_fail_memory(device->runtime, "stream:call", sizeof *call);
  *call = (struct nib_cuda_call){ own->calls, own, function, user, CALL_QUEUED };
  CUresult result = CUDA_ERROR_INVALID_CONTEXT;
  if (nib_cuda_enter(device)) {
    result = cuda->driver->LaunchHostFunc(own->handle, run_call, call);
    nib_cuda_leave(device);
  }
  if (result == CUDA_SUCCESS) own->calls = call;
  else nib_free(device->runtime, call, sizeof *call);
  return nib_cuda_check(device, result, "cuLaunchHostFunc");
}

nib_status nib_cuda_take_error(nib_stream *stream) {
  nib_device *device = stream->device;
  struct nib_cuda_stream *own = stream_of(stream);
  if (nib_cuda_of(device)->lost) return nib_cuda_lost(device);
  nib_status error = __atomic_exchange_n(&own->error, NIB_OK, __ATOMIC_ACQ_REL);
  if (error == NIB_OK) return NIB_OK;
  return nib_fail(device->runtime, NIB_STREAM, "stream:call: the function on stream %llu returned %s (%s)",
                  (unsigned long long)stream->id, nib_status_name(error), nib_status_text(error));
}

/* ---- Waiting --------------------------------------------------------------------------------------------------- */

bool nib_cuda_reached(nib_stream *stream, uint64_t ticket) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_stream *own = stream_of(stream);
  if (!own || cuda->lost || ticket <= own->completed) return true;
  if (device->capture || !nib_cuda_enter(device)) return false; /* a query would invalidate the capture */
  CUresult result = poll_points(stream);
  if (result == CUDA_SUCCESS && ticket > own->completed && own->handle) {
    result = cuda->driver->StreamQuery(own->handle);
    if (result == CUDA_SUCCESS) own->completed = stream->submitted;
  }
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) nib_cuda_check(device, result, "cuStreamQuery");
  nib_cuda_leave(device);
  return cuda->lost || ticket <= own->completed;
}

nib_status nib_cuda_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_stream *own = stream_of(stream);
  if (!cuda->lost && nib_cuda_reached(stream, ticket) && !cuda->lost) return NIB_OK;
  if (cuda->lost) return nib_cuda_lost(device);
  if (timeout_us == 0) return NIB_TIMEOUT;
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  bool behind = false; /* whether there is a point at or after the ticket */
  for (uint32_t i = 0; i < own->count; i++) behind |= own->points[(own->first + i) % NIB_CUDA_POINTS]->ticket >= ticket;
  if (!behind) behind = point_record(stream, stream->submitted) != NULL;
  int64_t start = nib_now_us(), spent = 0;
  CUresult result = CUDA_SUCCESS;
  while (own->completed < ticket && (timeout_us == NIB_UNLIMITED || spent < timeout_us)) {
    result = poll_points(stream);
    if (result == CUDA_SUCCESS && !behind) { /* there is no event, so wait for all of the stream's work */
      result = cuda->driver->StreamQuery(own->handle);
      if (result == CUDA_SUCCESS) own->completed = stream->submitted;
      if (result == CUDA_ERROR_NOT_READY) result = CUDA_SUCCESS;
    }
    if (own->completed >= ticket || result != CUDA_SUCCESS) break;
    spent = nib_now_us() - start;
    /* Spin at first, for short kernels; then sleep. */
    if (spent > 100) nanosleep(&(struct timespec){ .tv_nsec = spent < 2000 ? 10000 : 100000 }, NULL);
  }
  if (result == CUDA_SUCCESS && own->handle) result = cuda->driver->StreamQuery(own->handle); /* finds a lost context */
  nib_cuda_leave(device);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) return nib_cuda_check(device, result, "cuStreamQuery");
  return own->completed >= ticket ? NIB_OK : NIB_TIMEOUT;
}

/* ---- Events ---------------------------------------------------------------------------------------------------- */

nib_status nib_cuda_event_record(nib_stream *stream, nib_event *event) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  struct nib_cuda_point *point;
  if (stream->capture) { /* an event of the capture never completes, so it is no point */
    point = point_create(device);
    CUresult result = point ? cuda->driver->EventRecord(point->event, stream_of(stream)->handle) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) {
      point_release(device, point);
      point = NULL;
      nib_cuda_check(device, result, "cuEventRecord");
    }
  } else {
    point = point_record(stream, stream->submitted + 1);
    if (point) point->references++;
  }
  nib_cuda_leave(device);
  event->impl = point;
  return point ? NIB_OK : cuda->lost ? NIB_LOST : NIB_MEMORY;
}

nib_status nib_cuda_event_wait(nib_stream *stream, nib_event *event) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_point *point = event->impl; /* it may belong to another GPU */
  if (cuda->lost) return nib_cuda_lost(device);
  if (nib_cuda_of(nib_event_device(event))->lost) return nib_cuda_lost(nib_event_device(event));
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->StreamWaitEvent(stream_of(stream)->handle, point->event, 0);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuStreamWaitEvent");
}

/* A point of the stream at or after the ticket; records one if there is none. */
static struct nib_cuda_point *point_behind(nib_stream *stream, uint64_t ticket) {
  struct nib_cuda_stream *own = stream_of(stream);
  for (uint32_t i = 0; i < own->count; i++) {
    struct nib_cuda_point *point = own->points[(own->first + i) % NIB_CUDA_POINTS];
    if (point->ticket >= ticket) return point;
  }
  if (!own->handle || !nib_cuda_enter(stream->device))
    return NULL; /* an event must be created in the stream's context */
  struct nib_cuda_point *point = point_record(stream, stream->submitted);
  nib_cuda_leave(stream->device);
  return point;
}

nib_status nib_cuda_follow(nib_device *device, CUstream follower, nib_stream *stream, uint64_t ticket) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_stream *own = stream_of(stream);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!own || nib_cuda_reached(stream, ticket))
    return nib_cuda_of(stream->device)->lost ? nib_cuda_lost(stream->device) : NIB_OK;
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  struct nib_cuda_point *point = point_behind(stream, ticket);
  CUresult result = point ? cuda->driver->StreamWaitEvent(follower, point->event, 0) : CUDA_ERROR_OUT_OF_MEMORY;
  bool early = result != CUDA_SUCCESS && own->handle;
  if (early) result = cuda->driver->StreamSynchronize(own->handle); /* there is no event, so wait here */
  nib_cuda_leave(device);
  return nib_cuda_check(early ? stream->device : device, result, early ? "cuStreamSynchronize" : "cuStreamWaitEvent");
}

nib_status nib_cuda_follow_stream(nib_stream *stream, nib_stream *other, uint64_t ticket) {
  return nib_cuda_follow(stream->device, stream_of(stream)->handle, other, ticket);
}

nib_status nib_cuda_event_elapsed(nib_event *start, nib_event *end, double *milliseconds) {
  nib_device *device = nib_event_device(start);
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_point *first = start->impl, *last = end->impl;
  float elapsed = 0;
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->EventElapsedTime(&elapsed, first->event, last->event);
  nib_cuda_leave(device);
  *milliseconds = elapsed;
  return nib_cuda_check(device, result, "cuEventElapsedTime");
}

void nib_cuda_event_destroy(nib_event *event) {
  if (event->impl) point_release(nib_event_device(event), event->impl);
  event->impl = NULL;
}
