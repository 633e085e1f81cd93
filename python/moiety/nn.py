"""Modules: GroupedLinear, GroupedMLP, MoELayer.

Parameters are ordinary nn.Parameters, float32 or bfloat16. Letters as in moiety.ops.
"""

import collections
import dataclasses
import math
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)

from . import _blocks, _experts, errors, ops
from ._activation import Activation, ClampedSwiglu, QGeglu, SquaredRelu, Swiglu
from ._blocks import replace_moe
from ._experts import refresh
from ._register import below, called
from ._warmup import warmup

__all__ = ["Activation", "ClampedSwiglu", "GroupedLinear", "GroupedMLP", "MoELayer", "MoEOutput",
           "QGeglu", "RouterConfig", "SquaredRelu", "Swiglu", "refresh", "replace_moe", "warmup"]


_delayed: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose weight gradients may be pending


def _refuse_pending(optimizer: Any, args: Any, kwargs: Any) -> None:
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in _delayed:
        if module.pending_dw and any(id(w) in owned for w in module.experts_of("weight")):
            raise errors.InvalidArgument(
                f"{type(optimizer).__name__}.step: {module} has {module.pending_dw} weight gradients "
                "pending; call backward_dw() first")


def _check_choice(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise errors.InvalidArgument(f"{name} is {value!r}, expected one of {', '.join(known)}")


RECIPES = ("bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4")
_rounding: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that round gradients stochastically


@torch.no_grad()
def _next_draw(optimizer: Any, args: Any, kwargs: Any) -> None:
    for module in _rounding:
        module.rng[1] += 1


class _ManagedLinear(torch.autograd.Function):
    """grouped_linear whose weight gradient is a job of its module."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, weight: Tensor, splits: Tensor, bias: Tensor | None,
                row_scale: Tensor | None, overwrite: bool) -> Any:
        ctx.module, ctx.overwrite = module, overwrite
        need_x, need_w, _, need_bias, need_scale = ctx.needs_input_grad[1:6]
        need_bias = need_bias or need_scale
        ctx.save_for_backward(x if need_w else None, weight if need_x else None, splits,
                              bias if need_bias else None, row_scale if need_bias else None)
        return module._product(x, weight.detach(), splits, bias, row_scale, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, splits, bias, row_scale = ctx.saved_tensors
        dx = dbias = dscale = None
        dy = dy.contiguous()
        if ctx.needs_input_grad[1]:
            dx = ctx.module._dgrad(dy, weight, splits)
        if bias is not None:
            dbias, dscale = below.grouped_linear_bias_grad(dy, splits, bias, row_scale)
        if ctx.needs_input_grad[2]:
            ctx.module._add_job((dy, x, splits, None, None), ctx.overwrite)
        return (None, dx, None, None, dbias if ctx.needs_input_grad[4] else None,
                dscale if ctx.needs_input_grad[5] else None, None)


class _ManagedMlp(torch.autograd.Function):
    """grouped_mlp whose weight gradients are jobs of its linears."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, w1: Tensor, w2: Tensor, splits: Tensor, row_scale: Tensor | None,
                source: Tensor | None, row_tk: Tensor | None, b1: Tensor | None,
                b2: Tensor | None) -> Any:
        y, h = below.grouped_mlp(x, w1, w2, splits, row_scale, source, row_tk, b1, b2,
                                 *module._constants(), None, None)
        ctx.module = module
        # The values of x serve w1's gradient alone.
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w1, w2, splits, row_scale, source, row_tk,
                              b1, b2, h)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w1, w2, splits, row_scale, source, row_tk, b1, b2, h = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # as in _register
        _, need_x, need_w1, need_w2, _, need_scale, _, _, need_b1, need_b2 = ctx.needs_input_grad
        dy = dy.contiguous()
        dx, dscale, db1, db2, dh, a = below.grouped_mlp_backward(
            dy, h, dy if x is None else x, w1, w2, splits, row_scale, source, row_tk, b1, b2,
            *ctx.module._constants(), need_x)  # of x only the shape is read, which is that of dy
        del h
        if need_w2:
            ctx.module.fc2._add_job((dy, a, splits, source, None))
        del a
        if need_w1:
            ctx.module.fc1._add_job((dh, x, splits, None, source))
        return (None, dx if need_x else None, None, None, None, dscale if need_scale else None, None,
                None, db1 if need_b1 else None, db2 if need_b2 else None)


