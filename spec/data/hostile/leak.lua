-- Keeps everything it can get.
state.kept = state.kept or {}
function on_frame()
  local kept = state.kept
  for i = 1, 100 do
    kept[#kept + 1] = nibble.zeros(1000)
    kept[#kept + 1] = ("leak"):rep(100) .. #kept
    pcall(function() kept[#kept + 1] = nibble.stream() end)
    pcall(function()
      local t = kept[1]
      kept[#kept + 1] = nibble.stream():capture(function() t:fill(i) end)
    end)
  end
end
