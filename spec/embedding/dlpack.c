/* Tensors from and to other frameworks (DLPack 1), and on memory of the host's: nothing is copied, whatever happens to
 * be written is seen by both sides, memory lives as long as either side needs it (also beyond the runtime, also when
 * the other side lets go on another thread), and what cannot be taken is refused with the reason. On the device of
 * NIBBLE_DEVICE. */
#include <pthread.h>
#include <time.h>

#include "nibble_dlpack.h"
#include "host.h"

typedef struct DLManagedTensorVersioned managed;

/* ---- A framework that produces --------------------------------------------------------------------------------- */

struct producer {
  managed tensor;
  int64_t shape[NIB_MAX_NDIM + 1], strides[NIB_MAX_NDIM + 1];
  int deleted;
};

static void delete (managed *self) { ((struct producer *)self->manager_ctx)->deleted++; }

/* float32 {2, 3} on the device of `memory`, in whose storage it lies. */
static struct producer produce(nib_tensor *memory) {
  bool gpu = strcmp(nib_device_get_info(nib_tensor_device(memory))->name, "cpu") != 0;
  struct producer p = { .shape = { 2, 3 }, .strides = { 3, 1 } };
  p.tensor = (managed){ .major = 1,
                        .deleter = delete,
                        .tensor = { .data = nib_tensor_data(memory),
                                    .ndim = 2,
                                    .device_type = gpu ? NIB_DLPACK_CUDA : NIB_DLPACK_CPU,
                                    .code = NIB_DLPACK_FLOAT,
                                    .bits = 32,
                                    .lanes = 1 } };
  if (gpu) p.tensor.tensor.device_id = atoi(nib_device_get_info(nib_tensor_device(memory))->name + 5);
  return p;
}

static managed *point(struct producer *p) { /* it may have moved */
  p->tensor.manager_ctx = p;
  p->tensor.tensor.shape = p->shape;
  if (p->tensor.tensor.strides != NULL || p->strides[0] >= 0) p->tensor.tensor.strides = p->strides;
  return &p->tensor;
}

static void refuse(nib_runtime *rt, struct producer p, const char *words) {
  nib_tensor *none = NULL;
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_from_dlpack(rt, point(&p), &none));
  if (!strstr(nib_error(rt), words)) fprintf(stderr, "%s\n", nib_error(rt));
  CHECK(!none && !p.deleted && strncmp(nib_error(rt), "from_dlpack: ", 13) == 0 && strstr(nib_error(rt), words));
}

static void refusals(nib_runtime *rt, nib_tensor *memory) {
  struct producer p;
#define REFUSE(words, change) \
  do {                        \
    p = produce(memory);      \
    change;                   \
    refuse(rt, p, words);     \
  } while (0)
  REFUSE("version: expected DLPack 1, got 2.5", (p.tensor.major = 2, p.tensor.minor = 5));
  REFUSE("version: expected DLPack 1, got 0.0", p.tensor.major = 0);
  REFUSE("device type 10", p.tensor.tensor.device_type = 10);
  REFUSE("dtype: expected float 32 or 16", p.tensor.tensor.bits = 64);
  REFUSE("code 2 of 32 bits and 4 lanes", p.tensor.tensor.lanes = 4);
  REFUSE("code 5 of 64 bits", (p.tensor.tensor.code = 5, p.tensor.tensor.bits = 64));
  REFUSE("code 17 of 4 bits and 2 lanes", (p.tensor.tensor.code = NIB_DLPACK_E2M1FN, p.tensor.tensor.bits = 4,
                                           p.tensor.tensor.lanes = 2, p.tensor.flags = NIB_DLPACK_PADDED));
  REFUSE("shape: expected at most 8 dimensions, got 9", p.tensor.tensor.ndim = 9);
  REFUSE("shape: expected at most 8 dimensions, got -1", p.tensor.tensor.ndim = -1);
  REFUSE("shape: expected sizes >= 0, got -2 in dimension 0", p.shape[0] = -2);
  REFUSE("less than 2^62 bytes", p.shape[0] = p.shape[1] = (int64_t)1 << 31);
  REFUSE("stride: expected strides >= 0, got -3 in dimension 0",
         (p.tensor.tensor.strides = p.strides, p.strides[0] = -3));
  REFUSE("stride: expected less than 2^62 bytes", p.strides[0] = INT64_MAX);
  REFUSE("stride: expected strides >= 0, got -3 in dimension 0",
         (p.tensor.tensor.strides = p.strides, p.strides[0] = -3, p.shape[1] = 1));
  REFUSE("data: expected an address that is a multiple of 4", p.tensor.tensor.byte_offset = 2);
  REFUSE("data: expected an address", p.tensor.tensor.data = NULL);
  if (p.tensor.tensor.device_type == NIB_DLPACK_CUDA) {
    static float elsewhere[8];
    REFUSE("data: expected an address in memory of cuda:", p.tensor.tensor.data = elsewhere);
    p = produce(memory);
    p.tensor.tensor.device_id = 99;
    nib_tensor *none;
    CHECK_STATUS(NIB_UNAVAILABLE, rt, nib_tensor_from_dlpack(rt, point(&p), &none));
  }
  nib_tensor *none = NULL;
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_from_dlpack(rt, NULL, &none));
}

