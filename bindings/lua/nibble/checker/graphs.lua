-- Captures and graphs: nodes, their order in a graph, and the accesses of a replay.
--
-- The nodes of one stream of a capture are ordered, so a vector clock over these streams gives the order of all nodes.
-- Seen from outside, a replay is one piece of work of its stream. Accesses that do not depend on index tensors are
-- summarized once; a replay checks only the others.

local accesses = require "nibble.checker.accesses"
local spans = require "nibble.checker.spans"

local graphs = {}
graphs.__index = graphs

--- `run(operation, observation, all, items, facts, ordered, known)` makes the checks that are the same outside of
--- graphs. `items` are those of `all` that are not in the summary; `ordered`: their order was checked; `known`: they
--- are recorded elsewhere. `copied(items)` is called for copies that run does not see.
function graphs.new(memory, report, peek, run, copied)
  return setmetatable({ memory = memory, report = report, peek = peek, run = run, copied = copied, captures = {},
    graphs = {},
    shapes = accesses.new_cache() }, graphs)
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
    ("stream %d was forked from the capture on stream %d and not joined back: nothing waits for its %s"):format(
      o.unjoined,
      o.stream, last.operation))
end

---------------------------------------------------------------------------------------------------------------- graphs

-- For each node: how far along each stream of the capture what comes before it reaches. `assumed` are races that were
-- reported: from then on they count as ordered. `visit(k)` is called when node k has its clock, and may assume more
-- about it.
local function walk(graph, visit)
  local place = {}
  for k, node in ipairs(graph.nodes) do
    place[node.stream] = (place[node.stream] or 0) + 1
    local clock = {}
    for _, deps in ipairs { node.deps, graph.assumed[k] or {} } do
      for _, i in ipairs(deps) do
        for stream, reach in pairs(graph.clocks[i]) do clock[stream] = math.max(clock[stream] or 0, reach) end
      end
    end
    clock[node.stream] = place[node.stream]
    graph.clocks[k], graph.places[k] = clock, place[node.stream]
    visit(k, node, clock)
  end
end

-- Storages that two nodes use, one of them to write, although no path leads from one to the other.
local function find_contested(graph)
  local last, contested = {}, {} -- storage -> stream -> {place of the last access, of the last write}
  walk(graph, function(k, node, clock)
    for _, access in ipairs(node.accesses) do
      local streams = last[access.storage] or {}
      last[access.storage] = streams
      for stream, places in pairs(streams) do
        if places[access.write and 1 or 2] > (clock[stream] or 0) then contested[access.storage] = true end
      end
    end
    for _, access in ipairs(node.accesses) do
      local streams = last[access.storage]
      local places = streams[node.stream] or { 0, 0 }
      streams[node.stream] = places
      places[1] = graph.places[k]
      if access.write then places[2] = places[1] end
    end
  end)
  return contested
end

local function key_of(access)
  return ("%d;%d;%s;%s;%s"):format(access.storage, access.offset, access.dtype, table.concat(access.shape, ","),
    table.concat(access.stride, ","))
end

-- Where to find what node k reads in an index tensor, when it is looked at after the replay: there, if nothing writes
-- it later; if something does, in what the last copy before the node took it from, unless the graph writes that too.
-- Else nil.
local function content_of(graph, k, access)
  local before, later
  for _, i in ipairs(graph.writers[access.storage] or {}) do
    if i < k then before = i else later = true end
  end
  if not later then return access end
  local node, from, to = graph.nodes[before], nil, nil
  for _, other in ipairs(node and node.kernel == "copy" and node.accesses or {}) do
    if other.write then to = other else from = other end
  end
  local whole = to and key_of(to) == key_of(access) and from.dtype == to.dtype
    and table.concat(from.shape, ",") == table.concat(to.shape, ",")
  return whole and not graph.writers[from.storage] and from or nil
end

