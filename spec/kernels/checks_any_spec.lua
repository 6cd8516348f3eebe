-- Whatever an operation is given, it works or raises an error that names it; it never crashes and never writes
-- elsewhere.
local nibble = require "nibble"
local operations = require "nibble.operations"
local assert = require "spec.support.assert"
local data = require "spec.support.data"

--- Name, function and number of positional parameters, the last table among them.
local function every_operation()
  local list = { { "rope_table", nibble.rope_table, 2 } }
  for _, op in ipairs(operations) do
    local count, options = 0, 0
    for _, p in ipairs(op.parameters) do
      if p.option then options = 1 else count = count + 1 end
    end
    list[#list + 1] = { op.name, op:find(), count + options }
  end
  return list
end

--- Good arguments of a small append.
local function append_arguments()
  local function zeros(x, dtype) return nibble.zeros(2, 2, 2, x, {dtype = dtype}) end
  local rows = data.tensor(data.finite(1, {2, 2, 32}, "float16"))
  return {rows, rows, data.indices {0, 3}, {zeros(16, "uint8"), zeros(16, "uint8")},
          {zeros(2, "uint8"), zeros(2, "uint8")}, 1.0, 1.0, "NHD"}
end

describe("any operation", function()
  it("given anything at all works or raises an error that names it", function()
    local pools = {}
    local function pool(opts)
      pools[#pools + 1] = data.pool(opts)
      return pools[#pools].tensor
    end
    local closed = nibble.zeros(3)
    closed:close()
    local u4, s4 = pool {dtype = "uint8", shape = {3, 4, 4, 32}}, pool {dtype = "uint8", shape = {3, 4, 4, 4}}
    local f4 = pool {dtype = "float16", shape = {3, 4, 4, 64}}
    local values = table.pack(
      nil, true, false, 0, 1, -1, 2, 12, 3.0, 3.5, 0 / 0, 1e300, math.huge, math.mininteger, "3", "NHD", "HND", "", {},
        {1, 2}, print, io.stdout,
      coroutine.create(print), nibble.stream(), nibble.current_stream():record(), closed,
      nibble.zeros(4, 4, 64, {dtype = "float16"}), nibble.zeros(4, 4, 64, {dtype = "bfloat16"}),
        nibble.zeros(4, 1, 512, {dtype = "bfloat16"}),
      nibble.zeros(4, 512, {dtype = "bfloat16"}), data.indices {0, 1, -1, 99}, data.indices({0, 1, -1, 99}, "int64"),
      data.indices({0, 1, -1, 99, 2, 5, 7, 1}, "int32", {4, 2}), data.scale(1), data.scale(0), nibble.zeros(8, 64),
        nibble.zeros(0),
      u4, s4, {u4, u4}, {s4, s4}, {u4, s4}, f4, {f4, f4}, pool {dtype = "uint8", shape = {2, 3, 384}},
      pool {dtype = "float8_e4m3fn", shape = {3, 4, 4, 4}}, pool {dtype = "bfloat16", shape = {4, 16, 4, 64}},
      {out = s4}, {inverse = true}, {q_head_padded = 8}, {q_inplace = true}, {compress_ratio = 2},
      {num_pages = 5, kv_page_indptr = data.indices {0, 1, 2, 3, 4}},
      setmetatable({}, {__index = function() error("an error of the caller's") end}),
        setmetatable({}, {__len = function() return 1e9 end})
    )
    local picks = data.integers(11, 50000, 1, values.n)
    local at, worked, refused = 0, 0, 0
    local function pick()
      at = at % #picks + 1
      return values[picks[at]]
    end
    for round = 1, 700 do
      for _, operation in ipairs(every_operation()) do
        local name, fn, n = table.unpack(operation)
        local arguments = {}
        -- good arguments with one of them replaced, or all at random
        if name:find("append", 1, true) and round % 2 == 0 then
          arguments = append_arguments()
          arguments[picks[round] % n + 1] = pick()
        else
          for i = 1, n do arguments[i] = pick() end
        end
        local ok, message = pcall(fn, table.unpack(arguments, 1, n + round % 3 - 1))
        if ok then
          worked = worked + 1
        else
          refused = refused + 1
          assert.is_string(message)
          assert.truthy(message:find(name, 1, true) or message:find("an error of the caller's", 1, true), message)
        end
      end
    end
    pcall(nibble.synchronize)
    nibble.synchronize()
    assert.is_true(worked > 10 and refused > 1000)
    for _, one in ipairs(pools) do
      -- an operation may have written the view, never what lies around it
      one:assert_equal(one:array())
    end
  end)

  it("says that a tensor is closed, however it was closed #quick", function()
    for _, close in ipairs {
      function(t) t:close() end,
      function(t) t:close() t:close() end,
      function(t) getmetatable(t).__gc(t) end,
      function(t) getmetatable(t).__gc(t) getmetatable(t).__gc(t) end,
      function(t) getmetatable(t).__close(t) end,
    } do
      for i = 1, 5 do
        local a = append_arguments()
        close(i < 4 and a[i].dtype and a[i] or (type(a[i]) == "table" and a[i][2]) or a[i])
        local ok, message = pcall(nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, table.unpack(a))
        assert.is_false(ok)
        assert.truthy(message:find("closed", 1, true), message)
        assert.truthy(message:find("page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", 1, true), message)
      end
    end
  end)

  it("takes one tensor for two inputs, and refuses it for two outputs #quick", function()
    local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    local a = append_arguments()
    a[2] = a[1]
    append(table.unpack(a))
    assert.is_true(a[4][1]:equal(a[4][2]) and a[5][1]:equal(a[5][2]))
    local before = a[4][1]:bytes()
    for place, name in pairs {[4] = "paged_kv_cache (V)", [5] = "kv_cache_sf (V)"} do
      local b = table.move(a, 1, #a, 1, {})
      b[place] = {a[place][1], a[place][1]}
      assert.raises_like(function() append(table.unpack(b)) end,
        "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", name,
                         "does not overlap")
    end
    nibble.synchronize()
    assert.equal(before, a[4][1]:bytes())
  end)

  it("takes 3.0 for 3 and refuses 3.5, NaN, 1e300 and '3' #quick", function()
    assert.same({3, 64}, nibble.rope_table(3.0).shape)
    for _, bad in ipairs {3.5, 0 / 0, 1e300, "3", -1, 1 << 62} do
      assert.is_false((pcall(nibble.rope_table, bad)))
    end
  end)

  it("works with objects of a module that was loaded before, 100 times #quick", function()
    local a = append_arguments()
    nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(table.unpack(a))
    local first = a[4][1]:bytes()
    for _ = 1, 100 do
      package.loaded.nibble = nil
      local again = require "nibble"
      a[4][1]:fill(0)
      again.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(table.unpack(a))
      assert.equal(first, a[4][1]:bytes())
    end
    package.loaded.nibble = nibble
  end)

  it("works or raises an error at the end of Lua's stack", function()
    local a = append_arguments()
    local call = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    local worked, failed = 0, 0
    local function down(n)
      if n > 190000 or n % 20000 == 0 then
        if pcall(call, table.unpack(a)) then worked = worked + 1 else failed = failed + 1 end
      end
      return 1 + down(n + 1)
    end
    assert.is_false((pcall(down, 1)))
    assert.is_true(worked > 0)
    nibble.synchronize()
    call(table.unpack(a))
    nibble.synchronize()
  end)

  it("works inside a coroutine #quick", function()
    local a = append_arguments()
    local ok, message = coroutine.resume(coroutine.create(function()
      nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(table.unpack(a))
      return a[4][1]:bytes()
    end))
    assert.is_true(ok, message)
    assert.equal(a[4][1]:bytes(), message)
  end)
end)
