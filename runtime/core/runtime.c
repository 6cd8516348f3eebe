/* Runtimes: configuration, host memory, errors, devices, closing. */
#define _GNU_SOURCE /* madvise, recursive mutexes */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../backend.h"
#include "floats.h"

/* ---- Names ----------------------------------------------------------------------------------------------------- */

const char *nib_status_name(nib_status status) {
  static const char *const names[] = {
#define X(name, text) #name,
    NIB_STATUS_LIST(X)
#undef X
  };
  return (size_t)status < sizeof names / sizeof *names ? names[status] : "?";
}

const char *nib_status_text(nib_status status) {
  static const char *const texts[] = {
#define X(name, text) text,
    NIB_STATUS_LIST(X)
#undef X
  };
  return (size_t)status < sizeof texts / sizeof *texts ? texts[status] : "?";
}

const char *const nib_operation_names[NIB_OPERATION_COUNT] = {
#define X(symbol, name) name,
  NIB_OPERATION_LIST(X)
#undef X
};

uint32_t nib_abi_version(void) { return NIB_ABI_VERSION; }
const char *nib_version(void) { return NIB_VERSION; }

/* ---- Host memory ----------------------------------------------------------------------------------------------- */

static void *allocate_default(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user, (void)old_size;
  if (new_size == 0) {
    free(pointer);
    return NULL;
  }
  return realloc(pointer, new_size);
}

void *nib_reallocate(nib_runtime *rt, void *pointer, size_t old_bytes, size_t new_bytes) {
  return rt->config.allocate(rt->config.user, pointer, old_bytes, new_bytes);
}

void *nib_allocate(nib_runtime *rt, size_t bytes) { return nib_reallocate(rt, NULL, 0, bytes); }

void *nib_allocate_zero(nib_runtime *rt, size_t bytes) {
  void *pointer = nib_allocate(rt, bytes);
  if (pointer) memset(pointer, 0, bytes);
  return pointer;
}

void nib_free(nib_runtime *rt, void *pointer, size_t bytes) {
  if (pointer) nib_reallocate(rt, pointer, bytes, 0);
}

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

nib_status nib_fail(nib_runtime *rt, nib_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(rt->error, sizeof rt->error, format, arguments);
  va_end(arguments);
  if (rt->config.log) rt->config.log(rt->config.user, NIB_LOG_DEBUG, rt->error);
  return status;
}

void nib_log(nib_runtime *rt, nib_log_level level, const char *format, ...) {
  char text[256];
  va_list arguments;
  if (!rt->config.log) return;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  rt->config.log(rt->config.user, level, text);
}

nib_status nib_fail_memory(nib_runtime *rt, const char *what, size_t bytes) {
  return nib_fail(rt, NIB_MEMORY, "%s: memory: expected %zu bytes more, got none (out of memory)", what, bytes);
}

nib_status nib_read_desc(nib_runtime *rt, const char *operation, void *own, size_t own_bytes, size_t least,
                         const void *given, size_t bytes) {
  char text[160];
  if (nib_sized_read(own, own_bytes, least, given, bytes, text, sizeof text)) return NIB_OK;
  return nib_fail(rt, NIB_INVALID, "%s: desc: %s", operation, text);
}

const char *nib_error(const nib_runtime *rt) { return rt->error; }
void *nib_runtime_user(const nib_runtime *rt) { return rt->config.user; }

/* A page that the kernel empties in a child, instead of a fork handler: the library installs nothing in the host's
 * process. Every call asks, and the process id, which tells where there is no such page, would take it a system
 * call. */
static void watch_forks(nib_runtime *rt) {
  rt->process = (int32_t)getpid();
#ifdef MADV_WIPEONFORK
  size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  char *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, bytes, MADV_WIPEONFORK) != 0) {
    munmap(page, bytes);
    return;
  }
  *page = 1;
  rt->own_process = page;
#endif
}

bool nib_is_forked(const nib_runtime *rt) {
  return rt->own_process ? *rt->own_process == 0 : rt->process != (int32_t)getpid();
}

