/* Numbers that are read, compared, converted and printed on the caller's thread are the same whatever that thread does
 * with floats: here it flushes subnormals, and rounds in each direction. */
#include <fenv.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <lauxlib.h>
#include <lualib.h>

#include "host.h"
#include "nibble_lua.h"

static void spoil(int rounding, int flush) {
  CHECK(fesetround(rounding) == 0);
#if defined(__SSE2__)
  if (flush) _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  unsigned long control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  control |= (unsigned long)flush << 24;
  __asm__ volatile("msr fpcr, %0" : : "r"(control));
#else
  (void)flush;
#endif
}

/* Everything that a caller learns, as text: of numbers their bits. */
struct report {
  char text[16384];
  size_t used;
};

static void add_text(struct report *report, const char *text) {
  report->used += (size_t)snprintf(report->text + report->used, sizeof report->text - report->used, "%s\n", text);
  CHECK(report->used < sizeof report->text);
}

static void add_bits(struct report *report, const void *value, size_t bytes) {
  char text[40] = "";
  for (size_t i = bytes; i-- > 0;) sprintf(text + strlen(text), "%02x", ((const unsigned char *)value)[i]);
  add_text(report, text);
}

static void add_real(struct report *report, double value) { add_bits(report, &value, sizeof value); }

static void observed(void *user, const nib_observation *observation) {
  for (int32_t i = 0; i < observation->attribute_count; i++)
    if (observation->attributes[i].kind == NIB_ATTRIBUTE_REAL) add_real(user, observation->attributes[i].real);
}

static nib_tensor *floats_of(nib_device *device, int64_t count, const uint32_t *bits) {
  nib_tensor *tensor = make(device, NIB_FLOAT32, count);
  OK(nib_device_runtime(device), nib_tensor_write(nib_device_default_stream(device), tensor, bits, 4 * (size_t)count));
  return tensor;
}

/* Bits of float32, as what they are in each float dtype (float16 and bfloat16: the upper half). */
static const uint32_t bits[] = { 0,          0x80000000, 1,          0x80000001, 0x007FFFFF, 0x00400000,
                                 0x00800000, 0x3DCCCCCD, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
                                 0x00010000, 0x807F0000, 0x03FF0000, 0x83010000, 0x00012345 };
static const double reals[] = { 0.1,   1e-40, -1e-40,  1e-310, 5e-324, 2.5, 1.00000005960464477,
                                448.5, 2049,  0x1p-25, 1e-46,  3.3e38, 1e39 };
enum { COUNT = sizeof bits / sizeof *bits, REALS = sizeof reals / sizeof *reals };

static void c_results(nib_runtime *runtime, struct report *report) {
  nib_device *device = device_of(runtime);
  nib_stream *stream = nib_device_default_stream(device);
  static const nib_dtype dtypes[] = { NIB_FLOAT32, NIB_FLOAT16, NIB_BFLOAT16, NIB_FLOAT8_E4M3FN, NIB_INT32 };
  for (int d = 0; d < 5; d++) {
    for (int i = 0; i < COUNT && d < 4; i++) {
      uint32_t element = d == 0 ? bits[i] : bits[i] >> 16;
      add_real(report, nib_element_to_number(dtypes[d], &element).real);
    }
    for (int i = 0; i < REALS; i++) {
      uint32_t element = 0xAAAAAAAA;
      add_text(report, nib_element_from_number(dtypes[d], NIB_REAL(reals[i]), &element) ? "fits" : "does not fit");
      add_bits(report, &element, 4);
    }
  }
  nib_tensor *a = floats_of(device, 3, (const uint32_t[]){ 1, 0x80000003, 0 });
  nib_tensor *b = floats_of(device, 3, (const uint32_t[]){ 0, 0, 0 });
  nib_tensor *one = floats_of(device, 1, (const uint32_t[]){ 0x3F800000 }),
             *tiny = floats_of(device, 1, (const uint32_t[]){ 0x00800001 });
  nib_tensor *whole = make(device, NIB_INT64, 1);
  double value = 0;
  int64_t index = 0;
  bool close = false;
  OK(runtime, nib_tensor_amax(a, &value));
  add_real(report, value);
  OK(runtime, nib_tensor_max_error(a, b, &value, &index));
  add_real(report, value);
  CHECK(index == 1);
  OK(runtime, nib_tensor_max_error(one, tiny, &value, &index)); /* 1 - 2^-126 is to be rounded */
  add_real(report, value);
  OK(runtime, nib_tensor_allclose(a, b, 0, 0x1p-149, false, &close)); /* by a third of it */
  add_text(report, close ? "close" : "not close");
  OK(runtime, nib_tensor_allclose(b, b, 0, 5e-324, false, &close));
  add_text(report, close ? "close" : "not close");
  OK(runtime, nib_tensor_fill(stream, whole, NIB_INTEGER(((int64_t)1 << 53) + 1)));
  OK(runtime, nib_tensor_amax(whole, &value));
  add_real(report, value);
  OK(runtime, nib_tensor_arange(stream, whole, NIB_INTEGER(((int64_t)1 << 53) + 1), NIB_REAL(0.5)));
  int64_t integer = 0;
  OK(runtime, nib_tensor_read(whole, &integer, sizeof integer, NIB_UNLIMITED));
  add_bits(report, &integer, sizeof integer);
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_fill(stream, whole, NIB_REAL(0.3)));
  add_text(report, nib_error(runtime));

  /* A scale that is a number: a subnormal float32 is positive and finite. */
  nib_tensor *x = NULL, *slots = make(device, NIB_INT32, 1), *data[2], *scales[2];
  OK(runtime, nib_tensor_create(device, NIB_FLOAT16, 3, (int64_t[]){ 1, 1, 16 }, &x));
  for (int i = 0; i < 2; i++) {
    OK(runtime, nib_tensor_create(device, NIB_UINT8, 4, (int64_t[]){ 1, 1, 1, 8 }, &data[i]));
    OK(runtime, nib_tensor_create(device, NIB_UINT8, 4, (int64_t[]){ 1, 1, 1, 1 }, &scales[i]));
  }
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(1)));
  OK(runtime, nib_tensor_fill(stream, slots, NIB_INTEGER(0)));
  nib_append_desc append = { .append_key = x,
                             .append_value = x,
                             .slot_mapping = slots,
                             .paged_kv_cache = { .k = data[0], .v = data[1] },
                             .kv_cache_sf = { .k = scales[0], .v = scales[1] } };
  append.k_scale.value = append.v_scale.value = 1e-40;
  nib_runtime_observe(runtime, observed, report);
  OK(runtime, nib_append(stream, &append));
  nib_runtime_observe(runtime, NULL, NULL);
  append.v_scale.value = 1e-46;
  add_text(report, nib_status_name(nib_append(stream, &append)));
  add_text(report, nib_error(runtime));
  nib_tensor *list[] = { a, b, one, tiny, whole, x, slots, data[0], data[1], scales[0], scales[1] };
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) nib_tensor_release(list[i]);
}

