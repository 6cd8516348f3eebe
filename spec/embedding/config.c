/* Statuses, versions, and configurations that are refused. */
#include "host.h"

/* Numbers that are no dtype, wherever a host gives one. */
static void refuse_dtypes(nib_runtime *runtime, nib_tensor *tensor) {
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  static const int numbers[] = { -2, NIB_INT64 + 1, 1000, NIB_DTYPE_NONE };
  unsigned char bytes[8] = { 0 };
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    nib_dtype dtype = (nib_dtype)numbers[i];
    nib_tensor *none = NULL;
    CHECK(strcmp(nib_dtype_name(dtype), "?") == 0 && nib_dtype_bytes(dtype) == 0 && !nib_dtype_is_float(dtype));
    CHECK(!nib_element_from_number(dtype, NIB_INTEGER(1), bytes) && nib_element_to_number(dtype, bytes).integer == 0);
    char want[80];
    snprintf(want, sizeof want, ": dtype: expected a dtype, got %d", numbers[i]);
#define REFUSED(call)                       \
  CHECK_STATUS(NIB_INVALID, runtime, call); \
  CHECK(!none && strstr(nib_error(runtime), want))
    REFUSED(nib_tensor_create(cpu, dtype, 0, NULL, &none));
    REFUSED(nib_tensor_create_pinned(runtime, dtype, 0, NULL, &none));
    REFUSED(nib_tensor_reinterpret(tensor, dtype, &none));
    REFUSED(nib_tensor_wrap(cpu, &(nib_wrap_desc){ .dtype = dtype, .data = bytes }, &none));
    REFUSED(nib_rope_table(stream, 1, 1e4, dtype, &none));
    REFUSED(nib_peek(runtime, nib_tensor_storage(tensor), dtype, 0, 0, NULL, NULL, bytes, 1));
    if (dtype == NIB_DTYPE_NONE) continue;
    REFUSED(nib_npy_load(stream, "none.npy", dtype, &none));
    REFUSED(nib_npy_parse(stream, bytes, sizeof bytes, dtype, &none));
#undef REFUSED
  }
}

