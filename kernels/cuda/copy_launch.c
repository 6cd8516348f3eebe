/* The launch of copy.cu. */
#include "strided_launch.h"
#include "copy.inc"

#define ENTRIES(X) \
  X(copy_8)        \
  X(copy_16)       \
  X(copy_32)       \
  X(copy_64)       \
  X(copy_128)      \
  X(copy_f32_f16)  \
  X(copy_f32_bf16) \
  X(copy_f16_f32)  \
  X(copy_bf16_f32) \
  X(copy_convert)
enum { ENTRIES(NIB_CUDA_ENTRY) };

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *g) {
  const struct nib_copy_params *p = params;
  (void)multiprocessors;
  int32_t from = p->source_type, to = p->destination_type;
  int64_t inner = p->ndim > 0 ? p->size[p->ndim - 1] : 1, size = type_size(from);
  if (from == to) {
    int64_t word = word_size(p->source, size, p->ndim, p->size, p->source_stride);
    word = least(word, word_size(p->destination, size, p->ndim, p->size, p->destination_stride));
    g->entry = word == 16 ? copy_128 : word == 8 ? copy_64 : word == 4 ? copy_32 : word == 2 ? copy_16 : copy_8;
    strided(p->ndim, p->size, inner * size / word, 4, g);
    return;
  }
  bool from_f32 = from == NIB_TYPE_FLOAT32 && (to == NIB_TYPE_FLOAT16 || to == NIB_TYPE_BFLOAT16);
  bool to_f32 = to == NIB_TYPE_FLOAT32 && (from == NIB_TYPE_FLOAT16 || from == NIB_TYPE_BFLOAT16);
  bool wide = (from_f32 || to_f32) && p->ndim > 0 && multiple(inner, 4) && p->source_stride[p->ndim - 1] == 1 &&
              p->destination_stride[p->ndim - 1] == 1 && aligned(p->source, 4 * (uintptr_t)size) &&
              aligned(p->destination, 4 * (uintptr_t)type_size(to));
  for (int32_t d = 0; wide && d < p->ndim - 1; d++)
    wide = multiple(p->source_stride[d], 4) && multiple(p->destination_stride[d], 4);
  if (!wide) g->entry = copy_convert;
  else if (from_f32) g->entry = to == NIB_TYPE_FLOAT16 ? copy_f32_f16 : copy_f32_bf16;
  else g->entry = from == NIB_TYPE_FLOAT16 ? copy_f16_f32 : copy_bf16_f32;
  strided(p->ndim, p->size, wide ? inner / 4 : inner, wide ? 4 : 1, g);
}

NIB_CUDA_KERNEL(copy)
