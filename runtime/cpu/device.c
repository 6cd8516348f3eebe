/* The CPU device: its table of functions, memory, events and graphs. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../core/graph.h"
#include "cpu.h"

/* ---- Memory: cache-line aligned blocks of the host's allocator ------------------------------------------------- */

#define ALIGNMENT 64

static nib_status memory_allocate(nib_device *device, size_t bytes, void **out) {
  nib_runtime *rt = device->runtime;
  char *block = nib_allocate(rt, bytes + ALIGNMENT + sizeof(void *));
  if (!block) return nib_fail_memory(rt, "tensor", bytes);
  uintptr_t aligned = ((uintptr_t)block + sizeof(void *) + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1);
  memcpy((char *)aligned - sizeof block, &block, sizeof block);
  *out = (void *)aligned;
  return NIB_OK;
}

static bool memory_free(nib_device *device, void *data, size_t bytes, struct nib_uses *uses) {
  char *block;
  memcpy(&block, (char *)data - sizeof block, sizeof block);
  nib_free_large(device->runtime, block, bytes + ALIGNMENT + sizeof(void *), uses);
  return true;
}

/* ---- Work ------------------------------------------------------------------------------------------------------ */

static nib_status launch(nib_stream *stream, const struct nib_work *work) {
  struct nib_cpu_task task = { .kind = NIB_CPU_KERNEL, .kernel = work->kernel };
  memcpy(task.as.params, work->params, work->bytes);
  return nib_cpu_push(stream, &task);
}

#define X(symbol, name)                                                                                           \
  _Static_assert(sizeof(struct nib_##name##_params) <= NIB_CPU_PARAMS_MAX, "params of " #name " do not fit in a " \
                                                                           "task");
NIB_KERNEL_LIST(X)
#undef X

static nib_status call(nib_stream *stream, nib_status (*function)(void *user), void *user) {
  struct nib_cpu *cpu = stream->device->impl;
  struct nib_cpu_task task = { .kind = NIB_CPU_CALL, .as.call = { function, user } };
  __atomic_fetch_add(&cpu->calls, 1, __ATOMIC_RELAXED);
  nib_status status = nib_cpu_push(stream, &task);
  if (status != NIB_OK) __atomic_fetch_sub(&cpu->calls, 1, __ATOMIC_RELAXED);
  return status;
}

static nib_status event_record(nib_stream *stream, nib_event *event) {
  struct nib_cpu_task task = { .kind = NIB_CPU_RECORD, .as.event = event };
  return nib_cpu_push(stream, &task);
}

static nib_status event_wait(nib_stream *stream, nib_event *event) {
  struct nib_cpu_task task = { .kind = NIB_CPU_WAIT, .as.wait = { event->stream, event->ticket } };
  return nib_cpu_push(stream, &task);
}

static nib_status event_elapsed(nib_event *start, nib_event *end, double *milliseconds) {
  *milliseconds = (double)(end->time_ns - start->time_ns) * 1e-6;
  return NIB_OK;
}

static void event_destroy(nib_event *event) { (void)event; }

/* ---- Graphs ---------------------------------------------------------------------------------------------------- */

static nib_status capture_begin(nib_stream *stream, nib_capture_mode mode) {
  (void)stream, (void)mode; /* the runtime records the work; the mode has no effect */
  return NIB_OK;
}

static nib_status capture_end(nib_stream *stream, struct nib_plan *plan) {
  (void)stream, (void)plan;
  return NIB_OK;
}

/* Orders the nodes by their dependencies; of the nodes that are ready, the last one comes first. The recorded order
 * would hide a dependency that a script forgot. */
static nib_status plan_prepare(nib_device *device, struct nib_plan *plan, struct nib_plan *replaced) {
  (void)replaced;
  nib_runtime *rt = device->runtime;
  int32_t n = plan->node_count, edges = 0;
  if (n == 0) return NIB_OK;
  for (int32_t i = 0; i < n; i++) edges += plan->nodes[i].dep_count;
  /* waiting[i]: the number of dependencies of i that have not run. first[i], next[e]: the list of edges from i, in
   * ascending order. */
  size_t bytes = sizeof(int32_t) * (3 * (size_t)n + 2 * (size_t)edges);
  int32_t *waiting = nib_allocate(rt, bytes);
  plan->order = nib_allocate(rt, sizeof *plan->order * (size_t)n);
  if (!waiting || !plan->order) {
    nib_free(rt, waiting, bytes);
    nib_free(rt, plan->order, sizeof *plan->order * (size_t)n);
    plan->order = NULL;
    return nib_fail_memory(rt, "graph", bytes);
  }
  int32_t *first = waiting + n, *ready = first + n, *next = ready + n, *target = next + edges;
  int32_t edge = 0, ready_count = 0;
  for (int32_t i = 0; i < n; i++) first[i] = -1;
  for (int32_t i = n - 1; i >= 0; i--) {
    waiting[i] = plan->nodes[i].dep_count;
    for (int32_t k = 0; k < plan->nodes[i].dep_count; k++, edge++) {
      int32_t from = plan->nodes[i].deps[k];
      target[edge] = i;
      next[edge] = first[from];
      first[from] = edge;
    }
  }
  for (int32_t i = 0; i < n; i++)
    if (waiting[i] == 0) ready[ready_count++] = i;
  for (int32_t done = 0; ready_count > 0; done++) {
    int32_t node = ready[--ready_count];
    plan->order[done] = node;
    for (int32_t e = first[node]; e >= 0; e = next[e])
      if (--waiting[target[e]] == 0) ready[ready_count++] = target[e];
  }
  nib_free(rt, waiting, bytes);
  return NIB_OK;
}

static nib_status plan_launch(nib_stream *stream, struct nib_plan *plan) {
  struct nib_cpu_task task = { .kind = NIB_CPU_PLAN, .as.plan = plan };
  return nib_cpu_push(stream, &task);
}

static void plan_destroy(struct nib_plan *plan) { (void)plan; }

/* ---- The device ------------------------------------------------------------------------------------------------ */

static void abandon(nib_device *device) {
  struct nib_cpu *cpu = device->impl;
  __atomic_store_n(&cpu->abandoned, true, __ATOMIC_RELAXED);
}

static void device_close(nib_device *device) {
  struct nib_cpu *cpu = device->impl;
  nib_cpu_pool_close(&cpu->pool);
  if (cpu->has_left) pthread_join(cpu->left, NULL);
  pthread_cond_destroy(&cpu->progress);
  pthread_mutex_destroy(&cpu->lock);
  device->fault = NULL;
  nib_free(device->runtime, (char *)device->info.description, strlen(device->info.description) + 1);
  device->info.description = "";
  nib_free(device->runtime, cpu, sizeof *cpu);
}

/* The processor's name from /proc/cpuinfo, in memory of the runtime. */
static char *read_description(nib_runtime *rt) {
  char line[256], name[256] = "processor";
  FILE *file = fopen("/proc/cpuinfo", "re");
  while (file && fgets(line, sizeof line, file)) {
    char *value = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !value) continue;
    value += strspn(value, ": \t");
    value[strcspn(value, "\n")] = 0;
    memcpy(name, value, strlen(value) + 1);
    break;
  }
  if (file) fclose(file);
  char *copy = nib_allocate(rt, strlen(name) + 1);
  if (copy) memcpy(copy, name, strlen(name) + 1);
  return copy;
}

