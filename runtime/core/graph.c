/* Captures and graphs: recording, joining streams, replaying and updating.
 *
 * A device has at most one open capture. It begins on a stream, its origin. While it is open, nib_submit records work
 * instead of queuing it: nib_record adds a node to the capture's plan, with a copy of the parameters, the nodes that it
 * depends on, and a pin on every storage that it uses. This is the same on every device. On a device that captures
 * natively (CUDA) the launch also goes to the driver, whose own capture records it; if the driver refuses it, no node
 * is added.
 *
 * Dependencies come from frontiers. The frontier of a capturing stream is the set of nodes that its next node depends
 * on; after a node, it is that node alone. An event that is recorded in the capture copies the frontier. A stream that
 * waits for such an event joins the capture, and the event's nodes are added to its frontier, except those that others
 * in it depend on. Events of no capture, or of another capture, are refused.
 *
 * nib_capture_end requires that the origin's frontier follows the work of every stream that joined. Then `graphs.end`
 * ends the driver's capture and stores its graph in plan->impl, and `graphs.prepare` makes it executable. CUDA updates
 * the executable graph of the plan that this one replaces, or instantiates a new one. The CPU device orders the nodes
 * for its worker: after their dependencies, but otherwise not in the recorded order, so that missing dependencies show.
 *
 * After that the plan does not change. A replay queues it as one piece of work, whose ticket goes into the uses of the
 * plan and of all that it pins. An update replaces the graph's plan; the old one is deferred, and freed when its queued
 * replays are done. A capture that fails or is aborted drops its plan; none of its work was queued.
 *
 * During a native capture the driver refuses frees and most waits on its device. So frees are postponed until it ends
 * (can_destroy in deferred.c), and waits are refused before they reach the driver (nib_check_not_capturing). */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "graph.h"
#include "own.h"

/* Makes room for one more item by doubling the array. */
static bool grow(nib_runtime *rt, void **items, int32_t count, int32_t *capacity, size_t item) {
  if (count < *capacity) return true;
  int32_t wanted = *capacity ? *capacity * 2 : 8;
  void *larger = nib_reallocate(rt, *items, item * (size_t)*capacity, item * (size_t)wanted);
  if (!larger) return false;
  *items = larger;
  *capacity = wanted;
  return true;
}

/* ---- Plans ----------------------------------------------------------------------------------------------------- */

#define FIRST_CHUNK ((size_t)1024) /* bytes; each chunk is twice as large as the one before, up to: */
#define LAST_CHUNK  ((size_t)65536)

static void *take(nib_runtime *rt, struct nib_plan *plan, size_t bytes) {
  struct nib_chunk *chunk = plan->chunks;
  bytes = (bytes + 15) & ~(size_t)15;
  if (!chunk || chunk->bytes - chunk->used < bytes) {
    size_t size = !chunk ? FIRST_CHUNK : chunk->bytes < LAST_CHUNK ? 2 * chunk->bytes : LAST_CHUNK;
    if (size < bytes) size = bytes;
    chunk = nib_allocate(rt, sizeof *chunk + size);
    if (!chunk) return NULL;
    *chunk = (struct nib_chunk){ plan->chunks, size, 0 };
    plan->chunks = chunk;
  }
  void *result = (char *)(chunk + 1) + chunk->used;
  chunk->used += bytes;
  return result;
}

#define NODES_AT_ONCE   256            /* destroyed in one piece */
#define BYTES_OF_A_NODE ((size_t)8192) /* freeing so many bytes counts as a node */

static enum nib_end plan_destroy(struct nib_deferred *self) {
  struct nib_plan *plan = (struct nib_plan *)self;
  nib_device *device = self->device;
  nib_runtime *rt = device->runtime;
  int64_t left = NODES_AT_ONCE;
  if (!rt->closed) device->backend->graphs.destroy(plan); /* does nothing if called again for the next piece */
  nib_free_large(rt, plan->order, sizeof *plan->order * (size_t)plan->node_count, NULL);
  plan->order = NULL;
  while (plan->node_count > 0) {
    if (left-- <= 0) return NIB_MORE;
    nib_module_release(plan->nodes[--plan->node_count].module);
  }
  while (plan->chunks) {
    struct nib_chunk *chunk = plan->chunks;
    if (left <= 0) return NIB_MORE;
    left -= 1 + (int64_t)(chunk->bytes / BYTES_OF_A_NODE);
    plan->chunks = chunk->next;
    nib_free(rt, chunk, sizeof *chunk + chunk->bytes);
  }
  while (plan->pin_count > 0) {
    if (left-- <= 0) return NIB_MORE;
    struct nib_storage *storage = plan->pins[--plan->pin_count].storage;
    if (storage->references == 1) left -= (int64_t)(storage->bytes / BYTES_OF_A_NODE);
    storage->pins--;
    nib_storage_release(storage);
  }
  nib_free_large(rt, plan->nodes, sizeof *plan->nodes * (size_t)plan->node_capacity, NULL);
  nib_free(rt, plan->marks, (size_t)plan->mark_capacity);
  nib_free(rt, plan->pins, sizeof *plan->pins * (size_t)plan->pin_capacity);
  nib_uses_free(rt, &self->uses);
  nib_free(rt, plan, sizeof *plan);
  nib_handle_removed(rt);
  return NIB_GONE;
}

