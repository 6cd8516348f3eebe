-- The programs in README.md and in the folders' READMEs do what these say, and links lead somewhere.
-- (cookbook_spec.lua is about scripts/scenarios/README.md.)
local process = require "spec.support.runtime_process"

local quote = process.quote
local function readme(folder) return process.read(process.root .. folder .. "README.md") end

-- All pages of the repository, or those of one name.
local function pages(name)
  local list = {}
  local found = process.run(("cd %s && find . -name '%s' -not -path './build/*' -not -path './.*/*'"):format(
    quote(process.root), name))
  for path in found.stdout:gmatch("%./([^\n]+)") do list[#list + 1] = path end
  return list
end

local function write(path, code)
  local file = assert(io.open(path, "w"))
  file:write(code)
  file:close()
end

describe("the READMEs'", function()
  local folder

  before_each(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
  end)
  after_each(function() process.run("rm -rf " .. quote(folder)) end)

  it("tour prints what it shows #quick", function()
    local tour = assert(readme(""):match("\n    %$ build/release/nibble\n(.-)\n\n%f[^\n ]"))
    local code, shown = {}, {}
    for line in tour:gmatch("    ([^\n]*)") do
      local typed = line:match("^> (.*)")
      if typed then code[#code + 1] = typed else shown[#shown + 1] = line end
    end
    assert.are.equal(8, #code)
    -- Without a prompt: the value of the sixth line is printed, the last line fails.
    code[6] = "print(" .. code[6] .. ")"
    write(folder .. "/tour.lua", "#\n" .. table.concat(code, "\n"))
    local result = process.run(("LC_ALL=C.UTF-8 %s - <%s/tour.lua"):format(quote(process.command()), folder))
    assert.are.equal(1, result.status)
    local said = result.stdout .. result.stderr:gsub("nibble: stdin:%d+: ", "prompt:1: "):gsub("stdin:%d+:",
      "prompt:1:")
      :gsub("\t", "        ")
    said = said:gsub("cuda:%d+%]", "cpu]") -- printed tensors name the device under test
    local from = 1
    for _, line in ipairs(shown) do
      if line ~= "  ..." and not line:find("[C]: in ?", 1, true) then -- left out; the prompt itself
        local at, to = said:find(line .. "\n", from, true)
        assert.is_truthy(at, line .. "\nis not, at its place, in\n" .. said)
        from = to
      end
    end
  end)

  it("scenario prints what it shows #quick", function()
    local code, shown = readme("bindings/"):match("\n```lua\n(.-)```\n\n(    .-\n)\n%f[^\n ]")
    write(folder .. "/scenario.lua", code)
    local result = process.run(("LC_ALL=C.UTF-8 %s %s/scenario.lua"):format(quote(process.command()), folder))
    assert.are.same({ 0, "" }, { result.status, result.stderr })
    assert.are.equal((shown:gsub("%s+", " ")), (" " .. result.stdout:gsub("%s+", " ")))
  end)

  it("race is reported as it shows #quick", function()
    local code, shown = readme("bindings/"):match("\n## Checked mode.-```lua\n(.-)```\n\n"
      .. "    %$ nibble %-%-check race.lua\n(    .-\n)\n%f[^\n ]")
    write(folder .. "/race.lua", code)
    local result = process.run(("cd %s && %s --check race.lua 2>&1"):format(folder, quote(process.command())))
    assert.are.equal(1, result.status)
    local function plain(said) return (" " .. said):gsub("%s+", " "):gsub("on stream %d+", "on stream N") end
    assert.are.equal(plain(shown), plain(result.stdout))
  end)

  it("host is C11 and C++, and prints what it says", function()
    local line, code = readme("runtime/"):match("\n    (cc [^\n]*)\n\n```c\n(.-)```")
    local shown = assert(code:match("/%* (%x%x [%x ]*) %*/"))
    local library = process.command():match("^(.*/)[^/]*$") .. "libnibble.a"
    if not io.open(library) then pending("no libnibble.a beside the command: a build is not here") end
    local more = " -Wall -Wextra -pedantic -Werror" .. (process.sanitized() and " " .. process.sanitized() or "")
    local tried = 0
    for _, cc in ipairs { "cc -std=c11", "c++ -std=c++17" } do
      if process.has(cc:match("%S+")) then
        tried = tried + 1
        local source = folder .. (cc:find("+", 1, true) and "/host.cc" or "/host.c")
        write(source, code)
        local command = line:gsub("^cc %-std=c11", function() return cc .. more end)
          :gsub("%-o host host%.c", function() return ("-o %s/host %s"):format(folder, source) end)
          :gsub("build/release/libnibble%.a", function() return quote(library) end)
        local result = process.run(("cd %s && %s && %s/host"):format(quote(process.root), command, folder))
        assert.are.same({ status = 0, stdout = shown .. " ", stderr = "" }, result)
      end
    end
    if tried == 0 then pending("there is no C or C++ compiler here (cc, c++)") end
  end)

  it("host with a script of a stranger's prints what it shows", function()
    local line, code, shown = readme("bindings/sandbox/"):match(
      "\n    (cc [^\n]*scripted[^`]-)\n\n```c\n(.-)```\n\n(    .-\n)\n%f[^\n ]")
    local build = process.command():match("^(.*/)[^/]*$")
    if not io.open(build .. "libnibble_lua.a") then
      pending("no libnibble_lua.a beside the command: a build is not here")
    end
    local flags = process.run("pkg-config --cflags --libs lua5.4")
    if flags.status ~= 0 or not process.has("cc") then
      pending("no cc, or no development files of Lua 5.4 (pkg-config lua5.4)")
    end
    write(folder .. "/scripted.c", code)
    local command = line:gsub("^cc", "cc -Wall -Wextra -Werror" ..
      (process.sanitized() and " -fsanitize=address,undefined" or ""))
      :gsub("%-o scripted scripted%.c", function() return ("-o %s/scripted %s/scripted.c"):format(folder, folder) end)
      :gsub("%-I/usr/include/lua5.4", function() return flags.stdout:match("%-I%S+") or "" end)
      :gsub("build/release/", function() return quote(build) end)
    local result = process.run(("cd %s && %s && %s/scripted"):format(quote(process.root), command, folder))
    shown = shown:gsub("\n    ", "\n"):gsub("^    ", "")
    assert.are.same({ status = 0, stdout = shown, stderr = "" }, result)
  end)

  it("code is run: no block of Lua or C is without a spec #quick", function()
    local expected = { [""] = 0, ["bindings/"] = 2, ["bindings/sandbox/"] = 1, ["runtime/"] = 1 }
    for _, name in ipairs(pages("README.md")) do
      local at = name:gsub("README%.md$", "")
      local blocks = select(2, readme(at):gsub("\n```[lc]", ""))
      if at ~= "scripts/scenarios/" then assert.equal(expected[at] or 0, blocks, name) end
    end
  end)

  it("links lead to files, and to headings that are there #quick", function()
    local seen = 0
    for _, name in ipairs(pages("*.md")) do
      local text = process.read(process.root .. name)
      for target in text:gmatch("%]%(([^)%s]+)%)") do
        if not target:find("^%a+:") then
          local path, heading = target:match("^([^#]*)#?(.*)$")
          local file = path == "" and name or (name:match("^(.*/)") or "") .. path
          assert.is_truthy(io.open(process.root .. file), name .. " links to " .. target)
          if heading ~= "" then
            local headings = process.read(process.root .. file):lower():gsub("[`,.:?]", ""):gsub(" ", "-")
            assert.is_truthy(headings:find("#-" .. heading:gsub("%-", "%%-") .. "\n"), name .. " links to " .. target)
          end
          seen = seen + 1
        end
      end
    end
    assert.is_true(seen > 10)
  end)

  it("picture is what its example draws #quick", function()
    local path = process.root .. "scripts/examples/page_table"
    local result = process.run(("%s %s.lua %s/picture.svg"):format(quote(process.command()), path, folder))
    assert.same({ 0, "" }, { result.status, result.stderr })
    assert.equal(process.read(path .. ".svg"), process.read(folder .. "/picture.svg"))
  end)

  it("first is one page #quick", function()
    assert.is_true(select(2, readme(""):gsub("\n", "")) <= 130)
  end)
end)
