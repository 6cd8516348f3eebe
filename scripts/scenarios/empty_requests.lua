-- Requests of length 0 and 1, steps without a token, and batches without a request. There is a graph for each number of
-- rows, including 0. Empty rows and batches read and write nothing.

return {
  title = "empty and one-token requests, steps without a token, graphs of zero rows",
  parameters = {
    requests = { 3, min = 1, max = 8, help = "most requests at a time" },
    page_size = { 1, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 40,

  setup = function(run)
    local p, s = run.p, run.state
    s.empty_steps = 0
    s.cache = run:cache {
      num_pages = 1 + 2 * p.requests, page_size = p.page_size, num_kv_heads = 1, head_dim = 16, kv_layout = p.kv_layout,
      batch = p.requests, max_len = 2,
    }
  end,

  step = function(run)
    local p, s, cache = run.p, run.state, run.state.cache
    for i = #cache.live, 1, -1 do
      if run.random(3) == 0 or cache.live[i].length == 2 then cache:free(cache.live[i]) end
    end
    for _, request in ipairs(cache.live) do
      assert(cache:extend(request, run.random(2)))
    end
    while #cache.live < p.requests and run.random(2) == 0 do assert(cache:admit(run.random(2))) end
    s.tokens = #cache.pending
    cache:load()
    if s.tokens == 0 then s.empty_steps = s.empty_steps + 1 end
  end,

  key = function(run) return ("%d tokens, %d requests"):format(run.state.tokens, #run.state.cache.live) end,

  captured = function(run)
    run.state.cache:append(run.state.tokens)
    run.state.cache:dequantize(#run.state.cache.live)
  end,

  check = function(run)
    for _, request in ipairs(run.state.cache.live) do
      run:expect(#request.pages == (request.length + run.p.page_size - 1) // run.p.page_size,
        "a request of %d tokens has %d pages", request.length, #request.pages)
    end
  end,

  finish = function(run)
    run:expect(run.steps < 20 or run.state.empty_steps > 0, "no step was empty")
  end,

  verdict = function(run) return ("%d steps had no token"):format(run.state.empty_steps) end,
}
