/* A window that shows the page table. Needs SDL2 at build time. */
#ifndef HOST_WINDOW_H
#define HOST_WINDOW_H

#include "serving.h"

/* False, with a reason in words, if it cannot open one. */
bool window_open(const char **reason);
/* Shows the pages in the colour of their request, the frame's time as a bar of 16.7 ms with a mark at the budget, and
 * the progress of each request. Another thread draws, and skips frames that it has no time for. False if the window was
 * closed. */
bool window_show(const struct serving_view *view, double frame_ms, double budget_ms);
void window_close(void);

#endif
