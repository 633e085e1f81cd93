"""Tables of tensors that the core keeps by address, made once and used every step."""

import ctypes
import json
import weakref
from typing import Any

import torch
from torch import Tensor

from . import _lib, errors

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int32: "int32", torch.uint8: "uint8",
          torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e8m0fnu: "ue8m0",
          torch.float4_e2m1fn_x2: "uint8"}


def tensor(x: Tensor | None) -> Any:
    """How a request names a tensor without gaps; None: it is absent."""
    if x is None:
        return None
    if not x.is_contiguous():
        raise errors.InvalidArgument(f"a tensor of shape {list(x.shape)} has strides "
                                          f"{list(x.stride())}, expected contiguous")
    return {"data": x.data_ptr(), "dtype": _NAMES.get(x.dtype, str(x.dtype)), "sizes": list(x.shape)}


class Table:
    """A table that `create` of the C API makes of a request; its tensors must outlive it."""

    def __init__(self, create: str, device: torch.device, **request: Any) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        if on_gpu and device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        request["device"] = self._device.index if on_gpu else -1
        handle, text = ctypes.c_int64(), ctypes.c_void_p()
        library = _lib.core()
        _lib.check(getattr(library, create)(json.dumps(request).encode(), ctypes.byref(handle),
                                            ctypes.byref(text)))
        try:
            self.facts = json.loads(ctypes.string_at(text).decode())
        finally:
            library.moiety_free(text)
        self._handle = handle.value
        weakref.finalize(self, library.moiety_release, ctypes.c_int64(self._handle))

    def call(self, name: str, address: int) -> None:
        """Runs a step of the table on torch's current stream of its device."""
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device).cuda_stream
        _lib.check(getattr(_lib.core(), name)(ctypes.c_int64(self._handle), ctypes.c_void_p(address),
                                              ctypes.c_void_p(stream)))
