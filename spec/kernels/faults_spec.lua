-- Content faults: what an operation refuses in its data is skipped, raised once by the next wait, and work goes on.
local nibble = require "nibble"
local reference = require "nibble.reference"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

local APPEND = "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
local MATERIALIZE = "quantization.nvfp4_kv_materialize_fp8"
local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

--- Pools and inputs of a small append.
local function small_append()
  local function pool(x, dtype, seed) return data.pool {dtype = dtype, shape = {3, 2, 2, x}, seed = seed} end
  local a = {
    key = data.tensor(data.finite(1, {4, 2, 32}, "float16")),
    value = data.tensor(data.finite(2, {4, 2, 32}, "float16")),
    slots = data.indices {0, 5, 2, 3}, k = pool(16, "uint8", 1), v = pool(16, "uint8", 2), k_sf = pool(2, "uint8", 3),
    v_sf = pool(2, "uint8", 4),
  }
  function a.run(k_scale, v_scale)
    append(a.key, a.value, a.slots, {a.k.tensor, a.v.tensor}, {a.k_sf.tensor, a.v_sf.tensor}, k_scale, v_scale)
  end
  function a.assert_unchanged(context)
    for _, p in ipairs {a.k, a.v, a.k_sf, a.v_sf} do p:assert_unchanged(context) end
  end
  function a.expected(k_scale, v_scale)
    return reference.append {append_key = a.key, append_value = a.value, slot_mapping = a.slots, k_scale = k_scale,
                             v_scale = v_scale,
      paged_kv_cache = {a.k:array(), a.v:array()}, kv_cache_sf = {a.k_sf:array(), a.v_sf:array()}}
  end
  function a.assert_appended(expected, context)
    a.k:assert_equal(expected.paged_kv_cache[1], context)
    a.v:assert_equal(expected.paged_kv_cache[2], context)
    a.k_sf:assert_equal(expected.kv_cache_sf[1], context)
    a.v_sf:assert_equal(expected.kv_cache_sf[2], context)
  end
  return a
end

describe("a device scale that is not positive and finite", function()
  for _, bad in ipairs {0.0, -0.0, -1.0, math.huge, -math.huge, 0 / 0} do
    it(("of %g writes nothing and raises one fault #quick"):format(bad), function()
      local a = small_append()
      a.run(data.scale(bad), data.scale(2))
      assert.faults_like(nibble.synchronize, APPEND, "k_scale", bad, 0)
      nibble.synchronize()
      a.assert_unchanged("k_scale")
      a.run(data.scale(2), data.scale(bad))
      assert.faults_like(nibble.synchronize, APPEND, "v_scale", bad, 0)
      nibble.synchronize()
      a.assert_unchanged("v_scale")
      a.run(data.scale(bad), data.scale(bad))
      local ok, message = pcall(nibble.synchronize)
      assert.is_false(ok)
      assert.truthy(message:find("[kv]_scale: expected a positive finite value"))
      nibble.synchronize()
      a.assert_unchanged("both")
    end)
  end

  it("raises in the replay in which it is bad, and only there #quick", function()
    local a = small_append()
    local g = data.scale(0)
    local stream = nibble.stream()
    nibble.synchronize()
    local graph = stream:capture(function() a.run(g, g) end)
    nibble.check_faults() -- recording is not running
    stream:scope(function() graph:replay() end)
    local ok, message = pcall(stream.synchronize, stream)
    assert.is_false(ok)
    assert.truthy(message:find("_scale: expected a positive finite value", 1, true))
    stream:synchronize()
    a.assert_unchanged("bad replay")
    local expected = a.expected(0.5, 0.5)
    stream:scope(function()
      g:copy(data.scale(0.5))
      graph:replay()
    end)
    stream:synchronize()
    a.assert_appended(expected, "good replay")
  end)
end)

