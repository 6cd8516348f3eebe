/* Memory and work that hosts, other frameworks, APIs and processes share with a runtime. */
#ifndef NIB_INTEROP_H
#define NIB_INTEROP_H

#include "../tensor/tensor.h"

struct nib_semaphore {
  struct nib_deferred deferred;
  void *impl; /* the device's data */
};

/* Creates a tensor on memory that is not nibble's. pinned_by: as in a storage. */
nib_status nib_wrap(nib_device *device, nib_device *pinned_by, const char *operation, const nib_wrap_desc *desc,
                    nib_tensor **out);
/* Refuses devices that cannot share memory by file descriptor. Sets *out to NULL. */
nib_status nib_check_fds(nib_device *device, const char *operation, void *out);

#endif
