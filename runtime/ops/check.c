#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../core/floats.h"

struct nib_check nib_check_begin(nib_stream *stream, enum nib_operation operation) {
  struct nib_check c = { .stream = stream, .rt = stream->device->runtime, .operation = nib_operation_names[operation] };
  c.status = nib_check_stream(stream, c.operation);
  return c;
}

void nib_check_fail(struct nib_check *c, const char *parameter, const char *format, ...) {
  if (c->status != NIB_OK) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  c->status = nib_fail(c->rt, NIB_INVALID, "%s: %s: %s", c->operation, parameter, text);
}

const void *nib_check_desc(struct nib_check *c, void *own, size_t own_bytes, size_t least, const void *given,
                           size_t bytes) {
  if (c->status == NIB_OK) c->status = nib_read_desc(c->rt, c->operation, own, own_bytes, least, given, bytes);
  return c->status == NIB_OK ? own : NULL;
}

static const char *dtype_names(unsigned dtypes, char *text, size_t size) {
  size_t used = 0;
  text[0] = 0;
  for (int i = 0; i < NIB_DTYPE_COUNT && used < size; i++)
    if (dtypes & NIB_BIT(i))
      used += (size_t)snprintf(text + used, size - used, "%s%s", used ? " or " : "", nib_dtype_name((nib_dtype)i));
  return text;
}

void nib_check_operand(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *tensor,
                       const char *layout) {
  if (c->status != NIB_OK) return;
  if (c->access_count == NIB_MOST_OPERANDS)
    nib_check_fail(c, parameter, "expected at most %d tensors, got more", NIB_MOST_OPERANDS);
  else c->accesses[c->access_count++] = (nib_access){ tensor, role == NIB_OUT, parameter, layout };
}

void nib_check_untouched(struct nib_check *c, const nib_tensor *tensor) {
  int32_t count = 0;
  for (int32_t i = 0; i < c->access_count; i++)
    if (c->accesses[i].tensor != tensor) c->accesses[count++] = c->accesses[i];
  c->access_count = count;
}

void nib_check_number(struct nib_check *c, nib_attribute attribute) {
  if (c->status != NIB_OK) return;
  if (c->attribute_count == NIB_MAX_ATTRIBUTES)
    nib_check_fail(c, attribute.name, "expected at most %d numbers, got more", NIB_MAX_ATTRIBUTES);
  else c->attributes[c->attribute_count++] = attribute;
}

static void check_disjoint(struct nib_check *c, const nib_access *output, const nib_access *other) {
  char have[NIB_DESCRIPTION];
  if (output->tensor->storage != other->tensor->storage) return;
  if (output->tensor == other->tensor && strcmp(output->parameter, other->parameter) == 0) return; /* in place */
  if (nib_tensor_numel(output->tensor) > 0 && nib_tensor_numel(other->tensor) > 0 &&
      nib_tensor_overlaps(output->tensor, other->tensor))
    nib_check_fail(c, output->parameter, "expected a tensor that does not overlap %s, got one that does (%s)",
                   other->parameter, nib_describe(output->tensor, have, sizeof have));
}

void nib_check_overlaps(struct nib_check *c) {
  for (int32_t i = 0; i < c->access_count; i++) {
    if (!c->accesses[i].write) continue;
    for (int32_t k = 0; c->status == NIB_OK && k < c->access_count; k++)
      if (k < i || (k > i && !c->accesses[k].write)) check_disjoint(c, &c->accesses[i], &c->accesses[k]);
  }
}

nib_status nib_check_launch(struct nib_check *c, const struct nib_work *work) {
  struct nib_work own = *work;
  own.attributes = c->attributes;
  own.attribute_count = c->attribute_count;
  return nib_submit(c->stream, c->operation, &own, c->accesses, c->access_count);
}

static void check_tensor(struct nib_check *c, const char *parameter, const nib_tensor *tensor, unsigned dtypes,
                         int32_t ndim, const int64_t *shape, const char *meaning) {
  char names[96], want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  if (c->status != NIB_OK) return;
  if (!tensor) {
    nib_check_fail(c, parameter, "expected a tensor, got none");
    return;
  }
  if (nib_tensor_device(tensor) != c->stream->device)
    nib_check_fail(c, parameter, "expected a tensor on %s, got one on %s", c->stream->device->info.name,
                   nib_tensor_device(tensor)->info.name);
  if (!(dtypes & NIB_BIT(tensor->dtype)))
    nib_check_fail(c, parameter, "expected dtype %s, got %s", dtype_names(dtypes, names, sizeof names),
                   nib_describe(tensor, have, sizeof have));
  if (tensor->ndim != ndim)
    nib_check_fail(c, parameter, "expected %d dimensions %s, got %s", (int)ndim, meaning,
                   nib_describe(tensor, have, sizeof have));
  bool fits = true;
  for (int32_t i = 0; shape && i < ndim && i < tensor->ndim; i++) fits &= shape[i] < 0 || tensor->shape[i] == shape[i];
  if (fits) return;
  nib_tensor wanted = *tensor;
  for (int32_t i = 0; i < ndim && i < tensor->ndim; i++)
    if (shape[i] >= 0) wanted.shape[i] = shape[i];
  nib_check_fail(c, parameter, "expected %s for %s, got %s", nib_describe(&wanted, want, sizeof want), meaning,
                 nib_describe(tensor, have, sizeof have));
}

