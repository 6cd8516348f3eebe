/* A process with several nibbles: plugins PLUGIN [PLUGIN ...] LIBRARY. Each is its own, whatever the others do; the
 * shared library is loaded first, where all others could find its names. */
#include <dlfcn.h>

#include "host.h"

typedef const void *open_function(void);
typedef double use_function(double value);
typedef void close_function(void);

static void *find(void *handle, const char *name) {
  void *symbol = dlsym(handle, name);
  CHECK(symbol);
  return symbol;
}

int main(int argc, char **argv) {
  CHECK(argc > 3);
  void *handles[8] = { 0 };
  const void *nibbles[8] = { 0 };
  int count = argc - 2;
  void *library = dlopen(argv[argc - 1], RTLD_NOW | RTLD_GLOBAL);
  if (!library) fprintf(stderr, "%s\n", dlerror());
  CHECK(library && count < 8);
  nibbles[count] = find(library, "nib_version");
  for (int i = 0; i < count; i++) {
    handles[i] = dlopen(argv[i + 1], RTLD_NOW | RTLD_GLOBAL);
    if (!handles[i]) fprintf(stderr, "%s\n", dlerror());
    CHECK(handles[i]);
    nibbles[i] = ((open_function *)(uintptr_t)find(handles[i], "plugin_open"))();
    CHECK(nibbles[i]);
  }
  for (int i = 0; i <= count; i++)
    for (int j = 0; j < i; j++) CHECK(nibbles[i] != nibbles[j]);
  for (int i = 0; i < count; i++) {
    for (int j = i; j < count; j++)
      CHECK(((use_function *)(uintptr_t)find(handles[j], "plugin_use"))(j + 0.5) == j + 0.5);
    ((close_function *)(uintptr_t)find(handles[i], "plugin_close"))();
  }
  return 0;
}
