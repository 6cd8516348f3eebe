/* rope_table */
#include <math.h>

#include "../core/floats.h"
#include "check.h"

nib_status nib_rope_table(nib_stream *stream, int64_t max_position, double theta, nib_dtype dtype, nib_tensor **out) {
  *out = NULL;
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_ROPE_TABLE);
  if (max_position < 0 || max_position > (int64_t)1 << 31)
    nib_check_fail(&c, "max_position", "expected 0..2147483648, got %lld", (long long)max_position);
  if (!(theta >= 1) || isinf(theta)) {
    char got[32];
    nib_format_real(got, sizeof got, "%g", theta);
    nib_check_fail(&c, "theta", "expected a finite number >= 1, got %s", got);
  }
  if (c.status == NIB_OK) c.status = nib_check_dtype(c.rt, c.operation, dtype);
  if (dtype != NIB_FLOAT32 && dtype != NIB_FLOAT16 && dtype != NIB_BFLOAT16)
    nib_check_fail(&c, "dtype", "expected float32, float16 or bfloat16, got %s", nib_dtype_name(dtype));
  if (c.status != NIB_OK) return c.status;
  nib_tensor *table;
  nib_status status = nib_tensor_create(stream->device, dtype, 2, (int64_t[]){ max_position, NIB_MLA_ROPE }, &table);
  if (status != NIB_OK) return status;
  struct nib_rope_table_params params = { .out = nib_tensor_data(table),
                                          .max_position = max_position,
                                          .type = (int32_t)dtype };
  struct nib_floats floats;
  nib_floats_enter(&floats);
  /* theta^(-2p/64), computed on the host for every device, so that rounding in libm is the same. */
  for (int p = 0; p < NIB_MLA_ROPE / 2; p++) params.inv_freq[p] = pow(theta, -2.0 * p / NIB_MLA_ROPE);
  nib_floats_leave(&floats);
  nib_check_operand(&c, NIB_OUT, "rope_table", table, NULL);
  if (max_position > 0) status = NIB_CHECK_LAUNCH(&c, ROPE_TABLE, params);
  if (status != NIB_OK) nib_tensor_release(table);
  else *out = table;
  return status;
}
