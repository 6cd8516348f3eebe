-- Numbers at the border between Lua and tensors: what counts as an integer, what survives, what is refused before
-- anything is allocated. Conversions between dtypes are in formats_spec.lua.
local nibble = require("nibble")

local nan = 0 / 0

describe("an integer parameter #quick", function()
  local t = nibble.arange(24):view(2, 3, 4)
  local pages = { k = nibble.zeros(2, 1, 4, 32, { dtype = "uint8" }),
    sf = nibble.zeros(2, 1, 4, 4, { dtype = "uint8" }) }
  local lens = nibble.zeros(1, { dtype = "int32" })
  local tables = nibble.zeros(1, 2, { dtype = "int32" })

  -- Every place that takes an integer, as a function of it; 2 is right for all of them.
  local places = {
    ["zeros shape"] = function(n) return nibble.zeros(n) end,
    ["zeros shape table"] = function(n) return nibble.zeros({ 3, n }) end,
    ["empty shape"] = function(n) return nibble.empty(3, n) end,
    ["randn shape"] = function(n) return nibble.randn(n) end,
    ["full shape"] = function(n) return nibble.full(n, 1) end,
    ["full shape table"] = function(n) return nibble.full({ n }, 1) end,
    ["from_bytes shape"] = function(n) return nibble.from_bytes("ab", n, { dtype = "uint8" }) end,
    ["randint low"] = function(n) return nibble.randint(n, 9, 3) end,
    ["randint high"] = function(n) return nibble.randint(0, n, 3) end,
    ["randint shape"] = function(n) return nibble.randint(0, 9, n) end,
    ["randperm n"] = function(n) return nibble.randperm(n) end,
    ["randn seed"] = function(n) return nibble.randn(3, { seed = n }) end,
    ["tensor uint8 value"] = function(n) return nibble.tensor({ n }, { dtype = "uint8" }) end,
    ["full int32 value"] = function(n) return nibble.full(1, n, { dtype = "int32" }) end,
    ["fill int64 value"] = function(n) return nibble.zeros(1, { dtype = "int64" }):fill(n) end,
    ["element value"] = function(n) nibble.zeros(1, { dtype = "int8" })[1] = n end,
    ["narrow dim"] = function(n) return t:narrow(n, 1, 1) end,
    ["narrow start"] = function(n) return t:narrow(2, n, 1) end,
    ["narrow length"] = function(n) return t:narrow(2, 1, n) end,
    ["select dim"] = function(n) return t:select(n, 1) end,
    ["select index"] = function(n) return t:select(2, n) end,
    ["view shape"] = function(n) return t:view(n, 12) end,
    ["permute dim"] = function(n) return t:permute(n, 1, 3) end,
    ["transpose dim"] = function(n) return t:transpose(1, n) end,
    ["expand shape"] = function(n) return t:expand(n, 2, 3, 4) end,
    ["as_strided size"] = function(n) return t:as_strided({ n }, { 1 }) end,
    ["as_strided stride"] = function(n) return t:as_strided({ 3 }, { n }) end,
    ["as_strided offset"] = function(n) return t:as_strided({ 3 }, { 1 }, n) end,
    ["stride dim"] = function(n) return t:stride(n) end,
    ["index"] = function(n) return t[n] end,
    ["index table"] = function(n) return t[{ 1, n, 1 }] end,
    ["max_kv_len"] = function(n)
      return nibble.quantization.nvfp4_kv_materialize_fp8(pages.k, pages.k, pages.sf, pages.sf, tables, lens, n)
    end,
    ["rope_table max_position"] = function(n) return nibble.rope_table(n) end,
  }

  it("takes 2 and 2.0 alike", function()
    for name, call in pairs(places) do
      assert.has_no.errors(function() call(2) end, name)
      assert.has_no.errors(function() call(2.0) end, name)
    end
  end)

  it("refuses 2.5, NaN, infinity, 1e300, 2^63, a string and a boolean", function()
    for name, call in pairs(places) do
      for _, bad in ipairs({ 2.5, nan, math.huge, -math.huge, 1e300, 2.0 ^ 63, -2.0 ^ 63 - 2048, "2", "2.0", true,
        {} }) do
        -- A table is a whole shape, an index of no dimension or an empty row, where such are taken.
        if type(bad) ~= "table" or not (name:match("shape$") or name == "index" or name == "tensor uint8 value") then
          local ok, message = pcall(call, bad)
          assert.is_false(ok, ("%s took %s"):format(name, tostring(bad)))
          assert.is_string(message, name)
          assert.matches("expected .+, got .+", message)
        end
      end
    end
  end)
end)

