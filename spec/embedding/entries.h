/* Every function of nibble.h, called once: what every_entry.c makes fail. An entry returns the status of its call; one
 * that cannot fail returns NIB_OK after it has checked the answers. Whatever a call gives back goes into the world's
 * results, which are released after each call, and must be NULL after one that failed. In a world that has ended,
 * answers are what they may be. */
#ifndef ENTRIES_H
#define ENTRIES_H

#include "../../kernels/params.h"
#include "host.h"
#include "nibble_lua.h"

struct results {
  nib_runtime *runtime;
  nib_stream *stream;
  nib_event *event;
  nib_graph *graph;
  nib_module *module;
  nib_user_kernel *kernel;
  nib_semaphore *semaphore;
  nib_tensor *tensors[6];
  nib_sandbox *sandbox;
  lua_State *L;
};

struct world {
  nib_config config;
  nib_runtime *runtime, *fresh; /* fresh: whose GPU nobody has opened yet */
  nib_device *device;
  nib_stream *stream, *other;
  nib_event *event, *later, *inside; /* inside: of the capture that is open, or NULL */
  nib_graph *graph;
  nib_module *module; /* NULL where the device has none, as is: */
  nib_user_kernel *kernel;
  nib_tensor *floats, *columns, *integers, *one, *square, *turned;            /* columns, turned: transposed views */
  nib_tensor *key, *slots, *data, *scales, *tables, *lengths, *out_k, *out_v; /* append, dequantize */
  nib_tensor *pages, *page_scales, *halves;                                   /* materialize, swizzle, quantize_cache */
  nib_tensor *q, *kv, *records, *positions, *table;                           /* rope_insert */
  const char *path;                                                           /* of a file to write, and to load */
  unsigned char file[256];
  size_t file_bytes;
  float host[24];
  nib_sandbox *sandbox; /* for the entries of lua_entries.h, and a tensor of its runtime */
  nib_tensor *shown;
  nib_status ended; /* CLOSED or FORKED: what all calls must return; OK: the runtimes are in use */
  /* In a world that has ended, from before: */
  nib_tensor *kept; /* of `fresh`, which it keeps there, as does a state that has the module on it */
  lua_State *state;
  nib_safetensors *archive;
  nib_semaphore *semaphore; /* NULL where the device has none */
  struct results made;
};

