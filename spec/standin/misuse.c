/* That the stand-in driver notices what it is there to notice: each step misuses it in one way, and looks whether it
 * said so. Runs on the stand-in alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../runtime/cuda/driver.h"

static struct nib_driver cu;
static int64_t (*misuses)(void);
static const char *(*misuse)(void);
static int64_t before;

static void check(bool good, const char *what, const char *detail) {
  if (good) return;
  fprintf(stderr, "%s: %s\n", what, detail);
  exit(1);
}

#define OK(call) check((call) == CUDA_SUCCESS, #call, "failed")

/* One misuse more, with these words in it. */
static void expect(const char *words) {
  check(misuses() == before + 1, words, "not noticed, or more than once");
  check(strstr(misuse(), words) != NULL, words, misuse());
  before = misuses();
}

static CUresult fill(CUfunction function, CUstream stream, CUdeviceptr at, int64_t count, size_t bytes, unsigned grid) {
  struct nib_fill_params params = { .destination = (void *)(uintptr_t)at,
                                    .type = NIB_TYPE_UINT8,
                                    .ndim = 1,
                                    .size = { count },
                                    .stride = { 1 },
                                    .bits = 7 };
  void *config[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, &params, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                     CU_LAUNCH_PARAM_END };
  return cu.LaunchKernel(function, grid, 1, 1, 32, 1, 1, 0, stream, NULL, config);
}

