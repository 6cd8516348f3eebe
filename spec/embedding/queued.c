/* How much may be queued, how many streams there may be, and dropping what is queued. Host functions hold streams, and
 * a parallel_for of the host's holds a kernel: nothing depends on time. */
#include "gate.h"

static nib_runtime *create(const nib_config *config) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(config, &runtime));
  return runtime;
}

static nib_stream *stream_of(nib_device *device) {
  nib_stream *stream = NULL;
  OK(nib_device_runtime(device), nib_stream_create(device, 0, &stream));
  return stream;
}

static float first_of(nib_tensor *tensor) {
  float value = 0;
  nib_tensor *element = NULL;
  nib_runtime *runtime = nib_device_runtime(nib_tensor_device(tensor));
  OK(runtime, nib_tensor_narrow(tensor, 0, 0, 1, &element));
  OK(runtime, nib_tensor_read(element, &value, sizeof value, NIB_UNLIMITED));
  nib_tensor_release(element);
  return value;
}

/* Before a deadline that has passed already, so that what would wait fails at once. */
static void expect_late(nib_runtime *runtime, nib_status status) {
  CHECK_STATUS(NIB_TIMEOUT, runtime, status);
  nib_set_deadline(runtime, NIB_UNLIMITED);
}

#define LATE(runtime, call) (nib_set_deadline(runtime, 1000), expect_late(runtime, call))

static nib_graph *fills(nib_stream *stream, nib_tensor *tensor, int count) {
  nib_graph *graph = NULL;
  nib_runtime *runtime = nib_device_runtime(nib_stream_device(stream));
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  for (int i = 1; i <= count; i++) OK(runtime, nib_tensor_fill(stream, tensor, NIB_REAL(i)));
  OK(runtime, nib_capture_end(stream, &graph, NULL));
  return graph;
}

/* ---- The limit of bytes ---- */

static void limited_bytes(void) {
  nib_runtime *runtime = create(&(nib_config){ .queued_bytes = 1 << 20 });
  nib_device *device = device_of(runtime);
  nib_stream *a = stream_of(device), *b = stream_of(device);
  nib_tensor *half = make(device, NIB_FLOAT32, 1 << 17), *large = make(device, NIB_FLOAT32, 1 << 19),
             *small = make(device, NIB_FLOAT32, 2);
  nib_tensor *other = make(device, NIB_FLOAT32, 1 << 17); /* of b's */
  nib_graph *one = fills(a, half, 1), *three = fills(a, half, 3);
  struct gate gate = CLOSED_GATE, second = CLOSED_GATE;
  OK(runtime, nib_stream_call(a, hold, &gate));
  OK(runtime, nib_tensor_fill(a, half, NIB_REAL(1)));
  OK(runtime, nib_graph_replay(one, a)); /* now there is as much as may be, whatever the stream */
  LATE(runtime, nib_tensor_fill(a, half, NIB_REAL(2)));
  LATE(runtime, nib_tensor_fill(b, other, NIB_REAL(2)));
  CHECK(strstr(nib_error(runtime), "tensor:fill: the deadline passed"));
  LATE(runtime, nib_graph_replay(one, b));
  LATE(runtime, nib_tensor_fill(b, small, NIB_REAL(2)));
  OK(runtime, nib_stream_call(b, hold, &gate)); /* has no operands */
  open_gate(&gate);
  OK(runtime, nib_tensor_fill(b, other, NIB_REAL(2))); /* waits for room */
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));

  /* Small pieces count together. */
  OK(runtime, nib_stream_call(a, hold, &second));
  nib_tensor *eighth = make(device, NIB_FLOAT32, 1 << 12), *another = make(device, NIB_FLOAT32, 1 << 12);
  for (int i = 0; i < 64; i++) OK(runtime, nib_tensor_fill(a, eighth, NIB_REAL(i)));
  LATE(runtime, nib_tensor_fill(a, eighth, NIB_REAL(2)));
  open_gate(&second);
  for (int i = 0; i < 1000; i++) OK(runtime, nib_tensor_fill(i % 2 ? a : b, i % 2 ? eighth : another, NIB_REAL(i)));

  /* What is too much by itself: the CPU can drop it and takes it alone. */
  if (strcmp(device_name(), "cpu") == 0) {
    struct gate third = CLOSED_GATE;
    OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
    OK(runtime, nib_stream_call(a, hold, &third));
    OK(runtime, nib_graph_replay(three, a));
    LATE(runtime, nib_tensor_fill(a, large, NIB_REAL(3)));
    open_gate(&third);
    OK(runtime, nib_tensor_fill(a, large, NIB_REAL(3)));
    CHECK(first_of(large) == 3 && first_of(half) == 3);
  } else {
    CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_fill(a, large, NIB_REAL(3)));
    CHECK(strstr(nib_error(runtime), "more than the limit of 1048576 for queued work (queued_bytes)"));
    CHECK_STATUS(NIB_INVALID, runtime, nib_graph_replay(three, a));
  }
  nib_graph_release(one);
  nib_graph_release(three);
  nib_tensor *tensors[] = { half, large, small, other, eighth, another };
  for (int i = 0; i < 6; i++) nib_tensor_release(tensors[i]);
  nib_stream_release(a);
  nib_stream_release(b);
  nib_runtime_close(runtime);
}

