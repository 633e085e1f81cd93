"""Casts of master weights into quantized weights (moiety.quant.QTensor), by Transformer Engine's names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import errors, quant


def quantize_master_weights(model_weights: Any, master_weights: Sequence[Tensor | None],
                            start_offsets: Sequence[int | None], group: Any,
                            fsdp_shard_model_weights: Any = None,
                            manual_post_all_gather_processing: bool = False) -> None:
    """Casts this rank's ranges of the masters into the quantized weights, which are written in place.

    master_weights: the values from start_offsets on, or None where this rank has none. group: the
    torch.distributed group over which maxima are reduced; None: one rank. Columns that are made from
    gathered rows are the business of post_all_gather_processing; with several ranks
    manual_post_all_gather_processing must say that the caller knows. fsdp_shard_model_weights: only
    None; the ranges of a whole weight are given by start_offsets.
    """
    if not len(model_weights) == len(master_weights) == len(start_offsets):
        raise errors.InvalidArgument(f"quantize_master_weights: {len(model_weights)} weights, "
                                     f"{len(master_weights)} masters, {len(start_offsets)} offsets")
    if fsdp_shard_model_weights is not None:
        raise errors.Unsupported("quantize_master_weights: fsdp_shard_model_weights is given; "
                                 "moiety.quant.PartialCast writes into whole weights, by ranges")
    masters: list[Tensor | None] = []
    ranges: list[tuple[int, int]] = []
    for master, start in zip(master_weights, start_offsets):
        if master is not None and start is None:
            raise errors.InvalidArgument("quantize_master_weights: a master has no start offset")
        size = 0 if master is None else master.numel()
        masters.append(None if master is None or size == 0 else master.detach().reshape(-1))
        ranges.append((start, start + size) if size and start is not None else (0, 0))
    waits = [q for q in model_weights if _makes_columns(q)]
    several = group is not None and group.size() > 1
    if waits and several and not manual_post_all_gather_processing:
        raise errors.Unsupported(f"quantize_master_weights: columns of {waits[0].format} are made from "
                                 "gathered rows: pass manual_post_all_gather_processing=True and call "
                                 "post_all_gather_processing behind the all-gather")
    quant.partial_cast(masters, model_weights, ranges, group)
    if not manual_post_all_gather_processing:
        post_all_gather_processing(waits)


def cast_master_weights_to_fp8(model_weights: Any, master_weights: Sequence[Tensor | None],
                               start_offsets: Sequence[int | None], group: Any,
                               fsdp_shard_model_weights: Any = None,
                               manual_post_all_gather_processing: bool = False) -> None:
    """quantize_master_weights."""
    quantize_master_weights(model_weights, master_weights, start_offsets, group,
                            fsdp_shard_model_weights, manual_post_all_gather_processing)


def cast_master_weights_to_nvfp4(model_weights: Any, master_weights: Sequence[Tensor | None],
                                 start_offsets: Sequence[int | None], group: Any,
                                 fsdp_shard_model_weights: Any = None,
                                 manual_post_all_gather_processing: bool = False) -> None:
    """quantize_master_weights for weights that are all NVFP4 in tiles."""
    for q in model_weights:
        if q.format != "nvfp4_tile":
            raise errors.InvalidArgument(f"cast_master_weights_to_nvfp4: a weight is {q.format}, expected "
                                         "nvfp4_tile; quantize_master_weights takes every format")
    quantize_master_weights(model_weights, master_weights, start_offsets, group,
                            fsdp_shard_model_weights, manual_post_all_gather_processing)


def _makes_columns(q: Any) -> Any:
    """Whether the columns of a weight come from its rows (a partial cast writes those of mxfp8)."""
    return isinstance(q, quant.QTensor) and q.col is not None and q.format != "mxfp8"


def post_all_gather_processing(model_weights: Any) -> None:
    """Makes the columns of quantized weights from their rows, in place, where they have columns. Plain
    tensors stay as they are."""
    if not isinstance(model_weights, (list, tuple)):
        model_weights = [model_weights]
    for q in model_weights:
        if _makes_columns(q):
            made = quant.transpose(q)
            assert q.col is not None and made.col is not None
            q.col.view(torch.uint8).copy_(made.col.view(torch.uint8))
            q.tensor_scale.copy_(made.tensor_scale)
            if q.amax is not None and made.amax is not None:
                q.amax.copy_(made.amax)


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Puts the row codes of a quantized weight into `new_raw_data`, a tensor of as many bytes without
    gaps, which they keep from now on; other arrays stay where they are. A moiety.quant.PartialCast
    over the weight must be made anew."""
    if not isinstance(tensor, quant.QTensor) or tensor.row is None:
        raise errors.InvalidArgument("replace_raw_data: expected a QTensor with row codes, got "
                                     f"{type(tensor).__name__}")
    row = tensor.row
    if new_raw_data.nbytes != row.nbytes or not new_raw_data.is_contiguous():
        raise errors.InvalidArgument(f"replace_raw_data: the codes are {list(row.shape)} of {row.dtype}, "
                                     f"{row.nbytes} bytes, the new data {list(new_raw_data.shape)} of "
                                     f"{new_raw_data.dtype}, strides {list(new_raw_data.stride())}")
    moved = new_raw_data.detach().reshape(-1).view(torch.uint8).view(row.view(torch.uint8).shape)
    moved.copy_(row.view(torch.uint8))
    object.__setattr__(tensor, "row", moved.view(row.dtype))