static void types(nib_runtime *rt, nib_tensor *memory) {
  static const struct {
    uint8_t code, bits, lanes, dtype;
  } all[] = { { 2, 32, 1, NIB_FLOAT32 },       { 2, 16, 1, NIB_FLOAT16 }, { 4, 16, 1, NIB_BFLOAT16 },
              { 10, 8, 1, NIB_FLOAT8_E4M3FN }, { 1, 8, 1, NIB_UINT8 },    { 0, 8, 1, NIB_INT8 },
              { 1, 16, 1, NIB_UINT16 },        { 0, 32, 1, NIB_INT32 },   { 0, 64, 1, NIB_INT64 },
              { 6, 8, 1, NIB_UINT8 },          { 17, 4, 2, NIB_UINT8 } };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    struct producer p = produce(memory);
    nib_tensor *tensor;
    managed *out;
    p.tensor.tensor.code = all[i].code, p.tensor.tensor.bits = all[i].bits, p.tensor.tensor.lanes = all[i].lanes;
    OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
    CHECK((int)nib_tensor_dtype(tensor) == all[i].dtype);
    OK(rt, nib_tensor_to_dlpack(tensor, -1, &out));
    if (i < 9) CHECK(out->tensor.code == all[i].code && out->tensor.bits == all[i].bits && out->tensor.lanes == 1);
    nib_tensor_release(tensor);
    OK(rt, nib_tick(rt, NIB_UNLIMITED));
    CHECK(!p.deleted); /* the way back still has it */
    out->deleter(out);
    OK(rt, nib_tick(rt, NIB_UNLIMITED));
    CHECK(p.deleted == 1);
  }
}

