-- A kernel that breaks the context of a real GPU. (cuda_driver_spec.lua loses contexts of the stand-in driver in every
-- way.)
local nibble = require "nibble"
local process = require "spec.support.runtime_process"

local on_standin = os.getenv("NIB_STANDIN_LOG") ~= nil

describe("a user kernel that breaks the context", function()
  -- In a process of its own, which loses its GPU for good.
  local code = [[
    local nibble = require("nibble")
    local gpu = { device = "cuda:0" }
    local kernel, reason = nibble.compile(
      'extern "C" __global__ void wild(int *x, int there) { if (there) BODY else x[0] = 3; }', { name = "wild", device = gpu.device })
    if not kernel then
      io.write(reason)
      os.exit(0, true)
    end
    local t, s = nibble.zeros(8, { dtype = "int32", device = gpu.device }), nibble.stream(gpu)
    local event, on_cpu = s:record(), nibble.zeros(8, { device = "cpu" })
    local graph = s:capture(function() t:fill(1) end)
    local broken = s:capture(function() kernel:launch(1, 1, { t, 1 }) end)
    kernel:launch(1, 1, { t, 0 })
    assert(t[1] == 3)
    for i = 1, 50 do nibble.full(1000, i, gpu) end -- for the finalizers
    local expected = "cuda:0: context lost: an earlier kernel failed"
    local function check(name, call, ...)
      local ok, message = pcall(call, ...)
      assert(not ok, name .. ": no error")
      assert(type(message) == "string" and message:find(expected, 1, true), name .. ": " .. tostring(message))
    end
    LAUNCH
    check("the first wait", nibble.synchronize, gpu.device)
    local calls = {
      zeros = function() nibble.zeros(3, gpu) end, tensor = function() nibble.tensor({ 1, 2 }, gpu) end,
      read = function() return t[1] end, write = function() t[1] = 3 end, fill = function() t:fill(1) end,
      print = function() return t:totable() end, copy = function() t:copy(on_cpu) end, ["to the cpu"] = function() t:to("cpu") end,
      synchronize = function() nibble.synchronize(gpu.device) end, ["stream:synchronize"] = function() s:synchronize() end,
      replay = function() graph:replay() end, capture = function() s:capture(function() end) end,
      update = function() graph:update(function() t:fill(2) end) end, record = function() s:record() end,
      ["event:synchronize"] = function() event:synchronize() end, launch = function() kernel:launch(1, 1, { t, 0 }) end,
      compile = function() nibble.compile('extern "C" __global__ void k() {}', gpu) end,
      ["check_faults"] = function() nibble.check_faults(gpu.device) end,
    }
    for _ = 1, 2 do
      for name, call in pairs(calls) do check(name, call) end
      for _ = 1, 3 do collectgarbage() end
    end
    assert(nibble.memory(gpu.device).used >= 0 and #tostring(s) > 0 and #nibble.devices() >= 2)
    assert(on_cpu:fill(4)[8] == 4 and nibble.randn(100, { device = "cpu", seed = 1 }):amax() > 0)
    io.write("lost")
    ENDING
  ]]

  local function lose(body, launch, ending)
    if not nibble.available("cuda:0") then pending("no CUDA device here") end
    if on_standin then pending("the stand-in driver runs the project's own kernels alone") end
    local script = code:gsub("BODY", body):gsub("LAUNCH", launch or "kernel:launch(1, 1, { t, 1 })"):gsub("ENDING",
      ending or "")
    local result = process.script(script, { before = "unset NIBBLE_DEVICE; timeout -k 5 120" })
    assert.same({ status = 0, stderr = "" }, { status = result.status, stderr = result.stderr })
    if result.stdout ~= "lost" then pending(result.stdout) end
  end

  for name, body in pairs {
    ["an illegal address"] = "*(volatile int *)16 = 1;",
    ["a misaligned address"] = "*(volatile int *)((char *)x + 1) = 1;",
    ["a trap"] = "asm volatile(\"trap;\");",
  } do
    it("(" .. name ..
      ") leaves one stable error for every later call, silent finalizers, the CPU, and a process that ends well",
      function() lose(body) end)
  end

  it("in a graph is that too", function() lose("*(volatile int *)16 = 1;", "s:scope(function() broken:replay() end)")
    end)

  for _, ending in ipairs { "os.exit(0)", "os.exit(0, true)", "nibble, t, s, graph, kernel = nil collectgarbage()" } do
    it("lets the process end by " .. ending, function() lose("*(volatile int *)16 = 1;", nil, ending) end)
  end
end)
