/* The clock, and the host's deadline. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "own.h"

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

/* A sum that overflows saturates at NIB_UNLIMITED. */
int64_t nib_deadline_after(int64_t budget_us) {
  int64_t now = nib_now_us();
  if (budget_us <= 0) return now;
  return budget_us < NIB_UNLIMITED - now ? now + budget_us : NIB_UNLIMITED;
}

void nib_set_deadline(nib_runtime *rt, int64_t budget_us) {
  __atomic_store_n(&rt->deadline_us, nib_deadline_after(budget_us), __ATOMIC_RELAXED);
}

int64_t nib_time_to_deadline(const nib_runtime *rt) {
  int64_t deadline = __atomic_load_n(&rt->deadline_us, __ATOMIC_RELAXED);
  if (deadline == NIB_UNLIMITED) return NIB_UNLIMITED;
  int64_t left = deadline - nib_now_us();
  return left > 0 ? left : 0;
}

bool nib_is_late(const nib_runtime *rt) { return nib_time_to_deadline(rt) == 0; }

nib_status nib_fail_late(nib_runtime *rt, const char *operation) {
  return nib_fail(rt, NIB_TIMEOUT, "%s: the deadline passed before the work was done", operation);
}
