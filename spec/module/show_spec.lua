-- nibble.show and nibble.progress: pictures for the terminal, as strings.
local pages = require "nibble.pages"
local show = require "nibble.show"
local process = require "spec.support.runtime_process"

local plain = { color = false, utf8 = false, width = 80 }

local function with(opts, extra)
  local copy = {}
  for key, value in pairs(opts) do copy[key] = value end
  for key, value in pairs(extra) do copy[key] = value end
  return copy
end

describe("show.page_table #quick", function()
  local function example()
    local allocator = pages.allocator { num_pages = 12, page_size = 8, reserved = 1 }
    local a, b = allocator:allocate(17), allocator:allocate(3)
    local c = allocator:fork(a, 16)
    return allocator, { a, b, c, (allocator:allocate(0)) }
  end

  it("has a row for each request and a letter for each page", function()
    local allocator, requests = example()
    assert.are.equal([[
requests and their pages of 8 tokens (# full, := part full, * shared)
  a one 17 tokens |  1#*  2#*  3:
  b two  3 tokens |  4=
  c     16 tokens |  1#*  2#*
  d      0 tokens |
pool of 12 pages: 4 in use, 7 free (.), 1 reserved (-)
   0 | -**ab.......]], show.page_table(allocator, requests, with(plain, { names = { "one", "two" } })))
  end)

  it("explains the marks that occur, and no mark means two things", function()
    local allocator = pages.allocator { num_pages = 16, page_size = 16, reserved = 1 }
    local requests = {}
    for i, length in ipairs { 1, 2, 4, 6, 8, 10, 12, 16 } do requests[i] = allocator:allocate(length) end
    for _, unicode in ipairs { true, false } do
      local text = show.page_table(allocator, requests, { color = false, utf8 = unicode, width = 80 })
      local levels, seen = {}, { ["-"] = true, ["~"] = true, ["*"] = true, [unicode and "·" or "."] = true }
      for line in text:gmatch("\n  (%a +%d+ tokens [^\n]*)") do
        local level = line:match("(%S+)$"):gsub("%d", "")
        assert.is_nil(seen[level], level)
        assert.is_nil(level:find("%w"))
        seen[level], levels[#levels + 1] = true, level
      end
      assert.are.equal(8, #levels)
      assert.are.equal(("requests and their pages of 16 tokens (%s full, %s part full)"):format(levels[8],
        table.concat(levels, "", 1, 7)), text:match("^[^\n]*"))
    end

    local function lines(...)
      local list = {}
      for line in show.page_table(allocator, { ... }, plain):gmatch("[^\n]+") do list[#list + 1] = line end
      return list
    end
    allocator:allocate(7 * 16)
    local list = lines(requests[8])
    assert.are.equal("requests and their pages of 16 tokens (# full)", list[1])
    assert.are.equal("pool of 16 pages: 15 in use, 14 of them by other requests (~), 0 free, 1 reserved (-)", list[3])
    assert.are.equal("   0 | -~~~~~~~a~~~~~~~", list[4])
    assert.are.equal("requests and their pages of 16 tokens", lines()[1])
  end)

  it("keeps inside the width", function()
    local allocator = pages.allocator { num_pages = 500, page_size = 4, layout = "shuffled" }
    local requests = { (allocator:allocate(400)), (allocator:allocate(1)) }
    for _, width in ipairs { 60, 80, 132 } do
      local text = show.page_table(allocator, requests, with(plain, { width = width }))
      local pages_seen, rows = 0, 0
      for line in (text .. "\n"):gmatch("(.-)\n") do
        if not line:find("^requests") and not line:find("^pool") then
          assert.is_true(#line <= width, line)
          rows = rows + 1
          local _, n = line:gsub("%d+#", "")
          pages_seen = pages_seen + n
        end
      end
      assert.are.equal(100, pages_seen) -- the full ones
      assert.is_true(rows > 10)
    end
  end)

  it("colours only when asked, and says the same without", function()
    local allocator, requests = example()
    for _, unicode in ipairs { true, false } do
      local colored = show.page_table(allocator, requests, { color = true, utf8 = unicode, width = 80 })
      local bare = show.page_table(allocator, requests, { color = false, utf8 = unicode, width = 80 })
      assert.is_truthy(colored:find("\27[31m", 1, true))
      assert.is_nil(bare:find("\27", 1, true))
      assert.are.equal(bare, (colored:gsub("\27%[%d*m", "")))
      assert.are.equal(unicode, bare:find("[\x80-\xFF]") ~= nil)
    end
  end)
end)

describe("show.block #quick", function()
  local numbers = { 0, 0.25, 0.5, 0.75, -1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, -6, -0.1, -0.0 }

  it("has input, scale byte and value, codes, decoded values and errors", function()
    local lines = {}
    for line in show.block(numbers, plain):gmatch("[^\n]+") do lines[#lines + 1] = line end
    assert.are.equal("scale byte 0x38 = 1, global scale 1: codes count in units of 1", lines[1])
    assert.are.equal(18, #lines)
    -- Ties go to the even code: 0.25 -> 0, 0.75 -> 1 (code 2), 2.5 -> 2, 3.5 -> 4, 5 -> 4.
    local codes = { 0, 0, 1, 2, 10, 3, 4, 4, 5, 6, 6, 6, 7, 15, 8, 8 }
    local decoded = { 0, 0, 0.5, 1, -1, 1.5, 2, 2, 3, 4, 4, 4, 6, -6, 0, 0 }
    for i = 1, 16 do
      local index, input, code, _, value, err = lines[i + 2]:match("^%s*(%d+)%s+(%S+)%s+(%x)%s+(%S+)%s+(%S+)%s+(%S+)%s")
      assert.are.equal(i - 1, tonumber(index))
      assert.are.equal(numbers[i], tonumber(input))
      assert.are.equal(codes[i], tonumber(code, 16))
      assert.are.equal(decoded[i], tonumber(value) + 0)
      assert.are.equal(decoded[i] - numbers[i], tonumber(err) + 0)
    end
  end)

  it("shows given codes instead, under a global scale", function()
    local codes = {}
    for i = 0, 15 do codes[i + 1] = i end
    local text = show.block(numbers, with(plain, { codes = codes, scale_byte = 0x40, global_scale = 0.25 }))
    assert.is_truthy(text:find("scale byte 0x40 = 2, global scale 0.25: codes count in units of 0.5", 1, true))
    assert.is_truthy(text:find("\n   7 +2.5 +7 +6.0 +3 +0.5 "))
  end)

  it("stays ASCII and without colour on request, and marks what is past half a step", function()
    local bare = show.block(numbers, with(plain,
      { codes = { 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7 }, scale_byte = 0x38 }))
    assert.is_nil(bare:find("[\x80-\xFF\27]"))
    assert.is_truthy(bare:find("|########>", 1, true))
    local colored = show.block(numbers, { color = true, utf8 = true })
    assert.are.equal(show.block(numbers, { color = false, utf8 = true }), (colored:gsub("\27%[%d*m", "")))
  end)

  it("refuses fewer than 16 numbers", function()
    assert.has_error(function() show.block({ 1, 2 }) end, "show.block: input: expected 16 numbers, got nil at 3")
  end)

  it("reads a block of a cache, in both layouts", function()
    local nibble = require "nibble"
    local reference = require "nibble.reference"
    for _, layout in ipairs { "NHD", "HND" } do
      local pool = pages.caches { num_pages = 3, page_size = 4, num_kv_heads = 2, head_dim = 48, kv_layout = layout }
      local k = nibble.randn(3, 2, 48, { dtype = "bfloat16", seed = 7 })
      nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, k, nibble.tensor({ 1, 6, 11 }),
        pool.paged_kv_cache, pool.kv_cache_sf, 1.0, 1.0, layout)
      for row, slot in ipairs { 1, 6, 11 } do
        for head = 0, 1 do
          for block = 0, 2 do
            local numbers_of = k[{ row, head + 1 }]:narrow(1, block * 16 + 1, 16):totable()
            local scale_byte, codes = reference.quantize_block(numbers_of, 1.0)
            local got, got_scale = show.read_block(pool.paged_kv_cache[1], pool.kv_cache_sf[1], slot, head, block,
              layout)
            assert.are.same(codes, got)
            assert.are.equal(scale_byte, got_scale)
          end
        end
      end
    end
  end)
end)

describe("show.half_step #quick", function()
  it("is half the distance of the neighbouring codes", function()
    assert.are.same({ 0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0 },
      { show.half_step(0), show.half_step(-0.7), show.half_step(1.99), show.half_step(2), show.half_step(-3.9),
        show.half_step(4), show.half_step(5), show.half_step(-6) })
  end)
end)

describe("show.histogram #quick", function()
  it("counts into bins", function()
    assert.are.equal([[
error
          0 .. 1         2 | ##########
          1 .. 2         0 |
          2 .. 3         4 | ####################
          3 .. 4         1 | #####]],
      show.histogram({ 0, 0.5, 2, 2, 2.5, 2.9, 4 },
        { bins = 4, low = 0, high = 4, title = "error", utf8 = false, color = false, width = 53 }))
  end)

  it("puts what is outside into the outermost bins, and NaN on a line of its own", function()
    local text = show.histogram({ -9, 0.5, 7, math.huge, -math.huge, 0 / 0 },
      with(plain, { bins = 2, low = 0, high = 1 }))
    assert.is_truthy(text:find("0 .. 0.5 +2 |"))
    assert.is_truthy(text:find("0.5 .. 1 +3 |"))
    assert.is_truthy(text:find("\n  NaN: 1$"))
  end)

  it("takes its range from the numbers, one number and none too", function()
    assert.is_truthy(show.histogram({ -2, 6 }, with(plain, { bins = 2 })):find("-2 .. 2 +1 |.*2 .. 6 +1 |"))
    assert.is_truthy(show.histogram({ 5, 5 }, with(plain, { bins = 2 })):find("5 .. 5.5 +2 |"))
    assert.is_truthy(show.histogram({}, with(plain, { bins = 2 })):find("0 .. 0.5 +0 |"))
  end)

  it("draws eighths of a column where the locale has them", function()
    local counts = {}
    for i = 1, 8 do
      for _ = 1, i do counts[#counts + 1] = i - 0.5 end
    end
    local text = show.histogram(counts, { bins = 8, low = 0, high = 8, utf8 = true, color = false, width = 41 })
    for _, bar in ipairs { "█", "██", "███", "████", "█████", "██████", "███████", "████████" } do
      assert.is_truthy(text:find("│ " .. bar .. "\n") or text:find("│ " .. bar .. "$"))
    end
    assert.is_truthy(show.histogram({ 0, 1, 1, 1 },
      { bins = 2, utf8 = true, color = false, width = 41 }):find("│ ██▋\n"))
  end)

  it("takes a tensor", function()
    local nibble = require "nibble"
    local text = show.histogram(nibble.tensor({ 0.25, 0.75, 0.8 }), with(plain, { bins = 2, low = 0, high = 1 }))
    assert.is_truthy(text:find("0 .. 0.5 +1 |.*0.5 .. 1 +2 |"))
  end)
end)

describe("the terminal #quick", function()
  local function run(code, before)
    return process.script(code, { before = before })
  end

  it("is not there behind a file: no colour, no progress", function()
    local result = run([[
      local show, progress = require "nibble.show", require "nibble.progress"
      print(show.is_tty(1), show.is_tty(2), show.use_color(), show.use_color(2))
      do local bar <close> = progress.start("work", 3) for _ = 1, 3 do bar:step() end end
      print(show.histogram({ 1 }):find("\27", 1, true))
    ]])
    assert.are.same({ status = 0, stdout = "false\tfalse\tfalse\tfalse\nnil\n", stderr = "" }, result)
  end)

  local function can_make_terminal() return process.run("script -qec true /dev/null").status == 0 end

  local function in_terminal(code, environment)
    -- script(1) runs a command on a pseudo-terminal of its own.
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(code)
    file:close()
    local command = ("export LUA_PATH=%s; env %s lua5.4 %s"):format(process.quote(package.path), environment, path)
    local result = process.run("script -qec " .. process.quote(command) .. " /dev/null")
    os.remove(path)
    return result.stdout
  end

  it("has colour and progress, and honours NO_COLOR, TERM=dumb and a TERM that says nothing", function()
    if not can_make_terminal() then return pending("`script` cannot make a terminal here") end
    local code = [[
      local show, progress = require "nibble.show", require "nibble.progress"
      print(show.use_color(), (show.histogram({ 1 }):find("\27", 1, true)) ~= nil)
      do local bar <close> = progress.start("work", 2) bar:step() bar:step() end
      print("end")
    ]]
    local text = in_terminal(code, "-u NO_COLOR TERM=xterm LC_ALL=C.UTF-8")
    assert.is_truthy(text:find("true\ttrue", 1, true))
    assert.is_truthy(text:find("work.*█.* 50%%.*100%%"))
    assert.is_truthy(text:find("\r\27[Kend", 1, true), "the line is removed at the end")
    text = in_terminal(code, "NO_COLOR=1 TERM=xterm LC_ALL=C")
    assert.is_truthy(text:find("false\tfalse", 1, true))
    assert.is_truthy(text:find("work ###############%.+ +50%%"))
    for _, terminal in ipairs { "TERM=dumb", "TERM=", "-u TERM" } do
      text = in_terminal(code, "-u NO_COLOR " .. terminal .. " LC_ALL=C")
      assert.is_truthy(text:find("false\tfalse", 1, true), terminal)
      assert.is_nil(text:find("work", 1, true), terminal)
    end
  end)

  it("has a line of progress that fits into a row", function()
    if not can_make_terminal() then return pending("`script` cannot make a terminal here") end
    for _, columns in ipairs { 4, 12, 20, 40, 80 } do
      local text = in_terminal([[
        os.execute("stty cols ]] .. columns .. [[")
        local progress = require "nibble.progress"
        local bar <close> = progress.start("a ti\27[7mtle\u{3042}", 3)
        for i = 1, 3 do bar:step(1, "a note " .. ("n"):rep(50)) end]], "NO_COLOR=1 TERM=xterm LC_ALL=C.UTF-8")
      local lines = 0
      for line in text:gmatch("\r\27%[K([^\r]+)") do
        lines = lines + 1
        assert.is_nil(line:find("%c"))
        assert.is_true(show.width(line) < math.max(columns, 6), columns .. ": " .. line)
      end
      assert.equal(3, lines)
    end
  end)

  it("shows text from elsewhere without its control characters", function()
    for text, seen in pairs {
      [""] = "", ["plain \u{e9} \u{3042}"] = "plain \u{e9} \u{3042}", ["\27]0;x\7"] = "\\x1B]0;x\\x07",
        ["\0\127"] = "\\x00\\x7F",
      ["a\nb\tc\r"] = "a\\x0Ab\\x09c\\x0D", ["\u{85}\u{9b}31m"] = "\\u{85}\\u{9B}31m",
        ["\xff\xc3x\xe3\x81"] = "\\xFF\\xC3x\\xE3\\x81",
      ["\u{202e}\u{2066}\u{2028}"] = "\\u{202E}\\u{2066}\\u{2028}", ["\xed\xa0\x80"] = "\\xED\\xA0\\x80",
        ["\xc0\x9b"] = "\\xC0\\x9B",
    } do
      assert.equal(seen, show.visible(text))
    end
    assert.equal("a\nb\tc\\x0D", show.visible("a\nb\tc\r", true))
  end)

  it("is ASCII where the locale is not UTF-8", function()
    local code = [[print(require("nibble.show").use_utf8())]]
    assert.are.equal("true\n", run(code, "export LC_ALL=C.UTF-8;").stdout)
    assert.are.equal("false\n", run(code, "export LC_ALL=C;").stdout)
    assert.are.equal("true\n", run(code, "export LC_ALL= LC_CTYPE=de_DE.utf8 LANG=C;").stdout)
    assert.are.equal("false\n", run(code, "export LC_ALL= LC_CTYPE= LANG=POSIX;").stdout)
  end)
end)
