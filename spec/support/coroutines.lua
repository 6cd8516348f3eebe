-- Prints what coroutines do, for a comparison of the `nibble` command, which has its own coroutine.resume, wrap and
-- close, with plain Lua.
local function say(...)
  local values = table.pack(...)
  for i = 1, values.n do values[i] = tostring(values[i]):gsub("0x%x+", "address") end
  print(table.concat(values, "\t"))
end

local function closing(fn)
  return setmetatable({}, { __close = fn })
end

-- Values in and out, yields, the end.
local co = coroutine.create(function(a, b)
  local c = coroutine.yield(a + b)
  local d, e = coroutine.yield(c * 2)
  return d, e
end)
say(coroutine.resume(co, 1, 2))
say(coroutine.status(co), coroutine.isyieldable(co))
say(coroutine.resume(co, 5))
say(coroutine.resume(co, nil, 7))
say(coroutine.resume(co))
say(coroutine.status(co), coroutine.close(co))
for i in coroutine.wrap(function() for i = 1, 3 do coroutine.yield(i) end end) do say(i) end
say(select("#", coroutine.resume(coroutine.create(function(...) return ... end), table.unpack({}, 1, 200))))
say(coroutine.resume(coroutine.create(function(...) return select("#", ...) end), table.unpack({}, 1, 100000)))
say(select("#", coroutine.resume(coroutine.create(function() return table.unpack({}, 1, 500000) end))))

-- What is no coroutine.
say(pcall(coroutine.resume, 3))
say(pcall(coroutine.resume))
say(pcall(coroutine.wrap, 3))
say(pcall(coroutine.close, nil))
say(pcall(function() coroutine.resume("x") end))
say(pcall(function() coroutine.close((coroutine.running())) end))

-- Errors, and the places in their messages.
local f = coroutine.wrap(function() error("boom") end)
say(pcall(f))
say(pcall(f))
f = coroutine.wrap(function() error("boom") end)
say(pcall(function() f() end))
say(pcall(coroutine.wrap(function() error({}) end)))
say(pcall(coroutine.wrap(function() error() end)))
say(pcall(coroutine.wrap(function() string.rep() end)))
co = coroutine.create(function() error("x") end)
say(coroutine.resume(co))
say(coroutine.status(co), coroutine.close(co))
say(coroutine.close(co))

-- Variables that wait to be closed.
f = coroutine.wrap(function()
  local _ <close> = closing(function(_, e)
    say("closing", e)
    error("other", 0)
  end)
  error("boom")
end)
say(pcall(f))
say(pcall(f))
local function suspended(fn)
  local thread = coroutine.create(function()
    local _ <close> = closing(fn)
    coroutine.yield(1)
  end)
  say(coroutine.resume(thread))
  return thread
end
co = suspended(function(_, e) say("closing", e) end)
say(coroutine.close(co), coroutine.status(co))
co = suspended(function() error("in close", 0) end)
say(coroutine.close(co))
say(coroutine.status(co), coroutine.close(co))

-- Coroutines in coroutines.
local outer
outer = coroutine.create(function()
  coroutine.wrap(function()
    say(coroutine.status(outer))
    say(coroutine.resume(outer))
    say(pcall(coroutine.close, outer))
    say(coroutine.isyieldable(), select(2, coroutine.running()))
  end)()
end)
say(coroutine.resume(outer))
local itself
itself = coroutine.wrap(function() return pcall(itself) end)
say(itself())
local function deeper(n) return coroutine.wrap(deeper)(n + 1) end
local _, message = pcall(deeper, 1)
say(message:match("C stack overflow"))

-- Yields across pcall and metamethods; not across C.
co = coroutine.wrap(function()
  say(pcall(function()
    say(coroutine.yield(1))
    error("e", 0)
  end))
  return setmetatable({}, { __index = function(_, k) return coroutine.yield(k) end }).key
end)
say(co())
say(co("in"))
say(co("value"))
say(pcall(coroutine.wrap(function() table.sort({ 3, 2, 1 }, function() coroutine.yield() end) end)))
