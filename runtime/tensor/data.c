/* Elements between tensors and the host: writing, waiting, reading. */
#include <string.h>

#include "../../kernels/cpu/kernel.h"
#include "tensor.h"

static nib_status check_bytes(const char *operation, const nib_tensor *tensor, size_t bytes) {
  size_t expected = (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(tensor->dtype);
  if (bytes == expected) return NIB_OK;
  return nib_fail(nib_tensor_runtime(tensor), NIB_INVALID, "%s: bytes: expected %zu, got %zu", operation, expected,
                  bytes);
}

nib_status nib_tensor_write(nib_stream *stream, nib_tensor *tensor, const void *data, size_t bytes) {
  nib_device *device = stream->device;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_device("tensor:write", "tensor", tensor, stream);
  if (status == NIB_OK) status = nib_check_destination("tensor:write", "tensor", tensor);
  if (status == NIB_OK) status = check_bytes("tensor:write", tensor, bytes);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:write");
  if (status != NIB_OK || bytes == 0) return status;
  /* No work has used this memory, so the copy needs no order. */
  if (nib_tensor_is_contiguous(tensor) && tensor->storage->deferred.uses.capacity == 0) {
    if (device->backend->host_memory) memcpy(nib_tensor_data(tensor), data, bytes);
    else status = device->backend->copies->upload(device, nib_tensor_data(tensor), data, bytes);
    if (status != NIB_OK) return status;
    nib_tell_host("tensor:write", tensor, true);
    return NIB_OK;
  }
  nib_tensor *staging;
  status = nib_tensor_create(device, tensor->dtype, tensor->ndim, tensor->shape, &staging);
  if (status == NIB_OK) status = nib_tensor_write(stream, staging, data, bytes);
  if (status == NIB_OK) status = nib_copy_here(stream, tensor, staging);
  nib_tensor_release(staging);
  return status;
}

nib_status nib_tensor_wait(nib_tensor *tensor, int64_t timeout_us) {
  nib_device *device = nib_tensor_device(tensor);
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:wait");
  if (status != NIB_OK) return status;
  struct nib_uses *uses = &tensor->storage->deferred.uses;
  status = nib_uses_wait(device, uses, true, timeout_us);
  if (status != NIB_OK) return status;
  NIB_TELL(device->runtime, NIB_OBSERVED_SYNCHRONIZED, .operation = "tensor:wait", .device = device,
           .storage = tensor->storage->id);
  status = nib_take_trouble(device, 0);
  for (int32_t i = 0; status == NIB_OK && i < uses->count;
       i++) { /* also errors of GPUs that copied into pinned memory */
    nib_device *writer = uses->items[i].stream->device;
    if (writer != device && uses->items[i].write > 0) status = nib_take_trouble(writer, 0);
  }
  nib_uses_idle(uses);
  return status;
}

struct nib_pieces nib_pieces_of(const nib_tensor *tensor, int64_t most) {
  struct nib_pieces pieces = {
    .whole = tensor, .view = *tensor, .numel = nib_tensor_numel(tensor), .inner = 1, .dim = tensor->ndim - 1
  };
  while (pieces.numel > 0 && pieces.dim >= 0 && tensor->shape[pieces.dim] <= most / pieces.inner)
    pieces.inner *= tensor->shape[pieces.dim--];
  pieces.step = most / pieces.inner;
  return pieces;
}

bool nib_next_piece(struct nib_pieces *pieces) {
  const nib_tensor *whole = pieces->whole;
  int64_t item = (int64_t)nib_dtype_bytes(whole->dtype), row;
  pieces->at += pieces->count;
  if (pieces->at >= pieces->numel) return false;
  pieces->count = pieces->numel;
  if (pieces->dim < 0) return true;
  row = pieces->at / pieces->inner;
  pieces->view.offset_bytes = whole->offset_bytes;
  for (int32_t i = pieces->dim; i >= 0; i--) {
    int64_t index = row % whole->shape[i];
    row /= whole->shape[i];
    pieces->view.offset_bytes += index * whole->stride[i] * item;
    pieces->view.shape[i] = 1;
    if (i < pieces->dim) continue;
    pieces->view.shape[i] = whole->shape[i] - index < pieces->step ? whole->shape[i] - index : pieces->step;
    pieces->count = pieces->view.shape[i] * pieces->inner;
  }
  return true;
}

static void run_alone(void *context, int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t),
                      void *argument) {
  (void)context, (void)grain;
  body(argument, 0, count);
}

