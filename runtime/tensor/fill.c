/* Fills tensors with one value, a sequence or random values. */
#include <stdio.h>

#include "../core/floats.h"
#include "tensor.h"

nib_status nib_tensor_fill(nib_stream *stream, nib_tensor *tensor, nib_number value) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_device("tensor:fill", "tensor", tensor, stream);
  if (status == NIB_OK) status = nib_check_destination("tensor:fill", "tensor", tensor);
  if (status != NIB_OK) return status;
  struct nib_fill_params params = { .destination = nib_tensor_data(tensor), .type = (int32_t)tensor->dtype };
  if (!nib_element_from_number(tensor->dtype, value, &params.bits)) {
    char got[32];
    if (value.is_float) nib_format_real(got, sizeof got, "%g", value.real);
    else snprintf(got, sizeof got, "%lld", (long long)value.integer);
    return nib_fail(rt, NIB_INVALID, "tensor:fill: value: expected a value of %s, got %s",
                    nib_dtype_name(tensor->dtype), got);
  }
  if (nib_tensor_numel(tensor) == 0) return nib_check_stream(stream, "tensor:fill");
  for (int32_t i = 0; i < tensor->ndim; i++) {
    int64_t size = tensor->shape[i], stride = tensor->stride[i];
    if (size == 1) continue;
    int32_t last = params.ndim - 1;
    if (last >= 0 && params.stride[last] == size * stride) {
      params.size[last] *= size;
      params.stride[last] = stride;
    } else {
      params.size[params.ndim] = size;
      params.stride[params.ndim++] = stride;
    }
  }
  nib_access access = { tensor, true, "tensor", NULL };
  nib_number filled = nib_element_to_number(tensor->dtype, &params.bits);
  nib_attribute attribute =
    filled.is_float ? nib_attribute_real("value", filled.real) : nib_attribute_integer("value", filled.integer);
  struct nib_work work = { NIB_WORK(FILL, params), .attributes = &attribute, .attribute_count = 1 };
  return nib_submit(stream, "tensor:fill", &work, &access, 1);
}

/* ---- Sequences and random values ------------------------------------------------------------------------------- */

static nib_status check_sequence(nib_stream *stream, const char *operation, nib_tensor *tensor) {
  nib_runtime *rt = stream->device->runtime;
  char text[NIB_DESCRIPTION];
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_device(operation, "tensor", tensor, stream);
  if (status == NIB_OK && !nib_tensor_is_contiguous(tensor))
    status = nib_fail(rt, NIB_INVALID, "%s: tensor: expected a contiguous tensor, got %s with other strides", operation,
                      nib_describe(tensor, text, sizeof text));
  return status;
}

nib_status nib_tensor_arange(nib_stream *stream, nib_tensor *tensor, nib_number start, nib_number step) {
  nib_status status = check_sequence(stream, "arange", tensor);
  if (status != NIB_OK) return status;
  bool is_float = start.is_float || step.is_float;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  NIB_OPAQUE(start);
  NIB_OPAQUE(step);
  struct nib_arange_params params = {
    .out = nib_tensor_data(tensor),
    .type = (int32_t)tensor->dtype,
    .is_float = is_float,
    .count = nib_tensor_numel(tensor),
    .start = is_float ? 0 : start.integer,
    .step = is_float ? 0 : step.integer,
    .start_real = start.is_float ? start.real : (double)start.integer,
    .step_real = step.is_float ? step.real : (double)step.integer,
  };
  NIB_OPAQUE(params);
  nib_floats_leave(&floats);
  nib_access access = { tensor, true, "tensor", NULL };
  nib_attribute attributes[] = { nib_attribute_integer("start", params.start),
                                 nib_attribute_integer("step", params.step) };
  if (is_float) {
    attributes[0] = nib_attribute_real("start", params.start_real);
    attributes[1] = nib_attribute_real("step", params.step_real);
  }
  struct nib_work work = { NIB_WORK(ARANGE, params), .attributes = attributes, .attribute_count = 2 };
  return nib_submit(stream, "arange", &work, &access, 1);
}

static nib_status launch_random(nib_stream *stream, const char *operation, nib_tensor *tensor,
                                struct nib_random_params params) {
  params.out = nib_tensor_data(tensor);
  params.type = (int32_t)tensor->dtype;
  params.count = nib_tensor_numel(tensor);
  nib_access access = { tensor, true, "tensor", NULL };
  nib_attribute attributes[] = { nib_attribute_integer("seed", (int64_t)params.seed),
                                 nib_attribute_integer("low", params.low),
                                 nib_attribute_integer("range", (int64_t)params.range) };
  struct nib_work work = { NIB_WORK(RANDOM, params), .attributes = attributes,
                           .attribute_count = params.kind == NIB_RANDOM_INTEGER ? 3 : 1 };
  return nib_submit(stream, operation, &work, &access, 1);
}

nib_status nib_tensor_random_normal(nib_stream *stream, nib_tensor *tensor, uint64_t seed) {
  nib_status status = check_sequence(stream, "randn", tensor);
  if (status == NIB_OK && !nib_dtype_is_float(tensor->dtype))
    status = nib_fail(stream->device->runtime, NIB_INVALID, "randn: dtype: expected a float dtype, got %s",
                      nib_dtype_name(tensor->dtype));
  if (status != NIB_OK) return status;
  return launch_random(stream, "randn", tensor, (struct nib_random_params){ .kind = NIB_RANDOM_NORMAL, .seed = seed });
}

nib_status nib_tensor_random_integer(nib_stream *stream, nib_tensor *tensor, uint64_t seed, int64_t low, int64_t high) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = check_sequence(stream, "randint", tensor);
  if (status != NIB_OK) return status;
  if (high <= low)
    return nib_fail(rt, NIB_INVALID, "randint: high: expected more than low (%lld), got %lld", (long long)low,
                    (long long)high);
  int64_t least, most;
  if (nib_integer_range(tensor->dtype, &least, &most) && (low < least || high - 1 > most))
    return nib_fail(rt, NIB_INVALID, "randint: %s: expected values of %s, got %lld", low < least ? "low" : "high",
                    nib_dtype_name(tensor->dtype), (long long)(low < least ? low : high));
  return launch_random(
    stream, "randint", tensor,
    (struct nib_random_params){
      .kind = NIB_RANDOM_INTEGER, .seed = seed, .low = low, .range = (uint64_t)high - (uint64_t)low });
}

nib_status nib_tensor_random_permutation(nib_stream *stream, nib_tensor *tensor, uint64_t seed) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = check_sequence(stream, "randperm", tensor);
  if (status != NIB_OK) return status;
  char text[NIB_DESCRIPTION];
  if (tensor->ndim != 1 || (tensor->dtype != NIB_INT32 && tensor->dtype != NIB_INT64) ||
      (tensor->dtype == NIB_INT32 && tensor->shape[0] > INT32_MAX))
    return nib_fail(rt, NIB_INVALID, "randperm: dtype: expected int32 or int64 that holds n, one dimension, got %s",
                    nib_describe(tensor, text, sizeof text));
  return launch_random(stream, "randperm", tensor,
                       (struct nib_random_params){ .kind = NIB_RANDOM_PERMUTATION, .seed = seed });
}
