"""Checkpoints of the trainer and Hugging Face folders, from and to models of torch."""

import json
import pathlib
import shutil
import subprocess

import pytest
import torch

import moiety
from moiety import checkpoint, nn, optim

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests/hf/golden"
pytestmark = pytest.mark.cpu_only


class Tree(torch.nn.Module):
    """A module that has nothing but parameters of these names and shapes."""

    def __init__(self, shapes, buffers=()):
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            if name.endswith("router.bias"):
                module.register_buffer(leaf, torch.zeros(shape))
            else:
                module.register_parameter(leaf, torch.nn.Parameter(torch.full(shape, float("nan"))))


class Blocks(torch.nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(11, 16)
        self.layers = torch.nn.ModuleList(nn.MoELayer(16, 16, 6, 2, **options) for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).y
        return x


def trained(model, kind=optim.AdamW, steps=2):
    optimizer = kind(model.parameters(), lr=1e-2)
    for seed in range(steps):
        torch.manual_seed(seed)
        model(torch.randint(0, 11, (30,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def same_state(a, b):
    a, b = a.state_dict()["state"], b.state_dict()["state"]
    assert a.keys() == b.keys()
    for key, state in a.items():
        assert state.keys() == b[key].keys()
        assert all(torch.equal(state[name], b[key][name]) for name in state)


@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bitwise(kind, dtype, tmp_path):
    if dtype == torch.bfloat16 and kind is torch.optim.AdamW:
        pytest.skip("torch's has no masters")
    options = dict(dtype=dtype, router=nn.RouterConfig(bias=True), bias=True)
    model = Blocks(**options)
    model.embed.to(dtype)
    model.layers[0].router.bias.copy_(torch.arange(6.0))
    optimizer = trained(model, kind)
    path = checkpoint.save(tmp_path / "checkpoints", model, optimizer, step=20,
                           run={"tokens": 60, "config": '{"a": 1}'})
    assert pathlib.Path(path).name == "step-00000020"
    other = Blocks(**options)
    other.embed.to(dtype)
    torch.nn.init.zeros_(other.embed.weight)
    again = kind(other.parameters(), lr=1e-2)
    run = checkpoint.load(tmp_path, other, again)
    assert (run["step"], run["tokens"], run["adam_t"], run["config"]) == (20, 60, 2, '{"a": 1}')
    for a, b in zip(model.state_dict().values(), other.state_dict().values()):
        assert torch.equal(a, b)
    same_state(optimizer, again)
    for m, o in ((model, optimizer), (other, again)):
        m(torch.arange(11)).sum().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_either_form_of_experts_and_any_interleave(tmp_path):
    def module(interleave, params):
        torch.manual_seed(1)
        return nn.GroupedMLP(3, 8, 16, bias=True, glu_interleave=interleave, params=params,
                             bias_params=params)

    source = module(8, "indexed")
    x, splits = torch.randn(9, 8), [2, 3, 4]
    optimizer = optim.AdamW(source.parameters(), lr=1e-2)
    source(x, splits).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, source, optimizer)
    want = source(x, splits)
    moments = {}
    for interleave in (0, 8, 16):
        for params in ("grouped", "indexed"):
            target = module(interleave, params)
            torch.nn.init.zeros_(target.fc1.stacked("bias").detach())
            states = optim.AdamW(target.parameters(), lr=1e-2)
            checkpoint.load(tmp_path, target, states)
            assert torch.equal(target(x, splits), want)
            moments[interleave, params] = torch.cat(
                [states.state[p]["exp_avg"].flatten() for p in target.fc1.experts_of("weight")])
    assert torch.equal(moments[0, "grouped"], moments[0, "indexed"])
    assert not torch.equal(moments[0, "grouped"], moments[8, "grouped"])
    arrays = checkpoint.read(tmp_path)
    assert {k: v.shape for k, v in arrays.items()} == {
        "fc1.weight": (3, 32, 8), "fc1.bias": (3, 32), "fc2.weight": (3, 8, 16), "fc2.bias": (3, 8)}
    assert (arrays["fc1.weight"] == module(0, "grouped").fc1.weight.detach().numpy()).mean() < 0.1
    target = module(0, "grouped")
    checkpoint.load(tmp_path, target)
    assert (arrays["fc1.weight"] == target.fc1.weight.detach().numpy()).all()


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path):
    model = Blocks()
    optimizer = trained(model)
    checkpoint.save(tmp_path, model, optimizer)
    other = Blocks(layers=3)
    other.embed = torch.nn.Embedding(12, 16)
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(moiety.CheckpointError) as caught:
        checkpoint.load(tmp_path, other)
    for text in ("embed.weight", "layers.2.experts.fc1.weight", "layers.2.router.bias"):
        assert text in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters()))
    with pytest.raises(moiety.CheckpointError):
        checkpoint.load(tmp_path / "nothing", model)
    # A frozen parameter has no moments, so an optimizer that wants some is refused.
    frozen = Blocks()
    frozen.embed.requires_grad_(False)
    part = optim.AdamW([p for p in frozen.parameters() if p.requires_grad], lr=1e-2)
    with pytest.raises(moiety.CheckpointError, match="exp_avg"):
        checkpoint.load(tmp_path, frozen, part)
    state = next(iter(optimizer.state.values()))
    with pytest.raises(moiety.InvalidArgument, match="step is 1, but the optimizer has taken 2"):
        checkpoint.save(tmp_path, model, optimizer, step=1)
    state["step"] += 1
    with pytest.raises(moiety.CheckpointError, match="have taken"):
        checkpoint.save(tmp_path, model, optimizer)
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(moiety.CheckpointError, match="count is torch.int64"):
        checkpoint.save(tmp_path, model)
    lone = torch.nn.Linear(2, 2)
    momentum = torch.optim.SGD(lone.parameters(), lr=1.0, momentum=0.9)
    lone(torch.ones(2)).sum().backward()
    momentum.step()
    with pytest.raises(moiety.Unsupported, match="momentum_buffer"):
        checkpoint.save(tmp_path, lone, momentum)


