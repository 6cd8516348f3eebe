-- scripts/scenarios/README.md: each recipe runs, and does what the text says.
local process = require "spec.support.runtime_process"

local quote = process.quote
local text = process.read(process.root .. "scripts/scenarios/README.md")

-- The recipes: headings and the code behind them.
local recipes, broken = {}, nil
for section in (text:gsub("\n## ", "\0")):gmatch("%z([^%z]+)") do
  local heading, body = section:match("^([^\n]+)(.*)$")
  local code = body:match("\n```lua\n(.-)```")
  if heading == "When a scenario fails" then broken = { code = code, shown = body:match("\n\n(    FAILED.-\n)\n") }
  elseif code then recipes[#recipes + 1] = { heading = heading, code = code } end
end

describe("the scenario cookbook", function()
  local folder, command

  setup(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    command = process.run("realpath " .. quote(process.command())).stdout:gsub("\n$", "")
  end)
  teardown(function() process.run("rm -rf " .. quote(folder)) end)

  local function run(code, words)
    local file = assert(io.open(folder .. "/mine.lua", "w"))
    file:write(code)
    file:close()
    return process.run(("cd %s && LC_ALL=C.UTF-8 %s scenario ./mine.lua %s"):format(quote(folder), quote(command), words
      or ""))
  end

  it("has its recipes", function()
    local _, blocks = text:gsub("\n```lua\n", "")
    assert.are.equal(blocks, #recipes + 1)
    assert.is_true(#recipes >= 8)
  end)

  for _, recipe in ipairs(recipes) do
    it("'s recipe runs, and its check finds a wrong bit: " .. recipe.heading .. " #quick", function()
      local result = run(recipe.code)
      assert.are.same({ 0, "" }, { result.status, result.stderr }, result.stdout)
      assert.matches("\nok: after each of %d+ steps", result.stdout)
      result = run(recipe.code, "--plant")
      assert.are.same({ 0, "" }, { result.status, result.stderr })
      local place = result.stdout:match("\nplanted   after step %d+: ([^\n]+)\n")
      assert.is_truthy(result.stdout:find(": " .. place .. ": got 0x", 1, true), result.stdout)
    end)
  end

  it("'s mistake fails as it is shown", function()
    local result = run(broken.code)
    assert.are.equal(1, result.status)
    local got = result.stdout:match("(FAILED at.*)"):gsub(" %(byte %d+ of the tensor%)", ""):gsub("repeat:   %S+",
      "repeat:   nibble")
    local device = got:match("%-%-device (%S+)")
    local shown = ("\n" .. broken.shown):gsub("\n    ", "\n"):sub(2):gsub("%-%-device cpu", "--device " .. device)
    assert.are.equal(shown, got)
  end)

  it("'s command lines run", function()
    local lines = 0
    for line in text:gmatch("\n    nibble (scenario %l[^\n]*)") do
      lines = lines + 1
      assert.are.equal(0, process.run(quote(command) .. " " .. line).status, line)
    end
    assert.are.equal(2, lines)
  end)

  it("'s spec is one", function()
    local code = text:match("\n```lua spec\n(.-)```")
    run(recipes[2].code, "--steps 1") -- writes mine.lua
    local file = assert(io.open(folder .. "/mine_spec.lua", "w"))
    file:write(code)
    file:close()
    local result = process.run(
      ("cd %s && export LUA_PATH=%s LUA_CPATH=%s && lua5.4 %s/spec/support/busted.lua mine_spec.lua"):format(
      quote(folder), quote(package.path), quote(package.cpath),
        quote(process.run("realpath " .. process.root).stdout:gsub("\n", ""))))
    assert.are.equal(0, result.status, result.stdout .. result.stderr)
    assert.matches("6 successes / 0 failures", result.stdout)
  end)
end)
