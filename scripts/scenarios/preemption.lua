-- Preemption: more requests than fit into the pool. When a running request finds no page, the youngest one is swapped
-- out: its bytes go to a second pool, and its pages to the others. Later it is swapped in, on other pages, and
-- continues without computing a token twice.

-- Moves a request and its bytes to another cache with the same page size and layout; returns nil if there are not
-- enough pages. Of the last page it copies only used entries; the others hold bytes of earlier requests.
local function move(run, request, from, to)
  local moved = to:admit(request.text, { queue = false })
  if not moved then return nil end
  run:timed(to.name == "swap" and "swapped out" or "swapped in", function()
    -- which dimension of a page [heads, entries, bytes] or [entries, heads, bytes]
    local entries = from.kv_layout == "HND" and 2 or 1
    for j, page in ipairs(request.pages) do
      local used = math.min(from.page_size, request.length - (j - 1) * from.page_size)
      for _, part in ipairs { "paged_kv_cache", "kv_cache_sf" } do
        for i = 1, 2 do
          local source = from.layers[1].pool[part][i]:select(1, page + 1):narrow(entries, 1, used)
          to.layers[1].pool[part][i]:select(1, moved.pages[j] + 1):narrow(entries, 1, used):copy(source)
        end
      end
    end
  end)
  to:placed(moved)
  from:free(request)
  return moved
end

return {
  title = "preemption: the youngest request is swapped out of a full pool, and in again when there is room",
  parameters = {
    requests = { 5, min = 1, max = 16, help = "unfinished requests at a time" },
    length = { 20, min = 1, max = 128, help = "tokens of a request at its end" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
    swap = { "same", "cpu", help = "the device of the second pool" },
  },
  steps = 40,

  setup = function(run)
    local p, s = run.p, run.state
    local longest = (p.length + p.page_size - 1) // p.page_size
    s.cache = run:cache {
      num_pages = 1 + 2 * longest, page_size = p.page_size, num_kv_heads = 2, head_dim = 64, kv_layout = p.kv_layout,
      page_layout = "shuffled", batch = p.requests, max_len = p.length,
    }
    s.swap = run:cache {
      name = "swap", source = s.cache.source, num_pages = 1 + p.requests * longest, page_size = p.page_size,
        kv_layout = p.kv_layout,
      batch = 1, max_len = p.length, device = p.swap == "cpu" and "cpu" or nil,
    }
    s.out, s.back = 0, 0
  end,

  step = function(run)
    local p, s = run.p, run.state
    local cache, swap = s.cache, s.swap
    for i = #cache.live, 1, -1 do
      if cache.live[i].length == p.length then cache:free(cache.live[i]) end
    end
    while swap.live[1] and move(run, swap.live[1], swap, cache) do s.back = s.back + 1 end -- the oldest first
    while #swap.live == 0 and #cache.live < p.requests do -- nobody who waits is overtaken
      if not cache:admit(run.random(p.length)) then break end
      cache:flush()
    end
    local i = 1
    while cache.live[i] do
      if cache:extend(cache.live[i], 1) then
        i = i + 1
      else
        assert(move(run, cache.live[#cache.live], cache, swap))
        s.out = s.out + 1
      end
    end
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  check = function(run)
    local s = run.state
    run:expect(#s.cache.live > 0, "no request is running")
    run:expect(s.out - s.back == #s.swap.live, "%d out, %d in, but %d are away", s.out, s.back, #s.swap.live)
  end,

  finish = function(run)
    local swap = run.state.swap.allocator
    local held = 0
    for _, request in ipairs(run.state.swap.live) do held = held + #request.pages end
    run:expect(swap.num_pages - 1 - swap.num_free == held, "pages of requests that were swapped in are still held")
  end,

  verdict = function(run) return ("%d swapped out, %d swapped in"):format(run.state.out, run.state.back) end,
}
