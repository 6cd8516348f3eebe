/* The CPU device: a worker thread for each stream, and a pool of threads that share the work of a kernel. */
#ifndef NIB_CPU_H
#define NIB_CPU_H

#include <pthread.h>

#include "../../kernels/cpu/kernel.h"
#include "../core/core.h"

struct nib_cpu;
struct nib_cpu_task;

/* A running kernel: the context of its team. */
struct nib_cpu_run {
  struct nib_cpu *cpu;
  const struct nib_cpu_task *task;
};

/* A loop of a kernel, shared by the pool. Threads take chunks until none are left. They run a chunk in pieces, so that
 * a dropped kernel ends soon. */
struct nib_cpu_region {
  struct nib_cpu_region *next;
  const struct nib_cpu_run *run;
  void (*body)(void *argument, int64_t begin, int64_t end);
  void *argument;
  int64_t count, chunk, piece;
  int64_t taken;   /* atomic; the begin of the next chunk */
  int32_t helpers; /* pool threads that work on it; under the lock */
};

struct nib_cpu_pool {
  nib_runtime *runtime;
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  pthread_t *threads;
  int32_t wanted, started; /* threads besides the caller's; they start at the first large region */
  struct nib_cpu_region *regions;
  bool quit;
};

void nib_cpu_pool_open(struct nib_cpu_pool *pool, nib_runtime *rt, int32_t threads);
void nib_cpu_pool_close(struct nib_cpu_pool *pool);
/* The `run` of a team; the context is a struct nib_cpu_run. */
void nib_cpu_pool_run(void *context, int64_t count, int64_t grain,
                      void (*body)(void *argument, int64_t begin, int64_t end), void *argument);

struct nib_cpu {
  struct nib_cpu_pool pool;
  pthread_mutex_t lock;    /* of all queues of the device */
  pthread_cond_t progress; /* a stream finished a task, or made room for one */
  bool abandoned;          /* atomic; kernels may be skipped or stopped, unless: */
  int32_t calls;           /* atomic; queued host functions, which could see what the kernels write */
  bool has_left;           /* a thread that ends joins the one that ended before it, so that at most one is left: */
  pthread_t left;          /* the last one that ended */
  struct nib_fault fault;
};

#define NIB_CPU_PARAMS_MAX   512
#define NIB_CPU_QUEUE_LENGTH 256 /* tasks in a queue; another one waits for room */

struct nib_cpu_task {
  enum { NIB_CPU_KERNEL, NIB_CPU_CALL, NIB_CPU_RECORD, NIB_CPU_WAIT, NIB_CPU_PLAN } kind;
  bool dropped; /* atomic; for kernels and plans */
  enum nib_kernel kernel;
  union {
    _Alignas(16) unsigned char params[NIB_CPU_PARAMS_MAX];
    struct {
      nib_status (*function)(void *user);
      void *user;
    } call;
    nib_event *event;
    struct {
      nib_stream *stream;
      uint64_t ticket;
    } wait;
    struct nib_plan *plan;
  } as;
};

struct nib_cpu_queue {
  struct nib_cpu *cpu;
  nib_stream *stream;
  pthread_t thread;
  pthread_cond_t work;
  struct nib_cpu_task *tasks; /* a ring: pushed tasks completed+1 .. pushed */
  uint64_t pushed;
  uint64_t completed; /* atomic; written under the lock */
  bool started, quit;
  bool retired;     /* its stream is released; the thread ends when it is idle for a while */
  nib_status error; /* atomic; of the first host function that failed since the last wait */
};

nib_status nib_cpu_queue_open(nib_stream *stream);
void nib_cpu_queue_retire(nib_stream *stream);
void nib_cpu_queue_close(nib_stream *stream);
/* Copies the task into the queue. */
nib_status nib_cpu_push(nib_stream *stream, const struct nib_cpu_task *task);
uint64_t nib_cpu_drop(nib_stream *stream, uint64_t after);
/* Whether the results of the task are not needed any more. */
static inline bool nib_cpu_is_unseen(const struct nib_cpu_run *run) {
  return __atomic_load_n(&run->task->dropped, __ATOMIC_RELAXED) ||
         (__atomic_load_n(&run->cpu->abandoned, __ATOMIC_RELAXED) &&
          __atomic_load_n(&run->cpu->calls, __ATOMIC_RELAXED) == 0);
}
bool nib_cpu_reached(nib_stream *stream, uint64_t ticket);
nib_status nib_cpu_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us);
nib_status nib_cpu_take_error(nib_stream *stream);

extern nib_cpu_kernel *const nib_cpu_kernels[NIB_KERNEL_COUNT];

/* Starts a thread of the runtime, with the default floating-point environment and all signals blocked. */
int nib_cpu_thread_start(pthread_t *thread, void *(*function)(void *), void *argument);

#endif
