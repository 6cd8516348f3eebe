-- The speed of the operations on the CPU: elements per second and thread, and the speed relative to a copy of as many
-- bytes.
--
-- The copy (t:copy of uint8 tensors, on the same threads) and the operation are timed alternately in the same run; the
-- relative speed is the median of the pairs' ratios. 100 % is the limit of the memory if each byte is moved once.
local HELP = [[
Usage: nibble scripts/bench/cpu.lua [options]      (or lua5.4 scripts/bench/cpu.lua)

  --quick        small inputs that fit into a cache: tests that the benchmark runs, measures nothing
  --repeats N    timings of each operation, at least 9 (default: 15); the median is shown
  --only TEXT    only operations whose name contains TEXT
  --csv          comma-separated values
  --json         JSON
  --help]]

local here = debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$") or "."
local opts = dofile(here .. "/begin.lua")("cpu.lua", HELP, {
  quick = { false }, csv = { false }, json = { false }, repeats = { 15, min = 9 }, only = {},
})

local nibble = require "nibble"
local pages, progress = require "nibble.pages", require "nibble.progress"
local page, quantization, mla = nibble.page, nibble.quantization, nibble.mla

local ON = { device = "cpu" }
local threads = 1
for _, info in ipairs(nibble.devices()) do
  if info.name == "cpu" then threads = info.processors or 1 end
end

-- Sizes: about 32 MB per tensor, more than most caches hold; with --quick 1/64 of it.
local N = opts.quick and 256 or 16384 -- tokens
local HEADS, DIM, PAGE_SIZE = 4, 256, 16
local NUM_PAGES = N // PAGE_SIZE
local MLA_HEADS, MLA_N = 8, N // 4

local function on(dtype) return { dtype = dtype, device = "cpu" } end

