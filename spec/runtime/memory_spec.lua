-- Memory over a long life: nothing grows, the collector knows how much tensors hold, exhaustion is an error that can be
-- caught, and a process ends quietly with whatever is still alive.
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

local function settle()
  nibble.synchronize()
  collectgarbage()
  collectgarbage()
  nibble.synchronize()
  return nibble.memory()
end

-- Fails unless the script ends with status 0 and prints nothing but `stdout`.
local function ends_well(code, opts, stdout)
  assert.same({ status = 0, stdout = stdout or "", stderr = "" }, process.script(code, opts))
end

describe("nibble.memory #quick", function()
  it("counts what live tensors hold, and the most there was", function()
    local base = settle()
    assert.equal("integer", math.type(base.used))
    local t = nibble.zeros(1000, 256)
    local with = nibble.memory()
    assert.is_true(with.used >= base.used + 1024000 and with.used < base.used + 1024000 + 4096)
    assert.is_true(with.reserved >= with.used and with.peak >= with.reserved)
    local view = t:narrow(1, 1, 1)
    assert.equal(with.used, nibble.memory().used)
    t:close()
    assert.equal(with.used, nibble.memory().used)
    view:close()
    local after = settle()
    assert.equal(base.used, after.used)
    assert.equal(base.reserved, after.reserved)
    assert.is_true(after.peak >= with.reserved)
    assert.same(after, nibble.memory(nibble.device()))
  end)

  it("counts nothing for views and empty tensors", function()
    local t = nibble.zeros(100, 100)
    local base = settle()
    local views = {}
    for i = 1, 100 do views[i] = t:select(1, i):expand(50, 100) end
    assert.equal(base.used, nibble.memory().used)
    assert.equal(100, #views)
  end)
end)

describe("memory", function()
  it("is flat over 1,000 cycles of tensors, streams, events, graphs and operations", function()
    local cache = nibble.zeros(4, 4, 384, { dtype = "uint8" })
    local slots = nibble.arange(16, { dtype = "int32" })
    local function cycle(i)
      local s = nibble.stream()
      s:wait(nibble.current_stream():record())
      s:scope(function()
        local t = nibble.randn(100, 10, { seed = i })
        local u = t:transpose(1, 2):contiguous():to("bfloat16"):reinterpret("uint8")
        assert.is_true(u:equal(u:clone()))
        nibble.mla.dequantize_cache(cache, slots)
        assert.is_string(tostring(t))
      end)
      local out = nibble.zeros(100)
      local graph = s:capture(function() out:copy(nibble.arange(100)) end)
      graph:replay()
      assert.equal(99, out[100])
      s:record():synchronize()
      if i % 2 == 0 then s:close() end
      if i % 3 == 0 then graph:close() end
      pcall(nibble.zeros, -1)
      pcall(nibble.tensor, { 1, { 2 } })
    end
    for i = 1, 50 do cycle(i) end
    local base, heap = settle(), collectgarbage("count")
    for i = 1, 1000 do cycle(i) end
    local after = settle()
    assert.equal(base.used, after.used)
    assert.equal(base.reserved, after.reserved)
    assert.is_true(collectgarbage("count") - heap < 64, "Lua's heap grew")
  end)

  it("of the process is flat too: nothing leaks beside the tensors", function()
    ends_well([[
      local nibble = require("nibble")
      local function rss()
        local pages = io.open("/proc/self/statm"):read("a"):match("^%d+ (%d+)")
        return tonumber(pages) * 4096
      end
      local function cycle(i)
        local s = nibble.stream()
        local out = nibble.zeros(1000)
        local graph = s:capture(function() out:copy(nibble.randn(1000, { seed = i })) end)
        graph:replay()
        out:bytes()
        tostring(out)
        s:record()
        pcall(out.narrow, out, 1, 2, 5000)
        pcall(s.capture, s, function() error("x") end)
        nibble.tensor({ { 1, 2 }, { 3, 4 } }):totable()
        if i % 10 == 0 then collectgarbage() end
      end
      for i = 1, 500 do cycle(i) end
      collectgarbage()
      local before = rss()
      for i = 1, 3000 do cycle(i) end
      collectgarbage()
      local grown = rss() - before
      -- A leak of 1 KiB in each round would be 3 MiB.
      assert(grown < 2 * 2^20 or os.getenv("ASAN_OPTIONS"), grown .. " bytes more")
    ]])
  end)

  it("of 10,000 tensors of 64 MiB is collected without being told to", function()
    ends_well([[
      local nibble = require("nibble")
      -- A sanitizer marks each byte of each of them.
      for _ = 1, os.getenv("ASAN_OPTIONS") and 1000 or 10000 do
        local t = nibble.empty(1 << 26, { dtype = "uint8" })
        assert(t:numel() == 1 << 26)
      end
      local peak = nibble.memory().peak
      assert(peak >= 1 << 26)
      -- A few dozen at a time at most, where 640 GB were asked for in all.
      assert(peak <= 100 << 26, ("%d MiB at once"):format(peak >> 20))
    ]])
  end)

  it("of tensors that hang in cycles with functions and metatables is collected too", function()
    ends_well([[
      local nibble = require("nibble")
      for _ = 1, os.getenv("ASAN_OPTIONS") and 500 or 3000 do
        local t = nibble.empty(1 << 26, { dtype = "uint8" })
        local object = setmetatable({ tensor = t }, { __gc = function() end })
        object.self = function() return object, t end
      end
      assert(nibble.memory().peak <= 200 << 26)
    ]])
  end)
end)

describe("exhaustion", function()
  it("by one tensor is an error that can be caught", function()
    local base = settle()
    for _, create in ipairs({
      function() return nibble.empty(1 << 47, { dtype = "uint8" }) end,
      function() return nibble.zeros(1 << 20, 1 << 20, 1 << 5) end,
      function() return nibble.randn(1 << 46) end, function() return nibble.randperm(1 << 46) end,
      function() return nibble.arange(1 << 46) end, function() return nibble.full({ 1 << 45, 8 }, 1) end,
      function() return nibble.tensor(1):expand(1 << 47):clone() end,
      function() return nibble.rope_table(1 << 40) end,
    }) do
      local ok, message = pcall(create)
      assert.is_false(ok)
      assert.is_string(message)
      assert.matches("memory", message)
    end
    assert.equal(3, nibble.full(1, 3):item())
    assert.equal(base.used, settle().used)
  end)

  it("by reading more than fits is an error as well", function()
    local huge = nibble.zeros(1, { dtype = "uint8" }):expand(1 << 46)
    for _, read in ipairs({ huge.bytes, huge.contiguous }) do
      local ok, message = pcall(read, huge)
      assert.is_false(ok)
      assert.matches("memory", tostring(message))
    end
    assert.equal(0, huge[1 << 46])
  end)

  it("by many tensors is an error, after which everything goes on", function()
    if process.sanitized() then return pending("AddressSanitizer needs more address space than the limit leaves") end
    ends_well([[
      local nibble = require("nibble")
      nibble.synchronize()
      for round = 1, 3 do
        local kept = {}
        local ok, message
        repeat
          ok, message = pcall(nibble.zeros, 1 << 20)
          if ok then kept[#kept + 1] = message end
        until not ok or #kept > 1000
        assert(not ok and type(message) == "string" and message:find("memory"), message)
        assert(#kept > 10, #kept)
        -- What there is still works, and so does what follows when some of it is gone.
        assert(kept[#kept]:fill(2)[1 << 20] == 2)
        kept = nil
        assert(nibble.zeros(1 << 20):fill(3)[1] == 3)
      end
    ]], { before = "ulimit -v 1000000; export NIBBLE_DEVICE=cpu;" }) -- a GPU's driver wants far more address space
  end)

  it("makes the collector run before it becomes an error", function()
    if process.sanitized() then return pending("AddressSanitizer needs more address space than the limit leaves") end
    ends_well([[
      local nibble = require("nibble")
      collectgarbage("stop")
      -- 100 times 64 MiB in a space of 1 GB, all garbage.
      for _ = 1, 100 do nibble.zeros(1 << 24) end
    ]], { before = "ulimit -v 1000000; export NIBBLE_DEVICE=cpu;" }) -- a GPU's driver wants far more address space
  end)
end)

describe("a process", function()
  local alive = [[
    local nibble = require("nibble")
    local s, s2 = nibble.stream(), nibble.stream()
    local t, view = nibble.zeros(1000, 10), nibble.arange(10):narrow(1, 2, 3)
    KEPT = { nibble.randn(100), t:transpose(1, 2), s2:record(), nibble.stream() }
    local graph = s:capture(function()
      t:fill(1)
      s2:wait(s:record())
      s2:scope(function() KEPT[5] = t:clone() end)
      s:wait(s2:record())
    end)
    for _ = 1, 10 do graph:replay() end
    -- Work that is still queued, a fault that nobody looked at, and things that keep each other.
    s:scope(function() for seed = 1, 20 do KEPT[6] = nibble.randn(200000, { seed = seed }) end end)
    nibble.mla.dequantize_cache(nibble.zeros(1, 1, 384, { dtype = "uint8" }), nibble.full(1, 7, { dtype = "int32" }))
    setmetatable(KEPT, { __gc = function() pcall(tostring, t) pcall(t.fill, t, 1) pcall(graph.replay, graph) end })
    debug.getregistry().kept = { graph, s, view }
  ]]

  for name, ending in pairs({
    ["a return"] = "return",
    ["os.exit(0)"] = "os.exit(0)",
    ["os.exit(0, true)"] = "os.exit(0, true)",
    ["os.exit(0, true) in a coroutine"] = "coroutine.wrap(function() os.exit(0, true) end)()",
    ["os.exit(0, true) in a scope"] = "s:scope(function() os.exit(0, true) end)",
  }) do
    it("that ends by " .. name .. " with live objects ends with status 0 and without a word", function()
      for _, command in ipairs({ "lua5.4", process.command() }) do
        for _ = 1, 3 do ends_well(alive .. ending, { command = command }) end
      end
    end)
  end

  it("that ends by an error with live objects shows that error alone", function()
    for _, command in ipairs({ "lua5.4", process.command() }) do
      local result = process.script(alive .. "error('the reason')", { command = command })
      assert.equal(1, result.status)
      assert.equal("", result.stdout)
      local first = result.stderr:match("^[^\n]*")
      assert.matches("the reason", first)
      for line in result.stderr:sub(#first + 2):gmatch("[^\n]+") do
        assert.is_truthy(line == "stack traceback:" or line:match("^\t"), line)
      end
    end
  end)

  it("may use tensors in a finalizer that runs when the interpreter closes", function()
    -- Lua swallows errors in finalizers, so that what is wrong goes to stderr. The first object is finalized after the
    -- tensor, the second before it.
    local code = [[
      local nibble, t
      local function finalizer(first)
        return { __gc = function()
          local ok, value = pcall(function() return t[2] end)
          if not (ok and value == 2 or not first and tostring(value):find("closed")) then
            io.stderr:write(tostring(value))
          end
          local fine, new = pcall(function() return nibble.zeros(3)[1] end)
          if not (fine and new == 0 or not fine and tostring(new):find("closed")) then
            io.stderr:write(tostring(new))
          end
          io.write("x")
        end }
      end
      LAST = setmetatable({}, finalizer(false))
      nibble = require("nibble")
      t = nibble.tensor({ 1, 2, 3 })
      FIRST = setmetatable({}, finalizer(true))
    ]]
    for _, command in ipairs({ "lua5.4", process.command() }) do ends_well(code, { command = command }, "xx") end
  end)

  it("that loads the module and does nothing ends quietly", function()
    ends_well('require("nibble")')
    ends_well('require("nibble") os.exit(0, true)')
    ends_well('package.loaded.nibble = require("nibble") and nil collectgarbage() collectgarbage()')
  end)
end)
