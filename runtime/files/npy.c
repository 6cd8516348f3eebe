/* NumPy's .npy format, versions 1 to 3: "\x93NUMPY", version, header length, a Python dictionary, the elements. */
#include <stdio.h>
#include <string.h>

#include "files.h"

#define MOST_HEADER_BYTES (1 << 20)

static const unsigned char magic[6] = { 0x93, 'N', 'U', 'M', 'P', 'Y' };

/* ---- The header ------------------------------------------------------------------------------------------------ */

struct header {
  nib_dtype dtype; /* NIB_DTYPE_NONE: the caller must give `as` */
  int32_t item;    /* bytes of an element in the file */
  char code[3];
  bool is_f8; /* float64 elements, which are rounded to float32 */
  bool fortran_order;
  int32_t ndim;
  int64_t shape[NIB_MAX_NDIM];
};

struct parser {
  nib_runtime *rt;
  const char *at, *end;
  nib_status status;
};

static void damaged(struct parser *p, const char *expected, const char *got, size_t length) {
  if (p->status != NIB_OK) return;
  char shown[32];
  size_t n = length < sizeof shown - 1 ? length : sizeof shown - 1;
  for (size_t i = 0; i < n; i++) shown[i] = got[i] >= ' ' && got[i] <= '~' ? got[i] : '?';
  shown[n] = 0;
  p->status = nib_fail(p->rt, NIB_FORMAT, "load: file: expected %s in the .npy header, got \"%s\"", expected, shown);
}

static void skip_space(struct parser *p) {
  while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n')) p->at++;
}

static bool accept(struct parser *p, const char *token) {
  size_t length = strlen(token);
  skip_space(p);
  if (p->status != NIB_OK || (size_t)(p->end - p->at) < length || memcmp(p->at, token, length) != 0) return false;
  p->at += length;
  return true;
}

static void expect(struct parser *p, const char *token) {
  if (!accept(p, token)) damaged(p, token, p->at, (size_t)(p->end - p->at));
}

/* Reads a quoted string. It has no escapes, since NumPy writes none here. */
static size_t parse_string(struct parser *p, const char **text) {
  skip_space(p);
  const char *start = p->at;
  if (p->status != NIB_OK || start == p->end || (*start != '\'' && *start != '"')) {
    damaged(p, "a string", start, (size_t)(p->end - start));
    return 0;
  }
  const char *close = memchr(start + 1, *start, (size_t)(p->end - start - 1));
  if (!close) {
    damaged(p, "the end of a string", start, (size_t)(p->end - start));
    return 0;
  }
  *text = start + 1;
  p->at = close + 1;
  return (size_t)(close - start - 1);
}

static void parse_descr(struct parser *p, struct header *h) {
  static const struct {
    const char *code;
    nib_dtype dtype;
  } codes[] = { { "f4", NIB_FLOAT32 },    { "f2", NIB_FLOAT16 },    { "f8", NIB_FLOAT32 },    { "u1", NIB_UINT8 },
                { "i1", NIB_INT8 },       { "u2", NIB_UINT16 },     { "i4", NIB_INT32 },      { "i8", NIB_INT64 },
                { "b1", NIB_UINT8 },      { "i2", NIB_DTYPE_NONE }, { "u4", NIB_DTYPE_NONE }, { "u8", NIB_DTYPE_NONE },
                { "c8", NIB_DTYPE_NONE }, { "V1", NIB_DTYPE_NONE }, { "V2", NIB_DTYPE_NONE }, { "V4", NIB_DTYPE_NONE },
                { "V8", NIB_DTYPE_NONE } };
  const char *text = NULL;
  size_t length = parse_string(p, &text);
  if (p->status != NIB_OK) return;
  bool order =
    length == 3 && (text[0] == '<' || text[0] == '=' || (text[0] == '|' && (text[2] == '1' || text[1] == 'V')));
  for (size_t i = 0; order && i < sizeof codes / sizeof *codes; i++)
    if (memcmp(text + 1, codes[i].code, 2) == 0) {
      h->dtype = codes[i].dtype;
      h->item = text[2] - '0';
      memcpy(h->code, codes[i].code, sizeof h->code);
      h->is_f8 = text[1] == 'f' && text[2] == '8';
      return;
    }
  damaged(p, "descr to be one of f4 f2 f8 u1 i1 u2 i4 i8 b1, or (with a dtype) i2 u4 u8 c8 V1 V2 V4 V8, little endian,",
          text, length);
}

