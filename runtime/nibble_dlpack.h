/* DLPack's exchange structure, version 1: the part of its binary interface that nibble.h uses, for hosts without
 * DLPack's own header. A host that has that one (https://github.com/dmlc/dlpack, dlpack.h from version 1.0 on) includes
 * it, before this or instead: the structures are the same in memory, with other names for their fields. */
#ifndef NIBBLE_DLPACK_H
#define NIBBLE_DLPACK_H

#include <stdint.h>

enum { NIB_DLPACK_MAJOR = 1, NIB_DLPACK_MINOR = 1 };
enum { NIB_DLPACK_READ_ONLY = 1, NIB_DLPACK_COPIED = 2, NIB_DLPACK_PADDED = 4 }; /* bits of `flags` */
enum {
  NIB_DLPACK_CPU = 1,
  NIB_DLPACK_CUDA = 2,
  NIB_DLPACK_CUDA_HOST = 3
};     /* device types; of pinned memory the last */
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
  uint8_t code, bits; /* of an element, which has `lanes` numbers of `bits` bits */
  uint16_t lanes;
  int64_t *shape, *strides; /* in elements */
  uint64_t byte_offset;     /* of the first element from `data` */
};

#ifndef DLPACK_DLPACK_H_ /* DLPack's own header is not there */
struct DLManagedTensorVersioned {
  uint32_t major, minor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self); /* may be NULL */
  uint64_t flags;
  struct nib_dlpack_tensor tensor;
};
#endif

#endif
