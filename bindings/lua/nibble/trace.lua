--- Traces: records what a script does to a file, summarizes it, converts it for Perfetto, and replays it.
--
--   local trace = require "nibble.trace"
--   local recorder = assert(trace.record("run.jsonl", { title = "my run" }))   -- begins to record (nibble.observe)
--   ...
--   recorder:close()
--   print(trace.summary(assert(trace.read "run.jsonl")))
--   trace.chrome(run, "run.json")                        -- for ui.perfetto.dev
--   require("nibble.trace_replay").replay(run)           -- documented there
--
-- or `nibble scenario NAME --trace FILE` and `nibble trace FILE [--chrome OUT.json] [--replay]`.
--
-- The file has a JSON object on each line. The first is a header: {"nibble": version, "trace": 1, "device": the default
-- device, ...}. The others are the observations in order, with the fields of nibble.observation. `time` is in seconds
-- since the first one, in whole nanoseconds, and does not advance while the recorder is paused. There are two more
-- fields:
--   indices   for work that reads index tensors (slot_mapping, block_tables, seq_lens, positions, kv_page_indptr,
--             slots), and for replays of such work: their values, [{storage, offset, dtype, shape, stride, values}]. To
--             read them the recorder waits for the work that writes them; during a capture it cannot.
--   contents  for a host_write: the bytes in hexadecimal, for int32 and int64 up to 1 MiB, for other dtypes up to 4096
--             bytes. Also for a copy whose source was freed before the recorder could read it.
-- Real attributes are strings ("%.17g", "inf", "-inf", "nan"), since JSON lacks some. In strings from outside (fields
-- of the header, `where`, `name`) a backslash is doubled, and a byte that is not UTF-8 is written as \xNN; the reader
-- restores the bytes.

local json = require "nibble.json"
local nibble = require "nibble"
local numbers = require "nibble.numbers"
local operations = require "nibble.operations"
local show = require "nibble.show"

local trace = {}

local MOST_INTEGERS, MOST_BYTES = 1 << 20, 4096

--- Most bytes that are read, of the first line and of the file. A device, or a file that is no trace, may have no end.
trace.MOST_HEADER, trace.MOST_FILE = 1 << 20, 1 << 30

local BLOCK = 1 << 16 -- bytes that are read at a time

--- Elements of an access.
function trace.count(access)
  local count = 1
  for _, size in ipairs(access.shape) do count = count * size end
  return count
end

----------------------------------------------------------------------------------------------------------- recording

local function access_key(access)
  return ("%d:%d:%s:%s:%s"):format(access.storage, access.offset, access.dtype, table.concat(access.shape, ","),
    table.concat(access.stride, ","))
end

-- The integers of an access at this time; nil if they cannot be read.
local function integers_of(access)
  local bytes = nibble.peek(access)
  if not bytes then return nil end
  local format, size = access.dtype == "int64" and "<i8" or "<i4", numbers.bytes[access.dtype]
  local values = json.list {}
  for at = 1, #bytes, size do values[#values + 1] = format:unpack(bytes, at) end
  return values
end
trace.integers_of = integers_of

--- The index tensors among accesses, each once, with their values.
---@param accesses nibble.access[]
---@return table[]? indices  nil: there are none
function trace.indices_of(accesses)
  local list, seen = {}, {}
  for _, access in ipairs(accesses) do
    if operations.index_parameters[access.parameter] and not access.write and not seen[access_key(access)] then
      seen[access_key(access)] = true
      local values = integers_of(access)
      if values then
        list[#list + 1] = {
          parameter = access.parameter, storage = access.storage, offset = access.offset, dtype = access.dtype,
          shape = json.list(access.shape), stride = json.list(access.stride), values = values,
        }
      end
    end
  end
  return #list > 0 and list or nil
end

local function contents_of(access)
  local size = numbers.bytes[access.dtype]
  local most = (access.dtype == "int32" or access.dtype == "int64") and MOST_INTEGERS or MOST_BYTES
  if trace.count(access) * size > most then return nil end
  local bytes = nibble.peek(access)
  return bytes and bytes:gsub(".", function(c) return ("%02x"):format(c:byte()) end)
end

---@class nibble.recorder
local recorder = {}
recorder.__index = recorder

