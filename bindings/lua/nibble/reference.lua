--- The NVFP4 cache operations in plain Lua, byte for byte. It is the oracle for the kernels, and was written from the
--- definition of the formats, not from the kernels. It needs only Lua's libraries and nibble.numbers.
--
-- ARRAYS. A tensor argument is a nibble tensor with any strides (or any object with `.shape`, `.dtype` and `:bytes()`),
-- or a plain array `{dtype = "uint8", shape = {2, 3}, bytes = "..."}` with little-endian elements in row-major order.
-- Results are plain arrays. No argument is changed: an operation that writes into a cache returns the new contents of
-- the whole cache. `nibble.from_bytes(a.bytes, a.shape, {dtype = a.dtype})` makes a tensor of a result.
--
-- OPERATIONS. The argument is a table with the operation's parameter names. A cache is a pair `{k, v}`.
--   append{append_key, append_value, slot_mapping, paged_kv_cache = {k, v}, kv_cache_sf = {k, v}, k_scale, v_scale,
--          kv_layout = "NHD"} -> {paged_kv_cache = {k, v}, kv_cache_sf = {k, v}, faults}
--       scales: a number or a one-element array
--   materialize{k_cache, v_cache, k_block_scales, v_block_scales, block_tables, seq_lens, max_kv_len,
--          uses_shared_paged_kv_idx = true, out, kv_page_indptr, num_pages}
--          -> {kv_cache_fp8, fp8_block_tables, written, faults}
--       written[p] is true for each page p (from 0) of kv_cache_fp8 that is written; the others are as in `out`, or zero
--   dequantize{paged_kv_cache = {k, v}, kv_cache_sf = {k, v}, block_tables, seq_lens, k_scale, v_scale, output_k,
--          output_v, kv_layout = "NHD"} -> {output_k, output_v}
--       the arguments output_k and output_v are the contents before
--   rope_insert{q, kv, cache, slot_mapping, positions, cos_sin_cache, q_head_padded = 0, apply_q_rope = true,
--          q_inplace = false} -> {q_out, cache, faults}
--       cache: uint8 of 3 or 4 dimensions; in place, q_out is q's new contents
--   kv_rope_insert{kv, cache, slot_mapping, positions, cos_sin_cache, compress_ratio = 1} -> {cache, faults}
--   swizzle{v_sf, kv_layout = "NHD", inverse = false} -> array
--   quantize_cache{k_cache, v_cache, kv_layout = "HND", k_global_sf, v_global_sf}
--          -> {kv_cache = {k, v}, kv_sf = {k, v}, k_scale, v_scale, faults}
--   mla_dequantize{cache, slots} -> {rows, faults}
--   rope_table{max_position, theta = 1e4, dtype = "float32"} -> array
-- `faults` lists all content faults as {parameter, index (flat, from 0), value}; a device raises one of them.
--
-- FORMATS. Numbers are Lua floats; bits are integers.
--   array(x) -> plain array      values(x) -> flat list of its elements      from_values(list, dtype, shape) -> array
--   convert(x, dtype) -> array   as `t:to(dtype)`
--   encode(number, dtype) -> bits      decode(bits, dtype) -> number      encode_e2m1(number) -> code 0..15
--   f32(number) -> nearest float32     fma(a, b, c) -> a*b + c of float32 numbers, rounded once
--   quantize_block(numbers, g) -> scale byte, {16 codes}      (append's rule; g: global decode scale)
local reference = {}

local numbers = require "nibble.numbers"
local pack, unpack, char, byte, sub, rep = string.pack, string.unpack, string.char, string.byte, string.sub, string.rep
local floor, huge, concat = math.floor, math.huge, table.concat
local floats, integers, decoded, lazy = numbers.floats, numbers.integers, numbers.decoded, numbers.lazy
local encode, decode, f32, fma = numbers.encode, numbers.decode, numbers.f32, numbers.fma
local encode_e2m1, e2m1, e4m3 = numbers.encode_e2m1, numbers.e2m1, numbers.decoded.float8_e4m3fn

for _, name in ipairs {"encode", "decode", "encode_e2m1", "e2m1", "f32", "fma"} do reference[name] = numbers[name] end

-------------------------------------------------------------------------------------------------------------- arrays

local function size_of(dtype)
  return (floats[dtype] or integers[dtype]).size
end

local function count(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

--- A plain array of a tensor, or the plain array itself.
local function array(x)
  local bytes = x.bytes
  if type(bytes) ~= "string" then
    return {dtype = x.dtype, shape = x.shape, bytes = x:bytes()}
  end
  return x
end
reference.array = array

local function new(dtype, shape, bytes)
  assert(#bytes == count(shape) * size_of(dtype), "bytes do not fill the shape")
  return {dtype = dtype, shape = shape, bytes = bytes}
end

--- The elements as numbers: Lua integers for integer dtypes, floats otherwise.
local function values(x)
  x = array(x)
  local list, bytes = {}, x.bytes
  local f = floats[x.dtype]
  local size, code = (f or integers[x.dtype]).size, "<" .. (f or integers[x.dtype]).code
  local table_of = decoded[x.dtype]
  for i = 1, #bytes // size do
    local bits = unpack(code, bytes, (i - 1) * size + 1)
    if table_of then bits = table_of[bits] elseif f then bits = decode(bits, x.dtype) end
    list[i] = bits
  end
  return list
end
reference.values = values

--- Converts an integer to a Lua float that is to be rounded to a shorter format. The low bits of a long integer are
--- folded into one odd bit, so that the conversion itself does not round.
local function sticky(n)
  if n > -(1 << 53) and n < (1 << 53) then return n + 0.0 end
  local low = n & 0x7FF
  n = n - low
  if low ~= 0 then n = n | 0x800 end
  return n + 0.0
end

--- Bits of a number (integer or float) in a dtype.
local function convert_number(x, dtype)
  if floats[dtype] then
    if math.type(x) == "integer" then x = sticky(x) end
    return encode(x, dtype)
  end
  local range = integers[dtype]
  if x ~= x then return 0 end
  if x <= range.low then return range.low end -- Lua compares integers and floats exactly
  if x >= range.high then return range.high end
  if math.type(x) == "integer" then return x end
  return x < 0 and math.ceil(x) or floor(x)
end

function reference.from_values(list, dtype, shape)
  local out, code = {}, "<" .. (floats[dtype] or integers[dtype]).code
  for i, x in ipairs(list) do out[i] = pack(code, convert_number(x, dtype)) end
  return new(dtype, shape or {#list}, concat(out))
end

function reference.convert(x, dtype)
  x = array(x)
  if x.dtype == dtype then return x end
  return reference.from_values(values(x), dtype, x.shape)
end

--- `bytes` after `writes`, a table offset (from 0) -> string. The writes must not overlap.
local function patch(bytes, writes)
  local offsets = {}
  for offset in pairs(writes) do offsets[#offsets + 1] = offset end
  if #offsets == 0 then return bytes end
  table.sort(offsets)
  local parts, done = {}, 0
  for _, offset in ipairs(offsets) do
    parts[#parts + 1] = sub(bytes, done + 1, offset)
    parts[#parts + 1] = writes[offset]
    done = offset + #writes[offset]
  end
  parts[#parts + 1] = sub(bytes, done + 1)
  return concat(parts)
end

--- Offset, in vectors of the last dimension, of (page, token, head), all from 0; and the sizes.
local function paged(x, layout)
  local pages, a, b = x.shape[1], x.shape[2], x.shape[3]
  if layout == "HND" then
    return function(page, token, head) return (page * a + head) * b + token end, pages, b, a
  end
  assert(layout == "NHD", "kv_layout")
  return function(page, token, head) return (page * a + token) * b + head end, pages, a, b
end

--- The number of a scale, rounded to float32.
local function scalar(x)
  if type(x) == "number" then return f32(x) end
  return values(x)[1]
end

------------------------------------------------------------------------------------------------------------ quantize

local sixteen = {float16 = "<" .. rep("I2", 16), bfloat16 = "<" .. rep("I2", 16)}

--- The 16 numbers from byte offset `at` (from 0) of float16 or bfloat16 bytes.
local function read_block(bytes, at, dtype)
  local block = {unpack(sixteen[dtype], bytes, at + 1)}
  local table_of = decoded[dtype]
  for i = 1, 16 do block[i] = table_of[block[i]] end
  return block
end

--- The sum of a block's squared errors with a scale byte, of magnitudes, each step rounded to float32.
local function block_error(block, scale, g)
  local s, sum = e4m3[scale], 0.0
  local inverse = s > 0 and f32(1 / f32(s * g)) or 0.0
  for i = 1, 16 do
    local x = math.abs(block[i])
    local y = f32(x * inverse)
    local value = y == y and e2m1[encode_e2m1(y)] or 0.0
    local difference = f32(f32(value * s * g) - x)
    sum = f32(sum + f32(difference * difference))
  end
  return sum
end
reference.block_error = block_error

--- The E4M3 scale byte and the 16 codes of a block for the global decode scale g. A product that is NaN becomes
--- `nan_code`. With `four_over_six`, the scale that maps the largest element to 4 is used if its error is smaller.
local function quantize_block(block, g, nan_code, four_over_six)
  local amax = 0.0
  for i = 1, 16 do
    local x = block[i]
    if x < 0 then x = -x end
    if x > amax then amax = x end -- false for a NaN
  end
  local scale, inverse = 0, 0.0
  if amax == huge then
    scale = 0x7E
  elseif amax > 0 then
    scale = encode(f32(amax / f32(6 * g)), "float8_e4m3fn")
  end
  if four_over_six and amax > 0 and amax < huge then
    local four = encode(f32(f32(amax / f32(6 * g)) * 1.5), "float8_e4m3fn")
    if block_error(block, four, g) < block_error(block, scale, g) then scale = four end
  end
  local s = e4m3[scale]
  if amax > 0 and s > 0 then inverse = f32(1 / f32(s * g)) end
  local codes = {}
  for i = 1, 16 do
    local y = f32(block[i] * inverse)
    codes[i] = y ~= y and (nan_code or 0) or encode_e2m1(y)
  end
  return scale, codes
end
reference.quantize_block = quantize_block

--- The packed bytes and scale bytes of `blocks` blocks from byte offset `at`.
local function quantize_vector(bytes, at, dtype, blocks, g, nan_code, four_over_six)
  local data, scales = {}, {}
  for b = 1, blocks do
    local scale, c = quantize_block(read_block(bytes, at + (b - 1) * 32, dtype), g, nan_code, four_over_six)
    scales[b] = char(scale)
    data[b] = char(c[1] | c[2] << 4, c[3] | c[4] << 4, c[5] | c[6] << 4, c[7] | c[8] << 4,
                   c[9] | c[10] << 4, c[11] | c[12] << 4, c[13] | c[14] << 4, c[15] | c[16] << 4)
  end
  return concat(data), concat(scales)
end

local function usable(g)
  return g > 0 and g < huge
end

function reference.append(p)
  local slots = values(p.slot_mapping)
  local inputs = {array(p.append_key), array(p.append_value)}
  local scales = {scalar(p.k_scale), scalar(p.v_scale)}
  local result = {paged_kv_cache = {}, kv_cache_sf = {}, faults = {}}
  for i, name in ipairs {"k_scale", "v_scale"} do
    if not usable(scales[i]) then
      result.faults[#result.faults + 1] = {parameter = name, index = 0, value = scales[i]}
    end
  end
  for i = 1, 2 do
    local data, sf, input = array(p.paged_kv_cache[i]), array(p.kv_cache_sf[i]), inputs[i]
    local at, pages, page_size, heads = paged(data, p.kv_layout or "NHD")
    local dim = input.shape[3]
    local data_writes, sf_writes = {}, {}
    if #result.faults == 0 then
      for row, slot in ipairs(slots) do
        if slot >= 0 and slot < pages * page_size then
          for head = 0, heads - 1 do
            local codes, bytes = quantize_vector(input.bytes, ((row - 1) * heads + head) * dim * 2, input.dtype,
                                                 dim // 16, scales[i], nil, p.nvfp4_4over6)
            local vector = at(slot // page_size, slot % page_size, head)
            data_writes[vector * (dim // 2)] = codes
            sf_writes[vector * (dim // 16)] = bytes
          end
        end
      end
    end
    result.paged_kv_cache[i] = new(data.dtype, data.shape, patch(data.bytes, data_writes))
    result.kv_cache_sf[i] = new(sf.dtype, sf.shape, patch(sf.bytes, sf_writes))
  end
  return result
end

--- Source and destination of every block of one [tokens, blocks] plane: linear (t, s) sits at row 4*(t//4) + s//(S/4),
--- column 4*(s % (S/4)) + t%4 of the interleaved plane. Indices from 0, row-major.
local function interleaved_index(token, block, blocks)
  local quarter = blocks // 4
  return (4 * (token // 4) + block // quarter) * blocks + 4 * (block % quarter) + token % 4
end

function reference.swizzle(p)
  local sf = array(p.v_sf)
  local at, pages, page_size, heads = paged(sf, p.kv_layout or "NHD")
  local blocks = sf.shape[4]
  local out = {}
  for page = 0, pages - 1 do
    for head = 0, heads - 1 do
      for token = 0, page_size - 1 do
        for block = 0, blocks - 1 do
          local linear = at(page, token, head) * blocks + block
          local index = interleaved_index(token, block, blocks)
          local interleaved = at(page, index // blocks, head) * blocks + index % blocks
          if p.inverse then linear, interleaved = interleaved, linear end
          out[interleaved + 1] = sub(sf.bytes, linear + 1, linear + 1)
        end
      end
    end
  end
  return new(sf.dtype, sf.shape, concat(out))
end

function reference.quantize_cache(p)
  local result = {kv_cache = {}, kv_sf = {}, faults = {}}
  local layout = p.kv_layout or "HND"
  for i, side in ipairs {"k", "v"} do
    local source = array(p[side .. "_cache"])
    local global, parameter = p[side .. "_global_sf"], side .. "_global_sf"
    if global then
      global = scalar(global)
    else
      local amax = 0.0
      for _, x in ipairs(values(source)) do
        if x < 0 then x = -x end
        if x > amax then amax = x end
      end
      parameter = side .. "_cache"
      global = f32(448 / math.max(amax, f32(1e-12)))
    end
    local g = f32(1 / global)
    local _, pages, page_size, heads = paged(source, layout)
    local dim = source.shape[4]
    local shape = layout == "HND" and {pages, heads, page_size} or {pages, page_size, heads}
    local vectors = pages * page_size * heads
    local data, scales
    if usable(global) and usable(g) then
      data, scales = quantize_vector(source.bytes, 0, source.dtype, vectors * (dim // 16), g, nil, p.nvfp4_4over6)
    else
      result.faults[#result.faults + 1] = {parameter = parameter, index = 0, value = global}
      data, scales = rep("\0", vectors * dim // 2), rep("\0", vectors * dim // 16)
    end
    result.kv_cache[i] = new("uint8", {shape[1], shape[2], shape[3], dim // 2}, data)
    result.kv_sf[i] = new("float8_e4m3fn", {shape[1], shape[2], shape[3], dim // 16}, scales)
    if side == "v" then result.kv_sf[i] = reference.swizzle {v_sf = result.kv_sf[i], kv_layout = layout} end
    result[side .. "_scale"] = new("float32", {1}, pack("<f", g))
  end
  return result
end

---------------------------------------------------------------------------------------------------------- dequantize

-- fp8_pairs[scale byte][packed byte] = the two E4M3 bytes of code value * scale
local fp8_pairs = lazy(function(scale)
  local s = e4m3[scale]
  return lazy(function(packed)
    local b = byte(packed)
    return char(encode(e2m1[b & 15] * s, "float8_e4m3fn"), encode(e2m1[b >> 4] * s, "float8_e4m3fn"))
  end)
end)

--- A destination plane of `tokens * blocks` blocks of 8 packed bytes, each with its scale byte.
local function materialize_plane(data, scales, blocks, interleaved)
  local out = {}
  for n = 0, #scales - 1 do
    local at = interleaved and interleaved_index(n // blocks, n % blocks, blocks) or n
    out[n + 1] = sub(data, n * 8 + 1, n * 8 + 8):gsub(".", fp8_pairs[byte(scales, at + 1)])
  end
  return concat(out)
end

function reference.materialize(p)
  local data = {array(p.k_cache), array(p.v_cache)}
  local scales = {array(p.k_block_scales), array(p.v_block_scales)}
  local tables, lengths = array(p.block_tables), values(p.seq_lens)
  local pages, heads, page_size, packed = table.unpack(data[1].shape)
  local blocks, dim = packed // 8, packed * 2
  local columns = (p.max_kv_len + page_size - 1) // page_size
  local shared = p.uses_shared_paged_kv_idx ~= false
  local indptr = p.kv_page_indptr and values(p.kv_page_indptr)
  local num_pages = indptr and p.num_pages or #lengths * columns
  local table_columns, indices = tables.shape[#tables.shape], values(tables)

  local faults, written, writes, table_out = {}, {[0] = true}, {}, {}
  local function fault(parameter, index, value)
    faults[#faults + 1] = {parameter = parameter, index = index, value = value}
  end
  local plane = heads * page_size * dim
  writes[0] = rep("\0", 2 * plane)
  for b = 0, #lengths - 1 do
    local length = math.max(lengths[b + 1], 0)
    if length > p.max_kv_len then
      fault("seq_lens", b, length)
      length = p.max_kv_len
    end
    local wanted = (length + page_size - 1) // page_size
    local first, past = b * columns, (b + 1) * columns
    if indptr then
      first, past = indptr[b + 1], indptr[b + 2]
      if first < 0 or past > num_pages or past - first < wanted then fault("kv_page_indptr", b, first) end
      if past > num_pages then past = num_pages end
    end
    for j = 0, columns - 1 do
      local page = first + j
      local fits = j < wanted and page >= 0 and page < past
      table_out[#table_out + 1] = pack("<i4", fits and page + 1 or 0)
      if fits then
        written[page + 1] = true
        for kv = 1, 2 do
          local index = (shared and b or b * 2 + kv - 1) * table_columns + j
          local source = indices[index + 1]
          local bytes
          if source < 0 or source >= pages then
            fault("block_tables", index, source)
            bytes = rep("\0", plane)
          else
            local span, sf_span = page_size * packed, page_size * blocks
            local parts = {}
            for head = 0, heads - 1 do
              local at = source * heads + head
              parts[head + 1] = materialize_plane(sub(data[kv].bytes, at * span + 1, (at + 1) * span),
                                                  sub(scales[kv].bytes, at * sf_span + 1, (at + 1) * sf_span), blocks,
                                                    kv == 2)
            end
            bytes = concat(parts)
          end
          writes[((page + 1) * 2 + kv - 1) * plane] = bytes
        end
      end
    end
  end
  local shape = {num_pages + 1, 2, heads, page_size, dim}
  local before = p.out and array(p.out).bytes or rep("\0", count(shape))
  return {
    kv_cache_fp8 = new("float8_e4m3fn", shape, patch(before, writes)),
    fp8_block_tables = new("int32", {#lengths, columns}, concat(table_out)),
    written = written, faults = faults,
  }
end

--- Tables like fp8_pairs for a global scale and an output dtype: code value * scale, then * g, each product rounded to
--- float32, then rounded to the dtype.
local function output_pairs(g, dtype)
  return lazy(function(scale)
    local s = e4m3[scale]
    local function bits(code) return encode(f32(f32(e2m1[code] * s) * g), dtype) end
    return lazy(function(packed)
      local b = byte(packed)
      return pack("<I2I2", bits(b & 15), bits(b >> 4))
    end)
  end)
end

function reference.dequantize(p)
  local indices, lengths = values(p.block_tables), values(p.seq_lens)
  local table_columns = array(p.block_tables).shape[2]
  local result = {}
  for i, side in ipairs {"k", "v"} do
    local data, sf, out = array(p.paged_kv_cache[i]), array(p.kv_cache_sf[i]), array(p["output_" .. side])
    local at, pages, page_size, heads = paged(data, p.kv_layout or "NHD")
    local pairs_of = output_pairs(scalar(p[side .. "_scale"]), out.dtype)
    local blocks, tokens = sf.shape[4], out.shape[2]
    local writes = {}
    for b, length in ipairs(lengths) do
      for t = 0, math.min(length, tokens) - 1 do
        local page = indices[(b - 1) * table_columns + t // page_size + 1]
        if page >= 0 and page < pages then
          for head = 0, heads - 1 do
            local vector = at(page, t % page_size, head)
            local parts = {}
            for s = 0, blocks - 1 do
              local n = vector * blocks + s
              parts[s + 1] = sub(data.bytes, n * 8 + 1, n * 8 + 8):gsub(".", pairs_of[byte(sf.bytes, n + 1)])
            end
            writes[(((b - 1) * tokens + t) * heads + head) * blocks * 32] = concat(parts)
          end
        end
      end
    end
    result["output_" .. side] = new(out.dtype, out.shape, patch(out.bytes, writes))
  end
  return result
end

----------------------------------------------------------------------------------------------------------------- mla

local NOPE, ROPE, DATA, SCALES, RECORD = 448, 64, 352, 32, 384

--- The 64 rotated RoPE values, as bfloat16 bytes, of the row of 512 at byte offset `at`; `turn` is the 64
--- cosines and sines.
local function rotate(bytes, at, turn)
  local x = {unpack("<" .. rep("I2", ROPE), bytes, at + NOPE * 2 + 1)}
  local to_float = decoded.bfloat16
  local out = {}
  for p = 0, ROPE // 2 - 1 do
    local even, odd, cos, sin = to_float[x[2 * p + 1]], to_float[x[2 * p + 2]], turn[p + 1], turn[p + 33]
    out[p + 1] = pack("<I2I2", encode(fma(even, cos, -f32(odd * sin)), "bfloat16"),
                      encode(fma(even, sin, f32(odd * cos)), "bfloat16"))
  end
  return concat(out)
end

--- Page size and number of pages of a record cache.
local function records(cache)
  local shape = cache.shape
  if #shape == 3 then return shape[2], shape[1] end
  return shape[2] * shape[3], shape[1] -- one of them is the single head
end

local function rope_and_insert(p, with_queries)
  local kv, cache = array(p.kv), array(p.cache)
  local slots, positions, turns = values(p.slot_mapping), values(p.positions), values(p.cos_sin_cache)
  local rows, ratio = kv.shape[1], p.compress_ratio or 1
  local page_size, pages = records(cache)
  local limit = array(p.cos_sin_cache).shape[1]
  local faults = {}
  local function turn_of(position)
    if position < 0 or position >= limit then return nil end
    local at = position // ratio * ratio * ROPE
    return table.move(turns, at + 1, at + ROPE, 1, {})
  end

  local q, q_out, padded
  if with_queries then
    q, q_out = array(p.q), {}
    padded = p.q_inplace and q.shape[2] or p.q_head_padded or 0
  end
  local rotate_q = with_queries and padded > 0 and q.shape[2] > 0 and p.apply_q_rope ~= false
  local writes = {}
  for row = 0, rows - 1 do
    local position, slot = positions[row + 1], slots[row + 1]
    local inserted = slot and slot >= 0 and slot < pages * page_size and (ratio == 1 or position % 2 == 1)
    local turn = (rotate_q or inserted) and turn_of(position)
    if not turn and (rotate_q or inserted) then
      faults[#faults + 1] = {parameter = "positions", index = row, value = position}
    end
    if with_queries then
      for head = 0, padded - 1 do
        local at = (row * q.shape[2] + head) * 1024
        if head >= q.shape[2] then
          q_out[#q_out + 1] = rep("\0", 1024)
        elseif not rotate_q then
          q_out[#q_out + 1] = sub(q.bytes, at + 1, at + 1024)
        else
          q_out[#q_out + 1] = sub(q.bytes, at + 1, at + NOPE * 2)
          q_out[#q_out + 1] = turn and rotate(q.bytes, at, turn) or rep("\0", ROPE * 2)
        end
      end
    end
    if inserted and turn then
      local rope = rotate(kv.bytes, row * 1024, turn)
      local codes, bytes = quantize_vector(kv.bytes, row * 1024, "bfloat16", NOPE // 16, 1.0, 7)
      local base = slot // page_size * page_size * RECORD
      writes[base + slot % page_size * DATA] = codes .. rope
      writes[base + page_size * DATA + slot % page_size * SCALES] = bytes .. "\0\0\0\0"
    end
  end
  return {
    q_out = with_queries and new("bfloat16", {rows, padded, 512}, concat(q_out)) or nil,
    cache = new("uint8", cache.shape, patch(cache.bytes, writes)), faults = faults,
  }
end

function reference.rope_insert(p)
  return rope_and_insert(p, true)
end

function reference.kv_rope_insert(p)
  return rope_and_insert(p, false)
end

function reference.mla_dequantize(p)
  local cache, slots = array(p.cache), values(p.slots)
  local page_size, pages = records(cache)
  local pairs_of = output_pairs(1.0, "bfloat16")
  local out, faults = {}, {}
  for i, slot in ipairs(slots) do
    if slot < 0 or slot >= pages * page_size then
      faults[#faults + 1] = {parameter = "slots", index = i - 1, value = slot}
      out[i] = rep("\0", 1024)
    else
      local page = slot // page_size * page_size * RECORD
      local data, scales = page + slot % page_size * DATA, page + page_size * DATA + slot % page_size * SCALES
      local parts = {}
      for s = 0, NOPE // 16 - 1 do
        parts[s + 1] = sub(cache.bytes, data + s * 8 + 1, data + s * 8 + 8):gsub(".",
          pairs_of[byte(cache.bytes, scales + s + 1)])
      end
      parts[#parts + 1] = sub(cache.bytes, data + NOPE // 2 + 1, data + DATA)
      out[i] = concat(parts)
    end
  end
  return {rows = new("bfloat16", {#slots, 512}, concat(out)), faults = faults}
end

function reference.rope_table(p)
  local theta, dtype = p.theta or 1e4, p.dtype or "float32"
  local frequency = {}
  for pair = 0, ROPE // 2 - 1 do frequency[pair] = theta ^ (-2 * pair / ROPE) end
  local list = {}
  for position = 0, p.max_position - 1 do
    for pair = 0, ROPE // 2 - 1 do
      list[#list + 1] = math.cos(position * frequency[pair])
    end
    for pair = 0, ROPE // 2 - 1 do
      list[#list + 1] = math.sin(position * frequency[pair])
    end
  end
  return reference.from_values(list, dtype, {p.max_position, ROPE})
end

return reference
