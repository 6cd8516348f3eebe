-- 4over6: of the scale that maps a block's largest element to 6 and the one that maps it to 4, the one whose squared
-- error is smaller.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local quantize = nibble.quantization.nvfp4_quantize_paged_kv_cache

-- One block under a global scale of 1: its 16 numbers (the rest 0), the scale byte, and the packed bytes. Chosen from
-- what FlashInfer's own block function, compiled for the host, and numpy say.
local BLOCKS = {
  { "4 fits", { 4, 2, 1, -3, 0.5, -4 }, 0x38, "46d2e10000000000" },
  { "all equal: 6", { 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6 }, 0x38, "7777777777777777" },
  { "a ramp: 4", { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 }, 0x47, "1021324344555566" },
  { "a scale of 0 loses", { 6 * 2 ^ -10, -2 ^ -9, -2 ^ -9 }, 0x01, "a50a000000000000" },
  { "both scales are 0", { 4 * 2 ^ -10, -2 ^ -9, -2 ^ -9 }, 0x00, "8008000000000000" },
  { "4 saturates", { 2400, -1200, 1000 }, 0x7C, "d705000000000000" },
  { "both saturate", { 3000, -1200, 1000 }, 0x7E, "d704000000000000" },
  { "a NaN keeps 6", { 4, 0 / 0, 1, -3, 0.5, -4 }, 0x33, "07e3f10000000000" },
  { "infinity keeps 6", { math.huge, 1, -1 }, 0x7E, "0708000000000000" },
  { "zeros", { 0, -0.0 }, 0x00, "8000000000000000" },
}

