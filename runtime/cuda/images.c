/* The compiled kernels, and the headers that user kernels can include. */
#include "device.h"

#define X(symbol, name) extern const struct nib_cuda_kernel nib_cuda_##name;
NIB_KERNEL_LIST(X)
#undef X

const struct nib_cuda_kernel *const nib_cuda_kernels[NIB_KERNEL_COUNT] = {
#define X(symbol, name) &nib_cuda_##name,
  NIB_KERNEL_LIST(X)
#undef X
};

/* ---- Headers for NVRTC ----------------------------------------------------------------------------------------- */

#include "nvfp4.h.inc"
#include "nvfp4_words.h.inc"
#include "params.h.inc"
#include "paged.h.inc"
#include "convert.h.inc"
#include "elementary.h.inc"
#include "random.h.inc"

/* The parts of C headers that ours need. NVRTC has no C library. */
static const char stdint_text[] =
  "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;\n"
  "typedef int int32_t; typedef unsigned int uint32_t; typedef long long int64_t; typedef unsigned long long "
  "uint64_t;\n"
  "typedef unsigned long long uintptr_t;\n"
  "#define INT8_MIN (-128)\n#define INT8_MAX 127\n#define UINT8_MAX 255\n#define INT16_MIN (-32768)\n#define INT16_MAX "
  "32767\n"
  "#define UINT16_MAX 65535\n#define INT32_MAX 2147483647\n#define INT32_MIN (-INT32_MAX - 1)\n#define UINT32_MAX "
  "4294967295u\n"
  "#define INT64_MAX 9223372036854775807ll\n#define INT64_MIN (-INT64_MAX - 1)\n#define UINT64_MAX "
  "18446744073709551615ull\n";
static const char float_text[] = "#define FLT_MAX 3.402823466e+38f\n#define FLT_MIN 1.175494351e-38f\n";
static const char math_text[] = "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fffffff)\n";
static const char empty_text[] = "";

#define TEXT(name) (const char *)nib_text_##name
const char *const nib_cuda_header_names[] = { "stdint.h", "float.h",   "math.h",        "string.h",
                                              "stddef.h", "nvfp4.h",   "nvfp4_words.h", "params.h",
                                              "paged.h",  "convert.h", "elementary.h",  "random.h" };
const char *const nib_cuda_header_texts[] = { stdint_text, float_text,    math_text,         empty_text,
                                              empty_text,  TEXT(nvfp4),   TEXT(nvfp4_words), TEXT(params),
                                              TEXT(paged), TEXT(convert), TEXT(elementary),  TEXT(random) };
const int nib_cuda_header_count = sizeof nib_cuda_header_names / sizeof *nib_cuda_header_names;
