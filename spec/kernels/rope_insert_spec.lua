-- mla.cake_dsv4_nvfp4_rope_quantize_insert and its cache-only sibling: rotate, quantize, insert.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local rope_insert = nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert
local kv_rope_insert = nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert
local OPERATION = "mla.cake_dsv4_nvfp4_rope_quantize_insert"
local SIBLING = "mla.cake_dsv4_nvfp4_kv_rope_quantize_insert"

--- A cache pool in one of the three spellings of its shape.
local function cache_pool(c)
  local record = 384
  local shape = ({["3d"] = {c.pages, c.page_size, record}, hnd = {c.pages, 1, c.page_size, record},
                  nhd = {c.pages, c.page_size, 1, record}})[c.dims or "3d"]
  local strides = data.strides(shape)
  strides[1] = c.page_size * record + (c.pad or 0)
  return data.pool {dtype = "uint8", shape = shape, strides = strides, seed = c.seed}
end

local function table_of(rows, seed)
  local turns = reference.rope_table {max_position = rows}
  if not seed then return turns end
  -- any numbers, for fused and unfused arithmetic to differ; some huge, infinite or NaN
  local parts, words = {}, data.integers(seed, rows * 64, 0, 0xFFFFFFFF)
  for i, word in ipairs(words) do
    local x = (word / 0x80000000 - 1) * (word % 16 == 0 and 1e3 or 1)
    if word % 997 == 0 then x = math.huge elseif word % 991 == 0 then x = 0 / 0 end
    parts[i] = string.pack("<f", x)
  end
  return {dtype = "float32", shape = {rows, 64}, bytes = table.concat(parts)}
end

