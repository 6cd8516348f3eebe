-- nibble.explain: every number that it tells is checked against the storage and the reference; errors of heads.
local explain = require "nibble.explain"
local nibble = require "nibble"
local numbers = require "nibble.numbers"
local pages = require "nibble.pages"
local reference = require "nibble.reference"
local process = require "spec.support.runtime_process"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

-- A byte of a storage, past everything that explain uses to find it.
local function byte_of(place)
  return nibble.peek({ storage = place.storage, offset = place.byte, dtype = "uint8", shape = { 1 },
    stride = { 1 } }):byte()
end

local function filled(layout, head_dim, opts)
  local pool = pages.caches { num_pages = 4, page_size = 4, num_kv_heads = 3, head_dim = head_dim, kv_layout = layout,
    page_padding = 64, sf_page_padding = 16, fill = 0x5A, device = opts and opts.device }
  local k = nibble.randn(3, 3, head_dim, { dtype = "bfloat16", seed = 1 })
  local v = nibble.randn(3, 3, head_dim, { dtype = "bfloat16", seed = 2 })
  append(k, v, nibble.tensor { 5, 2, 15 }, pool.paged_kv_cache, pool.kv_cache_sf, 0.5, 0.25, layout)
  return pool, { k, v }
end

describe("nibble.explain #quick", function()
  for _, layout in ipairs { "NHD", "HND" } do
    it("tells of each element of " .. layout .. " caches what was stored, from what and where", function()
      local pool, rows = filled(layout, 64)
      local inputs = { reference.values(reference.array(rows[1])), reference.values(reference.array(rows[2])) }
      for i, slot in ipairs { 5, 2, 15 } do
        for side, kv in ipairs { "K", "V" } do
          local g = side == 1 and 0.5 or 0.25
          for head = 0, 2 do
            for dim = 0, 63, side == 1 and 7 or 9 do
              local block = {}
              for d = 1, 16 do block[d] = inputs[side][((i - 1) * 3 + head) * 64 + dim // 16 * 16 + d] end
              local scale_byte, codes = reference.quantize_block(block, g)
              local text, f = explain.value(pool, { kv = kv, slot = slot, head = head, dim = dim, global_scale = g,
                input = rows[side][i] })
              assert.same({ slot // 4, slot % 4, scale_byte, codes, codes[dim % 16 + 1], block[dim % 16 + 1], true },
                { f.page, f.entry, f.scale_byte, f.codes, f.code, f.input, f.as_stored })
              assert.equal(f.value * f.scale * g, f.decoded)
              assert.equal(f.decoded - f.input, f.error)
              local byte = byte_of(f.code_place)
              assert.equal(f.code, dim % 2 == 0 and byte & 15 or byte >> 4)
              assert.equal(scale_byte, byte_of(f.scale_place))
              assert.is_truthy(text:find(("byte %d of storage"):format(f.code_place.byte), 1, true))
              assert.is_truthy(text:find(("0x%02X, its %s nibble"):format(byte, dim % 2 == 0 and "low" or "high"), 1,
                true))
            end
          end
        end
      end
    end)

    it("finds interleaved V scales in " .. layout .. " caches", function()
      local pool, rows = filled(layout, 128)
      local swizzled = nibble.quantization.swizzle_v_scales(pool.kv_cache_sf[2], layout)
      local seen = {}
      for dim = 0, 127, 16 do
        local opts = { kv = "V", slot = 2, head = 1, dim = dim, global_scale = 0.25, input = rows[2][2] }
        local plain = select(2, explain.value(pool, opts))
        opts.sf, opts.kv_layout, opts.interleaved = { pool.kv_cache_sf[1], swizzled }, layout, true
        local _, f = explain.value(pool.paged_kv_cache, opts)
        assert.same({ plain.scale_byte, plain.code, plain.decoded, true },
          { f.scale_byte, f.code, f.decoded, f.as_stored })
        assert.equal(plain.scale_byte, byte_of(f.scale_place))
        assert.is_nil(seen[f.scale_place.byte])
        seen[f.scale_place.byte] = true
      end
    end)
  end

  it("takes a stacked tensor, page and entry, a scale tensor, and a block or a head's row as input", function()
    local stacked = nibble.zeros(2, 2, 4, 1, 16, { dtype = "uint8" })
    local sf = nibble.zeros(2, 2, 4, 1, 2, { dtype = "float8_e4m3fn" })
    local k = nibble.randn(1, 1, 32, { dtype = "float16", seed = 3 })
    append(k, k, nibble.tensor { 6 }, stacked, sf, 1.0, 1.0)
    local row = k[{ 1, 1 }]
    for _, input in ipairs { row, row:totable(), row:narrow(1, 17, 16), row:narrow(1, 17, 16):totable() } do
      local _, f = explain.value(stacked, { sf = sf, page = 1, entry = 2, dim = 20, input = input,
        global_scale = nibble.tensor(1.0) })
      assert.same({ true, row[21], 1, 4 }, { f.as_stored, f.input, f.block, f.element })
    end
  end)

  it("tells the steps of a known block in words", function()
    local pool = pages.caches { num_pages = 1, page_size = 1, num_kv_heads = 1, head_dim = 16 }
    local k = nibble.tensor({ { { 6, 3, -1, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.3 } } }, { dtype = "bfloat16" })
    append(k, k, nibble.tensor { 0 }, pool.paged_kv_cache, pool.kv_cache_sf, 1.0, 1.0)
    local id = pool.paged_kv_cache[1]:storage()
    assert.equal(([[
K of slot 0 (page 0, entry 0), head 0, dimension 2 (block 0, element 2), NHD
  input           -1
  block maximum   6, at dimension 0
  scale           6 / (6 * 1) = 1, to the nearest E4M3: 0x38 = 1
  global scale    1
  code            -1 * 1 = -1, to the nearest E2M1: A = -1
  decoded         -1 * 1 * 1 = -1
  error           0 (0.000 half steps of E2M1)
  code's place    byte 1 of storage %d (page 0, entry 0, head 0, byte 1 of its row): 0x1A, its low nibble
  scale's place   byte 0 of storage %d (page 0, entry 0, head 0, byte 0 of its row)]]):format(id,
      pool.kv_cache_sf[1]:storage()),
      (explain.value(pool, { slot = 0, dim = 2, input = k })))
    assert.equal(([[
K of slot 0 (page 0, entry 0), head 0, dimension 0 (block 0, element 0), NHD
  block maximum   6, decoded (no input was given)
  scale           0x38 = 1
  global scale    1
  code            7 = 6
  decoded         6 * 1 * 1 = 6
  code's place    byte 0 of storage %d (page 0, entry 0, head 0, byte 0 of its row): 0x57, its low nibble
  scale's place   byte 0 of storage %d (page 0, entry 0, head 0, byte 0 of its row)]]):format(id,
      pool.kv_cache_sf[1]:storage()),
      (explain.value(pool, { slot = 0 })))
  end)

  it("says when what is stored is not what the input gives", function()
    local pool, rows = filled("NHD", 64)
    local opts = { slot = 5, head = 1, dim = 17, global_scale = 0.5, input = rows[1][1] }
    local _, before = explain.value(pool, opts)
    local data = pool.paged_kv_cache[1][{ 2, 2, 2 }]
    data[9] = data[9] ~ 0x10
    local text, f = explain.value(pool, opts)
    assert.is_false(f.as_stored)
    assert.equal(before.code ~ 1, f.code)
    assert.is_truthy(text:find(("IS STORED, BUT %X = "):format(before.code), 1, true), text)
    data[9] = data[9] ~ 0x10
    local sf = pool.kv_cache_sf[1]:reinterpret("uint8")[{ 2, 2, 2 }]
    sf[2] = sf[2] + 8
    text, f = explain.value(pool, opts)
    assert.is_false(f.as_stored)
    assert.is_truthy(text:find(("IS STORED, BUT 0x%02X = "):format(before.scale_byte), 1, true), text)
  end)

  it("tells of DeepSeek-V4's records, their RoPE dimensions too", function()
    local kv = nibble.randn(3, 512, { dtype = "bfloat16", seed = 4 })
    local turn = nibble.rope_table(32)
    local positions = { 3, 9, 11 }
    for _, shape in ipairs { { 2, 4, 384 }, { 2, 1, 4, 384 }, { 2, 4, 1, 384 } } do
      local cache = nibble.zeros(shape, { dtype = "uint8" })
      nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, nibble.tensor { 1, 6, 7 }, nibble.tensor(positions),
        turn)
      local wanted = nibble.mla.dequantize_cache(cache, nibble.tensor { 1, 6, 7 })
      for i, slot in ipairs { 1, 6, 7 } do
        for dim = 0, 511, 5 do
          local _, f = explain.value(cache, { slot = slot, dim = dim, input = kv[i], position = positions[i],
            cos_sin_cache = turn })
          assert.equal(wanted[{ i, dim + 1 }], numbers.decode(numbers.encode(f.decoded, "bfloat16"), "bfloat16"))
          assert.equal(kv[{ i, dim + 1 }], f.input)
          if dim < 448 then
            assert.is_true(f.as_stored)
            assert.equal(f.scale_byte, byte_of(f.scale_place))
            assert.equal(f.code, byte_of(f.code_place) >> dim % 2 * 4 & 15)
          else
            assert.equal(f.decoded, f.rotated)
            assert.equal(numbers.encode(f.decoded, "bfloat16") & 255, byte_of(f.code_place))
          end
        end
      end
    end
  end)

  it("prints", function()
    local result = process.script([[
      local nibble, pages = require "nibble", require "nibble.pages"
      local pool = pages.caches { num_pages = 1, page_size = 1, num_kv_heads = 1, head_dim = 16, fill = 0x21 }
      assert(select("#", nibble.explain(pool, { slot = 0, dim = 3 })) == 0)
    ]])
    assert.are.same({ 0, "" }, { result.status, result.stderr })
    assert.matches("^K of slot 0 .*\n  code            2 = 1\n.*0x21, its high nibble\n", result.stdout)
  end)

  it("checks its arguments", function()
    local pool = pages.caches { num_pages = 2, page_size = 2, num_kv_heads = 2, head_dim = 32 }
    for _, case in ipairs {
      { { pool }, "explain: options: expected a table, got nil" },
      { { pool, {} }, "explain: page: expected an integer 0..1, got nil" },
      { { pool, { slot = 4 } }, "explain: slot: expected an integer 0..3, got 4" },
      { { pool, { slot = -1 } }, "explain: slot: expected an integer 0..3, got %-1" },
      { { pool, { slot = 1.5 } }, "explain: slot: expected an integer 0..3, got 1.5" },
      { { pool, { slot = 0, head = 2 } }, "explain: head: expected an integer 0..1, got 2" },
      { { pool, { slot = 0, dim = 32 } }, "explain: dim: expected an integer 0..31, got 32" },
      { { pool, { slot = 0, kv = "Q" } }, 'explain: kv: expected "K" or "V", got Q' },
      { { pool, { slot = 0, kv_layout = "NDH" } }, 'explain: kv_layout: expected "NHD" or "HND", got NDH' },
      { { pool, { slot = 0, dims = 3 } }, "explain: dims: expected one of .*[^ ], got an unknown option" },
      { { pool, { slot = 0, interleaved = true } }, "explain: interleaved: expected V, .*got K, 32 and 2" },
      { { pool, { slot = 0, input = { 1, 2 } } }, "explain: input: expected 16 numbers .* got 2 numbers" },
      { { pool, { slot = 0, global_scale = "x" } }, "explain: global_scale: expected a number" },
      { { pool.paged_kv_cache, { slot = 0 } }, "explain: sf: expected a pair" },
      { { nibble.zeros(2, 2), { slot = 0 } }, "explain: cache: expected caches" },
      { { 3, { slot = 0 } }, "explain: cache: expected caches" },
    } do
      local ok, message = pcall(nibble.explain, table.unpack(case[1]))
      assert.is_false(ok, case[2])
      assert.matches(case[2], message)
    end
  end)
end)

describe("explain.head #quick", function()
  it("adds up the errors of blocks", function()
    local ratios = {}
    local head = explain.head(ratios)
    local inputs, codes = {}, {}
    for i = 1, 16 do inputs[i], codes[i] = 0, 0 end
    -- unit 0.5: 6 * 0.5 is 3 and meets it, 1 * 0.5 is off by 0.1 and -2 * 0.5 by 0.2; half a step is 0.125
    inputs[1], codes[1], inputs[2], codes[2], inputs[3], codes[3] = 3, 7, 0.4, 2, -0.8, 12
    local rms = head:add(inputs, codes, 0x38, 0.5)
    local squares = 9 + 0.16 + 0.64
    assert.is_true(math.abs(rms - 100 * math.sqrt(0.05 / squares)) < 1e-9)
    local r = head:result()
    assert.is_true(math.abs(r.worst - 1.6) < 1e-12 and math.abs(r.max - 0.2) < 1e-12 and math.abs(r.rms - rms) < 1e-12)
    assert.same({ 13 / 16, 1 / 16, 16, 0, 16 }, { r.zero, r.saturated, r.count, r.underflow, #ratios })
    head:add(inputs, codes, 0x04, 0.5) -- a subnormal scale: no bound
    r = head:result()
    assert.same({ 32, 16, 16 }, { r.count, r.underflow, #ratios })
    assert.is_true(math.abs(r.worst - 1.6) < 1e-12 and r.max > 2.9)
  end)

  it("of nothing is 0", function()
    assert.same({ rms = 0, worst = 0, max = 0, zero = 0, saturated = 0, count = 0, underflow = 0 },
      explain.head():result())
  end)

  it("of a zero block has no errors", function()
    local zeros = {}
    for i = 1, 16 do zeros[i] = 0 end
    local head = explain.head()
    assert.equal(0, head:add(zeros, zeros, 0, 1))
    assert.equal(1, head:result().zero)
  end)
end)
