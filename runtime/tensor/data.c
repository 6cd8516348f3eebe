/* Filling tensors, copying between them, and moving their elements to and from the host. */
#include <stdio.h>
#include <string.h>

#include "../../kernels/cpu/kernel.h"
#include "../core/floats.h"
#include "tensor.h"

/* ---- Fill and copy --------------------------------------------------------------------------------------------- */

static nib_status check_output(const char *operation, const char *name, const nib_tensor *tensor) {
  char text[NIB_DESCRIPTION];
  nib_status status = nib_check_writable(operation, name, tensor);
  if (status != NIB_OK || !nib_tensor_overlaps_itself(tensor)) return status;
  return nib_fail(
    nib_tensor_runtime(tensor), NIB_INVALID,
    "%s: %s: expected a tensor whose elements do not overlap in memory, got %s with a stride that repeats them",
    operation, name, nib_describe(tensor, text, sizeof text));
}

nib_status nib_check_device(const char *operation, const char *name, const nib_tensor *tensor,
                            const nib_stream *stream) {
  if (nib_tensor_dev(tensor) == stream->device) return NIB_OK;
  return nib_fail(stream->device->runtime, NIB_INVALID,
                  "%s: %s: expected a tensor on the stream's device %s, got one on %s", operation, name,
                  stream->device->info.name, nib_tensor_dev(tensor)->info.name);
}

