/* Splitting a kernel over a team, and the hot loops' second copy for machines with AVX2 and FMA.
 *
 * NIB_CLONES(name) compiles the always-inlined body `name_body` twice: as name_baseline for any machine, and as
 * name_avx2. The results are equal by definition (no contraction, fmaf is fused either way); on x86-64 the plain fmaf
 * is a slow library call. NIB_PICK(name) chooses by cpuid when a kernel starts. Not attribute target_clones: its
 * resolvers run while the dynamic loader works, before a sanitizer's runtime is ready, and need a libc with ifunc. */
#ifndef NIB_CPU_CLONES_H
#define NIB_CPU_CLONES_H

#include "kernel.h"

/* A body to clone; also what nvfp4.h's functions are, so that each clone has its own code throughout. */
#define NIB_BODY __attribute__((always_inline)) static inline void

#if defined(__x86_64__) && defined(__GNUC__)
#define NIB_CLONES(name)                                                                                         \
  static void name##_baseline(void *argument, int64_t begin, int64_t end) { name##_body(argument, begin, end); } \
  __attribute__((target("avx2,fma"))) static void name##_avx2(void *argument, int64_t begin, int64_t end) {      \
    name##_body(argument, begin, end);                                                                           \
  }
#define NIB_PICK(name) (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? name##_avx2 : name##_baseline)
#else
#define NIB_CLONES(name) \
  static void name##_baseline(void *argument, int64_t begin, int64_t end) { name##_body(argument, begin, end); }
#define NIB_PICK(name) name##_baseline
#endif

/* Items per piece of work, so that a piece moves at least 32 KiB: below that, handing it over costs more than doing
 * it. */
static inline int64_t nib_cpu_grain(int64_t bytes_per_item) {
  return bytes_per_item < 32768 ? 32768 / (bytes_per_item > 0 ? bytes_per_item : 1) : 1;
}

#endif
