-- In a process with a decimal comma (a host's setlocale) every number that is written, and read back, is what it is
-- without.
local numbers = require("nibble.numbers")
local process = require("spec.support.runtime_process")

-- glibc's file of LC_NUMERIC as localedef writes it, so that no locale has to be installed: a number of its kind, how
-- many strings and where; what stands before fractions, between thousands, their grouping, the first two as wide
-- characters, the character set.
local LC_NUMERIC = string.pack("<I4I4I4I4I4I4I4I4", 0x20031115 ~ 1, 6, 32, 34, 36, 40, 44, 48) .. ",\0.\0\3\3\0\0"
  .. string.pack("<I4I4", 0x2C, 0x2E) .. "UTF-8\0"

-- What a host sees of numbers, as text; `results` is the same in each locale.
local RESULTS = [[
  local name = ...
  assert(not name or os.setlocale(name, "numeric"), "no locale")
  local nibble, numbers, json, trace = require "nibble", require "nibble.numbers", require "nibble.json", require "nibble.trace"
  local pages, show, svg = require "nibble.pages", require "nibble.show", require "nibble.svg"
  local report = require "nibble.report"
  assert(("%.1f"):format(0.5) == (name and "0,5" or "0.5"))
  local cpu = { device = "cpu" }
  local function say(...) print(...) end
  local function fails(f, ...) say(select(2, pcall(f, ...))) end

  say(tostring(nibble.tensor({ 0.25, -1.5, 3 }, cpu)), tostring(nibble.tensor({ 1e-7, 12345.678, 0 / 0, 1 / 0 }, cpu)))
  say(json.encode { 0, 0.5, -1e-300, 3.0, { a = 1 / 3 } })
  for _, text in ipairs { "0.5", "[1.25e-3,-2.5]", "3.0" } do
    local value = assert(json.decode(text))
    say(json.encode(value), json.encode { value == 0.5 })
  end
  say(json.decode("0,5"))
  say(numbers.text(0.5), numbers.text(5.0), numbers.text(7), numbers.text("0,5"), numbers.text(-1 / 0))
  say(numbers.format("%s %d %5.2f|%-8.3g|%+.1f|%08.3f %% %x %q", 0.5, 3, 1.25, 1e-9, 2.5, -1.5, 255, "a,b"))

  local pool = pages.caches { num_pages = 4, page_size = 2, num_kv_heads = 2, head_dim = 64, device = "cpu" }
  local kv = nibble.randn(3, 2, 64, { dtype = "bfloat16", seed = 1, device = "cpu" })
  nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(kv, kv, nibble.tensor({ 5, 2, 1 }, cpu), pool.paged_kv_cache,
    pool.kv_cache_sf, 0.3, 0.3)
  local values = kv:narrow(1, 1, 1):contiguous():view(-1):to("float32"):totable()
  say(show.block(kv[1][1]:narrow(1, 1, 16), { global_scale = 0.3 }))
  say(show.histogram(values, { title = "x" }))
  nibble.explain(pool, { slot = 5, head = 1, dim = 17, global_scale = 0.3 })
  say(svg.curve({ 0.5, 1.25, 7.125 }, { title = "curve", unit = "ms" }))
  say(svg.error_map({ { { 0.25, 1.5 }, { 0, 0.125 } } }))
  local record = { title = "r", ok = true, compared = 1.5e6,
    errors = { { layer = "l", kv = "K", heads = { { rms = 1.25, worst = 0.5, max = 1e-3, zero = 0.25, saturated = 0 } } } },
    phases = { { name = "p", calls = 3, ms = 1.75, bytes = 2500000 } },
    parameters = { { "scale", 0.5 } } }
  say(report.html(record))

  local list, access = {}, { storage = 1, offset = 0, dtype = "float32", shape = { 4 }, stride = { 1 }, write = true }
  for i = 1, 3 do
    list[i] = { kind = "work", time = i * 0.125, operation = "tensor:fill", kernel = "fill", stream = 1, accesses = { access },
      attributes = { value = "0.5" } }
  end
  local run = { header = { nibble = "x", trace = 1, device = "cpu" }, list = list }
  say(trace.summary(run))
  say(json.encode(require("nibble.trace_chrome").convert(run)))
  local path = os.tmpname()
  local recorder = assert(trace.record(path))
  local t = nibble.full(4, 0.1, cpu)
  t:fill(-2.5)
  nibble.arange(0, 1, 0.25, cpu)
  assert(recorder:close())
  local read = assert(trace.read(path)) -- refused with commas
  os.remove(path)
  for _, o in ipairs(read.list) do
    for _, name in ipairs { "value", "start", "step" } do -- the collector's tensor:close has none, and comes when it likes
      if o.attributes and o.attributes[name] then say(o.operation, name, o.attributes[name]) end
    end
  end
  local result = assert(require("nibble.trace_replay").replay(read, { device = "cpu" }))
  say(result.ok, #result.differences)

  fails(nibble.zeros, 0.5)
  fails(nibble.full, 2, 0.5, { dtype = "int32" })
  fails(nibble.rope_table, 4, { theta = 0.5, device = "cpu" })
  fails(t.narrow, t, 1, 0.5)
  local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
  fails(append, kv, kv, nibble.tensor({ 5 }, cpu), pool.paged_kv_cache, pool.kv_cache_sf, -0.5, 1)
  fails(pages.allocator, { num_pages = 0.5, page_size = 2 })
  fails(nibble.explain, pool, { slot = 0.5, dim = 1, global_scale = 0.3 })
  local bad = nibble.full(1, -0.5, cpu)
  append(kv, kv, nibble.tensor({ 5 }, cpu), pool.paged_kv_cache, pool.kv_cache_sf, bad, bad)
  fails(nibble.check_faults, "cpu")
]]

describe("numbers in a locale with a comma", function()
  local folder

  setup(function()
    folder = process.run("mktemp -d").stdout:gsub("%s+$", "")
    process.run("mkdir " .. folder .. "/comma")
    local file = assert(io.open(folder .. "/comma/LC_NUMERIC", "wb"))
    file:write(LC_NUMERIC)
    file:close()
  end)
  teardown(function() process.run("rm -rf " .. process.quote(folder)) end)

  it("are written and read as in any other", function()
    local expected = process.script(RESULTS)
    assert.same({ 0, "" }, { expected.status, expected.stderr })
    local got = process.script(RESULTS, { before = "export LOCPATH=" .. folder .. ";", args = "comma" })
    if got.stderr:find("no locale", 1, true) then
      return pending("this libc does not read glibc's files of locales (LOCPATH)")
    end
    assert.same({ 0, "" }, { got.status, got.stderr })
    assert.equal(expected.stdout, got.stdout)
  end)

  it("cost nothing where there is none #quick", function()
    assert.equal(("%s %5.2f %%"):format(0.5, 1.25), numbers.format("%s %5.2f %%", 0.5, 1.25))
    assert.equal("0.5", numbers.text(0.5))
  end)
end)
