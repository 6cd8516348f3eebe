/* Captures and graphs. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct graph {
  struct object object;
  struct plan *plan;
};

static struct capture *captures;
static uint64_t last_capture_id;

/* ---- Plans ----------------------------------------------------------------------------------------------------- */

void standin_plan_release(struct plan *plan) {
  if (--plan->references > 0) return;
  for (int i = 0; i < plan->count; i++) {
    standin_op_free(&plan->nodes[i].op);
    free(plan->nodes[i].deps);
  }
  free(plan->nodes);
  free(plan);
}

/* The union of two lists of nodes, in new memory; NULL without memory. */
static int *join(const int *a, int a_count, const int *b, int b_count, int *count) {
  int *nodes = malloc(sizeof *nodes * (size_t)(a_count + b_count + 1));
  if (!nodes) return NULL;
  *count = 0;
  for (int i = 0; i < a_count; i++) nodes[(*count)++] = a[i];
  for (int i = 0; i < b_count; i++) {
    bool known = false;
    for (int k = 0; k < a_count; k++) known |= a[k] == b[i];
    if (!known) nodes[(*count)++] = b[i];
  }
  return nodes;
}

/* Whether `node` is one of `from` or one that they wait for. */
static bool is_behind(const struct plan *plan, int node, const int *from, int count) {
  for (int i = 0; i < count; i++)
    if (from[i] == node ||
        (from[i] > node && is_behind(plan, node, plan->nodes[from[i]].deps, plan->nodes[from[i]].dep_count)))
      return true;
  return false;
}

/* ---- Captures -------------------------------------------------------------------------------------------------- */

static struct capture *capture_of(uint64_t id) {
  for (struct capture *capture = captures; capture; capture = capture->next)
    if (capture->id == id) return capture;
  return NULL;
}

CUresult standin_check_unsafe(void) {
  const struct thread *thread = &standin_thread;
  bool refused = false;
  if (thread->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  for (struct capture *capture = captures; capture; capture = capture->next) {
    bool own = capture->thread == thread && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    bool other = thread->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!own && !other) continue;
    capture->invalid = true;
    refused = true;
  }
  if (!refused) return CUDA_SUCCESS;
  return standin_misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "called while a capture is open");
}

CUresult standin_refuse_event(struct event *event) {
  struct capture *capture = capture_of(event->capture_id);
  if (capture) capture->invalid = true;
  return standin_misuse(CUDA_ERROR_CAPTURED_EVENT, "the event is of a capture");
}

CUresult standin_refuse_captured(struct stream *stream) {
  stream->capture->invalid = true;
  return standin_misuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream captures");
}

