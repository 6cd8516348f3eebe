/* The context of a GPU: making it current, and its errors. */
#include "device.h"

static bool exchange_mode(struct nib_cuda *cuda) {
  return cuda->driver->ThreadExchangeStreamCaptureMode(&cuda->mode) == CUDA_SUCCESS;
}

/* Tries twice, since functions that free or end something are not called again. */
bool nib_cuda_enter(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_driver *driver = cuda->driver;
  CUcontext popped;
  if (driver->CtxPushCurrent(cuda->context) != CUDA_SUCCESS && driver->CtxPushCurrent(cuda->context) != CUDA_SUCCESS)
    return false;
  if (cuda->entered == 0) {
    cuda->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!exchange_mode(cuda) && !exchange_mode(cuda)) {
      driver->CtxPopCurrent(&popped);
      return false;
    }
  }
  cuda->entered++;
  return true;
}

void nib_cuda_leave(nib_device *device) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUcontext popped;
  if (--cuda->entered == 0 && !exchange_mode(cuda)) exchange_mode(cuda);
  cuda->driver->CtxPopCurrent(&popped);
}

nib_status nib_cuda_lost(nib_device *device) {
  return nib_fail(device->runtime, NIB_LOST,
                  "%s: context lost: an earlier kernel failed, and the driver refuses all further work in this process",
                  device->info.name);
}

/* Errors after which every call on the context fails. */
static bool is_fatal(CUresult result) {
  switch ((int)result) {
  case 226: /* CUDA_ERROR_CONTAINED, which older headers lack */
  case 721: /* CUDA_ERROR_TENSOR_MEMORY_LEAK, which they lack, too */
  case CUDA_ERROR_NVLINK_UNCORRECTABLE:
  case CUDA_ERROR_MPS_CLIENT_TERMINATED:
  case CUDA_ERROR_EXTERNAL_DEVICE:
  case CUDA_ERROR_ILLEGAL_ADDRESS:
  case CUDA_ERROR_LAUNCH_TIMEOUT:
  case CUDA_ERROR_ASSERT:
  case CUDA_ERROR_HARDWARE_STACK_ERROR:
  case CUDA_ERROR_ILLEGAL_INSTRUCTION:
  case CUDA_ERROR_MISALIGNED_ADDRESS:
  case CUDA_ERROR_INVALID_ADDRESS_SPACE:
  case CUDA_ERROR_INVALID_PC:
  case CUDA_ERROR_LAUNCH_FAILED:
  case CUDA_ERROR_ECC_UNCORRECTABLE:
  case CUDA_ERROR_CONTEXT_IS_DESTROYED:
  case CUDA_ERROR_DEINITIALIZED: return true;
  default: return false;
  }
}

nib_status nib_cuda_check(nib_device *device, CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return NIB_OK;
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (!cuda->lost && is_fatal(result)) {
    cuda->lost = true;
    nib_log(device->runtime, NIB_LOG_ERROR, "%s: context lost: %s returned error %d", device->info.name, what,
            (int)result);
  }
  if (cuda->lost) return nib_cuda_lost(device);
  const char *name = "unknown error", *text = "";
  cuda->driver->GetErrorName(result, &name);
  cuda->driver->GetErrorString(result, &text);
  return nib_fail(device->runtime, result == CUDA_ERROR_OUT_OF_MEMORY ? NIB_MEMORY : NIB_DEVICE,
                  "%s failed on %s: %s (%s)", what, device->info.name, name, text);
}