nib_status nib_enter(nib_runtime *rt) {
  if (rt->closed) return nib_fail(rt, NIB_CLOSED, "runtime: state: expected an open runtime, got a closed one");
  if (nib_is_forked(rt))
    return nib_fail(rt, NIB_FORKED,
                    "runtime: process: expected the process that created it (%d), got its child %d after fork",
                    (int)rt->process, (int)getpid());
  if (rt->observe) rt->entered_ns = nib_now_ns();
  return NIB_OK;
}

nib_status nib_check_not_capturing(nib_device *device, const char *operation) {
  if (!device->capture) return NIB_OK;
  return nib_fail(device->runtime, NIB_CAPTURING,
                  "%s: device: expected no capture in progress, got %s capturing (values and waits come after it)",
                  operation, device->info.name);
}

static nib_status take_fault(nib_device *device) {
  static const struct {
    const char *parameter, *expectation;
  } contents[] = {
#define X(symbol, parameter, expectation) { parameter, expectation },
    NIB_CONTENT_LIST(X)
#undef X
  };
  struct nib_fault *fault = device->fault;
  if (!fault) return NIB_OK; /* a device that nobody used yet */
  if (__atomic_load_n(&fault->state, __ATOMIC_ACQUIRE) != 2) return NIB_OK;
  char value[48];
  if (!fault->is_float) snprintf(value, sizeof value, "%lld", (long long)fault->integer);
  else nib_format_real(value, sizeof value, "%.9g", fault->real);
  uint32_t operation = fault->operation, content = fault->content;
  int64_t index = fault->index;
  __atomic_store_n(&fault->state, 0, __ATOMIC_RELEASE);
  if (operation >= NIB_OPERATION_COUNT || content >= NIB_CONTENT_COUNT) /* a user's kernel wrote nonsense */
    return nib_fail(device->runtime, NIB_FAULT,
                    "kernel: fault: expected a known fault, got %u/%u (content fault on %s)", operation, content,
                    device->info.name);
  return nib_fail(device->runtime, NIB_FAULT, "%s: %s: expected %s, got %s at index %lld (content fault on %s)",
                  nib_operation_names[operation], contents[content].parameter, contents[content].expectation, value,
                  (long long)index, device->info.name);
}

nib_status nib_take_trouble(nib_device *device, uint64_t only) {
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    bool asked = stream->impl && (only == 0 || stream->id == only);
    nib_status status = asked ? device->backend->take_error(stream) : NIB_OK;
    if (status != NIB_OK) return status;
  }
  return take_fault(device);
}

/* ---- Time ------------------------------------------------------------------------------------------------------ */

int64_t nib_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t nib_now_us(void) { return nib_now_ns() / 1000; }

int64_t nib_time_left(int64_t start_us, int64_t timeout_us) {
  if (timeout_us == NIB_UNLIMITED) return NIB_UNLIMITED;
  if (timeout_us <= 0) return 0;
  int64_t left = timeout_us - (nib_now_us() - start_us);
  return left > 0 ? left : 0;
}

/* On nib_now_us's clock; the largest budgets come to its end, NIB_UNLIMITED. */
static int64_t deadline_after(int64_t budget_us) {
  int64_t now = nib_now_us();
  if (budget_us <= 0) return now;
  return budget_us < NIB_UNLIMITED - now ? now + budget_us : NIB_UNLIMITED;
}

void nib_set_deadline(nib_runtime *rt, int64_t budget_us) {
  __atomic_store_n(&rt->deadline_us, deadline_after(budget_us), __ATOMIC_RELAXED);
}

int64_t nib_time_to_deadline(const nib_runtime *rt) {
  int64_t deadline = __atomic_load_n(&rt->deadline_us, __ATOMIC_RELAXED);
  if (deadline == NIB_UNLIMITED) return NIB_UNLIMITED;
  int64_t left = deadline - nib_now_us();
  return left > 0 ? left : 0;
}

bool nib_is_late(const nib_runtime *rt) { return nib_time_to_deadline(rt) == 0; }

nib_status nib_fail_late(nib_runtime *rt, const char *operation) {
  return nib_fail(rt, NIB_TIMEOUT, "%s: deadline: expected the work to be done before it, got interrupted", operation);
}

