"""The samples of docs/pytorch.md run as they are printed, each by itself."""

import pathlib
import re

import pytest
import torch

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"
if not PAGE.exists():
    pytest.skip("there is no clone around these tests", allow_module_level=True)
SAMPLES = {re.findall(r"^## (.+)$", PAGE.read_text()[:found.start()], re.M)[-1]: found[1]
           for found in re.finditer(r"```python\n(.*?)```", PAGE.read_text(), re.S)}


@pytest.fixture
def hub(monkeypatch):
    """A hub whose models are all small, with random weights."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained",
        lambda name, **options: transformers.AutoModelForCausalLM.from_config(config, **options))


def test_every_section_with_a_sample_is_known():
    assert set(SAMPLES) == {"A model of transformers", "Modules", "Transformer Engine's names",
                            "Formats, optimizer", "Checkpoints"}


def run(section):
    names = {}
    exec(compile(SAMPLES[section], section, "exec"), names)
    return names


@pytest.mark.cpu_only
def test_a_model_of_transformers(hub):
    import moiety.hf

    model = run("A model of transformers")["model"]
    tokens = torch.arange(12).reshape(1, 12)
    model(tokens, labels=tokens).loss.backward()
    layers = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    assert layers and all(moiety.hf.path(m) == ("grouped_mlp", None) for m in layers)


def test_modules():
    names = run("Modules")
    assert names["out"].y.shape == names["x"].shape and torch.isfinite(names["loss"])


def test_names_of_transformer_engine():
    names = run("Transformer Engine's names")
    assert names["y"].shape == names["x"].shape and names["mlp"].path == "fused"


def test_formats_and_optimizer():
    names = run("Formats, optimizer")
    assert (names["y"] - names["x"]).norm() < 0.2 * names["x"].norm() and names["norm"] > 0
