/* Development-time proof that a GPU's memory and timeline semaphores are shared with a real Vulkan device; no part of
 * the product and of no spec (spec/embedding/external.c is their stand-in). By hand, on a machine with a GPU, its
 * Vulkan driver and Vulkan's headers (Debian: libvulkan-dev; the loader is found at run time): cc -std=c11
 * -D_GNU_SOURCE -Iruntime -o vulkan spec/support/vulkan.c build/release/libnibble.a -lm -ldl -lpthread && ./vulkan
 * First a buffer of Vulkan's: filled by Vulkan, read by nibble's operations after a semaphore wait, written by them,
 * and read back by Vulkan after their signal; then one of nibble's, which Vulkan imports. Every byte must be what the
 * CPU device makes of the same input. Exit status 0: all bytes are equal; 77: it could not be tried, and why; 1:
 * something is wrong. */
#include <dlfcn.h>
#include <unistd.h>

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

#include "host/host.h"

#define VK_LIST(X)                             \
  X(CreateInstance)                            \
  X(EnumeratePhysicalDevices)                  \
  X(GetPhysicalDeviceProperties2)              \
  X(GetPhysicalDeviceMemoryProperties)         \
  X(GetPhysicalDeviceQueueFamilyProperties)    \
  X(EnumerateDeviceExtensionProperties)        \
  X(GetPhysicalDeviceExternalBufferProperties) \
  X(GetPhysicalDeviceFeatures2)                \
  X(CreateDevice)                              \
  X(GetDeviceQueue)                            \
  X(CreateBuffer)                              \
  X(GetBufferMemoryRequirements)               \
  X(AllocateMemory)                            \
  X(BindBufferMemory)                          \
  X(MapMemory)                                 \
  X(GetMemoryFdKHR)                            \
  X(GetSemaphoreFdKHR)                         \
  X(CreateSemaphore)                           \
  X(WaitSemaphores)                            \
  X(CreateCommandPool)                         \
  X(AllocateCommandBuffers)                    \
  X(BeginCommandBuffer)                        \
  X(EndCommandBuffer)                          \
  X(CmdFillBuffer)                             \
  X(CmdCopyBuffer)                             \
  X(CmdPipelineBarrier)                        \
  X(QueueSubmit)                               \
  X(DeviceWaitIdle)                            \
  X(DestroyBuffer)                             \
  X(FreeMemory)                                \
  X(DestroySemaphore)                          \
  X(DestroyCommandPool)                        \
  X(DestroyDevice)                             \
  X(DestroyInstance)

static struct {
#define X(name) PFN_vk##name name;
  VK_LIST(X)
#undef X
  VkInstance instance;
  VkPhysicalDevice physical;
  VkDevice device;
  VkQueue queue;
  uint32_t family;
  VkCommandPool pool;
} vk;

static void skip(const char *why) {
  printf("skip: %s\n", why);
  exit(77);
}

#define VK(call)                                                                   \
  do {                                                                             \
    VkResult result_ = (call);                                                     \
    if (result_ != VK_SUCCESS) {                                                   \
      fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int)result_); \
      exit(1);                                                                     \
    }                                                                              \
  } while (0)

/* ---- The Vulkan device that is one of nibble's ----------------------------------------------------------------- */

