/* Every function of nibble.h (entries.h) and nibble_lua.h (lua_entries.h), outside of captures and inside one, with
 * what it needs failing at the n-th time for every n: an error or a detour, never a crash; nothing is lost and nothing
 * is left behind; the next call works. And every function on a runtime that is closed, or is the parent's: CLOSED or
 * FORKED, without a call of the driver. every_entry allocator         the host's allocator fails, once or from there on
 *   every_entry driver RESULT     a call of the stand-in driver fails with that result
 *   every_entry ended             on runtimes that are closed, and in children of fork
 *   every_entry list              the names of the functions
 * With a third word it prints how much was made to fail. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lua_entries.h"

/* ---- What fails ------------------------------------------------------------------------------------------------ */

static struct {
  pthread_t thread;
  long live, bytes;
  bool foreign_thread;
  bool armed, once;
  long left, failed; /* calls until one fails; calls that failed */
} heap;

static bool must_fail(void) {
  if (!heap.armed || --heap.left > 0 || (heap.once && heap.left < 0)) return false;
  heap.failed++;
  return true;
}

/* Every block knows its size, and moves when it is resized. */
static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  CHECK(user == &heap);
  if (!pthread_equal(pthread_self(), heap.thread)) heap.foreign_thread = true;
  size_t *block = pointer ? (size_t *)pointer - 2 : NULL, *fresh = NULL;
  CHECK(block ? block[0] == old_size : old_size == 0);
  if (new_size > 0) {
    if (must_fail() || !(fresh = malloc(new_size + 16))) return NULL;
    memset(fresh, 0xcd, new_size + 16);
    fresh[0] = new_size;
    if (block) memcpy(fresh + 2, pointer, old_size < new_size ? old_size : new_size);
    heap.live++;
    heap.bytes += (long)new_size;
  }
  if (block) {
    heap.live--;
    heap.bytes -= (long)old_size;
    memset(block, 0xdd, old_size + 16);
    free(block);
  }
  return fresh ? fresh + 2 : NULL;
}

static struct {
  void (*fail)(const char *name, int64_t count, int result);
  int64_t (*fired)(void);
  int64_t (*misuses)(void);
  const char *(*misuse)(void);
  const char *(*failed)(void);
  int64_t (*calls)(void);
  int64_t (*live)(const char *kind);
  int result; /* 0: the allocator fails instead */
  int64_t before;
} driver;

static bool find_driver(void) {
  void *library = find_standin();
  if (!library) return false;
  *(void **)&driver.fail = dlsym(library, "nib_standin_fail");
  *(void **)&driver.fired = dlsym(library, "nib_standin_fired");
  *(void **)&driver.misuses = dlsym(library, "nib_standin_misuses");
  *(void **)&driver.misuse = dlsym(library, "nib_standin_misuse");
  *(void **)&driver.failed = dlsym(library, "nib_standin_failed");
  *(void **)&driver.calls = dlsym(library, "nib_standin_calls");
  *(void **)&driver.live = dlsym(library, "nib_standin_live");
  CHECK(driver.fail && driver.fired && driver.misuses && driver.misuse && driver.failed && driver.calls && driver.live);
  return true;
}

static void arm(long n, bool once) {
  heap.left = n, heap.once = once, heap.failed = 0;
  heap.armed = !driver.result;
  if (driver.result) {
    driver.before = driver.fired();
    driver.fail("*", n, driver.result); /* alone: a driver that refuses for ever cannot even be left */
  }
}

static void disarm(void) {
  heap.armed = false;
  if (driver.result) driver.fail(NULL, 0, 0);
}

static long fired(void) { return driver.result ? (long)(driver.fired() - driver.before) : heap.failed; }

/* ---- What is left ---------------------------------------------------------------------------------------------- */

/* Streams and events are kept for reuse, functions as long as their module; the rest comes and goes with what it is
 * for. */
static const char *const kinds[] = { "contexts",  "modules",     "pools",  "graphs", "execs",
                                     "captures",  "allocations", "host",   "pushed", "modes",
                                     "externals", "chunks",      "ranges", "mapped", "semaphores" };
#define KIND_COUNT (sizeof kinds / sizeof *kinds)

