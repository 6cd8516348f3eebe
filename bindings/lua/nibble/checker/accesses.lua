-- The accesses of an operation: of paged caches and index tensors, only the parts that slots, tables, lengths and
-- positions select.
--
-- expand(observation, contents) returns a list of items {view, write, touch, parameter, spans, pieces} and facts about
-- pages. `item:spans()` is the list of bytes, or nil if it is not known. `pieces` of a paged cache are {page, first
-- entry, entries}. `touch` is set for a user kernel, of which only the tensors are known.

local operations = require "nibble.operations"
local spans = require "nibble.checker.spans"

local accesses = {}

-- Functions by kernel. Each gets the accesses and the contents (lists of integers) by parameter. For parameters of
-- which only a part is used, it adds to `out` what makes the spans, and the pieces. It returns the facts. Equal
-- contents are the same list; a function can keep other data for the next call in `memo`.
local exact = {}

local function by_parameter(observation)
  local named = {}
  for _, access in ipairs(observation.accesses) do
    local name = access.parameter
    -- an in-place q: the one that is written
    if name and (not named[name] or access.write) then named[name] = access end
  end
  return named
end

--- The accesses whose contents `expand` needs, by parameter; nil if it needs none.
function accesses.indices(observation)
  local op = not observation.user_kernel and operations.of_kernel[observation.kernel]
  if not op or not exact[op.kernel] then return nil end
  local wanted = {}
  for _, access in ipairs(observation.accesses) do
    if op.indices[access.parameter] then wanted[access.parameter] = access end
  end
  return wanted
end

local MANY = { [4] = "<" .. ("i4"):rep(64), [8] = "<" .. ("i8"):rep(64) }

local function integers(bytes, dtype)
  local list, size = {}, spans.item_bytes[dtype]
  local count = #bytes // size
  for i = 0, count // 64 - 1 do
    table.move({ string.unpack(MANY[size], bytes, i * 64 * size + 1) }, 1, 64, i * 64 + 1, list)
  end
  for i = count // 64 * 64, count - 1 do
    list[i + 1] = string.unpack(size == 8 and "<i8" or "<i4", bytes, i * size + 1)
  end
  return list
end

------------------------------------------------------------------------------------------------------------- items

-- The bytes of an item, made when somebody asks for them: most accesses are ordered, and nobody does.
local function item_spans(item)
  if item.list == nil then item.list = item.build(item.view) or false end
  return item.list or nil
end

local function nothing() return {} end
local function unknown() return nil end

local function of_boxes(add)
  return function(view)
    local list = {}
    return add(list, view) ~= false and spans.merged(list) or nil
  end
end

-- Rows (indices of the first dimension, from 0) of a view.
local function of_rows(rows)
  return of_boxes(function(list, view)
    local size, dims = spans.item_bytes[view.dtype], {}
    for i = 2, #view.shape do dims[#dims + 1] = { view.shape[i], view.stride[i] * size } end
    for _, row in ipairs(rows) do
      if not spans.add_box(list, view.offset + row * view.stride[1] * size, dims, size) then return false end
    end
  end)
end

local MOST = 65536 -- ranges, as in spans

-- Pieces of a paged cache [pages, tokens, heads, x], or with heads and tokens changed.
local function pieces_of(view, pieces, layout)
  local size, shape, stride = spans.item_bytes[view.dtype], view.shape, view.stride
  local token = layout == "HND" and 3 or 2
  local offset, ps, ts, hs = view.offset, stride[1] * size, stride[token] * size, stride[5 - token] * size
  local heads, bytes, list, n = shape[5 - token], shape[4] * size, {}, 0
  if heads == 0 or bytes == 0 then return list end
  local packed = stride[4] == 1 or shape[4] == 1
  local whole = packed and (heads == 1 or hs == bytes) and heads * bytes -- of a token, if it is one range
  for _, piece in ipairs(pieces) do
    local base, tokens = offset + piece[1] * ps + piece[2] * ts, piece[3]
    if n > 2 * MOST then
      return nil
    elseif whole and (ts == whole or tokens == 1) then
      list[n + 1], list[n + 2], n = base, base + tokens * whole, n + 2
    elseif packed and (ts == bytes or tokens == 1) and hs == tokens * bytes then
      list[n + 1], list[n + 2], n = base, base + heads * hs, n + 2
    elseif packed and (ts == bytes or tokens == 1) then
      for h = 0, heads - 1 do
        list[n + 1], list[n + 2], n = base + h * hs, base + h * hs + tokens * bytes, n + 2
      end
    else
      if not spans.add_box(list, base, { { shape[4], stride[4] * size }, { heads, hs }, { tokens, ts } }, size) then
        return nil
      end
      n = #list
    end
  end
  return spans.merged(list)
end

