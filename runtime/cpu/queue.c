/* A stream of the CPU device: a ring of tasks, and the thread that runs them in order. The thread ends some time after
 * the stream's release. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fenv.h>
#include <string.h>
#include <time.h>

#include "../core/graph.h"
#include "cpu.h"

nib_cpu_kernel *const nib_cpu_kernels[NIB_KERNEL_COUNT] = {
#define X(symbol, name) nib_cpu_##name,
  NIB_KERNEL_LIST(X)
#undef X
};

static void run_kernel(const struct nib_cpu_run *run, enum nib_kernel kernel, const void *params) {
  const struct nib_cpu_team team = { nib_cpu_pool_run, (void *)run };
  if (!nib_cpu_is_unseen(run)) nib_cpu_kernels[kernel](params, &team);
}

static void run_plan(const struct nib_cpu_run *run, const struct nib_plan *plan) {
  for (int32_t i = 0; i < plan->node_count && !nib_cpu_is_unseen(run); i++) {
    const struct nib_node *node = &plan->nodes[plan->order[i]];
    run_kernel(run, node->kernel, node->params);
  }
}

static void wait_for(struct nib_cpu *cpu, nib_stream *stream, uint64_t ticket) {
  pthread_mutex_lock(&cpu->lock);
  while (!nib_cpu_reached(stream, ticket)) pthread_cond_wait(&cpu->progress, &cpu->lock);
  pthread_mutex_unlock(&cpu->lock);
}

/* Runs a task. Returns the status of a host function, otherwise OK. */
static nib_status run_task(struct nib_cpu *cpu, struct nib_cpu_task *task) {
  const struct nib_cpu_run run = { cpu, task };
  struct timespec now;
  switch (task->kind) {
  case NIB_CPU_KERNEL: run_kernel(&run, task->kernel, task->as.params); break;
  case NIB_CPU_CALL: {
    nib_status status = task->as.call.function(task->as.call.user);
    __atomic_fetch_sub(&cpu->calls, 1, __ATOMIC_RELAXED);
    fesetenv(FE_DFL_ENV); /* the function may have changed it */
    return status;
  }
  case NIB_CPU_RECORD:
    clock_gettime(CLOCK_MONOTONIC, &now);
    task->as.event->time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    break;
  case NIB_CPU_WAIT: wait_for(cpu, task->as.wait.stream, task->as.wait.ticket); break;
  case NIB_CPU_PLAN: run_plan(&run, task->as.plan); break;
  }
  return NIB_OK;
}

static struct timespec time_after(int64_t timeout_us) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t ns = until.tv_nsec + timeout_us % 1000000 * 1000;
  until.tv_sec += (time_t)(timeout_us / 1000000 + ns / 1000000000);
  until.tv_nsec = (long)(ns % 1000000000);
  return until;
}

#define IDLE_US 100000 /* how long the thread of a released stream waits for its reuse */

/* Waits for a task; the caller holds the lock. False: the thread should end. */
static bool wait_for_task(struct nib_cpu_queue *queue) {
  struct timespec until = { 0 };
  while (queue->completed == queue->pushed && !queue->quit) {
    if (!queue->retired) {
      until.tv_sec = 0;
      pthread_cond_wait(&queue->work, &queue->cpu->lock);
      continue;
    }
    if (until.tv_sec == 0) until = time_after(IDLE_US);
    if (pthread_cond_timedwait(&queue->work, &queue->cpu->lock, &until) == ETIMEDOUT && queue->retired) break;
  }
  return queue->completed != queue->pushed;
}

static void *queue_thread(void *argument) {
  struct nib_cpu_queue *queue = argument;
  struct nib_cpu *cpu = queue->cpu;
  fesetenv(FE_DFL_ENV);
  pthread_mutex_lock(&cpu->lock);
  while (wait_for_task(queue)) {
    struct nib_cpu_task *task = &queue->tasks[queue->completed % NIB_CPU_QUEUE_LENGTH];
    pthread_mutex_unlock(&cpu->lock);
    nib_status status = run_task(cpu, task);
    pthread_mutex_lock(&cpu->lock);
    nib_status none = NIB_OK;
    if (status != NIB_OK)
      __atomic_compare_exchange_n(&queue->error, &none, status, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    __atomic_store_n(&queue->completed, queue->completed + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&cpu->progress);
  }
  pthread_t before = cpu->left;
  bool joins = !queue->quit && cpu->has_left;
  if (!queue->quit) { /* else the thread that closes the queue joins this one */
    queue->started = false;
    cpu->left = pthread_self();
    cpu->has_left = true;
  }
  pthread_mutex_unlock(&cpu->lock);
  if (joins) pthread_join(before, NULL);
  return NULL;
}

nib_status nib_cpu_queue_open(nib_stream *stream) {
  nib_runtime *rt = stream->device->runtime;
  struct nib_cpu_queue *queue = nib_allocate_zero(rt, sizeof *queue);
  if (!queue) return nib_fail_memory(rt, "stream", sizeof *queue);
  size_t bytes = sizeof *queue->tasks * NIB_CPU_QUEUE_LENGTH;
  queue->tasks = nib_allocate(rt, bytes);
  if (!queue->tasks) {
    nib_free(rt, queue, sizeof *queue);
    return nib_fail_memory(rt, "stream", bytes);
  }
  queue->cpu = stream->device->impl;
  queue->stream = stream;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&queue->work, &monotonic);
  pthread_condattr_destroy(&monotonic);
  stream->impl = queue;
  return NIB_OK;
}

