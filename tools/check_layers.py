#!/usr/bin/env python3
"""Checks who includes whom (docs/architecture.md#layers): a folder of moiety/ includes only the
folders before it, some fewer; a header in a sub-folder is its folder's own; headers pull in no
third-party library; of the program, config stands below report and report below commands; torch
stays in python/csrc."""

import pathlib
import re
import sys

LAYERS = ["base", "formats", "data", "quant", "gemm", "comm", "nn", "moe", "gtp", "optim", "checkpoint",
          "model", "hf", "train", "capi"]
# Folders that may include less than all layers below them.
ONLY = {
    "data": {"base", "data"},
    "comm": {"base", "formats", "comm"},
    "nn": {"base", "formats", "quant", "gemm", "nn"},
}
# The program's folders, lowest first; its own headers (exit_code.h, program.h) serve all of them.
APPS = ["config", "report", "commands"]
NOT_IN_HEADERS = re.compile(r"<(fmt|nlohmann|toml\+\+|CLI|dnnl|oneapi|omp\.h|cuda|immintrin|mpi)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"][^>"]+[>"])', re.M)


def allowed(folder):
    return ONLY.get(folder, set(LAYERS[: LAYERS.index(folder) + 1]))


def library_fault(place, target):
    """Why this file of moiety/ may not include `target`, or None."""
    folder = place.parts[1]
    if place.suffix == ".h" and NOT_IN_HEADERS.match(target):
        return f"a header must not include {target}"
    inner = re.match(r'"moiety/([^/]+)/', target)
    if target.startswith('"') and not inner:
        return f'write {target} from the include root, as "moiety/..."'
    if inner and inner.group(1) not in allowed(folder):
        return f"{folder} may not include {inner.group(1)}"
    return None


def program_fault(place, target):
    """The same of a file of apps/moiety, whose own files may include everything."""
    inner = re.match(r'"apps/moiety/(\w+)/', target)
    folder = place.parts[2]
    if inner and folder in APPS and inner.group(1) not in APPS[: APPS.index(folder) + 1]:
        return f"{folder} may not include {inner.group(1)}"
    return None


def faults(root):
    for path in sorted(root.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        place = path.relative_to(root)
        if place.parts[0] in {"build", "runs"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for match in INCLUDE.finditer(text):
            target = match.group(1)
            why = None
            private = re.match(r'"(moiety/[^/]+)/[^/"]+/', target)
            if re.match(r"<(torch|ATen|c10)/", target) and place.parts[:2] != ("python", "csrc"):
                why = f"only python/csrc may include {target}"
            elif place.parts[0] in {"moiety", "apps", "examples"} and private and not str(
                place
            ).startswith(private.group(1) + "/"):
                why = f"{target} is private to {private.group(1)}"
            elif place.parts[0] == "moiety":
                why = library_fault(place, target)
            elif place.parts[:2] == ("apps", "moiety"):
                why = program_fault(place, target)
            if why:
                yield f"{place}:{text.count(chr(10), 0, match.start()) + 1}: {why}"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    for path in (root / "moiety").iterdir():
        if path.is_dir() and path.name not in LAYERS:
            print(f"moiety/{path.name}: not a layer; the layers are {', '.join(LAYERS)}")
            return 1
    found = list(faults(root))
    print("\n".join(found) if found else "layers: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
