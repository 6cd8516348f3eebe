/* start, start + step, ... */
#include "elements.h"

NIB_BODY arange_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_arange_params *p = argument;
  union {
    double real[NIB_RUN];
    int64_t integer[NIB_RUN];
  } run;
  for (int64_t at = begin; at < end; at += NIB_RUN) {
    int64_t count = end - at < NIB_RUN ? end - at : NIB_RUN;
    void *out = nib_element(p->out, at, p->type);
    if (p->is_float) {
      for (int64_t i = 0; i < count; i++) run.real[i] = p->start_real + (double)(at + i) * p->step_real;
      NIB_BY_TYPE(p->type, nib_store_run_f64, out, count, run.real)
    } else {
      for (int64_t i = 0; i < count; i++)
        run.integer[i] = (int64_t)((uint64_t)p->start + (uint64_t)(at + i) * (uint64_t)p->step);
      NIB_BY_TYPE(p->type, nib_store_run_i64, out, count, run.integer)
    }
  }
}
NIB_CLONES(arange)

void nib_cpu_arange(const void *params, const struct nib_cpu_team *team) {
  struct nib_arange_params p = *(const struct nib_arange_params *)params;
  if (p.count > 0) team->run(team->context, p.count, nib_cpu_grain(nib_type_size(p.type)), NIB_PICK(arange), &p);
}