static void find_functions(PFN_vkGetInstanceProcAddr get, VkInstance instance) {
#define X(name) \
  if (!vk.name) vk.name = (PFN_vk##name)get(instance, "vk" #name);
  VK_LIST(X)
#undef X
}

static void print_uuid(const uint8_t *uuid) {
  for (int i = 0; i < 16; i++) printf("%02x", uuid[i]);
}

static nib_device *find_device(nib_runtime *rt) {
  VkPhysicalDevice all[16];
  uint32_t count = 16;
  if (vk.EnumeratePhysicalDevices(vk.instance, &count, all) < 0 || count == 0) skip("Vulkan shows no device");
  for (uint32_t i = 0; i < count; i++) {
    VkPhysicalDeviceIDProperties id = { .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES };
    VkPhysicalDeviceProperties2 properties = { .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, .pNext = &id };
    nib_device *device = NULL;
    vk.GetPhysicalDeviceProperties2(all[i], &properties);
    nib_status status = nib_device_find_uuid(rt, id.deviceUUID, &device);
    printf("Vulkan device %s, UUID ", properties.properties.deviceName);
    print_uuid(id.deviceUUID);
    printf(": %s\n", status == NIB_OK ? nib_device_get_info(device)->name : "not of CUDA");
    if (status != NIB_OK) continue;
    vk.physical = all[i];
    return device;
  }
  skip("no Vulkan device has the UUID of a GPU that CUDA shows");
  return NULL;
}

static void open_device(void) {
  static const char *const needed[] = { "VK_KHR_external_memory_fd", "VK_KHR_external_semaphore_fd" };
  VkExtensionProperties extensions[512];
  VkQueueFamilyProperties families[16];
  uint32_t count = 512, family_count = 16;
  CHECK(vk.EnumerateDeviceExtensionProperties(vk.physical, NULL, &count, extensions) >= 0);
  for (int i = 0; i < 2; i++) {
    bool there = false;
    for (uint32_t k = 0; k < count; k++) there |= strcmp(extensions[k].extensionName, needed[i]) == 0;
    if (!there) skip(needed[i]);
  }
  vk.GetPhysicalDeviceQueueFamilyProperties(vk.physical, &family_count, families);
  while (vk.family < family_count && !(families[vk.family].queueFlags & (VK_QUEUE_GRAPHICS_BIT | VK_QUEUE_COMPUTE_BIT)))
    vk.family++;
  if (vk.family == family_count) skip("no queue that copies");
  VkPhysicalDeviceTimelineSemaphoreFeatures timeline = {
    .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_TIMELINE_SEMAPHORE_FEATURES
  };
  VkPhysicalDeviceFeatures2 features = { .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, .pNext = &timeline };
  vk.GetPhysicalDeviceFeatures2(vk.physical, &features);
  if (!timeline.timelineSemaphore) skip("no timeline semaphores");
  VkDeviceQueueCreateInfo queue = { .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
                                    .queueFamilyIndex = vk.family,
                                    .queueCount = 1,
                                    .pQueuePriorities = (float[]){ 1 } };
  VkDeviceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                              .pNext = &timeline,
                              .queueCreateInfoCount = 1,
                              .pQueueCreateInfos = &queue,
                              .enabledExtensionCount = 2,
                              .ppEnabledExtensionNames = needed };
  VK(vk.CreateDevice(vk.physical, &info, NULL, &vk.device));
  vk.GetDeviceQueue(vk.device, vk.family, 0, &vk.queue);
  VkCommandPoolCreateInfo pool = { .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO, .queueFamilyIndex = vk.family };
  VK(vk.CreateCommandPool(vk.device, &pool, NULL, &vk.pool));
}

/* ---- Buffers --------------------------------------------------------------------------------------------------- */

struct buffer {
  VkBuffer handle;
  VkDeviceMemory memory;
  VkDeviceSize size; /* of the memory */
  void *mapped;
};

static uint32_t memory_type(uint32_t bits, VkMemoryPropertyFlags flags) {
  VkPhysicalDeviceMemoryProperties all;
  vk.GetPhysicalDeviceMemoryProperties(vk.physical, &all);
  for (uint32_t i = 0; i < all.memoryTypeCount; i++)
    if (bits & 1u << i && (all.memoryTypes[i].propertyFlags & flags) == flags) return i;
  skip("no memory of the kind");
  return 0;
}

enum kind { STAGING, EXPORTED, DEDICATED, IMPORTED };

