-- The record of each storage: its accesses, whether they are ordered, and which bytes were written.
--
-- An operation is {name, where, replay, point}; its items are those of accesses.lua. Each storage has a log of accesses
-- for each stream, oldest first. A new access is compared with those that no clock orders before it; their bytes are
-- compared only then.

local accesses = require "nibble.checker.accesses"
local operations = require "nibble.operations"
local spans = require "nibble.checker.spans"
local clocks = require "nibble.checker.clocks"

local memory = {}
memory.__index = memory

local MOST_VIEWS = 1024
local MOST_PASSED = 16
local LONGEST = 256  -- accesses of one stream to a storage in its log; older ones are summarized
local OLDEST = 65536 -- ranges of bytes in such a summary

--- `report(kind, operation, other, message)` is called with each error.
function memory.new(clock, report, note)
  return setmetatable({ clocks = clock, report = report, storages = {}, time = 0, serial = 0, note = note or function()
    end }, memory)
end

--- The record of a storage. A storage that is older than the checker counts as written.
function memory:storage(id)
  local storage = self.storages[id]
  if not storage then
    storage = { logs = {}, writers = {}, views = { count = 0 } }
    self.storages[id] = storage
  end
  return storage
end

function memory:created(id, bytes, where, callers)
  -- written: a set of bytes; nil: all. fresh: the same, but emptied of a page when a pool's page changes hands; nil: no
  -- pool.
  self.storages[id] = { logs = {}, writers = {}, views = { count = 0 }, bytes = bytes, written = bytes > 0 and {}
    or nil,
    where = where, callers = callers, version = self:tick() }
end

--- A time of its own: later is more.
function memory:tick()
  self.time = self.time + 1
  return self.time
end

--- When a storage was written last; nil: that is not known.
function memory:version(id)
  local storage = self.storages[id]
  return storage and storage.version
end

function memory:freed(id)
  self.storages[id] = nil
end

local keys = setmetatable({}, { __mode = "k" }) -- observations have the same table again for the same view

local function view_key(view)
  local key = keys[view]
  if key then return key end
  key = ("%s;%d;%s;%s"):format(view.dtype, view.offset, table.concat(view.shape, ","), table.concat(view.stride, ","))
  keys[view] = key
  return key
end

--- The bytes of an item. Views are looked up: the same view is used again and again, and has the same list then.
function memory:spans(item)
  if item.exact then return item:spans() end
  local views, key = self:storage(item.view.storage).views, view_key(item.view)
  local known = views[key]
  if known == nil then
    if views.count == MOST_VIEWS then views = { count = 0 } end
    known, views.count = item:spans() or false, views.count + 1
    views[key], self:storage(item.view.storage).views = known, views
  end
  return known or nil
end

--- Whether an item's view, at least, says which bytes it has; else that depends on contents that are not known.
function memory:is_known(item)
  return not item.exact or self:spans(item) ~= nil
end

--- Says once of an item's kind what was not looked at.
function memory:unseen(item, what)
  local name = item.parameter or "argument"
  self.note(("%s %s {%s} (%s)"):format(what, item.view.dtype, table.concat(item.view.shape, ", "), name))
end

----------------------------------------------------------------------------------------------------------- the order

local function verb(item) return item.write and "writes" or item.touch and "uses" or "reads" end

local log_keys = {}
for _, what in ipairs { "writes", "uses", "reads" } do log_keys[what] = setmetatable({}, { __mode = "k" }) end

local function log_key(item)
  local what = verb(item)
  local key = log_keys[what][item.view]
  if not key then
    key = view_key(item.view) .. what
    log_keys[what][item.view] = key
  end
  return key
end

local function shape_of(view) return ("%s {%s}"):format(view.dtype, table.concat(view.shape, ", ")) end

--- Where a byte lies, in an item's own terms.
function memory.place(item, byte)
  local view = item.view
  local at = byte - view.offset
  local text = (item.parameter or "argument") .. " " .. shape_of(view)
  if item.pieces then
    local page, entry = accesses.entry_of(view, byte)
    return (entry and "%s, page %d, entry %d" or "%s, page %d"):format(text, page, entry)
  end
  return at > 0 and ("%s from byte %d"):format(text, at) or text
end

local function describe(point)
  return point.host and "the host" or ("stream %d"):format(point.stream)
end