static void imports(nib_runtime *rt, nib_device *device) {
  nib_stream *stream = nib_device_default_stream(device);
  nib_tensor *memory = make(device, NIB_FLOAT32, 64), *tensor, *view, *one;
  const int64_t shape[] = { 64 }, stride[] = { 1 };
  OK(rt, nib_tensor_arange(stream, memory, NIB_INTEGER(0), NIB_INTEGER(1)));
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  uint64_t used = nib_device_memory(device).used_bytes;

  /* Strided, with an offset; what one side writes the other sees. */
  struct producer p = produce(memory);
  p.strides[0] = 10, p.strides[1] = 2, p.tensor.tensor.byte_offset = 8;
  OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
  CHECK(nib_tensor_data(tensor) == (char *)nib_tensor_data(memory) + 8 && !nib_tensor_is_read_only(tensor));
  CHECK(nib_device_memory(device).used_bytes == used);
  float values[64];
  OK(rt, nib_tensor_read(tensor, values, 6 * sizeof(float), NIB_UNLIMITED));
  CHECK(values[0] == 2 && values[2] == 6 && values[5] == 16);
  OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(-1)));
  OK(rt, nib_tensor_read(tensor, values, 6 * sizeof(float), NIB_UNLIMITED));
  OK(rt, nib_tensor_read(memory, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[2] == -1 && values[3] == 3 && values[16] == -1 && values[17] == 17);
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_as_strided(tensor, 1, shape, stride, 0, &view)); /* beyond what was lent */

  /* Views and queued work keep it; a graph does. */
  nib_graph *graph = NULL;
  OK(rt, nib_tensor_select(tensor, 0, 1, &view));
  nib_tensor_release(tensor);
  OK(rt, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  OK(rt, nib_tensor_fill(stream, view, NIB_INTEGER(5)));
  OK(rt, nib_capture_end(stream, &graph, NULL));
  nib_tensor_release(view);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(!p.deleted);
  OK(rt, nib_graph_replay(graph, stream));
  nib_graph_release(graph);
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(p.deleted == 1);
  OK(rt, nib_tensor_read(memory, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[12] == 5 && values[16] == 5);

  /* Strides of dimensions of one element, and of tensors of none, are whatever the producer likes. */
  static const int64_t odd[] = { -7, INT64_MIN, INT64_MAX, 0 };
  for (int i = 0; i < 4; i++) {
    p = produce(memory);
    p.shape[0] = 1, p.tensor.tensor.strides = p.strides, p.strides[0] = odd[i];
    OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
    CHECK(nib_tensor_is_contiguous(tensor) && nib_tensor_stride(tensor)[0] == 3 && nib_tensor_stride(tensor)[1] == 1);
    nib_tensor_release(tensor);
    p = produce(memory);
    p.shape[1] = 1, p.tensor.tensor.strides = p.strides, p.strides[1] = odd[i], p.strides[0] = 5;
    OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
    CHECK(nib_tensor_stride(tensor)[0] == 5 && nib_tensor_stride(tensor)[1] == 1);
    nib_tensor_release(tensor);
    p = produce(memory);
    p.shape[1] = 0, p.tensor.tensor.strides = p.strides, p.strides[0] = odd[i], p.strides[1] = odd[3 - i];
    OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
    CHECK(nib_tensor_numel(tensor) == 0 && nib_tensor_is_contiguous(tensor));
    nib_tensor_release(tensor);
    OK(rt, nib_tick(rt, NIB_UNLIMITED));
  }

  /* Lent for reading: nothing writes it, everything reads it. */
  p = produce(memory);
  p.tensor.flags = NIB_DLPACK_READ_ONLY;
  p.tensor.deleter = NULL;
  p.strides[0] = -1;
  OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor)); /* no strides: compact */
  CHECK(nib_tensor_is_read_only(tensor) && nib_tensor_is_contiguous(tensor));
  OK(rt, nib_tensor_reinterpret(tensor, NIB_INT32, &view));
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_fill(stream, view, NIB_INTEGER(1)));
  CHECK(strstr(nib_error(rt), "tensor:fill: tensor: expected a writable tensor, got int32 {2, 3} in read-only memory"));
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_write(stream, tensor, values, 6 * sizeof(float)));
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_arange(stream, tensor, NIB_INTEGER(1), NIB_INTEGER(1)));
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_copy(stream, tensor, tensor));
  OK(rt, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_random_normal(stream, tensor, 1));
  nib_capture_abort(stream);
  OK(rt, nib_tensor_create(device, NIB_FLOAT32, 2, nib_tensor_shape(tensor), &one));
  OK(rt, nib_tensor_copy(stream, one, tensor));
  bool equal = false;
  OK(rt, nib_tensor_equal(one, tensor, &equal));
  CHECK(equal);
  managed *out;
  OK(rt, nib_tensor_to_dlpack(view, -1, &out));
  CHECK(out->flags == NIB_DLPACK_READ_ONLY);
  out->deleter(out);
  nib_tensor_release(view);
  nib_tensor_release(one);
  nib_tensor_release(tensor);
  OK(rt, nib_tick(rt, NIB_UNLIMITED)); /* takes `out` back */

  /* Empty, and without dimensions. */
  p = produce(memory);
  p.shape[1] = 0, p.tensor.tensor.data = NULL;
  OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
  CHECK(nib_tensor_numel(tensor) == 0);
  OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(1)));
  nib_tensor_release(tensor);
  CHECK(p.deleted == 1);
  p = produce(memory);
  p.tensor.tensor.ndim = 0;
  OK(rt, nib_tensor_from_dlpack(rt, point(&p), &tensor));
  CHECK(nib_tensor_numel(tensor) == 1);
  nib_tensor_release(tensor);
  CHECK(p.deleted == 1);
  types(rt, memory);
  refusals(rt, memory);
  nib_tensor_release(memory);
}

