/* What the CPU kernels of this folder look like to the CPU device: one function per entry of NIB_KERNEL_LIST. */
#ifndef NIB_CPU_KERNEL_H
#define NIB_CPU_KERNEL_H

#include "../params.h"

/* Threads to spread one kernel over. `run` calls body(argument, begin, end) on disjoint ranges that cover 0..count-1,
 * each at least `grain` long but for the last, on any of the team's threads, and returns when all have returned. Bodies
 * must not depend on their order. */
struct nib_cpu_team {
  void (*run)(void *context, int64_t count, int64_t grain, void (*body)(void *argument, int64_t begin, int64_t end),
              void *argument);
  void *context;
};

typedef void nib_cpu_kernel(const void *params, const struct nib_cpu_team *team);

#define X(symbol, name) void nib_cpu_##name(const void *params, const struct nib_cpu_team *team);
NIB_KERNEL_LIST(X)
#undef X

#endif
