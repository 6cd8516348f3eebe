/* What only the core's files use of each other. In this order each file calls only those before it:
 *
 * memory.c, error.c, time.c, dtype.c, element.c, tell.c, life.c, uses.c, wait.c, stream.c, deferred.c, storage.c,
 * module.c, queued.c, graph.c, work.c, event.c, synchronize.c, device.c, runtime.c */
#ifndef NIB_CORE_OWN_H
#define NIB_CORE_OWN_H

#include "core.h"

/* ---- memory.c ---- */
/* The allocator of a config that has none. */
void *nib_allocate_default(void *user, void *pointer, size_t old_size, size_t new_size);

/* ---- time.c ---- */
int64_t nib_now_ns(void); /* on the clock of nib_now_us */
/* The time left of a timeout that began at start_us, 0 or more; NIB_UNLIMITED stays NIB_UNLIMITED. */
int64_t nib_time_left(int64_t start_us, int64_t timeout_us);
/* The end of a budget that begins now, on the clock of nib_now_us; NIB_UNLIMITED for the largest budgets. */
int64_t nib_deadline_after(int64_t budget_us);

/* ---- tell.c ---- */
void nib_tell_work(nib_stream *stream, const char *operation, const struct nib_work *work, const nib_access *accesses,
                   int32_t access_count, int32_t node) __attribute__((cold));

/* ---- life.c ---- */
void nib_watch_forks(nib_runtime *rt);
bool nib_needs_device(const struct nib_storage *storage); /* whether freeing its memory needs a GPU's driver */
void nib_close_devices(nib_runtime *rt, bool host_memory);
void nib_runtime_lets_go(
  struct nib_storage *storage); /* for an export that outlived the runtime; the caller holds the lock */

/* ---- wait.c ---- */
/* Waits until the stream has reached the ticket. */
nib_status nib_wait(nib_stream *stream, uint64_t ticket, int64_t timeout_us);

/* ---- stream.c ---- */
nib_status nib_check_open(nib_stream *stream, const char *operation); /* refuses released streams */

/* ---- deferred.c ---- */
void nib_reap(nib_device *device, int64_t deadline_us); /* destroys at least a piece, and more until the deadline */
void nib_reap_in_time(nib_device *device);              /* until the host's deadline */
void nib_drain(nib_device *device); /* waits (until the deadline) for the uses of deferred objects, then reaps */

/* ---- storage.c ---- */
bool nib_storage_free(struct nib_storage *storage); /* frees the memory, not the struct; false: not yet */

/* ---- module.c ---- */
void nib_modules_close(nib_device *device); /* unloads modules that hosts still hold; they can then only be released */

/* ---- queued.c ---- */
/* `before` plus the bytes of the operands; at most 2^62. */
uint64_t nib_operand_bytes(uint64_t before, const nib_access *accesses, int32_t access_count);
/* If the config limits queued bytes: waits until so many more fit, or until the deadline. */
nib_status nib_queued_wait(nib_device *device, const char *operation, uint64_t bytes);
void nib_queued_add(nib_stream *stream, uint64_t bytes);

/* ---- graph.c ---- */
nib_status nib_record(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count);
nib_status nib_frontier_reserve(nib_stream *stream, int32_t count);
/* Makes the stream's next node depend on `nodes`, too; nib_frontier_reserve made room. Leaves out nodes that others of
 * them depend on, so that the graph shows each dependency once. */
void nib_frontier_join(nib_stream *stream, const int32_t *nodes, int32_t count);
void nib_capture_close(nib_device *device); /* ends an open capture without a result */

#endif
