/* User kernels: compiling and launching. */
#include <string.h>

#include "tools.h"

struct nib_user_kernel {
  nib_module *module;
  void *impl; /* the device's function */
  char *name;
  nib_kernel_attributes attributes;
  struct nib_params_layout layout;
};

nib_status nib_compile(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                       nib_module **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_check_loads(device, "compile");
  if (status == NIB_OK) status = nib_check_not_capturing(device, "compile");
  char *image = NULL;
  size_t bytes = 0;
  if (status == NIB_OK)
    status = device->backend->modules->compile(device, source, options, option_count, &image, &bytes);
  if (status == NIB_OK) status = nib_module_create(device, image, bytes, out);
  nib_free(rt, image, bytes);
  return status;
}

nib_status nib_module_kernel(nib_module *module, const char *name, nib_user_kernel **out) {
  nib_device *device = module->deferred.device;
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  nib_user_kernel *kernel = nib_allocate_zero(rt, sizeof *kernel);
  char *copy = kernel ? nib_allocate(rt, strlen(name) + 1) : NULL;
  if (!copy) {
    nib_free(rt, kernel, sizeof *kernel);
    return nib_fail_memory(rt, "module:kernel", sizeof *kernel);
  }
  status =
    device->backend->modules->find(device, module->impl, name, &kernel->impl, &kernel->attributes, &kernel->layout);
  if (status != NIB_OK) {
    nib_free(rt, copy, strlen(name) + 1);
    nib_free(rt, kernel, sizeof *kernel);
    return status;
  }
  memcpy(copy, name, strlen(name) + 1);
  kernel->name = copy;
  kernel->module = module;
  nib_module_retain(module);
  nib_handle_added(rt);
  *out = kernel;
  return NIB_OK;
}

void nib_user_kernel_release(nib_user_kernel *kernel) {
  if (!kernel) return;
  nib_runtime *rt = kernel->module->deferred.device->runtime;
  nib_module_release(kernel->module);
  nib_free(rt, kernel->name, strlen(kernel->name) + 1);
  nib_free(rt, kernel, sizeof *kernel);
  nib_handle_removed(rt);
}

nib_device *nib_user_kernel_device(const nib_user_kernel *kernel) { return kernel->module->deferred.device; }
const char *nib_user_kernel_name(const nib_user_kernel *kernel) { return kernel->name; }
void nib_user_kernel_attributes_sized(const nib_user_kernel *kernel, nib_kernel_attributes *out, size_t out_bytes) {
  nib_sized_write(out, out_bytes, &kernel->attributes, sizeof kernel->attributes);
}
int32_t nib_user_kernel_param_count(const nib_user_kernel *kernel) { return kernel->layout.count; }

size_t nib_user_kernel_param_bytes(const nib_user_kernel *kernel, int32_t index) {
  return index >= 0 && index < kernel->layout.count ? kernel->layout.bytes[index] : 0;
}

/* ---- Launching ------------------------------------------------------------------------------------------------- */

/* Checks the sizes here, since an error of the driver would invalidate a capture. The limits are the same on all GPUs
 * that CUDA supports. */
static nib_status check_extent(nib_runtime *rt, const char *name, const uint32_t size[3], const uint32_t most[3]) {
  for (int i = 0; i < 3; i++)
    if (size[i] < 1 || size[i] > most[i])
      return nib_fail(rt, NIB_INVALID, "kernel:launch: %s: expected 1..%u in dimension %d, got %u", name,
                      (unsigned)most[i], i + rt->config.index_base, (unsigned)size[i]);
  return NIB_OK;
}

static nib_status check_extents(nib_runtime *rt, const nib_user_kernel *kernel, const nib_launch_desc *desc) {
  nib_status status = check_extent(rt, "grid", desc->grid, (const uint32_t[]){ INT32_MAX, 65535, 65535 });
  if (status == NIB_OK) status = check_extent(rt, "block", desc->block, (const uint32_t[]){ 1024, 1024, 64 });
  uint32_t threads = desc->block[0] * desc->block[1] * desc->block[2], most = (uint32_t)kernel->attributes.max_threads;
  if (status == NIB_OK && threads > most)
    status = nib_fail(rt, NIB_INVALID, "kernel:launch: block: expected at most %u threads for %s, got %u",
                      (unsigned)most, kernel->name, (unsigned)threads);
  return status;
}

