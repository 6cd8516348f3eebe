-- Several GPUs: copies between them, waits, and what fails or breaks beside others. On two of this machine's, otherwise
-- on two of the stand-in driver, where each of the calls can be made to fail.
local nibble = require("nibble")
local process = require("spec.support.runtime_process")
local standin = require("spec.support.standin")

local describe_cuda = standin.describe(describe, it, pending)
local on_gpu = (nibble.device() or "cpu"):find("^cuda") ~= nil

-- Runs the code on two GPUs: this machine's, otherwise two of the stand-in.
local function on_two_gpus(code, env)
  local prelude = [[
    local nibble = require("nibble")
    local A, B = { device = "cuda:0" }, { device = "cuda:1" }
    local function with(opts, dtype) return { device = opts.device, dtype = dtype } end
    local function busy(stream, rounds)
      local t = nibble.empty(1 << 20, { device = stream.device })
      stream:scope(function() for i = 1, rounds or 50 do t:fill(i) end end)
    end
  ]]
  if on_gpu and nibble.available("cuda:1") then
    local result = process.script(prelude .. code, { command = process.command() })
    assert.same({ status = 0, stdout = "", stderr = "" }, result)
  elseif standin.missing then
    return pending("one GPU at most here, and " .. standin.missing)
  else
    standin.assert_well(standin.run(prelude .. code, "NIB_STANDIN_DEVICES=2 NIB_STANDIN_JITTER=200 " .. (env or "")),
      true)
  end
end

