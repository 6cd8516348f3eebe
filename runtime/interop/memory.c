/* Wraps, imports and exports memory of the host, of other frameworks, APIs and processes. */
#include <unistd.h>

#include "interop.h"

/* ---- Memory of the host ---------------------------------------------------------------------------------------- */

/* Checks a view of memory that is not nibble's. *bytes is set to its extent from first to last element. */
static nib_status check_view(nib_runtime *rt, const char *operation, const nib_wrap_desc *desc, size_t *bytes) {
  nib_status status = nib_check_dtype(rt, operation, desc->dtype);
  if (status != NIB_OK) return status;
  if (desc->ndim > 0 && !desc->shape)
    return nib_fail(rt, NIB_INVALID, "%s: shape: expected %d sizes, got NULL", operation, (int)desc->ndim);
  status = nib_check_shape(rt, operation, "shape", desc->dtype, desc->ndim, desc->shape);
  if (status != NIB_OK) return status;
  int64_t item = (int64_t)nib_dtype_bytes(desc->dtype), numel = nib_shape_numel(desc->ndim, desc->shape);
  int64_t most = ((int64_t)1 << 62) / item, count = numel;
  for (int32_t i = 0; desc->stride && i < desc->ndim; i++)
    if (desc->stride[i] < 0)
      return nib_fail(rt, NIB_INVALID, "%s: stride: expected strides >= 0, got %lld in dimension %lld", operation,
                      (long long)desc->stride[i], (long long)i + rt->config.index_base);
  if (desc->stride && numel > 0) {
    count = 1;
    for (int32_t i = 0; i < desc->ndim; i++) {
      if (desc->shape[i] > 1 && desc->stride[i] > (most - count) / (desc->shape[i] - 1))
        return nib_fail(
          rt, NIB_INVALID,
          "%s: stride: expected less than 2^62 bytes, got stride %lld over %lld elements in dimension %lld", operation,
          (long long)desc->stride[i], (long long)desc->shape[i], (long long)i + rt->config.index_base);
      count += (desc->shape[i] - 1) * desc->stride[i];
    }
  }
  if (numel > 0 && (!desc->data || (uintptr_t)desc->data % (uintptr_t)item != 0))
    return nib_fail(rt, NIB_INVALID, "%s: data: expected an address that is a multiple of %d, got %p", operation,
                    (int)item, desc->data);
  *bytes = (size_t)(count * item);
  return NIB_OK;
}

nib_status nib_wrap(nib_device *device, nib_device *pinned_by, const char *operation, const nib_wrap_desc *desc,
                    nib_tensor **out) {
  nib_runtime *rt = device->runtime;
  *out = NULL;
  struct nib_origin origin = { .adopted = true,
                               .data = desc->data,
                               .release = desc->release,
                               .user = desc->user,
                               .read_only = desc->read_only,
                               .pinned_by = pinned_by };
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status == NIB_OK) status = check_view(rt, operation, desc, &origin.bytes);
  if (status == NIB_OK && origin.bytes > 0 && device->backend->foreign)
    status = device->backend->foreign->check_memory(device, operation, desc->data);
  if (status == NIB_OK)
    status = nib_tensor_on(device, &origin, desc->dtype, desc->ndim, desc->shape, desc->stride, out);
  if (status == NIB_OK && origin.bytes > 0)
    nib_tell_host(operation, *out, true); /* its contents count as written by the host */
  return status;
}

nib_status nib_tensor_wrap_sized(nib_device *device, const nib_wrap_desc *given, size_t desc_bytes, nib_tensor **out) {
  *out = NULL;
  nib_wrap_desc desc;
  nib_status status = nib_enter(device->runtime);
  if (status == NIB_OK) status = NIB_READ_DESC(device->runtime, "wrap", nib_wrap_desc, &desc, given, desc_bytes);
  return status == NIB_OK ? nib_wrap(device, NULL, "wrap", &desc, out) : status;
}

