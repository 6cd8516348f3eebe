--- A run of a scenario: the argument `run` of its functions. nibble.scenario makes two runs for each attempt and
--- compares them after each step: one with graphs and a ledger (nibble.ledger), and one that executes the same work
--- eagerly.
--
--   run.p            parameters, by name             run.device, run.seed, run.steps, run.step (0 in setup)
--   run.random(n)    0 .. n-1 from the run's seed     run.main, run.side: streams; main is the current one
--   run.eager        whether this is the eager run. Both runs must do the same work, so use it only for checks
--   run.state        a table for the scenario's own data
--
--   run:cache(opts)              creates a paged cache with a ledger (nibble.kv)
--   run:graph(key, fn, how)      captures fn at the first call, and replays the graph at each call
--   run:randn(shape, opts)       random values on the run's device
--   run:watch(name, tensor)      compares every byte of the tensor after each step
--   run:effect(info, fn)         fn updates the ledger for work that was just queued: now, or at each replay if the work
--                                is captured
--   run:same(what, tensor, expected), run:expect(condition, format, ...), run:fail(format, ...)     checks
--   run:timed(name, fn, bytes), run:series(name, value, unit), run:say(format, ...)                 for the report

local nibble = require "nibble"
local ledger = require "nibble.ledger"
local numbers = require "nibble.numbers"
local pages = require "nibble.pages"

---@class nibble.run
---@field p table<string, any>
---@field device string
---@field seed integer
---@field steps integer
---@field step integer
---@field state table
---@field eager boolean
---@field random fun(n: integer): integer
---@field main nibble.stream
---@field side nibble.stream
---@field watched {name: string, tensor: nibble.tensor, where: function, image: nibble.image?}[]
---@field caches nibble.kv[]
local run = {}
run.__index = run

--- The error that `fail`, `expect` and `same` raise when a check fails. Any other error is one of the work itself.
---@class nibble.failure
---@field message string
local failure = { __tostring = function(self) return self.message end }
run.failure = failure

--- Creates a run; called by nibble.scenario.
---@param opts {p: table, device: string, seed: integer, steps: integer, eager?: boolean, snapshots?: boolean}
---@return nibble.run
function run.new(opts)
  return setmetatable({
    p = opts.p, device = opts.device, seed = opts.seed, steps = opts.steps, step = 0, eager = opts.eager or false,
      state = {},
    snapshots = opts.snapshots, random = pages.generator(opts.seed), main = nibble.stream { device = opts.device },
    side = nibble.stream { device = opts.device }, watched = {}, caches = {}, graphs = {}, keys = {}, phases = {},
      events = {},
    ops = {}, lists = {}, notes = {}, seeds = 0, compared = 0,
  }, run)
end

--- A new seed at each call, derived from the run's.
---@return integer
function run:next_seed()
  self.seeds = self.seeds + 1
  return self.seed * 1000 + self.seeds
end

--- Standard normal values on the run's device; default dtype bfloat16.
---@param shape integer[]
---@param opts? {dtype?: nibble.dtype, device?: string}
---@return nibble.tensor
function run:randn(shape, opts)
  opts = opts or {}
  return nibble.randn(shape, { dtype = opts.dtype or "bfloat16", device = opts.device or self.device,
    seed = self:next_seed() })
end

