-- quantization.nvfp4_kv_dequantize_paged: gathers pages through block tables;
-- (E2M1 value * block scale) * global scale.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local dequantize = nibble.quantization.nvfp4_kv_dequantize_paged

local function cache_shape(c, x)
  if c.layout == "NHD" then return {c.pages, c.page_size, c.heads, x} end
  return {c.pages, c.heads, c.page_size, x}
end

--- A cache pool with random contents; scale bytes are all that there are, NaN and negative ones too.
local function pool(c, x, dtype, pads, seed)
  local shape = cache_shape(c, x)
  local p = data.pool {dtype = dtype, shape = shape, strides = data.strides(shape, pads), seed = seed}
  return p
end

local function output(c, dim, seed)
  return data.pool {dtype = c.dtype, shape = {c.batch, c.tokens, c.heads, dim}, seed = seed}
end

local function check(c, context)
  local k, v = pool(c, c.k_dim // 2, "uint8", {9, 5, 3}, c.seed), pool(c, c.v_dim // 2, "uint8", {2, 0, 1}, c.seed + 1)
  local k_sf = pool(c, c.k_dim // 16, c.sf_dtype or "float8_e4m3fn", {4, 2, 1}, c.seed + 2)
  local v_sf = pool(c, c.v_dim // 16, c.sf_dtype or "float8_e4m3fn", {0, 3, 0}, c.seed + 3)
  local out_k, out_v = output(c, c.k_dim, c.seed + 4), output(c, c.v_dim, c.seed + 5)
  local indices = c.scattered and data.scattered or data.indices
  local tables = indices(c.tables, c.index_dtype, {c.batch, c.batch > 0 and #c.tables // c.batch or 0})
  local lengths = indices(c.lengths)
  local expected = reference.dequantize {
    paged_kv_cache = {k:array(), v:array()}, kv_cache_sf = {k_sf:array(), v_sf:array()}, block_tables = tables,
    seq_lens = lengths, k_scale = c.k_scale, v_scale = c.v_scale, output_k = out_k:array(), output_v = out_v:array(),
    kv_layout = c.layout}
  dequantize({k.tensor, v.tensor}, {k_sf.tensor, v_sf.tensor}, tables, lengths, data.scale(c.k_scale),
             data.scale(c.v_scale),
             out_k.tensor, out_v.tensor, c.layout)
  out_k:assert_equal(expected.output_k, context .. ": output_k")
  out_v:assert_equal(expected.output_v, context .. ": output_v")
  for _, input in ipairs {k, v, k_sf, v_sf} do input:assert_unchanged(context .. ": an input") end
  nibble.check_faults() -- this operation raises none
end

local dims = {16, 48, 64, 80, 96, 128, 192, 256, 512}

describe("dequantize, every dtype, layout, head_dim and page size:", function()
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
              dtype = dtype, layout = layout, page_size = page_size, k_dim = head_dim,
              v_dim = dims[(i + 3) % #dims + 1],
              heads = number % 3 + 1, pages = 5, batch = 3, tokens = page_size + 2,
              -- enough columns for page size 1; past-the-length entries are garbage
              tables = {4, 0, 2, 3, 1, 99, -5, 6, 1, 1, 2, 5, 0, 0, -1}, index_dtype = number % 2 == 0 and "int32"
              or "int64",
              lengths = {page_size + 1, 0, page_size}, sf_dtype = number % 4 == 0 and "uint8" or nil,
              k_scale = ({1.0, 0.013, -7.5, 1e-6, 3e38, 1e-40, 1 / 3})[number % 7 + 1],
              v_scale = ({7.5, 0.9, 30.0, 1e-30, 2.5})[number % 5 + 1], seed = number * 10,
            }, ("head_dim %d"):format(head_dim))
          end
        end)
      end
    end
  end
end)

describe("dequantize", function()
  local function base(changes)
    local c = {dtype = "bfloat16", layout = "NHD", page_size = 4, k_dim = 32, v_dim = 48, heads = 2, pages = 6,
               batch = 1,
               tokens = 12, tables = {5, 0, 3}, lengths = {12}, index_dtype = "int32", k_scale = 0.5, v_scale = 2.0,
                 seed = 7}
    for key, value in pairs(changes) do c[key] = value end
    return c
  end

  it("leaves tokens at or past seq_lens[b] unchanged: lengths 0, 1, page-1, page, page+1 #quick", function()
    for _, layout in ipairs {"NHD", "HND"} do
      for _, length in ipairs {0, 1, 3, 4, 5} do
        check(base {layout = layout, lengths = {length}}, layout .. " length " .. length)
      end
    end
  end)

  it("leaves tokens whose page index is below 0 or past the cache unchanged, without a fault #quick", function()
    check(base {tables = {-1, 6, 0x7FFFFFFF}}, "no valid page")
    check(base {tables = {2, -0x80000000, 1}}, "a bad page between two")
    check(base {tables = {1 << 32, math.maxinteger, 1}, index_dtype = "int64"}, "valid if cut to 32 bits")
    check(base {tables = {math.mininteger, (1 << 62) + 1, -(1 << 32)}, index_dtype = "int64"}, "int64 extremes")
  end)

  it("counts negative lengths as 0 and cuts lengths to the output's, without a fault #quick", function()
    check(base {lengths = {-1}}, "-1")
    check(base {lengths = {-0x80000000}}, "-2^31")
    check(base {lengths = {13}}, "one more")
    check(base {lengths = {0x7FFFFFFF}}, "2^31-1")
  end)

  it("reads no column past ceil(length / page_size), and tables wider than needed by their stride #quick", function()
    check(base {tables = {1, 2, 3, 77, -9}, lengths = {12}}, "wider")
    check(base {tables = {1, 2, 3, 77, 4, 5, 0, 88}, lengths = {12, 5}, batch = 2}, "two rows")
    -- a table that is a view with strides in both dimensions
    local c = base {batch = 2, tables = {}, lengths = {9, 4}}
    local wide = data.indices({3, 9, 1, 9, 0, 9, 9, 9, 9, 9, 9, 9, 2, 9, 5, 9, 4, 9}, "int64", {3, 3, 2})
    local tables = wide:select(3, 1):as_strided({2, 3}, {12, 2})
    local k, sf = pool(c, 16, "uint8", nil, 1), pool(c, 2, "uint8", nil, 2)
    local out_k, out_v = output(c, 32, 3), output(c, 32, 4)
    local seq_lens = data.indices {9, 77, 4, 77}:as_strided({2}, {2})
    local expected = reference.dequantize {paged_kv_cache = {k:array(), k:array()},
                                           kv_cache_sf = {sf:array(), sf:array()},
      block_tables = tables, seq_lens = seq_lens, k_scale = 1, v_scale = 1, output_k = out_k:array(),
        output_v = out_v:array()}
    dequantize({k.tensor, k.tensor}, {sf.tensor, sf.tensor}, tables, seq_lens, data.scale(1), data.scale(1),
               out_k.tensor, out_v.tensor)
    out_k:assert_equal(expected.output_k, "strided table: K")
    out_v:assert_equal(expected.output_v, "strided table: V")
  end)

  it("reads tables and lengths by their own strides #quick", function()
    for _, dtype in ipairs {"int32", "int64"} do
      check(base {scattered = true, index_dtype = dtype, batch = 3, tables = {5, 0, 3, 1, 2, 4, 0, 0, 1},
        lengths = {12, 5, 9}}, dtype)
    end
  end)

  it("reads pages above 2^30 #quick", function()
    local rows = nibble.randn(4, 2, 64, {dtype = "bfloat16", seed = 3})
    local cache, sf = nibble.zeros(2, 1, 4, 2, 32, {dtype = "uint8"}), nibble.zeros(2, 1, 4, 2, 4, {dtype = "uint8"})
    nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows, nibble.arange(4),
      {cache[1], cache[2]},
      {sf[1], sf[2]}, 1.0, 1.0)
    -- The one page under very many numbers.
    local function many(t) return t:expand(1 << 31, t.shape[2], t.shape[3], t.shape[4]) end
    local one = data.scale(1)
    for _, index in ipairs {0, 1 << 30, (1 << 30) + 5, 0x7FFFFFFF} do
      local k, v = nibble.zeros(1, 4, 2, 64, {dtype = "bfloat16"}), nibble.zeros(1, 4, 2, 64, {dtype = "bfloat16"})
      dequantize({many(cache[1]), many(cache[2])}, {many(sf[1]), many(sf[2])}, data.indices({index}, "int32", {1, 1}),
                 data.indices {4}, one, one, k, v)
      assert.is_true(k:amax() > 0)
      assert.is_true(k[1]:max_error(rows) < 0.5, "page " .. index)
      assert.is_true(k:equal(v))
    end
  end)

  it("accepts one stacked tensor for K and V, compact or not #quick", function()
    for _, layout in ipairs {"NHD", "HND"} do
      local a, b = 4, 2
      if layout == "HND" then a, b = b, a end
      local shape = {3, 2, a, b, 16}
      local cache = data.pool {dtype = "uint8", shape = shape, strides = data.strides(shape, {16, 8, 0, 4}), seed = 1}
      local sf = data.pool {dtype = "float8_e4m3fn", shape = {3, 2, a, b, 2}, seed = 2}
      local c = {dtype = "float16", batch = 2, tokens = 8, heads = 2}
      local out_k, out_v = output(c, 32, 3), output(c, 32, 4)
      local tables, lengths = data.indices({2, 0, 1, 1}, "int32", {2, 2}), data.indices {7, 8}
      local function half(p, i) return p.tensor:select(2, i) end
      local expected = reference.dequantize {paged_kv_cache = {half(cache, 1), half(cache, 2)},
                                             kv_cache_sf = {half(sf, 1), half(sf, 2)},
        block_tables = tables, seq_lens = lengths, k_scale = 0.25, v_scale = 4, output_k = out_k:array(),
        output_v = out_v:array(),
        kv_layout = layout}
      dequantize(cache.tensor, sf.tensor, tables, lengths, data.scale(0.25), data.scale(4), out_k.tensor, out_v.tensor,
                 {kv_layout = layout})
      out_k:assert_equal(expected.output_k, layout .. " K")
      out_v:assert_equal(expected.output_v, layout .. " V")
    end
  end)

  it("gives HND the same bits as NHD, for 1, 3, 4 and 8 heads #quick", function()
    for _, heads in ipairs {1, 3, 4, 8} do
      local cache = data.tensor {dtype = "uint8", shape = {3, 4, heads, 16},
                                 bytes = data.bytes(heads, 3 * 4 * heads * 16)}
      local sf = data.tensor {dtype = "float8_e4m3fn", shape = {3, 4, heads, 2},
                              bytes = data.bytes(heads + 9, 3 * 4 * heads * 2)}
      local tables, lengths, one = data.indices({2, 0}, "int32", {1, 2}), data.indices {7}, data.scale(1.5)
      local function out() return nibble.zeros(1, 8, heads, 32, {dtype = "bfloat16"}) end
      local nhd, hnd = {out(), out()}, {out(), out()}
      dequantize({cache, cache}, {sf, sf}, tables, lengths, one, one, nhd[1], nhd[2], "NHD")
      local cache_hnd, sf_hnd = cache:permute(1, 3, 2, 4):contiguous(), sf:permute(1, 3, 2, 4):contiguous()
      dequantize({cache_hnd, cache_hnd}, {sf_hnd, sf_hnd}, tables, lengths, one, one, hnd[1], hnd[2], "HND")
      assert.tensor_equal(nhd[1], hnd[1], heads .. " heads")
      assert.tensor_equal(nhd[2], hnd[2], heads .. " heads")
    end
  end)

  it("gathers long requests from many pages: work that is spread over threads", function()
    local tables, lengths = {}, {500, 512, 1, 333}
    for i, page in ipairs(data.integers(5, 4 * 32, 0, 63)) do tables[i] = page end
    for n, layout in ipairs {"NHD", "HND"} do
      check(base {dtype = n == 1 and "float16" or "bfloat16", layout = layout, page_size = 16, k_dim = 128, v_dim = 64,
                  heads = 4, pages = 64,
                  batch = 4, tokens = 512, tables = tables, lengths = lengths}, layout)
    end
  end)

  it("uses bad global scales as the arithmetic does #quick", function()
    for _, g in ipairs {0.0, -0.0, -1.0, math.huge, -math.huge, 0 / 0, 2.0 ^ -149} do
      for _, dtype in ipairs {"float16", "bfloat16"} do
        check(base {dtype = dtype, k_scale = g, v_scale = -g}, ("%s g = %g"):format(dtype, g))
      end
    end
  end)

  it("rounds each product to float32: every scale byte with every code #quick", function()
    local packed, scales = {}, {}
    for byte = 0, 255 do
      packed[byte + 1] = "\x10\x32\x54\x76\x98\xBA\xDC\xFE"
      scales[byte + 1] = string.char(byte)
    end
    local cache = data.tensor {dtype = "uint8", shape = {4, 4, 1, 128}, bytes = table.concat(packed)}
    local sf = data.tensor {dtype = "uint8", shape = {4, 4, 1, 16}, bytes = table.concat(scales)}
    for _, dtype in ipairs {"float16", "bfloat16"} do
      for _, g in ipairs {1.0, 0.1, 1 / 3, 30.0, 1e-5, 1e36} do
        local out = nibble.zeros(1, 16, 1, 256, {dtype = dtype})
        local tables, lengths = data.indices({0, 1, 2, 3}, "int32", {1, 4}), data.indices {16}
        local expected = reference.dequantize {paged_kv_cache = {cache, cache}, kv_cache_sf = {sf, sf},
                                               block_tables = tables,
          seq_lens = lengths, k_scale = g, v_scale = g, output_k = out, output_v = out}
        local out_v = out:clone()
        dequantize({cache, cache}, {sf, sf}, tables, lengths, data.scale(g), data.scale(g), out, out_v)
        assert.tensor_equal(expected.output_k, out, ("%s g = %g"):format(dtype, g))
        assert.tensor_equal(expected.output_v, out_v, ("%s g = %g"):format(dtype, g))
      end
    end
  end)

  it("does nothing without requests, tokens, heads or pages, inside a capture too #quick", function()
    local one = data.scale(1)
    local function run(batch, tokens, heads, pages, columns)
      local cache = nibble.zeros(pages, 4, heads, 16, {dtype = "uint8"})
      local sf = nibble.zeros(pages, 4, heads, 2, {dtype = "uint8"})
      local out = data.pool {dtype = "float16", shape = {batch, tokens, heads, 32}}
      local tables, lengths = nibble.zeros(batch, columns, {dtype = "int32"}),
        nibble.full({batch}, 3, {dtype = "int32"})
      local out_v = nibble.zeros(batch, tokens, heads, 32, {dtype = "float16"})
      local function call() dequantize({cache, cache}, {sf, sf}, tables, lengths, one, one, out.tensor, out_v) end
      call()
      nibble.synchronize()
      local graph = nibble.stream():capture(call)
      graph:replay()
      nibble.synchronize()
      out:assert_unchanged(("%d requests, %d tokens, %d heads, %d pages"):format(batch, tokens, heads, pages))
    end
    run(0, 8, 2, 3, 2)
    run(2, 0, 2, 3, 0)
    run(2, 0, 2, 3, 2)
    run(2, 8, 0, 3, 2)
    run(2, 8, 2, 0, 2) -- no page: every index is out of range
  end)

  it("honours lengths, tables and scales that change between replays #quick", function()
    local cache = data.tensor {dtype = "uint8", shape = {4, 4, 2, 16}, bytes = data.bytes(1, 4 * 4 * 2 * 16)}
    local sf = data.tensor {dtype = "uint8", shape = {4, 4, 2, 2}, bytes = data.bytes(2, 4 * 4 * 2 * 2)}
    local tables, lengths, g = data.indices({0, 0}, "int32", {1, 2}), data.indices {0}, data.scale(1)
    local out, out_v = nibble.zeros(1, 8, 2, 32, {dtype = "float16"}), nibble.zeros(1, 8, 2, 32, {dtype = "float16"})
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function() dequantize({cache, cache}, {sf, sf}, tables, lengths, g, g, out, out_v) end)
    for n = 1, 5 do
      local before
      stream:scope(function()
        tables:copy(data.indices({n % 4, (n + 1) % 4}, "int32", {1, 2}))
        lengths:copy(data.indices {n + 2})
        g:copy(data.scale(n / 7))
        before = {dtype = "float16", shape = out.shape, bytes = out:bytes()}
        graph:replay()
      end)
      stream:synchronize()
      local expected = reference.dequantize {paged_kv_cache = {cache, cache}, kv_cache_sf = {sf, sf},
                                             block_tables = tables,
        seq_lens = lengths, k_scale = g, v_scale = g, output_k = before, output_v = before}
      assert.tensor_equal(expected.output_k, out, "replay " .. n)
      assert.tensor_equal(expected.output_v, out_v, "replay " .. n)
    end
  end)
end)
