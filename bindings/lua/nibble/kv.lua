--- A scenario's paged KV cache: pages and pools of one or more layers, requests that know their tokens, the tensors
--- that graphs read, and a ledger of every byte.
--
--   local cache = run:cache { num_pages = 32, page_size = 16, num_kv_heads = 2, head_dim = 64, batch = 4, max_len = 96 }
--   local request = cache:admit(20)     -- allocates slots for 20 random tokens
--   cache:flush()                       -- appends their K and V now, without a graph
--   cache:extend(request, 1)            -- allocates the slot of one more token
--   cache:load { request }              -- writes its row, slot, table and length to the tensors that a graph reads
--   run:graph("step", function()        -- captured at the first call, replayed at each call
--     cache:append()
--     cache:dequantize()
--   end)
--
-- A request is one of nibble.pages with a text: text[i] is the token at position i-1, a row of the layers' sources. A
-- request must read back its text, whatever happened to its pages. `append`, `dequantize` and `materialize` also update
-- the ledger (nibble.kv_ledger); in a capture they do so at each replay, with the inputs that are loaded then.

local nibble = require "nibble"
local kv_ledger = require "nibble.kv_ledger"
local numbers = require "nibble.numbers"
local pages = require "nibble.pages"
local reference = require "nibble.reference"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

---@class nibble.kv_options
---@field name? string            default "cache"
---@field num_pages integer       including reserved pages
---@field page_size integer
---@field num_kv_heads integer    this, head_dim, v_head_dim, dtype and tokens must be nil if there is a `source`
---@field head_dim integer        a multiple of 16; of 32 if v_head_dim differs
---@field v_head_dim? integer
---@field dtype? nibble.dtype     "bfloat16" (default) or "float16"
---@field tokens? integer         number of different tokens, with random K and V; default 64
---@field source? table[]         layers {name = string, K, V}: tensors [tokens, heads, dim] on the CPU; default: one random layer
---@field batch integer           rows of block tables and outputs, including padding
---@field max_len integer         most tokens of a request in an output
---@field rows? integer           rows of an append's input, including padding; default: batch
---@field kv_layout? nibble.layout         default "NHD"
---@field page_padding? integer            bytes between pages, default 0
---@field sf_page_padding? integer
---@field page_layout? nibble.page_layout  default "sequential"
---@field reserved? integer       pages that are never allocated; default 1: page 0, which wrong padding would hit
---@field pool? fun(): nibble.caches       creates a layer's pools instead of pages.caches, with any strides and FILL (0xA5)
---                                        in every byte; `stacked` = {paged_kv_cache, kv_cache_sf} are 5-D tensors that
---                                        operations get instead
---@field device? string          default: the run's
---@field nvfp4_4over6? boolean   append with 4over6
---@field materialize? boolean    adds V's interleaved scales and an E4M3 copy (head_dim % 64 == 0, page_size % 4 == 0)

---@class nibble.kv
---@field allocator nibble.allocator
---@field source table[]                layers {name, K, V}, which another cache may share
---@field layers table[]                each with pool, k_scale, v_scale, key, value, out (pair), interleaved, fp8
---@field live nibble.request[]         in the order of admission
---@field slot_mapping nibble.tensor    int64 [rows]; `load` fills it
---@field block_tables nibble.tensor    int32 [batch, max_pages]
---@field seq_lens nibble.tensor        int32 [batch]
---@field kv_page_indptr nibble.tensor  int32 [batch + 1]
local kv = {}
kv.__index = kv
for name, value in pairs(kv_ledger) do kv[name] = value end

local OPTIONS =
  " name num_pages page_size num_kv_heads head_dim v_head_dim dtype tokens source batch max_len rows kv_layout " ..
  "page_padding sf_page_padding page_layout reserved nvfp4_4over6 materialize pool device "

local function fail(parameter, expected, got)
  error(("%s: expected %s, got %s"):format(parameter, expected, numbers.text(got)), 0)
end

