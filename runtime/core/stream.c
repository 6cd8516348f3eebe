/* Streams and events: what is the same on every device. */
#include <string.h>

#include "../backend.h"

/* ---- Streams --------------------------------------------------------------------------------------------------- */

static void add_stream(nib_stream *stream) {
  nib_stream **last = &stream->device->streams;
  while (*last) last = &(*last)->next;
  *last = stream;
}

/* Released streams whose work is still queued, before the work of a new one comes behind theirs. */
#define MOST_UNFINISHED 8

/* Streams are recycled: driver objects stay, and tickets in old entries remain true. Where the config limits streams, a
 * priority is no reason for one more, and *full says that there may be none. */
static nib_stream *find_released(nib_device *device, int32_t priority, bool *full) {
  int64_t limit = device->runtime->config.streams, count = 0, all = 0;
  nib_stream *unfinished = NULL;
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    if (stream->wrapped || stream == device->default_stream || stream->id == 0) continue; /* 0: the runtime's own */
    all++;
    if (!stream->released || stream->capture || (limit == 0 && stream->priority != priority)) continue;
    if (device->backend->reached(stream, stream->submitted)) return stream;
    if (count++ == 0) unfinished = stream;
  }
  *full = limit > 0 && all >= limit && device->default_stream;
  return *full || (limit == 0 && count >= MOST_UNFINISHED) ? unfinished : NULL;
}

static nib_status make_stream(nib_device *device, int32_t priority, nib_stream **out) {
  nib_runtime *rt = device->runtime;
  nib_stream *stream = nib_allocate_zero(rt, sizeof *stream);
  if (!stream) return nib_fail_memory(rt, "stream", sizeof *stream);
  stream->device = device;
  stream->priority = priority;
  nib_status status = device->backend->stream_open(stream);
  if (status != NIB_OK) {
    nib_free(rt, stream, sizeof *stream);
    return status;
  }
  add_stream(stream);
  *out = stream;
  return NIB_OK;
}

nib_status nib_stream_open_own(nib_device *device, nib_stream **out) { return make_stream(device, 0, out); }

static nib_status open_stream(nib_device *device, int32_t priority, nib_stream **out) {
  nib_runtime *rt = device->runtime;
  bool full = false;
  nib_stream *stream = find_released(device, priority, &full);
  if (stream) {
    stream->released = false;
    stream->id = ++rt->last_stream_id;
    *out = stream;
    NIB_TELL(rt, NIB_OBSERVED_STREAM_CREATED, .operation = "stream", .device = device, .stream = stream->id);
    return NIB_OK;
  }
  if (full)
    return nib_fail(rt, NIB_MEMORY, "stream: streams: expected at most %lld of %s at a time (the limit), got one more",
                    (long long)rt->config.streams, device->info.name);
  nib_status status = make_stream(device, priority, &stream);
  if (status != NIB_OK) return status;
  stream->id = ++rt->last_stream_id;
  *out = stream;
  NIB_TELL(rt, NIB_OBSERVED_STREAM_CREATED, .operation = "stream", .device = device, .stream = stream->id);
  return NIB_OK;
}

nib_status nib_stream_open_default(nib_device *device) { return open_stream(device, 0, &device->default_stream); }

nib_status nib_stream_create(nib_device *device, int32_t priority, nib_stream **out) {
  *out = NULL;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status == NIB_OK) status = open_stream(device, priority < 0 ? -1 : 0, out);
  if (status == NIB_OK) nib_handle_added(device->runtime);
  return status;
}

/* Of the entry of an old wrapped stream only the tickets are used again. */
nib_status nib_stream_wrap(nib_device *device, void *handle, nib_stream **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (!device->backend->stream_wrap)
    return nib_fail(rt, NIB_INVALID,
                    "stream: handle: expected no handle on %s (its streams are threads of the runtime's), got %p",
                    device->info.name, handle);
  status = nib_device_open(device);
  if (status != NIB_OK) return status;
  nib_stream *stream = device->streams;
  while (stream && !(stream->released && stream->wrapped && !stream->capture &&
                     device->backend->reached(stream, stream->submitted)))
    stream = stream->next;
  nib_stream *fresh = stream ? NULL : nib_allocate_zero(rt, sizeof *fresh);
  if (!stream && !fresh) return nib_fail_memory(rt, "stream", sizeof *fresh);
  if (fresh) {
    stream = fresh;
    stream->device = device;
    stream->wrapped = true;
  }
  status = device->backend->stream_wrap(stream, handle);
  if (status != NIB_OK) {
    nib_free(rt, fresh, sizeof *fresh);
    return status;
  }
  if (fresh) add_stream(stream);
  stream->id = ++rt->last_stream_id;
  stream->released = false;
  nib_handle_added(rt);
  *out = stream;
  return NIB_OK;
}

