--- Command-line options of the scripts: `--name value`, `--name=value` and flags.
--
--   local opts, message = options.parse(arg, { steps = { 64, min = 1 }, layout = { "HND", "NHD" }, csv = { false } })
--
-- An option is a table that begins with its default. `false` makes a flag. An integer makes an option of integers, with
-- the bounds `min`, `max` and `multiple`. Strings are choices, the first one is the default; `any` describes other text
-- that is accepted. An empty table accepts any text and has no default.

local options = {}

--- Describes the values of an option: "an integer >= 1", "HND or NHD", "a flag", "text".
---@param kind table
---@return string
function options.range(kind)
  local default = kind[1]
  if default == nil then return "text" end
  if default == false then return "a flag" end
  if math.type(default) ~= "integer" then
    return table.concat(kind, " or ") .. (kind.any and " or " .. kind.any or "")
  end
  local what = kind.multiple and "a multiple of " .. kind.multiple or "an integer"
  if kind.min and kind.max then return ("%s %d..%d"):format(what, kind.min, kind.max) end
  return what .. (kind.min and " >= " .. kind.min or "") .. (kind.max and " <= " .. kind.max or "")
end

local function value_of(name, kind, text)
  local default = kind[1]
  if math.type(default) == "integer" then
    local number = text:match("^%-?%d+$") and math.tointeger(tonumber(text))
    if number and number >= (kind.min or math.mininteger) and number <= (kind.max or math.maxinteger)
      and number % (kind.multiple or 1) == 0 then
      return number
    end
    return nil, ("--%s: expected %s, got %s"):format(name, options.range(kind), text)
  end
  if default == nil then return text end
  for _, choice in ipairs(kind) do
    if text == choice then return text end
  end
  if kind.any then return text end
  return nil, ("--%s: expected %s, got %s"):format(name, options.range(kind), text)
end

--- Parses arguments. Returns the value of each option; `given[name]` is true for those on the line. Returns `nil,
--- message` for a bad line.
---@param arguments string[]
---@param kinds table<string, table>
---@return table<string, any>? opts
---@return table<string, boolean>|string given
function options.parse(arguments, kinds)
  local opts, given, i = {}, {}, 1
  for name, kind in pairs(kinds) do opts[name] = kind[1] end
  while i <= #arguments do
    local name, equals, text = arguments[i]:match("^%-%-([%w-]+)(=?)(.*)$")
    local kind = name and kinds[name]
    if not kind or equals == "" and text ~= "" then
      return nil, ("unknown option %s (see --help)"):format(arguments[i])
    elseif kind[1] == false then
      if equals ~= "" then return nil, ("--%s takes no value"):format(name) end
      opts[name] = true
    else
      if equals == "" then
        i = i + 1
        text = arguments[i]
      end
      if not text or text == "" then return nil, ("--%s needs a value"):format(name) end
      local value, message = value_of(name, kind, text)
      if value == nil then return nil, message end
      opts[name] = value
    end
    given[name] = true
    i = i + 1
  end
  return opts, given
end

return options