local function race(self, operation, item, hit)
  local other = hit.operation
  self.report("race", operation, other, ("%s on %s %s %s while %s on %s %s it (%s): no event orders them"):format(
    operation.name, describe(operation.point), verb(item), memory.place(item, hit.byte), other.name,
      describe(other.point),
    verb(hit.item), hit.item.parameter or "argument"), { item = item, other = hit.item })
end

-- A byte that two items share; false or nil: there is none, or it is not known.
function memory:shared(a, b)
  local mine, theirs = self:spans(a), self:spans(b)
  if mine and theirs then return spans.overlap(mine, theirs) end
  local byte
  if a.exact and not mine or b.exact and not theirs then
    byte = nil
  elseif mine then
    byte = spans.hits(b.view, mine)
  elseif theirs then
    byte = spans.hits(a.view, theirs)
  else
    byte = spans.meet(a.view, b.view)
  end
  if byte == nil then self:unseen(a.exact and not mine and a or b, "races with") end
  return byte
end

-- What of an entry has a byte: of a replay's summary the newest node.
local function hit_at(self, entry, byte)
  local operation = entry.operation
  for i = #(entry.item.parts or {}), 1, -1 do
    local part = entry.item.parts[i]
    local list = self:spans(part.item)
    if list and spans.overlap(list, { byte, byte + 1 }) then
      return { item = part.item, byte = byte, order = operation.order + part.k,
        operation = { name = part.node.operation,
        where = part.node.where, callers = part.node.callers, replay = operation.replay, point = operation.point } }
    end
  end
  return { item = entry.item, byte = byte, order = operation.order, operation = operation }
end

-- What of an entry an item shares a byte with: of a replay's summary the newest node.
local function hit_by(self, entry, item)
  local byte = self:shared(item, entry.item)
  if not byte or not entry.item.parts then return byte and hit_at(self, entry, byte) end
  for i = #entry.item.parts, 1, -1 do
    byte = self:shared(item, entry.item.parts[i].item)
    if byte then return hit_at(self, entry, byte) end
  end
end

-- The newest access in a summary of the log that is behind `after` and has a byte of an item.
local function find_old(self, old, after, item)
  local list, best, byte = self:spans(item), nil, nil
  local known = list ~= nil
  if not known and item.exact then return nil end
  list = list or { spans.hull(item.view) }
  for _, side in ipairs(item.write and { old.writes, old.reads } or { old.writes }) do
    for i = 1, #list, 2 do
      local low, high = 1, #side // 3 + 1 -- the first range that ends behind list[i]
      while low < high do
        local middle = (low + high) // 2
        if side[3 * middle - 1] > list[i] then high = middle else low = middle + 1 end
      end
      for k = 3 * low - 2, #side, 3 do
        if side[k] >= list[i + 1] then break end
        local operation = side[k + 2].operation
        if operation.point.epoch > after and (not best or operation.order > best.operation.order) then
          local at = known and math.max(side[k], list[i]) or not known
            and spans.hits(item.view, { side[k], side[k + 1] })
          if at then best, byte = side[k + 2], at end
        end
      end
    end
  end
  return best and hit_at(self, best, byte)
end

--- The newest access of a stream that conflicts with an item, is not before `known`, and shares a byte with it:
--- {operation, item, byte, order}; nil: none.
function memory:find_conflict(log, known, item)
  local best
  for i = #log, 1, -1 do
    local entry = log[i]
    local point = entry.operation.point
    if point.epoch <= known or best and point ~= best.operation.point then return best end
    if not entry.dead and (item.write or entry.item.write) then -- a kernel of the user's may only read, but it may
      local hit = hit_by(self, entry, item)
      if hit and (not best or hit.order > best.order) then best = hit end
    end
  end
  return best or log.old and log.old.newest > known and find_old(self, log.old, known, item) or nil
end

