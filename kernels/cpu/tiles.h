/* Walking one or two strided tensors of equal sizes in tiles of their two innermost dimensions, in parallel. A tile is
 * small enough that a side which jumps (a transposition) still finds its cache lines there for the tile's next row. */
#ifndef NIB_CPU_TILES_H
#define NIB_CPU_TILES_H

#include "clones.h"

/* Items are tiles: [outer dimensions, row tiles, column tiles]. */
struct nib_tiles {
  int32_t ndim; /* of the outer dimensions */
  int64_t size[NIB_MAX_DIMS];
  int64_t rows, columns;
  int64_t tile_rows, tile_columns;
  int64_t row_tiles, column_tiles, items;
  int64_t row_stride[2], column_stride[2], stride[2][NIB_MAX_DIMS]; /* of each tensor */
};

/* `elements` in a tile, at most `columns` of them in a row. For one tensor, give it twice. */
static inline struct nib_tiles nib_tiles_make(int32_t ndim, const int64_t *size, const int64_t *first_stride,
                                              const int64_t *second_stride, int64_t columns, int64_t elements) {
  const int64_t *strides[2] = { first_stride, second_stride };
  struct nib_tiles tiles = { 0 };
  tiles.ndim = ndim > 2 ? ndim - 2 : 0;
  tiles.rows = ndim > 1 ? size[ndim - 2] : 1;
  tiles.columns = ndim > 0 ? size[ndim - 1] : 1;
  for (int side = 0; side < 2; side++) {
    tiles.row_stride[side] = ndim > 1 ? strides[side][ndim - 2] : 0;
    tiles.column_stride[side] = ndim > 0 ? strides[side][ndim - 1] : 1;
    for (int32_t d = 0; d < tiles.ndim; d++) tiles.stride[side][d] = strides[side][d];
  }
  tiles.items = tiles.rows > 0 && tiles.columns > 0;
  for (int32_t d = 0; d < tiles.ndim; d++) {
    tiles.size[d] = size[d];
    tiles.items *= size[d];
  }
  if (tiles.items == 0) return tiles;
  tiles.tile_columns = tiles.columns < columns ? tiles.columns : columns;
  tiles.tile_rows = elements / tiles.tile_columns < tiles.rows ? elements / tiles.tile_columns : tiles.rows;
  tiles.row_tiles = (tiles.rows + tiles.tile_rows - 1) / tiles.tile_rows;
  tiles.column_tiles = (tiles.columns + tiles.tile_columns - 1) / tiles.tile_columns;
  tiles.items *= tiles.row_tiles * tiles.column_tiles;
  return tiles;
}

/* One tile: its size, and its offset in each tensor, in elements. */
struct nib_tile {
  int64_t rows, columns;
  int64_t offset[2];
  int64_t outer[2]; /* the outer dimensions' part of it */
  int64_t row_tile, column_tile, index[NIB_MAX_DIMS];
};

static inline void nib_tile_place(const struct nib_tiles *tiles, struct nib_tile *tile) {
  int64_t row = tile->row_tile * tiles->tile_rows, column = tile->column_tile * tiles->tile_columns;
  tile->rows = tiles->rows - row < tiles->tile_rows ? tiles->rows - row : tiles->tile_rows;
  tile->columns = tiles->columns - column < tiles->tile_columns ? tiles->columns - column : tiles->tile_columns;
  for (int side = 0; side < 2; side++)
    tile->offset[side] = tile->outer[side] + row * tiles->row_stride[side] + column * tiles->column_stride[side];
}

static inline struct nib_tile nib_tile_seek(const struct nib_tiles *tiles, int64_t item) {
  struct nib_tile tile = { 0 };
  tile.column_tile = item % tiles->column_tiles;
  tile.row_tile = item / tiles->column_tiles % tiles->row_tiles;
  int64_t rest = item / tiles->column_tiles / tiles->row_tiles;
  for (int32_t d = tiles->ndim - 1; d >= 0; d--) {
    tile.index[d] = rest % tiles->size[d];
    rest /= tiles->size[d];
    for (int side = 0; side < 2; side++) tile.outer[side] += tile.index[d] * tiles->stride[side][d];
  }
  nib_tile_place(tiles, &tile);
  return tile;
}

static inline void nib_tile_next(const struct nib_tiles *tiles, struct nib_tile *tile) {
  if (++tile->column_tile == tiles->column_tiles) {
    tile->column_tile = 0;
    if (++tile->row_tile == tiles->row_tiles) {
      tile->row_tile = 0;
      for (int32_t d = tiles->ndim - 1; d >= 0; d--) {
        int wrapped = ++tile->index[d] == tiles->size[d];
        for (int side = 0; side < 2; side++)
          tile->outer[side] += wrapped ? (1 - tiles->size[d]) * tiles->stride[side][d] : tiles->stride[side][d];
        if (!wrapped) break;
        tile->index[d] = 0;
      }
    }
  }
  nib_tile_place(tiles, tile);
}

#endif
