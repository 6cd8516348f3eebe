-- Checked mode and the pages of requests: what an allocator has handed out to whom, held against slots, tables and
-- lengths. Each fault has a twin without it that is clean (spec/support/checked.lua).
local nibble = require "nibble"
local pages = require "nibble.pages"
local checked = require "spec.support.checked"

local fault, clean = checked.fault, checked.clean

local POOL = [[
local A = pages.allocator {num_pages = 8, page_size = 4}
local P = new_pool("HND", A)
]]

describe("checked mode knows of a request's pages #quick", function()
  after_each(function() nibble.check(false) end)

  it("that reserved ones are nobody's, written and read", function()
    local reserved = [[
local A = pages.allocator {num_pages = 8, page_size = 4, reserved = 1}
local P = new_pool("NHD", A)
local r = A:allocate(2)
]]
    fault("reserved page", "append.* writes page 0 %(slot_mapping index 2%), which is reserved and belongs to no request", reserved .. [[
local slots = A:slots(r)
put(P, {slots[1], slots[2], 0}) --1 --break
put(P, {slots[1], slots[2], -1})]])
    fault("reserved page", "dequantize.* reads page 0 %(block_tables row 1, column 0%), which is reserved", reserved .. [[
put(P, A:slots(r))
get(P, {{1, -1}, {0, -1}}, {2, 1}) --1 --break
get(P, {{1, -1}, {0, -1}}, {2, 0})]])
  end)

  it("that a row is one request's, in its order", function()
    fault("foreign row", "reads row 0 of block_tables %(pages 0, 1%), but no live request has these pages in this order", POOL .. [[
local old = A:allocate(8)
put(P, A:slots(old))
A:free(old)
local p = A:allocate(4)
local q = A:allocate(4) --2
put(P, A:slots(p)) put(P, A:slots(q))
get(P, {{0, 1}}, {8}) --1 --break
get(P, {{0, -1}, {1, -1}}, {4, 4})]])
    fault("foreign row", "pages 1, 0", POOL .. [[
local p = A:allocate(8) --2
put(P, A:slots(p))
get(P, {{1, 0}}, {8}) --1 --break
get(P, {{0, 1}}, {8})]])
    fault("foreign row", "pages 0, 0", POOL .. [[
local p = A:allocate(8) --2
put(P, A:slots(p))
get(P, {{0, 0}}, {8}) --1 --break]])
  end)

  it("that a row may be a part of a request, a fork's, or what a window has left", function()
    clean(POOL .. [[
local p = A:allocate(16)
put(P, A:slots(p))
get(P, {{1, 2}, {0, 3}}, {8, 8})
get(P, {{2}}, {4})
A:drop(p, 1)
get(P, {{1, 2, 3}}, {12})
local f = A:fork(p, 6)
local slots, copies = A:append(f, 3)
pages.copy(P, copies)
put(P, slots)
get(P, {{1, 0, 4}, {1, 2, 3}}, {9, 12})
A:drop(f, 1)
A:free(p)
get(P, {{0, 4}}, {5})]])
  end)

  it("how long a request is", function()
    fault("beyond length", "reads 6 tokens of row 0 of block_tables, but request 1 has only 5 there", POOL .. [[
local r = A:allocate(6) --2
put(P, A:slots(r))
A:rewind(r, 1)
get(P, {{0, 1}}, {5})
get(P, {{0, 1}}, {6}) --1 --break]])
    fault("beyond length", "writes entry 2 of page 1 %(slot_mapping index 0%), but request 1 has no token there", POOL .. [[
local r = A:allocate(6) --2
put(P, A:slots(r))
--fix A:append(r, 1)
put(P, {6}) --1]])
    fault("beyond length", "mla.dequantize_cache reads entry 2 of page 1 %(slots entry 1%), but request 1 has no token", [[
local A = pages.allocator {num_pages = 8, page_size = 4}
local cache = nibble.zeros({8, 4, 384}, {dtype = "uint8"})
pages.watch(A, cache)
local r, rope = A:allocate(7), nibble.rope_table(8) --2
nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(bf16(7, 512), cache, nibble.tensor(A:slots(r)), nibble.arange(7), rope)
A:rewind(r, 1) --break
nibble.mla.dequantize_cache(cache, nibble.tensor {5, 6}) --1]])
  end)

  it("what has changed under a graph whose tables are the same", function()
    local replays = POOL .. [[
local r = A:allocate(6) --2
put(P, A:slots(r))
local t, l, k, v = i32 {{0, 1, -1}}, i32 {6}, bf16(1, 12, 2, 64), bf16(1, 12, 2, 64)
local g = nibble.stream():capture(function()
  get(P, t, l, k, v) --1
  get(P, t, l, k, v)
end)
main:scope(g.replay, g)
]]
    fault("beyond length", "reads 6 tokens of row 0 of block_tables, but request 1 has only 5 there", replays .. [[
A:rewind(r, 1) --break
main:scope(g.replay, g) --3]])
    fault("freed page", "reads page 0 %(block_tables row 0, column 0%), which was released", (replays:gsub(" %-%-2", "")) .. [[
A:free(r) --2 --break
main:scope(g.replay, g) --3]])
  end)

  it("that the longest of those who share a page counts", function()
    clean(POOL .. [[
local p = A:allocate(6)
put(P, A:slots(p))
local f = A:fork(p)
A:rewind(p, 3)
get(P, {{0, 1}, {0, -1}}, {6, 3})
A:free(p)
get(P, {{0, 1}}, {6})]])
  end)

  it("that a table has a page for each token", function()
    fault("missing page", "reads row 1 of block_tables for 6 tokens, but column 1 is %-1, which is no page", POOL .. [[
local p, q = A:allocate(8), A:allocate(6)
put(P, A:slots(p)) put(P, A:slots(q))
get(P, {{0, 1}, {2, -1}}, {8, 6}) --1 --break
get(P, {{0, 1}, {2, -1}, {-1, -1}}, {8, 4, 0})]])
    fault("missing page", "column 1 is 8, which is no page", POOL .. [[
local p = A:allocate(8)
put(P, A:slots(p))
get(P, {{0, 8}}, {8}) --1 --break
get(P, {{0, 8}}, {4})]])
  end)

  it("that tokens which were taken back are not there until they are written again", function()
    fault("unwritten", "page 1, entry 2, which nothing has written since the page was allocated", POOL .. [[
local r = A:allocate(7)
put(P, A:slots(r))
A:rewind(r, 2)
local slots = A:append(r, 3) --2
put(P, {slots[1], -1, slots[3]}) --break
--fix put(P, slots)
get(P, {{0, 1}}, {8}) --1]])
  end)

  it("that a page which is swapped out and in has no more tokens than before", function()
    fault("unwritten", "page 3, entry 2, which nothing has written since the page was allocated", POOL .. [[
local r = A:allocate(8)
put(P, A:slots(r, 0, 6)) --break
--fix put(P, A:slots(r))
local saved = {}
for i = 1, 2 do
  saved[i], saved[i + 2] = P.paged_kv_cache[i]:narrow(1, 1, 2):clone(), P.kv_cache_sf[i]:narrow(1, 1, 2):clone()
end
A:free(r)
local other = A:allocate(8)
put(P, A:slots(other))
r = A:allocate(8) --2
for i = 1, 2 do
  P.paged_kv_cache[i]:narrow(1, 3, 2):copy(saved[i])
  P.kv_cache_sf[i]:narrow(1, 3, 2):copy(saved[i + 2])
end
get(P, {{2, 3}}, {6})
get(P, {{2, 3}}, {8}) --1]])
  end)

  it("in both planes of a split table", function()
    fault("foreign row", "materialize.* reads row 0 of block_tables %(pages 2, 1%)", POOL .. [[
local p = A:allocate(8) --2
local q = A:allocate(4)
put(P, A:slots(p)) put(P, A:slots(q))
local k, v = table.unpack(P.paged_kv_cache)
local sf = nibble.quantization.swizzle_v_scales(P.kv_cache_sf[2], "HND")
local function mat(t, n)
  nibble.quantization.nvfp4_kv_materialize_fp8(k, v, P.kv_cache_sf[1], sf, t, i32 {n}, 8, {uses_shared_paged_kv_idx = false}) --1
end
mat(i32 {{{0, 1}, {0, 1}}}, 8)
mat(i32 {{{0, 1}, {2, 1}}}, 8) --break
mat(i32 {{{0, 1}, {2, 1}}}, 4)]])
  end)
end)

