-- Every public function, in C and in Lua, when memory or the driver fails it at any step, and when its runtime has
-- ended: spec/embedding/every_entry.c and every_function.lua say what is called and what must hold afterwards.
local process = require("spec.support.runtime_process")
local program = require("spec.support.host_program")
local standin = require("spec.support.standin")

local quote = process.quote
local root = process.run("cd " .. quote(process.root) .. " && pwd").stdout:gsub("\n$", "")
local every_function = root .. "/spec/embedding/every_function.lua"
local scratch

setup(function() scratch = os.tmpname() end)
teardown(function() os.remove(scratch) os.remove(scratch .. ".safetensors") end)

local counts = "^%d+ calls, %d+ with a failure, %d+ errors\n$"

local function run(name, opts)
  local reason = program.run(name, opts)
  if reason then pending(reason) end
end

describe("memory that fails at any step", function()
  it("is an error of every function in C, after which all is as before", function()
    run("every_entry", { lua = true, args = "allocator count", stdout = counts })
  end)

  it("is an error of every function in Lua, after which all is as before", function()
    run("every_function", { lua = true, cflags = "-Wl,--wrap=realloc,--wrap=malloc,--wrap=free",
      args = quote(every_function) .. " " .. scratch .. " count", stdout = counts })
  end)

  it("has been tried on everything that the public headers declare", function()
    run("every_entry", { lua = true, args = "list >" .. scratch })
    local listed, missing = process.read(scratch), {}
    local declared = 0
    for _, header in ipairs({ "runtime/nibble.h", "runtime/nibble_tools.h", "bindings/nibble_lua.h" }) do
      for name in process.read(process.root .. header):gmatch("NIB_API%s[^;(]-%*?(%f[%w_][nl][%w_]+)%(") do
        declared = declared + 1
        name = name:gsub("_sized$", "") -- the header's own, which passes the size of a struct, calls it
        if not listed:find("%f[%w_]" .. name .. "%f[^%w_]") then missing[#missing + 1] = name end
      end
    end
    assert.is_true(declared > 93)
    assert.same({}, missing)
    -- What is listed is called, too.
    local host, source = process.root .. "spec/embedding/", ""
    for _, file in ipairs({ "entries.h", "entries_shared.h", "lua_entries.h" }) do
      source = source .. process.read(host .. file)
    end
    source = source:gsub('"[^"]*"', "")
    for name in listed:gmatch("[%w_]+") do assert.is_truthy(source:find("%f[%w_]" .. name .. "[(),]"), name) end
  end)
end)

describe("a runtime that is closed, or the parent's in a child of fork", function()
  it("is CLOSED or FORKED to every function in C", function()
    if process.sanitized() == "-fsanitize=thread" then
      return pending("ThreadSanitizer lets a child of a process with threads start none")
    end
    run("every_entry", { lua = true, args = "ended", before = "unset NIBBLE_DEVICE;" })
  end)

  it("makes no call of the driver", function()
    if standin.missing then return pending(standin.missing) end
    for _, device in ipairs({ "cpu", "cuda:0" }) do
      run("every_entry", { lua = true, args = "ended",
        before = ("unset CUDA_VISIBLE_DEVICES; export LD_LIBRARY_PATH=%s " ..
        "NIBBLE_DEVICE=%s;"):format(quote(standin.absolute()), device) })
    end
  end)
end)

describe("a driver that fails at any step", function()
  for name, result in pairs({ CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_UNKNOWN = 999 }) do
    it(("(%s) is an error or a detour of every function in C, after which all is as before"):format(name), function()
      if standin.missing then return pending(standin.missing) end
      local log = os.tmpname()
      run("every_entry", { lua = true, args = ("driver %d count"):format(result), stdout = counts,
        before =
          ("unset CUDA_VISIBLE_DEVICES; export LD_LIBRARY_PATH=%s NIB_STANDIN_LOG=%s NIBBLE_DEVICE=cuda:0;"):format(
          quote(standin.absolute()), log) })
      local misuses = process.read(log):gsub("%d+ end: %d+ calls, (%d+) made to fail, 0 misuses\n", function(failed)
        assert.is_true(tonumber(failed) > 500, failed)
        return ""
      end)
      os.remove(log)
      assert.equal("", misuses)
    end)

    it(("(%s) is an error or a detour of every function in Lua, after which all is as before"):format(name), function()
      if standin.missing then return pending(standin.missing) end
      local done = standin.run(("print(assert(loadfile(%q))(%q, %d))"):format(every_function, scratch, result),
        "NIBBLE_DEVICE=cuda:0")
      standin.assert_well(done, true)
      assert.matches(counts, done.stdout)
      assert.is_true(done.failed > 500, done.failed)
    end)
  end
end)
