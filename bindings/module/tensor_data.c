/* Elements between Lua and tensors: nibble.tensor, totable, item, bytes, t[i], t[i] = v. */
#include <limits.h>
#include <string.h>

#include "args.h"

static void push_number(lua_State *L, nib_number number) {
  if (number.is_float) lua_pushnumber(L, number.real);
  else lua_pushinteger(L, number.integer);
}

/* ---- nibble.tensor --------------------------------------------------------------------------------------------- */

/* A walk over a nested table. The first walk checks it, the second one converts its numbers. The second one checks,
 * too, since a finalizer may change the table between them. */
struct walk {
  int32_t ndim;
  int64_t shape[NIB_MAX_NDIM], path[NIB_MAX_NDIM];
  bool has_reals;
  nib_dtype dtype;
  unsigned char *out; /* NULL: check only */
};

/* Pushes a name such as `data[2][3]`, for messages. */
static const char *push_path(lua_State *L, const struct walk *walk, int32_t levels) {
  lua_pushliteral(L, "data");
  for (int32_t i = 0; i < levels; i++) {
    lua_pushfstring(L, "%s[%I]", lua_tostring(L, -1), (LUAI_UACINT)walk->path[i]);
    lua_remove(L, -2);
  }
  return lua_tostring(L, -1);
}

/* Reads the number on top of the stack, which is inside `levels` tables. */
static void walk_number(lua_State *L, struct walk *walk, int32_t levels) {
  if (lua_type(L, -1) != LUA_TNUMBER) {
    int index = lua_gettop(L);
    nib_lua_expected(L, "tensor", "data", index, "a number at %s", push_path(L, walk, levels));
  }
  bool is_float = !lua_isinteger(L, -1);
  walk->has_reals |= is_float;
  if (!walk->out) return;
  nib_number number = is_float ? NIB_REAL(lua_tonumber(L, -1)) : NIB_INTEGER(lua_tointeger(L, -1));
  if (!nib_element_from_number(walk->dtype, number, walk->out)) {
    int index = lua_gettop(L);
    nib_lua_expected(L, "tensor", "data", index, "a number that %s can hold at %s", nib_dtype_name(walk->dtype),
                     push_path(L, walk, levels));
  }
  walk->out += nib_dtype_bytes(walk->dtype);
}

/* Refuses other keys in a table of numbers, such as misplaced options: they would be ignored silently. lua_next gives
 * them after the last number of the array part. */
static void refuse_other_keys(lua_State *L, const struct walk *walk, int32_t level, int64_t size) {
  if (size > 0) lua_pushinteger(L, size);
  else lua_pushnil(L);
  while (lua_next(L, -2)) {
    int64_t key = lua_isinteger(L, -2) ? lua_tointeger(L, -2) : 0;
    lua_pop(L, 1);
    nib_lua_step(L, key);
    if (key >= 1 && key <= size) continue; /* a number in the table's hash part */
    int index = lua_gettop(L);
    nib_lua_expected(L, "tensor", "data", index, "no keys but 1..%I in %s", (LUAI_UACINT)size,
                     push_path(L, walk, level));
  }
}

/* Walks the table on top of the stack, which is inside `level` others. */
static void walk_table(lua_State *L, struct walk *walk, int32_t level) {
  int64_t size = walk->shape[level];
  if (lua_getmetatable(L, -1)) {
    int index = lua_gettop(L) - 1;
    nib_lua_plain_table(L, "tensor", push_path(L, walk, level), index);
    lua_pop(L, 2);
  }
  if ((int64_t)lua_rawlen(L, -1) != size) {
    int64_t got = (int64_t)lua_rawlen(L, -1);
    nib_lua_argument_error(L, "tensor", "data", "%I elements in %s, got %I", (LUAI_UACINT)size,
                           push_path(L, walk, level), (LUAI_UACINT)got);
  }
  if (!walk->out) refuse_other_keys(L, walk, level, size);
  for (int64_t i = 1; i <= size; i++) {
    walk->path[level] = i;
    nib_lua_step(L, i - 1);
    int type = lua_rawgeti(L, -1, i);
    if (level + 1 == walk->ndim) {
      walk_number(L, walk, level + 1);
    } else if (type != LUA_TTABLE) {
      int index = lua_gettop(L);
      nib_lua_expected(L, "tensor", "data", index, "a table of %I elements at %s", (LUAI_UACINT)walk->shape[level + 1],
                       push_path(L, walk, level + 1));
    } else {
      walk_table(L, walk, level + 1);
    }
    lua_pop(L, 1);
  }
}

