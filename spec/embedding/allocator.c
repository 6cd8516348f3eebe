/* The host's allocator gets every allocation, with the right old sizes, and all of it back; when it fails at the n-th
 * call, for every n, the call says MEMORY, nothing breaks and nothing is lost. */
#include <pthread.h>

#include "host.h"

struct heap {
  pthread_t thread;
  long calls, live, bytes, fail_at;
  int foreign_thread;
};

/* Every block knows its size. */
static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  struct heap *heap = user;
  if (!pthread_equal(pthread_self(), heap->thread)) heap->foreign_thread = 1;
  size_t *block = pointer ? (size_t *)pointer - 2 : NULL;
  CHECK(!block || block[0] == old_size);
  CHECK(block || old_size == 0);
  if (new_size == 0) {
    if (block) {
      heap->live--;
      heap->bytes -= (long)old_size;
      memset(block, 0xdd, old_size + 16);
      free(block);
    }
    return NULL;
  }
  heap->calls++;
  if (heap->fail_at && heap->calls >= heap->fail_at) return NULL;
  size_t *fresh = malloc(new_size + 16);
  CHECK(fresh);
  memset(fresh, 0xcd, new_size + 16);
  fresh[0] = new_size;
  if (block) {
    memcpy(fresh + 2, pointer, old_size < new_size ? old_size : new_size);
    heap->bytes -= (long)old_size;
    free(block);
  } else {
    heap->live++;
  }
  heap->bytes += (long)new_size;
  return fresh + 2;
}

static int seen(nib_status status) {
  CHECK(status == NIB_OK || status == NIB_MEMORY);
  return status == NIB_OK;
}

/* Does a bit of everything; stops at the first failure. Releases what it made. */
static int scenario(struct heap *heap) {
  nib_config config = { .allocate = allocate, .user = heap, .threads = 2 };
  nib_runtime *runtime = NULL;
  nib_tensor *a = NULL, *b = NULL, *view = NULL, *table = NULL;
  nib_stream *stream = NULL, *fork = NULL;
  nib_event *event = NULL, *back = NULL;
  nib_graph *graph = NULL;
  float values[100];
  int done = 0;
  if (!seen(nib_runtime_create(&config, &runtime))) return 0;
  nib_device *device = NULL;
  if (!seen(nib_device_find(runtime, device_name(), &device))) {
    nib_runtime_close(runtime);
    return 0;
  }
  for (int once = 1; once; once = 0) {
    if (!seen(nib_tensor_create(device, NIB_FLOAT32, 2, (int64_t[]){ 10, 10 }, &a))) break;
    if (!seen(nib_tensor_create(device, NIB_BFLOAT16, 2, (int64_t[]){ 10, 10 }, &b))) break;
    if (!seen(nib_tensor_permute(a, 2, (int64_t[]){ 1, 0 }, &view))) break;
    if (!seen(nib_stream_create(device, 0, &stream))) break;
    if (!seen(nib_stream_create(device, 0, &fork))) break;
    if (!seen(nib_tensor_random_normal(stream, a, 1))) break;
    if (!seen(nib_event_record(stream, &event))) break;
    if (!seen(nib_stream_wait(fork, event))) break;
    if (!seen(nib_tensor_copy(fork, b, view))) break;
    if (!seen(nib_rope_table(stream, 100, 1e4, NIB_FLOAT32, &table))) break;
    nib_event_release(event);
    event = NULL;
    if (!seen(nib_stream_synchronize(fork, NIB_UNLIMITED))) break;
    if (!seen(nib_stream_synchronize(stream, NIB_UNLIMITED))) break;
    if (!seen(nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL))) break;
    if (!seen(nib_tensor_fill(stream, a, NIB_REAL(2))) || !seen(nib_event_record(stream, &event)) ||
        !seen(nib_stream_wait(fork, event)) || !seen(nib_tensor_copy(fork, b, a)) ||
        !seen(nib_event_record(fork, &back)) || !seen(nib_stream_wait(stream, back))) {
      nib_capture_abort(stream);
      break;
    }
    if (!seen(nib_capture_end(stream, &graph, NULL))) break;
    if (!seen(nib_graph_replay(graph, stream))) break;
    if (!seen(nib_tensor_read(a, values, sizeof values, NIB_UNLIMITED))) break;
    for (int i = 0; i < 100; i++) CHECK(values[i] == 2);
    bool equal = false;
    if (!seen(nib_tensor_allclose(a, b, 0, 0, false, &equal))) break;
    CHECK(equal);
    nib_memory_info memory = nib_device_memory(device);
    CHECK(memory.used_bytes <= (uint64_t)heap->bytes || strcmp(device_name(), "cpu") != 0);
    CHECK(memory.used_bytes >= 600 + 100 * 64 * 4);
    done = 1;
  }
  nib_event_release(event);
  nib_event_release(back);
  nib_graph_release(graph);
  nib_tensor_release(view);
  nib_tensor_release(a);
  nib_tensor_release(b);
  nib_tensor_release(table);
  nib_stream_release(stream);
  nib_stream_release(fork);
  nib_runtime_close(runtime);
  return done;
}

int main(void) {
  struct heap heap = { .thread = pthread_self() };
  CHECK(scenario(&heap));
  CHECK(heap.live == 0 && heap.bytes == 0);
  CHECK(!heap.foreign_thread);
  long calls = heap.calls;
  CHECK(calls > 20);

  int failed = 0;
  for (long n = 1; n <= calls; n++) {
    heap = (struct heap){ .thread = pthread_self(), .fail_at = n };
    failed += !scenario(&heap);
    CHECK(heap.live == 0 && heap.bytes == 0);
    CHECK(!heap.foreign_thread);
  }
  /* Some late allocations may be ones that can be done without; most cannot. */
  CHECK(failed > calls / 2);
  return 0;
}
