-- Never returns, and catches whatever would end it.
local function again()
  while true do
    pcall(again)
    xpcall(error, again)
    local step = coroutine.wrap(function() while true do pcall(coroutine.yield) end end)
    for _ = 1, 1e9 do step() end
  end
end
on_frame = again
function on_unload() again() end
