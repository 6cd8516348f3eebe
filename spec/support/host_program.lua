--- Builds and runs the C programs in spec/support/host against runtime/nibble.h and the library under test.
local assert = require("luassert")
local process = require("spec.support.runtime_process")

local program = {}

local quote = process.quote
local host = process.root .. "spec/support/host/"

--- The build folder of the command under test, with a slash at the end.
program.build = process.command():match("^(.*/)[^/]*$") or process.build()
program.library = program.build .. "libnibble.a"

--- Why there is no library to link and look into, or nil: a machine that only runs nibble may lack it.
---@return string? reason
function program.missing()
  local file = io.open(program.library, "rb")
  if not file then return "no libnibble.a beside the command: a build is not here" end
  file:close()
end

function program.compiler()
  for _, name in ipairs({ os.getenv("CC") or "cc", "gcc", "clang" }) do
    if process.has(name) then return name end
  end
end

--- The flags of pkg-config for Lua 5.4, or nil and why there are none.
function program.lua_flags()
  local lua = process.run("pkg-config --cflags --libs lua5.4")
  if lua.status ~= 0 then return nil, "no development files of Lua 5.4 here (pkg-config lua5.4)" end
  return (lua.stdout:gsub("%s+$", ""))
end

--- Compiles a host program and runs it; both must be silent but for `opts.stdout`. Returns why it cannot be run here, or nil.
---@param name string  spec/support/host/NAME.c
---@param opts? {libraries?: string, library?: string, cflags?: string, args?: string, before?: string, stdout?: string}
---  libraries: before the system's; library: instead of libnibble.a; args: the program's; before: shell text in front of it
---@return string? reason
function program.run(name, opts)
  opts = opts or {}
  local cc = program.compiler()
  if not cc then return "there is no C compiler (cc, gcc, clang)" end
  local missing = not opts.library and program.missing()
  if missing then return missing end
  local path = os.tmpname()
  local flags = process.sanitized() and process.sanitized() .. " -fno-omit-frame-pointer" or ""
  local built = process.run(table.concat({ cc, "-std=c11 -D_DEFAULT_SOURCE -O1 -g -Wall -Wextra -Werror", flags,
    opts.cflags or "", "-I", quote(process.root .. "runtime"), "-o", path, quote(host .. name .. ".c"),
    opts.library or quote(program.library), opts.libraries or "", "-lm -lpthread -ldl" }, " "))
  assert.same({ status = 0, stdout = "", stderr = "" }, built)
  local result = process.run(("cd / && %s timeout -k 5 300 %s %s"):format(opts.before or "", path, opts.args or ""))
  os.remove(path)
  local said = opts.stdout and result.stdout:match(opts.stdout)
  assert.same({ status = 0, stdout = said or "", stderr = "" }, result)
  assert.is_true(said ~= nil or not opts.stdout)
end

return program
