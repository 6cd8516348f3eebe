/* Filling tensors, copying between them, and moving their elements to and from the host. */
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "../kernels/convert.h"
#include "../kernels/cpu/kernel.h"
#include "backend.h"

/* ---- Single elements ----------------------------------------------------------------------------------------------- */

nib_number nib_element_to_number(nib_dtype dtype, const void *element) {
  union {
    float f;
    uint16_t h;
    uint8_t b;
    int8_t c;
    int32_t i;
    int64_t l;
  } bits = { 0 };
  memcpy(&bits, element, nib_dtype_bytes(dtype));
  switch (dtype) {
  case NIB_FLOAT32: return NIB_REAL(bits.f);
  case NIB_FLOAT16: return NIB_REAL(nib_f32_from_f16(bits.h));
  case NIB_BFLOAT16: return NIB_REAL(nib_f32_from_bf16(bits.h));
  case NIB_FLOAT8_E4M3FN: return NIB_REAL(nib_e4m3_decode(bits.b));
  case NIB_UINT8: return NIB_INTEGER(bits.b);
  case NIB_INT8: return NIB_INTEGER(bits.c);
  case NIB_UINT16: return NIB_INTEGER(bits.h);
  case NIB_INT32: return NIB_INTEGER(bits.i);
  default: return NIB_INTEGER(bits.l);
  }
}

/* An int64, or a real that is one. */
static bool as_integer(nib_number number, int64_t *out) {
  if (number.is_float) {
    if (!(number.real >= -0x1p63 && number.real < 0x1p63) || number.real != floor(number.real)) return false;
    *out = (int64_t)number.real;
  } else {
    *out = number.integer;
  }
  return true;
}

static bool integer_range(nib_dtype dtype, int64_t *low, int64_t *high) {
  *low = nib_type_min((int32_t)dtype);
  *high = nib_type_max((int32_t)dtype);
  return !nib_dtype_is_float(dtype);
}

bool nib_element_from_number(nib_dtype dtype, nib_number number, void *element) {
  int64_t low, high, integer;
  if (integer_range(dtype, &low, &high)) {
    if (!as_integer(number, &integer) || integer < low || integer > high) return false;
    memcpy(element, &integer, nib_dtype_bytes(dtype)); /* little endian, like the formats */
    return true;
  }
  fenv_t host; /* the caller's thread may round differently or flush subnormals */
  fegetenv(&host);
  fesetenv(FE_DFL_ENV);
  double real = number.is_float ? number.real : nib_f64_odd_from_i64(number.integer);
  float single = (float)real; /* once rounded: an integer beyond 2^53 was rounded to odd before */
  uint32_t bits;
  switch (dtype) {
  case NIB_FLOAT32: bits = nib_bits_from_f32(nib_f32_canonical(single)); break;
  case NIB_FLOAT16: bits = nib_f16_from_f64(real); break;
  case NIB_BFLOAT16: bits = nib_bf16_from_f64(real); break;
  default: bits = nib_e4m3_from_f64(real); break;
  }
  fesetenv(&host);
  memcpy(element, &bits, nib_dtype_bytes(dtype));
  return true;
}

/* ---- Fill and copy --------------------------------------------------------------------------------------------------- */

static nib_status check_output(const char *operation, const char *name, const nib_tensor *tensor) {
  char text[NIB_DESCRIPTION];
  if (!nib_tensor_overlaps_itself(tensor)) return NIB_OK;
  return nib_fail(nib_tensor_runtime(tensor), NIB_INVALID,
                  "%s: %s: expected a tensor whose elements do not overlap in memory, got %s with a stride that repeats them",
                  operation, name, nib_describe(tensor, text, sizeof text));
}

static nib_status check_device(const char *operation, const char *name, const nib_tensor *tensor, const nib_stream *stream) {
  if (nib_tensor_dev(tensor) == stream->device) return NIB_OK;
  return nib_fail(stream->device->runtime, NIB_INVALID, "%s: %s: expected a tensor on the stream's device %s, got one on %s",
                  operation, name, stream->device->info.name, nib_tensor_dev(tensor)->info.name);
}

