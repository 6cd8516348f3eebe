--- Runs and checks scenarios: scripts of about a page with a cache layout, the life of a batch and a capture sequence.
--
--   nibble scenario list                       lists them with their parameters and ranges
--   nibble scenario NAME [--param value ...]   runs scripts/scenarios/NAME.lua, or your own file by its path (./mine.lua)
--
-- A scenario file returns a table (scripts/scenarios/README.md is a cookbook):
--   title        one line
--   parameters   name -> {default, min =, max =, multiple =, help =}; or {choice, choice ..., help =} with the default
--                first; or {false, help =} for a flag. On the command line page_size is --page-size
--   steps        the number of steps, or {default, min =, max =}
--   setup(run)   creates caches and requests
--   step(run)    the host's part of a step: requests arrive, grow and finish, inputs are loaded
--   captured(run)   optional: the device's part of a step. It is captured once for each key and replayed afterwards; the
--                   eager run calls it
--   key(run)     the key of the graph that this step replays; default: one graph
--   recapture(run)  "update" or "capture" if the graph must be captured again in this step; default: never
--   check(run)   called after each step in the run with graphs, for checks beyond the ledger's
--   finish(run)  the same after the last step
--   verdict(run) text for the last line of a successful run
--   valid(p, given, steps)  nil, or what is wrong with this combination of parameters
--   grid         parameters that `describe` runs: a list of tables; default: see `grid`
--   reports      kinds of reports that checked mode must give, because the scenario is wrong on purpose; default: none
--   errors       true: the command also prints quantization errors
-- `run` is documented in nibble.run, its caches in nibble.kv.
--
-- Each attempt runs the same script twice with the same seed, once with graphs and once eagerly. After each step every
-- watched byte is compared with the ledger, and then with the eager run. A failure is shrunk to the smallest parameters
-- that still fail.
--
-- Under busted, `require("nibble.scenario").describe("decode")` makes specs of a scenario, one for each point of its
-- grid.

local nibble = require "nibble"
local options = require "nibble.options"
local pages = require "nibble.pages"
local run_class = require "nibble.run"

local scenario = {}

local here = debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$") or "."
local folder = here .. "/../../../scripts/scenarios/"
-- of an installed tree
if not io.open(folder .. "decode.lua") then folder = here .. "/../../../nibble/scripts/scenarios/" end

------------------------------------------------------------------------------------------------------------ definitions

local fields = {
  title = "string", parameters = "table", setup = "function", step = "function", captured = "function",
    key = "function",
  recapture = "function", check = "function", finish = "function", verdict = "function", valid = "function",
    grid = "table",
  reports = "table", errors = "boolean",
}

local described = { min = true, max = true, multiple = true, help = true, any = true } -- see nibble.options
local taken = {} -- by the command
for name in ("steps device seed report trace check plant help"):gmatch("%S+") do taken[name] = true end

local function checked_definition(def, name)
  local where = "scenario " .. name
  if type(def) ~= "table" then
    return nil, ("%s: expected a file that returns a table, got %s"):format(where, type(def))
  end
  for field, value in pairs(def) do
    if field ~= "steps" and type(value) ~= fields[field] then
      return nil, ("%s: %s: expected %s, got %s"):format(where, tostring(field), fields[field] or "a known field",
        type(value))
    end
  end
  for _, field in ipairs { "title", "steps", "setup", "step" } do
    if def[field] == nil then return nil, ("%s: the field %s is missing"):format(where, field) end
  end
  def.parameters, def.name = def.parameters or {}, name
  if type(def.steps) ~= "table" then def.steps = { def.steps } end
  def.steps.min, def.steps.help = def.steps.min or 1, "steps"
  local kinds = { steps = def.steps }
  for parameter, kind in pairs(def.parameters) do kinds[parameter] = kind end
  for parameter, kind in pairs(kinds) do
    local default = type(kind) == "table" and kind[1]
    if default ~= false and type(default) ~= "string" and math.type(default) ~= "integer" or type(kind) ~= "table" then
      return nil, ("%s: %s: expected a table with a default: an integer, strings or false"):format(where, parameter)
    end
    if type(parameter) ~= "string" or not parameter:find("^%w[%w_]*$") or taken[parameter] and kind ~= def.steps then
      return nil, ("%s: parameters: expected names of letters, digits and _, not %s, got %s"):format(where,
        "steps, device, seed, report, trace, check, plant or help", tostring(parameter))
    end
    for key in pairs(kind) do
      if not described[key] and (math.type(key) ~= "integer" or type(kind[key]) ~= type(default)) then
        return nil, ("%s: %s: expected min, max, multiple, help, any and choices, got %s"):format(where, parameter,
          tostring(key))
      end
    end
    if math.type(default) == "integer" and (default < (kind.min or default) or default > (kind.max or default)
      or default % (kind.multiple or 1) ~= 0) then
      return nil, ("%s: %s: expected a default that is %s, got %d"):format(where, parameter, options.range(kind),
        default)
    end
  end
  return def
