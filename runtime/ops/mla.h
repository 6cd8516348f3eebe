/* The record cache of DeepSeek-V4's operations. */
#ifndef NIB_MLA_H
#define NIB_MLA_H

#include "check.h"

struct nib_records {
  uint8_t *data;
  int64_t page_stride, num_pages, page_size;
};

/* Checks a record cache: uint8 [num_pages, page_size, 384], or 4-D with one head; contiguous inside a page, page stride
 * a multiple of 16. */
void nib_check_record_cache(struct nib_check *c, enum nib_role role, const char *parameter, const nib_tensor *cache,
                            struct nib_records *out);

#endif
