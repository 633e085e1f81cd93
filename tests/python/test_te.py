"""Transformer Engine's names: keys, paths, hooks, main_grad, partial casts; the bits are moiety.nn's."""

import copy
import io

import pytest
import torch

import moiety
import reference
from moiety import nn, quant, te
from test_quant import empty_like, same, values

SPLITS = [5, 0, 9, 2]
ROWS = 18  # two of them dead


def rows(seed=2, columns=16, **options):
    torch.manual_seed(seed)
    return torch.randn(ROWS, columns, requires_grad=True, **options)


def linear(groups=4, columns=16, features=6, **options):
    torch.manual_seed(1)
    return te.GroupedLinear(groups, columns, features, **options)


def weights(module):
    return torch.stack(list(module.stacked("weight")))


# ---- parameters and their keys


@pytest.mark.parametrize("experts", [1, 12])
@pytest.mark.parametrize("weight_grouped", [False, True])
@pytest.mark.parametrize("bias_grouped", [False, True])
def test_keys_of_either_form_load_into_either(experts, weight_grouped, bias_grouped):
    def make(a, b):
        return torch.nn.Sequential(linear(experts, 4, 3, single_grouped_weight=a, single_grouped_bias=b),
                                   torch.nn.Linear(3, 2))

    source, target = make(weight_grouped, bias_grouped), make(not weight_grouped, not bias_grouped)
    for p in source.parameters():
        torch.nn.init.normal_(p)
    state = source.state_dict()
    names = {k[2:].rstrip("0123456789") if k.startswith("0.") else k for k in state}
    assert names == {"weight", "bias", "1.weight", "1.bias"}
    assert len(state) == 2 + (1 if weight_grouped else experts) + (1 if bias_grouped else experts)
    state["0._extra_state"] = torch.empty(0, dtype=torch.uint8)  # as other libraries save it
    before = dict(state)
    target.load_state_dict(state)
    assert state.keys() == before.keys() and all(state[k] is before[k] for k in before)
    assert torch.equal(weights(source[0]), weights(target[0]))
    assert torch.equal(source[0].stacked("bias"), target[0].stacked("bias"))
    back = make(weight_grouped, bias_grouped)
    back.load_state_dict(target.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), back.parameters()))


def test_keys_that_do_not_fit_are_left_and_reported():
    module, one = linear(3, 4, 2, bias=False), torch.zeros(2, 4)
    for state, text in [({"weight0": one, "weight2": one}, "1"),
                        ({"weight": torch.zeros(4, 2, 4)}, "weight"),
                        ({"weight": torch.zeros(3, 2, 4), "weight0": one}, "weight"),
                        ({f"weight{e}": one for e in range(4)}, "weight3"),
                        ({"weight": torch.zeros(3, 2, 4), "_extra_state": io.BytesIO(b"x")}, "_extra_state")]:
        before = dict(state)
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict(state)
        assert state == before


