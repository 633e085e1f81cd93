"""The errors of Moiety: one class for every kind of the core.

Operators throw through torch as RuntimeError with the prefix "moiety[Kind] "; modules and functions
of this package turn that into the class (`translated`). From compiled code and from autograd's
threads it arrives as RuntimeError with the same text.
"""

import re
from typing import Any


class Error(RuntimeError):
    """The common base."""


class InvalidArgument(Error, ValueError):
    """The caller's values."""


class Unsupported(Error, NotImplementedError):
    """Legal, but not in this build, or not on this device."""


class CudaError(Error):
    """A GPU call failed, or there is no usable GPU."""


class CommError(Error):
    """A peer is late, is gone, or does something else."""


class IoError(Error, OSError):
    """Files and disks."""


class OutOfMemory(Error, MemoryError):
    """Memory is short; the text says for what."""


class CheckpointError(Error):
    """Keys or files that are unreadable or do not fit."""


_CLASSES = {
    "InvalidArgument": InvalidArgument,
    "Unsupported": Unsupported,
    "Cuda": CudaError,
    "Comm": CommError,
    "Io": IoError,
    "OutOfMemory": OutOfMemory,
    "Usage": InvalidArgument,
    "Data": IoError,
    "Checkpoint": CheckpointError,
}
_PREFIX = re.compile(r"moiety\[(\w+)\] (.*)", re.S)


def of_kind(kind: str, text: str) -> Error:
    """The error of a kind by its name, "InvalidArgument"."""
    return _CLASSES.get(kind, Error)(text)


def from_text(text: str) -> Error | None:
    """The error that a text of the core stands for, or None."""
    found = _PREFIX.search(text)
    if not found:
        return None
    # Of torch's text the first line is ours; what follows is its backtrace.
    return of_kind(found.group(1), found.group(2).split("\nException raised from", 1)[0].rstrip())


def translation(error: Any) -> Any:
    """The error that a RuntimeError of torch stands for: of a class of ours, or itself."""
    return error if isinstance(error, Error) else from_text(str(error)) or error


class translated:
    """with translated(): errors of operators leave as their classes."""

    def __enter__(self) -> "translated":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError) and (ours := translation(error)) is not error:
            raise ours from None
