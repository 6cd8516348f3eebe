/* Pinned host memory, and copies by the copy engines: between a GPU and pinned memory, and between GPUs. */
#include "device.h"

/* ---- Pinned memory --------------------------------------------------------------------------------------------- */

/* The driver waits for the whole GPU when it frees pinned memory. So blocks are kept until the device closes or memory
 * runs out, and reused for requests of at least half their size. */
struct nib_cuda_pinned {
  struct nib_cuda_pinned *next;
  void *data;
  size_t bytes;
  bool used;
};

/* Frees the unused blocks; with `all` the others, too. The context is current. */
static void trim(nib_device *device, bool all) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  for (struct nib_cuda_pinned **link = &cuda->pinned; *link;) {
    struct nib_cuda_pinned *block = *link;
    if (block->used && !all) {
      link = &block->next;
      continue;
    }
    *link = block->next;
    cuda->driver->MemFreeHost(block->data);
    nib_free(device->runtime, block, sizeof *block);
  }
}

nib_status nib_cuda_pinned_allocate(nib_device *device, size_t bytes, void **out) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (bytes == 0) bytes = 1;
  for (struct nib_cuda_pinned *block = cuda->pinned; block; block = block->next)
    if (!block->used && block->bytes >= bytes && block->bytes / 2 <= bytes) {
      block->used = true;
      *out = block->data;
      return NIB_OK;
    }
  struct nib_cuda_pinned *block = nib_allocate_zero(device->runtime, sizeof *block);
  if (!block) return nib_fail_memory(device->runtime, "tensor", sizeof *block);
  CUresult result = CUDA_ERROR_INVALID_CONTEXT;
  if (nib_cuda_enter(device)) {
    result = cuda->driver->MemHostAlloc(&block->data, bytes, CU_MEMHOSTALLOC_PORTABLE);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      trim(device, false);
      result = cuda->driver->MemHostAlloc(&block->data, bytes, CU_MEMHOSTALLOC_PORTABLE);
    }
    nib_cuda_leave(device);
  }
  if (result != CUDA_SUCCESS) {
    nib_free(device->runtime, block, sizeof *block);
    return nib_cuda_check(device, result, "cuMemHostAlloc");
  }
  block->next = cuda->pinned;
  block->bytes = bytes;
  block->used = true;
  cuda->pinned = block;
  *out = block->data;
  return NIB_OK;
}

void nib_cuda_pinned_free(nib_device *device, void *data) {
  for (struct nib_cuda_pinned *block = nib_cuda_of(device)->pinned; block; block = block->next)
    if (block->data == data) block->used = false;
}

void nib_cuda_pinned_close(nib_device *device) { trim(device, true); }

/* ---- Transfers ------------------------------------------------------------------------------------------------- */

/* Gives `peer` access to the pool's memory for direct copies. If that fails, the driver copies through host memory. */
static void share_pool(struct nib_cuda *cuda, const struct nib_cuda *peer) {
  uint32_t bit = 1u << (peer->ordinal & 31);
  int can = 0;
  if (cuda->peers & bit) return;
  cuda->peers |= bit;
  CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = peer->ordinal },
                             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
  if (cuda->driver->DeviceCanAccessPeer(&can, peer->ordinal, cuda->ordinal) == CUDA_SUCCESS && can)
    cuda->driver->MemPoolSetAccess(cuda->pool, &access, 1);
}

nib_status nib_cuda_transfer(nib_stream *stream, const struct nib_transfer *move) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device), *from = move->from ? nib_cuda_of(move->from) : NULL;
  struct nib_driver *driver = cuda->driver;
  CUstream handle = ((struct nib_cuda_stream *)stream->impl)->handle;
  CUdeviceptr destination = (CUdeviceptr)(uintptr_t)move->destination, source = (CUdeviceptr)(uintptr_t)move->source;
  CUresult result;
  if (from && from->lost) return nib_cuda_lost(move->from);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  if (from) {
    share_pool(from, cuda);
    share_pool(cuda, from);
    result = driver->MemcpyPeerAsync(destination, cuda->context, source, from->context, move->bytes, handle);
  } else {
    result = driver->MemcpyAsync(destination, source, move->bytes, handle);
  }
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, from ? "cuMemcpyPeerAsync" : "cuMemcpyAsync");
}
