/* Tensors: fields, views, copies, comparisons, files. tensor_data.c reads and writes elements. */
#include <string.h>

#include "args.h"

static nib_tensor *check_self(lua_State *L, const char *operation) { return nib_lua_tensor(L, operation, "self", 1); }

static void push_sizes(lua_State *L, int32_t count, const int64_t *sizes) {
  lua_createtable(L, count, 0);
  for (int32_t i = 0; i < count; i++) {
    lua_pushinteger(L, sizes[i]);
    lua_rawseti(L, -2, i + 1);
  }
}

static nib_stream *current_stream(lua_State *L, const char *operation, const nib_tensor *tensor) {
  return nib_lua_current_stream(L, operation, nib_tensor_device(tensor));
}

/* ---- Fields ---------------------------------------------------------------------------------------------------- */

static int tensor_index(lua_State *L) {
  if (lua_type(L, 2) != LUA_TSTRING) return nib_lua_tensor_index(L);
  if (nib_lua_push_method(L)) return 1;
  const char *name = nib_lua_word(L, 2);
  static const char *const operations[] = { "tensor:shape", "tensor:dtype", "tensor:device", "tensor:pinned" };
  int field = 0;
  while (field < 4 && strcmp(operations[field] + sizeof "tensor:" - 1, name) != 0) field++;
  if (field == 4) return nib_lua_unknown_field(L, NIB_LUA_TENSOR);
  const nib_tensor *tensor = check_self(L, operations[field]);
  switch (field) {
  case 0: push_sizes(L, nib_tensor_ndim(tensor), nib_tensor_shape(tensor)); break;
  case 1: lua_pushstring(L, nib_dtype_name(nib_tensor_dtype(tensor))); break;
  case 2: lua_pushstring(L, nib_device_get_info(nib_tensor_device(tensor))->name); break;
  default: lua_pushboolean(L, nib_tensor_is_pinned(tensor));
  }
  return 1;
}

static int tensor_len(lua_State *L) {
  const nib_tensor *tensor = check_self(L, "tensor:len");
  if (nib_tensor_ndim(tensor) == 0)
    return nib_lua_expected(L, "tensor:len", "self", 1, "a tensor of one or more dimensions");
  lua_pushinteger(L, nib_tensor_shape(tensor)[0]);
  return 1;
}

static int64_t check_dim(lua_State *L, const char *operation, const char *parameter, int index, int32_t ndim) {
  int64_t dim = nib_lua_position(L, operation, parameter, index);
  if (dim < 0 || dim >= ndim) nib_lua_expected(L, operation, parameter, index, "a dimension in 1..%d", (int)ndim);
  return dim;
}

static int tensor_stride(lua_State *L) {
  const nib_tensor *tensor = check_self(L, "tensor:stride");
  if (lua_isnoneornil(L, 2)) push_sizes(L, nib_tensor_ndim(tensor), nib_tensor_stride(tensor));
  else lua_pushinteger(L, nib_tensor_stride(tensor)[check_dim(L, "tensor:stride", "dim", 2, nib_tensor_ndim(tensor))]);
  return 1;
}

static int tensor_dim(lua_State *L) {
  lua_pushinteger(L, nib_tensor_ndim(check_self(L, "tensor:dim")));
  return 1;
}

static int tensor_numel(lua_State *L) {
  lua_pushinteger(L, nib_tensor_numel(check_self(L, "tensor:numel")));
  return 1;
}

static int tensor_storage(lua_State *L) {
  const nib_tensor *self = check_self(L, "tensor:storage");
  lua_pushinteger(L, (lua_Integer)nib_tensor_storage(self));
  lua_pushinteger(L, nib_tensor_offset_bytes(self));
  return 2;
}

static int tensor_is_contiguous(lua_State *L) {
  lua_pushboolean(L, nib_tensor_is_contiguous(check_self(L, "tensor:is_contiguous")));
  return 1;
}

