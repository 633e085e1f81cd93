#!/usr/bin/env python3
"""A weight in every format, with its size, error and time; then in NVFP4, cast anew in place as its
masters change, with the bits of casting it whole.

    python examples/pytorch/nvfp4_cast.py [--check] [--device cuda]
"""

import argparse
import time

import torch

from moiety import quant


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a bit is not as it must be")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    a = parser.parse_args()
    torch.set_default_device(a.device)
    torch.manual_seed(0)
    rows, cols = (96, 160) if a.check else (4096, 2048)
    masters = torch.randn(rows, cols) / cols ** 0.5

    print(f"{'format':<15} {'bytes/element':>13} {'error':>8} {'ms':>8}")
    for name in quant.FORMATS:
        start = time.perf_counter()
        q = quant.quantize(masters, name)
        if a.device == "cuda":
            torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - start)
        size = sum(t.numel() * t.element_size() for t in (q.row, q.row_scales) if t is not None)
        error = (quant.dequantize(q) - masters).norm() / masters.norm()
        print(f"{name:<15} {size / masters.numel():>13.3f} {error:>8.4f} {ms:>8.2f}")

    # An optimizer that keeps masters casts into the weight that is there, every step.
    weight = quant.quantize(masters.bfloat16(), "nvfp4_tile", "both")
    cast = quant.PartialCast([masters], [weight], [(0, masters.numel())])
    masters.mul_(1.25)
    cast.step()
    weight = quant.transpose(weight)  # columns follow from the rows' codes
    want = quant.quantize(masters.bfloat16(), "nvfp4_tile", "both")
    same = all(torch.equal(x.view(torch.uint8), y.view(torch.uint8))
               for x, y in [(weight.row, want.row), (weight.col, want.col),
                            (weight.row_scales, want.row_scales)])
    print("a step of the partial cast is the cast of the whole:", "yes" if same else "NO")
    if a.check and not same:
        raise SystemExit("nvfp4_cast.py: the partial cast is not the cast of the whole")


if __name__ == "__main__":
    main()
