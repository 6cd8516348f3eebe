-- Tensors: creation, copies, fills, element access, printing, equality, closing.
local nibble = require("nibble")

local DTYPES = { "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64" }
local SIZE = { float32 = 4, float16 = 2, bfloat16 = 2, float8_e4m3fn = 1, uint8 = 1, int8 = 1, uint16 = 2, int32 = 4,
  int64 = 8 }
local LIMITS = { uint8 = { 0, 255 }, int8 = { -128, 127 }, uint16 = { 0, 65535 },
  int32 = { -2 ^ 31 | 0, 2 ^ 31 - 1 | 0 },
  int64 = { math.mininteger, math.maxinteger } }

local function is_float(dtype)
  return LIMITS[dtype] == nil
end

describe("nibble.tensor #quick", function()
  it("takes a nested table, row by row", function()
    local t = nibble.tensor({ { { 1, 2 }, { 3, 4 }, { 5, 6 } }, { { 7, 8 }, { 9, 10 }, { 11, 12 } } })
    assert.same({ 2, 3, 2 }, t.shape)
    assert.same({ 6, 2, 1 }, t:stride())
    assert.equal(string.pack("<i8i8i8i8i8i8i8i8i8i8i8i8", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), t:bytes())
  end)

  it("takes a number as a tensor without dimensions", function()
    local t = nibble.tensor(7)
    assert.same({}, t.shape)
    assert.equal(0, t:dim())
    assert.equal(1, t:numel())
    assert.equal(7, t:item())
    assert.equal(7, t:totable())
    assert.equal("int64", t.dtype)
    assert.equal("float32", nibble.tensor(0.5).dtype)
  end)

  it("is int64 when every number is a Lua integer, else float32", function()
    assert.equal("int64", nibble.tensor({ 1, 2 }).dtype)
    assert.equal("float32", nibble.tensor({ 1, 2.0 }).dtype)
    assert.equal("float32", nibble.tensor({ { 1, 2 }, { 3, 0.5 } }).dtype)
    assert.equal("uint8", nibble.tensor({ 1, 2.0 }, { dtype = "uint8" }).dtype)
  end)

  it("keeps empty levels as sizes of 0", function()
    assert.same({ 0 }, nibble.tensor({}).shape)
    assert.same({ 2, 0 }, nibble.tensor({ {}, {} }).shape)
    assert.same({ 1, 2, 0 }, nibble.tensor({ { {}, {} } }).shape)
    assert.same({ {}, {} }, nibble.tensor({ {}, {} }):totable())
  end)

  it("holds every dtype's limits exactly", function()
    for dtype, limit in pairs(LIMITS) do
      local t = nibble.tensor({ limit[1], 0, 1, limit[2] }, { dtype = dtype })
      assert.same({ limit[1], 0, 1, limit[2] }, t:totable(), dtype)
      for _, value in ipairs(t:totable()) do assert.equal("integer", math.type(value)) end
    end
  end)

  it("gives floats for float dtypes and integers for integer dtypes", function()
    for _, dtype in ipairs(DTYPES) do
      local t = nibble.tensor({ 3 }, { dtype = dtype })
      local kind = is_float(dtype) and "float" or "integer"
      assert.equal(kind, math.type(t[1]), dtype)
      assert.equal(kind, math.type(t:totable()[1]), dtype)
      assert.equal(kind, math.type(t:item()), dtype)
    end
  end)

  it("keeps infinities, NaN and the sign of zero", function()
    for _, dtype in ipairs({ "float32", "float16", "bfloat16" }) do
      local t = nibble.tensor({ math.huge, -math.huge, -0.0, 0.0, 0 / 0 }, { dtype = dtype }):totable()
      assert.equal(math.huge, t[1])
      assert.equal(-math.huge, t[2])
      assert.equal(-math.huge, 1 / t[3])
      assert.equal(math.huge, 1 / t[4])
      assert.is_true(t[5] ~= t[5])
    end
  end)
end)