------------------------------------------------------------------------------------------------------------ creation

local function random_layer(run, opts)
  local layer = { name = "layer 0" }
  for i, dim in ipairs { opts.head_dim, opts.v_head_dim or opts.head_dim } do
    local rows = nibble.randn({ opts.tokens or 64, opts.num_kv_heads, dim },
      { dtype = opts.dtype or "bfloat16", seed = run:next_seed(), device = "cpu" })
    -- Tokens have 18 magnitudes, so that their block scales cover all of E4M3, including subnormal numbers and 0.
    for token = 1, rows.shape[1] do
      local values = rows[token]:view(-1):totable()
      for k, value in ipairs(values) do values[k] = value * 2.0 ^ -((token - 1) % 18) end
      rows[token]:view(-1):copy(nibble.tensor(values, { dtype = rows.dtype, device = "cpu" }))
    end
    layer[i] = rows
  end
  return layer
end

local function make_layer(self, opts, source)
  local layer = { name = source.name, out = {}, scales = {}, bytes = {}, dirty = {} }
  layer.pool = opts.pool and opts.pool() or pages.caches {
    num_pages = opts.num_pages, page_size = opts.page_size, num_kv_heads = self.heads, head_dim = self.dims[1],
    v_head_dim = self.dims[2], kv_layout = self.kv_layout, page_padding = opts.page_padding, fill = kv_ledger.FILL,
    sf_page_padding = opts.sf_page_padding, device = self.device,
  }
  layer.strides = {} -- bytes between pages
  for i, storage in ipairs(layer.pool.storage) do layer.strides[i] = storage.shape[2] end
  local function zeros(dtype, ...) return nibble.zeros({ ... }, { dtype = dtype, device = self.device }) end
  for i = 1, 2 do
    layer[i == 1 and "key" or "value"] = zeros(self.dtype, self.rows, self.heads, self.dims[i])
    layer.out[i] = nibble.full({ self.batch, self.max_len, self.heads, self.dims[i] }, -1,
      { dtype = self.dtype, device = self.device })
    layer.bytes[i] = source[i]:bytes()
    -- The global scale maps the largest input to 448, the largest E4M3 number, so that the E4M3 copy does not saturate.
    -- A graph reads it from the device; the eager run passes a number. Both must give the same.
    local amax = source[i]:amax()
    local g = reference.f32((amax > 0 and amax or 1) / 448)
    layer.scales[i] = g
    layer[i == 1 and "k_scale" or "v_scale"] = nibble.full({ 1 }, g, { dtype = "float32", device = self.device })
  end
  if self.with_copy then
    layer.interleaved = layer.pool.kv_cache_sf[2]:clone()
    layer.fp8 = nibble.full({ self.batch * self.max_pages + 1, 2, self.heads, self.page_size, self.dims[1] }, -1,
      { dtype = "float8_e4m3fn", device = self.device })
  end
  return layer
end

