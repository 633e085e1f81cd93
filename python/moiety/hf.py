"""Transformers: `moiety.hf.register()` adds the experts implementation "moiety".

    import moiety.hf
    moiety.hf.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="moiety")
    # or, for a model that is there: model.set_experts_implementation("moiety")

Transformers 5 keeps the experts of a layer in stacked parameters, gate_up_proj and down_proj, which
are read in place, frozen or not. Which way a layer goes, `path(module)` says:

  "grouped_mlp"  FC1, SwiGLU, FC2 and the sum per token in one operator
  "linears"      grouped products, with the layer's own gate between them: other activations, clamps,
                 transposed weights (gpt-oss), a norm behind the experts
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from . import _blocks, _lib, errors, ops

_DTYPES = (torch.float32, torch.bfloat16)


def path(module: Any) -> tuple[str | None, str | None]:
    """("grouped_mlp" | "linears", None), or (None, why the layer cannot be run)."""
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    second = getattr(module, "down_proj", None)
    for weight in (first, second):
        if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
            return None, "its weights are not one tensor [E, ., .] for each projection"
        if weight.dtype not in _DTYPES:
            return None, f"its weights are {weight.dtype}, not float32 or bfloat16"
        fault = _device_fault(weight.device.type, weight.device.index)
        if fault:
            return None, f"its weights are on {weight.device}, and {fault}"
        if weight.stride(-1) != 1:
            return None, f"its weights have strides {tuple(weight.stride())}"
    fused = (module.has_gate and module.is_concatenated and not module.is_transposed
             and not _has_norm(module) and _is_swiglu(module))
    return ("grouped_mlp" if fused else "linears"), None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_fault(kind: str, index: int | None) -> str | None:
    """Why this build cannot compute on a device, or None."""
    return None if kind == "cpu" else _found_device_fault(kind, index)


@functools.cache
def _found_device_fault(kind: str, index: int | None) -> str | None:
    if kind != "cuda":
        return "Moiety computes on CPUs and on GPUs of NVIDIA"
    if not _lib.call_json("moiety_build_info")["cuda"]:
        return "this build has no CUDA"
    capability = torch.cuda.get_device_capability(index)
    if capability < (9, 0):
        return f"its capability is {capability[0]}.{capability[1]}, less than 9.0"
    return None


def _has_norm(module: Any) -> Any:
    return getattr(module, "has_post_expert_norm", False)  # 5.17 does not have it


def _is_swiglu(module: Any) -> Any:
    from transformers.integrations import moe

    if getattr(type(module), "_apply_gate", None) is not moe._default_apply_gate:
        return False
    return _blocks.is_silu(getattr(module, "act_fn", None))


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of one layer: hidden [T, D], idx [T, K] (idx >= E is masked), weights [T, K]."""
    which, why = path(module)
    if which is None:
        raise errors.Unsupported(f"moiety.hf: {type(module).__name__}: {why}")
    second = module.down_proj
    x = hidden_states.to(second.dtype)
    weights = top_k_weights.float().contiguous()
    splits, source, row_tk, slot_w = ops.expert_rows(top_k_index.contiguous(), second.shape[0], weights)
    if which == "grouped_mlp":
        b1, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
        y = ops.grouped_mlp(x, module.gate_up_proj, second, splits, row_scale=slot_w, source=source,
                            row_tk=row_tk, b1=b1, b2=b2)
    else:
        y = _linears(module, x, splits, source, row_tk, slot_w)
    return y.to(hidden_states.dtype)


def _linears(module: Any, x: Tensor, splits: Tensor, source: Tensor, row_tk: Tensor, slot_w: Tensor) -> Any:
    first = module.gate_up_proj if module.has_gate else module.up_proj
    # Rows behind the last expert's, which masked pairs leave, read some row and come out as zeros.
    rows = x[source.clamp(min=0).long()]
    h = _linear(module, rows, first, "gate_up_proj_bias" if module.has_gate else "up_proj_bias", splits)
    a = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _linear(module, a.contiguous(), module.down_proj, "down_proj_bias", splits)
    if _has_norm(module):
        y = module.post_expert_norm(y)
    y = y * slot_w.unsqueeze(-1)
    live = (row_tk >= 0).unsqueeze(-1)
    picked = y[row_tk.clamp(min=0).long()]
    return torch.where(live, picked, picked.new_zeros(())).sum(1)


def _linear(module: Any, x: Tensor, w: Tensor, bias_name: Any, splits: Tensor) -> Any:
    y = ops.grouped_linear_t(x, w, splits) if module.is_transposed else ops.grouped_linear(x, w, splits)
    if not module.has_bias:
        return y
    bias = getattr(module, bias_name)
    ends = splits.cumsum(0)
    row = torch.arange(x.shape[0], device=x.device)
    return y + bias[torch.searchsorted(ends, row, right=True).clamp(max=bias.shape[0] - 1)]


def register(name: str = "moiety", *, ep: None = None, strict: bool = False) -> None:
    """Adds the implementation `name` to transformers (5 or newer). Calling it again is legal.

    A layer that cannot be run goes to transformers' "grouped_mm", with one warning that names its
    class and the reason; strict=True raises Unsupported instead. ep: only None in this version.
    """
    if ep is not None:
        raise errors.Unsupported(f"moiety.hf.register: ep is {ep!r}; several ranks are not supported "
                                 "yet, only ep=None")
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError("moiety.hf.register needs transformers 5 or newer, with its experts "
                          "interface: pip install 'transformers>=5'; in transformers 4 "
                          f"moiety.nn.replace_moe(model) replaces a model's blocks ({error})") from None
    warned = set()

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        why = None if strict else path(module)[1]
        if why is None:
            return experts_forward(module, hidden_states, top_k_index, top_k_weights)
        if not torch.compiler.is_compiling() and (type(module), why) not in warned:
            warned.add((type(module), why))
            warnings.warn(f"moiety.hf: {type(module).__name__} runs with transformers' grouped_mm: "
                          f"{why}", stacklevel=2)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