void nib_cpu_queue_retire(nib_stream *stream) {
  struct nib_cpu_queue *queue = stream->impl;
  pthread_mutex_lock(&queue->cpu->lock);
  queue->retired = true;
  pthread_cond_signal(&queue->work);
  pthread_mutex_unlock(&queue->cpu->lock);
}

void nib_cpu_queue_close(nib_stream *stream) {
  nib_runtime *rt = stream->device->runtime;
  struct nib_cpu_queue *queue = stream->impl;
  pthread_mutex_lock(&queue->cpu->lock);
  queue->quit = true;
  bool started = queue->started;
  pthread_cond_signal(&queue->work);
  pthread_mutex_unlock(&queue->cpu->lock);
  if (started) pthread_join(queue->thread, NULL);
  pthread_cond_destroy(&queue->work);
  nib_free(rt, queue->tasks, sizeof *queue->tasks * NIB_CPU_QUEUE_LENGTH);
  nib_free(rt, queue, sizeof *queue);
  stream->impl = NULL;
}

nib_status nib_cpu_push(nib_stream *stream, const struct nib_cpu_task *task) {
  struct nib_cpu_queue *queue = stream->impl;
  struct nib_cpu *cpu = queue->cpu;
  pthread_mutex_lock(&cpu->lock);
  queue->retired = false;
  if (!queue->started) {
    int result = nib_cpu_thread_start(&queue->thread, queue_thread, queue);
    if (result != 0) {
      pthread_mutex_unlock(&cpu->lock);
      return nib_fail(stream->device->runtime, NIB_MEMORY, "stream: the system cannot create a thread (error %d)",
                      result);
    }
    queue->started = true;
  }
  while (queue->pushed - queue->completed == NIB_CPU_QUEUE_LENGTH) {
    if (nib_is_late(stream->device->runtime)) {
      pthread_mutex_unlock(&cpu->lock);
      return nib_fail_late(stream->device->runtime, "stream");
    }
    int64_t left = nib_time_to_deadline(stream->device->runtime);
    struct timespec until = time_after(left < 1000 ? left : 1000); /* a deadline may be set meanwhile */
    pthread_cond_timedwait(&cpu->progress, &cpu->lock, &until);
  }
  queue->tasks[queue->pushed % NIB_CPU_QUEUE_LENGTH] = *task;
  queue->pushed++;
  pthread_cond_signal(&queue->work);
  pthread_mutex_unlock(&cpu->lock);
  return NIB_OK;
}

/* A running kernel stops at its next piece. */
uint64_t nib_cpu_drop(nib_stream *stream, uint64_t after) {
  struct nib_cpu_queue *queue = stream->impl;
  uint64_t first = 0;
  if (!queue) return 0;
  pthread_mutex_lock(&queue->cpu->lock);
  for (uint64_t ticket = (after > queue->completed ? after : queue->completed) + 1; ticket <= queue->pushed; ticket++) {
    struct nib_cpu_task *task = &queue->tasks[(ticket - 1) % NIB_CPU_QUEUE_LENGTH];
    if (task->kind != NIB_CPU_KERNEL && task->kind != NIB_CPU_PLAN) continue;
    __atomic_store_n(&task->dropped, true, __ATOMIC_RELAXED);
    if (first == 0) first = ticket;
  }
  pthread_mutex_unlock(&queue->cpu->lock);
  return first;
}

bool nib_cpu_reached(nib_stream *stream, uint64_t ticket) {
  const struct nib_cpu_queue *queue = stream->impl;
  return !queue || __atomic_load_n(&queue->completed, __ATOMIC_ACQUIRE) >= ticket;
}

nib_status nib_cpu_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us) {
  if (nib_cpu_reached(stream, ticket)) return NIB_OK;
  if (timeout_us == 0) return NIB_TIMEOUT;
  struct nib_cpu *cpu = stream->device->impl;
  struct timespec until = time_after(timeout_us);
  int expired = 0;
  pthread_mutex_lock(&cpu->lock);
  while (!nib_cpu_reached(stream, ticket) && !expired)
    expired = timeout_us == NIB_UNLIMITED ? pthread_cond_wait(&cpu->progress, &cpu->lock)
                                          : pthread_cond_timedwait(&cpu->progress, &cpu->lock, &until);
  pthread_mutex_unlock(&cpu->lock);
  return nib_cpu_reached(stream, ticket) ? NIB_OK : NIB_TIMEOUT;
}

nib_status nib_cpu_take_error(nib_stream *stream) {
  struct nib_cpu_queue *queue = stream->impl;
  if (__atomic_load_n(&queue->error, __ATOMIC_RELAXED) == NIB_OK) return NIB_OK;
  nib_status error = __atomic_exchange_n(&queue->error, NIB_OK, __ATOMIC_RELAXED);
  return nib_fail(stream->device->runtime, NIB_STREAM, "stream:call: the function on stream %llu returned %s (%s)",
                  (unsigned long long)stream->id, nib_status_name(error), nib_status_text(error));
}