/* ---- A framework that consumes --------------------------------------------------------------------------------- */

static void *let_go(void *argument) {
  managed *tensor = argument;
  tensor->deleter(tensor);
  return NULL;
}

static void let_go_elsewhere(managed *tensor) {
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, let_go, tensor) == 0 && pthread_join(thread, NULL) == 0);
}

static nib_status take_time(void *user) {
  (void)user;
  nanosleep(&(struct timespec){ .tv_nsec = 50000000 }, NULL);
  return NIB_OK;
}

/* What the consumer writes comes after what was queued before to read the tensor. */
static void reads_first(nib_runtime *rt, nib_device *device) {
  nib_stream *stream, *consumer;
  nib_tensor *tensor = make(device, NIB_FLOAT32, 24), *kept = make(device, NIB_FLOAT32, 24);
  managed *out;
  float values[24];
  OK(rt, nib_stream_create(device, 0, &stream));
  OK(rt, nib_stream_create(device, 0, &consumer));
  OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(1)));
  OK(rt, nib_stream_synchronize(stream, NIB_UNLIMITED));
  OK(rt, nib_stream_call(stream, take_time, NULL));
  OK(rt, nib_tensor_copy(stream, kept, tensor));
  const bool cpu = strcmp(nib_device_get_info(device)->name, "cpu") == 0;
  OK(rt, nib_tensor_to_dlpack(tensor, cpu ? 0 : (intptr_t)nib_stream_handle(consumer), &out));
  if (cpu) ((float *)out->tensor.data)[23] = 2;
  else OK(rt, nib_tensor_fill(consumer, tensor, NIB_INTEGER(2)));
  OK(rt, nib_tensor_read(kept, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[23] == 1);
  OK(rt, nib_tensor_read(tensor, values, sizeof values, NIB_UNLIMITED));
  CHECK(values[23] == 2);
  out->deleter(out);
  nib_tensor_release(tensor);
  nib_tensor_release(kept);
  nib_stream_release(stream);
  nib_stream_release(consumer);
}