/* Whether `node` is one of nodes[0..count-1] or one that they depend on. Nodes depend only on earlier nodes. */
static bool is_behind(const struct nib_plan *plan, int32_t node, const int32_t *nodes, int32_t count) {
  unsigned char *marks = plan->marks;
  int32_t last = -1;
  for (int32_t i = 0; i < count; i++)
    if (nodes[i] > last) last = nodes[i];
  if (last < node) return false;
  memset(marks + node, 0, (size_t)(last - node) + 1);
  for (int32_t i = 0; i < count; i++)
    if (nodes[i] >= node) marks[nodes[i]] = 1;
  for (int32_t at = last; at > node; at--)
    for (int32_t k = 0; marks[at] && k < plan->nodes[at].dep_count; k++)
      if (plan->nodes[at].deps[k] >= node) marks[plan->nodes[at].deps[k]] = 1;
  return marks[node];
}

/* ---- Recording ------------------------------------------------------------------------------------------------- */

static bool pin(nib_runtime *rt, struct nib_plan *plan, struct nib_storage *storage, bool write) {
  for (int32_t i = 0; i < plan->pin_count; i++)
    if (plan->pins[i].storage == storage) {
      plan->pins[i].write |= write;
      return true;
    }
  if (!grow(rt, (void **)&plan->pins, plan->pin_count, &plan->pin_capacity, sizeof *plan->pins)) return false;
  nib_storage_retain(storage);
  storage->pins++;
  plan->pins[plan->pin_count++] = (struct nib_pin){ storage, write };
  return true;
}

nib_status nib_record(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  struct nib_plan *plan = stream->capture->plan;
  size_t dep_bytes = sizeof(int32_t) * (size_t)stream->frontier_count,
         name_bytes = work->module ? strlen(work->name) + 1 : 0;
  struct nib_node node = {
    .kernel = work->kernel, .name = work->name, .bytes = (uint32_t)work->bytes, .dep_count = stream->frontier_count
  };
  struct nib_chunk *const chunk = plan->chunks;
  const size_t used = chunk ? chunk->used : 0;
  char *name = NULL;
  bool ok = (node.params = take(rt, plan, work->bytes + 1)) != NULL; /* + 1: a kernel may have no arguments */
  if (ok && dep_bytes > 0) ok = (node.deps = take(rt, plan, dep_bytes)) != NULL;
  if (ok && name_bytes > 0) ok = (name = take(rt, plan, name_bytes)) != NULL;
  ok = ok && grow(rt, (void **)&plan->nodes, plan->node_count, &plan->node_capacity, sizeof *plan->nodes);
  ok = ok && grow(rt, (void **)&plan->marks, plan->node_count, &plan->mark_capacity, sizeof *plan->marks);
  ok = ok && grow(rt, (void **)&stream->frontier, 0, &stream->frontier_capacity, sizeof *stream->frontier);
  /* If this fails, the pins stay. They only keep tensors alive until the capture ends. */
  for (int32_t i = 0; ok && i < access_count; i++)
    if (accesses[i].tensor) ok = pin(rt, plan, accesses[i].tensor->storage, accesses[i].write);
  nib_status status = ok ? NIB_OK : nib_fail_memory(rt, "graph", work->bytes + dep_bytes);
  if (ok && device->backend->captures_natively) status = device->backend->streams.launch(stream, work);
  if (status != NIB_OK) {
    for (struct nib_chunk *c = plan->chunks; c && c != chunk; c = c->next) c->used = 0;
    if (chunk) chunk->used = used;
    return status;
  }
  if (work->bytes) memcpy(node.params, work->params, work->bytes);
  if (dep_bytes) memcpy(node.deps, stream->frontier, dep_bytes);
  if (work->module) {
    node.name = memcpy(name, work->name, name_bytes);
    node.module = work->module;
    nib_module_retain(work->module);
  }
  stream->frontier[0] = plan->node_count;
  stream->frontier_count = 1;
  plan->nodes[plan->node_count++] = node;
  plan->operand_bytes = nib_operand_bytes(plan->operand_bytes, accesses, access_count);
  if (rt->observe) nib_tell_work(stream, operation, work, accesses, access_count, plan->node_count - 1);
  return NIB_OK;
}

