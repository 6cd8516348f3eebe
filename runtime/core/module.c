/* Modules of device code: loading and unloading. */
#include <string.h>

#include "own.h"

static enum nib_end module_destroy(struct nib_deferred *self) {
  nib_module *module = (nib_module *)self;
  nib_device *device = self->device;
  nib_runtime *rt = device->runtime;
  if (module->impl) {
    device->backend->modules->unload(device, module->impl);
    if (module->next) module->next->previous = module->previous;
    *(module->previous ? &module->previous->next : &device->modules) = module->next;
  }
  nib_uses_free(rt, &self->uses);
  nib_free(rt, module, sizeof *module);
  nib_handle_removed(rt);
  return NIB_GONE;
}

void nib_modules_close(nib_device *device) {
  for (nib_module *module = device->modules; module; module = module->next) {
    device->backend->modules->unload(device, module->impl);
    module->impl = NULL;
  }
  device->modules = NULL;
}

void nib_module_retain(nib_module *module) { module->references++; }

void nib_module_release(nib_module *module) {
  if (module && --module->references == 0) nib_defer(&module->deferred);
}

/* Opens the device; refuses one without user kernels. */
nib_status nib_check_loads(nib_device *device, const char *operation) {
  nib_status status = nib_enter(device->runtime);
  if (status != NIB_OK) return status;
  if (!device->backend->modules)
    return nib_fail(device->runtime, NIB_UNAVAILABLE, "%s: device: expected a CUDA device, got %s", operation,
                    device->info.name);
  return nib_device_open(device);
}

nib_status nib_module_create(nib_device *device, const void *image, size_t bytes, nib_module **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_check_loads(device, "module");
  if (status == NIB_OK) status = nib_check_not_capturing(device, "module");
  if (status != NIB_OK) return status;
  /* The driver reads PTX up to a zero byte. */
  char *copy = nib_allocate(rt, bytes + 1);
  nib_module *module = copy ? nib_allocate_zero(rt, sizeof *module) : NULL;
  if (!module) {
    nib_free(rt, copy, bytes + 1);
    return nib_fail_memory(rt, "module", bytes);
  }
  if (bytes) memcpy(copy, image, bytes);
  copy[bytes] = 0;
  status = device->backend->modules->load(device, copy, bytes, &module->impl);
  nib_free(rt, copy, bytes + 1);
  if (status != NIB_OK) {
    nib_free(rt, module, sizeof *module);
    return status;
  }
  module->deferred.device = device;
  module->deferred.destroy = module_destroy;
  module->references = 1;
  module->next = device->modules;
  if (module->next) module->next->previous = module;
  device->modules = module;
  nib_handle_added(rt);
  *out = module;
  return NIB_OK;
}

nib_device *nib_module_device(const nib_module *module) { return module->deferred.device; }
