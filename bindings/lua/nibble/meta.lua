---@meta nibble
-- The reference of the Lua module `nibble`, for people and for the Lua language server. Nothing here runs.
--
-- Conventions. Dimensions and indices count from 1. *Data* that kernels read (slots, page indices, positions, lengths)
-- counts from 0. Options are a table after the other arguments; an unknown option is an error. A shape is a list of
-- integers or one table: `t:view(2, 3)` and `t:view({2, 3})` are the same. 3.0 counts as an integer; 3.5, "3", NaN and
-- 1e300 do not. Tables are read raw, so one with `__index` or `__len` is an error. Any use of a closed object is an
-- error. A bad argument raises a string `operation: parameter: expected X, got Y`; the operation is the function's name
-- below without `nibble.` ("zeros", "tensor:narrow", "stream:capture",
-- "page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"). Where a program can go on (no GPU, no such file), the
-- function returns `nil, message`.

---@alias nibble.dtype "float32"|"float16"|"bfloat16"|"float8_e4m3fn"|"uint8"|"int8"|"uint16"|"int32"|"int64"
---@alias nibble.layout "NHD"|"HND"
---@alias nibble.shape integer|integer[]

---@class nibble.options
---@field dtype? nibble.dtype  element type
---@field device? string       "cpu", "cuda:0", ...; default: nibble.device()
---@field pinned? boolean      in CPU memory that GPUs copy from and to directly (see tensor.pinned); `device` must be "cpu" or nil

---@class nibble.random_options: nibble.options
---@field seed? integer        any integer; default: a counter that starts at 0 and each call without a seed increments

---@class nibble
---@field version string       "MAJOR.MINOR.PATCH"
local nibble = {}

---------------------------------------------------------------------------------------------------------------- devices

---@class nibble.device_info
---@field name string          "cpu", "cuda:0"
---@field description string   the processor's or GPU's name
---@field available boolean
---@field reason? string       why it is not available
---@field memory? integer      bytes of memory
---@field processors? integer  threads (cpu) or multiprocessors

--- All devices of this process, available or not. The first is always "cpu".
---@return nibble.device_info[]
function nibble.devices() end

--- The name of a device; without an argument, of the default device: NIBBLE_DEVICE if that environment variable is set,
--- otherwise an available GPU, otherwise the CPU. `nil, reason` if the device is not available.
---@param name? string
---@return string? device
---@return string? reason
function nibble.device(name) end

--- Whether a device can be used and, if not, why.
---@param name string
---@return boolean available
---@return string? reason
function nibble.available(name) end

---@class nibble.memory_info
---@field used integer      bytes of live tensor storage
---@field reserved integer  bytes allocated: `used` and released storage that queued work still uses
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

--- Calls `fn(...)` inside a named range and returns its results. Traces record the range; profilers show it (NVTX) if
--- libnvToolsExt is installed. Yielding across it is an error.
---@param name string
---@param fn fun(...): ...
---@param ... any
---@return any ...
function nibble.range(name, fn, ...) end

--------------------------------------------------------------------------------------------------------------- creation

--- A tensor from a number or a nested table: `nibble.tensor({{1, 2}, {3, 4}})`. Default dtype: int64 if every number is
--- a Lua integer, else float32. Ragged tables, values that are not numbers, and numbers that an integer dtype cannot
--- hold are errors. Floats are rounded to nearest even.
---@param data number|table
---@param opts? nibble.options
---@return nibble.tensor
function nibble.tensor(data, opts) end

--- A tensor with unspecified contents.
---@param ... nibble.shape|nibble.options
---@return nibble.tensor
function nibble.empty(...) end

---@param ... nibble.shape|nibble.options
---@return nibble.tensor
function nibble.zeros(...) end

--- A tensor whose elements are all `value`: `nibble.full({2, 3}, 1.5, {dtype = "bfloat16"})`. Default dtype: int64 if
--- `value` is a Lua integer, else float32. A value that an integer dtype cannot hold is an error.
---@param shape integer[]|integer
---@param value number
---@param opts? nibble.options
---@return nibble.tensor
function nibble.full(shape, value, opts) end

--- 0, 1, ... stop-1, or start, start+step, ... up to but excluding `stop`. Default dtype: int64 if all arguments are
--- integers, else float32. Element i is start + i*step, computed in float64 (integers: in int64) and rounded once.
---@overload fun(stop: number, opts?: nibble.options): nibble.tensor
---@overload fun(start: number, stop: number, opts?: nibble.options): nibble.tensor
---@param start number
---@param stop number
---@param step number  not 0
---@param opts? nibble.options
---@return nibble.tensor
function nibble.arange(start, stop, step, opts) end

