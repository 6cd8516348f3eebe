/* Streams and events: a stream is a thread with a list of tasks that it does in order. */
#define _POSIX_C_SOURCE 200809L
#include "standin.h"

#include <fenv.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct stream *standin_streams;

/* ---- Tasks ----------------------------------------------------------------------------------------------------- */

void standin_op_free(struct op *op) {
  free(op->data);
  op->data = NULL;
}

static void task_free(struct task *task) {
  standin_op_free(&task->op);
  free(task->scratch);
  if (task->event) standin_event_release(task->event);
  if (task->plan) standin_plan_release(task->plan);
  if (task->exec) standin_exec_release(task->exec);
  if (task->semaphore) standin_semaphore_release(task->semaphore);
  free(task);
}

/* What the streams' threads are done with. They free nothing themselves: each would get an arena of malloc's of its
 * own. */
static struct task *done;
static int ended;

void standin_sweep(void) {
  while (done) {
    struct task *task = done;
    done = task->next;
    task_free(task);
  }
  for (struct stream **link = &standin_streams; ended > 0 && *link;) {
    struct stream *stream = *link;
    if (stream->ended && !stream->awaited) {
      ended--;
      *link = stream->next;
      pthread_join(stream->thread, NULL); /* it holds nothing any more */
      pthread_cond_destroy(&stream->work);
      free(stream->deps);
      free(stream);
    } else {
      link = &stream->next;
    }
  }
}

bool standin_reads_params(void) { return !getenv("NIBBLE_VALGRIND"); }

bool standin_uses(const struct op *op, const void *data, size_t bytes) {
  const char *begin = data, *end = begin + bytes;
  if (op->kind == OP_COPY)
    return ((const char *)op->to < end && (const char *)op->to + op->bytes > begin) ||
           (op->from && (const char *)op->from < end && (const char *)op->from + op->bytes > begin);
  for (size_t at = 0; op->kind == OP_KERNEL && standin_reads_params() && at + sizeof(void *) <= op->bytes;
       at += sizeof(void *)) {
    const char *address;
    memcpy(&address, (const char *)op->data + at, sizeof address);
    if (address >= begin && address < end) return true;
  }
  return false;
}

bool standin_is_in_use(const void *data, size_t bytes) {
  for (struct stream *stream = standin_streams; stream; stream = stream->next) {
    if (stream->object.context->lost != CUDA_SUCCESS) continue;
    if (stream->running && standin_uses(stream->running, data, bytes)) return true;
    for (struct task *task = stream->head; task; task = task->next) {
      if (task->kind == TASK_OP && standin_uses(&task->op, data, bytes)) return true;
      for (int i = 0; task->kind == TASK_GRAPH && i < task->plan->count; i++)
        if (standin_uses(&task->plan->nodes[i].op, data, bytes)) return true;
    }
  }
  return false;
}

static void run_alone(void *context, int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t),
                      void *argument) {
  (void)context, (void)grain;
  body(argument, 0, count);
}

