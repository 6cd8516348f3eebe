-- Records of DeepSeek-V4: a vector of 512 dimensions per token, 448 quantized and 64 rotated, in pages with a padded
-- stride. One operation rotates the queries, in place or into padded heads, and rotates, quantizes and inserts the
-- token. A second one writes another cache with a record for every `compress_ratio` tokens.

local nibble = require "nibble"
local pages = require "nibble.pages"
local reference = require "nibble.reference"

local RECORD, GAP = 384, 48

-- A pool of records: what a page has, and the bytes behind each page, which nobody may touch.
local function make_pool(run, name, num_pages, page_size)
  local stride = page_size * RECORD + GAP
  local memory = nibble.full({ num_pages, stride }, 0xA5, { dtype = "uint8", device = run.device })
  run:watch(name .. " between pages", memory:narrow(2, page_size * RECORD + 1, GAP))
  local cache = memory:as_strided({ num_pages, page_size, RECORD }, { stride, RECORD, 1 })
  local image = run:watch(name, cache, function(offset)
    local page, rest = offset // (page_size * RECORD), offset % (page_size * RECORD)
    if rest < page_size * 352 then
      return ("page %d, entry %d, byte %d of its data"):format(page, rest // 352, rest % 352)
    end
    rest = rest - page_size * 352
    return ("page %d, entry %d, byte %d of its scales"):format(page, rest // 32, rest % 32)
  end)
  return cache, image
end

return {
  title = "DeepSeek-V4 records: rotate and insert, compressed or not, queries in place or with padded heads",
  parameters = {
    compress_ratio = { 2, min = 1, max = 2, help = "tokens per record of the second cache" },
    heads = { 3, min = 1, max = 8, help = "query heads" },
    in_place = { false, help = "rotate queries in place; otherwise into 8 heads" },
    requests = { 3, min = 1, max = 16, help = "requests" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
  },
  steps = 10,
  grid = { {}, { in_place = true }, { compress_ratio = 1, page_size = 1 },
    { heads = 8, requests = 1, in_place = true } },

  setup = function(run)
    local p, s = run.p, run.state
    local held = (4 + run.steps + p.page_size - 1) // p.page_size
    local num_pages = 1 + p.requests * held
    local function zeros(dtype, ...) return nibble.zeros({ ... }, { dtype = dtype, device = run.device }) end
    s.allocator = pages.allocator { num_pages = num_pages, page_size = p.page_size, layout = "shuffled",
      seed = run.seed, reserved = 1 }
    s.cache, s.image = make_pool(run, "records", num_pages, p.page_size)
    s.small, s.small_image = make_pool(run, "compressed records", num_pages, p.page_size)
    -- The static inputs. There is one row more than requests: padding, which has no slot.
    s.rows = p.requests + 1
    s.q, s.kv = zeros("bfloat16", s.rows, p.heads, 512), zeros("bfloat16", s.rows, 512)
    s.slots, s.small_slots, s.positions = zeros("int64", s.rows), zeros("int64", s.rows), zeros("int64", s.rows)
    s.table = nibble.rope_table(4 + run.steps, { device = run.device })
    s.out = p.in_place and s.q or zeros("bfloat16", s.rows, 8, 512)
    s.out_image = run:watch(p.in_place and "queries, in place" or "queries", s.out)
    s.read = zeros("bfloat16", s.rows - 1, 512) -- the records read back
    s.read_image = run:watch("records read back", s.read)
    s.requests, s.small_requests = {}, {}
    s.small_allocator = pages.allocator { num_pages = num_pages, page_size = p.page_size, layout = "ring",
      reserved = 1 }
    for i = 1, p.requests do
      s.requests[i], s.small_requests[i] = assert(s.allocator:allocate(0)), assert(s.small_allocator:allocate(0))
    end
  end,

  step = function(run)
    local p, s = run.p, run.state
    local slots, small, positions = {}, {}, {}
    for i, request in ipairs(s.requests) do
      positions[i] = request.length
      slots[i] = s.allocator:append(request, 1)[1]
      -- A record stands for `compress_ratio` tokens and is written with the last of them; all of them name its slot.
      local tiny = s.small_requests[i]
      if positions[i] % p.compress_ratio == 0 then assert(s.small_allocator:append(tiny, 1)) end
      small[i] = s.small_allocator:slots(tiny, tiny.length - 1, 1)[1]
    end
    slots[s.rows], small[s.rows], positions[s.rows] = -1, -1, 0
    s.host = {
      q = run:randn({ s.rows, p.heads, 512 }, { device = "cpu" }), kv = run:randn({ s.rows, 512 }, { device = "cpu" }),
      slots = nibble.tensor(slots, { device = "cpu" }), small_slots = nibble.tensor(small, { device = "cpu" }),
      positions = nibble.tensor(positions, { device = "cpu" }),
    }
    for name, tensor in pairs(s.host) do s[name]:copy(tensor) end
  end,

  captured = function(run)
    local p, s = run.p, run.state
    local q_out = nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert(s.q, s.kv, s.cache, s.slots, s.positions, s.table,
      p.in_place and { q_inplace = true } or { q_head_padded = 8 })
    if not p.in_place then s.out:copy(q_out) end
    nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(s.kv, s.small, s.small_slots, s.positions, s.table,
      { compress_ratio = p.compress_ratio })
    s.read:copy(nibble.mla.dequantize_cache(s.cache, s.slots:narrow(1, 1, s.rows - 1)))

    run:effect({ op = "rope_insert" }, function() -- the same by the reference, on the images
      local host, rope = s.host, s.reference_table
      if not rope then
        rope = reference.rope_table { max_position = 4 + run.steps }
        s.reference_table = rope
      end
      local wanted = reference.rope_insert {
        q = host.q, kv = host.kv, cache = s.image:array(), slot_mapping = host.slots, positions = host.positions,
          cos_sin_cache = rope,
        q_head_padded = p.in_place and 0 or 8, q_inplace = p.in_place,
      }
      s.image:set(wanted.cache)
      s.out_image:set(wanted.q_out)
      s.small_image:set(reference.kv_rope_insert({
        kv = host.kv, cache = s.small_image:array(), slot_mapping = host.small_slots, positions = host.positions,
          cos_sin_cache = rope,
        compress_ratio = p.compress_ratio,
      }).cache)
      s.read_image:set(reference.mla_dequantize({ cache = s.image:array(),
        slots = host.slots:narrow(1, 1, s.rows - 1) }).rows)
    end)
  end,

  check = function(run)
    local s = run.state
    if not run.p.in_place then -- heads that are padding are zero
      local padding = s.out:narrow(2, run.p.heads + 1, 8 - run.p.heads)
      run:expect(not padding:bytes():find("[^\0]"), "a padded head is not zero")
    end
  end,

  finish = function(run)
    local s = run.state
    for i, request in ipairs(s.small_requests) do
      local tokens = s.requests[i].length
      run:expect(request.length == (tokens + run.p.compress_ratio - 1) // run.p.compress_ratio,
        "%d records for %d tokens", request.length, tokens)
    end
  end,
}
