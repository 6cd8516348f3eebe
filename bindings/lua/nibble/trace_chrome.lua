--- Converts a trace to Chrome's trace event format (a JSON object with `traceEvents`), for Perfetto and
--- chrome://tracing.
--
-- There is a track for the host and one for each stream and capture. All times are the host's, not the device's. Work,
-- replays, and records and waits of events are slices on the track of their stream, from the begin to the end of the
-- call that queued them. They lie in a slice "in flight", which ends when the host knew that all was done: because it
-- waited for the stream, the device or a later event, or read what they wrote. The device may have been done long
-- before. Waits and reads of the host, and ranges (nibble.range), are slices on the host's track. An arrow leads from
-- the record of an event to each wait for it. A counter shows the bytes of all storages that were created in the trace.

local json = require "nibble.json"
local show = require "nibble.show"
local trace = require "nibble.trace"

local chrome = {}

local HOST, CAPTURES = 0, 1000000

local function describe(access)
  local parameter = access.parameter and show.visible(access.parameter) .. ": " or ""
  return ("%s%s {%s} of storage %d, byte %d%s"):format(parameter, access.dtype,
    table.concat(access.shape, ", "), access.storage, access.offset, access.write and ", written" or "")
end

local function arguments_of(o)
  local args = {
    operation = show.visible(o.operation), where = o.where and show.visible(o.where), graph = o.graph, event = o.event,
      node = o.node,
  }
  if o.accesses and #o.accesses > 0 then
    args.tensors = json.list {}
    for i, access in ipairs(o.accesses) do args.tensors[i] = describe(access) end
  end
  if o.kind == "work" and o.indices then
    local words = json.list {}
    for _, touched in ipairs(trace.pages_of(o, o.indices)) do
      local pages = {}
      for page in pairs(touched.pages) do pages[#pages + 1] = page end
      table.sort(pages)
      words[#words + 1] = ("%s pages %s of storage %d"):format(touched.write and "writes" or "reads",
        table.concat(pages, " "),
        touched.storage)
    end
    if #words > 0 then args.pages = words end
  end
  return args
end

-- The work of each stream that is not known to be done. Work is numbered on its stream; an event covers all before it.
local flight = {}
flight.__index = flight

function flight.new(add)
  return setmetatable({ streams = {}, events = {}, writers = {}, captured = {}, graphs = {}, add = add }, flight)
end

function flight:queued(o, begin, accesses)
  local stream = self.streams[o.stream] or { id = o.stream, device = o.device, last = 0, done = 0, after = {} }
  self.streams[o.stream] = stream
  if stream.done == stream.last then stream.from, stream.first = begin, stream.last + 1 end
  stream.last = stream.last + 1
  for _, access in ipairs(accesses or {}) do
    if access.write then
      local writers = self.writers[access.storage] or {}
      self.writers[access.storage] = writers
      writers[o.stream] = stream.last
    end
  end
end

-- At `now` the host knows that the stream's work up to a number is done.
function flight:reached(stream, number, now)
  if not stream or stream.done == stream.last or number < stream.last then return end
  local count = stream.last - stream.first + 1
  self.add { ph = "X", name = "in flight", cat = "flight", tid = stream.id, ts = stream.from / 1e3,
    dur = (now - stream.from) / 1e3,
    args = { pieces = count } }
  stream.done = stream.last
  for id, other in pairs(stream.after) do self:reached(self.streams[id], other, now) end -- it waited for them
  stream.after = {}
end

function flight:waited(o, now)
  if o.stream then
    local stream = self.streams[o.stream]
    self:reached(stream, stream and stream.last or 0, now)
  elseif o.event then
    local event = self.events[o.event]
    if event then self:reached(self.streams[event.stream], event.number, now) end
  elseif o.storage then
    for id, number in pairs(self.writers[o.storage] or {}) do self:reached(self.streams[id], number, now) end
  else
    self:all(now, o.device)
  end
end

-- All work, of one device or of all, is done.
function flight:all(now, device)
  local ids = {}
  for id, stream in pairs(self.streams) do
    if not device or not stream.device or stream.device == device then ids[#ids + 1] = id end
  end
  table.sort(ids)
  for _, id in ipairs(ids) do self:reached(self.streams[id], self.streams[id].last, now) end
end

--- The object to write as JSON.
---@param run nibble.trace
---@return table
function chrome.convert(run)
  local events, tracks, live, bytes = json.list {}, {}, {}, 0
  local function add(event)
    event.pid = 1
    events[#events + 1] = event
  end
  local function track(id, name)
    if not tracks[id] then
      tracks[id] = true
      add { ph = "M", name = "thread_name", tid = id, args = { name = name } }
      add { ph = "M", name = "thread_sort_index", tid = id, args = { sort_index = id } }
    end
    return id
  end
  add { ph = "M", name = "process_name", tid = HOST, args = { name = show.visible(run.header.title or "nibble") } }
  track(HOST, "host")
  local recorded, arrows, in_flight, ranges, now = {}, 0, flight.new(add), {}, 0
  -- In whole nanoseconds, as in Perfetto. It discards slices that overlap after rounding.
  local function nanoseconds(seconds) return math.floor(seconds * 1e9 + 0.5) end
  local function end_range()
    local o = table.remove(ranges)
    if o then
      add { ph = "X", name = show.visible(o.name), cat = "range", tid = HOST, ts = o.at / 1e3, dur = (now - o.at) / 1e3,
        args = arguments_of(o) }
    end
  end
  for _, o in ipairs(run.list) do
    local before = now
    now = math.max(now, nanoseconds(o.time))
    -- Traces from before 0.2.0 do not have the begin of a call.
    local begin = math.min(now, math.max(before, nanoseconds(o.begin or o.time)))
    local function slice(tid, name)
      add { ph = "X", name = show.visible(name), cat = o.kind, tid = tid, ts = begin / 1e3, dur = (now - begin) / 1e3,
        args = arguments_of(o) }
      return tid
    end
    local function place()
      if o.capture then return track(CAPTURES + o.capture, ("capture %d"):format(o.capture)) end
      return track(o.stream, ("stream %d"):format(o.stream))
    end
    if o.kind == "work" then
      if o.capture then
        in_flight.captured[o.capture] = in_flight.captured[o.capture] or {}
        table.insert(in_flight.captured[o.capture], o)
      else
        in_flight:queued(o, begin, o.accesses)
      end
      slice(place(), o.kernel or o.operation)
    elseif o.kind == "replay" then
      local accesses = {}
      for _, work in ipairs(in_flight.graphs[o.graph] or {}) do
        table.move(work.accesses, 1, #work.accesses, #accesses + 1, accesses)
      end
      in_flight:queued(o, begin, accesses)
      slice(place(), ("replay of graph %d"):format(o.graph))
    elseif o.kind == "event_record" then
      if not o.capture then
        in_flight:queued(o, begin)
        in_flight.events[o.event] = { stream = o.stream, number = in_flight.streams[o.stream].last }
      end
      recorded[o.event] = { tid = slice(place(), "record"), ts = begin / 1e3 }
    elseif o.kind == "stream_wait" then
      if not o.capture then
        in_flight:queued(o, begin)
        local event = in_flight.events[o.event]
        if event then in_flight.streams[o.stream].after[event.stream] = event.number end
      end
      local tid, from = slice(place(), "wait"), recorded[o.event]
      if from then -- an id for each arrow: several waits may be for one event
        arrows = arrows + 1
        add { ph = "s", name = "event", cat = "event", id = arrows, tid = from.tid, ts = from.ts }
        add { ph = "f", bp = "e", name = "event", cat = "event", id = arrows, tid = tid, ts = begin / 1e3 }
      end
    elseif o.kind == "synchronized" or o.kind == "host_read" or o.kind == "host_write" then
      slice(HOST, o.kind)
      if o.kind == "synchronized" then in_flight:waited(o, now) end
    elseif o.kind == "storage_created" or o.kind == "storage_freed" then
      local change = o.kind == "storage_created" and (o.bytes or 0) or -(live[o.storage] or 0)
      live[o.storage] = o.kind == "storage_created" and change or nil
      bytes = bytes + change
      add { ph = "C", name = "memory", tid = HOST, ts = now / 1e3, args = { bytes = bytes } }
    elseif o.kind == "range_push" then
      ranges[#ranges + 1] = { name = o.name, at = now, operation = o.operation, where = o.where }
    elseif o.kind == "range_pop" then
      end_range()
    elseif o.kind:find("^capture_") then
      if o.kind == "capture_end" then in_flight.graphs[o.graph] = in_flight.captured[o.capture] or {} end
      add { ph = "i", s = "t", name = o.kind:gsub("_", " "), cat = o.kind, tid = HOST, ts = now / 1e3,
        args = arguments_of(o) }
    end
  end
  in_flight:all(now)
  while #ranges > 0 do end_range() end
  return { traceEvents = events, displayTimeUnit = "ms" }
end

return chrome
