-- The checks of quantization.nvfp4_kv_materialize_fp8, but for dtypes and ranks
-- (generated_spec.lua).
local nibble = require "nibble"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local checks = require "spec.support.checks"
local tensor, set, option, give, give_option = checks.tensor, checks.set, checks.option, checks.give, checks.give_option

local OPERATION = "quantization.nvfp4_kv_materialize_fp8"

local function arguments()
  local function pool(x, seed) return data.tensor {dtype = "uint8", shape = {5, 2, 4, x},
    bytes = data.bytes(seed, 40 * x)} end
  local a = {
    k_cache = pool(32, 1), v_cache = pool(32, 2), k_block_scales = pool(4, 3), v_block_scales = pool(4, 4),
    block_tables = data.indices({0, 1, 2, 3, 4, 0}, "int32", {2, 3}), seq_lens = data.indices {9, 5}, max_kv_len = 12,
    pool = data.pool {dtype = "float8_e4m3fn", shape = {7, 2, 2, 4, 64}},
  }
  a.opts = {out = a.pool.tensor}
  a.outputs = {a.pool}
  return a
end

local function call(a)
  return nibble.quantization.nvfp4_kv_materialize_fp8(a.k_cache, a.v_cache, a.k_block_scales, a.v_block_scales,
    a.block_tables, a.seq_lens,
                                                      a.max_kv_len, a.opts)
end

