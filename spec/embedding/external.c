/* A host whose other API shares memory and timeline semaphores with the GPU by file descriptors. The other API is
 * played with memory files, as the stand-in driver takes them (spec/standin/external.c): this runs on the stand-in, and
 * on the CPU, which refuses all of it. spec/support/vulkan.c does the same with a real one. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

enum { BYTES = 1 << 20, HALF = BYTES / 2, N = HALF / 4, ROUNDS = 40 };

/* ---- The other API --------------------------------------------------------------------------------------------- */

struct shared {
  int fd;
  unsigned char *data;
};

static struct shared share(size_t bytes) {
  struct shared s = { .fd = memfd_create("shared", MFD_CLOEXEC) };
  CHECK(s.fd >= 0 && ftruncate(s.fd, (off_t)bytes) == 0);
  s.data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s.fd, 0);
  CHECK(s.data != MAP_FAILED);
  return s;
}

static bool is_open(int fd) { return fcntl(fd, F_GETFD) != -1; }

static void await(const unsigned char *semaphore, uint64_t value) {
  while (__atomic_load_n((const uint64_t *)semaphore, __ATOMIC_ACQUIRE) < value)
    nanosleep(&(struct timespec){ .tv_nsec = 20000 }, NULL);
}

static void signal_value(unsigned char *semaphore, uint64_t value) {
  __atomic_store_n((uint64_t *)semaphore, value, __ATOMIC_RELEASE);
}

struct api {
  struct shared memory, semaphore;
};

/* Fills the first half, tells, waits, and looks at the second. */
static void *api_thread(void *argument) {
  struct api *api = argument;
  int32_t *numbers = (int32_t *)api->memory.data;
  for (uint64_t round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < N; i++) numbers[i] = (int32_t)((uint64_t)i * (round + 1));
    signal_value(api->semaphore.data, 2 * round + 1);
    await(api->semaphore.data, 2 * round + 2);
    for (int i = 0; i < N; i++)
      CHECK(((float *)(api->memory.data + HALF))[i] == (float)(int32_t)((uint64_t)i * (round + 1)));
  }
  return NULL;
}

/* ---- Both sides ------------------------------------------------------------------------------------------------ */

/* A part of the memory as elements of a type. */
static nib_tensor *part(nib_runtime *rt, nib_tensor *memory, int64_t start, int64_t length, nib_dtype dtype) {
  nib_tensor *bytes, *tensor;
  OK(rt, nib_tensor_narrow(memory, 0, start, length, &bytes));
  OK(rt, nib_tensor_reinterpret(bytes, dtype, &tensor));
  nib_tensor_release(bytes);
  return tensor;
}

static void in_turn(nib_runtime *rt, nib_device *device) {
  struct api api = { share(BYTES), share(sizeof(uint64_t)) };
  nib_import_desc desc = { .kind = NIB_FD_OPAQUE, .fd = api.memory.fd, .bytes = BYTES };
  nib_stream *stream;
  nib_tensor *memory;
  nib_semaphore *semaphore;
  pthread_t thread;
  uint64_t used = nib_device_memory(device).used_bytes;
  OK(rt, nib_stream_create(device, 0, &stream));
  OK(rt, nib_tensor_import(device, &desc, &memory));
  OK(rt, nib_semaphore_import(device, api.semaphore.fd, &semaphore));
  CHECK(!is_open(api.memory.fd) && !is_open(api.semaphore.fd) && nib_semaphore_device(semaphore) == device);
  CHECK(nib_tensor_dtype(memory) == NIB_UINT8 && nib_tensor_numel(memory) == BYTES &&
        nib_device_memory(device).used_bytes == used);
  nib_tensor *in = part(rt, memory, 0, HALF, NIB_INT32), *out = part(rt, memory, HALF, HALF, NIB_FLOAT32);
  nib_tensor_release(memory);
  CHECK(pthread_create(&thread, NULL, api_thread, &api) == 0);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    OK(rt, nib_semaphore_wait(stream, semaphore, 2 * round + 1));
    OK(rt, nib_tensor_copy(stream, out, in));
    OK(rt, nib_semaphore_signal(stream, semaphore, 2 * round + 2));
  }
  CHECK(pthread_join(thread, NULL) == 0);

  /* What is queued holds both, and a wait has its time. */
  OK(rt, nib_semaphore_wait(stream, semaphore, 1000));
  OK(rt, nib_tensor_fill(stream, out, NIB_INTEGER(9)));
  OK(rt, nib_semaphore_signal(stream, semaphore, 1001));
  CHECK(nib_stream_synchronize(stream, 3000) == NIB_TIMEOUT);
  nib_semaphore_release(semaphore);
  nib_tensor_release(in);
  nib_tensor_release(out);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(((float *)(api.memory.data + HALF))[1] != 9);
  signal_value(api.semaphore.data, 1000);
  await(api.semaphore.data, 1001);
  CHECK(((float *)(api.memory.data + HALF))[N - 1] == 9);
  OK(rt, nib_stream_synchronize(stream, NIB_UNLIMITED));
  nib_stream_release(stream);
  munmap(api.memory.data, BYTES);
  munmap(api.semaphore.data, sizeof(uint64_t));
}

