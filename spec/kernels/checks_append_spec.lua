-- The checks of page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, but for dtypes and ranks
-- (generated_spec.lua).
local nibble = require "nibble"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local checks = require "spec.support.checks"
local tensor, set, give, half = checks.tensor, checks.set, checks.give, checks.half

local OPERATION = "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

local function arguments()
  local a = {
    append_key = data.tensor(data.finite(1, {4, 2, 32}, "float16")),
      append_value = data.tensor(data.finite(2, {4, 2, 32}, "float16")),
    slot_mapping = data.indices {0, 5, 2, 3}, k_scale = 1.0, v_scale = 2.0, kv_layout = "NHD",
    k = data.pool {dtype = "uint8", shape = {3, 4, 2, 16}}, v = data.pool {dtype = "uint8", shape = {3, 4, 2, 16}},
    k_sf = data.pool {dtype = "float8_e4m3fn", shape = {3, 4, 2, 2}},
      v_sf = data.pool {dtype = "float8_e4m3fn", shape = {3, 4, 2, 2}},
  }
  a.paged_kv_cache, a.kv_cache_sf = {a.k.tensor, a.v.tensor}, {a.k_sf.tensor, a.v_sf.tensor}
  a.outputs = {a.k, a.v, a.k_sf, a.v_sf}
  return a
end

local function call(a)
  append(a.append_key, a.append_value, a.slot_mapping, a.paged_kv_cache, a.kv_cache_sf, a.k_scale, a.v_scale,
         a.kv_layout)
end

