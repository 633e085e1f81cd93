"""Peer of quantize_bench: casts to FP8 formats as torch.compile makes them, bf16 in, row direction.

Shapes come from `quantize_bench --list`; those with ragged blocks are left out, since here they would
have to be padded. Values count the same bytes as ours, and `ratio` is to PyTorch's own copy.
"""

import json
import statistics
import subprocess
import time

import torch
from common import parser, serve

ROTATED_BYTES = 128 << 20  # inputs of one shape: past the caches
FP8_MAX = 448.0


def fp8_tensor(x):
    scale = FP8_MAX / x.abs().amax().float().clamp(min=1e-30)
    return (x.float() * scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), 1 / scale


def fp8_block_1x128(x):
    blocks = x.view(x.shape[0], -1, 128).float()
    scale = FP8_MAX / blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    codes = (blocks * scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(x.shape), (1 / scale).squeeze(-1)


def mxfp8(x):
    blocks = x.view(x.shape[0], -1, 32).float()
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    exponent = torch.ceil(torch.log2(amax / FP8_MAX))
    codes = (blocks * torch.exp2(-exponent)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(x.shape), (exponent + 127).to(torch.uint8).squeeze(-1)


# Name of the row, the cast, elements of a block, passes over the input.
CASTS = [("quantize.fp8_tensor.row", fp8_tensor, 1, 2),
         ("quantize.fp8_block_1x128.row", fp8_block_1x128, 128, 1),
         ("quantize.mxfp8.row", mxfp8, 32, 1)]


def milliseconds(run, device, seconds=0.3):
    def finish():
        if device == "cuda":
            torch.cuda.synchronize()
    run(0)
    finish()
    times, start = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        for k in range(4):
            run(4 * len(times) + k)
        finish()
        times.append((time.perf_counter() - begin) * 1e3 / 4)
    return statistics.median(times)


def main():
    p = parser()
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    a, shape_options = p.parse_known_args()
    torch.set_num_threads(a.threads)
    listing = subprocess.run([a.bench, "--list", "--device", a.device, *shape_options], check=True,
                             capture_output=True, text=True).stdout
    shapes = [json.loads(line) for line in listing.splitlines()]
    casts = [(name, torch.compile(cast), block, passes) for name, cast, block, passes in CASTS]

    def copy_rate():
        x = torch.zeros(256 << 20, dtype=torch.uint8, device=a.device)
        y = torch.empty_like(x)
        return 2 * x.numel() / milliseconds(lambda _: y.copy_(x), a.device) / 1e6

    def round_of_rows():
        ceiling = copy_rate()
        for shape in shapes:
            rows, cols = shape["rows"], shape["cols"]
            n = max(2, min(8, ROTATED_BYTES // (2 * rows * cols) + 1))
            xs = [torch.randn(rows, cols, device=a.device).to(torch.bfloat16) for _ in range(n)]
            for name, cast, block, passes in casts:
                if cols % block:
                    continue
                codes, scales = cast(xs[0])
                moved = passes * xs[0].nbytes + codes.nbytes + (scales.nbytes if block > 1 else 0)
                ms = milliseconds(lambda i: cast(xs[i % n]), a.device)
                rate = moved / ms / 1e6
                yield {"name": name, "case": shape["case"], "device": a.device,
                       "peer": "torch.compile", "value": round(rate, 4), "unit": "GB/s",
                       "ms": round(ms, 4), "ratio": round(rate / ceiling, 3), "against": "copy"}

    serve(round_of_rows)


if __name__ == "__main__":
    main()
