-- The number formats: E2M1 and E4M3 of every 16-bit input, and conversions between all dtypes.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local dtypes = {"float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64"}

--- Every value of a 16-bit dtype (or a range of them), by bits.
local function every16(dtype, first, last)
  local parts = {}
  for bits = first or 0, last or 0xFFFF do parts[#parts + 1] = string.pack("<I2", bits) end
  return {dtype = dtype, shape = {#parts}, bytes = table.concat(parts)}
end

--- Quantizes rows of 16 (one block a row) with one global scale; returns the packed bytes and the scale bytes.
local function quantize(array, g)
  local rows = #array.bytes // 32
  local input = data.tensor {dtype = array.dtype, shape = {rows, 1, 16}, bytes = array.bytes}
  local cache, sf = nibble.zeros(rows, 1, 1, 8, {dtype = "uint8"}),
    nibble.zeros(rows, 1, 1, 1, {dtype = "float8_e4m3fn"})
  append(input, input, nibble.arange(rows), {cache, cache:clone()}, {sf, sf:clone()}, g, g)
  return cache:bytes(), sf:bytes()
end

--- The code that the list of ranges gives: y <= 0.25 is 0, y < 0.75 is 1, and so on; ties go to the even code.
local function code_of(x)
  if x ~= x then return 0 end
  local y = math.abs(x)
  local code = 7
  local ties = {[0] = 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0}
  for c = 0, 6 do
    if y < ties[c] or (y == ties[c] and c % 2 == 0) then code = c break end
  end
  return (x < 0 or 1 / x < 0) and code + 8 or code
end

describe("E2M1", function()
  for _, dtype in ipairs {"float16", "bfloat16"} do
    it("is round-to-nearest, ties to even, saturating at 6, sign kept, for every " .. dtype, function()
      -- With g = 1/448 a block whose amax is 6 or more has the scale 448, and 448 * g rounds to 1: code = E2M1(x).
      local g = reference.f32(1 / 448)
      assert.equal(1, reference.f32(448 * g))
      local six = string.pack("<I2", reference.encode(6, dtype))
      local parts, inputs = {}, {}
      for bits = 0, 0xFFFF do
        if #parts % 16 == 0 then
          parts[#parts + 1], inputs[#inputs + 1] = six, 6.0
        end
        parts[#parts + 1], inputs[#inputs + 1] = string.pack("<I2", bits), reference.decode(bits, dtype)
      end
      while #parts % 16 ~= 0 do parts[#parts + 1], inputs[#inputs + 1] = six, 6.0 end
      local packed, scales = quantize({dtype = dtype, bytes = table.concat(parts)}, g)
      assert.equal(("\x7E"):rep(#parts // 16), scales)
      for i, x in ipairs(inputs) do
        local byte = packed:byte((i + 1) // 2)
        local code = i % 2 == 1 and byte & 15 or byte >> 4
        if code ~= code_of(x) then
          error(("E2M1 of %.17g: expected %d, got %d"):format(x, code_of(x), code))
        end
      end
    end)
  end

  it("packs the earlier element into the low nibble #quick", function()
    local values = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6}
    local packed, scales = quantize(reference.from_values(values, "float16"), 1)
    assert.equal("\x38", scales)
    assert.equal("\x10\x32\x54\x76\x98\xBA\xDC\xFE", packed)
  end)
end)

describe("E4M3", function()
  it("of every float16: to nearest, ties to even, saturating, NaN stays NaN", function()
    local every = every16("float16")
    assert.tensor_equal(reference.convert(every, "float8_e4m3fn"), data.tensor(every):to("float8_e4m3fn"))
  end)

  it("of every bfloat16", function()
    local every = every16("bfloat16")
    assert.tensor_equal(reference.convert(every, "float8_e4m3fn"), data.tensor(every):to("float8_e4m3fn"))
  end)

  it("has 2^-9 as its least value, 448 as its largest, 0x7F as its NaN #quick", function()
    local function of(x) return reference.from_values({x}, "float32") end
    local cases = {
      {0.0, 0}, {-0.0, 0x80}, {2.0 ^ -9, 1}, {2.0 ^ -10, 0}, {2.0 ^ -10 * 1.001, 1}, {3 * 2.0 ^ -10, 2}, {2.0 ^ -6, 8},
      {1.0, 0x38}, {448.0, 0x7E}, {464.0, 0x7E}, {1e30, 0x7E}, {-449.0, 0xFE}, {math.huge, 0x7E}, {-math.huge, 0xFE},
      {0 / 0, 0x7F}, {17.0, 0x58}, {19.0, 0x5A}, {432.0, 0x7E}, {431.9, 0x7D},
    }
    for _, case in ipairs(cases) do
      local byte = data.tensor(of(case[1])):to("float8_e4m3fn"):bytes():byte()
      assert.equal(case[2], byte, ("E4M3 of %g"):format(case[1]))
    end
  end)

  for _, dtype in ipairs {"float16", "bfloat16"} do
    it("is the scale byte of a block of every finite " .. dtype .. ", never 0x7F", function()
      -- With g = 1/6 the product 6 * g rounds to 1: the scale is E4M3(amax).
      local g = reference.f32(1 / 6)
      assert.equal(1, reference.f32(6 * g))
      local infinity = dtype == "float16" and 0x7C00 or 0x7F80
      local every, parts, expected = every16(dtype, 0, infinity), {}, {}
      for i = 0, infinity do
        parts[i + 1] = every.bytes:sub(2 * i + 1, 2 * i + 2) .. ("\0"):rep(30)
        expected[i + 1] = string.char(reference.encode(reference.decode(i, dtype), "float8_e4m3fn"))
      end
      local _, scales = quantize({dtype = dtype, bytes = table.concat(parts)}, g)
      assert.tensor_equal({dtype = "uint8", shape = {infinity + 1}, bytes = table.concat(expected)},
                          {dtype = "uint8", shape = {infinity + 1}, bytes = scales})
      assert.is_nil(scales:find("\x7F", 1, true))
    end)
  end
end)

describe("converting", function()
  local function check(array, context)
    local tensor = data.tensor(array)
    for _, dtype in ipairs(dtypes) do
      local expected = reference.convert(array, dtype)
      assert.tensor_equal(expected, tensor:to(dtype), (context or array.dtype) .. " to " .. dtype)
      -- the same through a strided destination
      local pool = data.pool {dtype = dtype, shape = array.shape, strides = {3}}
      pool.tensor:copy(tensor)
      pool:assert_equal(expected, (context or array.dtype) .. " copied to strided " .. dtype)
    end
  end

  for _, dtype in ipairs {"float8_e4m3fn", "uint8", "int8"} do
    it("every " .. dtype .. " to every dtype #quick", function()
      local parts = {}
      for byte = 0, 255 do parts[byte + 1] = string.char(byte) end
      check {dtype = dtype, shape = {256}, bytes = table.concat(parts)}
    end)
  end

  for _, dtype in ipairs {"float16", "bfloat16", "uint16"} do
    it("every " .. dtype .. " to every dtype", function()
      check(every16(dtype))
    end)
  end

  it("float32 ties, double-rounding traps, subnormals, limits and NaNs to every dtype #quick", function()
    local list = {0.0, -0.0, math.huge, -math.huge, 0 / 0, 0.5, 1.5, -0.5, -1.5, 2.5, 126.5, 127.5, 128.0, -128.5,
                  -129.0, 255.4,
      255.5, 256.0, -1.0, -0.99, 65535.0, 65535.5, 65536.0, 2147483520.0, 2147483648.0, -2147483648.0, -2147483904.0,
      9.2233715e18, 9.223372036854775807e18, -9.223372036854775807e18, 1e30, -1e30}
    for _, dtype in ipairs {"float16", "bfloat16", "float8_e4m3fn"} do
      -- on, just below and just above the middle between neighbouring values, all over the range
      local f = require("nibble.numbers").floats[dtype]
      for bits = 0, f.past - 1, math.max(1, f.past // 600) do
        local middle = (reference.decode(bits, dtype) + reference.decode(math.min(bits + 1, f.past - 1), dtype)) / 2
        for _, x in ipairs {middle, middle * (1 + 2.0 ^ -23), middle * (1 - 2.0 ^ -23)} do
          list[#list + 1], list[#list + 2] = x, -x
        end
      end
      local largest = reference.decode(f.past - 1, dtype)
      for _, factor in ipairs {1, 1 + 2.0 ^ -12, 1 + 2.0 ^ -11, 1 + 2.0 ^ -9, 1 + 2.0 ^ -8, 1 + 2.0 ^ -5,
                               1 + 2.0 ^ -4} do
        list[#list + 1] = largest * factor
      end
    end
    check(reference.from_values(list, "float32"))
    -- every kind of NaN, kept by a copy of the same dtype, made one NaN by a conversion
    local nans = {dtype = "float32", shape = {8}, bytes = ""}
    for _, bits in ipairs {0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC12345, 0xFFFFFFFF, 0x00000001,
                           0x807FFFFF} do
      nans.bytes = nans.bytes .. string.pack("<I4", bits)
    end
    check(nans, "float32 NaNs and subnormals")
  end)

  it("int32 to every dtype: one rounding, saturating #quick", function()
    local list = {0, 1, -1, 127, 128, -128, -129, 255, 256, 65535, 65536, 0x7FFFFFFF, -0x80000000}
    for shift = 3, 30 do
      for offset = -2, 2 do
        list[#list + 1] = (1 << shift) + offset
        list[#list + 1] = -((1 << shift) + offset)
        list[#list + 1] = (3 << (shift - 1)) + offset & 0x7FFFFFFF
      end
    end
    for _, x in ipairs(data.integers(9, 200, -0x80000000, 0x7FFFFFFF)) do list[#list + 1] = x end
    check(data.array(list, "int32"))
  end)

  it("#quick int64 to every dtype: one rounding, also where float32 or float64 in between would round twice", function()
    local list = {0, 1, -1, math.maxinteger, math.mininteger, math.maxinteger - 1, math.mininteger + 1, (1 << 53) + 1,
                  -(1 << 53) - 1}
    for shift = 9, 62 do
      for offset = -1, 1 do list[#list + 1] = (1 << shift) + offset end
      for _, bits in ipairs {3, 7, 10, 23} do -- the middle between two values of that many mantissa bits, and one off
        if shift > bits + 1 then
          local middle = (1 << shift) + (1 << (shift - bits - 1))
          for offset = -1, 1 do
            list[#list + 1] = middle + offset
            list[#list + 1] = -(middle + offset)
            list[#list + 1] = middle + (1 << (shift - bits)) + offset
          end
        end
      end
    end
    for _, x in ipairs(data.integers(10, 200, math.mininteger // 2, math.maxinteger // 2)) do list[#list + 1] = x end
    check(data.array(list, "int64"))
    -- by hand: 2^24 + 2^16 + 1 lies just above a tie of bfloat16, and float32 would put it on the tie
    assert.equal(2.0 ^ 24 + 2.0 ^ 17, nibble.tensor({(1 << 24) + (1 << 16) + 1}):to("bfloat16"):item())
    assert.equal(2.0 ^ 24, nibble.tensor({(1 << 24) + (1 << 16)}):to("bfloat16"):item())
  end)

  it("the same dtype keeps every bit, NaN payloads too #quick", function()
    for _, dtype in ipairs {"float16", "bfloat16"} do
      local nans = every16(dtype, 0x7F70, 0x7FFF)
      local pool = data.pool {dtype = dtype, shape = nans.shape, strides = {2}}
      pool.tensor:copy(data.tensor(nans))
      pool:assert_equal(nans)
      assert.tensor_equal(nans, data.tensor(nans):clone())
    end
  end)
end)