void nib_check_tensor(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *tensor,
                      unsigned dtypes, int32_t ndim, const int64_t *shape, const char *meaning) {
  check_tensor(c, parameter, tensor, dtypes, ndim, shape, meaning);
  nib_check_operand(c, role, parameter, tensor, NULL);
}

static const char *describe_strides(const nib_tensor *tensor, char *text, size_t size) {
  size_t used = strlen(nib_describe(tensor, text, size));
  for (int32_t i = 0; i < tensor->ndim && used < size; i++)
    used +=
      (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : " with strides {", (long long)tensor->stride[i]);
  if (used < size) snprintf(text + used, size - used, "}");
  return text;
}

void nib_check_contiguous(struct nib_check *c, const char *parameter, const nib_tensor *tensor) {
  char have[2 * NIB_DESCRIPTION];
  if (c->status != NIB_OK || nib_tensor_is_contiguous(tensor)) return;
  nib_check_fail(c, parameter, "expected a contiguous tensor, got %s", describe_strides(tensor, have, sizeof have));
}

void nib_check_last_contiguous(struct nib_check *c, const char *parameter, const nib_tensor *tensor) {
  char have[2 * NIB_DESCRIPTION];
  if (c->status != NIB_OK) return;
  int32_t last = tensor->ndim - 1;
  if (tensor->shape[last] > 1 && tensor->stride[last] != 1)
    nib_check_fail(c, parameter, "expected a contiguous last dimension, got %s",
                   describe_strides(tensor, have, sizeof have));
}

void nib_check_output(struct nib_check *c, const char *parameter, const nib_tensor *tensor) {
  char have[2 * NIB_DESCRIPTION];
  if (c->status != NIB_OK || !nib_tensor_overlaps_itself(tensor)) return;
  nib_check_fail(c, parameter, "expected an output whose elements do not overlap, got %s",
                 describe_strides(tensor, have, sizeof have));
}

void nib_check_multiple(struct nib_check *c, const char *parameter, const char *what, int64_t value, int64_t factor) {
  if (c->status != NIB_OK || (value > 0 && value % factor == 0)) return;
  if (factor == 1) nib_check_fail(c, parameter, "expected a positive %s, got %lld", what, (long long)value);
  else
    nib_check_fail(c, parameter, "expected %s to be a positive multiple of %lld, got %lld", what, (long long)factor,
                   (long long)value);
}

void nib_check_layout(struct nib_check *c, const char *parameter, nib_layout layout) {
  if (layout != NIB_NHD && layout != NIB_HND)
    nib_check_fail(c, parameter, "expected NIB_NHD or NIB_HND, got %d", (int)layout);
}

int32_t nib_check_4over6(struct nib_check *c, nib_4over6 choice) {
  if (choice != NIB_4OVER6_OFF && choice != NIB_4OVER6_MSE)
    nib_check_fail(c, "nvfp4_4over6", "expected NIB_4OVER6_OFF or NIB_4OVER6_MSE, got %d", (int)choice);
  else if (choice != NIB_4OVER6_OFF) nib_check_number(c, nib_attribute_boolean("nvfp4_4over6", true));
  return choice != NIB_4OVER6_OFF;
}

struct nib_axes nib_layout_axes(nib_layout layout) {
  return layout == NIB_HND ? (struct nib_axes){ .token = 2, .head = 1 } : (struct nib_axes){ .token = 1, .head = 2 };
}

