-- Every function, method and metamethod of the module with what it needs failing at the n-th time, for every n: an
-- error or a detour, nothing is lost or left behind, and the next call works. Run by every_function.c, which makes
-- Lua's and the runtime's memory fail, or in the command on the stand-in driver (the second argument is its result).
local path, result = ...
local nibble = require("nibble")
local operations = require("nibble.operations")
local support = require("spec.support.operations")

-- Of every_function.c: arm(n, alone), disarm() -> how many failed, live() -> the runtime's blocks, skipped() ->
-- finalizers.
local faults = rawget(_G, "faults")
if not faults then
  local standin, before = require("standin"), 0
  faults = {
    arm = function(n)
      before = standin.fired()
      standin.fail("*", n, math.tointeger(result))
    end,
    disarm = function()
      standin.fail()
      return standin.fired() - before
    end,
    skipped = function() return 0 end,
    live = function()
      local counts = {}
      for _, kind in ipairs({ "contexts", "modules", "pools", "graphs", "execs", "captures", "allocations", "host",
        "pushed",
        "modes" }) do
        counts[#counts + 1] = standin.live(kind) .. " " .. kind
      end
      assert(standin.misuses() == 0, standin.misuse())
      return table.concat(counts, ", ")
    end,
  }
end

------------------------------------------------------------------------------------------------------------- the world

local byte, index = { dtype = "uint8" }, { dtype = "int32" }
do -- streams are kept for reuse: more than anything here needs at once
  local streams = {}
  for i = 1, 32 do
    streams[i] = nibble.stream({ priority = i % 2 - 1 })
    streams[i]:record()
  end
  nibble.synchronize()
  for i = 1, 32 do streams[i]:close() end
end
local s, other = nibble.stream(), nibble.stream()
local t, columns = nibble.zeros(4, 6), nibble.zeros(4, 6):transpose(1, 2)
local one, slots = nibble.full(1, 1.0), nibble.arange(3, index)
local event = s:record()
nibble.synchronize()
local later = s:record()
later:synchronize()
local graph = s:capture(function() t:fill(1) end)
local image = string.pack("<I4I2I2I8", 0xBA55ED50, 1, 16, 0) -- an empty fatbin: the stand-in takes it for a module
local taken, module = pcall(nibble.module, image) -- nil on the CPU; a real driver refuses it
module = taken and module or nil
local kernel = module and module:kernel("nib_cuda_fill_8")
local slot = nibble.zeros(1, 4, 384, byte)[1]:narrow(1, 1, 1) -- something to index
t:save(path)
nibble.save(path .. ".safetensors", { x = t })

local function refused(pattern, fn, ...)
  local ok, message = pcall(fn, ...)
  if not ok and not tostring(message):find(pattern) then error(message, 0) end
  assert(not ok)
end

local calls = {
  devices = function() assert(#nibble.devices() >= 1) end,
  device = function() assert(nibble.device()) end,
  available = function() assert(nibble.available("cpu") and not nibble.available("cuda:77")) end,
  memory = function() assert(nibble.memory().used > 0) end,
  synchronize = function() nibble.synchronize() end,
  check_faults = function() nibble.check_faults() end,
  range = function() assert(nibble.range("a", function(x) return x end, 5) == 5) end,
  tensor = function() assert(nibble.tensor({ { 1, 2 }, { 3, 4 } })[2][1] == 3) end,
  empty = function() nibble.empty(2, 3) end,
  zeros = function() assert(nibble.zeros(2, 3)[1][1] == 0) end,
  full = function() assert(nibble.full({ 2, 3 }, 2)[2][3] == 2) end,
  arange = function() assert(nibble.arange(1, 9, 2)[4] == 7) end,
  randn = function() nibble.randn(7, { seed = 1 }) end,
  randint = function() nibble.randint(1, 3, { 5 }, { seed = 1 }) end,
  randperm = function() nibble.randperm(5, { seed = 1 }) end,
  from_bytes = function() assert(nibble.from_bytes("abcd", { 4 }, byte)[3] == 99) end,
  load = function() assert(nibble.load(path)) end,
  rope_table = function() nibble.rope_table(4) end,
  stream = function() nibble.stream({ priority = -1 }):close() end,
  current_stream = function() assert(nibble.current_stream()) end,
  observe = function()
    local count = 0
    nibble.observe(function() count = count + 1 end, "every")
    local ok, message = pcall(function()
      t:fill(1)
      s:capture(function() t:fill(2) end)
      graph:update(function() t:fill(2) end)
    end)
    nibble.observe(nil, "every")
    if not ok then error(message, 0) end
    assert(count > 0)
  end,
  peek = function()
    assert(#nibble.peek({ storage = t:storage(), offset = 0, dtype = "float32", shape = { 2 }, stride = { 1 } }) > 0)
  end,
  save = function() assert(nibble.save(path .. ".safetensors", { x = t })) end,
  create = function()
    local file <close> = assert(nibble.create(path .. ".text"))
    assert(assert(file:write("a", "b")):close())
    assert(os.remove(path .. ".text"))
  end,
  list = function()
    local entries, message = nibble.list(path .. ".safetensors")
    assert(#assert(entries, message) == 1)
  end,
  explain = function() refused("expected", nibble.explain, t, { slot = -1, dim = 0 }) end,
  check = function() nibble.check(false) end,
  check_reports = function() assert(#nibble.check_reports() == 0) end,
  compile = function() -- the compiler takes long, and its own memory: refused before it starts, where there is one
    refused("opts", nibble.compile, "", { nam = 1 })
  end,
  module = function() assert(module == nil or nibble.module(image)) end,

  ["tensor:stride"] = function() assert(t:stride(1) == 6) end,
  ["tensor:dim"] = function() assert(t:dim() == 2) end,
  ["tensor:numel"] = function() assert(t:numel() == 24) end,
  ["tensor:is_contiguous"] = function() assert(t:is_contiguous()) end,
  ["tensor:narrow"] = function() assert(t:narrow(1, 2, 2):numel() == 12) end,
  ["tensor:select"] = function() assert(t:select(1, 2):numel() == 6) end,
  ["tensor:view"] = function() assert(t:view(2, -1):numel() == 24) end,
  ["tensor:permute"] = function() assert(t:permute(2, 1):dim() == 2) end,
  ["tensor:transpose"] = function() assert(t:transpose(1, 2):dim() == 2) end,
  ["tensor:expand"] = function() assert(one:expand(5):numel() == 5) end,
  ["tensor:as_strided"] = function() assert(t:as_strided({ 3 }, { 7 }, 1):numel() == 3) end,
  ["tensor:reinterpret"] = function() assert(t:reinterpret("uint8"):numel() == 96) end,
  ["tensor:contiguous"] = function() assert(columns:contiguous():is_contiguous()) end,
  ["tensor:clone"] = function() assert(columns:clone():numel() == 24) end,
  ["tensor:copy"] = function() t:copy(columns:transpose(1, 2)) end,
  ["tensor:fill"] = function() t:fill(3) end,
  ["tensor:to"] = function() assert(t:to("bfloat16"):to("cpu"):numel() == 24) end,
  ["tensor:totable"] = function() assert(#columns:totable() == 6) end,
  ["tensor:item"] = function() assert(one:item() == 1) end,
  ["tensor:bytes"] = function() assert(#columns:bytes() == 96) end,
  ["tensor:save"] = function() assert(t:save(path)) end,
  ["tensor:equal"] = function() assert(columns:equal(columns)) end,
  ["tensor:allclose"] = function() assert(columns:allclose(columns)) end,
  ["tensor:max_error"] = function() assert(columns:max_error(columns) == 0) end,
  ["tensor:amax"] = function() assert(columns:amax() >= 0) end,
  ["tensor:close"] = function() nibble.empty(3):close() end,
  ["tensor:__close"] = function() local c <close> = nibble.empty(3) assert(c) end,
  ["tensor:__gc"] = function() nibble.empty(3) collectgarbage() end,
  ["tensor:__eq"] = function() assert(t == t:view(4, 6)) end,
  ["tensor:__len"] = function() assert(#t == 4) end,
  ["tensor:__index"] = function() assert(columns[2][3] == columns[{ 2, 3 }] and columns.shape[1] == 6) end,
  ["tensor:__newindex"] = function() columns[{ 2, 3 }] = 4 end,
  ["tensor:__tostring"] = function() assert(#tostring(columns) > 50 and #tostring(slot) > 50) end,

  ["tensor:storage"] = function() assert(t:storage() > 0) end,

  ["stream:scope"] = function() s:scope(function() t:fill(1) end) end,
  ["stream:synchronize"] = function() s:synchronize() end,
  ["stream:record"] = function() s:record() end,
  ["stream:wait"] = function() other:wait(event) end,
  ["stream:capture"] = function()
    assert(#s:capture(function()
      t:fill(2)
      other:wait(s:record())
      other:scope(function() slots:clone() end)
      s:wait(other:record())
    end):nodes() == 2)
  end,
  ["stream:close"] = function() nibble.stream():close() end,
  ["stream:__close"] = function() local c <close> = nibble.stream() assert(c) end,
  ["stream:__gc"] = function() nibble.stream() collectgarbage() end,
  ["stream:__eq"] = function() assert(s ~= other and s == s) end,
  ["stream:__index"] = function() assert(s.device) refused("method or field", function() return s.nothing end) end,
  ["stream:__newindex"] = function() refused("assignment", function() s.device = 1 end) end,
  ["stream:__tostring"] = function() assert(#tostring(s) > 5) end,

  ["event:query"] = function() assert(event:query()) end,
  ["event:synchronize"] = function() event:synchronize() end,
  ["event:elapsed"] = function() assert(event:elapsed(later) >= 0) end,
  ["event:close"] = function() s:record():close() end,
  ["event:__close"] = function() local c <close> = s:record() assert(c) end,
  ["event:__gc"] = function() s:record() collectgarbage() end,
  ["event:__eq"] = function() assert(event ~= later) end,
  ["event:__index"] = function()
    assert(event.device) refused("method or field", function() return event.nothing end)
  end,
  ["event:__newindex"] = function() refused("assignment", function() event.x = 1 end) end,
  ["event:__tostring"] = function() assert(#tostring(event) > 5) end,

  ["graph:replay"] = function() graph:replay() end,
  ["graph:update"] = function() graph:update(function() t:fill(2) end) end,
  ["graph:nodes"] = function() assert(graph:nodes()[1].name == "fill") end,
  ["graph:dot"] = function() assert(#graph:dot() > 20) end,
  ["graph:close"] = function() s:capture(function() end):close() end,
  ["graph:__close"] = function() local c <close> = s:capture(function() end) assert(c) end,
  ["graph:__gc"] = function() s:capture(function() t:fill(1) end) collectgarbage() end,
  ["graph:__eq"] = function() assert(graph == graph) end,
  ["graph:__index"] = function()
    assert(graph.device) refused("method or field", function() return graph.nothing end)
  end,
  ["graph:__newindex"] = function() refused("assignment", function() graph.x = 1 end) end,
  ["graph:__tostring"] = function() assert(#tostring(graph) > 5) end,
}

for _, op in ipairs(operations) do
  local given = support.arguments(op)
  calls[op.name] = function() op:call(given) end
end

-- Where there are no kernels of one's own, there is nothing to call these on.
for _, metamethod in ipairs({ "__close", "__gc", "__eq", "__index", "__newindex", "__tostring", "close" }) do
  for class, object in pairs({ module = module or false, kernel = kernel or false }) do
    calls[class .. ":" .. metamethod] = function()
      if not object then return end
      if metamethod == "__eq" then return assert(object == object) end
      if metamethod == "__index" then return assert(object.device) end
      if metamethod == "__newindex" then return refused("assignment", function() object.x = 1 end) end
      if metamethod == "__tostring" then return assert(#tostring(object) > 5) end
      local new = class == "module" and nibble.module(image) or module:kernel("nib_cuda_fill_8")
      if metamethod == "close" then return new:close() end
      if metamethod == "__close" then
        local c <close> = new
        return assert(c)
      end
      new = nil -- luacheck: ignore 311
      collectgarbage()
    end
  end
end
calls["module:kernel"] = function() if module then assert(module:kernel("nib_cuda_fill_8")) end end
calls["kernel:attributes"] = function() if kernel then assert(kernel:attributes().max_threads > 0) end end
-- refused by its last check: the stand-in runs no kernel of Lua's numbers and tensors
calls["kernel:launch"] = function()
  if kernel then refused("grid", kernel.launch, kernel, 0, { 1, 1 }, { t, 5, { "uint8", 3 } }) end
end

------------------------------------------------------------------------------------------------------------- the sweep

-- The list is complete.
local public = {}
for name, value in pairs(nibble) do
  if type(value) == "function" then public[name] = true end
  for inner in pairs(type(value) == "table" and value or {}) do public[name .. "." .. inner] = true end
end
for class, metatable in pairs(debug.getregistry()) do
  class = type(metatable) == "table" and type(class) == "string" and class:match("^nibble%.(%l+)$")
  if class then
    for name in pairs(metatable.methods) do public[class .. ":" .. name] = true end
    for name, value in pairs(metatable) do
      if type(value) == "function" then public[class .. ":" .. name] = true end
    end
  end
end
for name in pairs(public) do assert(calls[name], name .. " is not in the list") end
for name in pairs(calls) do assert(public[name], name .. " is no function of the module") end

local function settle()
  collectgarbage()
  collectgarbage()
  pcall(nibble.synchronize) -- tells what failed before
  nibble.synchronize()
  nibble.memory()
  return faults.live()
end

local function is_more(now, base)
  return type(base) == "number" and now > base or type(base) == "string" and now ~= base
end

local count, failures, errors = 0, 0, 0
for name, call in pairs(calls) do
  for alone = result and 1 or 0, 1 do
    for _ = 1, 3 do call() end
    settle()
    local base, n, failed = settle(), 0
    local used = nibble.memory().used
    repeat
      n, count = n + 1, count + 1
      local skipped = faults.skipped()
      faults.arm(n, alone == 1)
      local ok, message = pcall(call)
      failed = faults.disarm()
      local where = ("%s, step %d%s: %s"):format(name, n, alone == 1 and " alone" or "", message)
      if not ok then
        errors = errors + 1
        assert(failed > 0, where)
        assert(type(message) == "string" and (result and #message > 20 or message:find("memory", 1, true)), where)
      end
      if failed > 0 then
        failures = failures + 1
        assert(not ok or result or alone == 1 or faults.skipped() > skipped, where ..
          " although memory failed from there on")
      end
      if faults.skipped() > skipped then -- the state gives back what they would have, when it is closed
        base = settle()
        used = nibble.memory().used
      end
      for round = 1, 2 do
        local now = settle()
        assert(not is_more(now, base), ("%s\n%s, was %s"):format(where, now, base))
        assert(nibble.memory().used == used, where)
        if round == 1 then assert(pcall(call)) end
      end
    until failed == 0
  end
end
assert(failures > 200 and errors > 20)
return ("%d calls, %d with a failure, %d errors"):format(count, failures, errors)
