/* Random elements; what they are is in random.h. */
#include "../random.h"
#include "elements.h"

struct random {
  const struct nib_random_params *params;
  struct nib_permutation permutation;
};

NIB_BODY random_body(void *argument, int64_t begin, int64_t end) {
  const struct random *task = argument;
  const struct nib_random_params *p = task->params;
  union {
    double real[NIB_RUN];
    int64_t integer[NIB_RUN];
  } run;
  for (int64_t at = begin; at < end; at += NIB_RUN) {
    int64_t count = end - at < NIB_RUN ? end - at : NIB_RUN;
    void *out = nib_element(p->out, at, p->type);
    if (p->kind == NIB_RANDOM_NORMAL) {
      for (int64_t i = 0; i < count; i += 2) nib_random_normal_pair(p->seed, (uint64_t)(at + i) / 2, run.real + i);
      NIB_BY_TYPE(p->type, nib_store_run_f64, out, count, run.real)
    } else {
      if (p->kind == NIB_RANDOM_INTEGER)
        for (int64_t i = 0; i < count; i += 2)
          nib_random_integer_pair(p->seed, (uint64_t)(at + i) / 2, p->low, p->range, run.integer + i);
      else
        for (int64_t i = 0; i < count; i++) run.integer[i] = nib_permutation_at(&task->permutation, at + i);
      NIB_BY_TYPE(p->type, nib_store_run_i64, out, count, run.integer)
    }
  }
}
NIB_CLONES(random)

/* Items are runs of 2 elements, so that a piece of work never starts inside a pair. */
static void random_pairs(void *argument, int64_t begin, int64_t end) {
  const struct random *task = argument;
  int64_t last = 2 * end < task->params->count ? 2 * end : task->params->count;
  NIB_PICK(random)(argument, 2 * begin, last);
}

void nib_cpu_random(const void *params, const struct nib_cpu_team *team) {
  struct nib_random_params p = *(const struct nib_random_params *)params;
  if (p.count <= 0) return;
  struct random task = { &p, nib_permutation_make(p.seed, (uint64_t)p.count) };
  team->run(team->context, p.count / 2 + p.count % 2, 512, random_pairs, &task);
}
