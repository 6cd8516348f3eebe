/* The scripts of a folder, each in a sandbox, on a thread of their own: the frame waits for them until its time is over
 * and goes on without them, whatever they do. */
#ifndef HOST_SCRIPTS_H
#define HOST_SCRIPTS_H

#include <pthread.h>
#include <semaphore.h>

#include "../nibble_lua.h" /* which finds nibble.h by -Iruntime */
#include "serving.h"

enum { MOST_SCRIPTS = 32 };

struct script {
  char name[64]; /* of the file */
  nib_sandbox *sandbox;
  struct scripts *scripts;
  long long stamp; /* of the file when it was loaded, or tried */
  bool is_loaded;  /* some version of it */
  long calls, raised, expired, exhausted;
  long long worst_us;   /* longest call */
  long long printed_us; /* when its last error was printed */
  int strikes;          /* calls that could not be stopped in time */
};

struct scripts {
  const char *folder;
  bool is_quiet;
  struct script *list[MOST_SCRIPTS];
  int count, first; /* whose turn it is to be the first */

  /* The frame takes no lock that the script thread holds: that one may be put off by the system at any time. */
  pthread_t thread;
  sem_t work;
  int done[2];          /* a pipe: a byte when a frame's scripts are done */
  bool is_busy;         /* atomic: the fields below are the script thread's */
  bool must_quit;       /* atomic */
  bool is_cancelling;   /* atomic: the frame looks at: */
  nib_sandbox *running; /* atomic: what there is to cancel */

  double dt;
  long long deadline_us;
  struct serving_view view;
  int wanted_running; /* the scripts' wish for view.most_running */
  long skipped;       /* calls for which no time was left */
};

long long host_now_us(void);

/* Starts the thread, which loads what is in the folder. False if it cannot. */
bool scripts_open(struct scripts *scripts, const char *folder, bool is_quiet);
/* Calls every script's on_frame(dt), until the deadline. False: they are still busy with another frame, or loading. */
bool scripts_run(struct scripts *scripts, double dt, long long deadline_us, const struct serving_view *view);
/* Waits for them, until the deadline; then cancels the one that runs. Whether all are done. */
bool scripts_wait(struct scripts *scripts, long long deadline_us);
/* Calls on_unload of each and closes everything. */
void scripts_close(struct scripts *scripts);

#endif
