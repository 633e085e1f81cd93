"""Reads every piece of a checkpoint with the Python package safetensors and compares it with the
bytes that the manifest points to."""
import json
import pathlib
import struct
import sys

import numpy
from safetensors import safe_open

directory = pathlib.Path(sys.argv[1])
manifest = json.loads((directory / "manifest.json").read_text())
types = {"F32": numpy.float32, "I64": numpy.int64, "U8": numpy.uint8}
read = 0
for name, tensor in manifest["tensors"].items():
    for slot, entry in tensor["slots"].items():
        if entry["dtype"] not in types:
            continue  # numpy has no bfloat16
        for file, start, size, begin, end, _ in entry["pieces"]:
            path = directory / manifest["files"][file]["name"]
            box = ",".join(f"{a}:{a + n}/{e}" for a, n, e in zip(start, size, tensor["shape"]))
            raw = path.read_bytes()
            data = raw[8 + struct.unpack("<Q", raw[:8])[0]:][begin:end]
            with safe_open(path, framework="numpy") as f:
                got = f.get_tensor(f"{slot}/{name}[{box}]")
                assert f.metadata()["id"] == manifest["id"]
            assert list(got.shape) == size and got.dtype == types[entry["dtype"]]
            assert got.tobytes() == data
            read += 1
assert read > 10, read