nib_status nib_frontier_reserve(nib_stream *stream, int32_t count) {
  nib_runtime *rt = stream->device->runtime;
  int32_t wanted = (stream->capture ? stream->frontier_count : 0) + count;
  while (stream->frontier_capacity < wanted)
    if (!grow(rt, (void **)&stream->frontier, stream->frontier_capacity, &stream->frontier_capacity,
              sizeof *stream->frontier))
      return nib_fail_memory(rt, "stream:wait", sizeof *stream->frontier * (size_t)wanted);
  return NIB_OK;
}

void nib_frontier_join(nib_stream *stream, const int32_t *nodes, int32_t count) {
  nib_device *device = stream->device;
  struct nib_plan *plan = device->capture->plan;
  int32_t joined = stream->capture ? stream->frontier_count : 0;
  stream->capture = device->capture;
  int32_t *frontier = stream->frontier;
  for (int32_t i = 0; i < count; i++) {
    if (is_behind(plan, nodes[i], frontier, joined)) continue;
    int32_t kept = 0;
    for (int32_t k = 0; k < joined; k++)
      if (!is_behind(plan, frontier[k], &nodes[i], 1)) frontier[kept++] = frontier[k];
    int32_t at = kept;
    for (; at > 0 && frontier[at - 1] > nodes[i]; at--)
      frontier[at] = frontier[at - 1]; /* keeps it in ascending order */
    frontier[at] = nodes[i];
    joined = kept + 1;
  }
  stream->frontier_count = joined;
}

/* ---- Beginning and ending -------------------------------------------------------------------------------------- */

nib_status nib_capture_begin(nib_stream *stream, nib_capture_mode mode) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if ((unsigned)mode > NIB_CAPTURE_RELAXED)
    return nib_fail(rt, NIB_INVALID, "stream:capture: mode: expected a nib_capture_mode, got %d", (int)mode);
  if (device->capture)
    return nib_fail(rt, NIB_CAPTURING,
                    "stream:capture: stream %llu of %s is capturing; a device has one capture at a time",
                    (unsigned long long)device->capture->origin->id, device->info.name);
  status = nib_check_stream(stream, "stream:capture");
  if (status != NIB_OK) return status;
  struct nib_capture *capture = nib_allocate_zero(rt, sizeof *capture);
  struct nib_plan *plan = capture ? nib_allocate_zero(rt, sizeof *plan) : NULL;
  status = plan ? device->backend->graphs.begin(stream, mode) : nib_fail_memory(rt, "stream:capture", sizeof *plan);
  if (status != NIB_OK) {
    nib_free(rt, plan, sizeof *plan);
    nib_free(rt, capture, sizeof *capture);
    return status;
  }
  plan->deferred.device = device;
  plan->deferred.destroy = plan_destroy;
  nib_handle_added(rt);
  capture->id = ++rt->last_capture_id;
  capture->origin = stream;
  capture->plan = plan;
  device->capture = stream->capture = capture;
  stream->frontier_count = 0;
  NIB_TELL(rt, NIB_OBSERVED_CAPTURE_BEGIN, .operation = "stream:capture", .device = device, .stream = stream->id,
           .capture = capture->id);
  return NIB_OK;
}

/* Ends the capture of all streams. Returns its plan, which the caller owns. */
static struct nib_plan *close_capture(nib_device *device) {
  struct nib_capture *capture = device->capture;
  struct nib_plan *plan = capture->plan;
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    bool unwrap = stream->capture && stream->released && stream->wrapped; /* it was released during the capture */
    stream->capture = NULL;
    stream->frontier_count = 0;
    if (unwrap) device->backend->foreign->unwrap_stream(stream);
  }
  device->capture = NULL;
  nib_free(device->runtime, capture, sizeof *capture);
  return plan;
}

void nib_capture_close(nib_device *device) {
  if (!device->capture) return;
  device->backend->graphs.end(device->capture->origin, NULL);
  struct nib_plan *plan = close_capture(device);
  nib_defer(&plan->deferred);
  nib_reap_in_time(device); /* objects that were released during the capture */
}

