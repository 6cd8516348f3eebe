-- What takes real GPUs: a kernel that breaks the context, and two GPUs in one process. (devices_spec.lua compares their bytes with
-- the CPU's, kernel_spec.lua runs kernels; the rest of the specs run on any device.)
local nibble = require "nibble"
local process = require "spec.support.runtime_process"
local misuse = require "spec.support.runtime_misuse"

local on_standin = os.getenv("NIB_STANDIN_LOG") ~= nil

local gpus = {}
for _, device in ipairs(nibble.devices()) do
  if device.available and device.name:find("^cuda:") then gpus[#gpus + 1] = device.name end
end

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
    local expected = "cuda:0: context: expected a context that works, got context lost"
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
    if #gpus == 0 then pending("no CUDA device here") end
    if on_standin then pending("the stand-in driver runs the project's own kernels alone") end
    local script = code:gsub("BODY", body):gsub("LAUNCH", launch or "kernel:launch(1, 1, { t, 1 })"):gsub("ENDING", ending or "")
    local result = process.script(script, { before = "unset NIBBLE_DEVICE; timeout -k 5 120" })
    assert.same({ status = 0, stderr = "" }, { status = result.status, stderr = result.stderr })
    if result.stdout ~= "lost" then pending(result.stdout) end
  end

  for name, body in pairs {
    ["an illegal address"] = "*(volatile int *)16 = 1;",
    ["a misaligned address"] = "*(volatile int *)((char *)x + 1) = 1;",
    ["a trap"] = "asm volatile(\"trap;\");",
  } do
    it("(" .. name .. ") leaves one stable error for every later call, silent finalizers, the CPU, and a process that ends well",
      function() lose(body) end)
  end

  it("in a graph is that too", function() lose("*(volatile int *)16 = 1;", "s:scope(function() broken:replay() end)") end)

  for _, ending in ipairs { "os.exit(0)", "os.exit(0, true)", "nibble, t, s, graph, kernel = nil collectgarbage()" } do
    it("lets the process end by " .. ending, function() lose("*(volatile int *)16 = 1;", nil, ending) end)
  end
end)

describe("two GPUs", function()
  -- Options for tensors on the first and on the second.
  local function both()
    if #gpus < 2 then pending(("two GPUs are needed, %d here"):format(#gpus)) end
    return { device = gpus[1] }, { device = gpus[2] }
  end

  local function on(device, opts)
    opts = opts or {}
    opts.device = device.device
    return opts
  end

  it("copy between each other: compact, strided and converted, and what was queued before comes along", function()
    local first, second = both()
    for _, pair in ipairs { { first, second }, { second, first } } do
      local from, to = pair[1], pair[2]
      local source = nibble.arange(0, 600000, on(from, { dtype = "int32" })):view(600, 1000)
      local target = nibble.full({ 600, 1000 }, -1, on(to, { dtype = "int32" }))
      target:copy(source)
      assert.equal(to.device, target.device)
      assert.is_true(target:to("cpu"):equal(nibble.arange(0, 600000, { dtype = "int32", device = "cpu" }):view(600, 1000)))
      target:fill(-1)
      target:narrow(2, 101, 300):copy(source:narrow(2, 1, 300))
      assert.same({ -1, 0, 299, -1 }, { target[{ 1, 100 }], target[{ 1, 101 }], target[{ 1, 400 }], target[{ 1, 401 }] })
      local converted = nibble.zeros(1000, 600, on(to))
      converted:copy(source:permute(2, 1))
      assert.same({ 0.0, 1000.0, 599999.0 }, { converted[{ 1, 1 }], converted[{ 1, 2 }], converted[{ 1000, 600 }] })
      for i = 1, 20 do
        source:fill(i)
        target:copy(source)
        source:fill(-i)
        assert.equal(i, target[{ 600, 1000 }])
      end
      assert.is_true(source:to(to.device):equal(source))
    end
  end)

  it("are not mixed: the error names the argument", function()
    local first, second = both()
    local bytes = function(device) return on(device, { dtype = "uint8" }) end
    local key = nibble.zeros(4, 2, 16, on(first, { dtype = "bfloat16" }))
    local data, scales = nibble.zeros(2, 2, 4, 2, 8, bytes(first)), nibble.zeros(2, 2, 4, 2, 1, bytes(first))
    local slots = nibble.arange(4, on(first, { dtype = "int32" }))
    local operation = "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
    local names = { "append_key", "append_value", "slot_mapping", "paged_kv_cache (K)", "kv_cache_sf (K)" }
    for i, name in ipairs(names) do
      local arguments = { key, key, slots, data, scales }
      arguments[i] = arguments[i]:to(second.device)
      -- The stream is that of the first tensor's device: where that one is elsewhere, all others are.
      misuse.raises(function()
        nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(arguments[1], arguments[2], arguments[3], arguments[4],
          arguments[5], 1.0, 1.0)
      end, operation, i == 1 and { name, "append_value" } or name, { "on " .. gpus[1], "on " .. gpus[2] }, { gpus[1], gpus[2] })
    end
    local event = nibble.stream(first):record()
    misuse.raises(function() nibble.stream(second):wait(event) end, "stream:wait", "event", gpus[2], gpus[1])
  end)

  it("have memory, faults and captures of their own", function()
    local first, second = both()
    collectgarbage()
    collectgarbage()
    nibble.synchronize(gpus[1])
    nibble.synchronize(gpus[2])
    local before = { nibble.memory(gpus[1]).used, nibble.memory(gpus[2]).used }
    local kept = nibble.zeros(1 << 20, on(second, { dtype = "uint8" }))
    assert.same({ before[1], before[2] + (1 << 20) }, { nibble.memory(gpus[1]).used, nibble.memory(gpus[2]).used })
    local cache = nibble.zeros(2, 4, 384, on(second, { dtype = "uint8" }))
    nibble.mla.dequantize_cache(cache, nibble.tensor({ 99 }, on(second, { dtype = "int32" })))
    nibble.check_faults(gpus[1])
    misuse.raises(function() nibble.check_faults(gpus[2]) end, "mla.dequantize_cache", "slots", nil, "99")
    local x, y = nibble.zeros(8, first), nibble.zeros(8, second)
    nibble.synchronize(gpus[1])
    local graph = nibble.stream(first):capture(function()
      x:fill(2)
      y:fill(3) -- at once: the other GPU does not capture
      assert.equal(3.0, y[8])
    end)
    assert.equal(0.0, x[1])
    graph:replay()
    assert.equal(2.0, x[8])
    assert.equal(1 << 20, kept:numel())
  end)
end)
