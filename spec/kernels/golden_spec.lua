-- Recorded outputs of the original kernels and of an independent computation: every byte must come out.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local golden = require "spec.support.golden"

local function filled(array, byte)
  return {dtype = array.dtype, shape = array.shape, bytes = string.char(byte):rep(#array.bytes)}
end

local function filled_floats(array, x)
  local bits = string.pack("<I2", reference.encode(x, array.dtype))
  return {dtype = array.dtype, shape = array.shape, bytes = bits:rep(#array.bytes // 2)}
end

local function pooled(array, opts)
  opts = opts or {}
  return data.pool({dtype = array.dtype, shape = array.shape, strides = opts.strides, lead = opts.lead}):fill(array)
end

local function tensors(arrays)
  local list = {}
  for name, array in pairs(arrays) do list[name] = data.tensor(array) end
  return list
end

--- K and V rows as halves of one tensor [rows, 2, heads, head_dim], so that both are strided.
local function interleave(key, value)
  local rows, heads, dim = table.unpack(key.shape)
  local row, parts = heads * dim * 2, {}
  for i = 0, rows - 1 do
    parts[#parts + 1] = key.bytes:sub(i * row + 1, (i + 1) * row)
    parts[#parts + 1] = value.bytes:sub(i * row + 1, (i + 1) * row)
  end
  local both = data.tensor {dtype = key.dtype, shape = {rows, 2, heads, dim}, bytes = table.concat(parts)}
  return both:select(2, 1), both:select(2, 2)
end

--- Calls fn, or captures it and replays the graph once; returns fn's results.
local function run(how, fn)
  if how ~= "replayed" then return fn() end
  nibble.synchronize()
  local results
  local graph = nibble.stream():capture(function() results = table.pack(fn()) end)
  graph:replay()
  nibble.synchronize()
  return table.unpack(results, 1, results.n)
end

local ways = {"called", "replayed"}

describe("golden: append", function()
  for _, name in ipairs(golden.names("append")) do
    for _, how in ipairs {"called with numbers as scales", "called", "replayed"} do
      it(name .. " " .. how .. " #quick", function()
        local case = golden.load(name)
        local a = case.arrays
        local key, value = data.tensor(a.append_key), data.tensor(a.append_value)
        if case.append_interleaved then key, value = interleave(a.append_key, a.append_value) end
        local pools = {}
        for _, which in ipairs {"k_cache", "v_cache", "k_sf", "v_sf"} do
          pools[which] = pooled(filled(a[which], case.cache_fill))
        end
        local k_scale, v_scale = data.tensor(a.k_scale), data.tensor(a.v_scale)
        if how:find("numbers") then k_scale, v_scale = case.k_scale, case.v_scale end
        assert.equal(case.rows_used, a.slot_mapping.shape[1])
        local slots = data.tensor(a.slot_mapping)
        run(how, function()
          nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key, value, slots, {pools.k_cache.tensor, pools.v_cache.tensor}, {pools.k_sf.tensor, pools.v_sf.tensor},
            k_scale, v_scale, case.kv_layout, case.nvfp4_4over6)
        end)
        for which, pool in pairs(pools) do pool:assert_equal(a[which], which) end
      end)
    end
  end
end)

describe("golden: dequantize", function()
  for _, name in ipairs(golden.names("dequant")) do
    for _, how in ipairs(ways) do it(name .. " " .. how .. " #quick", function()
      local case = golden.load(name)
      local a = case.arrays
      local out_k = pooled(filled_floats(a.output_k, case.output_fill))
      local out_v = pooled(filled_floats(a.output_v, case.output_fill))
      local t = tensors(a)
      run(how, function()
        nibble.quantization.nvfp4_kv_dequantize_paged({t.k_cache, t.v_cache}, {t.k_sf, t.v_sf}, t.block_tables,
        t.seq_lens,
                                                      t.k_scale, t.v_scale, out_k.tensor, out_v.tensor, case.kv_layout)
      end)
      out_k:assert_equal(a.output_k, "output_k")
      out_v:assert_equal(a.output_v, "output_v")
    end) end
  end
end)

describe("golden: materialize", function()
  for _, name in ipairs(golden.names("materialize")) do
    for _, how in ipairs(ways) do it(name .. " " .. how .. " #quick", function()
      local case = golden.load(name)
      local a = case.arrays
      local expected = {dtype = "float8_e4m3fn", shape = a.kv_cache_fp8.shape, bytes = a.kv_cache_fp8.bytes}
      local out = pooled(filled(expected, case.out_fill))
      local t = tensors(a)
      local cache, tables = run(how, function()
        return nibble.quantization.nvfp4_kv_materialize_fp8(
          t.k_cache, t.v_cache, t.k_block_scales, t.v_block_scales, t.block_tables, t.seq_lens, case.max_kv_len,
          {uses_shared_paged_kv_idx = case.uses_shared_paged_kv_idx, out = out.tensor,
           kv_page_indptr = t.kv_page_indptr,
           num_pages = case.num_pages})
      end)
      assert.is_true(cache == out.tensor)
      out:assert_equal(expected, "kv_cache_fp8")
      assert.tensor_equal(a.fp8_block_tables, tables, "fp8_block_tables")
    end) end
  end
end)

describe("golden: rope insert", function()
  for _, name in ipairs(golden.names("rope_insert")) do
    for _, how in ipairs(ways) do it(name .. " " .. how .. " #quick", function()
      local case = golden.load(name)
      local a = case.arrays
      local pages, record_bytes = a.cache.shape[1], case.page_size * 384
      -- The recorded pool is [pages, page stride]; the cache is a view of the records in it.
      local pool = pooled(filled(a.cache, case.cache_fill))
      local shapes = {
        ["3d"] = {{pages, case.page_size, 384}, {case.page_stride, 384, 1}},
        hnd = {{pages, 1, case.page_size, 384}, {case.page_stride, record_bytes, 384, 1}},
        nhd = {{pages, case.page_size, 1, 384}, {case.page_stride, 384, 384, 1}},
      }
      local cache = pool.tensor:as_strided(table.unpack(shapes[case.cache_dims]))
      local q = pooled(a.q)
      local t = tensors(a)
      local q_out = run(how, function()
        return nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert(
          q.tensor, t.kv, cache, t.slot_mapping, t.positions, t.cos_sin_cache,
          {q_head_padded = case.q_head_padded, apply_q_rope = case.apply_q_rope, q_inplace = case.q_inplace})
      end)
      pool:assert_equal(a.cache, "cache")
      if case.q_inplace then
        assert.is_true(q_out == q.tensor)
        q:assert_equal(a.q_out, "q in place")
      else
        q:assert_unchanged("q")
        if a.q_out then
          assert.tensor_equal(a.q_out, q_out, "q_out")
        else
          assert.same({a.q.shape[1], 0, 512}, q_out.shape)
        end
      end
    end) end
  end
end)

describe("golden: the folder #quick", function()
  local function all() return golden.names "" end

  it("has only cases that some spec above runs", function()
    local known = {}
    for _, prefix in ipairs {"append", "dequant", "materialize", "rope_insert"} do
      for _, name in ipairs(golden.names(prefix)) do known[#known + 1] = name end
    end
    assert.same(all(), known)
    assert.is_true(#known >= 23)
  end)

  it("needs no list: a case is run because it is there", function()
    local folder = os.tmpname()
    os.remove(folder)
    finally(function() os.execute("rm -rf " .. folder) end)
    assert(os.execute("mkdir -p " .. folder .. "/append_new " .. folder .. "/append_empty && touch " .. folder
      .. "/append_new/case.lua"))
    assert.same({"append_new"}, golden.names("append", folder .. "/"))
  end)

  it("has each file once", function()
    local seen, count = {}, 0
    local folders = table.move(all(), 1, #all(), 2, {"shared"})
    for _, name in ipairs(folders) do
      for _, file in ipairs(golden.list(golden.data .. "golden/" .. name)) do
        local path = name .. "/" .. file
        local open <close> = assert(io.open(golden.data .. "golden/" .. path, "rb"))
        local bytes = open:read("a")
        assert.is_nil(seen[bytes], ("%s is %s"):format(path, tostring(seen[bytes])))
        seen[bytes], count = path, count + 1
      end
    end
    assert.is_true(count > 150)
  end)
end)

describe("golden: the reference", function()
  it("of append computes every recorded byte", function()
    for _, name in ipairs(golden.names("append")) do
      local case = golden.load(name)
      local a = case.arrays
      local r = reference.append {
        append_key = a.append_key, append_value = a.append_value, slot_mapping = a.slot_mapping,
        paged_kv_cache = {filled(a.k_cache, case.cache_fill), filled(a.v_cache, case.cache_fill)},
        kv_cache_sf = {filled(a.k_sf, case.cache_fill), filled(a.v_sf, case.cache_fill)},
        k_scale = case.k_scale, v_scale = case.v_scale, kv_layout = case.kv_layout,
        nvfp4_4over6 = case.nvfp4_4over6}
      assert.tensor_equal(a.k_cache, r.paged_kv_cache[1], name .. " k")
      assert.tensor_equal(a.v_cache, r.paged_kv_cache[2], name .. " v")
      assert.tensor_equal(a.k_sf, r.kv_cache_sf[1], name .. " k_sf")
      assert.tensor_equal(a.v_sf, r.kv_cache_sf[2], name .. " v_sf")
      assert.same({}, r.faults)
    end
  end)

  it("of dequantize computes every recorded byte", function()
    for _, name in ipairs(golden.names("dequant")) do
      local case = golden.load(name)
      local a = case.arrays
      local r = reference.dequantize {
        paged_kv_cache = {a.k_cache, a.v_cache}, kv_cache_sf = {a.k_sf, a.v_sf}, block_tables = a.block_tables,
        seq_lens = a.seq_lens, k_scale = a.k_scale, v_scale = a.v_scale, kv_layout = case.kv_layout,
        output_k = filled_floats(a.output_k, case.output_fill), output_v = filled_floats(a.output_v, case.output_fill)}
      assert.tensor_equal(a.output_k, r.output_k, name .. " k")
      assert.tensor_equal(a.output_v, r.output_v, name .. " v")
    end
  end)

  it("of materialize computes every recorded byte", function()
    for _, name in ipairs(golden.names("materialize")) do
      local case = golden.load(name)
      local a = case.arrays
      local expected = {dtype = "float8_e4m3fn", shape = a.kv_cache_fp8.shape, bytes = a.kv_cache_fp8.bytes}
      local r = reference.materialize {
        k_cache = a.k_cache, v_cache = a.v_cache, k_block_scales = a.k_block_scales, v_block_scales = a.v_block_scales,
        block_tables = a.block_tables, seq_lens = a.seq_lens, max_kv_len = case.max_kv_len,
        uses_shared_paged_kv_idx = case.uses_shared_paged_kv_idx, out = filled(expected, case.out_fill),
        kv_page_indptr = a.kv_page_indptr, num_pages = case.num_pages}
      assert.tensor_equal(expected, r.kv_cache_fp8, name)
      assert.tensor_equal(a.fp8_block_tables, r.fp8_block_tables, name)
      assert.same({}, r.faults)
    end
  end)

  it("of rope insert computes every recorded byte", function()
    for _, name in ipairs(golden.names("rope_insert")) do
      local case = golden.load(name)
      local a = case.arrays
      local pages, compact = a.cache.shape[1], case.page_size * 384
      local r = reference.rope_insert {
        q = a.q, kv = a.kv, slot_mapping = a.slot_mapping, positions = a.positions, cos_sin_cache = a.cos_sin_cache,
        q_head_padded = case.q_head_padded, apply_q_rope = case.apply_q_rope, q_inplace = case.q_inplace,
        cache = filled({dtype = "uint8", shape = {pages, case.page_size, 384}, bytes = ("\0"):rep(pages * compact)},
                       case.cache_fill)}
      local parts = {}
      for page = 0, pages - 1 do
        parts[#parts + 1] = r.cache.bytes:sub(page * compact + 1, (page + 1) * compact)
        parts[#parts + 1] = string.char(case.cache_fill):rep(case.page_stride - compact)
      end
      assert.tensor_equal(a.cache, {dtype = "uint8", shape = a.cache.shape, bytes = table.concat(parts)}, name)
      if a.q_out then assert.tensor_equal(a.q_out, r.q_out, name) end
      assert.same({}, r.faults)
    end
  end)
end)

describe("an assertion of this suite fails when", function()
  local function plain(bytes, dtype, shape)
    return {dtype = dtype or "float16", shape = shape or {2, #bytes // 4}, bytes = bytes}
  end
  local bytes = string.pack("<I2I2I2I2I2I2", 0x3C00, 0x4000, 0, 0x8000, 0x7C00, 0x7FFF)

  it("one bit of a tensor differs; it shows index, values and bytes #quick", function()
    local changed = bytes:sub(1, 7) .. "\0" .. bytes:sub(9)
    local ok, message = pcall(assert.tensor_equal, plain(bytes), plain(changed), "here")
    assert.is_false(ok)
    assert.equal("here: tensors differ: first at index {2, 1}: expected -0 (bytes 0080), got 0 (bytes 0000); " ..
                 "1 of 6 elements differ", tostring(message))
    assert.tensor_equal(plain(bytes), plain(bytes))
    assert.is_false((pcall(assert.not_tensor_equal, plain(bytes), plain(bytes))))
  end)

  it("dtype or shape differs #quick", function()
    assert.is_false((pcall(assert.tensor_equal, plain(bytes), plain(bytes, "bfloat16"))))
    assert.is_false((pcall(assert.tensor_equal, plain(bytes), plain(bytes, "float16", {3, 2}))))
  end)

  it("a byte outside a pool's view is written #quick", function()
    local pool = data.pool {dtype = "uint8", shape = {2, 3, 4}, strides = {20, 5, 1}}
    local array = {dtype = "uint8", shape = {2, 3, 4}, bytes = data.bytes(5, 24)}
    pool.tensor:copy(data.tensor(array))
    pool:assert_equal(array)
    assert.is_false((pcall(pool.assert_unchanged, pool)))
    local gap = pool.storage:narrow(1, 64 + 4 + 1, 1)
    local original = gap:item()
    gap:fill((original + 1) % 256)
    assert.is_false((pcall(pool.assert_equal, pool, array)))
    gap:fill(original)
    pool:assert_equal(array)
  end)

  it("no error, or another one, is raised #quick", function()
    assert.is_false((pcall(assert.raises_like, function() end, "op", "parameter")))
    local function raise() error("op: parameter: expected int32, got float32", 0) end
    assert.raises_like(raise, "op", "parameter", "expected int32", "got float32")
    assert.is_false((pcall(assert.raises_like, raise, "op", "other")))
    assert.is_false((pcall(assert.raises_like, raise, "op", "parameter", "got uint8")))
  end)

  it("a content fault names another value or index #quick", function()
    local function raise() error("op: slots: expected a slot of the cache, got -5 at index 3 (content fault on cpu)",
                                 0) end
    assert.faults_like(raise, "op", "slots", -5, 3)
    assert.faults_like(raise, "op", "slots", {7, -5}, {1, 3})
    assert.is_false((pcall(assert.faults_like, raise, "op", "slots", 5, 3)))
    assert.is_false((pcall(assert.faults_like, raise, "op", "slots", -5, 2)))
    assert.is_false((pcall(assert.faults_like, function() end, "op", "slots", -5, 3)))
  end)
end)
