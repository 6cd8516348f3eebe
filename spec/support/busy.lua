-- Work that takes a while, for specs about what does not wait.

--- Queues work in a stream until the device is behind. false: it is too fast for that.
return function(stream)
  local nibble = require("nibble")
  local n = 1 << 20
  repeat
    local t = nibble.empty(n, { device = stream.device })
    stream:scope(function()
      for i = 1, 50 do t:fill(i) end
    end)
    if not stream:record():query() then return true end
    n = 4 * n
  until n > 1 << 28
  return false
end
