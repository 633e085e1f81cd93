"""Fake kernels, gradients and refusals of torch.ops.moiety, one group of functions an operator.

Rules: tensors only through save_for_backward; needs_input_grad decides what is saved and computed;
backward formulas consist of moiety operators, whose own gradients raise.
"""

import types
from typing import Any

import torch
from torch import Tensor

from . import errors



# Every call comes by these.
_any_requires_grad: Any = torch._C._any_requires_grad
_grad_enabled = torch.is_grad_enabled
_transformed = torch._C._are_functorch_transforms_active
_watched = torch._C._len_torch_dispatch_stack  # by modes, which are to see torch.ops.moiety


def _direct(name: str) -> Any:
    """The operator of torch.ops.moiety_below, without the function of Python that is its __call__."""
    return getattr(torch.ops.moiety_below, name).default._op


class _Below:
    """torch.ops.moiety without autograd's share of a call, where no gradient is asked for. (Operators that
    write into an argument keep theirs, which counts the argument's versions.)"""

    def __getattr__(self, name: str) -> Any:
        operator, direct = getattr(torch.ops.moiety, name).default, _direct(name)

        def call(*args: Any) -> Any:
            if _grad_enabled() or torch.compiler.is_compiling() or _watched():
                return operator(*args)
            return direct(*args)

        setattr(self, name, operator if name in _WRITERS else call)
        return getattr(self, name)


below = _Below()


def _require(condition: Any, operator: Any, text: str) -> None:
    if not condition:
        raise errors.InvalidArgument(f"moiety::{operator}: {text}")


def _shape(x: Tensor) -> Any:
    return list(x.shape)


def _contiguous(grad: Tensor) -> Tensor:
    """Gradients from outside may have any strides; this is the only implicit copy."""
    return grad.contiguous()


# ---- grouped_linear


def _linear_fake(x: Tensor, w: Tensor, splits: Tensor, bias: Tensor | None, row_scale: Tensor | None,
                 main_grad: Tensor | None) -> Any:
    _require(x.dim() == 2 and w.dim() == 3 and splits.dim() == 1, "grouped_linear",
             f"x is {_shape(x)}, w {_shape(w)}, splits {_shape(splits)}, expected [R, C], "
             "[E, N, C], [E]")
    _require(x.shape[1] == w.shape[2], "grouped_linear",
             f"x has {x.shape[1]} columns, w {_shape(w)} expects {w.shape[2]}")
    _require(x.dtype == w.dtype, "grouped_linear", f"x is {x.dtype}, w is {w.dtype}")
    return x.new_empty(x.shape[0], w.shape[1])


def _linear_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, splits, bias, row_scale, main_grad = inputs
    need_x, need_w, _, need_bias, need_scale, *_ = ctx.needs_input_grad
    need_bias = need_bias or need_scale
    ctx.save_for_backward(x if need_w else None, w if need_x else None, splits,
                          bias if need_bias else None, row_scale if need_bias else None, main_grad)


def _linear_backward(ctx: Any, dy: Tensor) -> Any:
    x, w, splits, bias, row_scale, main_grad = ctx.saved_tensors
    dx = dw = dbias = dscale = None
    dy = _contiguous(dy)
    if w is not None:
        dx = below.grouped_linear_dgrad(dy, w, splits)
    if x is not None:
        dw = _weight_gradient(dy, x, splits, None, None, main_grad)
    if bias is not None:
        dbias, dscale = below.grouped_linear_bias_grad(dy, splits, bias, row_scale)
        if row_scale is None:
            dscale = None
    needs = ctx.needs_input_grad
    return dx, dw, None, dbias if needs[3] else None, dscale if needs[4] else None, None


def _linear_t_fake(x: Tensor, w: Tensor, splits: Tensor) -> Any:
    _require(x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[1], "grouped_linear_t",
             f"x is {_shape(x)}, w {_shape(w)}, expected [R, C], [E, C, N]")
    _require(x.dtype == w.dtype, "grouped_linear_t", f"x is {x.dtype}, w is {w.dtype}")
    return x.new_empty(x.shape[0], w.shape[2])


