-- The build, for Premake 5 and for Debian's premake4 (4.3):
--   premake5 gmake                         or   premake4 --file=premake5.lua gmake
--   make -C build config=release           others: debug, sanitize (ASan + UBSan), threads (TSan)
-- makes, in build/<configuration>/, libnibble.a and libnibble.so.N (the runtime), libnibble_lua.a (its Lua bindings),
-- nibble.so (the Lua module), nibble (the command) and nibble-host (the example of a host, with a window if SDL2 is
-- there).
--   make -C build install PREFIX=/usr/local [DESTDIR=FOLDER]       installs them (scripts/install says what goes
--                                                                  where); uninstall removes them

-- The GPU architectures that kernels/cuda is compiled for: machine code for these (f: and the family's later members),
-- and PTX that a driver compiles for any other from 8.0 on.
local architectures = { "80", "86", "89", "90", "100f", "110f", "120f" }
local ptx_architecture = "80"

local configuration_names = { "release", "debug", "sanitize", "threads" }

-- The two Premakes share few names: the newer one renamed `solution` and `configuration` and dropped `flags`.
local v5 = not _PREMAKE_VERSION:match("^4")
local when = v5 and function(name) filter("configurations:" .. name) end or function(name) configuration(name) end
local always = v5 and function() filter {} end or function() configuration {} end
local function symbols_on()
  if v5 then symbols "On" else flags { "Symbols" } end
end

newoption { trigger = "architectures", value = "LIST",
  description = "GPU architectures, such as 90,120f; default: all" }
newoption { trigger = "hardware-e2m1",
  description = "Blackwell GPUs: encode E2M1 in hardware (not tried yet, see spec/kernels/e2m1_spec.lua)" }
newoption { trigger = "nvcc", value = "PATH", description = "The CUDA compiler; \"none\" builds for the CPU only" }

--------------------------------------------------------------------------------------------------- what the machine has

local function output_of(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local text = pipe:read("*a"):gsub("%s+$", "")
  pipe:close()
  return text
end

local function read(name)
  local file = io.open(name, "rb")
  local text = file and file:read("*a")
  if file then file:close() end
  return text
end

local function write_if_changed(name, text)
  if read(name) == text then return false end
  local file = assert(io.open(name, "wb"))
  file:write(text)
  file:close()
  return true
end

-- Lua 5.4 has another name on almost every system.
local lua_package = "lua5.4"
for _, name in ipairs { "lua5.4", "lua-5.4", "lua54", "lua" } do
  if output_of("pkg-config --exists '" .. name .. " >= 5.4' && echo yes") == "yes" then
    lua_package = name
    break
  end
end
local lua_cflags = output_of("pkg-config --cflags " .. lua_package)
local lua_libs = output_of("pkg-config --libs " .. lua_package)
for _, name in ipairs { "liblua5.4.a", "liblua-5.4.a" } do
  -- cc prints a path when it finds the file, else the name alone. The command carries its own Lua where that can be
  -- had.
  if output_of((os.getenv("CC") or "cc") .. " -print-file-name=" .. name):find("/") then
    lua_libs = "-l:" .. name
    break
  end
end
-- may be missing
local sdl_cflags, sdl_libs = output_of("pkg-config --cflags sdl2"), output_of("pkg-config --libs sdl2")
local edit_cflags = output_of("pkg-config --cflags libedit")
local edit_libs = output_of("pkg-config --libs libedit")

-- Where a wrapper or a link leads, as nvcc itself says: whatever environment finds the same compiler builds the same,
-- once.
local function real_nvcc(name)
  local folder =
    output_of(("'%s' --dryrun x.cu 2>&1 | sed -n 's/^#\\$ _HERE_=//p' | xargs -d '\\n' readlink -f"):format(name))
  return os.isfile(folder .. "/nvcc") and folder .. "/nvcc" or name
end

local function find_nvcc()
  local wanted = _OPTIONS["nvcc"] or os.getenv("NVCC") or "nvcc"
  if wanted:find("/") then return path.getabsolute(wanted) end
  for folder in ((os.getenv("PATH") or "") .. ":/usr/local/cuda/bin"):gmatch("[^:]+") do
    if wanted ~= "none" and os.isfile(folder .. "/" .. wanted) then return real_nvcc(folder .. "/" .. wanted) end
  end
end
local nvcc = find_nvcc()
local cuda_include = nvcc and path.join(path.getdirectory(path.getdirectory(nvcc)), "include")

------------------------------------------------------------------------------------------------------------ the sources

-- What the headers declare is defined outside of the devices and the kernels.
local runtime_sources, public_sources = {}, {}
for _, pattern in ipairs { "runtime/**.c", "kernels/cpu/*.c", "kernels/cuda/*.c" } do
  for _, file in ipairs(os.matchfiles(pattern)) do
    local of_device = file:match("/cpu/") or file:match("/cuda/")
    if nvcc or not file:match("/cuda/") then table.insert(runtime_sources, file) end
    if file:match("^runtime/") and not of_device then table.insert(public_sources, file) end
  end
end

local command_sources, binding_sources = os.matchfiles("bindings/command/*.c"), os.matchfiles("bindings/module/*.c")
for _, file in ipairs(os.matchfiles("bindings/sandbox/*.c")) do table.insert(binding_sources, file) end

-- The shared library's name for the dynamic linker changes with the ABI.
local soname = "libnibble.so." .. read("runtime/nibble.h"):match("#define NIB_ABI_VERSION (%d+)")

if not v5 then
  -- premake4 names an object after its source's last part alone: runtime/ops/append.c and kernels/cpu/append.c would be
  -- one.
  local basename = path.getbasename
  function path.getbasename(name)
    local source = name:match("^[./]*(.+)%.c$")
    return source and source:gsub("/", "_") or basename(name)
  end
end

if _OPTIONS["architectures"] then
  architectures = {}
  for name in _OPTIONS["architectures"]:gmatch("[^,]+") do table.insert(architectures, name) end
end

-- premake4 knows no custom rules, so kernels/cuda has a makefile of its own, which runs inside build/.
local function fatbin_makefile()
  local names, rules = {}, {}
  local flags, blackwell = "-std=c++17 -O3 -fmad=false -Werror all-warnings", ""
  local e2m1 = flags
  for _, number in ipairs(architectures) do
    local gencode = (" -gencode arch=compute_%s,code=sm_%s"):format(number, number)
    flags = flags .. gencode
    if tonumber(number:match("^%d+")) >= 100 then blackwell = blackwell .. gencode end
  end
  if _OPTIONS["hardware-e2m1"] then
    flags = flags .. " -DNIB_HARDWARE_E2M1"
    if blackwell == "" then
      error("--hardware-e2m1: expected an architecture from 100f on in --architectures, got none")
    end
    table.insert(names, "gen/e2m1.fatbin") -- for the spec alone
    table.insert(rules, (([[
gen/e2m1.fatbin: ../spec/standin/e2m1.cu fatbin.mk | gen
	$(NVCC) FLAGS -MD -MP -MF gen/e2m1.d -fatbin -o $@ $<
]]):gsub("FLAGS", e2m1 .. blackwell)))
  end
  if not _OPTIONS["architectures"] then
    flags = flags .. (" -gencode arch=compute_%s,code=compute_%s"):format(ptx_architecture, ptx_architecture)
  end
  for _, source in ipairs(os.matchfiles("kernels/cuda/*.cu")) do
    local name = path.getbasename(source)
    table.insert(names, "gen/" .. name .. ".inc")
    table.insert(rules, (([[
gen/NAME.inc: gen/NAME.fatbin
	$(BIN2C) --static --const --type longlong --name nib_fatbin_NAME $< > $@.part
	mv $@.part $@
gen/NAME.fatbin: ../kernels/cuda/NAME.cu fatbin.mk | gen
	$(NVCC) $(FLAGS) -Xptxas -v -MD -MP -MF gen/NAME.d -fatbin -o $@ $< 2> gen/NAME.log || { cat gen/NAME.log >&2; exit 1; }
	! grep -E '[1-9][0-9]* bytes spill' gen/NAME.log >&2 || { echo 'error: NAME.cu spills registers' >&2; rm -f $@; exit 1; }
]]):gsub("NAME", name)))
  end
  for _, header in ipairs(os.matchfiles("kernels/*.h")) do -- as text, for what users compile at run time
    local name = path.getbasename(header)
    table.insert(names, "gen/" .. name .. ".h.inc")
    table.insert(rules, (([[
gen/NAME.h.inc: ../kernels/NAME.h fatbin.mk | gen
	$(BIN2C) --static --const --type char --padd 0 --name nib_text_NAME $< > $@.part
	mv $@.part $@
]]):gsub("NAME", name)))
  end
  return ("NVCC = %s\nBIN2C = %s\nFLAGS = %s\nall: %s\ngen:\n\tmkdir -p gen\n%s-include $(wildcard gen/*.d)\n"):format(
    nvcc, path.join(path.getdirectory(nvcc), "bin2c"), flags, table.concat(names, " "), table.concat(rules))
end

-- Objects depend on the headers that they include, but makefiles do not make them depend on flags or on the list of
-- sources.
if _ACTION == "gmake" then
  os.mkdir("build")
  local tools = { _PREMAKE_VERSION, read("premake5.lua"), lua_cflags, edit_cflags, sdl_cflags, os.getenv("CC") or "",
    nvcc or "" }
  local list = table.concat(runtime_sources, "\n") .. "\n" .. table.concat(binding_sources, "\n") .. "\n" ..
    table.concat(command_sources, "\n")
  local flags_changed = write_if_changed("build/tools.txt", table.concat(tools, "\n"))
  local list_changed = write_if_changed("build/sources.txt", list)
  if flags_changed or (list_changed and v5) then -- Premake 5 numbers objects of equal names in the order of the list
    os.rmdir("build/obj")
  end
  if list_changed then -- an archive keeps the objects of sources that are gone
    for _, configuration_name in ipairs(configuration_names) do
      os.remove("build/" .. configuration_name .. "/libnibble.a")
      os.remove("build/" .. configuration_name .. "/libnibble_lua.a")
    end
  end
  -- For projects of other projects' products alone: without a source, Premake 5 skips the commands.
  write_if_changed("build/empty.c", "typedef int nib_nothing;\n")
  -- Premake's makefiles know no `install`; make reads GNUmakefile before their Makefile. PREFIX and DESTDIR go to the
  -- script in the environment, where make puts what it was given.
  write_if_changed("build/GNUmakefile", ("include Makefile\n\n.PHONY: install uninstall\ninstall: all\n" ..
    "\t@LUA_PACKAGE='%s' ../scripts/install $(config)\nuninstall:\n\t@../scripts/install --uninstall\n"):format(
      lua_package))
  if nvcc then
    write_if_changed("build/fatbin.mk", fatbin_makefile())
  else
    print("No nvcc (PATH, /usr/local/cuda/bin, --nvcc=PATH): the binary will know the CPU device only")
  end
end

--------------------------------------------------------------------------------------------------------------- projects

;(workspace or solution) "nibble"
  configurations(configuration_names)
  if defaultconfiguration then defaultconfiguration "release" end -- the first, but newer Premakes sort them
  location "build"
  language "C"
  buildoptions { "-std=c11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off",
    "-fno-trapping-math",
    "-pthread" }
  linkoptions { "-pthread" }
  symbols_on() -- everywhere: a stack trace from a release build should name its functions

  when "release"
    buildoptions { "-O3" }
    targetdir "build/release"
  when "debug"
    buildoptions { "-Og" }
    targetdir "build/debug"
  when "sanitize"
    local sanitizers = { "-fsanitize=address,undefined", "-fno-sanitize-recover=all" }
    buildoptions { "-O1", "-fno-omit-frame-pointer" }
    buildoptions(sanitizers)
    linkoptions(sanitizers)
    targetdir "build/sanitize"
  when "threads"
    buildoptions { "-O1", "-fno-omit-frame-pointer", "-fsanitize=thread" }
    linkoptions { "-fsanitize=thread" }
    targetdir "build/threads"
  always()

local function new_project(name, type)
  project(name)
  kind(type)
  language "C"
  location "build"
  objdir("build/obj/" .. name)
end

if nvcc then
  -- Turns kernels/cuda/NAME.cu into build/gen/NAME.inc, the code for all architectures as an array nib_fatbin_NAME.
  -- A project of its own that others link, because generated sources of the same project are not ready in time under
  -- -j.
  new_project("fatbin", "StaticLib")
  files { "build/empty.c" }
  prebuildcommands { "MAKEFLAGS= make -s -j4 -f fatbin.mk all" }
end

local function with_cuda()
  if nvcc then
    links { "fatbin" }
    buildoptions { "-DNIB_CUDA", "-isystem", cuda_include, "-Igen" }
  end
end

-- A plugin that links a static library shows none of its names, nor does another copy in the process take their place.
local hidden = "-DNIB_HIDDEN"

new_project("runtime", "StaticLib")
  targetname "nibble"
  files(runtime_sources)
  buildoptions { hidden }
  with_cuda()

-- Threads may still run when a host unloads the module or the library.
local stay_loaded = "-Wl,-z,nodelete"

new_project("shared", "SharedLib")
  targetprefix ""
  targetname(soname)
  targetextension ""
  files(public_sources) -- compiled once more, to be seen; the rest comes from libnibble.a
  with_cuda()
  linkoptions { stay_loaded, "-Wl,-soname," .. soname, "-Wl,-Bsymbolic-functions" }
  links { "runtime", "m", "dl" }

new_project("bindings", "StaticLib")
  targetname "nibble_lua"
  files(binding_sources)
  includedirs { "runtime" }
  buildoptions { hidden, lua_cflags }

new_project("module", "SharedLib")
  targetprefix ""
  targetname "nibble"
  files { "bindings/module/nibble.c" } -- compiled once more, so that luaopen_nibble is seen, and it alone
  includedirs { "runtime" }
  buildoptions { lua_cflags }
  linkoptions { stay_loaded } -- Lua's symbols stay open: the host has them
  links { "bindings", "runtime", "m", "dl" }

new_project("command", "ConsoleApp")
  targetname "nibble"
  files(command_sources)
  includedirs { "runtime" }
  buildoptions { lua_cflags, edit_cflags }
  links { "bindings", "runtime" }
  -- -E: Lua modules written in C find Lua's functions in the executable.
  linkoptions { "-Wl,-E", lua_libs, edit_libs }
  links { "m", "dl" }

new_project("host", "ConsoleApp") -- the example
  targetname "nibble-host"
  files { "bindings/host/*.c" }
  includedirs { "runtime" }
  buildoptions { lua_cflags }
  if sdl_libs ~= "" then
    buildoptions { "-DNIB_HOST_SDL", sdl_cflags }
    linkoptions { sdl_libs }
  end
  links { "bindings", "runtime" }
  linkoptions { "-Wl,-u,luaL_openlibs", lua_libs } -- it comes before what needs it, and is taken whole
  links { "m", "dl" }

if nvcc then
  -- Bare launches, for scripts/bench/cuda.lua to compare with.
  new_project("bench_launch", "SharedLib")
    targetprefix ""
    targetname "bench_launch"
    files { "scripts/bench/launch.c" }
    buildoptions { lua_cflags, "-isystem", cuda_include }
    links { "runtime", "dl" }

  -- The stand-in for the driver, for specs: loaded as libcuda.so.1 where LD_LIBRARY_PATH names its folder. Beside it
  -- the Lua module `standin`, by which a spec makes calls fail and counts what is alive.
  local function in_standin()
    for _, name in ipairs(configuration_names) do
      when(name)
        targetdir("build/" .. name .. "/standin")
    end
    always()
  end

  new_project("standin", "SharedLib")
    targetprefix "lib"
    targetname "cuda"
    targetextension ".so.1"
    in_standin()
    files { "spec/standin/libcuda.c", "spec/standin/faults.c", "spec/standin/memory.c",
      "spec/standin/stream.c", "spec/standin/capture.c", "spec/standin/external.c" }
    buildoptions { "-isystem " .. cuda_include }
    linkoptions { "-Wl,-soname,libcuda.so.1" }
    links { "runtime", "m", "dl" }

  new_project("standin_lua", "SharedLib")
    targetprefix ""
    targetname "standin"
    in_standin()
    files { "spec/standin/lua.c" }
    buildoptions { lua_cflags }
    links { "dl" }
end
