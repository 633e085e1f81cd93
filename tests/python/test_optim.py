"""AdamW and clipping against torch's, and what only ours do."""

import copy

import pytest
import torch

import moiety
import reference
from moiety import nn, optim

SHAPES = [(7, 5), (64,), (3, 4, 6), (1,)]


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]


def set_gradients(params, seed, dtype=None):
    torch.manual_seed(seed)
    for p in params:
        grad = torch.randn(p.shape).to(dtype or p.dtype)
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_steps_are_torchs():
    ours = parameters()
    theirs = [torch.nn.Parameter(p.detach().double()) for p in ours]  # exact on every CPU
    a, b = optim.AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for seed in range(6):
        for group in (*a.param_groups, *b.param_groups):
            group["lr"] = 1e-2 / (seed + 1)
        for params, opt in ((ours, a), (theirs, b)):
            set_gradients(params, seed)
            opt.step()
    for p, q in zip(ours, theirs):
        assert reference.far(p, q) < 1e-6
        for name in ("exp_avg", "exp_avg_sq"):
            assert reference.far(a.state[p][name], b.state[q][name]) < 1e-6
        assert a.state[p]["step"] == b.state[q]["step"] == 6


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_state_of_either_loads_in_the_other(first):
    params, again = parameters(), parameters()
    kinds = [optim.AdamW, torch.optim.AdamW]
    if first == "theirs":
        kinds.reverse()
    a, b = kinds[0](params, **OPTIONS), kinds[1](again, **OPTIONS)
    set_gradients(params, 1)
    a.step()
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    with torch.no_grad():
        for p, q in zip(params, again):
            q.copy_(p)
    for group, opt in ((params, a), (again, b)):
        set_gradients(group, 2)
        opt.step()
    assert all(reference.far(p, q) < 1e-6 for p, q in zip(params, again))


def test_bfloat16_has_masters_that_are_saved():
    params = parameters(torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    a, b = optim.AdamW(params, **OPTIONS), torch.optim.AdamW(masters, **OPTIONS)
    for seed in range(4):
        set_gradients(params, seed)
        set_gradients(masters, seed)
        for p, m in zip(params, masters):
            m.grad.copy_(p.grad)
        a.step()
        b.step()
    for p, m in zip(params, masters):
        assert reference.far(a.state[p]["master"], m) < 1e-6 and torch.equal(p, a.state[p]["master"].bfloat16())
    again = parameters(torch.bfloat16)
    c = optim.AdamW(again, **OPTIONS)
    c.load_state_dict(a.state_dict())
    for p, q in zip(params, again):
        assert torch.equal(a.state[p]["master"], c.state[q]["master"])
        assert c.state[q]["master"].dtype == c.state[q]["exp_avg"].dtype == torch.float32


def test_scale_skip_and_small_moments():
    plain, scaled = parameters(), parameters()
    a, b = optim.AdamW(plain, **OPTIONS), optim.AdamW(scaled, **OPTIONS)
    set_gradients(plain, 1)
    set_gradients(scaled, 1)
    with torch.no_grad():
        for p in scaled:
            p.grad.mul_(4)
    a.step()
    b.step(grad_scale=torch.tensor(0.25))
    assert all(torch.equal(p, q) for p, q in zip(plain, scaled))
    before = [p.detach().clone() for p in plain]
    a.step(skip=torch.tensor(1.0))
    assert all(torch.equal(p, q) for p, q in zip(plain, before)) and a.state[plain[0]]["step"] == 1
    a.step(skip=torch.tensor(0.0))
    assert a.state[plain[0]]["step"] == 2 and not torch.equal(plain[0], before[0])
    small = parameters()
    c = optim.AdamW(small, **OPTIONS, state_dtype=torch.bfloat16)
    set_gradients(small, 1)
    c.step()
    assert c.state[small[0]]["exp_avg"].dtype == torch.bfloat16


def test_main_grad_is_what_counts():
    module = nn.GroupedLinear(3, 8, 4, grad="main_grad")
    module.weight.main_grad = torch.zeros_like(module.weight)
    opt = optim.AdamW(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    module(torch.randn(6, 8), torch.tensor([2, 1, 3])).sum().backward()
    opt.step()
    assert module.weight.grad is None and not torch.equal(module.weight, before)


def test_delayed_gradients_are_waited_for():
    module = nn.GroupedLinear(3, 8, 4, delay_wgrad=True)
    opt = optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(6, 8, requires_grad=True), torch.tensor([2, 1, 3])).sum().backward()
    with pytest.raises(moiety.InvalidArgument, match="1 weight gradients pending"):
        opt.step()
    module.backward_dw()
    opt.step()


def test_addresses_that_change():
    ours, theirs = parameters(), parameters()
    a, b = optim.AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    kept = []
    for seed in range(3):
        for params, opt in ((ours, a), (theirs, b)):
            kept += [p.grad for p in params]  # so that memory is not used again
            for p in params:
                p.grad = None
            set_gradients(params, seed)
            opt.step()
    assert all(reference.far(p, q) < 1e-6 for p, q in zip(ours, theirs))
    version = ours[0]._version
    a.step()
    assert ours[0]._version > version
    a.zero_grad()
    assert all((p.grad == 0).all() for p in ours)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_torchs(max_norm):
    ours, theirs = parameters(), parameters()
    set_gradients(ours, 3)
    set_gradients(theirs, 3)
    norm = optim.clip_grad_norm_(ours, max_norm)
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert abs(float(norm) - float(want)) < 1e-5 * float(want)
    assert all(torch.allclose(p.grad, q.grad, rtol=1e-5) for p, q in zip(ours, theirs))
    assert optim.clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0) == 0


@pytest.mark.parametrize("call,text", [
    (lambda: optim.AdamW(parameters(torch.float16)), "float16"),
    (lambda: optim.AdamW(parameters(), state_dtype=torch.float16), "state_dtype is torch.float16"),
    (lambda: optim.AdamW(parameters(), eps=0), "eps is 0")])
def test_errors(call, text):
    with pytest.raises(moiety.Error, match=text):
        opt = call()
        set_gradients([p for g in opt.param_groups for p in g["params"]], 1)
        opt.step()


def test_a_negative_learning_rate_is_refused():
    with pytest.raises(moiety.InvalidArgument, match="lr is -0.1"):
        optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=-0.1)
