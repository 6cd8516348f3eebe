-- The promise of nibble.h: programs that were built with the headers of 0.2.0 (spec/data/headers-0.2.0) run with a
-- library whose structs have grown. That library is made here: the runtime's own sources, with two more fields in each
-- struct that may grow.
local process = require("spec.support.runtime_process")
local program = require("spec.support.host_program")

local quote = process.quote
local old = process.root .. "spec/data/headers-0.2.0"

-- The structs that may grow: those whose size reaches the library, and those that it hands out by pointer.
local handed_out = { nib_device_info = true, nib_safetensors_entry = true, nib_observation = true }

local function grow(folder)
  local grown = {}
  local function edit(name, fn)
    local path = folder .. "/runtime/" .. name
    local text = fn(process.read(path))
    local file = assert(io.open(path, "w"))
    file:write(text)
    file:close()
  end
  local sized = process.read(folder .. "/runtime/sized.h") ..
    "NIB_SIZED(nib_memory_info, NIB_SIZED(nib_kernel_attributes, "
  for _, name in ipairs({ "nibble.h", "nibble_tools.h" }) do
    edit(name, function(text)
      return (text:gsub("\n} (nib_[%w_]+);", function(struct)
        if not handed_out[struct] and not sized:find("NIB_SIZED(" .. struct .. ", ", 1, true) then return end
        grown[#grown + 1] = struct
        return "\n  int32_t grown;\n  void *grown_more;\n} " .. struct .. ";"
      end))
    end)
  end
  edit("sized.h", function(text) -- what the host does not know is 0
    return (text:gsub("  return true;\n", "  for (size_t i = least; i < own_bytes; i++)\n" ..
      "    if (((unsigned char *)own)[i] != 0) return false;\n%0", 1))
  end)
  return #grown
end

describe("a program built with the headers of 0.2.0", function()
  it("runs with a library whose structs have grown", function()
    local cc, missing = program.compiler(), program.missing()
    if not cc then return pending("there is no C compiler (cc, gcc, clang)") end
    if missing then return pending(missing) end
    if process.sanitized() then return pending("the grown library is built without sanitizers") end
    local folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    finally(function() process.run("rm -rf " .. quote(folder)) end)
    process.run(("cp -r %sruntime %skernels %s"):format(process.root, process.root, quote(folder)))
    assert.equal(15, grow(folder))
    -- The kernels, which know nothing of hosts' structs, are those of the build.
    local built = process.run(table.concat({ cc, "-std=c11 -D_DEFAULT_SOURCE -O0 -Wall -Wextra -Werror -DNIB_HIDDEN -I",
      quote(old),
      "-o", quote(folder .. "/host"), process.root .. "spec/embedding/old_host.c",
      ("$(find %s/runtime -name '*.c' ! -path '*/cuda/*')"):format(folder), quote(program.library),
        "-lm -lpthread -ldl" }, " "))
    assert.same({ status = 0, stdout = "", stderr = "" }, built)
    assert.same({ status = 0, stdout = "", stderr = "" }, process.run(folder .. "/host"))
  end)

  it("runs with this library", function()
    local path, reason = program.compile("old_host", { cflags = "-I " .. quote(old) })
    if not path then return pending(reason) end
    assert.same({ status = 0, stdout = "", stderr = "" }, process.run(path))
    os.remove(path)
  end)
end)

describe("a program built with the headers of 0.1.0", function()
  -- What it calls: the functions that pass no size.
  local names = {}
  for _, header in ipairs({ "runtime/nibble.h", "runtime/nibble_tools.h" }) do
    for name in process.read(process.root .. header):gmatch("NIB_API%s[^;(]-(nib_[%w_]+)_sized%(") do
      names[#names + 1] = name
    end
  end

  it("is refused by the linkers, which name what it misses", function()
    local cc, missing = program.compiler(), program.missing()
    if not cc then return pending("there is no C compiler (cc, gcc, clang)") end
    if missing then return pending(missing) end
    assert.is_true(#names >= 11)
    local source = os.tmpname()
    local file = assert(io.open(source, "w"))
    for _, name in ipairs(names) do file:write("int ", name, "(void);\n") end
    file:write("int main(void) { return ", table.concat(names, "() + "), "(); }\n")
    file:close()
    local built = process.run(("%s %s -x c %s -x none -o %s.out %s -lm -lpthread -ldl"):format(cc, process.sanitized()
      or "", source,
      source, quote(program.library)))
    os.remove(source)
    assert.not_equal(0, built.status)
    for _, name in ipairs(names) do assert.matches("undefined [^\n]*" .. name .. "%f[^%w_]", built.stderr) end
  end)
end)
