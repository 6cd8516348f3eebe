/* Creating and closing a runtime. */
#define _GNU_SOURCE /* recursive mutexes */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "own.h"

static void finish_work(nib_device *device) {
  nib_capture_close(device);
  if (device->backend->dropping) device->backend->dropping->abandon(device);
  for (nib_stream *stream = device->streams; stream; stream = stream->next)
    if (stream->impl) device->backend->streams.wait(stream, stream->submitted, NIB_UNLIMITED);
}

/* Frees the memory of all storages except those that other frameworks still use. */
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
      storage->foreign = false;
    }
  }
  device->storages = kept;
}

/* The message goes only to the log, since there is no runtime to keep it. */
static nib_status refuse(const nib_config *settings, const char *format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (settings->log) settings->log(settings->user, NIB_LOG_DEBUG, text);
  return NIB_INVALID;
}

/* Reads the host's config. Checks the version first, since another version may have other fields. */
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
  if (!host_allocates) settings.allocate = nib_allocate_default;
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
  nib_watch_forks(rt);
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
    return; /* a child has none of the threads, and locks may be held for ever */
  rt->ending = true;
  /* Each step is done for all devices before the next, since work of one device may use memory of another. */
  int32_t count = rt->devices[0].backend ? rt->device_count : 0;
  for (int32_t i = 0; i < count; i++) finish_work(&rt->devices[i]);
  nib_handle_added(rt);
  for (;;) {
    for (int32_t i = 0; i < count; i++) free_memory(&rt->devices[i]);
    nib_exports_lock(rt); /* releases of exports now wait until it is closed */
    if (!rt->returned) break;
    nib_exports_unlock(rt);
  }
  for (int32_t i = 0; i < count; i++)
    for (struct nib_storage *storage = rt->devices[i].storages; storage; storage = storage->next)
      rt->lingering += nib_needs_device(storage);
  for (int32_t i = 0; i < count; i++)
    nib_modules_close(&rt->devices[i]); /* now, since a lingering device is closed on another thread */
  rt->observe = NULL;                   /* exports can be released on any thread from here on */
  nib_close_devices(rt, true);
  if (rt->lingering == 0) nib_close_devices(rt, false);
  rt->closed = true;
  nib_exports_unlock(rt);
  nib_handle_removed(rt);
}

nib_status nib_tick(nib_runtime *rt, int64_t budget_us) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  int64_t deadline = nib_deadline_after(budget_us);
  for (int32_t i = 0; i < rt->device_count; i++)
    if (rt->devices[i].backend) nib_reap(&rt->devices[i], deadline);
  return NIB_OK;
}
