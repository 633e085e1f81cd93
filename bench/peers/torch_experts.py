"""The experts of one layer, forward and backward, as a module of transformers: moiety and its peers.

Peers: transformers' own implementations, eagerly and under torch.compile, and torch's grouped product
written by hand and compiled. All get the same tokens, indices and weights, and give the gradients of
tokens, weights and both matrices of every expert. `--ours` prints the rows of "moiety" and ends, as our
benchmarks do; else this is a peer of compare.py. A peer that is absent, or that fails, is a line.
"""

import gc
import json
import sys
import time

import torch
from common import parser, serve
from moe_layer import milliseconds, weighted_experts

# T tokens, D model, F ffn, E experts, K choices: bench/gemm/expert_shapes.h
SHAPES = {"q128": (8192, 2048, 768, 128, 8), "mixtral": (8192, 4096, 14336, 8, 2)}
CPU_SHAPES = {"c8": (2048, 256, 512, 8, 2), "c32": (4096, 512, 256, 32, 4)}
PEERS = ("grouped_mm", "grouped_mm compiled", "eager", "torch._grouped_mm compiled")


def experts_module(shape):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    _, D, ffn, E, K = shape
    config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=ffn, num_experts=E, num_experts_per_tok=K)
    module = Qwen3MoeExperts(config).to(torch.bfloat16)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return module


class Experts:
    def __init__(self, shape):
        T, D, ffn, E, K = shape
        torch.manual_seed(1)
        self.module = experts_module(shape)
        self.flop = 18 * T * K * D * ffn
        self.x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
        self.dy = 0.01 * torch.randn(T, D, dtype=torch.bfloat16)
        self.idx = torch.rand(T, E).topk(K).indices
        self.weights = torch.rand(T, K).softmax(-1).to(torch.bfloat16).requires_grad_()

    def step(self, name):
        """A call that computes all gradients by this implementation."""
        m = self.module
        inputs = [self.x, self.weights, m.gate_up_proj, m.down_proj]
        if name.startswith("torch."):
            compiled = torch.compile(weighted_experts)

            def forward():
                return compiled(self.x, self.idx, self.weights, m.gate_up_proj, m.down_proj)
        else:
            m.config._experts_implementation = name.removesuffix(" compiled")
            torch.compiler.reset()
            call = torch.compile(m) if name.endswith(" compiled") else m

            def forward():
                return call(self.x, self.idx, self.weights)
        return lambda: torch.autograd.grad(forward(), inputs, self.dy)


def row_of(case, shape, name):
    experts = Experts(shape)
    gpu = experts.x.is_cuda
    run = experts.step(name)
    run()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(run)
    row = {"name": "torch_experts", "case": case, "device": "cuda" if gpu else "cpu"}
    if not name.startswith("moiety"):
        row["peer"] = name
    row |= {"value": round(experts.flop / ms / 1e9, 4), "unit": "TFLOP/s", "ms": round(ms, 4)}
    if gpu:
        held = sum(w.numel() * w.element_size() for w in experts.module.parameters())
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - held) / 2 ** 20)
        # What the host takes, while the GPU still has work.
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        row["host_us"] = round(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
    return row


def rows_of(shapes, names):
    for case, shape in shapes.items():
        for name in names:
            # A loop over experts; on a GPU it waits for the routing, and only takes time.
            if case in SHAPES and name == "eager":
                continue
            try:
                yield row_of(case, shape, name)
            except Exception as error:  # a library, or an operation, that is not there
                if name == "moiety":
                    raise
                reason = str(error).strip().split("\n")[0]
                print(f"torch_experts {case}: no {name}: {reason}", file=sys.stderr)
            gc.collect()  # compiled modules stand in cycles, and hold the weights
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def main():
    p = parser()
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--shape", help="one alone")
    p.add_argument("--only", help="peers, by commas")
    p.add_argument("--ours", action="store_true", help="print the rows of moiety")
    a, _ = p.parse_known_args()
    torch.set_default_device(a.device)
    if a.device == "cpu":
        torch.set_num_threads(a.threads)
    shapes = SHAPES if a.device == "cuda" else CPU_SHAPES
    if a.shape:
        shapes = {a.shape: shapes[a.shape]}
    if a.ours:
        import moiety.hf

        moiety.hf.register(strict=True)
        for row in rows_of(shapes, ["moiety"]):
            print(json.dumps(row))
        return
    names = a.only.split(",") if a.only else PEERS
    serve(lambda: rows_of(shapes, names))


if __name__ == "__main__":
    main()
