-- scripts/run and scripts/test, run as a user runs them, and with tools missing.
local process = require "spec.support.runtime_process"

local root = process.run("cd " .. process.quote(process.root) .. " && pwd").stdout:gsub("\n$", "")
local quote = process.quote

local function write(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  return path
end

describe("scripts/", function()
  local folder

  before_each(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
  end)
  after_each(function() process.run("rm -rf " .. quote(folder)) end)

  -- Runs scripts/test on a spec with this text, from another folder.
  local function test(text, options)
    write(folder .. "/sample_spec.lua", text)
    return process.run(("cd %s && %s/scripts/test sample_spec.lua %s"):format(quote(folder), quote(root), options or ""))
  end

  describe("test", function()
    it("prints nothing but its last line when all is well", function()
      local result = test "it('a', function() end) it('b', function() end)"
      assert.same({ status = 0, stdout = "2 passed, 0 failed, 0 skipped\n", stderr = "" }, result)
    end)

    it("has the module, its Lua parts and the specs' support on its paths", function()
      local result = test [[
        it("a", function()
          assert.truthy(require("nibble").version)
          assert.truthy(require("nibble.pages"))
          assert.truthy(require("spec.support.runtime_process").run)
          assert.equal(os.getenv("NIBBLE_ROOT") .. "/build/", os.getenv("NIBBLE_COMMAND"):match("^.*/build/"))
        end)]]
      assert.same({ status = 0, stdout = "1 passed, 0 failed, 0 skipped\n", stderr = "" }, result)
    end)

    it("shows a failure with its place and message, and returns 1", function()
      local result = test "it('a', function() end)\nit('is wrong', function() assert.equal(1, 2) end)"
      assert.equal(1, result.status)
      assert.matches("^failed [^\n]*sample_spec%.lua:2: is wrong\n", result.stdout)
      assert.matches("Expected objects to be equal", result.stdout)
      assert.matches("\n1 passed, 1 failed, 0 skipped\n$", result.stdout)
    end)

    it("names each skipped spec with its reason, and never counts it as passed", function()
      local result = test [[
        it("a", function() end)
        it("b", function() pending("no such device") end)
        pending("c", "not here")]]
      assert.equal(0, result.status)
      assert.matches("skipped [^\n]*sample_spec%.lua:2: b: no such device\n", result.stdout)
      assert.matches("skipped [^\n]*sample_spec%.lua:3: c: not here\n", result.stdout)
      assert.matches("\n1 passed, 0 failed, 2 skipped\n$", result.stdout)
      assert.equal(1, test("it('b', function() pending('no such device') end)").status)
    end)

    it("counts as failed: errors outside of specs, files that do not load, no spec at all", function()
      for text, name in pairs {
        ["describe('d', function() setup(function() error('broken') end) it('a', function() end) end)"] = "broken",
        ["describe('d', function() after_each(function() error('broken') end) it('a', function() end) end)"] = "broken",
        ["this is not Lua"] = "syntax error",
        ["error('broken')"] = "broken",
      } do
        local result = test(text)
        assert.equal(1, result.status, text)
        assert.matches(name, result.stdout)
        assert.matches("%d passed, 1 failed, 0 skipped\n$", result.stdout)
      end
      assert.equal(1, test("").status)
      assert.matches("1 failed", test("it('a', function() end)", "/no/such/file_spec.lua").stdout)
    end)

    it("names the spec in which the process died, and keeps the counts", function()
      local result = test "it('a', function() end)\nit('dies', function() io.popen('kill -KILL $PPID'):read('a') end)"
      assert.equal(1, result.status)
      assert.matches("status 137 in: dies", result.stderr)
      assert.equal("1 passed, 1 failed, 0 skipped\n", result.stdout)
    end)

    it("fails when every spec passed but the process did not end well", function()
      local result = test "it('a', function() setmetatable({}, {__gc = function() os.exit(3) end}) end)"
      assert.equal(1, result.status)
      assert.matches("1 failed, 0 skipped\n$", result.stdout)
    end)

    it("--quick runs what is tagged quick, --device sets the default device", function()
      local text = "it('a', function() error 'slow' end)\n" ..
        "it('b #quick', function() assert.equal('nowhere', os.getenv('NIBBLE_DEVICE')) end)"
      assert.equal("1 passed, 0 failed, 0 skipped\n", test(text, "--quick --device nowhere").stdout)
      assert.equal("1 passed, 0 failed, 0 skipped\n", test(text, "--quick --device=nowhere").stdout)
    end)

    it("--sanitize runs the specs inside the build with sanitizers", function()
      if not io.open(os.getenv("NIBBLE_ROOT") .. "/build/sanitize/nibble") then pending("build/sanitize is not built yet") end
      local text = "it('a', function() assert.matches('build/sanitize/nibble', io.open('/proc/self/cmdline'):read('a')) end)"
      local result = test(text, "--sanitize")
      assert.equal("1 passed, 0 failed, 0 skipped\n", result.stdout, result.stderr)
    end)

    it("--help explains itself; a wrong use returns 2", function()
      assert.matches("usage: scripts/test", test("", "--help").stdout)
      assert.equal(2, test("", "--device").status)
      assert.equal(2, test("", "--sanitize --valgrind").status)
    end)
  end)

  it("build nothing twice, and take less than 5 seconds to find that out", function()
    local text = "it('a', function() end)"
    assert.equal(0, test(text).status)
    local newest = "cd " .. quote(root) .. " && ls -l --time-style=full-iso build/release build/obj/*/release"
    local before = process.run(newest).stdout
    local seconds = os.time()
    assert.equal(0, test(text).status)
    assert.is_true(os.time() - seconds <= 5)
    assert.equal(before, process.run(newest).stdout)
  end)

  it("run the decode scenario from any folder, with its options", function()
    local result = process.run(("cd / && %s/scripts/run --steps 2 --requests 2"):format(quote(root)))
    assert.equal("", result.stderr)
    assert.equal(0, result.status)
    assert.matches("\nok: ", result.stdout)
  end)

  -- A checkout of the scripts alone, and a PATH that holds only what is named.
  describe("setup", function()
    local basics = { "sh", "env", "dirname", "cat", "mkdir", "mktemp", "rm", "tr", "tail", "head", "grep", "id", "getconf", "flock" }

    local function tool(name, text)
      write(folder .. "/bin/" .. name, "#!/bin/sh\n" .. text .. "\n")
      process.run("chmod +x " .. folder .. "/bin/" .. name)
    end

    local function prepare(...) -- the names of tools that find nothing to complain about
      process.run(("mkdir -p %s/bin %s/scripts/scenarios && cp %s/scripts/setup %s/scripts/run %s/scripts"):format(
        folder, folder, root, root, folder))
      for _, name in ipairs(basics) do process.run(("ln -s $(command -v %s) %s/bin/"):format(name, folder)) end
      for _, name in ipairs { ... } do tool(name, ":") end
    end

    local function run()
      return process.run(("unset NIBBLE_SKIP_BUILD CC; PATH=%s/bin /bin/sh %s/scripts/run"):format(folder, folder))
    end

    local function built()
      process.run("mkdir -p " .. folder .. "/build/release")
      write(folder .. "/build/release/nibble", "#!/bin/sh\necho ran \"${1##*/}\"\n")
      process.run("chmod +x " .. folder .. "/build/release/nibble")
    end

    it("says what to install where there is no apt-get", function()
      prepare()
      local result = run()
      assert.equal(1, result.status)
      assert.matches("no apt%-get", result.stderr)
      for _, name in ipairs { "gcc", "make", "premake4", "pkg%-config", "liblua5%.4%-dev", "libedit%-dev" } do
        assert.matches("%f[%w]" .. name .. "%f[^%w%-]", result.stderr)
      end
    end)

    it("uses what is built where nothing can be built", function()
      prepare()
      built()
      local result = run()
      assert.equal(0, result.status)
      assert.equal("ran decode.lua\n", result.stdout)
      assert.matches("using build/release as it is", result.stderr)
    end)

    it("asks apt-get for what is missing and nothing else, and only once its lists are new when it must", function()
      prepare("make", "cc")
      tool("pkg-config", "case $* in *libedit*) exit 1; esac")
      tool("apt-get", ('echo "$*" >> %s/calls; [ "$1" = update ] || [ -e %s/updated ] || { : > %s/updated; exit 100; }')
        :format(folder, folder, folder))
      tool("sudo", 'exec "$@"')
      local result = run()
      assert.equal(1, result.status)
      assert.matches("installing premake4 libedit%-dev", result.stderr)
      assert.matches("still not found: premake4 libedit%-dev", result.stderr)
      local line = "install -y --no-install-recommends premake4 libedit-dev\n"
      assert.equal(line .. "update\n" .. line, process.read(folder .. "/calls"))
    end)

    it("stops with apt-get's own words when it fails", function()
      prepare("cc", "pkg-config")
      tool("apt-get", "echo E: the disk is full; exit 100")
      tool("sudo", 'exec "$@"')
      local result = run()
      assert.equal(1, result.status)
      assert.matches("E: the disk is full", result.stderr)
      assert.matches("install by hand: make premake4", result.stderr)
    end)

    it("prefers Premake 5, and shows the error of a build that fails", function()
      prepare("cc", "pkg-config", "premake4")
      tool("premake5", ("echo $* > %s/call"):format(folder))
      tool("make", "echo x.c:1: error: $*; exit 2")
      local result = run()
      assert.equal("gmake\n", process.read(folder .. "/call"))
      assert.equal(1, result.status)
      assert.matches("x%.c:1: error: %-C build config=release ", result.stderr)
      assert.matches("the build failed, see ", result.stderr)
    end)
  end)
end)
