-- Checked mode where there is much to look at: accesses that are long ago, views of many pieces, long graphs.
local nibble = require "nibble"
local checked = require "spec.support.checked"

local fault, clean = checked.fault, checked.clean

describe("checked mode, with much to look at,", function()
  after_each(function() nibble.check(false) end)

  it("sees races with what is long ago, byte for byte and one stream's as another's", function()
    local many = [[
local P = new_pool("HND")
local rows, slots, l, k, v = bf16(1, 2, 64), {}, i32 {1}, bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
local t6, t7 = i32 {{6, -1, -1}}, i32 {{7, -1, -1}}
for slot = 0, 31 do slots[slot] = nibble.tensor {slot} end
join(a, b)
a:scope(function() put(P, slots[24], rows) end) --2
a:scope(function() for i = 1, 400 do put(P, slots[i % 24], rows) end end)
]]
    fault("race", "reads paged_kv_cache %(K%) .*, page 6, entry 0 while", many .. [[
--fix b:wait(a:record())
b:scope(function()
  get(P, t7, l, k, v)
  get(P, t6, l, k, v) --1
end)]])
    fault("race", "writes paged_kv_cache %(K%) .*, page 7, entry 0 while quantization.*dequantize.* reads it", [[
local P = new_pool("NHD")
local rows, l, seven, k, v = bf16(1, 2, 64), i32 {1}, nibble.tensor {28}, bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
local tables, t7 = {}, i32 {{7, -1, -1}}
for page = 0, 6 do tables[page] = i32 {{page, -1, -1}} end
join(a, b)
a:scope(function()
  get(P, t7, l, k, v) --2
  for i = 1, 400 do get(P, tables[i % 7], l, k, v) end
end)
--fix b:wait(a:record())
b:scope(function() put(P, seven, rows) end) --1]])
    clean(many .. [[
b:wait(a:record())
a:scope(function() for i = 1, 300 do put(P, slots[i % 20], rows) end end)
b:scope(function() get(P, t6, l, k, v) get(P, i32 {{5, -1, -1}}, l, k, v) end)
]])
  end)

  it("tells races on the same lines that are of other storages, and says once what it did not look at", function()
    local reports = checked.run [[
local x = nibble.zeros(4)
local y = nibble.zeros(4)
local function both(t)
  a:scope(function() t:fill(1) end)
  b:scope(function() t:fill(2) end)
end
join(a, b)
for _ = 1, 3 do
  both(x)
  both(y)
end]]
    assert.equal(2, #reports, checked.texts(reports)) -- of x and of y
    assert.equal("write after write", reports[1].hazard)
    assert.matches("program.lua:1$", reports[1].storage.where)
    assert.equal(16, reports[1].storage.bytes)
    assert.matches("program.lua:9", reports[1].operation.callers)
    assert.matches("\n    called from program.lua:9", reports[1].text)
    nibble.check(function(report) error(report.text) end)
    local slots, rows = nibble.tensor { 1 }, nibble.zeros({ 1, 1, 16 }, { dtype = "bfloat16" })
    local pool = require("nibble.pages").caches { num_pages = 4, page_size = 4, num_kv_heads = 1, head_dim = 16 }
    local one = nibble.tensor(1.0)
    for _ = 1, 2 do
      nibble.current_stream():capture(function()
        nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows, slots, pool.paged_kv_cache,
          pool.kv_cache_sf,
          one, one, "NHD")
        slots:fill(2)
      end)
    end
    local _, unseen = nibble.check_reports()
    assert.equal(1, #unseen)
    assert.matches("^page.nvfp4.* %(.*checker_far_spec.lua:%d+%) in a graph that writes its index tensors",
      unseen[1])
  end)

  it("takes work for a graph that is linear in its nodes", function()
    -- Work is counted: hundreds of instructions of the virtual machine.
    local function work(nodes)
      local x, y, s = nibble.zeros(4), nibble.zeros(4), nibble.stream()
      nibble.check(function(report) error(report.text) end)
      s:wait(nibble.current_stream():record())
      local counted = 0
      debug.sethook(function() counted = counted + 1 end, "", 100)
      local graph = s:capture(function()
        for _ = 1, nodes // 2 do
          x:copy(y)
          y:copy(x)
        end
      end)
      local before = counted
      for _ = 1, 4 do s:scope(graph.replay, graph) end
      debug.sethook()
      nibble.check(false)
      s:synchronize()
      return before, counted - before
    end
    local capture, replay = work(50)
    local captures, replays = work(400)
    assert.is_true(captures <= 16 * capture, ("capture: %d for 50 nodes, %d for 400"):format(capture, captures))
    assert.is_true(replays <= 16 * replay, ("replays: %d for 50 nodes, %d for 400"):format(replay, replays))
  end)

  it("sees races of views with more pieces than anyone lists", function()
    fault("race", "writes tensor float32 {2} from byte 4 while tensor:fill", [[
local x = nibble.zeros(100000, 2)
join(a, b)
a:scope(function() x:select(2, 1):fill(1) end) --2
b:scope(function()
  x:select(2, 2):fill(2)
  x:view(200000):narrow(1, 150000, 2):fill(2) --1 --break
  --fix b:wait(a:record())
  x:as_strided({100000}, {2}, 0):fill(3)
end)]])
  end)
end)
