/* Uses: which work of which streams reads and writes a storage, an event or a plan (storage.c explains them). */
#include "core.h"

/* The streams can belong to several devices: GPUs use pinned memory, which is the CPU's. */
static bool use_is_done(const struct nib_use *use) {
  return use->stream->device->backend->streams.reached(use->stream, nib_use_ticket(use, false));
}

bool nib_uses_idle(struct nib_uses *uses) {
  int32_t kept = 0;
  for (int32_t i = 0; i < uses->count; i++)
    if (!use_is_done(&uses->items[i])) uses->items[kept++] = uses->items[i];
  uses->count = kept;
  return kept == 0;
}

nib_status nib_uses_reserve(nib_runtime *rt, struct nib_uses *uses) {
  if (uses->count < uses->capacity) return NIB_OK;
  nib_uses_idle(uses);
  if (uses->count < uses->capacity) return NIB_OK;
  int32_t capacity = uses->capacity ? uses->capacity * 2 : 2;
  struct nib_use *items =
    nib_reallocate(rt, uses->items, sizeof *items * (size_t)uses->capacity, sizeof *items * (size_t)capacity);
  if (!items) return nib_fail_memory(rt, "stream", sizeof *items * (size_t)capacity);
  uses->items = items;
  uses->capacity = capacity;
  return NIB_OK;
}

void nib_uses_add(struct nib_uses *uses, nib_stream *stream, uint64_t ticket, bool write) {
  struct nib_use *use = uses->items;
  for (int32_t i = 0; i < uses->count; i++, use++)
    if (use->stream == stream) {
      *(write ? &use->write : &use->read) = ticket;
      return;
    }
  uses->items[uses->count++] = (struct nib_use){ stream, write ? 0 : ticket, write ? ticket : 0 };
}

void nib_uses_free(nib_runtime *rt, struct nib_uses *uses) {
  nib_free(rt, uses->items, sizeof *uses->items * (size_t)uses->capacity);
  *uses = (struct nib_uses){ 0 };
}