static void parse_shape(struct parser *p, struct header *h) {
  expect(p, "(");
  while (p->status == NIB_OK && !accept(p, ")")) {
    skip_space(p);
    const char *start = p->at;
    int64_t size = 0;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9' && size < (int64_t)1 << 58)
      size = size * 10 + (*p->at++ - '0');
    if (p->at == start || (p->at < p->end && *p->at >= '0' && *p->at <= '9') || h->ndim == NIB_MAX_NDIM) {
      damaged(p, h->ndim == NIB_MAX_NDIM ? "at most 8 dimensions" : "a size below 2^62", start,
              (size_t)(p->end - start));
      return;
    }
    h->shape[h->ndim++] = size;
    if (!accept(p, ",")) {
      expect(p, ")");
      return;
    }
  }
}

static void parse_header(struct parser *p, struct header *h) {
  unsigned seen = 0;
  expect(p, "{");
  while (p->status == NIB_OK && !accept(p, "}")) {
    const char *key = NULL;
    size_t length = parse_string(p, &key);
    unsigned bit = 0;
    expect(p, ":");
    if (p->status != NIB_OK) return;
    if (length == 5 && memcmp(key, "descr", 5) == 0) {
      bit = 1;
      parse_descr(p, h);
    } else if (length == 13 && memcmp(key, "fortran_order", 13) == 0) {
      bit = 2;
      h->fortran_order = accept(p, "True");
      if (!h->fortran_order) expect(p, "False");
    } else if (length == 5 && memcmp(key, "shape", 5) == 0) {
      bit = 4;
      if (!(seen & bit)) parse_shape(p, h);
    }
    if (bit == 0 || seen & bit) damaged(p, "descr, fortran_order and shape, once each,", key, length);
    seen |= bit;
    if (p->status == NIB_OK && !accept(p, ",")) {
      expect(p, "}");
      break;
    }
  }
  if (p->status == NIB_OK && seen != 7) damaged(p, "descr, fortran_order and shape", "", 0);
}

/* ---- Loading --------------------------------------------------------------------------------------------------- */

void nib_round_f64(unsigned char *data, size_t count) {
  for (size_t i = 0; i < count; i++) {
    double wide;
    memcpy(&wide, data + 8 * i, 8);
    nib_element_from_number(NIB_FLOAT32, NIB_REAL(wide), data + 4 * i);
  }
}

/* Finds from the first 12 bytes of a file (`have` bytes if it is shorter) where the dictionary and the elements begin.
 */
static nib_status find_header(nib_runtime *rt, const unsigned char *data, size_t have, uint64_t size, size_t *start,
                              size_t *elements) {
  if (have < 10 || memcmp(data, magic, sizeof magic) != 0)
    return nib_fail(rt, NIB_FORMAT, "load: file: expected a .npy file, got one that does not begin as such");
  if (data[6] < 1 || data[6] > 3)
    return nib_fail(rt, NIB_FORMAT, "load: file: expected .npy version 1, 2 or 3, got %d.%d", data[6], data[7]);
  size_t length = data[8] | (size_t)data[9] << 8;
  *start = data[6] == 1 ? 10 : 12;
  if (data[6] > 1 && have >= 12) length |= (size_t)data[10] << 16 | (size_t)data[11] << 24;
  if (size < *start || size - *start < length)
    return nib_fail(rt, NIB_FORMAT, "load: file: expected a header of %zu bytes, got the end of the file after %llu",
                    length, (unsigned long long)size);
  if (length > MOST_HEADER_BYTES)
    return nib_fail(rt, NIB_FORMAT, "load: file: expected a .npy header of at most 1 MiB, got %zu bytes", length);
  *elements = *start + length;
  return NIB_OK;
}

