-- Scripts that never end by themselves, each in a way of its own: what Lua, its library or nibble does for long at a
-- time. All are ended at the deadline; how late each may be, sandbox_time_spec.lua knows from `bytes`: what one
-- instruction touches, and `nodes`: of the largest graph.
local M = 1 << 20
local overruns = {
  { "a loop", "while true do end" },
  { "a loop in pcall, for ever", "while true do pcall(function() while true do end end) end" },
  { "pcall in pcall", "local function f() pcall(f) return f() end f()" },
  { "a coroutine that is resumed for ever",
    "local c = coroutine.wrap(function() while true do coroutine.yield() end end) while true do c() end" },
  { "a loop in ever new coroutines",
    "while true do coroutine.resume(coroutine.create(function() while true do end end)) end" },
  { "coroutines in coroutines", [[
    local function f() local c = coroutine.wrap(f) pcall(c) while true do end end f()]] },
  { "short coroutines", "while true do coroutine.wrap(function() end)() end" },
  { "an xpcall handler", "xpcall(function() while true do end end, function() while true do end end)" },
  { "an xpcall handler after an error", "xpcall(error, function() while true do end end)" },
  { "a handler that raises", "local function h() return xpcall(error, h) end while true do xpcall(error, h) end" },
  { "__tostring", [[
    local t = setmetatable({}, { __tostring = function() while true do end end })
    while true do pcall(tostring, t) pcall(print, t) pcall(string.format, "%s", t) end]] },
  { "__index that asks itself", [[
    local t = {} setmetatable(t, { __index = function(_, k) return t[k + 1] end })
    while true do pcall(function() return t[1] end) end]] },
  { "a chain of __index", [[
    local t, key = {}, ("k"):rep(1000)
    for i = 1, 1900 do t[("k"):rep(1000)] = 1 t[("k"):rep(1000)] = nil t = setmetatable({}, { __index = t }) end
    while true do local x = t[key] end]] },
  { "string.find that goes back and forth", [[local s = ("a"):rep(16384) s:find(".-.-.-b") error("ended")]] },
  { "string.find with two repeats", [[local s = ("a"):rep(200000) s:find("a*b") error("ended")]] },
  { "string.find of plain text",
    [[local s = ("a"):rep(500000) while true do s:find(("a"):rep(10000) .. "b", 1, true) end]] },
  { "string.gsub of optional items", [[("a"):rep(50):gsub(("a?"):rep(50) .. ("a"):rep(50), "x") error("ended")]] },
  { "string.gmatch", [[for _ in ("a"):rep(10000):gmatch("(a-)-(a-)-(a-)b") do end error("ended")]] },
  { "string.match with %b", [[local s = ("("):rep(100000) while true do s:match("%b()") end]] },
  { "string.rep of nothing", [[while true do local _ = (""):rep(math.maxinteger), ("x"):rep(200000) end]] },
  { "string.format", [[
    local t = {} for i = 1, 50 do t[i] = 1e308 end
    while true do string.format(("%99.99f"):rep(50), table.unpack(t)) end]] },
  { "string.pack", [[while true do string.pack("c999999", "") end]] },
  { "string.upper and reverse", [[local s = ("x"):rep(1000000) while true do s:upper() s:reverse() end]] },
  { "string.byte", [[local s = ("x"):rep(60000) while true do pcall(string.byte, s, 1, -1) end]] },
  { "utf8.len", [[local s = ("x"):rep(65000) while true do utf8.len(s) utf8.codepoint(s, 1, 10000) end]] },
  { "long strings joined", [[local s = ("x"):rep(500000) while true do local _ = s .. s end]] },
  { "long strings compared", [[
    local a, b = ("x"):rep(1000000), ("x"):rep(1000000) while true do local _ = a < b, a == b end]], bytes = 2 * M },
  { "long strings of zeros compared", [[
    local a, b = ("\0"):rep(1000000), ("\0"):rep(1000000) while true do local _ = a < b end]], bytes = 2 * M },
  { "a straight line of comparisons, after fast instructions", [[
    local a, b = ("\0"):rep(1000000), ("\0"):rep(1000000)
    for _ = 1, 20000 do end ]] .. ("local _ = a < b "):rep(95) .. " while true do end", bytes = 2 * M },
  { "straight lines of comparisons of strings that are not so long", [[
    local a, b = ("\0"):rep(8000), ("\0"):rep(8000)
    while true do for _ = 1, 20000 do end ]] .. ("do local _ = a < b end "):rep(1000) .. " end" },
  { "comparisons in a coroutine from before the strings", [[
    local a, b
    local c = coroutine.wrap(function() while true do coroutine.yield() ]] .. ("do local _ = a < b end "):rep(90) .. [[ end end)
    for _ = 1, 1000 do c() a, b = "a", "b" end
    a, b = ("\0"):rep(1000000), ("\0"):rep(1000000)
    while true do c() end]], bytes = 2 * M },
  { "long strings sorted", [[
    local t = {} for i = 1, 30 do t[i] = ("\0"):rep(100000) .. i end while true do table.sort(t) end]], bytes = M // 4 },
  { "long strings as keys", [[
    local s = ("x"):rep(400000) while true do local t = {} t[s .. 1] = 1 t[s .. 2] = t[s .. 1] end]], bytes = M },
  { "long strings as arguments of math.max", [[
    local t, s = {}, "0x" .. ("f"):rep(900000) for i = 1, 200 do t[i] = s end
    while true do pcall(math.max, table.unpack(t)) pcall(string.char, table.unpack(t)) end]] },
  { "a long pattern", [[local s = ("a"):rep(1000000) while true do s:find(s) end]], bytes = M },
  { "a long set", [=[
    local s, p = ("a"):rep(1000), "[" .. ("b"):rep(1000000) .. "]" while true do s:find(p) end]=], bytes = M },
  { "plain text that is nearly there", [[
    local s = (("a"):rep(50000) .. "b"):rep(19) while true do s:find("bc", 1, true) end]], bytes = M },
  { "long strings as numbers", [[local s = "0x" .. ("f"):rep(900000) while true do for _ = 1, s do break end end]],
    bytes = M },
  { "new strings", "local i = 0 while true do i = i + 1 local _ = 'k' .. i end" },
  { "table.move over 3e8 elements", "local t = {} while true do table.move(t, 1, 3e8, 2) end" },
  { "table.concat of a made-up length", [[
    local t = setmetatable({}, { __len = function() return 2^53 | 0 end, __index = rawlen })
    while true do pcall(table.concat, t) end]] },
  { "table.insert and remove of a made-up length", [[
    local t = setmetatable({}, { __len = function() return 2^53 | 0 end, __index = rawlen, __newindex = rawlen })
    while true do pcall(table.insert, t, 1, 0) pcall(table.remove, t, 1) end]] },
  { "table.unpack", "local t = {} while true do pcall(table.unpack, t, 1, 60000) pcall(table.unpack, t, 1, 1e8) end" },
  { "table.sort", [[
    local t = {} for i = 1, 20000 do t[i] = (i * 7919) % 20011 end
    while true do table.sort(t) table.sort(t, function(a, b) return a > b end) end]] },
  { "table.sort with no order", [[
    local t = {} for i = 1, 1000 do t[i] = i end
    while true do pcall(table.sort, t, function() return true end) end]] },
  { "many arguments", [[
    local t = {} for i = 1, 15000 do t[i] = i end
    local function g(...) return select("#", ...) end
    local function f(...) while true do g(...) end end f(table.unpack(t))]] },
  { "next over what is gone", [[
    local t = {} for i = 1, 30000 do t["a" .. i] = i end for k in pairs(t) do t[k] = nil end
    while true do next(t) end]] },
  { "tables that grow", [[while true do local t = {} for i = 1, 60000 do t[i] = i end end]] },
  -- n keys take up to 3 n * n nanoseconds, as documented: what the spec allows, which is twice this.
  { "keys that collide", "while true do local t = {} for i = 1, 4097 do t[i * 8191] = true end end",
    late_us = 3 * 4096 * 4096 // 2000 },
  { "as many keys that collide as there can be",
    "while true do local t = {} for i = 1, 16385 do t[i * 32767] = true end end",
    late_us = 3 * 16384 * 16384 // 2000 },
  { "load of many names in deep functions", [[
    local names, p = {}, {}
    for i = 1, 150 do names[i] = "a" .. i end
    for d = 1, 150 do p[d] = "local " .. table.concat(names, ",") .. " local function f()" end
    p[#p + 1] = ("x=y "):rep(20000)
    local s = table.concat(p, " ") while true do load(s) end]] },
  { "load of many labels", [[
    local p = {} for i = 1, 15000 do p[i] = "::a" .. i .. ":: goto z " end
    local s = table.concat(p) while true do load(s) end]] },
  { "load of pieces without end", "while true do load(function() return ' ' end) end" },
  { "memory that is used up, for ever", [[
    while true do pcall(function() local t = {} while true do t = { t } end end) end]] },
  { "full collections", [[
    local keep = {} for i = 1, 30000 do keep[i] = { i } end
    while true do pcall(string.rep, "x", 1000000) local _, _, _ = {}, {}, {} end]] },
  { "deep calls", "local function f(n) return 1 + f(n + 1) end while true do pcall(f, 1) end" },
  { "deep calls with tensors to close", [[
    local function f(n) local t <close> = nibble.zeros(1) return 1 + f(n + 1) end while true do pcall(f, 1) end]] },
  { "coroutines with deep stacks", [[
    local t = {}
    local function deep(n) if n == 0 then coroutine.yield() end return 1 + deep(n - 1) end
    while true do for i = 1, 20 do t[i] = coroutine.create(deep) coroutine.resume(t[i], 500) end end]] },
  { "errors in errors", [[
    local function f() error(setmetatable({}, { __tostring = function() return f() end })) end
    while true do pcall(f) pcall(error, nil, math.maxinteger) end]] },
  { "tensor:totable", "local t = nibble.zeros(20000) while true do t:totable() end" },
  { "tables to tensors", "local t = {} for i = 1, 20000 do t[i] = i end while true do nibble.tensor(t) end" },
  { "tensor:amax", "local t = nibble.zeros(16000000) while true do t:amax() end" },
  { "tensor:equal of a transposed one",
    "local t = nibble.zeros(3000, 3000) while true do t:transpose(1, 2):equal(t) end" },
  { "tensors printed", "local t = nibble.zeros(100, 100) while true do print(t) end" },
  { "a full queue", "local t = nibble.zeros(15000000) while true do t:fill(1) end" },
  { "a wait",
    "local t = nibble.zeros(15000000) for i = 1, 200 do t:fill(i) end while true do nibble.synchronize() end" },
  { "waits in pcall", [[
    local t = nibble.zeros(15000000) for i = 1, 200 do t:fill(i) end while true do pcall(t.item, t:view(15000000)[1]) end]] },
  { "device memory that is used up", [[
    local keep = {}
    while true do pcall(function() keep[#keep + 1] = nibble.zeros(1000000) keep[#keep]:fill(1) end) end]] },
  { "views without end",
    "local t, k = nibble.zeros(4, 4), {} while true do pcall(function() k[#k + 1] = t[1] end) end" },
  { "streams without end", "local k = {} while true do pcall(function() k[#k + 1] = nibble.stream() end) end" },
  { "graphs", [[
    local t, s = nibble.zeros(4), nibble.stream()
    while true do
      local g = s:capture(function() for i = 1, 3000 do t:fill(i) end end)
      g:nodes() g:dot()
    end]], nodes = 3000 },
  { "a capture that never ends", [[
    nibble.stream():capture(function() while true do pcall(function() while true do end end) end end)]] },
  { "a scope that never ends", "nibble.stream():scope(function() while true do end end)" },
}
return overruns