static void exports(nib_runtime *rt, nib_device *device) {
  const bool cpu = strcmp(nib_device_get_info(device)->name, "cpu") == 0;
  const int64_t shape[] = { 4, 6 };
  nib_stream *stream = nib_device_default_stream(device), *consumer;
  nib_tensor *tensor, *turned;
  managed *out, *again;
  OK(rt, nib_stream_create(device, 0, &consumer));
  intptr_t handle = cpu ? 0 : (intptr_t)nib_stream_handle(consumer);
  uint64_t used = nib_device_memory(device).used_bytes;
  OK(rt, nib_tensor_create(device, NIB_FLOAT32, 2, shape, &tensor));
  for (int i = 0; i <= 200; i++) OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(i)));
  OK(rt, nib_tensor_permute(tensor, 2, (int64_t[]){ 1, 0 }, &turned));
  OK(rt, nib_tensor_to_dlpack(turned, handle, &out));
  const struct nib_dlpack_tensor *t = &out->tensor;
  CHECK(out->major == 1 && out->flags == 0 && t->data == nib_tensor_data(tensor) && t->byte_offset == 0 &&
        t->ndim == 2);
  CHECK(t->shape[0] == 6 && t->shape[1] == 4 && t->strides[0] == 1 && t->strides[1] == 6);
  CHECK(t->device_type == (cpu ? NIB_DLPACK_CPU : NIB_DLPACK_CUDA));
  CHECK(t->device_id == (cpu ? 0 : atoi(nib_device_get_info(device)->name + 5)));
  if (cpu) {
    CHECK(((const float *)t->data)[23] == 200); /* all is written */
  } else {                                      /* work of the consumer's stream comes after all that was written */
    nib_tensor *copy;
    float last[24];
    OK(rt, nib_tensor_create(device, NIB_FLOAT32, 2, shape, &copy));
    OK(rt, nib_tensor_copy(consumer, copy, tensor));
    OK(rt, nib_tensor_read(copy, last, sizeof last, NIB_UNLIMITED));
    CHECK(last[23] == 200);
    nib_tensor_release(copy);
    CHECK_STATUS(NIB_INVALID, rt, nib_tensor_to_dlpack(tensor, 0, &again));
    CHECK(strstr(nib_error(rt), "to_dlpack: consumer_stream: expected a CUstream, 1, 2 or -1, got 0") && !again);
    CHECK_STATUS(NIB_INVALID, rt, nib_tensor_to_dlpack(tensor, -7, &again));
  }
  OK(rt, nib_capture_begin(stream, NIB_CAPTURE_THREAD_LOCAL));
  CHECK_STATUS(NIB_CAPTURING, rt, nib_tensor_to_dlpack(tensor, handle, &again));
  nib_capture_abort(stream);

  /* It lives while either side has it, and is gone after a tick, whichever thread it came back on. */
  nib_tensor_release(tensor);
  nib_tensor_release(turned);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).used_bytes == used + 96);
  if (cpu) ((float *)t->data)[0] = 7;
  let_go_elsewhere(out);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).used_bytes == used);

  /* A round trip is the same memory. */
  nib_tensor *back;
  OK(rt, nib_tensor_create(device, NIB_FLOAT32, 2, shape, &tensor));
  OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(3)));
  OK(rt, nib_tensor_to_dlpack(tensor, handle, &out));
  OK(rt, nib_tensor_from_dlpack(rt, out, &back));
  CHECK(nib_tensor_data(back) == nib_tensor_data(tensor));
  nib_tensor_release(tensor);
  float last[24];
  if (!cpu) { /* nobody else knows that it is the same memory, and there in the order of that stream */
    CHECK_STATUS(NIB_INVALID, rt, nib_tensor_written(back, nib_device_default_stream(cpu_of(rt))));
    CHECK(
      strstr(nib_error(rt), "tensor:written: tensor: expected a tensor on the stream's device cpu, got one on cuda:"));
    OK(rt, nib_tensor_written(back, consumer));
  }
  OK(rt, nib_tensor_read(back, last, sizeof last, NIB_UNLIMITED));
  CHECK(last[23] == 3);
  nib_tensor_release(back);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).used_bytes == used);
  nib_stream_release(consumer);
}

static void pinned(nib_runtime *rt, nib_device *device) {
  const int64_t shape[] = { 4, 6 };
  nib_tensor *host, *back, *there;
  managed *out;
  OK(rt, nib_tensor_create_pinned(rt, NIB_FLOAT32, 2, shape, &host));
  OK(rt, nib_tensor_create(device, NIB_FLOAT32, 2, shape, &there));
  OK(rt, nib_tensor_fill(nib_device_default_stream(device), there, NIB_REAL(0.5)));
  OK(rt, nib_tensor_copy(nib_device_default_stream(device), host, there));
  OK(rt, nib_tensor_to_dlpack(host, 1, &out)); /* waits for the copy */
  CHECK(((const float *)out->tensor.data)[23] == 0.5f);
  CHECK(out->tensor.device_type == (nib_tensor_is_pinned(host) ? NIB_DLPACK_CUDA_HOST : NIB_DLPACK_CPU));
  OK(rt, nib_tensor_from_dlpack(rt, out, &back));
  CHECK(nib_tensor_is_pinned(back) == nib_tensor_is_pinned(host) && nib_tensor_data(back) == nib_tensor_data(host));
  nib_tensor_release(host);
  OK(rt, nib_tensor_fill(nib_device_default_stream(device), there, NIB_REAL(2)));
  OK(rt, nib_tensor_copy(nib_device_default_stream(device), back, there));
  float last[24];
  OK(rt, nib_tensor_read(back, last, sizeof last, NIB_UNLIMITED));
  CHECK(last[0] == 2);
  nib_tensor_release(back);
  nib_tensor_release(there);
}

/* ---- The runtime's end ----------------------------------------------------------------------------------------- */

