-- Outputs and what they may share memory with.
local nibble = require "nibble"
local pages = require "nibble.pages"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

describe("operations and shared memory #quick", function()
  -- One pool: pages of 1,000 bytes that hold K, V and both scales. 10 pages, 4 heads, 2 tokens, head_dim 64.
  local pool
  before_each(function() pool = nibble.full({ 10 * 1000 + 100 }, 0xA5, { dtype = "uint8" }) end)

  local function part(offset, width)
    return pool:as_strided({ 10, 2, 4, width }, { 1000, 4 * width, width, 1 }, offset)
  end

  local rows = nibble.randn(4, 4, 64, { dtype = "bfloat16", seed = 1 })
  local slots = nibble.arange(4)

  it("append into a pool that keeps K, V and their scales page by page", function()
    append(rows, rows, slots, { part(0, 32), part(256, 32) }, { part(512, 4), part(544, 4) }, 1.0, 1.0)
    local k, v = nibble.zeros(10, 2, 4, 32, { dtype = "uint8" }), nibble.zeros(10, 2, 4, 32, { dtype = "uint8" })
    local k_sf, v_sf = nibble.zeros(10, 2, 4, 4, { dtype = "uint8" }), nibble.zeros(10, 2, 4, 4, { dtype = "uint8" })
    append(rows, rows, slots, { k, v }, { k_sf, v_sf }, 1.0, 1.0)
    for _, pair in ipairs { { part(0, 32), k }, { part(256, 32), v }, { part(512, 4), k_sf },
      { part(544, 4), v_sf } } do
      assert.is_true(pair[1]:narrow(1, 1, 2):equal(pair[2]:narrow(1, 1, 2)))
    end
    assert.equal(("\xA5"):rep(424), pool:narrow(1, 577, 424):bytes())
  end)

  it("append into heads of K and V that alternate", function()
    local both = nibble.zeros(10, 2, 4, 2, 32, { dtype = "uint8" })
    local sf = nibble.zeros(2, 10, 2, 4, 4, { dtype = "uint8" })
    append(rows, rows, slots, { both:select(4, 1), both:select(4, 2) }, { sf[1], sf[2] }, 1.0, 1.0)
    assert.is_true(both:select(4, 1):equal(both:select(4, 2)))
    assert.is_true(both:amax() > 0)
  end)

  it("refuse outputs that share a byte, and write nothing", function()
    local before = pool:bytes()
    for _, case in ipairs {
      { "paged_kv_cache (V)", part(0, 32), part(0, 32), part(512, 4), part(544, 4) },
      { "paged_kv_cache (V)", part(0, 32), part(255, 32), part(512, 4), part(544, 4) },
      { "kv_cache_sf (K)", part(0, 32), part(256, 32), part(511, 4), part(544, 4) },
      { "kv_cache_sf (V)", part(0, 32), part(256, 32), part(512, 4), part(543, 4) },
      { "kv_cache_sf (V)", part(0, 32), part(256, 32), part(512, 4), part(969, 4) }, -- into the next page's K
    } do
      local ok, message = pcall(append, rows, rows, slots, { case[2], case[3] }, { case[4], case[5] }, 1.0, 1.0)
      assert.is_false(ok)
      assert.is_truthy(message:find(case[1] .. ": expected a tensor that does not overlap", 1, true), message)
    end
    assert.equal(before, pool:bytes())
  end)

  it("refuse an output on top of an input", function()
    local storage = nibble.zeros(40000, { dtype = "uint8" })
    local key = storage:narrow(1, 1, 2048):reinterpret("bfloat16"):view(4, 4, 64)
    local cache = storage:narrow(1, 1001, 10 * 256):view(10, 2, 4, 32)
    local free = nibble.zeros(3, 10, 2, 4, 32, { dtype = "uint8" })
    local ok, message = pcall(append, key, key, slots, { cache, free[1] },
      { free[2]:narrow(4, 1, 4), free[3]:narrow(4, 1, 4) },
      1.0, 1.0)
    assert.is_false(ok)
    assert.is_truthy(message:find("does not overlap append_key", 1, true), message)
  end)

  it("copy between overlapping views as if everything was read first", function()
    for _, shift in ipairs { -3, 1, 64 } do
      local t = nibble.arange(1000, { dtype = "int32" })
      local expected = {}
      for i = 1, 1000 do expected[i] = i - 1 end
      local from, to = math.max(1, 1 - shift), math.max(1, 1 + shift)
      local count = 1000 - math.abs(shift)
      local moved = table.move(expected, from, from + count - 1, to, table.move(expected, 1, 1000, 1, {}))
      t:narrow(1, to, count):copy(t:narrow(1, from, count))
      assert.same(moved, t:totable())
    end
    local m = nibble.arange(9):view(3, 3)
    m:copy(m:transpose(1, 2))
    assert.same({ { 0, 3, 6 }, { 1, 4, 7 }, { 2, 5, 8 } }, m:totable())
  end)
end)

