/* A host's own job system, in whatever order, on whatever threads and in whatever floating-point environment, gives the
 * same bytes as the runtime's pool of any size. */
#include <fenv.h>
#include <pthread.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "host.h"

enum { PAGES = 40, HEADS = 3, PAGE = 16, DIM = 64, ROWS = PAGES * PAGE, COUNT = ROWS * HEADS * DIM };

static size_t largest;

/* Rounds upwards and flushes subnormals, as audio and game code likes it. */
static void spoil(void) {
  fesetround(FE_UPWARD);
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

struct job {
  void (*body)(void *context, size_t index);
  void *context;
  size_t first, step, count;
};

static void *run_job(void *argument) {
  struct job *job = argument;
  spoil();
  for (size_t i = job->first; i < job->count; i += job->step) job->body(job->context, job->count - 1 - i);
  return NULL;
}

static void host_parallel_for(void *user, size_t count, void (*body)(void *context, size_t index), void *context) {
  CHECK(user == &largest);
  if (count > largest) largest = count;
  pthread_t threads[3];
  struct job jobs[3];
  for (size_t i = 0; i < 3; i++) {
    jobs[i] = (struct job){ body, context, i, 3, count };
    CHECK(pthread_create(&threads[i], NULL, run_job, &jobs[i]) == 0);
  }
  for (size_t i = 0; i < 3; i++) pthread_join(threads[i], NULL);
}

static void serial_for(void *user, size_t count, void (*body)(void *context, size_t index), void *context) {
  (void)user;
  spoil();
  for (size_t i = count; i-- > 0;) body(context, i);
}

/* Everything that rounds, on numbers that make it matter; returns the bytes of all results. */
static size_t results(const nib_config *config, int spoiled, unsigned char *bytes) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(config, &runtime));
  nib_device *cpu = cpu_of(runtime);
  nib_stream *stream = nib_device_default_stream(cpu);
  if (spoiled) spoil();
  nib_tensor *source = make(cpu, NIB_FLOAT32, COUNT), *small = make(cpu, NIB_FLOAT32, COUNT);
  nib_tensor *half = make(cpu, NIB_FLOAT16, COUNT), *brain = make(cpu, NIB_BFLOAT16, COUNT);
  nib_tensor *eight = make(cpu, NIB_FLOAT8_E4M3FN, COUNT), *steps = make(cpu, NIB_FLOAT32, COUNT);
  nib_tensor *integers = make(cpu, NIB_INT32, COUNT), *order = make(cpu, NIB_INT64, COUNT);
  nib_tensor *value = make(cpu, NIB_BFLOAT16, 1), *cache = NULL, *table = NULL;
  OK(runtime, nib_tensor_random_normal(stream, source, 42));
  OK(runtime, nib_tensor_random_integer(stream, integers, 43, -1000000007, 1000000007));
  OK(runtime, nib_tensor_random_permutation(stream, order, 44));
  OK(runtime, nib_tensor_arange(stream, steps, NIB_REAL(0.1), NIB_REAL(1.1e-39)));
  OK(runtime, nib_tensor_copy(stream, small, integers));
  OK(runtime, nib_tensor_copy(stream, half, source));
  OK(runtime, nib_tensor_copy(stream, brain, source));
  OK(runtime, nib_tensor_copy(stream, eight, source));
  OK(runtime, nib_tensor_fill(stream, value, NIB_REAL(1.0039063)));
  OK(runtime, nib_rope_table(stream, 700, 1e4, NIB_BFLOAT16, &table));
  OK(runtime, nib_tensor_view(brain, 4, (int64_t[]){ PAGES, HEADS, PAGE, DIM }, &cache));
  nib_quantized_cache quantized = { 0 };
  nib_quantize_cache_desc desc = { .k_cache = cache, .v_cache = cache, .kv_layout = NIB_HND };
  OK(runtime, nib_quantize_cache(stream, &desc, &quantized));
  nib_tensor *list[] = {
    source, small, half,        brain,       eight,          steps,          integers,          order,
    value,  table, quantized.k, quantized.v, quantized.k_sf, quantized.v_sf, quantized.k_scale, quantized.v_scale,
    cache
  };
  size_t total = 0;
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
    size_t size = (size_t)nib_tensor_numel(list[i]) * nib_dtype_bytes(nib_tensor_dtype(list[i]));
    OK(runtime, nib_tensor_read(list[i], bytes + total, size, NIB_UNLIMITED));
    total += size;
    nib_tensor_release(list[i]);
  }
  if (spoiled) {
    /* The library has left the caller's environment as it was. */
    CHECK(fegetround() == FE_UPWARD);
    fesetenv(FE_DFL_ENV);
  }
  nib_runtime_close(runtime);
  return total;
}

int main(void) {
  unsigned char *expected = malloc(COUNT * 64), *got = malloc(COUNT * 64);
  CHECK(expected && got);
  size_t total = results(&(nib_config){ .threads = 1 }, 0, expected);
  CHECK(total < COUNT * 64 && total > COUNT * 20);
  const struct {
    nib_config config;
    int spoiled;
  } cases[] = {
    { { .threads = 2 }, 0 },
    { { .threads = 7 }, 0 },
    { { .parallel_for = host_parallel_for, .user = &largest, .threads = 4 }, 0 },
    { { .parallel_for = serial_for, .threads = 4 }, 0 },
    { { .threads = 2 }, 1 },
    { { .parallel_for = host_parallel_for, .user = &largest, .threads = 4 }, 1 },
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    memset(got, 0, total);
    CHECK(results(&cases[i].config, cases[i].spoiled, got) == total);
    for (size_t at = 0; at < total; at++) {
      if (expected[at] == got[at]) continue;
      fprintf(stderr, "case %zu: byte %zu of %zu is %02x instead of %02x\n", i, at, total, got[at], expected[at]);
      return 1;
    }
  }
  CHECK(largest > 1);
  free(expected);
  free(got);
  return 0;
}
