--- Writes a report of a run as one HTML page with pictures and numbers. The page needs no other files, supports light
--- and dark mode, and can be printed. `nibble scenario NAME --report FILE` writes one.
--
--   local report = require "nibble.report"
--   local ok, message = report.write("run.html", { title = "decode", ok = true, command = "nibble ..." })
--
-- Only the title of the record (nibble.report_record below) is required. Empty sections are left out.

local numbers = require "nibble.numbers"
local svg = require "nibble.svg"

local report = {}

---@class nibble.report_record
---@field title string
---@field name? string
---@field ok? boolean                 nil: no verdict
---@field message? string             what failed
---@field command? string             the command line that repeats the run
---@field device? string
---@field device_description? string
---@field version? string
---@field seed? integer
---@field steps? integer
---@field compared? integer           bytes that were compared
---@field notes? string[]
---@field parameters? {name: string, value: any, default?: any, help?: string}[]
---@field series? {name: string, unit?: string, values: (number|false)[]}[]  a value for each step
---@field caches? table[]             {name, num_pages, page_size, snapshots: nibble.snapshot[], and numbers by name}
---@field graphs? table[]             {key, dot or graph, captures, updates, rebuilt, replays}
---@field errors? {layer: string, kv: string, heads: nibble.head_errors[], map?: nibble.report_map}[]
---@field histogram? {low: number, high: number, counts: integer[]}  of all errors in half steps
---@field phases? {name: string, calls: integer, ms: number, bytes?: integer}[]
---@field ops? {name: string, count: integer}[]
---@field reports? (string|{text: string})[]  of checked mode; {} if there are none, nil if it was off

---@class nibble.report_map  {first_token: integer, values: rms errors in percent of [head][token][block]}

