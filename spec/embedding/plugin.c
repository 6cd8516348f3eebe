/* A plugin with a nibble of its own: a runtime that lives from `plugin_open` to `plugin_close`. */
#include "nibble.h"

static nib_runtime *runtime;
static nib_tensor *tensor;

__attribute__((visibility("default"))) const void *plugin_open(void) {
  const int64_t size = 100;
  if (nib_runtime_create(NULL, &runtime) != NIB_OK) return NULL;
  nib_device *cpu = nib_device_at(runtime, 0);
  if (nib_tensor_create(cpu, NIB_FLOAT32, 1, &size, &tensor) != NIB_OK) return NULL;
  return (const void *)(uintptr_t)nib_version; /* whose nibble it is */
}

__attribute__((visibility("default"))) double plugin_use(double value) {
  float elements[100] = { 0 };
  nib_stream *stream = nib_device_default_stream(nib_device_at(runtime, 0));
  if (nib_tensor_fill(stream, tensor, NIB_REAL(value)) != NIB_OK) return -1;
  return nib_tensor_read(tensor, elements, sizeof elements, NIB_UNLIMITED) == NIB_OK ? elements[99] : -1;
}

__attribute__((visibility("default"))) void plugin_close(void) {
  nib_tensor_release(tensor);
  nib_runtime_close(runtime);
}
