--- The recorded cases in spec/data/golden, read without the library under test.
--   golden.names(prefix, [folder]) -> sorted list of the cases whose names begin so: folders with a case.lua
--   golden.list(folder) -> what is in it, sorted
--   golden.load(name) -> the case: its parameters, and `arrays`: name -> {dtype, shape, bytes} (row-major). Files that
--       several cases have are in golden/shared
--   golden.npy(path) -> {dtype = NumPy's type ("<f4"), shape, bytes}
local golden = {}

local here = debug.getinfo(1, "S").source:match("^@(.*)support/golden%.lua$")
golden.data = here .. "data/"

function golden.npy(path)
  local file <close> = assert(io.open(path, "rb"))
  local text = file:read("a")
  assert(text:sub(1, 6) == "\x93NUMPY", "not an .npy file")
  local wide = text:byte(7) > 1
  local length = string.unpack(wide and "<I4" or "<I2", text, 9)
  local start = wide and 13 or 11
  local header = text:sub(start, start + length - 1)
  assert(header:find("'fortran_order': False", 1, true), "row-major only")
  local shape = {}
  for size in header:match("'shape': %((.-)%)"):gmatch("%d+") do shape[#shape + 1] = math.tointeger(size) end
  return {dtype = header:match("'descr': '(.-)'"), shape = shape, bytes = text:sub(start + length)}
end

function golden.load(name)
  local folder = golden.data .. "golden/" .. name .. "/"
  local case = assert(loadfile(folder .. "case.lua", "t", {}))()
  case.name, case.arrays = name, {}
  for key, entry in pairs(case.tensors) do
    local data = golden.npy(folder .. entry.file)
    assert(table.concat(data.shape, "x") == table.concat(entry.shape, "x"), name .. ": shape of " .. key)
    case.arrays[key] = {dtype = entry.dtype, shape = entry.shape, bytes = data.bytes}
  end
  return case
end

--- What is in a folder, sorted.
function golden.list(folder)
  local list = {}
  local pipe <close> = assert(io.popen("ls -1 '" .. folder:gsub("'", "'\\''") .. "'"))
  for name in pipe:lines() do list[#list + 1] = name end
  table.sort(list)
  return list
end

function golden.names(prefix, folder)
  folder = folder or golden.data .. "golden/"
  local list = {}
  for _, name in ipairs(golden.list(folder)) do
    local case = name:sub(1, #prefix) == prefix and io.open(folder .. name .. "/case.lua")
    if case then
      case:close()
      list[#list + 1] = name
    end
  end
  assert(#list > 0, "no case called " .. prefix)
  return list
end

return golden
