/* tostring(tensor): the elements in aligned columns and a line about the tensor. The middle of a large one is left out:
 *    1.5000  -2.0000
 *    3.2500   4.0000
 *   [nibble.tensor {2, 2} bfloat16 cpu]
 * Only what is printed is read from the device. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../../runtime/core/floats.h"
#include "args.h"

#define FULL_COUNT   1000 /* of larger tensors the middle is left out */
#define LINE_WIDTH   100  /* longer rows are wrapped */
#define NUMBER_WIDTH 32

struct print {
  int32_t ndim;
  nib_dtype dtype;
  int64_t shape[NIB_MAX_NDIM];
  int64_t edge[NIB_MAX_NDIM];  /* elements shown at each end; 0: all */
  int64_t shown[NIB_MAX_NDIM]; /* elements shown in all */
  int64_t rows, columns;
  const char *format; /* of reals */
  int width;
};

/* Chooses how much of each dimension is shown: more of the inner ones, and more of narrow elements. */
static void choose_edges(struct print *print, const nib_tensor *tensor) {
  bool elide = nib_tensor_numel(tensor) > FULL_COUNT;
  print->rows = print->columns = 1;
  for (int32_t i = 0; i < print->ndim; i++) {
    int64_t size = print->shape[i], edge = 3;
    if (i < print->ndim - 2 && print->ndim > 3) edge = 1;
    if (i == print->ndim - 1 && (print->dtype == NIB_UINT8 || print->dtype == NIB_INT8)) edge = 8;
    bool elided = elide && size > 2 * edge;
    print->edge[i] = elided ? edge : 0;
    print->shown[i] = elided ? 2 * edge : size;
    if (i == print->ndim - 1) print->columns = print->shown[i];
    else print->rows *= print->shown[i];
  }
}

/* The index of the element shown at a position of dimension `dim`. */
static int64_t index_of(const struct print *print, int32_t dim, int64_t position) {
  if (print->edge[dim] == 0 || position < print->edge[dim]) return position;
  return print->shape[dim] - (print->shown[dim] - position);
}

/* The position of a shown row in each dimension but the last. */
static void row_positions(const struct print *print, int64_t row, int64_t *positions) {
  for (int32_t i = print->ndim - 2; i >= 0; i--) {
    positions[i] = row % print->shown[i];
    row /= print->shown[i];
  }
}

static nib_status read_part(nib_tensor *row, int64_t start, int64_t length, nib_dtype dtype, nib_number *out) {
  unsigned char bytes[8 * FULL_COUNT];
  size_t item = nib_dtype_bytes(dtype);
  nib_tensor *part;
  nib_status status = nib_tensor_narrow(row, 0, start, length, &part);
  if (status == NIB_OK) status = nib_tensor_read(part, bytes, (size_t)length * item, NIB_UNLIMITED);
  nib_tensor_release(part);
  for (int64_t i = 0; status == NIB_OK && i < length; i++)
    out[i] = nib_element_to_number(dtype, bytes + (size_t)i * item);
  return status;
}

static nib_status read_row(const struct print *print, nib_tensor *tensor, int64_t number, nib_number *out) {
  int64_t positions[NIB_MAX_NDIM], indices[NIB_MAX_NDIM], one = 1;
  int32_t outer = print->ndim > 0 ? print->ndim - 1 : 0, last = outer;
  row_positions(print, number, positions);
  for (int32_t i = 0; i < outer; i++) indices[i] = index_of(print, i, positions[i]);
  nib_tensor *row, *scalar = NULL;
  nib_status status = nib_lua_select(tensor, outer, indices, &row);
  if (status == NIB_OK && print->ndim == 0) {
    scalar = row;
    status = nib_tensor_view(scalar, 1, &one, &row);
  }
  int64_t edge = print->ndim > 0 ? print->edge[last] : 0;
  if (status == NIB_OK) status = read_part(row, 0, edge ? edge : print->columns, print->dtype, out);
  if (status == NIB_OK && edge) status = read_part(row, print->shape[last] - edge, edge, print->dtype, out + edge);
  nib_tensor_release(row);
  nib_tensor_release(scalar);
  return status;
}

/* Chooses one format for all reals: no decimals if all are integral, four decimals if these show each of them, else
 * five significant digits. */
static void choose_format(struct print *print, const nib_number *values, int64_t count) {
  double largest = 0, smallest = INFINITY;
  bool integral = true;
  for (int64_t i = 0; i < count; i++) {
    double x = fabs(values[i].real);
    if (!values[i].is_float || !isfinite(x)) continue;
    if (x != floor(x)) integral = false;
    if (x > largest) largest = x;
    if (x > 0 && x < smallest) smallest = x;
  }
  print->format = integral && largest < 1e8 ? "%.0f" : largest < 1e5 && smallest >= 1e-4 ? "%.4f" : "%.5g";
}

