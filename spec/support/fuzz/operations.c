/* Every operation with arguments that fit, and then do not: shapes, strides, dtypes, tensors that share memory, tables
 * full of anything. It is refused with an error, and nothing is written; or it runs, and touches nothing but its
 * tensors' own elements: what lies between and around these is poisoned, and compared afterwards. */
#include <math.h>
#include <sanitizer/asan_interface.h>

#include "fuzz.h"

static nib_runtime *runtime;
static nib_device *device;
static nib_stream *stream;

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

#define MOST_TENSORS 16
#define MOST_BYTES   (1 << 15)
#define GUARD        64

struct storage {
  nib_tensor *bytes; /* all of it */
  unsigned char *data, *before;
  size_t size;
  bool *owned; /* the bytes that elements cover */
};

static struct storage storages[MOST_TENSORS];
static nib_tensor *tensors[MOST_TENSORS];
static bool repeats[MOST_TENSORS]; /* whether two elements of the tensor share a byte */
static int storage_count, tensor_count;

/* What an argument looks like before it is made. */
struct spec {
  nib_dtype dtype;
  int32_t ndim;
  int64_t shape[NIB_MAX_NDIM];
  enum { ANYTHING, SMALL_INTEGERS, SCALES } contents;
};

static int64_t integer_content(struct input *in) {
  return one_in(in, 8) ? odd_number(in) : PICK(in, 0, 1, 2, 3, 4, 5, 7, 8, 12, -1);
}

static void fill(struct input *in, const struct spec *spec, unsigned char *data, size_t size) {
  size_t item = nib_dtype_bytes(spec->dtype);
  uint64_t state = next_word(in) | 1;
  for (size_t i = 0; i + item <= size; i += item) {
    if (spec->contents == SMALL_INTEGERS && (spec->dtype == NIB_INT32 || spec->dtype == NIB_INT64)) {
      int64_t value = in->at < in->end ? integer_content(in) : (int64_t)(i / item % 4);
      memcpy(data + i, &value, item);
    } else if (spec->contents == SCALES && spec->dtype == NIB_FLOAT32) {
      float value = ((float[]){ 1, 0.5f, 2, 0, -1, NAN, INFINITY, 1e-38f })[below(in, 8)];
      memcpy(data + i, &value, item);
    } else {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      memcpy(data + i, &state, item);
    }
  }
}

/* Marks the bytes of the tensor's elements. Whether two of them share one. */
static bool own(struct storage *storage, const nib_tensor *tensor) {
  bool shared = false;
  int32_t ndim = nib_tensor_ndim(tensor);
  size_t item = nib_dtype_bytes(nib_tensor_dtype(tensor));
  int64_t index[NIB_MAX_NDIM] = { 0 };
  for (int64_t left = nib_tensor_numel(tensor); left > 0; left--) {
    size_t at = (size_t)((unsigned char *)nib_tensor_data(tensor) - storage->data);
    for (int32_t i = 0; i < ndim; i++) at += (size_t)(index[i] * nib_tensor_stride(tensor)[i]) * item;
    CHECK(at + item <= storage->size);
    for (size_t i = 0; i < item; i++) shared |= storage->owned[at + i];
    memset(storage->owned + at, 1, item);
    for (int32_t i = ndim - 1; i >= 0 && ++index[i] == nib_tensor_shape(tensor)[i]; i--) index[i] = 0;
  }
  return shared;
}

/* A tensor of the spec in a storage of its own, with room around and perhaps between its elements. NULL: too large to
 * try. */
