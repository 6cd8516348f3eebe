/* A toy serving engine: requests arrive, get pages of a KV cache, and grow by a token in each frame. */
#ifndef HOST_SERVING_H
#define HOST_SERVING_H

#include <stdbool.h>

#include "../../runtime/nibble.h"

enum { PAGES = 256, PAGE_SIZE = 16, HEADS = 2, HEAD_DIM = 64, MOST_REQUESTS = 16, MOST_PAGES = 24, MOST_TOKENS = 256 };

struct request {
  int id; /* from 1; 0: unused */
  int length, target;
  int page_count, pages[MOST_PAGES];
};

/* The engine's state that scripts and the window see. It holds no pointers, so that it can be copied. */
struct serving_view {
  long frame;
  int running, most_running, free_pages, finished;
  long tokens;
  struct request requests[MOST_REQUESTS];
  int owner[PAGES]; /* a request's id; 0: free */
};

struct serving {
  struct serving_view view;
  nib_runtime *runtime;
  nib_stream *stream;
  nib_tensor *k_cache, *v_cache, *k_scales, *v_scales, *source, *slots;
  int64_t pending[MOST_TOKENS]; /* slots of this frame's tokens */
  int pending_count;
  unsigned random;
  int last_id;
};

nib_status serving_open(struct serving *serving, nib_runtime *runtime);
/* One step: frees the pages of finished requests, appends a token to each running one, admits new ones, and queues the
 * operation that quantizes the tokens' K and V into their pages. Does not wait for it. */
nib_status serving_tick(struct serving *serving);
void serving_close(struct serving *serving);

#endif
