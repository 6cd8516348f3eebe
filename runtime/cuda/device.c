/* The CUDA device: finding GPUs, opening and closing one, and its table of functions. */
#include "device.h"

#include <stdio.h>
#include <string.h>

/* ---- Opening a device ------------------------------------------------------------------------------------------ */

static nib_status load_kernels(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  for (int i = 0; i < NIB_KERNEL_COUNT; i++) {
    CUresult result = cuda->driver->ModuleLoadDataEx(&cuda->modules[i], nib_cuda_kernels[i]->image, 0, NULL, NULL);
    if (result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
      snprintf(cuda->reason, sizeof cuda->reason,
               "expected a GPU that this build has kernels for, got %.60s (with CUDA %d.%d)", cuda->description,
               cuda->driver->version / 1000, cuda->driver->version % 1000 / 10);
      device->info.available = false;
      device->info.reason = cuda->reason;
      return nib_fail(device->runtime, NIB_UNAVAILABLE, "%s: %s", device->info.name, cuda->reason);
    }
    if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuModuleLoadDataEx");
    const char *const *entries = nib_cuda_kernels[i]->entries;
    for (int k = 0; k < nib_cuda_kernels[i]->entry_count; k++) {
      result = cuda->driver->ModuleGetFunction(&cuda->functions[i][k], cuda->modules[i], entries[k]);
      if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, entries[k]);
    }
  }
  return NIB_OK;
}

static nib_status open_pool(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                           .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->ordinal } };
  CUresult result = driver->MemPoolCreate(&cuda->pool, &props);
  uint64_t keep = device->info.memory_bytes / 4; /* freed memory that the pool keeps */
  int off = 0, on = 1;
  if (result == CUDA_SUCCESS)
    result = driver->MemPoolSetAttribute(cuda->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
  if (result == CUDA_SUCCESS)
    result = driver->MemPoolSetAttribute(cuda->pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &on);
  if (result == CUDA_SUCCESS)
    result = driver->MemPoolSetAttribute(cuda->pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &off);
  if (result == CUDA_SUCCESS)
    result = driver->MemPoolSetAttribute(cuda->pool, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, &off);
  return nib_cuda_check(device, result, "cuMemPoolCreate");
}

static nib_status open_fault(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  void *host = NULL;
  CUdeviceptr pointer = 0;
  CUresult result =
    cuda->driver->MemHostAlloc(&host, sizeof *device->fault, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuMemHostAlloc");
  memset(host, 0, sizeof *device->fault);
  device->fault = host; /* kernels use the same address, with unified addressing */
  return nib_cuda_check(device, cuda->driver->MemHostGetDevicePointer(&pointer, host, 0), "cuMemHostGetDevicePointer");
}

static nib_status open_internal_streams(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUstream *streams[] = { &cuda->allocations, &cuda->frees, &cuda->copies };
  for (int i = 0; i < 3; i++) {
    CUresult result = cuda->driver->StreamCreateWithPriority(streams[i], CU_STREAM_NON_BLOCKING, 0);
    if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuStreamCreateWithPriority");
  }
  return NIB_OK;
}

/* Frees the parts of a device, also of one whose opening failed half-way. */
static void release_parts(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUstream streams[] = { cuda->allocations, cuda->frees, cuda->copies };
  /* Also of events and graphs that the host still holds; it can only release these. */
  while (cuda->graphs) nib_cuda_graph_destroy(device, cuda->graphs);
  nib_cuda_semaphores_close(device);
  while (cuda->points) {
    struct nib_cuda_point *point = cuda->points;
    cuda->points = point->older;
    driver->EventDestroy(point->event);
    nib_free(device->runtime, point, sizeof *point);
  }
  cuda->free_points = NULL;
  for (int i = 0; i < 3; i++)
    if (streams[i]) {
      if (!cuda->lost) driver->StreamSynchronize(streams[i]);
      driver->StreamDestroy(streams[i]);
    }
  for (int i = 0; i < NIB_KERNEL_COUNT; i++)
    if (cuda->modules[i]) driver->ModuleUnload(cuda->modules[i]);
  if (cuda->pool) driver->MemPoolDestroy(cuda->pool);
  if (device->fault) driver->MemFreeHost(device->fault);
  nib_cuda_pinned_close(device);
  cuda->allocations = cuda->frees = cuda->copies = NULL;
  memset(cuda->modules, 0, sizeof cuda->modules);
  cuda->pool = NULL;
  device->fault = NULL;
}

/* Retains the primary context, or uses the host's. */
static CUresult retain_context(struct nib_cuda *cuda) {
  cuda->context = cuda->host_context;
  return cuda->context ? CUDA_SUCCESS : cuda->driver->DevicePrimaryCtxRetain(&cuda->context, cuda->ordinal);
}

static void release_context(struct nib_cuda *cuda) {
  if (!cuda->host_context) cuda->driver->DevicePrimaryCtxRelease(cuda->ordinal);
  cuda->context = NULL;
}

static nib_status use_context(nib_device *device, void *context) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUcontext popped;
  CUdevice ordinal = -1;
  CUresult result = context ? driver->CtxPushCurrent(context) : CUDA_ERROR_INVALID_CONTEXT;
  if (result == CUDA_SUCCESS) {
    result = driver->CtxGetDevice(&ordinal);
    driver->CtxPopCurrent(&popped);
  }
  if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED ||
      result == CUDA_ERROR_INVALID_VALUE)
    return nib_fail(device->runtime, NIB_INVALID,
                    "use_context: context: expected a CUcontext, got %p, which is not one", context);
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuCtxGetDevice");
  if (ordinal != cuda->ordinal)
    return nib_fail(device->runtime, NIB_INVALID,
                    "use_context: context: expected a context of %s, got one of another GPU", device->info.name);
  cuda->host_context = context;
  return NIB_OK;
}