void nib_stream_release(nib_stream *stream) {
  if (!stream || stream == stream->device->default_stream || stream->released) return;
  nib_runtime *rt = stream->device->runtime;
  const struct nib_backend *backend = stream->device->backend;
  bool usable = !rt->closed && !nib_is_forked(rt);
  stream->released = true;
  if (usable && stream->wrapped && !stream->capture) backend->stream_unwrap(stream);
  if (usable && backend->stream_retire) backend->stream_retire(stream);
  NIB_TELL(rt, NIB_OBSERVED_STREAM_RELEASED, .operation = "stream:close", .device = stream->device,
           .stream = stream->id);
  nib_handle_removed(rt);
}

void *nib_stream_handle(const nib_stream *stream) {
  const struct nib_backend *backend = stream->device->backend;
  return backend->stream_handle && !stream->device->runtime->closed ? backend->stream_handle(stream) : NULL;
}

nib_device *nib_stream_device(const nib_stream *stream) { return stream->device; }
uint64_t nib_stream_id(const nib_stream *stream) { return stream->id; }
bool nib_stream_is_capturing(const nib_stream *stream) { return stream->capture != NULL; }

static nib_status check_open(nib_stream *stream, const char *operation) {
  nib_status status = nib_enter(stream->device->runtime);
  if (status != NIB_OK || !stream->released) return status;
  return nib_fail(stream->device->runtime, NIB_STATE, "%s: stream: expected an open stream, got a released one",
                  operation);
}

nib_status nib_check_stream(nib_stream *stream, const char *operation) {
  nib_device *device = stream->device;
  nib_status status = check_open(stream, operation);
  if (status != NIB_OK) return status;
  if (device->capture && !stream->capture)
    return nib_fail(
      device->runtime, NIB_CAPTURING,
      "%s: stream: expected a stream that joined the capture on stream %llu (by waiting for one of its events), "
      "got stream %llu of %s",
      operation, (unsigned long long)device->capture->origin->id, (unsigned long long)stream->id, device->info.name);
  return NIB_OK;
}

/* ---- Work ------------------------------------------------------------------------------------------------------ */

nib_status nib_check_writable(const char *operation, const char *parameter, const nib_tensor *tensor) {
  if (!tensor->storage->read_only) return NIB_OK;
  char text[NIB_DESCRIPTION];
  return nib_fail(nib_tensor_runtime(tensor), NIB_INVALID,
                  "%s: %s: expected memory that may be written, got %s in memory that its owner "
                  "lends for reading",
                  operation, parameter ? parameter : "args", nib_describe(tensor, text, sizeof text));
}

nib_status nib_submit(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count) {
  nib_device *device = stream->device;
  nib_status status = nib_check_stream(stream, operation);
  for (int32_t i = 0; status == NIB_OK && i < access_count; i++)
    if (accesses[i].tensor && accesses[i].write)
      status = nib_check_writable(operation, accesses[i].parameter, accesses[i].tensor);
  if (status != NIB_OK) return status;
  if (stream->capture) return nib_record(stream, operation, work, accesses, access_count);
  for (int32_t i = 0; i < access_count; i++) {
    if (!accesses[i].tensor) continue;
    status = nib_uses_reserve(device->runtime, &accesses[i].tensor->storage->deferred.uses);
    if (status != NIB_OK) return status;
  }
  uint64_t bytes = device->runtime->config.queued_bytes ? nib_operand_bytes(0, accesses, access_count) : 0;
  if (work->module) status = nib_uses_reserve(device->runtime, nib_module_uses(work->module));
  if (status == NIB_OK) status = nib_queued_wait(device, operation, bytes);
  if (status == NIB_OK) status = device->backend->launch(stream, work);
  if (status != NIB_OK) return status;
  stream->submitted++;
  nib_queued_add(stream, bytes);
  for (int32_t i = 0; i < access_count; i++)
    if (accesses[i].tensor)
      nib_uses_add(&accesses[i].tensor->storage->deferred.uses, stream, stream->submitted, accesses[i].write);
  if (work->module) nib_uses_add(nib_module_uses(work->module), stream, stream->submitted, false);
  if (device->runtime->observe) nib_tell_work(stream, operation, work, accesses, access_count, -1);
  return NIB_OK;
}

