"""Peer of train_step_bench: the same model and training step in PyTorch, eager and compiled.

A decoder of Qwen3-MoE's shape; forward, backward, clipping and fused AdamW. In bf16 weights and
activations are bf16, beside fp32 masters that take the gradients and the update. On a CPU what is
fastest differs between machines, so it is tried at the start: experts (tokens sorted by expert)
through torch._grouped_mm or a loop; and in bf16 the products of matrices by bf16 routines or, faster
where the processor has no bf16 arithmetic, in fp32 between the bf16 tensors. On a GPU: bf16 routines,
torch._grouped_mm, and for attention the kernel that --attention says; --groups prints the time of a
compiled step by group of kernels.
"""

import contextlib
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import parser, serve
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass
class Shape:
    """Letters as in train_step_bench: model size, layers, heads, key/value heads, head size, experts,
    choices, expert ffn size, vocabulary, sequences, tokens of one."""

    D: int
    L: int
    H: int
    G: int
    C: int
    E: int
    K: int
    F: int
    V: int
    B: int
    S: int

    def case(self):
        return f"d{self.D}.l{self.L}.e{self.E}k{self.K}f{self.F}.b{self.B}x{self.S}"

    def flops(self):
        """Of a step, as the bench counts them: 3 x forward, causal attention."""
        m = self
        token = (4 * m.H * m.C * m.D + 4 * m.G * m.C * m.D + 2 * m.H * m.C * m.S) + 2 * m.D * m.E
        token = m.L * (token + 6 * m.D * m.F * m.K) + 2 * m.D * m.V
        return 3 * token * m.B * m.S


SHAPES = {
    "demo": Shape(256, 4, 8, 2, 32, 8, 2, 128, 264, 8, 256),
    "qwen3": Shape(2048, 4, 32, 4, 128, 128, 8, 768, 151936, 2, 4096),
    "small": Shape(1024, 16, 16, 4, 64, 32, 4, 512, 50304, 4, 4096),
}
EPS, THETA, AUX, CLIP = 1e-6, 1e6, 1e-3, 1.0
PEAK = 989e12  # of an H100 or H200, dense bf16


def make_parameters(m):
    torch.manual_seed(1)
    def normal(*shape):
        return torch.randn(shape) * 0.02
    def ones(n):
        return torch.ones(n)
    p = {"embed": normal(m.V, m.D), "final_norm": ones(m.D), "head": normal(m.V, m.D)}
    for l in range(m.L):
        p |= {f"{l}.attn_norm": ones(m.D), f"{l}.qkv": normal((m.H + 2 * m.G) * m.C, m.D),
              f"{l}.q_norm": ones(m.C), f"{l}.k_norm": ones(m.C), f"{l}.o": normal(m.D, m.H * m.C),
              f"{l}.mlp_norm": ones(m.D), f"{l}.router": normal(m.E, m.D),
              f"{l}.fc1": normal(m.E, 2 * m.F, m.D), f"{l}.fc2": normal(m.E, m.D, m.F)}
    return p


def rope_table(m):
    inverse = 1.0 / THETA ** (torch.arange(0, m.C, 2) / m.C)
    angle = torch.arange(m.S)[:, None] * inverse[None, :]
    return angle.cos(), angle.sin()


def rope(x, table):  # [B, heads, S, C], half-split pairs
    cos, sin = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Products:
    """The products of the model. `wide`: in fp32, rounded to the dtype of the tensors. `balanced`: as
    in choose."""

    def __init__(self, shape, experts, wide, balanced=False):
        self.shape, self.experts, self.wide, self.balanced = shape, experts, wide, balanced
        self.rope_table = rope_table(shape)

    def operands(self, *tensors):
        return (t.float() for t in tensors) if self.wide else tensors

    def linear(self, x, w):
        a, b = self.operands(x, w)
        return F.linear(a, b).to(x.dtype)

    def grouped(self, x, w, ends):
        a, b = self.operands(x, w)
        return torch._grouped_mm(a, b.transpose(1, 2), offs=ends).to(x.dtype)

    def attention(self, q, k, v):
        a, b, c = self.operands(q, k, v)
        return F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True).to(v.dtype)


