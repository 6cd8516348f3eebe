--- Pictures for a terminal: a page table, a block and its codes, a histogram. Each function returns a string.
--
--   local show = require "nibble.show"
--   print(show.page_table(allocator, requests))
--   print(show.block({ 0.1, -0.7, 3, ... }))               -- 16 numbers, as append quantizes them
--   print(show.histogram(errors, { title = "error" }))
--   show.svg.save("graph.svg", show.svg.graph(graph))      -- see nibble.svg
--
-- Options of all functions: `color` (default: standard output is a terminal, NO_COLOR is not set, and TERM is neither
-- empty nor "dumb"), `utf8` (false: plain ASCII; default: whether the locale's character set is UTF-8), `width` in
-- columns (default: COLUMNS or 100).

local numbers = require "nibble.numbers"

local show = {}

----------------------------------------------------------------------------------------------------------- terminal

local ttys = {}

--- Whether a file descriptor (1: standard output, 2: standard error) is a terminal.
---@param fd integer
---@return boolean
function show.is_tty(fd)
  -- Lua has no function for this, so ask a shell that inherits the descriptor.
  if ttys[fd] == nil then ttys[fd] = os.execute(("test -t %d"):format(fd)) == true end
  return ttys[fd]
end

local function set(name)
  local value = os.getenv(name)
  return value ~= nil and value ~= "" and value or nil
end

--- Whether a file descriptor is a terminal with escape sequences: TERM is neither empty nor "dumb".
---@param fd integer
---@return boolean
function show.is_capable(fd)
  local terminal = set("TERM")
  return terminal ~= nil and terminal ~= "dumb" and show.is_tty(fd)
end

--- Whether to use colours on a file descriptor (default: standard output).
---@param fd? integer
---@return boolean
function show.use_color(fd) return not set("NO_COLOR") and show.is_capable(fd or 1) end

--- Whether the locale's character set is UTF-8.
---@return boolean
function show.use_utf8()
  local locale = set("LC_ALL") or set("LC_CTYPE") or set("LANG") or ""
  return locale:lower():find("utf%-?8") ~= nil
end

local glyphs = {
  [true] = {
    levels = { "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█" }, bar = "█", line = "│", free = "·", left = "◀", right = "▶",
  },
  [false] = {
    levels = { "_", ":", ";", "=", "+", "%", "@", "#" }, bar = "#", line = "|", free = ".", left = "<", right = ">",
  },
}

local function style(opts)
  opts = opts or {}
  local s = { width = opts.width or math.tointeger(tonumber(set("COLUMNS"))) or 100, color = opts.color,
    utf8 = opts.utf8 }
  if s.color == nil then s.color = show.use_color() end
  if s.utf8 == nil then s.utf8 = show.use_utf8() end
  s.glyphs = glyphs[s.utf8]
  function s.paint(code, text) return s.color and ("\27[%sm%s\27[0m"):format(code, text) or text end
  return s
end

--- Makes untrusted text (a title, a name, a path) safe for a terminal: control characters, marks that change the
--- direction of text, and bytes that are not UTF-8 become \x1B or \u{202E}. So do line ends, unless `lines` is true.
---@param text string
---@param lines? boolean
---@return string
function show.visible(text, lines)
  if not text:find("[%c\127-\255]") then return text end
  local parts, from = {}, 1
  while from <= #text do
    local length, bad = utf8.len(text, from)
    local stop = length and #text or bad - 1
    parts[#parts + 1] = text:sub(from, stop):gsub(utf8.charpattern, function(c)
      local code = utf8.codepoint(c)
      if code < 0x20 or code == 0x7F then
        return lines and (c == "\n" or c == "\t") and c or ("\\x%02X"):format(code)
      elseif code >= 0x80 and code < 0xA0 or code == 0x200E or code == 0x200F or code >= 0x2028 and code <= 0x202E
        or code >= 0x2066 and code <= 0x2069 then
        return ("\\u{%X}"):format(code)
      end
    end)
    if bad then parts[#parts + 1] = ("\\x%02X"):format(text:byte(bad)) end
    from = stop + 2
  end
  return table.concat(parts)
end

--- The columns of the terminal at standard error; 80 if they are not known.
---@return integer
function show.columns()
  local size = io.popen("stty size <&2 2>/dev/null")
  local columns = size and math.tointeger(tonumber((size:read("a"):match("^%d+ (%d+)"))))
  if size then size:close() end
  return columns and columns > 0 and columns or 80
end

local function width_of(code) return code >= 0x1100 and (code < 0x2000 or code >= 0x2E80) and 2 or 1 end -- at most

--- The columns that a text without control characters needs at most.
---@param text string
---@return integer
function show.width(text)
  local sum = 0
  for _, code in utf8.codes(text) do sum = sum + width_of(code) end
  return sum
end

--- The beginning of a text that fits into so many columns.
---@param text string
---@param columns integer
---@return string
function show.cut(text, columns)
  local sum = 0
  for at, code in utf8.codes(text) do
    sum = sum + width_of(code)
    if sum > columns then return text:sub(1, at - 1) end
  end
  return text
end

---------------------------------------------------------------------------------------------------------- page table

local palette = { "31", "32", "33", "34", "35", "36", "91", "92", "93", "94", "95", "96" }

-- a, b, ... z, A, ... Z, then ? for the rest
local function letter(i)
  if i <= 26 then return string.char(96 + i) end
  return i <= 52 and string.char(64 + i - 26) or "?"
end

--- Shows each request as a row of its physical pages, and the pool as a map with a letter for each page. The legends
--- explain the marks that occur.
---@param allocator nibble.allocator
---@param requests nibble.request[]
---@param opts? {names?: string[], color?: boolean, utf8?: boolean, width?: integer}  names: what to call the requests
---@return string
function show.page_table(allocator, requests, opts)
  local s = style(opts)
  local names = opts and opts.names or {}
  local size, digits = allocator.page_size, #tostring(allocator.num_pages - 1)
  local lines, owner, levels, any_shared = {}, {}, {}, false
  local name_width, length_width = 0, 1
  for i, request in ipairs(requests) do
    name_width = math.max(name_width, #(names[i] or ""))
    length_width = math.max(length_width, #tostring(request.length))
  end
  local prefix = 2 + 2 + name_width + 1 + length_width + 10
  local per_line = math.max(1, (s.width - prefix) // (digits + 3))
  for i, request in ipairs(requests) do
    local paint = palette[(i - 1) % #palette + 1]
    local cells = {}
    for j, page in ipairs(request.pages) do
      local filled = math.min(math.max(request.length - (j - 1) * size, 0), size)
      local level = filled == size and 8 or math.min(filled * 8 // size + 1, 7)
      levels[level] = true
      local shared = allocator:references(page) > 1
      any_shared = any_shared or shared
      owner[page] = shared and "*" or s.paint(paint, letter(i))
      cells[j] = ("%" .. digits .. "d%s%s "):format(page, s.paint(paint, s.glyphs.levels[level]), shared and "*" or " ")
    end
    local name = names[i] or ""
    local head = ("  %s %s%s %" .. length_width .. "d tokens"):format(s.paint(paint, letter(i)), name,
      (" "):rep(name_width - #name), request.length)
    for first = 1, math.max(#cells, 1), per_line do
      if first > 1 then head = (" "):rep(prefix - 2) end
      local row = table.concat(cells, "", first, math.min(first + per_line - 1, #cells))
      lines[#lines + 1] = (head .. " " .. s.glyphs.line .. " " .. row):gsub("%s+$", "")
    end
  end

  local marks, part = {}, ""
  for level = 1, 7 do part = part .. (levels[level] and s.glyphs.levels[level] or "") end
  if levels[8] then marks[1] = s.glyphs.levels[8] .. " full" end
  if part ~= "" then marks[#marks + 1] = part .. " part full" end
  if any_shared then marks[#marks + 1] = "* shared" end
  table.insert(lines, 1, ("requests and their pages of %d tokens%s"):format(size,
    #marks > 0 and " (" .. table.concat(marks, ", ") .. ")" or ""))

  local used, reserved, others = allocator.num_pages - allocator.num_free, 0, 0
  local map = {}
  for page = 0, allocator.num_pages - 1 do
    local references = allocator:references(page)
    local mark = owner[page]
    if references == math.huge then
      mark, reserved, used = "-", reserved + 1, used - 1
    elseif references == 0 then
      mark = s.glyphs.free
    end
    if not mark then mark, others = "~", others + 1 end
    map[page + 1] = mark
  end
  lines[#lines + 1] = ("pool of %d pages: %d in use%s, %d free%s%s"):format(allocator.num_pages, used,
    others > 0 and (", %d of them by other requests (~)"):format(others) or "",
    allocator.num_free, allocator.num_free > 0 and " (" .. s.glyphs.free .. ")" or "",
    reserved > 0 and (", %d reserved (-)"):format(reserved) or "")
  local per_row = math.max(8, math.min(64, (s.width - digits - 5) // 8 * 8))
  for first = 1, #map, per_row do
    local row = table.concat(map, "", first, math.min(first + per_row - 1, #map))
    lines[#lines + 1] = ("  %" .. digits .. "d %s %s"):format(first - 1, s.glyphs.line, row)
  end
  return table.concat(lines, "\n")
end

--------------------------------------------------------------------------------------------------------------- block

local e2m1 = { [0] = 0, 0.5, 1, 1.5, 2, 3, 4, 6 }

--- Half a step of E2M1 at |y|, the largest error of rounding to the nearest code. Beyond 6 the value saturates.
---@param y number  an input divided by its block's scale and the global scale
---@return number
function show.half_step(y)
  y = math.abs(y)
  return y < 2 and 0.25 or y < 4 and 0.5 or 1.0
end

--- The codes and the scale byte of a block in a cache.
---@param data nibble.tensor  a data cache (K or V), NHD or HND
---@param sf nibble.tensor    its linear scales
---@param slot integer        counts from 0, as do head and block
---@param head integer
---@param block integer
---@param kv_layout? nibble.layout  default "NHD"
---@return integer[] codes    16
---@return integer scale_byte
function show.read_block(data, sf, slot, head, block, kv_layout)
  local size = data.shape[kv_layout == "HND" and 3 or 2]
  local page, entry = slot // size + 1, slot % size + 1
  local function row(t)
    t = t:select(1, page)
    return kv_layout == "HND" and t:select(1, head + 1):select(1, entry) or t:select(1, entry):select(1, head + 1)
  end
  local codes = {}
  for _, byte in ipairs({ row(data):narrow(1, block * 8 + 1, 8):bytes():byte(1, 8) }) do
    codes[#codes + 1] = byte & 15
    codes[#codes + 1] = byte >> 4
  end
  return codes, row(sf):narrow(1, block + 1, 1):bytes():byte()
end

--- Shows a block of 16 numbers: inputs, scale byte and its value, codes, decoded values, errors. By default, `codes`
--- and `scale_byte` are those that append would store. `global_scale` is the global decode scale, default 1.
---@param input number[]|nibble.tensor  16 numbers
---@param opts? {global_scale?: number, codes?: integer[], scale_byte?: integer, color?: boolean, utf8?: boolean}
---@return string
function show.block(input, opts)
  local reference = require "nibble.reference"
  local s = style(opts)
  opts = opts or {}
  local values = {}
  for i = 1, 16 do
    values[i] = input[i]
    if type(values[i]) ~= "number" then
      error(("show.block: input: expected 16 numbers, got %s at %d"):format(tostring(values[i]), i), 2)
    end
  end
  local g = reference.f32(opts.global_scale or 1)
  local scale_byte, codes = opts.scale_byte, opts.codes
  if not codes or not scale_byte then scale_byte, codes = reference.quantize_block(values, g) end
  local scale = reference.decode(scale_byte, "float8_e4m3fn")
  local unit = scale * g
  local lines = {
    numbers.format("scale byte 0x%02X = %.9g, global scale %.9g: codes count in units of %.6g", scale_byte, scale, g,
      unit),
    ("  %2s %13s %6s %6s %13s %13s  error in half steps"):format("", "input", "code", "E2M1", "decoded", "error"),
  }
  for i = 1, 16 do
    local code = codes[i]
    local value = (code >= 8 and -1.0 or 1.0) * e2m1[code & 7]
    local difference = value * unit - values[i]
    local relative = unit ~= 0 and difference / (show.half_step(values[i] / unit) * unit) or 0
    -- A bar from the middle; for an error of more than half a step (saturation) it ends in an arrow.
    local steps = relative == relative and math.min(math.floor(math.abs(relative) * 8 + 0.5), 9) or 9
    local bar = s.glyphs.bar:rep(math.min(steps, 8))
    local left, right = (" "):rep(9), ""
    if relative < 0 then
      left = (steps == 9 and s.glyphs.left or " ") .. (" "):rep(8 - math.min(steps, 8)) .. bar
    elseif relative > 0 then
      right = bar .. (steps == 9 and s.glyphs.right or "")
    end
    local tint = math.abs(relative) > 1 and "31" or "36"
    lines[#lines + 1] = numbers.format("  %2d %13.6g %6X %6.1f %13.6g %13.6g  ", i - 1, values[i], code, value,
      value * unit,
      difference) .. s.paint(tint, left) .. s.glyphs.line .. s.paint(tint, right)
  end
  return table.concat(lines, "\n")
end

----------------------------------------------------------------------------------------------------------- histogram

---@class nibble.histogram_options
---@field bins? integer   default 16
---@field low? number     default: the least finite value
---@field high? number    default: the largest finite value
---@field title? string   a first line
---@field color? boolean
---@field utf8? boolean
---@field width? integer

--- Shows a histogram of numbers. Values outside low..high count in the outermost bins; NaN has its own line.
---@param list number[]|nibble.tensor  a list, or a 1-D tensor
---@param opts? nibble.histogram_options
---@return string
function show.histogram(list, opts)
  local s = style(opts)
  opts = opts or {}
  if type(list) ~= "table" then list = list:totable() end
  local bins = opts.bins or 16
  local low, high = opts.low, opts.high
  local least, largest, nans = math.huge, -math.huge, 0
  for _, x in ipairs(list) do
    if x ~= x then nans = nans + 1 end
    if x < least and x > -math.huge then least = x end
    if x > largest and x < math.huge then largest = x end
  end
  if least > largest then least, largest = 0, 0 end
  low, high = low or least, high or largest
  if high <= low then high = low + 1 end
  local counts, most = {}, 1
  for i = 1, bins do counts[i] = 0 end
  for _, x in ipairs(list) do
    if x == x then
      -- Compare as floats first, since an infinite quotient cannot become an integer.
      local at = (x - low) / (high - low) * bins
      local bin = at >= bins and bins or at < 0 and 1 or math.floor(at) + 1
      counts[bin] = counts[bin] + 1
      most = math.max(most, counts[bin])
    end
  end
  local lines = { opts.title and show.visible(opts.title) }
  local digits = #tostring(most)
  local room = math.max(8, s.width - 32 - digits)
  for i = 1, bins do
    local from, to = low + (high - low) * (i - 1) / bins, low + (high - low) * i / bins
    local eighths = math.floor(counts[i] / most * room * 8 + 0.5)
    if counts[i] > 0 then eighths = math.max(eighths, 1) end
    local bar
    if s.utf8 then
      local rest = eighths % 8
      bar = ("█"):rep(eighths // 8) .. (rest > 0 and utf8.char(0x2590 - rest) or "") -- U+258F (one eighth) .. U+2589
    else
      bar = ("#"):rep((eighths + 7) // 8)
    end
    lines[#lines + 1] = (numbers.format("  %9.3g .. %-9.3g %" .. digits .. "d %s ", from, to, counts[i], s.glyphs.line)
      .. s.paint("36", bar)):gsub("%s+$", "")
  end
  if nans > 0 then lines[#lines + 1] = ("  NaN: %d"):format(nans) end
  return table.concat(lines, "\n")
end

--- Pictures as SVG files: show.svg.page_table, graph, error_map, curve, save (nibble.svg).
show.svg = require "nibble.svg"

return show
