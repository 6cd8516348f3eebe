#include "serving.h"

#include <string.h>

static nib_status make(struct serving *serving, nib_dtype dtype, int32_t ndim, const int64_t *shape, nib_tensor **out) {
  nib_device *device = nib_stream_device(serving->stream);
  nib_status status = nib_tensor_create(device, dtype, ndim, shape, out);
  return status == NIB_OK ? nib_tensor_fill(serving->stream, *out, NIB_INTEGER(0)) : status;
}

nib_status serving_open(struct serving *serving, nib_runtime *runtime) {
  memset(serving, 0, sizeof *serving);
  serving->runtime = runtime;
  serving->view.free_pages = PAGES;
  serving->view.most_running = 8;
  serving->random = 1;
  const int64_t data[] = { PAGES, PAGE_SIZE, HEADS, HEAD_DIM / 2 },
                scales[] = { PAGES, PAGE_SIZE, HEADS, HEAD_DIM / 16 };
  const int64_t tokens[] = { MOST_TOKENS, HEADS, HEAD_DIM }, slots[] = { MOST_TOKENS };
  nib_status status = nib_stream_create(nib_device_best(runtime), 0, &serving->stream);
  if (status == NIB_OK) status = make(serving, NIB_UINT8, 4, data, &serving->k_cache);
  if (status == NIB_OK) status = make(serving, NIB_UINT8, 4, data, &serving->v_cache);
  if (status == NIB_OK) status = make(serving, NIB_FLOAT8_E4M3FN, 4, scales, &serving->k_scales);
  if (status == NIB_OK) status = make(serving, NIB_FLOAT8_E4M3FN, 4, scales, &serving->v_scales);
  if (status == NIB_OK) status = make(serving, NIB_INT64, 1, slots, &serving->slots);
  if (status == NIB_OK) status = make(serving, NIB_BFLOAT16, 3, tokens, &serving->source);
  if (status == NIB_OK) status = nib_tensor_random_normal(serving->stream, serving->source, 1);
  return status;
}

static int random_below(struct serving *serving, int limit) {
  serving->random = serving->random * 1664525u + 1013904223u;
  return (int)((serving->random >> 8) % (unsigned)limit);
}

/* Adds a token to a request and its slot to this frame's slots. False if there is no room. */
static bool add_token(struct serving *serving, struct request *request) {
  struct serving_view *view = &serving->view;
  if (serving->pending_count == MOST_TOKENS) return false;
  if (request->length == request->page_count * PAGE_SIZE) {
    int page = random_below(serving, PAGES);
    if (view->free_pages == 0 || request->page_count == MOST_PAGES) return false;
    while (view->owner[page]) page = (page + 1) % PAGES;
    view->owner[page] = request->id;
    view->free_pages--;
    request->pages[request->page_count++] = page;
  }
  int at = request->length++;
  serving->pending[serving->pending_count++] = (int64_t)request->pages[at / PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE;
  view->tokens++;
  return true;
}

static void finish(struct serving *serving, struct request *request) {
  struct serving_view *view = &serving->view;
  for (int i = 0; i < request->page_count; i++) view->owner[request->pages[i]] = 0;
  view->free_pages += request->page_count;
  view->running--;
  view->finished++;
  memset(request, 0, sizeof *request);
}

static void admit(struct serving *serving) {
  struct serving_view *view = &serving->view;
  if (view->running >= view->most_running || random_below(serving, 10) > 0) return;
  struct request *request = view->requests;
  while (request->id) request++;
  request->id = ++serving->last_id;
  request->target = 40 + random_below(serving, MOST_PAGES * PAGE_SIZE - 40);
  view->running++;
  for (int prompt = 10 + random_below(serving, 30); prompt > 0 && add_token(serving, request);) prompt--;
}

static nib_status append(struct serving *serving) {
  nib_tensor *rows = NULL, *slots = NULL;
  if (serving->pending_count == 0) return NIB_OK;
  nib_status status = nib_tensor_narrow(serving->source, 0, 0, serving->pending_count, &rows);
  if (status == NIB_OK) status = nib_tensor_narrow(serving->slots, 0, 0, serving->pending_count, &slots);
  if (status == NIB_OK)
    status = nib_tensor_write(serving->stream, slots, serving->pending,
                              sizeof *serving->pending * (size_t)serving->pending_count);
  nib_append_desc desc = { .append_key = rows, .append_value = rows, .slot_mapping = slots };
  desc.paged_kv_cache = (nib_cache){ .k = serving->k_cache, .v = serving->v_cache };
  desc.kv_cache_sf = (nib_cache){ .k = serving->k_scales, .v = serving->v_scales };
  desc.k_scale.value = desc.v_scale.value = 1;
  if (status == NIB_OK) status = nib_append(serving->stream, &desc);
  nib_tensor_release(rows);
  nib_tensor_release(slots);
  return status;
}

nib_status serving_tick(struct serving *serving) {
  struct serving_view *view = &serving->view;
  view->frame++;
  serving->pending_count = 0;
  for (int i = 0; i < MOST_REQUESTS; i++) {
    struct request *request = &view->requests[i];
    if (request->id && (request->length >= request->target || !add_token(serving, request))) finish(serving, request);
  }
  admit(serving);
  nib_status status = append(serving);
  nib_status freed = nib_tick(serving->runtime, 200);
  return status != NIB_OK ? status : freed;
}

void serving_close(struct serving *serving) {
  nib_tensor *all[] = { serving->k_cache,  serving->v_cache, serving->k_scales,
                        serving->v_scales, serving->source,  serving->slots };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) nib_tensor_release(all[i]);
  nib_stream_release(serving->stream);
}