def attention(x, p, l, products):
    B, S, _ = x.shape
    m = products.shape
    q, k, v = products.linear(x, p[f"{l}.qkv"]).split((m.H * m.C, m.G * m.C, m.G * m.C), dim=-1)
    q = F.rms_norm(q.view(B, S, m.H, m.C), (m.C,), p[f"{l}.q_norm"], EPS).transpose(1, 2)
    k = F.rms_norm(k.view(B, S, m.G, m.C), (m.C,), p[f"{l}.k_norm"], EPS).transpose(1, 2)
    v = v.view(B, S, m.G, m.C).transpose(1, 2)
    y = products.attention(rope(q, products.rope_table), rope(k, products.rope_table), v)
    return products.linear(y.transpose(1, 2).reshape(B, S, m.H * m.C), p[f"{l}.o"])


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.compiler.disable  # its splits differ in every step: compiled, it is compiled again and again
def experts_loop(x, counts, w1, w2, products):
    parts = x.split(counts.tolist())
    return torch.cat([products.linear(swiglu(products.linear(part, w1[e])), w2[e])
                      for e, part in enumerate(parts)])


def experts_grouped(x, counts, w1, w2, products):
    ends = counts.cumsum(0).int()
    return products.grouped(swiglu(products.grouped(x, w1, ends)), w2, ends)


def choose(probability, topk, balanced):
    """The weights and experts of tokens; balanced: uniform routing, whatever the scores are."""
    if balanced:
        tokens, experts = probability.shape
        index = (torch.arange(tokens * topk, device=probability.device) % experts).view(tokens, topk)
        weight = probability.gather(1, index)
    else:
        weight, index = probability.topk(topk)
    return weight / weight.sum(-1, keepdim=True), index


