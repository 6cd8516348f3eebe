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
    if not stream:record():query() then -- the host queues faster than this is done: as much again for whatever comes next
      stream:scope(fill)
      return true
    end
    n = 4 * n
  until n > 1 << 28
  return false
end
