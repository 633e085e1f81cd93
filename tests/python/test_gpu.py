"""What holds on a GPU besides the tests of operators and modules, which run there too: the CPU's bits,
streams, graphs, memory, and that nothing waits."""

import contextlib
import math

import pytest
import torch

import moiety
from moiety import _lib, nn, ops, optim

pytestmark = pytest.mark.gpu

ACT = ("glu", 1.0, math.inf, 0.0, 0)


def cpu(*tensors):
    return [None if t is None else t.detach().cpu() for t in tensors]


def same(got, want):
    for a, b in zip(got, want):
        assert torch.equal(a.cpu(), b), (a.shape, (a.cpu() - b).abs().max())


def problem(rows=70, experts=6, model=40, ffn=24, dtype=torch.float32):
    torch.manual_seed(1)
    splits = torch.tensor([rows // 2, 0, 3, rows // 4, 1, 2])[:experts]
    x = torch.randn(rows, model).to(dtype)
    w1 = (torch.randn(experts, 2 * ffn, model) / 6).to(dtype)
    w2 = (torch.randn(experts, model, ffn) / 5).to(dtype)
    return x, w1, w2, splits


def test_float32_has_the_bits_of_the_cpu():
    x, w1, w2, splits = problem()
    b1, p, dy = torch.randn(6, 48), torch.rand(70), torch.randn(70, 48)
    here = (x, w1, splits, b1, p)
    o = torch.ops.moiety
    same([ops.grouped_linear(*here)], [ops.grouped_linear(*cpu(*here))])
    same([o.grouped_linear_dgrad(dy, w1, splits)], [o.grouped_linear_dgrad(*cpu(dy, w1, splits))])
    same([o.grouped_linear_wgrad(dy, x, splits, None, None)],
         [o.grouped_linear_wgrad(*cpu(dy, x, splits), None, None)])
    same(o.grouped_linear_bias_grad(dy, splits, b1, p), o.grouped_linear_bias_grad(*cpu(dy, splits, b1, p)))
    mlp = (x, w1, w2, splits, p, None, None, b1, None)
    y, h = o.grouped_mlp(*mlp, *ACT, None, None)
    same((y, h), o.grouped_mlp(*cpu(*mlp), *ACT, None, None))
    gradient = torch.randn_like(y)
    same(o.grouped_mlp_backward(gradient, h, *mlp, *ACT, True),
         o.grouped_mlp_backward(*cpu(gradient, h, *mlp), *ACT, True))


@pytest.mark.parametrize("tokens,experts,top_k", [(0, 4, 2), (1, 4, 2), (9, 3, 3), (3000, 128, 8)])
def test_routing_has_the_bits_of_the_cpu(tokens, experts, top_k):
    torch.manual_seed(2)
    logits, bias = torch.randn(tokens, experts), torch.randn(experts)
    mask = torch.rand(tokens) > 0.2
    given = torch.randint(-1, experts, (tokens, top_k))
    given = torch.where((given.sort().values.diff() == 0).any(1, keepdim=True), -1, given)
    for options in ({}, {"bias": bias, "mask": mask, "score": "sigmoid"}, {"given_idx": given}):
        there = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        got, want = ops.router(logits, top_k, **options), ops.router(logits.cpu(), top_k, **there)
        same(got, want)
        dweight = torch.randn(tokens, top_k)
        constants = (options.get("score", "softmax"), True, 1.0)
        same([torch.ops.moiety.router_backward(logits, got[1], dweight, *constants)],
             [torch.ops.moiety.router_backward(*cpu(logits, got[1], dweight), *constants)])
        same(ops.expert_rows(got[1], experts, got[0]), ops.expert_rows(want[1], experts, want[0]))


def test_splits_that_do_not_fit_count_as_empty():
    x, w1, _, splits = problem()
    wrong = splits.clone()
    wrong[3] = 10 ** 6
    wrong[4] = -1
    y = ops.grouped_linear(x, w1, wrong)
    right = splits.clone()
    right[3] = right[4] = 0
    assert torch.equal(y, ops.grouped_linear(x, w1, right))


@pytest.mark.parametrize("recipe", nn.RECIPES[1:])
def test_operands_of_recipes_are_those_of_the_cpu(recipe):
    """The same products up to the order of sums: what is quantized has the same bits."""
    x, w, _, splits = problem(96, model=64, ffn=32, dtype=torch.bfloat16)
    dy, rng = torch.randn(96, 64).bfloat16(), torch.tensor([5, 1])
    o = torch.ops.moiety
    for operator, args in ((o.quantized_linear, (x, w, splits, None, None, None, rng, recipe)),
                           (o.quantized_linear_dgrad, (dy, w, splits, rng, recipe)),
                           (o.quantized_linear_wgrad, (dy, x, splits, rng, recipe))):
        here = operator(*args)
        there = operator(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in args))
        far = (here.cpu().float() - there.float()).norm() / there.float().norm()
        assert far < 3e-3, (operator, far)


def test_tensors_on_another_device_are_named():
    x, w1, _, splits = problem()
    with pytest.raises((moiety.InvalidArgument, RuntimeError), match="cpu"):
        ops.grouped_linear(x, w1, splits.cpu())


@contextlib.contextmanager
def no_waits():
    before, mode = _lib.counters(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert _lib.counters() == before


def layer(**options):
    torch.manual_seed(3)
    return nn.MoELayer(64, 32, 8, 2, dtype=torch.bfloat16, **options)


recipes = pytest.mark.parametrize("recipe", nn.RECIPES)


@recipes
def test_a_step_waits_for_nothing_and_takes_no_memory_of_its_own(recipe):
    module = layer(router=nn.RouterConfig(score="sigmoid", bias=True), recipe=recipe)
    optimizer = optim.AdamW(module.parameters(), lr=1e-4)
    x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    splits = nn.GroupedMLP(4, 64, 32, dtype=torch.bfloat16)

    def step():
        out = module(x)
        (out.y.float().square().mean() + 0.01 * out.aux_loss).backward()
        splits(x, [100, 0, 100, 56]).sum().backward()  # a list is copied without waiting
        optim.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        module.update_router_bias(out.counts, 1e-3)

    step()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    with no_waits():
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() == free
    allocated = torch.cuda.memory_allocated()
    x64, w1, _, sizes = problem()
    for _ in range(1000 if recipe == "bf16" else 300):
        step()
        with pytest.raises(moiety.InvalidArgument):
            ops.grouped_linear(x64, w1[:, :, 1:].contiguous(), sizes)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 2 ** 20


def test_work_is_on_the_current_stream_and_the_device_stays():
    x, w1, w2, splits = problem(dtype=torch.bfloat16)
    want = ops.grouped_mlp(x, w1, w2, splits)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        y = ops.grouped_mlp(late, w1, w2, splits)
    side.synchronize()
    assert torch.equal(y, want)
    assert torch.cuda.current_device() == 0


@recipes
def test_a_graph_takes_new_splits_and_tokens(recipe):
    module = layer(recipe=recipe)
    for linear in (module.experts.fc1, module.experts.fc2):
        linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
        linear.grad_target = "main_grad"
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)

    def run():
        out = module(x)
        dx, = torch.autograd.grad(out.y.float().square().mean() + 0.01 * out.aux_loss, x)
        return out.y, out.counts, dx

    def reset():
        for linear in (module.experts.fc1, module.experts.fc2):
            linear.weight.main_grad.zero_()

    nn.warmup(module, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (4, 5):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(128, 64))
        reset()
        graph.replay()
        got = [t.clone() for t in captured] + [module.experts.fc1.weight.main_grad.clone()]
        reset()
        want = [*run(), module.experts.fc1.weight.main_grad]
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_two_graphs_of_one_stream_run_on_two_at_once():
    inputs = [problem(4096, model=512, ffn=256, dtype=torch.bfloat16) for _ in range(2)]
    want = [ops.grouped_mlp(*i) for i in inputs]
    graphs, outs = [], []
    for i in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(ops.grouped_mlp(*i))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, want))


