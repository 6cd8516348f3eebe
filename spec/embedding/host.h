/* What the host programs share: a check that says where it failed and ends the program, and a few one-liners. */
#ifndef HOST_H
#define HOST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nibble_tools.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

#define CHECK_STATUS(expected, runtime, call)                                                                       \
  do {                                                                                                              \
    nib_status status_ = (call);                                                                                    \
    if (status_ != (expected)) {                                                                                    \
      fprintf(stderr, "%s:%d: %s: expected %s, got %s: %s\n", __FILE__, __LINE__, #call, nib_status_name(expected), \
              nib_status_name(status_), (runtime) ? nib_error(runtime) : "");                                       \
      exit(1);                                                                                                      \
    }                                                                                                               \
  } while (0)

#define OK(runtime, call) CHECK_STATUS(NIB_OK, runtime, call)

static inline nib_device *cpu_of(nib_runtime *runtime) {
  nib_device *device = NULL;
  OK(runtime, nib_device_find(runtime, "cpu", &device));
  return device;
}

/* The device under test. */
static inline const char *device_name(void) {
  const char *name = getenv("NIBBLE_DEVICE");
  return name && *name ? name : "cpu";
}

static inline nib_device *device_of(nib_runtime *runtime) {
  nib_device *device = NULL;
  OK(runtime, nib_device_find(runtime, device_name(), &device));
  return device;
}

static inline nib_tensor *make(nib_device *device, nib_dtype dtype, int64_t size) {
  nib_tensor *tensor = NULL;
  OK(nib_device_runtime(device), nib_tensor_create(device, dtype, 1, &size, &tensor));
  return tensor;
}

/* The resident memory of the process in bytes. */
static inline long resident(void) {
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%*s %ld", &pages) == 1);
  fclose(file);
  return pages * 4096;
}

#endif
