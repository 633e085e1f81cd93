"""What the operators compute, in torch's own operations and any dtype."""

import torch

SHAPES = {
    "random": [3, 0, 5, 2],
    "empty_all": [0, 0, 0],
    "one_token": [0, 1, 0],
    "all_to_one": [0, 9, 0],
    "one_each": [1, 1, 1],
    "e1": [7],
    "empty_last": [4, 3, 0],
}


def activation(h, kind="glu", alpha=1.0, limit=float("inf"), offset=0.0):
    if kind == "relu2":
        return torch.relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + offset
    return gate * torch.sigmoid(alpha * gate) * up


def grouped_linear(x, w, splits, bias=None, row_scale=None):
    """Dead rows are zeros."""
    out, row = [], 0
    for e, n in enumerate(splits.tolist()):
        y = x[row:row + n] @ w[e].T
        if bias is not None:
            b = bias[e].expand(n, -1)
            y = y + (b if row_scale is None else b * row_scale[row:row + n, None].to(y.dtype))
        out.append(y)
        row += n
    out.append(x.new_zeros(x.shape[0] - row, w.shape[1]))
    return torch.cat(out)


def grouped_mlp(x, w1, w2, splits, row_scale=None, b1=None, b2=None, **act):
    a = activation(grouped_linear(x, w1, splits, b1), **act)
    if row_scale is not None:
        a = a * row_scale[:, None].to(a.dtype)
    return grouped_linear(a, w2, splits, b2, row_scale)


def moe(x, w1, w2, idx, weights, b1=None, b2=None, **act):
    """Token by token over all pairs that are valid."""
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        token, k = torch.where(idx == e)
        h = x[token] @ w1[e].T
        if b1 is not None:
            h = h + b1[e]
        y = activation(h, **act) @ w2[e].T
        if b2 is not None:
            y = y + b2[e]
        out = out.index_add(0, token, y * weights[token, k, None].to(x.dtype))
    return out


def router(logits, top_k, score="softmax", renormalize=True, scale=1.0, bias=None):
    p = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    idx = (p if bias is None else p + bias).topk(top_k, dim=-1).indices
    w = p.gather(1, idx)
    if renormalize:
        w = w / w.sum(-1, keepdim=True)
    return w * scale, idx


def far(got, want):
    """Relative L2 distance."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def leaves(*tensors, dtype):
    """Copies that want gradients: in `dtype`, and the same values in float64."""
    ours = [None if t is None else t.to(dtype).requires_grad_() for t in tensors]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in ours]
    return ours, exact
