/* The safetensors format: the length of the header (8 bytes), the header in JSON, the elements of all tensors. The
 * header is {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} and may have strings under
 * "__metadata__". Offsets count from the end of the header. The tensors fill the rest of the file without gaps. */
#include <stdio.h>
#include <string.h>

#include "safetensors.h"

struct nib_safetensors {
  nib_runtime *rt;
  int file;
  char *header; /* names and dtypes point into it */
  size_t header_bytes;
  nib_safetensors_entry *entries;
  int32_t count, capacity;
};

const struct nib_stored nib_stored_types[NIB_STORED_TYPES] = {
  { "F32", 32, NIB_FLOAT32 },
  { "F16", 16, NIB_FLOAT16 },
  { "BF16", 16, NIB_BFLOAT16 },
  { "F8_E4M3", 8, NIB_FLOAT8_E4M3FN },
  { "U8", 8, NIB_UINT8 },
  { "I8", 8, NIB_INT8 },
  { "U16", 16, NIB_UINT16 },
  { "I32", 32, NIB_INT32 },
  { "I64", 64, NIB_INT64 },
  { "F64", 64, NIB_FLOAT32 }, /* rounded to float32 */
  { "BOOL", 8, NIB_UINT8 },
  { "I16", 16, NIB_DTYPE_NONE },
  { "U32", 32, NIB_DTYPE_NONE },
  { "U64", 64, NIB_DTYPE_NONE },
  { "C64", 64, NIB_DTYPE_NONE },
  { "F8_E5M2", 8, NIB_DTYPE_NONE },
  { "F8_E8M0", 8, NIB_DTYPE_NONE },
  { "F8_E4M3FNUZ", 8, NIB_DTYPE_NONE },
  { "F8_E5M2FNUZ", 8, NIB_DTYPE_NONE },
  { "F6_E2M3", 6, NIB_DTYPE_NONE },
  { "F6_E3M2", 6, NIB_DTYPE_NONE },
  { "F4", 4, NIB_DTYPE_NONE },
};

static const struct nib_stored *find_stored(const char *name) {
  for (int i = 0; i < NIB_STORED_TYPES; i++)
    if (strcmp(nib_stored_types[i].name, name) == 0) return &nib_stored_types[i];
  return NULL;
}

/* ---- Order of entries ------------------------------------------------------------------------------------------ */

static int by_name(const nib_safetensors_entry *a, const nib_safetensors_entry *b) { return strcmp(a->name, b->name); }

static int by_place(const nib_safetensors_entry *a, const nib_safetensors_entry *b) {
  if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
  if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
  return by_name(a, b);
}

static void sift(nib_safetensors_entry *entries, int32_t root, int32_t count, nib_entry_order *order) {
  nib_safetensors_entry entry = entries[root];
  for (int32_t child; (child = 2 * root + 1) < count; root = child) {
    if (child + 1 < count && order(&entries[child], &entries[child + 1]) < 0) child++;
    if (order(&entry, &entries[child]) >= 0) break;
    entries[root] = entries[child];
  }
  entries[root] = entry;
}

/* Heap sort. qsort may allocate memory without the host's allocator. */
void nib_entries_sort(nib_safetensors_entry *entries, int32_t count, nib_entry_order *order) {
  for (int32_t i = count / 2 - 1; i >= 0; i--) sift(entries, i, count, order);
  for (int32_t last = count - 1; last > 0; last--) {
    nib_safetensors_entry largest = entries[0];
    entries[0] = entries[last];
    entries[last] = largest;
    sift(entries, 0, last, order);
  }
}

const char *nib_entries_duplicate(nib_safetensors_entry *entries, int32_t count) {
  nib_entries_sort(entries, count, by_name);
  for (int32_t i = 1; i < count; i++)
    if (by_name(&entries[i - 1], &entries[i]) == 0) return entries[i].name;
  return NULL;
}

/* ---- The header ------------------------------------------------------------------------------------------------ */

struct parser {
  nib_runtime *rt;
  char *start, *at, *end;
  nib_status status;
};

static void damaged(struct parser *p, const char *expected) {
  if (p->status != NIB_OK) return;
  char shown[32];
  size_t n = 0;
  for (; n < sizeof shown - 1 && p->at + n < p->end; n++)
    shown[n] = p->at[n] >= ' ' && p->at[n] <= '~' ? p->at[n] : '?';
  shown[n] = 0;
  p->status = nib_fail(p->rt, NIB_FORMAT, "load: file: expected %s at byte %zu of the safetensors header, got \"%s\"",
                       expected, (size_t)(p->at - p->start), shown);
}

