---@meta nibble
-- Types and documentation of the Lua module `nibble`, for the Lua language server and for people. Nothing here runs.
--
-- Conventions. Dimensions and indices count from 1. *Data* that kernels read (slots, page indices, positions, lengths)
-- counts from 0. Options are a last table; an option that is not listed is an error. A shape is written as integers or
-- as one table: `t:view(2, 3)` and `t:view({2, 3})` are the same. 3.0 is an integer; 3.5, "3", NaN and 1e300 are not.
-- Tables are read as they are: one with `__index` or `__len` is an error. So is every use of a closed object. Misuse
-- raises an error string `operation: parameter: expected X, got Y`; operation is the function's name below without
-- `nibble.` ("zeros", "tensor:narrow", "stream:capture",
-- "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"). What a program can live with (no GPU, no such file)
-- returns `nil, message`.

---@alias nibble.dtype "float32"|"float16"|"bfloat16"|"float8_e4m3fn"|"uint8"|"int8"|"uint16"|"int32"|"int64"
---@alias nibble.layout "NHD"|"HND"
---@alias nibble.shape integer|integer[]

---@class nibble.options
---@field dtype? nibble.dtype  element type
---@field device? string       "cpu", "cuda:0", ...; default: nibble.device()
---@field pinned? boolean      on the CPU, in memory that GPUs copy to and from directly (see tensor.pinned); device: "cpu" or none

---@class nibble.random_options: nibble.options
---@field seed? integer        any integer; default: a counter that starts at 0 and grows by 1 at each such call

---@class nibble
---@field version string       "MAJOR.MINOR.PATCH"
local nibble = {}

---------------------------------------------------------------------------------------------------------------- devices

---@class nibble.device_info
---@field name string          "cpu", "cuda:0"
---@field description string   the processor's or GPU's name
---@field available boolean
---@field reason? string       why it is not available, in words
---@field memory? integer      bytes of memory
---@field processors? integer  threads (cpu) or multiprocessors

--- Every device this process knows of, usable or not; the first is always "cpu".
---@return nibble.device_info[]
function nibble.devices() end

--- The canonical name of a device. Without a name: the value of the environment variable NIBBLE_DEVICE if set,
--- otherwise the best device there is. `nil, reason` when it is not available.
---@param name? string
---@return string? device
---@return string? reason
function nibble.device(name) end

--- Whether a device can be used; if not, why, in words.
---@param name string
---@return boolean available
---@return string? reason
function nibble.available(name) end

---@class nibble.memory_info
---@field used integer      bytes of live tensor storage
---@field reserved integer  bytes held from the system (used, plus storage whose last work is still queued)
---@field peak integer      largest `reserved` so far

--- Tensor memory of a device, in bytes.
---@param device? string
---@return nibble.memory_info
function nibble.memory(device) end

--- Waits for all work of a device, on every stream. Raises a stream's error or a content fault, once.
---@param device? string
function nibble.synchronize(device) end

--- Raises the content fault that a finished operation recorded on this device, once; does nothing if there is none.
--- Waits for the device's work first.
---@param device? string
function nibble.check_faults(device) end

--- Calls `fn(...)` inside a named range, and returns its results. Traces have it, and a profiler shows it (NVTX) where
--- libnvToolsExt is on the machine. Yielding across it is an error.
---@param name string
---@param fn fun(...): ...
---@param ... any
---@return any ...
function nibble.range(name, fn, ...) end

--------------------------------------------------------------------------------------------------------------- creation

--- A tensor from a number or a nested table: `nibble.tensor({{1, 2}, {3, 4}})`. Default dtype: int64 when every number
--- is a Lua integer, else float32. A ragged table, an empty inner level next to a full one, or a value that is no
--- number is an error. A number that an integer dtype cannot hold is an error; floats are rounded to nearest even.
---@param data number|table
---@param opts? nibble.options
---@return nibble.tensor
function nibble.tensor(data, opts) end

--- Unspecified contents.
---@param ... nibble.shape|nibble.options
---@return nibble.tensor
function nibble.empty(...) end

---@param ... nibble.shape|nibble.options
---@return nibble.tensor
function nibble.zeros(...) end

