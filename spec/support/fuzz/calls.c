/* Calls of the runtime in any order, against a model of what nibble.h says: the status of each call, and the value of
 * each tensor whose accesses are ordered. Order is known by vector clocks: each stream counts its work, and knows how
 * much of each other stream's comes before its next. What is not ordered has no value, and is not looked at. */
#include <pthread.h>

#include "fuzz.h"

#define STREAMS  6  /* handles; 0 is the default stream's */
#define IDS      24 /* streams that ever were */
#define TENSORS  8
#define STORAGES 64
#define EVENTS   8
#define GRAPHS   4
#define NODES    48
#define ELEMENTS 16

typedef struct clock {
  uint16_t done[IDS]; /* by stream: the work up to here comes before */
} vclock;

static void join(vclock *into, const vclock *from) {
  for (int i = 0; i < IDS; i++)
    if (from->done[i] > into->done[i]) into->done[i] = from->done[i];
}

struct storage {
  bool known;
  float value;
  uint16_t read[IDS], write[IDS]; /* the last of each stream */
  bool used;                      /* by work in a queue; the host's bytes need not wait for the stream before that */
  uint16_t queued[IDS];           /* the last writes without those */
};

enum trouble { NONE, MAYBE, SURE };

struct stream {
  nib_stream *handle;
  int id;
  vclock clock; /* what comes before its next work; done[id]: how much it was given */
  bool capturing;
  uint64_t before;      /* while capturing: nodes that come before its next */
  enum trouble trouble; /* of a function that failed */
  uint16_t failed_at;
};

struct event {
  nib_event *handle;
  int id; /* of its stream */
  vclock clock;
  uint64_t capture, before; /* of a capture: which, and the nodes before it */
};

struct node {
  bool copy;
  int destination, source;
  float value;
  uint64_t before;
};

struct graph {
  nib_graph *handle;
  int node_count;
  struct node nodes[NODES];
};

static struct world {
  nib_runtime *runtime;
  nib_device *device;
  struct stream streams[STREAMS];
  nib_tensor *tensors[TENSORS];
  int storage_of[TENSORS];
  struct storage storages[STORAGES];
  struct event events[EVENTS];
  struct graph graphs[GRAPHS];
  int ids, storage_count;
  vclock host; /* what has been waited for */
  /* The open capture */
  bool capturing;
  int origin;
  uint64_t captures, loose; /* loose: nodes before the next of streams that were released meanwhile */
  struct graph recorded;
  enum trouble orphan; /* of a released stream */
} w;

/* ---- Held streams ---------------------------------------------------------------------------------------------- */

static struct gate {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool open;
} gate = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, true };
static int held_id;
static uint16_t held_at;

static nib_status hold(void *user) {
  (void)user;
  pthread_mutex_lock(&gate.mutex);
  while (!gate.open) pthread_cond_wait(&gate.changed, &gate.mutex);
  pthread_mutex_unlock(&gate.mutex);
  return NIB_OK;
}

static void set_gate(bool open) {
  pthread_mutex_lock(&gate.mutex);
  gate.open = open;
  pthread_cond_broadcast(&gate.changed);
  pthread_mutex_unlock(&gate.mutex);
}

static bool is_held(const vclock *clock) { return !gate.open && clock->done[held_id] >= held_at; }

static nib_status fail(void *user) {
  (void)user;
  return NIB_FILE;
}

/* ---- What work does to the model ------------------------------------------------------------------------------- */

/* The stream's next work; what it knows to come before. */
static const vclock *issue(struct stream *s) {
  join(&s->clock, &w.host);
  s->clock.done[s->id]++;
  return &s->clock;
}

/* A write may come before a read that was queued earlier, in a stream that it does not wait for: then nobody knows what
 * was read, nor what was made of it. */
static void forget_everything(void) {
  for (int i = 0; i < w.storage_count; i++) w.storages[i].known = false;
}

