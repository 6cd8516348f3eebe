-- nibble.report: one page that needs nothing else, with everything that the record has, escaped.
local report = require "nibble.report"
local process = require "spec.support.runtime_process"

local VOID = { meta = true, br = true }

-- Checks that tags are balanced; returns the texts between them, one after another.
local function texts_of(html)
  local open, list = {}, {}
  assert.equal("<!DOCTYPE html>", html:sub(1, 15))
  for text, close, name, rest in html:sub(16):gmatch("([^<]*)<(/?)([%w:]+)([^>]*)>") do
    list[#list + 1] = text:match("%S") and text or nil
    if close == "/" then
      assert.equal(name, table.remove(open))
    elseif not VOID[name] and rest:sub(-1) ~= "/" then
      open[#open + 1] = name
    end
  end
  assert.equal(0, #open)
  return table.concat(list, "\n")
end

local function assert_self_contained(html)
  for _, pattern in ipairs { "<script", "<link", "<img", "<iframe", "@import", "url%(", "%ssrc=", "%son%a+=" } do
    assert.is_nil(html:find(pattern), pattern)
  end
  for reference in html:gmatch("https?://[^\"' <]*") do
    assert.is_truthy(reference:find("www.w3.org/", 1, true), reference) -- names of XML, which nobody fetches
  end
  assert.is_truthy(html:find("default-src 'none'", 1, true), "what would be fetched all the same is refused")
end

local full = {
  title = "a run", name = "decode", ok = false, message = "step 3: byte 7", command = "nibble scenario decode --seed 5",
    device = "cpu",
  device_description = "a processor", version = "0.1.0", seed = 5, steps = 2, compared = 12500000, notes = { "a note" },
  parameters = { { name = "page_size", value = 4, default = 16, help = "tokens a page" },
    { name = "layout", value = "HND" } },
  series = { { name = "tokens", unit = "tokens", values = { 5, 7 } }, { name = "load", values = { false, 0.25 } } },
  caches = { {
    name = "cache", num_pages = 4, page_size = 4, kv_layout = "HND", snapshots = {
      { step = 1, requests = { { id = 1, length = 5, pages = { 1, 3 } } }, references = { -1, 1, 0, 1 } },
      { step = 2, requests = { { id = 1, length = 6, pages = { 1, 3 } } }, references = { -1, 1, 0, 1 } },
    },
  } },
  graphs = { { key = "batch of 4", dot = 'digraph g { a [label="1 append"]; a -> b; }',
    captures = 1, updates = 2, rebuilt = 3, replays = 4 } },
  errors = { {
    layer = "layer 0", kv = "K",
    heads = { { worst = 0.75, rms = 9.5, max = 0.125, zero = 0.25, saturated = 0.0625, count = 32, underflow = 0 } },
    map = { first_token = 0, values = { { { 1, 2 }, {}, { 3, 4 } } } },
  } },
  histogram = { low = -1, high = 1, counts = { 3, 9 } },
  phases = { { name = "step", calls = 2, ms = 5, bytes = 2000000 } }, ops = { { name = "append", count = 12 } },
  reports = { { text = "check: race: two writes\n  here" }, "check: second" },
}

describe("report.html #quick", function()
  it("has what the record has", function()
    local html = report.html(full)
    assert_self_contained(html)
    local text = texts_of(html)
    for _, words in ipairs {
      "a run", "FAILED", "step 3: byte 7", "nibble scenario decode --seed 5", "cpu (a processor)", "0.1.0", "12.5 MB",
        "a note",
      "page_size", "tokens a page", "HND", "load", "0.25", "page 3, step 2: request 1, 2 of 4 tokens", "batch of 4",
      "captures 1, updates 2, rebuilt 3, replays 4", "1 append", "layer 0 K", "9.50 %", "0.7500", "0.125", "25.00 %",
        "6.25 %",
      "head 0, block 1, token 2: 4", "-1 to 0", "step", "2.500", "2.00", "append", "12", "check: race: two writes",
        "check: second",
    } do
      assert.is_truthy(text:find(words, 1, true), words)
    end
    assert.is_truthy(html:find('<td class="n changed">4</td>', 1, true),
      "a parameter that is not its default stands out")
  end)

  it("needs a title and nothing more", function()
    local html = report.html { title = "alone" }
    assert_self_contained(html)
    assert.equal("alone\nalone", (texts_of(html):gsub(":root.*summary{cursor:pointer}\n", "")))
    for _, record in ipairs { {}, { title = 3 } } do
      assert.has_error(function() report.html(record) end, "report: record: expected a table with a title, got none")
    end
    assert.has_error(function() report.html() end, "report: record: expected a table with a title, got nil")
  end)

  it("tells checked mode that was off, that found nothing, and that found something apart", function()
    assert.is_nil(report.html({ title = "t" }):find("Checked mode", 1, true))
    assert.is_truthy(report.html({ title = "t", reports = {} }):find("No reports", 1, true))
    assert.is_nil(report.html({ title = "t", reports = { "x" } }):find("No reports", 1, true))
  end)

  it("escapes every text", function()
    local evil = "<script>\"&'\xff\1"
    local function poison(value)
      if type(value) == "string" then return evil end
      if type(value) ~= "table" then return value end
      local copy = {}
      for key, inner in pairs(value) do copy[key] = poison(inner) end
      return copy
    end
    local html = report.html(poison(full))
    assert_self_contained(html)
    texts_of(html)
    assert.is_truthy(utf8.len(html))
    assert.is_nil(html:find("\1", 1, true))
    local _, count = html:gsub("&lt;script&gt;&quot;&amp;&#39;%?%?", "")
    assert.is_true(count > 25, tostring(count))
  end)

  it("has dark colours for the screen, and prints light", function()
    local html = report.html(full)
    assert.is_truthy(html:find("@media screen and (prefers-color-scheme:dark)", 1, true))
    assert.is_truthy(html:find("@media print", 1, true))
  end)
end)

describe("report.write #quick", function()
  it("writes the page, or says why not", function()
    local path = os.tmpname()
    assert.is_true(report.write(path, full))
    assert.equal(report.html(full), process.read(path))
    os.remove(path)
    local ok, message = report.write("/nonexistent/folder/x.html", full)
    assert.is_nil(ok)
    assert.matches("/nonexistent/folder/x.html", message)
  end)
end)

describe("nibble scenario NAME --report", function()
  it("writes the page of the run", function()
    local path = os.tmpname()
    local result =
      process.run(("%s scenario decode --steps 3 --requests 3 --random --tokens 40 --check --report %s"):format(
      process.quote(process.command()), path))
    assert.same({ 0, "" }, { result.status, result.stderr })
    local html = process.read(path)
    os.remove(path)
    assert_self_contained(html)
    local text = texts_of(html)
    for _, words in ipairs { "passed", "scenario decode", "No reports", "page 0, steps 1 to 3: reserved",
      "each block of layer 0 K",
      "captures 1" } do
      assert.is_truthy(text:find(words, 1, true), words)
    end
    assert.is_truthy(html:find(process.has("dot") and "<polygon" or "digraph", 1, true))
  end)
end)