--- Standard normal values in a float dtype (default float32). The same seed and shape give the same bits on every
--- device.
---@param ... nibble.shape|nibble.random_options
---@return nibble.tensor
function nibble.randn(...) end

--- Random integers low <= x < high. Default dtype: int64. An integer dtype must be able to hold low and high-1.
---@param low integer
---@param high integer  greater than low
---@param shape integer[]|integer
---@param opts? nibble.random_options
---@return nibble.tensor
function nibble.randint(low, high, shape, opts) end

--- A random permutation of 0..n-1, as int64 (the default) or int32.
---@param n integer
---@param opts? nibble.random_options
---@return nibble.tensor
function nibble.randperm(n, opts) end

--- A tensor from little-endian bytes in row-major order. The option dtype is required, and the string must be as long
--- as the tensor.
---@param bytes string
---@param shape integer[]|integer
---@param opts nibble.options
---@return nibble.tensor
function nibble.from_bytes(bytes, shape, opts) end

--- Reads a NumPy `.npy` file: versions 1 to 3, little endian, C or Fortran order, element types f4 f2 f8 u1 i1 u2 i4 i8
--- and bool. f8 is rounded to float32, bool becomes uint8. With the option `dtype`, the bits are read as that type,
--- which must have the same size: "uint16" data as "bfloat16", "uint8" as "float8_e4m3fn". The types i2 u4 u8 c8 and
--- V1 V2 V4 V8 need it (ml_dtypes writes bfloat16 as V2 and float8_e4m3fn as V1). Returns `nil, message` if the file
--- cannot be opened; a damaged file raises an error.
---
--- If the path ends in `.safetensors`, or with the option `name`, it reads one tensor of a safetensors file and no
--- other bytes of it. Without a name the file must have one tensor; otherwise the error lists the names. F32 F16 BF16
--- F8_E4M3 U8 I8 U16 I32 I64 keep their type, BOOL becomes uint8, F64 is rounded to float32. Other types (I16, U32,
--- F8_E5M2, ...) need the option `dtype` with a type of the same size; F4 needs "uint8", with two codes in a byte and
--- half the last dimension.
---@param path string
---@param opts? nibble.load_options
---@return nibble.tensor?
---@return string? message
function nibble.load(path, opts) end

---@class nibble.load_options: nibble.options
---@field name? string  of a tensor in a safetensors file

---@class nibble.file_entry
---@field name string
---@field stored string        the element type in the file: "F32", "BF16", "F8_E4M3", ...
---@field dtype? nibble.dtype  the dtype that `load` gives it; nil: `load` needs the option dtype
---@field shape integer[]
---@field offset integer       of the first byte, in the file
---@field bytes integer

--- The tensors of a safetensors file, in the order of their bytes. Returns `nil, message` if the file cannot be opened;
--- a damaged file raises an error.
---@param path string
---@return nibble.file_entry[]?
---@return string? message
function nibble.list(path) end

--- Writes tensors to a safetensors file, ordered by element size (largest first), then by name. Waits for their values.
--- Returns `nil, message` if the file cannot be written.
---@param path string
---@param tensors table<string, nibble.tensor>  names in UTF-8
---@return boolean?
---@return string? message
function nibble.save(path, tensors) end

--- Creates a text or binary file that replaces PATH when it is closed; `save` and `tensor:save` work the same way.
--- Until then its bytes are in the file PATH.RANDOM.part, and a failed write leaves an old file at PATH unchanged.
--- Pipes and devices are written directly.
---@param path string
---@return nibble.writer?
---@return string? message
function nibble.create(path) end

---@class nibble.writer
local writer = {}

--- Appends strings. They are written at once, so that after a crash they are in the .part file.
---@param ... string
---@return nibble.writer?
---@return string? message
function writer:write(...) end

--- Moves the file to its path. Returns `nil, message` if this or an earlier write failed; an old file is then
--- unchanged. If an error leaves the block of `local w <close>`, the file is dropped. A writer that is never closed
--- moves its file when it is collected, at the latest at the end of the program.
---@return boolean?
---@return string? message
function writer:close() end

