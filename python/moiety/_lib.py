"""The compiled libraries: libmoiety.so by ctypes, and torch's operators from libmoiety_torch.so."""

import ctypes
import functools
import importlib.metadata
import json
import pathlib
import re
from typing import Any

from . import errors

FOLDER = pathlib.Path(__file__).resolve().parent / "lib"
OLDEST_TORCH = (2, 11)


@functools.cache
def core() -> ctypes.CDLL:
    """libmoiety.so, whose functions moiety/capi/moiety.h describes."""
    path = FOLDER / "libmoiety.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"moiety: {path} cannot be loaded: {error}. In a clone, "
                          "`tools/dev torch` builds it; elsewhere, install the wheel again.") from None
    for name in ("moiety_code_name", "moiety_last_error", "moiety_version"):
        getattr(library, name).restype = ctypes.c_char_p
    library.moiety_free.restype = None
    library.moiety_free.argtypes = [ctypes.c_void_p]
    # A call that takes long runs the handlers of signals itself, so that Ctrl-C ends it.
    python = ctypes.pythonapi
    check_in(library, library.moiety_set_interrupt(*(
        ctypes.cast(function, ctypes.c_void_p) for function in (
            python.PyGILState_Ensure, python.PyGILState_Release, python.PyErr_CheckSignals,
            python.PyErr_Clear))))
    return library


def check_in(library: ctypes.CDLL, code: int) -> None:
    name = library.moiety_code_name(code).decode()
    if name == "Interrupted":
        raise KeyboardInterrupt
    if code:
        raise errors.of_kind(name, library.moiety_last_error().decode())


def check(code: int) -> None:
    """Raises what the library's last error was, unless the code is 0."""
    if code:
        check_in(core(), code)


def call_json(name: str, *arguments: Any) -> Any:
    """Calls a function of the C API whose last argument is a char** of JSON."""
    text = ctypes.c_void_p()
    check(getattr(core(), name)(*arguments, ctypes.byref(text)))
    try:
        return json.loads(ctypes.string_at(text).decode())
    finally:
        core().moiety_free(text)


@functools.cache
def version() -> str:
    try:
        return core().moiety_version().decode()
    except ImportError:
        return importlib.metadata.version("moiety")


def counters() -> dict[str, int]:
    """{"allocations", "waits"} of GPU memory and for GPUs, by the calling thread."""
    allocations, waits = ctypes.c_int64(), ctypes.c_int64()
    check(core().moiety_counters(ctypes.byref(allocations), ctypes.byref(waits)))
    return {"allocations": allocations.value, "waits": waits.value}


def torch_version_fault(version: str) -> str | None:
    """Why a torch of this version cannot be used, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or tuple(map(int, found.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return (f"moiety needs torch {oldest} or newer, but torch {version} is installed: "
                f"pip install 'torch>={oldest}'")
    return None


@functools.cache
def load_operators() -> pathlib.Path:
    """Registers torch.ops.moiety, once. ImportError says what is missing."""
    import torch

    fault = torch_version_fault(torch.__version__)
    if fault:
        raise ImportError(fault)
    if not torch.compiled_with_cxx11_abi():
        raise ImportError("moiety needs a torch with the C++11 ABI, as all from PyPI have been since "
                          f"2.7; this is {torch.__version__}")
    core()
    path = FOLDER / "libmoiety_torch.so"
    if not path.exists():
        raise ImportError(f"moiety was built without its operators for torch ({path} is missing): "
                          "install a wheel that has them, or build with "
                          "`pip install --no-build-isolation .` where torch is installed")
    torch.ops.load_library(str(path))
    from . import _register

    _register.register()
    return path


def build_info() -> dict[str, Any]:
    """A dictionary: the core's facts, and torch's."""
    info: dict[str, Any] = {"library": str(FOLDER / "libmoiety.so")}
    try:
        info.update(call_json("moiety_build_info"))
    except ImportError as error:
        info["error"] = str(error)
    try:
        import torch

        info["torch"] = torch.__version__
        info["operators"] = str(load_operators())
    except (ImportError, OSError) as error:
        info["operators"] = None
        info["operators_error"] = str(error)
    return info


def key_remap(request: dict[str, Any]) -> Any:
    """The moves of moiety_key_remap (moiety/capi/moiety.h) for a request, as a list."""
    return call_json("moiety_key_remap", json.dumps(request).encode())["moves"]
