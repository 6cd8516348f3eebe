/* An example host: a 60 Hz frame loop that ticks a serving engine and runs a folder of untrusted scripts. A script may
 * define on_load(reloaded), on_frame(dt) and on_unload(). It has the module `nibble`, the table `state`, which survives
 * a reload, and the table `host` (scripts.c). A file is reloaded when it changes. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "scripts.h"
#include "window.h"

static const char usage[] =
  "usage: nibble-host [OPTIONS] FOLDER   run the .lua files of a folder, a frame every 1/60 s\n"
  "  --frames N      end after N frames; default: run until Ctrl-C\n"
  "  --budget-ms X   time of a frame; scripts get what the engine's tick leaves of it; default: 8\n"
  "  --window        show the page table (needs a build with SDL2)\n"
  "  --quiet         print neither the output of scripts nor their errors\n";

enum { FRAME_US = 16667 };

static volatile sig_atomic_t stop;

static void on_signal(int number) {
  (void)number;
  stop = 1;
}

static void log_line(void *user, nib_log_level level, const char *message) {
  (void)user;
  if (level >= NIB_LOG_WARNING) fprintf(stderr, "nibble: %s\n", message);
}

static void sleep_until(long long time_us) {
  struct timespec until = { .tv_sec = (time_t)(time_us / 1000000), .tv_nsec = (long)(time_us % 1000000 * 1000) };
  while (!stop && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) {}
}

static int by_size(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return x < y ? -1 : x > y;
}

struct options {
  const char *folder;
  long frames;
  double budget_ms;
  bool window, quiet;
};

static bool read_options(int argc, char **argv, struct options *options) {
  *options = (struct options){ .budget_ms = 8 };
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--window") == 0) options->window = true;
    else if (strcmp(argv[i], "--quiet") == 0) options->quiet = true;
    else if (strcmp(argv[i], "--frames") == 0 && i + 1 < argc) options->frames = atol(argv[++i]);
    else if (strcmp(argv[i], "--budget-ms") == 0 && i + 1 < argc) options->budget_ms = atof(argv[++i]);
    else if (argv[i][0] == '-' || options->folder) return false;
    else options->folder = argv[i];
  }
  return options->folder && options->frames >= 0 && options->budget_ms > 0;
}

struct times {
  float *list; /* ms of each frame */
  long count, capacity;
  long late, busy; /* frames whose scripts did not end in time, or could not start */
  bool first;      /* the frame's thread has real-time priority */
};

static void add_time(struct times *times, double ms) {
  if (times->count == times->capacity) {
    long capacity = times->capacity ? 2 * times->capacity : 4096;
    float *larger = realloc(times->list, sizeof *larger * (size_t)capacity);
    if (!larger) return;
    times->list = larger;
    times->capacity = capacity;
  }
  times->list[times->count++] = (float)ms;
}

static void report(struct times *times, const struct options *options, long skipped, const struct serving_view *view) {
  if (times->count == 0) return;
  qsort(times->list, (size_t)times->count, sizeof *times->list, by_size);
  long over = 0;
  for (long i = 0; i < times->count; i++) over += times->list[i] > options->budget_ms + 2;
  printf(
    "%ld frames of at most %.1f ms, %s priority: p50 %.2f ms, p99 %.2f ms, worst %.2f ms, %ld past budget + 2 ms\n",
    times->count, options->budget_ms, times->first ? "real-time" : "ordinary", times->list[times->count / 2],
    times->list[times->count * 99 / 100], times->list[times->count - 1], over);
  printf("scripts: not done in time in %ld frames, still busy at the start of %ld frames, %ld calls skipped for lack "
         "of time\n",
         times->late, times->busy, skipped);
  printf("engine: %ld tokens, %d requests finished, %d running, %d of %d pages free\n", view->tokens, view->finished,
         view->running, view->free_pages, PAGES);
}

/* On a busy machine the scheduler may delay an ordinary thread that wakes up by milliseconds, whatever its niceness.
 * The frame's thread mostly sleeps, so real-time priority harms nobody. It needs root, or an rtprio in
 * limits.conf(5). */
static bool go_first(void) {
  return pthread_setschedparam(pthread_self(), SCHED_FIFO, &(struct sched_param){ .sched_priority = 1 }) == 0;
}

static int run(const struct options *options, struct serving *serving, struct scripts *scripts, struct times *times) {
  double last_ms = 0;
  long long next = host_now_us(), before = next;
  scripts_wait(scripts, next + 5000000); /* loading the scripts counts as no frame */
  times->first = go_first();
  next = host_now_us();
  for (long frame = 0; !stop && (options->frames == 0 || frame < options->frames); frame++) {
    long long start = host_now_us(), budget = (long long)(options->budget_ms * 1000), deadline = start + budget;
    nib_status status = serving_tick(serving);
    if (status != NIB_OK) {
      fprintf(stderr, "nibble-host: %s\n", nib_error(serving->runtime));
      return 1;
    }
    /* The scripts' deadline is a little before the frame's, so that they end in time. */
    bool runs = scripts_run(scripts, (double)(start - before) / 1e6, deadline - budget / 16, &serving->view);
    if (options->window && !window_show(&serving->view, last_ms, options->budget_ms)) break;
    if (!runs) times->busy++;
    else if (!scripts_wait(scripts, deadline)) times->late++;
    else if (scripts->wanted_running) serving->view.most_running = scripts->wanted_running;
    last_ms = (double)(host_now_us() - start) / 1000;
    add_time(times, last_ms);
    before = start;
    next += FRAME_US;
    if (next < host_now_us()) next = host_now_us(); /* drop a late frame; do not catch up */
    sleep_until(next);
  }
  return 0;
}

int main(int argc, char **argv) {
  struct options options;
  if (!read_options(argc, argv, &options)) {
    fputs(usage, stderr);
    return 2;
  }
  static struct serving serving;
  static struct scripts scripts;
  const char *reason = "";
  nib_runtime *runtime = NULL;
  nib_status status = nib_runtime_create(&(nib_config){ .log = log_line }, &runtime);
  if (status == NIB_OK) status = serving_open(&serving, runtime);
  if (status != NIB_OK) {
    fprintf(stderr, "nibble-host: %s\n", runtime ? nib_error(runtime) : nib_status_text(status));
    return 1;
  }
  if (options.window && !window_open(&reason)) {
    fprintf(stderr, "nibble-host: cannot open a window: %s\n", reason);
    return 1;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  struct sigaction action = { .sa_handler = on_signal };
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (!scripts_open(&scripts, options.folder, options.quiet)) {
    fprintf(stderr, "nibble-host: cannot start a thread for the scripts\n");
    return 1;
  }
  struct times times = { 0 };
  int result = run(&options, &serving, &scripts, &times);
  scripts_close(&scripts);
  report(&times, &options, scripts.skipped, &serving.view);
  free(times.list);
  if (options.window) window_close();
  serving_close(&serving);
  nib_runtime_close(runtime);
  return result;
}