describe("creation #quick", function()
  it("takes a shape as integers or as a table, with options last", function()
    for _, t in ipairs({
      nibble.zeros(2, 3, { dtype = "int32" }), nibble.zeros({ 2, 3 }, { dtype = "int32" }),
      nibble.empty(2, 3, { dtype = "int32" }), nibble.empty({ 2, 3 }, { dtype = "int32" }),
      nibble.full({ 2, 3 }, 1, { dtype = "int32" }), nibble.randint(0, 9, { 2, 3 }, { dtype = "int32" }),
    }) do
      assert.same({ 2, 3 }, t.shape)
      assert.equal("int32", t.dtype)
      assert.same({ 3, 1 }, t:stride())
      assert.is_true(t:is_contiguous())
    end
    assert.same({ 5 }, nibble.full(5, 1).shape)
    assert.same({ 5 }, nibble.randint(0, 9, 5).shape)
    assert.same({}, nibble.full({}, 1).shape)
  end)

  it("gives float32 where nothing else is said", function()
    assert.equal("float32", nibble.zeros(1).dtype)
    assert.equal("float32", nibble.empty(1).dtype)
    assert.equal("float32", nibble.randn(1).dtype)
    assert.equal("float32", nibble.full(1, 1.5).dtype)
    assert.equal("int64", nibble.full(1, 1).dtype)
    assert.equal("int64", nibble.randint(0, 2, 1).dtype)
    assert.equal("int64", nibble.randperm(1).dtype)
  end)

  it("by zeros is zero bytes in every dtype", function()
    for _, dtype in ipairs(DTYPES) do
      assert.equal(("\0"):rep(6 * SIZE[dtype]), nibble.zeros(2, 3, { dtype = dtype }):bytes())
    end
  end)

  it("by full puts the same value everywhere", function()
    for _, dtype in ipairs(DTYPES) do
      assert.same({ { 5, 5 }, { 5, 5 } }, nibble.full({ 2, 2 }, 5, { dtype = dtype }):totable(), dtype)
    end
  end)

  it("works with sizes of 0 in any dimension", function()
    for _, shape in ipairs({ { 0 }, { 0, 3 }, { 3, 0 }, { 2, 0, 4 }, { 0, 0 } }) do
      for _, t in ipairs({ nibble.zeros(shape), nibble.empty(shape), nibble.full(shape, 1), nibble.randn(shape),
        nibble.from_bytes("", shape, { dtype = "uint8" }) }) do
        assert.same(shape, t.shape)
        assert.equal(0, t:numel())
        assert.equal("", t:bytes())
        assert.is_true(t:is_contiguous())
        assert.is_true(t:equal(t:clone()))
        assert.equal(0, t:amax())
        assert.is_string(tostring(t))
      end
    end
  end)

  it("gives 8 dimensions at most", function()
    local t = nibble.arange(256):view(2, 2, 2, 2, 2, 2, 2, 2)
    assert.equal(8, t:dim())
    assert.equal(255, t[{ 2, 2, 2, 2, 2, 2, 2, 2 }])
    assert.equal(85, t[{ 1, 2, 1, 2, 1, 2, 1, 2 }])
  end)
end)