static nib_tensor *make(struct input *in, const struct spec *spec) {
  if (tensor_count == MOST_TENSORS) return NULL;
  int64_t stride[NIB_MAX_NDIM], item = (int64_t)nib_dtype_bytes(spec->dtype), extent = 1, offset = 0;
  bool compact = !one_in(in, 3);
  for (int32_t i = spec->ndim - 1; i >= 0; i--) {
    int64_t size = spec->shape[i] > 1 ? spec->shape[i] : 1;
    if (size > MOST_BYTES / item / extent) return NULL;
    stride[i] = extent;
    extent *= size;
    if (!compact && (i > 0 || one_in(in, 2))) extent += PICK(in, 0, 0, 0, 1, 4, 8, 16);
  }
  if (!compact && spec->ndim > 0 && one_in(in, 6))
    stride[below(in, (uint32_t)spec->ndim)] = PICK(in, 0, 1, 2, 3, 16, 384);
  for (int32_t i = 0; i < spec->ndim; i++)
    if (spec->shape[i] > 1) offset += (spec->shape[i] - 1) * stride[i];
  if (offset >= MOST_BYTES) return NULL;
  int64_t size = (2 * GUARD + (offset + 1 + (extent > offset ? extent - offset : 0)) * item + 7) / 8 * 8;
  struct storage *storage = &storages[storage_count];
  *storage = (struct storage){ .size = (size_t)size };
  CHECK(nib_tensor_create(device, NIB_UINT8, 1, &size, &storage->bytes) == NIB_OK);
  storage->data = nib_tensor_data(storage->bytes);
  fill(in, spec, storage->data, storage->size);
  storage->before = malloc(storage->size);
  storage->owned = calloc(storage->size, sizeof(bool));
  CHECK(storage->before && storage->owned);
  memcpy(storage->before, storage->data, storage->size);
  storage_count++;
  nib_tensor *elements = NULL, *tensor = NULL;
  CHECK(nib_tensor_reinterpret(storage->bytes, spec->dtype, &elements) == NIB_OK);
  nib_status status = nib_tensor_as_strided(elements, spec->ndim, spec->shape, stride, GUARD / item, &tensor);
  nib_tensor_release(elements);
  if (status != NIB_OK) {
    CHECK(status == NIB_INVALID && !tensor);
    return NULL;
  }
  repeats[tensor_count] = own(storage, tensor);
  if (one_in(in, 16) && spec->ndim > 0) { /* far more elements than memory */
    int64_t shape[NIB_MAX_NDIM], most = odd_number(in);
    if (most > 1000 && most <= (int64_t)1 << 40) most = 1000; /* what operations take, and work on for minutes */
    for (int32_t i = 0; i < spec->ndim; i++) shape[i] = -1;
    uint32_t dim = below(in, (uint32_t)spec->ndim);
    shape[dim] = most;
    nib_tensor *wide = NULL;
    if (nib_tensor_expand(tensor, spec->ndim, shape, &wide) == NIB_OK) {
      nib_tensor_release(tensor);
      tensor = wide;
      repeats[tensor_count] |= most > 1 && spec->shape[dim] == 1;
    }
  }
  return tensors[tensor_count++] = tensor;
}

/* ASan remembers whole groups of 8 bytes. */
static void poison_gaps(bool on) {
  for (int k = 0; k < storage_count; k++)
    for (size_t at = 0; at + 8 <= storages[k].size; at += 8) {
      bool owned = false;
      for (size_t i = at; i < at + 8; i++) owned |= storages[k].owned[i];
      if (owned) continue;
      if (on) ASAN_POISON_MEMORY_REGION(storages[k].data + at, 8);
      else ASAN_UNPOISON_MEMORY_REGION(storages[k].data + at, 8);
    }
}

static struct storage *storage_of(const nib_tensor *tensor) {
  for (int i = 0; i < storage_count; i++) {
    unsigned char *data = nib_tensor_data(tensor);
    if (data >= storages[i].data && data < storages[i].data + storages[i].size) return &storages[i];
  }
  return NULL;
}

static void release_all(void) {
  for (int i = 0; i < tensor_count; i++) nib_tensor_release(tensors[i]);
  for (int i = 0; i < storage_count; i++) {
    nib_tensor_release(storages[i].bytes);
    free(storages[i].before);
    free(storages[i].owned);
  }
  tensor_count = storage_count = 0;
}

