--- Explains how a value of a cache was quantized, and measures quantization errors.
--
--   nibble.explain(pool, { slot = 5, head = 1, dim = 17, global_scale = g, input = row })       -- prints explain.value
--   nibble.explain(pool, { kv = "V", page = 2, entry = 1, head = 1, dim = 17, interleaved = true })
--   nibble.explain(records, { slot = 5, dim = 460 })                                            -- of DeepSeek-V4
--
--   local head = explain.head()              -- the errors of the blocks of a head
--   local rms = head:add(inputs, codes, scale_byte, g)   -- error of a block of 16, in percent of its inputs
--   head:result()                            -- {rms, worst, max, zero, saturated, count, underflow}
--
-- Slots, pages, entries, heads, dimensions and blocks are data and count from 0.

local numbers = require "nibble.numbers"
local half_step = require("nibble.show").half_step

local explain = {}

local function fail(parameter, expected, got)
  error(("explain: %s: expected %s, got %s"):format(parameter, expected, type(got) == "table" and "a table"
    or numbers.text(got)), 0)
end

local function index(opts, name, count, default)
  local value = opts[name]
  if value == nil then value = default end
  local integer = math.type(value) and math.tointeger(value)
  if not integer or integer < 0 or integer >= count then fail(name, ("an integer 0..%d"):format(count - 1), value) end
  return integer
end

local function is_tensor(x) return type(x) == "userdata" and pcall(function() return x.dtype end) end

------------------------------------------------------------------------------------------------------------- errors

---@class nibble.head_errors
---@field rms number         of the errors, in percent of the inputs' rms
---@field worst number       largest error in half steps of E2M1 at its block's scale (1 is the bound); without subnormal scales
---@field max number         largest |error|
---@field zero number        share of the codes that are 0, 0..1
---@field saturated number   share of the codes that are 6 or -6
---@field count integer      elements
---@field underflow integer  elements of blocks with a subnormal scale, for which there is no bound

local head = {}
head.__index = head

--- Collects the errors of a head's blocks. Each error in half steps is appended to the list `ratios`.
---@param ratios? number[]
function explain.head(ratios)
  return setmetatable({
    errors = 0.0, squares = 0.0, worst = 0, max = 0, zeros = 0, largest = 0, count = 0, underflow = 0, ratios = ratios,
  }, head)
end

