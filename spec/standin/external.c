/* What is shared by file descriptors: memory of other APIs, memory that can be exported, timeline semaphores. A
 * descriptor is one of a memory file (memfd_create), whose other side the program plays; a semaphore's value is its
 * first 8 bytes. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static void *map_fd(int fd, size_t bytes) {
  void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? NULL : data;
}

/* Whether the descriptor is of memory that large. Asking with another is no misuse. */
static bool is_memory(int fd, size_t bytes) {
  struct stat info;
  return fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size >= bytes;
}

CUresult standin_PointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  CUresult result = standin_enter("cuPointerGetAttribute", 0);
  if (result != CUDA_SUCCESS) return result;
  const struct block *block = standin_block_at((void *)(uintptr_t)pointer);
  if (!block || block->state == BLOCK_FREED) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    *(unsigned *)out = block->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    break;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = block->context->device; break;
  default: result = standin_misuse(CUDA_ERROR_INVALID_VALUE, "attribute %d is not played", (int)attribute);
  }
  return standin_leave(result);
}

/* ---- Memory of other APIs -------------------------------------------------------------------------------------- */

struct external {
  struct object object;
  int fd;
  size_t bytes;
};

CUresult standin_ImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
  CUresult result = standin_enter("cuImportExternalMemory", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  if (desc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
    return standin_leave(
      standin_misuse(CUDA_ERROR_NOT_SUPPORTED, "handles of type %d are not played", (int)desc->type));
  if (!is_memory(desc->handle.fd, desc->size)) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  struct external *external = calloc(1, sizeof *external);
  if (!external) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  external->fd = desc->handle.fd; /* the driver's from now on */
  external->bytes = desc->size;
  standin_add(&external->object, LIVE_EXTERNALS, standin_current());
  *out = standin_handle(&external->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_ExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory handle,
                                               const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc) {
  CUresult result = standin_enter("cuExternalMemoryGetMappedBuffer", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct external *external = standin_find(LIVE_EXTERNALS, handle);
  if (!external) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (desc->flags != 0 || desc->offset != 0 || desc->size != external->bytes)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "parts are not played"));
  void *data = map_fd(external->fd, external->bytes);
  if (!data || !standin_block_share(data, external->bytes)) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  *out = (CUdeviceptr)(uintptr_t)data;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemFree(CUdeviceptr pointer) {
  CUresult result = standin_enter("cuMemFree", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  void *data = (void *)(uintptr_t)pointer;
  struct block *block = standin_block_at(data);
  if (!block || !block->shared || block->data != data)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "%p is no mapped buffer", data));
  size_t bytes = block->bytes;
  if (standin_block_unshare(block)) munmap(data, bytes);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_DestroyExternalMemory(CUexternalMemory handle) {
  CUresult result = standin_enter("cuDestroyExternalMemory", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct external *external = standin_find(LIVE_EXTERNALS, handle);
  if (!external) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  close(external->fd);
  standin_remove(&external->object);
  free(external);
  return standin_leave(CUDA_SUCCESS);
}

/* ---- Memory that can be exported ------------------------------------------------------------------------------- */

#define STEP ((size_t)64 << 10)

struct chunk {
  struct object object;
  int fd;
  size_t bytes;
};

static struct range {
  struct range *next;
  char *data;
  size_t bytes;
  bool mapped;
} * ranges;

CUresult standin_MemGetAllocationGranularity(size_t *step, const CUmemAllocationProp *props,
                                             CUmemAllocationGranularity_flags option) {
  CUresult result = standin_enter("cuMemGetAllocationGranularity", 0);
  if (result != CUDA_SUCCESS) return result;
  (void)props, (void)option;
  *step = STEP;
  return standin_leave(CUDA_SUCCESS);
}

static CUresult chunk_new(CUmemGenericAllocationHandle *out, int fd, size_t bytes) {
  struct chunk *chunk = fd >= 0 ? calloc(1, sizeof *chunk) : NULL;
  if (!chunk) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  chunk->fd = fd;
  chunk->bytes = bytes;
  standin_add(&chunk->object, LIVE_CHUNKS, standin_current());
  *out = (CUmemGenericAllocationHandle)(uintptr_t)standin_handle(&chunk->object);
  return CUDA_SUCCESS;
}

static struct chunk *find_chunk(CUmemGenericAllocationHandle handle) {
  return standin_find(LIVE_CHUNKS, (void *)(uintptr_t)handle);
}

CUresult standin_MemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *props,
                           unsigned long long flags) {
  CUresult result = standin_enter("cuMemCreate", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  if (bytes == 0 || bytes % STEP != 0 || flags != 0 || props->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || props->location.id != standin_current()->device)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "%zu bytes, or no memory of the current GPU", bytes));
  if (bytes > (size_t)standin_number("NIB_STANDIN_MEMORY", (int64_t)8 << 30))
    return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  int fd = memfd_create("stand-in memory", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)bytes) != 0) {
    close(fd);
    fd = -1;
  }
  return standin_leave(chunk_new(out, fd, bytes));
}