/* ---- Views ----------------------------------------------------------------------------------------------------- */

static int tensor_narrow(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:narrow");
  int64_t dim = nib_lua_position(L, "tensor:narrow", "dim", 2),
          start = nib_lua_position(L, "tensor:narrow", "start", 3);
  int64_t length = nib_lua_integer(L, "tensor:narrow", "length", 4);
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:narrow", nib_tensor_narrow(self, dim, start, length, &view->tensor));
  return 1;
}

static int tensor_select(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:select");
  int64_t dim = nib_lua_position(L, "tensor:select", "dim", 2),
          index = nib_lua_position(L, "tensor:select", "index", 3);
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:select", nib_tensor_select(self, dim, index, &view->tensor));
  return 1;
}

static int tensor_view(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  nib_tensor *self = check_self(L, "tensor:view");
  int32_t ndim = nib_lua_integers(L, "tensor:view", "shape", 2, lua_gettop(L), shape);
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:view", nib_tensor_view(self, ndim, shape, &view->tensor));
  return 1;
}

static int tensor_expand(lua_State *L) {
  int64_t shape[NIB_MAX_NDIM];
  nib_tensor *self = check_self(L, "tensor:expand");
  int32_t ndim = nib_lua_integers(L, "tensor:expand", "shape", 2, lua_gettop(L), shape);
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:expand", nib_tensor_expand(self, ndim, shape, &view->tensor));
  nib_lua_check_elements(L, "tensor:expand", view->tensor);
  return 1;
}

static int tensor_permute(lua_State *L) {
  int64_t dims[NIB_MAX_NDIM];
  nib_tensor *self = check_self(L, "tensor:permute");
  int32_t ndim = nib_lua_integers(L, "tensor:permute", "dims", 2, lua_gettop(L), dims);
  for (int32_t i = 0; i < ndim; i++)
    if (dims[i] != INT64_MIN) dims[i]--;
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:permute", nib_tensor_permute(self, ndim, dims, &view->tensor));
  return 1;
}

static int tensor_transpose(lua_State *L) {
  int64_t dims[NIB_MAX_NDIM];
  nib_tensor *self = check_self(L, "tensor:transpose");
  int32_t ndim = nib_tensor_ndim(self);
  int64_t first = check_dim(L, "tensor:transpose", "dim1", 2, ndim);
  int64_t second = check_dim(L, "tensor:transpose", "dim2", 3, ndim);
  for (int32_t i = 0; i < ndim; i++) dims[i] = i == first ? second : i == second ? first : i;
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:transpose", nib_tensor_permute(self, ndim, dims, &view->tensor));
  return 1;
}

static int tensor_as_strided(lua_State *L) {
  int64_t size[NIB_MAX_NDIM], stride[NIB_MAX_NDIM];
  nib_tensor *self = check_self(L, "tensor:as_strided");
  int32_t ndim = nib_lua_integer_list(L, "tensor:as_strided", "size", 2, size);
  int32_t strides = nib_lua_integer_list(L, "tensor:as_strided", "stride", 3, stride);
  int64_t offset = lua_isnoneornil(L, 4) ? 0 : nib_lua_integer(L, "tensor:as_strided", "offset", 4);
  if (strides != ndim)
    return nib_lua_argument_error(L, "tensor:as_strided", "stride", "a stride for each of %d sizes, got %d", (int)ndim,
                                  (int)strides);
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:as_strided", nib_tensor_as_strided(self, ndim, size, stride, offset, &view->tensor));
  nib_lua_check_elements(L, "tensor:as_strided", view->tensor);
  return 1;
}

static int tensor_reinterpret(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:reinterpret");
  nib_dtype dtype = nib_lua_dtype(L, "tensor:reinterpret", "dtype", 2);
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:reinterpret", nib_tensor_reinterpret(self, dtype, &view->tensor));
  return 1;
}

/* ---- Copies ---------------------------------------------------------------------------------------------------- */

