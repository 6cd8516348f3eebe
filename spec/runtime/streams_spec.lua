-- Streams and events: work of one stream runs in order, work of two is ordered by events alone, and what goes wrong in
-- a stream is told once.
local nibble = require("nibble")

-- Queues work for about `rounds` tenths of a second (more on a slow machine) in a stream.
local function keep_busy(stream, rounds)
  stream:scope(function()
    for round = 1, rounds do nibble.randn(3000000, { seed = round }):close() end
  end)
end

describe("streams #quick", function()
  it("run their work in order", function()
    local s = nibble.stream()
    local t = nibble.zeros(64, { dtype = "int64" })
    local log = nibble.zeros(100, 64, { dtype = "int64" })
    nibble.synchronize()
    s:scope(function()
      for i = 1, 100 do
        t:fill(i)
        log[i] = t
      end
    end)
    s:synchronize()
    assert.equal(100, t[64])
    for i = 1, 100 do assert.equal(i, log[{ i, 1 }]) end
  end)

  it("see the results of another after waiting for its event", function()
    local a, b = nibble.stream(), nibble.stream()
    local x, y = nibble.zeros(1000), nibble.zeros(1000)
    nibble.synchronize()
    for round = 1, 50 do
      a:scope(function() x:fill(round) end)
      b:wait(a:record())
      b:scope(function() y:copy(x) end)
      -- And the other way: a may overwrite x only when b has read it.
      a:wait(b:record())
    end
    assert.equal(50, y[1])
    assert.is_true(y:equal(nibble.full(1000, 50.0)))
  end)

  it("have a device, a priority as a hint, and a name in print", function()
    for _, priority in ipairs({ -1, 0, 1 }) do
      local s = nibble.stream({ priority = priority, device = "cpu" })
      assert.equal("cpu", s.device)
      assert.is_truthy(tostring(s):find("cpu", 1, true))
      assert.matches("stream", tostring(s))
      s:close()
    end
    assert.equal(nibble.device(), nibble.stream():record().device)
    assert.matches("event", tostring(nibble.stream():record()))
    assert.is_true(tostring(nibble.stream()) ~= tostring(nibble.stream()))
  end)

  it("are many at once", function()
    local list, sum = {}, nibble.zeros(100, { dtype = "int64" })
    nibble.synchronize()
    for i = 1, 100 do
      local s = nibble.stream()
      s:scope(function() sum[i] = i end)
      list[i] = s
    end
    for _, s in ipairs(list) do
      s:synchronize()
      s:close()
    end
    for i = 1, 100 do assert.equal(i, sum[i]) end
  end)
end)

describe("reading a value #quick", function()
  it("waits for a stream's later write, too", function()
    local s = nibble.stream()
    local t, copy, long = nibble.zeros(4), nibble.zeros(4), nibble.zeros(1 << 22)
    nibble.synchronize()
    for n = 1, 3 do
      s:scope(function()
        t:fill(-n)
        copy:copy(t)
        long:fill(n)
        t:fill(n)
      end)
      assert.equal(n, t[1])
    end
  end)

  it("waits for the work that wrote it, in whatever stream", function()
    local s = nibble.stream()
    local reads = {
      function(t) return t[1] end, function(t) return t:totable()[1] end,
      function(t) return t:narrow(1, 1, 1):item() end,
      function(t) return (string.unpack("<f", t:bytes())) end, function(t) return t:amax() end,
      function(t) return t:equal(nibble.full(20000, 7.0)) and 7 end,
      function(t) return (t:max_error(nibble.zeros(20000))) end,
      function(t) return tostring(t):find("7", 1, true) and 7 end, function(t) return t:view(100, 200)[{ 1, 1 }] end,
      function(t) return t:allclose(nibble.full(20000, 7.0)) and 7 end,
    }
    for number, read in ipairs(reads) do
      local t = nibble.zeros(20000)
      nibble.synchronize()
      s:scope(function()
        for seed = 1, 10 do t:copy(nibble.randn(20000, { seed = seed })) end
        t:fill(7)
      end)
      assert.equal(7, read(t), "read " .. number)
    end
  end)
end)