def test_lists_are_refused_in_a_capture():
    module = nn.GroupedLinear(2, 16, 8)
    x = torch.randn(6, 16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(moiety.InvalidArgument, match="captured graph would freeze"):
        with torch.cuda.graph(graph):
            x * 1
            module(x, [2, 4])
    assert module(x, [2, 4]).shape == (6, 8)


def test_reduce_overhead_skips_no_graph():
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = layer(), layer()
    for module in (eager, compiled):
        for linear in (module.experts.fc1, module.experts.fc2):
            linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
            linear.grad_target = "main_grad"
    call = torch.compile(compiled, mode="reduce-overhead", fullgraph=True)
    for function in (call, eager):
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(64, 64, dtype=torch.bfloat16)
            # The router's gradient lies in the graph's memory, which the next step takes.
            (compiled if function is call else eager).zero_grad()
            function(x).y.float().square().mean().backward()
    torch.cuda.synchronize()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    for name in ("fc1", "fc2"):
        a, b = (getattr(m.experts, name).weight.main_grad for m in (eager, compiled))
        assert (a - b).norm() <= 1e-2 * a.norm() and a.norm() > 0


def test_more_than_two_to_the_31_elements():
    rows, columns = 2 ** 20 + 7, 2 ** 11
    x = torch.ones(rows, columns, dtype=torch.bfloat16)
    w = torch.full((2, 8, columns), 2.0 ** -11, dtype=torch.bfloat16)
    splits = torch.tensor([2 ** 20, 5])
    y = ops.grouped_linear(x, w, splits)
    assert (y[:2 ** 20 + 5] == 1).all() and (y[2 ** 20 + 5:] == 0).all()
    dx = torch.ops.moiety.grouped_linear_dgrad(y, w, splits)
    assert (dx[2 ** 20 + 4] == 8 * 2.0 ** -11).all() and (dx[2 ** 20 + 5:] == 0).all()
