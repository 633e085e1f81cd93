"""States of optimizers between stacked experts (weight [E, N, C]) and one tensor for each expert
(weight0, weight1, ...). Modules convert their own parameters when they load (moiety.nn)."""

from typing import Any

import torch

from . import _lib, errors
from .nn import GroupedLinear


def remap_optimizer(state: Any, model: torch.nn.Module, form: str = "packed", names: Any = None) -> Any:
    """The state_dict of an optimizer, for parameters of the other form; `state` is not changed.

    form: "packed" (one parameter of all experts) or "indexed". Parameters are named by strings, as
    torch.distributed.checkpoint has them, or numbered, as optimizers have them: then `names` are the
    saved parameters' in the optimizer's order; by default those of `model` in the order of its
    parameters, with each expert's in the place of the stack. Weight and bias go independently. A set
    with gaps is a CheckpointError that names them, and experts whose steps differ are an error.
    """
    if form not in ("packed", "indexed"):
        raise errors.InvalidArgument(f"remap_optimizer: form is {form!r}, expected packed or indexed")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, GroupedLinear)}
    numbered = [key for group in state["param_groups"] for key in group["params"]]
    by_number = any(isinstance(key, int) for key in numbered)
    if by_number:
        names = list(names) if names is not None else _saved_names(model, linears, form)
        if len(names) != len(numbered):
            raise errors.InvalidArgument(f"remap_optimizer: the state has {len(numbered)} parameters, but "
                                         f"{len(names)} names are given")
        named = dict(zip(numbered, names))
    else:
        named = {key: key for key in numbered}
    states = {named[key]: dict(value) for key, value in state["state"].items()}
    groups = [{**group, "params": [named[key] for key in group["params"]]}
              for group in state["param_groups"]]
    for path, linear in linears.items():
        for name in ("weight", "bias"):
            if linear.experts_of(name) is not None:
                _remap(states, groups, f"{path}.{name}" if path else name, path, linear, form)
    if by_number:
        order = {key: i for i, key in enumerate(key for group in groups for key in group["params"])}
        states = {order[key]: value for key, value in states.items()}
        for group in groups:
            group["params"] = [order[key] for key in group["params"]]
    return {**state, "state": states, "param_groups": groups}


def _saved_names(model: torch.nn.Module, linears: Any, form: str) -> Any:
    """The names of the model's parameters in the form that is not asked for."""
    out = []
    for name, _ in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        kind = leaf.rstrip("0123456789")
        if path in linears and kind in ("weight", "bias"):
            if kind == leaf and form == "packed":
                out += [f"{name}{e}" for e in range(linears[path].num_groups)]
                continue
            if kind != leaf and form == "indexed":
                name = name[:len(name) - len(leaf)] + kind
                if name in out:
                    continue
        out.append(name)
    return out


def _remap(states: Any, groups: Any, stacked: str, path: str, linear: Any, form: str) -> None:
    """Moves the states of one stack, or of its experts, and their places in the groups."""
    experts = [f"{stacked}{e}" for e in range(linear.num_groups)]
    listed = {key for group in groups for key in group["params"]}
    sources = [stacked] if form == "indexed" else [k for k in sorted(listed) if k.startswith(stacked)
                                                   and k[len(stacked):].isdigit()]
    if not listed.intersection(sources):
        return
    targets = experts if form == "indexed" else [stacked]
    if form == "packed":
        # The core says which are missing, or too many.
        shape = list(linear.shapes[stacked.rpartition(".")[2]])
        prefix = "" if path else "module."
        _lib.key_remap({"keys": [{"name": prefix + k, "shape": shape} for k in sources],
                        "modules": [{"name": path or "module", "experts": linear.num_groups}],
                        "form": "packed"})
        sources = experts
    place = [group for group in groups if sources[0] in group["params"]][0]
    if not set(sources) <= set(place["params"]):
        raise errors.CheckpointError(f"remap_optimizer: the experts of {stacked} are in several groups")
    at = place["params"].index(sources[0])
    place["params"] = [k for k in place["params"][:at] if k not in sources] + targets + [
        k for k in place["params"][at:] if k not in sources]
    old = [states.pop(key) for key in sources if key in states]
    if not old:
        return
    if len(old) != len(sources):
        raise errors.CheckpointError(f"remap_optimizer: {len(sources) - len(old)} of the "
                                     f"{len(sources)} experts of {stacked} have no state")
    if form == "packed":
        states[stacked] = {key: _joined(stacked, key, [s[key] for s in old]) for key in old[0]}
        return
    for e, target in enumerate(targets):
        states[target] = {key: value[e].clone() if _per_expert(value, linear) else _copied(value)
                          for key, value in old[0].items()}


def _per_expert(value: Any, linear: Any) -> Any:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[0] == linear.num_groups


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _joined(stacked: str, key: str, values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].dim() > 0:
        return torch.stack(values)
    if any(value != values[0] for value in values):
        raise errors.CheckpointError(f"remap_optimizer: the experts of {stacked} differ in {key}: "
                                     f"{sorted({float(v) for v in values})}")
    return _copied(values[0])
