--- Pages of a paged KV cache: an allocator, the index tensors that kernels read, and the pools.
--
--   local pages = require "nibble.pages"
--   local allocator = pages.allocator { num_pages = 64, page_size = 16, layout = "shuffled", seed = 7 }
--   local a = allocator:allocate(37)                -- a request of 37 tokens on 3 pages
--   local b = allocator:fork(a, 20)                 -- shares a's first 20 tokens
--   local slots, copies = allocator:append(b, 1)    -- the slot of b's next token; copies: pages to copy before the write
--   local batch = allocator:batch({ a, b })         -- block_tables, seq_lens, kv_page_indptr, slot_mapping
--   local t = pages.tensors(batch, { device = "cpu" })
--   local pool = pages.caches { num_pages = 64, page_size = 16, num_kv_heads = 4, head_dim = 64 }
--   pages.copy(pool, copies)
--   allocator:drop(a, 1)                            -- for a sliding window: releases a's oldest page
--   allocator:rewind(a, 2)                          -- for rejected drafts: removes a's last two tokens
--   pages.watch(allocator, pool)                    -- call before the pool is used: nibble.check then knows the owner of
--                                                   -- each page
--   pages.unwatch(allocator, pool)                  -- ends this
--
-- Pages, slots and positions are data and count from 0; slot = page * page_size + entry. Everything except `tensors`,
-- `caches` and `copy` works on plain tables and does not need the module `nibble`. Bad arguments raise an error. If
-- there are not enough free pages, a function returns `nil, message` and changes nothing.

local numbers = require "nibble.numbers"

local pages = {}

local function fail(where, parameter, expected, got)
  error(("%s: %s: expected %s, got %s"):format(where, parameter, expected, numbers.text(got)), 0)
end

local function integer(where, parameter, value, minimum)
  local number = math.type(value) and math.tointeger(value)
  if not number or number < minimum then fail(where, parameter, "an integer >= " .. minimum, value) end
  return number
end

local function known(where, opts, names)
  if type(opts) ~= "table" then fail(where, "options", "a table", type(opts)) end
  for name in pairs(opts) do
    if not names:find(" " .. tostring(name) .. " ", 1, true) then
      error(("%s: %s: expected one of%s, got an unknown option"):format(where, tostring(name), names), 0)
    end
  end
  return opts
end

--- A random generator (SplitMix64) that is independent of `math.random`.
---@param seed integer
---@return fun(n: integer): integer next  an integer 0 .. n-1
function pages.generator(seed)
  local state = integer("pages.generator", "seed", seed, math.mininteger)
  return function(n)
    n = integer("random", "n", n, 1)
    state = state + 0x9E3779B97F4A7C15
    local z = state
    z = (z ~ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ~ (z >> 27)) * 0x94D049BB133111EB
    return ((z ~ (z >> 31)) >> 1) % n
  end
end

local function shuffle(list, random)
  for i = #list, 2, -1 do
    local j = random(i) + 1
    list[i], list[j] = list[j], list[i]
  end
  return list
end

------------------------------------------------------------------------------------------------------------- layouts

-- A layout is the order in which free pages are allocated: fn(num_pages, random) -> a list with each of 0..num_pages-1.
local layouts = {}

--- Lowest page first.
function layouts.sequential(num_pages)
  local order = {}
  for page = 0, num_pages - 1 do order[page + 1] = page end
  return order
end

--- Lowest page first, but the search continues in a circle after the last allocated page, so that a freed page is
--- reused late.
layouts.ring = layouts.sequential

--- No order at all.
function layouts.shuffled(num_pages, random)
  return shuffle(layouts.sequential(num_pages), random)
end

