-- kernels/README.md's lists of what a new operation and a new dtype touch, proven: in a copy of the sources,
-- spec/data/new_operation and spec/data/new_dtype add one each by these lists alone, and both work on the CPU and
-- through the CUDA device's code.
local process = require "spec.support.runtime_process"
local operation = require "spec.data.new_operation.files"
local dtype = require "spec.data.new_dtype.files"

local quote = process.quote

-- Bytes, overlap, an observer's view, a capture, checked mode and a trace all know the operation by its description.
local OPERATION = [[
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

local OPERATION_SAYS = [[
negate_codes	read codes, write out	0
quantization.negate_codes: out: expected a tensor that does not overlap codes, got one that does (uint8 {3, 40})
quantization.negate_codes: codes: expected 2 dimensions [rows, bytes], got uint8 {120}
]]

-- Numbers, their limits, conversions from floats and integers (also in rows too short for vector code), the reference,
-- and files.
local DTYPE = [[
local function list(t) return table.concat(t:contiguous():view(t:numel()):totable(), " ") end
local t = nibble.tensor({-32768, -1, 0, 32767}, {dtype = "int16"})
print(t.dtype, #t:bytes(), list(t), list(nibble.from_bytes("\255\255\0\128", 2, {dtype = "int16"})))
print(select(2, pcall(nibble.tensor, {32768}, {dtype = "int16"})))
print(list(nibble.tensor({-1e9, -1.75, 0 / 0, 40000.0}, {dtype = "float32"}):to("int16")),
  list(nibble.tensor({-70000, 5, 70000}, {dtype = "int32"}):to("int16")), list(t:to("float32")))
local many = nibble.arange(-2000, 2000, {dtype = "int16"}):view(2, 2000)
print(list(many:permute(2, 1):narrow(1, 1998, 3)), nibble.full({3}, -7, {dtype = "int16"}):equal(
  nibble.tensor({-7, -7, -7}, {dtype = "int16"})), list(many:to("float16"):to("int16")) == list(many))
local path = os.tmpname()
t:save(path .. ".npy")
nibble.save(path .. ".safetensors", {t = t})
for _, back in ipairs {nibble.load(path .. ".npy"), nibble.load(path .. ".safetensors")} do
  print(back.dtype, back:equal(t))
end
for _, kind in ipairs {"", ".npy", ".safetensors"} do os.remove(path .. kind) end
print(require("nibble.numbers").bytes.int16)
]]

local DTYPE_SAYS = [[
int16	8	-32768 -1 0 32767	-1 -32768
tensor: data: expected a number that int16 can hold at data[1], got 32768
-32768 -1 0 32767	-32768 5 32767	-32768.0 -1.0 0.0 32767.0
-3 1997 -2 1998 -1 1999	true	true
int16	true
int16	true
2
]]

describe("a new operation and a new dtype", function()
  local folder

  local function write(path, text)
    local file = assert(io.open(folder .. "/" .. path, "w"))
    file:write(text)
    file:close()
  end

  -- Puts an edit's second text before its first, or where that was.
  local function edit(path, edits, keep)
    local text = process.read(folder .. "/" .. path)
    for _, one in ipairs(edits) do
      local from, to = text:find(one[1], 1, true)
      assert(from, path .. " has no: " .. one[1])
      text = text:sub(1, from - 1) .. one[2] .. text:sub(keep and from or to + 1)
    end
    write(path, text)
  end

  setup(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    process.run(("tar cf - -C %s premake5.lua runtime kernels bindings scripts spec/standin | tar xf - -C %s"):format(
      quote(process.root), quote(folder)))
    for path, change in pairs(operation) do
      if type(change) == "table" then edit(path, change, true) else write(path, change) end
    end
    for path, change in pairs(dtype) do edit(path, change) end
    write("operation.lua", OPERATION)
    write("dtype.lua", DTYPE)
  end)
  teardown(function() process.run("rm -rf " .. quote(folder)) end)

  for name, files in pairs { operation = operation, dtype = dtype } do
    it("touch the listed files, each by a few lines but for the kernels and the checks: " .. name, function()
      local page = process.read(process.root .. "kernels/README.md") .. "\n## "
      local list = page:match("\n## Adding an? " .. name .. "\n(.-)\n## ")
      local listed, touched = 0, 0
      for row in list:gmatch("\n(|[^\n]*)") do
        for _ in row:match("^|(.-)|"):gmatch("`") do listed = listed + 1 end
      end
      for path, change in pairs(files) do
        touched = touched + 1
        local named = path:gsub("negate_codes", "NAME")
        assert.is_truthy(list:find(("`%s`"):format(named), 1, true), named)
        local lines = 0
        for _, one in ipairs(type(change) == "table" and change or {}) do
          lines = lines + select(2, one[2]:gsub("\n", ""))
        end
        assert.is_true(lines <= 10, path)
      end
      assert.equal(listed // 2, touched)
    end)
  end

  it("are all there, on the CPU and through the CUDA device's code", function()
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
    local run = "cd / && NIBBLE_DEVICE=%s %s " .. folder .. "/build/release/nibble " .. folder .. "/%s.lua"
    for name, says in pairs { operation = OPERATION_SAYS, dtype = DTYPE_SAYS } do
      assert.same({ status = 0, stdout = says, stderr = "" }, process.run(run:format("cpu", "", name)))
      if cuda then
        assert.same({ status = 0, stdout = says, stderr = "" },
          process.run(run:format("cuda:0", "LD_LIBRARY_PATH=" .. folder .. "/build/release/standin", name)))
      end
    end
  end)
end)
