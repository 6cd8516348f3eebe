-- What the CUDA compiler made of kernels/cuda, by its own report (build/gen/*.log).
local root = os.getenv("NIBBLE_ROOT") or "."

local function read(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  return text
end

-- { append = report, ... }: what the compiler said of each file; skips where it is not there.
local function reports()
  local makefile = read(root .. "/build/fatbin.mk")
  if not makefile then pending("no nvcc here: the kernels of the CUDA device are not built") end
  local found = {}
  for name in read(root .. "/kernels/params.h"):match("#define NIB_KERNEL_LIST(.-)enum nib_kernel"):gmatch(
    "X%([%u_]+, ([%l_]+)%)") do
    found[name] = assert(read(("%s/build/gen/%s.log"):format(root, name)), "no kernels/cuda/" .. name ..
      ".cu was built")
  end
  return found, makefile
end

describe("the CUDA kernels #quick", function()
  it("are built for every architecture, each entry that a launch can choose", function()
    local found, makefile = reports()
    local architectures = {}
    for name in makefile:gmatch("code=sm_(%w+)") do architectures[#architectures + 1] = "sm_" .. name end
    assert.is_true(#architectures > 0)
    if #architectures > 1 then
      assert.same({ "sm_80", "sm_86", "sm_89", "sm_90", "sm_100f", "sm_110f", "sm_120f" }, architectures)
      assert.matches("code=compute_80", makefile)
    end
    local count = 0
    for file, report in pairs(found) do
      local list = read(("%s/kernels/cuda/%s_launch.c"):format(root, file)):match("#define ENTRIES%(X%)(.-)\n\n")
      for entry in list:gmatch("X%(([%w_]+)%)") do
        for _, architecture in ipairs(architectures) do
          local line = ("Compiling entry function 'nib_cuda_%s' for '%s'"):format(entry, architecture)
          assert.is_truthy(report:find(line, 1, true), line)
        end
        count = count + 1
      end
    end
    assert.equal(56, count)
  end)

  it("spill no registers", function()
    for name, report in pairs(reports()) do
      assert.is_truthy(report:find("0 bytes spill stores, 0 bytes spill loads", 1, true), name)
      assert.is_nil(report:match("[1-9]%d* bytes spill"), name)
    end
  end)
end)
