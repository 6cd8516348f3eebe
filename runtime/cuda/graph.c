/* Captures and graphs of the CUDA device, which are the driver's. */
#define _GNU_SOURCE /* memfd_create */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../core/graph.h"
#include "device.h"

static CUstream handle_of(const nib_stream *stream) { return ((struct nib_cuda_stream *)stream->impl)->handle; }

nib_status nib_cuda_capture_begin(nib_stream *stream, nib_capture_mode mode) {
  static const CUstreamCaptureMode modes[] = {
    [NIB_CAPTURE_THREAD_LOCAL] = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    [NIB_CAPTURE_GLOBAL] = CU_STREAM_CAPTURE_MODE_GLOBAL,
    [NIB_CAPTURE_RELAXED] = CU_STREAM_CAPTURE_MODE_RELAXED,
  };
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->StreamBeginCapture(handle_of(stream), modes[mode]);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuStreamBeginCapture");
}

nib_status nib_cuda_capture_end(nib_stream *stream, struct nib_plan *plan) {
  nib_device *device = stream->device;
  nib_runtime *rt = device->runtime;
  struct nib_cuda *cuda = nib_cuda_of(device);
  CUgraph graph = NULL;
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->StreamEndCapture(handle_of(stream), &graph);
  struct nib_cuda_graph *own = plan && result == CUDA_SUCCESS ? nib_allocate_zero(rt, sizeof *own) : NULL;
  if (own) {
    own->graph = graph;
    own->next = cuda->graphs;
    if (own->next) own->next->previous = own;
    cuda->graphs = own;
    plan->impl = own;
  } else if (graph) {
    cuda->driver->GraphDestroy(graph);
  }
  nib_cuda_leave(device);
  if (!plan) return NIB_OK; /* the capture was aborted; the driver may have invalidated it */
  if (result != CUDA_SUCCESS) return nib_cuda_check(device, result, "cuStreamEndCapture");
  return own ? NIB_OK : nib_fail_memory(rt, "graph", sizeof *own);
}

nib_status nib_cuda_plan_prepare(nib_device *device, struct nib_plan *plan, struct nib_plan *replaced) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_graph *own = plan->impl, *old = replaced ? replaced->impl : NULL;
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUgraphExecUpdateResultInfo info;
  CUresult result = CUDA_SUCCESS;
  if (old && old->exec && cuda->driver->GraphExecUpdate(old->exec, own->graph, &info) == CUDA_SUCCESS) {
    own->exec = old->exec; /* queued replays are not affected by the update */
    old->exec = NULL;
  } else {
    result = cuda->driver->GraphInstantiateWithFlags(&own->exec, own->graph, 0);
  }
  /* Makes the first launch faster. A failure does not matter. */
  if (result == CUDA_SUCCESS) cuda->driver->GraphUpload(own->exec, cuda->copies);
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuGraphInstantiateWithFlags");
}

nib_status nib_cuda_plan_launch(nib_stream *stream, struct nib_plan *plan) {
  nib_device *device = stream->device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_graph *own = plan->impl;
  if (cuda->lost) return nib_cuda_lost(device);
  if (!nib_cuda_enter(device)) return nib_cuda_check(device, CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent");
  CUresult result = cuda->driver->GraphLaunch(own->exec, handle_of(stream));
  nib_cuda_leave(device);
  return nib_cuda_check(device, result, "cuGraphLaunch");
}

/* The driver writes to a file by name, so give it a file in memory. */
nib_status nib_cuda_plan_dot(struct nib_plan *plan, char *text, size_t size, size_t *needed) {
  nib_device *device = plan->deferred.device;
  struct nib_cuda *cuda = nib_cuda_of(device);
  struct nib_cuda_graph *own = plan->impl;
  if (cuda->lost) return nib_cuda_lost(device);
  int file = memfd_create("nibble graph", MFD_CLOEXEC);
  if (file < 0) return nib_fail(device->runtime, NIB_FILE, "graph:dot: the system cannot create a file in memory");
  char path[32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  CUresult result = CUDA_ERROR_INVALID_CONTEXT;
  if (nib_cuda_enter(device)) {
    result = cuda->driver->GraphDebugDotPrint(own->graph, path, CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE);
    nib_cuda_leave(device);
  }
  struct stat info = { 0 };
  nib_status status = nib_cuda_check(device, result, "cuGraphDebugDotPrint");
  if (status == NIB_OK && fstat(file, &info) != 0) info.st_size = 0;
  size_t bytes = (size_t)info.st_size, room = text && size > 0 ? size - 1 : 0, wanted = bytes < room ? bytes : room,
         done = 0;
  while (status == NIB_OK && done < wanted) {
    ssize_t n = pread(file, text + done, wanted - done, (off_t)done);
    if (n <= 0) break;
    done += (size_t)n;
  }
  close(file);
  if (status == NIB_OK && (bytes == 0 || done < wanted))
    status = nib_fail(device->runtime, NIB_FILE, "graph:dot: the driver wrote no graph");
  if (status != NIB_OK) return status;
  if (text && size > 0) text[done] = 0;
  *needed = bytes;
  return NIB_OK;
}

void nib_cuda_graph_destroy(nib_device *device, struct nib_cuda_graph *graph) {
  struct nib_cuda *cuda = nib_cuda_of(device);
  if (!cuda->lost && graph->exec) cuda->driver->GraphExecDestroy(graph->exec);
  if (!cuda->lost && graph->graph) cuda->driver->GraphDestroy(graph->graph);
  if (graph->next) graph->next->previous = graph->previous;
  *(graph->previous ? &graph->previous->next : &cuda->graphs) = graph->next;
  nib_free(device->runtime, graph, sizeof *graph);
}

void nib_cuda_plan_destroy(struct nib_plan *plan) {
  nib_device *device = plan->deferred.device;
  bool entered = plan->impl && !nib_cuda_of(device)->lost && nib_cuda_enter(device);
  if (plan->impl) nib_cuda_graph_destroy(device, plan->impl);
  if (entered) nib_cuda_leave(device);
  plan->impl = NULL;
}
