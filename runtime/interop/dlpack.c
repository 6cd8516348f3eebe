/* Exchange of tensors with other frameworks in the process, by DLPack. */
#include "../nibble_dlpack.h"

#include <stdio.h>

#include "interop.h"

/* ---- Element types --------------------------------------------------------------------------------------------- */

struct element {
  uint8_t code, bits;
  uint16_t lanes;
  nib_dtype dtype;
};

/* Exports use the first entry of a dtype. */
static const struct element elements[] = {
  { NIB_DLPACK_FLOAT, 32, 1, NIB_FLOAT32 },   { NIB_DLPACK_FLOAT, 16, 1, NIB_FLOAT16 },
  { NIB_DLPACK_BFLOAT, 16, 1, NIB_BFLOAT16 }, { NIB_DLPACK_E4M3FN, 8, 1, NIB_FLOAT8_E4M3FN },
  { NIB_DLPACK_UINT, 8, 1, NIB_UINT8 },       { NIB_DLPACK_INT, 8, 1, NIB_INT8 },
  { NIB_DLPACK_UINT, 16, 1, NIB_UINT16 },     { NIB_DLPACK_INT, 32, 1, NIB_INT32 },
  { NIB_DLPACK_INT, 64, 1, NIB_INT64 },       { NIB_DLPACK_BOOL, 8, 1, NIB_UINT8 },
  { NIB_DLPACK_E2M1FN, 4, 2, NIB_UINT8 }, /* two codes in a byte, the first in the low bits */
};
#define ELEMENT_COUNT (sizeof elements / sizeof *elements)

/* ---- From others ----------------------------------------------------------------------------------------------- */

static void call_deleter(void *user) {
  struct DLManagedTensorVersioned *managed = user;
  if (managed->deleter) managed->deleter(managed);
}

/* The device of the memory. *pinned_by is set to the GPU that can copy it directly. */
static nib_status find_device(nib_runtime *rt, const struct nib_dlpack_tensor *from, nib_device **device,
                              nib_device **pinned_by) {
  char name[24];
  switch (from->device_type) {
  case NIB_DLPACK_CUDA_HOST: *pinned_by = nib_find_pinning(rt); /* fall through */
  case NIB_DLPACK_CPU: *device = &rt->devices[0]; return NIB_OK;
  case NIB_DLPACK_CUDA:
    snprintf(name, sizeof name, "cuda:%d", (int)from->device_id);
    return nib_device_find(rt, name, device);
  default:
    return nib_fail(rt, NIB_INVALID,
                    "from_dlpack: device: expected device type 1 (CPU), 2 (CUDA) or 3 (pinned by CUDA), got device "
                    "type %d",
                    (int)from->device_type);
  }
}

/* Copies the strides. Producers may give any stride to a dimension of size 1, and in an empty tensor, so these are
 * replaced. Returns false if the tensor is contiguous. */
static bool copy_strides(const struct nib_dlpack_tensor *from, int64_t *strides) {
  if (!from->strides || !from->shape || from->ndim > NIB_MAX_NDIM) return false; /* the caller reports the error */
  for (int32_t i = 0; i < from->ndim; i++)
    if (from->shape[i] == 0) return false;
  for (int32_t i = from->ndim - 1, next = i + 1; i >= 0; next = i--) {
    strides[i] = from->strides[i];
    if (from->shape[i] == 1) /* as in a contiguous tensor */
      if (next >= from->ndim || __builtin_mul_overflow(strides[next], from->shape[next], &strides[i])) strides[i] = 1;
  }
  return true;
}

nib_status nib_tensor_from_dlpack(nib_runtime *rt, struct DLManagedTensorVersioned *managed, nib_tensor **out) {
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  if (!managed) return nib_fail(rt, NIB_INVALID, "from_dlpack: managed: expected a DLManagedTensorVersioned, got NULL");
  if (managed->major != NIB_DLPACK_MAJOR)
    return nib_fail(rt, NIB_INVALID, "from_dlpack: version: expected DLPack 1, got %u.%u", (unsigned)managed->major,
                    (unsigned)managed->minor);
  const struct nib_dlpack_tensor *from = &managed->tensor;
  size_t i = 0;
  while (i < ELEMENT_COUNT &&
         !(elements[i].code == from->code && elements[i].bits == from->bits && elements[i].lanes == from->lanes))
    i++;
  if (i == ELEMENT_COUNT || (from->bits < 8 && managed->flags & NIB_DLPACK_PADDED))
    return nib_fail(
      rt, NIB_INVALID,
      "from_dlpack: dtype: expected float 32 or 16, bfloat 16, float8_e4m3fn, int 8, 32 or 64, uint 8 or 16, bool, of "
      "one lane each, or packed float4_e2m1fn of two, got code %d of %d bits and %d lanes",
      (int)from->code, (int)from->bits, (int)from->lanes);
  nib_device *device = NULL, *pinned_by = NULL;
  status = find_device(rt, from, &device, &pinned_by);
  if (status != NIB_OK) return status;
  int64_t strides[NIB_MAX_NDIM];
  bool has_strides = copy_strides(from, strides);
  nib_wrap_desc desc = { .dtype = elements[i].dtype,
                         .ndim = from->ndim,
                         .shape = from->shape,
                         .stride = has_strides ? strides : NULL,
                         .data = from->data ? (char *)from->data + from->byte_offset : NULL,
                         .read_only = managed->flags & NIB_DLPACK_READ_ONLY,
                         .release = call_deleter,
                         .user = managed };
  return nib_wrap(device, pinned_by, "from_dlpack", &desc, out);
}

