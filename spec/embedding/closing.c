/* Closing a runtime with work in its queues: host functions still run, and see what the kernels before them wrote; the
 * rest of the backlog is dropped. */
#include <time.h>

#include "host.h"

static const volatile float *watched;
static float seen;

static nib_status hold(void *user) {
  (void)user;
  nanosleep(&(struct timespec){ .tv_nsec = 50000000 }, NULL);
  return NIB_OK;
}

static nib_status save(void *user) {
  (void)user;
  seen = *watched;
  return NIB_OK;
}

int main(void) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_stream *stream = nib_device_default_stream(device_of(runtime));
  nib_tensor *x = make(device_of(runtime), NIB_FLOAT32, 100000);
  watched = nib_tensor_data(x);
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(1)));
  OK(runtime, nib_stream_call(stream, hold, NULL));
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(7)));
  OK(runtime, nib_stream_call(stream, save, NULL));
  for (int i = 0; i < 200; i++) OK(runtime, nib_tensor_random_normal(stream, x, (uint64_t)i));
  nib_runtime_close(runtime);
  CHECK(seen == 7);
  CHECK_STATUS(NIB_CLOSED, runtime, nib_tensor_fill(stream, x, NIB_REAL(1)));
  nib_tensor_release(x);
  return 0;
}
