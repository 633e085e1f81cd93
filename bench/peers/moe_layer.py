"""Peer of moe_layer_bench: the same layer of experts in PyTorch, forward and backward.

Router (softmax, top K, weights that sum to 1), rows in the order of experts, torch._grouped_mm, SwiGLU,
the weighted sum of a token's rows; gradients of everything, in bf16. Eager and torch.compile, and
SonicMoE's layer where it can be imported, queued and as a graph that is replayed. On a GPU timed as
ours: 0.5 s of rest, 5 runs, the median of 20, and with --steady a burst of a second. A peer that is
absent, or that fails, is a line.
"""

import statistics
import sys
import time

import grouped_gemm_cuda
import torch
import torch.nn.functional as F
from common import parser, serve

# T tokens, D model, F ffn, E experts, K choices: bench/gemm/expert_shapes.h, moe_layer_bench.cpp
SHAPES = {
    "q128": (8192, 2048, 768, 128, 8), "q16": (8192, 2048, 768, 16, 8),
    "mixtral": (8192, 4096, 14336, 8, 2), "dsv3": (4096, 7168, 2048, 32, 8),
    "gptoss": (8192, 2880, 2880, 32, 4), "s30b": (32768, 4096, 1024, 64, 4),
    "s7b": (24576, 1536, 256, 128, 8), "s120b": (32768, 4096, 2048, 64, 4)}
CPU_SHAPES = {"c8": (2048, 256, 512, 8, 2), "c32": (4096, 512, 256, 32, 4)}


def times_of(run):
    if torch.cuda.is_available():
        return grouped_gemm_cuda.times_of(run)
    for _ in range(2):
        run()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def weighted_experts(x, idx, weights, w1, w2):
    """The sums of a token's experts idx [T, K], weighted: rows in order of experts, torch's grouped product."""
    chosen = idx.flatten()
    order = chosen.argsort(stable=True)
    token = order // idx.shape[1]
    ends = torch.bincount(chosen, minlength=w1.shape[0]).cumsum(0).int()
    gate, up = torch._grouped_mm(x[token], w1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    a = F.silu(gate) * up * weights.flatten()[order, None].to(x.dtype)
    y = torch._grouped_mm(a, w2.transpose(1, 2), offs=ends)
    return torch.zeros_like(x).index_add_(0, token, y)


def layer(h, router, w1, w2, K):
    probability = (h @ router.T).float().softmax(-1)
    weight, index = probability.topk(K)
    weight = weight / weight.sum(-1, keepdim=True)
    return weighted_experts(h, index, weight, w1, w2)


class Peer:
    def __init__(self, case, shape):
        T, D, ffn, E, K = shape
        self.case, self.flop = case, 18 * T * K * D * ffn
        self.K = K

        def normal(*sizes, spread=1.0):
            return (spread * torch.randn(sizes, dtype=torch.bfloat16)).requires_grad_()

        self.h, self.dout = normal(T, D), 0.01 * torch.randn(T, D, dtype=torch.bfloat16)
        self.weights = [normal(E, D, spread=D ** -0.5), normal(E, 2 * ffn, D, spread=0.02),
                        normal(E, D, ffn, spread=0.02)]

    def step(self, function):
        out = function(self.h, *self.weights, self.K)
        return torch.autograd.grad(out, [self.h, *self.weights], self.dout)


def sonic(shape):
    """SonicMoE's layer of the same sizes."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.moe import MoE
    _, D, ffn, E, K = shape
    return MoE(num_experts=E, num_experts_per_tok=K, hidden_size=D, intermediate_size=ffn,
               activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02).to(torch.bfloat16)


def sonic_step(peer, shape, replayed):
    """A step of SonicMoE's layer, which runs on the stream on which it was made, and its weights."""
    stream = torch.cuda.Stream() if replayed else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module = sonic(shape)
        weights = list(module.parameters())

        def step():
            return torch.autograd.grad(module(peer.h)[0], [peer.h, *weights], peer.dout)

        if not replayed:
            return step, weights
        for _ in range(2):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay, weights


def step_of(peer, name, shape):
    """A step, and the weights that it reads."""
    if name.startswith("SonicMoE"):
        return sonic_step(peer, shape, name != "SonicMoE")
    function = layer if name == "eager" else torch.compile(layer)
    return lambda: peer.step(function), []


def rows_of(case, shape, only, steady):
    peer = Peer(case, shape)
    gpu = peer.h.is_cuda
    for name in ("eager", "torch.compile", *(["SonicMoE", "SonicMoE-replayed"] if gpu else [])):
        if only and name not in only.split(","):
            continue
        try:
            run, weights = step_of(peer, name, shape)
            run()
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            times = times_of(run)
            ms = statistics.median(times)
            burst_ms = grouped_gemm_cuda.steady_milliseconds(run, ms) if gpu and steady else None
        except Exception as error:  # a library, or an operation, that is not there
            reason = str(error).strip().split("\n")[0]
            print(f"moe_layer {case}: no {name}: {reason}", file=sys.stderr)
            continue
        row = {"name": "moe_layer", "case": case, "device": "cuda" if gpu else "cpu", "peer": name,
               "value": round(peer.flop / ms / 1e9, 4), "unit": "TFLOP/s", "ms": round(ms, 4)}
        if gpu:
            row["least_ms"] = round(min(times), 4)
            if burst_ms:
                row["steady"] = round(peer.flop / burst_ms / 1e9, 1)
            held = sum(w.numel() * w.element_size() for w in (*peer.weights, *weights))
            row["peak_mib"] = round((torch.cuda.max_memory_allocated() - held) / 2 ** 20)
        yield row


def main():
    p = parser()
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--shape", help="one alone")
    p.add_argument("--only", help="peers: eager,torch.compile,SonicMoE,SonicMoE-replayed")
    p.add_argument("--steady", action="store_true", help="also a burst of a second")
    a, _ = p.parse_known_args()
    torch.set_default_device(a.device)
    if a.device == "cpu":
        torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    shapes = SHAPES if a.device == "cuda" else CPU_SHAPES

    def round_of_rows():
        for case, shape in shapes.items():
            if a.shape in (None, case):
                yield from rows_of(case, shape, a.only, a.steady)
                if a.device == "cuda":
                    torch.cuda.empty_cache()

    serve(round_of_rows)


if __name__ == "__main__":
    main()
