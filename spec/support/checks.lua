--- Table-driven specs of what an operation checks before it writes anything.
--   checks.describe({operation, arguments = function() -> a, call = function(a), cases, tensors}, describe, it)
--       a: fresh good arguments; a.outputs lists the pools that must stay untouched
--       tensors: the parameters that no other object may be given for
--       cases: {parameter, what is wrong, function(a) makes it so, substrings of the error...}
--   Ways to spoil an argument `p` of a, to be used in cases:
--       set(p, value or function)      option(name, value or function): an entry of a.opts
--       give(p, dtype, shape, [view_shape, strides]): zeros, or a strided view of them; give_option and
--       half(p, 1 or 2, ...) likewise
--   checks.tensor(dtype, shape, [view_shape, strides])
--   checks.no_tensors: values that are no tensor, by name
local assert = require "spec.support.assert"
local nibble = require "nibble"

local checks = {}

function checks.tensor(dtype, shape, view_shape, strides)
  local t = nibble.zeros(shape, {dtype = dtype})
  return strides and t:as_strided(view_shape, strides) or t
end

local function value_of(value)
  if type(value) == "function" then return value() end
  return value
end

function checks.set(parameter, value)
  return function(a) a[parameter] = value_of(value) end
end

function checks.option(name, value)
  return function(a) a.opts[name] = value_of(value) end
end

function checks.give(parameter, ...)
  local arguments = {...}
  return function(a) a[parameter] = checks.tensor(table.unpack(arguments)) end
end

function checks.give_option(name, ...)
  local arguments = {...}
  return function(a) a.opts[name] = checks.tensor(table.unpack(arguments)) end
end

function checks.half(parameter, i, ...)
  local arguments = {...}
  return function(a) a[parameter][i] = checks.tensor(table.unpack(arguments)) end
end

--- Objects that a careless C function might take for a tensor.
function checks.no_tensors()
  local closed = nibble.zeros(2)
  closed:close()
  return {
    {"nil", nil, "got n"}, {"a number", 5, "got "}, {"a string", "tensor", "got "}, {"a boolean", true, "got "},
    {"a function", print, "got "}, {"a file", io.stdout, "got "}, {"a stream", nibble.stream(), "got "},
      {"a closed tensor", closed, "closed"},
  }
end

function checks.describe(spec, describe, it)
  describe(spec.operation .. " checks", function()
    it("nothing that is right (the arguments that the cases below spoil are good) #quick", function()
      local a = spec.arguments()
      spec.call(a)
      nibble.synchronize()
      local changed = 0
      for _, output in ipairs(a.outputs) do
        if output.storage:bytes() ~= output.before then changed = changed + 1 end
      end
      assert.is_true(changed == #a.outputs, "the good call writes every output")
    end)

    for _, case in ipairs(spec.cases) do
      local parameter, what, change = case[1], case[2], case[3]
      it(parameter .. ": " .. what .. " #quick", function()
        local a = spec.arguments()
        change(a)
        assert.raises_like(function() spec.call(a) end, spec.operation, parameter, "expected ", "got ",
                           table.unpack(case, 4))
        nibble.synchronize()
        for _, output in ipairs(a.outputs) do output:assert_unchanged() end
      end)
    end

    for _, parameter in ipairs(spec.tensors) do
      it(parameter .. ": what is no tensor #quick", function()
        for _, wrong in ipairs(checks.no_tensors()) do
          local a = spec.arguments()
          a[parameter] = wrong[2]
          local ok, message = pcall(spec.call, a)
          assert.is_false(ok, parameter .. ": " .. wrong[1] .. " was accepted")
          assert.is_string(message)
          assert.truthy(message:find(spec.operation .. ": " .. parameter, 1, true), message)
          assert.truthy(message:find(wrong[3], 1, true), message)
          nibble.synchronize()
          for _, output in ipairs(a.outputs) do output:assert_unchanged() end
        end
      end)
    end
  end)
end

return checks
