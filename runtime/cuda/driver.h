/* The CUDA driver, loaded at run time: libcuda.so.1 by dlopen, and every entry point through cuGetProcAddress with the
 * version of its signature, so that a newer driver never returns a function with another one. cuda.h is needed only at
 * build time. */
#ifndef NIB_CUDA_DRIVER_H
#define NIB_CUDA_DRIVER_H

#include <cudaTypedefs.h>

#include "../core/core.h"

/* X(name, version of the signature) */
#define NIB_DRIVER_LIST(X)                  \
  X(Init, 2000)                             \
  X(DriverGetVersion, 2020)                 \
  X(DeviceGetCount, 2000)                   \
  X(DeviceGet, 2000)                        \
  X(DeviceGetName, 2000)                    \
  X(DeviceGetAttribute, 2000)               \
  X(DeviceTotalMem, 3020)                   \
  X(DeviceGetUuid, 11040)                   \
  X(DeviceCanAccessPeer, 4000)              \
  X(DevicePrimaryCtxRetain, 7000)           \
  X(DevicePrimaryCtxRelease, 11000)         \
  X(CtxPushCurrent, 4000)                   \
  X(CtxPopCurrent, 4000)                    \
  X(CtxGetDevice, 2000)                     \
  X(GetErrorName, 6000)                     \
  X(GetErrorString, 6000)                   \
  X(ModuleLoadDataEx, 2010)                 \
  X(ModuleUnload, 2000)                     \
  X(ModuleGetFunction, 2000)                \
  X(FuncGetAttribute, 2020)                 \
  X(FuncSetAttribute, 9000)                 \
  X(LaunchKernel, 4000)                     \
  X(MemPoolCreate, 11020)                   \
  X(MemPoolDestroy, 11020)                  \
  X(MemPoolSetAttribute, 11020)             \
  X(MemPoolSetAccess, 11020)                \
  X(MemPoolTrimTo, 11020)                   \
  X(MemAllocFromPoolAsync, 11020)           \
  X(MemFreeAsync, 11020)                    \
  X(MemHostAlloc, 2020)                     \
  X(MemFreeHost, 2000)                      \
  X(MemHostGetDevicePointer, 3020)          \
  X(PointerGetAttribute, 4000)              \
  X(MemFree, 3020)                          \
  X(MemGetAllocationGranularity, 10020)     \
  X(MemCreate, 10020)                       \
  X(MemRelease, 10020)                      \
  X(MemAddressReserve, 10020)               \
  X(MemAddressFree, 10020)                  \
  X(MemMap, 10020)                          \
  X(MemUnmap, 10020)                        \
  X(MemSetAccess, 10020)                    \
  X(MemExportToShareableHandle, 10020)      \
  X(MemImportFromShareableHandle, 10020)    \
  X(ImportExternalMemory, 10000)            \
  X(ExternalMemoryGetMappedBuffer, 10000)   \
  X(DestroyExternalMemory, 10000)           \
  X(ImportExternalSemaphore, 10000)         \
  X(DestroyExternalSemaphore, 10000)        \
  X(WaitExternalSemaphoresAsync, 10000)     \
  X(SignalExternalSemaphoresAsync, 10000)   \
  X(MemcpyHtoDAsync, 3020)                  \
  X(MemcpyDtoHAsync, 3020)                  \
  X(MemcpyAsync, 4000)                      \
  X(MemcpyPeerAsync, 4000)                  \
  X(StreamCreateWithPriority, 5050)         \
  X(StreamDestroy, 4000)                    \
  X(StreamSynchronize, 2000)                \
  X(StreamQuery, 2000)                      \
  X(StreamGetCtx, 9020)                     \
  X(StreamWaitEvent, 3020)                  \
  X(StreamBeginCapture, 10010)              \
  X(StreamEndCapture, 10000)                \
  X(ThreadExchangeStreamCaptureMode, 10010) \
  X(LaunchHostFunc, 10000)                  \
  X(EventCreate, 2000)                      \
  X(EventDestroy, 4000)                     \
  X(EventRecord, 2000)                      \
  X(EventQuery, 2000)                       \
  X(EventElapsedTime, 2000)                 \
  X(GraphInstantiateWithFlags, 11040)       \
  X(GraphLaunch, 10000)                     \
  X(GraphUpload, 11010)                     \
  X(GraphExecUpdate, 12000)                 \
  X(GraphExecDestroy, 10000)                \
  X(GraphDebugDotPrint, 11030)              \
  X(GraphDestroy, 10000)

/* Optional entry points: NULL if the driver is too old. */
#define NIB_DRIVER_OPTIONAL_LIST(X) X(FuncGetParamInfo, 12040)

struct nib_driver {
#define X(name, signature) PFN_cu##name##_v##signature name;
  NIB_DRIVER_LIST(X)
  NIB_DRIVER_OPTIONAL_LIST(X)
#undef X
  void *library;
  int version; /* 13000 for CUDA 13.0 */
};

/* Fills the table and initializes the driver. If it returns false, `reason` is the reason in words. */
bool nib_driver_open(struct nib_driver *driver, char *reason, size_t size);
void nib_driver_close(struct nib_driver *driver);

#endif
