#!/usr/bin/env python3
"""Trains one MoE layer of Moiety on a toy problem: tokens of eight kinds, each with a map of its own,
so that experts have something to specialize in.

    python examples/pytorch/moe_layer.py [--steps 300] [--check]
"""

import argparse
import time

import torch

import moiety.nn


def batch(maps, tokens, generator):
    kind = torch.randint(len(maps), (tokens,), generator=generator)
    x = torch.randn(tokens, maps.shape[-1], generator=generator) * 0.5
    x[torch.arange(tokens), kind] += 4  # the kind shows in the input
    return x, torch.einsum("td,tde->te", x, maps[kind])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--check", action="store_true", help="fail unless the layer learns")
    wanted = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    maps = torch.randn(8, 32, 32, generator=generator) / 32 ** 0.5
    layer = moiety.nn.MoELayer(d_model=32, d_ffn=64, num_experts=8, top_k=2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3, weight_decay=0)
    began, first = time.perf_counter(), None
    for step in range(1, wanted.steps + 1):
        x, target = batch(maps, 512, generator)
        out = layer(x)
        loss = (out.y - target).square().mean()
        (loss + 0.01 * out.aux_loss + 0.001 * out.z_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        first = first or loss.item()
        if step == 1 or step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}  balance {out.aux_loss.item():.3f}  "
                  f"busiest expert {out.counts.max().item() / out.counts.sum().item():.2f}")
    print(f"{wanted.steps * 512 / (time.perf_counter() - began):,.0f} tokens a second")
    if wanted.check and not loss.item() < 0.3 * first:
        raise SystemExit(f"moe_layer.py: the loss is {loss.item():.4f}, {first:.4f} at first")


if __name__ == "__main__":
    main()