describe("checked mode sees what is written over another request's tokens #quick", function()
  after_each(function() nibble.check(false) end)

  it("by slots that are older than the owner of the page", function()
    fault("foreign entry",
      "writes entry 1 of page 0 %(slot_mapping index 0%) again, with a slot_mapping that is older than "
      .. "request 2", POOL .. [[
local old = A:allocate(2)
local slots = nibble.tensor {1}
put(P, A:slots(old))
A:free(old)
local p = A:allocate(4)
--fix slots = nibble.tensor {1}
put(P, A:slots(p)) --2
put(P, slots) --1]])
  end)

  it("with the place of a wrong table, as without checks", function()
    nibble.check(true)
    local _, message = pcall(function() return nibble.tensor({ 1, {} }), 1 end)
    nibble.check(false)
    local _, plain = pcall(function() return nibble.tensor({ 1, {} }), 1 end)
    assert.equal((plain:gsub(":%d+:", ":", 1)), (message:gsub(":%d+:", ":", 1)))
    assert.matches("checker_pages_spec.lua:%d+: tensor: ", message)
  end)

  it("by tensors of a batch that went", function()
    fault("foreign entry", "writes entry 0 of page 0 %(slot_mapping index 0%) for request 1, but request 2 owns the page now", POOL .. [[
local old = A:allocate(2)
local t = pages.tensors(A:batch {old})
A:free(old)
local p = A:allocate(2) --2
put(P, A:slots(p))
--fix t = pages.tensors(A:batch {p})
local slots = nibble.zeros({2}, {dtype = "int64"})
slots:copy(t.slot_mapping)
put(P, slots, bf16(2, 2, 64)) --1]])
    fault("foreign entry", "writes entry 0 of page 0 %(slot_mapping index 0%) for request 1, but request 2 owns "
      .. "the page now", POOL .. [[
local old = A:allocate(2)
local slots = nibble.tensor(A:slots(old))
A:free(old)
local p = A:allocate(2) --2
put(P, A:slots(p))
--fix slots = nibble.tensor(A:slots(p))
put(P, slots, bf16(2, 2, 64)) --1]])
    fault("foreign entry", "for request 1, but request 2 owns the page now", POOL .. [[
local old = A:allocate(2)
local slots = nibble.tensor(A:batch({old}).slot_mapping, {dtype = "int32"})
A:free(old)
local p = A:allocate(2) --2
put(P, A:slots(p))
--fix slots = nibble.tensor(A:batch({p}).slot_mapping, {dtype = "int32"})
put(P, slots, bf16(2, 2, 64)) --1]])
    fault("foreign row", "reads row 0 of block_tables, which was made for request 1, but request 2 owns its pages now", POOL .. [[
local old = A:allocate(2)
local t = pages.tensors(A:batch({old}, {max_pages = 3}))
A:free(old)
local p = A:allocate(2) --2
put(P, A:slots(p))
--fix t = pages.tensors(A:batch({p}, {max_pages = 3}))
get(P, t.block_tables, t.seq_lens) --1]])
  end)

  it("by slots of one request while another waits for its token", function()
    fault("foreign entry",
      "writes entry 3 of page 0 %(slot_mapping index 0%) of request 1 again, while nothing "
      .. "has written the last token of request 2", POOL .. [[
local p, q = A:allocate(4), A:allocate(3)
put(P, A:slots(p)) --2
put(P, A:slots(q))
local slots = A:append(q, 1)
put(P, {3}) --1 --break
put(P, slots)
put(P, {3})]])
  end)

  it("and no request that writes its own again", function()
    clean(POOL .. [[
local p, q = A:allocate(4), A:allocate(8)
local slots, rows = nibble.tensor {0, 1, 2, 3}, bf16(4, 2, 64)
for _ = 1, 3 do put(P, slots, rows) end
put(P, {2, 3})
put(P, A:slots(q, 0, 6))
put(P, A:slots(q, 4, 4))
A:append(q, 1)
put(P, slots, rows)
put(P, {12})
put(P, slots, rows)]])
    clean(POOL .. [[
local p, q, rows, slots = A:allocate(4), A:allocate(4), bf16(2, 2, 64), nibble.tensor {3, 7}
put(P, A:slots(p)) put(P, A:slots(q))
join(a)
local graph = a:capture(function() put(P, slots, rows) end)
a:scope(function()
  graph:replay()
  graph:replay()
  slots:copy(nibble.tensor {A:append(p, 1)[1], A:append(q, 1)[1]})
  rows:fill(1)
  graph:replay()
end)]])
  end)

  it("in a graph that writes an index tensor before each use", function()
    local program = POOL .. [[
local r, old = A:allocate(4), A:allocate(4)
local slots, rows = nibble.tensor(A:slots(r)), bf16(4, 2, 64)
local first, second = slots:clone(), nibble.tensor(A:slots(old))
local graph = main:capture(function()
  slots:copy(first)
  put(P, slots, rows) %s
  slots:copy(second)
  put(P, slots, rows) %s
end)
graph:replay() %s
%s
graph:replay() %s
assert(#select(2, nibble.check_reports()) == 0)]]
    clean(program:format("", "", "", "", ""))
    fault("freed page", "append.* writes page 1 %(slot_mapping index 0%), which was released",
      program:format("", "--1", "", "A:free(old) --2 --break", "--3"))
    fault("freed page", "append.* writes page 0 %(slot_mapping index 0%), which was released",
      program:format("--1", "", "", "A:free(r) --2 --break", "--3"))
    fault("duplicate slot", "append.* writes entry 1 of page 0 twice",
      program:format("--1", "", "", "first:fill(1) --break", "--3"))
  end)
end)

describe("checked mode knows scales #quick", function()
  after_each(function() nibble.check(false) end)

  it("of K and of V", function()
    fault("wrong scales", "dequantize.* reads the scales of page 0 of kv_cache_sf %(K%), which are those of V, with data of K", [[
local P = new_pool("NHD")
put(P, {0, 1, 2, 3}) --2
local k, v = table.unpack(P.kv_cache_sf)
get({paged_kv_cache = P.paged_kv_cache, kv_cache_sf = {k, v}, kv_layout = "NHD"}, {{0}}, {4})
get({paged_kv_cache = P.paged_kv_cache, kv_cache_sf = {v, k}, kv_layout = "NHD"}, {{0}}, {4}) --1 --break
get({paged_kv_cache = {P.paged_kv_cache[2], P.paged_kv_cache[1]}, kv_cache_sf = {v, k}, kv_layout = "NHD"}, {{0}}, {4})
local other = {paged_kv_cache = {}, kv_cache_sf = {}, kv_layout = "NHD"}
for i = 1, 2 do other.paged_kv_cache[i], other.kv_cache_sf[i] = P.paged_kv_cache[i]:clone(), P.kv_cache_sf[i]:clone() end
get(other, {{0}}, {4})]])
  end)

  it("in their order", function()
    local program = [[
local P = new_pool("HND")
put(P, {0, 1, 2, 3}) %s
local k, v = table.unpack(P.paged_kv_cache)
local sf = nibble.quantization.swizzle_v_scales(P.kv_cache_sf[2], "HND") %s
local function mat(v_sf)
  nibble.quantization.nvfp4_kv_materialize_fp8(k, v, P.kv_cache_sf[1], v_sf, i32 {{0, 1}}, i32 {4}, 8) %s
end
mat(sf)
%s
get(P, {{0}}, {4})]]
    fault("wrong scales",
      "materialize.* reads the scales of page 0 of v_block_scales, which are linear, as interleaved ones",
      program:format("--2", "", "--1", "mat(P.kv_cache_sf[2]) --break"))
    fault("wrong scales",
      "dequantize.* reads the scales of page 0 of kv_cache_sf %(V%), which are interleaved, as linear ones",
      program:format("", "--2", "",
        "get({paged_kv_cache = {k, v}, kv_cache_sf = {P.kv_cache_sf[1], sf}, kv_layout = 'HND'}, "
        .. "{{0}}, {4}) --1 --break"))
    clean(program:format("", "", "", "mat(nibble.quantization.swizzle_v_scales(P.kv_cache_sf[2]:clone(), 'HND'))"))
  end)

  it("as quantize_cache leaves them", function()
    local program = [[
local x = nibble.randn({4, 2, 4, 64}, {dtype = "bfloat16"})
local cache, sf = nibble.quantization.nvfp4_quantize_paged_kv_cache(x, x, "HND") %s
local function mat(v_sf)
  nibble.quantization.nvfp4_kv_materialize_fp8(cache[1], cache[2], sf[1], v_sf, i32 {{0, 1}}, i32 {4}, 8) %s
end
mat(sf[2])
%s]]
    clean(program:format("", "", ""))
    fault("wrong scales", "reads the scales of page 0 of v_block_scales, which are linear, as interleaved",
      program:format("", "--1",
        "mat(nibble.quantization.swizzle_v_scales(sf[2], 'HND', {inverse = true})) --2 --break"))
    fault("wrong scales", "reads the scales of page 1 of kv_cache_sf %(V%), which are interleaved, as linear ones",
      program:format("--2", "", "get({paged_kv_cache = cache, kv_cache_sf = sf, kv_layout = 'HND'}, {{1}}, {4}) "
        .. "--1 --break"))
  end)

  it("as old as the entries that are read", function()
    local program = [[
local P = new_pool("HND")
local k, v = table.unpack(P.paged_kv_cache)
local sf = nibble.zeros(P.kv_cache_sf[2].shape, {dtype = "float8_e4m3fn"})
local function copy() nibble.quantization.swizzle_v_scales(P.kv_cache_sf[2], "HND", {out = sf}) end
local function mat(length)
  nibble.quantization.nvfp4_kv_materialize_fp8(k, v, P.kv_cache_sf[1], sf, i32 {{0, 1}}, i32 {length}, 8) --1
end
put(P, {0, 1, 2, 3, 4})
copy()
mat(5)
put(P, {5}) --2
mat(5)
%s
mat(6) --break]]
    clean(program:format("copy()"))
    fault("wrong scales", "reads the scales of page 1 of v_block_scales, an interleaved copy that is older than the "
      .. "write of .*append.* to entry 1", program:format(""))
  end)
end)

describe("pages.watch #quick", function()
  after_each(function() nibble.check(false) end)

  it("ends what was watched before in the same pool", function()
    clean [[
local P = new_pool("HND")
for _ = 1, 3 do
  local A = pages.allocator {num_pages = 8, page_size = 4}
  pages.watch(A, P)
  local r = A:allocate(6)
  put(P, A:slots(r))
  get(P, {{0, 1}}, {6})
end]]
    fault("unwritten", "since the page was allocated", [[
local P, A = new_pool("HND"), nil
for i = 1, 2 do
  A = pages.allocator {num_pages = 8, page_size = 4}
  pages.watch(A, P)
  local r = A:allocate(6) --2
  if i == 1 then put(P, A:slots(r)) end --break
  --fix put(P, A:slots(r))
  get(P, {{0, 1}}, {6}) --1
end]])
  end)

  it("is ended by pages.unwatch", function()
    clean(POOL .. [[
local Q = new_pool("NHD", A)
local r = A:allocate(4)
pages.unwatch(A, P)
get(P, {{5}}, {4})
pages.unwatch(A, P)
put(Q, A:slots(r))
pages.unwatch(A)
get(Q, {{3}}, {4})
pages.watch(A, P)
get(P, {{0}}, {4})]])
    fault("freed page", "has not allocated", POOL .. [[
local Q = new_pool("NHD", A)
pages.unwatch(A, P)
get(Q, {{5}}, {4}) --1 --break
get(P, {{5}}, {4})]])
  end)

  it("checks its arguments", function()
    local A = pages.allocator { num_pages = 8, page_size = 4 }
    assert.error(function() pages.watch({}, {}) end)
    for _, name in ipairs { "watch", "unwatch" } do
      local ok, message = pcall(pages[name], A, 3)
      assert.is_false(ok)
      assert.equal(("pages.%s: pool: expected a pool or tensors, got 3"):format(name), message)
      ok, message = pcall(pages[name], 4, {})
      assert.is_false(ok)
      assert.equal(("pages.%s: allocator: expected an allocator, got 4"):format(name), message)
    end
  end)

  it("keeps what it costs apart from how much is held", function()
    -- Work is counted: instructions of the virtual machine that a step takes.
    local function step(held)
      local A = pages.allocator { num_pages = held // 16 + 8, page_size = 16 }
      local r, counted = A:allocate(held), 0
      local P = pages.caches { num_pages = held // 16 + 8, page_size = 16, num_kv_heads = 1, head_dim = 16 }
      nibble.check(function(report) error(report.text) end)
      pages.watch(A, P)
      local one, rows = nibble.tensor(1.0), nibble.zeros({ 1, 1, 16 }, { dtype = "bfloat16" })
      A:append(r, 1)
      debug.sethook(function() counted = counted + 1 end, "", 100)
      nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows, nibble.tensor(A:append(r, 1)),
        P.paged_kv_cache, P.kv_cache_sf, one, one, "NHD")
      debug.sethook()
      nibble.check(false)
      return counted
    end
    local few, many = step(1024), step(65536)
    assert.is_true(many <= 2 * few + 10, ("%d hundred instructions for 1024 tokens, %d for 65536"):format(few, many))
  end)
end)
