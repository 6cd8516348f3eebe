--- A scenario's paged KV cache: pages and pools of one or more layers, requests that know their text, the tensors that
--- graphs read, and a ledger of every byte.
--
--   local cache = run:cache { num_pages = 32, page_size = 16, num_kv_heads = 2, head_dim = 64, batch = 4, max_len = 96
--   }
--   local request = cache:admit(20)     -- 20 tokens of text have got their slots
--   cache:flush()                       -- their K and V are appended now, without a graph
--   cache:extend(request, 1)            -- one more token
--   cache:load { request }              -- its row, slot, table and length go into the tensors that a graph reads
--   run:graph("step", function()        -- captured at the first call, replayed at each
--     cache:append()
--     cache:dequantize()
--   end)
--
-- A request is one of nibble.pages with a text: text[i] is the token at position i-1, a row of the layers' sources.
-- What a request reads back must be its text, whatever its pages went through. `append`, `dequantize` and `materialize`
-- also keep the ledger; in a capture they do that at each replay, with the inputs that are loaded then.

local nibble = require "nibble"
local ledger = require "nibble.ledger"
local numbers = require "nibble.numbers"
local pages = require "nibble.pages"
local reference = require "nibble.reference"

local places = ledger.places
local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local FILL = 0xA5 -- every byte of a pool that nothing has written, so that a byte too many shows

---@class nibble.kv_options
---@field name? string            default "cache"
---@field num_pages integer       the reserved ones among them
---@field page_size integer
---@field num_kv_heads integer    not with `source`, nor are head_dim, v_head_dim, dtype and tokens
---@field head_dim integer        a multiple of 16; of 32 where v_head_dim differs
---@field v_head_dim? integer
---@field dtype? nibble.dtype     "bfloat16" (default) or "float16"
---@field tokens? integer         how many different tokens there are, with random K and V; default 64
---@field source? table[]         layers {name = string, K, V}: tensors [tokens, heads, dim] on the CPU; default: one random layer
---@field batch integer           rows of block tables and outputs, padding included
---@field max_len integer         most tokens of a request in an output
---@field rows? integer           rows of the input of an append, padding included; default: batch
---@field kv_layout? nibble.layout         default "NHD"
---@field page_padding? integer            bytes between pages, default 0
---@field sf_page_padding? integer
---@field page_layout? nibble.page_layout  default "sequential"
---@field reserved? integer       pages never handed out, default 1: page 0, where stray padding would land
---@field pool? fun(): nibble.caches       makes a layer's pools otherwise than pages.caches does, any strides, each byte FILL (0xA5);
---                                        with `stacked` = {paged_kv_cache, kv_cache_sf}, operations get these 5-D
---                                        tensors
---@field device? string          default: the run's
---@field materialize? boolean    also V's interleaved scales and an E4M3 copy (head_dim % 64 == 0, page_size % 4 == 0)

---@class nibble.kv
---@field allocator nibble.allocator
---@field source table[]                layers {name, K, V}, which another cache may share
---@field layers table[]                each with pool, k_scale, v_scale, key, value, out (pair), interleaved, fp8
---@field live nibble.request[]         in the order of their coming
---@field slot_mapping nibble.tensor    int64 [rows]; what `load` fills
---@field block_tables nibble.tensor    int32 [batch, max_pages]
---@field seq_lens nibble.tensor        int32 [batch]
---@field kv_page_indptr nibble.tensor  int32 [batch + 1]
local kv = {}
kv.__index = kv

local OPTIONS =
  " name num_pages page_size num_kv_heads head_dim v_head_dim dtype tokens source batch max_len rows kv_layout " ..
  "page_padding sf_page_padding page_layout reserved materialize pool device "

local function fail(parameter, expected, got)
  error(("%s: expected %s, got %s"):format(parameter, expected, numbers.text(got)), 0)
end

---------------------------------------------------------------------------------------------------------------- made

local function random_layer(run, opts)
  local layer = { name = "layer 0" }
  for i, dim in ipairs { opts.head_dim, opts.v_head_dim or opts.head_dim } do
    local rows = nibble.randn({ opts.tokens or 64, opts.num_kv_heads, dim },
      { dtype = opts.dtype or "bfloat16", seed = run:next_seed(), device = "cpu" })
    -- Tokens of 18 magnitudes: their block scales are E4M3 numbers of all sizes, subnormal ones and 0 among them.
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
    v_head_dim = self.dims[2], kv_layout = self.kv_layout, page_padding = opts.page_padding, fill = FILL,
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
    -- The global scale that puts the largest input on 448, the largest E4M3 number: the copy in E4M3 does not saturate.
    -- A graph reads it from the device, an eager run gets a number: both must come to the same.
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

