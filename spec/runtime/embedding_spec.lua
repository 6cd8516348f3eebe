-- C programs that embed the runtime: spec/embedding/*.c, each compiled against runtime/nibble.h and libnibble.a.
-- Their checks are in the programs; here it is said what each proves. Also what the built files may and must contain.
local process = require("spec.support.runtime_process")
local standin = require("spec.support.standin")

local program = require("spec.support.host_program")

local quote, library, compiler = process.quote, program.library, program.compiler

local function run(name, opts)
  local reason = program.run(name, opts)
  if reason then pending(reason) end
end

-- For programs that look straight into tensors: a GPU's cannot be seen from the host (the stand-in driver's can).
local reads_tensors = not os.getenv("NIB_STANDIN_LOG") and { before = "export NIBBLE_DEVICE=cpu; " } or nil

local function has_library(path)
  local reason = program.missing(path)
  if reason then pending(reason) end
end

describe("a host in C", function()
  it("is told every status by name, versions, and what is wrong with a configuration or an argument", function()
    run("config")
  end)

  it("may have been built with an older or a newer header, whose descriptors have other sizes", function()
    run("sized")
  end)

  it("may create and close 1,000 runtimes, tidily or not, and memory stays flat", function()
    run("cycles")
  end)

  it("may use two runtimes in two threads", function()
    run("two_threads")
  end)

  it("may bring its allocator, which may fail at any call and gets everything back", function()
    run("allocator")
  end)

  it("may observe what is done, and look at what a storage holds", function()
    run("observe")
  end)

  it("may cap the memory of tensors, and gets messages of one line each", function()
    run("memory_cap")
  end)

  it("may bring its job system, whose floating-point environment and order change no byte", function()
    run("parallel_for", { cflags = "-frounding-math" })
  end)

  it("may flush subnormals, round as it likes and be built with -ffast-math: no value, comparison or text changes",
    function()
    run("floats", { lua = true })
    run("floats", { lua = true, cflags = "-ffast-math" }) -- which flushes subnormals in every program that is linked so
  end)

  it("sees asynchronous work: held streams, events, writes, releases, replays, errors", function()
    run("async", reads_tensors)
  end)

  it("closes a runtime with work in its queues: its functions still run and see what was written before them",
    function()
    run("closing", reads_tensors)
  end)

  -- On the stand-in, tidily; on_gpu: as it is where the specs run on a GPU.
  local function run_on_standin(name, on_gpu, gpus, lua)
    if on_gpu and (os.getenv("NIBBLE_DEVICE") or ""):find("^cuda") then return run(name) end
    if standin.missing then return pending(standin.missing) end
    local log = os.tmpname()
    run(name, { lua = lua,
      before = ("unset CUDA_VISIBLE_DEVICES; export NIBBLE_DEVICE=cuda:0 NIB_STANDIN_DEVICES=%d NIB_STANDIN_LOG=%s " ..
      "LD_LIBRARY_PATH=%s; "):format(gpus or 1, quote(log), quote(standin.absolute())) })
    local text = process.read(log)
    os.remove(log)
    assert.matches("^%d+ end: %d+ calls, 0 made to fail, 0 misuses\n$", text)
  end

  it("may bring a GPU context and streams of its own, which stay its own", function() run_on_standin("context", true)
    end)

  it("gives tensors to other frameworks and takes theirs, uncopied, whoever lets go first, on any thread", function()
    run("dlpack") -- spec/support/dlpack_check.py does it by hand with numpy and PyTorch
    run_on_standin("dlpack", true)
  end)

  it("has its GPU open when a sandbox is made: no call of a script waits for that", function()
    run_on_standin("opened", false, 1, true)
  end)

  it("is told that the CPU shares nothing by file descriptors", function()
    run("external", { before = "export NIBBLE_DEVICE=cpu;" })
  end)

  it("shares a GPU's memory and timeline semaphores with another API", function()
    run_on_standin("external", false, 2) -- spec/support/vulkan.c does it by hand with Vulkan
  end)

  it("may fork, and gets a clear error in the child", function()
    if process.sanitized() == "-fsanitize=thread" then
      return pending("ThreadSanitizer lets a child of a process with threads start none")
    end
    run("forked")
  end)

  it("may open and release 40,000 streams in a row: their work is done, and no threads stay", function()
    run("short_streams", { args = process.sanitized() and "1000" or "" })
    run_on_standin("short_streams", true)
  end)

  it("gives a frame's budget to what is to be freed, and a deadline to all waits", function()
    run("tick")
  end)

  it("may bound what is queued and how many streams there are, and drop what is queued", function()
    run("queued")
    run_on_standin("queued", true)
  end)

  it("tells observers and checked mode what dropped work was to write", function()
    run("dropped", { lua = true,
      before = ("export LUA_PATH=%s; "):format(quote(process.root .. "bindings/lua/?.lua;" .. package.path)) })
  end)

  it("gets its thread back within a millisecond of a budget, whatever is freed, and of a deadline, whatever is read",
    function()
    run("budgets", { args = process.sanitized() and "count" or "" })
  end)

  it("may open the module in its own Lua states, with runtimes of its own", function()
    run("lua_host", { lua = true })
  end)

  it("may run scripts that it does not trust, reload, cancel and bound them", function()
    run("scripts", { lua = true })
  end)

  it("may open and close hundreds of Lua states with the module", function()
    local module = package.searchpath("nibble", package.cpath)
    if not module then return pending("no nibble.so on package.cpath: the module is built into the interpreter") end
    if process.sanitized() == "-fsanitize=thread" then
      return pending("ThreadSanitizer does not see the order that a module without it keeps")
    end
    local lua, reason = program.lua_flags()
    if not lua then return pending(reason) end
    local path = process.run("cd " .. quote(module:match("^(.*)/")) .. " && pwd").stdout:gsub("%s+$", "") .. "/?.so"
    run("lua_states", { cflags = "-rdynamic", library = "", libraries = lua,
      args = quote(path) })
  end)
end)

describe("a plugin that links the static library", function()
  local plugins = {}
  local function compile()
    local cflags = "-shared -fPIC -fvisibility=hidden"
    for i = 1, 2 do
      local path, reason = program.compile("plugin", { cflags = cflags })
      if not path then return reason end
      plugins[i] = path
    end
  end
  teardown(function()
    for _, path in ipairs(plugins) do os.remove(path) end
  end)

  it("has a nibble of its own, which nobody else sees, beside others and the shared library", function()
    local reason = compile()
    if reason then return pending(reason) end
    if process.has("nm") then
      for _, path in ipairs(plugins) do
        local names = {}
        for name in process.run("nm -D --defined-only " .. path).stdout:gmatch(" %u ([%w_]+)") do
          names[#names + 1] = name
        end
        assert.same({ "plugin_close", "plugin_open", "plugin_use" }, names)
      end
    end
    local abi = process.read(process.root .. "runtime/nibble.h"):match("#define NIB_ABI_VERSION (%d+)u")
    local shared = program.build .. "libnibble.so." .. abi
    reason = program.missing(shared)
    if reason then return pending(reason) end
    run("plugins", { library = "", args = table.concat(plugins, " ") .. " " .. quote(shared) })
  end)
end)

describe("the public headers", function()
  local header = process.read(process.root .. "runtime/nibble.h") ..
    process.read(process.root .. "runtime/nibble_tools.h")

  it("is plain C11 and C++", function()
    local cc = compiler()
    if not cc then return pending("there is no C compiler (cc, gcc, clang)") end
    local path = quote(process.root .. "runtime/nibble_tools.h") -- nibble.h is in it
    local strict = " -Wall -Wextra -Wpedantic -Werror -fsyntax-only "
    local silence = { status = 0, stdout = "", stderr = "" }
    assert.same(silence, process.run(cc .. " -std=c11" .. strict .. "-x c " .. path))
    local cxx = process.has("c++") and "c++" or process.has("clang++") and "clang++"
    if cxx then assert.same(silence, process.run(cxx .. " -std=c++17" .. strict .. "-x c++ " .. path)) end
  end)

  it("declares only functions that the library has, and the library exports no others", function()
    has_library()
    if not process.has("nm") then return pending("no nm here (binutils)") end
    local exported = {}
    for name in process.run("nm -g --defined-only " .. quote(library)).stdout:gmatch(" [TDBRV] ([%w_]+)") do
      exported[name] = true
      if not name:find("^__") then assert.matches("^nib_", name) end -- the compiler's own are no names of ours
    end
    local declared = 0
    for name in header:gmatch("NIB_API%s[^;(]-%*?(nib_[%w_]+)%(") do
      declared = declared + 1
      assert.is_true(exported[name], name .. " is declared and not there")
    end
    assert.is_true(declared > 80, declared)
  end)

  it("documents what it declares: each function has a comment before it or in its group", function()
    local bare = {}
    for block in (header:gsub("#[^\n]*", "") .. "\n\n"):gmatch("(.-)\n\n") do
      if block:find("NIB_API [%w_][^;]-%(") and not block:find("/*", 1, true) then bare[#bare + 1] = block end
    end
    assert.same({}, bare)
  end)
end)

describe("the header for Lua", function()
  local path = process.root .. "bindings/nibble_lua.h"

  it("is plain C11 and C++", function()
    local cc = compiler()
    local lua = process.run("pkg-config --cflags lua5.4")
    if not cc or lua.status ~= 0 then return pending("there is no C compiler, or no Lua 5.4 to compile against") end
    local strict = " -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I " .. quote(process.root .. "runtime") .. " " ..
      lua.stdout:gsub("%s+$", "")
    local silence = { status = 0, stdout = "", stderr = "" }
    assert.same(silence, process.run(cc .. " -std=c11" .. strict .. " -x c " .. quote(path)))
    local cxx = process.has("c++") and "c++" or process.has("clang++") and "clang++"
    if cxx then assert.same(silence, process.run(cxx .. " -std=c++17" .. strict .. " -x c++ " .. quote(path))) end
  end)

  it("declares functions that its library has", function()
    has_library(program.lua_library)
    if not process.has("nm") then return pending("no nm here (binutils)") end
    local symbols = process.run("nm -g --defined-only " .. quote(program.lua_library)).stdout
    local declared = 0
    for name in process.read(path):gmatch("NIB_API%s[^;(]-%*?([%w_]+)%(") do
      declared = declared + 1
      assert.is_truthy(symbols:find(" T " .. name .. "\n"), name .. " is declared and not there")
    end
    assert.equal(13, declared)
  end)

  it("comes with a library whose names cannot be a host's", function()
    has_library(program.lua_library)
    if not process.has("nm") then return pending("no nm here (binutils)") end
    for name in process.run("nm -g --defined-only " .. quote(program.lua_library)).stdout:gmatch(" [TDBRV] ([%w_]+)") do
      assert.is_truthy(name:find("^nib_") or name == "luaopen_nibble" or name:find("^__"), name)
    end
  end)
end)

describe("the build", function()
  it("has every kernel of kernels/params.h in the library", function()
    has_library()
    if not process.has("nm") then return pending("no nm here (binutils)") end
    local symbols = process.run("nm --defined-only " .. quote(library)).stdout
    local list = process.read(process.root .. "kernels/params.h"):match("#define NIB_KERNEL_LIST%(X%)(.-)\n\n")
    local count = 0
    for name in list:gmatch("X%([%u_%d]+,%s*([%l_%d]+)%)") do
      count = count + 1
      assert.is_truthy(symbols:find(" [Tt] nib_cpu_" .. name .. "\n"), "nib_cpu_" .. name)
    end
    assert.is_true(count >= 13, count)
  end)

  it("exports nothing but luaopen_nibble from the module", function()
    if not process.has("nm") then return pending("no nm here (binutils)") end
    local module = package.searchpath("nibble", package.cpath)
    if not module then return pending("no nibble.so on package.cpath: the module is built into the interpreter") end
    local names = {}
    for name in process.run("nm -D --defined-only " .. quote(module)).stdout:gmatch(" %u ([%w_]+)") do
      names[#names + 1] = name
    end
    assert.same({ "luaopen_nibble" }, names)
  end)

  it("calls nothing that a library must not: exit, abort, printf, setlocale, signal", function()
    if not process.has("nm") then return pending("no nm here (binutils)") end
    if process.sanitized() then return pending("a sanitizer adds calls of its own") end
    local forbidden = { exit = true, _exit = true, abort = true, printf = true, puts = true, putchar = true,
      fprintf = true, vprintf = true, perror = true, setlocale = true, signal = true, sigaction = true, stdout = true,
      stderr = true, __assert_fail = true, __printf_chk = true, __fprintf_chk = true, atexit = true }
    for name in process.run("nm -u " .. quote(library)).stdout:gmatch(" U ([%w_]+)") do
      assert.is_nil(forbidden[name], name)
    end
  end)

  it("keeps no writable global state in the library", function()
    has_library()
    if not process.has("objdump") then return pending("no objdump here (binutils)") end
    if process.sanitized() then return pending("a sanitizer adds data of its own") end
    local found, objects = {}, 0
    for section, name in process.run("objdump -t " .. quote(library)).stdout:gmatch(" O (%S+)%s+%x+ ([^\n]+)") do
      objects = objects + 1
      -- Tables of addresses are written by the dynamic linker alone.
      local constant = section:match("^%.rodata") or section:match("^%.data%.rel%.ro")
      if not constant then found[#found + 1] = section .. " " .. name end
    end
    assert.is_true(objects > 5)
    assert.same({}, found)
  end)
end)
