-- What must be in memory during scenarios/decode.lua, byte for byte, and where a byte that differs lies.
--
-- Each input token becomes the same bytes wherever it is put. So the reference works once, on all tokens, and the check keeps
-- an image (a string) of every tensor in which those bytes are placed by the rules of slots, block tables and layouts.

local reference, progress = require "nibble.reference", require "nibble.progress"

local check = {}
check.__index = check

--------------------------------------------------------------------------------------------------------------- images

-- The bytes of a tensor as they must be, with the writes that wait to be put in.
local image = {}
image.__index = image

function image:put(offset, bytes)
  if not self.writes[offset] then self.offsets[#self.offsets + 1] = offset end
  self.writes[offset] = bytes
end

function image:settle()
  local parts, done = {}, 0
  table.sort(self.offsets)
  for _, offset in ipairs(self.offsets) do
    parts[#parts + 1] = self.bytes:sub(done + 1, offset)
    parts[#parts + 1] = self.writes[offset]
    done = offset + #self.writes[offset]
  end
  parts[#parts + 1] = self.bytes:sub(done + 1)
  self.bytes, self.writes, self.offsets = table.concat(parts), {}, {}
end

-- The bytes that each input token becomes: rows[layer][K or V][token], with data, sf and fp8 per head.
local function make_rows(c, input, scales)
  local rows, bar <close> = {}, progress.start("reference", #input.layers)
  local T = (input.tokens + 3) // 4 * 4 -- one page that holds every token
  local half, blocks, vectors, row_size = c.dim // 2, c.dim // 16, c.heads * T, c.heads * c.dim * 2
  local positions = {}
  for t = 1, input.tokens do positions[t] = t - 1 end
  local slots = reference.from_values(positions, "int32")
  local zero, length = reference.from_values({ 0 }, "int32", { 1, 1 }), reference.from_values({ input.tokens }, "int32")
  local function array(dtype, shape, size) return { dtype = dtype, shape = shape, bytes = ("\0"):rep(size) } end
  local data = array("uint8", { 1, c.heads, T, half }, vectors * half)
  local sf = array("uint8", { 1, c.heads, T, blocks }, vectors * blocks)
  local out = array(c.dtype, { 1, input.tokens, c.heads, c.dim }, input.tokens * row_size)
  for l, layer in ipairs(input.layers) do
    local cache = reference.append {
      append_key = layer[1], append_value = layer[2], slot_mapping = slots, paged_kv_cache = { data, data },
      kv_cache_sf = { sf, sf }, k_scale = scales[l][1], v_scale = scales[l][2], kv_layout = "HND",
    }
    local values = reference.dequantize {
      paged_kv_cache = cache.paged_kv_cache, kv_cache_sf = cache.kv_cache_sf, block_tables = zero, seq_lens = length,
      k_scale = scales[l][1], v_scale = scales[l][2], output_k = out, output_v = out, kv_layout = "HND",
    }
    local fp8 = c.materialize and reference.materialize({
      k_cache = cache.paged_kv_cache[1], v_cache = cache.paged_kv_cache[2], k_block_scales = cache.kv_cache_sf[1],
      v_block_scales = reference.swizzle { v_sf = cache.kv_cache_sf[2], kv_layout = "HND" },
      block_tables = zero, seq_lens = length, max_kv_len = input.tokens,
    }).kv_cache_fp8.bytes
    rows[l] = { {}, {} }
    for kv = 1, 2 do
      local dequantized = (kv == 1 and values.output_k or values.output_v).bytes
      for t = 0, input.tokens - 1 do
        local function cut(bytes, size, i) return bytes:sub(i * size + 1, (i + 1) * size) end
        local row = { data = {}, sf = {}, fp8 = {}, out = cut(dequantized, row_size, t) }
        for h = 0, c.heads - 1 do
          row.data[h] = cut(cache.paged_kv_cache[kv].bytes, half, h * T + t)
          row.sf[h] = cut(cache.kv_cache_sf[kv].bytes, blocks, h * T + t)
          row.fp8[h] = fp8 and cut(fp8, c.dim, (kv + 1) * vectors + h * T + t) -- of page 1; page 0 is zero
        end
        rows[l][kv][t] = row
      end
    end
    bar:step()
  end
  return rows
end

-- The E4M3 vector that a page's entry gives when nothing was written to it but the fill byte.
local function filled_vector(c)
  local data = { dtype = "uint8", shape = { 1, 1, 4, 32 }, bytes = string.char(c.fill):rep(128) }
  local sf = { dtype = "uint8", shape = { 1, 1, 4, 4 }, bytes = string.char(c.fill):rep(16) }
  return reference.materialize({
    k_cache = data, v_cache = data, k_block_scales = sf, v_block_scales = sf, max_kv_len = 4,
    block_tables = reference.from_values({ 0 }, "int32", { 1, 1 }), seq_lens = reference.from_values({ 4 }, "int32"),
  }).kv_cache_fp8.bytes:sub(-64):rep(c.dim // 64)
end

---------------------------------------------------------------------------------------------------------------- places

-- The index, in vectors of the last dimension, of a cache's (page, entry, head), and back.
local function vector_at(c, page, entry, head)
  if c.layout == "HND" then return (page * c.heads + head) * c.page_size + entry end
  return (page * c.page_size + entry) * c.heads + head
end

local function place_of(c, vector)
  local page, rest = vector // (c.heads * c.page_size), vector % (c.heads * c.page_size)
  if c.layout == "HND" then return page, rest % c.page_size, rest // c.page_size end
  return page, rest // c.heads, rest % c.heads
end

-- For each kind of tensor: the page, entry, head and dimension that a byte belongs to; page nil is padding. The last
-- dimension's 16 elements that share a scale are named by their first.
local where = {}

function where.data(self, offset, got, wanted)
  local page, entry, head = place_of(self.c, offset // (self.c.dim // 2))
  return page, entry, head, offset % (self.c.dim // 2) * 2 + ((got ~ wanted) & 15 == 0 and 1 or 0)
end

function where.sf(self, offset)
  local blocks = self.c.dim // 16
  local page, entry, head = place_of(self.c, offset // blocks)
  return page, entry, head, offset % blocks * 16
end

function where.interleaved(self, offset)
  local blocks = self.c.dim // 16
  local page, row, head = place_of(self.c, offset // blocks)
  local column = offset % blocks
  return page, row // 4 * 4 + column % 4, head, (row % 4 * (blocks // 4) + column // 4) * 16
end

function where.out(self, offset)
  local c, element = self.c, offset // 2
  local row, position = element // (c.dim * c.heads * c.max_len), element // (c.dim * c.heads) % c.max_len
  local request = self.active[row + 1]
  local page = request and request.place.pages[position // c.page_size + 1]
  return page, position % c.page_size, element // c.dim % c.heads, element % c.dim
end

function where.fp8(self, offset)
  local c, vector = self.c, offset // self.c.dim
  local copy, page = vector // (2 * c.heads * c.page_size) - 1, nil
  for b, request in ipairs(self.active) do
    page = page or copy >= 0 and request.place.pages[copy - self.batch.kv_page_indptr[b] + 1] or nil
  end
  return page, vector % c.page_size, vector // c.page_size % c.heads, offset % c.dim
end

----------------------------------------------------------------------------------------------------------------- check

--- The check of two sets of caches and outputs (as scenarios/decode.lua makes them), one filled by graphs, one eagerly.
function check.new(c, input, graph, eager)
  local scales = {}
  for l, layer in ipairs(graph.layers) do scales[l] = layer.scales end
  local self = setmetatable({
    c = c, graph = graph, eager = eager, names = {},
    rows = make_rows(c, input, scales), -- what each token becomes
    used = {},                          -- input tokens that were appended
    dirty = {},                         -- pages written since the last step
    watch = {}, images = {},            -- all tensors, as a list; their images by layer and kind
    compared = 0,                       -- bytes
  }, check)
  for l, layer in ipairs(graph.layers) do
    local twin, images = eager.layers[l], { data = {}, sf = {}, out = {}, copies = { {}, {} } }
    local function add(what, kind, tensor, other)
      local picture = setmetatable({ bytes = tensor:bytes(), writes = {}, offsets = {} }, image)
      self.watch[#self.watch + 1] = {
        what = input.layers[l].name .. " " .. what, where = where[kind], tensor = tensor, twin = other, image = picture,
      }
      return picture
    end
    self.names[l] = input.layers[l].name
    for kv, name in ipairs { "K", "V" } do
      images.data[kv] = add(name .. " cache", "data", layer.data[kv], twin.data[kv])
      images.sf[kv] = add(name .. " scales", "sf", layer.sf[kv], twin.sf[kv])
      images.out[kv] = add(name .. " dequantized", "out", layer.out[kv], twin.out[kv])
    end
    if c.materialize then
      images.interleaved = add("V scales interleaved", "interleaved", layer.interleaved, twin.interleaved)
      images.fp8 = add("E4M3 copy", "fp8", layer.fp8, twin.fp8)
      images.fp8:put(0, ("\0"):rep(2 * c.heads * c.page_size * c.dim)) -- page 0
      images.filled = filled_vector(c)
    end
    self.images[l] = images
  end
  return self
end

--- A request's token at `position` gets into its slot: what becomes of the caches, and of what is made from them.
function check:append(request, position)
  local c = self.c
  local page, entry = request.place.pages[position // c.page_size + 1], position % c.page_size
  request.out = request.out or {}
  for l, images in ipairs(self.images) do
    for kv = 1, 2 do
      local row, key = self.rows[l][kv][request.first + position], l * 2 + kv
      local copy = images.copies[kv][page] or {}
      for h = 0, c.heads - 1 do
        local vector = vector_at(c, page, entry, h)
        images.data[kv]:put(vector * (c.dim // 2), row.data[h])
        images.sf[kv]:put(vector * (c.dim // 16), row.sf[h])
        copy[h * c.page_size + entry + 1] = row.fp8[h]
      end
      copy.bytes, images.copies[kv][page] = nil, copy
      request.out[key] = (request.out[key] or "") .. row.out
    end
  end
  self.dirty[page], self.used[request.first + position] = true, true
end

--- The step is done for the requests in `active`, as the rows of `batch`: what their outputs must be.
function check:step(active, batch)
  local c = self.c
  local vectors, blocks = c.heads * c.page_size, c.dim // 16
  local sf_shape = c.layout == "HND" and { 1, c.heads, c.page_size, blocks } or { 1, c.page_size, c.heads, blocks }
  self.active, self.batch = active, batch
  for l, images in ipairs(self.images) do
    for b, request in ipairs(active) do
      for kv = 1, 2 do images.out[kv]:put((b - 1) * c.max_len * c.heads * c.dim * 2, request.out[l * 2 + kv]) end
    end
    for kv = 1, 2 do
      images.data[kv]:settle()
      images.sf[kv]:settle()
      images.out[kv]:settle()
    end
    if c.materialize then
      for page in pairs(self.dirty) do
        local at = page * vectors * blocks
        local linear = { dtype = "uint8", shape = sf_shape, bytes = images.sf[2].bytes:sub(at + 1, at + vectors * blocks) }
        images.interleaved:put(at, reference.swizzle({ v_sf = linear, kv_layout = c.layout }).bytes)
      end
      images.interleaved:settle()
      for b, request in ipairs(active) do
        for j, page in ipairs(request.place.pages) do
          for kv = 1, 2 do
            local copy = images.copies[kv][page]
            if not copy.bytes then
              local parts = {}
              for i = 1, vectors do parts[i] = copy[i] or images.filled end
              copy.bytes = table.concat(parts)
            end
            images.fp8:put(((batch.kv_page_indptr[b] + j) * 2 + kv - 1) * vectors * c.dim, copy.bytes)
          end
        end
      end
      images.fp8:settle()
    end
  end
  self.dirty = {}
end

-- Where two strings of one length differ first, from 0.
local function first_difference(a, b)
  local low, high = 1, #a
  while low < high do
    local middle = (low + high) // 2
    if a:sub(low, middle) == b:sub(low, middle) then low = middle + 1 else high = middle end
  end
  return low - 1
end

local function difference(self, entry, bytes, wanted, whose)
  local offset = first_difference(bytes, wanted)
  local got, want = bytes:byte(offset + 1), wanted:byte(offset + 1)
  local page, slot, head, dimension = entry.where(self, offset, got, want)
  return ("%s: page %s, entry %d, head %d, dimension %d: got 0x%02X, %s has 0x%02X (byte %d of the tensor)")
    :format(entry.what, page or "none (padding)", slot, head, dimension, got, whose, want, offset)
end

--- Compares all there is, after a step of `bucket` rows; nil when it is equal, else what differs first.
---@param bucket integer
---@return string?
function check:compare(bucket)
  for _, entry in ipairs(self.watch) do
    local bytes = entry.tensor:bytes()
    if bytes ~= entry.image.bytes then return difference(self, entry, bytes, entry.image.bytes, "the reference") end
    if not entry.tensor:equal(entry.twin) then
      return difference(self, entry, bytes, entry.twin:bytes(), "the eager run")
    end
    self.compared = self.compared + #bytes
  end
  if not self.c.materialize then return end
  for l, layer in ipairs(self.graph.layers) do
    local fp8_tables = layer.tables[bucket]
    if not fp8_tables:equal(self.eager.layers[l].tables[bucket]) then
      return self.names[l] .. " fp8_block_tables differ from the eager run's"
    end
    for b, row in ipairs(fp8_tables:totable()) do
      for j, page in ipairs(row) do
        local request = self.active[b]
        local want = request and request.place.pages[j] and self.batch.kv_page_indptr[b] + j or 0
        if page ~= want then
          return ("%s fp8_block_tables: row %d, column %d: got %d, expected %d"):format(self.names[l], b - 1, j - 1, page, want)
        end
      end
    end
  end
end

--- Once more at the end: whole operations by the reference on what the caches now hold, and the bytes nobody may touch.
--- `inputs` are the static tensors' first rows, as the last step read them.
---@return string?
function check:finish(inputs)
  local c, bar <close> = self.c, progress.start("whole caches", #self.graph.layers)
  local function hnd(t) return c.layout == "HND" and t or t:permute(1, 3, 2, 4) end
  for l, layer in ipairs(self.graph.layers) do
    local rows = inputs.seq_lens.shape[1]
    local out = { layer.out[1]:narrow(1, 1, rows), layer.out[2]:narrow(1, 1, rows) }
    local values = reference.dequantize {
      paged_kv_cache = layer.data, kv_cache_sf = layer.sf, block_tables = inputs.block_tables, kv_layout = c.layout,
      seq_lens = inputs.seq_lens, k_scale = layer.scales[1], v_scale = layer.scales[2],
      output_k = out[1], output_v = out[2],
    }
    if values.output_k.bytes ~= out[1]:bytes() or values.output_v.bytes ~= out[2]:bytes() then
      return self.names[l] .. ": dequantizing the whole cache differs from the reference"
    end
    if c.materialize then
      local swizzled = reference.swizzle { v_sf = layer.sf[2], kv_layout = c.layout }
      if swizzled.bytes ~= layer.interleaved:bytes() then
        return self.names[l] .. ": V's interleaved scales differ from the reference"
      end
      local fp8 = reference.materialize {
        k_cache = hnd(layer.data[1]), v_cache = hnd(layer.data[2]), k_block_scales = hnd(layer.sf[1]),
        v_block_scales = hnd(layer.interleaved), block_tables = inputs.block_tables, seq_lens = inputs.seq_lens,
        max_kv_len = c.max_len, out = layer.fp8, kv_page_indptr = inputs.kv_page_indptr, num_pages = c.num_pages - 1,
      }
      if fp8.kv_cache_fp8.bytes ~= layer.fp8:bytes() then
        return self.names[l] .. ": the whole E4M3 copy differs from the reference"
      end
    end
    for i, storage in ipairs(layer.pool.storage) do
      local padding = i <= 2 and c.page_padding or c.sf_page_padding
      local gaps = storage:narrow(2, storage.shape[2] - padding + 1, padding):bytes() .. storage:narrow(1, 1, 1):bytes()
      for offset = 1, #gaps do
        if gaps:byte(offset) ~= c.fill then
          return ("%s: page 0 or the bytes between pages were written (pool %d)"):format(self.names[l], i)
        end
      end
    end
    bar:step()
  end
end

return check
