#!/usr/bin/env python3
"""What a call of the PyTorch package takes of the host's time, beside torch.add on the same tensors.

  PYTHONPATH=python bench/torch_host.py --device cuda     # rows, one JSON object a line

The tensors are small, so that on a GPU the host is what takes the time; nothing waits between calls. Each
figure is the least of nine rounds of 100 calls, which take turns with rounds of torch.add: `of_add` is the
ratio of both leasts.
"""

import argparse
import json
import time

import torch

from moiety import nn, ops

ROUNDS, CALLS = 9, 100


def microseconds(calls, device):
    """The least time of each call, in rounds that take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[number] = min(best[number], time.perf_counter() - start)
    return [1e6 * seconds / CALLS for seconds in best]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = p.parse_args().device
    torch.set_default_device(device)
    if device == "cpu":
        torch.set_num_threads(1)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    w = torch.randn(4, 64, 64, dtype=torch.bfloat16)
    splits = torch.tensor([16, 16, 16, 16])
    out = torch.empty_like(x)
    asked = x.clone().requires_grad_()
    mlp = nn.GroupedMLP(4, 64, 64, dtype=torch.bfloat16)

    def add():
        torch.add(x, x)

    def training_step():
        mlp(asked, splits).backward(x)

    calls = {
        "torch.add": add,
        "grouped_linear_out": lambda: torch.ops.moiety.grouped_linear_out.default(x, w, splits, None, None, out),
        "grouped_linear": lambda: ops.grouped_linear(x, w, splits),
        "grouped_linear with gradients": lambda: ops.grouped_linear(asked, w, splits),
        "activation": lambda: ops.activation(x),
        "GroupedMLP forward": lambda: mlp(x, splits),
        "GroupedMLP forward and backward": training_step,
    }
    for name, call in calls.items():
        with torch.set_grad_enabled(name.startswith("GroupedMLP") or name.endswith("gradients")):
            call()
            us, least = microseconds([call, add], device)
        print(json.dumps({"name": f"torch_host.{name}", "case": "64x64 of 4", "device": device,
                          "value": round(us, 2), "unit": "us", "ms": round(us / 1e3, 5),
                          "of_add": round(us / least, 2), "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
