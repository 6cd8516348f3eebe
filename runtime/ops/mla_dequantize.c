/* mla.dequantize_cache */
#include "check.h"
#include "mla.h"

nib_status nib_mla_dequantize(nib_stream *stream, nib_tensor *cache, nib_tensor *slots, nib_tensor **rows) {
  *rows = NULL;
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_MLA_DEQUANTIZE);
  struct nib_records records = { 0 };
  nib_check_record_cache(&c, NIB_IN, "cache", cache, &records);
  nib_check_tensor(&c, NIB_IN, "slots", slots, NIB_INDICES, 1, NULL, "[n]");
  if (c.status != NIB_OK) return c.status;
  int64_t count = slots->shape[0];
  nib_tensor *out;
  nib_status status = nib_tensor_create(stream->device, NIB_BFLOAT16, 2, (int64_t[]){ count, NIB_MLA_DIM }, &out);
  if (status != NIB_OK) return status;
  struct nib_mla_dequantize_params params = {
    .cache = records.data,
    .page_stride = records.page_stride,
    .slots = nib_indices_of(slots),
    .out = nib_tensor_data(out),
    .count = count,
    .page_size = records.page_size,
    .num_pages = records.num_pages,
    .fault = stream->device->fault,
  };
  nib_check_operand(&c, NIB_OUT, "rows", out, NULL);
  if (count > 0) status = NIB_CHECK_LAUNCH(&c, MLA_DEQUANTIZE, params);
  if (status != NIB_OK) nib_tensor_release(out);
  else *rows = out;
  return status;
}