static void tell_abort(const nib_stream *stream, uint64_t capture, uint64_t unjoined) {
  NIB_TELL(stream->device->runtime, NIB_OBSERVED_CAPTURE_ABORT, .operation = "stream:capture", .device = stream->device,
           .stream = stream->id, .capture = capture, .unjoined = unjoined);
}

void nib_capture_abort(nib_stream *stream) {
  nib_device *device = stream->device;
  if (device->runtime->closed || nib_is_forked(device->runtime)) return;
  if (!device->capture || device->capture->origin != stream) return;
  tell_abort(stream, device->capture->id, 0);
  nib_capture_close(device);
}

/* The first stream with work that the origin does not wait for, or NULL. */
static nib_stream *unjoined(nib_device *device) {
  const struct nib_capture *capture = device->capture;
  const nib_stream *origin = capture->origin;
  for (nib_stream *stream = device->streams; stream; stream = stream->next)
    for (int32_t i = 0; stream != origin && stream->capture && i < stream->frontier_count; i++)
      if (!is_behind(capture->plan, stream->frontier[i], origin->frontier, origin->frontier_count)) return stream;
  return NULL;
}

static bool same_topology(const struct nib_plan *a, const struct nib_plan *b) {
  if (a->node_count != b->node_count) return false;
  for (int32_t i = 0; i < a->node_count; i++) {
    const struct nib_node *x = &a->nodes[i], *y = &b->nodes[i];
    if (x->kernel != y->kernel || x->dep_count != y->dep_count || strcmp(x->name, y->name) != 0) return false;
    for (int32_t k = 0; k < x->dep_count; k++)
      if (x->deps[k] != y->deps[k]) return false;
  }
  return true;
}

nib_status nib_capture_end(nib_stream *stream, nib_graph **graph, bool *in_place) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  if (in_place) *in_place = false;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (!device->capture || device->capture->origin != stream)
    return nib_fail(rt, NIB_STATE, "stream:capture: stream: expected a stream that began a capture, got stream %llu",
                    (unsigned long long)stream->id);
  if (*graph && (*graph)->device != device)
    return nib_fail(rt, NIB_INVALID, "stream:capture: graph: expected a graph of %s, got one of %s", device->info.name,
                    (*graph)->device->info.name);
  nib_stream *loose = unjoined(device);
  if (loose) {
    status = nib_fail(rt, NIB_STATE,
                      "stream:capture: stream %llu joined the capture and was not joined back: make stream %llu wait "
                      "for an event of it",
                      (unsigned long long)loose->id, (unsigned long long)stream->id);
    tell_abort(stream, device->capture->id, loose->id);
    nib_capture_close(device);
    return status;
  }
  struct nib_plan *plan = device->capture->plan, *old = *graph ? (*graph)->plan : NULL;
  uint64_t capture_id = device->capture->id;
  status = device->backend->graphs.end(stream, plan);
  close_capture(device);
  nib_reap_in_time(device);
  nib_graph *created = NULL;
  if (status == NIB_OK && !old && !(created = nib_allocate_zero(rt, sizeof *created)))
    status = nib_fail_memory(rt, "graph", sizeof *created);
  if (status == NIB_OK) status = device->backend->graphs.prepare(device, plan, old);
  if (status != NIB_OK) {
    nib_free(rt, created, sizeof *created);
    tell_abort(stream, capture_id, 0);
    nib_defer(&plan->deferred);
    return status;
  }
  if (old) {
    if (in_place) *in_place = same_topology(old, plan);
    (*graph)->plan = plan;
    nib_defer(&old->deferred);
  } else {
    *created = (nib_graph){ device, plan, ++rt->last_id };
    nib_handle_added(rt);
    *graph = created;
  }
  NIB_TELL(rt, NIB_OBSERVED_CAPTURE_END, .operation = old ? "graph:update" : "stream:capture", .device = device,
           .stream = stream->id, .capture = capture_id, .graph = (*graph)->id);
  return NIB_OK;
}

/* ---- Graphs ---------------------------------------------------------------------------------------------------- */

void nib_graph_release(nib_graph *graph) {
  if (!graph) return;
  nib_runtime *rt = graph->device->runtime;
  NIB_TELL(rt, NIB_OBSERVED_GRAPH_RELEASED, .operation = "graph:close", .device = graph->device, .graph = graph->id);
  nib_defer(&graph->plan->deferred);
  nib_free(rt, graph, sizeof *graph);
  nib_handle_removed(rt);
}