struct nib_paged nib_check_paged(struct nib_check *c, enum nib_role role, const char *parameter,
                                 const nib_tensor *tensor, unsigned dtypes, nib_layout layout, struct nib_pool *pool,
                                 int64_t *width) {
  struct nib_axes axes = nib_layout_axes(layout);
  struct nib_paged paged = { 0 };
  int64_t shape[4] = { pool->pages, -1, -1, *width };
  shape[axes.token] = pool->tokens;
  shape[axes.head] = pool->heads;
  check_tensor(c, parameter, tensor, dtypes, 4, shape,
               layout == NIB_HND ? "[num_pages, num_kv_heads, page_size, X] (HND)"
                                 : "[num_pages, page_size, num_kv_heads, X] (NHD)");
  if (c->status != NIB_OK) return paged;
  nib_check_last_contiguous(c, parameter, tensor);
  if (role == NIB_OUT) nib_check_output(c, parameter, tensor);
  nib_check_operand(c, role, parameter, tensor, nib_layout_name(layout));
  pool->pages = tensor->shape[0];
  pool->tokens = tensor->shape[axes.token];
  pool->heads = tensor->shape[axes.head];
  *width = tensor->shape[3];
  nib_check_multiple(c, parameter, "page_size", pool->tokens, 1);
  paged.data = nib_tensor_data(tensor);
  paged.page_stride = tensor->stride[0];
  paged.token_stride = tensor->stride[axes.token];
  paged.head_stride = tensor->stride[axes.head];
  return paged;
}

void nib_check_pair(struct nib_check *c, const char *parameter, const nib_cache *cache, nib_tensor *k, nib_tensor *v) {
  char have[NIB_DESCRIPTION];
  if (c->status != NIB_OK) return;
  const nib_tensor *stacked = cache->stacked;
  if (!stacked) {
    if (!cache->k || !cache->v) {
      nib_check_fail(c, parameter, "expected a pair {k, v} or a stacked tensor, got %s",
                     cache->k || cache->v ? "half a pair" : "none");
      return;
    }
    *k = *cache->k;
    *v = *cache->v;
    return;
  }
  if (stacked->ndim != 5 || stacked->shape[1] != 2) {
    nib_check_fail(c, parameter,
                   "expected a pair {k, v}, or a stacked tensor of 5 dimensions with K and V in the second, got %s",
                   nib_describe(stacked, have, sizeof have));
    return;
  }
  *k = *stacked;
  k->ndim = 4;
  for (int32_t i = 1; i < 4; i++) {
    k->shape[i] = stacked->shape[i + 1];
    k->stride[i] = stacked->stride[i + 1];
  }
  *v = *k;
  if (nib_tensor_numel(k) > 0) v->offset_bytes += stacked->stride[1] * (int64_t)nib_dtype_bytes(stacked->dtype);
}

struct nib_indices nib_indices_of(const nib_tensor *tensor) {
  int32_t last = tensor->ndim - 1;
  return (struct nib_indices){ .data = nib_tensor_data(tensor),
                               .row_stride = last > 0 ? tensor->stride[0] : 0,
                               .stride = tensor->stride[last],
                               .is_int64 = tensor->dtype == NIB_INT64 };
}

void nib_check_scalar_tensor(struct nib_check *c, const char *parameter, const nib_tensor *tensor) {
  char have[NIB_DESCRIPTION];
  if (c->status != NIB_OK) return;
  if (!tensor) {
    nib_check_fail(c, parameter, "expected a float32 tensor of one element, got none");
    return;
  }
  if (tensor->dtype != NIB_FLOAT32 || nib_tensor_numel(tensor) != 1)
    nib_check_fail(c, parameter, "expected a float32 tensor of one element, got %s",
                   nib_describe(tensor, have, sizeof have));
  else nib_check_tensor(c, NIB_IN, parameter, tensor, NIB_BIT(NIB_FLOAT32), tensor->ndim, NULL, "");
}

struct nib_scale nib_check_scale(struct nib_check *c, const char *parameter, const nib_scale_source *source) {
  struct nib_scale scale = { 0 };
  if (source->tensor) {
    nib_check_scalar_tensor(c, parameter, source->tensor);
    if (c->status == NIB_OK) scale.pointer = nib_tensor_data(source->tensor);
    return scale;
  }
  struct nib_floats floats;
  double value = source->value;
  nib_floats_enter(&floats);
  NIB_OPAQUE(value);
  scale.value = (float)value;
  bool valid = scale.value > 0 && !isinf(scale.value);
  NIB_OPAQUE(valid);
  NIB_OPAQUE(scale.value);
  nib_floats_leave(&floats);
  if (valid && !c->stream->capture) {
    nib_check_number(c, nib_attribute_single(parameter, scale.value));
    return scale;
  }
  char got[32];
  nib_format_real(got, sizeof got, "%.9g", value);
  if (!valid) nib_check_fail(c, parameter, "expected a positive finite float32 value, got %s", got);
  else if (c->status == NIB_OK)
    c->status = nib_fail(
      c->rt, NIB_CAPTURING,
      "%s: %s: expected a float32 tensor of one element while the stream captures (a number would be fixed in the "
      "graph), got the number %s",
      c->operation, parameter, got);
  return scale;
}
