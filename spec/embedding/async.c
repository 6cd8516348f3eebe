/* Work is asynchronous, in order inside its stream, and independent between streams unless an event says otherwise. No
 * time is measured: a host function in the stream holds it until it is told to go on. */
#include <unistd.h>

#include "gate.h"

static nib_status fail(void *user) {
  (void)user;
  return NIB_FILE;
}

static nib_runtime *runtime;
static nib_device *device;

static float first_of(nib_tensor *tensor) {
  float values[1000];
  OK(runtime, nib_tensor_read(tensor, values, sizeof values, NIB_UNLIMITED));
  for (int i = 1; i < 1000; i++) CHECK(values[i] == values[0]);
  return values[0];
}

int main(void) {
  OK(NULL, nib_runtime_create(NULL, &runtime));
  device = device_of(runtime);
  nib_stream *a = NULL, *b = NULL;
  OK(runtime, nib_stream_create(device, 0, &a));
  OK(runtime, nib_stream_create(device, 0, &b));
  CHECK(nib_stream_id(a) != nib_stream_id(b));
  nib_tensor *x = make(device, NIB_FLOAT32, 1000), *y = make(device, NIB_FLOAT32, 1000),
             *z = make(device, NIB_FLOAT32, 1000);
  nib_tensor *filled[] = { x, y, z };
  for (int i = 0; i < 3; i++) OK(runtime, nib_tensor_fill(a, filled[i], NIB_REAL(0)));
  OK(runtime, nib_stream_synchronize(a, NIB_UNLIMITED));

  /* Calls return although the stream is held; nothing behind the gate has happened; another stream goes on. */
  struct gate gate = CLOSED_GATE;
  nib_event *event = NULL;
  OK(runtime, nib_stream_call(a, hold, &gate));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(1)));
  OK(runtime, nib_event_record(a, &event));
  CHECK(nib_event_synchronize(event, 0) == NIB_TIMEOUT);
  CHECK(nib_event_synchronize(event, 2000) == NIB_TIMEOUT);
  CHECK(nib_stream_synchronize(a, 0) == NIB_TIMEOUT);
  CHECK(nib_device_synchronize(device, 1000) == NIB_TIMEOUT);
  CHECK(nib_tensor_wait(x, 0) == NIB_TIMEOUT);
  CHECK(*(volatile float *)nib_tensor_data(x) == 0);
  OK(runtime, nib_tensor_fill(b, y, NIB_REAL(7)));
  OK(runtime, nib_stream_synchronize(b, NIB_UNLIMITED));
  CHECK(first_of(y) == 7);
  /* A copy that forgot to wait sees the old value. */
  OK(runtime, nib_tensor_copy(b, z, x));
  OK(runtime, nib_stream_synchronize(b, NIB_UNLIMITED));
  CHECK(*(volatile float *)nib_tensor_data(z) == 0);
  /* One that waits for the event is held as well, and sees the new one. */
  OK(runtime, nib_stream_wait(b, event));
  OK(runtime, nib_tensor_copy(b, y, x));
  CHECK(nib_stream_synchronize(b, 2000) == NIB_TIMEOUT);
  CHECK(*(volatile float *)nib_tensor_data(y) == 7);
  open_gate(&gate);
  CHECK(first_of(y) == 1);
  OK(runtime, nib_event_synchronize(event, 0));
  CHECK(first_of(x) == 1);
  nib_event_release(event);

  /* Host memory is free again when a write returns, though its stream is held. */
  float host[1000];
  for (int i = 0; i < 1000; i++) host[i] = 5;
  struct gate second = CLOSED_GATE;
  OK(runtime, nib_stream_call(a, hold, &second));
  OK(runtime, nib_tensor_write(a, x, host, sizeof host));
  memset(host, 0, sizeof host);
  CHECK(*(volatile float *)nib_tensor_data(x) == 1);
  open_gate(&second);
  CHECK(first_of(x) == 5);

  /* Releasing neither waits nor takes memory away from queued work; the memory goes when the work is done. */
  nib_memory_info base = nib_device_memory(device);
  nib_tensor *temporary = make(device, NIB_FLOAT32, 1000);
  struct gate third = CLOSED_GATE;
  OK(runtime, nib_stream_call(a, hold, &third));
  OK(runtime, nib_tensor_fill(a, temporary, NIB_REAL(9)));
  OK(runtime, nib_tensor_copy(a, x, temporary));
  nib_tensor_release(temporary);
  nib_stream_release(a);
  CHECK(nib_device_memory(device).used_bytes == base.used_bytes);
  CHECK(nib_device_memory(device).reserved_bytes >= base.reserved_bytes + 4000);
  OK(runtime, nib_tick(runtime, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).reserved_bytes >= base.reserved_bytes + 4000);
  open_gate(&third);
  CHECK(first_of(x) == 9);
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(runtime, nib_tick(runtime, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).reserved_bytes == base.reserved_bytes);
  CHECK(nib_stream_create(device, -1, &a) == NIB_OK);

  /* A replay is asynchronous too, and keeps its graph. */
  nib_graph *graph = NULL;
  OK(runtime, nib_capture_begin(a, NIB_CAPTURE_RELAXED));
  CHECK(nib_stream_is_capturing(a) && nib_device_is_capturing(device) && !nib_stream_is_capturing(b));
  CHECK_STATUS(NIB_CAPTURING, runtime, nib_stream_call(a, fail, NULL));
  CHECK_STATUS(NIB_CAPTURING, runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  CHECK_STATUS(NIB_CAPTURING, runtime, nib_tensor_write(a, x, host, sizeof host));
  CHECK_STATUS(NIB_CAPTURING, runtime, nib_capture_begin(b, NIB_CAPTURE_THREAD_LOCAL));
  OK(runtime, nib_tensor_copy(a, y, x));
  OK(runtime, nib_capture_end(a, &graph, NULL));
  CHECK(!nib_device_is_capturing(device));
  struct gate fourth = CLOSED_GATE;
  OK(runtime, nib_stream_call(a, hold, &fourth));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(11)));
  OK(runtime, nib_graph_replay(graph, a));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(12)));
  OK(runtime, nib_graph_replay(graph, a));
  nib_graph_release(graph);
  CHECK(nib_tensor_wait(y, 0) == NIB_TIMEOUT);
  CHECK(*(volatile float *)nib_tensor_data(y) == 1);
  open_gate(&fourth);
  CHECK(first_of(y) == 12);

  /* A stream's error reaches the next wait, once; later work runs all the same. */
  OK(runtime, nib_stream_call(a, fail, NULL));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(3)));
  CHECK_STATUS(NIB_STREAM, runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  CHECK(strlen(nib_error(runtime)) > 0);
  OK(runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  CHECK(first_of(x) == 3);
  OK(runtime, nib_stream_call(a, fail, NULL));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(4)));
  CHECK_STATUS(NIB_STREAM, runtime, nib_tensor_wait(x, NIB_UNLIMITED));
  CHECK(first_of(x) == 4);
  OK(runtime, nib_stream_call(b, fail, NULL));
  OK(runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  CHECK_STATUS(NIB_STREAM, runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));

  /* What makes a file's contents doubtful is told before the file that is there is given up. */
  char path[] = "/tmp/async_XXXXXX", word[8] = "";
  const char *name = "x";
  int made = mkstemp(path);
  CHECK(made >= 0 && write(made, "before", 6) == 6 && close(made) == 0);
  OK(runtime, nib_stream_call(a, fail, NULL));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(5)));
  CHECK_STATUS(NIB_STREAM, runtime, nib_safetensors_save(runtime, path, 1, &name, &x));
  FILE *file = fopen(path, "rb");
  CHECK(file && fread(word, 1, 7, file) == 6 && strcmp(word, "before") == 0 && fclose(file) == 0 && remove(path) == 0);

  /* An event tells nothing of the stream that has the place of its own, which was released. */
  nib_event *old = NULL, *recent = NULL;
  double milliseconds;
  OK(runtime, nib_event_record(a, &old));
  OK(runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  nib_stream_release(a);
  OK(runtime, nib_stream_create(device, -1, &a));
  OK(runtime, nib_stream_call(a, fail, NULL));
  OK(runtime, nib_event_record(a, &recent));
  while (nib_event_elapsed(old, recent, &milliseconds) == NIB_TIMEOUT) continue;
  OK(runtime, nib_event_synchronize(old, NIB_UNLIMITED));
  CHECK_STATUS(NIB_STREAM, runtime, nib_event_synchronize(recent, NIB_UNLIMITED));
  nib_event_release(old);
  nib_event_release(recent);

  /* Closing waits for what is queued. */
  for (int i = 0; i < 100; i++) OK(runtime, nib_tensor_copy(a, y, x));
  for (int i = 0; i < 100; i++) OK(runtime, nib_tensor_fill(b, z, NIB_REAL(i)));
  nib_runtime_close(runtime);
  nib_tensor_release(x);
  nib_tensor_release(y);
  nib_tensor_release(z);
  nib_stream_release(a);
  nib_stream_release(b);
  return 0;
}
