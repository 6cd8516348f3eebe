/* Functions that create tensors: empty, zeros, full, arange, randn, randint, randperm, from_bytes. nibble.tensor is in
 * tensor_data.c. */
#include <math.h>
#include <string.h>

#include "../../runtime/core/floats.h"
#include "args.h"

nib_lua_object *nib_lua_create(lua_State *L, const char *operation, nib_device *device, bool pinned, nib_dtype dtype,
                               int32_t ndim, const int64_t *shape) {
  nib_lua_object *object = nib_lua_push(L, NIB_LUA_TENSOR);
  if (pinned)
    NIB_LUA_DO(L, operation, nib_tensor_create_pinned(nib_device_runtime(device), dtype, ndim, shape, &object->tensor));
  else NIB_LUA_DO(L, operation, nib_tensor_create(device, dtype, ndim, shape, &object->tensor));
  nib_lua_account(L, object->tensor);
  return object;
}

static const char *const allowed[] = { "dtype", "device", "pinned", NULL };
static const char *const allowed_random[] = { "dtype", "device", "pinned", "seed", NULL };

/* Where a new tensor is, and its dtype. */
struct make {
  nib_device *device;
  bool pinned;
  nib_dtype dtype;
};

/* Reads the options at an index. */
static struct make common_options(lua_State *L, const char *operation, int index, nib_dtype otherwise) {
  struct make make;
  nib_lua_options(L, operation, index, allowed);
  make.dtype = nib_lua_dtype_option(L, operation, index);
  if (make.dtype == NIB_DTYPE_NONE) make.dtype = otherwise;
  make.device = nib_lua_place_option(L, operation, index, &make.pinned);
  return make;
}

static nib_lua_object *create(lua_State *L, const char *operation, struct make make, int32_t ndim,
                              const int64_t *shape) {
  return nib_lua_create(L, operation, make.device, make.pinned, make.dtype, ndim, shape);
}

/* Whether a table holds options and not a shape: it has names and no list. */
static bool is_options(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TTABLE || lua_rawlen(L, index) > 0) return false;
  lua_pushnil(L);
  if (!lua_next(L, index)) return false;
  bool named = lua_type(L, -2) == LUA_TSTRING;
  lua_pop(L, 2);
  return named;
}

/* Reads a shape. Returns the number of dimensions; *options is the index of the options after it. */
static int32_t shape_and_options(lua_State *L, const char *operation, int64_t *shape, int *options) {
  int last = lua_gettop(L);
  if (lua_type(L, 1) == LUA_TTABLE && !is_options(L, 1)) {
    *options = 2;
    return nib_lua_integer_list(L, operation, "shape", 1, shape);
  }
  *options = last + 1;
  if (last > 0 && lua_type(L, last) == LUA_TTABLE) *options = last--;
  return nib_lua_integers(L, operation, "shape", 1, last, shape);
}

/* Reads a shape in one argument: an integer or a table. */
static int32_t shape_argument(lua_State *L, const char *operation, int index, int64_t *shape) {
  if (lua_type(L, index) == LUA_TTABLE) return nib_lua_integer_list(L, operation, "shape", index, shape);
  if (!nib_lua_to_integer(L, index, shape))
    nib_lua_expected(L, operation, "shape", index, "an integer or a table of integers");
  return 1;
}

static int empty(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  int options;
  int32_t ndim = shape_and_options(L, "empty", shape, &options);
  create(L, "empty", common_options(L, "empty", options, NIB_FLOAT32), ndim, shape);
  return 1;
}

static int push_full(lua_State *L, const char *operation, struct make make, int32_t ndim, const int64_t *shape,
                     nib_number value) {
  nib_stream *stream = nib_lua_current_stream(L, operation, make.device);
  nib_lua_object *object = create(L, operation, make, ndim, shape);
  NIB_LUA_DO(L, operation, nib_tensor_fill(stream, object->tensor, value));
  return 1;
}

static int zeros(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  int options;
  int32_t ndim = shape_and_options(L, "zeros", shape, &options);
  return push_full(L, "zeros", common_options(L, "zeros", options, NIB_FLOAT32), ndim, shape, NIB_INTEGER(0));
}

static int full(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  int32_t ndim = shape_argument(L, "full", 1, shape);
  nib_number value = nib_lua_number(L, "full", "value", 2);
  struct make make = common_options(L, "full", 3, value.is_float ? NIB_FLOAT32 : NIB_INT64);
  value = nib_lua_element(L, "full", "value", 2, make.dtype);
  return push_full(L, "full", make, ndim, shape, value);
}

/* ---- Sequences ------------------------------------------------------------------------------------------------- */

static double as_real(nib_number number) { return number.is_float ? number.real : (double)number.integer; }

#define NO_STEP INT64_MIN

