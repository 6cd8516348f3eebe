/* The CUDA device: finding GPUs, opening one, memory, and its table of functions. */
#include "device.h"

#include <stdio.h>
#include <string.h>

/* ---- The context ----------------------------------------------------------------------------------------------- */

static bool exchange_mode(struct nib_cuda *cuda) {
  return cuda->driver->ThreadExchangeStreamCaptureMode(&cuda->mode) == CUDA_SUCCESS;
}

/* Tried twice, because what frees or ends something cannot be called again. */
bool nib_cuda_enter(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUcontext popped;
  if (driver->CtxPushCurrent(cuda->context) != CUDA_SUCCESS && driver->CtxPushCurrent(cuda->context) != CUDA_SUCCESS)
    return false;
  if (cuda->entered == 0) {
    cuda->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!exchange_mode(cuda) && !exchange_mode(cuda)) {
      driver->CtxPopCurrent(&popped);
      return false;
    }
  }
  cuda->entered++;
  return true;
}

void nib_cuda_leave(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUcontext popped;
  if (--cuda->entered == 0 && !exchange_mode(cuda)) exchange_mode(cuda);
  cuda->driver->CtxPopCurrent(&popped);
}

nib_status nib_cuda_lost(nib_device *device) {
  return nib_fail(device->runtime, NIB_LOST,
                  "%s: context: expected a context that works, got context lost (an earlier kernel broke it; only a "
                  "new process has a "
                  "new one)",
                  device->info.name);
}

/* Errors after which every call on the context fails. */
static bool is_fatal(CUresult result) {
  switch ((int)result) {
  case 226: /* CUDA_ERROR_CONTAINED, which older headers lack */
  case 721: /* CUDA_ERROR_TENSOR_MEMORY_LEAK, likewise */
  case CUDA_ERROR_NVLINK_UNCORRECTABLE:
  case CUDA_ERROR_MPS_CLIENT_TERMINATED:
  case CUDA_ERROR_EXTERNAL_DEVICE:
  case CUDA_ERROR_ILLEGAL_ADDRESS:
  case CUDA_ERROR_LAUNCH_TIMEOUT:
  case CUDA_ERROR_ASSERT:
  case CUDA_ERROR_HARDWARE_STACK_ERROR:
  case CUDA_ERROR_ILLEGAL_INSTRUCTION:
  case CUDA_ERROR_MISALIGNED_ADDRESS:
  case CUDA_ERROR_INVALID_ADDRESS_SPACE:
  case CUDA_ERROR_INVALID_PC:
  case CUDA_ERROR_LAUNCH_FAILED:
  case CUDA_ERROR_ECC_UNCORRECTABLE:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED:
  case CUDA_ERROR_DEINITIALIZED: return true;
  default: return false;
  }
}

nib_status nib_cuda_check(nib_device *device, CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return NIB_OK;
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (!cuda->lost && is_fatal(result)) {
    cuda->lost = true;
    nib_log(device->runtime, NIB_LOG_ERROR, "%s: context lost: %s told of error %d", device->info.name, what,
            (int)result);
  }
  if (cuda->lost) return nib_cuda_lost(device);
  const char *name = "unknown error", *text = "";
  cuda->driver->GetErrorName(result, &name);
  cuda->driver->GetErrorString(result, &text);
  return nib_fail(device->runtime, result == CUDA_ERROR_OUT_OF_MEMORY ? NIB_MEMORY : NIB_DEVICE,
                  "%s: %s: expected success from the driver, got %s (%s)", device->info.name, what, name, text);
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

/* Blocks come from a pool that may only hand out what is free already: the stream of allocations never waits for work,
 * so that new memory can be used on every stream at once. What nobody uses any more is freed on that stream too, which
 * hands it out again without asking what is free; the rest on a stream of its own, behind all streams that use it. */
static nib_status memory_allocate(nib_device *device, size_t bytes, void **out) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUdeviceptr pointer = 0;
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  for (int attempt = 0; attempt < 2; attempt++) {
    CUresult result = driver->MemAllocFromPoolAsync(&pointer, bytes ? bytes : 1, cuda->pool, cuda->allocations);
    if (result == CUDA_SUCCESS && (result = driver->StreamSynchronize(cuda->allocations)) != CUDA_SUCCESS) {
      driver->MemFreeAsync(pointer, cuda->allocations);
      pointer = 0;
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY || attempt > 0) {
      nib_cuda_leave(device);
      *out = (void *)(uintptr_t)pointer;
      return nib_cuda_check(device, result, "cuMemAllocFromPoolAsync");
    }
    driver->StreamSynchronize(cuda->frees);
    driver->StreamSynchronize(cuda->allocations);
    driver->MemPoolTrimTo(cuda->pool, 0);
  }
  return NIB_OK;
}