/* Reads the dictionary. Checks that its shape needs `bytes` bytes and that its type can be read as `as`. */
static nib_status read_header(nib_runtime *rt, const unsigned char *text, size_t length, uint64_t bytes, nib_dtype as,
                              struct header *h) {
  struct parser p = { rt, (const char *)text, (const char *)text + length, NIB_OK };
  parse_header(&p, h);
  skip_space(&p);
  if (p.status == NIB_OK && p.at != p.end) damaged(&p, "nothing after the dictionary", p.at, (size_t)(p.end - p.at));
  if (p.status != NIB_OK) return p.status;

  uint64_t item = (uint64_t)h->item, most = bytes / item, count = 1;
  for (int32_t i = 0; i < h->ndim; i++) {
    if (h->shape[i] == 0) count = 0;
    if (count > 0 && (uint64_t)h->shape[i] > most / count) count = most + 1; /* more than fit; avoids an overflow */
    else count *= (uint64_t)h->shape[i];
  }
  if (!nib_shape_fits((size_t)item, h->ndim, h->shape))
    return nib_fail(rt, NIB_FORMAT,
                    "load: file: expected a shape of less than 2^62 bytes in the .npy header, got a larger one");
  if (count > most || count * item != bytes)
    return nib_fail(rt, NIB_FORMAT, "load: file: expected as many bytes as the shape in the header needs, got %llu",
                    (unsigned long long)bytes);
  if (as != NIB_DTYPE_NONE) {
    if (h->is_f8 || nib_dtype_bytes(as) != item)
      return nib_fail(rt, NIB_INVALID, "load: dtype: expected a dtype as large as the file's %s, got %s",
                      h->is_f8                     ? "float64"
                      : h->dtype == NIB_DTYPE_NONE ? h->code
                                                   : nib_dtype_name(h->dtype),
                      nib_dtype_name(as));
    h->dtype = as;
  }
  if (h->dtype == NIB_DTYPE_NONE)
    return nib_fail(rt, NIB_FORMAT,
                    "load: file: expected a type of elements that tensors have, or the option dtype, got %s", h->code);
  return NIB_OK;
}

/* Writes the elements to `raw`, a contiguous tensor in the file's order. May change `data`. */
static nib_status fill(nib_stream *stream, const struct header *h, nib_tensor *raw, unsigned char *data, size_t bytes) {
  if (h->is_f8) {
    nib_round_f64(data, bytes / 8);
    bytes /= 2;
  }
  return nib_tensor_write(stream, raw, data, bytes);
}

/* Creates the tensor for `fill`. In Fortran order, the first dimension varies fastest in the file. */
static nib_status create_raw(nib_stream *stream, const struct header *h, nib_tensor **raw) {
  int64_t shape[NIB_MAX_NDIM];
  for (int32_t i = 0; i < h->ndim; i++) shape[i] = h->shape[h->fortran_order ? h->ndim - 1 - i : i];
  return nib_tensor_create(stream->device, h->dtype, h->ndim, shape, raw);
}

/* Turns the filled `raw` into the tensor that the header describes. Takes over the reference to `raw`. */
static nib_status finish(nib_stream *stream, const struct header *h, nib_tensor *raw, nib_status status,
                         nib_tensor **out) {
  if (status == NIB_OK && (!h->fortran_order || h->ndim < 2)) {
    *out = raw;
    return NIB_OK;
  }
  int64_t dims[NIB_MAX_NDIM];
  nib_tensor *view = NULL, *result = NULL;
  for (int32_t i = 0; i < h->ndim; i++) dims[i] = h->ndim - 1 - i;
  if (status == NIB_OK) status = nib_tensor_permute(raw, h->ndim, dims, &view);
  if (status == NIB_OK) status = nib_tensor_create(stream->device, h->dtype, h->ndim, h->shape, &result);
  if (status == NIB_OK) status = nib_tensor_copy(stream, result, view);
  nib_tensor_release(raw);
  nib_tensor_release(view);
  if (status != NIB_OK) nib_tensor_release(result);
  else *out = result;
  return status;
}

static nib_status check_load(nib_stream *stream, nib_dtype as) {
  nib_status status = nib_check_stream(stream, "load");
  if (status == NIB_OK) status = nib_check_not_capturing(stream->device, "load");
  return status == NIB_OK && as != NIB_DTYPE_NONE ? nib_check_dtype(stream->device->runtime, "load", as) : status;
}

nib_status nib_npy_parse(nib_stream *stream, const void *data, size_t bytes, nib_dtype as, nib_tensor **out) {
  nib_runtime *rt = stream->device->runtime;
  struct header h = { 0 };
  size_t start = 0, elements = 0;
  *out = NULL;
  nib_status status = check_load(stream, as);
  if (status == NIB_OK) status = find_header(rt, data, bytes, bytes, &start, &elements);
  if (status == NIB_OK)
    status = read_header(rt, (const unsigned char *)data + start, elements - start, bytes - elements, as, &h);
  if (status != NIB_OK) return status;
  size_t size = bytes - elements;
  nib_tensor *raw = NULL;
  unsigned char *copy = nib_allocate(rt, size + 1);
  if (!copy) return nib_fail_memory(rt, "load", size);
  memcpy(copy, (const unsigned char *)data + elements, size);
  status = create_raw(stream, &h, &raw);
  if (status == NIB_OK) status = finish(stream, &h, raw, fill(stream, &h, raw, copy, size), out);
  nib_free(rt, copy, size + 1);
  return status;
}