static nib_status device_open(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->context) return NIB_OK; /* it is open already, but has no default stream */
  CUresult result = retain_context(cuda);
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuDevicePrimaryCtxRetain");
  nib_status status =
    nib_cuda_enter(device) ? NIB_OK : nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  if (status == NIB_OK) {
    status = load_kernels(device);
    if (status == NIB_OK) status = open_pool(device);
    if (status == NIB_OK) status = open_internal_streams(device);
    if (status == NIB_OK) status = open_fault(device);
    if (status != NIB_OK) release_parts(device);
    nib_cuda_leave(device);
  }
  if (status != NIB_OK) release_context(cuda);
  return status;
}

static void device_close(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->context) {
    if (nib_cuda_enter(device)) {
      release_parts(device);
      nib_cuda_leave(device);
    }
    release_context(cuda);
    nib_cuda_free_dropped(device);
  }
  if (device == &device->runtime->devices[device->runtime->device_count - 1]) { /* the last device closes the driver */
    nib_driver_close(cuda->driver);
    nib_free(device->runtime, cuda->driver, sizeof *cuda->driver);
  }
  device->info.description = device->info.reason = "";
  device->info.name = "cuda";
  device->impl = NULL;
  nib_free(device->runtime, cuda, sizeof *cuda);
}

/* ---- The table of functions ------------------------------------------------------------------------------------ */

static void stream_retire(nib_stream *stream) { (void)stream; /* an idle one costs nothing */ }

static const struct nib_backend_copies copies = { .upload = nib_cuda_upload,
                                                  .download = nib_cuda_download,
                                                  .follow = nib_cuda_follow_stream };

static const struct nib_backend_pinned pinned = { .allocate = nib_cuda_pinned_allocate, .free = nib_cuda_pinned_free };

static const struct nib_backend_modules modules = { .compile = nib_cuda_compile,
                                                    .load = nib_cuda_module_load,
                                                    .unload = nib_cuda_module_unload,
                                                    .find = nib_cuda_function_find };

static const struct nib_backend_sharing sharing = { .create = nib_cuda_shared_create,
                                                    .import = nib_cuda_shared_import,
                                                    .export = nib_cuda_shared_export,
                                                    .free = nib_cuda_shared_free,
                                                    .import_semaphore = nib_cuda_semaphore_import,
                                                    .destroy_semaphore = nib_cuda_semaphore_destroy,
                                                    .wait_semaphore = nib_cuda_semaphore_wait,
                                                    .signal_semaphore = nib_cuda_semaphore_signal };

static const struct nib_backend_foreign foreign = { .check_memory = nib_cuda_memory_check,
                                                    .lead_consumer = nib_cuda_lead_consumer,
                                                    .use_context = use_context,
                                                    .wrap_stream = nib_cuda_stream_wrap,
                                                    .unwrap_stream = nib_cuda_stream_unwrap,
                                                    .stream_handle = nib_cuda_stream_handle };

static const struct nib_backend backend = {
  .name = "cuda",
  .captures_natively = true,
  .open = device_open,
  .close = device_close,
  .memory = { .allocate = nib_cuda_memory_allocate, .free = nib_cuda_memory_free },
  .streams = { .open = nib_cuda_stream_open,
               .retire = stream_retire,
               .close = nib_cuda_stream_close,
               .launch = nib_cuda_launch,
               .call = nib_cuda_call,
               .reached = nib_cuda_reached,
               .wait = nib_cuda_wait,
               .take_error = nib_cuda_take_error },
  .events = { .record = nib_cuda_event_record,
              .wait = nib_cuda_event_wait,
              .elapsed = nib_cuda_event_elapsed,
              .destroy = nib_cuda_event_destroy },
  .graphs = { .begin = nib_cuda_capture_begin,
              .end = nib_cuda_capture_end,
              .prepare = nib_cuda_plan_prepare,
              .launch = nib_cuda_plan_launch,
              .destroy = nib_cuda_plan_destroy,
              .dot = nib_cuda_plan_dot },
  .copies = &copies,
  .pinned = &pinned,
  .modules = &modules,
  .sharing = &sharing,
  .foreign = &foreign,
};