void nib_lua_copy(lua_State *L, const char *operation, nib_tensor *destination, nib_tensor *source) {
  nib_stream *to = current_stream(L, operation, destination), *from = current_stream(L, operation, source);
  NIB_LUA_WAIT(L, operation, nib_tensor_copy_wait(destination, source, timeout_us));
  NIB_LUA_DO(L, operation, nib_tensor_copy_between(to, from, destination, source));
}

static int push_copy(lua_State *L, const char *operation, nib_tensor *self, nib_device *device, nib_dtype dtype) {
  nib_lua_object *copy =
    nib_lua_create(L, operation, device, false, dtype, nib_tensor_ndim(self), nib_tensor_shape(self));
  nib_lua_copy(L, operation, copy->tensor, self);
  return 1;
}

static int tensor_clone(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:clone");
  return push_copy(L, "tensor:clone", self, nib_tensor_device(self), nib_tensor_dtype(self));
}

static int tensor_contiguous(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:contiguous");
  if (!nib_tensor_is_contiguous(self))
    return push_copy(L, "tensor:contiguous", self, nib_tensor_device(self), nib_tensor_dtype(self));
  lua_settop(L, 1);
  return 1;
}

static int tensor_to(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:to");
  nib_device *device = nib_tensor_device(self);
  nib_dtype dtype = nib_tensor_dtype(self);
  const char *name = nib_lua_text(L, "tensor:to", "device_or_dtype", 2);
  if (!nib_dtype_find(name, &dtype)) {
    nib_runtime *runtime = nib_lua_runtime(L, "tensor:to");
    nib_status status = nib_device_find(runtime, name, &device);
    if (status == NIB_UNAVAILABLE)
      return nib_lua_argument_error(L, "tensor:to", "device_or_dtype", "a dtype or an available device, got \"%s\": %s",
                                    name, nib_error(runtime));
    if (status != NIB_OK) return nib_lua_raise(L, "tensor:to", status);
  }
  if (device != nib_tensor_device(self) || dtype != nib_tensor_dtype(self))
    return push_copy(L, "tensor:to", self, device, dtype);
  lua_settop(L, 1);
  return 1;
}

static int tensor_copy(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:copy"), *source = nib_lua_tensor(L, "tensor:copy", "source", 2);
  nib_lua_copy(L, "tensor:copy", self, source);
  lua_settop(L, 1);
  return 1;
}

static int tensor_fill(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:fill");
  nib_number value = nib_lua_element(L, "tensor:fill", "value", 2, nib_tensor_dtype(self));
  NIB_LUA_DO(L, "tensor:fill", nib_tensor_fill(current_stream(L, "tensor:fill", self), self, value));
  lua_settop(L, 1);
  return 1;
}

/* ---- Comparisons ----------------------------------------------------------------------------------------------- */

void nib_lua_wait_tensor(lua_State *L, const char *operation, nib_tensor *tensor) {
  nib_lua_refuse_capture(L, operation, nib_tensor_device(tensor));
  NIB_LUA_WAIT(L, operation, nib_tensor_wait(tensor, timeout_us));
}

/* The other tensor of a comparison. Waits for the values of both. */
static nib_tensor *check_other(lua_State *L, const char *operation, nib_tensor *self) {
  nib_tensor *other = nib_lua_tensor(L, operation, "other", 2);
  nib_lua_wait_tensor(L, operation, self);
  nib_lua_wait_tensor(L, operation, other);
  return other;
}

static int tensor_equal(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:equal"), *other = check_other(L, "tensor:equal", self);
  bool equal = false;
  NIB_LUA_DO(L, "tensor:equal", nib_tensor_equal(self, other, &equal));
  lua_pushboolean(L, equal);
  return 1;
}

