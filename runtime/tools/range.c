/* Named ranges for profilers, with NVTX if its library is installed. */
#include <dlfcn.h>
#include <string.h>

#include "tools.h"

/* Finds the library at the first range. Without it a range costs a comparison. */
static struct nib_ranges *find_ranges(nib_runtime *rt) {
  struct nib_ranges *ranges = &rt->ranges;
  if (ranges->searched) return ranges;
  ranges->searched = true;
  /* CUDA 13 has the first, often outside the loader's path; older versions have the second. */
  static const char *const names[] = { "libnvtx3interop.so.1", "libnvToolsExt.so.1",
                                       "/usr/local/cuda/lib64/libnvtx3interop.so.1" };
  void *library = NULL;
  for (size_t i = 0; !library && i < sizeof names / sizeof *names; i++)
    library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  void *push = library ? dlsym(library, "nvtxRangePushA") : NULL,
       *pop = library ? dlsym(library, "nvtxRangePop") : NULL;
  if (!push || !pop) return ranges;
  memcpy(&ranges->push, &push, sizeof push);
  memcpy(&ranges->pop, &pop, sizeof pop);
  return ranges;
}

void nib_range_push(nib_runtime *rt, const char *name) {
  struct nib_ranges *ranges = find_ranges(rt);
  if (ranges->push) ranges->push(name);
  NIB_TELL(rt, NIB_OBSERVED_RANGE_PUSH, .operation = "range", .device = &rt->devices[0], .name = name);
}

void nib_range_pop(nib_runtime *rt) {
  struct nib_ranges *ranges = find_ranges(rt);
  if (ranges->pop) ranges->pop();
  NIB_TELL(rt, NIB_OBSERVED_RANGE_POP, .operation = "range", .device = &rt->devices[0]);
}
