--- The number formats float32, float16, bfloat16, E4M3 and E2M1 in plain Lua, rounded exactly. Bits are Lua integers,
--- numbers are Lua floats.
--   encode(number, dtype) -> bits      decode(bits, dtype) -> number      encode_e2m1(number) -> code 0..15
--   decoded[dtype][bits] -> number     e2m1[code] -> number
--   f32(number) -> nearest float32     fma(a, b, c) -> a*b + c of float32 numbers, rounded once
--   floats[dtype], integers[dtype]     sizes, string.pack codes and ranges of the dtypes
-- Numbers as text, with a decimal point in any locale:
--   format(text, ...)                  string.format      text(value)      tostring
local numbers = {}

local pack, unpack = string.pack, string.unpack
local floor, huge = math.floor, math.huge

-- For each float format: mantissa bits, least exponent, bits of the first value past the largest finite one, the bits
-- that such a value becomes, NaN. Without the sign, the bits as an integer number the values upwards from zero.
local floats = {
  float32 = {size = 4, code = "I4", mantissa = 23, least = -126, past = 0x7F800000, overflow = 0x7F800000,
             nan = 0x7FFFFFFF, sign = 0x80000000},
  float16 = {size = 2, code = "I2", mantissa = 10, least = -14, past = 0x7C00, overflow = 0x7C00, nan = 0x7FFF,
             sign = 0x8000},
  bfloat16 = {size = 2, code = "I2", mantissa = 7, least = -126, past = 0x7F80, overflow = 0x7F80, nan = 0x7FFF,
              sign = 0x8000},
  float8_e4m3fn = {size = 1, code = "B", mantissa = 3, least = -6, past = 0x7F, overflow = 0x7E, nan = 0x7F,
                   sign = 0x80},
}
local integers = {
  uint8 = {size = 1, code = "B", low = 0, high = 0xFF},
  int8 = {size = 1, code = "b", low = -0x80, high = 0x7F},
  uint16 = {size = 2, code = "I2", low = 0, high = 0xFFFF},
  int32 = {size = 4, code = "i4", low = -0x80000000, high = 0x7FFFFFFF},
  int64 = {size = 8, code = "i8", low = math.mininteger, high = math.maxinteger},
}

numbers.floats, numbers.integers = floats, integers

--- Bytes of an element of a dtype: numbers.bytes.float16 is 2.
---@type table<nibble.dtype, integer>
numbers.bytes = {}
for _, kind in ipairs { floats, integers } do
  for dtype, format in pairs(kind) do numbers.bytes[dtype] = format.size end
end

local function f32(x)
  return (unpack("<f", pack("<f", x)))
end
numbers.f32 = f32

--- Rounds a Lua float to the nearest value of a float dtype (ties to even) and returns its bits. Rounds only once.
local function encode(x, dtype)
  local f = floats[dtype]
  if x ~= x then return f.nan end
  local raw = unpack("<i8", pack("<d", x))
  local sign = raw < 0 and f.sign or 0
  if x == 0 then return sign end
  if x < 0 then x = -x end
  if x == huge then return sign | f.overflow end
  local exponent = (raw >> 52 & 0x7FF) - 1023
  if exponent < f.least then exponent = f.least end
  local steps = x / 2.0 ^ (exponent - f.mantissa) -- exact: a power of two
  steps = (steps + 0x1p52) - 0x1p52               -- to an integer, ties to even
  local bits = ((exponent - f.least) << f.mantissa) + floor(steps)
  if bits >= f.past then bits = f.overflow end
  return sign | bits
end
numbers.encode = encode

--- The Lua float with the bits of a float dtype.
local function decode(bits, dtype)
  local f = floats[dtype]
  local magnitude = bits & (f.sign - 1)
  local x
  if magnitude >= f.past then
    x = (f.overflow == f.past and magnitude == f.past) and huge or 0 / 0
  else
    local exponent, mantissa = magnitude >> f.mantissa, magnitude & ((1 << f.mantissa) - 1)
    if exponent > 0 then mantissa = mantissa + (1 << f.mantissa) else exponent = 1 end
    x = mantissa * 2.0 ^ (exponent - 1 + f.least - f.mantissa)
  end
  if bits & f.sign ~= 0 then x = -x end
  return x
end
numbers.decode = decode

--- lazy(make): a table that computes each entry with make(key) at its first use.
local function lazy(make)
  return setmetatable({}, {__index = function(t, key)
    local value = make(key)
    t[key] = value
    return value
  end})
end

numbers.lazy = lazy

local decoded = {} -- decoded[dtype][bits]; not for float32, which has too many values
for _, dtype in ipairs {"float16", "bfloat16", "float8_e4m3fn"} do
  decoded[dtype] = lazy(function(bits) return decode(bits, dtype) end)
end
numbers.decoded = decoded

local e2m1 = {[0] = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0}
numbers.e2m1 = e2m1

--- The code (sign in bit 3) of the E2M1 value nearest to x, ties to the even code. x must not be NaN.
local function encode_e2m1(x)
  local sign = 0
  if x < 0 or (x == 0 and 1 / x < 0) then sign, x = 8, -x end
  local code
  if x <= 0.25 then code = 0
  elseif x < 0.75 then code = 1
  elseif x <= 1.25 then code = 2
  elseif x < 1.75 then code = 3
  elseif x <= 2.5 then code = 4
  elseif x < 3.5 then code = 5
  elseif x <= 5 then code = 6
  else code = 7 end
  return sign | code
end
numbers.encode_e2m1 = encode_e2m1

--- a*b + c of float32 numbers, rounded to float32 once. The product of two 24-bit mantissas is exact in a Lua float.
--- The sum is rounded to odd, so that the later rounding to float32 gives the same as a single one.
local function fma(a, b, c)
  local product = a * b
  local sum = product + c
  if sum - sum ~= 0 then return f32(sum) end -- infinite or NaN
  local back = sum - product
  local lost = (product - (sum - back)) + (c - back) -- what the addition rounded away, exactly
  if lost ~= 0 then
    local bits = unpack("<i8", pack("<d", sum))
    if bits & 1 == 0 then
      local away = (lost > 0) == (sum > 0)
      sum = unpack("<d", pack("<i8", away and bits + 1 or bits - 1))
    end
  end
  return f32(sum)
end
numbers.fma = fma

-- Locales change nothing but the decimal point: any other character that is no digit, sign, letter or blank is it.
local function with_point(text) return (text:gsub("[^%w+ -]", ".")) end

--- tostring, with a decimal point in any locale.
---@param value any
---@return string
function numbers.text(value)
  return math.type(value) == "float" and with_point(tostring(value)) or tostring(value)
end

--- string.format, with a decimal point in any locale.
---@param text string
---@param ... any
---@return string
function numbers.format(text, ...)
  if ("%.1f"):format(0.5) == "0.5" then return text:format(...) end
  local values, n = table.pack(...), 0
  text = text:gsub("(%%[-+ #0-9.]*)(.)", function(conversion, kind)
    if kind == "%" then return nil end
    n = n + 1
    if kind == "s" then values[n] = numbers.text(values[n]) end
    if not kind:find("[aAeEfgG]") then return nil end
    values[n] = with_point((conversion .. kind):format(values[n]))
    return "%s"
  end)
  return text:format(table.unpack(values, 1, values.n))
end

return numbers
