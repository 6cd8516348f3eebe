-- The order of work: vector clocks over streams and the host.
--
-- Each piece of work of a stream is a point: {stream, epoch, clock}. `epoch` counts the stream's work; `clock[s]` is
-- how much of stream s is before the point, by events and waits of the host. Clocks are never changed, only replaced,
-- so that points can share them.

local clocks = {}
clocks.__index = clocks

function clocks.new()
  return setmetatable({ host = {}, host_changes = 0, streams = {}, events = {}, released = {} }, clocks)
end

-- A clock that also covers everything up to a point.
local function joined(self, clock, point)
  local result
  local function raise(stream, epoch)
    if not self.streams[stream] or ((result or clock)[stream] or 0) >= epoch then return end
    if not result then
      result = {}
      for s, e in pairs(clock) do result[s] = e end
    end
    result[stream] = epoch
  end
  for stream, epoch in pairs(point.clock) do raise(stream, epoch) end
  raise(point.stream, point.epoch)
  return result or clock
end

-- A stream whose clock includes the host's: what it queues now is after all that the host has waited for.
function clocks:stream(id)
  local stream = self.streams[id]
  if not stream then
    stream = { epoch = 0, clock = self.host, host_changes = self.host_changes }
    self.streams[id] = stream
  elseif stream.host_changes ~= self.host_changes then
    stream.clock = joined(self, stream.clock, { stream = id, epoch = 0, clock = self.host })
    stream.host_changes = self.host_changes
  end
  return stream
end

-- The point of new work.
function clocks:work(id)
  local stream = self:stream(id)
  stream.epoch = stream.epoch + 1
  return { stream = id, epoch = stream.epoch, clock = stream.clock }
end

-- The point of the last work, or of something that the host does now.
function clocks:now(id)
  if not id then return { host = true, epoch = 0, clock = self.host } end
  local stream = self:stream(id)
  return { stream = id, epoch = stream.epoch, clock = stream.clock }
end

function clocks:record(event, stream)
  self.events[event] = self:now(stream)
end

-- From now on the stream's work comes after a point.
function clocks:order(id, point)
  local stream = self:stream(id)
  stream.clock = joined(self, stream.clock, point)
end

-- From now on everything does.
function clocks:host_waits(point)
  local clock = joined(self, self.host, point)
  if clock == self.host then return end
  self.host, self.host_changes = clock, self.host_changes + 1
end

function clocks:wait(id, event)
  local point = self.events[event] -- none: recorded before there was a checker
  if point then self:order(id, point) end
end

function clocks:release(id)
  if self.streams[id] then self.released[id] = true end
end

-- Forgets released streams all of whose work the host has waited for: it comes before all that is still to come.
-- Returns them as a set, or nil while there are only a few. Whoever remembers their work must forget it too.
function clocks:retire()
  local gone, count = {}, 0
  for id in pairs(self.released) do
    if (self.host[id] or 0) >= self.streams[id].epoch then gone[id], count = true, count + 1 end
  end
  if count < 16 then return nil end
  local function without(clock)
    local kept = {}
    for id, epoch in pairs(clock) do
      if not gone[id] then kept[id] = epoch end
    end
    return kept
  end
  for id in pairs(gone) do self.streams[id], self.released[id] = nil, nil end
  self.host = without(self.host)
  for _, stream in pairs(self.streams) do stream.clock = without(stream.clock) end
  return gone
end

-- How much of a stream's work comes before a point.
function clocks.known(point, stream)
  return stream == point.stream and point.epoch or point.clock[stream] or 0
end

return clocks
