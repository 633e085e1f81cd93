#!/usr/bin/env python3
"""One training step of a small Qwen3-MoE of transformers (random weights) with every implementation of
its experts: how long it takes, and how far its gradients are from transformers' own loop.

    python examples/pytorch/hf_experts.py [--tokens 1024] [--dtype bfloat16] [--check]
"""

import argparse
import copy
import time

import torch
import transformers

import moiety.hf


def make_model(dtype):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=512, moe_intermediate_size=128,
        num_experts=32, num_experts_per_tok=4, norm_topk_prob=True)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def step(model, tokens):
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, help="of a step (1024, with --check 256)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--check", action="store_true", help="fail if gradients differ")
    wanted = parser.parse_args()

    moiety.hf.register()
    count = wanted.tokens or (256 if wanted.check else 1024)
    dtype = getattr(torch, wanted.dtype)
    bound = 1e-4 if dtype == torch.float32 else 0.1
    start, gradients = make_model(dtype), {}
    tokens = torch.randint(0, 512, (4, count // 4), generator=torch.Generator().manual_seed(1))
    for implementation in ("eager", "batched_mm", "grouped_mm", "moiety"):
        model = copy.deepcopy(start)
        model.set_experts_implementation(implementation)
        loss, times = step(model, tokens), []
        for _ in range(3):
            began = time.perf_counter()
            step(model, tokens)
            times.append(time.perf_counter() - began)
        gradients[implementation] = torch.cat(
            [p.grad.flatten().double() for n, p in model.named_parameters() if "experts" in n])
        exact = gradients["eager"]
        far = ((gradients[implementation] - exact).norm() / exact.norm()).item()
        print(f"{implementation:<11} {1000 * min(times):8.1f} ms a step   loss {loss:.6f}   "
              f"experts' gradients {far:.1e} from eager's")
        if wanted.check and implementation == "moiety" and not far < bound:
            raise SystemExit(f"hf_experts.py: gradients are {far:.1e} from eager's, at most {bound:.0e}")


if __name__ == "__main__":
    main()
