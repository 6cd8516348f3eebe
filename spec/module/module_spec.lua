-- The module as a whole: loading, devices, and that bindings/lua/nibble/meta.lua describes exactly what there is.
local process = require("spec.support.runtime_process")
local misuse = require("spec.support.runtime_misuse")
local nibble = require("nibble")

local function methods_of(class)
  local metatable = debug.getregistry()["nibble." .. class]
  return metatable, metatable and metatable.methods
end

describe("the module #quick", function()
  it("is the table that require returns, with a version of three numbers", function()
    assert.is_table(nibble)
    assert.matches("^%d+%.%d+%.%d+$", nibble.version)
  end)

  it("puts nothing into _G, also when things are used", function()
    local result = process.script([[
      local before = {}
      for key, value in pairs(_G) do before[key] = value end
      local nibble = require("nibble")
      local s = nibble.stream()
      s:scope(function() print(nibble.zeros(2, 3):fill(1):bytes() ~= "") end)
      for key, value in pairs(_G) do assert(before[key] == value, key) end
      for key, value in pairs(before) do assert(_G[key] == value, key) end
      assert(string.nibble == nil and package.loaded.nibble == nibble)
    ]])
    assert.same({ status = 0, stdout = "true\n", stderr = "" }, result)
  end)

  it("keeps C's locale as it is", function()
    local result = process.script([[
      os.setlocale("C")
      require("nibble").tensor({ 1.5 }):totable()
      assert(os.setlocale() == "C")
    ]])
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  end)

  it("can be required 100 times with package.loaded cleared, and nothing grows", function()
    local saved = package.loaded.nibble
    local old = nibble.tensor({ 1, 2, 3 })
    local old_stream = nibble.stream()
    collectgarbage() -- what earlier specs left behind
    collectgarbage()
    local used = nibble.memory().used
    local again
    local function round()
      package.loaded.nibble = nil
      again = require("nibble")
    end
    for _ = 1, 10 do round() end
    collectgarbage()
    collectgarbage()
    local before = collectgarbage("count")
    for _ = 1, 90 do round() end
    collectgarbage()
    collectgarbage()
    local grown = collectgarbage("count") - before
    package.loaded.nibble = saved
    assert.is_true(grown < 4, ("%d KiB more in Lua's heap"):format(grown))
    assert.equal(used, nibble.memory().used)
    -- Old objects work with the new functions, and the other way round.
    local new = again.zeros(3, { dtype = "int64" })
    assert.same({ 1, 2, 3 }, new:copy(old):totable())
    assert.is_true(old:equal(new))
    old_stream:scope(function()
      assert.is_true(again.current_stream() == old_stream)
      assert.is_true(nibble.current_stream() == old_stream)
    end)
    old_stream:close()
  end)

  it("names its metatables nibble.tensor, nibble.stream, nibble.event and nibble.graph", function()
    for _, class in ipairs({ "tensor", "stream", "event", "graph" }) do
      local metatable, methods = methods_of(class)
      assert.is_table(metatable, class)
      assert.is_table(methods, class)
      assert.equal("nibble." .. class, metatable.__name)
      for _, name in ipairs({ "__gc", "__close", "__tostring", "__eq" }) do
        assert.is_function(metatable[name], class .. name)
      end
    end
    assert.is_function(methods_of("tensor").__len)
  end)
end)

