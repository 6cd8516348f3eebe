/* Checking an operation's arguments. The first check that fails writes the message and sets `status`; the ones after it
 * do nothing, so that an operation lists its checks one after the other and looks at `status` once.
 *
 * Each parameter is named once, by the check that also writes down whether the operation reads or writes it. From that
 * list come the tests of overlap, what the launch orders, and what observers are told. */
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

/* `operation: parameter: expected ..., got ...`; the format is the part after "parameter: ". */
void nib_check_fail(struct nib_check *c, const char *parameter, const char *format, ...)
  __attribute__((format(printf, 3, 4)));

/* A host's descriptor (sized.h), as `own`; or NULL. */
#define NIB_CHECK_DESC(c, type, own, given, bytes) \
  ((const type *)nib_check_desc(c, own, sizeof(type), type##_least, given, bytes))
const void *nib_check_desc(struct nib_check *c, void *own, size_t own_bytes, size_t least, const void *given,
                           size_t bytes);

#define NIB_BIT(dtype) (1u << (dtype))
#define NIB_HALVES     (NIB_BIT(NIB_FLOAT16) | NIB_BIT(NIB_BFLOAT16))
#define NIB_INDICES    (NIB_BIT(NIB_INT32) | NIB_BIT(NIB_INT64))
#define NIB_SCALES     (NIB_BIT(NIB_FLOAT8_E4M3FN) | NIB_BIT(NIB_UINT8))

/* A tensor of one of the dtypes, on the stream's device, with sizes as given; -1 takes any. `meaning` names the
 * dimensions in the message, such as "[rows, heads, head_dim]". */
void nib_check_tensor(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *tensor,
                      unsigned dtypes, int32_t ndim, const int64_t *shape, const char *meaning);
void nib_check_contiguous(struct nib_check *c, const char *parameter, const nib_tensor *tensor);
void nib_check_last_contiguous(struct nib_check *c, const char *parameter, const nib_tensor *tensor);
void nib_check_output(struct nib_check *c, const char *parameter,
                      const nib_tensor *tensor); /* elements do not overlap */
/* Writes a tensor down that needs no check of its own: a result that the operation has made, or a second role. */
void nib_check_operand(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *tensor,
                       const char *layout);
void nib_check_untouched(struct nib_check *c, const nib_tensor *tensor); /* strikes it off the list */
void nib_check_number(struct nib_check *c, nib_attribute attribute);     /* for observers */
/* No output shares memory with another output or with an input. Under one name a tensor may be both: in place. */
void nib_check_overlaps(struct nib_check *c);
/* Launches a kernel on what is on the list. */
#define NIB_CHECK_LAUNCH(c, symbol, params) nib_check_launch(c, &(struct nib_work){ NIB_WORK(symbol, params) })
nib_status nib_check_launch(struct nib_check *c, const struct nib_work *work);
void nib_check_multiple(struct nib_check *c, const char *parameter, const char *what, int64_t value, int64_t factor);

/* Where page, token and head are in the four dimensions of a layout. */
struct nib_axes {
  int32_t token, head;
};
struct nib_axes nib_layout_axes(nib_layout layout);
void nib_check_layout(struct nib_check *c, const char *parameter, nib_layout layout); /* one that there is */
static inline const char *nib_layout_name(nib_layout layout) { return layout == NIB_HND ? "HND" : "NHD"; }

/* Sizes of a paged cache; -1 is not known yet and taken from the tensor. */
struct nib_pool {
  int64_t pages, tokens, heads;
};

/* A 4-D tensor [pages, ., ., width] of a layout, last dimension contiguous, as a nib_paged. Sizes in `pool` that are
 * known must agree; `*width` too (elements of the last dimension). */
struct nib_paged nib_check_paged(struct nib_check *c, enum nib_role role, const char *parameter,
                                 const nib_tensor *tensor, unsigned dtypes, nib_layout layout, struct nib_pool *pool,
                                 int64_t *width);

/* K and V of a cache argument, as tensors on the stack that hold no reference. */
void nib_check_pair(struct nib_check *c, const char *parameter, const nib_cache *cache, nib_tensor *k, nib_tensor *v);

/* 1-D or 2-D indices (int32 or int64) as kernels read them. */
struct nib_indices nib_indices_of(const nib_tensor *tensor);

/* A positive finite number (not during a capture), or a float32 tensor of one element. */
struct nib_scale nib_check_scale(struct nib_check *c, const char *parameter, const nib_scale_source *source);
void nib_check_scalar_tensor(struct nib_check *c, const char *parameter, const nib_tensor *tensor);

#endif