--- The table `[max_position, 64]` of cosines and sines for the operations of DeepSeek-V4: column p (0..31) holds
--- cos(position * theta^(-2p/64)), column 32+p the sine; both are computed in float64 and rounded once. Asynchronous
--- and capturable.
---@param max_position integer
---@param opts? {theta?: number, dtype?: nibble.dtype, device?: string}  theta 1e4, dtype "float32" ("float16", "bfloat16")
---@return nibble.tensor
function nibble.rope_table(max_position, opts) end

----------------------------------------------------------------------------------------------------------------- tensor

--- A view (shape, strides, dtype) of a reference-counted storage on one device. `#t` is the size of the first
--- dimension. `t[i]` is a number for a 1-D tensor, else a view of row i; `t[{i, j, ...}]` is a number if there is an
--- index for each dimension, else a view. `t[i] = v` and `t[{...}] = v` write a number or copy a tensor, asynchronously
--- in the current stream. `a == b` means the same view of the same storage. `tostring(t)` shows values (a part of them
--- if there are many), shape, dtype and device. `t:close()` or `local t <close>` releases the storage early; later
--- calls on it are errors. Reading values waits for the work that writes them, and is an error during a capture.
---@class nibble.tensor
---@field shape integer[]   a new table at each read
---@field dtype nibble.dtype
---@field device string
---@field pinned boolean    whether the memory is pinned; false without a GPU, also for a tensor created with `pinned`
local tensor = {}

--- The strides in elements; with `dim`, the stride of that dimension.
---@param dim? integer
---@return integer[]|integer
function tensor:stride(dim) end
---@return integer
function tensor:dim() end
---@return integer
function tensor:numel() end
--- The number of the tensor's storage, and the offset of the first element in it. All views of a storage have the same
--- number; it is never used again.
---@return integer storage
---@return integer offset  in bytes
function tensor:storage() end
---@return boolean
function tensor:is_contiguous() end

--- A view of the indices `start` .. `start+length-1` of dimension `dim`.
---@param dim integer
---@param start integer
---@param length integer  0 is allowed
---@return nibble.tensor
function tensor:narrow(dim, start, length) end

--- A view of index `index` of dimension `dim`, with one dimension less.
---@param dim integer
---@param index integer
---@return nibble.tensor
function tensor:select(dim, index) end

--- A view with another shape; one size may be -1. An error if the strides do not allow it.
---@param ... nibble.shape
---@return nibble.tensor
function tensor:view(...) end

--- A view with its dimensions in another order; each must be named once.
---@param ... nibble.shape
---@return nibble.tensor
function tensor:permute(...) end

---@param dim1 integer
---@param dim2 integer
---@return nibble.tensor
function tensor:transpose(dim1, dim2) end

--- A view that repeats dimensions of size 1 (with stride 0) or adds leading dimensions; -1 keeps a size.
---@param ... nibble.shape
---@return nibble.tensor
function tensor:expand(...) end

--- A view of this tensor's storage with any sizes and strides (>= 0). `offset` counts elements from this tensor's first
--- element and may be negative. The view must lie inside the storage.
---@param size integer[]
---@param stride integer[]
---@param offset? integer  default 0
---@return nibble.tensor
function tensor:as_strided(size, stride, offset) end

--- A view of the same bytes as another dtype. If the element size differs, the size of the last dimension changes with
--- it: that dimension must be contiguous, and larger elements must divide it, the strides and the offset.
---@param dtype nibble.dtype
---@return nibble.tensor
function tensor:reinterpret(dtype) end

--- The tensor itself if it is contiguous (row-major without gaps), otherwise a contiguous copy.
---@return nibble.tensor
function tensor:contiguous() end

--- A contiguous copy.
---@return nibble.tensor
function tensor:clone() end

--- Copies `source` into this tensor, for any strides, dtypes and devices; `source` must be expandable to this shape.
--- Conversion to floats rounds to nearest even; too large values become infinity in float16 and bfloat16, and the
--- largest value in float8_e4m3fn. Conversion to integers truncates and saturates; NaN gives 0. NaN in a float dtype
--- becomes 0x7FFFFFFF, 0x7FFF or 0x7F. A copy to the same dtype keeps every bit. A tensor whose elements overlap in
--- memory cannot be written.
---
--- On one device, the copy is work of its current stream. Between devices:
--- - A GPU and a contiguous pinned tensor: work of the GPU's current stream, and capturable (nodes "copy to device" and
---   "copy to host"). The call, and a replay, waits for CPU work on the pinned tensor that is already queued, but not
---   for the copy. Reading the pinned tensor waits for the copy; make other CPU work on it wait with
---   `cpu_stream:wait(gpu_stream:record())`.
--- - Two GPUs: work of both current streams, after all work that writes the source. Not capturable.
--- - Any others: the call waits for the work that writes the source. Not capturable.
---@param source nibble.tensor
---@return nibble.tensor self
function tensor:copy(source) end

