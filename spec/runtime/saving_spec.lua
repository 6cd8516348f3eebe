-- Saving: a file takes its place when it is whole; what fails leaves the old one and nothing beside it.
-- spec/embedding/saving.c has pipes, links, deadlines and what loading asks for.
local process = require("spec.support.runtime_process")
local program = require("spec.support.host_program")
local nibble = require("nibble")

local quote = process.quote

-- Each way to save, as code with a `path` that writes more than 16 KiB, and what is there afterwards.
local WAYS = {
  ["tensor:save"] = [[return nibble.zeros(10000, { device = "cpu" }):save(path)]],
  ["nibble.save"] = [[return nibble.save(path, { x = nibble.zeros(10000, { device = "cpu" }) })]],
  ["nibble.create"] = [[
    local file <close> = assert(nibble.create(path))
    for i = 1, 400 do file:write(("%-99d\n"):format(i)) end
    return file:close()]],
  ["svg.save"] = [[return require("nibble.svg").save(path, ("<svg/>\n"):rep(10000))]],
  ["report.write"] =
    [[return require("nibble.report").write(path, { title = "long", notes = { ("note "):rep(10000) } })]],
  ["trace.record"] = [[
    local recorder = assert(require("nibble.trace").record(path))
    local t = nibble.zeros(4, { device = "cpu" })
    for _ = 1, 200 do t:fill(1) end
    return recorder:close()]],
  ["trace.chrome"] = [[
    local list = {}
    for i = 1, 400 do list[i] = { kind = "work", time = i, operation = "tensor:fill", stream = 1, accesses = {} } end
    return require("nibble.trace").chrome({ header = {}, list = list }, path)]],
}

local folder

local function path_of(name) return folder .. "/" .. name end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function files()
  local names = process.run("ls -A " .. quote(folder)).stdout
  return names
end

-- Runs a way in a process of its own; the shell text comes before.
local function run(way, path, before, args)
  return process.script(([[
    local nibble, path = require "nibble", %q
    local function save() %s end
    print(save())]]):format(path, WAYS[way]), { before = before, args = args })
end

describe("saving", function()
  before_each(function() folder = process.run("mktemp -d").stdout:gsub("%s+$", "") end)
  after_each(function() process.run("rm -rf " .. quote(folder)) end)

  for way in pairs(WAYS) do
    it(way .. " leaves the old file, and nothing else, when there is no room for the new one", function()
      local path = path_of("file")
      write(path, "old")
      local result = run(way, path, "unset NIB_STANDIN_LOG; ulimit -f 8;") -- blocks of 512 or 1024 bytes
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("^nil\t.*" .. path:gsub("%p", "%%%0") .. ".*File too large", result.stdout)
      assert.equal("old", process.read(path))
      assert.equal("file\n", files())
    end)

    it(way .. " replaces a file, whose mode stays, and follows a link", function()
      local path, link = path_of("file"), path_of("link")
      write(path, "old")
      process.run(("chmod 604 %s && ln -s file %s"):format(quote(path), quote(link)))
      local result = run(way, link)
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("^%w+\n$", result.stdout)
      assert.is_true(#process.read(path) > 16384)
      assert.equal("file\nlink\n", files())
      assert.equal("-rw----r--  file", process.run("cd " .. quote(folder) ..
        " && find . -name file -printf '%M  %f'").stdout)
      assert.equal("file\n", process.run("readlink " .. quote(link)).stdout)
    end)

    it(way .. " says what cannot be written", function()
      local path = path_of("no/such/folder/file")
      local result = run(way, path)
      assert.is_truthy((result.stdout .. result.stderr):find(path, 1, true))
      assert.equal("", files())
    end)
  end

  it("writes into a device as it is", function()
    local result = run("nibble.create", "/dev/stdout", nil, "| cat")
    assert.equal(400 * 100 + #"true\n", #result.stdout)
    for way in pairs(WAYS) do
      assert.matches("^nil\t.*No space left on device", run(way, "/dev/full").stdout, 1, false, way)
    end
  end)

  it("of a run that is killed leaves what it wrote beside the old file, in whole lines", function()
    local path = path_of("run.jsonl")
    write(path, "old")
    local result = process.script(([[
      local nibble = require "nibble"
      local recorder = assert(require("nibble.trace").record(%q))
      local t = nibble.zeros(4, { device = "cpu" })
      for _ = 1, 3 do t:fill(1) end
      os.execute("kill -9 $PPID")
      t:fill(2)]]):format(path), { args = "|| exit 9" })
    assert.equal(9, result.status)
    assert.equal("old", process.read(path))
    local name = files():match("(run%.jsonl%.%x+%.part)\n")
    local run_read = assert(require("nibble.trace").read(path_of(name)))
    local fills = 0
    for _, o in ipairs(run_read.list) do fills = fills + (o.operation == "tensor:fill" and 1 or 0) end
    assert.is_true(fills >= 3)
  end)

  it("of a run that is killed leaves a link that leads nowhere as it was", function()
    local link = path_of("link")
    process.run("ln -s file " .. quote(link))
    local result = process.script(([[
      local file = assert(require("nibble").create(%q))
      file:write("half")
      os.execute("kill -9 $PPID")]]):format(link), { args = "|| exit 9" })
    assert.equal(9, result.status)
    assert.matches("^file%.%x+%.part\nlink\n$", files())
    assert.equal("file\n", process.run("readlink " .. quote(link)).stdout)
  end)

  it("of a script that fails in between keeps the old file #quick", function()
    local path = path_of("file")
    write(path, "old")
    assert.error_matches(function()
      local file <close> = assert(nibble.create(path))
      file:write("half")
      error("in between")
    end, "in between")
    assert.equal("old", process.read(path))
    assert.equal("file\n", files())
  end)

  it("of a script that forgets to close is done when the writer is collected #quick", function()
    local path = path_of("file")
    write(path, "old")
    local function forget() assert(nibble.create(path)):write("new") end
    forget()
    assert.equal("old", process.read(path))
    collectgarbage()
    assert.equal("new", process.read(path))
    assert.equal("file\n", files())
  end)

  it("keeps the old file below /dev, too, where that is a file system #quick", function()
    local there = process.run("mktemp -d /dev/shm/nibble.XXXXXX").stdout:gsub("%s+$", "")
    if there == "" then pending("no /dev/shm that can be written") end
    process.run("rmdir " .. quote(folder))
    folder = there
    local path = path_of("file")
    write(path, "old")
    local file = assert(nibble.create(path))
    file:write("new")
    assert.equal("old", process.read(path))
    assert.is_true(file:close())
    assert.equal("new", process.read(path))
  end)

  it("says of a closed writer, of other values and of none that they are not what it takes #quick", function()
    local file = assert(nibble.create(path_of("file")))
    assert.error_matches(function() file:write(1) end, "writer:write: text: expected a string, got 1", 1, true)
    assert.equal(file, file:write("a", "b"))
    assert.is_true(file:close())
    assert.is_true(file:close())
    assert.error_matches(function() file:write("c") end,
      "writer:write: self: expected an open writer, got a closed one", 1, true)
    assert.equal("ab", process.read(path_of("file")))
    assert.error_matches(function() nibble.create() end, "create: path: expected a string, got no value", 1, true)
  end)

  it("and loading: pipes, links, deadlines and memory, from C", function()
    local reason = program.run("saving")
    if reason then pending(reason) end
  end)
end)
