#include "blocks.h"

#include <stdint.h>
#include <stdlib.h>

struct nib_lua_block {
  struct nib_lua_block *next, *previous;
  size_t size;
  size_t padding; /* makes the header 32 bytes, so that the memory keeps malloc's alignment */
};

static void *allocate(const nib_lua_blocks *blocks, void *pointer, size_t old_size, size_t new_size) {
  if (blocks->allocate) return blocks->allocate(blocks->user, pointer, old_size, new_size);
  if (new_size > 0) return realloc(pointer, new_size);
  free(pointer);
  return NULL;
}

static void unlink_block(nib_lua_blocks *blocks, struct nib_lua_block *block) {
  if (block->next) block->next->previous = block->previous;
  if (block->previous) block->previous->next = block->next;
  else blocks->first = block->next;
}

static void link_block(nib_lua_blocks *blocks, struct nib_lua_block *block, size_t size) {
  *block = (struct nib_lua_block){ blocks->first, NULL, size, 0 };
  if (block->next) block->next->previous = block;
  blocks->first = block;
}

void *nib_lua_blocks_allocate(nib_lua_blocks *blocks, void *pointer, size_t old_size, size_t new_size) {
  struct nib_lua_block *block = pointer ? (struct nib_lua_block *)pointer - 1 : NULL;
  size_t old_bytes = block ? old_size + sizeof *block : 0;
  if (new_size > SIZE_MAX - sizeof *block) return NULL;
  if (block) unlink_block(blocks, block);
  if (new_size == 0) {
    if (block) allocate(blocks, block, old_bytes, 0);
    return NULL;
  }
  struct nib_lua_block *larger = allocate(blocks, block, old_bytes, sizeof *block + new_size);
  if (larger) link_block(blocks, larger, new_size);
  else if (block) link_block(blocks, block, old_size);
  return larger ? larger + 1 : NULL;
}

void nib_lua_blocks_free(nib_lua_blocks *blocks) {
  while (blocks->first) {
    struct nib_lua_block *block = blocks->first;
    unlink_block(blocks, block);
    allocate(blocks, block, sizeof *block + block->size, 0);
  }
}
