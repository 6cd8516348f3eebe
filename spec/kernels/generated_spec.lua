-- What must hold of every operation and each of its tensors, made from the descriptions in nibble.operations.
local nibble = require "nibble"
local operations = require "nibble.operations"
local assert = require "spec.support.assert"
local data = require "spec.support.data"
local keep_busy = require "spec.support.busy"
local numbers = require "nibble.numbers"
local support = require "spec.support.operations"

local DTYPES = {}
for _, kinds in ipairs { numbers.floats, numbers.integers } do
  for dtype in pairs(kinds) do
    if pcall(nibble.zeros, 1, { dtype = dtype }) then DTYPES[#DTYPES + 1] = dtype end
  end
end
table.sort(DTYPES)

local function item_size(dtype) return (numbers.floats[dtype] or numbers.integers[dtype]).size end

local function contains(list, x)
  for _, y in ipairs(list) do
    if x == y then return true end
  end
  return false
end

--- The tensors that a call writes: with the option that makes an input one of them, if it has one.
local function written_by(op)
  local list, options = {}, {}
  for _, p in ipairs(op.tensors) do
    if p.role == "out" or p.in_place then list[#list + 1] = p end
    if p.in_place then options[p.in_place] = true end
  end
  if options.q_inplace then options.q_head_padded = 0 end
  return list, options
end

--- Calls with arguments that the operation refuses: the error names it and one of the parameters, and nothing is
--- written.
local function assert_refused(op, given, names, ...)
  local before, written = {}, written_by(op)
  for i, p in ipairs(written) do before[i] = given[p.name]:bytes() end
  local ok, message = pcall(op.call, op, given)
  assert.is_false(ok, "it was taken")
  local named = false
  for _, name in ipairs(names) do
    named = named or message:find(("%s: %s: expected "):format(op.name, name), 1, true) ~= nil
  end
  assert.truthy(named and message:find(", got ", 1, true), message)
  for _, text in ipairs { ... } do assert.truthy(message:find(text, 1, true), message) end
  nibble.synchronize()
  for i, p in ipairs(written) do
    assert.is_true(before[i] == given[p.name]:bytes(), p.name .. " was written: " .. message)
  end
end

--- What a call gives for all of its outputs, and that it is the expected.
local function assert_outputs(op, given, expected, context)
  local outputs = support.outputs(op, given, table.pack(op:call(given)))
  for name, array in pairs(expected) do
    if outputs[name] then assert.tensor_equal(array, outputs[name], (context or "") .. name) end
  end
end

--- The parameters that have one of a tensor's sizes.
local function sharing(op, symbol)
  local names = {}
  for _, p in ipairs(op.parameters) do
    if p.name == symbol then names[#names + 1] = symbol end
  end
  for _, p in ipairs(op.tensors) do
    for _, text in ipairs(p.shape) do
      local _, other = support.size(text)
      if other == symbol then
        names[#names + 1] = p.name
        break
      end
    end
  end
  return names
end

local function zeros(op, p, shape, dtype)
  return nibble.zeros(shape or support.shape(op, p), { dtype = dtype or support.dtypes(op, p)[1] })
end

--- Strides of a tensor of which some dimensions are padded.
local function padded(pads)
  return function(array)
    return data.pool {
      dtype = array.dtype, shape = array.shape, strides = data.strides(array.shape, pads),
      lead = 64 + item_size(array.dtype),
    }:fill(array)
  end
end

local PADS = { -- dimension by dimension
  free = { 1, 3, 5, 7 }, last = { 7, 5, 3, 0 }, contiguous = { 1, 1, 1, 1, 1 }, records = { 16, 0, 0 },
}

local function pads_of(p)
  if p.strides ~= "last" then return PADS[p.strides] end
  return table.move(PADS.last, 5 - #p.shape, 4, 1, {})
end

-- Another element for the first of a tensor (known without reading it, which would wait).
local function another(p, dtype)
  if p.name == "seq_lens" or p.name == "kv_page_indptr" then return 1 end
  if p.name == "block_tables" then return 0 end
  if p.role == "index" then return 2 end
  return numbers.integers[dtype] and 93 or 96
end

local function first_of(p)
  local index = {}
  for i = 1, #p.shape do index[i] = 1 end
  if p.name == "kv_page_indptr" then index[1] = 2 end
  return index
end

local elsewhere
for _, info in ipairs(nibble.devices()) do
  if info.available and info.name ~= nibble.device() then elsewhere = info.name end
end

describe("the descriptions in nibble.operations #quick", function()
  local file <close> = assert(io.open((debug.getinfo(1, "S").source:match("^@(.-)spec/kernels/[^/]*$") or "")
    .. "bindings/lua/nibble/meta.lua"))
  local declared = file:read("a")

  it("are those of every operation of the module, and of no other", function()
    local found, described = {}, {}
    for _, module in ipairs { "page", "quantization", "mla" } do
      for name in pairs(nibble[module]) do found[#found + 1] = module .. "." .. name end
    end
    for i, op in ipairs(operations) do described[i] = op.name end
    table.sort(found)
    table.sort(described)
    assert.same(found, described)
  end)

  for _, op in ipairs(operations) do
    it("have the declared parameters in their order: " .. op.name, function()
      local at, _, list = declared:find("\nfunction nibble%." .. op.name:gsub("%p", "%%%0") .. "%((.-)%)")
      local comment = declared:sub(1, at):match(".*\n\n(.*)")
      local names = {}
      for name in list:gmatch("[%w_]+") do names[#names + 1] = name ~= "opts" and name or nil end
      for i, p in ipairs(op.parameters) do
        if names[i] then
          assert.equal(names[i], p.name)
        else
          assert.is_true(p.option)
          assert.truthy(comment:find("@param opts%? [^\n]*%f[%w_]" .. p.name .. "%?:"), p.name)
        end
      end
      assert.is_true(#names <= #op.parameters)
    end)
  end
end)

for _, op in ipairs(operations) do
  describe(op.name .. ", generated #quick", function()
    local layouts = op.layout and { op.layout } or { "NHD", "HND" }
    local takes_layout = false
    for _, p in ipairs(op.parameters) do takes_layout = takes_layout or p.role == "layout" end
    for i = 1, takes_layout and 2 or 1 do
      it("gives what the reference gives" .. (takes_layout and ", " .. layouts[i] or ""), function()
        local sizes = { kv_layout = layouts[i] }
        assert_outputs(op, support.arguments(op, { sizes = sizes }), support.expected(op, sizes))
      end)
    end

    for symbol, factor in pairs(op.multiples or {}) do
      it(("refuses a %s that is no multiple of %d"):format(symbol, factor), function()
        local given = support.arguments(op, { sizes = { [symbol] = factor * 3 // 2 } })
        assert_refused(op, given, sharing(op, symbol), "multiple of " .. factor)
      end)
    end

    for _, p in ipairs(op.tensors) do
      it(p.name .. ": any other dtype is refused", function()
        local allowed, tried = support.dtypes(op, p), 0
        if type(p.dtype) == "string" then allowed = { allowed[1] } end
        for _, dtype in ipairs(DTYPES) do
          if not contains(allowed, dtype) then
            local given = support.arguments(op)
            given[p.name], tried = zeros(op, p, nil, dtype), tried + 1
            assert_refused(op, given, { p.name }, dtype, table.unpack(allowed))
          end
        end
        assert.is_true(tried >= 5)
      end)

      for i = 2, type(p.dtype) == "table" and #p.dtype or 0 do
        it(("%s: %s does as well as %s"):format(p.name, p.dtype[i], p.dtype[1]), function()
          local sizes = { dtypes = { [p.name] = p.dtype[i] } }
          local given = support.arguments(op, { sizes = sizes })
          assert.equal(p.dtype[i], given[p.name].dtype)
          assert_outputs(op, given, support.expected(op, sizes))
        end)
      end

      if p.role ~= "scale" then
        it(p.name .. ": a dimension more or less is refused", function()
          for _, shape in ipairs {
            { 1, table.unpack(support.shape(op, p)) }, { table.unpack(support.shape(op, p), 2) },
          } do
            local given = support.arguments(op)
            given[p.name] = #shape > 0 and zeros(op, p, shape) or given[p.name]:select(1, 1)
            assert_refused(op, given, { p.name }, "{" .. table.concat(shape, ", ") .. "}")
          end
        end)
      end

      it(p.name .. ": a size that does not fit is refused", function()
        for dim, text in ipairs(support.symbols(op, p)) do
          local _, symbol = support.size(text)
          local names = symbol and sharing(op, symbol) or { p.name }
          for _, change in ipairs { 1, -1 } do
            local shape = support.shape(op, p)
            shape[dim] = shape[dim] + change
            local given = support.arguments(op)
            given[p.name] = zeros(op, p, shape)
            if not symbol or #names > 1 or (op.multiples or {})[symbol] then
              assert_refused(op, given, names)
            elseif change == 1 then -- nothing else has this size: there may be more
              op:call(given)
            end
          end
        end
        nibble.synchronize()
      end)

      it(("%s: strides, %s"):format(p.name, p.strides), function()
        local pool
        local given = support.arguments(op, { place = function(q, array)
          if q ~= p then return data.tensor(array) end
          pool = padded(pads_of(p))(array)
          return pool.tensor
        end })
        if p.strides == "contiguous" then return assert_refused(op, given, { p.name }, "contiguous") end
        local expected = support.expected(op)
        assert_outputs(op, given, expected)
        pool:assert_equal(expected[p.name] or pool:array(), p.name)
        local refused = p.strides == "last" and { { "contiguous last dimension", { [#p.shape] = 1 } } }
          or p.strides == "records" and { { "multiple of 16", { 8 } }, { "compact", { 0, 16 } } } or {}
        for _, case in ipairs(refused) do
          local pads = table.move({ 0, 0, 0, 0 }, 1, 4, 1, {})
          for dim, pad in pairs(case[2]) do pads[dim] = pad end
          given = support.arguments(op, { place = function(q, array)
            return q == p and padded(pads)(array).tensor or data.tensor(array)
          end })
          assert_refused(op, given, { p.name }, case[1])
        end
      end)

      if elsewhere then
        it(p.name .. ": a tensor of another device is refused", function()
          local given, names = support.arguments(op), {}
          given[p.name] = given[p.name]:to(elsewhere)
          for i, q in ipairs(op.tensors) do names[i] = q.name end
          local ok, message = pcall(op.call, op, given)
          assert.is_false(ok)
          local parameter = message:match(op.name:gsub("%p", "%%%0") .. ": (.-): expected a tensor on ")
          assert.is_true(contains(names, parameter), message)
        end)
      end
    end

    for _, written in ipairs((written_by(op))) do
      it(written.name .. ": an overlap with any other tensor is refused, by both names", function()
        -- A place for each tensor, at least four times the largest: where one moves onto another, it meets no third.
        local PLACE, places, arrays = 32768, {}, support.arrays(op)
        for i, p in ipairs(op.tensors) do places[p.name] = (i - 1) * PLACE end
        local function bytes(p) return #arrays[p.name].bytes end
        local storage = nibble.zeros(#op.tensors * PLACE, { dtype = "uint8" })
        local function arguments(moved, whole)
          local _, options = written_by(op)
          local given = support.arguments(op, { place = function(p, array)
            assert.is_true(4 * #array.bytes <= PLACE)
            local first = moved[p.name] or places[p.name]
            local t = storage:narrow(1, first + 1, #array.bytes):reinterpret(array.dtype):view(array.shape)
            return whole and t:copy(data.tensor(array)) or t
          end })
          for name, value in pairs(options) do given[name] = value end
          return given
        end
        op:call(arguments({}, true)) -- apart from each other they are taken
        nibble.synchronize()
        local first, size, own = places[written.name], bytes(written), item_size(arrays[written.name].dtype)
        for _, other in ipairs(op.tensors) do
          if other ~= written then
            -- The other's first element over the last bytes; its last one over the first bytes, and with its last byte
            -- alone where what is written may begin anywhere.
            local item = item_size(arrays[other.name].dtype)
            local before = first + PLACE // 2 - bytes(other) + item
            for _, moved in ipairs {
              { [other.name] = first + (size - 1) // item * item },
              { [other.name] = before, [written.name] = first + PLACE // 2 + (own == 1 and item - 1 or 0) },
            } do
              local given, contents = arguments(moved), storage:bytes()
              local ok, message = pcall(op.call, op, given)
              assert.is_false(ok, other.name .. " was taken")
              local one, two = message:match(op.name:gsub("%p", "%%%0") ..
                ": (.-): expected a tensor that does not overlap (.-), got ")
              assert.is_true(one == written.name and two == other.name or one == other.name and two == written.name,
                message)
              nibble.synchronize()
              assert.is_true(contents == storage:bytes(), other.name .. ": nothing is written")
            end
          end
        end
      end)
    end

    it("is waited for by a read of what it writes", function()
      local expected = support.expected(op)
      for name in pairs(expected) do
        local given, stream = support.arguments(op), nibble.stream()
        nibble.synchronize()
        if not keep_busy(stream) then return pending("the device is done with everything at once") end
        local results
        stream:scope(function() results = table.pack(op:call(given)) end)
        local got = support.outputs(op, given, results, name)[name] -- alone: to read another waits, too
        if got then assert.tensor_equal(expected[name], got, name) end
      end
    end)

    for _, p in ipairs(op.tensors) do
      it(p.name .. ": checked mode reports a write that nothing puts behind the call", function()
        local reports = {}
        nibble.check(function(report) reports[#reports + 1] = report end)
        finally(function() nibble.check(false) end)
        local given, stream, index = support.arguments(op), nibble.stream(), first_of(p)
        nibble.synchronize()
        stream:scope(function() op:call(given) end)
        assert.equal(0, #reports)
        given[p.name][index] = another(p, given[p.name].dtype)
        nibble.check(false)
        pcall(nibble.synchronize)
        assert.equal(1, #reports)
        assert.equal("race", reports[1].kind)
        assert.truthy(reports[1].text:find(op.name, 1, true), reports[1].text)
      end)

      if p.role ~= "out" and (elsewhere or nibble.device() ~= "cpu") then
        it(p.name .. ": has been read before a copy from the GPU overwrites it in the host's memory", function()
          local gpu, index = nibble.device() ~= "cpu" and nibble.device() or elsewhere, first_of(p)
          local function outputs(early) -- of a call before whose work, or behind whose call, the copy is made
            local given, stream = support.arguments(op, { place = function(_, array)
              return nibble.from_bytes(array.bytes, array.shape, { dtype = array.dtype, device = "cpu" })
            end }), nibble.stream { device = "cpu" }
            local t = nibble.empty(given[p.name].shape, { dtype = given[p.name].dtype, device = "cpu", pinned = true })
            t:copy(given[p.name])
            local fresh = t:to(gpu)
            given[p.name], fresh[index] = t, another(p, t.dtype)
            nibble.synchronize()
            nibble.synchronize("cpu")
            if early then t:copy(fresh) elseif not keep_busy(stream) then return nil end
            nibble.synchronize(gpu)
            local results
            stream:scope(function() results = table.pack(op:call(given)) end)
            if not early then t:copy(fresh) end
            pcall(nibble.synchronize, "cpu")
            nibble.synchronize(gpu)
            return support.outputs(op, given, results)
          end
          local expected, got, changed = support.expected(op), outputs(false), false
          if not got then return pending("the device is done with everything at once") end
          for name, array in pairs(outputs(true)) do
            changed = changed or expected[name] ~= nil and array.bytes ~= expected[name].bytes
          end
          assert.is_true(changed, "the element matters")
          for name, array in pairs(expected) do
            if got[name] then assert.tensor_equal(array, got[name], name) end
          end
        end)
      end
    end
  end)
end
