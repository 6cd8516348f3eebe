-- scripts/scenarios/decode.lua, the main job, run as people run it: as a process, in plain Lua and in the command.
local process = require "spec.support.runtime_process"

local script = process.quote(process.root .. "scripts/scenarios/decode.lua")

-- How to run a script: in lua5.4 with the module under test, and in the `nibble` command.
local plain = ("export LUA_PATH=%s LUA_CPATH=%s; lua5.4 "):format(process.quote(package.path), process.quote(package.cpath))
local command = process.quote(process.command()) .. " "

local function decode(interpreter, options)
  return process.run(interpreter .. script .. " " .. (options or ""))
end

local function succeeds(result)
  assert.are.equal("", result.stderr)
  assert.is_truthy(result.stdout:find("\nok: ", 1, true), result.stdout)
  assert.are.equal(0, result.status)
end

describe("the decode scenario on real input", function()
  it("is equal, byte for byte, in plain Lua and in the command", function()
    for _, interpreter in ipairs { plain, command } do
      local result = decode(interpreter)
      succeeds(result)
      local text = result.stdout
      assert.is_truthy(text:find("\ndevice    cpu", 1, true) or os.getenv("NIBBLE_DEVICE"))
      assert.is_truthy(text:find("3 layers, 320 tokens, 4 KV heads x 64, bfloat16", 1, true))
      assert.is_truthy(text:find("\nrequests  8, ", 1, true))
      assert.is_truthy(text:find("after each of 64 steps", 1, true))
      -- A replay for each step; padding took part.
      assert.is_truthy(text:find("decode step, graph replay +64 "))
      assert.is_true(tonumber(text:match("(%d+) padding rows wrote nothing, page 0 is untouched\n$")) > 0)
      assert.is_nil(text:find("\27", 1, true), "no colour where there is no terminal")
    end
  end)

  it("shows the error of each layer and head within its bound, and one that is near to it", function()
    local text = decode(plain, "--steps 8").stdout
    local cells, largest = 0, 0
    for line in text:gmatch("[^\n]+") do
      if line:find("^  layer %d [KV] ") then
        for worst, rms in line:gmatch("(%d%.%d+) +([%d.]+) %%") do
          cells, largest = cells + 1, math.max(largest, tonumber(worst))
          assert.is_true(tonumber(worst) <= 1 and tonumber(rms) > 2 and tonumber(rms) < 25, line)
        end
      end
    end
    assert.are.equal(3 * 2 * 4, cells)
    assert.is_true(largest > 0.95)
  end)

  it("runs in NHD, with other pages, seeds and numbers of requests", function()
    for _, options in ipairs {
      "--layout NHD --steps 12", "--page-size 4 --page-layout ring --steps 12 --seed 5", "--requests 1 --steps 3",
      "--requests 13 --steps 20 --page-layout shuffled --page-size 64", "--steps 1 --page-layout sequential",
    } do
      succeeds(decode(plain, options))
    end
  end)
end)

describe("the decode scenario on random tokens", function()
  it("takes any shape", function()
    for _, options in ipairs {
      "--heads 1 --head-dim 64 --tokens 40 --steps 10",
      "--heads 3 --head-dim 128 --tokens 50 --steps 10 --dtype float16 --layout NHD",
      "--heads 2 --head-dim 192 --tokens 30 --steps 8 --page-size 8 --requests 5",
    } do
      local result = decode(plain, "--random " .. options)
      succeeds(result)
      assert.is_truthy(result.stdout:find("materialize", 1, true))
      assert.is_nil(result.stdout:find("no materialize", 1, true))
    end
  end)

  it("leaves materialize out, and says so, where it cannot be", function()
    for _, options in ipairs { "--head-dim 80", "--head-dim 16 --page-size 1", "--head-dim 64 --page-size 3 --layout NHD" } do
      local result = decode(plain, "--random --heads 2 --tokens 40 --steps 10 " .. options)
      succeeds(result)
      assert.is_truthy(result.stdout:find("no materialize: it needs head_dim % 64 == 0 and page_size % 4 == 0", 1, true))
      assert.is_nil(result.stdout:find("swizzle", 1, true))
    end
  end)

  it("depends on the seed alone", function()
    local function table_of(seed)
      return decode(plain, "--random --tokens 40 --steps 5 --heads 1 --seed " .. seed).stdout:match("quantization error.*")
    end
    assert.are.equal(table_of(7), table_of(7))
    assert.are_not.equal(table_of(7), table_of(8))
  end)
end)

describe("a planted bit", function()
  it("is found, and named by page, entry, head and dimension", function()
    for _, options in ipairs {
      "", "--layout NHD --steps 10", "--random --heads 3 --head-dim 80 --tokens 60 --steps 9 --page-size 5",
    } do
      local result = decode(plain, "--plant " .. options)
      assert.are.equal(1, result.status)
      local step, place = result.stdout:match(
        "planted after step (%d+): (layer %d+ K cache: page %d+, entry %d+, head %d+, dimension %d+)\n")
      assert.is_truthy(place, result.stdout)
      assert.is_truthy(result.stdout:find(("\nFAILED at step %s: %s: got 0x"):format(step, place), 1, true), result.stdout)
      assert.is_nil(result.stdout:find("\nok", 1, true))
    end
  end)
end)

describe("the decode scenario's options #quick", function()
  it("print their help", function()
    for _, interpreter in ipairs { plain, command } do
      local result = decode(interpreter, "--help")
      assert.are.same({ 0, "" }, { result.status, result.stderr })
      for _, option in ipairs { "device", "random", "heads", "head%-dim", "tokens", "page%-size", "requests", "steps", "layout",
                                "dtype", "seed", "plant", "help" } do
        assert.is_truthy(result.stdout:find("\n +%-%-" .. option .. "%f[ \n]"), option)
      end
    end
  end)

  it("that are wrong print one line and return 2", function()
    for options, text in pairs {
      ["--frobnicate"] = "unknown option --frobnicate", ["steps"] = "unknown option steps", ["--steps"] = "--steps needs a value",
      ["--steps ten"] = "--steps: expected an integer >= 1, got ten", ["--steps=0"] = "--steps: expected an integer >= 1, got 0",
      ["--steps 1e3"] = "got 1e3", ["--steps 999"] = "fewer than the 320 tokens",
      ["--layout HDN"] = "--layout: expected HND or NHD, got HDN",
      ["--plant=yes"] = "--plant takes no value", ["--heads 4"] = "--heads needs --random",
      ["--random --head-dim 40"] = "--head-dim: expected a multiple of 16, got 40", ["--device abacus"] = '--device: "abacus"',
    } do
      local result = decode(plain, options)
      assert.are.equal(2, result.status, options)
      assert.are.equal("", result.stdout)
      assert.is_truthy(result.stderr:find("^decode%.lua: [^\n]+\n$"), result.stderr)
      assert.is_truthy(result.stderr:find(text, 1, true), result.stderr)
    end
  end)
end)