static void access(struct storage *storage, const struct stream *s, const vclock *clock, bool write) {
  for (int i = 0; i < IDS; i++) {
    if (storage->write[i] > clock->done[i]) storage->known = false;
    if (write && storage->read[i] > clock->done[i]) forget_everything();
  }
  (write ? storage->write : storage->read)[s->id] = clock->done[s->id];
  storage->used = true;
  if (write) storage->queued[s->id] = clock->done[s->id];
}

static void run_nodes(struct stream *s, const struct node *nodes, int count) {
  bool race = false;
  for (int i = 0; i < count; i++)
    for (int k = 0; k < i; k++) {
      const struct node *a = &nodes[k], *b = &nodes[i];
      bool conflict = a->destination == b->destination || (a->copy && a->source == b->destination) ||
                      (b->copy && b->source == a->destination);
      race |= conflict && !(b->before >> k & 1);
    }
  if (count == 0) return;
  const vclock *clock = issue(s);
  for (int i = 0; i < count; i++)
    if (nodes[i].copy) access(&w.storages[nodes[i].source], s, clock, false);
  /* Written last: what else the graph reads of a storage that it writes is its own affair. */
  for (int i = 0; i < count; i++) {
    struct storage *to = &w.storages[nodes[i].destination];
    bool unordered = false;
    for (int id = 0; id < IDS; id++) unordered |= to->write[id] > clock->done[id];
    access(to, s, clock, true);
    const struct storage *from = nodes[i].copy ? &w.storages[nodes[i].source] : NULL;
    to->known = !race && !unordered && (!from || from->known);
    to->value = from ? from->value : nodes[i].value;
  }
}

/* A fill or a copy in a stream: done, recorded or refused. */
static void work(struct stream *s, bool copy, int destination, int source, float value, nib_status got) {
  CHECK(got == (w.capturing && !s->capturing ? NIB_CAPTURING : NIB_OK));
  if (got != NIB_OK || (copy && destination == source)) return;
  struct node node = { copy, destination, source, value, s->before };
  if (!s->capturing) {
    node.before = 0;
    run_nodes(s, &node, 1);
    return;
  }
  s->before |= (uint64_t)1 << w.recorded.node_count;
  w.recorded.nodes[w.recorded.node_count++] = node;
}

/* ---- Waiting --------------------------------------------------------------------------------------------------- */

/* Whether a function that failed has surely run and not been told of. */
static bool has_surely_failed(const vclock *done) {
  for (int i = 0; i < STREAMS; i++)
    if (w.streams[i].handle && w.streams[i].trouble == SURE && w.streams[i].failed_at <= done->done[w.streams[i].id])
      return true;
  return false;
}

static bool may_have_failed(void) {
  bool may = w.orphan != NONE;
  for (int i = 0; i < STREAMS; i++) may |= w.streams[i].handle && w.streams[i].trouble != NONE;
  return may;
}

/* Somebody's error was told; nobody knows whose. */
static void told_one(void) {
  for (int i = 0; i < STREAMS; i++)
    if (w.streams[i].trouble == SURE) w.streams[i].trouble = MAYBE;
}

static int64_t timeout(struct input *in) {
  int64_t us = PICK(in, NIB_UNLIMITED, -1, 0, 200);
  if (us == NIB_UNLIMITED) set_gate(true);
  return us;
}

static bool is_over(nib_status status, int64_t us, const vclock *before) {
  if (w.capturing) {
    CHECK(status == NIB_CAPTURING);
    return false;
  }
  CHECK(status == NIB_OK || status == NIB_STREAM || (status == NIB_TIMEOUT && us < NIB_UNLIMITED));
  CHECK(!is_held(before) || status == NIB_TIMEOUT);
  if (status == NIB_TIMEOUT) return false;
  join(&w.host, before);
  return true;
}

static void wait_for_stream(struct input *in, struct stream *s) {
  int64_t us = timeout(in);
  nib_status status = nib_stream_synchronize(s->handle, us);
  if (!is_over(status, us, &s->clock)) return;
  CHECK(status == NIB_STREAM || s->trouble != SURE);
  CHECK(status == NIB_OK || s->trouble != NONE || w.orphan != NONE);
  s->trouble = NONE;
}

