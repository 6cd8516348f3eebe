/* Whole reads and writes of files, and what is said when they fail. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

nib_status nib_file_fail(nib_runtime *rt, const char *operation, const char *path, const char *doing) {
  return nib_fail(rt, NIB_FILE, "%s: path: expected a file to %s, got %s for \"%.200s\"", operation, doing, strerror(errno), path);
}

int nib_file_open(const char *path, uint64_t *bytes) {
  struct stat info;
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* of use for pipes alone, whose writer it would wait for */
  if (file < 0) return -1;
  errno = 0;
  if (fstat(file, &info) == 0 && !S_ISREG(info.st_mode)) errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
  if (errno) {
    nib_file_close(file);
    return -1;
  }
  *bytes = (uint64_t)info.st_size;
  return file;
}

bool nib_file_read(int file, void *data, size_t bytes, uint64_t offset) {
  unsigned char *at = data;
  while (bytes > 0) {
    ssize_t n = pread(file, at, bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO; /* it has become shorter */
    if (n <= 0) return false;
    at += n;
    offset += (uint64_t)n;
    bytes -= (size_t)n;
  }
  return true;
}

int nib_file_create(const char *path) { return open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); }

bool nib_file_write(int file, const void *data, size_t bytes) {
  const unsigned char *at = data;
  while (bytes > 0) {
    ssize_t n = write(file, at, bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    at += n;
    bytes -= (size_t)n;
  }
  return true;
}

bool nib_file_close(int file) {
  int reason = errno;
  if (file >= 0 && close(file) != 0) return false;
  errno = reason; /* of what failed before */
  return true;
}