--- Every element is `value`. `nibble.full({2, 3}, 1.5, {dtype = "bfloat16"})`. Default dtype: float32, int64 for an
--- integer value. A value that an integer dtype cannot hold is an error.
---@param shape integer[]|integer
---@param value number
---@param opts? nibble.options
---@return nibble.tensor
function nibble.full(shape, value, opts) end

--- 0, 1, ... stop-1, or start, start+step, ... while before `stop`. Default dtype: int64 when all are integers, else
--- float32; element i is start + i*step computed in float64 (in int64 for integers) and rounded once.
---@overload fun(stop: number, opts?: nibble.options): nibble.tensor
---@overload fun(start: number, stop: number, opts?: nibble.options): nibble.tensor
---@param start number
---@param stop number
---@param step number  not 0
---@param opts? nibble.options
---@return nibble.tensor
function nibble.arange(start, stop, step, opts) end

--- Standard normal values (float dtypes; default float32). The same bits on every device for the same seed and shape.
---@param ... nibble.shape|nibble.random_options
---@return nibble.tensor
function nibble.randn(...) end

--- Integers low <= x < high. Default dtype int64 (any dtype; low and high-1 must be representable in an integer dtype).
---@param low integer
---@param high integer  greater than low
---@param shape integer[]|integer
---@param opts? nibble.random_options
---@return nibble.tensor
function nibble.randint(low, high, shape, opts) end

--- A random permutation of 0..n-1. Default dtype int64 (int32 and int64 only).
---@param n integer
---@param opts? nibble.random_options
---@return nibble.tensor
function nibble.randperm(n, opts) end

--- A tensor from raw little-endian bytes, row-major; the string's length must be the size of the tensor. dtype:
--- required.
---@param bytes string
---@param shape integer[]|integer
---@param opts nibble.options
---@return nibble.tensor
function nibble.from_bytes(bytes, shape, opts) end

--- Reads a NumPy `.npy` file (versions 1 to 3, little endian, C or Fortran order; f4 f2 f8 u1 i1 u2 i4 i8, f8 is
--- rounded to float32, bool is uint8). `dtype`: read the same bits as another type of the same size ("uint16" data as
--- "bfloat16", "uint8" as "float8_e4m3fn"); i2 u4 u8 c8 and V1 V2 V4 V8 (ml_dtypes: V2 is its bfloat16, V1 its
--- float8_e4m3fn) need one. A file that cannot be opened gives `nil, message`; one that is damaged raises an error.
---
--- Of a path that ends in `.safetensors`, or with `name`, it reads one tensor of a safetensors file, and no other's
--- bytes: the one called `name`, or the only one (the error lists the names otherwise). F32 F16 BF16 F8_E4M3 U8 I8 U16
--- I32 I64 are read as what they are, BOOL as uint8, F64 rounded to float32; others (I16, U32, F8_E5M2, ...) as the
--- `dtype` of the same size that is asked for, F4 as "uint8" with two codes to a byte and the last dimension halved.
---@param path string
---@param opts? nibble.load_options
---@return nibble.tensor?
---@return string? message
function nibble.load(path, opts) end

---@class nibble.load_options: nibble.options
---@field name? string  a tensor of a safetensors file

---@class nibble.file_entry
---@field name string
---@field stored string        the file's own name of the element type: "F32", "BF16", "F8_E4M3", ...
---@field dtype? nibble.dtype  what `load` reads it as; nil: it must be told
---@field shape integer[]
---@field offset integer       of its first byte in the file
---@field bytes integer

--- What is in a safetensors file, in the order of the bytes. `nil, message` for a file that cannot be opened; one that
--- is damaged raises an error.
---@param path string
---@return nibble.file_entry[]?
---@return string? message
function nibble.list(path) end

--- Writes tensors as a safetensors file, largest elements first, then by name. Waits for them. `nil, message` if the
--- file cannot be written.
---@param path string
---@param tensors table<string, nibble.tensor>  names in UTF-8
---@return boolean?
---@return string? message
function nibble.save(path, tensors) end

--- A file of your own that takes its place when it is closed, as those of `save` and `tensor:save` do: until then its
--- bytes are in PATH.RANDOM.part beside it, and when it cannot be written what was there stays. A pipe or a device is
--- written as it is.
---@param path string
---@return nibble.writer?
---@return string? message
function nibble.create(path) end

---@class nibble.writer
local writer = {}

