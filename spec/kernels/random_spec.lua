-- Random tensors: a function of the seed and the element's number alone, with the distributions that their names
-- promise.
local process = require("spec.support.runtime_process")
local nibble = require("nibble")

describe("random tensors #quick", function()
  local makers = {
    randn = function(opts, ...) return nibble.randn({ ... }, opts) end,
    randint = function(opts, ...) return nibble.randint(-50, 1000, { ... }, opts) end,
  }

  it("are equal for equal seeds and differ for different ones", function()
    for name, make in pairs(makers) do
      local a, b, c = make({ seed = 7 }, 1000), make({ seed = 7 }, 1000), make({ seed = 8 }, 1000)
      assert.is_true(a:equal(b), name)
      assert.is_false(a:equal(c), name)
      assert.is_false(make({ seed = 0 }, 1000):equal(make({ seed = 1 << 32 }, 1000)), name)
    end
    assert.is_true(nibble.randperm(100, { seed = 3 }):equal(nibble.randperm(100, { seed = 3 })))
    assert.is_false(nibble.randperm(100, { seed = 3 }):equal(nibble.randperm(100, { seed = 4 })))
  end)

  it("take any integer as a seed", function()
    local seen = {}
    for _, seed in ipairs({ 0, 1, -1, math.maxinteger, math.mininteger, 1 << 32, (1 << 53) + 1, 1 << 53 }) do
      local bytes = nibble.randn(16, { seed = seed }):bytes()
      assert.is_nil(seen[bytes], seed)
      seen[bytes] = true
    end
    assert.equal(nibble.randn(16, { seed = 5 }):bytes(), nibble.randn(16, { seed = 5.0 }):bytes())
  end)

  it("do not depend on the shape", function()
    for name, make in pairs(makers) do
      local flat = make({ seed = 11 }, 3000):bytes()
      assert.equal(flat, make({ seed = 11 }, 30, 100):bytes(), name)
      assert.equal(flat, make({ seed = 11 }, 3, 10, 100, 1):bytes(), name)
    end
  end)

  it("do not depend on how many elements follow", function()
    for name, make in pairs(makers) do
      local long = make({ seed = 12 }, 1000)
      for _, count in ipairs({ 1, 2, 3, 5, 17, 64, 999 }) do
        assert.equal(long:narrow(1, 1, count):bytes(), make({ seed = 12 }, count):bytes(), name)
      end
    end
  end)

  it("without a seed count up from 0, one for each call", function()
    local result = process.script([[
      local nibble = require("nibble")
      local a, b = nibble.randn(8), nibble.randint(0, 1000, 8)
      nibble.randn(3, { seed = 99 })
      local c, d = nibble.randperm(64), nibble.randn(2, 4)
      assert(a:equal(nibble.randn(8, { seed = 0 })))
      assert(b:equal(nibble.randint(0, 1000, 8, { seed = 1 })))
      assert(c:equal(nibble.randperm(64, { seed = 2 })))
      assert(d:equal(nibble.randn(2, 4, { seed = 3 })))
    ]])
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  end)

  it("are the same in another process and on another stream", function()
    local code = [[
      local nibble = require("nibble")
      local s = nibble.stream()
      s:scope(function()
        io.write(nibble.randn(100, { seed = 5, dtype = "bfloat16" }):bytes(), nibble.randint(0, 256, 50, { seed = 6,
          dtype = "uint8" }):bytes(), nibble.randperm(33, { seed = 7, dtype = "int32" }):bytes())
      end)
    ]]
    local here = nibble.randn(100, { seed = 5, dtype = "bfloat16" }):bytes() ..
      nibble.randint(0, 256, 50, { seed = 6, dtype = "uint8" }):bytes() ..
      nibble.randperm(33, { seed = 7, dtype = "int32" }):bytes()
    local result = process.script(code)
    assert.equal("", result.stderr)
    assert.is_true(here == result.stdout)
  end)
end)