/* ---- To others ------------------------------------------------------------------------------------------------- */

struct nib_export {
  struct nib_return returned;
  struct DLManagedTensorVersioned managed;
  struct nib_storage *storage;
  int64_t shape[NIB_MAX_NDIM], stride[NIB_MAX_NDIM];
};

/* The caller holds the lock, or no other thread can have it. */
static void destroy(nib_runtime *rt, struct nib_export *export) {
  export->storage->exports--;
  nib_storage_release(export->storage);
  nib_free(rt, export, sizeof *export);
}

static void take_back(nib_runtime *rt, struct nib_return *self) {
  destroy(rt, (struct nib_export *)self);
  nib_handle_removed(rt);
}

/* The deleter, called on any thread. Before the runtime is closed, the runtime's thread does the rest. */
static void come_back(struct DLManagedTensorVersioned *self) {
  struct nib_export *export = self->manager_ctx;
  nib_runtime *rt = export->storage->deferred.device->runtime;
  if (nib_is_forked(rt)) return;
  nib_exports_lock(rt);
  bool closed = rt->closed;
  if (closed) {
    destroy(rt, export);
  } else {
    export->returned = (struct nib_return){ rt->returned, take_back };
    __atomic_store_n(&rt->returned, &export->returned, __ATOMIC_RELEASE);
  }
  nib_exports_unlock(rt);
  if (closed) nib_handle_removed(rt);
}

/* Orders the consumer's work after all queued work on the tensor, reads included, since the consumer may write. */
static nib_status order(nib_tensor *tensor, intptr_t consumer_stream) {
  nib_device *device = nib_tensor_device(tensor);
  struct nib_uses *uses = &tensor->storage->deferred.uses;
  if (consumer_stream == -1) return NIB_OK;
  nib_status status = nib_check_not_capturing(device, "to_dlpack");
  if (status == NIB_OK && !device->backend->host_memory)
    return device->backend->foreign->lead_consumer(device, consumer_stream, uses);
  if (status == NIB_OK) status = nib_tensor_wait(tensor, NIB_UNLIMITED);
  return status == NIB_OK ? nib_uses_wait(device, uses, false, NIB_UNLIMITED) : status;
}

nib_status nib_tensor_to_dlpack(nib_tensor *tensor, intptr_t consumer_stream, struct DLManagedTensorVersioned **out) {
  nib_device *device = nib_tensor_device(tensor);
  nib_runtime *rt = device->runtime;
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status != NIB_OK) return status;
  struct nib_export *export = nib_allocate_zero(rt, sizeof *export);
  if (!export) return nib_fail_memory(rt, "to_dlpack", sizeof *export);
  status = order(tensor, consumer_stream);
  if (status != NIB_OK) {
    nib_free(rt, export, sizeof *export);
    return status;
  }
  size_t i = 0;
  while (elements[i].dtype != tensor->dtype) i++;
  for (int32_t k = 0; k < tensor->ndim; k++) {
    export->shape[k] = tensor->shape[k];
    export->stride[k] = tensor->stride[k];
  }
  bool pinned = tensor->storage->pinned_by != NULL;
  export->managed = (struct DLManagedTensorVersioned){
    .major = NIB_DLPACK_MAJOR,
    .minor = NIB_DLPACK_MINOR,
    .manager_ctx = export,
    .deleter = come_back,
    .flags = tensor->storage->read_only ? NIB_DLPACK_READ_ONLY : 0,
    .tensor = { .data = nib_tensor_numel(tensor) > 0 ? nib_tensor_data(tensor) : NULL,
                .device_type = pinned                         ? NIB_DLPACK_CUDA_HOST
                               : device->backend->host_memory ? NIB_DLPACK_CPU
                                                              : NIB_DLPACK_CUDA,
                .device_id = device->backend->host_memory ? 0 : (int32_t)(device - rt->devices) - 1,
                .ndim = tensor->ndim,
                .code = elements[i].code,
                .bits = elements[i].bits,
                .lanes = elements[i].lanes,
                .shape = export->shape,
                .strides = export->stride },
  };
  export->storage = tensor->storage;
  export->storage->exports++;
  nib_storage_retain(tensor->storage);
  nib_handle_added(rt);
  *out = &export->managed;
  return NIB_OK;
}