def _linear_t_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, splits = inputs
    need_x, need_w, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if need_w else None, w if need_x else None, splits)


def _linear_t_backward(ctx: Any, dy: Tensor) -> Any:
    x, w, splits = ctx.saved_tensors
    dx = dw = None
    dy = _contiguous(dy)
    if w is not None:
        dx = below.grouped_linear(dy, w, splits, None, None, None)
    if x is not None:
        dw = below.grouped_linear_wgrad(x, dy, splits, None, None)
    return dx, dw, None


def _wgrad_fake(dy: Tensor, x: Tensor, splits: Tensor, dy_source: Tensor | None,
                x_source: Tensor | None) -> Any:
    return x.new_empty(splits.shape[0], dy.shape[1], x.shape[1])


def _bias_grad_fake(dy: Tensor, splits: Tensor, bias: Tensor, row_scale: Tensor | None) -> Any:
    scale = dy.new_empty(0 if row_scale is None else dy.shape[0], dtype=torch.float32)
    return torch.empty_like(bias, memory_format=torch.contiguous_format), scale


# ---- grouped_mlp


def _mlp_fake(x: Tensor, w1: Tensor, w2: Tensor, splits: Tensor, row_scale: Tensor | None,
              source: Tensor | None, row_tk: Tensor | None, b1: Tensor | None, b2: Tensor | None, kind: str,
              alpha: float, limit: float, offset: float, interleave: int, main_grad1: Tensor | None,
              main_grad2: Tensor | None) -> Any:
    _require(x.dim() == 2 and w1.dim() == 3 and w2.dim() == 3, "grouped_mlp",
             f"x is {_shape(x)}, w1 {_shape(w1)}, w2 {_shape(w2)}, expected [T, D], [E, H, D], "
             "[E, D, F]")
    _require(x.shape[1] == w1.shape[2] and x.shape[1] == w2.shape[1], "grouped_mlp",
             f"x has {x.shape[1]} columns, w1 is {_shape(w1)}, w2 {_shape(w2)}")
    _require(x.dtype == w1.dtype == w2.dtype, "grouped_mlp",
             f"x is {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}")
    rows = x.shape[0] if source is None else source.shape[0]
    results = rows if row_tk is None else x.shape[0]
    return x.new_empty(results, x.shape[1]), x.new_empty(rows, w1.shape[1])


def _mlp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    h = output[1]
    ctx.activation = inputs[9:14]
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    # Nobody's gradient is wanted that would need it: not even h is kept. The values of x serve w1's alone.
    needs = ctx.needs_input_grad
    if any(needs):
        ctx.save_for_backward(inputs[0] if needs[1] else None, *inputs[1:9], h, *inputs[14:])
    else:
        ctx.save_for_backward(*[None] * 12)


def _mlp_backward(ctx: Any, dy: Tensor, _dh: Any) -> Any:
    (x, w1, w2, splits, row_scale, source, row_tk, b1, b2, h, main_grad1,
     main_grad2) = ctx.saved_tensors
    # h is not needed once dh is there: unless the graph is retained its memory goes to the gradients.
    ctx.maybe_clear_saved_tensors()
    if dy is None:
        return (None,) * 16
    need_x, need_w1, need_w2, _, need_scale, _, _, need_b1, need_b2, *_ = ctx.needs_input_grad
    dy = _contiguous(dy)
    # Of x only the shape is read, which is that of dy.
    dx, dscale, db1, db2, dh, a = below.grouped_mlp_backward(
        dy, h, dy if x is None else x, w1, w2, splits, row_scale, source, row_tk, b1, b2, *ctx.activation,
        need_x)
    del h
    dw1 = dw2 = None
    if need_w2:
        dw2 = _weight_gradient(dy, a, splits, source, None, main_grad2)
    del a  # its memory goes to the gradient that comes
    if need_w1:
        dw1 = _weight_gradient(dh, x, splits, None, source, main_grad1)
    return (dx if need_x else None, dw1, dw2, None, dscale if need_scale else None, None, None,
            db1 if need_b1 else None, db2 if need_b2 else None, *[None] * 7)


