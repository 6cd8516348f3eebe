"""Writes the files of this folder with the PyPI packages safetensors and numpy (pip install safetensors numpy), the format's
own writer, and expected.lua: what each tensor is, as this script knows it. Free to use."""
import os
import struct

import numpy as np
import safetensors
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file

here = os.path.dirname(os.path.abspath(__file__))
expected = []


def note(file, name, stored, shape, data):
    name = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    expected.append('  {file = "%s", name = "%s", stored = "%s", shape = {%s}, hex = "%s"},'
                    % (file, name, stored, ", ".join(map(str, shape)), data.hex()))


# Every element type that the writer knows, under its own names for them.
types = {"float32": ("F32", struct.pack("<6f", 1, -2, 0.5, 1e-40, float("inf"), -0.0)),
         "float16": ("F16", struct.pack("<6e", 1, -2, 0.5, 6e-8, float("inf"), -0.0)),
         "bfloat16": ("BF16", bytes.fromhex("803f00c0003f0100807f0080")),
         "float8_e4m3fn": ("F8_E4M3", bytes([0x38, 0xC0, 0x01, 0x7E, 0x7F, 0x80])),
         "uint8": ("U8", bytes([0, 1, 2, 127, 128, 255])), "int8": ("I8", bytes([0, 1, 2, 127, 128, 255])),
         "uint16": ("U16", struct.pack("<6H", 0, 1, 2, 3, 32768, 65535)),
         "int16": ("I16", struct.pack("<6h", 0, 1, 2, 3, -32768, -1)),
         "int32": ("I32", struct.pack("<6i", 0, 1, 2, 3, -2**31, 2**31 - 1)),
         "uint32": ("U32", struct.pack("<6I", 0, 1, 2, 3, 2**31, 2**32 - 1)),
         "int64": ("I64", struct.pack("<6q", 0, 1, 2, 2**53 + 1, -2**63, 2**63 - 1)),
         "uint64": ("U64", struct.pack("<6Q", 0, 1, 2, 3, 2**63, 2**64 - 1)),
         "float64": ("F64", struct.pack("<6d", 1, -2, 1 + 2**-24 + 2**-50, 1e300, 2**-149, -0.0)),
         "bool": ("BOOL", bytes([0, 1, 1, 0, 1, 0])),
         "float8_e5m2": ("F8_E5M2", bytes([0, 1, 2, 0x3C, 0x7C, 0xFC]))}
tensors, arrays = {}, []
for name, (stored, data) in types.items():
    arrays.append(np.frombuffer(data, np.uint8))  # keeps the memory that the writer reads
    tensors[name + "_2x3"] = TensorSpec(dtype=name, shape=[2, 3], data_ptr=arrays[-1].ctypes.data, data_len=len(data))
    note("types", name + "_2x3", stored, [2, 3], data)
arrays.append(np.frombuffer(bytes.fromhex("10325476"), np.uint8))
tensors["codes_2x4"] = TensorSpec(dtype="float4_e2m1fn_x2", shape=[2, 2], data_ptr=arrays[-1].ctypes.data, data_len=4)
note("types", "codes_2x4", "F4", [2, 4], bytes(arrays[-1]))
serialize_file(tensors, os.path.join(here, "types.safetensors"),
               {"made_by": "make.py", "writer": "safetensors " + safetensors.__version__})

# Shapes, and names as a model has them and as nobody should.
arrays = {"": np.zeros((0,), np.float32), "scalar": np.array(7, np.int64), "empty.2x0x3": np.zeros((2, 0, 3), np.float16),
          "model.layers.0.self_attn.k": np.arange(24, dtype=np.float32).reshape(1, 2, 3, 2, 1, 2, 1, 1),
          'quote " backslash \\ line\n': np.array([1, 2, 3], np.uint8), "Größe 😀": np.array([[4], [5]], np.int32)}
save_file(arrays, os.path.join(here, "shapes.safetensors"))
for name, array in arrays.items():
    stored = {"float32": "F32", "int64": "I64", "float16": "F16", "uint8": "U8", "int32": "I32"}[str(array.dtype)]
    note("shapes", name, stored, array.shape, array.tobytes())

only = np.array([[0.25, 0.5], [1, 2]], np.float32)
save_file({"only": only}, os.path.join(here, "only.safetensors"))
note("only", "only", "F32", only.shape, only.tobytes())

with open(os.path.join(here, "expected.lua"), "w") as file:
    file.write("-- Made by make.py with safetensors %s: each tensor's bytes in the files of this folder.\n-- luacheck: no max line length\nreturn {\n%s\n}\n"
               % (safetensors.__version__, "\n".join(expected)))
