-- What a capture refuses, with the capture intact, and how a capture ends whatever happens inside it.
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

local function float(...)
  return nibble.full({ ... }, 0.0)
end

-- Whether a stream still captures, replays and waits as it should.
local function works(stream)
  local t = float(4)
  local graph = stream:capture(function() t:fill(3) end)
  assert.equal(1, #graph:nodes())
  assert.equal(0, t[1])
  graph:replay()
  stream:synchronize()
  assert.equal(3, t[4])
  graph:close()
end

describe("inside a capture #quick", function()
  local s, other = nibble.stream(), nibble.stream()
  local path = os.tmpname()
  local t, u = nibble.tensor({ 1.0, 2.0 }), nibble.zeros(2)
  local one = nibble.tensor({ 5.0 })
  local before, after = s:record(), s:record()
  local finished = nibble.stream():capture(function() u:fill(0) end)
  t:save(path)
  local key = nibble.zeros(1, 1, 16, { dtype = "bfloat16" })
  local slots = nibble.zeros(1, { dtype = "int32" })
  local data = nibble.zeros(1, 2, 1, 1, 8, { dtype = "uint8" })
  local scales = nibble.zeros(1, 2, 1, 1, 1, { dtype = "uint8" })
  local scalar = nibble.full(1, 1.0)
  local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
  nibble.synchronize()
  teardown(function() os.remove(path) end)

  -- Name, call, and a word that the error has.
  local refused = {
    { "totable", function() t:totable() end }, { "item", function() one:item() end },
    { "bytes", function() t:bytes() end }, { "reading an element", function() return t[1] end },
    { "reading an element by a table", function() return t[{ 2 }] end },
    { "tostring", function() return tostring(t) end }, { "equal", function() t:equal(t) end },
    { "allclose", function() t:allclose(t) end }, { "max_error", function() t:max_error(t) end },
    { "amax", function() t:amax() end }, { "save", function() t:save(path) end },
    { "load", function() nibble.load(path) end }, { "tensor", function() nibble.tensor({ 1, 2 }) end },
    { "from_bytes", function() nibble.from_bytes("ab", 2, { dtype = "uint8" }) end },
    { "stream:synchronize", function() s:synchronize() end },
    { "another stream's synchronize", function() other:synchronize() end },
    { "nibble.synchronize", function() nibble.synchronize() end },
    { "check_faults", function() nibble.check_faults() end },
    { "event:synchronize", function() before:synchronize() end }, { "elapsed", function() before:elapsed(after) end },
    { "a number as a scale", function() append(key, key, slots, data, scales, 1.0, scalar) end },
    { "a number as the other scale", function() append(key, key, slots, data, scales, scalar, 1) end },
    { "work on a stream that has not joined", function() other:scope(function() u:fill(9) end) end },
    { "copying on a stream that has not joined", function() other:scope(function() u:copy(t) end) end },
    { "the same capture again", function() s:capture(function() u:fill(9) end) end },
    { "another stream's capture", function() other:capture(function() u:fill(9) end) end },
    { "a replay", function() finished:replay() end },
    { "a replay on another stream", function() other:scope(function() finished:replay() end) end },
    { "an update", function() finished:update(function() u:fill(9) end) end },
  }

  for _, case in ipairs(refused) do
    it(case[1] .. " is refused, and the capture goes on as if it had not been tried", function()
      local out = float(2)
      local ok, message
      local graph = s:capture(function()
        out:fill(1)
        ok, message = pcall(case[2])
        out:copy(t)
      end)
      assert.is_false(ok, "it was not refused")
      assert.is_string(message)
      assert.matches("captur", message)
      local names = {}
      for id, node in ipairs(graph:nodes()) do names[id] = node.name end
      assert.same({ "fill", "copy" }, names)
      graph:replay()
      assert.same({ 1, 2 }, out:totable())
      assert.same({ 0, 0 }, u:totable())
      -- Outside it is allowed again.
      case[2]()
      nibble.synchronize()
      u:fill(0)
      nibble.synchronize()
    end)
  end

  it("the refusals' messages name the operation", function()
    local messages = {}
    s:capture(function()
      for _, case in ipairs(refused) do messages[case[1]] = select(2, pcall(case[2])) end
    end)
    for name, operation in pairs({
      totable = "tensor:totable", item = "tensor:item", bytes = "tensor:bytes", equal = "tensor:equal",
      allclose = "tensor:allclose", max_error = "tensor:max_error", amax = "tensor:amax", save = "tensor:save",
      load = "load", tensor = "tensor", from_bytes = "from_bytes", ["stream:synchronize"] = "stream:synchronize",
      ["nibble.synchronize"] = "synchronize", check_faults = "check_faults",
      ["event:synchronize"] = "event:synchronize",
      elapsed = "event:elapsed", ["a number as a scale"] = "k_scale", ["a number as the other scale"] = "v_scale",
      ["work on a stream that has not joined"] = "tensor:fill", ["another stream's capture"] = "stream:capture",
      ["a replay"] = "graph:replay", ["an update"] = "graph:update",
    }) do
      assert.is_truthy(messages[name]:find(operation .. ": ", 1, true), messages[name])
    end
    assert.is_truthy(messages["work on a stream that has not joined"]:find("join", 1, true))
  end)

  it("views, properties, closing and making streams and events are no work and are allowed", function()
    local out = float(4)
    local graph = s:capture(function()
      assert.same({ 4 }, out.shape)
      assert.equal("float32", out.dtype)
      out:view(2, 2):select(1, 1):fill(1)
      out:narrow(1, 3, 2):expand(1, 2):transpose(1, 2):narrow(1, 1, 1):fill(2)
      nibble.zeros(3):close()
      nibble.stream():close()
      s:record():close()
      nibble.stream()
      assert.is_number(nibble.memory().used)
      assert.is_true(nibble.current_stream() == s)
      assert.is_string(tostring(s))
      assert.is_true(#nibble.devices() > 0)
    end)
    graph:replay()
    assert.same({ 1, 1, 2, 0 }, out:totable())
  end)

  it("the collector destroys tensors, streams, events and graphs without harm", function()
    local out = float(4)
    local graph = s:capture(function()
      for i = 1, 50 do
        local dead = nibble.zeros(100)
        dead:fill(i)
      end
      out:fill(1)
      nibble.stream()
      s:record()
      collectgarbage()
      collectgarbage()
      out:copy(nibble.full(4, 2.0))
      collectgarbage()
      collectgarbage()
    end)
    graph:replay()
    assert.same({ 2, 2, 2, 2 }, out:totable())
    -- Objects from before the capture die inside it.
    local fresh = float(4)
    for i = 1, 50 do nibble.zeros(100):fill(i) end
    for _ = 1, 3 do
      nibble.stream():capture(function() nibble.zeros(100) end):replay()
    end
    graph = s:capture(function()
      collectgarbage()
      collectgarbage()
      fresh:fill(6)
    end)
    assert.equal(1, #graph:nodes())
    graph:replay()
    assert.same({ 6, 6, 6, 6 }, fresh:totable())
  end)

  it("a graph or a stream that is in use elsewhere may be closed", function()
    local out = float(4)
    local old = nibble.stream():capture(function() out:fill(1) end)
    local spare = nibble.stream()
    old:replay()
    local graph = s:capture(function()
      old:close()
      spare:close()
      out:fill(2)
    end)
    assert.equal(1, out[1])
    graph:replay()
    assert.equal(2, out[1])
  end)

  it("events of the past are waited for neither more nor less than they should", function()
    -- An event of before the capture is either fine (it is done before any replay) or refused, with the capture intact.
    local out = float(2)
    local graph = s:capture(function()
      out:fill(1)
      pcall(s.wait, s, before)
      out:fill(2)
    end)
    assert.equal(2, #graph:nodes())
    graph:replay()
    assert.same({ 2, 2 }, out:totable())
  end)

  it("its events are of no use outside", function()
    local inner
    local out = float(2)
    s:capture(function()
      out:fill(1)
      inner = s:record()
    end)
    for _, use in ipairs({ function() inner:synchronize() end, function() other:wait(inner) end,
      function() inner:elapsed(inner) end }) do
      local ok, message = pcall(use)
      assert.is_false(ok)
      assert.matches("captur", message)
    end
    works(other)
  end)
end)

describe("a stream that joined and was not joined back #quick", function()
  it("is named in an error, and both streams are usable after", function()
    local s, fork, silent = nibble.stream(), nibble.stream(), nibble.stream()
    local t = float(4)
    for _, with_work in ipairs({ true, false }) do
      local ok, message = pcall(s.capture, s, function()
        t:fill(1)
        silent:wait(s:record())
        s:wait(silent:record())
        fork:wait(s:record())
        if with_work then fork:scope(function() t:fill(2) end) end
        t:fill(3)
      end)
      -- A fork without any work has nothing that could be lost: an error or a graph without it.
      if with_work or not ok then
        assert.is_false(ok)
        assert.matches("stream:capture: ", message)
        assert.matches("join", message)
        local id = tostring(fork):match("%d+")
        assert.is_truthy(id, "a stream's print has its number")
        assert.matches("%f[%d]" .. id .. "%f[%D]", message)
        assert.is_nil(message:match("%f[%d]" .. tostring(silent):match("%d+") .. "%f[%D]"))
      end
      assert.same({ 0, 0, 0, 0 }, t:totable())
      works(s)
      works(fork)
      works(silent)
    end
  end)

  it("also when its last work came after the join", function()
    local s, fork = nibble.stream(), nibble.stream()
    local t = float(4)
    assert.is_false((pcall(s.capture, s, function()
      fork:wait(s:record())
      fork:scope(function() t:fill(2) end)
      s:wait(fork:record())
      fork:scope(function() t:fill(3) end)
    end)))
    works(s)
    works(fork)
  end)
end)

describe("a capture ends", function()
  local function rounds(count, body)
    local s = nibble.stream()
    works(s)
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    local memory, heap = nibble.memory().used, collectgarbage("count")
    for round = 1, count do body(s, round) end
    works(s)
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    nibble.synchronize()
    assert.equal(memory, nibble.memory().used)
    return collectgarbage("count") - heap
  end

  it("when its function raises, 1,000 times, with the error as it was", function()
    local value = setmetatable({}, { __tostring = function() return "mine" end })
    local t = float(100)
    local grown = rounds(1000, function(s)
      local ok, err = pcall(s.capture, s, function()
        nibble.zeros(1000):fill(1)
        t:fill(1)
        error(value)
      end)
      assert.is_false(ok)
      assert.is_true(rawequal(err, value))
    end)
    assert.is_true(grown < 64, "Lua's heap grew")
    assert.equal(0, t[1])
  end)

  it("when its function yields, 1,000 times", function()
    local grown = rounds(1000, function(s)
      local thread = coroutine.create(function()
        s:capture(function()
          nibble.zeros(1000):fill(1)
          coroutine.yield()
        end)
      end)
      local ok, message = coroutine.resume(thread)
      assert.is_false(ok)
      assert.matches("yield", message)
    end)
    assert.is_true(grown < 64, "Lua's heap grew")
  end)

  it("when memory runs out inside it, 1,000 times", function()
    -- AddressSanitizer writes a line about each.
    local grown = rounds(process.sanitized() and 20 or 1000, function(s)
      local ok, message = pcall(s.capture, s, function()
        nibble.zeros(1000):fill(1)
        nibble.empty(1 << 47, { dtype = "uint8" })
      end)
      assert.is_false(ok)
      assert.matches("memory", message)
    end)
    assert.is_true(grown < 64, "Lua's heap grew")
  end)

  it("when an error comes from a stream that joined, or from a nested scope", function()
    local fork = nibble.stream()
    rounds(200, function(s)
      assert.is_false((pcall(s.capture, s, function()
        local t = nibble.zeros(100)
        fork:wait(s:record())
        fork:scope(function()
          t:fill(1)
          error("inside")
        end)
      end)))
    end)
    works(fork)
  end)

  it("when a fork was not joined, 1,000 times", function()
    local fork = nibble.stream()
    local grown = rounds(1000, function(s)
      assert.is_false((pcall(s.capture, s, function()
        fork:wait(s:record())
        fork:scope(function() nibble.zeros(100) end)
      end)))
    end)
    assert.is_true(grown < 64, "Lua's heap grew")
    works(fork)
  end)

  it("when its stack overflows", function()
    -- Memory is not compared here: Lua skips finalizers that meet the end of the stack.
    local s = nibble.stream()
    for _ = 1, 3 do
      local function deeper(n) return 1 + deeper(n + 1) end
      local ok, message = pcall(s.capture, s, function()
        nibble.zeros(100)
        deeper(1)
      end)
      assert.is_false(ok)
      assert.matches("overflow", message)
      works(s)
    end
  end)

  it("when update's function raises, 1,000 times", function()
    local t = float(10)
    local grown = rounds(1000, function(s)
      local graph <close> = s:capture(function() t:fill(1) end)
      assert.is_false((pcall(graph.update, graph, function()
        nibble.zeros(1000)
        error("no")
      end)))
    end)
    assert.is_true(grown < 64, "Lua's heap grew")
  end)
end)

describe("an interpreter that is closed inside a capture", function()
  local script = [[
    local nibble = require("nibble")
    local s, fork = nibble.stream(), nibble.stream()
    local t = nibble.zeros(1000)
    local graph = s:capture(function() t:fill(1) end)
    graph:replay()
    s:capture(function()
      t:fill(2)
      fork:wait(s:record())
      fork:scope(function() t:clone() end)
      HOW
    end)
  ]]
  for name, how in pairs({ ["os.exit(0, true)"] = "os.exit(0, true)", ["os.exit(0)"] = "os.exit(0)" }) do
    it("by " .. name .. " ends quietly", function()
      for _, command in ipairs({ "lua5.4", process.command() }) do
        local result = process.script((script:gsub("HOW", how)), { command = command })
        assert.same({ status = 0, stdout = "", stderr = "" }, result, command)
      end
    end)
  end

  it("by an error ends with that error", function()
    for _, command in ipairs({ "lua5.4", process.command() }) do
      local result = process.script((script:gsub("HOW", "error('the reason')")), { command = command })
      assert.equal(1, result.status)
      assert.matches("the reason", result.stderr)
    end
  end)

  it("from a coroutine that then dies ends quietly", function()
    local result = process.script([[
      local nibble = require("nibble")
      local s = nibble.stream()
      local thread = coroutine.create(function()
        s:capture(function()
          nibble.zeros(10)
          os.exit(0, true)
        end)
      end)
      coroutine.resume(thread)
    ]])
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  end)
end)
