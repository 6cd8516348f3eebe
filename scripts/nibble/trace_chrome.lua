--- A trace in Chrome's trace event format (a JSON object with `traceEvents`), for Perfetto and chrome://tracing.
--
-- A track for the host and one for each stream and capture. Work, replays, records and waits of events are slices on their stream's
-- track, from when they were queued until the host did the next thing: host time, not that of the device. Waits and reads of the
-- host are slices of the host's track, from the thing before until they were over. An arrow leads from an event's record to each wait
-- for it. A counter has the bytes of the storages that the trace saw coming and going.

local json = require "nibble.json"
local trace = require "nibble.trace"

local chrome = {}

local HOST, CAPTURES = 0, 1000000

local function describe(access)
  return ("%s%s {%s} of storage %d, byte %d%s"):format(access.parameter and access.parameter .. ": " or "", access.dtype,
    table.concat(access.shape, ", "), access.storage, access.offset, access.write and ", written" or "")
end

local function arguments_of(o)
  local args = { operation = o.operation, where = o.where, graph = o.graph, event = o.event, node = o.node }
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
      words[#words + 1] = ("%s pages %s of storage %d"):format(touched.write and "writes" or "reads", table.concat(pages, " "),
        touched.storage)
    end
    if #words > 0 then args.pages = words end
  end
  return args
end

--- The object that is to be written as JSON.
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
  add { ph = "M", name = "process_name", tid = HOST, args = { name = run.header.title or "nibble" } }
  track(HOST, "host")
  local recorded, arrows = {}, 0
  -- In whole nanoseconds, as Perfetto has them: slices that are rounded apart overlap, and are thrown away.
  local function nanoseconds(i) return run.list[i] and math.floor(run.list[i].time * 1e9 + 0.5) end
  for i, o in ipairs(run.list) do
    local now = nanoseconds(i)
    local time = now / 1e3
    local function slice(tid, name)
      add { ph = "X", name = name, cat = o.kind, tid = tid, ts = time, dur = ((nanoseconds(i + 1) or now + 1000) - now) / 1e3,
        args = arguments_of(o) }
    end
    local function stream() return track(o.stream, ("stream %d"):format(o.stream)) end
    if o.kind == "work" then
      slice(o.capture and track(CAPTURES + o.capture, ("capture %d"):format(o.capture)) or stream(), o.kernel or o.operation)
    elseif o.kind == "replay" then
      slice(stream(), ("replay of graph %d"):format(o.graph))
    elseif o.kind == "event_record" then
      local tid = o.capture and track(CAPTURES + o.capture, ("capture %d"):format(o.capture)) or stream()
      recorded[o.event] = { tid = tid, ts = time }
      slice(tid, "record")
    elseif o.kind == "stream_wait" then
      local tid = o.capture and track(CAPTURES + o.capture, ("capture %d"):format(o.capture)) or stream()
      slice(tid, "wait")
      local from = recorded[o.event]
      if from then -- an id for each arrow: several waits may be for one event
        arrows = arrows + 1
        add { ph = "s", name = "event", cat = "event", id = arrows, tid = from.tid, ts = from.ts }
        add { ph = "f", bp = "e", name = "event", cat = "event", id = arrows, tid = tid, ts = time }
      end
    elseif o.kind == "synchronized" or o.kind == "host_read" or o.kind == "host_write" then
      local before = nanoseconds(i - 1) or now
      add { ph = "X", name = o.kind, cat = o.kind, tid = HOST, ts = before / 1e3, dur = (now - before) / 1e3, args = arguments_of(o) }
    elseif o.kind == "storage_created" or o.kind == "storage_freed" then
      local change = o.kind == "storage_created" and (o.bytes or 0) or -(live[o.storage] or 0)
      live[o.storage] = o.kind == "storage_created" and change or nil
      bytes = bytes + change
      add { ph = "C", name = "memory", tid = HOST, ts = time, args = { bytes = bytes } }
    elseif o.kind:find("^capture_") then
      add { ph = "i", s = "t", name = o.kind:gsub("_", " "), cat = o.kind, tid = HOST, ts = time, args = arguments_of(o) }
    end
  end
  return { traceEvents = events, displayTimeUnit = "ms" }
end

return chrome