static void skip_space(struct parser *p) {
  while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r')) p->at++;
}

static bool accept(struct parser *p, char token) {
  skip_space(p);
  if (p->status != NIB_OK || p->at == p->end || *p->at != token) return false;
  p->at++;
  return true;
}

static void expect(struct parser *p, char token) {
  const char expected[] = { token, 0 };
  if (!accept(p, token)) damaged(p, expected);
}

size_t nib_utf8_length(const char *text, size_t length) {
  const unsigned char *c = (const unsigned char *)text;
  if (length == 0) return 0;
  size_t n = c[0] < 0x80                    ? 1
             : c[0] >= 0xC2 && c[0] <= 0xDF ? 2
             : (c[0] & 0xF0) == 0xE0        ? 3
             : c[0] >= 0xF0 && c[0] <= 0xF4 ? 4
                                            : 0;
  if (n == 0 || n > length) return 0;
  for (size_t i = 1; i < n; i++)
    if ((c[i] & 0xC0) != 0x80) return 0;
  if (n > 2) {
    unsigned first = (unsigned)(c[0] & 0x0F) << 6 | (c[1] & 0x3F);
    if (n == 3 && (first < 0x20 || (first >= 0x360 && first < 0x380))) return 0; /* overlong, or a surrogate */
    if (n == 4 && ((c[0] & 7) << 6 | (c[1] & 0x3F)) < 0x10) return 0;
    if (n == 4 && c[0] == 0xF4 && c[1] > 0x8F) return 0;
  }
  return n;
}

static size_t utf8_encode(unsigned code, char *out) {
  if (code < 0x80) {
    out[0] = (char)code;
    return 1;
  }
  size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  static const unsigned char lead[] = { 0, 0, 0xC0, 0xE0, 0xF0 };
  for (size_t i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
  out[0] = (char)(lead[n] | code);
  return n;
}

/* Reads four hexadecimal digits. On an error p->at stays at the wrong character. */
static unsigned parse_hex(struct parser *p) {
  unsigned code = 0;
  for (int i = 0; i < 4; i++, p->at++) {
    char c = p->at < p->end ? *p->at : 0;
    int digit = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
    if (digit < 0) {
      damaged(p, "four hexadecimal digits");
      return 0;
    }
    code = code << 4 | (unsigned)digit;
  }
  return code;
}

/* Decodes an escape after its backslash. The result is never longer than the escape. */
static size_t parse_escape(struct parser *p, char *out) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  const char *letter = p->at < p->end && *p->at ? strchr(letters, *p->at) : NULL;
  if (letter) {
    p->at++;
    *out = meanings[letter - letters];
    return 1;
  }
  if (p->at == p->end || *p->at != 'u') {
    damaged(p, "an escape of JSON");
    return 0;
  }
  p->at++;
  unsigned code = parse_hex(p);
  if (code >= 0xD800 && code < 0xDC00 && p->end - p->at >= 2 && p->at[0] == '\\' && p->at[1] == 'u') {
    p->at += 2;
    unsigned low = parse_hex(p);
    code = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((code & 0x3FF) << 10 | (low & 0x3FF)) : 0xD800;
  }
  if (code == 0 ||
      (code >= 0xD800 && code < 0xE000)) { /* a zero would end the name; a lone surrogate is no character */
    damaged(p, "an escape that is a character");
    return 0;
  }
  return utf8_encode(code, out);
}

/* Reads a string and decodes it in place. */
static const char *parse_string(struct parser *p) {
  expect(p, '"');
  char *text = p->at, *out = text;
  while (p->status == NIB_OK && p->at < p->end && *p->at != '"') {
    if (*p->at == '\\') {
      p->at++;
      out += parse_escape(p, out);
      continue;
    }
    size_t n = (unsigned char)*p->at < ' ' ? 0 : nib_utf8_length(p->at, (size_t)(p->end - p->at));
    if (n == 0) damaged(p, "a character of UTF-8");
    for (; n > 0; n--) *out++ = *p->at++;
  }
  if (p->at == p->end) damaged(p, "the end of a string");
  if (p->status != NIB_OK) return "";
  p->at++;
  *out = 0;
  return text;
}

