/* Where things are in a paged cache, and what a kernel makes of indices that point nowhere. Shared by C and CUDA.
 *
 * Indices are contents: any value can turn up. Nothing here overflows or yields an address outside a tensor. */
#ifndef NIB_PAGED_H
#define NIB_PAGED_H

#include "nvfp4.h"

NIB_HD int64_t nib_index_at(const struct nib_indices *indices, int64_t row, int64_t column) {
  int64_t at = row * indices->row_stride + column * indices->stride;
  return indices->is_int64 ? ((const int64_t *)indices->data)[at] : ((const int32_t *)indices->data)[at];
}

/* a / b for a >= 0 and b > 0. A GPU has no instruction for it: 64 bits take about 80, 32 bits 20, a power of two 3. */
NIB_HD int64_t nib_divide(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__
  if ((b & (b - 1)) == 0) return a >> (__ffsll(b) - 1);
  if ((a | b) >> 32 == 0) return (int64_t)((uint32_t)a / (uint32_t)b);
#endif
  return a / b;
}

NIB_HD float nib_scale_read(const struct nib_scale *scale) { return scale->pointer ? *scale->pointer : scale->value; }

struct nib_slot {
  int64_t page, entry;
  int valid;
};

/* Slot = page * page_size + entry. Not valid when it is negative or past the last page. */
NIB_HD struct nib_slot nib_slot_split(int64_t slot, int64_t page_size, int64_t num_pages) {
  struct nib_slot result = { 0, 0, 0 };
  int64_t page = slot < 0 ? num_pages : nib_divide(slot, page_size);
  if (page >= num_pages) return result;
  result.page = page;
  result.entry = slot - page * page_size;
  result.valid = 1;
  return result;
}

NIB_HD uint8_t *nib_paged_row(const struct nib_paged *cache, int64_t page, int64_t token, int64_t head) {
  return cache->data + page * cache->page_stride + token * cache->token_stride + head * cache->head_stride;
}

/* V scales interleaved over 4 tokens: token t's block s lies in row nib_interleaved_row, at column
 * nib_interleaved_column of the same page and head. `blocks` is S, the number of blocks in a row. */
NIB_HD int64_t nib_interleaved_row(int64_t token, int64_t block, int64_t blocks) {
  return token / 4 * 4 + block / (blocks / 4);
}

NIB_HD int64_t nib_interleaved_column(int64_t token, int64_t block, int64_t blocks) {
  return block % (blocks / 4) * 4 + token % 4;
}

/* Materialize: what request b asks for and what it gets. */
struct nib_materialize_request {
  int64_t length; /* as stored in seq_lens */
  int64_t tokens; /* from 0 to max_kv_len cut */
  int64_t pages;  /* that these reach */
  int64_t page_size;
  int64_t begin, end; /* its range of output pages as stored (without the zero page) */
  int64_t
    first; /* page j < pages goes to output page first + j (1 is the first after the zero page) if that is inside */
  int64_t low, high; /* low .. high-1 */
};

/* From what the tables hold for it. */
NIB_HD struct nib_materialize_request nib_materialize_request_of(const struct nib_materialize_params *p, int32_t length,
                                                                 int64_t begin, int64_t end) {
  struct nib_materialize_request r;
  r.length = length;
  r.tokens = length < 0 ? 0 : length > p->max_kv_len ? p->max_kv_len : length;
  r.page_size = p->page_size;
  r.pages = nib_divide(r.tokens + p->page_size - 1, p->page_size); /* both below 2^62 */
  r.begin = begin;
  r.end = end;
  r.first = begin + 1;
  r.low = (begin < 0 ? 0 : begin) + 1;
  r.high = (end > p->num_out_pages ? p->num_out_pages : end) + 1;
  return r;
}

NIB_HD struct nib_materialize_request nib_materialize_request(const struct nib_materialize_params *p, int64_t b) {
  int64_t begin = p->indptr ? p->indptr[b * p->indptr_stride] : b * p->max_pages;
  int64_t end = p->indptr ? p->indptr[(b + 1) * p->indptr_stride] : (b + 1) * p->max_pages;
  return nib_materialize_request_of(p, p->seq_lens[b * p->seq_stride], begin, end);
}

/* The output page of request page j, or 0 if there is none. */
NIB_HD int64_t nib_materialize_page(const struct nib_materialize_request *r, int64_t j) {
  int64_t page = r->first + j;
  return j * r->page_size < r->tokens && page >= r->low && page < r->high ? page : 0;
}

#endif
