-- Child processes on the stand-in driver (spec/standin): a GPU for specs that takes no GPU, with calls that fail at
-- will.
local process = require("spec.support.runtime_process")

local quote = process.quote
local assert = require("luassert")
local standin = {}

standin.folder = process.build() .. "standin"
--- The driver's file.
standin.library = standin.folder .. "/libcuda.so.1"

function standin.is_there(path)
  local file = io.open(path, "rb")
  return file ~= nil and file:close()
end

local missing
if not standin.is_there(standin.library) then
  missing = "no stand-in driver: the build makes it where it finds cuda.h (the CUDA Toolkit)"
elseif not process.script('require("nibble")', { before = "unset NIBBLE_DEVICE;" }).stderr:match("^$") then
  missing = "no module to run on it"
end
--- Why nothing can run on it; nil if something can.
standin.missing = missing

--- The folder's path from the root.
function standin.absolute()
  return (process.run("cd " .. quote(standin.folder) .. " && pwd").stdout:gsub("%s+$", ""))
end

--- Runs code on the stand-in. env: shell assignments. The result has also: log, its lines of misuse and leaks; calls
--- and failed: the driver's calls, and those that were made to fail.
function standin.run(code, env)
  local log = os.tmpname()
  local before = ("export LD_LIBRARY_PATH=%s NIB_STANDIN_LOG=%s; unset NIBBLE_DEVICE CUDA_VISIBLE_DEVICES; %s "):format(
    quote(standin.folder), quote(log), env and "export " .. env .. ";" or "")
  local result = process.script(("package.cpath = package.cpath .. %q; "):format(";" .. standin.folder .. "/?.so") ..
    code,
    { before = before .. "timeout -k 5 300", command = process.command() })
  result.log = process.read(log):gsub("%d+ end: (%d+) calls, (%d+) made to fail[^\n]*\n", function(calls, failed)
    result.calls, result.failed = tonumber(calls), tonumber(failed)
    return ""
  end)
  os.remove(log)
  return result
end

--- Fails unless the process ended with status 0, in silence, and misused nothing; with `tidy` also without leaks.
function standin.assert_well(result, tidy, what)
  assert.same({ status = 0, stderr = "" }, { status = result.status, stderr = result.stderr }, what)
  for line in result.log:gmatch("[^\n]+") do
    if tidy or not line:find("leak:", 1, true) then error((what or "") .. " " .. line) end
  end
end

--- Compiles spec/standin/NAME.c with `with` (other sources, flags, libraries) and runs it on the stand-in, where it
--- must end well. `env`: shell assignments. Returns why it cannot be run here, or nil and what it printed.
function standin.program(name, with, env)
  if not process.has("cc") then return "there is no C compiler (cc)" end
  local include = (os.getenv("CUDA_PATH") or "/usr/local/cuda") .. "/include"
  if not standin.is_there(include .. "/cuda.h") then return "no " .. include .. "/cuda.h (CUDA_PATH)" end
  local program = os.tmpname()
  local source = quote("spec/standin/" .. name .. ".c")
  local built =
    process.run(("cd %s && cc -std=c11 -g -Wall -Wextra -isystem %s %s -o %s %s %s -lm -lpthread -ldl"):format(
    quote(process.root), quote(include), process.sanitized() and "-fsanitize=address,undefined" or "", program, source,
      with))
  assert.same({ status = 0, stdout = "", stderr = "" }, built)
  local result =
    process.run(("unset NIB_STANDIN_LOG CUDA_VISIBLE_DEVICES; LD_LIBRARY_PATH=%s %s timeout -k 5 60 %s"):format(
    quote(standin.folder), env or "", program))
  os.remove(program)
  assert.same({ status = 0, stderr = "" }, { status = result.status, stderr = result.stderr }, result.stdout)
  return nil, result.stdout
end

--- busted's describe, where nothing runs but a skipped spec without a stand-in.
function standin.describe(describe, it, pending)
  return function(name, body)
    describe(name, missing and function()
      it("is tried on the stand-in driver", function() return pending(missing) end)
    end or body)
  end
end

--- Lua code: the function settle().
standin.settle = [[
  local function settle()
    for _ = 1, 3 do collectgarbage() end
    for _, info in ipairs(nibble.devices()) do
      if info.available then
        pcall(nibble.synchronize, info.name)
        nibble.memory(info.name)
      end
    end
  end
]]

--- Specs: each of the calls ("*": any) that `scenario` makes fails at every count. The code defines nibble, standin,
--- settle and the function scenario(). `least`: calls that it makes at least. `env`: shell assignments.
function standin.it_fails_well(it, scenario, calls, least, env)
  for name, result in pairs({ CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_UNKNOWN = 999 }) do
    for _, call in ipairs(calls) do
      it(("(%s, %s, at every count) is an error or a detour, leaks nothing, and what follows works"):format(call, name),
        function()
        local done = standin.run(scenario .. ([[
          local call, result, least = %q, %d, %d
          local kinds = { "contexts", "modules", "functions", "pools", "graphs", "execs", "captures", "allocations", "host",
            "pushed", "modes", "externals", "chunks", "ranges", "mapped", "semaphores" }
          local function live()
            local counts = {}
            for _, info in ipairs(nibble.devices()) do
              if info.available then counts[#counts + 1] = ("%%d bytes on %%s"):format(nibble.memory(info.name).reserved, info.name) end
            end
            for _, kind in ipairs(kinds) do counts[#counts + 1] = kind .. " " .. standin.live(kind) end
            return table.concat(counts, ", ")
          end
          for _ = 1, 3 do scenario() end
          settle()
          local base, streams, events = live(), standin.live("streams"), standin.live("events")
          local count, errors = 0, 0
          repeat
            count = count + 1
            local fired = standin.fired()
            standin.fail(call, count, result)
            local ok, message = pcall(scenario)
            standin.fail()
            local where = ("%%s at %%d: %%s"):format(standin.failed(), count, message)
            if not ok then
              errors = errors + 1
              assert(standin.fired() > fired, message)
              assert(type(message) == "string" and message:find(": out of memory: ") or message:find(" failed on cuda:%%d+: CUDA_ERROR_")
                or message:find(": expected .+, got "), where)
            end
            settle()
            assert(live() == base, where .. "\n" .. base .. "\n" .. live())
            scenario()
            settle()
            assert(live() == base, where .. "\n" .. base .. "\n" .. live())
            assert(standin.misuses() == 0, where .. "\n" .. standin.misuse())
          until standin.fired() == fired or call ~= "*" and count == 100 -- queries are repeated until something is done
          assert(standin.live("streams") <= streams + 4 and standin.live("events") <= events + 16)
          assert(call ~= "*" or count > least and (result == 2 or errors > 5), count .. " calls, " .. errors .. " errors")
        ]]):format(call, result, least), "NIBBLE_DEVICE=cuda:0 " .. (env or ""))
        standin.assert_well(done, true)
      end)
    end
  end
end

return standin
