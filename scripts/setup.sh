# Shared by scripts/run, scripts/test and CI, which source it: finds tools, installs what is missing, builds.
# POSIX sh. Expects $root, the repository's folder, and $me, the name to speak under.
# shellcheck shell=sh disable=SC2154

say() { printf '%s: %s\n' "$me" "$*" >&2; }
fail() { say "$@"; exit 1; }

log=$root/build/setup.log

# The first of the named commands that exists.
first_of() {
  for name in "$@"; do command -v "$name" && return; done
  return 1
}

# Lua 5.4's interpreter, under the names that systems give it.
find_lua() {
  for name in lua5.4 lua54 lua-5.4 lua; do
    if [ "$(command -v "$name" >/dev/null && "$name" -e 'print(_VERSION)' 2>/dev/null)" = "Lua 5.4" ]; then
      command -v "$name"
      return
    fi
  done
  return 1
}

have_c() { echo '#include <stdio.h>' | "${CC:-cc}" -E - >/dev/null 2>&1; }

have_library() {
  for name in "$@"; do pkg-config --exists "$name" 2>/dev/null && return; done
  return 1
}

# The Debian packages, by name, of what is missing for: build, specs, or a command.
missing() {
  for purpose in "$@"; do
    case $purpose in
      build)
        have_c || echo gcc libc6-dev
        command -v make >/dev/null || echo make
        first_of premake5 premake4 >/dev/null || echo premake4
        command -v pkg-config >/dev/null || echo pkg-config
        have_library 'lua5.4' 'lua-5.4' 'lua54' 'lua >= 5.4' || echo liblua5.4-dev
        have_library libedit || echo libedit-dev ;;
      specs)
        if ! lua=$(find_lua); then
          echo lua5.4 lua-busted
        elif ! "$lua" -e 'require "busted.runner"' >/dev/null 2>&1; then
          echo lua-busted
        fi ;;
      *)
        command -v "$purpose" >/dev/null || case $purpose in
          luacheck) echo lua-check ;;
          dot) echo graphviz ;;
          *) echo "$purpose" ;;
        esac ;;
    esac
  done
}

# Installs what `missing "$@"` names. Fails when that cannot be done.
install() {
  packages=$(missing "$@" | tr '\n' ' ')
  [ -n "$packages" ] || return 0
  command -v apt-get >/dev/null || { say "missing, and there is no apt-get to install it (Debian's names): $packages"; return 1; }
  as_root=
  if [ "$(id -u)" != 0 ]; then
    as_root=sudo
    command -v sudo >/dev/null || { say "missing; install it as root: apt-get install $packages"; return 1; }
  fi
  say "installing $packages"
  mkdir -p "$root/build"
  apt="$as_root env DEBIAN_FRONTEND=noninteractive apt-get"
  # shellcheck disable=SC2086 # lists of words
  { $apt install -y --no-install-recommends $packages ||
    { $apt update && $apt install -y --no-install-recommends $packages; }; } </dev/null >"$log" 2>&1 ||
    { tail -n 5 "$log" >&2; say "apt-get failed, see $log; install by hand: $packages"; return 1; }
  packages=$(missing "$@" | tr '\n' ' ')
  [ -z "$packages" ] || { say "installed, but still not found: $packages"; return 1; }
}

# Says that a first build is to come, which takes a while.
announce_build() {
  [ -n "${NIBBLE_SKIP_BUILD:-}" ] || [ -x "$root/build/$1/nibble" ] || say "building $1 (about a minute)..."
}

# Builds a configuration: release, debug or sanitize; further arguments are projects of premake5.lua. What is built already
# is used as it is where the tools to build it cannot be had, and when NIBBLE_SKIP_BUILD is set.
build() {
  what=$1 # not a name of the scripts': POSIX sh has no local variables
  shift
  if [ -n "${NIBBLE_SKIP_BUILD:-}" ]; then
    [ -x "$root/build/$what/nibble" ] || fail "NIBBLE_SKIP_BUILD is set, but there is no build/$what/nibble"
    return
  fi
  if ! install build; then
    [ -x "$root/build/$what/nibble" ] || exit 1
    say "using build/$what as it is"
    return
  fi
  mkdir -p "$root/build"
  # One build at a time, where flock is there to see to it.
  exec 9>"$root/build/lock"
  ! command -v flock >/dev/null || flock 9
  jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null) || jobs=2
  sh -c '
    cd "$1" && shift
    if command -v premake5; then premake5 gmake; else premake4 --file=premake5.lua gmake; fi && make -C build "$@"
  ' sh "$root" "config=$what" -j"$jobs" "$@" </dev/null >"$log" 2>&1 9>&- ||
    {
      errors=$(grep -E 'error|Error|\*\*\*' "$log" | head -n 20)
      [ -n "$errors" ] || errors=$(tail -n 5 "$log")
      printf '%s\n' "$errors" >&2
      fail "the build failed, see $log"
    }
  exec 9>&-
  ! grep -q 'warning:' "$log" || grep -A 5 'warning:' "$log" >&2
}
