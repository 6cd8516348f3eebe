-- The command `nibble scenario`: options, what it prints, its exit status. See nibble.scenario.
local HELP = [[
usage: nibble scenario NAME [--PARAMETER VALUE ...] [--device NAME] [--steps N] [--seed N] [--report FILE] [--trace FILE]
                             [--check] [--plant]
       nibble scenario list          list all scenarios with their parameters, defaults and ranges
       nibble scenario NAME --help

Runs a shipped scenario by its name, or your own file by its path (./mine.lua). After each step every byte of its caches and
outputs is compared with the reference in plain Lua and with an eager run of the same steps. A failure is shrunk to the
smallest parameters that still fail, and the command line that repeats it is printed.

  --device NAME   cpu, cuda:0, ... (default: NIBBLE_DEVICE; if not set, a GPU if one can be used, else the CPU)
  --steps N       number of steps
  --seed N        seed of lengths, pages and random values (default: 1)
  --report FILE   write one HTML page with pictures and numbers
  --trace FILE    record the run as JSON lines for nibble trace, without the checks and the eager run
  --check         run in checked mode, which also reports missing synchronization and misused pages
  --plant         self-test: flip one bit halfway; succeeds if the check finds and names it

Exit status: 0 if all bytes are equal or the planted bit was found, 1 if not or if something failed, 2 for bad usage.]]

local nibble = require "nibble"
local numbers = require "nibble.numbers"
local options = require "nibble.options"
local show = require "nibble.show"

-- For text of a scenario's file, paths and errors, which may have several lines.
local function visible(text) return show.visible(text, true) end

local function bold(text) return show.use_color() and "\27[1m" .. text .. "\27[0m" or text end

local function misuse(format, ...)
  io.stderr:write("nibble scenario: ", visible(format:format(...)), "\n")
  return 2
end

