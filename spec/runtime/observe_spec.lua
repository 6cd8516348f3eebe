-- nibble.observe, nibble.peek and tensor:storage: what was done is told, in order, and nothing else changes.
local nibble = require "nibble"
local pages = require "nibble.pages"

local DEVICE = nibble.device()
local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

local function here() return debug.getinfo(2, "l").currentline end

describe("observe", function()
  local seen

  local function start()
    seen = {}
    nibble.observe(function(o) seen[#seen + 1] = o end)
  end

  local function stop()
    nibble.observe(nil)
    return seen
  end

  local function kinds(list)
    local names = {}
    for i, o in ipairs(list) do names[i] = o.kind end
    return table.concat(names, " ")
  end

  local function find(kind, nth)
    for _, o in ipairs(seen) do
      if o.kind == kind then
        nth = (nth or 1) - 1
        if nth == 0 then return o end
      end
    end
  end

  before_each(function()
    collectgarbage() -- what other specs left behind is not released in the middle of one
    collectgarbage("stop")
  end)
  after_each(function()
    nibble.observe(nil)
    nibble.observe(nil, "second")
    collectgarbage("restart")
  end)

  it("tells every place and view as it is, however many there were, and the same view by the same table", function()
    local many = nibble.zeros(1500)
    local function source(i) return ("local t, i = ... %s t:narrow(1, i, 1):fill(0)"):format(("\n"):rep(i % 7)) end
    start()
    for round = 1, 2 do
      for i = 1, 700 do -- places go, and others come to where they were
        local name = i % 3 == 0 and "@same.lua" or ("@%d.lua"):format(i + round)
        local chunk = assert(load(source(i), name))
        local function outer() chunk(many, i) end
        outer()
        if i % 100 == 0 then collectgarbage() end
        local o = seen[#seen]
        assert.equal(("%s:%d"):format(name:sub(2), i % 7 + 1), o.where)
        assert.matches("^[^<]*observe_spec.lua:%d+ < ", o.callers)
        assert.same({ 4 * (i - 1), { 1 } }, { o.accesses[1].offset, o.accesses[1].shape })
      end
    end
    for _ = 1, 2 do many:narrow(1, 3, 5):fill(0) end
    stop()
    assert.equal(seen[#seen].accesses[1], seen[#seen - 1].accesses[1])
  end)

  it("tells of work with its accesses, streams and script lines", function()
    local s = nibble.stream()
    local id = math.tointeger(tostring(s):match("stream (%d+)"))
    start()
    local t = nibble.empty(2, 6, { dtype = "int32" })
    local line = here() + 1
    s:scope(function() t:narrow(2, 3, 4):fill(7) end)
    stop()
    assert.equal("storage_created work", kinds(seen))
    local created, work = seen[1], seen[2]
    assert.same({ 48, (t:storage()) }, { created.bytes, created.storage })
    assert.equal(DEVICE, work.device)
    assert.same({ "tensor:fill", "fill", id }, { work.operation, work.kernel, work.stream })
    assert.matches("observe_spec%.lua:" .. line .. "$", work.where)
    assert.same({ { storage = t:storage(), offset = 8, dtype = "int32", shape = { 2, 4 }, stride = { 6, 1 },
      write = true,
      parameter = "tensor" } }, work.accesses)
    assert.same({ value = 7 }, work.attributes)
    assert.is_nil(work.node)
  end)

  it("names the parameters of an operation, and leaves out what was not given", function()
    local pool = pages.caches { num_pages = 2, page_size = 2, num_kv_heads = 1, head_dim = 16, kv_layout = "HND" }
    local kv = nibble.zeros(2, 1, 16, { dtype = "bfloat16" })
    local slots = nibble.tensor { 0, 3 }
    start()
    append(kv, kv, slots, pool.paged_kv_cache, pool.kv_cache_sf, 1.0, nibble.tensor(1.0), "HND")
    stop()
    local names = {}
    local work
    for _, o in ipairs(seen) do
      if o.kernel == "append" then work = o end
    end
    for i, a in ipairs(work.accesses) do
      names[i] = (a.write and "write " or "read ") .. a.parameter .. (a.kv_layout and " " .. a.kv_layout or "")
    end
    assert.same({ "read append_key", "read append_value", "read slot_mapping", "write paged_kv_cache (K) HND",
      "write paged_kv_cache (V) HND", "write kv_cache_sf (K) HND", "write kv_cache_sf (V) HND", "read v_scale" }, names)
    local k = work.accesses[4]
    assert.same({ { 2, 1, 2, 8 }, (pool.paged_kv_cache[1]:storage()) }, { k.shape, k.storage })
  end)

  it("tells the attributes that decide what is read", function()
    local cache = nibble.zeros({ 2, 4, 384 }, { dtype = "uint8" })
    local kv = nibble.zeros(2, 512, { dtype = "bfloat16" })
    local v_sf = nibble.zeros({ 1, 4, 1, 4 }, { dtype = "uint8" })
    local table_ = nibble.rope_table(4)
    start()
    nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, nibble.tensor { 0, 1 }, nibble.tensor { 0, 1 },
      table_,
      { compress_ratio = 2 })
    nibble.quantization.swizzle_v_scales(v_sf, "NHD", { inverse = true })
    stop()
    local first, second
    for _, o in ipairs(seen) do
      if o.kernel == "rope_insert" then first = o end
      if o.kernel == "swizzle" then second = o end
    end
    assert.same({ apply_q_rope = false, compress_ratio = 2 }, first.attributes)
    assert.same({ inverse = true }, second.attributes)
  end)

  it("tells of streams, events and waits", function()
    start()
    local a, b = nibble.stream(), nibble.stream()
    local e = a:record()
    b:wait(e)
    e:synchronize()
    b:synchronize()
    nibble.synchronize()
    e:close()
    b:close()
    stop()
    assert.equal("stream_created stream_created event_record stream_wait synchronized synchronized synchronized "
      .. "event_released stream_released", kinds(seen))
    local A, B, E = seen[1].stream, seen[2].stream, seen[3].event
    assert.same({ A, B, E }, { seen[3].stream, seen[4].stream, seen[4].event })
    assert.same({ E, B }, { seen[5].event, seen[6].stream })
    assert.is_nil(seen[7].event or seen[7].stream or seen[7].storage)
    assert.same({ E, B }, { seen[8].event, seen[9].stream })
  end)

  it("tells of the host's own reads and writes", function()
    start()
    local t = nibble.tensor { 1, 2, 3 }
    assert.equal(2, t[2])
    assert.is_true(t:equal(t))
    stop()
    if DEVICE == "cpu" then assert.equal("tensor:write", find("host_write").operation) end
    assert.equal(t:storage(), find("synchronized").storage)
    assert.same({ {}, 8 }, { find("host_read").accesses[1].shape, find("host_read").accesses[1].offset })
    assert.same({ { 3 }, 0 }, { find("host_read", 2).accesses[1].shape, find("host_read", 2).accesses[1].offset })
  end)

  it("tells of a capture's nodes and their dependencies, of replays and of updates", function()
    local a, b = nibble.stream(), nibble.stream()
    local x, y = nibble.zeros(4), nibble.zeros(4)
    start()
    local graph = a:capture(function()
      x:fill(1)
      b:wait(a:record())
      b:scope(function() y:copy(x) end)
      x:fill(2)
      a:wait(b:record())
      y:fill(3)
    end)
    graph:replay()
    local in_place = graph:update(function() x:fill(4) end)
    graph:replay()
    graph:close()
    stop()
    assert.is_false(in_place)
    local nodes = {}
    for _, o in ipairs(seen) do
      if o.node then nodes[#nodes + 1] = { o.capture, o.node, o.kernel, o.deps } end
    end
    local first, second = find("capture_begin").capture, find("capture_begin", 2).capture
    assert.not_equal(first, second)
    assert.same({ { first, 1, "fill", {} }, { first, 2, "copy", { 1 } }, { first, 3, "fill", { 1 } },
      { first, 4, "fill", { 2, 3 } }, { second, 1, "fill", {} } }, nodes)
    assert.same({ first, second }, { find("capture_end").capture, find("capture_end", 2).capture })
    local id = find("capture_end").graph
    assert.same({ id, id, id, id }, { find("capture_end", 2).graph, find("replay").graph, find("replay", 2).graph,
      find("graph_released").graph })
    assert.equal(first, find("event_record").capture)
    assert.equal(first, find("stream_wait").capture)
  end)

  it("tells of captures that fail, and which stream was not joined", function()
    local a, b = nibble.stream(), nibble.stream()
    local x = nibble.zeros(4)
    start()
    assert.error(function()
      a:capture(function()
        b:wait(a:record())
        b:scope(function() x:fill(1) end)
      end)
    end)
    assert.error(function() a:capture(error) end)
    a:synchronize() -- what an error has kept back is told now
    stop()
    assert.equal(math.tointeger(tostring(b):match("stream (%d+)")), find("capture_abort").unjoined)
    assert.is_nil(find("capture_abort", 2).unjoined)
    assert.is_nil(find("capture_end"))
  end)

  it("tells when the last tensor of a storage goes, and when the storage does", function()
    local t = nibble.zeros(4)
    local view = t:narrow(1, 1, 2)
    local s = nibble.stream()
    local graph = s:capture(function() t:fill(1) end)
    local id = t:storage()
    start()
    view:close()
    t:close()
    graph:close()
    stop()
    assert.equal("tensor_released tensor_released graph_released storage_freed", kinds(seen))
    assert.same({ id, 1, id, 0, id }, { seen[1].storage, seen[1].handles, seen[2].storage, seen[2].handles,
      seen[4].storage })
    assert.is_nil(seen[2].collected)
    t = nibble.zeros(3)
    id = t:storage()
    nibble.synchronize()
    start()
    t = nil -- luacheck: ignore 311
    collectgarbage()
    nibble.synchronize()
    stop()
    local collected
    for _, o in ipairs(seen) do
      if o.kind == "tensor_released" and o.storage == id then collected = o.collected end
    end
    assert.is_true(collected)
  end)

  it("has a function for each name, and ends with nil", function()
    local first, second = 0, 0
    nibble.observe(function() first = first + 1 end)
    nibble.observe(function() second = second + 1 end, "second")
    nibble.stream()
    nibble.observe(nil)
    nibble.stream()
    nibble.observe(nil, "second")
    nibble.stream()
    assert.same({ 1, 2 }, { first, second })
  end)

  it("tells an observer nothing of what was done before it came", function()
    local told = {}
    nibble.observe(function() end, "second")
    local t = nibble.zeros(1 << 10) -- luacheck: ignore 231
    t = nil -- luacheck: ignore 311
    collectgarbage() -- released now, told with the next call
    nibble.observe(function(o) told[#told + 1] = o.kind end)
    nibble.stream()
    assert.same({ "stream_created" }, told)
  end)

  it("does not observe what an observer does, and refuses it nothing", function()
    local count, sum = 0, nil
    nibble.observe(function(o)
      count = count + 1
      if o.kind == "work" then
        local t = nibble.full({ 3 }, 2)
        sum = t[1] + t[2] + t[3]
      end
    end)
    local t = nibble.empty(2)
    t:fill(1)
    nibble.observe(nil)
    assert.same({ 2, 6 }, { count, sum })
  end)

  it("raises an observer's error from the call that was observed, which has done its work", function()
    local t = nibble.zeros(2)
    local value = {}
    nibble.observe(function(o) if o.kind == "work" then error(value) end end)
    local ok, message = pcall(t.fill, t, 5)
    nibble.observe(nil)
    assert.is_false(ok)
    assert.equal(value, message)
    assert.same({ 5, 5 }, t:totable())
    local a = nibble.stream()
    nibble.observe(function(o) if o.kind == "work" then error("stop", 0) end end)
    assert.error(function() a:capture(function() t:fill(6) end) end, "stop")
    nibble.observe(nil)
    a:capture(function() t:fill(6) end) -- the capture has ended
  end)

  it("lets no observer's error, nor want of memory for it, keep a capture open", function()
    local s, t = nibble.stream(), nibble.full(4, 1.0)
    local graph = s:capture(function() t:fill(2) end)
    for _, kind in ipairs { "capture_begin", "work", "capture_end", "capture_abort" } do
      for _, capture in ipairs {
        function() s:capture(function() t:fill(3) end) end,
        function() graph:update(function() t:fill(3) t:fill(4) end) end,
        function() s:capture(function() t:fill(3) error("the function's") end) end,
      } do
        nibble.observe(function(o) if o.kind == kind then error("the observer's", 0) end end)
        pcall(capture)
        nibble.observe(nil)
        nibble.synchronize() -- is refused during a capture
        s:capture(function() t:fill(5) end):replay()
        assert.equal(5, t[1])
      end
    end
    graph:replay()
  end)

  it("lets an observer close what the observed call uses, and end itself", function()
    local t = nibble.zeros(2)
    nibble.observe(function()
      t:close()
      nibble.observe(nil)
    end)
    t:fill(3)
    assert.equal("nibble.tensor (closed)", tostring(t))
    nibble.observe(function() coroutine.yield() end)
    local ok, message = coroutine.resume(coroutine.create(function() nibble.zeros(1) end))
    nibble.observe(nil)
    assert.is_false(ok)
    assert.matches("yield", message)
  end)

  it("checks its arguments", function()
    assert.error(function() nibble.observe(1) end, "observe: fn: expected a function or nil, got 1")
    assert.error(function() nibble.observe(print, 1) end, "observe: name: expected a string, got 1")
    assert.error_matches(function() nibble.peek(1) end, "^peek: access: expected a table with storage, [^\n]*, got 1$")
  end)
end)

describe("peek", function()
  local function view(t)
    local storage, offset = t:storage()
    return { storage = storage, offset = offset, dtype = t.dtype, shape = t.shape, stride = t:stride() }
  end

  it("gives the bytes of any view, after what was queued to write it", function()
    local t = nibble.arange(12, { dtype = "int32" }):view(3, 4)
    for _, v in ipairs { t, t:permute(2, 1), t:narrow(2, 2, 2), t[3], t:select(2, 3), t:narrow(1, 1, 0),
      t[{ 2 }]:select(1, 2) } do
      assert.equal(v:bytes(), nibble.peek(view(v)))
    end
  end)

  it("leaves content faults to be reported", function()
    local cache = nibble.zeros({ 1, 4, 384 }, { dtype = "uint8" })
    local rows = nibble.mla.dequantize_cache(cache, nibble.tensor { 99 })
    assert.equal(1024, #nibble.peek(view(rows)))
    assert.error(function() nibble.synchronize() end)
  end)

  it("is refused in a capture, for storages that are gone, and outside of them", function()
    local t = nibble.zeros(4)
    local s = nibble.stream()
    local bytes, message
    s:capture(function() bytes, message = nibble.peek(view(t)) end)
    assert.is_nil(bytes)
    assert.matches("^peek: not allowed while a stream of %S+ captures", message)
    local where = view(t)
    where.shape = { 5 }
    assert.error(function() nibble.peek(where) end)
    where.shape, where.offset = { 4 }, 4
    assert.error(function() nibble.peek(where) end)
    where.offset, where.shape = 0, { 1 << 62 }
    assert.error(function() nibble.peek(where) end)
    where.shape = { -1 }
    assert.error(function() nibble.peek(where) end)
    where = view(t)
    where.storage = 1 << 40
    bytes, message = nibble.peek(where)
    assert.is_nil(bytes)
    assert.equal("peek: storage: expected the number of a live storage, got 1099511627776", message)
  end)
end)

describe("tensor:storage", function()
  it("is the same for all views of a storage, with the offset in bytes", function()
    local t = nibble.zeros({ 4, 4 }, { dtype = "bfloat16" })
    local id, offset = t:storage()
    assert.equal(0, offset)
    assert.same({ id, 12 }, { t:narrow(1, 2, 1):narrow(2, 3, 2):storage() })
    assert.not_equal(id, (t:clone():storage()))
  end)
end)
