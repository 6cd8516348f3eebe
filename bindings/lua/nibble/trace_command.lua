-- The command `nibble trace`: see nibble.trace.
local HELP = [=[
usage: nibble trace FILE [--chrome OUT.json] [--replay [--device NAME] [--max-bytes N]]

FILE is a trace of at most 1 GiB that nibble scenario NAME --trace FILE or a script with nibble.trace recorded. Without
options, a summary is printed: operations, pages, graphs, ranges, memory, the time between pieces of work. A trace that was
cut off is read up to its last whole line.

  --chrome OUT.json  write it for ui.perfetto.dev and chrome://tracing
  --replay           execute it again and check that the same happens: the same streams, tensors and numbers in each piece of
                     work, the same nodes in each graph, the same slots, pages and lengths in all index tensors
  --device NAME      device of the replay (default: NIBBLE_DEVICE; if not set, a GPU if one can be used, else the CPU)
  --max-bytes N      refuse a trace whose storages need more (default: 4 GiB, but at most half of the device's memory)

Exit status: 0; 1 if something differs or a file cannot be read or written; 2 for bad usage.]=]

local options = require "nibble.options"
local show = require "nibble.show"
local trace = require "nibble.trace"
local trace_replay = require "nibble.trace_replay"

local function complain(status, format, ...)
  io.stderr:write("nibble trace: ", show.visible(format:format(...)), "\n")
  return status
end

local function execute(run, device, max_bytes)
  local bar = require("nibble.progress").start("replay", #run.list)
  local done = 0
  local result, message = trace_replay.replay(run, { device = device, max_bytes = max_bytes, progress = function(i)
    bar:step(math.max(i - done, 0))
    done = math.max(i, done)
  end })
  bar:close()
  if not result then return complain(1, "%s", (message:gsub("^max_bytes", "--max-bytes"))) end
  for _, difference in ipairs(result.differences) do print(show.visible(difference)) end
  for _, fault in ipairs(result.faults) do print("content fault: " .. show.visible(fault)) end
  print(("%s: %d pieces of work and %d replays executed again, %d elements of index tensors compared"):format(
    result.ok and "ok" or "DIFFERENT", result.works, result.replays, result.compared))
  return result.ok and 0 or 1
end

return function(path, ...)
  if path == nil or path == "--help" or path == "-h" then
    print(HELP)
    return path and 0 or 2
  elseif path:find("^%-") then
    return complain(2, "expected a file before %s", path)
  end
  local opts, given = options.parse({ ... }, { chrome = {}, replay = { false }, device = {}, help = { false },
    ["max-bytes"] = { trace_replay.MOST_BYTES, min = 1 } })
  if not opts then return complain(2, "%s", given) end
  if opts.help then
    print(HELP)
    return 0
  end
  for _, name in ipairs { "device", "max-bytes" } do
    if given[name] and not opts.replay then return complain(2, "--%s needs --replay", name) end
  end
  local run, message = trace.read(path)
  if not run then return complain(1, "%s", message) end
  if opts.chrome == path then return complain(2, "--chrome: expected another file than the trace, got %s", path) end
  if run.cut then complain(0, "warning: %s; it is read up to there", run.cut) end
  if opts.chrome then
    local ok, why = trace.chrome(run, opts.chrome)
    if not ok then return complain(1, "--chrome: %s", why) end
  end
  if opts.replay then return execute(run, opts.device, given["max-bytes"] and opts["max-bytes"]) end
  if not opts.chrome then print(trace.summary(run)) end
  return 0
end