CUresult standin_capture_op(struct stream *stream, struct op *op) {
  struct capture *capture = stream->capture;
  struct plan *plan = capture->plan;
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  int *deps = malloc(sizeof *deps);
  if (plan->count == plan->capacity) {
    int wanted = plan->capacity ? plan->capacity * 2 : 8;
    struct node *larger = realloc(plan->nodes, sizeof *larger * (size_t)wanted);
    if (larger) {
      plan->nodes = larger;
      plan->capacity = wanted;
    }
  }
  if (!deps || plan->count == plan->capacity) {
    free(deps);
    capture->invalid = true;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  plan->nodes[plan->count] = (struct node){ *op, stream->deps, stream->dep_count };
  deps[0] = plan->count++;
  stream->deps = deps;
  stream->dep_count = 1;
  return CUDA_SUCCESS;
}

CUresult standin_capture_record(struct stream *stream, struct event *event) {
  if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  int count, *deps = join(stream->deps, stream->dep_count, NULL, 0, &count);
  if (!deps) return CUDA_ERROR_OUT_OF_MEMORY;
  free(event->deps);
  event->deps = deps;
  event->dep_count = count;
  event->capture_id = stream->capture->id;
  return CUDA_SUCCESS;
}

CUresult standin_capture_wait(struct stream *stream, struct event *event, bool *handled) {
  if (!event->capture_id && !stream->capture) return CUDA_SUCCESS;
  *handled = true;
  if (stream->capture && stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!event->capture_id) {
    if (event->recorded == 0) return CUDA_SUCCESS;
    stream->capture->invalid = true;
    return standin_misuse(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "a capture would depend on work outside of it");
  }
  struct capture *capture = capture_of(event->capture_id);
  if (!capture) return standin_misuse(CUDA_ERROR_INVALID_VALUE, "the event's capture has ended");
  if (stream->capture && stream->capture != capture) {
    stream->capture->invalid = capture->invalid = true;
    return standin_misuse(CUDA_ERROR_STREAM_CAPTURE_MERGE, "two captures would become one");
  }
  if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  int count, *deps = join(stream->deps, stream->capture ? stream->dep_count : 0, event->deps, event->dep_count, &count);
  if (!deps) return CUDA_ERROR_OUT_OF_MEMORY;
  free(stream->deps);
  stream->deps = deps;
  stream->dep_count = count;
  stream->capture = capture;
  return CUDA_SUCCESS;
}

CUresult standin_StreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  CUresult result = standin_enter("cuStreamBeginCapture", 0);
  if (result != CUDA_SUCCESS) return result;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream == standin_current()->legacy) return standin_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  if (stream->capture) return standin_leave(standin_misuse(CUDA_ERROR_ILLEGAL_STATE, "the stream captures already"));
  struct capture *capture = calloc(1, sizeof *capture);
  struct plan *plan = capture ? calloc(1, sizeof *plan) : NULL;
  if (!plan) {
    free(capture);
    return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  }
  plan->references = 1;
  *capture = (struct capture){ captures, ++last_capture_id, mode, &standin_thread, stream, plan, false };
  captures = capture;
  stream->capture = capture;
  standin_live[LIVE_CAPTURES]++;
  return standin_leave(CUDA_SUCCESS);
}

static bool has_unjoined(const struct capture *capture) {
  const struct stream *origin = capture->origin;
  for (const struct stream *stream = standin_streams; stream; stream = stream->next)
    for (int i = 0; stream->capture == capture && i < stream->dep_count; i++)
      if (!is_behind(capture->plan, stream->deps[i], origin->deps, origin->dep_count)) return true;
  return false;
}

CUresult standin_StreamEndCapture(CUstream handle, CUgraph *out) {
  CUresult result = standin_enter("cuStreamEndCapture", CALL_RELEASES);
  if (result != CUDA_SUCCESS) return result;
  *out = NULL;
  struct stream *stream = standin_stream(handle);
  if (!stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  struct capture *capture = stream->capture;
  if (!capture) return standin_leave(standin_misuse(CUDA_ERROR_ILLEGAL_STATE, "the stream does not capture"));
  if (capture->origin != stream) {
    capture->invalid = true;
    return standin_leave(standin_misuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "another stream began the capture"));
  }
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != &standin_thread)
    return standin_leave(standin_misuse(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "another thread began the capture"));
  if (capture->invalid) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  else if (has_unjoined(capture))
    result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED; /* no misuse: how a capture that is given up ends */
  struct graph *graph =
    result == CUDA_SUCCESS && standin_thread.forced == CUDA_SUCCESS ? calloc(1, sizeof *graph) : NULL;
  if (graph) {
    graph->plan = capture->plan;
    standin_add(&graph->object, LIVE_GRAPHS, standin_current());
    *out = standin_handle(&graph->object);
  } else {
    if (result == CUDA_SUCCESS) result = CUDA_ERROR_OUT_OF_MEMORY;
    standin_plan_release(capture->plan);
  }
  for (struct stream *each = standin_streams; each; each = each->next)
    if (each->capture == capture) {
      each->capture = NULL;
      each->dep_count = 0;
    }
  struct capture **link = &captures;
  while (*link != capture) link = &(*link)->next;
  *link = capture->next;
  standin_live[LIVE_CAPTURES]--;
  free(capture);
  return standin_leave(result);
}

