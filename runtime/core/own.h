/* What the core's files call of each other, and no other room does. The files, in an order in which each calls only
 * those before it:
 *
 *   memory.c error.c time.c dtype.c element.c tell.c life.c uses.c wait.c stream.c deferred.c storage.c module.c
 * queued.c graph.c work.c event.c synchronize.c device.c runtime.c
 */
#ifndef NIB_CORE_OWN_H
#define NIB_CORE_OWN_H

#include "core.h"

/* ---- memory.c ---- */
/* What serves a config without an allocator. */
void *nib_allocate_default(void *user, void *pointer, size_t old_size, size_t new_size);

/* ---- time.c ---- */
int64_t nib_now_ns(void); /* nib_now_us's clock */
/* What is left until `timeout_us` after `start_us`, 0 or more; NIB_UNLIMITED stays. */
int64_t nib_time_left(int64_t start_us, int64_t timeout_us);
/* The time on nib_now_us's clock; the largest budgets give NIB_UNLIMITED. */
int64_t nib_deadline_after(int64_t budget_us);

/* ---- tell.c ---- */
void nib_tell_work(nib_stream *stream, const char *operation, const struct nib_work *work, const nib_access *accesses,
                   int32_t access_count, int32_t node) __attribute__((cold));

/* ---- life.c ---- */
void nib_watch_forks(nib_runtime *rt);
bool nib_needs_device(const struct nib_storage *storage); /* freeing its memory needs a GPU's driver */
void nib_close_devices(nib_runtime *rt, bool host_memory);
void nib_runtime_lets_go(struct nib_storage *storage); /* of an export that outlived the runtime; with the lock */

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
bool nib_storage_free(struct nib_storage *storage); /* its memory alone; false: not yet */

/* ---- module.c ---- */
void nib_modules_close(nib_device *device); /* unloads those that hosts still hold, who can only release them */

/* ---- queued.c ---- */
/* The bytes of the operands, added to those before; at most 2^62. */
uint64_t nib_operand_bytes(uint64_t before, const nib_access *accesses, int32_t access_count);
/* Where the config limits what is queued: waits (until the deadline) until work of so many bytes may be queued. */
nib_status nib_queued_wait(nib_device *device, const char *operation, uint64_t bytes);
void nib_queued_add(nib_stream *stream, uint64_t bytes);

/* ---- graph.c ---- */
nib_status nib_record(nib_stream *stream, const char *operation, const struct nib_work *work,
                      const nib_access *accesses, int32_t access_count);
nib_status nib_frontier_reserve(nib_stream *stream, int32_t count);
/* The stream's next node depends on `nodes` too, for which room was reserved. Nodes that others of them depend on are
 * left out, so that the graph shows each dependency once. */
void nib_frontier_join(nib_stream *stream, const int32_t *nodes, int32_t count);
void nib_capture_close(nib_device *device); /* ends an open capture without a result */

#endif
