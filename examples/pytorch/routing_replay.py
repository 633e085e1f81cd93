#!/usr/bin/env python3
"""Replays a routing: what another run (a rollout engine, a step before an update) chose is repeated,
while weights, losses and gradients are those of the live router.

    python examples/pytorch/routing_replay.py [--check]
"""

import argparse

import torch

import moiety.nn


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="fail unless the choice is repeated")
    wanted = parser.parse_args()

    torch.manual_seed(0)
    layer = moiety.nn.MoELayer(d_model=32, d_ffn=64, num_experts=16, top_k=4)
    x = torch.randn(256, 32)
    recorded = layer(x).idx
    with torch.no_grad():  # the router has moved since
        layer.router.weight.add_(torch.randn_like(layer.router.weight), alpha=0.05)
    live, replayed = layer(x), layer(x, idx=recorded)
    moved = (live.idx.sort(-1).values != recorded.sort(-1).values).any(-1).float().mean().item()
    print(f"{100 * moved:.0f} % of the tokens would choose other experts now")
    replayed.y.square().mean().backward()
    gradient = layer.router.weight.grad.norm().item()
    print(f"replayed: the recorded choice, and a gradient of norm {gradient:.2e} for the live router")
    if wanted.check and not (torch.equal(replayed.idx, recorded) and moved > 0 and gradient > 0):
        raise SystemExit("routing_replay.py: the choice was not repeated")


if __name__ == "__main__":
    main()
