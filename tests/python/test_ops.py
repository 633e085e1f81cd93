"""Operators against float64 composites, under opcheck, with hard shapes, and what they refuse."""

import math
import re

import pytest
import torch

import moiety
import reference
from moiety import ops

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ACTIVATIONS = {
    "swiglu": {},
    "clamped": {"limit": 1.5},
    "qgeglu": {"alpha": 1.702, "limit": 7.0, "offset": 1.0},
    "qgeglu_free": {"alpha": 1.702},
    "relu2": {"kind": "relu2"},
}


def near(got, want, dtype, what, factor=1):
    assert reference.far(got, want) < factor * BOUND[dtype], (what, reference.far(got, want))


def backward(y, grad):
    y.backward(grad.to(y.dtype))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", reference.SHAPES)
@pytest.mark.parametrize("with_bias", ["", "bias", "scaled"])
def test_grouped_linear_and_gradients(dtype, name, with_bias):
    torch.manual_seed(1)
    splits = torch.tensor(reference.SHAPES[name])
    experts, rows = len(splits), int(splits.sum()) + 2
    dead = torch.randn(rows, 7)
    scale = torch.rand(rows) if with_bias == "scaled" else None
    (x, w, b), (x64, w64, b64) = reference.leaves(
        dead, torch.randn(experts, 5, 7), torch.randn(experts, 5) if with_bias else None, dtype=dtype)
    (s,), (s64,) = reference.leaves(scale, dtype=torch.float32)
    y = ops.grouped_linear(x, w, splits, b, s)
    want = reference.grouped_linear(x64, w64, splits, b64, s64)
    assert y.dtype == dtype and (y[int(splits.sum()):] == 0).all()
    near(y, want, dtype, "y")
    grad = torch.randn(rows, 5).to(dtype)
    backward(y, grad)
    backward(want, grad)
    for what, got, exact in [("x", x, x64), ("w", w, w64), ("b", b, b64), ("scale", s, s64)]:
        if got is not None:
            near(got.grad, exact.grad, dtype, what)
    out = torch.full((rows, 5), 12345.0, dtype=dtype)
    torch.ops.moiety.grouped_linear_out(x.detach(), w.detach(), splits, b, s, out)
    live = int(splits.sum())
    assert torch.equal(out[:live], y[:live]) and (out[live:] == 12345).all()