/* With the lock held, which is given back meanwhile. */
void standin_run_op(struct stream *stream, const struct op *op) {
  static const struct nib_cpu_team alone = { run_alone, NULL };
  struct context *context = stream->object.context;
  if (op->kind == OP_KERNEL) {
    CUresult broken = standin_injected("kernel", false);
    if (broken != CUDA_SUCCESS) standin_lose(context, broken);
    if (standin_reads_params()) standin_check_words(op->kernel->name, op->data, op->bytes);
  } else if (op->kind == OP_COPY) {
    const void *ends[] = { op->to, op->from };
    standin_check_words("a copy", ends, sizeof ends);
  }
  if (context->lost != CUDA_SUCCESS) return;
  stream->running = op;
  pthread_mutex_unlock(&standin_lock);
  switch (op->kind) {
  case OP_KERNEL: op->kernel->run(op->data, &alone); break;
  case OP_COPY: memcpy(op->to, op->from ? op->from : op->data, op->bytes); break;
  case OP_HOST:
    standin_thread.in_host_function = true;
    op->host(op->user);
    standin_thread.in_host_function = false;
    fesetenv(FE_DFL_ENV);
    break;
  }
  pthread_mutex_lock(&standin_lock);
  stream->running = NULL;
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void run_task(struct stream *stream, struct task *task) {
  struct context *context = stream->object.context;
  switch (task->kind) {
  case TASK_OP: standin_run_op(stream, &task->op); break;
  case TASK_RECORD:
    task->event->time_ns = now_ns();
    if (task->event->completed < task->number) task->event->completed = task->number;
    break;
  case TASK_WAIT:
    while (task->event->completed < task->number && context->lost == CUDA_SUCCESS &&
           task->event->object.context->lost == CUDA_SUCCESS)
      pthread_cond_wait(&standin_progress, &standin_lock);
    break;
  case TASK_AWAIT: /* who signals it may be another process, which tells nobody */
    while (!standin_semaphore_reached(task->semaphore, task->number) && context->lost == CUDA_SUCCESS) {
      pthread_mutex_unlock(&standin_lock);
      nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
      pthread_mutex_lock(&standin_lock);
    }
    break;
  case TASK_SIGNAL: standin_semaphore_signal(task->semaphore, task->number); break;
  case TASK_FILL: standin_block_fill(task->block); break;
  case TASK_FREE: standin_block_free(task->block); break;
  case TASK_GRAPH:
    /* Launches of one executable never overlap. */
    while (task->exec->finished + 1 < task->number && context->lost == CUDA_SUCCESS)
      pthread_cond_wait(&standin_progress, &standin_lock);
    standin_run_plan(stream, task->plan, task->number, task->scratch);
    task->exec->finished = task->number;
    break;
  }
}

/* A rest before a task, to bring streams out of step. */
static void rest(unsigned *random) {
  int64_t longest = standin_number("NIB_STANDIN_JITTER", 0);
  if (longest <= 0) return;
  *random = *random * 1664525u + 1013904223u;
  int64_t ns = (int64_t)(*random >> 8) % (longest * 1000);
  pthread_mutex_unlock(&standin_lock);
  nanosleep(&(struct timespec){ .tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000 }, NULL);
  pthread_mutex_lock(&standin_lock);
}

static void *stream_thread(void *argument) {
  struct stream *stream = argument;
  fesetenv(FE_DFL_ENV);
  pthread_mutex_lock(&standin_lock);
  unsigned random = (unsigned)stream->object.id;
  for (;;) {
    while (!stream->head && !stream->quit) pthread_cond_wait(&stream->work, &standin_lock);
    struct task *task = stream->head;
    if (!task) break;
    rest(&random);
    run_task(stream, task);
    stream->head = task->next;
    if (!stream->head) stream->tail = NULL;
    stream->completed++;
    task->next = done;
    done = task;
    pthread_cond_broadcast(&standin_progress);
  }
  stream->ended = true;
  ended++;
  pthread_cond_broadcast(&standin_progress);
  pthread_mutex_unlock(&standin_lock);
  return NULL;
}

/* Without the program's signals. */
static int start_thread(struct stream *stream) {
  sigset_t all, before;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, (size_t)1 << 20);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int result = pthread_create(&stream->thread, &attributes, stream_thread, stream);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return result;
}

CUresult standin_enqueue(struct stream *stream, const struct task *task) {
  struct task *copy = malloc(sizeof *copy);
  if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
  *copy = *task;
  if (copy->event) copy->event->references++;
  if (copy->plan) copy->plan->references++;
  if (copy->exec) copy->exec->references++;
  if (copy->semaphore) copy->semaphore->references++;
  if (stream->tail) stream->tail->next = copy;
  else stream->head = copy;
  stream->tail = copy;
  stream->submitted++;
  pthread_cond_signal(&stream->work);
  return CUDA_SUCCESS;
}

CUresult standin_submit(struct stream *stream, struct op *op) {
  struct task task = { .kind = TASK_OP, .op = *op };
  CUresult result = stream->capture ? standin_capture_op(stream, op) : standin_enqueue(stream, &task);
  if (result != CUDA_SUCCESS) standin_op_free(op);
  return result;
}

CUresult standin_wait_idle(struct stream *stream) {
  uint64_t target = stream->submitted;
  while (stream->completed < target) pthread_cond_wait(&standin_progress, &standin_lock);
  return stream->object.context->lost;
}

/* ---- Streams --------------------------------------------------------------------------------------------------- */

struct stream *standin_stream_new(struct context *context, unsigned flags, int priority) {
  struct stream *stream = calloc(1, sizeof *stream);
  if (!stream) return NULL;
  pthread_cond_init(&stream->work, NULL);
  stream->object.context = context;
  stream->flags = flags;
  stream->priority = priority;
  if (start_thread(stream) != 0) {
    pthread_cond_destroy(&stream->work);
    free(stream);
    return NULL;
  }
  stream->next = standin_streams;
  standin_streams = stream;
  return stream;
}

struct stream *standin_stream(CUstream handle) {
  if (handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) return standin_find(LIVE_STREAMS, handle);
  struct context *context = standin_current();
  standin_misuse(CUDA_SUCCESS, "the legacy stream is used");
  if (!context->legacy) context->legacy = standin_stream_new(context, 0, 0);
  return context->legacy;
}

