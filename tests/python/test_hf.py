"""Experts of transformers' models against transformers' own loop ("eager")."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import moiety
import moiety.hf
import reference

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeConfig", "grouped_mlp",
                  dict(head_dim=8, intermediate_size=32, moe_intermediate_size=16, num_experts=8,
                       num_experts_per_tok=2, norm_topk_prob=True)),
    "mixtral": ("MixtralConfig", "grouped_mlp",
                dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": ("OlmoeConfig", "grouped_mlp",
              dict(intermediate_size=16, num_experts=8, num_experts_per_tok=3)),
    "deepseek_v3": ("DeepseekV3Config", "grouped_mlp",
                    dict(intermediate_size=32, moe_intermediate_size=16, n_routed_experts=8,
                         num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
                         first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
                         qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4)),
    "glm4_moe": ("Glm4MoeConfig", "grouped_mlp",
                 dict(head_dim=8, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=8,
                      num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
                      first_k_dense_replace=1)),
    "gpt_oss": ("GptOssConfig", "linears",
                dict(head_dim=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
                     sliding_window=16)),
}


def model_of(name, dtype=torch.float32, implementation="moiety"):
    kind, _, options = FAMILIES[name]
    config = getattr(transformers, kind)(**{**SMALL, **options})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, experts_implementation=implementation)
    for parameter in model.parameters():  # some families leave experts uninitialized
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def experts_of(model):
    def is_experts(m):
        weight = getattr(m, "gate_up_proj", None)
        return isinstance(weight, torch.Tensor) and weight.dim() == 3

    return [m for m in model.modules() if is_experts(m)]


@pytest.fixture(autouse=True)
def registered():
    moiety.hf.register()


def tokens(seed=5):
    torch.manual_seed(seed)
    return torch.randint(0, 64, (2, 19))


def step(model):
    out = model(tokens(), labels=tokens(), use_cache=False)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.logits, grads


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_in_float32(name):
    eager, ours = model_of(name, implementation="eager"), model_of(name)
    paths = {moiety.hf.path(m)[0] for m in experts_of(ours)}
    assert paths == {FAMILIES[name][1]}
    (want, want_grads), (got, got_grads) = step(eager), step(ours)
    assert reference.far(got, want) < 1e-5
    assert got_grads.keys() == want_grads.keys()
    assert any("down_proj" in key for key in got_grads)
    for key, grad in want_grads.items():
        assert reference.far(got_grads[key], grad) < 5e-5 or grad.norm() < 1e-6, key


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_in_bfloat16(name):
    eager, ours = (experts_of(model_of(name, torch.bfloat16, i))[0] for i in ("eager", "moiety"))
    torch.manual_seed(6)
    experts, top_k = ours.down_proj.shape[0], 2
    idx = torch.stack([torch.randperm(experts)[:top_k] for _ in range(24)])
    results = []
    for module in (eager, ours):
        torch.manual_seed(7)
        x = torch.randn(24, 32).bfloat16().requires_grad_()
        w = torch.rand(24, top_k).bfloat16().requires_grad_()
        y = module(x, idx, w)
        y.backward(torch.ones_like(y))
        results.append([y, x.grad, w.grad, module.down_proj.grad])
    for got, want in zip(results[1], results[0]):
        assert reference.far(got, want) < 2e-2


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_masked_experts(name):
    """idx >= E, as transformers' expert parallelism passes it, counts as no pair."""
    module = experts_of(model_of(name))[0]
    x, experts = torch.randn(6, 32), module.down_proj.shape[0]
    idx = torch.tensor([[0, 1], [experts, 2], [experts, experts], [3, 0], [1, 3], [2, experts]])
    w = torch.rand(6, 2) * (idx < experts)
    y = module(x, idx, w)
    assert (y[2] == 0).all()
    clean = module(x, idx.clamp(max=experts - 1), w)
    assert torch.allclose(y, clean, atol=1e-5)


def test_weights_are_read_in_place_and_frozen_ones_keep_nothing():
    module = experts_of(model_of("qwen3_moe"))[0]
    module.requires_grad_(False)
    pointer = module.gate_up_proj.data_ptr()
    x = torch.randn(5, 32, requires_grad=True)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.data_ptr()) or t, lambda t: t):
        y = module(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1))
    assert pointer in shapes  # the parameter itself, not a copy
    y.sum().backward()
    assert module.gate_up_proj.grad is None and x.grad is not None


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_twenty_steps_stay_together(name):
    losses = []
    for implementation in ("eager", "moiety"):
        model = model_of(name, implementation=implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = []
        for _ in range(20):
            loss = model(tokens(), labels=tokens(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(float(loss))
        losses.append(run)
    assert losses[0][-1] < losses[0][0]
    assert max(abs(a - b) for a, b in zip(*losses)) < 2e-3 * losses[0][0]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_generate_is_that_of_eager(name):
    eager, ours = model_of(name, implementation="eager"), model_of(name)
    prompt = tokens()[:1, :5]
    outs = [m.eval().generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
            for m in (eager, ours)]
    assert torch.equal(*outs)


def test_set_experts_implementation_on_a_model_that_is_there():
    model = model_of("mixtral", implementation="eager")
    want = model(tokens()).logits
    model.set_experts_implementation("moiety")
    assert experts_of(model)[0].config._experts_implementation == "moiety"
    got = model(tokens()).logits
    assert reference.far(got, want) < 1e-5


def test_from_pretrained_with_the_implementation(tmp_path):
    model = model_of("qwen3_moe", implementation="eager")
    model.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moiety")
    assert experts_of(ours)[0].config._experts_implementation == "moiety"
    ours = ours.to(tokens().device)
    assert reference.far(ours(tokens()).logits, model.eval()(tokens()).logits) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing(name):
    plain, again = model_of(name), model_of(name)
    again.gradient_checkpointing_enable()
    again.train(), plain.train()
    _, want = step(plain)
    _, got = step(again)
    assert all(torch.equal(want[key], got[key]) for key in want)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_model(name):
    model = model_of(name)
    want, want_grads = step(model)
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(tokens(), labels=tokens(), use_cache=False)
    out.loss.backward()
    assert reference.far(out.logits, want) < 1e-5
    for name, p in model.named_parameters():
        assert reference.far(p.grad, want_grads[name]) < 5e-5 or p.grad.norm() < 1e-6, name


def test_what_cannot_run_falls_back_with_one_warning_or_raises():
    model = model_of("mixtral", torch.float16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(tokens())
    ours = [str(w.message) for w in caught if "moiety.hf" in str(w.message)]
    assert len(ours) == 1 and "MixtralExperts" in ours[0] and "float16" in ours[0]
    moiety.hf.register("moiety_strict", strict=True)
    model.set_experts_implementation("moiety_strict")
    with pytest.raises(moiety.Unsupported, match="float16"):
        model(tokens())
    with pytest.raises(moiety.Unsupported, match="ep is 2"):
        moiety.hf.register(ep=2)


def test_lora_by_target_parameters():
    peft = pytest.importorskip("peft")
    eager, ours = model_of("qwen3_moe", implementation="eager"), model_of("qwen3_moe")
    results = []
    for model in (eager, ours):
        torch.manual_seed(9)
        config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj"],
                                 init_lora_weights=False)
        wrapped = peft.get_peft_model(copy.deepcopy(model), config)
        results.append(step(wrapped))
    (want, want_grads), (got, got_grads) = results
    assert reference.far(got, want) < 1e-5 and got_grads.keys() == want_grads.keys()
    for key, grad in want_grads.items():
        assert reference.far(got_grads[key], grad) < 5e-5 or grad.norm() < 1e-6, key
