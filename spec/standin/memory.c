/* Pools, blocks of memory and copies. Device memory is host memory with guards around it; a block that is freed is
 * poisoned and stays in quarantine for a while, so that work which still uses it is found out. */
#define _DEFAULT_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT         256 /* no more than the driver promises */
#define GUARD             256
#define GUARD_BYTE        0xFB
#define FRESH_BYTE        0xCD
#define FREED_BYTE        0xDD
#define EDGE              ((size_t)64 << 10) /* of large blocks only the ends are filled: the middle is often never touched */
#define MAPPED            ((size_t)64 << 10) /* larger blocks are mapped, and given back to the system when they are freed */
#define QUARANTINE_BYTES  ((size_t)2 << 20)
#define QUARANTINE_BLOCKS 128

struct pool {
  struct object object;
  unsigned peers; /* a bit for each GPU that may reach it */
  int64_t blocks;
  bool destroyed;
  uint64_t threshold;
};

/* All blocks by address. */
static struct block **blocks;
static size_t block_count, block_capacity;
static struct block *oldest, *newest; /* quarantine */
static size_t quarantine_bytes, quarantine_blocks;
static size_t device_bytes; /* held on all GPUs, without the quarantine */

/* ---- Blocks ---------------------------------------------------------------------------------------------------- */