-- Every tensor of a layer that a run must leave as the ledger says; with images in the run that keeps one.
local function watch(self, run, layer, source)
  local prefix = (self.name ~= "cache" and self.name .. " " or "") .. (#self.layers > 1 and layer.name .. " " or "")
  local images = { data = {}, sf = {}, out = {}, rows = {} }
  local storage = layer.pool.storage -- k, v, k_sf, v_sf
  for i, name in ipairs { "K", "V" } do
    local dim = self.dims[i]
    images.data[i] = run:watch(prefix .. name .. " cache", storage[i], places.data(self, layer.strides[i], dim))
    images.sf[i] = run:watch(prefix .. name .. " scales", storage[i + 2], places.sf(self, layer.strides[i + 2], dim))
    images.out[i] = run:watch(prefix .. name .. " dequantized", layer.out[i], places.out(self, dim))
  end
  if self.with_copy then
    images.interleaved = run:watch(prefix .. "V scales interleaved", layer.interleaved,
      places.interleaved(self, self.dims[1]))
    images.fp8 = run:watch(prefix .. "E4M3 copy", layer.fp8, places.fp8(self, self.dims[1]))
  end
  if run.eager then return end
  for i = 1, 2 do images.rows[i] = ledger.rows(source[i], layer.scales[i], self.with_copy) end
  if self.with_copy then
    images.filled, images.copies = ledger.filled_vector(FILL, self.dims[1]), {}
  end
  layer.images = images
end

--- Made by `run:cache`.
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
    watch(self, run, layer, source[l])
    pages.watch(self.allocator, layer.pool)
  end
  return self
end

------------------------------------------------------------------------------------------------------------ requests

-- The tokens that `what` stands for: a text, or a number of random ones.
local function text_of(self, where, what)
  local text = type(what) == "table" and what or {}
  if text ~= what then
    if math.type(what) ~= "integer" or what < 0 then
      fail(where .. ": what", "a number of tokens or a text (a list of them)", what)
    end
    for i = 1, what do text[i] = self.run.random(self.tokens) end
  end
  for _, token in ipairs(text) do
    if math.type(token) ~= "integer" or token < 0 or token >= self.tokens then
      fail(where .. ": what", ("tokens 0..%d, rows of the source"):format(self.tokens - 1), token)
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

--- A new request with a text: a list of tokens, or how many random ones. They wait for `load` or `flush`. `nil,
--- message` when there are not enough pages.
---@param what integer|integer[]
---@param opts? {queue?: boolean}  false: the tokens get into their slots by other means than an append (see `placed`)
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

--- More tokens at a request's end. A page that it shares is copied before, on the current stream. `false, message` when
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

--- Copies a page's first entries, as `allocator:append` asks for, in every layer.
---@param copy nibble.page_copy
function kv:copy_page(copy)
  local first, last = copy.source * self.page_size, copy.source * self.page_size + copy.entries - 1
  for _, write in ipairs(self.pending) do
    if write.slot >= first and write.slot <= last then
      fail("cache:copy_page: source", "a page that was written", "one whose tokens wait for load or flush")
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

--- A request with the first `length` tokens of another (default: all), on the same pages.
---@param request nibble.request
---@param length? integer
---@return nibble.request
function kv:fork(request, length)
  local child = born(self, self.allocator:fork(request, length))
  child.text = table.move(request.text, 1, child.length, 1, {})
  return child
end

--- Takes a request's last `count` tokens back; their slots are used again.
---@param request nibble.request
---@param count integer
function kv:rewind(request, count)
  self.allocator:rewind(request, count)
  for i = #request.text, request.length + 1, -1 do request.text[i] = nil end
end

--- Gives a request's `count` oldest pages back.
---@param request nibble.request
---@param count integer
function kv:drop(request, count)
  self.allocator:drop(request, count)
  request.text = table.move(request.text, count * self.page_size + 1, #request.text, 1, {})
end

--- Gives a request's pages back.
---@param request nibble.request
function kv:free(request)
  self.allocator:free(request)
  for i, other in ipairs(self.live) do
    if other == request then table.remove(self.live, i) break end
  end
end

--- A request's tokens have got into their slots by other means than an append: a copy from another cache.
---@param request nibble.request
function kv:placed(request)
  self.run:effect({ op = "place", cache = self.name, bytes = 0 }, function()
    for i, slot in ipairs(self.allocator:slots(request)) do self:place(slot, request.text[i]) end
  end)
end

--------------------------------------------------------------------------------------------------------------- inputs

-- Rows of K or V for some tokens; those of padding are NaN, so that they cannot go anywhere unnoticed.
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

--- Fills the tensors that graphs read: the tokens that wait, with their slots, and the tables and lengths of `requests`
--- (default: all that live). What is left over is padding: slots and pages -1, lengths 0.
---@param requests? nibble.request[]
function kv:load(requests)
  requests = requests or self.live
  if #self.pending > self.rows then
    fail("cache:load: rows", ("at least the %d tokens that wait (flush appends them without a graph)"):format(
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
  -- The batch's own padding, which must point nowhere; what waits takes its first slots.
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

-------------------------------------------------------------------------------------------------------- what is queued

-- Bytes that `count` tokens of all layers have: as values, and in the cache.
local function token_bytes(self, count)
  local dims = self.dims[1] + self.dims[2]
  local tokens = count * self.heads * #self.layers
  return tokens * dims * 2, tokens * (dims // 2 + dims // 16)
end

-- One append of K and V; two where their head dimensions differ: the halves of K's rows as K and V of one, those of V's
-- of the other.
local function append_rows(self, layer, k, v, slots)
  local data, sf, g = layer.pool.paged_kv_cache, layer.pool.kv_cache_sf, { layer.k_scale, layer.v_scale }
  if self.run.eager then g = layer.scales end
  if self.dims[1] == self.dims[2] then
    local given = layer.pool.stacked or layer.pool
    append(k, v, slots, given.paged_kv_cache, given.kv_cache_sf, g[1], g[2], self.kv_layout)
    return
  end
  for i, rows in ipairs { k, v } do
    local function halves(t)
      local half = t.shape[t:dim()] // 2
      return { t:narrow(t:dim(), 1, half), t:narrow(t:dim(), half + 1, half) }
    end
    local parts = halves(rows)
    append(parts[1], parts[2], slots, halves(data[i]), halves(sf[i]), g[i], g[i], self.kv_layout)
  end
end

--- The global scales as graphs read them: the layers' own, or `hidden` behind others that are wrong. What a graph does
--- with a scale it has to do at its replay, whatever was there while it was captured.
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

--- Appends the tokens that wait, now and not from the static tensors: a prefill.
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

--- Queues the dequantization of the first `rows` loaded requests (default: the whole batch) into `layers[l].out`.
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
  end }, function()
    self.read = rows
    for _, layer in ipairs(self.layers) do
      for i = 1, 2 do
        local image, row_size = layer.images.out[i], self.max_len * self.heads * self.dims[i] * 2
        image:settle()
        for b = 1, math.min(rows, #self.loaded.requests) do
          local parts = {}
          for position, token in ipairs(self.loaded.requests[b].text) do
            if position > self.max_len then break end
            parts[position] = layer.images.rows[i][token].out
          end
          image:put((b - 1) * row_size, table.concat(parts))
        end
      end
    end
  end)
end

local function hnd(self, t) return self.kv_layout == "HND" and t or t:permute(1, 3, 2, 4) end

--- Queues V's interleaved scales and the E4M3 copy of the first `rows` loaded requests, for caches with `materialize`.
---@param rows? integer
function kv:materialize(rows)
  rows = rows or self.batch
  local function first(t, n) return t:narrow(1, 1, n or rows) end
  local made = {}
  for l, layer in ipairs(self.layers) do
    local data, sf = layer.pool.paged_kv_cache, layer.pool.kv_cache_sf
    nibble.quantization.swizzle_v_scales(sf[2], self.kv_layout, { out = layer.interleaved })
    local _, tables = nibble.quantization.nvfp4_kv_materialize_fp8(hnd(self, data[1]), hnd(self, data[2]),
      hnd(self, sf[1]),
      hnd(self, layer.interleaved), first(self.block_tables), first(self.seq_lens), self.max_len,
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

-------------------------------------------------------------------------------------------------------------- ledger

--- The ledger's entry for a write: a token (nil: bytes that nothing has written) gets into a slot of every layer.
---@param slot integer
---@param token? integer
function kv:place(slot, token)
  local page, entry = slot // self.page_size, slot % self.page_size
  self.slot_token[slot] = token
  if token then self.used[token] = true end
  self.read, self.copied = nil, nil
  for _, layer in ipairs(self.layers) do
    local images = layer.images
    for i = 1, 2 do
      local row = token and images.rows[i][token]
      local half, blocks = self.dims[i] // 2, self.dims[i] // 16
      local data, sf = images.data[i], images.sf[i]
      for head = 0, self.heads - 1 do
        local vector = places.vector_at(self, entry, head)
        data:put(page * layer.strides[i] + vector * half, row and row.data[head] or string.char(FILL):rep(half))
        sf:put(page * layer.strides[i + 2] + vector * blocks, row and row.sf[head] or string.char(FILL):rep(blocks))
      end
    end
    if images.copies then images.copies[page] = nil end
    layer.dirty[page] = true
  end
end

-- The planes of K and V in E4M3 that a page gives.
local function page_copy(self, images, page)
  local parts = {}
  for i = 1, 2 do
    for head = 0, self.heads - 1 do
      for entry = 0, self.page_size - 1 do
        local token = self.slot_token[page * self.page_size + entry]
        parts[#parts + 1] = token and images.rows[i][token].fp8[head] or images.filled
      end
    end
  end
  return table.concat(parts)
end

--- The ledger's entry for `materialize`.
---@param layer table
---@param rows integer
function kv:expect_copy(layer, rows)
  local images, blocks = layer.images, self.dims[1] // 16
  local size, plane = self.page_size * self.heads * blocks, self.page_size * self.heads * self.dims[1]
  local shape = self.kv_layout == "HND" and { 1, self.heads, self.page_size, blocks }
    or { 1, self.page_size, self.heads, blocks }
  local linear = images.sf[2]:settle()
  images.interleaved:settle()
  images.fp8:settle()
  for page in pairs(layer.dirty) do
    local at = page * layer.strides[4]
    local sf = { dtype = "uint8", shape = shape, bytes = linear:sub(at + 1, at + size) }
    images.interleaved:put(page * size, reference.swizzle({ v_sf = sf, kv_layout = self.kv_layout }).bytes)
  end
  layer.dirty = {}
  images.fp8:put(0, ("\0"):rep(2 * plane))
  for b = 1, math.min(rows, #self.loaded.requests) do
    for j, page in ipairs(self.loaded.requests[b].pages) do
      images.copies[page] = images.copies[page] or page_copy(self, images, page)
      images.fp8:put((self.loaded.kv_page_indptr[b] + j) * 2 * plane, images.copies[page])
    end
  end
end

--- What the step just done must have left beside the watched tensors: the E4M3 copy's own block tables.
---@return string? difference
function kv:check_tables()
  if not self.copied then return end
  for l, layer in ipairs(self.layers) do
    for b, row in ipairs(self.copied_tables[l]:totable()) do
      local request = self.loaded.requests[b]
      for j, page in ipairs(row) do
        local want = request and request.pages[j] and self.loaded.kv_page_indptr[b] + j or 0
        if page ~= want then
          return ("%s fp8_block_tables: row %d, column %d: got %d, expected %d"):format(layer.name, b - 1, j - 1, page,
            want)
        end
      end
    end
  end
end

--- Once more at the end, where the last thing that happened to the cache was to be read: whole operations by the
--- reference, on what the caches, tables and lengths hold on the device.
---@return string? difference
function kv:check_whole()
  for _, layer in ipairs(self.layers) do
    local data, sf = layer.pool.paged_kv_cache, layer.pool.kv_cache_sf
    local function first(t, n) return t:narrow(1, 1, n) end
    if self.read then
      local out = { first(layer.out[1], self.read), first(layer.out[2], self.read) }
      local values = reference.dequantize {
        paged_kv_cache = data, kv_cache_sf = sf, kv_layout = self.kv_layout, k_scale = layer.k_scale,
          v_scale = layer.v_scale,
        block_tables = first(self.block_tables, self.read), seq_lens = first(self.seq_lens, self.read),
        output_k = out[1], output_v = out[2],
      }
      if values.output_k.bytes ~= out[1]:bytes() or values.output_v.bytes ~= out[2]:bytes() then
        return layer.name .. ": dequantizing the whole cache differs from the reference"
      end
    end
    if self.copied then
      local fp8 = reference.materialize {
        k_cache = hnd(self, data[1]), v_cache = hnd(self, data[2]), k_block_scales = hnd(self, sf[1]),
        v_block_scales = hnd(self, layer.interleaved), block_tables = first(self.block_tables, self.copied),
        seq_lens = first(self.seq_lens, self.copied), max_kv_len = self.max_len, out = layer.fp8,
        kv_page_indptr = first(self.kv_page_indptr, self.copied + 1), num_pages = self.batch * self.max_pages,
      }
      if fp8.kv_cache_fp8.bytes ~= layer.fp8:bytes() then
        return layer.name .. ": the whole E4M3 copy differs from the reference"
      end
      if reference.swizzle({ v_sf = sf[2], kv_layout = self.kv_layout }).bytes ~= layer.interleaved:bytes() then
        return layer.name .. ": V's interleaved scales differ from the reference"
      end
    end
  end
end

return kv
