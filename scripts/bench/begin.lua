-- The common begin of the benchmarks: finds nibble's modules and parses the options.
--
--   local opts, fail = dofile(here .. "/begin.lua")("cpu.lua", HELP, { quick = { false }, ... })
--
-- --help prints HELP and exits. A bad command line, and `fail(message)`, exit with a message and status 2.
local here = debug.getinfo(1, "S").source:match("^@(.*)[/\\][^/\\]*$")
package.path = here .. "/../../bindings/lua/?.lua;" .. package.path
package.cpath = package.cpath .. ";" .. here .. "/../../build/release/?.so"

return function(name, help, kinds)
  local function fail(message)
    io.stderr:write(name, ": ", message, "\n")
    os.exit(2, true)
  end
  kinds.help = { false }
  local opts, message = require("nibble.options").parse(arg or {}, kinds)
  if not opts then fail(message) end
  if opts.help then
    print(help)
    os.exit(0, true)
  end
  return opts, fail
end
