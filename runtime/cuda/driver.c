#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define OLDEST_DRIVER 12000 /* the first that has all these entry points */

static void *find(void *get_proc_address, const char *name, int version) {
  CUdriverProcAddressQueryResult result;
  void *function = NULL;
  PFN_cuGetProcAddress_v12000 get = (PFN_cuGetProcAddress_v12000)get_proc_address;
  return get(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT, &result) == CUDA_SUCCESS ? function : NULL;
}

static bool fail(struct nib_driver *driver, char *reason, size_t size, const char *why, int number) {
  snprintf(reason, size, why, number / 1000, number % 1000 / 10);
  nib_driver_close(driver);
  return false;
}

bool nib_driver_open(struct nib_driver *driver, char *reason, size_t size) {
  memset(driver, 0, sizeof *driver);
  driver->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver->library)
    return fail(driver, reason, size, "no NVIDIA driver on this machine (libcuda.so.1 not found)", 0);
  PFN_cuDriverGetVersion_v2020 get_version = (PFN_cuDriverGetVersion_v2020)dlsym(driver->library, "cuDriverGetVersion");
  void *get = dlsym(driver->library, "cuGetProcAddress_v2");
  CUresult told = get_version ? get_version(&driver->version) : CUDA_ERROR_NOT_FOUND;
  if (told != CUDA_SUCCESS)
    return fail(driver, reason, size, "the NVIDIA driver does not return its version (error %d)", (int)told * 1000);
  if (!get || driver->version < OLDEST_DRIVER)
    return fail(driver, reason, size, "the NVIDIA driver is too old: expected CUDA 12.0 or later, got %d.%d",
                driver->version);
#define X(name, signature)                                                             \
  if (!(driver->name = (PFN_cu##name##_v##signature)find(get, "cu" #name, signature))) \
    return fail(driver, reason, size, "the NVIDIA driver (CUDA %d.%d) lacks cu" #name, driver->version);
  NIB_DRIVER_LIST(X)
#undef X
#define X(name, signature) driver->name = (PFN_cu##name##_v##signature)find(get, "cu" #name, signature);
  NIB_DRIVER_OPTIONAL_LIST(X)
#undef X
  CUresult result = driver->Init(0);
  if (result == CUDA_ERROR_NO_DEVICE)
    return fail(driver, reason, size, "the NVIDIA driver (CUDA %d.%d) finds no GPU (is CUDA_VISIBLE_DEVICES set?)",
                driver->version);
  if (result != CUDA_SUCCESS) {
    const char *text = "unknown error";
    driver->GetErrorString(result, &text);
    snprintf(reason, size, "the NVIDIA driver cannot be initialized: %s", text);
    nib_driver_close(driver);
    return false;
  }
  return true;
}

void nib_driver_close(struct nib_driver *driver) {
  /* Do not unload the library, since the driver has threads and exit handlers. */
  driver->library = NULL;
}
