/* Runs a kernel on several threads: the runtime's own, or the host's through its parallel_for. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>

#include "../core/floats.h"
#include "cpu.h"

/* A thread inherits the signal mask of its creator. So block all signals meanwhile: they are for the host's threads. */
int nib_cpu_thread_start(pthread_t *thread, void *(*function)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int result = pthread_create(thread, NULL, function, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return result;
}

/* The last piece takes the rest, so that no piece is shorter than the grain. */
static void run_pieces(const struct nib_cpu_region *region, int64_t begin) {
  int64_t end = region->count - begin > region->chunk ? begin + region->chunk : region->count;
  while (begin < end && !nib_cpu_is_unseen(region->run)) {
    int64_t next = end - begin >= 2 * region->piece ? begin + region->piece : end;
    region->body(region->argument, begin, next);
    begin = next;
  }
}

static void run_chunks(struct nib_cpu_region *region) {
  for (;;) {
    int64_t begin = __atomic_fetch_add(&region->taken, region->chunk, __ATOMIC_RELAXED);
    if (begin >= region->count) return;
    run_pieces(region, begin);
  }
}

static bool has_chunks(struct nib_cpu_region *region) {
  return __atomic_load_n(&region->taken, __ATOMIC_RELAXED) < region->count;
}

static void *pool_thread(void *argument) {
  struct nib_cpu_pool *pool = argument;
  fesetenv(FE_DFL_ENV);
  pthread_mutex_lock(&pool->lock);
  while (!pool->quit) {
    struct nib_cpu_region *region = pool->regions;
    while (region && !has_chunks(region)) region = region->next;
    if (!region) {
      pthread_cond_wait(&pool->work, &pool->lock);
      continue;
    }
    region->helpers++;
    pthread_mutex_unlock(&pool->lock);
    run_chunks(region);
    pthread_mutex_lock(&pool->lock);
    if (--region->helpers == 0) pthread_cond_broadcast(&pool->done);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

static void host_chunk(void *context, size_t index) {
  struct nib_cpu_region *region = context;
  struct nib_floats floats;
  nib_floats_enter(&floats);
  run_pieces(region, (int64_t)index * region->chunk);
  nib_floats_leave(&floats);
}

#define PIECE_GRAINS 8 /* between two checks whether the kernel was dropped */

void nib_cpu_pool_run(void *context, int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t),
                      void *argument) {
  const struct nib_cpu_run *run = context;
  struct nib_cpu_pool *pool = &run->cpu->pool;
  nib_config *config = &pool->runtime->config;
  int64_t threads = pool->wanted + 1;
  if (grain < 1) grain = 1;
  if (count <= 0) return;
  struct nib_cpu_region region = { .run = run, .body = body, .argument = argument, .count = count, .chunk = count };
  region.piece = grain < count / PIECE_GRAINS ? PIECE_GRAINS * grain : count;
  if (count <= grain || (threads == 1 && !config->parallel_for)) {
    run_pieces(&region, 0);
    return;
  }
  /* Several chunks for each thread, so that a slow thread takes fewer. */
  int64_t chunk = (count + 4 * threads - 1) / (4 * threads);
  region.chunk = chunk > grain ? chunk : grain;
  if (config->parallel_for) {
    config->parallel_for(config->user, (size_t)((count + region.chunk - 1) / region.chunk), host_chunk, &region);
    return;
  }
  pthread_mutex_lock(&pool->lock);
  while (pool->started < pool->wanted && nib_cpu_thread_start(&pool->threads[pool->started], pool_thread, pool) == 0)
    pool->started++; /* go on without a thread that cannot start */
  region.next = pool->regions;
  pool->regions = &region;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  run_chunks(&region);
  pthread_mutex_lock(&pool->lock);
  struct nib_cpu_region **link = &pool->regions;
  while (*link != &region) link = &(*link)->next;
  *link = region.next;
  while (region.helpers > 0) pthread_cond_wait(&pool->done, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
}

void nib_cpu_pool_open(struct nib_cpu_pool *pool, nib_runtime *rt, int32_t threads) {
  pool->runtime = rt;
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->done, NULL);
  pool->wanted = threads - 1;
  if (rt->config.parallel_for || pool->wanted <= 0) return;
  pool->threads = nib_allocate(rt, sizeof *pool->threads * (size_t)pool->wanted);
  if (!pool->threads) pool->wanted = 0; /* without memory for threads, run on the caller's */
}

void nib_cpu_pool_close(struct nib_cpu_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->quit = true;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  for (int32_t i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
  if (pool->threads) nib_free(pool->runtime, pool->threads, sizeof *pool->threads * (size_t)pool->wanted);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->done);
  pthread_mutex_destroy(&pool->lock);
}