/* Memory and semaphores of other APIs, and memory that can be exported. */
static void share(CUfunction function, CUstream stream) {
  int memory = memfd_create("memory", 0), counter = memfd_create("counter", 0);
  check(ftruncate(memory, 4096) == 0 && ftruncate(counter, 8) == 0, "memory files", "not made");
  CUDA_EXTERNAL_MEMORY_HANDLE_DESC desc = { .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                            .handle = { .fd = memory },
                                            .size = 4096 };
  CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer = { .size = 4096 };
  CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC semaphore_desc = { .type =
                                                           CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
                                                         .handle = { .fd = dup(counter) } };
  CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS wait = { .params = { .fence = { .value = 1 } } };
  CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS signal = { .params = { .fence = { .value = 1 } } };
  CUmemAllocationProp props = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
  CUexternalMemory external;
  CUexternalSemaphore semaphore;
  CUmemGenericAllocationHandle chunk;
  CUdeviceptr mapped, range;
  size_t step;
  uint64_t one = 1;
  OK(cu.ImportExternalMemory(&external, &desc));
  OK(cu.ExternalMemoryGetMappedBuffer(&mapped, external, &buffer));
  OK(cu.ImportExternalSemaphore(&semaphore, &semaphore_desc));
  OK(cu.WaitExternalSemaphoresAsync(&semaphore, &wait, 1, stream));
  OK(fill(function, stream, mapped, 4096, sizeof(struct nib_fill_params), 1));
  if (!getenv("NIBBLE_VALGRIND")) {
    OK(cu.MemFree(mapped));
    expect("still uses the memory");
  }
  OK(cu.DestroyExternalSemaphore(semaphore));
  expect("are not done");
  OK(cu.DestroyExternalMemory(external));
  check(cu.DestroyExternalMemory(external) == CUDA_ERROR_INVALID_HANDLE, "destroyed memory", "found");
  expect("no handle");
  semaphore_desc.handle.fd = dup(counter);
  OK(cu.ImportExternalSemaphore(&semaphore, &semaphore_desc));
  OK(cu.MemGetAllocationGranularity(&step, &props, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  check(cu.MemCreate(&chunk, step - 1, &props, 0) == CUDA_ERROR_INVALID_VALUE, "a part of a step", "worked");
  expect("no memory of the current GPU");
  OK(cu.MemCreate(&chunk, step, &props, 0));
  OK(cu.MemAddressReserve(&range, step, 0, 0, 0));
  OK(cu.MemMap(range, step, 0, chunk, 0));
  check(cu.MemAddressFree(range, step) == CUDA_ERROR_INVALID_VALUE, "a range in use", "freed");
  expect("still mapped");
  OK(cu.MemUnmap(range, step));
  OK(cu.MemAddressFree(range, step));
  OK(cu.MemRelease(chunk));
  check(pwrite(counter, &one, sizeof one, 0) == sizeof one, "the wait's value", "not written");
  OK(cu.SignalExternalSemaphoresAsync(&semaphore, &signal, 1, stream));
  OK(cu.StreamSynchronize(stream));
  check(misuses() > before && strstr(misuse(), "which it has reached"), "a value that does not grow", misuse());
  before = misuses();
  OK(cu.DestroyExternalSemaphore(semaphore));
  close(counter);
}

static void *call_until_told(void *told) {
  int count;
  while (!__atomic_load_n((int *)told, __ATOMIC_ACQUIRE)) OK(cu.DeviceGetCount(&count));
  return NULL;
}

/* A child can ask what it did, whatever another thread of the parent was doing when it was made. */
static void call_in_children(void) {
  int told = 0;
  pthread_t thread;
  check(pthread_create(&thread, NULL, call_until_told, &told) == 0, "a thread", "not made");
  for (int i = 0; i < 100; i++) {
    pid_t child = fork();
    if (child == 0) {
      CUcontext context;
      alarm(20);
      check(misuses() == before, "counters in a child", "not the parent's");
      check(cu.DevicePrimaryCtxRetain(&context, 0) == CUDA_ERROR_NOT_INITIALIZED, "a call in a child", "worked");
      expect("in a child process after fork");
      _exit(0);
    }
    int status = -1;
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child of fork", "did not end well");
  }
  __atomic_store_n(&told, 1, __ATOMIC_RELEASE);
  pthread_join(thread, NULL);
}

int main(void) {
  char reason[192], bytes[64] = { 0 };
  CUcontext context, popped;
  CUstream stream, second;
  CUevent event;
  CUmemoryPool pool;
  CUdeviceptr block, other;
  CUmodule module;
  CUfunction function;
  CUgraph graph;
  CUgraphExec exec;
  void *pinned;
  static const unsigned long long image[] = { 0xBA55ED50 };
  CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                           .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
  check(nib_driver_open(&cu, reason, sizeof reason), "driver", reason);
  *(void **)&misuses = dlsym(cu.library, "nib_standin_misuses");
  *(void **)&misuse = dlsym(cu.library, "nib_standin_misuse");
  check(misuses && misuse, "driver", "not the stand-in");

  OK(cu.DevicePrimaryCtxRetain(&context, 0));
  check(cu.StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) == CUDA_ERROR_INVALID_CONTEXT, "no context",
        "worked");
  expect("without a current context");
  OK(cu.CtxPushCurrent(context));
  check(cu.StreamCreateWithPriority(&stream, CU_STREAM_DEFAULT, 0) == CUDA_ERROR_INVALID_VALUE, "blocking stream",
        "worked");
  expect("legacy stream");
  OK(cu.StreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  OK(cu.StreamCreateWithPriority(&second, CU_STREAM_NON_BLOCKING, 0));
  OK(cu.MemPoolCreate(&pool, &props));
  OK(cu.MemHostAlloc(&pinned, 64, 0));
  memset(pinned, 0, 64);
  OK(cu.ModuleLoadDataEx(&module, image, 0, NULL, NULL));
  check(cu.ModuleGetFunction(&function, module, "nib_cuda_nothing") == CUDA_ERROR_NOT_FOUND, "an unknown function",
        "found");
  OK(cu.ModuleGetFunction(&function, module, "nib_cuda_fill_8"));
  OK(cu.EventCreate(&event, CU_EVENT_DEFAULT));

  /* Memory: what is there before it is written, guards, bounds, and what is gone. */
  OK(cu.MemAllocFromPoolAsync(&block, 64, pool, stream));
  OK(cu.MemcpyDtoHAsync(bytes, block, 64, stream));
  check(bytes[0] == (char)0xCD && bytes[63] == (char)0xCD, "fresh memory", "not filled");
  OK(fill(function, stream, block, 64, sizeof(struct nib_fill_params), 1));
  OK(cu.MemcpyDtoHAsync(bytes, block, 64, stream));
  check(bytes[0] == 7 && bytes[63] == 7 && misuses() == before, "a fill", "did not work");
  check(fill(function, stream, block, 64, 8, 1) == CUDA_ERROR_INVALID_VALUE, "too few parameters", "taken");
  expect("bytes of parameters");
  check(fill(function, stream, block, 64, sizeof(struct nib_fill_params), 0) == CUDA_ERROR_INVALID_VALUE,
        "an empty grid", "taken");
  expect("grid {0, 1, 1}");
  check(cu.MemcpyHtoDAsync(block + 1, bytes, 64, stream) == CUDA_ERROR_INVALID_VALUE, "a copy past the end", "taken");
  expect("not all in one block");
  check(cu.MemcpyAsync(block, (CUdeviceptr)(uintptr_t)bytes, 64, stream) == CUDA_ERROR_INVALID_VALUE,
        "a copy of a stack", "taken");
  expect("pageable memory");
  OK(fill(function, stream, block, 65, sizeof(struct nib_fill_params), 1));
  OK(cu.MemFreeAsync(block, stream));
  OK(cu.StreamSynchronize(stream));
  expect("bytes behind a block of 64 bytes were written");
  OK(fill(function, stream, block, 0, sizeof(struct nib_fill_params), 1));
  OK(cu.StreamSynchronize(stream));
  expect("fill uses memory that is free");
  check(cu.MemFreeAsync(block, stream) == CUDA_ERROR_INVALID_VALUE, "a second free", "worked");
  expect("freed already");
  check(cu.MemFreeAsync(block + 16, stream) == CUDA_ERROR_INVALID_VALUE, "a free in the middle", "worked");
  expect("freed already");

  /* A stream that should have waited: the free overtakes the work. */
  OK(cu.MemAllocFromPoolAsync(&block, 1 << 26, pool, stream));
  OK(cu.StreamSynchronize(stream));
  OK(fill(function, stream, block, 1 << 26, sizeof(struct nib_fill_params), 1));
  OK(cu.MemFreeAsync(block, second));
  OK(cu.StreamSynchronize(second));
  OK(cu.StreamSynchronize(stream));
  check(misuses() > before && strstr(misuse(), "fill"), "a free that overtakes", misuse());
  before = misuses();

  /* Captures, graphs and handles. */
  OK(cu.MemAllocFromPoolAsync(&other, 64, pool, stream));
  OK(cu.StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  OK(cu.MemcpyHtoDAsync(other, bytes, 64, stream));
  expect("pageable");
  OK(fill(function, stream, other, 64, sizeof(struct nib_fill_params), 1));
  OK(cu.StreamEndCapture(stream, &graph));
  OK(cu.GraphInstantiateWithFlags(&exec, graph, 0));
  OK(cu.GraphDestroy(graph));
  check(cu.GraphDestroy(graph) == CUDA_ERROR_INVALID_HANDLE, "a destroyed graph", "found");
  expect("no handle");
  OK(cu.GraphLaunch(exec, stream));
  OK(cu.StreamSynchronize(stream));
  OK(cu.GraphExecDestroy(exec));
  OK(cu.EventDestroy(event));
  check(cu.EventRecord(event, stream) == CUDA_ERROR_INVALID_HANDLE, "a destroyed event", "found");
  expect("no handle");
  check(cu.StreamSynchronize((CUstream)context) == CUDA_ERROR_INVALID_HANDLE, "a context as a stream", "found");
  expect("no handle");
  OK(cu.StreamSynchronize(NULL));
  expect("legacy stream");
  OK(cu.MemFreeAsync(other, stream));
  OK(cu.StreamSynchronize(stream));
  OK(cu.MemFreeHost(pinned));
  share(function, second);
  call_in_children();
  OK(cu.MemPoolDestroy(pool));
  OK(cu.ModuleUnload(module));
  OK(cu.StreamDestroy(second));
  OK(cu.CtxPopCurrent(&popped));
  check(cu.CtxPopCurrent(&popped) == CUDA_ERROR_INVALID_CONTEXT, "an empty stack", "popped");
  expect("nothing is pushed");
  OK(cu.DevicePrimaryCtxRelease(0));
  expect("are alive"); /* the stream */
  return 0;
}