--- The newest conflict of some items with each stream's log, newest first: {..., mine: the item}. `logs(item)`: by
--- stream; `known(stream)`: how much of it comes before.
function memory:find_conflicts(items, logs, known)
  local found, list = {}, {}
  for _, item in ipairs(items) do
    for stream, log in pairs(logs(item)) do
      local before = known(stream)
      if log.newest > before then
        local hit, best = self:find_conflict(log, before, item), found[stream]
        if hit and (not best or hit.order > best.order) then
          hit.mine, found[stream] = item, hit
        end
      end
    end
  end
  for _, hit in pairs(found) do list[#list + 1] = hit end
  if #list > 1 then table.sort(list, function(a, b) return a.order > b.order end) end
  return list
end

local NONE = {}

--- Conflicts of an operation with the other streams.
function memory:conflicts(operation, items)
  local point, apart = operation.point, nil
  for i = 1, #items do -- mostly one stream uses a storage, or the clock tells that all others are behind
    local storage = self.storages[items[i].view.storage]
    for stream, log in pairs(storage and storage.logs or NONE) do
      if stream ~= point.stream and log.newest > clocks.known(point, stream) then
        apart = apart or {}
        if apart[#apart] ~= items[i] then apart[#apart + 1] = items[i] end
      end
    end
  end
  return apart and self:find_conflicts(apart, function(item) return self:storage(item.view.storage).logs end,
    function(stream) return stream == point.stream and math.huge or clocks.known(point, stream) end) or NONE
end

-- The newest conflict with another stream is reported, and then all goes on as if an event ordered the two: what is
-- missing the same event is not reported again.
function memory:check_order(operation, items)
  for _, hit in ipairs(self:conflicts(operation, items)) do
    local other = hit.operation.point
    if other.epoch > clocks.known(operation.point, other.stream) then
      race(self, operation, hit.mine, hit)
      if not operation.point.host then
        self.clocks:order(operation.point.stream, other)
        operation.point.clock = self.clocks:now(operation.point.stream).clock
      end
    end
  end
end

-- Ranges {low, high, entry, ...} of some accesses, oldest first, over what was there: of each byte the newest.
local function laid_over(self, side, entries, settled)
  local covered, fresh = {}, {}
  for i = #entries, 1, -1 do
    local list = self:spans(entries[i].item)
    if list then
      for k = 1, #list, 2 do
        local gaps = spans.gaps(covered, list[k], list[k + 1])
        for g = 1, #gaps, 2 do fresh[#fresh + 1] = { gaps[g], gaps[g + 1], entries[i] } end
      end
      spans.add(covered, list)
    elseif self:is_known(entries[i].item) then
      self:unseen(entries[i].item, "races with old accesses of")
    end
  end
  if #fresh == 0 and settled == 0 then return side end
  table.sort(fresh, function(a, b) return a[1] < b[1] end)
  local result, next_one = {}, 1
  local function put(low, high, entry)
    local n = #result
    if n > 0 and result[n] == entry and result[n - 1] == low then
      result[n - 1] = high
    else
      result[n + 1], result[n + 2], result[n + 3] = low, high, entry
    end
  end
  local function put_fresh(before)
    while fresh[next_one] and fresh[next_one][1] < before do
      put(table.unpack(fresh[next_one]))
      next_one = next_one + 1
    end
  end
  for i = 1, #side, 3 do
    if side[i + 2].operation.point.epoch > settled then
      local gaps = spans.gaps(covered, side[i], side[i + 1])
      for g = 1, #gaps, 2 do
        put_fresh(gaps[g])
        put(gaps[g], gaps[g + 1], side[i + 2])
      end
    end
  end
  put_fresh(math.huge)
  return result
end

-- The log without what the host has waited for and what newer entries stand for; its older half becomes a summary when
-- it is long: for each byte the last read and the last write.
function memory:trimmed(log, settled)
  local kept, old, alive = { last = {}, newest = log.newest, old = log.old }, { {}, {} }, {}
  for _, entry in ipairs(log) do
    if not entry.dead and entry.operation.point.epoch > settled then alive[#alive + 1] = entry end
  end
  local first = #alive > LONGEST // 2 and #alive - LONGEST // 4 or 1
  for i, entry in ipairs(alive) do
    if i < first then
      local side = old[entry.item.write and 1 or 2]
      side[#side + 1] = entry
    else
      kept[#kept + 1] = entry
      if entry.key then kept.last[entry.key] = entry end
    end
  end
  if first == 1 then return kept end
  local before = log.old or { writes = {}, reads = {} }
  kept.old = { writes = laid_over(self, before.writes, old[1], settled),
    reads = laid_over(self, before.reads, old[2], settled),
    newest = alive[first - 1].operation.point.epoch }
  for _, name in ipairs { "writes", "reads" } do
    if #kept.old[name] > 3 * OLDEST then
      kept.old[name] = {}
      self:unseen(alive[1].item, "races with old accesses of")
    end
  end
  return kept
end

--- Says how new an operation is; a replay's k-th node is newer by k.
function memory:next_order()
  self.serial = self.serial + 1
  return self.serial << 24
end

--- Adds an access to the logs (by stream) of a storage. `settled`: up to there the host has waited for the stream.
function memory:log(logs, operation, item, settled)
  local point = operation.point
  local log = logs[point.stream]
  if not log then
    log = { last = {} }
    logs[point.stream] = log
  end
  if #log >= LONGEST then
    log = self:trimmed(log, settled or 0)
    logs[point.stream] = log
  end
  operation.order = operation.order or self:next_order()
  local entry = { operation = operation, item = item }
  local key = item.key or not item.exact and log_key(item)
  if key then -- the same view once more: the newer access says all that the older one did
    if log.last[key] then log.last[key].dead = true end
    log.last[key], entry.key = entry, key
  end
  log[#log + 1] = entry
  log.newest = point.epoch
end

function memory:remember(operation, items)
  local point = operation.point
  local settled = self.clocks.host[point.stream]
  for _, item in ipairs(items) do
    local storage = self:storage(item.view.storage)
    self:log(storage.logs, operation, item, settled)
    if item.write or item.touch then storage.writers[point.stream] = point end
  end
end

--- Forgets all about some streams (a set).
function memory:forget(streams)
  for _, storage in pairs(self.storages) do
    for stream in pairs(streams) do storage.logs[stream], storage.writers[stream] = nil, nil end
  end
end

--- The host has waited for what writes a storage.
function memory:host_waits(id)
  for _, point in pairs(self:storage(id).writers) do self.clocks:host_waits(point) end
end

-------------------------------------------------------------------------------------------------- what is there to read

local function mark(self, item)
  local storage = self:storage(item.view.storage)
  storage.version = self:tick()
  if not storage.written and not storage.fresh then return end
  local list = not item.touch and self:spans(item)
  if not list then
    list = { spans.hull(item.view) }
    if not item.touch then self:unseen(item, "what is left unwritten by") end
  end
  if storage.written then
    spans.add(storage.written, list)
    if storage.written[1] == 0 and storage.written[2] == storage.bytes then storage.written = nil end
  end
  if storage.fresh then spans.add(storage.fresh, list) end
end

-- The pieces of an item that are not known to be written. `storage.proven`: by geometry, of pages how many entries are;
-- emptied of a page by whoever takes bytes away from `fresh`.
local function unproven(storage, item)
  local view = item.view
  local key = view_key(view)
  storage.proven = storage.proven or {}
  local proven = storage.proven[key] or { view = view }
  storage.proven[key] = proven
  local pieces, all = {}, item.pieces
  for i = 1, #all do
    local piece = all[i]
    if (proven[piece[1]] or 0) < piece[2] + piece[3] then pieces[#pieces + 1] = piece end
  end
  return pieces, proven
end

--- Bytes of a storage are no longer what their owner has written.
function memory.unwrite(storage, list)
  spans.remove(storage.fresh, list)
  for _, proven in pairs(storage.proven or {}) do
    local view = proven.view
    local stride = view.stride[1] * spans.item_bytes[view.dtype]
    for i = 1, #list, 2 do
      for page = (list[i] - view.offset) // stride, (list[i + 1] - 1 - view.offset) // stride do proven[page] = nil end
    end
  end
end

--- Work that was to write a storage was dropped: nothing has written it.
function memory:cut(id)
  local storage = self:storage(id)
  storage.written, storage.version = {}, self:tick()
  if storage.fresh then memory.unwrite(storage, { 0, storage.bytes }) end
end

--- The first byte of an item that nothing has written, or nil. For the pieces of a pool that an allocator watches:
--- since the page was handed out. `skip[page]`: something worse was reported.
function memory:first_unwritten(item, skip)
  local storage = self:storage(item.view.storage)
  if not storage.written and not (storage.fresh and item.pieces) then return nil end
  local list
  if item.pieces and item.of_pieces and storage.fresh then -- pages that were whole are whole until they change hands
    local pieces = unproven(storage, item)
    if #pieces == 0 then return nil end
    list = item.of_pieces(item.view, pieces)
  else
    list = self:spans(item)
  end
  if not list then
    local byte = storage.written and self:is_known(item)
      and spans.hits(item.view, spans.gaps(storage.written, spans.hull(item.view)))
    if byte == nil or not self:is_known(item) then self:unseen(item, "unwritten bytes of") end
    return byte or nil
  end
  if storage.written then
    local low = spans.missing(storage.written, list)
    if low then return low end
  end
  if not (storage.fresh and item.pieces) then return nil end
  local low = spans.missing(storage.fresh, list)
  if not low and item.of_pieces then
    local pieces, proven = unproven(storage, item)
    for _, piece in ipairs(pieces) do
      if piece[2] <= (proven[piece[1]] or 0) then proven[piece[1]] = piece[2] + piece[3] end
    end
  end
  if not low or not skip or not next(skip) then return low end
  local stride = item.view.stride[1] * spans.item_bytes[item.view.dtype]
  for i = 1, #list, 2 do
    low = spans.missing(storage.fresh, { list[i], list[i + 1] })
    if low and not skip[(low - item.view.offset) // stride] then return low end
  end
  return nil
end

function memory:check_written(operation, items, skip, page_owner)
  for _, item in ipairs(items) do
    if not item.write and not item.touch and not item.passes_on then
      local byte = self:first_unwritten(item, skip)
      if byte then
        local storage = self:storage(item.view.storage)
        local owner = page_owner and item.pieces and page_owner(item, byte)
        local passed = not owner and self:passed_by(storage, byte)
        local why = owner and "which nothing has written since the page was allocated"
          or passed and ("where %s copied unwritten bytes"):format(passed.name) or "which nothing has written"
        self.report("unwritten", operation, owner or passed,
          ("%s reads %s, %s"):format(operation.name, memory.place(item, byte), why), { item = item })
        return
      end
    end
  end
end

-- A copy and its like pass on what is there, written or not: chunks {from, to, bytes} are what becomes what.
local function pass_on(self, from, to, chunks)
  local source, target = self:storage(from.view.storage), self:storage(to.view.storage)
  target.version = self:tick()
  if not target.written and target.bytes then target.written = { 0, target.bytes } end
  -- out of a pool and into it again: what its owner has not written stays so on the way
  if source.fresh and not target.fresh and target.bytes then target.fresh = { 0, target.bytes } end
  for _, field in ipairs { "written", "fresh" } do
    local set = field == "fresh" and (source.fresh or source.written) or source.written
    if target[field] then
      for _, chunk in ipairs(chunks) do
        local low, high = chunk[1], chunk[1] + chunk[3]
        if not set or spans.has(set, low, high) then
          spans.add(target[field], { chunk[2], chunk[2] + chunk[4] })
        else
          local size = chunk[4] // (chunk[3] // chunk[5])
          if field == "fresh" then
            memory.unwrite(target, { chunk[2], chunk[2] + chunk[4] })
          else
            spans.remove(target[field], { chunk[2], chunk[2] + chunk[4] })
            target.proven = nil
          end
          for a, b in spans.within(set, low, high) do -- whole elements
            local first, last = (a - low) // chunk[5], (b - low) // chunk[5]
            if first < last then spans.add(target[field], { chunk[2] + first * size, chunk[2] + last * size }) end
          end
        end
      end
    end
  end
  if target.written and target.written[1] == 0 and target.written[2] == target.bytes then target.written = nil end
end

-- Who brought bytes that nothing has written to where they are.
function memory:note_passing(operation, to)
  local storage = self:storage(to.view.storage)
  storage.passed = storage.passed or {}
  table.insert(storage.passed, 1, { operation = operation, item = to })
  storage.passed[MOST_PASSED + 1] = nil
end

function memory:passed_by(storage, byte)
  for _, entry in ipairs(storage.passed or {}) do
    local list = self:spans(entry.item)
    if list and spans.overlap(list, { byte, byte + 1 }) then return entry.operation end
  end
end

-- Runs of neighbours in both views of a copy; nil: too many.
local function copy_chunks(from, to)
  local a, b = spans.item_bytes[from.dtype], spans.item_bytes[to.dtype]
  local dims, gap = {}, #to.shape - #from.shape
  for i, size in ipairs(to.shape) do
    local stride = i > gap and from.shape[i - gap] ~= 1 and from.stride[i - gap] or 0
    if size == 0 then return {} end
    if size > 1 then dims[#dims + 1] = { size, stride, to.stride[i] } end
  end
  local run = 1
  while #dims > 0 and dims[#dims][2] == run and dims[#dims][3] == run do run = run * table.remove(dims)[1] end
  local count = 1
  for _, dim in ipairs(dims) do count = count * dim[1] end
  if count > 65536 then return nil end
  local chunks = {}
  local function walk(i, x, y)
    if i > #dims then
      chunks[#chunks + 1] = { from.offset + x * a, to.offset + y * b, run * a, run * b, a }
      return
    end
    for k = 0, dims[i][1] - 1 do walk(i + 1, x + k * dims[i][2], y + k * dims[i][3]) end
  end
  walk(1, 0, 0)
  return chunks
end

------------------------------------------------------------------------------------------- whose scales, in which order

-- The descriptions of the scales that an operation reads or writes ("scales_read", "scales_written").
local function scales_of(observation, which)
  local op = not observation.user_kernel and operations.of_kernel[observation.kernel]
  return op and op[which] or {}
end

-- Bytes from a page to the next.
local function page_step(view) return view.stride[1] * spans.item_bytes[view.dtype] end

-- The items of some data and of its scales.
local function items_of(items, p)
  local data, scales
  for i = 1, #items do
    local name = items[i].parameter
    if name == p.scales then data = items[i] elseif name == p.name then scales = items[i] end
  end
  return data, scales
end

-- What was written to a page's entries since its scales were copied: the operation, the entry; or nil.
local function written_since(self, tag, piece)
  local source = tag.source and self.storages[tag.source]
  local entries = source and source.entries and source.entries[tag.base]
  for entry = piece[2], entries and piece[2] + piece[3] - 1 or -1 do
    if entries[entry] and entries[entry].time > tag.time then return entries[entry].operation, entry end
  end
end

--- Scales that were written for other data, or in another order, than they are read with, or copied before the data
--- was. `skip[page]`: something worse was reported.
function memory:check_scales(operation, observation, items, skip)
  for _, pair in ipairs(scales_of(observation, "scales_read")) do
    local data, scales = items_of(items, pair)
    local from, of = data and scales and self:storage(scales.view.storage), data and self:storage(data.view.storage)
    local mine, one, other_one = from and from.tags, from and from.uniform, of and of.uniform
    local theirs = mine and of.tags or {}
    local right = one and other_one and one.role == other_one.role and one.interleaved == (pair.interleaved or false)
    local step, other_step = mine and page_step(scales.view), data and page_step(data.view)
    for _, piece in ipairs(mine and (not right or from.has_copies) and scales.pieces or {}) do
      local tag = mine[scales.view.offset + piece[1] * step]
      local other = theirs[data.view.offset + piece[1] * other_step]
      local wrong, writer, entry
      if tag then writer, entry = written_since(self, tag, piece) end
      if writer then
        wrong = ("an interleaved copy that is older than the write of %s to entry %d"):format(writer.name, entry)
      elseif tag and other and tag.role ~= other.role then
        wrong = ("which are those of %s, with data of %s"):format(tag.role, other.role)
      elseif tag and tag.interleaved ~= (pair.interleaved or false) then
        wrong = tag.interleaved and "which are interleaved, as linear ones" or "which are linear, as interleaved ones"
      end
      if wrong and not (skip and skip[piece[1]]) then
        self.report("wrong scales", operation, writer or tag.operation,
          ("%s reads the scales of page %d of %s, %s"):format(operation.name,
          piece[1], scales.parameter, wrong), { item = scales })
        return
      end
    end
  end
end

-- The tags of a storage, some of which are set to this one. `uniform` is a tag that equals all; false if they differ.
local function tags_for(storage, tag)
  local one = storage.uniform
  if one == nil then
    storage.uniform = tag
  elseif one and (one.role ~= tag.role or one.interleaved ~= tag.interleaved) then
    storage.uniform = false
  end
  storage.tags = storage.tags or {}
  return storage.tags
end

-- Tags the pages that an item writes. `entries`: by page, who wrote each; kept when somebody has a copy.
local function tag_pages(self, item, tag)
  local storage = self:storage(item.view.storage)
  local tags, entries, offset, step = tags_for(storage, tag), storage.entries, item.view.offset, page_step(item.view)
  for _, piece in ipairs(item.pieces or {}) do
    local base = offset + piece[1] * step
    tags[base] = tag
    if entries then
      local list = entries[base] or {}
      entries[base] = list
      for entry = piece[2], piece[2] + piece[3] - 1 do list[entry] = tag end
    end
  end
  for page = 0, item.pieces and -1 or item.view.shape[1] - 1 do tags[offset + page * step] = tag end
end

local function drop_tags(storage) storage.tags, storage.uniform = nil, nil end

--- Notes what an operation makes of scales; what is written otherwise is not known to be any.
function memory:tag(operation, observation, items, passing)
  local written = scales_of(observation, "scales_written")
  if written[1] then
    for _, pair in ipairs(written) do
      local data, scales = items_of(items, pair)
      local tag = { role = pair.side, interleaved = false, operation = operation, time = self:tick() }
      if data then tag_pages(self, data, tag) end
      if scales then
        tag_pages(self, scales, pair.interleaved and { role = pair.side, interleaved = true, operation = operation,
          time = tag.time } or tag)
      end
    end
    return
  end
  if not passing then
    for _, item in ipairs(items) do
      if item.write or item.touch then drop_tags(self:storage(item.view.storage)) end
    end
    return
  end
  local from, to = passing.from.view, passing.to.view
  local source, target = self:storage(from.storage), self:storage(to.storage)
  if not source.tags then
    drop_tags(target)
  elseif #from.shape == 4 and #to.shape == 4 then -- whole pages
    local stride, other = page_step(from), page_step(to)
    local moved = {}
    for base, tag in pairs(source.tags) do
      local page = (base - from.offset) // stride
      if (base - from.offset) % stride == 0 and page >= 0 and page < from.shape[1] then
        moved[to.offset + page * other] = not passing.swizzle and tag or passing.inverse
          and { role = tag.role, interleaved = false, operation = operation, time = self:tick() }
          or { role = tag.role, interleaved = true, operation = operation, time = self:tick(), source = from.storage,
            base = base }
      end
    end
    if passing.swizzle and not passing.inverse then
      source.entries, target.has_copies = source.entries or {}, true
    end
    target.tags = target.tags or {}
    for base, tag in pairs(moved) do tags_for(target, tag)[base] = tag end
  elseif source.tags[from.offset] then -- of one page
    local tag = source.tags[from.offset]
    tags_for(target, tag)[to.offset] = tag
  end
end

-- V scales in another order: byte by byte inside 4 tokens of a page and head.
local function swizzle_chunks(from, to, inverse)
  local token = from.kv_layout == "HND" and 3 or 2
  local pages, tokens, heads, blocks = from.shape[1], from.shape[token], from.shape[5 - token], from.shape[4]
  if pages * tokens * heads * blocks > 65536 then return nil end
  local chunks = {}
  for page = 0, pages - 1 do
    for head = 0, heads - 1 do
      for t = 0, tokens - 1 do
        for s = 0, blocks - 1 do
          local row, column = t // 4 * 4 + s // (blocks // 4), s % (blocks // 4) * 4 + t % 4
          local x, y = { t, s }, { row, column }
          if inverse then x, y = y, x end
          local function at(view, where)
            return view.offset + page * view.stride[1] + head * view.stride[5 - token] + where[1] * view.stride[token]
              + where[2]
          end
          chunks[#chunks + 1] = { at(from, x), at(to, y), 1, 1, 1 }
        end
      end
    end
  end
  return chunks
end

--- The items of an operation that only moves what is there: its source is not read yet. Else nil.
function memory.find_passing(observation, items)
  if observation.kernel ~= "copy" and observation.kernel ~= "swizzle" then return nil end
  local from, to
  for _, item in ipairs(items) do
    if item.write then to = item else from = item end
  end
  return { from = from, to = to, swizzle = observation.kernel == "swizzle", inverse = observation.attributes.inverse }
end

function memory:write(operation, items, passing)
  if passing then
    local from, to = self:storage(passing.from.view.storage), self:storage(passing.to.view.storage)
    local carries = from.fresh and (to.fresh or not passing.swizzle)
    local list = (from.written or carries) and self:spans(passing.from)
    if list and ((from.written and spans.missing(from.written, list))
      or (carries and spans.missing(from.fresh, list))) then
      local chunks
      if passing.swizzle then
        chunks = swizzle_chunks(passing.from.view, passing.to.view, passing.inverse)
      else
        chunks = copy_chunks(passing.from.view, passing.to.view)
      end
      if chunks then
        self:note_passing(operation, passing.to)
        return pass_on(self, passing.from, passing.to, chunks)
      end
    end
    return mark(self, passing.to)
  end
  for _, item in ipairs(items) do
    if item.write or item.touch then mark(self, item) end
  end
end

return memory
