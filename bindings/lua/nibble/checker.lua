--- Checked mode: finds errors in a script's synchronization, and in its use of memory and pages, while it runs.
--
--   nibble.check(true)              -- reports go to standard error
--   nibble.check(function(report) ... end)
--   ... the script ...
--   for _, report in ipairs(nibble.check_reports()) do print(report.kind, report.text) end
--   nibble.check(false)
--
-- or `nibble --check FILE`, which exits with status 1 if there are reports. Turn it on before the first tensor is
-- created: older tensors count as written, and work on them as ordered. Each error is reported once, with both
-- operations and their lines:
--
--   race            two accesses, at least one a write, that no event, wait or path in a graph orders
--   unwritten       a read of bytes that nothing wrote
--   duplicate slot  a slot that occurs twice in one call
--   owned twice     a page that two requests have without sharing it  \
--   freed page      a page that was released                           |
--   reserved page   a page that is kept from all requests              |
--   shared page     a write to an entry that another request sees      | in pools under pages.watch(allocator, pool)
--   foreign entry   a write to an entry of another request            |
--   foreign row     a row of a table that no live request has          |
--   beyond length   a token that the request does not have (any more)  |
--   missing page    -1, or no page of the cache, inside a length      /
--   wrong scales    scales of K with data of V, linear scales where interleaved ones are read, or the other way round,
--                   or an interleaved copy that is older than the entries that are read
--   closed          a replay that reads a closed tensor, whose values cannot change any more
--   unjoined        a stream that was forked in a capture and not joined back
--
-- bindings/README.md has a table of what is found, what is not, and what cannot be known.
--
-- Order comes only from events, streams and waits of the host. The checker reads slots, block tables, lengths and
-- positions at each call, and waits for them. So a script runs more slowly; these waits do not hide errors. Copies of
-- unwritten bytes are not reported; the first read of the copy is. User kernels count as reading or writing their
-- tensors, whichever is harmless.

local nibble = require "nibble"
local accesses = require "nibble.checker.accesses"
local clocks = require "nibble.checker.clocks"
local graphs = require "nibble.checker.graphs"
local memory = require "nibble.checker.memory"
local owners = require "nibble.checker.pages"
local pages = require "nibble.pages"

local checker = {}

---@class nibble.report_operation
---@field name string     "tensor:copy"
---@field where? string   "FILE:LINE"; for work of a graph, the place of its capture
---@field callers? string the places that called it, innermost first
---@field replay? string  "FILE:LINE" of the replay

---@class nibble.report
---@field kind string
---@field message string   what is wrong, in one line
---@field operation nibble.report_operation
---@field other? nibble.report_operation  the operation that it conflicts with
---@field hazard? string   of a race: "read after write", "write after read", "write after write"
---@field storage? {number: integer, bytes?: integer, where?: string}  the storage, and where it was created
---@field text string      the whole report as it is printed

local reports, unseen, active = {}, {}, nil

--------------------------------------------------------------------------------------------------------------- reports

local function line_of(operation)
  local text = ("  %s: %s"):format(operation.where or "?", operation.name)
  if operation.replay then text = ("%s (captured; replayed at %s)"):format(text, operation.replay) end
  local callers = operation.callers
  if callers and operation.where then -- not a function on the line that calls it
    while callers and callers:match("^(.-) < ") == operation.where or callers == operation.where do
      callers = callers:match("^.- < (.*)")
    end
  end
  return callers and ("%s\n    called from %s"):format(text, callers) or text
end

local function print_report(report)
  io.stderr:write(require("nibble.show").visible(report.text, true), "\n")
end

local function verb(item) return item.write and "write" or item.touch and "use" or "read" end

-- The storage of a report, as far as it is known, and a line of text about it.
local function storage_of(storages, item)
  local id = item and item.view.storage
  local known = id and storages[id]
  if not id then return nil end
  local storage = { number = id, bytes = known and known.bytes, where = known and known.where }
  local text = storage.bytes and ("storage %d of %d bytes"):format(id, storage.bytes) or ("storage %d"):format(id)
  if storage.where then text = ("%s, created at %s"):format(text, storage.where) end
  if known and known.callers and known.callers ~= storage.where then text = ("%s < %s"):format(text, known.callers) end
  return storage, text
end

