/* An allocator that keeps a list of a runtime's memory. Lua can free objects without calling their finalizers, for
 * example objects that a finalizer creates while the state closes. The list then still frees their memory. */
#ifndef NIB_BLOCKS_H
#define NIB_BLOCKS_H

#include <stddef.h>

struct nib_lua_block;

typedef struct nib_lua_blocks {
  struct nib_lua_block *first;
  void *(*allocate)(void *user, void *pointer, size_t old_size,
                    size_t new_size); /* as in nib_config; NULL: the C library's */
  void *user;
} nib_lua_blocks;

/* As nib_config's `allocate`. */
void *nib_lua_blocks_allocate(nib_lua_blocks *blocks, void *pointer, size_t old_size, size_t new_size);
void nib_lua_blocks_free(nib_lua_blocks *blocks);

#endif
