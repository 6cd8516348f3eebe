-- Checked mode: for each kind of fault a program that has it and its twin that has not (spec/support/checked.lua says
-- how).
local nibble = require "nibble"
local checked = require "spec.support.checked"

local run, texts, fault, clean, line_of = checked.run, checked.texts, checked.fault, checked.clean, checked.line_of

describe("checked mode", function()
  after_each(function() nibble.check(false) end)

  describe("races #quick", function()
    it("of two writes", function()
      fault("race", "tensor:fill on stream %d+ writes tensor float32 {4} while tensor:fill on stream %d+ writes it", [[
local x = nibble.zeros(4)
join(a, b)
a:scope(function() x:fill(1) end) --2
--fix b:wait(a:record())
b:scope(function() x:fill(2) end) --1]])
    end)

    it("of a write and a read, also where the event is recorded too early", function()
      fault("race", "tensor:copy on stream %d+ reads source float32 {2} while tensor:fill", [[
local x, y = nibble.zeros(4), nibble.zeros(2)
join(a, b)
local early = a:record()
a:scope(function() x:fill(1) end) --2
b:wait(early) --break
--fix b:wait(a:record())
b:scope(function() y:copy(x:narrow(1, 3, 2)) end) --1]])
    end)

    it("of a read and a later write", function()
      fault("race", "writes tensor float32 {4} while tensor:copy on stream %d+ reads it %(source%)", [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a, b)
a:scope(function() y:copy(x) end) --2
--fix b:wait(a:record())
b:scope(function() x:fill(2) end) --1]])
    end)

    it("end where the host waited, for a stream, an event, a tensor or the device", function()
      for _, wait in ipairs { "a:synchronize()", "a:record():synchronize()", "nibble.synchronize()", "x:bytes()",
        "local _ = x[1]",
        "while not e:query() do end" } do
        clean(([[
local x = nibble.zeros(4)
join(a, b)
a:scope(function() x:fill(1) end)
local e = a:record()
%s
b:scope(function() x:fill(2) end)]]):format(wait))
      end
    end)

    it("do not end with another stream's wait, or with a read of another tensor", function()
      fault("race", "tensor:fill on stream", [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a, b)
a:scope(function() x:fill(1) end) --2
y:bytes()
b:synchronize()
--fix a:synchronize()
b:scope(function() x:fill(2) end) --1]])
    end)

    it("are not seen between parts of a tensor that are apart", function()
      clean [[
local x = nibble.zeros(6, 8)
join(a, b)
a:scope(function() x:narrow(2, 1, 3):fill(1) x:as_strided({3, 2}, {16, 2}, 4):fill(1) end)
b:scope(function() x:narrow(2, 4, 1):fill(2) x:as_strided({3, 2}, {16, 2}, 11):fill(2) end)]]
      fault("race", "writes tensor float32 {6, 1} while", [[
local x = nibble.zeros(6, 8)
join(a, b)
a:scope(function() x:narrow(2, 1, 4):fill(1) end) --2
--fix b:wait(a:record())
b:scope(function() x:narrow(2, 4, 1):fill(2) end) --1]])
    end)

    it("of paged operations, page by page and slot by slot", function()
      for _, layout in ipairs { "NHD", "HND" } do
        clean(([[
local pool = new_pool("%s")
put(pool, {0, 1, 2, 3, 4, 5})
local tables, lengths, rows, slots = i32 {{0, 1, -1}}, i32 {5}, bf16(2, 2, 64), nibble.tensor {6, 12}
local k, v = bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
join(a, b)
a:scope(function() put(pool, slots, rows) end)
b:scope(function() get(pool, tables, lengths, k, v) end)]]):format(layout))
        fault("race", "reads paged_kv_cache %(K%) uint8 {.*}, page 1, entry 2 while page.*append.* writes it", ([[
local pool = new_pool("%s")
put(pool, {0, 1, 2, 3, 4, 5})
local tables, lengths, rows, slots = i32 {{0, 1, -1}}, i32 {7}, bf16(2, 2, 64), nibble.tensor {6, 12}
local k, v = bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
join(a, b)
a:scope(function() put(pool, slots, rows) end) --2
--fix b:wait(a:record())
b:scope(function() get(pool, tables, lengths, k, v) end) --1]]):format(layout))
      end
    end)

    it("inside a graph", function()
      fault("race",
        "in the graph tensor:copy reads source float32 {4} while tensor:fill writes it %(tensor%): no path leads "
        .. "from node 2 to node 3", [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a)
local graph = a:capture(function()
  y:fill(0)
  b:wait(a:record())
  x:fill(1) --2
--fix b:wait(a:record())
  b:scope(function() y:copy(x) end) --1
  a:wait(b:record())
end)
graph:replay()
graph:replay()]])
    end)

    it("inside a graph that slots decide", function()
      for replay, slot in ipairs { 5, 4 } do
        local source = ([[
local pool = new_pool("HND")
local rows, one_slot, two = bf16(1, 2, 64), nibble.tensor {4}, nibble.tensor {%d}
join(a)
local graph = a:capture(function()
  b:wait(a:record())
  put(pool, one_slot, rows) --2
  b:scope(function() put(pool, two, rows) end) --1
  a:wait(b:record())
end)
a:scope(function() graph:replay() end) --3]]):format(slot)
        if replay == 1 then
          clean(source)
        else
          local reports = run(source)
          assert.equal(1, #reports, texts(reports))
          assert.matches("in the graph .* writes paged_kv_cache %(K%) .*, page 1, entry 0 while .* no path leads",
            reports[1].message)
          assert.same({ line_of(source, 1), line_of(source, 2), line_of(source, 3) },
            { reports[1].operation.where, reports[1].other.where, reports[1].operation.replay })
        end
      end
    end)

    it("of a replay and what the script queues beside it", function()
      fault("race", "tensor:copy on stream %d+ reads source int64 {2} while tensor:copy on stream %d+ writes it", [[
local x, y, new = nibble.zeros({2}, {dtype = "int64"}), nibble.zeros({2}, {dtype = "int64"}), nibble.tensor {1, 2}
join(a)
local graph = a:capture(function()
  y:copy(x) --1
end)
x:copy(new) --2
--fix join(a)
a:scope(function() graph:replay() end) --3]])
    end)

    it("of two replays of one graph", function()
      fault("race", "writes tensor float32 {4} while tensor:fill on stream %d+ writes it", [[
local x = nibble.zeros(4)
join(a, b)
local graph = a:capture(function() x:fill(3) end) --12
a:scope(graph.replay, graph)
--fix b:wait(a:record())
b:scope(function() graph:replay() end) --3]])
    end)

    it("are reported once for each missing event", function()
      local reports = run [[
local x, y, z = nibble.zeros(4), nibble.zeros(4), nibble.zeros(4)
join(a, b)
for _ = 1, 3 do
  a:scope(function() x:fill(1) y:fill(1) end)
  b:scope(function() z:copy(x) z:copy(y) x:fill(2) end)
end]]
      assert.equal(2, #reports, texts(reports)) -- b after a; a, the next time round, after b
    end)

    it("count kernels of the user's as readers or writers, whichever is innocent", function()
      local accesses, clocks = require "nibble.checker.accesses", require "nibble.checker.clocks"
      local found, clock = {}, clocks.new()
      local memory = require("nibble.checker.memory").new(clock, function(_, a, b) found[#found + 1] = a.name .. " " ..
        b.name end)
      local function work(name, stream, user, write)
        local view = { storage = 1, offset = 0, dtype = "uint8", shape = { 4 }, stride = { 1 }, write = write }
        local items = accesses.expand({ kernel = name, user_kernel = user, accesses = { view } }, {})
        local operation = { name = name, point = clock:work(stream) }
        memory:check_order(operation, items)
        memory:remember(operation, items)
      end
      work("first", 1, true, true)
      work("second", 2, true, true)
      work("copy", 3, false, false)
      assert.same({}, found)
      work("fill", 4, false, true)
      assert.same({ "fill copy", "fill second", "fill first" }, found)
    end)

    it("count kernels of the user's so on a GPU, too", function()
      if not nibble.device():find("^cuda") then pending("no CUDA device here") end
      if os.getenv("NIB_STANDIN_LOG") then pending("the stand-in driver runs the project's own kernels alone") end
      local source = "extern \"C\" __global__ void touch(float *x) { x[threadIdx.x] += 1; }"
      local kernel, reason = nibble.compile(source, { name = "touch" })
      if not kernel then pending(reason) end
      _G.touch_kernel = kernel
      local reports = run [[
local x = nibble.zeros(4)
join(a, b)
a:scope(function() touch_kernel:launch(1, 4, {x}) end)
b:scope(function() touch_kernel:launch(1, 4, {x}) end)
a:scope(function() x:fill(1) end)]]
      _G.touch_kernel = nil
      assert.equal(1, #reports, texts(reports))
      assert.matches("tensor:fill on stream %d+ writes .* while kernel:launch on stream %d+ uses it",
        reports[1].message)
    end)
  end)

  -- Not quick: it looks at index tensors that nothing has written whole, which valgrind would report.
  describe("unwritten memory", function()
    it("read by the host, in part or whole", function()
      fault("unwritten", "tensor:read reads tensor float32 {3} from byte 4, which nothing has written", [[
local x = nibble.empty(3) --2
x:narrow(1, 1, 1):fill(1)
--fix x:narrow(1, 2, 2):fill(2)
x:totable() --1]])
    end)

    it("read by an operation, also through copies and in a graph", function()
      fault("unwritten", "append_key bfloat16 {2, 2, 64} from byte 256, where tensor:copy copied unwritten bytes", [[
local pool, rows, half = new_pool("NHD"), nibble.empty({2, 2, 64}, {dtype = "bfloat16"}), bf16(1, 2, 64)
local other = rows:clone() --2
other:narrow(1, 1, 1):copy(half)
--fix other:narrow(1, 2, 1):copy(half)
put(pool, {0, 1}, other) --1]])
      fault("unwritten", "append.* reads append_key", [[
local pool, rows, slots = new_pool("NHD"), nibble.empty({2, 2, 64}, {dtype = "bfloat16"}), nibble.tensor {0, 1} --2
--fix rows:fill(0)
join(a)
local graph = a:capture(function()
  put(pool, slots, rows) --1
end)
a:scope(graph.replay, graph) --3]])
    end)

    it("is not what an operation skips", function()
      clean [[
local pool, rows = new_pool("HND"), nibble.empty({3, 2, 64}, {dtype = "bfloat16"})
rows:narrow(1, 2, 1):fill(1)
put(pool, {-1, 3, 999}, rows)
local k, v = nibble.empty({1, 12, 2, 64}, {dtype = "bfloat16"}), bf16(1, 12, 2, 64)
local tables = nibble.empty({1, 3}, {dtype = "int32"})
tables:narrow(2, 1, 1):fill(0)
get(pool, tables, i32 {3}, k, v)
k:narrow(2, 1, 3):bytes()]]
    end)

    it("in a page that its owner has not written, whatever was in it before", function()
      for _, layout in ipairs { "NHD", "HND" } do
        fault("unwritten", "dequantize.* reads paged_kv_cache %(K%) .*, page 1, entry 1, which nothing has written since the page", ([[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("%s", allocator)
local old = allocator:allocate(8)
put(pool, allocator:slots(old))
allocator:free(old)
local request = allocator:allocate(6) --2
put(pool, allocator:slots(request, 0, 5))
--fix put(pool, allocator:slots(request, 5, 1))
local t = pages.tensors(allocator:batch {request})
get(pool, t.block_tables:as_strided({1, 3}, {0, 0}), i32 {0})
local tables = nibble.zeros({1, 3}, {dtype = "int32"})
tables:narrow(2, 1, 2):copy(t.block_tables)
get(pool, tables, t.seq_lens) --1]]):format(layout))
      end
    end)

    it("in a shared page that was not copied on write", function()
      fault("unwritten", "page 2, entry 0, which nothing", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local parent = allocator:allocate(6)
put(pool, allocator:slots(parent))
local child = allocator:fork(parent)
local slots, copies = allocator:append(child, 1) --2
--fix pages.copy(pool, copies)
put(pool, slots)
local tables = i32 {{child.pages[1], child.pages[2], -1}}
get(pool, tables, i32 {7}) --1]])
    end)

    it("of records", function()
      fault("unwritten", "mla.dequantize_cache reads cache uint8 {8, 4, 384}, page 1, which nothing has written", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local cache = nibble.zeros({8, 4, 384}, {dtype = "uint8"})
pages.watch(allocator, cache)
local request = allocator:allocate(6) --2
local slots, rope = allocator:slots(request), nibble.rope_table(8)
local positions = nibble.arange(6)
--fix slots[5], slots[6] = slots[5], slots[6]
slots[6] = -1 --break
nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(bf16(6, 512), cache, nibble.tensor(slots), positions, rope)
nibble.mla.dequantize_cache(cache, nibble.tensor(allocator:slots(request))) --1]])
    end)
  end)

  describe("slots and pages #quick", function()
    it("a slot twice in one call, eager and replayed", function()
      fault("duplicate slot", "writes entry 1 of page 1 twice %(slot_mapping index 0 and 2%)", [[
local pool = new_pool("NHD")
local slots = {5, 4, 5, -1, -1} --break
--fix local slots = {5, 4, 6, -1, -1}
put(pool, slots) --1]])
      fault("duplicate slot", "writes entry 1 of page 1 twice", [[
local pool, rows, slots = new_pool("NHD"), bf16(3, 2, 64), nibble.tensor {5, 4, 6}
join(a)
local graph = a:capture(function()
  put(pool, slots, rows) --1
end)
a:scope(function()
  graph:replay()
  slots:narrow(1, 3, 1):fill(5) --break
  graph:replay() --3
end)]])
    end)

    it("a page of two requests that do not share it", function()
      fault("owned twice", "dequantize.* reads page 0 in two rows of block_tables %(the second is row 1%), but only one request owns it", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local first, second = allocator:allocate(3), allocator:allocate(2) --2
put(pool, allocator:slots(first))
put(pool, allocator:slots(second))
local tables = i32 {{0, -1, -1}, {0, -1, -1}} --break
--fix local tables = i32 {{0, -1, -1}, {1, -1, -1}}
get(pool, tables, i32 {3, 2}) --1]])
      fault("owned twice", "append.* writes page 0 %(slot_mapping index 0%), which 2 requests own without sharing it", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("NHD", allocator)
local first = allocator:allocate(3) --2
local second = allocator:allocate(2)
put(pool, allocator:slots(first))
second.pages[1] = first.pages[1] --break
put(pool, allocator:slots(second)) --1]])
      fault("owned twice", "writes page 0 %(slot_mapping index 0%), which two allocators have allocated", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool, part = new_pool("NHD", allocator), {}
for i, t in ipairs(pool.paged_kv_cache) do part[i], part[i + 2] = t:narrow(1, 1, 4), pool.kv_cache_sf[i]:narrow(1, 1, 4) end
local other = pages.allocator {num_pages = 4, page_size = 4, layout = function() return {3, 2, 1, 0} end}
other = pages.allocator {num_pages = 4, page_size = 4} --break
pages.watch(other, part)
local first = allocator:allocate(3) --2
local second = other:allocate(2)
put(pool, other:slots(second)) --1
put(pool, allocator:slots(first))]])
    end)

    it("not of forks, beams and a request that is listed twice", function()
      clean [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local parent = allocator:allocate(8)
local child = allocator:fork(parent)
put(pool, allocator:slots(parent)) -- the prompt is written after it was shared
local batch = pages.tensors(allocator:batch({parent, child, parent}, {max_pages = 3}))
get(pool, batch.block_tables, batch.seq_lens)
local slots, copies = allocator:append(child, 2)
pages.copy(pool, copies)
put(pool, slots)
allocator:free(parent)
batch = pages.tensors(allocator:batch({child}, {max_pages = 3}))
get(pool, batch.block_tables, batch.seq_lens)]]
    end)

    it("a freed page in a block table, eager and replayed", function()
      fault("freed page", "dequantize.* reads page 0 %(block_tables row 0, column 0%), which was released", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local request = allocator:allocate(6)
put(pool, allocator:slots(request))
local tables = i32 {{0, 1, -1}}
--fix get(pool, tables, i32 {6})
allocator:free(request) --2
get(pool, tables, i32 {6}) --1 --break]])
      fault("freed page", "reads page 0 %(block_tables row 0, column 0%), which was released", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local request = allocator:allocate(9)
put(pool, allocator:slots(request))
local tables, lengths, k, v = i32 {{0, 1, 2}}, i32 {9}, bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
join(a)
local graph = a:capture(function()
  get(pool, tables, lengths, k, v) --1
end)
a:scope(function() graph:replay() end)
allocator:drop(request, 1) --2
--fix a:scope(function() tables:copy(i32 {{1, 2, -1}}) lengths:fill(5) end)
a:scope(function() graph:replay() end) --3]])
      fault("freed page", "append.* writes page 3 %(slot_mapping index 0%), which the allocator has not allocated", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local request = allocator:allocate(4)
local slots = {12} --break
--fix local slots = {3}
put(pool, slots) --1]])
    end)

    it("a write to a page that another request shares", function()
      fault("shared page", "append.* writes entry 2 of page 1 %(slot_mapping index 0%), which 2 requests share", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
local parent = allocator:allocate(6) --2
put(pool, allocator:slots(parent))
local child = allocator:fork(parent)
--fix local slots, copies = allocator:append(child, 1)
--fix pages.copy(pool, copies)
local slots = {6} --break
put(pool, slots) --1]])
      fault("shared page", "writes entry 3 of page 0 .* which 2 requests share", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool, rows, slots = new_pool("NHD", allocator), bf16(1, 2, 64), nibble.tensor {-1}
local parent = allocator:allocate(4) --2
put(pool, allocator:slots(parent))
local child = allocator:fork(parent)
join(a)
local graph = a:capture(function()
  put(pool, slots, rows) --1
end)
a:scope(function()
  graph:replay()
--fix local new, copies = allocator:append(child, 1)
--fix slots:fill(new[1])
  slots:fill(3) --break
  graph:replay() --3
end)]])
    end)
  end)

  describe("graphs #quick", function()
    it("that read a closed tensor", function()
      fault("closed", "graph:replay reads source %(tensor:copy%), whose last tensor was closed", [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a)
local graph = a:capture(function() y:copy(x) end)
--fix local keep = x:narrow(1, 1, 2)
x:close() --2
a:scope(function() graph:replay() end) --1
a:scope(function() graph:replay() end)]])
    end)

    it("that made a tensor of their own, or lost one to the collector", function()
      clean [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a)
local graph = a:capture(function()
  local t <close> = x:clone()
  y:copy(t)
end)
x = nil
collectgarbage()
a:scope(graph.replay, graph)]]
    end)

    it("with a fork that is not joined", function()
      fault("unjoined",
        "stream %d+ was forked from the capture on stream %d+ and not joined back: nothing waits for its tensor:fill",
        [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a)
a:capture(function()
  x:fill(1)
  b:wait(a:record()) --2
  b:scope(function() y:fill(1) end) --1
--fix a:wait(b:record())
end)]], "joined the capture and was not joined back")
    end)

    it("that are updated are what they became", function()
      clean [[
local x, y, z = nibble.zeros(4), nibble.zeros(4), nibble.zeros(4)
join(a, b)
local graph = a:capture(function() y:copy(x) end)
graph:update(function() z:copy(y) end)
b:scope(function() x:fill(1) end)
a:scope(graph.replay, graph)
x:close()
a:scope(graph.replay, graph)]]
    end)
  end)

  it("leaves content faults and values as they are #quick", function()
    local reports = run [[
local pool = new_pool("HND")
local ok, message = pcall(function()
  nibble.quantization.nvfp4_kv_materialize_fp8(pool.paged_kv_cache[1], pool.paged_kv_cache[2], pool.kv_cache_sf[1],
    pool.kv_cache_sf[2], i32 {{99}}, i32 {3}, 4)
  local x = nibble.tensor {1, 2}
  put(pool, x)
  nibble.synchronize()
end)
assert(not ok and message:find("block_tables: expected a page index of the cache, got 99"), message)]]
    assert.equal("", texts(reports))
  end)

  local function race()
    local t = nibble.empty(1):fill(1)
    nibble.stream():scope(function() t:fill(2) end)
    nibble.synchronize()
  end

  it("checks its argument, starts anew and ends #quick", function()
    assert.error(function() nibble.check() end, "check: mode: expected true, false or a function, got nothing")
    assert.error(function() nibble.check(1) end, "check: mode: expected true, false or a function, got 1")
    nibble.check(function() end)
    race()
    assert.equal(1, #nibble.check_reports())
    nibble.check(function() end)
    assert.equal(0, #nibble.check_reports())
    nibble.check(false)
    race()
    assert.equal(0, #nibble.check_reports())
  end)

  it("raises the errors of its function #quick", function()
    nibble.check(function(report) error(report.kind, 0) end)
    assert.error(race, "race")
    nibble.check(false)
  end)
end)
