-- nibble.pages: the page allocator, what it gives to kernels, and the pools.
local pages = require "nibble.pages"

local function sorted(list)
  local copy = table.move(list, 1, #list, 1, {})
  table.sort(copy)
  return copy
end

local function range(first, last)
  local list = {}
  for i = first, last do list[#list + 1] = i end
  return list
end

local function raises(fn, text)
  local ok, message = pcall(fn)
  assert.is_false(ok, "no error was raised")
  assert.is_truthy(message:find(text, 1, true), ("%q does not contain %q"):format(message, text))
end

describe("the page allocator #quick", function()
  it("gives a request just enough pages, each to one request alone", function()
    local allocator = pages.allocator { num_pages = 16, page_size = 4, layout = "shuffled", seed = 3 }
    local seen = {}
    for length, expected in pairs { [0] = 0, [1] = 1, [3] = 1, [4] = 1, [5] = 2, [9] = 3 } do
      local request = assert(allocator:allocate(length))
      assert.are.equal(length, request.length)
      assert.are.equal(expected, #request.pages)
      for _, page in ipairs(request.pages) do
        assert.is_nil(seen[page])
        seen[page] = true
        assert.are.equal(1, allocator:references(page))
      end
    end
    assert.are.equal(16 - 8, allocator.num_free)
  end)

  it("says why when there are too few pages, and changes nothing", function()
    local allocator = pages.allocator { num_pages = 4, page_size = 4 }
    local request = assert(allocator:allocate(9))
    local none, message = allocator:allocate(5)
    assert.is_nil(none)
    assert.are.equal("not enough pages: 2 needed, 1 free", message)
    assert.are.same({ nil, "not enough pages: 2 needed, 1 free" }, { allocator:append(request, 4 + 4) })
    assert.are.equal(1, allocator.num_free)
    assert.are.equal(9, request.length)
    assert.are.equal(3, #request.pages)
    assert.is_truthy(allocator:append(request, 7))
    assert.are.equal(0, allocator.num_free)
  end)

  it("keeps nothing of a request that it refused", function()
    local allocator = pages.allocator { num_pages = 4, page_size = 4 }
    assert.is_nil((allocator:allocate(17)))
    for _, length in ipairs { -1, 0.5, "four", {} } do
      raises(function() allocator:allocate(length) end, "allocator:allocate: length: expected an integer >= 0, got ")
    end
    raises(function() allocator:allocate() end, "allocator:allocate: length: expected an integer >= 0, got nil")
    assert.are.same({}, allocator.live)
    local request = allocator:allocate(16)
    assert.are.same({ [request] = true }, allocator.live)
  end)

  it("refuses a second free, a freed request and another allocator's", function()
    local allocator = pages.allocator { num_pages = 4, page_size = 4 }
    local other = pages.allocator { num_pages = 4, page_size = 4 }
    local request = allocator:allocate(4)
    raises(function() other:free(request) end, "allocator:free: request: expected a live request, got")
    allocator:free(request)
    assert.are.equal(4, allocator.num_free)
    raises(function() allocator:free(request) end,
      "allocator:free: request: expected a live request, got one that was freed")
    raises(function() allocator:append(request, 1) end, "allocator:append: request: expected a live request")
    raises(function() allocator:fork(request) end, "allocator:fork: request: expected a live request")
    raises(function() allocator:batch({ request }) end, "allocator:batch: request: expected a live request")
    assert.are.equal(4, allocator.num_free)
  end)

  it("never hands out reserved pages", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 1, layout = "shuffled", reserved = 3 }
    assert.are.equal(5, allocator.num_free)
    assert.are.same({ 3, 4, 5, 6, 7 }, sorted(allocator:allocate(5).pages))
    assert.is_nil((allocator:allocate(1)))
    assert.are.equal(math.huge, allocator:references(0))
  end)

  it("gives slots page * page_size + entry, in the order of the tokens", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4, layout = function()
      return { 5, 2, 7, 0, 1, 3, 4, 6 } end }
    local request = allocator:allocate(6)
    assert.are.same({ 5, 2 }, request.pages)
    assert.are.same({ 20, 21, 22, 23, 8, 9 }, allocator:slots(request))
    assert.are.same({ 23, 8 }, allocator:slots(request, 3, 2))
    local slots, copies = allocator:append(request, 4)
    assert.are.same({ 10, 11, 28, 29 }, slots)
    assert.are.same({}, copies)
    raises(function() allocator:slots(request, 9, 2) end, "allocator:slots: count: expected at most 1, got 2")
  end)

  it("shares pages on a fork, and counts who holds them", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4 }
    local parent = allocator:allocate(10)
    local child = allocator:fork(parent, 6)
    assert.are.same({ 0, 1 }, child.pages)
    assert.are.equal(5, allocator.num_free)
    assert.are.same({ 2, 2, 1 }, { allocator:references(0), allocator:references(1), allocator:references(2) })
    allocator:free(parent)
    assert.are.same({ 1, 1, 0 }, { allocator:references(0), allocator:references(1), allocator:references(2) })
    assert.are.equal(6, allocator.num_free)
    allocator:free(child)
    assert.are.equal(8, allocator.num_free)
    raises(function() allocator:fork(child) end, "live request")
  end)

  it("exchanges a shared last page before it is written, and says what to copy", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4 }
    local parent = allocator:allocate(6)
    local child = allocator:fork(parent)
    local slots, copies = allocator:append(child, 3)
    assert.are.same({ { source = 1, destination = 2, entries = 2 } }, copies)
    assert.are.same({ 0, 2, 3 }, child.pages)
    assert.are.same({ 2 * 4 + 2, 2 * 4 + 3, 3 * 4 }, slots)
    assert.are.same({ 0, 1 }, parent.pages)
    assert.are.same({ 2, 1, 1 }, { allocator:references(0), allocator:references(1), allocator:references(2) })
    slots, copies = allocator:append(parent, 1) -- alone on it now
    assert.are.same({ { 6 }, {} }, { slots, copies })
  end)

  it("needs no copy when the shared last page is full, and a page for the copy when it is not", function()
    local allocator = pages.allocator { num_pages = 3, page_size = 4 }
    local parent = allocator:allocate(8)
    local child = allocator:fork(parent)
    local _, copies = allocator:append(child, 1)
    assert.are.same({}, copies)
    allocator:free(child)
    child = allocator:fork(parent, 7)
    local third = allocator:allocate(1)
    assert.are.same({ nil, "not enough pages: 1 needed, 0 free" }, { allocator:append(child, 1) })
    assert.are.same({ 0, 1 }, child.pages)
    allocator:free(third)
    assert.is_truthy(allocator:append(child, 1))
  end)

  it("gives the oldest pages back, and the request goes on as if it had begun later", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4 }
    local request, other = allocator:allocate(10), allocator:allocate(4)
    local child = allocator:fork(request, 8)
    allocator:drop(request, 1)
    assert.are.same({ pages = { 1, 2 }, length = 6, dropped = 4 }, request)
    assert.are.equal(4, allocator.num_free) -- the child still has page 0
    allocator:drop(child, 1)
    assert.are.same({ pages = { 1 }, length = 4, dropped = 4 }, child)
    assert.are.equal(5, allocator.num_free)
    assert.are.same({ 4, 5, 6, 7, 8, 9 }, allocator:slots(request))
    assert.are.same({ 7, 8 }, allocator:slots(request, 3, 2))
    assert.are.same({ 10, 11, 0 }, (allocator:append(request, 3))) -- page 0 is free again, and the lowest
    assert.are.same({ block_tables = { { 1, 2, 0 }, { 3, -1, -1 } }, seq_lens = { 9, 4 }, kv_page_indptr = { 0, 3, 4 },
      slot_mapping = { 11, 0, 14, 15 } }, allocator:batch({ request, other }, { new_tokens = 2 }))
    assert.are.equal(4, allocator:fork(request, 5).dropped)

    allocator:drop(child, 0)
    allocator:drop(child, 1)
    assert.are.same({ pages = {}, length = 0, dropped = 8 }, child)
    assert.are.same({ 16 }, (allocator:append(child, 1)))
    for count, got in pairs { [1] = "1", [-1] = "-1", [0.5] = "0.5" } do
      raises(function() allocator:drop(child, count) end, "allocator:drop: count: expected ")
      raises(function() allocator:drop(child, count) end, ", got " .. got)
    end
    raises(function() allocator:drop(child, 1) end, "at most the request's 0 full pages, got 1")
    allocator:free(other)
    raises(function() allocator:drop(other, 0) end, "allocator:drop: request: expected a live request")
  end)

  it("gives several of the oldest pages back at once, in the order of the tokens", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4 }
    local request = allocator:allocate(17)
    local child = allocator:fork(request, 9)
    allocator:drop(request, 2)
    assert.are.same({ pages = { 2, 3, 4 }, length = 9, dropped = 8 }, request)
    assert.are.same({ 1, 1, 2, 1, 1 }, { allocator:references(0), allocator:references(1), allocator:references(2),
      allocator:references(3), allocator:references(4) })
    assert.are.equal(3, allocator.num_free) -- the child has pages 0 and 1
    allocator:drop(child, 2)
    assert.are.same({ pages = { 2 }, length = 1, dropped = 8 }, child)
    assert.are.equal(5, allocator.num_free)
    allocator:drop(request, 2)
    assert.are.same({ pages = { 4 }, length = 1, dropped = 16 }, request)
    assert.are.equal(6, allocator.num_free) -- page 2 is the child's
    allocator:free(request)
    allocator:free(child)
    assert.are.equal(8, allocator.num_free)
    assert.are.same({ 0, 1, 2, 3, 4, 5, 6, 7 }, allocator:allocate(32).pages)
  end)

  it("takes a request's newest tokens back, and their pages", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4 }
    local request, other = allocator:allocate(10), allocator:allocate(1)
    allocator:rewind(request, 1)
    assert.are.same({ pages = { 0, 1, 2 }, length = 9, dropped = 0 }, request)
    allocator:rewind(request, 1)
    assert.are.same({ pages = { 0, 1 }, length = 8, dropped = 0 }, request)
    assert.are.equal(5, allocator.num_free)
    assert.are.same({ 8, 9 }, (allocator:append(request, 2))) -- page 2 again, the lowest
    -- A page that a fork shares stays with the fork, and is copied before the next write.
    local child = allocator:fork(request)
    allocator:rewind(request, 3)
    assert.are.same({ 2, 2, 1 }, { allocator:references(0), allocator:references(1), allocator:references(2) })
    local slots, copies = allocator:append(request, 1)
    assert.are.same({ { 19 }, { { source = 1, destination = 4, entries = 3 } } }, { slots, copies })
    assert.are.same({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }, allocator:slots(child))
    allocator:rewind(request, 0)
    allocator:rewind(request, 8)
    assert.are.same({ pages = {}, length = 0, dropped = 0 }, request)
    for _, count in ipairs { 1, -1, 0.5 } do
      raises(function() allocator:rewind(request, count) end, "allocator:rewind: count: expected ")
    end
    raises(function() allocator:rewind(request, 1) end, "at most the request's 0 tokens, got 1")
    allocator:free(other)
    raises(function() allocator:rewind(other, 0) end, "allocator:rewind: request: expected a live request")
  end)

  it("keeps count through a long mixed run", function()
    local allocator = pages.allocator { num_pages = 40, page_size = 3, layout = "fragmented", seed = 5, reserved = 1 }
    local random, live = pages.generator(11), {}
    for _ = 1, 3000 do
      local pick = random(5)
      local request = #live > 0 and live[random(#live) + 1]
      if pick == 0 or not request then
        live[#live + 1] = allocator:allocate(random(20))
      elseif pick == 1 then
        allocator:append(request, random(6))
      elseif pick == 2 and #live < 20 then
        live[#live + 1] = allocator:fork(request, random(request.length + 1))
      elseif pick == 4 then
        allocator:rewind(request, random(request.length + 1))
      else
        local i = random(#live) + 1
        allocator:free(live[i])
        table.remove(live, i)
      end
      local holders, used = {}, 0
      for _, r in ipairs(live) do
        assert(#r.pages == (r.length + 2) // 3, "pages of a request")
        for _, page in ipairs(r.pages) do holders[page] = (holders[page] or 0) + 1 end
      end
      for page = 1, 39 do
        assert(allocator:references(page) == (holders[page] or 0), "references of a page")
        if holders[page] then used = used + 1 end
      end
      assert(allocator.num_free == 39 - used, "free pages")
    end
    for _, r in ipairs(live) do allocator:free(r) end
    assert.are.equal(39, allocator.num_free)
  end)

  it("names the parameter in its errors", function()
    raises(function() pages.allocator { page_size = 4 } end,
      "pages.allocator: num_pages: expected an integer >= 1, got nil")
    raises(function() pages.allocator { num_pages = 4, page_size = 0 } end,
      "page_size: expected an integer >= 1, got 0")
    raises(function() pages.allocator { num_pages = 4, page_size = 1.5 } end,
      "page_size: expected an integer >= 1, got 1.5")
    raises(function() pages.allocator { num_pages = 4, page_size = 4, layot = 1 } end,
      "pages.allocator: layot: expected one of")
    raises(function() pages.allocator { num_pages = 4, page_size = 4, layout = "heap" } end,
      "pages.allocator: layout: expected sequential, shuffled, fragmented, ring or a function, got heap")
    raises(function() pages.allocator { num_pages = 4, page_size = 4, reserved = 4 } end,
      "reserved: expected fewer than num_pages")
    local allocator = pages.allocator { num_pages = 4, page_size = 4 }
    raises(function() allocator:allocate(-1) end, "allocator:allocate: length: expected an integer >= 0, got -1")
    raises(function() allocator:fork(allocator:allocate(2), 3) end, "allocator:fork: length: expected at most 2, got 3")
    assert.are.equal(3, allocator.num_free)
  end)
end)

describe("page layouts #quick", function()
  local function order(layout, seed, num_pages)
    num_pages = num_pages or 64
    return pages.allocator({ num_pages = num_pages, page_size = 1, layout = layout,
      seed = seed }):allocate(num_pages).pages
  end

  it("hand out every page once", function()
    for _, layout in ipairs { "sequential", "shuffled", "fragmented", "ring" } do
      for _, n in ipairs { 1, 2, 7, 64 } do assert.are.same(range(0, n - 1), sorted(order(layout, 1, n))) end
    end
  end)

  it("sequential: lowest free page first, freed ones again", function()
    assert.are.same(range(0, 63), order("sequential"))
    local allocator = pages.allocator { num_pages = 8, page_size = 1 }
    local a, b = allocator:allocate(2), allocator:allocate(2)
    allocator:free(a)
    assert.are.same({ 0, 1, 4 }, allocator:allocate(3).pages)
    assert.are.same({ 2, 3 }, b.pages)
  end)

  it("ring: goes on after the last page handed out", function()
    local allocator = pages.allocator { num_pages = 5, page_size = 1, layout = "ring" }
    local a, b = allocator:allocate(2), allocator:allocate(1)
    allocator:free(a)
    assert.are.same({ 3, 4, 0 }, allocator:allocate(3).pages)
    assert.are.same({ 2 }, b.pages)
    assert.are.same({ 1 }, allocator:allocate(1).pages)
  end)

  it("shuffled: no order, the same one for the same seed", function()
    assert.are_not.same(range(0, 63), order("shuffled", 1))
    assert.are.same(order("shuffled", 1), order("shuffled", 1))
    assert.are_not.same(order("shuffled", 1), order("shuffled", 2))
  end)

  it("fragmented: runs of one to three neighbours", function()
    local list, run, longest, runs = order("fragmented", 1, 300), 1, 1, 1
    for i = 2, #list do
      if list[i] == list[i - 1] + 1 then run = run + 1 else run, runs = 1, runs + 1 end
      longest = math.max(longest, run)
    end
    assert.is_true(runs >= 100 - 10, "few enough runs to be short: " .. runs)
    assert.is_true(longest >= 2 and longest <= 9, "runs that meet by chance stay short: " .. longest)
    assert.are_not.same(list, order("fragmented", 2, 300))
  end)

  it("a function: its own order, checked", function()
    assert.are.same({ 2, 0, 1 }, order(function(n) return { n - 1, 0, 1 } end, 0, 3))
    assert.are.same(order("shuffled", 9), order(function(n, random)
      local list = range(0, n - 1)
      for i = n, 2, -1 do
        local j = random(i) + 1
        list[i], list[j] = list[j], list[i]
      end
      return list
    end, 9))
    raises(function() order(function() return { 0, 0, 1 } end, 0, 3) end,
      "layout: expected each page 0..2 once from the layout function, got 0")
    raises(function() order(function() return { 0, 1 } end, 0, 3) end,
      "layout: expected 3 pages from the layout function, got 2")
    raises(function() order(function() return { 0, 1, 3 } end, 0, 3) end, "got 3")
  end)

  it("neither read nor disturb math.random", function()
    math.randomseed(42)
    local expected = { math.random(1 << 30), math.random(1 << 30) }
    math.randomseed(42)
    local first = math.random(1 << 30)
    local list = order("shuffled", 5)
    assert.are.same(expected, { first, math.random(1 << 30) })
    math.randomseed(43)
    assert.are.same(list, order("shuffled", 5))
  end)
end)

describe("a batch #quick", function()
  local function plan(extra)
    local opts = { lengths = { 5, 0, 4, 9 }, page_size = 4, layout = "sequential" }
    for key, value in pairs(extra or {}) do opts[key] = value end
    return pages.plan(opts)
  end

  it("has block tables, lengths, page ranges and slots", function()
    local batch, requests, allocator = plan()
    assert.are.same({ { 0, 1, -1 }, { -1, -1, -1 }, { 2, -1, -1 }, { 3, 4, 5 } }, batch.block_tables)
    assert.are.same({ 5, 0, 4, 9 }, batch.seq_lens)
    assert.are.same({ 0, 2, 2, 3, 6 }, batch.kv_page_indptr)
    assert.are.same({ 0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 }, batch.slot_mapping)
    assert.are.equal(4, #requests)
    assert.are.equal(0, allocator.num_free)
  end)

  it("pads with what points nowhere: slot -1, page -1, length 0, no pages", function()
    local batch = plan { batch_size = 6, max_pages = 4, num_slots = 20 }
    assert.are.same({ -1, -1, -1, -1 }, batch.block_tables[5])
    assert.are.same({ 3, 4, 5, -1 }, batch.block_tables[4])
    assert.are.same({ 5, 0, 4, 9, 0, 0 }, batch.seq_lens)
    assert.are.same({ 0, 2, 2, 3, 6, 6, 6 }, batch.kv_page_indptr)
    assert.are.same({ 20, -1, -1 }, table.move(batch.slot_mapping, 18, 20, 1, {}))
    assert.are.equal(20, #batch.slot_mapping)
  end)

  it("gives the slots of the last tokens alone, for a decode step", function()
    local allocator = pages.allocator { num_pages = 8, page_size = 4, layout = "ring" }
    local a, b = allocator:allocate(3), allocator:allocate(6)
    local batch = allocator:batch({ b, a }, { batch_size = 4, new_tokens = 1, num_slots = 4 })
    assert.are.same({ 2 * 4 + 1, 2, -1, -1 }, batch.slot_mapping)
    raises(function() allocator:batch({ a }, { new_tokens = 4 }) end,
      "new_tokens: expected at most the request's 3, got 4")
  end)

  it("refuses to be smaller than what it holds", function()
    raises(function() plan { batch_size = 3 } end, "allocator:batch: batch_size: expected an integer >= 4, got 3")
    raises(function() plan { max_pages = 2 } end, "allocator:batch: max_pages: expected an integer >= 3, got 2")
    raises(function() plan { num_slots = 17 } end, "allocator:batch: num_slots: expected an integer >= 18, got 17")
  end)

  it("says so when the pool is too small", function()
    assert.are.same({ nil, "not enough pages: 3 needed, 2 free" }, { plan { num_pages = 5 } })
  end)

  it("becomes tensors under the same names, also when it is empty", function()
    local batch = plan { batch_size = 5 }
    local t = pages.tensors(batch)
    assert.are.same(batch.block_tables, t.block_tables:totable())
    assert.are.same({ 5, 3 }, t.block_tables.shape)
    assert.are.same({ "int32", "int32", "int32", "int64" },
      { t.block_tables.dtype, t.seq_lens.dtype, t.kv_page_indptr.dtype, t.slot_mapping.dtype })
    assert.are.same(batch.seq_lens, t.seq_lens:totable())
    assert.are.same(batch.kv_page_indptr, t.kv_page_indptr:totable())
    assert.are.same(batch.slot_mapping, t.slot_mapping:totable())
    t = pages.tensors(batch, { block_tables = "int64", slot_mapping = "int32" })
    assert.are.same({ "int64", "int32" }, { t.block_tables.dtype, t.slot_mapping.dtype })
    assert.are.same(batch.block_tables, t.block_tables:totable())
    t = pages.tensors(pages.plan { lengths = {}, page_size = 4 })
    assert.are.same({ { 0, 0 }, { 0 }, { 1 }, { 0 } },
      { t.block_tables.shape, t.seq_lens.shape, t.kv_page_indptr.shape, t.slot_mapping.shape })
  end)
end)

describe("pools #quick", function()
  it("have the shapes of both layouts", function()
    for layout, shapes in pairs {
      NHD = { { 3, 4, 2, 32 }, { 3, 4, 2, 24 }, { 3, 4, 2, 4 }, { 3, 4, 2, 3 } },
      HND = { { 3, 2, 4, 32 }, { 3, 2, 4, 24 }, { 3, 2, 4, 4 }, { 3, 2, 4, 3 } },
    } do
      local pool = pages.caches {
        num_pages = 3, page_size = 4, num_kv_heads = 2, head_dim = 64, v_head_dim = 48, kv_layout = layout,
      }
      assert.are.same(shapes, { pool.paged_kv_cache[1].shape, pool.paged_kv_cache[2].shape,
        pool.kv_cache_sf[1].shape, pool.kv_cache_sf[2].shape })
      assert.are.equal("uint8", pool.paged_kv_cache[1].dtype)
      assert.are.equal("float8_e4m3fn", pool.kv_cache_sf[2].dtype)
      assert.are.equal(layout, pool.kv_layout)
      for _, t in ipairs { pool.paged_kv_cache[1], pool.kv_cache_sf[2] } do assert.is_true(t:is_contiguous()) end
    end
  end)

  it("keep bytes between their pages that an append leaves alone", function()
    local nibble = require "nibble"
    for _, layout in ipairs { "NHD", "HND" } do
      local pool = pages.caches {
        num_pages = 5, page_size = 4, num_kv_heads = 2, head_dim = 32, kv_layout = layout, page_padding = 24,
        sf_page_padding = 8, fill = 0xA5,
      }
      assert.are.equal(4 * 2 * 16 + 24, pool.paged_kv_cache[1]:stride(1))
      assert.are.equal(4 * 2 * 2 + 8, pool.kv_cache_sf[2]:stride(1))
      local rows = nibble.randn(20, 2, 32, { dtype = "bfloat16", seed = 1 })
      nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows, nibble.arange(20),
        pool.paged_kv_cache, pool.kv_cache_sf, 1.0, 1.0, layout)
      for i, t in ipairs { pool.paged_kv_cache[1], pool.paged_kv_cache[2], pool.kv_cache_sf[1], pool.kv_cache_sf[2] } do
        local storage, padding = pool.storage[i], i <= 2 and 24 or 8
        local size = storage.shape[2]
        assert.are.equal(("\xA5"):rep(5 * padding), storage:narrow(2, size - padding + 1, padding):bytes())
        -- The view and the storage are the same memory.
        assert.are.equal(t:bytes(), storage:narrow(2, 1, size - padding):bytes())
        assert.are_not.equal(("\xA5"):rep(#t:bytes()), t:bytes())
      end
    end
  end)

  it("have pages copied, data and scales of K and V, entry by entry, also in a graph", function()
    local nibble = require "nibble"
    for _, layout in ipairs { "NHD", "HND" } do
      local function new(seed)
        local pool = pages.caches { num_pages = 4, page_size = 4, num_kv_heads = 2, head_dim = 32, v_head_dim = 16,
          kv_layout = layout, page_padding = 48, sf_page_padding = 3 }
        for i, storage in ipairs(pool.storage) do
          local shape = storage.shape
          storage:copy(nibble.randint(0, 256, { shape[1], shape[2] }, { dtype = "uint8", seed = seed + i }))
        end
        return pool
      end
      local copies = { { source = 2, destination = 0, entries = 3 }, { source = 0, destination = 3, entries = 1 } }
      local before, eager, replayed = new(5), new(5), new(5)
      pages.copy(eager, copies)
      local graph = nibble.stream():capture(function() pages.copy(replayed, copies) end)
      for i = 1, 4 do assert.is_true(replayed.storage[i]:equal(before.storage[i])) end
      graph:replay()
      for i = 1, 4 do assert.is_true(replayed.storage[i]:equal(eager.storage[i])) end

      for _, name in ipairs { "paged_kv_cache", "kv_cache_sf" } do
        for kv = 1, 2 do
          local old, new_one = before[name][kv], eager[name][kv]
          local function bytes(t, page, entry)
            t = t:select(1, page + 1)
            return (layout == "HND" and t:select(2, entry + 1) or t:select(1, entry + 1)):bytes()
          end
          for page = 0, 3 do
            for entry = 0, 3 do
              local source = page == 0 and entry < 3 and 2 or page == 3 and entry < 1 and 2 or page
              assert.are.equal(bytes(old, source, entry), bytes(new_one, page, entry))
            end
          end
        end
      end
      -- Nothing between the pages.
      for i, storage in ipairs(before.storage) do
        local size = storage.shape[2]
        local padding = i <= 2 and 48 or 3
        assert.is_true(storage:narrow(2, size - padding + 1,
          padding):equal(eager.storage[i]:narrow(2, size - padding + 1, padding)))
      end
    end
    raises(function() pages.copy({}, "not enough pages") end,
      "pages.copy: copies: expected a list of copies, got not enough")
  end)

  it("refuse what is no shape", function()
    local function caches(key, value)
      local opts = { num_pages = 3, page_size = 4, num_kv_heads = 2, head_dim = 64 }
      opts[key] = value
      return function() pages.caches(opts) end
    end
    raises(caches("head_dim", 40), "pages.caches: head_dim: expected a multiple of 16, got 40")
    raises(caches("kv_layout", "hnd"), 'pages.caches: kv_layout: expected "NHD" or "HND", got hnd')
    raises(caches("page_padding", -1), "pages.caches: page_padding: expected an integer >= 0, got -1")
    raises(caches("heads", 2), "pages.caches: heads: expected one of")
  end)
end)
