/* Writing safetensors files. safetensors.c describes the format. */
#include <stdio.h>
#include <string.h>

#include "safetensors.h"

/* Largest elements first, so that all elements are aligned. */
static int by_element(const nib_safetensors_entry *a, const nib_safetensors_entry *b) {
  size_t bytes_a = nib_dtype_bytes(a->dtype), bytes_b = nib_dtype_bytes(b->dtype);
  return bytes_a != bytes_b ? (bytes_a > bytes_b ? -1 : 1) : strcmp(a->name, b->name);
}

/* A text that is first measured (data is NULL) and then written. */
struct text {
  char *data;
  size_t used;
};

static void put(struct text *t, const char *bytes, size_t count) {
  if (t->data) memcpy(t->data + t->used, bytes, count);
  t->used += count;
}

static void put_text(struct text *t, const char *text) { put(t, text, strlen(text)); }

static void put_integer(struct text *t, const char *before, uint64_t value) {
  char digits[24];
  put_text(t, before);
  put(t, digits, (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)value));
}

static void put_string(struct text *t, const char *string) {
  put_text(t, "\"");
  for (; *string; string++) {
    char escape[8];
    if (*string == '"' || *string == '\\') put(t, escape, (size_t)snprintf(escape, sizeof escape, "\\%c", *string));
    else if ((unsigned char)*string < ' ')
      put(t, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", (unsigned)*string));
    else put(t, string, 1);
  }
  put_text(t, "\"");
}

static void put_header(struct text *t, const nib_safetensors_entry *entries, int32_t count) {
  uint64_t at = 0;
  put_text(t, "{");
  for (int32_t i = 0; i < count; i++) {
    const nib_safetensors_entry *entry = &entries[i];
    if (i) put_text(t, ",");
    put_string(t, entry->name);
    put_text(t, ":{\"dtype\":");
    put_string(t, entry->stored);
    put_text(t, ",\"shape\":[");
    for (int32_t d = 0; d < entry->ndim; d++) put_integer(t, d ? "," : "", (uint64_t)entry->shape[d]);
    put_integer(t, "],\"data_offsets\":[", at);
    put_integer(t, ",", at += entry->bytes);
    put_text(t, "]}");
  }
  put_text(t, "}");
  while (t->used % 8 != 0) put_text(t, " ");
}

static nib_status save_check(nib_runtime *rt, int32_t count, const char *const *names, nib_tensor *const *tensors) {
  for (int32_t i = 0; i < count; i++) {
    size_t length = strlen(names[i]), at = 0, n = 1;
    for (; at < length && n > 0; at += n) n = nib_utf8_length(names[i] + at, length - at);
    if (n == 0 || strcmp(names[i], NIB_METADATA) == 0)
      return nib_fail(rt, NIB_INVALID, "save: name: expected UTF-8 other than " NIB_METADATA ", got \"%.100s\"",
                      names[i]);
    if (nib_tensor_runtime(tensors[i]) != rt)
      return nib_fail(rt, NIB_INVALID, "save: tensors: expected tensors of one runtime, got \"%.100s\" of another",
                      names[i]);
    nib_status status = nib_check_not_capturing(nib_tensor_device(tensors[i]), "save");
    if (status == NIB_OK)
      status = nib_tensor_wait(tensors[i], NIB_UNLIMITED); /* its errors come before the file is created */
    if (status != NIB_OK) return status;
  }
  return NIB_OK;
}

static nib_status save_tensor(nib_runtime *rt, nib_writer *writer, nib_tensor *tensor, size_t bytes) {
  void *data = nib_allocate(rt, bytes + 1);
  if (!data) return nib_fail_memory(rt, "save", bytes);
  nib_status status = nib_tensor_read(tensor, data, bytes, NIB_UNLIMITED);
  if (status == NIB_OK) status = nib_writer_put(writer, data, bytes);
  nib_free(rt, data, bytes + 1);
  return status;
}

/* `entries` has room for `count` entries. */
static nib_status save(nib_runtime *rt, const char *path, int32_t count, const char *const *names,
                       nib_tensor *const *tensors, nib_safetensors_entry *entries) {
  nib_status status = save_check(rt, count, names, tensors);
  if (status != NIB_OK) return status;
  for (int32_t i = 0; i < count; i++) {
    nib_safetensors_entry *entry = &entries[i];
    *entry = (nib_safetensors_entry){ .name = names[i], .dtype = tensors[i]->dtype, .ndim = tensors[i]->ndim };
    for (int t = NIB_STORED_TYPES - 1; t >= 0; t--) /* the first type of a dtype is the last to be set */
      if (nib_stored_types[t].dtype == entry->dtype) entry->stored = nib_stored_types[t].name;
    memcpy(entry->shape, tensors[i]->shape, sizeof entry->shape);
    entry->bytes = (uint64_t)nib_tensor_numel(tensors[i]) * nib_dtype_bytes(entry->dtype);
    entry->offset = (uint64_t)i; /* the tensor's index, for now; offsets are known after sorting */
  }
  const char *twice = nib_entries_duplicate(entries, count);
  if (twice) return nib_fail(rt, NIB_INVALID, "save: name: expected each name once, got \"%.100s\" twice", twice);
  nib_entries_sort(entries, count, by_element);
  struct text header = { NULL, 0 };
  put_header(&header, entries, count);
  size_t length = header.used;
  if (length > NIB_MOST_HEADER_BYTES)
    return nib_fail(rt, NIB_INVALID, "save: tensors: expected names of 100 MiB at most, got more");
  header = (struct text){ nib_allocate(rt, length + 8), 8 };
  if (!header.data) return nib_fail_memory(rt, "save", length);
  for (int i = 0; i < 8; i++) header.data[i] = (char)((uint64_t)length >> 8 * i & 0xFF);
  put_header(&header, entries, count);

  nib_writer *writer;
  status = nib_writer_open(rt, "save", path, &writer);
  if (status == NIB_OK) {
    status = nib_writer_put(writer, header.data, length + 8);
    for (int32_t i = 0; i < count && status == NIB_OK; i++)
      status = save_tensor(rt, writer, tensors[entries[i].offset], (size_t)entries[i].bytes);
    nib_status ended = nib_writer_end(writer, status == NIB_OK);
    if (status == NIB_OK) status = ended;
  }
  nib_free(rt, header.data, length + 8);
  return status;
}

nib_status nib_safetensors_save(nib_runtime *rt, const char *path, int32_t count, const char *const *names,
                                nib_tensor *const *tensors) {
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (count < 0) return nib_fail(rt, NIB_INVALID, "save: count: expected 0 or more tensors, got %d", (int)count);
  size_t bytes = (size_t)count * sizeof(nib_safetensors_entry) + 1;
  nib_safetensors_entry *entries = nib_allocate(rt, bytes);
  if (!entries) return nib_fail_memory(rt, "save", bytes);
  status = save(rt, path, count, names, tensors, entries);
  nib_free(rt, entries, bytes);
  return status;
}
