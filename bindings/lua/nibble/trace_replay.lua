--- Executes a trace again, and checks that the same happens.
--
--   local run = assert(require("nibble.trace").read("run.jsonl"))
--   local result, message = require("nibble.trace_replay").replay(run, { device = "cuda:0" })
--
-- It executes the work, events, waits, captures, updates and replays of the trace in order, each on its stream, with
-- storages of the recorded sizes, on one device. Data that a script wrote from the host is written again if the trace
-- has it; it has the integers that operations read as slots, pages and lengths. Other data from the host becomes random
-- values, and storages that are older than the trace begin with zeros. So the bytes of K and V differ from the recorded
-- run. Rotary tables get the default theta.
--
-- It checks each piece of work, which must have the same kernel, stream, tensors (storage, place, dtype, shape,
-- strides, parameter) and numbers, and in a graph the same id and dependencies. Records, waits and replays must be on
-- the same stream. Each index tensor must hold the recorded values when its work, or the replay of its graph, is
-- queued. The first differences are reported with their line in the file.
--
-- It cannot execute user kernels and functions of the host, nor traces that need more than `max_bytes`: then it returns
-- `nil, message`. Copies between devices become copies on the one device.

local nibble = require "nibble"
local numbers = require "nibble.numbers"
local operations = require "nibble.operations"
local trace = require "nibble.trace"

local replay = {}

local MOST_DIFFERENCES = 20

--- Most bytes that a replay allocates by default, so that a tampered file cannot exhaust the machine.
replay.MOST_BYTES = 4 << 30

-- Copies between devices; here they are copies on one device.
local TRANSFERS = { ["copy to device"] = true, ["copy to host"] = true, ["copy from device"] = true }
local function kernel_of(work) return TRANSFERS[work.kernel] and "copy" or work.kernel end

local executor = {}
executor.__index = executor
replay.executor = executor -- for specs

local function named(work)
  local map = {}
  for _, access in ipairs(work.accesses) do
    if access.parameter then map[access.parameter] = access end
  end
  return map
end

local function span(access) -- bytes from the begin of the first element to the end of the last
  local last = 0
  for i, size in ipairs(access.shape) do
    if size == 0 then return 0 end
    last = last + (size - 1) * access.stride[i]
  end
  return (last + 1) * numbers.bytes[access.dtype]
end

local function attribute(work, name)
  local value = (work.attributes or {})[name]
  if type(value) ~= "string" then return value end
  local special = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }
  return special[value] or tonumber(value)
end