nib_device *nib_graph_device(const nib_graph *graph) { return graph->device; }
int32_t nib_graph_node_count(const nib_graph *graph) { return graph->plan->node_count; }

nib_status nib_graph_wait(nib_graph *graph, int64_t timeout_us) {
  nib_status status = nib_enter(graph->device->runtime);
  int64_t start = nib_now_us();
  for (int32_t i = 0; status == NIB_OK && i < graph->plan->pin_count; i++) {
    const struct nib_pin *pin = &graph->plan->pins[i];
    if (pin->storage->deferred.device != graph->device)
      status = nib_wait_for_cpu(pin->storage, !pin->write, nib_time_left(start, timeout_us));
  }
  return status;
}

nib_status nib_graph_replay(nib_graph *graph, nib_stream *stream) {
  nib_device *device = graph->device;
  nib_runtime *rt = device->runtime;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "graph:replay");
  if (status == NIB_OK) status = nib_check_stream(stream, "graph:replay");
  if (status != NIB_OK) return status;
  if (stream->device != device)
    return nib_fail(rt, NIB_INVALID, "graph:replay: stream: expected a stream of %s, got one of %s", device->info.name,
                    stream->device->info.name);
  struct nib_plan *plan = graph->plan;
  if (plan->node_count == 0) return NIB_OK; /* there is no work to queue or observe */
  status = nib_graph_wait(graph, NIB_UNLIMITED);
  if (status == NIB_OK) status = nib_uses_reserve(rt, &plan->deferred.uses);
  for (int32_t i = 0; status == NIB_OK && i < plan->pin_count; i++)
    status = nib_uses_reserve(rt, &plan->pins[i].storage->deferred.uses);
  if (status == NIB_OK) status = nib_queued_wait(device, "graph:replay", plan->operand_bytes);
  if (status == NIB_OK) status = device->backend->graphs.launch(stream, plan);
  if (status != NIB_OK) return status;
  stream->submitted++;
  nib_queued_add(stream, plan->operand_bytes);
  nib_uses_add(&plan->deferred.uses, stream, stream->submitted, true);
  for (int32_t i = 0; i < plan->pin_count; i++)
    nib_uses_add(&plan->pins[i].storage->deferred.uses, stream, stream->submitted, plan->pins[i].write);
  NIB_TELL(rt, NIB_OBSERVED_REPLAY, .operation = "graph:replay", .device = device, .stream = stream->id,
           .graph = graph->id);
  return NIB_OK;
}

const char *nib_graph_node_name(const nib_graph *graph, int32_t node) {
  return node >= 0 && node < graph->plan->node_count ? graph->plan->nodes[node].name : NULL;
}

int32_t nib_graph_node_deps(const nib_graph *graph, int32_t node, const int32_t **deps) {
  *deps = NULL;
  if (node < 0 || node >= graph->plan->node_count) return 0;
  *deps = graph->plan->nodes[node].deps;
  return graph->plan->nodes[node].dep_count;
}

struct text {
  char *data;
  size_t size, length;
};

__attribute__((format(printf, 2, 3))) static void append(struct text *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t room = text->data && text->length < text->size ? text->size - text->length : 0;
  text->length += (size_t)vsnprintf(room ? text->data + text->length : NULL, room, format, arguments);
  va_end(arguments);
}

nib_status nib_graph_dot(nib_graph *graph, char *data, size_t size, size_t *needed) {
  nib_runtime *rt = graph->device->runtime;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  struct text text = { data, size, 0 };
  int base = rt->config.index_base;
  append(&text, "digraph nibble {\n  node [shape=box, fontname=\"monospace\"];\n");
  for (int32_t i = 0; i < graph->plan->node_count; i++) {
    const struct nib_node *node = &graph->plan->nodes[i];
    append(&text, "  n%d [label=\"%d %s\"];\n", (int)i + base, (int)i + base, node->name);
    for (int32_t k = 0; k < node->dep_count; k++)
      append(&text, "  n%d -> n%d;\n", (int)node->deps[k] + base, (int)i + base);
  }
  append(&text, "}\n");
  *needed = text.length;
  return NIB_OK;
}

nib_status nib_graph_driver_dot(nib_graph *graph, char *text, size_t size, size_t *needed) {
  const struct nib_backend *backend = graph->device->backend;
  nib_status status = nib_enter(graph->device->runtime);
  if (status != NIB_OK) return status;
  return backend->graphs.dot ? backend->graphs.dot(graph->plan, text, size, needed)
                             : nib_graph_dot(graph, text, size, needed);
}