class GroupedLinear(torch.nn.Module):
    """One linear layer for each group of rows: weight [E, N, C], bias [E, N].

    params, bias_params: "grouped" (one parameter of all experts) or "indexed": weight0 ... weight<E-1>
    [N, C], bias0 ... [N], which lie in one storage and are read there. (Where they do not, since
    somebody has moved their data, and under torch.compile, each call copies them.) A state_dict of
    either form loads into either.

    recipe: "bf16" (nothing is quantized), or which operands of the products are, as the trainer's
    precision.recipe: "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"; parameters are bfloat16.
    Weights are quantized for every use. NVFP4 rounds gradients with the buffer `rng`, {seed, draw}; an
    optimizer's step is the next draw, so a recomputation has the same bits.

    grad="main_grad": the weight's gradient is added to `weight.main_grad` (or to what
    `weight.get_main_grad()` returns), float32 or bfloat16, and `.grad` stays None; with
    `weight.overwrite_main_grad` (True, or a float32 factor on the device) it takes the place of what
    is there. `weight.grad_added_to_main_grad`, where a weight has it, becomes True.
    delay_wgrad=True: backward leaves it to `backward_dw()`, which takes one backward's share, the
    oldest first, and adds. delay_wgrad, on_grad_ready, overwrite_main_grad and main_grad of indexed
    weights do not run under torch.compile.
    """

    weight: Tensor
    rng: Any

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, bias: bool = False,
                 params: str = "grouped", bias_params: str = "grouped", recipe: str = "bf16",
                 device: Any = None, dtype: torch.dtype | None = None, grad: str = "grad",
                 delay_wgrad: bool = False) -> None:
        super().__init__()
        _check_choice("GroupedLinear: recipe", recipe, RECIPES)
        _check_choice("GroupedLinear: grad", grad, ("grad", "main_grad"))
        _check_choice("GroupedLinear: params", params, _experts.FORMS)
        _check_choice("GroupedLinear: bias_params", bias_params, _experts.FORMS)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.grad_target, self.delay_wgrad, self.recipe = grad, delay_wgrad, recipe
        self.forms = {"weight": params, "bias": bias_params}
        self.shapes = {"weight": (out_features, in_features), "bias": (out_features,) if bias else None}
        for name, form in self.forms.items():
            self._register(name, form, self.shapes[name], device=device, dtype=dtype)
        self.register_buffer("rng", None, persistent=False)
        if recipe == "nvfp4":
            self.rng = torch.randint(2 ** 62, (2,), device="cpu").to(self.experts_of("weight")[0].device)
            self.rng[1] = 0
            if not _rounding:
                register_optimizer_step_post_hook(_next_draw)
            _rounding.add(self)
        self._jobs: collections.deque[Any] = collections.deque()
        self._ready_hooks: collections.OrderedDict[int, Callable[..., Any]] = collections.OrderedDict()
        if delay_wgrad:
            if not _delayed:
                register_optimizer_step_pre_hook(_refuse_pending)
            _delayed.add(self)
        self.register_load_state_dict_pre_hook(_experts.load_other_form)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def _register(self, name: str, form: str, shape: Any, **kind: Any) -> None:
        if form == "grouped" or shape is None:
            self.register_parameter(name, None if shape is None else torch.nn.Parameter(
                torch.empty(self.num_groups, *shape, **kind)))
            return
        if self.num_groups < 1:
            raise errors.InvalidArgument(f"GroupedLinear: num_groups is {self.num_groups}, and indexed "
                                         "parameters need at least 1")
        for e, part in enumerate(torch.empty(self.num_groups, *shape, **kind)):
            self.register_parameter(f"{name}{e}", torch.nn.Parameter(part))

    def experts_of(self, name: str) -> Any:
        """The parameters of "weight" or "bias" as a list, of one stack or of each expert; None: absent."""
        if self._parameters.get(name) is not None:
            return [self._parameters[name]]
        if name in self._parameters:
            return None
        return [self._parameters[f"{name}{e}"] for e in range(self.num_groups)]

    def stacked(self, name: str) -> Any:
        """"weight" [E, N, C] or "bias" [E, N] with its gradient, in either form; None: absent."""
        if name in self._parameters:
            return self._parameters[name]
        whole = _experts.joined(self.experts_of(name))
        return whole.contiguous() if name == "bias" else whole

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._lay_evenly()
        return self

    def __setstate__(self, state: Any) -> None:  # a copy
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lay_evenly()
        if self.delay_wgrad:
            _delayed.add(self)
        if self.rng is not None:
            _rounding.add(self)

    def _lay_evenly(self) -> int:
        return sum(_experts.lay_evenly(self.experts_of(name)) for name, form in self.forms.items()
                   if form == "indexed")

    def reset_parameters(self) -> None:
        """As torch.nn.Linear, for every group."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        for parameter in self.parameters(recurse=False):
            if not parameter.is_meta:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        return (f"{self.num_groups}, {self.in_features}, {self.out_features}, "
                f"bias={self.experts_of('bias') is not None}, params={self.forms['weight']!r}, "
                f"grad={self.grad_target!r}")

    def forward(self, x: Tensor, splits: Tensor | Sequence[int], *, row_scale: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        """x [..., C] as rows; returns [..., N]. splits [E]: a tensor, or a list of ints. `out` [..., N] is
        written and returned, where no gradient is asked for; its dead rows stay as they are."""
        if out is not None:
            return self._forward_out(x, splits, row_scale, out)
        return self._forward(x, splits, self.stacked("bias"), row_scale)

    def _forward_out(self, x: Tensor, splits: Tensor | Sequence[int], row_scale: Tensor | None,
                     out: Tensor) -> Tensor:
        if self.recipe != "bf16":
            raise errors.Unsupported(f"GroupedLinear: out is given, but recipe is {self.recipe!r}; only "
                                     "'bf16' writes into a buffer")
        weight = self.stacked("weight")
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            raise errors.InvalidArgument("GroupedLinear: out is given, which has no gradient, but one is asked "
                                         "for; call it under torch.no_grad()")
        rows = _rows(x, weight, "GroupedLinear")
        if out.shape != (*x.shape[:-1], self.out_features) or not out.is_contiguous():
            raise errors.InvalidArgument(
                f"GroupedLinear: out has shape {list(out.shape)} and strides {list(out.stride())}, expected "
                f"contiguous {[*x.shape[:-1], self.out_features]}")
        with errors.translated():
            below.grouped_linear_out(rows, weight, _splits(splits, rows), self.stacked("bias"), row_scale,
                                     out.view(-1, self.out_features))
        return out

    def _forward(self, x: Tensor, splits: Tensor | Sequence[int], bias: Tensor | None, row_scale: Tensor | None,
                 overwrite: bool = False) -> Any:
        weight = self.stacked("weight")
        rows = _rows(x, weight, "GroupedLinear")
        splits = _splits(splits, rows)
        if overwrite or self._managed():
            y = _ManagedLinear.apply(  # type: ignore[no-untyped-call]
                self, rows, weight, splits, bias, row_scale, overwrite)
        else:
            y = self._product(rows, weight, splits, bias, row_scale, self._main_grad())
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor, weight: Tensor, splits: Tensor, bias: Tensor | None, row_scale: Tensor | None,
                 main_grad: Tensor | None) -> Tensor:
        if self.recipe == "bf16":
            return ops.grouped_linear(x, weight, splits, bias, row_scale, main_grad)
        return ops.quantized_linear(x, weight, splits, self.recipe, bias=bias, row_scale=row_scale,
                                    main_grad=main_grad, rng=self.rng)

    def _dgrad(self, dy: Tensor, weight: Tensor, splits: Tensor | Sequence[int]) -> Any:
        if self.recipe == "bf16":
            return below.grouped_linear_dgrad(dy, weight, splits)
        return below.quantized_linear_dgrad(dy, weight, splits, self.rng, self.recipe)

    def main_grads(self) -> list[Tensor]:
        """The buffers that the weight's gradient is added to, as experts_of("weight") has weights; an
        error that says what is wrong."""
        return [_main_grad_of(weight) for weight in self.experts_of("weight")]

    @property
    def pending_dw(self) -> int:
        """Weight gradients that wait for backward_dw()."""
        return len(self._jobs)

    def backward_dw(self) -> None:
        """Computes the weight gradient of the oldest backward that is pending, and adds it. Without
        delay_wgrad nothing is to be done."""
        if not self.delay_wgrad:
            return
        if not self._jobs:
            raise errors.InvalidArgument(f"backward_dw: no weight gradient is pending in {self}")
        self._run_job(*self._jobs.popleft())

    def on_grad_ready(self, fn: Callable[..., Any]) -> torch.utils.hooks.RemovableHandle:
        """fn(weight) runs after each contribution to the weight's gradient; of indexed weights fn takes
        their list. Returns a handle."""
        handle = torch.utils.hooks.RemovableHandle(self._ready_hooks)
        self._ready_hooks[handle.id] = fn
        return handle

    def _hooked(self) -> Any:
        return (self._forward_pre_hooks or self._forward_hooks or self._backward_hooks
                or self._backward_pre_hooks)

    def _main_grad(self) -> Any:
        if (self.grad_target != "main_grad" or self.forms["weight"] == "indexed"
                or not self.weight.requires_grad):
            return None
        # A view with a version of its own: other contributions may come before this one's backward.
        return self.main_grads()[0].data

    def _managed(self) -> Any:
        managed = self.delay_wgrad or bool(self._ready_hooks)
        if not managed and self.grad_target == "grad":
            return False
        if not managed:
            weight = self.experts_of("weight")[0]
            managed = (self.forms["weight"] == "indexed" or hasattr(weight, "grad_added_to_main_grad")
                       or getattr(weight, "overwrite_main_grad", False) is not False)
        if managed and torch.compiler.is_compiling():
            raise errors.Unsupported("GroupedLinear: delay_wgrad, on_grad_ready, overwrite_main_grad, "
                                     "grad_added_to_main_grad and main_grad of indexed weights do not "
                                     "run under torch.compile")
        return managed and torch.is_grad_enabled()

    def _add_job(self, job: Any, overwrite: bool = False) -> None:
        if self.delay_wgrad:
            self._jobs.append((job, overwrite))
        else:
            self._run_job(job, overwrite)

    def _run_job(self, job: Any, overwrite: bool) -> None:
        weights = self.experts_of("weight")
        grouped = self.forms["weight"] == "grouped"
        with torch.no_grad(), errors.translated():
            if self.grad_target == "main_grad":
                self._accumulate(job, overwrite)
                for weight in weights:
                    if hasattr(weight, "grad_added_to_main_grad"):
                        weight.grad_added_to_main_grad = True
            else:
                if self.recipe == "bf16":
                    dw = below.grouped_linear_wgrad(*job)
                else:
                    dw = below.quantized_linear_wgrad(*job[:3], self.rng, self.recipe)
                for weight, part in zip(weights, [dw] if grouped else dw):
                    if weight.requires_grad:
                        weight.grad = part if weight.grad is None else weight.grad.add_(part)
        for fn in tuple(self._ready_hooks.values()):
            fn(weights[0] if grouped else weights)

    def _accumulate(self, job: Any, overwrite: bool) -> None:
        buffers = self.main_grads()
        factor = overwrite or getattr(self.experts_of("weight")[0], "overwrite_main_grad", False)
        if factor is True:
            factor = buffers[0].new_zeros(1, dtype=torch.float32)
        elif factor is False:
            factor = None
        def acc(*arguments: Any) -> None:
            if self.recipe == "bf16":
                below.grouped_linear_wgrad_acc(*arguments)
            else:
                dy, x, splits, _, _, into, beta = arguments
                below.quantized_linear_wgrad_acc(dy, x, splits, into, beta, self.rng, self.recipe)

        target = buffers[0] if self.forms["weight"] == "grouped" else _experts.over(buffers)
        if target is not None:
            acc(*job, target, factor)
            return
        # Buffers that lie apart go through one that does not.
        target = torch.stack(buffers)
        acc(*job, target, factor)
        torch._foreach_copy_(buffers, list(target))


def _main_grad_of(weight: Tensor) -> Tensor:
    get = getattr(weight, "get_main_grad", None)
    buffer = get() if get else getattr(weight, "main_grad", None)
    if buffer is None:
        raise errors.InvalidArgument("GroupedLinear: grad is 'main_grad', but the weight has "
                                     "neither main_grad nor get_main_grad()")
    if buffer.shape != weight.shape or (buffer.numel() and buffer.stride(-1) != 1):
        raise errors.InvalidArgument(
            f"GroupedLinear: main_grad has shape {list(buffer.shape)} and strides "
            f"{list(buffer.stride())}; expected {list(weight.shape)} with contiguous columns")
    return buffer


class GroupedMLP(torch.nn.Module):
    """The experts: fc1 [E, 2F, D] (gate rows, then up rows), activation, fc2 [E, D, F].

    The router's probability (row_scale) is applied between the linears, also to fc2's bias. fc1 and
    fc2 are GroupedLinears that hold parameters, main_grad and pending weight gradients.

    path: "fused" (one operator) or "unfused" (fc1, activation, fc2, with the same bits), what runs; a
    recipe (GroupedLinear) is unfused.
    Fused, the children's forward pre-hooks run too (fc2's with None for its input), but may return
    nothing; hooks that would see an output are an error.
    """

    fc1: GroupedLinear
    fc2: GroupedLinear

    def __init__(self, num_groups: int, d_model: int, d_ffn: int, *, activation: Activation = Swiglu(),
                 bias: bool = False, glu_interleave: int = 0, path: str | None = None, **options: Any) -> None:
        hidden = 2 * d_ffn if activation.gated else d_ffn
        self._assemble(GroupedLinear(num_groups, d_model, hidden, bias=bias, **options),
                       GroupedLinear(num_groups, d_ffn, d_model, bias=bias, **options),
                       activation, glu_interleave, path)

    @classmethod
    def of(cls, fc1: GroupedLinear, fc2: GroupedLinear, activation: Activation, glu_interleave: int = 0,
           path: str | None = None) -> "GroupedMLP":
        """The module over linears that are there."""
        module = cls.__new__(cls)
        module._assemble(fc1, fc2, activation, glu_interleave, path)
        return module

    def _assemble(self, fc1: GroupedLinear, fc2: GroupedLinear, activation: Activation, glu_interleave: int,
                  path: str | None) -> None:
        super().__init__()
        quantized = fc1.recipe != "bf16" or fc2.recipe != "bf16"
        path = path or ("unfused" if quantized else "fused")
        _check_choice("GroupedMLP: path", path, ("fused", "unfused"))
        if quantized and path == "fused":
            raise errors.Unsupported(f"GroupedMLP: path is 'fused', but recipe is {fc1.recipe!r}; "
                                     "quantized linears are 'unfused'")
        self.num_groups, self.d_model, self.d_ffn = fc1.num_groups, fc1.in_features, fc2.in_features
        self.activation, self.glu_interleave, self.path = activation, glu_interleave, path
        self.fc1, self.fc2 = fc1, fc2

    def extra_repr(self) -> str:
        return f"activation={self.activation}, path={self.path!r}"

    def _constants(self) -> Any:
        a = self.activation
        return a.kind, a.alpha, a.limit, a.offset, self.glu_interleave

    def forward(self, x: Tensor, splits: Tensor | Sequence[int], *, row_scale: Tensor | None = None,
                source: Tensor | None = None, row_tk: Tensor | None = None) -> Tensor:
        """x [..., D] in the order of groups; or x [T, D] with the maps of ops.expert_rows, whose
        result is the sum per token."""
        if self.path == "unfused":
            return self._unfused(x, splits, row_scale, source, row_tk)
        modules: dict[str, Any] = self._modules  # sooner than by attribute
        fc1, fc2 = modules["fc1"], modules["fc2"]
        if fc1._hooked() or fc2._hooked():
            _run_pre_hooks(fc1, (x, splits))
            _run_pre_hooks(fc2, (None, splits))
        w1, w2, b1, b2 = fc1.stacked("weight"), fc2.stacked("weight"), fc1.stacked("bias"), fc2.stacked("bias")
        rows = _rows(x, w1, "GroupedMLP")
        splits = _splits(splits, rows)
        if fc1._managed() or fc2._managed():
            with errors.translated():
                y = _ManagedMlp.apply(  # type: ignore[no-untyped-call]
                    self, rows, w1, w2, splits, row_scale, source, row_tk, b1, b2)
        else:
            y = called.grouped_mlp(rows, w1, w2, splits, row_scale, source, row_tk, b1, b2,
                                   *self._constants(), fc1._main_grad(), fc2._main_grad())[0]
        return y.reshape(x.shape) if x.dim() != 2 and y.shape == rows.shape else y

    def _unfused(self, x: Tensor, splits: Tensor | Sequence[int], row_scale: Tensor | None,
                 source: Tensor | None, row_tk: Tensor | None) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        if source is not None:  # rows behind the last expert's read some row, and come out as zeros
            rows = rows[source.clamp(min=0).long()]
        h = self.fc1(rows, splits)
        kind, alpha, limit, offset, interleave = self._constants()
        a = ops.activation(h, splits=_splits(splits, h), row_scale=row_scale, kind=kind, alpha=alpha,
                           limit=limit, offset=offset, interleave=interleave)
        scale = None if self.fc2.experts_of("bias") is None else row_scale
        y = self.fc2(a, splits, row_scale=scale)
        if row_tk is None:
            return y.reshape(x.shape) if y.shape == rows.shape and source is None else y
        picked = y[row_tk.clamp(min=0).long()]
        return torch.where((row_tk >= 0).unsqueeze(-1), picked, picked.new_zeros(())).sum(1).reshape(x.shape)

    @property
    def pending_dw(self) -> int:
        return max(self.fc1.pending_dw, self.fc2.pending_dw)

    def backward_dw(self) -> None:
        """The weight gradients of the oldest backward that is pending: fc2's, then fc1's. Without
        delay_wgrad nothing is to be done."""
        if not (self.fc1.delay_wgrad or self.fc2.delay_wgrad):
            return
        if not self.pending_dw:
            raise errors.InvalidArgument(f"backward_dw: no weight gradient is pending in {self}")
        for linear in (self.fc2, self.fc1):
            if linear.pending_dw:
                linear.backward_dw()


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """The router's constants (moiety/moe/router.h).

    score: "softmax" or "sigmoid"; renormalize: weights of a token sum to `scale`; groups,
    group_top_k: only experts of the best groups are chosen; bias: a float32 buffer that is added to
    the scores only for the choice (update_router_bias moves it).
    """

    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    bias: bool = False


class MoEOutput(typing.NamedTuple):
    """What MoELayer returns; losses come without coefficient."""

    y: torch.Tensor  # like x
    aux_loss: torch.Tensor  # 1 when balanced: E * sum_e (share of e) * (mean probability of e)
    z_loss: torch.Tensor  # the mean of logsumexp(logits)^2
    counts: torch.Tensor  # int64 [E]: chosen pairs
    idx: torch.Tensor  # int32 [T, K], -1 where masked


class _Router(torch.nn.Module):
    bias: Tensor | None

    def __init__(self, num_experts: int, d_model: int, bias: bool, device: Any,
                 dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.register_buffer(
            "bias", torch.zeros(num_experts, device=device, dtype=torch.float32) if bias else None)


class _DenseMlp(torch.nn.Module):
    def __init__(self, d_model: int, d_ffn: int, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(d_model, 2 * d_ffn, bias=False, device=device, dtype=dtype)
        self.fc2 = torch.nn.Linear(d_ffn, d_model, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class MoELayer(torch.nn.Module):
    """Router, experts and their sum, with the trainer's names of parameters (router.weight,
    experts.fc1.weight, experts.fc2.weight, shared.fc1.weight ...).

    ep: expert parallelism over several ranks; only None in this version.
    """

    experts: GroupedMLP
    router: _Router

    def __init__(self, d_model: int, d_ffn: int, num_experts: int, top_k: int, *,
                 router: RouterConfig = RouterConfig(), shared_d_ffn: int = 0, ep: None = None,
                 activation: Activation = Swiglu(), bias: bool = False, recipe: str = "bf16",
                 grad: str = "grad", delay_wgrad: bool = False, device: Any = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if ep is not None:
            raise errors.Unsupported(f"MoELayer: ep is {ep!r}; several ranks are not supported yet, "
                                     "only ep=None")
        if not 1 <= top_k <= num_experts:
            raise errors.InvalidArgument(f"MoELayer: top_k is {top_k}, expected 1 to {num_experts}, "
                                         "the number of experts")
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.config = router
        self.router = _Router(num_experts, d_model, router.bias, device, dtype)
        if not self.router.weight.is_meta:
            torch.nn.init.normal_(self.router.weight, std=0.02)
        self.experts = GroupedMLP(num_experts, d_model, d_ffn, activation=activation, bias=bias,
                                  recipe=recipe, grad=grad, delay_wgrad=delay_wgrad, device=device, dtype=dtype)
        self.shared = _DenseMlp(d_model, shared_d_ffn, device, dtype) if shared_d_ffn else None

    @classmethod
    def from_hf(cls, block: torch.nn.Module, **options: Any) -> "MoELayer":
        """The layer with the weights (copied) of a Qwen3-MoE or Mixtral block of transformers 4 or 5; options
        as of MoELayer. Its `y` is the block's result."""
        gate, w1, w2, top_k, renormalize = _blocks.weights_of(block)
        layer = cls(w2.shape[1], w2.shape[2], w2.shape[0], top_k,
                    **{"router": RouterConfig(renormalize=renormalize), "device": w1.device,
                       "dtype": w1.dtype, **options})
        with torch.no_grad():
            for to, value in ((layer.router.weight, gate), (layer.experts.fc1.weight, w1),
                              (layer.experts.fc2.weight, w2)):
                to.copy_(value)
        return layer

    def extra_repr(self) -> str:
        return f"{self.d_model}, experts={self.num_experts}, top_k={self.top_k}"

    def forward(self, x: Tensor, mask: Tensor | None = None, idx: Tensor | None = None) -> MoEOutput:
        """x [..., D]; mask [...]: False for tokens that are routed nowhere; idx [T, K] repeats a
        routing (MoEOutput.idx of another run): weights, losses and gradients are of these logits."""
        rows = _rows(x, self.experts.fc1.weight, "MoELayer")
        if mask is not None:
            mask = mask.reshape(-1).to(torch.bool)
        # The product is taken in float32, as the trainer's router does.
        logits = F.linear(rows.float(), self.router.weight.float())
        c = self.config
        weights, chosen, counts = ops.router(
            logits, self.top_k, bias=self.router.bias, mask=mask, given_idx=idx, score=c.score,
            renormalize=c.renormalize, scale=c.scale, groups=c.groups, group_top_k=c.group_top_k)
        splits, source, row_tk, slot_w = ops.expert_rows(chosen, self.num_experts, weights)
        y = self.experts(rows, splits, row_scale=slot_w, source=source, row_tk=row_tk)
        if self.shared is not None:
            y = y + self.shared(rows)
        aux_loss, z_loss = self._losses(logits, chosen, counts)
        return MoEOutput(y.reshape(x.shape), aux_loss, z_loss, counts, chosen)

    def _losses(self, logits: Tensor, chosen: Any, counts: Tensor) -> Any:
        """Means over the tokens that are routed."""
        live = (chosen[:, 0] >= 0).float().unsqueeze(1)
        tokens = live.sum().clamp(min=1)
        if self.config.score == "softmax":
            share = torch.softmax(logits, dim=-1)
        else:
            share = torch.sigmoid(logits)
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        load = counts.float() / (tokens * self.top_k)
        aux = self.num_experts * (load * (share * live).sum(0) / tokens).sum()
        z = (torch.logsumexp(logits, dim=-1, keepdim=True).square() * live).sum() / tokens
        return aux, z

    @torch.no_grad()
    def update_router_bias(self, counts: Tensor, rate: float) -> None:
        """Moves the bias of experts with fewer pairs than the mean up by `rate`, of others down
        (DeepSeek-V3); counts int64 [E], summed over the global batch."""
        if self.router.bias is None:
            raise errors.InvalidArgument("update_router_bias: the router has no bias; "
                                         "RouterConfig(bias=True) makes one")
        with errors.translated():
            below.router_update_bias(self.router.bias, counts, float(rate))

    def backward_dw(self) -> None:
        """See GroupedMLP.backward_dw."""
        self.experts.backward_dw()


