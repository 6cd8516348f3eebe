-- Child processes for the specs: runs a command line or a Lua script, and says how it ended and what it printed.
local process = {}

local here = debug.getinfo(1, "S").source:match("^@(.*)spec/support/[^/]*$")

--- The project's root folder, with a slash at the end.
process.root = here == "" and "./" or here

--- The build folder that is under test (where nibble.so lies), with a slash at the end.
function process.build()
  local module = package.searchpath("nibble", package.cpath)
  return module and module:match("^(.*/)[^/]*$") or process.root .. "build/release/"
end

--- The `nibble` command.
function process.command()
  return os.getenv("NIBBLE_COMMAND") or process.root .. "build/release/nibble"
end

function process.quote(text)
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

function process.read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

local SIGINT = 2

--- Runs a shell command line without input. status: the exit status, 128 + n after signal n. When SIGINT ends the shell
--- itself, somebody has pressed Ctrl-C, which we are deaf to meanwhile: the whole run ends, with status 130.
---@param line string
---@return {status: integer, stdout: string, stderr: string}
function process.run(line)
  local out, err = os.tmpname(), os.tmpname()
  local _, how, code = os.execute("( " .. line .. "\n) </dev/null >" .. out .. " 2>" .. err)
  if how == "signal" then code = 128 + code end
  local result = { status = code, stdout = process.read(out), stderr = process.read(err) }
  os.remove(out)
  os.remove(err)
  if how == "signal" and code == 128 + SIGINT then os.exit(130) end
  return result
end

--- Runs `code` as a script file. `opts.command`: what runs it (default: lua5.4, or the command where that alone has the
--- sanitizers in it); `opts.before`: shell text in front of it ("ulimit ...;", "NAME=value"); `opts.args`: behind it.
---@param code string
---@param opts? {command?: string, before?: string, args?: string}
function process.script(code, opts)
  opts = opts or {}
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(code)
  file:close()
  local paths = ("LUA_PATH=%s LUA_CPATH=%s"):format(process.quote(package.path), process.quote(package.cpath))
  local result = process.run(("export %s\n%s %s %s %s"):format(paths, opts.before or "",
    process.quote(opts.command or process.sanitized() and process.command() or "lua5.4"), path, opts.args or ""))
  os.remove(path)
  return result
end

--- Whether a program is on the PATH.
function process.has(program)
  return process.run("command -v " .. program).status == 0
end

local sanitizers = { sanitize = "-fsanitize=address,undefined", threads = "-fsanitize=thread" }

--- Whether the build under test has a sanitizer in it, which replaces the allocator and reserves address space: the
--- compiler's flag for it, or nil.
---@return string?
function process.sanitized()
  return sanitizers[process.command():match("([^/]*)/[^/]*$")]
end

return process