-- All of a node that decides what `accesses.expand` makes of contents.
local function geometry_of(node)
  if node.kernel == "rope_insert" then return nil end
  local parts = { node.kernel }
  for _, access in ipairs(node.accesses) do
    parts[#parts + 1] = ("%s %s %s %s"):format(access.parameter, access.dtype, access.kv_layout,
      table.concat(access.shape, ","))
  end
  for name, value in pairs(node.attributes) do parts[#parts + 1] = ("%s=%s"):format(name, value) end
  table.sort(parts)
  return table.concat(parts, ";")
end

function graphs:finish(o)
  local capture = self.captures[o.capture]
  self.captures[o.capture] = nil
  if not capture then
    self.graphs[o.graph] = nil
    return
  end
  local graph = { nodes = capture.nodes, clocks = {}, places = {}, assumed = {}, expanded = {}, inputs = {},
    writers = {}, indexed = {},
    where = o.where, closed = {}, id = o.graph }
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
  graph.contested = find_contested(graph)
  for k, node in ipairs(graph.nodes) do
    local indices = accesses.indices(node)
    local expanded = { indices = indices }
    graph.expanded[k] = expanded
    if indices then
      graph.indexed[#graph.indexed + 1] = k
      expanded.geometry, expanded.contents_of, expanded.keys = geometry_of(node), {}, {}
      local known = true
      for name, access in pairs(indices) do
        local content = content_of(graph, k, access)
        known, expanded.contents_of[name] = known and content ~= nil, content
        expanded.keys[name] = content and key_of(content)
        graph.in_order = graph.in_order or known and content ~= access -- whose table it is changes on the way
      end
      if not known then
        self.memory.note(("%s (%s) in a graph that writes its index tensors after their use"):format(
          node.operation, node.where or "?"))
      end
      for _, access in ipairs(node.accesses) do
        graph.recheck = graph.recheck or graph.contested[access.storage] -- what is contested depends on contents
      end
    else
      expanded.items, expanded.facts = accesses.expand(node, {})
    end
  end
  self:check_order(graph)
end

function graphs:released(o)
  self.graphs[o.graph] = nil
end

--- The last tensor of a storage was closed by hand: whoever replays cannot give the graph other values any more.
function graphs:closed(storage, where, callers)
  for _, graph in pairs(self.graphs) do
    if graph.inputs[storage] and not graph.closed[storage] then
      graph.closed[storage], graph.any_closed = { where = where, callers = callers }, true
    end
  end
end

local function operation_of(node, replay)
  return { name = node.operation, where = node.where, callers = node.callers, replay = replay }
end

-- Races inside a graph, as far as it is known what its nodes read and write. As outside of graphs, a race that was
-- reported counts as ordered. Each node is compared with the logs of the streams of the capture, as memory.lua has
-- them.
function graphs:check_order(graph, replay)
  if not next(graph.contested) then return end
  local function verb(item) return item.write and "writes" or "reads" end
  local logs = {} -- storage -> stream -> log
  walk(graph, function(k, node, clock)
    local items = graph.expanded[k].items or {}
    for _, hit in ipairs(self.memory:find_conflicts(items, function(item) return logs[item.view.storage] or {} end,
      function(stream) return clock[stream] or 0 end)) do
      local i, item = hit.operation.k, hit.mine
      local earlier = graph.nodes[i]
      if graph.places[i] > (clock[earlier.stream] or 0) then
        self.report("race", operation_of(node, replay), operation_of(earlier, replay),
          ("in the graph %s %s %s while %s %s it (%s): no path leads from node %d to node %d"):format(node.operation,
            verb(item), self.memory.place(item, hit.byte), earlier.operation, verb(hit.item), hit.item.parameter
              or "argument", i, k),
          { item = item, other = hit.item })
        graph.assumed[k] = graph.assumed[k] or {}
        table.insert(graph.assumed[k], i)
        for stream, reach in pairs(graph.clocks[i]) do clock[stream] = math.max(clock[stream] or 0, reach) end
      end
    end
    local operation = { k = k, point = { stream = node.stream, epoch = graph.places[k] } }
    for _, item in ipairs(items) do
      local id = item.view.storage
      if graph.contested[id] then
        logs[id] = logs[id] or {}
        self.memory:log(logs[id], operation, item)
      end
    end
  end)
end

-- The items of a node that the summary has not.
local function changing(expanded)
  if not expanded.changing then
    local list = {}
    for i, item in ipairs(expanded.items) do
      if not expanded.static[i] then list[#list + 1] = item end
    end
    expanded.changing = list
  end
  return expanded.changing
end

-- What never changes in a graph, as one: for each storage the bytes that are read, and those that are written. Also of
-- nodes with index tensors: these, lengths and scales are read whole. `dynamic`: the nodes that do more.
local function summarize(self, graph)
  local plan = { items = {}, dynamic = {}, copies = {}, checks = {} }
  local by_key, passes = {}, {}
  for k, node in ipairs(graph.nodes) do
    local expanded = graph.expanded[k]
    local alone = expanded.indices or node.kernel == "swizzle"
    for _, item in ipairs(expanded.items or {}) do alone = alone or not self.memory:spans(item) end
    expanded.static = {}
    if alone then
      plan.dynamic[#plan.dynamic + 1] = k
    elseif node.kernel == "copy" then
      plan.copies[#plan.copies + 1] = k
    end
    for i, item in ipairs(expanded.items) do
      local whole = expanded.indices and not (item.exact or item.write or item.touch)
      if not alone or (whole and self.memory:spans(item)) then
        local id = item.view.storage
        local key = ("%d %s %s"):format(id, item.write, item.touch)
        local one = by_key[key]
        if not one then
          one = { view = item.view, write = item.write, touch = item.touch, parameter = item.parameter, exact = true,
            key = ("graph %d %s"):format(graph.id, key), parts = {}, distinct = {} }
          by_key[key], plan.items[#plan.items + 1] = one, one
        end
        one.parts[#one.parts + 1] = { k = k, node = node, item = item }
        one.distinct[key_of(item.view)] = item
        if node.kernel == "copy" then passes[id] = true end
        expanded.static[i] = true
      end
    end
  end
  for _, one in ipairs(plan.items) do
    local list = {}
    for _, item in pairs(one.distinct) do
      local more = self.memory:spans(item)
      table.move(more, 1, #more, #list + 1, list)
    end
    one.distinct, list = nil, spans.merged(list)
    function one.spans() return list end
    if not one.touch then
      plan.checks[#plan.checks + 1] = { one.view.storage, list, passes[one.view.storage] or one.write }
    end
  end
  return plan
end

-- Whether all that static nodes read and write counts as written: then they change nothing about it.
local function is_settled(self, plan)
  for _, check in ipairs(plan.checks) do
    local storage = self.memory:storage(check[1])
    if storage.written and spans.missing(storage.written, check[2]) then return false end
    if storage.fresh and check[3] and spans.missing(storage.fresh, check[2]) then return false end
  end
  return true
end

-- Looks at index tensors again. Returns whether something has changed.
local function refresh(self, graph)
  local peeked, fresh = {}, false
  for _, k in ipairs(graph.indexed) do
    local node, expanded = graph.nodes[k], graph.expanded[k]
    local contents, same = {}, expanded.contents ~= nil
    for name in pairs(expanded.indices) do
      local key = expanded.keys[name]
      if key and peeked[key] == nil then peeked[key] = self.peek(expanded.contents_of[name]) or false end
      contents[name] = key and peeked[key] or nil
      same = same and expanded.contents[name] == contents[name]
    end
    if not same then
      fresh, expanded.contents = true, contents
      expanded.items, expanded.facts = accesses.expand(node, contents, expanded.geometry and self.shapes,
        expanded.geometry, expanded)
      expanded.changing = nil
    end
  end
  return fresh
end

function graphs:replay(o, point)
  local graph = self.graphs[o.graph]
  if not graph then return end
  for storage, closed in pairs(graph.any_closed and graph.closed or {}) do
    local input = graph.inputs[storage]
    if not closed.reported then
      closed.reported = true
      self.report("closed", { name = o.operation, where = o.where, callers = o.callers },
        { name = "tensor:close", where = closed.where, callers = closed.callers },
        ("%s reads %s (%s), whose last tensor was closed: its values cannot change any more"):format(o.operation,
          input.parameter or "an argument", input.node.operation))
    end
  end
  if refresh(self, graph) and graph.recheck then self:check_order(graph, o.where) end
  graph.plan = graph.plan or summarize(self, graph)
  local plan = graph.plan
  local whole = { name = o.operation, replay = o.where, point = point, order = self.memory:next_order() }
  local function node_of(k)
    local operation = operation_of(graph.nodes[k], o.where)
    operation.point, operation.order = point, whole.order + k
    return operation
  end
  local racing = self.memory:conflicts(whole, plan.items)[1]
  for _, k in ipairs(plan.dynamic) do
    racing = racing or self.memory:conflicts(whole, changing(graph.expanded[k]))[1]
  end
  if racing then -- which of the nodes?
    for k in ipairs(graph.nodes) do self.memory:check_order(node_of(k), graph.expanded[k].items) end
  end
  local settled = not graph.in_order and is_settled(self, plan)
  local function run(k, items, static)
    self.run(node_of(k), graph.nodes[k], graph.expanded[k].items, items, graph.expanded[k].facts, true, static)
  end
  if settled then
    for _, k in ipairs(plan.dynamic) do run(k, changing(graph.expanded[k])) end
    for _, item in ipairs(plan.items) do
      if item.write or item.touch then self.memory:storage(item.view.storage).version = self.memory:tick() end
    end
    for _, k in ipairs(plan.copies) do self.copied(graph.expanded[k].items) end
  else
    local dynamic = {}
    for _, k in ipairs(plan.dynamic) do dynamic[k] = true end
    for k in ipairs(graph.nodes) do run(k, graph.expanded[k].items, not dynamic[k]) end
  end
  self.memory:remember(whole, plan.items)
end

return graphs
