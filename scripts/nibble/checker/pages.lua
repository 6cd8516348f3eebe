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

--- For what reads an unwritten page: who was given it, and where.
function owners:owner(item, byte)
  local page = (byte - item.view.offset) // (item.view.stride[1] * spans.item_bytes[item.view.dtype])
  for allocator in pairs(self.pools[item.view.storage] or {}) do
    local where = self.books[allocator].taken[page]
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

-- A page that is in two rows, whose requests are not the same and do not share it.
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
  local flagged, caches, allocators, known = {}, {}, {}, {}
  for _, item in ipairs(items) do
    if item.pieces then
      caches[#caches + 1] = item
      for allocator in pairs(self.pools[item.view.storage] or {}) do
        if not known[allocator] then allocators[#allocators + 1] = allocator end
        known[allocator] = true
      end
    end
  end
  if #allocators == 0 then return flagged end
  table.sort(allocators, function(a, b) return self.books[a].number < self.books[b].number end)
  local name, parameter = operation.name, facts.parameter

  local function flag(page, kind, other, text, ...)
    if flagged[page] then return end
    flagged[page] = true
    for _, allocator in ipairs(allocators) do -- until the page changes hands
      local told = self.books[allocator].told
      if told[page] == kind then return end
      told[page] = kind
    end
    self.report(kind, operation, other, text:format(...))
  end

  local function check_page(page, allocator, holders, doing, index)
    local book, count = self.books[allocator], allocator:references(page)
    local held = false -- by any of them: they may hand out different pages of one pool
    for _, other in ipairs(allocators) do held = held or other:references(page) > 0 end
    if not held then
      local freed = book.freed[page]
      flag(page, "freed page", freed and { name = "the allocator", where = freed }, "%s %s page %d (%s %s), which %s", name, doing,
        page, parameter, index, freed and "was given back" or "the allocator has not handed out")
    elseif count < math.huge and #(holders[page] or {}) > count then
      flag(page, "owned twice", { name = "the allocator", where = book.taken[page] },
        "%s %s page %d (%s %s), which %d requests have without sharing it", name, doing, page, parameter, index,
        #holders[page])
    end
    for _, other in ipairs(allocators) do
      if other ~= allocator and count > 0 and other:references(page) > 0 then
        flag(page, "owned twice", { name = "the allocator", where = book.taken[page] },
          "%s %s page %d (%s %s), which two allocators have handed out", name, doing, page, parameter, index)
      end
    end
    return count
  end

  for _, allocator in ipairs(allocators) do
    local holders, size = holders_of(allocator), allocator.page_size
    local first = {}
    for b, row in ipairs(facts.rows or {}) do
      for j, page in ipairs(row) do
        check_page(page, allocator, holders, "reads", ("row %d, column %d"):format(b - 1, j - 1))
        if first[page] and first[page] ~= row and owned_twice(allocator, holders, page, first[page], row) then
          flag(page, "owned twice", { name = "the allocator", where = self.books[allocator].taken[page] },
            "%s reads page %d in two rows of %s (%d is the second), but one request has it", name, page, parameter, b - 1)
        end
        first[page] = first[page] or row
      end
    end
    for _, piece in ipairs(facts.reads or {}) do check_page(piece[1], allocator, holders, "reads", "entry " .. piece[2]) end
    for _, slot in ipairs(facts.slots or {}) do
      local index, page, entry = slot[1], slot[2], slot[3]
      local count = check_page(page, allocator, holders, "writes", "index " .. index)
      if count >= 2 and count < math.huge then
        local all = true -- of those who hold it see this token: a prompt that is written after it was shared
        for _, holder in ipairs(holders[page] or {}) do
          if (holder[2] - 1) * size + entry >= holder[1].length then all = false end
        end
        if not all or self:is_written(caches, page, entry) then
          flag(page, "shared page", { name = "the allocator", where = self.books[allocator].taken[page] },
            "%s writes entry %d of page %d (%s index %d), which %d requests share", name, entry, page, parameter, index, count)
        end
      end
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