def test_indexed_parameters_lie_in_one_storage_and_stay_there():
    module = linear()
    pointer = module.weight0.data_ptr()
    assert module.stacked("weight").data_ptr() == pointer
    for moved in (copy.deepcopy(module), copy.deepcopy(module).to(torch.bfloat16).float()):
        assert moved.stacked("weight").data_ptr() == moved.weight0.data_ptr() != pointer
    meta = te.GroupedLinear(4, 16, 6, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    meta.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert meta.stacked("weight").data_ptr() == meta.weight0.data_ptr()
    # Where somebody moves one away, calls are still right.
    want = module(rows(), SPLITS)
    module.weight2.data = module.weight2.data.clone()
    assert module.stacked("weight").data_ptr() != pointer
    got = module(rows(), SPLITS)
    assert torch.equal(got, want)
    got.sum().backward()
    assert module.weight2.grad is not None
    pickled = io.BytesIO()
    torch.save(module, pickled)
    pickled.seek(0)
    assert torch.equal(torch.load(pickled, weights_only=False)(rows(), SPLITS), want)


def test_a_weight_that_changes_before_backward_is_noticed():
    module = linear()
    y = module(rows(), SPLITS)
    with torch.no_grad():
        module.weight3.add_(1)
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        y.sum().backward()


def test_initialization():
    module = linear(8, 64, 64)
    assert abs(weights(module).std().item() - 0.023) < 1e-3
    assert all((getattr(module, f"bias{e}") == 0).all() for e in range(8))
    module = te.GroupedLinear(3, 4, 2, init_method=lambda w: torch.nn.init.constant_(w, w.shape[0]))
    assert (weights(module) == 2).all()


# ---- the linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
def test_bits_and_gradients_are_those_of_nn(dtype, grouped):
    ours = linear(params_dtype=dtype, single_grouped_weight=grouped, single_grouped_bias=grouped)
    other = nn.GroupedLinear(4, 16, 6, bias=True, dtype=dtype)
    other.load_state_dict(ours.state_dict())
    x, y = rows(dtype=dtype), rows(dtype=dtype)
    a, b = ours(x, SPLITS), other(y, torch.tensor(SPLITS))
    assert torch.equal(a, b) and torch.equal(a, ours(x, torch.tensor(SPLITS, dtype=torch.int32)))
    for out in (a, b):
        out.square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for name in ("weight", "bias"):
        grads = [p.grad for p in ours.experts_of(name)]
        assert torch.equal(grads[0] if grouped else torch.stack(grads), getattr(other, name).grad)
    assert ours(x.reshape(3, 6, 16), SPLITS).shape == (3, 6, 6)


def test_biases_that_are_returned_are_not_added():
    module = linear(return_bias=True)
    torch.nn.init.ones_(module.bias1)
    y, biases = module(rows(), SPLITS)
    assert len(biases) == 4 and torch.equal(biases[1], torch.ones(6))
    assert torch.equal(y, linear(bias=False)(rows(), SPLITS))


def test_frozen_experts_get_no_gradient():
    module = linear()
    module.weight2.requires_grad_(False)
    module(rows(), SPLITS).sum().backward()
    assert module.weight2.grad is None and module.weight0.grad is not None
    module = linear(delay_wgrad_compute=True)
    module.weight2.requires_grad_(False)
    module(rows(), SPLITS).sum().backward()
    module.backward_dw()
    assert module.weight2.grad is None and module.weight0.grad is not None


def buffers(module, apart, value=0.5, dtype=torch.float32):
    """main_grad of every expert: side by side, or each in memory of its own."""
    parameters = module.experts_of("weight")
    stack = torch.full((len(parameters), *parameters[0].shape), value, dtype=dtype)
    for p, part in zip(parameters, stack):
        p.main_grad = part.clone() if apart else part
    return module


def test_main_grad_adds_and_nothing_else_does():
    plain = linear()
    plain(rows(), SPLITS).square().sum().backward()
    for apart in (False, True):
        module = buffers(linear(fuse_wgrad_accumulation=True), apart)
        for p in module.experts_of("weight"):
            p.grad = torch.full_like(p, 12345.0)
            p.grad_added_to_main_grad = False
        module(rows(), SPLITS).square().sum().backward()
        for p, other in zip(module.experts_of("weight"), plain.experts_of("weight")):
            assert torch.allclose(p.main_grad, other.grad + 0.5, atol=1e-5)
            assert (p.grad == 12345).all() and p.grad_added_to_main_grad
        assert (module.weight1.main_grad == 0.5).all()  # an empty group
        assert module.bias0.grad is not None


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["first", "attribute", "factor"])
def test_main_grad_is_overwritten(apart, how):
    module = buffers(linear(fuse_wgrad_accumulation=True), apart, float("nan"))
    if how != "first":
        module.weight0.overwrite_main_grad = True if how == "attribute" else torch.zeros(1)
    module(rows(), SPLITS, is_first_microbatch=how == "first" or None).square().sum().backward()
    want = linear()
    want(rows(), SPLITS).square().sum().backward()
    for p, other in zip(module.experts_of("weight"), want.experts_of("weight")):
        assert torch.equal(p.main_grad, other.grad)