def test_a_router_bias_that_the_model_has_no_room_for(tmp_path):
    biased, plain = Blocks(router=nn.RouterConfig(bias=True)), Blocks()
    checkpoint.save(tmp_path, biased)
    checkpoint.load(tmp_path, plain)
    biased.layers[1].router.bias[2] = 1
    torch.nn.init.zeros_(biased.embed.weight)
    checkpoint.save(tmp_path, biased)
    before = plain.embed.weight.clone()
    with pytest.raises(moiety.CheckpointError, match="layers.1.router.bias is not zero"):
        checkpoint.load(tmp_path, plain)
    assert torch.equal(plain.embed.weight, before)


def damaged(path):
    file = next(pathlib.Path(path).glob("rank-*"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_noticed(tmp_path):
    model = Blocks()
    damaged(checkpoint.save(tmp_path, model))
    before = model.embed.weight.clone()
    with pytest.raises(moiety.Error, match="crc32c|checksum"):
        checkpoint.load(tmp_path, model)
    assert torch.equal(before, model.embed.weight)


# ---- Hugging Face folders


def folder_model(name):
    found = checkpoint.asked("moiety_folder_describe", path=str(GOLDEN / name))
    return Tree(found["tensors"])


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_tied", "mixtral"])
@pytest.mark.parametrize("stacked", [False, True])
def test_folders_come_in_and_go_out(name, stacked, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    model = folder_model(name)
    text = checkpoint.load_hf(GOLDEN / name, model)
    assert json.loads(text)["model_type"] == name.removesuffix("_tied")
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    made = checkpoint.save_hf(tmp_path / "out", model, GOLDEN / name, dtype=torch.float32, stacked=stacked)
    assert made["family"] == name.removesuffix("_tied") and made["files"] >= 1
    load = transformers.AutoModelForCausalLM.from_pretrained
    want, got = load(GOLDEN / name, dtype=torch.float32), load(tmp_path / "out", dtype=torch.float32)
    want, got = want.state_dict(), got.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)
    assert not list(tmp_path.glob("out.tmp*"))
    again = folder_model(name)
    checkpoint.load_hf(tmp_path / "out", again)
    for a, b in zip(model.state_dict().values(), again.state_dict().values()):
        assert torch.equal(a, b)


def test_a_configuration_of_transformers_and_bfloat16(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    model = folder_model("qwen3_moe").to(torch.bfloat16)
    checkpoint.load_hf(GOLDEN / "qwen3_moe", model)
    config = transformers.AutoConfig.from_pretrained(GOLDEN / "qwen3_moe")
    checkpoint.save_hf(tmp_path / "out", model, config)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert other.dtype == torch.bfloat16
    assert torch.equal(other.get_input_embeddings().weight, model.embed.weight)
    with pytest.raises(moiety.Error, match="out"):
        checkpoint.save_hf(tmp_path / "out", model, config)
    checkpoint.save_hf(tmp_path / "out", model, config, replace=True)


def test_folders_that_do_not_fit_are_named(tmp_path):
    model = folder_model("mixtral")
    model.extra = torch.nn.Parameter(torch.zeros(2))
    model.embed.weight = torch.nn.Parameter(torch.zeros(3, 3))
    del model.final_norm.weight
    with pytest.raises(moiety.CheckpointError, match=r"embed.weight is \[.*\] there, \[3, 3\] here; "
                                                      "extra.* not in the folder; final_norm.* not in the model"):
        checkpoint.load_hf(GOLDEN / "mixtral", model)
    with pytest.raises(moiety.Unsupported, match="float16"):
        checkpoint.save_hf(tmp_path / "x", model, GOLDEN / "mixtral", dtype=torch.float16)
    with pytest.raises(moiety.CheckpointError):
        checkpoint.save_hf(tmp_path / "x", model, GOLDEN / "mixtral")
    assert not list(tmp_path.iterdir())


# ---- the trainer


def program():
    for path in (ROOT / "build/cpu/bin/moiety", ROOT / "build/gpu/bin/moiety"):
        if path.exists():
            return str(path)
    return shutil.which("moiety")


@pytest.mark.slow
@pytest.mark.skipif(program() is None, reason="the trainer is not built")
def test_trainer_to_torch_to_trainer(tmp_path):
    def moiety_run(*arguments):
        done = subprocess.run([program(), *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    train = ("train", "--data.synthetic=markov", "--model.preset=tiny", "--model.layers=1",
             "--train.global_batch=1", "--data.seq_len=32")
    moiety_run(*train, "--train.steps=2", "--run=a")
    found = checkpoint.describe(tmp_path / "a")
    model = Tree({name: t["shape"] for name, t in found["tensors"].items() if "weight" in t["slots"]})
    optimizer = optim.AdamW([p for n, p in model.named_parameters()], lr=1e-3)
    run = checkpoint.load(tmp_path / "a", model, optimizer)
    assert run["step"] == 2 and run["adam_t"] == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())
    (tmp_path / "b").mkdir()
    checkpoint.save(tmp_path / "b/checkpoints", model, optimizer, step=2, run=run)
    here, there = (checkpoint.read(tmp_path / name) for name in "ab")
    assert here.keys() == there.keys() and all((here[k] == there[k]).all() for k in here)
    moiety_run("verify", "b/checkpoints/step-00000002")
    # The trainer goes on from either, with the same bits.
    for name in "ab":
        source = checkpoint.describe(tmp_path / name)["path"]
        moiety_run(*train, "--train.steps=4", f"--run=go_{name}", f"--run.resume={source}")
    a, b = (checkpoint.read(tmp_path / f"go_{name}") for name in "ab")
    assert all((a[k] == b[k]).all() for k in a)
