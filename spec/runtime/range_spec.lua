-- Named ranges for profilers.
local nibble = require "nibble"
local process = require "spec.support.runtime_process"

describe("nibble.range #quick", function()
  it("calls the function and returns its results, errors go on", function()
    local results = { nibble.range("step", function(...) return select("#", ...), ... end, 1, nil, 3) }
    assert.same({ 3, 1, nil, 3 }, { table.unpack(results, 1, 4) })
    local ok, message = pcall(nibble.range, "step", function() error({ code = 7 }) end)
    assert.is_false(ok)
    assert.equal(7, message.code)
    ok, message = pcall(nibble.range, 5, function() end)
    assert.is_false(ok)
    assert.matches("range: name: expected", message)
    ok, message = pcall(nibble.range, "step", 5)
    assert.is_false(ok)
    assert.matches("range: fn: expected", message)
  end)

  for _, library in ipairs { "libnvtx3interop.so.1", "libnvToolsExt.so.1" } do
    it("opens and closes a range of " .. library .. " where that is there, also after an error", function()
      if process.run("command -v cc").status ~= 0 then pending("no C compiler to make a library with") end
      local folder = os.tmpname()
      os.remove(folder)
      finally(function() process.run("rm -rf " .. process.quote(folder)) end)
      local source = [[
#include <stdio.h>
int nvtxRangePushA(const char *name) { return printf("<%s>\n", name); }
int nvtxRangePop(void) { return printf("</>\n"); }]]
      -- The machine's own library is hidden by a file that is none.
      local made = process.run(
        ("mkdir %s && : >%s/libnvtx3interop.so.1 && printf %%s %s | cc -shared -fPIC -x c -o %s/%s -"):format(
        folder, folder, process.quote(source), folder, library))
      assert.equal(0, made.status, made.stderr)
      local script =
        "local nibble = require 'nibble' pcall(nibble.range, 'outer', function() nibble.range('inner', error) end)"
      local result = process.run(("LD_LIBRARY_PATH=%s lua5.4 -e %s"):format(folder, process.quote(script)))
      assert.same({ status = 0, stdout = "<outer>\n<inner>\n</>\n</>\n", stderr = "" }, result)
    end)
  end
end)
