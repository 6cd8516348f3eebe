/* Memory and timeline semaphores that are shared with other APIs and processes by file descriptors; memory and streams
 * of the host. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <unistd.h>

#include "device.h"

static CUstream handle_of(const nib_stream *stream) { return ((struct nib_cuda_stream *)stream->impl)->handle; }

/* ---- Memory of the host's -------------------------------------------------------------------------------------- */

nib_status nib_cuda_memory_check(nib_device *device, const char *operation, const void *data) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)data;
  unsigned type = 0;
  int ordinal = -1;
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer);
  if (result == CUDA_SUCCESS)
    result = cuda->driver->PointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
  nib_cuda_leave(device);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE)
    return nib_cuda_check(device, result, "cuPointerGetAttribute");
  if (result == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE && ordinal == cuda->ordinal) return NIB_OK;
  return nib_fail(device->runtime, NIB_INVALID, "%s: data: expected an address in memory of %s, got %p, which is %s",
                  operation, device->info.name, data,
                  result != CUDA_SUCCESS ? "unknown to the driver" : "in other memory");
}

/* ---- Streams of other frameworks ------------------------------------------------------------------------------- */

static nib_status lead(nib_device *device, intptr_t consumer, const struct nib_uses *uses) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUstream stream = (CUstream)consumer; /* DLPack's numbers of the default streams are the driver's handles */
  CUcontext context;
  CUresult result = consumer <= 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  if (consumer > 2) result = cuda->driver->StreamGetCtx(stream, &context);
  switch (result) {
  case CUDA_SUCCESS: break;
  case CUDA_ERROR_INVALID_HANDLE:
  case CUDA_ERROR_INVALID_VALUE:
  case CUDA_ERROR_INVALID_CONTEXT:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED: /* the stream's, not ours */
    return nib_fail(device->runtime, NIB_INVALID,
                    "to_dlpack: consumer_stream: expected a CUstream, 1, 2 or -1, got %lld", (long long)consumer);
  default: return nib_cuda_check(device, result, "cuStreamGetCtx");
  }
  for (int32_t i = 0; i < uses->count; i++) {
    const struct nib_use *use = &uses->items[i];
    uint64_t ticket = nib_use_ticket(use, false);
    bool captures = use->stream->capture &&
                    !nib_cuda_reached(use->stream, ticket); /* another GPU's capture, which an event would invalidate */
    nib_status status = captures ? nib_check_not_capturing(use->stream->device, "to_dlpack")
                                 : nib_cuda_follow(device, stream, use->stream, ticket);
    if (status != NIB_OK) return status;
  }
  return NIB_OK;
}

nib_status nib_cuda_lead_consumer(nib_device *device, intptr_t consumer, const struct nib_uses *uses) {
  if (nib_cuda_of(device)->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  nib_status status = lead(device, consumer, uses);
  nib_cuda_leave(device);
  return status;
}

/* ---- Memory by file descriptor --------------------------------------------------------------------------------- */

struct nib_cuda_shared {
  CUexternalMemory external; /* of another API; NULL for memory of the driver */
  CUmemGenericAllocationHandle allocation;
  CUdeviceptr address;
  size_t bytes;
};

/* Copies the file descriptor. An import takes the copy, so that the caller's stays open whether it fails or not. */
static nib_status copy_fd(nib_runtime *rt, const char *operation, int fd, int *copy) {
  *copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (*copy >= 0) return NIB_OK;
  return nib_fail(rt, NIB_INVALID, "%s: fd: expected an open file descriptor, got %d", operation, fd);
}

static CUresult import_external(struct nib_cuda *cuda, const nib_import_desc *desc, int fd,
                                struct nib_cuda_shared *shared) {
  struct nib_driver *driver = cuda->driver;
  CUDA_EXTERNAL_MEMORY_HANDLE_DESC handle = { .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                              .handle = { .fd = fd },
                                              .size = desc->bytes,
                                              .flags = desc->dedicated ? CUDA_EXTERNAL_MEMORY_DEDICATED : 0 };
  CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer = { .size = desc->bytes };
  CUresult result = driver->ImportExternalMemory(&shared->external, &handle);
  if (result != CUDA_SUCCESS) {
    close(fd);
    return result;
  }
  result = driver->ExternalMemoryGetMappedBuffer(&shared->address, shared->external, &buffer);
  if (result != CUDA_SUCCESS) driver->DestroyExternalMemory(shared->external);
  return result;
}

/* Maps an allocation to an address. Frees the allocation if that fails. */
static CUresult map(struct nib_cuda *cuda, struct nib_cuda_shared *shared) {
  struct nib_driver *driver = cuda->driver;
  CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->ordinal },
                             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
  bool mapped = false;
  CUresult result = driver->MemAddressReserve(&shared->address, shared->bytes, 0, 0, 0);
  if (result == CUDA_SUCCESS) {
    result = driver->MemMap(shared->address, shared->bytes, 0, shared->allocation, 0);
    mapped = result == CUDA_SUCCESS;
    if (mapped) result = driver->MemSetAccess(shared->address, shared->bytes, &access, 1);
    if (result != CUDA_SUCCESS) {
      if (mapped) driver->MemUnmap(shared->address, shared->bytes);
      driver->MemAddressFree(shared->address, shared->bytes);
    }
  }
  if (result != CUDA_SUCCESS) driver->MemRelease(shared->allocation);
  return result;
}

