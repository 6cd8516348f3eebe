-- The order of the C sources' rooms (spec/support/rooms.lua): what is lower knows nothing of what is higher.
local rooms = require("spec.support.rooms")
local process = require("spec.support.runtime_process")
local program = require("spec.support.host_program")

local quote = process.quote

-- A folder with a tree of sources of its own.
local function tree(files)
  local root = process.run("mktemp -d").stdout:gsub("\n$", "")
  finally(function() process.run("rm -rf " .. quote(root)) end)
  for path, text in pairs(files) do
    process.run(("mkdir -p %s/%s"):format(quote(root), path:match("^(.*)/")))
    local file = assert(io.open(root .. "/" .. path, "w"))
    file:write(text)
    file:close()
  end
  return root
end

-- Compiles sources of a tree as the build does.
local function compile(cc, root, paths)
  for _, path in ipairs(paths) do
    local object = "obj/runtime/release/" .. path:gsub("[/.]", "_") .. ".o"
    local result = process.run(("cd %s && mkdir -p build/obj/runtime/release && cd build && %s -MMD -c ../%s -o %s")
      :format(quote(root), cc, path, object))
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  end
end

describe("the rooms of the sources", function()
  it("include and call only what is below them #quick", function()
    local wrong, text, built = rooms.look(process.root)
    assert.same({}, wrong)
    assert.is_truthy(text:find("\nruntime/core +kernels runtime +", 1) and text:find("\nruntime/cuda ", 1, true))
    if not built then pending("there is no build whose calls could be looked at") end
  end)

  it("are not left by an include that is planted in the core", function()
    local root = tree {}
    process.run(("cp -r %sruntime %skernels %sbindings %s"):format(process.root, process.root, process.root,
      quote(root)))
    assert.same({}, (rooms.look(root)))
    local path = root .. "/runtime/core/time.c"
    local text = process.read(path)
    local file = assert(io.open(path, "w"))
    file:write((text:gsub('\n#include "own.h"\n', '%0#include "../tensor/tensor.h"\n')))
    file:close()
    assert.same({ "runtime/core/time.c includes runtime/tensor/tensor.h: runtime/core may not use runtime/tensor" },
      (rooms.look(root)))
    local run = process.run(("lua5.4 %sspec/support/rooms.lua %s"):format(process.root, quote(root)))
    assert.equal(1, run.status)
    assert.is_truthy(run.stderr:find("core/time.c includes runtime/tensor/tensor.h", 1, true))
  end)

  it("are not left by a call, which no include shows", function()
    local cc = program.compiler()
    if not cc then return pending("there is no C compiler (cc, gcc, clang)") end
    local root = tree {
      ["runtime/core/low.c"] = "void nib_high(void);\nvoid nib_low(void) { nib_high(); }\n",
      ["runtime/tensor/high.c"] = "void nib_low(void);\nvoid nib_high(void) { nib_low(); }\n",
    }
    compile(cc, root, { "runtime/core/low.c", "runtime/tensor/high.c" })
    assert.same({
      "runtime/core/low.c calls nib_high of runtime/tensor/high.c: runtime/core may not use runtime/tensor",
    }, (rooms.look(root)))
  end)

  it("have no circle of files in a room of the runtime, and in the core no call against the order of own.h", function()
    local cc = program.compiler()
    if not cc then return pending("there is no C compiler (cc, gcc, clang)") end
    local root = tree {
      ["runtime/core/a.c"] = "void nib_b(void);\nvoid nib_a(void) { nib_b(); }\n",
      ["runtime/core/b.c"] = "void nib_a(void);\nvoid nib_b(void) { nib_a(); }\n",
      ["runtime/tensor/c.c"] = "void nib_d(void);\nvoid nib_c(void) { nib_d(); }\n",
      ["runtime/tensor/d.c"] = "void nib_c(void);\nvoid nib_d(void) { nib_c(); }\n",
      ["runtime/core/own.h"] = "/* a.c b.c */\n",
    }
    compile(cc, root, { "runtime/core/a.c", "runtime/core/b.c", "runtime/tensor/c.c", "runtime/tensor/d.c" })
    assert.same({
      "runtime/core/a.c calls nib_b of runtime/core/b.c, which comes after it in own.h",
      "these call each other in a circle: runtime/core/a.c runtime/core/b.c",
      "these call each other in a circle: runtime/tensor/c.c runtime/tensor/d.c",
    }, (rooms.look(root)))
  end)

  it("keep what is in own.h for themselves, and the core lists all its files there", function()
    local root = tree {
      ["runtime/core/own.h"] = "/* a.c */\n",
      ["runtime/core/a.c"] = '\n#include "own.h"\n',
      ["runtime/core/b.c"] = "int nib_b;\n",
      ["runtime/tensor/t.c"] = '\n#include "../core/own.h"\n',
    }
    assert.same({
      "runtime/core/b.c: has no place in the list of own.h",
      "runtime/tensor/t.c includes runtime/core/own.h, which is that room's",
    }, (rooms.look(root)))
  end)

  it("may not be new ones that nobody has given a place", function()
    local root = tree { ["runtime/attic/a.c"] = "int nib_a;\n" }
    assert.same({ "runtime/attic/a.c: no room of spec/support/rooms.lua" }, (rooms.look(root)))
  end)
end)