def test_main_grad_by_function_and_what_is_wrong_with_one():
    module = linear(fuse_wgrad_accumulation=True)
    for p in module.experts_of("weight"):
        p.get_main_grad = lambda p=p: p.__dict__.setdefault("kept", torch.zeros_like(p))
    module(rows(), SPLITS).sum().backward()
    assert module.weight0.kept.abs().sum() > 0 and module.weight0.grad is None
    module.weight1.get_main_grad = lambda: torch.zeros(16, 6).t()
    with pytest.raises(moiety.InvalidArgument, match=r"shape \[6, 16\] and strides \[1, 6\]"):
        module(rows(), SPLITS).sum().backward()
    del module.weight1.get_main_grad
    with pytest.raises(moiety.InvalidArgument, match="neither main_grad nor get_main_grad"):
        module(rows(), SPLITS).sum().backward()


@pytest.mark.parametrize("fuse", [False, True])
def test_delayed_gradients_add_in_order(fuse):
    now = linear(fuse_wgrad_accumulation=fuse)
    later = linear(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True)
    if fuse:
        buffers(now, False), buffers(later, False)
    seen = []
    later.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(later.pending_dw))
    for module in (now, later):
        for seed in (3, 4):
            module(rows(seed), SPLITS).square().sum().backward()
    assert later.need_backward_dw() and not now.need_backward_dw() and later.pending_dw == 2
    with pytest.raises(moiety.InvalidArgument, match="2 weight gradients pending"):
        torch.optim.SGD(later.parameters(), lr=0.1).step()
    other = copy.deepcopy(linear(delay_wgrad_compute=True))
    other(rows(), SPLITS).sum().backward()
    with pytest.raises(moiety.InvalidArgument, match="1 weight gradients pending"):
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    now.backward_dw()  # nothing is to be done
    later.backward_dw(), later.backward_dw()
    assert seen == [1, 0]
    target = "main_grad" if fuse else "grad"
    for a, b in zip(now.experts_of("weight"), later.experts_of("weight")):
        assert torch.equal(getattr(a, target), getattr(b, target))


def test_optimizer_states_of_indexed_modules_are_remapped():
    indexed, grouped = linear(3, 4, 2), linear(3, 4, 2, single_grouped_weight=True, single_grouped_bias=True)
    grouped.load_state_dict(indexed.state_dict())
    states = []
    for module in (indexed, grouped):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        torch.manual_seed(3)
        module(torch.randn(6, 4), [2, 3, 1]).square().sum().backward()
        optimizer.step()
        states.append(optimizer.state_dict())
    for module in (indexed, grouped):
        packed = moiety.checkpoint.remap_optimizer(states[0], module)
        spread = moiety.checkpoint.remap_optimizer(states[1], module, "indexed")
        for got, want in ((packed, states[1]), (spread, states[0])):
            assert got["state"].keys() == want["state"].keys()
            for key, state in want["state"].items():
                assert all(torch.equal(state[k], got["state"][key][k]) for k in state)


# ---- Sequential


def mlp(activation=None, bias=False, interleave=None, groups=4, d=16, f=8, scale_bias=True, **options):
    torch.manual_seed(5)
    activation = activation or te.ops.ScaledSwiGLU(interleave)
    hidden = 2 * f if activation.activation.gated else f
    return te.ops.Sequential(te.ops.GroupedLinear(groups, d, hidden, bias=bias, **options), activation,
                             te.ops.GroupedLinear(groups, f, d, bias=bias, scale_bias=scale_bias, **options))


def grads(model, x, p):
    return [x.grad, p.grad, *(q.grad for q in model.parameters())]


def run(model, splits=None, second=None, dtype=torch.float32):
    splits = torch.tensor(SPLITS) if splits is None else splits
    x, p = rows(dtype=dtype), torch.linspace(0, 1, ROWS, requires_grad=True)
    more = (p,) if model[2].scale_bias else ()
    y = model(x, splits, p, splits if second is None else second, *more)
    y.square().sum().backward()
    return y, grads(model, x, p)


