-- Graphs whose shapes change. Requests arrive and leave, so the number of rows changes between steps. Then the graph is
-- updated, which works in place if the operations and their order stay the same. Every few steps the E4M3 copy is
-- switched on or off; with other operations an update must build the graph again. Now and then the graph is dropped and
-- captured again.

return {
  title = "changing shapes: a graph is captured, updated in place, rebuilt and captured again",
  parameters = {
    requests = { 5, min = 1, max = 16, help = "most requests at a time" },
    page_size = { 4, min = 4, max = 64, multiple = 4, help = "tokens per page" },
    switch = { 6, min = 1, max = 64, help = "steps between two switches of the E4M3 copy" },
    discard = { 10, min = 1, max = 64, help = "steps between two new captures" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 24,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = 8 + run.steps
    s.cache = run:cache {
      num_pages = 1 + p.requests * ((s.max_len + p.page_size - 1) // p.page_size), page_size = p.page_size,
        num_kv_heads = 2,
      head_dim = 64, kv_layout = p.kv_layout, page_layout = "fragmented", batch = p.requests, max_len = s.max_len,
        materialize = true,
    }
    s.with_copy, s.shape, s.captures, s.updates, s.rebuilt = false, "", 0, 0, 0
    assert(s.cache:admit(3))
    s.cache:flush()
  end,

  step = function(run)
    local p, s, cache = run.p, run.state, run.state.cache
    if #cache.live > 1 and run.random(3) == 0 then cache:free(cache.live[1 + run.random(#cache.live)]) end
    if #cache.live < p.requests and run.random(2) == 0 then assert(cache:admit(1 + run.random(8))) end
    cache:flush()
    for _, request in ipairs(cache.live) do assert(cache:extend(request, 1)) end
    cache:load()
    if run.step % p.switch == 0 then s.with_copy = not s.with_copy end
    local shape = #cache.live .. (s.with_copy and " with copy" or "")
    s.how = nil
    if run.step == 1 or run.step % p.discard == 0 then
      s.how, s.captures = "capture", s.captures + 1
    elseif shape ~= s.shape then
      s.how = "update"
      if s.shape:find("copy") ~= shape:find("copy") then s.rebuilt = s.rebuilt + 1 else s.updates = s.updates + 1 end
    end
    s.shape = shape
  end,

  recapture = function(run) return run.state.how end,

  captured = function(run)
    local s, rows = run.state, #run.state.cache.live
    s.cache:append(rows)
    s.cache:dequantize(rows)
    if s.with_copy then s.cache:materialize(rows) end
  end,

  finish = function(run)
    local s, graph = run.state, run.graphs.step
    for name, wanted in pairs { captures = s.captures, updates = s.updates, rebuilt = s.rebuilt } do
      run:expect(graph[name] == wanted, "%s: %d, expected %d", name, graph[name], wanted)
    end
    run:expect(graph.replays == run.steps, "%d replays in %d steps", graph.replays, run.steps)
  end,
}