--- Adds a block: 16 inputs, 16 codes, the scale byte and the global scale. Returns its rms error in percent of the rms
--- of its inputs.
---@param inputs number[]
---@param codes integer[]
---@param scale_byte integer
---@param g number
---@return number rms
function head:add(inputs, codes, scale_byte, g)
  local unit, errors, squares = numbers.decode(scale_byte, "float8_e4m3fn") * g, 0.0, 0.0
  for i = 1, 16 do
    local x, code = inputs[i], codes[i]
    local err = numbers.e2m1[code] * unit - x
    errors, squares = errors + err * err, squares + x * x
    self.max = math.max(self.max, math.abs(err))
    if code & 7 == 0 then self.zeros = self.zeros + 1 end
    if code & 7 == 7 then self.largest = self.largest + 1 end
    if scale_byte & 0x7F < 8 then -- a subnormal scale is too coarse for the bound
      self.underflow = self.underflow + 1
    else
      local ratio = err / (half_step(x / unit) * unit)
      self.worst = math.max(self.worst, math.abs(ratio))
      if self.ratios then self.ratios[#self.ratios + 1] = ratio end
    end
  end
  self.count, self.errors, self.squares = self.count + 16, self.errors + errors, self.squares + squares
  return 100 * math.sqrt(errors / math.max(squares, 1e-300))
end

---@return nibble.head_errors
function head:result()
  local count = math.max(self.count, 1)
  return {
    rms = 100 * math.sqrt(self.errors / math.max(self.squares, 1e-300)), worst = self.worst, max = self.max,
    zero = self.zeros / count, saturated = self.largest / count, count = self.count, underflow = self.underflow,
  }
end

------------------------------------------------------------------------------------------------------------- places

-- The place of a tensor's element: storage and byte.
local function place(tensor, at)
  local storage, offset = tensor:storage()
  local sizes = numbers.floats[tensor.dtype] or numbers.integers[tensor.dtype]
  for dim, i in ipairs(at) do offset = offset + i * tensor:stride(dim) * sizes.size end
  return { storage = storage, byte = offset }
end

local function bytes_of(tensor, at, count)
  for i = 1, #at - 1 do tensor = tensor:select(1, at[i] + 1) end
  return tensor:narrow(1, at[#at] + 1, count):bytes()
end

-- The place of V's scale of (token, block) in 4-token-interleaved order.
local function interleave(token, block, blocks)
  return 4 * (token // 4) + block // (blocks // 4), 4 * (block % (blocks // 4)) + token % 4
end

-- The page and entry that the options name.
local function find_slot(opts, num_pages, page_size)
  if opts.slot ~= nil then
    local slot = index(opts, "slot", num_pages * page_size)
    return slot // page_size, slot % page_size
  end
  return index(opts, "page", num_pages), index(opts, "entry", page_size)
end

local function codes_of(bytes)
  local codes = {}
  for i = 1, #bytes do
    codes[2 * i - 1], codes[2 * i] = bytes:byte(i) & 15, bytes:byte(i) >> 4
  end
  return codes
end

-- The 16 inputs of a block. The option `input` is the block, a row of the head, or a row of all heads.
local function block_inputs(input, dim, heads, head_index, block)
  local list = {}
  local function flatten(x)
    if type(x) == "table" then
      for _, y in ipairs(x) do flatten(y) end
    else
      list[#list + 1] = type(x) == "number" and x or fail("input", "numbers", x)
    end
  end
  flatten(is_tensor(input) and input:totable() or input)
  local from = #list == 16 and 0 or #list == dim and block * 16 or #list == dim * heads
    and head_index * dim + block * 16
  if not from then
    fail("input", ("16 numbers (the block), %d (the head's row) or %d (the token's row)"):format(dim, dim * heads),
      #list .. " numbers")
  end
  return table.move(list, from + 1, from + 16, 1, {}), list
end

local function scale_number(value)
  if is_tensor(value) then value = value:item() end
  if type(value) ~= "number" then fail("global_scale", "a number or a tensor of one element", value) end
  return numbers.f32(value)
end

-------------------------------------------------------------------------------------------------------------- words

local function word(x) return numbers.format("%.9g", x) end

-- The lines about a block that all caches share. Fills in `f`.
local function describe(f, inputs, divisor, nan_code, four_over_six)
  local reference = require "nibble.reference"
  local lines = {}
  local function say(name, format, ...) lines[#lines + 1] = ("  %-15s "):format(name) .. numbers.format(format, ...) end
  f.scale = numbers.decode(f.scale_byte, "float8_e4m3fn")
  f.code, f.value = f.codes[f.element + 1], numbers.e2m1[f.codes[f.element + 1]]
  f.decoded = numbers.f32(numbers.f32(f.value * f.scale) * f.global_scale)
  local scale = ("0x%02X = %s"):format(f.scale_byte, word(f.scale))
  if inputs then
    local wanted_byte, wanted_codes = reference.quantize_block(inputs, f.global_scale, nan_code, four_over_six)
    local amax, at = 0, nil
    for i, x in ipairs(inputs) do
      if math.abs(x) > amax then amax, at = math.abs(x), i - 1 end
    end
    f.input, f.block_maximum = inputs[f.element + 1], amax
    local sf = amax > 0 and numbers.f32(amax / numbers.f32(6 * f.global_scale)) or 0
    say("input", "%s", word(f.input))
    say("block maximum", "%s%s", word(amax), at and ", at dimension " .. f.block * 16 + at or "")
    local chosen = wanted_byte ~= numbers.encode(sf, "float8_e4m3fn") and four_over_six and ", times 1.5" or ""
    say("scale", "%s / %s = %s%s, to the nearest E4M3: %s%s", word(amax), divisor, word(sf), chosen, scale,
      wanted_byte ~= f.scale_byte and (" IS STORED, BUT 0x%02X = %s IS NEAREST"):format(wanted_byte,
        word(numbers.decode(wanted_byte, "float8_e4m3fn"))) or "")
    if four_over_six then
      f.candidates = {}
      for i, wanted in ipairs { sf, numbers.f32(sf * 1.5) } do
        local byte = amax == math.huge and 0x7E or numbers.encode(wanted, "float8_e4m3fn")
        f.candidates[i] = { maximum = i == 1 and 6 or 4, scale_byte = byte,
          error = reference.block_error(inputs, byte, f.global_scale) }
      end
      local six, four = f.candidates[1], f.candidates[2]
      say("4over6", "0x%02X maps it to 6, squared error %s; 0x%02X maps it to 4, squared error %s: %d is chosen",
        six.scale_byte, word(six.error), four.scale_byte, word(four.error), four.error < six.error and 4 or 6)
    end
    if f.has_global then say("global scale", "%s", word(f.global_scale)) end
    local unit = numbers.f32(f.scale * f.global_scale)
    local inverse = amax > 0 and unit > 0 and numbers.f32(1 / unit) or 0
    local product, wanted = numbers.f32(f.input * inverse), wanted_codes[f.element + 1]
    say("code", "%s * %s = %s, to the nearest E2M1: %X = %s%s", word(f.input), word(inverse), word(product), f.code,
      word(f.value),
      wanted ~= f.code and (" IS STORED, BUT %X = %s IS NEAREST"):format(wanted, word(numbers.e2m1[wanted])) or "")
    f.as_stored = wanted_byte == f.scale_byte and wanted == f.code
  else
    local largest = 0
    for i = 1, 16 do largest = math.max(largest, math.abs(numbers.e2m1[f.codes[i]])) end
    say("block maximum", "%s, decoded (no input was given)", word(largest * f.scale * f.global_scale))
    say("scale", "%s", scale)
    if f.has_global then say("global scale", "%s", word(f.global_scale)) end
    say("code", "%X = %s", f.code, word(f.value))
  end
  say("decoded", "%s * %s%s = %s", word(f.value), word(f.scale), f.has_global and " * " .. word(f.global_scale) or "",
    word(f.decoded))
  if inputs then
    f.error = f.decoded - f.input
    local unit = f.scale * f.global_scale
    local steps = unit > 0 and f.error / (half_step(f.input / unit) * unit)
    say("error", "%s%s", word(f.error), steps and numbers.format(" (%.3f half steps of E2M1)", steps) or "")
  end
  say("code's place", "byte %d of storage %d (%s): 0x%02X, its %s nibble", f.code_place.byte, f.code_place.storage,
    f.code_where,
    f.code_byte, f.element % 2 == 0 and "low" or "high")
  say("scale's place", "byte %d of storage %d (%s)", f.scale_place.byte, f.scale_place.storage, f.scale_where)
  return table.concat(lines, "\n")
end

-------------------------------------------------------------------------------------------------------- paged caches

local function paged(cache, opts)
  local pool = type(cache) == "table" and cache or {}
  local pair, sf_pair = pool.paged_kv_cache or cache, pool.kv_cache_sf or opts.sf
  local kv_layout = opts.kv_layout or pool.kv_layout or "NHD"
  local side = opts.kv or "K"
  if side ~= "K" and side ~= "V" then fail("kv", '"K" or "V"', side) end
  if kv_layout ~= "NHD" and kv_layout ~= "HND" then fail("kv_layout", '"NHD" or "HND"', kv_layout) end
  local which = side == "K" and 1 or 2
  local function one(x, parameter)
    local t = type(x) == "table" and x[which] or is_tensor(x) and x:dim() == 5 and x:select(2, which) or nil
    if not is_tensor(t) or t:dim() ~= 4 then fail(parameter, "a pair {k, v} or one tensor of 5 dimensions", x) end
    return t
  end
  local data, sf = one(pair, "cache"), one(sf_pair, "sf")
  local hnd = kv_layout == "HND"
  local shape = data.shape
  local page_size, heads, dims = shape[hnd and 3 or 2], shape[hnd and 2 or 3], shape[4] * 2
  local f = { kv = side, kv_layout = kv_layout }
  f.page, f.entry = find_slot(opts, shape[1], page_size)
  f.head, f.dim = index(opts, "head", heads, 0), index(opts, "dim", dims, 0)
  f.slot, f.block, f.element = f.page * page_size + f.entry, f.dim // 16, f.dim % 16
  f.has_global, f.global_scale = true, scale_number(opts.global_scale or 1)
  local function at(entry, last) return hnd and { f.page, f.head, entry, last } or { f.page, entry, f.head, last } end
  local row, column = f.entry, f.block
  if opts.interleaved then
    if side ~= "V" or dims % 64 ~= 0 or page_size % 4 ~= 0 then
      fail("interleaved", "V, head_dim a multiple of 64 and page_size of 4",
        ("%s, %d and %d"):format(side, dims, page_size))
    end
    row, column = interleave(f.entry, f.block, dims // 16)
  end
  f.codes = codes_of(bytes_of(data, at(f.entry, f.block * 8), 8))
  f.scale_byte = bytes_of(sf, at(row, column), 1):byte()
  f.code_byte = bytes_of(data, at(f.entry, f.dim // 2), 1):byte()
  f.code_place, f.scale_place = place(data, at(f.entry, f.dim // 2)), place(sf, at(row, column))
  local where = "page %d, entry %d, head %d, byte %d of its row"
  f.code_where = where:format(f.page, f.entry, f.head, f.dim // 2)
  f.scale_where = where:format(f.page, row, f.head, column) .. (opts.interleaved and ", interleaved" or "")
  local inputs = opts.input and block_inputs(opts.input, dims, heads, f.head, f.block)
  local title = ("%s of slot %d (page %d, entry %d), head %d, dimension %d (block %d, element %d), %s"):format(side,
    f.slot, f.page,
    f.entry, f.head, f.dim, f.block, f.element, kv_layout)
  return title .. "\n" .. describe(f, inputs, ("(6 * %s)"):format(word(f.global_scale)), nil,
    opts.nvfp4_4over6), f
end

------------------------------------------------------------------------------------------------- DeepSeek-V4 records

local NOPE, RECORD, SCALES = 448, 352, 32

-- One of the last 64 dimensions, which are stored as bfloat16.
local function rope(f, bytes, row, opts)
  local lines = {}
  local function say(name, format, ...) lines[#lines + 1] = ("  %-15s "):format(name) .. numbers.format(format, ...) end
  local bits = string.unpack("<I2", bytes)
  f.decoded = numbers.decode(bits, "bfloat16")
  if row then
    local pair, odd = (f.dim - NOPE) // 2, f.dim % 2 == 1
    local even_x, odd_x = row[NOPE + 2 * pair + 1], row[NOPE + 2 * pair + 2]
    f.input = odd and odd_x or even_x
    say("input", "%s, in the pair (%s, %s) of dimensions %d and %d", word(f.input), word(even_x), word(odd_x),
      NOPE + 2 * pair,
      NOPE + 2 * pair + 1)
    if opts.position ~= nil and opts.cos_sin_cache ~= nil then
      local angles = opts.cos_sin_cache:select(1, index(opts, "position", opts.cos_sin_cache.shape[1]) + 1)
      local c, s = angles[pair + 1], angles[32 + pair + 1]
      local turned = odd and numbers.fma(even_x, s, numbers.f32(odd_x * c))
        or numbers.fma(even_x, c, -numbers.f32(odd_x * s))
      local rounded = numbers.decode(numbers.encode(turned, "bfloat16"), "bfloat16")
      say("rotation", "position %d: cos %s, sin %s give %s, to the nearest bfloat16: %s", opts.position, word(c),
        word(s), word(turned),
        word(rounded))
      f.rotated = rounded
    end
  end
  say("stored", "0x%04X = %s%s", bits, word(f.decoded), f.rotated and f.rotated ~= f.decoded
    and " WHICH IS ANOTHER VALUE" or "")
  say("place", "bytes %d and %d of storage %d (%s)", f.code_place.byte, f.code_place.byte + 1, f.code_place.storage,
    f.code_where)
  return table.concat(lines, "\n")
end

local function record(cache, opts)
  if not is_tensor(cache) or cache.dtype ~= "uint8" or cache.shape[cache:dim()] ~= 384 then
    fail("cache", "caches (pages.caches), a pair {k, v}, or uint8 records of 384 bytes", cache)
  end
  local shape, page_size = cache.shape, 1
  for i = 2, #shape - 1 do page_size = page_size * shape[i] end
  local flat = cache:as_strided({ shape[1], page_size * 384 }, { cache:stride(1), 1 })
  local f = { kv_layout = "DeepSeek-V4" }
  f.page, f.entry = find_slot(opts, shape[1], page_size)
  f.slot, f.dim = f.page * page_size + f.entry, index(opts, "dim", NOPE + 64, 0)
  f.has_global, f.global_scale, f.block, f.element = false, 1, f.dim // 16, f.dim % 16
  local base = f.entry * RECORD
  local title = ("record of slot %d (page %d, entry %d), dimension %d"):format(f.slot, f.page, f.entry, f.dim)
  local row
  if f.dim >= NOPE then
    local byte = base + NOPE // 2 + 2 * (f.dim - NOPE)
    f.code_place = place(flat, { f.page, byte })
    f.code_where = ("page %d, byte %d of the page"):format(f.page, byte)
    if opts.input then
      row = select(2, block_inputs(opts.input, NOPE + 64, 1, 0, 0))
      if #row == 16 then fail("input", "512 numbers (the row)", "16 numbers") end
    end
    return title .. " (RoPE)\n" .. rope(f, bytes_of(flat, { f.page, byte }, 2), row, opts), f
  end
  local byte, scale = base + f.dim // 2, page_size * RECORD + f.entry * SCALES + f.block
  f.codes = codes_of(bytes_of(flat, { f.page, base + f.block * 8 }, 8))
  f.scale_byte = bytes_of(flat, { f.page, scale }, 1):byte()
  f.code_byte = bytes_of(flat, { f.page, byte }, 1):byte()
  f.code_place, f.scale_place = place(flat, { f.page, byte }), place(flat, { f.page, scale })
  local where = "page %d, byte %d of the page"
  f.code_where, f.scale_where = where:format(f.page, byte), where:format(f.page, scale)
  local inputs = opts.input and block_inputs(opts.input, NOPE + 64, 1, 0, f.block)
  return ("%s (block %d, element %d)\n%s"):format(title, f.block, f.element, describe(f, inputs, "6", 7)), f
end

------------------------------------------------------------------------------------------------------------------ all

---@class nibble.explain_options
---@field slot? integer       instead of page and entry
---@field page? integer
---@field entry? integer
---@field head? integer       default 0
---@field dim? integer        default 0
---@field kv? "K"|"V"         default "K"
---@field sf? nibble.tensor[] the scales if `cache` is only the data: a pair {k, v} or one tensor
---@field kv_layout? nibble.layout  default: the caches' own, or "NHD"
---@field interleaved? boolean      V's scales are interleaved (swizzle_v_scales)
---@field global_scale? nibble.scale  default 1
---@field input? number[]|nibble.tensor  what was quantized: the block's 16 numbers, the head's row or the token's [heads, head_dim]
---@field nvfp4_4over6? boolean      the cache was quantized with it: shows both candidates
---@field position? integer         for RoPE dimensions of a record, together with cos_sin_cache
---@field cos_sin_cache? nibble.tensor

local OPTIONS = " slot page entry head dim kv sf kv_layout interleaved global_scale input nvfp4_4over6 position "
  .. "cos_sin_cache "

--- Explains a value of a cache, as text and as fields: page, entry, slot, head, dim, block, element, scale_byte, scale,
--- global_scale, codes, code, value, decoded, code_place and scale_place {storage, byte}. With an input there are also
--- input, block_maximum, error and as_stored (whether the input gives the stored code and scale). Waits for the work
--- that writes the cache.
---@param cache nibble.caches|nibble.cache|nibble.tensor  of pages.caches; data alone (with `sf`); or DeepSeek-V4's records
---@param opts nibble.explain_options
---@return string text
---@return table fields
function explain.value(cache, opts)
  if type(opts) ~= "table" then fail("options", "a table", opts) end
  for name in pairs(opts) do
    if not OPTIONS:find(" " .. tostring(name) .. " ", 1, true) then
      fail(tostring(name), "one of" .. OPTIONS:sub(1, -2), "an unknown option")
    end
  end
  local is_record = is_tensor(cache) and opts.sf == nil
  if not is_record and type(cache) ~= "table" and not is_tensor(cache) then
    fail("cache", "caches (pages.caches), a pair {k, v}, or uint8 records of 384 bytes", cache)
  end
  return (is_record and record or paged)(cache, opts)
end

--- nibble.explain: prints the text of `value`.
function explain.print(cache, opts)
  local text = explain.value(cache, opts)
  print(text)
end

return explain