--- Caches and scales of other sizes, all alike.
local function all(pages, heads, page_size, head_dim)
  return function(a)
    a.k_cache, a.v_cache = tensor("uint8", {pages, heads, page_size, head_dim // 2}),
      tensor("uint8", {pages, heads, page_size, head_dim // 2})
    a.k_block_scales = tensor("uint8", {pages, heads, page_size, head_dim // 16})
    a.v_block_scales = tensor("uint8", {pages, heads, page_size, head_dim // 16})
  end
end

local cases = {
  {"k_cache", "a page size that is no multiple of 4", all(5, 2, 6, 64), "4", "6"},
  {"k_cache", "a page size of 1", all(5, 2, 1, 64), "4", "1"},
  {"k_cache", "a head_dim that is no multiple of 64", all(5, 2, 4, 96), "64", "96"},
  {"k_cache", "a head_dim of 16", all(5, 2, 4, 16), "64", "16"},
  {"block_tables", "three dimensions with shared indices", give("block_tables", "int32", {2, 2, 3}), "2, 2, 3"},
  {"block_tables", "two dimensions with split indices", option("uses_shared_paged_kv_idx", false), "2, 3"},
  {"block_tables", "a second dimension other than 2 with split indices", function(a)
    a.opts.uses_shared_paged_kv_idx, a.block_tables = false, tensor("int32", {2, 3, 3})
  end, "2, 3, 3"},
  {"block_tables", "too few columns for max_kv_len", give("block_tables", "int32", {2, 2}), "3", "2"},
  {"block_tables", "too few columns for a last page that is not full", function(a)
    a.block_tables, a.max_kv_len = tensor("int32", {2, 2}), 9
  end, "3", "2"},
  {"block_tables", "too few columns for max_kv_len, split", function(a)
    a.opts.uses_shared_paged_kv_idx, a.block_tables = false, tensor("int32", {2, 2, 2})
  end, "3", "2"},
  {"max_kv_len", "a negative number", set("max_kv_len", -1), "-1"},
  {"max_kv_len", "a fraction", set("max_kv_len", 3.5), "3.5"},
  {"max_kv_len", "a string", set("max_kv_len", "12"), "string"},
  {"max_kv_len", "NaN", set("max_kv_len", 0 / 0), "nan"},
  {"max_kv_len", "1e300", set("max_kv_len", 1e300), "1e+300"},
  {"max_kv_len", "nil", set("max_kv_len", nil)},
  {"uses_shared_paged_kv_idx", "a number", option("uses_shared_paged_kv_idx", 1), "boolean", "got 1"},
  {"out", "too few pages", give_option("out", "float8_e4m3fn", {6, 2, 2, 4, 64}), "7, 2, 2, 4, 64", "6, 2, 2, 4, 64"},
  {"out", "too many pages", give_option("out", "float8_e4m3fn", {8, 2, 2, 4, 64}), "8, 2, 2, 4, 64"},
  {"out", "another head_dim", give_option("out", "float8_e4m3fn", {7, 2, 2, 4, 32}), "7, 2, 2, 4, 32"},
  {"out", "not contiguous", option("out", function() return tensor("float8_e4m3fn", {7, 2, 2, 4, 128}):narrow(5, 1,
    64) end), "contiguous"},
  {"out", "no tensor", option("out", 5), "tensor", "got 5"},
  {"kv_page_indptr", "int64", function(a) a.opts.kv_page_indptr, a.opts.num_pages = tensor("int64", {3}), 6 end,
   "int32", "int64"},
  {"kv_page_indptr", "another length than batch + 1", function(a) a.opts.kv_page_indptr,
   a.opts.num_pages = tensor("int32", {2}), 6 end, "3", "2"},
  {"kv_page_indptr", "two dimensions", function(a) a.opts.kv_page_indptr, a.opts.num_pages = tensor("int32", {3, 1}),
   6 end, "3, 1"},
  {"kv_page_indptr", "no tensor", function(a) a.opts.kv_page_indptr, a.opts.num_pages = {0, 3, 6}, 6 end, "table"},
  {"num_pages", "missing where kv_page_indptr is given", function(a) a.opts.kv_page_indptr = data.indices {0, 3,
    6} end},
  {"num_pages", "a negative number", function(a) a.opts.kv_page_indptr, a.opts.num_pages = data.indices {0, 3, 6},
   -1 end, "-1"},
  {"num_pages", "a fraction", function(a) a.opts.kv_page_indptr, a.opts.num_pages = data.indices {0, 3, 6}, 6.5 end,
   "6.5"},
  {"num_pages", "a string", function(a) a.opts.kv_page_indptr, a.opts.num_pages = data.indices {0, 3, 6}, "6" end,
   "string"},
}
for _, name in ipairs {"k_cache", "v_cache", "k_block_scales", "v_block_scales"} do
  local scales = name:find("scales", 1, true)
  local x = scales and 4 or 32
  local function add(what, make, ...) cases[#cases + 1] = {name, what, set(name, make), ...} end
  add("a wrong dtype", function() return tensor("int8", {5, 2, 4, x}) end, "uint8", "int8")
  add("float16", function() return tensor("float16", {5, 2, 4, x}) end, "float16")
  add("three dimensions", function() return tensor("uint8", {10, 4, x}) end, "10, 4, " .. x)
  add("a last dimension with stride 2", function() return tensor("uint8", {5, 2, 4, 2 * x}):as_strided({5, 2, 4, x},
    {16 * x, 8 * x, 2 * x, 2}) end)
  if name ~= "k_cache" then
    add("another page count", function() return tensor("uint8", {4, 2, 4, x}) end, "4, 2, 4, " .. x)
    add("another head count", function() return tensor("uint8", {5, 1, 4, x}) end, "5, 1, 4, " .. x)
    add("another page size", function() return tensor("uint8", {5, 2, 8, x}) end, "5, 2, 8, " .. x)
    add("another last dimension", function() return tensor("uint8", {5, 2, 4, 2 * x}) end, "5, 2, 4, " .. 2 * x)
  end
end
cases[#cases + 1] = {"seq_lens", "another batch than block_tables", give("seq_lens", "int32", {3}), "3"}

checks.describe({operation = OPERATION, arguments = arguments, call = call, cases = cases,
                 tensors = {"k_cache", "v_cache", "k_block_scales", "v_block_scales", "block_tables", "seq_lens"}},
                   describe, it)

describe(OPERATION, function()
  it("refuses an option that it does not know #quick", function()
    local a = arguments()
    a.opts.kv_layout = "HND"
    local ok, message = pcall(call, a)
    assert.is_false(ok)
    assert.truthy(message:find(OPERATION, 1, true), message)
    assert.truthy(message:find("kv_layout", 1, true), message)
    a.pool:assert_unchanged()
  end)

  it("takes max_kv_len 12.0 for 12, and refuses one whose result could not exist before anything is allocated #quick",
     function()
    local a = arguments()
    a.max_kv_len = 12.0
    call(a)
    a = arguments()
    a.opts.out, a.block_tables, a.seq_lens = nil, tensor("int32", {0, 0}), tensor("int32", {0})
    a.opts.kv_page_indptr, a.opts.num_pages, a.max_kv_len = data.indices {0}, 1 << 62, 0
    local before = nibble.memory().reserved
    local ok, message = pcall(call, a)
    assert.is_false(ok)
    assert.truthy(message:find(OPERATION, 1, true), message)
    assert.is_true(nibble.memory().reserved <= before + 4096)
  end)
end)
