/* Runs the scripts of a folder, each in its own sandbox, on one thread. The frame waits for them until its deadline and
 * then goes on, whatever they do. */
#ifndef HOST_SCRIPTS_H
#define HOST_SCRIPTS_H

#include <pthread.h>
#include <semaphore.h>

#include "../nibble_lua.h" /* which finds nibble.h by -Iruntime */
#include "serving.h"

enum { MOST_SCRIPTS = 32 };

struct script {
  char name[64]; /* file name */
  nib_sandbox *sandbox;
  struct scripts *scripts;
  long long stamp; /* stamp_of the file at the last attempt to load it */
  bool is_loaded;  /* some version is loaded */
  long calls, raised, expired, exhausted;
  long long worst_us;   /* longest call */
  long long printed_us; /* when its last error was printed */
  int strikes;          /* calls that overran their budget by STRIKE_US */
};

struct scripts {
  const char *folder;
  bool is_quiet;
  struct script *list[MOST_SCRIPTS];
  int count, first; /* first: the script to begin the next frame with */

  /* The two threads share no lock: the system may suspend the script thread while it holds one. */
  pthread_t thread;
  sem_t work;
  int done[2];          /* a pipe; the script thread writes a byte when a frame's scripts are done */
  bool is_busy;         /* atomic; while set, the fields below belong to the script thread */
  bool must_quit;       /* atomic */
  bool is_cancelling;   /* atomic; the frame is using `running` */
  nib_sandbox *running; /* atomic; the sandbox to cancel, or NULL */

  double dt;
  long long deadline_us;
  struct serving_view view;
  int wanted_running; /* the view.most_running that scripts asked for; 0: none */
  long skipped;       /* calls that were skipped for lack of time */
};

long long host_now_us(void);

/* Starts the thread, which loads the folder's scripts. False if it cannot. */
bool scripts_open(struct scripts *scripts, const char *folder, bool is_quiet);
/* Starts to call every script's on_frame(dt). False if the scripts are still loading or busy with an earlier frame. */
bool scripts_run(struct scripts *scripts, double dt, long long deadline_us, const struct serving_view *view);
/* Waits for the scripts until the deadline, then cancels the one that runs. True if all are done. */
bool scripts_wait(struct scripts *scripts, long long deadline_us);
/* Calls each script's on_unload and closes everything. */
void scripts_close(struct scripts *scripts);

#endif
