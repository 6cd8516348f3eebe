/* nib_tick and nib_set_deadline: what is done is freed a little at a time, whatever else is still in use; nothing waits
 * past the deadline. No time is measured: held streams and budgets of a microsecond show it. */
#include "gate.h"

enum { HELD = 100, DONE = 100, ELEMENTS = 10000 };

static long bytes;

static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user;
  bytes += (long)new_size - (long)old_size;
  if (new_size > 0) return realloc(pointer, new_size);
  free(pointer);
  return NULL;
}

/* More looks than there are objects; each gets to one or a few. */
static void tick(nib_runtime *runtime) {
  for (int i = 0; i < 20000; i++) OK(runtime, nib_tick(runtime, 1));
}

int main(void) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .allocate = allocate }, &runtime));
  nib_device *cpu = cpu_of(runtime);
  nib_stream *held = NULL, *other = NULL;
  OK(runtime, nib_stream_create(cpu, 0, &held));
  OK(runtime, nib_stream_create(cpu, 0, &other));
  struct gate gate = CLOSED_GATE;
  OK(runtime, nib_stream_call(held, hold, &gate));
  nib_tensor *tensors[HELD + DONE];
  for (int i = 0; i < HELD + DONE; i++) {
    tensors[i] = make(cpu, NIB_FLOAT32, ELEMENTS);
    OK(runtime, nib_tensor_fill(i % 2 ? held : other, tensors[i], NIB_REAL(i)));
  }
  /* A second gate, so that all are released while their work is queued. */
  struct gate second = CLOSED_GATE;
  OK(runtime, nib_stream_call(other, hold, &second));
  for (int i = 0; i < HELD + DONE; i++) {
    OK(runtime, nib_tensor_fill(i % 2 ? held : other, tensors[i], NIB_REAL(-i)));
  }
  nib_event *event = NULL, *held_event = NULL;
  OK(runtime, nib_event_record(other, &event));
  OK(runtime, nib_event_record(held, &held_event));
  long before = bytes;
  for (int i = 0; i < HELD + DONE; i++) nib_tensor_release(tensors[i]);
  const long handles = 4 * ELEMENTS * 2; /* far less than the memory of two tensors */
  CHECK(before - bytes < handles);
  tick(runtime);
  CHECK(before - bytes < handles);

  /* Waits end at the deadline, whatever their own timeout, and go on when it is gone. */
  nib_set_deadline(runtime, 1000);
  CHECK_STATUS(NIB_TIMEOUT, runtime, nib_stream_synchronize(held, NIB_UNLIMITED));
  CHECK_STATUS(NIB_TIMEOUT, runtime, nib_device_synchronize(cpu, 1000000000));
  nib_tensor *late = make(cpu, NIB_FLOAT32, 10);
  bool equal = true;
  CHECK_STATUS(NIB_TIMEOUT, runtime, nib_tensor_equal(late, late, &equal));
  CHECK(!equal);
  double amax = -1;
  CHECK_STATUS(NIB_TIMEOUT, runtime, nib_tensor_amax(late, &amax));
  int queued = 0;
  nib_status status;
  while ((status = nib_tensor_fill(held, late, NIB_REAL(1))) == NIB_OK) queued++;
  CHECK(status == NIB_TIMEOUT && queued > 0 && queued < 256);
  nib_set_deadline(runtime, INT64_MAX - 1); /* almost never */
  nib_tensor *fresh = make(cpu, NIB_FLOAT32, 10);
  OK(runtime, nib_tensor_equal(fresh, fresh, &equal));
  CHECK(equal);
  nib_tensor_release(fresh);
  nib_set_deadline(runtime, NIB_UNLIMITED);
  CHECK_STATUS(NIB_TIMEOUT, runtime, nib_stream_synchronize(held, 1000));

  /* No time is left: nothing waits. */
  static const int64_t none[] = { 0, -1, -1000000, INT64_MIN };
  for (int i = 0; i < 4; i++) {
    CHECK_STATUS(NIB_TIMEOUT, runtime, nib_stream_synchronize(held, none[i]));
    CHECK_STATUS(NIB_TIMEOUT, runtime, nib_device_synchronize(cpu, none[i]));
    CHECK_STATUS(NIB_TIMEOUT, runtime, nib_event_synchronize(held_event, none[i]));
    CHECK_STATUS(NIB_TIMEOUT, runtime, nib_tensor_wait(late, none[i]));
    CHECK_STATUS(NIB_TIMEOUT, runtime, nib_tensor_read(late, &(float[10]){ 0 }, 40, none[i]));
    nib_set_deadline(runtime, none[i]);
    CHECK_STATUS(NIB_TIMEOUT, runtime, nib_stream_synchronize(held, NIB_UNLIMITED));
    nib_set_deadline(runtime, NIB_UNLIMITED);
  }

  /* What is done goes, though held ones are in between, and a budget allows for one or so. */
  open_gate(&second);
  OK(runtime, nib_event_synchronize(event, NIB_UNLIMITED)); /* unlike a stream's wait, this frees nothing itself */
  nib_event_release(event);
  tick(runtime);
  const long freed = (long)DONE * ELEMENTS * 4;
  CHECK(before - bytes >= freed && before - bytes < freed + freed / 2);
  open_gate(&gate);
  OK(runtime, nib_event_synchronize(held_event, NIB_UNLIMITED));
  nib_event_release(held_event);
  nib_tensor_release(late);
  for (int i = 0; i < 4; i++) { /* no time at all is one piece */
    long had = bytes;
    OK(runtime, nib_tick(runtime, none[i]));
    CHECK(bytes < had && had - bytes < handles);
  }
  for (int i = 0; i < 2; i++) OK(runtime, nib_tick(runtime, NIB_UNLIMITED));
  CHECK(before - bytes >= 2 * freed);
  nib_stream_release(held);
  nib_stream_release(other);
  nib_runtime_close(runtime);
  return 0;
}