static void wait_for_event(struct input *in, struct event *e) {
  int64_t us = timeout(in);
  nib_status status = nib_event_synchronize(e->handle, us);
  if (!w.capturing && e->capture) {
    CHECK(status == NIB_STATE);
    return;
  }
  if (!is_over(status, us, &e->clock)) return;
  struct stream *s = NULL;
  for (int i = 0; i < STREAMS; i++)
    if (w.streams[i].handle && w.streams[i].id == e->id) s = &w.streams[i];
  if (status == NIB_OK) CHECK(!s || s->trouble != SURE || s->failed_at > e->clock.done[e->id]);
  if (status == NIB_STREAM) CHECK(w.orphan != NONE || (s && s->trouble != NONE));
  if (status == NIB_STREAM) told_one(); /* a released stream's may be another's by now */
}

static void wait_for_device(struct input *in) {
  int64_t us = timeout(in);
  nib_status status = nib_device_synchronize(w.device, us);
  vclock all = w.host;
  for (int i = 0; i < STREAMS; i++) join(&all, &w.streams[i].clock);
  if (!is_over(status, us, &all)) return;
  CHECK(status == NIB_OK ? !has_surely_failed(&all) : may_have_failed());
  if (status == NIB_STREAM) {
    told_one();
    return;
  }
  w.orphan = NONE;
  for (int i = 0; i < STREAMS; i++) w.streams[i].trouble = NONE;
}

static void read_tensor(struct input *in, int tensor, bool values) {
  float got[ELEMENTS];
  int64_t us = timeout(in);
  struct storage *storage = &w.storages[w.storage_of[tensor]];
  vclock writes = { { 0 } };
  memcpy(writes.done, storage->queued, sizeof writes.done);
  nib_status status =
    values ? nib_tensor_read(w.tensors[tensor], got, sizeof got, us) : nib_tensor_wait(w.tensors[tensor], us);
  if (!is_over(status, us, &writes)) return;
  CHECK(status == NIB_OK ? !has_surely_failed(&w.host) : may_have_failed());
  if (status == NIB_STREAM) told_one();
  for (int i = 0; values && status == NIB_OK && storage->known && i < ELEMENTS; i++) CHECK(got[i] == storage->value);
}

/* A look that orders nothing, and tells nobody's error. */
static void peek(int tensor) {
  float got[ELEMENTS];
  int64_t elements = ELEMENTS, stride = 1;
  const struct storage *storage = &w.storages[w.storage_of[tensor]];
  set_gate(true);
  nib_status status = nib_peek(w.runtime, nib_tensor_storage(w.tensors[tensor]), NIB_FLOAT32,
                               nib_tensor_offset_bytes(w.tensors[tensor]), 1, &elements, &stride, got, sizeof got);
  CHECK(status == (w.capturing ? NIB_CAPTURING : NIB_OK));
  for (int i = 0; status == NIB_OK && storage->known && i < ELEMENTS; i++) CHECK(got[i] == storage->value);
}

/* What an observer is told makes sense by itself. */
static void observe(void *user, const nib_observation *o) {
  (void)user;
  CHECK(strcmp(nib_observation_name(o->kind), "?") != 0);
  CHECK(o->operation && o->device == w.device);
  bool work = o->kind == NIB_OBSERVED_WORK;
  CHECK(!work || (o->stream > 0 && (o->capture > 0) == (o->node >= 0)));
  CHECK(o->kind != NIB_OBSERVED_REPLAY || (o->stream > 0 && o->graph > 0));
  for (int32_t i = 0; i < o->access_count; i++)
    CHECK(!o->accesses[i].tensor || (o->accesses[i].parameter && nib_tensor_device(o->accesses[i].tensor) == w.device));
  for (int32_t i = 0; i < o->dep_count; i++)
    CHECK(o->deps[i] >= 0 && o->deps[i] < o->node && (i == 0 || o->deps[i] > o->deps[i - 1]));
}

/* ---- Making and releasing -------------------------------------------------------------------------------------- */