--- At once: what a killed process has written is in the file beside.
---@param ... string
---@return nibble.writer?
---@return string? message
function writer:write(...) end

--- Puts the file in its place. `nil, message`: this or a write before failed, and what was there is as it was. Left by
--- an error (`local w <close>`) it is not put there; one that nobody closes is, when it is collected (at the program's
--- end, at the latest).
---@return boolean?
---@return string? message
function writer:close() end

--- The rotary table `[max_position, 64]` of DeepSeek-V4's operations: cos(position * theta^(-2p/64)) in column p,
--- sin in column 32+p, p = 0..31; float64 rounded once. Asynchronous and capturable.
---@param max_position integer
---@param opts? {theta?: number, dtype?: nibble.dtype, device?: string}  theta 1e4, dtype "float32" ("float16", "bfloat16")
---@return nibble.tensor
function nibble.rope_table(max_position, opts) end

----------------------------------------------------------------------------------------------------------------- tensor

--- A view (shape, strides, dtype) of a reference-counted storage on one device. `#t` is the first dimension. `t[i]` is
--- an element of a 1-D tensor (a number) or a view of row i; `t[{i, j, ...}]` is an element when there is an index for
--- each dimension, else a view. `t[i] = v` and `t[{...}] = v` write a number or copy a tensor (asynchronously, in the
--- current stream). `a == b`: the same view of the same storage. `tostring(t)` prints values (elided when large),
--- shape, dtype and device. `t:close()` (also `local t <close>`) releases the storage early; whatever is called on it
--- then says "closed". Reading values waits for the work that writes them; inside a capture it is refused.
---@class nibble.tensor
---@field shape integer[]   a fresh table
---@field dtype nibble.dtype
---@field device string
---@field pinned boolean    made with `pinned` where a GPU can be used; false in ordinary memory, also when there was no GPU to pin it for
local tensor = {}

--- Strides in elements; with `dim`, that one.
---@param dim? integer
---@return integer[]|integer
function tensor:stride(dim) end
---@return integer
function tensor:dim() end
---@return integer
function tensor:numel() end
--- A number that all views of one storage share and that no other storage has had, and the offset of the first element
--- in it.
---@return integer storage
---@return integer offset  in bytes
function tensor:storage() end
---@return boolean
function tensor:is_contiguous() end

--- Elements `start` .. `start+length-1` of dimension `dim`, as a view.
---@param dim integer
---@param start integer
---@param length integer  0 is allowed
---@return nibble.tensor
function tensor:narrow(dim, start, length) end

--- Index `index` of dimension `dim`, as a view with one dimension less.
---@param dim integer
---@param index integer
---@return nibble.tensor
function tensor:select(dim, index) end

--- The same elements under another shape, without a copy; one size may be -1. An error if strides do not allow it.
---@param ... nibble.shape
---@return nibble.tensor
function tensor:view(...) end

--- Dimensions in another order, each named once.
---@param ... nibble.shape
---@return nibble.tensor
function tensor:permute(...) end

---@param dim1 integer
---@param dim2 integer
---@return nibble.tensor
function tensor:transpose(dim1, dim2) end

--- Dimensions of size 1 repeated (stride 0), new leading dimensions allowed; -1 keeps a size.
---@param ... nibble.shape
---@return nibble.tensor
function tensor:expand(...) end

--- Any view of this tensor's storage: sizes, strides (>= 0) and an offset in elements from this tensor's first element
--- (may be negative). It must lie inside the storage.
---@param size integer[]
---@param stride integer[]
---@param offset? integer  default 0
---@return nibble.tensor
function tensor:as_strided(size, stride, offset) end

--- The same bytes as another dtype: the last dimension grows or shrinks with the element size (it must be contiguous,
--- and strides and offset must divide when elements grow).
---@param dtype nibble.dtype
---@return nibble.tensor
function tensor:reinterpret(dtype) end

--- Itself when compact and row-major, otherwise a compact copy.
---@return nibble.tensor
function tensor:contiguous() end

--- A compact copy.
---@return nibble.tensor
function tensor:clone() end

