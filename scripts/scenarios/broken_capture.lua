-- Captures that fail: by an error of the script, a read of a value, a number where a graph needs a tensor, another
-- capture, or a stream that is not joined back. A failed capture must have no effect: the stream is as before, the old
-- graph still replays, no byte is written, and no memory is left. An error that is caught inside does not even end the
-- capture.

local nibble = require "nibble"

-- A name, what is done in the capture after an append, and a part of the error message.
local accidents = {
  { "an error of the script", function() error("the script gave up") end, "the script gave up" },
  { "a value is read", function(_, cache) return cache.layers[1].key:amax() end, "captur" },
  { "a wait", function(run) run.main:synchronize() end, "captur" },
  { "another capture", function(run) run.main:capture(function() end) end, "captur" },
  { "a replay", function(run) run.graphs.step.graph:replay() end, "captur" },
  { "a number as a scale", function(_, cache)
    local layer, op = cache.layers[1], nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    op(layer.key, layer.value, cache.slot_mapping, layer.pool.paged_kv_cache, layer.pool.kv_cache_sf, 1.0, 1.0,
      cache.kv_layout)
  end, "k_scale" },
  { "a wrong shape", function(_, cache) cache.block_tables:copy(cache.seq_lens:narrow(1, 1, 0)) end, "copy" },
  { "a stream that is not joined", function(run, cache)
    run.side:wait(run.main:record())
    run.side:scope(function() cache:dequantize() end)
  end, "join", ends = true }, -- known only when the capture ends
}

-- One accident, as a new graph or as an update of the one that works.
local function have_accident(run, accident, update)
  local s, cache = run.state, run.state.cache
  local ran = false
  collectgarbage()
  run.main:synchronize()
  local before = nibble.memory(run.device).used
  local ok, message = pcall(run.graph, run, update and "step" or "broken", function()
    cache:append()
    accident[2](run, cache)
    ran = true
  end, update and "update" or nil)
  run:expect(not ok, "%s: nothing was raised", accident[1])
  run:expect(ran == (accident.ends or false), "%s: raised at the wrong place: %s", accident[1], message)
  run:expect(tostring(message):find(accident[3], 1, true), "%s: raised %s", accident[1], message)
  collectgarbage()
  run.main:synchronize()
  local after = nibble.memory(run.device).used
  run:expect(after == before, "%s: %d bytes of memory were left behind", accident[1], after - before)
  s.accidents = s.accidents + 1

  -- Refused inside, caught inside: the capture goes on, and what it records is the whole of it.
  if accident.ends or accident[1] == "an error of the script" then return end
  local graph = run.main:capture(function()
    local refused = not pcall(accident[2], run, cache)
    run:expect(refused, "%s: was not refused in a capture", accident[1])
    s.untouched:fill(1)
  end)
  run:expect(#graph:nodes() == 1, "%s: %d nodes were recorded, expected 1", accident[1], #graph:nodes())
  graph:close()
end

return {
  title = "captures that fail in the middle: they have no effect, and the old graph still works",
  parameters = {
    requests = { 3, min = 1, max = 16, help = "requests" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = { 2 * #accidents + 1, min = 2 * #accidents + 1 }, -- all of them, each as a new graph and as an update
  reports = { "unjoined" },

  setup = function(run)
    local p, s = run.p, run.state
    s.accidents = 0
    s.cache = run:cache {
      num_pages = 1 + p.requests * ((4 + run.steps + p.page_size - 1) // p.page_size), page_size = p.page_size,
        num_kv_heads = 2,
      head_dim = 64, kv_layout = p.kv_layout, batch = p.requests, max_len = 4 + run.steps,
    }
    s.untouched = nibble.zeros(4, { device = run.device })
    run:watch("a tensor of a graph that is not replayed", s.untouched)
    for _ = 1, p.requests do assert(s.cache:admit(1 + run.random(4))) end
    s.cache:flush()
  end,

  step = function(run)
    local cache = run.state.cache
    for _, request in ipairs(cache.live) do assert(cache:extend(request, 1)) end
    cache:load()
    if run.eager or run.step == 1 then return end -- a capture is the affair of the run with graphs
    local i = run.step - 2
    have_accident(run, accidents[i // 2 % #accidents + 1], i % 2 == 1)
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  finish = function(run)
    local graph = run.graphs.step
    run:expect(graph.captures == 1 and graph.updates + graph.rebuilt == 0, "the working graph was replaced")
    run:expect(graph.replays == run.steps, "%d replays in %d steps", graph.replays, run.steps)
  end,

  verdict = function(run) return ("%d captures failed and left nothing behind"):format(run.state.accidents) end,
}
