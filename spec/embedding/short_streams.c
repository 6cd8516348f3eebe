/* Streams that live for a moment: their work is done all the same, in the order of each, and their threads do not
 * stay. */
#include <time.h>

#include "gate.h"

enum { STREAMS = 40000, AT_ONCE = 100 };

/* A thread goes a moment after its stream: as long as it takes on a busy machine, but not for ever. */
static int threads_down_to(int most) {
  int count = threads();
  for (int i = 0; i < 3000 && count > most; i++, count = threads())
    nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
  return count;
}

struct step {
  int *done; /* atomic */
  int first; /* of its stream */
  int wrong;
};

static nib_status first(void *user) {
  struct step *step = user;
  step->first = 1;
  __atomic_add_fetch(step->done, 1, __ATOMIC_RELAXED);
  return NIB_OK;
}

static nib_status second(void *user) {
  struct step *step = user;
  step->wrong = !step->first;
  __atomic_add_fetch(step->done, 1, __ATOMIC_RELAXED);
  return NIB_OK;
}

static struct step steps[STREAMS];

int main(int argc, char **argv) {
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&(nib_config){ .threads = 1 }, &runtime));
  nib_device *device = device_of(runtime);
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  const int count = argc > 1 ? atoi(argv[1]) : STREAMS, before = threads();
  int done = 0, most = 0;
  CHECK(count <= STREAMS);

  for (int i = 0; i < count; i++) {
    nib_stream *stream = NULL;
    OK(runtime, nib_stream_create(device, 0, &stream));
    steps[i].done = &done;
    OK(runtime, nib_stream_call(stream, first, &steps[i]));
    OK(runtime, nib_stream_call(stream, second, &steps[i]));
    nib_stream_release(stream);
    if (i % 100 == 0 && threads() > most) most = threads();
  }
  OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
  CHECK(done == 2 * count);
  for (int i = 0; i < count; i++) CHECK(!steps[i].wrong);
  CHECK(most <= before + 16);

  /* Many at once have a thread each on the CPU, and give it back. (A GPU has none; its driver's streams are kept for
   * reuse.) */
  nib_stream *streams[AT_ONCE];
  done = 0;
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < AT_ONCE; i++) {
      OK(runtime, nib_stream_create(device, 0, &streams[i]));
      OK(runtime, nib_stream_call(streams[i], first, &steps[i]));
    }
    for (int i = 0; i < AT_ONCE; i++) nib_stream_release(streams[i]);
    OK(runtime, nib_device_synchronize(device, NIB_UNLIMITED));
    CHECK(done == (round + 1) * AT_ONCE);
    if (device == cpu_of(runtime)) CHECK(threads_down_to(before + 16) <= before + 16);
  }
  nib_runtime_close(runtime);
  return 0;
}
