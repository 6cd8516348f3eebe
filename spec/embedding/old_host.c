/* A host that was built with the headers of version 0.2.0, for a library whose structs have grown: it passes each
 * descriptor with other bytes behind it, and has each result filled in with others behind it. What comes out is what
 * 0.2.0 gave. */
#include "host.h"

#define WITH_OTHERS_BEHIND(type, name, ...) \
  struct {                                  \
    type it;                                \
    unsigned char behind[256];              \
  } name = { .it = __VA_ARGS__ };           \
  memset(name.behind, 0xAA, sizeof name.behind)

static void untouched(const unsigned char *behind) {
  for (int i = 0; i < 256; i++) CHECK(behind[i] == 0xAA);
}

static nib_device *device;
static nib_runtime *rt;
static nib_stream *stream;

static nib_tensor *filled(nib_dtype dtype, int32_t ndim, const int64_t *shape, double value) {
  nib_tensor *tensor = NULL;
  OK(rt, nib_tensor_create(device, dtype, ndim, shape, &tensor));
  OK(rt, nib_tensor_fill(stream, tensor, NIB_REAL(value)));
  return tensor;
}
#define FILLED(dtype, value, ...) \
  filled(dtype, (int32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]){ __VA_ARGS__ }, value)

static double amax(nib_tensor *tensor) {
  double value = -1;
  OK(rt, nib_tensor_amax(tensor, &value));
  return value;
}

static void release(nib_tensor *tensor) { nib_tensor_release(tensor); }

static void append_and_dequantize(void) {
  nib_tensor *rows = FILLED(NIB_BFLOAT16, 3, 4, 2, 16), *slots = FILLED(NIB_INT32, 0, 4),
             *one = FILLED(NIB_FLOAT32, 1, 1);
  nib_tensor *data = FILLED(NIB_UINT8, 0, 2, 2, 4, 2, 8), *scales = FILLED(NIB_FLOAT8_E4M3FN, 0, 2, 2, 4, 2, 1);
  nib_tensor *tables = FILLED(NIB_INT32, 0, 1, 1), *lengths = FILLED(NIB_INT32, 4, 1);
  nib_tensor *k = FILLED(NIB_BFLOAT16, 0, 1, 4, 2, 16), *v = FILLED(NIB_BFLOAT16, 0, 1, 4, 2, 16);
  OK(rt, nib_tensor_arange(stream, slots, NIB_INTEGER(0), NIB_INTEGER(1)));
  WITH_OTHERS_BEHIND(nib_append_desc, append,
                     { .append_key = rows,
                       .append_value = rows,
                       .slot_mapping = slots,
                       .paged_kv_cache = { .stacked = data },
                       .kv_cache_sf = { .stacked = scales },
                       .kv_layout = NIB_NHD,
                       .k_scale = { .value = 1 },
                       .v_scale = { .tensor = one } });
  OK(rt, nib_append(stream, &append.it));
  WITH_OTHERS_BEHIND(nib_dequantize_desc, dequantize,
                     { .paged_kv_cache = { .stacked = data },
                       .kv_cache_sf = { .stacked = scales },
                       .kv_layout = NIB_NHD,
                       .block_tables = tables,
                       .seq_lens = lengths,
                       .k_scale = one,
                       .v_scale = one,
                       .output_k = k,
                       .output_v = v });
  OK(rt, nib_dequantize(stream, &dequantize.it));
  CHECK(amax(k) == 3 && amax(v) == 3);
  append.it.kv_layout = NIB_HND;
  CHECK_STATUS(NIB_INVALID, rt, nib_append(stream, &append.it)); /* other fields are read where they are */
  nib_tensor *all[] = { rows, slots, one, data, scales, tables, lengths, k, v };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
}