/* Packs the parameters into one buffer for the driver. If the driver gives no layout, each is aligned to its size. */
static nib_status pack(nib_runtime *rt, const nib_user_kernel *kernel, const nib_argument *arguments, int32_t count,
                       unsigned char *buffer, size_t *bytes) {
  const struct nib_params_layout *layout = &kernel->layout;
  if (layout->count >= 0 && count != layout->count)
    return nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected %d arguments for %s, got %d", (int)layout->count,
                    kernel->name, (int)count);
  *bytes = 0;
  for (int32_t i = 0; i < count; i++) {
    const nib_argument *argument = &arguments[i];
    if (!argument->tensor && !argument->value)
      return nib_fail(rt, NIB_INVALID,
                      "kernel:launch: args: expected a tensor or a value as argument %lld, got neither",
                      (long long)i + rt->config.index_base);
    void *pointer = argument->tensor ? nib_tensor_data(argument->tensor) : NULL;
    const void *value = argument->tensor ? (const void *)&pointer : argument->value;
    size_t size = argument->tensor ? sizeof pointer : argument->bytes;
    if (layout->count >= 0 && size != layout->bytes[i])
      return nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected %zu bytes for parameter %lld of %s, got %zu%s",
                      layout->bytes[i], (long long)i + rt->config.index_base, kernel->name, size,
                      argument->tensor ? " (a tensor's pointer)" : "");
    if (size > NIB_ARGUMENT_BYTES)
      return nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected at most %d bytes of arguments, got %zu",
                      NIB_ARGUMENT_BYTES, size);
    size_t offset = layout->count >= 0 ? layout->offset[i] : (*bytes + size - 1) / (size ? size : 1) * size;
    if (size == 0 || offset + size > NIB_ARGUMENT_BYTES)
      return nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected at most %d bytes of arguments, got %zu",
                      NIB_ARGUMENT_BYTES, offset + size);
    memcpy(buffer + offset, value, size);
    if (*bytes < offset + size) *bytes = offset + size;
  }
  return NIB_OK;
}

nib_status nib_user_kernel_launch_sized(nib_stream *stream, nib_user_kernel *kernel, const nib_launch_desc *given,
                                        size_t desc_bytes) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  nib_launch_desc own;
  const nib_launch_desc *desc = &own;
  nib_status status = nib_check_stream(stream, "kernel:launch");
  if (status == NIB_OK) status = NIB_READ_DESC(rt, "kernel:launch", nib_launch_desc, &own, given, desc_bytes);
  if (status != NIB_OK) return status;
  if (kernel->module->deferred.device != device)
    return nib_fail(rt, NIB_INVALID, "kernel:launch: stream: expected a stream of %s, got one of %s",
                    kernel->module->deferred.device->info.name, device->info.name);
  if (desc->argument_count < 0 || desc->argument_count > NIB_MAX_ARGUMENTS)
    return nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected at most %d arguments, got %d", NIB_MAX_ARGUMENTS,
                    (int)desc->argument_count);
  if (desc->argument_count > 0 && !desc->arguments)
    return nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected %d arguments, got NULL", (int)desc->argument_count);
  status = check_extents(rt, kernel, desc);
  nib_access accesses[NIB_MAX_ARGUMENTS];
  for (int32_t i = 0; status == NIB_OK && i < desc->argument_count; i++) {
    nib_tensor *tensor = desc->arguments[i].tensor;
    accesses[i] =
      (nib_access){ .tensor = tensor, .write = true }; /* it is not known whether the kernel reads or writes it */
    if (tensor && nib_tensor_device(tensor) != device)
      status = nib_fail(rt, NIB_INVALID, "kernel:launch: args: expected tensors on %s, got one on %s as argument %lld",
                        device->info.name, nib_tensor_device(tensor)->info.name, (long long)i + rt->config.index_base);
  }
  unsigned char buffer[NIB_ARGUMENT_BYTES] = { 0 };
  struct nib_work work = { .name = kernel->name,
                           .kernel = NIB_KERNEL_COUNT,
                           .module = kernel->module,
                           .function = kernel->impl,
                           .params = buffer,
                           .shared_bytes = desc->shared_bytes };
  memcpy(work.grid, desc->grid, sizeof work.grid);
  memcpy(work.block, desc->block, sizeof work.block);
  if (status == NIB_OK) status = pack(rt, kernel, desc->arguments, desc->argument_count, buffer, &work.bytes);
  return status == NIB_OK ? nib_submit(stream, "kernel:launch", &work, accesses, desc->argument_count) : status;
}
