-- Threads without end: many, deep, in each other, and left standing when the call is over.
local frame = 0
state.left = state.left or {}
local kinds = {
  function() while true do coroutine.wrap(function() while true do end end)() end end,
  function() local function f() local c = coroutine.wrap(f) pcall(c) while true do end end f() end,
  function() while true do table.insert(state.left, coroutine.create(function() coroutine.yield() end)) end end,
  function()
    local function deep(n) if n == 0 then coroutine.yield() end return 1 + deep(n - 1) end
    for i = 1, 1e9 do
      local co = coroutine.create(deep)
      coroutine.resume(co, 1000)
      state.left[i % 5] = co
    end
  end,
  function()
    local co = coroutine.create(function() local t <close> = nibble.zeros(4) while true do pcall(coroutine.yield, t)
      end end)
    while true do coroutine.resume(co) coroutine.close(coroutine.create(error)) end
  end,
  function()
    state.left = {}
    nibble.stream():scope(coroutine.wrap(function() coroutine.yield(nibble.stream():capture(coroutine.yield)) end))
  end,
}
function on_frame()
  frame = frame + 1
  kinds[frame % #kinds + 1]()
end