ACTIVATIONS = {"swiglu": te.ops.ScaledSwiGLU, "srelu": te.ops.ScaledSReLU, "qgeglu": te.ops.ScaledClampedQGeGLU,
               "clamp 0.3": lambda: te.ops.ScaledClampedQGeGLU(limit=0.3, glu_linear_offset=0.0),
               "no clamp": lambda: te.ops.ScaledClampedQGeGLU(limit=float("inf"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fused_and_unfused_have_the_same_bits(name, bias, dtype):
    model = mlp(ACTIVATIONS[name](), bias, dtype=dtype)
    y, first = run(model, dtype=dtype)
    assert model.path == "fused" and model.why is None
    model.zero_grad()
    z, second = run(model, second=torch.tensor(SPLITS), dtype=dtype)
    assert model.path == "unfused" and "two objects" in model.why
    assert torch.equal(y, z) and (y[sum(SPLITS):] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_sequential_is_the_mathematics(name):
    model = mlp(ACTIVATIONS[name](), bias=True)
    act = model[1].activation
    y, got = run(model)
    x, p = rows().detach().double().requires_grad_(), torch.linspace(0, 1, ROWS).double().requires_grad_()
    w1, b1, w2, b2 = (model[i].stacked(n).detach().double().requires_grad_()
                      for i in (0, 2) for n in ("weight", "bias"))
    want = reference.grouped_mlp(x, w1, w2, torch.tensor(SPLITS), p, b1, b2, kind=act.kind, alpha=act.alpha,
                                 limit=act.limit, offset=act.offset)
    want.square().sum().backward()
    assert reference.far(y, want) < 1e-5
    right = [x.grad, p.grad, *(part for t in (w1, b1, w2, b2) for part in t.grad)]
    for a, b in zip(got, right):
        assert reference.far(a, b) < 1e-5 or b.norm() == 0


def test_it_is_the_grouped_mlp_of_nn():
    model = mlp(single_grouped_weight=True)
    other = nn.GroupedMLP(4, 16, 8)
    other.load_state_dict({"fc1.weight": model[0].weight, "fc2.weight": model[2].weight})
    p = torch.linspace(0, 1, ROWS)
    for x in (rows(), rows().reshape(3, 6, 16)):
        y = model(x, SPLITS, p, list(SPLITS))
        assert model.path == "fused" and torch.equal(y, other(x, SPLITS, row_scale=p))


def test_interleaved_halves():
    plain, woven = mlp(f=16), mlp(f=16, interleave=8)
    for e in range(4):
        w = getattr(plain[0], f"weight{e}").detach()
        getattr(woven[0], f"weight{e}").data.copy_(w.view(2, 2, 8, 16).transpose(0, 1).reshape(32, 16))
    y, _ = run(plain)
    z, _ = run(woven)
    assert woven.path == "fused" and torch.equal(y, z)
    z, _ = run(woven, second=torch.tensor(SPLITS))
    assert woven.path == "unfused" and torch.equal(y, z)


def test_what_is_not_fused_says_why():
    def why(model, *extra):
        model(rows().detach(), *extra)
        assert model.path == "unfused"
        return model.why

    s, p = torch.tensor(SPLITS), torch.rand(ROWS)
    assert "not scaled by" in why(mlp(bias=True, scale_bias=False), s, p, s)
    assert "not scaled by" in why(mlp(bias=True), s, p, s, p.clone())
    seen = []
    hooked = mlp()
    hooked[0].register_forward_hook(lambda *args: seen.append(1))
    assert "hooks" in why(hooked, s, p, s) and seen == [1]
    assert "not a GroupedLinear" in why(te.ops.Sequential(mlp()[0]), s)
    # Each operation runs alone, too; a bias that is not scaled is added as it is.
    model = mlp(bias=True, scale_bias=False)
    x = rows().detach()
    y = model(x, s, p, s)
    assert torch.equal(y, model[2](model[1](model[0](x, s), p), s))
    live = sum(SPLITS)
    bare = model[2](torch.zeros(ROWS, 8), s)[:live]
    assert torch.equal(bare, model[2].stacked("bias").repeat_interleave(s, 0))


def test_hooks_run_once_through_the_fused_path():
    for delay in (False, True):
        model, seen = mlp(delay_wgrad_compute=delay), []
        for i, name in ((0, "fc1"), (2, "fc2")):
            model[i].register_wgrad_accumulation_and_reduce_hooks(lambda name=name, seen=seen: seen.append(name))
            model[i].register_forward_pre_hook(
                lambda *args, name=name, seen=seen: seen.append("pre " + name))
        run(model)
        assert model.path == "fused"
        if delay:
            assert seen == ["pre fc1", "pre fc2"]
            model[2].backward_dw(), model[0].backward_dw()
        assert seen == ["pre fc1", "pre fc2", "fc2", "fc1"]
    model[0].register_forward_pre_hook(lambda module, args: args)
    with pytest.raises(moiety.Unsupported, match="returned a value"):
        run(model)


def test_sequential_accumulates_into_main_grad():
    plain, model = mlp(), mlp(accumulate_into_main_grad=True)
    buffers(model[0], True), buffers(model[2], False)
    run(plain), run(model)
    assert model.path == "fused"
    for i in (0, 2):
        for a, b in zip(plain[i].experts_of("weight"), model[i].experts_of("weight")):
            assert b.grad is None and torch.allclose(a.grad + 0.5, b.main_grad, atol=1e-4)


def test_a_copy_and_a_replaced_operation_are_fused_over_their_own_weights():
    model = mlp()
    y, _ = run(model)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data.mul_(2)
    z, _ = run(other)
    assert other.path == "fused" and not torch.equal(y, z)
    assert torch.equal(run(model)[0], y)
    model[2] = other[2]
    assert torch.allclose(run(model)[0], 2 * y)


@pytest.mark.parametrize("grouped", [False, True])
def test_compiled(grouped):
    torch._dynamo.reset()
    model = mlp(single_grouped_weight=grouped)
    s, p = torch.tensor(SPLITS), torch.rand(ROWS)
    want = model(rows(), s, p, s)
    want.sum().backward()
    right = [q.grad.clone() for q in model.parameters()]
    model.zero_grad()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(rows(), s, p, s)
    got.sum().backward()
    assert torch.equal(got, want)
    assert all(torch.equal(a, q.grad) for a, q in zip(right, model.parameters()))


# ---- master weights


@pytest.mark.parametrize("format", ["fp8", "fp8_block_tile", "mxfp8", "mxfp8_tile", "nvfp4_tile"])
def test_master_weights_are_cast_like_the_whole(format):
    masters = [values(40, 72), values(33, 16, seed=2), torch.zeros(8, 16)]
    whole = [quant.quantize(m.bfloat16(), format, "both") for m in masters]
    targets = [empty_like(q) for q in whole]
    te.quantize_master_weights(targets, masters, [0, 0, 0], None)
    for q, target in zip(whole, targets):
        if format == "mxfp8_tile":
            target.tensor_scale[1] = 1  # a constant that no cast writes
        same(q, target)
    masters[0].mul_(3)
    te.quantize_master_weights(targets, masters, [0, 0, 0], None, manual_post_all_gather_processing=True)
    te.post_all_gather_processing(targets)
    same(quant.quantize(masters[0].bfloat16(), format, "both"), targets[0])
    te.post_all_gather_processing(torch.ones(2, 2))


@pytest.mark.parametrize("format", ["fp8", "fp8_block_tile", "mxfp8", "mxfp8_tile", "nvfp4_tile"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_cast_like_the_whole(format, value):
    master = values(40, 72)
    master[7, 9] = value
    rounded = master.bfloat16()
    if value != value:  # which bits torch gives a NaN depends on the CPU
        rounded.view(torch.int16)[7, 9] = 0x7FFF
    whole = quant.quantize(rounded, format, "both")
    target = empty_like(whole)
    te.quantize_master_weights([target], [master], [0], None)
    if format == "mxfp8_tile":
        target.tensor_scale[1] = 1
    same(whole, target)
    assert target.flags == 1
    target.row.view(torch.uint8)[39, 0] ^= 1  # the comparison can fail
    with pytest.raises(AssertionError, match="row"):
        same(whole, target)


def test_shards_of_masters_and_the_table_that_is_kept():
    master = values(24, 40)
    target = empty_like(quant.quantize(master.bfloat16(), "nvfp4_tile"))
    before = target.row.view(torch.uint8).clone()
    most = master.clone()
    shard = master.flatten()[:488]
    te.cast_master_weights_to_nvfp4([target], [shard], [0], None)
    kept = next(reversed(quant._kept.values()))
    te.cast_master_weights_to_nvfp4([target], [master.flatten()[:488]], [0], None)
    assert next(reversed(quant._kept.values())) is kept  # the same addresses, another object
    changed = (target.row.view(torch.uint8) != before).any(1)
    assert changed[:12].all() and not changed[13:].any()  # 488 elements are 12 rows and a part
    te.cast_master_weights_to_nvfp4([target], [None], [None], None)
    assert torch.equal(master, most)


def test_raw_data_is_replaced():
    master = values(32, 64)
    q = quant.quantize(master.bfloat16(), "nvfp4_tile", "both")
    want = copy.deepcopy(q)
    buffer = torch.zeros(q.row.nbytes + 64, dtype=torch.uint8)
    te.replace_raw_data(q, buffer[64:])
    same(q, want)
    assert q.row.data_ptr() == buffer.data_ptr() + 64
    te.quantize_master_weights([q], [master * 2], [0], None)
    same(q, quant.quantize((master * 2).bfloat16(), "nvfp4_tile", "both"))
    with pytest.raises(moiety.InvalidArgument, match="1024 bytes, the new data"):
        te.replace_raw_data(q, buffer)


# ---- what has no counterpart


@pytest.mark.parametrize("call,kind,text", [
    (lambda: linear(tp_size=2), moiety.Unsupported, "tp_size is 2"),
    (lambda: linear(sequence_parallel=True), moiety.Unsupported, "sequence_parallel is True"),
    (lambda: linear(ub_overlap_ag=True), moiety.Unsupported, "ub_overlap_ag"),
    (lambda: linear(0), moiety.InvalidArgument, "num_groups is 0"),
    (lambda: linear()(rows(), [1, 2, 3]), moiety.InvalidArgument, "w"),
    (lambda: linear()(rows(columns=8), SPLITS), moiety.InvalidArgument, "x has 8 columns"),
    (lambda: te.ops.GroupedLinear(2, 4, 4, rng_state_tracker_function=list), moiety.Unsupported, "rng_state"),
    (lambda: mlp()(rows(), SPLITS), moiety.InvalidArgument, r"1 extra inputs are given.*\[1, 1, 1\]"),
    (lambda: mlp(bias=True)[2](torch.ones(16, 8), SPLITS), moiety.InvalidArgument, "scale_bias takes"),
    (lambda: te.LayerNormLinear, moiety.Unsupported, "torch.nn.LayerNorm, then torch.nn.Linear"),
    (lambda: te.fp8_autocast, moiety.Unsupported, "moiety.quant.quantize"),
    (lambda: te.ops.SwiGLU, moiety.Unsupported, "moiety.ops.activation"),
    (lambda: te.quantize_master_weights([], [None], [0], None), moiety.InvalidArgument, "0 weights, 1 masters"),
    (lambda: te.quantize_master_weights([], [], [], None, []), moiety.Unsupported, "fsdp_shard"),
    (lambda: te.cast_master_weights_to_nvfp4([quant.quantize(values(4, 32), "mxfp8")], [None], [0], None),
     moiety.InvalidArgument, "a weight is mxfp8"),
    (lambda: te.replace_raw_data(torch.ones(2), torch.ones(2)), moiety.InvalidArgument, "expected a QTensor"),
])
def test_errors_name_what_is_there_instead(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
    assert not hasattr(te, "nothing") and not hasattr(te.ops, "nothing")
