/* A thousand runtimes, one after another, each with work, leave nothing behind; objects may outlive their runtime. */
#include "host.h"

static void cycle(int round) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .threads = 1 + round % 3 }, &runtime));
  nib_device *device = device_of(runtime);
  nib_stream *stream = NULL;
  nib_event *event = NULL;
  nib_graph *graph = NULL;
  OK(runtime, nib_stream_create(device, 0, &stream));
  nib_tensor *a = make(device, NIB_FLOAT32, 10000), *b = make(device, NIB_BFLOAT16, 10000);
  OK(runtime, nib_tensor_random_normal(stream, a, (uint64_t)round));
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  OK(runtime, nib_tensor_copy(stream, b, a));
  OK(runtime, nib_capture_end(stream, &graph, NULL));
  OK(runtime, nib_graph_replay(graph, stream));
  OK(runtime, nib_event_record(stream, &event));
  if (round % 2) { /* the tidy way */
    OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
    nib_event_release(event);
    nib_graph_release(graph);
    nib_tensor_release(a);
    nib_tensor_release(b);
    nib_stream_release(stream);
    nib_runtime_close(runtime);
  } else { /* with work queued, a capture open every fourth time, and everything alive */
    if (round % 4 == 0) {
      OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
      OK(runtime, nib_tensor_fill(stream, a, NIB_REAL(1)));
    }
    nib_runtime_close(runtime);
    nib_tensor *view = NULL;
    CHECK(nib_tensor_fill(stream, a, NIB_REAL(1)) == NIB_CLOSED);
    CHECK(nib_tensor_narrow(a, 0, 0, 1, &view) == NIB_CLOSED && !view);
    CHECK(nib_stream_synchronize(stream, NIB_UNLIMITED) == NIB_CLOSED);
    CHECK(nib_event_synchronize(event, NIB_UNLIMITED) == NIB_CLOSED);
    CHECK(nib_graph_replay(graph, stream) == NIB_CLOSED);
    nib_tensor_release(b);
    nib_graph_release(graph);
    nib_event_release(event);
    nib_stream_release(stream);
    nib_tensor_release(a);
  }
}

int main(void) {
  for (int round = 0; round < 200; round++) cycle(round);
  long before = resident();
  for (int round = 0; round < 1000; round++) cycle(round);
  long grown = resident() - before;
  /* 1 KiB a cycle would be 1 MiB. A sanitizer keeps what was freed for a while. */
  if (grown > (1 << 20) && !getenv("ASAN_OPTIONS")) {
    fprintf(stderr, "%ld bytes more after 1,000 runtimes\n", grown);
    return 1;
  }
  return 0;
}