/* IMPORTED: on the memory of `fd`, which is Vulkan's from then on. */
static struct buffer make_buffer(enum kind kind, VkDeviceSize bytes, int fd, VkDeviceSize fd_bytes) {
  const VkBufferUsageFlags usage = VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  const VkExternalMemoryHandleTypeFlagBits type = VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT;
  struct buffer b = { 0 };
  VkExternalMemoryBufferCreateInfo external = { .sType = VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO,
                                                .handleTypes = type };
  VkBufferCreateInfo info = { .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
                              .pNext = kind == STAGING ? NULL : &external,
                              .size = bytes,
                              .usage = usage };
  if (kind != STAGING) {
    VkPhysicalDeviceExternalBufferInfo ask = { .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_EXTERNAL_BUFFER_INFO,
                                               .usage = usage,
                                               .handleType = type };
    VkExternalBufferProperties answer = { .sType = VK_STRUCTURE_TYPE_EXTERNAL_BUFFER_PROPERTIES };
    vk.GetPhysicalDeviceExternalBufferProperties(vk.physical, &ask, &answer);
    VkExternalMemoryFeatureFlags can = answer.externalMemoryProperties.externalMemoryFeatures;
    if (!(can & VK_EXTERNAL_MEMORY_FEATURE_EXPORTABLE_BIT)) skip("Vulkan does not export buffers' memory");
    if (kind == IMPORTED && !(can & VK_EXTERNAL_MEMORY_FEATURE_IMPORTABLE_BIT))
      skip("Vulkan does not import buffers' memory");
    if (can & VK_EXTERNAL_MEMORY_FEATURE_DEDICATED_ONLY_BIT && kind != DEDICATED)
      skip("Vulkan shares dedicated memory alone");
  }
  VK(vk.CreateBuffer(vk.device, &info, NULL, &b.handle));
  VkMemoryRequirements needs;
  vk.GetBufferMemoryRequirements(vk.device, b.handle, &needs);
  b.size = kind == IMPORTED ? fd_bytes : needs.size;
  CHECK(b.size >= needs.size);
  VkMemoryDedicatedAllocateInfo dedicated = { .sType = VK_STRUCTURE_TYPE_MEMORY_DEDICATED_ALLOCATE_INFO,
                                              .buffer = b.handle };
  VkExportMemoryAllocateInfo export = { .sType = VK_STRUCTURE_TYPE_EXPORT_MEMORY_ALLOCATE_INFO,
                                        .pNext = kind == DEDICATED ? &dedicated : NULL,
                                        .handleTypes = type };
  VkImportMemoryFdInfoKHR import = { .sType = VK_STRUCTURE_TYPE_IMPORT_MEMORY_FD_INFO_KHR,
                                     .handleType = type,
                                     .fd = fd };
  VkMemoryPropertyFlags flags = kind == STAGING
                                  ? VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
                                  : VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
  VkMemoryAllocateInfo allocate = { .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
                                    .allocationSize = b.size,
                                    .pNext = kind == STAGING    ? NULL
                                             : kind == IMPORTED ? (void *)&import
                                                                : &export,
                                    .memoryTypeIndex = memory_type(needs.memoryTypeBits, flags) };
  VK(vk.AllocateMemory(vk.device, &allocate, NULL, &b.memory));
  VK(vk.BindBufferMemory(vk.device, b.handle, b.memory, 0));
  if (kind == STAGING) VK(vk.MapMemory(vk.device, b.memory, 0, VK_WHOLE_SIZE, 0, &b.mapped));
  return b;
}

static void free_buffer(struct buffer b) {
  vk.DestroyBuffer(vk.device, b.handle, NULL);
  vk.FreeMemory(vk.device, b.memory, NULL);
}

static int memory_fd(struct buffer b) {
  VkMemoryGetFdInfoKHR info = { .sType = VK_STRUCTURE_TYPE_MEMORY_GET_FD_INFO_KHR,
                                .memory = b.memory,
                                .handleType = VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT };
  int fd = -1;
  VK(vk.GetMemoryFdKHR(vk.device, &info, &fd));
  return fd;
}

/* ---- Semaphores and commands ----------------------------------------------------------------------------------- */

