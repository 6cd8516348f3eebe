/* Files of tensors (load, list, save; tensor:save is in tensor.c) and text files (create). */
#include <string.h>

#include "args.h"

/* For a file that cannot be opened, read or written, pushes nil and the message. Raises every other error. */
static int push_failure(lua_State *L, const char *operation, const char *path, nib_status status) {
  if (status == NIB_FILE) {
    lua_pushnil(L);
    nib_lua_push_message(L, operation, status);
    return 2;
  }
  if (status == NIB_FORMAT) return luaL_error(L, "%s (in %s)", nib_lua_push_message(L, operation, status), path);
  return nib_lua_raise(L, operation, status);
}

static bool is_safetensors(const char *path) {
  static const char suffix[] = ".safetensors";
  size_t length = strlen(path);
  return length >= sizeof suffix - 1 && strcmp(path + length - (sizeof suffix - 1), suffix) == 0;
}

static nib_status load_safetensors(nib_stream *stream, const char *path, const char *name, nib_dtype as,
                                   nib_tensor **out) {
  nib_safetensors *file;
  int32_t index;
  nib_status status = nib_safetensors_open(nib_device_runtime(nib_stream_device(stream)), path, &file);
  if (status == NIB_OK) status = nib_safetensors_find(file, name, &index);
  if (status == NIB_OK) status = nib_safetensors_read(stream, file, index, as, out);
  nib_safetensors_close(file);
  return status;
}

static int load(lua_State *L) {
  static const char *const allowed[] = { "dtype", "device", "pinned", "name", NULL };
  bool pinned;
  const char *path = nib_lua_text(L, "load", "path", 1);
  lua_settop(L, 2);
  nib_lua_options(L, "load", 2, allowed);
  nib_dtype as = nib_lua_dtype_option(L, "load", 2);
  nib_device *device = nib_lua_place_option(L, "load", 2, &pinned);
  const char *name = nib_lua_push_option(L, 2, "name") == LUA_TNIL ? NULL : nib_lua_text(L, "load", "name", -1);
  nib_lua_refuse_capture(L, "load", device);
  nib_stream *stream = nib_lua_current_stream(L, "load", device);
  nib_lua_object *object = nib_lua_push(L, NIB_LUA_TENSOR);
  nib_status status = NIB_MEMORY;
  for (int tries = 0; tries < 2 && status == NIB_MEMORY; tries++) {
    if (tries > 0) nib_lua_collect(L);
    status = name || is_safetensors(path) ? load_safetensors(stream, path, name, as, &object->tensor)
                                          : nib_npy_load(stream, path, as, &object->tensor);
  }
  if (status != NIB_OK) return push_failure(L, "load", path, status);
  NIB_LUA_OBSERVED(L);
  nib_lua_account(L, object->tensor);
  if (pinned) { /* the file was read into ordinary memory */
    const nib_tensor *read = object->tensor;
    nib_lua_object *copy =
      nib_lua_create(L, "load", device, true, nib_tensor_dtype(read), nib_tensor_ndim(read), nib_tensor_shape(read));
    nib_lua_copy(L, "load", copy->tensor, object->tensor);
  }
  return 1;
}