describe("scope #quick", function()
  it("makes a stream current, passes arguments and gives the results back", function()
    local s = nibble.stream()
    local default = nibble.current_stream()
    assert.is_false(s == default)
    local results = table.pack(s:scope(function(...)
      assert.is_true(nibble.current_stream() == s)
      assert.is_true(nibble.current_stream(s.device) == s)
      return select("#", ...), nil, ...
    end, 1, nil, "x", nil))
    assert.same({ n = 6, 4, nil, 1, nil, "x", nil }, results)
    assert.is_true(nibble.current_stream() == default)
    assert.equal(0, select("#", s:scope(function() end)))
  end)

  it("takes and gives many values", function()
    local list = {}
    for i = 1, 200 do list[i] = i end
    local back = { nibble.stream():scope(function(...) return ... end, table.unpack(list)) }
    assert.same(list, back)
  end)

  it("and all else that calls a function calls what has __call, as a host's other languages bring it", function()
    local s, t, told = nibble.stream(), nibble.zeros(2), 0
    local callable = setmetatable({}, { __call = function(self, x) t:fill(3) return self, x end })
    nibble.synchronize()
    local one, two = s:scope(callable, 5)
    nibble.synchronize()
    assert.is_true(one == callable and two == 5)
    one, two = nibble.range("a range", callable, 6)
    assert.is_true(one == callable and two == 6)
    nibble.observe(setmetatable({}, { __call = function() told = told + 1 end }))
    local graph = s:capture(callable)
    assert.is_true(graph:update(callable))
    nibble.observe(nil)
    assert.is_true(told > 0)
    t:fill(0)
    graph:replay()
    assert.same({ 3, 3 }, t:totable())
    for _, other in ipairs { setmetatable({}, {}), "", t } do
      assert.error_matches(function() s:scope(other) end, "^stream:scope: fn: expected a function, got ")
    end
  end)

  it("nests", function()
    local a, b = nibble.stream(), nibble.stream()
    local default = nibble.current_stream()
    a:scope(function()
      b:scope(function()
        assert.is_true(nibble.current_stream() == b)
        a:scope(function() assert.is_true(nibble.current_stream() == a) end)
        assert.is_true(nibble.current_stream() == b)
      end)
      assert.is_true(nibble.current_stream() == a)
    end)
    assert.is_true(nibble.current_stream() == default)
  end)

  it("is left when its function raises, with the error as it was", function()
    local a, b = nibble.stream(), nibble.stream()
    local default = nibble.current_stream()
    local value = {}
    a:scope(function()
      local ok, err = pcall(b.scope, b, function() error(value) end)
      assert.is_false(ok)
      assert.is_true(err == value)
      assert.is_true(nibble.current_stream() == a)
    end)
    assert.is_true(nibble.current_stream() == default)
    assert.is_false((pcall(a.scope, a, function() error(nil) end)))
    assert.is_false((pcall(a.scope, a, function() nibble.zeros(-1) end)))
    assert.is_true(nibble.current_stream() == default)
    for _ = 1, 1000 do pcall(a.scope, a, error, "x") end
    assert.is_true(nibble.current_stream() == default)
  end)

  it("cannot be yielded across, and is left then too", function()
    local s = nibble.stream()
    local default = nibble.current_stream()
    local thread = coroutine.create(function()
      s:scope(function() coroutine.yield(1) end)
    end)
    local ok, message = coroutine.resume(thread)
    assert.is_false(ok)
    assert.matches("yield", message)
    assert.equal("dead", coroutine.status(thread))
    assert.is_true(nibble.current_stream() == default)
    -- Caught inside the coroutine, which goes on.
    local inside = coroutine.wrap(function()
      local fine, why = pcall(s.scope, s, coroutine.yield)
      coroutine.yield(fine, why)
      return nibble.current_stream() == default
    end)
    local fine, why = inside()
    assert.is_false(fine)
    assert.matches("yield", why)
    assert.is_true(inside())
  end)

  it("holds in a coroutine that runs inside it", function()
    local s = nibble.stream()
    s:scope(function()
      local seen
      local thread = coroutine.wrap(function()
        coroutine.yield()
        seen = nibble.current_stream() == s
      end)
      thread()
      thread()
      assert.is_true(seen)
    end)
  end)

  it("keeps a stream usable that is closed or dropped inside it", function()
    local t = nibble.zeros(3)
    nibble.synchronize()
    do
      local s = nibble.stream()
      s:scope(function()
        s = nil
        collectgarbage()
        collectgarbage()
        t:fill(1)
      end)
    end
    assert.same({ 1, 1, 1 }, t:totable())
    local s = nibble.stream()
    pcall(s.scope, s, function()
      s:close()
      t:fill(2)
    end)
    assert.equal(3, nibble.full(1, 3):item())
  end)
end)