describe("integers past 2^53 #quick", function()
  local big = 9007199254740993 -- 2^53 + 1, which no float64 holds

  it("survive every way in and out of an int64 tensor", function()
    for _, value in ipairs({ big, -big, math.maxinteger, math.mininteger, math.maxinteger - 1 }) do
      local opts = { dtype = "int64" }
      local t = nibble.tensor({ value })
      assert.equal("int64", t.dtype)
      assert.equal(value, t[1])
      assert.equal(value, t:item())
      assert.equal(value, t:totable()[1])
      assert.equal(value, t[{ 1 }])
      assert.equal(string.pack("<i8", value), t:bytes())
      assert.equal(value, nibble.tensor(value):item())
      assert.equal(value, nibble.full(1, value):item())
      assert.equal(value, nibble.zeros(1, opts):fill(value):item())
      local u = nibble.zeros(2, opts)
      u[2] = value
      assert.same({ 0, value }, u:totable())
      assert.equal(value, nibble.zeros(1, opts):copy(t):item())
      assert.equal(value, t:clone():item())
    end
    assert.same({ big, big + 1 }, nibble.arange(big, big + 2):totable())
    assert.same({ big }, nibble.arange(big, big + 5, 5):totable())
    assert.equal(big, nibble.randint(big, big + 1, 1):item())
  end)

  it("show in full when printed", function()
    assert.is_truthy(tostring(nibble.tensor({ big })):find("9007199254740993", 1, true))
  end)

  it("are rounded once on the way to a float", function()
    -- 2^24 + 1 and its neighbours at the edge of float32; 2^53 + 1 lies just past a float64 tie.
    assert.same({ 16777216.0, 16777220.0 }, nibble.tensor({ 16777217, 16777219 }, { dtype = "float32" }):totable())
    -- 2^60 + 2^36 + 1 is above the midpoint of two float32 numbers; through float64 it would become the midpoint
    -- itself.
    local value = (1 << 60) + (1 << 36) + 1
    local up = 2.0 ^ 60 + 2.0 ^ 37
    assert.equal(up, nibble.tensor({ value }, { dtype = "float32" }):item())
    assert.equal(up, nibble.tensor({ value }):to("float32"):item())
    assert.equal(up, nibble.full(1, value, { dtype = "float32" }):item())
  end)
end)