--- Sets every element to `value`.
---@param value number
---@return nibble.tensor self
function tensor:fill(value) end

--- A copy on another device or in another dtype; the tensor itself if it has that device or dtype.
---@param device_or_dtype string
---@return nibble.tensor
function tensor:to(device_or_dtype) end

--- The elements as nested tables of numbers; a number for a tensor without dimensions. Integer dtypes give Lua
--- integers.
---@return table|number
function tensor:totable() end

--- The element of a tensor of one element, as a number.
---@return number
function tensor:item() end

--- The elements as a string of little-endian bytes in row-major order.
---@return string
function tensor:bytes() end

--- Writes a `.npy` file (version 1.0; bfloat16 as '<u2', float8_e4m3fn as '|u1'). Returns `nil, message` if the file
--- cannot be written.
---@param path string
---@return boolean?
---@return string? message
function tensor:save(path) end

--- Whether shape, dtype and all bits are the same. So a NaN equals itself, and 0.0 differs from -0.0.
---@param other nibble.tensor
---@return boolean
function tensor:equal(other) end

--- Whether |a - b| <= atol + rtol * |b| holds for every element, computed in float64. The shapes must be the same, the
--- dtypes may differ.
---@param other nibble.tensor
---@param opts? {rtol?: number, atol?: number, equal_nan?: boolean}  1e-5, 1e-8, false
---@return boolean
function tensor:allclose(other, opts) end

--- The largest |a - b|, computed in float64, and the index where it occurs first (nil for an empty tensor). NaN if any
--- difference is NaN; equal infinities differ by 0.
---@param other nibble.tensor
---@return number error
---@return integer[]? index
function tensor:max_error(other) end

--- The largest |x| of the elements that are not NaN, as quantizers need it; 0 if there are none.
---@return number
function tensor:amax() end

--- Releases this view. The storage is freed when no other view, graph or queued work uses it. Closing twice is allowed.
function tensor:close() end

------------------------------------------------------------------------------------------------ streams, events, graphs

--- The work of a stream runs in order and asynchronously. Work of different streams is ordered by events only.
---@class nibble.stream
---@field device string
---@field handle? integer  the CUstream, for a host that queues its own work there; nil on the CPU
local stream = {}

--- A new stream. With `handle`, the stream wraps that CUstream of the host: it must belong to the context that the
--- device uses, must not be a default stream, and must live until the wrapper is closed, which does not destroy it. An
--- error on the CPU.
---@param opts? {device?: string, priority?: integer, handle?: integer}  priority: -1 is high, 0 normal (a hint; without effect on the CPU)
---@return nibble.stream
function nibble.stream(opts) end

--- The stream that operations on a device use now: that of the innermost `scope`, else the device's default stream.
---@param device? string
---@return nibble.stream
function nibble.current_stream(device) end

--- Calls `fn(...)` with this stream as the current stream and returns its results. Afterwards, also after an error, the
--- previous stream is current again. Yielding across it is an error.
---@param fn fun(...): ...
---@param ... any
---@return any ...
function stream:scope(fn, ...) end

--- Waits for all work of the stream. Raises its error, or a content fault of the device, once.
function stream:synchronize() end

--- An event that occurs after the work queued so far.
---@return nibble.event
function stream:record() end

--- Makes later work of this stream wait for an event of any stream. Between the CPU and a GPU, the call itself waits,
--- and raises the same errors as event:synchronize.
---@param event nibble.event
function stream:wait(event) end

--- Records the work that `fn()` queues on this stream as a graph, without executing it. The stream is current in `fn`.
--- Another stream joins the capture by waiting for an event that was recorded in it, and must be joined back the same
--- way. If `fn` raises an error, the capture ends and the error is raised again. These raise an error during a capture,
--- which then goes on: reading or printing values, waits, tensors from host data, numbers as scales, work on a stream
--- of the device that has not joined, another capture, a replay. The graph keeps all tensors alive that it uses.
---@param fn fun()
---@param opts? {mode?: "thread_local"|"global"|"relaxed"}  as in CUDA; default "thread_local"; no effect on the CPU
---@return nibble.graph
function stream:capture(fn, opts) end

