-- Runs busted in whatever interpreter runs this file: `lua5.4 spec/support/busted.lua [options] [files]`.
-- For scripts/test, which runs each file in a process of its own, a first argument may be:
--   --list-files=NAME  writes to the file NAME what would be run, the files that take long first, each ended by a zero
--                      byte; and to NAME.alone those that nothing else should run beside
--   --only-file=FILE   runs this file instead of those that are named or found
local list = (arg[1] or ""):match("^%-%-list%-files=(.*)$")
local only = (arg[1] or ""):match("^%-%-only%-file=(.*)$")

-- A long file that starts last keeps one core busy while the others idle. The rest goes by size.
local slow = { "new_operation_spec.lua", "scenarios_spec.lua", "embedding_spec.lua", "scenarios_checked_spec.lua",
  "command_spec.lua", "install_spec.lua", "hostile_spec.lua", "cuda_driver_spec.lua", "trace_spec.lua",
  "generated_spec.lua", "graphs_refusals_spec.lua", "scripts_spec.lua" }

-- Frames of 8 ms by the clock on the wall, in which scripts of strangers have to get their turn.
local alone = { ["example_host_spec.lua"] = true }

local function duration(file)
  for i, name in ipairs(slow) do
    if file:match("[^/]*$") == name then return math.maxinteger - i end
  end
  local handle = io.open(file)
  local size = handle and handle:seek("end") or 0
  if handle then handle:close() end
  return size
end

local function write_list(loader, roots, patterns, options)
  local _, _, find = loader({}, {})
  local path = require "pl.path"
  local files, seconds = {}, {}
  for _, root in ipairs(roots) do
    local found = path.exists(root) and find({ root }, patterns, options) or {}
    if #found == 0 then
      io.stderr:write("no specs there: " .. root .. "\n")
      os.exit(2)
    end
    for _, file in ipairs(found) do
      if not seconds[file] then
        seconds[file] = duration(file)
        files[#files + 1] = file
      end
    end
  end
  table.sort(files, function(a, b) return seconds[a] > seconds[b] end)
  local beside, by_itself = assert(io.open(list, "wb")), assert(io.open(list .. ".alone", "wb"))
  for _, file in ipairs(files) do assert((alone[file:match("[^/]*$")] and by_itself or beside):write(file, "\0")) end
  assert(beside:close() and by_itself:close())
  os.exit(0)
end

if list or only then
  table.remove(arg, 1)
  local loader = require "busted.modules.test_file_loader"
  package.loaded["busted.modules.test_file_loader"] = function(busted, loaders)
    return function(roots, patterns, options)
      if list then return write_list(loader, roots, patterns, options) end
      return loader(busted, loaders)({ only }, patterns, options)
    end
  end
end

require "busted.runner"({ standalone = false })