local function of_pieces(pieces, layout)
  return function(view) return pieces_of(view, pieces, layout) end
end

-- The same as an operation's access, with what makes spans of other pieces.
local function of_cache(pieces, layout)
  return { of_pieces(pieces, layout), pieces, of = function(view, some) return pieces_of(view, some, layout) end }
end

-- V scales interleaved over 4 tokens, [pages, heads, tokens, blocks].
local function of_interleaved(pieces)
  return of_boxes(function(list, view)
    local ts, blocks, heads = view.stride[3], view.shape[4], { view.shape[2], view.stride[2] }
    for _, piece in ipairs(pieces) do
      local base, whole = view.offset + piece[1] * view.stride[1], piece[3] // 4 * 4
      if not spans.add_box(list, base, { { blocks, 1 }, heads, { whole, ts } }, 1) then return false end
      for t = 0, piece[3] % 4 - 1 do
        local at = base + whole * ts + t
        if not spans.add_box(list, at, { { blocks // 4, 4 }, heads, { 4, ts } }, 1) then return false end
      end
    end
  end)
end

-- The records of `mla`: a page's data first, then its scales.
local function of_records(pieces)
  return of_boxes(function(list, view)
    local size = accesses.page_size(view)
    for _, piece in ipairs(pieces) do
      local base = view.offset + piece[1] * view.stride[1]
      spans.add_box(list, base + piece[2] * 352, {}, piece[3] * 352)
      if not spans.add_box(list, base + size * 352 + piece[2] * 32, {}, piece[3] * 32) then return false end
    end
  end)
end

-- The first `counts[b]` elements of row b (of plane kv) of a table of indices.
local function of_table(counts)
  return of_boxes(function(list, view)
    local size, split = spans.item_bytes[view.dtype], #view.shape == 3
    local last = #view.shape
    for b, count in ipairs(counts) do
      local dims = { { count, view.stride[last] * size }, split and { 2, view.stride[2] * size } or nil }
      if not spans.add_box(list, view.offset + (b - 1) * view.stride[1] * size, dims, size) then return false end
    end
  end)
end

--- The bytes of one piece of a paged cache or of a record cache.
function accesses.piece(view, piece)
  if view.kv_layout then return pieces_of(view, { piece }, view.kv_layout) end
  return of_records({ piece })(view)
end

--- The page that a byte of a paged cache lies in, and the entry of it (nil: of a record cache, or of interleaved
--- scales).
function accesses.entry_of(view, byte)
  local size, at = spans.item_bytes[view.dtype], byte - view.offset
  local stride = view.stride[1] * size
  local token = view.kv_layout and (view.kv_layout == "HND" and 3 or 2)
  return at // stride, token and at % stride // (view.stride[token] * size) % view.shape[token]
end

--- Tokens a page of a paged cache or of a record cache has.
function accesses.page_size(view)
  if view.kv_layout then return view.shape[view.kv_layout == "HND" and 3 or 2] end
  local size = 1
  for i = 2, #view.shape - 1 do size = size * view.shape[i] end
  return size
end

--------------------------------------------------------------------------------------------------------- operations

-- The slots that point into a cache: {index (from 0), page, entry}.
local function valid_slots(list, page_size, num_pages)
  local slots = {}
  for i, slot in ipairs(list) do
    if slot >= 0 and slot // page_size < num_pages then
      slots[#slots + 1] = { i - 1, slot // page_size, slot % page_size }
    end
  end
  return slots
end

-- A row of a block table, to which its pages are added: what the kernel skips, too.
local function new_row(b, length, page_size, cache)
  return { row = b - 1, length = length, page_size = page_size, num_pages = cache.shape[1] }
end

local function slot_pieces(slots)
  local pieces, rows = {}, {}
  for i, slot in ipairs(slots) do pieces[i], rows[i] = { slot[2], slot[3], 1 }, slot[1] end
  return pieces, rows
end

-- All paged caches of a call have one layout.
local function for_caches(named, out, pieces)
  local same
  for name, access in pairs(named) do
    if access.kv_layout then
      same = same or of_cache(pieces, access.kv_layout)
      out[name] = same
    end
  end
end

function exact.append(named, contents, out)
  local cache = named["paged_kv_cache (K)"]
  local slots = valid_slots(contents.slot_mapping, accesses.page_size(cache), cache.shape[1])
  local pieces, rows = slot_pieces(slots)
  out.append_key = { of_rows(rows) }
  out.append_value = out.append_key
  for_caches(named, out, pieces)
  return { slots = slots, parameter = "slot_mapping", page_size = accesses.page_size(cache) }
end

-- What dequantize read the last time, when tables are the same and lengths end in the same pages: from step to step
-- only the last piece of each request grows.
local function grown(memo, tables, lengths, counts, size)
  local sum, rows = 0, {}
  for b, count in ipairs(counts) do
    if not memo.counts or memo.tables ~= tables or memo.counts[b] ~= count then return nil end
    sum = sum + count
  end
  if #memo.pieces ~= sum then return nil end -- pages were skipped
  local pieces, written, n = table.move(memo.pieces, 1, sum, 1, {}), table.move(memo.written, 1, sum, 1, {}), 0
  for b, count in ipairs(counts) do
    n = n + count
    local length, row = lengths[b], memo.rows[b]
    if count > 0 and length ~= row.length then
      local tokens = math.min(size, length - (count - 1) * size)
      pieces[n] = { pieces[n][1], 0, tokens, b - 1, count - 1 }
      written[n] = { b - 1, (count - 1) * size, tokens }
      row = { row = b - 1, length = length, page_size = size, num_pages = row.num_pages }
      table.move(memo.rows[b], 1, count, 1, row)
    end
    rows[b] = row
  end
  return pieces, written, rows
end

function exact.dequantize(named, contents, out, _, memo)
  local cache, output, tables = named["paged_kv_cache (K)"], named.output_k, named.block_tables
  local size, columns = accesses.page_size(cache), tables.shape[2]
  local counts, lengths = {}, {}
  for b = 1, tables.shape[1] do
    lengths[b] = math.max(0, math.min(contents.seq_lens[b], output.shape[2]))
    counts[b] = (lengths[b] + size - 1) // size
  end
  local pieces, written, rows = grown(memo, contents.block_tables, lengths, counts, size)
  if not pieces then
    pieces, written, rows = {}, {}, {}
    for b, count in ipairs(counts) do
      rows[b] = new_row(b, lengths[b], size, cache)
      for j = 0, count - 1 do
        local page = contents.block_tables[(b - 1) * columns + j + 1]
        local tokens = math.min(size, lengths[b] - j * size)
        if page >= 0 and page < cache.shape[1] then
          pieces[#pieces + 1] = { page, 0, tokens, b - 1, j }
          written[#written + 1] = { b - 1, j * size, tokens }
        end
        rows[b][j + 1] = page
      end
    end
  end
  memo.tables, memo.counts, memo.pieces, memo.written, memo.rows = contents.block_tables, counts, pieces, written, rows
  out.block_tables, out.output_k = { of_table(counts) }, { of_pieces(written) }
  out.output_v = out.output_k
  for_caches(named, out, pieces)
  return { rows = rows, parameter = "block_tables" }
end

function exact.materialize(named, contents, out, attributes)
  local cache, tables, result = named.k_cache, named.block_tables, named.out or named.kv_cache_fp8
  local size, columns, indptr = accesses.page_size(cache), tables.shape[#tables.shape], contents.kv_page_indptr
  local planes = #tables.shape == 3 and 2 or 1
  local most, last = named.fp8_block_tables.shape[2], result.shape[1] - 1
  local pieces, written, counts, rows = { {}, {} }, { 0 }, {}, { {}, {} }
  for b = 1, tables.shape[1] do
    local length = math.max(0, math.min(contents.seq_lens[b], attributes.max_kv_len))
    local from = indptr and indptr[b] or (b - 1) * most
    local low, high = math.max(from, 0) + 1, math.min(indptr and indptr[b + 1] or b * most, last) + 1
    counts[b] = 0
    for kv = 1, 2 do rows[kv][b] = new_row(b, length, size, kv == 1 and cache or named.v_cache) end
    for j = 0, (length + size - 1) // size - 1 do
      local target = from + 1 + j
      if target >= low and target < high then
        counts[b], written[#written + 1] = j + 1, target
        for kv = 1, 2 do
          local page = contents.block_tables[((b - 1) * planes + math.min(kv, planes) - 1) * columns + j + 1]
          if page >= 0 and page < cache.shape[1] then
            pieces[kv][#pieces[kv] + 1] = { page, 0, math.min(size, length - j * size), b - 1, j }
          end
          rows[kv][b][j + 1] = page
        end
      end
    end
  end
  out.block_tables = { of_table(counts) }
  out.k_cache, out.k_block_scales = of_cache(pieces[1], "HND"), of_cache(pieces[1], "HND")
  out.v_cache = of_cache(pieces[2], "HND")
  out.v_cache.values = true
  out.v_block_scales = { of_interleaved(pieces[2]), pieces[2], values = true }
  out[result.parameter] = { of_rows(written) }
  return { rows = rows[1], value_rows = planes == 2 and rows[2] or nil, parameter = "block_tables" }
end

function exact.rope_insert(named, contents, out, attributes)
  local ratio, positions = attributes.compress_ratio, contents.positions
  local limit, slots, turned, looked = named.cos_sin_cache.shape[1], {}, {}, {}
  local size, rotates = accesses.page_size(named.cache), attributes.apply_q_rope
  for _, slot in ipairs(valid_slots(contents.slot_mapping, size, named.cache.shape[1])) do
    local position = positions[slot[1] + 1]
    looked[#looked + 1] = slot[1]
    if (position + 1) % ratio == 0 and position >= 0 and position < limit then
      slots[#slots + 1], turned[position // ratio * ratio] = slot, true
    end
  end
  if rotates then
    for _, position in ipairs(positions) do
      if position >= 0 and position < limit then turned[position] = true end
    end
  end
  local pieces, rows = slot_pieces(slots)
  local table_rows = {}
  for row in pairs(turned) do table_rows[#table_rows + 1] = row end
  out.kv, out.cos_sin_cache, out.cache = { of_rows(rows) }, { of_rows(table_rows) }, { of_records(pieces), pieces }
  if not rotates then out.positions = { of_rows(looked) } end
  if named.q and named.q.write then -- in place: the 64 RoPE dimensions alone
    local q = named.q
    out.q = { rotates and of_boxes(function(list)
      return spans.add_box(list, q.offset + 448 * 2, { { 64, 2 }, { q.shape[1] * q.shape[2], 1024 } }, 2)
    end) or nothing }
  end
  return { slots = slots, parameter = "slot_mapping", page_size = size }
end

function exact.mla_dequantize(named, contents, out)
  local size = accesses.page_size(named.cache)
  local slots = valid_slots(contents.slots, size, named.cache.shape[1])
  local pieces = slot_pieces(slots)
  for i, slot in ipairs(slots) do pieces[i][4] = slot[1] end
  out.cache = { of_records(pieces), pieces }
  return { parameter = "slots", reads = pieces, page_size = size }
end

local MOST_SHAPES = 64

--- What `expand` has found out for some contents, for operations of the same geometry: the layers of a model.
function accesses.new_cache()
  return { count = 0, known = {} }
end

-- The same contents for the same geometry are the same, but for the views. `memo`: what one observation had before.
local function exactly(observation, named, contents, wanted, cache, geometry, memo)
  local key
  if cache then
    key = { geometry }
    for name in pairs(wanted) do key[#key + 1] = name .. contents[name] end
    table.sort(key)
    key = table.concat(key, ";")
    local known = cache.known[key]
    if known then return known[1], known[2] end
  end
  local lists, out = {}, {}
  for name, access in pairs(wanted) do
    local last = memo[name]
    if not last or last.bytes ~= contents[name] then
      last = { bytes = contents[name], list = integers(contents[name], access.dtype) }
      memo[name] = last
    end
    lists[name] = last.list
  end
  local facts = exact[observation.kernel](named, lists, out, observation.attributes, memo)
  if cache then
    if cache.count == MOST_SHAPES then cache.count, cache.known = 0, {} end
    cache.count, cache.known[key] = cache.count + 1, { out, facts }
  end
  return out, facts
end

-- Items of whole views.
local function plain_items(observation)
  local items, touch = {}, observation.user_kernel
  for i, access in ipairs(observation.accesses) do
    items[i] = { view = access, write = access.write and not touch, touch = touch, parameter = access.parameter,
      exact = false, spans = item_spans, build = spans.of_view }
  end
  return items
end

-- An item of what `special` says of a view, which does not say it itself.
local function part_of(item, special)
  if not item.of_some then
    item.of_some = { __index = { view = item.view, write = item.write, touch = item.touch, parameter = item.parameter,
      exact = true, spans = item_spans, values = special.values } }
  end
  return setmetatable({ build = special[1], pieces = special[2], of_pieces = special.of, list = nil }, item.of_some)
end

--- Items and facts: {slots | rows, parameter}. `contents[parameter]` are bytes; without one of them all that hangs on
--- it is unknown. With a cache: `geometry` is a text that says all of the operation but its contents and where its
--- views lie. `known`: the same table for each time that one observation is expanded with other contents.
function accesses.expand(observation, contents, cache, geometry, known)
  local out, facts = {}, nil
  local wanted = known and known.indices or accesses.indices(observation)
  if wanted then
    local named, complete = known and known.named or by_parameter(observation), true
    if known then known.named = named end
    for name in pairs(wanted) do complete = complete and contents[name] end
    if complete then
      local memo = known and known.memo or {}
      if known then known.memo = memo end
      out, facts = exactly(observation, named, contents, wanted, cache, geometry, memo)
    else
      for name in pairs(named) do out[name] = not wanted[name] and { unknown } or nil end
    end
  end
  local items = {}
  local plain = known and known.plain or plain_items(observation)
  if known then known.plain = plain end
  for i, item in ipairs(plain) do
    local special = item.parameter and out[item.parameter]
    items[i] = special and part_of(item, special) or item
  end
  return items, facts
end

return accesses
