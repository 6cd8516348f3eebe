-- The checks of mla.cake_dsv4_nvfp4_rope_quantize_insert and of its cache-only sibling, but for dtypes and ranks
-- (generated_spec.lua).
local nibble = require "nibble"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local checks = require "spec.support.checks"
local tensor, set, option, give = checks.tensor, checks.set, checks.option, checks.give

local OPERATION = "mla.cake_dsv4_nvfp4_rope_quantize_insert"
local SIBLING = "mla.cake_dsv4_nvfp4_kv_rope_quantize_insert"

local queries, rows = data.finite(1, {4, 8, 512}, "bfloat16"), data.finite(2, {4, 512}, "bfloat16")

local function arguments()
  local a = {
    q = data.tensor(queries), kv = data.tensor(rows),
    slot_mapping = data.indices {3, 0, 5, 1}, positions = data.indices({0, 1, 2, 3}, "int64"),
      cos_sin_cache = nibble.rope_table(8),
    opts = {q_head_padded = 8}, pool = data.pool {dtype = "uint8", shape = {2, 3, 384}},
  }
  a.cache = a.pool.tensor
  a.outputs = {a.pool}
  return a
end

local function call(a)
  return nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert(a.q, a.kv, a.cache, a.slot_mapping, a.positions,
    a.cos_sin_cache, a.opts)
end

local function sibling_arguments()
  local a = arguments()
  a.opts = {}
  return a
end

local function sibling_call(a)
  nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(a.kv, a.cache, a.slot_mapping, a.positions, a.cos_sin_cache,
    a.opts)
end

--- The parameters that both operations have.
local function shared_cases()
  return {
    {"kv", "another width than 512", give("kv", "bfloat16", {4, 576}), "512", "576"},
    {"kv", "not contiguous", set("kv", function() return tensor("bfloat16", {4, 1024}):narrow(2, 1, 512) end),
     "contiguous"},
    {"cache", "two dimensions", give("cache", "uint8", {6, 384}), "6, 384"},
    {"cache", "five dimensions", give("cache", "uint8", {2, 1, 3, 1, 384}), "2, 1, 3, 1, 384"},
    {"cache", "another record size than 384", give("cache", "uint8", {2, 3, 400}), "384", "400"},
    {"cache", "two heads", give("cache", "uint8", {2, 3, 2, 384}), "2, 3, 2, 384"},
    {"cache", "a page stride that is no multiple of 16", give("cache", "uint8", {2400}, {2, 3, 384}, {1160, 384, 1}),
     "16", "1160"},
    {"cache", "pages that overlap", give("cache", "uint8", {2400}, {2, 3, 384}, {768, 384, 1}), "768"},
    {"cache", "one page repeated", set("cache", function() return tensor("uint8", {1, 3, 384}):expand(2, 3, 384) end)},
    {"cache", "records that are apart", set("cache", function() return tensor("uint8", {2, 3, 400}):narrow(3, 1,
      384) end)},
    {"cache", "bytes that are apart", give("cache", "uint8", {2, 3, 768}, {2, 3, 384}, {2304, 768, 2})},
    {"slot_mapping", "more entries than rows", give("slot_mapping", "int32", {5}), "4", "5"},
    {"slot_mapping", "not contiguous", set("slot_mapping", function() return tensor("int32", {4, 2}):select(2, 1) end),
     "contiguous"},
    {"positions", "too few", give("positions", "int64", {3}), "4", "3"},
    {"positions", "too many", give("positions", "int64", {5}), "4", "5"},
    {"positions", "not contiguous", set("positions", function() return tensor("int64", {4, 2}):select(2, 1) end),
     "contiguous"},
    {"cos_sin_cache", "another width than 64", give("cos_sin_cache", "float32", {8, 32}), "64", "32"},
    {"cos_sin_cache", "not contiguous", set("cos_sin_cache",
                                            function() return tensor("float32", {8, 128}):narrow(2, 1, 64) end),
                                            "contiguous"},
  }
