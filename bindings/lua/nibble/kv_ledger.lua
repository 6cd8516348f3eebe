--- The ledger of a scenario's cache: entries for the work that nibble.kv queues, and checks after each step and at the
--- end. These are methods of nibble.kv; none of them queues work.

local ledger = require "nibble.ledger"
local reference = require "nibble.reference"

---@class nibble.kv
local kv_ledger = {}

local FILL = 0xA5

--- The initial value of every byte of a pool, so that writes to other bytes are found.
kv_ledger.FILL = FILL

--- A cache's tensor in the layout that materialize reads.
---@param t nibble.tensor
---@return nibble.tensor
function kv_ledger:hnd(t) return self.kv_layout == "HND" and t or t:permute(1, 3, 2, 4) end

--------------------------------------------------------------------------------------------------------------- places

-- For each kind of tensor of a cache: a function that describes the page, entry, head and dimension of a byte. A scale
-- is described by the first of its 16 elements.
local places = {}

-- The index of (entry, head) among the vectors of a page.
function places.vector_at(cache, entry, head)
  if cache.kv_layout == "HND" then return head * cache.page_size + entry end
  return entry * cache.heads + head
end

local function entry_and_head(cache, vector)
  if cache.kv_layout == "HND" then return vector % cache.page_size, vector // cache.page_size end
  return vector // cache.heads, vector % cache.heads
end

local element = "page %d, entry %d, head %d, dimension %d"

-- A pool of vectors of `size` bytes, with `stride` bytes from page to page.
local function in_pool(cache, stride, size, dimension)
  return function(offset, got, wanted)
    local page, rest = offset // stride, offset % stride
    if rest >= cache.page_size * cache.heads * size then
      return ("page %d, byte %d, which is padding"):format(page, rest)
    end
    local entry, head = entry_and_head(cache, rest // size)
    return element:format(page, entry, head, dimension(rest % size, got ~ wanted))
  end
end

function places.data(cache, stride, dim)
  return in_pool(cache, stride, dim // 2, function(byte, bits) return byte * 2 + (bits & 15 == 0 and 1 or 0) end)
end

function places.sf(cache, stride, dim)
  return in_pool(cache, stride, dim // 16, function(byte) return byte * 16 end)
end

function places.interleaved(cache, dim)
  local blocks = dim // 16
  return function(offset)
    local vectors, column = cache.heads * cache.page_size, offset % blocks
    local row, head = entry_and_head(cache, offset // blocks % vectors)
    return element:format(offset // blocks // vectors, row // 4 * 4 + column % 4, head,
      (row % 4 * (blocks // 4) + column // 4) * 16)
  end
end

function places.out(cache, dim)
  return function(offset)
    local vector = offset // 2 // dim
    local row = vector // cache.heads // cache.max_len
    local request = cache.loaded.requests[row + 1]
    return ("row %d (%s), position %d, head %d, dimension %d"):format(row, request and "request " .. request.id
      or "padding",
      vector // cache.heads % cache.max_len, vector % cache.heads, offset // 2 % dim)
  end
end

function places.fp8(cache, dim)
  return function(offset)
    local vector = offset // dim
    return element:format(vector // (2 * cache.heads * cache.page_size), vector % cache.page_size,
      vector // cache.page_size % cache.heads, offset % dim) .. (" of the copy (%s)"):format(
      vector // (cache.heads * cache.page_size) % 2 == 0 and "K" or "V")
  end
end

--------------------------------------------------------------------------------------------------------------- entries

--- Watches every tensor of a layer; with images in the run that keeps a ledger.
function kv_ledger:watch(run, layer, source)
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
  for i = 1, 2 do images.rows[i] = ledger.rows(source[i], layer.scales[i], self.with_copy, self.four_over_six) end
  if self.with_copy then
    images.filled, images.copies = ledger.filled_vector(FILL, self.dims[1]), {}
  end
  layer.images = images
end

--- Enters a write of a token (nil: of the initial bytes) to a slot, in every layer.
---@param slot integer
---@param token? integer
function kv_ledger:place(slot, token)
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

--- Enters a `dequantize`.
---@param rows integer
function kv_ledger:expect_values(rows)
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
end

-- The planes of K and V in E4M3 of a page.
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

--- Enters a `materialize`.
---@param layer table
---@param rows integer
function kv_ledger:expect_copy(layer, rows)
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

--- Checks what a step wrote beside the watched tensors: the block tables of the E4M3 copy.
---@return string? difference
function kv_ledger:check_tables()
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

--- The last check, if the last work on the cache was a read: runs whole operations of the reference on the caches,
--- tables and lengths that are on the device.
---@return string? difference
function kv_ledger:check_whole()
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
        k_cache = self:hnd(data[1]), v_cache = self:hnd(data[2]), k_block_scales = self:hnd(sf[1]),
        v_block_scales = self:hnd(layer.interleaved), block_tables = first(self.block_tables, self.copied),
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

return kv_ledger
