-- The rooms of the C sources, and what each may use: `lua5.4 spec/support/rooms.lua [ROOT]` prints what every room
-- includes and calls, and fails where one uses a room that is not below it or the own.h of another, or where files of a
-- room of the runtime call each other in a circle. Calls are read from the objects of a release build, where there is one.

local public = { "runtime" }
local core = { "kernels", "runtime" }
local tensor = { "kernels", "kernels/cpu", "runtime", "runtime/core" }
local upper = { "kernels", "kernels/cpu", "runtime", "runtime/core", "runtime/tensor" }
local device = { "kernels", "kernels/cpu", "kernels/cuda", "runtime", "runtime/core" }

-- From low to high. `runtime` itself has headers only: the public ones, sized.h and backend.h.
local rooms = {
  { "kernels", {} },
  { "kernels/cpu", { "kernels" } },
  { "kernels/cuda", { "kernels" } },
  { "runtime", { "kernels" } },
  { "runtime/core", core },
  { "runtime/tensor", tensor },
  { "runtime/files", upper },
  { "runtime/interop", upper },
  { "runtime/tools", upper },
  { "runtime/ops", upper },
  { "runtime/cpu", device },
  { "runtime/cuda", device },
  { "bindings", public },
  { "bindings/module", { "runtime", "bindings" } },
  { "bindings/sandbox", { "runtime", "bindings", "bindings/module" } },
  { "bindings/command", { "runtime", "bindings", "bindings/module", "bindings/sandbox" } },
  { "bindings/host", { "runtime", "bindings", "bindings/module", "bindings/sandbox" } },
}

-- What any room may use: how the runtime reaches its devices (backend.h), and floats as the C standard has them.
local anywhere = { ["runtime/core/floats.h"] = true, nib_cpu_open = true, nib_cuda_probe = true }