@pytest.mark.parametrize("dtype", BOUND)
def test_transposed_weights(dtype):
    torch.manual_seed(2)
    splits = torch.tensor([3, 0, 4])
    (x, w), (x64, w64) = reference.leaves(torch.randn(9, 7), torch.randn(3, 7, 5), dtype=dtype)
    y = ops.grouped_linear_t(x, w, splits)
    want = reference.grouped_linear(x64, w64.transpose(1, 2), splits)
    near(y, want, dtype, "y")
    grad = torch.randn(9, 5).to(dtype)
    backward(y, grad)
    backward(want, grad)
    near(x.grad, x64.grad, dtype, "x")
    near(w.grad, w64.grad, dtype, "w")


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("name", reference.SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_mlp_and_gradients(dtype, act, name, biased):
    torch.manual_seed(3)
    # At the edge of a clamp a rounding decides on which side an element falls.
    factor = 3 if act == "clamped" else 1
    splits, act = torch.tensor(reference.SHAPES[name]), ACTIVATIONS[act]
    experts, rows, model, ffn = len(splits), int(splits.sum()) + 3, 16, 8
    hidden = ffn if act.get("kind") == "relu2" else 2 * ffn
    ours, exact = reference.leaves(
        torch.randn(rows, model), torch.randn(experts, hidden, model) / 4,
        torch.randn(experts, model, ffn) / 3, torch.randn(experts, hidden) if biased else None,
        torch.randn(experts, model) if biased else None, dtype=dtype)
    (p,), (p64,) = reference.leaves(torch.rand(rows), dtype=torch.float32)
    (x, w1, w2, b1, b2), (x64, w164, w264, b164, b264) = ours, exact
    y = ops.grouped_mlp(x, w1, w2, splits, row_scale=p, b1=b1, b2=b2, **act)
    want = reference.grouped_mlp(x64, w164, w264, splits, p64, b164, b264, **act)
    near(y, want, dtype, "y")
    grad = torch.randn(rows, model).to(dtype)
    backward(y, grad)
    backward(want, grad)
    for what, got, right in zip("x w1 w2 b1 b2 p".split(), [*ours, p], [*exact, p64]):
        if got is not None:
            near(got.grad, right.grad, dtype, what, factor)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("masked", [False, True])
def test_mlp_through_the_maps_of_a_routing(dtype, masked):
    torch.manual_seed(4)
    tokens, experts, top_k = 33, 6, 2
    idx = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    if masked:
        idx[3] = -1
        idx[5, 1] = experts
        idx[6] = experts + 4
    ours, exact = reference.leaves(torch.randn(tokens, 16), torch.randn(experts, 16, 16) / 4,
                                   torch.randn(experts, 16, 8) / 3, dtype=dtype)
    (w,), (w64,) = reference.leaves(torch.rand(tokens, top_k), dtype=torch.float32)
    splits, source, row_tk, slot_w = ops.expert_rows(idx, experts, w)
    assert splits.tolist() == [(idx == e).sum() for e in range(experts)]
    y = ops.grouped_mlp(*ours, splits, row_scale=slot_w, source=source, row_tk=row_tk)
    want = reference.moe(*exact, idx, w64)
    near(y, want, dtype, "y")
    grad = torch.randn(tokens, 16).to(dtype)
    backward(y, grad)
    backward(want, grad)
    for what, got, right in zip("x w1 w2 w".split(), [*ours, w], [*exact, w64]):
        near(got.grad, right.grad, dtype, what)


ROUTERS = [{}, {"renormalize": False}, {"score": "sigmoid", "scale": 2.5}, {"bias": True}]


@pytest.mark.parametrize("config", ROUTERS)
def test_router_and_gradient(config):
    torch.manual_seed(5)
    logits = torch.randn(50, 12)
    bias = torch.randn(12) if config.get("bias") else None
    (x,), (x64,) = reference.leaves(logits, dtype=torch.float32)
    config = {**config, "bias": bias}
    w, idx, counts = ops.router(x, 3, **config)
    want, want_idx = reference.router(x64, 3, **config)
    assert torch.equal(idx.long(), want_idx)
    assert counts.tolist() == [(want_idx == e).sum() for e in range(12)]
    near(w, want, torch.float32, "w")
    grad = torch.randn(50, 3)
    backward(w, grad)
    backward(want, grad)
    near(x.grad, x64.grad, torch.float32, "logits")


def test_router_masks_and_repeats():
    torch.manual_seed(6)
    logits, other = torch.randn(2, 20, 8)
    mask = torch.arange(20) % 3 != 0
    w, idx, counts = ops.router(logits, 2, mask=mask)
    assert (idx[~mask] == -1).all() and (w[~mask] == 0).all() and counts.sum() == 2 * mask.sum()
    w2, idx2, counts2 = ops.router(other, 2, given_idx=idx.long())
    assert torch.equal(idx, idx2) and torch.equal(counts, counts2)
    p = torch.softmax(other, -1).gather(1, idx.clamp(min=0).long())
    assert torch.allclose(w2[mask], (p / p.sum(-1, keepdim=True))[mask])


@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", BOUND)
def test_accumulation(beta, dtype):
    torch.manual_seed(7)
    splits = torch.tensor([2, 0, 3])
    dy, x = torch.randn(5, 4).to(dtype), torch.randn(5, 6).to(dtype)
    dw = torch.ops.moiety.grouped_linear_wgrad(dy, x, splits, None, None).float()
    start = float("nan") if beta == 0 else 0.5
    buffer = torch.full((3, 4, 6), start)
    torch.ops.moiety.grouped_linear_wgrad_acc(
        dy, x, splits, None, None, buffer, None if beta is None else torch.tensor([beta]))
    assert torch.allclose(buffer, dw + (0 if beta == 0 else 0.5), rtol=2 ** -7, atol=1e-2)
    assert (buffer[1] == (0 if beta == 0 else 0.5)).all()  # an empty group


def cases():
    torch.manual_seed(8)
    splits, source = torch.tensor([2, 0, 3]), torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32)
    row_tk = torch.tensor([[0, 2, -1], [1, 3, 4]], dtype=torch.int32)
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    w2, b = torch.randn(3, 8, 8, requires_grad=True), torch.randn(3, 16, requires_grad=True)
    b2, p = torch.randn(3, 8, requires_grad=True), torch.rand(6, requires_grad=True)
    act = ("glu", 1.0, math.inf, 0.0, 0)
    idx = torch.tensor([[0, 2], [1, -1]])
    logits = torch.randn(4, 5, requires_grad=True)
    constants = ("softmax", True, 1.0)
    d = lambda t: t.detach()
    yield "grouped_linear", (x, w, splits, None, None, None)
    yield "grouped_linear", (x, w, splits.int(), b, p, None)
    yield "grouped_linear", (d(x)[:0], d(w), splits * 0, None, None, None)
    yield "grouped_linear_t", (x, w.detach().transpose(1, 2).contiguous().requires_grad_(), splits)
    yield "grouped_linear_dgrad", (d(x) @ torch.randn(8, 16), d(w), splits)
    yield "grouped_linear_wgrad", (torch.randn(6, 4), d(x), splits, None, None)
    yield "grouped_linear_bias_grad", (torch.randn(6, 16), splits, d(b), d(p))
    yield "grouped_linear_bias_grad", (torch.randn(6, 16), splits, d(b), None)
    yield "grouped_mlp", (x, w, w2, splits, p, None, None, b, b2, *act, None, None)
    yield "grouped_mlp", (x, w, w2, splits, None, None, None, None, None, *act, None, None)
    yield "grouped_mlp", (d(x)[:2].requires_grad_(), w, w2, splits, None, source, row_tk, None, None, *act, None, None)
    yield "grouped_mlp", (d(x)[:0], d(w), d(w2), splits * 0, None, None, None, None, None, *act, None, None)
    h = torch.randn(6, 16)
    yield "activation", (d(h).requires_grad_(), splits, p, *act)
    yield "activation", (d(h).requires_grad_(), None, None, "glu", 1.702, 7.0, 1.0, 8)
    yield "activation", (d(h)[:0].requires_grad_(), splits * 0, None, "relu2", 1.0, math.inf, 0.0, 0)
    yield "activation_backward", (torch.randn(6, 8), h, splits, d(p), *act)
    yield "activation_backward", (torch.randn(6, 16), h, None, None, "relu2", 1.0, math.inf, 0.0, 0)
    for need in (True, False):
        yield "grouped_mlp_backward", (torch.randn(6, 8), h, d(x), d(w), d(w2), splits, d(p), None,
                                       None, d(b), d(b2), *act, need)
    yield "router", (logits, None, None, None, 2, *constants, 1, 1)
    yield "router", (logits, torch.randn(5), torch.tensor([1, 0, 1, 1], dtype=torch.bool),
                     torch.zeros(4, 2, dtype=torch.int32), 2, *constants, 1, 1)
    yield "router_backward", (d(logits), torch.tensor([[0, 1]] * 4, dtype=torch.int32),
                              torch.randn(4, 2), *constants)
    yield "expert_rows", (idx, torch.rand(2, 2, requires_grad=True), 3)
    yield "expert_rows", (idx.int(), None, 3)


