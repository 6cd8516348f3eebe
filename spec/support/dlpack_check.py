#!/usr/bin/env python3
"""Development-time check of DLPack with a framework that nobody here wrote; no part of the product and of no spec.

    python3 spec/support/dlpack_check.py build/release/libnibble.so.2           numpy (2.1 or later) on the CPU
    python3 spec/support/dlpack_check.py build/release/libnibble.so.2 cuda:0    PyTorch on a GPU

Both ways: the same addresses (nothing is copied), the same values, writes of one side seen by the other, memory that lives until both
sides have let go (also when Python lets go on another thread, or after the runtime was closed), arrays lent for reading, and
what is refused. A line for each step; exit status 0 when all is well.
"""
import ctypes
import gc
import sys
import threading
import weakref

LIBRARY, DEVICE = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"
GPU = DEVICE.startswith("cuda")
if GPU:
    import torch
else:
    import numpy

VERSIONED, USED = b"dltensor_versioned", b"used_dltensor_versioned"
NAMES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "uint16", "int32", "int64"]  # nib_dtype

lib = ctypes.CDLL(LIBRARY)
void, integer = ctypes.c_void_p, ctypes.c_int64
UNLIMITED = 2**63 - 1
for name, result, *arguments in [
    ("nib_runtime_create_sized", ctypes.c_int, void, ctypes.c_size_t, void), ("nib_runtime_close", None, void), ("nib_error", ctypes.c_char_p, void),
    ("nib_device_find", ctypes.c_int, void, ctypes.c_char_p, void), ("nib_device_default_stream", void, void),
    ("nib_stream_handle", void, void), ("nib_stream_synchronize", ctypes.c_int, void, integer),
    ("nib_tensor_create", ctypes.c_int, void, ctypes.c_int, ctypes.c_int32, void, void), ("nib_tensor_release", None, void),
    ("nib_tensor_arange", ctypes.c_int, void, void, ctypes.c_byte * 24, ctypes.c_byte * 24),
    ("nib_tensor_data", void, void), ("nib_tensor_dtype", ctypes.c_int, void), ("nib_tensor_ndim", ctypes.c_int32, void),
    ("nib_tensor_shape", ctypes.POINTER(integer), void), ("nib_tensor_stride", ctypes.POINTER(integer), void),
    ("nib_tensor_numel", integer, void), ("nib_dtype_bytes", ctypes.c_size_t, ctypes.c_int),
    ("nib_tensor_read", ctypes.c_int, void, void, ctypes.c_size_t, integer), ("nib_tick", ctypes.c_int, void, integer),
    ("nib_tensor_write", ctypes.c_int, void, void, void, ctypes.c_size_t),
    ("nib_tensor_copy", ctypes.c_int, void, void, void), ("nib_tensor_is_read_only", ctypes.c_bool, void),
    ("nib_tensor_permute", ctypes.c_int, void, ctypes.c_int32, void, void),
    ("nib_tensor_written", ctypes.c_int, void, void),
    ("nib_tensor_from_dlpack", ctypes.c_int, void, void, void), ("nib_tensor_to_dlpack", ctypes.c_int, void, ctypes.c_ssize_t, void),
]:
    function = getattr(lib, name)
    function.restype, function.argtypes = result, arguments

