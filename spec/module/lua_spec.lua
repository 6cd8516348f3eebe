-- The module as a guest in Lua: foreign values, finalizers called by hand, closed objects, deep and large tables, the
-- edges of the stack, dying coroutines, another Lua.
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

local CLASSES = { "tensor", "stream", "event", "graph" }

local function metatable(class)
  return debug.getregistry()["nibble." .. class]
end

-- A new object of each class.
local function objects()
  local s = nibble.stream()
  local t = nibble.full(4, 1.0)
  return { tensor = t, stream = s, event = s:record(), graph = s:capture(function() t:fill(2) end) }
end

-- Values of every other kind.
local function foreign(class)
  local list = { nil, true, 0, 1.5, "x", {}, print, coroutine.create(print), io.stdout, io.tmpfile() }
  local count = 10
  for name, object in pairs(objects()) do
    if name ~= class then
      count = count + 1
      list[count] = object
    end
  end
  -- A table that pretends.
  list[count + 1] = setmetatable({}, metatable(class))
  return list, count + 1
end

-- Arguments with which a method does something sensible to an open object.
local function arguments(class, method)
  local o = objects()
  return ({
    tensor = { narrow = { 1, 1, 1 }, select = { 1, 1 }, view = { 2, 2 }, permute = { 1 }, transpose = { 1, 1 },
      expand = { 4 }, as_strided = { { 1 }, { 1 } }, reinterpret = { "int32" }, copy = { o.tensor }, fill = { 1 },
      to = { "int32" }, save = { "/nonexistent/folder/x" }, equal = { o.tensor }, allclose = { o.tensor },
      max_error = { o.tensor } },
    stream = { scope = { function() end }, wait = { o.event }, capture = { function() end } },
    event = { elapsed = { o.event } },
    graph = { update = { function() end } },
  })[class][method] or {}
end

describe("methods #quick", function()
  for _, class in ipairs(CLASSES) do
    it("of a " .. class .. " refuse every other object", function()
      local list, count = foreign(class)
      for name, method in pairs(metatable(class).methods) do
        for i = 1, count do
          local ok, message = pcall(method, list[i], table.unpack(arguments(class, name)))
          assert.is_false(ok, ("%s:%s took a %s"):format(class, name, type(list[i])))
          assert.is_truthy(message:find(class .. ":" .. name, 1, true), message)
        end
        assert.is_false((pcall(method)))
      end
    end)

    it("of a " .. class .. " are all still there for an open one", function()
      for name, method in pairs(metatable(class).methods) do
        if name ~= "close" and name ~= "item" then
          local ok, message = pcall(method, objects()[class], table.unpack(arguments(class, name)))
          assert.is_true(ok, ("%s:%s: %s"):format(class, name, tostring(message)))
        end
      end
    end)

    it("of a closed " .. class .. " all say that it is closed", function()
      for name, method in pairs(metatable(class).methods) do
        local object = objects()[class]
        object:close()
        if name ~= "close" then
          local ok, message = pcall(method, object, table.unpack(arguments(class, name)))
          assert.is_false(ok, ("a closed %s did %s"):format(class, name))
          assert.matches("closed", message)
          assert.is_truthy(message:find(class .. ":" .. name, 1, true), message)
        end
        object:close()
        object:close()
      end
    end)

    it("and names that there are not, of a closed " .. class .. ", say that it is closed", function()
      local object = objects()[class]
      for _, key in ipairs({ "nonsense", 1, 0.5, true, print }) do
        object:close()
        local ok, message = pcall(function() return object[key] end)
        assert.same({ false, class .. ":index: self: expected an open " .. class .. ", got a closed " .. class },
          { ok, (message:gsub("^[^ ]*:%d+: ", "")) })
        ok, message = pcall(function() object[key] = 1 end)
        assert.same({ false, class .. ":newindex: self: expected an open " .. class .. ", got a closed " .. class },
          { ok, (message:gsub("^[^ ]*:%d+: ", "")) })
      end
    end)
  end

  it("of a tensor refuse a closed argument and say so", function()
    local t = nibble.zeros(4)
    local closed = objects()
    for _, object in pairs(closed) do object:close() end
    local s = nibble.stream()
    local event = s:record()
    for name, call in pairs({
      copy = function() t:copy(closed.tensor) end, equal = function() t:equal(closed.tensor) end,
      allclose = function() t:allclose(closed.tensor) end, max_error = function() t:max_error(closed.tensor) end,
      assignment = function() t[1] = closed.tensor end, wait = function() s:wait(closed.event) end,
      elapsed = function() event:elapsed(closed.event) end,
      dequantize_cache = function() nibble.mla.dequantize_cache(closed.tensor, t) end,
      swizzle_v_scales = function() nibble.quantization.swizzle_v_scales(t, "NHD", { out = closed.tensor }) end,
    }) do
      local ok, message = pcall(call)
      assert.is_false(ok, name)
      if name ~= "swizzle_v_scales" then assert.matches("closed", message) end
    end
  end)
end)

