-- What an allocator of nibble.pages knows, held against what operations do with the pools that it hands pages out of.
--
-- `pages.watch(allocator, pool)` says which pools these are. A page is then fresh (nothing of its owner's written yet) whenever it
-- changes hands, and each operation's slots and block tables are compared with who holds which page at the time of the call.

local accesses = require "nibble.checker.accesses"
local spans = require "nibble.checker.spans"

local owners = {}
owners.__index = owners

--- `where()` is the script's line.
function owners.new(memory, report, where)
  return setmetatable({ memory = memory, report = report, where = where, pools = {},
    books = setmetatable({}, { __mode = "k" }) }, owners)
end

-- One page of a pool's tensor.
local function page_spans(view, page)
  local one = { offset = view.offset + page * view.stride[1] * spans.item_bytes[view.dtype], dtype = view.dtype,
    shape = table.move(view.shape, 2, #view.shape, 1, {}), stride = table.move(view.stride, 2, #view.stride, 1, {}) }
  return spans.of_view(one)
end

--- Views of the tensors of a pool: a table with paged_kv_cache and kv_cache_sf, or a list of tensors, pages in dimension 1.
local function views_of(pool)
  local views = {}
  local function add(x)
    if type(x) == "table" then
      for _, y in ipairs(x) do add(y) end
    elseif x then
      local storage, offset = x:storage()
      views[#views + 1] = { storage = storage, offset = offset, dtype = x.dtype, shape = x.shape, stride = x:stride() }
    end
  end
  add(pool)
  if type(pool) == "table" then
    add(pool.paged_kv_cache)
    add(pool.kv_cache_sf)
  end
  return views
end

function owners:watch(allocator, pool)
  local book = self.books[allocator]
  if not book then
    self.count = (self.count or 0) + 1
    book = { views = {}, taken = {}, freed = {}, told = {}, number = self.count }
  end
  self.books[allocator] = book
  for _, view in ipairs(views_of(pool)) do
    local storage = self.memory:storage(view.storage)
    storage.fresh = storage.fresh or {}
    book.views[#book.views + 1] = view
    self.pools[view.storage] = self.pools[view.storage] or setmetatable({}, { __mode = "k" })
    self.pools[view.storage][allocator] = true
    for page = 0, allocator.num_pages - 1 do -- what has an owner already may have been written
      if allocator:references(page) > 0 then spans.add(storage.fresh, page_spans(view, page) or {}) end
    end
  end
end

local function clean(self, book, page)
  for _, view in ipairs(book.views) do
    local storage = self.memory.storages[view.storage]
    if storage and storage.fresh then spans.remove(storage.fresh, page_spans(view, page) or {}) end
  end
end

function owners:taken(allocator, page)
  local book = self.books[allocator]
  if not book then return end
  book.taken[page], book.freed[page], book.told[page] = self.where(), nil, nil
  clean(self, book, page)
end

function owners:released(allocator, page)
  local book = self.books[allocator]
  if not book then return end
  book.freed[page], book.told[page] = self.where(), nil
  clean(self, book, page)
end

function owners:storage_freed(id)
  self.pools[id] = nil
  for _, book in pairs(self.books) do
    for i = #book.views, 1, -1 do
      if book.views[i].storage == id then table.remove(book.views, i) end
    end
  end
end

-- What an allocator calls a page of an operation's view, which may be a part of the tensor that it watches, or the other way round;
-- nil when it is none of its pages. K and V, data and scales may lie in one page: of several views the nearest before it counts.
local function page_of(book, view, page)
  local stride = view.stride[1] * spans.item_bytes[view.dtype]
  local found, least
  for _, watched in ipairs(book.views) do
    if watched.storage == view.storage then
      local same = watched.stride[1] * spans.item_bytes[watched.dtype] == stride
      local apart = view.offset - watched.offset
      local rest = same and apart % stride or math.maxinteger
      local number = same and page + apart // stride or page
      if number >= 0 and number < watched.shape[1] and (not least or rest < least) then found, least = number, rest end
    end
  end
  return found
end

--- For what reads an unwritten page: who was given it, and where.
function owners:owner(item, byte)
  local page = (byte - item.view.offset) // (item.view.stride[1] * spans.item_bytes[item.view.dtype])
  for allocator in pairs(self.pools[item.view.storage] or {}) do
    local book = self.books[allocator]
    local where = book.taken[page_of(book, item.view, page)]
    if where then return { name = "the allocator", where = where } end
  end
end

-- page -> the live requests that list it, with the index of the page in them.
local function holders_of(allocator)
  local holders = {}
  for request in pairs(allocator.live) do
    for j, page in ipairs(request.pages) do
      holders[page] = holders[page] or {}
      table.insert(holders[page], { request, j })
    end
  end
  return holders
end

-- Whether a row of a block table is what one of the requests says.
local function is_row_of(row, request)
  for j, page in ipairs(row) do
    if request.pages[j] ~= page then return false end
  end
  return true
end

-- A page that is in two rows (in the allocator's numbers), whose requests are not the same and do not share it.
local function owned_twice(allocator, holders, page, first, second)
  if allocator:references(page) ~= 1 then return false end
  if first.length ~= second.length then return true end
  for _, holder in ipairs(holders[page] or {}) do
    if is_row_of(first, holder[1]) and is_row_of(second, holder[1]) then return false end -- one request, listed twice
  end
  return true
end

--- Compares the slots, the rows of a block table, or the pages that are read, with the books. Returns the pages of which
--- something was reported.
function owners:check(operation, items, facts)
  local flagged, caches, allocators, views = {}, {}, {}, {}
  for _, item in ipairs(items) do
    if item.pieces then
      caches[#caches + 1] = item
      for allocator in pairs(self.pools[item.view.storage] or {}) do
        if not views[allocator] then allocators[#allocators + 1] = allocator end
        views[allocator] = views[allocator] or item.view
      end
    end
  end
  if #allocators == 0 then return flagged end
  table.sort(allocators, function(a, b) return self.books[a].number < self.books[b].number end)
  local name, parameter = operation.name, facts.parameter

  local function numbered(allocator, page) return page_of(self.books[allocator], views[allocator], page) end
  local function references(allocator, page)
    local number = numbered(allocator, page)
    return number and allocator:references(number) or 0
  end

  local function flag(page, kind, other, text, ...)
    if flagged[page] then return end
    flagged[page] = true
    for _, allocator in ipairs(allocators) do -- until the page changes hands
      local told, number = self.books[allocator].told, numbered(allocator, page)
      if number then
        if told[number] == kind then return end
        told[number] = kind
      end
    end
    self.report(kind, operation, other, text:format(...))
  end

  -- `page` is the operation's, `own` the same one as its allocator calls it.
  local function check_page(page, own, allocator, holders, doing, index)
    local book, count = self.books[allocator], allocator:references(own)
    local held = false -- by any of them: they may hand out different pages of one pool
    for _, other in ipairs(allocators) do held = held or references(other, page) > 0 end
    if not held then
      local freed = book.freed[own]
      flag(page, "freed page", freed and { name = "the allocator", where = freed }, "%s %s page %d (%s %s), which %s", name, doing,
        page, parameter, index, freed and "was given back" or "the allocator has not handed out")
    elseif count < math.huge and #(holders[own] or {}) > count then
      flag(page, "owned twice", { name = "the allocator", where = book.taken[own] },
        "%s %s page %d (%s %s), which %d requests have without sharing it", name, doing, page, parameter, index,
        #holders[own])
    end
    for _, other in ipairs(allocators) do
      if other ~= allocator and count > 0 and references(other, page) > 0 then
        flag(page, "owned twice", { name = "the allocator", where = book.taken[own] },
          "%s %s page %d (%s %s), which two allocators have handed out", name, doing, page, parameter, index)
      end
    end
    return count
  end

  local function check_row(b, row, allocator, holders, first)
    local mine = { length = row.length }
    for j, page in ipairs(row) do mine[j] = numbered(allocator, page) or false end
    for j, page in ipairs(row) do
      local own = mine[j]
      if own then
        check_page(page, own, allocator, holders, "reads", ("row %d, column %d"):format(b - 1, j - 1))
        if first[own] and first[own] ~= mine and owned_twice(allocator, holders, own, first[own], mine) then
          flag(page, "owned twice", { name = "the allocator", where = self.books[allocator].taken[own] },
            "%s reads page %d in two rows of %s (%d is the second), but one request has it", name, page, parameter, b - 1)
        end
        first[own] = first[own] or mine
      end
    end
  end

  local function check_slot(slot, own, allocator, holders)
    local index, page, entry = slot[1], slot[2], slot[3]
    local count = check_page(page, own, allocator, holders, "writes", "index " .. index)
    if count < 2 or count == math.huge then return end
    local seen = false -- by any who holds it: a prompt that is written after it was shared
    for _, holder in ipairs(holders[own] or {}) do
      seen = seen or (holder[2] - 1) * allocator.page_size + entry < holder[1].length
    end
    if not seen or self:is_written(caches, page, entry) then
      flag(page, "shared page", { name = "the allocator", where = self.books[allocator].taken[own] },
        "%s writes entry %d of page %d (%s index %d), which %d requests share", name, entry, page, parameter, index, count)
    end
  end

  for _, allocator in ipairs(allocators) do
    local holders, first = holders_of(allocator), {}
    for b, row in ipairs(facts.rows or {}) do check_row(b, row, allocator, holders, first) end
    for _, piece in ipairs(facts.reads or {}) do
      local own = numbered(allocator, piece[1])
      if own then check_page(piece[1], own, allocator, holders, "reads", "entry " .. piece[2]) end
    end
    for _, slot in ipairs(facts.slots or {}) do
      local own = numbered(allocator, slot[2])
      if own then check_slot(slot, own, allocator, holders) end
    end
  end
  return flagged
end

-- Whether an entry of a watched page has been written since the page was handed out.
function owners:is_written(caches, page, entry)
  for _, item in ipairs(caches) do
    local storage = self.memory:storage(item.view.storage)
    if storage.fresh then return not spans.missing(storage.fresh, accesses.piece(item.view, { page, entry, 1 })) end
  end
  return false
end

--- Slots that are there twice.
function owners:check_slots(operation, facts)
  local seen = {}
  for _, slot in ipairs(facts.slots or {}) do
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
