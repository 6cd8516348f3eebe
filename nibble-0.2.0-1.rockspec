-- For `luarocks make` in a checkout: the module, its parts in Lua, and the command.
rockspec_format = "3.0"
package = "nibble"
version = "0.2.0-1"
source = {
  url = "file://nibble-0.2.0.tar.gz", -- git archive --prefix=nibble-0.2.0/; `luarocks make` does not read it
}
description = {
  summary = "Tensors, streams, graph capture and NVFP4 KV-cache operations",
  detailed = [[
    A small C11 runtime for NVFP4 KV caches, scriptable in Lua: tensors, streams, graph capture and the four cache
    operations that LLM inference engines use, defined byte by byte, on the CPU and on NVIDIA GPUs.]],
  license = "MIT",
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.4, < 5.5" }
build = {
  -- Not LuaRocks' own rules for C: they set no flags, and by default compilers contract a multiplication and an addition
  -- into one rounding, which changes bytes.
  type = "command",
  build_command = "if command -v premake5 >/dev/null; then premake5 gmake; else premake4 --file=premake5.lua gmake; fi && " ..
    "make -C build config=release module command",
  install_command = "mkdir -p '$(BINDIR)' '$(LIBDIR)' '$(LUADIR)/nibble' && cp build/release/nibble '$(BINDIR)' && " ..
    "cp build/release/nibble.so '$(LIBDIR)' && cp -r bindings/lua/nibble/* '$(LUADIR)/nibble'",
}