static int new_storage(void) {
  CHECK(w.storage_count < STORAGES);
  memset(&w.storages[w.storage_count], 0, sizeof *w.storages);
  return w.storage_count++;
}

static void make_tensor(struct input *in, int tensor) {
  if (w.storage_count == STORAGES) return;
  nib_tensor_release(w.tensors[tensor]);
  int other = (int)below(in, TENSORS);
  int64_t elements = ELEMENTS;
  if (other != tensor && w.tensors[other] && one_in(in, 3)) {
    CHECK(nib_tensor_alias(w.tensors[other], &w.tensors[tensor]) == NIB_OK);
    w.storage_of[tensor] = w.storage_of[other];
  } else {
    CHECK(nib_tensor_create(w.device, NIB_FLOAT32, 1, &elements, &w.tensors[tensor]) == NIB_OK);
    w.storage_of[tensor] = new_storage();
  }
}

static void release_stream(struct stream *s) {
  if (s == w.streams || (w.capturing && s == &w.streams[w.origin])) return;
  nib_stream_release(s->handle);
  if (s->capturing) w.loose |= s->before;
  if (s->trouble != NONE) w.orphan = MAYBE;
  *s = (struct stream){ 0 }; /* its work goes on, after which nobody asks any more */
}

static void make_stream(struct stream *s) {
  if (s == w.streams || w.ids == IDS || (w.capturing && s == &w.streams[w.origin])) return;
  if (s->handle) release_stream(s);
  CHECK(nib_stream_create(w.device, 0, &s->handle) == NIB_OK);
  *s = (struct stream){ .handle = s->handle, .id = w.ids++ };
}

static void record_event(struct stream *s, struct event *e) {
  nib_event_release(e->handle);
  CHECK(nib_event_record(s->handle, &e->handle) == NIB_OK);
  nib_event *handle = e->handle;
  *e = (struct event){ .handle = handle, .id = s->id };
  if (s->capturing) {
    e->capture = w.captures;
    e->before = s->before;
  } else {
    e->clock = *issue(s);
  }
}

static void wait_in_stream(struct stream *s, struct event *e) {
  nib_status status = nib_stream_wait(s->handle, e->handle);
  if (!e->capture) {
    CHECK(status == (w.capturing ? NIB_CAPTURING : NIB_OK));
    if (status == NIB_OK) join(&s->clock, &e->clock);
    return;
  }
  CHECK(status == (w.capturing && e->capture == w.captures ? NIB_OK : NIB_STATE));
  if (status != NIB_OK) return;
  s->before = (s->capturing ? s->before : 0) | e->before;
  s->capturing = true;
}

/* ---- Captures and graphs --------------------------------------------------------------------------------------- */

static void forget_capture(void) {
  w.capturing = false;
  for (int i = 0; i < STREAMS; i++) w.streams[i].capturing = false;
}

static void begin(struct input *in, int stream) {
  nib_status status = nib_capture_begin(w.streams[stream].handle, (nib_capture_mode)below(in, 3));
  CHECK(status == (w.capturing ? NIB_CAPTURING : NIB_OK));
  if (status != NIB_OK) return;
  w.capturing = w.streams[stream].capturing = true;
  w.streams[stream].before = w.loose = 0;
  w.origin = stream;
  w.captures++;
  w.recorded.node_count = 0;
}

static void end(int stream, struct graph *graph) {
  nib_graph *handle = graph->handle;
  bool in_place = true, had = handle != NULL;
  int count = had ? nib_graph_node_count(handle) : 0;
  nib_status status = nib_capture_end(w.streams[stream].handle, &handle, &in_place);
  if (!w.capturing || w.origin != stream) {
    CHECK(status == NIB_STATE && handle == graph->handle && !in_place);
    return;
  }
  uint64_t joined = w.loose;
  for (int i = 0; i < STREAMS; i++)
    if (w.streams[i].capturing) joined |= w.streams[i].before;
  bool loose = joined & ~w.streams[stream].before;
  forget_capture();
  CHECK(status == (loose ? NIB_STATE : NIB_OK));
  if (status != NIB_OK) {
    CHECK(handle == graph->handle && !in_place);
    return;
  }
  CHECK(handle && nib_graph_node_count(handle) == w.recorded.node_count && (!had || handle == graph->handle));
  CHECK(!in_place || (had && count == w.recorded.node_count));
  *graph = w.recorded;
  graph->handle = handle;
}