--- Copies `source` into this tensor, any strides, any dtypes, between devices; `source` may be expandable to this
--- shape. To floats: round to nearest even (overflow to infinity for float16 and bfloat16; float8_e4m3fn saturates).
--- Float to integer: truncate, saturate, NaN gives 0. Integer to a smaller integer: saturate. A NaN becomes 0x7FFFFFFF,
--- 0x7FFF, 0x7F. The same dtype keeps every bit. A tensor whose elements overlap in memory cannot be written. It is
--- work of this tensor's device's current stream. Between devices: - a GPU and a contiguous pinned tensor: work of the
--- GPU's current stream, which the call does not wait for; capturable (nodes
---   "copy to device", "copy to host"). It waits for CPU work on the pinned tensor that is queued already (so does a
---   replay).
---   Reading the pinned tensor waits for the copy, but other CPU work on it must be told to:
---   `cpu_stream:wait(gpu_stream:record())`.
--- - two GPUs: work of both current streams, after everything that writes the source; not inside a capture.
--- - any other two: waits for what writes the source; not inside a capture.
---@param source nibble.tensor
---@return nibble.tensor self
function tensor:copy(source) end

--- Every element becomes `value`.
---@param value number
---@return nibble.tensor self
function tensor:fill(value) end

--- A copy on another device or in another dtype; itself when nothing would change.
---@param device_or_dtype string
---@return nibble.tensor
function tensor:to(device_or_dtype) end

--- Nested tables of numbers (integers for integer dtypes); a number for a tensor without dimensions.
---@return table|number
function tensor:totable() end

--- The only element, as a number.
---@return number
function tensor:item() end

--- The elements row-major as a string of little-endian bytes.
---@return string
function tensor:bytes() end

--- Writes a `.npy` file (version 1.0; bfloat16 as '<u2', float8_e4m3fn as '|u1'). `nil, message` if the file cannot be
--- written.
---@param path string
---@return boolean?
---@return string? message
function tensor:save(path) end

--- Same shape, same dtype and the same bits in every element (a NaN equals itself, 0.0 differs from -0.0).
---@param other nibble.tensor
---@return boolean
function tensor:equal(other) end

--- |a - b| <= atol + rtol * |b| for every element, in float64. Same shape required; dtypes may differ.
---@param other nibble.tensor
---@param opts? {rtol?: number, atol?: number, equal_nan?: boolean}  1e-5, 1e-8, false
---@return boolean
function tensor:allclose(other, opts) end

--- The largest |a - b| in float64 (NaN if any difference is NaN) and where it is first found (nil when empty). Equal
--- infinities differ by 0.
---@param other nibble.tensor
---@return number error
---@return integer[]? index
function tensor:max_error(other) end

--- The largest |x| over the elements that are not NaN; 0 for none. (The quantizers' "amax".)
---@return number
function tensor:amax() end

--- Releases the storage (when no other view, graph or queued work needs it). Twice is fine.
function tensor:close() end

------------------------------------------------------------------------------------------------ streams, events, graphs

--- Work of one stream runs in order and asynchronously; work of different streams is ordered by events alone.
---@class nibble.stream
---@field device string
---@field handle? integer  the CUstream, for work of the host's own in it; nil on the CPU
local stream = {}

--- A new stream. `handle`: one around a CUstream of the host's (of the context that the device uses, no default
--- stream), which must stay until the stream is closed and is never destroyed by it; an error on the CPU.
---@param opts? {device?: string, priority?: integer, handle?: integer}  priority: -1 is high, 0 normal (a hint; without effect on the CPU)
---@return nibble.stream
function nibble.stream(opts) end

--- The stream that operations on a device use now: the innermost `scope`, else the device's default stream.
---@param device? string
---@return nibble.stream
function nibble.current_stream(device) end

--- Calls `fn(...)` with this stream current and returns its results; the former stream is current again afterwards,
--- also after an error. Yielding across it is an error.
---@param fn fun(...): ...
---@param ... any
---@return any ...
function stream:scope(fn, ...) end

--- Waits for all work of the stream. Raises its error, or a content fault of the device, once.
function stream:synchronize() end

--- An event after the work queued so far.
---@return nibble.event
function stream:record() end

--- Later work of this stream waits for the event, of any stream. Where one of the two is the CPU's and the other a
--- GPU's, the call itself waits (and raises as event:synchronize does).
---@param event nibble.event
function stream:wait(event) end

