-- More conversations than fit into the pool. When a token finds no page, the conversation that has waited longest loses
-- all its pages. At its next turn its whole text is appended again, on the pages that are free then.

return {
  title = "eviction: in a full pool, pages move from idle conversations to running ones and back",
  parameters = {
    conversations = { 6, min = 3, max = 16, help = "conversations, of which two run at a time" },
    length = { 12, min = 1, max = 128, help = "tokens of a conversation at its begin" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 24,

  setup = function(run)
    local p, s = run.p, run.state
    local batch = 2
    s.max_len = p.length + run.steps
    s.evicted, s.conversations = 0, {}
    s.held = (s.max_len + p.page_size - 1) // p.page_size
    s.cache = run:cache {
      num_pages = 1 + batch * s.held, page_size = p.page_size, num_kv_heads = 2, head_dim = 64,
      kv_layout = p.kv_layout, page_layout = "ring", batch = batch, max_len = s.max_len,
    }
    for i = 1, p.conversations do
      local text = {}
      for t = 1, p.length do text[t] = run.random(s.cache.tokens) end
      s.conversations[i] = { text = text, last = 0 }
    end
  end,

  step = function(run)
    local s, cache = run.state, run.state.cache
    local turn = { s.conversations[1 + run.random(#s.conversations)] }
    repeat turn[2] = s.conversations[1 + run.random(#s.conversations)] until turn[2] ~= turn[1]

    -- Takes the pages of the conversation that has waited longest, never of one whose turn it is.
    local function evict()
      local oldest
      for _, other in ipairs(s.conversations) do
        if other.request and other ~= turn[1] and other ~= turn[2] and (not oldest or other.last < oldest.last) then
          oldest = other
        end
      end
      oldest.text = oldest.request.text
      cache:free(oldest.request)
      oldest.request, s.evicted = nil, s.evicted + 1
    end

    for _, one in ipairs(turn) do
      one.last = run.step
      while not one.request do
        one.request = cache:admit(one.text)
        if not one.request then evict() end
      end
    end
    cache:flush()
    for _, one in ipairs(turn) do
      while not cache:extend(one.request, 1) do evict() end
    end
    cache:load { turn[1].request, turn[2].request }
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  finish = function(run)
    local s, wanted = run.state, 0
    for _, one in ipairs(s.conversations) do
      local tokens = #(one.request and one.request.text or one.text)
      if one.last > 0 then wanted = wanted + (tokens + run.p.page_size - 1) // run.p.page_size end
    end
    run:expect(wanted <= 2 * s.held or s.evicted > 0, "%d pages were needed of %d, and nothing was evicted", wanted,
      2 * s.held)
  end,

  verdict = function(run) return ("conversations were evicted %d times"):format(run.state.evicted) end,
}
