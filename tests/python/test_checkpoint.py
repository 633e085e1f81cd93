"""Optimizer states between stacked experts and one tensor for each."""

import copy

import pytest
import torch

import moiety
from moiety import checkpoint, nn


class Indexed(torch.nn.Module):
    """A linear layer for each expert, as other libraries keep them."""

    def __init__(self, stacked):
        super().__init__()
        self.num = stacked.num_groups
        for name in ("weight", "bias"):
            for e in range(self.num):
                value = getattr(stacked, name).detach()[e].clone()
                self.register_parameter(f"{name}{e}", torch.nn.Parameter(value))


def pair(experts):
    torch.manual_seed(1)
    packed = torch.nn.Sequential(torch.nn.Linear(3, 4), nn.GroupedLinear(experts, 4, 2, bias=True))
    indexed = torch.nn.Sequential(copy.deepcopy(packed[0]), Indexed(packed[1]))
    return packed, indexed


def trained(model, experts):
    """AdamW after two steps with the same gradients for either form."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        grads = {"weight": torch.randn(experts, 2, 4), "bias": torch.randn(experts, 2)}
        for name, p in model.named_parameters():
            leaf = name.rpartition(".")[2]
            kind = leaf.rstrip("0123456789")
            if name.startswith("0."):
                p.grad = torch.ones_like(p)
            else:
                p.grad = grads[kind] if leaf == kind else grads[kind][int(leaf[len(kind):])]
        optimizer.step()
    return optimizer


def same(a, b):
    assert a["state"].keys() == b["state"].keys()
    assert [g["params"] for g in a["param_groups"]] == [g["params"] for g in b["param_groups"]]
    for key, state in a["state"].items():
        assert state.keys() == b["state"][key].keys()
        for name, value in state.items():
            assert torch.equal(value, b["state"][key][name]), (key, name)


@pytest.mark.parametrize("experts", [1, 12])
def test_both_ways_by_number(experts):
    packed, indexed = pair(experts)
    a, b = (trained(m, experts).state_dict() for m in (packed, indexed))
    before = copy.deepcopy(b)
    same(checkpoint.remap_optimizer(b, packed), a)
    same(b, before)
    same(checkpoint.remap_optimizer(a, packed, "indexed"), b)
    optimizer = torch.optim.AdamW(packed.parameters(), lr=0.1)
    optimizer.load_state_dict(checkpoint.remap_optimizer(b, packed))


def test_by_name_and_for_a_module_without_a_path():
    packed, indexed = pair(3)
    b = trained(indexed, 3).state_dict()
    names = [name for name, _ in indexed.named_parameters()]
    named = {"state": {names[k]: v for k, v in b["state"].items()},
             "param_groups": [{**b["param_groups"][0], "params": names}]}
    got = checkpoint.remap_optimizer(named, packed)
    assert got["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert got["state"]["1.weight"]["exp_avg"].shape == (3, 2, 4)
    alone = nn.GroupedLinear(3, 4, 2)
    state = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 4)) for _ in range(3)], lr=1).state_dict()
    assert checkpoint.remap_optimizer(state, alone)["param_groups"][0]["params"] == [0]


def test_what_does_not_fit_is_named():
    packed, indexed = pair(3)
    state = trained(indexed, 3).state_dict()
    names = [name for name, _ in indexed.named_parameters()]
    with pytest.raises(moiety.CheckpointError, match="1"):
        checkpoint.remap_optimizer(state, packed, names=[n.replace("weight1", "weight7") for n in names])
    with pytest.raises(moiety.InvalidArgument, match="8 parameters, but 2 names"):
        checkpoint.remap_optimizer(state, packed, names=names[:2])
    with pytest.raises(moiety.InvalidArgument, match="form is 'both'"):
        checkpoint.remap_optimizer(state, packed, "both")
    late = copy.deepcopy(state)
    late["state"][3]["step"] += 1
    with pytest.raises(moiety.CheckpointError, match="differ in step"):
        checkpoint.remap_optimizer(late, packed)
    del late["state"][3]
    with pytest.raises(moiety.CheckpointError, match="1 of the 3 experts"):
        checkpoint.remap_optimizer(late, packed)