--- Releases the stream, without waiting for its work. A default stream cannot be closed.
function stream:close() end

---@class nibble.event
---@field device string
local event = {}

--- Whether the work before the event is done. If it is, raises the errors that a wait would raise.
---@return boolean
function event:query() end

--- Waits for the work before the event. Raises the same errors as stream:synchronize.
function event:synchronize() end

--- The milliseconds from this event to a later one. Waits for both.
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

--- Queues the graph in the current stream. Waits for CPU work on pinned tensors that the graph copies.
function graph:replay() end

--- Captures `fn` on the graph's stream, or on the current one if that is closed; later replays run the new work.
--- Returns true if nodes and dependencies are the same, so that the graph was updated in place, and false if it was
--- built again. After an error the graph is unchanged.
---@param fn fun()
---@return boolean in_place
function graph:update(fn) end

---@return nibble.graph_node[]
function graph:nodes() end

--- The graph in Graphviz's language. With `driver`, the text of the CUDA driver with its details of each node; no
--- effect on the CPU.
---@param opts? {driver?: boolean}
---@return string
function graph:dot(opts) end

function graph:close() end

----------------------------------------------------------------------------------------------------------- user kernels

--- Compiles CUDA C++ with NVRTC and returns the kernel `name`, or the module if no name is given. The source can
--- include nibble's headers: "nvfp4.h" has the number formats, "paged.h" the addresses in a cache, "convert.h" all
--- dtypes. Floating-point contraction is off unless the options turn it on. A compile error raises the compiler's log.
--- Returns `nil, reason` if the device has no user kernels or NVRTC is not installed.
---@param source string
---@param opts? {name?: string, options?: string[], device?: string}
---@return nibble.kernel|nibble.module|nil
---@return string? reason
function nibble.compile(source, opts) end

--- Loads PTX, a cubin or a fatbin. Returns `nil, reason` if the device has no user kernels.
---@param bytes string
---@param opts? {device?: string}
---@return nibble.module?
---@return string? reason
function nibble.module(bytes, opts) end

---@class nibble.module
---@field device string
local module = {}

--- The kernel of that name. Names that are not extern "C" are mangled.
---@param name string
---@return nibble.kernel
function module:kernel(name) end

--- Releases the handle. The code stays loaded while kernels, graphs or queued launches use it.
function module:close() end

---@class nibble.kernel
---@field device string
local kernel = {}

--- Queues the kernel in the current stream (or in `stream`), or records it if that stream captures. `grid` and `block`
--- are an integer or a list of up to three. An argument is a tensor, which passes the address of its first element; an
--- integer, for a parameter of 1, 4 or 8 bytes; a float, for one of 4 or 8 bytes; or `{dtype, number}` for any other
--- type. Number and sizes of the arguments are checked if the driver knows them.
---@param grid integer|integer[]
---@param block integer|integer[]
---@param args (nibble.tensor|number|boolean|table)[]
---@param opts? {shared?: integer, stream?: nibble.stream}  shared: bytes of dynamic shared memory, 0
function kernel:launch(grid, block, args, opts) end

---@class nibble.kernel_attributes
---@field name string
---@field max_threads integer  of a block
---@field registers integer    of a thread
---@field shared_bytes integer
---@field constant_bytes integer
---@field local_bytes integer
---@field max_dynamic_shared_bytes integer
---@field ptx_version integer      90 is 9.0
---@field binary_version integer
---@field param_bytes? integer[]   sizes of the parameters, if the driver knows them

---@return nibble.kernel_attributes
function kernel:attributes() end

function kernel:close() end

------------------------------------------------------------------------------------------------------------- operations

---@alias nibble.cache nibble.tensor|nibble.tensor[]  a pair {k, v}, or one 5-D tensor with K and V in its second dimension
---@alias nibble.scale number|nibble.tensor           a positive finite number, or a float32 tensor of one element on the device

--- 4over6 tries two scales for each block: one maps the largest element to 6, the other to 4. It chooses 4 if the sum of
--- squared errors is smaller than with 6. `true` is the same as {err_mode = "MSE"}, the only mode.
---@alias nibble.four_over_six boolean|{err_mode: "MSE"}