struct left {
  long live, bytes;
  uint64_t used, reserved;
  int64_t driver[KIND_COUNT];
};

static struct left what_is_left(struct world *w) {
  for (int32_t i = 0; i < nib_device_count(w->runtime); i++) /* twice: the first may tell what failed before */
    for (int k = 0; k < 2; k++) nib_device_synchronize(nib_device_at(w->runtime, i), NIB_UNLIMITED);
  CHECK(nib_tick(w->runtime, NIB_UNLIMITED) == NIB_OK);
  nib_memory_info memory = nib_device_memory(w->device);
  struct left left = { heap.live, heap.bytes, memory.used_bytes, memory.reserved_bytes, { 0 } };
  for (size_t i = 0; driver.result && i < KIND_COUNT; i++) left.driver[i] = driver.live(kinds[i]);
  return left;
}

/* Less than before is well: what is kept for later may go at any time. */
static bool is_no_more(const struct left *left, const struct left *base) {
  bool well = left->live <= base->live && left->bytes <= base->bytes && left->used == base->used &&
              left->reserved == base->reserved;
  for (size_t i = 0; i < KIND_COUNT; i++) well = well && left->driver[i] <= base->driver[i];
  return well;
}

/* ---- The world ------------------------------------------------------------------------------------------------- */

static nib_tensor *tensor(struct world *w, nib_dtype dtype, int32_t ndim, const int64_t *shape) {
  nib_tensor *made = NULL;
  OK(w->runtime, nib_tensor_create(w->device, dtype, ndim, shape, &made));
  OK(w->runtime, nib_tensor_fill(w->stream, made, NIB_INTEGER(0)));
  return made;
}

static void open_world(struct world *w, const char *path) {
  *w = (struct world){ .config = { .allocate = allocate, .user = &heap, .threads = 2 }, .path = path };
  OK(NULL, nib_runtime_create(&w->config, &w->runtime));
  w->device = device_of(w->runtime);
  OK(w->runtime, nib_stream_create(w->device, 0, &w->stream));
  OK(w->runtime, nib_stream_create(w->device, 0, &w->other));
  w->floats = tensor(w, NIB_FLOAT32, SHAPE(4, 6));
  w->integers = tensor(w, NIB_INT32, SHAPE(6, 4));
  w->one = tensor(w, NIB_FLOAT32, SHAPE(1));
  w->square = tensor(w, NIB_FLOAT16, SHAPE(4, 4));
  OK(w->runtime, nib_tensor_permute(w->floats, SHAPE(1, 0), &w->columns));
  OK(w->runtime, nib_tensor_permute(w->square, SHAPE(1, 0), &w->turned));
  w->key = tensor(w, NIB_BFLOAT16, SHAPE(3, 2, 16));
  w->slots = tensor(w, NIB_INT32, SHAPE(3));
  w->data = tensor(w, NIB_UINT8, SHAPE(2, 2, 4, 2, 8));
  w->scales = tensor(w, NIB_FLOAT8_E4M3FN, SHAPE(2, 2, 4, 2, 1));
  w->tables = tensor(w, NIB_INT32, SHAPE(1, 1));
  w->lengths = tensor(w, NIB_INT32, SHAPE(1));
  w->out_k = tensor(w, NIB_BFLOAT16, SHAPE(1, 4, 2, 16));
  w->out_v = tensor(w, NIB_BFLOAT16, SHAPE(1, 4, 2, 16));
  w->pages = tensor(w, NIB_UINT8, SHAPE(2, 1, 4, 32));
  w->page_scales = tensor(w, NIB_UINT8, SHAPE(2, 1, 4, 4));
  w->halves = tensor(w, NIB_BFLOAT16, SHAPE(2, 1, 4, 64));
  w->q = tensor(w, NIB_BFLOAT16, SHAPE(2, 1, 512));
  w->kv = tensor(w, NIB_BFLOAT16, SHAPE(2, 512));
  w->records = tensor(w, NIB_UINT8, SHAPE(1, 4, 384));
  w->positions = tensor(w, NIB_INT64, SHAPE(2));
  w->table = tensor(w, NIB_FLOAT32, SHAPE(4, 64));
  OK(w->runtime, nib_tensor_fill(w->stream, w->one, NIB_INTEGER(1)));
  nib_event *spare[64]; /* a GPU's events are kept for reuse: more than anything here needs at once */
  for (int i = 0; i < 64; i++) OK(w->runtime, nib_event_record(w->stream, &spare[i]));
  OK(w->runtime, nib_stream_synchronize(w->stream, NIB_UNLIMITED));
  for (int i = 0; i < 64; i++) nib_event_release(spare[i]);
  OK(w->runtime, nib_event_record(w->stream, &w->event));
  OK(w->runtime, nib_event_record(w->stream, &w->later));
  OK(w->runtime, nib_event_synchronize(w->later, NIB_UNLIMITED));
  OK(w->runtime, nib_capture_begin(w->stream, NIB_CAPTURE_RELAXED));
  OK(w->runtime, nib_tensor_fill(w->stream, w->floats, NIB_REAL(1)));
  OK(w->runtime, nib_tensor_fill(w->stream, w->integers, NIB_INTEGER(1)));
  OK(w->runtime, nib_capture_end(w->stream, &w->graph, NULL));
  if (nib_module_create(w->device, image, sizeof image, &w->module) == NIB_OK)
    OK(w->runtime, nib_module_kernel(w->module, kernel_name, &w->kernel));
  CHECK(w->kernel || !driver.result);
  OK(w->runtime, nib_npy_save(w->columns, path));
  FILE *file = fopen(path, "rb");
  CHECK(file && (w->file_bytes = fread(w->file, 1, sizeof w->file, file)) > 100);
  fclose(file);
}

