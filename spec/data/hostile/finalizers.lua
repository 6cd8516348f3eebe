-- Asks for code that runs when the collector or a block's end says so: what no deadline ends.
local endless = function() while true do end end
local kept = {}
function on_frame()
  for _, name in ipairs({ "__gc", "__close", "__mode" }) do
    assert(not pcall(setmetatable, {}, { [name] = endless }))
    local metatable = {}
    local t = setmetatable({}, metatable)
    metatable[name] = endless -- later
    pcall(function() local c <close> = t return c end)
    kept[#kept % 100 + 1] = setmetatable({}, { __index = setmetatable({}, { __index = metatable }) })
  end
  local t <close> = nibble.zeros(4) -- has both, of the module's own
  local metatable = getmetatable(t)
  pcall(function() metatable.__gc = endless end)
  while true do kept[1] = { ("garbage"):rep(1000), nibble.zeros(100) } end
end
