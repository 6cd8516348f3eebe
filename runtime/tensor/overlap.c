/* Whether elements of one view, or of two, share memory. */
#include "tensor.h"

/* The offsets that a dimension, or several with the same step, adds to an address: 0, step, ... (count - 1) * step. */
struct span {
  int64_t step, count;
  int64_t reach;   /* the largest sum of offsets of this span and the smaller ones */
  int64_t divisor; /* divides all these sums */
  bool complete;   /* the sums are all multiples of the divisor up to reach */
};

struct spans {
  struct span of[2 * NIB_MAX_NDIM]; /* ascending steps */
  int32_t count;
};

static void add_span(struct spans *spans, int64_t step, int64_t count) {
  int32_t at = spans->count;
  if (step == 0 || count == 1) return;
  while (at > 0 && spans->of[at - 1].step > step) at--;
  if (at > 0 && spans->of[at - 1].step == step) {
    spans->of[at - 1].count += count - 1;
    return;
  }
  for (int32_t i = spans->count++; i > at; i--) spans->of[i] = spans->of[i - 1];
  spans->of[at].step = step;
  spans->of[at].count = count;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b > 0) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

#define OVERLAP_STEPS 4096

/* Whether a sum of offsets of the first `count` spans is in low..high. Returns true if that takes too many steps, as it
 * can with irregular strides. */
static bool sums_meet(const struct span *spans, int32_t count, int64_t low, int64_t high, int32_t *steps) {
  int64_t reach = count > 0 ? spans[count - 1].reach : 0;
  if (high < 0 || low > reach) return false;
  if (low <= 0 || high >= reach) return true;
  const struct span *last = &spans[count - 1];
  if (last->divisor > 1 && high / last->divisor * last->divisor < low) return false;
  if (last->complete || --*steps < 0) return true;
  int64_t below = count > 1 ? spans[count - 2].reach : 0;
  int64_t first = low > below ? (low - below + last->step - 1) / last->step : 0;
  for (int64_t i = first; i < last->count && i * last->step <= high; i++)
    if (sums_meet(spans, count - 1, low - i * last->step, high - i * last->step, steps) || --*steps < 0) return true;
  return false;
}

static bool spans_meet(struct spans *spans, int64_t low, int64_t high) {
  int64_t reach = 0, divisor = 0;
  bool complete = true;
  for (int32_t i = 0; i < spans->count; i++) {
    struct span *span = &spans->of[i];
    if (divisor != 1) divisor = greatest_common_divisor(span->step, divisor);
    complete = complete && divisor == spans->of[0].step && span->step <= reach + divisor;
    reach += (span->count - 1) * span->step;
    span->reach = reach;
    span->divisor = divisor;
    span->complete = complete;
  }
  int32_t steps = OVERLAP_STEPS;
  return sums_meet(spans->of, spans->count, low, high, &steps);
}

/* Two elements share an address if the sum of strides times index differences is 0. Let the difference be positive in
 * the dimension with the largest stride where the indices differ. If the stride exceeds the reach of all smaller
 * dimensions, as it usually does, no sum with it is 0. */
bool nib_tensor_overlaps_itself(const nib_tensor *tensor) {
  int32_t order[NIB_MAX_NDIM], n = 0;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) { /* from the last, since most tensors are sorted in this order */
    if (tensor->shape[i] == 0) return false;
    if (tensor->shape[i] == 1) continue;
    int32_t at = n++;
    for (; at > 0 && tensor->stride[order[at - 1]] > tensor->stride[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t reach = 0;
  for (int32_t i = 0; i < n; i++) {
    int64_t stride = tensor->stride[order[i]], size = tensor->shape[order[i]];
    if (stride == 0) return true;
    if (stride <= reach) {
      struct spans spans;
      spans.count = 0;
      for (int32_t k = 0; k < i; k++) add_span(&spans, tensor->stride[order[k]], 2 * tensor->shape[order[k]] - 1);
      add_span(&spans, stride, size - 1);
      if (spans_meet(&spans, reach - stride, reach - stride)) return true;
    }
    reach += (size - 1) * stride;
  }
  return false;
}

static int64_t add_spans(struct spans *spans, const nib_tensor *tensor) {
  int64_t item = (int64_t)nib_dtype_bytes(tensor->dtype), reach = 0;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
    if (tensor->shape[i] == 1) continue; /* its stride has no effect and may be any number */
    add_span(spans, tensor->stride[i] * item, tensor->shape[i]);
    reach += (tensor->shape[i] - 1) * tensor->stride[i] * item;
  }
  return reach;
}

/* Both tensors must have elements. An element of b is at `distance` plus steps of b after a's first element; an element
 * of a is at a's reach minus steps of a. They overlap if all these steps together differ from a's reach by less than
 * the size of an element. */
bool nib_tensor_overlaps(const nib_tensor *a, const nib_tensor *b) {
  if (a->storage != b->storage) return false;
  struct spans spans;
  spans.count = 0;
  int64_t distance = b->offset_bytes - a->offset_bytes, reach = add_spans(&spans, a);
  add_spans(&spans, b);
  return spans_meet(&spans, reach - distance - ((int64_t)nib_dtype_bytes(b->dtype) - 1),
                    reach - distance + (int64_t)nib_dtype_bytes(a->dtype) - 1);
}
