--- Small valid arguments of every operation, made of its description in nibble.operations.
--   support.shape(op, p, sizes) -> the shape of a tensor of the call, under the layout of `sizes`
--   support.arrays(op, sizes) -> plain arrays by the names of the operation's tensors
--   support.arguments(op, {sizes = {...}, place = fn(p, array) -> tensor}) -> what op:call takes
--   support.outputs(op, given, results, [only]) -> the arrays that a call has written or returned, by name; only one
--   support.expected(op, sizes) -> what nibble.reference makes of the same arguments, by name
-- `sizes` replaces sizes by symbol, kv_layout, and in `dtypes` dtypes by the names of tensors that choose theirs.
local reference = require "nibble.reference"
local operations = require "nibble.operations"
local data = require "spec.support.data"

local support = {}

local SIZES = {
  pages = 3, tokens = 4, heads = 2, dim = 64, k = 64, v = 32, blocks = 4, rows = 4, value_rows = 5, slot_count = 3,
  batch = 2, columns = 2, length = 8, num_pages = 4, q_heads = 2, angles = 8,
}

--- A size in symbols, and the symbol; none of a number.
function support.size(text, sizes)
  local symbol, sign, number = text:match("^([%a_]+)([/+]?)(%d*)$")
  if not symbol then return tonumber(text) end
  local size = sizes and sizes[symbol] or SIZES[symbol]
  if sign == "/" then size = size // tonumber(number) elseif sign == "+" then size = size + tonumber(number) end
  return size, symbol
end

local function layout_of(op, sizes) return op.layout or sizes and sizes.kv_layout or "NHD" end

--- The sizes of a tensor's dimensions in symbols.
function support.symbols(op, p, sizes)
  local list = table.move(p.shape, 1, #p.shape, 1, {})
  if p.paged and layout_of(op, sizes) == "HND" then list[2], list[3] = list[3], list[2] end
  return list
end

function support.shape(op, p, sizes)
  local shape = support.symbols(op, p, sizes)
  for i, text in ipairs(shape) do shape[i] = support.size(text, sizes) end
  return shape
end

--- The dtypes that a tensor may have, and the name of the tensor that chooses: another one's, or its own.
function support.dtypes(op, p)
  local other = type(p.dtype) == "string" and p.dtype:sub(2)
  for _, q in ipairs(other and op.tensors or {}) do
    if q.name == other then return q.dtype, other end
  end
  return p.dtype, p.name
end

-- Element i (from 0) of a tensor whose contents say where an operation reads and writes.
local contents = {
  slot_mapping = function(i, size) return i * 5 % (size "pages" * size "tokens") end,
  positions = function(i) return i end,
  block_tables = function(i, size) return (i + 1) % size "pages" end,
  seq_lens = function(i, size) return size "columns" * size "tokens" - 1 - 2 * i end,
  kv_page_indptr = function(i, size) return i * size "columns" end,
}
contents.slots = contents.slot_mapping

local function list_of(n, fn)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = fn(i) end
  return list
end

function support.arrays(op, sizes)
  local arrays = {}
  for i, p in ipairs(op.tensors) do
    local allowed, owner = support.dtypes(op, p)
    local dtype, shape, n = sizes and sizes.dtypes and sizes.dtypes[owner] or allowed[1], support.shape(op, p, sizes), 1
    for _, size in ipairs(shape) do n = n * size end
    if p.role == "index" then
      local function size(symbol) return (support.size(symbol, sizes)) end
      local list = list_of(n, function(at) return contents[p.name](at, size) end)
      arrays[p.name] = data.array(list, dtype, shape)
    elseif dtype == "float32" then
      arrays[p.name] = data.array(list_of(n, function(at) return math.cos(i + at) end), dtype, shape)
      if p.role == "scale" then arrays[p.name] = data.array({ i / 4 }, dtype, shape) end
    elseif p.scales then
      arrays[p.name] = { dtype = dtype, shape = shape, bytes = string.char(table.unpack(data.integers(i, n, 0, 126))) }
    elseif dtype == "float16" or dtype == "bfloat16" then
      arrays[p.name] = data.finite(i, shape, dtype)
    else
      arrays[p.name] = { dtype = dtype, shape = shape, bytes = data.bytes(i, n) }
    end
  end
  return arrays
end

local function scalars(op, sizes)
  local values = { max_kv_len = support.size("columns", sizes) * support.size("tokens", sizes), q_head_padded = 8,
    num_pages = support.size("num_pages", sizes), kv_layout = layout_of(op, sizes), compress_ratio = 1 }
  local given = {}
  for _, p in ipairs(op.parameters) do given[p.name] = values[p.name] end
  return given
end

function support.arguments(op, opts)
  opts = opts or {}
  local given, arrays = scalars(op, opts.sizes), support.arrays(op, opts.sizes)
  for _, p in ipairs(op.tensors) do
    given[p.name] = opts.place and opts.place(p, arrays[p.name]) or data.tensor(arrays[p.name])
  end
  return given
end

function support.outputs(op, given, results, only)
  local outputs = {}
  local function add(name, t)
    if not only or name == only then outputs[name] = { dtype = t.dtype, shape = t.shape, bytes = t:bytes() } end
  end
  for _, p in ipairs(op.tensors) do
    if p.role == "out" or p.in_place then add(p.name, given[p.name]) end
  end
  for i, result in ipairs(op.results) do
    for n, part in ipairs(operations.single { result }) do
      add(part.name, result.pair and results[i][n] or results[i])
    end
  end
  return outputs
end

function support.expected(op, sizes)
  local arrays, p = support.arrays(op, sizes), scalars(op, sizes)
  for _, parameter in ipairs(op.parameters) do
    local name = parameter.name
    if parameter.pair then
      p[name] = { arrays[name .. " (K)"], arrays[name .. " (V)"] }
    elseif parameter.shape then
      p[name] = arrays[name]
    end
  end
  local made, expected = reference[op.reference](p), {}
  if made.bytes then made = { out = made } end
  for name, value in pairs(made) do
    if type(value) == "table" and value.bytes then expected[name] = value end
    if type(value) == "table" and type(value[1]) == "table" and value[1].bytes then
      expected[name .. " (K)"], expected[name .. " (V)"] = value[1], value[2]
    end
  end
  return expected
end

return support