CASES = [f"{i}-{name}" for i, (name, _) in enumerate(cases())]


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    name, args = list(cases())[CASES.index(case)]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor",
              "test_aot_dispatch_dynamic"]
    if name == "expert_rows" and args[1] is not None:
        checks.pop()  # it adds float results to a sum of integers, which torch refuses
    torch.library.opcheck(getattr(torch.ops.moiety, name).default, args, test_utils=checks)


# Hard shapes: rows, splits, columns.
HARD = {
    "no_rows": (0, [0, 0], 8),
    "one_row": (1, [0, 1], 8),
    "empty_expert": (5, [2, 0, 3], 8),
    "all_rows_dead": (4, [0, 0], 8),
    "one_expert": (3, [3], 8),
    "no_experts": (3, [], 8),
    "seven_columns": (5, [2, 3], 7),
}


def on_hard_shape(name):
    rows, splits, columns = HARD[name]
    experts, splits = len(splits), torch.tensor(splits, dtype=torch.int64)
    act = ("glu", 1.0, math.inf, 0.0, 0)
    leaf = lambda *shape: torch.randn(*shape, requires_grad=True)
    x, p = leaf(rows, columns), leaf(rows)
    w1, w2 = leaf(experts, 6, columns), leaf(experts, columns, 3)
    b1, b2 = leaf(experts, 6), leaf(experts, columns)
    yield "grouped_linear", (x, w1, splits, b1, p, None)
    yield "grouped_linear_t", (x, leaf(experts, columns, 6), splits)
    yield "grouped_linear_wgrad", (torch.randn(rows, 6), x.detach(), splits, None, None)
    yield "grouped_mlp", (x, w1, w2, splits, p, None, None, b1, b2, *act, None, None)
    yield "activation", (leaf(rows, 6), splits, p, *act)


