-- Disaggregated serving: one instance prefills, another decodes. Each has its own pool, page size and layout. When a
-- prompt is done, the bytes of its tokens are copied from the pages of one pool to those of the other, as many adjacent
-- tokens at a time as both pages have, and the decoder's block table is filled. Codes and scales are copied unchanged,
-- so nothing is quantized twice.

-- The entries `first` .. `first + count - 1` of a page: [count, heads, bytes].
local function entries(cache, tensor, page, first, count)
  local t = tensor:select(1, page + 1)
  if cache.kv_layout == "HND" then t = t:permute(2, 1, 3) end
  return t:narrow(1, first + 1, count)
end

local function copy_request(from, request, to, copy)
  local position = 0
  while position < request.length do
    local a, b = position % from.page_size, position % to.page_size
    local count = math.min(from.page_size - a, to.page_size - b, request.length - position)
    local source, target = request.pages[position // from.page_size + 1], copy.pages[position // to.page_size + 1]
    for _, pair in ipairs { "paged_kv_cache", "kv_cache_sf" } do
      for i = 1, 2 do
        entries(to, to.layers[1].pool[pair][i], target, b, count):copy(
          entries(from, from.layers[1].pool[pair][i], source, a, count))
      end
    end
    position = position + count
  end
end

return {
  title = "disaggregated serving: prefill in one pool, decode from another, pages copied and tables remapped",
  parameters = {
    prompt = { 14, min = 1, max = 256, help = "tokens of the longest prompt" },
    requests = { 3, min = 1, max = 8, help = "requests that decode at a time" },
    page_size = { 8, min = 1, max = 64, help = "tokens per page of the prefill pool" },
    decode_page_size = { 4, min = 1, max = 64, help = "tokens per page of the decode pool" },
    kv_layout = { "NHD", "HND", help = "layout of the prefill pools; decode pools are HND" },
    from = { "same", "cpu", help = "the device that prefills" },
  },
  steps = 20,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = p.prompt + p.requests
    s.prefill = run:cache {
      name = "prefill", num_pages = 1 + (p.prompt + p.page_size - 1) // p.page_size, page_size = p.page_size,
        num_kv_heads = 2,
      head_dim = 64, kv_layout = p.kv_layout, batch = 1, max_len = p.prompt, device = p.from == "cpu" and "cpu" or nil,
    }
    local held = (s.max_len + p.decode_page_size - 1) // p.decode_page_size
    s.decode = run:cache {
      name = "decode", source = s.prefill.source, num_pages = 1 + p.requests * held,
      page_size = p.decode_page_size, kv_layout = "HND", page_layout = "shuffled", page_padding = 32,
        sf_page_padding = 16,
      batch = p.requests, max_len = s.max_len,
    }
  end,

  step = function(run)
    local p, s = run.p, run.state
    if #s.decode.live == p.requests then s.decode:free(s.decode.live[1]) end -- the oldest has said enough
    local request = assert(s.prefill:admit(1 + run.random(p.prompt)))
    s.prefill:flush()
    local copy = assert(s.decode:admit(request.text, { queue = false }))
    run:timed("hand-over", function() copy_request(s.prefill, request, s.decode, copy) end)
    s.decode:placed(copy)
    s.prefill:free(request)
    for _, running in ipairs(s.decode.live) do assert(s.decode:extend(running, 1)) end
    s.decode:load()
  end,

  captured = function(run)
    run.state.decode:append()
    run.state.decode:dequantize()
  end,

  check = function(run)
    local prefill = run.state.prefill.allocator
    run:expect(prefill.num_free == prefill.num_pages - 1, "%d pages of a transferred request are still held",
      prefill.num_pages - 1 - prefill.num_free)
  end,
}
