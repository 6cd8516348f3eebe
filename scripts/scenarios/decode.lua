-- The decode loop of an LLM server with NVFP4 KV caches.
--
-- Requests of different lengths are prefilled with one append; then every step appends one token to each running
-- request, dequantizes all of them (append -> dequantize) and makes the E4M3 copy that attention kernels read (append
-- -> swizzle V's scales -> materialize). Requests leave and join, so that rows of the batch are padding and pages are
-- reused. There is a graph for each padded batch size; all graphs share the caches, the inputs and the outputs.

local nibble = require "nibble"

local root = (debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$") or ".") .. "/../.."

-- The layers of a safetensors file: tensors NAME.k and NAME.v [tokens, heads, head_dim], float32 ones rounded to
-- bfloat16.
local function load_safetensors(path)
  local entries, message = nibble.list(path)
  if not entries then return nil, message end
  local source, names = {}, {}
  for _, entry in ipairs(entries) do
    local name = entry.name:match("^(.*)%.k$")
    if name then names[#names + 1] = name end
  end
  -- layer.2 before layer.10
  local function key(name) return (name:gsub("%d+", function(n) return ("%08d"):format(n) end)) end
  table.sort(names, function(a, b) return key(a) < key(b) end)
  for l, name in ipairs(names) do
    source[l] = { name = name }
    for i, part in ipairs { ".k", ".v" } do
      local ok, t = pcall(nibble.load, path, { name = name .. part, device = "cpu" })
      if not ok then return nil, t end
      source[l][i] = t.dtype == "float32" and t:to("bfloat16") or t
    end
  end
  return source
end

-- The layers of a folder like spec/data/real, as its case.lua names them.
local function load_folder(folder)
  local chunk, message = loadfile(folder .. "/case.lua", "t", {})
  if not chunk then return nil, message end
  local case, source = chunk(), {}
  for l, layer in ipairs(case.layers) do
    source[l] = { name = "layer " .. layer.layer }
    for i, file in ipairs { layer.k, layer.v } do
      source[l][i], message = nibble.load(folder .. "/" .. file, { dtype = case.dtype, device = "cpu" })
      if not source[l][i] then return nil, message end
    end
  end
  return source
end

-- K and V of some layers, [tokens, heads, head_dim] each. `nil, message` when there are none in the input.
local function load_input(input)
  local folder = (input == "real" or input == "minilm") and root .. "/spec/data/" .. input
  local source, message = (input:find("%.safetensors$") and load_safetensors or load_folder)(folder or input)
  if not source then return nil, message end
  local first = source[1] and source[1][1]
  for _, layer in ipairs(source) do
    for i = 1, 2 do
      local t = layer[i]
      if t:dim() ~= 3 or t.dtype ~= first.dtype or t.dtype ~= "bfloat16" and t.dtype ~= "float16"
        or t.shape[1] ~= first.shape[1]
        or t.shape[2] ~= first.shape[2] or t.shape[3] % 16 ~= 0 or t.shape[3] ~= source[1][i].shape[3] then
        local expected = "expected K and V of all layers to be [tokens, heads, head_dim] of one float dtype, "
          .. "got %s {%s} in %s"
        return nil, expected:format(t.dtype, table.concat(t.shape, ", "), layer.name)
      end
    end
  end
  if not first then return nil, "expected tensors NAME.k and NAME.v, got none" end
  return source, folder and "spec/data/" .. input .. ", K and V of a trained transformer" or input
end

local function make_random(run)
  local p, source = run.p, {}
  for l = 1, 2 do
    local shape = { p.tokens, p.heads, p.head_dim }
    source[l] = { name = "layer " .. l - 1 }
    for i = 1, 2 do source[l][i] = run:randn(shape, { dtype = p.dtype, device = "cpu" }) end
  end
  return source, "random, seed " .. run.seed
end

-- Who runs when. Of four requests one stays from the first step to the last, two leave early, one joins late.
local function make_schedule(run, tokens)
  local requests, taken, steps = {}, {}, run.steps
  local longest = math.max(1, math.min(tokens - steps, tokens * 7 // 20))
  for i = 1, run.p.requests do
    local start, stop = 1, steps
    if i % 4 == 0 then
      start = math.min(steps, 2 + run.random(math.max(1, steps // 2)))
    elseif i % 4 ~= 1 then
      stop = math.max(1, steps - 1 - run.random(math.max(1, steps // 2)))
    end
    local prompt
    for _ = 1, 50 do -- lengths differ as long as there are enough of them
      prompt = 1 + run.random(longest)
      if not taken[prompt] then break end
    end
    taken[prompt] = true
    local total = prompt + stop - start + 1
    requests[i] = { start = start, stop = stop, prompt = prompt, total = total, first = run.random(tokens - total + 1) }
  end
  return requests
end

local function bucket_of(rows)
  local bucket = 1
  while bucket < rows do bucket = bucket * 2 end
  return bucket
end

-- A request's text: `count` neighbouring tokens of the input, from position `at` on.
local function text_of(plan, at, count)
  local text = {}
  for i = 1, count do text[i] = plan.first + at + i - 1 end
  return text
end

return {
  title = "NVFP4 decode: prefill, then a captured step replayed with new tokens, slots, tables and lengths",
  parameters = {
    requests = { 8, min = 1, help = "number of requests" },
    page_size = { 16, min = 1, help = "tokens per page" },
    layout = { "HND", "NHD", help = "layout of the caches" },
    page_layout = { "fragmented", "sequential", "shuffled", "ring", help = "the order in which pages are allocated" },
    input = { "real", "minilm", any = "a path",
      help = "K and V: a name in spec/data, a .safetensors file, or a folder with case.lua" },
    random = { false, help = "use random tokens and two layers instead, of any shape:" },
    tokens = { 320, min = 2, help = "tokens that requests are slices of (with --random)" },
    heads = { 4, min = 1, help = "KV heads (with --random)" },
    head_dim = { 64, min = 16, multiple = 16, help = "(with --random) materialize needs a multiple of 64" },
    dtype = { "bfloat16", "float16", help = "(with --random)" },
    ["4over6"] = { false, help = "append tries a second scale for each block" },
  },
  steps = { 64, min = 1 },
  errors = true,
  grid = {
    { steps = 4, random = true, tokens = 20, heads = 1, requests = 3 }, { steps = 12 },
    { steps = 6, requests = 3, input = "minilm" }, { steps = 12, layout = "NHD" },
      { steps = 12, page_size = 4, page_layout = "ring" },
    { steps = 20, requests = 13, page_layout = "shuffled", page_size = 64 }, { steps = 3, requests = 1 },
    { steps = 1, page_layout = "sequential" }, { steps = 6, requests = 3, ["4over6"] = true },
    { steps = 10, random = true, tokens = 50, heads = 3, head_dim = 128, dtype = "float16", layout = "NHD" },
    { steps = 8, random = true, tokens = 30, heads = 2, head_dim = 192, page_size = 8, requests = 5 },
    { steps = 10, random = true, tokens = 40, heads = 2, head_dim = 80 },
    { steps = 10, random = true, tokens = 40, heads = 1, head_dim = 16, page_size = 1 },
    { steps = 10, random = true, tokens = 40, heads = 2, page_size = 3, layout = "NHD" },
  },

  valid = function(p, given, steps)
    for _, name in ipairs { "tokens", "heads", "head_dim", "dtype" } do
      if given[name] and not p.random then return ("--%s needs --random"):format((name:gsub("_", "-"))) end
    end
    if given.input and p.random then return "--input and --random exclude each other" end
    local tokens = p.tokens
    if not p.random then
      local source, message = load_input(p.input)
      if not source then return "--input: " .. message end
      tokens = source[1][1].shape[1]
    end
    if steps >= tokens then
      return ("--steps: expected fewer than the %d tokens of the input, got %d"):format(tokens, steps)
    end
  end,

  setup = function(run)
    local p, s = run.p, run.state
    local source, origin
    if p.random then source, origin = make_random(run) else source, origin = load_input(p.input) end
    assert(source, origin)
    local shape = source[1][1].shape
    s.plans = make_schedule(run, shape[1])
    local max_len, num_pages, shortest, longest = 0, 1, math.huge, 0
    for _, plan in ipairs(s.plans) do
      max_len, num_pages = math.max(max_len, plan.total), num_pages + (plan.total + p.page_size - 1) // p.page_size
      shortest, longest = math.min(shortest, plan.prompt), math.max(longest, plan.prompt)
    end
    s.materialize = shape[3] % 64 == 0 and p.page_size % 4 == 0
    s.padding = 0
    s.cache = run:cache {
      source = source, num_pages = num_pages, page_size = p.page_size, kv_layout = p.layout,
      page_layout = p.page_layout, nvfp4_4over6 = p["4over6"],
      page_padding = 64, sf_page_padding = 16, batch = bucket_of(p.requests), max_len = max_len,
      materialize = s.materialize,
    }
    run:say("%s: %d layers, %d tokens, %d KV heads x %d, %s", origin, #source, shape[1], shape[2], shape[3],
      s.cache.dtype)
    run:say("%d requests, prompts of %d to %d tokens; at most %d tokens per request", p.requests, shortest, longest,
      max_len)
    run:say("caches: %d pages of %d tokens, %s, %s allocation; 64 bytes between pages, 16 between pages of scales",
      num_pages,
      p.page_size, p.layout, p.page_layout)
    if not s.materialize then run:say("no materialize: it needs head_dim %% 64 == 0 and page_size %% 4 == 0") end
  end,

  step = function(run)
    local s, cache = run.state, run.state.cache
    for _, plan in ipairs(s.plans) do
      if plan.stop + 1 == run.step then cache:free(plan.request) end
    end
    for _, plan in ipairs(s.plans) do
      if plan.start == run.step then plan.request = assert(cache:admit(text_of(plan, 0, plan.prompt))) end
    end
    cache:flush()
    for _, plan in ipairs(s.plans) do
      if plan.start <= run.step and run.step <= plan.stop then
        assert(cache:extend(plan.request, text_of(plan, plan.request.length, 1)))
      end
    end
    cache:load()
    s.bucket = bucket_of(#cache.live)
    s.padding = s.padding + s.bucket - #cache.live
  end,

  key = function(run) return "batch of " .. run.state.bucket end,

  -- After the append the two branches are independent of each other: the second one runs on the side stream.
  captured = function(run)
    local s, cache = run.state, run.state.cache
    cache:append(s.bucket)
    if s.materialize then
      run.side:wait(run.main:record())
      run.side:scope(function() cache:materialize(s.bucket) end)
    end
    cache:dequantize(s.bucket)
    if s.materialize then run.main:wait(run.side:record()) end
  end,

  verdict = function(run)
    return ("%d padding rows wrote nothing, page 0 is untouched"):format(run.state.padding)
  end,
}