def _rows(x: Tensor, weight: Tensor, module: str) -> Tensor:
    columns = x.size(-1) if x.dim() else 0
    if columns != weight.size(-1):
        raise errors.InvalidArgument(f"{module}: x has {columns} columns, the weight {list(weight.shape)} "
                                     f"expects {weight.size(-1)}")
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if torch.is_autocast_enabled("cuda" if rows.is_cuda else "cpu"):
        rows = rows.to(weight.dtype)
    return rows if rows.stride(-1) == 1 or columns == 1 else rows.contiguous()


def _splits(splits: Tensor | Sequence[int], rows: Tensor) -> Tensor:
    if isinstance(splits, torch.Tensor):
        return splits
    if splits is None:
        raise errors.InvalidArgument("splits is None, expected the groups' numbers of rows, a tensor [E] or a list")
    if not rows.is_cuda:
        return torch.tensor(splits, dtype=torch.int64, device=rows.device)
    if torch.cuda.is_current_stream_capturing():
        raise errors.InvalidArgument("splits is a list, which a captured graph would freeze: pass a "
                                     "tensor on the GPU")
    # From pinned memory the copy does not wait for the GPU.
    host = torch.tensor(splits, dtype=torch.int64, device="cpu").pin_memory()
    return host.to(rows.device, non_blocking=True)


def _run_pre_hooks(child: Any, args: Any) -> None:
    """The forward pre-hooks of a linear that a fused path stands for."""
    if child._forward_hooks or child._backward_hooks or child._backward_pre_hooks:
        raise errors.Unsupported(f"GroupedMLP: {child} has forward or backward hooks, which see nothing in "
                                 "the fused path; path='unfused' runs them")
    for key, hook in child._forward_pre_hooks.items():
        with_kwargs = key in child._forward_pre_hooks_with_kwargs
        if (hook(child, args, {}) if with_kwargs else hook(child, args)) is not None:
            raise errors.Unsupported(f"GroupedMLP: a forward pre-hook of {child} returned a value, which "
                                     "the fused path cannot take; path='unfused' does")