static VkSemaphore make_semaphore(int *fd) {
  VkSemaphoreTypeCreateInfo timeline = { .sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO,
                                         .semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE };
  VkExportSemaphoreCreateInfo export = { .sType = VK_STRUCTURE_TYPE_EXPORT_SEMAPHORE_CREATE_INFO,
                                         .pNext = &timeline,
                                         .handleTypes = VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT };
  VkSemaphoreCreateInfo info = { .sType = VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, .pNext = &export };
  VkSemaphore semaphore;
  VK(vk.CreateSemaphore(vk.device, &info, NULL, &semaphore));
  VkSemaphoreGetFdInfoKHR get = { .sType = VK_STRUCTURE_TYPE_SEMAPHORE_GET_FD_INFO_KHR,
                                  .semaphore = semaphore,
                                  .handleType = VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT };
  VK(vk.GetSemaphoreFdKHR(vk.device, &get, fd));
  return semaphore;
}

static VkCommandBuffer begin(void) {
  VkCommandBufferAllocateInfo info = { .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                       .commandPool = vk.pool,
                                       .commandBufferCount = 1 };
  VkCommandBufferBeginInfo once = { .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
                                    .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT };
  VkCommandBuffer commands;
  VK(vk.AllocateCommandBuffers(vk.device, &info, &commands));
  VK(vk.BeginCommandBuffer(commands, &once));
  return commands;
}

/* Between commands, or (external) a buffer that comes from or goes to the other side. */
static void barrier(VkCommandBuffer commands, struct buffer b, uint32_t from, uint32_t to) {
  VkBufferMemoryBarrier info = { .sType = VK_STRUCTURE_TYPE_BUFFER_MEMORY_BARRIER,
                                 .srcQueueFamilyIndex = from,
                                 .dstQueueFamilyIndex = to,
                                 .srcAccessMask = VK_ACCESS_TRANSFER_WRITE_BIT,
                                 .dstAccessMask = VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
                                 .buffer = b.handle,
                                 .size = VK_WHOLE_SIZE };
  vk.CmdPipelineBarrier(commands, VK_PIPELINE_STAGE_TRANSFER_BIT, VK_PIPELINE_STAGE_TRANSFER_BIT, 0, 0, NULL, 1, &info,
                        0, NULL);
}

static void submit(VkCommandBuffer commands, VkSemaphore semaphore, uint64_t wait, uint64_t signal) {
  VK(vk.EndCommandBuffer(commands));
  VkTimelineSemaphoreSubmitInfo values = { .sType = VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
                                           .waitSemaphoreValueCount = wait > 0,
                                           .pWaitSemaphoreValues = &wait,
                                           .signalSemaphoreValueCount = 1,
                                           .pSignalSemaphoreValues = &signal };
  VkPipelineStageFlags stage = VK_PIPELINE_STAGE_TRANSFER_BIT;
  VkSubmitInfo info = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
                        .pNext = &values,
                        .waitSemaphoreCount = wait > 0,
                        .pWaitSemaphores = &semaphore,
                        .pWaitDstStageMask = &stage,
                        .commandBufferCount = 1,
                        .pCommandBuffers = &commands,
                        .signalSemaphoreCount = 1,
                        .pSignalSemaphores = &semaphore };
  VK(vk.QueueSubmit(vk.queue, 1, &info, VK_NULL_HANDLE));
}

static void await(VkSemaphore semaphore, uint64_t value) {
  VkSemaphoreWaitInfo info = {
    .sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO, .semaphoreCount = 1, .pSemaphores = &semaphore, .pValues = &value
  };
  VK(vk.WaitSemaphores(vk.device, &info, 10000000000u));
}

/* ---- What nibble does: append to a cache, then dequantize it, all inside one block of memory ------------------- */

enum { ROWS = 192, HEADS = 4, DIM = 128, PAGE = 16, PAGES = 12, UNTOUCHED = 4096 };