static long live; /* atomic: after a runtime's end its allocator is called on the threads of exports */

static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user, (void)old_size;
  if (new_size == 0) {
    __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
    free(pointer);
    return NULL;
  }
  if (!pointer) __atomic_add_fetch(&live, 1, __ATOMIC_RELAXED);
  return realloc(pointer, new_size);
}

struct handles {
  nib_tensor *tensors[8];
};

static void *release_all(void *argument) {
  struct handles *handles = argument;
  for (int i = 0; i < 8; i++) nib_tensor_release(handles->tensors[i]);
  return NULL;
}

/* Exports outlive the runtime: some come back before it is closed, some while, some after, on four threads, while the
 * host releases its own handles. `mode` 0: the exports are last; 1: the handles are. */
static void end(int mode) {
  nib_config config = { .allocate = allocate, .threads = 2 };
  nib_runtime *rt;
  pthread_t threads[5];
  managed *out[8], *held;
  struct handles handles;
  const int64_t shape[] = { 1000 };
  OK(NULL, nib_runtime_create(&config, &rt));
  nib_device *device = device_of(rt);
  nib_stream *stream = nib_device_default_stream(device);
  nib_event *event;
  nib_tensor *wrapped, *host;
  struct producer p;
  for (int i = 0; i < 8; i++) {
    OK(rt, nib_tensor_create(device, NIB_FLOAT32, 1, shape, &handles.tensors[i]));
    OK(rt, nib_tensor_fill(stream, handles.tensors[i], NIB_INTEGER(i)));
    OK(rt, nib_tensor_to_dlpack(handles.tensors[i / 2], -1, &out[i])); /* two of each of the first four */
  }
  OK(rt, nib_event_record(stream, &event));
  OK(rt, nib_tensor_create_pinned(rt, NIB_FLOAT32, 1, shape, &host));
  OK(rt, nib_tensor_to_dlpack(host, -1, &held));
  nib_tensor_release(host);
  p = produce(handles.tensors[7]); /* borrowed, lent on, and so borrowed until that is back */
  OK(rt, nib_tensor_from_dlpack(rt, point(&p), &wrapped));
  managed *lent;
  OK(rt, nib_tensor_to_dlpack(wrapped, -1, &lent));
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  CHECK(pthread_create(&threads[0], NULL, let_go, out[0]) == 0);
  if (mode == 0) release_all(&handles);
  nib_runtime_close(rt);
  for (int i = 1; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, let_go, out[2 * i]) == 0);
  CHECK(pthread_create(&threads[4], NULL, let_go, lent) == 0);
  if (mode == 1) CHECK_STATUS(NIB_CLOSED, rt, nib_tick(rt, NIB_UNLIMITED));
  if (strcmp(device_name(), "cpu") == 0) CHECK(((const float *)out[3]->tensor.data)[999] == 1);
  memset(held->tensor.data, 1, 4000); /* is still there */
  nib_event_release(event);
  nib_tensor_release(wrapped);
  for (int i = 0; i < 5; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(p.deleted == 1);
  let_go(held);
  if (mode == 1) {
    CHECK(pthread_create(&threads[0], NULL, release_all, &handles) == 0);
    for (int i = 1; i < 8; i += 2) let_go(out[i]);
    CHECK(pthread_join(threads[0], NULL) == 0);
  } else {
    for (int i = 1; i < 8; i += 2) let_go(out[i]);
  }
  CHECK(live == 0);
}

/* A module is released while the export that keeps its GPU open comes back on another thread. */
static void end_with_module(void) {
  static const char code[] = ".version 7.0\n.target sm_70\n.address_size 64\n";
  nib_config config = { .allocate = allocate };
  nib_runtime *rt;
  nib_module *module;
  managed *out;
  pthread_t thread;
  OK(NULL, nib_runtime_create(&config, &rt));
  nib_device *device = device_of(rt);
  nib_tensor *tensor = make(device, NIB_FLOAT32, 24);
  OK(rt, nib_module_create(device, code, sizeof code - 1, &module));
  OK(rt, nib_tensor_to_dlpack(tensor, -1, &out));
  nib_tensor_release(tensor);
  nib_runtime_close(rt);
  CHECK(pthread_create(&thread, NULL, let_go, out) == 0);
  nib_module_release(module);
  CHECK(pthread_join(thread, NULL) == 0 && live == 0);
}