/* ---- Arguments that fit, and what is done to them -------------------------------------------------------------- */

static struct spec shaped(nib_dtype dtype, int contents, int32_t ndim, const int64_t *shape) {
  struct spec spec = { .dtype = dtype, .ndim = ndim, .contents = contents };
  memcpy(spec.shape, shape, sizeof *shape * (size_t)ndim);
  return spec;
}

#define SPEC(dtype, contents, ...) \
  shaped(dtype, contents, (int32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]){ __VA_ARGS__ })

static void spoil(struct input *in, struct spec *spec) {
  int64_t *size = &spec->shape[spec->ndim > 0 ? below(in, (uint32_t)spec->ndim) : 0];
  switch (below(in, 5)) {
  case 0: spec->dtype = (nib_dtype)below(in, DTYPES); break;
  case 1: *size = PICK(in, 0, 1, 2, 3, 5, 8, 15, 17, 32, 48); break;
  case 4:
    if (one_in(in, 3) && *size > 0) --*size;
    else ++*size;
    break;
  case 2:
    if (spec->ndim < NIB_MAX_NDIM) spec->shape[spec->ndim++] = PICK(in, 1, 2, 0);
    break;
  default:
    if (spec->ndim > 0) spec->ndim--;
  }
}

/* One argument: as it should be, mostly. */
static nib_tensor *argument(struct input *in, struct spec spec) {
  uint32_t choice = next_byte(in);
  if (choice == 255) return NULL;
  if (choice >= 250 && tensor_count > 0) return tensors[below(in, (uint32_t)tensor_count)];
  if (choice >= 218) spoil(in, &spec);
  return make(in, &spec);
}

static nib_cache cache(struct input *in, nib_dtype dtype, const int64_t shape[4]) {
  if (one_in(in, 2))
    return (nib_cache){ .stacked = argument(in, SPEC(dtype, ANYTHING, shape[0], 2, shape[1], shape[2], shape[3])) };
  struct spec spec = shaped(dtype, ANYTHING, 4, shape);
  nib_tensor *k = argument(in, spec);
  return (nib_cache){ .k = k, .v = argument(in, spec) };
}

static nib_scale_source scale(struct input *in) {
  static const double values[] = { 1, 0.5, 2, 0, -1, NAN, INFINITY, 1e300, 1e-300 };
  if (one_in(in, 2)) return (nib_scale_source){ .value = values[below(in, 9)] };
  return (nib_scale_source){ .tensor = argument(in, SPEC(NIB_FLOAT32, SCALES, 1)) };
}

static nib_dtype half(struct input *in) { return one_in(in, 2) ? NIB_FLOAT16 : NIB_BFLOAT16; }
static nib_dtype indices(struct input *in) { return one_in(in, 2) ? NIB_INT64 : NIB_INT32; }
static nib_dtype scale_dtype(struct input *in) { return one_in(in, 2) ? NIB_UINT8 : NIB_FLOAT8_E4M3FN; }

/* The sizes of a case. */
struct sizes {
  int64_t pages, page_size, heads, dim, rows, columns;
  nib_layout layout;
};

