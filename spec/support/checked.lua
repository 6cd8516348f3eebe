-- For the specs of checked mode: programs, each with a fault and its twin without. Lines that begin with `--fix` are in
-- the twin alone, lines that end with `--break` in the faulty one alone; --1 marks the line of the report, --2 that of
-- the other operation, --3 that of the replay.
local assert = require "luassert"
local nibble = require "nibble"

-- What the programs share. It counts as one of nibble's own modules, so that a report's line is the program's.
local PRELUDE = [[
local nibble, pages = require "nibble", require "nibble.pages"
local env = setmetatable({ nibble = nibble, pages = pages, one = nibble.tensor(1.0) }, { __index = _G })
env.main, env.a, env.b = nibble.current_stream(), nibble.stream(), nibble.stream()
function env.join(...) for _, s in ipairs { ... } do s:wait(env.main:record()) end end
function env.bf16(...) return nibble.zeros({ ... }, { dtype = "bfloat16" }) end
function env.i32(t) return nibble.tensor(t, { dtype = "int32" }) end
function env.new_pool(layout, allocator)
  local pool = pages.caches { num_pages = 8, page_size = 4, num_kv_heads = 2, head_dim = 64, kv_layout = layout, page_padding = 64 }
  if allocator then pages.watch(allocator, pool) end
  return pool
end
function env.put(pool, slots, rows)
  rows = rows or env.bf16(#slots, 2, 64)
  nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows,
    type(slots) == "table" and nibble.tensor(slots) or slots, pool.paged_kv_cache, pool.kv_cache_sf, env.one, env.one, pool.kv_layout)
end
function env.get(pool, tables, lengths, k, v)
  if type(tables) == "table" then
    for _, row in ipairs(tables) do
      for j = #row + 1, 3 do row[j] = -1 end
    end
    tables, lengths = env.i32(tables), env.i32(lengths)
  end
  nibble.quantization.nvfp4_kv_dequantize_paged(pool.paged_kv_cache, pool.kv_cache_sf, tables, lengths, env.one, env.one,
    k or env.bf16(#tables, 12, 2, 64), v or env.bf16(#tables, 12, 2, 64), pool.kv_layout)
end
return env
]]
package.loaded["nibble.prelude"] = true
local prelude = assert(load(PRELUDE, "@spec/nibble/prelude.lua"))

local function run(source)
  local seen = {}
  nibble.check(function(report) seen[#seen + 1] = report end)
  local ok, message = pcall(assert(load(source, "@program.lua", "t", prelude())))
  collectgarbage()
  local reports = nibble.check_reports()
  nibble.check(false)
  nibble.synchronize()
  assert.same(seen, reports)
  return reports, not ok and message or nil
end

local function texts(reports)
  local list = {}
  for i, report in ipairs(reports) do list[i] = report.text end
  return table.concat(list, "\n")
end

-- The place of a marker, as reports have it.
local function line_of(source, mark)
  local line = 0
  for text in (source .. "\n"):gmatch("([^\n]*)\n") do
    line = line + 1
    if text:gsub(" %-%-break$", ""):find("%-%-%d*" .. mark .. "%d*$") then return "program.lua:" .. line end
  end
end

local function fault(kind, pattern, source, error_pattern)
  local reports, message = run((source:gsub("%-%-fix[^\n]*", "")))
  if error_pattern then
    assert.matches(error_pattern, message)
  else
    assert.is_nil(message)
  end
  assert.equal(1, #reports, texts(reports))
  local report = reports[1]
  assert.equal(kind, report.kind)
  assert.matches(pattern, report.message)
  assert.equal(line_of(source, 1), report.operation.where, report.text)
  local other = report.other or (kind == "unwritten" and report.storage or nil) -- which nothing has written
  assert.equal(line_of(source, 2), other and other.where, report.text)
  assert.equal(line_of(source, 3), report.operation.replay, report.text)
  local lines = {}
  for line in report.text:gmatch("\n  (program.lua:%d+): ") do lines[#lines + 1] = line end
  assert.same({ report.operation.where, report.other and report.other.where }, lines)
  local twin = (source .. "\n"):gsub("[^\n]*%-%-break\n", "\n"):gsub("%-%-fix ", "")
  reports, message = run(twin)
  assert.is_nil(message)
  assert.equal("", texts(reports))
end

local function clean(source)
  local reports, message = run(source)
  assert.is_nil(message)
  assert.equal("", texts(reports))
end

return { run = run, texts = texts, fault = fault, clean = clean, line_of = line_of }