/* Owners that are told wait for a thread on which an export comes back, as Python's lock makes them: `while_closing`,
 * or after it. */
static void let_go_and_wait(void *user) { let_go_elsewhere(user); }

static void end_waiting(bool while_closing) {
  nib_config config = { .allocate = allocate };
  nib_runtime *rt;
  managed *first, *out;
  OK(NULL, nib_runtime_create(&config, &rt));
  nib_device *device = device_of(rt);
  nib_tensor *memory = make(device, NIB_FLOAT32, 24), *other = make(device, NIB_FLOAT32, 24), *lent, *wrapped;
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(rt, nib_tensor_to_dlpack(other, -1, &out));
  nib_wrap_desc desc = { .dtype = NIB_FLOAT32,
                         .ndim = 1,
                         .shape = (int64_t[]){ 24 },
                         .data = nib_tensor_data(memory),
                         .release = let_go_and_wait,
                         .user = out };
  OK(rt, nib_tensor_wrap(device, &desc, &wrapped));
  OK(rt, nib_tensor_to_dlpack(memory, -1, &first)); /* a round trip, of which both ends are left to the runtime's end */
  OK(rt, nib_tensor_from_dlpack(rt, first, &lent));
  OK(rt, nib_tensor_to_dlpack(wrapped, -1, &first));
  if (while_closing) {
    first->deleter(first);
    nib_runtime_close(rt);
    nib_tensor_release(wrapped);
  } else {
    nib_runtime_close(rt);
    nib_tensor_release(wrapped);
    first->deleter(first);
  }
  nib_tensor_release(lent);
  nib_tensor_release(memory);
  nib_tensor_release(other);
  CHECK(live == 0);
}

/* ---- Memory of the host's -------------------------------------------------------------------------------------- */

static void count(void *user) { ++*(int *)user; }

static void wraps(nib_runtime *rt, nib_device *device) {
  nib_stream *stream = nib_device_default_stream(device);
  nib_tensor *memory = make(device, NIB_BFLOAT16, 64), *tensor, *none;
  int released = 0;
  const int64_t shape[] = { 3, 4 }, stride[] = { 16, 1 };
  nib_wrap_desc desc = { .dtype = NIB_BFLOAT16,
                         .ndim = 2,
                         .shape = shape,
                         .stride = stride,
                         .data = nib_tensor_data(memory),
                         .release = count,
                         .user = &released };
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(rt, nib_tensor_wrap(device, &desc, &tensor));
  for (int i = 0; i < 100; i++) OK(rt, nib_tensor_fill(stream, tensor, NIB_INTEGER(i)));
  nib_tensor_release(tensor);
  OK(rt, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  CHECK(released == 1);
  uint16_t bits[64];
  OK(rt, nib_tensor_read(memory, bits, sizeof bits, NIB_UNLIMITED));
  CHECK(bits[0] == 0x42c6 && bits[35] == 0x42c6);
  desc.data = (char *)desc.data + 1;
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_wrap(device, &desc, &none));
  CHECK(strstr(nib_error(rt), "wrap: data: expected an address that is a multiple of 2"));
  desc.dtype = NIB_DTYPE_NONE;
  CHECK_STATUS(NIB_INVALID, rt, nib_tensor_wrap(device, &desc, &none));
  CHECK(released == 1 && !none);
  nib_tensor_release(memory);
}

int main(void) {
  nib_runtime *rt;
  OK(NULL, nib_runtime_create(NULL, &rt));
  imports(rt, device_of(rt));
  exports(rt, device_of(rt));
  reads_first(rt, device_of(rt));
  pinned(rt, device_of(rt));
  wraps(rt, device_of(rt));
  nib_runtime_close(rt);
  for (int round = 0; round < 30; round++) end(round % 2);
  for (int round = 0; round < 30 && strcmp(device_name(), "cpu") != 0; round++) end_with_module();
  end_waiting(true);
  end_waiting(false);
  return 0;
}