def _weight_gradient(dy: Tensor, x: Tensor, splits: Tensor, dy_source: Tensor | None, x_source: Tensor | None,
                     main_grad: Tensor | None) -> Any:
    """The gradient, or None if it was added to main_grad."""
    if main_grad is None:
        return below.grouped_linear_wgrad(dy, x, splits, dy_source, x_source)
    below.grouped_linear_wgrad_acc(dy, x, splits, dy_source, x_source, main_grad, None)
    return None


def _mlp_backward_fake(dy: Tensor, h: Tensor, x: Tensor, w1: Tensor, w2: Tensor, splits: Tensor,
                       row_scale: Tensor | None, source: Tensor | None, row_tk: Tensor | None,
                       b1: Tensor | None, b2: Tensor | None, kind: str, alpha: float, limit: float,
                       offset: float, interleave: int, need_dx: Any) -> Any:
    rows = h.shape[0]
    return (torch.empty_like(dy) if need_dx else x.new_empty(0),
            x.new_empty(0 if row_scale is None else rows, dtype=torch.float32),
            x.new_empty(0) if b1 is None else x.new_empty(w1.shape[:2]),
            x.new_empty(0) if b2 is None else x.new_empty(w2.shape[:2]),
            x.new_empty(rows, h.shape[1]), x.new_empty(rows, w2.shape[2]))


# ---- quantized_linear


def _quantized_fake(x: Tensor, w: Tensor, splits: Tensor, bias: Tensor | None, row_scale: Tensor | None,
                    main_grad: Tensor | None, rng: Tensor | None, recipe: str) -> Any:
    _require(x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[2], "quantized_linear",
             f"x is {_shape(x)}, w {_shape(w)}, expected [R, C], [E, N, C]")
    return x.new_empty(x.shape[0], w.shape[1])


def _quantized_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, rng, ctx.recipe = inputs
    x, w, splits, bias, row_scale, main_grad = tensors
    need_x, need_w, _, need_bias, need_scale, *_ = ctx.needs_input_grad
    need_bias = need_bias or need_scale
    ctx.save_for_backward(x if need_w else None, w if need_x else None, splits,
                          bias if need_bias else None, row_scale if need_bias else None, main_grad, rng)


def _quantized_backward(ctx: Any, dy: Tensor) -> Any:
    x, w, splits, bias, row_scale, main_grad, rng = ctx.saved_tensors
    dx = dw = dbias = dscale = None
    dy = _contiguous(dy)
    if w is not None:
        dx = below.quantized_linear_dgrad(dy, w, splits, rng, ctx.recipe)
    if x is not None and main_grad is None:
        dw = below.quantized_linear_wgrad(dy, x, splits, rng, ctx.recipe)
    elif x is not None:
        below.quantized_linear_wgrad_acc(dy, x, splits, main_grad, None, rng, ctx.recipe)
    if bias is not None:
        dbias, dscale = below.grouped_linear_bias_grad(dy, splits, bias, row_scale)
    needs = ctx.needs_input_grad
    return (dx, dw, None, dbias if needs[3] else None,
            dscale if needs[4] and row_scale is not None else None, None, None, None)


# ---- activation


