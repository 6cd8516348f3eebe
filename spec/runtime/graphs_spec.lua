-- Capture, replay and update: what a graph records, keeps alive and does again. What a capture refuses, and how it ends
-- when something goes wrong inside it, is in graphs_refusals_spec.lua.
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

local function float(...)
  return nibble.full({ ... }, 0.0)
end

local function deps_of(graph)
  local list = {}
  for id, node in ipairs(graph:nodes()) do
    assert.equal(id, node.id)
    list[id] = node.deps
  end
  return list
end

-- Four fills in the shape of a diamond: 1 -> 2 (here) and 3 (on another stream) -> 4. Returns the four tensors.
local function diamond(stream, other, value)
  local a, b, c, d = float(8), float(8), float(8), float(8)
  local fn = function()
    a:fill(value or 1)
    other:wait(stream:record())
    b:copy(a)
    other:scope(function() c:copy(a) end)
    stream:wait(other:record())
    d:copy(c)
  end
  return fn, { a, b, c, d }
end

describe("a capture #quick", function()
  it("records and does nothing", function()
    local s = nibble.stream()
    local t = float(4)
    local graph = s:capture(function()
      t:fill(1)
      t:fill(2)
    end)
    s:synchronize()
    assert.same({ 0, 0, 0, 0 }, t:totable())
    graph:replay()
    assert.same({ 2, 2, 2, 2 }, t:totable())
    assert.matches("graph", tostring(graph))
    assert.equal(s.device, graph.device)
  end)

  it("makes its stream current, also the default stream", function()
    for _, s in ipairs({ nibble.stream(), nibble.current_stream() }) do
      local outside = nibble.current_stream()
      local seen
      local t = float(2)
      local graph = s:capture(function()
        seen = nibble.current_stream() == s
        t:fill(3)
      end)
      assert.is_true(seen)
      assert.is_true(nibble.current_stream() == outside)
      assert.equal(0, t[1])
      graph:replay()
      assert.equal(3, t[1])
    end
  end)

  it("may be empty", function()
    local graph = nibble.stream():capture(function() end)
    assert.same({}, graph:nodes())
    graph:replay()
    assert.matches("digraph", graph:dot())
  end)

  it("takes every mode", function()
    for _, mode in ipairs({ "thread_local", "global", "relaxed" }) do
      local t = float(1)
      nibble.stream():capture(function() t:fill(5) end, { mode = mode }):replay()
      assert.equal(5, t:item())
    end
  end)

  it("records every kind of work on tensors", function()
    local s = nibble.stream()
    local x, y = nibble.arange(6, { dtype = "float32" }):view(2, 3), nibble.zeros(3, 2, { dtype = "bfloat16" })
    local made, table_, random, permuted
    local graph = s:capture(function()
      y:copy(x:transpose(1, 2))
      made = nibble.full({ 2, 2 }, 7.5)
      random = nibble.randn(10, { seed = 5 })
      permuted = nibble.randperm(10, { seed = 6 })
      table_ = nibble.rope_table(4)
      made:narrow(1, 1, 1):copy(x:narrow(1, 1, 1):narrow(2, 2, 2))
      y[{ 1, 1 }] = 9
      nibble.arange(5)
      nibble.zeros(3)
      x:clone()
      x:to("float16")
    end)
    for _, node in ipairs(graph:nodes()) do assert.matches("^[%a_][%w_]*$", node.name) end
    for round = 1, 3 do
      x:copy(nibble.arange(round, round + 6, { dtype = "float32" }):view(2, 3))
      graph:replay()
      assert.same({ { 9, round + 3 }, { round + 1, round + 4 }, { round + 2, round + 5 } }, y:totable())
      assert.same({ { round + 1, round + 2 }, { 7.5, 7.5 } }, made:totable())
      assert.is_true(random:equal(nibble.randn(10, { seed = 5 })))
      assert.is_true(permuted:equal(nibble.randperm(10, { seed = 6 })))
      assert.is_true(table_:equal(nibble.rope_table(4)))
      random:fill(0)
      permuted:fill(0)
      made:fill(0)
      y:fill(0)
    end
  end)

  it("records an operation with device scalars, which each replay reads anew", function()
    local s = nibble.stream()
    local key = nibble.full({ 1, 1, 16 }, 3.0, { dtype = "bfloat16" })
    local slots = nibble.zeros(1, { dtype = "int32" })
    local k, v = nibble.zeros(1, 1, 1, 8, { dtype = "uint8" }), nibble.zeros(1, 1, 1, 8, { dtype = "uint8" })
    local k_sf, v_sf = nibble.zeros(1, 1, 1, 1, { dtype = "uint8" }), nibble.zeros(1, 1, 1, 1, { dtype = "uint8" })
    local scale = nibble.full(1, 1.0)
    local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    local graph = s:capture(function() append(key, key, slots, { k, v }, { k_sf, v_sf }, scale, scale) end)
    assert.equal("append", graph:nodes()[1].name)
    for _, g in ipairs({ 1.0, 0.5, 2.0 }) do
      scale:fill(g)
      graph:replay()
      -- amax 3: the block scale is 3 / (6 g), exactly.
      assert.equal(3 / (6 * g), k_sf:reinterpret("float8_e4m3fn"):view(1):item())
      assert.equal(("\x77"):rep(8), k:bytes())
    end
  end)
end)

