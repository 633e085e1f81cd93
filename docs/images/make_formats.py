#!/usr/bin/env python3
"""Draws the pictures of docs/formats.md: the arrays of every format, with the bytes of one block
(quantized by tests/golden/make_golden.py), the bits of the codes, and the layouts of scales.

  python3 docs/images/make_formats.py      writes format-*.svg beside this file

Pictures have a background of their own and follow the reader's light or dark scheme.
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests/golden"))
import make_golden as golden  # noqa: E402

STYLE = """
  .ground { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .mono { font-family: ui-monospace, Consolas, Menlo, monospace; font-size: 12px }
  .head { font-weight: 600 }
  .quiet { fill: #59636e; font-size: 12px }
  .array { fill: #f3f5f7; stroke: #818b98 }
  .line { stroke: #c5ccd3; fill: none }
  .row { fill: #2f81f7; stroke: none } .col { fill: #e8710a; stroke: none }
  .both { fill: #8957e5; stroke: none } .pad { fill: #c3cad2; stroke: none }
  .fourth { fill: #1f883d; stroke: none } .pale { fill-opacity: 0.35 } .on { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #3d444d } text { fill: #e6edf3 } .quiet { fill: #9ca7b3 }
    .array { fill: #1b222b; stroke: #656c76 } .line { stroke: #3d444d } .pad { fill: #4b545f }
  }
"""


class Picture:
    def __init__(self, width, height, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}" role="img">', f"<title>{title}</title>",
                      f"<style>{STYLE}</style>"]
        self.box(0.5, 0.5, width - 1, height - 1, "ground", 8)

    def box(self, x, y, w, h, style, radius=0):
        self.parts.append(f'<rect x="{x:.5g}" y="{y:.5g}" width="{w:.5g}" height="{h:.5g}" '
                          f'rx="{radius}" class="{style}"/>')

    def line(self, x1, y1, x2, y2):
        self.parts.append(f'<path d="M{x1:.5g} {y1:.5g}L{x2:.5g} {y2:.5g}" class="line"/>')

    def text(self, x, y, words, style="", anchor="start"):
        self.parts.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{style}" text-anchor="{anchor}">'
                          f"{words}</text>")

    def byte(self, x, y, word, style, width=26):
        self.box(x, y, width - 2, 20, style, 3)
        self.text(x + (width - 2) / 2, y + 14.5, word, "mono on", "middle")

    def save(self, name):
        (HERE / f"format-{name}.svg").write_text("\n".join([*self.parts, "</svg>\n"]))


K, M = 160, 120           # of X, in units of the picture
BLOCKS_K, BLOCKS_M = 4, 3  # blocks along a row and along a column
TOP = 66


class Array:
    """A rectangle with a title, its shape, and lines between its columns and rows of blocks."""

    def __init__(self, picture, x, name, shape, width, height, columns=1, rows=1):
        self.picture, self.x, self.width, self.height = picture, x, width, height
        picture.text(x, TOP - 26, name, "mono head")
        picture.text(x, TOP - 10, shape, "mono quiet")
        picture.box(x, TOP, width, height, "array")
        for i in range(1, columns):
            picture.line(x + i * width / columns, TOP, x + i * width / columns, TOP + height)
        for i in range(1, rows):
            picture.line(x, TOP + i * height / rows, x + width, TOP + i * height / rows)

    def mark(self, x, y, w, h, style):
        """A part, in fractions of the array; at least as large as can be seen."""
        w, h = max(w * self.width, 5), max(h * self.height, 5)
        left = min(x * self.width, self.width - w)
        self.picture.box(self.x + left, TOP + min(y * self.height, self.height - h), w, h, style)


def strip(p, y, style, data, scale, words):
    """The example: sixteen numbers, their bytes, and the scale of the block."""
    p.text(24, y - 8, "x = −7.5, −6.5, …, 7.5 (16 in one row):", "quiet")
    x = 24
    for byte in data.ravel():
        p.byte(x, y, f"{byte:02X}", style)
        x += 26
    p.text(x + 14, y + 14.5, "scale", "quiet")
    p.byte(x + 54, y, scale, style, 14 + 7.5 * len(scale))
    p.text(24, y + 40, words, "mono quiet")


def float_text(v):
    return f"{golden.bits(v).ravel()[0]:08X} = {float(np.ravel(v)[0]):.6g}"


def exponent_text(e):
    return f"{int(e.ravel()[0]):02X} = 2^{int(e.ravel()[0]) - 127}".replace("-", "−")


def e4m3_text(code):
    return f"{int(code.ravel()[0]):02X} = {float(golden.E4M3.decode(code).ravel()[0]):g}"


class Format:
    """What there is to draw: the shapes of the arrays, and how a value comes out of them."""

    def __init__(self, name, title, kind, row, col, value, scale, note=()):
        self.name, self.title, self.kind = name, title, kind  # kind: "whole", "tile" or "line"
        self.row, self.col, self.value, self.scale, self.note = row, col, value, scale, note
        self.half = 2 if name.startswith("nvfp4") else 1

    def draw(self):
        p = Picture(900, 312, self.title)
        self.draw_row(p)
        self.draw_col(p)
        out = golden.quantize(self.name, golden.make_inputs()["ramp"], {})
        style = "row" if self.kind == "line" else "both"
        strip(p, 262, style, out["row_data"], self.scale(out), self.value)
        p.save(self.name.replace("_", "-"))

    def mark(self, array, across=1 / 4, down=1 / 3):
        """The block: in X it is the second from the left and from the top."""
        if self.kind == "whole":
            array.mark(0, 0, 1, 1, "both pale")
        elif self.kind == "tile":
            array.mark(across, down, across, down, "both")
        else:
            array.mark(across, 0.2 if down == 1 / 3 else 0.8, across, 0, "row" if down == 1 / 3 else "col")

    def draw_row(self, p):
        lines = (1, 1) if self.kind == "whole" else (BLOCKS_K, BLOCKS_M)
        x = Array(p, 24, "X", "[M, K]", K, M, *lines)
        self.mark(x)
        if self.kind == "line":
            x.mark(0.8, 1 / 3, 0, 1 / 3, "col")
        columns, rows = lines if self.kind != "line" else (BLOCKS_K, 1)
        self.mark(Array(p, 226, "row_data", self.row[0], K / self.half, M, columns, rows))
        if len(self.row) > 1:
            height = M if self.kind == "line" else M / 2
            self.mark(Array(p, 246 + K / self.half, "row_scales", self.row[1], 48, height, columns, rows))

    def draw_col(self, p):
        at = 500 if self.half == 2 else 580
        if not self.col:
            width = 0
        elif self.name == "mxfp8":
            width = 130
            Array(p, at, "col_data", self.col[0], width, M, 1, BLOCKS_M).mark(0.8, 1 / 3, 0, 1 / 3, "col")
            Array(p, at + 154, "col_scales", self.col[1], width, 36, 1, BLOCKS_M).mark(
                0.8, 1 / 3, 0, 1 / 3, "col")
        else:
            width = M / self.half
            lines = {"whole": (1, 1), "tile": (BLOCKS_M, BLOCKS_K), "line": (BLOCKS_M, 1)}[self.kind]
            self.mark(Array(p, at, "col_data", self.col[0], width, K, *lines), 1 / 3, 1 / 4)
            if len(self.col) > 1:
                self.mark(Array(p, at + width + 24, "col_scales", self.col[1], 36, K, *lines), 1 / 3, 1 / 4)
        for i, line in enumerate(self.note):
            p.text(at + width + (24 if width else 0), TOP + 16 + 18 * i, line, "quiet")


TRANSPOSED = ("the same codes,", "transposed; scales are", "row_scales, transposed")
PACKED = ("value = (code · scale) · tensor_scale, here 0.00279018; a byte has two codes, "
          "the first in its low half")
FORMATS = [
    Format("fp8_tensor", "FP8, one scale a tensor", "whole", ["[M][K]"], ["[K][M]"],
           "value = code · tensor_scale", lambda o: float_text(o["tensor_scale"]),
           ("the same codes,", "transposed")),
    Format("fp8_block_1x128", "FP8 blocks of 1×128", "line", ["[M][K]", "f32 [M][K/128]"],
           ["[K][M]", "f32 [K][M/128]"], "value = code · scale", lambda o: float_text(o["row_scales"])),
    Format("fp8_block_128x128", "FP8 tiles of 128×128", "tile", ["[M][K]", "f32 [M/128][K/128]"],
           ["[K][M]"], "value = code · scale", lambda o: float_text(o["row_scales"]), TRANSPOSED),
    Format("mxfp8", "MXFP8, 1×32", "line", ["[M][K]", "u8 [M][K/32]"], ["[M][K]", "u8 [M/32][K]"],
           "value = code · 2^(scale − 127)", lambda o: exponent_text(o["row_scales"])),
    Format("mxfp8_tile32", "MXFP8 tiles of 32×32", "tile", ["[M][K]", "u8 [M/32][K/32]"], [],
           "value = code · 2^(scale − 127)", lambda o: exponent_text(o["row_scales"]),
           ("Columns are read from row_data and row_scales:", "an element has one scale both ways.")),
    Format("nvfp4", "NVFP4, 1×16", "line", ["[M][K/2]", "u8 [M][K/16]"], ["[K][M/2]", "u8 [K][M/16]"],
           PACKED, lambda o: e4m3_text(o["row_scales"])),
    Format("nvfp4_tile16", "NVFP4 tiles of 16×16", "tile", ["[M][K/2]", "u8 [M/16][K/16]"], ["[K][M/2]"],
           PACKED, lambda o: e4m3_text(o["row_scales"]), TRANSPOSED),
]


def draw_codes():
    p = Picture(900, 236, "Bits of the codes")
    for i, (name, sign, exponent, mantissa, words) in enumerate([
            ("E2M1", 1, 2, 1, "0 0.5 1 1.5 2 3 4 6; no NaN, no infinity"),
            ("E4M3", 1, 4, 3, "to 448, steps down to 2^−9; 7F and FF are NaN, no infinity"),
            ("E5M2", 1, 5, 2, "to 57344, steps down to 2^−16; infinity and NaN as IEEE has them"),
            ("UE8M0", 0, 8, 0, "2^(code − 127), code 0 to 254; FF is NaN; no sign, no zero"),
            ("BF16", 1, 8, 7, "the upper half of float32")]):
        y, x = 40 + 38 * i, 92
        p.text(24, y + 15, name, "head")
        for count, style in ((sign, "pad"), (exponent, "row"), (mantissa, "col")):
            for _ in range(count):
                p.box(x, y, 18, 20, style, 3)
                x += 20
        p.text(436, y + 15, words, "quiet")
    x = 92
    for style, word, width in (("pad", "sign", 60), ("row", "exponent", 90), ("col", "mantissa", 90)):
        p.box(x, 14, 12, 12, style, 2)
        p.text(x + 18, 24, word, "quiet")
        x += width
    p.save("codes")


def draw_layouts():
    p = Picture(900, 320, "Layouts of scales")
    styles = ["row", "both", "col", "fourth"]
    Array(p, 24, "compact", "[R][C]", 76, 200)
    for i in range(4):
        p.box(24, TOP + 50 * i, 76, 50, styles[i])
        p.text(62, TOP + 50 * i + 30, f"r {32 * i}–{32 * i + 31}", "mono on", "middle")
    p.text(24, TOP + 222, "128 × 4 scales", "quiet")
    Array(p, 150, "sm100", "u8, tiles of 512 bytes: 32 lines of 16", 336, 200)
    for line, first in enumerate((0, 1, 2, 3, 30, 31)):
        y = TOP + line * 33 + (2 if line < 4 else 4)
        for group in range(4):
            x = 152 + 83.5 * group
            p.box(x, y, 81, 28, styles[group], 2)
            for c in range(1, 4):
                p.line(x + 20.25 * c, y + 21, x + 20.25 * c, y + 28)
            p.text(x + 40, y + 17, f"r {32 * group + first}", "mono on", "middle")
    p.text(150, TOP + 222, "byte (r % 32)·16 + (r % 128 / 32)·4 + c % 4 of a tile", "quiet")
    padded = Array(p, 540, "padded", "u8 [up(R,128)][up(C,4)]", 110, 200)
    padded.mark(0, 0, 0.8, 0.75, "row")
    padded.mark(0.8, 0, 0.2, 1, "pad")
    padded.mark(0, 0.75, 1, 0.25, "pad")
    sm90 = Array(p, 720, "sm90", "f32 [C][up(R,4)]", 156, 72)
    sm90.mark(0, 0, 0.92, 1, "row")
    sm90.mark(0.92, 0, 0.08, 1, "pad")
    p.text(720, TOP + 96, "a row a block column", "quiet")
    p.box(720, TOP + 112, 12, 12, "pad", 2)
    p.text(740, TOP + 122, "pads, written as 0", "quiet")
    p.save("scale-layouts")


if __name__ == "__main__":
    for form in FORMATS:
        form.draw()
    draw_codes()
    draw_layouts()
