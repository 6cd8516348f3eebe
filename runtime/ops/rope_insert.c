/* mla.cake_dsv4_nvfp4_rope_quantize_insert and mla.cake_dsv4_nvfp4_kv_rope_quantize_insert */
#include "check.h"
#include "mla.h"

void nib_check_record_cache(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *cache,
                            struct nib_records *out) {
  char have[NIB_DESCRIPTION];
  int32_t ndim = cache && cache->ndim == 4 ? 4 : 3;
  nib_check_tensor(c, role, parameter, cache, NIB_BIT(NIB_UINT8), ndim, NULL,
                   "[num_pages, page_size, 384], [num_pages, 1, page_size, 384] or [num_pages, page_size, 1, 384]");
  if (c->status != NIB_OK) return;
  int32_t token = ndim == 4 && cache->shape[1] == 1 ? 2 : 1;
  if (cache->shape[ndim - 1] != NIB_MLA_RECORD_BYTES || (ndim == 4 && cache->shape[1] != 1 && cache->shape[2] != 1))
    nib_check_fail(c, parameter,
                   "expected records of 384 bytes in [num_pages, page_size, 384], with 1 head if 4-D, got %s",
                   nib_describe(cache, have, sizeof have));
  *out = (struct nib_records){ nib_tensor_data(cache), cache->stride[0], cache->shape[0], cache->shape[token] };
  nib_check_multiple(c, parameter, "page_size", out->page_size, 1);
  if (c->status != NIB_OK) return;
  if (cache->stride[ndim - 1] != 1 || (out->page_size > 1 && cache->stride[token] != NIB_MLA_RECORD_BYTES))
    nib_check_fail(c, parameter,
                   "expected pages that are compact inside (strides 384 and 1), got strides %lld and %lld",
                   (long long)cache->stride[token], (long long)cache->stride[ndim - 1]);
  if (out->num_pages > 1 && out->page_stride % 16 != 0)
    nib_check_fail(c, parameter, "expected a page stride that is a multiple of 16 bytes, got %lld",
                   (long long)out->page_stride);
  if (role == NIB_OUT) nib_check_output(c, parameter, cache);
}

static void check_q_head_padded(struct nib_check *c, int64_t padded, int64_t heads, bool inplace) {
  if (padded != 0 && padded != 8 && padded != 16 && padded != 32 && padded != 64 && padded != 128)
    nib_check_fail(c, "q_head_padded", "expected 0, 8, 16, 32, 64 or 128, got %lld", (long long)padded);
  if (inplace && padded != 0 && padded != heads)
    nib_check_fail(c, "q_head_padded", "expected 0 or the number of heads (%lld) with q_inplace, got %lld",
                   (long long)heads, (long long)padded);
  if (padded != 0 && padded < heads)
    nib_check_fail(c, "q_head_padded", "expected 0 or at least the number of heads (%lld), got %lld", (long long)heads,
                   (long long)padded);
}