local function lines_of(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read("a")
  pipe:close()
  return text:gmatch("[^\n]+")
end

local function read(path)
  local file = io.open(path)
  local text = file and file:read("a")
  if file then file:close() end
  return text
end

local function room_of(file) return file:match("^(.*)/[^/]*$") end

-- "a/b/../c" is "a/c".
local function normal(path)
  local parts = {}
  for part in path:gmatch("[^/]+") do
    if part == ".." and #parts > 0 then parts[#parts] = nil
    elseif part ~= "." then parts[#parts + 1] = part end
  end
  return table.concat(parts, "/")
end

-- The sources, by path, and what they include: { [file] = { [included file] = true } }.
local function includes_of(root)
  local sources = {}
  for path in lines_of(("cd '%s' && find kernels runtime bindings -type f 2>/dev/null"):format(root)) do
    if path:match("%.[ch]$") or path:match("%.cuh?$") then sources[path] = {} end
  end
  for path, included in pairs(sources) do
    for name in read(root .. "/" .. path):gmatch('\n%s*#%s*include%s+"([^"]+)"') do
      local file = normal(room_of(path) .. "/" .. name)
      if not sources[file] then file = "runtime/" .. name end -- by -Iruntime
      if sources[file] then included[file] = true end -- or it is generated
    end
  end
  return sources
end

-- Which names of other files each file's object uses: { [file] = { [name] = defining file } }; nil without a build.
local function calls_of(root, sources)
  local objects, any = {}, false
  for path in lines_of(("find '%s/build/obj' -name '*.d' 2>/dev/null"):format(root)) do
    local project, configuration = path:match("/build/obj/([^/]+)/([^/]+)/")
    if configuration == "release" and project ~= "shared" and project ~= "module" then -- those are compiled twice
      local source = read(path):match("^[^:]*:[%s\\]*%.%./(%S+)")
      if source and sources[normal(source)] then objects[normal(source)], any = path:gsub("%.d$", ".o"), true end
    end
  end
  if not any then return nil end
  local defined, wanted = {}, {}
  for file, object in pairs(objects) do
    wanted[file] = {}
    for line in lines_of(("nm '%s'"):format(object)) do
      local kind, name = line:match("(%a) ([%w_]+)$")
      if kind == "U" then wanted[file][name] = true
      elseif kind and kind:match("[TDRBC]") then defined[name] = file end
    end
  end
  local calls = {}
  for file, names in pairs(wanted) do
    calls[file] = {}
    for name in pairs(names) do
      if defined[name] and defined[name] ~= file then calls[file][name] = defined[name] end
    end
  end
  return calls
end

-- Groups of files of a room that call each other in a circle (Tarjan).
local function circles_of(room, calls)
  local index, low, stack, on, count, circles = {}, {}, {}, {}, 0, {}
  local function visit(file)
    count = count + 1
    index[file], low[file], on[file] = count, count, true
    stack[#stack + 1] = file
    for _, other in pairs(calls[file] or {}) do
      if room_of(other) == room and not index[other] then
        visit(other)
        low[file] = math.min(low[file], low[other])
      elseif on[other] then
        low[file] = math.min(low[file], index[other])
      end
    end
    if low[file] < index[file] then return end
    local circle = {}
    repeat
      local other = table.remove(stack)
      on[other] = nil
      circle[#circle + 1] = other
    until other == file
    table.sort(circle)
    if #circle > 1 then circles[#circles + 1] = table.concat(circle, " ") end
  end
  for file in pairs(calls) do
    if room_of(file) == room and not index[file] then visit(file) end
  end
  table.sort(circles)
  return circles
end

-- The order of the core's files, as the top of its own.h lists them.
local function order_of_core(root)
  local places, count = {}, 0
  for name in ((read(root .. "/runtime/core/own.h") or ""):match("^/%*.-%*/") or ""):gmatch("[%w_]+%.c%f[^%w_]") do
    count = count + 1
    places["runtime/core/" .. name] = count
  end
  return places
end

-- What hosts may call, as text.
local function public_text(root)
  local text = {}
  for path in lines_of(("ls '%s'/runtime/nibble*.h 2>/dev/null"):format(root)) do text[#text + 1] = read(path) end
  return table.concat(text)
end

-- What is wrong, as lines, and the table of rooms, as text.
local function look(root)
  local sources = includes_of(root)
  local calls = calls_of(root, sources)
  local may, order = {}, {}
  for i, room in ipairs(rooms) do
    local name, below = table.unpack(room)
    may[name], order[name] = { [name] = true }, i
    for _, other in ipairs(below) do may[name][other] = true end
  end
  local wrong, uses, declared, places = {}, {}, public_text(root), order_of_core(root)
  local function use(file, verb, what, other)
    local from, to = room_of(file), room_of(other)
    if from:match("^bindings") and to:match("^runtime/") and declared:find("%f[%w_]" .. what .. "%f[^%w_]") then
      to = "runtime"
    end
    if verb == "calls" and from == "runtime/core" and to == from and
      (places[file] or math.huge) < (places[other] or math.huge) then
      wrong[#wrong + 1] = ("%s calls %s of %s, which comes after it in own.h"):format(file, what, other)
    end
    if from == to then return end
    if other:match("/own%.h$") then wrong[#wrong + 1] = ("%s includes %s, which is that room's"):format(file, other) end
    uses[from] = uses[from] or { includes = {}, calls = {} }
    uses[from][verb][to] = true
    if not may[from][to] and not anywhere[what] then
      wrong[#wrong + 1] = ("%s %s %s%s: %s may not use %s"):format(file, verb, what,
        what ~= other and " of " .. other or "", from, to)
    end
  end
  for file, included in pairs(sources) do
    if next(places) and file:match("^runtime/core/.*%.c$") and not places[file] then
      wrong[#wrong + 1] = file .. ": has no place in the list of own.h"
    end
    if not may[room_of(file)] then
      wrong[#wrong + 1] = file .. ": no room of spec/support/rooms.lua"
    else
      for other in pairs(included) do use(file, "includes", other, other) end
      for name, other in pairs(calls and calls[file] or {}) do use(file, "calls", name, other) end
    end
  end
  local text = { ("%-18s %-64s %s"):format("room", "includes", calls and "calls" or "calls (no build)") }
  local function list(set)
    local names = {}
    for name in pairs(set) do names[#names + 1] = name end
    table.sort(names, function(a, b) return order[a] < order[b] end)
    return table.concat(names, " "):gsub("runtime/", ""):gsub("bindings/", "")
  end
  for _, room in ipairs(rooms) do
    local used = uses[room[1]] or { includes = {}, calls = {} }
    text[#text + 1] = ("%-18s %-64s %s"):format(room[1], list(used.includes), (list(used.calls)))
  end
  for _, room in ipairs(rooms) do
    local circles = calls and room[1]:match("^runtime/") and circles_of(room[1], calls) or {}
    for _, circle in ipairs(circles) do wrong[#wrong + 1] = "these call each other in a circle: " .. circle end
  end
  table.sort(wrong)
  return wrong, table.concat(text, "\n"), calls ~= nil
end

if arg and arg[0] and arg[0]:find("rooms%.lua$") then
  local wrong, text = look(arg[1] or ".")
  print(text)
  for _, line in ipairs(wrong) do io.stderr:write(line, "\n") end
  os.exit(#wrong == 0)
end

return { look = look }
