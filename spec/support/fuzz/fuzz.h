/* What the fuzzers share: reading decisions from the input, and a check that ends the process where it fails. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nibble_tools.h"

#define DTYPES (NIB_INT64 + 1)

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                  \
    }                                                                           \
  } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The bytes of an input; zeros behind its end. */
struct input {
  const uint8_t *at, *end;
};

static inline uint8_t next_byte(struct input *in) { return in->at < in->end ? *in->at++ : 0; }
static inline uint32_t below(struct input *in, uint32_t count) { return next_byte(in) % count; }
static inline bool one_in(struct input *in, uint32_t count) { return below(in, count) == count - 1; }

static inline uint64_t next_word(struct input *in) {
  uint64_t word = 0;
  for (int i = 0; i < 8; i++) word = word << 8 | next_byte(in);
  return word;
}

#define PICK(in, ...) ((int64_t[]){ __VA_ARGS__ })[below(in, sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t))]

/* Where arithmetic on sizes goes wrong, if anywhere. */
static inline int64_t odd_number(struct input *in) {
  return PICK(in, 0, 1, 2, 3, 5, 8, 16, 63, 64, 100, -1, -2, -3, 255, 256, 65536, INT32_MAX, INT32_MIN,
              (int64_t)1 << 31, (int64_t)1 << 32, ((int64_t)1 << 32) + 1, (int64_t)1 << 58, (int64_t)1 << 61,
              (int64_t)1 << 62, INT64_MAX, INT64_MIN, INT64_MAX / 8 + 1);
}

/* Every error says what was expected of which parameter. */
static inline void check_message(const nib_runtime *runtime) {
  const char *message = nib_error(runtime), *colon = strstr(message, ": ");
  CHECK(colon && strstr(colon + 2, ": ") && strstr(message, "expected ") && strstr(message, "got ") &&
        !strchr(message, '\n'));
}

#endif
