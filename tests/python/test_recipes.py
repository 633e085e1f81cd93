"""Recipes: linears whose operands are quantized, their gradients, and modules that have them."""

import pytest
import torch
import torch._dynamo

import moiety
import reference
from moiety import nn, ops, quant

SPLITS = [40, 0, 57, 31]
RECIPES = {"fp8_tensor": ("fp8", "fp8", 0.06), "fp8_block": ("fp8_block", "fp8_block_tile", 0.06),
           "mxfp8": ("mxfp8", "mxfp8", 0.06), "nvfp4": ("nvfp4", "nvfp4_tile", 0.25)}


def operands(columns=64, features=48, dead=3):
    torch.manual_seed(1)
    x = torch.randn(sum(SPLITS) + dead, columns).bfloat16().requires_grad_()
    return x, (torch.randn(4, features, columns) / 8).bfloat16().requires_grad_()


def rounded(x, format):
    return quant.dequantize(quant.quantize(x.detach().contiguous(), format))


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_is_the_product_of_quantized_operands(recipe):
    x, w = operands()
    rows, weights, _ = RECIPES[recipe]
    splits = torch.tensor(SPLITS)
    y = ops.quantized_linear(x, w, splits, recipe)
    x32 = torch.cat([rounded(part, rows) for part in x[:128].split(SPLITS) if len(part)] + [x[128:].float()])
    w32 = torch.stack([rounded(m, weights) for m in w])
    want = ops.grouped_linear(x32, w32, splits)
    assert reference.far(y, want) < 4e-3 and (y[128:] == 0).all()
    if recipe in ("mxfp8", "fp8_block"):  # scales are powers of two: operands are exact in bfloat16
        assert torch.equal(y, ops.grouped_linear(x32.bfloat16(), w32.bfloat16(), splits))
    assert reference.far(y, ops.grouped_linear(x, w, splits)) > 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_near_the_exact_ones(recipe):
    x, w = operands()
    splits, rng = torch.tensor(SPLITS), torch.tensor([5, 0])
    b = torch.randn(4, 48).bfloat16().requires_grad_()
    p = torch.rand(x.shape[0], requires_grad=True)
    y = ops.quantized_linear(x, w, splits, recipe, bias=b, row_scale=p, rng=rng)
    grad = torch.randn_like(y)
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b, p)]
    reference.grouped_linear(*exact[:2], splits, *exact[2:]).backward(grad.double())
    bound = RECIPES[recipe][2]
    for got, want, most in zip((x, w, b, p), exact, (bound, bound, 2e-2, 2e-2)):
        assert reference.far(got.grad, want.grad) < most
    assert reference.far(x.grad, exact[0].grad) > 1e-3  # it is quantized
    buffer = torch.full(w.shape, 0.5)
    torch.ops.moiety.quantized_linear_wgrad_acc(grad, x.detach(), splits, buffer, None, rng, recipe)
    assert torch.allclose(buffer, w.grad.float() + 0.5, rtol=2 ** -7, atol=1e-2)
    assert (buffer[1] == 0.5).all()


