--- A strict reader and writer of JSON, the format of traces.
--
--   json.encode({ a = { 1, 2.5 }, b = json.null, c = json.list {} })   -- '{"a":[1,2.5],"b":null,"c":[]}'
--   local value, message = json.decode(text)                           -- nil, message if the text is not JSON
--
-- Integers keep all 64 bits. A table that json.list made or that has an element 1 is an array, and its keys must be
-- 1..#t. Any other table is an object, whose keys must be strings; they are written in sorted order. NaN and infinities
-- are errors. The reader returns arrays with the metatable of json.list, and null as json.null.

local numbers = require "nibble.numbers"

local json = {}

json.null = setmetatable({}, { __tostring = function() return "null" end, __name = "json.null" })

local list_class = { __name = "json.list" }

--- Marks a table as an array, so that an empty one is written as [].
---@param t table
---@return table t
function json.list(t) return setmetatable(t, list_class) end

------------------------------------------------------------------------------------------------------------- writing

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n", ["\r"] = "\\r",
  ["\t"] = "\\t" }

local function encode_string(text)
  if not utf8.len(text) then error("json.encode: value: expected UTF-8, got other bytes in a string", 0) end
  return '"' .. text:gsub('[%c"\\\127]', function(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end) .. '"'
end

local encode_value

local function encode_table(t, out, depth)
  if depth > 100 then error("json.encode: value: expected at most 100 levels of tables, got more", 0) end
  if t[1] ~= nil or getmetatable(t) == list_class then
    local count = 0
    for _ in pairs(t) do count = count + 1 end
    if count ~= #t then error("json.encode: value: expected an array of keys 1..n, got other keys", 0) end
    out[#out + 1] = "["
    for i = 1, count do
      if i > 1 then out[#out + 1] = "," end
      encode_value(t[i], out, depth)
    end
    out[#out + 1] = "]"
    return
  end
  local keys = {}
  for key in pairs(t) do
    if type(key) ~= "string" then
      error("json.encode: value: expected an object with string keys, got a key of type " .. type(key), 0)
    end
    keys[#keys + 1] = key
  end
  table.sort(keys)
  out[#out + 1] = "{"
  for i, key in ipairs(keys) do
    out[#out + 1] = (i > 1 and "," or "") .. encode_string(key) .. ":"
    encode_value(t[key], out, depth)
  end
  out[#out + 1] = "}"
end

function encode_value(value, out, depth)
  local kind = type(value)
  if value == json.null then
    out[#out + 1] = "null"
  elseif kind == "table" then
    encode_table(value, out, depth + 1)
  elseif kind == "string" then
    out[#out + 1] = encode_string(value)
  elseif kind == "boolean" or math.type(value) == "integer" then
    out[#out + 1] = tostring(value)
  elseif kind == "number" then
    if value ~= value or math.abs(value) == math.huge then
      error("json.encode: value: expected a finite number, got " .. value, 0)
    end
    local text = numbers.format("%.15g", value)
    if tonumber(text) ~= value then text = numbers.format("%.17g", value) end
    out[#out + 1] = text:find("[.e]") and text or text .. ".0" -- so that it is read as a float
  else
    error("json.encode: value: expected a table, a string, a number, a boolean or json.null, got a " .. kind, 0)
  end
end

--- A value as JSON, on one line.
---@param value any
---@return string
function json.encode(value)
  local out = {}
  encode_value(value, out, 0)
  return table.concat(out)
end

------------------------------------------------------------------------------------------------------------- reading

local meanings = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }
local words = { { "true", true }, { "false", false }, { "null", json.null } }

local function fail(at, expected) error({ at = at, expected = expected }, 0) end

local function skip(text, at) return text:find("[^ \t\r\n]", at) or #text + 1 end

local function hex(text, at)
  return tonumber(text:match("^%x%x%x%x", at) or fail(at, "four hexadecimal digits"), 16)
end

-- Reads the string whose quote is at `at`. Returns it and the position after it.
local function decode_string(text, at)
  local parts, from = {}, at + 1
  while true do
    local stop = text:find('["\\%c]', from)
    if not stop then fail(#text + 1, "the end of a string") end
    parts[#parts + 1] = text:sub(from, stop - 1)
    local c = text:sub(stop, stop)
    if c == '"' then
      from = stop + 1
      break
    elseif c == "\127" then
      parts[#parts + 1], from = c, stop + 1
    elseif c ~= "\\" then
      fail(stop, "no control character in a string")
    elseif text:sub(stop + 1, stop + 1) == "u" then
      local code = hex(text, stop + 2)
      from = stop + 6
      if code >= 0xD800 and code < 0xDC00 and text:sub(from, from + 1) == "\\u" then
        local low = hex(text, from + 2)
        if low >= 0xDC00 and low < 0xE000 then code, from = 0x10000 + ((code & 0x3FF) << 10 | low & 0x3FF), from + 6 end
      end
      if code >= 0xD800 and code < 0xE000 then fail(stop, "a pair of surrogates") end
      parts[#parts + 1] = utf8.char(code)
    else
      parts[#parts + 1] = meanings[text:sub(stop + 1, stop + 1)] or fail(stop, "an escape of JSON")
      from = stop + 2
    end
  end
  return table.concat(parts), from
end

local function decode_number(text, at)
  local whole = text:match("^-?%d+", at)
  if not whole or whole:find("^-?0%d") then fail(at, "a value") end
  local fraction = text:match("^%.%d+", at + #whole) or ""
  local exponent = text:match("^[eE][+-]?%d+", at + #whole + #fraction) or ""
  local behind = at + #whole + #fraction + #exponent
  if text:find("^[.%w+-]", behind) then fail(behind, "the end of a number") end
  if fraction == "" and exponent == "" then
    local integer = math.tointeger(tonumber(whole)) -- nil past 64 bits
    return math.type(tonumber(whole)) == "integer" and integer or fail(at, "an integer of 64 bits"), behind
  end
  local value = tonumber(whole .. fraction .. exponent) + 0.0
  if math.abs(value) == math.huge then fail(at, "a number of 64 bits") end
  return value, behind
end

local decode_value

local function decode_array(text, at, depth)
  local list = json.list {}
  at = skip(text, at + 1)
  if text:sub(at, at) == "]" then return list, at + 1 end
  while true do
    list[#list + 1], at = decode_value(text, at, depth)
    at = skip(text, at)
    local c = text:sub(at, at)
    if c == "]" then return list, at + 1 end
    if c ~= "," then fail(at, '"," or "]"') end
    at = at + 1
  end
end

local function decode_object(text, at, depth)
  local object = {}
  at = skip(text, at + 1)
  if text:sub(at, at) == "}" then return object, at + 1 end
  while true do
    at = skip(text, at)
    if text:sub(at, at) ~= '"' then fail(at, "a name") end
    local key, value
    local start = at
    key, at = decode_string(text, at)
    if object[key] ~= nil then fail(start, "each name once") end
    at = skip(text, at)
    if text:sub(at, at) ~= ":" then fail(at, '":"') end
    value, at = decode_value(text, at + 1, depth)
    object[key] = value
    at = skip(text, at)
    local c = text:sub(at, at)
    if c == "}" then return object, at + 1 end
    if c ~= "," then fail(at, '"," or "}"') end
    at = at + 1
  end
end

function decode_value(text, at, depth)
  at = skip(text, at)
  local c = text:sub(at, at)
  if depth == 100 and (c == "{" or c == "[") then fail(at, "at most 100 levels") end
  if c == "{" then return decode_object(text, at, depth + 1) end
  if c == "[" then return decode_array(text, at, depth + 1) end
  if c == '"' then return decode_string(text, at) end
  for _, word in ipairs(words) do
    if text:sub(at, at + #word[1] - 1) == word[1] then return word[2], at + #word[1] end
  end
  return decode_number(text, at)
end

--- Decodes a JSON text. Returns `nil, message` if it is not JSON.
---@param text string
---@return any
---@return string? message
function json.decode(text)
  if not utf8.len(text) then return nil, "no JSON: not UTF-8" end
  local ok, value, behind = pcall(decode_value, text, 1, 0)
  if ok then
    behind = skip(text, behind)
    if behind > #text then return value end
    value = { at = behind, expected = "nothing more" }
  elseif type(value) ~= "table" then
    error(value, 0)
  end
  local got = text:sub(value.at, value.at + 15):gsub("%c", "?")
  return nil, ("no JSON: expected %s at byte %d, got %s"):format(value.expected, value.at, got == "" and "the end"
    or '"' .. got .. '"')
end

return json
