-- E2M1 by the instruction that GPUs of the Blackwell family have, beside the same in software: all inputs. The
-- instruction packs the codes of two numbers; nothing else in kernels/ uses E2M1 in hardware (decoders work on eight
-- codes at once, without a conversion).
--
-- A build has it only with premake's --hardware-e2m1, which also makes build/gen/e2m1.fatbin of spec/standin/e2m1.cu.
local nibble = require "nibble"
local process = require "spec.support.runtime_process"

local DEVICE = nibble.device() or "cpu"
local IMAGE = process.root .. "build/gen/e2m1.fatbin"
local SOURCE = process.root .. "spec/standin/e2m1.cu"

local function pair_module()
  local file = io.open(IMAGE, "rb")
  if not file then pending("this build has no E2M1 in hardware (premake's --hardware-e2m1)") end
  local bytes = file:read("a")
  file:close()
  if not DEVICE:find("^cuda") then pending("no CUDA device here") end
  if os.getenv("NIB_STANDIN_LOG") then pending("the stand-in driver runs the project's own kernels alone") end
  local ok, module = pcall(nibble.module, bytes, { device = DEVICE })
  if ok then return assert(module) end
  local name = "?"
  for _, info in ipairs(nibble.devices()) do name = info.name == DEVICE and info.description or name end
  if module:find("NO_BINARY_FOR_GPU", 1, true) then
    pending(("expected a GPU of compute capability 10.0 or later, got %s: it has no E2M1 in hardware"):format(name))
  end
  error(module)
end

-- What a kernel found, when `launch` has run it: it compared `count` inputs and none differed.
local function compares(count, launch)
  local found = nibble.tensor({ 0, -1, 0 }, { dtype = "int64", device = DEVICE })
  launch(found)
  local differing, first, compared = table.unpack(found:totable())
  assert.equal(count, compared)
  assert.equal(0, differing, ("%d of %d inputs differ, the least is 0x%x"):format(differing, compared, first))
end

describe("E2M1 in hardware", function()
  it("gives the codes of software for every float32, in both halves of a pair", function()
    local kernel = pair_module():kernel("pairs")
    local nans = 2 * (2 ^ 23 // 1 - 1) -- of the 2^32
    compares((1 << 32) - math.tointeger(nans), function(found)
      for i = 0, 63 do kernel:launch(1 << 18, 256, { found, i << 26 }) end
    end)
  end)

  it("gives them for each pair of kinds of numbers: ties, neighbours of ties, values, the ends of float32", function()
    local kernel = pair_module():kernel("classes")
    compares(64 * 64, function(found) kernel:launch(64, 64, { found }) end)
  end)

  it("encodes eight elements as software does: every 16-bit pattern, every scale", function()
    local kernel = pair_module():kernel("words")
    for _, type in ipairs { 1, 2 } do -- float16 and bfloat16, as kernels/params.h numbers them
      compares(126 * 8 * 65536, function(found) kernel:launch(126 * 8, 256, { found, type }) end)
    end
  end)

  it("compiles for the Blackwell family", function()
    local makefile = io.open(process.root .. "build/fatbin.mk", "rb")
    if not makefile then pending("no nvcc here") end
    local nvcc = process.quote(makefile:read("a"):match("NVCC = ([^\n]+)"))
    makefile:close()
    for _, architecture in ipairs { "100f", "120f" } do
      local out = os.tmpname()
      local gencode = ("-gencode arch=compute_%s,code=sm_%s"):format(architecture, architecture)
      local result = process.run(("%s -std=c++17 -O3 -fmad=false -Werror all-warnings %s -cubin -o %s %s"):format(nvcc,
        gencode, out,
        process.quote(SOURCE)))
      os.remove(out)
      assert.same({ 0, "" }, { result.status, result.stderr })
    end
  end)
end)
