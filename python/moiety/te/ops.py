"""Operations with the names and arguments of transformer_engine.pytorch.ops, and their Sequential.

    mlp = ops.Sequential(ops.GroupedLinear(E, D, 2 * F), ops.ScaledSwiGLU(), ops.GroupedLinear(E, F, D))
    y = mlp(x, splits, probabilities, splits)

Extra inputs follow x in the order of the operations: of a GroupedLinear its splits (and with
scale_bias the scales of its bias), of an activation the scales of its rows. A linear, an activation
and a linear run as one operator where that computes the same: `Sequential.path` says which way the
last call went, `Sequential.why` what kept it from being fused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import errors, nn
from .. import ops as _operators
from .linear import form, refuse

__all__ = ["GroupedLinear", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSwiGLU", "Sequential"]


class GroupedLinear(nn.GroupedLinear):
    """One linear for each of `num_groups` groups of rows: op(x, splits), with scale_bias
    op(x, splits, scales), which multiply the bias of each row.

    Parameters are weight0 ..., or with single_grouped_weight one `weight`; biases likewise.
    accumulate_into_main_grad adds gradients of weights to `main_grad`.
    """

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, bias: bool = True,
                 device: Any = None, dtype: torch.dtype | None = None, rng_state_tracker_function: Any = None,
                 accumulate_into_main_grad: bool = False, single_grouped_weight: bool = False,
                 single_grouped_bias: bool = False, delay_wgrad_compute: bool = False,
                 scale_bias: bool = False) -> None:
        refuse("moiety.te.ops.GroupedLinear",
               {"rng_state_tracker_function": (rng_state_tracker_function, (None,))},
               {"rng_state_tracker_function": "weights are drawn from torch's generator"})
        super().__init__(num_groups, in_features, out_features, bias=bias,
                         params=form(single_grouped_weight), bias_params=form(single_grouped_bias),
                         device=device, dtype=dtype, delay_wgrad=delay_wgrad_compute,
                         grad="main_grad" if accumulate_into_main_grad else "grad")
        self.use_bias, self.scale_bias = bias, scale_bias and bias
        self.num_extra_inputs = 2 if self.scale_bias else 1

    def forward(self, x: Tensor, splits: Tensor | Sequence[int],  # type: ignore[override]
                scales: Tensor | None = None) -> Tensor:
        if self.scale_bias and scales is None:
            raise errors.InvalidArgument("moiety.te.ops.GroupedLinear: scale_bias takes the scales of rows "
                                         "behind the splits, and there are none")
        return super().forward(x, splits, row_scale=_scales(scales))

    def need_backward_dw(self) -> Any:
        """Whether backward leaves gradients of weights to backward_dw()."""
        return self.delay_wgrad

    def register_wgrad_accumulation_and_reduce_hooks(self,
                                                     wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> Any:
        """The hook, without arguments, runs after each contribution to the weights' gradients."""
        return self.on_grad_ready(lambda _: wgrad_accumulation_and_reduce_hook())


