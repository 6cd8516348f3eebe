/* What captures record and graphs replay; for the core, and for the devices, which instantiate it. */
#ifndef NIB_CORE_GRAPH_H
#define NIB_CORE_GRAPH_H

#include "core.h"

struct nib_node {
  enum nib_kernel kernel; /* or as in nib_work */
  nib_module *module;     /* of a user kernel; the node holds a reference */
  const char *name;       /* a literal; for a user kernel, a copy in the plan's chunks */
  uint32_t bytes;
  void *params; /* these and `deps` are in the plan's chunks */
  int32_t *deps;
  int32_t dep_count;
};

struct nib_pin {
  struct nib_storage *storage;
  bool write;
};

/* Memory for many nodes, so that it is freed in few calls. */
struct nib_chunk {
  _Alignas(16) struct nib_chunk *next;
  size_t bytes, used; /* of the memory that follows */
};

/* What a capture recorded. It does not change after it is instantiated, so that an update does not affect queued
 * replays. */
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
  void *impl;     /* the device's data */
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
