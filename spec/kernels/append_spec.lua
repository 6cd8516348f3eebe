-- page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping: K/V rows to NVFP4 in a paged cache.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local golden = require "spec.support.golden"

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

--- Guard-banded pools of K and V data and scales, each with its own strides. `how`: "pair", "compact", or "stacked" for
--- K and V in one 5-D tensor.
local function make_caches(c)
  local function shape(x)
    if c.layout == "NHD" then return {c.pages, c.page_size, c.heads, x} end
    return {c.pages, c.heads, c.page_size, x}
  end
  local caches = {}
  for i, kind in ipairs {{"uint8", c.head_dim // 2, {7, 3, 2}},
                         {c.sf_dtype or "float8_e4m3fn", c.head_dim // 16, {5, 4, 1}}} do
    local dtype, x, pads = kind[1], kind[2], kind[3]
    if c.how == "stacked" then
      local s = shape(x)
      local five = {s[1], 2, s[2], s[3], s[4]}
      caches[i] = data.pool {dtype = dtype, shape = five, strides = data.strides(five, {pads[1], pads[2], pads[3], 1}),
                             seed = i}
    elseif c.how == "compact" then
      caches[i] = {data.pool {dtype = dtype, shape = shape(x), seed = i},
                   data.pool {dtype = dtype, shape = shape(x), seed = i + 2}}
    else
      local s = shape(x)
      local k_strides = data.strides(s, pads)
      -- V: the token and head strides the other way round in memory
      local v_strides = {0, x + pads[2], (x + pads[2]) * s[2] + pads[3], 1}
      v_strides[1] = v_strides[3] * s[3] + pads[1] * 2
      caches[i] = {data.pool {dtype = dtype, shape = s, strides = k_strides, seed = i},
                   data.pool {dtype = dtype, shape = s, strides = v_strides, seed = i + 2}}
    end
  end
  return caches
end

local function halves(pool)
  if pool.tensor then
    return {pool.tensor:select(2, 1), pool.tensor:select(2, 2)}
  end
  return {pool[1].tensor, pool[2].tensor}
end

--- {k, v} arrays of one shape as the array of the stacked tensor.
local function stack(pair)
  local k, v = pair[1], pair[2]
  local pages, parts = k.shape[1], {}
  local page = pages > 0 and #k.bytes // pages or 0
  for i = 0, pages - 1 do
    parts[#parts + 1] = k.bytes:sub(i * page + 1, (i + 1) * page)
    parts[#parts + 1] = v.bytes:sub(i * page + 1, (i + 1) * page)
  end
  return {dtype = k.dtype, shape = {pages, 2, k.shape[2], k.shape[3], k.shape[4]}, bytes = table.concat(parts)}
end

local function argument(pool)
  return pool.tensor or {pool[1].tensor, pool[2].tensor}
end

local function assert_pool(pool, pair, context)
  if pool.tensor then
    pool:assert_equal(stack(pair), context)
  else
    pool[1]:assert_equal(pair[1], context .. ": k")
    pool[2]:assert_equal(pair[2], context .. ": v")
  end
end

--- Rows of K or V in a pool with padded rows and heads; `pads` are K's if they are not given.
local function make_rows(c, seed, pads)
  local shape = {c.rows, c.heads, c.head_dim}
  pads = c.how == "compact" and {0, 0} or pads or {8, 16}
  return data.pool({dtype = c.dtype, shape = shape, strides = data.strides(shape, pads), seed = seed})
    :fill((c.finite and data.finite or data.floats)(seed, shape, c.dtype))
end

--- Runs one configuration and compares everything with the reference.
local function check(c, context)
  local key, value = make_rows(c, c.seed), make_rows(c, c.seed + 1000, {40, 3})
  local caches = make_caches(c)
  local slots = data.indices(c.slots, c.slot_dtype)
  local expected = reference.append {
    append_key = key.tensor, append_value = value.tensor, slot_mapping = slots, paged_kv_cache = halves(caches[1]),
    kv_cache_sf = halves(caches[2]), k_scale = c.k_scale, v_scale = c.v_scale, kv_layout = c.layout}
  local k_scale, v_scale = c.k_scale, c.v_scale
  if c.device_scales then k_scale, v_scale = data.scale(k_scale), data.scale(v_scale) end
  append(key.tensor, value.tensor, slots, argument(caches[1]), argument(caches[2]), k_scale, v_scale, c.layout)
  assert_pool(caches[1], expected.paged_kv_cache, context .. ": data")
  assert_pool(caches[2], expected.kv_cache_sf, context .. ": scales")
  key:assert_unchanged(context)
  value:assert_unchanged(context)
  return expected
end

local function some_slots(pages, page_size)
  local capacity = pages * page_size
  return {-1, capacity - 1, 0, capacity, capacity // 2, -0x80000000, capacity + page_size, 0x7FFFFFFF}
end

local dims = {16, 48, 64, 80, 96, 128, 192, 256, 512}

describe("append, every dtype, layout, head_dim and page size:", function()
  local before = 0 -- configurations of the specs above: those of a spec are the same when it runs alone
  for _, dtype in ipairs {"float16", "bfloat16"} do
    for _, layout in ipairs {"NHD", "HND"} do
      for _, page_size in ipairs {1, 3, 4, 16, 64} do
        local first = before
        before = before + #dims
        it(("%s %s, page size %d"):format(dtype, layout, page_size), function()
          for i, head_dim in ipairs(dims) do
            local number = first + i
            check({
              dtype = dtype, layout = layout, page_size = page_size, head_dim = head_dim, heads = number % 3 + 1,
              pages = page_size == 1 and 5 or 3, rows = 9, slots = some_slots(page_size == 1 and 5 or 3, page_size),
              slot_dtype = number % 2 == 0 and "int32" or "int64",
              how = ({"pair", "stacked", "compact"})[number % 3 + 1],
              sf_dtype = number % 5 == 0 and "uint8" or nil, device_scales = i % 2 == 0,
              k_scale = ({1.0, 0.0123, 3.7, 1e-6})[number % 4 + 1], v_scale = ({0.5, 1e6, 0.37, 2.0})[number % 4 + 1],
              seed = number,
            }, ("head_dim %d"):format(head_dim))
          end
        end)
      end
    end
  end
end)

describe("append", function()
  it("writes row i to page slot // page_size, entry slot % page_size, and nothing else #quick", function()
    for n, how in ipairs {"pair", "stacked", "compact"} do
      for _, layout in ipairs {"NHD", "HND"} do
        check({dtype = "bfloat16", layout = layout, page_size = 3, head_dim = 48, heads = 2, pages = 3, rows = 9,
               slots = some_slots(3, 3), slot_dtype = "int32", how = how, k_scale = 0.37, v_scale = 3.7, seed = 70 + n},
              how .. " " .. layout)
      end
    end
  end)

  it("reads only the rows that slot_mapping names, from a strided slot_mapping too #quick", function()
    local c = {dtype = "float16", layout = "NHD", page_size = 4, head_dim = 16, heads = 1, pages = 2, rows = 6,
               how = "pair",
               k_scale = 1.0, v_scale = 1.0, seed = 5}
    local key, value, caches = make_rows(c, 1), make_rows(c, 2), make_caches(c)
    local both = data.indices({5, 0, 2, 0, 7, 0}, "int64", {3, 2})
    local expected = reference.append {append_key = key.tensor, append_value = value.tensor,
                                       slot_mapping = both:select(2, 1),
      paged_kv_cache = halves(caches[1]), kv_cache_sf = halves(caches[2]), k_scale = 1, v_scale = 1}
    append(key.tensor, value.tensor, both:select(2, 1), argument(caches[1]), argument(caches[2]), 1, 1)
    assert_pool(caches[1], expected.paged_kv_cache, "data")
    assert_pool(caches[2], expected.kv_cache_sf, "scales")
  end)

  it("gives HND the same bits as NHD, for 1, 3, 4 and 8 heads #quick", function()
    for _, heads in ipairs {1, 3, 4, 8} do
      local key = data.tensor(data.floats(heads, {5, heads, 32}, "bfloat16"))
      local value = data.tensor(data.floats(heads + 50, {5, heads, 32}, "bfloat16"))
      local slots = data.indices {7, 0, 3, -1, 5}
      local function zeros(shape, dtype) return {nibble.zeros(shape, {dtype = dtype}),
        nibble.zeros(shape, {dtype = dtype})} end
      local nhd, nhd_sf = zeros({2, 4, heads, 16}, "uint8"), zeros({2, 4, heads, 2}, "float8_e4m3fn")
      local hnd, hnd_sf = zeros({2, heads, 4, 16}, "uint8"), zeros({2, heads, 4, 2}, "float8_e4m3fn")
      append(key, value, slots, nhd, nhd_sf, 0.5, 2.0, "NHD")
      append(key, value, slots, hnd, hnd_sf, 0.5, 2.0, {kv_layout = "HND"})
      for i = 1, 2 do
        assert.is_true(nhd[i]:amax() > 0)
        assert.tensor_equal(nhd[i]:contiguous(), hnd[i]:permute(1, 3, 2, 4):contiguous(), heads .. " heads")
        assert.tensor_equal(nhd_sf[i]:contiguous(), hnd_sf[i]:permute(1, 3, 2, 4):contiguous(), heads
                            .. " heads: scales")
      end
    end
  end)

  it("skips slots below 0 and past the cache, whatever their value #quick", function()
    for _, layout in ipairs {"NHD", "HND"} do
      local c = {dtype = "float16", layout = layout, page_size = 4, head_dim = 32, heads = 2, pages = 3, how = "pair",
                 k_scale = 1.0, v_scale = 1.0, seed = 20}
      c.slot_dtype, c.slots = "int32", {-1, -0x80000000, 12, 12 + 4, 0x7FFFFFFF, 11}
      c.rows = #c.slots
      check(c, layout .. " int32")
      -- values that would be valid slots if cut to 32 bits, or if multiplied without care
      c.slot_dtype = "int64"
      c.slots = {-1, math.mininteger, math.maxinteger, 1 << 32, (1 << 32) + 5, -(1 << 32) + 3, 1 << 62, 12, 11}
      c.rows = #c.slots
      check(c, layout .. " int64")
      c.slots = {-1, -5, 12, 0x7FFFFFFF}
      c.rows = #c.slots
      local caches = make_caches(c)
      local rows = make_rows(c, 3)
      append(rows.tensor, rows.tensor, data.indices(c.slots), argument(caches[1]), argument(caches[2]), 1, 1, layout)
      for i = 1, 2 do
        for kv = 1, 2 do caches[i][kv]:assert_unchanged("no slot is valid") end
      end
    end
  end)

  it("skips each slot that is valid without one of its bits #quick", function()
    local c = {dtype = "bfloat16", layout = "NHD", page_size = 4, head_dim = 16, heads = 1, pages = 2, how = "pair",
      k_scale = 1.0,
               v_scale = 1.0, seed = 21}
    for dtype, bits in pairs {int32 = 31, int64 = 63} do
      c.slot_dtype, c.slots = dtype, {}
      for bit = 3, bits - 1 do c.slots[#c.slots + 1] = 1 << bit | bit % 8 end
      c.slots[#c.slots + 1] = 5
      c.rows = #c.slots
      check(c, dtype)
    end
  end)

  it("with a slot named twice stays inside the slot #quick", function()
    local c = {dtype = "float16", layout = "NHD", page_size = 4, head_dim = 64, heads = 2, pages = 2, how = "compact",
               k_scale = 1.0, v_scale = 1.0, seed = 31, slot_dtype = "int32"}
    c.rows = 40
    local key, value, caches = make_rows(c, 1), make_rows(c, 2), make_caches(c)
    local slots = {}
    for i = 1, 40 do slots[i] = 6 end
    append(key.tensor, value.tensor, data.indices(slots), argument(caches[1]), argument(caches[2]), 1, 1)
    for i = 1, 2 do
      for kv = 1, 2 do
        local pool = caches[i][kv]
        local vector = pool.shape[3] * pool.shape[4]
        local from = pool.lead + 6 * vector
        local after = pool.storage:bytes()
        assert.equal(pool.before:sub(1, from), after:sub(1, from))
        assert.equal(pool.before:sub(from + vector + 1), after:sub(from + vector + 1))
      end
    end
  end)

  --- An append into guard-banded pools of zero or more pages, eagerly, then captured and replayed; nothing is written.
  local function assert_no_effect(rows, slots, pages, heads, context)
    local pools = {}
    for i, kind in ipairs {{"uint8", 8}, {"uint8", 8}, {"float8_e4m3fn", 1}, {"float8_e4m3fn", 1}} do
      pools[i] = data.pool {dtype = kind[1], shape = {pages, 2, heads, kind[2]}, seed = i}
    end
    local one = data.scale(1)
    local function call()
      append(rows, rows, slots, {pools[1].tensor, pools[2].tensor}, {pools[3].tensor, pools[4].tensor}, one, one)
    end
    call()
    nibble.synchronize()
    local stream = nibble.stream()
    local graph = stream:capture(call)
    stream:scope(function() graph:replay() end)
    stream:synchronize()
    for _, pool in ipairs(pools) do pool:assert_unchanged(context) end
  end

  it("leaves page 0 alone when padding is -1: eagerly, in a capture and in a replay #quick", function()
    local nan = data.tensor {dtype = "bfloat16", shape = {4, 2, 16}, bytes = ("\xC0\x7F"):rep(128)}
    assert_no_effect(nan, data.indices {-1, -1, -1, -1}, 2, 2, "padding")
  end)

  it("quantizes what a trained transformer cached, all its layers, heads and tokens", function()
    local real = assert(loadfile(golden.data .. "real/case.lua", "t", {}))()
    for _, layer in ipairs(real.layers) do
      local arrays, tokens = {}, {}
      for i, side in ipairs {"k", "v"} do
        local file = golden.npy(golden.data .. "real/" .. layer[side])
        assert.same({real.tokens, real.kv_heads, real.head_dim}, file.shape)
        arrays[i] = {dtype = real.dtype, shape = file.shape, bytes = file.bytes}
      end
      for i = 1, real.tokens do tokens[i] = i * 7 % real.tokens end -- 320 and 7 have no common factor: a shuffle
      local c = {layout = "HND", page_size = 16, head_dim = real.head_dim, heads = real.kv_heads,
                 pages = real.tokens // 16, how = "pair"}
      local caches, slots = make_caches(c), data.indices(tokens)
      local expected = reference.append {append_key = arrays[1], append_value = arrays[2], slot_mapping = slots,
        paged_kv_cache = halves(caches[1]), kv_cache_sf = halves(caches[2]), k_scale = 0.01, v_scale = 0.02,
          kv_layout = "HND"}
      append(data.tensor(arrays[1]), data.tensor(arrays[2]), slots, argument(caches[1]), argument(caches[2]), 0.01,
             0.02, "HND")
      assert_pool(caches[1], expected.paged_kv_cache, "layer " .. layer.layer)
      assert_pool(caches[2], expected.kv_cache_sf, "layer " .. layer.layer .. ": scales")
    end
  end)

  it("takes data and scale strides separately #quick", function()
    for n, layout in ipairs {"NHD", "HND"} do
      check({dtype = "bfloat16", layout = layout, page_size = 4, head_dim = 64, heads = 3, pages = 4, rows = 8,
             how = "pair",
             slots = {15, 3, 8, 0, 5, 10, 6, 12}, slot_dtype = "int64", k_scale = 0.011, v_scale = 12.0,
               seed = 90 + n}, layout)
    end
  end)

  it("finds offsets past 2^32 in a pool of 4,200 pages with a page stride of 1,039,680 bytes", function()
    local pages, stride = 4200, 1039680
    local storage = nibble.empty((pages - 1) * stride + 4 * 16, {dtype = "uint8"})
    local cache = storage:as_strided({pages, 2, 2, 16}, {stride, 32, 16, 1})
    local sf = nibble.zeros(pages, 2, 2, 2, {dtype = "float8_e4m3fn"})
    local last = storage:narrow(1, (pages - 1) * stride + 1, 64)
    local wrapped = storage:narrow(1, ((pages - 1) * stride & 0xFFFFFFFF) + 1, 64)
    last:fill(0xA5)
    wrapped:fill(0xA5)
    local key = data.floats(4, {1, 2, 32}, "float16")
    local rows = data.tensor(key)
    local other, other_sf = nibble.zeros(pages, 2, 2, 16, {dtype = "uint8"}),
      nibble.zeros(pages, 2, 2, 2, {dtype = "float8_e4m3fn"})
    append(rows, rows, data.indices({pages * 2 - 1}, "int64"), {cache, other}, {sf, other_sf}, 1, 1)
    local expected = reference.append {append_key = key, append_value = key, slot_mapping = data.array({1}, "int64"),
      paged_kv_cache = {{dtype = "uint8", shape = {1, 2, 2, 16}, bytes = ("\xA5"):rep(64)}, other:narrow(1, 1, 1)},
      kv_cache_sf = {sf:narrow(1, 1, 1), sf:narrow(1, 1, 1)}, k_scale = 1, v_scale = 1}
    assert.equal(expected.paged_kv_cache[1].bytes, last:bytes())
    assert.equal(("\xA5"):rep(64), wrapped:bytes())
    assert.equal(expected.kv_cache_sf[1].bytes, sf:narrow(1, pages, 1):bytes())
    storage:close()
  end)

  it("does nothing without rows, slots, pages or heads, inside a capture too #quick", function()
    for _, sizes in ipairs {{0, 0, 2, 2}, {3, 0, 2, 2}, {3, 3, 0, 2}, {3, 3, 2, 0}} do
      local rows, nnz, pages, heads = table.unpack(sizes)
      assert_no_effect(nibble.zeros(rows, heads, 16, {dtype = "float16"}), nibble.zeros(nnz, {dtype = "int32"}), pages,
                       heads,
                       ("%d rows, %d slots, %d pages, %d heads"):format(rows, nnz, pages, heads))
    end
  end)
end)

describe("append's block rule", function()
  --- One block of 16 numbers per row; returns the codes (list of lists) and the scale bytes.
  local function quantize(blocks, dtype, g)
    local list = {}
    for _, block in ipairs(blocks) do
      for i = 1, 16 do list[#list + 1] = block[i] or 0.0 end
    end
    local input = data.tensor(data.array(list, dtype, {#blocks, 1, 16}))
    local cache, sf = nibble.zeros(#blocks, 1, 1, 8, {dtype = "uint8"}),
      nibble.zeros(#blocks, 1, 1, 1, {dtype = "uint8"})
    append(input, input, nibble.arange(#blocks), {cache, cache:clone()}, {sf, sf:clone()}, g, g)
    local packed, codes = cache:bytes(), {}
    for b = 1, #blocks do
      codes[b] = {}
      for i = 1, 16 do
        local byte = packed:byte((b - 1) * 8 + (i + 1) // 2)
        codes[b][i] = i % 2 == 1 and byte & 15 or byte >> 4
      end
    end
    return codes, sf:bytes()
  end

  it("puts ties on the even code: .25 .75 1.25 1.75 2.5 3.5 5 6 at scale 1 #quick", function()
    for _, dtype in ipairs {"float16", "bfloat16"} do
      local codes, sf = quantize({{.25, .75, 1.25, 1.75, 2.5, 3.5, 5, 6, -.25, -.75, -1.25, -1.75, -2.5, -3.5, -5,
                                   -6}}, dtype, 1)
      assert.equal("\x38", sf)
      assert.same({0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15}, codes[1])
    end
  end)

  it("multiplies by the rounded inverse where division would give another code: all 42 values #quick", function()
    local blocks, expected, scales = {}, {}, {}
    for i, found in ipairs(data.inverse_cases()) do
      blocks[i] = {6 * found.scale, found.x, -found.x}
      expected[i] = {7, found.code, found.code + 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
      scales[i] = string.char(found.byte)
    end
    assert.equal(42, #blocks)
    local codes, sf = quantize(blocks, "bfloat16", 1)
    assert.equal(table.concat(scales), sf)
    assert.same(expected, codes)
    -- one of them by hand: s = 15 * 2^-9
    codes, sf = quantize({{6 * 15 * 2.0 ^ -9, 0.03662109375}}, "bfloat16", 1)
    assert.equal("\x0F", sf)
    assert.equal(3, codes[1][2])
  end)

  it("takes amax over what is no NaN, stores 0x7E for an infinite amax, and code 0 for a product that is NaN #quick",
     function()
    local nan, inf = 0 / 0, math.huge
    local all_nan, negative_zero = {}, {}
    for i = 1, 16 do all_nan[i], negative_zero[i] = nan, -0.0 end
    for _, dtype in ipairs {"float16", "bfloat16"} do
      local codes, sf = quantize({{nan, 6, -nan, -3}, {inf, 448, -inf, nan, -1}, all_nan, negative_zero, {}}, dtype, 1)
      assert.equal("\x38\x7E\0\0\0", sf)
      assert.same({0, 7, 0, 13}, {table.unpack(codes[1], 1, 4)})
      assert.same({7, 2, 15, 0, 8}, {table.unpack(codes[2], 1, 5)})
      for i = 1, 16 do
        assert.equal(0, codes[3][i])
        assert.equal(8, codes[4][i])
        assert.equal(0, codes[5][i])
      end
    end
    -- 448 * g overflows: the inverse is 0, and inf * 0 is NaN
    local codes, sf = quantize({{inf, 1, -1}}, "bfloat16", 3e38)
    assert.equal("\x7E", sf)
    assert.same({0, 0, 8}, {table.unpack(codes[1], 1, 3)})
  end)

  it("keeps signs where the scale underflows to 0, and saturates at 448 #quick", function()
    local codes, sf = quantize({{1e-6, -1e-6}, {60000, -30000, 1.0}}, "bfloat16", 1)
    assert.equal("\0\x7E", sf)
    assert.same({0, 8}, {codes[1][1], codes[1][2]})
    assert.same({7, 15, 0}, {table.unpack(codes[2], 1, 3)})
  end)

  it("holds for global scales from the least to the largest float32 #quick", function()
    for n, g in ipairs {2.0 ^ -149, 2.0 ^ -126, 1e-30, 1e-10, 0.3, 7.7, 1e10, 1e30, 3.4028234663852886e38} do
      for _, dtype in ipairs {"float16", "bfloat16"} do
        check({dtype = dtype, layout = "NHD", page_size = 2, head_dim = 128, heads = 2, pages = 3, rows = 6,
               how = "pair",
               slots = {0, 1, 2, 3, 4, 5}, slot_dtype = "int32", device_scales = n % 2 == 0, k_scale = g,
               v_scale = 1 / n, seed = 40 + n},
              ("%s g = %g"):format(dtype, g))
      end
    end
  end)

  it("stores K's scales by k_scale and V's by v_scale #quick", function()
    local input = data.tensor(data.array({6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, "float16", {1, 1, 16}))
    local k, v = nibble.zeros(1, 1, 1, 8, {dtype = "uint8"}), nibble.zeros(1, 1, 1, 8, {dtype = "uint8"})
    local k_sf, v_sf = nibble.zeros(1, 1, 1, 1, {dtype = "uint8"}), nibble.zeros(1, 1, 1, 1, {dtype = "uint8"})
    append(input, input, data.indices {0}, {k, v}, {k_sf, v_sf}, 0.5, 2.0)
    assert.equal(0x40, k_sf:item()) -- 6 / (6 * 0.5) = 2
    assert.equal(0x30, v_sf:item()) -- 6 / (6 * 2.0) = 0.5
  end)
end)

describe("append's device scales", function()
  it("are read when the kernel runs: changed between replays, they are honoured #quick", function()
    local key = data.tensor(data.finite(3, {4, 2, 32}, "bfloat16"))
    local value = data.tensor(data.finite(4, {4, 2, 32}, "bfloat16"))
    local slots = data.indices {0, 3, 5, 2}
    local function zeros(x, dtype) return nibble.zeros(3, 2, 2, x, {dtype = dtype}) end
    local cache, sf = {zeros(16, "uint8"), zeros(16, "uint8")}, {zeros(2, "float8_e4m3fn"), zeros(2, "float8_e4m3fn")}
    local k_scale, v_scale = data.scale(1), data.scale(1)
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function() append(key, value, slots, cache, sf, k_scale, v_scale) end)
    for n = 1, 4 do
      stream:scope(function()
        for i = 1, 2 do
          cache[i]:fill(0)
          sf[i]:fill(0)
        end
        k_scale:copy(data.scale(0.1 * n))
        v_scale:copy(data.scale(3.0 / n))
        graph:replay()
      end)
      stream:synchronize()
      local expected = reference.append {append_key = key, append_value = value, slot_mapping = slots,
        paged_kv_cache = {zeros(16, "uint8"), zeros(16, "uint8")},
        kv_cache_sf = {zeros(2, "float8_e4m3fn"), zeros(2, "float8_e4m3fn")}, k_scale = k_scale, v_scale = v_scale}
      for i = 1, 2 do
        assert.tensor_equal(expected.paged_kv_cache[i], cache[i], "replay " .. n)
        assert.tensor_equal(expected.kv_cache_sf[i], sf[i], "replay " .. n)
      end
    end
  end)
end)
