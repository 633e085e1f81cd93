"""MoE blocks of transformers 4, whose experts are modules of their own: one operator for all of them.

Nothing of a model changes but a block's class, which becomes a subclass of what it was: parameters, their
names, optimizers, save_pretrained and what transformers records of a block (router logits) stay. The
experts' weights are laid into one storage for each layer, where the operator reads them.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from . import _experts, errors, ops

# The block's class -> names of an expert's linears: gate, up, down.
_BLOCKS = {"Qwen3MoeSparseMoeBlock": ("gate_proj", "up_proj", "down_proj"),
           "MixtralSparseMoeBlock": ("w1", "w3", "w2")}
_DTYPES = (torch.float32, torch.bfloat16)


def is_silu(function: Any) -> bool:
    return function is F.silu or type(function).__name__ in ("SiLU", "SiLUActivation")


class _Block:
    """The forward pass that a block gets, with the block's own router."""

    # Of the block's class, which stands behind this one.
    experts: Any
    gate: Any
    top_k: int
    training: bool
    _moiety_names: tuple[str, str, str]
    _moiety_strict: bool

    def _expert_linears(self) -> Any:
        """(gate 0, up 0, gate 1, ...), (down 0, ...)."""
        gate, up, down = self._moiety_names
        experts = [expert._modules for expert in self.experts]
        return [m[name] for m in experts for name in (gate, up)], [m[down] for m in experts]

    def _moiety_fault(self, linears: list[Any]) -> Any:
        """Why the operator cannot stand for these linears now, or None."""
        for linear in linears:
            if type(linear) is not torch.nn.Linear or linear.bias is not None:
                return f"an expert has a {type(linear).__name__}, not a Linear without bias"
            if (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
                    or linear._backward_pre_hooks or "forward" in linear.__dict__):
                return "an expert's linear has hooks, which would not run"
        weight = linears[0].weight
        if weight.dtype not in _DTYPES:
            return f"its weights are {weight.dtype}, not float32 or bfloat16"
        from .hf import _device_fault

        return _device_fault(weight.device.type, weight.device.index)

    def forward(self, hidden_states: Tensor) -> Any:
        first, second = self._expert_linears()
        fault = self._moiety_fault(first + second)
        if fault is not None:
            _report(type(self), fault, self._moiety_strict)
            return super().forward(hidden_states)  # type: ignore[misc]
        x = hidden_states
        jitter = getattr(self, "jitter_noise", 0)
        if self.training and jitter > 0:
            x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
        rows = x.reshape(-1, x.shape[-1])
        logits = self.gate(rows)
        weights, idx = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(rows.dtype).float()  # rounded as transformers does
        w1 = _experts.joined([linear.weight for linear in first])
        w2 = _experts.joined([linear.weight for linear in second])
        w1 = w1.view(len(second), 2 * w1.shape[1], w1.shape[2])
        splits, source, row_tk, slot_w = ops.expert_rows(idx, len(second), weights)
        y = ops.grouped_mlp(rows.to(w1.dtype), w1, w2, splits, row_scale=slot_w, source=source, row_tk=row_tk)
        return y.to(x.dtype).reshape(x.shape), logits

    def _lay_evenly(self) -> int:
        return sum(_experts.lay_evenly([linear.weight for linear in linears])
                   for linears in self._expert_linears()
                   if all(type(linear) is torch.nn.Linear for linear in linears))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._lay_evenly()
        return self

    def __setstate__(self, state: Any) -> None:  # a copy
        super().__setstate__(state)  # type: ignore[misc]
        self._lay_evenly()


_reported: set[tuple[Any, str]] = set()


def _report(kind: type, fault: str, strict: bool) -> None:
    text = f"{kind.__name__} runs with transformers' own loop over experts: {fault}"
    if strict:
        raise errors.Unsupported(f"moiety.nn.replace_moe(strict=True): {text}")
    if (kind, fault) not in _reported:
        _reported.add((kind, fault))
        warnings.warn(f"moiety.nn.replace_moe: {text}", stacklevel=3)


@functools.cache
def _class_of(kind: Any, strict: bool) -> Any:
    names = _BLOCKS[kind.__name__]
    return type(kind.__name__, (_Block, kind), {"_moiety_names": names, "_moiety_strict": strict,
                                                "__module__": kind.__module__})


def replace_moe(model: torch.nn.Module, *, strict: bool = False) -> list[str]:
    """Gives the experts of a model of transformers 4 (Qwen3-MoE, Mixtral) to Moiety, in place, and returns
    the names of the blocks. For transformers 5 there is moiety.hf.register.

    Parameters, their names and the blocks' results (hidden states, router logits) stay. A block that the
    operator cannot run, also when that comes later (LoRA or hooks at an expert's linear, another dtype),
    runs as before, with one warning that says why; strict=True raises Unsupported instead.
    """
    found = [(name, m) for name, m in model.named_modules()
             if type(m).__name__ in _BLOCKS and not isinstance(m, _Block)]
    replaced = []
    for name, block in found:
        if not isinstance(getattr(block, "experts", None), torch.nn.ModuleList):
            raise errors.Unsupported(
                f"replace_moe: {name or type(block).__name__} keeps its experts in stacked parameters, as "
                "transformers 5 does: moiety.hf.register() and set_experts_implementation('moiety') run them")
        activations = {type(e.act_fn).__name__ for e in block.experts if not is_silu(e.act_fn)}
        if activations:
            _report(type(block), f"its activation is {', '.join(sorted(activations))}, not SiLU", strict)
            continue
        kind: Any = type(block)
        block.__class__ = _class_of(kind, strict)
        block._lay_evenly()
        replaced.append(name)
    if not found and not any(isinstance(m, _Block) for m in model.modules()):
        raise errors.InvalidArgument(
            f"replace_moe: {type(model).__name__} has none of {', '.join(_BLOCKS)}")
    return replaced


def weights_of(block: Any) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    """(router [E, D], w1 [E, 2F, D], w2 [E, D, F], top_k, renormalize) of a Qwen3-MoE or Mixtral block of
    transformers 4 or 5."""
    kind = next((c.__name__ for c in type(block).__mro__ if c.__name__ in _BLOCKS), None)
    if kind is None:
        raise errors.InvalidArgument(f"MoELayer.from_hf: {type(block).__name__} is none of "
                                     f"{', '.join(_BLOCKS)}")
    router, experts = block.gate, block.experts
    if isinstance(experts, torch.nn.ModuleList):
        act_fn = experts[0].act_fn
        gate, up, down = ([getattr(e, name).weight for e in experts] for name in _BLOCKS[kind])
        w1, w2 = torch.cat([torch.stack(gate), torch.stack(up)], 1), torch.stack(down)
        top_k, renormalize = block.top_k, getattr(block, "norm_topk_prob", True)
    else:
        act_fn, w1, w2 = experts.act_fn, experts.gate_up_proj, experts.down_proj
        top_k, renormalize = router.top_k, getattr(router, "norm_topk_prob", True)
    if not is_silu(act_fn):
        raise errors.Unsupported(f"MoELayer.from_hf: the experts' activation is {type(act_fn).__name__}, "
                                 "not SiLU")
    return router.weight, w1, w2, top_k, renormalize
