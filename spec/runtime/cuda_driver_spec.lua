-- The CUDA device and its driver: why there is no GPU, in words; every call of the driver failing at every count; a
-- lost context; what a capture must keep from the driver. All on the stand-in driver (spec/standin), in child
-- processes, so that it takes no GPU and no machine's driver matters.
local standin = require("spec.support.standin")

local run, assert_well, describe_cuda = standin.run, standin.assert_well, standin.describe(describe, it, pending)

describe_cuda("without a usable GPU #quick", function()
  local no_library = os.tmpname()
  os.remove(no_library)
  setup(function() os.execute(("mkdir %s && : >%s/libcuda.so.1"):format(no_library, no_library)) end)
  teardown(function() os.execute(("rm -r %s"):format(no_library)) end)

  local reasons = {
    ["no driver"] = { "LD_LIBRARY_PATH=" .. no_library, "no NVIDIA driver on this machine", "libcuda.so.1 not found" },
    ["a driver that is too old"] = { "NIB_STANDIN_VERSION=11080", "too old", "12.0", "got 11.8" },
    ["a driver that lacks a function"] = { "NIB_STANDIN_MISSING=cuGraphExecUpdate", "12.4", "lacks cuGraphExecUpdate",
      more = " NIB_STANDIN_VERSION=12040" },
    ["a driver that does not tell its version"] = { "NIB_STANDIN_FAIL=cuDriverGetVersion:1:999",
      "does not return its version (error 999)" },
    ["a driver that does not start"] = { "NIB_STANDIN_FAIL=cuInit:1:CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
      "cannot be initialized",
      "unsupported display driver / cuda driver combination" },
    ["no GPU"] = { "NIB_STANDIN_DEVICES=0", "finds no GPU" },
    ["a GPU count that fails"] = { "NIB_STANDIN_FAIL=cuDeviceGetCount:1:999", "GPU" },
    ["no visible GPU"] = { "CUDA_VISIBLE_DEVICES=", "finds no GPU", "CUDA_VISIBLE_DEVICES" },
    ["the GPU -1 visible"] = { "CUDA_VISIBLE_DEVICES=-1", "finds no GPU", "CUDA_VISIBLE_DEVICES" },
    ["an unknown GPU visible"] = { "CUDA_VISIBLE_DEVICES=GPU-00000000-0000-0000-0000-000000000000", "finds no GPU" },
    ["a GPU that is too old"] = { "NIB_STANDIN_COMPUTE=7.5", "expected compute capability 8.0 or later", "got 7.5" },
    ["a GPU without memory pools"] = { "NIB_STANDIN_POOLS=0", "memory pools" },
    ["a GPU that is not described"] = { "NIB_STANDIN_FAIL=cuDeviceGetName:1:999", "unknown error" },
    ["a GPU that no kernels were built for"] = { "NIB_STANDIN_IMAGES=0", "kernels for", "Stand-in GPU 0" },
  }

  for name, case in pairs(reasons) do
    it("(" .. name .. ") require works, the reason is said in words, and cpu goes on", function()
      local result = run([[
        local nibble = require("nibble")
        local available, reason = nibble.available("cuda:0")
        assert(available == false)
        local device, again = nibble.device("cuda:0")
        assert(device == nil and again == reason)
        assert(nibble.devices()[2].name == "cuda:0" and nibble.devices()[2].reason == reason)
        assert(nibble.devices()[2].available == false and #nibble.devices() == 2)
        for _, create in ipairs({ nibble.zeros, nibble.randn, nibble.empty }) do
          local ok, message = pcall(create, 3, { device = "cuda:0" })
          assert(not ok and message:find(reason, 1, true), message)
        end
        assert(nibble.device() == "cpu" and nibble.zeros(3):fill(2)[3] == 2)
        io.write(reason)
      ]], case[1] .. (case.more or ""))
      assert_well(result, true)
      for i = 2, #case do assert.is_truthy(result.stdout:find(case[i], 1, true), result.stdout) end
      assert.is_nil(result.stdout:find("\n"))
    end)
  end

  it("NIBBLE_DEVICE=cuda:0 says the reason where a device is needed", function()
    assert_well(run([[
      local nibble = require("nibble")
      local device, reason = nibble.device()
      assert(device == nil and reason:find("finds no GPU", 1, true), reason)
      local ok, message = pcall(nibble.zeros, 3)
      assert(not ok and message:find("finds no GPU", 1, true), message)
    ]], "NIB_STANDIN_DEVICES=0 NIBBLE_DEVICE=cuda:0"))
  end)
end)

describe_cuda("GPUs #quick", function()
  it("are the default when there are any, and listed as CUDA_VISIBLE_DEVICES has them", function()
    for visible, names in pairs({ [""] = "0 1 2", ["CUDA_VISIBLE_DEVICES=1"] = "1",
      ["CUDA_VISIBLE_DEVICES=2,0"] = "2 0",
      ["CUDA_VISIBLE_DEVICES=GPU-6e696262-6c65-4000-8000-000000000002,1"] = "2 1",
        ["CUDA_VISIBLE_DEVICES=1,7,0"] = "1" }) do
      local result = run([[
        local nibble = require("nibble")
        assert(nibble.device() == "cuda:0")
        for i, info in ipairs(nibble.devices()) do
          if i > 1 then
            assert(info.name == "cuda:" .. i - 2 and info.available and info.processors > 0 and info.memory == 8 << 30)
            assert(nibble.full(3, i, { device = info.name })[3] == i)
            io.write(info.description:match("^Stand%-in GPU (%d)$"), " ")
          end
        end
      ]], "NIB_STANDIN_DEVICES=3 " .. visible)
      assert_well(result, true, visible)
      assert.equal(names .. " ", result.stdout, visible)
    end
  end)

  it("cost nothing before they are used", function()
    local result = run([[
      local nibble = require("nibble")
      assert(#nibble.devices() == 3 and nibble.zeros(3, { device = "cpu" })[1] == 0)
      assert(require("standin").live("contexts") == 0)
      nibble.zeros(3, { device = "cuda:1" })
      assert(require("standin").live("contexts") == 1)
    ]], "NIB_STANDIN_DEVICES=2")
    assert_well(result, true)
  end)

  it("work side by side, also while one captures", function()
    assert_well(run([[
      local nibble = require("nibble")
      local first, second = { device = "cuda:0" }, { device = "cuda:1" }
      local a, b = nibble.zeros(10, first), nibble.full(10, 4, second)
      local stream, elsewhere = nibble.stream(first), nibble.stream(second)
      local old = elsewhere:capture(function() b:fill(4) end)
      nibble.synchronize("cuda:0")
      local graph = stream:capture(function()
        a:fill(3)
        local c = nibble.zeros(10, second)
        c:close()
        local dead = elsewhere:record()
        dead:synchronize()
        dead:close()
        elsewhere:capture(function() b:fill(5) end):replay()
        old:replay()
        old:close()
        collectgarbage()
        collectgarbage()
        nibble.synchronize("cuda:1")
        assert(b[1] == 4)
        a:fill(6)
      end)
      assert(#graph:nodes() == 2 and a[1] == 0)
      stream:scope(function() graph:replay() end)
      assert(a[10] == 6)
      assert(require("standin").misuses() == 0, require("standin").misuse())
    ]], "NIB_STANDIN_DEVICES=2"), true)
  end)
end)

describe_cuda("memory of a GPU", function()
  it("that runs out is collected and trimmed before it becomes an error, after which everything goes on", function()
    assert_well(run([[
      local nibble = require("nibble")
      collectgarbage("stop")
      for _ = 1, 40 do nibble.zeros(1 << 20) end -- 4 MiB each
      local kept = {}
      local ok, message
      repeat
        ok, message = pcall(nibble.zeros, 1 << 20)
        if ok then kept[#kept + 1] = message end
      until not ok
      assert(message:find("memory", 1, true) and #kept > 10 and #kept <= 16, message)
      assert(kept[#kept]:fill(2)[1 << 20] == 2)
      kept = nil
      for _ = 1, 40 do assert(nibble.zeros(1 << 20):fill(3)[1] == 3) end
    ]], "NIB_STANDIN_MEMORY=" .. (64 << 20)), true)
  end)

  it("that is refused once is asked for again", function()
    assert_well(run([[
      local nibble, standin = require("nibble"), require("standin")
      nibble.zeros(1)
      for count = 1, 3 do
        standin.fail("cuMemAllocFromPoolAsync", count, 2)
        for i = 1, 3 do assert(nibble.full(5, i)[5] == i) end
        standin.fail()
      end
      assert(standin.fired() == 3)
      standin.fail("cuMemAllocFromPoolAsync", -1, 2)
      local ok, message = pcall(nibble.zeros, 5)
      assert(not ok and message:find("memory", 1, true), message)
      standin.fail()
      assert(nibble.zeros(5)[5] == 0)
    ]]), true)
  end)
end)

-- Something of everything. `tidy` closes what it makes.
local scenario = [[
  local nibble, standin = require("nibble"), require("standin")
  local bf16, bytes = { dtype = "bfloat16" }, { dtype = "uint8" }
  local function scenario()
    local t, u = nibble.zeros(64), nibble.tensor({ 1, 2, 3, 4 })
    local s, fork = nibble.stream(), nibble.stream()
    local before = s:record()
    nibble.synchronize()
    fork:wait(before)
    s:scope(function() t:fill(2) end)
    assert(t[64] == 2)
    local key = nibble.full({ 4, 2, 16 }, 3, bf16)
    local data, scales = nibble.zeros(2, 2, 4, 2, 8, bytes), nibble.zeros(2, 2, 4, 2, 1, bytes)
    local slots, one, out = nibble.arange(4), nibble.full(1, 1.0), nibble.zeros(4)
    local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    nibble.synchronize()
    local graph <close> = s:capture(function()
      local copy = u:clone()
      fork:wait(s:record())
      fork:scope(function() t:fill(3) end)
      append(key, key, slots, data, scales, one, one)
      out:copy(copy)
      s:wait(fork:record())
      out:fill(7)
    end)
    s:scope(function() graph:replay() end)
    s:synchronize()
    assert(out[4] == 7 and t[1] == 3 and data[{ 1, 1, 1, 1, 1 }] == 0x77)
    graph:update(function() out:fill(9) end) -- other nodes: a new instantiation
    graph:replay()
    local second <close> = s:capture(function() out:fill(1) end)
    second:update(function() out:fill(5) end) -- the same nodes
    second:replay()
    nibble.synchronize()
    assert(out[1] == 5)
    local after = s:record()
    after:synchronize()
    assert(before:elapsed(after) >= 0)
    assert(#u:expand(3, 4):contiguous():bytes() == 96 and u:equal(u:clone()))
    for _, object in ipairs({ t, u, before, after, s, fork }) do object:close() end
  end
]] .. standin.settle

describe_cuda("a call of the driver that fails", function()
  standin.it_fails_well(it, scenario, { "*", "cuEventQuery", "cuStreamQuery" }, 150)

  it("while a GPU is found, opened, used and closed is told, leaks nothing, and may be tried again", function()
    -- A process for each call, to its very end.
    local code = [[
      local nibble = require("nibble")
      local function use() return nibble.full(3, 5, { device = "cuda:0" })[3] end
      local failed = 0
      for _ = 1, 3 do
        local ok, message = pcall(use)
        local available, reason = nibble.available("cuda:0")
        assert(ok and message == 5 or type(message) == "string" and #message > 40, message)
        if not ok and available then
          failed = failed + 1
        elseif not ok then -- what is asked once, in the beginning, stays as it was answered
          assert(message:find(reason, 1, true), message)
          io.write("unavailable")
          os.exit(0, true)
        end
      end
      assert(failed <= 1)
      if failed == 1 then io.write("failed") end
    ]]
    local whole = run(code)
    assert_well(whole, true)
    assert.equal(0, whole.failed)
    assert.is_true(whole.calls > 150, whole.calls)
    local seen = { unavailable = 0, failed = 0, [""] = 0 }
    local count, result = 0
    repeat
      count = count + 1
      result = run(code, ("NIB_STANDIN_FAIL='*:%d:%d'"):format(count, count % 2 == 0 and 2 or 999))
      assert_well(result, true, "call " .. count)
      seen[result.stdout] = seen[result.stdout] + 1
    until result.failed == 0
    assert.is_true(count > 100 and seen.unavailable > 5 and seen.failed > 50, count)
  end)
end)

describe_cuda("a lost context", function()
  local afterwards = [[
    local keep = { nibble.zeros(8), nibble.stream(), nibble.stream():record() }
    local t, s, event = table.unpack(keep)
    local graph = s:capture(function() t:fill(1) end)
    for _ = 1, 2 do scenario() end
    settle()
    standin.fail(CALL, COUNT, 700)
    local ok, first = pcall(scenario)
    standin.fail()
    if standin.fired() == 0 or ok and NO_MATTER then
      io.write(standin.fired() == 0 and "not reached" or "")
      os.exit(0, true)
    end
    pcall(t.fill, t, 1) -- where the loss was told to nobody, the next call that does something meets it
    local calls = {
      zeros = function() nibble.zeros(3) end, tensor = function() nibble.tensor({ 1, 2 }) end,
      read = function() return t[1] end, write = function() t[1] = 3 end, fill = function() t:fill(1) end,
      synchronize = function() nibble.synchronize() end, ["stream:synchronize"] = function() s:synchronize() end,
      replay = function() graph:replay() end, capture = function() s:capture(function() end) end,
      update = function() graph:update(function() t:fill(2) end) end, record = function() s:record() end,
      ["event:synchronize"] = function() event:synchronize() end, print = function() return t:totable() end,
    }
    local function check(name, call)
      local works, message = pcall(call)
      local where = ("%s at %d, %s: %s"):format(standin.failed(), COUNT, name, message)
      assert(not works and type(message) == "string", where)
      assert(message:find(": context lost: an earlier kernel failed", 1, true), where)
      return message
    end
    for _ = 1, 2 do
      for name, call in pairs(calls) do
        local message = check(name, call)
        assert(check(name, call) == message, message)
      end
      settle()
    end
    assert(nibble.memory().used >= 0 and #tostring(s) > 0 and #nibble.devices() == 2)
    assert(nibble.full(3, 4, { device = "cpu" })[3] == 4)
    graph:close() t:close() event:close() s:close()
    ENDING
  ]]

  local function lose(call, count, ending)
    -- These do nothing in the context, and a second try makes good for the first.
    local outside =
      '({ cuCtxPushCurrent = 1, cuCtxPopCurrent = 1, cuThreadExchangeStreamCaptureMode = 1 })[standin.failed()]'
    local values = { NO_MATTER = outside, CALL = ("%q"):format(call), COUNT = tostring(count), ENDING = ending or "" }
    local result = run(scenario .. afterwards:gsub("%f[%w_][%u_]+%f[^%w_]", values), "NIBBLE_DEVICE=cuda:0")
    assert_well(result, false, call .. " at " .. count)
    return result.stdout ~= "not reached"
  end

  it("is one stable error on each later call, and the process ends well, whichever kernel broke it", function()
    local count = 0
    repeat count = count + 1 until not lose("kernel", count)
    assert.is_true(count > 15, count)
  end)

  it("is that too whichever call told it first", function()
    local count = 1
    while lose("*", count) do count = count + 3 end -- each takes a process
    assert.is_true(count > 150, count)
    for _, call in ipairs({ "cuEventQuery", "cuStreamQuery" }) do
      for first = 1, 3 do lose(call, first) end
    end
  end)

  it("ends a process quietly in each way to end", function()
    for _, ending in ipairs({ "os.exit(0)", "os.exit(0, true)", "nibble = nil collectgarbage()",
      "s = nibble.stream() KEPT = s", "coroutine.wrap(function() os.exit(0, true) end)()" }) do
      assert.is_true(lose("kernel", 3, ending))
    end
  end)
end)

describe_cuda("a capture", function()
  it("refuses before the driver hears of it, and stays intact", function()
    assert_well(run([[
      local nibble, standin = require("nibble"), require("standin")
      local s, other = nibble.stream(), nibble.stream()
      local t, one = nibble.tensor({ 1, 2 }), nibble.full(1, 5)
      local before, after = s:record(), s:record()
      local finished = other:capture(function() t:fill(1) end)
      local path = os.tmpname()
      nibble.synchronize()
      local refused = {
        function() t:totable() end, function() one:item() end, function() t:bytes() end, function() return t[1] end,
        function() return tostring(t) end, function() t:equal(t) end, function() t:amax() end, function() t:save(path) end,
        function() nibble.tensor({ 1 }) end, function() nibble.from_bytes("ab", 2, { dtype = "uint8" }) end,
        function() s:synchronize() end, function() other:synchronize() end, function() nibble.synchronize() end,
        function() nibble.check_faults() end, function() before:synchronize() end, function() before:elapsed(after) end,
        function() other:scope(function() t:fill(1) end) end, function() s:capture(function() end) end,
        function() other:capture(function() end) end, function() finished:replay() end,
        function() finished:update(function() end) end, function() s:wait(before) end,
      }
      local dead = { nibble.zeros(5), other:record(), other:capture(function() t:fill(3) end), nibble.stream() }
      local out = nibble.zeros(2)
      nibble.synchronize()
      local graph = s:capture(function()
        out:fill(1)
        for i, call in ipairs(refused) do
          local ok, message = pcall(call)
          assert(not ok and message:find("captur", 1, true), i .. ": " .. tostring(message))
          assert(standin.misuses() == 0, i .. ": " .. standin.misuse())
        end
        dead = nil
        for _ = 1, 3 do collectgarbage() end
        for i = 1, 20 do nibble.zeros(100):fill(i) end
        for _ = 1, 3 do collectgarbage() end
        nibble.stream():record():close()
        out:fill(2)
      end)
      assert(standin.misuses() == 0, standin.misuse())
      graph:replay()
      assert(out[1] == 2 and t[1] == 1)
      os.remove(path)
    ]], "NIBBLE_DEVICE=cuda:0"), true)
  end)

  it("that is given up, unjoined or full of errors leaves nothing behind, in every mode", function()
    assert_well(run(scenario .. [[
      local s, fork, t = nibble.stream(), nibble.stream(), nibble.zeros(10)
      nibble.synchronize()
      for round = 1, 300 do
        local opts = { mode = ({ "thread_local", "global", "relaxed" })[round % 3 + 1] }
        local ok = pcall(s.capture, s, function()
          t:fill(1)
          fork:wait(s:record())
          fork:scope(function() nibble.zeros(100) end)
          if round % 2 == 0 then error("given up") end
        end, opts)
        assert(not ok and standin.live("captures") == 0)
        s:capture(function() t:fill(round) end, opts):replay()
        assert(t[1] == round)
      end
      settle()
      assert(standin.live("allocations") == 1 and standin.misuses() == 0, standin.misuse())
    ]], "NIBBLE_DEVICE=cuda:0"), true)
  end)
end)

describe_cuda("the stand-in driver", function()
  it("keeps the rules of captures", function() -- on a machine with a GPU, rules.c can be run by hand on the real driver
    local reason, text = standin.program("rules", "runtime/cuda/driver.c")
    if reason then pending(reason) end
    assert.matches("^[6-9]%d rules tried on a driver for CUDA 13.0: 0 differences\n$", text)
  end)

  it("notices what it is there to notice", function()
    if os.getenv("NIBBLE_VALGRIND") then
      return pending("under valgrind it does not search kernels' parameters for addresses")
    end
    local reason = standin.program("misuse", "runtime/cuda/driver.c")
    if reason then pending(reason) end
  end)

  it("counts what is alive, and makes what it is told to fail", function()
    local result = run([[
      local nibble, standin = require("nibble"), require("standin")
      assert(standin.misuses() == 0 and standin.live("allocations") == 0 and standin.live("nonsense") == -1)
      local t = nibble.zeros(4, { device = "cuda:0" })
      assert(standin.live("allocations") == 1 and standin.live("contexts") == 1 and standin.live("streams") > 2)
      assert(standin.fired() == 0 and standin.failed() == "" and t[4] == 0)
      standin.fail("cuLaunchKernel", 2, 999)
      t:fill(1)
      assert(not pcall(t.fill, t, 2) and standin.fired() == 1 and standin.failed() == "cuLaunchKernel")
      assert(t:fill(3)[4] == 3)
      standin.fail("cuStreamDestroy", -1, 999) -- told, but done
    ]])
    assert_well(result, true)
    assert.is_true(result.failed > 2)
  end)
end)
