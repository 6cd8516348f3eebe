-- Checked mode, attacked: faults and near misses through views, several pools, captured graphs and freed pages. Each
-- fault is told once, with its lines, and the twin without it is clean (spec/support/checked.lua).
local nibble = require "nibble"
local checked = require "spec.support.checked"

local fault, clean = checked.fault, checked.clean

local POOL = [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local pool = new_pool("HND", allocator)
]]

describe("checked mode, near a fault:", function()
  after_each(function() nibble.check(false) end)

  describe("races #quick", function()
    it("of rows of a view", function()
      fault("race", "reads", [[
local x = nibble.zeros(16)
join(a, b)
a:scope(function() x:view(2, 8):narrow(1, 1, 1):fill(1) end) --2
b:scope(function()
  x:narrow(1, 9, 8):clone()
  x:narrow(1, 8, 2):clone() --1 --break
end)]])
    end)

    it("of columns, by permuted views", function()
      fault("race", "reads", [[
local x = nibble.zeros(4, 4)
join(a, b)
a:scope(function() x:permute(2, 1):narrow(1, 1, 2):fill(1) end) --2
b:scope(function()
  x:narrow(2, 3, 2):clone()
  x:narrow(1, 1, 1):narrow(2, 2, 2):clone() --1 --break
end)]])
    end)

    it("of views as other types and strides", function()
      fault("race", "writes", [[
local x = nibble.zeros(8)
join(a, b)
a:scope(function() x:as_strided({4}, {2}, 0):fill(1) end) --2
b:scope(function()
  x:as_strided({4}, {2}, 1):fill(2)
  x:reinterpret("uint8"):narrow(1, 27, 1):fill(1) --1 --break
--fix x:reinterpret("uint8"):narrow(1, 29, 4):fill(1)
end)]])
    end)

    it("ordered through a third stream", function()
      fault("race", "reads", [[
local x, c = nibble.zeros(4), nibble.stream()
join(a, b, c)
local early = a:record()
a:scope(function() x:fill(1) end) --2
c:wait(a:record())
--fix b:wait(c:record())
b:wait(early)
b:scope(function() x:clone() end) --1]])
    end)

    it("of columns on two branches of a graph", function()
      fault("race", "writes", [[
local x = nibble.zeros(4, 4)
join(a, b)
local graph = a:capture(function()
  b:wait(a:record())
  x:narrow(2, 1, 2):fill(1) --2
  b:scope(function()
    x:narrow(2, 3, 2):fill(1)
    x:narrow(2, 2, 1):fill(1) --1 --break
  end)
  a:wait(b:record())
end)
a:scope(function() graph:replay() end)]])
    end)

    it("of the script that writes an element", function()
      fault("race", "writes", [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a)
a:scope(function() y:copy(x) end) --2
--fix a:synchronize()
x[2] = 5 --1]])
    end)

    it("not where the host reads", function()
      clean [[
local x = nibble.zeros(4)
join(a)
a:scope(function() x:fill(1) end)
assert(x[1] == 1)
b:scope(function() x:fill(2) end)
assert(x:totable()[1] == 2)
x:fill(3)]]
    end)

    it("not of tensors that are closed and made anew", function()
      clean [[
join(a, b)
for _ = 1, 20 do
  local x = nibble.zeros(1024)
  local e = nibble.current_stream():record()
  a:wait(e)
  a:scope(function() x:fill(1) end)
  x:close()
  local y = nibble.zeros(1024)
  b:wait(nibble.current_stream():record())
  b:scope(function() y:fill(2) end)
end
collectgarbage()]]
    end)

    it("in one of the pools of an allocator", function()
      fault("race", "reads", POOL .. [[
local second = new_pool("HND", allocator)
local request = allocator:allocate(6)
put(pool, allocator:slots(request))
put(second, allocator:slots(request))
local tables, lengths, k, v = i32 {{0, 1, -1}}, i32 {6}, bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
local slots, rows, seven = nibble.tensor(allocator:append(request, 1)), bf16(1, 2, 64), i32 {7}
join(a, b)
a:scope(function() put(second, slots, rows) end) --2
b:scope(function()
  get(pool, tables, lengths, k, v)
  get(second, tables, lengths, k, v)
  get(second, tables, seven, k, v) --1 --break
end)]])
    end)

    it("of a swizzle, which reads all scales", function()
      fault("race", "reads", POOL .. [[
local request = allocator:allocate(32)
put(pool, allocator:slots(request))
local out = pool.kv_cache_sf[2]:clone()
local slots, rows = nibble.tensor {31}, bf16(1, 2, 64)
join(a, b)
a:scope(function() put(pool, slots, rows) end) --2
--fix b:wait(a:record())
b:scope(function() nibble.quantization.swizzle_v_scales(pool.kv_cache_sf[2], "HND", {out = out}) end) --1]])
    end)

    it("not of slots that are skipped", function()
      clean(POOL .. [[
local request = allocator:allocate(8)
put(pool, allocator:slots(request))
local rows = bf16(3, 2, 64)
local slots, tables, lengths, k, v = nibble.tensor {-1, 32, 1 << 40}, i32 {{0, 1, -1}}, i32 {8}, bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
join(a, b)
a:scope(function() put(pool, slots, rows) end)
b:scope(function() get(pool, tables, lengths, k, v) end)]])
    end)

    it("of page copies", function()
      fault("race", "reads", POOL .. [[
local request = allocator:allocate(32)
put(pool, allocator:slots(request))
local k, v, l = bf16(1, 12, 2, 64), bf16(1, 12, 2, 64), i32 {3}
local t0, t5 = i32 {{0, -1, -1}}, i32 {{5, -1, -1}}
join(a, b)
a:scope(function() pages.copy(pool, {{source = 0, destination = 5, entries = 2}}) end) --2
b:scope(function()
  get(pool, t0, l, k, v)
  get(pool, t5, l, k, v) --1 --break
end)]])
    end)

    it("of one scale for K and V, told once", function()
      fault("race", "reads k_scale", POOL .. [[
local request = allocator:allocate(1)
local g, rows, slots = nibble.tensor(1.0), bf16(1, 2, 64), nibble.tensor {0}
join(a, b)
a:scope(function() g:fill(2) end) --2
--fix b:wait(a:record())
b:scope(function()
  local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
  append(rows, rows, slots, pool.paged_kv_cache, pool.kv_cache_sf, g, g, "HND") --1
end)]])
    end)

    it("of slots that are rewritten under an append", function()
      fault("race", "writes", POOL .. [[
local request = allocator:allocate(2)
local rows, slots, new = bf16(1, 2, 64), nibble.tensor {0}, nibble.tensor {1}
join(a)
a:scope(function() put(pool, slots, rows) end) --2
--fix nibble.current_stream():wait(a:record())
slots:copy(new) --1]])
    end)

    it("of a stream that was closed", function()
      fault("race", "reads", [[
local x = nibble.zeros(4)
local c = nibble.stream()
join(c)
c:scope(function() x:fill(1) end) --2
--fix nibble.current_stream():wait(c:record())
c:close()
x:clone() --1]])
    end)
  end)

  -- Not quick: it looks at memory that nothing has written, which valgrind would report.
  describe("unwritten memory", function()
    it("through a view", function()
      fault("unwritten", "", [[
local x = nibble.empty(4, 4) --2
x:narrow(2, 1, 2):fill(1)
x:narrow(2, 2, 1):totable()
x:narrow(2, 2, 2):totable() --1 --break]])
    end)

    it("through a copy into a part", function()
      fault("unwritten", "", [[
local x = nibble.empty(4)
local y = nibble.zeros(8)
y:narrow(1, 3, 4):copy(x) --2
y:narrow(1, 7, 2):totable()
y:narrow(1, 6, 2):totable() --1 --break]])
    end)

    it("in a slot of a plain pool", function()
      fault("unwritten", "", [[
local empty = {paged_kv_cache = {}, kv_cache_sf = {}, kv_layout = "NHD"}
for i = 1, 2 do
  empty.paged_kv_cache[i] = nibble.empty({8, 4, 2, 32}, {dtype = "uint8"}) --2
  empty.kv_cache_sf[i] = nibble.empty({8, 4, 2, 4}, {dtype = "float8_e4m3fn"})
end
put(empty, {0, 1, 2, 3, 4})
get(empty, i32 {{0, 1, -1}}, i32 {5})
get(empty, i32 {{0, 1, -1}}, i32 {6}) --1 --break]])
    end)

    it("through a copy in a graph", function()
      fault("unwritten", "", [[
local y = nibble.zeros(4)
join(a)
local graph = a:capture(function()
  local t = nibble.empty(4)
--fix t:fill(1)
  y:copy(t) --2
end)
a:scope(function() graph:replay() end)
y:totable() --1]])
    end)
  end)

  describe("slots #quick", function()
    it("a slot twice, also in strided slots, and not what is skipped", function()
      fault("duplicate slot", "twice", POOL .. [[
local request = allocator:allocate(8)
put(pool, {-1, -1, 2, 99, 99, 7})
local slots = nibble.tensor {3, 4, 3}
put(pool, slots:narrow(1, 1, 2), bf16(3, 2, 64))
put(pool, slots:narrow(1, 2, 2), bf16(3, 2, 64))
put(pool, slots:as_strided({2}, {2}, 0), bf16(3, 2, 64)) --1 --break
put(pool, slots:as_strided({2}, {1}, 0), bf16(3, 2, 64))]])
    end)

    it("a record twice, and not what the ratio skips", function()
      fault("duplicate slot", "twice", [[
local cache = nibble.zeros({8, 4, 384}, {dtype = "uint8"})
local rope = nibble.rope_table(8)
local positions, slots = nibble.tensor {0, 1, 2, 3}, nibble.tensor {5, 5, 6, 6}
local insert = nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert
insert(bf16(4, 512), cache, slots, positions, rope, {compress_ratio = 2})
insert(bf16(4, 512), cache, slots, positions, rope, {compress_ratio = 1}) --1 --break]])
    end)

    it("a slot twice in a later replay", function()
      fault("duplicate slot", "twice", POOL .. [[
local request = allocator:allocate(8)
local both, rows = nibble.tensor({{1, 9}, {2, 9}}, {dtype = "int32"}), bf16(2, 2, 64)
local slots = both:narrow(2, 1, 1):select(2, 1):contiguous()
join(a)
local graph = a:capture(function() put(pool, slots, rows) end) --1
a:scope(function() graph:replay() slots:fill(7) graph:replay() end) --3 --break
a:scope(function() graph:replay() end)]])
    end)
  end)

  describe("pages #quick", function()
    it("not a page in padding, or beyond the length", function()
      clean(POOL .. [[
local request = allocator:allocate(6)
put(pool, allocator:slots(request))
get(pool, i32 {{0, 1, -1}, {0, 1, 5}}, i32 {6, 0})
get(pool, i32 {{0, 1, 5}}, i32 {6})]])
    end)

    it("a table that is older than the owner of its page", function()
      fault("unwritten", "since the page was allocated", POOL .. [[
local old = allocator:allocate(4)
put(pool, allocator:slots(old))
local tables = i32 {{0, -1, -1}}
allocator:free(old)
local new = allocator:allocate(4) --2
--fix put(pool, allocator:slots(new))
get(pool, tables, i32 {4}) --1]])
    end)

    it("a freed page, and not beyond the length", function()
      fault("freed page", "was released", POOL .. [[
local request = allocator:allocate(8)
put(pool, allocator:slots(request))
local tables, four, five = i32 {{0, 1, -1}}, i32 {4}, i32 {5}
allocator:rewind(request, 4) --2
get(pool, tables, four)
get(pool, tables, five) --1 --break]])
    end)

    it("a freed page, in one of three pools", function()
      fault("freed page", "was released", POOL .. [[
local second = new_pool("NHD", allocator)
local third = new_pool("NHD")
local request = allocator:allocate(8)
put(pool, allocator:slots(request)) put(second, allocator:slots(request)) put(third, {0, 1, 2, 3})
allocator:free(request) --2
get(third, i32 {{0, -1, -1}}, i32 {4})
get(second, i32 {{0, -1, -1}}, i32 {4}) --1 --break]])
    end)

    it("an append to a freed page", function()
      fault("freed page", "was released", POOL .. [[
local request = allocator:allocate(8)
put(pool, allocator:slots(request))
local slots = nibble.tensor {7}
allocator:rewind(request, 4) --2
put(pool, {3})
put(pool, slots) --1 --break]])
    end)

    it("a freed page in an E4M3 copy", function()
      fault("freed page", "was released", POOL .. [[
local request = allocator:allocate(8)
put(pool, allocator:slots(request))
local sf = nibble.quantization.swizzle_v_scales(pool.kv_cache_sf[2], "HND")
allocator:rewind(request, 4) --2
local function mat(n)
  local k, v = table.unpack(pool.paged_kv_cache)
  nibble.quantization.nvfp4_kv_materialize_fp8(k, v, pool.kv_cache_sf[1], sf, i32 {{0, 1}}, i32 {n}, 8) --1
end
mat(4)
mat(8) --break]])
    end)

    it("not a swizzle over freed pages", function()
      clean(POOL .. [[
local request, other = allocator:allocate(8), allocator:allocate(4)
put(pool, allocator:slots(request))
allocator:free(request)
local out = pool.kv_cache_sf[2]:clone()
nibble.quantization.swizzle_v_scales(pool.kv_cache_sf[2], "HND", {out = out})]])
    end)

    it("pages of two allocators that have a half of a pool each", function()
      fault("freed page", "was released", [[
local whole = new_pool("NHD")
local function half(from)
  local t = {paged_kv_cache = {}, kv_cache_sf = {}, kv_layout = "NHD"}
  for i = 1, 2 do
    t.paged_kv_cache[i] = whole.paged_kv_cache[i]:narrow(1, from, 4)
    t.kv_cache_sf[i] = whole.kv_cache_sf[i]:narrow(1, from, 4)
  end
  return t
end
local low, high = half(1), half(5)
local one_, two = pages.allocator {num_pages = 4, page_size = 4}, pages.allocator {num_pages = 4, page_size = 4}
pages.watch(one_, low)
pages.watch(two, high)
local a1, b1 = one_:allocate(4), two:allocate(4)
put(low, one_:slots(a1)) put(high, two:slots(b1))
one_:free(a1) --2
get(high, i32 {{0, -1, -1}}, i32 {4})
get(whole, i32 {{4, -1, -1}}, i32 {4})
get(low, i32 {{0, -1, -1}}, i32 {4}) --1 --break]])
    end)

    it("pages of an allocator that has a half, in an operation on the whole", function()
      fault("freed page", "was released", [[
local whole = new_pool("NHD")
local high = {paged_kv_cache = {}, kv_cache_sf = {}, kv_layout = "NHD"}
for i = 1, 2 do
  high.paged_kv_cache[i] = whole.paged_kv_cache[i]:narrow(1, 5, 4)
  high.kv_cache_sf[i] = whole.kv_cache_sf[i]:narrow(1, 5, 4)
end
local two = pages.allocator {num_pages = 4, page_size = 4}
pages.watch(two, high)
local b1 = two:allocate(4)
put(high, two:slots(b1))
get(whole, i32 {{4, -1, -1}}, i32 {4})
two:free(b1) --2
get(whole, i32 {{4, -1, -1}}, i32 {4}) --1 --break]])
    end)

    it("not a prompt written after it was shared with who sees less of it", function()
      fault("shared page", "", POOL .. [[
local parent = allocator:allocate(6) --2
local child = allocator:fork(parent, 5)
put(pool, allocator:slots(parent))
put(pool, {6}) --1 --break
put(pool, {4}) --break
local slots, copies = allocator:append(child, 2)
pages.copy(pool, copies)
put(pool, slots)
get(pool, pages.tensors(allocator:batch({parent, child}, {max_pages = 3})).block_tables, i32 {6, 7})]])
    end)

    it("a page that is shared no more", function()
      fault("shared page", "", POOL .. [[
local parent = allocator:allocate(4) --2
put(pool, allocator:slots(parent))
local child = allocator:fork(parent)
--fix allocator:free(child)
put(pool, {1}) --1]])
    end)

    it("a shared page of records", function()
      fault("shared page", "", [[
local allocator = pages.allocator {num_pages = 8, page_size = 4}
local cache = nibble.zeros({8, 4, 384}, {dtype = "uint8"})
pages.watch(allocator, cache)
local parent, rope = allocator:allocate(4), nibble.rope_table(8) --2
local insert = nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert
insert(bf16(4, 512), cache, nibble.tensor(allocator:slots(parent)), nibble.arange(4), rope)
--fix allocator:rewind(parent, 4)
local child = allocator:fork(parent)
insert(bf16(1, 512), cache, nibble.tensor {3}, nibble.tensor {3}, rope) --1 --break]])
    end)
  end)

  describe("closed tensors #quick", function()
    it("tensors of which a graph only writes, and views that were closed", function()
      fault("closed", "", [[
local x, y, z, w = nibble.zeros(8), nibble.zeros(8), nibble.zeros(8), nibble.zeros(8)
join(a)
local graph = a:capture(function()
  y:copy(x)
  w:copy(z)
end)
y:close()
w:close()
z:narrow(1, 1, 2):close()
a:scope(function() graph:replay() end)
z:close() --2 --break
a:scope(function() graph:replay() end) --1 --break
a:scope(function() graph:replay() end)
graph:close()
x:close()]])
    end)

    it("a tensor that the graph itself fills", function()
      clean [[
local x, y, t = nibble.zeros(8), nibble.zeros(8), nibble.zeros(8)
join(a)
local graph = a:capture(function()
  t:copy(x)
  y:copy(t)
end)
t:close()
a:scope(function() graph:replay() end)]]
    end)
  end)

  describe("forked streams #quick", function()
    it("joined through another stream", function()
      fault("unjoined", "", [[
local x, y, c = nibble.zeros(4), nibble.zeros(4), nibble.stream()
join(a)
a:capture(function()
  b:wait(a:record())
  c:wait(b:record()) --2
  c:scope(function() x:fill(1) end) --1
--fix b:wait(c:record())
  b:scope(function() y:fill(1) end)
  a:wait(b:record())
end)]], "joined the capture and was not joined back")
    end)

    it("that works on after it was joined", function()
      fault("unjoined", "", [[
local x, y = nibble.zeros(4), nibble.zeros(4)
join(a)
a:capture(function()
  b:wait(a:record()) --2
  b:scope(function() x:fill(1) end)
  a:wait(b:record())
  b:scope(function() y:fill(2) end) --1 --break
end)]], "was not joined back")
    end)
  end)
end)
