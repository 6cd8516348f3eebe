/* User kernels on the CUDA device: the driver loads modules, NVRTC compiles sources. */
#include <dlfcn.h>
#include <nvrtc.h>
#include <stdio.h>
#include <string.h>

#include "device.h"

static uint64_t number_at(const unsigned char *image, size_t at, int bytes) {
  uint64_t number = 0;
  for (int i = bytes; i-- > 0;) number = number << 8 | image[at + (size_t)i];
  return number;
}

/* Whether `count` items of `size` bytes at offset `at` are inside the image. */
static bool inside(uint64_t at, uint64_t count, uint64_t size, size_t bytes) {
  return at <= bytes && (count == 0 || size <= (bytes - at) / count);
}

/* Whether the image has all tables and sections of the cubin. */
static bool is_whole_elf(const unsigned char *image, size_t bytes) {
  enum { HEADER = 64, SECTION = 64, SEGMENT = 56, NO_BITS = 8 };
  if (bytes < HEADER || image[4] != 2 /* 64 bits */) return false;
  uint64_t segments = number_at(image, 32, 8), sections = number_at(image, 40, 8);
  uint64_t segment_count = number_at(image, 56, 2), section_count = number_at(image, 60, 2);
  if ((segment_count && number_at(image, 54, 2) != SEGMENT) || (section_count && number_at(image, 58, 2) != SECTION))
    return false;
  if (!inside(segments, segment_count, SEGMENT, bytes) || !inside(sections, section_count, SECTION, bytes))
    return false;
  for (uint64_t i = 0; i < section_count; i++) {
    size_t section = (size_t)(sections + i * SECTION);
    if (number_at(image, section + 4, 4) != NO_BITS &&
        !inside(number_at(image, section + 24, 8), 1, number_at(image, section + 32, 8), bytes))
      return false;
  }
  return true;
}

/* Whether the image is complete. The driver gets no length and trusts the offsets in the image, so check them first. */
static bool is_code(const unsigned char *image, size_t bytes) {
  enum { FATBIN_HEADER = 16 };
  if (bytes >= 4 && memcmp(image, "\177ELF", 4) == 0) return is_whole_elf(image, bytes);
  if (bytes >= FATBIN_HEADER && memcmp(image, "\x50\xED\x55\xBA", 4) == 0)
    return number_at(image, 6, 2) >= FATBIN_HEADER && inside(number_at(image, 6, 2), 1, number_at(image, 8, 8), bytes);
  size_t length = strlen((const char *)image); /* zeros after the text are allowed */
  for (size_t i = length; i < bytes; i++)
    if (image[i] != 0) return false;
  return strstr((const char *)image, ".version") != NULL;
}

nib_status nib_cuda_module_load(nib_device *device, const void *image, size_t bytes, void **out) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!is_code(image, bytes))
    return nib_fail(device->runtime, NIB_INVALID,
                    "module: image: expected PTX, or a whole cubin or fatbin, got %zu other bytes", bytes);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  char log[4096] = "";
  CUjit_option options[] = { CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES };
  void *values[] = { log, (void *)(uintptr_t)sizeof log };
  CUmodule module = NULL;
  CUresult result = cuda->driver->ModuleLoadDataEx(&module, image, 2, options, values);
  nib_cuda_leave(device);
  *out = module;
  if (result == CUDA_SUCCESS || !log[0]) return nib_cuda_check(device, result, "cuModuleLoadDataEx");
  return nib_fail(device->runtime, NIB_INVALID,
                  "module: image: expected code for this GPU, got this error of the driver: %.800s", log);
}

void nib_cuda_module_unload(nib_device *device, void *module) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost || !nib_cuda_enter(device)) return;
  cuda->driver->ModuleUnload(module);
  nib_cuda_leave(device);
}

nib_status nib_cuda_function_find(nib_device *device, void *module, const char *name, void **function,
                                  nib_kernel_attributes *attributes, struct nib_params_layout *layout) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUfunction found = NULL;
  CUresult result = driver->ModuleGetFunction(&found, module, name);
  const struct {
    CUfunction_attribute attribute;
    int32_t *value;
  } list[] = {
    { CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &attributes->max_threads },
    { CU_FUNC_ATTRIBUTE_NUM_REGS, &attributes->registers },
    { CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &attributes->shared_bytes },
    { CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, &attributes->constant_bytes },
    { CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, &attributes->local_bytes },
    { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &attributes->max_dynamic_shared_bytes },
    { CU_FUNC_ATTRIBUTE_PTX_VERSION, &attributes->ptx_version },
    { CU_FUNC_ATTRIBUTE_BINARY_VERSION, &attributes->binary_version },
  };
  for (size_t i = 0; result == CUDA_SUCCESS && i < sizeof list / sizeof *list; i++)
    result = driver->FuncGetAttribute(list[i].value, list[i].attribute, found);
  /* The driver does not return the number of parameters. Ask for one after the other until it returns an error. */
  layout->count = driver->FuncGetParamInfo ? 0 : -1;
  size_t offset, size;
  while (result == CUDA_SUCCESS && layout->count >= 0 && layout->count <= NIB_MAX_ARGUMENTS) {
    CUresult told = driver->FuncGetParamInfo(found, (size_t)layout->count, &offset, &size);
    if (told == CUDA_ERROR_INVALID_VALUE) break;
    result = told;
    if (result == CUDA_SUCCESS && layout->count < NIB_MAX_ARGUMENTS) {
      layout->offset[layout->count] = offset;
      layout->bytes[layout->count] = size;
    }
    layout->count++;
  }
  nib_cuda_leave(device);
  *function = found;
  if (result == CUDA_ERROR_NOT_FOUND)
    return nib_fail(device->runtime, NIB_INVALID,
                    "module:kernel: name: expected a kernel of the module (extern \"C\" or mangled), got \"%.100s\"",
                    name);
  if (result == CUDA_SUCCESS && layout->count > NIB_MAX_ARGUMENTS)
    return nib_fail(device->runtime, NIB_INVALID,
                    "module:kernel: name: expected a kernel with at most %d parameters, got \"%.100s\"",
                    NIB_MAX_ARGUMENTS, name);
  return nib_cuda_check(device, result, "cuModuleGetFunction");
}

