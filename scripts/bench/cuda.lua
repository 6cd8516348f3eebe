-- The speed of the operations on a GPU: the bandwidth relative to a plain copy, the time of small operations in a
-- graph, and the host's time for a call from Lua.
--
-- Each operation is captured over several sets of inputs, which together exceed the L2 cache, and replayed. Its replays
-- alternate with those of a captured copy of uint8 tensors (16 bytes per thread) that moves as many bytes. The relative
-- bandwidth is the median of the pairs' ratios. 100 % is the limit of the memory if each byte is moved once.
--
-- The host's time is that of an eager call while the queue is not full. Its ratio is to a bare cuLaunchKernel with as
-- many bytes of parameters, called from C alternately (launch.c, built if the CUDA headers are installed; without it
-- there is no ratio).
local HELP = [[
Usage: nibble scripts/bench/cuda.lua [options]      (or lua5.4 scripts/bench/cuda.lua)

  --device NAME  the GPU (default: cuda:0)
  --tokens N     tokens of the large cases (default: 32768)
  --repeats N    timings of each case, at least 20 (default: 21); the median is shown
  --only TEXT    only cases whose name contains TEXT
  --csv          comma-separated values
  --json         JSON
  --help]]

local here = debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$") or "."
local opts, fail = dofile(here .. "/begin.lua")("cuda.lua", HELP, {
  device = {}, tokens = { 32768, min = 1024 }, repeats = { 21, min = 20 }, only = {},
  csv = { false }, json = { false },
})
local nibble = require "nibble"
opts.device = opts.device or "cuda:0"
local usable, reason = nibble.available(opts.device)
if not usable or not opts.device:find("^cuda") then fail(("%s: %s"):format(opts.device, reason or "not a GPU")) end

local pages, progress = require "nibble.pages", require "nibble.progress"
local page, quantization, mla = nibble.page, nibble.quantization, nibble.mla
local DEVICE = opts.device
local append = page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

local function on(dtype) return { dtype = dtype, device = DEVICE } end
local function normal(dtype, seed, ...)
  return nibble.randn(..., { dtype = dtype, device = DEVICE, seed = seed })
end
local function scalar(value) return nibble.full({ 1 }, value, on "float32") end