nib_status nib_tensor_fill(nib_stream *stream, nib_tensor *tensor, nib_number value) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = check_device("tensor:fill", "tensor", tensor, stream);
  if (status == NIB_OK) status = check_output("tensor:fill", "tensor", tensor);
  if (status != NIB_OK) return status;
  struct nib_fill_params params = { .destination = nib_tensor_data(tensor), .type = (int32_t)tensor->dtype };
  if (!nib_element_from_number(tensor->dtype, value, &params.bits)) {
    if (value.is_float)
      return nib_fail(rt, NIB_INVALID, "tensor:fill: value: expected a value of %s, got %g", nib_dtype_name(tensor->dtype), value.real);
    return nib_fail(rt, NIB_INVALID, "tensor:fill: value: expected a value of %s, got %lld", nib_dtype_name(tensor->dtype),
                    (long long)value.integer);
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
  return nib_launch(stream, "tensor:fill", NIB_KERNEL_FILL, &params, sizeof params, &access, 1);
}

/* Both sides of a copy in the fewest dimensions. `source` has the destination's shape. */
static struct nib_copy_params copy_params(const nib_tensor *destination, const nib_tensor *source) {
  struct nib_copy_params params = { .source = nib_tensor_data(source),
                                    .destination = nib_tensor_data(destination),
                                    .source_type = (int32_t)source->dtype,
                                    .destination_type = (int32_t)destination->dtype };
  for (int32_t i = 0; i < destination->ndim; i++) {
    int64_t size = destination->shape[i], from = source->stride[i], to = destination->stride[i];
    if (size == 1) continue;
    int32_t last = params.ndim - 1;
    if (last >= 0 && params.source_stride[last] == size * from && params.destination_stride[last] == size * to) {
      params.size[last] *= size;
      params.source_stride[last] = from;
      params.destination_stride[last] = to;
    } else {
      params.size[params.ndim] = size;
      params.source_stride[params.ndim] = from;
      params.destination_stride[params.ndim++] = to;
    }
  }
  return params;
}

/* Between devices: through host memory. Waits for what writes the source. */
static nib_status copy_across(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = nib_check_not_capturing(stream->device, "tensor:copy");
  if (status == NIB_OK) status = nib_check_not_capturing(nib_tensor_dev(source), "tensor:copy");
  nib_tensor *converted = NULL;
  if (status == NIB_OK) status = nib_tensor_create(nib_tensor_dev(source), destination->dtype, destination->ndim, destination->shape, &converted);
  size_t bytes = (size_t)nib_tensor_numel(destination) * nib_dtype_bytes(destination->dtype);
  void *host = NULL;
  if (status == NIB_OK) status = nib_tensor_wait(source, -1);
  if (status == NIB_OK) status = nib_tensor_copy(nib_tensor_dev(source)->default_stream, converted, source);
  if (status == NIB_OK && bytes > 0 && !(host = nib_allocate(rt, bytes))) status = nib_fail_memory(rt, "tensor:copy", bytes);
  if (status == NIB_OK) status = nib_tensor_read(converted, host, bytes, -1);
  if (status == NIB_OK) status = nib_tensor_write(stream, destination, host, bytes);
  nib_free(rt, host, bytes);
  nib_tensor_release(converted);
  return status;
}

/* Between views that may share elements: as if all were read before any is written. */
static nib_status copy_overlapping(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_tensor *read;
  nib_status status = nib_tensor_create(stream->device, source->dtype, source->ndim, source->shape, &read);
  if (status != NIB_OK) return status;
  status = nib_tensor_copy(stream, read, source);
  if (status == NIB_OK) status = nib_tensor_copy(stream, destination, read);
  nib_tensor_release(read);
  return status;
}

nib_status nib_tensor_copy(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = check_device("tensor:copy", "destination", destination, stream);
  if (status == NIB_OK) status = check_output("tensor:copy", "destination", destination);
  if (status != NIB_OK) return status;
  char want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  nib_tensor view = *source; /* expanded, on the stack: it holds no reference of its own */
  bool fits = source->ndim <= destination->ndim;
  view.ndim = destination->ndim;
  for (int32_t i = 0; fits && i < destination->ndim; i++) {
    int32_t from = i - (destination->ndim - source->ndim);
    int64_t size = from >= 0 ? source->shape[from] : 1;
    fits = size == destination->shape[i] || size == 1;
    view.shape[i] = destination->shape[i];
    view.stride[i] = from >= 0 && size != 1 ? source->stride[from] : 0;
  }
  if (!fits)
    return nib_fail(rt, NIB_INVALID, "tensor:copy: source: expected a tensor expandable to the shape of %s, got %s",
                    nib_describe(destination, want, sizeof want), nib_describe(source, have, sizeof have));
  if (nib_tensor_runtime(source) != rt)
    return nib_fail(rt, NIB_INVALID, "tensor:copy: source: expected a tensor of the same runtime, got one of another");
  if (nib_tensor_numel(destination) == 0) return nib_check_stream(stream, "tensor:copy");
  if (nib_tensor_dev(source) != stream->device) return copy_across(stream, destination, source);
  if (nib_tensor_same_view(destination, source)) return nib_check_stream(stream, "tensor:copy");
  if (nib_tensor_overlaps(destination, source)) return copy_overlapping(stream, destination, source);
  struct nib_copy_params params = copy_params(destination, &view);
  nib_access accesses[] = { { destination, true, "destination", NULL }, { source, false, "source", NULL } };
  return nib_launch(stream, "tensor:copy", NIB_KERNEL_COPY, &params, sizeof params, accesses, 2);
}

