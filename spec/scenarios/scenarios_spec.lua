-- nibble.scenario: every shipped scenario on its grid, a planted bit in every tensor that they watch, shrinking, the
-- command.
local process = require "spec.support.runtime_process"
local nibble = require "nibble"
local scenario = require "nibble.scenario"

local quote = process.quote
local names = scenario.names()

for _, name in ipairs(names) do scenario.describe(name) end

local function attempt(def, point, plant)
  local p = {}
  for key, value in pairs(point) do if key ~= "steps" then p[key] = value end end
  return scenario.attempt(def, {
    p = scenario.values(def, p), device = assert(nibble.device()), seed = 1, steps = point.steps or def.steps[1],
      plant = plant,
  })
end

-- The first point of a scenario's grid, and few steps: what is watched is compared after each.
local function small(def)
  local point = {}
  for key, value in pairs(scenario.grid(def)[1]) do point[key] = value end
  point.steps = math.max(def.steps.min, math.min(def.steps[1], 4))
  return point
end

describe("a planted bit", function()
  for _, name in ipairs(names) do
    it("in any tensor that scenario " .. name .. " watches is found and named", function()
      local def = assert(scenario.load(name))
      local point = small(def)
      local i, tensors = 0, nil
      repeat
        i = i + 1
        local outcome = attempt(def, point, i)
        tensors = tensors or #outcome.run.watched
        assert.is_false(outcome.ok, name .. ": nothing was found")
        assert.are.equal("check", outcome.kind, outcome.message)
        local found = ("step %d: %s: got 0x"):format((point.steps + 1) // 2, outcome.planted)
        assert.are.equal(found, outcome.message:sub(1, #found))
      until i == tensors
      assert.is_true(tensors >= 1)
      assert.is_true(attempt(def, point).ok)
    end)
  end
end)

-- What a scenario is about, done wrong: it must not pass.
describe("a mistake is found:", function()
  local pages, kv = require "nibble.pages", require "nibble.kv"
  local allocator_class = getmetatable(pages.allocator { num_pages = 1, page_size = 1 })

  local mistakes = {
    { "pages are shared, and never copied", { "prefix_sharing", "beam_search" }, pages, "copy", function()
      return function() end end },
    { "a fork does not hold the pages it shares", { "prefix_sharing", "beam_search" }, allocator_class, "fork",
      function(fork)
      return function(self, request, length)
        local child = fork(self, request, length)
        for _, page in ipairs(child.pages) do self.count[page] = self.count[page] - 1 end
        return child
      end
    end },
    { "padding points to slot 0", { "decode", "chunked_prefill" }, pages, "tensors", function(tensors)
      return function(batch, opts)
        for i, slot in ipairs(batch.slot_mapping) do batch.slot_mapping[i] = math.max(slot, 0) end
        return tensors(batch, opts)
      end
    end },
    { "a batch is padded with slot 0", { "decode", "chunked_prefill" }, allocator_class, "batch", function(batch)
      return function(...)
        local made = batch(...)
        for i, slot in ipairs(made.slot_mapping) do made.slot_mapping[i] = math.max(slot, 0) end
        return made
      end
    end },
    { "tables are padded with page 0", { "decode", "two_streams" }, allocator_class, "batch", function(batch)
      return function(...)
        local made = batch(...)
        for _, row in ipairs(made.block_tables) do
          for j, page in ipairs(row) do row[j] = math.max(page, 0) end
        end
        return made
      end
    end },
    { "a shared page of a full pool is written", { "beam_search" }, allocator_class, "append", function(append)
      return function(self, request, count)
        local slots, copies = append(self, request, count)
        if slots or request.length % self.page_size == 0 then return slots, copies end
        request.length = request.length + count
        return self:slots(request, request.length - count), {}
      end
    end },
    { "a graph has the scales that were there when it was captured", { "decode", "padded_pages" }, kv, "hide_scales",
      function(hide)
      return function(self, hidden)
        for _, layer in ipairs(self.layers) do
          if not hidden then layer.k_scale, layer.v_scale = table.unpack(layer.own_scales) end
        end
        hide(self, hidden)
        for _, layer in ipairs(self.layers) do
          layer.own_scales = { layer.k_scale, layer.v_scale }
          if hidden then layer.k_scale, layer.v_scale = layer.k_scale:clone(), layer.v_scale:clone() end
        end
      end
    end },
    { "heads are taken for entries", { "padded_pages" }, kv, "append", function(append)
      return function(self, rows)
        local layout = self.kv_layout
        self.kv_layout = layout == "HND" and "NHD" or "HND"
        append(self, rows)
        self.kv_layout = layout
      end
    end },
    { "V of a stacked cache begins a byte late", { "padded_pages" }, kv, "new", function(new)
      return function(...)
        local self = new(...)
        local stacked = self.layers[1].pool.stacked
        local strides = stacked.paged_kv_cache:stride()
        strides[2] = strides[2] + 1
        stacked.paged_kv_cache = stacked.paged_kv_cache:as_strided(stacked.paged_kv_cache.shape, strides)
        return self
      end
    end, { form = "stacked" } },
    { "lengths are one short", { "decode", "sliding_window", "eviction", "hand_over" }, pages, "tensors",
      function(tensors)
      return function(batch, opts)
        for i, length in ipairs(batch.seq_lens) do batch.seq_lens[i] = math.max(length - 1, 0) end
        return tensors(batch, opts)
      end
    end },
    { "tables are those of the step before", { "eviction", "sliding_window", "speculative", "hand_over" }, kv, "load",
      function(load)
      return function(self, requests)
        local before = self.block_tables:clone()
        load(self, requests)
        self.block_tables:copy(before)
      end
    end },
    { "rejected drafts stay", { "speculative" }, allocator_class, "rewind", function() return function() end end },
    { "the window does not slide", { "sliding_window" }, kv, "drop", function() return function() end end },
    { "a graph keeps its first shape", { "changing_shapes" }, require("nibble.run"), "graph", function(graph)
      return function(self, key, fn) return graph(self, key, fn) end
    end },
    { "tokens are appended in another order",
      { "chunked_prefill", "two_streams", "padded_pages", "two_head_dims", "prefix_sharing" },
      kv, "load", function(load)
        return function(self, requests)
          load(self, requests)
          local slots = self.slot_mapping:totable()
          slots[1], slots[2] = slots[2], slots[1]
          self.slot_mapping:copy(nibble.tensor(slots, { dtype = "int64", device = "cpu" }))
        end
      end },
  }
  for _, mistake in ipairs(mistakes) do
    local what, victims, where, name, spoil, point = table.unpack(mistake)
    point = point or {}
    point.steps = 16
    for _, victim in ipairs(victims) do
      it(what .. " (" .. victim .. ")", function()
        local whole = where[name]
        where[name] = spoil(whole)
        finally(function() where[name] = whole end)
        local outcome = attempt(assert(scenario.load(victim)), point)
        assert.is_false(outcome.ok)
        where[name] = whole
        assert.is_true(attempt(assert(scenario.load(victim)), point).ok)
      end)
    end
  end
end)

describe("random tokens", function()
  it("have block scales of every kind: 0, subnormal and normal E4M3 numbers", function()
    local outcome = attempt(assert(scenario.load("padded_pages")), { steps = 1 })
    assert.is_true(outcome.ok, outcome.message)
    local rows, seen = outcome.run.caches[1].layers[1].images.rows, {}
    for i = 1, 2 do
      for token = 0, 63 do
        for _, bytes in pairs(rows[i][token].sf) do
          for _, byte in ipairs { bytes:byte(1, -1) } do seen[byte] = true end
        end
      end
    end
    for byte = 0, 0x40 do assert.is_true(seen[byte], "no scale is " .. byte) end
  end)
end)

describe("nibble scenario", function()
  local folder, command

  setup(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    command = process.run("realpath " .. quote(process.command())).stdout:gsub("\n$", "")
  end)
  teardown(function() process.run("rm -rf " .. quote(folder)) end)

  local function write(file, text)
    local f = assert(io.open(folder .. "/" .. file, "w"))
    f:write(text)
    f:close()
  end

  local function run(words)
    return process.run(("cd %s && LC_ALL=C.UTF-8 %s scenario %s"):format(quote(folder), quote(command), words))
  end

  -- Forgets a token as soon as a request has three pages: wrong from page_size * 2 + 1 steps on, whatever the rest is.
  local FORGETFUL = [[
    return {
      title = "forgets",
      parameters = { page_size = { 8, min = 1 }, heads = { 4, min = 1 }, layout = { "NHD", "HND" }, twice = { false } },
      steps = 40,
      setup = function(run)
        run.state.cache = run:cache {
          num_pages = 60, page_size = run.p.page_size, num_kv_heads = run.p.heads, head_dim = 32, batch = 1, max_len = 50,
          kv_layout = run.p.layout,
        }
        run.state.request = assert(run.state.cache:admit(0))
      end,
      step = function(run)
        local cache, request = run.state.cache, run.state.request
        cache:extend(request, 1)
        if #request.pages > 2 then cache.pending = {} end
        cache:load()
      end,
      captured = function(run)
        run.state.cache:append()
        run.state.cache:dequantize()
      end,
    }]]

  it("shrinks a failure to the smallest parameters, and says the line that repeats it", function()
    write("forgetful.lua", FORGETFUL)
    local result = run("./forgetful.lua --layout HND --twice --seed 7")
    assert.are.same({ 1, "" }, { result.status, result.stderr })
    assert.matches("\nFAILED at step 17: K dequantized: row 0 %(request 1%), position 16, head 0, "
      .. "dimension %d+: got 0x", result.stdout)
    assert.matches("\nsmallest: heads = 1, layout = NHD, page_size = 1, twice = false, steps = 3, seed = 7\n",
      result.stdout)
    local message = result.stdout:match("\n  fails at ([^\n]+)\n")
    assert.matches("^step 3: K dequantized: row 0 %(request 1%), position 2, head 0", message)
    local line = result.stdout:match("\nrepeat:   ([^\n]+)\n")
    local again = process.run(("cd %s && %s"):format(quote(folder), line))
    assert.are.equal(1, again.status, line)
    assert.is_truthy(again.stdout:find("FAILED at " .. message, 1, true), again.stdout)
  end)

  it("shrinks an error of the script as such, and shows where it is", function()
    write("raises.lua", [[
      return {
        title = "raises", parameters = { size = { 100, min = 1, max = 1000, multiple = 4 } }, steps = 9,
        setup = function() end,
        step = function(run) if run.p.size > 40 and run.step == 3 then error("too large") end end,
      }]])
    local result = run("./raises.lua")
    assert.are.same({ 1, "" }, { result.status, result.stderr })
    assert.matches("\nsmallest: size = 44, steps = 3, seed = 1\n", result.stdout)
    assert.matches("raises.lua:4: too large", result.stdout)
    assert.matches("stack traceback", result.stdout)
  end)

  it("does not shrink what does not fit into memory", function()
    write("large.lua", [[
      local nibble = require "nibble"
      return {
        title = "large", parameters = { size = { 48, min = 1, max = 60 } }, steps = 1,
        setup = function() end,
        step = function(run)
          if run.p.size < 48 then error("it was shrunk") end
          nibble.zeros(1 << run.p.size, { device = "cpu" })
        end,
      }]])
    local result = run("./large.lua --device cpu")
    local said = result.stderr:gsub("==%d+==WARNING: AddressSanitizer failed to allocate[^\n]*\n", "")
    assert.are.same({ 1, "" }, { result.status, said })
    assert.matches(
      "\nFAILED at step 1: [^\n]*zeros: out of memory: [^\n]*\nrepeat:   [^\n]* scenario %./large%.lua %-%-seed 1 ",
      result.stdout)
  end)

  it("says so when Lua has no memory left", function() -- no message handler is called then
    if process.sanitized() then return pending("AddressSanitizer needs more address space than the limit leaves") end
    write("full.lua", [[
      return { title = "full", steps = 1, setup = function() end, step = function() return (("x"):rep(1 << 30)) end }]])
    local result = process.run(("cd %s && ulimit -v 1000000 && NIBBLE_DEVICE=cpu %s scenario ./full.lua"):format(
      quote(folder),
      quote(command)))
    assert.are.same({ 1, "" }, { result.status, result.stderr })
    assert.matches("\nFAILED at step 1: not enough memory\nrepeat:   ", result.stdout)
  end)

  it("finds what differs between the graphs and the eager run", function()
    write("stale.lua", [[
      local nibble = require "nibble"
      return {
        title = "a graph that reads a tensor which the script replaced", steps = 3,
        setup = function(run)
          run.state.y = nibble.zeros(4, { device = run.device })
          local image = run:watch("y", run.state.y)
          run.keep = function() if image then image:set(run.state.y:bytes()) end end -- no ledger of its own
        end,
        step = function(run) run.state.x = run:randn({ 4 }, { dtype = "float32" }) end,
        captured = function(run)
          run.state.y:copy(run.state.x)
          run:effect({ op = "copy" }, function() run.keep() end)
        end,
      }]])
    local result = run("./stale.lua --seed 3")
    assert.are.same({ 1, "" }, { result.status, result.stderr })
    assert.matches("FAILED at step 2: y: element %[%d%]: got 0x%x+, the eager run has 0x", result.stdout)
  end)

  it("--plant is found, and named", function()
    for _, words in ipairs { "decode --steps 10",
      "decode --layout NHD --random --head-dim 80 --tokens 60 --steps 9 --page-size 5" } do
      local result = run(words .. " --plant")
      assert.are.same({ 0, "" }, { result.status, result.stderr })
      local step, place = result.stdout:match("\nplanted   after step (%d+): ([^\n]+)\n")
      local found = ("\nok: the check found the planted bit at step %s: %s: got 0x"):format(step, place)
      assert.is_truthy(result.stdout:find(found, 1, true), result.stdout)
      assert.is_nil(result.stdout:find("FAILED", 1, true))
    end
  end)

  it("--plant fails when the bit is not found, or something else is wrong", function()
    write("blind.lua", [[
      local nibble = require "nibble"
      return {
        title = "blind", steps = 4, parameters = { wrong = { false } },
        setup = function(run)
          local x = nibble.zeros(4, { device = run.device })
          run:watch("x", x)
          run.compare = function() if run.p.wrong then error("something else", 0) end end
        end,
        step = function() end,
      }]])
    local result = run("./blind.lua --plant")
    assert.are.same({ 1, "" }, { result.status, result.stderr })
    assert.matches("\nFAILED: the check did not find the planted bit\n$", result.stdout)
    result = run("./blind.lua --plant --wrong")
    assert.are.same({ 1, "" }, { result.status, result.stderr })
    assert.matches("\nFAILED at step 0: something else\n", result.stdout)
  end)

  it("says which line of the script an error came from, whoever raised it", function()
    write("deep.lua", [[
      return {
        title = "deep", steps = 2, parameters = { where = { "setup", "step", "captured", "check" } },
        setup = function(run)
          run.state.cache = run:cache {
            num_pages = 4, page_size = 4, num_kv_heads = 1, head_dim = run.p.where == "setup" and 24 or 16, batch = 1, max_len = 8 }
        end,
        step = function(run)
          run.state.cache:admit(run.p.where == "step" and {
            64 } or 0)
          run.state.cache:flush()
          for _, request in ipairs(run.state.cache.live) do run.state.cache:free(request) end
        end,
        captured = function(run)
          if run.p.where == "captured" then
            run.state.cache.seq_lens:narrow(1, 2, 1)
          end
        end,
        check = function(run)
          return run.p.where == "check" and
            run.p.nothing.there
        end,
      }]])
    for where, expected in pairs {
      setup = "step 0: ./deep.lua:4: pages.caches: head_dim: expected a multiple of 16, got 24",
      step = "step 1: ./deep.lua:8: cache:admit: what: expected tokens 0..63 (rows of the source), got 64",
      captured = "step 1: ./deep.lua:15: tensor:narrow: ",
        check = "step 1: ./deep.lua:20: attempt to index a nil value",
    } do
      local result = run("./deep.lua --where " .. where)
      assert.are.same({ 1, "" }, { result.status, result.stderr })
      assert.is_truthy(result.stdout:find("\nFAILED at " .. expected, 1, true), result.stdout)
      local trace = result.stdout:match("\nstack traceback:\n(.*)")
      assert.matches("%./deep%.lua:%d+: in function <", trace)
      assert.is_nil(trace:find("xpcall", 1, true) or trace:find("scenario_command", 1, true), trace)
    end
  end)

  it("--report and --trace tell about a folder that is not there before they work", function()
    for _, option in ipairs { "--report", "--trace" } do
      local result = run("decode " .. option .. " /nowhere/x")
      assert.are.same({ 2, "" }, { result.status, result.stdout })
      assert.matches("^nibble scenario: " .. option:gsub("%-", "%%-") .. ": [^\n]*/nowhere/x[^\n]*\n$", result.stderr)
    end
  end)

  it("--report leaves nothing of a run that ends before, and a pipe gets it whole", function()
    write("ends.lua", [[
      return { title = "ends", parameters = { at = { "exit", "end" } }, steps = 1, setup = function() end,
        step = function(run) if run.p.at == "exit" then os.exit(3) end end }]])
    assert.are.equal(3, run("./ends.lua --report ends.html").status)
    assert.are.equal("", process.run("ls " .. quote(folder) .. " | grep ends.html").stdout)
    write("ends.html", "the last one's")
    assert.are.equal(3, run("./ends.lua --report ends.html").status)
    assert.are.equal("the last one's", process.read(folder .. "/ends.html"))
    local piped = process.run(
      ("cd %s && mkfifo pipe && { timeout 60 cat pipe >got & } && timeout 60 %s scenario ./ends.lua --at end "
      .. "--report pipe; wait"):format(quote(folder), quote(command)))
    assert.are.same({ 0, "" }, { piped.status, piped.stderr })
    assert.matches("</html>%s*$", process.read(folder .. "/got"))
  end)

  it("list names every scenario, its parameters, defaults and ranges #quick", function()
    local result = run("list")
    assert.are.same({ 0, "" }, { result.status, result.stderr })
    for _, name in ipairs(names) do
      local def = scenario.load(name)
      assert.is_truthy(result.stdout:find(name .. ": " .. def.title .. "\n", 1, true), name)
      for _, parameter in ipairs(scenario.parameters(def)) do
        assert.is_truthy(result.stdout:find("\n  --" .. parameter:gsub("_", "-") .. " ", 1, true), parameter)
        assert.is_string(def.parameters[parameter].help, name .. ": " .. parameter)
      end
    end
    assert.matches("\n  %-%-page%-layout +fragmented +fragmented or sequential or shuffled or ring +[^\n]+\n",
      result.stdout)
    assert.matches("\n  %-%-head%-dim +64 +a multiple of 16 >= 16 ", result.stdout)
  end)

  it("prints help #quick", function()
    local result = run("--help")
    assert.are.same({ 0, "" }, { result.status, result.stderr })
    for _, word in ipairs { "list", "device", "steps", "seed", "report", "check", "plant" } do
      assert.matches(word, result.stdout)
    end
    assert.are.equal(2, run("").status)
    assert.matches("%-%-page%-size", run("decode --help").stdout)
  end)

  it("says in one line what is wrong, and returns 2 #quick", function()
    write("no_table.lua", "return 5")
    write("no_lua.lua", "return return")
    write("no_field.lua", "return { title = 'x', steps = 1, setup = print, stpe = print }")
    write("no_step.lua", "return { title = 'x', steps = 1, setup = print }")
    local function parameters(text)
      return "return { title = 'x', steps = 1, setup = print, step = print, parameters = { " .. text .. " } }"
    end
    write("no_default.lua", parameters "a = {}")
    write("no_range.lua", parameters "a = { 3, minimum = 1 }")
    write("no_type.lua", parameters "a = { 'x', 3 }")
    write("out_of_range.lua", parameters "a = { 3, min = 4 }")
    write("taken.lua", parameters "seed = { 3 }")
    write("no_name.lua", parameters "['a-b'] = { 3 }")
    for words, message in pairs {
      ["nonsense"] = "there is no scenario nonsense", ["./nowhere.lua"] = "the file cannot be read",
      ["list all"] = "got all",
      ["--steps 4"] = "a scenario's name before --steps", ["decode steps"] = "unknown option steps",
      ["decode --frobnicate"] = "unknown option --frobnicate", ["decode --steps"] = "--steps needs a value",
      ["decode --steps ten"] = "--steps: expected an integer >= 1, got ten", ["decode --steps=0"] = ">= 1, got 0",
      ["decode --steps 1e3"] = "got 1e3", ["decode --steps 999"] = "fewer than the 320 tokens",
      ["decode --layout HDN"] = "--layout: expected HND or NHD, got HDN",
        ["decode --plant=yes"] = "--plant takes no value",
      ["decode --heads 4"] = "--heads needs --random",
        ["decode --random --head-dim 40"] = "a multiple of 16 >= 16, got 40",
      ["decode --device abacus"] = '--device: there is no device "abacus"',
      ["./no_table.lua"] = "expected a file that returns a table, got number", ["./no_lua.lua"] = "no_lua.lua:1:",
      ["./no_field.lua"] = "stpe: expected a known field, got function",
        ["./no_step.lua"] = "the field step is missing",
      ["./no_default.lua"] = "a: expected a table with a default",
        ["./no_range.lua"] = "a: expected min, max, multiple",
      ["./no_type.lua"] = "a: expected min, max, multiple, help, any and choices, got 2",
        ["./no_name.lua"] = "help, got a-b",
      ["./out_of_range.lua"] = "a: expected a default that is an integer >= 4, got 3",
        ["./taken.lua"] = "help, got seed",
    } do
      local result = run(words)
      assert.are.equal(2, result.status, words)
      assert.are.equal("", result.stdout)
      assert.matches("^nibble scenario: [^\n]+\n$", result.stderr)
      assert.is_truthy(result.stderr:find(message, 1, true), words .. ": " .. result.stderr)
    end
  end)
end)
