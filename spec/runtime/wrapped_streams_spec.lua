-- What a host's own driver calls share with nibble: streams around handles, and the driver's picture of a graph.
local nibble = require("nibble")
local misuse = require("spec.support.runtime_misuse")
local keep_busy = require("spec.support.busy")

local raises = misuse.raises
local on_gpu = (nibble.device() or "cpu"):find("^cuda") ~= nil
local cpu = { device = "cpu" }

describe("the driver's picture of a graph #quick", function()
  it("is the runtime's own on the CPU, and in Graphviz's language everywhere", function()
    local t, s = nibble.zeros(8), nibble.stream()
    nibble.synchronize()
    local graph = s:capture(function()
      t:fill(1)
      t:fill(2)
    end)
    local text = graph:dot({ driver = true })
    assert.matches("^digraph .*}%s*$", text)
    assert.is_truthy(text:find("->", 1, true))
    if on_gpu then
      assert.is_true(text ~= graph:dot())
      assert.equal(text, graph:dot({ driver = true }))
    else
      assert.equal(graph:dot(), text)
    end
    assert.equal(graph:dot(), graph:dot({ driver = false }))
    raises(function() graph:dot({ drivers = true }) end, "graph:dot", "opts", "driver", "drivers")
    raises(function() graph:dot({ driver = 1 }) end, "graph:dot", "driver", "boolean")
    assert.matches("^digraph .*}%s*$", s:capture(function() end):dot({ driver = true }))
  end)
end)

describe("a stream around a handle #quick", function()
  it("is refused on the CPU, beside a priority, and for what is no handle", function()
    assert.is_nil(nibble.stream(cpu).handle)
    raises(function() nibble.stream({ device = "cpu", handle = 4096 }) end, "stream", "handle", "cpu")
    raises(function() nibble.stream({ handle = "x" }) end, "stream", "handle", "integer")
    raises(function() nibble.stream({ handle = 1.5 }) end, "stream", "handle", "integer")
    if not on_gpu then return end
    local handle = nibble.stream().handle
    assert.equal("integer", math.type(handle))
    raises(function() nibble.stream({ handle = handle, priority = 0 }) end, "stream", "priority", "handle")
    for _, default in ipairs({ 0, 1, 2 }) do
      raises(function() nibble.stream({ handle = default }) end, "stream", "handle", "CUstream", "default stream")
    end
    if os.getenv("NIB_STANDIN_LOG") then -- a driver may well follow a wrong pointer
      raises(function() nibble.stream({ handle = 0x5555 }) end, "stream", "handle", "CUstream", "does not know")
    end
  end)

  it("does its work in the order of the handle's, records events, captures, and may be closed while busy", function()
    if not on_gpu then return pending("there are no handles on the CPU") end
    local owner = nibble.stream()
    local wrapped = nibble.stream({ handle = owner.handle })
    assert.equal(owner.handle, wrapped.handle)
    assert.is_false(wrapped == owner)
    local x, y = nibble.zeros(1 << 18), nibble.zeros(1 << 18)
    nibble.synchronize()
    for round = 1, 20 do -- without events: it is one stream
      owner:scope(function() x:fill(round) end)
      wrapped:scope(function() y:copy(x) end)
      owner:scope(function() x:fill(-1) end)
      assert.equal(round, y[1 << 18])
      owner:synchronize()
    end
    local graph = wrapped:capture(function() y:fill(3) end)
    wrapped:scope(function() graph:replay() end)
    local event = wrapped:record()
    event:synchronize()
    assert.equal(3, y[1])
    keep_busy(wrapped)
    wrapped:scope(function() y:fill(8) end)
    event = wrapped:record()
    wrapped:close()
    raises(function() wrapped:synchronize() end, "stream:synchronize", "self", "open")
    local other = nibble.stream()
    other:wait(event)
    other:scope(function() x:copy(y) end)
    assert.equal(8, y[1])
    assert.equal(8, x[1])
    -- Released inside a capture that it had joined.
    local t = nibble.zeros(8)
    nibble.synchronize()
    graph = other:capture(function()
      t:fill(1)
      local fork = nibble.stream({ handle = owner.handle })
      fork:wait(other:record())
      fork:scope(function() t:fill(2) end)
      other:wait(fork:record())
      fork:close()
      t:fill(4)
    end)
    graph:replay()
    assert.equal(4, t[8])
    owner:scope(function() t:fill(5) end)
    owner:synchronize()
    assert.equal(5, t[8])
  end)

  it("may be made again and again", function()
    if not on_gpu then return pending("there are no handles on the CPU") end
    local owner, t = nibble.stream(), nibble.zeros(100)
    nibble.synchronize()
    for round = 1, 300 do
      local s <close> = nibble.stream({ handle = owner.handle })
      s:scope(function() t:fill(round) end)
      if round % 3 == 0 then assert.equal(round, t[100]) end
    end
    assert.equal(300, t[100])
    owner:close()
    nibble.stream():synchronize()
  end)
end)
