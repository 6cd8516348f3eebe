/* Host memory, from the allocator of the config or from malloc. */
#include <stdlib.h>
#include <string.h>

#include "own.h"

void *nib_allocate_default(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user, (void)old_size;
  if (new_size == 0) {
    free(pointer);
    return NULL;
  }
  return realloc(pointer, new_size);
}

void *nib_reallocate(nib_runtime *rt, void *pointer, size_t old_bytes, size_t new_bytes) {
  return rt->config.allocate(rt->config.user, pointer, old_bytes, new_bytes);
}

void *nib_allocate(nib_runtime *rt, size_t bytes) { return nib_reallocate(rt, NULL, 0, bytes); }

void *nib_allocate_zero(nib_runtime *rt, size_t bytes) {
  void *pointer = nib_allocate(rt, bytes);
  if (pointer) memset(pointer, 0, bytes);
  return pointer;
}

void nib_free(nib_runtime *rt, void *pointer, size_t bytes) {
  if (pointer) nib_reallocate(rt, pointer, bytes, 0);
}
