-- nib_sandbox: what scripts that are not trusted can do and reach. spec/support/escapes.lua has the attempts to get
-- out, spec/sandbox/sandbox_time_spec.lua the ones to stay for ever; spec/embedding/scripts.c is a host's view.
local escapes = require("spec.support.escapes")
local process = require("spec.support.runtime_process")
local program = require("spec.support.host_program")

-- Runs scripts, {code, settings}, each in its sandbox; returns for each its status, message and what it printed.
local function run(scripts)
  local path, reason = program.compile("sandbox", { lua = true })
  if not path then pending(reason) end
  local words, files = {}, {}
  local defaults = "lua_memory=0 device_memory=0 tensors=0 streams=0 instructions=0 budget_us=60000000"
  for i, script in ipairs(scripts) do
    files[i] = os.tmpname()
    local file = assert(io.open(files[i], "w"))
    file:write(script[1])
    file:close()
    words[i] = defaults .. " " .. (script[2] or "") .. " " .. files[i]
  end
  local result = process.run("timeout -k 5 300 " .. path .. " " .. table.concat(words, " "))
  os.remove(path)
  for _, file in ipairs(files) do os.remove(file) end
  local ends, printed = {}, {}
  for line in result.stdout:gmatch("([^\n]*)\n") do
    local status, message = line:match("^= (%u+) %d+ (.*)")
    if status then
      ends[#ends + 1], printed = { status = status, message = message, printed = printed }, {}
    else
      printed[#printed + 1] = line:match("^> (.*)")
    end
  end
  assert.same({ 0, "", #scripts }, { result.status, result.stderr, #ends })
  return ends
end

describe("a sandbox", function()
  it("keeps in what tries to get out", function()
    local scripts = {}
    for i, escape in ipairs(escapes) do scripts[i] = { escape[2], escape.settings } end
    for i, ended in ipairs(run(scripts)) do
      local escape = escapes[i]
      assert.same({ escape[1], escape.status or "OK", "" },
        { escape[1], ended.status, ended.status ~= (escape.status or "OK") and ended.message or "" })
    end
  end)

  it("gives every script the same random numbers, and prints lines", function()
    local code = "print(math.random(0), math.random(10), nibble.randn(2):totable()[1]) print('a', nil, {}, 1.5)"
    local ends = run({ { code }, { code } })
    assert.same(ends[1].printed, ends[2].printed)
    assert.equal("a\tnil\ttable\t1.5", ends[1].printed[2])
  end)

  it("counts the streams that a script has made, and no others", function()
    local ended = run({ { [[
      local t, s = nibble.zeros(4), nibble.stream()
      local graph = s:capture(function() t:fill(1) end)
      s:close()
      s = nibble.stream()
      function run()
        assert(not pcall(nibble.stream))
        local current = nibble.current_stream() -- the device's
        assert(graph:update(function() t:fill(2) end))
        graph:replay()
        print(t[1], nibble.current_stream() == current)
        s:close()
        nibble.stream():close()
      end]], "streams=1" } })[1]
    assert.same({ "OK", "", { "2.0\ttrue" } }, { ended.status, ended.message, ended.printed })
  end)

  it("names the script and the line of an error", function()
    local ends = run({ { "\n\nerror('so')" }, { "local t = nil\nt.x = 1" }, { "error({})" }, { "nibble.zeros('a')" },
      { "function run()\n  error('in run')\nend" } })
    local messages = {}
    for i, ended in ipairs(ends) do messages[i] = ended.message end
    assert.same({ "script: script:3: so", "script: script:2: attempt to index a nil value (local 't')",
      "script: raised an error that is a table",
        "script: script:1: zeros: shape: expected an integer, got a string \"a\"",
      "run: script:2: in run" }, messages)
  end)
end)

---------------------------------------------------------------------------------------------- the same as Lua's own

-- A script that computes `calls` (expressions) and compares with what they give here.
local function comparison(calls)
  local lines = { "local function show(ok, ...)",
    "  local t = table.pack(...)",
    "  for i = 1, t.n do t[i] = type(t[i]) == 'string' and ('%q'):format(t[i]) or tostring(t[i]) end",
    "  return tostring(ok) .. ' ' .. (ok and table.concat(t, ' ', 1, t.n) or '')", "end" }
  local prelude = table.concat(lines, "\n")
  for _, call in ipairs(calls) do lines[#lines + 1] = ("print(show(pcall(function() return %s end)))"):format(call) end
  local expected = {}
  local environment = setmetatable({ print = function(text) expected[#expected + 1] = text end }, { __index = _G })
  assert(load(prelude .. "\n" .. table.concat(lines, "\n", 6), "here", "t", environment))()
  for i, text in ipairs(expected) do -- what it prints ends at a newline, and long text is cut
    expected[i] = text:match("^[^\n]*"):sub(1, 4000)
  end
  return table.concat(lines, "\n"), expected
end

local function compare(calls)
  -- A script is at most a megabyte, for the program that runs it.
  for first = 1, #calls, 2000 do
    local code, expected = comparison(table.move(calls, first, math.min(first + 1999, #calls), 1, {}))
    local got = run({ { code, "lua_memory=64000000" } })[1]
    assert.same({ "OK", "" }, { got.status, got.message })
    local lines = {}
    for _, line in ipairs(got.printed) do lines[#lines + 1] = line end
    for i, text in ipairs(expected) do
      if lines[i] ~= text then assert.same({ calls[first + i - 1], text }, { calls[first + i - 1], lines[i] }) end
    end
    assert.equal(#expected, #lines)
  end
end

describe("a sandbox's library", function()
  it("matches patterns as Lua does", function()
    math.randomseed(1)
    local parts = { "a", "b", "c", ".", "%a", "%d", "%s", "%w", "%W", "%.", "[ab]", "[^a]", "[a-c]", "[%d]", "[]]",
      "[^]]", "[a-]",
      "(", ")", "()", "^", "$", "%1", "%b()", "%f[%w]", "%", "[", "%f", "%b", "-", "x-y", "[%a-z]" }
    local repeats = { "", "", "", "*", "+", "-", "?" }
    local letters = { "a", "b", "c", "1", " ", ".", "(", ")", "]", "-", "x", "%", "z" }
    local calls = {}
    local function text(list, length)
      local t = {}
      for i = 1, math.random(0, length) do t[i] = list[math.random(#list)] end
      return t
    end
    for _ = 1, 6000 do
      local subject, pattern = table.concat(text(letters, 12)), text(parts, 5)
      for i = 1, #pattern do pattern[i] = pattern[i] .. repeats[math.random(#repeats)] end
      pattern = (math.random(4) == 1 and "^" or "") .. table.concat(pattern)
      local init = math.random(-14, 14)
      local which = math.random(6)
      local form = ({ "(%q):find(%q, %d)", "(%q):match(%q, %d)", "(%q):gsub(%q, '<%%0>', %d)",
        "(%q):gsub(%q, '%%1%%%%', %d)",
        "(%q):gsub(%q, function(...) return select('#', ...) .. tostring((...)) end, %d)",
        "(function() local t = {} for a, b in (%q):gmatch(%q, %d) do t[#t + 1] = tostring(a) .. tostring(b) end " ..
        "return table.concat(t, '|') end)()" })[which]
      calls[#calls + 1] = form:format(subject, pattern, init)
    end
    compare(calls)
  end)

  it("searches, repeats, formats and gsubs with every kind of replacement as Lua does", function()
    compare({
      "('a.b'):find('.', 1, true)", "('abc'):find('')", "('abc'):find('', 10)", "('abc'):find('', 4)",
        "('a\\0b'):find('\\0')",
      "('a\\0b'):find('%z')", "('a\\0b\\0'):gsub('\\0', 'x')", "('a\\0b'):match('[\\0-a]+')", "('abc'):gsub('', '-')",
      "('abc'):gsub('b', { b = 1 })", "('abc'):gsub('b', { b = false })", "('abc'):gsub('%w', { a = 'x' })",
      "('abc'):gsub('b', 12)", "('abc'):gsub('b', '%')", "('abc'):gsub('b', '%2')", "('abc'):gsub('(b)()', '%2')",
      "('abc'):gsub('b', function() return {} end)",
      "('abc'):gsub('b')", "('abc'):gsub('.', '%0%0', 2)", "('aXb'):gsub('%u', '%%')",
      "('hello world'):gsub('o (w)', '%1')", "(5):rep(3)", "('ab'):rep(3, ',')", "('ab'):rep(1, ',')",
      "('ab'):rep(0)", "('ab'):rep(-1)",
      "(''):rep(10, 'x')", "('x'):rep(7, '')", "string.format('%5.2f|%d|%s|%q|%x|%%', 3.14159, 42, 'x', 'a\\nb', 255)",
      "string.format('%s %s %s', nil, true, 1.0)", "string.format('%d', 1.5)", "string.format('%i', 3)",
        "string.format('%y', 3)",
      "string.format('%10s|%-10s|', 'a', 'b')", "('x'):byte(1, -1)", "('abc'):reverse():upper()", "('%d'):format('3')",
      "('abcabc'):gsub('b', '%1')", "('x = 1, y = 2'):gsub('(%w+) = (%w+)', '%2 = %1')",
        "('THE (quick) fox'):find('%((%a+)%)')",
      "('f(a(b)c)d'):match('%b()')", "('THE (quick) fox'):gsub('%f[%a]%a+', string.lower)", "('aaa'):match('a-$')",
        "('k'):match('()')",
      "('aaaa'):find('a', -2)", "('aaaa'):find('aa', 3, true)", "tonumber('0x10')", "tonumber('10', 2)",
      "tonumber('z', 36)", "tonumber('')",
      "select('#', ('abc'):gmatch('b')())", "utf8.len('äö')", "utf8.char(228, 246)", "load('return 7')()",
        "load('x =')",
      "string.pack('i4', 7):byte(1, -1)", "string.unpack('i4', string.pack('i4', -7))", "math.type(3)",
        "math.floor(3.7)",
    })
  end)

  it("moves, sorts and joins tables as Lua does", function()
    local calls = {
      "table.concat({ 1, 2, 'x' }, ', ')", "table.concat({ 1, 2, 3 }, '-', 2, 3)", "table.concat({}, 'x')",
        "table.concat({ 1, {} })",
      "table.concat({ 1, 2 }, ',', 1, 3)", "table.unpack({ 1, nil, 3 }, 1, 3)", "table.unpack({ 1, 2 }, 2)",
        "table.unpack({})",
      "table.unpack(setmetatable({}, { __index = function(_, i) return i end, __len = function() return 3 end }))",
      "table.insert({}, 1, 2, 3)", "table.insert({})", "table.insert({ 1 }, 3, 1)", "table.remove({ 1, 2 }, 5)",
        "table.remove({})",
      "table.remove({}, 0)", "table.remove({ 1 }, 2)", "table.remove({ 1, 2, 3 }, 1)", "table.sort({ 1, 'x' })",
        "table.pack(1, nil).n",
      "table.insert(nil, 1)", "table.concat(1)",
      "table.move({ 1, 2, 3 }, 1, 3, 2)[4]", "#table.move({ 1, 2, 3 }, 2, 3, 1)",
      "table.unpack(table.move({ 1, 2, 3 }, 1, 3, 3, { 9 }))", "table.move({}, 1, 0, 5)[1]", "table.move(1, 1, 1, 1)",
    }
    local body = "(function() local t = {%s} %s return table.concat(t, ' ') end)()"
    math.randomseed(2)
    for _ = 1, 300 do
      local numbers = {}
      for i = 1, math.random(0, 40) do numbers[i] = math.random(20) end
      local list = table.concat(numbers, ",")
      local n = #numbers
      calls[#calls + 1] = body:format(list, "table.sort(t)")
      calls[#calls + 1] = body:format(list, "table.sort(t, function(a, b) return a > b end)")
      calls[#calls + 1] = body:format(list, ("table.insert(t, %d, 99)"):format(math.random(0, n + 2)))
      calls[#calls + 1] = body:format(list, ("table.remove(t, %d)"):format(math.random(0, n + 2)))
      calls[#calls + 1] = body:format(list, ("table.move(t, %d, %d, %d)"):format(math.random(1, n + 1),
        math.random(0, n),
        math.random(1, n + 3)))
    end
    compare(calls)
  end)
end)
