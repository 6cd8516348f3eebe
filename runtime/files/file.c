/* Reading files, and writing files that replace an old one only when they are complete. */
#define _GNU_SOURCE       /* getrandom, realpath */
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "files.h"

#define PIECE ((size_t)4 << 20) /* bytes between two checks of the deadline */

static nib_status fail(nib_runtime *rt, const char *operation, const char *path, const char *doing, int error) {
  return nib_fail(rt, NIB_FILE, "%s: cannot %s \"%.200s\": %s", operation, doing, path, strerror(error));
}

void nib_file_close(int file) {
  if (file >= 0) close(file);
}

/* ---- Reading --------------------------------------------------------------------------------------------------- */

nib_status nib_file_open(nib_runtime *rt, const char *operation, const char *path, int *out, uint64_t *bytes) {
  struct stat info;
  *out = -1;
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: do not wait for the writer of a pipe */
  if (file < 0 || fstat(file, &info) != 0) {
    nib_status status = fail(rt, operation, path, "read", errno);
    nib_file_close(file);
    return status;
  }
  if (!S_ISREG(info.st_mode)) {
    nib_file_close(file);
    return nib_fail(rt, NIB_FILE, "%s: path: expected a regular file, got %s for \"%.200s\"", operation,
                    S_ISDIR(info.st_mode)    ? "a directory"
                    : S_ISFIFO(info.st_mode) ? "a pipe"
                                             : "a device",
                    path);
  }
  *out = file;
  *bytes = (uint64_t)info.st_size;
  return NIB_OK;
}