-- Remembers the index tensors of captured work, and returns those of a graph's nodes.
function recorder:graph_indices(o)
  if o.kind == "capture_begin" then
    self.captures[o.capture] = {}
  elseif o.kind == "work" and o.capture then
    local list = self.captures[o.capture] or {}
    table.move(o.accesses, 1, #o.accesses, #list + 1, list)
    self.captures[o.capture] = list
  elseif o.kind == "capture_end" then
    self.graphs[o.graph], self.captures[o.capture] = self.captures[o.capture], nil
  elseif o.kind == "replay" then
    return trace.indices_of(self.graphs[o.graph] or {})
  end
end

-- Whether a copy reads bytes of the host that the recorder could not see: a number or table reaches a tensor through a
-- storage that is freed before the recorder is called.
function recorder:copies_unknown(o)
  if o.kernel ~= "copy" then return false end
  for _, access in ipairs(o.accesses) do
    if not access.write and self.unknown[access.storage] then return true end
  end
  return false
end

local function real_text(x)
  if x ~= x then return "nan" end
  if math.abs(x) == math.huge then return x > 0 and "inf" or "-inf" end
  return numbers.format("%.17g", x)
end

-- Escapes any bytes as UTF-8, and restores them.
local function escape(text)
  text = text:gsub("\\", "\\\\")
  local parts, from = {}, 1
  while true do
    local length, bad = utf8.len(text, from)
    if length then break end
    parts[#parts + 1] = text:sub(from, bad - 1) .. ("\\x%02x"):format(text:byte(bad))
    from = bad + 1
  end
  return table.concat(parts) .. text:sub(from)
end

local function unescape(text)
  return (text:gsub("\\([\\x])(%x?%x?)", function(kind, digits)
    if kind == "\\" then return "\\" .. digits end
    return #digits == 2 and string.char(tonumber(digits, 16)) or nil
  end))
end

local function nanoseconds(seconds) return math.floor(seconds * 1e9 + 0.5) / 1e9 end

-- The time of an observation in the trace, and when it began.
function recorder:clock(o)
  self.start = self.start or o.begin
  if not self.paused then
    if self.resumed then self.start = o.begin - self.last end
    self.resumed, self.begin = false, math.max(self.last, nanoseconds(o.begin - self.start))
    self.last = math.max(self.begin, nanoseconds(o.time - self.start))
  end
  return self.last, self.paused and self.last or self.begin
end

function recorder:line(o)
  local copy = {}
  for key, value in pairs(o) do copy[key] = value end
  copy.callers = nil -- as long as the rest of the line
  copy.time, copy.begin = self:clock(o)
  if copy.begin == copy.time then copy.begin = nil end
  copy.indices = self:graph_indices(o)
  if o.kind == "work" and not o.capture then copy.indices = trace.indices_of(o.accesses) end
  local target = o.accesses and o.accesses[1]
  if target and (o.kind == "host_write" or o.kind == "work" and not o.capture
    and (not o.kernel or self:copies_unknown(o))) then
    copy.contents = contents_of(target)
    if o.kind == "host_write" then self.unknown[target.storage] = not copy.contents or nil end
  elseif o.kind == "storage_freed" then
    self.unknown[o.storage] = nil
  end
  if o.accesses then
    json.list(o.accesses)
    for _, access in ipairs(o.accesses) do
      json.list(access.shape)
      json.list(access.stride)
    end
  end
  if o.deps then json.list(o.deps) end
  if o.attributes then
    copy.attributes = {}
    for name, value in pairs(o.attributes) do
      copy.attributes[name] = math.type(value) == "float" and real_text(value) or value
    end
  end
  copy.where, copy.name = o.where and escape(o.where), o.name and escape(o.name)
  return json.encode(copy)
end

--- Records to a file until `close`. Several recorders need different names. The file is moved to PATH by `close`. A
--- killed run leaves PATH.RANDOM.part, which `read` accepts, and an old file at PATH unchanged.
---@param path string
---@param header? table   fields more for the first line (texts, numbers)
---@param name? string    of the observer; default "trace"
---@return nibble.recorder?
---@return string? message  when the file cannot be written
function trace.record(path, header, name)
  local first = { nibble = nibble.version, trace = 1, device = nibble.device() }
  for key, value in pairs(header or {}) do first[key] = type(value) == "string" and escape(value) or value end
  first = json.encode(first)
  local file, message = nibble.create(path)
  if not file then return nil, message end
  local self = setmetatable({ file = file, path = path, name = name or "trace", captures = {}, graphs = {},
    created = {}, unknown = {},
    count = 0, last = 0.0, paused = false, resumed = false }, recorder)
  file:write(first, "\n")
  nibble.observe(function(o)
    if self.paused and not (o.kind == "storage_freed" and self.created[o.storage]) then return end
    if o.kind == "storage_created" then self.created[o.storage] = true end
    file:write(self:line(o) .. "\n") -- one write: a killed run leaves whole lines
    self.count = self.count + 1
  end, self.name)
  return self
end

--- Pauses the recording. Meanwhile only the freeing of recorded storages is recorded, and the time of the trace stands
--- still.
---@param paused boolean
function recorder:pause(paused)
  self.resumed = self.resumed or self.paused and not paused
  self.paused = paused
end

--- Ends the recording. Returns `nil, message` if the file could not be written.
---@return integer? count  observations
---@return string? message
function recorder:close()
  if not self.file then return self.count end
  nibble.observe(nil, self.name)
  local closed, message = self.file:close()
  self.file = nil
  if closed then return self.count end
  return nil, message
end
recorder.__close = recorder.close

------------------------------------------------------------------------------------------------------------- reading

---@class nibble.trace
---@field header table
---@field list table[]  observations
---@field cut? string    where the file ends too early

-- The kinds of observations and their required fields.
local KINDS = {
  work = { "stream", "accesses" }, event_record = { "stream", "event" }, stream_wait = { "stream", "event" },
    synchronized = {},
  host_read = {}, host_write = {}, capture_begin = { "stream", "capture" }, capture_end = { "capture", "graph" },
  capture_abort = { "capture" }, replay = { "stream", "graph" }, storage_created = { "storage" },
    storage_freed = { "storage" },
  tensor_released = { "storage" }, event_released = { "event" }, graph_released = { "graph" },
    stream_created = { "stream" },
  stream_released = { "stream" }, range_push = { "name" }, range_pop = {}, storage_cut = { "storage" },
}

-- The types of fields.
local TYPES = {
  { "time", "number" }, { "begin", "number" }, { "name", "string" }, { "operation", "string" }, { "stream", "integer" },
  { "event", "integer" }, { "graph", "integer" },
  { "capture", "integer" }, { "storage", "integer" }, { "bytes", "integer" }, { "node", "integer" },
    { "kernel", "string" },
  { "where", "string" }, { "contents", "string" }, { "accesses", "table" }, { "indices", "table" },
    { "attributes", "table" },
  { "deps", "table" },
}

local function is_integers(list)
  if type(list) ~= "table" then return false end
  for _, value in ipairs(list) do
    if math.type(value) ~= "integer" then return false end
  end
  return true
end

local function valid_access(access)
  if type(access) ~= "table" or math.type(access.storage) ~= "integer" or math.type(access.offset) ~= "integer" then
    return false
  end
  if not (numbers.floats[access.dtype] or numbers.integers[access.dtype]) then return false end
  if access.parameter ~= nil and type(access.parameter) ~= "string" then return false end
  if not is_integers(access.shape) or not is_integers(access.stride) or #access.shape ~= #access.stride then
    return false
  end
  for _, size in ipairs(access.shape) do
    if size < 0 then return false end
  end
  return true
end

local function valid(o)
  if type(o) ~= "table" or o.kind == nil or not KINDS[o.kind] then return "an observation of a known kind" end
  if o.time == nil or o.operation == nil then return "time and operation" end
  for _, field in ipairs(TYPES) do
    local name, kind = field[1], field[2]
    local value = o[name]
    if value ~= nil and type(value) ~= kind and math.type(value) ~= kind then
      return ("%s %s for %s"):format(kind == "integer" and "an" or "a", kind, name)
    end
  end
  if math.abs(o.time) > 1e9 then return "a time of less than 10^9 seconds" end
  if o.begin and not (o.begin <= o.time and o.begin >= -1e9) then return "a begin before the time" end
  for _, access in ipairs(o.accesses or {}) do
    if not valid_access(access) then return "an access with storage, offset, dtype, shape and stride" end
  end
  for _, index in ipairs(o.indices or {}) do
    if not valid_access(index) or not is_integers(index.values) then return "indices with values" end
  end
  for _, name in ipairs(KINDS[o.kind]) do
    if o[name] == nil then return table.concat(KINDS[o.kind], " and ") end
  end
end

-- Parses a line of the file, the header or an observation. Returns nil and what is wrong if it is neither.
local function read_line(text, number)
  local value, why = json.decode(text)
  if value == nil then return nil, why or "no value" end
  if number > 1 then
    why = valid(value)
    if why then return nil, "expected " .. why end
    value.where, value.name = value.where and unescape(value.where), value.name and unescape(value.name)
    return value
  end
  if type(value) ~= "table" or value.trace ~= 1 then return nil, "expected a header with trace version 1" end
  if value.title ~= nil and type(value.title) ~= "string" then return nil, "expected a string for title" end
  for key, field in pairs(value) do
    if type(field) == "string" then value[key] = unescape(field) end
  end
  return value
end

-- A function that gives the next line of a file, with its end; at the end of the file nil. Where it would have given
-- more than `most` bytes of `what` in all, or where nothing can be read, it gives nil and why.
local function line_reader(file)
  local block, at, bytes = "", 1, 0
  return function(what, most)
    local pieces = {}
    while true do
      local last = block:find("\n", at, true)
      pieces[#pieces + 1] = block:sub(at, last)
      bytes, at = bytes + #pieces[#pieces], (last or #block) + 1
      if bytes > most then return nil, ("expected %s of at most %d bytes, got more"):format(what, most) end
      if last then return table.concat(pieces) end
      local more, reason = file:read(BLOCK)
      if reason then return nil, reason end
      if not more then
        local line = table.concat(pieces)
        return line ~= "" and line or nil
      end
      block, at = more, 1
    end
  end
end

--- Reads a trace. Returns `nil, message` if the file cannot be read, is no trace, or is larger than MOST_FILE. If it
--- ends in the middle of a line, as after a killed run, that line is left out and `cut` is set.
---@param path string
---@return nibble.trace?
---@return string? message
function trace.read(path)
  local file, message = io.open(path, "r")
  if not file then return nil, message end
  local result, number, next_line = { list = {} }, 0, line_reader(file)
  while true do
    local line, reason
    if number == 0 then line, reason = next_line("a first line", trace.MOST_HEADER)
    else line, reason = next_line("a trace", trace.MOST_FILE) end
    if not line then
      message = reason and path .. ": " .. reason
      break
    end
    number = number + 1
    local value, why = read_line(line, number)
    if not value and number > 1 and line:sub(-1) ~= "\n" then
      result.cut = ("%s:%d: the file ends in the middle of this line"):format(path, number)
      break
    elseif not value then
      message = ("%s:%d: %s"):format(path, number, why)
      break
    end
    if number == 1 then result.header = value else result.list[number - 1] = value end
  end
  file:close()
  if message then return nil, message end
  if not result.header then return nil, path .. ": expected a trace, got an empty file" end
  return result
end

------------------------------------------------------------------------------------------------------------- summary

-- The page_size of an access to a paged cache.
local function page_size_of(access)
  if access.kv_layout and #access.shape == 4 then return access.shape[access.kv_layout == "HND" and 3 or 2] end
end

--- The pages that work reads or writes, by the values of its index tensors: a list of {storage, pages = {[page] =
--- true}, write}. Slots that an operation skips (negative, or past the cache) count for none.
function trace.pages_of(work, indices)
  local values = {}
  for _, access in ipairs(work.accesses) do
    for _, index in ipairs(indices or {}) do
      if access.parameter == index.parameter and access.storage == index.storage and access.offset == index.offset then
        values[access.parameter] = index.values
      end
    end
  end
  local touched = {}
  for _, access in ipairs(work.accesses) do
    local size, pages = page_size_of(access), nil
    if access.parameter == "cache" and #access.shape >= 3 then
      size = access.shape[2] * (#access.shape == 4 and access.shape[3] or 1) -- DeepSeek-V4's records
    end
    if size == 0 then size = nil end
    if size and (values.slot_mapping or values.slots) then
      pages = {}
      for _, slot in ipairs(values.slot_mapping or values.slots) do
        if slot >= 0 and slot // size < access.shape[1] then pages[slot // size] = true end
      end
    elseif size and values.block_tables and values.seq_lens then
      pages = {}
      local tables = nil
      for _, other in ipairs(work.accesses) do
        if other.parameter == "block_tables" then tables = other end
      end
      local columns = math.min(tables.shape[#tables.shape] or 0, #values.block_tables)
      local rows = #tables.shape == 3 and 2 or 1 -- a row for K and one for V
      local row = rows == 2 and (access.parameter or ""):find("^v_") and 1 or 0
      for b, length in ipairs(values.seq_lens) do
        for j = 1, math.min(columns, (math.max(length, 0) + size - 1) // size) do
          local page = values.block_tables[((b - 1) * rows + row) * columns + j]
          if page and page >= 0 and page < access.shape[1] then pages[page] = true end
        end
      end
    end
    if pages then touched[#touched + 1] = { storage = access.storage, pages = pages, write = access.write } end
  end
  return touched
end

local function bytes_of(accesses)
  local sum = 0
  for _, access in ipairs(accesses) do sum = sum + trace.count(access) * numbers.bytes[access.dtype] end
  return sum
end

local function count_keys(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n
end

local function median(list)
  table.sort(list)
  return #list > 0 and list[(#list + 1) // 2] or 0
end

-- The numbers of a trace that the summary shows.
---@param run nibble.trace
---@return table
function trace.statistics(run)
  local s = { kinds = {}, operations = {}, graphs = {}, storages = {}, peak = 0, live = 0, gaps = {}, ranges = {},
    host_read = 0, host_written = 0,
    duration = #run.list > 0 and run.list[#run.list].time or 0 }
  local captured, live, last, open = {}, {}, nil, {}
  local function operation(name)
    if not s.operations[name] then
      s.operations[name] = { name = name, eager = 0, nodes = 0, replayed = 0, bytes = 0 }
      s.operations[#s.operations + 1] = s.operations[name]
    end
    return s.operations[name]
  end
  local function touch(work, indices)
    for _, touched in ipairs(trace.pages_of(work, indices)) do
      local storage = s.storages[touched.storage] or { id = touched.storage, read = {}, written = {} }
      s.storages[touched.storage] = storage
      for page in pairs(touched.pages) do storage[touched.write and "written" or "read"][page] = true end
    end
  end
  for _, o in ipairs(run.list) do
    s.kinds[o.kind] = (s.kinds[o.kind] or 0) + 1
    if o.kind == "work" then
      local entry = operation(o.operation)
      if o.capture then
        captured[o.capture] = captured[o.capture] or {}
        table.insert(captured[o.capture], o)
        entry.nodes = entry.nodes + 1
      else
        entry.eager, entry.bytes = entry.eager + 1, entry.bytes + bytes_of(o.accesses)
        touch(o, o.indices)
      end
    elseif o.kind == "capture_end" then
      local graph = s.graphs[o.graph] or { id = o.graph, captures = 0, replays = 0, gaps = {}, where = o.where }
      s.graphs[o.graph] = graph
      graph.works, graph.captures = captured[o.capture] or {}, graph.captures + 1
    elseif o.kind == "replay" then
      local graph = s.graphs[o.graph] or { id = o.graph, captures = 0, replays = 0, gaps = {}, works = {} }
      s.graphs[o.graph] = graph
      graph.replays = graph.replays + 1
      if graph.last then graph.gaps[#graph.gaps + 1] = o.time - graph.last end
      graph.last = o.time
      for _, work in ipairs(graph.works) do
        local entry = operation(work.operation)
        entry.replayed, entry.bytes = entry.replayed + 1, entry.bytes + bytes_of(work.accesses)
        touch(work, o.indices)
      end
    elseif o.kind == "storage_created" then
      live[o.storage] = o.bytes or 0
      s.live = s.live + live[o.storage]
      s.peak = math.max(s.peak, s.live)
    elseif o.kind == "storage_freed" and live[o.storage] then
      s.live = s.live - live[o.storage]
      live[o.storage] = nil
    elseif o.kind == "range_push" then
      open[#open + 1] = o
    elseif o.kind == "range_pop" and #open > 0 then
      local from = table.remove(open)
      local range = s.ranges[from.name] or { name = from.name, times = 0, seconds = 0.0 }
      if range.times == 0 then s.ranges[from.name], s.ranges[#s.ranges + 1] = range, range end
      range.times, range.seconds = range.times + 1, range.seconds + o.time - from.time
    elseif o.kind == "host_read" then
      s.host_read = s.host_read + bytes_of(o.accesses or {})
    elseif o.kind == "host_write" then
      s.host_written = s.host_written + bytes_of(o.accesses or {})
    end
    if o.kind == "replay" or o.kind == "work" and not o.capture then
      if last then s.gaps[#s.gaps + 1] = o.time - last end
      last = o.time
    end
  end
  table.sort(s.operations, function(a, b) return a.name < b.name end)
  return s
end

local function table_text(lines, rows)
  local widths = {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, #cell) end
  end
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do
      row[i] = i == 1 and cell .. (" "):rep(widths[i] - #cell) or (" "):rep(widths[i] - #cell) .. cell
    end
    lines[#lines + 1] = "  " .. table.concat(row, "  ")
  end
end

local function sorted_by_id(map)
  local list = {}
  for _, entry in pairs(map) do list[#list + 1] = entry end
  table.sort(list, function(a, b) return a.id < b.id end)
  return list
end

--- Summarizes a run as text: the operations with their calls (queued, captured, replayed) and the bytes of their views,
--- the pages used in each cache, graphs and the time between replays, ranges, memory, and the time between pieces of
--- work. All times are those of queuing on the host, without pauses of the recorder.
---@param run nibble.trace
---@return string
function trace.summary(run)
  local s, lines = trace.statistics(run), {}
  local visible = show.visible
  lines[1] = numbers.format("trace of %snibble %s on %s: %d observations in %.3f s",
    run.header.title and visible(run.header.title) .. ", " or "", visible(tostring(run.header.nibble)),
    visible(tostring(run.header.device)), #run.list, s.duration)
  local rows = { { "operation", "queued", "captured", "replayed", "MB of its views" } }
  for _, o in ipairs(s.operations) do
    rows[#rows + 1] = { visible(o.name), tostring(o.eager), tostring(o.nodes), tostring(o.replayed),
      numbers.format("%.2f", o.bytes / 1e6) }
  end
  table_text(lines, rows)
  local storages = sorted_by_id(s.storages)
  if #storages > 0 then
    rows = { { "cache", "pages written", "pages read" } }
    for _, storage in ipairs(storages) do
      rows[#rows + 1] = { "storage " .. storage.id, tostring(count_keys(storage.written)),
        tostring(count_keys(storage.read)) }
    end
    table_text(lines, rows)
  end
  local graphs = sorted_by_id(s.graphs)
  if #graphs > 0 then
    rows = { { "graph", "nodes", "captures", "replays", "ms between replays (median)" } }
    for _, graph in ipairs(graphs) do
      rows[#rows + 1] = { "graph " .. graph.id, tostring(#graph.works), tostring(graph.captures),
        tostring(graph.replays),
        #graph.gaps > 0 and numbers.format("%.3f", median(graph.gaps) * 1e3) or "-" }
    end
    table_text(lines, rows)
  end
  if #s.ranges > 0 then
    rows = { { "range", "times", "ms total" } }
    for _, range in ipairs(s.ranges) do
      rows[#rows + 1] = { visible(range.name), tostring(range.times), numbers.format("%.3f", range.seconds * 1e3) }
    end
    table_text(lines, rows)
  end
  local largest = 0
  for _, gap in ipairs(s.gaps) do largest = math.max(largest, gap) end
  lines[#lines + 1] = numbers.format("  between pieces of work: %.3f ms (median), %.3f ms (longest)",
    median(s.gaps) * 1e3,
    largest * 1e3)
  lines[#lines + 1] = numbers.format(
    "  memory: %.2f MB at most, in storages created in the trace; host: %.2f MB written, %.2f MB read",
      s.peak / 1e6,
    s.host_written / 1e6, s.host_read / 1e6)
  lines[#lines + 1] = ("  events: %d recorded, %d waited for; %d waits of the host"):format(s.kinds.event_record or 0,
    s.kinds.stream_wait or 0, s.kinds.synchronized or 0)
  return table.concat(lines, "\n")
end

--- Writes the run in Chrome's trace format, for ui.perfetto.dev; see nibble.trace_chrome. Returns `nil, message` if the
--- file cannot be written.
---@param run nibble.trace
---@param path string
---@return boolean?
---@return string? message
function trace.chrome(run, path)
  return require("nibble.svg").save(path, json.encode(require("nibble.trace_chrome").convert(run)) .. "\n")
end

--- See nibble.trace_command.
---@param arguments string[]
---@return integer status
function trace.main(arguments)
  return require("nibble.trace_command")(table.unpack(arguments))
end

return trace
