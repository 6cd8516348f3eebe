-- Busted's output, as scripts/test shows it: each failure when it happens, as file:line, name and message; at the end
-- each skipped spec with its reason, and the counts. In colors when NIBBLE_COLORS is set.
--
-- When NIBBLE_COUNTS names a file, the counts go there instead, for whoever runs the specs to read, also when they die:
--   PASSED FAILED SKIPPED
--   done | running NAME OF SPEC
--   SECONDS s  NAME OF SPEC    a line each, when all is done
-- An error outside of a spec (a file that does not load, a setup that fails) counts as failed.
local busted = require "busted"

return function(options)
  local handler = {}
  local passed, failed, skipped = 0, 0, 0
  local skips, durations = {}, {}
  local colors = (os.getenv("NIBBLE_COLORS") or "") ~= ""
  local root = (os.getenv("NIBBLE_ROOT") or ".") .. "/"
  local counts_name = os.getenv("NIBBLE_COUNTS")
  local counts = counts_name and assert(io.open(counts_name, "w"))
  if counts then counts:setvbuf("full") end

  local function colored(code, text)
    return colors and ("\27[%sm%s\27[0m"):format(code, text) or text
  end

  local function save(state)
    if not counts then return end
    counts:seek("set")
    counts:write(("%d %d %d\n%s\n"):format(passed, failed, skipped, state))
    counts:flush()
  end

  local function full_name(element)
    if element.descriptor == "file" then return element.name end
    local names = {}
    while element and element.descriptor ~= "file" do
      table.insert(names, 1, element.name or element.descriptor or "busted")
      element = busted.parent(element)
    end
    return (table.concat(names, " "):gsub("%s*\n%s*", " "))
  end

  local function place_of(element, trace)
    trace = element.trace or trace
    if not (trace and trace.short_src) then return "" end
    local source = trace.short_src
    if source:sub(1, #root) == root then source = source:sub(#root + 1) end
    return ("%s:%d: "):format(source, trace.currentline)
  end

  -- The order of a shuffled block: --seed repeats it.
  local function seed_of(element)
    local parent = busted.parent(element)
    local seed = element.randomseed or (parent and parent.randomseed)
    return seed and (" (--seed=%d)"):format(seed) or ""
  end

  -- Once, however often --repeat runs it.
  local function skip(element, reason)
    local text = place_of(element) .. full_name(element) .. ": " .. reason
    if not skips[text] then skips[#skips + 1] = text end
    skips[text] = true
  end

  local function on_trouble(element, _, message, trace)
    -- What interpreters make of Ctrl-C. busted would go on with the next spec.
    if type(message) == "string" and message:find("interrupted!$") then os.exit(130) end
    io.write(colored(31, "failed "), place_of(element, trace), full_name(element), seed_of(element), "\n")
    message = type(message) == "string" and message or require("pl.pretty").write(message)
    io.write("    ", (message:gsub("\n", "\n    ")), "\n")
    if options.verbose and trace and trace.traceback then
      io.write("    ", (trace.traceback:gsub("^\n", ""):gsub("\n", "\n    ")), "\n")
    end
    io.flush()
    -- A spec that fails ends with that status; all else (setup, teardown, file, describe) is counted here.
    if element.descriptor ~= "it" then failed = failed + 1 end
    return nil, true
  end

  local function on_pending(element, _, message)
    local reason = type(message) == "string" and message:gsub("^[^\n]-:%d+: ", "") or "no reason given"
    skip(element, reason)
    -- Not a spec: a setup or before_each that skips what is below it.
    if element.descriptor ~= "it" then skipped = skipped + 1 end
    return nil, true
  end

  local function on_start(element)
    save("running " .. full_name(element))
    return nil, true
  end

  local function on_end(element, _, status)
    if status == "success" then
      passed = passed + 1
    elseif status == "pending" then
      skipped = skipped + 1
      if element.descriptor == "pending" then -- as a block: pending("name", "reason")
        local reason = type(element.run) == "string" and element.run or "no reason given"
        skip(element, reason)
      end
    else
      failed = failed + 1
    end
    if element.duration then
      table.insert(durations, { seconds = element.duration, name = place_of(element) .. full_name(element) })
    end
    save("running what follows " .. full_name(element))
    return nil, true
  end

  local function on_exit()
    for _, text in ipairs(skips) do io.write(colored(33, "skipped "), text, "\n") end
    if counts then
      save("done")
      for _, duration in ipairs(durations) do
        counts:write(("%8.3f s  %s\n"):format(duration.seconds, duration.name))
      end
      counts:flush()
    else
      io.write(("%d passed, %d failed, %d skipped\n"):format(passed, failed, skipped))
    end
    io.flush()
    return nil, true
  end

  function handler.subscribe()
    require "busted.languages.en" -- the runner's own messages are made of it
    busted.subscribe({ "test", "start" }, on_start)
    busted.subscribe({ "test", "end" }, on_end)
    busted.subscribe({ "pending" }, on_pending)
    busted.subscribe({ "failure" }, on_trouble)
    busted.subscribe({ "error" }, on_trouble)
    busted.subscribe({ "exit" }, on_exit)
  end

  return handler
end
