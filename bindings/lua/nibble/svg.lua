--- Pictures as SVG text: page tables over time, graphs, quantization errors, curves. Also reached as `show.svg`.
--
--   local svg = require "nibble.svg"
--   snapshots[#snapshots + 1] = svg.snapshot(allocator, requests, step)              -- after each step
--   svg.save("pages.svg", svg.page_table(allocator, snapshots, { title = "decode" }))
--   svg.save("graph.svg", svg.graph(graph))                                          -- DOT text without Graphviz
--   svg.save("errors.svg", svg.error_map(values, { title = "layer 0 K" }))           -- values[head][token][block]
--   svg.save("tokens.svg", svg.curve(values, { title = "tokens" }))
--
-- The pictures support light and dark mode, need no other files, and can be embedded in HTML; a file of its own has a
-- background. The tooltip of a cell has its numbers.

local numbers = require "nibble.numbers"

local svg = {}

local STYLE = [[
.nib{--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--empty:#f1f4f7;--held:#aab4bf;--request:72%;--low:95%;--step:-8%;
font:11px system-ui,sans-serif;max-width:100%;height:auto}.nib .part{opacity:.35}.nib:root{background:#fff}
@media screen and (prefers-color-scheme:dark){.nib{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--empty:#1b2129;--held:#59636e;
--request:38%;--low:17%;--step:7%}.nib .part{opacity:.5}.nib:root{background:#0d1117}}
.nib text{fill:var(--ink)}.nib .soft{fill:var(--soft)}.nib .title{font-weight:600;font-size:13px}
.nib .empty{fill:var(--empty)}.nib .held{fill:var(--held)}.nib .line{stroke:var(--line);fill:none}
.nib .curve{stroke:hsl(211 80% 50%);fill:none;stroke-width:1.5}.nib .area{fill:hsl(211 80% 50%);opacity:.15}
.nib .middle{text-anchor:middle}.nib .end{text-anchor:end}]]

local function fail(where, parameter, expected, got)
  error(("svg.%s: %s: expected %s, got %s"):format(where, parameter, expected, type(got) == "string" and got
    or type(got)), 0)
end

--- Escapes text for SVG and HTML, between tags or in double quotes. Bytes that are not UTF-8, and characters that are
--- not allowed there, become "?".
---@param text any
---@return string
function svg.escape(text)
  text = tostring(text)
  if not utf8.len(text) then text = text:gsub("[\x80-\xff]", "?") end
  text = text:gsub("[\0-\8\11\12\14-\31\127]", "?"):gsub("\xef\xbf[\xbe\xbf]", "?")
  return (text:gsub("[&<>\"']", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;", ["'"] = "&#39;" }))
end

local function number(x)
  return (numbers.format("%.2f", x):gsub("%.?0+$", ""))
end

------------------------------------------------------------------------------------------------------------- drawing

-- A picture under construction: its elements, and the style rules that they use.
local canvas = {}
canvas.__index = canvas

local function new_canvas(title)
  local self = setmetatable({ parts = {}, rules = {}, top = 4 }, canvas)
  if title then
    self.name = svg.escape(title)
    self:text(0, 14, title, "title")
    self.top = 26
  end
  return self
end

function canvas:add(format, ...) self.parts[#self.parts + 1] = numbers.format(format, ...) end

function canvas:text(x, y, text, class)
  self:add('<text x="%s" y="%s"%s>%s</text>', number(x), number(y), class and (' class="%s"'):format(class) or "",
    svg.escape(text))
end

function canvas:rect(class, x, y, width, height, title)
  self:add(title and '<rect class="%s" x="%s" y="%s" width="%s" height="%s"><title>%s</title></rect>'
    or '<rect class="%s" x="%s" y="%s" width="%s" height="%s"/>', class, number(x), number(y), number(width),
      number(height),
    title and svg.escape(title))
end

-- Adds the rule of a class to the picture and returns the class's name.
function canvas:rule(class, style)
  if not self.rules[class] then
    self.rules[class] = true
    self.rules[#self.rules + 1] = (".nib .%s{%s}"):format(class, style)
  end
  return class
end

function canvas:finish(width, height)
  width, height = math.ceil(width), math.ceil(height)
  return ('<svg xmlns="http://www.w3.org/2000/svg" class="nib" width="%d" height="%d" viewBox="0 0 %d %d" role="img"%s>'
    .. "<style>%s%s</style>\n%s\n</svg>\n"):format(width, height, width, height,
    self.name and (' aria-label="%s"'):format(self.name) or "", STYLE, table.concat(self.rules),
      table.concat(self.parts, "\n"))
end

local function text_width(text) return 6.2 * (utf8.len(text) or #text) end

-- Draws a legend: a list of {class, text}, as coloured squares with text, in lines of at most `width`. Returns its end.
local function legend(picture, x, y, width, items)
  local at = x
  for _, item in ipairs(items) do
    local needed = 15 + text_width(item[2]) + 14
    if at > x and at + needed > x + width then at, y = x, y + 17 end
    picture:rect(item[1], at, y, 11, 11)
    picture:text(at + 15, y + 9.5, item[2])
    at = at + needed
  end
  return y + 17
end

-- The n for which every n-th of `count` labels fits. A label has `size` pixels, labels are `pitch` pixels apart.
local function every(size, pitch)
  for _, n in ipairs { 1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500 } do
    if n * pitch >= size then return n end
  end
  return math.ceil(size / pitch)
end

local function clamp(x, low, high) return math.max(low, math.min(high, x)) end

-- At most `most` of the indices 1..count, evenly spaced, including both ends.
local function spread(count, most)
  local list = {}
  local n = math.min(count, most)
  for i = 1, n do list[i] = n == 1 and 1 or 1 + (i - 1) * (count - 1) // (n - 1) end
  return list
end

---------------------------------------------------------------------------------------------------- page tables in time

---@class nibble.snapshot_request
---@field id integer|string   the same id is the same request in all snapshots
---@field length integer
---@field dropped? integer
---@field pages integer[]

---@class nibble.snapshot
---@field step integer|string  what the column is called
---@field requests nibble.snapshot_request[]
---@field references integer[]  of page p at p + 1: requests that hold it, -1: reserved

--- A copy of the page ownership for `page_table`. It does not refer to the allocator.
---@param allocator nibble.allocator
---@param requests nibble.request[]  a field `id` of a request is its name; otherwise its place in the list is
---@param step integer|string
---@return nibble.snapshot
function svg.snapshot(allocator, requests, step)
  local snapshot = { step = step, requests = {}, references = {} }
  for page = 0, allocator.num_pages - 1 do
    local count = allocator:references(page)
    snapshot.references[page + 1] = count == math.huge and -1 or count
  end
  for i, request in ipairs(requests) do
    snapshot.requests[i] = {
      id = request.id or i, length = request.length, dropped = request.dropped,
      pages = table.move(request.pages, 1, #request.pages, 1, {}),
    }
  end
  return snapshot
end

-- The state of each page, {owners = ids, filled = entries}, and a key that is equal for equal states.
local function page_states(pool, snapshot)
  local states = {}
  for _, request in ipairs(snapshot.requests) do
    for j, page in ipairs(request.pages) do
      local state = states[page] or { owners = {}, filled = 0 }
      state.owners[#state.owners + 1] = request.id
      state.filled = math.max(state.filled, clamp(request.length - (j - 1) * pool.page_size, 0, pool.page_size))
      states[page] = state
    end
  end
  for page = 0, pool.num_pages - 1 do
    local count, state = snapshot.references[page + 1] or 0, states[page]
    if not state and count ~= 0 then
      states[page] = { owners = {}, filled = pool.page_size, reserved = count < 0 }
    end
  end
  for _, state in pairs(states) do
    state.key = ("%s/%d/%s"):format(table.concat(state.owners, ","), state.filled, state.reserved and "r" or "")
  end
  return states
end

local function draw_cell(picture, classes, pool, state, x, y, width, height, where)
  local owners = state.owners
  if #owners == 0 then
    picture:rect("held", x, y, width, height, where .. (state.reserved and ": reserved" or ": held by others"))
    return
  end
  local title = ("%s: request %s%s, %d of %d tokens"):format(where, table.concat(owners, ", "), #owners > 1
    and " (shared)" or "",
    state.filled, pool.page_size)
  local share, band = state.filled / pool.page_size, height / math.min(#owners, 4)
  for i = 1, math.min(#owners, 4) do -- a shared page has a band for each of its requests
    local top = y + (i - 1) * band
    if share < 1 then picture:rect(classes[owners[i]] .. " part", x, top, width, band, title) end
    if share > 0 then picture:rect(classes[owners[i]], x, top + band * (1 - share), width, band * share, title) end
  end
  local label = table.concat(owners, "+")
  if height >= 11 and width >= text_width(label) + 4 and share >= 1 then
    picture:text(x + width / 2, y + height / 2 + 4, label, "middle")
  end
end

---@class nibble.page_table_options
---@field title? string
---@field width? integer      of the picture in pixels, about; default 960
---@field max_steps? integer  columns; of more, evenly spread ones are drawn; default 480
---@field max_pages? integer  rows; the first ones that any request held are drawn; default 256

--- Draws the pages of a pool over time: a row for each page, a column for each snapshot, in the colours of the
--- requests. The filled part of a page is solid.
---@param pool {num_pages: integer, page_size: integer}  an allocator will do
---@param snapshots nibble.snapshot[]
---@param opts? nibble.page_table_options
---@return string
function svg.page_table(pool, snapshots, opts)
  opts = opts or {}
  if type(pool) ~= "table" or math.type(pool.num_pages) ~= "integer" or math.type(pool.page_size) ~= "integer" then
    fail("page_table", "pool", "a table with num_pages and page_size", pool)
  end
  if type(snapshots) ~= "table" then fail("page_table", "snapshots", "a list of snapshots", snapshots) end
  local picture = new_canvas(opts.title)
  local columns, states, classes, ids, held = {}, {}, {}, {}, {}
  for c, index in ipairs(spread(#snapshots, opts.max_steps or 480)) do
    columns[c] = snapshots[index]
    states[c] = page_states(pool, snapshots[index])
    for _, request in ipairs(snapshots[index].requests) do
      if not classes[request.id] then
        ids[#ids + 1] = request.id
        -- Hues at the golden angle: neighbours differ, for any number of colours.
        classes[request.id] = picture:rule("q" .. #ids,
          ("fill:hsl(%d 62%% var(--request))"):format((#ids - 1) * 137.508 // 1 % 360))
      end
    end
    for page in pairs(states[c]) do held[page] = true end
  end
  local rows, most = {}, opts.max_pages or 256
  for page = 0, pool.num_pages - 1 do
    if pool.num_pages <= most or held[page] and #rows < most then rows[#rows + 1] = page end
  end

  local left, top = math.max(32, 8 + text_width(tostring(pool.num_pages))), picture.top + 14
  local width = clamp(((opts.width or 960) - left) / math.max(#columns, 1), 2, 44)
  local height = clamp(720 / math.max(#rows, 1), 4, 15)
  local right, bottom = left + #columns * width, top + #rows * height
  picture:text(left - 4, top - 5, "step", "soft end")
  -- Left edge of the picture: a label that is wider than its columns may not fit before it.
  local edge = math.max(right + 1, left + 370)
  for c = 1, #columns, every(30, width) do
    local x, label = left + (c - 0.5) * width, columns[c].step
    if x + text_width(tostring(label)) / 2 <= edge then picture:text(x, top - 5, label, "soft middle") end
  end
  for r = 1, #rows, every(11, height) do picture:text(left - 4, top + (r - 0.5) * height + 4, rows[r], "soft end") end
  picture:rect("empty", left, top, right - left, bottom - top)
  local gap = math.min(1, height / 8)
  for r, page in ipairs(rows) do
    local c = 1
    while c <= #columns do
      local state, last = states[c][page], c
      while last < #columns and state and states[last + 1][page] and states[last + 1][page].key == state.key do
        last = last + 1
      end
      if state then
        local from, to = tostring(columns[c].step), tostring(columns[last].step)
        local where = ("page %d, %s"):format(page, from == to and "step " .. from
          or ("steps %s to %s"):format(from, to))
        draw_cell(picture, classes, pool, state, left + (c - 1) * width, top + (r - 1) * height + gap / 2,
          (last - c + 1) * width - math.min(0.6, width / 6), height - gap, where)
      end
      c = last + 1
    end
  end
  local items = {}
  for i = 1, math.min(#ids, 40) do items[i] = { classes[ids[i]], "request " .. ids[i] } end
  if #ids > 40 then items[#items + 1] = { "empty", ("and %d more"):format(#ids - 40) } end
  items[#items + 1] = { "empty", "free" }
  items[#items + 1] = { "held", "reserved, or held by others" }
  local y = legend(picture, left, bottom + 8, math.max(right - left, 360), items)
  local notes = "pale: not filled yet; bands: shared by several requests"
  if #columns < #snapshots then notes = notes .. ("; %d of %d steps"):format(#columns, #snapshots) end
  if #rows < pool.num_pages then notes = notes .. ("; %d of %d pages"):format(#rows, pool.num_pages) end
  picture:text(left, y + 9, notes, "soft")
  return picture:finish(math.max(edge, left + text_width(notes)), y + 16)
end

------------------------------------------------------------------------------------------------------------- graphs

--- Draws a graph with Graphviz's `dot`. Returns the picture and "svg" or, if `dot` is not installed, the graph in
--- Graphviz's language and "dot".
---@param graph nibble.graph|string  a captured graph, or such a text
---@return string text
---@return "svg"|"dot" format
function svg.graph(graph)
  local text = type(graph) == "string" and graph or nil
  if not text then
    local ok, dot = pcall(function() return graph:dot() end)
    if not ok then fail("graph", "graph", "a graph or DOT text", graph) end
    text = dot
  end
  local name = os.tmpname()
  local file = io.open(name, "w")
  if not file then return text, "dot" end
  file:write(text)
  file:close()
  local look = "-Grankdir=LR -Gbgcolor=transparent -Nfontname=sans-serif -Nfontsize=11"
  local pipe = io.popen(("dot -Tsvg %s %s 2>/dev/null"):format(look, name))
  local picture = pipe and pipe:read("a") or ""
  local drawn = pipe and pipe:close()
  os.remove(name)
  local start = picture:find("<svg", 1, true)
  if not drawn or not start then return text, "dot" end
  return picture:sub(start), "svg"
end

------------------------------------------------------------------------------------------------- quantization errors

local LEVELS = 9

local function heat_class(picture, level)
  return picture:rule("h" .. level, ("fill:hsl(268 55%% calc(var(--low) + %d*var(--step)))"):format(level))
end

local function is_number(x) return type(x) == "number" and x == x end

-- Draws a head: blocks are rows, tokens are columns. Neighbours of the same shade become one rectangle.
local function draw_head(picture, tokens, map, h, x, y, width, height, first)
  local blocks = map.blocks
  for b = 1, blocks do
    local c = 1
    while c <= map.columns do
      local level, last, worst = map.level(h, c, b), c, map.cell(h, c, b)
      while level and last < map.columns and map.level(h, last + 1, b) == level do
        last = last + 1
        worst = math.max(worst, map.cell(h, last, b))
      end
      if level then
        local from, to = first + (c - 1) * map.group, first + math.min(last * map.group, tokens) - 1
        picture:rect(heat_class(picture, level), x + (c - 1) * width, y + (b - 1) * height, (last - c + 1) * width,
          height - 0.5,
          numbers.format("head %d, block %d, %s%.3g", h - 1, b - 1,
            from == to and ("token %d: "):format(from) or ("tokens %d to %d: up to "):format(from, to), worst))
      end
      c = last + 1
    end
  end
end

---@class nibble.error_map_options
---@field title? string
---@field unit? string          what the values are; default "rms error in % of the block's inputs"
---@field first_token? integer  number of the first one; default 0
---@field least? number         value of the palest shade; default: the smallest value
---@field most? number          value of the darkest shade; default: the largest value
---@field width? integer        pixels, about; default 960

--- Draws the error of every block: a strip for each head, with a column for each token and a row for each block of 16
--- dimensions.
---@param values number[][][]  [head][token][block]; false or NaN where there is none
---@param opts? nibble.error_map_options
---@return string
function svg.error_map(values, opts)
  opts = opts or {}
  if type(values) ~= "table" then fail("error_map", "values", "a table [head][token][block]", values) end
  local picture = new_canvas(opts.title)
  local tokens, blocks, smallest, largest = 0, 0, math.huge, 0
  for _, head in ipairs(values) do
    tokens = math.max(tokens, #head)
    for _, row in ipairs(head) do
      blocks = math.max(blocks, #row)
      for _, x in ipairs(row) do
        if is_number(x) and x < math.huge then smallest, largest = math.min(smallest, x), math.max(largest, x) end
      end
    end
  end
  local most = opts.most or largest
  local least = math.min(opts.least or smallest, most)
  local group = math.max(1, (tokens + 239) // 240)
  local map = { group = group, columns = (tokens + group - 1) // group, blocks = blocks }
  function map.cell(h, column, b)
    local worst
    for t = (column - 1) * group + 1, math.min(column * group, tokens) do
      local x = values[h][t] and values[h][t][b]
      if is_number(x) then worst = math.max(worst or x, x) end
    end
    return worst
  end
  function map.level(h, column, b)
    local x = map.cell(h, column, b)
    return x and (most > least and math.floor(clamp((x - least) / (most - least) * LEVELS, 0, LEVELS - 1)) or 0)
  end

  local left, y = 56, picture.top + 14
  local width = clamp(((opts.width or 960) - left) / math.max(map.columns, 1), 2, 16)
  local height = clamp(48 / math.max(blocks, 1), 5, 12)
  local first = opts.first_token or 0
  local right = left + map.columns * width
  picture:text(left - 6, y - 5, "token", "soft end")
  local edge = math.max(right + 1, left + 430) -- of the picture
  for c = 1, map.columns, every(30, width) do
    local x, label = left + (c - 1) * width, first + (c - 1) * group
    if x + text_width(tostring(label)) <= edge then picture:text(x, y - 5, label, "soft") end
  end
  for h = 1, #values do
    picture:text(left - 6, y + blocks * height / 2 + 4, "head " .. h - 1, "end")
    picture:rect("empty", left, y, right - left, blocks * height)
    draw_head(picture, tokens, map, h, left, y, width, height, first)
    y = y + blocks * height + 6
  end
  local items = {}
  for level = 0, LEVELS - 1 do
    local text = numbers.format("%.3g", least + (most - least) * level / LEVELS)
    items[level + 1] = { heat_class(picture, level), text .. (level == LEVELS - 1 and " and more" or "") }
  end
  y = legend(picture, left, y + 4, math.max(right - left, 420), items)
  local notes = opts.unit or "rms error in % of the block's inputs"
  if blocks > 1 then notes = notes .. ("; the rows of a head are its blocks 0 to %d"):format(blocks - 1) end
  if group > 1 then notes = notes .. ("; a column is the worst of %d tokens"):format(group) end
  picture:text(left, y + 9, notes, "soft")
  return picture:finish(math.max(edge, left + text_width(notes)), y + 16)
end

-------------------------------------------------------------------------------------------------------------- curves

--- Draws values over steps as a curve. The axis begins at 0, or at the least value if that is negative.
---@param values (number|false)[]  false: none at that step
---@param opts? {title?: string, unit?: string, width?: integer, height?: integer}  300, 90
---@return string
function svg.curve(values, opts)
  opts = opts or {}
  if type(values) ~= "table" then fail("curve", "values", "a list of numbers", values) end
  local picture = new_canvas(opts.title)
  local width, height, low, high = opts.width or 300, opts.height or 90, 0, 0
  for _, x in ipairs(values) do
    if is_number(x) and math.abs(x) < math.huge then low, high = math.min(low, x), math.max(high, x) end
  end
  local span = high > low and high - low or 1
  local labels = { numbers.format("%.6g", high), numbers.format("%.6g", low) }
  local left, top = 8 + math.max(text_width(labels[1]), text_width(labels[2])), picture.top + 4
  local bottom, room = top + height, width - left - 6
  local function place(i, x)
    return number(left + (#values > 1 and (i - 1) / (#values - 1) or 0) * room) .. "," ..
      number(bottom - (x - low) / span * height)
  end
  picture:add('<path class="line" d="M%s,%sH%sM%s,%sH%s"/>', number(left), number(top), number(left + room),
    number(left),
    number(bottom), number(left + room))
  picture:text(left - 4, top + 4, labels[1], "soft end")
  picture:text(left - 4, bottom + 4, labels[2], "soft end")
  local i = 1
  while i <= #values do -- a curve for each stretch without a gap
    local points, start = {}, i
    while i <= #values and is_number(values[i]) and math.abs(values[i]) < math.huge do
      points[#points + 1] = place(i, values[i])
      i = i + 1
    end
    if #points > 0 then
      local line = table.concat(points, "L")
      local zero = clamp(0, low, high)
      picture:add('<path class="area" d="M%sL%sL%sZ"/>', place(start, zero), line, place(i - 1, zero))
      picture:add('<path class="curve" d="M%s%s"/>', line, #points == 1 and "h2" or "")
    end
    i = math.max(i + (#points == 0 and 1 or 0), start + 1)
  end
  picture:text(left, bottom + 16, "1", "soft")
  picture:text(left + room, bottom + 16, ("%s%d steps"):format(opts.unit and opts.unit .. " over " or "", #values),
    "soft end")
  return picture:finish(width, bottom + 22)
end

---------------------------------------------------------------------------------------------------------------- files

--- Writes text to a file. Returns `nil, message` if it cannot be written; an old file is then unchanged.
---@param path string
---@param text string
---@return boolean?
---@return string? message
function svg.save(path, text)
  local file, message = require("nibble").create(path)
  if not file then return nil, message end
  file:write(text) -- close returns its error
  return file:close()
end

return svg