/* Counts, sizes and numbers of a kind that cannot be. */
static void refuse_numbers(nib_runtime *runtime, nib_tensor *tensor) {
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  nib_tensor *none = NULL;
  nib_stream *no_stream = NULL;
  const char *name = "x";
  const int64_t minus[2] = { -1, -1 }, one[2] = { 1, 1 };
  unsigned char bytes[8] = { 0 };
#define REFUSED(want, call)                 \
  CHECK_STATUS(NIB_INVALID, runtime, call); \
  CHECK(!none && strstr(nib_error(runtime), want))
  for (int layout = -1; layout <= 2; layout += 3) {
    char unknown[80];
    snprintf(unknown, sizeof unknown, ": kv_layout: expected NIB_NHD or NIB_HND, got %d", layout);
    REFUSED(unknown, nib_append(stream, &(nib_append_desc){ .kv_layout = (nib_layout)layout }));
    REFUSED(unknown, nib_dequantize(stream, &(nib_dequantize_desc){ .kv_layout = (nib_layout)layout }));
    REFUSED(unknown, nib_quantize_cache(stream, &(nib_quantize_cache_desc){ .kv_layout = (nib_layout)layout },
                                        &(nib_quantized_cache){ 0 }));
    REFUSED(unknown, nib_swizzle_v_scales(stream, tensor, (nib_layout)layout, false, NULL, &none));
  }
  const nib_4over6 neither = (nib_4over6)2;
  const char *wanted = ": nvfp4_4over6: expected NIB_4OVER6_OFF or NIB_4OVER6_MSE, got 2";
  REFUSED(wanted, nib_append(stream, &(nib_append_desc){ .nvfp4_4over6 = neither }));
  REFUSED(wanted, nib_quantize_cache(stream, &(nib_quantize_cache_desc){ .nvfp4_4over6 = neither },
                                     &(nib_quantized_cache){ 0 }));
  REFUSED("save: count: expected 0 or more tensors, got -1",
          nib_safetensors_save(runtime, "none.safetensors", -1, &name, &tensor));
  REFUSED("got -1", nib_tensor_create(cpu, NIB_UINT8, -1, one, &none));
  REFUSED("got -1", nib_tensor_create_pinned(runtime, NIB_UINT8, -1, one, &none));
  REFUSED("got -1", nib_tensor_create_pinned(runtime, NIB_UINT8, 1, minus, &none));
  REFUSED("got -1", nib_tensor_narrow(tensor, -1, 0, 1, &none));
  REFUSED("got -1", nib_tensor_narrow(tensor, 0, -1, 1, &none));
  REFUSED("got -1", nib_tensor_narrow(tensor, 0, 0, -1, &none));
  REFUSED("got -1", nib_tensor_select(tensor, 0, -1, &none));
  REFUSED("got -1", nib_tensor_view(tensor, -1, one, &none));
  REFUSED("got two", nib_tensor_view(tensor, 2, minus, &none));
  REFUSED("got -1", nib_tensor_permute(tensor, -1, one, &none));
  REFUSED("got -1", nib_tensor_permute(tensor, 1, minus, &none));
  REFUSED("got -1", nib_tensor_expand(tensor, -1, one, &none));
  REFUSED("got -2", nib_tensor_expand(tensor, 1, (int64_t[]){ -2 }, &none));
  REFUSED("got -1", nib_tensor_as_strided(tensor, -1, one, one, 0, &none));
  REFUSED("got -1", nib_tensor_as_strided(tensor, 1, minus, one, 0, &none));
  REFUSED("got -1", nib_tensor_as_strided(tensor, 1, one, minus, 0, &none));
  REFUSED("got -1", nib_tensor_as_strided(tensor, 1, one, one, -1, &none));
  REFUSED("got -1", nib_tensor_wrap(cpu, &(nib_wrap_desc){ .dtype = NIB_UINT8, .ndim = -1, .data = bytes }, &none));
  REFUSED("got -1", nib_tensor_wrap(
                      cpu, &(nib_wrap_desc){ .dtype = NIB_UINT8, .ndim = 1, .shape = minus, .data = bytes }, &none));
  REFUSED(
    "got -1",
    nib_tensor_wrap(
      cpu, &(nib_wrap_desc){ .dtype = NIB_UINT8, .ndim = 1, .shape = one, .stride = minus, .data = bytes }, &none));
  REFUSED("got -1", nib_peek(runtime, nib_tensor_storage(tensor), NIB_UINT8, 0, -1, one, one, bytes, 1));
  REFUSED("shape", nib_peek(runtime, nib_tensor_storage(tensor), NIB_UINT8, 0, 1, minus, one, bytes, 1));
  REFUSED("shape", nib_peek(runtime, nib_tensor_storage(tensor), NIB_UINT8, 0, 1, one, minus, bytes, 1));
  REFUSED("shape", nib_peek(runtime, nib_tensor_storage(tensor), NIB_UINT8, -1, 1, one, one, bytes, 1));
  REFUSED("bytes", nib_tensor_write(stream, tensor, bytes, SIZE_MAX));
  REFUSED("bytes", nib_tensor_read(tensor, bytes, SIZE_MAX, NIB_UNLIMITED));
  REFUSED("got -1", nib_rope_table(stream, -1, 1e4, NIB_FLOAT32, &none));
  REFUSED("got -1", nib_tensor_random_integer(stream, tensor, 1, 0, -1));
  REFUSED("mode: expected a nib_capture_mode, got 3", nib_capture_begin(stream, (nib_capture_mode)3));
  REFUSED("mode: expected a nib_capture_mode, got -1", nib_capture_begin(stream, (nib_capture_mode)-1));
  CHECK(!nib_device_is_capturing(cpu));
#undef REFUSED
  OK(runtime, nib_stream_create(cpu, INT32_MIN, &no_stream)); /* a hint */
  nib_stream_release(no_stream);
  CHECK(!nib_device_at(runtime, -1) && !nib_device_at(runtime, INT32_MIN));
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_RELAXED));
  OK(runtime, nib_tensor_fill(stream, tensor, NIB_INTEGER(0)));
  nib_graph *graph = NULL;
  OK(runtime, nib_capture_end(stream, &graph, NULL));
  const int32_t *deps = &(int32_t){ 0 };
  CHECK(!nib_graph_node_name(graph, -1) && nib_graph_node_deps(graph, -1, &deps) == 0 && !deps);
  nib_graph_release(graph);
}

