/* On the stand-in driver: a sandbox has its GPU open before the first call, which a script's deadline could not end. */
#include <dlfcn.h>

#include "../../bindings/nibble_lua.h"
#include "host.h"

int main(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  int64_t (*live)(const char *kind);
  CHECK(library);
  *(void **)&live = dlsym(library, "nib_standin_live");
  CHECK(live && live("contexts") == 0);

  nib_sandbox *sandbox;
  CHECK(nib_sandbox_create(NULL, &sandbox) == NIB_OK);
  CHECK(live("contexts") == 1);
  static const char code[] = "t = nibble.zeros(4) assert(t.device == 'cuda:0')";
  CHECK_STATUS(NIB_OK, nib_sandbox_runtime(sandbox), nib_sandbox_load(sandbox, "x", code, strlen(code), 10000000));
  nib_sandbox_close(sandbox);
  CHECK(live("contexts") == 0);

  /* A device that is not there is the script's error. */
  setenv("NIBBLE_DEVICE", "cuda:9", 1);
  CHECK(nib_sandbox_create(NULL, &sandbox) == NIB_OK);
  CHECK(nib_sandbox_load(sandbox, "x", code, strlen(code), 10000000) == NIB_SCRIPT);
  CHECK(strstr(nib_sandbox_error(sandbox), "device: expected an available device, got \"cuda:9\""));
  nib_sandbox_close(sandbox);
  return 0;
}
