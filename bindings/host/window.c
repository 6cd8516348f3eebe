#include "window.h"

#ifndef NIB_HOST_SDL

bool window_open(const char **reason) {
  *reason = "built without SDL2";
  return false;
}
bool window_draw(const struct serving_view *view, double frame_ms, double budget_ms) {
  (void)view, (void)frame_ms, (void)budget_ms;
  return false;
}
void window_close(void) {}

#else
#include <SDL.h>

enum { COLUMNS = 32, CELL = 24, GAP = 2, MARGIN = 12, BAR = 18, WIDTH = COLUMNS * CELL + 2 * MARGIN,
       ROWS = PAGES / COLUMNS, LIST = MOST_REQUESTS * 10, HEIGHT = ROWS * CELL + 4 * MARGIN + BAR + LIST };

static SDL_Window *window;
static SDL_Renderer *renderer;

bool window_open(const char **reason) {
  if (SDL_Init(SDL_INIT_VIDEO) == 0) window = SDL_CreateWindow("nibble: page table", SDL_WINDOWPOS_UNDEFINED, SDL_WINDOWPOS_UNDEFINED, WIDTH, HEIGHT, 0);
  if (window) renderer = SDL_CreateRenderer(window, -1, 0);
  if (!renderer) *reason = SDL_GetError();
  return renderer != NULL;
}

static void fill(int x, int y, int width, int height, Uint8 red, Uint8 green, Uint8 blue) {
  SDL_SetRenderDrawColor(renderer, red, green, blue, 255);
  SDL_RenderFillRect(renderer, &(SDL_Rect){ x, y, width, height });
}

/* Neighbouring ids get colours far apart. */
static void color_of(int id, Uint8 rgb[3]) {
  int hue = id * 137 % 360, sector = hue / 60, ramp = 90 + (hue % 60) * 150 / 60, fall = 240 - (hue % 60) * 150 / 60;
  const int table[6][3] = { { 240, ramp, 90 }, { fall, 240, 90 }, { 90, 240, ramp }, { 90, fall, 240 }, { ramp, 90, 240 }, { 240, 90, fall } };
  for (int i = 0; i < 3; i++) rgb[i] = (Uint8)table[sector][i];
}

static void draw_pages(const struct serving_view *view) {
  Uint8 filled[PAGES] = { 0 }, rgb[3]; /* tokens in each page */
  for (int i = 0; i < MOST_REQUESTS; i++)
    for (int k = 0; k < view->requests[i].page_count; k++) {
      int left = view->requests[i].length - k * PAGE_SIZE;
      filled[view->requests[i].pages[k]] = (Uint8)(left < PAGE_SIZE ? left : PAGE_SIZE);
    }
  for (int i = 0; i < PAGES; i++) {
    int x = MARGIN + i % COLUMNS * CELL, y = MARGIN + i / COLUMNS * CELL, size = CELL - GAP;
    fill(x, y, size, size, 40, 42, 48);
    if (!view->owner[i]) continue;
    color_of(view->owner[i], rgb);
    int height = size * filled[i] / PAGE_SIZE;
    fill(x, y + size - height, size, height, rgb[0], rgb[1], rgb[2]);
  }
}

/* A line for each request: how far it is. */
static void draw_requests(const struct serving_view *view, int y) {
  Uint8 rgb[3];
  for (int i = 0; i < MOST_REQUESTS; i++) {
    const struct request *request = &view->requests[i];
    int width = COLUMNS * CELL - GAP;
    fill(MARGIN, y + i * 10, width, 7, 40, 42, 48);
    if (!request->id) continue;
    color_of(request->id, rgb);
    fill(MARGIN, y + i * 10, width * request->length / request->target, 7, rgb[0], rgb[1], rgb[2]);
  }
}

bool window_draw(const struct serving_view *view, double frame_ms, double budget_ms) {
  for (SDL_Event event; SDL_PollEvent(&event);)
    if (event.type == SDL_QUIT) return false;
  SDL_SetRenderDrawColor(renderer, 24, 25, 29, 255);
  SDL_RenderClear(renderer);
  draw_pages(view);
  int y = ROWS * CELL + 2 * MARGIN, full = COLUMNS * CELL - GAP;
  int width = (int)(full * frame_ms / 16.7), mark = (int)(full * budget_ms / 16.7);
  bool late = frame_ms > budget_ms + 2;
  fill(MARGIN, y, full, BAR, 40, 42, 48);
  fill(MARGIN, y, width < full ? width : full, BAR, late ? 230 : 90, late ? 80 : 200, 90);
  fill(MARGIN + mark, y - 3, 2, BAR + 6, 240, 240, 240);
  draw_requests(view, y + BAR + MARGIN);
  SDL_RenderPresent(renderer);
  return true;
}

void window_close(void) {
  SDL_DestroyRenderer(renderer);
  SDL_DestroyWindow(window);
  SDL_Quit();
}
#endif
