"""Peer of grouped_gemm_cuda_bench: the same products in PyTorch on a GPU, in bf16.

Shapes and routing come from `grouped_gemm_cuda_bench --list`. torch._grouped_mm has weights as
[E, N, C] (as ours) and as [E, C, N]; the loop calls torch.mm for every expert, with sizes that the
host knows. Gathered rows are copied first (index_select). PyTorch has no fp32 output for bf16
operands: fp32 gradients are a bf16 product that is then converted, or added. Timed as ours: 0.5 s of
rest, 5 runs, the median of 20.
"""

import json
import statistics
import subprocess
import sys
import time

import torch
from common import parser, serve, wanted


def times_of(run):
    """The times of 20 runs, in ms, from rest."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    torch.cuda.synchronize()
    time.sleep(0.5)
    for _ in range(5):
        run()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def milliseconds(run):
    return statistics.median(times_of(run))


def steady_milliseconds(run, ms):
    """Of a run in a burst of a second, when power decides; alone it takes `ms`."""
    n = max(int(1000 / ms), 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / n


def figures_of(call, flop, absent, options):
    """A row's figures; where the call is refused, nothing but the reason on standard error."""
    try:
        ms = milliseconds(call)
    except RuntimeError as error:
        print(f"{absent}: {error}", file=sys.stderr)
        return {}
    figures = {"value": round(flop / ms / 1e9, 4), "unit": "TFLOP/s", "ms": round(ms, 4)}
    if options.steady:
        figures["steady"] = round(flop / steady_milliseconds(call, ms) / 1e9, 1)
    return figures


class Experts:
    """Operands of one layer: T tokens, D model, F ffn, E experts, R rows."""

    def __init__(self, spec):
        self.case, self.counts = spec["case"], spec["counts"]
        T, D, F, E = spec["T"], spec["D"], spec["F"], spec["E"]
        R = sum(self.counts)
        self.flop = 2 * R * D * F
        self.ends = torch.tensor(self.counts).cumsum(0).int()
        self.source = torch.tensor(spec["source"])

        def normal(*shape):
            return torch.randn(shape, dtype=torch.bfloat16)

        self.x_TD, self.x, self.h, self.a = normal(T, D), normal(R, D), normal(R, 2 * F), normal(R, F)
        self.w1, self.w2 = normal(E, 2 * F, D), normal(E, D, F)
        self.sums = {}

    def rows(self, x):
        return x.index_select(0, self.source) if x is self.x_TD else x

    def grouped(self, x, w):
        """x w^T for each expert."""
        return torch._grouped_mm(self.rows(x), w.transpose(1, 2), offs=self.ends)

    def loop(self, x, w):
        return [torch.mm(rows, w[e].T) for e, rows in enumerate(self.rows(x).split(self.counts))]

    def products(self):
        """(name, operations, {peer: call})"""
        turned = {id(w): w.transpose(1, 2).contiguous() for w in (self.w1, self.w2)}

        def by_rows(name, n, x, w, forward):
            # Seen from the product, forward reads w as it lies and dgrad reads it turned.
            right = w if forward else w.transpose(1, 2)
            other = turned[id(w)].transpose(1, 2) if forward else turned[id(w)]
            return name, n * self.flop, {
                "_grouped_mm [E,N,C]": lambda: self.grouped(x, right),
                "_grouped_mm [E,C,N]": lambda: self.grouped(x, other),
                "torch.mm loop": lambda: self.loop(x, right)}

        def weights(name, n, dy, x, finish=lambda g: g):
            return name, n * self.flop, {
                "_grouped_mm": lambda: finish(
                    torch._grouped_mm(self.rows(dy).T, self.rows(x), offs=self.ends))}

        def added(gradient):
            if gradient.shape not in self.sums:
                self.sums[gradient.shape] = torch.zeros_like(gradient, dtype=torch.float32)
            return self.sums[gradient.shape].add_(gradient)

        t = self.x_TD
        yield by_rows("fc1", 2, self.x, self.w1, True)
        yield by_rows("fc1 gathered", 2, t, self.w1, True)
        yield by_rows("fc2", 1, self.a, self.w2, True)
        yield by_rows("fc2 dgrad", 1, self.x, self.w2, False)
        yield by_rows("fc2 dgrad gathered", 1, t, self.w2, False)
        yield by_rows("fc1 dgrad", 2, self.h, self.w1, False)
        for suffix, finish in (("", lambda g: g), (" fp32", torch.Tensor.float),
                               (" fp32 added", added)):
            yield weights("fc2 wgrad" + suffix, 1, self.x, self.a, finish)
            yield weights("fc2 wgrad gathered" + suffix, 1, t, self.a, finish)
            yield weights("fc1 wgrad" + suffix, 2, self.h, self.x, finish)
            yield weights("fc1 wgrad gathered" + suffix, 2, self.h, t, finish)


def rows_of(spec, options):
    experts = Experts(spec)
    for name, flop, peers in experts.products():
        if not wanted(name, options.only):
            continue
        for peer, call in peers.items():
            if figures := figures_of(call, flop, f"{name} {experts.case}: no {peer}", options):
                yield {"name": "grouped_gemm." + name, "case": experts.case, "device": "cuda",
                       "peer": peer, **figures}


def serve_shapes(rows_of):
    """Serves rows_of(shape, options) for the shapes that our benchmark lists."""
    p = parser()
    p.add_argument("--device", choices=["cuda"], default="cuda")
    p.add_argument("--only", default="", help="rows whose names hold one of these words, or are =NAME")
    p.add_argument("--steady", action="store_true", help="also a burst of a second")
    a, shapes = p.parse_known_args()  # --shape, --tokens and --spread are our benchmark's
    torch.set_default_device(a.device)
    torch.manual_seed(1)
    command = [a.bench, "--list", *shapes]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    specs = [json.loads(line) for line in listing.splitlines()]

    def round_of_rows():
        for spec in specs:
            yield from rows_of(spec, a)
            torch.cuda.empty_cache()

    serve(round_of_rows)


if __name__ == "__main__":
    serve_shapes(rows_of)