nib_status nib_launch(nib_stream *stream, const char *operation, enum nib_kernel kernel, const void *params,
                      size_t bytes, const nib_access *accesses, int32_t access_count) {
  struct nib_work work = { .name = nib_kernel_names[kernel], .kernel = kernel, .params = params, .bytes = bytes };
  return nib_submit(stream, operation, &work, accesses, access_count);
}

nib_status nib_stream_call(nib_stream *stream, nib_status (*function)(void *user), void *user) {
  nib_status status = nib_check_stream(stream, "stream:call");
  if (status == NIB_OK) status = nib_check_not_capturing(stream->device, "stream:call");
  if (status == NIB_OK) status = stream->device->backend->call(stream, function, user);
  if (status != NIB_OK) return status;
  stream->submitted++;
  NIB_TELL(stream->device->runtime, NIB_OBSERVED_WORK, .operation = "stream:call", .device = stream->device,
           .stream = stream->id);
  return NIB_OK;
}

nib_status nib_tensor_written(nib_tensor *tensor, nib_stream *stream) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  nib_status status = nib_check_stream(stream, "tensor:written");
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:written");
  if (status == NIB_OK) status = nib_check_device("tensor:written", "tensor", tensor, stream);
  if (status == NIB_OK) status = nib_uses_reserve(rt, &tensor->storage->deferred.uses);
  if (status != NIB_OK) return status;
  if (!device->backend->host_memory) stream->submitted++; /* work of others has no ticket; the CPU's streams do none */
  if (stream->submitted > 0) nib_uses_add(&tensor->storage->deferred.uses, stream, stream->submitted, true);
  nib_access access = { tensor, true, "tensor", NULL };
  NIB_TELL(rt, NIB_OBSERVED_WORK, .operation = "tensor:written", .device = device, .stream = stream->id,
           .accesses = &access, .access_count = 1);
  return NIB_OK;
}

/* ---- Waiting --------------------------------------------------------------------------------------------------- */

#define SLICE_US 1000 /* how late it may be seen that another thread has changed the deadline */

nib_status nib_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  if (timeout_us <= 0 || device->backend->reached(stream, ticket)) return device->backend->wait(stream, ticket, 0);
  for (int64_t start = nib_now_us(), left = timeout_us;; left = nib_time_left(start, timeout_us)) {
    int64_t slice = nib_time_to_deadline(rt);
    if (slice == 0) return nib_fail_late(rt, "wait");
    if (slice != NIB_UNLIMITED && slice > SLICE_US) slice = SLICE_US;
    bool is_last = left <= slice;
    nib_status status = device->backend->wait(stream, ticket, is_last ? left : slice);
    if (status != NIB_TIMEOUT || is_last) return status;
  }
}

nib_status nib_stream_synchronize(nib_stream *stream, int64_t timeout_us) {
  nib_device *device = stream->device;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "stream:synchronize");
  if (status == NIB_OK) status = nib_wait(stream, stream->submitted, timeout_us);
  if (status != NIB_OK) return status;
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "stream:synchronize", .device = device,
           .stream = stream->id);
  nib_reap_in_time(device);
  return nib_take_trouble(device, stream->id);
}

nib_status nib_uses_wait(nib_device *device, struct nib_uses *uses, bool writes_only, int64_t timeout_us) {
  int64_t start = uses->count ? nib_now_us() : 0;
  for (int32_t i = 0; i < uses->count; i++) {
    struct nib_use *use = &uses->items[i];
    nib_device *user = use->stream->device;
    uint64_t ticket = nib_use_ticket(use, writes_only);
    if (ticket == 0) continue;
    if (user != device &&
        !user->backend->reached(use->stream, ticket)) { /* a query or a wait could break its capture */
      nib_status status = nib_check_not_capturing(user, "tensor:wait");
      if (status != NIB_OK) return status;
    }
    nib_status status = nib_wait(use->stream, ticket, nib_time_left(start, timeout_us));
    if (status != NIB_OK) return status;
  }
  return NIB_OK;
}

