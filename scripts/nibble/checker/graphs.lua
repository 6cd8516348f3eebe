-- Captures and what they become: nodes, their order inside a graph, and what a replay does.
--
-- Nodes of one stream of the capture are ordered, so that a clock over these streams says which nodes come before which. From
-- outside a replay is one piece of work of its stream.

local accesses = require "nibble.checker.accesses"
local spans = require "nibble.checker.spans"

local graphs = {}
graphs.__index = graphs

--- `run(operation, observation, items, facts)` does what an operation outside of a graph does too.
function graphs.new(memory, report, peek, run)
  return setmetatable({ memory = memory, report = report, peek = peek, run = run, captures = {}, graphs = {} }, graphs)
end

-------------------------------------------------------------------------------------------------------------- captures

function graphs:begin(o)
  self.captures[o.capture] = { nodes = {}, joined = {}, last = {} }
end

function graphs:node(o)
  local capture = self.captures[o.capture]
  if not capture then return end -- it began before there was a checker
  capture.nodes[o.node] = o
  capture.last[o.stream] = o
end

function graphs:join(o)
  local capture = self.captures[o.capture]
  if capture then capture.joined[o.stream] = capture.joined[o.stream] or o.where end
end

function graphs:abort(o)
  local capture = self.captures[o.capture]
  self.captures[o.capture] = nil
  if not capture or not o.unjoined then return end
  local last, where = capture.last[o.unjoined], capture.joined[o.unjoined]
  self.report("unjoined", { name = last.operation, where = last.where }, { name = "stream:wait", where = where },
    ("stream %d was forked from the capture on stream %d and not joined back: nothing waits for its %s"):format(o.unjoined,
      o.stream, last.operation))
end

---------------------------------------------------------------------------------------------------------------- graphs

-- For each node: how far along each stream of the capture what comes before it reaches. `assumed` are races that were reported:
-- from then on they count as ordered.
local function order(graph)
  local place = {}
  for i, node in ipairs(graph.nodes) do
    place[node.stream] = (place[node.stream] or 0) + 1
    local clock = {}
    local function after(k)
      for stream, reach in pairs(graph.clocks[k]) do clock[stream] = math.max(clock[stream] or 0, reach) end
    end
    for _, k in ipairs(node.deps) do after(k) end
    for _, k in ipairs(graph.assumed[i] or {}) do after(k) end
    clock[node.stream] = place[node.stream]
    graph.clocks[i], graph.places[i] = clock, place[node.stream]
  end
end

local function is_before(graph, i, k)
  return (graph.clocks[k][graph.nodes[i].stream] or 0) >= graph.places[i]
end

-- Nodes that could race: not ordered, with a storage that one of them writes. By the later one: {earlier ...}.
local function find_candidates(graph)
  local users, candidates = {}, {}
  for k, node in ipairs(graph.nodes) do
    local mine = {}
    for _, access in ipairs(node.accesses) do mine[access.storage] = mine[access.storage] or access.write end
    local seen = {}
    for storage, writes in pairs(mine) do
      for _, user in ipairs(users[storage] or {}) do
        if (writes or user[2]) and not seen[user[1]] and not is_before(graph, user[1], k) then
          seen[user[1]] = true
          candidates[k] = candidates[k] or {}
          table.insert(candidates[k], user[1])
        end
      end
      users[storage] = users[storage] or {}
      table.insert(users[storage], { k, writes })
    end
  end
  for _, list in pairs(candidates) do table.sort(list) end
  return candidates
end

-- Index tensors are looked at after the replay. What they hold then is what the node reads if one node before it writes them, or
-- none does.
local function contents_are_known(graph, k, indices)
  for _, access in pairs(indices) do
    local writers = graph.writers[access.storage] or {}
    if #writers > 1 or (writers[1] and writers[1] >= k) then return false end
  end
  return true
end