CUresult standin_ThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  CUresult result = standin_enter("cuThreadExchangeStreamCaptureMode", CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  struct thread *thread = &standin_thread;
  CUstreamCaptureMode before = thread->mode;
  standin_live[LIVE_MODES] += (*mode != CU_STREAM_CAPTURE_MODE_GLOBAL) - (before != CU_STREAM_CAPTURE_MODE_GLOBAL);
  thread->mode = *mode;
  *mode = before;
  return standin_leave(CUDA_SUCCESS);
}

/* ---- Graphs ---------------------------------------------------------------------------------------------------- */

/* Any order that the dependencies allow. The first launch takes what became ready last, later ones choose differently
 * each time: a program must not rely on the order of recording. */
void standin_run_plan(struct stream *stream, const struct plan *plan, uint64_t launch, int *scratch) {
  int n = plan->count, ready_count = 0, *waiting = scratch, *ready = waiting + n;
  uint64_t random = launch;
  for (int i = 0; i < n; i++)
    if ((waiting[i] = plan->nodes[i].dep_count) == 0) ready[ready_count++] = i;
  while (ready_count > 0) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    int pick = launch == 1 ? ready_count - 1 : (int)((random >> 33) % (uint64_t)ready_count);
    int node = ready[pick];
    ready[pick] = ready[--ready_count];
    standin_run_op(stream, &plan->nodes[node].op);
    for (int i = node + 1; i < n; i++)
      for (int k = 0; k < plan->nodes[i].dep_count; k++)
        if (plan->nodes[i].deps[k] == node && --waiting[i] == 0) ready[ready_count++] = i;
  }
}

CUresult standin_GraphDestroy(CUgraph handle) {
  CUresult result = standin_enter("cuGraphDestroy", CALL_RELEASES | CALL_NO_CONTEXT);
  if (result != CUDA_SUCCESS) return result;
  struct graph *graph = standin_find(LIVE_GRAPHS, handle);
  if (!graph) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  standin_remove(&graph->object);
  standin_plan_release(graph->plan);
  free(graph);
  return standin_leave(CUDA_SUCCESS);
}

/* A cluster with a box for each node, as the driver's are. */
CUresult standin_GraphDebugDotPrint(CUgraph handle, const char *path, unsigned int flags) {
  static const char *const kinds[] = { [OP_KERNEL] = "KERNEL", [OP_COPY] = "MEMCPY", [OP_HOST] = "HOST" };
  CUresult result = standin_enter("cuGraphDebugDotPrint", 0);
  if (result != CUDA_SUCCESS) return result;
  struct graph *graph = standin_find(LIVE_GRAPHS, handle);
  if (!graph) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  FILE *file = fopen(path, "w");
  if (!file) return standin_leave(CUDA_ERROR_OPERATING_SYSTEM);
  fprintf(file, "digraph dot {\nsubgraph cluster_1 {\nlabel=\"graph_1\" graph[style=\"dashed\"];\n");
  for (int i = 0; i < graph->plan->count; i++) {
    const struct node *node = &graph->plan->nodes[i];
    fprintf(file, "\"graph_1_node_%d\"[shape=\"record\" label=\"{%s | %s}\"];\n", i, kinds[node->op.kind],
            !(flags & CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE) ? ""
            : node->op.kernel                           ? node->op.kernel->name
                                                        : "-");
    for (int k = 0; k < node->dep_count; k++)
      fprintf(file, "\"graph_1_node_%d\" -> \"graph_1_node_%d\";\n", node->deps[k], i);
  }
  fprintf(file, "}\n}\n");
  return standin_leave(fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM);
}

CUresult standin_GraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
  CUresult result = standin_enter("cuGraphInstantiateWithFlags", CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct graph *graph = standin_find(LIVE_GRAPHS, handle);
  if (!graph) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (flags != 0) return standin_leave(standin_misuse(CUDA_ERROR_INVALID_VALUE, "flags %llu are not played", flags));
  struct exec *exec = calloc(1, sizeof *exec);
  if (!exec) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  exec->references = 1;
  exec->plan = graph->plan;
  exec->plan->references++;
  standin_add(&exec->object, LIVE_EXECS, standin_current());
  *out = standin_handle(&exec->object);
  return standin_leave(CUDA_SUCCESS);
}

