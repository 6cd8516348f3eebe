-- The same bytes on the GPU as on the CPU.
--
-- NIBBLE_COMPARE: values an operation sees in the large comparison (default 10^6; 10^8 takes a GPU machine about a
-- minute).
local nibble = require "nibble"

local GPU = nibble.device() or "cpu"
local VALUES = math.tointeger(tonumber(os.getenv("NIBBLE_COMPARE") or 1e6) // 1)

-- Runs `fn(on)` on both devices; `on(t)` moves an input there. Every result must have the same bytes.
local function same(fn)
  if not GPU:find("^cuda") then pending("no CUDA device here") end
  local results = {}
  for i, device in ipairs { "cpu", GPU } do
    results[i] = { fn(function(t) return t:to(device) end, device) }
    nibble.synchronize(device)
  end
  assert.is_true(#results[1] > 0)
  for i, expected in ipairs(results[1]) do
    local actual = results[2][i]:to("cpu")
    if not expected:equal(actual) then
      local a, b = expected:contiguous():view(-1), actual:view(-1)
      a, b = a:reinterpret("uint8"), b:reinterpret("uint8")
      local err, where = a:max_error(b)
      error(("result %d differs: largest difference of a byte %g at byte %d"):format(i, err, where[1]))
    end
  end
end

-- Bits of every kind: random ones (NaN, infinities, subnormals), normal values, and values at the ties of E2M1.
local function halves(dtype, n, seed)
  local t = nibble.randint(0, 65536, { n }, { dtype = "uint16", device = "cpu", seed = seed }):reinterpret(dtype)
  local third = n // 3 // 16 * 16
  t:narrow(1, 1, third):copy(nibble.randn(third, { dtype = dtype, device = "cpu", seed = seed + 1 }))
  local ties = nibble.tensor({ 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5,
    0.03662109375 },
    { dtype = dtype, device = "cpu" })
  t:narrow(1, third + 1, third):view(-1, 16):copy(ties)
  return t
end

local function bytes(seed, ...)
  return nibble.randint(0, 256, { ... }, { dtype = "uint8", device = "cpu", seed = seed })
end

local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local quantization, mla = nibble.quantization, nibble.mla

describe("on the GPU the bytes are the CPU's", function()
  for _, dtype in ipairs { "bfloat16", "float16" } do
    it("append " .. dtype, function()
      local heads, dim = 4, 128
      local rows = math.max(VALUES // (heads * dim) // 16 * 16, 64)
      local k = halves(dtype, rows * heads * dim, 1):view(rows, heads, dim)
      local v = halves(dtype, rows * heads * dim, 5):view(rows, heads, dim)
      local slots = nibble.randperm(rows + 64, { device = "cpu", seed = 3 }):narrow(1, 1, rows)
      for _, layout in ipairs { "NHD", "HND" } do
        same(function(on, device)
          local function cache(width)
            local shape = layout == "NHD" and { rows // 16, 16, heads, width } or { rows // 16, heads, 16, width }
            return nibble.full(shape, 0xA5, { dtype = "uint8", device = device })
          end
          local kc, vc, ks, vs = cache(dim // 2), cache(dim // 2), cache(dim // 16), cache(dim // 16)
          append(on(k), on(v), on(slots), { kc, vc }, { ks, vs }, 1.0, 0.37, layout)
          return kc, vc, ks, vs
        end)
      end
    end)

    it("dequantize to " .. dtype, function()
      local heads, dim = 4, 128
      local tokens = math.max(VALUES // (heads * dim) // 64 * 64, 64)
      local k, v, ks, vs = bytes(1, tokens // 16, 16, heads, dim // 2), bytes(2, tokens // 16, 16, heads, dim // 2),
        bytes(3, tokens // 16, 16, heads, dim // 16), bytes(4, tokens // 16, 16, heads, dim // 16)
      local columns = tokens // 64
      local tables = nibble.randint(-1, tokens // 16 + 1, { 4, columns }, { dtype = "int32", device = "cpu", seed = 5 })
      local lengths = nibble.tensor({ tokens // 4, 0, 17, tokens // 4 + 100 }, { dtype = "int32", device = "cpu" })
      same(function(on, device)
        local opts = { dtype = dtype, device = device }
        local out_k = nibble.full({ 4, tokens // 4, heads, dim }, 123, opts)
        local out_v = nibble.full({ 4, tokens // 4, heads, dim }, 123, opts)
        local scales = nibble.tensor({ 0.0123, 1e4 }, { dtype = "float32", device = device })
        quantization.nvfp4_kv_dequantize_paged({ on(k), on(v) }, { on(ks), on(vs) }, on(tables), on(lengths),
          scales:narrow(1, 1, 1), scales:narrow(1, 2, 1), out_k, out_v)
        return out_k, out_v
      end)
    end)
  end

  it("materialize, and V's scales swizzled", function()
    local heads, dim = 4, 128
    local tokens = math.max(VALUES // (heads * dim) // 64 * 64, 64)
    local k, v, ks, vs = bytes(1, tokens // 16, heads, 16, dim // 2), bytes(2, tokens // 16, heads, 16, dim // 2),
      bytes(3, tokens // 16, heads, 16, dim // 16), bytes(4, tokens // 16, heads, 16, dim // 16)
    local columns = tokens // 64
    local order = nibble.randperm(tokens // 16, { dtype = "int32", device = "cpu", seed = 5 })
    local tables = order:narrow(1, 1, 4 * columns):view(4, columns)
    local lengths = nibble.tensor({ tokens // 4, 0, 17, tokens // 4 - 3 }, { dtype = "int32", device = "cpu" })
    same(function(on, device)
      local swizzled = quantization.swizzle_v_scales(on(vs), "HND")
      local out = nibble.full({ 4 * columns + 1, 2, heads, 16, dim }, 3, { dtype = "float8_e4m3fn", device = device })
      local _, out_tables = quantization.nvfp4_kv_materialize_fp8(on(k), on(v), on(ks), swizzled, on(tables),
        on(lengths),
        tokens // 4, { out = out })
      return swizzled, out, out_tables, quantization.swizzle_v_scales(swizzled, "HND", { inverse = true })
    end)
  end)

  it("rope insert, its sibling and the records' rows", function()
    local heads = 3
    local rows = math.max(VALUES // 512, 64)
    local q = halves("bfloat16", rows * heads * 512, 1):view(rows, heads, 512)
    local kv = halves("bfloat16", rows * 512, 2):view(rows, 512)
    local pages = rows // 64 + 1
    local slots = nibble.randperm(pages * 64, { device = "cpu", seed = 3 }):narrow(1, 1, rows)
    local positions = nibble.randint(0, 5000, { rows }, { device = "cpu", seed = 4 })
    same(function(on, device)
      local angles = nibble.rope_table(5000, { device = device })
      local cache, other = nibble.full({ pages, 64, 384 }, 0xA5, { dtype = "uint8", device = device }),
        nibble.full({ pages, 64, 384 }, 0xA5, { dtype = "uint8", device = device })
      local out = mla.cake_dsv4_nvfp4_rope_quantize_insert(on(q), on(kv), cache, on(slots), on(positions), angles,
        { q_head_padded = 8 })
      local inplace = on(q):clone()
      mla.cake_dsv4_nvfp4_rope_quantize_insert(inplace, on(kv), cache, on(slots), on(positions), angles,
        { q_inplace = true })
      mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(on(kv), other, on(slots), on(positions), angles,
        { compress_ratio = 2 })
      return out, inplace, cache, other, mla.dequantize_cache(cache, on(slots)), angles
    end)
  end)

  it("whole caches quantized", function()
    local pages = math.max(VALUES // (4 * 16 * 128), 2)
    local k = nibble.randn(pages, 4, 16, 128, { dtype = "bfloat16", device = "cpu", seed = 1 })
    local v = nibble.randn(pages, 4, 16, 128, { dtype = "bfloat16", device = "cpu", seed = 2 })
    same(function(on)
      local cache, sf, k_scale, v_scale = quantization.nvfp4_quantize_paged_kv_cache(on(k), on(v), "HND")
      return cache[1], cache[2], sf[1], sf[2], k_scale, v_scale
    end)
  end)

  it("random values, sequences, and copies between all dtypes", function()
    local n = math.min(VALUES, 10000000)
    local dtypes = { "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64" }
    local bits = bytes(9, n // 8 * 8)
    same(function(on, device)
      local results = {}
      for i = 1, 4 do results[i] = nibble.randn(n, { dtype = dtypes[i], device = device, seed = i }) end
      results[#results + 1] = nibble.randint(math.mininteger, math.maxinteger, { n }, { device = device, seed = 5 })
      results[#results + 1] = nibble.randperm(n, { device = device, seed = 6 })
      results[#results + 1] = nibble.arange(-1, 1, 2 / n, { device = device })
      for _, from in ipairs(dtypes) do
        local source = on(bits):reinterpret(from)
        for _, to in ipairs(dtypes) do results[#results + 1] = source:to(to) end
      end
      return table.unpack(results)
    end)
  end)
end)
