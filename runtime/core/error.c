/* Text for people: names of statuses, operations and kernels, the message of the last error, the log. */
#include <stdarg.h>
#include <stdio.h>

#include "core.h"

const char *nib_status_name(nib_status status) {
  static const char *const names[] = {
#define X(name, text) #name,
    NIB_STATUS_LIST(X)
#undef X
  };
  return (size_t)status < sizeof names / sizeof *names ? names[status] : "?";
}

const char *nib_status_text(nib_status status) {
  static const char *const texts[] = {
#define X(name, text) text,
    NIB_STATUS_LIST(X)
#undef X
  };
  return (size_t)status < sizeof texts / sizeof *texts ? texts[status] : "?";
}

const char *const nib_operation_names[NIB_OPERATION_COUNT] = {
#define X(symbol, name) name,
  NIB_OPERATION_LIST(X)
#undef X
};

const char *const nib_kernel_names[NIB_KERNEL_COUNT] = {
#define X(symbol, name) #name,
  NIB_KERNEL_LIST(X)
#undef X
};

uint32_t nib_abi_version(void) { return NIB_ABI_VERSION; }
const char *nib_version(void) { return NIB_VERSION; }

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

nib_status nib_fail(nib_runtime *rt, nib_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(rt->error, sizeof rt->error, format, arguments);
  va_end(arguments);
  if (rt->config.log) rt->config.log(rt->config.user, NIB_LOG_DEBUG, rt->error);
  return status;
}

void nib_log(nib_runtime *rt, nib_log_level level, const char *format, ...) {
  char text[256];
  va_list arguments;
  if (!rt->config.log) return;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  rt->config.log(rt->config.user, level, text);
}

nib_status nib_fail_memory(nib_runtime *rt, const char *what, size_t bytes) {
  return nib_fail(rt, NIB_MEMORY, "%s: out of memory: cannot allocate %zu bytes", what, bytes);
}

nib_status nib_read_desc(nib_runtime *rt, const char *operation, void *own, size_t own_bytes, size_t least,
                         const void *given, size_t bytes) {
  char text[160];
  if (nib_sized_read(own, own_bytes, least, given, bytes, text, sizeof text)) return NIB_OK;
  return nib_fail(rt, NIB_INVALID, "%s: desc: %s", operation, text);
}

const char *nib_error(const nib_runtime *rt) { return rt->error; }
void *nib_runtime_user(const nib_runtime *rt) { return rt->config.user; }
