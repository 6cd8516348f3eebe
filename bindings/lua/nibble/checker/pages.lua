-- Compares what operations do with the pages of a pool with what its allocator (nibble.pages) knows.
--
-- `pages.watch(allocator, pool)` names the pools. For each allocator there is a book, which the allocator's operations
-- update: the requests that hold a page, and at which place of their text; when, and where in the script, each entry
-- was allocated; who wrote it last. So the cost of a check does not grow with the number of pages in use. An entry is
-- fresh from its allocation until its owner writes it.

local accesses = require "nibble.checker.accesses"
local spans = require "nibble.checker.spans"

local owners = {}
owners.__index = owners

local WEAK = { __mode = "k" }

--- `where()` is the script's place: {where, callers}.
function owners.new(memory, report, where)
  return setmetatable({ memory = memory, report = report, where = where, count = 0,
    pools = {},                        -- storage -> set of allocators
    books = setmetatable({}, WEAK),    -- allocator -> book
    meant = {} }, owners)              -- storage of an index tensor -> whose pages it says
end

-- One page of a pool's tensor.
local function page_spans(view, page)
  local one = { offset = view.offset + page * view.stride[1] * spans.item_bytes[view.dtype], dtype = view.dtype,
    shape = table.move(view.shape, 2, #view.shape, 1, {}), stride = table.move(view.stride, 2, #view.stride, 1, {}) }
  return spans.of_view(one)
end

------------------------------------------------------------------------------------------------------------ the books

-- Requests are numbered in reports in the order of their creation.
local function know(book, request, place)
  local known = book.requests[request]
  if not known then
    book.named = book.named + 1
    known = { number = book.named, place = place }
    book.requests[request] = known
  end
  return known
end

local function hold(book, request, page, index)
  local holders = book.holders[page]
  if not holders then
    holders = {}
    book.holders[page], book.holding[page] = holders, 0
  end
  if not holders[request] then book.holding[page] = book.holding[page] + 1 end
  holders[request] = index
end

local function unhold(book, request, page)
  local holders = book.holders[page]
  if not holders or not holders[request] then return end
  holders[request], book.holding[page] = nil, book.holding[page] - 1
  if book.holding[page] == 0 then book.holders[page], book.holding[page] = nil, nil end
end

-- The index of a request's page in its text, from 0; what it dropped counts. It stays what it is while the request has
-- the page.
local function hold_from(book, allocator, request, first)
  local dropped = request.dropped // allocator.page_size - 1
  for j = first, #request.pages do hold(book, request, request.pages[j], dropped + j) end
end

local function new_book(self, allocator)
  self.count = self.count + 1
  local book = { number = self.count, views = {}, version = 0, named = 0, requests = setmetatable({}, WEAK),
    holders = {}, holding = {}, -- page -> request -> index of the page; how many
    taken = {}, freed = {},     -- page -> where the page came to its owner, where it was given back
    told = {},                  -- page -> kind of the last report
    handed = {},                -- page -> {{first entry, time, where}, ...}, as its entries were handed out
    wrote = {},                 -- page -> entry -> who wrote it last
    numberings = setmetatable({}, WEAK), laid = {} } -- view -> see `numbering`; storages of which the layout is known
  local live = {}
  for request in pairs(allocator.live) do live[#live + 1] = request end
  table.sort(live, function(a, b) return (a.pages[1] or -1) < (b.pages[1] or -1) end)
  for _, request in ipairs(live) do
    know(book, request)
    hold_from(book, allocator, request, 1)
  end
  self.books[allocator] = book
  return book
end

function owners:watch(allocator, views)
  local book = self.books[allocator] or new_book(self, allocator)
  book.numberings, book.laid = setmetatable({}, WEAK), {}
  for _, view in ipairs(views) do
    local storage = self.memory:storage(view.storage)
    storage.fresh = storage.fresh or {}
    book.views[#book.views + 1] = view
    self.pools[view.storage] = self.pools[view.storage] or setmetatable({}, WEAK)
    self.pools[view.storage][allocator] = true
    for page = 0, math.min(allocator.num_pages, view.shape[1]) - 1 do -- what has an owner already may have been written
      local one = page_spans(view, page) or {}
      if allocator:references(page) > 0 then spans.add(storage.fresh, one) else self.memory.unwrite(storage, one) end
    end
  end
end

-- Takes the views for which `gone(view)` off a book.
local function remove_views(self, allocator, gone)
  local book, left = self.books[allocator], {}
  book.numberings, book.laid = setmetatable({}, WEAK), {}
  for i = #book.views, 1, -1 do
    if gone(book.views[i]) then
      left[table.remove(book.views, i).storage] = true
    end
  end
  for _, view in ipairs(book.views) do left[view.storage] = nil end
  for storage in pairs(left) do
    local watchers = self.pools[storage]
    if watchers then
      watchers[allocator] = nil
      if not next(watchers) then
        self.pools[storage] = nil
        if self.memory.storages[storage] then self.memory.storages[storage].fresh = nil end
      end
    end
  end
  if #book.views == 0 then self.books[allocator] = nil end
end

function owners:unwatch(allocator, view)
  if self.books[allocator] then remove_views(self, allocator, function(other) return other.key == view.key end) end
end

function owners:storage_freed(id)
  for allocator in pairs(self.pools[id] or {}) do
    remove_views(self, allocator, function(view) return view.storage == id end)
  end
  self.meant[id] = nil
end

-- Nothing in some entries of a page (default: in all) has been written by its owner.
local function clean(self, book, page, entry, count)
  for _, view in ipairs(book.views) do
    local storage = self.memory.storages[view.storage]
    if storage and storage.fresh and page < view.shape[1] then
      local list = not entry and page_spans(view, page)
        or entry and view.kv_layout ~= nil and accesses.piece(view, { page, entry, count })
      if list then self.memory.unwrite(storage, list) end
    end
  end
end

--- More tokens of a request: on its first `kept` pages, which it had before, and on new ones.
function owners:handed(allocator, request, kept, count)
  local book = self.books[allocator]
  if not book then return end
  local place, time, size = self.where(), self.memory:tick(), allocator.page_size
  book.version = book.version + 1
  know(book, request, place)
  for j = kept + 1, #request.pages do
    local page = request.pages[j]
    book.taken[page], book.freed[page], book.told[page], book.wrote[page] = place, nil, nil, nil
    book.handed[page] = { { 0, time, place } }
    clean(self, book, page)
  end
  hold_from(book, allocator, request, kept + 1)
  local position = request.length - count
  if count == 0 or position // size >= kept then return end
  local page, entry = request.pages[position // size + 1], position % size
  book.told[page], book.handed[page] = nil, book.handed[page] or {}
  table.insert(book.handed[page], { entry, time, place })
  for e = entry, size - 1 do
    if book.wrote[page] then book.wrote[page][e] = nil end
  end
  clean(self, book, page, entry, math.min(count, size - entry))
end

function owners:forked(allocator, child)
  local book = self.books[allocator]
  if not book then return end
  book.version = book.version + 1
  know(book, child, self.where())
  hold_from(book, allocator, child, 1)
end

--- A request gives pages back; some go on to live with others.
function owners:released(allocator, request, list)
  local book = self.books[allocator]
  if not book then return end
  book.version = book.version + 1
  if #list == 0 then return end
  local place = self.where()
  for _, page in ipairs(list) do
    unhold(book, request, page)
    if allocator:references(page) == 0 then
      book.freed[page], book.told[page], book.wrote[page], book.handed[page] = place, nil, nil, nil
      clean(self, book, page)
    end
  end
end

--- A request's pages are asked for: those that it has not from the allocator are noticed.
function owners:asked(allocator, request, first, last)
  local book = self.books[allocator]
  if not book then return end
  local dropped = request.dropped // allocator.page_size - 1
  for j = first, last do
    local page = request.pages[j]
    local holders = book.holders[page]
    if not (holders and holders[request]) then
      hold(book, request, page, dropped + j)
      book.version = book.version + 1
    end
  end
end

--- A tensor of slots or of rows of pages, each of which is a request's: `list`.
function owners:tensor(allocator, values, list, tensor)
  local book = self.books[allocator]
  if not book then return end
  local kept, storage, offset = {}, tensor:storage()
  for i, request in pairs(list) do -- unless the script has changed them
    local page = type(values[i]) == "table" and values[i][1] or values[i] // allocator.page_size
    local holders = book.holders[page]
    kept[i] = holders and holders[request] and request or nil
  end
  self.meant[storage] = { allocator = allocator, list = kept, offset = offset, version = self.memory:version(storage) }
end

--- A tensor is copied as a whole: what it says of pages it says there, too.
function owners:copied(from, to)
  local meant = self.meant[from.storage]
  if not meant and not self.meant[to.storage] then return end
  self.meant[to.storage] = nil
  if not meant or meant.offset ~= from.offset or meant.version ~= self.memory:version(from.storage) then return end
  self.meant[to.storage] = { allocator = meant.allocator, list = meant.list, offset = to.offset,
    version = self.memory:version(to.storage) }
end

-- Whose an index (from 0) of an index tensor is, if that is known.
local function meant_for(self, view, allocator, index)
  local meant = view and self.meant[view.storage]
  if not meant or meant.allocator ~= allocator or meant.offset ~= view.offset
    or meant.version ~= self.memory:version(view.storage) then return nil end
  return meant.list[index + 1]
end

----------------------------------------------------------------------------------------------------------- operations

-- What an allocator calls the pages of an operation's view, which may be a part of the tensor that it watches, or the
-- other way round: a function from page to page, which gives nil for what is none of its pages, the way back, and a
-- text: views with the same one have the same numbers. K and V, data and scales may lie in one page: of several views
-- the nearest before it counts.
local function numbering(book, view)
  local known = book.numberings[view]
  if known then return known[1], known[2], known[3] end
  local stride, list = view.stride[1] * spans.item_bytes[view.dtype], {}
  for _, watched in ipairs(book.views) do
    if watched.storage == view.storage then
      local same = watched.stride[1] * spans.item_bytes[watched.dtype] == stride
      local apart = view.offset - watched.offset
      list[#list + 1] = { same and apart % stride or math.maxinteger, same and apart // stride or 0, watched.shape[1] }
    end
  end
  if #list > 1 then table.sort(list, function(a, b) return a[1] < b[1] end) end
  local ways = {}
  for i, way in ipairs(list) do ways[i] = way[2] .. " " .. way[3] end
  local function number(page)
    for i = 1, #list do
      local own = page + list[i][2]
      if own >= 0 and own < list[i][3] then return own end
    end
  end
  local function back(own)
    for _, way in ipairs(list) do
      local page = own - way[2]
      if page >= 0 and page < view.shape[1] and number(page) == own then return page end
    end
  end
  ways = table.concat(ways, ";")
  book.numberings[view] = { number, back, ways }
  return number, back, ways
end

-- When and where an entry was handed out.
local function handed_at(book, page, entry)
  local list = book.handed[page] or {}
  for i = #list, 1, -1 do
    if list[i][1] <= entry then return list[i][2], list[i][3] end
  end
  return 0, book.taken[page]
end

--- For what reads an unwritten entry: who was given it, and where.
function owners:owner(item, byte)
  local page, entry = accesses.entry_of(item.view, byte)
  for allocator in pairs(self.pools[item.view.storage] or {}) do
    local book = self.books[allocator]
    local number = numbering(book, item.view)(page)
    if number and book.taken[number] then return self:allocation(allocator, number, entry) end
  end
end

-- The other operation of a report: the allocation of a page, or of an entry of it.
function owners:allocation(allocator, page, entry)
  local book = self.books[allocator]
  local name = "the allocator"
  for request in pairs(book.holders[page] or {}) do
    if book.holding[page] == 1 then name = ("%s, for request %d"):format(name, know(book, request).number) end
  end
  local place = entry and select(2, handed_at(book, page, entry)) or book.taken[page] or {}
  return { name = name, where = place.where, callers = place.callers }
end

local function name_of(book, request)
  return ("request %d"):format(know(book, request).number)
end

-- Whether an entry of a watched page was written since its allocation.
local function is_written(self, caches, page, entry)
  for _, item in ipairs(caches) do
    local storage = self.memory:storage(item.view.storage)
    if storage.fresh then return not spans.missing(storage.fresh, accesses.piece(item.view, { page, entry, 1 })) end
  end
  return false
end

-- Another request that waits for its last token since after `time` and since before `version`, when the index tensor
-- was written, while `request` has all of its own.
local function who_waits(self, allocator, request, caches, back, time, version, writes)
  local book, size, found = self.books[allocator], allocator.page_size, nil
  local function waits(other)
    if other.length == 0 then return false end
    local page, entry = other.pages[#other.pages], (other.length - 1) % size
    local its = back(page) -- as the operation calls it
    return its and not is_written(self, caches, its, entry), page, entry
  end
  if waits(request) then return nil end
  for other in pairs(allocator.live) do
    local waiting, page, entry = waits(other)
    local handed = handed_at(book, page, entry)
    if waiting and handed > time and handed < version and not (writes[page] and writes[page][entry])
      and (not found or know(book, other).number < know(book, found).number) then found = other end
  end
  return found
end

-- The index tensor and the rows of a write, with their versions: the same again writes the same again.
local function sources(self, items, facts)
  local source = {}
  for _, item in ipairs(items) do
    local name = item.parameter
    if name == facts.parameter then
      source.index, source.view = item.view.storage, item.view
      source.version = self.memory:version(source.index)
    elseif name == "append_key" or name == "kv" then
      source.rows, source.rows_version = item.view.storage .. " " .. item.view.offset,
        self.memory:version(item.view.storage)
    end
  end
  return source
end

--- Compares the slots, the rows of a block table, or the pages that are read, with the books. Returns the pages of
--- which something was reported.
function owners:check(operation, items, facts)
  if not next(self.pools) then return nil end
  local flagged, caches, allocators, views, value_views = {}, {}, {}, {}, {}
  for _, item in ipairs(items) do
    local watchers = item.pieces and self.pools[item.view.storage]
    if watchers then
      caches[#caches + 1] = item
      for allocator in pairs(watchers) do
        if not views[allocator] then allocators[#allocators + 1] = allocator end
        views[allocator] = views[allocator] or item.view
        if item.values then value_views[allocator] = value_views[allocator] or item.view end
        local book = self.books[allocator]
        for _, view in ipairs(book.laid[item.view.storage] and {} or book.views) do
          if view.storage == item.view.storage and view.kv_layout == nil then
            view.kv_layout = item.view.kv_layout or false -- false: records
          end
        end
        book.laid[item.view.storage] = true
      end
    end
  end
  if #allocators == 0 then return flagged end
  if #allocators > 1 then
    table.sort(allocators, function(a, b) return self.books[a].number < self.books[b].number end)
  end
  local name, parameter, source = operation.name, facts.parameter, sources(self, items, facts)
  local numbers = {} -- by allocator
  local function use(which)
    for _, allocator in ipairs(allocators) do
      numbers[allocator] = numbering(self.books[allocator], which[allocator] or views[allocator])
    end
  end
  use(views)

  local function references(allocator, page)
    local number = numbers[allocator](page)
    return number and allocator:references(number) or 0
  end

  local function flag(page, kind, other, text, ...)
    if flagged[page] then return end
    flagged[page] = true
    for _, allocator in ipairs(allocators) do -- until the owner of the page changes
      local told, number = self.books[allocator].told, numbers[allocator](page)
      if number then
        if told[number] == kind then return end
        told[number] = kind
      end
    end
    self.report(kind, operation, other, text:format(...), { item = { view = views[allocators[1]] } })
  end

  -- `page` is the operation's number of a page, `own` the allocator's number. `what` and `index`, or row and column,
  -- are the place in the index tensor.
  local function check_page(page, own, allocator, doing, what, index, column)
    local book, count = self.books[allocator], allocator:references(own)
    local holding = book.holding[own] or 0
    if count == 1 and holding == 1 and #allocators == 1 then return count end
    index = column and ("row %d, column %d"):format(index, column) or what .. " " .. index
    if count == math.huge then
      local held = #allocators > 1
      for _, other in ipairs(allocators) do held = held and (other == allocator or references(other, page) > 0) end
      if not held then
        flag(page, "reserved page", nil, "%s %s page %d (%s %s), which is reserved and belongs to no request", name,
          doing, page, parameter, index)
      end
      return count
    end
    local held = false -- by any allocator: they may have different pages of one pool
    for _, other in ipairs(allocators) do held = held or references(other, page) > 0 end
    if not held then
      local freed = book.freed[own]
      flag(page, "freed page", freed and { name = "the allocator", where = freed.where, callers = freed.callers },
        "%s %s page %d (%s %s), which %s", name, doing, page, parameter, index,
        freed and "was released" or "the allocator has not allocated")
    elseif holding > count then
      flag(page, "owned twice", self:allocation(allocator, own),
        "%s %s page %d (%s %s), which %d requests own without sharing it",
        name, doing, page, parameter, index, holding)
    end
    for _, other in ipairs(allocators) do
      if other ~= allocator and count > 0 and references(other, page) > 0 then
        flag(page, "owned twice", self:allocation(allocator, own),
          "%s %s page %d (%s %s), which two allocators have allocated", name, doing, page, parameter, index)
      end
    end
    return count
  end

  -- Whether a request has the pages of a row in this order; and, if it has fewer tokens, the column and the number of
  -- its tokens there.
  local function row_of(row, mine, request, allocator)
    local book, before, size = self.books[allocator], -1, allocator.page_size
    local dropped, beyond = request.dropped // size, nil
    for j, own in ipairs(mine) do
      local index = own and book.holders[own] and book.holders[own][request]
      if own and (not index or index <= before) then return false end
      if own then
        before = index
        local tokens = math.min(row.page_size, row.length - (j - 1) * row.page_size)
        local left = request.length - (index - dropped) * size
        if row.page_size == size and tokens > left then beyond = beyond or { j, left } end
      end
    end
    return true, beyond
  end

  -- Reports a page that is in two rows of which one request cannot have both.
  local function twice(allocator, row, mine, first)
    local book = self.books[allocator]
    for j, own in ipairs(mine) do
      if own and first[own] and first[own].row ~= row and allocator:references(own) == 1 and not flagged[row[j]] then
        local other, one = first[own], false
        for request in pairs(book.holders[own] or {}) do
          one = one or (row_of(row, mine, request, allocator) and row_of(other.row, other.mine, request, allocator))
        end
        if not one or other.row.length ~= row.length then
          flag(row[j], "owned twice", self:allocation(allocator, own),
            "%s reads page %d in two rows of %s (the second is row %d), but only one request owns it", name, row[j],
            parameter, row.row)
          return true
        end
      end
    end
    for _, own in ipairs(mine) do
      if own then first[own] = first[own] or { row = row, mine = mine } end
    end
  end

  local function check_row(row, allocator, first)
    local book, number, mine, known, bad = self.books[allocator], numbers[allocator], {}, false, false
    for j = 1, #row do
      mine[j] = number(row[j]) or false
      known = known or mine[j]
    end
    if not known then return end
    for j, page in ipairs(row) do
      local own = mine[j]
      if own then
        check_page(page, own, allocator, "reads", "row", row.row, j - 1)
      elseif page < 0 or page >= row.num_pages then
        flag(page, "missing page", nil,
          "%s reads row %d of %s for %d tokens, but column %d is %d, which is no page: its tokens are skipped", name,
          row.row, parameter, row.length, j - 1, page)
      end
      bad = bad or flagged[page]
    end
    if bad or twice(allocator, row, mine, first) then return end
    local last
    for _, own in ipairs(mine) do last = own or last end
    local meant = meant_for(self, source.view, allocator, row.row)
    local found, beyond, holder
    for request in pairs(book.holders[last] or {}) do
      if not found or beyond then -- prefer the request that has all pages and all tokens
        local has, left = row_of(row, mine, request, allocator)
        if has and (not found or not left or left[2] > beyond[2]) then found, beyond, holder = true, left, request end
      end
    end
    if not found then
      if #allocators > 1 then return end -- the other allocators may have the rest
      flag(row[1], "foreign row", self:allocation(allocator, last),
        "%s reads row %d of %s (pages %s), but no live request has these pages in this order", name, row.row, parameter,
        table.concat(row, ", "))
    elseif beyond then
      flag(row[beyond[1]], "beyond length", self:allocation(allocator, mine[beyond[1]]),
        "%s reads %d tokens of row %d of %s, but %s has only %d there", name, row.length, row.row, parameter,
          name_of(book, holder),
        (beyond[1] - 1) * row.page_size + beyond[2])
    elseif meant and not row_of(row, mine, meant, allocator) then
      flag(row[1], "foreign row", self:allocation(allocator, last),
        "%s reads row %d of %s, which was made for %s, but %s owns its pages now", name, row.row, parameter,
          name_of(book, meant),
        name_of(book, holder))
    end
  end

  -- The request with a token at an entry of a page, and any request that has the page.
  local function holder_at(allocator, own, entry)
    local size, any = allocator.page_size, nil
    for request, index in pairs(self.books[allocator].holders[own] or {}) do
      any = request
      if (index - request.dropped // size) * size + entry < request.length then return request, any end
    end
    return nil, any
  end

  local function check_entry(page, entry, own, allocator, doing, what, index)
    local holder, any = holder_at(allocator, own, entry)
    if any and not holder and facts.page_size == allocator.page_size then
      flag(page, "beyond length", self:allocation(allocator, own),
        "%s %s entry %d of page %d (%s %s %d), but %s has no token there", name, doing, entry, page, parameter, what,
          index,
        name_of(self.books[allocator], any))
    end
    return holder
  end

  local writes -- page -> entry -> true, by the allocator's numbers
  local function check_slot(slot, own, allocator)
    local index, page, entry = slot[1], slot[2], slot[3]
    local book = self.books[allocator]
    local count = check_page(page, own, allocator, "writes", "index", index)
    if count == math.huge or flagged[page] then return end
    if count >= 2 then
      local holder = holder_at(allocator, own, entry)
      -- A prompt may be written after it was shared, so the first write by an owner is allowed.
      if not holder or is_written(self, caches, page, entry) then
        flag(page, "shared page", self:allocation(allocator, own),
          "%s writes entry %d of page %d (%s index %d), which %d requests share", name, entry, page, parameter, index,
            count)
      end
      return
    end
    local holder = check_entry(page, entry, own, allocator, "writes", "index", index)
    if flagged[page] then return end
    local meant = holder and meant_for(self, source.view, allocator, index)
    if meant and not book.holders[own][meant] then
      flag(page, "foreign entry", self:allocation(allocator, own),
        "%s writes entry %d of page %d (%s index %d) for %s, but %s owns the page now", name, entry, page, parameter,
          index,
        name_of(book, meant), name_of(book, holder))
      return
    end
    local wrote = book.wrote[own] and book.wrote[own][entry]
    if not wrote or not holder or meant or (wrote.index == source.index and wrote.version == source.version
        and wrote.rows == source.rows and wrote.rows_version == source.rows_version) then return end
    if source.version and source.version < handed_at(book, own, entry)
      and not (wrote.index == source.index and wrote.version == source.version) then
      flag(page, "foreign entry", wrote.operation,
        "%s writes entry %d of page %d (%s index %d) again, with a %s that is older than %s, which owns the page",
          name, entry, page,
        parameter, index, parameter, name_of(book, holder))
      return
    end
    if not writes then
      writes = {}
      for _, other in ipairs(facts.slots) do
        local number = numbers[allocator](other[2])
        if number then
          writes[number] = writes[number] or {}
          writes[number][other[3]] = true
        end
      end
    end
    local _, back = numbering(book, views[allocator])
    local waiting = who_waits(self, allocator, holder, caches, back, wrote.time, source.version or 0, writes)
    if waiting then
      flag(page, "foreign entry", wrote.operation,
        "%s writes entry %d of page %d (%s index %d) of %s again, while nothing has written "
        .. "the last token of %s", name,
        entry, page, parameter, index, name_of(book, holder), name_of(book, waiting))
    end
  end

  -- Another layer with the same tables was checked already.
  local only, now = facts.rows and #allocators == 1 and self.books[allocators[1]], nil
  if only then
    local _, _, ways = numbering(only, views[allocators[1]])
    local _, _, value_ways = numbering(only, value_views[allocators[1]] or views[allocators[1]])
    now = { facts, only.version, ways, value_ways, source.view.storage, source.view.offset, source.version or 0,
      self.meant[source.view.storage] }
    local right = only.right ~= nil
    for i = 1, 8 do right = right and now[i] == only.right[i] end
    if right then return flagged end
  end

  for _, allocator in ipairs(allocators) do
    local number, book = numbers[allocator], self.books[allocator]
    writes = nil
    for _, slot in ipairs(facts.slots or {}) do
      local own = number(slot[2])
      if own then check_slot(slot, own, allocator) end
    end
    for _, piece in ipairs(facts.reads or {}) do
      local own = number(piece[1])
      if own and check_page(piece[1], own, allocator, "reads", "entry", piece[4]) and not flagged[piece[1]] then
        check_entry(piece[1], piece[2], own, allocator, "reads", "entry", piece[4])
      end
    end
    for _, slot in ipairs(facts.slots or {}) do
      local own = number(slot[2])
      if own then
        book.wrote[own] = book.wrote[own] or {}
        book.wrote[own][slot[3]] = { index = source.index, version = source.version, rows = source.rows,
          rows_version = source.rows_version, operation = operation, time = self.memory:tick() }
      end
    end
    local first = {}
    for _, row in ipairs(facts.rows or {}) do check_row(row, allocator, first) end
  end
  if facts.value_rows then
    use(value_views)
    for _, allocator in ipairs(allocators) do
      local first = {}
      for _, row in ipairs(facts.value_rows) do check_row(row, allocator, first) end
    end
  end
  if only and not next(flagged) then only.right = now end
  return flagged
end

--- Reports slots that occur twice in a call.
function owners:check_slots(operation, facts)
  local seen = {}
  for _, slot in ipairs(facts.slots and #facts.slots > 1 and facts.slots or {}) do
    local index, page, entry = slot[1], slot[2], slot[3]
    local pages = seen[page] or {}
    seen[page] = pages
    if pages[entry] then
      self.report("duplicate slot", operation, nil, ("%s writes entry %d of page %d twice (%s index %d and %d)"):format(
        operation.name, entry, page, facts.parameter, pages[entry], index))
      return
    end
    pages[entry] = index
  end
end

return owners