describe("devices #quick", function()
  it("are listed with cpu first, available, with its processors and memory", function()
    local devices = nibble.devices()
    local cpu = devices[1]
    assert.equal("cpu", cpu.name)
    assert.is_true(cpu.available)
    assert.is_nil(cpu.reason)
    assert.is_true(#cpu.description > 0)
    assert.equal("integer", math.type(cpu.processors))
    assert.is_true(cpu.processors >= 1)
    assert.equal("integer", math.type(cpu.memory))
    assert.is_true(cpu.memory > 2 ^ 20)
    for index, info in ipairs(devices) do
      if index > 1 then assert.matches("^cuda:%d+$", info.name) end
      assert.is_boolean(info.available)
      if not info.available then assert.is_true(#info.reason > 10, info.name .. " says no reason") end
    end
  end)

  it("are a fresh list at each call", function()
    nibble.devices()[1].name = "changed"
    assert.equal("cpu", nibble.devices()[1].name)
  end)

  it("agree between devices(), available() and device()", function()
    for _, info in ipairs(nibble.devices()) do
      local available, reason = nibble.available(info.name)
      assert.equal(info.available, available)
      assert.equal(info.reason, reason)
      local name, why = nibble.device(info.name)
      assert.equal(info.available and info.name or nil, name)
      assert.equal(info.reason, why)
    end
  end)

  it("that do not exist are unavailable, with a reason that names them", function()
    for _, name in ipairs({ "cuda:99", "cpu:7", "tpu", "", "cuda:-1", "cuda:x", "CPU" }) do
      local available, reason = nibble.available(name)
      assert.is_false(available)
      assert.is_string(reason)
      assert.is_truthy(reason:find(name, 1, true), reason)
      local device, why = nibble.device(name)
      assert.is_nil(device)
      assert.equal(reason, why)
    end
  end)

  it("are named by strings only", function()
    misuse.raises(function() nibble.available() end, "available", "name", "string", { "no value", "nil" })
    misuse.raises(function() nibble.available({}) end, "available", "name", "string", "table")
    misuse.raises(function() nibble.device(3) end, "device", "name", "string", { "number", "3" })
  end)

  it("have a default that tensors and streams take", function()
    local device = nibble.device()
    assert.is_string(device)
    assert.equal(device, nibble.zeros(1).device)
    assert.equal(device, nibble.stream().device)
    assert.equal(device, nibble.current_stream().device)
    assert.equal("cpu", nibble.zeros(1, { device = "cpu" }).device)
  end)

  it("that are missing make creation an error with the reason in it", function()
    local _, reason = nibble.available("cuda:99")
    for name, create in pairs({
      zeros = function(opts) return nibble.zeros(2, opts) end,
      tensor = function(opts) return nibble.tensor({ 1 }, opts) end,
      stream = function(opts) return nibble.stream(opts) end,
    }) do
      local message = misuse.raises(function() create({ device = "cuda:99" }) end, name, { "device", "opts.device" })
      assert.is_truthy(message:find("cuda:99", 1, true), message)
      assert.is_string(reason)
    end
  end)
end)

describe("NIBBLE_DEVICE #quick", function()
  local function with(value, code)
    return process.script('local nibble = require("nibble")\n' .. code,
      { before = "NIBBLE_DEVICE=" .. process.quote(value) })
  end

  it("chooses the default device", function()
    local result = with("cpu", "print(nibble.device(), nibble.zeros(1).device, nibble.stream().device)")
    assert.same({ status = 0, stdout = "cpu\tcpu\tcpu\n", stderr = "" }, result)
  end)

  it("with a device that is not there makes the default unavailable, in words, and an explicit device wins", function()
    local result = with("cuda:99", [[
      local device, reason = nibble.device()
      assert(device == nil and reason:find("cuda:99", 1, true), reason)
      local ok, message = pcall(nibble.zeros, 1)
      assert(not ok and message:find("cuda:99", 1, true), message)
      assert(nibble.zeros(1, { device = "cpu" }).device == "cpu")
      assert(nibble.device("cpu") == "cpu")
      assert(nibble.tensor({ 1, 2 }, { device = "cpu" }):clone().device == "cpu")
    ]])
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  end)

  it("that is empty is as if it were not set", function()
    local result = process.script('print(require("nibble").device())', { before = "NIBBLE_DEVICE=" })
    local unset = process.script('print(require("nibble").device())', { before = "unset NIBBLE_DEVICE;" })
    assert.same(unset, result)
    assert.equal(0, unset.status)
  end)
end)

describe("require without a usable GPU #quick", function()
  it("works whatever CUDA_VISIBLE_DEVICES says, and cpu stays available", function()
    for _, value in ipairs({ "", "-1", "GPU-00000000-0000-0000-0000-000000000000", "nonsense" }) do
      local result = process.script([[
        local nibble = require("nibble")
        local available, reason = nibble.available("cuda:0")
        assert(not available and type(reason) == "string" and #reason > 10)
        assert(nibble.device("cpu") == "cpu" and nibble.devices()[1].available)
      ]], { before = "unset NIBBLE_DEVICE; CUDA_VISIBLE_DEVICES=" .. process.quote(value) })
      assert.same({ status = 0, stdout = "", stderr = "" }, result, value)
    end
  end)
end)

describe("the type annotations in bindings/lua/nibble/meta.lua #quick", function()
  local text = process.read(process.root .. "bindings/lua/nibble/meta.lua")

  -- Names that the file declares: functions of the module ("zeros", "page.x"), methods and fields by class.
  local functions, methods, fields = {}, {}, {}
  for owner, separator, name in text:gmatch("\nfunction ([%w_.]+)([.:])([%w_]+)%(") do
    if separator == ":" then
      methods[owner] = methods[owner] or {}
      methods[owner][name] = true
    else
      local prefix = owner == "nibble" and "" or owner:match("^nibble%.(.*)$") .. "."
      functions[prefix .. name] = true
    end
  end
  local class
  for line in text:gmatch("[^\n]+") do
    class = line:match("^%-%-%-@class nibble%.([%w_]+)") or line:match("^%-%-%-@class (nibble)%s*$") or class
    local field = line:match("^%-%-%-@field ([%w_]+)")
    if field then
      fields[class] = fields[class] or {}
      fields[class][field] = true
    end
  end

  local function keys(set)
    local list = {}
    for key in pairs(set or {}) do list[#list + 1] = key end
    table.sort(list)
    return list
  end

  it("are marked as such and were understood", function()
    assert.matches("^%-%-%-@meta", text)
    assert.is_true(#keys(functions) > 25)
    assert.is_true(#keys(methods.tensor) > 25)
    assert.same({ "device", "dtype", "pinned", "shape" }, keys(fields.tensor))
  end)

  it("name every function of the module, and no other", function()
    local found = {}
    for key, value in pairs(nibble) do
      if type(value) == "function" then
        found[key] = true
      elseif type(value) == "table" then
        for name, inner in pairs(value) do
          assert.is_function(inner, key .. "." .. name)
          found[key .. "." .. name] = true
        end
      else
        assert.equal("version", key)
      end
    end
    assert.same(keys(functions), keys(found))
    assert.same({ "version" }, keys(fields.nibble))
  end)

  it("name every method of every class, and no other", function()
    for _, name in ipairs({ "tensor", "stream", "event", "graph" }) do
      local _, found = methods_of(name)
      for key, value in pairs(found) do assert.is_function(value, name .. ":" .. tostring(key)) end
      assert.same(keys(methods[name]), keys(found), name)
    end
  end)

  it("name fields that the objects have", function()
    local t = nibble.zeros(2)
    local stream = nibble.stream()
    local graph = stream:capture(function() t:fill(1) end)
    local objects = { tensor = t, stream = stream, event = stream:record(), graph = graph,
      memory_info = nibble.memory(),
      device_info = nibble.devices()[1], graph_node = graph:nodes()[1] }
    local optional = { ["device_info.reason"] = true, ["stream.handle"] = stream.device == "cpu" }
    for name, object in pairs(objects) do
      for field in pairs(fields[name]) do
        assert.is_true(optional[name .. "." .. field] or object[field] ~= nil, name .. "." .. field)
      end
      if type(object) == "table" then
        for field in pairs(object) do assert.is_true(fields[name][field], name .. "." .. tostring(field)) end
      end
    end
  end)

  it("say for every public function what it is for or what it returns", function()
    local bare = {}
    local comment = false
    for line in text:gmatch("[^\n]*") do
      local name = line:match("^function ([%w_.:]+)%(")
      if name and not comment and not name:match(":close$") then bare[#bare + 1] = name end
      comment = line:match("^%-%-%-") ~= nil
    end
    assert.same({}, bare)
  end)
end)
