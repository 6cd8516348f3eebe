/* Copies between devices: between a GPU and pinned memory, between GPUs, through host memory. */
#include "tensor.h"

static bool is_plain(const nib_tensor *destination,
                     const nib_tensor *source) { /* both have the same elements in the same order */
  return destination->dtype == source->dtype && nib_tensor_numel(destination) == nib_tensor_numel(source);
}

static size_t compact_bytes(const nib_tensor *tensor) {
  return (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype);
}

/* Whether the GPU's copy engine can do the copy, after or before a conversion on the GPU. */
static bool is_direct(const nib_tensor *destination, const nib_tensor *source) {
  const nib_tensor *host = nib_tensor_device(source)->backend->host_memory ? source : destination;
  return nib_tensor_device(destination)->backend->host_memory != nib_tensor_device(source)->backend->host_memory &&
         nib_tensor_is_pinned(host) && nib_tensor_is_contiguous(host);
}

static nib_status transfer(nib_stream *stream, const char *name, nib_tensor *destination, nib_tensor *source) {
  nib_device *from = nib_tensor_device(source);
  struct nib_transfer move = { nib_tensor_data(destination), nib_tensor_data(source), compact_bytes(destination),
                               from->backend->host_memory || from == stream->device ? NULL : from };
  struct nib_work work = { .name = name, .kernel = NIB_WORK_TRANSFER, .params = &move, .bytes = sizeof move };
  nib_access accesses[] = { { destination, true, "destination", NULL }, { source, false, "source", NULL } };
  return nib_submit(stream, "tensor:copy", &work, accesses, 2);
}

/* Makes `stream` wait for the work on the tensor that other streams have queued. */
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

/* Copies between a GPU and pinned memory, in the GPU's stream. */
static nib_status copy_pinned(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  bool down = nib_tensor_device(destination)->backend->host_memory;
  nib_tensor *host = down ? destination : source, *other = down ? source : destination, *staging = NULL;
  nib_status status = nib_check_stream(stream, "tensor:copy");
  if (status == NIB_OK && !stream->capture) { /* a replay of the graph waits by itself */
    status = nib_wait_for_cpu(host->storage, !down, NIB_UNLIMITED);
    if (status == NIB_OK) status = follow_uses(stream, host, !down);
  }
  if (status != NIB_OK) return status;
  if (!is_plain(destination, source) || !nib_tensor_is_contiguous(other)) {
    status = nib_tensor_create(stream->device, host->dtype, host->ndim, host->shape, &staging);
    if (status == NIB_OK && down) status = nib_copy_here(stream, staging, source);
    other = staging;
  }
  if (status == NIB_OK)
    status =
      down ? transfer(stream, "copy to host", destination, other) : transfer(stream, "copy to device", other, source);
  if (status == NIB_OK && staging && !down) status = nib_copy_here(stream, destination, staging);
  nib_tensor_release(staging);
  return status;
}

static nib_status follow(nib_stream *stream, nib_stream *other) {
  nib_status status = stream->device->backend->copies->follow(stream, other, other->submitted);
  if (status == NIB_OK) nib_tell_follow(stream, other);
  return status;
}

/* Whether the memory is from the device's pool, which peers can access. They cannot access memory of others. */
static bool is_own(const nib_tensor *tensor) { return !tensor->storage->foreign && !tensor->storage->shared; }

/* Copies between two GPUs as work of `to`. `from` waits for it, so that its later work may overwrite the source. */
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
  if (status == NIB_OK && pack) status = nib_copy_here(from, packed, source);
  if (status == NIB_OK) status = follow(to, from);
  if (status == NIB_OK && !pack) status = follow_uses(to, source, true);
  if (status == NIB_OK) status = transfer(to, "copy from device", land ? landing : destination, pack ? packed : source);
  if (status == NIB_OK && !pack) status = follow(from, to);
  if (status == NIB_OK && land) status = nib_copy_here(to, destination, landing);
  nib_tensor_release(packed);
  nib_tensor_release(landing);
  return status;
}