static int64_t parse_integer(struct parser *p) {
  skip_space(p);
  char *start = p->at;
  int64_t value = 0;
  while (p->at < p->end && *p->at >= '0' && *p->at <= '9' && value < (int64_t)1 << 58)
    value = value * 10 + (*p->at++ - '0');
  bool goes_on = p->at < p->end && strchr("0123456789.eE+-", *p->at) && *p->at;
  if (p->at == start || goes_on || (*start == '0' && p->at - start > 1)) {
    p->at = start;
    damaged(p, "an integer in 0..2^62");
  }
  return value;
}

static void parse_shape(struct parser *p, nib_safetensors_entry *entry) {
  expect(p, '[');
  if (accept(p, ']')) return;
  do {
    if (entry->ndim == NIB_MAX_NDIM) {
      damaged(p, "at most 8 dimensions");
      return;
    }
    entry->shape[entry->ndim++] = parse_integer(p);
  } while (accept(p, ','));
  expect(p, ']');
}

static void parse_offsets(struct parser *p, nib_safetensors_entry *entry) {
  expect(p, '[');
  entry->offset = (uint64_t)parse_integer(p);
  expect(p, ',');
  char *at = p->at;
  uint64_t end = (uint64_t)parse_integer(p);
  expect(p, ']');
  if (p->status == NIB_OK && end < entry->offset) {
    p->at = at;
    damaged(p, "an end that is not before the start");
  }
  entry->bytes = end - entry->offset;
}

static void parse_entry(struct parser *p, nib_safetensors_entry *entry) {
  static const char *const keys[] = { "dtype", "shape", "data_offsets" };
  unsigned seen = 0;
  expect(p, '{');
  do {
    skip_space(p);
    char *at = p->at;
    const char *key = parse_string(p);
    unsigned which = 0;
    while (which < 3 && strcmp(key, keys[which]) != 0) which++;
    if (which == 3 || seen & 1u << which) {
      p->at = at;
      damaged(p, "dtype, shape and data_offsets, once each,");
    }
    seen |= 1u << which;
    expect(p, ':');
    if (p->status != NIB_OK) return;
    if (which == 0) entry->stored = parse_string(p);
    else if (which == 1) parse_shape(p, entry);
    else parse_offsets(p, entry);
  } while (accept(p, ','));
  expect(p, '}');
  if (seen != 7) damaged(p, "dtype, shape and data_offsets before");
}

static void parse_metadata(struct parser *p) {
  expect(p, '{');
  if (accept(p, '}')) return;
  do {
    parse_string(p);
    expect(p, ':');
    parse_string(p);
  } while (accept(p, ','));
  expect(p, '}');
}

static nib_safetensors_entry *add_entry(nib_safetensors *f) {
  if (f->count == f->capacity) {
    int32_t more = f->capacity ? 2 * f->capacity : 16;
    void *larger =
      nib_reallocate(f->rt, f->entries, (size_t)f->capacity * sizeof *f->entries, (size_t)more * sizeof *f->entries);
    if (!larger) return NULL;
    f->entries = larger;
    f->capacity = more;
  }
  nib_safetensors_entry *entry = &f->entries[f->count++];
  *entry = (nib_safetensors_entry){ 0 };
  return entry;
}

static nib_status parse_header(nib_safetensors *f) {
  struct parser p = { f->rt, f->header, f->header, f->header + f->header_bytes, NIB_OK };
  bool has_metadata = false;
  if (p.at == p.end || *p.at != '{') damaged(&p, "{ at once"); /* the format allows padding only after the object */
  expect(&p, '{');
  if (!accept(&p, '}')) {
    do {
      skip_space(&p);
      char *at = p.at;
      const char *name = parse_string(&p);
      expect(&p, ':');
      if (p.status != NIB_OK) return p.status;
      if (strcmp(name, NIB_METADATA) == 0) {
        if (has_metadata) {
          p.at = at;
          damaged(&p, NIB_METADATA " once");
        }
        has_metadata = true;
        parse_metadata(&p);
        continue;
      }
      nib_safetensors_entry *entry = add_entry(f);
      if (!entry) return nib_fail_memory(f->rt, "load", f->header_bytes);
      entry->name = name;
      parse_entry(&p, entry);
    } while (accept(&p, ','));
    expect(&p, '}');
  }
  skip_space(&p);
  if (p.at != p.end) damaged(&p, "nothing after the object");
  return p.status;
}

/* ---- Opening --------------------------------------------------------------------------------------------------- */

