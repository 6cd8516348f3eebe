/* Files of a host's: what saving does to pipes and links, and what loading asks for before it knows that a file is
 * good. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

static size_t largest;

static void *allocate(void *user, void *pointer, size_t old_size, size_t new_size) {
  (void)user, (void)old_size;
  if (new_size > largest) largest = new_size;
  if (new_size > 0) return realloc(pointer, new_size);
  free(pointer);
  return NULL;
}

static char folder[] = "/tmp/nibble_saving_XXXXXX";

static const char *name_of(const char *name) {
  static char paths[4][80];
  static int next;
  char *path = paths[next++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", folder, name);
  return path;
}

static void write_file(const char *path, const void *data, size_t bytes, off_t size) {
  int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  CHECK(file >= 0 && write(file, data, bytes) == (ssize_t)bytes && ftruncate(file, size) == 0 && close(file) == 0);
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *read_some(void *path) {
  char bytes[16];
  int file = open(path, O_RDONLY);
  CHECK(file >= 0 && read(file, bytes, sizeof bytes) == 16 && memcmp(bytes, "\x93NUMPY", 6) == 0);
  close(file); /* the rest has no reader */
  return NULL;
}

static void *read_all(void *path) {
  static char bytes[128 + 3 * 4];
  int file = open(path, O_RDONLY);
  size_t have = 0;
  for (ssize_t n; (n = read(file, bytes + have, sizeof bytes - have)) > 0;) have += (size_t)n;
  CHECK(have == sizeof bytes);
  close(file);
  return NULL;
}

static void pipes(nib_runtime *rt, nib_tensor *small, nib_tensor *large) {
  const char *pipe = name_of("pipe");
  nib_tensor *loaded = NULL;
  nib_safetensors *file = NULL;
  pthread_t reader;
  CHECK(mkfifo(pipe, 0600) == 0);

  nib_set_deadline(rt, 20000);
  double start = seconds();
  CHECK_STATUS(NIB_TIMEOUT, rt, nib_npy_save(small, pipe));
  CHECK_STATUS(NIB_TIMEOUT, rt, nib_safetensors_save(rt, pipe, 1, (const char *const[]){ "x" }, &small));
  CHECK(seconds() - start < 10);                 /* a busy machine; without a deadline it would be for ever */
  int stuck = open(pipe, O_RDONLY | O_NONBLOCK); /* a reader that does not read: there is room for 64 KiB */
  nib_set_deadline(rt, 20000);
  CHECK_STATUS(NIB_TIMEOUT, rt, nib_npy_save(large, pipe));
  close(stuck);
  nib_set_deadline(rt, NIB_UNLIMITED);

  CHECK(pthread_create(&reader, NULL, read_all, (void *)pipe) == 0);
  OK(rt, nib_npy_save(small, pipe));
  pthread_join(reader, NULL);
  CHECK(pthread_create(&reader, NULL, read_some, (void *)pipe) == 0);
  CHECK_STATUS(NIB_FILE, rt, nib_npy_save(large, pipe)); /* and no SIGPIPE */
  CHECK(strstr(nib_error(rt), strerror(EPIPE)));
  pthread_join(reader, NULL);

  CHECK_STATUS(NIB_FILE, rt, nib_npy_load(nib_device_default_stream(cpu_of(rt)), pipe, NIB_DTYPE_NONE, &loaded));
  CHECK(strstr(nib_error(rt), "expected a regular file, got a pipe"));
  CHECK_STATUS(NIB_FILE, rt, nib_safetensors_open(rt, pipe, &file));
  CHECK(strstr(nib_error(rt), "expected a regular file, got a pipe"));
  CHECK_STATUS(NIB_FILE, rt, nib_npy_load(nib_device_default_stream(cpu_of(rt)), "/dev/null", NIB_DTYPE_NONE, &loaded));
  CHECK(strstr(nib_error(rt), "expected a regular file, got a device"));
  CHECK(remove(pipe) == 0);
}

static void links(nib_runtime *rt, nib_tensor *small, nib_tensor *large) {
  const char *target = name_of("target.npy"), *link = name_of("link.npy");
  struct stat info;
  CHECK(symlink("target.npy", link) == 0);
  nib_writer *writer = NULL;
  OK(rt, nib_writer_create(rt, link, &writer));
  OK(rt, nib_writer_write(writer, "text", 4));
  CHECK(stat(link, &info) != 0 && errno == ENOENT); /* it leads nowhere until the file is whole */
  OK(rt, nib_writer_close(writer, false));
  CHECK(lstat(link, &info) == 0 && S_ISLNK(info.st_mode) && stat(link, &info) != 0);
  OK(rt, nib_npy_save(small, link));
  CHECK(lstat(link, &info) == 0 && S_ISLNK(info.st_mode) && stat(target, &info) == 0 && info.st_size == 128 + 12);
  CHECK(chmod(target, 0640) == 0);
  ino_t old = info.st_ino;
  OK(rt, nib_npy_save(large, link));
  CHECK(lstat(link, &info) == 0 && S_ISLNK(info.st_mode));
  CHECK(stat(target, &info) == 0 && (info.st_mode & 07777) == 0640 && info.st_size == 128 + 4 * 100000 &&
        info.st_ino != old);
  nib_set_deadline(rt, 0);
  CHECK_STATUS(NIB_TIMEOUT, rt, nib_npy_save(small, link)); /* has changed nothing */
  nib_set_deadline(rt, NIB_UNLIMITED);
  CHECK(stat(target, &info) == 0 && info.st_size == 128 + 4 * 100000);
  CHECK(remove(target) == 0 && symlink("nowhere/target.npy", target) == 0);
  CHECK_STATUS(NIB_FILE, rt, nib_npy_save(small, link));
  CHECK(remove(target) == 0 && symlink("link.npy", target) == 0);
  CHECK_STATUS(NIB_FILE, rt, nib_npy_save(small, link)); /* a ring */
  CHECK(strstr(nib_error(rt), strerror(ELOOP)));
  CHECK(remove(target) == 0 && remove(link) == 0);

  const char *below = name_of("below"), *inner = name_of("below/inner.npy"); /* from link to link */
  CHECK(mkdir(below, 0700) == 0 && symlink(inner, link) == 0 && symlink("../target.npy", inner) == 0);
  OK(rt, nib_npy_save(small, link));
  CHECK(lstat(target, &info) == 0 && S_ISREG(info.st_mode) && lstat(inner, &info) == 0 && S_ISLNK(info.st_mode));
  CHECK(remove(target) == 0 && remove(link) == 0 && remove(inner) == 0 && remove(below) == 0);
}

