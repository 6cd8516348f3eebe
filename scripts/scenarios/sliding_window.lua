-- Sliding-window attention: a request keeps the pages of its window. Its oldest page is released when the window has
-- left it, and the ring of free pages reuses it as late as possible. Positions in the text continue; positions in the
-- cache count from the oldest token that is left.

return {
  title = "sliding window: each request keeps a ring of pages and releases the oldest as the window slides",
  parameters = {
    requests = { 3, min = 1, max = 16, help = "requests" },
    window = { 10, min = 1, max = 256, help = "tokens in the attention window" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 40,

  setup = function(run)
    local p, s = run.p, run.state
    -- The window may begin in the middle of a page and ends in another, and the next token wants one more.
    local held = (p.window + p.page_size - 2) // p.page_size + 2
    s.cache = run:cache {
      num_pages = 1 + p.requests * held, page_size = p.page_size, num_kv_heads = 2, head_dim = 64,
        kv_layout = p.kv_layout,
      page_layout = "ring", batch = p.requests, max_len = held * p.page_size,
    }
    for _ = 1, p.requests do assert(s.cache:admit(1 + run.random(p.window))) end
    s.cache:flush()
  end,

  step = function(run)
    local cache, p = run.state.cache, run.p
    for _, request in ipairs(cache.live) do
      assert(cache:extend(request, 1))
      -- A page goes when its last token is no longer among the last `window` ones.
      if request.length - p.page_size >= p.window then cache:drop(request, 1) end
    end
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  check = function(run)
    local p, cache = run.p, run.state.cache
    for _, request in ipairs(cache.live) do
      run:expect(request.length < p.window + p.page_size, "request %d keeps %d tokens for a window of %d", request.id,
        request.length, p.window)
    end
  end,

  finish = function(run)
    for _, request in ipairs(run.state.cache.live) do
      local total = request.dropped + request.length
      run:expect(request.length >= math.min(run.p.window, total), "request %d lost a token of its window", request.id)
      run:expect(total > run.steps, "request %d has a wrong count of tokens", request.id)
    end
  end,
}
