-- Sets of bytes of a storage: sorted lists {low, high, low, high, ...} of ranges that neither touch nor overlap; `high`
-- is the first byte after a range. Lists of views and accesses are never changed; those of written bytes are.

local spans = {}

local MOST = 65536   -- ranges in one list; of a view of more pieces there is none
local STEPS = 100000 -- of a search for what two of those share

spans.item_bytes = require("nibble.numbers").bytes

-- Sorts and merges ranges in any order.
function spans.merged(list)
  local sorted = true
  for i = 3, #list, 2 do
    if list[i] <= list[i - 1] then
      sorted = false
      break
    end
  end
  if sorted then return list end
  local lows, highs, result, n = {}, {}, {}, 0
  for i = 1, #list, 2 do
    local low, high = list[i], list[i + 1]
    if not highs[low] then lows[#lows + 1] = low end
    if not highs[low] or high > highs[low] then highs[low] = high end
  end
  table.sort(lows)
  for _, low in ipairs(lows) do
    if n > 0 and low <= result[n] then
      if highs[low] > result[n] then result[n] = highs[low] end
    else
      result[n + 1], result[n + 2], n = low, highs[low], n + 2
    end
  end
  return result
end

-- Adds to a list the bytes of items of `bytes` bytes in some dimensions {size, stride in bytes}, beginning at `base`.
-- Returns false if there are too many ranges.
function spans.add_box(list, base, dims, bytes)
  local rest = {}
  for _, dim in ipairs(dims) do
    if dim[1] == 0 then return true end
    if dim[1] > 1 and dim[2] > 0 then rest[#rest + 1] = dim end
  end
  table.sort(rest, function(a, b) return a[2] < b[2] end)
  local first = 1
  while rest[first] and rest[first][2] <= bytes do
    bytes = bytes + (rest[first][1] - 1) * rest[first][2]
    first = first + 1
  end
  local count = 1
  for i = first, #rest do count = count * rest[i][1] end
  if count > MOST or #list + 2 * count > 2 * MOST then return false end
  local function walk(i, at)
    if i < first then
      list[#list + 1], list[#list + 2] = at, at + bytes
      return
    end
    for k = 0, rest[i][1] - 1 do walk(i - 1, at + k * rest[i][2]) end
  end
  walk(#rest, base)
  return true
end

-- Of a whole view; nil when it falls into too many pieces.
function spans.of_view(view)
  local list, dims, item = {}, {}, spans.item_bytes[view.dtype]
  for i, size in ipairs(view.shape) do dims[i] = { size, view.stride[i] * item } end
  return spans.add_box(list, view.offset, dims, item) and spans.merged(list) or nil
end

-- From a view's first byte to behind its last.
function spans.hull(view)
  local item, last = spans.item_bytes[view.dtype], 0
  for i, size in ipairs(view.shape) do
    if size == 0 then return view.offset, view.offset end
    last = last + (size - 1) * view.stride[i]
  end
  return view.offset, view.offset + (last + 1) * item
end

-- The first of the places base + i1 * stride1 + i2 * stride2 + ... (dimensions {size, stride}, in bytes) in low ..
-- high-1, and how much of it the dimensions make that are `mine`; false: there is none, nil: that takes too long to
-- find.
local function search(base, dims, low, high)
  local rest, reach, steps = {}, { 0 }, 0
  for _, dim in ipairs(dims) do
    if dim[1] == 0 then return false end
    if dim[1] > 1 and dim[2] > 0 then rest[#rest + 1] = dim end
  end
  table.sort(rest, function(a, b) return a[2] < b[2] end)
  for i, dim in ipairs(rest) do reach[i + 1] = reach[i] + (dim[1] - 1) * dim[2] end
  local function walk(i, at, mine)
    if at >= high or at + reach[i + 1] < low then return false end
    if i == 0 then return at, mine end
    local size, stride, own = rest[i][1], rest[i][2], rest[i].mine and rest[i][2] or 0
    for k = math.max(0, -((at + reach[i] - low) // stride)), math.min(size - 1, (high - 1 - at) // stride) do
      steps = steps + 1
      if steps > STEPS then return nil end
      local found, part = walk(i - 1, at + k * stride, mine + k * own)
      if found ~= false then return found, part end
    end
    return false
  end
  return walk(#rest, base, 0)
end

local function dims_of(view, mine)
  local dims, item = {}, spans.item_bytes[view.dtype]
  for i, size in ipairs(view.shape) do dims[i] = { size, view.stride[i] * item, mine = mine } end
  return dims, item
end

--- A byte of a list that a view has, however many pieces it falls into; false: there is none, nil: that takes too long
--- to find.
function spans.hits(view, list)
  local dims, item = dims_of(view)
  local low, high = spans.hull(view)
  for i = 1, #list, 2 do
    if list[i] < high and list[i + 1] > low then
      local at = search(view.offset, dims, list[i] - item + 1, list[i + 1])
      if at ~= false then return at and math.max(at, list[i]) end
    end
  end
  return false
end

--- A byte that two views share; false: there is none, nil: that takes too long to find.
function spans.meet(a, b)
  local dims, item = dims_of(a, true)
  local others, other_item = dims_of(b)
  local _, behind = spans.hull(b)
  table.move(others, 1, #others, #dims + 1, dims) -- from b's last element its strides go backwards, as a's go forwards
  local apart, mine = search(a.offset - (behind - other_item), dims, 1 - item, other_item)
  return apart and a.offset + mine + math.max(0, -apart)
end

-- The index in the list of the first range that ends behind `byte`.
local function find(list, byte)
  local low, high = 1, #list // 2 + 1
  while low < high do
    local middle = (low + high) // 2
    if list[2 * middle] > byte then high = middle else low = middle + 1 end
  end
  return 2 * low - 1
end

--- What a list has not, of low .. high-1.
function spans.gaps(list, low, high)
  local gaps, i = {}, find(list, low)
  while low < high do
    local from = list[i] or high
    if from > low then gaps[#gaps + 1], gaps[#gaps + 2] = low, math.min(from, high) end
    low, i = list[i + 1] or high, i + 2
  end
  return gaps
end

-- The first byte that two lists share, or nil.
function spans.overlap(a, b)
  if #a == 0 or #b == 0 then return nil end
  if a == b then return a[1] end
  if #a > #b then a, b = b, a end
  local k = find(b, a[1])
  for i = 1, #a, 2 do
    if b[k] and b[k + 1] <= a[i] then k = find(b, a[i]) end
    if not b[k] then return nil end
    if b[k] < a[i + 1] then return math.max(a[i], b[k]) end
  end
  return nil
end

-- The first range of a list of which the set does not have every byte: low, high; or nil.
function spans.missing(set, list)
  if #set == 2 and #list > 0 and set[1] <= list[1] and set[2] >= list[#list] then return nil end
  for i = 1, #list, 2 do
    local k = find(set, list[i])
    if not set[k] or set[k] > list[i] then return list[i], math.min(set[k] or list[i + 1], list[i + 1]) end
    if set[k + 1] < list[i + 1] then return set[k + 1], math.min(set[k + 2] or list[i + 1], list[i + 1]) end
  end
  return nil
end

-- The set without low .. high-1, with it added in when `present`.
local function put(set, low, high, present)
  if low >= high then return end
  local first = find(set, present and low - 1 or low) -- the first range that is touched
  local last = first                                  -- behind the last one
  while set[last] and (set[last] < high or (present and set[last] == high)) do last = last + 2 end
  local fresh = {}
  if present then
    fresh[1] = first < last and math.min(set[first], low) or low
    fresh[2] = first < last and math.max(set[last - 1], high) or high
  elseif first < last then
    if set[first] < low then fresh[1], fresh[2] = set[first], low end
    if set[last - 1] > high then fresh[#fresh + 1], fresh[#fresh + 2] = high, set[last - 1] end
  end
  local count, change = #set, #fresh - (last - first)
  if change ~= 0 then table.move(set, last, count, last + change) end
  for i = count + change + 1, count do set[i] = nil end
  table.move(fresh, 1, #fresh, first, set)
end

function spans.add(set, list)
  for i = 1, #list, 2 do
    local k = find(set, list[i])
    if not (set[k] and set[k] <= list[i] and set[k + 1] >= list[i + 1]) then put(set, list[i], list[i + 1], true) end
  end
end

function spans.remove(set, list)
  for i = 1, #list, 2 do put(set, list[i], list[i + 1], false) end
end

-- Whether the set has every byte of low .. high-1.
function spans.has(set, low, high)
  local k = find(set, low)
  return set[k] ~= nil and set[k] <= low and set[k + 1] >= high
end

--- Iterates over the ranges of the set inside low .. high-1.
function spans.within(set, low, high)
  local k = find(set, low) - 2
  return function()
    k = k + 2
    if set[k] and set[k] < high then return math.max(set[k], low), math.min(set[k + 1], high) end
  end
end

return spans
