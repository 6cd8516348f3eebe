-- What every misuse must look like: an error string `operation: parameter: expected X, got Y`.
local misuse = {}

local function list(value)
  return type(value) == "table" and value or { value }
end

local function contains_any(text, wanted)
  for _, part in ipairs(list(wanted)) do
    if text:find(part, 1, true) then return true end
  end
  return false
end

--- Fails unless `fn` raises such an error. `operation`, `parameter`: a name, or several that are right. `expected`,
--- `got`: text that the two last parts contain, or a list of which one must be there. Returns the message.
---@param fn function
---@param operation string|string[]
---@param parameter string|string[]
---@param expected? string|string[]
---@param got? string|string[]
function misuse.raises(fn, operation, parameter, expected, got)
  local operations, parameters = table.concat(list(operation), "|"), table.concat(list(parameter), "|")
  local ok, message = pcall(fn)
  if ok then error(("%s: %s: no error was raised"):format(operations, parameters), 2) end
  if type(message) ~= "string" then error("the error is a " .. type(message) .. ", not a string", 2) end
  local wanting, getting
  for _, op in ipairs(list(operation)) do
    for _, name in ipairs(list(parameter)) do
      local _, last = (" " .. message):find(" " .. op .. ": " .. name .. ": expected ", 1, true)
      if last then wanting, getting = message:sub(last):match("^(.+), got (.+)$") end
      if wanting then goto found end
    end
  end
  error(("expected `%s: %s: expected ..., got ...`, got `%s`"):format(operations, parameters, message), 2)
  ::found::
  if expected and not contains_any(wanting, expected) then
    error(("`%s` does not say what was expected (%s)"):format(message, table.concat(list(expected), "|")), 2)
  end
  if got and not contains_any(getting, got) then
    error(("`%s` does not say what it got (%s)"):format(message, table.concat(list(got), "|")), 2)
  end
  return message
end

return misuse
