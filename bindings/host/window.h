/* A window with the page table, where SDL2 was there at build time. */
#ifndef HOST_WINDOW_H
#define HOST_WINDOW_H

#include "serving.h"

/* False, with a reason in words, if there can be none. */
bool window_open(const char **reason);
/* Shows the pool's pages, a colour for each request; a bar of the frame's time against 16.7 ms, with a mark at the
 * budget; how far each request is. A thread of its own draws; what it has no time for is left out. False when the
 * window was closed. */
bool window_show(const struct serving_view *view, double frame_ms, double budget_ms);
void window_close(void);

#endif
