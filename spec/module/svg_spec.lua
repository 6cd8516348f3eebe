-- nibble.svg: pictures are well-formed, say what they show, and stay bounded.
local pages = require "nibble.pages"
local svg = require "nibble.svg"
local process = require "spec.support.runtime_process"

-- Checks that a text is one XML element with balanced tags and quoted attributes; returns its tags with their
-- attributes.
local function parse(text)
  local tags, open, at = {}, {}, 1
  while true do
    local from, to, close, name, rest = text:find("<(/?)([%w:]+)(.-)>", at)
    local between = text:sub(at, (from or #text + 1) - 1)
    assert.is_nil(between:find("[<>]"), between)
    assert.is_nil(between:gsub("&%a+;", ""):gsub("&#%d+;", ""):find("&"), between)
    if not from then break end
    if #open == 0 and #tags > 0 then error("more than one element: " .. text:sub(from, to)) end
    if close == "/" then
      assert.equal(name, table.remove(open))
    else
      local attributes = {}
      local left = rest:gsub('%s+([%w:-]+)="([^"<]*)"', function(key, value)
        assert.is_nil(attributes[key])
        attributes[key] = value
        return ""
      end)
      assert.is_truthy(left:match("^%s*/?$"), rest)
      tags[#tags + 1] = { name = name, attributes = attributes, text = text:sub(to + 1):match("^[^<]*") }
      if not rest:find("/$") then open[#open + 1] = name end
    end
    at = to + 1
  end
  assert.equal(0, #open)
  return tags
end

local function titles(tags)
  local list = {}
  for _, tag in ipairs(tags) do
    if tag.name == "title" then list[#list + 1] = tag.text end
  end
  return list
end

local function count(list, text)
  local n = 0
  for _, item in ipairs(list) do n = n + (item == text and 1 or 0) end
  return n
end

local function history()
  local allocator = pages.allocator { num_pages = 8, page_size = 4, reserved = 1 }
  local a = allocator:allocate(6)
  local snapshots, requests = {}, { a }
  for step = 1, 6 do
    if step == 3 then requests[2] = allocator:fork(a, 4) end
    if step == 5 then allocator:free(table.remove(requests, 1)) end
    allocator:append(requests[#requests], 1)
    for i, request in ipairs(requests) do request.id = request.id or ("r%d"):format(i) end
    snapshots[step] = svg.snapshot(allocator, requests, step)
  end
  return allocator, snapshots
end

describe("svg.page_table #quick", function()
  it("has each page's owners and filling at each step, equal neighbours as one", function()
    local allocator, snapshots = history()
    local tags = parse(svg.page_table(allocator, snapshots, { title = "pages" }))
    local list = titles(tags)
    -- a (r1) holds pages 1 and 2 from the start: 6 + 1 tokens at step 1, full at 2. Its fork shares page 1 until a
    -- goes.
    for text, times in pairs {
      ["page 0, steps 1 to 6: reserved"] = 1, ["page 1, steps 1 to 2: request r1, 4 of 4 tokens"] = 1,
      ["page 1, steps 3 to 4: request r1, r2 (shared), 4 of 4 tokens"] = 2, -- a band for each
      -- pale and solid
      ["page 1, steps 5 to 6: request r2, 4 of 4 tokens"] = 1, ["page 2, step 1: request r1, 3 of 4 tokens"] = 2,
      ["page 2, steps 2 to 4: request r1, 4 of 4 tokens"] = 1, ["page 3, step 3: request r2, 1 of 4 tokens"] = 2,
      ["page 3, step 6: request r2, 4 of 4 tokens"] = 1,
    } do
      assert.equal(times, count(list, text), text .. "\n" .. table.concat(list, "\n"))
    end
    for _, text in ipairs(list) do assert.is_nil(text:find("page [4567]"), text) end
  end)

  it("keeps a request's colour, and gives others another", function()
    local allocator, snapshots = history()
    local classes = {}
    local text = svg.page_table(allocator, snapshots)
    for class, title in text:gmatch('<rect class="(q%d+)[^"]*"[^>]*><title>([^<]*)') do
      local owners = title:match("request (.-),? ?%d+ of") or ""
      if not title:find("shared", 1, true) then
        classes[owners] = classes[owners] or class
        assert.equal(classes[owners], class)
      end
    end
    assert.is_truthy(classes["r1"] and classes["r2"] and classes["r1"] ~= classes["r2"])
    assert.is_truthy(text:find(".nib ." .. classes["r1"] .. "{fill:", 1, true))
  end)

  it("places cells by page and step", function()
    local allocator, snapshots = history()
    local tags = parse(svg.page_table(allocator, snapshots))
    local x, y = {}, {}
    for i, tag in ipairs(tags) do
      local page, from = (tag.name == "title" and tag.text or ""):match("^page (%d+), steps? (%d+)")
      local part = page and tags[i - 1].attributes.class:find("part", 1, true)
      if page and not part and not tag.text:find("shared", 1, true) and tag.text:find("4 of 4", 1, true) then
        y[tonumber(page)], x[tonumber(from)] = tonumber(tags[i - 1].attributes.y), tonumber(tags[i - 1].attributes.x)
      end
    end
    assert.is_true(y[1] < y[2] and y[2] < y[3] and math.abs(y[2] - y[1] - (y[3] - y[2])) < 0.05)
    assert.is_true(x[1] < x[2] and x[2] < x[5] and math.abs((x[5] - x[2]) - 3 * (x[2] - x[1])) < 0.1)
  end)

  it("escapes what it is told", function()
    local allocator = pages.allocator { num_pages = 2, page_size = 4 }
    local request = allocator:allocate(3)
    request.id = "<b>\"&'\1\xff"
    local text = svg.page_table(allocator, { svg.snapshot(allocator, { request }, "</svg>") },
      { title = "a < b & \"c\"" })
    local tags = parse(text)
    assert.equal("a &lt; b &amp; &quot;c&quot;", tags[1].attributes["aria-label"])
    assert.equal(2,
      count(titles(tags), "page 0, step &lt;/svg&gt;: request &lt;b&gt;&quot;&amp;&#39;??, 3 of 4 tokens"))
  end)

  it("stays bounded, and says what is left out", function()
    local allocator = pages.allocator { num_pages = 5000, page_size = 2 }
    local request, snapshots = allocator:allocate(1), {}
    for step = 1, 1000 do
      allocator:append(request, 2)
      snapshots[step] = svg.snapshot(allocator, { request }, step)
    end
    local text = svg.page_table(allocator, snapshots, { max_steps = 50, max_pages = 20 })
    parse(text)
    assert.is_truthy(text:find("50 of 1000 steps; 20 of 5000 pages", 1, true))
    assert.is_true(#text < 100000)
    assert.is_truthy(text:find(">1000</text>", 1, true) or text:find("to 1000", 1, true), "the last step is there")
  end)

  it("draws nothing as nothing, and refuses what is no list", function()
    parse(svg.page_table({ num_pages = 3, page_size = 1 }, {}))
    assert.has_error(function() svg.page_table(3, {}) end,
      "svg.page_table: pool: expected a table with num_pages and page_size, got number")
    assert.has_error(function() svg.page_table({ num_pages = 3, page_size = 1 }) end,
      "svg.page_table: snapshots: expected a list of snapshots, got nil")
  end)

  it("is also show.svg", function()
    assert.equal(svg, require("nibble.show").svg)
  end)
end)

describe("svg.graph #quick", function()
  local nibble = require "nibble"
  local function capture()
    local t = nibble.zeros(4)
    return nibble.stream():capture(function()
      t:fill(1)
      t:copy(nibble.empty(4):fill(2))
    end)
  end

  it("draws a captured graph where there is Graphviz", function()
    local text, format = svg.graph(capture())
    if not process.has("dot") then
      assert.equal("dot", format)
      pending("Graphviz is not installed")
      return
    end
    assert.equal("svg", format)
    local _, nodes = text:gsub('class="node"', "")
    assert.equal(3, nodes)
    assert.matches("^<svg", text)
  end)

  it("is DOT text where there is none", function()
    local graph = capture()
    local code = ([[
      local svg = require "nibble.svg"
      local text, format = svg.graph(%q)
      io.write(format, "\n", text)
    ]]):format(graph:dot())
    local command = process.sanitized() and process.command() or process.run("command -v lua5.4").stdout:match("%S+")
    local result = process.script(code, { before = "PATH=/nonexistent", command = command })
    assert.same({ 0, "dot\n" .. graph:dot() }, { result.status, result.stdout })
  end)

  it("gives a text back that dot does not read", function()
    assert.same({ "no graph", "dot" }, { svg.graph("no graph") })
    assert.has_error(function() svg.graph(3) end, "svg.graph: graph: expected a graph or DOT text, got number")
  end)
end)

describe("svg.error_map #quick", function()
  it("has a cell for each token and block, with its value", function()
    local list = titles(parse(svg.error_map({ { { 1, 9 }, { 5, false }, { 0 / 0, 9 } },
      { { 2, 2 }, { 2, 2 }, { 2, 2 } } },
      { title = "errors", first_token = 10 })))
    table.sort(list)
    assert.same({ "head 0, block 0, token 10: 1", "head 0, block 0, token 11: 5", "head 0, block 1, token 10: 9",
      "head 0, block 1, token 12: 9", "head 1, block 0, tokens 10 to 12: up to 2",
        "head 1, block 1, tokens 10 to 12: up to 2" }, list)
  end)

  it("has darker shades for larger values, the darkest for `most` and above", function()
    local function shades(opts)
      local found = {}
      for level, title in svg.error_map({ { { 0 }, { 4.9 }, { 10 }, { 30 } } },
        opts):gmatch('class="h(%d)"[^>]*><title>([^<]*)') do
        found[title:match("tokens? (%d+)")] = tonumber(level)
      end
      return found
    end
    assert.same({ ["0"] = 0, ["1"] = 1, ["2"] = 3, ["3"] = 8 }, shades {})
    assert.same({ ["0"] = 0, ["1"] = 4, ["2"] = 8 }, shades { most = 10 }) -- 10 and 30 are one rectangle
  end)

  it("groups tokens when there are many, as the worst of each group", function()
    local head = {}
    for t = 1, 2000 do head[t] = { t == 1234 and 50 or 1 } end
    local text = svg.error_map({ head })
    parse(text)
    assert.is_truthy(text:find("head 0, block 0, tokens 1233 to 1241: up to 50", 1, true))
    assert.is_truthy(text:find("a column is the worst of 9 tokens", 1, true))
    assert.is_true(#text < 20000)
  end)

  it("takes no heads, no tokens, and zeros", function()
    parse(svg.error_map {})
    parse(svg.error_map { {}, {} })
    assert.equal("head 0, block 0, tokens 0 to 1: up to 0", titles(parse(svg.error_map { { { 0 }, { 0 } } }))[1])
  end)
end)

describe("svg.curve #quick", function()
  it("leaves gaps where there is no value", function()
    local _, curves = svg.curve({ 1, 2, false, 4, 0 / 0, math.huge, 3, 3 }):gsub('class="curve"', "")
    assert.equal(3, curves)
  end)

  it("says its range, and where there is nothing, nothing", function()
    local tags = parse(svg.curve({ 0, 12.5, -3 }, { title = "x & y", unit = "ms" }))
    local texts = {}
    for _, tag in ipairs(tags) do texts[tag.text] = tag.name == "text" or nil end
    for _, text in ipairs { "12.5", "-3", "ms over 3 steps", "x &amp; y" } do assert.is_true(texts[text], text) end
    parse(svg.curve {})
    parse(svg.curve { false, false })
    parse(svg.curve { 0 })
  end)
end)

describe("svg.save #quick", function()
  it("writes a file, or says why not", function()
    local path = os.tmpname()
    assert.is_true(svg.save(path, "text\n"))
    assert.equal("text\n", process.read(path))
    os.remove(path)
    local ok, message = svg.save("/nonexistent/folder/x.svg", "text")
    assert.is_nil(ok)
    assert.matches("/nonexistent/folder/x.svg", message)
    ok, message = svg.save("/dev/full", ("x"):rep(100000))
    assert.is_nil(ok)
    assert.matches("/dev/full", message)
  end)
end)