static nib_status device_open(nib_device *device) {
  (void)device; /* nib_cpu_open opened it */
  return NIB_OK;
}

static const struct nib_backend_dropping dropping = { .abandon = abandon, .drop = nib_cpu_drop };

static const struct nib_backend backend = {
  .name = "cpu",
  .host_memory = true,
  .open = device_open,
  .close = device_close,
  .memory = { .allocate = memory_allocate, .free = memory_free },
  .streams = { .open = nib_cpu_queue_open,
               .retire = nib_cpu_queue_retire,
               .close = nib_cpu_queue_close,
               .launch = launch,
               .call = call,
               .reached = nib_cpu_reached,
               .wait = nib_cpu_wait,
               .take_error = nib_cpu_take_error },
  .events = { .record = event_record, .wait = event_wait, .elapsed = event_elapsed, .destroy = event_destroy },
  .graphs = { .begin = capture_begin,
              .end = capture_end,
              .prepare = plan_prepare,
              .launch = plan_launch,
              .destroy = plan_destroy },
  .dropping = &dropping,
};

nib_status nib_cpu_open(nib_runtime *rt, nib_device *device) {
  struct nib_cpu *cpu = nib_allocate_zero(rt, sizeof *cpu);
  char *description = cpu ? read_description(rt) : NULL;
  if (!description) {
    nib_free(rt, cpu, sizeof *cpu);
    return nib_fail_memory(rt, "cpu", sizeof *cpu);
  }
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&cpu->lock, NULL);
  pthread_cond_init(&cpu->progress, &monotonic);
  pthread_condattr_destroy(&monotonic);
  long processors = sysconf(_SC_NPROCESSORS_ONLN), pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  int32_t threads = rt->config.threads ? rt->config.threads : processors > 0 ? (int32_t)processors : 1;
  nib_cpu_pool_open(&cpu->pool, rt, threads);
  device->backend = &backend;
  device->impl = cpu;
  device->fault = &cpu->fault;
  device->info = (nib_device_info){ .name = "cpu",
                                    .description = description,
                                    .available = true,
                                    .memory_bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0,
                                    .processors = threads };
  return NIB_OK;
}