function executor:differ(line, format, ...)
  if #self.differences < MOST_DIFFERENCES then
    self.differences[#self.differences + 1] = ("line %d: "):format(line) .. numbers.format(format, ...)
  end
end

------------------------------------------------------------------------------------------------------------- tensors

-- The storage with a number, as a tensor of all its bytes.
function executor:base(id)
  local create = self.captured and nibble.empty or nibble.zeros -- a fill would become a node
  if not self.bases[id] then
    self.bases[id] = create({ self.sizes[id] or 0 }, { dtype = "uint8", device = self.device })
  end
end

-- Calls `fn` without comparing its work.
function executor:quietly(fn)
  local before = self.made
  self.made = nil
  fn()
  self.made = before
end

function executor:view(access)
  if not access then return nil end
  if not self.bases[access.storage] then self:quietly(function() self:base(access.storage) end) end
  local flat = self.bases[access.storage]:narrow(1, access.offset + 1, span(access))
  return flat:reinterpret(access.dtype):as_strided(access.shape, access.stride)
end

-- From now on, the storage of an access is that of a result.
function executor:bind(access, tensor)
  if access and tensor then self.bases[access.storage] = tensor:view(tensor:numel()):reinterpret("uint8") end
end

function executor:write(access, contents)
  self:quietly(function()
    local t = self:view(access)
    if contents then
      local bytes = contents:gsub("%x%x", function(digits) return string.char(tonumber(digits, 16)) end)
      t:copy(nibble.from_bytes(bytes, access.shape, { dtype = access.dtype, device = self.device }))
    elseif numbers.floats[access.dtype] then
      t:copy(nibble.randn(access.shape, { dtype = access.dtype, device = self.device, seed = access.storage }))
    else
      t:copy(nibble.randint(0, 128, access.shape,
        { dtype = access.dtype, device = self.device, seed = access.storage }))
    end
    self:wait() -- the host wrote it before anything that comes
  end)
end

---------------------------------------------------------------------------------------------------------- operations

-- The description of the operation that queued the work, if one did. Both insertions have the same kernel.
local function operation_of(work)
  local op = operations.named[work.operation]
  return op and op.kernel == work.kernel and op or operations.of_kernel[work.kernel]
end

-- Calls an operation with the accesses and numbers of its pieces of work (nvfp4_quantize_paged_kv_cache has two, for K
-- and for V).
function executor:operate(op, works)
  local seen, given = {}, {}
  for _, item in ipairs(works) do
    for name, access in pairs(named(item.work)) do seen[name] = access end
  end
  for _, p in ipairs(op.tensors) do
    given[p.name] = self:view(seen[p.name])
    if not given[p.name] and p.absent then
      self:quietly(function()
        given[p.name] = nibble.zeros(p.absent(seen), { dtype = p.dtype[1], device = self.device })
      end)
    end
    if seen[p.name] then given.kv_layout = given.kv_layout or seen[p.name].kv_layout end
  end
  for _, p in ipairs(op.parameters) do
    local value = given[p.name]
    if value == nil and p.observed then value = p.observed(seen) end
    for _, item in ipairs(value == nil and p.attribute and works or {}) do
      if not p.beside or named(item.work)[p.beside] then value = value or attribute(item.work, p.attribute) end
    end
    given[p.name] = value
  end
  local results = table.pack(op:call(given))
  for i, result in ipairs(op.results) do
    for n, part in ipairs(operations.single { result }) do
      if not given[part.name] then self:bind(seen[part.name], result.pair and results[i][n] or results[i]) end
    end
  end
end

-- Other kernels: fn(executor, work, its accesses by parameter).
local execute = {}

function execute.rope_table(self, _, p)
  local a = p.rope_table
  self:bind(a, nibble.rope_table(a.shape[1], { dtype = a.dtype, device = self.device }))
end

function execute.copy(self, _, p) self:view(p.destination):copy(self:view(p.source)) end

function execute.fill(self, work, p) self:view(p.tensor):fill(attribute(work, "value")) end

function execute.arange(self, work, p)
  local start, step, count = attribute(work, "start"), attribute(work, "step"), p.tensor.shape[1]
  local stop = math.type(start) == "integer" and start + count * step or start + (count - 0.5) * step
  self:bind(p.tensor, nibble.arange(start, stop, step, { dtype = p.tensor.dtype, device = self.device }))
end

function execute.random(self, work, p)
  local a, low = p.tensor, attribute(work, "low")
  local opts = { dtype = a.dtype, device = self.device, seed = attribute(work, "seed") }
  local result
  if low then
    result = nibble.randint(low, low + attribute(work, "range"), a.shape, opts)
  elseif numbers.integers[a.dtype] then
    result = nibble.randperm(a.shape[1], opts)
  else
    result = nibble.randn(a.shape, opts)
  end
  self:bind(a, result)
end

----------------------------------------------------------------------------------------------------------- comparing

local function same_list(a, b)
  if #a ~= #b then return false end
  for i, x in ipairs(a) do
    if x ~= b[i] then return false end
  end
  return true
end

-- The number of the storage that replaces a recorded one, and the offset of its first byte there.
function executor:expected_place(id)
  if self.bases[id] then return self.bases[id]:storage() end
  return self.temporary[id], 0
end

function executor:compare_access(line, kernel, wanted, got)
  local what = ("%s: %s"):format(kernel, wanted.parameter or "argument")
  for _, name in ipairs { "parameter", "dtype", "write", "kv_layout" } do
    if wanted[name] ~= got[name] then
      return self:differ(line, "%s: %s was %s, is %s", what, name, numbers.text(wanted[name]), numbers.text(got[name]))
    end
  end
  for _, name in ipairs { "shape", "stride" } do
    if not same_list(wanted[name], got[name]) then
      return self:differ(line, "%s: %s was {%s}, is {%s}", what, name, table.concat(wanted[name], ", "),
        table.concat(got[name], ", "))
    end
  end
  local id, offset = self:expected_place(wanted.storage)
  if not id then
    self.temporary[wanted.storage], id, offset = got.storage, got.storage, 0
  end
  if got.storage ~= id or got.offset ~= offset + wanted.offset then
    self:differ(line, "%s: it lies elsewhere (byte %d of storage %d was recorded)", what, wanted.offset, wanted.storage)
  end
end

-- Recorded streams and streams of the replay must correspond one to one.
function executor:compare_stream(line, what, wanted, got)
  local is, was = self.stream_ids[wanted], self.recorded_ids[got]
  if not is and not was then
    self.stream_ids[wanted], self.recorded_ids[got] = got, wanted
  elseif is ~= got then
    self:differ(line, "%s: stream was %d, is %s", what, wanted, was and ("%d"):format(was) or "another")
  end
end

function executor:compare_work(line, wanted, got)
  if kernel_of(wanted) ~= got.kernel then
    return self:differ(line, "kernel was %s, is %s", wanted.kernel, got.kernel)
  end
  self:compare_stream(line, wanted.kernel, wanted.stream, got.stream)
  if wanted.node ~= got.node then
    return self:differ(line, "%s: node was %s, is %s", wanted.kernel, tostring(wanted.node), tostring(got.node))
  end
  if wanted.deps and not same_list(wanted.deps, got.deps) then
    return self:differ(line, "%s: dependencies were {%s}, are {%s}", wanted.kernel, table.concat(wanted.deps, ", "),
      table.concat(got.deps, ", "))
  end
  if #wanted.accesses ~= #got.accesses then
    return self:differ(line, "%s: tensors were %d, are %d", wanted.kernel, #wanted.accesses, #got.accesses)
  end
  for name in pairs(wanted.attributes or {}) do
    local was, is = attribute(wanted, name), got.attributes[name]
    if was ~= is and (was == was or is == is) then
      self:differ(line, "%s: %s was %s, is %s", wanted.kernel, name, numbers.text(was), numbers.text(is))
    end
  end
  for i, access in ipairs(wanted.accesses) do self:compare_access(line, wanted.kernel, access, got.accesses[i]) end
end

function executor:compare_indices(line, wanted, accesses)
  if not wanted then return end
  local got = trace.indices_of(accesses) or {}
  for i, index in ipairs(wanted) do
    self.compared = self.compared + #index.values
    local values = got[i] and got[i].values or {}
    for n = 1, math.max(#index.values, #values) do
      if index.values[n] ~= values[n] then
        self:differ(line, "%s: element %d was %s, is %s", index.parameter, n, tostring(index.values[n]),
          tostring(values[n]))
        break
      end
    end
  end
end

----------------------------------------------------------------------------------------------------------- executing

function executor:stream(id)
  if not self.streams[id] then self.streams[id] = nibble.stream { device = self.device } end
  return self.streams[id]
end

function executor:wait()
  local ok, message = pcall(nibble.synchronize, self.device)
  if not ok then self.faults[#self.faults + 1] = tostring(message) end
end

-- Executes the pieces of work `works` that one call queued, at index `at` of the trace.
function executor:run_works(works)
  local line, main = works[1].line, works[1].work
  for _, item in ipairs(works) do
    if item.work.kernel == "quantize_cache" then
      main = item.work -- of K
      break
    end
  end
  self.made = {}
  local ok, message = pcall(function()
    self:stream(main.stream):scope(function()
      local op = operation_of(main)
      if op then return self:operate(op, works) end
      execute[kernel_of(main)](self, main, named(main))
    end)
  end)
  local made = self.made
  self.made = nil
  if not ok then
    if message == self then error(self, 0) end
    self:differ(line, "%s: %s", main.operation, tostring(message))
    error(self, 0) -- later work depends on it
  end
  self.works = self.works + #works
  if #made ~= #works then
    return self:differ(line, "%s: it was %d pieces of work, is %d", main.operation, #works, #made)
  end
  for i, item in ipairs(works) do
    self:compare_work(item.line, item.work, made[i])
    if self.captured then
      table.move(made[i].accesses, 1, #made[i].accesses, #self.captured + 1, self.captured)
    else
      self:compare_indices(item.line, item.work.indices, made[i].accesses)
    end
  end
end

-- Executes with `fn` what is no work but happens on a stream: records, waits, replays.
function executor:on_stream(o, line, fn)
  self.seen = {}
  fn(self:stream(o.stream))
  for _, seen in ipairs(self.seen) do
    if seen.kind == o.kind then self:compare_stream(line, o.kind:gsub("_", " "), o.stream, seen.stream) end
  end
  self.seen = nil
end

local step = {}

function step:event_record(o, line)
  self:on_stream(o, line, function(stream) self.events[o.event] = stream:record() end)
end

function step:stream_wait(o, line)
  if not self.events[o.event] then return end
  self:on_stream(o, line, function(stream) stream:wait(self.events[o.event]) end)
end

function step:synchronized() self:wait() end
function step:stream_created(o) self:stream(o.stream) end
function step:event_released(o) self.events[o.event] = nil end
function step:storage_freed(o) self.bases[o.storage], self.temporary[o.storage] = nil, nil end

function step:host_write(o)
  for _, access in ipairs(o.accesses or {}) do self:write(access, o.contents) end
end

function step:graph_released(o)
  if self.graphs[o.graph] then self.graphs[o.graph].graph:close() end
  self.graphs[o.graph] = nil
end

function step:replay(o, line)
  local entry = self.graphs[o.graph]
  if not entry then return self:differ(line, "replay: graph %d was captured before the recording began", o.graph) end
  self:on_stream(o, line, function(stream) stream:scope(entry.graph.replay, entry.graph) end)
  self.replays = self.replays + 1
  self:compare_indices(line, o.indices, entry.accesses)
end

-- Executes a capture from its begin to its end.
function executor:capture(from)
  local list, begin = self.list, self.list[from]
  local to = from
  repeat
    to = to + 1
    if to > #list then
      if self.cut then return to end
      error("the trace ends inside a capture", 0)
    end
  until list[to].capture == begin.capture and (list[to].kind == "capture_end" or list[to].kind == "capture_abort")
  local stop, fresh = list[to], {}
  for i = from, to do
    if list[i].kind == "storage_created" then fresh[list[i].storage] = true end
    for _, access in ipairs(list[i].accesses or {}) do
      if not fresh[access.storage] then self:base(access.storage) end
    end
  end
  local accesses, outer = {}, self.captured
  self.captured = accesses
  local function body()
    self:run(from + 1, to - 1)
    if stop.kind == "capture_abort" then error("the recorded capture ends here", 0) end
  end
  local entry = stop.kind == "capture_end" and self.graphs[stop.graph]
  local ok, result
  if entry then
    ok, result = pcall(entry.graph.update, entry.graph, body)
  else
    local s = self:stream(begin.stream)
    ok, result = pcall(s.capture, s, body)
  end
  self.captured = outer
  if result == self then error(self, 0) end
  if ok ~= (stop.kind == "capture_end") then
    self:differ(to + 1, "the capture %s: %s", ok and "failed in the trace" or "succeeded in the trace",
      ok and "it succeeds here" or tostring(result))
  elseif ok then
    self.graphs[stop.graph] = { graph = entry and entry.graph or result, accesses = accesses }
  end
  return to
end

function executor:run(from, to)
  local i = from
  while i <= to and #self.differences < MOST_DIFFERENCES do
    local o = self.list[i]
    self.line = i + 1
    if o.kind == "capture_begin" then
      i = self:capture(i)
    elseif o.kind == "work" then
      local group = self.groups[i]
      if group ~= "part" then
        if not o.kernel then
          for _, access in ipairs(o.accesses) do self:write(access, o.contents) end
        elseif o.contents then -- a copy of what the recorder could not see
          self:wait() -- for what may still read the destination
          for _, access in ipairs(o.accesses) do
            if access.write then self:write(access, o.contents) end
          end
          self.works = self.works + 1
        else
          self:run_works(group or { { line = i + 1, work = o } })
        end
      end
    elseif step[o.kind] then
      step[o.kind](self, o, i + 1)
    end
    if self.progress then self.progress(i) end
    i = i + 1
  end
end

-- The pieces of work of one call of nvfp4_quantize_paged_kv_cache: K's, then V's, each after its fill and amax if it
-- has them.
local function find_groups(list)
  local groups, works = {}, {}
  for i, o in ipairs(list) do
    if o.kind == "work" and o.kernel then
      works[#works + 1] = { index = i, line = i + 1, work = o }
      if o.kernel == "quantize_cache" and named(o)["kv_cache (V)"] then
        local first = #works
        local function back() first = first - (named(works[first].work).amax and 2 or 0) end -- fill and amax
        back()
        first = first - 1
        back()
        local group = {}
        for n = math.max(first, 1), #works do
          group[#group + 1] = works[n]
          groups[works[n].index] = "part"
        end
        groups[group[1].index] = group
      end
    end
  end
  return groups
end

-- The size that each storage must have for all views of it.
local function find_sizes(list)
  local sizes = {}
  for _, o in ipairs(list) do
    if o.kind == "storage_created" then sizes[o.storage] = math.max(sizes[o.storage] or 0, o.bytes or 0) end
    for _, access in ipairs(o.accesses or {}) do
      sizes[access.storage] = math.max(sizes[access.storage] or 0, access.offset + span(access))
    end
  end
  return sizes
end

---@class nibble.replay_result
---@field ok boolean
---@field differences string[]  "line N: ...", at most 20
---@field works integer         pieces of work that were executed and compared
---@field replays integer       of graphs
---@field compared integer      elements of index tensors
---@field faults string[]       content faults that the device reported meanwhile

-- Cuts a trace that ends inside a call: one call of nvfp4_quantize_paged_kv_cache queues K's and V's work.
local function whole(list)
  local last = #list
  for i = #list, 1, -1 do
    local o = list[i]
    local part = o.kind == "work" and o.operation == "quantization.nvfp4_quantize_paged_kv_cache"
    if part and named(o)["kv_cache (V)"] or o.kind == "work" and not part and o.kernel ~= "fill" then break end
    if part then last = i - 1 end
  end
  return table.move(list, 1, last, 1, {})
end

-- The most bytes that the trace's storages need at a time, and the line where that is; or the line where a single view
-- needs more than `most`.
local function find_peak(list, sizes, most)
  local live, sum, peak, line = {}, 0, 0, 1
  for i, o in ipairs(list) do
    for _, access in ipairs(o.accesses or {}) do
      if not live[access.storage] then
        live[access.storage] = true
        sum = sum + sizes[access.storage]
      end
      -- A result with the shape of an expanded view (stride 0) is larger than its storage.
      local dense = numbers.bytes[access.dtype]
      for _, size in ipairs(access.shape) do
        if size > 0 and dense > most // size then return math.maxinteger, i + 1 end
        dense = dense * math.max(size, 1)
      end
    end
    if sum > peak then peak, line = sum, i + 1 end
    if sum > most or sum < 0 then break end
    if o.kind == "storage_freed" and live[o.storage] then live[o.storage], sum = nil, sum - sizes[o.storage] end
  end
  return sum < 0 and math.maxinteger or peak, line
end

--- Executes a trace again; see the top of this file.
---@param run nibble.trace
---@param opts? {device?: string, max_bytes?: integer, progress?: fun(done: integer)}  max_bytes: what it may allocate (default: 4
---                 GiB, but at most half of the device's memory)
---@return nibble.replay_result?
---@return string? message
function replay.replay(run, opts)
  opts = opts or {}
  for i, o in ipairs(run.list) do
    if o.kind == "work" and (o.user_kernel or o.kernel and not operation_of(o) and not execute[kernel_of(o)]
      and o.kernel ~= "amax") then
      return nil, ("line %d: %s %s cannot be executed again"):format(i + 1, o.user_kernel and "the user kernel"
        or "kernel", o.kernel)
    elseif o.operation == "stream:call" then
      return nil, ("line %d: a function of the host cannot be executed again"):format(i + 1)
    end
  end
  local device, reason = nibble.device(opts.device)
  if not device then return nil, reason end
  local most = opts.max_bytes or replay.MOST_BYTES
  for _, info in ipairs(nibble.devices()) do
    if info.name == device and info.memory and not opts.max_bytes then most = math.min(most, info.memory // 2) end
  end
  local list = run.cut and whole(run.list) or run.list
  local sizes = find_sizes(list)
  local peak, line = find_peak(list, sizes, most)
  if peak > most then
    return nil, ("max_bytes: expected storages of at most %d bytes, got more at line %d"):format(most, line)
  end
  local self = setmetatable({
    list = list, cut = run.cut, device = device, progress = opts.progress, groups = find_groups(list), sizes = sizes,
    stream_ids = {}, recorded_ids = {}, bases = {}, temporary = {}, streams = {}, events = {}, graphs = {},
      differences = {},
    faults = {}, works = 0, replays = 0, compared = 0,
  }, executor)
  local used, fresh = nibble.memory(device).used, 0
  nibble.observe(function(o)
    if self.made and o.kind == "work" then self.made[#self.made + 1] = o end
    if self.seen then self.seen[#self.seen + 1] = o end
    if o.kind == "storage_created" then -- also what an operation makes for a result that the trace does not have
      fresh = fresh + o.bytes
      if fresh <= most then return end
      collectgarbage()
      fresh = nibble.memory(device).used - used
      self.refused = o.bytes > most or fresh > 2 * most -- what the garbage's queued work uses is still there
      if self.refused then error(self, 0) end
    end
  end, "replay")
  local ok, message = pcall(self.run, self, 1, #list)
  if ok then self:wait() end
  nibble.observe(nil, "replay")
  if self.refused then
    return nil, ("max_bytes: expected results of at most %d bytes, got more at line %d"):format(most, self.line)
  end
  if not ok and message ~= self then
    if tostring(message):find("interrupted!$") then error(message, 0) end
    self:differ(#list + 1, "%s", tostring(message))
  end
  return {
    ok = #self.differences == 0, differences = self.differences, works = self.works, replays = self.replays,
    compared = self.compared, faults = self.faults,
  }
end

return replay
