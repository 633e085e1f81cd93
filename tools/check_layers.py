#!/usr/bin/env python3
"""Checks who includes whom (docs/architecture.md#layers): a folder of moiety/ includes only the
folders before it, comm only base and formats; headers pull in no third-party library; torch stays
in python/csrc."""

import pathlib
import re
import sys

LAYERS = ["base", "formats", "quant", "gemm", "comm", "moe", "gtp", "optim", "checkpoint", "model"]
ONLY = {"comm": {"base", "formats", "comm"}}
NOT_IN_HEADERS = re.compile(r"<(fmt|nlohmann|toml\+\+|CLI|dnnl|oneapi|omp\.h|cuda|immintrin|mpi)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"][^>"]+[>"])', re.M)


def allowed(folder):
    return ONLY.get(folder, set(LAYERS[: LAYERS.index(folder) + 1]))


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
            line = text.count("\n", 0, match.start()) + 1
            where = f"{place}:{line}"
            if re.match(r"<(torch|ATen|c10)/", target) and place.parts[:2] != ("python", "csrc"):
                yield f"{where}: only python/csrc may include {target}"
            if place.parts[0] != "moiety":
                continue
            folder = place.parts[1]
            if path.suffix == ".h" and NOT_IN_HEADERS.match(target):
                yield f"{where}: a header must not include {target}"
            inner = re.match(r'"moiety/([^/]+)/', target)
            if target.startswith('"') and not inner:
                yield f'{where}: write {target} from the include root, as "moiety/..."'
            elif inner and inner.group(1) not in allowed(folder):
                yield f"{where}: {folder} may not include {inner.group(1)}"


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