api = ctypes.pythonapi
api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, [void, ctypes.c_char_p, void]
api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = void, [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.restype, api.PyCapsule_SetName.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Error(Exception):
    pass


class Runtime:
    def __init__(self):
        self.handle = void()
        assert lib.nib_runtime_create_sized(None, 0, ctypes.byref(self.handle)) == 0
        self.device = void()
        self.check(lib.nib_device_find(self.handle, DEVICE.encode(), ctypes.byref(self.device)))
        self.stream = lib.nib_device_default_stream(self.device)

    def check(self, status):
        if status != 0:
            raise Error(lib.nib_error(self.handle).decode())

    def tick(self):
        self.check(lib.nib_tick(self.handle, UNLIMITED))

    def close(self):
        lib.nib_runtime_close(self.handle)

    def create(self, dtype, *shape):
        out = void()
        self.check(lib.nib_tensor_create(self.device, NAMES.index(dtype), len(shape), (integer * len(shape))(*shape), ctypes.byref(out)))
        return Tensor(self, out)

    def take(self, array):
        """A tensor on what a framework's array holds."""
        keywords = {"stream": lib.nib_stream_handle(self.stream)} if GPU else {}
        capsule = array.__dlpack__(max_version=(1, 1), **keywords)
        out = void()
        self.check(lib.nib_tensor_from_dlpack(self.handle, api.PyCapsule_GetPointer(capsule, VERSIONED), ctypes.byref(out)))
        api.PyCapsule_SetName(capsule, USED)  # so that its destructor leaves it alone
        if GPU:
            self.check(lib.nib_tensor_written(out, self.stream))
        return Tensor(self, out)


class Tensor:
    """What a framework's from_dlpack wants: __dlpack__ and __dlpack_device__."""

    def __init__(self, runtime, handle):
        self.runtime, self.handle = runtime, handle

    def release(self):
        lib.nib_tensor_release(self.handle)

    def address(self):
        return lib.nib_tensor_data(self.handle)

    def shape(self):
        return tuple(lib.nib_tensor_shape(self.handle)[i] for i in range(lib.nib_tensor_ndim(self.handle)))

    def bytes(self):
        size = lib.nib_tensor_numel(self.handle) * lib.nib_dtype_bytes(lib.nib_tensor_dtype(self.handle))
        data = ctypes.create_string_buffer(size)
        self.runtime.check(lib.nib_tensor_read(self.handle, data, size, UNLIMITED))
        return data.raw

    def write(self, data):
        self.runtime.check(lib.nib_tensor_write(self.runtime.stream, self.handle, data, len(data)))
        return self

    def permute(self, *dims):
        out = void()
        self.runtime.check(lib.nib_tensor_permute(self.handle, len(dims), (integer * len(dims))(*dims), ctypes.byref(out)))
        return Tensor(self.runtime, out)

    def __dlpack_device__(self):
        return (2, int(DEVICE[5:])) if GPU else (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert max_version and max_version[0] >= 1 and not copy, max_version
        out = void()
        order = 0 if not GPU else 1 if stream is None else stream
        self.runtime.check(lib.nib_tensor_to_dlpack(self.handle, order, ctypes.byref(out)))
        return api.PyCapsule_New(out, VERSIONED, None)  # is always taken here: no destructor


# ---- The two frameworks -------------------------------------------------------------------------------------------------

def make(dtype, *shape):
    """An array 0, 1, 2, ... (of bytes, in other types)"""
    if GPU:
        count = torch.Size(shape).numel()
        kind = getattr(torch, dtype)
        if dtype == "float32":
            return torch.arange(count, device=DEVICE, dtype=kind).reshape(shape)
        return (torch.arange(count * kind.itemsize, device=DEVICE) % 100).to(torch.uint8).view(kind).reshape(shape)
    return numpy.arange(int(numpy.prod(shape)), dtype=dtype).reshape(shape)


def address(array):
    return array.data_ptr() if GPU else array.ctypes.data


def raw(array):
    if GPU:
        return bytes(array.contiguous().view(torch.uint8).cpu().flatten().tolist())
    return array.tobytes()


def adopt(tensor):
    return torch.from_dlpack(tensor) if GPU else numpy.from_dlpack(tensor)


def finish():
    if GPU:
        torch.cuda.synchronize()


def step(text):
    print("ok", text, flush=True)


def refused(words, function, *arguments):
    try:
        function(*arguments)
    except Error as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused: " + words)


dtypes = NAMES if GPU else [name for name in NAMES if name not in ("bfloat16", "float8_e4m3fn")]
rt = Runtime()

# ---- From the framework -------------------------------------------------------------------------------------------------

for dtype in dtypes:
    array = make(dtype, 4, 6)
    tensor = rt.take(array)
    assert tensor.address() == address(array) and tensor.shape() == (4, 6)
    assert NAMES[lib.nib_tensor_dtype(tensor.handle)] == dtype and tensor.bytes() == raw(array), dtype
    backwards = raw(array)[::-1]
    tensor.write(backwards)
    lib.nib_stream_synchronize(rt.stream, UNLIMITED)
    assert raw(array) == backwards == tensor.bytes()
    tensor.release()
step("arrays of %d types come in at their own addresses; writes are seen there" % len(dtypes))

array = make("float32", 8, 10)
part = array[2:6:2, 1:9:3].T
tensor = rt.take(part)
assert tensor.address() == address(part) and tensor.bytes() == raw(part) and tensor.shape() == (3, 2)
tensor.release()
step("a transposed view with steps comes in as it is")

array = make("float32", 4, 6)
gone = weakref.ref(array)
tensor, first = rt.take(array), raw(array)
del array
gc.collect()
if not GPU:  # the Python object lives with the tensor; PyTorch keeps its storage instead
    assert gone() is not None
junk = [make("float32", 4, 6) * 0 for _ in range(100)]
finish()
assert tensor.bytes() == first
tensor.release()
rt.tick()
gc.collect()
assert gone() is None
step("an array that Python has dropped lives until the tensor is released")

if not GPU:
    array = make("float32", 4, 6)
    array.flags.writeable = False
    tensor = rt.take(array)
    assert lib.nib_tensor_is_read_only(tensor.handle)
    refused("tensor:write: tensor: expected a writable tensor", tensor.write, bytes(96))
    lent = adopt(tensor)
    assert not lent.flags.writeable and address(lent) == address(array)
    tensor.release()
    del lent
    refused("from_dlpack: dtype: expected float 32 or 16", rt.take, numpy.zeros(3))
    refused("from_dlpack: stride: expected strides >= 0, got -1", rt.take, numpy.arange(4, dtype="int32")[::-1])
    step("an array for reading cannot be written; float64 and negative strides are refused")
else:
    refused("from_dlpack: dtype: expected float 32 or 16", rt.take, torch.zeros(3, device=DEVICE, dtype=torch.float64))
    if hasattr(torch, "float4_e2m1fn_x2"):
        codes = make("uint8", 2, 8).view(torch.float4_e2m1fn_x2)
        try:
            tensor = rt.take(codes)
        except (BufferError, RuntimeError) as error:
            step("this PyTorch does not hand out float4_e2m1fn_x2: %s" % str(error).split("\n")[0])
        else:
            assert NAMES[lib.nib_tensor_dtype(tensor.handle)] == "uint8" and tensor.address() == address(codes)
            tensor.release()
            step("float4_e2m1fn_x2 comes in as uint8")

# ---- To the framework ---------------------------------------------------------------------------------------------------

for dtype in dtypes:
    data = bytes(i % 100 for i in range(24 * lib.nib_dtype_bytes(NAMES.index(dtype))))
    tensor = rt.create(dtype, 4, 6).write(data)
    array = adopt(tensor)
    assert address(array) == tensor.address() and tuple(array.shape) == (4, 6) and str(array.dtype).endswith(dtype), array.dtype
    assert raw(array) == data
    (array.view(torch.uint8) if GPU else array.view("uint8"))[...] = 7
    finish()
    assert tensor.bytes() == bytes([7]) * len(data)
    tensor.release()
step("tensors of %d types go out at their own addresses; writes are seen here" % len(dtypes))

tensor = rt.create("float32", 2, 3, 4).write(raw(make("float32", 2, 3, 4)))
turned = tensor.permute(2, 0, 1)
array = adopt(turned)
assert tuple(array.shape) == (4, 2, 3) and address(array) == tensor.address()
expected = make("float32", 2, 3, 4)
assert raw(array) == raw(expected.permute(2, 0, 1) if GPU else expected.transpose(2, 0, 1))
for each in (tensor, turned):
    each.release()
rt.tick()
assert raw(array) == raw(expected.permute(2, 0, 1) if GPU else expected.transpose(2, 0, 1))
del array
step("a permuted view goes out as it is, and outlives its tensors")

# The order of streams: what is queued here comes before what the framework does next, without a wait in between.
# The last copy matters, and comes long after the call.
N = 1 << (26 if GPU else 22)
source, target = rt.create("float32", N), rt.create("float32", N)
nothing = rt.create("float32", N).write(bytes(4 * N))
for round in range(1, 6):
    source.write(raw(make("float32", 1) * 0 + round) * N)
    for each in [nothing] * (200 if GPU else 20) + [source]:
        rt.check(lib.nib_tensor_copy(rt.stream, target.handle, each.handle))
    array = adopt(target)
    total = float(array.sum(dtype=torch.float64 if GPU else "float64"))
    assert total == round * N, (round, total)
    array[...] = 0
    finish()
    del array
step("what was queued is done before the framework reads")

if GPU:  # and the other way: work of PyTorch's current stream comes before what is queued on the stream that it was told
    side = torch.cuda.Stream()
    for round in range(1, 11):
        with torch.cuda.stream(side):
            array = torch.zeros(1000, device=DEVICE)
            torch.cuda._sleep(50000000)  # some 25 ms
            array += round
            tensor = rt.take(array)
        assert tensor.bytes() == raw(torch.full((1,), float(round), device=DEVICE)) * 1000
        tensor.release()
        rt.tick()
    step("what PyTorch has queued is done before the tensor is read")

# ---- Threads and the end ------------------------------------------------------------------------------------------------

tensors = [rt.create("float32", 1000).write(raw(make("float32", 1000))) for _ in range(16)]
arrays = [adopt(tensor) for tensor in tensors]
finish()


def drop(mine):
    while mine:
        mine.pop()


threads = [threading.Thread(target=drop, args=([arrays.pop() for _ in range(2)],)) for _ in range(4)]
for thread in threads:
    thread.start()
for i in range(100):
    rt.tick()
for thread in threads:
    thread.join()
for tensor in tensors[:8]:
    tensor.release()
kept = rt.take(make("float32", 10))  # is given back by the runtime's end
rt.close()
expected = raw(make("float32", 1000))
for array in arrays:
    assert raw(array) == expected
del array
threads = [threading.Thread(target=drop, args=([arrays.pop() for _ in range(2)],)) for _ in range(4)]
for thread in threads:
    thread.start()
for tensor in tensors[8:] + [source, target, nothing, kept]:
    tensor.release()
for thread in threads:
    thread.join()
step("arrays dropped on other threads, and after the runtime's end")

framework = "PyTorch " + torch.__version__ + ", " + torch.cuda.get_device_name(0) if GPU else "numpy " + numpy.__version__
print("all is well with %s on %s" % (framework, DEVICE))
