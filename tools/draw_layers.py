#!/usr/bin/env python3
"""Draws docs/images/layers.svg: the folders of the library and the program, each above what it
includes, with an arrow for every include that no chain of others implies.

    python3 tools/draw_layers.py           draws
    python3 tools/draw_layers.py --check   fails if the picture is not that of today's includes
"""

import pathlib
import re
import sys

from check_layers import LAYERS

PICTURE = "docs/images/layers.svg"
INCLUDE = re.compile(r'^\s*#\s*include\s*"moiety/([^/"]+)/', re.M)
# What a folder holds, and its column.
FOLDERS = {
    "base": ("errors, memory, streams, random", 1),
    "formats": ("number formats as bytes", 0.5),
    "data": ("token files, sampler, loader", 2),
    "quant": ("quantize, partial cast", 0),
    "gemm": ("products, grouped MLP", 0),
    "comm": ("ranks, collectives, shared memory", 1),
    "nn": ("attention, norm, RoPE, loss", 0),
    "moe": ("router, dispatch, combine", 1),
    "gtp": ("sharded weights, planner", 0.5),
    "optim": ("AdamW on shards", 0),
    "checkpoint": ("save, load, reshard", 0),
    "model": ("the transformer", 1),
    "hf": ("Hugging Face folders", 2),
    "train": ("the trainer", 1.5),
    "capi": ("for Python", 1),
    "moiety": ("the program (apps/moiety)", 1.5),
}
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 196, 46, 22, 44, 16


def includes(root):
    """folder -> folders that its files include, itself left out."""
    found = {layer: set() for layer in LAYERS}
    found["moiety"] = set()
    for path in sorted(root.glob("moiety/**/*")) + sorted(root.glob("apps/moiety/**/*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        parts = path.relative_to(root).parts
        own = parts[1] if parts[0] == "moiety" else "moiety"
        for folder in INCLUDE.findall(path.read_text(encoding="utf-8")):
            if folder != own and folder in found:
                found[own].add(folder)
    return found


def below(found, folder):
    """All folders that `folder` reaches."""
    reached, rest = set(), list(found[folder])
    while rest:
        one = rest.pop()
        if one not in reached:
            reached.add(one)
            rest += found[one]
    return reached


def direct(found):
    """The includes that no chain of others implies."""
    return {
        folder: {t for t in targets if not any(t in below(found, o) for o in targets if o != t)}
        for folder, targets in found.items()
    }


def levels(found):
    """Folders by the length of their longest chain down, lowest first."""
    depth = {}

    def of(folder):
        if folder not in depth:
            depth[folder] = 1 + max((of(t) for t in found[folder]), default=-1)
        return depth[folder]

    for folder in found:
        of(folder)
    rows = [[] for _ in range(max(depth.values()) + 1)]
    for folder in found:
        rows[depth[folder]].append(folder)
    return rows


def picture(found):
    rows = levels(found)
    columns = 1 + max(column for _, column in FOLDERS.values())
    width = 2 * MARGIN + columns * WIDTH + (columns - 1) * GAP_X
    height = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * GAP_Y
    place = {
        folder: (
            MARGIN + FOLDERS[folder][1] * (WIDTH + GAP_X),
            height - MARGIN - HEIGHT - level * (HEIGHT + GAP_Y),
        )
        for level, row in enumerate(rows)
        for folder in row
    }
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
        ' font-family="sans-serif">',
        "<style>rect{fill:#fff;stroke:#333}path{stroke:#888;fill:none}text{fill:#111}"
        "@media(prefers-color-scheme:dark){rect{fill:#222;stroke:#ccc}text{fill:#eee}}</style>",
        '<defs><marker id="a" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">'
        '<path d="M0,0 L7,3.5 L0,7 z" style="fill:#888;stroke:none"/></marker></defs>',
    ]
    for folder, targets in direct(found).items():
        for target in sorted(targets):
            (x0, y0), (x1, y1) = place[folder], place[target]
            x0, y0, x1 = x0 + WIDTH / 2, y0 + HEIGHT, x1 + WIDTH / 2
            bend = (y1 - y0) / 2
            out.append(
                f'<path d="M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f}'
                f' {x1:.0f},{y1 - 1:.0f}" marker-end="url(#a)"/>'
            )
    for folder, (x, y) in place.items():
        middle = x + WIDTH / 2
        out.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        out.append(
            f'<text x="{middle:.0f}" y="{y + 19:.0f}" text-anchor="middle" font-size="14"'
            f' font-weight="bold">{folder}</text>'
        )
        out.append(
            f'<text x="{middle:.0f}" y="{y + 36:.0f}" text-anchor="middle" font-size="10.5">'
            f"{FOLDERS[folder][0]}</text>"
        )
    return "\n".join([*out, "</svg>", ""])


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    drawn = picture(includes(root))
    path = root / PICTURE
    if "--check" in sys.argv[1:]:
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            print(f"{PICTURE} is not that of today's includes: python3 tools/draw_layers.py")
            return 1
        print("layers picture: ok")
        return 0
    path.write_text(drawn, encoding="utf-8")
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
