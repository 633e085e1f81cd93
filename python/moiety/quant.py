"""Low-precision formats: quantize, dequantize, what GEMMs read, and partial casts.

Names: fp8 (one scale), fp8_block, fp8_block_tile, mxfp8, mxfp8_tile, nvfp4, nvfp4_tile; a tile's scale
serves both directions. docs/formats.md has the arrays of each. Bits are the core's, on every device.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from . import _tables, errors
from .ops import called

__all__ = ["FORMATS", "PartialCast", "QTensor", "compute_amax", "convert_scales", "dequantize",
           "partial_cast", "quantize", "transpose"]

FORMATS = {"fp8": "fp8_tensor", "fp8_block": "fp8_block_1x128", "fp8_block_tile": "fp8_block_128x128",
           "mxfp8": "mxfp8", "mxfp8_tile": "mxfp8_tile32", "nvfp4": "nvfp4", "nvfp4_tile": "nvfp4_tile16"}
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}


def _spec(format: str, element: str | None, pow2_scales: bool | None) -> Any:
    """(the core's name, element, pow2) with what a format usually has."""
    if format not in FORMATS:
        raise errors.InvalidArgument(f"quantize: format is {format!r}, expected one of {', '.join(FORMATS)}")
    element = element or ("e2m1" if format.startswith("nvfp4") else "e4m3")
    return FORMATS[format], element, format.startswith("fp8_block") if pow2_scales is None else pow2_scales


@dataclasses.dataclass(frozen=True)
class QTensor:
    """A matrix in a format; an absent array is None.

    row, col: codes (float8_e4m3fn, float8_e5m2, or float4_e2m1fn_x2: two a byte, the first in the low
    nibble). row_scales, col_scales: float32, float8_e8m0fnu or float8_e4m3fn. amax, tensor_scale: float32
    [2] (row, col), of groups [2, E], with row_scaled [M]. flags: int32, bit 0: there was an inf or NaN.
    """

    row: torch.Tensor | None
    row_scales: torch.Tensor | None
    col: torch.Tensor | None
    col_scales: torch.Tensor | None
    amax: torch.Tensor | None
    tensor_scale: torch.Tensor
    flags: torch.Tensor
    format: str
    element: str
    pow2_scales: bool
    row_scaled: bool
    rht: bool
    shape: tuple[int, ...]
    splits: torch.Tensor | None = None
    source: torch.Tensor | None = None  # with ste=True: who gets the gradient

    def _constants(self) -> Any:
        return FORMATS[self.format], self.element, self.pow2_scales


_TENSORS = ("row", "row_scales", "col", "col_scales", "amax", "tensor_scale", "flags", "splits", "source")
_CONSTANTS = ("format", "element", "pow2_scales", "row_scaled", "rht", "shape")
_pytree.register_pytree_node(
    QTensor, lambda q: ([getattr(q, n) for n in _TENSORS], tuple(getattr(q, n) for n in _CONSTANTS)),
    lambda tensors, constants: QTensor(**dict(zip(_TENSORS, tensors)), **dict(zip(_CONSTANTS, constants))),
    serialized_type_name="moiety.quant.QTensor")


def _scale_dtype(format: str) -> Any:
    if format.startswith("nvfp4"):
        return torch.float8_e4m3fn
    return torch.float8_e8m0fnu if format.startswith("mxfp8") else torch.float32


def _shown(array: Tensor, dtype: torch.dtype) -> Tensor | None:
    """An array of bytes as its dtype; None if it is absent."""
    if array.dim() == 1:
        return None
    return array if array.dtype == dtype else array.view(dtype)


def _stored(array: Tensor | None, like: Tensor) -> Any:
    """The same as operators take it."""
    if array is None:
        return like.new_empty(0, dtype=torch.uint8)
    return array if array.dtype in (torch.uint8, torch.float32) else array.view(torch.uint8)


def quantize(x: Tensor, format: str, directions: str = "row", *, element: str | None = None,
             pow2_scales: bool | None = None, row_scaled: bool = False, stochastic: Tensor | None = None,
             rht: bool = False, splits: Tensor | None = None, amax: Tensor | None = None, ste: bool = False,
             tensor_id: int = 0) -> QTensor:
    """x [M, K] (float32 or bfloat16) as a QTensor.

    directions: "row", "col" or "both". stochastic: int64 [2] {seed, draw} on x's device, for stochastic
    rounding. rht: NVFP4's columns go through the random Hadamard transform. splits [E]: every group of
    rows is a tensor of its own (not for tiles). amax: that of compute_amax, reduced over ranks. ste: the
    gradient of what is dequantized goes to x as it is.
    """
    if directions not in ("row", "col", "both"):
        raise errors.InvalidArgument(f"quantize: directions is {directions!r}, expected row, col or both")
    name, element, pow2 = _spec(format, element, pow2_scales)
    row, row_scales, col, col_scales, amax, scale, flags = called.quantize(
        x.detach(), stochastic, splits, amax, name, element, pow2, row_scaled, rht,
        directions != "col", directions != "row", tensor_id)
    codes, scales = _CODES[element], _scale_dtype(format)
    return QTensor(_shown(row, codes), _shown(row_scales, scales), _shown(col, codes),
                   _shown(col_scales, scales), amax if amax.numel() else None, scale, flags, format,
                   element, pow2, row_scaled, rht, tuple(x.shape), splits, x if ste else None)


def compute_amax(x: Tensor, format: str, *, element: str | None = None, pow2_scales: bool | None = None,
                 row_scaled: bool = False, rht: bool = False, splits: Tensor | None = None) -> Tensor:
    """The amax that quantize would measure: [2] (row, col), of groups [2, E], with row_scaled [M]."""
    return called.compute_amax(x.detach(), splits, *_spec(format, element, pow2_scales), row_scaled,
                               rht)


class _Straight(torch.autograd.Function):
    """Values whose gradient is x's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, transposed: bool) -> Any:
        ctx.transposed = transposed
        ctx.dtype = x.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (dy.t() if ctx.transposed else dy).to(ctx.dtype), None, None


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32, direction: str | None = None, *,
               undo_rht: bool = False) -> Tensor:
    """The values of a direction (default: row, else col): [M, K]; of col [K, M], but for MXFP8, whose
    columns stand as in x. With rht the columns are padded to 16 unless undo_rht inverts the transform."""
    direction = direction or ("row" if q.row is not None else "col")
    if dtype not in (torch.float32, torch.bfloat16):
        raise errors.Unsupported(f"dequantize: dtype is {dtype}, expected float32 or bfloat16")
    if q.splits is not None and (q.amax is not None or direction == "col"):
        raise errors.Unsupported(f"dequantize: of a grouped {q.format} tensor only rows whose scales do not "
                                 "depend on the group")
    scale = q.tensor_scale if q.splits is None else q.tensor_scale.new_ones(2)
    values = called.dequantize(_stored(q.row, scale), _stored(q.row_scales, scale),
                               _stored(q.col, scale), _stored(q.col_scales, scale), scale, *q._constants(),
                               q.row_scaled, q.rht, *q.shape, direction, undo_rht, dtype == torch.bfloat16)
    if q.source is None:
        return values
    turned = direction == "col" and not q.format.startswith("mxfp8")
    return _Straight.apply(q.source, values, turned)  # type: ignore[no-untyped-call]


def transpose(q: QTensor) -> QTensor:
    """q with its columns, made from the rows: tiles and fp8, whose directions have the same codes."""
    scale = q.tensor_scale
    col, amax, tensor_scale = called.transpose_quantized(
        _stored(q.row, scale), _stored(q.row_scales, scale),
        scale.new_empty(0) if q.amax is None else q.amax, scale, *q._constants(), *q.shape)
    return dataclasses.replace(q, col=_shown(col, _CODES[q.element]), tensor_scale=tensor_scale,
                               amax=None if q.amax is None else amax)


def convert_scales(q: QTensor, layout: str, direction: str = "row") -> Tensor:
    """The scales of a direction in the layout of a GEMM: "sm100_swizzled", "padded" (uint8) or
    "sm90_mn_major" (float32)."""
    scales = q.col_scales if direction == "col" and q.col_scales is not None else q.row_scales
    if scales is None:
        raise errors.InvalidArgument(f"convert_scales: the {q.format} tensor has no scales in {direction}s")
    return called.convert_scales(_stored(scales, q.tensor_scale), q.tensor_scale, *q._constants(),
                                 q.rht, *q.shape, direction, layout)


class PartialCast:
    """Casts ranges of master values into quantized weights, with the bits of quantizing the whole.

    masters: float32 or bfloat16 [end - start], or None where nothing is owned. targets: QTensors of the
    whole weights, which are written in place. ranges: (start, end) of each. group: a torch.distributed
    group over which maxima are reduced; codes are gathered by the caller. Made once: the table of
    addresses waits for a GPU. The object holds its tensors; one whose address has changed is an error.
    """

    def __init__(self, masters: Sequence[Tensor | None], targets: Sequence[QTensor],
                 ranges: Sequence[tuple[int, int]], group: Any = None, *, through_bf16: bool = True) -> None:
        if not len(masters) == len(targets) == len(ranges):
            raise errors.InvalidArgument(f"PartialCast: {len(masters)} masters, {len(targets)} targets, "
                                         f"{len(ranges)} ranges")
        self.masters, self.targets, self.ranges, self.group = list(masters), list(targets), list(ranges), group
        self._addresses = self._present()
        device = targets[0].tensor_scale.device if targets else torch.device("cpu")
        items = []
        for master, q, (start, end) in zip(masters, targets, ranges):
            format, element, pow2 = q._constants()
            if q.row is None:
                raise errors.InvalidArgument(f"PartialCast: the target of {format} has no row codes")
            items.append({
                "format": format, "element": element, "pow2_scales": pow2, "through_bf16": through_bf16,
                "rows": q.shape[0], "cols": q.shape[1], "start": start, "end": end,
                "col": q.col is not None and q.format == "mxfp8",
                "master": _tables.tensor(None if start == end else master),
                **{name: _tables.tensor(getattr(q, field)) for name, field in
                   [("row_data", "row"), ("row_scales", "row_scales"), ("amax", "amax"),
                    ("tensor_scale", "tensor_scale"), ("flags", "flags")]},
                **({"col_data": _tables.tensor(q.col), "col_scales": _tables.tensor(q.col_scales)}
                   if q.format == "mxfp8" else {})})
        self._table = _tables.Table("moiety_partial_cast_create", device, items=items)
        facts = self._table.facts
        self._reduction = torch.empty(facts["bytes"], dtype=torch.uint8, device=device)
        self._regions = [(getattr(torch, r["dtype"]), r["offset"], r["bytes"]) for r in facts["reductions"]]

    def _present(self) -> Any:
        tensors = [*self.masters, *(getattr(q, n) for q in self.targets for n in _TENSORS)]
        return [None if t is None else t.data_ptr() for t in tensors]

    def step(self) -> None:
        """Reads the masters, writes scales, and the codes of the ranges."""
        if self._present() != self._addresses:
            raise errors.InvalidArgument("PartialCast.step: a tensor has moved since the object was made; "
                                         "make a new one")
        self._table.call("moiety_partial_amax", self._reduction.data_ptr())
        if self.group is not None:
            import torch.distributed as dist

            for dtype, offset, size in self._regions:
                if size:
                    dist.all_reduce(self._reduction[offset:offset + size].view(dtype),
                                    op=dist.ReduceOp.MAX, group=self.group)
        self._table.call("moiety_partial_cast", self._reduction.data_ptr())


def _place(t: Tensor | None) -> Any:
    """Two tensors with the same one are interchangeable; the cast that is kept holds the first's memory."""
    return None if t is None else (t.data_ptr(), t.shape, t.dtype, t.is_contiguous())


# The casts of partial_cast, the latest last.
_kept: collections.OrderedDict[Any, PartialCast] = collections.OrderedDict()


def partial_cast(masters: Sequence[Tensor | None], targets: Sequence[QTensor],
                 ranges: Sequence[tuple[int, int]], group: Any = None, **options: Any) -> None:
    """One step of a PartialCast that is kept for this list, and made anew when a tensor, a shape or a
    range differs."""
    key = (*map(id, targets), *sorted(options.items()))
    found = _kept.pop(key, None)
    if (found is None or found.ranges != list(ranges) or found.group is not group
            or any(_place(a) != _place(b) for a, b in zip(found.masters, masters, strict=True))
            or found._present() != found._addresses):
        found = PartialCast(masters, targets, ranges, group, **options)
    _kept[key] = found
    if len(_kept) > 8:
        _kept.popitem(last=False)
    found.step()
