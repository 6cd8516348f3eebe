-- Never returns.
function on_frame()
  while true do end
end
