-- Requests that begin with the same prompt share its pages. The last page is rarely full: a request that writes to it
-- while it is shared gets a copy first, and the bytes of the others do not change. Requests end, and new ones are
-- forked from the prompt or from a part of a running request.

return {
  title = "prefix sharing: forks of one prompt, with copy-on-write of shared pages",
  parameters = {
    requests = { 4, min = 1, max = 16, help = "requests that run at a time" },
    prompt = { 10, min = 1, max = 256, help = "tokens of the shared prompt" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
    page_padding = { 64, min = 0, max = 4096, multiple = 16, help = "bytes between pages" },
  },
  steps = 24,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = p.prompt + run.steps
    local held = (s.max_len + p.page_size - 1) // p.page_size
    s.cache = run:cache {
      num_pages = 1 + (p.requests + 1) * held, page_size = p.page_size, num_kv_heads = 2, head_dim = 64,
        kv_layout = p.kv_layout,
      page_layout = "shuffled", page_padding = p.page_padding, batch = p.requests + 1, max_len = s.max_len,
    }
    s.prompt = assert(s.cache:admit(p.prompt)) -- never grows, so that whoever shares it has to copy
    s.cache:flush()
    for _ = 1, p.requests do s.cache:fork(s.prompt) end
  end,

  step = function(run)
    local p, cache, prompt = run.p, run.state.cache, run.state.prompt
    if run.step % 3 == 0 then -- one ends, and a fork of the prompt or of part of another request comes
      local ended = cache.live[2 + run.random(p.requests)]
      cache:free(ended)
      local parent = cache.live[1 + run.random(#cache.live)]
      cache:fork(parent, math.max(1, parent.length - run.random(p.page_size)))
    end
    for _, request in ipairs(cache.live) do
      if request ~= prompt then assert(cache:extend(request, 1)) end
    end
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  check = function(run)
    local cache = run.state.cache
    for _, request in ipairs(cache.live) do -- a page that is written to is the writer's alone
      local last = request.pages[#request.pages]
      local shared = cache.allocator:references(last) > 1
      run:expect(request == run.state.prompt or not shared, "request %d wrote to page %d, which others share",
        request.id, last)
    end
  end,

  verdict = function(run)
    return ("%d shared pages were copied before a write"):format(run.ops["copy page"] or 0)
  end,
}