static const struct part {
  size_t bytes; /* multiples of 256, so that every part is aligned */
  nib_dtype dtype;
  int32_t ndim;
  int64_t shape[5];
} parts[] = {
#define KEY 0 /* and values */
  { ROWS * HEADS * DIM * 2, NIB_BFLOAT16, 3, { ROWS, HEADS, DIM } },
#define SLOTS 1
  { ROWS * 4, NIB_INT32, 1, { ROWS } },
#define DATA 2
  { (size_t)PAGES * 2 * PAGE * HEADS * DIM / 2, NIB_UINT8, 5, { PAGES, 2, PAGE, HEADS, DIM / 2 } },
#define SCALES 3
  { (size_t)PAGES * 2 * PAGE * HEADS * DIM / 16, NIB_FLOAT8_E4M3FN, 5, { PAGES, 2, PAGE, HEADS, DIM / 16 } },
#define TABLES 4
  { 256, NIB_INT32, 2, { 1, PAGES } },
#define LENGTHS 5
  { 256, NIB_INT32, 1, { 1 } },
#define SCALE 6
  { 256, NIB_FLOAT32, 1, { 1 } },
#define OUT_K 7
  { ROWS * HEADS * DIM * 2, NIB_BFLOAT16, 4, { 1, ROWS, HEADS, DIM } },
#define OUT_V 8
  { ROWS * HEADS * DIM * 2, NIB_BFLOAT16, 4, { 1, ROWS, HEADS, DIM } },
};
#define PARTS (int)(sizeof parts / sizeof *parts)

static size_t offset_of(int part) {
  size_t offset = 0;
  for (int i = 0; i < part; i++) offset += parts[i].bytes;
  return offset;
}

static size_t total_bytes(void) { return offset_of(PARTS) + UNTOUCHED; }

static void fill_input(unsigned char *memory, uint32_t seed) {
  memset(memory, 0xA5, total_bytes());
  uint16_t *key = (uint16_t *)(memory + offset_of(KEY));
  for (int i = 0; i < ROWS * HEADS * DIM; i++) { /* sign, exponents around 1, mantissa */
    seed = seed * 1664525u + 1013904223u;
    key[i] = (uint16_t)((seed >> 16 & 0x8000) | (0x3D00 + (seed >> 8 & 0x3FF)));
  }
  int32_t *slots = (int32_t *)(memory + offset_of(SLOTS)), *tables = (int32_t *)(memory + offset_of(TABLES));
  for (int i = 0; i < ROWS; i++) slots[i] = (i * 5 + (int)(seed & 63)) % ROWS; /* 5 and 192 have no divisor in common */
  for (int i = 0; i < PAGES; i++) tables[i] = PAGES - 1 - i;
  *(int32_t *)(memory + offset_of(LENGTHS)) = ROWS - 7;
  *(float *)(memory + offset_of(SCALE)) = 0.75f;
}

static void operate(nib_runtime *rt, nib_stream *stream, nib_tensor *memory) {
  nib_tensor *t[PARTS], *bytes, *typed;
  for (int i = 0; i < PARTS; i++) {
    int64_t used = (int64_t)nib_dtype_bytes(parts[i].dtype);
    for (int32_t k = 0; k < parts[i].ndim; k++) used *= parts[i].shape[k];
    OK(rt, nib_tensor_narrow(memory, 0, (int64_t)offset_of(i), used, &bytes));
    OK(rt, nib_tensor_reinterpret(bytes, parts[i].dtype, &typed));
    OK(rt, nib_tensor_view(typed, parts[i].ndim, parts[i].shape, &t[i]));
    nib_tensor_release(bytes);
    nib_tensor_release(typed);
  }
  nib_append_desc append = { .append_key = t[KEY],
                             .append_value = t[KEY],
                             .slot_mapping = t[SLOTS],
                             .paged_kv_cache = { .stacked = t[DATA] },
                             .kv_cache_sf = { .stacked = t[SCALES] },
                             .k_scale = { t[SCALE], 0 },
                             .v_scale = { t[SCALE], 0 } };
  nib_dequantize_desc dequantize = { .paged_kv_cache = { .stacked = t[DATA] },
                                     .kv_cache_sf = { .stacked = t[SCALES] },
                                     .block_tables = t[TABLES],
                                     .seq_lens = t[LENGTHS],
                                     .k_scale = t[SCALE],
                                     .v_scale = t[SCALE],
                                     .output_k = t[OUT_K],
                                     .output_v = t[OUT_V] };
  OK(rt, nib_append(stream, &append));
  OK(rt, nib_dequantize(stream, &dequantize));
  for (int i = 0; i < PARTS; i++) nib_tensor_release(t[i]);
}

