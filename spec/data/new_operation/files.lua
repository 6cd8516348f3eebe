-- A new operation, `quantization.negate_codes`: flips the sign of every E2M1 code of a contiguous uint8 tensor, into
-- `out`. What kernels/README.md asks for, and nothing else: new files by name, and in others {text, what comes
-- before it}.
return {
  ["kernels/params.h"] = {
    { "  X(RANDOM, random)", "  X(NEGATE_CODES, negate_codes) \\\n" },
    { '  X(ROPE_TABLE, "rope_table")', '  X(NEGATE_CODES, "quantization.negate_codes") \\\n' },
    { "struct nib_swizzle_params {", [[
struct nib_negate_codes_params {
  const uint8_t *source;
  uint8_t *destination;
  int64_t count; /* bytes */
};

]] },
  },
  ["kernels/cpu/negate_codes.c"] = [[
#include "clones.h"

NIB_BODY negate_body(void *argument, int64_t begin, int64_t end) {
  const struct nib_negate_codes_params *p = argument;
  for (int64_t i = begin; i < end; i++) p->destination[i] = p->source[i] ^ 0x88;
}
NIB_CLONES(negate)

void nib_cpu_negate_codes(const void *params, const struct nib_cpu_team *team) {
  struct nib_negate_codes_params p = *(const struct nib_negate_codes_params *)params;
  team->run(team->context, p.count, nib_cpu_grain(2), NIB_PICK(negate), &p);
}
]],
  ["kernels/cuda/negate_codes.cu"] = [[
#include "kernel.cuh"

NIB_ENTRY(negate_codes, 256, 4, nib_negate_codes_params) {
  int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += step)
    p.destination[i] = p.source[i] ^ 0x88;
}
]],
  ["kernels/cuda/negate_codes_launch.c"] = [[
#include "launch.h"
#include "negate_codes.inc"

#define ENTRIES(X) X(negate_codes)

static void launch(const void *params, int32_t multiprocessors, struct nib_cuda_launch *out) {
  (void)multiprocessors;
  out->entry = 0;
  set_linear(out, ((const struct nib_negate_codes_params *)params)->count);
}

NIB_CUDA_KERNEL(negate_codes)
]],
  ["runtime/ops/negate_codes.c"] = [[
#include "check.h"

nib_status nib_negate_codes(nib_stream *stream, nib_tensor *codes, nib_tensor *out) {
  struct nib_check c = nib_check_begin(stream, NIB_OPERATION_NEGATE_CODES);
  nib_check_tensor(&c, NIB_IN, "codes", codes, NIB_BIT(NIB_UINT8), 2, NULL, "[rows, bytes]");
  if (c.status == NIB_OK) nib_check_contiguous(&c, "codes", codes);
  nib_check_tensor(&c, NIB_OUT, "out", out, NIB_BIT(NIB_UINT8), 2, c.status == NIB_OK ? codes->shape : NULL,
                   "[rows, bytes], as codes");
  if (c.status == NIB_OK) nib_check_contiguous(&c, "out", out);
  nib_check_overlaps(&c);
  if (c.status != NIB_OK) return c.status;
  struct nib_negate_codes_params params = { nib_tensor_data(codes), nib_tensor_data(out), nib_tensor_numel(codes) };
  return params.count > 0 ? NIB_CHECK_LAUNCH(&c, NEGATE_CODES, params) : NIB_OK;
}
]],
  ["runtime/nibble.h"] = {
    { "/* quantization.swizzle_v_scales;", [[
NIB_API nib_status nib_negate_codes(nib_stream *stream, nib_tensor *codes, nib_tensor *out);
]] },
  },
  ["bindings/module/quantization.c"] = {
    { "static int swizzle_v_scales(", [[
static int negate_codes(lua_State *L) {
  nib_tensor *codes = nib_lua_tensor(L, "quantization.negate_codes", "codes", 1);
  nib_tensor *out = nib_lua_tensor(L, "quantization.negate_codes", "out", 2);
  nib_stream *stream = nib_lua_current_stream(L, "quantization.negate_codes", nib_tensor_device(codes));
  NIB_LUA_DO(L, "quantization.negate_codes", nib_negate_codes(stream, codes, out));
  return 0;
}

]] },
    { '  { "swizzle_v_scales", swizzle_v_scales },', '  { "negate_codes", negate_codes },\n' },
  },
  ["bindings/lua/nibble/operations.lua"] = {
    { '  {\n    name = "quantization.swizzle_v_scales"', [[
  {
    name = "quantization.negate_codes", kernel = "negate_codes",
    parameters = {
      contiguous("codes", "in", CODES, { "rows", "bytes" }), contiguous("out", "out", CODES, { "rows", "bytes" }),
    },
    results = {},
  },
]] },
  },
  ["bindings/lua/nibble/meta.lua"] = {
    { "--- Reorders V's block scales from linear to 4-token-interleaved order", [[
--- Flips the sign of every E2M1 code.
---@param codes nibble.tensor  uint8 [rows, bytes], contiguous
---@param out nibble.tensor    the same
function nibble.quantization.negate_codes(codes, out) end

]] },
  },
}
