-- Pinned memory, copies between it and the device that nobody waits for, and waits between the two.
local nibble = require("nibble")
local misuse = require("spec.support.runtime_misuse")
local keep_busy = require("spec.support.busy")

local raises = misuse.raises
local device = nibble.device() or "cpu"
local on_gpu = device:find("^cuda") ~= nil
local cpu = { device = "cpu" }
local dtypes = { "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64" }

local function with(opts, more)
  local all = {}
  for name, value in pairs(opts) do all[name] = value end
  for name, value in pairs(more or {}) do all[name] = value end
  return all
end

-- Whether at least one of a few calls of `fn`, each with the stream's device behind, returns before the work is done.
local function is_asynchronous(stream, fn)
  for _ = 1, 10 do
    if not keep_busy(stream) then return pending("the device is done with everything at once") end
    fn()
    local done = stream:record():query()
    stream:synchronize()
    if not done then return true end
  end
  return false
end

describe("pinned memory #quick", function()
  local path = os.tmpname()
  teardown(function() os.remove(path) end)
  local makers = {
    empty = function(opts) return nibble.empty(2, 3, opts):fill(1) end,
    zeros = function(opts) return nibble.zeros(2, 3, opts) end,
    full = function(opts) return nibble.full({ 2, 3 }, 7, opts) end,
    arange = function(opts) return nibble.arange(6, opts) end,
    randn = function(opts) return nibble.randn(6, with(opts, { seed = 3 })) end,
    randint = function(opts) return nibble.randint(0, 9, { 6 }, with(opts, { seed = 3 })) end,
    randperm = function(opts) return nibble.randperm(6, with(opts, { seed = 3 })) end,
    tensor = function(opts) return nibble.tensor({ { 1, 2 }, { 3, 4 } }, opts) end,
    from_bytes = function(opts) return nibble.from_bytes("abcdef", { 2, 3 }, with(opts, { dtype = "uint8" })) end,
    load = function(opts)
      nibble.tensor({ 1, 2.5 }, cpu):save(path)
      return nibble.load(path, opts)
    end,
  }

  for name, make in pairs(makers) do
    it(("from nibble.%s is a tensor of the CPU with the same values"):format(name), function()
      local t, plain = make({ pinned = true }), make(cpu)
      assert.equal("cpu", t.device)
      assert.is_true(t:equal(plain))
      assert.equal("boolean", type(t.pinned))
      assert.is_false(plain.pinned)
      if on_gpu then assert.is_true(t.pinned) end
      assert.equal(t.pinned, make({ pinned = true, device = "cpu" }).pinned)
      assert.equal(device, make({ pinned = false }).device)
      assert.is_false(make({ pinned = false }).pinned)
      raises(function() make({ pinned = 1 }) end, name, "pinned", "boolean")
      if on_gpu then
        raises(function() make({ pinned = true, device = device }) end, name, "device", '"cpu"', device)
      end
    end)
  end

  it("is what views of it are in, and copies of it are not", function()
    local t = nibble.zeros(4, 6, { pinned = true })
    for _, view in ipairs({ t:narrow(1, 2, 2), t[1], t:transpose(1, 2), t:view(24), t:reinterpret("int32") }) do
      assert.equal(t.pinned, view.pinned)
    end
    assert.is_false(t:clone().pinned)
    assert.is_false(t:transpose(1, 2):contiguous().pinned)
    t:close()
    raises(function() return t.pinned end, "tensor:pinned", "self", "open")
  end)

  it("is counted as the CPU's, given back, and used again", function()
    local function used()
      for _ = 1, 2 do collectgarbage() end
      return nibble.memory("cpu").used
    end
    nibble.synchronize("cpu")
    local base = used()
    local t = nibble.empty(1000, 256, { pinned = true, dtype = "uint8" })
    assert.equal(base + 256000, nibble.memory("cpu").used)
    t:close()
    assert.equal(base, used())
    for i = 1, 200 do
      local u <close> = nibble.full(i * 100, i, { pinned = true })
      assert.equal(i, u[i * 100])
    end
    for _ = 1, 3 do nibble.empty(0, 5, { pinned = true }):close() end
    assert.equal(base, used())
  end)
end)