-- Normal values that repeat after 65536, since 100 million different ones would take longer than all measurements.
local function normal(dtype, seed, ...)
  local n = 1
  for _, size in ipairs { ... } do n = n * size end
  local chunk = math.min(n, 65536)
  local values = nibble.randn({ chunk }, { dtype = dtype, device = "cpu", seed = seed })
  return nibble.empty({ n // chunk, chunk }, on(dtype)):copy(values):view(...)
end

local function one() return nibble.full({ 1 }, 1.0, on "float32") end

local function close(...)
  for _, t in ipairs { ... } do t:close() end
end

-- Tokens in random slots, as in a pool after long use.
local function slots(n, seed)
  return nibble.randperm(n, { dtype = "int64", device = "cpu", seed = seed })
end

local function filled_pool(kv_layout)
  local pool = pages.caches {
    num_pages = NUM_PAGES, page_size = PAGE_SIZE, num_kv_heads = HEADS, head_dim = DIM, kv_layout = kv_layout,
      device = "cpu",
  }
  local k, v = normal("bfloat16", 1, N, HEADS, DIM), normal("bfloat16", 2, N, HEADS, DIM)
  page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slots(N, 3), pool.paged_kv_cache, pool.kv_cache_sf,
    1.0, 1.0, kv_layout)
  return pool, k, v
end

-- A case is a name and a function that creates the input and returns the work, its elements and the bytes that it must
-- move.
local VALUES = N * HEADS * DIM       -- elements of K (or V)
local PACKED = VALUES // 2 + VALUES // 16
local cases = {}
local function case(name, make) cases[#cases + 1] = { name = name, make = make } end

for _, dtype in ipairs { "bfloat16", "float16" } do
  for _, kind in ipairs { { "NHD" }, { "HND" }, { "NHD", "4over6" } } do
    local kv_layout, four_over_six = kind[1], kind[2] ~= nil
    case(("append %s %s"):format(dtype, table.concat(kind, ", ")), function()
      local pool = filled_pool(kv_layout)
      local k, v, mapping = normal(dtype, 1, N, HEADS, DIM), normal(dtype, 2, N, HEADS, DIM), slots(N, 4)
      return function()
        page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, mapping, pool.paged_kv_cache,
          pool.kv_cache_sf, 1.0, 1.0, kv_layout, four_over_six)
      end, 2 * VALUES, 2 * (VALUES * 2 + PACKED)
    end)
  end
end

-- Eight requests that together have all pages of the pool.
local function batch()
  local n = N // 8
  return pages.tensors(assert(pages.plan {
    lengths = { n, n, n, n, n, n, n, n }, page_size = PAGE_SIZE, num_pages = NUM_PAGES, layout = "shuffled", seed = 5,
  }), ON)
end

for _, dtype in ipairs { "bfloat16", "float16" } do
  case("dequantize " .. dtype, function()
    local pool, tables, g = filled_pool("NHD"), batch(), one()
    local k, v = nibble.zeros(8, N // 8, HEADS, DIM, on(dtype)), nibble.zeros(8, N // 8, HEADS, DIM, on(dtype))
    return function()
      quantization.nvfp4_kv_dequantize_paged(pool.paged_kv_cache, pool.kv_cache_sf, tables.block_tables,
        tables.seq_lens,
        g, g, k, v)
    end, 2 * VALUES, 2 * (VALUES * 2 + PACKED)
  end)
end

case("materialize", function()
  local pool, tables = filled_pool("HND"), batch()
  local out = nibble.zeros(NUM_PAGES + 1, 2, HEADS, PAGE_SIZE, DIM, on "float8_e4m3fn")
  local cache, sf = pool.paged_kv_cache, pool.kv_cache_sf
  return function()
    local _, fp8_tables = quantization.nvfp4_kv_materialize_fp8(cache[1], cache[2], sf[1], sf[2], tables.block_tables,
      tables.seq_lens, N // 8, { out = out })
    close(fp8_tables)
  end, 2 * VALUES, 2 * (VALUES + PACKED)
end)

for _, kv_layout in ipairs { "NHD", "HND" } do
  case("swizzle_v_scales " .. kv_layout, function()
    local shape = kv_layout == "NHD" and { N, PAGE_SIZE, HEADS, DIM // 16 } or { N, HEADS, PAGE_SIZE, DIM // 16 }
    local sf = nibble.zeros(shape, on "float8_e4m3fn")
    local out = sf:clone()
    local elements = sf:numel()
    return function() quantization.swizzle_v_scales(sf, kv_layout, { out = out }) end, elements, 2 * elements
  end)
end

case("quantize_paged_kv_cache HND", function()
  local k = normal("bfloat16", 1, NUM_PAGES, HEADS, PAGE_SIZE, DIM)
  local v = normal("bfloat16", 2, NUM_PAGES, HEADS, PAGE_SIZE, DIM)
  return function()
    local cache, sf, k_scale, v_scale = quantization.nvfp4_quantize_paged_kv_cache(k, v, "HND")
    close(cache[1], cache[2], sf[1], sf[2], k_scale, v_scale)
  end, 2 * VALUES, 2 * (VALUES * 2 + VALUES * 2 + PACKED) -- read twice: amax, then the values
end)

local RECORD = 384
local function mla_input()
  local table_of = nibble.rope_table(MLA_N, ON)
  return normal("bfloat16", 1, MLA_N, MLA_HEADS, 512), normal("bfloat16", 2, MLA_N, 512),
    nibble.zeros(MLA_N // 16, 16, RECORD, on "uint8"), slots(MLA_N, 6), nibble.arange(MLA_N, on "int64"), table_of
end

case("rope_quantize_insert, q copied", function()
  local q, kv, cache, mapping, positions, table_of = mla_input()
  return function()
    close(mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, cache, mapping, positions, table_of,
      { q_head_padded = MLA_HEADS }))
  end, MLA_N * (MLA_HEADS + 1) * 512, MLA_N * (MLA_HEADS * 512 * 4 + 512 * 2 + RECORD)
end)

case("rope_quantize_insert, q in place", function()
  local q, kv, cache, mapping, positions, table_of = mla_input()
  return function()
    mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, cache, mapping, positions, table_of, { q_inplace = true })
  end, MLA_N * (MLA_HEADS * 64 + 512), MLA_N * (MLA_HEADS * 64 * 4 + 512 * 2 + RECORD)
end)

case("kv_rope_quantize_insert", function()
  local _, kv, cache, mapping, positions, table_of = mla_input()
  return function() mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, mapping, positions, table_of) end,
    MLA_N * 512, MLA_N * (512 * 2 + RECORD)
end)

case("mla.dequantize_cache", function()
  local _, kv, cache, mapping, positions, table_of = mla_input()
  mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, mapping, positions, table_of)
  return function() close(mla.dequantize_cache(cache, mapping)) end, MLA_N * 512, MLA_N * (512 * 2 + RECORD)
end)

case("rope_table", function()
  return function() close(nibble.rope_table(MLA_N, ON)) end, MLA_N * 64, MLA_N * 64 * 4
end)

for _, kind in ipairs { { "uint8", "uint8", 1, 1 }, { "float32", "bfloat16", 4, 2 }, { "bfloat16", "float32", 2, 4 },
                        { "float32", "float8_e4m3fn", 4, 1 }, { "float16", "float32", 2, 4 } } do
  case(("copy %s to %s"):format(kind[1], kind[2]), function()
    local source = kind[1] == "uint8" and nibble.full(VALUES, 7, on "uint8") or normal(kind[1], 1, VALUES)
    local destination = nibble.zeros(VALUES, on(kind[2]))
    return function() destination:copy(source) end, VALUES, VALUES * (kind[3] + kind[4])
  end)
end

case("copy bfloat16, heads and tokens exchanged", function()
  local source = normal("bfloat16", 1, N, HEADS, DIM):permute(2, 1, 3)
  local destination = nibble.zeros(HEADS, N, DIM, on "bfloat16")
  return function() destination:copy(source) end, VALUES, VALUES * 4
end)

case("fill", function()
  local t = nibble.zeros(VALUES, on "float32")
  return function() t:fill(1) end, VALUES, VALUES * 4
end)

case("randn float32", function()
  return function() close(nibble.randn(VALUES, { device = "cpu", seed = 1 })) end, VALUES, VALUES * 4
end)

---------------------------------------------------------------------------------------------------------- measuring

local function median(list)
  table.sort(list)
  local middle = (#list + 1) // 2
  return #list % 2 == 1 and list[middle] or (list[middle] + list[middle + 1]) / 2
end

local function measure(stream, entry, bar)
  local work, elements, bytes = entry.make()
  -- A copy of n bytes moves 2n bytes, reads and writes. Fill both tensors first: untouched memory has no pages.
  local source, destination = nibble.full(bytes // 2, 7, on "uint8"), nibble.full(bytes // 2, 1, on "uint8")
  local function copy() destination:copy(source) end
  local function time(fn)
    local from <close> = stream:record()
    fn()
    local to <close> = stream:record()
    return from:elapsed(to)
  end
  for _ = 1, 2 do
    time(work)
    time(copy)
  end
  local works, shares = {}, {}
  for i = 1, opts.repeats do
    works[i] = time(work)
    shares[i] = time(copy) / works[i]
    bar:step(1, entry.name)
  end
  stream:synchronize()
  return {
    name = entry.name, elements = elements, bytes = bytes, rate = elements / median(works) * 1e3 / threads,
    share = median(shares),
  }
end

local stream = nibble.stream(ON)
local chosen = {}
for _, entry in ipairs(cases) do
  if not opts.only or entry.name:find(opts.only, 1, true) then chosen[#chosen + 1] = entry end
end
local results = {}
do
  local bar <close> = progress.start("measuring", #chosen * opts.repeats)
  for i, entry in ipairs(chosen) do
    results[i] = stream:scope(measure, stream, entry, bar)
    collectgarbage()
  end
end

if opts.json then
  local parts = {}
  for i, r in ipairs(results) do
    parts[i] = ('    {"operation": "%s", "elements": %d, "bytes": %d, "elements_per_second_per_thread": %.4g, '
      .. '"memcpy_share": %.4f}'):format(r.name, r.elements, r.bytes, r.rate, r.share)
  end
  print(('{\n  "threads": %d,\n  "repeats": %d,\n  "quick": %s,\n  "results": [\n%s\n  ]\n}'):format(threads,
    opts.repeats,
    opts.quick, table.concat(parts, ",\n")))
elseif opts.csv then
  print("operation,elements,bytes,elements_per_second_per_thread,memcpy_share,threads")
  for _, r in ipairs(results) do
    print(('"%s",%d,%d,%.4g,%.4f,%d'):format(r.name, r.elements, r.bytes, r.rate, r.share, threads))
  end
else
  print(("%d threads, median of %d%s"):format(threads, opts.repeats, opts.quick and "; --quick: caches, not memory"
    or ""))
  print(("%-42s %12s %10s %22s %12s"):format("operation", "elements", "MB moved", "Melem/s per thread", "of a memcpy"))
  for _, r in ipairs(results) do
    print(("%-42s %12d %10.2f %22.1f %10.1f %%"):format(r.name, r.elements, r.bytes / 1e6, r.rate / 1e6, r.share * 100))
  end
end