static void look_at(const struct graph *graph) {
  char text[64];
  size_t needed = 0;
  const int32_t *deps;
  CHECK(nib_graph_dot(graph->handle, text, sizeof text, &needed) == NIB_OK && needed > 10 &&
        strlen(text) < sizeof text);
  for (int i = 0; i < graph->node_count; i++) {
    CHECK(strcmp(nib_graph_node_name(graph->handle, i), graph->nodes[i].copy ? "copy" : "fill") == 0);
    uint64_t before = 0;
    int32_t count = nib_graph_node_deps(graph->handle, i, &deps);
    for (int32_t k = 0; k < count; k++) before |= (uint64_t)1 << deps[k] | graph->nodes[deps[k]].before;
    CHECK(before == graph->nodes[i].before);
  }
}

static void replay(struct graph *graph, struct stream *s) {
  nib_status status = nib_graph_replay(graph->handle, s->handle);
  CHECK(status == (w.capturing ? NIB_CAPTURING : NIB_OK));
  if (status == NIB_OK) run_nodes(s, graph->nodes, graph->node_count);
}

/* ---- One input ------------------------------------------------------------------------------------------------- */

static void call(struct input *in, struct stream *s) {
  uint32_t what = below(in, 3);
  if (what == 1 && !gate.open) what = 0; /* one gate at a time */
  if (what == 1 && !w.capturing) set_gate(false);
  nib_status status = nib_stream_call(s->handle, what == 2 ? fail : hold, NULL);
  CHECK(status == (w.capturing ? NIB_CAPTURING : NIB_OK));
  if (status != NIB_OK) return;
  issue(s);
  if (what == 1) {
    held_id = s->id;
    held_at = s->clock.done[s->id];
  } else if (what == 2) {
    if (s->trouble != SURE) s->failed_at = s->clock.done[s->id];
    s->trouble = SURE;
  }
}

static void write_tensor(struct stream *s, int tensor, float value) {
  float values[ELEMENTS];
  for (int i = 0; i < ELEMENTS; i++) values[i] = value;
  nib_status status = nib_tensor_write(s->handle, w.tensors[tensor], values, sizeof values);
  CHECK(status == (w.capturing ? NIB_CAPTURING : NIB_OK));
  if (status != NIB_OK) return;
  struct storage *storage = &w.storages[w.storage_of[tensor]];
  struct storage before = *storage;
  run_nodes(s, &(struct node){ .destination = w.storage_of[tensor], .value = value }, 1);
  if (before.used) return;
  storage->used = false;
  memcpy(storage->queued, before.queued, sizeof before.queued);
}

