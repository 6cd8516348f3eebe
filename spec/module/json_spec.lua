-- nibble.json: strict both ways.
local json = require "nibble.json"

describe("json.encode #quick", function()
  it("writes every kind of value on one line, keys in order", function()
    for text, value in pairs {
      ['{"a":[1,2.5],"b":null,"c":[],"d":{}}'] = { d = {}, a = { 1, 2.5 }, b = json.null, c = json.list {} },
      ["[true,false,null]"] = { true, false, json.null }, ["9223372036854775807"] = math.maxinteger,
      ["-9223372036854775808"] = math.mininteger, ["3.0"] = 3.0, ["0.1"] = 0.1, ["0.30000000000000004"] = 0.1 + 0.2,
        ["1e+300"] = 1e300,
      ['"a\\"\\\\\\n\\t\\u0000\\u001f\\u007fé😀"'] = "a\"\\\n\t\0\31\127é😀", ["-0.0"] = -0.0,
    } do
      assert.equal(text, json.encode(value))
    end
  end)

  it("refuses what JSON does not have", function()
    local deep = {}
    for _ = 1, 200 do deep = { deep } end
    for _, value in ipairs { { 0 / 0 }, { math.huge }, { print }, { "\xff" }, { { 1, nil, 3 } }, { { 1, a = 2 } },
      { { [2] = 1 } },
      { { [true] = 1 } }, { deep }, { json.list { a = 1 } } } do
      local ok, message = pcall(json.encode, value[1])
      assert.is_false(ok)
      assert.matches("^json%.encode: value: expected ", message)
    end
  end)
end)

describe("json.decode #quick", function()
  it("gives back what encode wrote, kinds of numbers too", function()
    local value = { a = { 1, 2.5, -7, math.maxinteger, math.mininteger, 3.0, 1e-300, 0.1 },
      b = { json.null, true, "é\0\n\127" },
      c = { x = { y = json.list {} } } }
    local back = json.decode(json.encode(value))
    assert.same(value, back)
    assert.equal("integer", math.type(back.a[1]))
    assert.equal("float", math.type(back.a[6]))
    assert.equal("[]", json.encode(back.c.x.y))
    assert.equal(json.null, back.b[1])
  end)

  it("reads what others write", function()
    assert.same({ a = { 1, { b = "é😀/" } } },
      json.decode(' { "a" :\n[ 1 ,\t{ "b" : "\\u00e9\\ud83d\\ude00\\/" } ] }\r\n '))
    assert.same({ 1.0, 10.0, -0.5 }, json.decode("[1e0,1E+1,-5e-1]"))
    assert.equal(json.null, json.decode("null"))
  end)

  it("says what is no JSON, and where", function()
    for text, message in pairs {
      [""] = "expected a value at byte 1, got the end", ["{"] = "expected a name at byte 2, got the end",
      ["[1,]"] = "a value at byte 4",
      ["[1 2]"] = '"," or "]" at byte 4, got "2]"', ["{\"a\":1,}"] = "a name at byte 8", ["{a:1}"] = "a name at byte 2",
      ["{\"a\" 1}"] = '":" at byte 6', ["{\"a\":1,\"a\":2}"] = "each name once at byte 8", ["01"] = "a value at byte 1",
      ["1."] = "the end of a number at byte 2", ["+1"] = "a value", [".5"] = "a value", ["1e"] = "the end of a number",
      ["nul"] = "a value", ["nulls"] = "nothing more at byte 5", ["NaN"] = "a value",
        ["1 1"] = "nothing more at byte 3",
      ["9223372036854775808"] = "an integer of 64 bits", ["1e999"] = "a number of 64 bits",
        ['"a'] = "the end of a string",
      ['"\n"'] = "no control character", ['"\\x"'] = "an escape of JSON", ['"\\u12"'] = "four hexadecimal digits",
      ['"\\ud800"'] = "a pair of surrogates", ['"\xff"'] = "not UTF-8", ["'a'"] = "a value", ["[1]]"] = "nothing more",
      [("["):rep(200)] = "at most 100 levels", ["// x"] = "a value",
    } do
      local value, why = json.decode(text)
      assert.is_nil(value, text)
      assert.is_truthy(why:find(message, 1, true), text .. ": " .. why)
    end
  end)

  it("nests 100 levels, and no more, both ways", function()
    for _, pair in ipairs { { "[", "]" }, { '{"a":', "}" } } do
      local function nested(levels)
        return pair[1]:rep(levels - 1) .. (pair[1] == "[" and "[]" or "{}") .. pair[2]:rep(levels - 1)
      end
      local value = assert(json.decode(nested(100)))
      assert.equal(nested(100), json.encode(value))
      local _, why = json.decode(nested(101))
      assert.matches("expected at most 100 levels at byte " .. #pair[1] * 100 + 1, why)
      assert.error_matches(function() json.encode { value } end, "at most 100 levels")
    end
    assert.is_truthy(json.decode(("["):rep(100) .. "1" .. ("]"):rep(100)))
  end)

  it("never does more than refuse", function()
    local random = require("nibble.pages").generator(3)
    local base = '{"a":[1,-2.5e3,"x\\u00e9\\n",null,true],"b":{"c":{}}}'
    for _ = 1, 5000 do
      local at = random(#base) + 1
      local text = base:sub(1, at - 1) .. string.char(random(127) + 1) .. base:sub(at + random(3))
      local value, message = json.decode(text)
      assert.is_true(value ~= nil or type(message) == "string")
    end
  end)
end)
