-- Runs busted in whatever interpreter runs this file: `lua5.4 spec/support/busted.lua [options] [files]`.
require "busted.runner"({ standalone = false })
