/* What captures record and graphs replay: for the core, and for the devices that instantiate it. */
#ifndef NIB_CORE_GRAPH_H
#define NIB_CORE_GRAPH_H

#include "core.h"

struct nib_node {
  enum nib_kernel kernel; /* or as in nib_work */
  nib_module *module;     /* of a user's kernel, kept alive */
  const char *name;       /* a literal, or the plan's copy of the user's */
  uint32_t bytes;
  void *params; /* these and `deps` are in the plan's chunks */
  int32_t *deps;
  int32_t dep_count;
};

struct nib_pin {
  struct nib_storage *storage;
  bool write;
};

/* A piece of memory that nodes take theirs from, so that many are given back at once. */
struct nib_chunk {
  _Alignas(16) struct nib_chunk *next;
  size_t bytes, used; /* of what follows */
};

/* What a capture recorded. Immutable once instantiated, so that queued replays are untouched by an update. */
struct nib_plan {
  struct nib_deferred deferred;
  struct nib_node *nodes;
  int32_t node_count, node_capacity;
  struct nib_chunk *chunks; /* newest first */
  struct nib_pin *pins;
  int32_t pin_count, pin_capacity;
  unsigned char *marks; /* scratch of a walk over the nodes */
  int32_t mark_capacity;
  uint64_t operand_bytes;
  int32_t *order; /* the CPU device's order of execution */
  void *impl;     /* the device's */
};

struct nib_capture {
  uint64_t id;
  nib_stream *origin;
  struct nib_plan *plan;
};

struct nib_graph {
  nib_device *device;
  struct nib_plan *plan;
  uint64_t id;
};

#endif
