-- One allocation for everything: a page has K's codes, V's codes, K's scales, V's scales, and foreign bytes. So all
-- four caches have the same page stride, which is far larger than their pages. The bytes between must not change.

local nibble = require "nibble"

local FILL = 0xA5

-- The views of one slab, as nibble.pages would make four pools.
local function slab(run, num_pages, page_size, heads, dim, gap)
  local sizes = { dim // 2, dim // 2, dim // 16, dim // 16 } -- bytes of a vector: K, V, K's scales, V's scales
  local stride = gap
  for _, size in ipairs(sizes) do stride = stride + page_size * heads * size + gap end
  local memory = nibble.full({ num_pages, stride }, FILL, { dtype = "uint8", device = run.device })
  local pool = { paged_kv_cache = {}, kv_cache_sf = {}, storage = {}, gaps = {}, kv_layout = run.p.kv_layout }
  local offset = 0
  for i, size in ipairs(sizes) do
    pool.gaps[i] = memory:narrow(2, offset + 1, gap)
    offset = offset + gap
    local bytes = page_size * heads * size
    pool.storage[i] = memory:narrow(2, offset + 1, bytes)
    local shape, strides = { num_pages, page_size, heads, size }, { stride, heads * size, size, 1 }
    if pool.kv_layout == "HND" then
      shape, strides = { num_pages, heads, page_size, size }, { stride, page_size * size, size, 1 }
    end
    local view = memory:as_strided(shape, strides, offset)
    if i <= 2 then pool.paged_kv_cache[i] = view else pool.kv_cache_sf[i - 2] = view:reinterpret("float8_e4m3fn") end
    offset = offset + bytes
  end
  pool.gaps[5] = memory:narrow(2, offset + 1, gap)
  if run.p.form == "stacked" then
    pool.stacked = {}
    for _, name in ipairs { "paged_kv_cache", "kv_cache_sf" } do
      local k, v = pool[name][1], pool[name][2]
      local shape, strides = k.shape, k:stride()
      local _, k_offset = k:storage()
      local _, v_offset = v:storage()
      table.insert(shape, 2, 2)
      table.insert(strides, 2, v_offset - k_offset)
      pool.stacked[name] = k:as_strided(shape, strides)
    end
  end
  return pool
end

return {
  title = "padded pages: codes and scales of K and V in one slab, with foreign bytes between them",
  parameters = {
    gap = { 48, min = 1, max = 4096, help = "bytes before, between and after the parts of a page" },
    requests = { 3, min = 1, max = 16, help = "requests" },
    heads = { 4, min = 1, max = 16,
      help = "KV heads; by default as many as tokens per page, so that mixing them up passes size checks" },
    head_dim = { 64, min = 64, max = 256, multiple = 64, help = "head dimension of K and V" },
    page_size = { 4, min = 4, max = 64, multiple = 4, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
    form = { "pairs", "stacked", help = "K and V as two tensors, or as one of five dimensions" },
  },
  steps = 12,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = 9 + run.steps
    local num_pages = 1 + p.requests * ((s.max_len + p.page_size - 1) // p.page_size)
    local pool = slab(run, num_pages, p.page_size, p.heads, p.head_dim, p.gap)
    s.cache = run:cache {
      num_pages = num_pages, page_size = p.page_size, num_kv_heads = p.heads, head_dim = p.head_dim,
        kv_layout = p.kv_layout,
      page_layout = "shuffled", pool = function() return pool end, batch = p.requests, max_len = s.max_len,
        materialize = true,
    }
    for i, gap in ipairs(pool.gaps) do run:watch("gap " .. i, gap) end -- must stay as it is: nobody keeps its image
    for _ = 1, p.requests do assert(s.cache:admit(1 + run.random(9))) end
    s.cache:flush()
  end,

  step = function(run)
    local cache = run.state.cache
    for _, request in ipairs(cache.live) do assert(cache:extend(request, 1)) end
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
    run.state.cache:materialize()
  end,
}