describe("a copy between pinned memory and the device #quick", function()
  it("keeps or converts every element, for all dtypes", function()
    local bits = nibble.randint(0, 256, { 8 * 96 }, { dtype = "uint8", device = "cpu", seed = 4 })
    for _, from in ipairs(dtypes) do
      local source = bits:reinterpret(from)
      local pinned = nibble.empty(source.shape, { dtype = from, pinned = true }):copy(source)
      for _, to in ipairs(dtypes) do
        local expected = source:to(to)
        local there = nibble.zeros(source.shape, { dtype = to }):copy(pinned)
        assert.is_true(there:to("cpu"):equal(expected), from .. " to " .. to .. ", up")
        local back = nibble.zeros(source.shape, { dtype = to, pinned = true }):copy(pinned:to(device))
        assert.is_true(back:equal(expected), from .. " to " .. to .. ", down")
      end
    end
  end)

  it("takes strides on either side, broadcasts, and parts", function()
    local plain = nibble.randn(6, 10, { device = "cpu", seed = 5 })
    local pinned = nibble.empty(6, 10, { pinned = true }):copy(plain)
    local wide = nibble.full({ 10, 12 }, -1.0)
    wide:narrow(2, 3, 6):transpose(1, 2):copy(pinned)
    assert.is_true(wide:narrow(2, 3, 6):transpose(1, 2):to("cpu"):equal(plain))
    assert.equal(-1, wide[{ 1, 2 }])
    assert.equal(-1, wide[{ 10, 9 }])
    local back = nibble.zeros(6, 10, { pinned = true })
    back:copy(wide:narrow(2, 3, 6):transpose(1, 2))
    assert.is_true(back:equal(plain))
    -- Rows of a pinned tensor; then its columns, which the copy engine cannot take.
    local target = nibble.zeros(2, 10)
    assert.is_true(target:copy(pinned:narrow(1, 4, 2)):to("cpu"):equal(plain:narrow(1, 4, 2):clone()))
    local columns = nibble.zeros(10, 6):copy(pinned:transpose(1, 2))
    assert.is_true(columns:to("cpu"):equal(plain:transpose(1, 2):clone()))
    back:fill(0)
    back:transpose(1, 2):copy(columns)
    assert.is_true(back:equal(plain))
    -- One row or one element for all.
    local many = nibble.zeros(3, 10):copy(pinned[2])
    assert.is_true(many:to("cpu"):equal(plain[2]:expand(3, 10):clone()))
    assert.same({ 4, 4, 4 }, nibble.zeros(3):copy(nibble.full({}, 4.0, { pinned = true })):totable())
    local three = nibble.zeros(3, 2, { pinned = true, dtype = "int32" }):copy(nibble.tensor({ 5, 6 }))
    assert.same({ { 5, 6 }, { 5, 6 }, { 5, 6 } }, three:totable())
    assert.same({}, nibble.zeros(0, { pinned = true }):copy(nibble.zeros(0)):totable())
    assert.equal(2, nibble.zeros(1, { pinned = true }):copy(nibble.full({}, 2.0)):item())
  end)

  it("is refused for what any copy is refused for", function()
    local pinned, there = nibble.zeros(4, 2, { pinned = true }), nibble.zeros(3)
    raises(function() there:copy(pinned) end, "tensor:copy", "source", "expandable", "float32 {4, 2}")
    raises(function() pinned:copy(there) end, "tensor:copy", "source", "expandable", "float32 {3}")
    raises(function() pinned:narrow(1, 1, 1):expand(4, 2):copy(nibble.zeros(4, 2)) end, "tensor:copy", "self",
      "overlap")
  end)

  it("is done by t[i] = v, too, and by items, files and comparisons waited for", function()
    local pinned = nibble.zeros(3, 4, { pinned = true })
    pinned[2] = nibble.full(4, 6.0)
    assert.same({ 6, 6, 6, 6 }, pinned[2]:totable())
    local there = nibble.zeros(2, 4)
    there[1] = pinned[2]
    assert.same({ 6, 6, 6, 6 }, there[1]:totable())
    local waits = {
      function(t) return t[1] end, function(t) return t:narrow(1, 1, 1):item() end, function(t)
        return t:totable()[64] end,
      function(t) return (string.unpack("<f", t:bytes())) end, function(t) return t:amax() end,
      function(t) return t:equal(nibble.full(64, 7.0, cpu)) and 7 end, function(t) return tostring(t):find("7", 1, true)
        and 7 end,
    }
    local s, host = nibble.stream(), nibble.zeros(64, { pinned = true })
    for number, wait in ipairs(waits) do
      host:fill(0)
      nibble.synchronize("cpu")
      local value = nibble.zeros(64)
      nibble.synchronize()
      s:scope(function()
        for seed = 1, 5 do value:copy(nibble.randn(64, { seed = seed })) end
        host:copy(value:fill(7))
      end)
      assert.equal(7, wait(host), "wait " .. number)
    end
  end)
end)