nib_status nib_tensor_written(nib_tensor *tensor, nib_stream *stream) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  nib_status status = nib_check_stream(stream, "tensor:written");
  if (status == NIB_OK) status = nib_check_not_capturing(device, "tensor:written");
  if (status == NIB_OK) status = nib_check_device("tensor:written", "tensor", tensor, stream);
  if (status == NIB_OK) status = nib_uses_reserve(rt, &tensor->storage->deferred.uses);
  if (status != NIB_OK) return status;
  if (!device->backend->host_memory)
    stream->submitted++; /* a ticket for the owner's work on the stream; CPU streams have none */
  if (stream->submitted > 0) nib_uses_add(&tensor->storage->deferred.uses, stream, stream->submitted, true);
  nib_access access = { tensor, true, "tensor", NULL };
  NIB_TELL(rt, NIB_OBSERVED_WORK, .operation = "tensor:written", .device = device, .stream = stream->id,
           .accesses = &access, .access_count = 1);
  return NIB_OK;
}

/* ---- Memory by file descriptor --------------------------------------------------------------------------------- */

nib_status nib_check_fds(nib_device *device, const char *operation, void *out) {
  *(void **)out = NULL;
  nib_status status = nib_enter(device->runtime);
  if (status != NIB_OK || device->backend->sharing) return status;
  return nib_fail(device->runtime, NIB_INVALID,
                  "%s: device: expected a CUDA device (only these share memory by file descriptor), got %s", operation,
                  device->info.name);
}

nib_status nib_tensor_create_exportable(nib_device *device, nib_dtype dtype, int32_t ndim, const int64_t *shape,
                                        nib_tensor **out) {
  nib_status status = nib_check_fds(device, "tensor", out);
  return status == NIB_OK
           ? nib_tensor_create_at(device, (struct nib_origin){ .exportable = true }, dtype, ndim, shape, out)
           : status;
}

nib_status nib_tensor_import_sized(nib_device *device, const nib_import_desc *given, size_t desc_bytes,
                                   nib_tensor **out) {
  nib_runtime *rt = device->runtime;
  nib_import_desc own;
  const nib_import_desc *desc = &own;
  nib_status status = nib_check_fds(device, "import", out);
  if (status == NIB_OK) status = NIB_READ_DESC(rt, "import", nib_import_desc, &own, given, desc_bytes);
  if (status == NIB_OK) status = nib_device_open(device);
  if (status != NIB_OK) return status;
  if ((unsigned)desc->kind > NIB_FD_EXPORTED)
    return nib_fail(rt, NIB_INVALID, "import: kind: expected NIB_FD_OPAQUE or NIB_FD_EXPORTED, got %d",
                    (int)desc->kind);
  if (desc->bytes == 0 || desc->bytes > (uint64_t)1 << 62)
    return nib_fail(rt, NIB_INVALID, "import: bytes: expected 1..2^62, got %llu", (unsigned long long)desc->bytes);
  struct nib_origin origin = { .adopted = true, .bytes = (size_t)desc->bytes };
  int64_t size = (int64_t)desc->bytes;
  status = device->backend->sharing->import(device, desc, &origin.data, &origin.shared);
  if (status != NIB_OK) return status;
  status = nib_tensor_on(device, &origin, NIB_UINT8, 1, &size, NULL, out);
  if (status != NIB_OK) {
    device->backend->sharing->free(device, origin.shared);
    return status;
  }
  close(desc->fd); /* the driver has a copy */
  nib_tell_host("import", *out, true);
  return NIB_OK;
}

nib_status nib_tensor_export(nib_tensor *tensor, int *fd, uint64_t *bytes) {
  nib_device *device = nib_tensor_device(tensor);
  *fd = -1;
  *bytes = 0;
  nib_status status = nib_enter(device->runtime);
  if (status != NIB_OK) return status;
  if (!tensor->storage->shared || tensor->storage->counted == 0)
    return nib_fail(device->runtime, NIB_INVALID,
                    "export: tensor: expected one that nib_tensor_create_exportable created, got another");
  return device->backend->sharing->export(device, tensor->storage->shared, fd, bytes);
}
