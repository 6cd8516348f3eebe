/* Calls that are made to fail, the record of misuse, and what is alive. */
#define _POSIX_C_SOURCE 200809L
#include "standin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t standin_progress = PTHREAD_COND_INITIALIZER;
_Thread_local struct thread standin_thread;
int64_t standin_live[LIVE_COUNT];

const char *const standin_live_names[LIVE_COUNT] = {
  [LIVE_CONTEXTS] = "contexts",
  [LIVE_MODULES] = "modules",
  [LIVE_FUNCTIONS] = "functions",
  [LIVE_STREAMS] = "streams",
  [LIVE_EVENTS] = "events",
  [LIVE_POOLS] = "pools",
  [LIVE_GRAPHS] = "graphs",
  [LIVE_EXECS] = "execs",
  [LIVE_HOST] = "host",
  [LIVE_CAPTURES] = "captures",
  [LIVE_ALLOCATIONS] = "allocations",
  [LIVE_PUSHED] = "pushed",
  [LIVE_MODES] = "modes",
  [LIVE_EXTERNALS] = "externals",
  [LIVE_CHUNKS] = "chunks",
  [LIVE_SEMAPHORES] = "semaphores",
  [LIVE_RANGES] = "ranges",
  [LIVE_MAPPED] = "mapped",
};

static int64_t calls, misuses, fired;
static char last_misuse[256], last_failed[48];
static pid_t owner;

/* ---- Results --------------------------------------------------------------------------------------------------- */

/* X(name, text) */
#define RESULT_LIST(X)                                                                                    \
  X(CUDA_SUCCESS, "no error")                                                                             \
  X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                         \
  X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                            \
  X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                                   \
  X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                                     \
  X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                           \
  X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                                  \
  X(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                                           \
  X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                                 \
  X(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device")             \
  X(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")                                  \
  X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                                 \
  X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")                   \
  X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                                       \
  X(CUDA_ERROR_NOT_READY, "device not ready")                                                             \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                               \
  X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")                        \
  X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")                                 \
  X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                                              \
  X(CUDA_ERROR_ASSERT, "device-side assert triggered")                                                    \
  X(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error")                                              \
  X(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered")                             \
  X(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address")                                                  \
  X(CUDA_ERROR_INVALID_ADDRESS_SPACE, "operation not supported on global/shared address space")           \
  X(CUDA_ERROR_INVALID_PC, "invalid program counter")                                                     \
  X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                               \
  X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                                  \
  X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                                  \
  X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                                            \
  X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination") \
  X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")            \
  X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture")     \
  X(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences")   \
  X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began")          \
  X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work")                             \
  X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream")       \
  X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,                                                                   \
    "operation would make the legacy stream depend on a capturing blocking stream")                       \
  X(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream") \
  X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,                                                               \
    "attempt to terminate a thread-local capture sequence from another thread")                           \
  X(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,                                                                 \
    "the graph update was not performed because it included changes which violated constraints")          \
  X(CUDA_ERROR_UNKNOWN, "unknown error")

static const struct {
  CUresult result;
  const char *name, *text;
} results[] = {
#define X(name, text) { name, #name, text },
  RESULT_LIST(X)
#undef X
};

#define RESULT_COUNT (sizeof results / sizeof *results)

CUresult standin_result_of(const char *text) {
  for (size_t i = 0; i < RESULT_COUNT; i++)
    if (strcmp(results[i].name, text) == 0) return results[i].result;
  return (CUresult)atoi(text);
}

static CUresult tell(CUresult error, const char **out, bool name) {
  const char *call = name ? "cuGetErrorName" : "cuGetErrorString", *found = NULL;
  bool forked = standin_is_forked(); /* it needs no driver that works */
  CUresult result = forked ? CUDA_SUCCESS : standin_enter(call, CALL_FREE_STANDING);
  if (result != CUDA_SUCCESS) return result;
  for (size_t i = 0; i < RESULT_COUNT; i++)
    if (results[i].result == error) found = name ? results[i].name : results[i].text;
  *out = found;
  result = found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  return forked ? result : standin_leave(result);
}

CUresult standin_GetErrorName(CUresult error, const char **out) { return tell(error, out, true); }
CUresult standin_GetErrorString(CUresult error, const char **out) { return tell(error, out, false); }

