-- Work that takes a while, for specs about what does not wait.
local nibble = require("nibble")

--- Queues work in a stream until the device is well behind. false: it is too fast for that.
return function(stream)
  local n = 1 << 18
  repeat
    local t = nibble.empty(n, { device = stream.device })
    local function fill()
      for i = 1, 50 do t:fill(i) end
    end
    stream:scope(fill)
    local done, until_then = stream:record(), os.clock() + 0.001
    while not done:query() and os.clock() < until_then do end
    if not done:query() then -- behind by more than a moment: as much again for whatever comes next
      stream:scope(fill)
      return true
    end
    n = 4 * n
  until n > 1 << 28
  return false
end
