/* A window with the page table, where SDL2 was there at build time. */
#ifndef HOST_WINDOW_H
#define HOST_WINDOW_H

#include "serving.h"

/* False, with a reason in words, if there can be none. */
bool window_open(const char **reason);
/* Draws the pool's pages, a colour for each request, and below a bar of the frame's time against 16.7 ms. False when the
 * window was closed. */
bool window_draw(const struct serving_view *view, double frame_ms, double budget_ms);
void window_close(void);

#endif
