"""Checkpoints of the trainer (docs/checkpoint-format.md), Hugging Face folders, optimizers' states.

    run = checkpoint.load("runs/demo", model, optimizer)       # {"step", "tokens", "config", ...}
    checkpoint.save("runs/demo/checkpoints", model, optimizer, step=run["step"] + 100, run=run)
    checkpoint.load_hf(folder, model)
    checkpoint.save_hf(new_folder, model, config)

A model's parameters have the trainer's names (layers.3.moe.experts.fc1.weight ...), as moiety.nn's
modules do. What is unknown, missing or of another shape is one error that lists all of it, before
anything is changed. One process; the trainer reads what is saved here under any layout.

`describe` and `read` need no torch.
"""

import importlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _lib, errors

if TYPE_CHECKING:
    from ._remap import remap_optimizer
    from ._storage import load, load_hf, save, save_hf

__all__ = ["describe", "load", "load_hf", "read", "remap_optimizer", "save", "save_hf"]

_WITH_TORCH = {"load": "_storage", "load_hf": "_storage", "remap_optimizer": "_remap", "save": "_storage",
               "save_hf": "_storage"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f"moiety.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'moiety.checkpoint' has no attribute '{name}'")


def asked(function: Any, **request: Any) -> Any:
    """The answer of a function of the C interface to a request."""
    return _lib.call_json(function, json.dumps(request).encode())


def piece(tensor: str, slot: str, shape: Iterable[int], data: int, start: Iterable[int] | None = None,
          size: Iterable[int] | None = None) -> dict[str, Any]:
    """How a request names float32 memory of a logical tensor."""
    shape = list(shape)
    return {"tensor": tensor, "slot": slot, "shape": shape, "data": data,
            "start": [0] * len(shape) if start is None else list(start),
            "size": shape if size is None else list(size)}


def describe(path: Any) -> Any:
    """{"path", "step", "tokens", "adam_t", "seed", "config", "state", "tensors": {name: {"shape",
    "slots": {slot: dtype}}}} of a checkpoint, or of a run directory: its newest one."""
    return asked("moiety_checkpoint_describe", path=str(path))


def read(path: Any) -> Any:
    """{name: float32 numpy array}, the weights of a checkpoint; checksums and digests are compared."""
    import numpy

    found = describe(path)
    arrays = {name: numpy.empty(t["shape"], numpy.float32) for name, t in found["tensors"].items()
              if t["slots"].get("weight") == "float32"}
    if not arrays:
        raise errors.CheckpointError(f"{found['path']}: no weights")
    asked("moiety_checkpoint_load", path=found["path"], weights_only=True,
          pieces=[piece(name, "weight", a.shape, a.ctypes.data) for name, a in arrays.items()])
    return arrays