describe("a copy between pinned memory and the device", function()
  it("returns before it is done", function()
    local pinned, there = nibble.zeros(1 << 16, { pinned = true }), nibble.zeros(1 << 16)
    local s = nibble.stream()
    nibble.synchronize()
    nibble.synchronize("cpu")
    local half = nibble.zeros(1 << 16, { dtype = "bfloat16" })
    for name, copy in pairs({
      up = function() there:copy(pinned) end, down = function() pinned:copy(there) end,
      ["up, converted"] = function() half:copy(pinned) end, ["down, converted"] = function() pinned:copy(half) end,
      ["down, with strides"] = function() pinned:view(256, 256):copy(there:view(256, 256):transpose(1, 2)) end,
    }) do
      s:scope(copy)
      s:synchronize()
      assert.is_true(is_asynchronous(s, function() s:scope(copy) end), name)
    end
  end)

  it("keeps its memory, on both sides, until it is done", function()
    local s = nibble.stream()
    for round = 1, 5 do
      local n = 100000 + round
      local there = nibble.zeros(n)
      local pinned = nibble.full(n, round + 0.0, { pinned = true })
      nibble.synchronize()
      nibble.synchronize("cpu") -- pinned is written: streams are ordered by events alone
      keep_busy(s)
      s:scope(function() there:copy(pinned) end)
      pinned = nil -- luacheck: ignore
      collectgarbage()
      collectgarbage()
      for _ = 1, 5 do nibble.full(n, -1.0, { pinned = true }):close() end
      assert.is_true(there:equal(nibble.full(n, round + 0.0)))

      local host = nibble.zeros(n, { pinned = true })
      nibble.synchronize("cpu")
      keep_busy(s)
      s:scope(function() host:copy(nibble.full(n, round + 0.5)) end)
      collectgarbage()
      collectgarbage()
      for _ = 1, 5 do nibble.full(n, -1.0):close() end
      assert.is_true(host:equal(nibble.full(n, round + 0.5, cpu)))
    end
  end)

  it("comes after CPU work that was queued before it, and before what waits for its event", function()
    local pinned, result = nibble.zeros(1 << 18, { pinned = true }), nibble.zeros(1 << 18, { pinned = true })
    local there = nibble.zeros(1 << 18)
    local host, s = nibble.current_stream("cpu"), nibble.stream()
    nibble.synchronize()
    local sum = nibble.zeros(30, cpu)
    for round = 1, 30 do
      pinned:fill(round) -- on the CPU, still under way
      if not on_gpu then s:wait(host:record()) end -- there streams are ordered by events alone
      s:scope(function()
        there:copy(pinned)
        result:copy(there)
      end)
      host:wait(s:record()) -- then pinned may be written and result be read there
      sum[round] = result[1 << 18]
      pinned:fill(-1)
    end
    for round = 1, 30 do assert.equal(round, sum[round]) end
    assert.equal(30, there[1 << 18])
  end)

  it("comes after a copy in another stream that writes its source", function()
    if not on_gpu then return pending("on the CPU streams are ordered by events alone") end
    local a, b = nibble.stream(), nibble.stream()
    local pinned, first, second = nibble.zeros(1 << 18, { pinned = true }), nibble.zeros(1 << 18), nibble.zeros(1 << 18)
    nibble.synchronize()
    for round = 1, 5 do
      keep_busy(a)
      a:scope(function() pinned:copy(first:fill(round)) end)
      b:scope(function() second:copy(pinned) end)
      assert.equal(round, second[1 << 18])
      b:synchronize()
      a:wait(b:record())
    end
  end)
end)

describe("waits between devices #quick", function()
  it("order a stream of the CPU and one of the device, both ways", function()
    local host, s = nibble.stream(cpu), nibble.stream()
    local x, y = nibble.zeros(1000, { pinned = true }), nibble.zeros(1000)
    nibble.synchronize()
    nibble.synchronize("cpu")
    for round = 1, 20 do
      host:scope(function()
        for i = 1, 3 do x:fill(i) end
        x:fill(round)
      end)
      s:wait(host:record())
      s:scope(function() y:copy(x) end)
      host:wait(s:record())
      host:scope(function() x:fill(-1) end)
      assert.equal(round, y[1000])
    end
  end)

  it("raise what a wait raises, and can be interrupted", function()
    if not on_gpu then return pending("the CPU alone is one device") end
    local s, host = nibble.stream(), nibble.stream(cpu)
    local cache, bad = nibble.zeros(2, 4, 384, { dtype = "uint8" }), nibble.tensor({ 0, 8 }, { dtype = "int32" })
    s:scope(function() nibble.mla.dequantize_cache(cache, bad) end)
    local ok, message = pcall(host.wait, host, s:record())
    assert.is_false(ok)
    assert.matches("content fault", message)
    host:wait(s:record())
    -- As Ctrl-C does it: a hook that raises an error as soon as Lua code runs inside the wait.
    local pinned, there = nibble.zeros(8, { pinned = true }), nibble.zeros(8)
    local transposed, plain = nibble.zeros(8, 8):transpose(1, 2), nibble.zeros(8, 8, cpu)
    nibble.synchronize()
    for name, wait in pairs({
      event = function() host:wait(s:record()) end, read = function() return pinned[1] end,
      copy = function() plain:copy(transposed) end,
    }) do
      local interrupted = false
      for _ = 1, 10 do
        s:scope(function() transposed:fill(1) end)
        if not keep_busy(s) then return pending("the device is done with everything at once") end
        s:scope(function()
          pinned:copy(there)
          transposed:fill(2)
        end)
        debug.sethook(function()
          if debug.getinfo(2, "S").source == "=nibble" then error("Ctrl-C") end
        end, "", 1)
        local fine, why = pcall(wait)
        debug.sethook()
        assert.is_true(fine or why:find("Ctrl-C", 1, true) ~= nil, why)
        interrupted = interrupted or not fine
        s:synchronize()
        if interrupted then break end
      end
      assert.is_true(interrupted or os.getenv("NIBBLE_SANITIZER") ~= nil, name)
    end
  end)
end)

