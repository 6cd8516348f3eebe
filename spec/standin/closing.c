/* A runtime that a host closes on the stand-in driver while it still holds objects, and while things have gone wrong:
 * nothing may be left behind in the host's context, and nothing may be used that is gone. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdint.h>
#include <time.h>

#include "../embedding/host.h"

static void *standin(const char *name) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *function = library ? dlsym(library, name) : NULL;
  CHECK(function);
  return function;
}

static int64_t live(const char *kind) {
  int64_t (*function)(const char *);
  *(void **)&function = standin("nib_standin_live");
  return function(kind);
}

static void fail(const char *name, int64_t count, int result) {
  void (*function)(const char *, int64_t, int);
  *(void **)&function = standin("nib_standin_fail");
  function(name, count, result);
}

static void rest(long milliseconds) { nanosleep(&(struct timespec){ .tv_nsec = milliseconds * 1000000 }, NULL); }

/* Modules and kernels that the host holds are unloaded all the same, once, and can be released afterwards. */
static void held_modules(void) {
  static const uint64_t image[] = { 0x0010000100000000u | 0xBA55ED50u, 0 }; /* a fatbin of nothing but its header */
  nib_runtime *runtime = NULL;
  nib_module *module = NULL, *second = NULL;
  nib_user_kernel *kernel = NULL;
  OK(NULL, nib_runtime_create(NULL, &runtime));
  nib_device *device = device_of(runtime);
  int64_t own = live("modules");
  OK(runtime, nib_module_create(device, image, sizeof image, &module));
  OK(runtime, nib_module_create(device, image, sizeof image, &second));
  OK(runtime, nib_module_kernel(module, "nib_cuda_fill_8", &kernel));
  CHECK(live("modules") == own + 2);
  nib_module_release(second);
  CHECK(live("modules") == own + 1);
  nib_runtime_close(runtime);
  CHECK(live("modules") == 0 && live("contexts") == 0);
  nib_launch_desc desc = { .grid = { 1, 1, 1 }, .block = { 1, 1, 1 } };
  CHECK_STATUS(NIB_CLOSED, runtime, nib_user_kernel_launch(nib_device_default_stream(device), kernel, &desc));
  nib_module_release(module);
  nib_user_kernel_release(kernel);
}

static int begun, ended, called;

static nib_status slow(void *user) {
  (void)user;
  __atomic_store_n(&begun, 1, __ATOMIC_RELEASE);
  rest(200);
  __atomic_store_n(&ended, 1, __ATOMIC_RELEASE);
  return NIB_INVALID;
}

static nib_status never(void *user) {
  (void)user;
  __atomic_store_n(&called, 1, __ATOMIC_RELEASE);
  return NIB_OK;
}

static int losses;

static void receive(void *user, nib_log_level level, const char *message) {
  CHECK(user == &losses);
  if (level != NIB_LOG_ERROR) return;
  CHECK(strstr(message, "cuda:0: context lost"));
  losses++;
}

/* The context is lost while a function of the host's runs: closing waits for that one, and those behind it never
 * begin. */
static void lost_beside_a_function(void) {
  nib_runtime *runtime = NULL;
  nib_stream *stream = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .log = receive, .user = &losses }, &runtime));
  nib_device *device = device_of(runtime);
  OK(runtime, nib_stream_create(device, 0, &stream));
  nib_tensor *x = make(device, NIB_UINT8, 64);
  OK(runtime, nib_stream_call(stream, slow, NULL));
  OK(runtime, nib_stream_call(stream, never, NULL));
  while (!__atomic_load_n(&begun, __ATOMIC_ACQUIRE)) rest(1);
  fail("kernel", 1, 700);
  OK(runtime, nib_tensor_fill(nib_device_default_stream(device), x, NIB_INTEGER(1)));
  for (int i = 0; i < 2; i++) CHECK_STATUS(NIB_LOST, runtime, nib_tensor_wait(x, NIB_UNLIMITED));
  CHECK(losses == 1);
  CHECK(!__atomic_load_n(&ended, __ATOMIC_ACQUIRE));
  nib_runtime_close(runtime);
  CHECK(__atomic_load_n(&ended, __ATOMIC_ACQUIRE));
  nib_tensor_release(x);
  nib_stream_release(stream);
  rest(20);
  CHECK(!__atomic_load_n(&called, __ATOMIC_ACQUIRE));
}

int main(void) {
  held_modules();
  CHECK(*(const char *)((const char *(*)(void))standin("nib_standin_misuse"))() == 0);
  lost_beside_a_function();
  return 0;
}
