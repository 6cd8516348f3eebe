/* One tensor element of any dtype as a number, and a number as an element. Shared by C and CUDA.
 *
 * To a float dtype: rounded once, to nearest even; NaN becomes 0x7FFFFFFF, 0x7FFF or 0x7F; float8 saturates. From a
 * float to an integer dtype: truncated, saturated, NaN gives 0. From an integer to a smaller one: saturated.
 *
 * A value in flight is a float32 (which holds each float dtype exactly), an int64 (each integer dtype) or, for what is
 * computed rather than copied, a float64. `type` is an enum nib_type; pass a constant and the switches fold away. */
#ifndef NIB_CONVERT_H
#define NIB_CONVERT_H

#include "nvfp4.h"

/* In a switch over the element types: of one kind alone. */
#define NIB_FLOAT_FLOAT(...) __VA_ARGS__
#define NIB_FLOAT_UNSIGNED(...)
#define NIB_FLOAT_SIGNED(...)
#define NIB_INTEGER_FLOAT(...)
#define NIB_INTEGER_UNSIGNED(...) __VA_ARGS__
#define NIB_INTEGER_SIGNED(...)   __VA_ARGS__

/* The largest number of an integer type of C. */
#define NIB_MAX_UNSIGNED(bits) ((int64_t)(bits)-1)
#define NIB_MAX_SIGNED(bits)   (INT64_MAX >> (64 - 8 * sizeof(bits)))
#define NIB_MIN_UNSIGNED(bits) 0
#define NIB_MIN_SIGNED(bits)   (-NIB_MAX_SIGNED(bits) - 1)

#define X(symbol, name, bits, kind, ...) NIB_FLOAT_##kind(case NIB_TYPE_##symbol : return 1;)
NIB_HD int nib_type_is_float(int32_t type) {
  switch (type) {
    NIB_TYPE_LIST(X, )
  default: return 0;
  }
}
#undef X

#define X(symbol, name, bits, kind, ...) \
  case NIB_TYPE_##symbol: return sizeof(bits);
NIB_HD int64_t nib_type_size(int32_t type) {
  switch (type) {
    NIB_TYPE_LIST(X, )
  default: return 0;
  }
}
#undef X

/* The least and the largest number of an integer type. */
#define X(symbol, name, bits, kind, ...) NIB_INTEGER_##kind(case NIB_TYPE_##symbol : return NIB_MIN_##kind(bits);)
NIB_HD int64_t nib_type_min(int32_t type) {
  switch (type) {
    NIB_TYPE_LIST(X, )
  default: return 0;
  }
}
#undef X

#define X(symbol, name, bits, kind, ...) NIB_INTEGER_##kind(case NIB_TYPE_##symbol : return NIB_MAX_##kind(bits);)
NIB_HD int64_t nib_type_max(int32_t type) {
  switch (type) {
    NIB_TYPE_LIST(X, )
  default: return 0;
  }
}
#undef X

/* ---- Reading --------------------------------------------------------------------------------------------------- */

/* Element `at` of a float tensor. */
NIB_HD float nib_load_f32(const void *data, int64_t at, int32_t type) {
  switch (type) {
  case NIB_TYPE_FLOAT16: return nib_f32_from_f16(((const uint16_t *)data)[at]);
  case NIB_TYPE_BFLOAT16: return nib_f32_from_bf16(((const uint16_t *)data)[at]);
  case NIB_TYPE_FLOAT8_E4M3FN: return nib_e4m3_decode(((const uint8_t *)data)[at]);
  default: return ((const float *)data)[at];
  }
}

/* Element `at` of an integer tensor. */
#define X(symbol, name, bits, kind, ...) NIB_INTEGER_##kind(case NIB_TYPE_##symbol : return ((const bits *)data)[at];)
NIB_HD int64_t nib_load_i64(const void *data, int64_t at, int32_t type) {
  switch (type) {
    NIB_TYPE_LIST(X, )
  default: return 0;
  }
}
#undef X

/* ---- Writing --------------------------------------------------------------------------------------------------- */

#define X(symbol, name, bits, kind, value) \
  NIB_INTEGER_##kind(case NIB_TYPE_##symbol : ((bits *)data)[at] = (bits)(value); break;)