#define ENTRY(name) static nib_status name(struct world *w)
#define SHAPE(...) \
  (int32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

/* Code that the stand-in driver takes for a module of the project's kernels. */
static const unsigned long long image[] = { 0x00100001BA55ED50, 0 };
static const char kernel_name[] = "nib_cuda_fill_8";

static nib_status nothing(void *user) {
  (void)user;
  return NIB_OK;
}

/* ---- Answers --------------------------------------------------------------------------------------------------- */

ENTRY(names) {
  (void)w;
  nib_dtype dtype = NIB_DTYPE_NONE;
  CHECK(strcmp(nib_status_name(NIB_OK), "OK") == 0 && strcmp(nib_status_text(NIB_OK), "ok") == 0);
  CHECK(nib_abi_version() == NIB_ABI_VERSION && strcmp(nib_version(), NIB_VERSION) == 0);
  CHECK(strcmp(nib_dtype_name(NIB_INT32), "int32") == 0 && nib_dtype_find("int32", &dtype) && dtype == NIB_INT32);
  CHECK(nib_dtype_bytes(NIB_INT32) == 4 && !nib_dtype_is_float(NIB_INT32));
  return NIB_OK;
}

ENTRY(elements) {
  (void)w;
  float element = 0;
  CHECK(nib_element_from_number(NIB_FLOAT32, NIB_REAL(2.5), &element) && element == 2.5f);
  CHECK(nib_element_to_number(NIB_FLOAT32, &element).real == 2.5);
  return NIB_OK;
}

ENTRY(devices) {
  int32_t count = nib_device_count(w->runtime);
  CHECK(count >= 1 && nib_device_at(w->runtime, 0) && !nib_device_at(w->runtime, count));
  CHECK(nib_device_get_info(w->device)->name &&
        (w->ended || strcmp(nib_device_get_info(w->device)->name, device_name()) == 0));
  CHECK(nib_device_runtime(w->device) == w->runtime && nib_runtime_user(w->runtime) == w->config.user);
  CHECK(nib_device_memory(w->device).used_bytes > 0 || w->ended);
  CHECK(nib_device_is_capturing(w->device) == (w->inside != NULL) || w->ended);
  (void)nib_error(w->runtime);
  return NIB_OK;
}

ENTRY(shapes) {
  CHECK(nib_tensor_device(w->floats) == w->device && nib_tensor_dtype(w->floats) == NIB_FLOAT32);
  CHECK(nib_tensor_ndim(w->floats) == 2 && nib_tensor_shape(w->floats)[1] == 6 && nib_tensor_stride(w->floats)[0] == 6);
  CHECK(nib_tensor_numel(w->floats) == 24 && nib_tensor_is_contiguous(w->floats));
  CHECK(nib_tensor_data(w->floats) || w->ended);
  CHECK(nib_tensor_storage(w->floats) > 0 && nib_tensor_offset_bytes(w->floats) == 0 &&
        !nib_tensor_is_pinned(w->floats));
  CHECK(!nib_tensor_is_read_only(w->floats));
  CHECK(nib_tensor_same_view(w->floats, w->floats) && !nib_tensor_same_view(w->floats, w->columns));
  return NIB_OK;
}

ENTRY(handles) {
  const int32_t *deps;
  CHECK(nib_stream_device(w->stream) == w->device && nib_stream_id(w->stream) != nib_stream_id(w->other));
  CHECK(nib_stream_is_capturing(w->stream) == (w->inside != NULL) || w->ended);
  CHECK((nib_stream_handle(w->stream) != NULL) == (strcmp(device_name(), "cpu") != 0) || w->ended);
  CHECK(nib_event_device(w->event) == w->device && nib_graph_device(w->graph) == w->device);
  CHECK(nib_graph_node_count(w->graph) == 2 && strcmp(nib_graph_node_name(w->graph, 1), "fill") == 0);
  CHECK(nib_graph_node_deps(w->graph, 1, &deps) == 1 && deps[0] == 0);
  return NIB_OK;
}

ENTRY(kernels) {
  if (!w->kernel) return NIB_OK;
  CHECK(nib_module_device(w->module) == w->device && nib_user_kernel_device(w->kernel) == w->device);
  CHECK(strcmp(nib_user_kernel_name(w->kernel), kernel_name) == 0);
  CHECK(nib_user_kernel_attributes(w->kernel).max_threads > 0);
  int32_t count = nib_user_kernel_param_count(w->kernel);
  CHECK(count == -1 || nib_user_kernel_param_bytes(w->kernel, 0) == sizeof(struct nib_fill_params));
  return NIB_OK;
}

ENTRY(ranges) {
  nib_range_push(w->runtime, "a range");
  nib_range_pop(w->runtime);
  return NIB_OK;
}

/* Of nothing; what other entries make is released while calls still fail. */
ENTRY(releases) {
  nib_tensor_release(NULL);
  nib_stream_release(NULL);
  nib_event_release(NULL);
  nib_graph_release(NULL);
  nib_module_release(NULL);
  nib_user_kernel_release(NULL);
  nib_semaphore_release(NULL);
  nib_runtime_close(NULL);
  nib_safetensors_close(NULL);
  nib_capture_abort(w->other);
  CHECK(nib_stream_is_capturing(w->stream) == (w->inside != NULL) || w->ended);
  return NIB_OK;
}

/* ---- Runtimes and devices -------------------------------------------------------------------------------------- */

ENTRY(runtime_create) { return nib_runtime_create(&w->config, &w->made.runtime); }

/* Closes the world's second runtime in the middle of things. */
ENTRY(runtime_close) {
  nib_device *device = NULL;
  nib_tensor *tensor = NULL;
  nib_stream *stream = NULL;
  nib_module *module = NULL;
  nib_status status = nib_device_find(w->fresh, device_name(), &device);
  if (status == NIB_OK) status = nib_tensor_create(device, NIB_FLOAT32, SHAPE(4, 6), &tensor);
  if (status == NIB_OK && w->module) status = nib_module_create(device, image, sizeof image, &module);
  if (status == NIB_OK && (stream = nib_device_default_stream(device))) {
    status = nib_tensor_fill(stream, tensor, NIB_INTEGER(3));
    if (status == NIB_OK) status = nib_capture_begin(stream, NIB_CAPTURE_RELAXED);
    if (status == NIB_OK) status = nib_tensor_fill(stream, tensor, NIB_INTEGER(3));
  }
  nib_runtime_close(w->fresh);
  if (stream) CHECK(nib_tensor_fill(stream, tensor, NIB_INTEGER(3)) == NIB_CLOSED);
  nib_tensor_release(tensor);
  nib_module_release(module);
  w->fresh = NULL;
  return status;
}

ENTRY(device_find) {
  nib_device *device = NULL;
  nib_status status = nib_device_find(w->fresh, device_name(), &device);
  CHECK((status == NIB_OK) == (device != NULL));
  return status;
}

ENTRY(device_find_uuid) {
  nib_device *device = NULL, *known = nib_device_at(w->fresh, 0);
  for (int32_t i = 0; i < nib_device_count(w->fresh); i++)
    if (strcmp(nib_device_get_info(nib_device_at(w->fresh, i))->name, device_name()) == 0)
      known = nib_device_at(w->fresh, i);
  nib_status status = nib_device_find_uuid(w->fresh, nib_device_get_info(known)->uuid, &device);
  CHECK((status == NIB_OK) == (device == known));
  return status;
}

ENTRY(device_best) {
  nib_device *device = nib_device_best(w->fresh);
  CHECK(device && nib_device_get_info(device)->available);
  return NIB_OK;
}

ENTRY(default_stream) {
  int32_t i = 0;
  while (!w->ended && strcmp(nib_device_get_info(nib_device_at(w->fresh, i))->name, device_name()) != 0) i++;
  if (w->ended) i = nib_device_count(w->fresh) - 1; /* a GPU that nobody has used yet, where there is one */
  if (nib_device_default_stream(nib_device_at(w->fresh, i))) return NIB_OK;
  CHECK(*nib_error(w->fresh));
  return w->ended ? w->ended : NIB_MEMORY;
}

ENTRY(device_synchronize) { return nib_device_synchronize(w->device, NIB_UNLIMITED); }
ENTRY(tick) { return nib_tick(w->runtime, 1000); }

ENTRY(dropping) {
  nib_mark_work(w->runtime);
  int32_t cut = -1;
  nib_status status = nib_drop_work(w->runtime, &cut);
  CHECK(cut == 0);
  return status;
}

ENTRY(limits) {
  nib_status status = nib_set_limits(w->runtime, 0, 0, 0);
  CHECK(w->ended || nib_set_limits(w->runtime, 0, 0, -1) == NIB_INVALID);
  return status;
}

ENTRY(deadline) {
  nib_set_deadline(w->runtime, 10000000); /* whose waits all end before it */
  nib_status status = nib_stream_synchronize(w->stream, NIB_UNLIMITED);
  nib_set_deadline(w->runtime, NIB_UNLIMITED);
  return status;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

ENTRY(tensor_create_unused) { /* on a device that nobody has used yet, where there is one */
  nib_device *device = nib_device_at(w->fresh, nib_device_count(w->fresh) - 1);
  return nib_tensor_create(device, NIB_INT64, SHAPE(3, 5), &w->made.tensors[0]);
}
ENTRY(tensor_create) { return nib_tensor_create(w->device, NIB_INT64, SHAPE(3, 5), &w->made.tensors[0]); }
ENTRY(tensor_narrow) { return nib_tensor_narrow(w->floats, 1, 2, 3, &w->made.tensors[0]); }
ENTRY(tensor_select) { return nib_tensor_select(w->floats, 0, 1, &w->made.tensors[0]); }
ENTRY(tensor_view) { return nib_tensor_view(w->floats, SHAPE(2, -1), &w->made.tensors[0]); }
ENTRY(tensor_permute) { return nib_tensor_permute(w->floats, SHAPE(1, 0), &w->made.tensors[0]); }
ENTRY(tensor_expand) { return nib_tensor_expand(w->one, SHAPE(7), &w->made.tensors[0]); }
ENTRY(tensor_as_strided) {
  return nib_tensor_as_strided(w->floats, 1, (int64_t[]){ 3 }, (int64_t[]){ 7 }, 1, &w->made.tensors[0]);
}
ENTRY(tensor_reinterpret) { return nib_tensor_reinterpret(w->floats, NIB_UINT8, &w->made.tensors[0]); }
ENTRY(tensor_alias) { return nib_tensor_alias(w->floats, &w->made.tensors[0]); }

ENTRY(tensor_copy) { return nib_tensor_copy(w->stream, w->integers, w->columns); }
/* A copy onto itself, transposed, goes by a temporary. */
ENTRY(tensor_copy_overlapping) { return nib_tensor_copy(w->stream, w->square, w->turned); }
ENTRY(tensor_copy_across) {
  nib_device *cpu = nib_device_at(w->runtime, 0);
  nib_status status = nib_tensor_create(cpu, NIB_INT32, SHAPE(6, 4), &w->made.tensors[0]);
  if (status == NIB_OK) status = nib_tensor_copy(nib_device_default_stream(cpu), w->made.tensors[0], w->columns);
  if (status == NIB_OK) status = nib_tensor_copy(w->stream, w->integers, w->made.tensors[0]);
  return status;
}
ENTRY(tensor_copy_between) { return nib_tensor_copy_between(w->stream, w->other, w->integers, w->columns); }
ENTRY(tensor_copy_wait) { return nib_tensor_copy_wait(w->integers, w->columns, NIB_UNLIMITED); }
ENTRY(tensor_create_pinned) {
  return nib_tensor_create_pinned(w->runtime, NIB_INT64, SHAPE(3, 5), &w->made.tensors[0]);
}
ENTRY(tensor_fill) { return nib_tensor_fill(w->stream, w->columns, NIB_INTEGER(4)); }
ENTRY(tensor_arange) { return nib_tensor_arange(w->stream, w->floats, NIB_INTEGER(0), NIB_REAL(0.5)); }
ENTRY(tensor_random_normal) { return nib_tensor_random_normal(w->stream, w->floats, 1); }
ENTRY(tensor_random_integer) { return nib_tensor_random_integer(w->stream, w->integers, 1, -5, 5); }
ENTRY(tensor_random_permutation) { return nib_tensor_random_permutation(w->stream, w->slots, 1); }
ENTRY(tensor_write) { return nib_tensor_write(w->stream, w->columns, w->host, sizeof w->host); }
ENTRY(tensor_write_fresh) {
  nib_status status = nib_tensor_create(w->device, NIB_FLOAT32, SHAPE(4, 6), &w->made.tensors[0]);
  return status != NIB_OK ? status : nib_tensor_write(w->stream, w->made.tensors[0], w->host, sizeof w->host);
}
ENTRY(tensor_wait) { return nib_tensor_wait(w->floats, NIB_UNLIMITED); }
ENTRY(tensor_read) { return nib_tensor_read(w->columns, w->host, sizeof w->host, NIB_UNLIMITED); }

ENTRY(tensor_equal) {
  bool equal = false;
  nib_status status = nib_tensor_equal(w->columns, w->columns, &equal);
  CHECK(equal == (status == NIB_OK));
  return status;
}
ENTRY(tensor_allclose) {
  bool equal = false;
  nib_status status = nib_tensor_allclose(w->columns, w->columns, 0, 0, true, &equal);
  CHECK(equal == (status == NIB_OK));
  return status;
}
ENTRY(tensor_max_error) {
  double error = -1;
  int64_t index = -2;
  return nib_tensor_max_error(w->columns, w->columns, &error, &index);
}
ENTRY(tensor_amax) {
  double most = -1;
  return nib_tensor_amax(w->columns, &most);
}

ENTRY(npy_save) { return nib_npy_save(w->columns, w->path); }
ENTRY(npy_load) { return nib_npy_load(w->stream, w->path, NIB_DTYPE_NONE, &w->made.tensors[0]); }
ENTRY(npy_parse) { return nib_npy_parse(w->stream, w->file, w->file_bytes, NIB_DTYPE_NONE, &w->made.tensors[0]); }

ENTRY(safetensors) {
  char path[300];
  const char *name = "x";
  nib_safetensors *file = NULL;
  int32_t index = -1;
  snprintf(path, sizeof path, "%s.safetensors", w->path);
  nib_status status = nib_safetensors_save(w->runtime, path, 1, &name, &w->floats);
  if (status == NIB_OK) status = nib_safetensors_open(w->runtime, path, &file);
  if (status == NIB_OK) status = nib_safetensors_find(file, name, &index);
  if (w->ended) {
    CHECK(status == w->ended && nib_safetensors_open(w->runtime, path, &file) == w->ended && !file);
    CHECK(nib_safetensors_count(w->archive) == 1 && nib_safetensors_at(w->archive, 0));
    CHECK(nib_safetensors_find(w->archive, name, &index) == NIB_OK ||
          nib_safetensors_find(w->archive, name, &index) == w->ended);
    return nib_safetensors_read(w->stream, w->archive, 0, NIB_DTYPE_NONE, &w->made.tensors[0]);
  }
  if (status == NIB_OK) {
    CHECK(index == 0 && nib_safetensors_count(file) == 1 && nib_safetensors_at(file, 0)->dtype == NIB_FLOAT32);
    status = nib_safetensors_read(w->stream, file, 0, NIB_DTYPE_NONE, &w->made.tensors[0]);
  }
  nib_safetensors_close(file);
  remove(path);
  return status;
}

ENTRY(writer) {
  char path[300];
  nib_writer *writer = NULL;
  snprintf(path, sizeof path, "%s.text", w->path);
  nib_status status = nib_writer_create(w->runtime, path, &writer);
  CHECK((status == NIB_OK) == (writer != NULL));
  if (status != NIB_OK) return status;
  OK(w->runtime, nib_writer_write(writer, "abc", 3));
  OK(w->runtime, nib_writer_close(writer, true));
  CHECK(remove(path) == 0);
  return status;
}

/* ---- Streams, events, graphs ----------------------------------------------------------------------------------- */

ENTRY(stream_create) { return nib_stream_create(w->device, -1, &w->made.stream); }
ENTRY(stream_synchronize) { return nib_stream_synchronize(w->stream, NIB_UNLIMITED); }
ENTRY(stream_call) { return nib_stream_call(w->stream, nothing, NULL); }
ENTRY(stream_wait) { return nib_stream_wait(w->other, w->inside ? w->inside : w->event); }
ENTRY(event_record) { return nib_event_record(w->stream, &w->made.event); }
ENTRY(event_synchronize) { return nib_event_synchronize(w->event, NIB_UNLIMITED); }
ENTRY(event_elapsed) {
  double milliseconds;
  return nib_event_elapsed(w->event, w->later, &milliseconds);
}

/* Whatever fails, no capture stays open that this began. */
ENTRY(capture) {
  nib_event *fork = NULL, *join = NULL;
  nib_status status = nib_capture_begin(w->stream, NIB_CAPTURE_THREAD_LOCAL);
  if (status == w->ended && status != NIB_OK) return nib_capture_end(w->stream, &w->made.graph, NULL);
  if (status != NIB_OK) return status;
  status = nib_tensor_fill(w->stream, w->floats, NIB_REAL(2));
  if (status == NIB_OK) status = nib_event_record(w->stream, &fork);
  if (status == NIB_OK) status = nib_stream_wait(w->other, fork);
  if (status == NIB_OK) status = nib_tensor_fill(w->other, w->integers, NIB_INTEGER(2));
  if (status == NIB_OK) status = nib_event_record(w->other, &join);
  if (status == NIB_OK) status = nib_stream_wait(w->stream, join);
  if (status == NIB_OK) status = nib_capture_end(w->stream, &w->made.graph, NULL);
  else nib_capture_abort(w->stream);
  CHECK(!nib_device_is_capturing(w->device) && !nib_stream_is_capturing(w->other));
  nib_event_release(fork);
  nib_event_release(join);
  return status;
}

/* An update that fails leaves the graph as it was. */
ENTRY(capture_update) {
  bool in_place = false;
  nib_graph *before = w->graph;
  nib_status status = nib_capture_begin(w->stream, NIB_CAPTURE_RELAXED);
  if (status != NIB_OK) return status;
  status = nib_tensor_fill(w->stream, w->floats, NIB_REAL(3));
  if (status == NIB_OK) status = nib_tensor_fill(w->stream, w->integers, NIB_INTEGER(3));
  if (status == NIB_OK) status = nib_capture_end(w->stream, &w->graph, &in_place);
  else nib_capture_abort(w->stream);
  CHECK(!nib_device_is_capturing(w->device) && w->graph == before && nib_graph_node_count(w->graph) == 2);
  CHECK(in_place == (status == NIB_OK));
  return status;
}

ENTRY(graph_replay) { return nib_graph_replay(w->graph, w->other); }
ENTRY(graph_dot) {
  char text[1000];
  size_t needed = 0;
  nib_status status = nib_graph_dot(w->graph, text, sizeof text, &needed);
  CHECK((needed > 20 && needed < sizeof text) || w->ended);
  return status;
}

ENTRY(graph_driver_dot) {
  char text[20000];
  size_t needed = 0;
  nib_status status = nib_graph_driver_dot(w->graph, text, sizeof text, &needed);
  CHECK(status != NIB_OK || needed > 20);
  return status;
}
ENTRY(graph_wait) { return nib_graph_wait(w->graph, NIB_UNLIMITED); }

/* ---- The host's context and streams: what is refused ----------------------------------------------------------- */

ENTRY(wrap_nothing) {
  nib_status context = nib_device_use_context(w->device, NULL),
             stream = nib_stream_wrap(w->device, NULL, &w->made.stream);
  CHECK(context != NIB_OK && stream != NIB_OK && !w->made.stream);
  return w->ended && context == w->ended && stream == w->ended ? w->ended : NIB_OK;
}

#include "entries_shared.h"

/* ---- Observing ------------------------------------------------------------------------------------------------- */

static void count_observations(void *user, const nib_observation *observation) {
  CHECK(*nib_observation_name(observation->kind) != '?');
  ++*(int *)user;
}

ENTRY(observe) {
  int count = 0;
  nib_runtime_observe(w->runtime, count_observations, &count);
  nib_status status = nib_tensor_fill(w->stream, w->floats, NIB_REAL(1));
  nib_runtime_observe(w->runtime, NULL, NULL);
  CHECK(status != NIB_OK || count == 1);
  return status;
}

ENTRY(peek) {
  float values[2];
  int64_t two = 2, one = 1;
  return nib_peek(w->runtime, nib_tensor_storage(w->floats), NIB_FLOAT32, 0, 1, &two, &one, values, sizeof values);
}

/* ---- Kernels of your own: UNAVAILABLE on the CPU --------------------------------------------------------------- */

ENTRY(compile) {
  const char *source = "extern \"C\" __global__ void nib_cuda_fill_8(int *x) { *x = 1; }";
  return nib_compile(w->device, source, (const char *[]){ "--fmad=false" }, 1, &w->made.module);
}
ENTRY(module_create) {
  if (!w->module) return NIB_UNAVAILABLE;
  return nib_module_create(w->device, image, sizeof image, &w->made.module);
}
ENTRY(module_kernel) {
  if (!w->module) return NIB_UNAVAILABLE;
  nib_status status = nib_module_kernel(w->module, kernel_name, &w->made.kernel);
  if (status == NIB_OK) CHECK(nib_user_kernel_param_count(w->made.kernel) == 1);
  return status;
}
ENTRY(kernel_launch) {
  if (!w->kernel) return NIB_UNAVAILABLE;
  struct nib_fill_params params = { .destination = nib_tensor_data(w->floats),
                                    .type = NIB_TYPE_UINT8,
                                    .ndim = 1,
                                    .size = { 96 },
                                    .stride = { 1 },
                                    .bits = 0 };
  nib_argument argument = { .value = &params, .bytes = sizeof params };
  nib_launch_desc desc = { .grid = { 1, 1, 1 }, .block = { 64, 1, 1 }, .arguments = &argument, .argument_count = 1 };
  return nib_user_kernel_launch(w->stream, w->kernel, &desc);
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

ENTRY(append) {
  nib_cache cache = { .stacked = w->data }, scales = { .stacked = w->scales };
  nib_append_desc desc = { .append_key = w->key,
                           .append_value = w->key,
                           .slot_mapping = w->slots,
                           .paged_kv_cache = cache,
                           .kv_cache_sf = scales,
                           .k_scale = { w->one, 0 },
                           .v_scale = { w->one, 0 } };
  return nib_append(w->stream, &desc);
}

ENTRY(dequantize) {
  nib_cache cache = { .stacked = w->data }, scales = { .stacked = w->scales };
  nib_dequantize_desc desc = { .paged_kv_cache = cache,
                               .kv_cache_sf = scales,
                               .block_tables = w->tables,
                               .seq_lens = w->lengths,
                               .k_scale = w->one,
                               .v_scale = w->one,
                               .output_k = w->out_k,
                               .output_v = w->out_v };
  return nib_dequantize(w->stream, &desc);
}

ENTRY(materialize) {
  nib_materialize_desc desc = { .k_cache = w->pages,
                                .v_cache = w->pages,
                                .k_block_scales = w->page_scales,
                                .v_block_scales = w->page_scales,
                                .block_tables = w->tables,
                                .seq_lens = w->lengths,
                                .max_kv_len = 4 };
  return nib_materialize(w->stream, &desc, &w->made.tensors[0], &w->made.tensors[1]);
}

ENTRY(rope_insert) {
  nib_rope_insert_desc desc = { .q = w->q,
                                .kv = w->kv,
                                .cache = w->records,
                                .slot_mapping = w->lengths,
                                .positions = w->positions,
                                .cos_sin_cache = w->table,
                                .q_head_padded = 8 };
  return nib_rope_insert(w->stream, &desc, &w->made.tensors[0]);
}

ENTRY(swizzle) { return nib_swizzle_v_scales(w->stream, w->page_scales, NIB_HND, false, NULL, &w->made.tensors[0]); }

ENTRY(quantize_cache) {
  nib_quantize_cache_desc desc = { .k_cache = w->halves, .v_cache = w->halves, .kv_layout = NIB_HND };
  nib_quantized_cache out = { 0 };
  nib_status status = nib_quantize_cache(w->stream, &desc, &out);
  nib_tensor *all[] = { out.k, out.v, out.k_sf, out.v_sf, out.k_scale, out.v_scale };
  memcpy(w->made.tensors, all, sizeof all);
  return status;
}

ENTRY(mla_dequantize) { return nib_mla_dequantize(w->stream, w->records, w->lengths, &w->made.tensors[0]); }
ENTRY(rope_table) { return nib_rope_table(w->stream, 4, 1e4, NIB_FLOAT32, &w->made.tensors[0]); }

/* ---- The list -------------------------------------------------------------------------------------------------- */

enum {
  MAKES_DO = 1, /* may succeed though every allocation fails */
  ALONE = 2,    /* with a fresh runtime, and not while the world's captures */
  SANDBOX = 4,  /* with a sandbox, likewise */
  TELLS = 8,    /* checks by itself that a failure comes with a message, or has none */
  ANSWERS = 16, /* may be OK in a world that has ended: it asks for nothing but an answer, or gives back */
  OWN = 32,     /* makes a runtime of its own, in a world that has ended too */
};

struct entry {
  nib_status (*call)(struct world *w);
  const char *names; /* the functions of nibble.h that it stands for */
  int flags;
};

static const struct entry entries[] = {
  { names,
    "nib_status_name nib_status_text nib_abi_version nib_version nib_dtype_name nib_dtype_find nib_dtype_bytes "
    "nib_dtype_is_float",
    ANSWERS },
  { elements, "nib_element_to_number nib_element_from_number", ANSWERS },
  { devices,
    "nib_device_count nib_device_at nib_device_get_info nib_device_runtime nib_runtime_user nib_device_memory "
    "nib_device_is_capturing nib_error",
    ANSWERS },
  { shapes,
    "nib_tensor_device nib_tensor_dtype nib_tensor_ndim nib_tensor_shape nib_tensor_stride nib_tensor_numel "
    "nib_tensor_is_contiguous nib_tensor_data nib_tensor_same_view "
    "nib_tensor_storage nib_tensor_offset_bytes nib_tensor_is_pinned nib_tensor_is_read_only",
    ANSWERS },
  { handles,
    "nib_stream_device nib_stream_id nib_stream_is_capturing nib_event_device nib_graph_device nib_graph_node_count "
    "nib_graph_node_name nib_graph_node_deps",
    ANSWERS },
  { kernels,
    "nib_module_device nib_user_kernel_device nib_user_kernel_name nib_user_kernel_attributes "
    "nib_user_kernel_param_count "
    "nib_user_kernel_param_bytes",
    ANSWERS },
  { ranges, "nib_range_push nib_range_pop", ANSWERS },
  { releases,
    "nib_tensor_release nib_stream_release nib_event_release nib_graph_release nib_module_release "
    "nib_user_kernel_release nib_semaphore_release nib_capture_abort",
    ANSWERS },
  { runtime_create, "nib_runtime_create", ALONE | TELLS | OWN },
  { runtime_close, "nib_runtime_close", MAKES_DO | ALONE | TELLS },
  { device_find, "nib_device_find", ALONE },
  { device_find_uuid, "nib_device_find_uuid", ALONE },
  { device_best, "nib_device_best", MAKES_DO | ALONE | ANSWERS },
  { default_stream, "nib_device_default_stream", ALONE | ANSWERS },
  { device_synchronize, "nib_device_synchronize", 0 },
  { tick, "nib_tick", 0 },
  { deadline, "nib_set_deadline", 0 },
  { limits, "nib_set_limits", 0 },
  { dropping, "nib_mark_work nib_drop_work", 0 },
  { tensor_create, "nib_tensor_create", 0 },
  { tensor_create_unused, "nib_tensor_create", ALONE },
  { tensor_narrow, "nib_tensor_narrow", 0 },
  { tensor_select, "nib_tensor_select", 0 },
  { tensor_view, "nib_tensor_view", 0 },
  { tensor_permute, "nib_tensor_permute", 0 },
  { tensor_expand, "nib_tensor_expand", 0 },
  { tensor_as_strided, "nib_tensor_as_strided", 0 },
  { tensor_reinterpret, "nib_tensor_reinterpret", 0 },
  { tensor_alias, "nib_tensor_alias", 0 },
  { tensor_copy, "nib_tensor_copy", 0 },
  { tensor_copy_overlapping, "nib_tensor_copy", 0 },
  { tensor_copy_across, "nib_tensor_copy", 0 },
  { tensor_copy_between, "nib_tensor_copy_between", 0 },
  { tensor_copy_wait, "nib_tensor_copy_wait", 0 },
  { tensor_create_pinned, "nib_tensor_create_pinned", 0 },
  { tensor_fill, "nib_tensor_fill", 0 },
  { tensor_arange, "nib_tensor_arange", 0 },
  { tensor_random_normal, "nib_tensor_random_normal", 0 },
  { tensor_random_integer, "nib_tensor_random_integer", 0 },
  { tensor_random_permutation, "nib_tensor_random_permutation", 0 },
  { tensor_write, "nib_tensor_write", 0 },
  { tensor_write_fresh, "nib_tensor_write", 0 },
  { tensor_wait, "nib_tensor_wait", 0 },
  { tensor_read, "nib_tensor_read", 0 },
  { tensor_equal, "nib_tensor_equal", 0 },
  { tensor_allclose, "nib_tensor_allclose", 0 },
  { tensor_max_error, "nib_tensor_max_error", 0 },
  { tensor_amax, "nib_tensor_amax", 0 },
  { npy_save, "nib_npy_save", 0 },
  { npy_load, "nib_npy_load", 0 },
  { npy_parse, "nib_npy_parse", 0 },
  { safetensors,
    "nib_safetensors_save nib_safetensors_open nib_safetensors_find nib_safetensors_count nib_safetensors_at "
    "nib_safetensors_read nib_safetensors_close",
    0 },
  { writer, "nib_writer_create nib_writer_write nib_writer_close", 0 },
  { stream_create, "nib_stream_create", 0 },
  { stream_synchronize, "nib_stream_synchronize", 0 },
  { stream_call, "nib_stream_call", 0 },
  { stream_wait, "nib_stream_wait", 0 },
  { event_record, "nib_event_record", 0 },
  { event_synchronize, "nib_event_synchronize", 0 },
  { event_elapsed, "nib_event_elapsed", 0 },
  { capture, "nib_capture_begin nib_capture_end", 0 },
  { capture_update, "nib_capture_begin nib_capture_end", 0 },
  { graph_replay, "nib_graph_replay", 0 },
  { graph_dot, "nib_graph_dot", 0 },
  { graph_driver_dot, "nib_graph_driver_dot", 0 },
  { graph_wait, "nib_graph_wait", 0 },
  { wrap_nothing, "nib_device_use_context nib_stream_wrap nib_stream_handle", MAKES_DO },
  { wrap, "nib_tensor_wrap", 0 },
  { written, "nib_tensor_written", 0 },
  { dlpack, "nib_tensor_to_dlpack nib_tensor_from_dlpack", 0 },
  { import, "nib_tensor_import", 0 },
  { export, "nib_tensor_create_exportable nib_tensor_export", 0 },
  { semaphore, "nib_semaphore_import nib_semaphore_device nib_semaphore_wait nib_semaphore_signal", 0 },
  { observe, "nib_runtime_observe nib_observation_name", 0 },
  { peek, "nib_peek", 0 },
  { compile, "nib_compile", 0 },
  { module_create, "nib_module_create", 0 },
  { module_kernel, "nib_module_kernel", 0 },
  { kernel_launch, "nib_user_kernel_launch", 0 },
  { append, "nib_append", 0 },
  { dequantize, "nib_dequantize", 0 },
  { materialize, "nib_materialize", 0 },
  { rope_insert, "nib_rope_insert", 0 },
  { swizzle, "nib_swizzle_v_scales", 0 },
  { quantize_cache, "nib_quantize_cache", 0 },
  { mla_dequantize, "nib_mla_dequantize", 0 },
  { rope_table, "nib_rope_table", 0 },
};

#define ENTRY_COUNT (sizeof entries / sizeof *entries)

#endif