--- Runs of 1 to 3 neighbouring pages in random order, as in a pool after long use.
function layouts.fragmented(num_pages, random)
  local runs, page = {}, 0
  while page < num_pages do
    local length = math.min(1 + random(3), num_pages - page)
    runs[#runs + 1] = { page, length }
    page = page + length
  end
  local order = {}
  for _, run in ipairs(shuffle(runs, random)) do
    for i = 0, run[2] - 1 do order[#order + 1] = run[1] + i end
  end
  return order
end

local function layout_order(where, layout, num_pages, random)
  local name = type(layout) == "function" and "the layout function" or layout
  local fn = type(layout) == "function" and layout or layouts[layout]
  if not fn then fail(where, "layout", "sequential, shuffled, fragmented, ring or a function", layout) end
  local order, seen = fn(num_pages, random), {}
  if type(order) ~= "table" or #order ~= num_pages then
    fail(where, "layout", num_pages .. " pages from " .. name, type(order) == "table" and #order or type(order))
  end
  for i, page in ipairs(order) do
    local value = math.type(page) and math.tointeger(page)
    if not value or value < 0 or value >= num_pages or seen[value] then
      fail(where, "layout", ("each page 0..%d once from %s"):format(num_pages - 1, name), page)
    end
    seen[value], order[i] = true, value
  end
  return order
end

----------------------------------------------------------------------------------------------------------- allocator

--- The pages of a request. You may read it, but only an allocator may change it.
---@class nibble.request
---@field pages integer[]  physical pages in the order of the tokens: pages[j+1] holds tokens j*page_size and on
---@field length integer   tokens on these pages
---@field dropped integer  tokens before them that `drop` released

---@class nibble.page_copy
---@field source integer       page to copy from
---@field destination integer  page to copy to
---@field entries integer      how many of its first entries are in use

---@class nibble.allocator
---@field num_pages integer
---@field page_size integer  tokens a page
---@field num_free integer   pages
local allocator = {}
allocator.__index = allocator

---@alias nibble.page_order fun(num_pages: integer, random: fun(n: integer): integer): integer[]
---@alias nibble.page_layout "sequential"|"shuffled"|"fragmented"|"ring"|nibble.page_order

---@class nibble.allocator_options
---@field num_pages integer
---@field page_size integer
---@field layout? nibble.page_layout  the order in which free pages are allocated; default "sequential"
---@field seed? integer               of "shuffled", "fragmented" and a function's `random`; default 0
---@field reserved? integer           number of first pages that are never allocated; 1 keeps page 0, which wrong padding would hit

--- Creates an allocator of the pages 0 .. num_pages-1.
---@param opts nibble.allocator_options
---@return nibble.allocator
function pages.allocator(opts)
  local where = "pages.allocator"
  known(where, opts, " num_pages page_size layout seed reserved ")
  local num_pages = integer(where, "num_pages", opts.num_pages, 1)
  local reserved = integer(where, "reserved", opts.reserved or 0, 0)
  if reserved >= num_pages then fail(where, "reserved", "fewer than num_pages", reserved) end
  local layout = opts.layout or "sequential"
  local self = {
    num_pages = num_pages,
    page_size = integer(where, "page_size", opts.page_size, 1),
    num_free = num_pages - reserved,
    ring = layout == "ring",
    order = layout_order(where, layout, num_pages, pages.generator(opts.seed or 0)),
    rank = {},     -- page -> its index in `order`
    count = {},    -- page -> requests that hold it; nil: free
    live = {},     -- request -> true until it is freed
    first = 1,     -- no page before this index of `order` is free (ring: where the search starts)
  }
  for i, page in ipairs(self.order) do self.rank[page] = i end
  for page = 0, reserved - 1 do self.count[page] = math.huge end
  return setmetatable(self, allocator)
end

local function take(self)
  local i = self.first
  while self.count[self.order[i]] do i = i % #self.order + 1 end
  local page = self.order[i]
  self.first = i % #self.order + 1
  self.count[page] = 1
  self.num_free = self.num_free - 1
  return page
end

local function release(self, page)
  self.count[page] = self.count[page] - 1
  if self.count[page] > 0 then return end
  self.count[page] = nil
  self.num_free = self.num_free + 1
  if not self.ring then self.first = math.min(self.first, self.rank[page]) end
end

-- Tells the checker of checked mode, if there is one.
local function tell(what, ...)
  if pages.listener then pages.listener[what](pages.listener, ...) end
end

local function check_live(self, where, request)
  if not self.live[request] then
    local got = type(request) == "table" and request.pages and "one that was freed or belongs to another allocator"
    fail(where, "request", "a live request", got or type(request))
  end
end

--- The number of requests that hold a page: 0 for a free page, 2 or more for a shared one, math.huge for a reserved
--- one.
---@param page integer
---@return number
function allocator:references(page)
  return self.count[page] or 0
end

--- Creates a request of `length` tokens (0 is allowed).
---@param length integer
---@return nibble.request?
---@return string? message
function allocator:allocate(length)
  length = integer("allocator:allocate", "length", length, 0)
  local request = { pages = {}, length = 0, dropped = 0 }
  self.live[request] = true
  local slots, message = self:append(request, length)
  if slots then return request end
  self.live[request] = nil
  return nil, message
end

--- Allocates `count` more tokens of a request. Returns their slots in order, and the page copies to make before these
--- are written: a shared last page is replaced by a new one (copy on write).
---@param request nibble.request
---@param count integer
---@return integer[]? slots
---@return nibble.page_copy[]|string copies  the message if there are not enough pages
function allocator:append(request, count)
  check_live(self, "allocator:append", request)
  count = integer("allocator:append", "count", count, 0)
  local size, list = self.page_size, request.pages
  local entries = request.length % size
  local shared = count > 0 and entries > 0 and self.count[list[#list]] > 1
  local needed = (request.length + count + size - 1) // size - #list
  if needed + (shared and 1 or 0) > self.num_free then
    return nil, ("not enough pages: %d needed, %d free"):format(needed + (shared and 1 or 0), self.num_free)
  end
  local copies, kept = {}, #list -- kept: pages that were the request's before
  if shared then
    local source = list[#list]
    kept, list[#list] = kept - 1, take(self)
    release(self, source)
    tell("released", self, request, { source })
    copies[1] = { source = source, destination = list[#list], entries = entries }
  end
  for _ = 1, needed do list[#list + 1] = take(self) end
  request.length = request.length + count
  tell("handed", self, request, kept, count)
  return self:slots(request, request.length - count, count), copies
end

--- Creates a request that shares the pages of another's first `length` tokens (default: all). Copies nothing; the first
--- request that appends to a shared page gets a copy of it (see `append`).
---@param request nibble.request
---@param length? integer
---@return nibble.request
function allocator:fork(request, length)
  check_live(self, "allocator:fork", request)
  length = integer("allocator:fork", "length", length or request.length, 0)
  if length > request.length then fail("allocator:fork", "length", "at most " .. request.length, length) end
  local child = { pages = {}, length = length, dropped = request.dropped }
  for j = 1, (length + self.page_size - 1) // self.page_size do
    child.pages[j] = request.pages[j]
    self.count[request.pages[j]] = self.count[request.pages[j]] + 1
  end
  self.live[child] = true
  tell("forked", self, child, request)
  return child
end

--- Releases a request's `count` oldest pages, which must be full, for a sliding attention window. Then `length`,
--- `slots`, `fork` and `batch` count from the oldest token that is left, which has position 0. The position of a token
--- in the text (for RoPE) is `request.dropped + position`.
---@param request nibble.request
---@param count integer
function allocator:drop(request, count)
  check_live(self, "allocator:drop", request)
  count = integer("allocator:drop", "count", count, 0)
  local full = request.length // self.page_size
  if count > full then fail("allocator:drop", "count", ("at most the request's %d full pages"):format(full), count) end
  local list = request.pages
  local gone, left = table.move(list, 1, count, 1, {}), #list - count
  table.move(list, count + 1, #list, 1)
  for j = left + count, left + 1, -1 do list[j] = nil end
  for _, page in ipairs(gone) do release(self, page) end
  request.length = request.length - count * self.page_size
  request.dropped = request.dropped + count * self.page_size
  tell("released", self, request, gone)
end

--- Removes a request's last `count` tokens, such as rejected drafts. Pages without tokens are released. The next
--- `append` returns the other slots again; until they are written they hold the old tokens.
---@param request nibble.request
---@param count integer
function allocator:rewind(request, count)
  check_live(self, "allocator:rewind", request)
  count = integer("allocator:rewind", "count", count, 0)
  if count > request.length then
    fail("allocator:rewind", "count", "at most the request's " .. request.length .. " tokens", count)
  end
  request.length = request.length - count
  local gone = {}
  for j = #request.pages, (request.length + self.page_size - 1) // self.page_size + 1, -1 do
    gone[#gone + 1] = table.remove(request.pages, j)
    release(self, gone[#gone])
  end
  tell("released", self, request, gone)
end

--- Releases a request's pages; those that no other request shares become free. Freeing a request twice is an error.
---@param request nibble.request
function allocator:free(request)
  check_live(self, "allocator:free", request)
  self.live[request] = nil
  for _, page in ipairs(request.pages) do release(self, page) end
  tell("released", self, request, request.pages)
end

-- Tables of rows or slots -> {allocator, the owner of each or of all}. With it checked mode finds the owners of a
-- tensor that is made of such a table.
local carried = setmetatable({}, { __mode = "k" })

--- For checked mode: called when a tensor was made of a table. If the table came from an allocator, remembers the
--- owners of the tensor's slots or rows.
---@param list table
---@param made nibble.tensor
function pages.made(list, made)
  local owner = carried[list]
  if not owner then return end
  local whose = owner[2]
  if owner[3] then
    whose = {}
    for i = 1, #list do whose[i] = owner[3] end
  end
  tell("tensor", owner[1], list, whose, made)
end

--- The slots of `count` tokens from `position` on (default: all tokens).
---@param request nibble.request
---@param position? integer
---@param count? integer
---@return integer[]
function allocator:slots(request, position, count)
  check_live(self, "allocator:slots", request)
  position = integer("allocator:slots", "position", position or 0, 0)
  count = integer("allocator:slots", "count", count or request.length - position, 0)
  if position + count > request.length then
    fail("allocator:slots", "count", "at most " .. request.length - position, count)
  end
  local size, slots = self.page_size, {}
  tell("asked", self, request, position // size + 1, (position + count + size - 1) // size)
  for token = position, position + count - 1 do
    slots[#slots + 1] = request.pages[token // size + 1] * size + token % size
  end
  carried[slots] = { self, nil, request }
  return slots
end

------------------------------------------------------------------------------------------------------ index tensors

---@class nibble.batch
---@field block_tables integer[][]   [batch_size][max_pages], padded with -1
---@field seq_lens integer[]         [batch_size], 0 in padding rows
---@field kv_page_indptr integer[]   [batch_size + 1], prefix sums of the requests' pages; padding rows have none
---@field slot_mapping integer[]     slots of the last `new_tokens` tokens of each request in turn, padded with -1

---@class nibble.batch_options
---@field batch_size? integer  rows, including padding; default: the number of requests
---@field max_pages? integer   columns of block_tables; default: the pages of the longest request
---@field new_tokens? integer  how many last tokens of each request slot_mapping has; default: all
---@field num_slots? integer   length of slot_mapping, including padding; default: no padding

--- The tables that kernels read for a batch of requests. Padding points at no page: slots and pages are -1, lengths are
--- 0.
---@param requests nibble.request[]
---@param opts? nibble.batch_options
---@return nibble.batch
function allocator:batch(requests, opts)
  local where = "allocator:batch"
  opts = known(where, opts or {}, " batch_size max_pages new_tokens num_slots ")
  local longest = 0
  for _, request in ipairs(requests) do
    check_live(self, where, request)
    longest = math.max(longest, #request.pages)
  end
  local batch_size = integer(where, "batch_size", opts.batch_size or #requests, #requests)
  local max_pages = integer(where, "max_pages", opts.max_pages or longest, longest)
  local batch = { block_tables = {}, seq_lens = {}, kv_page_indptr = { 0 }, slot_mapping = {} }
  local whose = {} -- slot_mapping's
  for b = 1, batch_size do
    local request = requests[b] or { pages = {}, length = 0 }
    local row = table.move(request.pages, 1, #request.pages, 1, {})
    for j = #row + 1, max_pages do row[j] = -1 end
    batch.block_tables[b] = row
    batch.seq_lens[b] = request.length
    batch.kv_page_indptr[b + 1] = batch.kv_page_indptr[b] + #request.pages
    if requests[b] then
      tell("asked", self, request, 1, #request.pages)
      local new = integer(where, "new_tokens", opts.new_tokens or request.length, 0)
      if new > request.length then fail(where, "new_tokens", "at most the request's " .. request.length, new) end
      local slots = self:slots(request, request.length - new, new)
      table.move(slots, 1, new, #batch.slot_mapping + 1, batch.slot_mapping)
      for i = #whose + 1, #whose + new do whose[i] = request end
    end
  end
  local used = #batch.slot_mapping
  for i = used + 1, integer(where, "num_slots", opts.num_slots or used, used) do batch.slot_mapping[i] = -1 end
  carried[batch.block_tables] = { self, table.move(requests, 1, #requests, 1, {}) }
  carried[batch.slot_mapping] = { self, whose }
  return batch
end

---@class nibble.plan_options: nibble.batch_options
---@field lengths integer[]           tokens of each request
---@field page_size integer
---@field num_pages? integer          default: as many as the requests need
---@field layout? nibble.page_layout
---@field seed? integer
---@field reserved? integer

--- Allocates requests of the given lengths and returns them as a batch.
---@param opts nibble.plan_options
---@return nibble.batch? batch
---@return nibble.request[]|string requests  the message if there are not enough pages
---@return nibble.allocator? allocator
function pages.plan(opts)
  local where = "pages.plan"
  known(where, opts, " lengths page_size num_pages layout seed reserved batch_size max_pages new_tokens num_slots ")
  if type(opts.lengths) ~= "table" then fail(where, "lengths", "a list of lengths", type(opts.lengths)) end
  local size = integer(where, "page_size", opts.page_size, 1)
  local needed = opts.reserved or 0
  for _, length in ipairs(opts.lengths) do
    needed = needed + (integer(where, "lengths", length, 0) + size - 1) // size
  end
  local owner = pages.allocator {
    num_pages = opts.num_pages or math.max(needed, 1),
    page_size = size, layout = opts.layout, seed = opts.seed, reserved = opts.reserved,
  }
  local requests = {}
  for i, length in ipairs(opts.lengths) do
    local request, message = owner:allocate(length)
    if not request then return nil, message end
    requests[i] = request
  end
  local batch = owner:batch(requests, {
    batch_size = opts.batch_size, max_pages = opts.max_pages, new_tokens = opts.new_tokens, num_slots = opts.num_slots,
  })
  return batch, requests, owner
end

---@class nibble.batch_tensors
---@field block_tables nibble.tensor    int32 [batch_size, max_pages]
---@field seq_lens nibble.tensor        int32 [batch_size]
---@field kv_page_indptr nibble.tensor  int32 [batch_size + 1]
---@field slot_mapping nibble.tensor    int64 [num_slots]

--- The tables of a batch as tensors. The options `block_tables` and `slot_mapping` choose "int32" or "int64".
---@param batch nibble.batch
---@param opts? {device?: string, block_tables?: nibble.dtype, slot_mapping?: nibble.dtype}
---@return nibble.batch_tensors
function pages.tensors(batch, opts)
  local nibble = require "nibble"
  opts = known("pages.tensors", opts or {}, " device block_tables slot_mapping ")
  local function tensor(name, dtype, shape)
    local flat = batch[name]
    if #shape == 2 then
      flat = {}
      for _, row in ipairs(batch[name]) do table.move(row, 1, #row, #flat + 1, flat) end
    end
    -- From bytes, so that a table without rows or columns keeps its shape.
    local format = dtype == "int32" and "<i4" or "<i8"
    local packed = {}
    for i, value in ipairs(flat) do packed[i] = format:pack(value) end
    return nibble.from_bytes(table.concat(packed), shape, { dtype = dtype, device = opts.device })
  end
  local rows, columns = #batch.block_tables, batch.block_tables[1] and #batch.block_tables[1] or 0
  local tensors = {
    block_tables = tensor("block_tables", opts.block_tables or "int32", { rows, columns }),
    seq_lens = tensor("seq_lens", "int32", { #batch.seq_lens }),
    kv_page_indptr = tensor("kv_page_indptr", "int32", { #batch.kv_page_indptr }),
    slot_mapping = tensor("slot_mapping", opts.slot_mapping or "int64", { #batch.slot_mapping }),
  }
  for name, made in pairs(tensors) do pages.made(batch[name], made) end
  return tensors
end

--------------------------------------------------------------------------------------------------------------- pools

---@class nibble.caches
---@field paged_kv_cache nibble.tensor[]  {k, v} uint8, packed E2M1
---@field kv_cache_sf nibble.tensor[]     {k, v} float8_e4m3fn, block scales
---@field storage nibble.tensor[]         their memory, uint8 [num_pages, page stride]: k, v, k_sf, v_sf
---@field kv_layout nibble.layout

---@class nibble.caches_options
---@field num_pages integer
---@field page_size integer
---@field num_kv_heads integer
---@field head_dim integer           a multiple of 16
---@field v_head_dim? integer        default: head_dim
---@field kv_layout? nibble.layout   default "NHD"
---@field page_padding? integer      bytes between two pages of data, which no operation may write; default 0
---@field sf_page_padding? integer   the same for scales
---@field fill? integer              initial value of every byte, including padding; default 0
---@field device? string

--- The pools of one layer's NVFP4 KV cache. NHD: [num_pages, page_size, num_kv_heads, X]; HND: [num_pages,
--- num_kv_heads, page_size, X]; X = head_dim/2 bytes of data, head_dim/16 scales.
---@param opts nibble.caches_options
---@return nibble.caches
function pages.caches(opts)
  local where = "pages.caches"
  known(where, opts,
    " num_pages page_size num_kv_heads head_dim v_head_dim kv_layout page_padding sf_page_padding fill "
    .. "device ")
  local function dimension(parameter, value)
    if integer(where, parameter, value, 16) % 16 ~= 0 then fail(where, parameter, "a multiple of 16", value) end
    return value
  end
  local num_pages, size = integer(where, "num_pages", opts.num_pages, 0), integer(where, "page_size", opts.page_size, 1)
  local heads = integer(where, "num_kv_heads", opts.num_kv_heads, 1)
  local k_dim = dimension("head_dim", opts.head_dim)
  local v_dim = dimension("v_head_dim", opts.v_head_dim or k_dim)
  local padding = integer(where, "page_padding", opts.page_padding or 0, 0)
  local sf_padding = integer(where, "sf_page_padding", opts.sf_page_padding or 0, 0)
  local kv_layout, fill = opts.kv_layout or "NHD", opts.fill or 0
  if kv_layout ~= "NHD" and kv_layout ~= "HND" then fail(where, "kv_layout", '"NHD" or "HND"', kv_layout) end

  local nibble = require "nibble"
  local storages = {}
  local function pool(last, gap, dtype)
    local stride = size * heads * last + gap
    local storage = nibble.full({ num_pages, stride }, fill, { dtype = "uint8", device = opts.device })
    storages[#storages + 1] = storage
    local shape, strides = { num_pages, size, heads, last }, { stride, heads * last, last, 1 }
    if kv_layout == "HND" then shape, strides = { num_pages, heads, size, last }, { stride, size * last, last, 1 } end
    return storage:reinterpret(dtype):as_strided(shape, strides)
  end
  local sf_dtype = "float8_e4m3fn"
  return {
    paged_kv_cache = { pool(k_dim // 2, padding, "uint8"), pool(v_dim // 2, padding, "uint8") },
    kv_cache_sf = { pool(k_dim // 16, sf_padding, sf_dtype), pool(v_dim // 16, sf_padding, sf_dtype) },
    storage = storages, kv_layout = kv_layout,
  }
end

pages.watched = setmetatable({}, { __mode = "k" }) -- allocator -> views of its pools, for a checker that starts later
pages.listener = nil                              -- the checker, called whenever the owner of a page changes

-- The tensors of a pool as tables, like the accesses of observations.
local function views_of(where, pool)
  local views = {}
  local function add(x)
    if type(x) == "table" then
      for _, y in ipairs(x) do add(y) end
    elseif x then
      if type(x) ~= "userdata" then fail(where, "pool", "a pool or tensors", x) end
      local storage, offset = x:storage()
      views[#views + 1] = { storage = storage, offset = offset, dtype = x.dtype, shape = x.shape, stride = x:stride() }
    end
  end
  if type(pool) ~= "table" and type(pool) ~= "userdata" then fail(where, "pool", "a pool or tensors", pool) end
  add(pool)
  if type(pool) == "table" then
    add(pool.paged_kv_cache)
    add(pool.kv_cache_sf)
  end
  for _, view in ipairs(views) do
    view.key = ("%d %d %s %s %s"):format(view.storage, view.offset, view.dtype, table.concat(view.shape, ","),
      table.concat(view.stride, ","))
  end
  return views
end

-- Stops watching views. If `owner` is nil, whoever watches them; if `views` is nil, all views of the owner.
local function forget(owner, views)
  local gone = {}
  for _, view in ipairs(views or pages.watched[owner] or {}) do gone[view.key] = true end
  for other, list in pairs(pages.watched) do
    for i = #list, 1, -1 do
      if (not owner or other == owner) and gone[list[i].key] then tell("unwatch", other, table.remove(list, i)) end
    end
  end
end

--- Tells checked mode (`nibble.check`) that an allocator owns the pages of a pool. It then reports operations on
--- another request's pages, and reads of entries that their owner has not written. Call it before the pool is written.
--- A pool has one allocator: watching it again, with this or another one, ends the earlier watch, and then only pages
--- that the new allocator has already allocated count as written. Without checked mode it has no effect. The pool is
--- not kept alive.
---@param owner nibble.allocator
---@param pool nibble.caches|nibble.tensor|nibble.tensor[]  from `pages.caches`, or tensors with the pages in dimension 1
function pages.watch(owner, pool)
  if getmetatable(owner) ~= allocator then fail("pages.watch", "allocator", "an allocator", owner) end
  local views = views_of("pages.watch", pool)
  forget(nil, views)
  local list = pages.watched[owner] or {}
  pages.watched[owner] = table.move(views, 1, #views, #list + 1, list)
  tell("watch", owner, views)
end

--- Ends `pages.watch`. Does nothing if the pool is not watched.
---@param owner nibble.allocator
---@param pool? nibble.caches|nibble.tensor|nibble.tensor[]  default: all that the allocator watches
function pages.unwatch(owner, pool)
  if getmetatable(owner) ~= allocator then fail("pages.unwatch", "allocator", "an allocator", owner) end
  forget(owner, pool ~= nil and views_of("pages.unwatch", pool) or nil)
end

--- Makes the copies that `allocator:append` returned, of data and scales of K and V. They are queued on the current
--- stream, or captured. Call it before anything else is written to these pages.
---@param caches nibble.caches
---@param copies nibble.page_copy[]
function pages.copy(caches, copies)
  if type(copies) ~= "table" then fail("pages.copy", "copies", "a list of copies", copies) end
  local entry_dim = caches.kv_layout == "HND" and 2 or 1 -- of one page
  for _, copy in ipairs(copies) do
    for _, pair in ipairs { caches.paged_kv_cache, caches.kv_cache_sf } do
      for _, t in ipairs(pair) do
        local from, to = t:select(1, copy.source + 1), t:select(1, copy.destination + 1)
        to:narrow(entry_dim, 1, copy.entries):copy(from:narrow(entry_dim, 1, copy.entries))
      end
    end
  end
end

return pages
