-- Every check of swizzle_v_scales, nvfp4_quantize_paged_kv_cache, mla.dequantize_cache and rope_table.
local nibble = require "nibble"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local checks = require "spec.support.checks"
local tensor, set, option, give, give_option = checks.tensor, checks.set, checks.option, checks.give, checks.give_option

-- swizzle_v_scales

local function swizzle_arguments()
  local a = {
    v_sf = data.tensor {dtype = "uint8", shape = {3, 2, 8, 4}, bytes = data.bytes(1, 192)}, kv_layout = "HND",
    pool = data.pool {dtype = "uint8", shape = {3, 2, 8, 4}},
  }
  a.opts = {out = a.pool.tensor}
  a.outputs = {a.pool}
  return a
end

checks.describe({
  operation = "quantization.swizzle_v_scales", arguments = swizzle_arguments, tensors = {"v_sf"},
  call = function(a) return nibble.quantization.swizzle_v_scales(a.v_sf, a.kv_layout, a.opts) end,
  cases = {
    {"v_sf", "a wrong dtype", give("v_sf", "int8", {3, 2, 8, 4}), "float8_e4m3fn", "uint8", "int8"},
    {"v_sf", "three dimensions", give("v_sf", "uint8", {6, 8, 4}), "6, 8, 4"},
    {"v_sf", "a page size that is no multiple of 4", give("v_sf", "uint8", {3, 2, 6, 4}), "4", "6"},
    {"v_sf", "a number of blocks that is no multiple of 4", give("v_sf", "uint8", {3, 2, 8, 6}), "4", "6"},
    {"v_sf", "a page size that is none under NHD", function(a)
      a.kv_layout, a.opts = "NHD", {}
    end, "4", "2"},
    {"v_sf", "a last dimension with stride 2", give("v_sf", "uint8", {3, 2, 8, 8}, {3, 2, 8, 4}, {128, 64, 8, 2})},
    {"kv_layout", "an unknown name", set("kv_layout", "hnd"), "NHD", "HND", "hnd"},
    {"kv_layout", "a number", set("kv_layout", 1), "1"},
    {"inverse", "a number", option("inverse", 1), "boolean", "got 1"},
    {"out", "another dtype", give_option("out", "float8_e4m3fn", {3, 2, 8, 4}), "uint8", "float8_e4m3fn"},
    {"out", "another shape", give_option("out", "uint8", {3, 2, 4, 4}), "3, 2, 8, 4", "3, 2, 4, 4"},
    {"out", "no tensor", option("out", "x"), "string"},
    {"out", "elements that overlap", option("out", function() return tensor("uint8", {1, 2, 8, 4}):expand(3, 2, 8,
      4) end)},
    {"out", "a last dimension with stride 2", give_option("out", "uint8", {3, 2, 8, 8}, {3, 2, 8, 4}, {128, 64, 8, 2})},
    {"out", "v_sf itself", function(a) a.v_sf = a.pool.tensor end},
    {"out", "a view that overlaps v_sf", function(a)
      a.v_sf = a.pool.storage:as_strided({3, 2, 8, 4}, {64, 32, 4, 1}, 0)
    end},
  },
}, describe, it)

-- nvfp4_quantize_paged_kv_cache

local function quantize_arguments()
  return {
    k_cache = data.tensor(data.finite(1, {3, 2, 4, 64}, "float16")),
      v_cache = data.tensor(data.finite(2, {3, 2, 4, 64}, "float16")),
    kv_layout = "HND", outputs = {},
  }
end

--- Both caches of one shape.
local function both(shape)
  return function(a) a.k_cache, a.v_cache = tensor("float16", shape), tensor("float16", shape) end
end

