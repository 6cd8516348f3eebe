/* The library's entry, GPUs, contexts, modules and functions. */
#define _POSIX_C_SOURCE 200809L
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GPUS 16

/* ---- Finding entries ------------------------------------------------------------------------------------------- */

STANDIN_EXPORT CUresult cuDriverGetVersion(int *version) { return standin_DriverGetVersion(version); }

STANDIN_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                            CUdriverProcAddressQueryResult *found) {
  static const struct {
    const char *name;
    int version;
    void *function;
  } entries[] = {
#define X(name, signature) { "cu" #name, signature, (void *)standin_##name },
    NIB_DRIVER_LIST(X) NIB_DRIVER_OPTIONAL_LIST(X) STANDIN_HOST_LIST(X)
#undef X
  };
  const char *missing = getenv("NIB_STANDIN_MISSING");
  (void)flags;
  *function = NULL;
  if (found) *found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    if (strcmp(entries[i].name, symbol) != 0 || (missing && strcmp(missing, symbol) == 0)) continue;
    bool sufficient = version >= entries[i].version;
    if (found) *found = sufficient ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (!sufficient) return CUDA_ERROR_NOT_FOUND;
    *function = entries[i].function;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

/* ---- Handles --------------------------------------------------------------------------------------------------- */

#define BUCKETS 1024
static struct object *table[BUCKETS];
static uint64_t last_id;

void standin_add(struct object *object, enum live kind, struct context *context) {
  object->id = ++last_id;
  object->kind = kind;
  object->context = context;
  object->next = table[object->id % BUCKETS];
  table[object->id % BUCKETS] = object;
  if (kind != LIVE_CONTEXTS) standin_live[kind]++; /* contexts are counted by their references */
}

void standin_remove(struct object *object) {
  struct object **link = &table[object->id % BUCKETS];
  while (*link != object) link = &(*link)->next;
  *link = object->next;
  if (object->kind != LIVE_CONTEXTS) standin_live[object->kind]--;
}

static uint64_t id_of(const void *handle) { return ((uintptr_t)handle & 0xFFFFFFFFFFFFu) >> 4; }

void *standin_lookup(enum live kind, const void *handle) {
  for (struct object *object = table[id_of(handle) % BUCKETS]; object; object = object->next)
    if (object->kind == kind && standin_handle(object) == handle) return object;
  return NULL;
}

void *standin_find(enum live kind, const void *handle) {
  uint64_t id = id_of(handle);
  void *object = standin_lookup(kind, handle);
  if (!object)
    standin_misuse(CUDA_SUCCESS, "%p is no handle%s", handle,
                   id > 0 && id <= last_id ? " of this kind, or no longer" : "");
  return object;
}

int64_t standin_count_of(const struct context *context, enum live kind) {
  int64_t count = 0;
  for (int i = 0; i < BUCKETS; i++)
    for (struct object *object = table[i]; object; object = object->next)
      count += object->kind == kind && object->context == context;
  return count;
}

/* ---- GPUs ------------------------------------------------------------------------------------------------------ */

static int visible[MAX_GPUS], visible_count;
static struct context contexts[MAX_GPUS];

static void write_uuid(int gpu, char *text, size_t size) {
  snprintf(text, size, "GPU-6e696262-6c65-4000-8000-%012d", gpu);
}

/* As CUDA_VISIBLE_DEVICES says: numbers and beginnings of UUIDs, up to the first that is neither. */
static void find_visible(void) {
  int64_t count = standin_number("NIB_STANDIN_DEVICES", 1);
  const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
  char copy[512], *rest = NULL;
  visible_count = 0;
  if (count > MAX_GPUS) count = MAX_GPUS;
  if (!wanted) {
    for (int i = 0; i < count; i++) visible[visible_count++] = i;
    return;
  }
  snprintf(copy, sizeof copy, "%s", wanted);
  for (char *item = strtok_r(copy, ",", &rest); item && visible_count < MAX_GPUS; item = strtok_r(NULL, ",", &rest)) {
    char *end;
    long gpu = strtol(item, &end, 10);
    if (end == item || *end) {
      char uuid[64];
      for (gpu = 0; gpu < count; gpu++) {
        write_uuid((int)gpu, uuid, sizeof uuid);
        if (strncmp(item, "GPU-", 4) == 0 && strncmp(item, uuid, strlen(item)) == 0) break;
      }
    }
    if (gpu < 0 || gpu >= count) break;
    visible[visible_count++] = (int)gpu;
  }
}

CUresult standin_Init(unsigned int flags) {
  CUresult result = standin_enter("cuInit", CALL_FREE_STANDING);
  if (result != CUDA_SUCCESS) return result;
  find_visible();
  if (flags != 0) return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "flags %u", flags));
  return standin_leave(visible_count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}