static void quantize_and_materialize(void) {
  nib_tensor *pages = FILLED(NIB_FLOAT16, 2, 1, 1, 4, 64);
  WITH_OTHERS_BEHIND(nib_quantize_cache_desc, quantize,
                     { .k_cache = pages,
                       .v_cache = pages,
                       .kv_layout = NIB_HND,
                       .has_k_global_sf = true,
                       .k_global_sf = { .value = 1 } });
  WITH_OTHERS_BEHIND(nib_quantized_cache, made, { .k = NULL });
  OK(rt, nib_quantize_cache(stream, &quantize.it, &made.it));
  untouched(made.behind);
  CHECK(amax(made.it.k_scale) == 1 && amax(made.it.v_scale) == 2.0f / 448);
  nib_tensor *tables = FILLED(NIB_INT32, 0, 1, 1), *lengths = FILLED(NIB_INT32, 4, 1), *out = NULL, *table = NULL;
  WITH_OTHERS_BEHIND(nib_materialize_desc, materialize,
                     { .k_cache = made.it.k,
                       .v_cache = made.it.v,
                       .k_block_scales = made.it.k_sf,
                       .v_block_scales = made.it.v_sf,
                       .block_tables = tables,
                       .seq_lens = lengths,
                       .max_kv_len = 4 });
  OK(rt, nib_materialize(stream, &materialize.it, &out, &table));
  CHECK(nib_tensor_shape(out)[0] == 2 && amax(table) == 1 && amax(out) > 0);
  nib_tensor *all[] = { pages,        tables,          lengths,        out, table, made.it.k, made.it.v, made.it.k_sf,
                        made.it.v_sf, made.it.k_scale, made.it.v_scale };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
}

static void insert(void) {
  nib_tensor *kv = FILLED(NIB_BFLOAT16, 1, 2, 512), *cache = FILLED(NIB_UINT8, 0, 1, 4, 384),
             *slots = FILLED(NIB_INT32, 1, 2);
  nib_tensor *positions = FILLED(NIB_INT64, 0, 2), *table = FILLED(NIB_FLOAT32, 1, 4, 64), *rows = NULL;
  WITH_OTHERS_BEHIND(
    nib_rope_insert_desc, rope,
    { .kv = kv, .cache = cache, .slot_mapping = slots, .positions = positions, .cos_sin_cache = table });
  OK(rt, nib_rope_insert(stream, &rope.it, NULL));
  OK(rt, nib_mla_dequantize(stream, cache, slots, &rows));
  CHECK(amax(rows) > 0);
  nib_tensor *all[] = { kv, cache, slots, positions, table, rows };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
}

static int given_back;

static void give_back(void *user) {
  CHECK(user == &given_back);
  given_back++;
}

static void wrap(void) {
  static float values[6] = { 1, 2, 3, 4, 5, 6 };
  const int64_t shape[] = { 2, 3 };
  nib_tensor *tensor = NULL;
  WITH_OTHERS_BEHIND(
    nib_wrap_desc, desc,
    { .dtype = NIB_FLOAT32, .ndim = 2, .shape = shape, .data = values, .release = give_back, .user = &given_back });
  OK(rt, nib_tensor_wrap(device, &desc.it, &tensor));
  CHECK(amax(tensor) == 6);
  release(tensor);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(given_back == 1);
}

static int logged;

static void log_it(void *user, nib_log_level level, const char *message) {
  (void)level;
  CHECK(user == &logged && message);
  logged++;
}

int main(void) {
  CHECK(nib_abi_version() == NIB_ABI_VERSION);
  WITH_OTHERS_BEHIND(nib_config, config, { .log = log_it, .user = &logged, .threads = 1 });
  OK(NULL, nib_runtime_create(&config.it, &rt));
  device = cpu_of(rt);
  stream = nib_device_default_stream(device);
  append_and_dequantize();
  quantize_and_materialize();
  insert();
  wrap();
  CHECK(logged > 0);
  WITH_OTHERS_BEHIND(nib_memory_info, info, { 0 });
  nib_device_memory_sized(device, &info.it, sizeof info.it);
  untouched(info.behind);
  CHECK(info.it.peak_bytes > 0 && info.it.used_bytes == nib_device_memory(device).used_bytes);
  nib_runtime_close(rt);
  return 0;
}
