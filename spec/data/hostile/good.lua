-- Minds its own business: watches the pool, keeps a tensor over its reloads.
state.frames = state.frames or nibble.zeros(1, { dtype = "int64" })
local largest = 0
function on_load(reloaded) print(reloaded and "again" or "hello") end
function on_frame(dt)
  assert(dt >= 0 and dt < 60)
  state.frames[1] = state.frames[1] + 1
  for _, request in ipairs(host.requests()) do largest = math.max(largest, #request.pages) end
  host.set_most_running(host.pool().free > 64 and 12 or 6)
end
function on_unload() print(("called %d times, largest request %d pages"):format(state.frames:item(), largest)) end
