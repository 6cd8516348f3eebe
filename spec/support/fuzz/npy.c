/* .npy data of any kind: parsed or refused, never read beyond; what was loaded survives saving and loading. The first
 * byte of an input chooses the dtype that is asked for. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "fuzz.h"

static nib_runtime *runtime;
static nib_stream *stream;
static char path[64]; /* of a file in memory */

static void open_runtime(void) {
  nib_config config = { .threads = 1, .memory_cap = 1 << 26 };
  CHECK(nib_runtime_create(&config, &runtime) == NIB_OK);
  stream = nib_device_default_stream(nib_device_at(runtime, 0));
  int file = memfd_create("npy", MFD_CLOEXEC);
  CHECK(file >= 0);
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
}

static void check_round_trip(nib_tensor *loaded) {
  nib_tensor *again = NULL;
  bool equal = false;
  CHECK(nib_npy_save(loaded, path) == NIB_OK);
  CHECK(nib_npy_load(stream, path, nib_tensor_dtype(loaded), &again) == NIB_OK);
  CHECK(nib_tensor_equal(loaded, again, &equal) == NIB_OK && equal);
  nib_tensor_release(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!runtime) open_runtime();
  if (size < 1) return 0;
  int kind = data[0] % (DTYPES + 2); /* none and one that does not exist, too */
  nib_dtype as = kind == DTYPES ? NIB_DTYPE_NONE : (nib_dtype)kind;
  nib_tensor *tensor = NULL;
  nib_status status = nib_npy_parse(stream, data + 1, size - 1, as, &tensor);
  if (status == NIB_OK) {
    CHECK(nib_tensor_is_contiguous(tensor) &&
          (size_t)nib_tensor_numel(tensor) * nib_dtype_bytes(nib_tensor_dtype(tensor)) < size);
    CHECK(as < DTYPES && (as == NIB_DTYPE_NONE || nib_tensor_dtype(tensor) == as));
    check_round_trip(tensor);
  } else {
    CHECK(!tensor && (status == NIB_FORMAT || status == NIB_INVALID));
    check_message(runtime);
  }
  nib_tensor_release(tensor);
  CHECK(nib_device_synchronize(nib_device_at(runtime, 0), NIB_UNLIMITED) == NIB_OK);
  CHECK(nib_device_memory(nib_device_at(runtime, 0)).reserved_bytes == 0);
  return 0;
}
