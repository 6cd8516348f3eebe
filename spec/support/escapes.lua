-- Scripts that try to get out of a sandbox, or to get at what is not theirs: what write-ups about Lua sandboxes, and
-- their bug reports, describe. Each checks by itself that it stays inside, and ends well unless `status` says
-- otherwise; `settings` are for spec/embedding/sandbox.c.
return {
  -- What is not there.
  { "io, os, debug, package, require, dofile, loadfile", [[
    for _, name in ipairs { "io", "os", "debug", "package", "require", "dofile", "loadfile", "warn", "loadstring", "setfenv",
      "getfenv", "unpack", "newproxy", "gcinfo", "jit", "ffi", "arg" } do assert(_G[name] == nil, name) end]] },
  { "nothing else than what is listed", [[
    local listed = {}
    for name in ([=[assert collectgarbage coroutine error getmetatable ipairs load math next nibble pairs pcall print rawequal
      rawget rawlen rawset select setmetatable state string table tonumber tostring type utf8 xpcall _G _VERSION
      coroutine.close coroutine.create coroutine.isyieldable coroutine.resume coroutine.running coroutine.status
      coroutine.wrap coroutine.yield table.concat table.insert table.move table.pack table.remove table.sort table.unpack
      string.byte string.char string.find string.format string.gmatch string.gsub string.len string.lower string.match
      string.pack string.packsize string.rep string.reverse string.sub string.unpack string.upper utf8.char
      utf8.charpattern utf8.codepoint utf8.codes utf8.len utf8.offset nibble.arange nibble.available nibble.check_faults
      nibble.current_stream nibble.device nibble.devices nibble.empty nibble.from_bytes nibble.full nibble.memory nibble.mla
      nibble.page nibble.quantization nibble.randint nibble.randn nibble.randperm nibble.range nibble.rope_table
      nibble.stream nibble.synchronize nibble.tensor nibble.version nibble.zeros]=]):gmatch("%S+") do listed[name] = true end
    for name, value in pairs(_G) do
      assert(listed[name], name)
      if type(value) == "table" and ("string table coroutine utf8 nibble"):find(name, 1, true) then
        for field in pairs(value) do assert(listed[name .. "." .. field], name .. "." .. field) end
      end
    end]] },
  { "files and kernels through the module", [[
    assert(nibble.load == nil and nibble.compile == nil and nibble.module == nil and nibble.observe == nil and nibble.peek == nil)
    assert(not pcall(function() return nibble.tensor(1).save end))
    assert(not pcall(function() return nibble.tensor(1):save("/tmp/nibble-escape.npy") end))]] },
  { "functions of the string library through a string", [[
    local s = ""
    assert(s.dump == nil and not pcall(s.rep, "x", 1e9) and not pcall(s.format, "%p", {}))
    assert(not pcall(function() return ("x"):rep(1e8):rep(1e8) end))]] },
  -- Code that no compiler has seen.
  { "bytecode", [[
    assert(string.dump == nil)
    for _, mode in ipairs { "t", "bt" } do
      local f, message = load("\27Lua\x54\0\x19\x93\r\n\x1a\n", "x", mode)
      assert(f == nil and message:find("binary"), message)
    end
    assert(not pcall(load, "\27Lua", "x", "b"))
    local pieces, i = { "", "\27", "Lua" }, 0
    assert(load(function() i = i + 1 return pieces[i] end) == nil or i == 1)
    local f = load(function() i = i + 1 return ({ [2] = "\27", [3] = "Lua" })[i] end) assert(f == nil)]] },
  { "load gets the script's environment, not the state's globals", [[
    assert(load("return _G")() == _G and load("return _ENV")() == _G and load("return io, os, debug, require")() == nil)
    assert(load("return x", "c", "t", { x = 7 })() == 7 and not pcall(load("return x", "c", "t", nil)))
    assert(load("local _ENV = {} return getmetatable")() == nil)
    x = 3 assert(load("x = x + 1 return x")() == 4 and x == 4)]] },
  { "a compiler that is disturbed while it reads", [[
    local n = 0
    local f = assert(load(function()
      n = n + 1
      local t = {} for i = 1, 2000 do t[i] = { tostring(i) } end
      if n <= 50 then return "local v" .. n .. " = '" .. ("x"):rep(100) .. "' " end
      return n == 51 and "return v50" or nil
    end))
    assert(#f() == 100)
    assert(not load(function() return {} end))
    assert(not load(function() error("reader") end))]] },
  { "a compiler that meets a constant _ENV", [[
    load("local a; local _ENV <const> = { 1 }; return x, y, a.b.c")
    load("local _ENV <const> = 11; X = 1")
    load("local function f() local _ENV <const> = {} goto l ::l:: return function() x = y end end f()")
    load(("("):rep(1000)) load(("a="):rep(200) .. "1") load("return " .. ("-"):rep(5000) .. "1") load(("{"):rep(1000))]] },
  -- Metatables.
  { "the metatable of strings", [[
    assert(getmetatable("") == false)
    assert(not pcall(setmetatable, "", {}))
    assert(not pcall(function() getmetatable("").__index = {} end))
    string.upper = function() return "mine" end
    assert(("x"):upper() == "X")
    assert(not pcall(function() return "10" + 1 end))]] },
  { "metatables of tensors, streams and the like", [[
    local t, s = nibble.tensor { 1, 2 }, nibble.stream()
    local g = s:capture(function() t:fill(1) end)
    for name, object in pairs { tensor = t, stream = s, event = s:record(), graph = g } do
      assert(getmetatable(object) == "nibble." .. name)
      assert(not pcall(setmetatable, object, {}) and not pcall(rawset, object, 1, 1) and not pcall(rawget, object, 1))
      assert(not pcall(next, object) and not pcall(function() return object.__gc end))
      assert(not pcall(function() return object.methods end) and not pcall(function() object.methods = {} end))
    end]] },
  { "objects that only look like tensors", [[
    local fake = setmetatable({}, { __name = "nibble.tensor", __index = nibble.tensor(1) })
    for _, f in ipairs { nibble.tensor(1).totable, nibble.tensor(1).close, nibble.tensor(1).narrow } do
      assert(not pcall(f, fake, 1, 1, 1)) assert(not pcall(f, nibble.stream(), 1, 1, 1)) assert(not pcall(f, "x", 1, 1, 1))
    end]] },
  { "__gc, __close and __mode", [[
    for _, name in ipairs { "__gc", "__close", "__mode" } do
      for _, value in ipairs { function() end, "k", "v", true, {} } do
        local ok, message = pcall(setmetatable, {}, { [name] = value })
        assert(not ok and message:find(name), message)
      end
    end
    assert(not pcall(function() local x <close> = setmetatable({}, { __close = print }) end))]] },
  { "__gc, __close and __mode that come later", [[
    local ran = 0
    local metatable = {}
    local t = setmetatable({}, metatable)
    metatable.__gc = function() ran = ran + 1 end
    metatable.__close = metatable.__gc
    metatable.__mode = "k"
    assert(not pcall(setmetatable, {}, metatable))
    assert(not pcall(function() local x <close> = t end))
    t[{}] = 1
    for i = 1, 20 do pcall(string.rep, "x", 3 * 10^6 // 1) local _ = ("x"):rep(900000) end
    assert(next(t) ~= nil and ran == 0)
    t = nil
    for i = 1, 20 do local _ = ("x"):rep(900000) .. i end
    assert(ran == 0)]] },
  { "__gc that another metatable brings in", [[
    local ran = false
    local bait = setmetatable({}, { __index = { __gc = function() ran = true end } })
    setmetatable({}, bait)
    local t = setmetatable({}, { __index = function(_, k) if k == "__gc" then return function() ran = true end end end })
    setmetatable({}, t)
    bait, t = nil, nil
    for i = 1, 20 do local _ = ("x"):rep(900000) .. i end
    assert(not ran)]] },
  { "metatables are what scripts expect otherwise", [[
    local metatable = { __index = function(_, k) return k .. "!" end, __len = function() return 7 end,
      __call = function(_, a) return a end,
      __add = function() return "sum" end, __eq = function() return true end, __lt = function() return true end,
      __concat = function() return "cat" end, __tostring = function() return "text" end,
      __pairs = function() return next, { 1 } end }
    local a, b = setmetatable({}, metatable), setmetatable({}, metatable)
    assert(getmetatable(a) == metatable and a.x == "x!" and #a == 7 and a(3) == 3 and a + b == "sum" and a == b and a < b)
    assert(a .. b == "cat" and tostring(a) == "text" and string.format("%s", a) == "text")
    local n = 0 for _ in pairs(a) do n = n + 1 end assert(n == 1)
    for i = 1, 100 do assert(getmetatable(setmetatable({}, { i }))[1] == i) end
    metatable.__len = function() return 8 end
    assert(#a == 7 and #setmetatable({}, metatable) == 8)
    assert(getmetatable(setmetatable({}, { __metatable = "no" })) == "no")
    assert(not pcall(setmetatable, setmetatable({}, { __metatable = "no" }), nil))
    assert(getmetatable(setmetatable(a, nil)) == nil and not pcall(setmetatable, {}) and not pcall(setmetatable, 1, {}))]] },
  { "an environment that works against the host", [[
    setmetatable(_G, { __index = function() error("trap") end, __newindex = function() error("trap") end, __metatable = 1 })
    for _, name in pairs { "pcall", "error", "string", "table", "nibble", "assert", "load", "setmetatable" } do
      rawset(_G, name, nil)
    end
    state.__index = 1]] },
  { "an environment without anything", "local all = _G for name in pairs(all) do all[name] = nil end assert = nil" },
  -- Addresses.
  { "addresses in text", [[
    local texts = { tostring({}), tostring(print), tostring(coroutine.create(print)), tostring(nibble.stream()),
      tostring(nibble.stream():record()), tostring(setmetatable({}, { __name = "mine" })), string.format("%s %s", {}, print) }
    for _, f in ipairs { function() return {} + 1 end, function() return print .. "" end, function() nibble.tensor({ {}, 1 }) end,
      function() nibble.zeros({ print }) end, function() error({}) end, function() return #print end,
      function() ("x"):rep({}) end, function() string.format("%d", {}) end, function() return {} < {} end } do
      texts[#texts + 1] = tostring(select(2, pcall(f)))
    end
    for _, text in ipairs(texts) do assert(not text:find("0x") and not text:find("%x%x%x%x%x%x"), text) end
    for _, format in ipairs { "%p", "%5p", "%-20p", "%%%p", "%s%p", "\0%p", "%s\0%p" } do
      assert(not pcall(string.format, format, {}, {}), format)
    end]] },
  { "addresses of streams", [[
    assert(not pcall(nibble.stream, { handle = 0 }) and not pcall(nibble.stream, { handle = 1 << 40 }))
    assert(not pcall(function() return nibble.stream().handle end))
    assert(not pcall(function() return nibble.current_stream().handle end))]] },
  { "addresses as seeds of random numbers", [[
    assert(not pcall(math.randomseed))
    assert(select("#", math.randomseed(1)) == 0 and select("#", math.randomseed(1, 2)) == 0)
    math.randomseed(7) local a = math.random(0) math.randomseed(7) assert(a == math.random(0))]] },
  -- Numbers that overflow.
  { "table.unpack, string.byte and select with extreme bounds", [[
    local least, most = math.mininteger, math.maxinteger
    for _, bounds in ipairs { { 0, 2^31 - 1 }, { 1, 2^31 }, { least, most }, { -2^31, 2^31 }, { 1, 1e8 },
      { most - 10000000, most }, { 0, most } } do
      assert(not pcall(table.unpack, {}, bounds[1] | 0, bounds[2] | 0))
    end
    assert(select("#", table.unpack({}, most, most)) == 1 and select("#", table.unpack({}, most, least)) == 0)
    assert(("abc"):byte(least, most) == 97 and select("#", ("abc"):byte(most, least)) == 0)
    assert(not pcall(select, least) and select(most, 1) == nil)
    assert(("abc"):sub(least, most) == "abc" and ("abc"):find("b", least) == 2 and ("abc"):find("b", most) == nil)
    assert(not pcall(table.move, { 1 }, 1, most, 2) and not pcall(table.move, {}, least, most, 0))
    assert(not pcall(table.insert, {}, most, 1) and not pcall(table.remove, {}, most))
    assert(table.concat({}, "", most, least) == "" and not pcall(table.concat, {}, "", most - 1, most))
    assert(not pcall(string.rep, "xx", most) and not pcall(string.rep, "x", 1 << 40, "y") and ("x"):rep(least) == "")
    assert(not pcall(utf8.codepoint, "abc", least, most) and not pcall(string.pack, "i17", 1))]] },
  { "shapes and strides that overflow", [[
    local most, t = math.maxinteger, nibble.tensor { 1, 2, 3 }
    for _, shape in ipairs { { most }, { most, most }, { 1 << 32, 1 << 32 }, { -1 }, { 1 << 62 } } do
      assert(not pcall(nibble.zeros, shape) and not pcall(nibble.empty, shape) and not pcall(nibble.full, shape, 1))
      assert(not pcall(t.expand, nibble.tensor(1), shape) and not pcall(t.as_strided, t, shape, shape, 0))
    end
    for _, i in ipairs { most, math.mininteger, 0, 4, -1 } do
      assert(not pcall(function() return t[i] end) and not pcall(function() t[i] = 1 end))
      assert(not pcall(t.narrow, t, 1, i, 3) and not pcall(t.narrow, t, 1, 1, i > 3 and i or i - 1))
      assert(not pcall(t.select, t, i, 1))
      assert(not pcall(t.as_strided, t, { 1 }, { 1 }, i == 0 and 3 or i))
    end
    assert(not pcall(nibble.arange, 1e300) and not pcall(nibble.randperm, most))
    assert(not pcall(nibble.from_bytes, "x", { most }))]] },
  -- Work out of nothing.
  { "views that repeat a few bytes for ever", [[
    local one = nibble.tensor(1)
    assert(not pcall(one.expand, one, 1 << 40) and not pcall(one.as_strided, one, { 1 << 40 }, { 0 }, 0))
    local wide = one:expand(100000) assert(wide:numel() == 100000 and wide:amax() == 1)]], settings = "device_memory=1000000" },
  -- Coroutines and errors.
  { "yields out of the script", [[
    assert(not pcall(coroutine.yield) and not coroutine.isyieldable() and select(2, coroutine.running()))
    assert(not coroutine.resume(coroutine.running()) and not pcall(coroutine.close, coroutine.running()))
    coroutine.yield(1)]], status = "SCRIPT" },
  { "coroutines that end, wrap and close themselves", [[
    local co co = coroutine.create(function() return coroutine.resume(co) end)
    assert(select(2, coroutine.resume(co)) == false)
    local wrapped wrapped = coroutine.wrap(function() return pcall(wrapped) end) assert(wrapped() == false)
    co = coroutine.create(function() return pcall(coroutine.close, co) end) assert(select(2, coroutine.resume(co)) == false)
    co = coroutine.create(function() local t <close> = nibble.tensor(1) coroutine.yield() end)
    coroutine.resume(co) assert(coroutine.close(co) and coroutine.status(co) == "dead" and not coroutine.resume(co))
    co = coroutine.wrap(function() error({ 1 }) end)
    local ok, e = pcall(co) assert(not ok and e[1] == 1 and not pcall(co))
    ok, e = pcall(coroutine.wrap(function() error("x") end)) assert(not ok and e:find("x"))]] },
  { "pcall and xpcall as scripts expect them", [[
    assert(select("#", pcall(function() return 1, nil, nil end)) == 4)
    assert(select(2, xpcall(function(a, b) return a + b end, print, 2, 3)) == 5)
    local ok, m = xpcall(error, function(e) return "<" .. e .. ">" end, "x") assert(not ok and m == "<x>")
    ok, m = xpcall(error, error, "twice") assert(not ok and m == "twice")
    assert(not pcall(xpcall) and not pcall(xpcall, print) and not pcall(pcall))
    local co = coroutine.wrap(function()
      local r = { pcall(function() return coroutine.yield(1), coroutine.yield(2) end) }
      coroutine.yield(r[3])
    end)
    assert(co() == 1 and co("a") == 2 and co("b") == "b")
    co = coroutine.wrap(function()
      return xpcall(function() coroutine.yield(1) error("x", 0) end, function(e) return e .. "!" end)
    end)
    co() ok, m = co() assert(ok == false and m == "x!")]] },
  { "C stacks without end", [[
    local function f() return coroutine.wrap(f)() end pcall(f)
    local function g() return ("x"):gsub(".", g) end pcall(g)
    local t = {} for i = 1, 300 do t = setmetatable({}, { __index = function(_, k) return t[k] end }) end
    local function h() return xpcall(h, h) end pcall(h)
    local function s() table.sort({ 1, 2, 3 }, s) end pcall(s)
    local function p() pcall(p) end p()
    local function l() return load(l) end pcall(l)
    local function e() error(e()) end pcall(e)
    local function n() nibble.stream():scope(n) end pcall(n)
    assert(pcall(string.rep, "x", 10))]] },
  { "errors without a text", "error()", status = "SCRIPT" },
  { "errors that are tables", "error(setmetatable({}, { __tostring = function() error('again') end }))",
    status = "SCRIPT" },
  { "errors of extreme levels", [[
    for _, l in ipairs { -1, 0, 1000000000, math.mininteger } do pcall(error, 'x', l) end error('x', 2)]], status = "SCRIPT" },
  { "text that does not compile", "x = = 1", status = "SCRIPT" },
  -- Memory.
  { "strings and tables without end", "local t = {} for i = 1, 1e9 do t[i] = ('x'):rep(1000) .. i end",
    status = "MEMORY" },
  { "one string larger than its part of the memory", "local s = 'x' for i = 1, 40 do s = s .. s end",
    status = "MEMORY" },
  { "collectgarbage counts, and does nothing else", [[
    assert(collectgarbage("count") > 10)
    for _, what in ipairs { "collect", "stop", "restart", "step", "generational", "incremental", "setpause" } do
      assert(not pcall(collectgarbage, what), what)
    end
    assert(not pcall(collectgarbage))]] },
  { "tensors beyond the device's limit", [[
    local keep = {}
    local ok, message = pcall(function() for i = 1, 100 do keep[i] = nibble.zeros(250000) end end)
    assert(not ok and #keep <= 10 and message:find("memory"), message)
    keep[1] = nil
    keep[1] = nibble.zeros(250000)]], settings = "device_memory=10000000" },
  { "tensors that graphs and events alone hold", [[
    local graphs, s = {}, nibble.stream()
    local ok = pcall(function()
      for i = 1, 100 do
        local t = nibble.zeros(250000)
        graphs[i] = s:capture(function() t:fill(1) end)
        t:close()
      end
    end)
    assert(not ok and #graphs <= 10)]], settings = "device_memory=10000000" },
  { "more objects than allowed", [[
    local keep = {}
    local ok, message = pcall(function() for i = 1, 1000 do keep[i] = nibble.tensor(i) end end)
    assert(not ok and #keep == 100 and message:find("at most 100"), message)
    assert(not pcall(function() return keep[1]:view(1) end))
    keep[50]:close() keep[51] = nil
    keep[50], keep[51] = nibble.tensor(1), keep[1]:view(1)
    for i = 1, 1000 do local _ <close> = nibble.tensor(i) end]], settings = "tensors=102", status = "SCRIPT" },
  { "as many objects as allowed, over and over", [[
    for i = 1, 2000 do local t = nibble.zeros(4) t[1] = 1 local _ = t:view(2, 2)[1] end
    local keep = {} for i = 1, 90 do keep[i] = nibble.tensor(i) end]], settings = "tensors=100" },
  { "streams beyond the limit", [[
    local keep = {}
    assert(not pcall(function() for i = 1, 10 do keep[i] = nibble.stream() end end) and #keep == 3)
    keep = nil
    for i = 1, 100 do nibble.stream() end]], settings = "streams=3" },
  { "host memory through graphs", [[
    local t, s, keep = nibble.zeros(1), nibble.stream(), {}
    local ok, message = pcall(function()
      for i = 1, 1000 do keep[i] = s:capture(function() for k = 1, 1000 do t:fill(k) end end) end
    end)
    assert(not ok and message:find("memory"), message)]], settings = "device_memory=1000000" },
  -- Reports of faults in Lua and in programs that embed it.
  { "the metatables of numbers, booleans, functions and threads", [[
    for _, value in ipairs { 1, 1.5, true, print, coroutine.create(print), function() end } do
      assert(getmetatable(value) == nil and not pcall(setmetatable, value, {}))
    end
    assert(getmetatable(nil) == nil and not pcall(setmetatable, nil, {}) and not pcall(getmetatable))]] },
  { "the table behind all strings", [[
    local through = setmetatable({}, { __index = "", __newindex = "" })
    assert(through.rep == ("").rep and not pcall(function() through.rep = 1 end) and not pcall(function() ("").rep = 1 end))
    assert(not pcall(rawget, "", "rep") and not pcall(rawset, "", "rep", 1) and not pcall(next, ""))
    assert(not pcall(function() for _ in pairs("") do end end) and ("").dump == nil)
    for _, name in ipairs { "gsub", "rep", "find" } do string[name] = nil end
    assert(("ab"):rep(2) == "abab")]] },
  { "long brackets and numerals without end", [=[
    for _, text in ipairs { "[" .. ("="):rep(200000), "[" .. ("="):rep(200000) .. "[", "--[" .. ("="):rep(200000) .. "[x",
      "return [" .. ("="):rep(70000) .. "[x]" .. ("="):rep(69999) .. "]", "return 0x" .. ("f"):rep(200000) .. "g",
      "return 1" .. ("0"):rep(200000) .. "e", "return '" .. ("\\z "):rep(60000), "return '\\u{" .. ("f"):rep(60000) .. "}'",
      "return '\\x", "return '\\400'", "\0", "return \"\\", "#!x\nreturn", "return 'a\0b' == 'a'" } do
      local f, message = load(text, ("n"):rep(5000))
      assert(f or message:find("^%[string \"n+...\"%]:%d"), text:sub(1, 30))
    end
    assert(#load("return [" .. ("="):rep(70000) .. "[x]" .. ("="):rep(69999) .. "]]" .. ("="):rep(70000) .. "]")() == 70002)]=] },
  { "a collection while the compiler works, with names that nobody else holds", [[
    for round = 1, 200 do
      local n = 0
      local f = load(function()
        n = n + 1
        local _ = ("g"):rep(3000) .. n
        return n < 30 and ("local a%d = function() return 'k%d' .. %d end "):format(n, n, n) or n == 30 and "return a29()" or nil
      end, "@chunk" .. round)
      assert(f() == "k2929")
    end]] },
  { "goto, labels and blocks that jump where they must not", [[
    for _, text in ipairs { "goto x local a ::x:: print(a)", "do ::x:: end goto x", "goto x", "::x:: ::x::", "break",
      "repeat goto c local z ::c:: until z", "for i = 1, 2 do goto out end do ::out:: end" } do assert(not load(text), text) end
    local n = 0
    for i = 1, 3 do
      do local t <close> = nibble.tensor(i) if i == 2 then goto continue end n = n + t:item() end
      ::continue::
    end
    assert(n == 4)
    do local k = 0 ::top:: local t <close> = nibble.tensor(k) k = k + 1 if k < 50 then goto top end end
    for _ in next, { 1 }, nil, nibble.tensor(1) do break end
    assert(not pcall(function() for _ in next, { 1 }, nil, {} do break end end))]] },
  { "functions with more of everything than Lua has room for", [[
    local function list(format, n, between)
      local t = {} for i = 1, n do t[i] = format:format(i) end return table.concat(t, between)
    end
    assert(not load("local " .. list("a%d", 201, ",")))
    assert(not load("local a0 " .. list("local function f%d() return a0 end", 300, " ")))
    load(list("local a%d=1", 190, " ") .. " return function() return " .. list("a%d", 190, "+") .. " end")
    load("return f(" .. list("%d", 300, ",") .. ")")
    assert(#load("return {" .. list("%d.5", 30000, ",") .. "}")() == 30000)
    local f = load(list("x = %d.25", 20000, " ") .. " return x") assert(f and f() == 20000.25)
    assert(not load(("do "):rep(300)) and not load("x = " .. ("f("):rep(300)) and not load("x = " .. ("{"):rep(300)))
    load(("a."):rep(60000) .. "b = 1") load("return " .. ("not "):rep(60000) .. "1") load("return " .. ("a.."):rep(500) .. "a")]] },
  { "errors while errors are handled, to the end of the stack", [[
    local function loop() return 1 + loop() end
    xpcall(loop, loop) xpcall(loop, function() return loop() end) pcall(xpcall, loop, loop)
    local function again() assert(pcall(again)) end xpcall(again, again)
    local t = setmetatable({}, { __index = function(t, k) return t[k .. "x"] end, __concat = function(a, b) return a .. b end,
      __eq = function(a, b) return a == b end, __call = function(self) return (self()) end })
    pcall(function() return t.a end) pcall(function() return t .. t end) pcall(function() return t() end)
    pcall(function() return t == setmetatable({}, { __eq = function(a, b) return a == b end }) end)
    local deep = setmetatable({}, { __call = print }) for _ = 1, 300 do deep = setmetatable({}, { __call = deep }) end pcall(deep)
    local co co = coroutine.wrap(function() return xpcall(loop, function() return coroutine.yield(1) end) end) pcall(co)
    assert(select(2, pcall(error)) == nil and pcall(string.rep, "x", 3))]] },
  { "numbers that trap", [[
    local least = math.mininteger
    assert(least // -1 == least and least % -1 == 0 and math.fmod(least, -1) == 0 and -least == least and math.abs(least) == least)
    assert(not pcall(function() return 1 // 0 end) and not pcall(function() return 1 % 0 end) and not pcall(math.fmod, 1, 0))
    assert(1 << 64 == 0 and 1 << least == 0 and 1 >> least == 0 and not pcall(function() return 2^53 << 1.5 end))
    assert(math.type(math.random(least, math.maxinteger)) == "integer" and not pcall(math.random, 1, least))
    assert(not pcall(function() for _ = 1, 10, 0 do end end))
    local n = 0 for i = math.maxinteger - 1, math.maxinteger do n = n + 1 end
    for i = least, least + 1 do n = n + 1 end for i = 1, math.huge do n = n + 1 if i == 3 then break end end assert(n == 7)
    local t = nibble.zeros(4, { dtype = "int64" })
    for _, x in ipairs { least, math.maxinteger, 0 / 0, 1 / 0, -1 / 0, 2^63, -2^63 } do
      for _, dtype in ipairs { "int8", "int32", "int64", "float16", "bfloat16", "float8_e4m3fn", "uint8" } do
        pcall(function() nibble.zeros(2, { dtype = dtype }):fill(x):to("float32"):totable() end)
        pcall(function() nibble.tensor({ x, 1 }, { dtype = dtype }):to("int32"):totable() end)
      end
      pcall(t.fill, t, x) pcall(nibble.arange, x, 10) pcall(nibble.arange, 0, x, 1) pcall(nibble.arange, 0, 9, x)
      pcall(nibble.randint, x, math.maxinteger, { 3 }) pcall(nibble.randint, 0, x, { 3 }) pcall(nibble.randn, { x })
    end]] },
  { "formats and packed data with extreme sizes", [[
    for _, format in ipairs { "%99999d", "%.99999f", "%100d", "%0100d", "%-+ #0d", "%1$d", "%", "%*d", "%n", "%l", "%hhd", "%q%",
      "%.3q" } do
      pcall(string.format, format, 1)
    end
    assert(not pcall(string.format, "%n", 1) and not pcall(string.format, "%100d", 1))
    assert(not pcall(string.format, "%s") and not pcall(string.format, "%c%c", 1) and string.format("%c", 0) == "\0")
    assert(string.format("%.3s|%5s", "abcdef", "x") == "abc|    x" and not pcall(string.format, "%5s", "a\0b"))
    for _, code in ipairs { "s8", "s16", "z", "i16", "!16i8", "Xi16", "c99999999", "!17", "i0", "c", "s17",
      "c2147483647c2147483647" } do
      for _, data in ipairs { "", "\255", ("\255"):rep(8), ("\255"):rep(16), ("\127"):rep(20) } do
        for _, position in ipairs { 1, -1, 0, 5, math.maxinteger, math.mininteger } do pcall(string.unpack, code, data, position) end
      end
      pcall(string.packsize, code) pcall(string.packsize, code:rep(20)) pcall(string.pack, code, 1, 2)
    end
    assert(not pcall(string.unpack, "s8", ("\255"):rep(8)) and not pcall(string.packsize, ("c2147483647"):rep(3)))]] },
  { "utf8 that is none", [[
    assert(not pcall(utf8.char, -1) and not pcall(utf8.char, 1 << 31) and #utf8.char(0x7FFFFFFF) == 6)
    for _, text in ipairs { "\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\x80",
      "\xf8\x88\x80\x80\x80", "\xfc", "a\xe2\x82" } do
      assert(not utf8.len(text) and not pcall(utf8.codepoint, text, 1, -1))
      pcall(function() for _ in utf8.codes(text) do end end)
      for _, i in ipairs { -9, -1, 0, 1, 2, 9, math.mininteger, math.maxinteger } do
        pcall(utf8.offset, text, i) pcall(utf8.offset, text, 1, i) pcall(utf8.len, text, i, i, true) pcall(utf8.codes(text), text, i)
      end
    end]] },
  { "keys and tables that change under a traversal", [[
    assert(not pcall(next, {}, 1) and not pcall(next, { 1 }, {}) and not pcall(rawset, {}, nil, 1) and not pcall(rawset, {}, 0 / 0, 1))
    local t = {} for i = 1, 100 do t["k" .. i] = i end
    pcall(function() for k in pairs(t) do t[k] = nil t[{}] = k t[k .. "x"] = 1 end end)
    local list = { 5, 4, 3, 2, 1, 0 }
    pcall(table.sort, list, function(a, b) for i = 1, 20 do list[i] = i % 2 == 0 and nil or i end return a < b end)
    pcall(table.sort, list, function() list = nil return true end)
    pcall(table.concat, setmetatable({}, { __len = function() return 3 end, __index = function(t, i) rawset(t, i, {}) return "x" end }))
    pcall(string.gsub, "abc", "%w", setmetatable({}, { __index = function() error("trap") end }))
    assert(not pcall(string.gsub, "abc", "%w", function() error({}) end))]] },
  { "objects of the module that vanish while they are used", [[
    local s, t = nibble.stream(), nibble.zeros(4)
    pcall(function() s:scope(function() s:close() t:fill(1) end) end)
    local u = nibble.stream()
    pcall(function() u:capture(function() t:fill(1) u:close() t:fill(2) end) end)
    local v = nibble.stream()
    local ok, g = pcall(function() return v:capture(function() t:fill(3) t:close() end) end)
    if ok then g:replay() g:close() pcall(g.replay, g) pcall(g.nodes, g) end
    v:synchronize()
    local w = nibble.zeros(4)
    pcall(nibble.full, setmetatable({ 2, 2 }, { __index = function() w:close() end }), 1)
    local options = setmetatable({}, { __index = function() w:close() error("trap") end, __pairs = error, __len = error })
    pcall(nibble.zeros, 3, options) pcall(nibble.tensor, { 1 }, options) pcall(w.narrow, w, 1, options, 1) pcall(w.to, w, options)
    pcall(w.copy, w, w) pcall(function() return w[{ 1, 1 }], w[options] end) pcall(function() w[options] = options end)
    for _, name in ipairs { "fill", "item", "totable", "view", "clone", "equal", "amax", "to", "bytes" } do pcall(w[name], w, w) end
    nibble.range("r", function() nibble.range(("x"):rep(100000), error) end)]], status = "SCRIPT" },
  { "tables that hold themselves, as data", [[
    local t = { 1 } t[1] = t
    assert(not pcall(nibble.tensor, t) and not pcall(nibble.zeros, t))
    local deep = 1 for _ = 1, 5000 do deep = { deep } end
    assert(not pcall(nibble.tensor, deep))
    local t2 = {} for i = 1, 9 do t2 = { t2 } end assert(not pcall(nibble.tensor, t2))
    pcall(nibble.tensor, setmetatable({}, { __len = function() return 1 << 40 end, __index = function() return 1 end }))]] },
  { "terminal codes and zeros in names and messages", [[
    local ok, message = pcall(load("error('\0\27[2J')", "=\27]0;title\7\0x")) assert(not ok and #message < 500)
    assert(not pcall(nibble.zeros, 3, { ["\27[31m"] = 1 }) and not pcall(function() return nibble.zeros(3)["\0"] end))
    setmetatable(_G, { __name = ("\27"):rep(100000) }) assert(not pcall(function() return _G + 1 end))]] },
  { "what memory held before", [[
    local options = { device = "cpu", dtype = "uint8" }
    for _, n in ipairs { 1, 100, 5000, 300000 } do
      for _ = 1, 20 do
        local t = nibble.empty(n, options)
        assert(t:amax() == 0, n)
        t:fill(7) nibble.synchronize("cpu") t:close()
      end
    end]] },
}