--- Creates a cache; called by `run:cache`.
---@param run nibble.run
---@param opts nibble.kv_options
---@return nibble.kv
function kv.new(run, opts)
  for name in pairs(opts) do
    if not OPTIONS:find(" " .. tostring(name) .. " ", 1, true) then
      fail("run:cache: " .. tostring(name), "one of" .. OPTIONS:sub(1, -2), "an unknown option")
    end
  end
  for name in ("num_pages page_size batch max_len" .. (opts.source and "" or " num_kv_heads head_dim")):gmatch("%S+") do
    local value = opts[name]
    if math.type(value) ~= "integer" or value < 1 then fail("run:cache: " .. name, "an integer >= 1", value) end
  end
  local source = opts.source or { random_layer(run, opts) }
  local k, v = source[1][1], source[1][2]
  local self = setmetatable({
    run = run, device = opts.device or run.device, source = source, name = opts.name or "cache",
    heads = k.shape[2], dims = { k.shape[3], v.shape[3] }, dtype = k.dtype, tokens = k.shape[1],
    kv_layout = opts.kv_layout or "NHD", reserved = opts.reserved or 1, page_size = opts.page_size,
      num_pages = opts.num_pages,
    batch = opts.batch, max_len = opts.max_len, rows = opts.rows or opts.batch, with_copy = opts.materialize or false,
    four_over_six = opts.nvfp4_4over6 or false,
    live = {}, layers = {}, count = 0,
    pending = {},    -- {slot, token} that wait for `load` or `flush`
    loaded = { requests = {}, tokens = {}, slots = {} }, -- what the static tensors hold
    slot_token = {}, -- the token in each slot that was written
    used = {},       -- tokens that were appended
  }, kv)
  self.max_pages = (self.max_len + self.page_size - 1) // self.page_size
  self.allocator = pages.allocator {
    num_pages = opts.num_pages, page_size = opts.page_size, layout = opts.page_layout, seed = run:next_seed(),
    reserved = self.reserved,
  }
  local function zeros(dtype, ...) return nibble.zeros({ ... }, { dtype = dtype, device = self.device }) end
  self.slot_mapping, self.seq_lens = zeros("int64", self.rows), zeros("int32", self.batch)
  self.block_tables, self.kv_page_indptr = zeros("int32", self.batch, self.max_pages), zeros("int32", self.batch + 1)
  for l, layer in ipairs(source) do self.layers[l] = make_layer(self, opts, layer) end
  for l, layer in ipairs(self.layers) do
    self:watch(run, layer, source[l])
    pages.watch(self.allocator, layer.pool)
  end
  return self
end

------------------------------------------------------------------------------------------------------------ requests

-- The tokens of `what`: a list of tokens, or a number of random ones.
local function text_of(self, where, what)
  local text = type(what) == "table" and what or {}
  if text ~= what then
    if math.type(what) ~= "integer" or what < 0 then
      fail(where .. ": what", "a number of tokens or a list of tokens", what)
    end
    for i = 1, what do text[i] = self.run.random(self.tokens) end
  end
  for _, token in ipairs(text) do
    if math.type(token) ~= "integer" or token < 0 or token >= self.tokens then
      fail(where .. ": what", ("tokens 0..%d (rows of the source)"):format(self.tokens - 1), token)
    end
  end
  return text
end

