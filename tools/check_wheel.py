#!/usr/bin/env python3
"""Holds what is in the Python package's wheel: one for every Python, with a name that says which
systems it runs on, of a size that people download, without a file of NVIDIA's, of torch's or OpenMP's.

    tools/check_wheel.py WHEEL

Prints its size and the least glibc. Its symbols are what tools/check_stable_abi.py looks at.
"""

import pathlib
import re
import sys
import zipfile

# The operations of NVIDIA's GPUs are 15 MB of it; oneDNN, without which it computes, is 11 packed.
MOST_MB = {"cpu": 45, "cuda": 60}
NAME = re.compile(r"moiety-[\w.]+-py3-none-(manylinux_(\d+)_(\d+)_\w+)\.whl$")
WANTED = ("moiety/__init__.py", "moiety/py.typed", "moiety/lib/libmoiety.so", "moiety/lib/libmoiety_torch.so",
          "moiety/te/__init__.py")
REFUSED = re.compile(r"lib(cuda|cudart|cublas|cublasLt|cudnn|nccl|nvrtc|torch|torch_cpu|c10|python|gomp|fmt)[\w.-]*\.so|"
                     r"(^|/)nvidia/|__pycache__")


def faults(wheel):
    name = NAME.match(wheel.name)
    if not name:
        yield f"{wheel.name} is not named moiety-VERSION-py3-none-manylinux_..."
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        built = b"cudaLaunchKernel" in archive.read("moiety/lib/libmoiety.so") if WANTED[2] in names else False
        metadata = next((archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA")), "")
        scripts = next((archive.read(n).decode() for n in names if n.endswith("entry_points.txt")), "")
    for path in WANTED:
        if path not in names:
            yield f"there is no {path}"
    for path in filter(REFUSED.search, names):
        yield f"{path} is not ours to bring"
    found = [n for n in names if "libdnnl" in n]  # others may have another version
    if any(not re.search(r"libdnnl-[0-9a-f]{8}", n) for n in found):
        yield f"{found} go by their own names, which other packages may use"
    if "Requires-Dist: torch" in re.sub(r"Requires-Dist:.*extra ==.*", "", metadata):
        yield "it requires torch, which pip would fetch where there is one"
    if "moiety = moiety._program:main" not in scripts:
        yield "it has no console script moiety"
    size, most = wheel.stat().st_size / 1e6, MOST_MB["cuda" if built else "cpu"]
    if size >= most:
        yield f"it has {size:.1f} MB, at most {most}"
    if name:
        print(f"{wheel.name}: {size:.1f} MB of {most}, {'with' if built else 'without'} CUDA, "
              f"glibc {name.group(2)}.{name.group(3)}, {len(names)} files")


def main(arguments):
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments and arguments[0].startswith("-") else 2
    wheel = pathlib.Path(arguments[0])
    if not wheel.exists():
        print(f"check_wheel: there is no {wheel}")
        return 1
    found = list(faults(wheel))
    print("\n".join(f"check_wheel: {wheel.name}: {fault}" for fault in found) if found else "wheel: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
