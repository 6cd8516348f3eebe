-- A decode step as a graph: captured once, replayed with new tokens and slots.
--
--   nibble scripts/examples/capture_and_replay.lua    (or lua5.4 ...)
--
-- A graph records which tensors its operations use, not their values. So each step writes its input to the same tensors
-- and replays the graph. The batch has room for four requests; three are running, and slot -1 makes the append skip row
-- four.

local here = arg[0]:match("^(.*)/[^/]*$") or "." -- so that it runs from any directory, in plain Lua too
package.path = here .. "/../../bindings/lua/?.lua;" .. package.path
package.cpath = package.cpath .. ";" .. here .. "/../../build/release/?.so"

local nibble = require "nibble"
local pages = require "nibble.pages"

local BATCH, HEADS, DIM, PAGE_SIZE = 4, 2, 64, 4
local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping

local allocator = pages.allocator { num_pages = 16, page_size = PAGE_SIZE, layout = "shuffled", seed = 1 }
local pool = pages.caches { num_pages = 16, page_size = PAGE_SIZE, num_kv_heads = HEADS, head_dim = DIM }

-- The static input. Global scales are tensors, too: a number would be fixed in the graph, so a capture refuses numbers.
local key = nibble.zeros(BATCH, HEADS, DIM, { dtype = "bfloat16" })
local value = nibble.zeros(BATCH, HEADS, DIM, { dtype = "bfloat16" })
local slots = nibble.full({ BATCH }, -1)
local scale = nibble.full({ 1 }, 1, { dtype = "float32" })

local stream = nibble.stream()
stream:wait(nibble.current_stream():record()) -- what was filled above is filled before this stream goes on
local graph = stream:capture(function()
  append(key, value, slots, pool.paged_kv_cache, pool.kv_cache_sf, scale, scale)
end)
print("captured, not executed: " .. #graph:nodes() .. " node; bytes of the cache that are not 0: "
  .. select(2, pool.paged_kv_cache[1]:bytes():gsub("[^\0]", "")))

local requests = {}
for b = 1, 3 do requests[b] = allocator:allocate(0) end

stream:scope(function() -- everything in here is this stream's work, in order
  for step = 1, 6 do
    for _, request in ipairs(requests) do allocator:append(request, 1) end
    local batch = allocator:batch(requests, { batch_size = BATCH, new_tokens = 1, num_slots = BATCH })
    slots:copy(nibble.tensor(batch.slot_mapping))
    key:copy(nibble.randn(BATCH, HEADS, DIM, { seed = step }))
    value:copy(nibble.randn(BATCH, HEADS, DIM, { seed = 100 + step }))
    graph:replay()
    print(("step %d  slots %s"):format(step, table.concat(batch.slot_mapping, " ")))
  end
end)
stream:synchronize()

-- The same six steps without a graph, in a second pool: all bytes must be the same.
local again = pages.caches { num_pages = 16, page_size = PAGE_SIZE, num_kv_heads = HEADS, head_dim = DIM }
for step = 1, 6 do
  local now = {}
  for b, request in ipairs(requests) do now[b] = allocator:slots(request, step - 1, 1)[1] end
  append(nibble.randn(BATCH, HEADS, DIM, { seed = step }):to("bfloat16"),
    nibble.randn(BATCH, HEADS, DIM, { seed = 100 + step }):to("bfloat16"),
    nibble.tensor(now), again.paged_kv_cache, again.kv_cache_sf, 1.0, 1.0)
end
for i, name in ipairs { "K", "V" } do
  local same = pool.paged_kv_cache[i]:equal(again.paged_kv_cache[i]) and pool.kv_cache_sf[i]:equal(again.kv_cache_sf[i])
  print(name .. " of replay and eager run: " .. (same and "equal" or "different"))
  if not same then os.exit(1) end
end