local function queue(self, request, slots, text)
  for i, slot in ipairs(slots) do
    request.text[#request.text + 1] = text[i]
    self.pending[#self.pending + 1] = { slot = slot, token = text[i] }
  end
end

local function born(self, request)
  self.count = self.count + 1
  request.id, request.text = self.count, {}
  self.live[#self.live + 1] = request
  return request
end

--- Creates a request with a text: a list of tokens, or a number of random ones. They wait for `load` or `flush`.
--- Returns `nil, message` if there are not enough pages.
---@param what integer|integer[]
---@param opts? {queue?: boolean}  false: the tokens are not appended but reach their slots in another way (see `placed`)
---@return nibble.request?
---@return string? message
function kv:admit(what, opts)
  local text = text_of(self, "cache:admit", what)
  local request, message = self.allocator:allocate(#text)
  if not request then return nil, message end
  born(self, request)
  if opts and opts.queue == false then
    request.text = table.move(text, 1, #text, 1, {})
  else
    queue(self, request, self.allocator:slots(request), text)
  end
  return request
end

--- Adds tokens to a request. A shared last page is copied first, on the current stream. Returns `false, message` if
--- there are not enough pages.
---@param request nibble.request
---@param what integer|integer[]
---@return boolean
---@return string? message
function kv:extend(request, what)
  local text = text_of(self, "cache:extend", what)
  local slots, copies = self.allocator:append(request, #text)
  if not slots then return false, copies end
  for _, copy in ipairs(copies) do self:copy_page(copy) end
  queue(self, request, slots, text)
  return true
end

--- Copies the first entries of a page in every layer, as `allocator:append` requests.
---@param copy nibble.page_copy
function kv:copy_page(copy)
  local first, last = copy.source * self.page_size, copy.source * self.page_size + copy.entries - 1
  for _, write in ipairs(self.pending) do
    if write.slot >= first and write.slot <= last then
      fail("cache:copy_page: source", "a written page", "one whose tokens wait for load or flush")
    end
  end
  local moved = 0
  for i = 1, 2 do
    moved = moved + 2 * copy.entries * self.heads * (self.dims[i] // 2 + self.dims[i] // 16) * #self.layers
  end
  self.run:timed("page copies", function()
    for _, layer in ipairs(self.layers) do pages.copy(layer.pool, { copy }) end
  end)
  self.run:effect({ op = "copy page", cache = self.name, bytes = moved }, function()
    for entry = 0, copy.entries - 1 do
      self:place(copy.destination * self.page_size + entry, self.slot_token[copy.source * self.page_size + entry])
    end
  end)
end

--- Creates a request that shares the first `length` tokens of another (default: all) and their pages.
---@param request nibble.request
---@param length? integer
---@return nibble.request
function kv:fork(request, length)
  local child = born(self, self.allocator:fork(request, length))
  child.text = table.move(request.text, 1, child.length, 1, {})
  return child
end

--- Removes a request's last `count` tokens; their slots are used again.
---@param request nibble.request
---@param count integer
function kv:rewind(request, count)
  self.allocator:rewind(request, count)
  for i = #request.text, request.length + 1, -1 do request.text[i] = nil end
end

--- Releases a request's `count` oldest pages.
---@param request nibble.request
---@param count integer
function kv:drop(request, count)
  self.allocator:drop(request, count)
  request.text = table.move(request.text, count * self.page_size + 1, #request.text, 1, {})
end

--- Releases a request's pages.
---@param request nibble.request
function kv:free(request)
  self.allocator:free(request)
  for i, other in ipairs(self.live) do
    if other == request then table.remove(self.live, i) break end
  end
end

--- Enters in the ledger that a request's tokens are in their slots, for example after a copy from another cache.
---@param request nibble.request
function kv:placed(request)
  self.run:effect({ op = "place", cache = self.name, bytes = 0 }, function()
    for i, slot in ipairs(self.allocator:slots(request)) do self:place(slot, request.text[i]) end
  end)
end

--------------------------------------------------------------------------------------------------------------- inputs

-- Rows of K or V for some tokens. Padding rows are NaN, so that a write of them is noticed.
local function rows_tensor(self, layer, i, tokens, size, device)
  local row_size = self.heads * self.dims[i] * 2
  local padding, rows = ("\xFF\x7F"):rep(self.heads * self.dims[i]), {}
  for r = 1, size do
    rows[r] = tokens[r] and layer.bytes[i]:sub(tokens[r] * row_size + 1, (tokens[r] + 1) * row_size) or padding
  end
  return nibble.from_bytes(table.concat(rows), { size, self.heads, self.dims[i] },
    { dtype = self.dtype, device = device })
end

local function take_pending(self)
  local slots, tokens = {}, {}
  for i, write in ipairs(self.pending) do slots[i], tokens[i] = write.slot, write.token end
  self.pending = {}
  return slots, tokens
end

--- Fills the tensors that graphs read, with the waiting tokens and their slots, and the tables and lengths of
--- `requests` (default: all live ones). The rest is padding: slots and pages are -1, lengths are 0.
---@param requests? nibble.request[]
function kv:load(requests)
  requests = requests or self.live
  if #self.pending > self.rows then
    fail("cache:load: rows", ("at least the %d waiting tokens (flush appends them without a graph)"):format(
      #self.pending), self.rows)
  end
  if #requests > self.batch then
    fail("cache:load: batch", ("at least the %d requests"):format(#requests), self.batch)
  end
  for _, request in ipairs(requests) do
    if #request.pages > self.max_pages then
      fail("cache:load: max_len", ("at least the %d tokens of request %d"):format(request.length, request.id),
        self.max_len)
    end
  end
  -- The waiting tokens come first; the rest of the slots is padding and must point nowhere.
  local batch = self.allocator:batch(requests,
    { batch_size = self.batch, max_pages = self.max_pages, new_tokens = 0, num_slots = self.rows })
  for b, row in ipairs(batch.block_tables) do
    for j = requests[b] and #requests[b].pages + 1 or 1, self.max_pages do
      self.run:expect(row[j] < 0, "block_tables: row %d, column %d: padding points at page %d", b - 1, j - 1, row[j])
    end
  end
  local slots, tokens = take_pending(self)
  table.move(slots, 1, #slots, 1, batch.slot_mapping)
  local host, moved, rows = pages.tensors(batch, { device = "cpu" }), 0, {}
  for l, layer in ipairs(self.layers) do
    rows[l] = { rows_tensor(self, layer, 1, tokens, self.rows, "cpu"),
      rows_tensor(self, layer, 2, tokens, self.rows, "cpu") }
    moved = moved + 2 * self.rows * self.heads * (self.dims[1] + self.dims[2]) * 2
  end
  self.run:timed("new inputs into the static tensors", function()
    for name, tensor in pairs(host) do self[name]:copy(tensor) end
    for l, layer in ipairs(self.layers) do
      layer.key:copy(rows[l][1])
      layer.value:copy(rows[l][2])
    end
  end, moved)
  self.loaded = { requests = {}, slots = slots, tokens = tokens, kv_page_indptr = batch.kv_page_indptr }
  for b, request in ipairs(requests) do
    self.loaded.requests[b] = {
      id = request.id, length = request.length, pages = table.move(request.pages, 1, #request.pages, 1, {}),
      text = table.move(request.text, 1, #request.text, 1, {}),
    }
  end
end

------------------------------------------------------------------------------------------------------------------ work

-- The bytes of `count` tokens in all layers: as values, and in the cache.
local function token_bytes(self, count)
  local dims = self.dims[1] + self.dims[2]
  local tokens = count * self.heads * #self.layers
  return tokens * dims * 2, tokens * (dims // 2 + dims // 16)
end

-- Appends K and V. If their head dimensions differ, this takes two appends: each gets the halves of K's rows, or of
-- V's, as its K and V.
local function append_rows(self, layer, k, v, slots)
  local data, sf, g = layer.pool.paged_kv_cache, layer.pool.kv_cache_sf, { layer.k_scale, layer.v_scale }
  if self.run.eager then g = layer.scales end
  if self.dims[1] == self.dims[2] then
    local given = layer.pool.stacked or layer.pool
    append(k, v, slots, given.paged_kv_cache, given.kv_cache_sf, g[1], g[2], self.kv_layout, self.four_over_six)
    return
  end
  for i, rows in ipairs { k, v } do
    local function halves(t)
      local half = t.shape[t:dim()] // 2
      return { t:narrow(t:dim(), 1, half), t:narrow(t:dim(), half + 1, half) }
    end
    local parts = halves(rows)
    append(parts[1], parts[2], slots, halves(data[i]), halves(sf[i]), g[i], g[i], self.kv_layout, self.four_over_six)
  end
end

--- Writes the global scales to the tensors that graphs read; with `hidden`, wrong ones. A graph must use the scale at
--- its replay, not the one during the capture.
---@param hidden boolean
function kv:hide_scales(hidden)
  for _, layer in ipairs(self.layers) do
    layer.k_scale:fill(hidden and 3 * layer.scales[1] or layer.scales[1])
    layer.v_scale:fill(hidden and 5 * layer.scales[2] or layer.scales[2])
  end
end

--- Queues the append of the first `rows` rows of the loaded inputs (default: all).
---@param rows? integer
function kv:append(rows)
  rows = rows or self.rows
  for _, layer in ipairs(self.layers) do
    append_rows(self, layer, layer.key:narrow(1, 1, rows), layer.value:narrow(1, 1, rows),
      self.slot_mapping:narrow(1, 1, rows))
  end
  self.run:effect({ op = "append", cache = self.name, bytes = function()
    local values, packed = token_bytes(self, math.min(rows, #self.loaded.slots))
    return values + packed
  end }, function()
    for i = 1, math.min(rows, #self.loaded.slots) do self:place(self.loaded.slots[i], self.loaded.tokens[i]) end
  end)
end

--- Appends the waiting tokens now, without the tensors that graphs read: a prefill.
function kv:flush()
  if #self.pending == 0 then return end
  local slots, tokens = take_pending(self)
  local mapping = table.move(slots, 1, #slots, 1, {})
  local size = (#tokens + 15) // 16 * 16
  for i = #slots + 1, size do mapping[i] = -1 end
  local slot_tensor = nibble.tensor(mapping, { dtype = "int32", device = self.device })
  local values, packed = token_bytes(self, #tokens)
  for l, layer in ipairs(self.layers) do
    local k, v = rows_tensor(self, layer, 1, tokens, size, self.device),
      rows_tensor(self, layer, 2, tokens, size, self.device)
    self.run:timed("prefill (append)", function() append_rows(self, layer, k, v, slot_tensor) end,
      l == 1 and values + packed or 0)
  end
  self.run:effect({ op = "append", cache = self.name, bytes = values + packed }, function()
    for i, slot in ipairs(slots) do self:place(slot, tokens[i]) end
  end)
end

--- Queues a dequantize of the first `rows` loaded requests (default: the whole batch) to `layers[l].out`.
---@param rows? integer
function kv:dequantize(rows)
  rows = rows or self.batch
  local function first(t) return t:narrow(1, 1, rows) end
  for _, layer in ipairs(self.layers) do
    local given = layer.pool.stacked or layer.pool
    nibble.quantization.nvfp4_kv_dequantize_paged(given.paged_kv_cache, given.kv_cache_sf, first(self.block_tables),
      first(self.seq_lens), layer.k_scale, layer.v_scale, first(layer.out[1]), first(layer.out[2]), self.kv_layout)
  end
  self.run:effect({ op = "dequantize", cache = self.name, bytes = function()
    local tokens = 0
    for b = 1, math.min(rows, #self.loaded.requests) do tokens = tokens + #self.loaded.requests[b].text end
    local values, packed = token_bytes(self, tokens)
    return values + packed
  end }, function() self:expect_values(rows) end)
end

--- Queues the swizzle of V's scales and a materialize of the first `rows` loaded requests. For caches with
--- `materialize`.
---@param rows? integer
function kv:materialize(rows)
  rows = rows or self.batch
  local function first(t, n) return t:narrow(1, 1, n or rows) end
  local made = {}
  for l, layer in ipairs(self.layers) do
    local data, sf = layer.pool.paged_kv_cache, layer.pool.kv_cache_sf
    nibble.quantization.swizzle_v_scales(sf[2], self.kv_layout, { out = layer.interleaved })
    local _, tables = nibble.quantization.nvfp4_kv_materialize_fp8(self:hnd(data[1]), self:hnd(data[2]),
      self:hnd(sf[1]),
      self:hnd(layer.interleaved), first(self.block_tables), first(self.seq_lens), self.max_len,
      { out = layer.fp8, kv_page_indptr = first(self.kv_page_indptr, rows + 1),
        num_pages = self.batch * self.max_pages })
    made[l] = tables
  end
  self.run:effect({ op = "materialize", cache = self.name, bytes = function()
    local used = 0
    for b = 1, math.min(rows, #self.loaded.requests) do used = used + #self.loaded.requests[b].pages end
    local plane = self.page_size * self.heads * #self.layers
    local _, packed = token_bytes(self, used * self.page_size)
    return 2 * self.num_pages * plane * (self.dims[1] // 16) + packed + 2 * (used + 1) * plane * self.dims[1]
  end }, function()
    self.copied, self.copied_tables = rows, made
    for _, layer in ipairs(self.layers) do self:expect_copy(layer, rows) end
  end)
end

return kv
