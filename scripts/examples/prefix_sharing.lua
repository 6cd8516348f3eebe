-- Two requests share the pages of a prompt; the first that writes gets its own page.
--
--   nibble scripts/examples/prefix_sharing.lua        (or lua5.4 ...)

local here = arg[0]:match("^(.*)/[^/]*$") or "." -- so that it runs from any directory, in plain Lua too
package.path = here .. "/../../bindings/lua/?.lua;" .. package.path
package.cpath = package.cpath .. ";" .. here .. "/../../build/release/?.so"

local nibble = require "nibble"
local pages = require "nibble.pages"
local show = require "nibble.show"

local HEADS, DIM, PAGE_SIZE = 2, 64, 4
local allocator = pages.allocator { num_pages = 12, page_size = PAGE_SIZE }
local pool = pages.caches { num_pages = 12, page_size = PAGE_SIZE, num_kv_heads = HEADS, head_dim = DIM,
  kv_layout = "HND" }

local function append(slots, seed)
  local rows = nibble.randn(#slots, HEADS, DIM, { dtype = "bfloat16", seed = seed })
  nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    rows, rows, nibble.tensor(slots), pool.paged_kv_cache, pool.kv_cache_sf, 1.0, 1.0, "HND")
end

-- A prompt of 10 tokens on three pages, the last one half full, and a fork that shares them all.
local parent = assert(allocator:allocate(10))
append(allocator:slots(parent), 1)
local child = allocator:fork(parent)
print(show.page_table(allocator, { parent, child }, { names = { "parent", "child" } }))

-- The child's next token is on the shared last page: the allocator replaces the page and returns the copy to make.
local slots, copies = allocator:append(child, 1)
for _, copy in ipairs(copies) do
  print(("\ncopy %d entries of page %d to page %d"):format(copy.entries, copy.source, copy.destination))
end
pages.copy(pool, copies)
append(slots, 2)
append(allocator:append(parent, 1), 3) -- the parent is alone on its page now: nothing to copy
print(show.page_table(allocator, { parent, child }, { names = { "parent", "child" } }))

-- Read both back: the same 10 tokens, then different ones.
local batch = pages.tensors(allocator:batch({ parent, child }))
local one = nibble.full({ 1 }, 1, { dtype = "float32" })
local k = nibble.zeros(2, 11, HEADS, DIM, { dtype = "bfloat16" })
local v = nibble.zeros(2, 11, HEADS, DIM, { dtype = "bfloat16" })
nibble.quantization.nvfp4_kv_dequantize_paged(pool.paged_kv_cache, pool.kv_cache_sf, batch.block_tables, batch.seq_lens,
  one, one, k, v, "HND")
local prompt_equal = k[1]:narrow(1, 1, 10):equal(k[2]:narrow(1, 1, 10))
local own_differ = not k[1][11]:equal(k[2][11])
print(("\nprompt equal: %s; own tokens differ: %s"):format(prompt_equal, own_differ))

allocator:free(parent)
allocator:free(child)
print(("all freed: %d of %d pages"):format(allocator.num_free, allocator.num_pages))
if not (prompt_equal and own_differ and allocator.num_free == allocator.num_pages) then os.exit(1) end