--- Records what `fn()` does on this stream, instead of doing it, as a graph. Other streams join by waiting for an event
--- that was recorded inside, and must be joined back the same way. The stream is current in `fn`. The capture always
--- ends, also when `fn` raises (the error goes on). Refused inside, with the capture intact: reading or printing
--- values, waits, creating tensors from host data, numbers as scales, work on a stream of the device that has not
--- joined, another capture, a replay. The graph keeps every tensor alive that it uses.
---@param fn fun()
---@param opts? {mode?: "thread_local"|"global"|"relaxed"}  default "thread_local"; one meaning on the CPU
---@return nibble.graph
function stream:capture(fn, opts) end

--- Releases the stream when its work is done, without waiting. A default stream cannot be closed.
function stream:close() end

---@class nibble.event
---@field device string
local event = {}

--- Whether the work before it is done. When it is, it raises what a wait would raise.
---@return boolean
function event:query() end

--- Waits for the work before it. Raises as stream:synchronize does.
function event:synchronize() end

--- Milliseconds from this event to a later one (waits for both).
---@param later nibble.event
---@return number milliseconds
function event:elapsed(later) end

function event:close() end

---@class nibble.graph
---@field device string
local graph = {}

---@class nibble.graph_node
---@field id integer       from 1, in the order of recording
---@field name string      kernel name ("append", "dequantize", "copy", ...)
---@field deps integer[]   ids of the nodes it waits for, ascending

--- Runs the graph once, as work of the current stream. Waits for CPU work on pinned tensors that it copies.
function graph:replay() end

--- Captures `fn` anew on the graph's stream and puts the result in place of the old one, for replays from now on. true:
--- same nodes and dependencies, updated in place; false: built anew. After an error in `fn` the graph is as before.
---@param fn fun()
---@return boolean in_place
function graph:update(fn) end

---@return nibble.graph_node[]
function graph:nodes() end

--- The graph in Graphviz's language. `driver`: as the GPU's driver draws it, with all that it tells about each node
--- (the same as without on the CPU).
---@param opts? {driver?: boolean}
---@return string
function graph:dot(opts) end

function graph:close() end

---------------------------------------------------------------------------------------------------- kernels of your own

