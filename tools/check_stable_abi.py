#!/usr/bin/env python3
"""Reads the dynamic symbols of the Python package's libraries: that the operators for torch stand on
torch's stable ABI alone, so that one binary serves every torch from 2.11 on and every Python.

    tools/check_stable_abi.py FOLDER    of libmoiety.so and libmoiety_torch.so

An undefined symbol of libmoiety_torch.so is torch's shim, ours, or the C and C++ run time's; what
libmoiety.so gives to others is ours alone, and libmoiety_torch.so gives nothing. None is unique in the
process (-fno-gnu-unique): two versions of a library would share it, and neither could be unloaded.
{fmt} is inside, for a process may hold another version of it. Prints the least versions of GLIBC and
GLIBCXX that each library asks for.
"""

import pathlib
import re
import subprocess
import sys

# The shim: functions of C, with these prefixes (torch/csrc/stable/c/shim.h, aoti_torch/c/shim.h).
SHIM = re.compile(r"(aoti_torch|torch)_\w+$")
OURS = re.compile(r"_ZN?K?6moiety|_ZZNK?6moiety|_ZT\w[\w]*?N6moiety|_ZGVZ?NK?6moiety|moiety_\w+$")
# What a library needs besides; torch's libraries are the loader's business.
NEEDED = re.compile(r"lib(torch_cpu|moiety|stdc\+\+|gcc_s|c|m|pthread|dl|rt)\.so|ld-linux")
REFUSED = re.compile(r"lib(python|torch_python|c10|torch|fmt)\.|libtorch\.so")


def symbols(path):
    """(undefined names with their versions, defined names, those of the latter that are unique)."""
    text = subprocess.run(["nm", "-D", "--with-symbol-versions", str(path)], check=True,
                          capture_output=True, text=True).stdout
    undefined, defined, unique = [], [], []
    for line in text.splitlines():
        kind, name = line.split()[-2:]
        if kind == "U":
            undefined.append(name)
        elif kind not in "wv":
            defined.append(name.split("@")[0])
            if kind == "u":
                unique.append(defined[-1])
    return undefined, defined, unique


def needed(path):
    text = subprocess.run(["readelf", "-d", str(path)], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", text)


def floors(undefined):
    found = {}
    for name in undefined:
        match = re.search(r"@+(GLIBCXX|GLIBC|CXXABI)_([\d.]+)$", name)
        if match:
            version = tuple(map(int, match.group(2).split(".")))
            found[match.group(1)] = max(found.get(match.group(1), (0,)), version)
    return {name: ".".join(map(str, version)) for name, version in sorted(found.items())}


def faults(operators, core):
    for path, of_ours in ((core, True), (operators, False)):
        _, defined, unique = symbols(path)
        given = [name for name in defined if not (of_ours and OURS.match(name))]
        if given:
            yield (f"{path.name} gives {len(given)} symbols to others that are not for them, such as "
                   f"{', '.join(sorted(given)[:5])}")
        if unique:
            yield (f"{path.name} has {len(unique)} symbols that are unique in a process, such as "
                   f"{', '.join(sorted(unique)[:5])}")
    undefined, *_ = symbols(operators)
    for name in undefined:
        versioned = re.search(r"@+(GLIBCXX|GLIBC|CXXABI|GCC)_", name)
        if not (versioned or SHIM.match(name) or OURS.match(name)):
            yield f"{operators.name} asks for {name}, which is neither torch's shim nor ours"
    for path in (operators, core):
        for library in needed(path):
            if REFUSED.search(library):
                yield f"{path.name} needs {library}"
    for library in needed(operators):
        if not NEEDED.match(library):
            yield f"{operators.name} needs {library}"
    if not any(SHIM.match(name) for name in undefined):
        yield f"{operators.name} asks for no function of torch: is it the operators' library?"


def main(arguments):
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments and arguments[0].startswith("-") else 2
    folder = pathlib.Path(arguments[0])
    operators, core = folder / "libmoiety_torch.so", folder / "libmoiety.so"
    for path in (operators, core):
        if not path.exists():
            print(f"check_stable_abi: there is no {path}")
            return 1
    found = list(faults(operators, core))
    for path in (operators, core):
        undefined, *_ = symbols(path)
        shim = sum(bool(SHIM.match(name)) for name in undefined)
        least = ", ".join(f"{name} {version}" for name, version in floors(undefined).items())
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {least}, {shim} functions of torch's shim")
    print("\n".join(found) if found else "stable ABI: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