/* ---- Sequences and random values ---------------------------------------------------------------------------------------- */

static nib_status check_sequence(nib_stream *stream, const char *operation, nib_tensor *tensor) {
  nib_runtime *rt = stream->device->runtime;
  char text[NIB_DESCRIPTION];
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = check_device(operation, "tensor", tensor, stream);
  if (status == NIB_OK && !nib_tensor_is_contiguous(tensor))
    status = nib_fail(rt, NIB_INVALID, "%s: tensor: expected a contiguous tensor, got %s with other strides", operation,
                      nib_describe(tensor, text, sizeof text));
  return status;
}

nib_status nib_tensor_arange(nib_stream *stream, nib_tensor *tensor, nib_number start, nib_number step) {
  nib_status status = check_sequence(stream, "arange", tensor);
  if (status != NIB_OK) return status;
  bool is_float = start.is_float || step.is_float;
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
  nib_access access = { tensor, true, "tensor", NULL };
  return nib_launch(stream, "arange", NIB_KERNEL_ARANGE, &params, sizeof params, &access, 1);
}

static nib_status launch_random(nib_stream *stream, const char *operation, nib_tensor *tensor, struct nib_random_params params) {
  params.out = nib_tensor_data(tensor);
  params.type = (int32_t)tensor->dtype;
  params.count = nib_tensor_numel(tensor);
  nib_access access = { tensor, true, "tensor", NULL };
  return nib_launch(stream, operation, NIB_KERNEL_RANDOM, &params, sizeof params, &access, 1);
}

nib_status nib_tensor_random_normal(nib_stream *stream, nib_tensor *tensor, uint64_t seed) {
  nib_status status = check_sequence(stream, "randn", tensor);
  if (status == NIB_OK && !nib_dtype_is_float(tensor->dtype))
    status = nib_fail(stream->device->runtime, NIB_INVALID, "randn: dtype: expected a float dtype, got %s", nib_dtype_name(tensor->dtype));
  if (status != NIB_OK) return status;
  return launch_random(stream, "randn", tensor, (struct nib_random_params){ .kind = NIB_RANDOM_NORMAL, .seed = seed });
}

nib_status nib_tensor_random_integer(nib_stream *stream, nib_tensor *tensor, uint64_t seed, int64_t low, int64_t high) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = check_sequence(stream, "randint", tensor);
  if (status != NIB_OK) return status;
  if (high <= low)
    return nib_fail(rt, NIB_INVALID, "randint: high: expected more than low (%lld), got %lld", (long long)low, (long long)high);
  int64_t least, most;
  if (integer_range(tensor->dtype, &least, &most) && (low < least || high - 1 > most))
    return nib_fail(rt, NIB_INVALID, "randint: %s: expected values of %s, got %lld", low < least ? "low" : "high",
                    nib_dtype_name(tensor->dtype), (long long)(low < least ? low : high));
  return launch_random(stream, "randint", tensor,
                       (struct nib_random_params){ .kind = NIB_RANDOM_INTEGER, .seed = seed, .low = low, .range = (uint64_t)high - (uint64_t)low });
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
  return launch_random(stream, "randperm", tensor, (struct nib_random_params){ .kind = NIB_RANDOM_PERMUTATION, .seed = seed });
}

/* ---- To and from the host ------------------------------------------------------------------------------------------------ */

static nib_status check_bytes(const char *operation, const nib_tensor *tensor, size_t bytes) {
  size_t expected = (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype);
  if (bytes == expected) return NIB_OK;
  return nib_fail(nib_tensor_runtime(tensor), NIB_INVALID, "%s: bytes: expected %zu, got %zu", operation, expected, bytes);
}