/* The same on the CPU device, in memory of this program's. */
static void operate_on_cpu(nib_runtime *rt, unsigned char *memory) {
  nib_device *cpu = cpu_of(rt);
  const int64_t shape[] = { (int64_t)total_bytes() };
  nib_wrap_desc desc = { .dtype = NIB_UINT8, .ndim = 1, .shape = shape, .data = memory };
  nib_tensor *tensor;
  OK(rt, nib_tensor_wrap(cpu, &desc, &tensor));
  operate(rt, nib_device_default_stream(cpu), tensor);
  OK(rt, nib_tensor_wait(tensor, NIB_UNLIMITED));
  nib_tensor_release(tensor);
}

static size_t compare(const unsigned char *a, const unsigned char *b) {
  for (size_t i = 0; i < total_bytes(); i++)
    if (a[i] != b[i]) {
      fprintf(stderr, "byte %zu: Vulkan reads 0x%02x, the CPU device has 0x%02x\n", i, a[i], b[i]);
      exit(1);
    }
  return total_bytes();
}

/* ---- Rounds ---------------------------------------------------------------------------------------------------- */

/* Vulkan fills the shared buffer from staging memory, nibble works on it, Vulkan copies it back: ordered by the
 * semaphore alone. */
static void rounds(nib_runtime *rt, nib_device *device, struct buffer shared, nib_tensor *memory, const char *what) {
  enum { ROUNDS = 20 };
  struct buffer input = make_buffer(STAGING, total_bytes(), -1, 0), output = make_buffer(STAGING, total_bytes(), -1, 0);
  nib_stream *stream;
  nib_semaphore *semaphore;
  int fd;
  size_t compared = 0;
  VkSemaphore timeline = make_semaphore(&fd);
  VkBufferCopy all = { .size = total_bytes() };
  unsigned char *expected = malloc(total_bytes());
  OK(rt, nib_stream_create(device, 0, &stream));
  OK(rt, nib_semaphore_import(device, fd, &semaphore));
  for (uint64_t round = 0; round < ROUNDS; round++) {
    fill_input(input.mapped, (uint32_t)round + 1);
    memset(output.mapped, 0, total_bytes());
    VkCommandBuffer fill = begin(), back = begin();
    vk.CmdFillBuffer(fill, shared.handle, 0, VK_WHOLE_SIZE, 0x5A5A5A5A);
    barrier(fill, shared, VK_QUEUE_FAMILY_IGNORED, VK_QUEUE_FAMILY_IGNORED);
    vk.CmdCopyBuffer(fill, input.handle, shared.handle, 1, &all);
    barrier(fill, shared, vk.family, VK_QUEUE_FAMILY_EXTERNAL);
    barrier(back, shared, VK_QUEUE_FAMILY_EXTERNAL, vk.family);
    vk.CmdCopyBuffer(back, shared.handle, output.handle, 1, &all);
    /* In the order that shows a missing wait best: who waits is asked first. */
    OK(rt, nib_semaphore_wait(stream, semaphore, 3 * round + 1));
    operate(rt, stream, memory);
    OK(rt, nib_semaphore_signal(stream, semaphore, 3 * round + 2));
    if (round == 0) CHECK(nib_stream_synchronize(stream, 2000) == NIB_TIMEOUT);
    submit(fill, timeline, 0, 3 * round + 1);
    submit(back, timeline, 3 * round + 2, 3 * round + 3);
    memcpy(expected, input.mapped, total_bytes());
    operate_on_cpu(rt, expected);
    await(timeline, 3 * round + 3);
    compared += compare(output.mapped, expected);
  }
  OK(rt, nib_stream_synchronize(stream, NIB_UNLIMITED));
  VK(vk.DeviceWaitIdle(vk.device));
  printf("%s: %d rounds, %zu bytes equal\n", what, ROUNDS, compared);
  nib_semaphore_release(semaphore);
  nib_stream_release(stream);
  vk.DestroySemaphore(vk.device, timeline, NULL);
  free_buffer(input);
  free_buffer(output);
  free(expected);
}

