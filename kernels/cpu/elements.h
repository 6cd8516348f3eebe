/* Loops over convert.h, one for each dtype, that copy, arange and random share. Strides are in elements. */
#ifndef NIB_CPU_ELEMENTS_H
#define NIB_CPU_ELEMENTS_H

#include "../convert.h"
#include "clones.h"

#define NIB_RUN 256 /* elements in flight between a load and a store: small enough for the first-level cache */

/* Elements of a tensor that are dealt with at once; in flight they lie row after row. */
struct nib_rows {
  int64_t rows, row_stride, columns, stride;
};

/* Calls each(TYPE, ...) with the dtype as a constant, so that the compiler makes one plain loop of each. */
#define NIB_TYPE_CASE(symbol, name, bits, kind, each, ...) \
  case NIB_TYPE_##symbol:                                  \
    each(NIB_TYPE_##symbol, __VA_ARGS__);                  \
    break;
#define NIB_BY_TYPE(type, ...) \
  switch (type) { NIB_TYPE_LIST(NIB_TYPE_CASE, __VA_ARGS__) }

/* For every element of `rows`, `at` its offset and `i` its place in flight. Long compact rows have their own loop,
 * which the compiler can turn into vector code. */
#define NIB_FOR_ELEMENTS(statement)                                          \
  for (int64_t row = 0; row < rows.rows; row++) {                            \
    int64_t first = row * rows.row_stride, place = row * rows.columns;       \
    if (rows.stride == 1 && rows.columns >= 16)                              \
      for (int64_t column = 0; column < rows.columns; column++) {            \
        const int64_t at = first + column, i = place + column;               \
        statement;                                                           \
      }                                                                      \
    else                                                                     \
      for (int64_t column = 0; column < rows.columns; column++) {            \
        const int64_t at = first + column * rows.stride, i = place + column; \
        statement;                                                           \
      }                                                                      \
  }

NIB_BODY nib_load_rows_f32(int32_t type, const void *restrict data, struct nib_rows rows,
                           float *restrict out){ NIB_FOR_ELEMENTS(out[i] = nib_load_f32(data, at, type)) }

NIB_BODY nib_load_rows_i64(int32_t type, const void *restrict data, struct nib_rows rows,
                           int64_t *restrict out){ NIB_FOR_ELEMENTS(out[i] = nib_load_i64(data, at, type)) }

NIB_BODY nib_store_rows_f32(int32_t type, void *restrict data, struct nib_rows rows,
                            const float *restrict in){ NIB_FOR_ELEMENTS(nib_store_f32(data, at, type, in[i])) }

NIB_BODY nib_store_rows_i64(int32_t type, void *restrict data, struct nib_rows rows,
                            const int64_t *restrict in){ NIB_FOR_ELEMENTS(nib_store_i64(data, at, type, in[i])) }

/* Compact runs. */

NIB_BODY nib_store_run_f64(int32_t type, void *restrict data, int64_t count, const double *restrict in) {
  for (int64_t i = 0; i < count; i++) nib_store_f64(data, i, type, in[i]);
}

NIB_BODY nib_store_run_i64(int32_t type, void *restrict data, int64_t count, const int64_t *restrict in) {
  for (int64_t i = 0; i < count; i++) nib_store_i64(data, i, type, in[i]);
}

/* The start of a compact tensor's element `at`. */
static inline void *nib_element(void *data, int64_t at, int32_t type) {
  return (char *)data + at * nib_type_size(type);
}

/* Words for elements that are moved as they are, whatever their dtype. */
typedef uint8_t __attribute__((may_alias)) nib_word8;
typedef uint16_t __attribute__((may_alias)) nib_word16;
typedef uint32_t __attribute__((may_alias)) nib_word32;
typedef uint64_t __attribute__((may_alias)) nib_word64;

#endif
