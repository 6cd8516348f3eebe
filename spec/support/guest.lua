--- Development-time check in programs that nobody here wrote and that have Lua 5.4 in them: the module loads there, and
--- an append and a dequantize give the known answers, called and in a graph. No part of any spec. Raises an error, or
--- prints a line and is done.
---
---   clingo (Debian's gringo):  printf '#script (lua) dofile("spec/support/guest.lua") #end.' | clingo
---   neomutt:                   echo 'lua-source spec/support/guest.lua' >rc; neomutt -n -F rc -D
---   gnuplot (gnuplot-nox):     gnuplot -e 'set terminal lua "spec/support/guest.lua"'   then says that it is no
---                                                                                       terminal
---   Python's lupa:             spec/support/lupa_check.py
local root = debug.getinfo(1, "S").source:match("^@(.*)spec/support/guest%.lua$")
package.path = ("%s;%sbindings/lua/?.lua;%s?.lua"):format(package.path, root, root)
package.cpath = ("%s;%sbuild/release/?.so"):format(package.cpath, root)
local nibble, golden = require "nibble", require "spec.support.golden"
local append = nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
local dequantize = nibble.quantization.nvfp4_kv_dequantize_paged
local compared = 0

-- The case's tensors; those in `outputs` hold the bytes of `fill` all over.
local function tensors(case, outputs, fill)
  local made = {}
  for name, array in pairs(case.arrays) do
    local bytes = outputs[name] and fill:rep(#array.bytes // #fill) or array.bytes
    made[name] = nibble.from_bytes(bytes, array.shape, { dtype = array.dtype })
  end
  return made
end

local function compare(case, made, outputs)
  for name in pairs(outputs) do
    assert(made[name]:bytes() == case.arrays[name].bytes, case.name .. ": " .. name ..
      ": other bytes than the known answer's")
    compared = compared + #case.arrays[name].bytes
  end
end

local function run(captured, fn)
  if captured then nibble.stream():capture(fn):replay() else fn() end
end

for _, captured in ipairs { false, true } do
  local case, outputs = golden.load("append_hnd_bf16_strided"),
    { k_cache = true, v_cache = true, k_sf = true, v_sf = true }
  local t = tensors(case, outputs, string.char(case.cache_fill))
  run(captured, function()
    append(t.append_key, t.append_value, t.slot_mapping, { t.k_cache, t.v_cache }, { t.k_sf, t.v_sf }, t.k_scale,
      t.v_scale,
      case.kv_layout)
  end)
  compare(case, t, outputs)

  case, outputs = golden.load("dequant_nhd_bf16"), { output_k = true, output_v = true }
  t = tensors(case, outputs, nibble.full(1, case.output_fill, { dtype = "bfloat16" }):bytes())
  run(captured, function()
    dequantize({ t.k_cache, t.v_cache }, { t.k_sf, t.v_sf }, t.block_tables, t.seq_lens, t.k_scale, t.v_scale,
      t.output_k,
      t.output_v, case.kv_layout)
  end)
  compare(case, t, outputs)
end
print(("%s, nibble %s on %s: %d bytes as known"):format(_VERSION, nibble.version, nibble.device(), compared))
