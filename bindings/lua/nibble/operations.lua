--- Descriptions of the operations, for code that handles all of them: checked mode, traces, specs.
--
--   local operations = require "nibble.operations"
--   local op = operations.named["quantization.swizzle_v_scales"]    -- or operations.of_kernel.swizzle, or operations[4]
--   op:call { v_sf = t, kv_layout = "NHD" }                         -- by the names of its parameters
--
-- A description has `name` (its path in Lua and in errors), `kernel` (its name in graph:nodes() and observations),
-- `flashinfer` (true if name and parameters are FlashInfer's), `parameters` and `results` in order, `reference` (its
-- function in nibble.reference), `layout` (if it accepts only one), and `multiples` of sizes. A parameter has a name, a
-- role, and:
--
--   dtype    the dtypes that it accepts; "=other" means that of the parameter `other`
--   shape    symbols of its sizes: "dim/16" is a sixteenth of dim, "batch+1" is one more. Equal symbols are equal sizes
--   paged    the shape is for the layout NHD; under HND the second and third dimension are exchanged
--   strides  "free", "last" (the last dimension is contiguous), "contiguous", or "records" (only the page stride is free)
--   pair     two tensors, K and V, or one that holds both; "?" in its shape is k or v. Its parts are "x (K)" and
--            "x (V)". They have descriptions of their own in `tensors`, which lists every tensor of the call; `indices`,
--            `scales_read` and `scales_written` list some of them
--   side     K or V, for a part of a pair
--   scales   the tensor whose block scales it holds; `interleaved`: in the order that materialize
--            reads; "V" if only V's of a pair are
--   optional, option   it may be nil; it is in the table of options
--   number   a Lua number is accepted, too
--   in_place   the option that makes the operation write this input
--
-- Roles: in; out, of which parts may be left unchanged; index, whose contents select what is read and written; scale,
-- one float32; scalar, which is no tensor; layout.
--
-- For observed work: `observed(seen)` derives a scalar from the accesses, by parameter. `attribute` is the name of a
-- number among the attributes, of the piece of work that has the tensor `beside`. `absent(seen)` is the shape of a
-- tensor that can stand in for one that the work did not use.

local HALVES, INDICES, SCALES = { "float16", "bfloat16" }, { "int32", "int64" }, { "float8_e4m3fn", "uint8" }
local CODES, INT32, INT64, FLOAT, E4M3 = { "uint8" }, { "int32" }, { "int64" }, { "float32" }, { "float8_e4m3fn" }
local BFLOAT16 = { "bfloat16" }

local KV_LAYOUT = { "kv_layout", "layout" }
local FOUR_OVER_SIX = { "nvfp4_4over6", "scalar", attribute = "nvfp4_4over6" }

local function cache(last) return { "pages", "tokens", "heads", last } end

local function with(p, more)
  for key, value in pairs(more or {}) do p[key] = value end
  return p
end

local function scale(name) return { name, "scale", dtype = FLOAT, shape = { "1" }, strides = "free" } end

local function number_scale(name, more) return with(with(scale(name), { number = true, attribute = name }), more) end

local function indices(name, shape, dtype, strides)
  return { name, "index", dtype = dtype or INDICES, shape = shape, strides = strides or "free" }
end

local function paged(name, role, dtype, shape, more)
  return with({ name, role, dtype = dtype, shape = shape, strides = "last", paged = true }, more)
end

local function contiguous(name, role, dtype, shape, more)
  return with({ name, role, dtype = dtype, shape = shape, strides = "contiguous" }, more)
end

-- The parameters of both insertions after q.
local INSERTION = {
  contiguous("kv", "in", BFLOAT16, { "rows", "512" }),
  { "cache", "out", dtype = CODES, shape = { "pages", "tokens", "384" }, strides = "records" },
  indices("slot_mapping", { "slot_count" }, INDICES, "contiguous"),
  indices("positions", { "rows" }, INT64, "contiguous"),
  contiguous("cos_sin_cache", "in", FLOAT, { "angles", "64" }),
}

