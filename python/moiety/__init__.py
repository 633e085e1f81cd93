"""Moiety for PyTorch: experts, routers and MoE layers as operators and modules.

`import moiety` alone needs neither torch nor the compiled library; moiety.ops, nn, hf, quant and
optim load them when they are first used.
"""

import importlib
from typing import Any

from .errors import (CheckpointError, CommError, CudaError, Error, InvalidArgument, IoError,
                     OutOfMemory, Unsupported)

_SUBMODULES = ("checkpoint", "doctor", "errors", "hf", "nn", "ops", "optim", "prepare", "quant",
               "te")

__all__ = ["CheckpointError", "CommError", "CudaError", "Error", "InvalidArgument", "IoError",
           "OutOfMemory", "Unsupported", "build_info", "__version__"]


def build_info() -> dict[str, Any]:
    """What is loaded: versions, the CPU's engines, torch's version, and why a library is missing."""
    from . import _lib

    return _lib.build_info()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from . import _lib

        return _lib.version()
    raise AttributeError(f"module 'moiety' has no attribute '{name}'")


def __dir__() -> Any:
    return sorted([*globals(), *_SUBMODULES, "__version__"])