describe("copies of pinned memory in a capture #quick", function()
  it("are nodes that read and write it at each replay", function()
    local s = nibble.stream()
    local input, output = nibble.zeros(64, { pinned = true }), nibble.zeros(64, { pinned = true })
    local x = nibble.zeros(64)
    nibble.synchronize()
    local graph = s:capture(function()
      x:copy(input)
      output:copy(x)
    end)
    local names = {}
    for i, node in ipairs(graph:nodes()) do names[i] = node.name end
    assert.same(on_gpu and { "copy to device", "copy to host" } or { "copy", "copy" }, names)
    assert.same({ 1 }, graph:nodes()[2].deps)
    assert.equal(0, output[64])
    for round = 1, 20 do
      input:fill(round)
      s:wait(nibble.current_stream("cpu"):record())
      s:scope(function() graph:replay() end)
      assert.equal(round, output[64])
      s:synchronize()
    end
    assert.is_true(graph:update(function()
      x:copy(input)
      output:copy(x)
    end))
    assert.is_false(graph:update(function() output:copy(x) end))
    x:fill(5)
    nibble.synchronize()
    s:scope(function() graph:replay() end)
    assert.equal(5, output[1])
  end)

  it("convert and take strides, and the graph keeps all that it needs", function()
    local s = nibble.stream()
    local output = nibble.zeros(4, 6, { pinned = true, dtype = "int32" })
    local input = nibble.arange(24, { pinned = true, dtype = "float32" })
    nibble.synchronize("cpu")
    local graph = s:capture(function()
      local x = nibble.empty(6, 4, { dtype = "bfloat16" })
      x:transpose(1, 2):copy(input:view(4, 6))
      output:copy(x:transpose(1, 2))
    end)
    local view = output:narrow(1, 1, 4)
    output, input = nil, nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    for i = 1, 20 do nibble.full(24, i, { pinned = true }) end
    for _ = 1, 3 do
      view:fill(0)
      s:wait(nibble.current_stream("cpu"):record())
      s:scope(function() graph:replay() end)
      assert.is_true(view:view(24):equal(nibble.arange(24, with(cpu, { dtype = "int32" }))))
      s:synchronize()
    end
  end)

  it("and allocations of it are fine there, pageable memory and waits are refused, with the capture intact", function()
    if not on_gpu then return pending("the CPU alone is one device") end
    local s, host = nibble.stream(), nibble.current_stream("cpu")
    local pinned, plain, x = nibble.full(8, 3.0, { pinned = true }), nibble.zeros(8, cpu), nibble.zeros(8)
    local columns = nibble.zeros(8, 2, { pinned = true }):select(2, 1)
    local event, pending_copy = host:record(), nibble.zeros(8, { pinned = true })
    nibble.synchronize("cpu")
    nibble.synchronize()
    local keep
    local graph = s:capture(function()
      x:copy(pinned)
      for _ = 1, 3 do nibble.full(100, 1.0, { pinned = true }):close() end
      keep = nibble.full(8, 9.0, { pinned = true })
      assert.equal(9, keep[8])
      assert.equal(3, pinned[8])
      for name, call in pairs({
        up = function()
          x:copy(plain) end, down = function() plain:copy(x) end, columns = function() x:copy(columns)
        end,
        back = function()
          columns:copy(x) end, wait = function() s:wait(event) end, to = function() return x:to("cpu")
        end,
      }) do
        local ok, message = pcall(call)
        assert.is_false(ok, name)
        assert.matches("captur", message, name)
      end
      pending_copy:copy(x)
      assert.error_matches(function() host:wait(s:record()) end,
        "stream:wait: not allowed while a stream of %S+ captures")
      collectgarbage()
      collectgarbage()
    end)
    assert.equal(2, #graph:nodes())
    s:scope(function() graph:replay() end)
    assert.equal(3, pending_copy[8])
  end)
end)
