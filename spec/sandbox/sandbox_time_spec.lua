-- Scripts that do not end: each call of a sandbox ends soon after its deadline. NIBBLE_OVERRUNS=1 prints how late each
-- was.
local program = require("spec.support.host_program")
local overruns = require("spec.support.overruns")
local process = require("spec.support.runtime_process")
local nibble = require "nibble"

local BUDGET = 10000 -- microseconds

local function compile()
  local path, reason = program.compile("sandbox", { lua = true })
  if not path then pending(reason) end
  return path
end

-- Runs scripts, by their numbers, in one process; returns for each how it ended, and after how many microseconds of
-- processor time.
local function run(path, numbers)
  local files = {}
  for i, number in ipairs(numbers) do
    files[i] = os.tmpname()
    local file = assert(io.open(files[i], "w"))
    file:write(overruns[number][2])
    file:close()
  end
  local result = process.run(("timeout -k 5 300 %s budget_us=%d %s | grep '^='"):format(path, BUDGET,
    table.concat(files, " ")))
  for _, file in ipairs(files) do os.remove(file) end
  local ends = {}
  for status, time, message in result.stdout:gmatch("= (%u+) (%d+) ([^\n]*)\n") do
    ends[#ends + 1] = { status = status, late = tonumber(time) - BUDGET, message = message }
  end
  assert.same({ #numbers, "" }, { #ends, result.stderr })
  return ends
end

-- What nibble_lua.h says, in microseconds.
local node_us = nibble.device() == "cpu" and 0 or 5
local function bound(overrun)
  return overrun.late_us or 2000 + (overrun.bytes or 0) / 65536 * 1000 + (overrun.nodes or 0) * node_us
end

describe("a script that does not end", function()
  it("is stopped, whatever it is that does not end", function()
    local path, numbers, latest = compile(), {}, {}
    for i = 1, #overruns do numbers[i] = i end
    for i, ended in ipairs(run(path, numbers)) do
      local name = overruns[i][1]
      assert.same({ name, "EXPIRED" }, { name, ended.status, ended.status ~= "EXPIRED" and ended.message or nil })
      latest[i] = ended.late
      if os.getenv("NIBBLE_OVERRUNS") then io.stderr:write(("%8.3f ms late  %s\n"):format(ended.late / 1000, name)) end
    end
    if process.sanitized() or os.getenv("NIBBLE_VALGRIND") then return os.remove(path) end
    -- Twice the bound, for a machine that is busy with other things; what is beyond it is measured four times more.
    for i, late in ipairs(latest) do
      local most = 2 * bound(overruns[i])
      if late > most then
        local times = { late }
        for _, ended in ipairs(run(path, { i, i, i, i })) do times[#times + 1] = ended.late end
        table.sort(times)
        assert.is_true(times[3] <= most, ("%s: %d us late, more than %d"):format(overruns[i][1], times[3], most))
      end
    end
    os.remove(path)
  end)

  -- each look at the clock once walked over all of them: minutes
  it("is not made slow by being deep in calls", function()
    local path = compile()
    local file = os.tmpname()
    local handle = assert(io.open(file, "w"))
    handle:write("local function loop() return 1 + loop() end for _ = 1, 5 do assert(not pcall(loop)) end")
    handle:close()
    local result = process.run(path .. " budget_us=10000000 " .. file)
    assert.matches("^= OK %d+ \n$", result.stdout)
    os.remove(file)
    os.remove(path)
  end)

  it("is stopped by a count of instructions, the same way each time", function()
    local path = compile()
    local file = os.tmpname()
    for _, code in ipairs({ "while true do end", "while true do pcall(function() while true do end end) end",
      "while true do coroutine.wrap(function() end)() end" }) do
      local handle = assert(io.open(file, "w"))
      handle:write(code)
      handle:close()
      local result = process.run(path .. " budget_us=" .. math.maxinteger .. " instructions=1000000 " .. file)
      assert.matches("^= EXPIRED %d+ script: exceeded its limit of 1000000 instructions, at script:1\n$",
        result.stdout)
    end
    os.remove(file)
    os.remove(path)
  end)
end)