# Rows, splits, columns.
HARD = {"no_rows": (0, [0, 0], 64), "one_row": (1, [0, 1], 64), "all_rows_dead": (4, [0, 0], 64),
        "one_expert": (3, [3], 64), "no_experts": (3, [], 64), "seven_columns": (5, [2, 3], 7)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", HARD)
def test_hard_shapes(recipe, shape):
    torch.manual_seed(4)
    rows, splits, columns = HARD[shape]
    x = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(len(splits), 48, columns, dtype=torch.bfloat16, requires_grad=True)
    y = ops.quantized_linear(x, w, torch.tensor(splits, dtype=torch.int64), recipe, rng=torch.tensor([3, 1]))
    y.float().sum().backward()
    dead = sum(splits)
    assert y.shape == (rows, 48) and (y[dead:] == 0).all() and (x.grad[dead:] == 0).all()
    assert all(torch.isfinite(t).all() for t in (y, x.grad, w.grad))
    assert w.grad.any() == (dead > 0)


def test_stochastic_rounding_has_no_bias_and_follows_its_state():
    x, w = operands()
    splits, dy = torch.tensor(SPLITS), torch.randn(131, 48).bfloat16()

    def dgrad(draw):
        return torch.ops.moiety.quantized_linear_dgrad(dy, w.detach(), splits, torch.tensor([9, draw]), "nvfp4")

    assert torch.equal(dgrad(0), dgrad(0)) and not torch.equal(dgrad(0), dgrad(1))
    w16 = torch.stack([rounded(m, "nvfp4_tile") for m in w]).bfloat16()
    want = torch.ops.moiety.grouped_linear_dgrad(dy, w16, splits).float()
    mean = torch.stack([dgrad(draw).float() for draw in range(32)]).mean(0)
    assert reference.far(mean, want) < 0.4 * reference.far(dgrad(0), want)


def layer(recipe, **options):
    torch.manual_seed(7)
    return nn.MoELayer(32, 32, 6, 2, recipe=recipe, dtype=torch.bfloat16, **options)


def weights(module):
    return [module.experts.fc1.weight, module.experts.fc2.weight]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_near_the_one_that_is_not_quantized(recipe):
    x = torch.randn(50, 32).bfloat16()
    plain, module = layer("bf16"), layer(recipe)
    assert module.experts.path == "unfused" and plain.experts.path == "fused"
    module.load_state_dict(plain.state_dict())
    a, b = plain(x), module(x)
    assert torch.equal(a.idx, b.idx) and 1e-3 < reference.far(b.y, a.y) < 3 * RECIPES[recipe][2]
    unfused = nn.GroupedMLP.of(plain.experts.fc1, plain.experts.fc2, nn.Swiglu(), path="unfused")
    plain.experts = unfused
    assert reference.far(plain(x).y, a.y) < 1e-2


def test_draws_are_those_of_the_optimizers_steps():
    from torch.utils.checkpoint import checkpoint

    module = layer("nvfp4")
    x = torch.randn(50, 32).bfloat16()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def grads(recompute=False):
        module.zero_grad()
        y = checkpoint(lambda t: module(t).y, x, use_reentrant=False) if recompute else module(x).y
        y.float().square().sum().backward()
        return [w.grad.clone() for w in weights(module)]

    first = grads()
    assert all(torch.equal(a, b) for a, b in zip(first, grads()))
    assert all(torch.equal(a, b) for a, b in zip(first, grads(True)))
    optimizer.step()
    assert not torch.equal(first[0], grads()[0])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_delayed_and_accumulated_gradients(recipe):
    modules = [layer(recipe), layer(recipe, delay_wgrad=True), layer(recipe, grad="main_grad")]
    x = torch.randn(50, 32).bfloat16()
    for module in modules:
        for linear, w in zip((module.experts.fc1, module.experts.fc2), weights(module)):
            w.main_grad = torch.zeros(w.shape)
            if linear.rng is not None:
                linear.rng.copy_(torch.tensor([3, 0]))
        module(x).y.float().square().sum().backward()
    modules[1].backward_dw()
    for now, later, added in zip(*map(weights, modules)):
        assert torch.equal(now.grad, later.grad) and added.grad is None
        assert torch.allclose(now.grad.float(), added.main_grad, rtol=2 ** -7, atol=1e-3)


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_training_goes_down(recipe):
    module = layer(recipe)
    optimizer = moiety.optim.AdamW(module.parameters(), lr=1e-2)
    x, losses = torch.randn(64, 32).bfloat16(), []
    for _ in range(20):
        loss = (module(x).y.float() - x.flip(-1).float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_blocks_with_recipes_share_graphs():
    torch._dynamo.reset()
    blocks = [layer("mxfp8") for _ in range(12)]
    want = blocks[0](torch.ones(10, 32).bfloat16()).y
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    x = torch.ones(10, 32).bfloat16().requires_grad_()
    results = [block(x).y for block in blocks]
    sum(y.sum() for y in results).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert all(torch.equal(y, want) for y in results) and x.grad is not None


def test_opcheck():
    x, w = (t.detach() for t in operands(32, 16))
    splits, rng, o = torch.tensor(SPLITS), torch.tensor([1, 2]), torch.ops.moiety
    dy, check = torch.randn(131, 16).bfloat16(), ("test_schema", "test_faketensor")
    for recipe in ("mxfp8", "nvfp4"):
        for args in ((x, w, splits, None, None, None, rng, recipe), (x[:0], w, splits * 0, None, None, None,
                                                                     rng, recipe)):
            torch.library.opcheck(o.quantized_linear.default, args, test_utils=check)
        torch.library.opcheck(o.quantized_linear_dgrad.default, (dy, w, splits, rng, recipe), test_utils=check)
        torch.library.opcheck(o.quantized_linear_wgrad.default, (dy, x, splits, rng, recipe), test_utils=check)
        torch.library.opcheck(o.quantized_linear_wgrad_acc.default,
                              (dy, x, splits, torch.zeros(4, 16, 32), None, rng, recipe), test_utils=check)


@pytest.mark.parametrize("call,kind,text", [
    (lambda x, w, s: ops.quantized_linear(x, w, s, "int8"), moiety.InvalidArgument, "recipe is 'int8'"),
    (lambda x, w, s: ops.quantized_linear(x.float(), w, s, "mxfp8"), moiety.InvalidArgument, "x is"),
    (lambda x, w, s: ops.quantized_linear(x, w[:, :, :32], s, "mxfp8"), moiety.InvalidArgument, "w is"),
    (lambda x, w, s: ops.quantized_linear(x, w, s + 9, "mxfp8"), moiety.InvalidArgument, r"splits\[3\] is"),
    (lambda x, w, s: nn.GroupedLinear(2, 4, 4, recipe="fp4"), moiety.InvalidArgument, "recipe is 'fp4'"),
    (lambda x, w, s: nn.GroupedMLP(2, 4, 4, recipe="mxfp8", path="fused"), moiety.Unsupported, "'fused'"),
    (lambda x, w, s: torch.ops.moiety.quantized_linear_dgrad(torch.ones(131, 48).bfloat16(), w, s, None, "nvfp4"),
     RuntimeError, "rounds gradients with rng")])
def test_errors(call, kind, text, device):
    if "splits" in text and device == "cuda":
        pytest.skip("on a GPU nobody reads the splits")
    x, w = (t.detach() for t in operands())
    with pytest.raises(kind, match=text):
        call(x, w, torch.tensor(SPLITS))
