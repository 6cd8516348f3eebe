/* Waits of the host for a stream or a device. */
#include "own.h"

nib_status nib_stream_synchronize(nib_stream *stream, int64_t timeout_us) {
  nib_device *device = stream->device;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "stream:synchronize");
  if (status == NIB_OK) status = nib_wait(stream, stream->submitted, timeout_us);
  if (status != NIB_OK) return status;
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "stream:synchronize", .device = device,
           .stream = stream->id);
  nib_reap_in_time(device);
  return nib_take_trouble(device, stream->id);
}

nib_status nib_device_synchronize(nib_device *device, int64_t timeout_us) {
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "synchronize");
  if (status != NIB_OK) return status;
  int64_t start = nib_now_us();
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    if (stream->id == 0) continue; /* the runtime's own */
    status = nib_wait(stream, stream->submitted, nib_time_left(start, timeout_us));
    if (status != NIB_OK) return status;
  }
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "synchronize", .device = device);
  nib_reap_in_time(device);
  return nib_take_trouble(device, 0);
}