static int first_difference(const struct plan *a, const struct plan *b, CUgraphExecUpdateResult *why) {
  *why = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  if (a->count != b->count) return 0;
  for (int i = 0; i < a->count; i++) {
    const struct node *x = &a->nodes[i], *y = &b->nodes[i];
    if (x->dep_count != y->dep_count) return i;
    if (x->dep_count && memcmp(x->deps, y->deps, sizeof *x->deps * (size_t)x->dep_count) != 0) return i;
    if (x->op.kind != y->op.kind) {
      *why = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
      return i;
    }
  }
  *why = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  return -1;
}

CUresult standin_GraphExecUpdate(CUgraphExec exec_handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo *info) {
  CUresult result = standin_enter("cuGraphExecUpdate", 0);
  if (result != CUDA_SUCCESS) return result;
  struct exec *exec = standin_find(LIVE_EXECS, exec_handle);
  struct graph *graph = standin_find(LIVE_GRAPHS, graph_handle);
  if (!exec || !graph) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  memset(info, 0, sizeof *info);
  if (first_difference(exec->plan, graph->plan, &info->result) >= 0)
    return standin_leave(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  graph->plan->references++; /* queued launches have their own */
  standin_plan_release(exec->plan);
  exec->plan = graph->plan;
  return standin_leave(CUDA_SUCCESS);
}

CUresult standin_GraphUpload(CUgraphExec exec_handle, CUstream stream_handle) {
  CUresult result = standin_enter("cuGraphUpload", 0);
  if (result != CUDA_SUCCESS) return result;
  struct exec *exec = standin_find(LIVE_EXECS, exec_handle);
  struct stream *stream = standin_stream(stream_handle);
  if (!exec || !stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  return standin_leave(stream->capture ? standin_refuse_captured(stream) : CUDA_SUCCESS);
}

CUresult standin_GraphLaunch(CUgraphExec exec_handle, CUstream stream_handle) {
  CUresult result = standin_enter("cuGraphLaunch", 0);
  if (result != CUDA_SUCCESS) return result;
  struct exec *exec = standin_find(LIVE_EXECS, exec_handle);
  struct stream *stream = standin_stream(stream_handle);
  if (!exec || !stream) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (exec->object.context != stream->object.context)
    return standin_leave(standin_misuse(CUDA_ERROR_INVALID_HANDLE, "graph and stream belong to different GPUs"));
  if (stream->capture) return standin_leave(standin_refuse_captured(stream)); /* child graphs are not played */
  int *scratch = malloc(sizeof *scratch * (2 * (size_t)exec->plan->count + 1));
  if (!scratch) return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
  struct task task = {
    .kind = TASK_GRAPH, .exec = exec, .plan = exec->plan, .number = exec->launched + 1, .scratch = scratch
  };
  result = standin_enqueue(stream, &task);
  if (result == CUDA_SUCCESS) exec->launched++;
  else free(scratch);
  return standin_leave(result);
}

void standin_exec_release(struct exec *exec) {
  if (--exec->references > 0) return;
  standin_plan_release(exec->plan);
  free(exec);
}

CUresult standin_GraphExecDestroy(CUgraphExec handle) {
  CUresult result = standin_enter("cuGraphExecDestroy", CALL_RELEASES | CALL_UNSAFE);
  if (result != CUDA_SUCCESS) return result;
  struct exec *exec = standin_find(LIVE_EXECS, handle);
  if (!exec) return standin_leave(CUDA_ERROR_INVALID_HANDLE);
  if (exec->finished < exec->launched && exec->object.context->lost == CUDA_SUCCESS)
    standin_misuse(CUDA_SUCCESS, "a launch of the graph is queued");
  standin_remove(&exec->object);
  standin_exec_release(exec);
  return standin_leave(CUDA_SUCCESS);
}
