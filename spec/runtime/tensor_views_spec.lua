-- Views: the same storage under other shapes, strides and dtypes. Each is compared with the elements that its
-- definition names, computed here from nested tables.
local nibble = require("nibble")

local function counting(...)
  local count = 1
  for _, size in ipairs({ ... }) do count = count * size end
  return nibble.arange(count):view(...)
end

describe("narrow #quick", function()
  it("takes length elements from start, in any dimension", function()
    local t = counting(3, 4)
    assert.same({ { 4, 5, 6, 7 }, { 8, 9, 10, 11 } }, t:narrow(1, 2, 2):totable())
    assert.same({ { 1, 2 }, { 5, 6 }, { 9, 10 } }, t:narrow(2, 2, 2):totable())
    assert.same({ 4, 1 }, t:narrow(2, 2, 2):stride())
    assert.is_true(t:narrow(2, 1, 4) == t)
  end)

  it("may be empty, also at the end", function()
    local t = counting(3, 4)
    assert.same({ 0, 4 }, t:narrow(1, 1, 0).shape)
    assert.same({ 0, 4 }, t:narrow(1, 4, 0).shape)
    assert.same({ 3, 0 }, t:narrow(2, 5, 0).shape)
  end)

  it("shares memory", function()
    local t = counting(2, 3)
    t:narrow(2, 2, 1):fill(-1)
    assert.same({ { 0, -1, 2 }, { 3, -1, 5 } }, t:totable())
  end)
end)

describe("select #quick", function()
  it("drops the dimension", function()
    local t = counting(2, 3, 4)
    assert.same({ 2, 4 }, t:select(2, 3).shape)
    assert.same({ { 8, 9, 10, 11 }, { 20, 21, 22, 23 } }, t:select(2, 3):totable())
    assert.same({ 12, 1 }, t:select(2, 3):stride())
    local element = t:select(1, 2):select(1, 3):select(1, 4)
    assert.same({}, element.shape)
    assert.equal(23, element:item())
    element:fill(-5)
    assert.equal(-5, t[{ 2, 3, 4 }])
  end)
end)

describe("view #quick", function()
  it("keeps row-major order", function()
    local t = counting(2, 6)
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 }, { 6, 7, 8 }, { 9, 10, 11 } }, t:view(4, 3):totable())
    assert.same(t:totable(), t:view(12):view({ 2, 6 }):totable())
    assert.same({ 2, 1, 6, 1 }, t:view(2, 1, 6, 1).shape)
    assert.same({ 0, 5 }, nibble.zeros(5, 0):view(0, 5).shape)
  end)

  it("finds a size of -1", function()
    local t = counting(2, 6)
    assert.same({ 3, 4 }, t:view(3, -1).shape)
    assert.same({ 12 }, t:view(-1).shape)
    assert.same({ 1, 12 }, t:view({ -1, 12 }).shape)
  end)

  it("goes to and from no dimensions", function()
    assert.same({}, nibble.zeros(1, 1):view({}).shape)
    assert.same({ 1, 1 }, nibble.tensor(3):view(1, 1).shape)
  end)

  it("works on strided tensors where strides allow it, without a copy", function()
    local t = counting(4, 6)
    local half = t:narrow(2, 1, 4)
    local split = half:view(4, 2, 2)
    assert.same({ 6, 2, 1 }, split:stride())
    split:fill(-1)
    assert.equal(-1, t[{ 4, 4 }])
    assert.equal(5, t[{ 1, 6 }])
    local turned = counting(2, 3):transpose(1, 2)
    assert.same({ 3, 1, 2 }, turned:view(3, 1, 2).shape)
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, turned:view(3, 1, 2):select(2, 1):totable())
    -- Every other row, merged: the step is the same everywhere.
    local rows = counting(4, 6):as_strided({ 2, 2, 6 }, { 12, 6, 1 })
    assert.same({ 24 }, rows:view(24).shape)
  end)
end)