/* Lua's own arithmetic is the thread's own affair: what counts are texts of tensors and of errors, and bits. */
static const char script[] =
  "local nibble = ...\n"
  "local small = nibble.from_bytes('\\1\\0\\0\\0\\0\\0\\64\\0', 2, {dtype = 'float32'})\n"
  "local function bits(x) return ('%016x'):format((string.unpack('<i8', string.pack('<d', x)))) end\n"
  "local function fails(...) return select(2, pcall(...)) end\n"
  "return table.concat({\n"
  "  bits(small[1]), bits(small:totable()[2]), bits(small:narrow(1, 1, 1):item()), tostring(small),\n"
  "  bits(nibble.from_bytes('\\1\\0', 1, {dtype = 'bfloat16'})[1]), bits(nibble.from_bytes('\\1\\128', 1, {dtype = "
  "'float16'})[1]),\n"
  "  tostring(nibble.tensor {0.3, 1e-40, -2.5, 0.45}), tostring(nibble.tensor {0.00006, 123456.7}),\n"
  "  bits(nibble.tensor({0.1}, {dtype = 'float16'})[1]), tostring(nibble.arange(0, 1, 0.1).shape[1]),\n"
  "  tostring(nibble.arange(0, 1e-310, 1e-310).shape[1]), fails(nibble.arange, 0, 1, 0.0), fails(nibble.arange, 0, 1, "
  "0),\n"
  "  fails(nibble.zeros, 0.15), fails(nibble.full, 2, 1e-310, {dtype = 'int32'}), fails(nibble.rope_table, 4, {theta = "
  "0.7}),\n"
  "}, '\\n')\n";

static void lua_results(lua_State *L, struct report *report) {
  lua_pushvalue(L, 2);
  lua_pushvalue(L, 1);
  if (lua_pcall(L, 1, 1, 0) != LUA_OK) {
    fprintf(stderr, "%s\n", lua_tostring(L, -1));
    exit(1);
  }
  add_text(report, lua_tostring(L, -1));
  lua_settop(L, 2);
}

int main(void) {
  fesetenv(FE_DFL_ENV); /* built with -ffast-math, it begins otherwise */
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .index_base = 1 }, &runtime));
  lua_State *L = luaL_newstate();
  CHECK(L);
  luaL_openlibs(L);
  OK(runtime, nib_lua_open(L, runtime));
  CHECK(luaL_loadstring(L, script) == LUA_OK); /* here: it has constants that Lua would round as the thread does */
  static struct report expected, got;
  c_results(runtime, &expected);
  lua_results(L, &expected);
  CHECK(strstr(expected.text, "36a0000000000000\nb6a0000000000000\n")); /* 2^-149 in float64 */
  CHECK(strstr(expected.text,
               "36a0000000000000\n3800000000000000\n36a0000000000000\n")); /* and as Lua has it, with 2^-127 */
  static const int roundings[] = { FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO };
  for (int i = 0; i < 8; i++) {
    got.used = 0;
    spoil(roundings[i / 2], i % 2 == 0);
    c_results(runtime, &got);
    lua_results(L, &got);
    CHECK(fegetround() == roundings[i / 2]); /* the caller's own is as it was */
    fesetenv(FE_DFL_ENV);
    if (strcmp(expected.text, got.text) == 0) continue;
    size_t at = 0;
    while (expected.text[at] == got.text[at]) at++;
    while (at > 0 && expected.text[at - 1] != '\n') at--;
    fprintf(stderr, "case %d: expected \"%.80s\", got \"%.80s\"\n", i, expected.text + at, got.text + at);
    return 1;
  }
  lua_close(L);
  nib_runtime_close(runtime);
  return 0;
}