CUresult standin_StreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
  CUresult result = standin_enter("cuStreamCreateWithPriority", 0);
  if (result != CUDA_SUCCESS) return result;
  if (flags != CU_STREAM_NON_BLOCKING)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "a stream that waits for the legacy stream"));
  struct stream *stream = standin_stream_new(standin_current(), flags, priority);
  if (!stream) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  standin_add(&stream->object, LIVE_STREAMS, standin_current());
  *out = standin_handle(&stream->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_StreamDestroy(CUstream handle) {
  CUresult result = standin_enter("cuStreamDestroy", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_find(LIVE_STREAMS, handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture) return standin_leave(standin_refuse_captured(stream));
  standin_remove(&stream->object);
  stream->quit = true; /* its thread ends with its work */
  pthread_cond_signal(&stream->work);
  stream->awaited = true; /* another thread's call must not sweep it away meanwhile */
  while (!stream->head && !stream->ended) pthread_cond_wait(&standin_progress, &standin_lock);
  stream->awaited = false;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_StreamSynchronize(CUstream handle) {
  CUresult result = standin_enter("cuStreamSynchronize", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture) return standin_leave(standin_refuse_captured(stream));
  return standin_leave(standin_wait_idle(stream));
}

CUresult standin_StreamGetCtx(CUstream handle, CUcontext *out) {
  CUresult result = standin_enter("cuStreamGetCtx", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_lookup(LIVE_STREAMS, handle); /* asking is no misuse */
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  *out = standin_handle(&stream->object.context->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_StreamQuery(CUstream handle) {
  CUresult result = standin_enter("cuStreamQuery", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->capture) return standin_leave(standin_refuse_captured(stream));
  return standin_leave(stream->completed == stream->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult standin_LaunchHostFunc(CUstream handle, CUhostFn function, void *user) {
  CUresult result = standin_enter("cuLaunchHostFunc", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  struct op op = { .kind = OP_HOST, .host = function, .user = user };
  return standin_leave(standin_submit(stream, &op));
}

/* ---- Events ---------------------------------------------------------------------------------------------------- */

void standin_event_release(struct event *event) {
  if (--event->references > 0) return;
  free(event->deps);
  free(event);
}

CUresult standin_EventCreate(CUevent *out, unsigned int flags) {
  CUresult result = standin_enter("cuEventCreate", 0);
  if (result != CUDA_SUCCESS) return result;
  struct event *event = calloc(1, sizeof *event);
  if (!event) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  event->flags = flags;
  event->references = 1;
  standin_add(&event->object, LIVE_EVENTS, standin_current());
  *out = standin_handle(&event->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_EventDestroy(CUevent handle) {
  CUresult result = standin_enter("cuEventDestroy", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct event *event = standin_find(LIVE_EVENTS, handle);
  if (!event) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  standin_remove(&event->object);
  standin_event_release(event);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_EventRecord(CUevent event_handle, CUstream stream_handle) {
  CUresult result = standin_enter("cuEventRecord", 0);
  if (result != CUDA_SUCCESS) return result;
  struct event *event = standin_find(LIVE_EVENTS, event_handle);
  struct stream *stream = standin_stream(stream_handle);
  if (!event || !stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (event->object.context != stream->object.context)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_HANDLE, "event and stream belong to different GPUs"));
  if (stream->capture) return standin_leave(standin_capture_record(stream, event));
  struct task task = { .kind = TASK_RECORD, .event = event, .number = event->recorded + 1 };
  result = standin_enqueue(stream, &task);
  if (result == CUDA_SUCCESS) {
    event->recorded++;
    event->capture_id = 0;
  }
  return standin_leave(result);
}

CUresult standin_EventQuery(CUevent handle) {
  CUresult result = standin_enter("cuEventQuery", 0);
  if (result != CUDA_SUCCESS) return result;
  struct event *event = standin_find(LIVE_EVENTS, handle);
  if (!event) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (event->capture_id) return standin_leave(standin_refuse_event(event));
  result = standin_check_unsafe();
  if (result != CUDA_SUCCESS) return standin_leave(result);
  return standin_leave(event->completed == event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult standin_EventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
  CUresult result = standin_enter("cuEventElapsedTime", 0);
  if (result != CUDA_SUCCESS) return result;
  struct event *start = standin_find(LIVE_EVENTS, start_handle), *end = standin_find(LIVE_EVENTS, end_handle);
  if (!start || !end) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (start->capture_id || end->capture_id)
    return standin_leave(standin_misuse(CUDA_ERROR_CAPTURED_EVENT, "the event is of a capture"));
  if (start->recorded == 0 || end->recorded == 0 || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_HANDLE, "an event without a time"));
  if (start->completed < start->recorded || end->completed < end->recorded) return standin_leave(CUDA_ERROR_NOT_READY);
  *milliseconds = (float)((double)(end->time_ns - start->time_ns) * 1e-6);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_StreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned int flags) {
  CUresult result = standin_enter("cuStreamWaitEvent", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(stream_handle);
  struct event *event = standin_find(LIVE_EVENTS, event_handle);
  if (!event || !stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  (void)flags;
  bool handled = false;
  result = standin_capture_wait(stream, event, &handled);
  if (handled || event->completed == event->recorded) return standin_leave(result);
  struct task task = { .kind = TASK_WAIT, .event = event, .number = event->recorded };
  return standin_leave(standin_enqueue(stream, &task));
}
