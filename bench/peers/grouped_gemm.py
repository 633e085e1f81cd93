"""Peer of grouped_gemm_bench: the same products in PyTorch, as torch._grouped_mm and as a loop.

Cases come from `grouped_gemm_bench --list`. Weights are [E, N, D]; x is [R, D], y and dy [R, N], rows
sorted by expert. The loop writes into outputs that exist already. Gradients of bf16 weights are bf16
here (PyTorch has no fp32 output for bf16 operands), fp32 in ours.
"""

import json
import statistics
import subprocess
import sys
import time

import torch
from common import parser, serve

ROTATED_BYTES = 128 << 20  # operands of one case, all copies: past the caches
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Case:
    def __init__(self, spec, generator):
        self.name, self.label, self.op = spec["name"], spec["case"], spec["op"]
        self.counts = spec["counts"]
        E, D, N, R = spec["E"], spec["D"], spec["N"], sum(spec["counts"])
        dtype = DTYPES[spec["dtype"]]
        self.flop = 2 * R * D * N
        self.live = [e for e in range(E) if self.counts[e] > 0]
        self.ends = torch.tensor(self.counts).cumsum(0).int()
        copies = max(2, ROTATED_BYTES // (dtype.itemsize * (E * D * N + R * (D + N))) + 1)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        self.operands = [(normal(R, D), normal(R, N), normal(E, N, D)) for _ in range(min(copies, 8))]
        out = {"fwd": (R, N), "dgrad": (R, D), "wgrad": (E, N, D)}[self.op]
        self.out = torch.empty(out, dtype=dtype)

    def loop(self, x, y, w):
        xs, ys = x.split(self.counts), y.split(self.counts)
        outs = self.out if self.op == "wgrad" else self.out.split(self.counts)
        for e in self.live:
            if self.op == "fwd":
                torch.mm(xs[e], w[e].T, out=outs[e])
            elif self.op == "dgrad":
                torch.mm(ys[e], w[e], out=outs[e])
            else:
                torch.mm(ys[e].T, xs[e], out=outs[e])
        return self.out

    def grouped(self, x, y, w):
        if self.op == "fwd":
            return torch._grouped_mm(x, w.transpose(1, 2), offs=self.ends)
        if self.op == "dgrad":
            return torch._grouped_mm(y, w, offs=self.ends)
        return torch._grouped_mm(y.T, x, offs=self.ends)

    def milliseconds(self, product, seconds=0.3):
        times, start = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - start < seconds:
            operands = self.operands[len(times) % len(self.operands)]
            begin = time.perf_counter()
            product(*operands)
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)


def peers_of(case):
    peers = {"torch loop": case.loop, "torch._grouped_mm": case.grouped}
    try:
        torch.testing.assert_close(case.grouped(*case.operands[0]), case.loop(*case.operands[0]),
                                   rtol=0.05, atol=0.5)
    except RuntimeError as error:
        print(f"{case.name} {case.label}: no torch._grouped_mm: {error}", file=sys.stderr)
        del peers["torch._grouped_mm"]
    return peers


def main():
    p = parser()
    p.add_argument("--dtype", choices=sorted(DTYPES), help="cases of this dtype alone")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    command = [a.bench, "--list", *(["--dtype", a.dtype] if a.dtype else [])]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    generator = torch.Generator().manual_seed(1)
    specs = [json.loads(line) for line in listing.splitlines()]

    def round_of_rows():
        for spec in specs:
            case = Case(spec, generator)
            for peer, product in peers_of(case).items():
                product(*case.operands[0])
                ms = case.milliseconds(product)
                yield {"name": case.name, "case": case.label, "device": "cpu", "peer": peer,
                       "value": round(case.flop / ms / 1e9, 4), "unit": "TFLOP/s", "ms": round(ms, 4)}

    serve(round_of_rows)


if __name__ == "__main__":
    main()
