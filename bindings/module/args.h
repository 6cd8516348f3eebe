/* Arguments of Lua functions: each reader returns the value or raises `operation: parameter: expected X, got Y`. */
#ifndef NIB_ARGS_H
#define NIB_ARGS_H

#include "module.h"

/* Pushes a description of the value at an index: `3.5`, `a string "abc"`, `a tensor float32 {2, 3}`. */
const char *nib_lua_describe(lua_State *L, int index);

/* Raises the error. X is `expected`, formatted as by lua_pushfstring; Y describes the value at an index. */
int nib_lua_expected(lua_State *L, const char *operation, const char *parameter, int index, const char *expected, ...);
/* The same; `format` is all of the text `X, got Y`. */
int nib_lua_argument_error(lua_State *L, const char *operation, const char *parameter, const char *format, ...);

/* Refuses a table with __index or __len. Tables are read raw, so that its fields would be missed. */
void nib_lua_plain_table(lua_State *L, const char *operation, const char *parameter, int index);

/* Accepts floats with integer values (3.0), too. */
bool nib_lua_to_integer(lua_State *L, int index, int64_t *out);
int64_t nib_lua_integer(lua_State *L, const char *operation, const char *parameter, int index);
/* Reads a dimension or an index that counts from 1 and returns it counted from 0. The runtime checks its range. */
int64_t nib_lua_position(lua_State *L, const char *operation, const char *parameter, int index);
nib_number nib_lua_number(lua_State *L, const char *operation, const char *parameter, int index);
/* A number that an element of the dtype can hold. */
nib_number nib_lua_element(lua_State *L, const char *operation, const char *parameter, int index, nib_dtype dtype);
/* A string without zero bytes, to compare with names; "" for any other value. */
const char *nib_lua_word(lua_State *L, int index);
/* A string without zero bytes. */
const char *nib_lua_text(lua_State *L, const char *operation, const char *parameter, int index);
/* Whether the value is a function or has __call. Bindings of other languages pass functions as userdata. */
bool nib_lua_is_function(lua_State *L, int index);

/* Reads the integers at first..last, or those in one table at `first`. Returns their number. */
int32_t nib_lua_integers(lua_State *L, const char *operation, const char *parameter, int first, int last, int64_t *out);
/* The same for a table at `index`. */
int32_t nib_lua_integer_list(lua_State *L, const char *operation, const char *parameter, int index, int64_t *out);

/* The arguments from `first` on are those of `names`. A table in place of one of them gives that one and the following
 * ones by name; its values are put into their positions. */
void nib_lua_spread_options(lua_State *L, const char *operation, int first, const char *const *names);
/* Checks that the value at an index is nothing, nil or a table whose keys are all in `allowed`, which ends with NULL.
 */
void nib_lua_options(lua_State *L, const char *operation, int index, const char *const *allowed);
/* Pushes an option of the table at an index; nil if there is no table. */
int nib_lua_push_option(lua_State *L, int index, const char *name);
bool nib_lua_boolean_option(lua_State *L, const char *operation, int index, const char *name, bool otherwise);
double nib_lua_number_option(lua_State *L, const char *operation, int index, const char *name, double otherwise);
int64_t nib_lua_integer_option(lua_State *L, const char *operation, int index, const char *name, int64_t otherwise);
/* The option `dtype`, or NIB_DTYPE_NONE. */
nib_dtype nib_lua_dtype_option(lua_State *L, const char *operation, int index);
/* The option `device`, or the default device. */
nib_device *nib_lua_device_option(lua_State *L, const char *operation, int index);
/* The options `device` and `pinned`. Pinned memory is the CPU's. */
nib_device *nib_lua_place_option(lua_State *L, const char *operation, int index, bool *pinned);

nib_dtype nib_lua_dtype(lua_State *L, const char *operation, const char *parameter, int index);
/* The device of that name; the default device for nil or no value. */
nib_device *nib_lua_device(lua_State *L, const char *operation, int index);
/* NIBBLE_DEVICE, or NULL if it is not set: then the default is nib_device_best's. */
const char *nib_lua_default_device(void);

nib_tensor *nib_lua_tensor(lua_State *L, const char *operation, const char *parameter, int index);
/* A tensor option, or NULL. Leaves it on the stack, so that it is not collected. */
nib_tensor *nib_lua_tensor_option(lua_State *L, const char *operation, int index, const char *name);
/* A pair {k, v} or a stacked tensor. Leaves the tensors of a pair on the stack, so that they are not collected. */
nib_cache nib_lua_cache(lua_State *L, const char *operation, const char *parameter, int index);
nib_scale_source nib_lua_scale(lua_State *L, const char *operation, const char *parameter, int index);
/* "NHD" or "HND"; `otherwise` for nil or no value. */
/* true, false, nil or {err_mode = "MSE"}. */
nib_4over6 nib_lua_4over6(lua_State *L, const char *operation, int index);
nib_layout nib_lua_layout(lua_State *L, const char *operation, int index, nib_layout otherwise);

#endif
