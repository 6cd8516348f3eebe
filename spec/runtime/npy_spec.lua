-- `.npy` files: what save writes and load reads, and that a damaged file is an error in words.
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

local NUMPY = { float32 = "<f4", float16 = "<f2", bfloat16 = "<u2", float8_e4m3fn = "|u1", uint8 = "|u1", int8 = "|i1",
  uint16 = "<u2", int32 = "<i4", int64 = "<i8" }
local SIZE = { float32 = 4, float16 = 2, bfloat16 = 2, float8_e4m3fn = 1, uint8 = 1, int8 = 1, uint16 = 2, int32 = 4,
  int64 = 8 }

local path

local function write(text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- A file as NumPy lays it out. `header`: a string, or {descr, shape text, fortran_order}.
local function npy(header, data, version)
  version = version or 1
  if type(header) == "table" then
    header = ("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"):format(header[1], header[3] and "True" or "False",
      header[2])
  end
  local width = version == 1 and 2 or 4
  header = header .. (" "):rep(-(8 + width + #header + 1) % 64) .. "\n"
  return "\x93NUMPY" .. string.char(version, 0) .. string.pack("<I" .. width, #header) .. header .. data
end

local function load(text, opts)
  write(text)
  return nibble.load(path, opts)
end

describe("save #quick", function()
  setup(function() path = os.tmpname() end)
  teardown(function() os.remove(path) end)

  it("writes version 1.0 with a header that ends at a multiple of 64, then the elements", function()
    for dtype, descr in pairs(NUMPY) do
      local t = nibble.randint(0, 100, { 3, 5 }, { dtype = dtype, seed = 1 })
      assert.is_true(t:save(path))
      local text = process.read(path)
      assert.equal("\x93NUMPY\1\0", text:sub(1, 8))
      local length = string.unpack("<I2", text, 9)
      assert.equal(0, (10 + length) % 64)
      local header = text:sub(11, 10 + length)
      assert.matches("^{'descr': '[<|][fui]%d', 'fortran_order': False, 'shape': %(3, 5%), *} *\n$", header)
      assert.is_truthy(header:find("'" .. descr .. "'", 1, true), header)
      assert.equal(t:bytes(), text:sub(11 + length))
    end
  end)

  it("writes shapes as Python tuples", function()
    for shape, text in pairs({ [{}] = "()", [{ 3 }] = "(3,)", [{ 0 }] = "(0,)", [{ 2, 0, 4 }] = "(2, 0, 4)",
      [{ 1, 1, 1, 1, 1, 1, 1, 2 }] = "(1, 1, 1, 1, 1, 1, 1, 2)" }) do
      assert.is_true(nibble.full(shape, 1):save(path))
      assert.is_truthy(process.read(path):find("'shape': " .. text, 1, true), text)
      assert.same(shape, nibble.load(path).shape)
    end
  end)

  it("writes views row by row", function()
    local t = nibble.arange(6, { dtype = "uint8" }):view(2, 3):transpose(1, 2)
    assert.is_true(t:save(path))
    assert.equal("\0\3\1\4\2\5", process.read(path):sub(-6))
    assert.is_true(nibble.load(path):equal(t))
  end)

  it("replaces a file, also by a shorter one", function()
    nibble.zeros(1000):save(path)
    nibble.tensor({ 5 }):save(path)
    assert.same({ 5 }, nibble.load(path):totable())
    assert.equal(128 + 8, #process.read(path))
  end)

  it("waits for the work that writes the tensor", function()
    local s = nibble.stream()
    local t
    s:scope(function()
      for _ = 1, 20 do t = nibble.randn(20000, { seed = 1 }) end
      t:fill(3)
    end)
    assert.is_true(t:save(path))
    assert.is_true(nibble.load(path):equal(nibble.full(20000, 3.0)))
  end)

  it("to a place that cannot be written gives nil and a message that names it", function()
    for _, place in ipairs({ "/nonexistent/folder/x.npy", "/", "" }) do
      local ok, message = nibble.zeros(2):save(place)
      assert.is_nil(ok)
      assert.is_string(message)
      assert.is_truthy(message:find(place, 1, true), message)
    end
  end)

  it("to a full device gives nil and a message", function()
    if not io.open("/dev/full", "r") then return pending("there is no /dev/full here") end
    for _, count in ipairs({ 1, 100000 }) do
      local ok, message = nibble.zeros(count):save("/dev/full")
      assert.is_nil(ok, count)
      assert.matches("/dev/full", message)
    end
  end)
end)

describe("load #quick", function()
  setup(function() path = os.tmpname() end)
  teardown(function() os.remove(path) end)

  it("gives back what save wrote, bit for bit", function()
    local bytes = {}
    for i = 0, 255 do bytes[#bytes + 1] = string.char(i, (i * 37 + 11) % 256) end
    bytes = table.concat(bytes)
    for dtype, size in pairs(SIZE) do
      local t = nibble.from_bytes(bytes, { 2, 256 // size }, { dtype = dtype })
      t:save(path)
      local back = nibble.load(path, { dtype = dtype })
      assert.equal(dtype, back.dtype)
      assert.is_true(back:equal(t))
      if dtype ~= "bfloat16" and dtype ~= "float8_e4m3fn" then assert.is_true(nibble.load(path):equal(t), dtype) end
    end
  end)

  it("reads every element type, in versions 1, 2 and 3", function()
    for version = 1, 3 do
      for descr, case in pairs({
        ["<f4"] = { "float32", "<f" }, ["|u1"] = { "uint8", "B" }, ["|i1"] = { "int8", "b" },
          ["<u2"] = { "uint16", "<I2" },
        ["<i4"] = { "int32", "<i4" }, ["<i8"] = { "int64", "<i8" }, ["<f8"] = { "float32", "<d" },
      }) do
        local data = string.pack(case[2], 1) .. string.pack(case[2], 100)
        local t = load(npy({ descr, "(2,)" }, data, version))
        assert.equal(case[1], t.dtype)
        assert.same({ 1, 100 }, t:totable())
      end
      local half = load(npy({ "<f2", "(2,)" }, "\x00\x3c\x00\xc0", version))
      assert.equal("float16", half.dtype)
      assert.same({ 1, -2 }, half:totable())
    end
  end)

  it("rounds float64 to float32, once, to nearest even", function()
    local values = { 1 + 2.0 ^ -24, 1 + 3 * 2.0 ^ -24, 1 + 2.0 ^ -24 + 2.0 ^ -50, 1e300, -1e300, 2.0 ^ -149, 2.0 ^ -151,
      -0.0 }
    local data = {}
    for i, value in ipairs(values) do data[i] = string.pack("<d", value) end
    local t = load(npy({ "<f8", "(8,)" }, table.concat(data)))
    assert.equal("float32", t.dtype)
    assert.same({ 1, 1 + 2.0 ^ -22, 1 + 2.0 ^ -23, math.huge, -math.huge, 2.0 ^ -149, 0, 0 }, t:totable())
    assert.equal(-math.huge, 1 / t[8])
    assert.equal("\xff\xff\xff\x7f", load(npy({ "<f8", "(1,)" }, string.pack("<d", 0 / 0))):bytes())
  end)

  it("reads Fortran order", function()
    local t = load(npy({ "|u1", "(2, 3)", true }, "\0\1\2\3\4\5"))
    assert.same({ { 0, 2, 4 }, { 1, 3, 5 } }, t:totable())
    local cube = load(npy({ "<i4", "(2, 3, 4)", true }, string.pack(("<" .. ("i4"):rep(24)), table.unpack((function()
      local list = {}
      for i = 1, 24 do list[i] = i end
      return list
    end)()))))
    for i = 1, 2 do
      for j = 1, 3 do
        for k = 1, 4 do assert.equal(i + (j - 1) * 2 + (k - 1) * 6, cube[{ i, j, k }]) end
      end
    end
    assert.same({ 7, 8 }, load(npy({ "|u1", "(2,)", true }, "\7\8")):totable())
    assert.same({ { 1, 3 }, { 2, 4 } },
      load(npy({ "<u2", "(2, 2)", true }, "\x80\x3f\x00\x40\x40\x40\x80\x40"), { dtype = "bfloat16" }):totable())
  end)

  it("reads shapes without dimensions and with sizes of 0", function()
    assert.equal(5, load(npy({ "<i8", "()" }, string.pack("<i8", 5))):item())
    assert.same({ 0 }, load(npy({ "<i8", "(0,)" }, "")).shape)
    assert.same({ 3, 0, 2 }, load(npy({ "<f4", "(3, 0, 2)" }, "")).shape)
  end)

  it("reads headers as other writers lay them out", function()
    for _, header in ipairs({
      "{'shape': (2,), 'fortran_order': False, 'descr': '<i4'}",
      "{'descr':'<i4','fortran_order':False,'shape':(2,)}",
      '{"descr": "<i4", "fortran_order": False, "shape": (2,)}',
      "{ 'descr' : '<i4' , 'fortran_order' : False , 'shape' : ( 2 , ) , }",
    }) do
      assert.same({ 3, 4 }, load(npy(header, string.pack("<i4i4", 3, 4))):totable(), header)
    end
  end)

  it("reads the same bits as another dtype of the same size when told", function()
    assert.same({ 1, -2 }, load(npy({ "<u2", "(2,)" }, "\x80\x3f\x00\xc0"), { dtype = "bfloat16" }):totable())
    assert.same({ 1, -2 }, load(npy({ "<u2", "(2,)" }, "\x00\x3c\x00\xc0"), { dtype = "float16" }):totable())
    assert.same({ 1, 448 }, load(npy({ "|u1", "(2,)" }, "\x38\x7e"), { dtype = "float8_e4m3fn" }):totable())
    assert.same({ 0x3f800000 }, load(npy({ "<f4", "(1,)" }, string.pack("<f", 1)), { dtype = "int32" }):totable())
    assert.same({ 1 }, load(npy({ "<f4", "(1,)" }, string.pack("<f", 1)), { dtype = "float32" }):totable())
  end)

  it("refuses a dtype of another size", function()
    for _, case in ipairs({ { "<u2", "float32" }, { "<u2", "uint8" }, { "|u1", "bfloat16" }, { "<i8", "float32" } }) do
      write(npy({ case[1], "(0,)" }, ""))
      local ok, message = pcall(nibble.load, path, { dtype = case[2] })
      assert.is_false(ok)
      assert.matches("load: [%w.]*dtype: expected .+, got .+", message)
    end
  end)

  it("puts the tensor on the device that is asked for", function()
    write(npy({ "|u1", "(2,)" }, "ab"))
    assert.equal("cpu", nibble.load(path, { device = "cpu" }).device)
    assert.equal(nibble.device(), nibble.load(path).device)
  end)

  it("gives nil and a message for a file that cannot be opened", function()
    for _, place in ipairs({ "/nonexistent/folder/x.npy", "", "x\n" }) do
      local t, message = nibble.load(place)
      assert.is_nil(t)
      assert.is_string(message)
      assert.is_truthy(message:find(place, 1, true), message)
    end
  end)

  it("makes no tensor of a folder", function()
    local ok, t, message = pcall(nibble.load, "/")
    assert.is_true(not ok or t == nil)
    assert.is_string(ok and message or t)
  end)
end)

describe("a damaged file #quick", function()
  setup(function() path = os.tmpname() end)
  teardown(function() os.remove(path) end)

  local good = npy({ "<i4", "(2, 3)" }, ("\0"):rep(24))
  local huge = "(4611686018427387904,)"

  -- What is wrong, and what the message says about it.
  local damages = {
    ["empty"] = "", ["cut in the magic"] = "\x93NUM", ["cut after the magic"] = "\x93NUMPY",
    ["cut in the version"] = "\x93NUMPY\1", ["cut in the length"] = "\x93NUMPY\1\0\64",
    ["another magic"] = "\x93NUMPZ" .. good:sub(7), ["text"] = ("hello world\n"):rep(20),
    ["version 0"] = "\x93NUMPY\0\0" .. good:sub(9), ["version 4"] = "\x93NUMPY\4\0" .. good:sub(9),
    ["cut in the header"] = good:sub(1, 40), ["a header longer than the file"] = "\x93NUMPY\1\0\xff\xff" ..
      good:sub(11),
    ["a header of 4 GiB"] = "\x93NUMPY\2\0\xff\xff\xff\xff" .. good:sub(11),
    ["a header of no length"] = "\x93NUMPY\1\0\0\0" .. ("\0"):rep(24),
    ["no data"] = good:sub(1, -25), ["one byte short"] = good:sub(1, -2),
    ["no dictionary"] = npy("[1, 2, 3]", ("\0"):rep(24)), ["an open dictionary"] = npy("{'descr': '<i4', ", ""),
    ["no descr"] = npy("{'fortran_order': False, 'shape': (2,)}", ("\0"):rep(8)),
    ["no shape"] = npy("{'descr': '<i4', 'fortran_order': False}", ("\0"):rep(8)),
    ["no order"] = npy("{'descr': '<i4', 'shape': (2,)}", ("\0"):rep(8)),
    ["an order that is none"] = npy("{'descr': '<i4', 'fortran_order': Maybe, 'shape': (2,)}", ("\0"):rep(8)),
    ["an open string"] = npy("{'descr': '<i4, 'fortran_order': False, 'shape': (2,)}", ("\0"):rep(8)),
    ["a shape that is a word"] = npy({ "<i4", "two" }, ("\0"):rep(8)),
    ["a shape that is a list"] = npy({ "<i4", "[2]" }, ("\0"):rep(8)),
    ["an open shape"] = npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2,", ("\0"):rep(8)),
    ["a negative size"] = npy({ "<i4", "(-2,)" }, ("\0"):rep(8)),
    ["a size with a fraction"] = npy({ "<i4", "(2.0,)" }, ("\0"):rep(8)),
    ["a size past 2^63"] = npy({ "<i4", "(99999999999999999999999,)" }, ("\0"):rep(8)),
    ["a size of 2^62"] = npy({ "<i4", huge }, ("\0"):rep(8)),
    ["sizes whose product wraps to 0"] = npy({ "<i4", "(4294967296, 4294967296)" }, ""),
    ["sizes whose product wraps to 2"] = npy({ "|u1", "(9223372036854775809, 2)" }, "ab"),
    ["9 dimensions"] = npy({ "|u1", "(1, 1, 1, 1, 1, 1, 1, 1, 1)" }, "a"),
  }
  for _, descr in ipairs({ ">i4", ">f4", ">f8", ">u2", "=i4", "<u4", "<u8", "<i2", "|b1", "<c8", "|O", "<U4", "|S4",
    "<f16",
    "<M8[ns]", "", "i4", "<i", "<i44", "|V4" }) do
    damages["element type " .. descr] = npy({ descr, "(2,)" }, ("\0"):rep(32))
  end
  damages["a structure"] = npy("{'descr': [('a', '<i4'), ('b', '<f4')], 'fortran_order': False, 'shape': (2,)}",
    ("\0"):rep(16))

  for name, text in pairs(damages) do
    it("(" .. name .. ") is an error that names the operation and the file", function()
      write(text)
      nibble.synchronize()
      collectgarbage() -- what earlier specs left behind
      collectgarbage()
      local used = nibble.memory().used
      local ok, message = pcall(nibble.load, path)
      assert.is_false(ok)
      assert.is_string(message)
      assert.is_truthy(message:find("load: ", 1, true), message)
      assert.is_truthy(message:find(path, 1, true), message)
      assert.is_true(#message < 600, "the message is short")
      nibble.synchronize()
      assert.equal(used, nibble.memory().used)
    end)
  end

  it("with big-endian elements says so", function()
    write(npy({ ">f4", "(2,)" }, ("\0"):rep(8)))
    local _, message = pcall(nibble.load, path)
    assert.matches(">f4", message)
    assert.matches("little", message)
  end)

  it("says which element type it cannot read", function()
    write(npy({ "<c16", "(1,)" }, ("\0"):rep(16)))
    local _, message = pcall(nibble.load, path)
    assert.is_truthy(message:find("<c16", 1, true), message)
    write(npy({ "|V3", "(1,)" }, ("\0"):rep(3)))
    assert.error_matches(function() nibble.load(path, { dtype = "uint8" }) end, "|V3", 1, true)
  end)

  it("takes ml_dtypes, bool and integers of other kinds when it is told what they are, as of safetensors", function()
    local bytes = "\0\1\2\3\4\5\6\7"
    for descr, dtypes in pairs {
      ["<V2"] = { "bfloat16", "float16", "uint16" }, ["|V2"] = { "bfloat16" },
        ["|V1"] = { "float8_e4m3fn", "uint8", "int8" },
      ["<V1"] = { "float8_e4m3fn" }, ["<i2"] = { "uint16", "bfloat16" }, ["<u4"] = { "int32", "float32" },
      ["|b1"] = { "int8", "uint8" }, ["<u8"] = { "int64" }, ["<c8"] = { "int64" }, ["<V4"] = { "float32" },
        ["|V8"] = { "int64" },
    } do
      local size = tonumber(descr:sub(3))
      for _, order in ipairs { false, true } do
        write(npy({ descr, ("(1, %d)"):format(8 // size), order }, bytes))
        for _, dtype in ipairs(dtypes) do
          local t = nibble.load(path, { dtype = dtype })
          assert.same({ dtype, { 1, 8 // size }, bytes }, { t.dtype, t.shape, t:bytes() }, descr)
        end
        assert.error_matches(function() nibble.load(path, { dtype = size == 2 and "uint8" or "float16" }) end,
          "load: dtype: expected a dtype as large as the file's " .. (descr == "|b1" and "uint8" or descr:sub(2)))
        if descr == "|b1" then
          assert.equal("uint8", nibble.load(path).dtype)
        else
          assert.error_matches(function() nibble.load(path) end, "or the option dtype, got " ..
            descr:sub(2))
        end
      end
    end
  end)

  it("refuses a shape that nothing can have, though it has no elements", function()
    for _, shape in ipairs { "(0, 288230376151711744, 288230376151711744)", "(288230376151711744, 32, 0)" } do
      write(npy({ "<f4", shape }, ""))
      assert.error_matches(function() nibble.load(path) end, "expected a shape of less than 2^62 bytes", 1, true)
    end
  end)

end)

describe("a damaged file", function()
  setup(function() path = os.tmpname() end)
  teardown(function() os.remove(path) end)

  it("never does more than raise, whatever byte of it is changed or cut", function()
    local base = npy({ "<u2", "(2, 3)" }, "abcdefghijkl")
    local loaded, refused = 0, 0
    local function try(text)
      write(text)
      local ok, t = pcall(nibble.load, path)
      if ok then
        loaded = loaded + 1
        assert.equal(t:numel() * 2, #t:to("uint16"):bytes())
      else
        refused = refused + 1
        assert.is_string(t)
      end
    end
    for at = 1, #base do
      for _, byte in ipairs(at <= 70 and { 0, 1, 0x27, 0x28, 0x2d, 0x39, 0x7f, 0xff } or {}) do
        try(base:sub(1, at - 1) .. string.char(byte) .. base:sub(at + 1))
      end
      try(base:sub(1, at - 1))
    end
    assert.is_true(loaded > 0 and refused > 100)
  end)
end)
