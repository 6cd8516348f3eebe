/* Arguments of Lua functions: each reader returns the value or raises `operation: parameter: expected X, got Y`. */
#ifndef NIB_ARGS_H
#define NIB_ARGS_H

#include "module.h"

/* Pushes a description of the value at an index: `3.5`, `a string "abc"`, `a tensor float32 {2, 3}`. */
const char *nib_lua_describe(lua_State *L, int index);

/* Raises the error; Y is described from the value at an index. `expected` and its arguments are lua_pushfstring's. */
int nib_lua_expected(lua_State *L, const char *operation, const char *parameter, int index, const char *expected, ...);
/* The same with the text of `expected X, got Y`. */
int nib_lua_argument_error(lua_State *L, const char *operation, const char *parameter, const char *format, ...);

/* A table that is what it holds: tables are read raw, so that one with __index or __len would seem empty, and is
 * refused. */
void nib_lua_plain_table(lua_State *L, const char *operation, const char *parameter, int index);

/* Integers, also those that are written as floats (3.0). */
bool nib_lua_to_integer(lua_State *L, int index, int64_t *out);
int64_t nib_lua_integer(lua_State *L, const char *operation, const char *parameter, int index);
/* A dimension or an index that counts from 1, as one that counts from 0. The runtime checks its range. */
int64_t nib_lua_position(lua_State *L, const char *operation, const char *parameter, int index);
nib_number nib_lua_number(lua_State *L, const char *operation, const char *parameter, int index);
/* A number that an element of the dtype can hold. */
nib_number nib_lua_element(lua_State *L, const char *operation, const char *parameter, int index, nib_dtype dtype);
/* A string that has no zero bytes, to be compared with names; "" for every other value. */
const char *nib_lua_word(lua_State *L, int index);
/* A string without zero bytes. */
const char *nib_lua_text(lua_State *L, const char *operation, const char *parameter, int index);
/* A function, or what can be called like one: functions of a host's other languages come as userdata with __call. */
bool nib_lua_is_function(lua_State *L, int index);

/* Integers: those at first..last, or those in one table at `first`. Returns how many. */
int32_t nib_lua_integers(lua_State *L, const char *operation, const char *parameter, int first, int last, int64_t *out);
/* The same where only a table will do. */
int32_t nib_lua_integer_list(lua_State *L, const char *operation, const char *parameter, int index, int64_t *out);

/* Positional arguments from `first` on, up to one for each of the names; the last one given may be a table of keywords
 * instead, for itself and those that follow. Spreads it, so that afterwards all are positional. */
void nib_lua_spread_options(lua_State *L, const char *operation, int first, const char *const *names);
/* Options: the table at an index (or nothing), in which only the names of `allowed` (up to a NULL) may be. */
void nib_lua_options(lua_State *L, const char *operation, int index, const char *const *allowed);
/* Pushes an option of the table at an index; nil if there is no table. */
int nib_lua_push_option(lua_State *L, int index, const char *name);
bool nib_lua_boolean_option(lua_State *L, const char *operation, int index, const char *name, bool otherwise);
double nib_lua_number_option(lua_State *L, const char *operation, int index, const char *name, double otherwise);
int64_t nib_lua_integer_option(lua_State *L, const char *operation, int index, const char *name, int64_t otherwise);
/* The option `dtype`; NIB_DTYPE_NONE if it is not there. */
nib_dtype nib_lua_dtype_option(lua_State *L, const char *operation, int index);
/* The option `device`, otherwise the default device. */
nib_device *nib_lua_device_option(lua_State *L, const char *operation, int index);
/* The same with the option `pinned`, which goes with the CPU alone. */
nib_device *nib_lua_place_option(lua_State *L, const char *operation, int index, bool *pinned);

nib_dtype nib_lua_dtype(lua_State *L, const char *operation, const char *parameter, int index);
/* A device's name, or nothing for the default. */
nib_device *nib_lua_device(lua_State *L, const char *operation, int index);
/* The name of the default device if NIBBLE_DEVICE is set, otherwise NULL: the best. */
const char *nib_lua_default_device(void);

nib_tensor *nib_lua_tensor(lua_State *L, const char *operation, const char *parameter, int index);
/* A tensor in the options, or NULL. It stays on the stack, where the collector sees it. */
nib_tensor *nib_lua_tensor_option(lua_State *L, const char *operation, int index, const char *name);
/* A pair {k, v} or a stacked tensor. Leaves two values on the stack, where the collector sees them. */
nib_cache nib_lua_cache(lua_State *L, const char *operation, const char *parameter, int index);
nib_scale_source nib_lua_scale(lua_State *L, const char *operation, const char *parameter, int index);
/* "NHD" or "HND", nothing for `otherwise`, or a table of options with the name kv_layout. */
nib_layout nib_lua_layout(lua_State *L, const char *operation, int index, nib_layout otherwise);

#endif
