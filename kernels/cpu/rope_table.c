/* The cos | sin table of rotary position embedding. */
#include "../elementary.h"
#include "../convert.h"
#include "clones.h"

static void rope_table_rows(void *argument, int64_t begin, int64_t end) {
  const struct nib_rope_table_params *p = argument;
  for (int64_t position = begin; position < end; position++)
    for (int pair = 0; pair < NIB_MLA_ROPE / 2; pair++) {
      double sine, cosine;
      nib_sincos((double)position * p->inv_freq[pair], &sine, &cosine);
      nib_store_f64(p->out, position * NIB_MLA_ROPE + pair, p->type, cosine);
      nib_store_f64(p->out, position * NIB_MLA_ROPE + NIB_MLA_ROPE / 2 + pair, p->type, sine);
    }
}

void nib_cpu_rope_table(const void *params, const struct nib_cpu_team *team) {
  struct nib_rope_table_params p = *(const struct nib_rope_table_params *)params;
  if (p.max_position > 0) team->run(team->context, p.max_position, 64, rope_table_rows, &p);
}
