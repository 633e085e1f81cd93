"""A model as a PyTorch user would write it, for torch_test.cpp.

    python3 torch_model.py DIR

reads model.json, tensors.txt (a name and a shape a line), weights.bin and batch.bin from DIR, and writes
the loss and the gradients of all tensors, in the same order, to result.bin. All is float32.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x, theta):
    """x [S, heads, C]: rotates the pairs (i, i + C/2)."""
    half = x.shape[-1] // 2
    inverse = 1 / torch.pow(torch.tensor(theta, dtype=torch.float64), 2 * torch.arange(half) / x.shape[-1]).float()
    angle = torch.outer(torch.arange(x.shape[0]).float(), inverse)[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def attention(x, w, c):
    """x [S, D], one sequence."""
    q, k, v = (F.linear(x, w[f"attn.{n}.weight"]).view(len(x), -1, c["head_dim"]) for n in "qkv")
    if c["qk_norm"]:
        q, k = norm(q, w["attn.q_norm.weight"], c["norm_eps"]), norm(k, w["attn.k_norm.weight"], c["norm_eps"])
    q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(o.transpose(0, 1).flatten(1), w["attn.o.weight"])


def activation(h, c):
    if c["activation"] == "relu2":
        return F.relu(h).pow(2)
    gate, up = h.chunk(2, -1)
    gate, up = gate.clamp(max=c["limit"]), up.clamp(-c["limit"], c["limit"])
    return gate * torch.sigmoid(c["alpha"] * gate) * (up + c["offset"])


def network(x, w, prefix, c):
    return F.linear(activation(F.linear(x, w[prefix + "fc1.weight"]), c), w[prefix + "fc2.weight"])


def experts(x, w, c):
    p, chosen = F.linear(x, w["moe.router.weight"]).softmax(-1).topk(c["top_k"])
    p = p / p.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(c["experts"]):
        token, place = (chosen == e).nonzero(as_tuple=True)
        h = F.linear(x[token], w["moe.experts.fc1.weight"][e], w["moe.experts.fc1.bias"][e])
        y = F.linear(activation(h, c), w["moe.experts.fc2.weight"][e], w["moe.experts.fc2.bias"][e])
        out = out.index_add(0, token, y * p[token, place, None])
    if c["shared"]:
        out = out + network(x, w, "moe.shared.", c)
    return out


def loss_of(w, c, token, target):
    total = 0
    for s in range(c["sequences"]):
        x = w["embed.weight"][token[s]]
        for l in range(c["layers"]):
            own = {n.split(".", 2)[2]: t for n, t in w.items() if n.startswith(f"layers.{l}.")}
            x = x + attention(norm(x, own["attn_norm.weight"], c["norm_eps"]), own, c)
            h = norm(x, own["mlp_norm.weight"], c["norm_eps"])
            x = x + (experts(h, own, c) if "moe.router.weight" in own else network(h, own, "mlp.", c))
        logits = F.linear(norm(x, w["final_norm.weight"], c["norm_eps"]), w["head.weight"])
        total = total + F.cross_entropy(logits, target[s], ignore_index=-100, reduction="sum")
    return total


def main():
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    c = json.loads((directory / "model.json").read_text())
    values = torch.frombuffer(bytearray((directory / "weights.bin").read_bytes()), dtype=torch.float32)
    ids = torch.frombuffer(bytearray((directory / "batch.bin").read_bytes()), dtype=torch.int32).long()
    token, target = ids.view(2, c["sequences"], c["seq_len"])
    w = {}
    for line in (directory / "tensors.txt").read_text().splitlines():
        name, *shape = line.split()
        shape = [int(n) for n in shape]
        n = torch.Size(shape).numel()
        w[name] = values[:n].clone().view(shape).requires_grad_()
        values = values[n:]
    loss = loss_of(w, c, token, target)
    loss.backward()
    result = torch.cat([loss.detach().view(1)] + [t.grad.flatten() for t in w.values()])
    (directory / "result.bin").write_bytes(result.numpy().tobytes())


main()