/* Memory of the runtime's for others: this process's mapping, and another runtime. */
static void exported(nib_runtime *rt, nib_device *device) {
  const int64_t shape[] = { 1000 };
  nib_stream *stream = nib_device_default_stream(device);
  nib_tensor *tensor, *other, *whole, *theirs;
  nib_runtime *second;
  int fd = 0, again;
  uint64_t bytes, used = nib_device_memory(device).used_bytes;
  OK(rt, nib_tensor_create_exportable(device, NIB_FLOAT32, 1, shape, &tensor));
  CHECK(nib_device_memory(device).used_bytes == used + 4000);
  OK(rt, nib_tensor_fill(stream, tensor, NIB_REAL(1.5)));
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(rt, nib_tensor_export(tensor, &fd, &bytes));
  OK(rt, nib_tensor_export(tensor, &again, &bytes));
  CHECK(bytes >= 4000 && bytes % 4096 == 0 && fd != again && nib_tensor_offset_bytes(tensor) == 0);
  float *seen = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0);
  CHECK(seen != MAP_FAILED && close(again) == 0 && seen[999] == 1.5f);

  OK(NULL, nib_runtime_create(NULL, &second));
  nib_import_desc desc = { .kind = NIB_FD_EXPORTED, .fd = fd, .bytes = bytes };
  OK(second, nib_tensor_import(device_of(second), &desc, &whole));
  CHECK(!is_open(fd) && (uint64_t)nib_tensor_numel(whole) == bytes &&
        nib_tensor_data(whole) != nib_tensor_data(tensor));
  theirs = part(second, whole, 0, 4000, NIB_FLOAT32);
  nib_tensor_release(whole);
  OK(second, nib_tensor_fill(nib_device_default_stream(device_of(second)), theirs, NIB_REAL(2.5)));
  OK(second, nib_device_synchronize(device_of(second), NIB_UNLIMITED));
  float values[1000];
  OK(rt, nib_tensor_read(tensor, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[0] == 2.5f && seen[999] == 2.5f);
  nib_tensor_release(tensor);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).used_bytes == used);
  OK(second, nib_tensor_read(theirs, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[999] == 2.5f); /* the memory has another owner still */
  CHECK_STATUS(NIB_INVALID, second, nib_tensor_export(theirs, &fd, &bytes));
  nib_tensor_release(theirs);
  nib_runtime_close(second);
  munmap(seen, bytes);

  other = make(device, NIB_FLOAT32, 10);
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_export(other, &fd, &bytes));
  CHECK(fd == -1 && strstr(nib_error(rt), "export: tensor: expected one that nib_tensor_create_exportable created"));
  nib_tensor_release(other);
  OK(rt, nib_tensor_create_exportable(device, NIB_FLOAT32, 1, (int64_t[]){ 0 }, &other));
  nib_tensor_release(other);
}