@pytest.mark.parametrize("shape", HARD)
def test_opcheck_of_hard_shapes(shape):
    torch.manual_seed(11)
    for name, args in on_hard_shape(shape):
        torch.library.opcheck(getattr(torch.ops.moiety, name).default, args)


@pytest.mark.parametrize("tokens,experts,top_k,given", [(0, 4, 2, None), (1, 1, 1, None), (5, 3, 3, None), (5, 4, 2, -1)])
def test_opcheck_of_hard_routings(tokens, experts, top_k, given):
    """No token; one expert; all experts chosen; all indices -1."""
    torch.manual_seed(12)
    logits = torch.randn(tokens, experts, requires_grad=True)
    given = None if given is None else torch.full((tokens, top_k), given, dtype=torch.int32)
    args = (logits, None, None, given, top_k, "softmax", True, 1.0, 1, 1)
    torch.library.opcheck(torch.ops.moiety.router.default, args)
    w, idx, counts = ops.router(logits, top_k, given_idx=given)
    assert counts.sum() == (0 if given is not None else tokens * top_k)
    torch.library.opcheck(torch.ops.moiety.expert_rows.default, (idx, None, experts))
    splits, source, row_tk, slot_w = ops.expert_rows(idx, experts, w)
    y = ops.grouped_mlp(torch.randn(tokens, 8), torch.randn(experts, 6, 8), torch.randn(experts, 8, 3), splits,
                        row_scale=slot_w, source=source, row_tk=row_tk)
    assert torch.isfinite(y).all() and (given is None or (y == 0).all())
    y.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_opcheck_of_writers():
    splits, x, w = torch.tensor([2, 1]), torch.randn(3, 4), torch.randn(2, 5, 4)
    checks = ("test_schema", "test_faketensor")
    o = torch.ops.moiety
    torch.library.opcheck(o.grouped_linear_out.default, (x, w, splits, None, None, torch.zeros(3, 5)),
                          test_utils=checks)
    torch.library.opcheck(o.grouped_linear_wgrad_acc.default,
                          (torch.randn(3, 5), x, splits, None, None, torch.zeros(2, 5, 4), None),
                          test_utils=checks)
    torch.library.opcheck(o.router_update_bias.default, (torch.zeros(3), torch.tensor([1, 0, 5]), 0.1),
                          test_utils=checks)


def test_upstream_gradients_of_any_strides():
    torch.manual_seed(9)
    splits = torch.tensor([2, 3])
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True)
    ops.grouped_linear(x, w, splits).sum().backward()  # an expanded gradient
    first = x.grad.clone()
    x.grad = None
    ops.grouped_linear(x, w, splits).t().contiguous().t().backward(torch.ones(6, 5).t())
    assert torch.equal(first, x.grad)


def test_what_is_frozen_keeps_no_operand():
    splits = torch.tensor([2, 3])
    x, w = torch.randn(5, 8), torch.randn(2, 6, 8)
    kept = {}

    def run(x, w):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t,
                                                      lambda t: t):
            y = ops.grouped_linear(x, w, splits)
        return y, shapes

    y, kept = run(x.requires_grad_(), w)
    assert (5, 8) not in kept and (2, 6, 8) in kept
    y.sum().backward()
    right = x.grad.clone()
    y, kept = run(x.detach(), w.requires_grad_())
    assert (5, 8) in kept and (2, 6, 8) not in kept
    y.sum().backward()
    assert w.grad is not None
    y, kept = run(x.detach(), w.detach())
    assert not kept and not y.requires_grad
    assert right.shape == x.shape


