-- Fills its queue with work for seconds, waits for it, and leaves captures open.
local t = nibble.zeros(4 << 20)
function on_frame()
  for i = 1, 1e9 do
    if i % 100 == 0 then
      pcall(function() nibble.stream():capture(function() while true do t:fill(i) end end) end)
    end
    if i % 50 == 0 then pcall(nibble.synchronize) end
    t:fill(i)
  end
end