-- `about`: {item, other}, what the operations did where they collide. A report is another one with other lines, callers
-- or parameters, or when its storage was created elsewhere.
local function new_reporter(handler, storages)
  local known = {}
  return function(kind, operation, other, message, about)
    about = about or {}
    local function one_end(x, item)
      return x and table.concat({ x.where or "?", x.name, x.callers or "", item and item.parameter or "" }, " ") or ""
    end
    local ends = { one_end(operation, about.item), one_end(other, about.other) }
    if kind == "race" then table.sort(ends) end -- in a loop each comes before the other
    local storage, line = storage_of(storages(), about.item)
    local key = table.concat({ kind, ends[1], ends[2], storage and storage.where or "" }, "\n")
    if known[key] then return end
    known[key] = true
    local function public(x) return x and { name = x.name, where = x.where, callers = x.callers, replay = x.replay } end
    local report = { kind = kind, message = message, operation = public(operation), other = public(other),
      storage = storage }
    if kind == "race" and about.other then report.hazard = verb(about.item) .. " after " .. verb(about.other) end
    local lines = { ("check: %s: %s"):format(kind, message), line_of(operation) }
    if other then lines[#lines + 1] = line_of(other) end
    if line then lines[#lines + 1] = "  " .. (report.hazard and report.hazard .. ", " or "") .. line end
    report.text = table.concat(lines, "\n")
    reports[#reports + 1] = report
    handler(report)
  end
end

-- Notes once each kind of thing that was not checked.
local function new_noter(aloud)
  local known = {}
  return function(text)
    if known[text] then return end
    known[text], unseen[#unseen + 1] = true, text
    if aloud then io.stderr:write("check: not looked at: ", text, "\n") end
  end
end

--------------------------------------------------------------------------------------------------------- observations

local on = {}

function on.work(self, o)
  if o.node then return self.graphs:node(o) end
  local contents = {}
  for name, access in pairs(accesses.indices(o) or {}) do contents[name] = nibble.peek(access) end
  local items, facts = accesses.expand(o, contents)
  self.run({ name = o.operation, where = o.where, callers = o.callers, point = self.clocks:work(o.stream) }, o, items,
    items, facts)
end

-- What an operation does, outside of graphs and in them; `all` of its items, and those that nobody else looks at.
local function run(self, operation, o, all, items, facts, ordered, known)
  local flagged, passing = nil, memory.find_passing(o, items)
  if facts then
    self.owners:check_slots(operation, facts)
    flagged = self.owners:check(operation, all, facts)
  end
  self.memory:check_scales(operation, o, items, flagged)
  if passing then passing.from.passes_on = true end
  if not ordered then self.memory:check_order(operation, items) end
  self.memory:check_written(operation, items, flagged, function(item, byte) return self.owners:owner(item, byte) end)
  self.memory:write(operation, items, passing)
  self.memory:tag(operation, o, items, passing)
  if passing then self.owners:copied(passing.from.view, passing.to.view) end
  if not known then self.memory:remember(operation, items) end
end

local function host(self, o)
  local operation = { name = o.operation, where = o.where, callers = o.callers, point = self.clocks:now() }
  local items = accesses.expand(o, {})
  self.memory:check_order(operation, items)
  self.memory:check_written(operation, items)
  self.memory:write(operation, items)
  self.memory:tag(operation, o, items)
end

on.host_read, on.host_write = host, host

function on.event_record(self, o)
  if not o.capture then self.clocks:record(o.event, o.stream) end
end

function on.stream_wait(self, o)
  if o.capture then self.graphs:join(o) else self.clocks:wait(o.stream, o.event) end
end

function on.synchronized(self, o)
  if o.stream then
    self.clocks:host_waits(self.clocks:now(o.stream))
  elseif o.event then
    if self.clocks.events[o.event] then self.clocks:host_waits(self.clocks.events[o.event]) end
  elseif o.storage then
    self.memory:host_waits(o.storage)
  else
    for stream, device in pairs(self.devices) do
      if device == o.device then self.clocks:host_waits(self.clocks:now(stream)) end
    end
  end
end

function on.stream_released(self, o) self.clocks:release(o.stream) end

function on.stream_created(self)
  local gone = self.clocks:retire()
  if not gone then return end
  self.memory:forget(gone)
  for stream in pairs(gone) do self.devices[stream] = nil end
end

function on.capture_begin(self, o) self.graphs:begin(o) end
function on.capture_end(self, o) self.graphs:finish(o) end
function on.capture_abort(self, o) self.graphs:abort(o) end
function on.replay(self, o) self.graphs:replay(o, self.clocks:work(o.stream)) end
function on.graph_released(self, o) self.graphs:released(o) end
function on.event_released(self, o) self.clocks.events[o.event] = nil end
function on.storage_created(self, o) self.memory:created(o.storage, o.bytes, o.where, o.callers) end

function on.storage_freed(self, o)
  self.memory:freed(o.storage)
  self.owners:storage_freed(o.storage)
end

function on.storage_cut(self, o) self.memory:cut(o.storage) end

function on.tensor_released(self, o)
  if o.handles == 0 and not o.collected then self.graphs:closed(o.storage, o.where, o.callers) end
end

---------------------------------------------------------------------------------------------------------- on and off

-- While checked mode is on, nibble.tensor says which table a tensor was made of: an allocator's tables carry their
-- request. Errors keep the place of the script's call.
local plain, telling = nibble.tensor, nil

local function tell_tensors()
  plain = nibble.tensor
  telling = function(data, ...)
    local ok, made = pcall(plain, data, ...)
    if not ok then error(made, 2) end
    if type(data) == "table" then pages.made(data, made) end
    return made
  end
  nibble.tensor = telling
end

local function stop()
  nibble.observe(nil, "nibble.checker")
  if nibble.tensor == telling then nibble.tensor = plain end
  pages.listener, active = nil, nil
end

-- `place()`: the script's line and its callers, outside of nibble's own modules.
local function start(handler, place)
  local self = { clocks = clocks.new(), devices = {} }
  local report = new_reporter(handler, function() return self.memory.storages end)
  reports, unseen, active = {}, {}, self
  self.memory = memory.new(self.clocks, report, new_noter(handler == print_report))
  self.owners = owners.new(self.memory, report, function()
    local where, callers = place()
    return { where = where, callers = callers }
  end)
  self.run = function(...) run(self, ...) end
  self.graphs = graphs.new(self.memory, report, nibble.peek, self.run, function(items)
    if not next(self.owners.meant) then return end
    local passing = memory.find_passing({ kernel = "copy", attributes = {} }, items)
    self.owners:copied(passing.from.view, passing.to.view)
  end)
  pages.listener = self.owners
  tell_tensors()
  for allocator, views in pairs(pages.watched) do self.owners:watch(allocator, views) end
  nibble.observe(function(o)
    if o.stream then self.devices[o.stream] = o.device end
    local handle = on[o.kind]
    if handle then handle(self, o) end
  end, "nibble.checker")
end

--- nibble.check: true turns it on, without earlier reports; a function turns it on and gets each report; false turns it
--- off and keeps the reports.
---@param what boolean|fun(report: nibble.report)
---@param place fun(): string?, string?  nibble.check's own
function checker.check(what, place)
  if type(what) ~= "boolean" and type(what) ~= "function" then
    error(("check: mode: expected true, false or a function, got %s"):format(what == nil and "nothing"
      or tostring(what)), 2)
  end
  if active then stop() end
  if what then start(type(what) == "function" and what or print_report, place) end
end

--- nibble.check_reports: the reports since checked mode was last turned on, and what was not checked.
---@return nibble.report[]
---@return string[]
function checker.reports()
  return table.move(reports, 1, #reports, 1, {}), table.move(unseen, 1, #unseen, 1, {})
end

--- Called first by `nibble --check`. If there are reports, an exit status of 0 becomes 1, also with os.exit. Returns a
--- function for the end of the script that gives the status.
---@return fun(status: integer): integer
function checker.command()
  local exit = os.exit
  local function finish(status)
    local found = #nibble.check_reports() -- also passes on the last observations
    if found > 0 then io.stderr:write(("nibble: %d report%s of --check\n"):format(found, found == 1 and "" or "s")) end
    return found > 0 and status == 0 and 1 or status
  end
  os.exit = function(code, close) -- luacheck: ignore 122
    local status = code == false and 1 or math.type(code) == "integer" and code or 0
    exit(finish(status), close)
  end
  nibble.check(true)
  return finish
end

return checker
