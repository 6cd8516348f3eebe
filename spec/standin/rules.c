/* What a driver does with a stream that captures, told by the driver itself: each case makes one call while a capture
 * is open, and says what the call must return and whether the capture must survive it. The stand-in has to pass; the
 * same program run on a machine with a GPU says where the stand-in and the driver differ: cc -std=gnu11 -isystem
 * /usr/local/cuda/include -o rules spec/standin/rules.c runtime/cuda/driver.c -ldl && ./rules A line for each
 * difference, and a last one that counts them; exit status 0: there is none, 1: there are some, 2: what every driver
 * has to do failed, so that the rest was not tried. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../runtime/cuda/driver.h"

static struct nib_driver cu;
static CUstream s, other, forked;
static CUmemoryPool pool;
static CUdeviceptr block;
static CUevent finished, inner, late;
static CUgraph graph, larger;
static CUgraphExec exec;
static void *pinned;
static int rules, differences;

static void fail_hard(const char *what, CUresult result) {
  const char *name = "?";
  if (cu.GetErrorName) cu.GetErrorName(result, &name);
  fprintf(stderr, "%s: %s; stopped after %d rules\n", what, name, rules);
  exit(2);
}

#define OK(call)                                            \
  do {                                                      \
    CUresult result_ = (call);                              \
    if (result_ != CUDA_SUCCESS) fail_hard(#call, result_); \
  } while (0)

static void differ(const char *mode, const char *name, const char *what, CUresult expected, CUresult got) {
  const char *expected_name = "?", *got_name = "?";
  cu.GetErrorName(expected, &expected_name);
  cu.GetErrorName(got, &got_name);
  printf("%s, %s: %s: expected %s, got %s\n", mode, name, what, expected_name, got_name);
  differences++;
}

/* A node: a copy between pinned memory and the block. */
static CUresult work(CUstream stream) { return cu.MemcpyHtoDAsync(block, pinned, 64, stream); }

static void begin(CUstreamCaptureMode mode) {
  OK(cu.StreamBeginCapture(s, mode));
  OK(work(s));
}

static CUgraph captured(int nodes) {
  CUgraph result;
  begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  for (int i = 1; i < nodes; i++) OK(work(s));
  OK(cu.StreamEndCapture(s, &result));
  return result;
}

/* ---- The calls ------------------------------------------------------------------------------------------------- */

static CUdeviceptr fresh;
static CUresult allocate(void) { return cu.MemAllocFromPoolAsync(&fresh, 256, pool, other); }
static CUresult release(void) { return cu.MemFreeAsync(fresh, other); }
static void *fresh_host;
static CUresult allocate_host(void) { return cu.MemHostAlloc(&fresh_host, 256, 0); }
static CUresult release_host(void) { return cu.MemFreeHost(fresh_host); }
static CUresult query_event(void) { return cu.EventQuery(finished); }
static CUresult query_other(void) { return cu.StreamQuery(other); }
static CUresult query_own(void) { return cu.StreamQuery(s); }
static CUresult synchronize_other(void) { return cu.StreamSynchronize(other); }
static CUresult synchronize_own(void) { return cu.StreamSynchronize(s); }
static CUresult elapsed(void) {
  float ms;
  return cu.EventElapsedTime(&ms, finished, finished);
}
static CUresult create_stream(void) { return cu.StreamCreateWithPriority(&forked, CU_STREAM_NON_BLOCKING, 0); }
static CUresult destroy_stream(void) { return cu.StreamDestroy(forked); }
static CUresult create_event(void) { return cu.EventCreate(&late, CU_EVENT_DEFAULT); }
static CUresult destroy_event(void) { return cu.EventDestroy(late); }
static CUresult record_outside(void) { return cu.EventRecord(finished, other); }
static CUresult work_outside(void) { return work(other); }
static CUresult copy_own(void) { return cu.MemcpyAsync(block, (CUdeviceptr)(uintptr_t)pinned, 64, s); }
static CUresult copy_outside(void) { return cu.MemcpyAsync(block, (CUdeviceptr)(uintptr_t)pinned, 64, other); }
static CUresult context_own(void) {
  CUcontext context;
  return cu.StreamGetCtx(s, &context);
}
static CUresult print_graph(void) {
  return cu.GraphDebugDotPrint(graph, "/dev/null", CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE);
}
static CUresult instantiate(void) { return cu.GraphInstantiateWithFlags(&exec, graph, 0); }
static CUresult update(void) {
  CUgraphExecUpdateResultInfo info;
  return cu.GraphExecUpdate(exec, graph, &info);
}
static CUresult update_topology(void) {
  CUgraphExecUpdateResultInfo info;
  return cu.GraphExecUpdate(exec, larger, &info);
}
static CUresult upload(void) { return cu.GraphUpload(exec, other); }
static CUresult launch_outside(void) { return cu.GraphLaunch(exec, other); }
static CUresult destroy_exec(void) { return cu.GraphExecDestroy(exec); }
static CUresult destroy_graph(void) { return cu.GraphDestroy(graph); }
static CUresult trim(void) { return cu.MemPoolTrimTo(pool, 0); }
static CUresult wait_outside(void) { return cu.StreamWaitEvent(s, finished, 0); }
static CUresult begin_again(void) { return cu.StreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL); }
static CUresult end_other(void) {
  CUgraph none;
  return cu.StreamEndCapture(other, &none);
}
static CUresult query_inner(void) {
  OK(cu.EventRecord(inner, s));
  return cu.EventQuery(inner);
}
static CUresult fork_and_join(void) {
  OK(cu.EventRecord(inner, s));
  OK(cu.StreamWaitEvent(other, inner, 0));
  OK(work(other));
  OK(cu.EventRecord(inner, other));
  return cu.StreamWaitEvent(s, inner, 0);
}
static CUresult fork_without_work(void) {
  OK(cu.EventRecord(inner, s));
  return cu.StreamWaitEvent(other, inner, 0);
}
static CUresult fork_only(void) {
  OK(fork_without_work());
  return work(other);
}
static CUresult end_forked(void) {
  OK(fork_only());
  return end_other();
}
static CUresult legacy_event(void) { return cu.EventRecord(late, s); }