-- A case is a name, the number of sets, a function that creates a set (the work and the bytes that it must move), and
-- the operation.
local cases = {}
local function case(name, sets, make, operation)
  cases[#cases + 1] = { name = name, sets = sets, make = make, operation = operation }
end

-- K and V of `n` tokens, a pool for them, and shuffled slots. `o`: heads, dim, page_size, layout, dtype, slots,
-- padding.
local function paged(n, seed, o)
  local heads, dim, page_size = o.heads or 8, o.dim or 128, o.page_size or 16
  local k, v
  if o.strided then -- one row of K, then one of V, as a projection leaves them
    local both = normal(o.dtype or "bfloat16", seed, { n, 2, heads, dim })
    k, v = both:select(2, 1), both:select(2, 2)
  else
    k, v = normal(o.dtype or "bfloat16", seed, { n, heads, dim }),
      normal(o.dtype or "bfloat16", seed + 1, { n, heads, dim })
  end
  local num_pages = (n + page_size - 1) // page_size + 8 -- requests end inside of pages
  local pool = pages.caches {
    num_pages = num_pages, page_size = page_size, num_kv_heads = heads, head_dim = dim, kv_layout = o.layout or "NHD",
    page_padding = o.padding and 256, sf_page_padding = o.padding and 64, device = DEVICE,
  }
  local slots = nibble.randperm(num_pages * page_size, { dtype = o.slots or "int64", device = DEVICE, seed = seed })
  local values = n * heads * dim
  return k, v, slots:narrow(1, 1, n), pool, scalar(0.5), values, values // 2 + values // 16, num_pages
end

local function append_case(name, n, sets, o)
  case(name, sets, function(seed)
    local k, v, slots, pool, g, values, packed = paged(n, seed, o)
    return function()
      append(k, v, slots, pool.paged_kv_cache, pool.kv_cache_sf, g, g, o.layout or "NHD", o.four_over_six)
    end,
      2 * (2 * values + packed) + n * 8
  end, "append")
end

local function tables_of(n, page_size, num_pages, seed)
  local requests, lengths = math.min(8, n), {}
  for i = 1, requests do lengths[i] = n // requests end
  return pages.tensors(assert(pages.plan {
    lengths = lengths, page_size = page_size, num_pages = num_pages, layout = "shuffled", seed = seed,
  }), { device = DEVICE }), requests, n // requests
end

local function dequantize_case(name, n, sets, o)
  case(name, sets, function(seed)
    local k, v, slots, pool, g, values, packed, num_pages = paged(n, seed, o)
    append(k, v, slots, pool.paged_kv_cache, pool.kv_cache_sf, g, g, o.layout or "NHD")
    local t, requests, length = tables_of(n, o.page_size or 16, num_pages, seed)
    local dtype = o.dtype or "bfloat16"
    local shape = { requests, length, o.heads or 8, o.dim or 128 }
    local out_k, out_v = nibble.zeros(shape, on(dtype)), nibble.zeros(shape, on(dtype))
    return function()
      quantization.nvfp4_kv_dequantize_paged(pool.paged_kv_cache, pool.kv_cache_sf, t.block_tables, t.seq_lens, g, g,
        out_k, out_v,
        o.layout or "NHD")
    end, 2 * (2 * values + packed)
  end, "dequantize")
end

local function materialize_case(name, n, sets, o)
  o.layout = "HND"
  case(name, sets, function(seed)
    local k, v, slots, pool, g, values, packed, num_pages = paged(n, seed, o)
    append(k, v, slots, pool.paged_kv_cache, pool.kv_cache_sf, g, g, "HND")
    local t, _, length = tables_of(n, o.page_size or 16, num_pages, seed)
    local cache, sf = pool.paged_kv_cache, pool.kv_cache_sf
    local k_cache, v_cache, k_sf, v_sf = cache[1], cache[2], sf[1], sf[2]
    local opts_of_call = o.out and {
      out = quantization.nvfp4_kv_materialize_fp8(k_cache, v_cache, k_sf, v_sf, t.block_tables, t.seq_lens, length),
    }
    return function()
      quantization.nvfp4_kv_materialize_fp8(k_cache, v_cache, k_sf, v_sf, t.block_tables, t.seq_lens, length,
        opts_of_call)
    end, 2 * (values + packed)
  end, "materialize")
end

local function rope_case(name, n, sets, heads, rope_opts)
  case(name, sets, function(seed)
    local q, kv = normal("bfloat16", seed, { n, heads, 512 }), normal("bfloat16", seed + 1, { n, 512 })
    local cache = nibble.zeros({ (n + 63) // 64, 64, 384 }, on "uint8")
    local slots = nibble.randperm((n + 63) // 64 * 64, { dtype = "int64", device = DEVICE, seed = seed }):narrow(1, 1,
      n)
    local positions, angles = nibble.arange(n, on "int64"), nibble.rope_table(n, { device = DEVICE })
    local q_bytes = n * heads * 4 * (rope_opts.q_inplace and 64 or rope_opts.q_head_padded and 512 or 0)
    return function() mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, cache, slots, positions, angles, rope_opts) end,
      q_bytes + n * (512 * 2 + 352 + 28 + 256)
  end, "rope_insert")
end

local N = opts.tokens
append_case("append", N, 2, {})
dequantize_case("dequantize", N, 2, {})
materialize_case("materialize", N, 2, {})
rope_case("rope insert, q padded", N // 4, 2, 8, { q_head_padded = 8 })
for _, variant in ipairs {
  { "strided rows", { strided = true } }, { "padded pages", { padding = true } }, { "float16", { dtype = "float16" } },
  { "HND", { layout = "HND" } }, { "int32 slots", { slots = "int32" } }, { "page size 1", { page_size = 1 } },
  { "head_dim 64", { dim = 64 } }, { "head_dim 256", { dim = 256 } }, { "4over6", { four_over_six = true } },
} do
  append_case("append, " .. variant[1], N, 2, variant[2])
end
for _, variant in ipairs {
  { "padded pages", { padding = true } }, { "float16", { dtype = "float16" } }, { "HND", { layout = "HND" } },
  { "page size 1", { page_size = 1 } }, { "head_dim 64", { dim = 64 } }, { "head_dim 256", { dim = 256 } },
} do
  dequantize_case("dequantize, " .. variant[1], N, 2, variant[2])
end
for _, variant in ipairs {
  { "padded pages", { padding = true } }, { "page size 4", { page_size = 4 } }, { "head_dim 64", { dim = 64 } },
  { "head_dim 256", { dim = 256 } },
} do
  materialize_case("materialize, " .. variant[1], N, 2, variant[2])
end
rope_case("rope insert, q in place", N, 2, 8, { q_inplace = true })
rope_case("rope insert, cache only", N * 2, 2, 1, {})
local large = #cases
append_case("append, 8 tokens", 8, 64, {})
dequantize_case("dequantize, 8 tokens", 8, 64, {})
materialize_case("materialize, 8 tokens", 8, 64, {})
materialize_case("materialize into out, 8 tokens", 8, 64, { out = true })
rope_case("rope insert, 8 tokens", 8, 64, 8, { q_head_padded = 8 })
rope_case("rope insert in place, 8 tokens", 8, 64, 8, { q_inplace = true })

---------------------------------------------------------------------------------------------------------- measuring

local stream = nibble.stream { device = DEVICE }

local function median(list)
  table.sort(list)
  local middle = (#list + 1) // 2
  return #list % 2 == 1 and list[middle] or (list[middle] + list[middle + 1]) / 2
end

-- The GPU's time for a replay. The host submits it during another one.
local function timed(graph)
  graph:replay()
  local from <close> = stream:record()
  graph:replay()
  local to <close> = stream:record()
  return from:elapsed(to)
end

local function measure(entry, bar)
  local works, copies, bytes = {}, {}, nil
  for i = 1, entry.sets do
    works[i], bytes = entry.make(10 * i)
    if entry.large then
      local source, target = nibble.full(bytes // 2, 7, on "uint8"), nibble.full(bytes // 2, 1, on "uint8")
      copies[i] = function() target:copy(source) end
    end
  end
  stream:synchronize()
  local function capture(list) return stream:capture(function() for _, work in ipairs(list) do work() end end) end
  local work, copy = capture(works), entry.large and capture(copies)
  for _ = 1, 3 do
    timed(work)
    if copy then timed(copy) end
  end
  local times, shares = {}, {}
  for i = 1, opts.repeats do
    times[i] = timed(work)
    shares[i] = copy and timed(copy) / times[i]
    bar:step(1, entry.name)
  end
  work:close()
  if copy then copy:close() end
  local ms = median(times)
  return {
    name = entry.name, bytes = bytes, share = copy and median(shares), microseconds = ms * 1e3 / entry.sets,
    gigabytes = bytes * entry.sets / ms * 1e-6,
  }
end

-- The host's microseconds for a call from Lua, and their ratio to those of a bare launch. Makes few calls at a time, so
-- that the driver's queue is never full. Runs last, since after many eager launches on several streams an H200 took up
-- to 0.2 us longer for each node of a graph.
local has_launch, launch = pcall(require, "bench_launch")
local function eager(entry)
  local bare <close> = has_launch and launch.open(tonumber(DEVICE:match("%d+$")), launch.bytes[entry.operation]) or nil
  local now = bare and launch.now or function() return os.clock() * 1e6 end
  local works, times, ratios = {}, {}, {}
  for i = 1, 16 do works[i] = entry.make(10 * i) end
  for i = 1, opts.repeats do
    stream:synchronize()
    local from = now()
    for _ = 1, 8 do for k = 1, #works do works[k]() end end
    times[i] = (now() - from) / (8 * #works)
    stream:synchronize()
    ratios[i] = bare and times[i] / bare:time(8 * #works)
  end
  return median(times), bare and median(ratios)
end

local results = {}
do
  local chosen = {}
  for i, entry in ipairs(cases) do
    entry.large = i <= large
    if not opts.only or entry.name:find(opts.only, 1, true) then chosen[#chosen + 1] = entry end
  end
  local bar <close> = progress.start("measuring", #chosen * opts.repeats)
  for i, entry in ipairs(chosen) do
    results[i] = stream:scope(measure, entry, bar)
    collectgarbage()
    collectgarbage()
  end
  for i, entry in ipairs(chosen) do
    if not entry.large then results[i].host, results[i].ratio = stream:scope(eager, entry) end
  end
end

if opts.json then
  local parts = {}
  for i, r in ipairs(results) do
    parts[i] = ('  {"case": "%s", "bytes": %d, "gigabytes_per_second": %.1f, "microseconds": %.3f%s%s%s}'):format(
      r.name, r.bytes,
      r.gigabytes, r.microseconds, r.share and (', "share_of_copy": %.4f'):format(r.share) or "",
      r.host and (', "host_microseconds": %.3f'):format(r.host) or "",
      r.ratio and (', "host_of_bare_launch": %.3f'):format(r.ratio) or "")
  end
  print("[\n" .. table.concat(parts, ",\n") .. "\n]")
elseif opts.csv then
  print("case,bytes,share_of_copy,gigabytes_per_second,microseconds,host_microseconds,host_of_bare_launch")
  for _, r in ipairs(results) do
    print(('"%s",%d,%s,%.1f,%.3f,%s,%s'):format(r.name, r.bytes, r.share and ("%.4f"):format(r.share) or "",
      r.gigabytes,
      r.microseconds, r.host and ("%.3f"):format(r.host) or "", r.ratio and ("%.3f"):format(r.ratio) or ""))
  end
else
  for _, info in ipairs(nibble.devices()) do
    if info.name == DEVICE then
      print(("%s (%s), %d tokens, medians of %d"):format(DEVICE, info.description, N, opts.repeats))
    end
  end
  local line = "%-32s %10s %10s %8s %14s %15s %15s"
  print(line:format("case", "MB a call", "of a copy", "GB/s", "us in a graph", "us host, eager", "x bare launch"))
  for _, r in ipairs(results) do
    print(line:format(r.name, ("%.2f"):format(r.bytes * 1e-6), r.share and ("%.1f %%"):format(100 * r.share) or "-",
      ("%.0f"):format(r.gigabytes), ("%.2f"):format(r.microseconds), r.host and ("%.2f"):format(r.host) or "-",
      r.ratio and ("%.2f"):format(r.ratio) or "-"))
  end
end