--- Runs one configuration and compares q_out, the cache and all that lies around with the reference.
local function check(c, context)
  local rows = c.rows or #c.positions
  local q = data.pool({dtype = "bfloat16", shape = {rows, c.heads, 512}, seed = 3})
  q:fill(data.floats(c.seed + 1, {rows, c.heads, 512}, "bfloat16"))
  local kv = data.floats(c.seed + 2, {rows, 512}, "bfloat16")
  local turns = table_of(c.limit or 16, c.table_seed)
  local pool = cache_pool(c)
  local expected = reference.rope_insert {
    q = q:array(), kv = kv, cache = pool:array(), slot_mapping = data.array(c.slots, "int64"),
    positions = data.array(c.positions, "int64"), cos_sin_cache = turns, q_head_padded = c.padded,
    apply_q_rope = c.apply_q_rope, q_inplace = c.inplace}
  local q_out = rope_insert(q.tensor, data.tensor(kv), pool.tensor, data.indices(c.slots, c.slot_dtype or "int64"),
    data.indices(c.positions, "int64"), data.tensor(turns),
    {q_head_padded = c.padded, apply_q_rope = c.apply_q_rope, q_inplace = c.inplace})
  if c.fault then
    assert.is_true(#expected.faults > 0)
    assert.faults_like(nibble.check_faults, OPERATION, "positions", c.fault[1], c.fault[2])
  else
    assert.same({}, expected.faults)
  end
  nibble.check_faults()
  pool:assert_equal(expected.cache, context .. ": cache")
  if c.inplace then
    assert.is_true(q_out == q.tensor)
    q:assert_equal(expected.q_out, context .. ": q in place")
  else
    q:assert_unchanged(context .. ": q")
    assert.tensor_equal(expected.q_out, q_out, context .. ": q_out")
  end
  return expected
end

describe("rope insert", function()
  for _, page_size in ipairs {1, 3, 4, 16, 64} do
    it("matches the reference in every spelling of the cache, page size " .. page_size, function()
      local number = page_size
      for _, dims in ipairs {"3d", "hnd", "nhd"} do
        for _, heads_padded in ipairs {{1, 8}, {8, 8}, {3, 16}, {5, 0}, {17, 32}} do
          number = number + 1
          local pages = page_size == 1 and 7 or 3
          local capacity = pages * page_size
          check({heads = heads_padded[1], padded = heads_padded[2], page_size = page_size, pages = pages, dims = dims,
                 pad = number % 2 * 48, seed = number, table_seed = number % 3 > 0 and number or nil, limit = 40,
                 slots = {capacity - 1, -1, 0, capacity, capacity // 2, -0x80000000}, slot_dtype = number % 2 == 0
                 and "int32" or "int64",
                 positions = {39, 0, 17, 5, 1, 22, 8}, apply_q_rope = number % 4 ~= 3}, dims .. " " .. heads_padded[1])
        end
        for _, heads in ipairs {1, 8} do
          check({heads = heads, padded = heads == 8 and 8 or 0, inplace = true, page_size = page_size, pages = 6,
                 dims = dims, seed = number,
                 table_seed = number, limit = 12, slots = {4, 0, -1, 2}, positions = {11, 0, 7, 3, 2}}, dims
                   .. " in place")
        end
      end
    end)
  end

  it("puts data at t*352, scales at P*352 + t*32, and writes only those bytes #quick", function()
    for _, dims in ipairs {"3d", "hnd", "nhd"} do
      check({heads = 2, padded = 8, page_size = 3, pages = 2, dims = dims, pad = 16, seed = 5, table_seed = 1,
             slots = {4, 0, -1, 6}, positions = {3, 0, 15, 9, 2}}, dims)
    end
    -- by hand: page size 2, slot 1; everything 6, so that each scale is 1 and each code 7; position 0
    local kv = nibble.full({1, 512}, 6, {dtype = "bfloat16"})
    local cache = nibble.full({1, 2, 384}, 0xA5, {dtype = "uint8"})
    kv_rope_insert(kv, cache, data.indices {1}, data.indices({0}, "int64"), nibble.rope_table(1))
    local poison = "\xA5"
    assert.equal(poison:rep(352) .. ("\x77"):rep(224) .. ("\xC0\x40"):rep(64) .. poison:rep(32) .. ("\x38"):rep(28)
                 .. ("\0"):rep(4),
                 cache:bytes())
  end)

  it("rotates GPT-J pairs (2p, 2p+1) with cos = row[p], sin = row[32+p]: one-hot inputs #quick", function()
    -- cos[p] = 2 + p, sin[p] = 64 + p: both are exact in bfloat16 and no two are equal
    local turns = {}
    for p = 0, 31 do turns[p + 1], turns[p + 33] = 2 + p, 64 + p end
    local cos_sin = data.tensor(data.array(turns, "float32", {1, 64}))
    local rows = {}
    for row = 0, 63 do
      for d = 0, 511 do rows[#rows + 1] = d == 448 + row and 1.0 or 0.0 end
    end
    local kv = data.tensor(data.array(rows, "bfloat16", {64, 512}))
    local slots, positions = {}, {}
    for i = 1, 64 do slots[i], positions[i] = i - 1, 0 end
    local cache = nibble.zeros(64, 1, 384, {dtype = "uint8"})
    local q = kv:view(64, 1, 512)
    local q_out = rope_insert(q, kv, cache, data.indices(slots), data.indices(positions, "int64"), cos_sin,
                              {q_head_padded = 8})
    local out, stored = q_out:select(2, 1):totable(), nibble.mla.dequantize_cache(cache, data.indices(slots)):totable()
    for row = 0, 63 do
      local p, even = row // 2, row % 2 == 0
      for d = 0, 63 do
        local expected = 0
        if d == 2 * p then expected = even and 2 + p or -(64 + p) end
        if d == 2 * p + 1 then expected = even and 64 + p or 2 + p end
        assert.equal(expected, out[row + 1][448 + d + 1])
        assert.equal(expected, stored[row + 1][448 + d + 1])
      end
    end
  end)

  it("is the identity at position 0 #quick", function()
    local values = data.finite(8, {3, 2, 512}, "bfloat16")
    -- the sum with a product that is zero turns -0 into 0
    local list = reference.values(values)
    for i, x in ipairs(list) do if x == 0 then list[i] = 1.0 end end
    local q = data.tensor(data.array(list, "bfloat16", {3, 2, 512}))
    local kv = q:select(2, 1):contiguous()
    local cache = nibble.zeros(3, 1, 384, {dtype = "uint8"})
    local q_out = rope_insert(q, kv, cache, data.indices {0, 1, 2}, data.indices({0, 0, 0}, "int64"),
                              nibble.rope_table(4), {q_head_padded = 8})
    assert.tensor_equal(q, q_out:narrow(2, 1, 2):contiguous())
    local rows = nibble.mla.dequantize_cache(cache, data.indices {0, 1, 2})
    assert.tensor_equal(kv:narrow(2, 449, 64):contiguous(), rows:narrow(2, 449, 64):contiguous())
  end)

  it("uses one fused multiply-add over one rounded product: inputs where the other ways differ #quick", function()
    -- Look for a pair and a turn where the fused result, after rounding to bfloat16, differs from the unfused one.
    local words = data.integers(77, 60000, 0, 0xFFFF)
    local rows, turns, found = {}, {}, 0
    local turn = {}
    for p = 1, 64 do turn[p] = 0.0 end
    for i = 1, #words - 3, 4 do
      local e, o = reference.decode(0x3F80 | words[i] & 0x7F, "bfloat16"),
        reference.decode(0x3F80 | words[i + 1] & 0x7F, "bfloat16")
      local cos = reference.f32(words[i + 2] / 65536 + 0.3)
      -- sin so that the even result nearly cancels: its bits are those that fusing keeps
      local sin = reference.f32(e * cos / o * (1 + (words[i + 3] % 64 - 32) * 2.0 ^ -24))
      local fused = reference.fma(e, cos, -reference.f32(o * sin))
      local unfused = reference.f32(reference.f32(e * cos) - reference.f32(o * sin))
      local exact = reference.f32(e * cos - o * sin)
      if fused ~= unfused and fused ~= exact then
        found = found + 1
        for d = 1, 448 do rows[#rows + 1] = d % 7 - 3.0 end
        for d = 0, 63 do rows[#rows + 1] = d == 0 and e or d == 1 and o or 0.0 end
        local one = table.move(turn, 1, 64, 1, {})
        one[1], one[33] = cos, sin
        table.move(one, 1, 64, #turns + 1, turns)
        if found == 50 then break end
      end
    end
    assert.equal(50, found)
    local slots, positions = {}, {}
    for i = 1, found do slots[i], positions[i] = i - 1, i - 1 end
    local kv = data.array(rows, "bfloat16", {found, 512})
    local cos_sin = data.array(turns, "float32", {found, 64})
    local cache = nibble.zeros(10, 5, 384, {dtype = "uint8"})
    local expected = reference.kv_rope_insert {kv = kv, cache = cache, slot_mapping = data.array(slots, "int32"),
      positions = data.array(positions, "int64"), cos_sin_cache = cos_sin}
    kv_rope_insert(data.tensor(kv), cache, data.indices(slots), data.indices(positions, "int64"), data.tensor(cos_sin))
    assert.tensor_equal(expected.cache, cache)
  end)

  it("rows at or past #slot_mapping get their q_out row but are not inserted; padded heads are zero #quick", function()
    local expected = check({heads = 3, padded = 8, page_size = 2, pages = 2, seed = 6, slots = {3, 1},
                            positions = {4, 5, 6, 7}}, "two of four")
    assert.equal(("\0"):rep(5 * 1024), expected.q_out.bytes:sub(3 * 1024 + 1, 8 * 1024))
    check({heads = 3, padded = 8, page_size = 2, pages = 2, seed = 6, slots = {}, positions = {4, 5, 6, 7}},
          "none of four")
  end)

  it("skips slots outside the cache, whatever their value #quick", function()
    check({heads = 1, padded = 8, page_size = 4, pages = 3, seed = 1, slot_dtype = "int32",
           slots = {-1, -0x80000000, 12, 16, 0x7FFFFFFF, 11}, positions = {0, 1, 2, 3, 4, 5}}, "int32")
    check({heads = 1, padded = 8, page_size = 4, pages = 3, seed = 2,
           slots = {-1, math.mininteger, math.maxinteger, 1 << 32, 1 << 62, 11, 12},
             positions = {0, 1, 2, 3, 4, 5, 6}}, "int64")
  end)

  it("without q_head_padded writes the cache only and returns an empty q_out #quick", function()
    for _, apply in ipairs {true, false} do
      check({heads = 4, padded = 0, apply_q_rope = apply, page_size = 2, pages = 2, seed = 9, slots = {0, 3},
             positions = {1, 2}}, "cache only")
    end
    local q = nibble.zeros(2, 4, 512, {dtype = "bfloat16"})
    local kv, cache = nibble.zeros(2, 512, {dtype = "bfloat16"}), nibble.zeros(2, 2, 384, {dtype = "uint8"})
    local q_out = rope_insert(q, kv, cache, data.indices {0, 3}, data.indices({1, 2}, "int64"), nibble.rope_table(4))
    assert.same({2, 0, 512}, q_out.shape)
  end)

  it("without apply_q_rope copies q unchanged, NaNs too; in place q is left alone #quick", function()
    check({heads = 4, padded = 8, apply_q_rope = false, page_size = 2, pages = 2, seed = 9, slots = {0, 3},
           positions = {1, 2}}, "copied")
    check({heads = 8, padded = 8, inplace = true, apply_q_rope = false, page_size = 2, pages = 2, seed = 9,
           slots = {0, 3},
           positions = {1, 2}}, "in place")
  end)

  it("in place rotates the 64 RoPE dimensions of q and touches no other #quick", function()
    check({heads = 8, padded = 0, inplace = true, page_size = 2, pages = 2, seed = 4, table_seed = 4, slots = {0, 3},
           positions = {1, 2}}, "0")
    check({heads = 8, padded = 8, inplace = true, page_size = 2, pages = 2, seed = 4, table_seed = 4, slots = {0, 3},
           positions = {1, 2}}, "8")
    check({heads = 3, padded = 0, inplace = true, page_size = 2, pages = 2, seed = 4, slots = {0, 3},
           positions = {1, 2}}, "3 heads")
  end)

  it("quantizes NaN products to code 7, positive, and an infinite amax with the scale byte 0x7E #quick", function()
    local nan, inf = 0 / 0, math.huge
    local row = {nan, 6, -nan, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, inf, -inf, nan, 448, -1}
    for d = #row + 1, 512 do row[d] = d > 32 and d <= 48 and nan or -0.0 end
    row[449], row[450], row[451] = nan, 1.0, inf
    local cache = nibble.zeros(1, 1, 384, {dtype = "uint8"})
    kv_rope_insert(data.tensor(data.array(row, "bfloat16", {1, 512})), cache, data.indices {0},
                   data.indices({0}, "int64"), nibble.rope_table(1))
    local bytes = cache:bytes()
    assert.equal("\x77\xD7", bytes:sub(1, 2))              -- NaN, 6, NaN, -3
    assert.equal("\xF7\x27\x88", bytes:sub(9, 11))         -- inf, -inf, NaN, 448/448, -1/448
    assert.equal(("\x77"):rep(8), bytes:sub(17, 24))       -- a block of NaNs
    assert.equal(("\x88"):rep(8), bytes:sub(25, 32))       -- a block of -0
    assert.equal("\x38\x7E\0\0", bytes:sub(353, 356))
    assert.equal("\xFF\x7F", bytes:sub(225, 226))          -- a NaN RoPE value
  end)

  it("multiplies by the rounded inverse where division would give another code: all 42 values #quick", function()
    local cases = data.inverse_cases()
    assert.equal(42, #cases)
    local list, slots, positions = {}, {}, {}
    for row = 0, 1 do
      for block = 0, 31 do
        local case = cases[row * 21 + block + 1]
        if block < 21 then list[#list + 1], list[#list + 2], list[#list + 3] = 6 * case.scale, case.x, -case.x end
        while #list < row * 512 + block * 16 + 16 do list[#list + 1] = 0.0 end
      end
      slots[row + 1], positions[row + 1] = row, 0
    end
    local kv = data.tensor(data.array(list, "bfloat16", {2, 512}))
    local cache = nibble.zeros(2, 1, 384, {dtype = "uint8"})
    kv_rope_insert(kv, cache, data.indices(slots), data.indices(positions, "int64"), nibble.rope_table(1))
    local bytes = cache:bytes()
    for i, case in ipairs(cases) do
      local record, block = (i - 1) // 21 * 384, (i - 1) % 21
      assert.equal(case.byte, bytes:byte(record + 352 + block + 1))
      assert.equal(7 | case.code << 4, bytes:byte(record + block * 8 + 1))
      assert.equal(case.code | 8, bytes:byte(record + block * 8 + 2))
    end
  end)

  it("a used position outside the table is not dereferenced: no insertion, zero RoPE dimensions, a fault #quick",
     function()
    for _, position in ipairs {-1, 16, 0x7FFFFFFF, 1 << 32, math.maxinteger, math.mininteger} do
      for _, inplace in ipairs {false, true} do
        check({heads = 2, padded = inplace and 0 or 8, inplace = inplace, page_size = 2, pages = 2, seed = 12,
               slots = {3, 0}, positions = {5, position, 2},
               fault = {position, 1}}, "rotated and inserted, " .. position)
        check({heads = 2, padded = inplace and 0 or 8, inplace = inplace, page_size = 2, pages = 2, seed = 12,
               slots = {3, 0}, positions = {5, 1, position},
               fault = {position, 2}}, "rotated only, " .. position)
      end
      check({heads = 2, padded = 0, page_size = 2, pages = 2, seed = 12, slots = {3, 0}, positions = {5, position, 2},
             fault = {position, 1}}, "inserted only, " .. position)
      -- q is copied unchanged even there
      check({heads = 2, padded = 8, apply_q_rope = false, page_size = 2, pages = 2, seed = 12, slots = {3, 0},
             positions = {5, position, 2},
             fault = {position, 1}}, "inserted, q copied, " .. position)
    end
    check({heads = 2, padded = 8, page_size = 2, pages = 2, seed = 12, slots = {3, 0}, positions = {-3, 99, 1},
           fault = {{-3, 99}, {0, 1}}}, "two")
  end)

  it("a table without rows makes every used position a fault #quick", function()
    check({heads = 1, padded = 8, page_size = 2, pages = 2, seed = 12, limit = 0, slots = {3}, positions = {0},
           fault = {0, 0}}, "empty table")
  end)

  it("does not look at positions that are not used #quick", function()
    check({heads = 2, padded = 0, page_size = 2, pages = 2, seed = 13, slots = {3, -1, 4},
           positions = {5, -1, 99, -7}}, "skipped slots, no q")
    check({heads = 2, padded = 8, apply_q_rope = false, page_size = 2, pages = 2, seed = 13, slots = {3, -1, 4},
           positions = {5, -1, 99, -7}},
          "skipped slots, q copied")
    check({heads = 2, padded = 0, inplace = true, apply_q_rope = false, page_size = 2, pages = 2, seed = 13,
           slots = {3, -1},
           positions = {5, -1, -7}}, "skipped slots, q left alone")
  end)

  it("gives the same bytes 200 times over 1,024 tokens rotated in place", function()
    local tokens, heads = 1024, 8
    local before = data.floats(1, {tokens, heads, 512}, "bfloat16")
    local source = data.tensor(before)
    local kv = data.tensor(data.floats(2, {tokens, 512}, "bfloat16"))
    local slots, positions = {}, {}
    for i = 1, tokens do slots[i], positions[i] = (i * 389) % tokens, (i * 7) % 64 end
    local q, cache = nibble.empty(tokens, heads, 512, {dtype = "bfloat16"}),
      nibble.empty(16, 64, 384, {dtype = "uint8"})
    local slot_mapping, position = data.indices(slots), data.indices(positions, "int64")
    local turns = nibble.rope_table(64)
    local first_q, first_cache
    for run = 1, 200 do
      q:copy(source)
      cache:fill(0xA5)
      rope_insert(q, kv, cache, slot_mapping, position, turns, {q_inplace = true})
      if run == 1 then
        first_q, first_cache = q:clone(), cache:clone()
        local expected = reference.rope_insert {q = before, kv = kv, slot_mapping = slot_mapping, positions = position,
                                                cos_sin_cache = turns,
          cache = {dtype = "uint8", shape = {16, 64, 384}, bytes = ("\xA5"):rep(16 * 64 * 384)}, q_inplace = true}
        assert.tensor_equal(expected.q_out, q)
        assert.tensor_equal(expected.cache, cache)
      else
        assert.is_true(q:equal(first_q), "q of run " .. run)
        assert.is_true(cache:equal(first_cache), "cache of run " .. run)
      end
    end
  end)

  it("does nothing without tokens, pages or heads, inside a capture too #quick", function()
    local function run(rows, nnz, heads, pages, padded)
      local q, kv = nibble.zeros(rows, heads, 512, {dtype = "bfloat16"}), nibble.zeros(rows, 512, {dtype = "bfloat16"})
      local pool = cache_pool {page_size = 2, pages = pages, seed = 4}
      local slots, positions = nibble.zeros(nnz, {dtype = "int32"}), nibble.zeros(rows, {dtype = "int64"})
      local turns = nibble.rope_table(2)
      local function call()
        local q_out = rope_insert(q, kv, pool.tensor, slots, positions, turns, {q_head_padded = padded})
        assert.same({rows, padded, 512}, q_out.shape)
        return q_out
      end
      assert.equal(("\0"):rep(rows * padded * 1024), call():bytes())
      local stream = nibble.stream()
      nibble.synchronize()
      local graph = stream:capture(call)
      graph:replay()
      nibble.synchronize()
      pool:assert_unchanged()
    end
    run(0, 0, 2, 2, 8)
    run(0, 0, 2, 2, 0)
    run(3, 0, 2, 2, 8)
    run(3, 3, 2, 0, 8)
    run(3, 0, 0, 2, 8)
  end)
end)

describe("the cache-only sibling", function()
  local function check_sibling(c, context)
    local kv = data.floats(c.seed, {#c.positions, 512}, "bfloat16")
    local turns, pool = table_of(c.limit or 16, c.seed), cache_pool(c)
    local expected = reference.kv_rope_insert {kv = kv, cache = pool:array(),
      slot_mapping = data.array(c.slots, "int64"),
      positions = data.array(c.positions, "int64"), cos_sin_cache = turns, compress_ratio = c.ratio}
    kv_rope_insert(data.tensor(kv), pool.tensor, data.indices(c.slots, c.slot_dtype),
                   data.indices(c.positions, "int64"), data.tensor(turns),
                   c.ratio and {compress_ratio = c.ratio})
    if c.fault then
      assert.is_true(#expected.faults > 0)
      assert.faults_like(nibble.check_faults, SIBLING, "positions", c.fault[1], c.fault[2])
    else
      assert.same({}, expected.faults)
    end
    nibble.check_faults()
    pool:assert_equal(expected.cache, context)
    return pool
  end

  it("with ratio 1 writes what the whole operation writes #quick", function()
    for n, ratio in ipairs {false, 1} do
      local pool = check_sibling({ratio = ratio or nil, page_size = 3, pages = 2, pad = 16, seed = 21 + n,
                                  slots = {5, 0, -1, 2},
                                  positions = {15, 0, 3, 8, 4}}, "ratio 1")
      local other = cache_pool {page_size = 3, pages = 2, pad = 16, seed = 21 + n}
      local kv = data.tensor(data.floats(21 + n, {5, 512}, "bfloat16"))
      rope_insert(nibble.zeros(5, 1, 512, {dtype = "bfloat16"}), kv, other.tensor, data.indices {5, 0, -1, 2},
                  data.indices({15, 0, 3, 8, 4}, "int64"), data.tensor(table_of(16, 21 + n)))
      assert.tensor_equal(pool.tensor:contiguous(), other.tensor:contiguous())
    end
  end)

  it("with ratio 2 inserts rows whose position is odd, rotated as its pair's first #quick", function()
    for _, dims in ipairs {"3d", "hnd", "nhd"} do
      check_sibling({ratio = 2, page_size = 4, pages = 2, dims = dims, seed = 30, slot_dtype = "int64",
                     slots = {0, 1, 2, 3, 7, 8, -1},
                     positions = {0, 1, 2, 3, 15, 5, 7, 9}}, dims)
    end
  end)

  it("with ratio 2 faults on used positions outside the table only #quick", function()
    for _, position in ipairs {-1, 17, 0x7FFFFFFF, math.maxinteger} do
      check_sibling({ratio = 2, page_size = 4, pages = 2, seed = 31, slots = {0, 1, 2}, positions = {1, position, 3},
                     fault = {position, 1}},
                    "position " .. position)
    end
    -- past a table of 17 rows, though the row of its pair's first would be inside
    check_sibling({ratio = 2, page_size = 4, pages = 2, seed = 31, limit = 17, slots = {0, 1}, positions = {15, 17},
                   fault = {17, 1}}, "an odd table")
    -- even positions are not inserted, so not used
    check_sibling({ratio = 2, page_size = 4, pages = 2, seed = 31, slots = {0, 1, 2, 3, 4},
                   positions = {1, -2, 16, math.mininteger, 1 << 40}}, "even ones")
    check_sibling({ratio = 2, page_size = 4, pages = 2, seed = 31, slots = {0, -1, 99}, positions = {1, -1, 17}},
                  "skipped slots")
  end)

  it("does nothing without rows #quick", function()
    check_sibling({ratio = 2, page_size = 4, pages = 2, seed = 31, slots = {}, positions = {}}, "no rows")
    check_sibling({ratio = 1, page_size = 4, pages = 2, seed = 31, slots = {}, positions = {3, 1}}, "no slots")
    check_sibling({ratio = 1, page_size = 4, pages = 0, seed = 31, slots = {0, 1}, positions = {3, 1}}, "no pages")
  end)
end)