/* Whether the shape needs exactly the entry's bytes. Does not overflow. */
static bool is_filled(const nib_safetensors_entry *entry, int bits) {
  uint64_t most = entry->bytes * 8 / (uint64_t)bits, count = 1;
  for (int32_t i = 0; i < entry->ndim; i++)
    if (entry->shape[i] == 0)
      return entry->bytes == 0 && nib_shape_fits(bits < 8 ? 1 : (size_t)bits / 8, entry->ndim, entry->shape);
  for (int32_t i = 0; i < entry->ndim; i++) {
    if ((uint64_t)entry->shape[i] > most / count) return false;
    count *= (uint64_t)entry->shape[i];
  }
  return count <= most && count * (uint64_t)bits == entry->bytes * 8;
}

/* Checks that the entries fill the `bytes` bytes after the header without gaps. Sorts them by their offset. */
static nib_status check_entries(nib_safetensors *f, uint64_t bytes) {
  const char *twice = nib_entries_duplicate(f->entries, f->count);
  if (twice) return nib_fail(f->rt, NIB_FORMAT, "load: file: expected each name once, got \"%.100s\" twice", twice);
  nib_entries_sort(f->entries, f->count, by_place);
  uint64_t at = 0;
  for (int32_t i = 0; i < f->count; i++) {
    nib_safetensors_entry *entry = &f->entries[i];
    if (entry->offset != at || entry->bytes > bytes - at)
      return nib_fail(f->rt, NIB_FORMAT,
                      "load: file: expected \"%.100s\" at byte %llu of %llu bytes of elements, got %llu..%llu",
                      entry->name, (unsigned long long)at, (unsigned long long)bytes, (unsigned long long)entry->offset,
                      (unsigned long long)(entry->offset + entry->bytes));
    const struct nib_stored *stored = find_stored(entry->stored);
    entry->dtype = stored ? stored->dtype : NIB_DTYPE_NONE;
    if (stored && !is_filled(entry, stored->bits))
      return nib_fail(f->rt, NIB_FORMAT,
                      "load: file: expected \"%.100s\" to have as many bytes as its shape needs in %s, got %llu",
                      entry->name, stored->name, (unsigned long long)entry->bytes);
    at += entry->bytes;
    entry->offset += 8 + f->header_bytes;
  }
  if (at != bytes)
    return nib_fail(f->rt, NIB_FORMAT, "load: file: expected %llu bytes of elements, got %llu", (unsigned long long)at,
                    (unsigned long long)bytes);
  return NIB_OK;
}

static nib_status open_file(nib_safetensors *f, const char *path) {
  uint64_t size = 0, length = 0;
  unsigned char prefix[8];
  nib_status status = nib_file_open(f->rt, "load", path, &f->file, &size);
  if (status != NIB_OK) return status;
  if (size < 8) return nib_fail(f->rt, NIB_FORMAT, "load: file: expected a safetensors file, got %d bytes", (int)size);
  status = nib_file_read(f->rt, "load", path, f->file, prefix, 8, 0);
  if (status != NIB_OK) return status;
  for (int i = 7; i >= 0; i--) length = length << 8 | prefix[i];
  if (length > NIB_MOST_HEADER_BYTES || length > size - 8)
    return nib_fail(
      f->rt, NIB_FORMAT,
      "load: file: expected a safetensors header that ends in the file and has at most 100 MiB, got %llu bytes",
      (unsigned long long)length);
  f->header = nib_allocate(f->rt, (size_t)length + 1);
  if (!f->header) return nib_fail_memory(f->rt, "load", (size_t)length);
  f->header_bytes = (size_t)length;
  status = nib_file_read(f->rt, "load", path, f->file, f->header, f->header_bytes, 8);
  if (status == NIB_OK) status = parse_header(f);
  return status == NIB_OK ? check_entries(f, size - 8 - length) : status;
}

static void destroy(nib_safetensors *f) {
  nib_runtime *rt = f->rt;
  nib_file_close(f->file);
  if (f->header) nib_free(rt, f->header, f->header_bytes + 1);
  nib_free(rt, f->entries, (size_t)f->capacity * sizeof *f->entries);
  nib_free(rt, f, sizeof *f);
}

nib_status nib_safetensors_open(nib_runtime *rt, const char *path, nib_safetensors **out) {
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  nib_safetensors *f = nib_allocate_zero(rt, sizeof *f);
  if (!f) return nib_fail_memory(rt, "load", sizeof *f);
  f->rt = rt;
  status = open_file(f, path);
  if (status != NIB_OK) {
    destroy(f);
    return status;
  }
  nib_handle_added(rt);
  *out = f;
  return NIB_OK;
}

