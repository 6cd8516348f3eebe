-- What checked mode takes operations to read and write, against what they do: a byte is written when it comes out the
-- same whatever was there; bytes that are not read may be anything.
local nibble = require "nibble"
local pages = require "nibble.pages"
local accesses = require "nibble.checker.accesses"

local ROUNDS = 12 -- of each operation

-- A world of storages whose bytes are all under control: by name raw uint8 tensors, and views of them.
local function new_world(random)
  local world = { raw = {}, content = {} }

  local function bytes(count)
    local list = {}
    for i = 1, count do list[i] = string.char(random(256)) end
    return table.concat(list)
  end

  -- A view of a storage of its own, with gaps: `padding` elements before it and behind each page.
  function world.view(name, dtype, shape, padding)
    local size = #nibble.zeros(1, { dtype = dtype }):bytes()
    local page = 1
    for i = 2, #shape do page = page * shape[i] end
    local stride, step = { page + padding }, page
    for i = 2, #shape do
      step = shape[i] > 0 and step // shape[i] or step
      stride[i] = step
    end
    if #shape == 1 then stride[1] = 1 end
    local count = (padding + shape[1] * stride[1]) * size
    world.raw[name] = nibble.empty(count, { dtype = "uint8" })
    world.content[name] = bytes(count)
    return world.raw[name]:reinterpret(dtype):as_strided(shape, stride, padding)
  end

  -- Contents of a view that are not random bytes.
  function world.set(name, view, t)
    world.raw[name]:copy(nibble.from_bytes(world.content[name], { #world.content[name] }, { dtype = "uint8" }))
    view:copy(t)
    world.content[name] = world.raw[name]:bytes()
  end

  -- Runs `fn` on these contents: the contents afterwards, and what the checker says was read and written, by name as
  -- sets.
  function world.run(content, fn)
    local name_of, read, written, observation = {}, {}, {}, nil
    for name, raw in pairs(world.raw) do
      raw:copy(nibble.from_bytes(content[name], { #content[name] }, { dtype = "uint8" }))
      name_of[raw:storage()], read[name], written[name] = name, {}, {}
    end
    nibble.observe(function(o) if o.kind == "work" then observation = o end end, "world")
    local results = table.pack(fn())
    nibble.observe(nil, "world")
    local contents = {}
    for parameter, access in pairs(accesses.indices(observation) or {}) do contents[parameter] = nibble.peek(access) end
    for _, item in ipairs((accesses.expand(observation, contents))) do
      local set = (item.write and written or read)[name_of[item.view.storage]] or {}
      local list = assert(item:spans())
      for i = 1, #list, 2 do
        for byte = list[i], list[i + 1] - 1 do set[byte] = true end
      end
    end
    pcall(nibble.synchronize) -- contents may be bad
    local after = {}
    for name, raw in pairs(world.raw) do after[name] = raw:bytes() end
    for i = 1, results.n do after[i] = results[i]:bytes() end
    return after, read, written
  end

  function world.others(content, keep)
    local other = {}
    for name, text in pairs(content) do
      local list = { text:byte(1, -1) }
      for i = 1, #list do
        if not keep[name][i - 1] then list[i] = list[i] ~ (1 + random(255)) end
      end
      other[name] = string.char(table.unpack(list))
    end
    return other
  end

  return world
end

-- `in_place`: storages that the operation reads where it writes.
local function compare(world, fn, in_place)
  local first, read, written = world.run(world.content, fn)
  local second = world.run(world.others(world.content, read), fn)
  for name, text in pairs(first) do
    local set = written[name]
    if not set then
      assert.equal(text, second[name], "result " .. name)
    else
      local before = world.content[name]
      for i = 1, #text do
        local same = text:byte(i) == second[name]:byte(i)
        if set[i - 1] then
          assert.is_true(same, ("%s, byte %d: depends on what the checker thinks is not read"):format(name, i - 1))
        else
          assert.equal(before:byte(i), text:byte(i), ("%s, byte %d: written"):format(name, i - 1))
          -- what differs before and is not written differs afterwards
          if not read[name][i - 1] and not in_place then
            assert.is_false(same, ("%s, byte %d: written"):format(name, i - 1))
          end
        end
      end
    end
  end
end

describe("checked mode knows to the byte what is read and written by", function()
  local layouts = { "NHD", "HND" }

  local function each(fn)
    for seed = 1, ROUNDS do
      local random = pages.generator(seed)
      fn(random, new_world(random), layouts[seed % 2 + 1])
    end
  end

  local function pool(world, random, layout, heads, size, dim)
    local function shape(last)
      return layout == "HND" and { 4, heads, size, last } or { 4, size, heads, last }
    end
    local cache, sf = {}, {}
    for i, kv in ipairs { "k", "v" } do
      cache[i] = world.view(kv, "uint8", shape(dim // 2), random(3) * 16)
      sf[i] = world.view(kv .. "_sf", "float8_e4m3fn", shape(dim // 16), random(3) * 16)
    end
    return cache, sf
  end

  local function indices(world, random, name, dtype, shape, low, high)
    local view = world.view(name, dtype, shape, 2)
    world.set(name, view, nibble.randint(low, high + 1, shape, { dtype = dtype, seed = random(1 << 30) }))
    return view
  end

  it("append", function()
    local one = nibble.tensor(1.0)
    each(function(random, world, layout)
      local heads, size, rows = 1 + random(2), 1 + random(3), 2 + random(3)
      local cache, sf = pool(world, random, layout, heads, size, 32)
      local key, value = world.view("key", "bfloat16", { rows, heads, 32 }, 8),
        world.view("value", "bfloat16", { rows, heads, 32 }, 8)
      local slots = world.view("slots", "int64", { rows - 1 }, 1)
      local list = nibble.randperm(4 * size + 4, { seed = random(1 << 30) }):narrow(1, 1, rows - 1)
      world.set("slots", slots, list)
      slots[1] = -1
      world.content.slots = world.raw.slots:bytes()
      compare(world, function()
        nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(key, value, slots, cache, sf, one, one,
          layout)
      end)
    end)
  end)

  it("dequantize", function()
    local one = nibble.tensor(1.0)
    each(function(random, world, layout)
      local heads, size = 1 + random(2), 1 + random(3)
      local cache, sf = pool(world, random, layout, heads, size, 32)
      local length = 1 + random(6)
      local tables = indices(world, random, "tables", random(2) == 0 and "int64" or "int32",
        { 2, (length + size - 1) // size + random(2) }, -1, 4)
      local lengths = indices(world, random, "lengths", "int32", { 2 }, -1, length + 1)
      local shape = { 2, length, heads, 32 }
      local k, v = world.view("out_k", "bfloat16", shape, 0), world.view("out_v", "bfloat16", shape, 0)
      compare(world, function()
        nibble.quantization.nvfp4_kv_dequantize_paged(cache, sf, tables, lengths, one, one, k, v, layout)
      end)
    end)
  end)

  it("materialize, which also turns the rest of a request's last page into something", function()
    each(function(random, world)
      local heads, size, split = 1 + random(2), 4, random(2) == 0
      local cache, sf = pool(world, random, "HND", heads, size, 64)
      local columns, given = 2, random(2) == 0
      local tables = indices(world, random, "tables", "int32", split and { 2, 2, columns } or { 2, columns }, -1, 4)
      local lengths = indices(world, random, "lengths", "int32", { 2 }, -1, 9)
      local indptr = given and world.view("indptr", "int32", { 3 }, 1) or nil
      if given then
        world.set("indptr", indptr, nibble.tensor({ 0, 1 + random(2), 2 + random(3) }, { dtype = "int32" }))
      end
      local count = given and 3 or 2 * columns
      local out = world.view("out", "float8_e4m3fn", { count + 1, 2, heads, size, 64 }, 0)
      local function run()
        local _, fp8_tables = nibble.quantization.nvfp4_kv_materialize_fp8(cache[1], cache[2], sf[1], sf[2], tables,
          lengths, 8,
          { out = out, uses_shared_paged_kv_idx = not split, kv_page_indptr = indptr, num_pages = given and count
            or nil })
        return fp8_tables
      end
      local first, read, written = world.run(world.content, run)
      local second = world.run(world.others(world.content, read), run)
      assert.equal(first[1], second[1])
      local zero, whole = 2 * heads * size * 64, 0
      for i = 1, #first.out do
        local same = first.out:byte(i) == second.out:byte(i)
        if i <= zero then assert.is_true(same and written.out[i - 1]) end
        if not written.out[i - 1] then
          assert.is_true(not same and first.out:byte(i) == world.content.out:byte(i))
        elseif same then
          whole = whole + 1
        end
      end
      assert.is_true(whole >= zero)
      for _, name in ipairs { "k", "v", "k_sf", "v_sf", "tables", "lengths" } do
        assert.equal(world.content[name], first[name])
      end
    end)
  end)

  it("rope_insert, with queries in place or not, and its sibling", function()
    local rope = nibble.rope_table(6)
    each(function(random, world)
      -- kind: without queries, in place, rotated, not rotated
      local size, tokens, kind = 1 + random(3), 2 + random(3), random(4)
      local cache = world.view("cache", "uint8", { 3, size, 384 }, 16)
      local kv = world.view("kv", "bfloat16", { tokens, 512 }, 0)
      local slots = world.view("slots", "int32", { tokens - 1 }, 0)
      world.set("slots", slots, nibble.randperm(3 * size + 2, { dtype = "int32", seed = random(1 << 30) }):narrow(1, 1,
        tokens - 1))
      local positions, ratio = indices(world, random, "positions", "int64", { tokens }, -1, 6), 1 + random(2)
      if kind == 0 then
        compare(world, function()
          nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, slots, positions, rope,
            { compress_ratio = ratio })
        end)
      else
        local q = world.view("q", "bfloat16", { tokens, 2, 512 }, 0)
        compare(world, function()
          local out = nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, cache, slots, positions, rope,
            { q_inplace = kind == 1, apply_q_rope = kind ~= 3, q_head_padded = kind == 1 and 0 or 8 })
          if kind ~= 1 then return out end
        end, kind == 1)
      end
    end)
  end)

  it("dequantize_cache and swizzle_v_scales", function()
    each(function(random, world, layout)
      local size = 1 + random(3)
      local cache, inverse = world.view("cache", "uint8", { 3, size, 384 }, 16), random(2) == 0
      local slots = indices(world, random, "slots", "int64", { 3 }, -1, 3 * size)
      compare(world, function() return nibble.mla.dequantize_cache(cache, slots) end)
      world = new_world(random)
      local shape = layout == "HND" and { 2, 2, 4, 8 } or { 2, 4, 2, 8 }
      local from, to = world.view("from", "uint8", shape, 16), world.view("to", "uint8", shape, 0)
      compare(world, function() nibble.quantization.swizzle_v_scales(from, layout, { out = to, inverse = inverse }) end)
    end)
  end)
end)
