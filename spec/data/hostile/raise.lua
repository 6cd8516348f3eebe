-- Raises every kind of error.
local frame = 0
local kinds = {
  function() error("a text") end,
  function() error({}) end,
  function() error() end,
  function() error(setmetatable({}, { __tostring = function() error("again") end })) end,
  function() return nibble.zeros(-1) end,
  function() return nibble.zeros(3)[4] end,
  function() return nil + 1 end,
  function() local function f() return f() + 1 end return f() end,
  function() coroutine.yield() end,
  function() error(coroutine.create(error)) end,
  function() nibble.stream():capture(function() error("in a capture") end) end,
}
function on_frame()
  frame = frame + 1
  kinds[frame % #kinds + 1]()
end
function on_unload() error("even now") end
