--- A ledger of memory: images of tensors with the bytes that nibble.reference computes, to compare them with what a
--- device wrote. nibble.kv_ledger keeps one for each cache of a scenario.
--
--   local ledger = require "nibble.ledger"
--   local image = ledger.image("K cache", tensor, where)   -- begins with the tensor's bytes
--   image:put(offset, bytes)                               -- a write that must have happened since
--   image:difference()                                     -- nil, or a description of the first byte that differs
--   local rows = ledger.rows(source, scale)                -- rows[token]: the bytes that append, dequantize and
--                                                          -- materialize make of a row
--
-- An input row gives the same bytes in every slot. So the reference computes them once for each row; slots, block
-- tables and layouts give their place. Offsets, pages, entries, heads and dimensions count from 0.

local numbers = require "nibble.numbers"
local reference = require "nibble.reference"

local ledger = {}

local function plain(dtype, shape, bytes) return { dtype = dtype, shape = shape, bytes = bytes } end

--------------------------------------------------------------------------------------------------------------- images

---@class nibble.image
---@field name string
---@field tensor nibble.tensor
---@field compared integer  bytes compared so far
local image = {}
image.__index = image

--- An image of a tensor. `where(offset, got, wanted)` describes the element that a byte belongs to; by default, by its
--- index.
---@param name string
---@param tensor nibble.tensor
---@param where? fun(offset: integer, got: integer, wanted: integer): string
---@return nibble.image
function ledger.image(name, tensor, where)
  return setmetatable({
    name = name, tensor = tensor, where = where or ledger.index_of(tensor), compared = 0, bytes = tensor:bytes(),
      writes = {},
    offsets = {},
  }, image)
end

