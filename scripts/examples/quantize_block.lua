-- Quantizes sixteen numbers to NVFP4.
--
--   nibble scripts/examples/quantize_block.lua        (or lua5.4 ...)
--
-- One token with one head and 16 dimensions is exactly one block. It is appended to a cache, shown, and read back.

local here = arg[0]:match("^(.*)/[^/]*$") or "." -- so that it runs from any directory, in plain Lua too
package.path = here .. "/../../bindings/lua/?.lua;" .. package.path
package.cpath = package.cpath .. ";" .. here .. "/../../build/release/?.so"

local nibble = require "nibble"
local pages = require "nibble.pages"
local show = require "nibble.show"

local numbers = { 0.1, -0.2, 0.35, 0.5, -0.75, 1, 1.25, -1.5, 1.75, 2, -2.5, 3, 3.5, -4, 5, 5.5 }
local key = nibble.tensor({ { numbers } }, { dtype = "bfloat16" }) -- [1 token, 1 head, 16 dimensions]
local value = key:clone()

-- A pool of two pages of four tokens. Slot 6 is page 1, entry 2: data counts from 0.
local pool = pages.caches { num_pages = 2, page_size = 4, num_kv_heads = 1, head_dim = 16 }
local slot = nibble.tensor({ 6 })
nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
  key, value, slot, pool.paged_kv_cache, pool.kv_cache_sf, 1.0, 1.0)

-- Eight bytes hold the sixteen codes; one byte is their common scale. Indices in Lua count from 1.
local k_cache, k_sf = pool.paged_kv_cache[1], pool.kv_cache_sf[1]
print("packed codes of K at page 1, entry 2, head 0:")
print(k_cache[{ 2, 3, 1 }])

local codes, scale_byte = show.read_block(k_cache, k_sf, 6, 0, 0)
print(show.block(key[{ 1, 1 }], { codes = codes, scale_byte = scale_byte }))

-- Back to bfloat16, as an attention kernel sees it: one request of 3 tokens on page 1.
local one = nibble.tensor({ 1.0 }, { dtype = "float32" })
local k_out = nibble.zeros(1, 4, 1, 16, { dtype = "bfloat16" })
local v_out = nibble.zeros(1, 4, 1, 16, { dtype = "bfloat16" })
nibble.quantization.nvfp4_kv_dequantize_paged(pool.paged_kv_cache, pool.kv_cache_sf,
  nibble.tensor({ { 1 } }, { dtype = "int32" }), nibble.tensor({ 3 }, { dtype = "int32" }), one, one, k_out, v_out)
local read_back = k_out[{ 1, 3, 1 }] -- request 0, token 2, head 0
print(("largest error: %g"):format((read_back:max_error(key[{ 1, 1 }]))))