local quantize_cases = {
  {"k_cache", "float32", give("k_cache", "float32", {3, 2, 4, 64}), "float16", "bfloat16", "float32"},
  {"k_cache", "three dimensions", give("k_cache", "float16", {6, 4, 64}), "6, 4, 64"},
  {"k_cache", "a head_dim that is no multiple of 64", both {3, 2, 4, 96}, "64", "96"},
  {"k_cache", "a page size that is no multiple of 4", both {3, 2, 3, 64}, "4", "3"},
  {"k_cache", "a page size that is none under NHD", set("kv_layout", "NHD"), "4", "2"},
  {"k_cache", "a last dimension with stride 2", give("k_cache", "float16", {3, 2, 4, 128}, {3, 2, 4, 64},
    {1024, 512, 128, 2})},
  {"v_cache", "another shape than k_cache", give("v_cache", "float16", {3, 2, 8, 64}), "3, 2, 4, 64", "3, 2, 8, 64"},
  {"v_cache", "a last dimension with stride 2", give("v_cache", "float16", {3, 2, 4, 128}, {3, 2, 4, 64},
    {1024, 512, 128, 2})},
  {"kv_layout", "an unknown name", set("kv_layout", "NH"), "NHD", "HND", "NH"},
}
for _, side in ipairs {"k_global_sf", "v_global_sf"} do
  for _, bad in ipairs {0, -1, math.huge, 0 / 0, 1e-60, 1e39} do
    quantize_cases[#quantize_cases + 1] = {side, ("the number %s"):format(bad), set(side, bad)}
  end
  quantize_cases[#quantize_cases + 1] = {side, "a string", set(side, "1"), "string"}
  quantize_cases[#quantize_cases + 1] = {side, "float16", set(side, function() return tensor("float16", {1}) end),
                                         "float32", "float16"}
  quantize_cases[#quantize_cases + 1] = {side, "two elements", set(side, function() return tensor("float32", {2}) end),
                                         "2"}
end

checks.describe({
  operation = "quantization.nvfp4_quantize_paged_kv_cache", arguments = quantize_arguments,
    tensors = {"k_cache", "v_cache"},
  call = function(a) nibble.quantization.nvfp4_quantize_paged_kv_cache(a.k_cache, a.v_cache, a.kv_layout,
    a.k_global_sf, a.v_global_sf) end,
  cases = quantize_cases,
}, describe, it)

-- mla.dequantize_cache

checks.describe({
  operation = "mla.dequantize_cache", tensors = {"cache", "slots"},
  arguments = function() return {cache = tensor("uint8", {2, 3, 384}), slots = data.indices {0, 5}, outputs = {}} end,
  call = function(a) return nibble.mla.dequantize_cache(a.cache, a.slots) end,
  cases = {
    {"cache", "another dtype", give("cache", "int8", {2, 3, 384}), "uint8", "int8"},
    {"cache", "two dimensions", give("cache", "uint8", {6, 384}), "6, 384"},
    {"cache", "another record size", give("cache", "uint8", {2, 3, 383}), "384", "383"},
    {"cache", "two heads", give("cache", "uint8", {2, 3, 2, 384}), "2, 3, 2, 384"},
    {"cache", "a page stride that is no multiple of 16", give("cache", "uint8", {2400}, {2, 3, 384}, {1160, 384, 1}),
     "16", "1160"},
    {"cache", "records that are apart", set("cache", function() return tensor("uint8", {2, 3, 400}):narrow(3, 1,
      384) end)},
    {"slots", "a float dtype", give("slots", "float32", {2}), "int32", "int64", "float32"},
    {"slots", "two dimensions", give("slots", "int32", {2, 1}), "2, 1"},
  },
}, describe, it)

-- rope_table

checks.describe({
  operation = "rope_table", tensors = {},
  arguments = function() return {max_position = 4, opts = {}, outputs = {}} end,
  call = function(a) return nibble.rope_table(a.max_position, a.opts) end,
  cases = {
    {"max_position", "a negative number", set("max_position", -1), "-1"},
    {"max_position", "a fraction", set("max_position", 2.5), "2.5"},
    {"max_position", "a string", set("max_position", "4"), "string"},
    {"max_position", "nil", set("max_position", nil)},
    {"dtype", "an integer dtype", option("dtype", "int32"), "int32"},
    {"dtype", "an unknown dtype", option("dtype", "float"), "float"},
    {"theta", "a string", option("theta", "x"), "string"},
    {"theta", "0", option("theta", 0), "0"},
    {"theta", "a number below 1", option("theta", 0.5), "0.5"},
    {"theta", "a negative number", option("theta", -1), "-1"},
    {"theta", "NaN", option("theta", 0 / 0), "nan"},
    {"theta", "infinity", option("theta", math.huge), "inf"},
  },
}, describe, it)

describe("the pieces around the operations", function()
  it("refuse options that they do not know #quick", function()
    for operation, run in pairs {
      ["quantization.swizzle_v_scales"] = function() nibble.quantization.swizzle_v_scales(tensor("uint8",
        {1, 1, 4, 4}), "HND", {invert = true}) end,
      rope_table = function() nibble.rope_table(4, {invert = true}) end,
    } do
      local ok, message = pcall(run)
      assert.is_false(ok)
      assert.truthy(message:find(operation, 1, true), message)
      assert.truthy(message:find("invert", 1, true), message)
    end
  end)

  it("refuse a table too large for memory before anything is allocated #quick", function()
    for _, n in ipairs {1 << 62, math.maxinteger, 1 << 57} do
      local ok, message = pcall(nibble.rope_table, n)
      assert.is_false(ok)
      assert.is_string(message)
    end
  end)

  it("refuse a number as global scale in a capture #quick", function()
    local k = tensor("float16", {1, 1, 4, 64})
    local stream = nibble.stream()
    nibble.synchronize()
    stream:capture(function()
      assert.raises_like(function() nibble.quantization.nvfp4_quantize_paged_kv_cache(k, k, "HND", 2.0) end,
                         "quantization.nvfp4_quantize_paged_kv_cache", "k_global_sf", "expected ", "got ")
    end)
  end)
end)
