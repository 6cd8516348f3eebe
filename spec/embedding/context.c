/* A host with GPU work of its own: its CUcontext and its CUstreams, which the runtime uses and leaves alone. Talks to
 * the driver itself, without its headers. On the device of NIBBLE_DEVICE, "cuda:0" if there is none. */
#include <dlfcn.h>

#include "host.h"

typedef void *handle;

static struct {
  int (*CtxCreate)(handle *context, unsigned flags, int device);
  int (*CtxDestroy)(handle context);
  int (*CtxPushCurrent)(handle context);
  int (*CtxPopCurrent)(handle *context);
  int (*StreamCreateWithPriority)(handle *stream, unsigned flags, int priority);
  int (*StreamDestroy)(handle stream);
  int (*StreamSynchronize)(handle stream);
  int (*MemcpyHtoDAsync)(unsigned long long to, const void *from, size_t bytes, handle stream);
} cu;

static void *find(void *library, const char *name, int version) {
  int (*get)(const char *, void **, int, unsigned long long, int *);
  int result;
  void *function = NULL;
  *(void **)&get = dlsym(library, "cuGetProcAddress_v2");
  CHECK(get && get(name, &function, version, 0, &result) == 0 && function);
  return function;
}

static void open_driver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(library);
  *(void **)&cu.CtxCreate = find(library, "cuCtxCreate", 3020);
  *(void **)&cu.CtxDestroy = find(library, "cuCtxDestroy", 4000);
  *(void **)&cu.CtxPushCurrent = find(library, "cuCtxPushCurrent", 4000);
  *(void **)&cu.CtxPopCurrent = find(library, "cuCtxPopCurrent", 4000);
  *(void **)&cu.StreamCreateWithPriority = find(library, "cuStreamCreateWithPriority", 5050);
  *(void **)&cu.StreamDestroy = find(library, "cuStreamDestroy", 4000);
  *(void **)&cu.StreamSynchronize = find(library, "cuStreamSynchronize", 2000);
  *(void **)&cu.MemcpyHtoDAsync = find(library, "cuMemcpyHtoDAsync", 3020);
}

enum { NON_BLOCKING = 1, N = 1 << 16 };

/* The device by its name, without using it. */
static nib_device *unused_device(nib_runtime *rt, const char *name) {
  for (int32_t i = 0; i < nib_device_count(rt); i++)
    if (strcmp(nib_device_get_info(nib_device_at(rt, i))->name, name) == 0) return nib_device_at(rt, i);
  return NULL;
}

static float last_of(nib_runtime *rt, nib_tensor *tensor) {
  static float values[N];
  OK(rt, nib_tensor_read(tensor, values, sizeof values, NIB_UNLIMITED));
  return values[N - 1];
}