static void walk_data(lua_State *L, struct walk *walk) {
  lua_pushvalue(L, 1);
  if (walk->ndim == 0) walk_number(L, walk, 0);
  else walk_table(L, walk, 0);
  lua_pop(L, 1);
}

int nib_lua_new_tensor(lua_State *L) {
  static const char *const allowed[] = { "dtype", "device", "pinned", NULL };
  struct walk walk = { 0 };
  luaL_checkstack(L, 3 * NIB_MAX_NDIM, NULL);
  lua_settop(L, 2);
  if (lua_type(L, 1) != LUA_TNUMBER && lua_type(L, 1) != LUA_TTABLE)
    return nib_lua_expected(L, "tensor", "data", 1, "a number or a table of numbers");
  nib_lua_options(L, "tensor", 2, allowed);
  nib_dtype dtype = nib_lua_dtype_option(L, "tensor", 2);
  bool pinned;
  nib_device *device = nib_lua_place_option(L, "tensor", 2, &pinned);
  nib_lua_refuse_capture(L, "tensor", device);

  /* The shape is read from the first element of each level; the walk compares all others with it. */
  lua_pushvalue(L, 1);
  while (lua_type(L, -1) == LUA_TTABLE) {
    if (walk.ndim == NIB_MAX_NDIM)
      return nib_lua_argument_error(L, "tensor", "data", "at most %d levels of tables, got more", NIB_MAX_NDIM);
    walk.shape[walk.ndim++] = (int64_t)lua_rawlen(L, -1);
    if (walk.shape[walk.ndim - 1] == 0) break;
    lua_rawgeti(L, -1, 1);
  }
  lua_settop(L, 2);
  walk_data(L, &walk);
  walk.dtype = dtype != NIB_DTYPE_NONE ? dtype : walk.has_reals ? NIB_FLOAT32 : NIB_INT64;

  uint64_t count = 1; /* no overflow: the table holds all these numbers */
  for (int32_t i = 0; i < walk.ndim; i++) count *= (uint64_t)walk.shape[i];
  size_t bytes = (size_t)count * nib_dtype_bytes(walk.dtype);
  unsigned char *buffer = walk.out = lua_newuserdatauv(L, bytes > 0 ? bytes : 1, 0);
  walk_data(L, &walk);
  nib_stream *stream = nib_lua_current_stream(L, "tensor", device);
  nib_lua_object *object = nib_lua_create(L, "tensor", device, pinned, walk.dtype, walk.ndim, walk.shape);
  NIB_LUA_DO(L, "tensor", nib_tensor_write(stream, object->tensor, buffer, bytes));
  return 1;
}

/* ---- Whole tensors --------------------------------------------------------------------------------------------- */

static int new_buffer(lua_State *L) {
  lua_newuserdatauv(L, (size_t)lua_tointeger(L, 1), 0);
  return 1;
}

/* A userdata for elements. A view can be larger than the machine's memory, so the error names the operation and the
 * size. A sandbox tells by Lua's own error that its memory is exhausted. */
static void *push_buffer(lua_State *L, const char *operation, size_t bytes) {
  if (bytes < (size_t)1 << 20 || nib_lua_get_state(L)->limits.check)
    return lua_newuserdatauv(L, bytes > 0 ? bytes : 1, 0);
  lua_pushcfunction(L, new_buffer);
  lua_pushinteger(L, (lua_Integer)bytes);
  if (lua_pcall(L, 1, 1, 0) != LUA_OK)
    luaL_error(L, "%s: out of memory: cannot allocate %I bytes in Lua", operation, (LUAI_UACINT)bytes);
  return lua_touserdata(L, -1);
}