local cases = {
  {"append_key", "a head_dim that is no multiple of 16", function(a)
    a.append_key, a.append_value = tensor("float16", {4, 2, 24}), tensor("float16", {4, 2, 24})
  end, "16", "24"},
  {"append_key", "a head_dim of 0", function(a)
    a.append_key, a.append_value = tensor("float16", {4, 2, 0}), tensor("float16", {4, 2, 0})
  end, "16"},
  {"append_key", "a last dimension with stride 2", give("append_key", "float16", {4, 2, 64}, {4, 2, 32}, {128, 64, 2}),
   "2"},
  {"append_value", "another shape than append_key: heads", give("append_value", "float16", {4, 1, 32}), "4, 1, 32"},
  {"append_value", "another shape than append_key: head_dim", give("append_value", "float16", {4, 2, 48}), "4, 2, 48"},
  {"append_value", "a last dimension with stride 2", give("append_value", "float16", {4, 2, 64}, {4, 2, 32},
    {128, 64, 2}), "2"},
  {"slot_mapping", "no dimension", set("slot_mapping", function() return data.indices({1}):select(1, 1) end)},
  {"slot_mapping", "more entries than rows of K", give("slot_mapping", "int32", {5}), "rows of append_key (4), got 5"},
  {"slot_mapping", "more entries than rows of V", give("append_value", "float16", {3, 2, 32}),
   "rows of append_value (3), got 4"},
  {"paged_kv_cache (K)", "a pair of stacked tensors", half("paged_kv_cache", 1, "uint8", {3, 2, 4, 2, 16}),
   "3, 2, 4, 2, 16"},
  {"paged_kv_cache (K)", "other heads than the rows", function(a)
    a.paged_kv_cache = {tensor("uint8", {3, 4, 3, 16}), tensor("uint8", {3, 4, 3, 16})}
  end, "2", "3"},
  {"paged_kv_cache (K)", "another head_dim than the rows", function(a)
    a.paged_kv_cache = {tensor("uint8", {3, 4, 2, 32}), tensor("uint8", {3, 4, 2, 32})}
  end, "16", "32"},
  {"paged_kv_cache (K)", "the other layout's shape", set("kv_layout", "HND"), "3, 4, 2, 16"},
  {"paged_kv_cache (V)", "K and V of different page counts", half("paged_kv_cache", 2, "uint8", {2, 4, 2, 16}),
   "2, 4, 2, 16"},
  {"paged_kv_cache (V)", "K and V of different page sizes", half("paged_kv_cache", 2, "uint8", {3, 8, 2, 16}),
   "3, 8, 2, 16"},
  {"paged_kv_cache (V)", "K and V of different head_dim", half("paged_kv_cache", 2, "uint8", {3, 4, 2, 8}),
   "3, 4, 2, 8"},
  {"paged_kv_cache (V)", "a last dimension with stride 2", half("paged_kv_cache", 2, "uint8", {3, 4, 2, 32},
    {3, 4, 2, 16}, {256, 64, 32, 2})},
  {"paged_kv_cache (K)", "elements that overlap", function(a) a.paged_kv_cache[1] = tensor("uint8",
    {1, 4, 2, 16}):expand(3, 4, 2, 16) end},
  {"paged_kv_cache (K)", "pages that overlap", half("paged_kv_cache", 1, "uint8", {512}, {3, 4, 2, 16},
    {64, 32, 16, 1})},
  {"paged_kv_cache (K)", "a page size of 0", function(a)
    a.paged_kv_cache = {tensor("uint8", {3, 0, 2, 16}), tensor("uint8", {3, 0, 2, 16})}
    a.kv_cache_sf = {tensor("uint8", {3, 0, 2, 2}), tensor("uint8", {3, 0, 2, 2})}
  end, "0"},
  {"paged_kv_cache", "a stacked tensor with another second dimension",
   give("paged_kv_cache", "uint8", {3, 3, 4, 2, 16}), "3, 3, 4, 2, 16"},
  {"paged_kv_cache", "a stacked tensor whose K and V overlap", function(a)
    a.paged_kv_cache = tensor("uint8", {512}):as_strided({3, 2, 4, 2, 16}, {128, 1, 32, 16, 1})
  end, "strides {128, 1, 32, 16, 1}"},
  {"paged_kv_cache", "one tensor of four dimensions", give("paged_kv_cache", "uint8", {3, 4, 2, 16}), "3, 4, 2, 16"},
  {"paged_kv_cache", "a list of one tensor", function(a) a.paged_kv_cache = {a.k.tensor} end},
  {"paged_kv_cache", "a list of three tensors", function(a) a.paged_kv_cache = {a.k.tensor, a.v.tensor,
    a.v.tensor} end},
  {"paged_kv_cache", "an empty list", function(a) a.paged_kv_cache = {} end},
  {"paged_kv_cache", "a list of numbers", function(a) a.paged_kv_cache = {1, 2} end, "pair", "got 1"},
  {"kv_cache_sf (K)", "another page count", half("kv_cache_sf", 1, "uint8", {2, 4, 2, 2}), "2, 4, 2, 2"},
  {"kv_cache_sf (K)", "another page size", half("kv_cache_sf", 1, "uint8", {3, 2, 2, 2}), "3, 2, 2, 2"},
  {"kv_cache_sf (V)", "other heads", half("kv_cache_sf", 2, "uint8", {3, 4, 1, 2}), "3, 4, 1, 2"},
  {"kv_cache_sf (V)", "another number of blocks", half("kv_cache_sf", 2, "uint8", {3, 4, 2, 4}), "3, 4, 2, 4"},
  {"kv_cache_sf (K)", "a last dimension with stride 2", half("kv_cache_sf", 1, "uint8", {3, 4, 2, 4}, {3, 4, 2, 2},
    {32, 8, 4, 2})},
  {"kv_cache_sf (V)", "elements that overlap", function(a) a.kv_cache_sf[2] = tensor("uint8", {3, 4, 1, 2}):expand(3,
    4, 2, 2) end},
  {"kv_cache_sf", "a list of one tensor", function(a) a.kv_cache_sf = {a.k_sf.tensor} end},
  {"kv_cache_sf", "a stacked tensor whose K and V overlap", function(a)
    a.kv_cache_sf = tensor("uint8", {64}):as_strided({3, 2, 4, 2, 2}, {16, 1, 4, 2, 1})
  end, "strides {16, 1, 4, 2, 1}"},
  {"kv_cache_sf", "a stacked tensor with another second dimension", give("kv_cache_sf", "uint8", {3, 1, 4, 2, 2}),
   "3, 1, 4, 2, 2"},
  {"kv_layout", "an unknown name", set("kv_layout", "NDH"), "NHD", "HND", "NDH"},
  {"kv_layout", "lower case", set("kv_layout", "nhd"), "nhd"},
  {"kv_layout", "a number", set("kv_layout", 5), "5"},
  {"kv_layout", "a keyword with an unknown name", set("kv_layout", function() return {kv_layout = "X"} end), "X"},
}
for _, side in ipairs {"k_scale", "v_scale"} do
  for _, bad in ipairs {0, 0.0, -1, -0.5, math.huge, -math.huge, 0 / 0, 1e-60, 1e39} do
    cases[#cases + 1] = {side, ("the number %s"):format(bad), set(side, bad)}
  end
  cases[#cases + 1] = {side, "a string", set(side, "1"), "string"}
  cases[#cases + 1] = {side, "nil", set(side, nil)}
  cases[#cases + 1] = {side, "a boolean", set(side, true), "got true"}
  cases[#cases + 1] = {side, "a tensor of another dtype", set(side,
    function() return nibble.full({1}, 1, {dtype = "float16"}) end), "float32", "float16"}
  cases[#cases + 1] = {side, "an integer tensor", set(side, function() return data.indices {1} end), "int32"}
  cases[#cases + 1] = {side, "a tensor of two elements", set(side, function() return nibble.full({2}, 1.0) end), "2"}
  cases[#cases + 1] = {side, "a tensor of no element", set(side, function() return nibble.zeros(0) end), "0"}
end

checks.describe({operation = OPERATION, arguments = arguments, call = call, cases = cases,
                 tensors = {"append_key", "append_value", "slot_mapping",
                 "paged_kv_cache", "kv_cache_sf"}}, describe, it)

describe(OPERATION, function()
  it("refuses an option that it does not know #quick", function()
    local a = arguments()
    a.kv_layout = {kv_layout = "NHD", scale = 1}
    local ok, message = pcall(call, a)
    assert.is_false(ok)
    assert.truthy(message:find(OPERATION, 1, true), message)
    assert.truthy(message:find("scale", 1, true), message)
    for _, output in ipairs(a.outputs) do output:assert_unchanged() end
  end)

  it("takes scales as tensors of any shape with one element #quick", function()
    for _, shape in ipairs {{1}, {1, 1}, {}} do
      local a = arguments()
      a.k_scale = nibble.full({1}, 1.0):as_strided(shape, table.move({1, 1}, 1, #shape, 1, {}))
      call(a)
      nibble.synchronize()
      assert.is_false(a.k.storage:bytes() == a.k.before)
    end
  end)

  it("refuses numbers as scales in a capture, and the capture goes on #quick", function()
    local a = arguments()
    local one = data.scale(1)
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function()
      for _, side in ipairs {"k_scale", "v_scale"} do
        a.k_scale, a.v_scale = one, one
        a[side] = 1.0
        assert.raises_like(function() call(a) end, OPERATION, side, "expected ", "tensor", "got ")
      end
      a.k_scale, a.v_scale = one, one
      call(a)
    end)
    nibble.synchronize()
    for _, output in ipairs(a.outputs) do output:assert_unchanged() end
    assert.equal(1, #graph:nodes())
    graph:replay()
    nibble.synchronize()
    for _, output in ipairs(a.outputs) do assert.is_false(output.storage:bytes() == output.before) end
  end)
end)
