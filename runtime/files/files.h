/* Files: reading and writing them, and the .npy format. */
#ifndef NIB_FILES_H
#define NIB_FILES_H

#include "../tensor/tensor.h"

/* ---- file.c ---- */
/* Opens a regular file for reading, and gets its size. */
nib_status nib_file_open(nib_runtime *rt, const char *operation, const char *path, int *file, uint64_t *bytes);
/* Reads all these bytes, in pieces; checks the deadline between them. */
nib_status nib_file_read(nib_runtime *rt, const char *operation, const char *path, int file, void *data, size_t bytes,
                         uint64_t offset);
void nib_file_close(int file); /* -1 is allowed */
/* As nib_writer_create, _write and _close, but for other operations. nib_writer_end frees the writer. */
nib_status nib_writer_open(nib_runtime *rt, const char *operation, const char *path, nib_writer **out);
nib_status nib_writer_put(nib_writer *writer, const void *data, size_t bytes);
nib_status nib_writer_end(nib_writer *writer, bool keep);

/* ---- npy.c ---- */
void nib_round_f64(unsigned char *data, size_t count); /* float64 to float32 in place; the result has half the bytes */

#endif
