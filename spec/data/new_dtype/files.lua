-- A new dtype, `int16`. What kernels/README.md asks for, and nothing else: {text, what stands there instead}.
return {
  ["runtime/nibble.h"] = { { "  NIB_INT64\n}", "  NIB_INT64,\n  NIB_INT16\n}" } },
  ["kernels/params.h"] = {
    { "  X(INT64, int64, int64_t, SIGNED, __VA_ARGS__)\n",
      "  X(INT64, int64, int64_t, SIGNED, __VA_ARGS__) \\\n  X(INT16, int16, int16_t, SIGNED, __VA_ARGS__)\n" },
  },
  ["runtime/files/npy.c"] = {
    { '{ "i2", NIB_DTYPE_NONE }', '{ "i2", NIB_INT16 }' },
    { '[NIB_INT64] = "<i8",', '[NIB_INT64] = "<i8", [NIB_INT16] = "<i2",' },
  },
  ["runtime/files/safetensors.c"] = { { '{ "I16", 16, NIB_DTYPE_NONE }', '{ "I16", 16, NIB_INT16 }' } },
  ["runtime/interop/dlpack.c"] = {
    { "  { NIB_DLPACK_INT, 64, 1, NIB_INT64 },",
      "  { NIB_DLPACK_INT, 16, 1, NIB_INT16 },\n  { NIB_DLPACK_INT, 64, 1, NIB_INT64 }," },
  },
  ["bindings/lua/nibble/numbers.lua"] = {
    { "  int32 = {size = 4,",
      '  int16 = {size = 2, code = "i2", low = -0x8000, high = 0x7FFF},\n  int32 = {size = 4,' },
  },
  ["bindings/lua/nibble/meta.lua"] = { { '|"int64"', '|"int64"|"int16"' } },
}
