/* A host function that holds its stream until it is told to go on, and how many threads there are. */
#ifndef GATE_H
#define GATE_H

#include <dirent.h>
#include <pthread.h>

#include "host.h"

struct gate {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int open, reached;
};

#define CLOSED_GATE \
  { .mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER }

static inline nib_status hold(void *user) {
  struct gate *gate = user;
  pthread_mutex_lock(&gate->mutex);
  gate->reached = 1;
  pthread_cond_broadcast(&gate->changed);
  while (!gate->open) pthread_cond_wait(&gate->changed, &gate->mutex);
  pthread_mutex_unlock(&gate->mutex);
  return NIB_OK;
}

static inline void open_gate(struct gate *gate) {
  pthread_mutex_lock(&gate->mutex);
  gate->open = 1;
  pthread_cond_broadcast(&gate->changed);
  pthread_mutex_unlock(&gate->mutex);
}

static inline void wait_until_reached(struct gate *gate) {
  pthread_mutex_lock(&gate->mutex);
  while (!gate->reached) pthread_cond_wait(&gate->changed, &gate->mutex);
  pthread_mutex_unlock(&gate->mutex);
}

static inline int threads(void) {
  int count = 0;
  DIR *folder = opendir("/proc/self/task");
  CHECK(folder);
  for (struct dirent *entry; (entry = readdir(folder)) != NULL;) count += entry->d_name[0] != '.';
  closedir(folder);
  return count;
}

#endif