nib_status nib_tensor_fill(nib_stream *stream, nib_tensor *tensor, nib_number value) {
  nib_runtime *rt = stream->device->runtime;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_device("tensor:fill", "tensor", tensor, stream);
  if (status == NIB_OK) status = check_output("tensor:fill", "tensor", tensor);
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

/* ---- Copies between devices ------------------------------------------------------------------------------------ */

static bool is_plain(const nib_tensor *destination,
                     const nib_tensor *source) { /* the same elements in the same order */
  return destination->dtype == source->dtype && nib_tensor_numel(destination) == nib_tensor_numel(source);
}

static size_t compact_bytes(const nib_tensor *tensor) {
  return (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype);
}

/* Whether the GPU's copy engine can do it, or all of it but conversions and strides on the GPU's side. */
static bool is_direct(const nib_tensor *destination, const nib_tensor *source) {
  const nib_tensor *host = nib_tensor_dev(source)->backend->host_memory ? source : destination;
  return nib_tensor_dev(destination)->backend->host_memory != nib_tensor_dev(source)->backend->host_memory &&
         nib_tensor_is_pinned(host) && nib_tensor_is_contiguous(host);
}

static nib_status transfer(nib_stream *stream, const char *name, nib_tensor *destination, nib_tensor *source) {
  nib_device *from = nib_tensor_dev(source);
  struct nib_transfer move = { nib_tensor_data(destination), nib_tensor_data(source), compact_bytes(destination),
                               from->backend->host_memory || from == stream->device ? NULL : from };
  struct nib_work work = { .name = name, .kernel = NIB_WORK_TRANSFER, .params = &move, .bytes = sizeof move };
  nib_access accesses[] = { { destination, true, "destination", NULL }, { source, false, "source", NULL } };
  return nib_submit(stream, "tensor:copy", &work, accesses, 2);
}

/* `stream` comes after what other streams have queued on the tensor so far. */
static nib_status follow_uses(nib_stream *stream, nib_tensor *tensor, bool writes_only) {
  struct nib_uses *uses = &tensor->storage->deferred.uses;
  for (int32_t i = 0; i < uses->count; i++) {
    nib_stream *other = uses->items[i].stream;
    uint64_t ticket = nib_use_ticket(&uses->items[i], writes_only);
    if (other == stream || other->device->backend != stream->device->backend ||
        other->device->backend->streams.reached(other, ticket))
      continue;
    nib_status status = other->capture ? nib_check_not_capturing(other->device, "tensor:copy") : NIB_OK;
    if (status == NIB_OK) status = stream->device->backend->copies->follow(stream, other, ticket);
    if (status != NIB_OK) return status;
    nib_tell_follow(stream, other);
  }
  return NIB_OK;
}

/* Between a GPU, in its stream, and pinned memory. */
static nib_status copy_pinned(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  bool down = nib_tensor_dev(destination)->backend->host_memory;
  nib_tensor *host = down ? destination : source, *other = down ? source : destination, *staging = NULL;
  nib_status status = nib_check_stream(stream, "tensor:copy");
  if (status == NIB_OK && !stream->capture) { /* a graph's replay sees to it itself */
    status = nib_wait_for_cpu(host->storage, !down, NIB_UNLIMITED);
    if (status == NIB_OK) status = follow_uses(stream, host, !down);
  }
  if (status != NIB_OK) return status;
  if (!is_plain(destination, source) || !nib_tensor_is_contiguous(other)) {
    status = nib_tensor_create(stream->device, host->dtype, host->ndim, host->shape, &staging);
    if (status == NIB_OK && down) status = nib_tensor_copy(stream, staging, source);
    other = staging;
  }
  if (status == NIB_OK)
    status =
      down ? transfer(stream, "copy to host", destination, other) : transfer(stream, "copy to device", other, source);
  if (status == NIB_OK && staging && !down) status = nib_tensor_copy(stream, destination, staging);
  nib_tensor_release(staging);
  return status;
}

static nib_status follow(nib_stream *stream, nib_stream *other) {
  nib_status status = stream->device->backend->copies->follow(stream, other, other->submitted);
  if (status == NIB_OK) nib_tell_follow(stream, other);
  return status;
}

/* Of the device's pool, which its peers may reach; what others have made is not shared with them. */
static bool is_own(const nib_tensor *tensor) { return !tensor->storage->foreign && !tensor->storage->shared; }

/* Between two GPUs: work of `to`, and in its order also of `from`, so that later work there may overwrite the
 * source. */
static nib_status copy_between(nib_stream *to, nib_stream *from, nib_tensor *destination, nib_tensor *source) {
  nib_tensor *packed = NULL, *landing = NULL;
  nib_status status = nib_check_stream(to, "tensor:copy");
  if (status == NIB_OK) status = nib_check_stream(from, "tensor:copy");
  if (status == NIB_OK) status = nib_check_not_capturing(to->device, "tensor:copy");
  if (status == NIB_OK) status = nib_check_not_capturing(from->device, "tensor:copy");
  bool pack = source->dtype != destination->dtype || !nib_tensor_is_contiguous(source) || !is_own(source);
  bool land = nib_tensor_numel(source) != nib_tensor_numel(destination) || !nib_tensor_is_contiguous(destination) ||
              !is_own(destination);
  if (status == NIB_OK && pack)
    status = nib_tensor_create(from->device, destination->dtype, source->ndim, source->shape, &packed);
  if (status == NIB_OK && land)
    status = nib_tensor_create(to->device, destination->dtype, source->ndim, source->shape, &landing);
  if (status == NIB_OK && pack) status = follow_uses(from, source, true);
  if (status == NIB_OK && pack) status = nib_tensor_copy(from, packed, source);
  if (status == NIB_OK) status = follow(to, from);
  if (status == NIB_OK && !pack) status = follow_uses(to, source, true);
  if (status == NIB_OK) status = transfer(to, "copy from device", land ? landing : destination, pack ? packed : source);
  if (status == NIB_OK && !pack) status = follow(from, to);
  if (status == NIB_OK && land) status = nib_tensor_copy(to, destination, landing);
  nib_tensor_release(packed);
  nib_tensor_release(landing);
  return status;
}

static nib_status wait_for_source(nib_tensor *destination, nib_tensor *source, int64_t timeout_us) {
  nib_status status = nib_check_not_capturing(nib_tensor_dev(destination), "tensor:copy");
  if (status == NIB_OK) status = nib_check_not_capturing(nib_tensor_dev(source), "tensor:copy");
  return status == NIB_OK ? nib_tensor_wait(source, timeout_us) : status;
}

/* Everything else: through host memory, when the source's writers are done. */
static nib_status copy_through_host(nib_stream *to, nib_tensor *destination, nib_tensor *source) {
  nib_runtime *rt = to->device->runtime;
  nib_status status = wait_for_source(destination, source, NIB_UNLIMITED);
  size_t bytes = compact_bytes(source);
  const void *data = nib_tensor_data(source);
  void *owned = NULL;
  nib_tensor *landing = NULL;
  if (status == NIB_OK && !(nib_tensor_dev(source)->backend->host_memory && nib_tensor_is_contiguous(source))) {
    data = owned = nib_allocate(rt, bytes);
    status = owned ? nib_tensor_read(source, owned, bytes, NIB_UNLIMITED) : nib_fail_memory(rt, "tensor:copy", bytes);
  }
  if (status == NIB_OK && !is_plain(destination, source))
    status = nib_tensor_create(to->device, source->dtype, source->ndim, source->shape, &landing);
  if (status == NIB_OK) status = nib_tensor_write(to, landing ? landing : destination, data, bytes);
  if (status == NIB_OK && landing) status = nib_tensor_copy(to, destination, landing);
  nib_free(rt, owned, bytes);
  nib_tensor_release(landing);
  return status;
}

/* ---- Copies ---------------------------------------------------------------------------------------------------- */

/* The source as a view of the destination's shape, which holds no reference of its own. */
static nib_status check_copy(nib_tensor *destination, nib_tensor *source, nib_tensor *view) {
  nib_runtime *rt = nib_tensor_runtime(destination);
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = check_output("tensor:copy", "destination", destination);
  if (status != NIB_OK) return status;
  char want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  *view = *source;
  bool fits = source->ndim <= destination->ndim;
  view->ndim = destination->ndim;
  for (int32_t i = 0; fits && i < destination->ndim; i++) {
    int32_t from = i - (destination->ndim - source->ndim);
    int64_t size = from >= 0 ? source->shape[from] : 1;
    fits = size == destination->shape[i] || size == 1;
    view->shape[i] = destination->shape[i];
    view->stride[i] = from >= 0 && size != 1 ? source->stride[from] : 0;
  }
  if (!fits)
    return nib_fail(rt, NIB_INVALID, "tensor:copy: source: expected a tensor expandable to the shape of %s, got %s",
                    nib_describe(destination, want, sizeof want), nib_describe(source, have, sizeof have));
  if (nib_tensor_runtime(source) != rt)
    return nib_fail(rt, NIB_INVALID, "tensor:copy: source: expected a tensor of the same runtime, got one of another");
  return NIB_OK;
}

static nib_status copy_here(nib_stream *stream, nib_tensor *destination, nib_tensor *source, const nib_tensor *view) {
  if (nib_tensor_same_view(destination, source)) return nib_check_stream(stream, "tensor:copy");
  if (nib_tensor_overlaps(destination, source)) return copy_overlapping(stream, destination, source);
  struct nib_copy_params params = copy_params(destination, view);
  nib_access accesses[] = { { destination, true, "destination", NULL }, { source, false, "source", NULL } };
  return nib_launch(stream, "tensor:copy", NIB_KERNEL_COPY, &params, sizeof params, accesses, 2);
}

nib_status nib_tensor_copy_between(nib_stream *to, nib_stream *from, nib_tensor *destination, nib_tensor *source) {
  nib_tensor view;
  nib_status status = nib_check_device("tensor:copy", "destination", destination, to);
  if (status == NIB_OK) status = check_copy(destination, source, &view);
  if (status == NIB_OK) status = nib_check_device("tensor:copy", "source", source, from);
  if (status != NIB_OK) return status;
  bool up = nib_tensor_dev(source)->backend->host_memory;
  if (nib_tensor_numel(destination) == 0) return nib_check_stream(to, "tensor:copy");
  if (to->device == from->device) return copy_here(to, destination, source, &view);
  if (is_direct(destination, source)) return copy_pinned(up ? to : from, destination, source);
  if (to->device->backend == from->device->backend) return copy_between(to, from, destination, source);
  return copy_through_host(to, destination, source);
}

nib_status nib_tensor_copy(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_device *to = nib_tensor_dev(destination), *from = nib_tensor_dev(source);
  if (to == from || to->runtime != from->runtime || (stream->device != to && stream->device != from))
    return nib_tensor_copy_between(stream, stream, destination, source);
  if (stream->device->backend->host_memory && is_direct(destination, source)) { /* its later work counts on the copy */
    nib_tensor view;
    nib_status status = check_copy(destination, source, &view);
    if (status != NIB_OK) return status;
    if (nib_tensor_numel(destination) == 0) return nib_check_stream(stream, "tensor:copy");
    return copy_through_host(stream->device == to ? stream : to->default_stream, destination, source);
  }
  return nib_tensor_copy_between(stream->device == to ? stream : to->default_stream,
                                 stream->device == from ? stream : from->default_stream, destination, source);
}

nib_status nib_tensor_copy_wait(nib_tensor *destination, nib_tensor *source, int64_t timeout_us) {
  nib_device *to = nib_tensor_dev(destination), *from = nib_tensor_dev(source);
  nib_status status = nib_enter(to->runtime);
  if (status != NIB_OK || to == from || (to->backend == from->backend && !to->backend->host_memory)) return status;
  if (is_direct(destination, source)) {
    bool down = to->backend->host_memory;
    if ((down ? from : to)->capture) return NIB_OK; /* it is recorded */
    return nib_wait_for_cpu((down ? destination : source)->storage, !down, timeout_us);
  }
  return wait_for_source(destination, source, timeout_us);
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
  return nib_launch(stream, "arange", NIB_KERNEL_ARANGE, &params, sizeof params, &access, 1);
}

static nib_status launch_random(nib_stream *stream, const char *operation, nib_tensor *tensor,
                                struct nib_random_params params) {
  params.out = nib_tensor_data(tensor);
  params.type = (int32_t)tensor->dtype;
  params.count = nib_tensor_numel(tensor);
  nib_access access = { tensor, true, "tensor", NULL };
  return nib_launch(stream, operation, NIB_KERNEL_RANDOM, &params, sizeof params, &access, 1);
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

/* ---- To and from the host -------------------------------------------------------------------------------------- */

static nib_status check_bytes(const char *operation, const nib_tensor *tensor, size_t bytes) {
  size_t expected = (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype);
  if (bytes == expected) return NIB_OK;
  return nib_fail(nib_tensor_runtime(tensor), NIB_INVALID, "%s: bytes: expected %zu, got %zu", operation, expected,
                  bytes);
}

nib_status nib_tensor_write(nib_stream *stream, nib_tensor *tensor, const void *data, size_t bytes) {
  nib_device *device = stream->device;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_device("tensor:write", "tensor", tensor, stream);
  if (status == NIB_OK) status = check_output("tensor:write", "tensor", tensor);
  if (status == NIB_OK) status = check_bytes("tensor:write", tensor, bytes);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:write");
  if (status != NIB_OK || bytes == 0) return status;
  /* No work ever knew this memory, so that there is no order to keep. */
  if (nib_tensor_is_contiguous(tensor) && tensor->storage->deferred.uses.capacity == 0) {
    if (device->backend->host_memory) memcpy(nib_tensor_data(tensor), data, bytes);
    else status = device->backend->copies->upload(device, nib_tensor_data(tensor), data, bytes);
    if (status != NIB_OK) return status;
    nib_tell_host("tensor:write", tensor, true);
    return NIB_OK;
  }
  nib_tensor *staging;
  status = nib_tensor_create(device, tensor->dtype, tensor->ndim, tensor->shape, &staging);
  if (status == NIB_OK) status = nib_tensor_write(stream, staging, data, bytes);
  if (status == NIB_OK) status = nib_tensor_copy(stream, tensor, staging);
  nib_tensor_release(staging);
  return status;
}

nib_status nib_tensor_wait(nib_tensor *tensor, int64_t timeout_us) {
  nib_device *device = nib_tensor_dev(tensor);
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:wait");
  if (status != NIB_OK) return status;
  struct nib_uses *uses = &tensor->storage->deferred.uses;
  status = nib_uses_wait(device, uses, true, timeout_us);
  if (status != NIB_OK) return status;
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "tensor:wait", .device = device,
           .storage = tensor->storage->id);
  status = nib_take_trouble(device, 0);
  for (int32_t i = 0; status == NIB_OK && i < uses->count; i++) { /* and of GPUs that copied into pinned memory */
    nib_device *writer = uses->items[i].stream->device;
    if (writer != device && uses->items[i].write > 0) status = nib_take_trouble(writer, 0);
  }
  nib_uses_idle(uses);
  return status;
}

struct nib_pieces nib_pieces_of(const nib_tensor *tensor, int64_t most) {
  struct nib_pieces pieces = {
    .whole = tensor, .view = *tensor, .numel = nib_tensor_numel(tensor), .inner = 1, .dim = tensor->ndim - 1
  };
  while (pieces.numel > 0 && pieces.dim >= 0 && tensor->shape[pieces.dim] <= most / pieces.inner)
    pieces.inner *= tensor->shape[pieces.dim--];
  pieces.step = most / pieces.inner;
  return pieces;
}

bool nib_next_piece(struct nib_pieces *pieces) {
  const nib_tensor *whole = pieces->whole;
  int64_t item = (int64_t)nib_dtype_bytes(whole->dtype), row;
  pieces->at += pieces->count;
  if (pieces->at >= pieces->numel) return false;
  pieces->count = pieces->numel;
  if (pieces->dim < 0) return true;
  row = pieces->at / pieces->inner;
  pieces->view.offset_bytes = whole->offset_bytes;
  for (int32_t i = pieces->dim; i >= 0; i--) {
    int64_t index = row % whole->shape[i];
    row /= whole->shape[i];
    pieces->view.offset_bytes += index * whole->stride[i] * item;
    pieces->view.shape[i] = 1;
    if (i < pieces->dim) continue;
    pieces->view.shape[i] = whole->shape[i] - index < pieces->step ? whole->shape[i] - index : pieces->step;
    pieces->count = pieces->view.shape[i] * pieces->inner;
  }
  return true;
}

static void run_alone(void *context, int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t),
                      void *argument) {
  (void)context, (void)grain;
  body(argument, 0, count);
}

