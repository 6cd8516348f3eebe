-- The checks of quantization.nvfp4_kv_dequantize_paged, but for dtypes and ranks
-- (generated_spec.lua).
local nibble = require "nibble"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local checks = require "spec.support.checks"
local tensor, set, give, half = checks.tensor, checks.set, checks.give, checks.half

local OPERATION = "quantization.nvfp4_kv_dequantize_paged"

local function arguments()
  local function pool(x, seed) return data.tensor {dtype = "uint8", shape = {5, 4, 2, x},
    bytes = data.bytes(seed, 40 * x)} end
  local a = {
    paged_kv_cache = {pool(16, 1), pool(24, 2)}, kv_cache_sf = {pool(2, 3), pool(3, 4)}, kv_layout = "NHD",
    block_tables = data.indices({0, 1, 2, 3, 4, 0}, "int64", {2, 3}), seq_lens = data.indices {9, 5},
    k_scale = data.scale(1), v_scale = data.scale(2),
    k = data.pool {dtype = "bfloat16", shape = {2, 10, 2, 32}},
      v = data.pool {dtype = "bfloat16", shape = {2, 10, 2, 48}},
  }
  a.output_k, a.output_v = a.k.tensor, a.v.tensor
  a.outputs = {a.k, a.v}
  return a
end

local function call(a)
  nibble.quantization.nvfp4_kv_dequantize_paged(a.paged_kv_cache, a.kv_cache_sf, a.block_tables, a.seq_lens, a.k_scale,
    a.v_scale, a.output_k,
                                                a.output_v, a.kv_layout)
end

local cases = {
  {"paged_kv_cache (V)", "K and V of different page counts", half("paged_kv_cache", 2, "uint8", {4, 4, 2, 24}),
   "4, 4, 2, 24"},
  {"paged_kv_cache (V)", "K and V of different page sizes", half("paged_kv_cache", 2, "uint8", {5, 8, 2, 24}),
   "5, 8, 2, 24"},
  {"paged_kv_cache (V)", "K and V of different head counts", half("paged_kv_cache", 2, "uint8", {5, 4, 1, 24}),
   "5, 4, 1, 24"},
  {"paged_kv_cache (K)", "a head_dim that is no multiple of 16", half("paged_kv_cache", 1, "uint8", {5, 4, 2, 12}),
   "16", "24"},
  {"paged_kv_cache (K)", "a last dimension with stride 2", half("paged_kv_cache", 1, "uint8", {5, 4, 2, 32},
    {5, 4, 2, 16}, {256, 64, 32, 2})},
  {"paged_kv_cache", "a list of one", function(a) a.paged_kv_cache[2] = nil end},
  {"paged_kv_cache", "a stacked tensor with another second dimension",
   give("paged_kv_cache", "uint8", {5, 3, 4, 2, 16}),
   "5, 3, 4, 2, 16"},
  {"kv_cache_sf (K)", "another page count", half("kv_cache_sf", 1, "uint8", {4, 4, 2, 2}), "4, 4, 2, 2"},
  {"kv_cache_sf (V)", "another page size", half("kv_cache_sf", 2, "uint8", {5, 3, 2, 3}), "5, 3, 2, 3"},
  {"kv_cache_sf (V)", "another head count", half("kv_cache_sf", 2, "uint8", {5, 4, 3, 3}), "5, 4, 3, 3"},
  {"kv_cache_sf (K)", "another number of blocks", half("kv_cache_sf", 1, "uint8", {5, 4, 2, 3}), "5, 4, 2, 3"},
  {"kv_cache_sf (K)", "K's and V's the wrong way round", function(a) a.kv_cache_sf = {a.kv_cache_sf[2],
    a.kv_cache_sf[1]} end, "5, 4, 2, 3"},
  {"kv_cache_sf (K)", "a last dimension with stride 2", half("kv_cache_sf", 1, "uint8", {5, 4, 2, 4}, {5, 4, 2, 2},
    {32, 8, 4, 2})},
  {"block_tables", "too few columns for max_seq_len", give("block_tables", "int32", {2, 2}), "3", "2"},
  {"seq_lens", "another batch than block_tables", give("seq_lens", "int32", {1}), "2", "1"},
  {"kv_layout", "an unknown name", set("kv_layout", "HDN"), "NHD", "HND", "HDN"},
  {"output_k", "another batch", give("output_k", "bfloat16", {3, 10, 2, 32}), "2, 10, 2, 32", "3, 10, 2, 32"},
  {"output_k", "other heads than the cache", give("output_k", "bfloat16", {2, 10, 1, 32}), "2, 10, 1, 32"},
  {"output_k", "another head_dim than the cache", give("output_k", "bfloat16", {2, 10, 2, 48}), "2, 10, 2, 48"},
  {"output_k", "not contiguous", set("output_k", function() return tensor("bfloat16", {2, 10, 2, 64}):narrow(4, 1,
    32) end), "contiguous"},
  {"output_v", "another batch", give("output_v", "bfloat16", {3, 10, 2, 48}), "3, 10, 2, 48"},
  {"output_v", "another max_seq_len", give("output_v", "bfloat16", {2, 9, 2, 48}), "2, 9, 2, 48"},
  {"output_v", "another head_dim than the cache", give("output_v", "bfloat16", {2, 10, 2, 32}), "2, 10, 2, 32"},
  {"output_v", "not contiguous", set("output_v", function() return tensor("bfloat16", {2, 10, 2, 96}):narrow(4, 1,
    48) end), "contiguous"},
  {"output_v", "expanded", set("output_v", function() return tensor("bfloat16", {1, 10, 2, 48}):expand(2, 10, 2,
    48) end)},
}
for _, side in ipairs {"k_scale", "v_scale"} do
  local function add(what, make, ...) cases[#cases + 1] = {side, what, set(side, make), ...} end
  add("a number", function() return 1.0 end, "tensor", "got 1")
  add("float16", function() return nibble.full({1}, 1, {dtype = "float16"}) end, "float32", "float16")
  add("two elements", function() return nibble.full({2}, 1.0) end, "2")
  add("no element", function() return nibble.zeros(0) end, "0")
end

checks.describe({operation = OPERATION, arguments = arguments, call = call, cases = cases,
                 tensors = {"paged_kv_cache", "kv_cache_sf", "block_tables", "seq_lens", "k_scale", "v_scale",
                            "output_k", "output_v"}}, describe, it)

describe(OPERATION, function()
  it("refuses outputs that share memory #quick", function()
    local a = arguments()
    local shape, size = a.output_v.shape, a.output_v:numel()
    local both = nibble.zeros(2 * a.output_k:numel() + size, {dtype = a.output_v.dtype})
    a.output_k = both:narrow(1, 1, a.output_k:numel()):view(a.output_k.shape)
    a.output_v = both:narrow(1, a.output_k:numel(), size):view(shape)
    local ok, message = pcall(call, a)
    assert.is_false(ok)
    assert.truthy(message:find("output_v: expected a tensor that does not overlap output_k", 1, true), message)
  end)

  it("refuses an option that it does not know #quick", function()
    local a = arguments()
    a.kv_layout = {layout = "NHD"}
    local ok, message = pcall(call, a)
    assert.is_false(ok)
    assert.truthy(message:find(OPERATION, 1, true), message)
    assert.truthy(message:find("layout", 1, true), message)
    for _, output in ipairs(a.outputs) do output:assert_unchanged() end
  end)
end)