/* ---- The limit of streams ---- */

static void limited_streams(void) {
  nib_runtime *runtime = create(&(nib_config){ .streams = 2, .threads = 1 }), *none = NULL;
  CHECK(nib_runtime_create(&(nib_config){ .streams = -1 }, &none) == NIB_INVALID && !none);
  nib_device *device = device_of(runtime);
  nib_tensor *x = make(device, NIB_FLOAT32, 100);
  nib_stream *a = stream_of(device), *b = stream_of(device), *c = NULL;
  struct gate gate = CLOSED_GATE;
  CHECK_STATUS(NIB_MEMORY, runtime, nib_stream_create(device, 0, &c));
  CHECK(!c && strstr(nib_error(runtime), " has 2 streams, which is the limit"));
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(4)));
  nib_tensor *odd = NULL; /* is packed on a GPU, in a stream of the runtime's own */
  float elements[50] = { 0 };
  OK(runtime, nib_tensor_as_strided(x, 1, (int64_t[]){ 50 }, (int64_t[]){ 2 }, 0, &odd));
  for (int i = 0; i < 3; i++) OK(runtime, nib_tensor_read(odd, elements, sizeof elements, NIB_UNLIMITED));
  CHECK(elements[0] == 4 && elements[49] == 4);
  nib_tensor_release(odd);
  OK(runtime, nib_stream_call(b, hold, &gate));
  nib_stream_release(b);
  OK(runtime, nib_stream_create(device, -1, &c)); /* whose work comes behind that which is queued yet */
  OK(runtime, nib_tensor_fill(c, x, NIB_REAL(1)));
  CHECK(nib_stream_synchronize(c, 0) == NIB_TIMEOUT);
  open_gate(&gate);
  CHECK(first_of(x) == 1);
  nib_stream_release(a);
  nib_stream_release(c);
  int before = threads();
  for (int i = 0; i < 1000; i++) {
    nib_stream *stream = stream_of(device);
    nib_tensor *own = make(device, NIB_FLOAT32, 100); /* nothing orders these streams */
    OK(runtime, nib_tensor_fill(stream, own, NIB_REAL(i)));
    nib_tensor_release(own);
    nib_stream_release(stream);
    CHECK(threads() <= before + 3 || strcmp(device_name(), "cpu") != 0); /* two streams and the default one */
  }
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  nib_tensor_release(x);
  nib_runtime_close(runtime);
}

/* ---- Dropping ---- */

static nib_status count_up(void *user) {
  __atomic_add_fetch((int *)user, 1, __ATOMIC_RELAXED);
  return NIB_OK;
}

