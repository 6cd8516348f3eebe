-- A decode loop of a language model's server over NVFP4 KV caches, checked byte for byte.
--
-- Requests of different lengths are prefilled with one append each; then every decode step appends one token to each running
-- request, dequantizes all of them (append -> dequantize) and makes the E4M3 copy that attention kernels read (append ->
-- swizzle V's scales -> materialize). The step is captured once per padded batch size and replayed with new tokens, slots,
-- tables and lengths. Requests leave and join meanwhile, so that rows of the batch are padding and pages are used again.
--
-- After each step every tensor is compared with what nibble.reference says it must hold, all bytes, written or not, and
-- with a second set of caches on which the same steps run without a graph.
local HELP = [[
Usage: nibble scripts/scenarios/decode.lua [options]      (or lua5.4 scripts/scenarios/decode.lua)

Prefill, then decode steps as a captured graph over NVFP4 KV caches; every byte is compared with an eager run and with
the plain Lua reference. The input is K and V of a small trained transformer (spec/data/real).

  --device NAME       cpu, cuda:0, ... (default: the best there is, or NIBBLE_DEVICE)
  --requests N        requests in all (8)
  --steps N           decode steps (64)
  --page-size N       tokens a page (16)
  --layout NAME       NHD or HND (HND)
  --page-layout NAME  sequential, shuffled, fragmented or ring (fragmented): the order in which pages are handed out
  --seed N            of lengths, pages and random tokens (1)
  --random            random tokens instead, two layers, of any shape:
    --tokens N          tokens that requests are slices of (320)
    --heads N           KV heads (4)
    --head-dim N        a multiple of 16 (64); materialize also needs a multiple of 64, and --page-size a multiple of 4
    --dtype NAME        bfloat16 or float16 (bfloat16)
  --plant             self-test: flips one bit in a cache halfway; the check must find and name it
  --help

Exit status: 0 all equal, 1 a byte differs or something failed, 2 bad usage.]]

local here = debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$") or "."
local root = here .. "/../.."
package.path = root .. "/scripts/?.lua;" .. package.path
package.cpath = package.cpath .. ";" .. root .. "/build/release/?.so"

local function leave(status, message)
  if message then io.stderr:write("decode.lua: ", message, "\n") end
  os.exit(status, true)
end

local options = require "nibble.options"
local opts, given = options.parse(arg or {}, {
  device = {}, requests = { 8, min = 1 }, steps = { 64, min = 1 }, ["page-size"] = { 16, min = 1 }, seed = { 1 },
  layout = { "HND", "NHD" }, ["page-layout"] = { "fragmented", "sequential", "shuffled", "ring" },
  random = { false }, tokens = { 320, min = 2 }, heads = { 4, min = 1 }, ["head-dim"] = { 64, min = 16 },
  dtype = { "bfloat16", "float16" }, plant = { false }, help = { false },
})
if not opts then leave(2, given) end
if opts.help then
  print(HELP)
  leave(0)
end
for _, name in ipairs { "tokens", "heads", "head-dim", "dtype" } do
  if given[name] and not opts.random then leave(2, ("--%s needs --random"):format(name)) end
end
if opts["head-dim"] % 16 ~= 0 then leave(2, "--head-dim: expected a multiple of 16, got " .. opts["head-dim"]) end
if opts.steps >= opts.tokens then
  leave(2, ("--steps: expected fewer than the %d tokens of the input, got %d"):format(opts.tokens, opts.steps))
end

local loaded, nibble = pcall(require, "nibble")
if not loaded then
  leave(1, "cannot load the module nibble (scripts/run builds it): " .. tostring(nibble):match("[^\n]*"))
end
local pages, show = require "nibble.pages", require "nibble.show"
local progress, reference = require "nibble.progress", require "nibble.reference"
local check_class = require "scenarios.decode_check"
local device, reason = nibble.device(opts.device)
if not device then leave(2, ("%s: %s"):format(opts.device and "--device" or "NIBBLE_DEVICE", reason)) end

--------------------------------------------------------------------------------------------------------------- input

-- K and V of some layers, [tokens, heads, head_dim] each.
local function load_real()
  local directory = root .. "/spec/data/real/"
  local chunk, message = loadfile(directory .. "case.lua", "t", {})
  if not chunk then leave(1, message) end
  local case = chunk()
  local input = {
    source = "spec/data/real, K and V of a trained transformer",
    tokens = case.tokens, heads = case.kv_heads, dim = case.head_dim, dtype = case.dtype, layers = {},
  }
  for l, layer in ipairs(case.layers) do
    input.layers[l] = { name = "layer " .. layer.layer }
    for kv, file in ipairs { layer.k, layer.v } do
      local t, why = nibble.load(directory .. file, { dtype = case.dtype, device = "cpu" })
      if not t then leave(1, why) end
      input.layers[l][kv] = t
    end
  end
  return input
end

local function make_random()
  local input = {
    source = "random, seed " .. opts.seed,
    tokens = opts.tokens, heads = opts.heads, dim = opts["head-dim"], dtype = opts.dtype, layers = {},
  }
  for l = 1, 2 do
    input.layers[l] = { name = "layer " .. l - 1 }
    for kv = 1, 2 do
      input.layers[l][kv] = nibble.randn({ input.tokens, input.heads, input.dim },
        { dtype = opts.dtype, seed = opts.seed * 4 + l * 2 + kv, device = "cpu" })
    end
  end
  return input
end

-- Who runs when. Of four requests one stays from the first step to the last, two leave early, one joins late.
local function make_schedule(tokens)
  local random, requests, taken = pages.generator(opts.seed), {}, {}
  local steps = opts.steps
  local longest = math.max(1, math.min(tokens - steps, tokens * 7 // 20))
  for i = 1, opts.requests do
    local start, stop = 1, steps
    if i % 4 == 0 then
      start = math.min(steps, 2 + random(math.max(1, steps // 2)))
    elseif i % 4 ~= 1 then
      stop = math.max(1, steps - 1 - random(math.max(1, steps // 2)))
    end
    local prompt
    for _ = 1, 50 do -- lengths differ as long as there are enough of them
      prompt = 1 + random(longest)
      if not taken[prompt] then break end
    end
    taken[prompt] = true
    local total = prompt + stop - start + 1
    requests[i] = { id = i, start = start, stop = stop, prompt = prompt, total = total, first = random(tokens - total + 1) }
  end
  return requests
end

local function bucket_of(rows)
  local bucket = 1
  while bucket < rows do bucket = bucket * 2 end
  return bucket
end

---------------------------------------------------------------------------------------------------- the work of a step

-- The shapes that the scenario's parts share. `fill` is every byte of a pool that nothing has written yet, so that a byte
-- too many shows.
local function make_config(input, requests)
  local c = {
    fill = 0xA5, page_padding = 64, sf_page_padding = 16,
    heads = input.heads, dim = input.dim, dtype = input.dtype, layout = opts.layout, page_size = opts["page-size"],
    batch = bucket_of(#requests), max_len = 0, num_pages = 1,
  }
  for _, request in ipairs(requests) do
    c.max_len = math.max(c.max_len, request.total)
    c.num_pages = c.num_pages + (request.total + c.page_size - 1) // c.page_size
  end
  c.max_pages = (c.max_len + c.page_size - 1) // c.page_size
  c.materialize = c.dim % 64 == 0 and c.page_size % 4 == 0
  return c
end

-- One set of caches and outputs; `graph` and `eager` have one each.
local function make_set(c, input, numbers)
  local set = { layers = {} }
  for l in ipairs(input.layers) do
    local pool = pages.caches {
      num_pages = c.num_pages, page_size = c.page_size, num_kv_heads = c.heads, head_dim = c.dim, kv_layout = c.layout,
      page_padding = c.page_padding, sf_page_padding = c.sf_page_padding, fill = c.fill, device = device,
    }
    local layer = { pool = pool, data = pool.paged_kv_cache, sf = pool.kv_cache_sf, out = {}, scales = {}, tables = {} }
    for kv = 1, 2 do
      layer.out[kv] = nibble.full({ c.batch, c.max_len, c.heads, c.dim }, -1, { dtype = c.dtype, device = device })
      -- The global scale that puts the largest input on 448, the largest E4M3 number: the copy in E4M3 does not saturate.
      -- The graph reads it from the device, the eager run gets a number: both must come to the same.
      local amax = input.layers[l][kv]:amax()
      local g = reference.f32((amax > 0 and amax or 1) / 448)
      layer.scales[kv] = nibble.full({ 1 }, g, { dtype = "float32", device = device })
      layer.scales[kv + 2] = numbers and g or layer.scales[kv]
    end
    if c.materialize then
      layer.interleaved = layer.sf[2]:clone()
      layer.fp8 = nibble.full({ c.num_pages, 2, c.heads, c.page_size, c.dim }, -1,
        { dtype = "float8_e4m3fn", device = device })
    end
    set.layers[l] = layer
  end
  return set
end

local function make_static(c, input)
  local function zeros(dtype, ...) return nibble.zeros({ ... }, { dtype = dtype, device = device }) end
  local static = {
    rows = {}, slot_mapping = zeros("int64", c.batch), seq_lens = zeros("int32", c.batch),
    block_tables = zeros("int32", c.batch, c.max_pages), kv_page_indptr = zeros("int32", c.batch + 1),
  }
  for l in ipairs(input.layers) do
    static.rows[l] = { zeros(c.dtype, c.batch, c.heads, c.dim), zeros(c.dtype, c.batch, c.heads, c.dim) }
  end
  return static
end

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

-- The decode step on the first `bucket` rows of the static inputs: what a graph captures, and what the eager run calls.
-- Every layer's two branches, after its append, are independent of each other: the second one runs on `side`.
local function step_work(c, set, static, bucket, main, side)
  local function first(t, n) return t:narrow(1, 1, n or bucket) end
  local function hnd(t) return c.layout == "HND" and t or t:permute(1, 3, 2, 4) end
  for l, layer in ipairs(set.layers) do
    append(first(static.rows[l][1]), first(static.rows[l][2]), first(static.slot_mapping), layer.data, layer.sf,
      layer.scales[3], layer.scales[4], c.layout)
    if c.materialize then side:wait(main:record()) end
    nibble.quantization.nvfp4_kv_dequantize_paged(layer.data, layer.sf, first(static.block_tables), first(static.seq_lens),
      layer.scales[1], layer.scales[2], first(layer.out[1]), first(layer.out[2]), c.layout)
    if c.materialize then
      side:scope(function()
        nibble.quantization.swizzle_v_scales(layer.sf[2], c.layout, { out = layer.interleaved })
        local _, fp8_tables = nibble.quantization.nvfp4_kv_materialize_fp8(hnd(layer.data[1]), hnd(layer.data[2]),
          hnd(layer.sf[1]), hnd(layer.interleaved), first(static.block_tables), first(static.seq_lens), c.max_len,
          { out = layer.fp8, kv_page_indptr = first(static.kv_page_indptr, bucket + 1), num_pages = c.num_pages - 1 })
        layer.tables[bucket] = fp8_tables
      end)
    end
  end
  if c.materialize then main:wait(side:record()) end
end

-- Bytes that one step reads and writes: padding rows cost nothing.
local function step_bytes(c, layers, active)
  local tokens, used = 0, 0
  for _, request in ipairs(active) do
    tokens, used = tokens + request.place.length, used + #request.place.pages
  end
  local value, packed = c.heads * c.dim * 2, c.heads * (c.dim // 2 + c.dim // 16)
  local sum = #active * 2 * (value + packed) + tokens * 2 * (packed + value)
  if c.materialize then
    sum = sum + 2 * c.num_pages * c.page_size * c.heads * (c.dim // 16)
    sum = sum + used * c.page_size * 2 * (packed + c.heads * c.dim) + 2 * c.page_size * c.heads * c.dim
  end
  return sum * layers
end

-------------------------------------------------------------------------------------------------------------- report

-- --plant: flips a code's bit in the middle of the last running request.
local function plant(c, input, graph, active, step)
  local l, request = #graph.layers, active[#active]
  local position, head, dimension = request.place.length // 2, c.heads - 1, c.dim // 2 + 1
  local page, entry = request.place.pages[position // c.page_size + 1], position % c.page_size
  local index = { page + 1, entry + 1, head + 1, dimension // 2 + 1 }
  if c.layout == "HND" then index[2], index[3] = index[3], index[2] end
  local cache = graph.layers[l].data[1]
  cache[index] = cache[index] ~ 0x10 -- dimension is odd: the upper nibble
  print(("planted after step %d: %s K cache: page %d, entry %d, head %d, dimension %d"):format(
    step, input.layers[l].name, page, entry, head, dimension))
end

local bold = show.use_color() and function(text) return "\27[1m" .. text .. "\27[0m" end or function(text) return text end

local function report_phases(phases)
  print(bold(("%-34s %6s %11s %11s %10s"):format("phase", "calls", "ms in all", "ms a call", "MB moved")))
  for _, phase in ipairs(phases) do
    print(("%-34s %6d %11.2f %11.3f %10s"):format(phase.name, phase.calls, phase.ms, phase.ms / math.max(phase.calls, 1),
      phase.bytes and ("%.2f"):format(phase.bytes / 1e6) or "-"))
  end
end

-- The error of every element that was stored, in half steps of E2M1 at its block's scale. Returns false when one is past it.
local function report_errors(c, input, graph, check)
  local ratios, fine, underflow = {}, true, 0
  print(bold "quantization error: the largest, in half steps of E2M1 at the block's scale (bound: 1); rms relative to the input's")
  local titles = {}
  for h = 1, math.min(c.heads, 4) do titles[h] = ("%15s"):format("head " .. h - 1) end
  print("             " .. table.concat(titles, "   "))
  for l, layer in ipairs(input.layers) do
    for kv, name in ipairs { "K", "V" } do
      local values, g = reference.values(layer[kv]), graph.layers[l].scales[kv]:item()
      local cells = {}
      for h = 0, c.heads - 1 do
        local worst, errors, squares = 0, 0.0, 0.0
        for t in pairs(check.used) do
          local row, base = check.rows[l][kv][t], (t * c.heads + h) * c.dim
          for d = 0, c.dim - 1 do
            local scale_byte = row.sf[h]:byte(d // 16 + 1)
            local code = row.data[h]:byte(d // 2 + 1) >> d % 2 * 4 & 15
            local unit, x = reference.decode(scale_byte, "float8_e4m3fn") * g, values[base + d + 1]
            local err = reference.e2m1[code] * unit - x
            errors, squares = errors + err * err, squares + x * x
            if scale_byte < 8 then -- a subnormal scale is too coarse for the bound
              underflow = underflow + 1
            else
              local ratio = err / (show.half_step(x / unit) * unit)
              ratios[#ratios + 1] = ratio
              worst = math.max(worst, math.abs(ratio))
            end
          end
        end
        fine = fine and worst <= 1 + 1e-6 -- x * (1 / unit) is rounded twice before it is compared with a tie
        cells[h + 1] = ("%.4f %6.2f %%"):format(worst, 100 * math.sqrt(errors / math.max(squares, 1e-300)))
      end
      for h = 1, c.heads, 4 do
        print(("  %-10s %s"):format(h == 1 and layer.name .. " " .. name or "  heads " .. h - 1 .. "..",
          table.concat(cells, "   ", h, math.min(h + 3, c.heads))))
      end
    end
  end
  print(show.histogram(ratios, { bins = 12, low = -1, high = 1, title = "errors, in half steps" }))
  if underflow > 0 then print(("  %d elements have a subnormal scale and no bound"):format(underflow)) end
  return fine
end

---------------------------------------------------------------------------------------------------------------- main

local function describe(c, input, requests, graphs)
  local about = device
  for _, info in ipairs(nibble.devices()) do
    if info.name == device then
      about = ("%s (%s%s)"):format(device, info.description, info.processors and (", %d %s"):format(info.processors,
        device == "cpu" and "threads" or "multiprocessors") or "")
    end
  end
  local buckets, largest = {}, 0
  for bucket in pairs(graphs) do buckets[#buckets + 1] = bucket end
  table.sort(buckets)
  local kinds, list = {}, {}
  for _, node in ipairs(graphs[buckets[#buckets]]:nodes()) do
    largest = largest + 1
    if not kinds[node.name] then list[#list + 1] = node.name end
    kinds[node.name] = (kinds[node.name] or 0) + 1
  end
  for i, name in ipairs(list) do list[i] = ("%d %s"):format(kinds[name], name) end
  local shortest, longest = math.huge, 0
  for _, request in ipairs(requests) do
    shortest, longest = math.min(shortest, request.prompt), math.max(longest, request.prompt)
  end
  print(bold "NVFP4 decode: prefill, then a captured step replayed with new tokens, slots, tables and lengths")
  print("device    " .. about)
  print(("input     %s: %d layers, %d tokens, %d KV heads x %d, %s"):format(input.source, #input.layers, input.tokens,
    c.heads, c.dim, c.dtype))
  print(("requests  %d, prompts of %d to %d tokens; %d decode steps, at most %d tokens a request"):format(#requests, shortest,
    longest, opts.steps, c.max_len))
  print(("caches    %d pages of %d tokens, %s, handed out %s; %d bytes between pages, %d between pages of scales"):format(
    c.num_pages, c.page_size, c.layout, opts["page-layout"], c.page_padding, c.sf_page_padding))
  print(("graphs    for batches padded to %s; %d nodes: %s"):format(table.concat(buckets, ", "), largest,
    table.concat(list, ", ")))
  if not c.materialize then
    print("          no materialize: it needs head_dim % 64 == 0 and page_size % 4 == 0")
  end
  print()
end

local function run(input, main, side)
  local requests = make_schedule(input.tokens)
  local c = make_config(input, requests)
  local graph_set, eager_set, static = make_set(c, input, false), make_set(c, input, true), make_static(c, input)
  local allocator = pages.allocator {
    num_pages = c.num_pages, page_size = c.page_size, layout = opts["page-layout"], seed = opts.seed, reserved = 1,
  }
  local host_start = os.clock()
  local check = check_class.new(c, input, graph_set, eager_set)
  local host_ms = (os.clock() - host_start) * 1e3

  local graphs = {}
  for step = 1, opts.steps do
    local running = 0
    for _, request in ipairs(requests) do
      if request.start <= step and step <= request.stop then running = running + 1 end
    end
    local bucket = bucket_of(running)
    graphs[bucket] = graphs[bucket] or main:capture(function() step_work(c, graph_set, static, bucket, main, side) end)
  end
  describe(c, input, requests, graphs)

  -- Device time: events around each piece of work, read at the end.
  local phases = {
    { name = "prefill, both sets (append)" }, { name = "new inputs into the static tensors" },
    { name = "decode step, graph replay" }, { name = "decode step, eager" },
  }
  for _, phase in ipairs(phases) do phase.calls, phase.ms, phase.bytes, phase.events = 0, 0, 0, {} end
  local function timed(phase, bytes, fn)
    local from = main:record()
    fn()
    phase.events[#phase.events + 1] = { from, main:record() }
    phase.calls, phase.bytes = phase.calls + 1, phase.bytes + bytes
  end

  -- Input rows as bytes; padding rows are NaN, so that they cannot go anywhere unnoticed.
  local row_size = c.heads * c.dim * 2
  local nan_row, input_bytes = ("\xFF\x7F"):rep(c.heads * c.dim), {}
  for l, layer in ipairs(input.layers) do input_bytes[l] = { layer[1]:bytes(), layer[2]:bytes() } end
  local function rows_tensor(l, kv, tokens, size, where)
    local rows = {}
    for i = 1, size do
      rows[i] = tokens[i] and input_bytes[l][kv]:sub(tokens[i] * row_size + 1, (tokens[i] + 1) * row_size) or nan_row
    end
    return nibble.from_bytes(table.concat(rows), { size, c.heads, c.dim }, { dtype = c.dtype, device = where })
  end

  local function prefill(starting)
    local tokens, slots = {}, {}
    for _, request in ipairs(starting) do
      request.place = assert(allocator:allocate(request.prompt))
      for position, slot in ipairs(allocator:slots(request.place)) do
        tokens[#tokens + 1], slots[#slots + 1] = request.first + position - 1, slot
        check:append(request, position - 1)
      end
    end
    local size = (#tokens + 15) // 16 * 16
    for i = #tokens + 1, size do slots[i] = -1 end
    local mapping = nibble.tensor(slots, { dtype = "int32", device = device })
    for l in ipairs(input.layers) do
      local k, v = rows_tensor(l, 1, tokens, size, device), rows_tensor(l, 2, tokens, size, device)
      timed(phases[1], #tokens * 4 * (row_size + c.heads * (c.dim // 2 + c.dim // 16)), function()
        for _, set in ipairs { graph_set, eager_set } do
          local layer = set.layers[l]
          append(k, v, mapping, layer.data, layer.sf, layer.scales[3], layer.scales[4], c.layout)
        end
      end)
    end
  end

  local active, padding, problem = {}, 0, nil
  local bar <close> = progress.start("decoding", opts.steps)
  for step = 1, opts.steps do
    local starting, staying = {}, {}
    for _, request in ipairs(active) do
      if request.stop < step then allocator:free(request.place) else staying[#staying + 1] = request end
    end
    for _, request in ipairs(requests) do
      if request.start == step then starting[#starting + 1] = request end
    end
    if #starting > 0 then prefill(starting) end
    active = table.move(starting, 1, #starting, #staying + 1, staying)

    local places, tokens = {}, {}
    for b, request in ipairs(active) do
      assert(allocator:append(request.place, 1))
      places[b], tokens[b] = request.place, request.first + request.place.length - 1
      check:append(request, request.place.length - 1)
    end
    local bucket = bucket_of(#active)
    padding = padding + bucket - #active
    local batch = allocator:batch(places, {
      batch_size = c.batch, max_pages = c.max_pages, new_tokens = 1, num_slots = c.batch,
    })

    local host, input_size = pages.tensors(batch, { device = "cpu" }), 0
    host.rows = {}
    for l in ipairs(input.layers) do
      host.rows[l] = { rows_tensor(l, 1, tokens, c.batch, "cpu"), rows_tensor(l, 2, tokens, c.batch, "cpu") }
      input_size = input_size + 4 * c.batch * row_size
    end
    timed(phases[2], input_size, function()
      for _, name in ipairs { "slot_mapping", "seq_lens", "block_tables", "kv_page_indptr" } do
        static[name]:copy(host[name])
      end
      for l in ipairs(input.layers) do
        for kv = 1, 2 do static.rows[l][kv]:copy(host.rows[l][kv]) end
      end
    end)
    local bytes = step_bytes(c, #input.layers, active)
    timed(phases[3], bytes, function() graphs[bucket]:replay() end)
    timed(phases[4], bytes, function() step_work(c, eager_set, static, bucket, main, side) end)
    main:synchronize()

    host_start = os.clock()
    if opts.plant and step == (opts.steps + 1) // 2 then plant(c, input, graph_set, active, step) end
    check:step(active, batch)
    problem = check:compare(bucket)
    bar:step()
    if not problem and step == opts.steps then
      bar:close()
      local function first(t, n) return t:narrow(1, 1, n or bucket) end
      problem = check:finish {
        block_tables = first(static.block_tables), seq_lens = first(static.seq_lens),
        kv_page_indptr = first(static.kv_page_indptr, bucket + 1),
      }
    end
    host_ms = host_ms + (os.clock() - host_start) * 1e3
    if problem then
      problem = ("step %d: %s"):format(step, problem)
      break
    end
  end
  bar:close()

  for _, phase in ipairs(phases) do
    for _, pair in ipairs(phase.events) do phase.ms = phase.ms + pair[1]:elapsed(pair[2]) end
  end
  phases[5] = { name = "checks in Lua (processor time)", calls = phases[3].calls, ms = host_ms }
  report_phases(phases)
  if problem then return problem end
  print()
  local fine = report_errors(c, input, graph_set, check)
  print()
  local names, places = {}, {}
  for i, request in ipairs(active) do
    names[i], places[i] = ("request %d"):format(request.id), request.place
  end
  print(show.page_table(allocator, places, { names = names }))
  print()
  if not fine then return "a quantization error is past its bound" end
  print(("%s: after each of %d steps every byte is the reference's and the eager run's (%.0f MB compared); "
    .. "%d padding rows wrote nothing, page 0 is untouched"):format(bold "ok", opts.steps, check.compared / 1e6, padding))
end

local main, side = nibble.stream { device = device }, nibble.stream { device = device }
local problem = main:scope(run, opts.random and make_random() or load_real(), main, side)
if problem then print(bold "FAILED at " .. problem) end
leave(problem and 1 or 0)
