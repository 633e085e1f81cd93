"""AdamW in one launch over all tensors of a group, and clipping by the norm of all gradients."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import _tables, errors

__all__ = ["AdamW", "clip_grad_norm_"]


def _gradient(parameter: Tensor) -> Any:
    """main_grad where there is one, else .grad; None: the parameter is left alone."""
    get = getattr(parameter, "get_main_grad", None)
    buffer = get() if get else getattr(parameter, "main_grad", None)
    return parameter.grad if buffer is None else buffer


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (moiety/optim/adamw.h); the bits of the trainer's.

    Parameters are float32, or bfloat16 with a float32 master in the state. Gradients are `main_grad`
    where a parameter has one, else `.grad`; float32 or bfloat16. State keys are torch's (step, exp_avg,
    exp_avg_sq; and master), so either's state_dict loads in the other. state_dtype: of the moments;
    torch.bfloat16 is rounded stochastically with `seed`.

    step(grad_scale=, skip=): float32 scalars on the device; gradients are multiplied by grad_scale, and
    with skip != 0 nothing changes. Nothing waits for a GPU, so a step can be captured, but for the
    first, and whenever a tensor has moved: then the table of addresses is made anew. Hence zero_grad
    sets gradients to zero unless told otherwise.
    """

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, *, state_dtype: torch.dtype = torch.float32,
                 seed: int = 0) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise errors.Unsupported(f"AdamW: state_dtype is {state_dtype}, expected float32 or bfloat16")
        if not eps > 0 or not all(0 <= beta < 1 for beta in betas):
            raise errors.InvalidArgument(f"AdamW: eps is {eps}, betas are {betas}; expected a positive "
                                         "number, and numbers in [0, 1)")
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise errors.InvalidArgument(f"AdamW: lr is {lr}, expected 0 or more")
        self.state_dtype, self.seed = state_dtype, seed
        self._tables: dict[Any, tuple[list[Any], _tables.Table]] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps,
                                  "weight_decay": weight_decay})

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=set_to_none)

    def _state_of(self, p: Any) -> Any:
        state = self.state[p]
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise errors.Unsupported(f"AdamW: a parameter is {p.dtype}, expected float32 or bfloat16")
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        if p.dtype == torch.bfloat16 and "master" not in state:
            state["master"] = p.detach().float().contiguous()
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=self.state_dtype,
                                               memory_format=torch.contiguous_format)
            elif state[name].dtype != self.state_dtype:
                state[name] = state[name].to(self.state_dtype)
        if state["step"].device != p.device:  # torch keeps it on the CPU unless it is capturable
            state["step"] = state["step"].to(p.device, torch.float32)
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        # torch casts what it loads to the parameter's dtype, and may share it with the other optimizer.
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, ours):
            for name, value in state_dict["state"].get(number, {}).items():
                if name in ("master", "exp_avg", "exp_avg_sq"):
                    dtype = torch.float32 if name == "master" else self.state_dtype
                    self.state[p][name] = value.detach().to(p.device, dtype, copy=True).contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: Tensor | None = None,
             skip: Tensor | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            devices = collections.defaultdict(list)
            for p in group["params"]:
                if _gradient(p) is not None:
                    devices[p.device].append(p)
            for device, parameters in devices.items():
                self._step_group((number, device), group, parameters, grad_scale, skip)
        return loss

    def _step_group(self, key: Any, group: Any, parameters: list[Tensor],
                    grad_scale: Tensor | None, skip: Tensor | None) -> None:
        states = [self._state_of(p) for p in parameters]
        rows = [(_gradient(p), s.get("master", p), s["exp_avg"], s["exp_avg_sq"],
                 p if p.dtype == torch.bfloat16 else None) for p, s in zip(parameters, states)]
        beta1, beta2 = group["betas"]
        addresses = [None if t is None else t.data_ptr() for row in rows for t in row]
        addresses += [beta1, beta2, group["eps"]]
        kept = self._tables.get(key)
        if kept is None or kept[0] != addresses:
            names = ("grad", "master", "exp_avg", "exp_avg_sq", "weight")
            table = _tables.Table("moiety_adamw_create", parameters[0].device, beta1=beta1, beta2=beta2,
                                  eps=group["eps"], seed=self.seed,
                                  segments=[dict(zip(names, map(_tables.tensor, row))) for row in rows])
            kept = self._tables[key] = (addresses, table)
        words = self._words(group, states[0]["step"], grad_scale, skip)
        kept[1].call("moiety_adamw_step", words.data_ptr())
        torch._foreach_add_([s["step"] for s in states], 1.0 if skip is None else (skip == 0).float())
        torch.autograd.graph.increment_version(parameters)  # for whoever has saved them

    def _words(self, group: Any, step: Any, grad_scale: Tensor | None, skip: Tensor | None) -> Any:
        """An AdamWStep: s, k1, k2, lr, wd, t, skip; all parameters of a group have taken as many steps."""
        beta1, beta2 = group["betas"]
        t = step.double() + 1
        scale = torch.ones_like(step) if grad_scale is None else grad_scale.reshape(())
        lr = group["lr"]
        lr = lr.to(step) if isinstance(lr, torch.Tensor) else torch.full_like(step, lr)
        words = torch.stack([scale.float(), (1 / (1 - beta1 ** t)).float(), (1 / (1 - beta2 ** t)).float(),
                             lr, torch.full_like(step, group["weight_decay"])])
        skipped = torch.zeros_like(t) if skip is None else (skip.reshape(()) != 0).double()
        return torch.cat([words.view(torch.int32),
                          torch.stack([t, skipped, torch.zeros_like(t)]).to(torch.int32)])


# Tables of clip_grad_norm_ by addresses, the latest last.
_norms: collections.OrderedDict[Any, _tables.Table] = collections.OrderedDict()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scales the gradients (main_grad where there is one, else .grad) so that their norm is at most
    max_norm; returns the norm before, a float64 scalar on their device. The sum has a fixed order
    (moiety/optim/grad_norm.h). Nothing waits for a GPU once the addresses are known."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [g for g in map(_gradient, parameters) if g is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    device = gradients[0].device
    if any(g.device != device for g in gradients):
        raise errors.Unsupported("clip_grad_norm_: gradients are on several devices")
    # A table owns its work area, so it serves one stream.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, *((g.data_ptr(), g.numel(), g.dtype) for g in gradients))
    table = _norms.pop(key, None)
    if table is None:
        table = _tables.Table("moiety_grad_statistics_create", device,
                              grads=[_tables.tensor(g) for g in gradients])
    _norms[key] = table
    if len(_norms) > 8:
        _norms.popitem(last=False)
    out = torch.empty(table.facts["bytes"], dtype=torch.uint8, device=device)
    table.call("moiety_grad_statistics_step", out.data_ptr())
    norm = out[:8].view(torch.float64)[0].sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {g.dtype for g in gradients}:
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
    return norm