describe("permute and transpose #quick", function()
  it("reorder dimensions and strides", function()
    local t = counting(2, 3, 4)
    local p = t:permute(3, 1, 2)
    assert.same({ 4, 2, 3 }, p.shape)
    assert.same({ 1, 12, 4 }, p:stride())
    for i = 1, 4 do
      for j = 1, 2 do
        for k = 1, 3 do assert.equal(t[{ j, k, i }], p[{ i, j, k }]) end
      end
    end
    assert.is_true(p:permute({ 2, 3, 1 }) == t)
    assert.is_true(t:transpose(1, 3) == t:permute(3, 2, 1))
    assert.is_true(t:transpose(2, 2) == t)
    assert.equal(12, p:stride(2))
  end)

  it("write through", function()
    local t = nibble.zeros(2, 3, { dtype = "int32" })
    t:permute(2, 1):copy(nibble.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }))
    assert.same({ { 1, 3, 5 }, { 2, 4, 6 } }, t:totable())
  end)
end)

describe("expand #quick", function()
  it("repeats dimensions of size 1 with stride 0", function()
    local t = nibble.tensor({ { 1 }, { 2 } })
    local e = t:expand(2, 3)
    assert.same({ { 1, 1, 1 }, { 2, 2, 2 } }, e:totable())
    assert.equal(0, e:stride(2))
    assert.same({ 2, 3 }, t:expand(-1, 3).shape)
    assert.same({ 2, 0 }, t:expand(2, 0).shape)
  end)

  it("adds leading dimensions", function()
    local t = nibble.tensor({ 1, 2 })
    local e = t:expand(3, 2)
    assert.same({ { 1, 2 }, { 1, 2 }, { 1, 2 } }, e:totable())
    assert.same({ 0, 1 }, e:stride())
    assert.same({ 4, 3, 2 }, t:expand({ 4, 3, -1 }).shape)
    assert.same({ 5, 5 }, nibble.tensor(5):expand(2):totable())
  end)

  it("shows later writes", function()
    local t = nibble.tensor({ { 1 }, { 2 } })
    local e = t:expand(2, 2)
    t:fill(7)
    assert.same({ { 7, 7 }, { 7, 7 } }, e:totable())
    assert.same({ { 7, 7 }, { 7, 7 } }, e:contiguous():totable())
  end)
end)

