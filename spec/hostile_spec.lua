-- Every public function, in C and in Lua, when memory or the driver fails it at any step: spec/support/host/every_entry.c and
-- every_function.lua say what is called and what must hold afterwards.
local process = require("spec.support.runtime_process")
local program = require("spec.support.host_program")

local quote = process.quote
local scratch

setup(function() scratch = os.tmpname() end)
teardown(function() os.remove(scratch) end)

local counts = "^%d+ calls, %d+ with a failure, %d+ errors\n$"

describe("memory that fails at any step", function()
  it("is an error of every function in C, after which all is as before", function()
    program.run("every_entry", { args = "allocator count", stdout = counts })
  end)

  it("is an error of every function in Lua, after which all is as before", function()
    program.needs_library()
    local root = process.run("cd " .. quote(process.root) .. " && pwd").stdout:gsub("\n$", "")
    program.run("every_function", {
      cflags = "-Wl,--wrap=realloc,--wrap=malloc,--wrap=free -I " .. quote(process.root .. "bindings"),
      library = quote(program.build .. "libnibble_lua.a") .. " " .. quote(program.library), libraries = program.lua_flags(),
      args = quote(root .. "/spec/support/host/every_function.lua") .. " " .. scratch .. " count", stdout = counts,
    })
  end)

  it("has been tried on everything that nibble.h declares", function()
    program.run("every_entry", { args = "list >" .. scratch })
    local listed, missing = process.read(scratch), {}
    local declared = 0
    for name in process.read(process.root .. "runtime/nibble.h"):gmatch("NIB_API%s[^;(]-%*?(nib_[%w_]+)%(") do
      declared = declared + 1
      if not listed:find("%f[%w_]" .. name .. "%f[^%w_]") then missing[#missing + 1] = name end
    end
    assert.is_true(declared > 80)
    assert.same({}, missing)
    -- What is listed is called, too.
    local source = process.read(process.root .. "spec/support/host/entries.h"):gsub('"[^"]*"', "")
    for name in listed:gmatch("nib_[%w_]+") do assert.is_truthy(source:find(name .. "(", 1, true), name) end
  end)
end)

describe("a driver that fails at any step", function()
  local standin = process.build() .. "standin"
  local log

  -- The environment of a program on the stand-in driver.
  local function on_standin()
    local file = io.open(standin .. "/libcuda.so.1", "rb")
    if not file then pending("no stand-in driver: the build makes it where it finds cuda.h (the CUDA Toolkit)") end
    file:close()
    log = os.tmpname()
    local folder = process.run("cd " .. quote(standin) .. " && pwd").stdout:gsub("\n$", "")
    return ("unset CUDA_VISIBLE_DEVICES; export LD_LIBRARY_PATH=%s NIB_STANDIN_LOG=%s NIBBLE_DEVICE=cuda:0;"):format(quote(folder), log)
  end

  -- Misuse and leaks, as the stand-in has written them down.
  local function assert_tidy()
    local text = process.read(log):gsub("%d+ end: %d+ calls, (%d+) made to fail, 0 misuses\n", function(failed)
      assert.is_true(tonumber(failed) > 500, failed)
      return ""
    end)
    os.remove(log)
    assert.equal("", text)
  end

  for name, result in pairs({ CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_UNKNOWN = 999 }) do
    it(("(%s) is an error or a detour of every function in C, after which all is as before"):format(name), function()
      program.run("every_entry", { before = on_standin(), args = ("driver %d count"):format(result), stdout = counts })
      assert_tidy()
    end)

    it(("(%s) is an error or a detour of every function in Lua, after which all is as before"):format(name), function()
      local before = on_standin()
      local done = process.script(([[
        package.cpath = package.cpath .. %q
        print(assert(loadfile(%q))(%q, %d))]]):format(";" .. standin .. "/?.so",
        process.root .. "spec/support/host/every_function.lua", scratch, result), { before = before, command = process.command() })
      assert.same({ 0, "" }, { done.status, done.stderr })
      assert.matches(counts, done.stdout)
      assert_tidy()
    end)
  end
end)