CUresult standin_DriverGetVersion(int *version) {
  *version = (int)standin_number("NIB_STANDIN_VERSION", 13000);
  if (standin_is_forked()) return CUDA_SUCCESS; /* it needs no driver that works */
  CUresult result = standin_enter("cuDriverGetVersion", CALL_FREE_STANDING);
  if (result != CUDA_SUCCESS) return result;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_DeviceGetCount(int *count) {
  CUresult result = standin_enter("cuDeviceGetCount", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  *count = visible_count;
  return standin_leave(CUDA_SUCCESS);
}

static CUresult check_device(int device) {
  if (device >= 0 && device < visible_count) return CUDA_SUCCESS;
  return standin_misuse(CUDA_ERROR_INVALID_DEVICE, "device %d of %d", device, visible_count);
}

CUresult standin_DeviceGet(CUdevice *device, int ordinal) {
  CUresult result = standin_enter("cuDeviceGet", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  *device = ordinal;
  return standin_leave(check_device(ordinal));
}

CUresult standin_DeviceGetName(char *name, int size, CUdevice device) {
  CUresult result = standin_enter("cuDeviceGetName", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  snprintf(name, (size_t)size, "Stand-in GPU %d", device >= 0 && device < MAX_GPUS ? visible[device] : -1);
  return standin_leave(check_device(device));
}

/* The digits that write_uuid shows. */
CUresult standin_DeviceGetUuid(CUuuid *uuid, CUdevice device) {
  CUresult result = standin_enter("cuDeviceGetUuid", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  char text[64];
  write_uuid(device >= 0 && device < MAX_GPUS ? visible[device] : 0, text, sizeof text);
  int digits = 0;
  for (const char *c = text + sizeof "GPU-" - 1; *c; c++) {
    if (*c == '-') continue;
    unsigned digit = (unsigned)(*c <= '9' ? *c - '0' : *c - 'a' + 10);
    unsigned char *byte = (unsigned char *)&uuid->bytes[digits / 2];
    *byte = (unsigned char)(digits++ % 2 ? *byte | digit : digit << 4);
  }
  return standin_leave(check_device(device));
}

CUresult standin_DeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  CUresult result = standin_enter("cuDeviceGetAttribute", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  const char *compute = getenv("NIB_STANDIN_COMPUTE");
  int major = 9, minor = 0;
  if (compute) sscanf(compute, "%d.%d", &major, &minor);
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = major; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = minor; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = standin_number("NIB_STANDIN_POOLS", 1) != 0; break;
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
  case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: *value = 1; break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 1 << 20; break;
  default: result = standin_misuse(CUDA_ERROR_INVALID_VALUE, "attribute %d is not played", (int)attribute);
  }
  return standin_leave(result == CUDA_SUCCESS ? check_device(device) : result);
}

CUresult standin_DeviceTotalMem(size_t *bytes, CUdevice device) {
  CUresult result = standin_enter("cuDeviceTotalMem", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  *bytes = (size_t)standin_number("NIB_STANDIN_MEMORY", (int64_t)8 << 30);
  return standin_leave(check_device(device));
}

CUresult standin_DeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  CUresult result = standin_enter("cuDeviceCanAccessPeer", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  *can = device != peer && standin_number("NIB_STANDIN_PEERS", 1) != 0;
  result = check_device(device);
  return standin_leave(result == CUDA_SUCCESS ? check_device(peer) : result);
}

/* ---- Contexts -------------------------------------------------------------------------------------------------- */

void standin_lose(struct context *context, CUresult result) {
  if (context->lost == CUDA_SUCCESS) context->lost = result;
  pthread_cond_broadcast(&standin_progress);
}

CUresult standin_DevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
  CUresult result = standin_enter("cuDevicePrimaryCtxRetain", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  result = check_device(device);
  if (result != CUDA_SUCCESS) return standin_leave(result);
  struct context *context = &contexts[device];
  if (context->lost != CUDA_SUCCESS) return standin_leave(context->lost);
  context->device = device;
  if (context->references++ == 0) standin_add(&context->object, LIVE_CONTEXTS, context);
  standin_live[LIVE_CONTEXTS]++;
  *out = standin_handle(&context->object);
  return standin_leave(CUDA_SUCCESS);
}

static void end_context(struct context *context) {
  standin_remove(&context->object);
  for (enum live kind = LIVE_MODULES; kind < LIVE_CAPTURES; kind++) {
    int64_t count = standin_count_of(context, kind);
    if (count > 0 && !context->lost)
      standin_misuse(CUDA_SUCCESS, "%lld %s are alive", (long long)count, standin_live_names[kind]);
  }
}

static CUresult push(struct context *context) {
  struct thread *thread = &standin_thread;
  if (thread->depth == (int)(sizeof thread->stack / sizeof *thread->stack))
    return standin_misuse(CUDA_ERROR_INVALID_CONTEXT, "%d contexts are pushed", thread->depth);
  thread->stack[thread->depth++] = context;
  standin_live[LIVE_PUSHED]++;
  return CUDA_SUCCESS;
}

CUresult standin_DevicePrimaryCtxRelease(CUdevice device) {
  CUresult result = standin_enter("cuDevicePrimaryCtxRelease", CALL_NO_CONTEXT | CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  result = check_device(device);
  if (result != CUDA_SUCCESS) return standin_leave(result);
  struct context *context = &contexts[device];
  if (context->references == 0)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_CONTEXT, "released more often than retained"));
  standin_live[LIVE_CONTEXTS]--;
  if (--context->references > 0) return standin_leave(CUDA_SUCCESS);
  end_context(context);
  return standin_leave(CUDA_SUCCESS);
}

/* Contexts of the host's beside the primary ones stay in memory: queued work may look at them. */
CUresult standin_CtxCreate(CUcontext *out, unsigned int flags, CUdevice device) {
  CUresult result = standin_enter("cuCtxCreate", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  result = flags != 0 ? CUDA_ERROR_INVALID_VALUE : check_device(device);
  if (result != CUDA_SUCCESS) return standin_leave(result);
  static struct context created[8];
  static int count;
  if (count == (int)(sizeof created / sizeof *created)) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  struct context *context = &created[count++];
  context->device = device;
  standin_add(&context->object, LIVE_CONTEXTS, context);
  standin_live[LIVE_CONTEXTS]++;
  *out = standin_handle(&context->object);
  return standin_leave(push(context));
}

CUresult standin_CtxDestroy(CUcontext handle) {
  CUresult result = standin_enter("cuCtxDestroy", CALL_NO_CONTEXT | CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct context *context = standin_find(LIVE_CONTEXTS, handle);
  if (!context || context->references > 0) return standin_leave(CUDA_ERROR_INVALID_CONTEXT);
  if (standin_current() == context) {
    standin_thread.depth--;
    standin_live[LIVE_PUSHED]--;
  }
  standin_live[LIVE_CONTEXTS]--;
  end_context(context);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_CtxGetDevice(CUdevice *device) {
  CUresult result = standin_enter("cuCtxGetDevice", 0);
  if (result != CUDA_SUCCESS) return result;
  *device = standin_current()->device;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_CtxPushCurrent(CUcontext handle) {
  CUresult result = standin_enter("cuCtxPushCurrent", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  struct context *context = standin_find(LIVE_CONTEXTS, handle);
  return standin_leave(context ? push(context) : CUDA_ERROR_INVALID_CONTEXT);
}

CUresult standin_CtxPopCurrent(CUcontext *out) {
  CUresult result = standin_enter("cuCtxPopCurrent", CALL_NO_CONTEXT | CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  struct context *context = standin_current();
  if (!context) return standin_leave(standin_misuse(CUDA_ERROR_INVALID_CONTEXT, "nothing is pushed"));
  standin_thread.depth--;
  standin_live[LIVE_PUSHED]--;
  if (out) *out = standin_handle(&context->object);
  return standin_leave(CUDA_SUCCESS);
}

/* ---- Modules and functions ------------------------------------------------------------------------------------- */

static const struct kernel kernels[] = {
#define X(symbol, name) { #name, nib_cpu_##name, sizeof(struct nib_##name##_params) },
  NIB_KERNEL_LIST(X)
#undef X
};

/* nib_cuda_append, nib_cuda_append_bfloat16 ... are append. The longest name that fits wins. */
static const struct kernel *kernel_of(const char *name) {
  static const char prefix[] = "nib_cuda_";
  const struct kernel *found = NULL;
  size_t longest = 0;
  if (strncmp(name, prefix, sizeof prefix - 1) != 0) return NULL;
  name += sizeof prefix - 1;
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
    size_t length = strlen(kernels[i].name);
    if (length > longest && strncmp(name, kernels[i].name, length) == 0 && (name[length] == 0 || name[length] == '_')) {
      found = &kernels[i];
      longest = length;
    }
  }
  return found;
}

struct module {
  struct object object;
  struct function *functions;
};

CUresult standin_ModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options,
                                  void **values) {
  static const unsigned char fatbin[] = { 0x50, 0xED, 0x55, 0xBA }, elf[] = { 0x7F, 'E', 'L', 'F' };
  CUresult result = standin_enter("cuModuleLoadDataEx", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  (void)count, (void)options, (void)values;
  if (!image || (memcmp(image, fatbin, 4) != 0 && memcmp(image, elf, 4) != 0 && !strchr("./\n", *(const char *)image)))
    return standin_leave(CUDA_ERROR_INVALID_IMAGE); /* a user's, maybe: no misuse */
  if (!standin_number("NIB_STANDIN_IMAGES", 1)) return standin_leave(CUDA_ERROR_NO_BINARY_FOR_GPU);
  struct module *module = calloc(1, sizeof *module);
  if (!module) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  standin_add(&module->object, LIVE_MODULES, standin_current());
  *out = standin_handle(&module->object);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_ModuleUnload(CUmodule handle) {
  CUresult result = standin_enter("cuModuleUnload", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct module *module = standin_find(LIVE_MODULES, handle);
  if (!module) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  while (module->functions) {
    struct function *function = module->functions;
    module->functions = function->next;
    standin_remove(&function->object);
    free(function);
  }
  standin_remove(&module->object);
  free(module);
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_ModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
  CUresult result = standin_enter("cuModuleGetFunction", 0);
  if (result != CUDA_SUCCESS) return result;
  struct module *module = standin_find(LIVE_MODULES, handle);
  if (!module) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  const struct kernel *kernel = kernel_of(name);
  if (!kernel) return standin_leave(CUDA_ERROR_NOT_FOUND);
  struct function *function = calloc(1, sizeof *function);
  if (!function) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  standin_add(&function->object, LIVE_FUNCTIONS, standin_current());
  function->module = module;
  function->kernel = kernel;
  function->next = module->functions;
  module->functions = function;
  *out = standin_handle(&function->object);
  return standin_leave(CUDA_SUCCESS);
}

/* What each function declares, and how much more a launch may ask for. */
static int static_shared(void) { return (int)standin_number("NIB_STANDIN_SHARED", 0); }
static int dynamic_shared(const struct function *function) {
  return function->shared_bytes ? function->shared_bytes : (48 << 10) - static_shared();
}

CUresult standin_FuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
  CUresult result = standin_enter("cuFuncGetAttribute", 0);
  if (result != CUDA_SUCCESS) return result;
  struct function *function = standin_find(LIVE_FUNCTIONS, handle);
  if (!function) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
  case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = static_shared(); break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = dynamic_shared(function); break;
  case CU_FUNC_ATTRIBUTE_PTX_VERSION:
  case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
  default: *value = 0;
  }
  return standin_leave(CUDA_SUCCESS);
}

/* Every kernel of the project takes one struct. */
CUresult standin_FuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
  CUresult result = standin_enter("cuFuncGetParamInfo", 0);
  if (result != CUDA_SUCCESS) return result;
  struct function *function = standin_find(LIVE_FUNCTIONS, handle);
  if (!function) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (index > 0) return standin_leave(CUDA_ERROR_INVALID_VALUE);
  *offset = 0;
  *size = function->kernel->bytes;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_FuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  CUresult result = standin_enter("cuFuncSetAttribute", 0);
  if (result != CUDA_SUCCESS) return result;
  struct function *function = standin_find(LIVE_FUNCTIONS, handle);
  if (!function) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value < 0 || value > (227 << 10) - static_shared())
      return standin_leave(CUDA_ERROR_INVALID_VALUE); /* no misuse: how to ask */
    function->shared_bytes = value;
  }
  return standin_leave(CUDA_SUCCESS);
}

/* The parameters as one buffer: kernelParams would need to know how many there are. */
static const void *param_buffer(void **extra, size_t *bytes) {
  const void *data = NULL;
  *bytes = 0;
  for (int i = 0; extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) data = extra[i + 1];
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) *bytes = *(size_t *)extra[i + 1];
  }
  return data;
}

CUresult standin_LaunchKernel(CUfunction handle, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                              unsigned int by, unsigned int bz, unsigned int shared, CUstream stream_handle,
                              void **params, void **extra) {
  CUresult result = standin_enter("cuLaunchKernel", 0);
  if (result != CUDA_SUCCESS) return result;
  struct function *function = standin_find(LIVE_FUNCTIONS, handle);
  struct stream *stream = standin_stream(stream_handle);
  if (!function || !stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (function->object.context != stream->object.context || stream->object.context != standin_current())
    return standin_leave(
      standin_misuse(CUDA_ERROR_INVALID_HANDLE, "function, stream and current context do not belong together"));
  size_t bytes;
  const void *data = param_buffer(extra, &bytes);
  if (params && !extra) { /* one struct by value */
    data = params[0];
    bytes = function->kernel->bytes;
  }
  if (!data || bytes != function->kernel->bytes)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "%s: %zu bytes of parameters, not %zu",
                                        function->kernel->name, bytes, function->kernel->bytes));
  uint64_t threads = (uint64_t)bx * by * bz;
  if (gx == 0 || gy == 0 || gz == 0 || threads == 0 || threads > 1024 || bx > 1024 || by > 1024 || bz > 64 ||
      gx > 0x7FFFFFFF || gy > 65535 || gz > 65535 || shared > (unsigned)dynamic_shared(function))
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE,
                                        "%s: grid {%u, %u, %u}, block {%u, %u, %u}, %u bytes shared",
                                        function->kernel->name, gx, gy, gz, bx, by, bz, shared));
  struct op op = { .kind = OP_KERNEL, .kernel = function->kernel, .bytes = bytes, .data = malloc(bytes) };
  if (!op.data) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  memcpy(op.data, data, bytes);
  return standin_leave(standin_submit(stream, &op));
}
