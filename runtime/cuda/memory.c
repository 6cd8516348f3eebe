/* Memory of a GPU, and copies between a GPU and the host. */
#include "device.h"

/* Memory comes from the driver's stream-ordered pool. Allocations are made on a stream that never waits for work, so
 * that every stream can use new memory at once. Memory that no work uses is freed on the same stream, whose later
 * allocations then reuse it. Other memory is freed on a second stream, which waits for all streams that use it. */
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
    struct nib_use *use = &uses->items[i]; /* of streams of this GPU and, for copies, of others */
    uint64_t ticket = nib_use_ticket(use, false);
    if (nib_cuda_reached(use->stream, ticket)) continue;
    stream = cuda->frees;
    nib_cuda_follow(device, stream, use->stream, ticket);
  }
  nib_cuda_check(device, cuda->driver->MemFreeAsync((CUdeviceptr)(uintptr_t)data, stream), "cuMemFreeAsync");
  nib_cuda_leave(device);
  return true;
}

/* Tries twice, since a copy must be done before the memory of either side is freed. */
static CUresult finish_copies(struct nib_cuda *cuda) {
  CUresult result = cuda->driver->StreamSynchronize(cuda->copies);
  return result == CUDA_SUCCESS ? result : cuda->driver->StreamSynchronize(cuda->copies);
}

nib_status nib_cuda_upload(nib_device *device, void *destination, const void *source, size_t bytes) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  /* No work uses the destination yet, so no order is needed. The copy is done on return, also if the host has pinned
   * the source. */
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
