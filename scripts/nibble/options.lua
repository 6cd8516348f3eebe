--- Command-line options of the scripts: `--name value`, `--name=value` and flags.
--
--   local opts, message = options.parse(arg, { steps = { 64, min = 1 }, layout = { "HND", "NHD" }, csv = { false } })
--
-- An option is a table with its default first: `false` makes a flag; an integer takes integers, at least `min`; strings
-- are the choices, the first one the default; an empty table takes any text and has no default.

local options = {}

local function value_of(name, kind, text)
  local default = kind[1]
  if math.type(default) == "integer" then
    local number = text:match("^%-?%d+$") and math.tointeger(tonumber(text))
    if number and number >= (kind.min or math.mininteger) then return number end
    local range = kind.min and (" >= " .. kind.min) or ""
    return nil, ("--%s: expected an integer%s, got %s"):format(name, range, text)
  end
  if default == nil then return text end
  for _, choice in ipairs(kind) do
    if text == choice then return text end
  end
  return nil, ("--%s: expected %s, got %s"):format(name, table.concat(kind, " or "), text)
end

--- The options' values; `given[name]` says which were on the line. A bad line gives `nil, message`.
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
