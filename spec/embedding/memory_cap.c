/* The memory cap, and messages for people. */
#include "host.h"

static int messages[NIB_LOG_ERROR + 1];
static char opened[256];

static void receive(void *user, nib_log_level level, const char *message) {
  CHECK(user == messages);
  CHECK(level >= NIB_LOG_DEBUG && level <= NIB_LOG_ERROR);
  CHECK(message && *message && !strchr(message, '\n'));
  if (level == NIB_LOG_INFO) snprintf(opened, sizeof opened, "%s", message);
  messages[level]++;
}

int main(void) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .memory_cap = 1 << 20, .log = receive, .user = messages }, &runtime));
  nib_device *device = device_of(runtime);
  nib_stream *stream = nib_device_default_stream(device);
  CHECK(messages[NIB_LOG_INFO] >= 1 && strncmp(opened, device_name(), strlen(device_name())) == 0 &&
        strstr(opened, "opened"));
  CHECK(messages[NIB_LOG_DEBUG] == 0 && messages[NIB_LOG_WARNING] == 0);
  nib_tensor *kept[64], *more = NULL;
  int64_t size = 1 << 18;
  int count = 0;
  nib_status status;
  while ((status = nib_tensor_create(device, NIB_UINT8, 1, &size, &kept[count])) == NIB_OK) CHECK(++count < 64);
  CHECK(status == NIB_MEMORY && strstr(nib_error(runtime), "memory"));
  CHECK(count >= 3 && count <= 4);
  CHECK(messages[NIB_LOG_WARNING] >= 1 && messages[NIB_LOG_DEBUG] == 1 && messages[NIB_LOG_ERROR] == 0);
  CHECK(nib_device_memory(device).reserved_bytes <= 1 << 20);

  /* One byte more than there is, all at once. */
  int64_t large = (1 << 20) + 1;
  CHECK_STATUS(NIB_MEMORY, runtime, nib_tensor_create(device, NIB_UINT8, 1, &large, &more));
  CHECK(!more);

  /* What is given back can be had again, though work on it was queued. */
  for (int round = 0; round < 200; round++) {
    OK(runtime, nib_tensor_fill(stream, kept[count - 1], NIB_INTEGER(round % 200)));
    nib_tensor_release(kept[count - 1]);
    OK(runtime, nib_tensor_create(device, NIB_UINT8, 1, &size, &kept[count - 1]));
  }
  for (int i = 0; i < count; i++) nib_tensor_release(kept[i]);
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  OK(runtime, nib_tick(runtime, NIB_UNLIMITED));
  CHECK(nib_device_memory(device).used_bytes == 0 && nib_device_memory(device).reserved_bytes == 0);
  CHECK(nib_device_memory(device).peak_bytes <= 1 << 20 && nib_device_memory(device).peak_bytes >= 3 << 18);
  nib_runtime_close(runtime);
  return 0;
}