-- Rows of K, quantized.
local function appended(key, g, option)
  local rows, dim = key.shape[1], key.shape[3]
  local function zeros(x) return nibble.zeros({ rows, 1, 1, x }, { dtype = "uint8" }) end
  local cache, sf = { zeros(dim // 2), zeros(dim // 2) }, { zeros(dim // 16), zeros(dim // 16) }
  append(key, key, nibble.arange(rows, { dtype = "int64" }), cache, sf, g, g, option)
  return cache[1]:bytes(), sf[1]:bytes()
end

describe("4over6 #quick", function()
  for _, block in ipairs(BLOCKS) do
    for _, dtype in ipairs { "bfloat16", "float16" } do
      it(("%s, %s"):format(block[1], dtype), function()
        local row = table.move(block[2], 1, 16, 1, {})
        for i = #block[2] + 1, 16 do row[i] = 0 end
        local key = nibble.tensor({ { row } }, { dtype = dtype })
        local packed, scale = appended(key, 1.0, { nvfp4_4over6 = true })
        assert.equal(block[4], (packed:gsub(".", function(c) return ("%02x"):format(c:byte()) end)))
        assert.equal(block[3], scale:byte())
        local byte, codes = reference.quantize_block(key:view(16):totable(), 1.0, 0, true)
        assert.equal(block[3], byte)
        assert.equal(block[4]:sub(1, 2), ("%x%x"):format(codes[2], codes[1]))
      end)
    end
  end

  it("gives the reference's bytes, in both layouts, with wide and narrow loads", function()
    local took, rows, heads, dim = 0, 24, 2, 64
    for i, dtype in ipairs { "bfloat16", "float16" } do
      for k, g in ipairs { 1.0, 0.37, 1 / 2688, 0x1p-20, 3e-38 } do
        local nhd = k % 2 == 1
        local function cache(x, element, seed)
          local shape = nhd and { 6, 4, heads, x } or { 6, heads, 4, x }
          return { dtype = element, shape = shape, bytes = data.bytes(seed, 24 * heads * x) }
        end
        local slots = data.integers(k, rows, -1, 24)
        for n, slot in ipairs(slots) do
          for before = 1, n - 1 do
            if slots[before] == slot then slots[n] = -1 end
          end
        end
        local given = {
          append_key = data.floats(10 * i + k, { rows, heads, dim }, dtype),
          append_value = { dtype = dtype, shape = { rows, heads, dim }, bytes = data.bytes(k, rows * heads * dim * 2) },
          slot_mapping = data.array(slots, "int64"), kv_layout = nhd and "NHD" or "HND", k_scale = g, v_scale = g,
          paged_kv_cache = { cache(dim // 2, "uint8", 1), cache(dim // 2, "uint8", 2) },
          kv_cache_sf = { cache(dim // 16, "uint8", 3), cache(dim // 16, "uint8", 4) },
        }
        local plain = reference.append(given)
        given.nvfp4_4over6 = true
        local expected = reference.append(given)
        if plain.kv_cache_sf[1].bytes ~= expected.kv_cache_sf[1].bytes then took = took + 1 end
        for _, lead in ipairs { 64, 62 } do
          local function row_of(array)
            return data.pool({ dtype = dtype, shape = array.shape, lead = lead }):fill(array).tensor
          end
          local caches, sf = {}, {}
          for n = 1, 2 do
            caches[n], sf[n] = data.tensor(given.paged_kv_cache[n]), data.tensor(given.kv_cache_sf[n])
          end
          append(row_of(given.append_key), row_of(given.append_value), data.tensor(given.slot_mapping), caches, sf,
            g, g, given.kv_layout, true)
          for n = 1, 2 do
            assert.tensor_equal(expected.paged_kv_cache[n], caches[n])
            assert.tensor_equal(expected.kv_cache_sf[n], sf[n])
          end
        end
      end
    end
    assert.is_true(took >= 4, took) -- at the other global scales most blocks are at an end of E4M3
  end)

  it("is an option of the paged quantizer too", function()
    for seed, dtype in ipairs { "bfloat16", "float16" } do
      local function normal(n)
        local drawn = nibble.randn({ 2, 4, 2, 64 }, { dtype = dtype, seed = n, device = "cpu" })
        return { dtype = dtype, shape = { 2, 4, 2, 64 }, bytes = drawn:bytes() }
      end
      local given = { kv_layout = "NHD", k_cache = normal(seed), v_cache = normal(seed + 2) }
      for _, global in ipairs { 0, 300.0 } do
        given.k_global_sf, given.v_global_sf = global > 0 and global or nil, global > 0 and global or nil
        given.nvfp4_4over6 = nil
        local plain = reference.quantize_cache(given)
        given.nvfp4_4over6 = true
        local expected = reference.quantize_cache(given)
        assert.not_equal(plain.kv_sf[2].bytes, expected.kv_sf[2].bytes)
        local cache, sf = quantize(data.tensor(given.k_cache), data.tensor(given.v_cache), { kv_layout = "NHD",
          k_global_sf = given.k_global_sf, v_global_sf = given.v_global_sf, nvfp4_4over6 = { err_mode = "MSE" } })
        for n = 1, 2 do
          assert.tensor_equal(expected.kv_cache[n], cache[n])
          assert.tensor_equal(expected.kv_sf[n], sf[n])
        end
      end
    end
  end)

  it("is off by default, and takes no other mode", function()
    local key = nibble.tensor({ { { 4, 2, 1, -3, 0.5, -4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 } } }, { dtype = "bfloat16" })
    for _, off in ipairs { {}, { nvfp4_4over6 = false } } do
      assert.equal(0x33, select(2, appended(key, 1.0, off)):byte())
    end
    assert.equal(0x38, select(2, appended(key, 1.0, { nvfp4_4over6 = { err_mode = "MSE" } })):byte())
    for _, wrong in ipairs {
      { { err_mode = "MAE" }, "nvfp4_4over6.err_mode", 'expected "MSE", got a string "MAE"' },
      { {}, "nvfp4_4over6.err_mode", 'expected "MSE", got nil' },
      { { e4m3_max = 256 }, "opts", 'expected the option err_mode, got a string "e4m3_max"' },
      { "MSE", "nvfp4_4over6", 'expected true, false or {err_mode = "MSE"}, got a string "MSE"' },
    } do
      assert.raises_like(function() appended(key, 1.0, { nvfp4_4over6 = wrong[1] }) end,
        "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", wrong[2], wrong[3])
    end
  end)

  it("is what observers are told, and what a trace repeats", function()
    local key = nibble.randn({ 4, 1, 64 }, { dtype = "bfloat16" })
    local seen = {}
    nibble.observe(function(o) if o.kernel == "append" then seen[#seen + 1] = o.attributes end end)
    appended(key, 1.0, { nvfp4_4over6 = true })
    appended(key, 1.0, {})
    nibble.observe(nil)
    assert.same({ { k_scale = 1.0, v_scale = 1.0, nvfp4_4over6 = true }, { k_scale = 1.0, v_scale = 1.0 } }, seen)
  end)

  it("is explained: both candidates, and which is kept", function()
    local row = { 4, 2, 1, -3, 0.5, -4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
    local pool = require("nibble.pages").caches { num_pages = 1, page_size = 4, num_kv_heads = 1, head_dim = 16 }
    local key = nibble.tensor({ { row } }, { dtype = "bfloat16" })
    append(key, key, nibble.tensor { 0 }, pool.paged_kv_cache, pool.kv_cache_sf, 1.0, 1.0, { nvfp4_4over6 = true })
    local text, fields = require("nibble.explain").value(pool, { slot = 0, dim = 3, input = row, nvfp4_4over6 = true })
    assert.matches("4over6 +0x33 maps it to 6, squared error 0.123046875; 0x38 maps it to 4, squared error 0: "
      .. "4 is chosen", text)
    assert.is_true(fields.as_stored)
    assert.same({ { maximum = 6, scale_byte = 0x33, error = 0.123046875 },
      { maximum = 4, scale_byte = 0x38, error = 0.0 } }, fields.candidates)
  end)
end)
