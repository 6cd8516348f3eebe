/* Runs scripts, each in a sandbox of its own, and tells how they ended, for sandbox_spec.lua:
 *   sandbox [NAME=NUMBER ...] FILE [NAME=NUMBER ...] FILE ...
 * Settings hold for the files behind them: lua_memory, device_memory, tensors, streams, instructions, budget_us. A line
 * each:
 * "> " and what the script prints; "= " status, microseconds of this thread's
 * processor time, and message. After the script, its function `run` is called if
 * there is one. */
#include <time.h>

#include "nibble_lua.h"
#include "host.h"

static void print(void *user, const char *text, size_t length) {
  (void)user;
  printf("> %.*s\n", (int)length, text);
}

static long long now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static nib_sandbox_config config = { .print = print };
static long long budget_us = 2000000;

static int set(const char *name, const char *equals) {
  size_t length = (size_t)(equals - name);
  long long value = atoll(equals + 1);
#define IS(text) (length == strlen(text) && memcmp(name, text, length) == 0)
  if (IS("lua_memory")) config.lua_memory = (size_t)value;
  else if (IS("device_memory")) config.device_memory = (uint64_t)value;
  else if (IS("tensors")) config.tensors = (int32_t)value;
  else if (IS("streams")) config.streams = (int32_t)value;
  else if (IS("instructions")) config.instructions = value;
  else if (IS("budget_us")) budget_us = value;
  else return 0;
  return 1;
}

int main(int argc, char **argv) {
  static char source[1 << 20];
  for (int i = 1; i < argc; i++) {
    const char *equals = strchr(argv[i], '=');
    if (equals && set(argv[i], equals)) continue;
    FILE *file = fopen(argv[i], "rb");
    CHECK(file);
    size_t length = fread(source, 1, sizeof source, file);
    fclose(file);
    nib_sandbox *sandbox = NULL;
    CHECK(nib_sandbox_create(&config, &sandbox) == NIB_OK && sandbox);
    long long start = now_us();
    nib_status status = nib_sandbox_load(sandbox, "script", source, length, budget_us);
    if (status == NIB_OK) {
      start = now_us();
      status = nib_sandbox_call(sandbox, "run", NULL, budget_us);
      if (status == NIB_UNAVAILABLE) status = NIB_OK;
    }
    printf("= %s %lld %s\n", nib_status_name(status), now_us() - start,
           status == NIB_OK ? "" : nib_sandbox_error(sandbox));
    fflush(stdout);
    /* Whatever it did, the next call works. */
    CHECK(nib_sandbox_load(sandbox, "after", "assert(#tostring(1) == 1)", 25, 60000000) == NIB_OK ||
          status == NIB_MEMORY);
    nib_sandbox_close(sandbox);
  }
  return 0;
}
