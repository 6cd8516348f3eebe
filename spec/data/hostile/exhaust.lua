-- Uses up Lua's memory and the device's, and goes on when it is told that there is none.
function on_frame()
  local all = {}
  while true do
    pcall(function() for i = 1, 1e9 do all[i] = { ("x"):rep(i % 1000) } end end)
    pcall(function() for i = 1, 1e9 do all[i] = nibble.zeros(1 << 20):fill(i) end end)
    pcall(string.rep, "x", 1 << 40)
    if not next(all) then error("nothing was kept") end
    all = {}
  end
end
