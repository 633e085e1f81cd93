#!/usr/bin/env python3
"""Draws pictures of docs/parallelism.md: the two grids of eight ranks, a weight that is gathered for
its use and whose gradient is reduced, and the way of a token to its experts and back.

  python3 docs/images/make_parallelism.py      writes grids.svg, gather.svg and token.svg beside it

Pictures have a background of their own and follow the reader's light or dark scheme.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent

STYLE = """
  .ground { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .head { font-weight: 600 } .quiet { fill: #59636e; font-size: 12px }
  .array { fill: #f3f5f7; stroke: #818b98 } .edge { fill: none; stroke: #818b98 }
  .line { stroke: #818b98; fill: none; stroke-width: 1.5 }
  .c0 { fill: #2f81f7 } .c1 { fill: #e8710a } .c2 { fill: #8957e5 } .c3 { fill: #1f883d }
  .pale { fill-opacity: 0.32 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #3d444d } text { fill: #e6edf3 } .quiet { fill: #9ca7b3 }
    .array { fill: #1b222b; stroke: #656c76 } .edge { stroke: #656c76 } .line { stroke: #9ca7b3 }
  }
"""
TIP = ('<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
       'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#818b98"/></marker></defs>')


class Picture:
    def __init__(self, width, height, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}" role="img">', f"<title>{title}</title>",
                      f"<style>{STYLE}</style>", TIP]
        self.box(0.5, 0.5, width - 1, height - 1, "ground", 8)

    def box(self, x, y, w, h, style, radius=0):
        self.parts.append(f'<rect x="{x:.5g}" y="{y:.5g}" width="{w:.5g}" height="{h:.5g}" '
                          f'rx="{radius}" class="{style}"/>')

    def cell(self, x, y, w, h, style, words=""):
        self.box(x, y, w, h, f"{style} pale")
        self.box(x, y, w, h, "edge")
        self.text(x + w / 2, y + h / 2 + 5, words, anchor="middle")

    def arrow(self, x1, y1, x2, y2):
        self.parts.append(f'<path d="M{x1:.5g} {y1:.5g}L{x2:.5g} {y2:.5g}" class="line" '
                          'marker-end="url(#tip)"/>')

    def text(self, x, y, words, style="", anchor="start"):
        self.parts.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{style}" text-anchor="{anchor}">'
                          f"{words}</text>")

    def save(self, name):
        (HERE / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>\n"]))


def grids():
    """The same eight ranks, numbered, in both grids; equal colors hold equal shards."""
    p = Picture(900, 330, "Eight ranks in the dense and in the expert grid")
    p.text(24, 32, "Eight ranks: tp 2, gtp 2, dp 2, and ep 4, egtp 2, edp 1", "head")
    p.text(24, 52, "every rank stands in both grids; on the left, ranks of one color store the same "
           "rows", "quiet")

    w, h, left = 74, 46, 110
    p.text(24, 86, "dense grid", "head")
    p.text(left + w, 108, "dp 0", "quiet", "middle")
    p.text(left + 3 * w + 24, 108, "dp 1", "quiet", "middle")
    for gtp in range(2):
        p.text(left - 14, 146 + gtp * h, f"gtp {gtp}", "quiet", "end")
        for dp in range(2):
            for tp in range(2):
                p.cell(left + (2 * dp + tp) * w + 24 * dp, 118 + gtp * h, w, h,
                       f"c{tp + 2 * gtp}", str(tp + 2 * (gtp + 2 * dp)))
    for column, x in enumerate([0, w, 2 * w + 24, 3 * w + 24]):
        p.text(left + x + w / 2, 230, f"tp {column % 2}", "quiet", "middle")
    p.text(24, 262, "Across: each has a half of the heads (tp).")
    p.text(24, 282, "Down: each stores half the rows of that (gtp).")
    p.text(24, 302, "Side by side: copies (dp).")

    left = 580
    p.text(left - 80, 86, "expert grid", "head")
    p.text(left + 2 * w, 108, "edp 0", "quiet", "middle")
    for egtp in range(2):
        p.text(left - 14, 146 + egtp * h, f"egtp {egtp}", "quiet", "end")
        for ep in range(4):
            x, y = left + ep * w, 118 + egtp * h
            p.cell(x, y, w, h, f"c{ep}", str(ep + 4 * egtp))
            p.box(x + (0 if egtp == 0 else w / 2), y + h - 6, w / 2, 6, f"c{ep}")
    for ep in range(4):
        p.text(left + ep * w + w / 2, 230, f"ep {ep}", "quiet", "middle")
    p.text(left - 80, 262, "Across: each has a quarter of the experts (ep).")
    p.text(left - 80, 282, "Down: each stores half the rows of these (egtp);")
    p.text(left - 80, 302, "the bar says which. There are no copies.")
    p.save("grids")


def gather():
    """One weight over gtp = 2 in a step, on rank 0."""
    p = Picture(900, 330, "A weight over gtp = 2 in a step")
    p.text(24, 32, "One weight over gtp = 2, as rank 0 sees it", "head")
    p.text(24, 52, "blue rows are stored on rank 0, orange ones on rank 1", "quiet")

    def weight(x, y):
        p.cell(x, y, 76, 42, "c0")
        p.cell(x, y + 42, 76, 42, "c1")

    p.text(70, 84, "shard", anchor="middle")
    p.cell(32, 96, 76, 42, "c0")
    p.text(70, 158, "codes and scales", "quiet", "middle")
    p.arrow(116, 138, 198, 138)
    p.text(157, 128, "gather", "quiet", "middle")
    p.text(244, 84, "slot", anchor="middle")
    weight(206, 96)
    p.text(244, 200, "the whole weight", "quiet", "middle")
    p.arrow(290, 138, 372, 138)
    p.text(331, 128, "GEMM", "quiet", "middle")
    p.text(416, 84, "y, and then dx", anchor="middle")
    p.box(380, 96, 72, 84, "array")
    p.text(416, 200, "of own tokens", "quiet", "middle")
    p.arrow(460, 138, 542, 138)
    p.text(501, 128, "GEMM", "quiet", "middle")
    p.text(588, 84, "send slot", anchor="middle")
    weight(550, 96)
    p.text(588, 200, "dW of own tokens", "quiet", "middle")
    p.arrow(634, 138, 740, 138)
    p.text(687, 110, "own rows of all", "quiet", "middle")
    p.text(687, 128, "peers, summed", "quiet", "middle")
    p.text(786, 84, "main_grad", anchor="middle")
    p.cell(748, 117, 76, 42, "c0")
    p.text(786, 178, "fp32, own rows", "quiet", "middle")

    p.text(24, 240, "The slot is free for the next weight when its last reader is done; the send "
           "slot when every peer has read its rows.")
    p.text(24, 264, "Gathers run ahead of their use and reduces behind it, on lanes of their own; "
           "the plan says when, and which slot.")
    p.text(24, 288, "The optimizer updates own rows alone and makes the codes that the next step "
           "gathers.")
    p.save("gather")


def token():
    """A token whose three experts are on two ranks."""
    p = Picture(900, 372, "The way of a token to its experts and back")
    p.text(24, 32, "A token of rank 0 with three choices: expert 1 of rank 0, experts 4 and 6 of "
           "rank 1", "head")
    p.text(24, 52, "its row crosses once in each direction, whatever the number of its experts there",
           "quiet")
    h, experts = 30, {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    tops = {0: 112, 1: 242}
    for x, name in ((130, "prepare"), (300, "dispatch"), (555, "experts"), (740, "combine")):
        p.text(x, 88, name, "head", "middle")
    for rank, top in tops.items():
        p.text(24, top + 64, f"rank {rank}", "head")
        for i, e in enumerate(experts[rank]):
            chosen = e in (1, 4, 6)
            p.cell(400, top + i * h, 80, h, "c0" if chosen else "array", "row" if chosen else "")
            p.cell(520, top + i * h, 80, h, f"c{rank + 1}" if chosen else "array", f"expert {e}")
            if chosen:
                p.arrow(480, top + (i + 0.5) * h, 517, top + (i + 0.5) * h)
                p.arrow(600, top + (i + 0.5) * h, 657, top + 2 * h)
        p.cell(660, top + 1.5 * h, 60, h, f"c{rank + 1}", "sum")
    here, there = tops[0] + 1.5 * h, tops[1] + 1.5 * h
    p.cell(100, here, 60, h, "c0", "x")
    p.cell(270, there, 60, h, "c0", "x")
    p.arrow(160, here + 15, 397, here + 15)
    p.arrow(160, here + 15, 267, there + 12)
    for i in (0, 2):
        p.arrow(330, there + 15, 397, tops[1] + (i + 0.5) * h)
    p.cell(800, here, 70, h, "c3", "out")
    p.arrow(720, here + 15, 797, here + 15)
    p.arrow(720, there + 12, 815, here + h + 3)
    p.text(196, 260, "one row", "quiet", "end")
    p.text(792, 260, "one row", "quiet")
    p.save("token")


grids()
gather()
token()