static int tensor_allclose(lua_State *L) {
  static const char *const allowed[] = { "rtol", "atol", "equal_nan", NULL };
  nib_tensor *self = check_self(L, "tensor:allclose");
  lua_settop(L, 3);
  nib_lua_options(L, "tensor:allclose", 3, allowed);
  double rtol = nib_lua_number_option(L, "tensor:allclose", 3, "rtol", 1e-5);
  double atol = nib_lua_number_option(L, "tensor:allclose", 3, "atol", 1e-8);
  bool equal_nan = nib_lua_boolean_option(L, "tensor:allclose", 3, "equal_nan", false), close = false;
  nib_tensor *other = check_other(L, "tensor:allclose", self);
  NIB_LUA_DO(L, "tensor:allclose", nib_tensor_allclose(self, other, rtol, atol, equal_nan, &close));
  lua_pushboolean(L, close);
  return 1;
}

static int tensor_max_error(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:max_error"), *other = check_other(L, "tensor:max_error", self);
  double error = 0;
  int64_t flat = -1, index[NIB_MAX_NDIM];
  NIB_LUA_DO(L, "tensor:max_error", nib_tensor_max_error(self, other, &error, &flat));
  lua_pushnumber(L, error);
  if (flat < 0) return 1;
  for (int32_t i = nib_tensor_ndim(self) - 1; i >= 0; i--) {
    int64_t size = nib_tensor_shape(self)[i];
    index[i] = flat % size + 1;
    flat /= size;
  }
  push_sizes(L, nib_tensor_ndim(self), index);
  return 2;
}

static int tensor_amax(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:amax");
  double amax = 0;
  nib_lua_wait_tensor(L, "tensor:amax", self);
  NIB_LUA_DO(L, "tensor:amax", nib_tensor_amax(self, &amax));
  lua_pushnumber(L, amax);
  return 1;
}

/* ---- The rest -------------------------------------------------------------------------------------------------- */

static int tensor_save(lua_State *L) {
  nib_tensor *self = check_self(L, "tensor:save");
  const char *path = nib_lua_text(L, "tensor:save", "path", 2);
  nib_lua_wait_tensor(L, "tensor:save", self);
  nib_status status = nib_npy_save(self, path);
  if (status == NIB_FILE) {
    lua_pushnil(L);
    lua_pushstring(L, nib_error(nib_lua_runtime(L, "tensor:save")));
    return 2;
  }
  if (status != NIB_OK) return nib_lua_raise(L, "tensor:save", status);
  NIB_LUA_OBSERVED(L);
  lua_pushboolean(L, true);
  return 1;
}

static const luaL_Reg methods[] = {
  { "stride", tensor_stride },
  { "dim", tensor_dim },
  { "numel", tensor_numel },
  { "storage", tensor_storage },
  { "is_contiguous", tensor_is_contiguous },
  { "narrow", tensor_narrow },
  { "select", tensor_select },
  { "view", tensor_view },
  { "expand", tensor_expand },
  { "permute", tensor_permute },
  { "transpose", tensor_transpose },
  { "as_strided", tensor_as_strided },
  { "reinterpret", tensor_reinterpret },
  { "clone", tensor_clone },
  { "contiguous", tensor_contiguous },
  { "to", tensor_to },
  { "copy", tensor_copy },
  { "fill", tensor_fill },
  { "totable", nib_lua_tensor_totable },
  { "item", nib_lua_tensor_item },
  { "bytes", nib_lua_tensor_bytes },
  { "equal", tensor_equal },
  { "allclose", tensor_allclose },
  { "max_error", tensor_max_error },
  { "amax", tensor_amax },
  { "save", tensor_save },
  { NULL, NULL },
};

static const luaL_Reg metamethods[] = {
  { "__index", tensor_index },
  { "__newindex", nib_lua_tensor_newindex },
  { "__len", tensor_len },
  { "__tostring", nib_lua_tensor_tostring },
  { NULL, NULL },
};

void nib_lua_open_tensor(lua_State *L, nib_lua_state *state, int state_index) {
  nib_lua_new_class(L, state, state_index, NIB_LUA_TENSOR, methods, metamethods);
}
