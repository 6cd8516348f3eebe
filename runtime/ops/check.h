/* Checks of an operation's arguments. The first check that fails writes the message and sets `status`; later ones do
 * nothing. So an operation lists its checks and reads `status` once.
 *
 * Each parameter is named once, by the check that also records whether the operation reads or writes it. The overlap
 * tests, the order of the launch and the accesses for observers come from that list. */
#ifndef NIB_CHECK_H
#define NIB_CHECK_H

#include "../backend.h"
#include "../tensor/tensor.h"

#define NIB_MOST_OPERANDS 12

enum nib_role { NIB_IN, NIB_OUT };

struct nib_check {
  nib_stream *stream;
  nib_runtime *rt;
  const char *operation;
  nib_status status;
  int32_t access_count, attribute_count;
  nib_access accesses[NIB_MOST_OPERANDS];
  nib_attribute attributes[NIB_MAX_ATTRIBUTES];
};

/* Refuses closed runtimes and streams that cannot take work. */
struct nib_check nib_check_begin(nib_stream *stream, enum nib_operation operation);

/* Fails with `operation: parameter: expected ..., got ...`; the format is the part after "parameter: ". */
void nib_check_fail(struct nib_check *c, const char *parameter, const char *format, ...)
  __attribute__((format(printf, 3, 4)));

/* Copies a host's descriptor to `own` (sized.h) and returns it; NULL on an error. */
#define NIB_CHECK_DESC(c, type, own, given, bytes) \
  ((const type *)nib_check_desc(c, own, sizeof(type), type##_least, given, bytes))
const void *nib_check_desc(struct nib_check *c, void *own, size_t own_bytes, size_t least, const void *given,
                           size_t bytes);

#define NIB_BIT(dtype) (1u << (dtype))
#define NIB_HALVES     (NIB_BIT(NIB_FLOAT16) | NIB_BIT(NIB_BFLOAT16))
#define NIB_INDICES    (NIB_BIT(NIB_INT32) | NIB_BIT(NIB_INT64))
#define NIB_SCALES     (NIB_BIT(NIB_FLOAT8_E4M3FN) | NIB_BIT(NIB_UINT8))

/* Checks that a tensor has one of the dtypes, is on the stream's device, and has these sizes; -1 allows any size.
 * `meaning` names the dimensions in the message, such as "[rows, heads, head_dim]". */
void nib_check_tensor(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *tensor,
                      unsigned dtypes, int32_t ndim, const int64_t *shape, const char *meaning);
void nib_check_contiguous(struct nib_check *c, const char *parameter, const nib_tensor *tensor);
void nib_check_last_contiguous(struct nib_check *c, const char *parameter, const nib_tensor *tensor);
void nib_check_output(struct nib_check *c, const char *parameter,
                      const nib_tensor *tensor); /* refuses elements that overlap */
/* Records a tensor that needs no check: a result that the operation created, or a second role. */
void nib_check_operand(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *tensor,
                       const char *layout);
void nib_check_untouched(struct nib_check *c, const nib_tensor *tensor); /* removes it from the list */
void nib_check_number(struct nib_check *c, nib_attribute attribute);     /* for observers */
/* Refuses outputs that share memory with another output or an input. A tensor may be both under one name: in place. */
void nib_check_overlaps(struct nib_check *c);
/* Launches a kernel with the accesses of the list. */
#define NIB_CHECK_LAUNCH(c, symbol, params) nib_check_launch(c, &(struct nib_work){ NIB_WORK(symbol, params) })
nib_status nib_check_launch(struct nib_check *c, const struct nib_work *work);
void nib_check_multiple(struct nib_check *c, const char *parameter, const char *what, int64_t value, int64_t factor);

/* The dimensions of page, token and head in a layout. */
struct nib_axes {
  int32_t token, head;
};
struct nib_axes nib_layout_axes(nib_layout layout);
void nib_check_layout(struct nib_check *c, const char *parameter, nib_layout layout); /* refuses unknown layouts */
int32_t nib_check_4over6(struct nib_check *c, nib_4over6 choice); /* whether it is on; then observers get it */
static inline const char *nib_layout_name(nib_layout layout) { return layout == NIB_HND ? "HND" : "NHD"; }

/* Sizes of a paged cache; -1: not known yet, taken from the tensor. */
struct nib_pool {
  int64_t pages, tokens, heads;
};

/* Checks a 4-D tensor [pages, ., ., width] of a layout with a contiguous last dimension, and returns it as a nib_paged.
 * Its sizes must agree with the known ones of `pool` and with `*width` (elements of the last dimension). */
struct nib_paged nib_check_paged(struct nib_check *c, enum nib_role role, const char *parameter,
                                 const nib_tensor *tensor, unsigned dtypes, nib_layout layout, struct nib_pool *pool,
                                 int64_t *width);

/* Gets K and V of a cache argument, as tensors that hold no reference. */
void nib_check_pair(struct nib_check *c, const char *parameter, const nib_cache *cache, nib_tensor *k, nib_tensor *v);

/* 1-D or 2-D indices (int32 or int64) for kernels. */
struct nib_indices nib_indices_of(const nib_tensor *tensor);

/* Checks a scale: a positive finite number (not during a capture), or a float32 tensor of one element. */
struct nib_scale nib_check_scale(struct nib_check *c, const char *parameter, const nib_scale_source *source);
void nib_check_scalar_tensor(struct nib_check *c, const char *parameter, const nib_tensor *tensor);

#endif
