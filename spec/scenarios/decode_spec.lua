-- `nibble scenario decode`, the main job, run as people run it: what it prints. Its grid and its faults are in
-- scenarios_spec.
local process = require "spec.support.runtime_process"

local function decode(options)
  return process.run(process.quote(process.command()) .. " scenario decode " .. (options or ""))
end

local function succeeds(result)
  assert.are.equal("", result.stderr)
  assert.is_truthy(result.stdout:find("\nok: ", 1, true), result.stdout)
  assert.are.equal(0, result.status)
end

describe("the decode scenario", function()
  it("on real input is equal, byte for byte, for 64 steps", function()
    local result = decode()
    succeeds(result)
    local text = result.stdout
    assert.is_truthy(text:find("\ndevice    cpu", 1, true) or os.getenv("NIBBLE_DEVICE"))
    assert.is_truthy(text:find("3 layers, 320 tokens, 4 KV heads x 64, bfloat16", 1, true))
    assert.is_truthy(text:find("\n          8 requests, ", 1, true))
    assert.is_truthy(text:find("after each of 64 steps", 1, true))
    -- A replay for each step; padding took part.
    assert.is_truthy(text:find("step, graph replay +64 "))
    assert.is_truthy(text:find("step, eager +64 "))
    assert.is_truthy(text:find("12 nodes (3 append, 3 swizzle, 3 materialize, 3 dequantize)", 1, true))
    assert.is_truthy(text:find("\nrequests and their pages of 16 tokens", 1, true))
    assert.is_true(tonumber(text:match("(%d+) padding rows wrote nothing, page 0 is untouched\n$")) > 0)
    assert.is_nil(text:find("\27", 1, true), "no colour where there is no terminal")
  end)

  it("shows the error of each layer and head within its bound, and one that is near to it", function()
    local text = decode("--steps 8").stdout
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

  it("runs on K and V of a user's file, its layers in order", function()
    local nibble = require "nibble"
    local path = os.tmpname()
    os.remove(path)
    path = path .. ".safetensors"
    local tensors = { unrelated = nibble.zeros(3) }
    for _, layer in ipairs { 10, 2 } do
      for i, part in ipairs { ".k", ".v" } do
        tensors["model.layers." .. layer .. part] = nibble.randn(30, 2, 64, { seed = layer + i }) -- float32
      end
    end
    nibble.save(path, tensors)
    local result = decode("--steps 4 --requests 2 --input " .. path)
    succeeds(result)
    assert.is_truthy(result.stdout:find(path .. ": 2 layers, 30 tokens, 2 KV heads x 64, bfloat16", 1, true))
    local second, tenth = result.stdout:find("model.layers.2 K", 1, true),
      result.stdout:find("model.layers.10 K", 1, true)
    assert.is_true(second < tenth)
    tensors["model.layers.2.v"] = nibble.zeros(30, 64)
    nibble.save(path, tensors)
    result = decode("--steps 4 --input " .. path)
    assert.are.equal(2, result.status)
    assert.is_truthy(result.stderr:find("--input: expected K and V of all layers to be [tokens, heads, head_dim]", 1,
      true))
    tensors["model.layers.2.v"] = nil
    nibble.save(path, tensors)
    result = decode("--steps 4 --input " .. path)
    assert.are.equal(2, result.status)
    assert.is_truthy(result.stderr:find("load: name: ", 1, true))
    os.remove(path)
    for options, message in pairs { ["--input /nonexistent/folder"] = "/nonexistent/folder",
      ["--input real --random"] = "exclude" } do
      result = decode(options)
      assert.are.equal(2, result.status)
      assert.is_truthy(result.stderr:find(message, 1, true), result.stderr)
    end
  end)

  it("runs on what a sentence encoder cached, twelve heads of 32", function()
    local result = decode("--input minilm --steps 6 --requests 3")
    succeeds(result)
    assert.is_truthy(result.stdout:find("3 layers, 120 tokens, 12 KV heads x 32, bfloat16", 1, true))
  end)

  it("leaves materialize out, and says so, where it cannot be", function()
    for _, options in ipairs { "--head-dim 80", "--head-dim 16 --page-size 1",
      "--head-dim 64 --page-size 3 --layout NHD" } do
      local result = decode("--random --heads 2 --tokens 40 --steps 10 " .. options)
      succeeds(result)
      assert.is_truthy(result.stdout:find("no materialize: it needs head_dim % 64 == 0 and page_size % 4 == 0", 1,
        true))
      assert.is_nil(result.stdout:find("swizzle", 1, true))
    end
  end)

  it("depends on the seed alone", function()
    local function table_of(seed)
      return decode("--random --tokens 40 --steps 5 --heads 1 --seed " .. seed).stdout:match("quantization error.*")
    end
    assert.are.equal(table_of(7), table_of(7))
    assert.are_not.equal(table_of(7), table_of(8))
  end)
end)
