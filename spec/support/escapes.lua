-- Scripts that try to get out of a sandbox, or to get at what is not theirs: what write-ups about Lua sandboxes, and their
-- bug reports, describe. Each checks by itself that it stays inside, and ends well unless `status` says otherwise; `settings`
-- are for spec/support/host/sandbox.c.
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
    for _, format in ipairs { "%p", "%5p", "%-20p", "%%%p", "%s%p" } do
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
  { "errors that are tables", "error(setmetatable({}, { __tostring = function() error('again') end }))", status = "SCRIPT" },
  { "errors of extreme levels", [[
    for _, l in ipairs { -1, 0, 1000000000, math.mininteger } do pcall(error, 'x', l) end error('x', 2)]], status = "SCRIPT" },
  { "text that does not compile", "x = = 1", status = "SCRIPT" },
  -- Memory.
  { "strings and tables without end", "local t = {} for i = 1, 1e9 do t[i] = ('x'):rep(1000) .. i end", status = "MEMORY" },
  { "one string larger than its part of the memory", "local s = 'x' for i = 1, 40 do s = s .. s end", status = "MEMORY" },
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
}
