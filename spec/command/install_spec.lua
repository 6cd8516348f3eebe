-- What `make -C build install` leaves behind: which files, that programs and scripts need nothing but them, what the
-- shared objects export, the command's page, and the same through LuaRocks.
local process = require("spec.support.runtime_process")

local quote = process.quote
local root = process.run("cd " .. quote(process.root) .. " && pwd").stdout:gsub("\n$", "")
local silence = { status = 0, stdout = "", stderr = "" }

local function exists(path)
  return process.run("[ -e " .. quote(path) .. " ]").status == 0
end

local function lines(text)
  local all = {}
  for line in text:gmatch("[^\n]+") do all[#all + 1] = line end
  table.sort(all)
  return all
end

local function write(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

-- What it takes to install; the release build is what is installed.
local missing
if process.sanitized() then
  missing = "the sanitized build is not installed"
elseif not exists(root .. "/build/GNUmakefile") or not exists(root .. "/build/release/libnibble.a") then
  missing = "a build is not here"
elseif not process.has("make") then
  missing = "no make here"
end

local function with(...)
  for _, program in ipairs({ ... }) do
    if not process.has(program) then pending("no " .. program .. " here") end
  end
end

-- No build may write the makefiles meanwhile (scripts/setup).
local lock = process.has("flock") and "flock " .. quote(root .. "/build/lock") or ""

local function make_install(variables)
  local result = process.run(("%s make -C %s/build config=release install %s"):format(lock, quote(root), variables))
  assert.same({ 0, "" }, { result.status, result.stderr })
end

-- The names that a shared object offers to others.
local function exports(path)
  local names = {}
  for name in process.run("nm -D --defined-only " .. quote(path)).stdout:gmatch(" %u ([%w_]+)") do
    names[#names + 1] = name
  end
  table.sort(names)
  return names
end

describe("the installed tree", function()
  if missing then
    it("is made and used", function() pending(missing) end)
    return
  end

  local folder, prefix

  setup(function()
    folder = process.run("mktemp -d").stdout:gsub("\n$", "")
    prefix = folder .. "/tree"
    make_install("PREFIX=" .. prefix)
  end)
  teardown(function() process.run("rm -rf " .. quote(folder)) end)

  -- Runs a shell line in an empty folder, in an environment that knows of the tree what `environment` says.
  local function away(line, environment)
    return process.run(("cd $(mktemp -d -p %s) && env -i PATH=\"$PATH\" %s sh -c %s"):format(quote(folder), environment
      or "",
      quote(line)))
  end

  -- Compiles a program with the flags of pkg-config alone; returns its path.
  local function compile(name, code, flags)
    with("cc", "pkg-config")
    write(folder .. "/" .. name .. ".c", code)
    local line = ("cc -std=c11 -Wall -Wextra -Werror -MD -MF %s/%s.d -o %s/%s %s/%s.c %s"):format(folder, name, folder,
      name,
      folder, name, flags)
    assert.same(silence, away(line, "PKG_CONFIG_PATH=" .. prefix .. "/lib/pkgconfig"))
    assert.is_nil(process.read(folder .. "/" .. name .. ".d"):find(root, 1, true), "includes headers of the repository")
    return folder .. "/" .. name
  end

  it("has what it should have, and nothing else", function()
    local expected = { "bin/nibble", "include/nibble.h", "include/nibble_dlpack.h", "include/nibble_lua.h",
      "include/nibble_tools.h", "lib/libnibble.a", "lib/libnibble.so",
      "lib/libnibble.so.2", "lib/libnibble_lua.a", "lib/lua/5.4/nibble.so", "lib/pkgconfig/nibble-lua.pc",
      "lib/pkgconfig/nibble.pc", "share/doc/nibble/CHANGELOG.md", "share/doc/nibble/LICENSE",
      "share/doc/nibble/README.md", "share/doc/nibble/bindings/README.md",
      "share/doc/nibble/bindings/sandbox/README.md", "share/doc/nibble/kernels/README.md",
      "share/doc/nibble/runtime/README.md", "share/doc/nibble/scripts/README.md",
      "share/doc/nibble/scripts/scenarios/README.md",
      "share/man/man1/nibble.1" }
    for _, file in ipairs(lines(process.run("cd " .. quote(root) ..
      " && find bindings/lua/nibble -name '*.lua'").stdout)) do
      expected[#expected + 1] = "share/lua/5.4/" .. file:match("^bindings/lua/(.*)")
    end
    for _, file in ipairs(lines(process.run("cd " .. quote(root) .. " && " ..
      "find scripts/scenarios scripts/examples scripts/bench spec/data/real spec/data/minilm -type f").stdout)) do
      expected[#expected + 1] = "share/nibble/" .. file
    end
    table.sort(expected)
    assert.same(expected, lines(process.run("cd " .. quote(prefix) .. " && find * -type f -o -type l").stdout))
    assert.equal("libnibble.so.2\n", process.run("readlink " .. prefix .. "/lib/libnibble.so").stdout)
    -- Everybody may read it, and run what can be run.
    local odd = process.run("cd " .. quote(prefix) ..
      " && find . -type f ! -perm 644 ! -path ./bin/nibble -o -type d ! -perm 755")
    assert.same(silence, odd)
    assert.equal("755\n", process.run("stat -c %a " .. prefix .. "/bin/nibble").stdout)
  end)

  it("is put together in DESTDIR, without a trace of it in the files", function()
    make_install(("PREFIX=/opt/nibble DESTDIR='%s/a stage'"):format(folder))
    local staged = folder .. "/a stage/opt/nibble"
    local list = "cd %s && find * | sort"
    assert.equal(process.run(list:format(quote(prefix))).stdout, process.run(list:format(quote(staged))).stdout)
    assert.same({ status = 1, stdout = "", stderr = "" }, process.run(("grep -rl 'a stage' %s"):format(quote(staged))))
    assert.matches("^prefix=/opt/nibble\n", process.read(staged .. "/lib/pkgconfig/nibble.pc"))
  end)

  it("may be read by everybody, whoever installs", function()
    local private = folder .. "/private"
    assert.same(silence, process.run(("umask 077; PREFIX=%s %s/scripts/install"):format(quote(private), quote(root))))
    local odd = process.run(("cd %s && find . ! -type l ! -perm 644 ! -perm 755 -o -name '*.pc' ! -perm 644"):format(
      quote(private)))
    assert.same(silence, odd)
  end)

  it("may lie below a name with blanks, quotes and comments, and is removed without a file left but others'", function()
    with("cc", "pkg-config")
    local odd = folder .. "/it's a \"pre\\fix\" #1 & [<more>]"
    make_install("PREFIX=" .. quote(odd))
    write(odd .. "/share/nibble/mine", "")
    local built = away([[printf '#include <nibble.h>\nint main(void) { return nib_abi_version() != NIB_ABI_VERSION; }' >odd.c &&
      eval "cc -o odd odd.c $(pkg-config --cflags --libs nibble)" && ./odd]],
      ("PKG_CONFIG_PATH=%s/lib/pkgconfig LD_LIBRARY_PATH=%s/lib"):format(quote(odd), quote(odd)))
    assert.same(silence, built)
    local removed = process.run(("%s make -C %s/build uninstall PREFIX=%s"):format(lock, quote(root), quote(odd)))
    assert.same({ 0, "" }, { removed.status, removed.stderr })
    assert.same({ "share/nibble/mine" }, lines(process.run("cd " .. quote(odd) ..
      " && find * -type f -o -type l").stdout))
    assert.is_false(exists(odd .. "/share/lua/5.4/nibble"))
  end)

  it("is refused where the path is not absolute, and nothing is written", function()
    for _, variables in ipairs({ "PREFIX=here", "PREFIX=/usr DESTDIR=here" }) do
      local result = process.run(("%s make -C %s/build config=release install %s"):format(lock, quote(root), variables))
      assert.equal(2, result.status)
      assert.matches("expected an absolute path, got here\n", result.stderr)
      assert.is_false(exists(root .. "/build/here"))
    end
  end)

  it("is explained by --help; no other option or second word is taken for a configuration", function()
    local script = quote(root .. "/scripts/install")
    assert.matches("^Installs what .*%-%-uninstall.*share/man", process.run(script .. " --help").stdout)
    for words, message in pairs { ["--no"] = "no option: --no",
      ["release debug"] = "expected one configuration or --uninstall, got "
      .. "release debug" } do
      assert.same({ status = 1, stdout = "", stderr = "scripts/install: " .. message .. "\n" },
        process.run(script .. " " .. words))
    end
  end)

  it("may lie below a name that looks like a variable", function()
    with("cc", "pkg-config")
    local odd = folder .. "/a$HOME"
    assert.same(silence, process.run(("PREFIX=%s %s/scripts/install"):format(quote(odd), quote(root))))
    local built = away([[printf '#include <nibble.h>\nint main(void) { return nib_abi_version() != NIB_ABI_VERSION; }' >odd.c &&
      cc -o odd odd.c $(pkg-config --cflags --libs nibble) && ./odd]],
      ("PKG_CONFIG_PATH=%s/lib/pkgconfig LD_LIBRARY_PATH=%s/lib"):format(quote(odd), quote(odd)))
    assert.same(silence, built)
    local refused = process.run(("PREFIX=%s %s/scripts/install"):format(quote(folder .. "/two\nlines"), quote(root)))
    assert.same({ 1, "scripts/install: PREFIX: expected a path of one line, which pkg-config can hold\n" },
      { refused.status, refused.stderr })
  end)

  local host = process.read(root .. "/runtime/README.md"):match("\n```c\n(.-)```")
  local shown = host:match("/%* (%x%x [%x ]*) %*/") .. " "

  it("is all that a program in C needs, with the shared library", function()
    with("readelf")
    local program = compile("shared", host, "$(pkg-config --cflags --libs nibble)")
    assert.same({ status = 0, stdout = shown, stderr = "" }, away(program, "LD_LIBRARY_PATH=" .. prefix .. "/lib"))
    assert.matches("%(NEEDED%)[^\n]*%[libnibble%.so%.2%]", process.run("readelf -d " .. program).stdout)
    assert.not_equal(0, away(program).status)
    assert.matches("%(SONAME%)[^\n]*%[libnibble%.so%.2%]",
      process.run(("readelf -d %s/lib/libnibble.so"):format(prefix)).stdout)
  end)

  it("is all that a program in C needs, with the static library", function()
    local program = compile("static", host,
      "$(pkg-config --cflags nibble) -Wl,-Bstatic $(pkg-config --libs nibble) -Wl,-Bdynamic -lm -ldl -lpthread")
    assert.same({ status = 0, stdout = shown, stderr = "" }, away(program))
    local static = process.run(("PKG_CONFIG_PATH=%s/lib/pkgconfig pkg-config --static --libs nibble"):format(
      prefix)).stdout
    for _, library in ipairs({ "-lnibble", "-lm", "-ldl", "-lpthread" }) do
      assert.is_truthy(static:find(library, 1, true))
    end
  end)

  it("is all that a program needs that gives tensors to a framework", function()
    local program = compile("framework", [[
      #include <nibble.h>
      #include <nibble_dlpack.h>
      #include <stdio.h>
      int main(void) {
        nib_runtime *rt;
        nib_tensor *tensor;
        struct DLManagedTensorVersioned *managed;
        const int64_t shape[] = { 2, 3 };
        if (nib_runtime_create(NULL, &rt) != NIB_OK) return 1;
        if (nib_tensor_create(nib_device_at(rt, 0), NIB_BFLOAT16, 2, shape, &tensor) != NIB_OK) return 1;
        if (nib_tensor_to_dlpack(tensor, -1, &managed) != NIB_OK) return 1;
        const struct nib_dlpack_tensor *t = &managed->tensor;
        printf("%d %d %d {%d, %d}\n", t->device_type == NIB_DLPACK_CPU, t->code == NIB_DLPACK_BFLOAT, t->bits, (int)t->shape[0],
               (int)t->shape[1]);
        nib_tensor_release(tensor);
        managed->deleter(managed);
        nib_runtime_close(rt);
      }]], "$(pkg-config --cflags --libs nibble)")
    assert.same({ status = 0, stdout = "1 1 16 {2, 3}\n", stderr = "" },
      away(program, "LD_LIBRARY_PATH=" .. prefix .. "/lib"))
  end)

  it("is all that a program with Lua states of its own and scripts of strangers needs", function()
    if process.run("pkg-config --exists lua5.4").status ~= 0 then
      pending("no development files of Lua 5.4 here (pkg-config lua5.4)")
    end
    local program = compile("states", [[
      #include <lauxlib.h>
      #include <lualib.h>
      #include <nibble.h>
      #include <nibble_lua.h>
      #include <stdio.h>
      int main(int argc, char **argv) {
        lua_State *L = luaL_newstate();
        luaL_openlibs(L);
        luaL_requiref(L, "nibble", luaopen_nibble, 0);
        lua_settop(L, 0);
        int failed = argc < 2 || luaL_dostring(L, argv[1]);
        printf("%s %s\n", nib_version(), lua_tostring(L, -1));
        lua_close(L);
        nib_sandbox *sandbox = NULL;
        failed |= nib_sandbox_create(NULL, &sandbox) != NIB_OK;
        const char endless[] = "nibble.zeros(3) assert(not io) while true do end";
        failed |= nib_sandbox_load(sandbox, "endless", endless, sizeof endless - 1, 20000) != NIB_EXPIRED;
        puts(nib_sandbox_error(sandbox));
        nib_sandbox_close(sandbox);
        return failed;
      }]], "$(pkg-config --cflags --libs nibble-lua)")
    local code = "return require('nibble').full(3, 7, {device = 'cpu'})[2] .. ' ' .. type(require('nibble.pages').plan)"
    local result = away(program .. ' "' .. code .. '"',
      ("LD_LIBRARY_PATH=%s/lib LUA_PATH_5_4='%s/share/lua/5.4/?.lua'"):format(
      prefix, prefix))
    assert.same({ status = 0, stdout = require("nibble").version .. " 7 function\n" ..
      "endless: exceeded its budget of 20000 us, at endless:1\n", stderr = "" }, result)
  end)

  it("is all that a script in plain Lua needs", function()
    with("lua5.4")
    write(folder .. "/script.lua", [[
      local nibble, pages, show = require("nibble"), require("nibble.pages"), require("nibble.show")
      local allocator = pages.allocator({ num_pages = 4, page_size = 2 })
      assert(type(show.histogram) == "function" and allocator)
      assert(package.searchpath("nibble.pages", package.path):find(arg[1], 1, true) == 1)
      assert(package.searchpath("nibble", package.cpath):find(arg[1], 1, true) == 1)
      print(nibble.version, nibble.full(2, 3, { device = "cpu" })[2])]])
    local result = away(("lua5.4 %s/script.lua %s"):format(folder, prefix),
      ("LUA_PATH='%s/share/lua/5.4/?.lua' LUA_CPATH='%s/lib/lua/5.4/?.so'"):format(prefix, prefix))
    assert.same({ status = 0, stdout = require("nibble").version .. "\t3\n", stderr = "" }, result)
  end)

  it("has a command that finds its modules from any directory, by any name", function()
    local code = "io.write(nibble.version, ' ', package.searchpath('nibble.pages', package.path))"
    local expected = { status = 0, stderr = "", stdout = ("%s %s/share/lua/5.4/nibble/pages.lua"):format(
      require("nibble").version, prefix) }
    local line = ('%s -e "%s"'):format("%s", code)
    assert.same(expected, away(line:format(prefix .. "/bin/nibble")))
    assert.same(expected, away("cd / && " .. line:format(prefix .. "/bin/nibble")))
    assert.same(expected, away(("ln -s %s/bin/nibble link && "):format(prefix) .. line:format("./link")))
    assert.same(expected, away(("PATH=%s/bin:$PATH; "):format(prefix) .. line:format("nibble")))
    local moved =
      process.run(("mv %s %s.moved && %s.moved/bin/nibble -e 'print(require(\"nibble.pages\") ~= nil)'; mv %s.moved %s")
      :format(prefix, prefix, prefix, prefix, prefix))
    assert.same({ status = 0, stdout = "true\n", stderr = "" }, moved)
  end)

  it("has scenarios and examples that run from it", function()
    local scripts = prefix .. "/share/nibble/scripts"
    local run = folder .. "/run.jsonl"
    for _, options in ipairs({ "", " --check", " --input minilm", " --report page.html --trace " .. quote(run) }) do
      local result = away(("%s/bin/nibble scenario decode --steps 1 --requests 1%s"):format(prefix, options))
      assert.same({ 0, "" }, { result.status, result.stderr })
      assert.matches("\nok: ", result.stdout)
    end
    assert.matches("^ok: ", away(prefix .. "/bin/nibble trace " .. quote(run) .. " --replay").stdout)
    for _, example in ipairs(lines(process.run("ls " .. scripts .. "/examples/*.lua").stdout)) do
      local ran = away(("%s/bin/nibble %s"):format(prefix, example))
      assert.same({ 0, "" }, { ran.status, ran.stderr }, example)
    end
  end)

  it("exports what the headers declare from the library, luaopen_nibble from the module, and no other name", function()
    with("nm")
    local declared, include = {}, prefix .. "/include/"
    local headers = process.read(include .. "nibble.h") .. process.read(include .. "nibble_tools.h")
    for name in headers:gmatch("NIB_API%s[^;(]-%*?(nib_[%w_]+)%(") do
      declared[#declared + 1] = name
    end
    table.sort(declared)
    assert.is_true(#declared > 80)
    assert.same(declared, exports(prefix .. "/lib/libnibble.so"))
    assert.same({ "luaopen_nibble" }, exports(prefix .. "/lib/lua/5.4/nibble.so"))
  end)

  it("tells one version everywhere", function()
    with("pkg-config")
    local version = require("nibble").version
    for _, package in ipairs({ "nibble", "nibble-lua" }) do
      local told = process.run(("PKG_CONFIG_PATH=%s/lib/pkgconfig pkg-config --modversion %s"):format(prefix, package))
      assert.same({ status = 0, stdout = version .. "\n", stderr = "" }, told)
    end
    assert.matches("^nibble " .. version:gsub("%.", "%%.") .. " ",
      process.run(prefix .. "/bin/nibble --version").stdout)
    assert.is_true(exists(("%s/nibble-%s-1.rockspec"):format(root, version)))
  end)

  describe("'s page", function()
    it("is without a flaw to the tools that know", function()
      local checked = 0
      if process.has("mandoc") then
        assert.same(silence, process.run(("mandoc -Tlint -Wwarning %s/share/man/man1/nibble.1"):format(prefix)))
        checked = checked + 1
      end
      if process.has("groff") then
        assert.same(silence, process.run(("groff -mdoc -Tutf8 -ww -z %s/share/man/man1/nibble.1"):format(prefix)))
        checked = checked + 1
      end
      if checked == 0 then pending("neither mandoc nor groff here") end
    end)

    it("names what --help names", function()
      local page = process.read(prefix .. "/share/man/man1/nibble.1")
      local names = 0
      for line in process.run(prefix .. "/bin/nibble --help").stdout:gmatch("[^\n]+") do
        local option = line:match("^ +nibble (%-*%l+)") or line:match("^  (NIBBLE_%u+)")
        if option then
          names = names + 1
          local macro = option:gsub("^%-", ".Fl "):gsub("^%l", ".Cm %0"):gsub("^NIB", ".Ev %0")
          assert.is_truthy(page:find("\n" .. macro, 1, true) or page:find(" " .. macro:sub(2), 1, true), macro)
        end
      end
      assert.is_true(names >= 8)
    end)

    it("has examples that do what they say", function()
      local page = process.read(prefix .. "/share/man/man1/nibble.1")
      local code, line = page:match("\n%$ (nibble %-e '[^']+')"), page:match("\n%.Dl %$ (nibble scenario %a+)\n")
      local path = ("PATH=%s/bin:$PATH"):format(prefix)
      assert.matches("%[nibble%.tensor {4} float8_e4m3fn ", away(code, path).stdout)
      assert.matches("\nok: [^\n]*\n$", away(line .. " --steps 2", path).stdout)
    end)
  end)

  it("also comes from LuaRocks, without a network", function()
    with("luarocks")
    -- A copy, so that nobody's build is touched; for the CPU, which is quick.
    local copy, tree = folder .. "/checkout", folder .. "/rocks"
    assert.same(silence,
      process.run(("mkdir %s && cd %s && tar c --exclude ./build --exclude ./.git . | tar x -C %s"):format(
      copy, quote(root), copy)))
    local made = process.run(("cd %s && NVCC=none luarocks --lua-version 5.4 --only-server=%s --tree %s make"):format(
      copy,
      folder, tree))
    assert.equal(0, made.status, made.stderr)
    local show = process.run("luarocks --lua-version 5.4 --tree " .. tree .. " show --modules nibble").stdout
    local modules = { "nibble" }
    for _, file in ipairs(lines(process.run("cd " .. quote(root) ..
      " && find bindings/lua/nibble -name '*.lua'").stdout)) do
      modules[#modules + 1] = file:match("^bindings/lua/(.*)%.lua$"):gsub("/", ".")
    end
    table.sort(modules)
    assert.same(modules, lines(show))
    local code = "print(require('nibble').full(2, 3)[2], package.searchpath('nibble.pages', package.path))"
    local expected = { status = 0, stdout = ("3\t%s/share/lua/5.4/nibble/pages.lua\n"):format(tree), stderr = "" }
    assert.same(expected, away(('lua5.4 -e "%s"'):format(code),
      ("LUA_PATH='%s/share/lua/5.4/?.lua' LUA_CPATH='%s/lib/lua/5.4/?.so'"):format(tree, tree)))
    assert.same(expected, away(('%s/bin/nibble -e "%s"'):format(tree, code)))
    local list = away(tree .. "/bin/nibble scenario list")
    assert.same({ 1, "" }, { list.status, list.stdout })
    assert.matches("^nibble scenario: no scenarios are installed [^\n]*\n$", list.stderr)
    local removed = process.run("luarocks --lua-version 5.4 --tree " .. tree .. " remove nibble")
    assert.equal(0, removed.status, removed.stderr)
    assert.is_false(exists(tree .. "/bin/nibble"))
  end)
end)
