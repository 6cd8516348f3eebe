--- Builds and runs the C programs in spec/embedding against the public headers and the libraries under test. What
--- cannot be done here is said in words, for the spec's `pending`, which only a spec file has.
local assert = require("luassert")
local process = require("spec.support.runtime_process")

local program = {}

local quote = process.quote
local host = process.root .. "spec/embedding/"

--- The build folder of the command under test, with a slash at the end.
program.build = process.command():match("^(.*/)[^/]*$") or process.build()
program.library = program.build .. "libnibble.a"
program.lua_library = program.build .. "libnibble_lua.a"

--- Why there is no library to link and look into, or nil: a machine that only runs nibble may lack it.
---@param path? string  default: program.library
---@return string? reason
function program.missing(path)
  path = path or program.library
  local file = io.open(path, "rb")
  if not file then return "no " .. path:match("[^/]*$") .. " beside the command: a build is not here" end
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

--- Compiles a host program; returns the file, which the caller removes, or nil and why it cannot be done here.
---@param name string  spec/embedding/NAME.c
---@param opts? {libraries?: string, library?: string, cflags?: string, lua?: boolean}
---  libraries: before the system's; library: instead of libnibble.a; lua: with bindings/nibble_lua.h, its library and
---  Lua
---@return string? path, string? reason
function program.compile(name, opts)
  opts = opts or {}
  local cc = program.compiler()
  if not cc then return nil, "there is no C compiler (cc, gcc, clang)" end
  local libraries, cflags = { opts.library or quote(program.library), opts.libraries or "" }, opts.cflags or ""
  local missing = not opts.library and program.missing() or opts.lua and program.missing(program.lua_library)
  if missing then return nil, missing end
  if opts.lua then
    local lua, reason = program.lua_flags()
    if not lua then return nil, reason end
    table.insert(libraries, 1, quote(program.lua_library))
    table.insert(libraries, lua)
    cflags = cflags .. " -I " .. quote(process.root .. "bindings")
  end
  local path = os.tmpname()
  local flags = process.sanitized() and process.sanitized() .. " -fno-omit-frame-pointer" or ""
  local built = process.run(table.concat({ cc, "-std=c11 -D_DEFAULT_SOURCE -O1 -g -Wall -Wextra -Werror", flags, cflags,
    "-I", quote(process.root .. "runtime"), "-o", path, quote(host .. name .. ".c"), table.concat(libraries, " "),
    "-lm -lpthread -ldl" }, " "))
  assert.same({ status = 0, stdout = "", stderr = "" }, built)
  return path
end

--- Compiles a host program and runs it; both must be silent but for `opts.stdout`. Returns why it cannot be run here,
--- or nil.
---@param name string
---@param opts? {args?: string, before?: string, stdout?: string}
---  args: the program's; before: shell text in front of it; further options are compile's
---@return string? reason
function program.run(name, opts)
  opts = opts or {}
  local path, reason = program.compile(name, opts)
  if not path then return reason end
  local result = process.run(("cd / && %s timeout -k 5 300 %s %s"):format(opts.before or "", path, opts.args or ""))
  os.remove(path)
  local said = opts.stdout and result.stdout:match(opts.stdout)
  assert.same({ status = 0, stdout = said or "", stderr = "" }, result)
  assert.is_true(said ~= nil or not opts.stdout)
end

return program
