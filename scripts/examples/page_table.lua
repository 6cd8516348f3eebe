-- Draws the pages of a pool while requests arrive, grow, share a prompt and leave.
--
--   nibble scripts/examples/page_table.lua PICTURE.svg        (or lua5.4 ...)

local here = arg[0]:match("^(.*)/[^/]*$") or "." -- so that it runs from any directory, in plain Lua too
package.path = here .. "/../../bindings/lua/?.lua;" .. package.path
package.cpath = package.cpath .. ";" .. here .. "/../../build/release/?.so"

local pages = require "nibble.pages"
local show = require "nibble.show"

local allocator = pages.allocator { num_pages = 16, page_size = 4 }
local requests, snapshots = {}, {}

local function add(request, name)
  request.id = name
  table.insert(requests, request)
  return request
end

local function finish(request)
  for i, other in ipairs(requests) do
    if other == request then table.remove(requests, i) end
  end
  allocator:free(request)
end

local a, b
for step = 1, 40 do
  if step == 1 then a = add(assert(allocator:allocate(10)), "a") end
  if step == 6 then b = add(assert(allocator:allocate(17)), "b") end
  if step == 12 then add(allocator:fork(b), "c, forked from b") end -- it shares b's pages until one of the two writes
  if step == 20 then finish(a) end
  if step == 24 then add(assert(allocator:allocate(6)), "d") end -- on pages that a has given back
  if step == 32 then finish(b) end -- the pages that c shares stay
  for _, request in ipairs(requests) do
    if step % 2 == 0 then allocator:append(request, 1) end
  end
  table.insert(snapshots, show.svg.snapshot(allocator, requests, step))
end

local picture = show.svg.page_table(allocator, snapshots, { title = "pages of 4 tokens, over 40 steps", width = 720 })
if arg[1] then assert(show.svg.save(arg[1], picture)) end
print(show.page_table(allocator, requests))