--- Writes bytes at an offset. Two writes before a `settle` must have the same place and size or not overlap.
---@param offset integer
---@param bytes string
function image:put(offset, bytes)
  if not self.writes[offset] then self.offsets[#self.offsets + 1] = offset end
  self.writes[offset] = bytes
end

--- Sets all bytes, to those of a string or of a plain array of nibble.reference.
---@param bytes string|{bytes: string}
function image:set(bytes)
  self.bytes, self.writes, self.offsets = type(bytes) == "table" and bytes.bytes or bytes, {}, {}
end

--- The image as a plain array, for nibble.reference.
---@return {dtype: string, shape: integer[], bytes: string}
function image:array()
  return plain(self.tensor.dtype, self.tensor.shape, self:settle())
end

--- All bytes, after applying the writes.
---@return string
function image:settle()
  if #self.offsets == 0 then return self.bytes end
  local parts, done = {}, 0
  table.sort(self.offsets)
  for _, offset in ipairs(self.offsets) do
    parts[#parts + 1] = self.bytes:sub(done + 1, offset)
    parts[#parts + 1] = self.writes[offset]
    done = offset + #self.writes[offset]
  end
  parts[#parts + 1] = self.bytes:sub(done + 1)
  self.bytes, self.writes, self.offsets = table.concat(parts), {}, {}
  return self.bytes
end

-- The first offset, from 0, at which two strings of the same length differ.
local function first_difference(a, b)
  local low, high = 1, #a
  while low < high do
    local middle = (low + high) // 2
    if a:sub(low, middle) == b:sub(low, middle) then low = middle + 1 else high = middle end
  end
  return low - 1
end

--- Describes the first byte that differs between two strings of the same length; nil if they are equal.
---@param name string
---@param got string
---@param wanted string
---@param where fun(offset: integer, got: integer, wanted: integer): string
---@param whose string  the source of the wanted bytes
---@return string?
function ledger.difference(name, got, wanted, where, whose)
  if got == wanted then return nil end
  if #got ~= #wanted then return ("%s: %d bytes, %s has %d"):format(name, #got, whose, #wanted) end
  local offset = first_difference(got, wanted)
  local a, b = got:byte(offset + 1), wanted:byte(offset + 1)
  return ("%s: %s: got 0x%02X, %s has 0x%02X (byte %d of the tensor)"):format(name, where(offset, a, b), a, whose, b,
    offset)
end

--- Compares the tensor with its image.
---@return string?
function image:difference()
  local bytes = self.tensor:bytes()
  self.compared = self.compared + #bytes
  return ledger.difference(self.name, bytes, self:settle(), self.where, "the reference")
end

--- Names the element of a tensor that a byte belongs to by its index, from 0.
---@param tensor nibble.tensor|{shape: integer[], dtype: string}
---@return fun(offset: integer): string
function ledger.index_of(tensor)
  local shape, size = tensor.shape, numbers.bytes[tensor.dtype]
  return function(offset)
    local rest, index = offset // size, {}
    for dim = #shape, 1, -1 do
      index[dim] = rest % shape[dim]
      rest = rest // shape[dim]
    end
    return "element [" .. table.concat(index, ", ") .. "]"
  end
end

----------------------------------------------------------------------------------------------------------------- rows

local function cut(bytes, size, i) return bytes:sub(i * size + 1, (i + 1) * size) end

---@class nibble.ledger_row
---@field data string[]  packed codes of each head, from head 0
---@field sf string[]    scale bytes of each head
---@field out string     all heads dequantized
---@field fp8 string[]?  each head in E4M3

-- Computes the results for four rows at once: the reference works on a page of four entries in HND.
local function work_out(source, bytes, first, g, materialize, four_over_six, rows)
  local heads, dim, count = source.heads, source.dim, math.min(4, source.tokens - first)
  local half, blocks, row_size = dim // 2, dim // 16, heads * dim * 2
  local function array(last) return plain("uint8", { 1, heads, 4, last }, ("\0"):rep(heads * 4 * last)) end
  local function none(last) return plain("uint8", { 1, 0, 4, last }, "") end
  local function out(h) return plain(source.dtype, { 1, 4, h, dim }, ("\0"):rep(4 * h * dim * 2)) end
  local zero, four = reference.from_values({ 0 }, "int32", { 1, 1 }), reference.from_values({ 4 }, "int32")
  local cache = reference.append {
    append_key = plain(source.dtype, { count, heads, dim },
      bytes:sub(first * row_size + 1, (first + count) * row_size)),
    append_value = plain(source.dtype, { count, 0, dim }, ""), k_scale = g, v_scale = g, kv_layout = "HND",
    slot_mapping = reference.from_values(table.move({ 0, 1, 2, 3 }, 1, count, 1, {}), "int32"),
    paged_kv_cache = { array(half), none(half) }, kv_cache_sf = { array(blocks), none(blocks) },
    nvfp4_4over6 = four_over_six,
  }
  local data, sf = cache.paged_kv_cache, cache.kv_cache_sf
  local values = reference.dequantize {
    paged_kv_cache = data, kv_cache_sf = sf, block_tables = zero, seq_lens = four, k_scale = g, v_scale = g,
      kv_layout = "HND",
    output_k = out(heads), output_v = out(0),
  }.output_k.bytes
  local fp8 = materialize and reference.materialize({ -- K's plane of page 1; V's is not looked at
    k_cache = data[1], v_cache = data[1], k_block_scales = sf[1], v_block_scales = sf[1], block_tables = zero,
      seq_lens = four,
    max_kv_len = 4,
  }).kv_cache_fp8.bytes:sub(2 * heads * 4 * dim + 1)
  for t = 0, count - 1 do
    local row = { data = {}, sf = {}, fp8 = fp8 and {}, out = cut(values, row_size, t) }
    for h = 0, heads - 1 do
      row.data[h], row.sf[h] = cut(data[1].bytes, half, h * 4 + t), cut(sf[1].bytes, blocks, h * 4 + t)
      if fp8 then row.fp8[h] = cut(fp8, dim, h * 4 + t) end
    end
    rows[first + t] = row
  end
end

--- The results for each row of `source`, computed at their first use: rows[token], tokens from 0.
---@param source nibble.tensor  [tokens, heads, dim] float16 or bfloat16
---@param g number              the global decode scale
---@param materialize? boolean  also in E4M3
---@param four_over_six? boolean appended with 4over6
---@return table<integer, nibble.ledger_row>
function ledger.rows(source, g, materialize, four_over_six)
  local bytes, shape = source:bytes(), source.shape
  local about = { tokens = shape[1], heads = shape[2], dim = shape[3], dtype = source.dtype }
  return setmetatable({}, { __index = function(rows, token)
    if token >= about.tokens then return nil end
    work_out(about, bytes, token // 4 * 4, g, materialize, four_over_six, rows)
    return rawget(rows, token)
  end })
end

--- The E4M3 vector of `dim` elements that an entry gives when all its bytes, data and scales, are `fill`.
---@param fill integer
---@param dim integer
---@return string
function ledger.filled_vector(fill, dim)
  local data = plain("uint8", { 1, 1, 4, 32 }, string.char(fill):rep(128))
  local sf = plain("uint8", { 1, 1, 4, 4 }, string.char(fill):rep(16))
  return reference.materialize({
    k_cache = data, v_cache = data, k_block_scales = sf, v_block_scales = sf, max_kv_len = 4,
    block_tables = reference.from_values({ 0 }, "int32", { 1, 1 }), seq_lens = reference.from_values({ 4 }, "int32"),
  }).kv_cache_fp8.bytes:sub(-64):rep(dim // 64)
end

return ledger
