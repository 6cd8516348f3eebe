/* Waits of the calling thread for streams to reach tickets, and the errors that a wait finds.
 *
 * nib_wait waits until a stream has reached a ticket, the timeout has passed (NIB_TIMEOUT) or the context is lost
 * (NIB_LOST, from this and every later call). If the host has set a deadline, it waits in slices of a millisecond,
 * since another thread may change the deadline meanwhile.
 *
 * Work that fails does not stop its stream, and the call that queued it has returned already. Two kinds of errors are
 * kept until the next wait of the host:
 * - A function that the host queued (nib_stream_call) returned an error. The stream keeps the first one.
 * - A content fault: a kernel found data that its operation refuses. It writes the device's nib_fault record
 * (params.h), which is in memory that both kernels and the host reach, unless it holds an earlier fault. The record
 * does not name a stream, so any wait on the device finds it.
 *
 * Every public wait (synchronize, nib_tensor_wait, the wait of an event) ends with nib_take_trouble, which returns each
 * error once; later work is not affected. A wait for one stream takes only that stream's error. A wait for memory that
 * GPUs have copied into, which is the CPU's, checks these GPUs, too. Waits of the runtime itself (for room in a queue,
 * for memory, while it packs elements to read them) take no errors, so that the host's next wait finds them. */
#include <stdio.h>

#include "own.h"
#include "floats.h"

nib_status nib_check_not_capturing(nib_device *device, const char *operation) {
  if (!device->capture) return NIB_OK;
  return nib_fail(device->runtime, NIB_CAPTURING,
                  "%s: not allowed while a stream of %s captures; read values and wait after the capture", operation,
                  device->info.name);
}

/* ---- Waiting --------------------------------------------------------------------------------------------------- */

#define SLICE_US 1000 /* the longest delay until a changed deadline is noticed */

nib_status nib_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  if (timeout_us <= 0 || device->backend->streams.reached(stream, ticket))
    return device->backend->streams.wait(stream, ticket, 0);
  for (int64_t start = nib_now_us(), left = timeout_us;; left = nib_time_left(start, timeout_us)) {
    int64_t slice = nib_time_to_deadline(rt);
    if (slice == 0) return nib_fail_late(rt, "wait");
    if (slice != NIB_UNLIMITED && slice > SLICE_US) slice = SLICE_US;
    bool is_last = left <= slice;
    nib_status status = device->backend->streams.wait(stream, ticket, is_last ? left : slice);
    if (status != NIB_TIMEOUT || is_last) return status;
  }
}

nib_status nib_uses_wait(nib_device *device, struct nib_uses *uses, bool writes_only, int64_t timeout_us) {
  int64_t start = uses->count ? nib_now_us() : 0;
  for (int32_t i = 0; i < uses->count; i++) {
    struct nib_use *use = &uses->items[i];
    nib_device *user = use->stream->device;
    uint64_t ticket = nib_use_ticket(use, writes_only);
    if (ticket == 0) continue;
    if (user != device && !user->backend->streams.reached(
                            use->stream, ticket)) { /* do not query or wait, which could break its capture */
      nib_status status = nib_check_not_capturing(user, "tensor:wait");
      if (status != NIB_OK) return status;
    }
    nib_status status = nib_wait(use->stream, ticket, nib_time_left(start, timeout_us));
    if (status != NIB_OK) return status;
  }
  return NIB_OK;
}

nib_status nib_wait_for_cpu(struct nib_storage *storage, bool writes_only, int64_t timeout_us) {
  nib_device *cpu = storage->deferred.device;
  struct nib_uses *uses = &storage->deferred.uses;
  int64_t start = uses->count ? nib_now_us() : 0;
  for (int32_t i = 0; i < uses->count; i++) {
    struct nib_use *use = &uses->items[i];
    uint64_t ticket = nib_use_ticket(use, writes_only);
    if (use->stream->device != cpu || ticket == 0) continue;
    nib_status status = nib_wait(use->stream, ticket, nib_time_left(start, timeout_us));
    if (status != NIB_OK) return status;
    NIB_TELL(cpu->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "tensor:copy", .device = cpu,
             .stream = use->stream->id);
  }
  return NIB_OK;
}

/* ---- Trouble --------------------------------------------------------------------------------------------------- */

static nib_status take_fault(nib_device *device) {
  static const struct {
    const char *parameter, *expectation;
  } contents[] = {
#define X(symbol, parameter, expectation) { parameter, expectation },
    NIB_CONTENT_LIST(X)
#undef X
  };
  struct nib_fault *fault = device->fault;
  if (!fault) return NIB_OK; /* the device is not open yet */
  if (__atomic_load_n(&fault->state, __ATOMIC_ACQUIRE) != 2) return NIB_OK;
  char value[48];
  if (!fault->is_float) snprintf(value, sizeof value, "%lld", (long long)fault->integer);
  else nib_format_real(value, sizeof value, "%.9g", fault->real);
  uint32_t operation = fault->operation, content = fault->content;
  int64_t index = fault->index;
  __atomic_store_n(&fault->state, 0, __ATOMIC_RELEASE);
  if (operation >= NIB_OPERATION_COUNT || content >= NIB_CONTENT_COUNT) /* a user kernel overwrote the record */
    return nib_fail(device->runtime, NIB_FAULT, "unknown content fault %u/%u on %s (a user kernel may have written it)",
                    operation, content, device->info.name);
  return nib_fail(device->runtime, NIB_FAULT, "%s: %s: expected %s, got %s at index %lld (content fault on %s)",
                  nib_operation_names[operation], contents[content].parameter, contents[content].expectation, value,
                  (long long)index, device->info.name);
}

nib_status nib_take_trouble(nib_device *device, uint64_t only) {
  for (nib_stream *stream = device->streams; stream; stream = stream->next) {
    bool asked = stream->impl && (only == 0 || stream->id == only);
    nib_status status = asked ? device->backend->streams.take_error(stream) : NIB_OK;
    if (status != NIB_OK) return status;
  }
  return take_fault(device);
}
