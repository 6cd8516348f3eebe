-- Checked mode against brute force, on random programs; on the scripts that come with nibble; and the sets of bytes
-- that it is made of.
local nibble = require "nibble"
local pages = require "nibble.pages"
local programs = require "spec.support.programs"
local spans = require "nibble.checker.spans"

local COUNT = tonumber(os.getenv("NIBBLE_PROGRAMS")) or 150 -- of each kind

local function run(source, env)
  nibble.check(function() end)
  assert(load(source, "@program.lua", "t", env))()
  local reports = nibble.check_reports()
  nibble.check(false)
  nibble.synchronize()
  return reports
end

local function keys(set)
  local list = {}
  for key in pairs(set) do list[#list + 1] = tostring(key) end
  table.sort(list)
  return table.concat(list, ", ")
end

describe("checked mode finds in random programs", function()
  after_each(function() nibble.check(false) end)

  -- What the appends write.
  local slots = { { 0, 5 }, { 2 }, { 7, 3 }, { 1, 4, 6 } }

  local function setup(seed)
    local pool = pages.caches { num_pages = 4, page_size = 2, num_kv_heads = 2, head_dim = 16,
      kv_layout = seed % 2 == 0 and "HND" or "NHD", page_padding = seed % 3 * 16 }
    local env = { s = {}, e = {}, g = {}, m = {} }
    local inputs, tables, lengths, outputs = {}, {}, {}, {}
    for s = 1, 3 do env.s[s] = nibble.stream() end
    for t = 1, 3 do env["t" .. t] = nibble.zeros(6, { dtype = t == 3 and "bfloat16" or "float32" }) end
    for i, list in ipairs(slots) do
      inputs[i] = { nibble.zeros(#list, 2, 16, { dtype = "bfloat16" }), nibble.tensor(list) }
    end
    for page = 1, 4 do tables[page] = nibble.tensor({ { page - 1 } }, { dtype = "int32" }) end
    for n = 1, 2 do
      lengths[n] = nibble.tensor({ n }, { dtype = "int32" })
      outputs[n] = { nibble.zeros(1, 2, 2, 16, { dtype = "bfloat16" }),
        nibble.zeros(1, 2, 2, 16, { dtype = "bfloat16" }) }
    end
    local one = nibble.tensor(1.0)
    function env.on(s, fn) env.s[s]:scope(fn) end
    env.put = load(
      "local append, inputs, pool, one, k = ... return function(i) append(inputs[i][1], inputs[i][1], inputs[i][2], "
      .. "pool.paged_kv_cache, pool.kv_cache_sf, one, one, pool.kv_layout) end", "@spec/nibble/programs.lua")(
      nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, inputs, pool, one)
    env.get = load("local dequantize, tables, lengths, outputs, pool, one = ... return function(page, n, i) "
      .. "dequantize(pool.paged_kv_cache, pool.kv_cache_sf, tables[page], lengths[n], one, one, "
      .. "outputs[i][1], outputs[i][2], "
      .. "pool.kv_layout) end", "@spec/nibble/programs.lua")(
      nibble.quantization.nvfp4_kv_dequantize_paged, tables, lengths, outputs, pool, one)
    nibble.synchronize()
    return env
  end

  it("exactly the races that there are", function()
    package.loaded["nibble.programs"] = true
    local found = 0
    for seed = 1, COUNT do
      local source, expected = programs.random(pages.generator(seed), seed % 3 > 0 and slots or nil)
      local seen = {}
      for _, report in ipairs(run(source, setup(seed))) do
        assert.equal("race", report.kind, report.text .. "\n" .. source)
        local a = math.tointeger(report.operation.where:match("program%.lua:(%d+)$"))
        local b = math.tointeger(report.other.where:match("program%.lua:(%d+)$"))
        seen[("%d %d"):format(math.min(a, b), math.max(a, b))] = true
        found = found + 1
      end
      assert.equal(keys(expected), keys(seen), "seed " .. seed .. "\n" .. source)
    end
    assert.is_true(found > COUNT)
  end)

  it("exactly the reads of what nothing wrote", function()
    local found = 0
    for seed = 1, COUNT do
      local source, expected = programs.unwritten(pages.generator(seed))
      local env, seen = {}, {}
      nibble.check(function() end)
      for t = 1, 3 do env["t" .. t] = nibble.empty(6, { dtype = t == 3 and "bfloat16" or "float32" }) end
      assert(load(source, "@program.lua", "t", env))()
      for _, report in ipairs(nibble.check_reports()) do
        assert.equal("unwritten", report.kind, report.text)
        seen[math.tointeger(report.operation.where:match("program%.lua:(%d+)$"))] = true
        found = found + 1
      end
      nibble.check(false)
      assert.equal(keys(expected), keys(seen), "seed " .. seed .. "\n" .. source)
    end
    assert.is_true(found > COUNT)
  end)
end)

describe("sets of bytes", function()
  local function bytes_of(list)
    local set = {}
    for i = 1, #list, 2 do
      assert.is_true(list[i] < list[i + 1] and (i == 1 or list[i] > list[i - 1]), "sorted, apart and not empty")
      for byte = list[i], list[i + 1] - 1 do set[byte] = true end
    end
    return set
  end

  it("are what a table of bytes is", function()
    local random = pages.generator(7)
    for _ = 1, 500 do
      local set, truth = {}, {}
      for _ = 1, 1 + random(25) do
        local low, add = random(60), random(3) > 0
        local high = low + random(12)
        spans[add and "add" or "remove"](set, { low, high })
        for byte = low, high - 1 do truth[byte] = add or nil end
        assert.same(truth, bytes_of(set))
        local list, missing, shared = {}, nil, nil
        for i = 1, 2 + random(6), 2 do
          list[i] = random(70)
          list[i + 1] = list[i] + 1 + random(5)
        end
        list = spans.merged(list)
        local asked = bytes_of(list)
        for byte = 0, 80 do
          if asked[byte] and not truth[byte] then missing = missing or byte end
          if asked[byte] and truth[byte] then shared = shared or byte end
        end
        assert.equal(missing, (spans.missing(set, list)))
        assert.equal(shared, (spans.overlap(set, list)))
        assert.equal(shared, (spans.overlap(list, set)))
        local inside = {}
        for a, b in spans.within(set, low, high + 5) do
          for byte = a, b - 1 do inside[byte] = true end
        end
        for byte = low, high + 4 do assert.equal(truth[byte], inside[byte]) end
      end
    end
  end)

  it("are the bytes of views with any strides", function()
    local random = pages.generator(8)
    for _ = 1, 1000 do
      local view = { offset = random(6), shape = {}, stride = {}, dtype = ({ "uint8", "int32" })[1 + random(2)] }
      for i = 1, random(5) do view.shape[i], view.stride[i] = random(20) == 0 and 0 or 1 + random(4), random(10) end
      local truth, size = {}, spans.item_bytes[view.dtype]
      local function walk(i, at)
        if i > #view.shape then
          for byte = at, at + size - 1 do truth[byte] = true end
          return
        end
        for k = 0, view.shape[i] - 1 do walk(i + 1, at + k * view.stride[i] * size) end
      end
      walk(1, view.offset)
      assert.same(truth, bytes_of(spans.of_view(view)))
      local low, high = spans.hull(view)
      for byte in pairs(truth) do assert.is_true(byte >= low and byte < high) end
    end
  end)
end)

describe("checked mode has nothing to report of", function()
  local process = require "spec.support.runtime_process"
  for _, script in ipairs { "capture_and_replay.lua", "prefix_sharing.lua", "quantize_block.lua" } do
    it("examples/" .. script, function()
      local result = process.run(process.quote(process.command()) .. " --check " .. process.quote(process.root) ..
        "scripts/examples/"
        .. script)
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("%S", result.stdout) -- it did something
    end)
  end

  for _, options in ipairs { "--steps 12", "--layout NHD --random --steps 8 --requests 6" } do
    it("scenario decode " .. options, function()
      local result = process.run(process.quote(process.command()) .. " scenario decode --check " .. options)
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("\ngraphs .*, replayed %d+ times\n.*\nok: after each of " .. options:match("steps (%d+)") ..
        " steps",
        result.stdout)
    end)
  end

  it("a scenario whose graph races: that is told, so that nothing told is something", function()
    local name = os.tmpname()
    finally(function() os.remove(name) end)
    local file = assert(io.open(name, "w"))
    file:write([[
return {
  title = "two writes of one tensor", steps = 1,
  setup = function(run) run.state.t = run:randn { 8 } end,
  step = function(run)
    run.state.t:fill(1)
    run.side:scope(function() run.state.t:fill(1) end)
    run.side:synchronize()
  end,
}]])
    file:close()
    local result = process.run(process.quote(process.command()) .. " scenario " .. process.quote(name) .. " --check")
    assert.equal(1, result.status)
    assert.matches("race: ", result.stdout .. result.stderr)
  end)
end)
