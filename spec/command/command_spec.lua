-- The `nibble` command, run as a process.
local process = require "spec.support.runtime_process"

local command = process.quote(process.command())

local function nibble(arguments, input)
  local feed = input and ("printf %%s %s | "):format(process.quote(input)) or ""
  return process.run(feed .. command .. " " .. arguments)
end

local function script(code)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(code)
  file:close()
  finally(function() os.remove(path) end)
  return path
end

local function ended_well(result, output)
  assert.equal("", result.stderr)
  assert.equal(output, result.stdout)
  assert.equal(0, result.status)
end

local function failed(result, status, message)
  assert.equal(status, result.status)
  assert.equal("", result.stdout)
  assert.matches(message, result.stderr)
end

describe("nibble #quick", function()
  local version = require("nibble").version

  it("--version says its version and Lua's", function()
    local result = nibble("--version")
    ended_well(result, result.stdout)
    assert.matches("^nibble " .. version:gsub("%.", "%%.") .. " %(Lua 5%.4%.%d+%)\n$", result.stdout)
  end)

  it("--help lists every way to call it", function()
    local result = nibble("--help")
    ended_well(result, result.stdout)
    for _, words in ipairs { "nibble FILE", "nibble %-e CODE", "nibble %-%-check FILE", "nibble devices",
      "nibble scenario list",
      "%-%-version", "%-%-help" } do
      assert.matches(words, result.stdout)
    end
  end)

  it("--check ends with status 1 when there is something to report, however the script ends", function()
    local read = "nibble.empty(1):item() "
    local report = "^check: unwritten: [^\n]*\n  %(code%):1: tensor:read\n"
      .. "  storage 1 of 4 bytes, created at %(code%):1\n"
    for code, status in pairs { [read] = 1, [read .. "os.exit()"] = 1, [read .. "os.exit(true, true)"] = 1,
      [read .. "os.exit(3)"] = 3, [read .. "os.exit(false)"] = 1 } do
      failed(nibble("--check -e '" .. code .. "'"), status, report .. "nibble: 1 report of %-%-check\n$")
    end
    failed(nibble("--check -e '" .. read .. "error(\"no\", 0)'"), 1, report ..
      "nibble: no\n.*nibble: 1 report of %-%-check\n$")
    failed(nibble("--check -e 'os.exit(4)'"), 4, "^$")
    ended_well(nibble("--check -e 'print(...)' 1 2"), "1\t2\n")
    ended_well(nibble("--check scripts/examples/quantize_block.lua >/dev/null"), "")
  end)

  describe("says in one line what is wrong with its arguments, and returns 2:", function()
    for arguments, message in pairs {
      ["--nonsense"] = "unknown option %-%-nonsense",
      ["-x"] = "unknown option %-x",
      ["-e"] = "%-e needs code",
      ["--"] = "%-%- needs a file",
      ["devices cpu"] = "devices takes no arguments, got cpu",
      ["--check"] = "%-%-check needs a file or %-e CODE",
      ["--check --version"] = "%-%-check needs a file or %-e CODE",
    } do
      it("nibble " .. arguments, function() failed(nibble(arguments), 2, "^nibble: " .. message .. "[^\n]*\n$") end)
    end
  end)

  it("-e runs code, with the arguments behind it, nibble as a global", function()
    ended_well(nibble [[-e 'print(nibble.version, ...)' a 'b c']], version .. "\ta\tb c\n")
  end)

  it("FILE runs a script with `...`, `arg` and the module", function()
    local path = script [[
      local nibble = require "nibble"
      assert(nibble == _G.nibble)
      print(nibble.arange(3):totable()[3], #arg, arg[0], arg[1], arg[2], ...)
    ]]
    ended_well(nibble(path .. " -x '' "), ("2\t2\t%s\t-x\t\t-x\t\n"):format(path))
  end)

  it("finds its own Lua modules from any folder", function()
    ended_well(process.run("cd / && " .. command .. [[ -e 'print(type(require "nibble.pages"))']]), "table\n")
  end)

  it("finds the module again after a program has emptied package.loaded", function()
    ended_well(nibble [[-e 'package.loaded.nibble = nil; print(require("nibble").version)']], version .. "\n")
  end)

  it("runs standard input, as - or without a terminal", function()
    ended_well(nibble("", "print(1 + 1, ...)\nprint('two')"), "2\ntwo\n")
    ended_well(nibble("- a b", "print(1 + 1, ...)"), "2\ta\tb\n")
  end)

  it("runs a script with a first line for the shell", function()
    ended_well(nibble(script("#!/usr/bin/env nibble\nprint(1)\n")), "1\n")
  end)

  it("reports a script's error with a traceback, without colour off a terminal, and returns 1", function()
    local path = script "local function f() error('boom') end\nf()"
    local result = nibble(path)
    failed(result, 1, "^nibble: [^\n]*:1: boom\nstack traceback:\n")
    assert.not_matches("\27", result.stderr)
    failed(nibble [[-e 'error(setmetatable({}, {__tostring = function() return "object" end}))']], 1,
      "^nibble: object\n")
    failed(nibble [[-e 'error({})']], 1, "^nibble: %(error object is a table value%)\n")
    failed(nibble [[-e 'x =']], 1, "^nibble: [^\n]*unexpected symbol near <eof>\n$")
    failed(nibble "/no/such/file.lua", 1, "^nibble: cannot open /no/such/file.lua[^\n]*\n$")
  end)

  it("shows no control characters of others in its errors", function()
    local result = nibble [[-e 'error("a\27[31mb\n\tc\255\xc2\x9bd\xe2\x80\xae\xc3\xa9", 0)']]
    failed(result, 1, "^nibble: a\\x1B%[31mb\n\tc\\xFF\\u{9B}d\\u{202E}\xc3\xa9\nstack traceback:\n")
    failed(nibble "'--\27c'", 2, "^nibble: unknown option %-%-\\x1Bc %(")
    failed(nibble "'/no/\7.lua'", 1, "^nibble: cannot open /no/\\x07%.lua")
    failed(nibble "scenario '\27c'", 2, "^nibble scenario: there is no scenario \\x1Bc")
  end)

  it("has an error where there is no memory, whatever it is for", function()
    if process.sanitized() or os.getenv("VALGRIND") then pending("these need the memory for themselves") end
    local result = process.run(([[words=$(seq -s ' ' 1 20000); v=4000; while [ $v -lt 22000 ]; do
      (ulimit -v $v; exec %s -e 'x = 1' $words) 2>&1 | head -n 1; v=$((v + 250)); done]]):format(command))
    assert.not_matches("PANIC", result.stdout .. result.stderr)
    assert.not_matches("Aborted", result.stdout .. result.stderr)
    assert.matches("nibble: not enough memory\n", result.stdout)
  end)

  it("ends quietly through os.exit, with live tensors, streams and queued work", function()
    for call, status in pairs { ["os.exit()"] = 0, ["os.exit(0)"] = 0, ["os.exit(0, true)"] = 0,
      ["os.exit(7, true)"] = 7 } do
      local result = nibble(script("t = nibble.zeros(1000, 1000); s = nibble.stream()\n" ..
        "s:scope(function() for i = 1, 20 do t:fill(i) end end)\n" .. call))
      assert.equal("", result.stderr)
      assert.equal(status, result.status)
    end
  end)

  it("devices lists each device with its name, description and whether it can be used", function()
    local result = nibble("devices")
    ended_well(result, result.stdout)
    assert.matches("^device +description +status\n", result.stdout)
    for _, device in ipairs(require("nibble").devices()) do
      local line = result.stdout:match("[^\n]*%f[%w:]" .. device.name .. "%f[^%w:][^\n]*")
      assert.truthy(line, "no line for " .. device.name)
      assert.truthy(line:find(device.description or "", 1, true))
      assert.truthy(line:find(device.available and "available" or "not available: " .. device.reason, 1, true))
    end
  end)

  it("fails when its output cannot be written, however it ends", function()
    if process.run("[ -e /dev/full ]").status ~= 0 then pending("no /dev/full here") end
    for _, arguments in ipairs { "-e 'print(1)'", "-e 'io.write(1) os.exit(0)'", "-e 'print(1) os.exit(0, true)'",
      "--help" } do
      local result = nibble(arguments .. " >/dev/full")
      assert.equal(1, result.status)
      assert.matches("^nibble: cannot write to standard output[^\n]*\n$", result.stderr)
    end
    ended_well(nibble("-e 'x = 1' >/dev/full"), "")
  end)

  -- What scripts see of coroutines is what plain Lua shows them: both run this.
  it("has Lua's own coroutines", function()
    local path = process.quote(process.root .. "spec/support/coroutines.lua")
    local plain, ours = process.run("lua5.4 " .. path), nibble(path)
    assert.same({ 0, "" }, { plain.status, plain.stderr })
    assert.is_true(#plain.stdout > 1000)
    assert.same(plain, ours)
  end)

  describe("at Ctrl-C", function()
    -- The signal comes from a child of the script itself: a shell's background jobs would ignore it.
    local kill = "io.popen('sleep 0.1; kill -INT $PPID')\n"

    it("ends a running script with an error", function()
      failed(nibble(script(kill .. "while true do end")), 1, "^nibble: [^\n]*interrupted!\nstack traceback:")
    end)

    it("raises an error that a script can catch, once", function()
      local code = kill .. "print(pcall(function() while true do end end))\nfor i = 1, 1e6 do end\nprint 'on'"
      local result = nibble(script(code))
      assert.equal("", result.stderr)
      assert.matches("^false\t[^\n]*interrupted!\non\n$", result.stdout)
      assert.equal(0, result.status)
    end)

    it("ends a coroutine and all that it runs in", function()
      for _, code in ipairs {
        "coroutine.wrap(function() while true do end end)()",
        "coroutine.wrap(function() coroutine.wrap(function() while true do end end)() end)()",
        "local c = coroutine.wrap(function() while true do coroutine.yield() end end) while true do c() end",
        -- resume does not catch it: a scheduler would go on with the next coroutine
        "while true do coroutine.resume(coroutine.create(function() while true do end end)) end",
        "local c = coroutine.create(function() while true do coroutine.yield() end end) "
          .. "while coroutine.resume(c) do end",
      } do
        failed(nibble(script(kill .. code)), 1, "^nibble: [^\n]*interrupted!\nstack traceback:")
      end
    end)

    it("raises an error that a coroutine can catch, once", function()
      local code = "local function spin() while true do end end\n" .. kill
      code = code .. "local c = coroutine.create(function() print(pcall(spin)) coroutine.yield(1) return 2 end)\n"
        .. "print(coroutine.resume(c))\nfor i = 1, 1e6 do end\nprint(coroutine.resume(c))\n"
        .. "print(pcall(coroutine.wrap(function() for i = 1, 1e6 do end error('later', 0) end)))"
      local result = nibble(script(code))
      assert.equal("", result.stderr)
      assert.matches("^false\t[^\n]*interrupted!\ntrue\t1\ntrue\t2\nfalse\tlater\n$", result.stdout)
      assert.equal(0, result.status)
    end)

    it("ends a wait inside a coroutine", function()
      local result = nibble(script([[
        local t, s = nibble.zeros(1 << 24), nibble.stream()
        local u = t:to("bfloat16")
        nibble.synchronize()
        local graph = s:capture(function() for i = 1, 50 do t:copy(u) end end)
        local start, done = s:record()
        s:scope(function()
          graph:replay()
          local one = start:elapsed(s:record())
          for i = 1, 2000 / one + 1 do graph:replay() end -- two seconds of work, however fast the device is
          done = s:record()
        end)]] .. "\n" .. kill .. [[
        print(pcall(coroutine.wrap(function() s:synchronize() end)))
        os.exit(done:query() and 1 or 0)]]))
      assert.equal("", result.stderr)
      assert.matches("^false\t[^\n]*interrupted!\n$", result.stdout)
      assert.equal(0, result.status)
    end)

    it("stays deaf when it was started so", function()
      local path = script(kill .. "local t = os.time() + 1\nwhile os.time() <= t do end\nprint 'done'")
      ended_well(process.run(("trap '' INT; %s %s"):format(command, path)), "done\n")
    end)
  end)
end)

-- `script` of util-linux gives the command a terminal. What is typed comes in steps, as from a person: the first when
-- the greeting is there, each other when the screen has come to rest.
describe("the prompt", function()
  local history

  -- For a build with sanitizers: a leak of libedit's, which only a full stack tells from our own.
  local SANITIZER = 'LSAN_OPTIONS="suppressions=$NIBBLE_ROOT/spec/support/lsan.supp:print_suppressions=0" '
    .. 'ASAN_OPTIONS="${ASAN_OPTIONS:-}:fast_unwind_on_malloc=0"'

  local function prompt(steps)
    local screen = os.tmpname()
    finally(function() os.remove(screen) end)
    local lines = { [[
      rest() {
        size=-1
        while now=$(wc -c <"$screen"); [ "$now" != "$size" ]; do size=$now; sleep 0.2; done
      }
      tries=0
      until grep -q '^> ' "$screen" || [ $((tries += 1)) -gt 600 ]; do sleep 0.05; done]] }
    for _, text in ipairs(steps) do table.insert(lines, "rest; printf %s " .. process.quote(text)) end
    table.insert(lines, "rest; printf '\\004'; rest")
    local result =
      process.run(("screen=%s\n{ %s\n} | TERM=xterm NIBBLE_HISTORY=%s %s timeout 60 script -qefc %s %s"):format(
      screen, table.concat(lines, "\n"), process.quote(history), SANITIZER, process.quote("exec " .. command), screen))
    return result.status, (result.stdout:gsub("\r", ""))
  end

  local function typed(...)
    if process.run("script -qec true /dev/null").status ~= 0 then pending("`script` cannot make a terminal here") end
    local status, screen = prompt { ... }
    assert.equal(0, status, screen)
    return screen
  end

  before_each(function()
    history = os.tmpname()
    os.remove(history)
  end)
  after_each(function() os.remove(history) end)

  it("greets, prints values without print, and leaves at Ctrl-D", function()
    local screen = typed("40 + 2\n", "nil, 'x'\n", "y = 5\n", "{1, {2, {}}, z = 'a'}\n")
    assert.matches("nibble [%d.]+, Lua 5%.4%.%d+, device ", screen)
    assert.matches("\n42\n", screen)
    assert.matches("\nnil\tx\n", screen)
    assert.matches("\n{1, {2, {}}, z = \"a\"}\n", screen)
    assert.not_matches("\n5\n", screen)
  end)

  it("prints tensors", function()
    assert.matches("float32", typed("nibble.zeros(2, 2)\n"))
  end)

  it("goes on reading until a chunk is complete", function()
    local screen = typed("for i = 7, 8 do\n", "print(i * 11)\n", "end\n", "{\n", "6 * 7}\n")
    assert.matches(">> ", screen)
    assert.matches("\n77\n88\n", screen)
    assert.matches("\n{42}\n", screen)
  end)

  it("completes globals, fields and methods", function()
    assert.matches("\n0123456789\n", typed("tostr\t(\"0123456789\")\n"))
    assert.matches("\ntable\n", typed("type(nibble.quanti\t)\n"))
    assert.matches("\n6\n", typed("t = nibble.zeros(2, 3)\n", "t:nume\t()\n"))
    assert.matches("transpose", typed("t = nibble.zeros(2, 3)\n", "t:t\t\t", "\21"))
    assert.matches("\nABC\n", typed("s = 'abc'\n", "s:upp\t()\n"))
  end)

  it("takes Tab for a space where no name ends", function()
    local screen = typed("\tprint(6 * 7)\n", "if true then\n", "\t\tprint(6 * 8) \t\n", "\tend\n", " \t", "6 * 9\n")
    for _, number in ipairs { 42, 48, 54 } do assert.matches("\n" .. number .. "\n", screen) end
    assert.not_matches("xpcall", screen)
  end)

  it("says how to leave and where help is, unless the words mean something", function()
    local screen = typed("exit\n", "quit()\n", "help\n", "quit = 6 * 7\n", "quit\n", "exit = 1 print(exit, help)\n")
    local _, hints = screen:gsub("\nPress Ctrl%-D to exit%.\n", "")
    assert.equal(2, hints)
    local keys,
      docs = screen:match("\n(Keys: [^\n]*)\n[^\n]* in (/[^\n]*/nibble/meta%.lua)\n[^\n]*nibble%.pages[^\n]*\n>")
    assert.matches("Tab", keys)
    assert.truthy(io.open(docs)):close()
    assert.matches("\n42\n", screen)
    assert.matches("\n1\tnil\n", screen)
  end)

  it("completes among very many names", function()
    local names = "t = {} for i = 1, 2e4 do t['kk' .. i * 7919 % 20011] = i end\n"
    assert.matches("\n42\n", typed(names, "t.k\t", "\21", "6 * 7\n"))
  end)

  it("ends when it is left, without the work that is still queued", function()
    if process.run("script -qec true /dev/null").status ~= 0 then pending("`script` cannot make a terminal here") end
    local status = prompt { "t = nibble.zeros(1 << 25) u = t:to('bfloat16') for i = 1, 250 do t:copy(u) end\n", "\4" }
    assert.equal(0, status)
  end)

  it("shows no control characters of values, but the colours of pictures", function()
    local screen = typed("{'a\\27]0;b\\7', ['\\27c'] = '\\0'}\n", "'x\\27[31my\\27]0;z\\7'\n")
    assert.matches('\n{"a\\x1B%]0;b\\x07", %["\\x1Bc"%] = "\\x00"}\n', screen)
    assert.matches("\nx\27%[31my\\x1B%]0;z\\x07\n", screen)
  end)

  it("has no red where nobody wants it", function()
    if process.run("script -qec true /dev/null").status ~= 0 then pending("`script` cannot make a terminal here") end
    for environment, red in pairs { ["-u NO_COLOR TERM=xterm"] = true, ["NO_COLOR= TERM=xterm"] = true,
      ["NO_COLOR=1 TERM=xterm"] = false, ["-u NO_COLOR TERM=dumb"] = false, ["-u NO_COLOR TERM="] = false,
      ["-u NO_COLOR -u TERM"] = false } do
      local line = ("env %s %s -e %s"):format(environment, command, process.quote "error('boom', 0)")
      local screen = process.run("script -qec " .. process.quote(line) .. " /dev/null").stdout
      assert.matches(red and "^\27%[31mnibble: boom" or "^nibble: boom", screen)
      assert.equal(red, screen:find("\27", 1, true) ~= nil)
    end
  end)

  it("shows an error in red and goes on", function()
    local screen = typed("error('boom', 0)\n", "6 * 7\n")
    assert.matches("\27%[31mboom\n", screen)
    assert.matches("\n42\n", screen)
  end)

  it("at Ctrl-C drops the line, or ends what runs", function()
    local screen = typed("nonsense(", "\3", "6 * 7\n", "while true do end\n", "\3", "6 * 8\n")
    assert.matches("\n42\n", screen)
    assert.matches("interrupted!", screen)
    assert.matches("\n48\n", screen)
    screen = typed("coroutine.wrap(function() while true do end end)()\n", "\3", "6 * 9\n",
      "coroutine.resume(coroutine.create(function() while true do end end))\n", "\3", "6 * 10\n")
    local _, times = screen:gsub("interrupted!", "")
    assert.equal(2, times)
    assert.matches("\n54\n", screen)
    assert.matches("\n60\n", screen)
  end)

  it("keeps its history in a file for the owner alone, and reads it again", function()
    typed("first = 6 * 7\n", "first + 1\n")
    assert.equal("600\n", process.run("stat -c %a " .. history).stdout)
    assert.matches("\n43\n", typed("first = 42\n", "\27[A\27[A\n"))
  end)

  it("leaves a file alone that is no history", function()
    local file = assert(io.open(history, "w"))
    file:write("precious\n")
    file:close()
    typed("1 + 1\n")
    assert.equal("precious\n", process.read(history))
  end)
end)
