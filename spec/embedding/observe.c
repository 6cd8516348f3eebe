/* An observer is told what was done, in order, with numbers that come once; then it is gone; and a look at a
 * storage. */
#include "host.h"

static struct {
  int count[NIB_OBSERVED_STORAGE_CUT + 1], total;
  nib_observation last;
  nib_access access;
  uint64_t node_capture;
} seen;

static void observe(void *user, const nib_observation *o) {
  CHECK(user == &seen && o->operation && o->device && strcmp(nib_observation_name(o->kind), "?") != 0);
  seen.count[o->kind]++;
  seen.total++;
  CHECK(o->begin_ns > 0 && o->begin_ns <= o->time_ns && o->time_ns >= seen.last.time_ns);
  CHECK((o->kind == NIB_OBSERVED_RANGE_PUSH) == (o->name != NULL));
  if (o->name) CHECK(strcmp(o->name, "a range") == 0);
  seen.last = *o;
  if (o->access_count > 0) {
    seen.access = o->accesses[0];
    CHECK(seen.access.tensor && nib_tensor_storage(seen.access.tensor) > 0);
  }
  if (o->node >= 0) {
    CHECK(o->kind == NIB_OBSERVED_WORK && o->capture > 0 && o->dep_count == o->node); /* the nodes of one stream */
    for (int32_t i = 0; i < o->dep_count; i++) CHECK(o->deps[i] == o->node - 1);
    seen.node_capture = o->capture;
  }
}

static nib_status nothing(void *user) {
  (void)user;
  return NIB_OK;
}