nibble.page = {}

--- Quantizes rows of K and V to NVFP4 and writes each to its slot: page slot // page_size, entry slot % page_size. Rows
--- with a slot < 0 or >= num_pages*page_size are skipped; that is no fault. If a scale tensor is not positive and
--- finite, nothing is written, and it is a content fault. Block scales are written in linear order.
---@param append_key nibble.tensor    [rows, heads, head_dim] float16 or bfloat16, last dimension contiguous
---@param append_value nibble.tensor  the same dtype, heads and head_dim; its rows may be others
---@param slot_mapping nibble.tensor  [nnz] int32 or int64, nnz <= the rows of each
---@param paged_kv_cache nibble.cache uint8 NHD [num_pages, page_size, heads, head_dim/2] or HND [num_pages, heads, page_size, head_dim/2]
---@param kv_cache_sf nibble.cache    float8_e4m3fn or uint8, the same with head_dim/16
---@param k_scale nibble.scale        global decode scale; inside a capture it must be a tensor
---@param v_scale nibble.scale
---@param kv_layout? nibble.layout|{kv_layout?: nibble.layout, nvfp4_4over6?: nibble.four_over_six}  default "NHD"
---@param nvfp4_4over6? boolean       default false; a table goes into the options
function nibble.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(append_key, append_value, slot_mapping,
  paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout, nvfp4_4over6) end

nibble.quantization = {}

--- Converts the pages that requests use to a cache of E4M3: element = E4M3(E2M1 value * block scale). Page 0 is zeroed;
--- other pages are not written, so that without `out` their contents are unspecified. These are content faults: a page
--- index outside the cache, which gives zeros; a length above max_kv_len, which is cut to it; a bad range in
--- kv_page_indptr, of which the pages that fit are written.
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

--- Gathers and dequantizes the tokens of requests: out = (E2M1 value * block scale) * global scale. The output of
--- tokens at or past seq_lens[b], and of tokens whose page index is outside the cache, is left unchanged; that is no
--- fault. K and V may differ in head_dim.
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

--- Reorders V's block scales from linear to 4-token-interleaved order, which nvfp4_kv_materialize_fp8 reads, or back.
--- Strided tensors are allowed.
---@param v_sf nibble.tensor         float8_e4m3fn or uint8, NHD [pages, page_size, heads, S] or HND [pages, heads, page_size, S]; page_size % 4 == 0, S % 4 == 0
---@param kv_layout nibble.layout
---@param opts? {inverse?: boolean, out?: nibble.tensor}  out: same shape and dtype, not overlapping v_sf
---@return nibble.tensor out
function nibble.quantization.swizzle_v_scales(v_sf, kv_layout, opts) end

---@class nibble.quantize_options
---@field kv_layout? nibble.layout
---@field k_global_sf? nibble.scale
---@field v_global_sf? nibble.scale
---@field nvfp4_4over6? nibble.four_over_six

--- Quantizes whole caches. For K and for V, the global scale g is 1 / global_sf; the default of global_sf is
--- 448 / max(amax, 1e-12). V's block scales are interleaved. If global_sf or its reciprocal is not positive and finite,
--- or an element is infinite and no global_sf is given, the result is zeros, and it is a content fault.
---@param k_cache nibble.tensor  float16 or bfloat16 HND [num_pages, heads, page_size, head_dim] or NHD; head_dim % 64 == 0, page_size % 4 == 0
---@param v_cache nibble.tensor  same shape, either dtype
---@param kv_layout? nibble.layout|nibble.quantize_options  default "HND"
---@param k_global_sf? nibble.scale
---@param v_global_sf? nibble.scale
---@param nvfp4_4over6? boolean  default false; nibble's own, FlashInfer's function has none
---@return nibble.tensor[] kv_cache  {k, v} uint8
---@return nibble.tensor[] kv_sf     {k_sf, v_sf} float8_e4m3fn
---@return nibble.tensor k_scale     float32 [1]: g of K
---@return nibble.tensor v_scale
function nibble.quantization.nvfp4_quantize_paged_kv_cache(k_cache, v_cache, kv_layout, k_global_sf, v_global_sf,
  nvfp4_4over6) end

nibble.mla = {}