/* To and from another GPU, which is not let into such memory: by way of the GPU's own. */
static void between_gpus(nib_runtime *rt, nib_device *device) {
  nib_device *other;
  nib_tensor *shared, *there, *back;
  const int64_t shape[] = { 100 };
  float values[100];
  if (nib_device_find(rt, "cuda:1", &other) != NIB_OK) return;
  OK(rt, nib_tensor_create_exportable(device, NIB_FLOAT32, 1, shape, &shared));
  there = make(other, NIB_FLOAT32, 100);
  OK(rt, nib_tensor_create_exportable(device, NIB_FLOAT32, 1, shape, &back));
  OK(rt, nib_tensor_arange(nib_device_default_stream(device), shared, NIB_INTEGER(0), NIB_INTEGER(1)));
  OK(rt, nib_tensor_copy(nib_device_default_stream(device), there, shared));
  OK(rt, nib_tensor_copy(nib_device_default_stream(device), back, there));
  OK(rt, nib_tensor_read(back, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[99] == 99);
  nib_tensor_release(shared);
  nib_tensor_release(there);
  nib_tensor_release(back);
}

/* ---- What is refused, and stays the caller's ------------------------------------------------------------------- */

static void refusals(nib_runtime *rt, nib_device *device) {
  struct shared memory = share(4096);
  nib_import_desc desc = { .fd = memory.fd, .bytes = 4096 };
  nib_tensor *tensor = NULL;
  nib_semaphore *semaphore = NULL;
#define REFUSE(expected, words, call)                                                   \
  do {                                                                                  \
    CHECK_STATUS(expected, rt, call);                                                   \
    if (!strstr(nib_error(rt), words)) fprintf(stderr, "%s\n", nib_error(rt));          \
    CHECK(strstr(nib_error(rt), words) && !tensor && !semaphore && is_open(memory.fd)); \
  } while (0)
  desc.bytes = 0;
  REFUSE(NIB_INVALID, "import: bytes: expected 1..2^62, got 0", nib_tensor_import(device, &desc, &tensor));
  desc.bytes = 5000;
  REFUSE(NIB_DEVICE, "cuImportExternalMemory failed on cuda:", nib_tensor_import(device, &desc, &tensor));
  desc.bytes = 4096;
  desc.kind = (nib_fd_kind)7;
  REFUSE(NIB_INVALID, "import: kind: expected NIB_FD_OPAQUE or NIB_FD_EXPORTED, got 7",
         nib_tensor_import(device, &desc, &tensor));
  desc.kind = NIB_FD_EXPORTED;
  desc.bytes = 1 << 20; /* more than there is */
  REFUSE(NIB_DEVICE, " failed on cuda:", nib_tensor_import(device, &desc, &tensor));
  desc.fd = -1;
  REFUSE(NIB_INVALID, "import: fd: expected an open file descriptor, got -1",
         nib_tensor_import(device, &desc, &tensor));
  REFUSE(NIB_INVALID, "semaphore: fd: expected an open file descriptor, got -3",
         nib_semaphore_import(device, -3, &semaphore));
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  REFUSE(NIB_DEVICE, "cuImportExternalSemaphore failed on cuda:", nib_semaphore_import(device, pipes[0], &semaphore));
  CHECK(is_open(pipes[0]) && close(pipes[0]) == 0 && close(pipes[1]) == 0);

  struct shared counter = share(8);
  nib_stream *stream = nib_device_default_stream(device);
  OK(rt, nib_semaphore_import(device, counter.fd, &semaphore));
  OK(rt, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  CHECK_STATUS(NIB_CAPTURING, rt, nib_semaphore_wait(stream, semaphore, 1));
  CHECK(strstr(nib_error(rt), "semaphore:wait: "));
  CHECK_STATUS(NIB_CAPTURING, rt, nib_semaphore_signal(stream, semaphore, 1));
  nib_capture_abort(stream);
  CHECK_STATUS(NIB_INVALID, rt, nib_semaphore_signal(nib_device_default_stream(cpu_of(rt)), semaphore, 1));
  CHECK(
    strstr(nib_error(rt), "semaphore:signal: semaphore: expected one of the stream's device cpu, got one of cuda:"));
  OK(rt, nib_semaphore_signal(stream, semaphore, 5));
  OK(rt, nib_stream_synchronize(stream, NIB_UNLIMITED));
  CHECK(*(uint64_t *)counter.data == 5);
  nib_semaphore_release(semaphore);
  nib_semaphore_release(NULL);
  close(memory.fd);
  munmap(memory.data, 4096);
  munmap(counter.data, 8);
}

/* What is waited for in a stream is there for reads, too. */
static void written(nib_runtime *rt, nib_device *device) {
  struct shared memory = share(4096), counter = share(8);
  nib_import_desc desc = { .fd = memory.fd, .bytes = 4096 };
  nib_stream *stream;
  nib_semaphore *semaphore;
  nib_tensor *tensor;
  unsigned char bytes[4096];
  OK(rt, nib_stream_create(device, 0, &stream));
  OK(rt, nib_tensor_import(device, &desc, &tensor));
  OK(rt, nib_semaphore_import(device, counter.fd, &semaphore));
  OK(rt, nib_semaphore_wait(stream, semaphore, 1));
  OK(rt, nib_tensor_wait(tensor, 0));
  OK(rt, nib_tensor_written(tensor, stream));
  CHECK(nib_tensor_wait(tensor, 2000) == NIB_TIMEOUT);
  memset(memory.data, 0x3C, 4096);
  signal_value(counter.data, 1);
  OK(rt, nib_tensor_read(tensor, bytes, sizeof bytes, NIB_UNLIMITED));
  CHECK(bytes[4095] == 0x3C);
  nib_tensor_release(tensor);
  nib_semaphore_release(semaphore);
  nib_stream_release(stream);
  munmap(memory.data, 4096);
  munmap(counter.data, 8);
}

static void on_the_cpu(nib_runtime *rt) {
  struct shared memory = share(4096);
  nib_import_desc desc = { .fd = memory.fd, .bytes = 4096 };
  nib_device *cpu = cpu_of(rt);
  nib_tensor *tensor;
  nib_semaphore *semaphore;
  const int64_t shape[] = { 3 };
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_import(cpu, &desc, &tensor));
  CHECK(strcmp(nib_error(rt),
               "import: device: expected a CUDA device (only these share memory by file descriptor), got cpu") == 0);
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_create_exportable(cpu, NIB_INT8, 1, shape, &tensor));
  CHECK_STATUS(NIB_INVALID, rt, nib_semaphore_import(cpu, memory.fd, &semaphore));
  CHECK(!tensor && !semaphore && is_open(memory.fd));
  tensor = make(cpu, NIB_INT8, 3);
  int fd;
  uint64_t bytes;
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_export(tensor, &fd, &bytes));
  nib_tensor_release(tensor);
  close(memory.fd);
  munmap(memory.data, 4096);
}