/* How many of start, start + step, ... come before stop. NO_STEP if step is 0, -1 if there are more than 2^63 - 1. */
static int64_t count_integers(int64_t start, int64_t stop, int64_t step) {
  if (step == 0) return NO_STEP;
  if (step > 0 ? start >= stop : start <= stop) return 0;
  uint64_t distance = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
  uint64_t size = step > 0 ? (uint64_t)step : -(uint64_t)step;
  uint64_t count = (distance - 1) / size + 1;
  return count > INT64_MAX ? -1 : (int64_t)count;
}

static bool is_before(double start, double stop, double step, int64_t i) {
  double element = start + (double)i * step;
  return step > 0 ? element < stop : element > stop;
}

static int64_t count_doubles(double start, double stop, double step) {
  if (step == 0) return NO_STEP;
  double distance = stop - start, estimate = ceil(isfinite(distance) ? distance / step : stop / step - start / step);
  if (!(estimate > 0)) return 0;
  if (!(estimate < 0x1p60)) return -1;
  /* The quotient is rounded. So count the elements as they will be computed, by bisection: they are monotonic in i. */
  int64_t low = 0, high = 2 * (int64_t)estimate + 2;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (is_before(start, stop, step, middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The same for reals. Converts *start to a real. */
static int64_t count_reals(nib_number *start, nib_number stop, nib_number step) {
  struct nib_floats floats;
  nib_floats_enter(&floats);
  NIB_OPAQUE(*start);
  NIB_OPAQUE(stop);
  NIB_OPAQUE(step);
  *start = NIB_REAL(as_real(*start));
  int64_t count = count_doubles(start->real, as_real(stop), as_real(step));
  NIB_OPAQUE(count);
  nib_floats_leave(&floats);
  return count;
}

static nib_number finite_number(lua_State *L, const char *parameter, int index) {
  nib_number number = nib_lua_number(L, "arange", parameter, index);
  if (number.is_float && !isfinite(number.real)) nib_lua_expected(L, "arange", parameter, index, "a finite number");
  return number;
}

static int arange(lua_State *L) {
  int count = lua_gettop(L), options = count + 1;
  if (count > 1 && lua_type(L, count) == LUA_TTABLE) options = count--;
  while (count > 1 && lua_isnil(L, count)) count--; /* arange(5, nil, nil, opts) */
  if (count > 3) options = 4, count = 3;
  nib_number start = NIB_INTEGER(0), step = NIB_INTEGER(1), stop;
  if (count > 1) start = finite_number(L, "start", 1);
  stop = finite_number(L, "stop", count > 1 ? 2 : 1);
  if (count > 2) step = finite_number(L, "step", 3);
  bool is_float = start.is_float || stop.is_float || step.is_float;
  int64_t size = is_float ? count_reals(&start, stop, step) : count_integers(start.integer, stop.integer, step.integer);
  if (size == NO_STEP) return nib_lua_expected(L, "arange", "step", 3, "a number that is not 0");
  struct make make = common_options(L, "arange", options, is_float ? NIB_FLOAT32 : NIB_INT64);
  if (size < 0 || size > INT64_MAX / 16)
    return nib_lua_expected(L, "arange", "stop", count > 1 ? 2 : 1, "a stop that gives fewer than 2^59 elements");
  nib_stream *stream = nib_lua_current_stream(L, "arange", make.device);
  nib_lua_object *object = create(L, "arange", make, 1, &size);
  NIB_LUA_DO(L, "arange", nib_tensor_arange(stream, object->tensor, start, step));
  return 1;
}

/* ---- Random values --------------------------------------------------------------------------------------------- */

static struct make random_options(lua_State *L, const char *operation, int index, nib_dtype otherwise, uint64_t *seed) {
  struct make make;
  nib_lua_options(L, operation, index, allowed_random);
  make.dtype = nib_lua_dtype_option(L, operation, index);
  if (make.dtype == NIB_DTYPE_NONE) make.dtype = otherwise;
  make.device = nib_lua_place_option(L, operation, index, &make.pinned);
  nib_lua_state *state = nib_lua_get_state(L);
  bool given = nib_lua_push_option(L, index, "seed") != LUA_TNIL;
  lua_pop(L, 1);
  *seed = (uint64_t)nib_lua_integer_option(L, operation, index, "seed", (int64_t)state->next_seed);
  if (!given) state->next_seed++;
  return make;
}

static int randn(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  int options;
  uint64_t seed;
  int32_t ndim = shape_and_options(L, "randn", shape, &options);
  struct make make = random_options(L, "randn", options, NIB_FLOAT32, &seed);
  if (!nib_dtype_is_float(make.dtype))
    return nib_lua_argument_error(L, "randn", "dtype", "a float dtype, got \"%s\"", nib_dtype_name(make.dtype));
  nib_stream *stream = nib_lua_current_stream(L, "randn", make.device);
  nib_lua_object *object = create(L, "randn", make, ndim, shape);
  NIB_LUA_DO(L, "randn", nib_tensor_random_normal(stream, object->tensor, seed));
  return 1;
}

static int randint(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  uint64_t seed, bits;
  int64_t low = nib_lua_integer(L, "randint", "low", 1), high = nib_lua_integer(L, "randint", "high", 2);
  int32_t ndim = shape_argument(L, "randint", 3, shape);
  struct make make = random_options(L, "randint", 4, NIB_INT64, &seed);
  if (high <= low) return nib_lua_expected(L, "randint", "high", 2, "an integer above low (%I)", (LUAI_UACINT)low);
  const char *name = nib_dtype_name(make.dtype);
  if (!nib_element_from_number(make.dtype, NIB_INTEGER(low), &bits))
    return nib_lua_expected(L, "randint", "low", 1, "an integer that %s can hold", name);
  if (!nib_element_from_number(make.dtype, NIB_INTEGER(high - 1), &bits))
    return nib_lua_expected(L, "randint", "high", 2, "at most one more than the largest %s", name);
  nib_stream *stream = nib_lua_current_stream(L, "randint", make.device);
  nib_lua_object *object = create(L, "randint", make, ndim, shape);
  NIB_LUA_DO(L, "randint", nib_tensor_random_integer(stream, object->tensor, seed, low, high));
  return 1;
}

static int randperm(lua_State *L) {
  uint64_t seed;
  int64_t n = nib_lua_integer(L, "randperm", "n", 1);
  struct make make = random_options(L, "randperm", 2, NIB_INT64, &seed);
  if (make.dtype != NIB_INT32 && make.dtype != NIB_INT64)
    return nib_lua_argument_error(L, "randperm", "dtype", "\"int32\" or \"int64\", got \"%s\"",
                                  nib_dtype_name(make.dtype));
  if (n < 0 || n > (make.dtype == NIB_INT32 ? INT32_MAX : INT64_MAX / 16))
    return nib_lua_expected(L, "randperm", "n", 1, "a count of elements that %s can number",
                            nib_dtype_name(make.dtype));
  nib_stream *stream = nib_lua_current_stream(L, "randperm", make.device);
  nib_lua_object *object = create(L, "randperm", make, 1, &n);
  NIB_LUA_DO(L, "randperm", nib_tensor_random_permutation(stream, object->tensor, seed));
  return 1;
}

/* ---- From bytes ------------------------------------------------------------------------------------------------ */

/* The size of a tensor in bytes. False for an impossible shape, for which creating the tensor raises the error. */
static bool count_bytes(nib_dtype dtype, int32_t ndim, const int64_t *shape, uint64_t *out) {
  uint64_t bytes = nib_dtype_bytes(dtype);
  bool is_empty = false;
  for (int32_t i = 0; i < ndim; i++) {
    if (shape[i] < 0) return false;
    if (shape[i] == 0) is_empty = true;
    if (shape[i] > 1 && bytes > ((uint64_t)1 << 62) / (uint64_t)shape[i]) return false;
    if (shape[i] > 1) bytes *= (uint64_t)shape[i];
  }
  *out = is_empty ? 0 : bytes;
  return true;
}

static int from_bytes(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  if (lua_type(L, 1) != LUA_TSTRING) return nib_lua_expected(L, "from_bytes", "bytes", 1, "a string");
  size_t length;
  const char *bytes = lua_tolstring(L, 1, &length);
  int32_t ndim = shape_argument(L, "from_bytes", 2, shape);
  struct make make = common_options(L, "from_bytes", 3, NIB_DTYPE_NONE);
  if (make.dtype == NIB_DTYPE_NONE)
    return nib_lua_argument_error(L, "from_bytes", "dtype", "the option dtype, got no value");
  uint64_t expected;
  if (count_bytes(make.dtype, ndim, shape, &expected) && expected != length)
    return nib_lua_argument_error(L, "from_bytes", "bytes", "a string of %I bytes, got %I", (LUAI_UACINT)expected,
                                  (LUAI_UACINT)length);
  nib_lua_refuse_capture(L, "from_bytes", make.device);
  nib_stream *stream = nib_lua_current_stream(L, "from_bytes", make.device);
  nib_lua_object *object = create(L, "from_bytes", make, ndim, shape);
  NIB_LUA_DO(L, "from_bytes", nib_tensor_write(stream, object->tensor, bytes, length));
  return 1;
}

const luaL_Reg nib_lua_creators[] = {
  { "empty", empty },       { "zeros", zeros },           { "full", full },
  { "arange", arange },     { "randn", randn },           { "randint", randint },
  { "randperm", randperm }, { "from_bytes", from_bytes }, { NULL, NULL },
};
