-- scripts/examples and scripts/bench: each runs, in plain Lua and in the command, from any directory.
local process = require "spec.support.runtime_process"

local root = process.run("cd " .. process.quote(process.root) .. " && pwd").stdout:gsub("\n$", "") .. "/"
local plain = ("export LUA_PATH=%s LUA_CPATH=%s; "):format(process.quote(package.path), process.quote(package.cpath))
local command = process.quote((process.command():gsub("^%.?/?build/", root .. "build/"))) .. " "

local function run(path, options, before)
  return process.run((before or "") .. plain .. "lua5.4 " .. process.quote(root .. path) .. " " .. (options or ""))
end

describe("the examples #quick", function()
  local said = {
    ["quantize_block"] = { "scale byte 0x", "largest error: 0.625" },
    ["capture_and_replay"] = { "captured, not executed: 1 node; bytes of the cache that are not 0: 0",
      "\nstep 6  slots ",
      "K of replay and eager run: equal\nV of replay and eager run: equal\n" },
    ["prefix_sharing"] = { "copy 2 entries of page 2 to page 3", "prompt equal: true; own tokens differ: true",
      "all freed: 12 of 12 pages" },
    ["page_table"] = { "pool of 16 pages: " },
  }

  it("are these", function()
    local found = process.run("ls " .. process.quote(root .. "scripts/examples")).stdout
    local names = {}
    for name in found:gmatch("([^\n]+)%.lua") do
      names[#names + 1] = name
      assert.is_truthy(said[name], name .. " has no spec")
    end
    assert.are.equal(4, #names)
  end)

  for name, texts in pairs(said) do
    it(name .. " runs and says what it should", function()
      local path = "scripts/examples/" .. name .. ".lua"
      local result = run(path)
      assert.are.same({ 0, "" }, { result.status, result.stderr })
      for _, text in ipairs(texts) do assert.is_truthy(result.stdout:find(text, 1, true), result.stdout) end
      local other = process.run("cd / && " .. command .. process.quote(root .. path))
      assert.are.same({ 0, "", result.stdout }, { other.status, other.stderr, other.stdout })
      local near = process.run(plain .. "cd " .. process.quote(root .. "scripts/examples") .. " && lua5.4 " .. name ..
        ".lua")
      assert.are.same({ 0, "", result.stdout }, { near.status, near.stderr, near.stdout })
    end)
  end
end)

describe("the GPU benchmark", function()
  local standin = process.build() .. "standin"

  -- What it measures there means nothing.
  local function on_standin(options)
    if process.run("test -e " .. process.quote(standin .. "/libcuda.so.1")).status ~= 0 then
      pending("no stand-in driver here")
    end
    if process.sanitized() then
      pending("what is without a sanitizer cannot load the stand-in driver of a build with one")
    end
    return run("scripts/bench/cuda.lua", options, "export LD_LIBRARY_PATH=" .. process.quote(standin) .. "; ")
  end

  it("measures small operations in graphs and from Lua, as a table, CSV and JSON", function()
    local result = on_standin("--only '8 tokens'")
    assert.are.same({ 0, "" }, { result.status, result.stderr })
    for _, name in ipairs { "append", "dequantize", "materialize", "materialize into out", "rope insert",
      "rope insert in place" } do
      local graph, host = result.stdout:match("\n" .. name ..
        ", 8 tokens +[%d.]+ +%- +%d+ +([%d.]+) +([%d.]+) +[%d.-]+\n")
      assert.is_truthy(graph, name .. "\n" .. result.stdout)
      assert.is_true(tonumber(graph) > 0 and tonumber(host) > 0, name)
    end
    result = on_standin("--only 'append, 8 tokens' --csv")
    assert.is_truthy(result.stdout:find('\n"append, 8 tokens",%d+,,[%d.]+,[%d.]+,[%d.]+,[%d.]*\n$'), result.stdout)
    result = on_standin("--only 'append, 8 tokens' --json")
    assert.is_truthy(result.stdout:find('"case": "append, 8 tokens", "bytes": %d+,.*"host_microseconds": [%d.]+'),
      result.stdout)
  end)

  it("needs a GPU, which it says with status 2 #quick", function()
    local result = run("scripts/bench/cuda.lua", "--device cpu")
    assert.are.same({ 2, "cuda.lua: cpu: not a GPU\n", "" }, { result.status, result.stderr, result.stdout })
  end)
end)

describe("the CPU benchmark", function()
  local operations = {
    "append bfloat16 NHD", "append bfloat16 HND", "append bfloat16 NHD, 4over6", "append float16 NHD",
    "append float16 HND", "append float16 NHD, 4over6", "dequantize bfloat16",
    "dequantize float16", "materialize", "swizzle_v_scales NHD", "swizzle_v_scales HND", "quantize_paged_kv_cache HND",
    "rope_quantize_insert, q copied", "rope_quantize_insert, q in place", "kv_rope_quantize_insert",
      "mla.dequantize_cache",
    "copy uint8 to uint8",
  }

  it("measures each operation, as a table, CSV and JSON", function()
    local result = run("scripts/bench/cpu.lua", "--quick --repeats 9")
    assert.are.same({ 0, "" }, { result.status, result.stderr })
    for _, name in ipairs(operations) do
      local elements, share = result.stdout:match("\n" .. name:gsub("%.", "%%.") ..
        " +(%d+) +[%d.]+ +[%d.]+ +([%d.]+) %%")
      assert.is_truthy(elements, name)
      assert.is_true(tonumber(elements) > 0 and tonumber(share) > 0, name)
    end
    result = run("scripts/bench/cpu.lua", "--quick --repeats 9 --csv --only materialize")
    assert.is_truthy(
      result.stdout:find("^operation,elements,bytes,elements_per_second_per_thread,memcpy_share,threads\n"
      .. '"materialize",%d+,%d+,[%d.e+]+,[%d.]+,%d+\n$'), result.stdout)
    result = run("scripts/bench/cpu.lua", "--quick --repeats 9 --json --only dequantize")
    assert.is_truthy(result.stdout:find('"results": %[\n    {"operation": "dequantize bfloat16", "elements": %d+,'),
      result.stdout)
    assert.is_truthy(result.stdout:find('"repeats": 9,', 1, true))
  end)

  it("refuses bad options with one line and status 2 #quick", function()
    for options, text in pairs {
      ["--repeats 3"] = "--repeats: expected an integer >= 9, got 3", ["--fast"] = "unknown option --fast",
      ["--quick=1"] = "takes no value",
    } do
      local result = run("scripts/bench/cpu.lua", options)
      assert.are.same({ 2, "" }, { result.status, result.stdout })
      assert.is_truthy(result.stderr:find("^cpu%.lua: [^\n]+\n$"))
      assert.is_truthy(result.stderr:find(text, 1, true))
    end
  end)
end)

describe("each benchmark #quick", function()
  it("prints its help, and refuses an option that it does not know", function()
    for name in process.run("cd " .. process.quote(root) .. " && ls scripts/bench/c*.lua").stdout:gmatch("[^\n]+") do
      local result = run(name, "--help")
      assert.are.same({ 0, "" }, { result.status, result.stderr })
      assert.is_truthy(result.stdout:find("^Usage: nibble " .. name:gsub("%.", "%%.")), result.stdout)
      result = run(name, "--fast")
      assert.are.same({ 2, name:match("[^/]+$") .. ": unknown option --fast (see --help)\n", "" },
        { result.status, result.stderr, result.stdout })
    end
  end)
end)