class _Scaled(torch.nn.Module):
    """An activation of rows [..., H], times the scale [...] of each row."""

    num_extra_inputs = 1

    def __init__(self, activation: nn.Activation, interleave: int | None,
                 activation_recompute_in_mlp: bool) -> None:
        super().__init__()
        self.activation, self.interleave = activation, interleave or 0
        # The fused path always computes activations again in backward, the other keeps their inputs.
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def extra_repr(self) -> str:
        return f"{self.activation}, glu_interleave_size={self.interleave or None}"

    def forward(self, x: Tensor, scales: Tensor | None) -> Any:
        a = self.activation
        y = _operators.activation(x.reshape(-1, x.shape[-1]), row_scale=_scales(scales), kind=a.kind,
                                  alpha=a.alpha, limit=a.limit, offset=a.offset,
                                  interleave=self.interleave)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class ScaledSwiGLU(_Scaled):
    """silu(first half) * second half, times the scale of the row. glu_interleave_size: the halves lie
    in alternating blocks of so many columns."""

    def __init__(self, glu_interleave_size: int | None = None, *,
                 activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(nn.Swiglu(), glu_interleave_size, activation_recompute_in_mlp)


class ScaledClampedQGeGLU(_Scaled):
    """g * sigmoid(alpha * g) * (u + glu_linear_offset) with g <= limit and |u| <= limit, times the scale
    of the row."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False,
                 limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> None:
        super().__init__(nn.QGeglu(alpha, limit, glu_linear_offset), glu_interleave_size,
                         activation_recompute_in_mlp)


class ScaledSReLU(_Scaled):
    """relu(x)^2, times the scale of the row."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(nn.SquaredRelu(), None, activation_recompute_in_mlp)


class Sequential(torch.nn.Sequential):
    """The operations one behind the other; model(x, *extra_inputs)."""

    path = None  # "fused" or "unfused": the way of the last call
    why = None  # why it was not fused

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        # The grouped MLPs over three operations, by the first. No children: their linears are already.
        self.__dict__["_fused"] = {}
        operations = list(self)
        for at in range(len(operations)):
            if _no_mlp(operations[at:at + 3]) is None:
                self._mlp(at)

    def forward(self, x: Tensor, *extra_inputs: Any) -> Any:
        modules = list(self)
        counts = [getattr(module, "num_extra_inputs", 0) for module in modules]
        if len(extra_inputs) != sum(counts):
            raise errors.InvalidArgument(f"moiety.te.ops.Sequential: {len(extra_inputs)} extra inputs are "
                                         f"given, but its operations take {counts} of them")
        given = iter(extra_inputs)
        extras = [[next(given) for _ in range(count)] for count in counts]
        path, why, at = "fused", None, 0
        while at < len(modules):
            fault = _why_not(modules[at:at + 3], extras[at:at + 3])
            if fault is None:
                x = self._mlp(at)(x, extras[at][0], row_scale=_scales(extras[at + 1][0]))
                at += 3
            else:
                path, why = "unfused", why or fault
                x = modules[at](x, *extras[at])
                at += 1
        self.path, self.why = path, why
        return x

    def _mlp(self, at: int) -> Any:
        """The grouped MLP over three operations; made anew where one was replaced."""
        operations: list[Any] = list(self)[at:at + 3]
        fc1, act, fc2 = operations
        fused: dict[int, nn.GroupedMLP] = self.__dict__["_fused"]
        found = fused.get(at)
        if found is None or (found.fc1, found.fc2) != (fc1, fc2) or found.activation != act.activation:
            found = fused[at] = nn.GroupedMLP.of(fc1, fc2, act.activation, act.interleave)
        return found


def _no_mlp(modules: list[Any]) -> Any:
    """None if three operations are a grouped MLP, else why they are none."""
    if len(modules) < 3 or not (isinstance(modules[0], GroupedLinear) and isinstance(modules[1], _Scaled)
                                and isinstance(modules[2], GroupedLinear)):
        return "its operations are not a GroupedLinear, a scaled activation and a GroupedLinear"
    fc1, act, fc2 = modules
    hidden = 2 * fc2.in_features if act.activation.gated else fc2.in_features
    if (fc1.out_features, fc1.in_features, fc1.num_groups) != (hidden, fc2.out_features, fc2.num_groups):
        return (f"GroupedLinear({fc1.num_groups}, {fc1.in_features}, {fc1.out_features}) and "
                f"GroupedLinear({fc2.num_groups}, {fc2.in_features}, {fc2.out_features}) are no MLP")
    return None


def _why_not(modules: list[Any], extras: Any) -> Any:
    """None if three operations run as one grouped MLP, else why they do not."""
    fault = _no_mlp(modules)
    if fault is not None:
        return fault
    fc1, act, fc2 = modules
    if not _same(extras[0][0], extras[2][0]):
        return "its linears are given splits that are two objects"
    if fc1.scale_bias:
        return "the bias of its first linear is scaled"
    if fc2.use_bias and not (fc2.scale_bias and _same(extras[1][0], extras[2][1])):
        return "the bias of its second linear is not scaled by the activation's scales"
    for module in modules:
        if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"{type(module).__name__} has hooks that see its output or its gradients"
    if act._forward_pre_hooks:
        return f"{type(act).__name__} has hooks that see its input"
    return None


def _same(a: Any, b: Any) -> Any:
    return a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
                      and list(a) == list(b))


def _scales(scales: Tensor | None) -> Any:
    return None if scales is None else scales.reshape(-1).float()


def __getattr__(name: str) -> None:
    ours = {"ClampedSwiGLU": "moiety.ops.activation", "SwiGLU": "moiety.ops.activation",
            "SReLU": "moiety.ops.activation", "Linear": "torch.nn.Linear", "RMSNorm": "torch.nn.RMSNorm",
            "LayerNorm": "torch.nn.LayerNorm", "Quantize": "moiety.quant.quantize",
            "MoeDispatch": "several ranks are not supported yet; moiety.nn.MoELayer runs on one",
            "MoeCombine": "several ranks are not supported yet; moiety.nn.MoELayer runs on one"}
    if name in ours:
        raise errors.Unsupported(f"moiety.te.ops.{name} does not exist: {ours[name]}")
    raise AttributeError(f"module 'moiety.te.ops' has no attribute '{name}'")
