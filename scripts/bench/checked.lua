-- The cost of checked mode: the processor time of the same work with and without `nibble.check`, and their ratio.
--
-- Each sample creates new tensors and times only the work, in all threads of the process, including kernels. Checked
-- and plain samples alternate in one process. The ratio is the median of the pairs' ratios.
local HELP = [[
Usage: nibble scripts/bench/checked.lua [options]      (or lua5.4 scripts/bench/checked.lua)

  --quick        little work: tests that the benchmark runs, measures nothing
  --repeats N    pairs of timings of each case, at least 3 (default: 9); the median is shown
  --only TEXT    only cases whose name contains TEXT
  --help]]

local here = debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$") or "."
local opts = dofile(here .. "/begin.lua")("checked.lua", HELP, {
  quick = { false }, repeats = { 9, min = 3 }, only = {},
})

local nibble = require "nibble"
local pages = require "nibble.pages"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local dequantize = nibble.quantization.nvfp4_kv_dequantize_paged
local ON = { device = "cpu" }
local PAGE_SIZE, HEADS, DIM, BATCH = 16, 4, 64, 8

local function bf16(...) return nibble.zeros({ ... }, { dtype = "bfloat16", device = "cpu" }) end

local function new_pool(num_pages)
  return pages.caches { num_pages = num_pages, page_size = PAGE_SIZE, num_kv_heads = HEADS, head_dim = DIM,
    device = "cpu" }
end

-- A case is a name, how often a sample does the work, and a function that returns the work: fn(i), for i = 1, 2, ...
local cases = {}
local function case(name, count, make)
  cases[#cases + 1] = { name = name, count = opts.quick and 8 or count, make = make }
end

-- A decode step for a batch of 8 with at least `length` tokens each. Append and dequantize of each layer are in a
-- graph; a step copies slots, tables and lengths to its inputs, replays it, and waits. `watched`: the pool is watched,
-- and the step gets them from its allocator.
local function decode(layers, length, steps, watched)
  return function()
    local most = length + steps + 8
    local columns = (most + PAGE_SIZE - 1) // PAGE_SIZE
    local allocator = pages.allocator { num_pages = BATCH * columns, page_size = PAGE_SIZE, layout = "shuffled",
      seed = 1 }
    local pools, requests, prompt = {}, {}, {}
    for l = 1, layers do
      pools[l] = new_pool(BATCH * columns)
      if watched then pages.watch(allocator, pools[l]) end
    end
    for b = 1, BATCH do
      requests[b] = assert(allocator:allocate(length))
      table.move(allocator:slots(requests[b]), 1, length, #prompt + 1, prompt)
    end
    local one, rows, all = nibble.full({ 1 }, 1.0, ON), bf16(BATCH, HEADS, DIM), bf16(#prompt, HEADS, DIM)
    local k, v = bf16(BATCH, most, HEADS, DIM), bf16(BATCH, most, HEADS, DIM)
    local slots = nibble.tensor(prompt, { dtype = "int64", device = "cpu" })
    for l = 1, layers do append(all, all, slots, pools[l].paged_kv_cache, pools[l].kv_cache_sf, one, one, "NHD") end

    local function inputs()
      for b = 1, BATCH do assert(allocator:append(requests[b], 1)) end
      return pages.tensors(allocator:batch(requests, { new_tokens = 1, max_pages = columns }), ON)
    end
    local input = inputs()
    local graph = nibble.current_stream("cpu"):capture(function()
      for l = 1, layers do
        append(rows, rows, input.slot_mapping, pools[l].paged_kv_cache, pools[l].kv_cache_sf, one, one, "NHD")
        dequantize(pools[l].paged_kv_cache, pools[l].kv_cache_sf, input.block_tables, input.seq_lens, one, one, k, v,
          "NHD")
      end
    end)
    graph:replay()
    local ready = {}
    for i = 1, watched and 0 or steps + 2 do ready[i] = inputs() end
    return function(i)
      local fresh = ready[i] or inputs()
      for _, name in ipairs { "slot_mapping", "block_tables", "seq_lens" } do input[name]:copy(fresh[name]) end
      graph:replay()
      nibble.synchronize("cpu")
    end
  end
end

for _, length in ipairs { 16, 128 } do
  for _, layers in ipairs { 1, 4 } do
    for _, watched in ipairs { false, true } do
      local name = ("decode%s, %d tokens, layers: %d"):format(watched and ", watched" or "", length, layers)
      case(name, 100, decode(layers, length, 100, watched))
    end
  end
end

for _, held in ipairs { 1024, 65536 } do
  case(("append of a token, %d held"):format(held), 200, function()
    local num_pages = held // PAGE_SIZE + 64
    local allocator, pool = pages.allocator { num_pages = num_pages, page_size = PAGE_SIZE }, new_pool(num_pages)
    pages.watch(allocator, pool)
    local requests, rows, one = {}, bf16(1, HEADS, DIM), nibble.full({ 1 }, 1.0, ON)
    for i = 1, 8 do requests[i] = assert(allocator:allocate(held // 8)) end
    return function(i)
      local slots = nibble.tensor(assert(allocator:append(requests[i % 8 + 1], 1)), { dtype = "int64", device = "cpu" })
      append(rows, rows, slots, pool.paged_kv_cache, pool.kv_cache_sf, one, one, "NHD")
      slots:close()
    end
  end)
end

case("two streams without order", 400, function()
  local a, b, x, y = nibble.stream(ON), nibble.stream(ON), nibble.zeros(64, ON), nibble.zeros(64, ON)
  local current = nibble.current_stream("cpu")
  local event = current:record()
  a:wait(event)
  b:wait(event)
  local function fill(t) t:fill(1) end
  return function()
    a:scope(fill, x)
    b:scope(fill, y)
  end
end)

for _, nodes in ipairs { 100, 800 } do
  case(("replay of %d copies"):format(nodes), 20, function()
    local x, y = nibble.zeros(64, ON), nibble.zeros(64, ON)
    local graph = nibble.current_stream("cpu"):capture(function()
      for _ = 1, nodes // 2 do
        x:copy(y)
        y:copy(x)
      end
    end)
    return function() graph:replay() end
  end)
end

---------------------------------------------------------------------------------------------------------- measuring

local function median(list)
  table.sort(list)
  local middle = (#list + 1) // 2
  return #list % 2 == 1 and list[middle] or (list[middle] + list[middle + 1]) / 2
end

-- Microseconds of processor time for the work, once.
local function measure(entry, checked)
  nibble.check(checked and function(report) error(report.text) end or false)
  local stream = nibble.stream(ON)
  local time
  stream:scope(function()
    local work = entry.make()
    for i = 1, 2 do work(i) end
    stream:synchronize()
    collectgarbage()
    local begin = os.clock()
    for i = 3, entry.count + 2 do work(i) end
    nibble.synchronize("cpu")
    time = (os.clock() - begin) * 1e6 / entry.count
  end)
  nibble.check(false)
  stream:close()
  collectgarbage()
  return time
end

print(("%-34s %12s %12s %8s"):format("processor time of one", "plain, us", "checked, us", "ratio"))
for _, entry in ipairs(cases) do
  if not opts.only or entry.name:find(opts.only, 1, true) then
    local plain, checked, ratios = {}, {}, {}
    for i = 1, opts.quick and 1 or opts.repeats do
      plain[i], checked[i] = measure(entry, false), measure(entry, true)
      ratios[i] = checked[i] / plain[i]
    end
    print(("%-34s %12.1f %12.1f %7.2fx"):format(entry.name, median(plain), median(checked), median(ratios)))
  end
end