def test_nan_of_dead_rows_reaches_nothing():
    splits = torch.tensor([2, 1])
    x = torch.randn(5, 8)
    x[3:] = float("nan")
    x.requires_grad_()
    w1, w2 = torch.randn(2, 16, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    p = torch.rand(5)
    p[3:] = float("nan")
    y = ops.grouped_mlp(x, w1, w2, splits, row_scale=p.requires_grad_())
    y.sum().backward()
    for t in (y, x.grad, w1.grad, w2.grad, p.grad):
        assert torch.isfinite(t).all()


ERRORS = [
    ("x has 3 columns", moiety.InvalidArgument,
     lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(1, 4, 5), torch.tensor([2]))),
    ("float16", moiety.Unsupported,
     lambda: ops.grouped_linear(torch.ones(2, 3).half(), torch.ones(1, 4, 3).half(), torch.tensor([2]))),
    ("x is float32, but w is bfloat16", moiety.InvalidArgument,
     lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(1, 4, 3).bfloat16(), torch.tensor([2]))),
    ("not contiguous", moiety.InvalidArgument,
     lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(1, 3, 4).transpose(1, 2), torch.tensor([2]))),
    ("splits[0] is 3, which is negative or more than is left of 2 rows", moiety.InvalidArgument,
     lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(1, 4, 3), torch.tensor([3]))),
    ("splits[1] is -1,", moiety.InvalidArgument,
     lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(2, 4, 3), torch.tensor([1, -1]))),
    ("but w has 2 experts", moiety.InvalidArgument,
     lambda: ops.grouped_linear(torch.ones(2, 3), torch.ones(2, 4, 3), torch.tensor([2]))),
    ("kind is 'gelu'", moiety.InvalidArgument,
     lambda: ops.grouped_mlp(torch.ones(2, 8), torch.ones(1, 16, 8), torch.ones(1, 8, 8),
                             torch.tensor([2]), kind="gelu")),
    ("h is", moiety.InvalidArgument, lambda: ops.activation(torch.ones(2, 7))),
    ("interleave", moiety.InvalidArgument, lambda: ops.activation(torch.ones(2, 24), interleave=8)),
    ("top_k=5", moiety.InvalidArgument, lambda: ops.router(torch.ones(2, 3), 5)),
    ("score is 'relu'", moiety.InvalidArgument, lambda: ops.router(torch.ones(2, 3), 1, score="relu")),
    ("given_idx is float32", moiety.InvalidArgument,
     lambda: ops.router(torch.ones(2, 3), 1, given_idx=torch.zeros(2, 1))),
    ("idx is float32", moiety.InvalidArgument, lambda: ops.expert_rows(torch.ones(2, 3), 4)),
    ("idx is int16", moiety.Unsupported, lambda: ops.expert_rows(torch.ones(2, 3, dtype=torch.int16), 4)),
]


@pytest.mark.parametrize("text,kind,call", ERRORS, ids=[e[0] for e in ERRORS])
def test_errors_name_operator_and_argument(text, kind, call, device):
    if "splits[" in text and device != "cpu":
        pytest.skip("on a GPU nobody reads the splits: such a group counts as empty (test_gpu)")
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call()
    assert "moiety::" in str(caught.value) and "moiety[" not in str(caught.value)
    ops.grouped_linear(torch.ones(2, 3), torch.ones(1, 4, 3), torch.tensor([2]))  # still usable


def test_second_derivatives_and_vmap_are_refused():
    splits = torch.tensor([2, 3])
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True)
    dx, = torch.autograd.grad(ops.grouped_linear(x, w, splits).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda r: torch.ops.moiety.grouped_linear(r, w.detach(), splits, None, None, None))(torch.randn(2, 5, 8))


@pytest.mark.cpu_only
def test_as_many_threads_as_torch_and_the_same_bits():
    torch.manual_seed(10)
    splits = torch.tensor([40, 0, 57])
    x, w1, w2 = torch.randn(97, 64), torch.randn(3, 64, 64), torch.randn(3, 64, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(ops.grouped_mlp(x, w1, w2, splits))
        assert torch.equal(*results)
    finally:
        torch.set_num_threads(before)


class Watcher(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_modes_see_the_operators_with_and_without_gradients():
    x, w, splits = torch.randn(5, 8), torch.randn(2, 6, 8, requires_grad=True), torch.tensor([2, 3])
    plain = ops.grouped_linear(x, w.detach(), splits)
    with Watcher() as mode:
        ops.grouped_linear(x, w.detach(), splits)
        y = ops.grouped_linear(x, w, splits)
        y.sum().backward()
    assert mode.seen.count(torch.ops.moiety.grouped_linear.default) == 2
    assert torch.ops.moiety.grouped_linear_wgrad.default in mode.seen
    assert torch.equal(y, plain) and w.grad is not None
