/* Structs of hosts that may grow. A host passes the size of the struct in its header, which may be older or newer than
 * the library. Fields that the host does not have are 0 in the copy. Fields that the library does not have must be 0.
 */
#ifndef NIB_SIZED_H
#define NIB_SIZED_H

#include <stdio.h>
#include <string.h>

#include "nibble_tools.h"

/* `TYPE_least` is the end of the last field of a struct in version 0.2.0, the least size that a host can have. There is
 * no padding after that field, so that later fields never lie in the padding of an older host. */
#define NIB_SIZED(type, last)                                               \
  enum { type##_least = offsetof(type, last) + sizeof(((type *)0)->last) }; \
  _Static_assert(type##_least % _Alignof(type) == 0, #type ": padding behind its last field")

NIB_SIZED(nib_config, streams);
NIB_SIZED(nib_append_desc, v_scale);
NIB_SIZED(nib_materialize_desc, num_pages);
NIB_SIZED(nib_dequantize_desc, output_v);
NIB_SIZED(nib_rope_insert_desc, compress_ratio);
NIB_SIZED(nib_quantize_cache_desc, v_global_sf);
NIB_SIZED(nib_quantized_cache, v_scale);
NIB_SIZED(nib_wrap_desc, user);
NIB_SIZED(nib_import_desc, bytes);
NIB_SIZED(nib_launch_desc, arguments);

/* Copies a host's struct to `own`. If it returns false, `text` is "expected ..., got ...". */
static inline bool nib_sized_read(void *own, size_t own_bytes, size_t least, const void *given, size_t bytes,
                                  char *text, size_t size) {
  memset(own, 0, own_bytes);
  if (!given || bytes < least) {
    snprintf(text, size, given ? "expected at least %zu bytes, got %zu" : "expected a struct of %zu bytes, got NULL",
             least, bytes);
    return false;
  }
  for (size_t i = own_bytes; i < bytes; i++)
    if (((const unsigned char *)given)[i] != 0) {
      snprintf(text, size, "expected 0 in fields that this version (%s) does not have, got %d in byte %zu",
               nib_version(), ((const unsigned char *)given)[i], i);
      return false;
    }
  memcpy(own, given, bytes < own_bytes ? bytes : own_bytes);
  return true;
}

/* Copies `own` to a host's struct. */
static inline void nib_sized_write(void *out, size_t bytes, const void *own, size_t own_bytes) {
  memset(out, 0, bytes);
  memcpy(out, own, bytes < own_bytes ? bytes : own_bytes);
}

#endif