local function print_parameters(scenario, def)
  local rows = { { "steps", def.steps } }
  for _, name in ipairs(scenario.parameters(def)) do rows[#rows + 1] = { name, def.parameters[name] } end
  for _, row in ipairs(rows) do
    local default = row[2][1] == false and "off" or row[2][1]
    print(("  --%-16s %-10s %-26s %s"):format(row[1]:gsub("_", "-"), visible(tostring(default)),
      visible(options.range(row[2])),
      visible(row[2].help or "")))
  end
end

local function print_list(scenario)
  local names = scenario.names()
  if #names == 0 then
    io.stderr:write(
      "nibble scenario: no scenarios are installed (make install does that); run your own file by its path\n")
    return 1
  end
  for i, name in ipairs(names) do
    local def, message = scenario.load(name)
    if not def then return misuse("%s", message) end
    print((i > 1 and "\n" or "") .. bold(visible(name)) .. ": " .. visible(def.title))
    print_parameters(scenario, def)
  end
  return 0
end

local function about_device(device)
  for _, info in ipairs(nibble.devices()) do
    if info.name == device then
      local what = device == "cpu" and "threads" or "multiprocessors"
      return ("%s%s"):format(info.description, info.processors and (", %d %s"):format(info.processors, what) or "")
    end
  end
end

local function print_graphs(record)
  for i, graph in ipairs(record.graphs) do
    local counts, names = {}, {}
    for _, node in ipairs(graph.nodes) do
      if not counts[node.name] then names[#names + 1] = node.name end
      counts[node.name] = (counts[node.name] or 0) + 1
    end
    for k, name in ipairs(names) do names[k] = ("%d %s"):format(counts[name], name) end
    print(("%-10s%s: %d nodes (%s); captured %d, updated %d, built anew %d, replayed %d times"):format(i == 1
      and "graphs" or "",
      visible(graph.key), #graph.nodes, table.concat(names, ", "), graph.captures, graph.updates, graph.rebuilt,
        graph.replays))
  end
end

local function print_phases(record, check_ms)
  print(bold(("%-38s %6s %11s %11s %10s"):format("phase", "calls", "ms total", "ms per call", "MB moved")))
  local function line(phase)
    print(numbers.format("%-38s %6d %11.2f %11.3f %10s", visible(phase.name), phase.calls, phase.ms,
      phase.ms / math.max(phase.calls, 1), phase.bytes and numbers.format("%.2f", phase.bytes / 1e6) or "-"))
  end
  for _, phase in ipairs(record.phases) do line(phase) end
  line { name = "whole run with checks in Lua (CPU)", calls = 1, ms = check_ms }
end

local function print_tables(run)
  for _, cache in ipairs(run.caches) do
    local names = {}
    for i, request in ipairs(cache.live) do names[i] = "request " .. request.id end
    print()
    if #run.caches > 1 then print(bold(visible(cache.name))) end
    print(show.page_table(cache.allocator, cache.live, { names = names }))
  end
end

-- Parses the options of a scenario. Returns them and the attempt, or nil and the exit status.
local function read_options(scenario, def, arguments)
  local kinds = {
    device = {}, seed = { 1 }, report = {}, trace = {}, check = { false }, plant = { false }, help = { false },
      steps = def.steps,
  }
  for name, kind in pairs(def.parameters) do
    kinds[name:gsub("_", "-")] = kind
  end
  local opts, given = options.parse(arguments, kinds)
  if not opts then return nil, misuse("%s", given) end
  if opts.help then
    print(visible(def.title) .. "\n\nusage: nibble scenario " .. visible(def.name) .. " [OPTIONS]\n")
    print_parameters(scenario, def)
    print("  --device NAME  --seed N  --report FILE  --trace FILE  --check  --plant  --help   "
      .. "(nibble scenario --help explains them)")
    return nil, 0
  end
  local device, reason = nibble.device(opts.device)
  if not device then return nil, misuse("%s: %s", opts.device and "--device" or "NIBBLE_DEVICE", reason) end
  local attempt = {
    p = {}, device = device, seed = opts.seed, steps = opts.steps, plant = opts.plant and 0 or nil,
      checked = opts.check,
    snapshots = opts.report ~= nil,
  }
  local named = {}
  for name in pairs(def.parameters) do
    attempt.p[name], named[name] = opts[name:gsub("_", "-")], given[name:gsub("_", "-")]
  end
  local valid, why = scenario.valid(def, attempt, named)
  if not valid then return nil, misuse("%s", why) end
  return attempt, opts.report, opts.trace
end

local function fill_record(scenario, def, attempt, outcome, command)
  local record = outcome.run:record(outcome.eager)
  record.name, record.title = def.name, def.title
  record.device, record.device_description = attempt.device, about_device(attempt.device)
  record.version, record.seed, record.steps, record.command = nibble.version, attempt.seed, attempt.steps, command
  record.ok, record.message, record.parameters = outcome.ok, outcome.message, {}
  for i, name in ipairs(scenario.parameters(def)) do
    local kind = def.parameters[name]
    record.parameters[i] = { name = name, value = attempt.p[name], default = kind[1], help = kind.help }
  end
  return record
end

local function run_one(scenario, def, arguments)
  local command = arg and arg[-1] and arg[0] == "scenario" and arg[-1] or "nibble" -- as it was called
  local attempt, file, trace_file = read_options(scenario, def, arguments)
  if not attempt then return file end
  local held
  -- Try to create the file before the work, so that a missing folder is reported early. A pipe is kept open, so that
  -- its reader sees no end before the report.
  if file then
    local message, code
    held, message, code = io.open(file, "r+")
    local writer = code == 2 and nibble.create(file)
    if not held and not writer then return misuse("--report: %s", message) end
    -- Leaving the block by an error drops the file.
    if writer then pcall(function() local _ <close> = writer; error("") end) end
  end
  if trace_file then -- after what may end the run before it begins: an old trace would be replaced
    local message
    attempt.recorder, message = require("nibble.trace").record(trace_file, { title = def.name,
      command = scenario.command_line(def, attempt, command) })
    if not attempt.recorder then return misuse("--trace: %s", message) end
    attempt.recorder:pause(true)
  end
  print(bold(visible(def.title)))
  print(("device    %s (%s)"):format(attempt.device, about_device(attempt.device)))
  local words = {}
  for _, name in ipairs(scenario.parameters(def)) do words[#words + 1] = name .. " " .. tostring(attempt.p[name]) end
  words[#words + 1] = ("%d steps, seed %d"):format(attempt.steps, attempt.seed)
  print("run       " .. visible(table.concat(words, ", ")))
  io.stdout:flush()

  local bar = require("nibble.progress").start(def.name, attempt.steps)
  attempt.progress = function() bar:step() end
  local start = os.clock()
  local outcome = scenario.attempt(def, attempt)
  if trace_file then
    local written, message = attempt.recorder:close()
    if not written then
      io.stderr:write("nibble scenario: --trace: ", visible(message), "\n")
      return 1
    end
    attempt.recorder = nil
  end
  local check_ms = (os.clock() - start) * 1e3
  bar:close()

  local errors = (def.errors or file) and require("nibble.errors").measure(outcome.run) or nil
  local record = fill_record(scenario, def, attempt, outcome, scenario.command_line(def, attempt, command))
  for i, note in ipairs(record.notes) do print((i == 1 and "input     " or "          ") .. visible(note)) end
  print_graphs(record)
  if outcome.planted then
    print(("planted   after step %d: %s"):format((attempt.steps + 1) // 2, visible(outcome.planted)))
  end
  print()
  print_phases(record, check_ms)
  if def.errors and outcome.ok then
    print()
    print(visible(require("nibble.errors").text(errors)))
  end
  if outcome.ok then print_tables(outcome.run) end
  print()
  local found = outcome.planted and outcome.message
    and outcome.message:find(("step %d: %s: got "):format((attempt.steps + 1) // 2, outcome.planted), 1, true) == 1
  if found then
    print(("%s: the check found the planted bit at %s"):format(bold "ok", visible(outcome.message)))
  elseif outcome.planted and outcome.ok then
    print(bold "FAILED" .. ": the check did not find the planted bit")
  elseif outcome.ok and errors and not errors.fine and def.errors then
    outcome.ok, outcome.message, record.ok = false, "the end: a quantization error exceeds its bound", false
    record.message = outcome.message
    print(bold "FAILED at " .. visible(outcome.message))
  elseif outcome.ok then
    print(numbers.format(
      "%s: after each of %d steps every byte is the reference's and the eager run's (%.1f MB compared)%s", bold "ok",
      attempt.steps, outcome.run.compared / 1e6, def.verdict and "; " .. visible(def.verdict(outcome.run)) or ""))
  else
    print(visible(scenario.explain(def, attempt, outcome, command)))
    if outcome.kind == "error" and outcome.traceback then print(visible(outcome.traceback)) end
    for _, report in ipairs(outcome.reports or {}) do -- of checked mode; they may name the cause of the failure
      if report ~= outcome.message then print(visible(report)) end
    end
  end
  if file then
    record.reports = outcome.reports
    if errors then record.errors, record.histogram = errors.list, errors.histogram end
    local written, message = require("nibble.report").write(file, record)
    if held then held:close() end
    if not written then
      io.stderr:write("nibble scenario: --report: ", visible(message), "\n")
      return 1
    end
  end
  if attempt.plant then return found and 0 or 1 end
  return outcome.ok and 0 or 1
end

return function(scenario, name, ...)
  if name == nil or name == "--help" or name == "-h" then
    print(HELP)
    return name and 0 or 2
  elseif name == "list" then
    if select("#", ...) > 0 then return misuse("list takes no arguments, got %s", (...)) end
    return print_list(scenario)
  elseif name:find("^%-") then
    return misuse("expected a scenario's name before %s", name)
  end
  local def, message = scenario.load(name)
  if not def then return misuse("%s", message) end
  return run_one(scenario, def, { ... })
end