static int format_number(const struct print *print, nib_number number, char *text) {
  if (!number.is_float) return snprintf(text, NUMBER_WIDTH, "%lld", (long long)number.integer);
  return nib_format_real(text, NUMBER_WIDTH, print->format, number.real);
}

static void add_row(luaL_Buffer *text, const struct print *print, const nib_number *values) {
  char number[NUMBER_WIDTH];
  int64_t edge = print->ndim > 0 ? print->edge[print->ndim - 1] : 0;
  int64_t per_line = LINE_WIDTH / (print->width + 2);
  if (per_line > 8) per_line -= per_line % 8; /* lines then begin at multiples of 8 */
  for (int64_t i = 0; i < print->columns; i++) {
    bool starts = i % per_line == 0;
    if (starts && i > 0) luaL_addstring(text, "\n  ");
    int length = format_number(print, values[i], number), pad = print->width - length + (starts ? 1 : 2);
    for (int k = 0; k < pad; k++) luaL_addchar(text, ' ');
    luaL_addlstring(text, number, (size_t)length);
    if (edge && i + 1 == edge) luaL_addstring(text, "  ...");
  }
  luaL_addchar(text, '\n');
}

/* Adds what precedes a row: the name of a slice that begins, and marks where rows are left out. */
static void add_heading(luaL_Buffer *text, const struct print *print, int64_t row) {
  int64_t positions[NIB_MAX_NDIM];
  char number[NUMBER_WIDTH];
  if (print->ndim < 2) return;
  row_positions(print, row, positions);
  int32_t inner = print->ndim - 2; /* the dimension of rows in a slice */
  if (print->edge[inner] && positions[inner] == print->edge[inner]) luaL_addstring(text, " ...\n");
  if (positions[inner] != 0 || inner == 0) return;
  bool starts = true; /* whether this is the first row at an outer position */
  for (int32_t i = inner - 1; i >= 0 && starts; i--) {
    if (print->edge[i] && positions[i] == print->edge[i]) luaL_addstring(text, "...\n");
    starts = positions[i] == 0;
  }
  luaL_addchar(text, '(');
  for (int32_t i = 0; i < inner; i++) {
    int length = snprintf(number, sizeof number, "%lld, ", (long long)index_of(print, i, positions[i]) + 1);
    luaL_addlstring(text, number, (size_t)length);
  }
  luaL_addstring(text, "., .) =\n");
}

static void add_description(luaL_Buffer *text, const struct print *print, const char *device) {
  char number[NUMBER_WIDTH];
  luaL_addstring(text, "[nibble.tensor {");
  for (int32_t i = 0; i < print->ndim; i++) {
    int length = snprintf(number, sizeof number, "%s%lld", i ? ", " : "", (long long)print->shape[i]);
    luaL_addlstring(text, number, (size_t)length);
  }
  luaL_addstring(text, "} ");
  luaL_addstring(text, nib_dtype_name(print->dtype));
  luaL_addchar(text, ' ');
  luaL_addstring(text, device);
  luaL_addchar(text, ']');
}

int nib_lua_tensor_tostring(lua_State *L) {
  const nib_lua_object *object = nib_lua_test(L, 1, NIB_LUA_TENSOR);
  if (object && !nib_lua_is_open(object)) {
    lua_pushliteral(L, "nibble.tensor (closed)");
    return 1;
  }
  nib_tensor *tensor = nib_lua_tensor(L, "tensor:tostring", "self", 1);
  struct print print = { .ndim = nib_tensor_ndim(tensor), .dtype = nib_tensor_dtype(tensor) };
  for (int32_t i = 0; i < print.ndim; i++) print.shape[i] = nib_tensor_shape(tensor)[i];
  const char *device = nib_device_get_info(nib_tensor_device(tensor))->name;
  choose_edges(&print, tensor);
  int64_t rows = nib_tensor_numel(tensor) > 0 ? print.rows : 0;
  nib_lua_wait_tensor(L, "tensor:tostring", tensor);
  nib_number *values = lua_newuserdatauv(L, sizeof *values * (size_t)(rows * print.columns + 1), 0);
  for (int64_t i = 0; i < rows; i++)
    NIB_LUA_DO(L, "tensor:tostring", read_row(&print, tensor, i, values + i * print.columns));
  choose_format(&print, values, rows * print.columns);
  for (int64_t i = 0; i < rows * print.columns; i++) {
    char number[NUMBER_WIDTH];
    int length = format_number(&print, values[i], number);
    if (length > print.width) print.width = length;
  }
  luaL_Buffer text;
  luaL_buffinit(L, &text);
  for (int64_t i = 0; i < rows; i++) {
    add_heading(&text, &print, i);
    add_row(&text, &print, values + i * print.columns);
  }
  add_description(&text, &print, device);
  luaL_pushresult(&text);
  return 1;
}