bool standin_is_fatal(CUresult result) {
  switch (result) {
  case CUDA_ERROR_ECC_UNCORRECTABLE:
  case CUDA_ERROR_ILLEGAL_ADDRESS:
  case CUDA_ERROR_LAUNCH_TIMEOUT:
  case CUDA_ERROR_ASSERT:
  case CUDA_ERROR_HARDWARE_STACK_ERROR:
  case CUDA_ERROR_ILLEGAL_INSTRUCTION:
  case CUDA_ERROR_MISALIGNED_ADDRESS:
  case CUDA_ERROR_INVALID_ADDRESS_SPACE:
  case CUDA_ERROR_INVALID_PC:
  case CUDA_ERROR_LAUNCH_FAILED: return true;
  default: return false;
  }
}

int64_t standin_number(const char *variable, int64_t otherwise) {
  const char *text = getenv(variable);
  return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

/* ---- Rules ----------------------------------------------------------------------------------------------------- */

static struct rule {
  char name[48];
  int64_t left; /* calls until it fires; 0: never again */
  bool repeats;
  CUresult result;
} rules[16];
static int rule_count;

static void add_rule(const char *name, int64_t count, bool repeats, CUresult result) {
  if (rule_count == (int)(sizeof rules / sizeof *rules)) return;
  struct rule *rule = &rules[rule_count++];
  snprintf(rule->name, sizeof rule->name, "%s", name);
  rule->left = count;
  rule->repeats = repeats;
  rule->result = result;
}

static void read_rules(const char *text) {
  char copy[512], *rest = NULL;
  snprintf(copy, sizeof copy, "%s", text);
  for (char *item = strtok_r(copy, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
    char *count = strchr(item, ':'), *result = count ? strchr(count + 1, ':') : NULL;
    if (!result) continue;
    *count++ = *result++ = 0;
    add_rule(item, strtoll(count, NULL, 10), strchr(count, '+') != NULL, standin_result_of(result));
  }
}

CUresult standin_injected(const char *name, bool is_call) {
  CUresult result = CUDA_SUCCESS;
  bool any = is_call && strcmp(name, "cuEventQuery") != 0 && strcmp(name, "cuStreamQuery") != 0;
  for (int i = 0; i < rule_count; i++) {
    struct rule *rule = &rules[i];
    if (rule->left == 0 || !(strcmp(rule->name, name) == 0 || (any && strcmp(rule->name, "*") == 0))) continue;
    if (rule->left > 1) {
      rule->left--;
      continue;
    }
    if (!rule->repeats) rule->left = 0;
    result = rule->result;
    fired++;
    snprintf(last_failed, sizeof last_failed, "%s", name);
  }
  return result;
}

/* ---- The log --------------------------------------------------------------------------------------------------- */

static void write_log(const char *kind, const char *text) {
  const char *name = getenv("NIB_STANDIN_LOG");
  FILE *file = name ? fopen(name, "ae") : NULL;
  if (!file) return;
  fprintf(file, "%d %s: %s\n", (int)getpid(), kind, text);
  fclose(file);
}

CUresult standin_misuse(CUresult result, const char *format, ...) {
  char text[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  snprintf(last_misuse, sizeof last_misuse, "%s: %s", standin_thread.call ? standin_thread.call : "a stream", text);
  misuses++;
  write_log("misuse", last_misuse);
  return result;
}

bool standin_is_forked(void) { return getpid() != owner; }

static void lock(void) { pthread_mutex_lock(&standin_lock); }
static void unlock(void) { pthread_mutex_unlock(&standin_lock); }

__attribute__((constructor)) static void begin(void) {
  owner = getpid();
  /* A child asks for the counters. Without this, another thread may have the lock when the process is forked, and the
   * child waits for it for ever. */
  pthread_atfork(lock, unlock, unlock);
  const char *text = getenv("NIB_STANDIN_FAIL");
  if (text) read_rules(text);
}

/* For a second at most: what they wait for may never come. */
static void wait_for_frees(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec++;
  for (struct stream *stream = standin_streams; stream;) {
    bool frees = false;
    for (struct task *task = stream->head; task; task = task->next) frees |= task->kind == TASK_FREE;
    if (frees && pthread_cond_timedwait(&standin_progress, &standin_lock, &until) != 0) return;
    stream = frees ? standin_streams : stream->next;
  }
}

__attribute__((destructor)) static void end(void) {
  char text[96];
  if (standin_is_forked()) return;
  pthread_mutex_lock(&standin_lock);
  wait_for_frees();
  standin_check_guards();
  for (int i = 0; i < LIVE_COUNT; i++) {
    snprintf(text, sizeof text, "%lld %s", (long long)standin_live[i], standin_live_names[i]);
    if (standin_live[i] != 0) write_log("leak", text);
  }
  snprintf(text, sizeof text, "%lld calls, %lld made to fail, %lld misuses", (long long)calls, (long long)fired,
           (long long)misuses);
  write_log("end", text);
  pthread_mutex_unlock(&standin_lock);
}

/* ---- Around every call ----------------------------------------------------------------------------------------- */

static bool initialised;

CUresult standin_enter(const char *name, unsigned flags) {
  struct thread *thread = &standin_thread;
  thread->call = name;
  /* As with the driver, a child of fork can use nothing. */
  if (standin_is_forked()) {
    pthread_mutex_lock(&standin_lock);
    calls++;
    if (!(flags & CALL_FREE_STANDING)) standin_misuse(CUDA_SUCCESS, "called in a child process after fork");
    pthread_mutex_unlock(&standin_lock);
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  if (thread->in_host_function)
    return standin_misuse(CUDA_ERROR_NOT_PERMITTED, "called by a host function of a stream");
  pthread_mutex_lock(&standin_lock);
  standin_sweep();
  calls++;
  thread->forced = CUDA_SUCCESS;
  struct context *context = standin_current();
  CUresult result = standin_injected(name, true);
  if (standin_is_fatal(result) && context) standin_lose(context, result);
  if (result != CUDA_SUCCESS && (flags & CALL_RELEASES)) {
    thread->forced = result;
    result = CUDA_SUCCESS;
  }
  if (result == CUDA_SUCCESS && !(flags & CALL_FREE_STANDING)) {
    bool bound = !(flags & CALL_NO_CONTEXT);
    if (!initialised) result = standin_misuse(CUDA_ERROR_NOT_INITIALIZED, "called before cuInit");
    else if (bound && !context) result = standin_misuse(CUDA_ERROR_INVALID_CONTEXT, "called without a current context");
    else if (bound && context->lost != CUDA_SUCCESS && (flags & CALL_RELEASES)) thread->forced = context->lost;
    else if (bound && context->lost != CUDA_SUCCESS) result = context->lost;
    if (result == CUDA_SUCCESS && (flags & CALL_UNSAFE)) result = standin_check_unsafe();
  }
  if (result != CUDA_SUCCESS) pthread_mutex_unlock(&standin_lock);
  return result;
}

CUresult standin_leave(CUresult result) {
  if (strcmp(standin_thread.call, "cuInit") == 0 && result == CUDA_SUCCESS) initialised = true;
  if (standin_thread.forced != CUDA_SUCCESS) result = standin_thread.forced;
  standin_thread.forced = CUDA_SUCCESS;
  pthread_mutex_unlock(&standin_lock);
  return result;
}

/* ---- For the program ------------------------------------------------------------------------------------------- */

static int64_t read_counter(const int64_t *counter) {
  pthread_mutex_lock(&standin_lock);
  int64_t value = *counter;
  pthread_mutex_unlock(&standin_lock);
  return value;
}

int64_t nib_standin_calls(void) { return read_counter(&calls); }
int64_t nib_standin_misuses(void) { return read_counter(&misuses); }
int64_t nib_standin_fired(void) { return read_counter(&fired); }
const char *nib_standin_failed(void) { return last_failed; }
const char *nib_standin_misuse(void) { return last_misuse; }

void nib_standin_fail(const char *name, int64_t count, int result) {
  pthread_mutex_lock(&standin_lock);
  if (name) add_rule(name, count < 0 ? -count : count, count < 0, (CUresult)result);
  else rule_count = 0;
  pthread_mutex_unlock(&standin_lock);
}

int64_t nib_standin_live(const char *kind) {
  int64_t count = -1;
  pthread_mutex_lock(&standin_lock);
  wait_for_frees();
  for (int i = 0; i < LIVE_COUNT; i++)
    if (strcmp(standin_live_names[i], kind) == 0) count = standin_live[i];
  pthread_mutex_unlock(&standin_lock);
  return count;
}
