"""Models and optimizers in checkpoints of the trainer and in Hugging Face folders (moiety.checkpoint)."""

import json
import os
from typing import Any

import torch

from . import checkpoint, errors
from .nn import GroupedLinear, GroupedMLP

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Part:
    """A parameter or a buffer: a box of a logical tensor, whose rows may be woven in memory."""

    def __init__(self, value: Any, tensor: str, shape: Any, start: tuple[int, ...] | None = None, interleave: int = 0,
                 row_dim: int = 0) -> None:
        self.value, self.tensor, self.shape = value, tensor, tuple(shape)
        self.start: tuple[int, ...] = start or (0,) * len(self.shape)
        self.interleave, self.row_dim = interleave, row_dim

    def piece(self, slot: Any, staged: Any) -> Any:
        lead = len(self.shape) - staged.dim()
        return checkpoint.piece(self.tensor, slot, self.shape, staged.data_ptr(), self.start,
                                (1,) * lead + tuple(staged.shape))

    def plain(self, value: Any) -> Any:
        """A value like the parameter as a file has it: float32 on the CPU, halves one behind the other."""
        value = value.detach()
        if self.interleave:
            d = self.row_dim
            value = value.unflatten(d, (-1, 2, self.interleave)).transpose(d, d + 1).flatten(d, d + 2)
        return value.to("cpu", torch.float32).contiguous()

    def put(self, value: Any, staged: Any) -> None:
        """Copies what a file has into a value like the parameter."""
        if self.interleave:
            d = self.row_dim
            staged = staged.unflatten(d, (2, -1, self.interleave)).transpose(d, d + 1).flatten(d, d + 2)
        if value.data_ptr() != staged.data_ptr():
            value.copy_(staged)


def _parts(model: torch.nn.Module) -> Any:
    """The parts of all parameters and of the buffers that are saved. A parameter that is there twice
    counts once."""
    woven = {id(m.fc1): m.glu_interleave for m in model.modules() if isinstance(m, GroupedMLP)}
    parts, seen = [], set()
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        indexed = isinstance(module, GroupedLinear)
        interleave = woven.get(id(module), 0)
        values = list(module._parameters.items())
        values += [kv for kv in module._buffers.items() if kv[0] not in module._non_persistent_buffers_set]
        for name, value in values:
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            kind = name.rstrip("0123456789")
            row_dim = -2 if kind == "weight" else -1
            if indexed and kind != name:
                expert = int(name[len(kind):])
                shape = (module.num_groups, *value.shape)
                parts.append(_Part(value, prefix + kind, shape, (expert,) + (0,) * value.dim(), interleave,
                                   value.dim() + row_dim))
            else:
                parts.append(_Part(value, prefix + name, value.shape, None, interleave,
                                   value.dim() + row_dim))
    wrong = [f"{p.tensor} is {p.value.dtype}" for p in parts if not p.value.is_floating_point()]
    if wrong:
        raise errors.CheckpointError("a checkpoint holds floating-point tensors: " + "; ".join(wrong))
    return parts


def _router_biases(parts: Any) -> Any:
    """Zeros for the biases that routers of checkpoints always have, where the model's have none."""
    names = {p.tensor for p in parts}
    return [_Part(torch.zeros(p.shape[0], device="cpu"), p.tensor[:-len("weight")] + "bias", (p.shape[0],))
            for p in parts if p.tensor.endswith("router.weight")
            and p.tensor[:-len("weight")] + "bias" not in names]


def _optimized(optimizer: Any) -> Any:
    return set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}


def _state_of(optimizer: Any, p: Any) -> Any:
    """The state of a parameter, made if it is not there, with torch's keys."""
    if hasattr(optimizer, "_state_of"):
        return optimizer._state_of(p)
    state = optimizer.state[p]
    if not state:
        state["step"] = torch.zeros(())
        state.update({name: torch.zeros_like(p) for name in _MOMENTS})
    if not all(name in state for name in ("step", *_MOMENTS)):
        raise errors.Unsupported(f"checkpoint: {type(optimizer).__name__} has the states "
                                 f"{sorted(state)}, expected those of AdamW")
    return state


def _slots(part: Any, optimizer: Any, owned: Any) -> Any:
    """{slot: tensor} of a part: the master, else the value itself; moments, if it is optimized."""
    if id(part.value) not in owned:
        return {"weight": part.value}
    state = _state_of(optimizer, part.value)
    return {"weight": state.get("master", part.value), **{name: state[name] for name in _MOMENTS}}


@torch.no_grad()
def _read(parts: Any, slots_of: Any, function: Any, path: Any, absent: Any = (), **request: Any) -> Any:
    """Fills the tensors of all slots; nothing is changed if that fails. What is absent must be zero."""
    staged = []
    for part in (*parts, *absent):
        for slot, value in slots_of(part).items():
            staged.append((part, slot, value, torch.empty(value.shape, dtype=torch.float32, device="cpu")))
    answer = checkpoint.asked(function, path=path, pieces=[part.piece(slot, s) for part, slot, _, s in staged],
                              **request)
    for part, _, _, s in staged:
        if part in absent and s.any():
            raise errors.CheckpointError(f"{path}: {part.tensor} is not zero, and the model's router has no "
                                         "bias; moiety.nn.RouterConfig(bias=True) makes one")
    for part, _, value, s in staged:
        part.put(value, s)
    return answer


