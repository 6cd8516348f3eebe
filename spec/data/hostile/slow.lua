-- Calls that take seconds in Lua's own library, and tables that take long in one instruction.
local frame = 0
function on_frame()
  frame = frame + 1
  local which = frame % 8
  if which == 0 then return ("a"):rep(16384):find(".-.-.-b") end
  if which == 1 then return table.move({}, 1, 3e8, 2) end
  if which == 2 then
    return table.sort(setmetatable({}, { __len = function() return 1 << 30 end, __index = rawlen }))
  end
  if which == 3 then return ("a"):rep(40):gsub(("a?"):rep(40) .. ("a"):rep(40), "") end
  if which == 4 then
    local t = {}
    for i = 1, 8193 do t[i * 16383] = true end
    return t
  end
  if which == 5 then
    return table.concat(setmetatable({}, { __len = function() return 1 << 53 end, __index = tostring }))
  end
  if which == 6 then return ("x"):rep(400000):gsub(".", string.rep) end
  return load(("x = y "):rep(60000))
end
