/* Memory of a GPU, and copies between it and the host. */
#include "device.h"

/* Blocks come from a pool that may only hand out what is free already: the stream of allocations never waits for work,
 * so that new memory can be used on every stream at once. What nobody uses any more is freed on that stream too, which
 * hands it out again without asking what is free; the rest on a stream of its own, behind all streams that use it. */
nib_status nib_cuda_memory_allocate(nib_device *device, size_t bytes, void **out) {
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

bool nib_cuda_memory_free(nib_device *device, void *data, size_t bytes, struct nib_uses *uses) {
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

nib_status nib_cuda_upload(nib_device *device, void *destination, const void *source, size_t bytes) {
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

nib_status nib_cuda_download(nib_device *device, void *destination, const void *source, size_t bytes) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->MemcpyDtoHAsync(destination, (CUdeviceptr)(uintptr_t)source, bytes, cuda->copies);
  if (result == CUDA_SUCCESS) result = finish_copies(cuda);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuMemcpyDtoHAsync");
}