int main(void) {
  CHECK(nib_abi_version() == NIB_ABI_VERSION);
  CHECK(strcmp(nib_version(), NIB_VERSION) == 0);

  static const char *const names[] = {
#define X(name, text) #name,
    NIB_STATUS_LIST(X)
#undef X
  };
  for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
    CHECK(strcmp(nib_status_name((nib_status)i), names[i]) == 0);
    CHECK(strlen(nib_status_text((nib_status)i)) > 1);
    for (int j = 0; j < i; j++) CHECK(strcmp(nib_status_text((nib_status)i), nib_status_text((nib_status)j)) != 0);
  }
  for (int i = 0; i < 3; i++) {
    nib_status none = (nib_status)((int[]){ -1, (int)(sizeof names / sizeof *names), 1000 })[i];
    CHECK(strcmp(nib_status_name(none), "?") == 0 && strcmp(nib_status_text(none), "?") == 0);
  }

  for (int i = 0; i <= NIB_INT64; i++) {
    nib_dtype found = NIB_DTYPE_NONE;
    CHECK(nib_dtype_find(nib_dtype_name((nib_dtype)i), &found) && found == (nib_dtype)i);
    size_t bytes = nib_dtype_bytes((nib_dtype)i);
    CHECK(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8);
    CHECK(nib_dtype_is_float((nib_dtype)i) == (i <= NIB_FLOAT8_E4M3FN));
  }
  nib_dtype dtype;
  CHECK(!nib_dtype_find("float64", &dtype) && !nib_dtype_find("", &dtype));

  /* A mismatch of versions, and sizes that cannot be. */
  nib_runtime *runtime = NULL;
  nib_config config = { .abi_version = NIB_ABI_VERSION + 1 };
  CHECK(nib_runtime_create(&config, &runtime) == NIB_INVALID && !runtime);
  config = (nib_config){ .threads = -1 };
  CHECK(nib_runtime_create(&config, &runtime) == NIB_INVALID && !runtime);
  config = (nib_config){ .index_base = 2 };
  CHECK(nib_runtime_create(&config, &runtime) == NIB_INVALID && !runtime);

  /* All of these are fine. */
  nib_config good[] = {
    { 0 }, { .abi_version = NIB_ABI_VERSION }, { .threads = 1 }, { .threads = 3 }, { .index_base = 1 }
  };
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    OK(NULL, nib_runtime_create(&good[i], &runtime));
    CHECK(strcmp(nib_error(runtime), "") == 0);
    nib_runtime_close(runtime);
  }
  OK(NULL, nib_runtime_create(NULL, &runtime));
  int user;
  CHECK(nib_runtime_user(runtime) == NULL);
  nib_runtime_close(runtime);
  OK(NULL, nib_runtime_create(&(nib_config){ .user = &user }, &runtime));
  CHECK(nib_runtime_user(runtime) == &user);

  /* Messages count dimensions from the configured base, and stay until the next call. */
  nib_device *cpu = cpu_of(runtime);
  CHECK(nib_device_runtime(cpu) == runtime && nib_device_at(runtime, 0) == cpu);
  CHECK(strcmp(nib_device_get_info(cpu)->name, "cpu") == 0 && nib_device_get_info(cpu)->available);
  nib_device *none = NULL;
  CHECK_STATUS(NIB_UNAVAILABLE, runtime, nib_device_find(runtime, "cuda:99", &none));
  CHECK(!none && strstr(nib_error(runtime), "cuda:99"));
  nib_tensor *tensor = NULL, *view = NULL;
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_create(cpu, NIB_UINT8, 2, (int64_t[]){ 2, -1 }, &tensor));
  CHECK(!tensor && strstr(nib_error(runtime), ": expected ") && strstr(nib_error(runtime), "got -1"));
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_create(cpu, NIB_UINT8, 9, (int64_t[9]){ 0 }, &tensor));
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_create(cpu, NIB_INT64, 1, (int64_t[]){ INT64_C(1) << 60 }, &tensor));
  CHECK_STATUS(NIB_OK, runtime, nib_tensor_create(cpu, NIB_UINT8, 0, NULL, &tensor)); /* one element needs no sizes */
  nib_tensor_release(tensor);
  tensor = make(cpu, NIB_UINT8, 4);
  refuse_dtypes(runtime, tensor);
  refuse_numbers(runtime, tensor);
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_narrow(tensor, 1, 0, 1, &view));
  CHECK(strstr(nib_error(runtime), "got 1"));
  nib_runtime *from_one = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .index_base = 1 }, &from_one));
  nib_tensor *other = make(cpu_of(from_one), NIB_UINT8, 4);
  CHECK_STATUS(NIB_INVALID, from_one, nib_tensor_narrow(other, 1, 0, 1, &view));
  CHECK(strstr(nib_error(from_one), "got 2"));

  /* Objects of one runtime are no objects of another. */
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_copy(nib_device_default_stream(cpu), tensor, other));
  nib_tensor_release(tensor);
  nib_tensor_release(other);
  nib_runtime_close(from_one);
  nib_runtime_close(runtime);
  nib_runtime_close(NULL);
  return 0;
}
