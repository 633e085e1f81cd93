"""Parameters of experts: one tensor of all ("grouped"), or one of each ("indexed") in one storage."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _lib, errors

FORMS = ("grouped", "indexed")


def over(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view [E, ...] of tensors that lie at even distances in one storage; None if they do not."""
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    distance = (tensors[1].data_ptr() - first.data_ptr()) // first.element_size() if len(tensors) > 1 \
        else first.numel()
    step = distance * first.element_size()
    for number, t in enumerate(tensors):
        if (t.shape != first.shape or t.dtype != first.dtype or not t.is_contiguous()
                or t.untyped_storage().data_ptr() != storage
                or t.data_ptr() != first.data_ptr() + number * step):
            return None
    if distance < first.numel():
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (distance, *first.stride()))


class _Joined(torch.autograd.Function):
    """The view of `over`; its gradient goes to the experts' parameters."""

    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*parameters)  # torch then notices one that changes before backward
        return over(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        parameters = ctx.saved_tensors
        return (None,) * len(parameters) if grad is None else grad.unbind(0)


def joined(parameters: list[Tensor]) -> Tensor:
    """The parameters as one tensor [E, ...] with their gradients: in place where they lie evenly, else
    (and under torch.compile, which knows no addresses) as a copy."""
    if torch.compiler.is_compiling() or over(parameters) is None:
        return torch.stack(parameters)
    joined: Tensor = _Joined.apply(*parameters)  # type: ignore[no-untyped-call]
    return joined


def lay_evenly(parameters: Sequence[Any]) -> bool:
    """Moves indexed parameters into one storage, unless they lie so already; whether they were moved."""
    if not parameters or not parameters[0].is_meta and over(parameters) is not None:
        return False
    for parameter, part in zip(parameters, torch.stack([p.detach() for p in parameters])):
        parameter.data = part
    return True


def refresh(model: torch.nn.Module) -> int:
    """Brings up to date what modules derive from their parameters, after parameters have got other memory
    (`p.data = ...`: flat buffers, offloading, a swap). Experts that are a parameter each are laid into one
    storage again, where the operators read them, so that a call copies nothing. Values, parameters and their
    names stay; the number of stacks that were laid is returned.

    Nothing else is kept: under a recipe weights are quantized at each use, so that new values need no
    refresh. Not during a capture of a CUDA graph, which would go on reading the old memory.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise errors.InvalidArgument("refresh: a CUDA graph is being captured, which would read the memory "
                                     "that weights leave; call it before")
    lays = [getattr(m, "_lay_evenly", None) for m in model.modules()]
    return sum(lay() for lay in lays if lay is not None)


def load_other_form(module: Any, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: Any,
                    unexpected: Any, messages: Any) -> None:
    """A load hook: keys of one tensor per expert load into a stack, and the reverse, by the core's
    key_remap. A set that does not fit is left as it is and reported. The caller's dictionary is not
    changed, since the loader works on a copy."""
    path = prefix or "module."
    for name, form in module.forms.items():
        start = prefix + name
        present = [k for k in state_dict if k == start or k.startswith(start) and k[len(start):].isdigit()]
        if module.experts_of(name) is None or set(present) <= {start} and form == "grouped":
            continue
        request = {"keys": [{"name": path + k[len(prefix):], "shape": list(state_dict[k].shape)}
                            for k in present],
                   "modules": [{"name": path[:-1], "experts": module.num_groups}],
                   "form": "packed" if form == "grouped" else "indexed"}
        try:
            moves = _lib.key_remap(request)
        except errors.Error as error:
            messages.append(str(error))
            continue
        if form == "indexed" and present == [start]:
            stack = state_dict.pop(start)
            state_dict.update({f"{start}{e}": part for e, part in enumerate(stack)})
        elif form == "grouped":
            order = [prefix + move["source"]["name"][len(path):]
                     for move in sorted(moves, key=lambda move: move["expert"])]
            state_dict[start] = torch.stack([state_dict.pop(key) for key in order])
    extra = prefix + "_extra_state"
    if extra in state_dict and _is_empty(state_dict[extra]):
        del state_dict[extra]


def _is_empty(extra: Any) -> Any:
    """Whether another library saved nothing under _extra_state."""
    if isinstance(extra, torch.Tensor):
        return extra.numel() == 0
    return extra is None or hasattr(extra, "getbuffer") and extra.getbuffer().nbytes == 0