static void release_world(struct world *w) {
  nib_tensor *tensors[] = { w->floats, w->columns, w->integers,  w->one,         w->square, w->turned,
                            w->key,    w->slots,   w->data,      w->scales,      w->tables, w->lengths,
                            w->out_k,  w->out_v,   w->pages,     w->page_scales, w->halves, w->q,
                            w->kv,     w->records, w->positions, w->table };
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) nib_tensor_release(tensors[i]);
  nib_user_kernel_release(w->kernel);
  nib_module_release(w->module);
  nib_graph_release(w->graph);
  nib_event_release(w->event);
  nib_event_release(w->later);
  nib_stream_release(w->stream);
  nib_stream_release(w->other);
}

static void close_world(struct world *w, bool closed) {
  release_world(w);
  if (!closed) nib_runtime_close(w->runtime); /* a closed one is gone with the last of its objects */
  CHECK(heap.live == 0 && heap.bytes == 0 && !heap.foreign_thread);
}

static void release(struct results *made) {
  for (int i = 0; i < 6; i++) nib_tensor_release(made->tensors[i]);
  nib_stream_release(made->stream);
  nib_event_release(made->event);
  nib_graph_release(made->graph);
  nib_user_kernel_release(made->kernel);
  nib_module_release(made->module);
  nib_semaphore_release(made->semaphore);
  nib_runtime_close(made->runtime);
  nib_sandbox_close(made->sandbox);
  if (made->L) lua_close(made->L);
  *made = (struct results){ 0 };
}

/* ---- One call -------------------------------------------------------------------------------------------------- */

/* Makes the call with the n-th step failing; n 0: none. Returns how many did. */
static long call(struct world *w, const struct entry *entry, bool capturing, long n, bool once, nib_status *status) {
  if (entry->flags & ALONE) OK(NULL, nib_runtime_create(&w->config, &w->fresh));
  if (entry->flags & SANDBOX) open_sandbox(w);
  if (capturing) {
    OK(w->runtime, nib_capture_begin(w->stream, NIB_CAPTURE_THREAD_LOCAL));
    OK(w->runtime, nib_tensor_fill(w->stream, w->floats, NIB_REAL(1)));
    OK(w->runtime, nib_event_record(w->stream, &w->inside));
  }
  if (n > 0) arm(n, once);
  *status = entry->call(w);
  long failed = n > 0 ? fired() : 0;
  bool told = *status == NIB_OK || *status == NIB_UNAVAILABLE || *nib_error(w->fresh ? w->fresh : w->runtime) ||
              (entry->flags & TELLS);
  release(&w->made); /* under the same bad star */
  if (n > 0) disarm();
  CHECK(told);
  if (capturing) {
    nib_capture_abort(w->stream);
    nib_event_release(w->inside);
    w->inside = NULL;
  }
  nib_runtime_close(w->fresh);
  w->fresh = NULL;
  if (entry->flags & SANDBOX) close_sandbox(w);
  return failed;
}

