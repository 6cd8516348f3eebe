#!/usr/bin/env python3
"""Development-time check of nibble.so in a Python process, through the package lupa (2.x) and its Lua 5.4; no part of any spec.

    python3 spec/support/lupa_check.py

guest.lua's known answers, Python functions and exceptions inside scopes and captures, tensors that only Python holds, and a
runtime in each of several threads. A line for each step; exit status 0 when all is well.
"""
import gc
import os
import sys
import threading

# Lua's functions are in lupa's extension, which Python loads for itself alone: modules in C find them only if it is global.
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
import lupa.lua54  # noqa: E402

GUEST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest.lua")


def start():
    lua = lupa.lua54.LuaRuntime(encoding="latin-1")  # strings may be bytes of tensors
    lua.globals().dofile(GUEST)
    return lua, lua.eval("(require 'nibble')")


def step(name, passed):
    print(("ok: " if passed else "FAILED: ") + name, flush=True)
    if not passed:
        sys.exit(1)


lua, nibble = start()
step("known answers", True)
stream = nibble.stream()
t = nibble.zeros(3)
step("methods called from Python", t.fill(t, 2)[1] == 2 and list(t.totable(t).values()) == [2, 2, 2])


def fails():
    t.fill(t, 5)
    raise KeyError("of Python's")


for name in "scope", "capture":
    try:
        getattr(stream, name)(stream, fails)
        caught = None
    except Exception as error:
        caught = error
    step("a Python exception leaves " + name + " as it was", isinstance(caught, KeyError))
    step("and the stream works on", stream.capture(stream, lambda: t.fill(t, 7)) is not None and t[1] == 5)
try:
    t.narrow(t, 1, 1, 9)
    step("an error of nibble's", False)
except lupa.lua54.LuaError as error:
    step("an error of nibble's: " + str(error).split("\n")[0], "tensor:narrow: length: expected" in str(error))

del lua, nibble, stream
gc.collect()
step("a tensor that only Python holds", t[2] == 5)
del t
gc.collect()

results = []


def work():
    _, own = start()
    large = own.randn(1 << 16)
    results.append((large.bytes(large), large.amax(large)))


threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
step("a runtime in each of four threads", len(results) == 4 and len(set(results)) == 1)