describe("elements that share memory #quick", function()
  local swizzle = nibble.quantization.swizzle_v_scales

  local function range(seed) -- random(low, high), the same in every run of the spec, alone or not
    local next_number = pages.generator(seed)
    return function(low, high) return low + next_number(high - low + 1) end
  end

  -- The bytes of a view's elements, each with how often it is there; the largest.
  local function bytes_of(shape, stride, offset, size)
    local counts, last = {}, 0
    local function visit(dim, at)
      if dim <= #shape then
        for i = 0, shape[dim] - 1 do visit(dim + 1, at + i * stride[dim]) end
        return
      end
      for byte = at * size, at * size + size - 1 do
        counts[byte] = (counts[byte] or 0) + 1
        last = math.max(last, byte)
      end
    end
    visit(1, offset)
    return counts, last
  end

  it("are told from those that interleave", function()
    local pool = nibble.zeros(64, { dtype = "uint8" })
    pool:as_strided({ 2, 3, 1, 8 }, { 24, 16, 8, 1 }, 0):fill(1) -- 0, 16, 24, 32, 40 and 56, 8 bytes each
    assert.equal(("\1"):rep(8) .. ("\0"):rep(8) .. ("\1"):rep(32) .. ("\0"):rep(8) .. ("\1"):rep(8), pool:bytes())
    assert.error(function() pool:as_strided({ 9, 8 }, { 7, 1 }, 0):fill(3) end)
  end)

  it("of one output are found, and no others: all of 500 random views", function()
    local pool = nibble.zeros(4000, { dtype = "uint8" })
    local random, overlapping = range(20), 0
    for _ = 1, 500 do
      local dtype, size = "uint8", 1
      if random(1, 2) == 1 then dtype, size = "float32", 4 end
      local shape, stride = {}, {}
      for dim = 1, random(1, 4) do shape[dim], stride[dim] = random(1, 4), random(0, 30) end
      local counts = bytes_of(shape, stride, 0, size)
      local twice = false
      for _, count in pairs(counts) do twice = twice or count > 1 end
      local view = pool:reinterpret(dtype):as_strided(shape, stride, 0)
      overlapping = overlapping + (twice and 1 or 0)
      assert.equal(not twice, (pcall(view.fill, view, 1)),
        ("{%s} {%s}"):format(table.concat(shape, ", "), table.concat(stride, ", ")))
    end
    assert.is_true(overlapping > 100 and overlapping < 400, overlapping)
  end)

  it("of an output and an input are found, and no others: all of 500 random pairs", function()
    local pool = nibble.zeros(4000, { dtype = "uint8" })
    local random, overlapping, tried = range(21), 0, 0
    while tried < 500 do
      local shape = { random(1, 3), random(1, 3), 4, 4 }
      local strides, offsets, bytes, twice = {}, {}, {}, false
      for k = 1, 2 do
        strides[k] = { random(1, 60), random(1, 60), random(4, 20), 1 }
        if k == 2 and random(1, 2) == 1 then strides[2] = strides[1] end
        offsets[k] = random(0, 60)
        bytes[k] = bytes_of(shape, strides[k], offsets[k], 1)
      end
      for _, count in pairs(bytes[2]) do twice = twice or count > 1 end
      if not twice then
        tried = tried + 1
        local shared = false
        for byte in pairs(bytes[1]) do shared = shared or bytes[2][byte] ~= nil end
        overlapping = overlapping + (shared and 1 or 0)
        local input, out = pool:as_strided(shape, strides[1], offsets[1]),
          pool:as_strided(shape, strides[2], offsets[2])
        assert.equal(not shared, (pcall(swizzle, input, "HND", { out = out })), ("{%s}: {%s} + %d, {%s} + %d"):format(
          table.concat(shape, ", "), table.concat(strides[1], ", "), offsets[1], table.concat(strides[2], ", "),
            offsets[2]))
      end
    end
    assert.is_true(overlapping > 100 and overlapping < 480, overlapping)
  end)

  it("are told where no stride steps over the smaller ones: sets whose sums all differ", function()
    local pool = nibble.zeros(700, { dtype = "uint8" })
    for _, stride in ipairs { { 3, 5, 6, 7 }, { 11, 17, 20, 22, 23, 24 }, { 40, 60, 71, 77, 80, 82, 83, 84 } } do
      local shape = {}
      for dim = 1, #stride do shape[dim] = 2 end
      pool:as_strided(shape, stride, 0):fill(1)
      stride[2] = stride[1] + stride[#stride] - stride[3] -- two sums of two are equal now
      assert.error(function() pool:as_strided(shape, stride, 0):fill(1) end)
    end
  end)
end)

describe("keyword arguments #quick", function()
  local k = nibble.randn(2, 2, 4, 64, { dtype = "bfloat16", seed = 1 })
  local quantize = nibble.quantization.nvfp4_quantize_paged_kv_cache
  local swizzle = nibble.quantization.swizzle_v_scales

  it("stand in a last table for any optional parameter that has not been given", function()
    local _, _, k_scale, v_scale = quantize(k, k, { kv_layout = "HND", k_global_sf = 2.0 })
    assert.equal(0.5, k_scale:item())
    assert.is_true(v_scale:item() < 0.5)
    _, _, k_scale, v_scale = quantize(k, k, "HND", { v_global_sf = 4.0 })
    assert.is_true(k_scale:item() < 0.25)
    assert.equal(0.25, v_scale:item())
    local sf = nibble.randint(0, 120, { 2, 4, 2, 4 }, { dtype = "uint8", seed = 2 })
    assert.is_true(swizzle(sf, { kv_layout = "NHD", inverse = true }):equal(swizzle(sf, "NHD", { inverse = true })))
  end)

  it("are refused when they are unknown, or given already", function()
    local ok, message = pcall(quantize, k, k, "HND", { kv_layout = "HND" })
    assert.is_false(ok)
    local expected = "opts: expected the option k_global_sf, v_global_sf or nvfp4_4over6"
    assert.is_truthy(message:find(expected, 1, true), message)
    assert.is_false(pcall(quantize, k, k, { layout = "HND" }))
    assert.is_false(pcall(swizzle, k, { inverse = true }))
  end)
end)