describe("a closed tensor #quick", function()
  it("says so in fields, elements, length and print", function()
    local t = nibble.zeros(3)
    t:close()
    for _, use in ipairs({
      function() return t.shape end, function() return t.dtype end, function() return t.device end,
      function() return t[1] end, function() return t[{ 1 }] end, function() t[1] = 1 end, function() return #t end,
    }) do
      local ok, message = pcall(use)
      assert.is_false(ok)
      assert.matches("closed", message)
    end
    local _, text = pcall(tostring, t)
    assert.matches("closed", text)
  end)

  it("equals itself and nothing else", function()
    local t, u = nibble.zeros(3), nibble.zeros(3)
    t:close()
    assert.is_true(t == t)
    assert.is_false(t == u)
    assert.is_false(u == t)
    u:close()
    assert.is_false(t == u)
  end)
end)

describe("metamethods called by hand #quick", function()
  for _, class in ipairs(CLASSES) do
    it("of a " .. class .. " raise a Lua error for whatever is not one", function()
      local list, count = foreign(class)
      for name, method in pairs(metatable(class)) do
        if type(method) == "function" then
          for i = 1, count do
            local ok, message = pcall(method, list[i], list[i % count + 1], list[(i + 1) % count + 1])
            -- Equality has an answer for anything; the rest has not.
            if name ~= "__eq" then assert.is_false(ok, ("%s took a %s"):format(name, type(list[i]))) end
            assert.is_true(ok or type(message) == "string")
          end
          pcall(method)
        end
      end
    end)

    it("of a " .. class .. " may finalize it twice; then it is closed", function()
      local object = objects()[class]
      local mt = debug.getmetatable(object)
      mt.__gc(object)
      mt.__gc(object)
      mt.__close(object, nil)
      mt.__close(object, "an error")
      for name, method in pairs(mt.methods) do
        if name ~= "close" then
          local ok, message = pcall(method, object, table.unpack(arguments(class, name)))
          assert.is_false(ok)
          assert.matches("closed", message)
        end
      end
      object:close()
    end)
  end

  it("say that a metamethod got no value", function()
    local ok, message = pcall(debug.getmetatable(objects().tensor).__gc)
    assert.is_false(ok)
    assert.equal("tensor:gc: self: expected a tensor, got no value", message)
  end)

  it("take the metatable of one object for another of its class only", function()
    local all, others = objects(), objects()
    for class, object in pairs(all) do
      for other, victim in pairs(others) do
        if class ~= other then
          assert.is_false((pcall(debug.getmetatable(object).__gc, victim)))
          assert.is_false((pcall(debug.getmetatable(object).__close, victim)))
        end
      end
    end
    assert.same({ 1, 1, 1, 1 }, others.tensor:totable())
    others.graph:replay()
    others.stream:synchronize()
  end)

  it("leave <close> of several names for one object alone", function()
    local t = nibble.zeros(3)
    do
      local a <close> = t
      local b <close> = t
      assert.is_true(a == b)
    end
    assert.matches("closed", select(2, pcall(t.totable, t)))
    assert.has_error(function()
      local c <close> = nibble.zeros(3)
      c:fill(1)
      error("x")
    end)
  end)
end)

describe("the same object twice #quick", function()
  it("as source and target, as both caches, as both scales, is an error or is right", function()
    local t = nibble.tensor({ 1.0, 2.0 })
    assert.same({ 1, 2 }, t:copy(t):totable())
    assert.is_true(t:equal(t))
    assert.equal(0, (t:max_error(t)))
    local e = nibble.stream():record()
    assert.equal(0, e:elapsed(e))
    local s = nibble.stream()
    s:wait(s:record())
    s:scope(function() s:scope(function() t:fill(3) end) end)
    assert.same({ 3, 3 }, t:totable())
  end)
end)