static void paged_shape(const struct sizes *s, int64_t width, int64_t shape[4]) {
  memcpy(shape,
         s->layout == NIB_HND ? (int64_t[]){ s->pages, s->heads, s->page_size, width }
                              : (int64_t[]){ s->pages, s->page_size, s->heads, width },
         4 * sizeof *shape);
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

struct outcome {
  nib_status status;
  nib_tensor *results[6];
  const nib_tensor *outputs[8]; /* arguments that may be written */
};

struct call { /* made once for an eager run, and once for a capture */
  int operation;
  struct sizes sizes;
  union {
    nib_append_desc append;
    nib_dequantize_desc dequantize;
    nib_materialize_desc materialize;
    nib_rope_insert_desc rope;
    nib_quantize_cache_desc quantize;
    struct {
      nib_tensor *a, *b;
      nib_number number, step;
      int64_t low, high;
      nib_dtype dtype;
      bool inverse;
    } plain;
  } as;
};

enum {
  APPEND,
  DEQUANTIZE,
  MATERIALIZE,
  ROPE_INSERT,
  SWIZZLE,
  QUANTIZE_CACHE,
  MLA_DEQUANTIZE,
  ROPE_TABLE,
  COPY,
  FILL,
  ARANGE,
  NORMAL,
  INTEGER,
  PERMUTATION,
  WRITE,
  OPERATION_COUNT
};

static nib_number number(struct input *in) {
  static const double values[] = { 0, 1.5, -3, 1e300, NAN, INFINITY, 448, 65504 };
  return one_in(in, 2) ? NIB_REAL(values[below(in, 8)]) : NIB_INTEGER(odd_number(in));
}

static void prepare(struct input *in, struct call *call) {
  struct sizes *s = &call->sizes;
  s->pages = PICK(in, 1, 2, 3, 0);
  s->page_size = PICK(in, 4, 8, 1, 2, 3);
  s->heads = PICK(in, 1, 2, 3, 0);
  s->dim = PICK(in, 64, 16, 32, 80, 128);
  s->rows = PICK(in, 1, 2, 4, 5, 0);
  s->columns = PICK(in, 1, 2, 3, 0);
  s->layout = (nib_layout)below(in, 2);
  int64_t shape[4];
  switch (call->operation = (int)below(in, OPERATION_COUNT)) {
  case APPEND: {
    nib_append_desc *d = &call->as.append;
    struct spec rows = SPEC(half(in), ANYTHING, s->rows, s->heads, s->dim);
    *d = (nib_append_desc){ .append_key = argument(in, rows), .kv_layout = s->layout };
    d->append_value = argument(in, rows);
    d->slot_mapping = argument(in, SPEC(indices(in), SMALL_INTEGERS, s->rows));
    paged_shape(s, s->dim / 2, shape);
    d->paged_kv_cache = cache(in, NIB_UINT8, shape);
    paged_shape(s, s->dim / 16, shape);
    d->kv_cache_sf = cache(in, scale_dtype(in), shape);
    d->k_scale = scale(in);
    d->v_scale = scale(in);
    break;
  }
  case DEQUANTIZE: {
    nib_dequantize_desc *d = &call->as.dequantize;
    *d = (nib_dequantize_desc){ .kv_layout = s->layout };
    paged_shape(s, s->dim / 2, shape);
    d->paged_kv_cache = cache(in, NIB_UINT8, shape);
    paged_shape(s, s->dim / 16, shape);
    d->kv_cache_sf = cache(in, scale_dtype(in), shape);
    d->block_tables = argument(in, SPEC(indices(in), SMALL_INTEGERS, s->rows, s->columns));
    d->seq_lens = argument(in, SPEC(NIB_INT32, SMALL_INTEGERS, s->rows));
    d->k_scale = argument(in, SPEC(NIB_FLOAT32, SCALES, 1));
    d->v_scale = argument(in, SPEC(NIB_FLOAT32, SCALES, 1));
    struct spec out = SPEC(half(in), ANYTHING, s->rows, s->columns * s->page_size, s->heads, s->dim);
    d->output_k = argument(in, out);
    d->output_v = argument(in, out);
    break;
  }
  case MATERIALIZE: {
    nib_materialize_desc *d = &call->as.materialize;
    d->max_kv_len = one_in(in, 8) ? odd_number(in) : s->columns * s->page_size;
    d->split_kv_indices = one_in(in, 3);
    s->layout = NIB_HND;
    paged_shape(s, s->dim / 2, shape);
    d->k_cache = argument(in, shaped(NIB_UINT8, ANYTHING, 4, shape));
    d->v_cache = argument(in, shaped(NIB_UINT8, ANYTHING, 4, shape));
    paged_shape(s, s->dim / 16, shape);
    d->k_block_scales = argument(in, shaped(scale_dtype(in), ANYTHING, 4, shape));
    d->v_block_scales = argument(in, shaped(scale_dtype(in), ANYTHING, 4, shape));
    d->block_tables = argument(in, d->split_kv_indices ? SPEC(NIB_INT32, SMALL_INTEGERS, s->rows, 2, s->columns)
                                                       : SPEC(NIB_INT32, SMALL_INTEGERS, s->rows, s->columns));
    d->seq_lens = argument(in, SPEC(NIB_INT32, SMALL_INTEGERS, s->rows));
    int64_t pages = s->rows * s->columns;
    if ((d->has_num_pages = one_in(in, 3))) {
      d->num_pages = pages = one_in(in, 8) ? odd_number(in) : PICK(in, 0, 3, 5, 8);
      d->kv_page_indptr = argument(in, SPEC(NIB_INT32, SMALL_INTEGERS, s->rows + 1));
    }
    if (pages >= 1000) pages = 0;
    if (one_in(in, 3))
      d->out = argument(in, SPEC(NIB_FLOAT8_E4M3FN, ANYTHING, pages + 1, 2, s->heads, s->page_size, s->dim));
    break;
  }
  case ROPE_INSERT: {
    nib_rope_insert_desc *d = &call->as.rope;
    d->q_head_padded = PICK(in, 0, 8, 16, 7, -1);
    d->keep_q_unrotated = one_in(in, 3);
    d->q_inplace = one_in(in, 3);
    bool with_q = !one_in(in, 3);
    if (with_q) d->q = argument(in, SPEC(NIB_BFLOAT16, ANYTHING, s->rows, s->heads, 512));
    d->compress_ratio = PICK(in, 0, 1, 2, 3);
    d->kv = argument(in, SPEC(NIB_BFLOAT16, ANYTHING, s->rows, 512));
    d->cache = argument(in, one_in(in, 3) ? SPEC(NIB_UINT8, ANYTHING, s->pages, 1, s->page_size, 384)
                                          : SPEC(NIB_UINT8, ANYTHING, s->pages, s->page_size, 384));
    d->slot_mapping = argument(in, SPEC(indices(in), SMALL_INTEGERS, s->rows));
    d->positions = argument(in, SPEC(NIB_INT64, SMALL_INTEGERS, s->rows));
    d->cos_sin_cache = argument(in, SPEC(NIB_FLOAT32, ANYTHING, PICK(in, 4, 1, 0, 8), 64));
    break;
  }
  case SWIZZLE:
    paged_shape(s, s->dim / 16, shape);
    call->as.plain.a = argument(in, shaped(scale_dtype(in), ANYTHING, 4, shape));
    call->as.plain.inverse = one_in(in, 2);
    if (one_in(in, 2) && call->as.plain.a)
      call->as.plain.b = argument(in, shaped(nib_tensor_dtype(call->as.plain.a), ANYTHING, 4, shape));
    break;
  case QUANTIZE_CACHE: {
    nib_quantize_cache_desc *d = &call->as.quantize;
    *d = (nib_quantize_cache_desc){ .kv_layout = s->layout };
    paged_shape(s, s->dim, shape);
    struct spec spec = shaped(half(in), ANYTHING, 4, shape);
    d->k_cache = argument(in, spec);
    d->v_cache = argument(in, spec);
    if ((d->has_k_global_sf = one_in(in, 2))) d->k_global_sf = scale(in);
    if ((d->has_v_global_sf = one_in(in, 2))) d->v_global_sf = scale(in);
    break;
  }
  case MLA_DEQUANTIZE:
    call->as.plain.a = argument(in, SPEC(NIB_UINT8, ANYTHING, s->pages, s->page_size, 384));
    call->as.plain.b = argument(in, SPEC(indices(in), SMALL_INTEGERS, s->rows));
    break;
  default: {
    struct spec any = { .dtype = (nib_dtype)below(in, DTYPES), .ndim = (int32_t)below(in, 5), .contents = ANYTHING };
    for (int32_t i = 0; i < any.ndim; i++) any.shape[i] = PICK(in, 2, 3, 1, 4, 7, 0, 9);
    call->as.plain.a = make(in, &any);
    any.dtype = (nib_dtype)below(in, DTYPES);
    call->as.plain.b = argument(in, any);
    call->as.plain.number = number(in);
    call->as.plain.step = number(in);
    call->as.plain.low = odd_number(in);
    call->as.plain.high = odd_number(in);
    call->as.plain.dtype = any.dtype;
    call->as.plain.inverse = one_in(in, 4); /* one byte too many */
  }
  }
}

static struct outcome run(const struct call *call) {
  struct outcome o = { 0 };
  nib_tensor *a = call->as.plain.a, *b = call->as.plain.b;
  switch (call->operation) {
  case APPEND: {
    const nib_append_desc *d = &call->as.append;
    const nib_tensor *outputs[] = { d->paged_kv_cache.k, d->paged_kv_cache.v, d->paged_kv_cache.stacked,
                                    d->kv_cache_sf.k,    d->kv_cache_sf.v,    d->kv_cache_sf.stacked };
    memcpy(o.outputs, outputs, sizeof outputs);
    o.status = nib_append(stream, d);
    break;
  }
  case DEQUANTIZE:
    o.outputs[0] = call->as.dequantize.output_k;
    o.outputs[1] = call->as.dequantize.output_v;
    o.status = nib_dequantize(stream, &call->as.dequantize);
    break;
  case MATERIALIZE:
    o.outputs[0] = call->as.materialize.out;
    o.status = nib_materialize(stream, &call->as.materialize, &o.results[0], &o.results[1]);
    break;
  case ROPE_INSERT:
    o.outputs[0] = call->as.rope.cache;
    if (call->as.rope.q_inplace) o.outputs[1] = call->as.rope.q;
    o.status = nib_rope_insert(stream, &call->as.rope, &o.results[0]);
    break;
  case SWIZZLE:
    o.outputs[0] = b;
    o.status = nib_swizzle_v_scales(stream, a, call->sizes.layout, call->as.plain.inverse, b, &o.results[0]);
    break;
  case QUANTIZE_CACHE: {
    nib_quantized_cache out = { 0 };
    o.status = nib_quantize_cache(stream, &call->as.quantize, &out);
    nib_tensor *results[] = { out.k, out.v, out.k_sf, out.v_sf, out.k_scale, out.v_scale };
    memcpy(o.results, results, sizeof results);
    break;
  }
  case MLA_DEQUANTIZE: o.status = nib_mla_dequantize(stream, a, b, &o.results[0]); break;
  case ROPE_TABLE: {
    int64_t positions = call->as.plain.low;
    if (positions > 1000 && positions <= (int64_t)1 << 31) positions = 1000; /* a table that takes less long */
    o.status = nib_rope_table(stream, positions, call->as.plain.number.real, call->as.plain.dtype, &o.results[0]);
    break;
  }
  default:
    if (!a || (!b && call->operation == COPY)) {
      o.status = NIB_TIMEOUT; /* not called: these take no NULL */
      break;
    }
    o.outputs[0] = a;
    if (call->operation == COPY) o.status = nib_tensor_copy(stream, a, b);
    if (call->operation == FILL) o.status = nib_tensor_fill(stream, a, call->as.plain.number);
    if (call->operation == ARANGE) o.status = nib_tensor_arange(stream, a, call->as.plain.number, call->as.plain.step);
    if (call->operation == NORMAL) o.status = nib_tensor_random_normal(stream, a, 7);
    if (call->operation == INTEGER)
      o.status = nib_tensor_random_integer(stream, a, 7, call->as.plain.low, call->as.plain.high);
    if (call->operation == PERMUTATION) o.status = nib_tensor_random_permutation(stream, a, 7);
    if (call->operation == WRITE) {
      size_t bytes = (size_t)nib_tensor_numel(a) * nib_dtype_bytes(nib_tensor_dtype(a));
      void *data =
        bytes < 8 * MOST_BYTES ? calloc(1, bytes + 1) : NULL; /* of what is wide it is refused before it is read */
      o.status = nib_tensor_write(stream, a, data, bytes + (size_t)call->as.plain.inverse);
      free(data);
    }
  }
  return o;
}

/* ---- What must hold -------------------------------------------------------------------------------------------- */

static void check_storages(const struct outcome *o) {
  for (int k = 0; k < storage_count; k++) {
    struct storage *storage = &storages[k];
    bool may_change = false;
    for (int i = 0; o->status == NIB_OK && i < 8; i++)
      may_change |= o->outputs[i] && storage_of(o->outputs[i]) == storage;
    for (size_t i = 0; i < storage->size; i++)
      CHECK(storage->data[i] == storage->before[i] || (may_change && storage->owned[i]));
  }
}

/* An output whose elements share bytes, or that is there twice, is refused. */
static void check_outputs(const struct outcome *o) {
  for (int i = 0; o->status == NIB_OK && i < 8; i++)
    for (int k = 0; o->outputs[i] && k < tensor_count; k++) {
      if (tensors[k] != o->outputs[i] || nib_tensor_numel(tensors[k]) == 0) continue;
      CHECK(!repeats[k]);
      for (int j = 0; j < i; j++) CHECK(o->outputs[j] != o->outputs[i]);
    }
}

static void release_results(struct outcome *o) {
  for (int i = 0; i < 6; i++) {
    CHECK(o->status == NIB_OK || !o->results[i]);
    nib_tensor_release(o->results[i]);
  }
}

static void try_eagerly(const struct call *call) {
  struct outcome o = run(call);
  CHECK(o.status == NIB_OK || o.status == NIB_INVALID || o.status == NIB_MEMORY || o.status == NIB_TIMEOUT);
  if (o.status == NIB_INVALID || o.status == NIB_MEMORY) check_message(runtime);
  nib_status waited = nib_device_synchronize(device, NIB_UNLIMITED);
  CHECK(waited == NIB_OK || waited == NIB_FAULT);
  if (waited == NIB_FAULT) check_message(runtime);
  CHECK(nib_device_synchronize(device, NIB_UNLIMITED) == NIB_OK);
  poison_gaps(false);
  check_storages(&o);
  check_outputs(&o);
  release_results(&o);
}

/* Recording does nothing; the graph, replayed twice, does what the call would. */
static void try_captured(const struct call *call) {
  nib_graph *graph = NULL;
  CHECK(nib_capture_begin(stream, NIB_CAPTURE_RELAXED) == NIB_OK);
  struct outcome o = run(call);
  CHECK(o.status == NIB_OK || o.status == NIB_INVALID || o.status == NIB_MEMORY || o.status == NIB_TIMEOUT ||
        o.status == NIB_CAPTURING);
  CHECK(nib_capture_end(stream, &graph, NULL) == NIB_OK);
  poison_gaps(false);
  check_storages(&(struct outcome){ .status = NIB_INVALID });
  poison_gaps(true);
  for (int i = 0; i < 2; i++) CHECK(nib_graph_replay(graph, stream) == NIB_OK);
  nib_status waited = nib_device_synchronize(device, NIB_UNLIMITED);
  CHECK(waited == NIB_OK || waited == NIB_FAULT);
  poison_gaps(false);
  check_storages(&o);
  release_results(&o);
  nib_graph_release(graph);
}

/* Views of anything stay inside the storage. */
static void try_views(struct input *in) {
  struct spec spec = { .dtype = (nib_dtype)below(in, DTYPES), .ndim = (int32_t)below(in, 5), .contents = ANYTHING };
  for (int32_t i = 0; i < spec.ndim; i++) spec.shape[i] = PICK(in, 2, 3, 1, 4, 7, 0, 9);
  nib_tensor *tensor = make(in, &spec);
  for (int step = 0; tensor && step < 8 && tensor_count < MOST_TENSORS; step++) {
    struct storage *storage = &storages[0];
    int64_t shape[NIB_MAX_NDIM + 1], stride[NIB_MAX_NDIM + 1];
    int32_t ndim = (int32_t)below(in, NIB_MAX_NDIM + 2);
    for (int32_t i = 0; i <= NIB_MAX_NDIM; i++) {
      shape[i] = one_in(in, 6) ? odd_number(in) : PICK(in, 0, 1, 2, 3, 4, -1, 6);
      stride[i] = one_in(in, 6) ? odd_number(in) : PICK(in, 0, 1, 2, 3, 4, -1, 6);
    }
    if (ndim > NIB_MAX_NDIM) ndim = one_in(in, 2) ? NIB_MAX_NDIM + 1 : -1;
    nib_tensor *view = NULL;
    nib_status status = NIB_OK;
    switch (below(in, 7)) {
    case 0: status = nib_tensor_narrow(tensor, shape[0], shape[1], shape[2], &view); break;
    case 1: status = nib_tensor_select(tensor, shape[0], shape[1], &view); break;
    case 2: status = nib_tensor_view(tensor, ndim, shape, &view); break;
    case 3: status = nib_tensor_permute(tensor, ndim, shape, &view); break;
    case 4: status = nib_tensor_expand(tensor, ndim, shape, &view); break;
    case 5: status = nib_tensor_as_strided(tensor, ndim, shape, stride, odd_number(in), &view); break;
    default: status = nib_tensor_reinterpret(tensor, (nib_dtype)below(in, DTYPES + 1), &view);
    }
    CHECK((status == NIB_OK) == (view != NULL));
    if (status != NIB_OK) {
      CHECK(status == NIB_INVALID);
      check_message(runtime);
      continue;
    }
    tensors[tensor_count++] = view;
    if (nib_tensor_numel(view) > 0) {
      __int128 last = (unsigned char *)nib_tensor_data(view) - storage->data,
               item = (__int128)nib_dtype_bytes(nib_tensor_dtype(view));
      CHECK(last >= 0);
      for (int32_t i = 0; i < nib_tensor_ndim(view); i++) {
        CHECK(nib_tensor_shape(view)[i] > 0 && nib_tensor_stride(view)[i] >= 0);
        last += (__int128)(nib_tensor_shape(view)[i] - 1) * nib_tensor_stride(view)[i] * item;
      }
      CHECK(last + item <= (__int128)storage->size);
    }
    tensor = view;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!runtime) {
    nib_config config = { .threads = 1, .memory_cap = 1 << 26 };
    CHECK(nib_runtime_create(&config, &runtime) == NIB_OK);
    device = nib_device_at(runtime, 0);
    stream = nib_device_default_stream(device);
  }
  struct input in = { data, data + size };
  uint32_t how = below(&in, 8);
  if (how == 7) {
    try_views(&in);
  } else {
    struct call call;
    memset(&call, 0, sizeof call);
    prepare(&in, &call);
    poison_gaps(true);
    if (how >= 5) try_captured(&call);
    else try_eagerly(&call);
  }
  release_all();
  CHECK(nib_tick(runtime, NIB_UNLIMITED) == NIB_OK && nib_device_memory(device).reserved_bytes == 0);
  return 0;
}