/* Work of both sides in the stream, in one order. */
static void use_stream(nib_runtime *rt, nib_device *device, handle context, handle mine) {
  static float numbers[N];
  const int64_t shape[] = { N };
  nib_stream *stream, *again;
  nib_event *event;
  nib_graph *graph = NULL;
  nib_tensor *x = make(device, NIB_FLOAT32, N), *y = make(device, NIB_FLOAT32, N), *pinned;
  OK(rt, nib_stream_wrap(device, mine, &stream));
  CHECK(nib_stream_handle(stream) == mine && nib_stream_device(stream) == device);
  for (int round = 1; round <= 20; round++) {
    for (int i = 0; i < N; i++) numbers[i] = (float)round;
    OK(rt, nib_tensor_fill(stream, x, NIB_REAL(-1)));
    CHECK(cu.CtxPushCurrent(context) == 0);
    CHECK(cu.MemcpyHtoDAsync((unsigned long long)(uintptr_t)nib_tensor_data(x), numbers, sizeof numbers, mine) == 0);
    CHECK(cu.StreamSynchronize(mine) == 0); /* so that the numbers may change */
    CHECK(cu.CtxPopCurrent(&context) == 0);
    OK(rt, nib_tensor_copy(stream, y, x));
    OK(rt, nib_tensor_fill(stream, x, NIB_REAL(-2)));
    CHECK(last_of(rt, y) == (float)round);
  }
  OK(rt, nib_tensor_create_pinned(rt, NIB_FLOAT32, 1, shape, &pinned));
  CHECK(nib_tensor_is_pinned(pinned) && nib_tensor_device(pinned) == nib_device_at(rt, 0));
  OK(rt, nib_tensor_copy(stream, pinned, y));
  CHECK(last_of(rt, pinned) == 20);
  OK(rt, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  OK(rt, nib_tensor_copy(stream, x, pinned));
  OK(rt, nib_capture_end(stream, &graph, NULL));
  OK(rt, nib_graph_replay(graph, stream));
  OK(rt, nib_event_record(stream, &event));
  OK(rt, nib_event_synchronize(event, NIB_UNLIMITED));
  CHECK(last_of(rt, x) == 20);
  OK(rt, nib_tensor_fill(stream, x, NIB_REAL(3)));
  nib_stream_release(stream);
  OK(rt, nib_stream_wrap(device, mine, &again)); /* the old one may still be busy */
  OK(rt, nib_tensor_fill(again, x, NIB_REAL(4)));
  CHECK(last_of(rt, x) == 4);
  nib_stream_release(again);
  nib_graph_release(graph);
  nib_event_release(event);
  nib_tensor_release(pinned);
  nib_tensor_release(x);
  nib_tensor_release(y);
}

int main(void) {
  const char *name = strncmp(device_name(), "cuda", 4) == 0 ? device_name() : "cuda:0";
  nib_runtime *rt;
  handle context, popped, mine, other;
  nib_stream *none = NULL;
  OK(NULL, nib_runtime_create(NULL, &rt));
  nib_device *device = unused_device(rt, name), *cpu = cpu_of(rt);
  CHECK(device && nib_device_get_info(device)->available);
  open_driver();
  int ordinal = atoi(name + sizeof "cuda:" - 1);
  CHECK(cu.CtxCreate(&context, 0, ordinal) == 0);
  CHECK(cu.StreamCreateWithPriority(&mine, NON_BLOCKING, 0) == 0);
  CHECK(cu.CtxPopCurrent(&popped) == 0 && popped == context);

  /* The context: what is refused, then in use; a runtime beside this one has the primary context. */
  CHECK_STATUS(NIB_INVALID, rt, nib_device_use_context(cpu, context));
  CHECK_STATUS(NIB_INVALID, rt, nib_device_use_context(device, NULL));
  CHECK(strstr(nib_error(rt), "use_context: context: expected a CUcontext, got "));
  OK(rt, nib_device_use_context(device, context));
  use_stream(rt, device, context, mine);
  CHECK_STATUS(NIB_STATE, rt, nib_device_use_context(device, context));
  CHECK(strstr(nib_error(rt), "not in use yet"));
  CHECK_STATUS(NIB_INVALID, rt, nib_stream_wrap(cpu, mine, &none));
  CHECK_STATUS(NIB_INVALID, rt, nib_stream_wrap(device, NULL, &none));
  CHECK(!none && !nib_stream_handle(nib_device_default_stream(cpu)) &&
        nib_stream_handle(nib_device_default_stream(device)));

  nib_runtime *second;
  OK(NULL, nib_runtime_create(NULL, &second));
  nib_device *primary = unused_device(second, name);
  nib_tensor *tensor = make(primary, NIB_FLOAT32, N);
  OK(second, nib_tensor_fill(nib_device_default_stream(primary), tensor, NIB_REAL(6)));
  CHECK(last_of(second, tensor) == 6);
  CHECK_STATUS(NIB_INVALID, second, nib_stream_wrap(primary, mine, &none));
  CHECK(strstr(nib_error(second), "expected a stream of the context that is used for") && !none);
  nib_tensor_release(tensor);
  nib_runtime_close(second);

  /* A stream that is busy when it is released, and destroyed at once; and one that is left to the runtime's end. */
  CHECK(cu.CtxPushCurrent(context) == 0);
  CHECK(cu.StreamCreateWithPriority(&other, NON_BLOCKING, 0) == 0);
  nib_stream *stream, *last;
  tensor = make(device, NIB_FLOAT32, N);
  OK(rt, nib_stream_wrap(device, other, &stream));
  for (int i = 0; i <= 100; i++) OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(i)));
  nib_stream_release(stream);
  CHECK_STATUS(NIB_STATE, rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(0)));
  CHECK(cu.StreamDestroy(other) == 0);
  CHECK(cu.CtxPopCurrent(&popped) == 0 && popped == context); /* as it was, in all that lies between */
  CHECK(last_of(rt, tensor) == 100);
  nib_tensor_release(tensor);
  OK(rt, nib_stream_wrap(device, mine, &last));
  tensor = make(device, NIB_FLOAT32, N);
  OK(rt, nib_tensor_fill(last, tensor, NIB_INTEGER(1)));
  nib_runtime_close(rt);
  nib_stream_release(last);
  nib_tensor_release(tensor);

  /* Both are still the host's. */
  CHECK(cu.CtxPushCurrent(context) == 0);
  CHECK(cu.StreamSynchronize(mine) == 0);
  CHECK(cu.StreamDestroy(mine) == 0);
  CHECK(cu.CtxDestroy(context) == 0);
  return 0;
}
