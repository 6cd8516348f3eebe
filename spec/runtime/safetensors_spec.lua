-- `.safetensors` files: what load and list read and save writes, and that a damaged file is an error in words. The
-- files in spec/data/safetensors are of the format's own writer (make.py there).
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

local folder = process.root .. "spec/data/safetensors/"
local expected = dofile(folder .. "expected.lua")

local LOADED = { F32 = "float32", F16 = "float16", BF16 = "bfloat16", F8_E4M3 = "float8_e4m3fn", U8 = "uint8",
  I8 = "int8",
  U16 = "uint16", I32 = "int32", I64 = "int64", F64 = "float32", BOOL = "uint8" }
-- As which dtypes the bits of the others can be had.
local BITS = { I16 = "uint16", U32 = "int32", U64 = "int64", F8_E5M2 = "uint8" }

local path

local function write(text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- A file of a header, to which `data` bytes of elements belong.
local function safetensors(header, data) return string.pack("<I8", #header) .. header .. (data or "") end

local function from_hex(hex)
  return (hex:gsub("%x%x", function(digits) return string.char(tonumber(digits, 16)) end))
end

local function temporary()
  path = os.tmpname()
  os.remove(path)
  path = path .. ".safetensors"
end

local function remove() os.remove(path) end

describe("a file of the format's own writer #quick", function()
  it("has every tensor, bit for bit", function()
    local seen = 0
    for _, case in ipairs(expected) do
      local file, bytes = folder .. case.file .. ".safetensors", from_hex(case.hex)
      if LOADED[case.stored] then
        local t = nibble.load(file, { name = case.name, device = "cpu" })
        assert.equal(LOADED[case.stored], t.dtype)
        assert.same(case.shape, t.shape)
        if case.stored == "F64" then
          assert.same({ { 1, -2, 1 + 2.0 ^ -23 }, { math.huge, 2.0 ^ -149, 0 } }, t:totable())
          assert.equal("\0\0\0\x80", t:bytes():sub(-4))
        else
          assert.equal(bytes, t:bytes())
        end
        seen = seen + 1
      elseif BITS[case.stored] then
        local t = nibble.load(file, { name = case.name, dtype = BITS[case.stored] })
        assert.same({ BITS[case.stored], bytes, case.shape }, { t.dtype, t:bytes(), t.shape })
        seen = seen + 1
      end
    end
    assert.equal(#expected - 1, seen) -- all but F4
  end)

  it("has packed pairs of 4-bit codes as bytes, for who asks", function()
    local t = nibble.load(folder .. "types.safetensors", { name = "codes_2x4", dtype = "uint8" })
    assert.same({ { 0x10, 0x32 }, { 0x54, 0x76 } }, t:totable())
  end)

  it("is listed in the order of its bytes", function()
    for _, name in ipairs { "types", "shapes", "only" } do
      local cases, count, from = {}, 0, nil
      for _, case in ipairs(expected) do
        if case.file == name then cases[case.name], count = case, count + 1 end
      end
      for _, entry in ipairs(nibble.list(folder .. name .. ".safetensors")) do
        local case = cases[entry.name]
        assert.same({ case.stored, LOADED[case.stored], case.shape, #case.hex // 2 },
          { entry.stored, entry.dtype, entry.shape, entry.bytes })
        from = from or entry.offset
        assert.equal(from, entry.offset) -- no gaps
        from = from + entry.bytes
        assert.equal(from_hex(case.hex), process.read(folder .. name .. ".safetensors"):sub(entry.offset + 1, from))
        count = count - 1
      end
      assert.equal(0, count)
      assert.equal(#process.read(folder .. name .. ".safetensors"), from)
    end
  end)

  it("gives its only tensor without a name", function()
    assert.same({ { 0.25, 0.5 }, { 1, 2 } }, nibble.load(folder .. "only.safetensors"):totable())
    assert.equal(nibble.device(), nibble.load(folder .. "only.safetensors").device)
  end)

  it("names its tensors when it has several, or not the one that is asked for", function()
    local ok, message = pcall(nibble.load, folder .. "shapes.safetensors")
    assert.is_false(ok)
    assert.is_truthy(message:find("load: name: expected one of \"", 1, true), message)
    for _, name in ipairs { "scalar", "model.layers.0.self_attn.k" } do
      assert.is_truthy(message:find('"' .. name .. '"', 1, true), message)
    end
    assert.is_truthy(message:find(", got no name", 1, true), message)
    ok, message = pcall(nibble.load, folder .. "only.safetensors", { name = "other" })
    assert.is_false(ok)
    assert.is_truthy(message:find('load: name: expected one of "only", got "other"', 1, true), message)
  end)

  it("refuses elements that no tensor holds, by their name, and a dtype of another size", function()
    for _, case in ipairs(expected) do
      local function refused(opts, pattern)
        opts.name = case.name
        local ok, message = pcall(nibble.load, folder .. case.file .. ".safetensors", opts)
        assert.is_false(ok, case.stored)
        assert.matches(pattern, message)
      end
      if not LOADED[case.stored] then refused({}, "load: file: .* got " .. case.stored .. " %(in .*%)") end
      if case.file == "types" then
        refused({ dtype = #case.hex <= 12 and "float16" or "int8" }, "load: dtype: expected a dtype as large as .*"
          .. case.stored .. ", got ")
      end
      if case.stored == "F64" then refused({ dtype = "int64" }, "load: dtype: .*F64, got int64") end
    end
  end)
end)

describe("load and list of safetensors #quick", function()
  setup(temporary)
  teardown(remove)

  it("give nil and a message for a file that cannot be opened", function()
    for _, place in ipairs { "/nonexistent/folder/x.safetensors", process.root .. "spec/nothing.safetensors" } do
      for name, read in pairs { load = nibble.load, list = nibble.list } do
        local t, message = read(place)
        assert.is_nil(t)
        assert.is_truthy(message:find(("%s: cannot read %q: "):format(name, place), 1, true), message)
      end
    end
    local t, message = nibble.list("/")
    assert.is_nil(t)
    assert.is_string(message)
  end)

  it("read a file of any path when told a name", function()
    local other = os.tmpname()
    nibble.save(other, { x = nibble.arange(3) })
    assert.same({ 0, 1, 2 }, nibble.load(other, { name = "x" }):totable())
    os.remove(other)
  end)

  it("check their arguments", function()
    remove() -- what another spec has saved there
    for _, case in ipairs {
      { nibble.load, { "x.safetensors", { nam = "x" } }, "load: .*nam" },
      { nibble.load, { "x.safetensors", { name = 3 } }, "load: name: expected a string" },
      { nibble.load, { "x.safetensors", { name = "a\0b" } }, "load: name: " },
      { nibble.list, {}, "list: path: expected a string" },
      { nibble.save, { path }, "save: tensors: expected a table of tensors by name" },
      { nibble.save, { path, { nibble.zeros(1) } }, "save: tensors: expected names of tensors as keys" },
      { nibble.save, { path, { a = 3 } }, "save: a: expected a tensor" },
      { nibble.save, { path, { ["\xff"] = nibble.zeros(1) } }, "save: name: expected UTF%-8" },
      { nibble.save, { path, { __metadata__ = nibble.zeros(1) } },
        "save: name: expected UTF%-8 other than __metadata__" },
    } do
      local ok, message = pcall(case[1], table.unpack(case[2]))
      assert.is_false(ok, case[3])
      assert.matches(case[3], message)
    end
    assert.is_nil(io.open(path), "nothing is written")
  end)

  it("are refused while a stream captures, and the capture goes on", function()
    local t = nibble.zeros(2)
    local graph = nibble.stream():capture(function()
      t:fill(3)
      assert.has_error(function() nibble.load(folder .. "only.safetensors") end)
      assert.has_error(function() nibble.save(path, { t = t }) end)
    end)
    graph:replay()
    assert.same({ 3, 3 }, t:totable())
  end)

  it("take headers as other writers lay them out", function()
    for _, header in ipairs {
      '{"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
      '{\n\t"x" : { "data_offsets" : [ 0 , 8 ] , "shape" : [ 2 ] , "dtype" : "I32" } }\r\n   ',
      '{"__metadata__":{},"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
      '{"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"a":"b","":"\\u0000"}}',
      '{"\\u0078":{"dtype":"\\u00493\\u0032","shape":[2],"data_offsets":[0,8]}}',
    } do
      if not header:find("u0000", 1, true) then
        write(safetensors(header, string.pack("<i4i4", 3, 4)))
        assert.same({ 3, 4 }, nibble.load(path, { name = "x" }):totable(), header)
      end
    end
  end)

  it("refuse blanks before the header, as the format does", function()
    for _, blank in ipairs { " ", "\n", "\t" } do
      write(safetensors(blank .. '{"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}', string.pack("<i4i4", 3, 4)))
      assert.error_matches(function() nibble.list(path) end, "expected { at once at byte 0")
      assert.error_matches(function() nibble.load(path) end, "expected { at once at byte 0")
    end
  end)

  it("refuse a shape that nothing can have, though it has no elements", function()
    write(safetensors('{"x":{"dtype":"I32","shape":[0,288230376151711744,288230376151711744],"data_offsets":[0,0]}}',
      ""))
    assert.error_matches(function() nibble.list(path) end, "expected \"x\" to have as many bytes")
  end)

  it("decode names", function()
    for escaped, name in pairs {
      ["\\u00e9\\u20AC\\ud83d\\ude00"] = "é€😀", ["a\\/b\\\\c\\\"\\b\\f\\n\\r\\t"] = "a/b\\c\"\b\f\n\r\t",
        ["é€😀"] = "é€😀",
    } do
      write(safetensors('{"' .. escaped .. '":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', "\7"))
      assert.equal(name, nibble.list(path)[1].name)
      assert.equal(7, nibble.load(path, { name = name }):item())
    end
  end)

  it("list element types that are not known, and load the others", function()
    write(safetensors('{"new":{"dtype":"F3_E1M1","shape":[3],"data_offsets":[0,2]},"x":{"dtype":"U8","shape":[1],'
      .. '"data_offsets":[2,3]}}', "abc"))
    assert.same({ name = "new", stored = "F3_E1M1", shape = { 3 }, offset = nibble.list(path)[2].offset - 2,
      bytes = 2 },
      nibble.list(path)[1])
    assert.same({ 99 }, nibble.load(path, { name = "x" }):totable())
    local ok, message = pcall(nibble.load, path, { name = "new", dtype = "uint8" })
    assert.is_false(ok)
    assert.matches("F3_E1M1", message)
  end)

  it("read one tensor of a file without the others' bytes", function()
    -- A file of 3 GiB, of which the file system holds a few KiB.
    local header = '{"big":{"dtype":"U8","shape":[3221225472],"data_offsets":[0,3221225472]},'
      .. '"small":{"dtype":"I32","shape":[2],"data_offsets":[3221225472,3221225480]}}'
    write(safetensors(header))
    local file = io.open(path, "r+b")
    file:seek("set", 8 + #header + 3221225472)
    file:write(string.pack("<i4i4", -5, 6))
    file:close()
    collectgarbage()
    assert.same({ -5, 6 }, nibble.load(path, { name = "small" }):totable())
    assert.equal(3221225472, nibble.list(path)[1].bytes)
  end)
end)

describe("save #quick", function()
  setup(temporary)
  teardown(remove)

  it("gives back every dtype, shape and name, whichever device", function()
    local tensors = { [""] = nibble.zeros(0), ["ü \"\\\n\1"] = nibble.full({}, 5) }
    for i, dtype in ipairs { "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32",
      "int64" } do
      tensors[dtype] = nibble.randint(0, 100, { i, 3 }, { dtype = dtype, seed = i })
    end
    tensors.view = nibble.arange(6, { dtype = "uint8" }):view(2, 3):transpose(1, 2)
    assert.is_true(nibble.save(path, tensors))
    local entries = nibble.list(path)
    for _, entry in ipairs(entries) do
      local t = tensors[entry.name]
      assert.equal(t.dtype, entry.dtype)
      assert.is_true(nibble.load(path, { name = entry.name }):equal(t), entry.name)
      if t:numel() > 0 then assert.equal(0, entry.offset % (entry.bytes // t:numel()), "aligned") end
      tensors[entry.name] = nil
    end
    assert.is_nil(next(tensors))
  end)

  it("lays the same tensors out in the same way, largest elements first, behind a header of a multiple of 8", function()
    local function tensors()
      local list = {}
      for i = 1, 40 do list["t" .. i * 37 % 41] = nibble.arange(i, { dtype = i % 2 == 0 and "uint8" or "int64" }) end
      return list
    end
    nibble.save(path, tensors())
    local first = process.read(path)
    nibble.save(path, tensors())
    assert.equal(first, process.read(path))
    assert.equal(0, string.unpack("<I8", first) % 8)
    local entries = nibble.list(path)
    assert.equal("int64", entries[20].dtype)
    assert.equal("uint8", entries[21].dtype)
  end)

  it("of nothing is a file without tensors", function()
    assert.is_true(nibble.save(path, {}))
    assert.same({}, nibble.list(path))
    local ok, message = pcall(nibble.load, path)
    assert.is_false(ok)
    assert.matches("load: name: expected a file with a tensor, got no name", message)
  end)

  it("waits for the work that writes a tensor", function()
    local s, t = nibble.stream(), nil
    s:scope(function()
      for _ = 1, 20 do t = nibble.randn(20000, { seed = 1 }) end
      t:fill(3)
    end)
    nibble.save(path, { t = t })
    assert.is_true(nibble.load(path):equal(nibble.full(20000, 3.0)))
  end)

  it("to a place that cannot be written gives nil and a message that names it", function()
    for _, place in ipairs { "/nonexistent/folder/x", "/", "/dev/full" } do
      local ok, message = nibble.save(place, { x = nibble.zeros(100000) })
      assert.is_nil(ok)
      assert.is_truthy(message:find(("save: cannot write %q: "):format(place), 1, true), message)
    end
  end)

  it("names more tensors than a message holds", function()
    local tensors = {}
    for i = 1, 200 do tensors[("model.layers.%03d.k"):format(i)] = nibble.zeros(1) end
    nibble.save(path, tensors)
    local _, message = pcall(nibble.load, path)
    assert.is_true(#message < 900)
    local shown = select(2, message:gsub("model%.layers", ""))
    assert.equal(200, shown + tonumber(message:match(" and (%d+) more, got no name")))
  end)
end)

describe("a damaged safetensors file #quick", function()
  setup(temporary)
  teardown(remove)

  local x = '"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}'
  local function entry(dtype, shape, offsets, name)
    return ('"%s":{"dtype":"%s","shape":%s,"data_offsets":%s}'):format(name or "x", dtype, shape, offsets)
  end
  local eight = ("\0"):rep(8)
  -- A header, as the JSON text; eight bytes of elements follow.
  local headers = {
    ["no object"] = "[]", ["no header"] = "", ["only spaces"] = "    ", ["an open object"] = "{" .. x,
      ["an open string"] = '{"x',
    ["text after the object"] = "{" .. x .. "} x", ["two objects"] = "{" .. x .. "}{}", ["a comma at the end"] = "{" ..
      x .. ",}",
    ["no comma"] = "{" .. x .. " " .. x .. "}", ["no colon"] = '{"x" {}}', ["an entry that is a number"] = '{"x":3}',
    ["an entry of nothing"] = '{"x":{}}', ["null"] = '{"x":null}', ["a name without quotes"] = "{x:{}}",
    ["a name twice"] = "{" .. entry("I32", "[1]", "[0,4]") .. "," .. entry("I32", "[1]", "[4,8]") .. "}",
    ["a name twice, once escaped"] = "{" .. entry("I32", "[1]", "[0,4]") .. ","
      .. entry("I32", "[1]", "[4,8]", "\\u0078") .. "}",
    ["no dtype"] = '{"x":{"shape":[2],"data_offsets":[0,8]}}',
      ["no shape"] = '{"x":{"dtype":"I32","data_offsets":[0,8]}}',
    ["no offsets"] = '{"x":{"dtype":"I32","shape":[2]}}',
    ["dtype twice"] = '{"x":{"dtype":"I32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["a key too many"] = '{"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8],"more":1}}',
    ["a dtype that is a number"] = '{"x":{"dtype":32,"shape":[2],"data_offsets":[0,8]}}',
    ["a shape that is a number"] = "{" .. entry("I32", "2", "[0,8]") .. "}",
    ["a shape of text"] = "{" .. entry("I32", '["2"]', "[0,8]") .. "}",
    ["a negative size"] = "{" .. entry("I32", "[-2]", "[0,8]") .. "}", ["a fraction"] = "{" ..
      entry("I32", "[2.0]", "[0,8]") .. "}",
    ["an exponent"] = "{" .. entry("I32", "[2e0]", "[0,8]") .. "}", ["a leading zero"] = "{" ..
      entry("I32", "[02]", "[0,8]") .. "}",
    ["a size past 2^63"] = "{" .. entry("I32", "[99999999999999999999]", "[0,8]") .. "}",
    ["sizes whose product wraps to 2"] = "{" .. entry("U8", "[4611686018427387905,2,2,2]", "[0,8]") .. "}",
    ["sizes whose product wraps to 0"] = "{" .. entry("I32", "[4294967296,4294967296]", "[0,0]") .. "}",
    ["9 dimensions"] = "{" .. entry("I32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") .. "}",
    ["an open shape"] = "{" .. entry("I32", "[2", "[0,8]") .. "}", ["a comma in a shape"] = "{" ..
      entry("I32", "[2,]", "[0,8]") .. "}",
    ["one offset"] = "{" .. entry("I32", "[2]", "[8]") .. "}", ["three offsets"] = "{" ..
      entry("I32", "[2]", "[0,8,8]") .. "}",
    ["an end before the start"] = "{" .. entry("I32", "[2]", "[8,0]") .. "}",
    ["an end past the file"] = "{" .. entry("I32", "[3]", "[0,12]") .. "}",
    ["offsets past 2^63"] = "{" .. entry("I32", "[2]", "[18446744073709551608,18446744073709551616]") .. "}",
    ["too few bytes for the shape"] = "{" .. entry("I32", "[3]", "[0,8]") .. "}",
    ["too many bytes for the shape"] = "{" .. entry("I32", "[1]", "[0,8]") .. "}",
    ["half a byte"] = "{" .. entry("F4", "[15]", "[0,8]") .. "}",
    ["bytes for an empty shape"] = "{" .. entry("I32", "[0]", "[0,8]") .. "}",
    ["a gap before"] = "{" .. entry("I32", "[1]", "[4,8]") .. "}",
    ["elements that are nobody's"] = "{" .. entry("I32", "[1]", "[0,4]") .. "}",
    ["a gap between"] = "{" .. entry("U8", "[2]", "[0,2]", "a") .. "," .. entry("U8", "[5]", "[3,8]", "b") .. "}",
    ["an overlap"] = "{" .. entry("U8", "[5]", "[0,5]", "a") .. "," .. entry("U8", "[4]", "[4,8]", "b") .. "}",
    ["the same bytes twice"] = "{" .. entry("U8", "[8]", "[0,8]", "a") .. "," .. entry("U8", "[8]", "[0,8]", "b") ..
      "}",
    ["metadata that is a list"] = '{"__metadata__":[],' .. x .. "}",
    ["metadata that is a number"] = '{"__metadata__":{"a":1},' .. x .. "}",
    ["metadata twice"] = '{"__metadata__":{},"__metadata__":{},' .. x .. "}",
    ["a control character in a name"] = '{"a\nb":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["no UTF-8"] = '{"a\xff":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["overlong UTF-8"] = '{"a\xc0\x80":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["half a pair in UTF-8"] = '{"a\xed\xa0\x80":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["UTF-8 that is cut"] = '{"a\xe2\x82":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["half a pair of escapes"] = '{"\\ud83dx":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["a wrong pair of escapes"] = '{"\\ud83d\\u0041":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["a zero in a name"] = '{"x\\u0000":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["an unknown escape"] = '{"\\x41":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    ["a short escape"] = '{"\\u41":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
      ["an escape at the end"] = '{"\\',
    ["an unsupported dtype only"] = "{" .. entry("C64", "[1]", "[0,8]") .. "}",
  }
  local files = {
    ["empty"] = "", ["of seven bytes"] = "\8\0\0\0\0\0\0", ["of a length alone"] = string.pack("<I8", 2),
    ["with a header longer than itself"] = string.pack("<I8", 200) .. "{}",
      ["with a header of 2^64 - 1"] = ("\xff"):rep(8) .. "{}",
    ["that is an .npy file"] = "\x93NUMPY\1\0" .. ("v"):rep(120),
      ["one byte short"] = safetensors("{" .. x .. "}", eight):sub(1, -2),
    ["one byte long"] = safetensors("{" .. x .. "}", eight .. "x"),
  }
  for name, header in pairs(headers) do files["(" .. name .. ")"] = safetensors(header, eight) end

  for name, text in pairs(files) do
    it(name .. " is an error that names the operation and the file", function()
      write(text)
      nibble.synchronize()
      collectgarbage()
      collectgarbage()
      local used = nibble.memory().used
      local ok, message = pcall(nibble.load, path)
      assert.is_false(ok)
      assert.is_truthy(message:find("load: file: ", 1, true), message)
      assert.is_truthy(message:find(path, 1, true), message)
      assert.is_true(#message < 600, "the message is short")
      nibble.synchronize()
      assert.equal(used, nibble.memory().used)
    end)
  end

  it("has a bounded header", function()
    write(string.pack("<I8", 101 << 20))
    local file = io.open(path, "r+b")
    file:seek("set", 200 << 20)
    file:write("x")
    file:close()
    local ok, message = pcall(nibble.list, path)
    assert.is_false(ok)
    assert.matches("list: file: .*at most 100 MiB", message)
  end)
end)

-- Changed bytes, cut ends and transplanted pieces of good files. NIBBLE_MUTATIONS says how many.
describe("a safetensors file changed at random", function()
  setup(temporary)
  teardown(remove)

  it("never does more than raise", function()
    local random = require("nibble.pages").generator(11)
    local pieces = { "{", "}", "[", "]", ",", ":", '"', "\\u", "\\", "0", "9", "-", "18446744073709551615",
      "4611686018427387904",
      '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', "F32", "F64", "F4", "\xff", "\0", "\xf0\x9f", "e", "." }
    local seeds = { process.read(folder .. "types.safetensors"), process.read(folder .. "shapes.safetensors"),
      process.read(folder .. "only.safetensors") }
    local loaded, refused = 0, 0
    for i = 1, tonumber(os.getenv("NIBBLE_MUTATIONS") or 1000) do
      local text = seeds[i % #seeds + 1]
      for _ = 0, random(3) do
        local at, kind = random(#text) + 1, random(6)
        if random(3) == 0 then at = math.min(at % 24 + 1, #text) end
        if kind == 0 then text = text:sub(1, at - 1)
        elseif kind == 1 then text = text:sub(1, at - 1) .. text:sub(at + 1 + random(8))
        elseif kind == 2 then text = text:sub(1, at - 1) .. pieces[random(#pieces) + 1] .. text:sub(at)
        elseif kind == 3 then text = text:sub(1, at - 1) .. string.char(random(256)) .. text:sub(at + 1)
        elseif kind == 4 then -- a piece for a piece, with the header's length kept right
          local piece = pieces[random(#pieces) + 1]
          text = text:sub(1, at - 1) .. piece .. text:sub(at + #piece)
        else
          local from = random(#text) + 1
          text = text:sub(1, at) .. text:sub(from, from + random(40)) .. text:sub(at + 1)
        end
        if #text < 8 then text = text .. ("\0"):rep(8) end
        if random(4) > 0 then -- the header as long as it says, mostly
          local brace = text:find("}}[^}]*$")
          if brace then text = string.pack("<I8", brace + 1 - 8) .. text:sub(9) end
        end
      end
      write(text)
      local ok, entries = pcall(nibble.list, path)
      if ok then
        loaded = loaded + 1
        for _, entry in ipairs(entries) do
          local fine, t = pcall(nibble.load, path, { name = entry.name })
          if fine then assert.equal(entry.stored == "F64" and entry.bytes // 2 or entry.bytes, #t:bytes()) end
          if not fine then assert.is_nil(entry.dtype, t) end
        end
      else
        refused = refused + 1
        assert.matches("list: file: expected ", entries)
      end
    end
    assert.is_true(loaded > 0 and refused > loaded, ("%d loaded, %d refused"):format(loaded, refused))
  end)
end)