/* Pushes the table of the entries of a file, a light userdata. */
static int push_entries(lua_State *L) {
  const nib_safetensors *file = lua_touserdata(L, 1);
  int32_t count = nib_safetensors_count(file);
  lua_createtable(L, count, 0);
  for (int32_t i = 0; i < count; i++) {
    const nib_safetensors_entry *entry = nib_safetensors_at(file, i);
    lua_createtable(L, 0, 6);
    lua_pushstring(L, entry->name);
    lua_setfield(L, -2, "name");
    lua_pushstring(L, entry->stored);
    lua_setfield(L, -2, "stored");
    if (entry->dtype != NIB_DTYPE_NONE) {
      lua_pushstring(L, nib_dtype_name(entry->dtype));
      lua_setfield(L, -2, "dtype");
    }
    lua_createtable(L, entry->ndim, 0);
    for (int32_t d = 0; d < entry->ndim; d++) {
      lua_pushinteger(L, entry->shape[d]);
      lua_rawseti(L, -2, d + 1);
    }
    lua_setfield(L, -2, "shape");
    lua_pushinteger(L, (lua_Integer)entry->offset);
    lua_setfield(L, -2, "offset");
    lua_pushinteger(L, (lua_Integer)entry->bytes);
    lua_setfield(L, -2, "bytes");
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static int list(lua_State *L) {
  const char *path = nib_lua_text(L, "list", "path", 1);
  nib_safetensors *file;
  luaL_checkstack(L, 2, NULL);
  nib_status status = nib_safetensors_open(nib_lua_runtime(L, "list"), path, &file);
  if (status != NIB_OK) return push_failure(L, "list", path, status);
  lua_pushcfunction(L, push_entries);
  lua_pushlightuserdata(L, file);
  int ended = lua_pcall(L, 1, 1, 0); /* so that the file is closed after an error, too */
  nib_safetensors_close(file);
  return ended == LUA_OK ? 1 : lua_error(L);
}

static int save(lua_State *L) {
  const char *path = nib_lua_text(L, "save", "path", 1);
  if (lua_type(L, 2) != LUA_TTABLE) return nib_lua_expected(L, "save", "tensors", 2, "a table of tensors by name");
  nib_lua_plain_table(L, "save", "tensors", 2);
  lua_settop(L, 2);
  int32_t count = 0;
  lua_newtable(L); /* keeps names and tensors alive if the caller's table changes meanwhile */
  for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) return nib_lua_expected(L, "save", "tensors", -2, "names of tensors as keys");
    lua_pushvalue(L, -2);
    lua_rawseti(L, 3, 2 * count + 1);
    lua_pushvalue(L, -1);
    lua_rawseti(L, 3, 2 * count + 2);
    count++;
  }
  const char **names = lua_newuserdatauv(L, (size_t)count * sizeof *names + 1, 0);
  nib_tensor **tensors = lua_newuserdatauv(L, (size_t)count * sizeof *tensors + 1, 0);
  for (int32_t i = 0; i < count; i++) {
    lua_rawgeti(L, 3, 2 * i + 1);
    names[i] = nib_lua_text(L, "save", "name", -1);
    lua_rawgeti(L, 3, 2 * i + 2);
    nib_lua_refuse_capture(L, "save", nib_tensor_device(nib_lua_tensor(L, "save", names[i], -1)));
    nib_lua_wait_tensor(L, "save", nib_lua_tensor(L, "save", names[i], -1));
    lua_pop(L, 2);
  }
  for (int32_t i = 0; i < count; i++) { /* hooks and finalizers ran during the waits and may have closed a tensor */
    lua_rawgeti(L, 3, 2 * i + 2);
    tensors[i] = nib_lua_tensor(L, "save", names[i], -1);
    lua_pop(L, 1);
  }
  nib_status status = nib_safetensors_save(nib_lua_runtime(L, "save"), path, count, names, tensors);
  if (status != NIB_OK) return push_failure(L, "save", path, status);
  NIB_LUA_OBSERVED(L);
  lua_pushboolean(L, true);
  return 1;
}

/* ---- Text files ------------------------------------------------------------------------------------------------ */

struct writer {
  nib_writer *handle; /* NULL: closed */
};

static int writer_write(lua_State *L) {
  const struct writer *writer = luaL_checkudata(L, 1, "nibble.writer");
  if (!writer->handle) return nib_lua_argument_error(L, "writer:write", "self", "an open writer, got a closed one");
  for (int i = 2; i <= lua_gettop(L); i++) {
    size_t length;
    if (lua_type(L, i) != LUA_TSTRING) return nib_lua_expected(L, "writer:write", "text", i, "a string");
    const char *text = lua_tolstring(L, i, &length);
    nib_status status = nib_writer_write(writer->handle, text, length);
    if (status != NIB_OK) return push_failure(L, "writer:write", "", status);
  }
  lua_settop(L, 1);
  return 1;
}

static nib_status end_writer(lua_State *L, bool keep) {
  struct writer *writer = luaL_checkudata(L, 1, "nibble.writer");
  nib_writer *handle = writer->handle;
  writer->handle = NULL;
  return nib_writer_close(handle, keep);
}

static int writer_close(lua_State *L) {
  nib_status status = end_writer(L, true);
  if (status != NIB_OK) return push_failure(L, "writer:close", "", status);
  lua_pushboolean(L, true);
  return 1;
}

/* __close: after an error the text may be incomplete, so the file is dropped. */
static int writer_leave(lua_State *L) {
  nib_status status = end_writer(L, lua_isnil(L, 2));
  return status == NIB_OK ? 0 : nib_lua_raise(L, "writer:close", status);
}

static int writer_gc(lua_State *L) {
  end_writer(L, true);
  return 0;
}

static int create(lua_State *L) {
  static const luaL_Reg methods[] = { { "write", writer_write },
                                      { "close", writer_close },
                                      { "__close", writer_leave },
                                      { "__gc", writer_gc },
                                      { NULL, NULL } };
  const char *path = nib_lua_text(L, "create", "path", 1);
  nib_runtime *runtime = nib_lua_runtime(L, "create");
  struct writer *writer = lua_newuserdatauv(L, sizeof *writer, 0);
  writer->handle = NULL;
  if (luaL_newmetatable(L, "nibble.writer")) {
    lua_pushvalue(L, lua_upvalueindex(1));
    luaL_setfuncs(L, methods, 1);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "__index");
  }
  lua_setmetatable(L, -2);
  nib_status status = nib_writer_create(runtime, path, &writer->handle);
  return status == NIB_OK ? 1 : push_failure(L, "create", path, status);
}

const luaL_Reg nib_lua_files[] = {
  { "load", load }, { "list", list }, { "save", save }, { "create", create }, { NULL, NULL }
};