enum { NEEDS_BLOCK = 1, NEEDS_HOST = 2, NEEDS_EXEC = 4, NEEDS_STREAM = 8, NEEDS_EVENT = 16 };

#define FINE      CUDA_SUCCESS, CUDA_SUCCESS
#define REFUSED   CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
#define CAPTURED  CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
#define ISOLATED  CUDA_ERROR_STREAM_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
#define UNMATCHED CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
#define UNJOINED  CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNJOINED
#define ILLEGAL   CUDA_ERROR_ILLEGAL_STATE, CUDA_SUCCESS

static const struct {
  const char *name;
  CUresult (*call)(void);
  int needs, leaves;             /* what exists before; what exists after it if it works */
  CUresult strict, end;          /* in a thread-local capture: the call's result and the capture's */
  CUresult relaxed, relaxed_end; /* the same after the thread's mode was exchanged for the relaxed one */
} cases[] = {
  { "cuMemAllocFromPoolAsync, another stream", allocate, 0, NEEDS_BLOCK, REFUSED, FINE },
  { "cuMemFreeAsync, another stream", release, NEEDS_BLOCK, 0, REFUSED, FINE },
  { "cuMemHostAlloc", allocate_host, 0, NEEDS_HOST, REFUSED, FINE },
  { "cuMemFreeHost", release_host, NEEDS_HOST, 0, REFUSED, FINE },
  { "cuEventQuery", query_event, 0, 0, REFUSED, FINE },
  { "cuStreamQuery, another stream", query_other, 0, 0, REFUSED, FINE },
  { "cuStreamSynchronize, another stream", synchronize_other, 0, 0, REFUSED, FINE },
  { "cuStreamQuery, its stream", query_own, 0, 0, REFUSED, REFUSED },
  { "cuStreamSynchronize, its stream", synchronize_own, 0, 0, REFUSED, REFUSED },
  { "cuEventQuery, an event of the capture", query_inner, 0, 0, CAPTURED, CAPTURED },
  { "cuEventElapsedTime", elapsed, 0, 0, FINE, FINE },
  { "cuStreamCreateWithPriority", create_stream, 0, NEEDS_STREAM, FINE, FINE },
  { "cuStreamDestroy", destroy_stream, NEEDS_STREAM, 0, FINE, FINE },
  { "cuEventCreate", create_event, 0, NEEDS_EVENT, FINE, FINE },
  { "cuEventDestroy", destroy_event, NEEDS_EVENT, 0, FINE, FINE },
  { "cuEventRecord, its stream", legacy_event, NEEDS_EVENT, NEEDS_EVENT, FINE, FINE },
  { "cuEventRecord, another stream", record_outside, 0, 0, FINE, FINE },
  { "cuMemcpyHtoDAsync, another stream", work_outside, 0, 0, FINE, FINE },
  { "cuMemcpyAsync, its stream", copy_own, 0, 0, FINE, FINE },
  { "cuMemcpyAsync, another stream", copy_outside, 0, 0, FINE, FINE },
  { "cuStreamGetCtx, its stream", context_own, 0, 0, FINE, FINE },
  { "cuGraphDebugDotPrint", print_graph, 0, 0, FINE, FINE },
  { "cuGraphInstantiateWithFlags", instantiate, 0, NEEDS_EXEC, REFUSED, FINE },
  { "cuGraphExecUpdate", update, NEEDS_EXEC, NEEDS_EXEC, FINE, FINE },
  { "cuGraphExecUpdate, another topology", update_topology, NEEDS_EXEC, NEEDS_EXEC,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, CUDA_SUCCESS, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, CUDA_SUCCESS },
  { "cuGraphUpload, another stream", upload, NEEDS_EXEC, NEEDS_EXEC, FINE, FINE },
  { "cuGraphLaunch, another stream", launch_outside, NEEDS_EXEC, NEEDS_EXEC, FINE, FINE },
  { "cuGraphExecDestroy", destroy_exec, NEEDS_EXEC, 0, REFUSED, FINE },
  { "cuMemPoolTrimTo", trim, 0, 0, REFUSED, FINE },
  { "cuStreamWaitEvent, an event of before", wait_outside, 0, 0, ISOLATED, ISOLATED },
  { "cuStreamBeginCapture again", begin_again, 0, 0, ILLEGAL, ILLEGAL },
  { "cuStreamEndCapture, another stream", end_other, 0, 0, ILLEGAL, ILLEGAL },
  { "cuStreamEndCapture, a stream that joined", end_forked, 0, 0, UNMATCHED, UNMATCHED },
  { "a fork and a join", fork_and_join, 0, 0, FINE, FINE },
  { "a fork without work", fork_without_work, 0, 0, FINE, FINE },
  { "a fork without a join", fork_only, 0, 0, UNJOINED, UNJOINED },
};