/* The place of the first block behind the address. */
static size_t upper_bound(const char *address) {
  size_t low = 0, high = block_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (blocks[middle]->data <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static struct block *block_at(const void *address) {
  size_t at = upper_bound(address);
  struct block *block = at > 0 ? blocks[at - 1] : NULL;
  return block && (const char *)address < block->data + (block->bytes ? block->bytes : 1) ? block : NULL;
}

struct block *standin_block_at(const void *address) {
  return block_at(address);
}

static void *base_new(size_t size) {
  void *base = NULL;
  if (size < MAPPED) return posix_memalign(&base, ALIGNMENT, size) == 0 ? base : NULL;
  base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return base == MAP_FAILED ? NULL : base;
}

static void base_free(void *base, size_t size) {
  if (size < MAPPED) free(base);
  else munmap(base, size);
}

static bool reserve_entry(void) {
  if (block_count == block_capacity) {
    size_t wanted = block_capacity ? block_capacity * 2 : 64;
    struct block **larger = realloc(blocks, wanted * sizeof *blocks);
    if (!larger) return false;
    blocks = larger;
    block_capacity = wanted;
  }
  return true;
}

static void enter(struct block *block) {
  size_t at = upper_bound(block->data);
  memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
  blocks[at] = block;
  block_count++;
}

static struct block *block_new(size_t bytes, bool host) {
  if (!reserve_entry()) return NULL;
  struct block *block = calloc(1, sizeof *block);
  if (!block || bytes > (size_t)1 << 46 || !(block->base = base_new(bytes + 2 * GUARD))) {
    free(block);
    return NULL;
  }
  block->data = (char *)block->base + GUARD;
  block->bytes = bytes;
  block->host = host;
  block->context = standin_current();
  memset(block->base, GUARD_BYTE, GUARD);
  memset(block->data + bytes, GUARD_BYTE, GUARD);
  enter(block);
  return block;
}

struct block *standin_block_share(void *data, size_t bytes) {
  struct block *block = reserve_entry() ? calloc(1, sizeof *block) : NULL;
  if (!block) return NULL;
  *block = (struct block){ .data = data, .bytes = bytes, .shared = true, .context = standin_current() };
  enter(block);
  standin_live[LIVE_MAPPED]++;
  return block;
}

static void check_guards(const struct block *block) {
  if (block->shared) return;
  const unsigned char *before = block->base, *after = (const unsigned char *)block->data + block->bytes;
  for (size_t i = 0; i < GUARD; i++)
    if (before[i] != GUARD_BYTE || after[i] != GUARD_BYTE) {
      standin_misuse(CUDA_SUCCESS, "bytes %s a block of %zu bytes were written",
                     before[i] != GUARD_BYTE ? "before" : "behind", block->bytes);
      return;
    }
}

void standin_check_guards(void) {
  for (size_t i = 0; i < block_count; i++)
    if (blocks[i]->state != BLOCK_FREED) check_guards(blocks[i]);
}

static void block_delete(struct block *block) {
  size_t at = upper_bound(block->data) - 1;
  memmove(blocks + at, blocks + at + 1, (block_count - at - 1) * sizeof *blocks);
  block_count--;
  if (block->pool && --block->pool->blocks == 0 && block->pool->destroyed) free(block->pool);
  if (!block->shared) base_free(block->base, block->bytes + 2 * GUARD);
  free(block);
}

bool standin_block_unshare(struct block *block) {
  bool used = standin_is_in_use(block->data, block->bytes);
  if (used) standin_misuse(CUDA_SUCCESS, "work that is queued still uses the memory");
  standin_live[LIVE_MAPPED]--;
  block_delete(block);
  return !used;
}

static void fill(const struct block *block, int byte) {
  if (block->bytes <= 16 * EDGE) {
    memset(block->data, byte, block->bytes);
  } else {
    memset(block->data, byte, EDGE);
    memset(block->data + block->bytes - EDGE, byte, EDGE);
  }
}

void standin_block_fill(struct block *block) { fill(block, FRESH_BYTE); }

static void shrink_quarantine(size_t bytes, size_t count) {
  while (oldest && (quarantine_bytes > bytes || quarantine_blocks > count)) {
    struct block *block = oldest;
    oldest = block->next;
    if (!oldest) newest = NULL;
    quarantine_bytes -= block->bytes;
    quarantine_blocks--;
    block_delete(block);
  }
}

/* In the order of its stream. */
void standin_block_free(struct block *block) {
  for (struct stream *stream = standin_streams; stream; stream = stream->next)
    if (stream->running && standin_uses(stream->running, block->data, block->bytes))
      standin_misuse(CUDA_SUCCESS, "a block of %zu bytes was freed while %s used it", block->bytes,
                     stream->running->kernel ? stream->running->kernel->name : "a copy");
  check_guards(block);
  fill(block, FREED_BYTE);
  block->state = BLOCK_FREED;
  device_bytes -= block->bytes;
  standin_live[LIVE_ALLOCATIONS]--;
  if (newest) newest->next = block;
  else oldest = block;
  newest = block;
  quarantine_bytes += block->bytes;
  quarantine_blocks++;
}

void standin_check_words(const char *who, const void *words, size_t bytes) {
  for (size_t at = 0; at + sizeof(void *) <= bytes; at += sizeof(void *)) {
    void *address;
    memcpy(&address, (const char *)words + at, sizeof address);
    struct block *block = block_at(address);
    if (block && block->state == BLOCK_FREED)
      standin_misuse(CUDA_SUCCESS, "%s uses memory that is free: byte %td of a block of %zu", who,
                     (char *)address - block->data, block->bytes);
  }
}

/* ---- Pools ----------------------------------------------------------------------------------------------------- */

CUresult standin_MemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
  CUresult result = standin_enter("cuMemPoolCreate", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  if (props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || props->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      props->location.id != standin_current()->device)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "no pool of the current GPU's memory"));
  struct pool *pool = calloc(1, sizeof *pool);
  if (!pool) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  standin_add(&pool->object, LIVE_POOLS, standin_current());
  *out = standin_handle(&pool->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemPoolDestroy(CUmemoryPool handle) {
  CUresult result = standin_enter("cuMemPoolDestroy", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct pool *pool = standin_find(LIVE_POOLS, handle);
  if (!pool) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  standin_remove(&pool->object);
  pool->destroyed = true; /* what is still allocated keeps it */
  if (pool->blocks == 0) free(pool);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
  CUresult result = standin_enter("cuMemPoolSetAttribute", 0);
  if (result != CUDA_SUCCESS) return result;
  struct pool *pool = standin_find(LIVE_POOLS, handle);
  if (!pool) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  switch (attribute) {
  case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
  case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
  case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: /* memory is only reused after its free is done: legal with
                                                             any value */
    if (*(int *)value != 0 && *(int *)value != 1) result = CUDA_ERROR_INVALID_VALUE;
    break;
  case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = *(cuuint64_t *)value; break;
  default: result = CUDA_ERROR_INVALID_VALUE;
  }
  return standin_leave(result == CUDA_SUCCESS ? result : standin_misuse(result, "attribute %d", (int)attribute));
}

CUresult standin_MemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t count) {
  CUresult result = standin_enter("cuMemPoolSetAccess", 0);
  if (result != CUDA_SUCCESS) return result;
  struct pool *pool = standin_find(LIVE_POOLS, handle);
  if (!pool) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  for (size_t i = 0; i < count; i++) {
    if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || access[i].location.id < 0 ||
        access[i].location.id >= 16 || !standin_number("NIB_STANDIN_PEERS", 1))
      return standin_leave(standin_misuse(CUDA_ERROR_INVALID_DEVICE, "no GPU that can reach the pool"));
    pool->peers |= 1u << access[i].location.id;
  }
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  CUresult result = standin_enter("cuMemPoolTrimTo", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct pool *pool = standin_find(LIVE_POOLS, handle);
  if (!pool) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  shrink_quarantine(keep, QUARANTINE_BLOCKS);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool_handle,
                                       CUstream stream_handle) {
  CUresult result = standin_enter("cuMemAllocFromPoolAsync", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct pool *pool = standin_find(LIVE_POOLS, pool_handle);
  struct stream *stream = standin_stream(stream_handle);
  if (!pool || !stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture) return standin_leave(standin_refuse_captured(stream));
  if (bytes == 0) return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "0 bytes"));
  size_t cap = (size_t)standin_number("NIB_STANDIN_MEMORY", (int64_t)8 << 30);
  if (bytes > cap || device_bytes > cap - bytes) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  shrink_quarantine(QUARANTINE_BYTES, QUARANTINE_BLOCKS);
  struct block *block = block_new(bytes, false);
  if (!block) {
    shrink_quarantine(0, 0);
    block = block_new(bytes, false);
  }
  if (!block) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  block->pool = pool;
  pool->blocks++;
  /* Written in the stream's order, so that whoever uses the memory before that is found out. */
  struct task task = { .kind = TASK_FILL, .block = block };
  result = standin_enqueue(stream, &task);
  if (result != CUDA_SUCCESS) {
    block_delete(block);
    return standin_leave(result);
  }
  device_bytes += bytes;
  standin_live[LIVE_ALLOCATIONS]++;
  *out = (CUdeviceptr)(uintptr_t)block->data;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemFreeAsync(CUdeviceptr address, CUstream stream_handle) {
  CUresult result = standin_enter("cuMemFreeAsync", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(stream_handle);
  struct block *block = block_at((void *)(uintptr_t)address);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture) return standin_leave(standin_refuse_captured(stream));
  if (!block || block->host || block->shared || block->data != (char *)(uintptr_t)address || block->state != BLOCK_LIVE)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "%p is %s", (void *)(uintptr_t)address,
                                        block && block->state != BLOCK_LIVE ? "freed already" : "no block of a pool"));
  struct task task = { .kind = TASK_FREE, .block = block };
  block->state = BLOCK_FREEING;
  shrink_quarantine(QUARANTINE_BYTES, QUARANTINE_BLOCKS);
  result = standin_enqueue(stream, &task);
  if (result != CUDA_SUCCESS) block->state = BLOCK_LIVE;
  return standin_leave(result);
}