static void uuids(nib_runtime *rt) {
  uint8_t uuid[16] = { 0 };
  nib_device *found = NULL;
  CHECK_STATUS(NIB_UNAVAILABLE, rt, nib_device_find_uuid(rt, uuid, &found));
  for (int32_t i = 1; i < nib_device_count(rt); i++) {
    nib_device *device = nib_device_at(rt, i);
    if (!nib_device_get_info(device)->available) continue;
    OK(rt, nib_device_find_uuid(rt, nib_device_get_info(device)->uuid, &found));
    CHECK(found == device);
  }
  memset(uuid, 0xAB, 16);
  CHECK_STATUS(NIB_UNAVAILABLE, rt, nib_device_find_uuid(rt, uuid, &found));
  CHECK(strcmp(nib_error(rt),
               "find_uuid: uuid: expected that of a GPU which CUDA lists, got abababababababababababababababab") == 0);
}

/* A runtime that is closed over all of it, and one with a cap. */
static void ends(void) {
  struct shared memory = share(4096), counter = share(8);
  nib_import_desc desc = { .fd = memory.fd, .bytes = 4096 };
  nib_config config = { .memory_cap = 1 << 20 };
  nib_runtime *rt;
  nib_tensor *imported, *exportable, *more = NULL;
  nib_semaphore *semaphore;
  const int64_t shape[] = { 1 << 19 }, large[] = { 1 << 21 };
  OK(NULL, nib_runtime_create(&config, &rt));
  nib_device *device = device_of(rt);
  OK(rt, nib_tensor_import(device, &desc, &imported));
  OK(rt, nib_semaphore_import(device, counter.fd, &semaphore));
  OK(rt, nib_tensor_create_exportable(device, NIB_UINT8, 1, shape, &exportable));
  CHECK_STATUS(NIB_MEMORY, rt, nib_tensor_create_exportable(device, NIB_UINT8, 1, large, &more));
  CHECK(!more && strstr(nib_error(rt), " of its cap of "));
  for (int i = 0; i < 50; i++) OK(rt, nib_tensor_fill(nib_device_default_stream(device), imported, NIB_INTEGER(i)));
  OK(rt, nib_semaphore_signal(nib_device_default_stream(device), semaphore, 3));
  nib_runtime_close(rt);
  CHECK(*(uint64_t *)counter.data == 3);
  CHECK_STATUS(NIB_CLOSED, rt, nib_semaphore_signal(nib_device_default_stream(device), semaphore, 4));
  nib_semaphore_release(semaphore);
  nib_tensor_release(imported);
  nib_tensor_release(exportable);
  munmap(memory.data, 4096);
  munmap(counter.data, 8);
}

