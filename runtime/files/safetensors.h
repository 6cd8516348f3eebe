/* What reading and saving safetensors files share. */
#ifndef NIB_SAFETENSORS_H
#define NIB_SAFETENSORS_H

#include "files.h"

#define NIB_MOST_HEADER_BYTES ((uint64_t)100 << 20)
#define NIB_METADATA          "__metadata__"

struct nib_stored {
  const char *name;
  int bits;
  nib_dtype dtype; /* NIB_DTYPE_NONE: elements that no tensor can hold as what they are */
};
#define NIB_STORED_TYPES 22
extern const struct nib_stored nib_stored_types[NIB_STORED_TYPES];

typedef int nib_entry_order(const nib_safetensors_entry *a, const nib_safetensors_entry *b);
void nib_entries_sort(nib_safetensors_entry *entries, int32_t count, nib_entry_order *order);
/* Sorts by name; a name that is there twice, or NULL. */
const char *nib_entries_duplicate(nib_safetensors_entry *entries, int32_t count);
/* How many bytes the UTF-8 character at the start of text[0..length) has; 0 if there is none. */
size_t nib_utf8_length(const char *text, size_t length);

#endif
