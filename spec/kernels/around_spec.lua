-- The pieces around the four operations: swizzle_v_scales, nvfp4_quantize_paged_kv_cache, mla.dequantize_cache,
-- rope_table; and the operations one after the other.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local page, quantization, mla = nibble.page, nibble.quantization, nibble.mla

local function layout_shape(layout, pages, page_size, heads, x)
  if layout == "NHD" then return {pages, page_size, heads, x} end
  return {pages, heads, page_size, x}
end

describe("swizzle_v_scales", function()
  local swizzle = quantization.swizzle_v_scales

  it("matches the reference both ways, strided, for every layout, page size and number of blocks #quick", function()
    local number = 0
    for _, layout in ipairs {"NHD", "HND"} do
      for _, page_size in ipairs {4, 16, 64} do
        for _, blocks in ipairs {4, 8, 12, 32} do
          for _, dtype in ipairs {"uint8", "float8_e4m3fn"} do
            number = number + 1
            local shape = layout_shape(layout, 3, page_size, 2, blocks)
            local source = data.pool {dtype = dtype, shape = shape, strides = data.strides(shape, {7, 3, 2}),
                                      seed = number}
            local context = ("%s page size %d blocks %d %s"):format(layout, page_size, blocks, dtype)
            for _, inverse in ipairs {false, true} do
              local expected = reference.swizzle {v_sf = source:array(), kv_layout = layout, inverse = inverse}
              assert.tensor_equal(expected, swizzle(source.tensor, layout, {inverse = inverse}), context)
              local out = data.pool {dtype = dtype, shape = shape, strides = data.strides(shape, {1, 4, 1}),
                                     seed = number + 1}
              local result = swizzle(source.tensor, layout, {inverse = inverse, out = out.tensor})
              assert.is_true(result == out.tensor)
              out:assert_equal(expected, context .. " into out")
            end
            source:assert_unchanged()
          end
        end
      end
    end
  end)

  it("puts logical (t, s) at row 4*(t//4) + s//(S/4), column 4*(s % (S/4)) + t%4 #quick", function()
    local list = {}
    for i = 0, 8 * 8 - 1 do list[i + 1] = i end
    local out = swizzle(data.indices(list, "uint8", {1, 1, 8, 8}), "HND"):totable()
    for t = 0, 7 do
      for s = 0, 7 do
        assert.equal(t * 8 + s, out[1][1][4 * (t // 4) + s // 2 + 1][4 * (s % 2) + t % 4 + 1])
      end
    end
  end)

  it("undoes itself with inverse #quick", function()
    local sf = data.tensor {dtype = "uint8", shape = {2, 3, 16, 8}, bytes = data.bytes(3, 2 * 3 * 16 * 8)}
    assert.tensor_equal(sf, swizzle(swizzle(sf, "HND"), "HND", {inverse = true}))
    assert.is_false(sf:equal(swizzle(sf, "HND")))
  end)

  it("does nothing for empty scales, and works inside a capture #quick", function()
    for _, shape in ipairs {{0, 2, 4, 4}, {2, 0, 4, 4}} do
      assert.same(shape, swizzle(nibble.zeros(shape, {dtype = "uint8"}), "HND").shape)
    end
    local sf, out = nibble.zeros(1, 2, 4, 4, {dtype = "uint8"}), nil
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function() out = swizzle(sf, "HND") end)
    for n = 1, 3 do
      stream:scope(function()
        sf:copy(data.tensor {dtype = "uint8", shape = {1, 2, 4, 4}, bytes = data.bytes(n, 32)})
        graph:replay()
      end)
      stream:synchronize()
      assert.tensor_equal(reference.swizzle {v_sf = sf, kv_layout = "HND"}, out)
    end
  end)
end)

describe("nvfp4_quantize_paged_kv_cache", function()
  local quantize = quantization.nvfp4_quantize_paged_kv_cache
  local OPERATION = "quantization.nvfp4_quantize_paged_kv_cache"

  local function check(c, context)
    local shape = layout_shape(c.layout, c.pages, c.page_size, c.heads, c.head_dim)
    local k = data.pool({dtype = c.dtype, shape = shape, strides = data.strides(shape, {16, 8, 24}), seed = 1})
    local v = data.pool({dtype = c.v_dtype or c.dtype, shape = shape, seed = 2})
    local make = c.make or data.finite
    k:fill(make(c.seed, shape, c.dtype))
    v:fill(make(c.seed + 1, shape, v.dtype))
    local expected = reference.quantize_cache {k_cache = k:array(), v_cache = v:array(), kv_layout = c.layout,
      k_global_sf = c.k_global_sf, v_global_sf = c.v_global_sf}
    local function scale(x) return x and (c.device_scales and data.scale(x) or x) end
    local cache, sf, k_scale, v_scale = quantize(k.tensor, v.tensor, c.layout, scale(c.k_global_sf),
      scale(c.v_global_sf))
    if c.fault then
      assert.is_true(#expected.faults > 0)
      assert.faults_like(nibble.check_faults, OPERATION, c.fault)
      nibble.check_faults()
    else
      assert.same({}, expected.faults)
      assert.tensor_equal(expected.k_scale, k_scale, context .. ": k_scale")
      assert.tensor_equal(expected.v_scale, v_scale, context .. ": v_scale")
    end
    for i, side in ipairs {"k", "v"} do
      assert.tensor_equal(expected.kv_cache[i], cache[i], context .. ": data of " .. side)
      assert.tensor_equal(expected.kv_sf[i], sf[i], context .. ": scales of " .. side)
    end
    k:assert_unchanged()
    v:assert_unchanged()
    return cache, sf, k_scale, v_scale
  end

  for _, dtype in ipairs {"float16", "bfloat16"} do
    for _, layout in ipairs {"NHD", "HND"} do
      it(("matches the reference, %s %s"):format(dtype, layout), function()
        local number = 0
        for _, page_size in ipairs {4, 16, 64} do
          for _, head_dim in ipairs {64, 128, 192, 256, 512} do
            number = number + 1
            check({dtype = dtype, layout = layout, page_size = page_size, head_dim = head_dim, heads = page_size == 64
                   and 1 or 2, pages = 2,
                   seed = number, k_global_sf = number % 3 == 0 and 0.7 or nil, v_global_sf = number % 2 == 0 and 3000
                   or nil,
                   device_scales = number % 4 == 0}, ("page size %d head_dim %d"):format(page_size, head_dim))
          end
        end
      end)
    end
  end

  it("matches the reference with a head_dim of more than 64 blocks, and of more than twice as many #quick", function()
    for _, layout in ipairs {"NHD", "HND"} do
      check({dtype = "bfloat16", layout = layout, page_size = 4, head_dim = 68 * 16, heads = 1, pages = 1, seed = 11},
        layout)
    end
    check({dtype = "float16", layout = "HND", page_size = 4, head_dim = 132 * 16, heads = 1, pages = 1, seed = 12},
      "132 blocks")
  end)

  it("matches the reference on strided caches with several heads, given scales and computed ones #quick", function()
    for n, layout in ipairs {"NHD", "HND"} do
      local c = {dtype = "bfloat16", layout = layout, page_size = 4, head_dim = 64, heads = 3, pages = 2, seed = 20 + n}
      check(c, layout)
      c.k_global_sf, c.v_global_sf = 0.7, 3000
      check(c, layout .. ", given")
      c.device_scales = true
      check(c, layout .. ", given on the device")
    end
  end)

  it("matches the reference with K and V of different dtypes #quick", function()
    for n, pair in ipairs {{"float16", "bfloat16"}, {"bfloat16", "float16"}} do
      check({dtype = pair[1], v_dtype = pair[2], layout = "HND", page_size = 4, head_dim = 64, heads = 2, pages = 2,
        seed = 30 + n, v_global_sf = n == 2 and 100 or nil}, pair[1])
    end
  end)

  it("matches the reference on many pages: work that is spread over threads", function()
    check({dtype = "float16", layout = "HND", page_size = 16, head_dim = 128, heads = 4, pages = 40, seed = 9},
          "40 pages")
  end)

  local function base(changes)
    local c = {dtype = "bfloat16", layout = "HND", page_size = 4, head_dim = 64, heads = 2, pages = 3, seed = 5}
    for key, value in pairs(changes) do c[key] = value end
    return c
  end

  it("ignores NaN elements in the amax #quick", function()
    check(base {make = function(seed, shape, dtype)
      local array = data.finite(seed, shape, dtype)
      array.bytes = "\xC1\x7F\xFF\xFF" .. array.bytes:sub(5)
      return array
    end}, "NaNs")
  end)

  it("gives g = 1 / (448 / 1e-12) for a cache of zeros, and layout HND by default #quick", function()
    local zeros = nibble.zeros(2, 1, 4, 64, {dtype = "float16"})
    local cache, sf, k_scale, v_scale = quantize(zeros, zeros)
    local g = reference.f32(1 / reference.f32(448 / reference.f32(1e-12)))
    assert.equal(g, k_scale:item())
    assert.equal(g, v_scale:item())
    for i = 1, 2 do
      assert.equal(("\0"):rep(2 * 4 * 32), cache[i]:bytes())
      assert.equal(("\0"):rep(2 * 4 * 4), sf[i]:bytes())
    end
    assert.same({2, 1, 4, 32}, cache[1].shape)
    assert.same({2, 1, 4, 4}, sf[2].shape)
    assert.equal("float8_e4m3fn", sf[1].dtype)
    assert.same({1}, k_scale.shape)
  end)

  it("an infinite amax is a fault and writes zeros #quick", function()
    for _, side in ipairs {"k", "v"} do
      for _, infinity in ipairs {"\x80\x7F", "\x80\xFF"} do
        check(base {fault = side .. "_cache", make = function(seed, shape, dtype)
          local array = data.finite(seed, shape, dtype)
          if (seed == 5) == (side == "k") then array.bytes = array.bytes:sub(1, -3) .. infinity end
          return array
        end}, side)
      end
    end
  end)

  it("a bad global scale on the device is a fault and writes zeros #quick", function()
    for _, bad in ipairs {0.0, -1.0, math.huge, 0 / 0, 1e-40} do
      check(base {k_global_sf = bad, v_global_sf = 2, device_scales = true, fault = "k_global_sf"}, "k " .. bad)
      check(base {k_global_sf = 2, v_global_sf = bad, device_scales = true, fault = "v_global_sf"}, "v " .. bad)
    end
  end)

  it("does nothing for empty caches, and works inside a capture #quick", function()
    local cache, sf = quantize(nibble.zeros(0, 2, 4, 64, {dtype = "float16"}),
                               nibble.zeros(0, 2, 4, 64, {dtype = "float16"}))
    assert.same({0, 2, 4, 32}, cache[1].shape)
    assert.same({0, 2, 4, 4}, sf[2].shape)
    nibble.synchronize()
    local k = nibble.zeros(2, 2, 4, 64, {dtype = "float16"})
    local k_scale, v_scale
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function() cache, sf, k_scale, v_scale = quantize(k, k, "HND") end)
    for n = 1, 3 do
      stream:scope(function()
        k:copy(data.tensor(data.finite(n, {2, 2, 4, 64}, "float16")))
        graph:replay()
      end)
      stream:synchronize()
      local expected = reference.quantize_cache {k_cache = k, v_cache = k}
      assert.tensor_equal(expected.k_scale, k_scale)
      assert.tensor_equal(expected.v_scale, v_scale)
      for i = 1, 2 do
        assert.tensor_equal(expected.kv_cache[i], cache[i])
        assert.tensor_equal(expected.kv_sf[i], sf[i])
      end
    end
  end)
end)

describe("mla.dequantize_cache", function()
  local function cache_of(page_size, pages, seed)
    local shape = {pages, page_size, 384}
    return data.pool {dtype = "uint8", shape = shape, strides = {page_size * 384 + 32, 384, 1}, seed = seed}
  end

  it("gives code value * scale, rounded, and the RoPE bits as stored; any bytes #quick", function()
    for n, page_size in ipairs {1, 3, 64} do
      local pool = cache_of(page_size, 3, n)
      local slots = {0, page_size * 3 - 1, page_size, 0}
      for _, dtype in ipairs {"int32", "int64"} do
        assert.tensor_equal(reference.mla_dequantize({cache = pool:array(), slots = data.array(slots, "int64")}).rows,
                            mla.dequantize_cache(pool.tensor, data.indices(slots, dtype)), "page size " .. page_size)
      end
      pool:assert_unchanged()
    end
  end)

  it("reads slots above 2^30 #quick", function()
    local pool = data.pool {dtype = "uint8", shape = {1, 4, 384}, seed = 5}
    local pages = pool.tensor:expand(1 << 29, 4, 384) -- the one page under very many numbers
    local slots = {1 << 30, (1 << 30) + 5, 0x7FFFFFFF}
    local expected = reference.mla_dequantize({cache = pool:array(), slots = data.array({0, 1, 3}, "int64")}).rows
    for _, dtype in ipairs {"int32", "int64"} do
      assert.tensor_equal(expected, mla.dequantize_cache(pages, data.indices(slots, dtype)), dtype)
      assert.tensor_equal(expected, mla.dequantize_cache(pages, data.scattered(slots, dtype)), dtype .. ", scattered")
    end
  end)

  it("gives a zero row and a fault for a bad slot #quick", function()
    local pool = cache_of(4, 2, 9)
    for _, bad in ipairs {-1, 8, math.maxinteger, math.mininteger, 1 << 32} do
      local slots = {3, bad, 7}
      local rows = mla.dequantize_cache(pool.tensor, data.indices(slots, "int64"))
      assert.faults_like(nibble.check_faults, "mla.dequantize_cache", "slots", bad, 1)
      nibble.check_faults()
      assert.tensor_equal(reference.mla_dequantize({cache = pool:array(), slots = data.array(slots, "int64")}).rows,
                          rows, "slot " .. bad)
    end
  end)

  it("gives no rows for no slots #quick", function()
    assert.same({0, 512}, mla.dequantize_cache(cache_of(4, 2, 9).tensor, nibble.zeros(0, {dtype = "int32"})).shape)
  end)

  it("gives back what rope insert stored, within half a step of its block's scale #quick", function()
    local kv = data.tensor(data.finite(17, {6, 512}, "bfloat16"))
    local cache = nibble.zeros(2, 3, 384, {dtype = "uint8"})
    local slots = data.indices {0, 1, 2, 3, 4, 5}
    mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, slots, data.indices({0, 0, 0, 0, 0, 0}, "int64"),
      nibble.rope_table(1))
    local rows, source = mla.dequantize_cache(cache, slots):totable(), kv:totable()
    for r = 1, 6 do
      for b = 0, 27 do
        local amax = 0
        for d = b * 16 + 1, b * 16 + 16 do amax = math.max(amax, math.abs(source[r][d])) end
        local s = reference.decode(reference.encode(reference.f32(amax / 6), "float8_e4m3fn"), "float8_e4m3fn")
        if s > 2.0 ^ -6 and s < 448 then -- outside, the scale itself is coarse
          for d = b * 16 + 1, b * 16 + 16 do
            assert.is_true(math.abs(rows[r][d] - source[r][d]) <= s * 1.01)
          end
        end
      end
    end
  end)
end)

describe("rope_table", function()
  it("is cos | sin of position * theta^(-2p/64), computed in float64 and rounded once #quick", function()
    for _, opts in ipairs {{}, {theta = 5e5}, {dtype = "bfloat16"}, {dtype = "float16", theta = 100}} do
      local table_ = nibble.rope_table(130, opts)
      local dtype = opts.dtype or "float32"
      assert.same({130, 64}, table_.shape)
      assert.equal(dtype, table_.dtype)
      local values = table_:totable()
      -- The library's cos may differ from this one in float64's last bits: both neighbours of a near-tie are right.
      local function near(x, got)
        local function rounded(y) return reference.decode(reference.encode(y, dtype), dtype) end
        return got == rounded(x) or got == rounded(x + 1e-13) or got == rounded(x - 1e-13)
      end
      for _, position in ipairs {0, 1, 2, 3, 17, 64, 129} do
        for p = 0, 31 do
          local angle = position * (opts.theta or 1e4) ^ (-2 * p / 64)
          assert.is_true(near(math.cos(angle), values[position + 1][p + 1]))
          assert.is_true(near(math.sin(angle), values[position + 1][p + 33]))
        end
      end
    end
  end)

  it("has 1 | 0 for position 0, and no rows for 0 positions #quick", function()
    local row = nibble.rope_table(1):totable()[1]
    for p = 1, 32 do
      assert.equal(1, row[p])
      assert.equal(0, row[p + 32])
    end
    assert.same({0, 64}, nibble.rope_table(0).shape)
  end)
end)

describe("one after the other:", function()
  -- Groups with amplitude g + 1, so that each block has its own scale.
  local function amplitudes(rows, heads, dim)
    local list = {}
    for row = 0, rows - 1 do
      for head = 0, heads - 1 do
        for d = 0, dim - 1 do
          local group = ((row * heads + head) * (dim // 16) + d // 16) % 61
          list[#list + 1] = d % 16 == 0 and 6.0 * (group + 1) or (d % 16 - 8) / 8 * (group + 1)
        end
      end
    end
    return data.tensor(data.array(list, "bfloat16", {rows, heads, dim}))
  end

  for _, page_size in ipairs {4, 16} do
    it("V's scales are linear after append, interleaved after swizzle, and materialize reads those: page size "
       .. page_size .. " #quick",
    function()
      local heads, dim, pages = 2, 128, 3
      local rows = pages * page_size
      local input = amplitudes(rows, heads, dim)
      local function cache(x, dtype) return nibble.zeros(pages, heads, page_size, x, {dtype = dtype}) end
      local k, v, k_sf, v_sf = cache(64, "uint8"), cache(64, "uint8"), cache(8, "float8_e4m3fn"),
        cache(8, "float8_e4m3fn")
      page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(input, input, nibble.arange(rows), {k, v},
        {k_sf, v_sf}, 1, 1, "HND")
      assert.tensor_equal(k_sf, v_sf)
      local scales = k_sf:totable()
      for row = 0, rows - 1 do
        for head = 0, heads - 1 do
          for b = 0, 7 do
            local byte = reference.encode((((row * heads + head) * 8 + b) % 61) + 1, "float8_e4m3fn")
            assert.equal(reference.decode(byte, "float8_e4m3fn"),
                         scales[row // page_size + 1][head + 1][row % page_size + 1][b + 1])
          end
        end
      end
      local swizzled = quantization.swizzle_v_scales(v_sf, "HND")
      assert.is_false(swizzled:equal(v_sf))
      local tables, lengths = data.indices({0, 1, 2}, "int32", {1, 3}), data.indices {rows}
      local out = quantization.nvfp4_kv_materialize_fp8(k, v, k_sf, swizzled, tables, lengths, rows)
      assert.tensor_equal(out:select(2, 1):contiguous(), out:select(2, 2):contiguous(), "K and V hold the same")
      local wrong = quantization.nvfp4_kv_materialize_fp8(k, v, k_sf, v_sf, tables, lengths, rows)
      assert.is_false(wrong:equal(out))
    end)
  end

  it("K 0.5 and V 2.0 go through append, dequantize and materialize with K's and V's scale each in its place #quick",
     function()
    local rows, heads, dim, page_size = 8, 2, 64, 4
    local key = data.tensor(data.finite(1, {rows, heads, dim}, "bfloat16"))
    local value = data.tensor(data.finite(2, {rows, heads, dim}, "bfloat16"))
    local function cache(x, dtype) return nibble.zeros(2, heads, page_size, x, {dtype = dtype}) end
    local pair, sf = {cache(32, "uint8"), cache(32, "uint8")}, {cache(4, "float8_e4m3fn"), cache(4, "float8_e4m3fn")}
    local slots, k_scale, v_scale = nibble.arange(rows), data.scale(0.5), data.scale(2.0)
    page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(key, value, slots, pair, sf, k_scale, v_scale, "HND")
    local expected = reference.append {append_key = key, append_value = value, slot_mapping = slots,
      paged_kv_cache = {cache(32, "uint8"), cache(32, "uint8")},
      kv_cache_sf = {cache(4, "float8_e4m3fn"), cache(4, "float8_e4m3fn")},
      k_scale = 0.5, v_scale = 2.0, kv_layout = "HND"}
    local tables, lengths = data.indices({0, 1}, "int32", {1, 2}), data.indices {rows}
    local out = {nibble.zeros(1, rows, heads, dim, {dtype = "float16"}),
                 nibble.zeros(1, rows, heads, dim, {dtype = "float16"})}
    local want = reference.dequantize {paged_kv_cache = expected.paged_kv_cache, kv_cache_sf = expected.kv_cache_sf,
                                       block_tables = tables,
      seq_lens = lengths, k_scale = 0.5, v_scale = 2.0, output_k = out[1], output_v = out[2], kv_layout = "HND"}
    quantization.nvfp4_kv_dequantize_paged(pair, sf, tables, lengths, k_scale, v_scale, out[1], out[2], "HND")
    assert.tensor_equal(want.output_k, out[1])
    assert.tensor_equal(want.output_v, out[2])
    -- what comes out is near what went in: the convention is the same on both ways
    for i, source in ipairs {key, value} do
      local a, b = source:totable(), out[i]:totable()
      for r = 1, rows do
        for h = 1, heads do
          for block = 0, dim // 16 - 1 do
            local amax = 0
            for d = block * 16 + 1, block * 16 + 16 do amax = math.max(amax, math.abs(a[r][h][d])) end
            if amax > 0.5 and amax < 448 then
              for d = block * 16 + 1, block * 16 + 16 do
                assert.is_true(math.abs(a[r][h][d] - b[1][r][h][d]) <= amax / 6 * 1.1)
              end
            end
          end
        end
      end
    end
    local swizzled = quantization.swizzle_v_scales(sf[2], "HND")
    local fp8 = quantization.nvfp4_kv_materialize_fp8(pair[1], pair[2], sf[1], swizzled, tables, lengths, rows)
    assert.tensor_equal(reference.materialize {k_cache = expected.paged_kv_cache[1],
      v_cache = expected.paged_kv_cache[2],
      k_block_scales = expected.kv_cache_sf[1], v_block_scales = reference.swizzle {v_sf = expected.kv_cache_sf[2],
      kv_layout = "HND"},
      block_tables = tables, seq_lens = lengths, max_kv_len = rows}.kv_cache_fp8, fp8)
  end)
end)
