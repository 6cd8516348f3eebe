/* Calls the observer. Without an observer each of these costs a comparison. */
#include "graph.h"
#include "own.h"

void nib_tell(nib_runtime *rt, const nib_observation *observation) {
  if (!rt->observe) return;
  nib_observation timed = *observation;
  timed.time_ns = nib_now_ns();
  bool lasts = timed.kind <= NIB_OBSERVED_HOST_WRITE || timed.kind == NIB_OBSERVED_REPLAY;
  timed.begin_ns = lasts && rt->entered_ns ? rt->entered_ns : timed.time_ns;
  rt->entered_ns = timed.time_ns; /* whatever the same function does next begins now */
  rt->observe(rt->observe_user, &timed);
}

void nib_tell_work(nib_stream *stream, const char *operation, const struct nib_work *work, const nib_access *accesses,
                   int32_t access_count, int32_t node) {
  nib_observation observation = {
    .kind = NIB_OBSERVED_WORK,
    .operation = operation,
    .kernel = work->name,
    .user_kernel = work->module != NULL,
    .device = stream->device,
    .stream = stream->id,
    .node = node,
    .accesses = accesses,
    .access_count = access_count,
    .attributes = work->attributes,
    .attribute_count = work->attribute_count,
  };
  if (node >= 0) {
    observation.capture = stream->capture->id;
    observation.deps = stream->capture->plan->nodes[node].deps;
    observation.dep_count = stream->capture->plan->nodes[node].dep_count;
  }
  nib_tell(stream->device->runtime, &observation);
}

void nib_tell_host(const char *operation, const nib_tensor *tensor, bool write) {
  nib_access access = { tensor, write, "tensor", NULL };
  NIB_TELL(nib_tensor_runtime(tensor), write ? NIB_OBSERVED_HOST_WRITE : NIB_OBSERVED_HOST_READ, .operation = operation,
           .device = tensor->storage->deferred.device, .accesses = &access, .access_count = 1);
}

void nib_tell_follow(nib_stream *stream, nib_stream *other) {
  nib_runtime *rt = stream->device->runtime;
  if (!rt->observe) return;
  uint64_t event = ++rt->last_id;
  NIB_TELL(rt, NIB_OBSERVED_EVENT_RECORD, .operation = "tensor:copy", .device = other->device, .stream = other->id,
           .event = event);
  NIB_TELL(rt, NIB_OBSERVED_STREAM_WAIT, .operation = "tensor:copy", .device = stream->device, .stream = stream->id,
           .event = event);
  NIB_TELL(rt, NIB_OBSERVED_EVENT_RELEASED, .operation = "tensor:copy", .device = other->device, .event = event);
}
