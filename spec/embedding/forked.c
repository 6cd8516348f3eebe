/* After fork, every call on the old runtime in the child is one clear error, nothing hangs, and a new runtime works;
 * the parent goes on as before. */
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host.h"

static nib_runtime *runtime;

static void forked(nib_status status) {
  CHECK(status == NIB_FORKED);
  CHECK(strstr(nib_error(runtime), "fork"));
}

int main(void) {
  OK(NULL, nib_runtime_create(&(nib_config){ .threads = 3 }, &runtime));
  nib_device *cpu = device_of(runtime), *device = NULL;
  nib_stream *stream = NULL, *fresh = NULL;
  nib_event *event = NULL, *later = NULL;
  nib_graph *graph = NULL;
  OK(runtime, nib_stream_create(cpu, 0, &stream));
  nib_tensor *t = make(cpu, NIB_FLOAT32, 300000), *u = make(cpu, NIB_BFLOAT16, 300000), *v = NULL;
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  OK(runtime, nib_tensor_copy(stream, u, t));
  OK(runtime, nib_capture_end(stream, &graph, NULL));
  for (int i = 0; i < 20; i++) {
    OK(runtime, nib_tensor_random_normal(stream, t, (uint64_t)i));
    OK(runtime, nib_graph_replay(graph, stream));
  }
  OK(runtime, nib_event_record(stream, &event));

  pid_t child = fork(); /* with work in flight */
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);
    static float values[300000];
    bool equal;
    int64_t one = 1;
    forked(nib_tensor_fill(stream, t, NIB_REAL(1)));
    forked(nib_tensor_copy(stream, u, t));
    forked(nib_tensor_read(t, values, sizeof values, NIB_UNLIMITED));
    forked(nib_tensor_wait(t, NIB_UNLIMITED));
    forked(nib_tensor_create(cpu, NIB_UINT8, 1, &one, &v));
    forked(nib_tensor_equal(t, t, &equal));
    forked(nib_stream_synchronize(stream, NIB_UNLIMITED));
    forked(nib_device_synchronize(cpu, NIB_UNLIMITED));
    forked(nib_device_find(runtime, "cpu", &device));
    forked(nib_stream_create(cpu, 0, &fresh));
    forked(nib_event_record(stream, &later));
    forked(nib_event_synchronize(event, NIB_UNLIMITED));
    forked(nib_stream_wait(stream, event));
    forked(nib_graph_replay(graph, stream));
    forked(nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
    forked(nib_rope_table(stream, 4, 1e4, NIB_FLOAT32, &v));
    forked(nib_tick(runtime, NIB_UNLIMITED));
    CHECK(!v && !device && !fresh && !later);
    nib_event_release(event);
    nib_graph_release(graph);
    nib_tensor_release(t);
    nib_tensor_release(u);
    nib_stream_release(stream);
    nib_runtime_close(runtime);
    /* A runtime of the child's own works. (Not under AddressSanitizer: its allocator's locks stay as the parent's
     * threads had them.) */
#ifndef __SANITIZE_ADDRESS__
    OK(NULL, nib_runtime_create(NULL, &runtime));
    cpu = cpu_of(runtime);
    t = make(cpu, NIB_FLOAT32, 300000);
    OK(runtime, nib_tensor_fill(nib_device_default_stream(cpu), t, NIB_REAL(8)));
    OK(runtime, nib_tensor_read(t, values, sizeof values, NIB_UNLIMITED));
    CHECK(values[0] == 8 && values[299999] == 8);
    nib_tensor_release(t);
    nib_runtime_close(runtime);
#endif
    _exit(0); /* a sanitizer would look for leaks of the parent in here */
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
  OK(runtime, nib_graph_replay(graph, stream));
  OK(runtime, nib_event_synchronize(event, NIB_UNLIMITED));
  nib_event_release(event);
  nib_graph_release(graph);
  nib_tensor_release(t);
  nib_tensor_release(u);
  nib_stream_release(stream);
  nib_runtime_close(runtime);
  return 0;
}
