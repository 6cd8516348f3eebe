/* Streams. A device is opened with its first stream. */
#include "graph.h"
#include "own.h"

static void add_stream(nib_stream *stream) {
  nib_stream **last = &stream->device->streams;
  while (*last) last = &(*last)->next;
  *last = stream;
}

/* With more released streams that still have queued work, a new stream reuses one and its work follows theirs. */
#define MOST_UNFINISHED 8

/* Finds a released stream to reuse. So driver objects are kept, and tickets in old entries stay valid. If the config
 * limits streams, one of another priority is reused, too; *full is set if the limit allows no new stream. */
static nib_stream *find_released(nib_device *device, int32_t priority, bool *full) {
  int64_t limit = device->runtime->config.streams, count = 0, all = 0;
  nib_stream *unfinished = NULL;
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    if (stream->wrapped || stream == device->default_stream || stream->id == 0) continue; /* 0: the runtime's own */
    all++;
    if (!stream->released || stream->capture || (limit == 0 && stream->priority != priority)) continue;
    if (device->backend->streams.reached(stream, stream->submitted)) return stream;
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
  nib_status status = device->backend->streams.open(stream);
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
    return nib_fail(rt, NIB_MEMORY, "stream: %s has %lld streams, which is the limit; close one first",
                    device->info.name, (long long)rt->config.streams);
  nib_status status = make_stream(device, priority, &stream);
  if (status != NIB_OK) return status;
  stream->id = ++rt->last_stream_id;
  *out = stream;
  NIB_TELL(rt, NIB_OBSERVED_STREAM_CREATED, .operation = "stream", .device = device, .stream = stream->id);
  return NIB_OK;
}

/* ---- Opening a device ------------------------------------------------------------------------------------------ */

nib_status nib_device_open(nib_device *device) {
  if (device->default_stream) return NIB_OK;
  if (!device->info.available)
    return nib_fail(device->runtime, NIB_UNAVAILABLE, "%s: %s", device->info.name, device->info.reason);
  nib_status status = device->backend->open(device);
  if (status == NIB_OK) status = open_stream(device, 0, &device->default_stream);
  if (status == NIB_OK)
    nib_log(device->runtime, NIB_LOG_INFO, "%s: opened, %s", device->info.name, device->info.description);
  return status;
}

/* ---- Streams of the host's program ----------------------------------------------------------------------------- */

nib_status nib_stream_create(nib_device *device, int32_t priority, nib_stream **out) {
  *out = NULL;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status == NIB_OK) status = open_stream(device, priority < 0 ? -1 : 0, out);
  if (status == NIB_OK) nib_handle_added(device->runtime);
  return status;
}

/* Reuses the struct of a released wrapped stream, for the sake of its tickets. */
nib_status nib_stream_wrap(nib_device *device, void *handle, nib_stream **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (!device->backend->foreign)
    return nib_fail(rt, NIB_INVALID,
                    "stream: handle: expected none on %s (its streams are threads of the runtime), got %p",
                    device->info.name, handle);
  status = nib_device_open(device);
  if (status != NIB_OK) return status;
  nib_stream *stream = device->streams;
  while (stream && !(stream->released && stream->wrapped && !stream->capture &&
                     device->backend->streams.reached(stream, stream->submitted)))
    stream = stream->next;
  nib_stream *fresh = stream ? NULL : nib_allocate_zero(rt, sizeof *fresh);
  if (!stream && !fresh) return nib_fail_memory(rt, "stream", sizeof *fresh);
  if (fresh) {
    stream = fresh;
    stream->device = device;
    stream->wrapped = true;
  }
  status = device->backend->foreign->wrap_stream(stream, handle);
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
  if (usable && stream->wrapped && !stream->capture) backend->foreign->unwrap_stream(stream);
  if (usable) backend->streams.retire(stream);
  NIB_TELL(rt, NIB_OBSERVED_STREAM_RELEASED, .operation = "stream:close", .device = stream->device,
           .stream = stream->id);
  nib_handle_removed(rt);
}

void *nib_stream_handle(const nib_stream *stream) {
  const struct nib_backend *backend = stream->device->backend;
  return backend->foreign && !stream->device->runtime->closed ? backend->foreign->stream_handle(stream) : NULL;
}

nib_device *nib_stream_device(const nib_stream *stream) { return stream->device; }
uint64_t nib_stream_id(const nib_stream *stream) { return stream->id; }
bool nib_stream_is_capturing(const nib_stream *stream) { return stream->capture != NULL; }

/* ---- Checks ---------------------------------------------------------------------------------------------------- */

nib_status nib_check_open(nib_stream *stream, const char *operation) {
  nib_status status = nib_enter(stream->device->runtime);
  if (status != NIB_OK || !stream->released) return status;
  return nib_fail(stream->device->runtime, NIB_STATE, "%s: stream: expected an open stream, got a released one",
                  operation);
}

nib_status nib_check_stream(nib_stream *stream, const char *operation) {
  nib_device *device = stream->device;
  nib_status status = nib_check_open(stream, operation);
  if (status != NIB_OK) return status;
  if (device->capture && !stream->capture)
    return nib_fail(
      device->runtime, NIB_CAPTURING,
      "%s: stream: expected a stream that joined the capture on stream %llu (by waiting for one of its events), "
      "got stream %llu of %s",
      operation, (unsigned long long)device->capture->origin->id, (unsigned long long)stream->id, device->info.name);
  return NIB_OK;
}