nib_status nib_wait_for_cpu(struct nib_storage *storage, bool writes_only, int64_t timeout_us) {
  nib_device *cpu = storage->deferred.device;
  struct nib_uses *uses = &storage->deferred.uses;
  int64_t start = uses->count ? nib_now_us() : 0;
  for (int32_t i = 0; i < uses->count; i++) {
    struct nib_use *use = &uses->items[i];
    uint64_t ticket = nib_use_ticket(use, writes_only);
    if (use->stream->device != cpu || ticket == 0) continue;
    nib_status status = nib_wait(use->stream, ticket, nib_time_left(start, timeout_us));
    if (status != NIB_OK) return status;
    NIB_TELL(cpu->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "tensor:copy", .device = cpu,
             .stream = use->stream->id);
  }
  return NIB_OK;
}

/* ---- Events ---------------------------------------------------------------------------------------------------- */

static enum nib_end event_destroy(struct nib_deferred *self) {
  nib_event *event = (nib_event *)self;
  nib_runtime *rt = self->device->runtime;
  if (!rt->closed) self->device->backend->event_destroy(event);
  nib_uses_free(rt, &self->uses);
  nib_free(rt, event->frontier, sizeof *event->frontier * (size_t)event->frontier_count);
  nib_free(rt, event, sizeof *event);
  nib_handle_removed(rt);
  return NIB_GONE;
}

nib_status nib_event_record(nib_stream *stream, nib_event **out) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = check_open(stream, "stream:record"); /* no work, so that it is fine beside a capture */
  if (status != NIB_OK) return status;
  nib_event *event = nib_allocate_zero(rt, sizeof *event);
  if (!event) return nib_fail_memory(rt, "event", sizeof *event);
  event->deferred.device = device;
  event->deferred.destroy = event_destroy;
  event->id = ++rt->last_id;
  event->stream = stream;
  event->stream_id = stream->id;
  if (stream->capture) {
    size_t bytes = sizeof *event->frontier * (size_t)stream->frontier_count;
    event->capture_id = stream->capture->id;
    if (bytes > 0 && !(event->frontier = nib_allocate(rt, bytes))) status = nib_fail_memory(rt, "event", bytes);
    if (event->frontier) {
      memcpy(event->frontier, stream->frontier, bytes);
      event->frontier_count = stream->frontier_count;
    }
    if (status == NIB_OK && device->backend->captures_natively) status = device->backend->event_record(stream, event);
  } else {
    status = nib_uses_reserve(rt, &event->deferred.uses);
    if (status == NIB_OK) status = device->backend->event_record(stream, event);
    if (status == NIB_OK) {
      event->ticket = ++stream->submitted;
      nib_uses_add(&event->deferred.uses, stream, event->ticket, true);
    }
  }
  if (status != NIB_OK) {
    nib_uses_free(rt, &event->deferred.uses);
    nib_free(rt, event->frontier, sizeof *event->frontier * (size_t)event->frontier_count);
    nib_free(rt, event, sizeof *event);
    return status;
  }
  nib_handle_added(rt);
  *out = event;
  NIB_TELL(rt, NIB_OBSERVED_EVENT_RECORD, .operation = "stream:record", .device = device, .stream = stream->id,
           .event = event->id, .capture = event->capture_id);
  return NIB_OK;
}

void nib_event_release(nib_event *event) {
  if (!event) return;
  nib_device *device = nib_event_device(event);
  NIB_TELL(device->runtime, NIB_OBSERVED_EVENT_RELEASED, .operation = "event:close", .device = device,
           .event = event->id);
  nib_defer(&event->deferred);
}

nib_device *nib_event_device(const nib_event *event) { return event->deferred.device; }

static void tell_wait(const nib_stream *stream, const nib_event *event) {
  NIB_TELL(stream->device->runtime, NIB_OBSERVED_STREAM_WAIT, .operation = "stream:wait", .device = stream->device,
           .stream = stream->id, .event = event->id, .capture = event->capture_id);
}

