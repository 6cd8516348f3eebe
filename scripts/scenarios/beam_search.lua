-- Beam search: each beam gets a token, then the best continuations replace the beams. A beam may continue in several
-- beams or in none. Beams of one parent share all pages so far, and the first that writes to a shared page copies it.

return {
  title = "beam search: beams are reordered, forked and dropped after each token",
  parameters = {
    beams = { 4, min = 1, max = 16, help = "beams" },
    prompt = { 9, min = 1, max = 256, help = "tokens of the prompt" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 20,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = p.prompt + run.steps
    local held = (s.max_len + p.page_size - 1) // p.page_size
    s.cache = run:cache {
      num_pages = 1 + 2 * p.beams * held, page_size = p.page_size, num_kv_heads = 2, head_dim = 64,
        kv_layout = p.kv_layout,
      page_layout = "fragmented", batch = p.beams, max_len = s.max_len,
    }
    s.beams = { assert(s.cache:admit(p.prompt)) }
    s.cache:flush()
    for i = 2, p.beams do s.beams[i] = s.cache:fork(s.beams[1]) end
  end,

  step = function(run)
    local s, cache = run.state, run.state.cache
    local before, after = s.beams, {}
    s.parents = {}
    for i = 1, #before do
      s.parents[i] = 1 + run.random(#before)
      after[i] = cache:fork(before[s.parents[i]])
    end
    for _, beam in ipairs(before) do cache:free(beam) end
    s.beams = after
    for _, beam in ipairs(after) do assert(cache:extend(beam, 1)) end
    cache:load(after)
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  -- Beams of one parent agree in all but their last token, byte for byte.
  check = function(run)
    local s, out = run.state, run.state.cache.layers[1].out[1]
    for i = 2, #s.beams do
      for j = 1, i - 1 do
        if s.parents[i] == s.parents[j] then
          local length = s.beams[i].length - 1
          run:expect(out[i]:narrow(1, 1, length):equal(out[j]:narrow(1, 1, length)),
            "beams %d and %d of one parent differ", j, i)
        end
      end
    end
  end,

  finish = function(run)
    local used = {}
    for _, beam in ipairs(run.state.beams) do
      for _, page in ipairs(beam.pages) do used[page] = true end
    end
    local count = 0
    for _ in pairs(used) do count = count + 1 end
    local allocator = run.state.cache.allocator
    run:expect(allocator.num_free == allocator.num_pages - 1 - count, "a page of a dropped beam was not released")

    -- In a full pool there is no page for the copy of a shared one: the beam does not grow, and nothing has changed.
    local cache, beam = run.state.cache, run.state.beams[1]
    if beam.length % run.p.page_size == 0 then return end
    cache:fork(beam)
    local rest = assert(allocator:allocate(allocator.num_free * run.p.page_size)) -- all that is free
    local last, length = beam.pages[#beam.pages], beam.length
    run:expect(not cache:extend(beam, 1) and beam.pages[#beam.pages] == last and beam.length == length,
      "a beam grew on a shared page of a full pool")
    allocator:free(rest)
    run:expect(cache:extend(beam, 1) and beam.pages[#beam.pages] ~= last, "a beam did not get its own page")
  end,
}