static bool memory_free(nib_device *device, void *data, size_t bytes, struct nib_uses *uses) {
  (void)bytes;
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUstream stream = cuda->allocations;
  if (cuda->lost) return true;
  if (!nib_cuda_enter(device)) return false;
  for (int32_t i = 0; i < uses->count; i++) {
    struct nib_use *use = &uses->items[i]; /* in streams of this GPU and, for copies, of others */
    uint64_t ticket = nib_use_ticket(use, false);
    if (nib_cuda_reached(use->stream, ticket)) continue;
    stream = cuda->frees;
    nib_cuda_follow(device, stream, use->stream, ticket);
  }
  nib_cuda_check(device, cuda->driver->MemFreeAsync((CUdeviceptr)(uintptr_t)data, stream), "cuMemFreeAsync");
  nib_cuda_leave(device);
  return true;
}

/* Tried twice: a copy that is still under way must not outlive the memory of either side. */
static CUresult finish_copies(struct nib_cuda *cuda) {
  CUresult result = cuda->driver->StreamSynchronize(cuda->copies);
  return result == CUDA_SUCCESS ? result : cuda->driver->StreamSynchronize(cuda->copies);
}

static nib_status upload(nib_device *device, void *destination, const void *source, size_t bytes) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  /* The destination is fresh memory, so that no order has to be kept. The copy is done on return, for pageable memory
   * and for memory that the host has pinned. */
  CUresult result = cuda->driver->MemcpyHtoDAsync((CUdeviceptr)(uintptr_t)destination, source, bytes, cuda->copies);
  if (result == CUDA_SUCCESS) result = finish_copies(cuda);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuMemcpyHtoDAsync");
}

static nib_status download(nib_device *device, void *destination, const void *source, size_t bytes) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->MemcpyDtoHAsync(destination, (CUdeviceptr)(uintptr_t)source, bytes, cuda->copies);
  if (result == CUDA_SUCCESS) result = finish_copies(cuda);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuMemcpyDtoHAsync");
}

/* ---- Opening a device ------------------------------------------------------------------------------------------ */

static nib_status load_kernels(nib_device *device) {
  static const struct {
    const char *name;
    enum nib_kernel kernel;
  } entries[] = {
#define X(symbol, kernel, file, function) { "nib_cuda_" #function, NIB_KERNEL_##kernel },
    NIB_CUDA_ENTRY_LIST(X)
#undef X
  };
  struct nib_cuda *cuda = nib_cuda_of(device);
  for (int i = 0; i < NIB_KERNEL_COUNT; i++) {
    CUresult result = cuda->driver->ModuleLoadDataEx(&cuda->modules[i], nib_cuda_images[i], 0, NULL, NULL);
    if (result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
      snprintf(cuda->reason, sizeof cuda->reason,
               "expected a GPU that this build has kernels for, got %.60s (with CUDA %d.%d)", cuda->description,
               cuda->driver->version / 1000, cuda->driver->version % 1000 / 10);
      device->info.available = false;
      device->info.reason = cuda->reason;
      return nib_fail(device->runtime, NIB_UNAVAILABLE, "%s: %s", device->info.name, cuda->reason);
    }
    if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuModuleLoadDataEx");
  }
  for (int i = 0; i < NIB_CUDA_ENTRY_COUNT; i++) {
    CUresult result =
      cuda->driver->ModuleGetFunction(&cuda->functions[i], cuda->modules[entries[i].kernel], entries[i].name);
    if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, entries[i].name);
  }
  return NIB_OK;
}

