-- Speculative decoding: a small model drafts some tokens, all of them are appended and read in one step, and the large
-- model keeps the first few. The slots of the others are reused for the tokens of the next step.

return {
  title = "speculative decoding: drafts are appended, some are rejected, and their slots are reused",
  parameters = {
    drafts = { 4, min = 1, max = 16, help = "drafted tokens per request and step" },
    requests = { 3, min = 1, max = 16, help = "requests" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 16,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = 4 + run.steps * (p.drafts + 1)
    s.rejected, s.reused, s.taken_back = 0, 0, {}
    s.cache = run:cache {
      num_pages = 1 + p.requests * ((s.max_len + p.page_size - 1) // p.page_size), page_size = p.page_size,
        num_kv_heads = 2,
      head_dim = 64, kv_layout = p.kv_layout, page_layout = "shuffled", batch = p.requests,
        rows = p.requests * (p.drafts + 1),
      max_len = s.max_len,
    }
    for _ = 1, p.requests do assert(s.cache:admit(1 + run.random(4))) end
    s.cache:flush()
  end,

  -- The target model's verdict on the last step's drafts, then its own token and the new drafts.
  step = function(run)
    local p, s, cache = run.p, run.state, run.state.cache
    for _, request in ipairs(cache.live) do
      if run.step > 1 then
        local kept = run.random(p.drafts + 1)
        for _, slot in ipairs(cache.allocator:slots(request, request.length - p.drafts + kept)) do
          s.taken_back[slot] = true
        end
        cache:rewind(request, p.drafts - kept)
        s.rejected = s.rejected + p.drafts - kept
      end
      assert(cache:extend(request, 1 + p.drafts))
      for _, slot in ipairs(cache.allocator:slots(request, request.length - 1 - p.drafts)) do
        if s.taken_back[slot] then s.reused, s.taken_back[slot] = s.reused + 1, nil end
      end
    end
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  finish = function(run)
    local s = run.state
    run:expect(run.steps < 4 or s.rejected > 0, "no draft was rejected in %d steps", run.steps)
    run:expect(s.rejected == 0 or s.reused > 0, "%d drafts were rejected, and no slot was reused", s.rejected)
  end,

  verdict = function(run)
    return ("%d drafts were rejected, %d of their slots were reused"):format(run.state.rejected, run.state.reused)
  end,
}
