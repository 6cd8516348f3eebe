-- Outputs and what they may share memory with.
local nibble = require "nibble"

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
    for _, pair in ipairs { { part(0, 32), k }, { part(256, 32), v }, { part(512, 4), k_sf }, { part(544, 4), v_sf } } do
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
    local ok, message = pcall(append, key, key, slots, { cache, free[1] }, { free[2]:narrow(4, 1, 4), free[3]:narrow(4, 1, 4) },
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
    assert.is_truthy(message:find("opts: expected the option k_global_sf or v_global_sf", 1, true), message)
    assert.is_false(pcall(quantize, k, k, { layout = "HND" }))
    assert.is_false(pcall(swizzle, k, { inverse = true }))
  end)
end)