CUresult standin_MemRelease(CUmemGenericAllocationHandle handle) {
  CUresult result = standin_enter("cuMemRelease", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct chunk *chunk = find_chunk(handle);
  if (!chunk) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  close(chunk->fd); /* what is mapped stays */
  standin_remove(&chunk->object);
  free(chunk);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                            CUmemAllocationHandleType type, unsigned long long flags) {
  CUresult result = standin_enter("cuMemExportToShareableHandle", 0);
  if (result != CUDA_SUCCESS) return result;
  struct chunk *chunk = find_chunk(handle);
  if (!chunk) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "handles of type %d are not played", (int)type));
  int fd = dup(chunk->fd);
  if (fd < 0) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  *(int *)out = fd;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
                                              CUmemAllocationHandleType type) {
  CUresult result = standin_enter("cuMemImportFromShareableHandle", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  int fd = (int)(uintptr_t)handle;
  struct stat info;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "handles of type %d are not played", (int)type));
  if (!is_memory(fd, 1) || fstat(fd, &info) != 0) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  return standin_leave(chunk_new(out, dup(fd), (size_t)info.st_size)); /* the descriptor stays the caller's */
}

static struct range **find_range(CUdeviceptr pointer, size_t bytes) {
  struct range **link = &ranges;
  while (*link && ((*link)->data != (char *)(uintptr_t)pointer || (*link)->bytes != bytes)) link = &(*link)->next;
  if (!*link) standin_misuse(CUDA_SUCCESS, "%zu bytes at %p are no reserved range", bytes, (void *)(uintptr_t)pointer);
  return link;
}