static CUmemAllocationProp properties(const struct nib_cuda *cuda) {
  return (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->ordinal } };
}

static CUresult create_shared(struct nib_cuda *cuda, size_t bytes, struct nib_cuda_shared *shared) {
  CUmemAllocationProp props = properties(cuda);
  size_t step = 1;
  CUresult result = cuda->driver->MemGetAllocationGranularity(&step, &props, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return result;
  shared->bytes = bytes ? (bytes + step - 1) / step * step : step;
  result = cuda->driver->MemCreate(&shared->allocation, shared->bytes, &props, 0);
  return result == CUDA_SUCCESS ? map(cuda, shared) : result;
}

static CUresult import_exported(struct nib_cuda *cuda, const nib_import_desc *desc, int fd,
                                struct nib_cuda_shared *shared) {
  shared->bytes = desc->bytes;
  CUresult result = cuda->driver->MemImportFromShareableHandle(&shared->allocation, (void *)(uintptr_t)fd,
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(fd);
  return result == CUDA_SUCCESS ? map(cuda, shared) : result;
}

/* Imports memory or, if desc is NULL, allocates it. */
static nib_status make_shared(nib_device *device, const nib_import_desc *desc, size_t bytes, void **data, void **out) {
  nib_runtime *rt = device->runtime;
  struct nib_cuda *cuda = nib_cuda_of(device);
  int fd = -1;
  if (cuda->lost) return nib_cuda_lost(device);
  nib_status status = desc ? copy_fd(rt, "import", desc->fd, &fd) : NIB_OK;
  if (status != NIB_OK) return status;
  struct nib_cuda_shared *shared = nib_allocate_zero(rt, sizeof *shared);
  if (!shared || !nib_cuda_enter(device)) {
    if (fd >= 0) close(fd);
    nib_free(rt, shared, sizeof *shared);
    return shared ? nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent")
                  : nib_fail_memory(rt, "tensor", sizeof *shared);
  }
  bool opaque = desc && desc->kind == NIB_FD_OPAQUE;
  CUresult result = !desc    ? create_shared(cuda, bytes, shared)
                    : opaque ? import_external(cuda, desc, fd, shared)
                             : import_exported(cuda, desc, fd, shared);
  nib_cuda_leave(device);
  if (result != CUDA_SUCCESS) {
    nib_free(rt, shared, sizeof *shared);
    return nib_cuda_check(device, result,
                          !desc    ? "cuMemCreate"
                          : opaque ? "cuImportExternalMemory"
                                   : "cuMemImportFromShareableHandle");
  }
  *data = (void *)(uintptr_t)shared->address;
  *out = shared;
  return NIB_OK;
}

nib_status nib_cuda_shared_create(nib_device *device, size_t bytes, void **data, void **out) {
  return make_shared(device, NULL, bytes, data, out);
}

nib_status nib_cuda_shared_import(nib_device *device, const nib_import_desc *desc, void **data, void **out) {
  return make_shared(device, desc, 0, data, out);
}

nib_status nib_cuda_shared_export(nib_device *device, void *memory, int *fd, uint64_t *bytes) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_shared *shared = memory;
  int made = -1;
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result =
    cuda->driver->MemExportToShareableHandle(&made, shared->allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  nib_cuda_leave(device);
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuMemExportToShareableHandle");
  fcntl(made, F_SETFD, FD_CLOEXEC);
  *fd = made;
  *bytes = shared->bytes;
  return NIB_OK;
}

void nib_cuda_shared_free(nib_device *device, void *memory) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  struct nib_cuda_shared *shared = memory;
  if (!cuda->lost && nib_cuda_enter(device)) {
    if (shared->external) {
      driver->MemFree(shared->address);
      driver->DestroyExternalMemory(shared->external);
    } else {
      driver->MemUnmap(shared->address, shared->bytes);
      driver->MemAddressFree(shared->address, shared->bytes);
      driver->MemRelease(shared->allocation);
    }
    nib_cuda_leave(device);
  }
  nib_free(device->runtime, shared, sizeof *shared);
}

/* ---- Semaphores ------------------------------------------------------------------------------------------------ */

struct nib_cuda_semaphore {
  struct nib_cuda_semaphore *next, *previous; /* all semaphores of the device */
  CUexternalSemaphore handle;
};

nib_status nib_cuda_semaphore_import(nib_device *device, int fd, void **out) {
  nib_runtime *rt = device->runtime;
  struct nib_cuda *cuda = nib_cuda_of(device);
  int copy = -1;
  if (cuda->lost) return nib_cuda_lost(device);
  nib_status status = copy_fd(rt, "semaphore", fd, &copy);
  if (status != NIB_OK) return status;
  CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC desc = { .type = CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
                                               .handle = { .fd = copy } };
  struct nib_cuda_semaphore *own = nib_allocate_zero(rt, sizeof *own);
  CUresult result = CUDA_ERROR_INVALID_CONTEXT;
  if (own && nib_cuda_enter(device)) {
    result = cuda->driver->ImportExternalSemaphore(&own->handle, &desc);
    nib_cuda_leave(device);
  }
  if (result != CUDA_SUCCESS) {
    close(copy);
    nib_free(rt, own, sizeof *own);
    return own ? nib_cuda_check(device, result, "cuImportExternalSemaphore")
               : nib_fail_memory(rt, "semaphore", sizeof *own);
  }
  own->next = cuda->semaphores;
  if (own->next) own->next->previous = own;
  cuda->semaphores = own;
  *out = own;
  return NIB_OK;
}

/* The context is current, or lost. */
static void destroy(nib_device *device, struct nib_cuda_semaphore *own) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (!cuda->lost) cuda->driver->DestroyExternalSemaphore(own->handle);
  if (own->next) own->next->previous = own->previous;
  *(own->previous ? &own->previous->next : &cuda->semaphores) = own->next;
  nib_free(device->runtime, own, sizeof *own);
}

void nib_cuda_semaphore_destroy(nib_device *device, void *semaphore) {
  bool entered = !nib_cuda_of(device)->lost && nib_cuda_enter(device);
  destroy(device, semaphore);
  if (entered) nib_cuda_leave(device);
}

void nib_cuda_semaphores_close(nib_device *device) {
  while (nib_cuda_of(device)->semaphores) destroy(device, nib_cuda_of(device)->semaphores);
}

nib_status nib_cuda_semaphore_wait(nib_stream *stream, void *semaphore, uint64_t value) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_semaphore *own = semaphore;
  CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS params = { .params = { .fence = { .value = value } } };
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->WaitExternalSemaphoresAsync(&own->handle, &params, 1, handle_of(stream));
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuWaitExternalSemaphoresAsync");
}

nib_status nib_cuda_semaphore_signal(nib_stream *stream, void *semaphore, uint64_t value) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_semaphore *own = semaphore;
  CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS params = { .params = { .fence = { .value = value } } };
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->SignalExternalSemaphoresAsync(&own->handle, &params, 1, handle_of(stream));
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuSignalExternalSemaphoresAsync");
}