/* Copies on this thread what the host reaches, and looks at the clock. */
static nib_status fetch_pieces(nib_tensor *tensor, char *data) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  struct nib_cpu_team alone = { run_alone, NULL };
  bool compact = nib_tensor_is_contiguous(tensor);
  int64_t item = (int64_t)nib_dtype_bytes(tensor->dtype);
  struct nib_pieces pieces = nib_pieces_of(tensor, NIB_PIECE);
  while (nib_next_piece(&pieces)) {
    if (pieces.at > 0 && nib_is_late(rt)) return nib_fail_late(rt, "tensor:read");
    if (compact) {
      memcpy(data + pieces.at * item, nib_tensor_data(&pieces.view), (size_t)(pieces.count * item));
      continue;
    }
    nib_tensor target = pieces.view; /* the same shape, compact, in the caller's memory */
    int64_t stride = 1;
    for (int32_t i = target.ndim - 1; i >= 0; stride *= target.shape[i--]) target.stride[i] = stride;
    struct nib_copy_params params = copy_params(&target, &pieces.view);
    params.destination = data + pieces.at * item;
    nib_cpu_copy(&params, &alone);
  }
  return NIB_OK;
}

#define DOWNLOAD_PIECE ((size_t)4 << 20)

/* From a GPU's compact tensor, looking at the clock. */
static nib_status download(nib_tensor *tensor, char *data, size_t bytes) {
  nib_device *device = nib_tensor_dev(tensor);
  const char *source = nib_tensor_data(tensor);
  nib_status status = NIB_OK;
  for (size_t at = 0, piece = 0; status == NIB_OK && at < bytes; at += piece) {
    if (at > 0 && nib_is_late(device->runtime)) return nib_fail_late(device->runtime, "tensor:read");
    piece = bytes - at < DOWNLOAD_PIECE ? bytes - at : DOWNLOAD_PIECE;
    status = device->backend->copies->download(device, data + at, source + at, piece);
  }
  return status;
}

static nib_status fetch(nib_tensor *tensor, void *data, size_t bytes) {
  nib_device *device = nib_tensor_dev(tensor);
  if (device->backend->host_memory) return fetch_pieces(tensor, data);
  if (nib_tensor_is_contiguous(tensor)) return download(tensor, data, bytes);
  nib_tensor *packed = NULL;
  /* A stream of the runtime's own, so that it waits for such copies alone, and however many a script has open. */
  nib_status status = device->fetches ? NIB_OK : nib_stream_open_own(device, &device->fetches);
  if (status == NIB_OK) status = nib_tensor_create(device, tensor->dtype, tensor->ndim, tensor->shape, &packed);
  if (status == NIB_OK) status = nib_tensor_copy(device->fetches, packed, tensor);
  if (status == NIB_OK) /* trouble stays to be told */
    status = nib_uses_wait(device, &packed->storage->deferred.uses, true, NIB_UNLIMITED);
  if (status == NIB_OK) status = download(packed, data, bytes);
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