static void dropping(void) {
  nib_runtime *runtime = create(&(nib_config){ .queued_bytes = 1 << 20 });
  nib_device *device = device_of(runtime);
  bool drops = strcmp(device_name(), "cpu") == 0;
  nib_stream *a = stream_of(device), *b = stream_of(device);
  nib_tensor *early = make(device, NIB_FLOAT32, 100), *x = make(device, NIB_FLOAT32, 100),
             *y = make(device, NIB_FLOAT32, 100);
  nib_graph *graph = fills(a, y, 3);
  int calls = 0;
  int32_t cut = -1;
  OK(runtime, nib_tensor_fill(a, x, NIB_REAL(1)));
  OK(runtime, nib_tensor_fill(a, y, NIB_REAL(1)));
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  for (int round = 0; round < 3; round++) {
    struct gate gate = CLOSED_GATE;
    nib_event *event = NULL;
    nib_tensor *gone = make(device, NIB_FLOAT32, 100);
    OK(runtime, nib_stream_call(a, hold, &gate));
    OK(runtime, nib_tensor_fill(a, early, NIB_REAL(round)));
    nib_mark_work(runtime);
    OK(runtime, nib_tensor_fill(a, gone, NIB_REAL(2)));
    nib_tensor_release(gone);
    OK(runtime, nib_tensor_fill(a, x, NIB_REAL(2)));
    OK(runtime, nib_graph_replay(graph, a));
    OK(runtime, nib_stream_call(a, count_up, &calls));
    OK(runtime, nib_event_record(a, &event));
    OK(runtime, nib_stream_wait(b, event));
    OK(runtime, nib_tensor_copy(b, y, x));
    OK(runtime, nib_drop_work(runtime, &cut));
    CHECK(cut == (drops ? 2 : 0)); /* x and y; not what was queued before, and what nobody has */
    OK(runtime, nib_drop_work(runtime, NULL));
    open_gate(&gate);
    OK(runtime, nib_event_synchronize(event, NIB_UNLIMITED));
    OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
    nib_event_release(event);
    CHECK(calls == round + 1 && first_of(early) == (float)round);
    CHECK(first_of(x) == (drops ? 1 : 2) && first_of(y) == (drops ? 1 : 2));
    OK(runtime, nib_drop_work(runtime, &cut)); /* all is done */
    CHECK(cut == 0 && nib_device_memory(device).reserved_bytes == 1200);
  }
  /* The streams go on, and there is room again. */
  nib_graph *second = fills(b, early, 3);
  for (int i = 0; i < 3000; i++) OK(runtime, nib_graph_replay(i % 2 ? graph : second, i % 2 ? a : b));
  OK(runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  OK(runtime, nib_tensor_copy(b, x, y));
  CHECK(first_of(x) == 3);
  nib_graph_release(graph);
  nib_graph_release(second);
  nib_tensor_release(early);
  nib_tensor_release(x);
  nib_tensor_release(y);
  nib_runtime_close(runtime);
  CHECK_STATUS(NIB_CLOSED, runtime, nib_stream_synchronize(a, NIB_UNLIMITED));
  nib_stream_release(a);
  nib_stream_release(b);
}

/* A kernel that has begun: its pieces that are still to come do nothing. */
static struct gate begun = CLOSED_GATE;

static void held_for(void *user, size_t count, void (*body)(void *context, size_t index), void *context) {
  body(context, 0);
  if (*(int *)user) hold(&begun);
  for (size_t i = 1; i < count; i++) body(context, i);
}

static void dropping_a_running_kernel(void) {
  enum { ELEMENTS = 1 << 20 };
  int holds = 0;
  int32_t cut = 0;
  nib_runtime *runtime = create(&(nib_config){ .parallel_for = held_for, .threads = 4, .user = &holds });
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  nib_tensor *x = make(cpu, NIB_FLOAT32, ELEMENTS);
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(1)));
  OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
  holds = 1;
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(2)));
  wait_until_reached(&begun);
  OK(runtime, nib_drop_work(runtime, &cut));
  CHECK(cut == 1);
  holds = 0;
  open_gate(&begun);
  OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
  const float *values = nib_tensor_data(x);
  CHECK(values[0] == 2 && values[ELEMENTS - 1] == 1);
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(3)));
  OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
  CHECK(values[0] == 3 && values[ELEMENTS - 1] == 3);
  nib_tensor_release(x);
  nib_runtime_close(runtime);
}

int main(void) {
  limited_bytes();
  limited_streams();
  dropping();
  dropping_a_running_kernel();
  return 0;
}