/* ---- Pinned host memory ---------------------------------------------------------------------------------------- */

CUresult standin_MemHostAlloc(void **out, size_t bytes, unsigned int flags) {
  CUresult result = standin_enter("cuMemHostAlloc", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct block *block = bytes > 0 ? block_new(bytes, true) : NULL;
  if (!block) return standin_leave(bytes > 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE);
  block->portable = (flags & CU_MEMHOSTALLOC_PORTABLE) != 0;
  fill(block, FRESH_BYTE);
  standin_live[LIVE_HOST]++;
  *out = block->data;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemFreeHost(void *address) {
  CUresult result = standin_enter("cuMemFreeHost", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct block *block = block_at(address);
  if (!block || !block->host || block->data != address)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "%p is no block of pinned memory", address));
  if (standin_is_in_use(block->data, block->bytes))
    standin_misuse(CUDA_SUCCESS, "work that is queued still uses the block");
  check_guards(block);
  standin_live[LIVE_HOST]--;
  block_delete(block);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_MemHostGetDevicePointer(CUdeviceptr *out, void *address, unsigned int flags) {
  CUresult result = standin_enter("cuMemHostGetDevicePointer", 0);
  if (result != CUDA_SUCCESS) return result;
  struct block *block = block_at(address);
  if (!block || !block->host || flags != 0)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "%p is not in pinned memory", address));
  *out = (CUdeviceptr)(uintptr_t)address;
  return standin_leave(CUDA_SUCCESS);
}

/* ---- Copies ---------------------------------------------------------------------------------------------------- */

static bool is_inside(const struct block *block, const void *address, size_t bytes) {
  return block && bytes <= (size_t)(block->data + block->bytes - (const char *)address);
}

static bool is_pinned(const void *address, size_t bytes) {
  struct block *block = block_at(address);
  return block && block->host && is_inside(block, address, bytes) &&
         (block->portable || block->context == standin_current());
}

