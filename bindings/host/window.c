#include "window.h"

#ifndef NIB_HOST_SDL

bool window_open(const char **reason) {
  *reason = "nibble-host was built without SDL2";
  return false;
}
bool window_show(const struct serving_view *view, double frame_ms, double budget_ms) {
  (void)view, (void)frame_ms, (void)budget_ms;
  return false;
}
void window_close(void) {}

#else
#include <SDL.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>

enum {
  COLUMNS = 32,
  CELL = 24,
  GAP = 2,
  MARGIN = 12,
  BAR = 18,
  WIDTH = COLUMNS * CELL + 2 * MARGIN,
  ROWS = PAGES / COLUMNS,
  LIST = MOST_REQUESTS * 10,
  HEIGHT = ROWS * CELL + 4 * MARGIN + BAR + LIST
};

static SDL_Window *window;
static SDL_Renderer *renderer;

/* What to show next. It belongs to the window's thread while is_taken is set, otherwise to the frame's thread, which
 * does not wait for it. */
static struct {
  pthread_t thread;
  sem_t opened, work;
  bool is_taken, is_open, must_quit; /* atomic */
  struct serving_view view;
  double frame_ms, budget_ms;
  char reason[128];
} next;

static bool get(const bool *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
static void set(bool *flag, bool value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

static void wait_for(sem_t *semaphore) {
  while (sem_wait(semaphore) != 0) {}
}

static void fill(int x, int y, int width, int height, Uint8 red, Uint8 green, Uint8 blue) {
  SDL_SetRenderDrawColor(renderer, red, green, blue, 255);
  SDL_RenderFillRect(renderer, &(SDL_Rect){ x, y, width, height });
}

/* Gives consecutive ids colours that differ clearly. */
static void color_of(int id, Uint8 rgb[3]) {
  int hue = id * 137 % 360, sector = hue / 60, ramp = 90 + (hue % 60) * 150 / 60, fall = 240 - (hue % 60) * 150 / 60;
  const int table[6][3] = { { 240, ramp, 90 }, { fall, 240, 90 }, { 90, 240, ramp },
                            { 90, fall, 240 }, { ramp, 90, 240 }, { 240, 90, fall } };
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

/* Draws a progress bar for each request. */
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

/* Puts the figures into the window's title, since SDL2 draws no text. */
static void tell(const struct serving_view *view, double frame_ms, double budget_ms) {
  char title[160];
  snprintf(
    title, sizeof title,
    "nibble: %d of %d pages free, %d requests, a colour each | frame %.1f ms, mark at %.1f ms | requests' progress",
    view->free_pages, PAGES, view->running, frame_ms, budget_ms);
  SDL_SetWindowTitle(window, title);
}

static void draw(const struct serving_view *view, double frame_ms, double budget_ms) {
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
}

static bool open_window(void) {
  if (SDL_Init(SDL_INIT_VIDEO) == 0)
    window = SDL_CreateWindow("nibble", SDL_WINDOWPOS_UNDEFINED, SDL_WINDOWPOS_UNDEFINED, WIDTH, HEIGHT, 0);
  if (window) renderer = SDL_CreateRenderer(window, -1, 0);
  if (!renderer) snprintf(next.reason, sizeof next.reason, "%s", SDL_GetError());
  return renderer != NULL;
}

/* All calls of SDL are in this thread, so that a slow display does not delay a frame. */
static void *window_thread(void *unused) {
  bool goes_on = open_window();
  set(&next.is_open, goes_on);
  sem_post(&next.opened);
  for (long drawn = 0; goes_on; drawn++) {
    wait_for(&next.work);
    for (SDL_Event event; SDL_PollEvent(&event);) goes_on = goes_on && event.type != SDL_QUIT;
    if (get(&next.must_quit)) break;
    if (drawn % 30 == 0) tell(&next.view, next.frame_ms, next.budget_ms);
    draw(&next.view, next.frame_ms, next.budget_ms);
    set(&next.is_taken, false);
  }
  set(&next.is_open, false);
  SDL_DestroyRenderer(renderer);
  SDL_DestroyWindow(window);
  SDL_Quit();
  return unused;
}

bool window_open(const char **reason) {
  *reason = "cannot start a thread";
  if (sem_init(&next.opened, 0, 0) != 0 || sem_init(&next.work, 0, 0) != 0) return false;
  if (pthread_create(&next.thread, NULL, window_thread, NULL) != 0) return false;
  wait_for(&next.opened);
  *reason = next.reason;
  if (!get(&next.is_open)) pthread_join(next.thread, NULL);
  return get(&next.is_open);
}

bool window_show(const struct serving_view *view, double frame_ms, double budget_ms) {
  if (get(&next.is_taken)) return get(&next.is_open); /* it still draws an earlier frame */
  next.view = *view;
  next.frame_ms = frame_ms;
  next.budget_ms = budget_ms;
  set(&next.is_taken, true);
  sem_post(&next.work);
  return get(&next.is_open);
}

void window_close(void) {
  set(&next.must_quit, true);
  sem_post(&next.work);
  pthread_join(next.thread, NULL);
}
#endif
