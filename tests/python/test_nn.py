"""Modules: results, main_grad, delayed weight gradients, compile, checkpointing, state_dict."""

import copy

import pytest
import torch
import torch._dynamo

import moiety
import reference
from moiety import _experts, nn

def splits():
    return torch.tensor([5, 0, 9, 2])


def mlp(**options):
    torch.manual_seed(1)
    return nn.GroupedMLP(4, 16, 8, **options)


def rows(seed=2, **options):
    torch.manual_seed(seed)
    return torch.randn(18, 16, requires_grad=True, **options)


def with_main_grad(module, value=0.5, dtype=torch.float32):
    for linear in (module.fc1, module.fc2):
        linear.weight.main_grad = torch.full_like(linear.weight, value, dtype=dtype)
    return module


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("activation", [nn.Swiglu(), nn.ClampedSwiglu(0.7), nn.QGeglu(1.702, 7.0, 1.0),
                                        nn.SquaredRelu()])
def test_fused_is_its_linears(dtype, bound, activation):
    module = mlp(activation=activation, bias=True, dtype=dtype)
    x, p = rows(dtype=dtype), torch.rand(18)
    h = module.fc1(x, splits())
    a = activation
    inner = reference.activation(h.float(), a.kind, a.alpha, a.limit, a.offset) * p[:, None]
    want = module.fc2(inner.to(dtype), splits(), row_scale=p)
    assert reference.far(module(x, splits(), row_scale=p), want) < bound