/* ---- Finding GPUs ---------------------------------------------------------------------------------------------- */

/* Adds a device entry. `reason` is why it is not available, or NULL. */
static struct nib_cuda *add_device(nib_runtime *rt, struct nib_driver *driver, int ordinal, const char *reason) {
  struct nib_cuda *cuda = nib_allocate_zero(rt, sizeof *cuda);
  if (!cuda) return NULL;
  nib_device *device = &rt->devices[rt->device_count++];
  cuda->driver = driver;
  cuda->ordinal = ordinal;
  snprintf(cuda->name, sizeof cuda->name, "cuda:%d", ordinal);
  snprintf(cuda->description, sizeof cuda->description, "NVIDIA GPU");
  if (reason) snprintf(cuda->reason, sizeof cuda->reason, "%s", reason);
  *device = (nib_device){ .runtime = rt, .backend = &backend, .impl = cuda };
  device->info = (nib_device_info){ .name = cuda->name,
                                    .description = cuda->description,
                                    .reason = reason ? cuda->reason : NULL,
                                    .available = reason == NULL };
  return cuda;
}

static bool describe(nib_runtime *rt, struct nib_driver *driver, int ordinal) {
  struct nib_cuda *cuda = add_device(rt, driver, ordinal, NULL);
  if (!cuda) return false;
  nib_device *device = &rt->devices[rt->device_count - 1];
  CUdevice handle;
  size_t bytes = 0;
  int major = 0, minor = 0, pools = 0;
  CUuuid uuid = { { 0 } };
  CUresult result = driver->DeviceGet(&handle, ordinal);
  if (result == CUDA_SUCCESS) result = driver->DeviceGetUuid(&uuid, handle);
  if (result == CUDA_SUCCESS) result = driver->DeviceGetName(cuda->description, sizeof cuda->description, handle);
  if (result == CUDA_SUCCESS) result = driver->DeviceTotalMem(&bytes, handle);
  if (result == CUDA_SUCCESS)
    result = driver->DeviceGetAttribute(&device->info.processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle);
  if (result == CUDA_SUCCESS)
    result = driver->DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle);
  if (result == CUDA_SUCCESS)
    result = driver->DeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle);
  if (result == CUDA_SUCCESS)
    result = driver->DeviceGetAttribute(&pools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, handle);
  device->info.memory_bytes = bytes;
  memcpy(device->info.uuid, uuid.bytes, sizeof device->info.uuid);
  cuda->compute_capability = 10 * major + minor;
  cuda->ordinal = result == CUDA_SUCCESS ? handle : ordinal;
  const char *text = "unknown error";
  if (result != CUDA_SUCCESS) {
    driver->GetErrorString(result, &text);
    snprintf(cuda->reason, sizeof cuda->reason, "the NVIDIA driver gives no information about this GPU: %s", text);
  } else if (major < 8) {
    snprintf(cuda->reason, sizeof cuda->reason, "expected compute capability 8.0 or later, got %d.%d (%.60s)", major,
             minor, cuda->description);
  } else if (!pools) {
    snprintf(cuda->reason, sizeof cuda->reason, "expected a driver with memory pools for this GPU, got one without");
  } else {
    return true;
  }
  device->info.available = false;
  device->info.reason = cuda->reason;
  return true;
}

nib_status nib_cuda_probe(nib_runtime *rt) {
  struct nib_driver *driver = nib_allocate_zero(rt, sizeof *driver);
  if (!driver) return nib_fail_memory(rt, "cuda", sizeof *driver);
  char reason[192];
  int count = 0;
  if (nib_driver_open(driver, reason, sizeof reason)) {
    CUresult result = driver->DeviceGetCount(&count);
    if (result == CUDA_SUCCESS && count > 0) {
      for (int i = 0; i < count && rt->device_count < NIB_MAX_DEVICES; i++)
        if (!describe(rt, driver, i)) break;
      if (rt->device_count > 1) return NIB_OK;
    } else {
      snprintf(reason, sizeof reason, "the NVIDIA driver finds no GPU");
    }
  }
  if (count > 0 || !add_device(rt, driver, 0, reason)) {
    nib_free(rt, driver, sizeof *driver);
    return nib_fail_memory(rt, "cuda", sizeof(struct nib_cuda));
  }
  return NIB_OK;
}
