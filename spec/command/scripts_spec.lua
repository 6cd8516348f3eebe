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
    return process.run(("cd %s && %s/scripts/test sample_spec.lua %s"):format(quote(folder), quote(root), options
      or ""))
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
    end)

    it("names the spec in which the process died, and keeps the counts", function()
      local result = test "it('a', function() end)\nit('dies', function() io.popen('kill -KILL $PPID'):read('a') end)"
      assert.equal(1, result.status)
      assert.matches("status 137 in: dies", result.stderr)
      assert.matches("1 passed, 1 failed, 0 skipped\n$", result.stdout) -- a shell may say "Killed" before
    end)

    it("runs each of several files in a process of its own: one that dies takes no other with it", function()
      write(folder .. "/a_spec.lua", "it('one', function() one = 1 end)\n" ..
        "it('dies', function() io.popen('kill -KILL $PPID'):read('a') end)")
      write(folder .. "/b_spec.lua",
        "it('two', function() assert.is_nil(one) end) it('three', function() pending 'later' end)")
      write(folder .. "/c_spec.lua", "it('four', function() print 'mine' assert.equal(1, 2) end)")
      local result = process.run(("cd %s && %s/scripts/test --jobs 2 ."):format(quote(folder), quote(root)))
      assert.equal(1, result.status)
      assert.matches("scripts/test: [^\n]*/a_spec%.lua: the specs ended with status 137 in: dies\n", result.stderr)
      assert.matches("mine\nfailed [^\n]*c_spec.lua:1: four\n", result.stdout)
      assert.matches("\nskipped [^\n]*b_spec%.lua:1: three: later\nslowest: [^\n]* %d+ s\n" ..
        "2 passed, 2 failed, 1 skipped\n$", result.stdout)
      local marks = {}
      for mark in result.stdout:gmatch("%f[^\n\0]([.F]+)\n") do marks[#marks + 1] = mark end
      marks = table.concat(marks)
      assert.same({ 3, 2 }, { #marks, select(2, marks:gsub("F", "")) })
    end)

    it("--jobs runs so many files at a time", function()
      -- Each waits for the other's file, for two seconds at most.
      for i = 1, 2 do
        write(("%s/%d_spec.lua"):format(folder, i), ([[
          it("meets the other", function()
            io.open(%q, "w"):close()
            local other
            for _ = 1, 20 do
              other = other or io.open(%q)
              if not other then os.execute("sleep 0.1") end
            end
            assert.equal(os.getenv("MEET"), tostring(other ~= nil))
          end)]]):format(folder .. "/here" .. i, folder .. "/here" .. 3 - i))
      end
      local line = "cd %s && rm -f here* && export MEET=%s && %s/scripts/test --jobs %s *_spec.lua"
      local together = process.run(line:format(quote(folder), "true", quote(root), "2"))
      assert.matches("\n2 passed, 0 failed, 0 skipped\n$", together.stdout)
      local alone = process.run(line:format(quote(folder), "false", quote(root), "1"))
      assert.matches("\n1 passed, 1 failed, 0 skipped\n$", alone.stdout) -- the second finds what the first has left
    end)

    it("starts no further file after a failure with --no-keep-going", function()
      write(folder .. "/a_spec.lua", "it('fails', function() error 'bad' end) -- the longer one, which is first")
      write(folder .. "/b_spec.lua", "it('b', function() end)")
      local result = process.run(("cd %s && %s/scripts/test --jobs 1 --no-keep-going ."):format(quote(folder),
        quote(root)))
      assert.equal(1, result.status)
      assert.matches("\n0 passed, 1 failed, 0 skipped\n$", result.stdout)
    end)

    it("says what is wrong with its arguments before it builds", function()
      for options, message in pairs {
        ["--nope"] = "%-%-nope",
        ["--repeat=x"] = "must be a number",
        ["--jobs 0"] = "%-%-jobs: expected an integer >= 1, got 0\n",
        ["--jobs"] = "%-%-jobs wants a number\n",
        ["/no/such/file_spec.lua"] = "no specs there: /no/such/file_spec.lua\n",
      } do
        local result = test("it('a', function() end)", options)
        assert.same({ 2, "" }, { result.status, result.stdout }, options)
        assert.matches("^scripts/test: [^\n]*" .. message, result.stderr)
      end
    end)

    it("fails when every spec passed but the process did not end well", function()
      local result = test "it('a', function() setmetatable({}, {__gc = function() os.exit(3) end}) end)"
      assert.equal(1, result.status)
      assert.matches("1 failed, 0 skipped\n$", result.stdout)
    end)

    it("--quick runs what is tagged quick, --device sets the default device", function()
      local text = "it('a', function() error 'slow' end)\n" ..
        "it('b #quick', function() assert.equal('cpu', os.getenv('NIBBLE_DEVICE')) end)"
      assert.equal("1 passed, 0 failed, 0 skipped\n", test(text, "--quick --device cpu").stdout)
      assert.equal("1 passed, 0 failed, 0 skipped\n", test(text, "--quick --device=cpu").stdout)
    end)

    it("runs nothing on a device that is not there: one line, and 2", function()
      local text = "it('a', function() end)"
      for _, result in ipairs {
        test(text, "--device nowhere"), test(text, "--device=nowhere"),
        process.run(("cd / && NIBBLE_DEVICE=nowhere %s/scripts/test"):format(quote(root))),
      } do
        assert.same({ 2, "" }, { result.status, result.stdout })
        assert.matches("^scripts/test: [^\n]*there is no device \"nowhere\"[^\n]*\n$", result.stderr)
      end
    end)

    it("--compute-sanitizer runs the quick specs under the tool, and a finding or silence of the tool fails", function()
      local text = "it('a', function() error 'slow' end) it('b #quick', function() end)"
      local tool = folder .. "/compute-sanitizer"
      local function under(report, status)
        write(tool, ([[#!/bin/sh
for argument; do
  case $argument in
    --log-file=*) printf '%%s' '%s' >"${argument#*=}" ;;
    -*) ;;
    *) break ;;
  esac
  shift
done
"$@"
exit %s
]]):format(report, status))
        process.run("chmod +x " .. tool)
        write(folder .. "/sample_spec.lua", text)
        return process.run(
          ("cd %s && PATH=%s:$PATH %s/scripts/test --compute-sanitizer memcheck --device cpu sample_spec.lua"):format(
          quote(folder), quote(folder), quote(root)))
      end
      local good = under("========= ERROR SUMMARY: 0 errors\n", 0)
      assert.same({ 0, "1 passed, 0 failed, 0 skipped\n" }, { good.status, good.stdout })
      assert.equal("scripts/test: compute-sanitizer memcheck: ========= ERROR SUMMARY: 0 errors\n", good.stderr)
      local bad = under("========= Invalid __global__ write\n========= ERROR SUMMARY: 1 error\n", 99)
      assert.same({ 1, "1 passed, 1 failed, 0 skipped\n" }, { bad.status, bad.stdout })
      assert.matches("Invalid __global__ write\n", bad.stderr)
      assert.matches("no summary", under("", 0).stderr)
      assert.equal(1, under("", 0).status)
      assert.equal(2, test(text, "--compute-sanitizer leakcheck").status)
    end)

    it("ends at Ctrl-C, whoever of its processes gets it, with 130", function()
      for _, how in ipairs {
        "require('spec.support.runtime_process').run('kill -INT $$')", -- a spec's child; its parent is deaf meanwhile
        "io.popen('kill -INT $PPID'):close() while true do end", -- the specs themselves
      } do
        local result = test(("it('a', function() %s end) it('b', function() print 'went on' end)"):format(how))
        assert.same({ status = 130, stdout = "", stderr = "" }, result)
      end
    end)

    it("ends the files that run beside the one that is interrupted", function()
      write(folder .. "/a_spec.lua", "it('is interrupted', function()\n" ..
        "io.popen('sleep 0.5; kill -INT $PPID'):close() while true do end end)")
      write(folder .. "/b_spec.lua", "it('b', function() while true do end end)")
      write(folder .. "/c_spec.lua", "it('c', function() error 'went on' end)")
      local result = process.run(("cd %s && timeout 60 %s/scripts/test --jobs 2 ."):format(quote(folder), quote(root)))
      assert.same({ status = 130, stdout = "", stderr = "" }, result)
    end)

    it("--help explains itself; a wrong use returns 2", function()
      assert.matches("usage: scripts/test", test("", "--help").stdout)
      assert.equal(2, test("", "--device").status)
      local result = process.run(("cd / && %s/scripts/run --steps 1 --help"):format(quote(root)))
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("^usage: scripts/run .*\n  %-%-steps +64 ", result.stdout)
      assert.equal(2, test("", "--sanitize --valgrind").status)
      assert.equal(2, test("", "--threads --valgrind").status)
      assert.equal(2, test("", "--sanitize --compute-sanitizer memcheck").status)
    end)
  end)

  describe("fuzz", function()
    local function fuzz(options, environment)
      return process.run(("cd / && %s %s/scripts/fuzz %s"):format(environment or "", quote(root), options))
    end

    it("says why it cannot, and counts that as skipped", function()
      local result = fuzz("npy calls", "CLANG=no-such-clang")
      assert.equal(0, result.status)
      assert.matches("^skipped npy: no clang with libFuzzer[^\n]*no%-such%-clang[^\n]*\nskipped calls: [^\n]*\n" ..
        "0 passed, 0 failed, 2 skipped\n$", result.stdout)
    end)

    it("--help explains itself; a wrong use returns 2", function()
      assert.matches("^usage: scripts/fuzz ", fuzz("--help").stdout)
      for _, options in ipairs { "--seconds", "nothing", "--no" } do
        local result = fuzz(options)
        assert.same({ 2, "" }, { result.status, result.stdout })
        assert.matches("^scripts/fuzz: ", result.stderr)
      end
    end)
  end)

  it("build nothing twice, and take less than 5 seconds of a processor to find that out", function()
    local text = "it('a', function() end)"
    assert.equal(0, test(text).status)
    local newest = "cd " .. quote(root) .. " && ls -l --time-style=full-iso build/release build/obj/*/release"
    local before = process.run(newest).stdout
    write(folder .. "/sample_spec.lua", text)
    local result = process.run(("cd %s && %s/scripts/test sample_spec.lua && times"):format(quote(folder), quote(root)))
    assert.equal(0, result.status)
    local user, system = result.stdout:match("0m([%d.]+)s 0m([%d.]+)s\n$") -- the children's
    assert.is_true(tonumber(user) + tonumber(system) <= 5, result.stdout)
    assert.equal(before, process.run(newest).stdout)
  end)

  it("run the decode scenario from any folder, with its options", function()
    local result = process.run(("cd / && %s/scripts/run --steps 2 --requests 2"):format(quote(root)))
    assert.equal("", result.stderr)
    assert.equal(0, result.status)
    assert.matches("\nok: ", result.stdout)
  end)

  it("run where there is no environment at all", function()
    if process.run("env -i /bin/sh -c 'command -v lua5.4'").status ~= 0 then
      pending("Lua is not where the system looks")
    end
    local result = process.run(("env -i /bin/sh %s/scripts/run --steps 1 --requests 1"):format(quote(root)))
    assert.same({ 0, "" }, { result.status, result.stderr })
    write(folder .. "/sample_spec.lua", "it('a', function() end)")
    result = process.run(("env -i /bin/sh %s/scripts/test %s/sample_spec.lua"):format(quote(root), folder))
    assert.same({ status = 0, stdout = "1 passed, 0 failed, 0 skipped\n", stderr = "" }, result)
  end)

  it("fail when the scenario's output cannot be written", function()
    if process.run("[ -e /dev/full ]").status ~= 0 then pending("no /dev/full here") end
    local result = process.run(("%s/scripts/run --steps 1 --requests 1 >/dev/full"):format(quote(root)))
    assert.equal(1, result.status)
    assert.matches("standard output", result.stderr)
  end)

  -- A checkout of the scripts alone, and a PATH that holds only what is named.
  describe("setup", function()
    local basics = { "sh", "env", "dirname", "cat", "mkdir", "mktemp", "rm", "tr", "tail", "head", "grep", "id",
      "getconf", "flock" }

    local function tool(name, text)
      write(folder .. "/bin/" .. name, "#!/bin/sh\n" .. text .. "\n")
      process.run("chmod +x " .. folder .. "/bin/" .. name)
    end

    local function prepare(...) -- the names of tools that find nothing to complain about
      process.run(("mkdir -p %s/bin %s/scripts/scenarios && cp %s/scripts/setup.sh %s/scripts/run %s/scripts"):format(
        folder, folder, root, root, folder))
      for _, name in ipairs(basics) do process.run(("ln -s $(command -v %s) %s/bin/"):format(name, folder)) end
      for _, name in ipairs { ... } do tool(name, ":") end
    end

    local function run(options)
      return process.run(("unset NIBBLE_SKIP_BUILD CC; PATH=%s/bin /bin/sh %s/scripts/run %s"):format(folder, folder,
        options or ""))
    end

    local function built()
      process.run("mkdir -p " .. folder .. "/build/release")
      write(folder .. "/build/release/nibble", "#!/bin/sh\necho ran \"$*\"\n")
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
      assert.equal("ran scenario decode\n", result.stdout)
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

    it("says that a first build takes a while, and nothing of it for --help", function()
      prepare("cc", "pkg-config", "premake5")
      tool("make", (":; mkdir -p %s/build/release"):format(folder)
        .. ("; { echo '#!/bin/sh'; echo echo ran; } >%s/build/release/nibble"):format(folder)
        .. ("; chmod +x %s/build/release/nibble"):format(folder))
      process.run(("ln -s $(command -v chmod) %s/bin/"):format(folder))
      local result = run("--help")
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("^usage: scripts/run ", result.stdout)
      result = run()
      assert.same({ status = 0, stdout = "ran\n", stderr = "scripts/run: building release (about a minute)...\n" },
        result)
      assert.same({ status = 0, stdout = "ran\n", stderr = "" }, run())
    end)

    it("shows the end of the log of a build that fails without a word of errors", function()
      prepare("cc", "pkg-config", "premake5")
      tool("make", "for i in 1 2 3 4 5 6 7; do echo line $i; done; exit 2")
      local result = run()
      assert.equal(1, result.status)
      assert.matches("%.%.%.\nline 3\nline 4\nline 5\nline 6\nline 7\nscripts/run: the build failed, see [^\n]*\n$",
        result.stderr)
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