NIB_HD void nib_store_integer(void *data, int64_t at, int32_t type, int64_t value) {
  int64_t low = nib_type_min(type), high = nib_type_max(type);
  value = value < low ? low : value;
  value = value > high ? high : value;
  switch (type) { NIB_TYPE_LIST(X, value) }
}

/* Truncated toward zero, saturated to int64; NaN gives 0. */
NIB_HD int64_t nib_i64_from_f64(double value) {
  if (value != value) return 0;
  if (value >= 0x1p63) return INT64_MAX;
  return value < -0x1p63 ? INT64_MIN : (int64_t)value;
}

/* The same for any integer dtype. Others than int64 fit into an int32, which is faster on a GPU. */
NIB_HD void nib_store_truncated(void *data, int64_t at, int32_t type, double value) {
  if (type == NIB_TYPE_INT64) {
    ((int64_t *)data)[at] = nib_i64_from_f64(value);
    return;
  }
  double low = (double)nib_type_min(type), high = (double)nib_type_max(type);
  value = value < low ? low : value;
  value = value > high ? high : value;
  int32_t whole = (int32_t)(value == value ? value : 0);
  switch (type) { NIB_TYPE_LIST(X, whole) }
}
#undef X

NIB_HD void nib_store_i64(void *data, int64_t at, int32_t type, int64_t value) {
  switch (type) {
  case NIB_TYPE_FLOAT32: ((float *)data)[at] = (float)nib_f64_odd_from_i64(value); break;
  case NIB_TYPE_FLOAT16: ((uint16_t *)data)[at] = nib_f16_from_f64(nib_f64_odd_from_i64(value)); break;
  case NIB_TYPE_BFLOAT16: ((uint16_t *)data)[at] = nib_bf16_from_f64(nib_f64_odd_from_i64(value)); break;
  case NIB_TYPE_FLOAT8_E4M3FN: ((uint8_t *)data)[at] = nib_e4m3_from_f64(nib_f64_odd_from_i64(value)); break;
  default: nib_store_integer(data, at, type, value); break;
  }
}

NIB_HD void nib_store_f32(void *data, int64_t at, int32_t type, float value) {
  switch (type) {
  case NIB_TYPE_FLOAT32: ((float *)data)[at] = nib_f32_canonical(value); break;
  case NIB_TYPE_FLOAT16: ((uint16_t *)data)[at] = nib_f16_from_f32(value); break;
  case NIB_TYPE_BFLOAT16: ((uint16_t *)data)[at] = nib_bf16_from_f32(value); break;
  case NIB_TYPE_FLOAT8_E4M3FN: ((uint8_t *)data)[at] = nib_e4m3_encode(value); break;
  default: nib_store_truncated(data, at, type, value); break;
  }
}

NIB_HD void nib_store_f64(void *data, int64_t at, int32_t type, double value) {
  switch (type) {
  case NIB_TYPE_FLOAT32: ((float *)data)[at] = nib_f32_canonical((float)value); break;
  case NIB_TYPE_FLOAT16: ((uint16_t *)data)[at] = nib_f16_from_f64(value); break;
  case NIB_TYPE_BFLOAT16: ((uint16_t *)data)[at] = nib_bf16_from_f64(value); break;
  case NIB_TYPE_FLOAT8_E4M3FN: ((uint8_t *)data)[at] = nib_e4m3_from_f64(value); break;
  default: nib_store_truncated(data, at, type, value); break;
  }
}

/* Element `from` of `source` becomes element `to` of `destination`; the same dtype keeps every bit. */
NIB_HD void nib_convert_element(const void *source, int64_t from, int32_t source_type, void *destination, int64_t to,
                                int32_t destination_type) {
  if (source_type == NIB_TYPE_FLOAT32 && destination_type == NIB_TYPE_FLOAT32)
    ((uint32_t *)destination)[to] = ((const uint32_t *)source)[from];
  else if (source_type == destination_type && nib_type_size(source_type) == 2)
    ((uint16_t *)destination)[to] = ((const uint16_t *)source)[from];
  else if (source_type == destination_type && nib_type_size(source_type) == 1)
    ((uint8_t *)destination)[to] = ((const uint8_t *)source)[from];
  else if (nib_type_is_float(source_type))
    nib_store_f32(destination, to, destination_type, nib_load_f32(source, from, source_type));
  else nib_store_i64(destination, to, destination_type, nib_load_i64(source, from, source_type));
}

#endif
