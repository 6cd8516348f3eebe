/* Queues work in streams. */
#include "own.h"

nib_status nib_check_writable(const char *operation, const char *parameter, const nib_tensor *tensor) {
  if (!tensor->storage->read_only) return NIB_OK;
  char text[NIB_DESCRIPTION];
  return nib_fail(nib_tensor_runtime(tensor), NIB_INVALID,
                  "%s: %s: expected a writable tensor, got %s in read-only memory", operation,
                  parameter ? parameter : "args", nib_describe(tensor, text, sizeof text));
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
  if (work->module) status = nib_uses_reserve(device->runtime, &work->module->deferred.uses);
  if (status == NIB_OK) status = nib_queued_wait(device, operation, bytes);
  if (status == NIB_OK) status = device->backend->streams.launch(stream, work);
  if (status != NIB_OK) return status;
  stream->submitted++;
  nib_queued_add(stream, bytes);
  for (int32_t i = 0; i < access_count; i++)
    if (accesses[i].tensor)
      nib_uses_add(&accesses[i].tensor->storage->deferred.uses, stream, stream->submitted, accesses[i].write);
  if (work->module) nib_uses_add(&work->module->deferred.uses, stream, stream->submitted, false);
  if (device->runtime->observe) nib_tell_work(stream, operation, work, accesses, access_count, -1);
  return NIB_OK;
}

nib_status nib_stream_call(nib_stream *stream, nib_status (*function)(void *user), void *user) {
  nib_status status = nib_check_stream(stream, "stream:call");
  if (status == NIB_OK) status = nib_check_not_capturing(stream->device, "stream:call");
  if (status == NIB_OK) status = stream->device->backend->streams.call(stream, function, user);
  if (status != NIB_OK) return status;
  stream->submitted++;
  NIB_TELL(stream->device->runtime, NIB_OBSERVED_WORK, .operation = "stream:call", .device = stream->device,
           .stream = stream->id);
  return NIB_OK;
}