static nib_status wait_for_source(nib_tensor *destination, nib_tensor *source, int64_t timeout_us) {
  nib_status status = nib_check_not_capturing(nib_tensor_device(destination), "tensor:copy");
  if (status == NIB_OK) status = nib_check_not_capturing(nib_tensor_device(source), "tensor:copy");
  return status == NIB_OK ? nib_tensor_wait(source, timeout_us) : status;
}

/* Copies through host memory, after the work that writes the source is done. */
static nib_status copy_through_host(nib_stream *to, nib_tensor *destination, nib_tensor *source) {
  nib_runtime *rt = to->device->runtime;
  nib_status status = wait_for_source(destination, source, NIB_UNLIMITED);
  size_t bytes = compact_bytes(source);
  const void *data = nib_tensor_data(source);
  void *owned = NULL;
  nib_tensor *landing = NULL;
  if (status == NIB_OK && !(nib_tensor_device(source)->backend->host_memory && nib_tensor_is_contiguous(source))) {
    data = owned = nib_allocate(rt, bytes);
    status = owned ? nib_tensor_read(source, owned, bytes, NIB_UNLIMITED) : nib_fail_memory(rt, "tensor:copy", bytes);
  }
  if (status == NIB_OK && !is_plain(destination, source))
    status = nib_tensor_create(to->device, source->dtype, source->ndim, source->shape, &landing);
  if (status == NIB_OK) status = nib_tensor_write(to, landing ? landing : destination, data, bytes);
  if (status == NIB_OK && landing) status = nib_copy_here(to, destination, landing);
  nib_free(rt, owned, bytes);
  nib_tensor_release(landing);
  return status;
}

nib_status nib_tensor_copy_between(nib_stream *to, nib_stream *from, nib_tensor *destination, nib_tensor *source) {
  if (to->device == from->device) return nib_copy_here(to, destination, source);
  nib_tensor view;
  nib_status status = nib_check_device("tensor:copy", "destination", destination, to);
  if (status == NIB_OK) status = nib_check_copy(destination, source, &view);
  if (status == NIB_OK) status = nib_check_device("tensor:copy", "source", source, from);
  if (status != NIB_OK) return status;
  bool up = nib_tensor_device(source)->backend->host_memory;
  if (nib_tensor_numel(destination) == 0) return nib_check_stream(to, "tensor:copy");
  if (is_direct(destination, source)) return copy_pinned(up ? to : from, destination, source);
  if (to->device->backend == from->device->backend) return copy_between(to, from, destination, source);
  return copy_through_host(to, destination, source);
}

nib_status nib_tensor_copy(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_device *to = nib_tensor_device(destination), *from = nib_tensor_device(source);
  if (to == from || to->runtime != from->runtime || (stream->device != to && stream->device != from))
    return nib_tensor_copy_between(stream, stream, destination, source);
  if (stream->device->backend->host_memory &&
      is_direct(destination, source)) { /* a CPU stream: its later work must come after the copy */
    nib_tensor view;
    nib_status status = nib_check_copy(destination, source, &view);
    if (status != NIB_OK) return status;
    if (nib_tensor_numel(destination) == 0) return nib_check_stream(stream, "tensor:copy");
    return copy_through_host(stream->device == to ? stream : to->default_stream, destination, source);
  }
  return nib_tensor_copy_between(stream->device == to ? stream : to->default_stream,
                                 stream->device == from ? stream : from->default_stream, destination, source);
}

nib_status nib_tensor_copy_wait(nib_tensor *destination, nib_tensor *source, int64_t timeout_us) {
  nib_device *to = nib_tensor_device(destination), *from = nib_tensor_device(source);
  nib_status status = nib_enter(to->runtime);
  if (status != NIB_OK || to == from || (to->backend == from->backend && !to->backend->host_memory)) return status;
  if (is_direct(destination, source)) {
    bool down = to->backend->host_memory;
    if ((down ? from : to)->capture) return NIB_OK; /* the copy was captured */
    return nib_wait_for_cpu((down ? destination : source)->storage, !down, timeout_us);
  }
  return wait_for_source(destination, source, timeout_us);
}
