-- Kernels of the user's own.
local nibble = require "nibble"

local DEVICE = nibble.device() or "cpu"
local has_gpu = DEVICE:find("^cuda") ~= nil

-- Each packs two E2M1 codes to a byte with nibble's own arithmetic.
local SOURCE = [[
#include "nvfp4.h"

extern "C" __global__ void encode(const float *x, uint8_t *codes, int n, float scale)
{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) codes[i] = nib_e2m1_encode(x[i] * scale, 0);
}

extern "C" __global__ void types(double *out, signed char a, int b, long long c, float d, double e, unsigned short f)
{
  out[0] = a, out[1] = b, out[2] = c, out[3] = d, out[4] = e, out[5] = f;
}
]]

-- What a machine may lack: the reason is the skip's.
local function compiled(name)
  if not has_gpu then pending("no CUDA device here") end
  if os.getenv("NIB_STANDIN_LOG") then pending("the stand-in driver runs the project's own kernels alone") end
  local kernel, reason = nibble.compile(SOURCE, { name = name, device = DEVICE })
  if not kernel then pending(reason) end
  return kernel
end

local function raises(pattern, fn, ...)
  local ok, message = pcall(fn, ...)
  assert.is_false(ok)
  assert.is_truthy(tostring(message):find(pattern, 1, true), message)
end

describe("user kernels #quick", function()
  it("are absent on the CPU, which is said in words", function()
    for _, fn in ipairs { nibble.compile, nibble.module } do
      local value, reason = fn("some code", { device = "cpu" })
      assert.is_nil(value)
      assert.matches("expected a CUDA device, got cpu", reason)
    end
    raises("compile: source: expected", nibble.compile, 5)
    raises("module: bytes: expected", nibble.module, {})
    raises("compile: opts: expected the option", nibble.compile, "x", { nam = "k" })
  end)

  it("run with nibble's number formats, and give the bytes of the CPU", function()
    local kernel = compiled("encode")
    assert.equal("nibble.kernel encode (" .. DEVICE .. ")", tostring(kernel))
    local x = nibble.randn(1000, { seed = 1, device = DEVICE })
    local codes = nibble.full({ 1000 }, 255, { dtype = "uint8", device = DEVICE })
    kernel:launch(4, 256, { x, codes, 1000, 2.0 })
    local values, got = x:totable(), codes:totable()
    local steps = { 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 }
    for i, value in ipairs(values) do
      local y, code = math.abs(value * 2), 0
      for k, edge in ipairs(steps) do
        if y > edge or (y == edge and k % 2 == 0) then code = k end
      end
      assert.equal(code + (value < 0 and 8 or 0), got[i])
    end
  end)

  it("take tensors and numbers whose types their parameters tell, or {dtype, number}", function()
    local kernel = compiled("types")
    local out = nibble.zeros(6, { dtype = "int64", device = DEVICE })
    kernel:launch(1, 1, { out, -3, 2 ^ 20 // 1 | 0, 1 << 53 | 1, 0.5, 0.1, { "uint16", 65535 } })
    local values = { string.unpack("<dddddd", out:bytes()) }
    assert.same({ -3.0, 1048576.0, 9007199254740992.0, 0.5, 0.1, 65535.0 }, { table.unpack(values, 1, 6) })
    raises("kernel:launch: args: expected 7 arguments", kernel.launch, kernel, 1, 1, { out })
    raises("kernel:launch: args: expected", kernel.launch, kernel, 1, 1,
      { out, -3, 1 << 40, 1, 0.5, 0.1, { "uint16", 1 } })
    raises("kernel:launch: args: expected", kernel.launch, kernel, 1, 1, { out, -3, 1, 1, 0.5, 0.1, 7 })
    raises("kernel:launch: args: expected", kernel.launch, kernel, 1, 1, { "5", -3, 1, 1, 0.5, 0.1, { "uint16", 1 } })
    raises("kernel:launch: args: expected", kernel.launch, kernel, 1, 1, { out, out, 1, 1, 0.5, 0.1, { "uint16", 1 } })
    raises("kernel:launch: block: expected", kernel.launch, kernel, 1, 2048,
      { out, 1, 1, 1, 0.5, 0.1, { "uint16", 1 } })
    raises("kernel:launch: grid: expected", kernel.launch, kernel, 0, 1, { out, 1, 1, 1, 0.5, 0.1, { "uint16", 1 } })
    raises("expected tensors on " .. DEVICE, kernel.launch, kernel, 1, 1,
      { nibble.zeros(6, { device = "cpu" }), 1, 1, 1, 0.5, 0.1, { "uint16", 1 } })
  end)

  it("tell their attributes", function()
    local attributes = compiled("types"):attributes()
    assert.equal("types", attributes.name)
    assert.is_true(attributes.max_threads >= 32 and attributes.registers > 0)
    if attributes.param_bytes then assert.same({ 8, 1, 4, 8, 4, 8, 2 }, attributes.param_bytes) end
  end)

  it("are captured, and outlive their handles in the graph", function()
    local kernel = compiled("encode")
    local x = nibble.full({ 64 }, 1.0, { dtype = "float32", device = DEVICE })
    local codes = nibble.zeros(64, { dtype = "uint8", device = DEVICE })
    local stream = nibble.stream { device = DEVICE }
    stream:wait(nibble.current_stream(DEVICE):record())
    local graph = stream:capture(function()
      kernel:launch({ 1, 1, 1 }, { 64 }, { x, codes, 64, 1.0 })
      x:fill(6)
    end)
    assert.same({ "encode", "fill" }, { graph:nodes()[1].name, graph:nodes()[2].name })
    kernel:close()
    kernel = nil
    collectgarbage()
    collectgarbage()
    stream:scope(function() graph:replay() end)
    stream:synchronize()
    assert.equal(2, codes[1])
    stream:scope(function() graph:replay() end)
    stream:synchronize()
    assert.equal(7, codes[64])
  end)

  it("that do not compile raise the compiler's log; names and images that are wrong are named", function()
    compiled("encode")
    raises("source.cu(1): error", nibble.compile, "this is no CUDA", { device = DEVICE })
    raises("module:kernel: name: expected a kernel of the module", function()
      nibble.compile(SOURCE, { device = DEVICE }):kernel("nothing")
    end)
    raises("module", nibble.module, "no code at all", { device = DEVICE })
    local module = nibble.compile(SOURCE, { device = DEVICE, options = { "--use_fast_math" } })
    assert.equal("nibble.module (" .. DEVICE .. ")", tostring(module))
    module:close()
    raises("expected an open module", module.kernel, module, "encode")
  end)
end)
