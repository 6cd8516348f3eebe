--- A line of progress on standard error while something long runs: only on a terminal, and gone when it is over.
--
--   local bar <close> = require("nibble.progress").start("decoding", 64)
--   for step = 1, 64 do work() bar:step() end

local show = require "nibble.show"

local progress = {}
progress.__index = progress

---@class nibble.progress
---@field title string

--- Begins a line for `total` steps.
---@param title string
---@param total integer
---@return nibble.progress
function progress.start(title, total)
  local self = { title = title, total = total, count = 0, drawn = -1 }
  self.file = os.getenv("TERM") ~= "dumb" and show.is_tty(2) and io.stderr or nil
  return setmetatable(self, progress)
end

--- One step further (or `count`); `note` is shown at the end of the line.
---@param count? integer
---@param note? string
function progress:step(count, note)
  self.count = math.min(self.count + (count or 1), self.total)
  if not self.file then return end
  local filled = self.total > 0 and self.count * 30 // self.total or 30
  local percent = self.total > 0 and self.count * 100 // self.total or 100
  if percent == self.drawn and not note then return end
  self.drawn = percent
  local full, empty = "█", "░"
  if not show.use_utf8() then full, empty = "#", "." end
  local tint, plain = "\27[36m", "\27[0m"
  if not show.use_color(2) then tint, plain = "", "" end
  local line = tint .. full:rep(filled) .. empty:rep(30 - filled) .. plain
  self.file:write(("\r\27[K%s %s %3d%% %s"):format(self.title, line, percent, note or ""))
  self.file:flush()
end

--- Removes the line.
function progress:close()
  if self.file and self.drawn >= 0 then
    self.file:write("\r\27[K")
    self.file:flush()
  end
  self.file = nil
end

progress.__close = progress.close

return progress
