-- The example host (bindings/host): eight and more hostile scripts and a good one run for some seconds. No time is
-- judged here; the host prints how long its frames took.
local process = require("spec.support.runtime_process")

local quote = process.quote
local command = (process.command():match("^(.*/)[^/]*$") or process.build()) .. "nibble-host"
local hostile = process.root .. "spec/data/hostile/"

local function need()
  if not process.has(quote(command)) then pending("no nibble-host beside the command: a build is not here") end
end

-- Runs the host over a copy of the hostile scripts; `during` is shell text that runs meanwhile, in the copy's folder.
local function run(frames, during)
  local folder = process.run("mktemp -d").stdout:gsub("%s+$", "")
  local result = process.run(
    ("cp %s*.lua %s && cd %s && { (%s) & timeout -k 5 120 %s --frames %d %s; status=$?; wait; exit $status; }")
    :format(quote(hostile), folder, folder, during or "true", quote(command), frames, folder))
  process.run("rm -r " .. folder)
  return result
end

local function counts(output, name)
  local calls, raised, expired, exhausted = output:match("  " .. name ..
    "%.lua +(%d+) calls, +(%d+) raised, +(%d+) out of time, +(%d+) out of memory")
  return { calls = tonumber(calls), raised = tonumber(raised), expired = tonumber(expired),
    exhausted = tonumber(exhausted) }
end

describe("the example host", function()
  it("survives scripts that loop, catch, leak, raise, exhaust, corrupt, hang in C, "
    .. "and play with threads and finalizers", function()
    need()
    local result = run(240)
    assert.same({ 0, "" }, { result.status, result.stderr })
    local text = result.stdout
    assert.matches("240 frames of at most 8.0 ms, %l[%l-]+ priority: p50 [%d.]+ ms, p99 [%d.]+ ms, worst [%d.]+ ms",
      text)
    for _, name in ipairs({ "loop", "catch", "queue", "exhaust", "slow", "coroutines", "finalizers" }) do
      assert.is_true(counts(text, name).expired > 0, name .. "\n" .. text)
    end
    for _, name in ipairs({ "raise", "corrupt" }) do
      assert.is_true(counts(text, name).raised > 0, name .. "\n" .. text)
    end
    local leak = counts(text, "leak")
    assert.is_true(leak.raised + leak.exhausted + leak.expired > 0, text)
    local good = counts(text, "good")
    assert.is_true(good.calls > 2 and good.raised == 0, text)
    assert.matches("good.lua: called %d+ times", text)
  end)

  it("loads a script again when its file changes, keeps the old one when the new one fails, and drops what is gone",
    function()
    need()
    local result = run(260, [[
      sleep 1; echo 'error("new and bad")' >good.lua
      sleep 1; (cat ]] .. quote(hostile .. "good.lua") .. [[; echo 'print("the new one")') >good.new; mv good.new good.lua; rm loop.lua
      printf '%s\n' 'function on_load() print("late\27[2J\n=") error("\27c") end' >late.lua]])
    assert.same({ 0, "" }, { result.status, result.stderr })
    local text = result.stdout
    local at = 1
    for _, line in ipairs({ "good.lua: hello\n", "good.lua: loaded\n", "good.lua:1: new and bad\n",
      "good.lua: not reloaded, the old version still runs\n",
      "good.lua: the new one\n", "good.lua: again\n", "good.lua: reloaded\n" }) do
      local _, last = text:find(line, at, true)
      assert.is_truthy(last, line .. " is missing in\n" .. text)
      at = last
    end
    assert.matches("late.lua: late\\x1B%[2J\\x0A=\nlate.lua: script raised an error: [^\n]*late.lua:1: \\x1Bc\n", text)
    assert.is_nil(text:find("[%z\1-\9\11-\31\127]"))
    assert.is_truthy(text:find("  loop.lua ", 1, true) < text:find("260 frames", 1, true), text)
    assert.is_true(tonumber(text:match("good.lua: called (%d+) times")) > 2, text) -- its state outlived three versions
  end)

  it("shows the page table on any display of SDL2's, and says why it cannot", function()
    need()
    local line =
      "env -u DISPLAY -u WAYLAND_DISPLAY SDL_VIDEODRIVER=%s timeout -k 5 60 %s --window --frames 40 /nonexistent"
    local nowhere = process.run(line:format("nothing", quote(command)))
    assert.equal(1, nowhere.status)
    assert.matches("^nibble%-host: cannot open a window: %S", nowhere.stderr)
    if nowhere.stderr:find("without SDL2", 1, true) then return pending("built without SDL2") end
    local shown = process.run(line:format("dummy", quote(command)))
    assert.same({ 0, "" }, { shown.status, shown.stderr })
    assert.matches("^40 frames of at most", shown.stdout)
  end)

  it("says how it is called, and what it cannot do", function()
    need()
    local result = process.run(quote(command))
    assert.equal(2, result.status)
    assert.matches("^usage: nibble%-host", result.stderr)
    assert.equal(2, process.run(quote(command) .. " --frames").status)
    assert.same({ 0, "" }, { process.run(quote(command) .. " --frames 3 /nonexistent").status, "" })
  end)
end)