function graphs:finish(o)
  local capture = self.captures[o.capture]
  self.captures[o.capture] = nil
  if not capture then
    self.graphs[o.graph] = nil
    return
  end
  local graph = { nodes = capture.nodes, clocks = {}, places = {}, assumed = {}, expanded = {}, inputs = {}, writers = {},
    where = o.where, closed = {} }
  self.graphs[o.graph] = graph
  local seen = {}
  for k, node in ipairs(graph.nodes) do
    for _, access in ipairs(node.accesses) do -- what is read before the graph writes it comes from outside
      local id = access.storage
      if not seen[id] and not access.write then graph.inputs[id] = { node = node, parameter = access.parameter } end
      seen[id] = true
      if access.write and (not graph.writers[id] or graph.writers[id][#graph.writers[id]] ~= k) then
        graph.writers[id] = graph.writers[id] or {}
        table.insert(graph.writers[id], k)
      end
    end
  end
  order(graph)
  graph.candidates = find_candidates(graph)
  for k, node in ipairs(graph.nodes) do
    local indices = accesses.indices(node)
    graph.expanded[k] = { indices = indices, known = indices and contents_are_known(graph, k, indices) }
    if not indices then graph.expanded[k].items, graph.expanded[k].facts = accesses.expand(node, {}) end
  end
  self:check_order(graph, function(k) return not graph.expanded[k].indices end)
end

function graphs:released(o)
  self.graphs[o.graph] = nil
end

--- The last tensor of a storage was closed by hand: whoever replays cannot give the graph other values any more.
function graphs:closed(storage, where)
  for _, graph in pairs(self.graphs) do
    if graph.inputs[storage] and not graph.closed[storage] then graph.closed[storage] = { where = where } end
  end
end

local function operation_of(node, replay)
  return { name = node.operation, where = node.where, replay = replay }
end

-- The first byte that two nodes share although one of them writes it, and their items.
function graphs:collision(graph, k, i)
  for _, mine in ipairs(graph.expanded[k].items) do
    for _, other in ipairs(graph.expanded[i].items) do
      if mine.view.storage == other.view.storage and (mine.write or other.write) then
        local a, b = self.memory:spans(mine), self.memory:spans(other)
        local byte = a and b and spans.overlap(a, b)
        if byte then return { node = i, item = mine, other = other, byte = byte } end
      end
    end
  end
end

-- Races inside a graph between the nodes that are `ready`. As outside of graphs, a race that was reported counts as ordered.
function graphs:check_order(graph, ready, replay)
  local function verb(item) return item.write and "writes" or "reads" end
  for k, node in ipairs(graph.nodes) do
    local candidates = ready(k) and graph.candidates[k] or {}
    for n = #candidates, 1, -1 do -- the newest first
      local i = candidates[n]
      local hit = ready(i) and not is_before(graph, i, k) and self:collision(graph, k, i)
      if hit then
        local earlier = graph.nodes[i]
        self.report("race", operation_of(node, replay), operation_of(earlier, replay),
          ("in the graph %s %s %s while %s %s it (%s): no path leads from node %d to node %d"):format(node.operation,
            verb(hit.item), self.memory.place(hit.item, hit.byte), earlier.operation, verb(hit.other),
            hit.other.parameter or "argument", i, k))
        graph.assumed[k] = graph.assumed[k] or {}
        table.insert(graph.assumed[k], i)
        order(graph)
      end
    end
  end
end

function graphs:replay(o, point)
  local graph = self.graphs[o.graph]
  if not graph then return end
  for storage, closed in pairs(graph.closed) do
    local input = graph.inputs[storage]
    if not closed.reported then
      closed.reported = true
      self.report("closed", { name = o.operation, where = o.where }, { name = "tensor:close", where = closed.where },
        ("%s reads %s (%s), the last tensor of which was closed: it sees the old values for ever"):format(o.operation,
          input.parameter or "an argument", input.node.operation))
    end
  end
  local fresh = false
  for k, node in ipairs(graph.nodes) do
    local expanded = graph.expanded[k]
    if expanded.indices then
      local contents, key = {}, {}
      for name, access in pairs(expanded.indices) do
        contents[name] = expanded.known and self.peek(access) or nil
        key[#key + 1] = name .. "=" .. (contents[name] or "?")
      end
      table.sort(key)
      key = table.concat(key, ";")
      if key ~= expanded.key then
        expanded.key, fresh = key, true
        expanded.items, expanded.facts = accesses.expand(node, contents)
      end
    end
  end
  if fresh then self:check_order(graph, function() return true end, o.where) end
  for k, node in ipairs(graph.nodes) do
    local operation = operation_of(node, o.where)
    operation.point = point
    self.run(operation, node, graph.expanded[k].items, graph.expanded[k].facts)
  end
end

return graphs