def load(path: Any, model: torch.nn.Module, optimizer: Any = None) -> Any:
    """Fills model and optimizer (AdamW of moiety.optim or of torch) from a checkpoint, or from the
    newest one of a run directory; returns {"step", "tokens", "adam_t", "seed", "config", "state"}, the
    last two as texts of JSON. Without an optimizer its moments are passed by. bfloat16 parameters are
    the masters, rounded."""
    parts, owned = _parts(model), _optimized(optimizer)
    run = _read(parts, lambda part: _slots(part, optimizer, owned), "moiety_checkpoint_load",
                checkpoint.describe(path)["path"], _router_biases(parts), weights_only=optimizer is None)
    with torch.no_grad():
        for part in parts:
            if id(part.value) in owned:
                state = _state_of(optimizer, part.value)
                state["step"].fill_(run["adam_t"])
                if "master" in state:
                    part.value.copy_(state["master"])
    return run


def save(path: Any, model: torch.nn.Module, optimizer: Any = None, step: Any = None, *, run: Any = None) -> Any:
    """Writes the checkpoint step-<step> into the directory `path`, a run's checkpoints/, and returns its
    path. step: the optimizer's, unless given; skipped updates make it larger. run: what `load` returned, whose
    tokens, seed, configuration and position in the data are kept.
    A checkpoint of the same step is replaced."""
    parts, owned = _parts(model), _optimized(optimizer)
    steps = {float(_state_of(optimizer, p.value)["step"]) for p in parts if id(p.value) in owned}
    if len(steps) > 1:
        raise errors.CheckpointError(f"checkpoint.save: parameters have taken {sorted(steps)} steps, but a "
                                     "checkpoint has one number")
    kept = {"tokens": 0, "seed": 0, "config": "{}", "state": "{}", **(run or {})}
    adam_t = int(steps.pop()) if steps else kept.get("adam_t", 0)
    step = adam_t if step is None else step
    if step < adam_t:
        raise errors.InvalidArgument(f"checkpoint.save: step is {step}, but the optimizer has taken {adam_t}")
    staged = [(part, slot, part.plain(value)) for part in parts + _router_biases(parts)
              for slot, value in _slots(part, optimizer, owned).items()]
    os.makedirs(path, exist_ok=True)
    return checkpoint.asked("moiety_checkpoint_save", path=str(path),
                            run={**kept, "step": step, "adam_t": adam_t},
                            pieces=[part.piece(slot, s) for part, slot, s in staged])["path"]


def load_hf(path: Any, model: torch.nn.Module) -> Any:
    """Fills a model from a Hugging Face folder of the Qwen3-MoE or Mixtral family (or of a dense one:
    docs/hugging-face.md); returns the text of its config.json. Experts may be stacked or one by one."""
    found = checkpoint.asked("moiety_folder_describe", path=str(path))
    parts = _parts(model)
    there = {name: tuple(shape) for name, shape in found["tensors"].items()}
    here = {p.tensor: p.shape for p in parts}
    optional = {p.tensor for p in _router_biases(parts)}
    faults = [f"{name} {list(there[name])} is not in the model" for name in there if name not in here
              and name not in optional]
    faults += [f"{name} {list(here[name])} is not in the folder" for name in here if name not in there]
    faults += [f"{name} is {list(there[name])} there, {list(here[name])} here" for name in here
               if name in there and there[name] != here[name]]
    if faults:
        raise errors.CheckpointError(f"{path}: " + "; ".join(sorted(faults)))
    _read(parts, lambda part: {"weight": part.value}, "moiety_folder_load", str(path))
    return found["config"]


def save_hf(path: Any, model: torch.nn.Module, config: Any, *, dtype: torch.dtype = torch.bfloat16,
            stacked: bool = False, replace: bool = False) -> Any:
    """Writes a model's weights as a new Hugging Face folder that transformers loads, and returns
    {"family", "keys", "files", "bytes"}.

    config: a folder whose config.json, tokenizer and other files go along, or a configuration of
    transformers, or a dictionary like it. dtype: bfloat16 or float32. stacked: one tensor of all
    experts. replace: a folder that is there. Needs room for float32 weights beside it meanwhile.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise errors.Unsupported(f"save_hf: dtype is {dtype}, expected bfloat16 or float32")
    if isinstance(config, (str, os.PathLike)):
        source = {"like": str(config)}
    else:
        source = {"config": json.dumps(config if isinstance(config, dict) else config.to_dict(), default=str)}
    parts = _parts(model)
    staged = [(part, part.plain(part.value)) for part in parts + _router_biases(parts)]
    return checkpoint.asked("moiety_folder_save", path=str(path), dtype=str(dtype).removeprefix("torch."),
                            stacked=stacked, replace=replace, **source,
                            pieces=[part.piece("weight", s) for part, s in staged])
