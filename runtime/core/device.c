/* Devices: finding them, and their information for hosts. */
#include <stdio.h>
#include <string.h>

#include "own.h"

int32_t nib_device_count(const nib_runtime *rt) { return rt->device_count; }

nib_device *nib_device_at(nib_runtime *rt, int32_t index) {
  return index >= 0 && index < rt->device_count ? &rt->devices[index] : NULL;
}

const nib_device_info *nib_device_get_info(const nib_device *device) { return &device->info; }
nib_runtime *nib_device_runtime(const nib_device *device) { return device->runtime; }

nib_stream *nib_device_default_stream(nib_device *device) {
  if (!device->default_stream && nib_enter(device->runtime) == NIB_OK) nib_device_open(device);
  return device->default_stream;
}

nib_status nib_device_use_context(nib_device *device, void *context) {
  nib_runtime *rt = device->runtime;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (!device->backend->foreign)
    return nib_fail(rt, NIB_INVALID, "use_context: device: expected a CUDA device, got %s", device->info.name);
  if (!device->info.available) return nib_fail(rt, NIB_UNAVAILABLE, "%s: %s", device->info.name, device->info.reason);
  if (device->default_stream)
    return nib_fail(rt, NIB_STATE,
                    "use_context: device: expected a device that is not in use yet, got %s with a context",
                    device->info.name);
  return device->backend->foreign->use_context(device, context);
}

bool nib_device_is_capturing(const nib_device *device) { return device->capture != NULL; }

void nib_device_memory_sized(nib_device *device, nib_memory_info *out, size_t out_bytes) {
  const nib_memory_info none = { 0 };
  if (!device->runtime->closed && !nib_is_forked(device->runtime)) nib_reap_in_time(device);
  nib_sized_write(out, out_bytes, device->runtime->closed ? &none : &device->memory, sizeof none);
}

nib_status nib_device_find(nib_runtime *rt, const char *name, nib_device **out) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  for (int32_t i = 0; i < rt->device_count; i++) {
    nib_device *device = &rt->devices[i];
    if (strcmp(device->info.name, name) != 0) continue;
    status = nib_device_open(device);
    if (status == NIB_OK) *out = device;
    return status;
  }
  if (strncmp(name, "cuda", 4) == 0)
    return nib_fail(rt, NIB_UNAVAILABLE, "%.64s: this build of nibble has no CUDA device", name);
  return nib_fail(rt, NIB_UNAVAILABLE, "there is no device \"%.64s\"; devices are \"cpu\" and \"cuda:N\"", name);
}

nib_status nib_device_find_uuid(nib_runtime *rt, const uint8_t uuid[16], nib_device **out) {
  static const uint8_t unknown[16];
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  for (int32_t i = 1; i < rt->device_count && memcmp(uuid, unknown, 16) != 0; i++)
    if (memcmp(rt->devices[i].info.uuid, uuid, 16) == 0) {
      status = nib_device_open(&rt->devices[i]);
      if (status == NIB_OK) *out = &rt->devices[i];
      return status;
    }
  char text[33];
  for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", (unsigned)uuid[i]);
  return nib_fail(rt, NIB_UNAVAILABLE, "find_uuid: uuid: expected that of a GPU which CUDA lists, got %s", text);
}

nib_device *nib_device_best(nib_runtime *rt) {
  bool usable = nib_enter(rt) == NIB_OK; /* if not, return the CPU: using it gives the reason */
  for (int32_t i = 1; usable && i < rt->device_count; i++)
    if (rt->devices[i].info.available && nib_device_open(&rt->devices[i]) == NIB_OK) return &rt->devices[i];
  return &rt->devices[0];
}
