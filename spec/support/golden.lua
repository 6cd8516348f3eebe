--- The recorded cases in spec/data/golden, read without the library under test.
--   golden.names(prefix) -> sorted list of the cases whose names begin so
--   golden.load(name) -> the case: its parameters, and `arrays`: name -> {dtype, shape, bytes} (row-major)
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

local names = {
  "append_edge_bf16", "append_edge_fp16", "append_edge_scaled_bf16", "append_hnd_bf16_strided", "append_hnd_fp16_i32",
  "append_nhd_bf16_i64", "append_nhd_fp16_strided_i32", "dequant_all_scale_bytes_bf16", "dequant_all_scale_bytes_fp16",
  "dequant_hnd_fp16_i64", "dequant_nhd_bf16", "dequant_nhd_fp16_overflow", "materialize_all_scale_bytes",
  "materialize_indptr", "materialize_indptr_slack", "materialize_shared", "materialize_split_idx",
  "rope_insert_cache_only", "rope_insert_edge", "rope_insert_inplace", "rope_insert_no_q_rope", "rope_insert_pad16",
  "rope_insert_padded_pool",
}

function golden.names(prefix)
  local list = {}
  for _, name in ipairs(names) do
    if name:sub(1, #prefix) == prefix then list[#list + 1] = name end
  end
  assert(#list > 0, "no case called " .. prefix)
  return list
end

return golden
