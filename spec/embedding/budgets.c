/* What nibble.h promises of time: a tick ends within a millisecond of its budget, whatever it frees, and what reads or
 * compares within a millisecond of the deadline. Measured in the thread's own processor time, medians of five, twice
 * the bound; with `count` as the argument nothing is measured, and all is done. */
#include <time.h>

#include "host.h"

enum { ROUNDS = 5, NODES = 200000, SIDE = 4096, BIG = 128 << 20, BUDGET_US = 200, SLACK_US = 1000 };

static bool measures = true;

static int64_t used_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int compare(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

static void check(const char *what, int64_t times[ROUNDS], int64_t bound) {
  qsort(times, ROUNDS, sizeof *times, compare);
  if (!measures || times[ROUNDS / 2] <= 2 * bound) return;
  fprintf(stderr, "%s: expected %lld us at most, got %lld\n", what, (long long)bound, (long long)times[ROUNDS / 2]);
  exit(1);
}

static long host_bytes;

/* Of a host's own: large blocks take as long as they take, one in a call. */
static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user;
  host_bytes += (long)new_size - (long)old_size;
  if (new_size > 0) return realloc(pointer, new_size);
  free(pointer);
  return NULL;
}

static int64_t longest_tick(nib_runtime *runtime, nib_device *cpu) {
  int64_t longest = 0;
  int idle = 0;
  uint64_t reserved = 1, before;
  while (reserved > 0 || idle < 3) { /* a graph counts nothing: until ticks have nothing to do */
    int64_t start = used_us();
    OK(runtime, nib_tick(runtime, BUDGET_US));
    int64_t took = used_us() - start;
    if (took > longest) longest = took;
    idle = took < BUDGET_US / 2 ? idle + 1 : 0;
    before = reserved;
    nib_set_deadline(runtime, 0); /* so that asking frees one piece at most */
    reserved = nib_device_memory(cpu).reserved_bytes;
    nib_set_deadline(runtime, NIB_UNLIMITED);
    if (reserved == before) nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
  }
  return longest;
}

static void record(nib_runtime *runtime, nib_stream *stream, nib_tensor *tensor) {
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_RELAXED));
  for (int i = 0; i < (measures ? NODES : 3000); i++) OK(runtime, nib_tensor_fill(stream, tensor, NIB_INTEGER(i)));
}

static void free_graphs_and_tensors(void) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  int64_t releases[ROUNDS], ticks[ROUNDS], aborts[ROUNDS], start;
  for (int i = 0; i < ROUNDS; i++) {
    nib_graph *graph = NULL;
    nib_tensor *tensor = make(cpu, NIB_INT32, 4);
    record(runtime, stream, tensor);
    OK(runtime, nib_capture_end(stream, &graph, NULL));
    nib_tensor_release(tensor);
    start = used_us();
    nib_graph_release(graph);
    releases[i] = used_us() - start;
    ticks[i] = longest_tick(runtime, cpu);
  }
  check("a graph's release", releases, SLACK_US);
  check("a tick that frees a graph", ticks, BUDGET_US + SLACK_US);
  for (int i = 0; i < ROUNDS; i++) {
    nib_tensor *tensor = make(cpu, NIB_INT32, 4);
    record(runtime, stream, tensor);
    nib_tensor_release(tensor);
    nib_set_deadline(runtime, 0);
    start = used_us();
    nib_capture_abort(stream);
    aborts[i] = used_us() - start;
    nib_set_deadline(runtime, NIB_UNLIMITED);
    ticks[i] = longest_tick(runtime, cpu);
  }
  check("a capture that ends without a result", aborts, SLACK_US);
  check("a tick that frees it", ticks, BUDGET_US + SLACK_US);
  for (int i = 0; i < ROUNDS; i++) {
    nib_tensor *tensor = make(cpu, NIB_UINT8, BIG);
    OK(runtime, nib_tensor_fill(stream, tensor, NIB_INTEGER(1)));
    if (i % 2) OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
    start = used_us();
    nib_tensor_release(tensor);
    releases[i] = used_us() - start;
    OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
    ticks[i] = longest_tick(runtime, cpu);
    CHECK(nib_device_memory(cpu).reserved_bytes == 0);
  }
  check("a large tensor's release", releases, SLACK_US);
  check("a tick that frees a large tensor", ticks, BUDGET_US + SLACK_US);

  /* What is still being given back counts, and a tensor that needs the room waits for it; the runtime's end does
   * too. */
  nib_runtime *capped = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .memory_cap = BIG }, &capped));
  for (int i = 0; i < 20; i++) {
    nib_tensor *tensor = make(cpu_of(capped), NIB_UINT8, BIG);
    if (i % 10 == 0) OK(capped, nib_tensor_fill(nib_device_default_stream(cpu_of(capped)), tensor, NIB_INTEGER(1)));
    CHECK(nib_device_memory(cpu_of(capped)).reserved_bytes == BIG);
    nib_tensor_release(tensor);
  }
  nib_runtime_close(capped);
  nib_runtime_close(runtime);
}