/* Copies memory that the host can read on this thread, in pieces; checks the deadline between them. */
static nib_status fetch_pieces(nib_tensor *tensor, char *data) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  struct nib_cpu_team alone = { run_alone, NULL };
  bool compact = nib_tensor_is_contiguous(tensor);
  int64_t item = (int64_t)nib_dtype_bytes(tensor->dtype);
  struct nib_pieces pieces = nib_pieces_of(tensor, NIB_PIECE);
  while (nib_next_piece(&pieces)) {
    if (pieces.at > 0 && nib_is_late(rt)) return nib_fail_late(rt, "tensor:read");
    if (compact) {
      memcpy(data + pieces.at * item, nib_tensor_data(&pieces.view), (size_t)(pieces.count * item));
      continue;
    }
    nib_tensor target = pieces.view; /* the same shape, contiguous, in the caller's memory */
    int64_t stride = 1;
    for (int32_t i = target.ndim - 1; i >= 0; stride *= target.shape[i--]) target.stride[i] = stride;
    struct nib_copy_params params = nib_copy_params_of(&target, &pieces.view);
    params.destination = data + pieces.at * item;
    nib_cpu_copy(&params, &alone);
  }
  return NIB_OK;
}

#define DOWNLOAD_PIECE ((size_t)4 << 20)

/* Copies a contiguous tensor of a GPU in pieces; checks the deadline between them. */
static nib_status download(nib_tensor *tensor, char *data, size_t bytes) {
  nib_device *device = nib_tensor_device(tensor);
  const char *source = nib_tensor_data(tensor);
  nib_status status = NIB_OK;
  for (size_t at = 0, piece = 0; status == NIB_OK && at < bytes; at += piece) {
    if (at > 0 && nib_is_late(device->runtime)) return nib_fail_late(device->runtime, "tensor:read");
    piece = bytes - at < DOWNLOAD_PIECE ? bytes - at : DOWNLOAD_PIECE;
    status = device->backend->copies->download(device, data + at, source + at, piece);
  }
  return status;
}

static nib_status fetch(nib_tensor *tensor, void *data, size_t bytes) {
  nib_device *device = nib_tensor_device(tensor);
  if (device->backend->host_memory) return fetch_pieces(tensor, data);
  if (nib_tensor_is_contiguous(tensor)) return download(tensor, data, bytes);
  nib_tensor *packed = NULL;
  /* On a stream of the runtime's own: it waits only for such copies, and does not count against a limit of streams. */
  nib_status status = device->fetches ? NIB_OK : nib_stream_open_own(device, &device->fetches);
  if (status == NIB_OK) status = nib_tensor_create(device, tensor->dtype, tensor->ndim, tensor->shape, &packed);
  if (status == NIB_OK) status = nib_copy_here(device->fetches, packed, tensor);
  if (status == NIB_OK) /* errors are kept for the host's next wait */
    status = nib_uses_wait(device, &packed->storage->deferred.uses, true, NIB_UNLIMITED);
  if (status == NIB_OK) status = download(packed, data, bytes);
  nib_tensor_release(packed);
  return status;
}

nib_status nib_fetch(nib_tensor *tensor, void *data, size_t bytes) {
  nib_runtime *rt = nib_tensor_runtime(tensor);
  void (*observe)(void *user, const nib_observation *observation) = rt->observe;
  rt->observe = NULL; /* these copies are not the host's work */
  nib_status status = fetch(tensor, data, bytes);
  rt->observe = observe;
  return status;
}

nib_status nib_tensor_read(nib_tensor *tensor, void *data, size_t bytes, int64_t timeout_us) {
  nib_status status = nib_enter(nib_tensor_runtime(tensor));
  if (status == NIB_OK) status = check_bytes("tensor:read", tensor, bytes);
  if (status == NIB_OK) status = nib_tensor_wait(tensor, timeout_us);
  if (status == NIB_OK && bytes > 0) status = nib_fetch(tensor, data, bytes);
  if (status == NIB_OK) nib_tell_host("tensor:read", tensor, false);
  return status;
}
