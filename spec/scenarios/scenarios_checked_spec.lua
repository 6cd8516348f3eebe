-- Scenarios in checked mode: right ones give no report on their whole grid, those that do wrong on purpose give theirs,
-- mistakes are reported with both lines.
local nibble = require "nibble"
local pages = require "nibble.pages"
local scenario = require "nibble.scenario"

local function attempt(def, point)
  local p = {}
  for key, value in pairs(point or {}) do if key ~= "steps" then p[key] = value end end
  return scenario.attempt(def, {
    p = scenario.values(def, p), device = assert(nibble.device()), seed = 1, steps = point and point.steps
      or def.steps[1],
    checked = true,
  })
end

describe("in checked mode", function()
  for _, name in ipairs(scenario.names()) do
    it("scenario " .. name .. " has what it says to report", function()
      local def = assert(scenario.load(name))
      for _, point in ipairs(scenario.grid(def)) do
        local outcome = attempt(def, point)
        assert.is_true(outcome.ok, outcome.message)
        assert.are.equal(#(def.reports or {}), #outcome.reports, table.concat(outcome.reports, "\n"))
      end
    end)
  end

  -- What fails is shown by the bytes or the graph as well; the report says why.
  local function reports(def)
    local outcome = attempt(def)
    assert.is_false(outcome.ok)
    assert.are.equal(1, #outcome.reports, table.concat(outcome.reports, "\n"))
    return outcome.reports[1]
  end

  it("pages that are not copied are read unwritten", function()
    local copy = pages.copy
    pages.copy = function() end
    finally(function() pages.copy = copy end)
    local report = reports(assert(scenario.load("beam_search")))
    assert.matches("unwritten: quantization.nvfp4_kv_dequantize_paged reads paged_kv_cache %(K%)", report)
    assert.matches("\n  [^\n]*beam_search.lua:%d+: quantization.nvfp4_kv_dequantize_paged", report)
  end)

  it("a wait that is missing between two streams of a graph is a race", function()
    local def = assert(scenario.load("two_streams"))
    function def.captured(run)
      for l, cache in ipairs(run.state.layers) do
        cache:append()
        if l == 1 then run.side:wait(run.main:record()) end
        run.side:scope(function() cache:dequantize() end)
      end
      run.main:wait(run.side:record())
    end
    local report = reports(def)
    assert.matches("race: ", report)
    assert.matches("\n  [^\n]*scenarios_checked_spec.lua:%d+: quantization.nvfp4_kv_dequantize_paged", report)
    assert.matches("\n  [^\n]*scenarios_checked_spec.lua:%d+: page.nvfp4_quantize_append", report)
  end)

  it("a report alone fails a scenario, and is shrunk like a wrong byte", function()
    -- Copies on the side stream without a wait before them: they come to the same bytes, whoever is first.
    local def = {
      title = "the same bytes twice", name = "twice",
      parameters = { rows = { 64, min = 3, max = 4096, help = "rows" } }, steps = { 5, min = 1 },
      setup = function(run)
        run.state.from = run:randn({ run.p.rows, 8 })
        run.state.to = run.state.from:clone()
        run.side:wait(run.main:record())
        run:watch("to", run.state.to)
      end,
      step = function(run)
        local s = run.state
        if run.step >= 2 then run.side:scope(function() s.to:copy(s.from) end) end
        s.to:copy(s.from)
        run.side:synchronize()
      end,
    }
    local opts = { p = { rows = 64 }, device = assert(nibble.device()), seed = 1, steps = 5, checked = true }
    local outcome = scenario.attempt(def, opts)
    assert.are.same({ false, "report" }, { outcome.ok, outcome.kind })
    assert.matches("race: tensor:copy", outcome.message)
    local smallest = scenario.shrink(def, opts, outcome)
    assert.are.same({ { rows = 3 }, 2 }, { smallest.p, smallest.steps })
    assert.matches("%-%-rows 3 %-%-steps 2 %-%-seed 1 %-%-device %S+ %-%-check$", scenario.command_line(def, smallest))
  end)
end)