nib_status nib_rope_insert_sized(nib_stream *stream, const nib_rope_insert_desc *given, size_t desc_bytes,
                                 nib_tensor **q_out) {
  if (q_out) *q_out = NULL;
  enum nib_operation operation = given && given->q ? NIB_OPERATION_ROPE_INSERT : NIB_OPERATION_KV_ROPE_INSERT;
  struct nib_check c = nib_check_begin(stream, operation);
  nib_rope_insert_desc own;
  const nib_rope_insert_desc *desc = NIB_CHECK_DESC(&c, nib_rope_insert_desc, &own, given, desc_bytes);
  if (!desc) return c.status;
  nib_tensor *q = desc->q;
  const nib_tensor *kv = desc->kv, *slots = desc->slot_mapping, *positions = desc->positions,
                   *table = desc->cos_sin_cache;
  if (q) {
    nib_check_tensor(&c, NIB_IN, "q", q, NIB_BIT(NIB_BFLOAT16), 3, (int64_t[]){ -1, -1, NIB_MLA_DIM },
                     "[num_tokens, num_heads, 512]");
    if (c.status == NIB_OK) nib_check_contiguous(&c, "q", q);
  }
  nib_check_tensor(&c, NIB_IN, "kv", kv, NIB_BIT(NIB_BFLOAT16), 2,
                   (int64_t[]){ q && c.status == NIB_OK ? q->shape[0] : -1, NIB_MLA_DIM }, "[num_tokens, 512]");
  if (c.status != NIB_OK) return c.status;
  int64_t tokens = kv->shape[0], heads = q ? q->shape[1] : 0;
  nib_check_contiguous(&c, "kv", kv);
  struct nib_records records = { 0 };
  nib_check_record_cache(&c, NIB_OUT, "cache", desc->cache, &records);
  nib_check_tensor(&c, NIB_IN, "slot_mapping", slots, NIB_INDICES, 1, NULL, "[at most num_tokens]");
  if (c.status == NIB_OK) nib_check_contiguous(&c, "slot_mapping", slots);
  if (c.status == NIB_OK && slots->shape[0] > tokens)
    nib_check_fail(&c, "slot_mapping", "expected at most as many slots as tokens (%lld), got %lld", (long long)tokens,
                   (long long)slots->shape[0]);
  nib_check_tensor(&c, NIB_IN, "positions", positions, NIB_BIT(NIB_INT64), 1, &tokens, "[num_tokens]");
  if (c.status == NIB_OK) nib_check_contiguous(&c, "positions", positions);
  nib_check_tensor(&c, NIB_IN, "cos_sin_cache", table, NIB_BIT(NIB_FLOAT32), 2, (int64_t[]){ -1, NIB_MLA_ROPE },
                   "[max_position, 64]");
  if (c.status == NIB_OK) nib_check_contiguous(&c, "cos_sin_cache", table);
  if (q) check_q_head_padded(&c, desc->q_head_padded, heads, desc->q_inplace);
  int64_t ratio = q || desc->compress_ratio == 0 ? 1 : desc->compress_ratio;
  if (q && desc->q_inplace) nib_check_operand(&c, NIB_OUT, "q", q, NULL);
  nib_check_overlaps(&c);
  if (ratio != 1 && ratio != 2) nib_check_fail(&c, "compress_ratio", "expected 1 or 2, got %lld", (long long)ratio);
  if (c.status != NIB_OK) return c.status;

  nib_tensor *result = NULL;
  nib_status status = NIB_OK;
  if (q && desc->q_inplace) status = nib_tensor_alias(q, &result);
  else if (q)
    status = nib_tensor_create(stream->device, NIB_BFLOAT16, 3, (int64_t[]){ tokens, desc->q_head_padded, NIB_MLA_DIM },
                               &result);
  if (status != NIB_OK) return status;
  /* The kernel uses the queries if they are copied out, or rotated in place. */
  bool with_q = q && (desc->q_inplace ? !desc->keep_q_unrotated && heads > 0 : desc->q_head_padded > 0);
  struct nib_rope_insert_params params = {
    .q = with_q ? nib_tensor_data(q) : NULL,
    .q_out = with_q ? nib_tensor_data(result) : NULL,
    .kv = nib_tensor_data(kv),
    .cache = records.data,
    .page_stride = records.page_stride,
    .slots = nib_indices_of(slots),
    .positions = nib_tensor_data(positions),
    .cos_sin = nib_tensor_data(table),
    .rows = tokens,
    .slot_count = slots->shape[0],
    .heads = with_q ? heads : 0,
    .padded_heads = !with_q           ? 0
                    : desc->q_inplace ? heads
                                      : desc->q_head_padded,
    .page_size = records.page_size,
    .num_pages = records.num_pages,
    .max_position = table->shape[0],
    .rotate_q = !desc->keep_q_unrotated,
    .compress_ratio = (int32_t)ratio,
    .operation = operation,
    .fault = stream->device->fault,
  };
  if (tokens > 0 && (with_q || slots->shape[0] > 0)) {
    if (!with_q) nib_check_untouched(&c, q);
    else if (!desc->q_inplace) nib_check_operand(&c, NIB_OUT, "q_out", result, NULL);
    nib_check_number(&c, nib_attribute_boolean("apply_q_rope", with_q && params.rotate_q));
    nib_check_number(&c, nib_attribute_integer("compress_ratio", ratio));
    status = NIB_CHECK_LAUNCH(&c, ROPE_INSERT, params);
  }
  if (status != NIB_OK || !q_out) nib_tensor_release(result);
  else *q_out = result;
  return status;
}
