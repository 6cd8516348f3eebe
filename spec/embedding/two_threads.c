/* Two runtimes in two threads at once: neither sees the other's values, errors or memory. */
#include <pthread.h>

#include "host.h"

enum { ROUNDS = 300, SIZE = 20000 };

static void *work(void *argument) {
  int number = *(int *)argument;
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_device *device = device_of(runtime);
  nib_stream *stream = nib_device_default_stream(device);
  int64_t *values = malloc(SIZE * sizeof *values);
  nib_tensor *t = make(device, NIB_INT64, SIZE), *u = make(device, NIB_INT64, SIZE);
  char expected[32];
  snprintf(expected, sizeof expected, "got %d", number + 100);
  for (int round = 0; round < ROUNDS; round++) {
    OK(runtime, nib_tensor_fill(stream, t, NIB_INTEGER(number * 1000000 + round)));
    OK(runtime, nib_tensor_copy(stream, u, t));
    nib_tensor *view = NULL;
    CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_narrow(t, number + 100, 0, 1, &view));
    OK(runtime, nib_tensor_read(u, values, SIZE * sizeof *values, NIB_UNLIMITED));
    for (int i = 0; i < SIZE; i++) CHECK(values[i] == number * 1000000 + round);
    CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_narrow(t, number + 100, 0, 1, &view));
    CHECK(strstr(nib_error(runtime), expected));
    CHECK(nib_device_memory(device).used_bytes >= 2 * SIZE * 8 && nib_device_memory(device).used_bytes < 3 * SIZE * 8);
  }
  nib_tensor_release(t);
  nib_tensor_release(u);
  nib_runtime_close(runtime);
  free(values);
  return NULL;
}

int main(void) {
  pthread_t threads[2];
  int numbers[2] = { 1, 2 };
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  return 0;
}
