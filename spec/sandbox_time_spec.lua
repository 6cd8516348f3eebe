-- Scripts that do not end: each call of a sandbox ends soon after its deadline. NIBBLE_OVERRUNS=1 prints how late each was.
local program = require("spec.support.host_program")
local overruns = require("spec.support.overruns")
local process = require("spec.support.runtime_process")

local BUDGET = 10000 -- microseconds

local function compile()
  local path, reason = program.compile("sandbox", { lua = true })
  if not path then pending(reason) end
  return path
end

-- Runs all in one process; returns for each its status and how many microseconds it took.
local function run(settings)
  local path = compile()
  local files = {}
  for i, overrun in ipairs(overruns) do
    files[i] = os.tmpname()
    local file = assert(io.open(files[i], "w"))
    file:write(overrun[2])
    file:close()
  end
  local result = process.run(("timeout -k 5 300 %s budget_us=%d %s %s | grep '^='"):format(path, BUDGET, settings,
    table.concat(files, " ")))
  os.remove(path)
  for _, file in ipairs(files) do os.remove(file) end
  local ends = {}
  for status, time, message in result.stdout:gmatch("= (%u+) (%d+) ([^\n]*)\n") do
    ends[#ends + 1] = { status = status, time = tonumber(time), message = message }
  end
  assert.same({ #overruns, "" }, { #ends, result.stderr })
  return ends
end

local function show(ends)
  if not os.getenv("NIBBLE_OVERRUNS") then return end
  for i, overrun in ipairs(overruns) do
    io.stderr:write(("%8.3f ms late  %s\n"):format((ends[i].time - BUDGET) / 1000, overrun[1]))
  end
end

describe("a script that does not end", function()
  it("is stopped, whatever it is that does not end", function()
    local ends = run("")
    show(ends)
    for i, overrun in ipairs(overruns) do
      assert.same({ overrun[1], "EXPIRED" }, { overrun[1], ends[i].status, ends[i].status ~= "EXPIRED" and ends[i].message or nil })
      -- A machine that is busy with other things is late, too; what was tried before took seconds, or for ever.
      assert.is_true(ends[i].time < BUDGET + 3000000, overrun[1] .. " took " .. ends[i].time)
    end
  end)

  it("is not made slow by being deep in calls", function() -- each look at the clock once walked over all of them: minutes
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
      assert.matches("^= EXPIRED %d+ script: budget: expected at most 1000000 instructions, got more, at script:1\n$", result.stdout)
    end
    os.remove(file)
    os.remove(path)
  end)
end)
