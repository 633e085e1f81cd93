"""Peer of train_step_bench: the demo's model and training step in PyTorch, eager and compiled.

A byte-level decoder of Qwen3-MoE's shape; forward, backward, clipping and AdamW. In bf16 weights and
activations are bf16, beside fp32 masters that take the gradients and the update. What is fastest
differs between machines, so it is tried at the start: experts (tokens sorted by expert) through
torch._grouped_mm or a loop; and in bf16 the products of matrices by bf16 routines or, faster where
the processor has no bf16 arithmetic, in fp32 between the bf16 tensors.
"""

import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from common import parser, serve

D, LAYERS, H, G, C, E, K, FFN, V = 256, 4, 8, 2, 32, 8, 2, 128, 264
BATCH, SEQ = 8, 256
EPS, THETA, AUX, CLIP = 1e-6, 1e6, 1e-3, 1.0
CASE = f"d{D}.l{LAYERS}.e{E}k{K}f{FFN}.b{BATCH}x{SEQ}"


def make_parameters():
    torch.manual_seed(1)
    def normal(*shape):
        return torch.randn(shape) * 0.02
    def ones(n):
        return torch.ones(n)
    p = {"embed": normal(V, D), "final_norm": ones(D), "head": normal(V, D)}
    for l in range(LAYERS):
        p |= {f"{l}.attn_norm": ones(D), f"{l}.qkv": normal((H + 2 * G) * C, D),
              f"{l}.q_norm": ones(C), f"{l}.k_norm": ones(C), f"{l}.o": normal(D, H * C),
              f"{l}.mlp_norm": ones(D), f"{l}.router": normal(E, D),
              f"{l}.fc1": normal(E, 2 * FFN, D), f"{l}.fc2": normal(E, D, FFN)}
    return p


def rope_table():
    inverse = 1.0 / THETA ** (torch.arange(0, C, 2) / C)
    angle = torch.arange(SEQ)[:, None] * inverse[None, :]
    return angle.cos(), angle.sin()


COS, SIN = rope_table()


def rope(x):  # [B, heads, S, C], half-split pairs
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * COS - b * SIN, b * COS + a * SIN), dim=-1).to(x.dtype)


class Products:
    """The products of the model. `wide`: in fp32, rounded to the dtype of the tensors."""

    def __init__(self, experts, wide):
        self.experts, self.wide = experts, wide

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
    q, k, v = products.linear(x, p[f"{l}.qkv"]).split((H * C, G * C, G * C), dim=-1)
    q = F.rms_norm(q.view(B, S, H, C), (C,), p[f"{l}.q_norm"], EPS).transpose(1, 2)
    k = F.rms_norm(k.view(B, S, G, C), (C,), p[f"{l}.k_norm"], EPS).transpose(1, 2)
    v = v.view(B, S, G, C).transpose(1, 2)
    y = products.attention(rope(q), rope(k), v)
    return products.linear(y.transpose(1, 2).reshape(B, S, H * C), p[f"{l}.o"])


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


def moe(x, p, l, products):
    h = x.reshape(-1, D)
    probability = (h.float() @ p[f"{l}.router"].float().T).softmax(-1)
    weight, index = probability.topk(K)
    weight = weight / weight.sum(-1, keepdim=True)
    order = index.flatten().argsort()
    token = order // K
    counts = torch.bincount(index.flatten(), minlength=E)
    out = products.experts(h[token], counts, p[f"{l}.fc1"], p[f"{l}.fc2"], products)
    out = out * weight.flatten()[order, None].to(out.dtype)
    y = torch.zeros_like(h).index_add_(0, token, out)
    balance = E * (counts / (K * h.shape[0]) * probability.mean(0)).sum()
    return y.view_as(x), balance


def loss_of(p, tokens, targets, products):
    x = F.embedding(tokens, p["embed"])
    aux = 0.0
    for l in range(LAYERS):
        x = x + attention(F.rms_norm(x, (D,), p[f"{l}.attn_norm"], EPS), p, l, products)
        y, balance = moe(F.rms_norm(x, (D,), p[f"{l}.mlp_norm"], EPS), p, l, products)
        x = x + y
        aux = aux + balance
    logits = products.linear(F.rms_norm(x, (D,), p["final_norm"], EPS), p["head"])
    return F.cross_entropy(logits.float().view(-1, V), targets.flatten()) + AUX * aux


class Trainer:
    def __init__(self, dtype, products, compiled):
        masters = make_parameters()
        self.masters = [m.requires_grad_() for m in masters.values()]
        self.copies = None
        self.p = masters
        if dtype == torch.bfloat16:
            self.p = {n: m.detach().to(dtype).requires_grad_() for n, m in masters.items()}
            self.copies = list(self.p.values())
        decayed = [m for n, m in masters.items() if "norm" not in n]
        others = [m for n, m in masters.items() if "norm" in n]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.products = products
        self.loss_of = torch.compile(loss_of) if compiled else loss_of
        generator = torch.Generator().manual_seed(2)
        self.batches = torch.randint(0, 256, (8, BATCH, SEQ + 1), generator=generator)
        self.steps = 0

    def step(self):
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        loss = self.loss_of(self.p, batch[:, :-1], batch[:, 1:], self.products)
        loss.backward()
        if self.copies is not None:
            if self.masters[0].grad is None:
                for m in self.masters:
                    m.grad = torch.empty_like(m)
            torch._foreach_copy_([m.grad for m in self.masters], [c.grad for c in self.copies])
            for c in self.copies:
                c.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        self.optimizer.step()
        if self.copies is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def milliseconds(trainer, steps):
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def fastest(dtype, compiled):
    """A trainer with the fastest products of those that work here."""
    best, best_ms = None, math.inf
    for wide in [True, False] if dtype == torch.bfloat16 else [False]:
        for experts in experts_grouped, experts_loop:
            what = f"compiled={compiled} wide={wide} {experts.__name__}"
            try:
                trainer = Trainer(dtype, Products(experts, wide), compiled)
                first = trainer.step()
                ms = milliseconds(trainer, 1)
                if ms < 3 * best_ms:
                    ms = min(ms, milliseconds(trainer, 1))
                trainer.steps = 0  # the first batch again
                if not trainer.step() < first:
                    raise RuntimeError("the loss does not fall")
            except Exception as error:  # torch.compile has no fp32 _grouped_mm on CPUs, for example
                reason = str(error).strip().split("\n")[0]
                print(f"{what}: left out: {reason}", file=sys.stderr)
                continue
            print(f"{what}: {ms:.0f} ms", file=sys.stderr)
            if ms < best_ms:
                best, best_ms = trainer, ms
    if best is None:
        sys.exit(f"train_step: no way to run the model works here, compiled={compiled}")
    return best


def main():
    p = parser()
    p.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--steps", type=int, default=10, help="a round")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float32
    peers = {"torch eager": fastest(dtype, False), "torch.compile": fastest(dtype, True)}

    def round_of_rows():
        for peer, trainer in peers.items():
            ms = milliseconds(trainer, a.steps)
            yield {"name": "train_step", "case": f"{CASE}.{a.dtype}", "device": "cpu", "peer": peer,
                   "value": round(BATCH * SEQ / ms * 1e3, 1), "unit": "bytes/s", "ms": round(ms, 3)}

    serve(round_of_rows)


if __name__ == "__main__":
    main()
