--- Quantization errors of a run's caches by layer, K or V, and head, for a scenario's output and its report.
--
--   local errors = require("nibble.errors").measure(run)      -- nil when the run has no cache
--   print(require("nibble.errors").text(errors))
--
-- They are computed for the appended tokens from the ledger, whose bytes the caches were compared with.

local explain = require "nibble.explain"
local numbers = require "nibble.numbers"
local reference = require "nibble.reference"
local show = require "nibble.show"

local errors = {}

local MOST_TOKENS = 512 -- in the map

-- Measures K or V of a layer. Adds the error of each element to `all`, in half steps of E2M1 at its block's scale.
local function measure_side(cache, layer, i, source, all)
  local heads, dim, g = cache.heads, cache.dims[i], layer.scales[i]
  local tokens, blocks = {}, dim // 16
  for token in pairs(cache.used) do tokens[#tokens + 1] = token end
  table.sort(tokens)
  local result = { heads = {}, underflow = 0, map = { values = {}, first_token = tokens[1] or 0 } }
  for h = 0, heads - 1 do
    local head, rows = explain.head(all), {}
    for _, token in ipairs(tokens) do
      local row, base, cells = layer.images.rows[i][token], (token * heads + h) * dim, {}
      local data, sf = row.data[h], row.sf[h]
      for block = 0, blocks - 1 do
        local inputs, codes, from = {}, {}, base + block * 16
        for d = 0, 15 do
          inputs[d + 1], codes[d + 1] = source[from + d + 1], data:byte(block * 8 + d // 2 + 1) >> d % 2 * 4 & 15
        end
        cells[block + 1] = head:add(inputs, codes, sf:byte(block + 1), g)
      end
      local at = token - result.map.first_token + 1
      if at <= MOST_TOKENS then
        for missing = #rows + 1, at - 1 do rows[missing] = {} end
        rows[at] = cells
      end
    end
    result.heads[h + 1], result.map.values[h + 1] = head:result(), rows
    result.underflow = result.underflow + result.heads[h + 1].underflow
  end
  return result
end

---@class nibble.errors
---@field list table[]     {layer, kv = "K" or "V", heads = nibble.head_errors[], map = {first_token, values}}: values[head]
---                        [token][block] are rms errors in percent of the block's inputs, of the first 512 tokens
---                        (empty: unused)
---@field histogram {low: number, high: number, counts: integer[]}  of all errors in half steps
---@field ratios number[]
---@field fine boolean     whether all errors are within the bound
---@field underflow integer  elements with a subnormal scale, which has no bound

--- The errors of all caches of a run; nil if it has none.
---@param run nibble.run
---@return nibble.errors?
function errors.measure(run)
  local all = { list = {}, ratios = {}, fine = true, underflow = 0 }
  for _, cache in ipairs(run.caches) do
    for l, layer in ipairs(cache.layers) do
      for i, name in ipairs { "K", "V" } do
        local source = reference.values({ dtype = cache.dtype, shape = {}, bytes = layer.bytes[i] })
        local side = measure_side(cache, layer, i, source, all.ratios)
        side.layer, side.kv = layer.name or "layer " .. l - 1, name
        if #run.caches > 1 then side.layer = #cache.layers > 1 and cache.name .. ": " .. side.layer or cache.name end
        all.list[#all.list + 1] = side
        all.underflow = all.underflow + side.underflow
        -- x * (1 / unit) is rounded twice before it is compared with a tie.
        for _, head in ipairs(side.heads) do all.fine = all.fine and head.worst <= 1 + 1e-6 end
      end
    end
  end
  if #all.list == 0 then return nil end
  local counts = {}
  for i = 1, 12 do counts[i] = 0 end
  for _, ratio in ipairs(all.ratios) do
    local bin = math.max(1, math.min(12, math.floor((ratio + 1) * 6) + 1))
    counts[bin] = counts[bin] + 1
  end
  all.histogram = { low = -1, high = 1, counts = counts }
  return all
end

--- The errors as a table and a histogram for a terminal.
---@param all nibble.errors
---@return string
function errors.text(all)
  local title = "quantization error: the largest, in half steps of E2M1 at the block's scale (bound: 1); "
    .. "rms relative to the input's"
  local lines, titles, most = { title }, {}, 0
  for _, side in ipairs(all.list) do most = math.max(most, #side.heads) end
  for h = 1, math.min(most, 4) do titles[h] = ("%15s"):format("head " .. h - 1) end
  lines[2] = "             " .. table.concat(titles, "   ")
  for _, side in ipairs(all.list) do
    local cells = {}
    for h, head in ipairs(side.heads) do cells[h] = numbers.format("%.4f %6.2f %%", head.worst, head.rms) end
    for h = 1, #cells, 4 do
      lines[#lines + 1] = ("  %-10s %s"):format(h == 1 and side.layer .. " " .. side.kv or "  heads " .. h - 1 .. "..",
        table.concat(cells, "   ", h, math.min(h + 3, #cells)))
    end
  end
  lines[#lines + 1] = show.histogram(all.ratios, { bins = 12, low = -1, high = 1, title = "errors, in half steps" })
  if all.underflow > 0 then
    lines[#lines + 1] = ("  %d elements have a subnormal scale and no bound"):format(all.underflow)
  end
  return table.concat(lines, "\n")
end

return errors
