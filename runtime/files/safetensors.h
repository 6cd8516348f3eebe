/* What reading and saving safetensors files share. */
#ifndef NIB_SAFETENSORS_H
#define NIB_SAFETENSORS_H

#include "files.h"

#define NIB_MOST_HEADER_BYTES ((uint64_t)100 << 20)
#define NIB_METADATA          "__metadata__"

struct nib_stored {
  const char *name;
  int bits;
  nib_dtype dtype; /* NIB_DTYPE_NONE: tensors have no such type */
};
#define NIB_STORED_TYPES 22
extern const struct nib_stored nib_stored_types[NIB_STORED_TYPES];

typedef int nib_entry_order(const nib_safetensors_entry *a, const nib_safetensors_entry *b);
void nib_entries_sort(nib_safetensors_entry *entries, int32_t count, nib_entry_order *order);
/* Sorts the entries by name. Returns a name that occurs twice, or NULL. */
const char *nib_entries_duplicate(nib_safetensors_entry *entries, int32_t count);
/* The number of bytes of the UTF-8 character that text[0..length) begins with; 0 if it is invalid. */
size_t nib_utf8_length(const char *text, size_t length);

#endif
