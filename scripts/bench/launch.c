/* The Lua module bench_launch for cuda.lua: the cost of a launch without nibble. It is built beside nibble.so if the
 * CUDA headers are installed.
 *
 * - bench_launch.bytes: the bytes of each operation's parameters, by name (append, dequantize, ...).
 * - bench_launch.open(gpu, bytes): an empty kernel with so many bytes of parameters, on its own stream of GPU 0, 1,
 * ...; or nil and the reason.
 * - kernel:time(count): the host's microseconds for a cuLaunchKernel of it, the mean of `count` calls.
 * - bench_launch.now(): a clock in microseconds. */
#define _POSIX_C_SOURCE 200809L
#include <lauxlib.h>
#include <lua.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../../runtime/cuda/driver.h"

#define CLASS      "bench_launch.kernel"
#define MOST_BYTES 4096

struct kernel {
  struct nib_driver driver;
  CUcontext context;
  CUdevice gpu;
  CUmodule module;
  CUfunction function;
  CUstream stream;
  char params[MOST_BYTES];
};

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static int clock_now(lua_State *L) {
  lua_pushnumber(L, now_us());
  return 1;
}

static int kernel_close(lua_State *L) {
  struct kernel *kernel = luaL_checkudata(L, 1, CLASS);
  struct nib_driver *driver = &kernel->driver;
  CUcontext context = kernel->context;
  kernel->context = NULL;
  if (!context || driver->CtxPushCurrent(context) != CUDA_SUCCESS) return 0;
  if (kernel->stream) driver->StreamDestroy(kernel->stream);
  if (kernel->module) driver->ModuleUnload(kernel->module);
  driver->CtxPopCurrent(&context);
  driver->DevicePrimaryCtxRelease(kernel->gpu);
  return 0;
}

static int open_kernel(lua_State *L) {
  int gpu = (int)luaL_checkinteger(L, 1);
  lua_Integer bytes = luaL_checkinteger(L, 2);
  luaL_argcheck(L, bytes > 0 && bytes <= MOST_BYTES, 2, "expected 1..4096 bytes");
  struct kernel *kernel = lua_newuserdatauv(L, sizeof *kernel, 0);
  memset(kernel, 0, sizeof *kernel);
  luaL_setmetatable(L, CLASS);
  char text[256];
  if (!nib_driver_open(&kernel->driver, text, sizeof text)) {
    lua_pushnil(L);
    lua_pushstring(L, text);
    return 2;
  }
  snprintf(
    text, sizeof text,
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty(.param .align 8 .b8 params[%d]) { ret; }\n",
    (int)bytes);
  struct nib_driver *driver = &kernel->driver;
  CUcontext popped;
  CUresult result = driver->DeviceGet(&kernel->gpu, gpu);
  if (result == CUDA_SUCCESS) result = driver->DevicePrimaryCtxRetain(&kernel->context, kernel->gpu);
  if (result == CUDA_SUCCESS && (result = driver->CtxPushCurrent(kernel->context)) == CUDA_SUCCESS) {
    result = driver->ModuleLoadDataEx(&kernel->module, text, 0, NULL, NULL);
    if (result == CUDA_SUCCESS) result = driver->ModuleGetFunction(&kernel->function, kernel->module, "empty");
    if (result == CUDA_SUCCESS) result = driver->StreamCreateWithPriority(&kernel->stream, CU_STREAM_NON_BLOCKING, 0);
    driver->CtxPopCurrent(&popped);
  }
  if (result == CUDA_SUCCESS) return 1;
  lua_pushnil(L);
  lua_pushfstring(L, "an empty kernel: the driver returned error %d", (int)result);
  return 2;
}

static int kernel_time(lua_State *L) {
  struct kernel *kernel = luaL_checkudata(L, 1, CLASS);
  lua_Integer count = luaL_checkinteger(L, 2);
  struct nib_driver *driver = &kernel->driver;
  luaL_argcheck(L, kernel->context != NULL, 1, "expected an open kernel");
  luaL_argcheck(L, count > 0, 2, "expected a positive number of launches");
  CUcontext popped;
  void *params[] = { kernel->params };
  CUresult result = driver->CtxPushCurrent(kernel->context);
  double from = now_us();
  for (lua_Integer i = 0; i < count && result == CUDA_SUCCESS; i++)
    result = driver->LaunchKernel(kernel->function, 1, 1, 1, 32, 1, 1, 0, kernel->stream, params, NULL);
  double spent = now_us() - from;
  if (result == CUDA_SUCCESS) result = driver->StreamSynchronize(kernel->stream);
  driver->CtxPopCurrent(&popped);
  if (result != CUDA_SUCCESS) return luaL_error(L, "an empty kernel: the driver returned error %d", (int)result);
  lua_pushnumber(L, spent / (double)count);
  return 1;
}

__attribute__((visibility("default"))) int luaopen_bench_launch(lua_State *L) {
  static const luaL_Reg functions[] = { { "open", open_kernel }, { "now", clock_now }, { NULL, NULL } };
  static const luaL_Reg methods[] = { { "time", kernel_time }, { "close", kernel_close }, { NULL, NULL } };
  static const luaL_Reg metamethods[] = { { "__gc", kernel_close }, { "__close", kernel_close }, { NULL, NULL } };
  static const struct {
    const char *name;
    size_t bytes;
  } operations[] = { { "append", sizeof(struct nib_append_params) },
                     { "dequantize", sizeof(struct nib_dequantize_params) },
                     { "materialize", sizeof(struct nib_materialize_params) },
                     { "rope_insert", sizeof(struct nib_rope_insert_params) } };
  luaL_newmetatable(L, CLASS);
  luaL_setfuncs(L, metamethods, 0);
  luaL_newlib(L, methods);
  lua_setfield(L, -2, "__index");
  luaL_newlib(L, functions);
  lua_newtable(L);
  for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
    lua_pushinteger(L, (lua_Integer)operations[i].bytes);
    lua_setfield(L, -2, operations[i].name);
  }
  lua_setfield(L, -2, "bytes");
  return 1;
}
