/* DLPack's exchange structure, version 1: the part of its binary interface that is used here, for those without its header. */
#ifndef NIB_DLPACK_H
#define NIB_DLPACK_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1, DLPACK_MINOR = 1 };
enum { DLPACK_READ_ONLY = 1, DLPACK_COPIED = 2, DLPACK_PADDED = 4 };  /* bits of `flags` */
enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_CUDA_HOST = 3 };        /* device types; of pinned memory the last */
enum { DLPACK_INT = 0, DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_BOOL = 6, DLPACK_E4M3FN = 10, DLPACK_E2M1FN = 17 };

struct dlpack_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits; /* of an element, which has `lanes` numbers of `bits` bits */
  uint16_t lanes;
  int64_t *shape, *strides; /* in elements */
  uint64_t byte_offset;     /* of the first element from `data` */
};

struct DLManagedTensorVersioned {
  uint32_t major, minor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self); /* may be NULL */
  uint64_t flags;
  struct dlpack_tensor tensor;
};

#endif
