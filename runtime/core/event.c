/* Events: points in a stream that hosts and other streams wait for. */
#include <string.h>

#include "graph.h"
#include "own.h"

static enum nib_end event_destroy(struct nib_deferred *self) {
  nib_event *event = (nib_event *)self;
  nib_runtime *rt = self->device->runtime;
  if (!rt->closed) self->device->backend->events.destroy(event);
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
  nib_status status = nib_check_open(stream, "stream:record"); /* it is no work, so it is allowed during a capture */
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
    if (status == NIB_OK && device->backend->captures_natively) status = device->backend->events.record(stream, event);
  } else {
    status = nib_uses_reserve(rt, &event->deferred.uses);
    if (status == NIB_OK) status = device->backend->events.record(stream, event);
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

/* Between two GPUs, the driver makes the stream wait. Between the CPU and a GPU, the calling thread waits. */
static nib_status wait_across(nib_stream *stream, nib_event *event) {
  nib_device *device = stream->device, *other = nib_event_device(event);
  if (event->capture_id != 0)
    return nib_fail(device->runtime, NIB_INVALID,
                    "stream:wait: event: expected an event of %s or of no capture, got one of a capture on %s",
                    device->info.name, other->info.name);
  nib_status status = nib_check_stream(stream, "stream:wait");
  if (status == NIB_OK) status = nib_check_not_capturing(device, "stream:wait");
  if (status == NIB_OK) status = other->backend->streams.wait(event->stream, event->ticket, 0);
  if (status != NIB_TIMEOUT) return status;
  if (device->backend == other->backend) {
    status = device->backend->events.wait(stream, event);
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
        "stream:wait: event: expected an event recorded in the capture, got one recorded before it (wait for it "
        "before the capture)");
    status = nib_check_stream(stream, "stream:wait");
    if (status == NIB_OK && event->stream != stream &&
        !device->backend->streams.reached(event->stream, event->ticket)) {
      status = device->backend->events.wait(stream, event);
      if (status == NIB_OK) stream->submitted++;
    }
    if (status == NIB_OK) tell_wait(stream, event);
    return status;
  }
  if (!device->capture || device->capture->id != event->capture_id)
    return nib_fail(rt, NIB_STATE,
                    "stream:wait: event: expected an event of the open capture or of no capture, got one of a capture "
                    "that has ended");
  status = nib_check_open(stream, "stream:wait");
  if (status != NIB_OK) return status;
  status = nib_frontier_reserve(stream, event->frontier_count);
  if (status == NIB_OK && device->backend->captures_natively) status = device->backend->events.wait(stream, event);
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
                      "%s: event: expected an event of no capture, got one recorded in a capture", operation);
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
  if (!device->backend->streams.reached(start->stream, start->ticket) ||
      !device->backend->streams.reached(end->stream, end->ticket))
    return NIB_TIMEOUT;
  return device->backend->events.elapsed(start, end, milliseconds);
}
