"""Blocks of Qwen3-MoE and Mixtral: replace_moe in models of transformers 4, MoELayer.from_hf in both 4 and 5."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

import moiety
import moiety.nn
import reference

IS_4 = transformers.__version__.startswith("4.")
needs_4 = pytest.mark.skipif(not IS_4, reason=f"transformers {transformers.__version__}, not 4")
SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, output_router_logits=True)
FAMILIES = {
    "Qwen3Moe": dict(head_dim=8, intermediate_size=32, moe_intermediate_size=16, num_experts=8,
                     num_experts_per_tok=2, norm_topk_prob=True),
    "Mixtral": dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2),
}


def model_of(family, dtype=torch.float32, **options):
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family], **options})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def blocks_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("SparseMoeBlock")]


def step(model):
    torch.manual_seed(5)
    tokens = torch.randint(0, 64, (2, 19))
    out = model(tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def check_close(got, want, bound, name):
    assert reference.far(got, want) < bound, name


def check_same(ours, theirs, bound, single=None):
    """Within `bound`: results, and all gradients as one; within `single`, or `bound`, each gradient."""
    (out, grads), (their_out, their_grads) = step(ours), step(theirs)
    check_close(out.logits, their_out.logits, bound, "logits")
    check_close(out.loss, their_out.loss, bound, "loss, with that of the router")
    assert len(out.router_logits) == len(their_out.router_logits) == 2
    live = [name for name, grad in their_grads.items() if grad is not None and grad.any()]
    for name in their_grads.keys() - live:  # of an expert without tokens
        assert grads[name] is None or not grads[name].any(), name
    for name in live:
        check_close(grads[name], their_grads[name], single or bound, name)
    check_close(*(torch.cat([of[name].flatten() for name in live]) for of in (grads, their_grads)),
                bound, "all gradients")


# In bfloat16 single gradients are up to 3 % apart, all together 1.1 to 1.4 %: torch's products round
# differently on each kind of CPU.
@needs_4
@pytest.mark.parametrize("dtype, bound, single", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 5e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_blocks_give_what_they_gave(family, dtype, bound, single):
    theirs = model_of(family, dtype)
    ours = copy.deepcopy(theirs)
    before = {name: id(p) for name, p in ours.named_parameters()}
    names = moiety.nn.replace_moe(ours, strict=True)
    assert names == [n for n, m in ours.named_modules() if type(m).__name__.endswith("SparseMoeBlock")]
    assert len(names) == 2
    assert {name: id(p) for name, p in ours.named_parameters()} == before
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert moiety.nn.replace_moe(ours) == []  # they are replaced already
    check_same(ours, theirs, bound, single)


@needs_4
def test_twenty_steps_stay_together():
    theirs = model_of("Qwen3Moe")
    ours = copy.deepcopy(theirs)
    moiety.nn.replace_moe(ours, strict=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs)]
    for _ in range(20):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers):
            losses.append(step(model)[0].loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@needs_4
def test_a_copy_and_a_moved_model_are_read_in_place():
    model = model_of("Mixtral")
    moiety.nn.replace_moe(model)
    copied = copy.deepcopy(model)
    for m in (copied, copied.to(torch.bfloat16), model.to(torch.float64).to(torch.float32)):
        for block in blocks_of(m):
            for linears in block._expert_linears():
                assert moiety._experts.over([linear.weight for linear in linears]) is not None
    assert blocks_of(copied)[0].experts[0].w1.weight.data_ptr() != blocks_of(model)[0].experts[0].w1.weight.data_ptr()


@needs_4
def test_a_layer_under_compile_and_checkpointing():
    theirs = model_of("Qwen3Moe")
    ours = copy.deepcopy(theirs)
    moiety.nn.replace_moe(ours, strict=True)
    for model in (ours, theirs):
        model.gradient_checkpointing_enable()
        model.train()
    check_same(ours, theirs, 1e-5)
    block, x = blocks_of(model_of("Qwen3Moe"))[0], torch.randn(1, 9, 32)
    expected = block(x)
    moiety.nn.replace_moe(block, strict=True)
    torch._dynamo.reset()
    for got, value in zip(torch.compile(block, fullgraph=True)(x), expected):
        check_close(got, value, 1e-5, "compiled")


@needs_4
def test_what_cannot_run_says_so_and_runs_as_before():
    theirs, changed = model_of("Qwen3Moe"), model_of("Qwen3Moe")
    moiety.nn.replace_moe(changed)
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, target_modules=["gate_proj"], init_lora_weights=False)
    with_lora = peft.get_peft_model(changed, config)
    torch.manual_seed(7)
    expected = peft.get_peft_model(theirs, config)
    expected.load_state_dict(with_lora.state_dict())
    tokens = torch.arange(10).unsqueeze(0)
    with pytest.warns(UserWarning, match="replace_moe: Qwen3MoeSparseMoeBlock .* an expert has a Linear"):
        got = with_lora(tokens).logits
    assert torch.equal(got, expected(tokens).logits)
    gelu = model_of("Mixtral", hidden_act="gelu")
    with pytest.warns(UserWarning, match="activation is GELUActivation, not SiLU"):
        assert moiety.nn.replace_moe(gelu) == []
    with pytest.raises(moiety.Unsupported, match="GELUActivation"):
        moiety.nn.replace_moe(gelu, strict=True)
    half = model_of("Mixtral", torch.float16)
    moiety.nn.replace_moe(half, strict=True)
    with pytest.raises(moiety.Unsupported, match="float16"):
        half(tokens)
    hooked = model_of("Mixtral")
    moiety.nn.replace_moe(hooked)
    seen = []
    blocks_of(hooked)[0].experts[0].w2.register_forward_hook(lambda *args: seen.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooked(torch.arange(60).unsqueeze(0))
    assert seen


def test_a_model_without_such_blocks():
    with pytest.raises(moiety.InvalidArgument, match="Linear has none of Qwen3MoeSparseMoeBlock"):
        moiety.nn.replace_moe(torch.nn.Linear(2, 2))


@pytest.mark.skipif(IS_4, reason="experts of transformers 4 are not stacked")
def test_stacked_experts_are_sent_to_register():
    with pytest.raises(moiety.Unsupported, match="moiety.hf.register"):
        moiety.nn.replace_moe(model_of("Mixtral"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_from_a_block(family):
    block = blocks_of(model_of(family))[0]
    layer = moiety.nn.MoELayer.from_hf(block)
    x, dy = torch.randn(2, 11, 32, requires_grad=True), torch.randn(2, 11, 32)
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    out = layer(x).y
    check_close(out, expected, 1e-5, "y")
    dx, = torch.autograd.grad(out, x, dy, retain_graph=True)
    check_close(dx, *torch.autograd.grad(expected, x, dy, retain_graph=True), 1e-5, "dx")
    ours = torch.autograd.grad(out, [layer.router.weight, layer.experts.fc1.weight, layer.experts.fc2.weight], dy)
    if IS_4:
        names = [n for n in ("gate_proj", "up_proj", "w1", "w3") if hasattr(block.experts[0], n)]
        last = "down_proj" if hasattr(block.experts[0], "down_proj") else "w2"
        weights = [block.gate.weight, *[getattr(e, n).weight for e in block.experts for n in (*names, last)]]
        gate, *rest = torch.autograd.grad(expected, weights, dy)
        theirs = [gate, torch.stack([torch.cat(rest[i:i + 2]) for i in range(0, len(rest), 3)]),
                  torch.stack(rest[2::3])]
    else:
        theirs = torch.autograd.grad(
            expected, [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj], dy)
    for name, a, b in zip(("router", "w1", "w2"), ours, theirs):
        check_close(a, b, 1e-5, name)


def test_a_layer_from_something_else():
    with pytest.raises(moiety.InvalidArgument, match="from_hf: Linear is none of"):
        moiety.nn.MoELayer.from_hf(torch.nn.Linear(2, 2))
