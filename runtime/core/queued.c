/* The limit of queued bytes, and dropping queued work. */
#include "own.h"

#define MOST ((uint64_t)1 << 62) /* more than any tensor has; sums saturate at it */

uint64_t nib_operand_bytes(uint64_t before, const nib_access *accesses, int32_t access_count) {
  uint64_t total = before;
  for (int32_t i = 0; i < access_count && total < MOST; i++) {
    const nib_tensor *tensor = accesses[i].tensor;
    if (tensor) total += (uint64_t)nib_shape_numel(tensor->ndim, tensor->shape) * nib_dtype_bytes(tensor->dtype);
  }
  return total < MOST ? total : MOST;
}

/* ---- The limit ------------------------------------------------------------------------------------------------- */

/* Removes loads that are done. */
static void settle(nib_device *device) {
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    int32_t done = 0;
    while (done < stream->load_count && device->backend->streams.reached(stream, stream->loads[done].ticket))
      device->queued_bytes -= stream->loads[done++].bytes;
    stream->load_count -= done;
    for (int32_t i = 0; done > 0 && i < stream->load_count; i++) stream->loads[i] = stream->loads[i + done];
  }
}

static bool has_room(const nib_device *device, uint64_t bytes) {
  uint64_t most = device->runtime->config.queued_bytes;
  return device->queued_bytes == 0 || (bytes <= most && device->queued_bytes <= most - bytes);
}

nib_status nib_queued_wait(nib_device *device, const char *operation, uint64_t bytes) {
  nib_runtime *rt = device->runtime;
  uint64_t most = rt->config.queued_bytes;
  if (most == 0 || bytes == 0) return NIB_OK;
  if (bytes > most && !device->backend->dropping)
    return nib_fail(rt, NIB_INVALID,
                    "%s: its operands have %llu bytes, more than the limit of %llu for queued work (queued_bytes)",
                    operation, (unsigned long long)bytes, (unsigned long long)most);
  if (!has_room(device, bytes)) settle(device);
  while (!has_room(device, bytes)) {
    int64_t left = nib_time_to_deadline(rt);
    if (left == 0) return nib_fail_late(rt, operation);
    nib_stream *stream = device->streams;
    while (stream->load_count == 0) stream = stream->next;
    nib_status status = device->backend->streams.wait(stream, stream->loads[0].ticket, left < 1000 ? left : 1000);
    if (status != NIB_OK && status != NIB_TIMEOUT) return status;
    settle(device);
  }
  return NIB_OK;
}

/* Small loads are added to the previous one, since there are only NIB_LOADS places. */
void nib_queued_add(nib_stream *stream, uint64_t bytes) {
  uint64_t most = stream->device->runtime->config.queued_bytes;
  if (most == 0 || bytes == 0) return;
  stream->device->queued_bytes += bytes;
  struct nib_load *last = stream->load_count > 0 ? &stream->loads[stream->load_count - 1] : NULL;
  if (last && (last->bytes + bytes <= most / (NIB_LOADS / 4) || stream->load_count == NIB_LOADS)) {
    last->ticket = stream->submitted;
    last->bytes += bytes;
    return;
  }
  stream->loads[stream->load_count++] = (struct nib_load){ stream->submitted, bytes };
}

nib_status nib_set_limits(nib_runtime *rt, uint64_t memory_cap, uint64_t queued_bytes, int64_t streams) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (streams < 0)
    return nib_fail(rt, NIB_INVALID, "set_limits: streams: expected 0 or more, got %lld", (long long)streams);
  rt->config.memory_cap = memory_cap;
  rt->config.queued_bytes = queued_bytes;
  rt->config.streams = streams;
  return NIB_OK;
}

/* ---- Dropping -------------------------------------------------------------------------------------------------- */

void nib_mark_work(nib_runtime *rt) {
  for (int32_t i = 0; i < rt->device_count; i++)
    for (nib_stream *stream = rt->devices[i].streams; stream; stream = stream->next) stream->marked = stream->submitted;
}

static bool is_cut(const struct nib_storage *storage) {
  const struct nib_uses *uses = &storage->deferred.uses;
  for (int32_t i = 0; storage->references > 0 && i < uses->count; i++)
    if (uses->items[i].stream->dropped && uses->items[i].write >= uses->items[i].stream->dropped) return true;
  return false;
}

nib_status nib_drop_work(nib_runtime *rt, int32_t *cut) {
  bool any = false;
  if (cut) *cut = 0;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  for (int32_t i = 0; i < rt->device_count; i++)
    for (nib_stream *stream = rt->devices[i].streams; stream; stream = stream->next) {
      stream->dropped =
        rt->devices[i].backend->dropping ? rt->devices[i].backend->dropping->drop(stream, stream->marked) : 0;
      any = any || stream->dropped != 0;
    }
  for (int32_t i = 0; any && (cut || rt->observe) && i < rt->device_count; i++)
    for (const struct nib_storage *storage = rt->devices[i].storages; storage; storage = storage->next) {
      if (!is_cut(storage)) continue;
      if (cut) ++*cut;
      NIB_TELL(rt, NIB_OBSERVED_STORAGE_CUT, .operation = "drop_work", .device = &rt->devices[i],
               .storage = storage->id);
    }
  return NIB_OK;
}