--- Creates a paged KV cache; see nibble.kv.
---@param opts nibble.kv_options
---@return nibble.kv
function run:cache(opts)
  local cache = require("nibble.kv").new(self, opts)
  cache.snapshots = {}
  self.caches[#self.caches + 1] = cache
  return cache
end

---------------------------------------------------------------------------------------------------------------- work

--- Calls fn and measures its device time on the main stream. During a capture it only calls fn.
---@param name string
---@param fn fun()
---@param bytes? integer  that the work moves
function run:timed(name, fn, bytes)
  if self.collecting then return fn() end
  local phase = self.phases[name]
  if not phase then
    phase = { name = name, calls = 0, ms = 0.0 }
    self.phases[name], self.phases[#self.phases + 1] = phase, phase
  end
  local from = self.main:record()
  fn()
  self.events[#self.events + 1] = { phase, from, self.main:record() }
  phase.calls = phase.calls + 1
  if bytes then phase.bytes = (phase.bytes or 0) + bytes end
end

local function carry_out(self, effect)
  local bytes = effect.info.bytes or 0
  if type(bytes) == "function" then bytes = bytes() end
  if self.phase then self.phase.bytes = (self.phase.bytes or 0) + bytes end
  if not self.eager then effect.fn() end
end

--- Registers what the work just queued does to memory: `fn` updates the images of `watch` with nibble.reference. It is
--- called now or, if the work is captured, at each replay. The eager run has no ledger and does not call it.
---@param info {op: string, bytes?: integer|fun(): integer, cache?: string}  bytes that the work moves
---@param fn fun()
function run:effect(info, fn)
  local effect = { info = info, fn = fn }
  if self.collecting then
    self.collecting[#self.collecting + 1] = effect
  else
    self.ops[info.op] = (self.ops[info.op] or 0) + 1
    carry_out(self, effect)
  end
end

local function capture(self, entry, fn, update)
  local effects = {}
  local function hide_scales(hidden)
    for _, cache in ipairs(self.caches) do cache:hide_scales(hidden) end
  end
  hide_scales(true)
  self.main:synchronize()
  self.collecting = effects
  local ok, message = pcall(function()
    if update then
      if entry.graph:update(fn) then entry.updates = entry.updates + 1 else entry.rebuilt = entry.rebuilt + 1 end
    else
      local graph = self.main:capture(fn)
      if entry.graph then entry.graph:close() end
      entry.graph, entry.captures = graph, entry.captures + 1
    end
  end)
  self.collecting = nil
  hide_scales(false)
  if not ok then error(message, 0) end
  entry.effects, entry.nodes = effects, entry.graph:nodes()
end

--- Runs the work of `fn` as a graph: captures it at the first call with this key, and replays the graph at each call.
--- `how` = "update" first updates the graph with a new capture, "capture" makes a new graph. An error in fn leaves the
--- old graph unchanged and is raised again. The eager run only calls fn.
---@param key any
---@param fn fun()
---@param how? "update"|"capture"
function run:graph(key, fn, how)
  if how and how ~= "update" and how ~= "capture" then
    error(('run:graph: how: expected "update", "capture" or nil, got %s'):format(tostring(how)), 0)
  end
  local name = self.eager and "step, eager" or "step, graph replay"
  if self.eager then
    self:timed(name, function()
      self.phase = self.phases[name]
      fn()
    end)
    self.phase = nil
    return
  end
  local entry = self.graphs[key] or { key = key, captures = 0, updates = 0, rebuilt = 0, replays = 0 }
  if not entry.graph or how then capture(self, entry, fn, entry.graph and how == "update") end
  if not self.graphs[key] then self.graphs[key], self.keys[#self.keys + 1] = entry, key end
  self:timed(name, function() entry.graph:replay() end)
  entry.replays = entry.replays + 1
  for _, node in ipairs(entry.nodes) do self.ops[node.name] = (self.ops[node.name] or 0) + 1 end
  self.phase = self.phases[name]
  for _, effect in ipairs(entry.effects) do carry_out(self, effect) end
  self.phase = nil
end

-------------------------------------------------------------------------------------------------------------- checks

--- Compares every byte of this tensor after each step, with the image that it returns and with the same tensor of the
--- eager run. `effect` functions update the image (`put`, `set`). Returns nil in the eager run.
---@param name string
---@param tensor nibble.tensor
---@param where? fun(offset: integer, got: integer, wanted: integer): string  describes the element that a byte belongs to
---@return nibble.image?
function run:watch(name, tensor, where)
  local entry = { name = name, tensor = tensor, where = where or ledger.index_of(tensor) }
  if not self.eager then entry.image = ledger.image(name, tensor, entry.where) end
  self.watched[#self.watched + 1] = entry
  return entry.image
end

--- Ends the run with a failure.
---@param format string
---@param ... any
function run:fail(format, ...) -- luacheck: no self
  error(setmetatable({ message = numbers.format(format, ...) }, failure), 0)
end

---@param condition any
---@param format string  what is wrong if the condition is false
---@param ... any
function run:expect(condition, format, ...)
  if not condition then self:fail(format, ...) end
end

--- Checks that a tensor holds the bytes of another tensor, or of a plain array of nibble.reference.
---@param what string
---@param tensor nibble.tensor
---@param expected nibble.tensor|{dtype: string, shape: integer[], bytes: string}
function run:same(what, tensor, expected)
  local array = require("nibble.reference").array(expected)
  local got, wanted = tensor.shape, array.shape
  self:expect(table.concat(got, ",") == table.concat(wanted, ",") and tensor.dtype == array.dtype,
    "%s: got %s {%s}, expected %s {%s}", what, tensor.dtype, table.concat(got, ", "), array.dtype,
      table.concat(wanted, ", "))
  local bytes = tensor:bytes()
  self.compared = self.compared + #bytes
  local difference = ledger.difference(what, bytes, array.bytes, ledger.index_of(tensor), "the reference")
  if difference then self:fail("%s", difference) end
end

--- Compares all watched tensors with the ledger, then with those of the run `other`.
---@param other nibble.run
function run:compare(other)
  for _, entry in ipairs(self.watched) do
    local before = entry.image.compared
    local difference = entry.image:difference()
    self.compared = self.compared + entry.image.compared - before
    if difference then self:fail("%s", difference) end
  end
  self:expect(#self.watched == #other.watched, "%d tensors are watched, %d in the eager run", #self.watched,
    #other.watched)
  for i, entry in ipairs(self.watched) do
    local twin = other.watched[i].tensor
    if not entry.tensor:equal(twin) then
      self:fail("%s", ledger.difference(entry.name, entry.tensor:bytes(), twin:bytes(), entry.where, "the eager run"))
    end
  end
  for _, cache in ipairs(self.caches) do
    local difference = cache:check_tables()
    if difference then self:fail("%s", difference) end
  end
end

------------------------------------------------------------------------------------------------------------- reports

--- Adds a line about this run to its output: where the input comes from, what was left out.
---@param format string
---@param ... any
function run:say(format, ...)
  if not self.eager then self.notes[#self.notes + 1] = numbers.format(format, ...) end
end

--- Adds a value of this step to a curve in the report.
---@param name string
---@param value number
---@param unit? string
function run:series(name, value, unit)
  local list = self.lists[name]
  if not list then
    list = { name = name, unit = unit, values = {} }
    for i = 1, self.steps do list.values[i] = false end
    self.lists[name], self.lists[#self.lists + 1] = list, list
  end
  list.values[self.step] = value
end

local function snapshot(self, cache)
  local allocator, references, requests = cache.allocator, {}, {}
  local shared, used = 0, 0
  for page = 0, allocator.num_pages - 1 do
    local count = allocator:references(page)
    references[page + 1] = count == math.huge and -1 or count
    if count > 1 and count < math.huge then shared = shared + 1 end
    if count > 0 and count < math.huge then used = used + 1 end
  end
  local tokens = 0
  for i, request in ipairs(cache.live) do
    tokens = tokens + request.length
    requests[i] = {
      id = request.id, length = request.length, dropped = request.dropped,
        pages = table.move(request.pages, 1, #request.pages, 1, {}),
    }
  end
  local prefix = #self.caches > 1 and cache.name .. ": " or ""
  self:series(prefix .. "tokens", tokens, "tokens")
  self:series(prefix .. "requests", #requests, "requests")
  self:series(prefix .. "pages in use", used, "pages")
  self:series(prefix .. "shared pages", shared, "pages")
  self:series(prefix .. "free pages", allocator.num_free, "pages")
  cache.snapshots[#cache.snapshots + 1] = { step = self.step, requests = requests, references = references }
end

--- Ends a step: waits for its work and adds up its times.
function run:settle()
  self.main:synchronize()
  for _, event in ipairs(self.events) do event[1].ms = event[1].ms + event[2]:elapsed(event[3]) end
  self.events = {}
  if self.snapshots and self.step > 0 then
    for _, cache in ipairs(self.caches) do snapshot(self, cache) end
  end
end

--- The fields `series`, `caches`, `graphs`, `ops`, `phases`, `compared` and `notes` of a report's record
--- (nibble.report), from this run and the eager one.
---@param other nibble.run
---@return table
function run:record(other)
  local record = { notes = self.notes, compared = self.compared, series = self.lists, caches = {}, graphs = {},
    ops = {}, phases = {} }
  for i, cache in ipairs(self.caches) do
    local layer = cache.layers[1]
    record.caches[i] = {
      name = cache.name, num_pages = cache.num_pages, page_size = cache.page_size, num_kv_heads = cache.heads,
      head_dim = cache.dims[1], v_head_dim = cache.dims[2], kv_layout = cache.kv_layout, layers = #cache.layers,
      reserved = cache.reserved,
      page_stride = layer.strides[1], sf_page_stride = layer.strides[3], snapshots = cache.snapshots,
    }
  end
  for i, key in ipairs(self.keys) do
    local entry = self.graphs[key]
    record.graphs[i] = {
      key = tostring(key), nodes = entry.nodes, dot = entry.graph:dot(), captures = entry.captures,
        updates = entry.updates,
      rebuilt = entry.rebuilt, replays = entry.replays,
    }
  end
  for name, count in pairs(self.ops) do record.ops[#record.ops + 1] = { name = name, count = count } end
  table.sort(record.ops, function(a, b) return a.name < b.name end)
  for _, phase in ipairs(self.phases) do record.phases[#record.phases + 1] = phase end
  for _, phase in ipairs(other.phases) do
    if phase.name == "step, eager" then record.phases[#record.phases + 1] = phase end
  end
  return record
end

return run
