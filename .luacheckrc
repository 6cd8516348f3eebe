std = "lua54"
max_line_length = 120
max_string_line_length = 144  -- programs in long strings
max_comment_line_length = 144 -- annotations, which take one line
exclude_files = { "build" }
files["spec"] = { std = "lua54+busted" }
files["spec/support/escapes.lua"] = { ignore = { "631" } } -- programs, one to a line
files["spec/support/overruns.lua"] = { ignore = { "631" } }
files["spec/data/hostile"] = { std = "lua54", read_globals = { "nibble" }, globals = { "state", "host", "on_load", "on_frame", "on_unload" } }
files["spec/data/hostile/corrupt.lua"] = { ignore = { "122" } }
files["bindings/lua/nibble/meta.lua"] = { ignore = { "212", "241", "631" } } -- declarations, one to a line
files["premake5.lua"] = {
  std = "min",
  read_globals = {
    "_ACTION", "_OPTIONS", "_PREMAKE_VERSION", "solution", "workspace", "configuration", "configurations", "filter", "flags",
    "symbols", "newoption", "project", "kind", "language", "location", "objdir", "targetdir", "targetname", "targetextension",
    "targetprefix",
    "files", "includedirs", "links", "buildoptions", "linkoptions", "prebuildcommands", "defaultconfiguration",
    os = { other_fields = true }, path = { other_fields = true, fields = { getbasename = { read_only = false } } },
  },
}