static void vulkans(nib_runtime *rt, nib_device *device, enum kind kind, const char *what) {
  struct buffer shared = make_buffer(kind, total_bytes(), -1, 0);
  nib_import_desc desc = {
    .kind = NIB_FD_OPAQUE, .fd = memory_fd(shared), .bytes = shared.size, .dedicated = kind == DEDICATED
  };
  nib_tensor *memory;
  OK(rt, nib_tensor_import(device, &desc, &memory));
  rounds(rt, device, shared, memory, what);
  nib_tensor_release(memory);
  OK(rt, nib_tick(rt, NIB_UNLIMITED));
  free_buffer(shared);
}

static void nibbles(nib_runtime *rt, nib_device *device) {
  const int64_t shape[] = { (int64_t)total_bytes() };
  nib_tensor *memory;
  int fd, second;
  uint64_t bytes;
  OK(rt, nib_tensor_create_exportable(device, NIB_UINT8, 1, shape, &memory));
  OK(rt, nib_tensor_export(memory, &fd, &bytes));
  OK(rt, nib_tensor_export(memory, &second, &bytes));

  /* The way into another runtime, or process. */
  nib_runtime *other;
  nib_device *there;
  nib_tensor *theirs;
  unsigned char last = 0;
  OK(NULL, nib_runtime_create(NULL, &other));
  OK(other, nib_device_find(other, nib_device_get_info(device)->name, &there));
  nib_import_desc desc = { .kind = NIB_FD_EXPORTED, .fd = second, .bytes = bytes };
  OK(other, nib_tensor_import(there, &desc, &theirs));
  OK(other, nib_tensor_fill(nib_device_default_stream(there), theirs, NIB_INTEGER(77)));
  OK(other, nib_device_synchronize(there, NIB_UNLIMITED));
  nib_tensor *end;
  OK(rt, nib_tensor_narrow(memory, 0, shape[0] - 1, 1, &end));
  OK(rt, nib_tensor_read(end, &last, 1, NIB_UNLIMITED));
  CHECK(last == 77);
  nib_tensor_release(end);
  nib_tensor_release(theirs);
  nib_runtime_close(other);
  printf("exported memory (%llu bytes for %lld), imported by another runtime: what that wrote is read\n",
         (unsigned long long)bytes, (long long)shape[0]);

  struct buffer shared = make_buffer(IMPORTED, total_bytes(), fd, bytes);
  rounds(rt, device, shared, memory, "nibble's memory, imported by Vulkan");
  free_buffer(shared);
  nib_tensor_release(memory);
}

int main(void) {
  nib_runtime *rt;
  void *library = dlopen("libvulkan.so.1", RTLD_NOW);
  if (!library) skip("no Vulkan loader (libvulkan.so.1)");
  PFN_vkGetInstanceProcAddr get = (PFN_vkGetInstanceProcAddr)dlsym(library, "vkGetInstanceProcAddr");
  CHECK(get);
  find_functions(get, NULL);
  VkApplicationInfo application = { .sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_2 };
  VkInstanceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &application };
  if (vk.CreateInstance(&info, NULL, &vk.instance) != VK_SUCCESS) skip("no Vulkan driver (vkCreateInstance)");
  find_functions(get, vk.instance);
  OK(NULL, nib_runtime_create(NULL, &rt));
  nib_device *device = find_device(rt);
  open_device();
  vulkans(rt, device, EXPORTED, "Vulkan's memory");
  vulkans(rt, device, DEDICATED, "Vulkan's memory, dedicated");
  nibbles(rt, device);
  nib_runtime_close(rt);
  vk.DestroyCommandPool(vk.device, vk.pool, NULL);
  vk.DestroyDevice(vk.device, NULL);
  vk.DestroyInstance(vk.instance, NULL);
  puts("all is well between Vulkan and CUDA");
  return 0;
}