/* Waits for the tensor and pushes a buffer with its elements. */
static const unsigned char *push_elements(lua_State *L, const char *operation, nib_tensor *tensor) {
  size_t bytes = (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(nib_tensor_dtype(tensor));
  nib_lua_wait_tensor(L, operation, tensor);
  void *buffer = push_buffer(L, operation, bytes);
  NIB_LUA_DO(L, operation, nib_tensor_read(tensor, buffer, bytes, NIB_UNLIMITED));
  return buffer;
}

/* Pushes a nested table of the dimensions from `dim` on. Returns the element after its last one. */
static const unsigned char *push_table(lua_State *L, const nib_tensor *tensor, int32_t dim,
                                       const unsigned char *element) {
  nib_dtype dtype = nib_tensor_dtype(tensor);
  int64_t size = nib_tensor_shape(tensor)[dim];
  lua_createtable(L, size < INT_MAX ? (int)size : INT_MAX, 0);
  for (int64_t i = 1; i <= size; i++) {
    nib_lua_step(L, i - 1);
    if (dim + 1 < nib_tensor_ndim(tensor)) {
      element = push_table(L, tensor, dim + 1, element);
    } else {
      push_number(L, nib_element_to_number(dtype, element));
      element += nib_dtype_bytes(dtype);
    }
    lua_rawseti(L, -2, i);
  }
  return element;
}

int nib_lua_tensor_totable(lua_State *L) {
  nib_tensor *self = nib_lua_tensor(L, "tensor:totable", "self", 1);
  luaL_checkstack(L, 2 * NIB_MAX_NDIM, NULL);
  /* Use a view of our own, since a finalizer may close the tensor while the tables are built. */
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:totable", nib_tensor_alias(self, &view->tensor));
  const unsigned char *elements = push_elements(L, "tensor:totable", view->tensor);
  if (nib_tensor_ndim(view->tensor) == 0)
    push_number(L, nib_element_to_number(nib_tensor_dtype(view->tensor), elements));
  else push_table(L, view->tensor, 0, elements);
  return 1;
}

int nib_lua_tensor_item(lua_State *L) {
  nib_tensor *self = nib_lua_tensor(L, "tensor:item", "self", 1);
  unsigned char element[8];
  nib_dtype dtype = nib_tensor_dtype(self);
  if (nib_tensor_numel(self) != 1) return nib_lua_expected(L, "tensor:item", "self", 1, "a tensor of one element");
  nib_lua_wait_tensor(L, "tensor:item", self);
  NIB_LUA_DO(L, "tensor:item", nib_tensor_read(self, element, nib_dtype_bytes(dtype), NIB_UNLIMITED));
  push_number(L, nib_element_to_number(dtype, element));
  return 1;
}

int nib_lua_tensor_bytes(lua_State *L) {
  nib_tensor *self = nib_lua_tensor(L, "tensor:bytes", "self", 1);
  size_t bytes = (size_t)nib_tensor_numel(self) * nib_dtype_bytes(nib_tensor_dtype(self));
  const unsigned char *elements = push_elements(L, "tensor:bytes", self);
  lua_pushlstring(L, (const char *)elements, bytes);
  return 1;
}

/* ---- Elements -------------------------------------------------------------------------------------------------- */

nib_status nib_lua_select(nib_tensor *tensor, int32_t count, const int64_t *indices, nib_tensor **out) {
  nib_tensor *view;
  nib_status status = nib_tensor_alias(tensor, &view);
  for (int32_t i = 0; status == NIB_OK && i < count; i++) {
    nib_tensor *next = NULL;
    status = nib_tensor_select(view, 0, indices[i], &next);
    nib_tensor_release(view);
    view = next;
  }
  *out = view;
  return status;
}

/* Reads the indices of t[i] or t[{i, j, ...}], checks their range and counts them from 0. Returns their number. */
static int32_t check_indices(lua_State *L, const char *operation, const nib_tensor *tensor, int64_t *indices) {
  int32_t ndim = nib_tensor_ndim(tensor), count = 1;
  if (lua_type(L, 2) == LUA_TTABLE) {
    nib_lua_plain_table(L, operation, "index", 2);
    lua_Unsigned length = lua_rawlen(L, 2);
    if (length > (lua_Unsigned)ndim)
      nib_lua_argument_error(L, operation, "index", "at most %d indices, got %I", (int)ndim, (LUAI_UACINT)length);
    count = nib_lua_integer_list(L, operation, "index", 2, indices);
  } else {
    if (!nib_lua_to_integer(L, 2, indices))
      nib_lua_expected(L, operation, "index", 2, "an integer, a table of integers or the name of a field or method");
    if (ndim == 0) nib_lua_expected(L, operation, "self", 1, "a tensor of one or more dimensions");
  }
  for (int32_t i = 0; i < count; i++) {
    int64_t size = nib_tensor_shape(tensor)[i];
    if (indices[i] < 1 || indices[i] > size)
      nib_lua_argument_error(L, operation, "index", "an index in 1..%I of dimension %d, got %I", (LUAI_UACINT)size,
                             (int)i + 1, (LUAI_UACINT)indices[i]);
    indices[i]--;
  }
  return count;
}

int nib_lua_tensor_index(lua_State *L) {
  int64_t indices[NIB_MAX_NDIM];
  nib_tensor *self = nib_lua_tensor(L, "tensor:index", "self", 1);
  int32_t count = check_indices(L, "tensor:index", self, indices);
  if (count < nib_tensor_ndim(self)) {
    nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
    NIB_LUA_DO(L, "tensor:index", nib_lua_select(self, count, indices, &view->tensor));
    return 1;
  }
  nib_lua_wait_tensor(L, "tensor:index", self);
  unsigned char bits[8];
  nib_dtype dtype = nib_tensor_dtype(self);
  nib_tensor *element;
  nib_status status = nib_lua_select(self, count, indices, &element);
  if (status == NIB_OK) status = nib_tensor_read(element, bits, nib_dtype_bytes(dtype), NIB_UNLIMITED);
  nib_tensor_release(element);
  if (status != NIB_OK) return nib_lua_raise(L, "tensor:index", status);
  NIB_LUA_OBSERVED(L);
  push_number(L, nib_element_to_number(dtype, bits));
  return 1;
}

int nib_lua_tensor_newindex(lua_State *L) {
  int64_t indices[NIB_MAX_NDIM];
  nib_tensor *self = nib_lua_tensor(L, "tensor:newindex", "self", 1);
  int32_t count = check_indices(L, "tensor:newindex", self, indices);
  bool is_number = lua_type(L, 3) == LUA_TNUMBER;
  nib_number value = NIB_INTEGER(0);
  nib_tensor *source = NULL;
  if (is_number) value = nib_lua_element(L, "tensor:newindex", "value", 3, nib_tensor_dtype(self));
  else if (nib_lua_test(L, 3, NIB_LUA_TENSOR)) source = nib_lua_tensor(L, "tensor:newindex", "value", 3);
  else return nib_lua_expected(L, "tensor:newindex", "value", 3, "a number or a tensor");
  nib_stream *stream = nib_lua_current_stream(L, "tensor:newindex", nib_tensor_device(self));
  nib_lua_object *view = nib_lua_push(L, NIB_LUA_TENSOR);
  NIB_LUA_DO(L, "tensor:newindex", nib_lua_select(self, count, indices, &view->tensor));
  if (is_number) NIB_LUA_DO(L, "tensor:newindex", nib_tensor_fill(stream, view->tensor, value));
  else nib_lua_copy(L, "tensor:newindex", view->tensor, source);
  nib_tensor_release(view->tensor);
  view->tensor = NULL;
  return 0;
}