--- Rotates q, and rotates, quantizes and inserts kv into an NVFP4 cache of DeepSeek-V4. Rows without a slot, or with a
--- slot outside the cache, are not inserted; that is no fault. A position outside the table is a content fault if it is
--- used: its row is not inserted, and the 64 RoPE dimensions of its q heads become zeros.
---@param q nibble.tensor              contiguous bfloat16 [tokens, heads, 512]
---@param kv nibble.tensor             contiguous bfloat16 [tokens, 512]
---@param cache nibble.tensor          uint8 [num_pages, page_size, 384], [num_pages, 1, page_size, 384] or [num_pages, page_size, 1, 384]; page stride a multiple of 16, compact inside a page
---@param slot_mapping nibble.tensor   contiguous int32 or int64 [<= tokens]
---@param positions nibble.tensor      contiguous int64 [tokens]
---@param cos_sin_cache nibble.tensor  contiguous float32 [max_position, 64]
---@param opts? {q_head_padded?: integer, apply_q_rope?: boolean, q_inplace?: boolean}  0 (or 8, 16, 32, 64, 128), true, false
---@return nibble.tensor q_out         bfloat16 [tokens, q_head_padded, 512], or q itself when in place
function nibble.mla.cake_dsv4_nvfp4_rope_quantize_insert(q, kv, cache, slot_mapping, positions, cos_sin_cache, opts) end

--- The same for kv alone. With compress_ratio 2, only every second position is inserted, rotated as the first position
--- of its pair.
---@param kv nibble.tensor
---@param cache nibble.tensor
---@param slot_mapping nibble.tensor
---@param positions nibble.tensor
---@param cos_sin_cache nibble.tensor
---@param opts? {compress_ratio?: integer}  1 or 2
function nibble.mla.cake_dsv4_nvfp4_kv_rope_quantize_insert(kv, cache, slot_mapping, positions, cos_sin_cache, opts) end

--- Dequantizes the records at `slots` to bfloat16 rows. A slot outside the cache gives a row of zeros and is a content
--- fault.
---@param cache nibble.tensor  as above
---@param slots nibble.tensor  int32 or int64 [n]
---@return nibble.tensor rows  bfloat16 [n, 512]
function nibble.mla.dequantize_cache(cache, slots) end

-------------------------------------------------------------------------------------------------------------- observing

--- A view that an operation reads or writes. An operation with index tensors or lengths touches only the elements that
--- they select. Observations share these tables: do not change them.
---@class nibble.access
---@field storage integer    number of the storage, as in tensor:storage()
---@field offset integer     of the first element in the storage, in bytes
---@field dtype nibble.dtype
---@field shape integer[]
---@field stride integer[]   in elements
---@field write boolean      whether it is written; true but not known for the arguments of a user kernel
---@field parameter? string  as in error messages ("slot_mapping", "paged_kv_cache (K)"); nil for arguments of a user kernel
---@field kv_layout? nibble.layout  of a paged cache

--- Something that happened. All kinds have the fields kind, operation, device, time and, in a script, where. The kinds
--- and their other fields:
--- - work: queued on `stream`, or recorded in `capture` as `node` with `deps`; kernel, accesses, attributes,
---   user_kernel.
--- - event_record: `event` was recorded on `stream` (inside `capture`).
--- - stream_wait: `stream` waits for `event` (and joins `capture`).
--- - synchronized: the host waited for `stream`, for `event`, for the work that writes `storage`, or else for the
---   device.
--- - host_read, host_write: the host accessed memory; accesses.
--- - replay: `graph` was queued on `stream`.
--- - capture_begin: `stream` began `capture`. capture_end: replays of `graph` run that capture from now on.
--- - capture_abort: the capture failed. `unjoined` is the stream that was not joined back, if that was the reason.
--- - storage_created, storage_freed: `storage` of so many bytes. Queued work may still use a freed one.
--- - tensor_released: a view of `storage` was released; handles (views that are left), collected.
--- - event_released, graph_released, stream_created, stream_released.
--- - range_push: nibble.range(name, ...) begins. range_pop: the innermost range ends.
--- - storage_cut: a host dropped work that was to write `storage` (nib_drop_work).
---@class nibble.observation
---@field kind string
---@field operation string       as in error messages: "tensor:copy", "page.nvfp4_quantize_append_..."
---@field device string
---@field time number            seconds on a monotonic clock, when it was queued or done
---@field begin number           when the call began; for work, records, waits, reads, writes and replays
---@field where? string          "FILE:LINE" of the script, outside nibble's own modules
---@field callers? string        the places that called it, innermost first: "FILE:LINE < FILE:LINE", at most four
---@field stream? integer        a number, as in tostring(stream); events, graphs, ... have numbers of their own
---@field event? integer
---@field graph? integer
---@field capture? integer
---@field storage? integer
---@field kernel? string         as in graph:nodes()
---@field user_kernel? boolean
---@field accesses? nibble.access[]
---@field attributes? table<string, number|boolean>  arguments other than tensors: "max_kv_len", "inverse", "apply_q_rope",
---                              "compress_ratio", scales that are numbers, "value" of fill, "start", "step", "seed",
---                              "low", "range"
---@field node? integer          id in the graph, from 1
---@field deps? integer[]        ids of the nodes that the node waits for
---@field unjoined? integer      a stream's number
---@field name? string           of a range
---@field bytes? integer
---@field handles? integer
---@field collected? boolean     released by the collector, not by close

