-- Chunked prefill: each step has a budget of tokens. Each decoding request takes one; the rest of the budget goes to
-- pieces of prompts. One append handles both kinds of rows, and one graph handles every mixture.

return {
  title = "chunked prefill: pieces of prompts and decoded tokens in one append, within a budget",
  parameters = {
    budget = { 12, min = 5, max = 256, help = "tokens per step" },
    requests = { 4, min = 1, max = 4, help = "requests that run at a time" },
    prompt = { 24, min = 1, max = 256, help = "tokens of the longest prompt" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 24,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = p.prompt + 6
    s.pieces = 0
    s.cache = run:cache {
      num_pages = 1 + p.requests * ((s.max_len + p.page_size - 1) // p.page_size), page_size = p.page_size,
        num_kv_heads = 2,
      head_dim = 64, kv_layout = p.kv_layout, page_layout = "fragmented", batch = p.requests, rows = p.budget,
        max_len = s.max_len,
    }
  end,

  step = function(run)
    local p, s, cache = run.p, run.state, run.state.cache
    for i = #cache.live, 1, -1 do
      if cache.live[i].length == s.max_len then cache:free(cache.live[i]) end
    end
    while #cache.live < p.requests do
      local request = assert(cache:admit(0))
      request.prompt = 1 + run.random(p.prompt)
    end
    local budget = p.budget
    for _, request in ipairs(cache.live) do
      if request.length >= request.prompt then
        assert(cache:extend(request, 1))
        budget = budget - 1
      end
    end
    for _, request in ipairs(cache.live) do
      local piece = math.min(budget, request.prompt - request.length)
      if piece > 0 then
        assert(cache:extend(request, piece))
        budget, s.pieces = budget - piece, s.pieces + 1
      end
    end
    s.spent = p.budget - budget
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  check = function(run)
    local s, arrived = run.state, 0
    for _, slot in ipairs(s.cache.slot_mapping:totable()) do
      if slot >= 0 then arrived = arrived + 1 end
    end
    run:expect(arrived == s.spent, "%d rows have a slot, expected %d", arrived, s.spent)
    run:expect(s.spent <= run.p.budget, "%d tokens in a budget of %d", s.spent, run.p.budget)
  end,

  verdict = function(run) return ("prompts were appended in %d pieces"):format(run.state.pieces) end,
}
