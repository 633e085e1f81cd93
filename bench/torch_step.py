#!/usr/bin/env python3
"""A training step of a transformers Qwen3-MoE of four layers (those of Qwen3-30B-A3B), compiled, with
"moiety" experts and with transformers' "grouped_mm": milliseconds and the peak of memory.

  PYTHONPATH=python bench/torch_step.py --device cuda     # rows, one JSON object a line

Both models start from the same weights, get the same tokens and take turns; the optimizer is torch's fused
AdamW. On a CPU (the default) the model is small.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import torch
import transformers

import moiety.hf

LARGE = dict(vocab_size=32768, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32,
             num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
             num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
SMALL = dict(LARGE, vocab_size=1024, hidden_size=256, num_attention_heads=4, head_dim=64,
             intermediate_size=512, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4)


class Step:
    def __init__(self, implementation, sizes, tokens, device, compiled, layers):
        torch.manual_seed(0)
        self.device, self.tokens = device, tokens
        self.model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3MoeConfig(**sizes), dtype=torch.bfloat16, experts_implementation=implementation)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call = torch.compile(self.model) if compiled and not layers else self.model
        for layer in self.model.model.layers if compiled and layers else ():
            layer.compile()

    def run(self):
        loss = self.call(self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def milliseconds(self, runs):
        times = []
        for _ in range(runs):
            wait(self.device)
            start = time.perf_counter()
            self.run()
            wait(self.device)
            times.append(1e3 * (time.perf_counter() - start))
        return times


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measured(implementation, a, rounds, tokens):
    """{ms, peak_mib, losses} of one implementation; its model is gone afterwards."""
    torch.compiler.reset()
    began = time.perf_counter()
    step = Step(implementation, LARGE if a.device == "cuda" else SMALL, tokens, a.device, not a.eager, a.layers)
    losses = [step.run() for _ in range(3)]
    wait(a.device)
    print(f"torch_step: {implementation} is ready after {time.perf_counter() - began:.0f} s", file=sys.stderr,
          flush=True)
    if a.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {"ms": statistics.median(step.milliseconds(rounds)), "losses": [round(float(x), 4) for x in losses]}
    if a.device == "cuda":
        found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2 ** 20)
        del step
        gc.collect()  # compiled layers stand in cycles, and hold the weights
        torch.cuda.empty_cache()
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--tokens", type=int, help="of a step (8192, on a CPU 512)")
    p.add_argument("--steps", type=int, default=20, help="timed in a turn")
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--eager", action="store_true", help="without torch.compile")
    p.add_argument("--layers", action="store_true", help="compile the decoder's layers alone, which is sooner done")
    a = p.parse_args()
    moiety.hf.register(strict=True)
    torch.set_default_device(a.device)
    count = a.tokens or (8192 if a.device == "cuda" else 512)
    sizes = LARGE if a.device == "cuda" else SMALL
    torch.manual_seed(1)
    tokens = torch.randint(0, sizes["vocab_size"], (2, count // 2))
    turns = [{name: measured(name, a, a.steps, tokens) for name in ("grouped_mm", "moiety")}
             for _ in range(a.turns)]
    rows = {}
    for name in ("grouped_mm", "moiety"):
        ms = statistics.median(turn[name]["ms"] for turn in turns)
        kind = " eager" if a.eager else " layers" if a.layers else ""
        rows[name] = {"name": "torch_step" + kind, "case": f"qwen3 x4, {count} tokens",
                      "device": a.device, "value": round(count / ms * 1e3), "unit": "tokens/s",
                      "ms": round(ms, 3), **{k: v for k, v in turns[-1][name].items() if k != "ms"},
                      "torch": torch.__version__}
    rows["grouped_mm"]["peer"] = "grouped_mm"
    rows["moiety"] |= {"ratio": round(rows["grouped_mm"]["ms"] / rows["moiety"]["ms"], 3),
                       "against": "grouped_mm"}
    for row in (rows["moiety"], rows["grouped_mm"]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
