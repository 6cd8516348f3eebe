--- Deterministic test data that does not come from the library under test, and pools with poisoned surroundings.
--   data.bytes(seed, n) -> n random bytes
--   data.integers(seed, n, low, high) -> list of integers, low <= x <= high
--   data.floats(seed, shape, dtype) -> plain array of float16 or bfloat16: blocks of ordinary values of many
--       magnitudes, some blocks zero, constant, subnormal or huge, some elements negative zero, infinite or NaN
--   data.finite(seed, shape, dtype) -> the same without infinities and NaN
--   data.tensor(array) -> nibble tensor on the default device
--   data.indices(list, dtype, shape) -> nibble tensor of integers
--   data.pool{dtype, shape, strides, lead = 64, tail = 64, seed} -> pool
--       pool.tensor: the view, inside a larger storage of poison (all of it, the view's elements too)
--       pool:fill(array), pool:array(), pool:assert_equal(array, context): the view's elements are the array's and
--       every other byte of the storage is as it was
--   data.scattered(list, dtype, shape) -> nibble tensor of integers with gaps between its rows and columns, poison in
--   them
--   data.inverse_cases() -> list of {byte, scale, x, code}: where a product and a quotient give different codes
--   data.strides(shape, pads): row-major strides, dimension i padded by pads[i] elements
local nibble = require "nibble"
local numbers = require "nibble.numbers"
local assert = require "spec.support.assert"

local data = {}

--- A generator of 64-bit integers (splitmix64).
local function generator(seed)
  local state = seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D
  return function()
    state = state + 0x9E3779B97F4A7C15
    local z = state
    z = (z ~ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ~ z >> 27) * 0x94D049BB133111EB
    return z ~ z >> 31
  end
end

function data.bytes(seed, n)
  local next_word, parts = generator(seed), {}
  for i = 1, (n + 7) // 8 do parts[i] = string.pack("<i8", next_word()) end
  return table.concat(parts):sub(1, n)
end

function data.integers(seed, n, low, high)
  local next_word, list = generator(seed), {}
  for i = 1, n do list[i] = low + math.tointeger((next_word() >> 1) % (high - low + 1)) end
  return list
end

local function count(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

local function floats(seed, shape, dtype, specials)
  local f = numbers.floats[dtype]
  local next_word, parts, n = generator(seed), {}, count(shape)
  local fields = (f.past >> f.mantissa) - 1 -- the largest finite exponent field
  local bias = 1 - f.least
  local mask = (1 << f.mantissa) - 1
  local kind, centre
  for i = 0, n - 1 do
    if i % 16 == 0 then
      local word = next_word()
      kind = word & 15
      centre = bias + (word >> 8) % 9 - 4
      if kind == 1 then centre = fields - 1 elseif kind == 2 then centre = 2 end
    end
    local word = next_word()
    local field = math.max(0, math.min(fields, centre - (word >> 4) % 5))
    local bits = field << f.mantissa | (word >> 16 & mask)
    if kind == 0 then bits = 0 elseif kind == 3 then bits = word >> 16 & mask end
    local rare = word >> 40 & 127
    if rare == 0 then bits = 0 end
    if specials and kind >= 12 then
      if rare == 1 then bits = f.past elseif rare <= 3 then bits = f.past | 1 | (word >> 16 & mask) end
    end
    parts[i + 1] = string.pack("<" .. f.code, word & 1 == 1 and bits | f.sign or bits)
  end
  return {dtype = dtype, shape = shape, bytes = table.concat(parts)}
end

function data.floats(seed, shape, dtype)
  return floats(seed, shape, dtype, true)
end

function data.finite(seed, shape, dtype)
  return floats(seed, shape, dtype, false)
end

function data.tensor(array)
  return nibble.from_bytes(array.bytes, array.shape, {dtype = array.dtype})
end

function data.array(list, dtype, shape)
  local kind, parts = numbers.floats[dtype] or numbers.integers[dtype], {}
  for i, x in ipairs(list) do
    parts[i] = string.pack("<" .. kind.code, numbers.floats[dtype] and numbers.encode(x, dtype) or x)
  end
  return {dtype = dtype, shape = shape or {#list}, bytes = table.concat(parts)}
end

function data.indices(list, dtype, shape)
  return data.tensor(data.array(list, dtype or "int32", shape))
end

--- A float32 tensor of one element.
function data.scale(x)
  return data.tensor(data.array({x * 1.0}, "float32", {1}))
end

--- The positive bfloat16 values x, each with an E4M3 scale, whose code by multiplication with the rounded inverse of
--- the scale is not the one by division: a list of {byte, scale, x, code (by multiplication)}.
function data.inverse_cases()
  local list = {}
  for byte = 1, 0x7E do
    local scale = numbers.decode(byte, "float8_e4m3fn")
    local inverse = numbers.f32(1 / scale)
    -- below scale/5 both ways give code 0, above 8*scale code 7
    for bits = numbers.encode(scale / 5, "bfloat16"), numbers.encode(8 * scale, "bfloat16") do
      local x = numbers.decode(bits, "bfloat16")
      local code = numbers.encode_e2m1(numbers.f32(x * inverse))
      if code ~= numbers.encode_e2m1(numbers.f32(x / scale)) then
        list[#list + 1] = {byte = byte, scale = scale, x = x, code = code}
      end
    end
  end
  return list
end

function data.strides(shape, pads)
  local strides, stride = {}, 1
  for dim = #shape, 1, -1 do
    strides[dim] = stride + (pads and pads[dim] or 0)
    stride = strides[dim] * shape[dim]
  end
  return strides
end

local pool = {}
pool.__index = pool

function data.pool(opts)
  local kind = numbers.floats[opts.dtype] or numbers.integers[opts.dtype]
  local self = setmetatable({dtype = opts.dtype, shape = opts.shape, size = kind.size}, pool)
  self.strides = opts.strides or data.strides(opts.shape)
  self.lead = opts.lead or 64
  local span = 1
  for dim, size in ipairs(self.shape) do span = span + math.max(size - 1, 0) * self.strides[dim] end
  local total = (self.lead + span * kind.size + (opts.tail or 64) + 15) // 16 * 16
  self.before = data.bytes(opts.seed or 1, total)
  self.storage = nibble.from_bytes(self.before, {total}, {dtype = "uint8"})
  self.tensor = self.storage:reinterpret(opts.dtype):as_strided(self.shape, self.strides, self.lead // kind.size)
  return self
end

--- Indices as a view that is nowhere contiguous: whoever takes it for compact reads poison.
function data.scattered(list, dtype, shape)
  local array = data.array(list, dtype or "int32", shape)
  local pads = {}
  for i = 1, #array.shape do pads[i] = 2 * i - 1 end
  return data.pool({dtype = array.dtype, shape = array.shape, strides = data.strides(array.shape, pads), seed = #list})
    :fill(array).tensor
end

--- The whole storage with the array's elements put in.
function pool:with(array)
  local dims = #self.shape
  local vector = self.size -- what is written in one piece: an element, or a contiguous last dimension
  if self.strides[dims] == 1 then
    vector, dims = vector * self.shape[dims], dims - 1
  end
  if vector == 0 or #array.bytes == 0 then return self.before end
  local writes, offsets = {}, {}
  for n = 0, #array.bytes // vector - 1 do
    local rest, offset = n, 0
    for dim = dims, 1, -1 do
      offset = offset + rest % self.shape[dim] * self.strides[dim]
      rest = rest // self.shape[dim]
    end
    offset = self.lead + offset * self.size
    writes[offset], offsets[n + 1] = array.bytes:sub(n * vector + 1, (n + 1) * vector), offset
  end
  table.sort(offsets)
  local parts, done = {}, 0
  for _, offset in ipairs(offsets) do
    parts[#parts + 1] = self.before:sub(done + 1, offset)
    parts[#parts + 1] = writes[offset]
    done = offset + vector
  end
  parts[#parts + 1] = self.before:sub(done + 1)
  return table.concat(parts)
end

function pool:array()
  return {dtype = self.dtype, shape = self.shape, bytes = self.tensor:bytes()}
end

function pool:fill(array)
  self.before = self:with(array)
  self.storage:copy(nibble.from_bytes(self.before, {#self.before}, {dtype = "uint8"}))
  return self
end

function pool:assert_equal(array, context)
  assert.tensor_equal(array, self:array(), context)
  assert.tensor_equal({dtype = "uint8", shape = {#self.before}, bytes = self:with(array)}, self.storage,
                      (context and context .. ": " or "") .. "bytes around the view")
end

function pool:assert_unchanged(context)
  assert.tensor_equal({dtype = "uint8", shape = {#self.before}, bytes = self.before}, self.storage, context
                      or "nothing is written")
end

return data