static void step(struct input *in) {
  uint32_t operation = next_byte(in);
  struct stream *s = &w.streams[below(in, STREAMS)];
  int tensor = (int)below(in, TENSORS), other = (int)below(in, TENSORS);
  struct event *e = &w.events[below(in, EVENTS)];
  struct graph *graph = &w.graphs[below(in, GRAPHS)];
  if (!s->handle) s = w.streams;
  bool room = w.recorded.node_count < NODES;
  switch (operation % 24) {
  case 0: make_tensor(in, tensor); break;
  case 1:
    nib_tensor_release(w.tensors[tensor]);
    w.tensors[tensor] = NULL;
    break;
  case 2: make_stream(&w.streams[below(in, STREAMS)]); break;
  case 3: release_stream(s); break;
  case 4:
  case 5:
  case 6:
    if (w.tensors[tensor] && room)
      work(s, false, w.storage_of[tensor], 0, (float)operation,
           nib_tensor_fill(s->handle, w.tensors[tensor], NIB_INTEGER(operation)));
    break;
  case 7:
  case 8:
  case 9:
    if (w.tensors[tensor] && w.tensors[other] && room)
      work(s, true, w.storage_of[tensor], w.storage_of[other], 0,
           nib_tensor_copy(s->handle, w.tensors[tensor], w.tensors[other]));
    break;
  case 10:
    if (w.tensors[tensor]) write_tensor(s, tensor, (float)operation);
    break;
  case 11:
    if (w.tensors[tensor]) read_tensor(in, tensor, true);
    break;
  case 12:
    if (w.tensors[tensor]) read_tensor(in, tensor, false);
    break;
  case 13: record_event(s, e); break;
  case 14:
  case 15:
    if (e->handle) wait_in_stream(s, e);
    break;
  case 16:
    if (e->handle) wait_for_event(in, e);
    break;
  case 17: wait_for_stream(in, s); break;
  case 18:
    if (one_in(in, 2)) wait_for_device(in);
    else CHECK(nib_tick(w.runtime, 10) == NIB_OK);
    break;
  case 19: begin(in, (int)(s - w.streams)); break;
  case 20: end((int)(s - w.streams), graph); break;
  case 21:
    if (graph->handle) replay(graph, s);
    break;
  case 22:
    switch (below(in, 7)) {
    case 0:
      nib_event_release(e->handle);
      *e = (struct event){ 0 };
      break;
    case 1:
      nib_graph_release(graph->handle);
      graph->handle = NULL;
      break;
    case 2:
      nib_capture_abort(s->handle);
      if (w.capturing && s == &w.streams[w.origin]) forget_capture();
      break;
    case 3:
      if (graph->handle) look_at(graph);
      break;
    case 4:
      if (w.tensors[tensor]) peek(tensor);
      break;
    case 5: nib_runtime_observe(w.runtime, one_in(in, 3) ? NULL : observe, NULL); break;
    default: set_gate(true);
    }
    break;
  default: call(in, s);
  }
}

static void release_all(void) {
  for (int i = 0; i < TENSORS; i++) nib_tensor_release(w.tensors[i]);
  for (int i = 1; i < STREAMS; i++) nib_stream_release(w.streams[i].handle);
  for (int i = 0; i < EVENTS; i++) nib_event_release(w.events[i].handle);
  for (int i = 0; i < GRAPHS; i++) nib_graph_release(w.graphs[i].handle);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct input in = { data, data + size };
  memset(&w, 0, sizeof w);
  set_gate(true);
  nib_config config = { .threads = 1 };
  CHECK(nib_runtime_create(&config, &w.runtime) == NIB_OK);
  w.device = nib_device_at(w.runtime, 0);
  w.streams[0].handle = nib_device_default_stream(w.device);
  w.ids = 1;
  uint8_t ending = next_byte(&in);
  for (int steps = 0; in.at < in.end && steps < 200; steps++) step(&in);
  set_gate(true);
  if (ending % 3 == 0) {
    nib_runtime_close(w.runtime);
    for (int i = 0; i < TENSORS; i++)
      if (w.tensors[i]) CHECK(nib_tensor_fill(w.streams[0].handle, w.tensors[i], NIB_INTEGER(1)) == NIB_CLOSED);
    release_all();
    return 0;
  }
  if (w.capturing) nib_capture_abort(w.streams[w.origin].handle);
  if (ending % 3 == 1) { /* every value that is known */
    forget_capture();
    for (int i = 0; i < TENSORS; i++)
      for (int again = 0; w.tensors[i] && again < 2; again++) read_tensor(&(struct input){ data, data }, i, true);
  }
  release_all();
  for (int i = 0; i < IDS + 1; i++) /* each tells one error at most */
    if (nib_device_synchronize(w.device, NIB_UNLIMITED) == NIB_OK) break;
  CHECK(nib_device_synchronize(w.device, NIB_UNLIMITED) == NIB_OK);
  CHECK(nib_tick(w.runtime, NIB_UNLIMITED) == NIB_OK && nib_device_memory(w.device).reserved_bytes == 0);
  nib_runtime_close(w.runtime);
  return 0;
}
