--- Builds and runs the C programs in spec/support/host against runtime/nibble.h and the library under test.
local assert = require("luassert")
local pending = require("busted").pending
local process = require("spec.support.runtime_process")

local program = {}

local quote = process.quote
local host = process.root .. "spec/support/host/"

--- The build folder of the command under test, with a slash at the end.
program.build = process.command():match("^(.*/)[^/]*$") or process.build()
program.library = program.build .. "libnibble.a"

--- What these specs link and look into; a machine that only runs nibble may lack it.
function program.needs_library()
  local file = io.open(program.library, "rb")
  if not file then pending("no libnibble.a beside the command: a build is not here") end
  file:close()
end

function program.compiler()
  for _, name in ipairs({ os.getenv("CC") or "cc", "gcc", "clang" }) do
    if process.has(name) then return name end
  end
end

--- The flags of pkg-config for Lua 5.4; a spec that lacks them is skipped.
function program.lua_flags()
  local lua = process.run("pkg-config --cflags --libs lua5.4")
  if lua.status ~= 0 then return pending("no development files of Lua 5.4 here (pkg-config lua5.4)") end
  return (lua.stdout:gsub("%s+$", ""))
end

--- Compiles a host program and runs it; both must be silent but for `opts.stdout`.
---@param name string  spec/support/host/NAME.c
---@param opts? {libraries?: string, library?: string, cflags?: string, args?: string, before?: string, stdout?: string}
---  libraries: before the system's; library: instead of libnibble.a; args: the program's; before: shell text in front of it
function program.run(name, opts)
  opts = opts or {}
  local cc = program.compiler()
  if not cc then return pending("there is no C compiler (cc, gcc, clang)") end
  if not opts.library then program.needs_library() end
  local path = os.tmpname()
  local flags = process.sanitized() and "-fsanitize=address,undefined -fno-omit-frame-pointer" or ""
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
