"""GroupedLinear with the arguments of transformer_engine.pytorch.GroupedLinear."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import errors, nn


def form(single: bool) -> Any:
    return "grouped" if single else "indexed"


def refuse(where: Any, given: Any, ours: Any) -> None:
    """Raises for every argument that is not what it must be. given: {name: (value, what is accepted)}."""
    for name, (value, accepted) in given.items():
        if not any(value is a or value == a for a in accepted):
            raise errors.Unsupported(f"{where}: {name} is {value!r}; {ours[name]}")


_ONE_RANK = "several ranks are not supported yet, so each holds whole experts"
_OURS = {"sequence_parallel": _ONE_RANK, "tp_group": _ONE_RANK, "tp_size": _ONE_RANK,
         "get_rng_state_tracker": "init_method draws from torch's generator",
         "rng_tracker_name": "init_method draws from torch's generator",
         "ub_overlap_rs": _ONE_RANK, "ub_overlap_ag": _ONE_RANK}


class GroupedLinear(nn.GroupedLinear):
    """One linear for each of `num_gemms` groups of rows.

    Parameters are weight0 ... [out_features, in_features] and bias0 ..., or with single_grouped_weight
    and single_grouped_bias one `weight` [num_gemms, out_features, in_features] and one `bias`. A
    state_dict of either form loads into either. fuse_wgrad_accumulation adds gradients of weights to
    `main_grad`; delay_wgrad_compute leaves them to backward_dw(). parallel_mode says nothing on one
    rank. device: torch's default one, unless given.
    """

    def __init__(self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
                 get_rng_state_tracker: Any = None, rng_tracker_name: Any = None,
                 init_method: Callable[[Tensor], Any] | None = None, bias: bool = True,
                 return_bias: bool = False, params_dtype: torch.dtype | None = None, parallel_mode: Any = None,
                 device: Any = None, ub_overlap_rs: bool = False, ub_overlap_ag: bool = False,
                 ub_name: Any = None, delay_wgrad_compute: bool = False, save_original_input: bool = False,
                 name: str | None = None, *, single_grouped_weight: bool = False,
                 single_grouped_bias: bool = False) -> None:
        refuse("moiety.te.GroupedLinear", {
            "sequence_parallel": (sequence_parallel, (False,)), "tp_group": (tp_group, (None,)),
            "tp_size": (tp_size, (1,)), "get_rng_state_tracker": (get_rng_state_tracker, (None,)),
            "rng_tracker_name": (rng_tracker_name, (None,)), "ub_overlap_rs": (ub_overlap_rs, (False,)),
            "ub_overlap_ag": (ub_overlap_ag, (False,))}, _OURS)
        self._init_method = init_method
        super().__init__(num_gemms, in_features, out_features, bias=bias,
                         params=form(single_grouped_weight), bias_params=form(single_grouped_bias),
                         device=device, dtype=params_dtype,
                         grad="main_grad" if fuse_wgrad_accumulation else "grad",
                         delay_wgrad=delay_wgrad_compute)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.name = name

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """init_method(weight) of each expert, by default normal with a deviation of 0.023; biases 0."""
        for stack in self.experts_of("weight"):
            for weight in stack if self.forms["weight"] == "grouped" else [stack]:
                if weight.is_meta:
                    continue
                if self._init_method is None:
                    torch.nn.init.normal_(weight, std=0.023)
                else:
                    self._init_method(weight)
        for bias in self.experts_of("bias") or ():
            torch.nn.init.zeros_(bias)

    def forward(self, inp: Tensor, m_splits: Tensor | Sequence[int],  # type: ignore[override]
                is_first_microbatch: bool | None = None) -> Any:
        """[..., out_features] of inp [..., in_features]; with return_bias also the biases, which are
        then not added. m_splits: rows of each group, a tensor on inp's device that the host does not
        read, or a list. is_first_microbatch=True: this backward overwrites main_grad."""
        overwrite = bool(is_first_microbatch) and self.fuse_wgrad_accumulation
        if not self.return_bias:
            return self._forward(inp, m_splits, self.stacked("bias"), None, overwrite)
        y = self._forward(inp, m_splits, None, None, overwrite)
        bias = self.stacked("bias")
        return y, [] if bias is None else list(bias)

    def need_backward_dw(self) -> Any:
        """Whether backward leaves gradients of weights to backward_dw()."""
        return self.delay_wgrad

    def register_wgrad_accumulation_and_reduce_hooks(self,
                                                     wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> Any:
        """The hook, without arguments, runs after each contribution to the weights' gradients."""
        return self.on_grad_ready(lambda _: wgrad_accumulation_and_reduce_hook())