static nib_status open_pool(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                           .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->ordinal } };
  CUresult result = driver->MemPoolCreate(&cuda->pool, &props);
  uint64_t keep = device->info.memory_bytes / 4; /* freed memory that stays with the pool */
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
  device->fault = host; /* with unified addressing the kernel's pointer is the same */
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

/* The parts of an open device, given back; works for one that opened half-way too. */
static void release_parts(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUstream streams[] = { cuda->allocations, cuda->frees, cuda->copies };
  /* Those of events and graphs that the host still holds, too: it can do no more than release them. */
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

/* The primary context, or the host's. */
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
    return nib_fail(device->runtime, NIB_INVALID, "use_context: context: expected a CUcontext, got %p, which is none",
                    context);
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuCtxGetDevice");
  if (ordinal != cuda->ordinal)
    return nib_fail(device->runtime, NIB_INVALID,
                    "use_context: context: expected a context of %s, got one of another GPU", device->info.name);
  cuda->host_context = context;
  return NIB_OK;
}

static nib_status device_open(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->context) return NIB_OK; /* open already, but for the default stream */
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
  if (device ==
      &device->runtime->devices[device->runtime->device_count - 1]) { /* the last one closes the driver for all */
    nib_driver_close(cuda->driver);
    nib_free(device->runtime, cuda->driver, sizeof *cuda->driver);
  }
  device->info.description = device->info.reason = "";
  device->info.name = "cuda";
  device->impl = NULL;
  nib_free(device->runtime, cuda, sizeof *cuda);
}

static const struct nib_backend backend = {
  .name = "cuda",
  .captures_natively = true,
  .device_open = device_open,
  .device_close = device_close,
  .memory_allocate = memory_allocate,
  .memory_free = memory_free,
  .pinned_allocate = nib_cuda_pinned_allocate,
  .pinned_free = nib_cuda_pinned_free,
  .memory_check = nib_cuda_memory_check,
  .shared_create = nib_cuda_shared_create,
  .shared_import = nib_cuda_shared_import,
  .shared_export = nib_cuda_shared_export,
  .shared_free = nib_cuda_shared_free,
  .semaphore_import = nib_cuda_semaphore_import,
  .semaphore_destroy = nib_cuda_semaphore_destroy,
  .semaphore_wait = nib_cuda_semaphore_wait,
  .semaphore_signal = nib_cuda_semaphore_signal,
  .lead_consumer = nib_cuda_lead_consumer,
  .use_context = use_context,
  .stream_wrap = nib_cuda_stream_wrap,
  .stream_unwrap = nib_cuda_stream_unwrap,
  .stream_handle = nib_cuda_stream_handle,
  .stream_open = nib_cuda_stream_open,
  .stream_close = nib_cuda_stream_close,
  .launch = nib_cuda_launch,
  .call = nib_cuda_call,
  .compile = nib_cuda_compile,
  .module_load = nib_cuda_module_load,
  .module_unload = nib_cuda_module_unload,
  .function_find = nib_cuda_function_find,
  .upload = upload,
  .download = download,
  .event_record = nib_cuda_event_record,
  .event_wait = nib_cuda_event_wait,
  .follow = nib_cuda_follow_stream,
  .event_elapsed = nib_cuda_event_elapsed,
  .event_destroy = nib_cuda_event_destroy,
  .reached = nib_cuda_reached,
  .wait = nib_cuda_wait,
  .take_error = nib_cuda_take_error,
  .capture_begin = nib_cuda_capture_begin,
  .capture_end = nib_cuda_capture_end,
  .plan_prepare = nib_cuda_plan_prepare,
  .plan_launch = nib_cuda_plan_launch,
  .plan_destroy = nib_cuda_plan_destroy,
  .plan_dot = nib_cuda_plan_dot,
};

/* Adds a device entry. `reason` says why it is not available; NULL if it is. */
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
    snprintf(cuda->reason, sizeof cuda->reason, "the driver does not describe this GPU: %s", text);
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
      snprintf(reason, sizeof reason, "the NVIDIA driver shows no GPU");
    }
  }
  if (count > 0 || !add_device(rt, driver, 0, reason)) {
    nib_free(rt, driver, sizeof *driver);
    return nib_fail_memory(rt, "cuda", sizeof(struct nib_cuda));
  }
  return NIB_OK;
}
