/* Strided copy with conversion between any two dtypes. */
#include "elements.h"
#include "tiles.h"

struct copy {
  const struct nib_copy_params *params;
  struct nib_tiles tiles;
};

/* The same dtype keeps every bit: elements are words of its size. */
#define NIB_MOVE(word)                                               \
  for (int64_t row = 0; row < to_rows.rows; row++)                   \
    for (int64_t column = 0; column < to_rows.columns; column++)     \
  ((word *)to)[row * to_rows.row_stride + column * to_rows.stride] = \
    ((const word *)from)[row * from_rows.row_stride + column * from_rows.stride]

NIB_BODY move_rows(int64_t size, const char *restrict from, struct nib_rows from_rows, char *restrict to,
                   struct nib_rows to_rows) {
  int64_t bytes = to_rows.columns * size;
  if (from_rows.stride == 1 && to_rows.stride == 1 && bytes >= 64)
    for (int64_t row = 0; row < to_rows.rows; row++)
      memcpy(to + row * to_rows.row_stride * size, from + row * from_rows.row_stride * size, (size_t)bytes);
  else if (size == 1) NIB_MOVE(nib_word8);
  else if (size == 2) NIB_MOVE(nib_word16);
  else if (size == 4) NIB_MOVE(nib_word32);
  else NIB_MOVE(nib_word64);
}

/* At most NIB_RUN elements. */
NIB_BODY convert_rows(const struct nib_copy_params *p, const void *from, struct nib_rows from_rows, void *to,
                      struct nib_rows to_rows) {
  union {
    float real[NIB_RUN];
    int64_t integer[NIB_RUN];
  } run;
  if (nib_type_is_float(p->source_type)) {
    NIB_BY_TYPE(p->source_type, nib_load_rows_f32, from, from_rows, run.real)
    NIB_BY_TYPE(p->destination_type, nib_store_rows_f32, to, to_rows, run.real)
  } else {
    NIB_BY_TYPE(p->source_type, nib_load_rows_i64, from, from_rows, run.integer)
    NIB_BY_TYPE(p->destination_type, nib_store_rows_i64, to, to_rows, run.integer)
  }
}

NIB_BODY copy_body(void *argument, int64_t begin, int64_t end) {
  const struct copy *task = argument;
  const struct nib_copy_params *p = task->params;
  const struct nib_tiles *tiles = &task->tiles;
  int64_t from_size = nib_type_size(p->source_type), to_size = nib_type_size(p->destination_type);
  struct nib_tile tile = nib_tile_seek(tiles, begin);
  for (int64_t item = begin; item < end; item++) {
    const char *from = (const char *)p->source + tile.offset[0] * from_size;
    char *to = (char *)p->destination + tile.offset[1] * to_size;
    struct nib_rows from_rows = { tile.rows, tiles->row_stride[0], tile.columns, tiles->column_stride[0] };
    struct nib_rows to_rows = { tile.rows, tiles->row_stride[1], tile.columns, tiles->column_stride[1] };
    if (p->source_type == p->destination_type) move_rows(from_size, from, from_rows, to, to_rows);
    else convert_rows(p, from, from_rows, to, to_rows);
    nib_tile_next(tiles, &tile);
  }
}
NIB_CLONES(copy)

void nib_cpu_copy(const void *params, const struct nib_cpu_team *team) {
  struct nib_copy_params p = *(const struct nib_copy_params *)params;
  int jumps = p.ndim > 1 && (p.source_stride[p.ndim - 1] > 1 || p.destination_stride[p.ndim - 1] > 1);
  int64_t elements = p.source_type == p.destination_type ? 16384 : NIB_RUN;
  struct copy task = { &p, nib_tiles_make(p.ndim, p.size, p.source_stride, p.destination_stride, jumps ? 16 : elements,
                                          jumps ? NIB_RUN : elements) };
  if (task.tiles.items > 0)
    team->run(team->context, task.tiles.items,
              nib_cpu_grain(task.tiles.tile_rows * task.tiles.tile_columns *
                            (nib_type_size(p.source_type) + nib_type_size(p.destination_type))),
              NIB_PICK(copy), &task);
}
