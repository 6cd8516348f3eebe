/* The same bits in every element. */
#include "elements.h"
#include "tiles.h"

struct fill {
  const struct nib_fill_params *params;
  struct nib_tiles tiles;
};

#define NIB_FILL(word)                                             \
  for (int64_t row = 0; row < rows.rows; row++)                    \
    if (rows.stride == 1)                                          \
      for (int64_t column = 0; column < rows.columns; column++)    \
        ((word *)to)[row * rows.row_stride + column] = (word)bits; \
    else                                                           \
      for (int64_t column = 0; column < rows.columns; column++)    \
      ((word *)to)[row * rows.row_stride + column * rows.stride] = (word)bits

static void fill_rows(int64_t size, void *to, struct nib_rows rows, uint64_t bits) {
  if (size == 1) {
    NIB_FILL(nib_word8);
  } else if (size == 2) {
    NIB_FILL(nib_word16);
  } else if (size == 4) {
    NIB_FILL(nib_word32);
  } else {
    NIB_FILL(nib_word64);
  }
}

static void fill_tiles(void *argument, int64_t begin, int64_t end) {
  const struct fill *task = argument;
  const struct nib_tiles *tiles = &task->tiles;
  int64_t size = nib_type_size(task->params->type);
  struct nib_tile tile = nib_tile_seek(tiles, begin);
  for (int64_t item = begin; item < end; item++) {
    struct nib_rows rows = { tile.rows, tiles->row_stride[0], tile.columns, tiles->column_stride[0] };
    fill_rows(size, (char *)task->params->destination + tile.offset[0] * size, rows, task->params->bits);
    nib_tile_next(tiles, &tile);
  }
}

void nib_cpu_fill(const void *params, const struct nib_cpu_team *team) {
  struct nib_fill_params p = *(const struct nib_fill_params *)params;
  struct fill task = { &p, nib_tiles_make(p.ndim, p.size, p.stride, p.stride, 16384, 16384) };
  if (task.tiles.items > 0)
    team->run(team->context, task.tiles.items,
              nib_cpu_grain(task.tiles.tile_rows * task.tiles.tile_columns * nib_type_size(p.type)), fill_tiles, &task);
}
