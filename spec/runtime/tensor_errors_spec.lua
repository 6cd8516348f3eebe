-- Every misuse of tensors raises an error that names the operation, the parameter, what was expected and what it got,
-- before anything is written.
local nibble = require("nibble")
local misuse = require("spec.support.runtime_misuse")
local raises = misuse.raises

local NOTHING = { "no value", "nil" }
local nan = 0 / 0

-- What is wrong as a size, an index or another integer, and the text that an error shows for it.
local NO_INTEGERS = {
  { 3.5, "3.5" }, { nan, "nan" }, { math.huge, "inf" }, { 1e300, "1e+300" }, { "3", { '"3"', "string" } },
  { true, { "true", "boolean" } }, { print, "function" }, { io.stdout, { "userdata", "FILE*" } },
}

-- They are read raw: one that has its values from elsewhere would be empty without a word.
describe("tables with __index or __len #quick", function()
  local t = nibble.zeros(2, 3)
  local kv = nibble.zeros(1, 1, 1, 8, { dtype = "uint8" })
  local sf = nibble.zeros(1, 1, 1, 1, { dtype = "uint8" })
  local x, slots = nibble.zeros(1, 1, 16, { dtype = "bfloat16" }), nibble.tensor { 0 }
  local OPERATION = "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
  local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
  local cases = {
    data = { "tensor", "data", { 1, 2 }, function(p) nibble.tensor(p) end },
    ["a row of data"] = { "tensor", "data[2]", { 3 }, function(p) nibble.tensor({ { 1 }, p }) end },
    ["the first row of data"] = { "tensor", "data[1]", { 3 }, function(p) nibble.tensor({ p, { 1 } }) end },
    options = { "tensor", "opts", { dtype = "int32" }, function(p) nibble.tensor({ 1 }, p) end },
    ["options behind a shape"] = { "zeros", "opts", { dtype = "int32" }, function(p) nibble.zeros(2, p) end },
    shape = { "zeros", "shape", { 2, 3 }, function(p) nibble.zeros(p) end },
    ["shape of full"] = { "full", "shape", { 2, 3 }, function(p) nibble.full(p, 1) end },
    view = { "tensor:view", "shape", { 6 }, function(p) t:view(p) end },
    as_strided = { "tensor:as_strided", "stride", { 3, 1 }, function(p) t:as_strided({ 2, 3 }, p) end },
    index = { "tensor:index", "index", { 1, 2 }, function(p) return t[p] end },
    newindex = { "tensor:newindex", "index", { 1, 2 }, function(p) t[p] = 1 end },
    cache = { OPERATION, "paged_kv_cache", { kv, kv },
      function(p) append(x, x, slots, p, { sf, sf }, 1, 1) end },
    scales = { OPERATION, "kv_cache_sf", { k = sf, v = sf },
      function(p) append(x, x, slots, { kv, kv }, p, 1, 1) end },
    keywords = { OPERATION, "opts", { kv_layout = "NHD" },
      function(p) append(x, x, slots, { kv, kv }, { sf, sf }, 1, 1, p) end },
    save = { "save", "tensors", { t = t }, function(p) nibble.save("/nonexistent/folder/x.safetensors", p) end },
    stream = { "stream", "opts", { priority = -1 }, function(p) nibble.stream(p) end },
    peek = { "peek", "access", { storage = t:storage(), offset = 0, dtype = "float32", shape = { 1 }, stride = { 1 } },
      nibble.peek },
    ["peek's shape"] = { "peek", "shape", { 1 }, function(p)
      nibble.peek({ storage = t:storage(), offset = 0, dtype = "float32", shape = p, stride = { 1 } })
    end },
  }
  for name, case in pairs(cases) do
    it("are refused by name: " .. name, function()
      local operation, parameter, plain, call = table.unpack(case)
      for key, metatable in pairs {
        __index = { __index = plain }, __len = { __len = function() return #plain end },
        ["__index and __len"] = { __index = function(_, k) return plain[k] end, __len = function() return #plain end },
      } do
        local message = raises(function() call(setmetatable({}, metatable)) end, operation, parameter, "without __",
          "one with it")
        assert.is_truthy(message:find(key:match("^__%l+"), 1, true), message)
      end
      local full = setmetatable({}, { __name = "mine", __gc = function() end })
      for k, v in pairs(plain) do full[k] = v end
      local ok, message = pcall(call, full)
      assert.is_true(ok or not message:find("one with it", 1, true), message)
    end)
  end
end)

describe("nibble.tensor #quick", function()
  it("refuses data that is neither a number nor a table of numbers", function()
    raises(function() nibble.tensor() end, "tensor", "data", "number", NOTHING)
    raises(function() nibble.tensor(nil) end, "tensor", "data", "number", NOTHING)
    raises(function() nibble.tensor("12") end, "tensor", "data", "number", { "string", '"12"' })
    raises(function() nibble.tensor(true) end, "tensor", "data", "number", { "boolean", "true" })
    raises(function() nibble.tensor({ 1, "2" }) end, "tensor", "data", "number", { "string", '"2"' })
    raises(function() nibble.tensor({ { 1, 2 }, { 3, false } }) end, "tensor", "data", "number", { "boolean", "false" })
    raises(function() nibble.tensor({ 1, nil, 3 }) end, "tensor", "data", "number", NOTHING)
    raises(function() nibble.tensor(nibble.zeros(2)) end, "tensor", "data", "number", { "tensor", "userdata" })
    raises(function() nibble.tensor({ { nibble.zeros(2) } }) end, "tensor", "data", "number", { "tensor", "userdata" })
  end)

  it("refuses ragged tables", function()
    raises(function() nibble.tensor({ { 1, 2 }, { 3 } }) end, "tensor", "data", "2", "1")
    raises(function() nibble.tensor({ { 1 }, { 2, 3 } }) end, "tensor", "data", "1", "2")
    raises(function() nibble.tensor({ { 1 }, {} }) end, "tensor", "data", "1", "0")
    raises(function() nibble.tensor({ {}, { 1 } }) end, "tensor", "data", "0", "1")
    raises(function() nibble.tensor({ { 1 }, 2 }) end, "tensor", "data", "table", { "number", "2" })
    raises(function() nibble.tensor({ 1, { 2 } }) end, "tensor", "data", "number", "table")
    raises(function() nibble.tensor({ { { 1 } }, { {} } }) end, "tensor", "data")
    raises(function() nibble.tensor({ { {} }, {} }) end, "tensor", "data")
  end)

  it("refuses more than 8 dimensions and tables that contain themselves", function()
    local deep = 1
    for _ = 1, 9 do deep = { deep } end
    raises(function() nibble.tensor(deep) end, "tensor", "data", "8")
    local loop = {}
    loop[1] = loop
    raises(function() nibble.tensor(loop) end, "tensor", "data", "8")
    local empty = {}
    for _ = 1, 64 do empty = { empty } end
    raises(function() nibble.tensor(empty) end, "tensor", "data", "8")
  end)

  it("refuses numbers that an integer dtype cannot hold", function()
    for dtype, values in pairs({
      uint8 = { 256, -1, 1.5, nan, math.huge, 1e300 }, int8 = { 128, -129, 0.5 }, uint16 = { 65536, -1 },
      int32 = { 2147483648, -2147483649, 2 ^ 31 }, int64 = { 2 ^ 63, -2 ^ 63 - 2048, 0.5, nan, -math.huge },
    }) do
      for _, value in ipairs(values) do
        local text = ("%.14g"):format(value):gsub("^%-nan", "nan")
        for name, call in pairs({
          tensor = function() nibble.tensor({ 1, value }, { dtype = dtype }) end,
          full = function() nibble.full(2, value, { dtype = dtype }) end,
        }) do
          local shown = math.type(value) == "integer" and tostring(value) or { text, tostring(value) }
          raises(call, name, name == "full" and "value" or "data", dtype, shown)
        end
      end
    end
  end)
end)

describe("options #quick", function()
  local calls = {
    tensor = function(opts) return nibble.tensor({ 1 }, opts) end,
    zeros = function(opts) return nibble.zeros(2, opts) end,
    empty = function(opts) return nibble.empty(2, opts) end,
    full = function(opts) return nibble.full(2, 1, opts) end,
    arange = function(opts) return nibble.arange(0, 2, 1, opts) end,
    randn = function(opts) return nibble.randn(2, opts) end,
    randint = function(opts) return nibble.randint(0, 2, 2, opts) end,
    randperm = function(opts) return nibble.randperm(2, opts) end,
  }

  it("that are not listed are errors", function()
    for name, call in pairs(calls) do
      raises(function() call({ nonsense = 1 }) end, name, "opts", nil, "nonsense")
      raises(function() call({ Dtype = "float32" }) end, name, "opts", nil, "Dtype")
      if not name:match("^rand") then
        raises(function() call({ seed = 1 }) end, name, "opts", nil, "seed")
      end
    end
    raises(function() nibble.stream({ nonsense = 1 }) end, "stream", "opts", nil, "nonsense")
  end)

  it("with a dtype that does not exist name it", function()
    for name, call in pairs(calls) do
      raises(function() call({ dtype = "float64" }) end, name, "dtype", nil, "float64")
      raises(function() call({ dtype = "" }) end, name, "dtype")
      raises(function() call({ dtype = 5 }) end, name, "dtype", nil, { "5", "number" })
    end
  end)

  it("with a device that is not there say why", function()
    for name, call in pairs(calls) do
      raises(function() call({ device = "cuda:99" }) end, name, "device", nil, "cuda:99")
      raises(function() call({ device = 0 }) end, name, "device", nil, { "0", "number" })
    end
  end)

  it("must be a table", function()
    raises(function() nibble.tensor({ 1 }, "float32") end, "tensor", "opts", "table", { "string", "float32" })
    raises(function() nibble.full(2, 1, 5) end, "full", "opts", "table", { "number", "5" })
    raises(function() nibble.stream(5) end, "stream", "opts", "table", { "number", "5" })
  end)

  it("of one use are refused in another", function()
    raises(function() nibble.randn(2, { dtype = "int32" }) end, "randn", "dtype", "float", "int32")
    raises(function() nibble.randperm(2, { dtype = "float32" }) end, "randperm", "dtype", "int", "float32")
    raises(function() nibble.randperm(2, { dtype = "uint8" }) end, "randperm", "dtype", "int", "uint8")
    for _, bad in ipairs({ 1.5, "1", {}, nan, 1e300 }) do
      raises(function() nibble.randn(2, { seed = bad }) end, "randn", "seed", "integer")
      raises(function() nibble.randint(0, 2, 2, { seed = bad }) end, "randint", "seed", "integer")
      raises(function() nibble.randperm(2, { seed = bad }) end, "randperm", "seed", "integer")
    end
  end)
end)

describe("sizes #quick", function()
  local calls = {
    zeros = function(...) return nibble.zeros(...) end,
    empty = function(...) return nibble.empty(...) end,
    randn = function(...) return nibble.randn(...) end,
    full = function(...) return nibble.full({ ... }, 1) end,
    randint = function(...) return nibble.randint(0, 2, { ... }) end,
    from_bytes = function(...) return nibble.from_bytes("", { ... }, { dtype = "uint8" }) end,
  }

  it("that are no integers are errors that show them", function()
    for name, call in pairs(calls) do
      for _, bad in ipairs(NO_INTEGERS) do
        raises(function() call(2, bad[1]) end, name, "shape", nil, bad[2])
      end
    end
    for _, name in ipairs({ "zeros", "empty", "randn" }) do
      for _, bad in ipairs(NO_INTEGERS) do
        raises(function() calls[name]({ 2, bad[1] }) end, name, "shape", nil, bad[2])
      end
    end
  end)

  it("below 0 or past the largest tensor are errors", function()
    for name, call in pairs(calls) do
      raises(function() call(2, -1) end, name, "shape", nil, "-1")
      raises(function() call(math.mininteger) end, name, "shape")
      raises(function() call(2 ^ 62 | 0, 4) end, name, "shape")
      raises(function() call(2 ^ 32 | 0, 2 ^ 32 | 0) end, name, "shape")
      raises(function() call(math.maxinteger, math.maxinteger, math.maxinteger) end, name, "shape")
    end
  end)

  it("are 8 at most", function()
    for name, call in pairs(calls) do
      raises(function() call(1, 1, 1, 1, 1, 1, 1, 1, 1) end, name, "shape", "8", "9")
    end
    local many = {}
    for i = 1, 250 do many[i] = 1 end
    raises(function() nibble.zeros(table.unpack(many)) end, "zeros", "shape", "8", "250")
    raises(function() nibble.zeros(many) end, "zeros", "shape", "8", "250")
  end)

  it("must be there", function()
    raises(function() nibble.full() end, "full", "shape", nil, NOTHING)
    raises(function() nibble.full(nil, 1) end, "full", "shape", nil, NOTHING)
    raises(function() nibble.randint(0, 2) end, "randint", "shape", nil, NOTHING)
    raises(function() nibble.from_bytes("abc", nil, { dtype = "uint8" }) end, "from_bytes", "shape", nil, NOTHING)
  end)
end)

describe("creation #quick", function()
  it("by full wants a number", function()
    raises(function() nibble.full(2) end, "full", "value", "number", NOTHING)
    raises(function() nibble.full(2, "1") end, "full", "value", "number", { "string", '"1"' })
    raises(function() nibble.full(2, {}) end, "full", "value", "number", "table")
  end)

  it("by arange wants numbers, a step that is not 0, and an end that can be reached", function()
    raises(function() nibble.arange() end, "arange", "stop", "number", NOTHING)
    raises(function() nibble.arange("5") end, "arange", "stop", "number", { "string", '"5"' })
    raises(function() nibble.arange(1, "5") end, "arange", "stop", "number", { "string", '"5"' })
    raises(function() nibble.arange({}, 5) end, "arange", "start", "number", "table")
    raises(function() nibble.arange(0, 5, 0) end, "arange", "step", nil, "0")
    raises(function() nibble.arange(0, 5, 0.0) end, "arange", "step", nil, "0")
    raises(function() nibble.arange(0, 5, nan) end, "arange", "step", nil, "nan")
    raises(function() nibble.arange(0, 5, "1") end, "arange", "step", "number", { "string", '"1"' })
    raises(function() nibble.arange(nan) end, "arange", "stop", nil, "nan")
    raises(function() nibble.arange(math.huge) end, "arange", "stop", nil, "inf")
    raises(function() nibble.arange(-math.huge, 0) end, "arange", "start", nil, "-inf")
    raises(function() nibble.arange(0, 1, 1e-300) end, "arange", "stop")
    raises(function() nibble.arange(0, 2 ^ 62 | 0) end, "arange", "stop")
    raises(function() nibble.arange(math.mininteger, math.maxinteger) end, "arange", "stop")
  end)

  it("by randint wants low < high, both in the dtype's range", function()
    raises(function() nibble.randint(5, 5, 2) end, "randint", "high", nil, "5")
    raises(function() nibble.randint(5, 4, 2) end, "randint", "high", nil, "4")
    raises(function() nibble.randint(math.maxinteger, math.mininteger, 2) end, "randint", "high")
    raises(function() nibble.randint(0.5, 4, 2) end, "randint", "low", "integer", "0.5")
    raises(function() nibble.randint(0, 4.5, 2) end, "randint", "high", "integer", "4.5")
    raises(function() nibble.randint("0", 4, 2) end, "randint", "low", "integer", { "string", '"0"' })
    raises(function() nibble.randint(0, 257, 2, { dtype = "uint8" }) end, "randint", "high", nil, { "257", "256" })
    raises(function() nibble.randint(-1, 5, 2, { dtype = "uint8" }) end, "randint", "low", nil, "-1")
    raises(function() nibble.randint(0, 2 ^ 31 + 1 | 0, 2, { dtype = "int32" }) end, "randint", "high")
  end)

  it("by randperm wants a count", function()
    raises(function() nibble.randperm() end, "randperm", "n", nil, NOTHING)
    raises(function() nibble.randperm(-1) end, "randperm", "n", nil, "-1")
    raises(function() nibble.randperm(2.5) end, "randperm", "n", "integer", "2.5")
    raises(function() nibble.randperm(math.maxinteger) end, "randperm", "n")
  end)

  it("by from_bytes wants a string of exactly the tensor's size, and a dtype", function()
    raises(function() nibble.from_bytes("abc", 2, { dtype = "uint8" }) end, "from_bytes", "bytes", "2", "3")
    raises(function() nibble.from_bytes("abc", 2, { dtype = "uint16" }) end, "from_bytes", "bytes", "4", "3")
    raises(function() nibble.from_bytes("", 1, { dtype = "uint8" }) end, "from_bytes", "bytes", "1", "0")
    raises(function() nibble.from_bytes(5, 1, { dtype = "uint8" }) end, "from_bytes", "bytes", "string",
      { "number", "5" })
    raises(function() nibble.from_bytes(nil, 1, { dtype = "uint8" }) end, "from_bytes", "bytes", "string", NOTHING)
    raises(function() nibble.from_bytes("abc", 3) end, "from_bytes", "dtype", nil, NOTHING)
    raises(function() nibble.from_bytes("abc", 3, {}) end, "from_bytes", "dtype", nil, NOTHING)
    raises(function() nibble.from_bytes("abc", 3, { dtype = "uint8", nonsense = 1 }) end, "from_bytes", "opts")
  end)
end)

describe("views #quick", function()
  local t = nibble.arange(12):view(3, 4)

  it("by narrow stay inside the dimension", function()
    raises(function() t:narrow(0, 1, 1) end, "tensor:narrow", "dim", "1", "0")
    raises(function() t:narrow(3, 1, 1) end, "tensor:narrow", "dim", "2", "3")
    raises(function() t:narrow(-1, 1, 1) end, "tensor:narrow", "dim", nil, "-1")
    raises(function() t:narrow(1, 0, 1) end, "tensor:narrow", "start", "1", "0")
    raises(function() t:narrow(1, 4, 1) end, "tensor:narrow", "length", "4", "1")
    raises(function() t:narrow(1, 5, 0) end, "tensor:narrow", "start", nil, "5")
    raises(function() t:narrow(1, 2, 3) end, "tensor:narrow", "length", "2", "3")
    raises(function() t:narrow(1, 1, -1) end, "tensor:narrow", "length", nil, "-1")
    raises(function() t:narrow(1, 2, math.maxinteger) end, "tensor:narrow", "length")
    raises(function() t:narrow(1, math.maxinteger, 1) end, "tensor:narrow", "start")
    raises(function() t:narrow(1, 1) end, "tensor:narrow", "length", "integer", NOTHING)
    raises(function() nibble.tensor(1):narrow(1, 1, 1) end, "tensor:narrow", "dim", nil, "1")
    for position, name in ipairs({ "dim", "start", "length" }) do
      for _, bad in ipairs(NO_INTEGERS) do
        local args = { 1, 1, 1 }
        args[position] = bad[1]
        raises(function() t:narrow(table.unpack(args, 1, 3)) end, "tensor:narrow", name, "integer", bad[2])
      end
    end
  end)

  it("by select stay inside the dimension", function()
    raises(function() t:select(3, 1) end, "tensor:select", "dim", "2", "3")
    raises(function() t:select(1, 0) end, "tensor:select", "index", "1", "0")
    raises(function() t:select(1, 4) end, "tensor:select", "index", "3", "4")
    raises(function() t:select(1, -1) end, "tensor:select", "index", nil, "-1")
    raises(function() t:select(1) end, "tensor:select", "index", "integer", NOTHING)
    raises(function() nibble.zeros(0):select(1, 1) end, "tensor:select", "index", nil, "1")
    for _, bad in ipairs(NO_INTEGERS) do
      raises(function() t:select(bad[1], 1) end, "tensor:select", "dim", "integer", bad[2])
      raises(function() t:select(1, bad[1]) end, "tensor:select", "index", "integer", bad[2])
    end
  end)

  it("by view keep the number of elements and need strides that allow it", function()
    raises(function() t:view(5, 2) end, "tensor:view", "shape", "12", { "10", "5" })
    raises(function() t:view(-1, 5) end, "tensor:view", "shape", "12", { "5", "-1" })
    raises(function() t:view(-1, -1) end, "tensor:view", "shape", "-1")
    raises(function() t:view(-2, 6) end, "tensor:view", "shape", nil, "-2")
    raises(function() t:view(0, -1) end, "tensor:view", "shape")
    raises(function() nibble.zeros(0):view(0, -1) end, "tensor:view", "shape")
    raises(function() t:view(2 ^ 32 | 0, 2 ^ 32 | 0, 12) end, "tensor:view", "shape")
    raises(function() t:view({}) end, "tensor:view", "shape")
    raises(function() t:view(1, 1, 1, 1, 1, 1, 1, 3, 4) end, "tensor:view", "shape", "8", "9")
    raises(function() t:transpose(1, 2):view(12) end, "tensor:view", "shape")
    raises(function() t:narrow(2, 1, 3):view(9) end, "tensor:view", "shape")
    for _, bad in ipairs(NO_INTEGERS) do
      raises(function() t:view(3, bad[1]) end, "tensor:view", "shape", "integer", bad[2])
    end
  end)

  it("by permute name each dimension once", function()
    raises(function() t:permute(1) end, "tensor:permute", "dims", "2", "1")
    raises(function() t:permute(1, 2, 3) end, "tensor:permute", "dims", "2", "3")
    raises(function() t:permute(1, 1) end, "tensor:permute", "dims", nil, "1")
    raises(function() t:permute(0, 1) end, "tensor:permute", "dims", nil, "0")
    raises(function() t:permute(1, 3) end, "tensor:permute", "dims", nil, "3")
    raises(function() t:permute(1, 2.5) end, "tensor:permute", "dims", "integer", "2.5")
    raises(function() t:permute("1", 2) end, "tensor:permute", "dims", "integer", { "string", '"1"' })
    raises(function() t:transpose(1, 3) end, "tensor:transpose", "dim2", "2", "3")
    raises(function() t:transpose(0, 1) end, "tensor:transpose", "dim1", "1", "0")
    raises(function() t:transpose(1) end, "tensor:transpose", "dim2", "integer", NOTHING)
  end)

  it("by expand repeat dimensions of size 1 only", function()
    raises(function() t:expand(6, 4) end, "tensor:expand", "shape", "3", "6")
    raises(function() t:expand(3, 1) end, "tensor:expand", "shape", "4", "1")
    raises(function() t:expand(4) end, "tensor:expand", "shape", "2", "1")
    raises(function() t:expand(-1, 3, 4) end, "tensor:expand", "shape", nil, "-1")
    raises(function() t:expand(-2, 4) end, "tensor:expand", "shape", nil, "-2")
    raises(function() t:expand(2, 2, 2, 2, 2, 2, 2, 3, 4) end, "tensor:expand", "shape", "8", "9")
    raises(function() t:expand(2.5, 3, 4) end, "tensor:expand", "shape", "integer", "2.5")
    raises(function() nibble.tensor(1):expand(2 ^ 40 | 0, 2 ^ 40 | 0) end, "tensor:expand", "shape")
  end)

  it("by as_strided stay inside the storage", function()
    local v = nibble.arange(12)
    local wrong = function(parameter, ...)
      local args = { ... }
      raises(function() v:as_strided(table.unpack(args)) end, "tensor:as_strided", parameter)
    end
    local inside = { "size", "stride", "offset" }
    wrong(inside, { 13 }, { 1 })
    wrong(inside, { 2 }, { 12 })
    wrong(inside, { 1 }, { 1 }, 12)
    wrong(inside, { 1 }, { 1 }, -1)
    wrong(inside, { 2, 2 }, { 11, 1 })
    wrong(inside, { 3 }, { math.maxinteger })
    wrong(inside, { 2 ^ 40 | 0, 2 ^ 40 | 0 }, { 0, 0 })
    wrong(inside, { 2 }, { 1 }, math.maxinteger)
    wrong(inside, { 2 }, { 1 }, math.mininteger)
    wrong({ "stride" }, { 2 }, { 12 }) -- one element behind the last, named by what reaches there
    wrong({ "stride" }, { 2, 2 }, { 11, 1 })
    wrong({ "stride" }, { 2 }, { -1 }, 5)
    wrong({ "stride" }, { 2, 2 }, { 1 })
    wrong({ "stride" }, { 2 }, nil)
    wrong({ "size" }, { -1 }, { 1 })
    wrong({ "size" }, nil, { 1 })
    wrong({ "size" }, { 2.5 }, { 1 })
    wrong({ "stride" }, { 2 }, { 0.5 })
    wrong({ "stride" }, { 2 }, { "1" })
    wrong({ "offset" }, { 2 }, { 1 }, 0.5)
    wrong({ "size" }, { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, { 1, 1, 1, 1, 1, 1, 1, 1, 1 })
    -- A view's own storage is the limit, not the view.
    assert.same({ 11 }, v:narrow(1, 1, 2):as_strided({ 1 }, { 1 }, 11):totable())
  end)

  it("by reinterpret need whole elements at whole offsets", function()
    local bytes = nibble.zeros(4, 6, { dtype = "uint8" })
    raises(function() bytes:reinterpret("int32") end, "tensor:reinterpret", "dtype")
    raises(function() bytes:narrow(2, 2, 4):reinterpret("int32") end, "tensor:reinterpret", "dtype")
    raises(function() bytes:narrow(2, 2, 2):reinterpret("uint16") end, "tensor:reinterpret", "dtype")
    raises(function() bytes:transpose(1, 2):reinterpret("int32") end, "tensor:reinterpret", "dtype")
    raises(function() nibble.zeros(4, 3, { dtype = "uint8" }):narrow(2, 1, 2):reinterpret("uint16") end,
      "tensor:reinterpret", "dtype")
    raises(function() nibble.tensor(1.0):reinterpret("uint8") end, "tensor:reinterpret", "dtype")
    raises(function() nibble.zeros(4, 4):transpose(1, 2):reinterpret("uint8") end, "tensor:reinterpret",
      "dtype")
    raises(function() bytes:reinterpret("float64") end, "tensor:reinterpret", "dtype", nil, "float64")
    raises(function() bytes:reinterpret() end, "tensor:reinterpret", "dtype", nil, NOTHING)
    raises(function() bytes:reinterpret(4) end, "tensor:reinterpret", "dtype", nil, { "4", "number" })
  end)

  it("by stride ask for a dimension that exists", function()
    raises(function() t:stride(0) end, "tensor:stride", "dim", nil, "0")
    raises(function() t:stride(3) end, "tensor:stride", "dim", nil, "3")
    raises(function() t:stride("1") end, "tensor:stride", "dim", "integer", { "string", '"1"' })
  end)
end)

describe("writes #quick", function()
  it("of the wrong shape or kind leave the target as it was", function()
    local t = nibble.arange(6):view(2, 3)
    local before = t:bytes()
    raises(function() t:copy(nibble.zeros(3, 2)) end, "tensor:copy", "source", nil, "3")
    raises(function() t:copy(nibble.zeros(2)) end, "tensor:copy", "source", nil, "2")
    raises(function() t:copy(nibble.zeros(1, 2, 3)) end, "tensor:copy", "source")
    raises(function() t:copy() end, "tensor:copy", "source", "tensor", NOTHING)
    raises(function() t:copy(5) end, "tensor:copy", "source", "tensor", { "number", "5" })
    raises(function() t:copy({ 1, 2, 3 }) end, "tensor:copy", "source", "tensor", "table")
    raises(function() t:copy(io.stdout) end, "tensor:copy", "source", "tensor", { "userdata", "FILE*" })
    raises(function() t:copy(nibble.current_stream()) end, "tensor:copy", "source", "tensor", { "userdata", "stream" })
    raises(function() t:fill() end, "tensor:fill", "value", "number", NOTHING)
    raises(function() t:fill("0") end, "tensor:fill", "value", "number", { "string", '"0"' })
    raises(function() t:fill(0.5) end, "tensor:fill", "value", "int64", "0.5")
    raises(function() t:fill(nan) end, "tensor:fill", "value", "int64", "nan")
    raises(function() nibble.zeros(2, { dtype = "uint8" }):fill(256) end, "tensor:fill", "value", "uint8", "256")
    assert.equal(before, t:bytes())
  end)

  it("to a tensor whose elements overlap in memory are refused", function()
    local base = nibble.arange(6)
    local before = base:bytes()
    local wide = base:view(6, 1):expand(6, 2)
    local windows = base:as_strided({ 2, 4 }, { 2, 1 })
    local meshed = base:as_strided({ 2, 2 }, { 2, 2 })
    for _, view in ipairs({ wide, windows, meshed }) do
      raises(function() view:fill(9) end, "tensor:fill", "self")
      raises(function() view:copy(nibble.tensor(9)) end, "tensor:copy", "self")
    end
    -- Strides that interleave without touching are no overlap.
    local woven = base:as_strided({ 2, 3 }, { 1, 2 })
    assert.same({ { 0, 2, 4 }, { 1, 3, 5 } }, woven:totable())
    assert.equal(before, base:bytes())
    woven:fill(9)
    assert.same({ 9, 9, 9, 9, 9, 9 }, base:totable())
  end)

  it("of elements check the index and the value", function()
    local v = nibble.arange(3, { dtype = "uint8" })
    local m = nibble.zeros(2, 3)
    local function wrong(fn, got)
      local ok, message = pcall(fn)
      assert.is_false(ok)
      assert.matches("[%w_:.]+: [%w_.]+: expected .+, got .+", message)
      if got then assert.is_truthy(message:match("got (.+)$"):find(got, 1, true), message) end
    end
    for _, index in ipairs({ 0, 4, -1, math.maxinteger }) do
      wrong(function() return v[index] end, tostring(index))
      wrong(function() v[index] = 1 end, tostring(index))
      wrong(function() return m[{ 1, index }] end, tostring(index))
      wrong(function() m[{ index, 1 }] = 1 end, tostring(index))
    end
    for _, index in ipairs({ 1.5, nan, 1e300 }) do
      wrong(function() return v[index] end)
      wrong(function() return m[{ 1, index }] end)
      wrong(function() v[index] = 1 end)
    end
    wrong(function() return m[{ 1, 1, 1 }] end, "3")
    wrong(function() m[{ 1, 1, 1 }] = 1 end, "3")
    wrong(function() return m[{ 1, "1" }] end)
    wrong(function() v[1] = 256 end, "256")
    wrong(function() v[1] = 0.5 end, "0.5")
    wrong(function() v[1] = "1" end)
    wrong(function() v[1] = nil end)
    wrong(function() m[1] = nibble.zeros(2) end)
    assert.same({ 0, 1, 2 }, v:totable())
    assert.same({ { 0, 0, 0 }, { 0, 0, 0 } }, m:totable())
    assert.equal(1, v[2.0])
  end)

  it("by to want a device or a dtype", function()
    local t = nibble.zeros(2)
    raises(function() t:to("float64") end, "tensor:to", "device_or_dtype", nil, "float64")
    raises(function() t:to("cuda:99") end, "tensor:to", "device_or_dtype", nil, "cuda:99")
    raises(function() t:to() end, "tensor:to", "device_or_dtype", nil, NOTHING)
    raises(function() t:to({}) end, "tensor:to", "device_or_dtype", nil, "table")
  end)
end)

describe("reads #quick", function()
  it("by item want exactly one element", function()
    raises(function() nibble.zeros(2):item() end, "tensor:item", "self", nil, "2")
    raises(function() nibble.zeros(0):item() end, "tensor:item", "self", nil, "0")
  end)

  it("by comparisons want a tensor, of the same shape where values are compared", function()
    local t = nibble.zeros(2, 3)
    for _, name in ipairs({ "equal", "allclose", "max_error" }) do
      raises(function() t[name](t) end, "tensor:" .. name, "other", "tensor", NOTHING)
      raises(function() t[name](t, 5) end, "tensor:" .. name, "other", "tensor", { "number", "5" })
      raises(function() t[name](t, io.stdout) end, "tensor:" .. name, "other", "tensor", { "userdata", "FILE*" })
    end
    raises(function() t:allclose(nibble.zeros(3, 2)) end, "tensor:allclose", "other", "2", "3")
    raises(function() t:allclose(nibble.zeros(3)) end, "tensor:allclose", "other")
    raises(function() t:max_error(nibble.zeros(2, 2)) end, "tensor:max_error", "other", "3", "2")
  end)

  it("by allclose check their options", function()
    local t = nibble.zeros(2)
    raises(function() t:allclose(t, { nonsense = 1 }) end, "tensor:allclose", "opts", nil, "nonsense")
    raises(function() t:allclose(t, 5) end, "tensor:allclose", "opts", "table", { "number", "5" })
    raises(function() t:allclose(t, { rtol = "1" }) end, "tensor:allclose", "rtol", "number")
    raises(function() t:allclose(t, { equal_nan = 1 }) end, "tensor:allclose", "equal_nan", "boolean")
  end)

  it("by save and load want a path", function()
    raises(function() nibble.zeros(2):save() end, "tensor:save", "path", "string", NOTHING)
    raises(function() nibble.zeros(2):save(5) end, "tensor:save", "path", "string", { "number", "5" })
    raises(function() nibble.load() end, "load", "path", "string", NOTHING)
    raises(function() nibble.load({}) end, "load", "path", "string", "table")
    raises(function() nibble.load("x", { nonsense = 1 }) end, "load", "opts", nil, "nonsense")
    raises(function() nibble.load("x", { dtype = "float64" }) end, "load", "dtype", nil, "float64")
  end)
end)

describe("streams, events and graphs #quick", function()
  local stream = nibble.stream()

  it("check what they are given", function()
    raises(function() nibble.stream({ priority = "high" }) end, "stream", "priority", "integer")
    raises(function() stream:scope() end, "stream:scope", "fn", "function", NOTHING)
    raises(function() stream:scope(5) end, "stream:scope", "fn", "function", { "number", "5" })
    raises(function() stream:wait() end, "stream:wait", "event", "event", NOTHING)
    raises(function() stream:wait(stream) end, "stream:wait", "event", "event", { "stream", "userdata" })
    raises(function() stream:capture() end, "stream:capture", "fn", "function", NOTHING)
    raises(function() stream:capture("x") end, "stream:capture", "fn", "function", { "string", '"x"' })
    raises(function() stream:capture(print, { mode = "eager" }) end, "stream:capture", "mode",
      "thread_local", "eager")
    raises(function() stream:capture(print, { nonsense = 1 }) end, "stream:capture", "opts", nil, "nonsense")
    local event = stream:record()
    raises(function() event:elapsed() end, "event:elapsed", "later", "event", NOTHING)
    raises(function() event:elapsed(stream) end, "event:elapsed", "later", "event", { "stream", "userdata" })
    local graph = stream:capture(function() end)
    raises(function() graph:update() end, "graph:update", "fn", "function", NOTHING)
    raises(function() graph:update({}) end, "graph:update", "fn", "function", "table")
  end)

  it("of the device that do not exist are named", function()
    for _, name in ipairs({ "memory", "synchronize", "check_faults", "current_stream" }) do
      raises(function() nibble[name]("cuda:99") end, name, "device", nil, "cuda:99")
      raises(function() nibble[name]({}) end, name, "device", nil, "table")
    end
  end)

  it("do not let a default stream be closed", function()
    local default = nibble.current_stream()
    local ok, message = pcall(default.close, default)
    assert.is_false(ok)
    assert.matches("stream:close: .*default", message)
    assert.equal(3, nibble.full(1, 3):item())
  end)

  it("are not taken for names when they go on behind a zero byte", function()
    local t = nibble.zeros(1, 4, 1, 4, { dtype = "uint8" })
    for expected, call in pairs({
      ["zeros: dtype:"] = function() nibble.zeros(1, { dtype = "uint8\0x" }) end,
      ["zeros: opts:"] = function() nibble.zeros(1, { ["dtype\0"] = "uint8" }) end,
      ["zeros: device:"] = function() nibble.zeros(1, { device = "cpu\0" }) end,
      ["tensor:to: device_or_dtype:"] = function() t:to("uint8\0") end,
      ["quantization.swizzle_v_scales: kv_layout:"] = function() nibble.quantization.swizzle_v_scales(t, "NHD\0") end,
      ["stream:capture: mode:"] = function() stream:capture(function() end, { mode = "global\0" }) end,
      ["stream: field:"] = function() return stream["device\0"] end,
      ["tensor: field:"] = function() return t["shape\0"] end,
      ["load: path:"] = function() nibble.load("x\0") end,
      ["create: path:"] = function() nibble.create("x\0") end,
    }) do
      assert.error_matches(call, expected, 1, true)
    end
  end)

  it("of views that no memory holds are theirs", function()
    local huge = nibble.zeros(1, { device = "cpu" }):expand(1 << 59)
    for _, method in ipairs({ "bytes", "totable", "save", "clone", "contiguous" }) do
      assert.error_matches(function() huge[method](huge, "/nonexistent/x") end,
        "tensor:" .. method .. ": out of memory: cannot allocate 2305843009213693952 bytes", 1, true)
    end
  end)
end)
