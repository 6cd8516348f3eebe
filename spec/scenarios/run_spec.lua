-- What a scenario's functions get: nibble.run, nibble.kv, and the ledger behind them.
local nibble = require "nibble"
local ledger = require "nibble.ledger"
local reference = require "nibble.reference"
local scenario = require "nibble.scenario"

local device = assert(nibble.device())

-- Runs functions as a scenario's, for `steps` steps.
local function attempt(def, opts)
  def.title, def.steps, def.parameters, def.name = "a spec's", { 4 }, {}, "spec"
  def.setup, def.step = def.setup or function() end, def.step or function() end
  opts = opts or {}
  opts.p, opts.device, opts.seed, opts.steps = {}, device, opts.seed or 1, opts.steps or 4
  return scenario.attempt(def, opts)
end

local function small(run, changes)
  local opts = { num_pages = 12, page_size = 4, num_kv_heads = 1, head_dim = 32, batch = 2, max_len = 16 }
  for key, value in pairs(changes or {}) do opts[key] = value end
  return run:cache(opts)
end

local function fails(fn, message)
  local outcome = attempt { step = fn }
  assert.is_false(outcome.ok)
  assert.are.equal("error", outcome.kind)
  assert.is_truthy(outcome.message:find(message, 1, true), outcome.message)
end