describe("events #quick", function()
  it("are done after a wait for them", function()
    local s = nibble.stream()
    local t = nibble.zeros(1000)
    nibble.synchronize()
    s:scope(function() t:copy(nibble.randn(1000)):fill(4) end)
    local e = s:record()
    e:synchronize()
    assert.is_true(e:query())
    assert.equal(4, t[1000])
    assert.is_true(nibble.stream():record():query() ~= nil)
    s:synchronize()
    assert.is_true(s:record():query() ~= nil)
  end)

  it("give the milliseconds between them", function()
    local s = nibble.stream()
    local a = s:record()
    s:scope(function() nibble.randn(100000) end)
    local b = s:record()
    local c = s:record()
    local whole, first, second = a:elapsed(c), a:elapsed(b), b:elapsed(c)
    assert.equal("float", math.type(whole))
    assert.is_true(first > 0 and second >= 0, "time goes on")
    assert.is_true(math.abs(whole - first - second) < 0.01 + 1e-3 * whole)
    assert.is_true(whole < 60000, "milliseconds, not microseconds")
    assert.equal(0, a:elapsed(a))
    assert.is_true(a:query() and c:query())
  end)

  it("may be waited for by their own stream, many times, and after their stream is closed", function()
    local a, b = nibble.stream(), nibble.stream()
    local t, u = nibble.zeros(10), nibble.zeros(10)
    nibble.synchronize()
    a:scope(function() t:fill(5) end)
    local e = a:record()
    a:close()
    for _ = 1, 10 do b:wait(e) end
    b:scope(function() u:copy(t) end)
    b:wait(b:record())
    e:close()
    b:synchronize()
    assert.equal(5, u[10])
  end)
end)

describe("events", function()
  it("make a stream wait for a busy one", function()
    local a, b = nibble.stream(), nibble.stream()
    local x, y = nibble.zeros(1000), nibble.zeros(1000)
    nibble.synchronize()
    for round = 1, 3 do
      keep_busy(a, 3)
      a:scope(function() x:fill(round) end)
      b:wait(a:record())
      b:scope(function() y:copy(x) end)
      b:synchronize()
      assert.is_true(y:equal(nibble.full(1000, round + 0.0)), "round " .. round)
    end
  end)

  it("make a busy stream the last to write", function()
    -- b's write is queued at once and must still come after a's.
    local a, b = nibble.stream(), nibble.stream()
    local x = nibble.zeros(1000)
    nibble.synchronize()
    keep_busy(a, 3)
    a:scope(function() x:fill(1) end)
    b:wait(a:record())
    b:scope(function() x:fill(2) end)
    nibble.synchronize()
    assert.equal(2, x[1])
    assert.equal(2, x[1000])
  end)

  it("chain through streams", function()
    local streams, values = {}, {}
    for i = 1, 6 do streams[i], values[i] = nibble.stream(), nibble.zeros(500) end
    nibble.synchronize()
    keep_busy(streams[1], 3)
    streams[1]:scope(function() values[1]:fill(42) end)
    for i = 2, 6 do
      streams[i]:wait(streams[i - 1]:record())
      streams[i]:scope(function() values[i]:copy(values[i - 1]) end)
    end
    streams[6]:synchronize()
    assert.is_true(values[6]:equal(nibble.full(500, 42.0)))
  end)

  it("measure work that was queued between them, which is longer than nothing", function()
    local s = nibble.stream()
    local a = s:record()
    local b = s:record()
    keep_busy(s, 4)
    local c = s:record()
    assert.is_true(b:elapsed(c) > a:elapsed(b))
  end)
end)