static long calls, failures, errors;

static void fail_at_every_step(struct world *w, const struct entry *entry, bool capturing, bool once) {
  nib_status status;
  const char *at = entry->names;
  for (int i = 0; i < 2; i++) { /* what it makes once and keeps */
    call(w, entry, capturing, 0, false, &status);
    if (status == NIB_UNAVAILABLE || status == NIB_CAPTURING) return;
    if (status != NIB_OK) fprintf(stderr, "%s: %s\n", at, nib_error(w->runtime));
    CHECK(status == NIB_OK);
  }
  struct left base = what_is_left(w);
  for (long n = 1, failed = 1; failed > 0; n++) {
    failed = call(w, entry, capturing, n, once, &status);
    calls++;
    failures += failed > 0;
    errors += status != NIB_OK;
    struct left left = what_is_left(w);
    bool well = is_no_more(&left, &base);
    if (failed == 0) well = well && status == NIB_OK;
    if (failed > 0 && !driver.result) {
      well = well && (status == NIB_MEMORY || status == NIB_OK);
      if (!once && !(entry->flags & MAKES_DO)) well = well && status == NIB_MEMORY;
    }
    if (driver.result) well = well && driver.misuses() == 0;
    if (well && failed > 0) {
      nib_status again;
      call(w, entry, capturing, 0, false, &again);
      left = what_is_left(w);
      well = again == NIB_OK && is_no_more(&left, &base);
    }
    if (!well) {
      fprintf(stderr, "%s%s, step %ld%s%s: %s: %s\n", at, capturing ? " in a capture" : "", n, once ? " alone" : "",
              driver.result ? driver.failed() : "", nib_status_name(status), nib_error(w->runtime));
      fprintf(stderr, "blocks %ld, was %ld; bytes %ld, was %ld; used %llu, was %llu; reserved %llu, was %llu\n",
              left.live, base.live, left.bytes, base.bytes, (unsigned long long)left.used,
              (unsigned long long)base.used, (unsigned long long)left.reserved, (unsigned long long)base.reserved);
      for (size_t i = 0; i < KIND_COUNT; i++)
        if (left.driver[i] != base.driver[i])
          fprintf(stderr, "%s %lld, was %lld\n", kinds[i], (long long)left.driver[i], (long long)base.driver[i]);
      if (driver.result && driver.misuses()) fprintf(stderr, "misuse: %s\n", driver.misuse());
      exit(1);
    }
  }
}

/* ---- Runtimes that have ended ---------------------------------------------------------------------------------- */

/* What calls need that other calls would make in a runtime that is in use. */
static void prepare_end(struct world *w, const struct entry *entry) {
  char path[300];
  const char *name = "x";
  snprintf(path, sizeof path, "%s.safetensors", w->path);
  OK(w->runtime, nib_safetensors_save(w->runtime, path, 1, &name, &w->floats));
  OK(w->runtime, nib_safetensors_open(w->runtime, path, &w->archive));
  remove(path);
  int fd = w->module ? memory_file() : -1;
  if (fd >= 0 && nib_semaphore_import(w->device, fd, &w->semaphore) != NIB_OK) close(fd);
  OK(NULL, nib_runtime_create(&w->config, &w->fresh));
  w->kept = make(nib_device_at(w->fresh, 0), NIB_UINT8, 1);
  w->state = luaL_newstate();
  luaL_openlibs(w->state);
  OK(w->fresh, nib_lua_open(w->state, w->fresh));
  if (entry->flags & SANDBOX) open_sandbox(w);
  if (entry->flags & (ALONE | SANDBOX)) return;
  OK(w->runtime, nib_capture_begin(w->stream, NIB_CAPTURE_THREAD_LOCAL));
  OK(w->runtime, nib_tensor_fill(w->stream, w->floats, NIB_REAL(1)));
  OK(w->runtime, nib_event_record(w->stream, &w->inside));
}