describe("a scenario's cache #quick", function()
  it("names what is wrong with its options and uses", function()
    for message, changes in pairs {
      ["run:cache: colour: expected one of name num_pages "] = { colour = "red" },
      ["run:cache: page_size: expected an integer >= 1, got false"] = { page_size = false },
      ["run:cache: head_dim: expected an integer >= 1, got 16.0"] = { head_dim = 16.0 },
      ["run:cache: batch: expected an integer >= 1, got 0"] = { batch = 0 },
      ["run:cache: max_len: expected an integer >= 1, got x"] = { max_len = "x" },
      ["pages.caches: head_dim: expected a multiple of 16"] = { head_dim = 40, v_head_dim = 32 },
      ["pages.allocator: layout: expected sequential"] = { page_layout = "heap" },
    } do
      fails(function(run) small(run, changes) end, message)
    end
    fails(function(run)
      local cache = small(run)
      cache:admit(3)
      cache:load()
    end, "cache:load: rows: expected at least the 3 waiting tokens (flush appends them without a graph), got 2")
    for message, step in pairs {
      ["cache:load: max_len: expected at least the 17 tokens of request 1, got 16"] = function(cache)
        cache:extend(cache.live[1], 16)
      end,
      ["cache:load: batch: expected at least the 3 requests, got 2"] = function(cache)
        cache:admit(0)
        cache:admit(0)
      end,
      ["cache:admit: what: expected a number of tokens or a list of tokens, got -1"] =
        function(cache) cache:admit(-1) end,
      ["cache:admit: what: expected a number of tokens or a list of tokens"] = function(cache) cache:admit() end,
      ["cache:extend: what: expected tokens 0..63 (rows of the source), got 64"] = function(cache)
        cache:extend(cache.live[1], { 0, 64 })
      end,
      ["allocator:free: request: expected a live request, got one that was freed"] = function(cache)
        local request = cache:admit(1)
        cache:free(request)
        cache:free(request)
      end,
      ["random: n: expected an integer >= 1, got 0"] = function(cache) cache.run.random(0) end,
    } do
      fails(function(run)
        local cache = small(run)
        cache:admit(1)
        step(cache)
        cache:flush()
        cache:load()
      end, message)
    end
    fails(function(run)
      local cache = small(run)
      cache:extend(cache:fork((cache:admit(3))), 1)
    end, "cache:copy_page: source: expected a written page")
    fails(function(run) run:graph("x", function() end, "again") end,
      'run:graph: how: expected "update", "capture" or nil, got again')
  end)

  it("says that there are not enough pages, and has changed nothing", function()
    local outcome = attempt {
      setup = function(run) run.state.cache = small(run) end,
      step = function(run)
        local cache = run.state.cache
        if run.step == 1 then run.state.request = assert(cache:admit(40)) end
        local refused = table.pack(cache:admit(8))
        run:expect(refused.n == 2 and refused[1] == nil and refused[2]:find("not enough pages: 2 needed, 1 free"),
          "admitted")
        local grown, message = cache:extend(run.state.request, 5)
        run:expect(grown == false and message:find("not enough pages"), "extended")
        run:expect(#cache.live == 1 and #run.state.request.text == 40 and run.state.request.length == 40, "changed")
        cache:flush()
      end,
    }
    assert.is_true(outcome.ok, outcome.message)
  end)

  it("keeps a request's text through forks, rewinds and drops", function()
    local outcome = attempt({
      step = function(run)
        local cache = small(run)
        local request = cache:admit { 1, 2, 3, 4, 5, 6 }
        cache:flush()
        local child = cache:fork(request, 5)
        cache:extend(child, { 9, 8 })
        cache:flush()
        cache:rewind(request, 2)
        cache:drop(child, 1)
        assert.are.same({ 1, 2, 3, 4 }, request.text)
        assert.are.same({ 5, 9, 8 }, child.text)
        assert.are.same({ { 1, 2 }, { 4, 3 } }, { { request.id, child.id }, { request.length, child.length } })
        cache:free(request)
        assert.are.same({ child }, cache.live)
      end,
    }, { steps = 1 })
    assert.is_true(outcome.ok, outcome.message)
  end)

  it("knows what an append, a dequantization and an E4M3 copy make of each token", function()
    local source = nibble.randn(6, 2, 64, { dtype = "bfloat16", seed = 3, device = "cpu" })
    local rows = ledger.rows(source, 0.01, true)
    for token = 0, 5 do
      local codes, scales = {}, {}
      for head = 0, 1 do
        for block = 0, 3 do
          local at, numbers = ((token * 2 + head) * 4 + block) * 16, {}
          for i = 1, 16 do numbers[i] = source:view(-1)[at + i] end
          local scale, c = reference.quantize_block(numbers, reference.f32(0.01))
          scales[#scales + 1] = string.char(scale)
          for i = 1, 16, 2 do codes[#codes + 1] = string.char(c[i] | c[i + 1] << 4) end
        end
      end
      assert.are.equal(table.concat(codes), rows[token].data[0] .. rows[token].data[1])
      assert.are.equal(table.concat(scales), rows[token].sf[0] .. rows[token].sf[1])
      assert.are.equal(2 * 64 * 2, #rows[token].out)
      assert.are.equal(64, #rows[token].fp8[1])
    end
    assert.is_nil(rows[6])
  end)
end)

describe("a run #quick", function()
  it("has the same chances with graphs and without, and others with another seed", function()
    local function chances(seed)
      local seen = { {}, {} }
      attempt({ step = function(run)
        local list = seen[run.eager and 1 or 2]
        list[#list + 1] = run.random(1 << 40)
        list[#list + 1] = run:randn({ 2 }, { dtype = "float32" }):bytes()
      end }, { seed = seed })
      assert.are.equal(8, #seen[1])
      assert.are.same(seen[1], seen[2])
      return seen[1]
    end
    assert.are.same(chances(5), chances(5))
    assert.are_not.same(chances(5), chances(6))
  end)

  it("captures once for a key, updates and captures again when told, replays each time", function()
    local calls = 0
    local outcome = attempt({
      setup = function(run) run.state.x = nibble.zeros(4, { device = device }) end,
      step = function(run)
        local how = run.step == 4 and "update" or run.step == 6 and "capture" or nil
        run:graph(run.step % 2, function()
          if not run.eager then calls = calls + 1 end
          run.state.x:fill(run.step)
        end, how)
        run.state.last = run.state.x:totable()[1]
      end,
      check = function(run)
        local expected = run.step % 2 == 1 and 1 or ({ 2, 2, 4, 4, 6, 6 })[run.step]
        run:expect(run.state.last == expected, "step %d: %g", run.step, run.state.last)
      end,
    }, { steps = 6 })
    assert.is_true(outcome.ok, outcome.message)
    assert.are.equal(4, calls)
    local even = outcome.run.graphs[0]
    assert.are.same({ 2, 1, 0, 3 }, { even.captures, even.updates, even.rebuilt, even.replays })
  end)

  it("keeps a graph whose update fails, and forgets one whose capture does", function()
    local outcome = attempt {
      setup = function(run)
        run.state.x = nibble.zeros(4, { device = device })
        run.state.image = run:watch("x", run.state.x)
      end,
      step = function(run)
        if run.eager then
          run.state.x:fill(1)
          return
        end
        local s, x = run.state, run.state.x
        local function work()
          x:fill(1)
          run:effect({ op = "fill" }, function() s.image:set(reference.from_values({ 1, 1, 1, 1 }, "float32")) end)
        end
        local function broken()
          work()
          x:fill(2)
          error("broken", 0)
        end
        assert.is_false(pcall(run.graph, run, "bad", broken))
        run:graph("good", work)
        assert.is_false(pcall(run.graph, run, "good", broken, "update"))
        assert.is_false(pcall(run.graph, run, "good", broken, "capture"))
        run:graph("good", work)
        assert.is_nil(run.graphs.bad)
      end,
    }
    assert.is_true(outcome.ok, outcome.message)
    assert.are.equal(1, outcome.run.graphs.good.captures)
    assert.are.equal(8, outcome.run.graphs.good.replays)
  end)

  it("compares shapes, dtypes and bytes", function()
    local function difference(fn)
      local outcome = attempt { check = fn }
      assert.are.same({ false, "check" }, { outcome.ok, outcome.kind })
      return outcome.message
    end
    local x = nibble.tensor({ { 1, 2 }, { 3, 4 } }, { dtype = "float32" })
    local function against(list, shape, dtype)
      return function(run) run:same("x", x, reference.from_values(list, dtype, shape)) end
    end
    assert.is_true(attempt({ check = against({ 1, 2, 3, 4 }, { 2, 2 }, "float32") }).ok)
    assert.matches("^step 1: x: element %[1, 0%]: got 0x40, the reference has 0xC0 %(byte 11 of the tensor%)$",
      difference(against({ 1, 2, -3, 4 }, { 2, 2 }, "float32")))
    assert.matches("x: got float32 {2, 2}, expected float32 {4}", difference(against({ 1, 2, 3, 4 }, { 4 }, "float32")),
      1, true)
    assert.matches("expected int32 {2, 2}", difference(against({ 1, 2, 3, 4 }, { 2, 2 }, "int32")), 1, true)
    assert.matches("^step 1: no 5$", difference(function(run) run:expect(false, "no %d", 5) end))
  end)

  it("records what a report needs", function()
    local def = assert(scenario.load("hand_over"))
    local outcome = scenario.attempt(def, { p = scenario.values(def), device = device, seed = 1, steps = 5,
      snapshots = true })
    assert.is_true(outcome.ok, outcome.message)
    local record = outcome.run:record(outcome.eager)
    local names = {}
    for _, series in ipairs(record.series) do
      names[series.name] = series.values
      assert.are.equal(5, #series.values)
    end
    assert.are.same({ 1, 2, 3, 3, 3 }, names["decode: requests"])
    assert.are.same({ 0, 0, 0, 0, 0 }, names["prefill: pages in use"])
    local decode = record.caches[2]
    assert.are.same({ "decode", 4, "HND", 5 }, { decode.name, decode.page_size, decode.kv_layout, #decode.snapshots })
    local last, held = decode.snapshots[5], 0
    assert.are.equal(decode.num_pages, #last.references)
    assert.are.equal(-1, last.references[1])
    for _, request in ipairs(last.requests) do
      held = held + #request.pages
      for _, page in ipairs(request.pages) do assert.are.equal(1, last.references[page + 1]) end
    end
    assert.are.equal(names["decode: pages in use"][5], held)
    assert.are.same({ "step", 5, 1 }, { record.graphs[1].key, record.graphs[1].replays, record.graphs[1].captures })
    assert.matches("^digraph", record.graphs[1].dot)
    local ops = {}
    for _, op in ipairs(record.ops) do ops[op.name] = op.count end
    assert.are.same({ append = 10, dequantize = 5, place = 5 }, ops)
    local errors = require("nibble.errors").measure(outcome.run)
    assert.are.equal(4, #errors.list)
    assert.is_true(errors.fine)
    local sum = 0
    for _, count in ipairs(errors.histogram.counts) do sum = sum + count end
    assert.are.equal(#errors.ratios, sum)
    assert.are.same({ 2, 4 }, { #errors.list[1].heads, #errors.list[1].map.values[1][1] })
  end)
end)