local STYLE = [[
:root{color-scheme:light dark;--text:#1f2328;--muted:#59636e;--border:#d1d9e0;--page:#fff;--panel:#f6f8fa;--good:#1a7f37;
--bad:#cf222e;--bar:#8250df}
@media screen and (prefers-color-scheme:dark){:root{--text:#e6edf3;--muted:#9198a1;--border:#3d444d;--page:#0d1117;
--panel:#151b23;--good:#3fb950;--bad:#f85149;--bar:#ab7df8}}
@media print{:root{color-scheme:light}body{max-width:none;padding:0}h2,h3,h3+p{break-after:avoid}svg,tr{break-inside:avoid}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:24px;background:var(--page);color:var(--text);font:14px/1.45 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 8px;padding-top:12px;border-top:1px solid var(--border)}
h3{font-size:14px;margin:16px 0 6px}p{margin:4px 0}.muted{color:var(--muted)}
.verdict{font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
pre{background:var(--panel);border:1px solid var(--border);border-radius:6px;padding:8px 10px;margin:6px 0;overflow-x:auto;
white-space:pre-wrap;overflow-wrap:anywhere;font:12px/1.4 ui-monospace,monospace}
table{border-collapse:collapse;margin:6px 0;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--border);padding:3px 12px 3px 0;text-align:left;vertical-align:top}
th{font-weight:600;white-space:nowrap}td.n,th.n{text-align:right}td.changed{font-weight:600}
.scroll{overflow-x:auto}.curves{display:flex;flex-wrap:wrap;gap:12px 24px}
.bar{display:inline-block;height:9px;background:var(--bar);border-radius:2px;min-width:1px;print-color-adjust:exact}
@media screen and (max-width:900px){.scroll svg{max-width:none!important}}
.graph svg{max-width:100%;height:auto}.graph text{fill:var(--text)}.graph path,.graph ellipse,.graph polygon{stroke:var(--muted)}
.graph polygon[fill=black]{fill:var(--muted)}
svg rect{print-color-adjust:exact}
summary{cursor:pointer}]]

local escape = svg.escape

local function text_of(value)
  if math.type(value) == "float" then return numbers.format("%.6g", value) end
  return tostring(value)
end

-- The pieces of the page so far.
local page = {}
page.__index = page

function page:add(format, ...) self[#self + 1] = numbers.format(format, ...) end

-- Adds a table. Columns are {name, is_number}; a cell is text, or {html = ...}.
function page:table(columns, rows)
  self:add('<div class="scroll"><table><thead><tr>')
  for _, column in ipairs(columns) do self:add("<th%s>%s</th>", column[2] and ' class="n"' or "", escape(column[1])) end
  self:add("</tr></thead><tbody>")
  for _, row in ipairs(rows) do
    local cells = {}
    for i, column in ipairs(columns) do
      local cell, class = row[i], column[2] and "n" or nil
      if row.changed and i == 2 then class = class and class .. " changed" or "changed" end
      local html = type(cell) == "table" and cell.html or cell ~= nil and escape(text_of(cell)) or ""
      cells[i] = ("<td%s>%s</td>"):format(class and (' class="%s"'):format(class) or "", html)
    end
    self:add("<tr>%s</tr>", table.concat(cells))
  end
  self:add("</tbody></table></div>")
end

local function has(list) return type(list) == "table" and #list > 0 end

local function bar(share)
  return numbers.format('<span class="bar" style="width:%.1fpx"></span>', 120 * math.max(0, math.min(1, share)))
end

------------------------------------------------------------------------------------------------------------ sections

local function header(out, record)
  out:add("<header><h1>%s</h1>", escape(record.title))
  if record.ok ~= nil then
    out:add('<p class="verdict %s">%s</p>', record.ok and "good" or "bad", record.ok and "passed" or "FAILED")
  end
  if record.message then out:add("<pre>%s</pre>", escape(record.message)) end
  local facts = {}
  local function fact(name, value) facts[#facts + 1] = value ~= nil and { name, value } or nil end
  fact("scenario", record.name)
  local about = record.device_description
  fact("device", record.device and record.device .. (about and (" (%s)"):format(about) or ""))
  fact("steps", record.steps)
  fact("seed", record.seed)
  fact("compared", record.compared and numbers.format("%.1f MB, every byte", record.compared / 1e6))
  fact("nibble", record.version)
  if #facts > 0 then out:table({ { "run" }, { "" } }, facts) end
  for _, note in ipairs(record.notes or {}) do out:add('<p class="muted">%s</p>', escape(note)) end
  if record.command then
    out:add('<p>The command that repeats it:</p><pre id="command">%s</pre>', escape(record.command))
  end
  out:add("</header>")
end

local function parameters(out, record)
  if not has(record.parameters) then return end
  local rows = {}
  for i, parameter in ipairs(record.parameters) do
    local changed = parameter.default ~= nil and parameter.value ~= parameter.default
    rows[i] = { parameter.name, parameter.value, parameter.default, parameter.help, changed = changed }
  end
  out:add("<section><h2>Parameters</h2>")
  out:table({ { "parameter" }, { "value", true }, { "default", true }, { "" } }, rows)
  out:add("</section>")
end

local function findings(out, record)
  if not record.reports then return end
  out:add("<section><h2>Checked mode</h2>")
  if #record.reports == 0 then
    out:add('<p class="good">No reports: all that the run read had been written, in order, and in its own pages.</p>')
  end
  for _, found in ipairs(record.reports) do
    out:add('<pre class="bad">%s</pre>', escape(type(found) == "table" and found.text or found))
  end
  out:add("</section>")
end

local function series(out, record)
  if not has(record.series) then return end
  out:add('<section><h2>Over the steps</h2><div class="curves">')
  local columns, rows, most = { { "step", true } }, {}, 0
  for i, list in ipairs(record.series) do
    local said = list.unit and list.name:find(list.unit, 1, true) -- "pages in use": pages
    out:add("%s", svg.curve(list.values, { title = list.name, unit = not said and list.unit or nil }))
    columns[i + 1] = { list.name, true }
    most = math.max(most, #list.values)
  end
  for step = 1, most do
    rows[step] = { step }
    for i, list in ipairs(record.series) do rows[step][i + 1] = list.values[step] or "" end
  end
  out:add("</div><details><summary>as a table</summary>")
  out:table(columns, rows)
  out:add("</details></section>")
end

local function caches(out, record)
  if not has(record.caches) then return end
  out:add("<section><h2>Pages over the steps</h2>")
  for _, cache in ipairs(record.caches) do
    local facts = {}
    for name, value in pairs(cache) do
      if type(value) ~= "table" and name ~= "name" then facts[#facts + 1] = ("%s %s"):format(name, text_of(value)) end
    end
    table.sort(facts)
    out:add("<h3>%s</h3><p class=\"muted\">%s</p>", escape(cache.name or "cache"), escape(table.concat(facts, ", ")))
    if has(cache.snapshots) then
      out:add('<div class="scroll">%s</div>', svg.page_table(cache, cache.snapshots, { width = 1020 }))
    end
  end
  out:add("</section>")
end

local function graphs(out, record)
  if not has(record.graphs) then return end
  out:add("<section><h2>Graphs</h2>")
  for _, graph in ipairs(record.graphs) do
    local counts = {}
    for _, name in ipairs { "captures", "updates", "rebuilt", "replays" } do
      if graph[name] then counts[#counts + 1] = ("%s %d"):format(name, graph[name]) end
    end
    out:add("<h3>%s</h3><p class=\"muted\">%s</p>", escape(graph.key or graph.name or "graph"),
      escape(table.concat(counts, ", ")))
    local picture, format = svg.graph(graph.dot or graph.graph)
    if format == "svg" then
      out:add('<div class="graph scroll">%s</div>', picture)
    else
      out:add("<p class=\"muted\">Graphviz is not installed; this is the graph in its language:</p><pre>%s</pre>",
        escape(picture))
    end
  end
  out:add("</section>")
end

local function histogram(out, data)
  local rows, most = {}, 1
  for _, count in ipairs(data.counts) do most = math.max(most, count) end
  for i, count in ipairs(data.counts) do
    local width = (data.high - data.low) / #data.counts
    rows[i] = { numbers.format("%.3g to %.3g", data.low + (i - 1) * width, data.low + i * width), count,
      { html = bar(count / most) } }
  end
  out:add("<h3>All errors, in half steps</h3>")
  out:table({ { "error" }, { "elements", true }, { "" } }, rows)
end

local function errors(out, record)
  if not has(record.errors) then return end
  out:add("<section><h2>Quantization error</h2><p class=\"muted\">rms: of the errors, in percent of the inputs' rms. "
    .. "Worst: in half "
    .. "steps of E2M1 at the block's scale; to the nearest code it is at most 1.</p>")
  local rows, most = {}, 1e-300
  for _, side in ipairs(record.errors) do
    for _, head in ipairs(side.heads) do most = math.max(most, head.rms) end
  end
  local function percent(share) return share and numbers.format("%.2f %%", 100 * share) end
  local function name_of(side) return side.layer .. " " .. side.kv end
  for _, side in ipairs(record.errors) do
    for h, head in ipairs(side.heads) do
      rows[#rows + 1] = { h == 1 and name_of(side) or "", h - 1, numbers.format("%.2f %%", head.rms),
        { html = bar(head.rms / most) },
        numbers.format("%.4f", head.worst), head.max and numbers.format("%.4g", head.max), percent(head.zero),
          percent(head.saturated) }
    end
  end
  out:table({ { "" }, { "head", true }, { "rms", true }, { "" }, { "worst", true }, { "largest error", true },
    { "codes 0", true },
    { "codes \u{b1}6", true } }, rows)
  if record.histogram then histogram(out, record.histogram) end
  local smallest, largest = math.huge, 0
  for _, side in ipairs(record.errors) do
    for _, head in ipairs(side.map and side.map.values or {}) do
      for _, row in ipairs(head) do
        for _, x in ipairs(row) do
          if x < math.huge then smallest, largest = math.min(smallest, x), math.max(largest, x) end
        end
      end
    end
  end
  for i, side in ipairs(record.errors) do -- all in the same shades
    if side.map and largest > 0 then
      out:add("<details%s><summary>each block of %s</summary><div class=\"scroll\">%s</div></details>", i <= 2
        and " open" or "",
        escape(name_of(side)), svg.error_map(side.map.values,
          { first_token = side.map.first_token, least = smallest, most = largest, width = 1020 }))
    end
  end
  out:add("</section>")
end

local function times(out, record)
  if has(record.phases) then
    local rows = {}
    for i, phase in ipairs(record.phases) do
      rows[i] = { phase.name, phase.calls, numbers.format("%.2f", phase.ms),
        numbers.format("%.3f", phase.ms / math.max(phase.calls, 1)), phase.bytes
          and numbers.format("%.2f", phase.bytes / 1e6) or "" }
    end
    out:add("<section><h2>Times on the device</h2>")
    out:table({ { "phase" }, { "calls", true }, { "ms total", true }, { "ms per call", true }, { "MB moved", true } },
      rows)
    out:add("</section>")
  end
  if has(record.ops) then
    local rows = {}
    for i, op in ipairs(record.ops) do rows[i] = { op.name, op.count } end
    out:add("<section><h2>Operations</h2>")
    out:table({ { "operation" }, { "calls", true } }, rows)
    out:add("</section>")
  end
end

---------------------------------------------------------------------------------------------------------------- all

--- The page as text.
---@param record nibble.report_record
---@return string
function report.html(record)
  if type(record) ~= "table" or type(record.title) ~= "string" then
    error(("report: record: expected a table with a title, got %s"):format(type(record) == "table" and "none"
      or type(record)), 0)
  end
  local out = setmetatable({}, page)
  out:add(
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    .. '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">'
    .. "<title>%s</title><style>%s</style></head>\n<body>", escape(record.title), STYLE)
  for _, section in ipairs { header, findings, parameters, series, caches, graphs, errors, times } do
    section(out, record)
  end
  out:add("</body></html>\n")
  return table.concat(out, "\n")
end

--- Writes the page. Returns `nil, message` if the file cannot be written.
---@param path string
---@param record nibble.report_record
---@return boolean?
---@return string? message
function report.write(path, record)
  return svg.save(path, report.html(record))
end

return report
