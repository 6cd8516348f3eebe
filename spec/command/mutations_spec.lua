-- scripts/mutate and its list of mistakes: the list keeps up with the sources.
local mutate = require "spec.support.mutate"
local process = require "spec.support.runtime_process"

local root = process.root .. "/"

describe("the mistakes that specs have to see #quick", function()
  it("are each in the sources exactly once, change them, and name a spec file", function()
    local sources, seen = {}, {}
    for _, mistake in ipairs(mutate.all()) do
      sources[mistake.file] = sources[mistake.file] or process.read(root .. mistake.file)
      local _, line = mutate.find(mistake, sources[mistake.file]) -- raises with the text
      assert.is_true(line >= 1)
      assert.is_string(mistake.with)
      assert.not_equal(mistake.text, mistake.with, mistake.why)
      assert.is_string(process.read(root .. mistake.spec), mistake.spec)
      local name = mistake.file .. ": " .. mistake.why
      assert.is_nil(seen[name], name)
      seen[name] = true
    end
    assert.is_true(#mutate.all() > 100)
  end)

  it("are refused by name when their text is gone, or there twice", function()
    local mistake = { file = "a.c", text = "x = 1" }
    assert.same({ 6, 2 }, { mutate.find(mistake, "f();\nx = 1;") })
    for source, times in pairs { ["y = 1"] = "nowhere", ["x = 1; x = 1"] = "more than once" } do
      local ok, message = pcall(mutate.find, mistake, source)
      assert.is_false(ok)
      assert.equal(("spec/support/mutations.lua: a.c: expected this text once, found it %s:\nx = 1"):format(times),
        message)
    end
  end)
end)

describe("scripts/mutate", function()
  local function run(options)
    return process.run(("cd / && %s %s"):format(process.quote(root .. "scripts/mutate"), options))
  end

  it("--list names the mistakes with their places, all or those with a text", function()
    local result = run("--list")
    assert.same({ 0, "" }, { result.status, result.stderr })
    assert.equal(#mutate.all(), select(2, result.stdout:gsub("\n", "")))
    result = run("--list pages.lua 'V has'")
    assert.same({ 0, "" }, { result.status, result.stderr })
    for line in result.stdout:gmatch("[^\n]+") do
      assert.matches("^[%w_./]+:%d+ %a", line)
      assert.is_truthy(line:find("pages.lua", 1, true) or line:find("V has", 1, true), line)
    end
    assert.matches("\nbindings/lua/nibble/pages%.lua:%d+ ", result.stdout)
    assert.matches("^runtime/ops/append%.c:%d+ V has", result.stdout)
  end)

  it("--help explains itself; a wrong use returns 2", function()
    assert.matches("^usage: scripts/mutate ", run("--help").stdout)
    for _, options in ipairs { "--no", "'no mistake is called so'" } do
      local result = run(options)
      assert.same({ 2, "" }, { result.status, result.stdout })
      assert.matches("^scripts/mutate: ", result.stderr)
    end
  end)

  it("--list, --help and a wrong use need Lua and nothing that is installed or built for them", function()
    local result = process.run(([[
      cd / && bin=$(mktemp -d) && trap 'rm -rf "$bin"' EXIT || exit
      for name in dirname cut tr lua5.4 lua54 lua; do path=$(command -v $name) && ln -s "$path" "$bin/$name"; done
      for name in apt-get sudo; do printf '#!/bin/sh\necho "$0 $*" >&2; exit 1\n' >"$bin/$name" && chmod +x "$bin/$name"; done
      unset CC
      for options in --list --help --no nothing-of-this-name; do PATH=$bin /bin/sh %s $options >"$bin/out"; echo $?
      done]]):format(
      process.quote(root .. "scripts/mutate")))
    assert.equal("0\n0\n2\n2\n", result.stdout)
    assert.equal("scripts/mutate: no option: --no\nscripts/mutate: no mistake has such a text: nothing-of-this-name\n",
      result.stderr)
  end)

  -- Its loop, on a small repository that has no compiler in it.
  it("tells what each mistake came to, and fails when a spec is missing", function()
    local folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    local function write(name, text)
      local file = assert(io.open(folder .. "/" .. name, "w"))
      file:write(text)
      file:close()
    end
    process.run(("cd %s && mkdir -p scripts spec/support && cp %sscripts/mutate scripts && "
      .. "cp %sspec/support/mutate.lua spec/support")
      :format(process.quote(folder), process.quote(root), process.quote(root)))
    write("value.txt", "one\ntwo\nthree\n")
    write("scripts/setup.sh", [[
say() { printf '%s: %s\n' "$me" "$*" >&2; }
fail() { say "$@"; exit 1; }
install() { :; }
find_lua() { command -v lua5.4 || command -v lua; }
build() { mkdir -p "$root/build"; ! grep -q broken "$root/value.txt" || fail "a broken build"; }
]])
    write("scripts/test", [[
#!/bin/sh
grep -q one value.txt && { grep -q three value.txt || [ "$*" = "--quick --no-keep-going spec/first_spec.lua" ]; } && exit
echo "failed spec/first_spec.lua:7: counts"
exit 1
]])
    process.run("chmod +x " .. process.quote(folder .. "/scripts/test"))
    local function mutations(text)
      write("spec/support/mutations.lua", ("return { { file = 'value.txt', spec = 'first', %s } }"):format(text))
      return process.run("LUA_PATH= LUA_PATH_5_4= " .. process.quote(folder .. "/scripts/mutate"))
    end
    local seen, late = "{ 'no one', 'one', 'zero' }", "{ 'no three', 'three', 'four' }"
    local result = mutations(seen .. ", " .. late)
    assert.same({ 0, "" }, { result.status, result.stderr })
    assert.equal("killed    value.txt:1 no one  by spec/first_spec.lua:7: counts\n" ..
      "killed    value.txt:3 no three  by spec/first_spec.lua:7: counts\n2 killed, 0 survived\n", result.stdout)
    result = mutations(seen .. ", { 'no two', 'two', '2' }")
    assert.equal(1, result.status)
    assert.matches("\nSURVIVED  value%.txt:2 no two\n1 killed, 1 survived\n$", result.stdout)
    result = mutations("{ 'no build', 'two', 'broken' }")
    assert.equal(1, result.status)
    assert.matches("^BROKEN    value%.txt:2 no build\n", result.stdout)
    result = mutations("{ 'gone', 'four', '4' }")
    assert.same({ 1, "" }, { result.status, result.stdout })
    assert.matches(
      "^scripts/mutate: spec/support/mutations%.lua: value%.txt: expected this text once, found it nowhere:\nfour\n$",
      result.stderr)
    assert.equal("one\ntwo\nthree\n", process.read(folder .. "/value.txt"))
    process.run("rm -rf " .. process.quote(folder))
  end)
end)