describe("floats #quick", function()
  it("are rounded once on the way to a small dtype", function()
    -- Just above a tie of the small dtype, by less than float32 can show.
    local bfloat16 = 1 + 2.0 ^ -8 + 2.0 ^ -40
    local float16 = 1 + 2.0 ^ -11 + 2.0 ^ -40
    local float8 = 1 + 2.0 ^ -4 + 2.0 ^ -40
    for dtype, case in pairs({ bfloat16 = { bfloat16, 1 + 2.0 ^ -7 }, float16 = { float16, 1 + 2.0 ^ -10 },
      float8_e4m3fn = { float8, 1 + 2.0 ^ -3 } }) do
      local opts = { dtype = dtype }
      assert.equal(case[2], nibble.tensor({ case[1] }, opts):item(), dtype)
      assert.equal(case[2], nibble.full(1, case[1], opts):item(), dtype)
      assert.equal(case[2], nibble.zeros(1, opts):fill(case[1]):item(), dtype)
      assert.equal(case[2], nibble.arange(case[1], 2, 5, opts):item(), dtype)
      local t = nibble.zeros(1, opts)
      t[1] = case[1]
      assert.equal(case[2], t:item(), dtype)
    end
  end)

  it("at ties go to the even neighbour", function()
    assert.same({ 1.0, 1 + 2.0 ^ -6 }, nibble.tensor({ 1 + 2.0 ^ -8, 1 + 3 * 2.0 ^ -8 },
      { dtype = "bfloat16" }):totable())
    assert.same({ 1.0, 1 + 2.0 ^ -9 }, nibble.tensor({ 1 + 2.0 ^ -11, 1 + 3 * 2.0 ^ -11 },
      { dtype = "float16" }):totable())
    assert.same({ 1.0, 1.25 }, nibble.tensor({ 1.0625, 1.1875 }, { dtype = "float8_e4m3fn" }):totable())
    assert.same({ 0.0, 2.0 ^ -8 }, nibble.tensor({ 2.0 ^ -10, 3 * 2.0 ^ -10 }, { dtype = "float8_e4m3fn" }):totable())
  end)

  it("keep subnormals", function()
    assert.equal(2.0 ^ -149, nibble.tensor({ 2.0 ^ -149 }):item())
    assert.equal(0.0, nibble.tensor({ 2.0 ^ -150 }):item())
    assert.equal(2.0 ^ -149, nibble.tensor({ 2.0 ^ -150 * 1.0001 }):item())
    assert.equal(2.0 ^ -24, nibble.tensor({ 2.0 ^ -24 }, { dtype = "float16" }):item())
    assert.equal(2.0 ^ -133, nibble.tensor({ 2.0 ^ -133 }, { dtype = "bfloat16" }):item())
    assert.equal(2.0 ^ -9, nibble.tensor({ 2.0 ^ -9 }, { dtype = "float8_e4m3fn" }):item())
  end)
end)

describe("sizes #quick", function()
  it("that cannot be are refused before anything is allocated", function()
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    local before = nibble.memory()
    for _, shape in ipairs({
      { -1 }, { 2, -1 }, { 1 << 62 }, { 1 << 61, 2 }, { 1 << 32, 1 << 32 }, { 1 << 31, 1 << 31, 4 }, { 3, 1 << 62 },
      { math.maxinteger }, { math.mininteger }, { math.maxinteger, math.maxinteger }, { 1 << 63 >> 1, 2, 2 },
      { 1 << 16, 1 << 16, 1 << 16, 1 << 16 }, { 0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF },
    }) do
      for _, create in ipairs({
        function() return nibble.zeros(shape) end, function() return nibble.empty(shape, { dtype = "int64" }) end,
        function() return nibble.full(shape, 1) end, function() return nibble.randn(shape) end,
        function() return nibble.randint(0, 2, shape) end,
        function() return nibble.from_bytes("", shape, { dtype = "float32" }) end,
      }) do
        local ok, message = pcall(create)
        assert.is_false(ok)
        assert.matches("shape: expected .+, got .+", message)
      end
    end
    local after = nibble.memory()
    assert.equal(before.used, after.used)
    assert.equal(before.peak, after.peak)
  end)

  it("with a 0 among them make an empty tensor or are refused, never more", function()
    for _, shape in ipairs({ { 0, 1 << 62, 1 << 62 }, { 1 << 62, 0 }, { math.maxinteger, math.maxinteger, 0 } }) do
      local ok, t = pcall(nibble.zeros, shape)
      if ok then
        assert.same(shape, t.shape)
        assert.equal(0, t:numel())
        assert.equal("", t:bytes())
        t:fill(1)
      else
        assert.matches("zeros: shape: expected .+, got .+", t)
      end
    end
  end)

  it("of views may be huge where strides are 0", function()
    local t = nibble.tensor({ 7 }, { dtype = "uint8" }):expand(1 << 40)
    assert.equal(1 << 40, t:numel())
    assert.equal(7, t[1 << 40])
    assert.equal(7, t:narrow(1, (1 << 40) - 3, 4)[4])
    assert.is_string(tostring(t))
  end)

  it("past 2^31 elements are addressed rightly", function()
    local row = nibble.arange(5)
    local t = row:view(5, 1):expand(5, 1 << 33)
    assert.equal(5 << 33, t:numel())
    assert.same({ 3 }, t:narrow(2, 1 << 33, 1):select(1, 4):totable())
  end)
end)