describe("as_strided #quick", function()
  it("gives any view that lies inside the storage", function()
    local t = counting(12)
    assert.same({ { 1, 3 }, { 6, 8 } }, t:as_strided({ 2, 2 }, { 5, 2 }, 1):totable())
    assert.same({ { 0, 1, 2 }, { 1, 2, 3 } }, t:as_strided({ 2, 3 }, { 1, 1 }):totable())
    assert.same({ 11 }, t:as_strided({ 1 }, { 1 }, 11):totable())
    assert.same({ 11 }, t:as_strided({ 1 }, { 1000 }, 11):totable())
    assert.same({ 0 }, t:as_strided({ 0 }, { 1 }, 12).shape)
  end)

  it("gives any stride to what has no elements, or one, and views of that stay where they are", function()
    local t = counting(12)
    local empty = t:as_strided({ 0, 5 }, { 1, math.maxinteger })
    local part = empty:narrow(2, 3, 2)
    assert.same({ 0, 2 }, part.shape)
    assert.same({ 0, 1, 2 }, part:as_strided({ 3 }, { 1 }):totable())
    assert.same({ 2, 3, 0 }, t:as_strided({ 2, 3, 0 }, { math.maxinteger, math.maxinteger, 1 }):fill(7).shape)
    local row = t:as_strided({ 1, 12 }, { math.maxinteger, 1 })
    assert.same({ 0, 12 }, row:narrow(1, 2, 0).shape)
    assert.same({ 1, 96 }, row:reinterpret("uint8").shape)
    assert.same({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, t:totable())
  end)

  it("counts the offset from the tensor's first element, backwards too", function()
    local t = counting(12):narrow(1, 5, 4)
    assert.same({ 5, 6 }, t:as_strided({ 2 }, { 1 }, 1):totable())
    assert.same({ 0, 1, 2, 3 }, t:as_strided({ 4 }, { 1 }, -4):totable())
    assert.same({ 8, 9, 10, 11 }, t:as_strided({ 4 }, { 1 }, 4):totable())
  end)
end)

describe("reinterpret #quick", function()
  it("keeps the bytes and changes the last dimension", function()
    local t = nibble.from_bytes("\0\1\2\3\4\5\6\7\8\9\10\11\12\13\14\15", { 2, 8 }, { dtype = "uint8" })
    for dtype, size in pairs({ uint8 = 1, int8 = 1, float8_e4m3fn = 1, uint16 = 2, float16 = 2, bfloat16 = 2, int32 = 4,
      float32 = 4, int64 = 8 }) do
      local r = t:reinterpret(dtype)
      assert.same({ 2, 8 // size }, r.shape, dtype)
      assert.equal(dtype, r.dtype)
      assert.equal(t:bytes(), r:bytes())
      assert.is_true(r:reinterpret("uint8") == t, dtype)
    end
    assert.same({ { 0x0100, 0x0302, 0x0504, 0x0706 }, { 0x0908, 0x0b0a, 0x0d0c, 0x0f0e } },
      t:reinterpret("uint16"):totable())
  end)

  it("keeps padded rows apart", function()
    local pool = nibble.zeros(3, 24, { dtype = "uint8" })
    local rows = pool:narrow(2, 9, 8)
    local words = rows:reinterpret("int32")
    assert.same({ 3, 2 }, words.shape)
    assert.same({ 6, 1 }, words:stride())
    words:fill(-1)
    local row = ("\0"):rep(8) .. ("\xff"):rep(8) .. ("\0"):rep(8)
    assert.equal(row:rep(3), pool:bytes())
  end)

  it("bears any stride of a dimension that has one index", function()
    local t = nibble.zeros(8):as_strided({ 1, 4 }, { 1 << 62, 1 })
    assert.same({ 1, 16 }, t:reinterpret("uint8").shape)
    assert.same({ 0, 4 }, t:narrow(1, 2, 0).shape)
  end)

  it("between sizes of one byte needs no contiguous dimension", function()
    local t = nibble.zeros(4, 4, { dtype = "uint8" }):select(2, 2)
    assert.same({ 4 }, t:reinterpret("int8").shape)
    assert.same({ 4 }, t:reinterpret("float8_e4m3fn"):stride())
    assert.same({}, nibble.tensor(1.0):reinterpret("int32").shape)
  end)
end)

describe("views of views #quick", function()
  it("address what the definitions say, in a thousand random chains", function()
    -- A chain is applied to a tensor and to a model: shape, strides and offset as plain numbers.
    local seed = 12345
    local function random(low, high)
      seed = (seed * 1103515245 + 12345) % 2147483648
      return low + seed // 65536 % (high - low + 1)
    end
    local shape = { 3, 4, 5 }
    local base = counting(3, 4, 5)
    for _ = 1, 1000 do
      local t = base
      local size, stride, offset = { table.unpack(shape) }, { 20, 5, 1 }, 0
      for _ = 1, random(1, 5) do
        local kind = #size == 0 and 4 or random(1, 4)
        if kind == 1 then
          local dim = random(1, #size)
          local length = random(1, size[dim])
          local start = random(1, size[dim] - length + 1)
          t = t:narrow(dim, start, length)
          offset = offset + (start - 1) * stride[dim]
          size[dim] = length
        elseif kind == 2 then
          local dim = random(1, #size)
          local index = random(1, size[dim])
          t = t:select(dim, index)
          offset = offset + (index - 1) * stride[dim]
          table.remove(size, dim)
          table.remove(stride, dim)
        elseif kind == 3 then
          local a, b = random(1, #size), random(1, #size)
          t = t:transpose(a, b)
          size[a], size[b] = size[b], size[a]
          stride[a], stride[b] = stride[b], stride[a]
        elseif #size < 6 then
          local repeats = random(1, 3)
          local wanted = { repeats, table.unpack(size) }
          t = t:expand(wanted)
          size = wanted
          table.insert(stride, 1, 0)
        end
      end
      assert.same(size, t.shape)
      local expected = {}
      local function walk(dim, at)
        if dim > #size then
          expected[#expected + 1] = string.pack("<i8", at)
          return
        end
        for i = 0, size[dim] - 1 do walk(dim + 1, at + i * stride[dim]) end
      end
      walk(1, offset)
      assert.equal(table.concat(expected), t:bytes())
    end
  end)
end)