describe("a graph's nodes #quick", function()
  it("have no dependency that another one implies", function()
    local s, other = nibble.stream(), nibble.stream()
    local t = float(4)
    local graph = s:capture(function()
      t:fill(1)
      local early = s:record()
      t:fill(2)
      s:wait(early) -- which is in its own past
      t:fill(3)
      other:wait(s:record())
      other:wait(early)
      s:wait(other:record()) -- with nothing of its own
      t:fill(4)
    end)
    assert.same({ {}, { 1 }, { 2 }, { 3 } }, deps_of(graph))
  end)

  it("wait for no event of a capture that has ended", function()
    local s, other = nibble.stream(), nibble.stream()
    local t = float(4)
    local old
    s:capture(function()
      t:fill(1)
      old = s:record()
    end)
    local graph = s:capture(function()
      t:fill(2)
      for _, stream in ipairs { s, other } do
        local ok, message = pcall(stream.wait, stream, old)
        assert.is_false(ok)
        assert.matches("stream:wait: event: expected an event of the open capture or of no capture, "
          .. "got one of a capture", message,
          1,
          true)
      end
      t:fill(3)
    end)
    assert.same({ {}, { 1 } }, deps_of(graph))
  end)

  it("depend on their stream's last node", function()
    local s = nibble.stream()
    local t = float(4)
    local graph = s:capture(function()
      t:fill(1)
      t:fill(2)
      t:copy(float(4))
    end)
    local nodes = graph:nodes()
    assert.is_true(#nodes >= 3)
    assert.equal("fill", nodes[1].name)
    assert.equal("copy", nodes[#nodes].name)
    local deps = deps_of(graph)
    assert.same({}, deps[1])
    for id = 2, #deps do assert.same({ id - 1 }, deps[id]) end
  end)

  it("depend across streams as events say: a diamond", function()
    local s, other = nibble.stream(), nibble.stream()
    local graph = s:capture((diamond(s, other)))
    local names = {}
    for id, node in ipairs(graph:nodes()) do names[id] = node.name end
    assert.same({ "fill", "copy", "copy", "copy" }, names)
    assert.same({ {}, { 1 }, { 1 }, { 2, 3 } }, deps_of(graph))
  end)

  it("of streams that join late, and of events that are recorded twice, are right", function()
    local s, a, b = nibble.stream(), nibble.stream(), nibble.stream()
    local t = {}
    for i = 1, 6 do t[i] = float(2) end
    local graph = s:capture(function()
      t[1]:fill(1)
      a:wait(s:record())
      a:scope(function() t[2]:fill(2) end)
      b:wait(a:record())
      b:scope(function() t[3]:fill(3) end)
      t[4]:fill(4)
      a:scope(function() t[5]:fill(5) end)
      s:wait(b:record())
      s:wait(b:record())
      s:wait(a:record())
      t[6]:fill(6)
    end)
    assert.same({ {}, { 1 }, { 2 }, { 1 }, { 2 }, { 3, 4, 5 } }, deps_of(graph))
    graph:replay()
    for i = 1, 6 do assert.equal(i, t[i][2]) end
  end)

  it("of a forked stream without work leave no trace", function()
    local s, other = nibble.stream(), nibble.stream()
    local t = float(2)
    local graph = s:capture(function()
      t:fill(1)
      other:wait(s:record())
      s:wait(other:record())
      t:fill(2)
    end)
    assert.same({ {}, { 1 } }, deps_of(graph))
  end)

  it("are a fresh list", function()
    local s = nibble.stream()
    local t = float(2)
    local graph = s:capture(function() t:fill(1) end)
    graph:nodes()[1].name = "changed"
    graph:nodes()[1].deps[1] = 5
    assert.equal("fill", graph:nodes()[1].name)
    assert.same({}, graph:nodes()[1].deps)
  end)
end)

describe("a graph's dot #quick", function()
  it("has each node and each dependency once", function()
    local s, other = nibble.stream(), nibble.stream()
    local graph = s:capture((diamond(s, other)))
    local text = graph:dot()
    assert.matches("^%s*digraph[^{]*{.*}%s*$", text)
    local edges = {}
    for from, to in text:gmatch('"?([%w_]+)"?%s*%->%s*"?([%w_]+)"?') do
      edges[#edges + 1] = from:match("%d+") .. ">" .. to:match("%d+")
    end
    table.sort(edges)
    assert.same({ "1>2", "1>3", "2>4", "3>4" }, edges)
    local _, fills = text:gsub("fill", "")
    local _, copies = text:gsub("copy", "")
    assert.same({ 1, 3 }, { fills, copies })
  end)

  it("is read by Graphviz", function()
    if not process.has("dot") then return pending("Graphviz is not installed: no program `dot` on the PATH") end
    local s, other = nibble.stream(), nibble.stream()
    local graph = s:capture((diamond(s, other)))
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(graph:dot())
    file:close()
    local plain = process.run("env -u LD_PRELOAD dot -Tplain " .. path)
    local svg = process.run("env -u LD_PRELOAD dot -Tsvg " .. path)
    os.remove(path)
    assert.equal("", plain.stderr .. svg.stderr)
    assert.equal(0, svg.status)
    assert.is_truthy(svg.stdout:find("<svg", 1, true))
    local _, nodes = plain.stdout:gsub("\nnode ", "")
    local _, edges = plain.stdout:gsub("\nedge ", "")
    assert.same({ 4, 4 }, { nodes, edges })
  end)
end)

describe("replay #quick", function()
  it("is waited for by who reads what it writes, also where it reads that first", function()
    local s = nibble.stream()
    local t, copy, long = float(4), float(4), nibble.zeros(1 << 22)
    local graph = s:capture(function()
      copy:copy(t)
      long:fill(1)
      t:fill(7)
    end)
    for n = 1, 3 do
      t:fill(n)
      nibble.synchronize()
      s:scope(function() graph:replay() end)
      assert.equal(7, t[1])
      assert.equal(n, copy[1])
    end
  end)

  it("reads its inputs anew each time, so that every output changes", function()
    local s, other = nibble.stream(), nibble.stream()
    local x = float(16)
    local outputs = { float(16), nibble.zeros(16, { dtype = "bfloat16" }), nibble.zeros(16, { dtype = "int32" }),
      float(4, 4) }
    local temporary
    local graph = s:capture(function()
      temporary = x:clone()
      outputs[1]:copy(temporary)
      other:wait(s:record())
      other:scope(function()
        outputs[2]:copy(x)
        outputs[3]:copy(outputs[2])
      end)
      outputs[4]:copy(x:view(4, 4):transpose(1, 2))
      s:wait(other:record())
    end)
    local before = {}
    for round = 1, 5 do
      x:copy(nibble.randint(round * 100, round * 100 + 100, 16, { seed = round }))
      graph:replay()
      for i, output in ipairs(outputs) do
        assert.is_true(before[i] ~= output:bytes(), "output " .. i)
        before[i] = output:bytes()
      end
      assert.is_true(outputs[1]:equal(x))
      assert.is_true(outputs[2]:equal(x:to("bfloat16")))
      assert.is_true(outputs[3]:equal(x:to("bfloat16"):to("int32")))
      assert.is_true(outputs[4]:equal(x:view(4, 4):transpose(1, 2)))
    end
  end)

  it("is work of the current stream, in order with what is around it", function()
    local s, runner = nibble.stream(), nibble.stream()
    local x, y, log = float(100), float(100), float(50, 100)
    local graph = s:capture(function() y:copy(x) end)
    runner:wait(nibble.current_stream():record())
    runner:scope(function()
      for i = 1, 50 do
        x:fill(i)
        graph:replay()
        log[i] = y
      end
    end)
    runner:synchronize()
    for i = 1, 50 do assert.equal(i, log[{ i, 100 }]) end
  end)

  it("runs a dependency before what depends on it, many times over", function()
    local s, a, b = nibble.stream(), nibble.stream(), nibble.stream()
    local x, l, r, sum = float(1000), float(1000), float(1000), float(2, 1000)
    local graph = s:capture(function()
      x:copy(x:narrow(1, 1, 1))
      a:wait(s:record())
      b:wait(s:record())
      a:scope(function() l:copy(x) end)
      b:scope(function() r:copy(x) end)
      s:wait(a:record())
      s:wait(b:record())
      sum[1] = l
      sum[2] = r
    end)
    for round = 1, 100 do
      x[1] = round
      graph:replay()
      assert.is_true(sum:equal(nibble.full({ 2, 1000 }, round + 0.0)), round)
    end
  end)

  it("raises a content fault at the next wait, each time", function()
    local s = nibble.stream()
    local cache = nibble.zeros(1, 1, 384, { dtype = "uint8" })
    local slots = nibble.zeros(1, { dtype = "int32" })
    local graph = s:capture(function() nibble.mla.dequantize_cache(cache, slots) end)
    graph:replay()
    nibble.check_faults()
    slots:fill(3)
    for _ = 1, 2 do
      graph:replay()
      local ok, message = pcall(nibble.check_faults)
      assert.is_false(ok)
      assert.matches("mla%.dequantize_cache: slots: expected .+, got 3 at index 0", message)
    end
    nibble.check_faults()
  end)
end)

describe("update #quick", function()
  it("with the same nodes is in place", function()
    local s, other = nibble.stream(), nibble.stream()
    local old_fn, old = diamond(s, other, 1)
    local new_fn, new = diamond(s, other, 2)
    local graph = s:capture(old_fn)
    assert.is_true(graph:update(new_fn))
    graph:replay()
    for i = 1, 4 do
      assert.same({ 0, 0, 0, 0, 0, 0, 0, 0 }, old[i]:totable())
      assert.same({ 2, 2, 2, 2, 2, 2, 2, 2 }, new[i]:totable())
    end
    assert.same({ {}, { 1 }, { 1 }, { 2, 3 } }, deps_of(graph))
  end)

  it("with other nodes or dependencies builds anew", function()
    local s, other = nibble.stream(), nibble.stream()
    local t = float(4)
    local graph = s:capture((diamond(s, other)))
    assert.is_false(graph:update(function() t:fill(7) end))
    assert.equal(1, #graph:nodes())
    graph:replay()
    assert.equal(7, t[1])
    assert.is_false(graph:update(function()
      t:fill(1)
      t:fill(2)
    end))
    assert.is_true(graph:update(function()
      t:fill(3)
      t:fill(4)
    end))
    graph:replay()
    assert.equal(4, t[4])
    -- The same two kernels, now side by side.
    assert.is_false(graph:update(function()
      other:wait(s:record())
      t:narrow(1, 1, 2):fill(5)
      other:scope(function() t:narrow(1, 3, 2):fill(6) end)
      s:wait(other:record())
    end))
    graph:replay()
    assert.same({ 5, 5, 6, 6 }, t:totable())
    assert.same({ {}, {} }, deps_of(graph))
  end)

  it("with as many dependencies on other nodes builds anew", function()
    local s, other = nibble.stream(), nibble.stream()
    local t = { float(2), float(2), float(2), float(2) }
    --- Four fills; the third waits for the first or for the second.
    local function work(late)
      return function()
        t[1]:fill(1)
        local early = s:record()
        t[2]:fill(2)
        other:wait(late and s:record() or early)
        other:scope(function() t[3]:fill(3) end)
        s:wait(other:record())
        t[4]:fill(4)
      end
    end
    local graph = s:capture(work(false))
    assert.same({ {}, { 1 }, { 1 }, { 2, 3 } }, deps_of(graph))
    assert.is_true(graph:update(work(false)))
    assert.is_false(graph:update(work(true)))
    assert.same({ {}, { 1 }, { 2 }, { 3 } }, deps_of(graph))
    local function two(wait) -- as many nodes, each with as many dependencies
      return function()
        t[1]:fill(1)
        local early = s:record()
        t[2]:fill(2)
        other:wait(wait and s:record() or early)
        other:scope(function() t[3]:fill(3) end)
        s:wait(other:record())
      end
    end
    graph = s:capture(two(false))
    assert.same({ {}, { 1 }, { 1 } }, deps_of(graph))
    assert.is_true(graph:update(two(false)))
    assert.is_false(graph:update(two(true)))
    assert.same({ {}, { 1 }, { 2 } }, deps_of(graph))
    assert.is_false(graph:update(two(false)))
    graph:replay()
    nibble.synchronize()
    assert.same({ 3, 3 }, t[3]:totable())
  end)

  it("with another operation in a node's place builds anew", function()
    local s = nibble.stream()
    local t, u = float(4), float(4)
    local graph = s:capture(function() t:fill(7) end)
    assert.is_true(graph:update(function() u:fill(8) end))
    assert.is_false(graph:update(function() u:copy(t) end))
    assert.is_false(graph:update(function() t:fill(9) end))
    graph:replay()
    assert.same({ 9, 9, 9, 9 }, t:totable())
  end)

  it("whose function raises leaves the graph as before", function()
    local s, other = nibble.stream(), nibble.stream()
    local t, u = float(4), float(4)
    local graph = s:capture(function() t:fill(7) end)
    local value = {}
    local ok, err = pcall(graph.update, graph, function()
      u:fill(1)
      error(value)
    end)
    assert.is_false(ok)
    assert.is_true(err == value)
    -- Nor does a fork that is not joined change it.
    assert.is_false((pcall(graph.update, graph, function()
      other:wait(s:record())
      other:scope(function() u:fill(1) end)
    end)))
    graph:replay()
    assert.same({ { 7, 7, 7, 7 }, { 0, 0, 0, 0 } }, { t:totable(), u:totable() })
    assert.is_true(graph:update(function() t:fill(8) end))
    graph:replay()
    assert.equal(8, t[1])
  end)

  it("counts for the replays from then on", function()
    local s = nibble.stream()
    local a, b = float(1000), float(1000)
    local graph = s:capture(function() a:fill(1) end)
    graph:replay()
    graph:update(function() b:fill(2) end)
    graph:replay()
    assert.is_true(a:equal(nibble.full(1000, 1.0)))
    assert.is_true(b:equal(nibble.full(1000, 2.0)))
  end)
end)

describe("a graph #quick", function()
  it("keeps every tensor alive that it uses", function()
    local out = float(10000)
    local graph
    do
      local s = nibble.stream()
      local input = nibble.full(10000, 5.0)
      graph = s:capture(function()
        local temporary = input:clone()
        local second = temporary:to("bfloat16")
        out:copy(second)
        temporary:close()
      end)
      input:close()
    end
    for _ = 1, 3 do
      collectgarbage()
      collectgarbage()
      for _ = 1, 30 do nibble.full(10000, -1.0) end
      graph:replay()
      assert.is_true(out:equal(nibble.full(10000, 5.0)))
      out:fill(0)
    end
  end)

  it("gives them back when it is closed", function()
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    local used = nibble.memory().used
    local s = nibble.stream()
    local graph = s:capture(function() nibble.full(4096, 1.0):clone() end)
    collectgarbage()
    collectgarbage()
    assert.is_true(nibble.memory().used >= used + 2 * 4096 * 4)
    graph:replay()
    graph:close()
    graph:close()
    nibble.synchronize()
    assert.equal(used, nibble.memory().used)
  end)

  it("that is closed right after a replay still runs it", function()
    local s = nibble.stream()
    local out = float(100000)
    for round = 1, 20 do
      local graph = s:capture(function()
        local t = nibble.full(100000, round + 0.0)
        out:copy(t)
      end)
      graph:replay()
      graph:close()
      assert.equal(round, out[100000])
    end
  end)

  it("outlives its stream", function()
    local s = nibble.stream()
    local t = float(3)
    local graph = s:capture(function() t:fill(4) end)
    s:close()
    graph:replay()
    assert.equal(4, t[3])
    s = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    t:fill(0)
    graph:replay()
    assert.equal(4, t[3])
  end)
end)

describe("graphs", function()
  it("keep memory constant over 1,000 replays and 100 captures", function()
    local s = nibble.stream()
    local out = float(1000)
    local function capture()
      return s:capture(function()
        local t = nibble.randn(1000, { seed = 1 })
        out:copy(t:clone():to("float16"))
      end)
    end
    local function settle()
      nibble.synchronize()
      collectgarbage()
      collectgarbage()
      nibble.synchronize()
      return nibble.memory()
    end
    local base = settle()
    local graph = capture()
    local with_graph = settle()
    for _ = 1, 1000 do graph:replay() end
    local after_replays = settle()
    assert.equal(with_graph.used, after_replays.used)
    assert.equal(with_graph.reserved, after_replays.reserved)
    graph:close()
    for _ = 1, 100 do
      local again <close> = capture()
      again:replay()
    end
    local after = settle()
    assert.equal(base.used, after.used)
    assert.equal(base.reserved, after.reserved)
  end)
end)