/* Launches whose arguments are not there, with code that the stand-in driver takes for a module of the project's
 * kernels. */
static void launches(nib_runtime *rt, nib_device *device) {
  static const unsigned long long image[] = { 0x00100001BA55ED50, 0 };
  nib_stream *stream = nib_device_default_stream(device);
  nib_module *module = NULL;
  nib_user_kernel *kernel = NULL;
  OK(rt, nib_module_create(device, image, sizeof image, &module));
  OK(rt, nib_module_kernel(module, "nib_cuda_fill_8", &kernel));
  nib_launch_desc launch = { .grid = { 1, 1, 1 }, .block = { 1, 1, 1 }, .argument_count = 1 };
  CHECK_STATUS(NIB_INVALID, rt, nib_user_kernel_launch(stream, kernel, &launch));
  CHECK(strcmp(nib_error(rt), "kernel:launch: args: expected 1 arguments, got NULL") == 0);
  nib_argument argument = { .bytes = nib_user_kernel_param_bytes(kernel, 0) };
  launch.arguments = &argument;
  CHECK_STATUS(NIB_INVALID, rt, nib_user_kernel_launch(stream, kernel, &launch));
  CHECK(strcmp(nib_error(rt), "kernel:launch: args: expected a tensor or a value as argument 0, got neither") == 0);
  argument = (nib_argument){ .value = image, .bytes = SIZE_MAX / 2 + 1 };
  CHECK_STATUS(NIB_INVALID, rt, nib_user_kernel_launch(stream, kernel, &launch));
  nib_user_kernel_release(kernel);
  nib_module_release(module);
}

int main(void) {
  nib_runtime *rt;
  OK(NULL, nib_runtime_create(NULL, &rt));
  uuids(rt);
  on_the_cpu(rt);
  if (strcmp(device_name(), "cpu") != 0) {
    in_turn(rt, device_of(rt));
    exported(rt, device_of(rt));
    between_gpus(rt, device_of(rt));
    written(rt, device_of(rt));
    refusals(rt, device_of(rt));
    launches(rt, device_of(rt));
    for (int i = 0; i < 10; i++) ends();
  }
  nib_runtime_close(rt);
  return 0;
}
