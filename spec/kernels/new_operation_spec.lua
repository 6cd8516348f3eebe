-- kernels/README.md's list of what a new operation touches, proven: in a copy of the sources, spec/data/new_operation
-- adds one by that list alone, and it runs from Lua on the CPU and through the CUDA device's code.
local process = require "spec.support.runtime_process"
local files = require "spec.data.new_operation.files"

local quote = process.quote

-- Bytes, overlap, an observer's view, a capture, checked mode and a trace all know the operation by its description.
local PROGRAM = [[
local negate = nibble.quantization.negate_codes
local codes, out = nibble.randint(0, 256, {3, 40}, {dtype = "uint8", seed = 1}), nibble.zeros(3, 40, {dtype = "uint8"})
nibble.check(true)
local seen = {}
nibble.observe(function(o)
  for i, a in ipairs(o.kernel == "negate_codes" and o.accesses or {}) do
    seen[i] = (a.write and "write " or "read ") .. a.parameter
  end
end)
local graph = nibble.stream():capture(function() negate(codes, out) end)
graph:replay()
for row = 1, 3 do
  for i = 1, 40 do assert(out[row][i] == codes[row][i] ~ 0x88) end
end
print(graph:nodes()[1].name, table.concat(seen, ", "), #nibble.check_reports())
print(select(2, pcall(negate, codes, codes:view(3, 40))))
print(select(2, pcall(negate, codes:view(120), out)))
]]

local SAID = [[
negate_codes	read codes, write out	0
quantization.negate_codes: out: expected a tensor that does not overlap codes, got one that does (uint8 {3, 40})
quantization.negate_codes: codes: expected 2 dimensions [rows, bytes], got uint8 {120}
]]

describe("a new operation", function()
  local folder

  local function write(path, text)
    local file = assert(io.open(folder .. "/" .. path, "w"))
    file:write(text)
    file:close()
  end

  setup(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    process.run(("cd %s && tar cf - premake5.lua runtime kernels bindings scripts spec/standin | " ..
      "tar xf - -C %s"):format(
      quote(process.root), quote(folder)))
    for path, change in pairs(files) do
      if type(change) == "table" then
        local text = process.read(folder .. "/" .. path)
        for _, edit in ipairs(change) do
          local at = assert(text:find(edit[1], 1, true), path .. " has no: " .. edit[1])
          text = text:sub(1, at - 1) .. edit[2] .. text:sub(at)
        end
        change = text
      end
      write(path, change)
    end
    write("program.lua", PROGRAM)
  end)
  teardown(function() process.run("rm -rf " .. quote(folder)) end)

  it("touches nine files, each by a few lines but for the kernels and the checks", function()
    local count = 0
    for path, change in pairs(files) do
      count = count + 1
      local named = path:gsub("negate_codes", "NAME")
      assert.is_truthy(process.read(process.root .. "kernels/README.md"):find(("`%s`"):format(named), 1, true), named)
      local lines = 0
      for _, edit in ipairs(type(change) == "table" and change or {}) do
        lines = lines + select(2, edit[2]:gsub("\n", ""))
      end
      assert.is_true(lines <= 10, path)
    end
    assert.equal(9, count)
  end)

  it("is all there, on the CPU and through the CUDA device's code", function()
    if process.sanitized() or os.getenv("NIBBLE_VALGRIND") or os.getenv("NIB_STANDIN_LOG") then
      return pending("the copy is built the same way in every run: the plain one does")
    end
    if not process.has("premake5") and not process.has("premake4") then return pending("there is no Premake here") end
    local cuda = process.has("nvcc") or io.open("/usr/local/cuda/bin/nvcc") ~= nil
    local made = process.run(("cd %s && action='%s --architectures=90 gmake' && " ..
      "if command -v premake5 >/dev/null; then premake5 $action; else premake4 --file=premake5.lua $action; fi && " ..
      "make -C build config=release -j2 command %s"):format(quote(folder), cuda and "" or "--nvcc=none",
        cuda and "standin" or ""))
    assert.equal(0, made.status, made.stderr)
    local run = "cd / && NIBBLE_DEVICE=%s %s " .. folder .. "/build/release/nibble " .. folder .. "/program.lua"
    assert.same({ status = 0, stdout = SAID, stderr = "" }, process.run(run:format("cpu", "")))
    if not cuda then return end
    assert.same({ status = 0, stdout = SAID, stderr = "" },
      process.run(run:format("cuda:0", "LD_LIBRARY_PATH=" .. folder .. "/build/release/standin")))
  end)
end)