nib_status nib_file_read(nib_runtime *rt, const char *operation, const char *path, int file, void *data, size_t bytes,
                         uint64_t offset) {
  unsigned char *at = data;
  while (bytes > 0) {
    if (nib_is_late(rt)) return nib_fail_late(rt, operation);
    ssize_t n = pread(file, at, bytes < PIECE ? bytes : PIECE, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      return fail(rt, operation, path, "read", n == 0 ? EIO : errno); /* 0: the file was truncated meanwhile */
    at += n;
    offset += (uint64_t)n;
    bytes -= (size_t)n;
  }
  return NIB_OK;
}

/* ---- Writing --------------------------------------------------------------------------------------------------- */

struct nib_writer {
  nib_runtime *rt;
  const char *operation;
  int file;
  int error;       /* errno of the first failure; 0: none so far */
  bool late;       /* the failure was the deadline */
  bool waits;      /* it is a pipe or a device, which may block */
  bool replaces;   /* there is an old file */
  char *path;      /* as given; the other strings follow it in the same block */
  char *target;    /* the file that the path leads to */
  char *temporary; /* the .part file; "": the target is written in place */
  size_t bytes;    /* of the block */
};

#define NAME_ROOM 24 /* for the suffix ".0123456789abcdef.part" */

/* A name for the .part file of `target` that nobody can guess. */
static void name_temporary(char *out, const char *target) {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    number = ((uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec ^ (uint64_t)getpid() << 16) * 0x9E3779B97F4A7C15u;
  }
  const char *slash = strrchr(target, '/');
  size_t folder = slash ? (size_t)(slash + 1 - target) : 0, name = strlen(target + folder);
  if (name > 200) name = 200; /* file systems allow 255 bytes */
  sprintf(out, "%.*s.%016llx.part", (int)(folder + name), target, (unsigned long long)number);
}

/* Whether the path must be written in place: pipes, devices, and open files of a process (/dev/stdout, even if it is a
 * regular file). */
static bool is_in_place(const char *path) {
  static const char *const open[] = { "/dev/fd/", "/dev/std", "/proc/" };
  struct stat info;
  for (size_t i = 0; i < sizeof open / sizeof *open; i++)
    if (strncmp(path, open[i], strlen(open[i])) == 0) return true;
  return stat(path, &info) == 0 && !S_ISREG(info.st_mode);
}

#define LINKS 40 /* most links to follow, as in the kernel */

/* Follows symbolic links to a file that does not exist yet. Returns an errno. */
static int follow_links(char *target) {
  char text[PATH_MAX];
  for (int i = 0; i < LINKS; i++) {
    ssize_t length = readlink(target, text, sizeof text);
    if (length < 0) return errno == EINVAL || errno == ENOENT ? 0 : errno; /* no link */
    char *slash = strrchr(target, '/');
    size_t folder = text[0] != '/' && slash ? (size_t)(slash + 1 - target) : 0;
    if (folder + (size_t)length >= PATH_MAX) return ENAMETOOLONG;
    memcpy(target + folder, text, (size_t)length);
    target[folder + (size_t)length] = '\0';
  }
  return ELOOP;
}

/* Finds the file that `path` leads to, which need not exist. Returns an errno. */
static int resolve(const char *path, char *target) {
  struct stat info;
  if (*path == 0) return ENOENT;
  if (strlen(path) >= PATH_MAX) return ENAMETOOLONG;
  strcpy(target, path);
  if (is_in_place(path)) return 0;
  if (stat(path, &info) == 0) return realpath(path, target) ? 0 : errno;
  int error = errno == ENOENT ? follow_links(target) : errno;
  return error == 0 && target[strlen(target) - 1] == '/' ? EISDIR : error;
}

/* Creates the .part file beside the target with the old file's owner and mode. Until it has them nobody else can open
 * it. Returns an errno. */
static int open_beside(struct nib_writer *w, const struct stat *old) {
  if (w->replaces && faccessat(AT_FDCWD, w->target, W_OK, AT_EACCESS) != 0) return errno;
  do {
    name_temporary(w->temporary, w->target);
    w->file = open(w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, w->replaces ? 0600 : 0666);
  } while (w->file < 0 && errno == EEXIST);
  if (w->file < 0) {
    int error = errno;
    *w->temporary = 0;
    return error;
  }
  if (!w->replaces) return 0;
  if (old->st_uid != geteuid() || old->st_gid != getegid())
    if (fchown(w->file, old->st_uid, old->st_gid) != 0) errno = 0; /* without the right to do so, keep our own */
  fchmod(w->file, old->st_mode & 07777);
  return 0;
}

/* Opens a pipe, a device, or a file in a folder where none can be created. Waits for a pipe's reader. Returns an
 * errno. */
static int open_in_place(struct nib_writer *w, const char *path, bool pipe) {
  for (;;) {
    w->file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
    if (w->file >= 0) return 0;
    if (!pipe || errno != ENXIO) return errno;
    w->late = nib_is_late(w->rt);
    if (w->late) return ETIMEDOUT;
    if (nanosleep(&(struct timespec){ .tv_nsec = 500000 }, NULL) != 0)
      return errno; /* so that Ctrl-C interrupts the wait for a reader */
  }
}

static int open_writer(struct nib_writer *w, const char *path, const char *target) {
  struct stat info;
  bool there = stat(target, &info) == 0;
  if (there && S_ISDIR(info.st_mode)) return EISDIR;
  w->waits = there && !S_ISREG(info.st_mode);
  w->replaces = there;
  if (!is_in_place(path)) {
    int error = open_beside(w, &info);
    if (error != EACCES && error != EPERM && error != EROFS) return error;
    if (!there || faccessat(AT_FDCWD, target, W_OK, AT_EACCESS) != 0) return error;
  }
  return open_in_place(w, path, there && S_ISFIFO(info.st_mode));
}

static nib_status fail_writer(const struct nib_writer *w) {
  return w->late ? nib_fail_late(w->rt, w->operation) : fail(w->rt, w->operation, w->path, "write", w->error);
}

/* Closes the file, removes a .part file that is left, and frees the writer. */
static void drop(struct nib_writer *w) {
  nib_runtime *rt = w->rt;
  nib_file_close(w->file);
  if (*w->temporary) unlink(w->temporary);
  nib_free(rt, w, w->bytes);
}

nib_status nib_writer_open(nib_runtime *rt, const char *operation, const char *path, nib_writer **out) {
  char target[PATH_MAX];
  struct nib_writer found = { .rt = rt, .operation = operation, .file = -1, .path = (char *)path };
  *out = NULL;
  found.error = resolve(path, target);
  if (found.error) return fail_writer(&found);
  size_t path_bytes = strlen(path) + 1, target_bytes = strlen(target) + 1;
  size_t bytes = sizeof found + path_bytes + 2 * target_bytes + NAME_ROOM;
  struct nib_writer *w = nib_allocate(rt, bytes);
  if (!w) return nib_fail_memory(rt, operation, bytes);
  *w = found;
  w->bytes = bytes;
  w->path = memcpy(w + 1, path, path_bytes);
  w->target = memcpy(w->path + path_bytes, target, target_bytes);
  w->temporary = w->target + target_bytes;
  *w->temporary = 0;
  w->error = open_writer(w, w->path, w->target);
  if (w->error) {
    nib_status status = fail_writer(w);
    drop(w);
    return status;
  }
  *out = w;
  return NIB_OK;
}

nib_status nib_writer_create(nib_runtime *rt, const char *path, nib_writer **out) {
  *out = NULL;
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_writer_open(rt, "create", path, out);
  if (status == NIB_OK) nib_handle_added(rt);
  return status;
}

/* write without signals to the host: if a pipe's reader is gone, or a limit of the process is reached, it only returns
 * an error. Sets errno. */
static ssize_t write_quietly(int file, const void *data, size_t bytes) {
  sigset_t ours, before, pending;
  sigemptyset(&ours);
  sigaddset(&ours, SIGPIPE);
  sigaddset(&ours, SIGXFSZ);
  sigpending(&pending);
  pthread_sigmask(SIG_BLOCK, &ours, &before);
  ssize_t n = write(file, data, bytes);
  int error = errno, number = n < 0 && error == EPIPE ? SIGPIPE : n < 0 && error == EFBIG ? SIGXFSZ : 0;
  if (number && !sigismember(&pending, number)) {
    sigemptyset(&ours);
    sigaddset(&ours, number);
    sigtimedwait(&ours, NULL, &(struct timespec){ 0 });
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  errno = error;
  return n;
}

nib_status nib_writer_put(nib_writer *w, const void *data, size_t bytes) {
  const unsigned char *at = data;
  while (bytes > 0 && w->error == 0) {
    w->late = nib_is_late(w->rt);
    ssize_t n = w->late ? 0 : write_quietly(w->file, at, bytes < PIECE ? bytes : PIECE);
    if (n > 0) {
      at += n;
      bytes -= (size_t)n;
    } else if (w->late) {
      w->error = ETIMEDOUT;
    } else if (n < 0 && errno == EAGAIN) { /* the pipe is full */
      if (poll(&(struct pollfd){ .fd = w->file, .events = POLLOUT }, 1, 1) < 0) w->error = errno;
    } else if (n == 0 || errno != EINTR || w->waits) {
      w->error = n == 0 ? EIO : errno;
    }
  }
  return w->error ? fail_writer(w) : NIB_OK;
}

nib_status nib_writer_write(nib_writer *w, const void *data, size_t bytes) {
  nib_status status = nib_enter(w->rt);
  return status == NIB_OK ? nib_writer_put(w, data, bytes) : status;
}

nib_status nib_writer_end(nib_writer *w, bool keep) {
  if (keep && w->error == 0) {
    /* The new data must be on the disk before it replaces the old file: the disk may be full, or lose power. */
    if (*w->temporary && w->replaces && fsync(w->file) != 0 && errno != EINVAL && errno != ENOTSUP) w->error = errno;
    int file = w->file;
    w->file = -1;
    if (close(file) != 0 && errno != EINTR && w->error == 0) w->error = errno;
    if (*w->temporary && w->error == 0) {
      if (rename(w->temporary, w->target) == 0) *w->temporary = 0;
      else w->error = errno;
    }
  }
  nib_status status = keep && w->error ? fail_writer(w) : NIB_OK;
  drop(w);
  return status;
}

nib_status nib_writer_close(nib_writer *w, bool keep) {
  if (!w) return NIB_OK;
  nib_runtime *rt = w->rt;
  if (nib_is_forked(rt)) return nib_enter(rt); /* the file belongs to the parent */
  nib_status status = nib_writer_end(w, keep);
  nib_handle_removed(rt);
  return status;
}
