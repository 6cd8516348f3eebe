--- A progress bar on standard error, if that is a terminal. It is removed at the end.
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
  self.file = show.is_capable(2) and io.stderr or nil
  self.columns = self.file and show.columns() or 0
  return setmetatable(self, progress)
end

--- Advances the bar by `count` steps (default 1). `note` is shown at the end of the line.
---@param count? integer
---@param note? string
function progress:step(count, note)
  self.count = math.min(self.count + (count or 1), self.total)
  if not self.file then return end
  local percent = self.total > 0 and self.count * 100 // self.total or 100
  if percent == self.drawn and not note then return end
  self.drawn = percent
  local full, empty = "█", "░"
  if not show.use_utf8() then full, empty = "#", "." end
  local tint, plain = "\27[36m", "\27[0m"
  if not show.use_color(2) then tint, plain = "", "" end
  -- A line as wide as the terminal would wrap and could not be removed. So the bar shrinks, and then the title is cut.
  local title, tail = show.visible(self.title) .. " ", (" %3d%%"):format(percent)
  local room = self.columns - 1 - #tail
  local width = math.max(math.min(30, room - show.width(title)), 0)
  title = show.cut(title, room - width)
  if note then tail = tail .. show.cut(" " .. show.visible(note), room - width - show.width(title)) end
  local filled = self.total > 0 and self.count * width // self.total or width
  local line = tint .. full:rep(filled) .. empty:rep(width - filled) .. plain
  self.file:write("\r\27[K", title, line, tail)
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