describe("two GPUs", function()
  it("copy to each other, every dtype and stride, with and without reaching each other's memory", function()
    for _, env in ipairs({ "NIB_STANDIN_PEERS=1", "NIB_STANDIN_PEERS=0" }) do
      on_two_gpus([[
        local bits = nibble.randint(0, 256, { 8 * 48 }, { dtype = "uint8", device = "cpu", seed = 4 })
        for _, from in ipairs({ "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64" }) do
          local source = bits:reinterpret(from)
          local there = source:to("cuda:0")
          for _, to in ipairs({ "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64" }) do
            local copy = nibble.zeros(source.shape, with(B, to)):copy(there)
            assert(copy:to("cpu"):equal(source:to(to)), from .. " to " .. to)
          end
          assert(there:to("cuda:1"):to("cuda:0"):equal(there))
        end
        local plain = nibble.randn(6, 10, { device = "cpu", seed = 2 })
        local a = plain:to("cuda:0")
        local wide = nibble.full({ 10, 12 }, -1.0, B)
        wide:narrow(2, 3, 6):transpose(1, 2):copy(a)
        assert(wide:narrow(2, 3, 6):transpose(1, 2):to("cpu"):equal(plain) and wide[{ 1, 1 }] == -1 and wide[{ 10, 12 }] == -1)
        local c = nibble.zeros(10, 6, A):copy(wide:narrow(2, 3, 6))
        assert(c:to("cpu"):equal(plain:transpose(1, 2):clone()))
        assert(nibble.zeros(3, 10, B):copy(a[2]):to("cpu"):equal(plain[2]:expand(3, 10):clone()))
        assert(nibble.zeros(0, B):copy(nibble.zeros(0, A)):numel() == 0)
        wide[1] = nibble.full(12, 4.0, A)
        assert(wide[{ 1, 12 }] == 4)
      ]], env)
    end
  end)

  it("keep their streams' order, in both directions, and nobody frees or overwrites too early", function()
    on_two_gpus([[
      local n = 1 << 18
      local a, b = nibble.zeros(n, A), nibble.zeros(n, B)
      local s, t = nibble.stream(A), nibble.stream(B)
      nibble.synchronize("cuda:0") nibble.synchronize("cuda:1")
      for round = 1, 10 do
        s:scope(function()
          t:scope(function()
            busy(round % 2 == 0 and s or t)
            a:fill(round)
            b:fill(-1)
            b:copy(a) -- after both fills
            a:fill(-2) -- after the copy
            a:copy(b)
            b:fill(-3)
          end)
        end)
        assert(a[n] == round and a[1] == round and b[n] == -3)
        -- In the default streams, and the source gone at once.
        local c = nibble.full(n, round + 0.5, A)
        b:copy(c)
        c:close()
        for i = 1, 5 do nibble.full(n, -1.0, A):close() end
        assert(b[n] == round + 0.5 and b[1] == round + 0.5)
        local half = nibble.full(n, round, with(A, "bfloat16"))
        b:copy(half)
        half:close()
        for i = 1, 5 do nibble.full(n, -1.0, with(A, "bfloat16")):close() end
        assert(b[n] == round)
        -- A writer in a third stream of the source's.
        local w = nibble.stream(A)
        w:wait(nibble.current_stream("cuda:0"):record())
        w:wait(s:record())
        busy(w)
        w:scope(function() a:fill(round * 10) end)
        b:copy(a)
        assert(b[n] == round * 10)
        nibble.synchronize("cuda:0") nibble.synchronize("cuda:1")
        w:close()
      end
    ]])
  end)

  it("wait for each other's events without the host", function()
    on_two_gpus([[
      local n = 1 << 16
      local s, t = nibble.stream(A), nibble.stream(B)
      local a, b = nibble.zeros(n, A), nibble.zeros(n, B)
      local order = nibble.zeros(n, { pinned = true })
      nibble.synchronize("cuda:0") nibble.synchronize("cuda:1")
      for round = 1, 20 do
        busy(s)
        s:scope(function() order:copy(a:fill(round)) end)
        local event = s:record()
        t:wait(event)
        t:scope(function() b:copy(order) end)
        s:wait(t:record())
        s:scope(function() order:copy(a:fill(-1)) end)
        assert(b[n] == round)
      end
      nibble.synchronize("cuda:0") nibble.synchronize("cuda:1")
      local graph = s:capture(function()
        a:fill(7)
        local inner = s:record()
        for name, call in pairs({ copy = function() b:copy(a) end, back = function() a:copy(b) end, wait = function() t:wait(inner) end,
          outside = function() s:wait(t:record()) end }) do
          local ok, message = pcall(call)
          assert(not ok and message:find("captur"), name .. ": " .. tostring(message))
        end
        b:fill(3) -- the other GPU goes on
        t:wait(t:record())
      end)
      assert(#graph:nodes() == 1)
      graph:replay()
      assert(a[n] == 7 and b[n] == 3)
      local ok, message = pcall(nibble.stream, { device = "cuda:1", handle = s.handle })
      assert(not ok and message:find("stream: handle: expected a stream of the context .+, got one of another"), message)
    ]])
  end)

  it("keep memory flat over a thousand copies", function()
    on_two_gpus([[
      local function used()
        for _ = 1, 2 do collectgarbage() end
        nibble.synchronize("cuda:0") nibble.synchronize("cuda:1") nibble.synchronize("cpu")
        return nibble.memory("cuda:0").reserved + nibble.memory("cuda:1").reserved + nibble.memory("cpu").reserved
      end
      local a, b, p = nibble.zeros(1000, A), nibble.zeros(1000, with(B, "bfloat16")), nibble.zeros(1000, { pinned = true })
      local base = used()
      for i = 1, 500 do
        b:copy(a)
        a:copy(b)
        p:copy(b)
        b:copy(p)
        nibble.zeros(100, { pinned = true }):copy(nibble.zeros(100, A))
      end
      assert(used() == base)
    ]], "NIB_STANDIN_JITTER=0")
  end)

  it("are not mixed: the error names the argument and both", function()
    on_two_gpus([[
      local operation = "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
      local key, slots = nibble.zeros(4, 2, 16, with(A, "bfloat16")), nibble.arange(4, with(A, "int32"))
      local data, scales = nibble.zeros(2, 2, 4, 2, 8, with(A, "uint8")), nibble.zeros(2, 2, 4, 2, 1, with(A, "uint8"))
      -- The first tensor's GPU is where it runs: when that one is elsewhere, all others are.
      for i, name in ipairs({ "append_value", "append_value", "slot_mapping", "paged_kv_cache (K)", "kv_cache_sf (K)" }) do
        local arguments = { key, key, slots, data, scales, 1.0, 1.0 }
        arguments[i] = arguments[i]:to("cuda:1")
        local ok, message = pcall(nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, table.unpack(arguments))
        local right = ("%s: %s: expected a tensor on cuda:%d, got one on cuda:%d"):format(operation, name, i == 1 and 1 or 0,
          i == 1 and 0 or 1)
        assert(not ok and message:find(right, 1, true), tostring(message))
      end
    ]])
  end)

  it("have memory and faults of their own", function()
    on_two_gpus([[
      local function used(device) return nibble.memory(device).used end
      nibble.zeros(1, A) nibble.zeros(1, B)
      collectgarbage() collectgarbage()
      local a, b = used("cuda:0"), used("cuda:1")
      local kept = nibble.zeros(1 << 20, with(B, "uint8"))
      assert(used("cuda:0") == a and used("cuda:1") == b + (1 << 20))
      nibble.mla.dequantize_cache(nibble.zeros(2, 4, 384, with(B, "uint8")), nibble.tensor({ 99 }, with(B, "int32")))
      nibble.check_faults("cuda:0")
      local ok, message = pcall(nibble.check_faults, "cuda:1")
      assert(not ok and message:find("mla.dequantize_cache: slots: expected .+, got 99 .*cuda:1"), tostring(message))
      nibble.check_faults("cuda:1")
      assert(kept:numel() == 1 << 20)
    ]])
  end)
end)

-- Everything above once. Two GPUs.
local scenario = [[
  local nibble, standin = require("nibble"), require("standin")
  local A, B = { device = "cuda:0" }, { device = "cuda:1" }
]] .. standin.settle .. [[
  local function scenario()
    local objects = {}
    local function keep(object)
      objects[#objects + 1] = object
      return object
    end
    local p = keep(nibble.arange(64, { pinned = true, dtype = "float32" }))
    local q = keep(nibble.zeros(64, { pinned = true, dtype = "int32" }))
    local x, y = keep(nibble.zeros(64, A)), keep(nibble.zeros(8, 8, B))
    local s, t, host = keep(nibble.stream(A)), keep(nibble.stream(B)), keep(nibble.stream({ device = "cpu" }))
    local w = keep(nibble.stream({ device = "cuda:0", handle = s.handle }))
    for _, name in ipairs({ "cuda:0", "cuda:1", "cpu" }) do nibble.synchronize(name) end
    w:scope(function() x:copy(p) end)
    t:wait(keep(s:record()))
    t:scope(function() y:transpose(1, 2):copy(x:view(8, 8)) end)
    host:wait(keep(t:record()))
    s:wait(keep(host:record()))
    s:scope(function()
      x:view(8, 8):copy(y)
      q:copy(x)
    end)
    assert(q[2] == 8 and q[64] == 63)
    nibble.synchronize()
    local graph <close> = s:capture(function()
      x:copy(q)
      q:copy(x:fill(5))
    end)
    assert(graph:dot({ driver = true }):find("MEMCPY"))
    graph:replay()
    assert(q[64] == 5)
    for _, name in ipairs({ "cuda:0", "cuda:1", "cpu" }) do nibble.synchronize(name) end
    for _, object in ipairs(objects) do object:close() end
  end
]]

describe_cuda("a call of the driver that fails between devices", function()
  standin.it_fails_well(it, scenario, { "*", "cuEventQuery", "cuStreamQuery" }, 100, "NIB_STANDIN_DEVICES=2")

  it("for want of pinned memory is an error like any such, after what is kept was given back", function()
    standin.assert_well(standin.run([[
      local nibble, standin = require("nibble"), require("standin")
      for i = 1, 10 do nibble.empty(1000 << i, { pinned = true, dtype = "uint8" }):close() end
      assert(standin.live("host") > 5)
      standin.fail("cuMemHostAlloc", 1, 2)
      local t = nibble.full(1 << 22, 3, { pinned = true, dtype = "uint8" })
      assert(t[1 << 22] == 3 and standin.fired() == 1 and standin.live("host") == 2) -- and the device's word for faults
      standin.fail("cuMemHostAlloc", -1, 2)
      local ok, message = pcall(nibble.zeros, 1 << 23, { pinned = true })
      assert(not ok and message:find("memory", 1, true), message)
      standin.fail()
      assert(nibble.zeros(1 << 23, { pinned = true })[1] == 0)
    ]]), true)
  end)

  it("while a second GPU and pinned memory are opened is told, and may be tried again", function()
    for _, call in ipairs({ "cuMemHostAlloc", "cuMemPoolSetAccess", "cuDeviceCanAccessPeer", "cuMemcpyAsync",
      "cuMemcpyPeerAsync",
      "cuGraphDebugDotPrint", "cuStreamGetCtx" }) do
      local result = standin.run(scenario .. ([[
        standin.fail(%q, 1, 999)
        local ok, message = pcall(scenario)
        standin.fail()
        assert(ok or message:find(": .* failed on cuda:.: CUDA_ERROR_UNKNOWN"), message)
        settle()
        scenario()
        assert(standin.misuses() == 0 or %q == "cuMemPoolSetAccess" or %q == "cuDeviceCanAccessPeer", standin.misuse())
      ]]):format(call, call, call), "NIB_STANDIN_DEVICES=2")
      assert.same({ status = 0, stderr = "" }, { status = result.status, stderr = result.stderr }, call)
      assert.equal(1, result.failed, call)
    end
  end)
end)

describe_cuda("a context that is lost beside others", function()
  it("is told by what waits for its work, and the rest goes on", function()
    local result = standin.run([[
      local nibble, standin = require("nibble"), require("standin")
      local A, B = { device = "cuda:0" }, { device = "cuda:1" }
      local p, q = nibble.zeros(64, { pinned = true }), nibble.full(64, 3.0, { pinned = true })
      local x, y = nibble.zeros(64, A), nibble.zeros(64, B)
      for _, name in ipairs({ "cuda:0", "cuda:1", "cpu" }) do nibble.synchronize(name) end
      standin.fail("kernel", 2, 700)
      nibble.empty(1 << 24, A):copy(nibble.empty(1 << 24, A)) -- takes a while; the next one breaks
      x:fill(1)
      p:copy(x)
      local event = nibble.current_stream("cuda:0"):record()
      local function check(name, call)
        local ok, message = pcall(call)
        assert(not ok and message:find("cuda:0: context lost: an earlier kernel failed", 1, true), name .. ": " .. tostring(message))
      end
      check("read", function() return p[1] end) -- what it waits for will never be
      for _ = 1, 2 do
        for name, call in pairs({ copy = function() y:copy(x) end, up = function() x:copy(q) end,
          wait = function() nibble.current_stream("cpu"):wait(event) end, from = function() x:copy(y) end,
          across = function() nibble.current_stream("cuda:1"):wait(event) end,
          fresh = function() nibble.stream({ device = "cuda:0", handle = 4096 }) end }) do
          check(name, call)
        end
      end
      y:copy(q)
      assert(y[64] == 3 and nibble.full(3, 2, { device = "cpu" })[1] == 2)
      assert(nibble.full(8, 4.0, B)[8] == 4)
    ]], "NIB_STANDIN_DEVICES=2")
    standin.assert_well(result, false)
  end)
end)