def test_lists_and_leading_dimensions():
    module = mlp()
    x = rows().detach()
    y = module(x, splits())
    assert torch.equal(y, module(x, splits().tolist()))
    assert torch.equal(y.reshape(3, 6, 16), module(x.reshape(3, 6, 16), splits()))
    assert torch.equal(y, module(x, splits().int()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_adds_and_leaves_grad_alone(dtype):
    plain, module = mlp(), with_main_grad(mlp(grad="main_grad"), dtype=dtype)
    x = rows()
    # Two forwards before two backwards, as pipelines have them.
    ys = [module(x, splits()) for _ in range(2)]
    for y in ys:
        y.sum().backward()
    (2 * plain(x, splits())).sum().backward()
    for name in ("fc1", "fc2"):
        ours, theirs = getattr(module, name).weight, getattr(plain, name).weight
        assert ours.grad is None
        assert torch.allclose(ours.main_grad.float(), theirs.grad + 0.5,
                              atol=1e-4 if dtype == torch.float32 else 0.2)
    assert (module.fc1.weight.main_grad[1] == 0.5).all()  # an empty group


def test_a_linear_writes_into_a_buffer():
    linear = mlp(bias=True).fc1
    x, p, out = rows().detach(), torch.rand(18), torch.full((3, 6, 16), 12345.0)
    with torch.no_grad():
        given = linear(x.reshape(3, 6, 16), splits(), row_scale=p, out=out)
        want = linear(x, splits(), row_scale=p)
        assert given is out and torch.equal(out.reshape(18, 16)[:16], want[:16])
        assert (out.reshape(18, 16)[16:] == 12345).all()  # dead rows
        with pytest.raises(moiety.InvalidArgument, match=r"out has shape \[18, 15\]"):
            linear(x, splits(), out=torch.empty(18, 15))
    with pytest.raises(moiety.InvalidArgument, match="no_grad"):
        linear(x, splits(), out=out)
    with pytest.raises(moiety.Unsupported, match="recipe is 'mxfp8'"), torch.no_grad():
        nn.GroupedLinear(4, 16, 16, recipe="mxfp8", dtype=torch.bfloat16)(x.bfloat16(), splits(), out=out)


def saved_by(call):
    """The result of a call, and the addresses of tensors that it keeps for backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        result = call()
    return result, kept


@pytest.mark.parametrize("options", [{}, {"delay_wgrad": True}])
@pytest.mark.parametrize("frozen", ["", "x", "fc1", "fc2", "fc1 fc2"])
def test_experts_keep_no_operand_of_what_is_frozen(options, frozen):
    """Whatever is frozen, the gradients of the rest have the same bits."""
    whole, module = mlp(bias=True, **options), mlp(bias=True, **options)
    names = frozen.split()
    for name in set(names) & {"fc1", "fc2"}:
        getattr(module, name).requires_grad_(False)
    x, y = rows(), rows().detach().requires_grad_("x" not in names)
    p = torch.rand(18, requires_grad=True)
    q = p.detach().clone().requires_grad_()
    whole(x, splits(), row_scale=p).square().sum().backward()
    result, kept = saved_by(lambda: module(y, splits(), row_scale=q))
    assert (y.data_ptr() in kept) == ("fc1" not in names)  # it serves fc1's weight alone
    result.square().sum().backward()
    for m in (whole, module):
        while m.pending_dw:
            m.backward_dw()
    assert torch.equal(p.grad, q.grad) and ("x" in names or torch.equal(x.grad, y.grad))
    for name in ("fc1", "fc2"):
        for kind in ("weight", "bias"):
            ours = getattr(getattr(module, name), kind).grad
            assert ours is None if name in names else torch.equal(ours, getattr(getattr(whole, name), kind).grad)


def test_a_linear_of_our_own_function_keeps_what_serves():
    linear, x = mlp(delay_wgrad=True).fc1, rows()
    linear.requires_grad_(False)
    result, kept = saved_by(lambda: linear(x, splits()))
    assert x.data_ptr() not in kept and linear.weight.data_ptr() in kept
    linear.requires_grad_(True)
    result, kept = saved_by(lambda: linear(x.detach(), splits()))
    assert x.data_ptr() in kept and linear.weight.data_ptr() not in kept
    result.sum().backward()
    linear.backward_dw()
    assert linear.weight.grad.any()


def test_main_grad_by_function_and_what_is_wrong_with_one():
    module = mlp(grad="main_grad")
    with pytest.raises(moiety.InvalidArgument, match="neither main_grad nor get_main_grad"):
        module(rows(), splits())
    buffers = [torch.zeros_like(linear.weight) for linear in (module.fc1, module.fc2)]
    module.fc1.weight.get_main_grad = lambda: buffers[0]
    module.fc2.weight.get_main_grad = lambda: buffers[1]
    module(rows(), splits()).sum().backward()
    assert all(b.abs().sum() > 0 for b in buffers)
    module.fc1.weight.get_main_grad = lambda: torch.zeros(4, 16, 16).transpose(1, 2)[:, :, ::1]
    with pytest.raises(moiety.InvalidArgument, match=r"strides \[256, 1, 16\]"):
        module(rows(), splits())
    # A spurious .grad adds nothing to main_grad.
    module = with_main_grad(mlp(grad="main_grad"), 0.0)
    module.fc1.weight.grad = torch.full_like(module.fc1.weight, 12345.0)
    module(rows(), splits()).sum().backward()
    assert module.fc1.weight.main_grad.abs().max() < 12345
    assert (module.fc1.weight.grad == 12345).all()


@pytest.mark.parametrize("grad", ["grad", "main_grad"])
def test_delayed_weight_gradients(grad):
    now, later = mlp(bias=True, grad=grad), mlp(bias=True, grad=grad, delay_wgrad=True)
    if grad == "main_grad":
        with_main_grad(now), with_main_grad(later)
    order = []
    for name in ("fc1", "fc2"):
        getattr(later, name).on_grad_ready(lambda w, name=name: order.append(name))
    inputs = [rows(seed) for seed in (3, 4, 5)]
    for module in (now, later):
        for x in inputs:
            x.grad = None
            module(x, splits(), row_scale=torch.linspace(0, 1, 18)).square().sum().backward()
            x.kept = getattr(x, "kept", []) + [x.grad]
    assert later.pending_dw == 3 and not order
    target = "main_grad" if grad == "main_grad" else "grad"
    optimizer = torch.optim.SGD(later.parameters(), lr=0.1)
    with pytest.raises(moiety.InvalidArgument, match="3 weight gradients pending"):
        optimizer.step()
    for _ in range(3):
        later.backward_dw()
    assert order == ["fc2", "fc1"] * 3 and later.pending_dw == 0
    with pytest.raises(moiety.InvalidArgument, match="no weight gradient is pending"):
        later.backward_dw()
    for name in ("fc1", "fc2"):
        a, b = getattr(now, name), getattr(later, name)
        assert torch.equal(getattr(a.weight, target), getattr(b.weight, target))
        assert torch.equal(a.bias.grad, b.bias.grad)
    assert all(torch.equal(*x.kept) for x in inputs)
    optimizer.step()


def test_a_linear_delays_and_adds_to_a_gradient_that_is_there():
    torch.manual_seed(6)
    now = nn.GroupedLinear(4, 16, 6, bias=True)
    later = nn.GroupedLinear(4, 16, 6, bias=True, delay_wgrad=True)
    later.load_state_dict(now.state_dict())
    now.weight.grad = torch.ones_like(now.weight)
    later.weight.grad = torch.ones_like(now.weight)
    for module in (now, later):
        module(rows(), splits()).sum().backward()
    later.backward_dw()
    assert torch.equal(now.weight.grad, later.weight.grad)


def test_hooks_once_a_contribution():
    module, calls = mlp(), []
    handle = module.fc1.on_grad_ready(lambda w: calls.append(w.grad is not None))
    for _ in range(2):
        module(rows(), splits()).sum().backward()
    assert calls == [True, True]
    handle.remove()
    module(rows(), splits()).sum().backward()
    assert calls == [True, True]


def layer(**options):
    torch.manual_seed(7)
    return nn.MoELayer(16, 8, 6, 2, **options)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_moe_layer_and_gradients(dtype, bound):
    module = layer(dtype=dtype)
    x = torch.randn(3, 11, 16).to(dtype).requires_grad_()
    out = module(x)
    exact = copy.deepcopy(module).double()
    x64 = x.detach().double().requires_grad_()
    flat = x64.reshape(-1, 16)
    logits = flat @ exact.router.weight.T
    w, _ = reference.router(logits, 2)
    # The choice of the lower precision; the weights of the higher one.
    idx = out.idx.long()
    p = torch.softmax(logits, -1).gather(1, idx)
    y = reference.moe(flat, exact.experts.fc1.weight, exact.experts.fc2.weight, idx,
                      p / p.sum(-1, keepdim=True))
    aux = 6 * (out.counts.double() / idx.numel() * torch.softmax(logits, -1).mean(0)).sum()
    z = torch.logsumexp(logits, -1).square().mean()
    grad = torch.randn(3, 11, 16).to(dtype)
    (out.y.float() * grad.float()).sum().add(out.aux_loss, alpha=0.1).add(out.z_loss, alpha=0.01).backward()
    (y.reshape(3, 11, 16) * grad.double()).sum().add(aux, alpha=0.1).add(z, alpha=0.01).backward()
    assert reference.far(out.y, y.reshape(3, 11, 16)) < bound
    assert abs(out.aux_loss.item() - aux.item()) < 1e-4 and abs(out.z_loss.item() - z.item()) < 1e-4
    assert reference.far(x.grad, x64.grad) < bound
    for (name, ours), right in zip(module.named_parameters(), exact.parameters()):
        assert reference.far(ours.grad, right.grad) < bound, name


def test_replayed_routing_masks_and_no_tokens():
    module, x = layer(shared_d_ffn=4), torch.randn(9, 16)
    first = module(x)
    other = layer(shared_d_ffn=4)
    torch.nn.init.normal_(other.router.weight)
    second = other(x, idx=first.idx)
    assert torch.equal(first.idx, second.idx) and not torch.equal(first.y, second.y)
    mask = torch.arange(9) % 2 == 0
    out = layer()(x, mask=mask)
    assert (out.y[~mask] == 0).all() and out.counts.sum() == 2 * mask.sum()
    assert torch.allclose(out.aux_loss, layer()(x[mask]).aux_loss)
    nothing = module(x[:0])
    assert nothing.y.shape == (0, 16) and nothing.aux_loss == 0
    nothing = layer()(x, mask=mask & ~mask)
    assert (nothing.y == 0).all() and torch.isfinite(nothing.z_loss)


def test_router_bias_moves_towards_balance():
    module = layer(router=nn.RouterConfig(score="sigmoid", bias=True))
    module.update_router_bias(torch.tensor([9, 0, 3, 3, 3, 0]), 0.25)
    assert module.router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0.25]
    with pytest.raises(moiety.InvalidArgument, match="has no bias"):
        layer().update_router_bias(torch.zeros(6, dtype=torch.int64), 0.1)


def test_several_ranks_are_refused_by_name():
    with pytest.raises(moiety.Unsupported, match="ep is 'world'"):
        layer(ep="world")
    with pytest.raises(moiety.InvalidArgument, match="top_k is 7"):
        nn.MoELayer(16, 8, 6, 7)
    with pytest.raises(moiety.InvalidArgument, match="grad is 'both'"):
        mlp(grad="both")
    with pytest.raises(moiety.InvalidArgument, match="splits is None"):
        nn.GroupedLinear(2, 8, 4)(torch.randn(6, 8), None)
    with pytest.raises(moiety.InvalidArgument, match=r"GroupedLinear: x has 9 columns, the weight \[2, 4, 8\]"):
        nn.GroupedLinear(2, 8, 4)(torch.randn(6, 9), [2, 4])


def test_recomputation_repeats_the_bits():
    from torch.utils.checkpoint import checkpoint

    module, x = layer(), torch.randn(20, 16, requires_grad=True)
    module(x).y.square().sum().backward()
    plain = [x.grad.clone()] + [p.grad.clone() for p in module.parameters()]
    x.grad = None
    module.zero_grad()
    checkpoint(lambda t: module(t).y, x, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(plain, [x.grad] + [p.grad for p in module.parameters()]))


def test_autocast_takes_the_weights_dtype(device):
    module = mlp(dtype=torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert module(torch.randn(18, 16), splits()).dtype == torch.bfloat16


# ---- state_dict


@pytest.mark.parametrize("experts", [1, 12])
def test_indexed_keys_load(experts):
    torch.manual_seed(8)
    module = torch.nn.Sequential(nn.GroupedLinear(experts, 4, 3, bias=True), torch.nn.Linear(3, 2))
    state = {k: v for k, v in module.state_dict().items() if not k.startswith("0.")}
    weight, bias = torch.randn(experts, 3, 4), torch.randn(experts, 3)
    for e in range(experts):
        state[f"0.weight{e}"] = weight[e]
    state["0.bias"] = bias
    before = dict(state)
    module.load_state_dict(state)
    assert torch.equal(module[0].weight, weight) and torch.equal(module[0].bias, bias)
    assert state.keys() == before.keys()
    again = torch.nn.Sequential(nn.GroupedLinear(experts, 4, 3, bias=True), torch.nn.Linear(3, 2))
    again.load_state_dict(module.state_dict())
    assert torch.equal(again[0].weight, weight)


def test_partial_and_wrong_indexed_keys_are_left_and_reported():
    module = nn.GroupedLinear(3, 4, 2)
    before = module.weight.detach().clone()
    one = torch.zeros(2, 4)
    for state, text in [({"weight0": one, "weight2": one}, "1"),
                        ({"weight0": one, "weight1": one, "weight2": one, "weight3": one}, "weight3"),
                        ({"weight0": one, "weight1": one, "weight02": one}, "weight02"),
                        ({"weight0": one, "weight1": one, "weight2": one.T}, "weight")]:
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict(state)
        assert torch.equal(module.weight, before)


@pytest.mark.parametrize("options", [{}, {"grad": "main_grad"}, {"delay_wgrad": True},
                                     {"recipe": "nvfp4", "dtype": torch.bfloat16}])
def test_warmup_changes_nothing(options):
    module = layer(router=nn.RouterConfig(bias=True), **options)
    linears, called = (module.experts.fc1, module.experts.fc2), []
    for linear in linears:
        linear.weight.main_grad = torch.full(linear.weight.shape, 0.5)
        linear.on_grad_ready(called.append)
    x = torch.randn(9, 16, dtype=options.get("dtype"), requires_grad=True)
    module(x).y.float().sum().backward()
    before = {name: p.grad for name, p in module.named_parameters()}
    values = [None if g is None else g.clone() for g in before.values()]
    state = [t.clone() for t in (*module.buffers(), *(w.weight.main_grad for w in linears), x.grad)]
    pending, times = module.experts.pending_dw, len(called)
    example = torch.randn(5, 16, dtype=options.get("dtype"))
    random = torch.random.get_rng_state()
    nn.warmup(module, example, mask=torch.ones(5))
    nn.warmup(module, x)
    with torch.no_grad():
        nn.warmup(module, x)
    assert all(before[name] is p.grad for name, p in module.named_parameters())
    assert all(g is None or torch.equal(g, want) for g, want in zip(before.values(), values))
    now = (*module.buffers(), *(w.weight.main_grad for w in linears), x.grad)
    assert all(torch.equal(a, b) for a, b in zip(now, state))
    assert (module.experts.pending_dw, len(called)) == (pending, times)
    assert torch.equal(torch.random.get_rng_state(), random)


# ---- torch.compile


def graphs(call, *inputs, **options):
    """The results of compiled calls, and how many graphs they took."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, **options)
    return [compiled(x) for x in inputs], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("dynamic,most", [(None, 2), (True, 1)])
def test_compiled_layer_is_eager_and_takes_few_graphs(dynamic, most):
    module = layer(shared_d_ffn=4)
    inputs = [torch.randn(n, 16) for n in (7, 64, 4096)]
    results, made = graphs(lambda x: module(x).y, *inputs, dynamic=dynamic)
    assert made <= most
    for x, y in zip(inputs, results):
        assert torch.allclose(y, module(x).y, atol=1e-6)


def test_blocks_compiled_one_by_one_share_graphs():
    blocks = [layer() for _ in range(12)]
    torch._dynamo.reset()
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    x = torch.randn(10, 16, requires_grad=True)
    total = sum(block(x).y.sum() for block in blocks)
    total.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert all(block.experts.fc1.weight.grad is not None for block in blocks)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_main_grad(backend):
    torch._dynamo.reset()
    eager, compiled = (with_main_grad(mlp(grad="main_grad")) for _ in range(2))
    call = torch.compile(compiled, backend=backend, fullgraph=True)
    for seed in (3, 4):
        x, y = rows(seed), rows(seed)
        eager(x, splits()).square().sum().backward()
        call(y, splits()).square().sum().backward()
        assert torch.allclose(x.grad, y.grad, atol=1e-6)
    for name in ("fc1", "fc2"):
        assert torch.allclose(getattr(eager, name).weight.main_grad,
                              getattr(compiled, name).weight.main_grad, atol=1e-5)
        assert getattr(compiled, name).weight.grad is None


def test_compile_refuses_what_it_cannot_do():
    torch._dynamo.reset()
    module = mlp(delay_wgrad=True)
    with pytest.raises(Exception, match="torch.compile"):
        torch.compile(module, backend="eager", fullgraph=True)(rows(), splits())


def test_training_goes_down():
    module = layer(shared_d_ffn=8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    x, losses = torch.randn(64, 16), []
    for _ in range(30):
        out = module(x)
        loss = (out.y - x.flip(-1)).square().mean() + 0.01 * out.aux_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_refresh_lays_moved_parameters_together_again():
    module = mlp(params="indexed", bias=True, bias_params="indexed")
    before = module(rows(), splits())
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    names = {name: id(p) for name, p in module.named_parameters()}
    assert _experts.over(module.fc1.experts_of("weight")) is None
    assert torch.equal(module(rows(), splits()), before)  # as a copy
    assert nn.refresh(torch.nn.ModuleList([module])) == 4
    assert nn.refresh(module) == 0
    assert {name: id(p) for name, p in module.named_parameters()} == names
    for linear in (module.fc1, module.fc2):
        for name in ("weight", "bias"):
            assert _experts.over(linear.experts_of(name)) is not None
    assert torch.equal(module(rows(), splits()), before)


def test_quantized_weights_are_those_of_the_moment():
    module = nn.GroupedLinear(3, 16, 16, recipe="mxfp8", dtype=torch.bfloat16)
    x, sizes = torch.randn(6, 16, dtype=torch.bfloat16), torch.tensor([2, 2, 2])
    module(x, sizes)
    with torch.no_grad():
        module.weight.neg_()
    got = module(x, sizes)
    assert nn.refresh(module) == 0
    assert got.any() and torch.equal(module(x, sizes), got)
    with torch.no_grad():
        module.weight.neg_()
    assert torch.equal(module(x, sizes), -got)