def moe(x, p, l, products):
    m = products.shape
    h = x.reshape(-1, m.D)
    probability = (h.float() @ p[f"{l}.router"].float().T).softmax(-1)
    weight, index = choose(probability, m.K, products.balanced)
    chosen = index.flatten()
    order = chosen.argsort()
    token = order // m.K
    counts = torch.zeros(m.E, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
    out = products.experts(h[token], counts, p[f"{l}.fc1"], p[f"{l}.fc2"], products)
    out = out * weight.flatten()[order, None].to(out.dtype)
    y = torch.zeros_like(h).index_add_(0, token, out)
    balance = m.E * (counts / (m.K * h.shape[0]) * probability.mean(0)).sum()
    return y.view_as(x), balance


def loss_of(p, tokens, targets, products):
    m = products.shape
    x = F.embedding(tokens, p["embed"])
    aux = 0.0
    for l in range(m.L):
        x = x + attention(F.rms_norm(x, (m.D,), p[f"{l}.attn_norm"], EPS), p, l, products)
        y, balance = moe(F.rms_norm(x, (m.D,), p[f"{l}.mlp_norm"], EPS), p, l, products)
        x = x + y
        aux = aux + balance
    logits = products.linear(F.rms_norm(x, (m.D,), p["final_norm"], EPS), p["head"])
    return F.cross_entropy(logits.float().view(-1, m.V), targets.flatten()) + AUX * aux


class Trainer:
    def __init__(self, dtype, products, compiled):
        m = products.shape
        masters = make_parameters(m)
        self.masters = [w.requires_grad_() for w in masters.values()]
        self.copies = None
        self.p = masters
        if dtype == torch.bfloat16:
            self.p = {n: w.detach().to(dtype).requires_grad_() for n, w in masters.items()}
            self.copies = list(self.p.values())
        decayed = [w for n, w in masters.items() if "norm" not in n]
        others = [w for n, w in masters.items() if "norm" in n]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.products = products
        self.loss_of = torch.compile(loss_of) if compiled else loss_of
        generator = torch.Generator("cpu").manual_seed(2)
        self.batches = torch.randint(0, min(256, m.V), (8, m.B, m.S + 1), generator=generator,
                                     device="cpu").to(torch.get_default_device())
        self.steps = 0

    def step(self):
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        loss = self.loss_of(self.p, batch[:, :-1], batch[:, 1:], self.products)
        loss.backward()
        if self.copies is not None:
            if self.masters[0].grad is None:
                for w in self.masters:
                    w.grad = torch.empty_like(w)
            torch._foreach_copy_([w.grad for w in self.masters], [c.grad for c in self.copies])
            for c in self.copies:
                c.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        self.optimizer.step()
        if self.copies is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return loss


def synchronize():
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def milliseconds(trainer, steps):
    """A step's, the median; on a GPU the mean of `steps` that are not waited for one by one."""
    if torch.get_default_device().type == "cuda":
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step()
        synchronize()
        return (time.perf_counter() - start) * 1e3 / steps
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step().item()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def fastest(shape, dtype, compiled):
    """A trainer with the fastest products of those that work here."""
    cuda = torch.get_default_device().type == "cuda"
    ways = [(w, e) for w in ([True, False] if dtype == torch.bfloat16 and not cuda else [False])
            for e in ((experts_grouped,) if cuda else (experts_grouped, experts_loop))]
    best, best_ms = None, math.inf
    for wide, experts in ways:
        what = f"compiled={compiled} wide={wide} {experts.__name__}"
        try:
            trainer = Trainer(dtype, Products(shape, experts, wide), compiled)
            first = trainer.step().item()
            ms = milliseconds(trainer, 3 if cuda else 1)
            if ms < 3 * best_ms:
                ms = min(ms, milliseconds(trainer, 3 if cuda else 1))
            trainer.steps = 0  # the first batch again
            if not trainer.step().item() < first:
                raise RuntimeError("the loss does not fall")
        except Exception as error:  # torch.compile has no fp32 _grouped_mm on CPUs, for example
            reason = str(error).strip().split("\n")[0]
            print(f"{what}: left out: {reason}", file=sys.stderr)
            continue
        print(f"{what}: {ms:.1f} ms", file=sys.stderr)
        if ms < best_ms:
            best, best_ms = trainer, ms
    if best is None:
        sys.exit(f"train_step: no way to run the model works here, compiled={compiled}")
    return best


# Kernels of a step by what they do; the first name that is in the kernel's decides.
GROUPS = [("attention", ("flash", "fmha", "sdpa", "attention")),
          ("experts", ("grouped", "GroupProblemShape")),
          ("gemm", ("gemm", "nvjet", "cutlass", "cublas")),
          ("optimizer", ("multi_tensor", "adam", "foreach", "lpnorm"))]


def kernel_groups(trainer):
    """Milliseconds of a step by group; the kernels of attention by name."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        trainer.step()
        synchronize()
    sums = {}
    for event in trace.key_averages():
        name = event.key.lower()
        group = next((g for g, words in GROUPS if any(w.lower() in name for w in words)), "rest")
        ms = event.self_device_time_total / 1e3
        sums[group] = sums.get(group, 0) + ms
        if group == "attention":
            print(f"{ms:8.3f} ms {event.key[:100]}", file=sys.stderr)
    return {g: round(ms, 3) for g, ms in sums.items()}


def main():
    p = parser()
    p.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--steps", type=int, default=10, help="a round")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--model", choices=list(SHAPES), default="demo")
    p.add_argument("--attention", choices=list(ATTENTION), default="flash", help="on a GPU")
    p.add_argument("--groups", action="store_true", help="time by group of kernels, to stderr")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.set_default_device(a.device)
    dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float32
    shape = SHAPES[a.model]
    if a.device == "cuda":
        ways = {f"torch.compile, {a.attention}": True}
        products = sdpa_kernel(ATTENTION[a.attention])
    else:
        ways = {"torch eager": False, "torch.compile": True}
        products = contextlib.nullcontext()
    with products:
        peers = {name: fastest(shape, dtype, compiled) for name, compiled in ways.items()}
        measure(a, shape, peers)


def measure(a, shape, peers):
    if a.groups:
        for peer, trainer in peers.items():
            print(f"{peer}: {kernel_groups(trainer)}", file=sys.stderr)

    def round_of_rows():
        for peer, trainer in peers.items():
            ms = milliseconds(trainer, a.steps)
            row = {"name": "train_step", "case": f"{shape.case()}.{a.dtype}", "device": a.device,
                   "peer": peer, "value": round(shape.B * shape.S / ms * 1e3, 1),
                   "unit": "tokens/s", "ms": round(ms, 3)}
            if a.device == "cuda":
                rate = shape.flops() / ms * 1e3
                row |= {"tflops": round(rate * 1e-12, 1), "mfu": round(100 * rate / PEAK, 1),
                        "memory": torch.cuda.max_memory_allocated()}
                torch.cuda.empty_cache()  # our program needs the memory next
            yield row

    serve(round_of_rows)


if __name__ == "__main__":
    main()