int main(void) {
  CHECK(strcmp(nib_observation_name((nib_observation_kind)(NIB_OBSERVED_STORAGE_CUT + 1)), "?") == 0);
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_device *device = device_of(runtime);
  nib_runtime_observe(runtime, observe, &seen);
  nib_stream *stream = NULL;
  OK(runtime, nib_stream_create(device, 0, &stream));
  CHECK(seen.last.kind == NIB_OBSERVED_STREAM_CREATED && seen.last.stream == nib_stream_id(stream));
  nib_tensor *x = make(device, NIB_INT32, 4), *view = NULL;
  uint64_t storage = nib_tensor_storage(x);
  CHECK(seen.last.kind == NIB_OBSERVED_STORAGE_CREATED && seen.last.storage == storage && seen.last.bytes == 16);
  OK(runtime, nib_tensor_narrow(x, 0, 1, 2, &view));
  CHECK(nib_tensor_storage(view) == storage && nib_tensor_offset_bytes(view) == 4);

  OK(runtime, nib_tensor_fill(stream, x, NIB_INTEGER(7)));
  OK(runtime, nib_tensor_fill(stream, view, NIB_INTEGER(9)));
  CHECK(seen.last.kind == NIB_OBSERVED_WORK && seen.last.stream == nib_stream_id(stream) && seen.last.node == -1);
  CHECK(strcmp(seen.last.operation, "tensor:fill") == 0 && strcmp(seen.last.kernel, "fill") == 0 &&
        !seen.last.user_kernel);
  CHECK(seen.access.tensor == view && seen.access.write && strcmp(seen.access.parameter, "tensor") == 0);
  nib_range_push(runtime, "a range");
  CHECK(seen.last.kind == NIB_OBSERVED_RANGE_PUSH && strcmp(nib_observation_name(seen.last.kind), "range_push") == 0);
  nib_range_pop(runtime);
  CHECK(seen.last.kind == NIB_OBSERVED_RANGE_POP);
  int total = seen.total;
  nib_tensor *other = NULL;
  int64_t negative = -1;
  CHECK_STATUS(NIB_INVALID, runtime, nib_tensor_create(device, NIB_INT32, 1, &negative, &other));
  CHECK(seen.total == total); /* what fails is not told */

  int32_t values[4] = { 0 };
  const int64_t shape[] = { 2, 2 }, stride[] = { 2, 1 };
  OK(runtime, nib_peek(runtime, storage, NIB_INT32, 0, 2, shape, stride, values, sizeof values));
  CHECK(values[0] == 7 && values[1] == 9 && values[2] == 9 && values[3] == 7);
  CHECK(seen.total == total);
  CHECK_STATUS(NIB_INVALID, runtime, nib_peek(runtime, storage, NIB_INT32, 4, 2, shape, stride, values, sizeof values));
  CHECK_STATUS(NIB_INVALID, runtime,
               nib_peek(runtime, storage, NIB_INT32, -4, 2, shape, stride, values, sizeof values));
  CHECK_STATUS(NIB_INVALID, runtime,
               nib_peek(runtime, storage, NIB_DTYPE_NONE, 0, 2, shape, stride, values, sizeof values));
  CHECK_STATUS(NIB_INVALID, runtime, nib_peek(runtime, storage, NIB_INT32, 0, 9, shape, stride, values, sizeof values));
  CHECK_STATUS(NIB_INVALID, runtime, nib_peek(runtime, storage, NIB_INT32, 0, 2, shape, stride, values, 15));
  CHECK_STATUS(NIB_STATE, runtime,
               nib_peek(runtime, storage + 1000, NIB_INT32, 0, 2, shape, stride, values, sizeof values));

  OK(runtime, nib_tensor_read(x, values, sizeof values, NIB_UNLIMITED));
  CHECK(seen.count[NIB_OBSERVED_SYNCHRONIZED] == 1 && seen.last.kind == NIB_OBSERVED_HOST_READ && !seen.access.write);
  nib_event *event = NULL;
  OK(runtime, nib_event_record(stream, &event));
  uint64_t number = seen.last.event;
  CHECK(seen.last.kind == NIB_OBSERVED_EVENT_RECORD && number > 0 && seen.last.capture == 0);
  OK(runtime, nib_stream_wait(nib_device_default_stream(device), event));
  CHECK(seen.last.kind == NIB_OBSERVED_STREAM_WAIT && seen.last.event == number);
  OK(runtime, nib_event_synchronize(event, NIB_UNLIMITED));
  CHECK(seen.last.kind == NIB_OBSERVED_SYNCHRONIZED && seen.last.event == number);
  nib_event_release(event);
  CHECK(seen.last.kind == NIB_OBSERVED_EVENT_RELEASED && seen.last.event == number);
  OK(runtime, nib_stream_call(stream, nothing, NULL));
  CHECK(seen.last.kind == NIB_OBSERVED_WORK && !seen.last.kernel && seen.last.access_count == 0);

  nib_graph *graph = NULL;
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  uint64_t capture = seen.last.capture;
  OK(runtime, nib_tensor_fill(stream, x, NIB_INTEGER(1)));
  OK(runtime, nib_tensor_fill(stream, view, NIB_INTEGER(2)));
  CHECK(seen.node_capture == capture);
  CHECK_STATUS(NIB_CAPTURING, runtime,
               nib_peek(runtime, storage, NIB_INT32, 0, 2, shape, stride, values, sizeof values));
  OK(runtime, nib_capture_end(stream, &graph, NULL));
  CHECK(seen.last.kind == NIB_OBSERVED_CAPTURE_END && seen.last.capture == capture && seen.last.graph > 0);
  OK(runtime, nib_graph_replay(graph, stream));
  CHECK(seen.last.kind == NIB_OBSERVED_REPLAY && seen.last.stream == nib_stream_id(stream));
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  nib_capture_abort(stream);
  CHECK(seen.last.kind == NIB_OBSERVED_CAPTURE_ABORT && seen.last.capture == capture + 1 && seen.last.unjoined == 0);

  nib_tensor_release(view);
  CHECK(seen.last.kind == NIB_OBSERVED_TENSOR_RELEASED && seen.last.handles == 1);
  nib_tensor_release(x);
  CHECK(seen.last.kind == NIB_OBSERVED_TENSOR_RELEASED && seen.last.handles == 0 && seen.last.storage == storage);
  nib_graph_release(graph);
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(runtime, nib_tick(runtime, NIB_UNLIMITED));
  CHECK(seen.count[NIB_OBSERVED_STORAGE_FREED] == 1);

  nib_runtime_observe(runtime, NULL, NULL);
  total = seen.total;
  nib_tensor_release(make(device, NIB_INT32, 4));
  nib_stream_release(stream);
  CHECK(seen.total == total);
  nib_runtime_close(runtime);
  return 0;
}
