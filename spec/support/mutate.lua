--- The mistakes of mutations.lua, for scripts/mutate and the spec that keeps the list true.
--   mutate.all()               every mistake: { number, file, spec, why, text, with }
--   mutate.find(m, source)     where its text begins in the file's contents, and the line; raises when it is not there
--                              exactly once
--   lua5.4 mutate.lua list [TEXT...]         a line each: number, spec file, file:line and description, tabs between
--                                            them
--   lua5.4 mutate.lua apply NUMBER FOLDER    makes that mistake in a copy of the sources
local mutate = {}

local function read(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

function mutate.all()
  local list = {}
  for _, group in ipairs(require "spec.support.mutations") do
    for _, mistake in ipairs(group) do
      list[#list + 1] = { number = #list + 1, file = group.file, why = mistake[1], text = mistake[2], with = mistake[3],
                          spec = ("spec/%s_spec.lua"):format(mistake.spec or group.spec) }
    end
  end
  return list
end

function mutate.find(mistake, source)
  local first = source:find(mistake.text, 1, true)
  if not first or source:find(mistake.text, first + 1, true) then
    error(("spec/support/mutations.lua: %s: expected this text once, found it %s:\n%s"):format(mistake.file,
      first and "more than once" or "nowhere", mistake.text), 0)
  end
  return first, select(2, source:sub(1, first):gsub("\n", "")) + 1
end

local function list(texts)
  for _, mistake in ipairs(mutate.all()) do
    local _, line = mutate.find(mistake, read(mistake.file))
    local wanted = #texts == 0
    for _, text in ipairs(texts) do wanted = wanted or (mistake.file .. " " .. mistake.why):find(text, 1, true) end
    if wanted then
      print(("%d\t%s\t%s:%d\t%s"):format(mistake.number, mistake.spec, mistake.file, line, mistake.why))
    end
  end
end

local function apply(number, folder)
  local mistake = mutate.all()[number]
  local name = folder .. "/" .. mistake.file
  local source = read(name)
  local first = mutate.find(mistake, source)
  os.remove(name) -- also where it is a link
  local file = assert(io.open(name, "wb"))
  file:write(source:sub(1, first - 1), mistake.with, source:sub(first + #mistake.text))
  assert(file:close())
end

if arg and arg[0] and arg[0]:find("mutate%.lua$") then
  package.path = "./?.lua;" .. package.path
  local ok, message = pcall(function()
    if arg[1] == "list" then list({ table.unpack(arg, 2) }) else apply(math.tointeger(arg[2]), arg[3]) end
  end)
  if not ok then
    io.stderr:write("scripts/mutate: ", message, "\n")
    os.exit(1)
  end
end

return mutate