describe("tables", function()
  it("of a million elements go in and out", function()
    local list = {}
    for i = 1, 1000000 do list[i] = i end
    local t = nibble.tensor(list)
    assert.same({ 1000000 }, t.shape)
    local back = t:totable()
    assert.equal(1000000, #back)
    for i = 1, 1000000, 997 do assert.equal(i, back[i]) end
    assert.equal(1000000, t[1000000])
  end)

  it("of a million rows go in and out", function()
    local list = {}
    for i = 1, 300000 do list[i] = { i, -i, i + 0.5 } end
    local t = nibble.tensor(list)
    assert.same({ 300000, 3 }, t.shape)
    assert.equal("float32", t.dtype)
    assert.same({ 262145, -262145, 262145.5 }, t:totable()[262145])
  end)
end)

describe("tables #quick", function()
  it("nested 64 and 100,000 levels deep are refused in words", function()
    for _, depth in ipairs({ 9, 64, 100000 }) do
      local deep = 1
      for _ = 1, depth do deep = { deep } end
      local ok, message = pcall(nibble.tensor, deep)
      assert.is_false(ok)
      assert.matches("tensor: data: expected .*8", message)
    end
  end)

  it("with metamethods that raise, yield or lie do no harm", function()
    local calls = 0
    local function proxy(on_index, length)
      return setmetatable({}, { __index = on_index, __len = function() return length end })
    end
    local cases = {
      proxy(function(_, i)
        calls = calls + 1
        if i == 3 then error("mine") end
        return i
      end, 5),
      proxy(function() coroutine.yield() end, 2), proxy(function(_, i) return i end, -5),
      proxy(function(_, i) return i end, "many"), proxy(function(_, i) return i end, 2.5), { 1, 2, [4] = 4 },
      proxy(function() return proxy(function() error("deep") end, 2) end, 2),
    }
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    local used = nibble.memory().used
    for _ = 1, 50 do
      for _, case in ipairs(cases) do
        local results = { pcall(nibble.tensor, case) }
        assert.is_true(results[1] and #results[2].shape == 1 or type(results[2]) == "string")
        pcall(nibble.zeros, case)
        pcall(nibble.full, case, 1)
        pcall(nibble.zeros(2, 2).view, nibble.zeros(2, 2), case)
        local thread = coroutine.create(function() nibble.tensor(case) end)
        coroutine.resume(thread)
      end
    end
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    assert.equal(used, nibble.memory().used)
  end)

  it("that shrink while they are read do no harm", function()
    for _, values in ipairs({ 10, 1000 }) do
      local rows = {}
      for i = 1, values do rows[i] = { 1, 2 } end
      rows[2] = setmetatable({}, { __len = function() return 2 end, __index = function(_, i)
        for j = 3, values do rows[j] = nil end
        collectgarbage()
        return i
      end })
      local ok, result = pcall(nibble.tensor, rows)
      assert.is_true(ok or type(result) == "string")
    end
  end)

  it("with options that raise leave no tensor behind", function()
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    local used = nibble.memory().used
    for _ = 1, 100 do
      pcall(nibble.zeros, 1000, setmetatable({}, { __index = function() error("mine") end }))
      pcall(nibble.zeros, 1000, setmetatable({}, { __pairs = function() error("mine") end }))
    end
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    assert.equal(used, nibble.memory().used)
  end)
end)

describe("arguments #quick", function()
  it("of any kind in any number never do more than raise", function()
    local o = objects()
    local function nothing() end
    local junk = { nil, true, -1, 0, 1, 3.5, 0 / 0, 1e300, math.maxinteger, "x", "cpu", "uint8", {}, { 1 }, { -1 },
      { {} }, nothing, coroutine.running(), io.stdout, o.tensor, o.stream, o.event, o.graph, { dtype = "uint8" },
      { nonsense = 1 } }
    local count = 25
    local state = 1
    local function random(n)
      state = (state * 1103515245 + 12345) % 2147483648
      return state // 65536 % n + 1
    end
    local scratch = os.tmpname()
    finally(function() os.remove(scratch) end)
    local function try(name, fn, first)
      for _ = 1, 60 do
        local args, n = {}, random(6) - 1
        for i = 1, n do
          args[i] = junk[random(count)]
          -- Its strings name files that are written.
          if (name == "save" or name == "create") and type(args[i]) == "string" then args[i] = scratch end
        end
        local results
        if first ~= nil then
          results = table.pack(pcall(fn, first, table.unpack(args, 1, n)))
        else
          results = table.pack(pcall(fn, table.unpack(args, 1, n)))
        end
        assert.is_true(results[1] or type(results[2]) == "string", name)
      end
    end
    local function sorted(t) -- the same calls in every run
      local names = {}
      for name in pairs(t) do names[#names + 1] = name end
      table.sort(names)
      return ipairs(names)
    end
    for _, name in sorted(nibble) do
      local fn = nibble[name]
      if type(fn) == "function" then
        try(name, fn)
      elseif type(fn) == "table" then
        for _, inner in sorted(fn) do try(inner, fn[inner]) end
      end
    end
    for _, class in ipairs(CLASSES) do
      local methods = metatable(class).methods
      for _, name in sorted(methods) do
        if name ~= "close" then try(name, methods[name], objects()[class]) end
      end
    end
    nibble.check(false) -- which was tried, too
    for _, name in ipairs { "", "x", "cpu", "uint8" } do nibble.observe(nil, name) end
    pcall(nibble.check_faults)
    assert.equal(3, nibble.full(1, 3):item())
  end)

  it("by the hundred thousand are counted before they are looked at", function()
    local many = {}
    for i = 1, 200000 do many[i] = 1 end
    for _, call in ipairs({
      function() return nibble.zeros(table.unpack(many)) end,
      function() return nibble.zeros(1):view(table.unpack(many)) end,
      function() return nibble.zeros(1):expand(many) end,
      function() return nibble.zeros(1)[many] end,
    }) do
      local ok, message = pcall(call)
      assert.is_false(ok)
      assert.matches("expected .+, got .*", message)
    end
    assert.equal(200000, select("#", nibble.stream():scope(function(...) return ... end, table.unpack(many))))
  end)
end)

describe("calls near the limits of the stack", function()
  -- Recurses until the stack overflows; calls `body` at level `first` and every fourth after it, and counts how often
  -- it raised. (Lua itself is slow to recover there.)
  local function recurse(first, body)
    local depth, raised = 0, 0
    local function deeper()
      depth = depth + 1
      if depth >= first and (depth - first) % 4 == 0 and not pcall(body) then raised = raised + 1 end
      return 1 + deeper()
    end
    local ok, message = pcall(deeper)
    assert.is_false(ok)
    message = tostring(message)
    assert.is_truthy(message:find("overflow", 1, true) or message:find("error in error handling", 1, true), message)
    return depth, raised
  end

  it("raise or succeed, and leave everything whole", function()
    local t = nibble.arange(6):view(1, 1, 1, 1, 1, 1, 2, 3)
    local s = nibble.stream()
    local limit = recurse(math.huge)
    for _, body in ipairs({
      function() t:totable() end, function() return tostring(t) end,
      function() nibble.tensor({ { 1, 2 }, { 3, 4 } }) end, function() t:narrow(7, 1, 1):fill(2) end,
      function() return t.shape, t:stride() end, function() s:scope(function() end) end,
      function() s:capture(function() t:fill(1) end) end,
      function()
        local value <close> = setmetatable({}, { __close = function() nibble.observe(nil) end }) -- luacheck: ignore 211
        nibble.observe(function(o) return #o.kind end)
        t:narrow(7, 1, 1):fill(2)
      end,
    }) do
      local _, raised = recurse(limit - 60, body)
      assert.is_true(raised > 0, "the limit was not reached")
      assert.same({ 1, 1, 1, 1, 1, 1, 2, 3 }, t.shape)
      assert.is_false(nibble.current_stream() == s)
      s:capture(function() t:fill(2) end):replay()
      assert.equal(2, t:amax())
    end
  end)

  it("let Lua skip finalizers there, which does no harm", function()
    -- Near its end the stack has room for collectgarbage, but not for a finalizer: Lua frees such an object without it.
    local result = process.script([[
      local nibble = require("nibble")
      local s, t = nibble.stream(), nibble.zeros(10)
      local kept = {}
      local depth, first = 0, math.huge
      local function deeper()
        depth = depth + 1
        if depth > first and depth < first + 16 then
          for _ = 1, 8 do kept[#kept] = nil end
          pcall(collectgarbage)
        end
        return 1 + deeper()
      end
      pcall(deeper)
      for i = 1, 60 do
        kept[#kept + 1] = s:capture(function() t:fill(i) end)
        kept[#kept + 1] = s:record()
        kept[#kept + 1] = t:view(5, 2)
        kept[#kept + 1] = nibble.zeros(100)
      end
      first, depth = depth - 32, 0
      warn("@on")
      pcall(deeper)
      warn("@off")
      kept = nil
      for _ = 1, 3 do collectgarbage() end
      for i = 1, 1000 do nibble.zeros(i) end
      assert(t:fill(3)[10] == 3)
    ]], { before = "MALLOC_PERTURB_=165" }) -- freed memory is overwritten
    assert.equal(0, result.status, result.stderr)
    local skipped = 0
    for line in result.stderr:gmatch("[^\n]+") do
      assert.matches("^Lua warning: error in __gc", line)
      skipped = skipped + 1
    end
    assert.is_true(skipped > 0, "no finalizer was skipped")
  end)

  it("nest scopes until C's own limit, and come back", function()
    local s = nibble.stream()
    local default = nibble.current_stream()
    local deepest = 0
    local function nest(depth)
      deepest = depth
      s:scope(nest, depth + 1)
    end
    local ok, message = pcall(nest, 1)
    assert.is_false(ok)
    assert.matches("overflow", tostring(message))
    assert.is_true(deepest > 50)
    assert.is_true(nibble.current_stream() == default)
  end)
end)

describe("a coroutine that dies", function()
  it("may have loaded the module", function()
    local result = process.script([[
      do
        local thread = coroutine.create(function()
          local nibble = require("nibble")
          local t <close> = nibble.randn(1000)
          KEPT = nibble.zeros(3)
          coroutine.yield()
        end)
        coroutine.resume(thread)
      end
      for _ = 1, 3 do collectgarbage() end
      KEPT:fill(2)
      assert(KEPT[3] == 2)
      local nibble = require("nibble")
      for i = 1, 100 do assert(nibble.full(10, i)[10] == i) end
    ]])
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  end)

  it("may have made streams, a capture and an error", function()
    for _ = 1, 50 do
      local thread = coroutine.create(function()
        local s = nibble.stream()
        local t = nibble.zeros(10)
        local graph = s:capture(function() t:fill(1) end)
        s:capture(function()
          graph = nil
          collectgarbage()
          error("dies here")
        end)
        return graph
      end)
      local ok, message = coroutine.resume(thread)
      assert.is_false(ok)
      assert.matches("dies here", message)
      thread = nil -- luacheck: ignore
      collectgarbage()
    end
    local s = nibble.stream()
    local t = nibble.zeros(2)
    s:capture(function() t:fill(1) end):replay()
    assert.equal(1, t[1])
  end)

  it("closes its tensors when it is closed", function()
    local t = nibble.zeros(4)
    local thread = coroutine.create(function()
      local scoped <close> = t
      coroutine.yield(scoped)
    end)
    coroutine.resume(thread)
    assert.is_true(coroutine.close(thread))
    assert.matches("closed", select(2, pcall(t.totable, t)))
  end)

  it("may leave a tensor in flight", function()
    for _ = 1, 20 do
      local result
      coroutine.wrap(function()
        local s = nibble.stream()
        s:scope(function() result = nibble.randn(50000, { seed = 1 }):to("bfloat16") end)
      end)()
      collectgarbage()
      assert.is_true(result:equal(nibble.randn(50000, { seed = 1 }):to("bfloat16")))
    end
  end)
end)

describe("the module file", function()
  local path = package.searchpath("nibble", package.cpath)

  it("is not linked with a Lua of its own", function()
    if not path then return pending("no nibble.so on package.cpath: the module is built into the interpreter") end
    if not process.has("readelf") then return pending("no readelf here (binutils)") end
    local result = process.run("readelf -d " .. process.quote(path))
    assert.equal(0, result.status)
    assert.matches("NEEDED.*libc%.so", result.stdout)
    assert.is_nil(result.stdout:match("NEEDED[^\n]*lua"))
    assert.is_nil(result.stdout:match("NEEDED[^\n]*cuda"))
    assert.is_nil(result.stdout:match("NEEDED[^\n]*libgomp"))
    -- Its Lua functions are asked for, not brought along.
    local symbols = process.run("readelf -sW --dyn-syms " .. process.quote(path)).stdout
    assert.matches("UND lua_", symbols)
    assert.is_nil(symbols:match("FUNC%s+GLOBAL%s+DEFAULT%s+%d+ lua_"))
  end)

  it("gives another Lua an error in words", function()
    if not path then return pending("no nibble.so on package.cpath: the module is built into the interpreter") end
    local tried = 0
    for _, interpreter in ipairs({ "lua5.1", "lua5.2", "lua5.3", "luajit" }) do
      if process.has(interpreter) then
        tried = tried + 1
        local file = os.tmpname()
        local script = assert(io.open(file, "w"))
        script:write(("package.cpath = %q\n"):format(path:gsub("nibble%.so$", "?.so")),
          "local ok, message = pcall(require, 'nibble')\nprint(ok)\nprint(message)\n")
        script:close()
        local result = process.run("LUA_INIT= " .. interpreter .. " " .. file)
        os.remove(file)
        assert.equal(0, result.status, interpreter .. ": " .. result.stderr)
        assert.equal("", result.stderr)
        assert.matches("^false\n.*nibble.*", result.stdout)
      end
    end
    if tried == 0 then pending("no other Lua is installed (lua5.1, lua5.2, lua5.3, luajit)") end
  end)
end)