/* ---- Creating and closing -------------------------------------------------------------------------------------- */

static void finish_work(nib_device *device) {
  nib_capture_close(device);
  if (device->backend->abandon) device->backend->abandon(device);
  for (nib_stream *stream = device->streams; stream; stream = stream->next)
    if (stream->impl) device->backend->wait(stream, stream->submitted, NIB_UNLIMITED);
}

/* Memory of a GPU's driver needs the device when it is freed. */
static bool needs_device(const struct nib_storage *storage) {
  return storage->pinned_by || !storage->deferred.device->backend->host_memory;
}

/* What other frameworks still use stays. */
static void free_memory(nib_device *device) {
  nib_reap(device, NIB_UNLIMITED);
  struct nib_storage *next, *kept = NULL;
  for (struct nib_storage *storage = device->storages; storage; storage = next) {
    next = storage->next;
    storage->next = storage->previous = NULL;
    if (storage->exports > 0) {
      storage->next = kept;
      if (kept) kept->previous = storage;
      kept = storage;
    } else {
      nib_storage_free(storage);
      storage->data = NULL;
      storage->owner = false;
    }
  }
  device->storages = kept;
}

static void close_device(nib_device *device) {
  for (nib_stream *stream = device->streams; stream; stream = stream->next)
    if (stream->impl) device->backend->stream_close(stream);
  device->backend->device_close(device);
}

static void free_runtime(nib_runtime *rt) {
  for (int32_t i = 0; i < rt->device_count; i++) {
    nib_stream *next;
    for (nib_stream *stream = rt->devices[i].streams; stream; stream = next) {
      next = stream->next;
      nib_free(rt, stream->frontier, sizeof *stream->frontier * (size_t)stream->frontier_capacity);
      nib_free(rt, stream, sizeof *stream);
    }
  }
  pthread_mutex_destroy(&rt->exports_lock);
  if (rt->own_process) munmap((void *)rt->own_process, (size_t)sysconf(_SC_PAGESIZE));
  nib_free(rt, rt, sizeof *rt);
}

void nib_handle_added(nib_runtime *rt) { __atomic_add_fetch(&rt->handles, 1, __ATOMIC_RELAXED); }

void nib_handle_removed(nib_runtime *rt) {
  if (__atomic_sub_fetch(&rt->handles, 1, __ATOMIC_ACQ_REL) == 0 && rt->closed && !nib_is_forked(rt)) free_runtime(rt);
}

void nib_exports_lock(nib_runtime *rt) {
  pthread_mutex_lock(&rt->exports_lock);
  rt->exports_depth++;
}

void nib_exports_unlock(nib_runtime *rt) {
  struct nib_storage *gone = NULL;
  if (--rt->exports_depth == 0) {
    gone = rt->gone;
    rt->gone = NULL;
  }
  pthread_mutex_unlock(&rt->exports_lock);
  nib_storages_tell(gone);
}

static void close_devices(nib_runtime *rt, bool host_memory) {
  for (int32_t i = 0; i < rt->device_count; i++)
    if (rt->devices[i].backend && rt->devices[i].backend->host_memory == host_memory) close_device(&rt->devices[i]);
}

void nib_runtime_lets_go(struct nib_storage *storage) {
  nib_runtime *rt = storage->deferred.device->runtime;
  if (needs_device(storage) && --rt->lingering == 0) close_devices(rt, false);
}

/* Without a runtime that has the message, the log alone gets it. */
static nib_status refuse(const nib_config *settings, const char *format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (settings->log) settings->log(settings->user, NIB_LOG_DEBUG, text);
  return NIB_INVALID;
}