local function insertion(first, ...)
  local list = table.move(INSERTION, 1, #INSERTION, first and 2 or 1, { first })
  return table.move({ ... }, 1, select("#", ...), #list + 1, list)
end

local operations = {
  {
    name = "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", kernel = "append", flashinfer = true,
    reference = "append", multiples = { dim = 16 },
    parameters = {
      { "append_key", "in", dtype = HALVES, shape = { "rows", "heads", "dim" }, strides = "last" },
      { "append_value", "in", dtype = "=append_key", shape = { "value_rows", "heads", "dim" },
        strides = "last" },
      indices("slot_mapping", { "slot_count" }),
      paged("paged_kv_cache", "out", CODES, cache "dim/2", { pair = true }),
      paged("kv_cache_sf", "out", SCALES, cache "dim/16",
        { pair = true, scales = "paged_kv_cache" }),
      number_scale("k_scale"), number_scale("v_scale"), KV_LAYOUT, FOUR_OVER_SIX,
    },
  },
  {
    name = "quantization.nvfp4_kv_dequantize_paged", kernel = "dequantize", flashinfer = true, reference = "dequantize",
    multiples = { k = 16, v = 16 },
    parameters = {
      paged("paged_kv_cache", "in", CODES, cache "?/2", { pair = true }),
      paged("kv_cache_sf", "in", SCALES, cache "?/16", { pair = true, scales = "paged_kv_cache" }),
      indices("block_tables", { "batch", "columns" }), indices("seq_lens", { "batch" }, INT32),
      scale("k_scale"), scale("v_scale"),
      contiguous("output_k", "out", HALVES, { "batch", "length", "heads", "k" }),
      contiguous("output_v", "out", "=output_k", { "batch", "length", "heads", "v" }), KV_LAYOUT,
    },
  },
  {
    name = "quantization.nvfp4_kv_materialize_fp8", kernel = "materialize", flashinfer = true,
    reference = "materialize", layout = "HND", multiples = { dim = 64, tokens = 4 },
    parameters = {
      paged("k_cache", "in", CODES, cache "dim/2"),
      paged("v_cache", "in", CODES, cache "dim/2"),
      paged("k_block_scales", "in", SCALES, cache "dim/16", { scales = "k_cache" }),
      paged("v_block_scales", "in", SCALES, cache "dim/16",
        { scales = "v_cache", interleaved = true }),
      indices("block_tables", { "batch", "columns" }, INT32), indices("seq_lens", { "batch" }, INT32),
      { "max_kv_len", "scalar", attribute = "max_kv_len" },
      { "uses_shared_paged_kv_idx", "scalar", option = true,
        observed = function(seen) return #seen.block_tables.shape == 2 end },
      contiguous("out", "out", E4M3, { "num_pages+1", "2", "heads", "tokens", "dim" },
        { optional = true, option = true }),
      { "kv_page_indptr", "index", dtype = INT32, shape = { "batch+1" }, strides = "free", optional = true,
        option = true },
      { "num_pages", "scalar", option = true, observed = function(seen)
        return seen.kv_page_indptr and (seen.out or seen.kv_cache_fp8).shape[1] - 1 or nil
      end },
    },
    results = { { "kv_cache_fp8" }, { "fp8_block_tables" } },
  },
  {
    name = "quantization.swizzle_v_scales", kernel = "swizzle", reference = "swizzle",
    multiples = { tokens = 4, blocks = 4 },
    parameters = {
      paged("v_sf", "in", SCALES, cache "blocks"), KV_LAYOUT,
      { "inverse", "scalar", option = true, attribute = "inverse" },
      paged("out", "out", "=v_sf", cache "blocks", { optional = true, option = true }),
    },
    results = { { "out" } },
  },
  {
    name = "quantization.nvfp4_quantize_paged_kv_cache", kernel = "quantize_cache", flashinfer = true,
    reference = "quantize_cache", multiples = { dim = 64, tokens = 4 },
    parameters = {
      paged("k_cache", "in", HALVES, cache "dim"),
      paged("v_cache", "in", HALVES, cache "dim"),
      { "kv_layout", "layout", option = true },
      number_scale("k_global_sf", { option = true, optional = true, attribute = "global_sf", beside = "k_cache" }),
      number_scale("v_global_sf", { option = true, optional = true, attribute = "global_sf", beside = "v_cache" }),
      { "nvfp4_4over6", "scalar", option = true, attribute = "nvfp4_4over6" },
    },
    results = {
      { "kv_cache", pair = true }, { "kv_sf", pair = true, scales = "kv_cache", interleaved = "V" }, { "k_scale" },
      { "v_scale" },
    },
  },
  {
    name = "mla.cake_dsv4_nvfp4_rope_quantize_insert", kernel = "rope_insert", flashinfer = true,
    reference = "rope_insert",
    parameters = insertion(
      -- Without padded heads, or unrotated in place, q is not used: any tensor can stand in for it.
      contiguous("q", "in", BFLOAT16, { "rows", "q_heads", "512" },
        { in_place = "q_inplace", absent = function(seen) return { seen.kv.shape[1], 1, 512 } end }),
      { "q_head_padded", "scalar", option = true,
        observed = function(seen) return seen.q_out and seen.q_out.shape[2] or 0 end },
      { "apply_q_rope", "scalar", option = true, attribute = "apply_q_rope",
        observed = function(seen) if not (seen.q and seen.q_out) then return true end end },
      { "q_inplace", "scalar", option = true,
        observed = function(seen) return seen.q ~= nil and seen.q_out == nil end }),
    results = { { "q_out" } },
  },
  {
    name = "mla.cake_dsv4_nvfp4_kv_rope_quantize_insert", kernel = "rope_insert", flashinfer = true,
    reference = "kv_rope_insert",
    parameters = insertion(nil, { "compress_ratio", "scalar", option = true, attribute = "compress_ratio" }),
  },
  {
    name = "mla.dequantize_cache", kernel = "mla_dequantize", reference = "mla_dequantize",
    parameters = {
      { "cache", "in", dtype = CODES, shape = { "pages", "tokens", "384" }, strides = "records" },
      indices("slots", { "slot_count" }),
    },
    results = { { "rows" } },
  },
}

-------------------------------------------------------------------------------------------------------------- derived

local operation = {}
operation.__index = operation

--- The function of the module.
function operation:find()
  local fn = require "nibble"
  for part in self.name:gmatch("[%w_]+") do fn = fn[part] end
  return fn
end

--- Calls the operation. `arguments` are keyed by parameter; those of a pair are "x (K)" and "x (V)".
function operation:call(given)
  local arguments, count, opts = {}, 0, {}
  for _, p in ipairs(self.parameters) do
    local value = given[p.name]
    if p.pair then value = { given[p.name .. " (K)"], given[p.name .. " (V)"] } end
    if p.option then
      opts[p.name] = value
    else
      count = count + 1
      arguments[count] = value
    end
  end
  if next(opts) then
    count = count + 1
    arguments[count] = opts
  end
  return self:find()(table.unpack(arguments, 1, count))
end

-- The description of K's or V's part of a pair.
local function part_of(p, letter)
  local part = with({}, p)
  part.name, part.pair, part.shape = ("%s (%s)"):format(p.name, letter), nil, p.shape and {}
  for i, size in ipairs(p.shape or {}) do part.shape[i] = size:gsub("?", letter:lower()) end
  part.side, part.scales = letter, p.scales and ("%s (%s)"):format(p.scales, letter)
  part.interleaved = p.interleaved == letter
  return part
end

-- Descriptions of single tensors and of results; pairs are split.
local function single(list)
  local tensors = {}
  for _, p in ipairs(list) do
    for _, letter in ipairs(p.pair and { "K", "V" } or { "" }) do
      tensors[#tensors + 1] = p.pair and part_of(p, letter) or p
    end
  end
  return tensors
end

operations.named, operations.of_kernel = {}, {}

--- The names of all index parameters.
operations.index_parameters = {}

for _, op in ipairs(operations) do
  setmetatable(op, operation)
  op.results = op.results or {}
  for _, p in ipairs(op.parameters) do p.name, p.role = p[1], p[2] end
  for _, result in ipairs(op.results) do result.name = result[1] end
  op.tensors, op.indices, op.scales_written, op.scales_read = {}, {}, {}, {}
  for _, p in ipairs(single(op.parameters)) do
    if p.shape then op.tensors[#op.tensors + 1] = p end
    local scales = p.role == "out" and op.scales_written or op.scales_read
    if p.scales then scales[#scales + 1] = p end
    if p.role == "index" then op.indices[p.name], operations.index_parameters[p.name] = true, true end
  end
  for _, result in ipairs(single(op.results)) do
    if result.scales then op.scales_written[#op.scales_written + 1] = result end
  end
  operations.named[op.name] = op
  operations.of_kernel[op.kernel] = operations.of_kernel[op.kernel] or op
end

operations.single = single

return operations