--- Compiles CUDA C++ for a GPU with NVRTC, and gives the kernel `name` of it, or without a name the module. nibble's
--- headers can be included ("nvfp4.h" has the number formats, "paged.h" the addresses in a cache, "convert.h" all
--- dtypes). Floating-point contraction is off unless the options turn it on. An error has the compiler's log; `nil,
--- reason` where the device runs no kernels of yours or NVRTC is not on the machine.
---@param source string
---@param opts? {name?: string, options?: string[], device?: string}
---@return nibble.kernel|nibble.module|nil
---@return string? reason
function nibble.compile(source, opts) end

--- Loads PTX, a cubin or a fatbin. `nil, reason` on a device that runs no kernels of yours.
---@param bytes string
---@param opts? {device?: string}
---@return nibble.module?
---@return string? reason
function nibble.module(bytes, opts) end

---@class nibble.module
---@field device string
local module = {}

--- The kernel of that name (extern "C", or mangled).
---@param name string
---@return nibble.kernel
function module:kernel(name) end

--- Releases the handle; kernels, graphs and queued launches keep the code.
function module:close() end

---@class nibble.kernel
---@field device string
local kernel = {}

--- Queues the kernel in the current stream (or `stream`), or records it while the stream captures. grid and block: an
--- integer or up to three. Arguments: a tensor passes its first element's address; an integer goes to a parameter of 1,
--- 4 or 8 bytes, a float to one of 4 or 8; `{dtype, number}` for any other type. Counts and sizes are checked where the
--- driver knows them.
---@param grid integer|integer[]
---@param block integer|integer[]
---@param args (nibble.tensor|number|boolean|table)[]
---@param opts? {shared?: integer, stream?: nibble.stream}  shared: bytes of dynamic shared memory, 0
function kernel:launch(grid, block, args, opts) end

---@class nibble.kernel_attributes
---@field name string
---@field max_threads integer  in a block
---@field registers integer    of a thread
---@field shared_bytes integer
---@field constant_bytes integer
---@field local_bytes integer
---@field max_dynamic_shared_bytes integer
---@field ptx_version integer      90 is 9.0
---@field binary_version integer
---@field param_bytes? integer[]   sizes of the parameters, where the driver knows them

---@return nibble.kernel_attributes
function kernel:attributes() end

function kernel:close() end

------------------------------------------------------------------------------------------------------------- operations

---@alias nibble.cache nibble.tensor|nibble.tensor[]  a pair {k, v}, or one 5-D tensor with K and V in its second dimension
---@alias nibble.scale number|nibble.tensor           a positive finite number, or a float32 tensor of one element on the device

nibble.page = {}

--- Quantizes K/V rows to NVFP4 and writes each to its slot. Row i goes to page slot // page_size, entry slot %
--- page_size; slots < 0 or >= num_pages*page_size are skipped, without a fault. A scale tensor that is not positive and
--- finite: nothing is written, and a content fault. Scales are written linear.
---@param append_key nibble.tensor    [rows, heads, head_dim] float16 or bfloat16, last dimension contiguous
---@param append_value nibble.tensor  same shape and dtype
---@param slot_mapping nibble.tensor  [nnz] int32 or int64, nnz <= rows
---@param paged_kv_cache nibble.cache uint8 NHD [num_pages, page_size, heads, head_dim/2] or HND [num_pages, heads, page_size, head_dim/2]
---@param kv_cache_sf nibble.cache    float8_e4m3fn or uint8, the same with head_dim/16
---@param k_scale nibble.scale        global decode scale; inside a capture it must be a tensor
---@param v_scale nibble.scale
---@param kv_layout? nibble.layout|{kv_layout?: nibble.layout}  default "NHD"
function nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(append_key, append_value, slot_mapping,
  paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout) end

nibble.quantization = {}

--- Turns the pages that requests reach into an E4M3 cache: element = E4M3(E2M1 value * block scale). Other pages but
--- page 0 are not written: unspecified without `out`. A page index outside the cache gives zeros, a length beyond
--- max_kv_len is cut, of a bad range in kv_page_indptr the pages that fit are written; each with a content fault.
---@param k_cache nibble.tensor         uint8 HND [num_pages, heads, page_size, head_dim/2], head_dim % 64 == 0, page_size % 4 == 0
---@param v_cache nibble.tensor         same shape
---@param k_block_scales nibble.tensor  uint8 or float8_e4m3fn [num_pages, heads, page_size, head_dim/16], linear
---@param v_block_scales nibble.tensor  the same, 4-token-interleaved (see swizzle_v_scales)
---@param block_tables nibble.tensor    int32 [batch, >= ceil(max_kv_len/page_size)], or [batch, 2, ...] when not shared
---@param seq_lens nibble.tensor        int32 [batch]
---@param max_kv_len integer            >= 0
---@param opts? {uses_shared_paged_kv_idx?: boolean, out?: nibble.tensor, kv_page_indptr?: nibble.tensor, num_pages?: integer}  true; contiguous float8_e4m3fn; int32 [batch+1], needs num_pages
---@return nibble.tensor kv_cache_fp8      [num_pages+1, 2, heads, page_size, head_dim], page 0 zero
---@return nibble.tensor fp8_block_tables  int32 [batch, ceil(max_kv_len/page_size)]
function nibble.quantization.nvfp4_kv_materialize_fp8(k_cache, v_cache, k_block_scales, v_block_scales, block_tables,
  seq_lens, max_kv_len, opts) end

--- Gathers and dequantizes requests: out = (E2M1 value * block scale) * global scale. Tokens at or past seq_lens[b],
--- and those whose page index is outside the cache, are left unchanged, without a fault. K and V may differ in
--- head_dim.
---@param paged_kv_cache nibble.cache   uint8, as in the append
---@param kv_cache_sf nibble.cache      linear scales
---@param block_tables nibble.tensor    int32 or int64 [batch, >= ceil(max_seq_len/page_size)]
---@param seq_lens nibble.tensor        int32 [batch]
---@param k_scale nibble.tensor         float32, one element
---@param v_scale nibble.tensor
---@param output_k nibble.tensor        contiguous float16 or bfloat16 [batch, max_seq_len, heads, head_dim]
---@param output_v nibble.tensor        the same dtype
---@param kv_layout? nibble.layout|{kv_layout?: nibble.layout}  default "NHD"
function nibble.quantization.nvfp4_kv_dequantize_paged(paged_kv_cache, kv_cache_sf, block_tables, seq_lens, k_scale,
  v_scale, output_k, output_v, kv_layout) end

--- V's block scales from linear to 4-token-interleaved order (what nvfp4_kv_materialize_fp8 reads), or back. Strided
--- and paged tensors allowed.
---@param v_sf nibble.tensor         float8_e4m3fn or uint8, NHD [pages, page_size, heads, S] or HND [pages, heads, page_size, S]; page_size % 4 == 0, S % 4 == 0
---@param kv_layout nibble.layout
---@param opts? {inverse?: boolean, out?: nibble.tensor}  out: same shape and dtype, not overlapping v_sf
---@return nibble.tensor out
function nibble.quantization.swizzle_v_scales(v_sf, kv_layout, opts) end

--- Quantizes whole caches. Per tensor: global_sf as given, or 448 / max(amax, 1e-12); g = 1 / global_sf; V scales
--- interleaved. A given global_sf that is not positive and finite or whose reciprocal is not, or an infinite element
--- where none is given: zeros, and a content fault.
---@param k_cache nibble.tensor  float16 or bfloat16 HND [num_pages, heads, page_size, head_dim] or NHD; head_dim % 64 == 0, page_size % 4 == 0
---@param v_cache nibble.tensor  same shape and dtype
---@param kv_layout? nibble.layout|{kv_layout?: nibble.layout, k_global_sf?: nibble.scale, v_global_sf?: nibble.scale}  default "HND"
---@param k_global_sf? nibble.scale
---@param v_global_sf? nibble.scale
---@return nibble.tensor[] kv_cache  {k, v} uint8
---@return nibble.tensor[] kv_sf     {k_sf, v_sf} float8_e4m3fn
---@return nibble.tensor k_scale     float32 [1]: g of K
---@return nibble.tensor v_scale
function nibble.quantization.nvfp4_quantize_paged_kv_cache(k_cache, v_cache, kv_layout, k_global_sf, v_global_sf) end

nibble.mla = {}

--- Rotates q, then rotates, quantizes and inserts kv into a DeepSeek-V4 NVFP4 cache. Rows without a slot, or with one
--- outside the cache, are not inserted, without a fault. A used position outside the table: its row is not inserted,
--- the 64 RoPE dimensions of its q heads are zeros, and a content fault.
---@param q nibble.tensor              contiguous bfloat16 [tokens, heads, 512]
---@param kv nibble.tensor             contiguous bfloat16 [tokens, 512]
---@param cache nibble.tensor          uint8 [num_pages, page_size, 384], [num_pages, 1, page_size, 384] or [num_pages, page_size, 1, 384]; page stride a multiple of 16, compact inside a page
---@param slot_mapping nibble.tensor   contiguous int32 or int64 [<= tokens]
---@param positions nibble.tensor      contiguous int64 [tokens]
---@param cos_sin_cache nibble.tensor  contiguous float32 [max_position, 64]
---@param opts? {q_head_padded?: integer, apply_q_rope?: boolean, q_inplace?: boolean}  0 (or 8, 16, 32, 64, 128), true, false
---@return nibble.tensor q_out         bfloat16 [tokens, q_head_padded, 512], or q itself when in place
function nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, cache, slot_mapping, positions, cos_sin_cache, opts) end

--- The cache-only sibling: with compress_ratio 2 only every second position is inserted, rotated as its pair's first.
---@param kv nibble.tensor
---@param cache nibble.tensor
---@param slot_mapping nibble.tensor
---@param positions nibble.tensor
---@param cos_sin_cache nibble.tensor
---@param opts? {compress_ratio?: integer}  1 or 2
function nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, slot_mapping, positions, cos_sin_cache, opts) end

--- The bfloat16 rows that records stand for. A bad slot gives a zero row and a content fault.
---@param cache nibble.tensor  as above
---@param slots nibble.tensor  int32 or int64 [n]
---@return nibble.tensor rows  bfloat16 [n, 512]
function nibble.mla.dequantize_cache(cache, slots) end

-------------------------------------------------------------------------------------------------------------- observing

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
--- innermost ends. storage_cut: work that was to write `storage` was dropped (by a host, nib_drop_work).
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
---| "race"|"unwritten"|"duplicate slot"|"owned twice"|"freed page"|"reserved page"|"shared page"|"foreign entry"
---| "foreign row"|"beyond length"|"missing page"|"wrong scales"|"closed"|"unjoined"

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