/* What a host asks for. The version comes first: with another one, the rest may mean anything. */
static nib_status read_config(const nib_config *config, size_t bytes, nib_config *settings) {
  *settings = (nib_config){ 0 };
  if (!config) return NIB_OK;
  char text[160];
  if (bytes >= sizeof config->abi_version && config->abi_version != 0 && config->abi_version != NIB_ABI_VERSION)
    return NIB_INVALID;
  if (!nib_sized_read(settings, sizeof *settings, nib_config_least, config, bytes, text, sizeof text))
    return refuse(bytes < nib_config_least ? settings : config, "runtime: config: %s", text);
  if (settings->threads < 0 || settings->threads > 4096)
    return refuse(settings, "runtime: threads: expected 0..4096, got %d", (int)settings->threads);
  if (settings->index_base < 0 || settings->index_base > 1)
    return refuse(settings, "runtime: index_base: expected 0 or 1, got %d", (int)settings->index_base);
  if (settings->streams < 0)
    return refuse(settings, "runtime: streams: expected 0 or more, got %lld", (long long)settings->streams);
  return NIB_OK;
}

nib_status nib_runtime_create_sized(const nib_config *config, size_t config_bytes, nib_runtime **out) {
  *out = NULL;
  nib_config settings;
  nib_status status = read_config(config, config_bytes, &settings);
  if (status != NIB_OK) return status;
  bool host_allocates = settings.allocate != NULL;
  if (!host_allocates) settings.allocate = allocate_default;
  nib_runtime *rt = settings.allocate(settings.user, NULL, 0, sizeof *rt);
  if (!rt) return NIB_MEMORY;
  memset(rt, 0, sizeof *rt);
  rt->config = settings;
  rt->host_allocates = host_allocates;
  rt->deadline_us = NIB_UNLIMITED;
  pthread_mutexattr_t recursive;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&rt->exports_lock, &recursive);
  pthread_mutexattr_destroy(&recursive);
  watch_forks(rt);
  nib_device *cpu = &rt->devices[0];
  cpu->runtime = rt;
  rt->device_count = 1;
  status = nib_cpu_open(rt, cpu);
  if (status == NIB_OK) status = nib_device_open(cpu);
#ifdef NIB_CUDA
  if (status == NIB_OK) status = nib_cuda_probe(rt);
#endif
  if (status != NIB_OK) {
    nib_runtime_close(rt);
    return status;
  }
  *out = rt;
  return NIB_OK;
}

void nib_runtime_close(nib_runtime *rt) {
  if (!rt || rt->closed || nib_is_forked(rt))
    return; /* a child has none of the threads, and maybe locks that nobody frees */
  rt->ending = true;
  /* In steps of all: a device's work may use another's memory. */
  int32_t count = rt->devices[0].backend ? rt->device_count : 0;
  for (int32_t i = 0; i < count; i++) finish_work(&rt->devices[i]);
  nib_handle_added(rt);
  for (;;) {
    for (int32_t i = 0; i < count; i++) free_memory(&rt->devices[i]);
    nib_exports_lock(rt); /* from here on exports that come back find it open, or closed */
    if (!rt->returned) break;
    nib_exports_unlock(rt);
  }
  for (int32_t i = 0; i < count; i++)
    for (struct nib_storage *storage = rt->devices[i].storages; storage; storage = storage->next)
      rt->lingering += needs_device(storage);
  for (int32_t i = 0; i < count; i++)
    nib_modules_close(&rt->devices[i]); /* a lingering device's are not another thread's to unload */
  rt->observe = NULL;                   /* exports come back on any thread */
  close_devices(rt, true);
  if (rt->lingering == 0) close_devices(rt, false);
  rt->closed = true;
  nib_exports_unlock(rt);
  nib_handle_removed(rt);
}

nib_status nib_tick(nib_runtime *rt, int64_t budget_us) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  int64_t deadline = deadline_after(budget_us);
  for (int32_t i = 0; i < rt->device_count; i++)
    if (rt->devices[i].backend) nib_reap(&rt->devices[i], deadline);
  return NIB_OK;
}

/* ---- Devices --------------------------------------------------------------------------------------------------- */

int32_t nib_device_count(const nib_runtime *rt) { return rt->device_count; }

nib_device *nib_device_at(nib_runtime *rt, int32_t index) {
  return index >= 0 && index < rt->device_count ? &rt->devices[index] : NULL;
}

const nib_device_info *nib_device_get_info(const nib_device *device) { return &device->info; }
nib_runtime *nib_device_runtime(const nib_device *device) { return device->runtime; }

