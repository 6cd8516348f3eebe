/* How the kernels of this folder are launched. NAME_launch.c says which entry of NAME.cu carries out a launch, and over
 * how many threads. Host C: it needs neither CUDA nor its headers. What the launch and the kernel must agree on is in
 * mapping.h. */
#ifndef NIB_CUDA_LAUNCH_H
#define NIB_CUDA_LAUNCH_H

#include <stdbool.h>

#include "mapping.h"

struct nib_cuda_launch {
  int32_t entry;              /* an index of the kernel's entries */
  uint32_t grid[3], block[3]; /* x, y, z; at least 1 each */
  uint32_t shared_bytes;
};

#define NIB_CUDA_MOST_ENTRIES 10

/* One kernel of params.h. */
struct nib_cuda_kernel {
  const void *image; /* what the build made of NAME.cu, for all architectures */
  const char *const *entries;
  int32_t entry_count;
  /* `params` is the kernel's struct of params.h, with pointers of the device: their alignment alone is looked at. Work
   * that is too large for any grid gives sizes that the driver refuses. */
  void (*launch)(const void *params, int32_t multiprocessors, struct nib_cuda_launch *out);
};

/* nib_cuda_NAME, from the file's ENTRIES(X), its function `launch`, and NAME.inc of the build. */
#define NIB_CUDA_ENTRY(function)      function,
#define NIB_CUDA_ENTRY_NAME(function) "nib_cuda_" #function,
#define NIB_CUDA_KERNEL(name)                                                                                     \
  static const char *const entry_names[] = { ENTRIES(NIB_CUDA_ENTRY_NAME) };                                      \
  _Static_assert(sizeof entry_names / sizeof *entry_names <= NIB_CUDA_MOST_ENTRIES, "more entries than allowed"); \
  const struct nib_cuda_kernel nib_cuda_##name = { nib_fatbin_##name, entry_names,                                \
                                                   sizeof entry_names / sizeof *entry_names, launch };

/* ---- Arithmetic of sizes --------------------------------------------------------------------------------------- */

#define NIB_CUDA_MAX_Y 65535 /* blocks along y and z of a grid */

static inline int64_t at_least_1(int64_t value) { return value > 1 ? value : 1; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t pieces(int64_t count, int64_t size) { return at_least_1((count + size - 1) / size); }

/* `count` in equal parts of at most `most`. */
static inline int64_t part(int64_t count, int64_t most) {
  return pieces(at_least_1(count), pieces(count, at_least_1(most)));
}

static inline void set(uint32_t *size, int64_t x, int64_t y, int64_t z) {
  size[0] = x > UINT32_MAX ? UINT32_MAX : (uint32_t)x;
  size[1] = y > UINT32_MAX ? UINT32_MAX : (uint32_t)y;
  size[2] = z > UINT32_MAX ? UINT32_MAX : (uint32_t)z;
}

static inline bool aligned(const void *pointer, uintptr_t bytes) { return (uintptr_t)pointer % bytes == 0; }

static inline bool multiple(int64_t stride, int64_t of) { return stride % of == 0; }

static inline bool paged_aligned(const struct nib_paged *cache, int64_t bytes) {
  return aligned(cache->data, (uintptr_t)bytes) && multiple(cache->page_stride, bytes) &&
         multiple(cache->token_stride, bytes) && multiple(cache->head_stride, bytes);
}

/* Whether slots, pages and entries have 31 bits. */
static inline bool few_slots(int64_t num_pages, int64_t page_size) {
  return num_pages <= INT32_MAX && page_size <= INT32_MAX && num_pages * page_size <= INT32_MAX;
}

/* `count` threads in one dimension. */
static inline void set_linear(struct nib_cuda_launch *g, int64_t count) {
  set(g->block, 256, 1, 1);
  set(g->grid, least(pieces(count, 256), INT32_MAX), 1, 1);
}

#endif
