-- A pipeline over layers in one graph: one stream appends layer after layer, and the other dequantizes each layer after
-- its append. The second stream joins by an event of the first one, waits for another event before each layer, and is
-- joined back at the end. Before each replay the same work runs without a graph, after work that takes long.

local nibble = require "nibble"

local LONG = 1 << 22 -- elements

return {
  title = "two streams in one graph: one appends layer after layer, the other reads each layer after its append",
  parameters = {
    layers = { 4, min = 1, max = 16, help = "layers, each with its own cache" },
    requests = { 3, min = 1, max = 16, help = "requests" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
  },
  steps = 10,

  setup = function(run)
    local p, s = run.p, run.state
    s.layers = {}
    s.long = nibble.zeros(LONG, { dtype = "int32", device = run.device })
    s.last = nibble.zeros(1, { dtype = "int32", device = run.device })
    s.image = run:watch("the last element of what took long", s.last)
    for l = 1, p.layers do
      local max_len = 9 + run.steps
      s.layers[l] = run:cache {
        name = "layer " .. l - 1, num_pages = 1 + p.requests * ((max_len + p.page_size - 1) // p.page_size),
          page_size = p.page_size,
        num_kv_heads = 2, head_dim = 32, kv_layout = p.kv_layout, page_layout = "shuffled", batch = p.requests,
          max_len = max_len,
      }
      for _ = 1, p.requests do assert(s.layers[l]:admit(1 + run.random(9))) end
      s.layers[l]:flush()
    end
  end,

  step = function(run)
    for _, cache in ipairs(run.state.layers) do
      for _, request in ipairs(cache.live) do assert(cache:extend(request, 1)) end
      cache:load()
    end
    local s = run.state
    run.main:synchronize()
    s.long:fill(run.step)
    run.side:wait(run.main:record())
    run.side:scope(function() s.last:copy(s.long:narrow(1, LONG, 1)) end)
    run.main:wait(run.side:record())
    run:effect({ op = "copy" }, function() s.image:put(0, string.pack("<i4", run.step)) end)
  end,

  captured = function(run)
    for _, cache in ipairs(run.state.layers) do
      cache:append()
      run.side:wait(run.main:record())
      run.side:scope(function() cache:dequantize() end)
    end
    run.main:wait(run.side:record())
  end,

  -- The graph is what the events say: appends in a row, each dequantization behind its own layer's append.
  finish = function(run)
    local nodes = run.graphs.step.nodes
    run:expect(#nodes == 2 * run.p.layers, "%d nodes for %d layers", #nodes, run.p.layers)
    for i, node in ipairs(nodes) do
      local after = table.concat(node.deps, ",")
      local expected = node.name == "append" and (i > 1 and tostring(i - 2) or "") or (i > 2 and i - 2 .. "," or "") ..
        i - 1
      run:expect(after == expected, "node %d, %s, waits for {%s}, expected {%s}", i, node.name, after, expected)
    end
  end,
}