nib_status nib_device_open(nib_device *device) {
  if (device->default_stream) return NIB_OK;
  if (!device->info.available)
    return nib_fail(device->runtime, NIB_UNAVAILABLE, "%s: %s", device->info.name, device->info.reason);
  nib_status status = device->backend->device_open ? device->backend->device_open(device) : NIB_OK;
  if (status == NIB_OK) status = nib_stream_open_default(device);
  if (status == NIB_OK)
    nib_log(device->runtime, NIB_LOG_INFO, "%s: opened, %s", device->info.name, device->info.description);
  return status;
}

nib_stream *nib_device_default_stream(nib_device *device) {
  if (!device->default_stream && nib_enter(device->runtime) == NIB_OK) nib_device_open(device);
  return device->default_stream;
}

nib_status nib_device_use_context(nib_device *device, void *context) {
  nib_runtime *rt = device->runtime;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (!device->backend->use_context)
    return nib_fail(rt, NIB_INVALID, "use_context: device: expected a CUDA device, got %s", device->info.name);
  if (!device->info.available) return nib_fail(rt, NIB_UNAVAILABLE, "%s: %s", device->info.name, device->info.reason);
  if (device->default_stream)
    return nib_fail(rt, NIB_STATE,
                    "use_context: device: expected a device that is not in use yet, got %s with a context",
                    device->info.name);
  return device->backend->use_context(device, context);
}

bool nib_device_is_capturing(const nib_device *device) { return device->capture != NULL; }

void nib_device_memory_sized(nib_device *device, nib_memory_info *out, size_t out_bytes) {
  const nib_memory_info none = { 0 };
  if (!device->runtime->closed && !nib_is_forked(device->runtime)) nib_reap_in_time(device);
  nib_sized_write(out, out_bytes, device->runtime->closed ? &none : &device->memory, sizeof none);
}

nib_status nib_device_find(nib_runtime *rt, const char *name, nib_device **out) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  for (int32_t i = 0; i < rt->device_count; i++) {
    nib_device *device = &rt->devices[i];
    if (strcmp(device->info.name, name) != 0) continue;
    status = nib_device_open(device);
    if (status == NIB_OK) *out = device;
    return status;
  }
  if (strncmp(name, "cuda", 4) == 0)
    return nib_fail(rt, NIB_UNAVAILABLE, "%.64s: this build of nibble has no CUDA device", name);
  return nib_fail(rt, NIB_UNAVAILABLE, "\"%.64s\" is no device: expected \"cpu\" or \"cuda:N\"", name);
}

nib_status nib_device_find_uuid(nib_runtime *rt, const uint8_t uuid[16], nib_device **out) {
  static const uint8_t unknown[16];
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  for (int32_t i = 1; i < rt->device_count && memcmp(uuid, unknown, 16) != 0; i++)
    if (memcmp(rt->devices[i].info.uuid, uuid, 16) == 0) {
      status = nib_device_open(&rt->devices[i]);
      if (status == NIB_OK) *out = &rt->devices[i];
      return status;
    }
  char text[33];
  for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", (unsigned)uuid[i]);
  return nib_fail(rt, NIB_UNAVAILABLE, "find_uuid: uuid: expected one of a GPU that CUDA shows, got %s", text);
}

nib_device *nib_device_best(nib_runtime *rt) {
  bool usable = nib_enter(rt) == NIB_OK; /* otherwise no device is opened, and what is done with the CPU says why */
  for (int32_t i = 1; usable && i < rt->device_count; i++)
    if (rt->devices[i].info.available && nib_device_open(&rt->devices[i]) == NIB_OK) return &rt->devices[i];
  return &rt->devices[0];
}

nib_status nib_device_synchronize(nib_device *device, int64_t timeout_us) {
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "synchronize");
  if (status != NIB_OK) return status;
  int64_t start = nib_now_us();
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    if (stream->id == 0) continue; /* the runtime's own */
    status = nib_wait(stream, stream->submitted, nib_time_left(start, timeout_us));
    if (status != NIB_OK) return status;
  }
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "synchronize", .device = device);
  nib_reap_in_time(device);
  return nib_take_trouble(device, 0);
}
