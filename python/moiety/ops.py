"""The operators, as functions: torch.ops.moiety with defaults, and with errors by class.

Letters: R rows, E experts, N out and C in features, T tokens, K choices, D model size, F ffn size.
`splits` [E] (int32 or int64) are the numbers of rows of the groups, one behind the other; rows past
their sum are dead: they influence nothing, and are zero in results.
"""

import math

import torch
from torch import Tensor

from . import _lib

_lib.load_operators()
from ._register import called as called  # noqa: E402 (it registers what is loaded)


def grouped_linear(x: Tensor, w: Tensor, splits: Tensor, bias: Tensor | None = None,
                   row_scale: Tensor | None = None, main_grad: Tensor | None = None) -> Tensor:
    """y [R, N] of x [R, C] and w [E, N, C]; the bias [E, N] of a row is scaled by row_scale [R].

    Where main_grad is given, the gradient of w is added to it, and w gets none."""
    return called.grouped_linear(x, w, splits, bias, row_scale, main_grad)


def quantized_linear(x: Tensor, w: Tensor, splits: Tensor, recipe: str, *, bias: Tensor | None = None,
                     row_scale: Tensor | None = None, main_grad: Tensor | None = None,
                     rng: Tensor | None = None) -> Tensor:
    """grouped_linear whose operands are quantized, also those of its gradients, as the trainer's recipe
    "fp8_tensor", "fp8_block", "mxfp8" or "nvfp4" says; bfloat16 outside. rng: int64 [2] {seed, draw}, with
    which nvfp4 rounds gradients; backward needs it then."""
    return called.quantized_linear(x, w, splits, bias, row_scale, main_grad, rng, recipe)


def grouped_linear_t(x: Tensor, w: Tensor, splits: Tensor) -> Tensor:
    """The same with weights [E, C, N], as some models store them."""
    return called.grouped_linear_t(x, w, splits)


def grouped_mlp(x: Tensor, w1: Tensor, w2: Tensor, splits: Tensor, *, row_scale: Tensor | None = None,
                source: Tensor | None = None, row_tk: Tensor | None = None, b1: Tensor | None = None,
                b2: Tensor | None = None, kind: str = "glu", alpha: float = 1.0, limit: float = math.inf,
                offset: float = 0.0, interleave: int = 0, main_grad1: Tensor | None = None,
                main_grad2: Tensor | None = None) -> Tensor:
    """FC1, activation times row_scale, FC2 of every group.

    x [R, D], or with `source` [R] (int32) [T, D], whose rows are read in place; with `row_tk` [T, K]
    (expert_rows) results are summed per token to [T, D], else they are [R, D]. w1 [E, 2F, D] (gate
    rows, then up rows; kind "relu2": [E, F, D]), w2 [E, D, F]. Where main_grad is given, the weight's
    gradient is added to it and the weight gets none.
    """
    return called.grouped_mlp(x, w1, w2, splits, row_scale, source, row_tk, b1, b2, kind,
                              float(alpha), float(limit), float(offset), interleave, main_grad1, main_grad2)[0]


def activation(h: Tensor, *, splits: Tensor | None = None, row_scale: Tensor | None = None, kind: str = "glu",
               alpha: float = 1.0, limit: float = math.inf, offset: float = 0.0, interleave: int = 0) -> Tensor:
    """a [R, F] of h [R, 2F] (kind "relu2": [R, F]), times row_scale [R]: the middle of grouped_mlp, with
    its bits. Without `splits` every row is live."""
    return called.activation(h, splits, row_scale, kind, float(alpha), float(limit), float(offset),
                             interleave)


def router(logits: Tensor, top_k: int, *, bias: Tensor | None = None, mask: Tensor | None = None,
           given_idx: Tensor | None = None, score: str = "softmax", renormalize: bool = True,
           scale: float = 1.0, groups: int = 1, group_top_k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(weights float32 [T, K], idx int32 [T, K], counts int64 [E]) of float32 logits [T, E].

    The choice is the K largest of score + bias; a token with mask 0 has idx -1 and weights 0.
    `given_idx` [T, K] repeats a choice; weights and their gradients are of these logits.
    """
    if given_idx is not None and given_idx.dtype == torch.int64:
        given_idx = given_idx.to(torch.int32)
    return called.router(logits, bias, mask, given_idx, top_k, score, renormalize,
                         float(scale), groups, group_top_k)


def expert_rows(idx: Tensor, num_experts: int,
                weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(splits [E], source [T*K], row_tk [T, K], slot_w [T*K]) of a routing idx [T, K].

    Rows are ordered by expert, then token and choice. An idx outside [0, E) is masked.
    """
    return called.expert_rows(idx, weights, num_experts)