static void make(int what) {
  if (what & NEEDS_BLOCK) OK(allocate());
  if (what & NEEDS_HOST) OK(allocate_host());
  if (what & NEEDS_EXEC) OK(instantiate());
  if (what & NEEDS_STREAM) OK(create_stream());
  if (what & NEEDS_EVENT) OK(create_event());
  OK(cu.StreamSynchronize(other));
}

static void unmake(int what) {
  OK(cu.StreamSynchronize(other));
  if (what & NEEDS_BLOCK) OK(release());
  if (what & NEEDS_HOST) OK(release_host());
  if (what & NEEDS_EXEC) OK(destroy_exec());
  if (what & NEEDS_STREAM) OK(destroy_stream());
  if (what & NEEDS_EVENT) OK(destroy_event());
}

static void try_case(size_t i, bool relaxed) {
  const char *mode = relaxed ? "relaxed thread" : "thread-local capture";
  CUstreamCaptureMode exchanged = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUresult expected = relaxed ? cases[i].relaxed : cases[i].strict;
  CUresult expected_end = relaxed ? cases[i].relaxed_end : cases[i].end;
  CUgraph result_graph = NULL;
  make(cases[i].needs);
  begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  if (relaxed) OK(cu.ThreadExchangeStreamCaptureMode(&exchanged));
  CUresult result = cases[i].call();
  if (relaxed) OK(cu.ThreadExchangeStreamCaptureMode(&exchanged));
  CUresult end = cu.StreamEndCapture(s, &result_graph);
  rules++;
  if (result != expected) differ(mode, cases[i].name, "the call", expected, result);
  if (end != expected_end) differ(mode, cases[i].name, "the end", expected_end, end);
  if (result_graph) OK(cu.GraphDestroy(result_graph));
  unmake(result == CUDA_SUCCESS ? cases[i].leaves : cases[i].needs);
  OK(work(s)); /* both streams are usable again */
  OK(work(other));
  OK(cu.StreamSynchronize(s));
  OK(cu.StreamSynchronize(other));
}

int main(void) {
  char reason[192];
  CUcontext context, popped;
  int off = 0;
  if (!nib_driver_open(&cu, reason, sizeof reason)) {
    fprintf(stderr, "%s\n", reason);
    return 2;
  }
  CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                           .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
  OK(cu.DevicePrimaryCtxRetain(&context, 0));
  OK(cu.CtxPushCurrent(context));
  OK(cu.MemPoolCreate(&pool, &props));
  OK(cu.MemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &off));
  OK(cu.StreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, 0));
  OK(cu.StreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
  OK(cu.MemHostAlloc(&pinned, 64, 0));
  memset(pinned, 0, 64);
  OK(cu.MemAllocFromPoolAsync(&block, 256, pool, other));
  OK(cu.EventCreate(&finished, CU_EVENT_DEFAULT));
  OK(cu.EventCreate(&inner, CU_EVENT_DEFAULT));
  OK(cu.EventRecord(finished, other));
  OK(cu.StreamSynchronize(other));
  graph = captured(1);
  larger = captured(2);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    try_case(i, false);
    try_case(i, true);
  }
  /* The graph itself goes as the last, inside a capture. */
  CUgraph result_graph = NULL;
  begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  CUresult result = destroy_graph();
  rules++;
  if (result != CUDA_SUCCESS) differ("thread-local capture", "cuGraphDestroy", "the call", CUDA_SUCCESS, result);
  OK(cu.StreamEndCapture(s, &result_graph));
  OK(cu.GraphDestroy(result_graph));
  if (result != CUDA_SUCCESS) OK(destroy_graph());
  OK(cu.GraphDestroy(larger));
  OK(cu.EventDestroy(finished));
  OK(cu.EventDestroy(inner));
  OK(cu.MemFreeAsync(block, other));
  OK(cu.StreamSynchronize(other));
  OK(cu.StreamDestroy(s));
  OK(cu.StreamDestroy(other));
  OK(cu.MemFreeHost(pinned));
  OK(cu.MemPoolDestroy(pool));
  OK(cu.CtxPopCurrent(&popped));
  OK(cu.DevicePrimaryCtxRelease(0));
  printf("%d rules tried on a driver for CUDA %d.%d: %d differences\n", rules, cu.version / 1000,
         cu.version % 1000 / 10, differences);
  return differences > 0;
}