describe("a busy stream", function()
  it("that is closed or dropped still does its work", function()
    for _, drop in ipairs({ function(s) s:close() end, function() end }) do
      local s = nibble.stream()
      local t = nibble.zeros(1000)
      nibble.synchronize()
      keep_busy(s, 3)
      s:scope(function() t:fill(8) end)
      drop(s)
      s = nil -- luacheck: ignore
      collectgarbage()
      collectgarbage()
      assert.equal(8, t[1])
      assert.equal(8, t[1000])
    end
  end)

  it("is waited for by nibble.synchronize", function()
    local s = nibble.stream()
    local t = nibble.zeros(1000)
    nibble.synchronize()
    keep_busy(s, 3)
    s:scope(function() t:fill(9) end)
    local e = s:record()
    nibble.synchronize()
    assert.is_true(e:query())
    assert.equal(9, t[1000])
  end)

  it("keeps the tensors it uses, whatever the collector and later tensors do", function()
    local s = nibble.stream()
    local out = nibble.zeros(100000)
    nibble.synchronize()
    keep_busy(s, 3)
    s:scope(function() out:copy(nibble.full(100000, 6.0)) end)
    collectgarbage()
    collectgarbage()
    for _ = 1, 50 do nibble.full(100000, -1.0):close() end
    assert.is_true(out:equal(nibble.full(100000, 6.0)))
  end)

  it("reads host data as it was at the call, though the string is gone", function()
    local s = nibble.stream()
    nibble.synchronize()
    keep_busy(s, 3)
    local t
    s:scope(function() t = nibble.from_bytes(("x"):rep(1000) .. ("y"):rep(1000), 2000, { dtype = "uint8" }) end)
    collectgarbage()
    collectgarbage()
    for i = 1, 1000 do assert(#("z"):rep(2000 + i % 3) > 0) end
    assert.equal(("x"):rep(1000) .. ("y"):rep(1000), t:bytes())
  end)

  it("does not hold up another stream's results", function()
    -- Not a matter of time: the second stream's value is read while the first still has a lot to do, or has not.
    local a, b = nibble.stream(), nibble.stream()
    local t = nibble.zeros(10)
    nibble.synchronize()
    keep_busy(a, 3)
    b:scope(function() t:fill(1) end)
    assert.equal(1, t[10])
    b:synchronize()
    a:synchronize()
  end)
end)

describe("a content fault #quick", function()
  local cache = nibble.zeros(2, 4, 384, { dtype = "uint8" })
  local bad = nibble.tensor({ 0, 8 }, { dtype = "int32" })
  nibble.synchronize()

  local function provoke(stream)
    return stream:scope(function() return nibble.mla.dequantize_cache(cache, bad) end)
  end

  local function is_fault(ok, message)
    assert.is_false(ok)
    assert.matches("mla%.dequantize_cache: slots: expected .+, got 8 at index 1 %(content fault on .+%)", message)
  end

  it("is raised once, by any wait on the device, and work goes on", function()
    local s, other = nibble.stream(), nibble.stream()
    local waits = {
      function() s:synchronize() end, function() nibble.synchronize() end, function() nibble.check_faults() end,
      function(rows) return rows:totable() end, function(rows) return rows:bytes() end,
      function(rows) return rows[{ 1, 1 }] end,
      function() s:record():synchronize() end, function(rows) return tostring(rows) end,
      function(rows) return rows:amax() end, function(rows) return rows:equal(rows) end,
    }
    for _, wait in ipairs(waits) do
      local rows = provoke(s)
      is_fault(pcall(wait, rows))
      -- Once: the same wait is fine now, so is everything else, and the result is there.
      assert.has_no.errors(function() wait(rows) end)
      nibble.check_faults()
      nibble.synchronize()
      other:synchronize()
      assert.equal(("\0"):rep(1024), rows[2]:bytes())
    end
  end)

  it("of several is one", function()
    local s = nibble.stream()
    for _ = 1, 5 do provoke(s) end
    is_fault(pcall(nibble.check_faults))
    nibble.check_faults()
    s:synchronize()
  end)

  it("names the device", function()
    provoke(nibble.current_stream())
    local ok, message = pcall(nibble.synchronize)
    assert.is_false(ok)
    assert.is_truthy(message:find("content fault on " .. nibble.device(), 1, true), message)
  end)

  it("is not there when nothing is wrong", function()
    nibble.check_faults()
    nibble.mla.dequantize_cache(cache, nibble.tensor({ 0, 7 }, { dtype = "int32" }))
    nibble.check_faults()
  end)
end)
