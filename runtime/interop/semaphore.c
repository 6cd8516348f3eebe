/* Timeline semaphores of other APIs; the part that all devices share. */
#include <unistd.h>

#include "interop.h"

static enum nib_end semaphore_destroy(struct nib_deferred *self) {
  nib_semaphore *semaphore = (nib_semaphore *)self;
  nib_runtime *rt = self->device->runtime;
  if (!rt->closed) self->device->backend->sharing->destroy_semaphore(self->device, semaphore->impl);
  nib_uses_free(rt, &self->uses);
  nib_free(rt, semaphore, sizeof *semaphore);
  nib_handle_removed(rt);
  return NIB_GONE;
}

nib_status nib_semaphore_import(nib_device *device, int fd, nib_semaphore **out) {
  nib_runtime *rt = device->runtime;
  nib_status status = nib_check_fds(device, "semaphore", out);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status != NIB_OK) return status;
  nib_semaphore *semaphore = nib_allocate_zero(rt, sizeof *semaphore);
  if (!semaphore) return nib_fail_memory(rt, "semaphore", sizeof *semaphore);
  semaphore->deferred.device = device;
  semaphore->deferred.destroy = semaphore_destroy;
  status = device->backend->sharing->import_semaphore(device, fd, &semaphore->impl);
  if (status != NIB_OK) {
    nib_free(rt, semaphore, sizeof *semaphore);
    return status;
  }
  close(fd); /* the driver has a copy */
  nib_handle_added(rt);
  *out = semaphore;
  return NIB_OK;
}

void nib_semaphore_release(nib_semaphore *semaphore) {
  if (semaphore) nib_defer(&semaphore->deferred);
}

nib_device *nib_semaphore_device(const nib_semaphore *semaphore) { return semaphore->deferred.device; }

static nib_status submit(nib_stream *stream, nib_semaphore *semaphore, uint64_t value, const char *operation,
                         nib_status (*call)(nib_stream *stream, void *semaphore, uint64_t value)) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  nib_status status = nib_check_stream(stream, operation);
  if (status == NIB_OK) status = nib_check_not_capturing(device, operation);
  if (status != NIB_OK) return status;
  if (semaphore->deferred.device != device)
    return nib_fail(rt, NIB_INVALID, "%s: semaphore: expected one of the stream's device %s, got one of %s", operation,
                    device->info.name, semaphore->deferred.device->info.name);
  status = nib_uses_reserve(rt, &semaphore->deferred.uses);
  if (status == NIB_OK) status = call(stream, semaphore->impl, value);
  if (status != NIB_OK) return status;
  stream->submitted++;
  nib_uses_add(&semaphore->deferred.uses, stream, stream->submitted, true);
  NIB_TELL(rt, NIB_OBSERVED_WORK, .operation = operation, .device = device, .stream = stream->id);
  return NIB_OK;
}

nib_status nib_semaphore_wait(nib_stream *stream, nib_semaphore *semaphore, uint64_t value) {
  return submit(stream, semaphore, value, "semaphore:wait",
                semaphore->deferred.device->backend->sharing->wait_semaphore);
}

nib_status nib_semaphore_signal(nib_stream *stream, nib_semaphore *semaphore, uint64_t value) {
  return submit(stream, semaphore, value, "semaphore:signal",
                semaphore->deferred.device->backend->sharing->signal_semaphore);
}