describe("a content fault", function()
  --- Leaves one fault on the device; returns what it names.
  local function cause()
    local cache = nibble.zeros(2, 2, 384, {dtype = "uint8"})
    return nibble.mla.dequantize_cache(cache, data.indices {1, 77, 2}), "mla.dequantize_cache", "slots", 77, 1
  end

  for _, way in ipairs {
    {"nibble.synchronize", function() nibble.synchronize() end},
    {"nibble.check_faults", function() nibble.check_faults() end},
    {"nibble.synchronize of the named device", function() nibble.synchronize(nibble.device()) end},
    {"nibble.check_faults of the named device", function() nibble.check_faults(nibble.device()) end},
    {"stream:synchronize", function() nibble.current_stream():synchronize() end},
    {"event:synchronize", function() nibble.current_stream():record():synchronize() end},
    {"reading bytes", function(rows) rows:bytes() end},
    {"reading a table", function(rows) rows:totable() end},
    {"reading an element", function(rows) return rows[1][1] end},
    {"item", function(rows) rows:select(1, 1):select(1, 1):item() end},
    {"another tensor's item, after it", function() nibble.full({1}, 3):item() end},
  } do
    local name, wait = way[1], way[2]
    it("is raised once by " .. name .. " #quick", function()
      local rows, operation, parameter, value, index = cause()
      assert.faults_like(function() wait(rows) end, operation, parameter, value, index)
      wait(rows)
      nibble.check_faults()
      nibble.synchronize()
    end)
  end

  it("names operation, parameter, expectation, value, index and device #quick", function()
    cause()
    local ok, message = pcall(nibble.check_faults)
    assert.is_false(ok)
    local text = "mla.dequantize_cache: slots: expected a slot of the cache, got 77 at index 1 (content fault on %s)"
    assert.truthy(message:find(text:format(nibble.device()), 1, true), message)
  end)

  it("is not raised by launching more work, and that work is done #quick", function()
    cause()
    local a = small_append()
    a.run(1, 1)
    assert.has_error(nibble.synchronize)
    local fresh = small_append()
    local expected = fresh.expected(1, 1)
    a.assert_appended(expected, "launched after the fault")
  end)

  it("among several is one of them, and then none #quick", function()
    local cache = nibble.zeros(2, 2, 384, {dtype = "uint8"})
    for _ = 1, 10 do nibble.mla.dequantize_cache(cache, data.indices {-5, 2, -6, 0, -7}) end
    assert.faults_like(nibble.check_faults, "mla.dequantize_cache", "slots", {-5, -6, -7}, {0, 2, 4})
    nibble.check_faults()
  end)

  it("raised and caught 1,000 times leaves the device as usable as before", function()
    for _ = 1, 1000 do
      local rows, operation, parameter, value, index = cause()
      assert.faults_like(function() rows:bytes() end, operation, parameter, value, index)
    end
    local a = small_append()
    local expected = a.expected(1, 1)
    a.run(1, 1)
    a.assert_appended(expected)
  end)

  it("of materialize does not disturb the other requests #quick", function()
    local function pool(x, seed) return data.tensor {dtype = "uint8", shape = {4, 1, 4, x},
      bytes = data.bytes(seed, 16 * x)} end
    local k, v, k_sf, v_sf = pool(32, 1), pool(32, 2), pool(4, 3), pool(4, 4)
    local tables, lengths = data.indices({0, 1, 2, -1, 3, 0}, "int32", {3, 2}), data.indices {5, 7, 99}
    local out = nibble.zeros(7, 2, 1, 4, 64, {dtype = "float8_e4m3fn"})
    local expected = reference.materialize {k_cache = k, v_cache = v, k_block_scales = k_sf, v_block_scales = v_sf,
                                            block_tables = tables,
      seq_lens = lengths, max_kv_len = 8, out = out}
    local _, fp8_tables = nibble.quantization.nvfp4_kv_materialize_fp8(k, v, k_sf, v_sf, tables, lengths, 8,
      {out = out})
    local ok, message = pcall(nibble.check_faults)
    assert.is_false(ok)
    assert.truthy(message:find(MATERIALIZE, 1, true))
    nibble.check_faults()
    assert.tensor_equal(expected.kv_cache_fp8, out)
    assert.tensor_equal(expected.fp8_block_tables, fp8_tables)
  end)
end)
