"""Every class of experts in transformers that takes an implementation, against its own loop ("eager")."""

import importlib
import inspect
import pathlib
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import moiety.hf
import reference

MARK = re.compile(r"@use_experts_implementation[^\n]*\nclass (\w+)")
TOKENS, EXPERTS, TOP_K = 17, 4, 2


def found():
    """(module, class) of all that is marked."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    return [(f"transformers.models.{file.parent.name}.{file.stem}", name)
            for file in sorted(models.glob("*/modeling_*.py")) for name in MARK.findall(file.read_text())]


def config_of(module, kind):
    """A small configuration of the class: its family's own, with other sizes."""
    annotation = list(inspect.signature(kind.__init__).parameters.values())[1].annotation
    if isinstance(annotation, str):
        annotation = getattr(module, annotation, inspect.Parameter.empty)
    configs = [annotation] if annotation is not inspect.Parameter.empty else []
    configs += [c.config_class for c in vars(module).values()
                if inspect.isclass(c) and issubclass(c, transformers.PreTrainedModel)
                and c.__module__ == module.__name__ and c.config_class is not None]
    for config in configs:
        config = config()
        for part in (config, getattr(config, "text_config", None)):
            if part is not None and made(kind, Small(part)) is not None:
                return Small(part)
    return None


class Small:
    """A configuration with few experts of few columns."""

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        try:
            value = getattr(self._config, name)
        except AttributeError as error:
            if "per-layer" not in str(error):
                raise
            value = None
        if name in ("hidden_size", "moe_latent_size") and value != 0:
            return 32
        if "intermediate_size" in name:
            return 16
        if "expert" in name and not re.search("tok|shared|size|dim|group|implementation", name) \
                and not isinstance(value, bool):
            return EXPERTS
        return value


def made(kind, config):
    """The module, or None where the configuration is another's."""
    others = [p for p in list(inspect.signature(kind.__init__).parameters.values())[2:]
              if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        module = kind(config, *[0 for _ in others])
    except (AttributeError, TypeError, KeyError):
        return None
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def results(module, implementation):
    module.config._experts_implementation = implementation
    module.zero_grad()
    columns = module.down_proj.shape[2 if module.is_transposed else 1]
    torch.manual_seed(1)
    x = torch.randn(TOKENS, columns, requires_grad=True)
    idx = torch.stack([torch.randperm(module.down_proj.shape[0])[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K).requires_grad_()
    y = module(x, idx, weights)
    y.backward(torch.ones_like(y))
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad,
            **{name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}}


@pytest.mark.cpu_only
@pytest.mark.parametrize("where,name", found(), ids=lambda value: value.rsplit(".", 1)[-1])
def test_experts_are_those_of_eager(where, name):
    source = importlib.import_module(where)
    kind = getattr(source, name)
    config = config_of(source, kind)
    assert config is not None, "no configuration of its family makes it"
    moiety.hf.register(strict=True)
    module = made(kind, config)
    which, why = moiety.hf.path(module)
    assert which in ("grouped_mlp", "linears"), why
    want, got = results(module, "eager"), results(module, "moiety")
    assert want.keys() == got.keys() and "down_proj" in got
    for key, value in want.items():
        assert reference.far(got[key], value) < 1e-5, key
