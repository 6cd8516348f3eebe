/* DLPack's exchange structure, version 1: the part of its binary interface that nibble.h uses, for hosts without
 * DLPack's own header. A host with that header (https://github.com/dmlc/dlpack, dlpack.h from version 1.0 on) includes
 * it before this one, or instead of it: the structures have the same layout, but other names of fields. */
#ifndef NIBBLE_DLPACK_H
#define NIBBLE_DLPACK_H

#include <stdint.h>

enum { NIB_DLPACK_MAJOR = 1, NIB_DLPACK_MINOR = 1 };
enum { NIB_DLPACK_READ_ONLY = 1, NIB_DLPACK_COPIED = 2, NIB_DLPACK_PADDED = 4 }; /* bits of `flags` */
enum {
  NIB_DLPACK_CPU = 1,
  NIB_DLPACK_CUDA = 2,
  NIB_DLPACK_CUDA_HOST = 3
};     /* device types; the last is pinned memory */
enum { /* codes of element types */
       NIB_DLPACK_INT = 0,
       NIB_DLPACK_UINT = 1,
       NIB_DLPACK_FLOAT = 2,
       NIB_DLPACK_BFLOAT = 4,
       NIB_DLPACK_BOOL = 6,
       NIB_DLPACK_E4M3FN = 10,
       NIB_DLPACK_E2M1FN = 17
};

struct nib_dlpack_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits; /* of the type; an element has `lanes` numbers of `bits` bits */
  uint16_t lanes;
  int64_t *shape, *strides; /* in elements */
  uint64_t byte_offset;     /* from `data` to the first element */
};

#ifndef DLPACK_DLPACK_H_ /* DLPack's own header is not included */
struct DLManagedTensorVersioned {
  uint32_t major, minor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self); /* may be NULL */
  uint64_t flags;
  struct nib_dlpack_tensor tensor;
};
#endif

#endif
