---@meta nibble
-- Types and documentation of the part of the Lua module `nibble` that looks at what scripts do (the rest is in
-- meta.lua). Nothing here runs.

---@class nibble
local nibble = {}

--- A view of a storage that an operation reads or writes: all of it, or the elements that its index tensors and lengths
--- say. Observations share these tables: do not change them.
---@class nibble.access
---@field storage integer    number of the storage, as tensor:storage() gives it
---@field offset integer     where the first element lies, in bytes
---@field dtype nibble.dtype
---@field shape integer[]
---@field stride integer[]   in elements
---@field write boolean      of a kernel of the user's: not known
---@field parameter? string  as in error messages ("slot_mapping", "paged_kv_cache (K)"); nil: an argument of a kernel of yours
---@field kv_layout? nibble.layout  of a paged cache

--- What was done. Kinds, and the fields they have besides kind, operation, device and where:
--- work: queued on `stream`, or (with `node`, `deps`) recorded in `capture`; kernel, accesses, attributes, user_kernel.
--- event_record: `event` on `stream` (inside `capture`). stream_wait: `stream` waits for `event` (and joins `capture`).
--- synchronized: the host waited for `stream`, `event`, or the writers of `storage`; for none of them: for the device.
--- host_read, host_write: accesses, by the host itself. replay: `graph` on `stream`.
--- capture_begin: `capture` on `stream`. capture_end: it is what `graph` does from now on. capture_abort: `unjoined` is
--- the stream that was not joined back, if that was it. storage_created, storage_freed (but queued work may still use
--- it): `storage`, bytes. tensor_released: `storage`, handles (tensors left on it), collected. event_released,
--- graph_released, stream_created, stream_released. range_push: nibble.range(name, ...) begins. range_pop: the
--- innermost ends.
---@class nibble.observation
---@field kind string
---@field operation string       as in error messages: "tensor:copy", "page.nvfp4_quantize_append_..."
---@field device string
---@field time number            seconds of a clock that only goes forward: when it was queued or done
---@field begin number           of work, records, waits, reads, writes and replays: when the function that did it began to
---@field where? string          "FILE:LINE" of the script, outside of nibble's own modules
---@field callers? string        the places that it was called from, innermost first: "FILE:LINE < FILE:LINE", at most four
---@field stream? integer        numbers, unique among their kind, as tostring(stream) shows it
---@field event? integer
---@field graph? integer
---@field capture? integer
---@field storage? integer
---@field kernel? string         as graph:nodes() names it
---@field user_kernel? boolean
---@field accesses? nibble.access[]
---@field attributes? table<string, number|boolean>  arguments that are no tensors: "max_kv_len", "inverse", "apply_q_rope",
---                              "compress_ratio", scales that are numbers, "value" of fill, "start", "step", "seed",
---                              "low", "range"
---@field node? integer          id in the graph, from 1
---@field deps? integer[]        ids of the nodes that it waits for
---@field unjoined? integer      a stream's number
---@field name? string           of a range
---@field bytes? integer
---@field handles? integer
---@field collected? boolean     by the collector, not by close

--- Calls `fn(observation)` after each thing that was done successfully, in order; nil ends it. There is one function
--- for each name. It is called before the C function that did it returns; an error in it is an error of that function,
--- which has done its work. What an observer does itself is not observed, and it should neither queue work nor wait: it
--- may peek. Costs nothing when there is no observer.
---@param fn? fun(observation: nibble.observation)
---@param name? string  default ""
function nibble.observe(fn, name) end

--- What a storage holds where an access says: the elements row-major as little-endian bytes. Waits for what was queued
--- to write it; no observer knows of it, and content faults stay to be reported. `nil, message` when the storage is
--- gone, or during a capture on its device.
---@param access nibble.access  storage, offset, dtype, shape and stride are looked at
---@return string? bytes
---@return string? message
function nibble.peek(access) end

--- Prints how one value of a cache was made: input (when given), block maximum, scale, code, decoded value, error, and
--- where its bytes lie. Slots, pages, heads and dimensions count from 0. bindings/lua/nibble/explain.lua gives the same
--- as text and fields.
---   nibble.explain(pool, {slot = 5, head = 1, dim = 17, global_scale = g, input = row})
---   nibble.explain({k, v}, {sf = {k_sf, v_sf}, kv = "V", page = 2, entry = 1, interleaved = true})
---   nibble.explain(records, {slot = 5, dim = 460})     DeepSeek-V4's records
---@param cache nibble.caches|nibble.cache|nibble.tensor
---@param opts nibble.explain_options
function nibble.explain(cache, opts) end

-------------------------------------------------------------------------------------------------------------- checking

---@class nibble.report_operation
---@field name string     "tensor:copy"
---@field where? string   "FILE:LINE"; of what a graph does: of the capture
---@field callers? string the places that this was called from, innermost first: "FILE:LINE < FILE:LINE", at most four
---@field replay? string  "FILE:LINE" of the replay

---@alias nibble.report_kind
---| "race"|"unwritten"|"duplicate slot"|"owned twice"|"freed page"|"reserved page"|"shared page"|"foreign
---entry"|"foreign row"
---| "beyond length"|"missing page"|"wrong scales"|"closed"|"unjoined"

---@class nibble.report
---@field kind nibble.report_kind
---@field message string   what is wrong, in one line
---@field operation nibble.report_operation
---@field other? nibble.report_operation  that which it collides with
---@field hazard? string   of a race: "read after write", "write after read", "write after write"; "use": a kernel of the user's
---@field storage? {number: integer, bytes?: integer, where?: string}  what it is about, and where that was created
---@field text string      "check: KIND: MESSAGE" and lines for these, as it is printed

--- Checked mode: reports, once each, accesses of two streams (or of the host, or of nodes of a graph) that nothing
--- orders, reads of bytes that nothing wrote, slots that are twice in a call, pages that are not the request's own
--- (`pages.watch`), replays that read a closed tensor, and streams that are not joined in a capture.
--- bindings/lua/nibble/checker.lua says what each means. true: on, anew, and reports go to standard error. A function:
--- on, and it gets each report; its errors are errors of the call that is at fault. false: off; the reports stay. Turn
--- it on before the first tensor: older ones count as written and ordered.
---@param mode boolean|fun(report: nibble.report)
function nibble.check(mode) end

--- What was found since checked mode was turned on last, and what was not looked at (a line for each kind of thing;
--- with true as the mode it goes to standard error, too).
---@return nibble.report[]
---@return string[] unseen
function nibble.check_reports() end

return nibble