end

--- Loads a scenario by name or path; a name with a slash or ending in .lua is a path. Returns `nil, message` if there
--- is none, or if its file is wrong.
---@param name string
---@return table? def
---@return string? message
function scenario.load(name)
  local path = name:find("[/\\]") and name or name:find("%.lua$") and name or folder .. name .. ".lua"
  local file = io.open(path)
  if not file then
    local why = path == name and ": the file cannot be read" or " (nibble scenario list names them)"
    return nil, ("there is no scenario %s%s"):format(name, why)
  end
  file:close()
  local chunk, message = loadfile(path)
  if not chunk then return nil, message end
  local ok, def = pcall(chunk)
  if not ok then return nil, tostring(def) end
  return checked_definition(def, name)
end

--- The sorted names of the shipped scenarios; empty if they are not installed.
---@return string[]
function scenario.names()
  local names, list = {}, assert(io.popen("ls '" .. folder:gsub("'", "'\\''") .. "' 2>/dev/null"))
  for file in list:lines() do names[#names + 1] = file:match("^(.*)%.lua$") end
  list:close()
  return names
end

--- The sorted names of a scenario's parameters.
---@param def table
---@return string[]
function scenario.parameters(def)
  local names = {}
  for name in pairs(def.parameters) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- The parameters of `overrides`, and the defaults of the others.
---@param def table
---@param overrides? table<string, any>
---@return table<string, any>
function scenario.values(def, overrides)
  local p = {}
  for name, kind in pairs(def.parameters) do p[name] = kind[1] end
  for name, value in pairs(overrides or {}) do
    if p[name] == nil then
      error(("scenario %s: %s: expected a parameter, got an unknown name"):format(def.name, name), 0)
    end
    p[name] = value
  end
  return p
end

---------------------------------------------------------------------------------------------------------------- attempt

---@class nibble.attempt
---@field p table<string, any>
---@field device string
---@field seed integer
---@field steps integer
---@field plant? integer       self-test: halfway, one bit of the watched tensor with this number (0: any) is flipped
---@field snapshots? boolean   keep what a report needs
---@field recorder? nibble.recorder  of nibble.trace: gets the run with graphs, without the checks
---@field checked? boolean     in checked mode (nibble.check): what it reports is a failure too
---@field progress? fun()      called after each step

---@class nibble.outcome
---@field ok boolean
---@field message? string    what is wrong
---@field traceback? string  of an error
---@field kind? "check"|"error"|"report"
---@field reports? string[]  what checked mode reported
---@field step integer       the last step that was begun
---@field planted? string    what was flipped
---@field run nibble.run
---@field eager nibble.run

-- Flips one bit in one of the watched tensors.
local function plant(run, which)
  local random = pages.generator(run.seed + 77)
  local candidates = {}
  for _, entry in ipairs(run.watched) do
    if entry.tensor:numel() > 0 then candidates[#candidates + 1] = entry end
  end
  local entry = candidates[which > 0 and which or 1 + random(#candidates)]
  local bytes = entry.tensor:reinterpret("uint8")
  local shape, index = bytes.shape, {}
  local offset = random(bytes:numel())
  local rest = offset
  for dim = #shape, 1, -1 do
    index[dim] = rest % shape[dim] + 1
    rest = rest // shape[dim]
  end
  local wanted = bytes[index]
  local got = wanted ~ 1 << random(8)
  bytes[index] = got
  return entry.name .. ": " .. entry.where(offset, got, wanted)
end

-- The place in the scenario's own files that an error came from ("./mine.lua:12: "), and the traceback down to it.
local function place_of(level)
  local place
  repeat
    level = level + 1
    local info = debug.getinfo(level, "Sl")
    if info and info.currentline > 0 and info.source:sub(1, #here + 1) ~= "@" .. here then
      place = ("%s:%d: "):format(info.short_src, info.currentline)
    end
  until place or not info
  return place or "", (debug.traceback("", 3):gsub("\n%s*%[C%]: in function 'xpcall'.*", ""):gsub("^\n", ""))
end

-- The scenario with functions that note where an error comes from, since `scope` and `capture` raise it again without
-- that.
local function traced(def, outcome)
  local twin = setmetatable({}, { __index = def })
  for name, fn in pairs(def) do
    if type(fn) == "function" then
      twin[name] = function(...)
        local results = table.pack(xpcall(fn, function(err)
          local place, traceback = place_of(2)
          outcome.traceback = traceback
          return type(err) == "string" and not err:find("^[^\n:]+:%d+: ") and place .. err or err
        end, ...))
        if not results[1] then error(results[2], 0) end
        return table.unpack(results, 2, results.n)
      end
    end
  end
  return twin
end

local function one_step(def, run, step)
  run.step = step
  def.step(run)
  if def.captured then
    run:graph(def.key and def.key(run) or "step", function() def.captured(run) end, def.recapture
      and def.recapture(run))
  end
  run:settle()
end

local function attempt_once(def, opts)
  local outcome = { ok = true, step = 0 }
  def = traced(def, outcome)
  local function new(eager)
    return run_class.new {
      p = opts.p, device = opts.device, seed = opts.seed, steps = opts.steps, eager = eager, snapshots = opts.snapshots
        and not eager,
    }
  end
  local run, eager = new(false), new(true)
  outcome.run, outcome.eager = run, eager
  local function recorded(fn, ...) -- only what is called so is in the trace
    if not opts.recorder then return fn(...) end
    opts.recorder:pause(false)
    fn(...)
    opts.recorder:pause(true)
  end
  local function work()
    local function set_up(each)
      def.setup(each)
      each:settle()
    end
    eager.main:scope(set_up, eager)
    run.main:scope(recorded, set_up, run)
    run.main:scope(function() run:compare(eager) end)
    for step = 1, opts.steps do
      outcome.step = step
      eager.main:scope(one_step, def, eager, step)
      run.main:scope(function()
        recorded(one_step, def, run, step)
        if opts.plant and step == (opts.steps + 1) // 2 then outcome.planted = plant(run, opts.plant) end
        run:compare(eager)
        if def.check then def.check(run) end
      end)
      if opts.progress then opts.progress() end
    end
    run.main:scope(function()
      for _, cache in ipairs(run.caches) do
        local difference = cache:check_whole()
        if difference then run:fail("%s", difference) end
      end
      if def.finish then def.finish(run) end
    end)
  end
  local ok, raised = xpcall(work, function(err) -- not called when Lua's memory is used up
    outcome.traceback = outcome.traceback or debug.traceback("", 2)
    return err
  end)
  if not ok then
    if type(raised) == "string" and raised:find("interrupted!$") then error(raised, 0) end
    outcome.ok = false
    outcome.kind = getmetatable(raised) == run_class.failure and "check" or "error"
    outcome.message = ("step %d: %s"):format(outcome.step, tostring(raised))
    pcall(nibble.synchronize, opts.device) -- takes a fault that is left, which would be the next attempt's
  end
  return outcome
end

--- Runs a scenario with graphs and eagerly. Raises no error except that of Ctrl-C.
---@param def table
---@param opts nibble.attempt
---@return nibble.outcome
function scenario.attempt(def, opts)
  if not opts.checked then return attempt_once(def, opts) end
  local reports, kinds = {}, {}
  nibble.check(function(report)
    reports[#reports + 1] = report.text
    kinds[report.kind] = kinds[report.kind] or report.text
  end)
  local _ <close> = setmetatable({}, { __close = function() nibble.check(false) end })
  local outcome = attempt_once(def, opts)
  nibble.check_reports() -- passes on the last observations
  outcome.reports = reports
  if not outcome.ok then return outcome end
  local wrong
  for _, kind in ipairs(def.reports or {}) do
    if not kinds[kind] then wrong = ("checked mode did not report: %s"):format(kind) end
    kinds[kind] = nil
  end
  wrong = wrong or select(2, next(kinds))
  if wrong then outcome.ok, outcome.kind, outcome.message = false, "report", wrong end
  return outcome
end

----------------------------------------------------------------------------------------------------------------- shrink

local function copy_of(opts, changes)
  local copy = { p = {} }
  for name, value in pairs(opts) do if name ~= "p" then copy[name] = value end end
  for name, value in pairs(opts.p) do copy.p[name] = value end
  for name, value in pairs(changes or {}) do
    if name == "steps" then copy.steps = value else copy.p[name] = value end
  end
  copy.progress, copy.snapshots, copy.recorder = nil, nil, nil
  return copy
end

--- Whether these parameters can be combined and, if not, why. `given`: the parameters that were named; default: those
--- that differ from their defaults.
---@param def table
---@param opts nibble.attempt
---@param given? table<string, boolean>
---@return boolean
---@return string? reason
function scenario.valid(def, opts, given)
  if not given then
    given = {}
    for name, kind in pairs(def.parameters) do given[name] = opts.p[name] ~= kind[1] or nil end
  end
  local reason = def.valid and def.valid(opts.p, given, opts.steps)
  return not reason, reason
end

--- Finds the smallest parameters that still fail in the same way (a wrong byte, an error, or a report of checked mode).
--- Bisects each number between its minimum and its value, and tries earlier choices, until nothing gets smaller or
--- `budget` attempts were made.
---@param def table
---@param opts nibble.attempt   a failing attempt
---@param outcome nibble.outcome  its outcome
---@param budget? integer       default 60
---@return nibble.attempt opts
---@return nibble.outcome outcome
function scenario.shrink(def, opts, outcome, budget)
  budget = budget or 60
  local best, kind = copy_of(opts), outcome.kind
  local function fails(changes)
    local candidate = copy_of(best, changes)
    if budget <= 0 or not scenario.valid(def, candidate) then return false end
    budget = budget - 1
    local result = scenario.attempt(def, candidate)
    local same = not result.ok and result.kind == kind
    if same then best, outcome = candidate, result end
    collectgarbage()
    return same
  end
  local function value(name) return name == "steps" and best.steps or best.p[name] end

  local function shrink_number(name, description)
    local unit = description.multiple or 1
    local low, high = math.max(description.min or value(name), unit), value(name)
    if low >= high or fails { [name] = low } then return end
    while high - low > unit do -- low is well, high fails
      local middle = low + (high - low) // unit // 2 * unit
      if fails { [name] = middle } then high = middle else low = middle end
    end
  end

  local function shrink_one(name, description)
    if math.type(description[1]) == "integer" then return shrink_number(name, description) end
    for _, choice in ipairs(description[1] == false and { false } or description) do
      if choice == value(name) or fails { [name] = choice } then return end
    end
  end

  if outcome.step > 0 and outcome.step < best.steps then fails { steps = outcome.step } end
  local before
  repeat
    before = scenario.command_line(def, best)
    shrink_one("steps", def.steps)
    for _, name in ipairs(scenario.parameters(def)) do shrink_one(name, def.parameters[name]) end
  until budget <= 0 or before == scenario.command_line(def, best)
  return best, outcome
end

local function shell_word(text)
  text = tostring(text)
  return text:find("^[%w_./:=-]+$") and text or "'" .. text:gsub("'", "'\\''") .. "'"
end

--- The command line that repeats an attempt: seed, device, and all that is not the default.
---@param def table
---@param opts nibble.attempt
---@param command? string  how nibble is called; default "nibble"
---@return string
function scenario.command_line(def, opts, command)
  local words = { command or "nibble", "scenario", shell_word(def.name) }
  local function add(name, value)
    words[#words + 1] = "--" .. name:gsub("_", "-")
    if value ~= true then words[#words + 1] = shell_word(value) end
  end
  for _, name in ipairs(scenario.parameters(def)) do
    if opts.p[name] ~= def.parameters[name][1] then add(name, opts.p[name]) end
  end
  if opts.steps ~= def.steps[1] then add("steps", opts.steps) end
  add("seed", opts.seed)
  add("device", opts.device)
  if opts.plant then add("plant", true) end
  if opts.checked then add("check", true) end
  return table.concat(words, " ")
end

-- Such a failure is not shrunk: smaller parameters fit, and the largest that fit run for minutes.
local function out_of_memory(message)
  return message:find "not enough memory$" or message:find ": out of memory: " or message:find "%(out of memory%)$"
end

--- Describes a failure: what failed, the smallest parameters that fail, the seed and the command line that repeats it.
--- Does not shrink a failure for lack of memory.
---@param def table
---@param opts nibble.attempt
---@param outcome nibble.outcome
---@param command? string
---@return string
function scenario.explain(def, opts, outcome, command)
  if opts.plant then return "FAILED at " .. outcome.message end -- it was to fail
  if outcome.kind == "error" and out_of_memory(outcome.message) then
    return ("FAILED at %s\nrepeat:   %s"):format(outcome.message, scenario.command_line(def, opts, command))
  end
  local smallest, again = scenario.shrink(def, opts, outcome)
  local list = {}
  for _, name in ipairs(scenario.parameters(def)) do
    list[#list + 1] = ("%s = %s"):format(name, tostring(smallest.p[name]))
  end
  list[#list + 1] = ("steps = %d, seed = %d"):format(smallest.steps, smallest.seed)
  return ("FAILED at %s\nsmallest: %s\n  fails at %s\nrepeat:   %s"):format(outcome.message, table.concat(list, ", "),
    again.message,
    scenario.command_line(def, smallest, command))
end

----------------------------------------------------------------------------------------------------------------- busted

--- The points of a scenario's grid: its own `grid`; or else its defaults, all minima together, and each other choice
--- alone.
---@param def table
---@return table<string, any>[]
function scenario.grid(def)
  if def.grid then return def.grid end
  local points, least = { {} }, {}
  for _, name in ipairs(scenario.parameters(def)) do
    local kind = def.parameters[name]
    if math.type(kind[1]) == "integer" then least[name] = kind.min end
    for i = 2, #kind do points[#points + 1] = { [name] = kind[i] } end
    if kind[1] == false then points[#points + 1] = { [name] = true } end
  end
  if next(least) then table.insert(points, 2, least) end
  return points
end

--- Makes busted specs of a scenario: one for each point of its grid on the default device; the first one is tagged
--- quick. A failure has the text of `nibble scenario`.
---@param name string  a name or a path
function scenario.describe(name)
  local busted = require "busted"
  local describe, it = busted.describe, busted.it
  local def = assert(scenario.load(name))
  describe("scenario " .. def.name, function()
    for i, point in ipairs(scenario.grid(def)) do
      local words, steps = {}, point.steps
      for key, value in pairs(point) do words[#words + 1] = key .. " " .. tostring(value) end
      table.sort(words)
      it((#words > 0 and table.concat(words, ", ") or "with its defaults") .. (i == 1 and " #quick" or ""), function()
        local p = {}
        for key, value in pairs(point) do if key ~= "steps" then p[key] = value end end
        local opts = { p = scenario.values(def, p), device = assert(nibble.device()), seed = 1, steps = steps
          or def.steps[1] }
        assert(scenario.valid(def, opts))
        local outcome = scenario.attempt(def, opts)
        if not outcome.ok then error(scenario.explain(def, opts, outcome), 0) end
      end)
    end
  end)
end

--- The command `nibble scenario ...`: see nibble.scenario_command.
---@param arguments string[]
---@return integer status
function scenario.main(arguments)
  return require("nibble.scenario_command")(scenario, table.unpack(arguments))
end

return scenario
