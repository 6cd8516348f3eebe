/* The CPU device: one worker thread for each stream, and a pool of threads that kernels are spread over. */
#ifndef NIB_CPU_H
#define NIB_CPU_H

#include <pthread.h>

#include "../../kernels/cpu/kernel.h"
#include "../core/core.h"

struct nib_cpu;
struct nib_cpu_task;

/* A kernel that runs: what its team's context is. */
struct nib_cpu_run {
  struct nib_cpu *cpu;
  const struct nib_cpu_task *task;
};

/* One call of a kernel, spread over the pool: threads take chunks until none are left, and do them in pieces, so that a
 * kernel that is dropped ends soon. */
struct nib_cpu_region {
  struct nib_cpu_region *next;
  const struct nib_cpu_run *run;
  void (*body)(void *argument, int64_t begin, int64_t end);
  void *argument;
  int64_t count, chunk, piece;
  int64_t taken;   /* atomic: chunks begin here */
  int32_t helpers; /* pool threads inside, under the lock */
};

struct nib_cpu_pool {
  nib_runtime *runtime;
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  pthread_t *threads;
  int32_t wanted, started; /* threads beside the calling one; they start with the first region that is large enough */
  struct nib_cpu_region *regions;
  bool quit;
};

void nib_cpu_pool_open(struct nib_cpu_pool *pool, nib_runtime *rt, int32_t threads);
void nib_cpu_pool_close(struct nib_cpu_pool *pool);
/* A team's `run`; the context is a struct nib_cpu_run. */
void nib_cpu_pool_run(void *context, int64_t count, int64_t grain,
                      void (*body)(void *argument, int64_t begin, int64_t end), void *argument);

struct nib_cpu {
  struct nib_cpu_pool pool;
  pthread_mutex_t lock;    /* all queues of the device */
  pthread_cond_t progress; /* some stream finished a task, or made room for one */
  bool abandoned;          /* atomic: kernels need not run, or come to their end, */
  int32_t calls;           /* atomic: unless host functions that are still queued could see what they write */
  bool has_left;           /* threads that end join the one that ended before: of all, at most one is to be joined, */
  pthread_t left;          /* the last */
  struct nib_fault fault;
};

#define NIB_CPU_PARAMS_MAX   512
#define NIB_CPU_QUEUE_LENGTH 256 /* tasks that a stream holds; a further one waits for room */

struct nib_cpu_task {
  enum { NIB_CPU_KERNEL, NIB_CPU_CALL, NIB_CPU_RECORD, NIB_CPU_WAIT, NIB_CPU_PLAN } kind;
  bool dropped; /* atomic; kernels and plans alone */
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
  bool retired;     /* its stream is released: a thread that has nothing to do for a while ends */
  nib_status error; /* atomic; of the first function that failed since the last wait */
};

nib_status nib_cpu_queue_open(nib_stream *stream);
void nib_cpu_queue_retire(nib_stream *stream);
void nib_cpu_queue_close(nib_stream *stream);
/* Copies the task into the queue. */
nib_status nib_cpu_push(nib_stream *stream, const struct nib_cpu_task *task);
uint64_t nib_cpu_drop(nib_stream *stream, uint64_t after);
/* Whether nobody will see what the task writes. */
static inline bool nib_cpu_is_unseen(const struct nib_cpu_run *run) {
  return __atomic_load_n(&run->task->dropped, __ATOMIC_RELAXED) ||
         (__atomic_load_n(&run->cpu->abandoned, __ATOMIC_RELAXED) &&
          __atomic_load_n(&run->cpu->calls, __ATOMIC_RELAXED) == 0);
}
bool nib_cpu_reached(nib_stream *stream, uint64_t ticket);
nib_status nib_cpu_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us);
nib_status nib_cpu_take_error(nib_stream *stream);

extern nib_cpu_kernel *const nib_cpu_kernels[NIB_KERNEL_COUNT];

/* A thread of the runtime: default floating-point environment, no signals. */
int nib_cpu_thread_start(pthread_t *thread, void *(*function)(void *), void *argument);

#endif