/* Between GPUs the driver does it; where the CPU is one of the two, the calling thread waits. */
static nib_status wait_across(nib_stream *stream, nib_event *event) {
  nib_device *device = stream->device, *other = nib_event_device(event);
  if (event->capture_id != 0)
    return nib_fail(device->runtime, NIB_INVALID,
                    "stream:wait: event: expected an event of %s or one outside of captures, got one of a "
                    "capture on %s",
                    device->info.name, other->info.name);
  nib_status status = nib_check_stream(stream, "stream:wait");
  if (status == NIB_OK) status = nib_check_not_capturing(device, "stream:wait");
  if (status == NIB_OK) status = other->backend->wait(event->stream, event->ticket, 0);
  if (status != NIB_TIMEOUT) return status;
  if (device->backend == other->backend) {
    status = device->backend->event_wait(stream, event);
    if (status == NIB_OK) stream->submitted++;
    return status;
  }
  status = nib_check_not_capturing(other, "stream:wait");
  return status == NIB_OK ? nib_wait(event->stream, event->ticket, NIB_UNLIMITED) : status;
}

nib_status nib_stream_wait(nib_stream *stream, nib_event *event) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (nib_event_device(event)->runtime != rt)
    return nib_fail(rt, NIB_INVALID, "stream:wait: event: expected an event of the same runtime, got one of another");
  if (nib_event_device(event) != device) {
    status = wait_across(stream, event);
    if (status == NIB_OK) tell_wait(stream, event);
    return status;
  }
  if (event->capture_id == 0) {
    if (stream->capture)
      return nib_fail(
        rt, NIB_CAPTURING,
        "stream:wait: event: expected an event recorded inside the capture, got one recorded before it (wait for it "
        "before the capture)");
    status = nib_check_stream(stream, "stream:wait");
    if (status == NIB_OK && event->stream != stream && !device->backend->reached(event->stream, event->ticket)) {
      status = device->backend->event_wait(stream, event);
      if (status == NIB_OK) stream->submitted++;
    }
    if (status == NIB_OK) tell_wait(stream, event);
    return status;
  }
  if (!device->capture || device->capture->id != event->capture_id)
    return nib_fail(rt, NIB_STATE,
                    "stream:wait: event: expected an event of the open capture or of no capture, got one of a capture "
                    "that has ended");
  status = check_open(stream, "stream:wait");
  if (status != NIB_OK) return status;
  status = nib_frontier_reserve(stream, event->frontier_count);
  if (status == NIB_OK && device->backend->captures_natively) status = device->backend->event_wait(stream, event);
  if (status != NIB_OK) return status;
  nib_frontier_join(stream, event->frontier, event->frontier_count);
  tell_wait(stream, event);
  return NIB_OK;
}

static nib_status check_waitable(nib_event *event, const char *operation) {
  nib_device *device = nib_event_device(event);
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, operation);
  if (status == NIB_OK && event->capture_id != 0)
    status = nib_fail(device->runtime, NIB_STATE,
                      "%s: event: expected an event outside of captures, got one recorded inside", operation);
  return status;
}

nib_status nib_event_synchronize(nib_event *event, int64_t timeout_us) {
  nib_device *device = nib_event_device(event);
  nib_status status = check_waitable(event, "event:synchronize");
  if (status == NIB_OK) status = nib_wait(event->stream, event->ticket, timeout_us);
  if (status != NIB_OK) return status;
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "event:synchronize", .device = device,
           .event = event->id);
  return nib_take_trouble(device, event->stream_id);
}

nib_status nib_event_elapsed(nib_event *start, nib_event *end, double *milliseconds) {
  nib_device *device = nib_event_device(start);
  *milliseconds = 0;
  nib_status status = check_waitable(start, "event:elapsed");
  if (status == NIB_OK) status = check_waitable(end, "event:elapsed");
  if (status != NIB_OK) return status;
  if (nib_event_device(end) != device)
    return nib_fail(device->runtime, NIB_INVALID, "event:elapsed: later: expected an event of %s, got one of %s",
                    device->info.name, nib_event_device(end)->info.name);
  if (!device->backend->reached(start->stream, start->ticket) || !device->backend->reached(end->stream, end->ticket))
    return NIB_TIMEOUT;
  return device->backend->event_elapsed(start, end, milliseconds);
}