static CUresult check_range(CUdeviceptr address, size_t bytes) {
  void *data = (void *)(uintptr_t)address;
  struct block *block = block_at(data);
  if (is_inside(block, data, bytes) && block->state != BLOCK_FREED) return CUDA_SUCCESS;
  return standin_misuse(CUDA_ERROR_INVALID_VALUE, "%zu bytes at %p are not all in one block of a pool", bytes, data);
}

CUresult standin_MemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream handle) {
  CUresult result = standin_enter("cuMemcpyHtoDAsync", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  result = check_range(to, bytes);
  if (result != CUDA_SUCCESS) return standin_leave(result);
  struct op op = { .kind = OP_COPY, .to = (void *)(uintptr_t)to, .from = from, .bytes = bytes };
  if (!is_pinned(from, bytes) && stream->capture) {
    /* The driver takes it. Its replay reads what is there then. */
    standin_misuse(CUDA_SUCCESS, "a copy from pageable memory is captured");
  } else if (!is_pinned(from, bytes)) { /* the driver stages it: the source is the caller's again on return */
    op.data = malloc(bytes ? bytes : 1);
    if (!op.data) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
    memcpy(op.data, from, bytes);
    op.from = NULL;
  }
  return standin_leave(standin_submit(stream, &op));
}

CUresult standin_MemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream handle) {
  CUresult result = standin_enter("cuMemcpyDtoHAsync", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  result = check_range(from, bytes);
  if (result != CUDA_SUCCESS) return standin_leave(result);
  struct op op = { .kind = OP_COPY, .to = to, .from = (void *)(uintptr_t)from, .bytes = bytes };
  bool pinned = is_pinned(to, bytes), captured = stream->capture != NULL;
  if (!pinned && captured) standin_misuse(CUDA_SUCCESS, "a copy to pageable memory is captured");
  result = standin_submit(stream, &op);
  if (result == CUDA_SUCCESS && !pinned && !captured) result = standin_wait_idle(stream);
  return standin_leave(result);
}

/* Which side is where the addresses tell. */
CUresult standin_MemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
  CUresult result = standin_enter("cuMemcpyAsync", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  void *ends[] = { (void *)(uintptr_t)to, (void *)(uintptr_t)from };
  for (int i = 0; i < 2; i++) {
    struct block *block = block_at(ends[i]);
    if (is_pinned(ends[i], bytes)) continue;
    if (!block || block->host)
      return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "pageable memory is not played here"));
    result = check_range((CUdeviceptr)(uintptr_t)ends[i], bytes);
    if (result != CUDA_SUCCESS) return standin_leave(result);
    if (block->context != stream->object.context)
      return standin_leave(
        standin_misuse(CUDA_ERROR_INVALID_VALUE, "the memory belongs to another context than the stream"));
  }
  struct op op = { .kind = OP_COPY, .to = ends[0], .from = ends[1], .bytes = bytes };
  return standin_leave(standin_submit(stream, &op));
}

CUresult standin_MemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                 size_t bytes, CUstream handle) {
  CUresult result = standin_enter("cuMemcpyPeerAsync", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  struct context *contexts[] = { standin_find(LIVE_CONTEXTS, to_context), standin_find(LIVE_CONTEXTS, from_context) };
  if (!stream || !contexts[0] || !contexts[1]) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->object.context != contexts[0] && stream->object.context != contexts[1])
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_HANDLE, "the stream belongs to neither context"));
  if (stream->capture)
    return standin_leave(standin_misuse(standin_refuse_captured(stream), "a copy between GPUs is captured"));
  CUdeviceptr ends[] = { to, from };
  for (int i = 0; i < 2; i++) {
    result = check_range(ends[i], bytes);
    if (result != CUDA_SUCCESS) return standin_leave(result);
    const struct block *block = block_at((void *)(uintptr_t)ends[i]);
    unsigned both = 1u << contexts[0]->device | 1u << contexts[1]->device;
    unsigned reached = 1u << contexts[i]->device | (block->pool ? block->pool->peers : 0);
    if (block->context != contexts[i])
      return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "the memory does not belong to its context"));
    if (standin_number("NIB_STANDIN_PEERS", 1) && (reached & both) != both)
      standin_misuse(CUDA_SUCCESS, "the copy takes a detour: the pool was not shared");
    if (contexts[i]->lost != CUDA_SUCCESS) return standin_leave(contexts[i]->lost);
  }
  struct op op = { .kind = OP_COPY, .to = (void *)(uintptr_t)to, .from = (void *)(uintptr_t)from, .bytes = bytes };
  return standin_leave(standin_submit(stream, &op));
}