def _activation_fake(h: Tensor, splits: Tensor, row_scale: Tensor | None, kind: str, alpha: float, limit: float,
                     offset: float, interleave: int) -> Any:
    _require(h.dim() == 2, "activation", f"h is {_shape(h)}, expected [R, H]")
    return h.new_empty(h.shape[0], h.shape[1] // 2 if kind == "glu" else h.shape[1])


def _activation_setup(ctx: Any, inputs: Any, output: Any) -> None:
    h, splits, row_scale, *ctx.activation = inputs
    ctx.save_for_backward(*((h, splits, row_scale) if any(ctx.needs_input_grad) else (None,) * 3))


def _activation_backward(ctx: Any, da: Tensor) -> Any:
    need_h, _, need_scale, *_ = ctx.needs_input_grad
    dh, dscale = below.activation_backward(_contiguous(da), *ctx.saved_tensors, *ctx.activation)
    return (dh if need_h else None, None, dscale if need_scale else None, *[None] * 5)


def _activation_backward_fake(da: Tensor, h: Tensor, splits: Tensor, row_scale: Tensor | None,
                              *activation: Any) -> Any:
    rows = 0 if row_scale is None else h.shape[0]
    return h.new_empty(h.shape), h.new_empty(rows, dtype=torch.float32)


# ---- routing


def _router_fake(logits: Tensor, bias: Tensor | None, mask: Tensor | None, given_idx: Tensor | None, top_k: int,
                 score: str, renormalize: Any, scale: Tensor, groups: int, group_top_k: int) -> Any:
    _require(logits.dim() == 2 and logits.dtype == torch.float32, "router",
             f"logits is {logits.dtype}{_shape(logits)}, expected float32 [T, E]")
    tokens, experts = logits.shape
    return (logits.new_empty(tokens, top_k), logits.new_empty(tokens, top_k, dtype=torch.int32),
            logits.new_empty(experts, dtype=torch.int64))


def _router_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.constants = inputs[5:8]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(inputs[0], output[1])


def _router_backward(ctx: Any, dweight: Any, _didx: Any, _dcounts: Any) -> Any:
    logits, idx = ctx.saved_tensors
    dlogits = below.router_backward(logits, idx, _contiguous(dweight), *ctx.constants)
    return dlogits, *[None] * 9


def _expert_rows_fake(idx: Tensor, w: Tensor, num_experts: int) -> Any:
    tokens, top_k = idx.shape
    rows = tokens * top_k
    return (idx.new_empty(num_experts, dtype=torch.int64), idx.new_empty(rows, dtype=torch.int32),
            idx.new_empty(tokens, top_k, dtype=torch.int32),
            idx.new_empty(0 if w is None else rows, dtype=torch.float32))


def _expert_rows_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(*output[:3])
    ctx.save_for_backward(output[2])


def _expert_rows_backward(ctx: Any, _splits: Any, _source: Any, _row_tk: Any, dslot_w: Any) -> Any:
    row_tk, = ctx.saved_tensors
    if dslot_w is None or dslot_w.numel() == 0:
        return None, None, None
    picked = dslot_w[row_tk.clamp(min=0).long()]
    return None, torch.where(row_tk >= 0, picked, picked.new_zeros(())), None


# ---- formats


def _blocks(n: Any, size: int) -> Any:
    return (n + size - 1) // size


# The elements of X that share a scale, by the core's names.
_BLOCKS = {"fp8_block_1x128": (1, 128), "fp8_block_128x128": (128, 128), "mxfp8": (1, 32),
           "mxfp8_tile32": (32, 32), "nvfp4": (1, 16), "nvfp4_tile16": (16, 16)}


def _quantize_fake(x: Tensor, rng: Tensor | None, splits: Tensor, amax: Tensor | None, format: str,
                   element: str, pow2: bool, row_scaled: bool, rht: bool, row: Any, col: Any,
                   tensor_id: int) -> Any:
    """quantized_sizes of formats/quantized.h."""
    _require(x.dim() == 2, "quantize", f"x is {_shape(x)}, expected [M, K]")
    rows, cols = x.shape
    high, wide = _BLOCKS.get(format, (0, 0))
    tile, shared = high > 1, format == "mxfp8_tile32"
    scale = torch.float32 if format.startswith("fp8") else torch.uint8
    groups = () if splits is None else (splits.shape[0],)
    col_rows = rows
    if splits is not None:
        some = torch.sym_min(splits.shape[0], rows)
        col_rows = 128 * (some + (rows - some) // 128)

    def none() -> Any:
        return x.new_empty(0, dtype=torch.uint8)

    def codes(m: Any, k: Any) -> Any:
        return x.new_empty(m, 8 * _blocks(k, 16) if element == "e2m1" else k, dtype=torch.uint8)

    def scales(m: Any, k: Any) -> Any:
        return x.new_empty(_blocks(m, high), _blocks(k, wide), dtype=scale)

    def words(dtype: torch.dtype) -> Any:
        return x.new_empty((rows,) if row_scaled else (2, *groups), dtype=dtype)

    row_data = codes(rows, cols) if row or shared else none()
    row_scales = scales(rows, cols) if wide and (row or tile) else none()
    col_data, col_scales = none(), none()
    if col and format == "mxfp8":
        col_data = codes(col_rows, cols)
        col_scales = x.new_empty(_blocks(col_rows, 32), cols, dtype=scale)
    elif col:
        col_data = none() if shared else codes(cols, col_rows)
        col_scales = scales(cols, col_rows) if wide and not tile else none()
    has_amax = format == "fp8_tensor" or element == "e2m1"
    return (row_data, row_scales, col_data, col_scales, words(torch.float32) if has_amax else none(),
            words(torch.float32), x.new_empty(groups or (1,), dtype=torch.int32))


def _compute_amax_fake(x: Tensor, splits: Tensor, format: str, element: str, pow2: bool, row_scaled: bool,
                       rht: bool) -> Any:
    if row_scaled:
        return x.new_empty(x.shape[0], dtype=torch.float32)
    return x.new_empty((2,) if splits is None else (2, splits.shape[0]), dtype=torch.float32)


def _dequantize_fake(row_data: Any, row_scales: Any, col_data: Any, col_scales: Any, tensor_scale: Any,
                     format: str, element: str, pow2: bool, row_scaled: bool, rht: bool, rows: Tensor,
                     cols: Any, direction: str, undo_rht: Any, bfloat16: Any) -> Any:
    shape = (rows, cols)
    if direction == "col" and not format.startswith("mxfp8"):
        shape = (cols, 16 * _blocks(rows, 16) if rht and not undo_rht else rows)
    return tensor_scale.new_empty(shape, dtype=torch.bfloat16 if bfloat16 else torch.float32)


def _transpose_fake(row_data: Tensor, row_scales: Tensor, amax: Tensor, tensor_scale: Tensor, format: str,
                    element: str, pow2: bool, rows: int, cols: int) -> Any:
    shape = (0,) if format.startswith("mxfp8") else (
        cols, 8 * _blocks(rows, 16) if element == "e2m1" else rows)
    return row_data.new_empty(shape), torch.empty_like(amax), torch.empty_like(tensor_scale)


def _convert_scales_fake(scales: Tensor, tensor_scale: Any, format: str, element: str, pow2: bool, rht: bool,
                         rows: Tensor, cols: Any, direction: str, layout: str) -> Any:
    size = _BLOCKS[format][1]
    r, c = (rows, _blocks(cols, size)) if direction == "row" else (cols, _blocks(rows, size))
    if layout == "sm100_swizzled":
        return scales.new_empty(512 * _blocks(r, 128) * _blocks(c, 4), dtype=torch.uint8)
    if layout == "padded":
        return scales.new_empty(128 * _blocks(r, 128), 4 * _blocks(c, 4), dtype=torch.uint8)
    return scales.new_empty(c, 4 * _blocks(r, 4), dtype=torch.float32)


# ---- what is refused


def _refuse_gradient(name: str) -> Any:
    def backward(ctx: Any, *grads: Any) -> None:
        raise errors.Unsupported(f"moiety::{name} has no gradient of its own: second derivatives "
                                 "(create_graph=True) are not supported")
    return backward


def _refuse_vmap(name: str) -> Any:
    def vmap(info: Any, in_dims: Any, *args: Any) -> None:
        raise errors.Unsupported(f"moiety::{name} does not run under vmap: rows are batched by their "
                                 "first dimension already")
    return vmap


_FAKES: dict[str, Any] = {
    "grouped_linear": _linear_fake,
    "grouped_linear_t": _linear_t_fake,
    "grouped_linear_out": lambda x, w, splits, bias, row_scale, out: None,
    "grouped_linear_dgrad": lambda dy, w, splits: dy.new_empty(dy.shape[0], w.shape[2]),
    "grouped_linear_wgrad": _wgrad_fake,
    "grouped_linear_wgrad_acc": lambda *args: None,
    "grouped_linear_bias_grad": _bias_grad_fake,
    "grouped_mlp": _mlp_fake,
    "grouped_mlp_backward": _mlp_backward_fake,
    "quantized_linear": _quantized_fake,
    "quantized_linear_dgrad": lambda dy, w, *rest: dy.new_empty(dy.shape[0], w.shape[2]),
    "quantized_linear_wgrad": lambda dy, x, splits, *rest: x.new_empty(splits.shape[0], dy.shape[1],
                                                                       x.shape[1]),
    "quantized_linear_wgrad_acc": lambda *args: None,
    "activation": _activation_fake,
    "activation_backward": _activation_backward_fake,
    "router": _router_fake,
    "router_backward": lambda logits, *args: torch.empty_like(logits),
    "expert_rows": _expert_rows_fake,
    "router_update_bias": lambda bias, counts, rate: None,
    "quantize": _quantize_fake,
    "compute_amax": _compute_amax_fake,
    "dequantize": _dequantize_fake,
    "transpose_quantized": _transpose_fake,
    "convert_scales": _convert_scales_fake,
}
_GRADIENTS: dict[str, tuple[Any, Any]] = {
    "grouped_linear": (_linear_backward, _linear_setup),
    "grouped_linear_t": (_linear_t_backward, _linear_t_setup),
    "grouped_mlp": (_mlp_backward, _mlp_setup),
    "quantized_linear": (_quantized_backward, _quantized_setup),
    "activation": (_activation_backward, _activation_setup),
    "router": (_router_backward, _router_setup),
    "expert_rows": (_expert_rows_backward, _expert_rows_setup),
}
# Operators that write into an argument have no gradient, which torch itself refuses.
_WRITERS = {"grouped_linear_out", "grouped_linear_wgrad_acc", "quantized_linear_wgrad_acc",
            "router_update_bias"}


# The operators of torch.ops.moiety by their names, with errors by class.
called: Any = types.SimpleNamespace()


def _call_of(name: str) -> Any:
    """What stands in `called`. Eagerly it has the same gradient formula in an autograd.Function of ours:
    torch's way to a formula that is registered takes the host three times as long."""
    operator, direct = getattr(torch.ops.moiety, name), _direct(name)
    with_gradient = _with_gradient(name, direct) if name in _GRADIENTS else operator

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*args)
        try:
            if _transformed() or _watched():
                return operator(*args)
            if _grad_enabled() and _any_requires_grad(*args):
                return with_gradient(*args)
            return direct(*args)
        except RuntimeError as error:
            raise errors.translation(error) from None

    return call


def _with_gradient(name: str, direct: Any) -> Any:
    backward_of, setup = _GRADIENTS[name]

    def forward(ctx: Any, *args: Any) -> Any:
        output = direct(*args)
        setup(ctx, args, output)
        return output

    made: Any = type(f"moiety_{name}", (torch.autograd.Function,),
                {"forward": staticmethod(forward), "backward": staticmethod(backward_of)})
    # Past Function.apply, which looks for functorch's transforms, as _call_of has done, in every argument.
    return super(torch.autograd.Function, made).apply


def register() -> None:
    """Registers everything; once in a process."""
    for name, fake in _FAKES.items():
        qualified = f"moiety::{name}"
        torch.library.register_fake(qualified, fake)
        torch.library.register_fake(f"moiety_below::{name}", fake)
        if name in _GRADIENTS:
            backward, setup = _GRADIENTS[name]
            torch.library.register_autograd(qualified, backward, setup_context=setup)
        elif name not in _WRITERS:
            torch.library.register_autograd(qualified, _refuse_gradient(name))
        if name not in _WRITERS:
            torch.library.register_vmap(qualified, _refuse_vmap(name))
        setattr(called, name, _call_of(name))