static void release_prepared(struct world *w) {
  nib_safetensors_close(w->archive);
  nib_semaphore_release(w->semaphore);
  nib_event_release(w->inside);
  if (w->sandbox) {
    nib_tensor_release(w->shown);
    nib_sandbox_close(w->sandbox);
  }
  lua_close(w->state);
  nib_tensor_release(w->kept);
}

static void call_in_ended(struct world *w, const struct entry *entry) {
  int64_t before = driver.calls ? driver.calls() : 0;
  nib_status status = entry->call(w);
  release(&w->made);
  int64_t driven = driver.calls && !(entry->flags & OWN) ? driver.calls() - before : 0;
  bool well = status == w->ended || (status == NIB_OK && entry->flags & (ANSWERS | OWN)) ||
              (status == NIB_UNAVAILABLE && !w->module);
  if (well && driven == 0) return;
  fprintf(stderr, "%s: expected %s, got %s and %lld calls of the driver: %s\n", entry->names, nib_status_name(w->ended),
          nib_status_name(status), (long long)driven, nib_error(w->runtime));
  exit(1);
}

static void call_ended(const struct entry *entry, const char *path, nib_status ended) {
  struct world world, *w = &world;
  open_world(w, path);
  prepare_end(w, entry);
  if (ended == NIB_CLOSED) {
    if (w->sandbox) nib_runtime_close(nib_sandbox_runtime(w->sandbox));
    nib_runtime_close(w->runtime);
    nib_runtime_close(w->fresh);
    w->ended = NIB_CLOSED;
    call_in_ended(w, entry);
  } else {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(60);
      heap.thread = pthread_self();
      w->ended = NIB_FORKED;
      call_in_ended(w, entry);
      int64_t before = driver.calls ? driver.calls() : 0;
      release_prepared(w);
      release_world(w);
      nib_runtime_close(w->runtime);
      CHECK(!driver.calls || driver.calls() == before);
      _exit(0); /* a sanitizer would look for leaks of the parent in here */
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  release_prepared(w);
  if (ended == NIB_FORKED) {
    nib_capture_abort(w->stream);
    nib_runtime_close(w->fresh);
  }
  close_world(w, ended == NIB_CLOSED);
}

int main(int argc, char **argv) {
  CHECK(argc > 1);
  if (strcmp(argv[1], "list") == 0) {
    for (size_t i = 0; i < ENTRY_COUNT; i++) puts(entries[i].names);
    for (size_t i = 0; i < LUA_ENTRY_COUNT; i++) puts(lua_entries[i].names);
    return 0;
  }
  heap.thread = pthread_self();
  if (strcmp(argv[1], "driver") == 0) {
    CHECK(argc > 2 && (driver.result = atoi(argv[2])) > 0);
    CHECK(find_driver());
  }
  bool ended = strcmp(argv[1], "ended") == 0;
  if (ended) find_driver();
  char path[] = "/tmp/every_entry_XXXXXX";
  int file = mkstemp(path);
  CHECK(file >= 0);
  close(file);
  for (size_t i = 0; i < ENTRY_COUNT + LUA_ENTRY_COUNT; i++) {
    struct world world;
    const struct entry *entry = i < ENTRY_COUNT ? &entries[i] : &lua_entries[i - ENTRY_COUNT];
    if (ended) {
      call_ended(entry, path, NIB_CLOSED);
#ifndef __SANITIZE_ADDRESS__ /* whose allocator's locks stay in a child as the parent's threads had them */
      call_ended(entry, path, NIB_FORKED);
#endif
      continue;
    }
    open_world(&world, path);
    for (int capturing = 0; capturing < (entry->flags & (ALONE | SANDBOX) ? 1 : 2); capturing++)
      for (int once = driver.result ? 1 : 0; once < 2; once++) fail_at_every_step(&world, entry, capturing, once);
    close_world(&world, false);
  }
  remove(path);
  if (ended) return 0;
  CHECK(failures > 100 && errors > 50);
  if (argc > 3 || (argc > 2 && !driver.result))
    printf("%ld calls, %ld with a failure, %ld errors\n", calls, failures, errors);
  return 0;
}
