/* A runtime's memory as a list, since Lua can free an object without its finalizer: near the end of the stack, and what
 * finalizers make while a state closes. Whoever closes the runtime frees what is left. */
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

/* Like nib_config's function. */
void *nib_lua_blocks_allocate(nib_lua_blocks *blocks, void *pointer, size_t old_size, size_t new_size);
void nib_lua_blocks_free(nib_lua_blocks *blocks);

#endif
