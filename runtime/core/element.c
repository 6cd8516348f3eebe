/* Conversions between single elements and numbers of the host. */
#include <math.h>
#include <string.h>

#include "../../kernels/convert.h"
#include "core.h"
#include "floats.h"

/* Converts a float32 to float64 by its bits, since the caller's thread may flush subnormals. */
static nib_number real_of_bits(uint32_t bits) {
  uint64_t magnitude = bits & ~NIB_F32_SIGN, wide = magnitude << 29;
  if (magnitude >= NIB_F32_INFINITY) wide |= (uint64_t)0x7FF << 52; /* infinity and NaN */
  else if (magnitude >= 1u << 23) wide += (uint64_t)(1023 - 127) << 52;
  else if (magnitude > 0) {
    int shift = __builtin_clz((uint32_t)magnitude) - 8; /* moves the leading bit to where a normal number has it */
    wide = (magnitude << (29 + shift)) + ((uint64_t)(1023 - 127 - shift) << 52);
  }
  wide |= (uint64_t)(bits & NIB_F32_SIGN) << 32;
  double real;
  memcpy(&real, &wide, sizeof real);
  return NIB_REAL(real);
}

nib_number nib_element_to_number(nib_dtype dtype, const void *element) {
  union {
    uint32_t u;
    uint16_t h;
    uint8_t b;
    int64_t integer;
  } bits = { 0 };
  memcpy(&bits, element, nib_dtype_bytes(dtype));
  switch (dtype) {
  case NIB_FLOAT32: return real_of_bits(bits.u);
  case NIB_FLOAT16: return real_of_bits(nib_bits_from_f32(nib_f32_from_f16(bits.h)));
  case NIB_BFLOAT16: return real_of_bits((uint32_t)bits.h << 16);
  case NIB_FLOAT8_E4M3FN: return real_of_bits(nib_bits_from_f32(nib_e4m3_decode(bits.b)));
  default: return NIB_INTEGER(nib_load_i64(&bits, 0, (int32_t)dtype));
  }
}

/* Converts an integer, or a real with the value of an int64. */
static bool as_integer(nib_number number, int64_t *out) {
  if (number.is_float) {
    if (!(number.real >= -0x1p63 && number.real < 0x1p63) || number.real != floor(number.real)) return false;
    *out = (int64_t)number.real;
  } else {
    *out = number.integer;
  }
  return true;
}

bool nib_integer_range(nib_dtype dtype, int64_t *low, int64_t *high) {
  *low = nib_type_min((int32_t)dtype);
  *high = nib_type_max((int32_t)dtype);
  return !nib_dtype_is_float(dtype);
}

static bool element_from_number(nib_dtype dtype, nib_number number, void *element) {
  if (nib_dtype_bytes(dtype) == 0) return false;
  int64_t low, high, integer;
  if (nib_integer_range(dtype, &low, &high)) {
    if (!as_integer(number, &integer) || integer < low || integer > high) return false;
    memcpy(element, &integer, nib_dtype_bytes(dtype)); /* little endian, like the formats */
    return true;
  }
  double real = number.is_float ? number.real : nib_f64_odd_from_i64(number.integer);
  float single = (float)real; /* rounds once, since an integer above 2^53 was rounded to odd before */
  uint32_t bits;
  switch (dtype) {
  case NIB_FLOAT32: bits = nib_bits_from_f32(nib_f32_canonical(single)); break;
  case NIB_FLOAT16: bits = nib_f16_from_f64(real); break;
  case NIB_BFLOAT16: bits = nib_bf16_from_f64(real); break;
  default: bits = nib_e4m3_from_f64(real); break;
  }
  memcpy(element, &bits, nib_dtype_bytes(dtype));
  return true;
}

bool nib_element_from_number(nib_dtype dtype, nib_number number, void *element) {
  struct nib_floats floats;
  nib_floats_enter(&floats);
  NIB_OPAQUE(number);
  bool fits = element_from_number(dtype, number, element);
  NIB_OPAQUE(fits);
  nib_floats_leave(&floats);
  return fits;
}
