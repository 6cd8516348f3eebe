-- Breaks its own surroundings: environment, state, libraries, metatables, arguments of the module.
local all = _G
function on_frame()
  setmetatable(all, { __index = function() error("trap") end, __newindex = function() error("trap") end })
  setmetatable(state, { __index = state, __newindex = state, __len = function() return 1 << 60 end })
  rawset(all, "string", nil)
  rawset(all, "on_load", 1)
  host.requests, host.pool, nibble.page, nibble.tensor = nil, 7, nil, error
  for _, name in ipairs({ "table", "math", "pcall", "error" }) do rawset(all, name, {}) end
  local t = nibble.zeros(2, 2)
  for _, f in ipairs({ t.close, t.view, t.item, t.narrow }) do f(setmetatable({}, { __name = "nibble.tensor" })) end
end