CUresult standin_MemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                   unsigned long long flags) {
  CUresult result = standin_enter("cuMemAddressReserve", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  if (bytes % STEP != 0 || alignment != 0 || wanted != 0 || flags != 0) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  struct range *range = calloc(1, sizeof *range);
  void *data = range ? mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
  if (data == MAP_FAILED) {
    free(range);
    return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  }
  *range = (struct range){ ranges, data, bytes, false };
  ranges = range;
  standin_live[LIVE_RANGES]++;
  *out = (CUdeviceptr)(uintptr_t)data;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemAddressFree(CUdeviceptr pointer, size_t bytes) {
  CUresult result = standin_enter("cuMemAddressFree", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct range **link = find_range(pointer, bytes), *range = *link;
  if (!range) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  if (range->mapped) return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "memory is still mapped there"));
  *link = range->next;
  munmap(range->data, range->bytes);
  free(range);
  standin_live[LIVE_RANGES]--;
  return standin_leave(CUDA_SUCCESS);
}

/* Nobody may touch it before cuMemSetAccess. */
CUresult standin_MemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                        unsigned long long flags) {
  CUresult result = standin_enter("cuMemMap", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct chunk *chunk = find_chunk(handle);
  struct range *range = *find_range(pointer, bytes);
  if (!chunk || !range) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  if (range->mapped || offset != 0 || flags != 0)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "mapped already, or in part"));
  if (bytes > chunk->bytes) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  if (mmap(range->data, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->fd, 0) == MAP_FAILED)
    return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  range->mapped = true;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  CUresult result = standin_enter("cuMemSetAccess", 0);
  if (result != CUDA_SUCCESS) return result;
  struct range *range = *find_range(pointer, bytes);
  if (!range) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  if (!range->mapped || count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      access->location.id != standin_current()->device || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "nothing mapped, or not for the current GPU alone"));
  if (mprotect(range->data, bytes, PROT_READ | PROT_WRITE) != 0 || !standin_block_share(range->data, bytes))
    return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemUnmap(CUdeviceptr pointer, size_t bytes) {
  CUresult result = standin_enter("cuMemUnmap", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct range *range = *find_range(pointer, bytes);
  if (!range || !range->mapped) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  struct block *block = standin_block_at(range->data);
  if (!block || standin_block_unshare(block))
    mmap(range->data, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  range->mapped = false;
  return standin_leave(CUDA_SUCCESS);
}

/* ---- Timeline semaphores --------------------------------------------------------------------------------------- */

void standin_semaphore_release(struct semaphore *semaphore) {
  if (--semaphore->references > 0) return;
  munmap(semaphore->value, sizeof *semaphore->value);
  free(semaphore);
}

bool standin_semaphore_reached(const struct semaphore *semaphore, uint64_t value) {
  return __atomic_load_n(semaphore->value, __ATOMIC_ACQUIRE) >= value;
}

void standin_semaphore_signal(struct semaphore *semaphore, uint64_t value) {
  if (standin_semaphore_reached(semaphore, value))
    standin_misuse(CUDA_SUCCESS, "a semaphore is signalled with %llu, which it has reached", (unsigned long long)value);
  __atomic_store_n(semaphore->value, value, __ATOMIC_RELEASE);
}

CUresult standin_ImportExternalSemaphore(CUexternalSemaphore *out, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc) {
  CUresult result = standin_enter("cuImportExternalSemaphore", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  if (desc->type != CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD || desc->flags != 0)
    return standin_leave(
      standin_misuse(CUDA_ERROR_NOT_SUPPORTED, "handles of type %d are not played", (int)desc->type));
  if (!is_memory(desc->handle.fd, sizeof(uint64_t))) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  struct semaphore *semaphore = calloc(1, sizeof *semaphore);
  if (!semaphore || !(semaphore->value = map_fd(desc->handle.fd, sizeof *semaphore->value))) {
    free(semaphore);
    return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  }
  close(desc->handle.fd); /* the driver's from now on */
  semaphore->references = 1;
  standin_add(&semaphore->object, LIVE_SEMAPHORES, standin_current());
  *out = standin_handle(&semaphore->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_DestroyExternalSemaphore(CUexternalSemaphore handle) {
  CUresult result = standin_enter("cuDestroyExternalSemaphore", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct semaphore *semaphore = standin_find(LIVE_SEMAPHORES, handle);
  if (!semaphore) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (semaphore->references > 1) standin_misuse(CUDA_SUCCESS, "waits or signals of the semaphore are not done");
  standin_remove(&semaphore->object);
  standin_semaphore_release(semaphore);
  return standin_leave(CUDA_SUCCESS);
}

static CUresult submit(const CUexternalSemaphore *handles, uint64_t value, unsigned count, CUstream stream_handle,
                       int kind) {
  struct stream *stream = standin_stream(stream_handle);
  struct semaphore *semaphore = count == 1 ? standin_find(LIVE_SEMAPHORES, handles[0]) : NULL;
  if (!stream || !semaphore) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return standin_misuse(standin_refuse_captured(stream), "a semaphore is captured");
  if (semaphore->object.context->device != stream->object.context->device)
    return standin_misuse(CUDA_ERROR_INVALID_HANDLE, "semaphore and stream belong to different GPUs");
  struct task task = { .semaphore = semaphore, .number = value };
  task.kind = kind;
  return standin_enqueue(stream, &task);
}

CUresult standin_WaitExternalSemaphoresAsync(const CUexternalSemaphore *handles,
                                             const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *params, unsigned int count,
                                             CUstream stream) {
  CUresult result = standin_enter("cuWaitExternalSemaphoresAsync", 0);
  if (result != CUDA_SUCCESS) return result;
  return standin_leave(submit(handles, params->params.fence.value, count, stream, TASK_AWAIT));
}

CUresult standin_SignalExternalSemaphoresAsync(const CUexternalSemaphore *handles,
                                               const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *params, unsigned int count,
                                               CUstream stream) {
  CUresult result = standin_enter("cuSignalExternalSemaphoresAsync", 0);
  if (result != CUDA_SUCCESS) return result;
  return standin_leave(submit(handles, params->params.fence.value, count, stream, TASK_SIGNAL));
}