static void writers(nib_runtime *rt) {
  const char *path = name_of("text");
  nib_writer *writer = NULL;
  struct stat info;
  write_file(path, "old", 3, 3);
  OK(rt, nib_writer_create(rt, path, &writer));
  OK(rt, nib_writer_write(writer, "new and", 7));
  CHECK(stat(path, &info) == 0 && info.st_size == 3);
  OK(rt, nib_writer_close(writer, false));
  CHECK(stat(path, &info) == 0 && info.st_size == 3);
  OK(rt, nib_writer_create(rt, path, &writer));
  OK(rt, nib_writer_write(writer, "new and", 7));
  OK(rt, nib_writer_write(writer, " longer", 7));
  OK(rt, nib_writer_close(writer, true));
  CHECK(stat(path, &info) == 0 && info.st_size == 14);
  CHECK_STATUS(NIB_FILE, rt, nib_writer_create(rt, folder, &writer));
  CHECK_STATUS(NIB_FILE, rt, nib_writer_create(rt, name_of("no folder/text"), &writer));
  CHECK_STATUS(NIB_FILE, rt, nib_writer_create(rt, "", &writer));
  CHECK(!writer && remove(path) == 0);
}

static void loads(nib_runtime *rt) {
  nib_stream *stream = nib_device_default_stream(cpu_of(rt));
  const char *path = name_of("large.npy"), *other = name_of("large.safetensors");
  const off_t size = (off_t)2 << 30;
  nib_tensor *loaded = NULL;
  nib_safetensors *file = NULL;
  largest = 0;
  write_file(path, "not a file of NumPy's", 21, size);
  CHECK_STATUS(NIB_FORMAT, rt, nib_npy_load(stream, path, NIB_DTYPE_NONE, &loaded));
  write_file(path, "\x93NUMPY\2\0\xFF\xFF\xFF\x7F", 12, size);
  CHECK_STATUS(NIB_FORMAT, rt, nib_npy_load(stream, path, NIB_DTYPE_NONE, &loaded));
  char header[129] = "\x93NUMPY\1\0\x76\0{'descr': '|u1', 'fortran_order': False, 'shape': (2147483520,), }";
  header[7] = header[9] = 0;
  memset(header + 10 + strlen(header + 10), ' ', 118 - strlen(header + 10));
  write_file(path, header, 128, size);
  CHECK_STATUS(NIB_MEMORY, rt,
               nib_npy_load(stream, path, NIB_DTYPE_NONE, &loaded)); /* the cap, before a byte is read */
  nib_set_deadline(rt, 0);
  CHECK_STATUS(NIB_TIMEOUT, rt, nib_npy_load(stream, path, NIB_DTYPE_NONE, &loaded));
  nib_set_deadline(rt, NIB_UNLIMITED);
  static const char entry[] = "{\"x\":{\"dtype\":\"U8\",\"shape\":[2147483576],\"data_offsets\":[0,2147483576]}}";
  char text[8 + sizeof entry - 1];
  memset(text, 0, 8);
  text[0] = (char)(sizeof entry - 1);
  memcpy(text + 8, entry, sizeof entry - 1);
  write_file(other, text, sizeof text, (off_t)(sizeof text) + 2147483576);
  OK(rt, nib_safetensors_open(rt, other, &file));
  CHECK_STATUS(NIB_MEMORY, rt, nib_safetensors_read(stream, file, 0, NIB_DTYPE_NONE, &loaded));
  nib_safetensors_close(file);
  CHECK(!loaded && largest < (size_t)1 << 20);
  CHECK(remove(path) == 0 && remove(other) == 0);
}

int main(void) {
  nib_runtime *rt = NULL;
  CHECK(mkdtemp(folder));
  OK(NULL, nib_runtime_create(&(nib_config){ .allocate = allocate, .memory_cap = 1 << 20 }, &rt));
  nib_tensor *small = make(cpu_of(rt), NIB_FLOAT32, 3), *large = make(cpu_of(rt), NIB_FLOAT32, 100000);
  OK(rt, nib_tensor_fill(nib_device_default_stream(cpu_of(rt)), small, NIB_REAL(1)));
  OK(rt, nib_tensor_fill(nib_device_default_stream(cpu_of(rt)), large, NIB_REAL(2)));
  pipes(rt, small, large);
  links(rt, small, large);
  writers(rt);
  loads(rt);
  nib_tensor_release(small);
  nib_tensor_release(large);
  nib_runtime_close(rt);
  CHECK(rmdir(folder) == 0); /* nothing is left behind */
  return 0;
}