void nib_safetensors_close(nib_safetensors *file) {
  if (!file) return;
  nib_runtime *rt = file->rt;
  destroy(file);
  nib_handle_removed(rt);
}

int32_t nib_safetensors_count(const nib_safetensors *file) { return file->count; }

const nib_safetensors_entry *nib_safetensors_at(const nib_safetensors *file, int32_t index) {
  return index >= 0 && index < file->count ? &file->entries[index] : NULL;
}

/* ---- One tensor ------------------------------------------------------------------------------------------------ */

nib_status nib_safetensors_find(const nib_safetensors *file, const char *name, int32_t *index) {
  for (int32_t i = 0; i < file->count; i++)
    if (name ? strcmp(file->entries[i].name, name) == 0 : file->count == 1) {
      *index = i;
      return NIB_OK;
    }
  char names[700] = "a file with a tensor";
  size_t used = 0;
  int32_t shown = 0;
  for (; shown < file->count && used + strlen(file->entries[shown].name) + 40 < sizeof names; shown++)
    used += (size_t)snprintf(names + used, sizeof names - used, "%s\"%s\"", shown ? ", " : "one of ",
                             file->entries[shown].name);
  if (shown < file->count)
    snprintf(names + used, sizeof names - used, "%s%d %s", shown ? " and " : "one of ", (int)(file->count - shown),
             shown ? "more" : "long names");
  if (!name) return nib_fail(file->rt, NIB_INVALID, "load: name: expected %s, got no name", names);
  return nib_fail(file->rt, NIB_INVALID, "load: name: expected %s, got \"%.100s\"", names, name);
}

nib_status nib_safetensors_read(nib_stream *stream, const nib_safetensors *file, int32_t index, nib_dtype as,
                                nib_tensor **out) {
  nib_runtime *rt = file->rt;
  *out = NULL;
  nib_status status = nib_check_stream(stream, "load");
  if (status == NIB_OK) status = nib_check_not_capturing(stream->device, "load");
  if (status == NIB_OK && as != NIB_DTYPE_NONE) status = nib_check_dtype(rt, "load", as);
  if (status != NIB_OK) return status;
  if (index < 0 || index >= file->count || stream->device->runtime != rt)
    return nib_fail(rt, NIB_INVALID, "load: index: expected a tensor 0..%d of a file of the stream's runtime, got %d",
                    (int)file->count - 1, (int)index);
  const nib_safetensors_entry *entry = &file->entries[index];
  const struct nib_stored *stored = find_stored(entry->stored);
  nib_dtype dtype = as == NIB_DTYPE_NONE ? entry->dtype : as;
  bool rounds = stored && strcmp(stored->name, "F64") == 0;
  if (dtype == NIB_DTYPE_NONE || !stored)
    return nib_fail(rt, NIB_FORMAT,
                    "load: file: expected \"%.100s\" to have a type of elements that tensors have, got %.20s",
                    entry->name, entry->stored);
  int64_t shape[NIB_MAX_NDIM];
  memcpy(shape, entry->shape, sizeof shape);
  int64_t *last = entry->ndim > 0 ? &shape[entry->ndim - 1] : NULL;
  if (stored->bits == 4 && as == NIB_UINT8 && last && *last % 2 == 0) *last /= 2; /* two 4-bit elements in a byte */
  else if (as != NIB_DTYPE_NONE && (rounds || nib_dtype_bytes(as) * 8 != (size_t)stored->bits))
    return nib_fail(rt, NIB_INVALID, "load: dtype: expected a dtype as large as the file's %s, got %s", stored->name,
                    nib_dtype_name(as));
  status = nib_tensor_create(stream->device, dtype, entry->ndim, shape,
                             out); /* before reading the elements, since the memory cap may refuse it */
  if (status != NIB_OK) return status;
  size_t bytes = (size_t)entry->bytes;
  unsigned char *data = nib_allocate(rt, bytes + 1);
  status = data ? nib_file_read(rt, "load", entry->name, file->file, data, bytes, entry->offset)
                : nib_fail_memory(rt, "load", bytes);
  if (status == NIB_OK && rounds) {
    nib_round_f64(data, bytes / 8);
    bytes /= 2;
  }
  if (status == NIB_OK) status = nib_tensor_write(stream, *out, data, bytes);
  if (status != NIB_OK) {
    nib_tensor_release(*out);
    *out = NULL;
  }
  nib_free(rt, data, (size_t)entry->bytes + 1);
  return status;
}
