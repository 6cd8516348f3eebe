/* Hosts whose structs are larger or smaller than the library's: what comes in by a descriptor, and what is filled
 * in. */
#include <stddef.h>

#include "host.h"

static nib_runtime *runtime;

/* A descriptor in a host's memory, with room behind it for the fields of a newer header. */
static union {
  unsigned char bytes[1024];
  int64_t aligned;
} given;

static int logged;

static void log_it(void *user, nib_log_level level, const char *message) {
  CHECK(user == &logged);
  if (level == NIB_LOG_DEBUG && strncmp(message, "runtime: ", 9) == 0 && strstr(message, ": expected ")) logged++;
}

/* What is refused because of the descriptor's size says so; anything else is the function's own affair. */
static bool refused(nib_status status, const char *expected) {
  return status == NIB_INVALID && strstr(nib_error(runtime), ": desc: expected ") &&
         strstr(nib_error(runtime), expected);
}

#define SIZES(type, call)                                                               \
  do {                                                                                  \
    const void *pointer = given.bytes;                                                  \
    const type *desc = pointer;                                                         \
    size_t desc_bytes = sizeof(type) - 1;                                               \
    memset(&given, 0, sizeof given);                                                    \
    CHECK(refused(call, "at least "));                                                  \
    desc_bytes = 0;                                                                     \
    CHECK(refused(call, "at least "));                                                  \
    for (desc_bytes = sizeof(type) + 1; desc_bytes <= sizeof given; desc_bytes += 31) { \
      CHECK(!refused(call, ""));                                                        \
      given.bytes[desc_bytes - 1] = 7;                                                  \
      CHECK(refused(call, "0 in fields that this version"));                            \
      given.bytes[desc_bytes - 1] = 0;                                                  \
    }                                                                                   \
    desc_bytes = sizeof(type);                                                          \
    CHECK(!refused(call, ""));                                                          \
    desc = NULL;                                                                        \
    CHECK(refused(call, "got NULL"));                                                   \
  } while (0)

static void configs(void) {
  nib_config *config = (nib_config *)(void *)given.bytes;
  nib_runtime *made = NULL;
  memset(&given, 0, sizeof given);
  config->log = log_it;
  config->user = &logged;
  OK(NULL, nib_runtime_create_sized(config, sizeof given, &made)); /* a newer host that asks for nothing new */
  nib_runtime_close(made);
  given.bytes[sizeof(nib_config) + 8] = 1;
  CHECK(nib_runtime_create_sized(config, sizeof given, &made) == NIB_INVALID && !made && logged == 1);
  CHECK(nib_runtime_create_sized(config, sizeof(nib_config) - 4, &made) == NIB_INVALID && !made);
  CHECK(nib_runtime_create_sized(config, 0, &made) == NIB_INVALID && !made);
  config->threads = -1;
  CHECK(nib_runtime_create(config, &made) == NIB_INVALID && !made && logged == 2);
  OK(NULL, nib_runtime_create_sized(NULL, 0, &made));
  nib_runtime_close(made);
}

int main(void) {
  configs();
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_device *device = device_of(runtime);
  nib_stream *stream = nib_device_default_stream(device);
  nib_tensor *a = NULL, *b = NULL;
  SIZES(nib_append_desc, nib_append_sized(stream, desc, desc_bytes));
  SIZES(nib_materialize_desc, nib_materialize_sized(stream, desc, desc_bytes, &a, &b));
  SIZES(nib_dequantize_desc, nib_dequantize_sized(stream, desc, desc_bytes));
  SIZES(nib_rope_insert_desc, nib_rope_insert_sized(stream, desc, desc_bytes, &a));
  SIZES(nib_wrap_desc, nib_tensor_wrap_sized(device, desc, desc_bytes, &a));
  if (strcmp(device_name(), "cpu") != 0) SIZES(nib_import_desc, nib_tensor_import_sized(device, desc, desc_bytes, &a));
  nib_quantized_cache cache;
  SIZES(nib_quantize_cache_desc, nib_quantize_cache_sized(stream, desc, desc_bytes, &cache, sizeof cache));
  CHECK(!a && !b && !cache.k);

  /* What is filled in: as much as the host knows; what only the host knows is 0. */
  nib_tensor *tensor = make(device, NIB_FLOAT32, 1000);
  nib_memory_info whole = nib_device_memory(device);
  CHECK(whole.used_bytes >= 4000 && whole.reserved_bytes >= whole.used_bytes &&
        whole.peak_bytes >= whole.reserved_bytes);
  nib_memory_info *info = (nib_memory_info *)(void *)given.bytes;
  memset(&given, 0xAA, sizeof given);
  nib_device_memory_sized(device, info, offsetof(nib_memory_info, peak_bytes));
  CHECK(info->used_bytes == whole.used_bytes && info->reserved_bytes == whole.reserved_bytes);
  CHECK(given.bytes[offsetof(nib_memory_info, peak_bytes)] == 0xAA);
  nib_device_memory_sized(device, info, sizeof given);
  CHECK(memcmp(info, &whole, sizeof whole) == 0);
  for (size_t i = sizeof whole; i < sizeof given; i++) CHECK(given.bytes[i] == 0);
  nib_tensor_release(tensor);

  int64_t shape[] = { 1, 1, 4, 64 };
  nib_tensor *pages = NULL;
  OK(runtime, nib_tensor_create(device, NIB_BFLOAT16, 4, shape, &pages));
  OK(runtime, nib_tensor_fill(stream, pages, NIB_REAL(1)));
  nib_quantize_cache_desc desc = { .k_cache = pages, .v_cache = pages, .kv_layout = NIB_HND };
  nib_quantized_cache *made = (nib_quantized_cache *)(void *)given.bytes;
  memset(&given, 0xAA, sizeof given);
  CHECK_STATUS(NIB_INVALID, runtime, nib_quantize_cache_sized(stream, &desc, sizeof desc, made, sizeof *made - 8));
  CHECK(strstr(nib_error(runtime), ": out: expected at least "));
  for (size_t i = 0; i < sizeof given; i++) CHECK(given.bytes[i] == 0xAA); /* that is no struct of results */
  desc.v_cache = NULL;
  CHECK_STATUS(NIB_INVALID, runtime, nib_quantize_cache_sized(stream, &desc, sizeof desc, made, sizeof *made));
  CHECK(!made->k && !made->v && !made->k_sf && !made->v_sf && !made->k_scale && !made->v_scale);
  CHECK(given.bytes[sizeof *made] == 0xAA);
  desc.v_cache = pages;
  OK(runtime, nib_quantize_cache_sized(stream, &desc, sizeof desc, made, sizeof given));
  CHECK(made->k && made->v && made->k_sf && made->v_sf && made->k_scale && made->v_scale);
  for (size_t i = sizeof *made; i < sizeof given; i++) CHECK(given.bytes[i] == 0);
  nib_tensor *made_tensors[] = { made->k, made->v, made->k_sf, made->v_sf, made->k_scale, made->v_scale, pages };
  for (size_t i = 0; i < sizeof made_tensors / sizeof *made_tensors; i++) nib_tensor_release(made_tensors[i]);
  nib_runtime_close(runtime);
  return 0;
}
