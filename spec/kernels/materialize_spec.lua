-- quantization.nvfp4_kv_materialize_fp8: the pages that requests reach, as E4M3.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local materialize = nibble.quantization.nvfp4_kv_materialize_fp8

--- Pools of caches and scales with random contents and padded strides.
local function make(c)
  local function pool(x, dtype, pads, seed)
    local shape = {c.pages, c.heads, c.page_size, x}
    return data.pool {dtype = dtype, shape = shape, strides = data.strides(shape, pads), seed = c.seed + seed}
  end
  return {
    k_cache = pool(c.head_dim // 2, "uint8", c.compact and {} or {16, 0, 0}, 0),
    v_cache = pool(c.head_dim // 2, "uint8", c.compact and {} or {48, 7, 3}, 1),
    k_block_scales = pool(c.head_dim // 16, c.sf_dtype or "uint8", c.compact and {} or {5, 0, 0}, 2),
    v_block_scales = pool(c.head_dim // 16, c.sf_dtype or "uint8", c.compact and {} or {3, 2, 1}, 3),
  }
end

--- Runs one configuration, with index tensors that are compact or `c.scattered`; expects `fault` = {parameter, values,
--- indices} or none.
local function check(c, context)
  context = context or "materialize"
  local pools = make(c)
  local columns = (c.max_kv_len + c.page_size - 1) // c.page_size
  local batch = #c.lengths
  local shared = c.uses_shared_paged_kv_idx ~= false
  local table_columns = batch > 0 and #c.tables // batch // (shared and 1 or 2) or columns
  local indices = c.scattered and data.scattered or data.indices
  local tables = indices(c.tables, "int32", shared and {batch, table_columns} or {batch, 2, table_columns})
  local lengths = indices(c.lengths)
  local num_pages = c.indptr and c.num_pages or batch * columns
  local out = data.pool {dtype = "float8_e4m3fn", shape = {num_pages + 1, 2, c.heads, c.page_size, c.head_dim},
                         seed = c.seed + 9}
  local indptr = c.indptr and indices(c.indptr)
  local arguments = {block_tables = tables, seq_lens = lengths, max_kv_len = c.max_kv_len,
    uses_shared_paged_kv_idx = c.uses_shared_paged_kv_idx, out = out:array(), kv_page_indptr = indptr,
      num_pages = c.num_pages}
  for name, pool in pairs(pools) do arguments[name] = pool:array() end
  local expected = reference.materialize(arguments)

  local function run(destination)
    return materialize(pools.k_cache.tensor, pools.v_cache.tensor, pools.k_block_scales.tensor,
                       pools.v_block_scales.tensor,
      tables, lengths, c.max_kv_len, {uses_shared_paged_kv_idx = c.uses_shared_paged_kv_idx, out = destination,
      kv_page_indptr = indptr, num_pages = c.num_pages})
  end
  local function settle()
    if c.fault then
      assert.faults_like(nibble.check_faults, "quantization.nvfp4_kv_materialize_fp8", table.unpack(c.fault, 1, 3))
    end
    nibble.check_faults()
  end
  local cache, fp8_tables = run(out.tensor)
  settle()
  assert.is_true(cache == out.tensor)
  out:assert_equal(expected.kv_cache_fp8, context .. ": out")
  assert.tensor_equal(expected.fp8_block_tables, fp8_tables, context .. ": fp8_block_tables")
  for name, pool in pairs(pools) do pool:assert_unchanged(context .. ": " .. name) end

  -- A fresh result: the same pages, and the zero page; the others are unspecified, and not looked at.
  local fresh, fresh_tables = run(nil)
  settle()
  assert.same(expected.kv_cache_fp8.shape, fresh.shape)
  assert.equal("float8_e4m3fn", fresh.dtype)
  assert.tensor_equal(expected.fp8_block_tables, fresh_tables, context .. ": fresh fp8_block_tables")
  local page = c.heads * c.page_size * c.head_dim * 2
  for p in pairs(expected.written) do
    assert.equal(expected.kv_cache_fp8.bytes:sub(p * page + 1, (p + 1) * page), fresh[p + 1]:bytes())
  end
  return expected
end

describe("materialize, every head_dim and page size that its layout allows:", function()
  for _, page_size in ipairs {4, 16, 64} do
    for _, head_dim in ipairs {64, 128, 192, 256, 512} do
      it(("page size %d, head_dim %d"):format(page_size, head_dim), function()
        for n, shared in ipairs {true, false} do
          local max_kv_len = page_size + 3
          check({
            page_size = page_size, head_dim = head_dim, heads = page_size == 64 and 1 or n + 1, pages = 5,
            seed = head_dim + page_size + n,
            lengths = {page_size + 1, 0, 3}, max_kv_len = max_kv_len, uses_shared_paged_kv_idx = shared,
            compact = n == 2,
            sf_dtype = n == 1 and "uint8" or "float8_e4m3fn",
            tables = shared and {4, 1, -7, -7, 2, -7} or {4, 1, 0, 3, -7, -7, -7, -7, 2, -7, 3, -7},
          }, shared and "shared indices" or "split indices")
        end
      end)
    end
  end
end)

describe("materialize", function()
  local function base(changes)
    local c = {page_size = 4, head_dim = 64, heads = 2, pages = 6, seed = 3, lengths = {9, 4}, max_kv_len = 12,
               tables = {1, 3, 5, 0, -7, -7}}
    for key, value in pairs(changes) do c[key] = value end
    return c
  end

  it("writes whole pages that a request reaches and no others: lengths 0, 1, page-1, page, page+1 #quick", function()
    for _, length in ipairs {0, 1, 3, 4, 5} do
      check(base {lengths = {length, 12}, tables = {1, 3, 5, 0, 2, 4}}, "length " .. length)
    end
  end)

  it("reads V's scales interleaved over 4 tokens and K's linear: every scale byte at page sizes 4 and 16 #quick",
     function()
    for _, page_size in ipairs {4, 16} do
      for _, head_dim in ipairs {64, 128} do
        local blocks = head_dim // 16
        -- The value 1 everywhere, scale number n in place n: the output is the scale itself.
        local n = page_size * blocks
        local ones = data.tensor {dtype = "uint8", shape = {1, 1, page_size, head_dim // 2},
                                  bytes = ("\x22"):rep(n * 8)}
        local scales = {}
        for i = 0, n - 1 do scales[i + 1] = string.char(i % 126 + 1) end
        local sf = data.tensor {dtype = "uint8", shape = {1, 1, page_size, blocks}, bytes = table.concat(scales)}
        local out = materialize(ones, ones, sf, sf, data.indices({0}, "int32", {1, 1}), data.indices {page_size},
                                page_size):bytes()
        local plane = n * 16
        for t = 0, page_size - 1 do
          for s = 0, blocks - 1 do
            local at = (t * blocks + s) * 16
            local row, column = 4 * (t // 4) + s // (blocks // 4), 4 * (s % (blocks // 4)) + t % 4
            assert.equal(scales[t * blocks + s + 1]:rep(16), out:sub(2 * plane + at + 1, 2 * plane + at + 16))
            assert.equal(scales[row * blocks + column + 1]:rep(16), out:sub(3 * plane + at + 1, 3 * plane + at + 16))
          end
        end
      end
    end
  end)

  it("writes the zero page on every call, also after it was poisoned, also without requests #quick", function()
    local out = nibble.full({7, 2, 2, 4, 64}, 3.5, {dtype = "float8_e4m3fn"})
    local pools = make(base {})
    local function run(tables, lengths, max_kv_len, destination)
      return materialize(pools.k_cache.tensor, pools.v_cache.tensor, pools.k_block_scales.tensor,
                         pools.v_block_scales.tensor,
                         tables, lengths, max_kv_len, {out = destination})
    end
    local tables, lengths = data.indices({1, 3, 5, 0, 2, 4}, "int32", {2, 3}), data.indices {9, 4}
    for n = 1, 3 do
      out:narrow(1, 1, 1):fill(n)
      run(tables, lengths, 12, out)
      assert.equal(("\0"):rep(2 * 2 * 4 * 64), out:narrow(1, 1, 1):bytes())
    end
    -- inside a graph
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function() run(tables, lengths, 12, out) end)
    stream:scope(function()
      out:fill(7)
      graph:replay()
    end)
    stream:synchronize()
    assert.equal(("\0"):rep(2 * 2 * 4 * 64), out:narrow(1, 1, 1):bytes())
    -- no requests; no length
    local one_page = nibble.full({1, 2, 2, 4, 64}, 3.5, {dtype = "float8_e4m3fn"})
    local none, none_tables = run(nibble.zeros(0, 3, {dtype = "int32"}), nibble.zeros(0, {dtype = "int32"}), 12,
                                  one_page)
    assert.equal(("\0"):rep(2 * 2 * 4 * 64), none:bytes())
    assert.same({0, 3}, none_tables.shape)
    one_page:fill(3.5)
    none, none_tables = run(nibble.zeros(2, 0, {dtype = "int32"}), data.indices {0, 0}, 0, one_page)
    assert.equal(("\0"):rep(2 * 2 * 4 * 64), none:bytes())
    assert.same({2, 0}, none_tables.shape)
    -- fresh results
    none = run(nibble.zeros(0, 0, {dtype = "int32"}), nibble.zeros(0, {dtype = "int32"}), 0, nil)
    assert.equal(("\0"):rep(2 * 2 * 4 * 64), none:bytes())
  end)

  it("looks at a request once that was expanded to any number, where none has pages #quick", function()
    local none = nibble.zeros(1, 1, 4, 32, {dtype = "uint8"})
    local scales = nibble.zeros(1, 1, 4, 4, {dtype = "uint8"})
    local function run(length)
      return materialize(none, none, scales, scales, nibble.zeros(1, 0, {dtype = "int32"}):expand(1 << 40, 0),
        nibble.tensor({length}, {dtype = "int32"}):expand(1 << 40), 0)
    end
    local cache, tables = run(0)
    assert.same({1, 2, 1, 4, 64}, cache.shape)
    assert.same({1 << 40, 0}, tables.shape)
    assert.equal(("\0"):rep(512), cache:bytes())
    run(1)
    assert.faults_like(nibble.check_faults, "quantization.nvfp4_kv_materialize_fp8", "seq_lens", 1, 0)
  end)

  it("puts request b's page j at kv_page_indptr[b] + j + 1; slack stays as it was #quick", function()
    check(base {indptr = {0, 3, 4}, num_pages = 4}, "exact")
    check(base {indptr = {0, 4, 7}, num_pages = 8}, "slack between and behind")
    check(base {indptr = {2, 5, 6}, num_pages = 6}, "not from 0")
    check(base {lengths = {0, 0}, indptr = {0, 0, 0}, num_pages = 0}, "no pages at all")
  end)

  it("a request whose kv_page_indptr range is too small writes only what fits, with a fault #quick", function()
    local function fault() return {"kv_page_indptr", nil, nil} end
    check(base {indptr = {0, 2, 4}, num_pages = 4, fault = fault()}, "one page short")
    check(base {indptr = {0, 0, 4}, num_pages = 4, fault = fault()}, "no room")
    check(base {indptr = {0, 3, 9}, num_pages = 3, fault = fault()}, "past the end")
    check(base {indptr = {-1, 3, 4}, num_pages = 4, fault = fault()}, "begins below 0")
    check(base {indptr = {-0x80000000, 0x7FFFFFFF, 4}, num_pages = 4, fault = fault()}, "int32 extremes")
    check(base {indptr = {3, 0, 1}, num_pages = 4, fault = fault()}, "decreasing")
    check(base {indptr = {0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF}, num_pages = 4, fault = fault()}, "far outside")
    check(base {indptr = {0, 3, 4}, num_pages = 0, fault = fault()}, "num_pages 0")
  end)

  it("seq_lens beyond max_kv_len are clamped, with a fault; negative ones count as 0 #quick", function()
    check(base {lengths = {13, 4}, tables = {1, 3, 5, 0, 2, 2}, fault = {"seq_lens", 13, 0}}, "one more")
    check(base {lengths = {4, 0x7FFFFFFF}, tables = {1, 3, 5, 0, 2, 2}, fault = {"seq_lens", 0x7FFFFFFF, 1}}, "2^31-1")
    check(base {lengths = {-1, -0x80000000}}, "negative")
    check(base {lengths = {1, 1}, max_kv_len = 0, tables = {}, fault = {"seq_lens", 1, {0, 1}}}, "max_kv_len 0")
  end)

  it("reads tables, lengths and ranges by their own strides, shared and split indices #quick", function()
    check(base {scattered = true, tables = {1, 3, 5, 0, -7, -7}}, "shared indices")
    check(base {scattered = true, uses_shared_paged_kv_idx = false, tables = {1, 3, 5, 4, 2, 0, 0, -7, -7, 5, -7, -7}},
          "split indices")
    check(base {scattered = true, indptr = {2, 5, 6}, num_pages = 8}, "with kv_page_indptr")
    check(base {scattered = true, lengths = {9, 4, 12}, tables = {1, 3, 5, 0, -7, -7, 4, 4, 2}, indptr = {3, 6, 7, 10},
                num_pages = 10}, "three requests")
  end)

  it("gives a last page that is not full a column, and a place in the result #quick", function()
    for _, max_kv_len in ipairs {9, 10, 11, 12} do
      check(base {max_kv_len = max_kv_len}, "max_kv_len " .. max_kv_len)
    end
  end)

  it("a bad page index zero-fills the destination page, with a fault #quick", function()
    for _, bad in ipairs {-1, 6, 0x7FFFFFFF, -0x80000000} do
      check(base {tables = {1, bad, 5, 0, -7, -7}, fault = {"block_tables", bad, 1}}, "shared " .. bad)
    end
  end)

  it("a bad page index of K or of V zero-fills its own plane only #quick", function()
    local split = {lengths = {9, 4}, uses_shared_paged_kv_idx = false}
    for _, bad in ipairs {-1, 6, 0x7FFFFFFF} do
      split.tables = {1, bad, 5, 0, 2, 3, 4, -7, -7, 1, -7, -7}
      split.fault = {"block_tables", bad, 1}
      check(base(split), "K " .. bad)
      split.tables = {1, 2, 5, 0, 2, 3, 4, -7, -7, bad, -7, -7}
      split.fault = {"block_tables", bad, 9}
      check(base(split), "V " .. bad)
    end
  end)

  it("reads no table entry past a request's pages, and wider tables by their stride #quick", function()
    check(base {tables = {1, 3, 5, -9, 99, 0, -7, -7, -9, 99}}, "five columns for three")
    check(base {tables = {1, 3, 5, 99, 0, 2, 4, 99, 3, -7, -7, 99, 4, -7, -7, 99}, uses_shared_paged_kv_idx = false},
          "four for three")
  end)

  it("materializes long requests from many pages: work that is spread over threads", function()
    check {page_size = 16, head_dim = 128, heads = 4, pages = 64, seed = 8, lengths = {200, 256, 1, 133},
           max_kv_len = 256,
           tables = data.integers(5, 4 * 16, 0, 63)}
  end)

  it("rounds once, saturates, keeps signs, and a NaN scale gives NaN: every code with every scale byte #quick",
     function()
    local packed, scales = {}, {}
    for byte = 0, 255 do
      packed[byte + 1], scales[byte + 1] = "\x10\x32\x54\x76\x98\xBA\xDC\xFE", string.char(byte)
    end
    local cache = data.tensor {dtype = "uint8", shape = {16, 1, 4, 32}, bytes = table.concat(packed)}
    local sf = data.tensor {dtype = "uint8", shape = {16, 1, 4, 4}, bytes = table.concat(scales)}
    local indices = {}
    for i = 0, 15 do indices[i + 1] = i end
    local tables, lengths = data.indices(indices, "int32", {1, 16}), data.indices {64}
    local out = materialize(cache, cache, sf, sf, tables, lengths, 64)
    assert.tensor_equal(reference.materialize {k_cache = cache, v_cache = cache, k_block_scales = sf,
      v_block_scales = sf,
      block_tables = tables, seq_lens = lengths, max_kv_len = 64}.kv_cache_fp8, out)
    -- the K planes by hand: value * scale, rounded to the nearest E4M3
    local bytes, values = out:bytes(), {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6}
    for byte = 0, 255 do
      local at = (byte // 16 + 1) * 512 + byte % 16 * 16
      for i, value in ipairs(values) do
        local x = value * reference.decode(byte, "float8_e4m3fn")
        assert.equal(reference.encode(x, "float8_e4m3fn"), bytes:byte(at + i))
      end
    end
  end)

  it("does nothing more than the zero page without pages or heads, inside a capture too #quick", function()
    local function run(pages, heads)
      local cache = nibble.zeros(pages, heads, 4, 32, {dtype = "uint8"})
      local sf = nibble.zeros(pages, heads, 4, 4, {dtype = "uint8"})
      local tables, lengths = nibble.zeros(1, 2, {dtype = "int32"}), data.indices {0}
      local out = nibble.full({3, 2, heads, 4, 64}, 2, {dtype = "float8_e4m3fn"})
      local function call() materialize(cache, cache, sf, sf, tables, lengths, 8, {out = out}) end
      call()
      local first = out:bytes()
      assert.equal(("\0"):rep(2 * heads * 256) .. ("\x40"):rep(4 * heads * 256), first)
      local graph = nibble.stream():capture(call)
      graph:replay()
      nibble.synchronize()
      assert.equal(first, out:bytes())
    end
    run(0, 2)
    run(2, 0)
    run(2, 2)
  end)

  it("honours tables and lengths that change between replays, fp8_block_tables too #quick", function()
    local c = base {}
    local pools = make(c)
    local tables, lengths = data.indices({0, 0, 0, 0, 0, 0}, "int32", {2, 3}), data.indices {0, 0}
    local stream, cache, fp8_tables = nibble.stream(), nil, nil
    nibble.synchronize()
    local graph = stream:capture(function()
      cache, fp8_tables = materialize(pools.k_cache.tensor, pools.v_cache.tensor, pools.k_block_scales.tensor,
                                      pools.v_block_scales.tensor, tables, lengths, 12)
    end)
    for n = 1, 5 do
      stream:scope(function()
        tables:copy(data.indices(data.integers(n, 6, 0, 5), "int32", {2, 3}))
        lengths:copy(data.indices(data.integers(n + 50, 2, 0, 12)))
        cache:fill(1)
        graph:replay()
      end)
      stream:synchronize()
      local expected = reference.materialize {k_cache = pools.k_cache.tensor, v_cache = pools.v_cache.tensor,
        k_block_scales = pools.k_block_scales.tensor, v_block_scales = pools.v_block_scales.tensor,
        block_tables = tables,
        seq_lens = lengths, max_kv_len = 12, out = {dtype = "float8_e4m3fn", shape = cache.shape,
          bytes = ("\x38"):rep(cache:numel())}}
      assert.tensor_equal(expected.kv_cache_fp8, cache, "replay " .. n)
      assert.tensor_equal(expected.fp8_block_tables, fp8_tables, "replay " .. n)
    end
  end)

  it("by default shares indices and needs no options #quick", function()
    local c = base {}
    local pools = make(c)
    local cache = materialize(pools.k_cache.tensor, pools.v_cache.tensor, pools.k_block_scales.tensor,
                              pools.v_block_scales.tensor,
                              data.indices(c.tables, "int32", {2, 3}), data.indices(c.lengths), 12)
    assert.same({7, 2, 2, 4, 64}, cache.shape)
  end)
end)