/* With a host's allocator a tick gives back one large block. */
static void free_one_a_tick(void) {
  enum { TENSORS = 6, LARGE = 9 << 20 };
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .allocate = allocate }, &runtime));
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  nib_tensor *tensors[TENSORS];
  for (int i = 0; i < TENSORS; i++) tensors[i] = make(cpu, NIB_UINT8, LARGE);
  for (int i = 0; i < TENSORS; i++) OK(runtime, nib_tensor_fill(stream, tensors[i], NIB_INTEGER(i)));
  nib_event *event = NULL;
  OK(runtime, nib_capture_begin(stream, NIB_CAPTURE_RELAXED)); /* keeps them all until its graph goes */
  for (int i = 0; i < TENSORS; i++) OK(runtime, nib_tensor_fill(stream, tensors[i], NIB_INTEGER(i)));
  nib_graph *graph = NULL;
  OK(runtime, nib_capture_end(stream, &graph, NULL));
  for (int i = 0; i < TENSORS; i++) nib_tensor_release(tensors[i]);
  OK(runtime, nib_graph_replay(graph, stream));
  OK(runtime, nib_event_record(stream, &event));
  nib_graph_release(graph);
  OK(runtime, nib_event_synchronize(event, NIB_UNLIMITED));
  for (int i = 0; i < 50 && host_bytes > LARGE; i++) {
    long before = host_bytes;
    OK(runtime, nib_tick(runtime, 1000000));
    CHECK(before - host_bytes < 2 * LARGE);
  }
  OK(runtime, nib_tick(runtime, NIB_UNLIMITED));
  CHECK(host_bytes < LARGE);
  nib_event_release(event);
  nib_runtime_close(runtime);
  CHECK(host_bytes == 0);
}

static void read_until_the_deadline(void) {
  enum { DEADLINE_US = 2000 };
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  nib_tensor *whole = NULL, *turned = NULL;
  OK(runtime, nib_tensor_create(cpu, NIB_FLOAT32, 2, (int64_t[]){ SIDE, SIDE }, &whole));
  OK(runtime, nib_tensor_fill(stream, whole, NIB_REAL(1)));
  OK(runtime, nib_tensor_permute(whole, 2, (int64_t[]){ 1, 0 }, &turned));
  OK(runtime, nib_stream_synchronize(stream, NIB_UNLIMITED));
  size_t bytes = (size_t)SIDE * SIDE * 4;
  float *values = malloc(bytes);
  bool answer = true;
  double number = 0;
  int64_t index = 0, times[ROUNDS];
  static const char *const names[] = { "amax", "equal", "allclose", "max_error", "read", "read in order" };
  for (int what = 0; what < 6; what++) {
    for (int i = 0; i < ROUNDS; i++) {
      nib_set_deadline(runtime, measures ? DEADLINE_US : 0);
      int64_t start = used_us();
      nib_status status = NIB_OK;
      for (int k = 0; k < 100 && status == NIB_OK; k++) /* on a fast machine one is not enough */
        status = what == 0   ? nib_tensor_amax(turned, &number)
                 : what == 1 ? nib_tensor_equal(turned, turned, &answer)
                 : what == 2 ? nib_tensor_allclose(turned, turned, 0, 0, false, &answer)
                 : what == 3 ? nib_tensor_max_error(turned, whole, &number, &index)
                             : nib_tensor_read(what == 4 ? turned : whole, values, bytes, NIB_UNLIMITED);
      times[i] = used_us() - start;
      CHECK_STATUS(NIB_TIMEOUT, runtime, status);
      nib_set_deadline(runtime, NIB_UNLIMITED);
    }
    check(names[what], times, DEADLINE_US + SLACK_US);
  }
  free(values);
  nib_tensor_release(whole);
  nib_tensor_release(turned);
  nib_runtime_close(runtime);
}

int main(int argc, char **argv) {
  measures = argc < 2 || strcmp(argv[1], "count") != 0;
  free_graphs_and_tensors();
  free_one_a_tick();
  read_until_the_deadline();
  return 0;
}