describe("randint #quick", function()
  it("stays in low <= x < high and reaches every value of a small range", function()
    for _, range in ipairs({ { 0, 1 }, { 0, 2 }, { -3, 4 }, { 10, 13 }, { -128, 128 } }) do
      local low, high = range[1], range[2]
      local seen, count = {}, 0
      for _, value in ipairs(nibble.randint(low, high, 4000, { seed = 1 }):totable()) do
        assert.is_true(value >= low and value < high)
        if not seen[value] then seen[value], count = true, count + 1 end
      end
      assert.equal(high - low, count)
    end
  end)

  it("reaches the ends of every integer dtype", function()
    for dtype, range in pairs({ uint8 = { 0, 256 }, int8 = { -128, 128 } }) do
      local t = nibble.randint(range[1], range[2], 5000, { dtype = dtype, seed = 2 }):totable()
      table.sort(t)
      assert.equal(range[1], t[1])
      assert.equal(range[2] - 1, t[#t])
    end
    assert.same({ 65535 }, nibble.randint(65535, 65536, 1, { dtype = "uint16" }):totable())
    assert.same({ 2147483647 }, nibble.randint(2147483647, 2147483648, 1, { dtype = "int32" }):totable())
    assert.same({ math.mininteger }, nibble.randint(math.mininteger, math.mininteger + 1, 1):totable())
  end)

  it("covers nearly all of int64", function()
    local negative, small = 0, 0
    for _, value in ipairs(nibble.randint(math.mininteger, math.maxinteger, 2000, { seed = 3 }):totable()) do
      if value < 0 then negative = negative + 1 end
      if value > -(1 << 40) and value < 1 << 40 then small = small + 1 end
    end
    assert.is_true(negative > 850 and negative < 1150, negative)
    assert.equal(0, small)
  end)

  it("gives whole numbers in float dtypes", function()
    local t = nibble.randint(-8, 9, 500, { dtype = "bfloat16", seed = 4 })
    local integers = nibble.randint(-8, 9, 500, { seed = 4 })
    assert.same(integers:totable(), t:totable())
    assert.equal("float", math.type(t[1]))
  end)
end)

describe("randint", function()
  it("gives every value equally often", function()
    for _, count in ipairs({ 8, 10, 255, 1000 }) do
      local bins = {}
      local n = 1000 * count
      for _, value in ipairs(nibble.randint(0, count, n, { seed = count }):totable()) do
        bins[value] = (bins[value] or 0) + 1
      end
      local chi2 = 0
      for value = 0, count - 1 do chi2 = chi2 + ((bins[value] or 0) - 1000) ^ 2 / 1000 end
      -- Mean count - 1, variance 2 (count - 1): six standard deviations to either side.
      assert.is_true(math.abs(chi2 - (count - 1)) < 6 * math.sqrt(2 * (count - 1)), ("%d: %g"):format(count, chi2))
    end
  end)
end)

describe("randn", function()
  it("has the moments of a standard normal distribution, and its tails", function()
    local n = 400000
    local sum, square, cube, fourth, beyond1, beyond2, beyond3 = 0, 0, 0, 0, 0, 0, 0
    for _, x in ipairs(nibble.randn(n, { seed = 1 }):totable()) do
      if not (x > -10 and x < 10) then error("not a normal value: " .. x) end
      sum, square, cube, fourth = sum + x, square + x ^ 2, cube + x ^ 3, fourth + x ^ 4
      if math.abs(x) > 1 then beyond1 = beyond1 + 1 end
      if math.abs(x) > 2 then beyond2 = beyond2 + 1 end
      if math.abs(x) > 3 then beyond3 = beyond3 + 1 end
    end
    -- Five standard errors each: of x^k they are sqrt(1, 2, 15, 96) / sqrt(n).
    local unit = 5 / math.sqrt(n)
    assert.is_true(math.abs(sum / n) < unit, sum / n)
    assert.is_true(math.abs(square / n - 1) < unit * math.sqrt(2), square / n)
    assert.is_true(math.abs(cube / n) < unit * math.sqrt(15), cube / n)
    assert.is_true(math.abs(fourth / n - 3) < unit * math.sqrt(96), fourth / n)
    for expected, got in pairs({ [0.31731050786] = beyond1, [0.04550026390] = beyond2, [0.00269979606] = beyond3 }) do
      assert.is_true(math.abs(got / n - expected) < unit * math.sqrt(expected * (1 - expected)), got / n)
    end
  end)

  it("has independent neighbours, also across seeds", function()
    local n = 200000
    local a = nibble.randn(n, { seed = 1 }):totable()
    local b = nibble.randn(n, { seed = 2 }):totable()
    local lags = { [1] = 0, [2] = 0, [4] = 0 }
    local across = 0
    for i = 1, n - 4 do
      for lag, sum in pairs(lags) do lags[lag] = sum + a[i] * a[i + lag] end
      across = across + a[i] * b[i]
    end
    for lag, sum in pairs(lags) do assert.is_true(math.abs(sum / n) < 5 / math.sqrt(n), lag) end
    assert.is_true(math.abs(across / n) < 5 / math.sqrt(n))
  end)

  it("is the same however many elements are made at once", function()
    -- Far past what one thread takes alone.
    local many = nibble.randn(3000001, { seed = 9 })
    for _, at in ipairs({ 1, 65535, 65536, 65537, 1000000, 1048576, 2999990 }) do
      local count = at + 10
      assert.equal(nibble.randn(count, { seed = 9 }):narrow(1, at, 10):bytes(), many:narrow(1, at, 10):bytes())
    end
  end)

  it("is about normal in the small float dtypes too", function()
    for _, dtype in ipairs({ "float16", "bfloat16", "float8_e4m3fn" }) do
      local sum, square, n = 0, 0, 50000
      for _, x in ipairs(nibble.randn(n, { seed = 1, dtype = dtype }):totable()) do
        sum, square = sum + x, square + x * x
      end
      assert.is_true(math.abs(sum / n) < 0.03, dtype)
      assert.is_true(math.abs(square / n - 1) < 0.03, dtype)
    end
  end)
end)

describe("randperm #quick", function()
  it("holds each of 0 .. n-1 once", function()
    for _, dtype in ipairs({ "int32", "int64" }) do
      for _, n in ipairs({ 0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 255, 256, 257, 1000, 4097 }) do
        local t = nibble.randperm(n, { dtype = dtype, seed = n }):totable()
        table.sort(t)
        assert.equal(n, #t)
        for i = 1, n do
          if t[i] ~= i - 1 then error(("%d is missing of %d"):format(i - 1, n)) end
        end
      end
    end
  end)
end)

describe("randperm", function()
  it("holds each number once for large n too", function()
    for _, n in ipairs({ 65535, 65536, 65537, 1000003 }) do
      local seen, t = {}, nibble.randperm(n, { seed = 1 }):totable()
      assert.equal(n, #t)
      for i = 1, n do
        local value = t[i]
        if value < 0 or value >= n or seen[value] then error(("%d at %d of %d"):format(value, i, n)) end
        seen[value] = true
      end
    end
  end)

  it("gives every order of three equally often", function()
    local counts, kinds = {}, 0
    for seed = 1, 6000 do
      local key = table.concat(nibble.randperm(3, { seed = seed }):totable())
      if not counts[key] then counts[key], kinds = 0, kinds + 1 end
      counts[key] = counts[key] + 1
    end
    assert.equal(6, kinds)
    local chi2 = 0
    for _, count in pairs(counts) do chi2 = chi2 + (count - 1000) ^ 2 / 1000 end
    assert.is_true(chi2 < 35, chi2) -- 5 degrees of freedom: one in a million
  end)

  it("puts every number everywhere", function()
    -- Where 0 and where n-1 end up, over many seeds.
    local n, rounds = 10, 5000
    local first, last = {}, {}
    for seed = 1, rounds do
      local t = nibble.randperm(n, { seed = seed }):totable()
      for i = 1, n do
        if t[i] == 0 then first[i] = (first[i] or 0) + 1 end
        if t[i] == n - 1 then last[i] = (last[i] or 0) + 1 end
      end
    end
    for _, places in ipairs({ first, last }) do
      local chi2 = 0
      for i = 1, n do chi2 = chi2 + ((places[i] or 0) - rounds / n) ^ 2 / (rounds / n) end
      assert.is_true(chi2 < 45, chi2) -- 9 degrees of freedom
    end
  end)
end)
