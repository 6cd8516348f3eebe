/* Telling the observer what was done. Without an observer each of these costs a comparison. */
#include "core.h"

void nib_tell(nib_runtime *rt, const nib_observation *observation) {
  if (!rt->observe) return;
  nib_observation timed = *observation;
  timed.time_ns = nib_now_ns();
  bool lasts = timed.kind <= NIB_OBSERVED_HOST_WRITE || timed.kind == NIB_OBSERVED_REPLAY;
  timed.begin_ns = lasts && rt->entered_ns ? rt->entered_ns : timed.time_ns;
  rt->entered_ns = timed.time_ns; /* what else the same function does begins now */
  rt->observe(rt->observe_user, &timed);
}

static nib_attribute integer(const char *name, int64_t value) {
  return (nib_attribute){ name, NIB_ATTRIBUTE_INTEGER, value, 0 };
}
static nib_attribute boolean(const char *name, bool value) {
  return (nib_attribute){ name, NIB_ATTRIBUTE_BOOLEAN, value, 0 };
}
static nib_attribute real(const char *name, double value) {
  return (nib_attribute){ name, NIB_ATTRIBUTE_REAL, 0, value };
}

static nib_attribute single(const char *name, const float *value) {
  return real(name, nib_element_to_number(NIB_FLOAT32, value).real);
}

static nib_attribute number(const char *name, nib_number value) {
  return value.is_float ? real(name, value.real) : integer(name, value.integer);
}

static int32_t attributes_of(const struct nib_work *work, nib_attribute *out) {
  int32_t count = 0;
  switch (work->kernel) {
  case NIB_KERNEL_APPEND: {
    const struct nib_append_params *params = work->params;
    if (!params->k_scale.pointer) out[count++] = single("k_scale", &params->k_scale.value);
    if (!params->v_scale.pointer) out[count++] = single("v_scale", &params->v_scale.value);
    break;
  }
  case NIB_KERNEL_MATERIALIZE: {
    const struct nib_materialize_params *params = work->params;
    out[count++] = integer("max_kv_len", params->max_kv_len);
    break;
  }
  case NIB_KERNEL_ROPE_INSERT: {
    const struct nib_rope_insert_params *params = work->params;
    out[count++] = boolean("apply_q_rope", params->q && params->rotate_q);
    out[count++] = integer("compress_ratio", params->compress_ratio);
    break;
  }
  case NIB_KERNEL_SWIZZLE: {
    const struct nib_swizzle_params *params = work->params;
    out[count++] = boolean("inverse", params->inverse);
    break;
  }
  case NIB_KERNEL_QUANTIZE_CACHE: {
    const struct nib_quantize_cache_params *params = work->params;
    if (!params->global_sf.pointer && !params->amax) out[count++] = single("global_sf", &params->global_sf.value);
    break;
  }
  case NIB_KERNEL_FILL: {
    const struct nib_fill_params *params = work->params;
    out[count++] = number("value", nib_element_to_number((nib_dtype)params->type, &params->bits));
    break;
  }
  case NIB_KERNEL_ARANGE: {
    const struct nib_arange_params *params = work->params;
    out[count++] = params->is_float ? real("start", params->start_real) : integer("start", params->start);
    out[count++] = params->is_float ? real("step", params->step_real) : integer("step", params->step);
    break;
  }
  case NIB_KERNEL_RANDOM: {
    const struct nib_random_params *params = work->params;
    out[count++] = integer("seed", (int64_t)params->seed);
    if (params->kind != NIB_RANDOM_INTEGER) break;
    out[count++] = integer("low", params->low);
    out[count++] = integer("range", (int64_t)params->range);
    break;
  }
  default: break;
  }
  return count;
}

void nib_tell_work(nib_stream *stream, const char *operation, const struct nib_work *work, const nib_access *accesses,
                   int32_t access_count, int32_t node) {
  nib_attribute attributes[NIB_MAX_ATTRIBUTES];
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
    .attributes = attributes,
  };
  observation.attribute_count = attributes_of(work, attributes);
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
