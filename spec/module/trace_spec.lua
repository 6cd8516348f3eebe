-- nibble.trace: what is recorded, its summary and its form for Perfetto, and that it can be executed again with the
-- same happening.
local json = require "nibble.json"
local nibble = require "nibble"
local pages = require "nibble.pages"
local process = require "spec.support.runtime_process"
local replay = require("nibble.trace_replay").replay
local trace = require "nibble.trace"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local quantization, mla = nibble.quantization, nibble.mla

local path

local function record(fn, header)
  collectgarbage() -- what other specs left behind is not freed in it
  collectgarbage("stop")
  local recorder = assert(trace.record(path, header))
  local ok, message = pcall(fn)
  assert(recorder:close())
  collectgarbage("restart")
  assert(ok, message)
  return assert(trace.read(path))
end

local function lines_of(text)
  local list = {}
  for line in text:gmatch("[^\n]+") do list[#list + 1] = line end
  return list
end

local function write(text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

local function kinds(run, kind)
  local list = {}
  for i, o in ipairs(run.list) do
    if o.kind == kind then
      list[#list + 1] = o
      o.line = i + 1
    end
  end
  return list
end

local function temporary() path = os.tmpname() end
local function remove() os.remove(path) end

-- Each operation, each way of making a tensor, streams, events, captures and updates.
local function everything()
  local pool = pages.caches { num_pages = 6, page_size = 4, num_kv_heads = 2, head_dim = 64, kv_layout = "HND",
    page_padding = 64 }
  local k = nibble.randn(9, 2, 64, { dtype = "bfloat16", seed = 3 })
  local slots = nibble.tensor { 3, -1, 9, 20, 21, 22, 23, 0, 1 }
  local tables = nibble.tensor({ { 0, 5 }, { 2, 1 } }, { dtype = "int32" })
  local lengths = nibble.tensor({ 5, 8 }, { dtype = "int32" })
  local g = nibble.tensor(0.5)
  append(k, k, slots, pool.paged_kv_cache, pool.kv_cache_sf, 0.25, g, "HND")
  local v_sf = quantization.swizzle_v_scales(pool.kv_cache_sf[2], "HND")
  quantization.nvfp4_kv_materialize_fp8(pool.paged_kv_cache[1], pool.paged_kv_cache[2], pool.kv_cache_sf[1], v_sf,
    tables, lengths, 8)
  quantization.nvfp4_kv_materialize_fp8(pool.paged_kv_cache[1], pool.paged_kv_cache[2], pool.kv_cache_sf[1], v_sf,
    nibble.tensor({ { { 0 }, { 1 } } }, { dtype = "int32" }), nibble.tensor({ 3 }, { dtype = "int32" }), 4, {
      uses_shared_paged_kv_idx = false, kv_page_indptr = nibble.tensor({ 0, 3 }, { dtype = "int32" }), num_pages = 3,
      out = nibble.empty(4, 2, 2, 4, 64, { dtype = "float8_e4m3fn" }),
    })
  local caches = nibble.randn(3, 4, 4, 64, { dtype = "float16", seed = 4 })
  quantization.nvfp4_quantize_paged_kv_cache(caches, caches)
  quantization.nvfp4_quantize_paged_kv_cache(caches, caches, { k_global_sf = 3.5, v_global_sf = g })
  quantization.nvfp4_quantize_paged_kv_cache(caches, caches, { kv_layout = "NHD", v_global_sf = 2 })

  local records = nibble.zeros(3, 4, 384, { dtype = "uint8" })
  local q, kv = nibble.randn(3, 2, 512, { dtype = "bfloat16" }), nibble.randn(3, 512, { dtype = "bfloat16" })
  local positions, turn = nibble.tensor { 3, 4, 5 }, nibble.rope_table(8)
  local record_slots = nibble.arange(4, 10, 2)
  for _, opts in ipairs { { q_head_padded = 8 }, { q_inplace = true }, { q_head_padded = 8, apply_q_rope = false }, {},
    { q_inplace = true, apply_q_rope = false } } do
    mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, records, record_slots, positions, turn, opts)
  end
  mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, records, record_slots, positions, turn, { compress_ratio = 2 })
  mla.dequantize_cache(records, nibble.tensor({ 4, 6 }, { dtype = "int32" }))

  local numbers = nibble.arange(10)
  numbers:narrow(1, 2, 5):copy(numbers:narrow(1, 1, 5)) -- by way of a copy of its own
  numbers:copy(nibble.randint(-5, 5, 10, { seed = 8 }))
  numbers[3] = nibble.randperm(6, { seed = 9, dtype = "int32" })[2]
  nibble.arange(0, 1, 0.125):fill(0 / 0)
  nibble.full({ 2, 3 }, math.huge):view(6):copy(nibble.tensor(7))

  local out = nibble.zeros(2, 8, 2, 64, { dtype = "bfloat16" })
  local main, side = nibble.stream(), nibble.stream()
  local function body(twice)
    append(k, k, slots, pool.paged_kv_cache, pool.kv_cache_sf, g, g, "HND")
    side:wait(main:record())
    side:scope(function()
      quantization.swizzle_v_scales(pool.kv_cache_sf[2], "HND", { out = v_sf })
      if twice then quantization.swizzle_v_scales(v_sf, "HND", { inverse = true }) end
    end)
    quantization.nvfp4_kv_dequantize_paged(pool.paged_kv_cache, pool.kv_cache_sf, tables, lengths, g, g, out,
      out:clone(), "HND")
    main:wait(side:record())
  end
  main:wait(nibble.current_stream():record())
  local graph = main:capture(function() body(false) end)
  graph:replay()
  slots:copy(nibble.tensor { 4, 5, 6, 7, -1, -1, -1, 2, 3 })
  graph:replay()
  graph:update(function() body(true) end)
  graph:replay()
  pcall(main.capture, main, function()
    body(false)
    error("in the middle")
  end)
  graph:replay()
  nibble.synchronize()
end

describe("a trace", function()
  setup(temporary)
  teardown(remove)

  it("has a header and each observation on a line, with slots and pages of work and replays #quick", function()
    local pool = pages.caches { num_pages = 4, page_size = 2, num_kv_heads = 1, head_dim = 16 }
    local k = nibble.zeros(2, 1, 16, { dtype = "bfloat16" })
    local slots = nibble.tensor { 5, 2 }
    local g = nibble.tensor(1.0)
    local run = record(function()
      append(k, k, slots, pool.paged_kv_cache, pool.kv_cache_sf, 1.0, g)
      local graph = nibble.stream():capture(function() append(k, k, slots, pool.paged_kv_cache, pool.kv_cache_sf, g, g)
        end)
      slots:copy(nibble.tensor { 7, -1 })
      nibble.synchronize()
      graph:replay()
      graph:replay()
      nibble.synchronize()
    end, { title = "two appends" })
    assert.same({ nibble.version, 1, nibble.device(), "two appends" },
      { run.header.nibble, run.header.trace, run.header.device, run.header.title })
    local works, replays = kinds(run, "work"), kinds(run, "replay")
    assert.same({ "slot_mapping", { 5, 2 } },
      { works[1].indices[1].parameter, { table.unpack(works[1].indices[1].values) } })
    assert.same({ "0x1p+0", true }, { ("%a"):format(works[1].attributes.k_scale), works[1].attributes.v_scale == nil })
    assert.is_nil(works[2].indices) -- captured
    assert.equal(1, works[2].node)
    assert.equal(2, #replays)
    for _, o in ipairs(replays) do assert.same({ 7, -1 }, { table.unpack(o.indices[1].values) }) end
    local before = 0
    for _, o in ipairs(run.list) do
      assert.is_true(o.time >= before)
      before = o.time
    end
    local written = kinds(run, "host_write")
    if #written > 0 then -- a GPU's are copies
      assert.equal(("07" .. ("00"):rep(7) .. ("ff"):rep(8)), written[1].contents)
    end
    local touched = trace.pages_of(works[1], works[1].indices)
    assert.equal(4, #touched)
    assert.same({ [2] = true, [1] = true }, touched[1].pages)
    assert.is_true(touched[1].write)
    assert.same({ [3] = true }, trace.pages_of(works[2], replays[1].indices)[1].pages)
  end)

  it("knows the pages that tables and lengths reach #quick", function()
    local function access(parameter, shape, layout)
      return { storage = #parameter, offset = 0, parameter = parameter, shape = shape, kv_layout = layout }
    end
    local function index(parameter, values)
      return { parameter = parameter, storage = #parameter, offset = 0, values = values }
    end
    local work = { accesses = { access("paged_kv_cache (K)", { 9, 2, 4, 8 }, "HND"), access("block_tables", { 3, 3 }),
      access("seq_lens", { 3 }) } }
    local touched = trace.pages_of(work, { index("block_tables", { 1, 2, 3, 4, 5, 6, 7, -1, 99 }),
      index("seq_lens", { 5, 0, 12 }) })
    assert.same({ [1] = true, [2] = true, [7] = true }, touched[1].pages)
    work = { accesses = { access("k_cache", { 9, 2, 4, 8 }, "HND"), access("v_cache2", { 9, 2, 4, 8 }, "HND"),
      access("block_tables", { 1, 2, 2 }), access("seq_lens", { 1 }) } }
    touched = trace.pages_of(work, { index("block_tables", { 1, 2, 3, 4 }), index("seq_lens", { 8 }) })
    assert.same({ [1] = true, [2] = true }, touched[1].pages)
    assert.same({ [3] = true, [4] = true }, touched[2].pages)
  end)

  it("leaves out what is done while it is paused #quick", function()
    collectgarbage()
    local recorder = assert(trace.record(path))
    recorder:pause(true)
    nibble.zeros(5)
    recorder:pause(false)
    nibble.zeros(7)
    assert.is_true(recorder:close() >= 2)
    nibble.zeros(9)
    for _, work in ipairs(kinds(trace.read(path), "work")) do
      assert.same({ 7 }, { table.unpack(work.accesses[1].shape) })
    end
  end)

  it("says why it cannot be written #quick", function()
    local recorder, message = trace.record("/nonexistent/folder/x.jsonl")
    assert.is_nil(recorder)
    assert.matches("/nonexistent/folder/x.jsonl", message)
    recorder = assert(trace.record("/dev/full"))
    nibble.zeros(3)
    local count, why = recorder:close()
    assert.is_nil(count)
    assert.is_string(why)
  end)

  it("takes no time while it is paused, and knows nanoseconds #quick", function()
    collectgarbage()
    collectgarbage("stop") -- the end of a storage would be an event behind the last one
    local recorder = assert(trace.record(path))
    local t = nibble.zeros(7)
    nibble.synchronize()
    recorder:pause(true)
    local from = os.clock()
    repeat nibble.zeros(5) nibble.synchronize() until os.clock() > from + 0.05
    recorder:pause(false)
    t:fill(1)
    assert(recorder:close())
    collectgarbage("restart")
    local list = trace.read(path).list
    assert.equal("tensor:fill", list[#list].operation)
    assert.equal(list[#list - 1].time, list[#list].begin or list[#list].time)
    local fine = false
    for _, o in ipairs(list) do
      assert.is_true((o.begin or o.time) <= o.time)
      fine = fine or math.floor(o.time * 1e9 + 0.5) % 1000 ~= 0
    end
    assert.is_true(fine)
  end)

  it("has the ranges of nibble.range, in its summary and on the host's track #quick", function()
    local run = record(function()
      nibble.range("outer", function()
        nibble.range("in\27[31mner", nibble.zeros, 3)
        pcall(nibble.range, "inner", error)
      end)
    end)
    local list = {}
    for _, o in ipairs(run.list) do
      if o.kind:find("^range") then list[#list + 1] = o.name or "pop" end
    end
    assert.same({ "outer", "in\27[31mner", "pop", "inner", "pop", "pop" }, list)
    assert.matches("spec/module/trace_spec.lua:%d+$", kinds(run, "range_push")[1].where)
    assert.matches("\n  outer +1 +%d+%.%d%d%d\n", trace.summary(run))
    assert.matches("\n  in\\x1B%[31mner +1 ", trace.summary(run))
    local spans = {}
    for _, event in ipairs(require("nibble.trace_chrome").convert(run).traceEvents) do
      if event.cat == "range" then spans[event.name] = { event.ts, event.ts + event.dur } end
    end
    assert.is_true(spans.outer[1] <= spans.inner[1] and spans.inner[2] <= spans.outer[2])
    assert.is_table(spans["in\\x1B[31mner"])
    assert.is_true(replay(run).ok)
  end)

  it("shows a stream's work in flight until the host knows that it is done #quick", function()
    local access = { storage = 9, offset = 0, dtype = "uint8", shape = { 1 }, stride = { 1 }, write = true }
    local function slices(...)
      local run = { header = {}, list = {} }
      for i, o in ipairs { ... } do
        o.time, o.operation, o.device = i * 1e-6, "x", "cpu"
        if o.kind == "work" then o.accesses = { access } end
        run.list[i] = o
      end
      local found = {}
      for _, event in ipairs(require("nibble.trace_chrome").convert(run).traceEvents) do
        if event.name == "in flight" then
          found[#found + 1] = ("%d: %g to %g"):format(event.tid, event.ts, event.ts + event.dur)
        end
      end
      table.sort(found)
      return found
    end
    local function work(stream) return { kind = "work", stream = stream } end
    local function host() return { kind = "host_write", accesses = {} } end
    assert.same({ "1: 1 to 4" }, slices(work(1), host(), work(1), { kind = "synchronized", stream = 1 }, host()))
    assert.same({ "1: 1 to 2", "1: 4 to 5" },
      slices(work(1), { kind = "synchronized" }, host(), work(1), { kind = "synchronized" }))
    assert.same({ "1: 1 to 4", "2: 3 to 4" }, slices(work(1), { kind = "event_record", stream = 1, event = 5 },
      { kind = "stream_wait", stream = 2, event = 5 }, { kind = "synchronized", stream = 2 }, host()))
    assert.same({ "1: 1 to 3" }, slices(work(1), { kind = "event_record", stream = 1, event = 5 },
      { kind = "synchronized", event = 5 }, host()))
    assert.same({ "1: 1 to 2" }, slices(work(1), { kind = "synchronized", storage = 9 }, host()))
    -- not known: to the end
    assert.same({ "1: 1 to 3" }, slices(work(1), { kind = "synchronized", stream = 7 }, host()))
  end)

  it("keeps the bytes of titles and paths that are no UTF-8, in JSON that is #quick", function()
    local title = "a\xffb\\x41\\c\xc3\xa9"
    local run = record(function()
      assert(load("local nibble = ... nibble.zeros(3)", "@f\xfe\\.lua"))(nibble)
    end, { title = title })
    assert.equal(title, run.header.title)
    assert.equal("f\xfe\\.lua:1", kinds(run, "work")[1].where)
    assert.is_truthy(utf8.len(process.read(path)))
    assert.matches("^trace of a\\xFFb\\x41\\c\xc3\xa9, nibble", trace.summary(run))
  end)

  it("is summarised #quick", function()
    local text = trace.summary(record(everything, { title = "all of it" }))
    for _, pattern in ipairs {
      "trace of all of it, nibble " .. nibble.version:gsub("%p", "%%%0") .. " on " .. nibble.device() ..
        ": %d+ observations in %d",
      "page.nvfp4_quantize_append[%w_]* +1 +3 +4 ",
      "quantization.nvfp4_kv_materialize_fp8 +2 +0 +0 ",
      "quantization.swizzle_v_scales +1 +4 +6 ", "graph %d+ +%d +2 +4 ", "storage %d+ +%d+ +%d+", "MB at most",
      "between pieces of work",
      "events: %d+ recorded, %d+ waited for",
    } do
      assert.matches(pattern, text)
    end
  end)

  it("becomes events of Chrome's format, arrows with both ends #quick", function()
    local run = record(everything)
    local out = os.tmpname()
    assert.is_true(trace.chrome(run, out))
    local object = json.decode(process.read(out))
    os.remove(out)
    local threads, starts, ends, slices, names, on_track = {}, {}, 0, {}, {}, {}
    local function nanoseconds(x) return math.floor(x * 1000 + 0.5) end
    for _, event in ipairs(object.traceEvents) do
      assert.equal(1, event.pid)
      if event.ph == "M" and event.name == "thread_name" then threads[event.tid] = event.args.name end
      if event.ph ~= "M" then
        assert.is_true(type(event.ts) == "number" and event.ts >= 0 and threads[event.tid] ~= nil)
      end
      if event.ph == "s" then
        assert.is_nil(starts[event.id])
        starts[event.id] = event.ts
      end
      if event.ph == "f" then
        ends = ends + 1
        assert.is_true(starts[event.id] <= event.ts)
        starts[event.id] = math.huge -- one end to each
      end
      if event.ph == "X" then
        assert.is_true(event.dur >= 0)
        on_track[event.tid] = on_track[event.tid] or {}
        table.insert(on_track[event.tid], { nanoseconds(event.ts), nanoseconds(event.ts) + nanoseconds(event.dur) })
        slices[event.cat] = (slices[event.cat] or 0) + 1
        names[event.name] = event
      end
    end
    for _, start in pairs(starts) do assert.equal(math.huge, start) end
    for _, list in pairs(on_track) do -- one lies behind another, or inside it
      table.sort(list, function(a, b) return a[1] < b[1] or a[1] == b[1] and a[2] > b[2] end)
      local open = {}
      for _, slice in ipairs(list) do
        while #open > 0 and open[#open][2] <= slice[1] do table.remove(open) end
        assert.is_true(#open == 0 or slice[2] <= open[#open][2], "slices overlap")
        open[#open + 1] = slice
      end
    end
    assert.equal(#kinds(run, "work"), slices.work)
    assert.equal(4, slices.replay)
    assert.is_true(ends > 4)
    assert.is_truthy(names.append and names.materialize)
    local found = {}
    for _, name in pairs(threads) do found[name:match("%a+")] = true end
    assert.same({ host = true, stream = true, capture = true }, found)
    local ok, message = trace.chrome(run, "/nonexistent/folder/x.json")
    assert.is_nil(ok)
    assert.matches("/nonexistent/folder/x.json", message)
  end)
end)

describe("a trace that is executed again", function()
  setup(temporary)
  teardown(remove)

  it("does the same, every operation of it #quick", function()
    local run = record(everything)
    local result = assert(replay(run))
    assert.same({ true, {}, {} }, { result.ok, result.differences, result.faults })
    local done = 0
    for _, o in ipairs(kinds(run, "work")) do
      if o.kernel then done = done + 1 end
    end
    assert.equal(done, result.works)
    assert.equal(4, result.replays)
    assert.is_true(result.compared > 100)
  end)

  it("stores the same bytes where the input is in the trace #quick", function()
    local function work()
      local pool = pages.caches { num_pages = 2, page_size = 4, num_kv_heads = 2, head_dim = 32 }
      local k = nibble.randn(3, 2, 32, { dtype = "bfloat16", seed = 5 })
      append(k, k, nibble.tensor { 1, 6, 3 }, pool.paged_kv_cache, pool.kv_cache_sf, 0.5, nibble.tensor(0.25))
      return pool
    end
    local pool
    local run = record(function() pool = work() end)
    local got = {}
    nibble.observe(function(o)
      if o.kernel ~= "append" then return end
      for _, access in ipairs(o.accesses) do
        if access.write then got[access.parameter] = nibble.peek(access) end
      end
    end, "spec")
    assert.is_true(replay(run).ok)
    nibble.observe(nil, "spec")
    assert.equal(pool.paged_kv_cache[1]:bytes(), got["paged_kv_cache (K)"])
    assert.equal(pool.kv_cache_sf[2]:bytes(), got["kv_cache_sf (V)"])
  end)

  it("writes again what went into tensors in use, through storages that are gone when the recorder looks #quick",
    function()
    local run = record(function()
      local pool = pages.caches { num_pages = 8, page_size = 4, num_kv_heads = 2, head_dim = 64 }
      local k, slots = nibble.zeros(2, 2, 64, { dtype = "bfloat16" }), nibble.tensor({ 0, 1 }, { dtype = "int32" })
      local function put() append(k, k, slots, pool.paged_kv_cache, pool.kv_cache_sf, 1, 1) end
      for i = 1, 40 do
        put()
        slots[1] = i % 16
        put()
        -- converted where it arrives
        slots:copy(nibble.tensor({ i % 16, 16 + i % 16 }, { dtype = "int64", device = "cpu" }))
        nibble.synchronize()
      end
    end)
    local result = replay(run)
    assert.same({}, result.differences)
    assert.equal(160, result.compared)
  end)

  it("copies between devices on its one device #quick", function()
    if nibble.device() == "cpu" then pending("the CPU alone is one device") end
    local run = record(function()
      local host, t = nibble.zeros(4, { pinned = true }), nibble.zeros(4)
      t:copy(host)
      host:copy(t)
      nibble.stream():capture(function()
        t:copy(host)
        host:copy(t)
      end):replay()
      nibble.synchronize()
    end)
    local kernels = {}
    for _, work in ipairs(kinds(run, "work")) do kernels[work.kernel] = (kernels[work.kernel] or 0) + 1 end
    assert.same({ 2, 2 }, { kernels["copy to device"], kernels["copy to host"] })
    for _, device in ipairs { nibble.device(), "cpu" } do
      local result = assert(replay(run, { device = device }))
      assert.same({}, result.differences)
      assert.equal(1, result.replays)
    end
  end)

  it("reports content faults apart #quick", function()
    local run = record(function()
      mla.dequantize_cache(nibble.zeros(2, 4, 384, { dtype = "uint8" }), nibble.tensor { 8 })
      nibble.zeros(2):copy(nibble.tensor { 1, 2 })
      pcall(nibble.synchronize)
    end)
    local result = replay(run)
    assert.is_true(result.ok)
    assert.equal(1, #result.faults)
    assert.matches("mla.dequantize_cache", result.faults[1])
  end)

  -- A trace with one thing changed, and what is to be said about it.
  local function changed(pattern, with, times)
    record(everything)
    local text, count = process.read(path):gsub(pattern, with, times or 1)
    assert.is_true(count > 0, pattern)
    write(text)
    return assert(trace.read(path))
  end

  it("says which index tensor holds something else #quick", function()
    -- The slots that the host wrote; the recorded values of the append and of replays are the old ones.
    local contents = ("03" .. ("00"):rep(7)) .. ("ff"):rep(8)
    local run = changed('"contents":"' .. contents, '"contents":"02' .. contents:sub(3))
    local result = replay(run)
    assert.is_false(result.ok)
    assert.matches("^line %d+: slot_mapping: element 1 was 3, is 2$", result.differences[1])
  end)

  it("says which tensor, number or dependency is another #quick", function()
    for _, case in ipairs {
      { '("max_kv_len":)8', "%14", "line %d+: materialize: kv_cache_fp8: shape was {5, .*}, is {3, .*}" },
      { '("parameter":"append_key","shape":)%[9,2,64%]', "%1[9,1,64]", "line %d+: .*append_key" },
      { '("deps":)%[2%]', "%1[1]", "line %d+: %w+: dependencies were {1}, are {2}" },
      { '("dtype":")bfloat16(","offset":0,"parameter":"append_key")', "%1float16%2", "line %d+: .*append_value" },
      { '("node":)3', "%19", "line %d+: %w+: node was 9, is 3" },
      { '("kernel":")fill', "%1arange", "line %d+: " },
    } do
      local result = replay(changed(case[1], case[2]))
      assert.is_false(result.ok, case[1])
      local found = false
      for _, difference in ipairs(result.differences) do found = found or difference:find("^" .. case[3]) ~= nil end
      assert.is_true(found, case[3] .. "\n" .. table.concat(result.differences, "\n"))
    end
  end)

  it("refuses what it cannot execute, before it does anything #quick", function()
    for _, case in ipairs {
      { { kind = "work", kernel = "mine", user_kernel = true, stream = 1, accesses = {} },
        "line 2: the user kernel mine cannot be" },
      { { kind = "work", kernel = "unknown", stream = 1, accesses = {} },
        "line 2: kernel unknown cannot be executed again" },
      { { kind = "work", stream = 1, accesses = {}, operation = "stream:call" }, "line 2: a function of the host " },
    } do
      local result, message = replay { header = {}, list = { case[1] } }
      assert.is_nil(result)
      assert.is_truthy(message:find(case[2], 1, true), message)
    end
  end)

  it("is refused when it takes more than it may, also for what it does not hold #quick", function()
    for _, case in ipairs {
      { '("bytes":)%d+(,"device":"[^"]*","kind":"storage_created")', "%122000000000%2" },
      { '("parameter":"slots","shape":)%[2%](,"storage":%d+,"stride":)%[1%]', "%1[1000000]%2[0]" },
      { '("shape":)%[9,2,64%]', "%1[900000000,2,64]" },
    } do
      local run = changed(case[1], case[2])
      local before = nibble.memory().peak
      local result, message = replay(run, { max_bytes = 1 << 28 })
      assert.is_nil(result, case[1])
      assert.matches("^max_bytes: expected [^\n]* of at most 268435456 bytes, got more at line %d+$", message)
      assert.is_true(nibble.memory().peak < before + (1 << 30), case[1])
    end
    local run = record(everything)
    assert.is_true(replay(run, { max_bytes = 1 << 28 }).ok)
    assert.matches("^max_bytes: expected storages of at most 1000 bytes",
      (select(2, replay(run, { max_bytes = 1000 }))))
  end)

  it("compares streams, in whatever is done on them #quick", function()
    local run = record(function()
      local a, b = nibble.stream(), nibble.stream()
      local t = nibble.zeros(3)
      a:wait(nibble.current_stream():record())
      a:scope(function() t:fill(1) end)
      b:wait(a:record())
      b:scope(function() t:fill(2) end)
      nibble.synchronize()
    end)
    assert.is_true(replay(run).ok)
    local stream = require("nibble.trace_replay").executor.stream
    finally(function() require("nibble.trace_replay").executor.stream = stream end)
    local first
    require("nibble.trace_replay").executor.stream = function(self, id) -- one for all
      first = first or stream(self, id)
      return first
    end
    local result = replay(run)
    assert.is_false(result.ok)
    for _, difference in ipairs(result.differences) do
      assert.matches("^line %d+: [^:]+: stream was %d+, is %d+$", difference)
    end
    assert.is_true(#result.differences >= 5)
  end)

  it("does what it can of a trace that was cut off anywhere #quick", function()
    record(everything)
    local text, random = process.read(path), pages.generator(3)
    local cut = 0
    for _ = 1, 25 do
      write(text:sub(1, random(#text)))
      local run, message = trace.read(path)
      if run then
        if run.cut then cut = cut + 1 end
        assert.is_string(trace.summary(run))
        local result = assert(replay(run))
        if run.cut then assert.same({}, result.differences) end
      else
        assert.matches("no JSON", message) -- its header
      end
    end
    assert.is_true(cut > 15)
  end)

  it("goes on behind a graph that was captured before the recording #quick", function()
    local t = nibble.zeros(3)
    local graph = nibble.stream():capture(function() t:fill(1) end)
    local result = replay(record(function()
      graph:replay()
      nibble.zeros(2)
    end))
    assert.is_false(result.ok)
    assert.matches("^line %d+: replay: graph %d+ was captured before the recording began$", result.differences[1])
    assert.equal(1, result.works)
  end)
end)

describe("a damaged trace", function()
  setup(temporary)
  teardown(remove)

  it("is refused with the line #quick", function()
    local header = '{"nibble":"0.1.0","trace":1}\n'
    for text, message in pairs {
      [""] = "expected a trace, got an empty file", ["{}\n"] = ":1: expected a header with trace version 1",
      ['{"trace":2}\n'] = ":1: expected a header", ["hello\n"] = ":1: no JSON", [header .. "{\n"] = ":2: no JSON",
      [header .. "3\n"] = ":2: expected an observation of a known kind",
      [header .. '{"kind":"dance"}\n'] = ":2: expected an observation",
      [header .. '{"kind":"work"}\n'] = ":2: expected time and operation",
      [header .. '{"kind":"work","time":1,"operation":"x"}\n'] = ":2: expected stream and accesses",
      [header .. '{"kind":"work","time":1,"operation":"x","stream":"1","accesses":[]}\n'] =
        ":2: expected an integer for stream",
      [header .. '{"kind":"work","time":1,"operation":"x","stream":1,"accesses":[{}]}\n'] =
        ":2: expected an access with storage",
      [header .. '{"kind":"replay","time":1,"operation":"x","stream":1,"indices":[1]}\n'] =
        ":2: expected indices with values",
      [header .. '{"kind":"synchronized","time":1,"operation":"x","indices":7}\n'] = ":2: expected a table for indices",
      [header .. '{"kind":"synchronized","time":1e300,"operation":"x"}\n'] = ":2: expected a time of less than",
      [header .. '{"kind":"synchronized","time":1,"operation":"x","where":[]}\n'] = ":2: expected a string for where",
      [header .. '{"kind":"host_read","time":1,"operation":"x","accesses":[{"storage":1,"offset":0,' ..
        '"dtype":"int32","shape":[1],' ..
        '"stride":[1],"parameter":{}}]}\n'] = ":2: expected an access with storage",
      ['{"trace":1,"title":{}}\n'] = ":1: expected a string for title",
    } do
      write(text)
      local run, why = trace.read(path)
      assert.is_nil(run)
      assert.is_truthy(why:find(message, 1, true), why)
    end
    local run, why = trace.read("/nonexistent/folder/x")
    assert.is_nil(run)
    assert.matches("/nonexistent/folder/x", why)
  end)

  it("is read up to a bound, and refused beyond it #quick", function()
    record(everything)
    local text = process.read(path)
    local most = trace.MOST_FILE
    finally(function() trace.MOST_FILE = most end)
    trace.MOST_FILE = #text
    local run = assert(trace.read(path))
    assert.equal(#lines_of(text) - 1, #run.list)
    trace.MOST_FILE = #text - 1
    assert.same({ n = 2, nil, ("%s: expected a trace of at most %d bytes, got more"):format(path, #text - 1) },
      table.pack(trace.read(path)))
  end)

  it("has lines of any length #quick", function()
    local title, where = ("t"):rep(100000), ("w"):rep(200000)
    local lines = { ('{"trace":1,"title":"%s"}'):format(title) }
    for i = 2, 400 do
      lines[i] = ('{"kind":"synchronized","time":1,"operation":"x","where":"%s"}'):format(where:sub(1, i * 500))
    end
    write(table.concat(lines, "\n"))
    local run = assert(trace.read(path))
    assert.same({ title, 399, where }, { run.header.title, #run.list, run.list[399].where })
  end)

  it("never does more than differ, whatever is changed in it", function()
    local values = { "null", "true", "-1", "0", "1e300", "9223372036854775807", "4611686018427387904", '"x"', "{}",
      "[]", "[[1]]",
      "[1e300]", '"int64"', "[4611686018427387904, 4611686018427387904]", "0.5" }
    record(everything)
    local lines, random = lines_of(process.read(path)), pages.generator(17)
    local refused, different, same = 0, 0, 0
    for _ = 1, 200 do
      local copy = table.move(lines, 1, #lines, 1, {})
      for _ = 0, random(2) do
        local at = random(#copy - 1) + 2
        local kind = random(5)
        if kind == 4 then -- a value of another type
          local names = {}
          for name in copy[at]:gmatch('"%l+":()') do names[#names + 1] = name end
          local from = names[random(#names) + 1]
          local rest = copy[at]:sub(from)
          local old = rest:match("^%b[]") or rest:match("^%b{}") or rest:match('^"[^"]*"') or rest:match("^[^,}%]]+")
          copy[at] = copy[at]:sub(1, from - 1) .. values[random(#values) + 1] .. rest:sub(#old + 1)
        elseif kind == 0 then table.remove(copy, at)
        elseif kind == 1 then table.insert(copy, at, copy[random(#copy - 1) + 2])
        elseif kind == 2 then copy[at] = copy[at]:gsub("%d+", function(n) return random(8) == 0 and tostring(random(40))
          or n end)
        else copy[at] = copy[at]:sub(1, random(#copy[at])) .. copy[at]:sub(random(#copy[at]) + 1) end
      end
      write(table.concat(copy, "\n") .. "\n")
      local run = trace.read(path)
      if not run then
        refused = refused + 1
      else
        assert.is_string(trace.summary(run))
        assert(trace.chrome(run, path))
        local result = replay(run)
        if result and result.ok then same = same + 1 else different = different + 1 end
      end
    end
    assert.is_true(refused > 5 and different > 5,
      ("%d refused, %d different, %d the same"):format(refused, different, same))
  end)
end)

describe("nibble trace", function()
  setup(temporary)
  teardown(remove)

  local function run(arguments)
    return process.run(process.quote(process.command()) .. " " .. arguments)
  end

  it("summarises, converts and executes what a scenario recorded", function()
    local recorded = run("scenario prefix_sharing --steps 4 --trace " .. path)
    assert.same({ 0, "" }, { recorded.status, recorded.stderr })
    local summary = run("trace " .. path)
    assert.same({ 0, "" }, { summary.status, summary.stderr })
    assert.matches("^trace of prefix_sharing, nibble ", summary.stdout)
    local again = run("trace " .. path .. " --replay")
    assert.same({ 0, "" }, { again.status, again.stderr })
    assert.matches("\nok: %d+ pieces of work and %d+ replays executed again, %d+ elements of index tensors compared\n$",
      "\n" .. again.stdout)
    local out = os.tmpname()
    local converted = run("trace " .. path .. " --chrome " .. out)
    assert.same({ 0, "", "" }, { converted.status, converted.stderr, converted.stdout })
    assert.is_true(#json.decode(process.read(out)).traceEvents > 50)
    os.remove(out)
    local text = process.read(path)
    local itself = run("trace " .. path .. " --chrome " .. path)
    assert.same({ 2, "nibble trace: --chrome: expected another file than the trace, got " .. path .. "\n" },
      { itself.status, itself.stderr })
    assert.is_true(text == process.read(path))
  end)

  it("reads a trace that a killed run left, with a warning, in all that it does #quick", function()
    record(everything, { title = "\27]0;title\7" })
    local text = process.read(path)
    write(text:sub(1, #text - 10))
    local line = select(2, text:gsub("\n", ""))
    local warning =
      ("nibble trace: warning: %s:%d: the file ends in the middle of this line; it is read up to there\n"):format(
      path, line)
    local out = os.tmpname()
    finally(function() os.remove(out) end)
    for arguments, output in pairs { [""] = "^trace of \\x1B%]0;title\\x07, nibble ", [" --replay"] = "^ok: ",
      [" --chrome " .. out] = "^$" } do
      local result = run("trace " .. path .. arguments)
      assert.same({ 0, warning }, { result.status, result.stderr })
      assert.matches(output, result.stdout)
    end
    assert.is_true(#json.decode(process.read(out)).traceEvents > 50)
  end)

  it("says in words why a file is no trace #quick", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert.equal(0, process.run("mkdir " .. folder).status)
    finally(function() process.run("rm -r " .. folder) end)
    for file, message in pairs {
      [folder] = folder .. ": Is a directory", ["/dev/null"] = "/dev/null: expected a trace, got an empty file",
      ["'/no/\27[31m'"] = "/no/\\x1B[31m: No such file or directory",
    } do
      for _, option in ipairs { "", " --replay", " --chrome /dev/null" } do
        local result = run("trace " .. file .. option)
        assert.same({ status = 1, stdout = "", stderr = "nibble trace: " .. message .. "\n" }, result)
      end
    end
    record(everything)
    local piped = process.run(("cat %s | %s trace /dev/stdin"):format(path, process.quote(process.command())))
    assert.same({ 0, "" }, { piped.status, piped.stderr })
    local endless = process.run(("head -c 4194304 /dev/zero | %s trace /dev/stdin"):format(
      process.quote(process.command())))
    assert.same({ 1, "nibble trace: /dev/stdin: expected a first line of at most 1048576 bytes, got more\n" },
      { endless.status, endless.stderr })
    local small = run("trace " .. path .. " --replay --max-bytes 1000")
    assert.equal(1, small.status)
    assert.matches("^nibble trace: %-%-max%-bytes: expected storages of at most 1000 bytes, got more at line %d+\n$",
      small.stderr)
  end)

  it("records a scenario whose path is no UTF-8 and would colour the terminal", function()
    local folder = os.tmpname()
    os.remove(folder)
    finally(function() process.run("rm -r " .. process.quote(folder)) end)
    local file = folder .. "/\xff\27[31m.lua"
    local copied = process.run(("mkdir %s && cp scripts/scenarios/empty_requests.lua %s"):format(folder,
      process.quote(file)))
    assert.equal(0, copied.status)
    local result = run(("scenario %s --steps 1 --trace %s"):format(process.quote(file), path))
    assert.same({ 0, "" }, { result.status, result.stderr })
    assert.equal(file, trace.read(path).header.title)
    local summary = run("trace " .. path)
    assert.matches("/\\xFF\\x1B%[31m%.lua, nibble", summary.stdout)
    assert.same({ 0, "" }, { summary.status, summary.stderr })
  end)

  it("ends with 1 when something differs, and 2 on bad usage", function()
    write('{"trace":1}\n{"kind":"replay","time":0,"operation":"graph:replay","stream":1,"graph":7}\n')
    local result = run("trace " .. path .. " --replay")
    assert.equal(1, result.status)
    assert.matches("DIFFERENT: 0 pieces", result.stdout)
    assert.equal(1, run("trace /nonexistent/folder/x").status)
    for _, arguments in ipairs { "", "--replay", path .. " --nonsense", path .. " --device cpu",
      path .. " --max-bytes 7", path .. " --replay --max-bytes 0" } do
      assert.equal(2, run("trace " .. arguments).status, arguments)
    end
    assert.equal(0, run("trace --help").status)
    assert.equal(2, run("scenario decode --trace /nonexistent/folder/x").status)
  end)
end)
