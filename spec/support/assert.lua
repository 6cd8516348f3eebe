--- Assertions for tensors and errors, registered with luassert. `require "spec.support.assert"` once per spec file.
--   assert.tensor_equal(expected, actual, [context])
--       Same dtype, shape and bytes; both are nibble tensors or plain arrays {dtype, shape, bytes}. Shows the first
--       differing index (from 1), both values and their bytes, and how many elements differ.
--   assert.raises_like(fn, operation, parameter, ...)
--       fn() raises the string "operation: parameter: expected X, got Y", and each further argument is a substring
--       of the part after the parameter.
--   assert.faults_like(fn, operation, parameter, value, index)
--       fn() raises a content fault "operation: parameter: expected X, got VALUE at index I (content fault on DEVICE)";
--       value and index may each be a list of what is accepted, or nil for any.
local assert = require "luassert"
local say = require "say"
local numbers = require "nibble.numbers"

local function plain(x)
  if type(x) == "table" and type(x.bytes) == "string" then return x end
  return {dtype = x.dtype, shape = x.shape, bytes = x:bytes()}
end

local function show(array, first, size)
  local bytes = array.bytes:sub(first, first + size - 1)
  local hex = bytes:gsub(".", function(c) return ("%02x"):format(c:byte()) end)
  local kind = numbers.floats[array.dtype]
  local bits = string.unpack("<" .. (kind or numbers.integers[array.dtype]).code, bytes)
  return ("%s (bytes %s)"):format(kind and ("%.9g"):format(numbers.decode(bits, array.dtype)) or bits, hex)
end

--- nil when equal, otherwise what differs, in words.
local function difference(expected, actual)
  if expected.dtype ~= actual.dtype then
    return ("dtype: expected %s, got %s"):format(expected.dtype, actual.dtype)
  end
  local want, got = table.concat(expected.shape, ", "), table.concat(actual.shape, ", ")
  if want ~= got then return ("shape: expected {%s}, got {%s}"):format(want, got) end
  if expected.bytes == actual.bytes then return nil end
  if #expected.bytes ~= #actual.bytes then
    return ("%d bytes expected, got %d"):format(#expected.bytes, #actual.bytes)
  end
  local size = (numbers.floats[expected.dtype] or numbers.integers[expected.dtype]).size
  local first, different = nil, 0
  for at = 1, #expected.bytes, size do
    if expected.bytes:sub(at, at + size - 1) ~= actual.bytes:sub(at, at + size - 1) then
      first, different = first or at, different + 1
    end
  end
  local index, rest = {}, (first - 1) // size
  for dim = #expected.shape, 1, -1 do
    index[dim] = rest % expected.shape[dim] + 1
    rest = rest // expected.shape[dim]
  end
  return ("first at index {%s}: expected %s, got %s; %d of %d elements differ"):format(
    table.concat(index, ", "), show(expected, first, size), show(actual, first, size), different,
      #expected.bytes // size)
end

--- Puts a finished message where luassert looks for it.
local function failed(arguments, message)
  arguments[1], arguments.n, arguments.nofmt = message, 1, {true}
  return false
end

local function register(name, check)
  say:set("assertion." .. name .. ".positive", "%s")
  say:set("assertion." .. name .. ".negative", "%s")
  assert:register("assertion", name, function(_, arguments)
    local message = check(arguments)
    if not message then
      arguments[1], arguments.n, arguments.nofmt = name .. " holds, which was not expected", 1, {true}
      return true
    end
    return failed(arguments, message)
  end, "assertion." .. name .. ".positive", "assertion." .. name .. ".negative")
end

register("tensor_equal", function(arguments)
  local message = difference(plain(arguments[1]), plain(arguments[2]))
  return message and (arguments[3] and arguments[3] .. ": " or "") .. "tensors differ: " .. message
end)

register("raises_like", function(arguments)
  local fn, operation, parameter = arguments[1], arguments[2], arguments[3]
  local ok, message = pcall(fn)
  if ok then return ("%s: %s: no error was raised"):format(operation, parameter) end
  if type(message) ~= "string" then return "the error is no string but a " .. type(message) end
  local prefix = ("%s: %s: "):format(operation, parameter)
  local start = message:find(prefix, 1, true)
  if not start then return ("expected an error that says '%s...', got '%s'"):format(prefix, message) end
  local rest = message:sub(start + #prefix)
  for i = 4, arguments.n do
    if not rest:find(arguments[i], 1, true) then
      return ("expected '%s' in the error '%s'"):format(arguments[i], message)
    end
  end
end)

local function accepted(value, list)
  if list == nil then return true end
  for _, one in ipairs(type(list) == "table" and list or {list}) do
    if tonumber(value) == one or value:lower() == tostring(one):lower() then return true end
    if one ~= one and value:lower():find("^[-+]?nan") then return true end
  end
  return false
end

register("faults_like", function(arguments)
  local fn, operation, parameter, values, indices = table.unpack(arguments, 1, 5)
  local ok, message = pcall(fn)
  if ok then return ("%s: %s: no content fault was raised"):format(operation, parameter) end
  if type(message) ~= "string" then return "the error is no string but a " .. type(message) end
  local pattern = ("%s: %s: expected "):format(operation, parameter):gsub("%p", "%%%0") ..
    "(.+), got (%S+) at index (%S+) %(content fault on (%S+)%)$"
  local expectation, value, index = message:match(pattern)
  if not expectation then
    return ("expected a content fault of '%s: %s', got '%s'"):format(operation, parameter, message)
  end
  if not accepted(value, values) then return ("an unexpected value in the fault '%s'"):format(message) end
  if not accepted(index, indices) then return ("an unexpected index in the fault '%s'"):format(message) end
end)

return assert