nib_status nib_tensor_write(nib_stream *stream, nib_tensor *tensor, const void *data, size_t bytes) {
  nib_device *device = stream->device;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = check_device("tensor:write", "tensor", tensor, stream);
  if (status == NIB_OK) status = check_output("tensor:write", "tensor", tensor);
  if (status == NIB_OK) status = check_bytes("tensor:write", tensor, bytes);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:write");
  if (status != NIB_OK || bytes == 0) return status;
  bool compact = nib_tensor_is_contiguous(tensor);
  if (device->backend->host_memory && compact && tensor->storage->deferred.uses.capacity == 0) {
    memcpy(nib_tensor_data(tensor), data, bytes); /* no work ever knew this memory, so that there is no order to keep */
    nib_tell_host("tensor:write", tensor, true);
    return NIB_OK;
  }
  nib_tensor *staging;
  status = nib_tensor_create(device, tensor->dtype, tensor->ndim, tensor->shape, &staging);
  if (status != NIB_OK) return status;
  if (device->backend->host_memory) {
    memcpy(nib_tensor_data(staging), data, bytes);
    nib_tell_host("tensor:write", staging, true);
  } else {
    status = nib_uses_reserve(device->runtime, device, &staging->storage->deferred.uses);
    if (status == NIB_OK) status = device->backend->upload(stream, nib_tensor_data(staging), data, bytes);
    if (status == NIB_OK) {
      nib_uses_add(&staging->storage->deferred.uses, stream, ++stream->submitted, true);
      nib_access access = { staging, true, "tensor", NULL };
      NIB_TELL(device->runtime, NIB_OBSERVED_WORK, .operation = "tensor:write", .device = device, .stream = stream->id,
               .accesses = &access, .access_count = 1);
    }
  }
  if (status == NIB_OK) status = nib_tensor_copy(stream, tensor, staging);
  nib_tensor_release(staging);
  return status;
}

nib_status nib_tensor_wait(nib_tensor *tensor, int64_t timeout_us) {
  nib_device *device = nib_tensor_dev(tensor);
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:wait");
  if (status != NIB_OK) return status;
  status = nib_uses_wait_writes(device, &tensor->storage->deferred.uses, timeout_us);
  if (status != NIB_OK) return status;
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "tensor:wait", .device = device, .storage = tensor->storage->id);
  return nib_take_trouble(device, NULL);
}

static void run_alone(void *context, int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t), void *argument) {
  (void)context, (void)grain;
  body(argument, 0, count);
}

static nib_status fetch(nib_tensor *tensor, void *data, size_t bytes) {
  nib_device *device = nib_tensor_dev(tensor);
  bool compact = nib_tensor_is_contiguous(tensor);
  if (device->backend->host_memory) {
    if (compact) {
      memcpy(data, nib_tensor_data(tensor), bytes);
      return NIB_OK;
    }
    nib_tensor target = *tensor; /* the same shape, compact, in the caller's memory */
    int64_t stride = 1;
    for (int32_t i = target.ndim - 1; i >= 0; stride *= target.shape[i--]) target.stride[i] = stride;
    struct nib_copy_params params = copy_params(&target, tensor);
    params.destination = data;
    struct nib_cpu_team alone = { run_alone, NULL };
    nib_cpu_copy(&params, &alone);
    return NIB_OK;
  }
  if (compact) return device->backend->download(device, data, nib_tensor_data(tensor), bytes);
  nib_tensor *packed;
  nib_status status = nib_tensor_create(device, tensor->dtype, tensor->ndim, tensor->shape, &packed);
  if (status != NIB_OK) return status;
  status = nib_tensor_copy(device->default_stream, packed, tensor);
  if (status == NIB_OK) status = nib_uses_wait_writes(device, &packed->storage->deferred.uses, -1);
  if (status == NIB_OK) status = device->backend->download(device, data, nib_tensor_data(packed), bytes);
  nib_tensor_release(packed);
  return status;
}

nib_status nib_fetch(nib_tensor *tensor, void *data, size_t bytes) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  void (*observe)(void *user, const nib_observation *observation) = rt->observe;
  rt->observe = NULL; /* how the elements come here is nobody's affair */
  nib_status status = fetch(tensor, data, bytes);
  rt->observe = observe;
  return status;
}

nib_status nib_tensor_read(nib_tensor *tensor, void *data, size_t bytes, int64_t timeout_us) {
  nib_status status = nib_enter(nib_tensor_runtime(tensor));
  if (status == NIB_OK) status = check_bytes("tensor:read", tensor, bytes);
  if (status == NIB_OK) status = nib_tensor_wait(tensor, timeout_us);
  if (status == NIB_OK && bytes > 0) status = nib_fetch(tensor, data, bytes);
  if (status == NIB_OK) nib_tell_host("tensor:read", tensor, false);
  return status;
}