/* ---- NVRTC ----------------------------------------------------------------------------------------------------- */

struct nvrtc {
  void *library;
  __typeof__(nvrtcCreateProgram) *create;
  __typeof__(nvrtcDestroyProgram) *destroy;
  __typeof__(nvrtcCompileProgram) *compile;
  __typeof__(nvrtcGetCUBINSize) *cubin_size;
  __typeof__(nvrtcGetCUBIN) *cubin;
  __typeof__(nvrtcGetProgramLogSize) *log_size;
  __typeof__(nvrtcGetProgramLog) *log;
  __typeof__(nvrtcGetErrorString) *error;
};

static nib_status open_nvrtc(nib_runtime *rt, struct nvrtc *nvrtc) {
  static const char *const names[] = { "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so",
                                       "/usr/local/cuda/lib64/libnvrtc.so" };
  memset(nvrtc, 0, sizeof *nvrtc);
  for (size_t i = 0; !nvrtc->library && i < sizeof names / sizeof *names; i++)
    nvrtc->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  if (!nvrtc->library)
    return nib_fail(rt, NIB_UNAVAILABLE,
                    "compile: NVRTC is not installed (libnvrtc.so.13 not found; it is part of the CUDA Toolkit)");
  const struct {
    void *pointer;
    const char *name;
  } list[] = {
    { &nvrtc->create, "nvrtcCreateProgram" },   { &nvrtc->destroy, "nvrtcDestroyProgram" },
    { &nvrtc->compile, "nvrtcCompileProgram" }, { &nvrtc->cubin_size, "nvrtcGetCUBINSize" },
    { &nvrtc->cubin, "nvrtcGetCUBIN" },         { &nvrtc->log_size, "nvrtcGetProgramLogSize" },
    { &nvrtc->log, "nvrtcGetProgramLog" },      { &nvrtc->error, "nvrtcGetErrorString" },
  };
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
    void *symbol = dlsym(nvrtc->library, list[i].name);
    if (!symbol) return nib_fail(rt, NIB_UNAVAILABLE, "compile: the NVRTC of this machine lacks %s", list[i].name);
    memcpy(list[i].pointer, &symbol, sizeof symbol);
  }
  return NIB_OK;
}

/* Sets the message to the compiler's log. */
static nib_status fail_with_log(nib_runtime *rt, const struct nvrtc *nvrtc, nvrtcProgram program, nvrtcResult result) {
  size_t size = 0;
  char *log = nvrtc->log_size(program, &size) == NVRTC_SUCCESS && size > 1 ? nib_allocate_zero(rt, size + 1) : NULL;
  if (log) nvrtc->log(program, log);
  nib_status status = nib_fail(rt, NIB_INVALID, "compile: source: expected CUDA C++ that compiles, got %s:\n%s",
                               nvrtc->error(result), log ? log : "");
  nib_free(rt, log, size + 1);
  return status;
}

nib_status nib_cuda_compile(nib_device *device, const char *source, const char *const *options, int32_t option_count,
                            char **image, size_t *bytes) {
  nib_runtime *rt = device->runtime;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nvrtc nvrtc;
  nib_status status = open_nvrtc(rt, &nvrtc);
  if (status != NIB_OK) return status;
  char architecture[32];
  snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d", cuda->compute_capability);
  const char *all[NIB_MAX_ARGUMENTS + 2] = { architecture, "--fmad=false" };
  if (option_count < 0 || option_count > NIB_MAX_ARGUMENTS)
    return nib_fail(rt, NIB_INVALID, "compile: options: expected at most %d, got %d", NIB_MAX_ARGUMENTS,
                    (int)option_count);
  for (int32_t i = 0; i < option_count; i++) all[2 + i] = options[i];
  nvrtcProgram program = NULL;
  nvrtcResult result =
    nvrtc.create(&program, source, "source.cu", nib_cuda_header_count, nib_cuda_header_texts, nib_cuda_header_names);
  if (result != NVRTC_SUCCESS)
    return nib_fail(rt, NIB_MEMORY, "compile: NVRTC: expected success, got %s", nvrtc.error(result));
  result = nvrtc.compile(program, option_count + 2, all);
  if (result != NVRTC_SUCCESS) {
    status = fail_with_log(rt, &nvrtc, program, result);
  } else if ((result = nvrtc.cubin_size(program, bytes)) != NVRTC_SUCCESS || *bytes == 0) {
    *bytes = 0;
    status = nib_fail(rt, NIB_INVALID, "compile: options: expected such as give code for %s, got none (%s)",
                      device->info.name, nvrtc.error(result));
  } else if (!(*image = nib_allocate(rt, *bytes))) {
    status = nib_fail_memory(rt, "compile", *bytes);
  } else if ((result = nvrtc.cubin(program, *image)) != NVRTC_SUCCESS) {
    status = nib_fail(rt, NIB_DEVICE, "compile: NVRTC: expected success, got %s", nvrtc.error(result));
  }
  nvrtc.destroy(&program);
  return status;
}