--- Sets the observer `name`: `fn(observation)` is called after each successful action, in order. nil removes it. The
--- function is called before the observed call returns. If it raises an error, that call raises the error, although its
--- work is done. What an observer does itself is not observed. It may call nibble.peek, but should neither queue work
--- nor wait.
---@param fn? fun(observation: nibble.observation)
---@param name? string  default ""
function nibble.observe(fn, name) end

--- The elements of a view that an access describes, as little-endian bytes in row-major order. Waits for the queued
--- work that writes the storage. It is not observed and reports no content faults. Returns `nil, message` if the
--- storage was freed, or during a capture on its device.
---@param access nibble.access  its storage, offset, dtype, shape and stride are read
---@return string? bytes
---@return string? message
function nibble.peek(access) end

--- Prints how one value of a cache was quantized: the input (if given), the maximum of its block, the scale, the code,
--- the decoded value, the error, and the addresses of its bytes. Slots, pages, heads and dimensions count from 0. The
--- module nibble.explain returns the same as text and fields.
---   nibble.explain(pool, {slot = 5, head = 1, dim = 17, global_scale = g, input = row})
---   nibble.explain({k, v}, {sf = {k_sf, v_sf}, kv = "V", page = 2, entry = 1, interleaved = true})
---   nibble.explain(records, {slot = 5, dim = 460})     DeepSeek-V4's records
---@param cache nibble.caches|nibble.cache|nibble.tensor
---@param opts nibble.explain_options
function nibble.explain(cache, opts) end

-------------------------------------------------------------------------------------------------------------- checking

---@class nibble.report_operation
---@field name string     "tensor:copy"
---@field where? string   "FILE:LINE"; for work of a graph, the place of its capture
---@field callers? string the places that called it, innermost first: "FILE:LINE < FILE:LINE", at most four
---@field replay? string  "FILE:LINE" of the replay

---@alias nibble.report_kind
---| "race"|"unwritten"|"duplicate slot"|"owned twice"|"freed page"|"reserved page"|"shared page"|"foreign entry"
---| "foreign row"|"beyond length"|"missing page"|"wrong scales"|"closed"|"unjoined"

---@class nibble.report
---@field kind nibble.report_kind
---@field message string   what is wrong, in one line
---@field operation nibble.report_operation
---@field other? nibble.report_operation  the operation that it conflicts with
---@field hazard? string   of a race: "read after write", "write after read", "write after write"; "use" with a user kernel
---@field storage? {number: integer, bytes?: integer, where?: string}  the storage, and where it was created
---@field text string      the whole report as it is printed, "check: KIND: MESSAGE" and more lines

--- Turns checked mode on or off. It reports, once each: races between two streams, a stream and the host, or nodes of a
--- graph; reads of unwritten bytes; a slot that occurs twice in a call; use of another request's page (`pages.watch`);
--- replays that use a closed tensor; and streams that are not joined back in a capture. The head of
--- bindings/lua/nibble/checker.lua explains each. true turns it on, without earlier reports, and prints reports to
--- standard error. A function turns it on and gets each report; its errors are raised by the call at fault. false turns
--- it off and keeps the reports. Turn it on before the first tensor is created: older tensors count as written, and
--- work on them as ordered.
---@param mode boolean|fun(report: nibble.report)
function nibble.check(mode) end

--- The reports since checked mode was last turned on, and a line for each kind of thing that could not be checked
--- (which mode true prints to standard error, too).
---@return nibble.report[]
---@return string[] unseen
function nibble.check_reports() end

return nibble
