-- User kernels on the CUDA device, and what a host leaves to a runtime that it closes, on the stand-in driver: what is
-- refused before the driver hears of it, and what is given back. (user_kernels_spec.lua runs kernels on a GPU.)
local process = require("spec.support.runtime_process")
local standin = require("spec.support.standin")

local run, assert_well = standin.run, standin.assert_well

if standin.missing then
  describe("user kernels #quick", function()
    it("is tried on the stand-in driver", function() pending(standin.missing) end)
  end)
  return
end

-- `fill(t, grid, block, opts)`: the project's own kernel of that name as if it were a user's. `fatbin`: code that the
-- stand-in takes.
local prelude = [[
  local nibble, standin = require("nibble"), require("standin")
  local fatbin = string.pack("<I4I2I2I8", 0xBA55ED50, 1, 16, 0)
  local kernel = nibble.module(fatbin):kernel("nib_cuda_fill_8")
  local function fill(t, grid, block, opts)
    local args = { t, { "int32", 4 }, { "int32", 1 } } -- struct nib_fill_params
    for i = 1, 16 do args[#args + 1] = { "int64", i % 8 == 1 and (i == 1 and #t or 1) or 0 } end
    args[#args + 1] = { "int64", 7 }
    kernel:launch(grid, block, args, opts)
  end
  local function raises(pattern, fn, ...)
    local ok, message = pcall(fn, ...)
    assert(not ok and message:find(pattern, 1, true), message)
  end
  local t = nibble.zeros(64, { dtype = "uint8" })
]]

-- One that does not tell a kernel's parameters: its struct can be given field by field.
local older_driver = "NIBBLE_DEVICE=cuda:0 NIB_STANDIN_MISSING=cuFuncGetParamInfo"

describe("user kernels on the stand-in #quick", function()
  it("are launched, and sizes that no GPU takes are refused by name, also in a capture, which goes on", function()
    assert_well(run(prelude .. [[
      fill(t, 1, 32)
      assert(t[64] == 7)
      local graph = nibble.stream():capture(function()
        for _, case in ipairs({
          { { 1 << 31 }, 1, "grid: expected 1..2147483647 in dimension 1, got 2147483648" },
          { { 1, 65536 }, 1, "grid: expected 1..65535 in dimension 2, got 65536" },
          { { 1, 1, 70000 }, 1, "grid: expected 1..65535 in dimension 3, got 70000" },
          { 1, { 1, 1, 65 }, "block: expected 1..64 in dimension 3, got 65" },
          { 1, { 1 << 31, 1 << 31, 4 }, "block: expected 1..1024 in dimension 1" }, -- 2^64 threads
          { 1, { 1024, 2 }, "block: expected at most 1024 threads for nib_cuda_fill_8, got 2048" },
          { 1, 1, "shared: expected at most the shared memory of a block of cuda:0, got 300000 bytes", { shared = 300000 } },
          { 1, 1, "shared: expected at most the shared memory", { shared = 0xFFFFFFFF } },
        }) do
          raises("kernel:launch: " .. case[3], fill, t, case[1], case[2], case[4])
        end
        fill(t, 1, 32)
      end)
      assert(standin.misuses() == 0, standin.misuse())
      t:fill(0)
      graph:replay()
      assert(t[1] == 7)
    ]], older_driver), true)
  end)

  it("get the shared memory that they ask for beside what they declare", function()
    assert_well(run(prelude .. [[
      local second = nibble.module(fatbin):kernel("nib_cuda_fill_8")
      for _, bytes in ipairs({ 1000, 33 << 10, 40000, 200 << 10, 60000 }) do
        t:fill(0)
        fill(t, 1, 32, { shared = bytes })
        assert(t[64] == 7)
      end
      assert(second:attributes().max_dynamic_shared_bytes == 32 << 10 and standin.misuses() == 0, standin.misuse())
    ]], older_driver .. " NIB_STANDIN_SHARED=16384"), true)
  end)

  it("come from whole images alone: the driver follows what an image says about itself", function()
    assert_well(run(prelude .. ([[
      local elf = assert(io.open(%q, "rb")):read("a")
      local whole = { fatbin, fatbin .. "more", elf, "// PTX\n.version 8.0\n.target sm_90\n.address_size 64\n\0" }
      for _, image in ipairs(whole) do nibble.module(image):close() end
      local broken = { "", "\0", "no code", "\127ELF", elf:sub(1, 63), elf:sub(1, -2), elf:sub(1, #elf // 2), fatbin:sub(1, 15),
        string.pack("<I4I2I2I8", 0xBA55ED50, 1, 16, 1), string.pack("<I4I2I2I8", 0xBA55ED50, 1, 16, 1 << 63),
        string.pack("<I4I2I2I8", 0xBA55ED50, 1, 0, 0), string.pack("<I4I4I8I8", 0x466243B1, 1, 16, 0), whole[4] .. "more",
        elf:sub(1, 40) .. string.pack("<I8", 1 << 62) .. elf:sub(49) }
      for _, image in ipairs(broken) do
        raises(("module: image: expected PTX, or a whole cubin or fatbin, got %%d other bytes"):format(#image), nibble.module, image)
      end
      raises("module:kernel: name: expected a kernel of the module", function() nibble.module(fatbin):kernel("nothing") end)
    ]]):format(standin.library), "NIBBLE_DEVICE=cuda:0"), true)
  end)

  it("that are compiled to something else than code for the GPU are refused with the reason", function()
    local result = run(prelude .. [[
      local compiled, reason = nibble.compile('extern "C" __global__ void k() {}')
      if not compiled then
        io.write(reason)
        os.exit(0, true)
      end
      raises("compile: options: expected such as give code for cuda:0, got none", nibble.compile, "", { options = { "-dlto" } })
      raises("source.cu(1): error", nibble.compile, "this is no CUDA")
    ]], "NIBBLE_DEVICE=cuda:0")
    assert_well(result, true)
    if result.stdout ~= "" then pending(result.stdout) end
  end)
end)

describe("a runtime that a host closes on the stand-in #quick", function()
  it("unloads what the host holds, and waits for a function that runs while the context is lost", function()
    local library = process.command():match("^(.*/)[^/]*$") .. "libnibble.a"
    local file = io.open(library, "rb")
    if not file then return pending("no libnibble.a beside the command") end
    file:close()
    -- The memory of a call that the driver drops is given up.
    local env = "NIBBLE_DEVICE=cuda:0 ASAN_OPTIONS=detect_leaks=0"
    local reason = standin.program("closing", "-I runtime " .. process.quote(library), env)
    if reason then pending(reason) end
  end)
end)