/* Reads the header of an open file. */
static nib_status open_npy(nib_runtime *rt, const char *path, int file, uint64_t size, nib_dtype as, struct header *h,
                           size_t *elements) {
  unsigned char first[12] = { 0 };
  size_t have = size < sizeof first ? (size_t)size : sizeof first, start = 0;
  nib_status status = nib_file_read(rt, "load", path, file, first, have, 0);
  if (status == NIB_OK) status = find_header(rt, first, have, size, &start, elements);
  if (status != NIB_OK) return status;
  size_t length = *elements - start;
  unsigned char *text = nib_allocate(rt, length + 1);
  if (!text) return nib_fail_memory(rt, "load", length);
  status = nib_file_read(rt, "load", path, file, text, length, start);
  if (status == NIB_OK) status = read_header(rt, text, length, size - *elements, as, h);
  nib_free(rt, text, length + 1);
  return status;
}

nib_status nib_npy_load(nib_stream *stream, const char *path, nib_dtype as, nib_tensor **out) {
  nib_runtime *rt = stream->device->runtime;
  struct header h = { 0 };
  uint64_t size = 0;
  size_t elements = 0;
  int file = -1;
  nib_tensor *raw = NULL;
  *out = NULL;
  nib_status status = check_load(stream, as);
  if (status == NIB_OK) status = nib_file_open(rt, "load", path, &file, &size);
  if (status == NIB_OK) status = open_npy(rt, path, file, size, as, &h, &elements);
  if (status == NIB_OK)
    status = create_raw(stream, &h, &raw); /* before reading the elements, since the memory cap may refuse it */
  if (status == NIB_OK) {
    size_t bytes = (size_t)(size - elements);
    unsigned char *data = nib_allocate(rt, bytes + 1);
    status = data ? nib_file_read(rt, "load", path, file, data, bytes, elements) : nib_fail_memory(rt, "load", bytes);
    if (status == NIB_OK) status = fill(stream, &h, raw, data, bytes);
    status = finish(stream, &h, raw, status, out);
    nib_free(rt, data, bytes + 1);
  }
  nib_file_close(file);
  return status;
}

/* ---- Saving ---------------------------------------------------------------------------------------------------- */

static size_t write_header(const nib_tensor *tensor, char *text, size_t size) {
  static const char *const codes[NIB_DTYPE_COUNT] = {
    [NIB_FLOAT32] = "<f4",       [NIB_FLOAT16] = "<f2", [NIB_BFLOAT16] = "<u2",
    [NIB_FLOAT8_E4M3FN] = "|u1", [NIB_UINT8] = "|u1",   [NIB_INT8] = "|i1",
    [NIB_UINT16] = "<u2",        [NIB_INT32] = "<i4",   [NIB_INT64] = "<i8",
  };
  memcpy(text, magic, sizeof magic);
  text[6] = 1;
  text[7] = 0;
  size_t used = 10;
  used += (size_t)snprintf(text + used, size - used, "{'descr': '%s', 'fortran_order': False, 'shape': (",
                           codes[tensor->dtype]);
  for (int32_t i = 0; i < tensor->ndim; i++)
    used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)tensor->shape[i]);
  used += (size_t)snprintf(text + used, size - used, "%s), }", tensor->ndim == 1 ? "," : "");
  size_t padded = (used + 1 + 63) / 64 * 64; /* so that the elements begin at a multiple of 64 */
  memset(text + used, ' ', padded - used);
  text[padded - 1] = '\n';
  text[8] = (char)((padded - 10) & 0xFF);
  text[9] = (char)((padded - 10) >> 8);
  return padded;
}

nib_status nib_npy_save(nib_tensor *tensor, const char *path) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_not_capturing(nib_tensor_device(tensor), "tensor:save");
  if (status != NIB_OK) return status;
  char header[512];
  size_t header_bytes = write_header(tensor, header, sizeof header);
  size_t bytes = (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype);
  char *data = nib_allocate(rt, bytes + 1);
  if (!data) return nib_fail_memory(rt, "tensor:save", bytes);
  status = nib_tensor_read(tensor, data, bytes, NIB_UNLIMITED);
  if (status == NIB_OK) {
    nib_writer *writer;
    status = nib_writer_open(rt, "tensor:save", path, &writer);
    if (status == NIB_OK) {
      if (nib_writer_put(writer, header, header_bytes) == NIB_OK) nib_writer_put(writer, data, bytes);
      status = nib_writer_end(writer, true);
    }
  }
  nib_free(rt, data, bytes + 1);
  return status;
}