describe("arange #quick", function()
  it("counts up to, not including, the end", function()
    assert.same({ 0, 1, 2, 3 }, nibble.arange(4):totable())
    assert.same({ 2, 3, 4 }, nibble.arange(2, 5):totable())
    assert.same({ 1, 4, 7 }, nibble.arange(1, 10, 3):totable())
    assert.same({ 1, 4, 7, 10 }, nibble.arange(1, 11, 3):totable())
    assert.same({ 5, 3, 1 }, nibble.arange(5, 0, -2):totable())
    assert.same({}, nibble.arange(0):totable())
    assert.same({}, nibble.arange(5, 5):totable())
    assert.same({}, nibble.arange(5, 2):totable())
    assert.same({}, nibble.arange(2, 5, -1):totable())
  end)

  it("is int64 for integers and float32 otherwise, unless told", function()
    assert.equal("int64", nibble.arange(3).dtype)
    assert.equal("float32", nibble.arange(3.5).dtype)
    assert.equal("float32", nibble.arange(0, 1, 0.25).dtype)
    assert.equal("uint16", nibble.arange(3, { dtype = "uint16" }).dtype)
    assert.same({ 0, 0.25, 0.5, 0.75 }, nibble.arange(0, 1, 0.25):totable())
    assert.same({ 0, 1, 2 }, nibble.arange(3, { dtype = "bfloat16" }):totable())
  end)

  it("spans more than the largest float64", function()
    assert.equal(2, #nibble.arange(-1e308, 1e308, 1e308))
    assert.equal(2, #nibble.arange(1e308, -1e308, -1e308))
  end)

  it("computes start + i * step in float64 and rounds once", function()
    local t = nibble.arange(0, 100, 0.1):totable()
    assert.equal(1000, #t)
    for i = 1, #t do
      local exact = 0 + (i - 1) * 0.1
      assert.equal(string.unpack("<f", string.pack("<f", exact)), t[i])
    end
  end)

  it("reaches the ends of int64", function()
    local top = math.maxinteger
    assert.same({ top - 2, top - 1 }, nibble.arange(top - 2, top):totable())
    assert.same({ math.mininteger, -1, top - 1 }, nibble.arange(math.mininteger, top, top):totable())
  end)
end)

describe("from_bytes and bytes #quick", function()
  it("are inverse for every dtype, bit for bit", function()
    local raw = {}
    for i = 0, 255 do raw[#raw + 1] = string.char(i, (i * 7 + 3) % 256) end
    raw = table.concat(raw)
    for _, dtype in ipairs(DTYPES) do
      local t = nibble.from_bytes(raw, { 512 // SIZE[dtype] }, { dtype = dtype })
      assert.equal(raw, t:bytes(), dtype)
      assert.equal(raw, t:clone():bytes(), dtype)
    end
  end)

  it("read little-endian elements row by row", function()
    local t = nibble.from_bytes(string.pack("<i4i4i4i4", 1, -2, 3, -4), { 2, 2 }, { dtype = "int32" })
    assert.same({ { 1, -2 }, { 3, -4 } }, t:totable())
    assert.same({ 1.5, -2 }, nibble.from_bytes(string.pack("<ff", 1.5, -2), 2, { dtype = "float32" }):totable())
    assert.same({ 1, -2 }, nibble.from_bytes("\x80\x3f\x00\xc0", 2, { dtype = "bfloat16" }):totable())
    assert.same({ 1, -2 }, nibble.from_bytes("\x00\x3c\x00\xc0", 2, { dtype = "float16" }):totable())
    assert.same({ 1, -2, 448 }, nibble.from_bytes("\x38\xc0\x7e", 3, { dtype = "float8_e4m3fn" }):totable())
  end)

  it("give a view's elements in its own order", function()
    local t = nibble.arange(6, { dtype = "uint8" }):view(2, 3)
    assert.equal("\0\3\1\4\2\5", t:transpose(1, 2):bytes())
    assert.equal("\1\4", t:select(2, 2):bytes())
    assert.equal("\1\2\4\5", t:narrow(2, 2, 2):bytes())
    assert.equal("\4\4\4", t:narrow(1, 2, 1):narrow(2, 2, 1):expand(1, 3):bytes())
  end)

  it("do not share memory with the string", function()
    local t = nibble.from_bytes("abc", 3, { dtype = "uint8" })
    local before = t:bytes()
    t:fill(0)
    assert.equal("abc", before)
    assert.equal("\0\0\0", t:bytes())
  end)
end)

describe("elements #quick", function()
  it("are read by t[i] in one dimension and t[{i, j}] in more", function()
    local v = nibble.arange(10, 13)
    assert.equal(10, v[1])
    assert.equal(12, v[3])
    local t = nibble.arange(6):view(2, 3)
    assert.equal(0, t[{ 1, 1 }])
    assert.equal(5, t[{ 2, 3 }])
    assert.equal(11, v[{ 2 }])
  end)

  it("come as views when indices are missing", function()
    local t = nibble.arange(24):view(2, 3, 4)
    assert.same({ 3, 4 }, t[2].shape)
    assert.same({ 4 }, t[{ 2, 3 }].shape)
    assert.same({ 20, 21, 22, 23 }, t[2][3]:totable())
    assert.equal(23, t[2][3][4])
    t[{ 2, 3 }]:fill(-1)
    assert.equal(-1, t[{ 2, 3, 4 }])
  end)

  it("are written by t[i] = v", function()
    local v = nibble.zeros(3, { dtype = "int32" })
    v[2] = 7
    assert.same({ 0, 7, 0 }, v:totable())
    local t = nibble.zeros(2, 3, { dtype = "bfloat16" })
    t[{ 2, 1 }] = 1.5
    assert.same({ { 0, 0, 0 }, { 1.5, 0, 0 } }, t:totable())
    t[1] = 2
    assert.same({ { 2, 2, 2 }, { 1.5, 0, 0 } }, t:totable())
    t[2] = nibble.tensor({ 4, 5, 6 })
    assert.same({ { 2, 2, 2 }, { 4, 5, 6 } }, t:totable())
    t[{ 1, 3 }] = nibble.tensor(9)
    assert.same({ 2, 2, 9 }, t[1]:totable())
  end)

  it("of one tensor of one element are given by item", function()
    assert.equal(3, nibble.tensor({ { { 3 } } }):item())
    assert.equal(0.25, nibble.full({ 1, 1 }, 0.25):item())
  end)

  it("number the first dimension with #", function()
    assert.equal(4, #nibble.zeros(4, 2))
    assert.equal(0, #nibble.zeros(0, 2))
    assert.equal(3, #nibble.zeros(4, 3):select(1, 2))
  end)
end)

describe("properties #quick", function()
  it("are shape, dtype and device, with shape a fresh table", function()
    local t = nibble.zeros(2, 3, { dtype = "int8" })
    local shape = t.shape
    shape[1] = 99
    assert.same({ 2, 3 }, t.shape)
    assert.equal("int8", t.dtype)
    assert.equal(nibble.device(), t.device)
    assert.equal(6, t:numel())
    assert.equal(2, t:dim())
  end)

  it("cannot be written", function()
    local t = nibble.zeros(2, 3)
    for _, field in ipairs({ "shape", "dtype", "device", "numel", "anything" }) do
      assert.has_error(function() t[field] = 1 end)
    end
    assert.same({ 2, 3 }, t.shape)
    assert.equal("float32", t.dtype)
  end)
end)

describe("copy #quick", function()
  it("keeps the values between any two views of the same dtype, bit for bit", function()
    local source = nibble.randint(0, 256, { 4, 6 }, { dtype = "uint8", seed = 1 })
    for _, dtype in ipairs({ "uint8", "float8_e4m3fn" }) do
      local from = source:reinterpret(dtype):transpose(1, 2)
      local into = nibble.zeros(12, 8, { dtype = dtype })
      local view = into:as_strided({ 6, 4 }, { 16, 2 }, 1)
      assert.equal(view, view:copy(from))
      assert.equal(from:bytes(), view:bytes())
      -- What lies between the view's elements stays as it was.
      local count = 0
      for byte in into:bytes():gmatch("[^\0]") do count = count + (byte and 1 or 0) end
      assert.is_true(count <= 24)
      assert.equal(("\0"):rep(12), into:as_strided({ 12 }, { 8 }):bytes())
    end
  end)

  it("keeps the bits of NaNs between tensors of the same dtype", function()
    local raw = { float32 = string.pack("<I4I4", 0xffc12345, 0x7f800001),
      float16 = string.pack("<I2I2", 0xfe01, 0x7c01),
      bfloat16 = string.pack("<I2I2", 0xffc1, 0x7f81), float8_e4m3fn = "\xff\x7f" }
    for dtype, bytes in pairs(raw) do
      local t = nibble.from_bytes(bytes, 2, { dtype = dtype })
      assert.equal(bytes, nibble.zeros(2, { dtype = dtype }):copy(t):bytes())
      assert.equal(bytes, nibble.zeros(2, 2, { dtype = dtype }):select(2, 1):copy(t):bytes())
    end
  end)

  it("expands its source to the shape of its target", function()
    local t = nibble.zeros(2, 3, { dtype = "int64" })
    assert.same({ { 1, 2, 3 }, { 1, 2, 3 } }, t:copy(nibble.tensor({ 1, 2, 3 })):totable())
    assert.same({ { 4, 4, 4 }, { 5, 5, 5 } }, t:copy(nibble.tensor({ { 4 }, { 5 } })):totable())
    assert.same({ { 6, 6, 6 }, { 6, 6, 6 } }, t:copy(nibble.tensor(6)):totable())
  end)

  it("within one storage gives what the source held, or is refused", function()
    for _, step in ipairs({ { 1, 2 }, { 2, 1 } }) do
      local t = nibble.arange(1000)
      local want = t:narrow(1, step[1], 999):totable()
      local ok, message = pcall(function() t:narrow(1, step[2], 999):copy(t:narrow(1, step[1], 999)) end)
      if ok then
        assert.same(want, t:narrow(1, step[2], 999):totable())
      else
        assert.is_truthy(message:find("tensor:copy: source: expected ", 1, true), message)
        assert.same(nibble.arange(1000):totable(), t:totable())
      end
    end
    -- Large enough for several threads, and reordered.
    local long = nibble.arange(200000)
    local want = long:narrow(1, 1, 199999):clone()
    assert.is_true(want:equal(long:narrow(1, 2, 199999):copy(long:narrow(1, 1, 199999))))
    local square = nibble.arange(9):view(3, 3)
    assert.same({ { 0, 3, 6 }, { 1, 4, 7 }, { 2, 5, 8 } }, square:copy(square:transpose(1, 2)):totable())
    -- A tensor onto itself is no overlap that could matter.
    local same = nibble.arange(4)
    assert.same({ 0, 1, 2, 3 }, same:copy(same):totable())
  end)

  it("of nothing into nothing does nothing", function()
    local t = nibble.zeros(0, 3)
    assert.equal(t, t:copy(nibble.zeros(0, 3, { dtype = "int8" })))
    assert.equal(t, t:fill(1))
  end)
end)

describe("fill #quick", function()
  it("writes a view and nothing else, in every dtype", function()
    for _, dtype in ipairs(DTYPES) do
      local t = nibble.zeros(4, 5, { dtype = dtype })
      local view = t:narrow(2, 2, 3):narrow(1, 2, 2)
      assert.equal(view, view:fill(3))
      assert.same({ { 0, 0, 0, 0, 0 }, { 0, 3, 3, 3, 0 }, { 0, 3, 3, 3, 0 }, { 0, 0, 0, 0, 0 } }, t:totable(), dtype)
    end
  end)

  it("rounds as a conversion does", function()
    assert.equal(448, nibble.zeros(1, { dtype = "float8_e4m3fn" }):fill(1e9):item())
    assert.equal(math.huge, nibble.zeros(1, { dtype = "float16" }):fill(65520):item())
    assert.equal(65504, nibble.zeros(1, { dtype = "float16" }):fill(65519):item())
    assert.equal("\xff\x7f", nibble.zeros(1, { dtype = "float16" }):fill(0 / 0):bytes())
    assert.equal("\x7f", nibble.zeros(1, { dtype = "float8_e4m3fn" }):fill(0 / 0):bytes())
    assert.equal("\xff\xff\xff\x7f", nibble.zeros(1):fill(-(0 / 0)):bytes())
  end)
end)

describe("clone, contiguous and to #quick", function()
  it("copy only where something changes, but clone always", function()
    local t = nibble.arange(6):view(2, 3)
    assert.is_true(t:contiguous() == t)
    assert.is_true(t:to("int64") == t)
    assert.is_true(t:to(t.device) == t)
    assert.is_false(t:clone() == t)
    local turned = t:transpose(1, 2)
    local compact = turned:contiguous()
    assert.is_false(compact == turned)
    assert.same({ 2, 1 }, compact:stride())
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, compact:totable())
    assert.same({ 2, 1 }, turned:clone():stride())
    t:fill(9)
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, compact:totable())
  end)

  it("call a row of a compact tensor contiguous and a column not", function()
    local t = nibble.zeros(4, 5)
    assert.is_true(t:select(1, 3):is_contiguous())
    assert.is_false(t:select(2, 3):is_contiguous())
    assert.is_true(t:narrow(1, 2, 2):is_contiguous())
    assert.is_false(t:narrow(2, 2, 2):is_contiguous())
    assert.is_false(t:narrow(2, 1, 1):expand(4, 5):is_contiguous())
    assert.is_true(t:narrow(2, 1, 1):narrow(1, 1, 1):is_contiguous())
  end)

  it("convert", function()
    local t = nibble.tensor({ 1.75, -1.75, 300 })
    assert.same({ 1, -1, 300 }, t:to("int32"):totable())
    assert.same({ 1, 0, 255 }, t:to("uint8"):totable())
    assert.equal("bfloat16", t:to("bfloat16").dtype)
    assert.equal(t.device, t:to("bfloat16").device)
  end)
end)

describe("comparisons #quick", function()
  it("by == ask for the same view of the same storage", function()
    local t = nibble.arange(6):view(2, 3)
    assert.is_true(t == t:view(2, 3))
    assert.is_true(t[1] == t:select(1, 1))
    assert.is_false(t[1] == t[2])
    assert.is_false(t == t:view(3, 2))
    assert.is_false(t == t:transpose(1, 2))
    assert.is_false(t == t:clone())
    assert.is_false(t:reinterpret("int32") == t)
    assert.is_false(nibble.zeros(2, { dtype = "int32" }) == nibble.zeros(2, { dtype = "int32" }))
    assert.is_false(t == 1)
    assert.is_false(t == nil)
    assert.is_false(t == nibble.current_stream())
  end)

  it("by equal ask for the same shape, dtype and bits", function()
    local t = nibble.tensor({ 0 / 0, 1, 0.0 })
    assert.is_true(t:equal(t:clone()))
    assert.is_false(t:equal(nibble.tensor({ 0 / 0, 1, -0.0 })))
    assert.is_false(t:equal(nibble.tensor({ 0 / 0, 2, 0.0 })))
    assert.is_false(nibble.zeros(2, 3):equal(nibble.zeros(3, 2)))
    assert.is_false(nibble.zeros(2):equal(nibble.zeros(2, { dtype = "int32" })))
    local m = nibble.arange(6):view(2, 3)
    assert.is_true(m:transpose(1, 2):equal(nibble.tensor({ { 0, 3 }, { 1, 4 }, { 2, 5 } })))
  end)

  it("by allclose take |a - b| <= atol + rtol * |b|", function()
    local a, b = nibble.tensor({ 1.0, 100.0 }), nibble.tensor({ 1.0, 101.0 })
    assert.is_false(a:allclose(b))
    assert.is_true(a:allclose(b, { rtol = 0.01 }))
    assert.is_false(a:allclose(b, { rtol = 0.0099 }))
    assert.is_true(a:allclose(b, { atol = 1, rtol = 0 }))
    assert.is_false(a:allclose(b, { atol = 0.999, rtol = 0 }))
    -- The tolerance is relative to the second tensor.
    local x, y = nibble.tensor({ 0.0 }), nibble.tensor({ 1.0 })
    assert.is_true(x:allclose(y, { rtol = 1, atol = 0 }))
    assert.is_false(y:allclose(x, { rtol = 1, atol = 0 }))
    assert.is_true(nibble.tensor({ 1, 2 }):allclose(nibble.tensor({ 1.0, 2.0 }, { dtype = "bfloat16" })))
  end)

  it("by allclose let a NaN equal a NaN only when told", function()
    local t = nibble.tensor({ 0 / 0, 1 })
    assert.is_false(t:allclose(t))
    assert.is_true(t:allclose(t, { equal_nan = true }))
    assert.is_false(t:allclose(nibble.tensor({ 1.0, 1.0 }), { equal_nan = true }))
    local inf = nibble.tensor({ math.huge, -math.huge })
    assert.is_true(inf:allclose(inf))
    assert.is_false(inf:allclose(nibble.tensor({ -math.huge, math.huge })))
    assert.is_false(nibble.tensor({ 1.0 }):allclose(nibble.tensor({ math.huge })))
  end)

  it("by max_error say how far and where first", function()
    local a = nibble.tensor({ { 1.0, 2.0 }, { 3.0, 4.0 } })
    local b = nibble.tensor({ { 1.0, 2.5 }, { 3.5, 4.0 } })
    local worst, index = a:max_error(b)
    assert.equal(0.5, worst)
    assert.same({ 1, 2 }, index)
    local none, where = a:max_error(a)
    assert.equal(0, none)
    assert.same({ 1, 1 }, where)
    assert.same({ 0 }, { nibble.zeros(0):max_error(nibble.zeros(0)) })
    local inf = nibble.tensor({ math.huge, 1.0 })
    assert.equal(0, (inf:max_error(inf)))
    assert.equal(math.huge, (inf:max_error(nibble.tensor({ 1.0, 1.0 }))))
  end)

  it("by max_error give NaN when any difference is", function()
    local a = nibble.tensor({ 1.0, 0 / 0, 50.0 })
    local worst, index = a:max_error(nibble.tensor({ 1.0, 1.0, 1.0 }))
    assert.is_true(worst ~= worst)
    assert.same({ 2 }, index)
  end)

  it("by amax skip NaN", function()
    assert.equal(3, nibble.tensor({ 1.0, -3.0, 0 / 0, 2.0 }):amax())
    assert.equal(0, nibble.tensor({ 0 / 0 }):amax())
    assert.equal(math.huge, nibble.tensor({ 1.0, -math.huge }):amax())
    assert.equal(5, nibble.tensor({ { 1.0, 5.0 }, { 2.0, 4.0 } }, { dtype = "bfloat16" }):transpose(1, 2):amax())
    assert.equal(2, nibble.tensor({ { 1.0, 5.0 }, { 2.0, 4.0 } }, { dtype = "float16" }):select(2, 1):amax())
  end)
end)

describe("tostring #quick", function()
  it("shows values, shape, dtype and device", function()
    local text = tostring(nibble.tensor({ { 1.5, -2 }, { 3, 4 } }, { dtype = "bfloat16" }))
    for _, part in ipairs({ "1.5", "-2", "3", "4", "bfloat16", nibble.device() }) do
      assert.is_truthy(text:find(part, 1, true), text)
    end
    assert.matches("2[^%d]+2[^\n]*bfloat16", text)
    assert.is_truthy(tostring(nibble.tensor({ 1, 2, 300 })):find("300", 1, true))
    assert.is_truthy(tostring(nibble.tensor(41)):find("41", 1, true))
  end)

  it("elides what is large", function()
    local text = tostring(nibble.arange(1000000):view(1000, 1000))
    assert.is_true(#text < 8000, #text)
    assert.is_truthy(text:find("...", 1, true))
    assert.is_truthy(text:find("999999", 1, true), "the last element is shown")
    assert.is_truthy(text:find("1000", 1, true))
    assert.is_true(#tostring(nibble.zeros(10, 10, 10, 10, 10)) < 20000)
  end)

  it("shows every kind of value", function()
    local text = tostring(nibble.tensor({ 0 / 0, math.huge, -math.huge, 1e-30, 1e30 }))
    assert.matches("nan", text)
    assert.matches("inf", text)
    assert.matches("%-inf", text)
    assert.matches("e%-30", text)
    local bytes = tostring(nibble.tensor({ 0, 255 }, { dtype = "uint8" }))
    assert.is_truthy(bytes:find("255", 1, true))
    local big = tostring(nibble.tensor({ math.mininteger, math.maxinteger }))
    assert.is_truthy(big:find("-9223372036854775808", 1, true), big)
    assert.is_truthy(big:find("9223372036854775807", 1, true), big)
  end)
end)

describe("close #quick", function()
  it("releases the storage, by a call, by <close> and by the collector", function()
    nibble.synchronize()
    collectgarbage()
    collectgarbage()
    local used = nibble.memory().used
    local t = nibble.zeros(1024)
    assert.is_true(nibble.memory().used >= used + 4096)
    t:close()
    t:close()
    nibble.synchronize()
    assert.equal(used, nibble.memory().used)
    do
      local scoped <close> = nibble.zeros(1024)
      assert.is_true(nibble.memory().used >= used + scoped:numel() * 4)
    end
    nibble.synchronize()
    assert.equal(used, nibble.memory().used)
    t = nibble.zeros(1024)
    assert.is_true(nibble.memory().used >= used + t:numel() * 4)
    t = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    nibble.synchronize()
    assert.equal(used, nibble.memory().used)
  end)

  it("leaves other views alone", function()
    local t = nibble.arange(6)
    local view = t:narrow(1, 3, 2)
    t:close()
    assert.same({ 2, 3 }, view:totable())
    view:fill(7)
    assert.same({ 7, 7 }, view:totable())
  end)

  it("does not take away what queued work still needs", function()
    local out = nibble.zeros(1000, { dtype = "int64" })
    for _ = 1, 50 do
      local source = nibble.arange(1000)
      out:copy(source)
      source:close()
    end
    assert.same(nibble.arange(1000):totable(), out:totable())
  end)

  it("makes tostring say closed", function()
    local t = nibble.zeros(2)
    t:close()
    local _, text = pcall(tostring, t)
    assert.matches("closed", text)
  end)
end)
