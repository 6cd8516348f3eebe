-- Random programs of streams, events, waits, graphs and operations, and what is wrong with their order by brute force:
-- sets of everything that comes before, element by element. Nothing here knows clocks or byte ranges.
local programs = {}

local STREAMS, TENSORS, LENGTH = 3, 3, 6

local function union(into, from)
  for key in pairs(from) do into[key] = true end
  return into
end

-- What is written and read: keys like "t1:4" or "page 2:3".
local function collide(a, b)
  for key in pairs(a.writes) do
    if b.writes[key] or b.reads[key] then return true end
  end
  for key in pairs(a.reads) do
    if b.writes[key] then return true end
  end
  return false
end

-- An operation's text for a line, and its sets.
local function random_operation(random, slots)
  local op = { reads = {}, writes = {} }
  local kind = random(slots and 5 or 3)
  local function range(tensor, first, count, set)
    for i = first, first + count - 1 do set[("t%d:%d"):format(tensor, i)] = true end
    return ("t%d:narrow(1, %d, %d)"):format(tensor, first, count)
  end
  local count = 1 + random(3)
  if kind == 0 then
    op.text = range(1 + random(TENSORS), 1 + random(LENGTH - count), count, op.writes) .. ":fill(1)"
  elseif kind <= 2 then
    local to = 1 + random(TENSORS)
    local from = (to + random(TENSORS - 1)) % TENSORS + 1
    local target = range(to, 1 + random(LENGTH - count), count, op.writes)
    op.text = ("%s:copy(%s)"):format(target, range(from, 1 + random(LENGTH - count), count, op.reads))
  elseif kind == 3 then
    local s = 1 + random(#slots)
    for _, slot in ipairs(slots[s]) do op.writes["slot" .. slot] = true end
    op.text, op.late = ("put(%d)"):format(s), true -- what it writes shows only when it runs
  else
    local page, tokens = random(4), 1 + random(2)
    for entry = 0, tokens - 1 do op.reads["slot" .. page * 2 + entry] = true end
    local output = 1 + random(2)
    for entry = 0, tokens - 1 do op.writes["out" .. output .. ":" .. entry] = true end
    op.text, op.late = ("get(%d, %d, %d)"):format(page + 1, tokens, output), true
  end
  return op
end

--- A program and the pairs of lines that it must be told of ("LINE LINE", the smaller first), as a set.
function programs.random(random, slots)
  local lines, expected = {}, {}
  local done, unit = {}, {}  -- all that was done, in order; which replay it was part of
  local before, known = {}, {} -- by stream; by the host
  for s = 1, STREAMS do before[s] = {} end
  local events, graphs = {}, {}

  local function add(text) lines[#lines + 1] = text end
  local function expect(a, b) expected[("%d %d"):format(math.min(a, b), math.max(a, b))] = true end

  -- Does what `nodes` say as one piece of work of a stream.
  local function work(s, nodes)
    local start = union(union({}, before[s]), known)
    local ids = {}
    for _, node in ipairs(nodes) do
      for i = #done, 1, -1 do
        if not ids[i] and not start[i] and collide(done[i], node) then
          expect(done[i].line, node.line)
          for _, mate in ipairs(unit[i].ids) do start[mate] = true end
          union(start, unit[i].before)
        end
      end
      done[#done + 1] = node
      ids[#done] = true
    end
    local list = {}
    for id in pairs(ids) do list[#list + 1] = id end
    for id in pairs(ids) do unit[id] = { ids = list, before = start } end
    before[s] = union(union({}, start), ids)
  end

  -- Races between a graph's nodes: those that show at the capture's end, or all.
  local function check_graph(nodes, all)
    for k, node in ipairs(nodes) do
      node.before = {}
      for d in pairs(node.deps) do union(node.before, nodes[d].before)[d] = true end
      for i = k - 1, 1, -1 do
        if not node.before[i] and (all or not (node.late or nodes[i].late)) and collide(nodes[i], node) then
          expect(nodes[i].line, node.line)
          node.deps[i] = true -- from now on
          union(node.before, nodes[i].before)[i] = true
        end
      end
    end
  end

  local function capture()
    local origin, other = 1 + random(STREAMS), 1 + random(STREAMS)
    local nodes, deps, marks, joined = {}, { [origin] = {} }, {}, false
    graphs[#graphs + 1] = nodes
    add(("g[%d] = s[%d]:capture(function()"):format(#graphs, origin))
    local function fork()
      if other == origin then return end
      add(("  s[%d]:wait(s[%d]:record())"):format(other, origin))
      deps[other] = union(deps[other] or {}, deps[origin])
      joined = true
    end
    for _ = 1, 3 + random(4) do
      local what, s = random(8), random(2) == 0 and deps[other] and other or origin
      if what == 0 then
        fork()
      elseif what == 1 and deps[other] and other ~= origin then
        add(("  s[%d]:wait(s[%d]:record())"):format(origin, other))
        union(deps[origin], deps[other])
      elseif what == 2 then
        add(("  m[%d] = s[%d]:record()"):format(#marks + 1, s))
        marks[#marks + 1] = union({}, deps[s])
      elseif what == 3 and #marks > 0 then
        local mark = 1 + random(#marks)
        add(("  s[%d]:wait(m[%d])"):format(s, mark))
        union(deps[s], marks[mark])
      else
        local node = random_operation(random, slots)
        add(("  on(%d, function() %s end)"):format(s, node.text))
        node.line, node.deps = #lines, union({}, deps[s])
        nodes[#nodes + 1] = node
        deps[s] = { [#nodes] = true }
      end
    end
    if joined then add(("  s[%d]:wait(s[%d]:record())"):format(origin, other)) end
    add("end)")
    check_graph(nodes, false)
  end

  for _ = 1, 14 + random(12) do
    local what, s = random(12), 1 + random(STREAMS)
    if what == 0 then
      events[#events + 1] = union({}, before[s])
      union(events[#events], known)
      add(("e[%d] = s[%d]:record()"):format(#events, s))
    elseif what == 1 or what == 2 then
      if #events > 0 then
        local event = 1 + random(#events)
        add(("s[%d]:wait(e[%d])"):format(s, event))
        union(before[s], events[event])
      end
    elseif what == 3 then
      local other = 1 + random(STREAMS)
      add(("s[%d]:wait(s[%d]:record())"):format(s, other))
      union(before[s], before[other])
    elseif what == 4 and random(3) == 0 then
      add(("s[%d]:synchronize()"):format(s))
      union(known, before[s])
    elseif what == 5 and random(3) == 0 then
      local tensor = 1 + random(TENSORS)
      add(("t%d:bytes()"):format(tensor))
      local last = {} -- the writers of any part of the storage, on each stream all that was before them
      for i, op in ipairs(done) do
        for key in pairs(op.writes) do
          if key:find("^t" .. tensor .. ":") then last[i] = true end
        end
      end
      for i in pairs(last) do
        for _, mate in ipairs(unit[i].ids) do known[mate] = true end
        union(known, unit[i].before)
      end
    elseif what == 6 then
      capture()
    elseif what == 7 and #graphs > 0 then
      local graph = 1 + random(#graphs)
      add(("on(%d, function() g[%d]:replay() end)"):format(s, graph))
      check_graph(graphs[graph], true)
      if #graphs[graph] > 0 then work(s, graphs[graph]) end
    else
      local op = random_operation(random, slots)
      add(("on(%d, function() %s end)"):format(s, op.text))
      op.line = #lines
      work(s, { op })
    end
  end
  return table.concat(lines, "\n"), expected
end

--- A program of one stream on tensors that start unwritten, and the lines that read what nothing wrote.
function programs.unwritten(random)
  local lines, expected, written = {}, {}, {}
  for t = 1, TENSORS do written[t] = {} end
  for _ = 1, 25 do
    local t, count = 1 + random(TENSORS), 1 + random(3)
    local first, what = 1 + random(LENGTH - count + 1), random(4)
    local part = ("t%d:narrow(1, %d, %d)"):format(t, first, count)
    if what == 0 then
      lines[#lines + 1] = part .. ":fill(1)"
      for i = first, first + count - 1 do written[t][i] = true end
    elseif what <= 2 then
      local from = (t + random(TENSORS - 1)) % TENSORS + 1
      local start = 1 + random(LENGTH - count + 1)
      lines[#lines + 1] = ("%s:copy(t%d:narrow(1, %d, %d))"):format(part, from, start, count)
      for i = 0, count - 1 do written[t][first + i] = written[from][start + i] end
    else
      lines[#lines + 1] = part .. ":bytes()"
      for i = first, first + count - 1 do
        if not written[t][i] then expected[#lines] = true end
      end
    end
  end
  return table.concat(lines, "\n"), expected
end

return programs