end

local cases = shared_cases()
for _, case in ipairs {
  {"q", "another width than 512", give("q", "bfloat16", {4, 8, 576}), "512", "576"},
  {"q", "not contiguous", set("q", function() return tensor("bfloat16", {4, 8, 1024}):narrow(3, 1, 512) end),
   "contiguous"},
  {"kv", "another number of rows than q", give("kv", "bfloat16", {3, 512}), "4", "3"},
  {"q_head_padded", "no supported number", option("q_head_padded", 12), "8", "128", "12"},
  {"q_head_padded", "256", option("q_head_padded", 256), "256"},
  {"q_head_padded", "a negative number", option("q_head_padded", -8), "-8"},
  {"q_head_padded", "a fraction", option("q_head_padded", 8.5), "8.5"},
  {"q_head_padded", "a string", option("q_head_padded", "8"), "string"},
  {"q_head_padded", "fewer than q's heads", give("q", "bfloat16", {4, 9, 512}), "9", "8"},
  {"q_head_padded", "padding in place", function(a) a.opts.q_inplace, a.opts.q_head_padded = true, 16 end, "8", "16"},
  {"apply_q_rope", "a number", option("apply_q_rope", 1), "boolean", "got 1"},
  {"q_inplace", "a string", option("q_inplace", "yes"), "boolean", "string"},
} do cases[#cases + 1] = case end

checks.describe({operation = OPERATION, arguments = arguments, call = call, cases = cases,
                 tensors = {"q", "kv", "cache", "slot_mapping", "positions", "cos_sin_cache"}}, describe, it)

local sibling_cases = shared_cases()
for _, case in ipairs {
  {"compress_ratio", "0", option("compress_ratio", 0), "1", "2", "0"},
  {"compress_ratio", "3", option("compress_ratio", 3), "1", "2", "3"},
  {"compress_ratio", "a fraction", option("compress_ratio", 1.5), "1.5"},
  {"compress_ratio", "a string", option("compress_ratio", "1"), "string"},
} do sibling_cases[#sibling_cases + 1] = case end

checks.describe({operation = SIBLING, arguments = sibling_arguments, call = sibling_call, cases = sibling_cases,
                 tensors = {"kv", "cache", "slot_mapping", "positions", "cos_sin_cache"}}, describe, it)

describe("rope insert", function()
  it("in place leaves q as it was when a check fails #quick", function()
    local a = arguments()
    local q = data.pool({dtype = "bfloat16", shape = {4, 8, 512}, seed = 3})
    a.q, a.opts = q.tensor, {q_inplace = true, q_head_padded = 12}
    assert.raises_like(function() call(a) end, OPERATION, "q_head_padded", "12")
    q:assert_unchanged()
    a.pool:assert_unchanged()
    a.opts = {q_inplace = true}
    a.q = q.tensor:expand(4, 8, 512)
    assert.is_true(call(a) == a.q)
    local repeated = nibble.zeros(4, 1, 512, {dtype = "bfloat16"}):expand(4, 8, 512)
    a.q = repeated
    assert.raises_like(function() call(a) end, OPERATION, "q", "contiguous")
  end)

  it("refuses options that it does not know #quick", function()
    for operation, run in pairs {[OPERATION] = call, [SIBLING] = sibling_call} do
      local a = arguments()
      a.opts = {q_padded = 8}
      local ok, message = pcall(run, a)
      assert.is_false(ok)
      assert.truthy(message:find(operation, 1, true), message)
      assert.truthy(message:find("q_padded", 1, true), message)
      a.pool:assert_unchanged()
    end
  end)

  it("takes every supported q_head_padded that holds q's heads #quick", function()
    for _, padded in ipairs {8, 16, 32, 64, 128} do
      local a = arguments()
      a.opts.q_head_padded = padded
      assert.same({4, padded, 512}, call(a).shape)
    end
  end)
end)
